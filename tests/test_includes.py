"""Marks that bring lines of the repository into pages: what they find, and what they say when they do not."""

from pathlib import Path

import pytest

from openconv.bench.report.includes import Excerpt, expand, fenced, find, language, marks

PYTHON = '''\
"""A module."""

import functools


@functools.cache
def first(n):
    return n  # the end


class Box:
    def area(self):
        def inner():
            return 1

        return inner()


class Disc:
    def area(self):
        return 3
'''

KERNEL = """\
// Load: lines to shared memory.
for (;;) {

    // Compute: sums in registers.
    x += 1;
    // Store.
}

"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(PYTHON)
    (tmp_path / "src/k.cu").write_text(KERNEL)
    return tmp_path


def test_lines_between_two_anchors_lose_their_indentation_and_blank_ends(root: Path) -> None:
    found = find(root, '<!-- include: src/k.cu from "// Compute" to "// Store" -->')
    assert found == Excerpt("src/k.cu", 4, 5, "// Compute: sums in registers.\nx += 1;\n")
    assert find(root, '<!-- include: src/k.cu from "// Load" to "// Compute" -->').last == 2  # not the blank line 3


def test_without_a_second_anchor_the_lines_go_to_the_end(root: Path) -> None:
    assert find(root, '<!-- include: src/k.cu from "x += 1" -->') == Excerpt(
        "src/k.cu", 5, 7, "    x += 1;\n    // Store.\n}\n"
    )


def test_anchors_may_have_quotes(root: Path) -> None:
    (root / "q.cu").write_text('#include "common/a.cuh"\nint x;\n"to"\n')
    assert find(root, '<!-- include: q.cu from "#include "common/a.cuh"" to ""to"" -->').last == 2


def test_definitions_come_with_decorators_and_methods_by_their_class(root: Path) -> None:
    first = find(root, "<!-- include: src/a.py def first -->")
    assert (first.first, first.last) == (6, 8)
    assert first.text == "@functools.cache\ndef first(n):\n    return n  # the end\n"
    assert find(root, "<!-- include: src/a.py def Disc.area -->").text == "def area(self):\n    return 3\n"
    assert find(root, "<!-- include: src/a.py def inner -->").first == 13


@pytest.mark.parametrize(
    "mark, said",
    [
        ('<!-- include: src/k.cu from "// Nowhere" -->', "no line of 'src/k.cu' contains '// Nowhere'"),
        ('<!-- include: src/k.cu from "// Store" to "// Load" -->', "behind line 6 ('// Store') contains '// Load'"),
        ('<!-- include: src/k.cu from "// Load" to "Load:" -->', "behind line 1"),  # the next line, not the same
        ('<!-- include: src/none.cu from "x" -->', "'src/none.cu' cannot be read (FileNotFoundError)"),
        ('<!-- include: ../secret from "x" -->', "outside of the repository"),
        ("<!-- include: src/a.py def second -->", "defines no 'second'"),
        ("<!-- include: src/a.py def area -->", "more than once (Box.area in line 12, Disc.area in line 20)"),
        ("<!-- include: src/k.cu def first -->", "wants a Python file"),
        ("<!-- include: src/a.py -->", "is no mark; wanted"),
        ("<!-- include: src/a.py def first and more -->", "is no mark; wanted"),
    ],
)
def test_what_is_not_found_is_said(root: Path, mark: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        find(root, mark)
    assert said in str(caught.value)


def test_a_page_gets_code_blocks_in_place_of_its_marks(root: Path) -> None:
    page = 'Before.\n<!-- include: src/k.cu from "// Compute" to "// Store" -->\nAfter.\n'
    block = '```cuda title="src/k.cu, lines 4 to 5" linenums="4"\n// Compute: sums in registers.\nx += 1;\n```'
    assert expand(root, page) == f"Before.\n\n{block}\n\nAfter.\n"
    with pytest.raises(ValueError, match=r"line 2: .*defines no 'gone'"):
        expand(root, "Text.\n<!-- include: src/a.py def gone -->\n")


def test_marks_in_code_are_left_and_marks_beside_text_are_errors(root: Path) -> None:
    shown = "```text\n<!-- include: src/none def x -->\n```\nWrite `<!-- include: PATH def NAME -->` there.\n"
    assert list(marks(shown)) == []
    assert expand(root, shown) == shown
    with pytest.raises(ValueError, match=r"line 1: .* alone on its line"):
        list(marks("See <!-- include: src/a.py def first -->\n"))
    with pytest.raises(ValueError, match="wanted <!-- include"):
        list(marks("<!-- include src/a.py def first -->\n"))


def test_a_fence_is_longer_than_those_inside() -> None:
    assert fenced("```\nx\n```\n", "markdown") == "````markdown\n```\nx\n```\n````"
    assert [language(path) for path in ("a/b.cuh", "a.py", "Makefile", "LICENSE")] == [
        "cuda", "python", "makefile", "text"
    ]  # fmt: skip
