"""Two runs side by side: what got faster, what got slower, and whether it was openconv or the machine that moved.

Problems are matched by their text, openconv's choice with openconv's choice and each peer with itself. A peer does not
change between two commits: where it moved too, the machine did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

from ..results import Record
from .runs import Run
from .tables import Ratios, plain_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["OURS", "Change", "ChangedChoice", "Comparison", "compare_runs", "comparison_tables"]

OURS = "openconv"
"""The name under which the chosen engine, whichever it is, is compared."""


@dataclass(frozen=True)
class Change:
    """One contestant on one problem, before and after: the median, p20 and p80 of each."""

    suite: str
    problem: str
    contestant: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times faster it has become."""
        return self.before["median"] / self.after["median"]

    @property
    def noise(self) -> bool:
        """The two spans from p20 to p80 overlap: repeating the runs could turn the order around."""
        (low, high), (other_low, other_high) = _span(self.before), _span(self.after)
        return low <= other_high and other_low <= high


def _span(seconds: dict[str, float]) -> tuple[float, float]:
    return seconds.get("p20", seconds["median"]), seconds.get("p80", seconds["median"])


@dataclass(frozen=True)
class ChangedChoice:
    """A problem for which another engine is chosen, or the same one with other knobs."""

    suite: str
    problem: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """What changed between two runs."""

    before: str
    after: str
    changes: Sequence[Change]
    new: Sequence[str]
    """Problems that only the later run has."""
    gone: Sequence[str]
    """Problems that only the earlier run has."""
    choices: Sequence[ChangedChoice]
    broken: Sequence[str]
    """``engine on problem`` for each result that is wrong now and was not before."""

    @property
    def contestants(self) -> list[str]:
        """openconv first, then the peers that both runs have."""
        found = {change.contestant for change in self.changes}
        return sorted(found, key=lambda name: (name != OURS, name))

    def of(self, contestant: str, suite: str | None = None) -> list[Change]:
        """The changes of one contestant, of one suite or of all."""
        return [c for c in self.changes if c.contestant == contestant and suite in (None, c.suite)]

    def mean(self, contestant: str, suite: str | None = None) -> Ratios | None:
        """How many times faster a contestant has become, as geometric mean; noise counts like the rest."""
        return Ratios.of(change.ratio for change in self.of(contestant, suite))

    def moved(self, contestant: str) -> list[Change]:
        """The changes beyond noise, those that got slowest first."""
        return sorted((c for c in self.of(contestant) if not c.noise), key=lambda c: (c.ratio, c.problem))


def compare_runs(before: Run, after: Run) -> Comparison:
    """Match the problems of two runs. One that stands in several suites is matched within its suite if it can be."""
    pairs = list(_pairs(before, after))
    old, new = ({r.problem: None for r in run.records} for run in (before, after))
    return Comparison(
        before=_label(before),
        after=_label(after),
        changes=[change for one, other in pairs for change in _changes(one, other)],
        new=[problem for problem in new if problem not in old],
        gone=[problem for problem in old if problem not in new],
        choices=[
            ChangedChoice(other.suite, other.problem, one.chosen or "none", other.chosen or "none")
            for one, other in pairs
            if one.chosen != other.chosen
        ],
        broken=[f"{name} on {other.problem}" for one, other in pairs for name in other.wrong if name not in one.wrong],
    )


def _label(run: Run) -> str:
    """The name, with the commit where it is recorded: two runs of one machine have the same name."""
    commit = str(run.records[0].machine.get("commit", "")) if run.records else ""
    return f"{run.name} {commit[:10]}".strip()


def _pairs(before: Run, after: Run) -> Iterable[tuple[Record, Record]]:
    by_text = {r.problem: r for r in before.records}
    by_suite = {(r.suite, r.problem): r for r in before.records}
    for (suite, problem), record in {(r.suite, r.problem): r for r in after.records}.items():
        if match := by_suite.get((suite, problem)) or by_text.get(problem):
            yield match, record


def _changes(before: Record, after: Record) -> Iterable[Change]:
    names = [(OURS, before.chosen, after.chosen), *((peer, peer, peer) for peer in after.peers)]
    for name, one, other in names:
        if one in before.seconds and other in after.seconds:
            yield Change(after.suite, after.problem, name, before.seconds[one], after.seconds[other])


# -- on the terminal --------------------------------------------------------------------------------------------------


def comparison_tables(found: Comparison, *, most: int = 40) -> list[Table]:
    """The means per suite, what moved beyond noise, changed choices, and the problems of one run only; at most ``most``
    rows of each."""
    tables = [_mean_table(found)]
    tables += [table for name in found.contestants if (table := _moved_table(found, name, most))]
    choices = [(c.suite, c.problem, c.before, c.after) for c in found.choices]
    tables += _list_table("changed choices", ("suite", "problem", "before", "after"), choices, most)
    tables += _list_table("wrong now and not before", ("what",), [(text,) for text in found.broken], most)
    tables += _list_table("only in the later run", ("problem",), [(text,) for text in found.new], most)
    tables += _list_table("only in the earlier run", ("problem",), [(text,) for text in found.gone], most)
    return tables


def _mean_table(found: Comparison) -> Table:
    from rich.markup import escape

    caption = "how many times faster than before, geometric mean (+ faster, - slower, beyond noise)"
    table = plain_table(f"{found.before} to {found.after}", ("suite",), found.contestants, caption=caption)
    suites: list[str | None] = list(dict.fromkeys(c.suite for c in found.changes))
    for suite in [*suites, None] if len(suites) > 1 else suites:
        table.add_row(escape(suite or "all"), *(_mean_cell(found, name, suite) for name in found.contestants))
    return table


def _mean_cell(found: Comparison, contestant: str, suite: str | None) -> str:
    mean = found.mean(contestant, suite)
    if mean is None:
        return "-"
    beyond = [change for change in found.of(contestant, suite) if not change.noise]
    faster = sum(change.ratio > 1 for change in beyond)
    return f"{mean.mean:.3f} (+{faster} -{len(beyond) - faster})"


def _moved_table(found: Comparison, contestant: str, most: int) -> Table | None:
    """The largest changes of a contestant, slower ones in red; None if all of them are noise."""
    from rich.markup import escape

    from ...units import seconds_text

    moved, total = found.moved(contestant), len(found.of(contestant))
    if not moved:
        return None
    shown = sorted(sorted(moved, key=lambda c: -abs(log(c.ratio)))[:most], key=lambda c: c.ratio)
    left = f"; the {len(shown)} largest changes are shown" if len(shown) < len(moved) else ""
    caption = f"{len(moved)} of {total} problems beyond noise{left}"
    numbers = ("before", "after", "times faster")
    table = plain_table(f"{contestant}: faster and slower", ("suite", "problem"), numbers, caption=caption)
    for change in shown:
        times = (seconds_text(change.before["median"]), seconds_text(change.after["median"]))
        ratio = f"[{'green' if change.ratio >= 1 else 'red'}]{change.ratio:.2f}[/]"
        table.add_row(escape(change.suite), escape(change.problem), *times, ratio)
    return table


def _list_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[Table]:
    from rich.markup import escape

    if not rows:
        return []
    left = f"and {len(rows) - most} more" if len(rows) > most else None
    table = plain_table(f"{title}: {len(rows)}", head, caption=left)
    for row in rows[:most]:
        table.add_row(*map(escape, row))
    return [table]
