"""``python -m openconv.bench.report``: write the tables of README.md and docs/results.md from what was recorded.

Generated parts stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; everything else is left as it is.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..cpu.memory import LARGE
from ..files import write_atomic
from .results import Record, geometric_mean, read, results_folder

__all__ = ["choices", "details", "main", "render", "replace_part", "summary"]


Key = tuple[str, ...]


def _grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _kind(record: Record) -> str:
    """What sort of layer it is."""
    if record.suite == "overhead":
        return "tiny problem (the call itself)"
    problem = record.parsed()
    if problem.c == problem.k == 1 and problem.n == 1:
        return "one-channel image filter"
    if problem.is_depthwise:
        return f"depthwise {'x'.join(map(str, problem.filter))}"
    if math.prod(problem.filter) == 1:
        return "1x1" if math.prod(problem.stride) == 1 else "1x1, stride 2"
    if problem.stride == problem.filter:
        return "patches (stride = filter)"
    return f"dense {'x'.join(map(str, problem.filter))}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---" if at == 0 else "---:" for at in range(len(head))]
    return "\n".join([_row(head), _row(rule), *(_row(row) for row in rows)])


def summary(records: Sequence[Record]) -> str:
    """Per sort of layer and pass: how many times faster than each peer, as geometric mean, and the worst and best."""
    rows = []
    for (kind, direction), group in sorted(_grouped(records, lambda r: (_kind(r), r.parsed().direction)).items()):
        for peer in ("torch", "opencv"):
            ratios = [value for r in group if (value := r.ratio(peer))]
            if ratios:
                span = f"{min(ratios):.2f} to {max(ratios):.2f}"
                slower = sum(value < 1 for value in ratios)
                mean = f"**{geometric_mean(ratios):.2f}**"
                rows.append((f"{kind}, {direction}", peer, str(len(ratios)), mean, span, str(slower)))
    return _table(("layer", "against", "layers", "times faster, mean", "worst to best", "slower"), rows)


def choices(records: Sequence[Record]) -> str:
    """How often the engine chosen by predicted cost was the fastest, or near it; of layers, not of tiny problems."""
    many = [r for r in records if len(r.engines) > 1 and r.suite != "overhead"]
    near = sum(r.regret <= 1.15 for r in many)
    worst = max((r.regret for r in many), default=1.0)
    return (
        f"Of {len(many)} problems that more than one engine takes, the choice by predicted cost was within 15% of the "
        f"fastest engine in {near}; the worst choice took {worst:.2f} times as long as the fastest."
    )


def details(records: Sequence[Record]) -> str:
    """Every layer, losses included."""
    peers = sorted({name for r in records for name in r.seconds if "." not in name})
    head = ("problem", "engine", "us", "p20 to p80", *(f"{p} us" for p in peers), *(f"x {p}" for p in peers), "regret")
    rows: list[tuple[str, ...]] = []
    for r in records:
        if r.chosen not in r.seconds:
            rows.append((f"`{r.problem}`", f"{r.chosen}: wrong"))
            continue
        took = r.seconds[r.chosen]
        theirs = [f"{r.seconds[p]['median'] * 1e6:.0f}" if p in r.seconds else "" for p in peers]
        ratios = [f"{value:.2f}" if (value := r.ratio(p)) else "" for p in peers]
        spread = f"{took['p20'] * 1e6:.0f} to {took['p80'] * 1e6:.0f}"
        ours = (f"`{r.problem}`", r.chosen, f"{took['median'] * 1e6:.0f}", spread)
        rows.append((*ours, *theirs, *ratios, f"{r.regret:.2f}"))
    return _table(head, rows)


def _machine(records: Sequence[Record]) -> str:
    machine = records[0].machine
    memory = "" if machine.get("kept_bytes", 1) else ", every result on new memory"
    return f"{machine['device']}, {machine['isa']}, {machine['threads']} threads, torch {machine['torch']}{memory}"


def replace_part(text: str, name: str, content: str) -> str:
    """The text with a generated part replaced; ValueError if it has no such part."""
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"there is no part '<!-- begin {name} -->' ... '<!-- end {name} -->'")
    return re.sub(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.DOTALL)


def render() -> dict[Path, str]:
    """The files with generated parts, and what should stand in them."""
    from ..support import support_markdown

    root = results_folder().parents[1]
    folders = {p: [r for f in sorted(p.glob("*.jsonl")) for r in read(f)] for p in sorted(results_folder().iterdir())}
    short: list[str] = []
    head = (
        "# Results\n\nGenerated from `benchmarks/results` by `make docs`. `x torch` is torch's time over ours, both in "
        "one process; `regret` the time of the chosen engine over that of the fastest. Times are medians of repeated "
        f"calls, each of which allocates its result: openconv's results of {LARGE >> 20} MiB and more then lie in "
        "memory that an earlier one has left, while torch asks for new pages. The first of its size does not: see "
        '"every result on new memory".\n'
    )
    long = [head]
    for records in filter(None, folders.values()):
        title = _machine(records)
        short += [f"**{title}**", "", summary(records), "", choices(records), ""]
        long += [f"## {title}", "", choices(records), ""]
        for (suite,), group in _grouped(records, lambda r: (r.suite,)).items():
            long += [f"### {suite}", "", details(group), ""]
    readme = replace_part((root / "README.md").read_text(), "engines", support_markdown())
    readme = replace_part(readme, "results", "\n".join(short).rstrip())
    return {root / "README.md": readme, root / "docs" / "results.md": "\n".join(long)}


def main() -> int:
    """Rewrite the generated parts; says which files changed."""
    for path, new in render().items():
        changed = not path.exists() or path.read_text() != new
        if changed:
            write_atomic(path, new)
        print(f"{path.name}: {'rewritten' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
