"""The page: one HTML file with the traces of a problem, and of many small ones to choose from. It needs no network.

The page's own parts lie beside this file: ``page.html`` is the frame, ``page.css`` the looks, ``page.js`` what moves.
``rule.js`` is the rule of :func:`openconv.trace.model.element` once more, by which walks become elements, and
``sums.js`` adds up what steps do. Traces share most of their walks and steps, so each is stored once, in a pool.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..cuda.device import CudaDevice
from ..files import write_atomic
from ..problem import DIRECTIONS, Problem
from .model import Block, Launch, Move, Step, Trace, Walk
from .tracers import TRACERS, knobs_named, reasons_against, search_space, trace_engine

__all__ = ["CHOICES", "DEFAULT", "Choice", "chosen_problem", "page_data", "render_page", "write_page"]

DEFAULT = "fprop n1 c8 h12 w40 k8 r3 s3 pad1 f16 nhwc"
"""What is shown if no problem is given: two tiles of ``cuda.tiled`` beside each other."""

_CHANNELS = 8
_MOST_KNOBS = 5
_LARGE = 100_000  # characters of JSON, from which on it is compressed


@dataclass(frozen=True)
class Choice:
    """One control of the catalogue: its key in the page's address, its label, and its values."""

    key: str
    label: str
    values: tuple[str, ...]


CHOICES = (
    Choice("image", "Image", ("6", "8", "12", "12x40")),
    Choice("filter", "Filter", ("1", "3", "5")),
    Choice("stride", "Stride", ("1", "2")),
    Choice("padding", "Padding", ("0", "1", "2")),
    Choice("dilation", "Dilation", ("1", "2")),
    Choice("groups", "Groups", ("1", "2", "depthwise")),
)


def chosen_problem(direction: str, values: Sequence[str]) -> str:
    """The problem of one value for each of :data:`CHOICES`, as text."""
    image, taps, stride, padding, dilation, groups = values
    height, width = image.split("x") if "x" in image else (image, image)
    return (
        f"{direction} n1 c{_CHANNELS} h{height} w{width} k{_CHANNELS} r{taps} s{taps} stride{stride} pad{padding} "
        f"dil{dilation} g{_CHANNELS if groups == 'depthwise' else groups} f16 nhwc"
    )


# -- data -----------------------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """Values that are stored once, and known by their numbers."""

    values: list[Any] = field(default_factory=list)
    places: dict[Hashable, int] = field(default_factory=dict)

    def place(self, value: Any) -> int:
        """The number of a value: a string, or a tuple of numbers and such tuples."""
        at = self.places.get(value)
        if at is None:
            at = self.places[value] = len(self.values)
            self.values.append(value)
        return at


class _Encoder:
    """Traces as numbers of pools."""

    def __init__(self) -> None:
        kinds = ("texts", "axes", "walks", "moves", "steps", "lists", "blocks", "launches")
        self.pools = {kind: _Pool() for kind in kinds}
        self.text, self.axis, self.walk_, self.move_, self.step_, self.list_, self.block_, self.launch_ = (
            self.pools[kind].place for kind in kinds
        )
        self.traces: list[Any] = []
        self.known: dict[int, tuple[Any, int]] = {}

    def same(self, value: Any, encode: Callable[[Any], int]) -> int:
        """What was encoded before, if it is the same object: blocks share their steps."""
        found = self.known.get(id(value))
        if found is None or found[0] is not value:
            found = self.known[id(value)] = (value, encode(value))
        return found[1]

    def walk(self, walk: Walk) -> int:
        axes = tuple(self.axis((self.text(a.name), a.count, a.start, a.step)) for a in walk.axes)
        row = (walk.row, walk.inner) if walk.row else ()
        return self.walk_((axes, walk.lo, walk.hi, *row))

    def walks(self, walks: Sequence[Walk]) -> tuple[int, ...]:
        return tuple(self.same(walk, self.walk) for walk in walks)

    def move(self, move: Move) -> int:
        words = tuple(self.text(word) for word in (move.tensor, move.to, move.slot, move.met))
        return self.move_((*words, move.of, self.walks(move.walks)))

    def step(self, step: Step) -> int:
        loads, stores = (tuple(self.same(move, self.move) for move in moves) for moves in (step.loads, step.stores))
        terms = -1 if step.terms is None else self.walks(step.terms)
        return self.step_((self.text(step.text), loads, terms, stores, step.points))

    def block(self, block: Block) -> int:
        steps = self.same(block.steps, lambda steps: self.list_(tuple(self.same(step, self.step) for step in steps)))
        words = self.text(block.makes), self.text(block.part)
        return self.block_((block.launch, block.index, self.walks(block.outputs), steps, *words))

    def launch(self, launch: Launch) -> int:
        owner = (self.text(launch.owner.unit), launch.owner.terms) if launch.owner else ()
        words = tuple(self.text(word) for word in (launch.name, launch.source, launch.does))
        return self.launch_((*words, launch.grid, launch.block, launch.shared, owner))

    def trace(self, trace: Trace) -> int:
        """The number of a trace in the page."""
        transforms = trace.transforms
        made: dict[str, Any] = {
            "engine": self.text(trace.engine), "knobs": self.text(trace.knobs),
            "launches": [self.launch(launch) for launch in trace.launches],
            "blocks": [self.block(block) for block in trace.blocks],
            "notes": [self.text(note) for note in trace.notes],
            "sizes": [[self.text(name), size] for name, size in trace.sizes.items()],
        }  # fmt: skip
        if transforms is not None:
            made["transforms"] = self.text(json.dumps([transforms.sizes, transforms.at, transforms.g, transforms.bt]))
        self.traces.append(made)
        self.known.clear()
        return len(self.traces) - 1


def _facts(problem: Problem) -> dict[str, Any]:
    """What the page needs to know of a problem."""
    sizes = ("n", "c", "k", "groups", "spatial", "filter", "stride", "dilation", "out", "direction", "macs")
    return {
        **{name: getattr(problem, name) for name in sizes}, "low": [low for low, _ in problem.padding],
        "high": [high for _, high in problem.padding], "floor": problem.min_bytes, "text": str(problem),
        "bytes": problem.dtypes, "layouts": problem.layouts,
    }  # fmt: skip


Progress = Callable[[int, int], None]


def page_data(
    problem: Problem, device: CudaDevice, *, engine: str | None = None, knobs: str | None = None, alone: bool = False,
    progress: Progress = lambda done, of: None,
) -> dict[str, Any]:  # fmt: skip
    """All that the page shows: the problem's three passes with some knobs of each engine, and the catalogue."""
    encoder, given = _Encoder(), {}
    combinations = [] if alone else list(itertools.product(*(choice.values for choice in CHOICES)))
    count = len(DIRECTIONS) * (1 + len(combinations))
    for at, direction in enumerate(DIRECTIONS):
        own = knobs if direction == problem.direction else None
        given[direction] = _passed(problem, direction, device, encoder, engine, own)
        progress(at + 1, count)
    catalogue, aliases = [], _Pool()
    entries: dict[int, Any] = {}
    for number, (direction, values) in enumerate(itertools.product(DIRECTIONS, combinations)):
        at = aliases.place(_canonical(chosen_problem(direction, values)))
        if at not in entries:
            entries[at] = _entry(aliases.values[at], device, encoder)
        catalogue.append(at)
        progress(len(DIRECTIONS) + number + 1, count)
    return {
        "engines": [[tracer.engine, tracer.label] for tracer in TRACERS.values()],
        "choices": [[choice.key, choice.label, choice.values] for choice in CHOICES],
        "passes": DIRECTIONS, "given": given, "direction": problem.direction, "engine": engine,
        "catalogue": catalogue, "entries": list(entries.values()), "traces": encoder.traces, "device": device.arch,
        "pools": {kind: pool.values for kind, pool in encoder.pools.items()},
    }  # fmt: skip


def _canonical(text: str) -> str:
    """The same for all texts of a problem; of one that cannot be, with the reason."""
    try:
        problem = Problem.parse(text)
    except ValueError as error:
        return f"!{error}"
    if set(problem.filter) == {1}:
        problem = problem.with_(dilation=1)
    return str(problem)


def _passed(
    problem: Problem, direction: str, device: CudaDevice, encoder: _Encoder, engine: str | None, knobs: str | None
) -> dict[str, Any]:
    """One pass of the given problem: several traces of each engine, the wanted knobs first."""
    try:
        same = problem.with_(direction=direction)
    except ValueError as error:
        return {"refused": str(error)}
    found: list[Any] = []
    for name in TRACERS:
        if reasons := reasons_against(same, name, device):
            found.append(encoder.text("; ".join(reasons)))
            continue
        some = _some(search_space(same, name, device))
        if knobs and name == engine:
            first = knobs_named(knobs, search_space(same, name, device))
            some = [first, *(other for other in some if other != first)]
        found.append([encoder.trace(trace_engine(same, name, device, each)) for each in some])
    return {"facts": _facts(same), "engines": [[v] if isinstance(v, int) else v for v in _signed(found)]}


def _signed(found: Sequence[Any]) -> Iterator[Any]:
    """Traces as they are, refusals as negative numbers of texts."""
    for value in found:
        yield ~value if isinstance(value, int) else value


def _some(space: Sequence[Any]) -> list[Any]:
    """A few knobs that differ: the default, the last, and those between at equal distances."""
    if len(space) <= _MOST_KNOBS:
        return list(space)
    places = [round(at * (len(space) - 1) / (_MOST_KNOBS - 1)) for at in range(_MOST_KNOBS)]
    return [space[place] for place in dict.fromkeys(places)]


def _entry(text: str, device: CudaDevice, encoder: _Encoder) -> dict[str, Any]:
    """One problem of the catalogue, with the default knobs."""
    if text.startswith("!"):
        return {"refused": text[1:]}
    problem, found = Problem.parse(text), []
    for name in TRACERS:
        if reasons := reasons_against(problem, name, device):
            found.append([~encoder.text("; ".join(reasons))])
        else:
            found.append([encoder.trace(trace_engine(problem, name, device))])
    return {"facts": _facts(problem), "engines": found}


# -- the file -------------------------------------------------------------------------------------------------------


@cache
def _part(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def render_page(data: dict[str, Any]) -> str:
    """The whole page."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    if len(text) > _LARGE:
        kind, text = "gzip", base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    else:  # that no HTML parser can read as the end of its element, or as a comment in it
        kind, text = "plain", text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    page = _part("page.html")
    scripts = {name: _part(f"{file}.js") for name, file in (("rule", "rule"), ("sums", "sums"), ("script", "page"))}
    for name, part in {"style": _part("page.css"), **scripts, "kind": kind, "data": text}.items():
        page = page.replace(f"/*{name}*/", part)
    return page


def write_page(path: Path, data: dict[str, Any]) -> Path:
    """Write the page; returns the path."""
    return write_atomic(path, render_page(data))
