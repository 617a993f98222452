"""The trace of ``cuda.winograd``: tiles and filters are transformed, multiplied point by point, transformed back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod

from ..cuda import winograd
from ..cuda.device import CudaDevice
from ..cuda.winograd import Chunk, _Form
from ..problem import Problem
from ..winograd import Matrix
from .model import Axis, Block, Launch, Matrices, Move, Owner, Step, Trace, Walk, axis_list, names, span

__all__ = ["refusals", "trace"]

_THREADS = winograd._THREADS
_KERNELS = "src/openconv/cuda/kernels/"


def refusals(problem: Problem, knobs: Chunk) -> Iterator[str]:
    """What the trace does not show: tiles of nchw in chunks that end within an image."""
    form = _Form(problem, knobs)
    if not form.last and any(at % prod(form.grid) or count % prod(form.grid) for at, count in form.chunks):
        yield f"{knobs} cuts an image's {prod(form.grid)} tiles into chunks; a trace of nchw has whole images"


class _Tracer:
    """Launches in the order of a run. ``t`` points a tile along each axis, ``m`` outputs of it."""

    def __init__(self, problem: Problem, knobs: Chunk) -> None:
        self.problem, self.form = problem, _Form(problem, knobs)
        self.known, self.rank = names(problem), problem.rank
        self.launches: list[Launch] = []
        self.blocks: list[Block] = []
        form = self.form
        self.transforms = form.transforms[-self.rank :]
        self.steps, self.grid = form.steps[-self.rank :], form.grid[-self.rank :]
        self.every = span("point", 0, form.points)
        self.backward = problem.direction == "dgrad"
        self.wgrad = problem.direction == "wgrad"
        self.own = self.known.place if self.backward else self.known.out  # of what is cut into tiles

    def tiles(self, first: int, count: int) -> tuple[Axis, ...]:
        """The tiles of a chunk, each by the place of its first output; of nchw, whole images."""
        each = prod(self.form.grid)
        image = Axis("n", self.problem.n) if self.form.last else Axis("n", count // each, first // each)
        corners = (Axis(name, many, 0, m) for name, many, m in zip(self.own, self.grid, self.steps, strict=True))
        return (image, *corners)

    def order(self, first: int, count: int, channel: Axis, threads: int, row: int) -> list[Walk]:
        """Which tiles and channels blocks of that many values have, in the order of their memory."""
        tiles, length = self.tiles(first, count), count * channel.count
        if self.form.last:
            base = first * channel.count
            return [
                Walk((*tiles, channel), base + at, base + min(at + threads, length)) for at in range(0, length, threads)
            ]
        return [
            Walk((channel, *tiles), at, at + threads, row, self.rank + 1)
            for at in range(0, row * channel.count, threads)
        ]

    def window(self) -> tuple[Walk, ...]:
        """What a tile of the source reads, as taps counted from its corner; of dy, from the last tap backwards."""
        found = []
        for tap, taps, each in zip(self.known.taps, self.problem.filter, self.transforms, strict=True):
            axis = Axis(tap, each.t, taps - 1, -1) if self.backward else Axis(tap, each.t)
            found.append(Walk((axis,), 0, each.t))
        return tuple(found)

    def inside(self) -> tuple[Walk, ...]:
        """The outputs of a tile, from its corner on."""
        return tuple(span(name, 0, m) for name, m in zip(self.own, self.steps, strict=True))

    def launch(
        self,
        kernel: str,
        does: str,
        blocks: int,
        outputs: list[Walk],
        text: str,
        load: Move,
        store: Move,
        vector: int = 1,
    ) -> None:
        """A kernel whose threads each transform what they load, and store it."""
        at, owner = len(self.launches), Owner("thread", ((0, vector, 1),))
        self.launches.append(Launch(kernel, f"{_KERNELS}{kernel}.cu", does, (blocks,), (_THREADS,), owner=owner))
        step = Step(text, (load,), None, (store,))
        self.blocks += [Block(at, (x,), (walk,), (step,), store.tensor) for x, walk in enumerate(outputs)]

    def of_filters(self) -> tuple[int, list[Walk], Move]:
        """Blocks of threads that have one filter of one channel each, which they are, and all of its taps."""
        problem, total = self.problem, self.problem.k * self.problem.c
        order = axis_list("kc", (problem.k, problem.c))
        outputs = [Walk(order, at, min(at + _THREADS, total)) for at in range(0, total, _THREADS)]
        taps = tuple(span(name, 0, size) for name, size in zip(self.known.taps, problem.filter, strict=True))
        return ceil(total / _THREADS), outputs, Move("w", taps, (0,))

    def filters(self) -> None:
        blocks, outputs, taps = self.of_filters()
        turned = " upside down" if self.backward else ""
        text = f"Each thread transforms one filter of one channel{turned}: {self.counted(self.problem.filter)}."
        made = Move("transformed filters", (self.every,), (0,))
        self.launch("winograd_filters", "transforms filters by G", blocks, outputs, text, taps, made)

    def counted(self, sizes: Sequence[int]) -> str:
        """So many values to so many points."""
        return f"{prod(sizes)} values to {self.form.points} points"

    def transformed(self, first: int, count: int) -> None:
        """Tiles of what is convolved."""
        form, (tensor, channel) = self.form, ("y", "k") if self.backward else ("x", "c")
        vector, pitch = form.source_vector, form.each(count) * form.knobs.parts
        text = f"Each thread reads a tile of {'dy' if self.backward else 'x'} and transforms it: "
        text += f"{self.counted([each.t for each in self.transforms])}."
        outputs = self.order(first, count, Axis(channel, form.sources), _THREADS * vector, pitch)
        blocks = ceil(pitch * (form.sources // vector) / _THREADS)
        tile, made = Move(tensor, self.window(), (0,)), Move("transformed tiles", (self.every,), (0,))
        self.launch("winograd_tiles", "transforms tiles by BT", blocks, outputs, text, tile, made, vector)

    def errors(self, first: int, count: int) -> None:
        """Tiles of dy, in a wgrad."""
        form = self.form
        vector, pitch = form.error_vector, form.each(count) * form.knobs.parts
        text = f"Each thread reads a tile of dy and transforms it like a filter: {self.counted(self.steps)}."
        outputs = self.order(first, count, Axis("k", form.targets), _THREADS * vector, pitch)
        blocks = ceil(pitch * (form.targets // vector) / _THREADS)
        tile, made = Move("y", self.inside(), (0,)), Move("transformed dy", (self.every,), (0,))
        self.launch("winograd_tiles", "transforms tiles of dy by G", blocks, outputs, text, tile, made, vector)

    def product(self, first: int, count: int) -> None:
        """Of cuBLAS, one for each point."""
        form, problem = self.form, self.problem
        c, k = span("c", 0, problem.c), span("k", 0, problem.k)
        lo = first if form.last else 0
        walk = Walk(self.tiles(first, count), lo, lo + count)
        second = "transformed dy" if self.wgrad else "transformed filters"
        of_second = (walk, k, self.every) if self.wgrad else (k, c, self.every)
        loads = Move("transformed tiles", (walk, k if self.backward else c, self.every)), Move(second, of_second)
        target = (k, c) if self.wgrad else (walk, c if self.backward else k)
        made = "sums at points" if self.wgrad else "products at points"
        parts = (span("part", 0, form.knobs.parts),) if self.wgrad else ()
        m, n, depth = (problem.k, problem.c, count) if self.wgrad else (count, form.targets, form.sources)
        text = f"cuBLAS multiplies matrices at each of {form.points} points: {m} x {depth} by {depth} x {n}."
        stores = (Move(made, (*target, self.every, *parts)),)
        step = Step(text, loads, None, stores, form.points * count * problem.k * problem.c)
        self.blocks.append(Block(len(self.launches), (), target, (step,), made, "all of its blocks"))
        self.launches.append(Launch("torch.bmm", "src/openconv/cuda/matrices.py", f"{form.points} products of cuBLAS"))

    def results(self, first: int, count: int) -> None:
        """Tiles of the result."""
        form, (tensor, channel) = self.form, ("x", "c") if self.backward else ("y", "k")
        vector, sizes = form.target_vector, " x ".join(str(m) for m in self.steps)
        text = f"Each thread transforms a tile back, {form.points} points to {sizes} results, and stores those inside."
        outputs = self.order(first, count, Axis(channel, form.targets), _THREADS * vector, count)
        blocks = ceil(count * (form.targets // vector) / _THREADS)
        sums, made = Move("products at points", (self.every,), (0,)), Move(tensor, self.inside(), (0,))
        self.launch("winograd_results", "transforms products back by AT", blocks, outputs, text, sums, made, vector)

    def gradient(self) -> None:
        """dw, of a wgrad."""
        blocks, outputs, taps = self.of_filters()
        text = f"Each thread transforms the {self.form.points} sums of one filter and channel back to its taps."
        sums = Move("sums at points", (self.every, span("part", 0, self.form.knobs.parts)), (0,))
        self.launch("winograd_gradient", "transforms sums back by AT", blocks, outputs, text, sums, taps)


def _text(matrix: Matrix) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(value) for value in row) for row in matrix)


def trace(problem: Problem, device: CudaDevice, knobs: Chunk) -> Trace:
    """fprop and dgrad transform filters, tiles and results; a wgrad tiles of x and dy, and sums."""
    tracer = _Tracer(problem, knobs)
    form = tracer.form
    if problem.direction != "wgrad":
        tracer.filters()
    for first, count in form.chunks:
        tracer.transformed(first, count)
        if problem.direction == "wgrad":
            tracer.errors(first, count)
        tracer.product(first, count)
        if problem.direction != "wgrad":
            tracer.results(first, count)
    if problem.direction == "wgrad":
        tracer.gradient()
    each = tracer.transforms
    plain, sizes = prod(form.steps) * prod(form.taps), " x ".join(str(one) for one in each)
    notes = (f"{sizes}: {form.points} multiplications a tile and channel instead of {plain}.",)
    workspace = {
        "transformed tiles": form.size,
        "transformed filters": form.size,
        "transformed dy": form.size,
        "products at points": 4,
        "sums at points": 4,
    }
    matrices = Matrices(
        tuple((one.m, one.r) for one in each),
        *(tuple(_text(getattr(one, name)) for one in each) for name in ("at", "g", "bt")),
    )
    return Trace(
        problem, "cuda.winograd", str(knobs), tuple(tracer.launches), tuple(tracer.blocks), workspace, notes, matrices
    )
