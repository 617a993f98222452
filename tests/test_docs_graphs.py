"""The guides keep their word: code of docs/graphs.md and docs/cudnn.md runs, and prints what stands below it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> Iterator[tuple[str, int, str, str | None]]:
    """The name, first line and code of each Python block, and the text that follows at once."""
    text = (DOCS / page).read_text()
    found = list(_BLOCK.finditer(text))
    for at, match in enumerate(found):
        if match[1] != "python":
            continue
        after = found[at + 1] if at + 1 < len(found) else None
        shown = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        yield page, text.count("\n", 0, match.start(2)), match[2], after[2] if shown and after is not None else None


def facts(text: str) -> list[str]:
    """Lines without what predictions decide, times, ratios of them and knobs, without the policy that tests run under,
    and without the widths of columns."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("knobs ", "limits: "))]
    whole = re.sub(r"─+", "─", "\n".join(lines))
    whole = re.sub(r"\b[\d.]+ (s|ms|us|ns)\b", "TIME", whole)
    whole = re.sub(r"\b[\d.]+x\)", "RATIO)", whole)
    return [" ".join(line.split()) for line in whole.splitlines() if line.strip()]


@pytest.mark.parametrize("page", ["graphs.md", "cudnn.md"])
def test_examples_run_and_print_what_the_page_shows(page, capsys):
    gpu, names = torch.cuda.is_available(), {"torch": torch}
    torch.manual_seed(0)
    count = 0
    for name, line, code, shown in blocks(page):
        if not gpu:
            code = code.replace('device="cuda"', 'device="cpu"')
        exec(compile("\n" * line + code, str(DOCS / name), "exec"), names)
        printed = capsys.readouterr().out
        if shown is not None and not (gpu and '"cuda"' in code):
            assert facts(printed) == facts(shown), f"docs/{name}:{line}"
        count += 1
    assert count >= {"graphs.md": 12, "cudnn.md": 1}[page]


def test_facts_keep_what_is_not_predicted():
    assert facts("a  kernel, 1.2 us\n knobs [a=1]\n") == facts("a kernel, 34 ms\n")
    assert facts("1 kernel, 1.2 us") != facts("2 kernels, 1.2 us")
    assert facts("9 MB moved") != facts("8 MB moved")
