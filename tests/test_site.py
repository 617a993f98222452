"""The site's pages: all have a place in its navigation, and its hooks do to them what they promise."""

import importlib.util
import json
import logging
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def entries(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else entries(value)


def test_the_navigation_names_all_pages_and_no_others() -> None:
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    tutorial = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tutorial").rglob("*.md")}
    named = list(entries(SETTINGS["nav"]))
    plain = [entry for entry in named if not set(entry) & set("*?[")]
    assert len(plain) == len(set(plain))
    assert not set(plain) - docs - tutorial
    lost = [
        page
        for page in docs | tutorial
        if not any(page.count("/") == entry.count("/") and fnmatchcase(page, entry) for entry in named)
    ]
    assert not lost, "name them in mkdocs.yml, or have a pattern there match them"


def test_the_build_is_strict() -> None:
    assert SETTINGS["strict"]
    assert set(SETTINGS["validation"]["links"].values()) == {"warn"}


def test_nothing_on_the_site_comes_from_another_host() -> None:
    assert SETTINGS["theme"]["font"] is False
    assert not SETTINGS["use_directory_urls"]
    assert any("iframe-worker" in script for script in SETTINGS["extra"]["polyfills"])  # else the plugin names its own
    assert not [line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if "//" in line.split(" # ")[0]]


# -- a small site -----------------------------------------------------------------------------------------------------

PAGES = {
    "docs/index.md": """\
# Home

The [code](../src/a.py), its [second line](../src/a.py#L2), the [folder](../src), the [chapter](../tutorial/01_one.md),
[notes](../NOTES.md), the [notebook](../book.ipynb), and in code `[no](../link.py)`.

<!-- site: [The report](report/report.html). -->

A sentence.<!-- site: One for the site. -->
""",
    "tutorial/01_one.md": """\
# One

It takes
<!--= time("x", "torch") -->49.6 us<!--/-->.
<!-- include: src/a.py def double -->
""",
    "src/a.py": "def double(x):\n    return 2 * x\n",
    "src/.hidden": "",
    "NOTES.md": "# Notes\n\n[the code](src/a.py), [home](docs/index.md)\n",
    "build/report/report.html": "<html></html>",
    "book.ipynb": json.dumps({
        "cells": [
            {"cell_type": "markdown", "source": ["# A notebook\n", "\n", "Its text."]},
            {"cell_type": "code", "source": ["print(6 * 7)"], "outputs": [{"text": ["42\n"]}]},
        ]
    }),
    "mkdocs.yml": f"""\
site_name: small
theme: {{name: mkdocs}}
plugins: []
strict: true
use_directory_urls: false
site_dir: build/docs
validation: {{links: {{anchors: warn, unrecognized_links: warn}}, nav: {{omitted_files: warn}}}}
markdown_extensions:
  - pymdownx.highlight: {{anchor_linenums: true, linenums_style: pymdownx-inline}}
  - pymdownx.superfences
hooks: [{ROOT / "docs/hooks.py"}]
nav:
  - Home: index.md
  - Chapters: ["tutorial/*.md"]
  - Later: ["later/*.md"]
""",
}  # fmt: skip


def build(root: Path, **changed: str) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("pymdownx")
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    for name, text in {**PAGES, **changed}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build_site(load_config(str(root / "mkdocs.yml")))
    return root / "build/docs"


def test_links_of_the_repository_lead_through_the_site(tmp_path: Path) -> None:
    site = build(tmp_path)
    home = (site / "index.html").read_text()
    for link in (
        "source/src/a.py.html", "source/src/a.py.html#__codelineno-0-2", "source/src/index.html", "source/NOTES.html",
        "tutorial/01_one.html", "source/book.ipynb.html", "report/report.html",
    ):  # fmt: skip
        assert f'href="{link}"' in home
    assert "[no](../link.py)" in home  # code is no link
    assert "A sentence. One for the site." in home
    assert 'id="__codelineno-0-2"' in (site / "source/src/a.py.html").read_text()
    notes = (site / "source/NOTES.html").read_text()
    assert 'href="src/a.py.html"' in notes  # a page that is shown is a page: its links lead on
    assert 'href="../index.html"' in notes
    folder = (site / "source/src/index.html").read_text()
    assert 'href="a.py.html"' in folder
    assert ".hidden" not in folder
    assert (site / "report/report.html").read_text() == "<html></html>"
    notebook = (site / "source/book.ipynb.html").read_text()
    assert "Its text." in notebook
    assert "42\n" in notebook


def test_marks_become_what_they_ask_for(tmp_path: Path) -> None:
    chapter = (build(tmp_path) / "tutorial/01_one.html").read_text()
    assert "src/a.py, lines 1 to 2" in chapter
    assert '<span class="k">return</span>' in chapter
    assert "<p>It takes\n49.6 us.</p>" in chapter  # a comment at the head of a line would end the paragraph


@pytest.mark.parametrize(
    "page, said",
    [
        ("[gone](../src/gone.py)", "contains a link '../src/gone.py', but the target is not found"),
        ("[far](../src/a.py#L3)", "does not contain an anchor '#__codelineno-0-3'"),
        ("[out](../../etc/passwd)", "contains an unrecognized relative link '../../etc/passwd'"),
        ("[nowhere](../tutorial/01_one.md#two)", "does not contain an anchor '#two'"),
        ("<!-- include: src/a.py def treble -->", "docs/index.md: line 1: 'src/a.py' defines no 'treble'"),
        ("Text.\n- one\n- two\n", "shows 0 items of lists and a Markdown viewer 2"),
    ],
)
def test_what_leads_nowhere_fails_the_build(
    tmp_path: Path, page: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    exceptions = pytest.importorskip("mkdocs.exceptions")
    with caplog.at_level(logging.WARNING), pytest.raises(exceptions.Abort):
        build(tmp_path, **{"docs/index.md": f"{page}\n"})
    assert said in caplog.text


# -- docstrings -------------------------------------------------------------------------------------------------------

SOURCE = '''
def add(a, b):
    """y[n] = a*w[n] + b*w[n].

    ``a``: the first; see :func:`add`.
    ``b``: the second,
    for instance 2.

    Like this::

        add(1, *more)

    >>> add(1, 2)
    3
    """
'''
RENDERED = """\
y\\[n\\] = a\\*w\\[n\\] + b\\*w\\[n\\].

- ``a``: the first; see <autoref identifier="small.add" optional><code>add</code></autoref>.
- ``b``: the second,
  for instance 2.

Like this:

    add(1, *more)

```pycon
>>> add(1, 2)
3
```"""


def load_docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs/docstrings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docstrings_become_markdown(tmp_path: Path) -> None:
    griffe = pytest.importorskip("griffe")
    (tmp_path / "small.py").write_text(SOURCE)
    add = griffe.load("small", search_paths=[tmp_path])["add"]
    assert load_docstrings().markdown(add.docstring.value, add) == RENDERED
