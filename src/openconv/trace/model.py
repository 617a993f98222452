"""Trace: what the blocks of an engine load, multiply and store, step by step, as ranges of loop variables.

All loops of a convolution are over the same variables:

    n g            image, group
    c k            input and output channel, within the group
    d h w          place in x          o p q    place in y          t r s    tap of the filter

A place of x follows from one of y and a tap, x = y * stride - padding + tap * dilation, and the other way around where
that divides. So a :class:`Walk`, which is a range of a few variables in an order, says which elements a load brings,
which results a block owns and which terms of their sums a step adds. Everything that the page shows is worked out from
walks by the one rule of :func:`element`; engines' tracers say nothing else. Two walks over the same variable add up: a
tile's corner and a place within the tile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import DTYPE_BYTES, Problem

__all__ = [
    "Axis", "Block", "Launch", "Matrices", "Move", "Names", "Owner", "Step", "Totals", "Trace", "Walk", "axis_list",
    "box", "element", "elements", "names", "one", "products", "result_axes", "span", "spread", "totals", "whole",
]  # fmt: skip

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_ZERO = np.zeros((), np.int64)


@dataclass(frozen=True)
class Axis:
    """One loop variable: ``start + step * i`` for i below ``count``."""

    name: str
    count: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Walk:
    """Positions ``lo`` to ``hi`` of the axes' values in order, the last axis the fastest. Positions behind the end are
    nothing: a tile that is larger than its problem has some.

    With ``row``, the last ``inner`` axes are a row of ``row`` positions, of which those behind its end are nothing.
    """

    axes: tuple[Axis, ...]
    lo: int
    hi: int
    row: int = 0
    inner: int = 1

    def __len__(self) -> int:
        return self.hi - self.lo

    def values(self) -> tuple[dict[str, Ints], Bools]:
        """Each variable's value at each position, and whether there is something."""
        at = np.arange(self.lo, self.hi)
        counts = [axis.count for axis in self.axes]
        there = np.ones(len(at), bool)
        if self.row:
            within = prod(counts[-self.inner :])
            there &= at % self.row < within
            at = at // self.row * within + np.minimum(at % self.row, within - 1)
        found: dict[str, Ints] = {}
        for axis in reversed(self.axes):
            count = max(1, axis.count)
            at, place = at // count, at % count
            found[axis.name] = found.get(axis.name, 0) + axis.start + axis.step * place
        return found, there & (at == 0) & all(counts)


def one(name: str, value: int) -> Walk:
    """A variable that has one value."""
    return Walk((Axis(name, 1, value),), 0, 1)


def span(name: str, lo: int, hi: int, count: int | None = None) -> Walk:
    """A variable from ``lo`` to ``hi``; values from ``count`` on are nothing."""
    return Walk((Axis(name, hi if count is None else count),), lo, hi)


def box(name: str, start: int, count: int, step: int = 1) -> Walk:
    """A variable over ``count`` places from ``start`` on, which may be outside of the image."""
    return Walk((Axis(name, count, start, step),), 0, count)


@dataclass(frozen=True)
class Move:
    """Elements that are loaded or stored, once for each position of the walks: first those of the block's outputs that
    ``of`` names, then its own.

    ``tensor`` is x, w or y (in a gradient dx, dw or dy), or the name of a workspace. What of x or y is outside of the
    image is a zero that nothing brings. ``met`` names tensors that must have an element there too. A load goes to
    ``registers``, or to a ``slot`` of ``shared`` memory, where it stays until another takes the slot.
    """

    tensor: str
    walks: tuple[Walk, ...] = ()
    of: tuple[int, ...] = ()
    to: str = "registers"
    slot: str = ""
    met: str = ""

    def over(self, block: Block) -> tuple[Walk, ...]:
        """All of its walks."""
        return (*(block.outputs[at] for at in self.of), *self.walks)


@dataclass(frozen=True)
class Owner:
    """Which thread, or which warp, has a result or a product: the sum of ``(position // divide) * times`` over the
    walks that ``terms`` names, outputs first, then terms of the sum; a position counts from the walk's ``lo`` on."""

    unit: str
    terms: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Launch:
    """A kernel and its blocks. Of a library's product neither is known: ``grid`` is empty."""

    name: str
    source: str
    does: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    owner: Owner | None = None


@dataclass(frozen=True)
class Step:
    """What a block does between two moments: loads, products of each of its outputs with ``terms``, stores.
    ``points`` counts multiplications that are no products of the definition: those of transformed values."""

    text: str
    loads: tuple[Move, ...] = ()
    terms: tuple[Walk, ...] | None = None
    stores: tuple[Move, ...] = ()
    points: int = 0


@dataclass(frozen=True)
class Block:
    """One block of a launch, or one tile of a block that has several: its place in the grid, what it makes, its
    steps."""

    launch: int
    index: tuple[int, ...]
    outputs: tuple[Walk, ...]
    steps: tuple[Step, ...]
    makes: str
    part: str = ""


@dataclass(frozen=True)
class Matrices:
    """Transforms of a tile along each axis, as text, for the page; ``m`` outputs of ``r`` taps."""

    sizes: tuple[tuple[int, int], ...]
    at: tuple[tuple[tuple[str, ...], ...], ...]
    g: tuple[tuple[tuple[str, ...], ...], ...]
    bt: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class Trace:
    """One engine on one problem. Blocks come one after the other here; on a device, as many as fit run at a time."""

    problem: Problem
    engine: str
    knobs: str
    launches: tuple[Launch, ...]
    blocks: tuple[Block, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of an element of each workspace."""
    notes: tuple[str, ...] = ()
    transforms: Matrices | None = None

    @cached_property
    def result(self) -> str:
        """x, w or y."""
        return "xwy"[self.problem.result]

    def size(self, tensor: str) -> int:
        """Bytes of an element."""
        at = "xwy".find(tensor)
        return self.sizes[tensor] if at < 0 or len(tensor) != 1 else DTYPE_BYTES[self.problem.dtypes[at]]

    def steps(self) -> Iterator[tuple[Block, Step]]:
        """All of them in order, each with its block."""
        for block in self.blocks:
            for step in block.steps:
                yield block, step


@dataclass(frozen=True)
class Names:
    """The spatial variables of a problem: places of x, places of y, taps."""

    place: tuple[str, ...]
    out: tuple[str, ...]
    taps: tuple[str, ...]


def names(problem: Problem) -> Names:
    """Those of its axes."""
    return Names(*(tuple(letters[-problem.rank :]) for letters in ("dhw", "opq", "trs")))


# -- the rule -------------------------------------------------------------------------------------------------------


def spread(walks: Sequence[Walk]) -> tuple[dict[str, Ints], Bools]:
    """All combinations of the walks' positions, an axis of the arrays for each walk: values, and what is there."""
    found: dict[str, Ints] = {}
    there: Any = np.ones((1,) * len(walks), bool)
    for axis, walk in enumerate(walks):
        shape = [1] * len(walks)
        shape[axis] = len(walk)
        values, here = walk.values()
        there = there & here.reshape(shape)
        for name, value in values.items():
            found[name] = found.get(name, 0) + value.reshape(shape)
    return found, there


def element(problem: Problem, tensor: str, at: dict[str, Ints]) -> tuple[Any, Any]:
    """Which element of x, w or y values of the variables stand for, counted in the order of its shape (channels first),
    and whether there is one."""
    known, groups = names(problem), problem.groups
    c, k = problem.c // groups, problem.k // groups
    at = {"n": _ZERO, "g": _ZERO, "c": _ZERO, "k": _ZERO, **at}
    if tensor == "w":
        shape, axes = problem.w_shape, [at["g"] * k + at["k"], at["c"], *(at[tap] for tap in known.taps)]
        return _place(shape, axes, (at["k"] < k) & (at["c"] < c))
    rule = list(zip(problem.stride, problem.padding, problem.dilation, known.place, known.out, known.taps, strict=True))
    inside: Any = True
    if tensor == "x":
        shape, axes = problem.x_shape, [at["n"], at["g"] * c + at["c"]]
        inside = at["c"] < c
        for stride, (low, _), dilation, place, out, tap in rule:
            axes.append(at[place] if place in at else at[out] * stride - low + at[tap] * dilation)
    else:
        shape, axes = problem.y_shape, [at["n"], at["g"] * k + at["k"]]
        inside = at["k"] < k
        for stride, (low, _), dilation, place, out, tap in rule:
            if out in at:
                axes.append(at[out])
                continue
            way = at[place] + low - at[tap] * dilation
            inside = inside & (way % stride == 0)
            axes.append(way // stride)
    return _place(shape, axes, inside)


def _place(shape: Sequence[int], axes: Sequence[Any], inside: Any) -> tuple[Any, Any]:
    index: Any = 0
    for size, value in zip(shape, axes, strict=True):
        inside = inside & (value >= 0) & (value < size)
        index = index * size + value
    return index, inside


def products(problem: Problem, block: Block, terms: Sequence[Walk]) -> tuple[Ints, Ints, Ints]:
    """The products of a step as elements of x, w and y, one of which is the result that they are added to."""
    at, there = spread((*block.outputs, *terms))
    found = []
    for tensor in "xwy":
        index, inside = element(problem, tensor, at)
        there = there & inside
        found.append(index)
    x, w, y = (np.broadcast_to(index, there.shape)[there] for index in found)
    return x, w, y


def elements(trace: Trace, block: Block, move: Move) -> Ints:
    """What a move moves, an element as often as it does; of a workspace, one zero for each."""
    walks = move.over(block)
    at, there = spread(walks)
    index: Any = np.int64(0)
    if move.tensor in ("x", "w", "y"):
        index, inside = element(trace.problem, move.tensor, at)
        there = there & inside
    for tensor in move.met:
        there = there & element(trace.problem, tensor, at)[1]
    return np.broadcast_to(index, there.shape)[there]


@dataclass(frozen=True)
class Totals:
    """Of a whole trace: bytes loaded and stored, by tensor; products; multiplications of transformed values."""

    loaded: dict[str, int]
    stored: dict[str, int]
    products: int
    points: int
    elements: int
    """Loaded ones, of all tensors."""

    @property
    def reuse(self) -> float:
        """Products for each element that is loaded."""
        return self.products / self.elements if self.elements else 0.0


def totals(trace: Trace) -> Totals:
    """Add a trace up."""
    loaded: dict[str, int] = {}
    stored: dict[str, int] = {}
    done = points = count = 0
    for block, step in trace.steps():
        for moves, into in ((step.loads, loaded), (step.stores, stored)):
            for move in moves:
                moved = len(elements(trace, block, move))
                count += moved if into is loaded else 0
                into[move.tensor] = into.get(move.tensor, 0) + moved * trace.size(move.tensor)
        points += step.points
        if step.terms is not None:
            done += len(products(trace.problem, block, step.terms)[0])
    return Totals(loaded, stored, done, points, count)


# -- what tracers share ---------------------------------------------------------------------------------------------


def axis_list(letters: Iterable[str], sizes: Iterable[int]) -> tuple[Axis, ...]:
    """Whole variables."""
    return tuple(Axis(name, size) for name, size in zip(letters, sizes, strict=True))


def result_axes(problem: Problem, last: bool) -> tuple[Axis, ...]:
    """The result's variables in the order of its memory, channels first or ``last``."""
    known, groups = names(problem), problem.groups
    c, k = problem.c // groups, problem.k // groups
    if problem.direction == "wgrad":
        taps = axis_list(known.taps, problem.filter)
        filters = axis_list("gk", (groups, k))
        return (*filters, *taps, Axis("c", c)) if last else (*filters, Axis("c", c), *taps)
    if problem.direction == "fprop":
        space, channels = axis_list(known.out, problem.out), axis_list("gk", (groups, k))
    else:
        space, channels = axis_list(known.place, problem.spatial), axis_list("gc", (groups, c))
    image = Axis("n", problem.n)
    return (image, *space, *channels) if last else (image, *channels, *space)


def whole(axes: Sequence[Axis]) -> Walk:
    """All positions of some axes."""
    return Walk(tuple(axes), 0, prod(axis.count for axis in axes))
