"""Pages of Markdown whose code is run: each Python block in order, and the text behind one is what it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)[^\S\n]*\n(.*?)^```[^\S\n]*$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, the line of the page before its first, its text, and what it is said to print."""

    language: str
    line: int
    text: str
    shown: str | None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page. One of ``text`` with nothing but blanks before it is what a Python block prints."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    for match, after in zip(found, [*found[1:], None], strict=True):
        shown = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        yield Block(match[1], text.count("\n", 0, match.start(2)), match[2], after[2] if after and shown else None)


def facts(text: str) -> list[str]:
    """Lines without what predictions decide, times, ratios of them and knobs, without the policy that tests run under,
    and without the widths of columns."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("knobs ", "limits: "))]
    whole = re.sub(r"─+", "─", "\n".join(lines))
    whole = re.sub(r"\b[\d.]+ (s|ms|us|ns)\b", "TIME", whole)
    whole = re.sub(r"\b[\d.]+x\)", "RATIO)", whole)
    return [" ".join(line.split()) for line in whole.splitlines() if line.strip()]


def run_page(path: Path, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> int:
    """Run every Python block in the namespace ``names``, and compare what it prints with the text block behind it.
    Without a GPU, ``device="cuda"`` in a block is the CPU; with one, what such a block prints is not compared. The
    number of blocks that ran."""
    gpu, where = torch.cuda.is_available(), path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    torch.manual_seed(0)
    capsys.readouterr()
    count = 0
    for block in blocks(path):
        if block.language != "python":
            continue
        code = block.text if gpu else block.text.replace('device="cuda"', 'device="cpu"')
        exec(compile("\n" * block.line + code, str(path), "exec"), names)
        printed = capsys.readouterr().out
        if block.shown is not None and not (gpu and '"cuda"' in code):
            assert facts(printed) == facts(block.shown), f"{where}:{block.line} prints\n{printed}"
        count += 1
    return count
