"""The trace of ``cuda.im2col_gemm``: columns are written to memory, and cuBLAS multiplies them."""

from __future__ import annotations

from math import ceil, prod

from ..cuda import im2col_gemm, pointwise
from ..cuda.device import CudaDevice
from ..cuda.im2col_gemm import Panel, _Form
from ..problem import Problem
from .model import (
    Axis,
    Block,
    Launch,
    Move,
    Owner,
    Step,
    Trace,
    Walk,
    axis_list,
    names,
    span,
    whole,
)

__all__ = ["trace"]

_THREADS = im2col_gemm._THREADS
_THREAD = Owner("thread", ((0, 1, 1),))
_KERNELS = "src/openconv/cuda/kernels/"
_LIBRARY = "src/openconv/cuda/matrices.py"


class _Tracer:
    """Panels of columns, one after the other."""

    def __init__(self, problem: Problem, device: CudaDevice, knobs: Panel) -> None:
        self.problem, self.device, self.form = problem, device, _Form(problem, knobs)
        self.c, self.k = problem.c // problem.groups, problem.k // problem.groups
        self.known = names(problem)
        self.pixels = (Axis("n", problem.n), *axis_list(self.known.out, problem.out))
        self.taps = axis_list(self.known.taps, problem.filter)
        self.launches: list[Launch] = []
        self.blocks: list[Block] = []

    def trace(self) -> Trace:
        problem, form = self.problem, self.form
        for at, (n, images, first, count) in enumerate(form.panels):
            last_panel = at == len(form.panels) - 1
            if problem.direction == "dgrad":
                self.backward(n, images, first, count)
            else:
                self.forward(n, images, first, count, last_panel)
        columns, panels = form.regions[0].bytes, len(form.panels)
        notes = (
            f"Columns take {columns:,} bytes of workspace, in {panels} panel{'s' * (panels != 1)}.",
            "How cuBLAS cuts its products into tiles is its own: each matrix counts once, the least that it can load.",
        )
        sizes = {"columns": form.column_size, "sums": 4 if form.wide else form.size, "dy, gathered": form.size}
        return Trace(
            problem, "cuda.im2col_gemm", str(form.knobs), tuple(self.launches), tuple(self.blocks), sizes, notes
        )

    # -- fprop and wgrad --------------------------------------------------------------------------------------------

    def forward(self, n: int, images: int, first: int, count: int, last_panel: bool) -> None:
        problem, form = self.problem, self.form
        base, width = n * form.out + first, images * count
        self.unfold(base, width, form.pitch(images, count))
        pixels = Walk(self.pixels, base, base + width)
        depth = self.depth()
        filters = (span("g", 0, problem.groups), span("k", 0, self.k))
        if problem.direction == "fprop":
            behind = form.epilogue_behind
            made = "sums" if behind and form.wide else "y"
            loads = (Move("w", (depth,), (0, 1)), Move("columns", (depth,), (0, 2)))
            text = f"cuBLAS multiplies the filters, {problem.k} x {form.depth}, by columns, {form.depth} x {width}."
            self.product(Step(text, loads, (depth,), (Move(made, (), (0, 1, 2)),)), (*filters, pixels), made)
            if behind:
                self.rounded(pixels, images, count, made)
            return
        if form.gathers:
            self.gather((*filters, pixels))
        dy = "dy, gathered" if form.gathers else "y"
        terms = (pixels,)
        loads = (Move(dy, terms, (0, 1)), Move("columns", terms, (0, 2)))
        text = f"cuBLAS multiplies dy, {problem.k} x {width}, by the panel's columns, turned, {width} x {form.depth}."
        stores = (Move("w" if last_panel else "sums", (), (0, 1, 2)),)
        self.product(Step(text, loads, terms, stores), (*filters, depth), "w")

    def depth(self) -> Walk:
        """Channels and taps of a group, in the order of columns."""
        channel = Axis("c", self.c)
        return whole((*self.taps, channel) if self.form.last else (channel, *self.taps))

    def unfold(self, base: int, width: int, pitch: int) -> None:
        """The launch of im2col.cu."""
        problem, form, device = self.problem, self.form, self.device
        launch, groups = len(self.launches), Axis("g", problem.groups)
        if form.last:
            vectors = width * (pitch // form.vector)
            each = _THREADS * im2col_gemm._UNROLL
            grid: tuple[int, ...] = (ceil(vectors / each),)
            order = (*self.pixels, groups, *self.taps, Axis("c", self.c))
            text = f"Each thread copies {im2col_gemm._UNROLL} vectors of {form.vector} channels of x to columns."
            step = Step(text, (Move("x", (), (0,)),), None, (Move("columns", (), (0,)),))
            for at in range(grid[0]):
                lo, hi = at * each * form.vector, min((at + 1) * each, vectors) * form.vector
                walk = Walk(order, base * pitch + lo, base * pitch + hi, pitch, problem.rank + 2)
                self.blocks.append(Block(launch, (at,), (walk,), (step,), "columns"))
            owner = Owner("thread", ((0, form.vector, 1),))
        else:
            few = ceil(im2col_gemm._BLOCKS * device.threads / (ceil(width / _THREADS) * problem.c))
            each = ceil(form.taps / max(1, min(few, form.taps // im2col_gemm._LEAST_TAPS)))
            parts = ceil(form.taps / each)
            grid = (ceil(width / _THREADS), min(problem.c * parts, 65535))
            steps: dict[int, tuple[Step, ...]] = {}
            for y in range(grid[1]):
                found = []
                for place in range(y, problem.c * parts, grid[1]):
                    channel, begin = place // parts, place % parts * each
                    own = (
                        Walk((groups, Axis("c", self.c)), channel, channel + 1),
                        Walk(self.taps, begin, min(begin + each, form.taps)),
                    )
                    found.append(Step(
                        f"Each thread copies the window of its pixel in channel {channel}, tap by tap, to a column.",
                        (Move("x", own, (0,)),), None, (Move("columns", own, (0,)),),
                    ))  # fmt: skip
                steps[y] = tuple(found)
            for y in range(grid[1]):
                for x in range(grid[0]):
                    lo, hi = base + x * _THREADS, base + min((x + 1) * _THREADS, width)
                    self.blocks.append(Block(launch, (x, y), (Walk(self.pixels, lo, hi),), steps[y], "columns"))
            owner = _THREAD
        does = "writes windows out as columns, padding as zeros"
        self.launches.append(Launch("im2col", f"{_KERNELS}im2col.cu", does, grid, (_THREADS,), owner=owner))

    def product(self, step: Step, outputs: tuple[Walk, ...], makes: str) -> None:
        """A product of cuBLAS."""
        self.blocks.append(Block(len(self.launches), (), outputs, (step,), makes, "all of its blocks"))
        self.launches.append(Launch("torch.bmm", _LIBRARY, "a matrix product of cuBLAS"))

    def gather(self, outputs: tuple[Walk, ...]) -> None:
        """torch's copy of dy with all images' pixels side by side."""
        step = Step("torch copies dy so that all images' pixels lie side by side.", (Move("y", (), (0, 1, 2)),), None,
                    (Move("dy, gathered", (), (0, 1, 2)),))  # fmt: skip
        self.blocks.append(Block(len(self.launches), (), outputs, (step,), "dy, gathered", "all of its blocks"))
        self.launches.append(Launch("torch.copy_", "src/openconv/cuda/im2col_gemm.py", "a copy by torch"))

    def rounded(self, pixels: Walk, images: int, count: int, made: str) -> None:
        """The launch of pointwise.cu, which rounds sums to the type of y."""
        problem, form = self.problem, self.form
        per_launch = (images, count) if form.wide else (problem.n, form.out)
        vector = pointwise._vector(problem, per_launch[1])
        grid = (-(-prod(per_launch) * problem.k // (vector * pointwise._THREADS)),)
        outputs = (span("g", 0, problem.groups), span("k", 0, self.k), pixels)
        moved = (Move(made, (), (0, 1, 2)),)
        step = Step("Threads round the sums to the type of y.", moved, None, (Move("y", (), (0, 1, 2)),))
        self.blocks.append(Block(len(self.launches), (), outputs, (step,), "y", "all of its blocks"))
        self.launches.append(
            Launch("pointwise", f"{_KERNELS}pointwise.cu", "rounds the sums", grid, (pointwise._THREADS,))
        )

    # -- dgrad ------------------------------------------------------------------------------------------------------

    def backward(self, n: int, images: int, first: int, channels: int) -> None:
        problem, form = self.problem, self.form
        g0, parts = first // self.c, max(1, channels // self.c)
        each, begin = channels // parts, first % self.c
        pixels = Walk(self.pixels, n * form.out, (n + images) * form.out)
        groups = span("g", g0, g0 + parts)
        rows = (Axis("c", each, begin), *self.taps)
        if form.gathers:
            self.gather((groups, span("k", 0, self.k), pixels))
        terms = (span("k", 0, self.k),)
        dy = "dy, gathered" if form.gathers else "y"
        loads = (Move("w", terms, (0, 1)), Move(dy, terms, (0, 2)))
        text = (
            f"cuBLAS multiplies the filters, turned, {each * form.taps} x {self.k}, by dy, "
            f"{self.k} x {images * form.out}: "
            "what each window says of its pixels."
        )
        stores = (Move("columns", (), (0, 1, 2)),)
        self.product(Step(text, loads, terms, stores), (groups, whole(rows), pixels), "columns")
        # The launch of col2im.cu.
        vector = form.vector_back(channels)
        count = images * channels // vector * prod(problem.spatial)
        grid = (ceil(count / _THREADS),)
        space = axis_list(self.known.place, problem.spatial)
        own = (Axis("g", parts, g0), Axis("c", each, begin))
        image = Axis("n", images, n)
        order = (image, *space, *own) if form.last else (image, *own, *space)
        taps = (whole(self.taps),)
        step = Step("Each thread adds up what the windows say of its value of dx, tap by tap, and stores it.",
                    (Move("columns", taps, (0,), met="y"),), None, (Move("x", (), (0,)),))  # fmt: skip
        for at in range(grid[0]):
            lo, hi = at * _THREADS * vector, min((at + 1) * _THREADS, count) * vector
            self.blocks.append(Block(len(self.launches), (at,), (Walk(order, lo, hi),), (step,), "x"))
        self.launches.append(Launch(
            "col2im", f"{_KERNELS}col2im.cu", "each thread gathers one value of dx from the columns", grid, (_THREADS,),
            owner=Owner("thread", ((0, vector, 1),)),
        ))  # fmt: skip


def trace(problem: Problem, device: CudaDevice, knobs: Panel) -> Trace:
    """A panel of columns, its product, the next panel."""
    return _Tracer(problem, device, knobs).trace()
