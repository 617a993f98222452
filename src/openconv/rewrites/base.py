"""Rewrites: engines that turn a problem into one or several others, and leave those to other engines.

A rewrite says in :meth:`Rewrite.parts` which problems it makes of one, and where their tensors lie in those of the
whole: a :class:`Part` is a problem and, for each of x, w and y, the :class:`Piece` pairs "these indices of mine are
those of the whole". All else follows from that. A tensor that is one piece without gaps is used where it is; any other
is copied to the workspace and back. Traits, workspace, cost and kernels are those of the engines inside, and what the
copies add.

The engine inside is found by asking the registry, as :mod:`openconv.select` does: any proven engine of the device that
takes all the parts, other rewrites among them, but none of a kind that it is already inside of, and at most
:data:`DEPTH` of them one in the other. Which one, and its knobs, are the knobs of the rewrite: so limits on workspace,
accuracy and batch invariance, and the tuner, find their way to what is inside.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits, code_digest, engines, find_engine
from ..epilogue import IDENTITY
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES, empty
from ..units import bytes_text, seconds_text

__all__ = [
    "CALL",
    "DEPTH",
    "Choice",
    "Part",
    "Piece",
    "Rewrite",
    "Rewritten",
    "Span",
    "Wrapper",
    "allowed",
    "named",
    "refuses",
    "runner_of",
    "settings_of",
]

DEPTH = 2
"""How many rewrites may be one in the other."""
CALL = {"cpu": 20e-6, "cuda": 1e-6}
"""Seconds of one inner call besides what its engine predicts: views, buffers, Python, which runs ahead of a GPU."""
_COPY = {"cpu": 3e-6, "cuda": 5e-6}  # seconds of a copy of any size
_STRIDED = {"cpu": 2.0, "cuda": 2.0}  # a line of memory is read for each phase that has a part of it
_UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
_ALIGN = 256
_NAMES = ("x", "w", "y")

Span = tuple[int, int, int]
"""The indices first, first + step, ... along an axis: (first, count, step)."""


@dataclass(frozen=True)
class Piece:
    """Some elements of a part's tensor, and where they are in that of the whole: a span for each axis."""

    mine: tuple[Span, ...]
    whole: tuple[Span, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(count for _, count, _ in self.mine)


@dataclass(frozen=True)
class Part:
    """One inner problem. ``pieces`` has for each of x, w and y where its elements are in that of the whole, or None if
    it is the whole; ``channels`` the first and the number of the result's channels, None for all."""

    problem: Problem
    pieces: tuple[tuple[Piece, ...] | None, ...]
    channels: tuple[int, int] | None = None


@dataclass(frozen=True)
class Choice:
    """An engine and its knobs, for a problem inside."""

    engine: str
    knobs: Any

    def __str__(self) -> str:
        return self.engine if str(self.knobs) == "-" else f"{self.engine}({self.knobs})"

    @property
    def told(self) -> str:
        """For a sentence."""
        return self.engine if str(self.knobs) == "-" else f"{self.engine} [{self.knobs}]"


@dataclass(frozen=True)
class Rewritten(Knobs):
    """``way`` is how the problem is taken apart, where there are several ways, and ``inner`` the engine of each
    different problem inside, that of the largest first. ``invariant``: no batch would lead to another engine."""

    way: Any
    inner: tuple[Choice, ...]
    invariant: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        way = "" if self.way is None else f"{self.way} "
        return f"{way}by={self.inner[0]}"

    def like(self, other: Knobs) -> bool:
        """Places in the lists of two problems may be of different engines."""
        return isinstance(other, Rewritten) and other.inner[0].engine == self.inner[0].engine


def named(name: str) -> Engine:
    """The engine of a choice."""
    found = find_engine(name)
    assert found is not None, f"{name} has been chosen and is gone"
    return found


def allowed(device: Device, within: tuple[str, ...]) -> Iterator[Engine]:
    """Every engine that may run inside of the rewrites ``within``."""
    for engine in engines(device.kind):
        if not engine.proven or (isinstance(engine, Wrapper) and (len(within) >= DEPTH or engine.kind in within)):
            continue
        yield engine


def settings_of(engine: Engine, problem: Problem, device: Device, within: tuple[str, ...]) -> Iterator[Any]:
    """The knobs of an engine inside of the rewrites ``within``; none if it refuses the problem."""
    if isinstance(engine, Wrapper):
        if not any(engine.refusals(problem, device, within)):
            yield from engine.settings(problem, device, within)
    elif not any(engine.refusals(problem, device)):
        yield from engine.knobs(problem, device)


def refuses(engine: Engine, problem: Problem, device: Device) -> bool:
    """Whether an engine does not take a problem as it is. Of a rewrite that is what it says itself, without a look at
    the engines that may be inside of it: one of them may be asking."""
    return any(engine.needs(problem, device) if isinstance(engine, Wrapper) else engine.refusals(problem, device))


def runner_of(problem: Problem, device: Device, choice: Choice) -> Runner:
    """The compiled call of a choice."""
    built: Any = named(choice.engine).build(problem, device, choice.knobs)
    run: Runner = getattr(built, "run", built)  # one launch on a GPU is an object that has its runner
    return run


class Wrapper(Engine):
    """An engine that leaves work to others, which must not come back to it."""

    @abstractmethod
    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        """Refusals that need no look at other engines: cheap, and first."""

    def refusals(self, problem: Problem, device: Device, within: tuple[str, ...] = ()) -> Iterator[str]:
        """Those inside of the wrappers ``within``."""
        return self.needs(problem, device)

    @abstractmethod
    def settings(self, problem: Problem, device: Device, within: tuple[str, ...]) -> Iterator[Any]:
        """The knobs inside of the wrappers ``within``."""

    def knobs(self, problem: Problem, device: Device) -> Iterable[Any]:
        return self.settings(problem, device, ())

    @property
    def kind(self) -> str:
        """The name without the device."""
        return self.name.partition(".")[2]

    @property
    def version(self) -> str:
        """A digest of all engines of the device: any of them may be inside."""
        return _version(engines(self.device))


class Rewrite(Wrapper):
    """Turns a problem into parts that another engine runs."""

    batches_alike: ClassVar[bool] = False
    """Whether the problems inside say all there is to say about batches."""

    # -- what each rewrite says ---------------------------------------------------------------------------------------

    @abstractmethod
    def parts(self, problem: Problem, way: Any) -> Sequence[Part]:
        """The problems inside, in the order in which they run."""

    @abstractmethod
    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        """What is done, for ``explain``: "4 phases as one batch"."""

    def ways(self, problem: Problem, device: Device) -> Iterable[Any]:
        """How the problem may be taken apart, the best first."""
        return (None,)

    def wants(self, engine: Engine, problem: Problem, device: Device) -> bool:
        """Whether an engine that takes the parts is of use."""
        return True

    def view(self, tensor: Tensor, at: int, problem: Problem) -> Tensor:
        """A tensor of the whole as the parts index it: x, w or y, as ``at`` says."""
        return tensor

    # -- the contract of engines --------------------------------------------------------------------------------------

    def refusals(self, problem: Problem, device: Device, within: tuple[str, ...] = ()) -> Iterator[str]:
        reason = ""
        for reason in self.needs(problem, device):
            yield reason
        if reason:
            return
        ranked = _ranked(self, problem, device, within, engines(device.kind))
        if not ranked:
            yield "its engine would be none; wanted one that takes what it is rewritten to"
            return
        work = self.work(problem, ranked[0].way)
        if work.sums and problem.result_dtype in ("f16", "bf16"):
            yield f"dtype of dw is {problem.result_dtype}; sums of several parts want f32"
        if self.takes_epilogue and not work.covered and not problem.epilogue.is_identity:
            yield f"epilogue is {problem.epilogue}; wanted none, as some results are no part's"

    def traits(self, problem: Problem, knobs: Rewritten) -> Traits:
        work = self.work(problem, knobs.way)
        inner = [named(c.engine).traits(p, c.knobs) for p, c in zip(work.problems, knobs.inner, strict=True)]
        bound = max(traits.error_bound for traits in inner)
        if work.sums:
            bound += (len(work.parts) - 1) * _UNIT.get(problem.result_dtype, 0.0)  # a rounding for each addition
        return Traits(
            inner[0].accumulator, bound, all(t.deterministic for t in inner),
            knobs.invariant and all(t.batch_invariant for t in inner), all(t.plain_sum for t in inner),
        )  # fmt: skip

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Rewritten) -> int:
        work = self.work(problem, knobs.way)
        return sum(work.buffers) + _inner_bytes(work, device, knobs)

    def copies(self, problem: Problem, knobs: Rewritten) -> tuple[str, ...]:
        work = self.work(problem, knobs.way)
        found = []
        for at in problem.inputs:
            if elements := work.copied[at]:
                size = bytes_text(elements * DTYPE_BYTES[problem.dtypes[at]])
                found.append(f"copy {_NAMES[at]} for {named(knobs.inner[0].engine).name}, {size}")
        return *found, *named(knobs.inner[0].engine).copies(work.problems[0], knobs.inner[0].knobs)

    def settings(self, problem: Problem, device: Device, within: tuple[str, ...]) -> Iterator[Rewritten]:
        """The first way with the default of each engine, the cheapest first, then with their other knobs; then other
        ways."""
        ranked = _ranked(self, problem, device, within, engines(device.kind))
        yield from ranked
        for way in self.ways(problem, device):
            problems = self.work(problem, way).problems
            for first in ranked:
                inner = _settings(problems, first.inner[0].engine, device, (*within, self.kind))
                for choices in itertools.islice(inner, way == first.way, None):
                    yield Rewritten(way, choices, first.invariant)

    def cost(self, problem: Problem, device: Device, knobs: Rewritten) -> float:
        work, (computing, copying) = self.work(problem, knobs.way), self._seconds(problem, device, knobs)
        return computing + copying + len(work.parts) * CALL[device.kind]

    def _seconds(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[float, float]:
        """What the engines inside take, and the copies."""
        work = self.work(problem, knobs.way)
        computing = sum(
            times * named(c.engine).cost(p, device, c.knobs)
            for p, times, c in zip(work.problems, work.times, knobs.inner, strict=True)
        )
        return computing, work.moved / device.bandwidth + work.strided / device.bandwidth * _STRIDED[
            device.kind
        ] + work.copies * _COPY[device.kind]

    def build(self, problem: Problem, device: Device, knobs: Rewritten) -> Runner:
        work = self.work(problem, knobs.way)
        inner = [runner_of(p, device, c) for p, c in zip(work.problems, knobs.inner, strict=True)]
        return _build(self, problem, device, work, knobs, inner)

    def told(self, problem: Problem, knobs: Rewritten) -> str:
        work, choice = self.work(problem, knobs.way), knobs.inner[0]
        engine = named(choice.engine)
        by = f"{choice.engine}: {inside}" if (inside := engine.told(work.problems[0], choice.knobs)) else choice.told
        behind = f", {_NAMES[problem.result]} then copied to its place" if work.copied[problem.result] else ""
        return f"{self.tell(problem, knobs)}, {'each ' if len(work.parts) > 1 else ''}by {by}{behind}"

    def reasons(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[str, ...]:
        computing, copying = self._seconds(problem, device, knobs)
        work = self.work(problem, knobs.way)
        calls = f"{len(work.parts)} calls" if len(work.parts) > 1 else "one call"
        largest = f"'{work.problems[0]}'"
        run = f"{seconds_text(computing)} for {calls} of {knobs.inner[0].told} on {largest}"
        return (f"{run}, {seconds_text(copying)} for {bytes_text(work.bytes_copied)} of copies",)

    def sources(self, problem: Problem, device: Any, knobs: Rewritten) -> list[Any]:
        """The CUDA kernels of what is inside."""
        work = self.work(problem, knobs.way)
        return [
            source
            for p, c in zip(work.problems, knobs.inner, strict=True)
            for source in named(c.engine).sources(p, device, c.knobs)  # type: ignore[attr-defined]
        ]

    @property
    def summary(self) -> str:
        """That of the rewrite, which is the same on all devices."""
        return (inspect.getdoc(type(self).__mro__[1]) or "").split("\n\n")[0].replace("\n", " ")

    def work(self, problem: Problem, way: Any) -> Work:
        """The parts, and what follows from them."""
        return _work(self, problem, way)


@lru_cache(maxsize=64)
def _version(registry: tuple[Engine, ...]) -> str:
    codes = sorted({code_digest(engine.source) for engine in registry} | {code_digest(__file__)})
    return hashlib.sha256(repr(codes).encode()).hexdigest()[:12]


# -- what follows from the parts ----------------------------------------------------------------------------------


def _gapless(whole: Sequence[int], spans: Sequence[Span], layout: str) -> bool:
    """Whether these spans of a tensor are a tensor of this layout where they lie."""
    order = range(len(whole)) if layout == "nchw" or len(whole) == 3 else (0, *range(2, len(whole)), 1)
    stride = wanted = 1
    for axis in reversed(order):
        _, count, step = spans[axis]
        if count > 1 and stride * step != wanted:
            return False
        stride, wanted = stride * whole[axis], wanted * count
    return True


@dataclass(frozen=True, eq=False)
class Work:
    """The parts of a problem and what they cost beside the engine that runs them.

    ``problems`` are the different ones, the largest first, and ``times`` how often each is run. ``direct`` says of each
    part and tensor whether it lies in that of the whole as it is. ``buffers`` has the bytes of the workspace for copies
    of x, w and y, of operands of the result's shape, and for a sum of dw. ``moved`` and ``strided`` are the bytes read
    and written by ``copies`` copies, the second of those whose elements lie apart. ``sums``: the result is the sum of
    the parts' results; ``covered``: each of its elements is some part's.
    """

    parts: tuple[Part, ...]
    problems: tuple[Problem, ...]
    times: tuple[int, ...]
    direct: tuple[tuple[bool, ...], ...]
    copied: tuple[int, int, int]
    buffers: tuple[int, ...]
    sums: bool
    covered: bool
    moved: float
    strided: float
    copies: int

    @cached_property
    def bytes_copied(self) -> int:
        """What is copied, each byte once."""
        return int(self.moved + self.strided) // 2


@lru_cache(maxsize=512)
def _work(rewrite: Rewrite, problem: Problem, way: Any) -> Work:
    parts = tuple(rewrite.parts(problem, way))
    shapes = [tuple(rewrite.view(torch.empty(shape, device="meta"), at, problem).shape)
              for at, shape in enumerate((problem.x_shape, problem.w_shape, problem.y_shape))]  # fmt: skip
    result = problem.result
    whole = parts[0].pieces[result] is None
    sums = whole and len(parts) > 1
    covered = whole or math.prod(shapes[result]) == sum(
        piece.elements for part in parts for piece in part.pieces[result] or ()
    )
    if not covered:  # what lies between the parts has an epilogue too
        parts = tuple(Part(p.problem.with_(epilogue=IDENTITY), p.pieces, p.channels) for p in parts)
    counts: dict[Problem, int] = {}
    for part in parts:
        counts[part.problem] = counts.get(part.problem, 0) + 1
    problems = sorted(counts, key=lambda p: -p.macs * counts[p])
    direct, copied, buffers = [], [0, 0, 0], [0, 0, 0]
    moved = strided = 0.0
    copies = 0
    for part in parts:
        row = []
        for at, pieces in enumerate(part.pieces):
            inner = part.problem
            shape = (inner.x_shape, inner.w_shape, inner.y_shape)[at]
            one = pieces is None or (
                len(pieces) == 1 and pieces[0].elements == math.prod(shape)
                and _gapless(shapes[at], pieces[0].whole, problem.layouts[at])
            )  # fmt: skip
            row.append(one)
            if pieces is None or one:
                continue
            size = DTYPE_BYTES[problem.dtypes[at]]
            buffers[at] = max(buffers[at], _aligned(math.prod(shape) * size))
            taken = sum(piece.elements for piece in pieces)
            copied[at] += taken
            copies += len(pieces)
            if taken < math.prod(shape) and at != result:
                moved += math.prod(shape) * size  # zeros
                copies += 1
            along = 1 if problem.layouts[at] == "nhwc" and len(shape) > 3 else -1
            apart = any(piece.whole[along][2] > 1 or piece.whole[along][1] == 1 < shape[along] for piece in pieces)
            if apart:
                strided += 2 * taken * size
            else:
                moved += 2 * taken * size
        direct.append(tuple(row))
    size = DTYPE_BYTES[problem.result_dtype]
    result_bytes = math.prod(problem.result_shape) * size
    if sums:
        buffers.append(_aligned(result_bytes))
        moved += 3 * result_bytes * (len(parts) - 1)
    else:
        tensors = sum(operand.kind == "tensor" for operand in problem.epilogue.operands)
        buffers += [buffers[result]] * tensors
        moved += 2 * copied[result] * size * tensors
    if not covered:
        moved += result_bytes
        copies += 1
    return Work(
        parts, tuple(problems), tuple(counts[p] for p in problems), tuple(direct),
        (copied[0], copied[1], copied[2]), tuple(buffers), sums, covered, moved, strided, copies,
    )  # fmt: skip


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _inner_bytes(work: Work, device: Device, knobs: Rewritten) -> int:
    """The workspace of what is inside."""
    return max(
        named(c.engine).workspace_bytes(p, device, c.knobs) for p, c in zip(work.problems, knobs.inner, strict=True)
    )


# -- which engine is inside ---------------------------------------------------------------------------------------


def _settings(
    problems: Sequence[Problem], name: str, device: Device, within: tuple[str, ...]
) -> Iterator[tuple[Choice, ...]]:
    """An engine's knobs for all the problems: those at the same place of its lists, since their values follow the
    sizes. Nothing if it refuses one of them."""
    lists = (settings_of(named(name), problem, device, within) for problem in problems)
    for together in zip(*lists, strict=False):
        yield tuple(Choice(name, knobs) for knobs in together)


@lru_cache(maxsize=512)
def _ranked(
    rewrite: Rewrite, problem: Problem, device: Device, within: tuple[str, ...], registry: tuple[Engine, ...]
) -> tuple[Rewritten, ...]:
    """The first way with each engine that takes its parts and default knobs: the cheapest first."""
    inside = (*within, rewrite.kind)
    found: list[tuple[float, Rewritten]] = []
    way = next(iter(rewrite.ways(problem, device)))
    work = rewrite.work(problem, way)
    for engine in allowed(device, inside):
        if rewrite.takes_epilogue and not engine.takes_epilogue and not work.problems[0].epilogue.is_identity:
            continue
        if not rewrite.wants(engine, problem, device):
            continue
        first = next(_settings(work.problems, engine.name, device, inside), None)
        if first is not None:
            knobs = Rewritten(way, first)
            found.append((rewrite.cost(problem, device, knobs), knobs))
    found.sort(key=lambda each: each[0])
    ranked = tuple(knobs for _, knobs in found)
    if rewrite.batches_alike or not ranked:
        return tuple(Rewritten(knobs.way, knobs.inner, True) for knobs in ranked)
    steady = _steady(rewrite, problem, device, within, registry, ranked)
    return tuple(Rewritten(knobs.way, knobs.inner, knobs.inner[0].engine == steady) for knobs in ranked)


def _steady(
    rewrite: Rewrite, problem: Problem, device: Device, within: tuple[str, ...], registry: tuple[Engine, ...],
    ranked: Sequence[Rewritten],
) -> str:  # fmt: skip
    """The engine that every batch may lead to: the first for a single image that has batch-invariant knobs."""
    if problem.n != 1:
        alone = _ranked(rewrite, problem.with_(n=1), device, within, registry)
        return next((knobs.inner[0].engine for knobs in alone if knobs.invariant), "")
    for knobs in ranked:
        work = rewrite.work(problem, knobs.way)
        engine = named(knobs.inner[0].engine)
        for choices in _settings(work.problems, engine.name, device, (*within, rewrite.kind)):
            both = zip(work.problems, choices, strict=True)
            if all(engine.traits(p, c.knobs).batch_invariant for p, c in both):
                return engine.name
    return ""


# -- running ------------------------------------------------------------------------------------------------------

_Slices = tuple[slice, ...]


def _slices(spans: Sequence[Span]) -> _Slices:
    return tuple(slice(first, first + (count - 1) * step + 1, step) for first, count, step in spans)


@dataclass(frozen=True, eq=False)
class _Place:
    """How a tensor of a part comes about: it is the whole (neither ``view`` nor ``pieces``), a view of it, or a buffer
    at ``start`` of the workspace to be filled from pieces."""

    view: _Slices | None = None
    pieces: tuple[tuple[_Slices, _Slices], ...] | None = None
    zeros: bool = False
    start: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def of(self, whole: Tensor, workspace: Tensor | None) -> Tensor:
        """The part's tensor; a buffer is not filled."""
        if self.pieces is not None:
            assert workspace is not None, "copies lie in the workspace"
            flat = workspace[self.start : self.start + self.bytes].view(self.dtype)
            return flat.as_strided(self.shape, self.strides)
        return whole if self.view is None else whole[self.view]

    def fill(self, mine: Tensor, whole: Tensor) -> None:
        """Copy from the whole, if it is a buffer."""
        if self.pieces is not None:
            if self.zeros:
                mine.zero_()
            for inside, outside in self.pieces:
                mine[inside].copy_(whole[outside])

    def put(self, mine: Tensor, whole: Tensor) -> None:
        """Copy to the whole, if it is a buffer."""
        for inside, outside in self.pieces or ():
            whole[outside].copy_(mine[inside])

    def at(self, start: int) -> _Place:
        """The same in another buffer."""
        return _Place(self.view, self.pieces, self.zeros, start, self.bytes, self.shape, self.strides, self.dtype)


def _place(part: Part, at: int, direct: bool, start: int) -> _Place:
    pieces, inner = part.pieces[at], part.problem
    if pieces is None:
        return _Place()
    if direct:
        return _Place(view=_slices(pieces[0].whole))
    shape, dtype = (inner.x_shape, inner.w_shape, inner.y_shape)[at], DTYPES[inner.dtypes[at]]
    strides = empty(shape, dtype, inner.layouts[at], torch.device("meta")).stride()
    zeros = sum(piece.elements for piece in pieces) < math.prod(shape)
    pairs = tuple((_slices(piece.mine), _slices(piece.whole)) for piece in pieces)
    size = math.prod(shape) * dtype.itemsize
    return _Place(None, pairs, zeros, start, size, shape, strides, dtype)


class _Step(NamedTuple):
    """One inner call: its three tensors in the order of a runner, the runner, and its bytes of the workspace."""

    part: Part
    a: _Place
    b: _Place
    out: _Place
    runner: Runner
    scratch: tuple[int, int]


def _build(
    rewrite: Rewrite, problem: Problem, device: Device, work: Work, knobs: Rewritten, inner: Sequence[Runner]
) -> Runner:
    starts = [sum(work.buffers[:at]) for at in range(len(work.buffers) + 1)]
    first, second, result = *problem.inputs, problem.result
    runs = dict(zip(work.problems, inner, strict=True))
    space = {p: named(c.engine).workspace_bytes(p, device, c.knobs)
             for p, c in zip(work.problems, knobs.inner, strict=True)}  # fmt: skip
    sums = work.sums
    end = starts[-1]
    steps = []
    for part, alone in zip(work.parts, work.direct, strict=True):
        a, b, out = (_place(part, at, alone[at], starts[at]) for at in (first, second, result))
        steps.append(_Step(part, a, b, out, runs[part.problem], (end, end + space[part.problem])))
    kinds = [operand.kind for operand in problem.epilogue.operands]
    engine = named(knobs.inner[0].engine)
    whole_epilogue = rewrite.takes_epilogue
    bias_behind = not whole_epilogue and (not engine.takes_bias or not work.covered)
    buffer_of: dict[int, int] = {}
    for at, kind in enumerate(kinds):
        if kind == "tensor" and whole_epilogue:
            buffer_of[at] = starts[3 + len(buffer_of)]
    column = (-1, *(1,) * problem.rank)
    covered, view = work.covered, rewrite.view

    def operands_of(part: Part, given: Any, place: _Place, workspace: Tensor | None) -> Any:
        """What the inner engine has in place of a bias: the vectors of its channels, its part of tensors."""
        if given is None or bias_behind:
            return None
        if not whole_epilogue:
            return given if part.channels is None else given.narrow(0, *part.channels)
        made = []
        for at, (kind, value) in enumerate(zip(kinds, given, strict=False)):
            if kind == "channel" and part.channels is not None:
                value = value.narrow(0, *part.channels)
            elif kind == "tensor":
                seen, where = view(value, result, problem), place.at(buffer_of[at])
                value = where.of(seen, workspace)
                where.fill(value, seen)
            made.append(value)
        return tuple(made)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, given: Any) -> None:
        xs, ys, rs = view(a, first, problem), view(b, second, problem), view(out, result, problem)
        if not covered:
            out.zero_()
        for at, step in enumerate(steps):
            mine_a, mine_b = step.a.of(xs, workspace), step.b.of(ys, workspace)
            step.a.fill(mine_a, xs)
            step.b.fill(mine_b, ys)
            mine = total = step.out.of(rs, workspace)
            if sums and at:
                assert workspace is not None, "a sum of parts lies in the workspace"
                flat = workspace[starts[3] : starts[3] + total.numel() * total.element_size()].view(total.dtype)
                mine = flat.as_strided(total.shape, total.stride())
            begin, stop = step.scratch
            scratch = workspace[begin:stop] if workspace is not None and stop > begin else None
            step.runner(mine_a, mine_b, mine, scratch, operands_of(step.part, given, step.out, workspace))
            if mine is not total:
                total.add_(mine)
            else:
                step.out.put(mine, rs)
        if given is not None and bias_behind:
            out.add_(given.view(column))

    return run
