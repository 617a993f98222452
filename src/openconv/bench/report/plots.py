"""Plots of a run: ratios to torch, the roofline, speed against size, and a map of the fastest engine.

Colours are those of Okabe and Ito, which readers with any colour vision can tell apart; marks differ as well. Each
function returns a figure, or None where the records have nothing to draw.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log2, prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...files import write_atomic
from ...units import seconds_text
from ..results import Record, geometric_mean
from .drawing import COLOURS, TEXT, looks, new_figure, png, style
from .errors import draw_errors
from .runs import DIRECTION_ORDER, Run, base_name, grouped, layer_family, problem_of
from .winners import draw_winners

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "draw_bars", "draw_engine_map", "draw_growth", "draw_ratios", "draw_roofline", "draw_rooflines", "write_plots",
]  # fmt: skip

_FAST, _SLOW = "#0072b2", "#d55e00"
_PEER_COLOURS = ("#8a8f98", "#000000", "#a0522d", "#6a3d9a")
_PASS_MARKS = {"fprop": "o", "dgrad": "v", "wgrad": "s"}
_PEER_MARKS = ("x", "+", "1", "2", "3", "4", "|", "_")
_FAMILIES = ("1x1", "dense", "depthwise", "patches", "image filter", "tiny", "grouped")


def write_plots(run: Run, folder: Path) -> list[Path]:
    """Draw everything that the records of a run allow into ``folder``; returns the paths."""
    drawings: dict[str, Callable[[Run], Figure | None]] = {
        "ratios": draw_ratios, "roofline": draw_roofline, "growth": draw_growth, "engines": draw_engine_map,
        "map": draw_winners,
    }  # fmt: skip
    figures = {kind: draw(run) for kind, draw in drawings.items()} | draw_errors(run.errors, run.title)
    name = re.sub(r"[^\w.-]+", "-", run.name).strip("-")
    return [
        write_atomic(folder / f"{name}-{kind}.png", png(figure))
        for kind, figure in figures.items()
        if figure is not None
    ]


# -- ratios -----------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """The variants of one layer, in one line: passes, batch sizes, layouts and dtypes."""

    label: str
    ratios: list[tuple[float, str]]

    @property
    def mean(self) -> float:
        return geometric_mean(ratio for ratio, _ in self.ratios) or 1.0


def _rows(records: Sequence[Record], peer: str) -> list[_Row]:
    """One row a layer, the slowest in the mean first."""
    rows = []
    for label, group in grouped(records, lambda r: r.label or r.problem).items():
        ratios = [(value, problem_of(r).direction) for r in group if (value := r.ratio(peer))]
        if ratios:
            rows.append(_Row(label, ratios))
    return sorted(rows, key=lambda row: row.mean)


def draw_ratios(run: Run) -> Figure | None:
    """How many times as fast as torch each layer is: a row a layer, a mark for each pass, batch size and layout, blue
    where openconv is faster and orange where it is slower. Suites have a panel each, sorted by the mean of a row."""
    suites = {suite: _rows(records, run.reference) for suite, records in grouped(run.chosen, lambda r: r.suite).items()}
    suites = {suite: rows for suite, rows in suites.items() if rows}
    if not suites:
        return None
    columns = _balanced(suites)
    tallest = max(sum(len(suites[name]) + 3 for name in column) for column in columns)
    title = f"How many times as fast as {run.reference}\n{run.title}"
    figure = new_figure((6.4 if len(columns) < 3 else 5.2) * len(columns), max(3.2, 0.155 * tallest + 1.4), title)
    values = [ratio for rows in suites.values() for row in rows for ratio, _ in row.ratios]
    limits = (0.85 * min(*values, 0.8), 1.2 * max(*values, 1.25))
    parts = figure.subfigures(1, len(columns), squeeze=False)[0]
    for part, column in zip(parts, columns, strict=True):
        sizes = [len(suites[name]) + 1 for name in column]
        panels = part.subplots(len(column), 1, height_ratios=sizes, squeeze=False)[:, 0]
        for axes, name in zip(panels, column, strict=True):
            _draw_suite(axes, name, suites[name], limits)
        panels[-1].set_xlabel(f"times as fast as {run.reference}, log axis", fontsize=8)
    _pass_legend(figure, {direction for rows in suites.values() for row in rows for _, direction in row.ratios})
    return figure


def _balanced(suites: dict[str, list[_Row]]) -> list[list[str]]:
    """The suites in columns of nearly the same height: a column for every fifty rows, four at most."""
    count = max(1, min(4, len(suites), round(sum(map(len, suites.values())) / 50)))
    columns: list[list[str]] = [[] for _ in range(count)]
    heights = [0] * count
    for name in sorted(suites, key=lambda name: -len(suites[name])):
        at = heights.index(min(heights))
        columns[at].append(name)
        heights[at] += len(suites[name]) + 3
    return columns


def _draw_suite(axes: Axes, name: str, rows: list[_Row], limits: tuple[float, float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    style(axes)
    axes.axvline(1, color=TEXT, linewidth=1)
    for direction, mark in _PASS_MARKS.items():
        for colour, wanted in ((_FAST, True), (_SLOW, False)):
            points = [
                (ratio, at)
                for at, row in enumerate(rows)
                for ratio, own in row.ratios
                if own == direction and (ratio >= 1) is wanted
            ]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, marker=mark, s=20, color=colour, alpha=0.8, linewidths=0)
    axes.set_xscale("log")
    axes.set_xlim(*limits)
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=7)
    axes.set_title(name, fontsize=9, loc="left", color=TEXT, fontweight="bold")
    decades = limits[1] / limits[0] > 3000
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if decades else (1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _pass_legend(figure: Figure, directions: set[str]) -> None:
    from matplotlib.lines import Line2D

    def entry(mark: str, colour: str, text: str) -> Line2D:
        return Line2D([], [], marker=mark, color=colour, linestyle="", markersize=5, label=text)

    entries = [entry(_PASS_MARKS[name], "#6e7781", name) for name in DIRECTION_ORDER if name in directions]
    entries += [entry("o", _FAST, "faster"), entry("o", _SLOW, "slower")]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8, frameon=False)


# -- roofline and growth ----------------------------------------------------------------------------------------------


def _si(value: float) -> str:
    """``10 G`` of 1e10."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{value / scale:g} {prefix}"
    return f"{value:g}"


def _log_axes(axes: Axes, x: str, y: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    style(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _si(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)


def _scatter(axes: Axes, points: Sequence[tuple[float, float]], *, label: str, mark: str, colour: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        line = {"linewidths": 0.9} if mark in _PEER_MARKS else {"linewidths": 0}
        axes.scatter(x, y, s=22, marker=mark, color=colour, alpha=0.7, label=f"{label} ({len(points)})", **line)


def draw_roofline(run: Run) -> Figure | None:
    """Arithmetic intensity against FLOP/s reached: chosen engines as dots, peers as crosses, and the ceilings that were
    measured along with them."""
    timed = [r for r in run.records if r.seconds and problem_of(r).flops and problem_of(r).min_bytes]
    if not timed:
        return None
    figure = new_figure(9, 6, f"Roofline\n{run.title}")
    axes = figure.subplots()
    for at, peer in enumerate(run.peers):
        mark, colour = _PEER_MARKS[at % len(_PEER_MARKS)], _PEER_COLOURS[at % len(_PEER_COLOURS)]
        _scatter(axes, _reached([(r, peer) for r in timed]), label=peer, mark=mark, colour=colour)
    engines = sorted({base_name(r.chosen) for r in timed if r.chosen})
    for at, engine in enumerate(engines):
        own = [(r, r.chosen) for r in timed if base_name(r.chosen) == engine]
        _scatter(axes, _reached(own), label=engine, mark="o", colour=COLOURS[at % len(COLOURS)])
    _log_axes(axes, "arithmetic intensity, FLOP per byte that must move", "reached, FLOP/s")
    _draw_ceilings(axes, timed)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def draw_rooflines(run: Run) -> Figure:
    """As :func:`draw_roofline`, with every engine that was timed with its default knobs; a hollow mark is PyTorch."""
    timed = [r for r in run.records if r.seconds and problem_of(r).flops and problem_of(r).min_bytes]
    figure = new_figure(9, 6, f"Every engine, and the roofline\n{run.title}")
    axes = figure.subplots()
    for name, look in looks(name for r in timed for name in r.engines if "[" not in name).items():
        reached = _reached((r, name) for r in timed)
        _scatter(axes, reached, label=name, mark=look.mark, colour=look.colour)
    for peer in run.peers[:1]:
        x, y = zip(*_reached((r, peer) for r in timed), strict=True)
        axes.scatter(x, y, s=42, facecolors="none", edgecolors=TEXT, linewidths=0.9, label=f"PyTorch ({len(x)})")
    _log_axes(axes, "arithmetic intensity, FLOP per byte that must move", "reached, FLOP/s of the definition")
    _draw_ceilings(axes, timed)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def draw_bars(run: Run, engines: Sequence[str]) -> Figure:
    """The times of engines and PyTorch for the passes of one layer: a panel a pass, a bar each."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    records = sorted(run.records, key=lambda r: DIRECTION_ORDER[problem_of(r).direction])
    names = [*engines, *(peer for peer in ("torch", "torch_nchw") if any(peer in r.seconds for r in records))]
    figure = new_figure(3.6 * len(records) + 1.4, 0.36 * len(names) + 1.5, f"{records[0].problem}\n{run.title}")
    panels = figure.subplots(1, len(records), squeeze=False, sharey=True)[0]
    for axes, record in zip(panels, records, strict=True):
        style(axes)
        for at, name in enumerate(names):
            took = record.seconds.get(record.chosen if name == "chosen" else name)
            if took:
                axes.barh(
                    at, took["median"], left=0, color=COLOURS[0] if "." in name or name == "chosen" else COLOURS[6]
                )
                text = seconds_text(took["median"])
                axes.annotate(text, (took["median"], at), (4, 0), textcoords="offset points", fontsize=8, va="center")
        axes.set_xscale("log")
        low, high = (pick(took["median"] for took in record.seconds.values()) for pick in (min, max))
        axes.set_xlim(0.5 * low, 6 * high)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_title(problem_of(record).direction, fontsize=9, color=TEXT)
    panels[0].invert_yaxis()
    return figure


def _reached(contestants: Iterable[tuple[Record, str]]) -> list[tuple[float, float]]:
    """Intensity and FLOP/s of contestants, where they were timed."""
    timed = [(problem_of(record), record.seconds.get(name)) for record, name in contestants]
    return [(problem.intensity, problem.flops / took["median"]) for problem, took in timed if took]


def _draw_ceilings(axes: Axes, records: Sequence[Record]) -> None:
    """The copy bandwidth as a slope, and the rate of each dtype that the problems use as its top."""
    copy = max((r.ceilings["copy"] for r in records if r.ceilings.get("copy")), default=0.0)
    peaks: dict[str, float] = {}
    for record in records:
        problem = problem_of(record)
        name = problem.precision if problem.precision in record.ceilings else problem.dtypes[0]
        if rate := record.ceilings.get(name):
            peaks[name] = max(rate, peaks.get(name, 0.0))
    if not copy or not peaks:
        return
    low, high = axes.get_xlim()
    high = max(high, 2 * max(peaks.values()) / copy)
    for peak in peaks.values():
        axes.plot([low, peak / copy, high], [low * copy, peak, peak], color=TEXT, linewidth=1.2, alpha=0.8)
    for peak, text in _peak_labels(peaks):
        axes.annotate(text, (high, peak), xytext=(-4, 4), textcoords="offset points", fontsize=8, ha="right")
    middle = (low * min(peaks.values()) / copy) ** 0.5
    axes.annotate(f"copy: {_rate(copy)}B/s", (middle, middle * copy), xytext=(-8, 4), textcoords="offset points",
                  fontsize=8, ha="right")  # fmt: skip
    axes.set_xlim(low, high)


def _rate(value: float) -> str:
    return _si(float(f"{value:.3g}"))


def _peak_labels(peaks: dict[str, float]) -> list[tuple[float, str]]:
    """One label for rates so close that theirs would lie on each other, at the highest of them."""
    labels: list[tuple[float, str]] = []
    for name, peak in sorted(peaks.items(), key=lambda item: -item[1]):
        text = f"{name}: {_rate(peak)}FLOP/s"
        if labels and labels[-1][0] / peak < 1.5:
            labels[-1] = (labels[-1][0], f"{labels[-1][1]}; {text}")
        else:
            labels.append((peak, text))
    return labels


def draw_growth(run: Run) -> Figure | None:
    """Speed against size, per sort of layer: FLOP/s against work and bytes/s against least traffic. Small problems
    show what a call costs, large ones where the machine gives no more."""
    timed = [(r, took["median"]) for r in run.records if (took := r.seconds.get(r.chosen or run.reference))]
    timed = [(r, seconds) for r, seconds in timed if problem_of(r).flops and problem_of(r).min_bytes]
    if not timed:
        return None
    whose = "openconv" if run.chosen else run.reference
    figure = new_figure(12, 5.4, f"Speed of {whose} against size\n{run.title}")
    left, right = figure.subplots(1, 2)
    _log_axes(left, "work, FLOP", "reached, FLOP/s")
    _log_axes(right, "least traffic, bytes", "reached, bytes/s")
    for family, colour in zip(_FAMILIES, COLOURS, strict=False):
        own = [(problem_of(r), seconds) for r, seconds in timed if layer_family(r) == family]
        work = [(float(p.flops), p.flops / seconds) for p, seconds in own]
        traffic = [(float(p.min_bytes), p.min_bytes / seconds) for p, seconds in own]
        _scatter(left, work, label=family, mark="o", colour=colour)
        _scatter(right, traffic, label=family, mark="o", colour=colour)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    return figure


# -- engine map -------------------------------------------------------------------------------------------------------

_Cell = tuple[int, int]


def _octave(value: float) -> int:
    return floor(log2(max(value, 1)))


def _channels_and_pixels(record: Record) -> _Cell:
    problem = problem_of(record)
    return _octave(problem.c), _octave(problem.n * prod(problem.out))


def _channels_and_taps(record: Record) -> _Cell:
    problem = problem_of(record)
    return _octave(problem.c), max(problem.filter)


def draw_engine_map(run: Run) -> Figure | None:
    """Which engine is the fastest where: by channels and pixels, and by channels and filter size. A cell has the colour
    of the engine that is the fastest in most of its problems, whose number stands in it; a ring marks cells in which
    torch is faster still, in the mean. Where openconv has no engine, the peers take their place."""
    records = [r for r in run.records if (r.engines or r.peers)]
    if not records:
        return None
    names = [name for name, _ in Counter(_fastest(r) for r in records).most_common()]
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    figure = new_figure(12.5, 5.8, f"Fastest {'engine' if run.chosen else 'peer'}\n{run.title}")
    left, right = figure.subplots(1, 2)
    slower = [_draw_map(left, records, _channels_and_pixels, colours, run.reference)]
    _label_octaves(left, "input channels", "output pixels of the batch")
    slower.append(_draw_map(right, records, _channels_and_taps, colours, run.reference))
    _label_octaves(right, "input channels", "")
    right.set_ylabel("filter size, taps along its longest axis", fontsize=9)
    _map_legend(figure, colours, run.reference if any(slower) else "")
    return figure


def _fastest(record: Record) -> str:
    """The fastest engine without its knobs, or the fastest peer where there is none."""
    return base_name(_fastest_engine(record) if record.engines else _least(record, record.peers))


def _fastest_engine(record: Record) -> str:
    return _least(record, record.engines)


def _least(record: Record, names: Sequence[str]) -> str:
    return min(names, key=lambda name: record.seconds[name]["median"])


def _draw_map(
    axes: Axes, records: Sequence[Record], cell: Callable[[Record], _Cell], colours: dict[str, str], peer: str
) -> bool:
    """Draw the cells; True if torch is faster in one of them."""
    from matplotlib.patches import Rectangle

    cells = grouped(records, cell)
    # Filter sizes that were not measured get no row.
    heights = (
        {value: at for at, value in enumerate(sorted({y for _, y in cells}))} if cell is _channels_and_taps else {}
    )
    found = False
    for (x, y), group in cells.items():
        row = heights.get(y, y)
        name = Counter(map(_fastest, group)).most_common(1)[0][0]
        axes.add_patch(Rectangle((x - 0.47, row - 0.47), 0.94, 0.94, color=colours[name], linewidth=0))
        axes.text(x, row, str(len(group)), ha="center", va="center", fontsize=8, color="white", fontweight="bold")
        mean = geometric_mean(r.ratio(peer, _fastest_engine(r)) for r in group if r.engines)
        if mean and mean < 1:
            found = True
            axes.scatter([x], [row], s=210, facecolors="none", edgecolors="white", linewidths=1.6)
    xs = [x for x, _ in cells]
    rows = [heights.get(y, y) for _, y in cells]
    axes.set_xlim(min(xs) - 0.7, max(xs) + 0.7)
    axes.set_ylim(min(rows) - 0.7, max(rows) + 0.7)
    if heights:
        axes.set_yticks(list(heights.values()), [str(value) for value in heights])
    return found


def _label_octaves(axes: Axes, x: str, y: str) -> None:
    """Ticks are powers of two: a cell holds from its power up to the next."""
    style(axes)
    axes.grid(False)
    axes.set_xlabel(f"{x} (from this power of two up to the next)", fontsize=9)
    low, high = axes.get_xlim()
    ticks = range(ceil(low), floor(high) + 1)
    axes.set_xticks(list(ticks), [_power(tick) for tick in ticks])
    if y:
        axes.set_ylabel(f"{y} (from this power of two)", fontsize=9)
        low, high = axes.get_ylim()
        ticks = range(ceil(low), floor(high) + 1)
        axes.set_yticks(list(ticks), [_power(tick) for tick in ticks])


def _power(exponent: int) -> str:
    value = 1 << exponent
    return f"{value >> 20} Mi" if value >= 1 << 20 else f"{value >> 10} Ki" if value >= 1 << 10 else str(value)


def _map_legend(figure: Figure, colours: dict[str, str], slower_than: str) -> None:
    from matplotlib.lines import Line2D

    entries = [Line2D([], [], marker="s", linestyle="", markersize=9, color=c, label=n) for n, c in colours.items()]
    if slower_than:
        entries.append(
            Line2D([], [], marker="o", linestyle="", markersize=9, markerfacecolor="none", markeredgewidth=1.6,
                   color="#8a8f98", label=f"ring: {slower_than} is faster still")
        )  # fmt: skip
    figure.legend(handles=entries, loc="outside lower center", ncols=min(len(entries), 6), fontsize=8, frameon=False)
