"""Errors against float64: a figure over the length of the sum, and a table of the worst."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, floor, isfinite, log, log2
from typing import TYPE_CHECKING

from ...problem import DIRECTIONS, Problem
from ..errors import ROUNDED, ErrorRecord
from ..results import geometric_mean
from .drawing import TEXT, Look, looks, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["by_figure", "draw_errors", "error_table"]

_MEASURES = {
    "rms": "rms error, share of the\nlargest sum(|x|·|w|)",
    "max": "largest error, share of the\nlargest sum(|x|·|w|)",
    "l2": "relative L2 error",
}
_Points = list[tuple[float, float]]


def by_figure(records: Sequence[ErrorRecord]) -> dict[str, list[ErrorRecord]]:
    """The records of each figure by its name: ``errors`` of f32, ``errors-f16`` of f16."""
    found: dict[str, list[ErrorRecord]] = {}
    for record in records:
        dtype = _dtype(record)
        found.setdefault("errors" + f"-{dtype}" * (dtype != "f32"), []).append(record)
    return found


def draw_errors(records: Sequence[ErrorRecord], title: str) -> dict[str, Figure]:
    """A figure for each dtype, by its name; none of no records.

    A column a pass, a row a measure, a line an engine: the geometric mean of the problems whose sums are about as long
    (from one power of two to the next), each of which is a faint mark. Below all of them lies float64 rounded to the
    dtype of the result.
    """
    return {name: _draw(own, title) for name, own in by_figure(records).items()}


def _dtype(record: ErrorRecord) -> str:
    return Problem.parse(record.problem).result_dtype


def _draw(records: Sequence[ErrorRecord], title: str) -> Figure:
    passes = _by_pass(records)
    look: dict[str, Look] = looks(name for record in records for name in record.error if "." in name)
    height = 2.5 * len(_MEASURES) + 1.2
    figure = new_figure(4.2 * len(passes) + 0.6, height, f"Error against float64, {_dtype(records[0])}\n{title}")
    panels = figure.subplots(len(_MEASURES), len(passes), sharex="col", sharey="row", squeeze=False)
    for row, (measure, text) in enumerate(_MEASURES.items()):
        for axes, (direction, own) in zip(panels[row], passes.items(), strict=True):
            _draw_panel(axes, own, measure, look)
            if row == 0:
                axes.set_title(direction, fontsize=10, color=TEXT, fontweight="bold")
            if row == len(_MEASURES) - 1:
                axes.set_xlabel("products in a sum", fontsize=9)
        panels[row][0].set_ylabel(text, fontsize=9)
    handles = {
        line.get_label(): line for axes in panels.flat for line in axes.get_lines() if line.get_label()[0] != "_"
    }
    order = [*look, *(name for name in handles if name not in look)]
    shown = [handles[name] for name in order if name in handles]
    figure.legend(handles=shown, loc="outside lower center", ncols=min(len(shown), 6), fontsize=9, frameon=False)
    return figure


def _by_pass(records: Iterable[ErrorRecord]) -> dict[str, list[ErrorRecord]]:
    found: dict[str, list[ErrorRecord]] = {name: [] for name in DIRECTIONS}
    for record in records:
        found[Problem.parse(record.problem).direction].append(record)
    return {name: own for name, own in found.items() if own}


def _draw_panel(axes: Axes, records: Sequence[ErrorRecord], measure: str, look: dict[str, Look]) -> None:
    style(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for name, points in _points(records, measure).items():
        x, y = zip(*_means(points), strict=True)
        if name == ROUNDED:
            axes.plot(x, y, ":", color=TEXT, linewidth=1.6, label="float64, rounded", zorder=5)
            continue
        own = look.get(name)
        if own is None:  # torch
            axes.plot(x, y, "--", color=TEXT, marker="x", markersize=5, linewidth=1.2, label=name, zorder=4)
        else:
            axes.plot(
                x, y, color=own.colour, marker=own.mark, markersize=5, linewidth=1.3, label=name, zorder=3,
                markerfacecolor="white", markeredgewidth=1.2,
            )  # fmt: skip
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=7, color=own.colour, alpha=0.3, linewidths=0, zorder=2)


def _points(records: Sequence[ErrorRecord], measure: str) -> dict[str, _Points]:
    """Length and error of each contestant's problems. Where a result was exact or not finite, there is no place for it
    on a log axis."""
    found: dict[str, _Points] = {}
    for record in records:
        for name, error in record.error.items():
            if error[measure] > 0 and isfinite(error[measure]):
                found.setdefault(name, []).append((record.terms, error[measure]))
    return found


def _means(points: _Points) -> _Points:
    """The geometric means of points whose lengths lie between two powers of two."""
    octaves: dict[int, _Points] = {}
    for point in points:
        octaves.setdefault(floor(log2(point[0])), []).append(point)
    return [
        tuple(exp(sum(map(log, values)) / len(values)) for values in zip(*octaves[at], strict=True))  # type: ignore[misc]
        for at in sorted(octaves)
    ]


def error_table(records: Sequence[ErrorRecord], title: str) -> Table:
    """Each contestant's mean and worst error in each pass, and whether one is beyond its bound."""
    from .tables import plain_table

    caption = (
        "relative L2 error, geometric mean, and in brackets the largest single error as a share of max sum(|x|*|w|)"
    )
    passes = list(_by_pass(records))
    shown = plain_table(title, ("dtype", "engine"), passes, caption=caption)
    shown.add_column("wrong", justify="right")
    for group in by_figure(records).values():
        own, dtype = _by_pass(group), _dtype(group[0])
        names = dict.fromkeys(name for record in group for name in record.error)
        for name in sorted(names, key=lambda name: ("." not in name, name == ROUNDED)):
            cells = [_cell([r.error[name] for r in own.get(each, ()) if name in r.error]) for each in passes]
            wrong = sum(name in record.wrong for record in group)
            shown.add_row(dtype, name, *cells, f"[red]{wrong} WRONG[/]" if wrong else "0")
    return shown


def _cell(errors: Sequence[dict[str, float]]) -> str:
    if not errors:
        return ""
    mean = geometric_mean(error["l2"] for error in errors if isfinite(error["l2"])) or 0.0
    return f"{mean:.1e} ({max(error['max'] for error in errors):.1e})"
