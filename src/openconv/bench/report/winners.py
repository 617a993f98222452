"""Which engine wins where: the suite ``map``, drawn as filter size against channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...problem import DIRECTIONS, Problem
from ..results import CALLED_ONCE, Record
from .drawing import TEXT, Look, looks, new_figure, style
from .runs import Run, base_name, problem_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SUITE", "draw_winners", "map_records"]

SUITE = "map"
"""The suite whose records are drawn."""

_Panel = tuple[str, str]  # a row of panels: dtype and pass; or a column: sort of layer and layout
_CELL = (0.56, 0.33)  # inches


def map_records(run: Run) -> list[Record]:
    """The records that the map is drawn from: those of its suite in which an engine was timed."""
    return [record for record in run.records if record.suite == SUITE and record.engines]


def draw_winners(run: Run) -> Figure | None:
    """The fastest engine by filter size and channels: a row of panels a pass (and dtype), a column a layout, dense and
    depthwise apart. The colour is the engine; the number says how many times as fast as torch it is. Torch is faster
    where the number stands in a frame; in brackets it is over the runner-up, where torch was not timed; with a star it
    rests on a single call of torch, which took too long for more and was not verified."""
    records = map_records(run)
    if not records:
        return None
    rows = sorted({_row(record) for record in records}, key=lambda row: (row[0] != "f32", row[0], _PASS[row[1]]))
    columns = sorted({_column(record) for record in records})
    channels = {column: _channels([r for r in records if _column(r) == column]) for column in columns}
    filters = sorted({max(problem_of(record).filter) for record in records})
    look = looks(_winner(record) for record in records)
    widths = [len(channels[column]) for column in columns]
    figure = new_figure(
        max(7.0, _CELL[0] * sum(widths) + 0.55 * len(columns) + 0.8),
        _CELL[1] * len(filters) * len(rows) + 0.4 * len(rows) + 1.9,
        f"Fastest engine by filter size and channels\n{run.title}",
    )
    panels = figure.subplots(len(rows), len(columns), squeeze=False, width_ratios=widths)
    marks: set[str] = set()
    for row, line in zip(rows, panels, strict=True):
        for column, axes in zip(columns, line, strict=True):
            own = [record for record in records if (_row(record), _column(record)) == (row, column)]
            marks |= _draw_panel(axes, own, channels[column], filters, look, run.reference)
            if row is rows[0]:
                axes.set_title(", ".join(column), fontsize=10, color=TEXT, fontweight="bold")
            if row is rows[-1]:
                axes.set_xlabel("channels", fontsize=9)
        name = row[1] if len({dtype for dtype, _ in rows}) == 1 else ", ".join(row)
        line[0].set_ylabel(f"{name}\nfilter, taps a side", fontsize=9)
    _legend(figure, look, run.reference, marks)
    return figure


_PASS = {name: at for at, name in enumerate(DIRECTIONS)}


def _row(record: Record) -> _Panel:
    problem = problem_of(record)
    return problem.dtypes[0], problem.direction


def _column(record: Record) -> _Panel:
    problem = problem_of(record)
    return "depthwise" if _is_depthwise(problem) else "dense", problem.layouts[0]


def _is_depthwise(problem: Problem) -> bool:
    return problem.is_depthwise and problem.c > 1


def _channels(records: Sequence[Record]) -> list[int]:
    return sorted({problem_of(record).c for record in records})


def _fastest(record: Record) -> list[str]:
    """The engines that were timed, each once, the fastest first."""
    found: dict[str, str] = {}
    for name in sorted(record.engines, key=lambda name: record.seconds[name]["median"]):
        found.setdefault(base_name(name), name)  # with the default knobs, or with those that were chosen
    return list(found.values())


def _winner(record: Record) -> str:
    return base_name(_fastest(record)[0])


def _draw_panel(
    axes: Axes, records: Sequence[Record], channels: list[int], filters: list[int], look: dict[str, Look], peer: str
) -> set[str]:
    """Draw the cells; returns the marks in use: ``framed``, ``brackets``, ``star``."""
    from matplotlib.patches import Rectangle

    style(axes)
    axes.grid(False)
    marks: set[str] = set()
    for record in records:
        problem, winner = problem_of(record), _winner(record)
        x, y = channels.index(problem.c), filters.index(max(problem.filter))
        best, *others = _fastest(record)
        ratio, text = record.ratio(peer, best), ""
        if ratio:
            text = _ratio_text(ratio)
            if record.notes.get(peer, "").startswith(CALLED_ONCE):
                text += "*"
                marks.add("star")
        elif others:
            text = f"({_ratio_text(record.ratio(others[0], best) or 1.0)})"
            marks.add("brackets")
        own = look[winner]
        axes.add_patch(
            Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=own.colour, hatch=own.hatch, linewidth=0,
                      edgecolor="#ffffff66", label=winner)
        )  # fmt: skip
        ink = "white" if _dark(own.colour) else "black"
        box = {"facecolor": own.colour, "edgecolor": "none", "pad": 0.8} if own.hatch else None
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=ink, bbox=box)
        if ratio and ratio < 1:
            marks.add("framed")
            axes.add_patch(Rectangle((x - 0.38, y - 0.36), 0.76, 0.72, fill=False, edgecolor=ink, linewidth=1.1))
    axes.set_xlim(-0.6, len(channels) - 0.4)
    axes.set_ylim(-0.6, len(filters) - 0.4)
    axes.set_xticks(range(len(channels)), [str(count) for count in channels])
    axes.set_yticks(range(len(filters)), [str(size) for size in filters])
    return marks


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 1.05 else f"{ratio:.2f}"


def _dark(colour: str) -> bool:
    """Whether white reads better on it than black: by the luminance of sRGB, with the eye's weights."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.2


def _legend(figure: Figure, look: dict[str, Look], peer: str, marks: set[str]) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(facecolor=own.colour, hatch=own.hatch, edgecolor="#ffffff66", linewidth=0, label=name)
        for name, own in look.items()
    ]
    meanings = {
        "framed": f"framed: {peer} is faster",
        "brackets": f"in brackets: over the runner-up, {peer} was not timed",
        "star": f"*: by a single call of {peer}, not verified",
    }
    texts = [f"number: times as fast as {peer}", *(text for mark, text in meanings.items() if mark in marks)]
    width = figure.get_figwidth()
    columns = max(1, min(len(entries), int(width / 1.6)))  # inches: the longest names of engines
    figure.legend(
        handles=entries, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False, title_fontsize=8.5,
        title=("   " if width > 10 else "\n").join(texts),
    )  # fmt: skip
