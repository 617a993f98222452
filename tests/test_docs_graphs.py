"""The guides keep their word: code of docs/graphs.md and docs/cudnn.md runs, and prints what stands below it."""

from __future__ import annotations

import pytest
import torch

from tests.pages import ROOT, facts, run_page


@pytest.mark.parametrize(("page", "least"), [("graphs.md", 12), ("cudnn.md", 1)])
def test_examples_run_and_print_what_the_page_shows(page, least, capsys):
    assert run_page(ROOT / "docs" / page, capsys, {"torch": torch}) >= least


def test_facts_keep_what_is_not_predicted():
    assert facts("a  kernel, 1.2 us\n knobs [a=1]\n") == facts("a kernel, 34 ms\n")
    assert facts("1 kernel, 1.2 us") != facts("2 kernels, 1.2 us")
    assert facts("9 MB moved") != facts("8 MB moved")


def test_a_page_that_does_not_keep_its_word(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nkept = 1\nprint(kept)\n```\n\n```text\n1\n```\n\n```sh\nfalse\n```\n")
    names: dict[str, int] = {}
    assert run_page(page, capsys, names) == 1
    assert names["kept"] == 1
    page.write_text(page.read_text().replace("```text\n1", "```text\n2"))
    with pytest.raises(AssertionError, match="prints\n1"):
        run_page(page, capsys, {})
    page.write_text("\n\n```python\n1 / 0\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page\.md: line 4: ZeroDivisionError: division by zero"):
        run_page(page, capsys, {})
