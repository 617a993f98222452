"""The guides keep their word: their code runs and prints what stands below it, and command lines anywhere exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import openconv
from openconv.engine import engines, unregister
from tests.pages import ROOT, blocks, command_lines, parse_command, rewritten, run_page

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "tutorial").glob("*.md"))]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_code_runs_and_prints_what_the_guide_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    before = engines()
    try:
        with openconv.policy(tuning="heuristic"):  # as for a reader; other tests leave the databases out
            assert run_page(page, capsys, {"torch": torch, "tmp_path": tmp_path}) >= 5
    finally:
        for engine in set(engines()) - set(before):
            unregister(engine.name)
    assert engines() == before


def test_what_a_block_prints_takes_the_place_of_what_it_printed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```text\n3\n```\n\n```python\nprint(2 + 2)\n```\n\n```text\n3\n```\n\n```text\n3\n```\n")
    found = [block for block in blocks(page) if block.language == "python"]
    assert [block.shown for block in found] == ["3\n"]
    changed = rewritten(page.read_text(), found[0], "4   \nand\n")
    assert changed == "```text\n3\n```\n\n```python\nprint(2 + 2)\n```\n\n```text\n4\nand\n```\n\n```text\n3\n```\n"


def test_there_are_guides():
    assert len(GUIDES) >= 6


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_links_of_guides_lead_somewhere(page):
    def anchors(target: Path) -> set[str]:
        heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}

    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_exist(page):
    wrong = []
    for line, words in command_lines(page):
        try:
            parse_command(words)
        except ValueError as error:
            wrong.append(f"{page.relative_to(ROOT)}:{line}: {error}")
    assert not wrong, "\n".join(wrong)


def test_there_are_command_lines_to_look_at():
    found = [words for page in PAGES for _, words in command_lines(page)]
    assert len(found) > 25
    assert {"bench", "tune", "explain"} <= {words[0] for words in found}


def test_command_lines_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Say `openconv doctor --json`, or `openconv tuning show`.\n\n"
        '```sh\nA_B=1 openconv explain "fprop n1" \\\n  --json  # why\nopenconv doctor | openconv engines\n```\n'
    )
    found = [(3 + 1, ["explain", "fprop n1", "--json"]), (6, ["doctor"]), (6, ["engines"]), (1, ["doctor", "--json"])]
    assert list(command_lines(page)) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tunning"], "no command"),
        (["tuning"], "no command"),
        (["tuning", "shew"], "tuning has no command"),
        (["doctor", "--jason"], "--jason"),
        (["report", "--layers", "some"], "some"),
        (["bench", "resnet51"], "no suite 'resnet51'"),
        (["explain", "fprop n1 c1"], "fprop n1 c1"),
    ],
)
def test_a_command_line_that_is_wrong(words, said):
    with pytest.raises(ValueError, match=said):
        parse_command(words)


def test_a_command_line_that_is_right():
    assert parse_command(["tuning", "export", "a.json", "--device", "h200"]) == ["tuning", "export"]
    assert parse_command(["bench", "fprop n1 c1 h9 w9 k1 r3 s3", "--peer", "none"]) == ["bench"]
