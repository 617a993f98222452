"""What all plots share: an empty figure, the looks of its axes, and a colour and a mark for each engine.

Colours are those of Okabe and Ito, which readers with any colour vision can tell apart; marks and hatching differ as
well.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...engine import ENGINES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GRID", "TEXT", "Look", "looks", "new_figure", "png", "style"]

TEXT, GRID = "#1f2328", "#d8dee4"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6e7781", "#000000")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_DPI = 130


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure that names the machine; it needs no display and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=11, color=TEXT)
    return figure


def style(axes: Axes) -> None:
    """A light grid instead of a frame."""
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=8, labelcolor=TEXT)
    for side in axes.spines.values():
        side.set_visible(False)


def png(figure: Figure, source: str = "") -> bytes:
    """The figure as a file. ``source``, a digest of what it shows, stands in it as plain text."""
    file = io.BytesIO()
    metadata = {"Source": source} if source else None
    figure.savefig(file, format="png", dpi=_DPI, facecolor="white", metadata=metadata)
    return file.getvalue()


@dataclass(frozen=True)
class Look:
    """How an engine is drawn: beyond the eight colours, areas are hatched and lines differ by their marks."""

    colour: str
    mark: str
    hatch: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each engine, in the order of the registry, those that it does not know behind them by name."""
    order = {entry.partition(":")[0].removeprefix("openconv."): at for at, entry in enumerate(ENGINES)}
    ordered = sorted(set(names), key=lambda name: (order.get(name, len(order)), name))
    hatches = ("", "///", "...", "xxx")
    return {
        name: Look(COLOURS[at % len(COLOURS)], _MARKS[at % len(_MARKS)], hatches[at // len(COLOURS) % len(hatches)])
        for at, name in enumerate(ordered)
    }
