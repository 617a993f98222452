"""Tables of graphs: a summary of the patterns, every layer of each, networks, and what the host spends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..graphs_results import GraphRecord
from .tables import Ratios, markdown_table, plain_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["graph_details", "graph_means", "graph_tables"]

_OWN = ("fused", "tuned", "captured")
_Cell = Callable[[float], str]


def _grouped(records: Iterable[GraphRecord], kind: str) -> dict[str, list[GraphRecord]]:
    groups: dict[str, list[GraphRecord]] = {}
    for record in records:
        if record.kind == kind:
            groups.setdefault(record.pattern, []).append(record)
    return groups


def _others(records: Sequence[GraphRecord]) -> list[str]:
    """Whom the fused graphs are compared with: unfused first, then torch, then the rest."""
    found = {name for record in records for name in record.seconds if name not in _OWN}
    return sorted(found, key=lambda name: (name != "unfused", not name.startswith("torch"), name))


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"


# -- Markdown ---------------------------------------------------------------------------------------------------------


def graph_means(records: Sequence[GraphRecord]) -> list[str]:
    """A paragraph and tables that sum the records up; nothing of none."""
    if not records:
        return []
    explanation = (
        "A pattern is one graph around a layer; `unfused` runs its nodes one by one with kernels of openconv's own, "
        "`cudnn` is the best plan of cuDNN's frontend for the same graph, and `torch` the same operators called "
        "eagerly. Ratios are their time over that of the fused graph."
    )
    parts = ["### Graphs", explanation]
    parts += [table for table in (_pattern_means(records), _networks(records), _overheads(records)) if table]
    return parts


def _pattern_means(records: Sequence[GraphRecord]) -> str:
    rows = []
    for pattern, group in _grouped(records, "pattern").items():
        for other in _others(group):
            for name, some in (("all", group), ("memory-bound", [r for r in group if r.memory_bound])):
                if found := Ratios.of(r.ratio(other) for r in some):
                    span = f"{found.worst:.2f} to {found.best:.2f}"
                    rows.append(
                        (pattern, other, name, str(found.count), f"**{found.mean:.2f}**", span, str(found.slower))
                    )
    head = ("pattern", "against", "layers", "count", "times faster, mean", "worst to best", "slower")
    return markdown_table(head, rows, words=3) if rows else ""


def _networks(records: Sequence[GraphRecord]) -> str:
    rows = []
    for pattern, group in _grouped(records, "network").items():
        for record in group:
            for name, took in sorted(record.seconds.items(), key=lambda item: item[1]["median"]):
                ratio = record.ratio(name)
                rows.append((
                    f"{pattern} {record.problem}", name, f"{took['median'] * 1e3:.2f}",
                    f"{record.images / took['median']:.0f}", str(record.kernels.get(name, "")),
                    f"{ratio:.2f}" if ratio else "",
                ))  # fmt: skip
    head = ("network", "run by", "ms", "images/s", "kernels", "time over fused")
    return markdown_table(head, rows, words=2) if rows else ""


def _overheads(records: Sequence[GraphRecord]) -> str:
    rows = []
    for group in _grouped(records, "overhead").values():
        for record in group:
            for name, took in record.seconds.items():
                rows.append((f"{record.label}, {record.problem}", name.replace("_", " "), _micro(took["median"])))
    return markdown_table(("graph", "the host's time", "us"), rows, words=2) if rows else ""


def graph_details(records: Sequence[GraphRecord]) -> list[str]:
    """A heading and a table for each pattern: every layer, losses in bold."""
    parts = []
    for pattern, group in _grouped(records, "pattern").items():
        others = _others(group)
        tuned = any("tuned" in r.seconds for r in group)
        head = ["problem", "bound by", "kernels", "fused us", *["tuned us"] * tuned, *(f"{o} us (x)" for o in others)]
        rows = [
            [
                f"`{r.problem}`", "memory" if r.memory_bound else "math",
                f"{r.kernels.get('unfused', '')} to {r.kernels.get('fused', '')}",
                *(_own_cell(r, name) for name in ["fused", *["tuned"] * tuned]), *(_other_cell(r, o) for o in others),
            ]
            for r in group
        ]  # fmt: skip
        parts += [f"## graph {pattern}", markdown_table(head, rows, words=2)]
    return parts


def _own_cell(record: GraphRecord, name: str) -> str:
    if name in record.wrong:
        return "**wrong**"
    return _micro(record.seconds[name]["median"]) if name in record.seconds else ""


def _other_cell(record: GraphRecord, name: str) -> str:
    """Another's time and, in brackets, how many times faster the fused graph is: in bold where it is not."""
    if name in record.wrong:
        return "wrong"
    if name not in record.seconds:
        return "no plan" if name == "cudnn" else ""
    time, ratio = _micro(record.seconds[name]["median"]), record.ratio(name)
    if ratio is None:
        return time
    return f"{time} ({ratio:.2f})" if ratio >= 1 else f"{time} (**{ratio:.2f}**)"


# -- on the terminal --------------------------------------------------------------------------------------------------


def graph_tables(records: Sequence[GraphRecord]) -> list[Table]:
    """The same for the terminal: one line a layer, then networks and overheads."""
    from rich.markup import escape

    tables = []
    for pattern, group in _grouped(records, "pattern").items():
        others = _others(group)
        shown = plain_table(pattern, ("layer",), ("bound", "kernels", "us", *(f"x {other}" for other in others)))
        for r in group:
            kernels = f"{r.kernels.get('unfused')} to {r.kernels.get('fused')}"
            wrong = f" WRONG: {', '.join(r.wrong)}" if r.wrong else ""
            cells = ("memory" if r.memory_bound else "math", kernels, _own_cell(r, "fused").strip("*"))
            shown.add_row(escape(r.label) + f"[red]{escape(wrong)}[/]", *cells, *(_ratio_cell(r, o) for o in others))
        tables.append(shown)
    for record in records:
        if record.kind == "pattern":
            continue
        unit: _Cell = _micro if record.kind == "overhead" else (lambda took: f"{took * 1e3:.2f}")
        counts = f"{record.kernels.get('unfused')} to {record.kernels.get('fused')} kernels"
        shown = plain_table(
            f"{record.pattern} {record.problem}: {counts}", ("what",),
            ("us" if record.kind == "overhead" else "ms", *["images/s"] * (record.images > 0)),
        )  # fmt: skip
        for name, took in record.seconds.items():
            rate = [f"{record.images / took['median']:.0f}"] if record.images else []
            shown.add_row(escape(name), unit(took["median"]), *rate)
        for name in record.wrong:
            shown.add_row(f"[red]{escape(name)} WRONG[/]", *[""] * (2 if record.images else 1))
        tables.append(shown)
    return tables


def _ratio_cell(record: GraphRecord, other: str) -> str:
    value = record.ratio(other)
    return f"[{'green' if value >= 1 else 'red'}]{value:.2f}[/]" if value else "-"
