"""Tables of records: Markdown for the documents, and what `openconv report` prints. Losses are in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..results import Record, geometric_mean
from .runs import DIRECTION_ORDER, Run, grouped, layer_kind, problem_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Ratios", "baseline", "choices", "details", "heuristic_loss", "layer_tables", "markdown_table", "mean_table",
    "passes", "plain_table", "share_of_roofline", "summary",
]  # fmt: skip


@dataclass(frozen=True)
class Ratios:
    """How many times faster than a peer, over several problems."""

    count: int
    mean: float
    worst: float
    best: float
    slower: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Ratios | None:
        """Of those that are there; None if none is."""
        kept = [value for value in values if value]
        mean = geometric_mean(kept)
        return cls(len(kept), mean, min(kept), max(kept), sum(v < 1 for v in kept)) if mean else None


# -- Markdown ---------------------------------------------------------------------------------------------------------


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table whose first columns hold words and whose others hold numbers, aligned to the right."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---" if at < words else "---:" for at in range(len(head))]
    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 999.5 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _ordered(groups: dict[tuple[str, str], list[Record]]) -> list[tuple[tuple[str, str], list[Record]]]:
    """By name, and within it in the order of the passes."""
    return sorted(groups.items(), key=lambda item: (item[0][0], DIRECTION_ORDER[item[0][1]]))


def passes(run: Run, peer: str) -> str:
    """A row for each suite and a column for each pass: mean, worst to best, how many are slower."""
    rows = []
    suites = grouped(run.chosen, lambda r: r.suite)
    for suite, records in sorted(suites.items()):
        cells = []
        for direction in DIRECTION_ORDER:
            found = Ratios.of(r.ratio(peer) for r in records if problem_of(r).direction == direction)
            cells.append(_pass_cell(found) if found else "")
        if any(cells):
            rows.append((suite, *cells))
    return markdown_table(("suite", *DIRECTION_ORDER), rows) if rows else ""


def _pass_cell(found: Ratios) -> str:
    slower = f"{found.slower} of {found.count} slower" if found.slower else f"all {found.count} faster"
    return f"**{found.mean:.2f}** ({found.worst:.2f} to {found.best:.2f}), {slower}"


def summary(run: Run) -> str:
    """Per sort of layer and pass: how many times faster than each peer, as geometric mean, and the worst and best."""
    rows = []
    for (kind, direction), group in _ordered(grouped(run.chosen, lambda r: (layer_kind(r), problem_of(r).direction))):
        for peer in run.peers:
            if found := Ratios.of(r.ratio(peer) for r in group):
                span = f"{found.worst:.2f} to {found.best:.2f}"
                mean = f"**{found.mean:.2f}**"
                rows.append((f"{kind}, {direction}", peer, str(found.count), mean, span, str(found.slower)))
    head = ("layer", "against", "layers", "times faster, mean", "worst to best", "slower")
    return markdown_table(head, rows, words=2)


def choices(records: Sequence[Record]) -> str:
    """How often the chosen engine was the fastest, or near it; of layers, not of tiny problems."""
    many = [r for r in records if len(r.engines) > 1 and r.chosen in r.seconds and r.suite != "overhead"]
    if not many:
        return ""
    near = sum(r.regret <= 1.15 for r in many)
    worst = max(r.regret for r in many)
    how = "by predicted cost" if all(r.source == "heuristic" for r in many) else "of openconv"
    return (
        f"Of {len(many)} problems that more than one engine takes, the choice {how} was within 15% of the "
        f"fastest engine in {near}; the worst choice took {worst:.2f} times as long as the fastest."
    )


def heuristic_loss(records: Sequence[Record], worst: int = 5) -> str:
    """What predictions alone would lose against choices that measurements have settled, and where they lose most."""
    lost = [
        (record.seconds[record.heuristic]["median"] / record.seconds[record.chosen]["median"], record)
        for record in records
        if record.source in ("database", "neighbour")
        and record.heuristic in record.seconds
        and record.chosen in record.seconds
    ]
    if not lost:
        return ""
    lost.sort(key=lambda pair: (-pair[0], pair[1].problem))
    mean = geometric_mean(ratio for ratio, _ in lost)
    text = (
        f"Of {len(lost)} problems whose engine was settled by tuning, the choice by predicted cost alone would take "
        f"{mean:.3f} times as long in the geometric mean."
    )
    rows = [(f"`{r.problem}`", r.heuristic, r.chosen, f"{ratio:.2f}") for ratio, r in lost[:worst] if ratio > 1.005]
    if not rows:
        return text
    table = markdown_table(("problem", "by predicted cost", "tuned", "times as long"), rows, words=3)
    return f"{text} It loses most here:\n\n{table}"


def share_of_roofline(records: Iterable[Record], contestant: str) -> float | None:
    """The least time by the ceilings over the time taken, both summed over all problems that have the two."""
    both = [
        (r.roofline[contestant] * r.seconds[contestant]["median"], r.seconds[contestant]["median"])
        for r in records
        if contestant in r.roofline and contestant in r.seconds
    ]
    return sum(least for least, _ in both) / sum(took for _, took in both) if both else None


def baseline(run: Run, *, by_type: bool = False) -> str:
    """What the peers take where openconv has no engine yet: per suite and pass, in all, and torch's share of the
    roofline. ``by_type`` also tells dtypes and layouts apart."""

    def name(record: Record) -> str:
        problem = problem_of(record)
        return f"{record.suite}, {problem.dtypes[0]} {problem.layouts[0]}" if by_type else record.suite

    records = run.baseline
    peers = [peer for peer in run.peers if any(peer in r.seconds for r in records)]
    rows = []
    for (suite, direction), group in _ordered(grouped(records, lambda r: (name(r), problem_of(r).direction))):
        share = share_of_roofline(group, run.reference)
        rows.append((suite, direction, str(len(group)), *(_total(group, peer) for peer in peers), _percent(share)))
    head = ("suite", "pass", "layers", *(f"{peer} ms" for peer in peers), f"{run.reference}, of the roofline")
    return markdown_table(head, rows, words=2) if rows else ""


def _total(records: Sequence[Record], peer: str) -> str:
    """Milliseconds of all problems; with their number where the peer took only some."""
    times = [r.seconds[peer]["median"] for r in records if peer in r.seconds]
    some = f" ({len(times)})" if 0 < len(times) < len(records) else ""
    return f"{_milliseconds(sum(times))}{some}" if times else ""


def _percent(share: float | None) -> str:
    return f"{100 * share:.0f}%" if share is not None else ""


def details(run: Run, records: Sequence[Record]) -> str:
    """Every layer, losses included, in bold."""
    peers = [peer for peer in run.peers if any(peer in r.seconds for r in records)]
    shares = any(r.roofline for r in records)
    head = ["problem", "engine", "us", "p20 to p80", *(f"{peer} us (x)" for peer in peers), "regret"]
    rows = []
    for r in records:
        row = [f"`{r.problem}`", *_own_cells(r), *(_peer_cell(r, peer) for peer in peers)]
        row.append(f"{r.regret:.2f}" if r.chosen in r.seconds else "")
        row += [_percent(r.roofline.get(r.chosen or run.reference))] if shares else []
        rows.append(row)
    return markdown_table(head + ["of the roofline"] * shares, rows, words=2)


def _own_cells(record: Record) -> tuple[str, str, str]:
    """The chosen engine, its median and its spread; engines that were wrong are named."""
    wrong = [name for name in record.wrong if name != record.chosen]
    engine = record.chosen + (f" (wrong: {', '.join(wrong)})" if wrong else "")
    if record.chosen not in record.seconds:
        return f"{engine} **wrong**" if record.chosen else engine, "", ""
    took = record.seconds[record.chosen]
    spread = f"{_microseconds(took.get('p20', took['median']))} to {_microseconds(took.get('p80', took['median']))}"
    return engine, _microseconds(took["median"]), spread


def _peer_cell(record: Record, peer: str) -> str:
    """A peer's time and, in brackets, how many times faster we are: in bold where we are not."""
    if peer not in record.seconds:
        return ""
    time, ratio = _microseconds(record.seconds[peer]["median"]), record.ratio(peer)
    if ratio is None:
        return time
    return f"{time} ({ratio:.2f})" if ratio >= 1 else f"{time} (**{ratio:.2f}**)"


# -- on the terminal --------------------------------------------------------------------------------------------------


def plain_table(title: str, words: Sequence[str], numbers: Sequence[str] = (), *, caption: str | None = None) -> Table:
    """A table without frame lines, which fits eighty columns longer: columns of words, then columns of numbers."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), caption=caption, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in words:
        table.add_column(escape(name), overflow="fold")
    for name in numbers:
        table.add_column(escape(name), justify="right", no_wrap=True)
    return table


def _coloured(value: float | None) -> str:
    return f"[{'green' if value >= 1 else 'red'}]{value:.2f}[/]" if value else "-"


def _mean_cell(found: Ratios | None) -> str:
    if not found:
        return "-"
    return f"{_coloured(found.mean)}" + (f" ([red]{found.slower} slower[/])" if found.slower else "")


def mean_table(run: Run) -> Table:
    """Per suite and pass: the geometric mean of the ratio to each peer, and how many problems are slower."""
    from rich.markup import escape

    caption = "how many times faster than each peer, geometric mean; above 1 openconv is faster"
    shown = plain_table(run.title, ("suite", "pass"), ("problems", f"x {run.reference}"), caption=caption)
    shown.add_column("others")
    shown.add_column("wrong", justify="right")
    groups = _ordered(grouped(run.records, lambda r: (r.suite, problem_of(r).direction)))
    for (suite, direction), group in groups:
        shown.add_row(escape(suite), direction, *_mean_cells(run, group))
    if len(groups) > 1:
        shown.add_section()
        shown.add_row("all", "", *_mean_cells(run, run.records))
    return shown


def _mean_cells(run: Run, records: Sequence[Record]) -> list[str]:
    found = {peer: Ratios.of(r.ratio(peer) for r in records) for peer in run.peers}
    others = [f"{_mean_cell(ratios)} {peer}" for peer, ratios in found.items() if ratios and peer != run.reference]
    wrong = sum(bool(r.wrong) for r in records)
    first = _mean_cell(found.get(run.reference))
    return [str(len(records)), first, "\n".join(others), f"[red]{wrong} WRONG[/]" if wrong else "0"]


def layer_tables(run: Run, *, losses: bool = False) -> list[Table]:
    """A table for each suite with one line a problem; with ``losses`` only of those that are slower than a peer, or
    wrong."""
    kept = [r for r in run.records if not losses or r.wrong or any((r.ratio(p) or 1) < 1 for p in run.peers)]
    what = "slower than a peer, or wrong" if losses else "every problem"
    return [_suite_table(run, f"{suite}: {what}", own) for suite, own in grouped(kept, lambda r: r.suite).items()]


def _suite_table(run: Run, title: str, records: Sequence[Record]) -> Table:
    """One line a problem: the ratio to the reference, and that to the fastest of the other peers."""
    from rich.markup import escape

    shares = any(r.roofline for r in records)
    shown = plain_table(title, ("layer",))
    for name in ("problem", "engine"):
        shown.add_column(name, no_wrap=True)
    for name in ("us", f"x {run.reference}", "regret", *["roofline"] * shares):
        shown.add_column(escape(name), justify="right", no_wrap=True)
    shown.add_column("x fastest other", overflow="fold")
    for r in records:
        problem = problem_of(r)
        own = _microseconds(r.seconds[r.chosen]["median"]) if r.chosen in r.seconds else "-"
        regret = f"{r.regret:.2f}" if r.chosen in r.seconds else "-"
        share = [_percent(r.roofline.get(r.chosen or run.reference)) or "-"] * shares
        label = r.problem if r.suite == "given" else r.label  # a problem given as text has no name but its text
        words = (escape(label), f"{problem.direction} n{problem.n} {problem.dtypes[0]} {problem.layouts[0]}")
        others = [peer for peer in r.peers if peer != run.reference]
        fastest = min(others, key=lambda peer: r.seconds[peer]["median"], default=None)
        against = f"{_against(r, fastest)} {escape(fastest)}" if fastest else ""
        shown.add_row(*words, _engine_cell(r), own, _against(r, run.reference), regret, *share, against)
    return shown


def _against(record: Record, peer: str) -> str:
    """The ratio to a peer; its own time where there is no engine to compare it with."""
    if record.chosen or peer not in record.seconds:
        return _coloured(record.ratio(peer))
    return f"{_microseconds(record.seconds[peer]['median'])} us"


def _engine_cell(record: Record) -> str:
    from rich.markup import escape

    name = escape(record.chosen.partition(".")[2]) or "none"
    if record.chosen in record.wrong:
        return f"{name} [red]WRONG[/]"
    return name + (f" [red]WRONG: {escape(', '.join(record.wrong))}[/]" if record.wrong else "")
