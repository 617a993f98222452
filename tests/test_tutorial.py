"""The tutorial keeps its word: its code runs and prints what stands below it, what it shows and links is there, and the
exercises are graded as they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openconv.bench.report.includes import find
from tests.pages import ROOT, run_page

CHAPTERS = sorted((ROOT / "tutorial").glob("[0-9][0-9]_*.md"))
PAGES = [*CHAPTERS, ROOT / "tutorial" / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
EXERCISES = sorted((ROOT / "tutorial" / "exercises").glob("ex*.py"))
NUMBERS = [f"{number:02}" for number in range(1, 17)]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_INCLUDE = re.compile(r"^<!-- include: .*? -->$", re.MULTILINE)


def name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", CHAPTERS, ids=name)
def test_code_runs_and_prints_what_the_chapter_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    assert run_page(page, capsys, {"torch": torch, "tmp_path": tmp_path}) >= 2


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_sources_that_are_shown_are_found(page):
    for mark in _INCLUDE.findall(page.read_text()):
        assert find(ROOT, mark).text.strip(), mark


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(page.read_text()):
        place = link.partition("#")[0]
        if place and "://" not in link and not (page.parent / place).exists():
            built = {"trace.html"}  # pages that `make docs` makes
            assert Path(place).name in built, f"{page.name}: {link}"


def test_there_are_sixteen_chapters_each_with_an_exercise():
    assert [page.stem[:2] for page in CHAPTERS] == NUMBERS
    for folder, prefix in (("exercises", "ex"), ("exercises", "test_ex"), ("solutions", "ex")):
        found = sorted(path.stem.removeprefix(prefix) for path in (ROOT / "tutorial" / folder).glob(f"{prefix}*.py"))
        assert found == NUMBERS, folder
    contents = (ROOT / "tutorial" / "README.md").read_text()
    assert all(f"({page.name})" in contents for page in CHAPTERS)
    assert all(f"ex{page.stem[:2]}" in page.read_text() for page in CHAPTERS)


def test_every_chapter_shows_shipped_sources_and_recorded_numbers():
    for page in CHAPTERS:
        text = page.read_text()
        assert _INCLUDE.search(text), f"{page.name} includes no source"
        assert "<!-- table: " in text or "<!--= " in text, f"{page.name} has no recorded number"


def _grade(*options: str, folder: Path = ROOT / "tutorial" / "exercises") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line", *options]
    return subprocess.run(
        [*words, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def test_solutions_pass():
    graded = _grade("--solutions")
    assert graded.returncode == 0, graded.stdout[-4000:]
    assert all(f"PASSED tutorial/exercises/test_ex{number}.py" in graded.stdout for number in NUMBERS)


def test_what_nobody_filled_in_fails_and_says_whose_turn_it_is():
    """A grader that passes on an empty exercise grades nothing."""
    graded = _grade()
    assert graded.returncode == 1, graded.stdout[-4000:]
    assert "PASSED" not in graded.stdout
    assert "ERROR" not in graded.stdout
    said = graded.stdout.count("your turn")
    assert said >= len(NUMBERS), graded.stdout[-4000:]


def test_a_forgotten_return_is_said_in_a_sentence(tmp_path):
    """Of the first chapters, which are a learner's first meeting with the graders: no TypeError of the grader's own."""
    for source in (ROOT / "tutorial" / "exercises").glob("*ex0[1-4].py"):
        empty = re.sub(r"raise NotImplementedError\(.*\)", "pass", source.read_text())
        (tmp_path / "tutorial" / "exercises" / source.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tutorial" / "exercises" / source.name).write_text(empty)
    shutil.copy(ROOT / "tutorial" / "exercises" / "conftest.py", tmp_path / "tutorial" / "exercises")
    graded = _grade(folder=tmp_path / "tutorial" / "exercises")
    assert graded.returncode == 1, graded.stdout[-4000:]
    assert "TypeError" not in graded.stdout, graded.stdout[-4000:]
    assert "filter_once returned None; wanted rows" in graded.stdout
    assert "turns(132, 1, 132) is None; wanted (1, 1.0)" in graded.stdout
