"""cuda.winograd: small filters in fewer multiplications, as matrix products of cuBLAS between three transforms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..epilogue import IDENTITY
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES
from ..winograd import UNITS, Matrix, Step, Transform, error_bound, operations, program, transform
from . import jit, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, aligned, pack
from .matrices import Region, accumulate, gemm_seconds, multiply, product_refusals, split

__all__ = ["Chunk", "Winograd"]

_THREADS = 256
_LIVE = 72  # values that a thread keeps between the two halves of a nested transform
_POINTS = (6, 4)
_TAPS = 5  # two outputs of six points
_BUDGETS = (256 << 20, 64 << 20, 16 << 20, 4 << 20)  # bytes of transformed tiles and of their products
_UNIT = 8  # elements that rows of matrices are a multiple of: 16 bytes of f16
# The most that a result may be off, in roundings of the largest sum. F(2x2,3x3) in f16 is off by up to 11, and
# F(4x4,3x3) by 120, which is 15 times as far as a plain sum on average: too far for what nobody asked for.
_MOST_ROUNDINGS = {"f32": 2.0**21, "f16": 16, "bf16": 16}


@dataclass(frozen=True)
class Chunk(Knobs):
    """``points``: inputs and products of a tile along an axis; its outputs are fewer by the filter's taps less one.
    ``tiles``: how many are transformed at a time. ``parts``: of the sum over tiles in a wgrad, one product each."""

    points: int
    tiles: int
    parts: int = 1


class Winograd(Engine):
    """Transform tiles and filters, multiply them point by point in batched products of cuBLAS, transform back.

        fprop   y tile  = AT [sum over c of (G w G^T) * (BT x B)] A
        dgrad   the same, of dy, with the filters upside down and C and K exchanged
        wgrad   dw      = AT [sum over tiles of (G dy G^T) * (BT x B)] A        with the transform of r outputs, m taps

    For a tile of outputs and a channel F(4x4,3x3) multiplies 36 times where a plain sum does 144 times, F(2x2,3x3) 16
    for 36, and F(2x2,5x5) 36 for 100. The transforms are generated from their interpolation points
    (:mod:`openconv.winograd`) and computed in f32; f16 and bf16 are rounded once on the way to the product, and not
    between product and result. An axis of one tap is left as it is: 1D filters and rows take the same kernels.

    Wins where products bound a layer: f32, and channels in the hundreds. Loses where memory does: tiles and products
    are written and read once more, at 36/16 of the image's size. An infinity or a NaN spreads over its tiles.
    """

    name = "cuda.winograd"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from product_refusals(problem)
        if problem.result_dtype == "f64":
            yield "dtype is f64; its transforms are for f32, f16 and bf16"
        if problem.precision != "ieee":
            yield f"precision is {problem.precision}; rounding between transforms needs ieee"
        if problem.rank == 3:
            yield f"spatial sizes are {problem.spatial}; its tiles have one or two axes"
        for name, values in (("stride", problem.stride), ("dilation", problem.dilation)):
            if set(values) != {1}:
                yield f"{name} is {values}; Winograd needs 1 along all axes"
        if problem.groups > 1:
            yield f"groups is {problem.groups}; Winograd needs 1"
        fits = 1 < max(problem.filter) <= _TAPS
        if not fits:
            yield f"filter is {problem.filter}; wanted up to {_TAPS} taps an axis, and more than one"
        dtype = problem.result_dtype
        if fits and dtype in ("f32", "f16", "bf16") and not list(_variants(problem)):
            least, most = min(_error(problem, points) for points in _POINTS if _saves(problem, points)), _most(dtype)
            yield f"its error in {dtype} is up to {least:.2g} of the largest result; wanted at most {most:.2g}"
        if max(_tile_count(problem, min(_POINTS)), *problem.spatial, *problem.out) >= 2**30:
            yield f"the image has {_tile_count(problem, min(_POINTS))} tiles; its kernels count to 2^30"

    def traits(self, problem: Problem, knobs: Chunk) -> Traits:
        # Products of one image's tiles have the same sizes whatever the batch. Results of other points have other bits,
        # so that only the first variant claims it.
        each = _tile_count(problem, knobs.points) // max(1, problem.n)
        first = next(_variants(problem), knobs.points)
        alone = problem.direction == "wgrad" or (knobs.tiles <= each and knobs.points == first)
        return Traits("f32", _error(problem, knobs.points), batch_invariant=alone, plain_sum=False)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Chunk) -> int:
        return sum(region.bytes for region in _Form(problem, knobs).regions)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Chunk]:
        assert isinstance(device, CudaDevice)
        variants = list(_variants(problem))
        if problem.result_dtype == "f32":  # others have the most exact one first
            variants.sort(key=lambda points: self.cost(problem, device, _chunk(problem, device, points, _BUDGETS[0])))
        # Tiles of one image at a time are for a wish for batch invariance: they are in one order for every batch.
        return tuple(
            dict.fromkeys(
                _chunk(each, device, points, budget)
                for points in variants
                for each in (problem, problem.with_(n=1))
                for budget in _BUDGETS
            )
        )

    def cost(self, problem: Problem, device: Device, knobs: Chunk) -> float:
        # Fitted to 236 times of an H200. Of what stays in L2 half of the bytes move. Products take a part of what
        # gemm_seconds says, in f16 and bf16 as cuda.im2col_gemm's do, with blocks of 256 x 64 where 64 columns are all
        # there are. Each chunk launches two or three kernels and a product, and one of a wgrad in f16 or bf16 adds its
        # sums to those before it.
        assert isinstance(device, CudaDevice)
        form = _Form(problem, knobs)
        size, points = form.size, form.points
        tiles, chunks = form.all_tiles, len(form.chunks)
        per_chunk = min(knobs.tiles, tiles)
        wgrad = problem.direction == "wgrad"
        between = points * tiles * (form.source_row * size + form.target_row * (size if wgrad else 4))
        resident = between / chunks <= device.l2_bytes / 2
        moved = problem.min_bytes + (0.5 if resident else 1.0) * between
        moved += problem.k * problem.c * (points * (4 * knobs.parts if wgrad else size))
        if wgrad:
            m, n, sums, batch = problem.k, problem.c, ceil(per_chunk / knobs.parts), points * knobs.parts
        else:
            m, n, sums, batch = per_chunk, form.targets, form.sources, points
        if n <= 64:
            m, n = ceil(m / 2), 2 * n
        part = 0.6 if size < 4 else 0.45 if wgrad else 0.35
        product = part * gemm_seconds(problem, device, m, n, sums, batch)
        if wgrad and size < 4 and chunks > 1:
            moved += chunks * 12 * points * problem.k * problem.c * knobs.parts
        return 8e-6 + chunks * (4e-6 + product) + moved / (0.95 * device.bandwidth)

    def build(self, problem: Problem, device: Device, knobs: Chunk) -> Runner:
        assert isinstance(device, CudaDevice)
        return (_build_wgrad if problem.direction == "wgrad" else _build)(problem, device, knobs)

    def sources(self, problem: Problem, device: Device, knobs: Chunk) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        form = _Form(problem, knobs)
        if problem.direction == "wgrad":
            return [form.tiles_source, form.errors_source, form.gradient_source]
        return [form.tiles_source, form.filters_source, form.results_source]

    def reasons(self, problem: Problem, device: Device, knobs: Chunk) -> tuple[str, ...]:
        form = _Form(problem, knobs)
        outputs, taps = prod(form.steps), prod(form.taps)
        names = " x ".join(str(each) for each in form.transforms if each.t > 1)
        fewer = f"{outputs * taps / form.points:.2f} times fewer than a plain sum"
        return (f"{names}: {form.points} products for {outputs} outputs of {taps} taps, {fewer}",)


# -- variants -------------------------------------------------------------------------------------------------------


def _two(values: Sequence[int], missing: int) -> tuple[int, int]:
    """One entry for each of two axes, from those of the problem."""
    return (missing, *values)[-2:] if len(values) < 2 else (values[0], values[1])  # type: ignore[return-value]


def _outputs(taps: int, points: int) -> int:
    """Outputs of a tile along an axis; an axis of one tap is not transformed."""
    return 1 if taps == 1 else points - taps + 1


def _saves(problem: Problem, points: int) -> bool:
    return all(taps == 1 or _outputs(taps, points) >= 2 for taps in problem.filter)


def _variants(problem: Problem) -> Iterator[int]:
    """Points of an axis with which tiles have two outputs or more and results are worth having: those with the fewest
    products first, or the most exact where that matters more."""
    for points in _POINTS if problem.result_dtype == "f32" else reversed(_POINTS):
        if _saves(problem, points) and _error(problem, points) <= _most(problem.result_dtype):
            yield points


def _most(dtype: str) -> float:
    """The most that a result may be off, as a share of the largest sum."""
    return _MOST_ROUNDINGS[dtype] * UNITS[dtype]


def _transforms(problem: Problem, points: int) -> tuple[Transform, ...]:
    """One for each axis of the problem. A wgrad has as many outputs as the filter has taps, and the outputs of a tile
    for taps."""
    sizes = [(_outputs(taps, points), taps) for taps in problem.filter]
    return tuple(transform(r, m) if problem.direction == "wgrad" else transform(m, r) for m, r in sizes)


def _error(problem: Problem, points: int) -> float:
    channels = problem.k if problem.direction == "dgrad" else problem.c
    terms = _tile_count(problem, points) if problem.direction == "wgrad" else channels
    narrow = None if problem.result_dtype == "f32" else problem.result_dtype
    return error_bound(_transforms(problem, points), max(1, terms), stored=narrow)


def _tile_count(problem: Problem, points: int) -> int:
    """Tiles of all images."""
    sizes = problem.spatial if problem.direction == "dgrad" else problem.out
    axes = zip(sizes, problem.filter, strict=True)
    return problem.n * prod(ceil(size / max(1, _outputs(taps, points))) for size, taps in axes)


def _chunk(problem: Problem, device: CudaDevice, points: int, budget: int) -> Chunk:
    """As many tiles as the budget of bytes holds, 128 at least: the side of a product's block. The sum of a wgrad is
    split into parts until its products fill the multiprocessors twice, or a part has less than 512 tiles."""
    form = _Form(problem, Chunk(points, 1))
    wgrad = problem.direction == "wgrad"
    tile = form.points * (form.source_row * form.size + form.target_row * (form.size if wgrad else 4))
    tiles = min(form.all_tiles, max(128, budget // tile // 128 * 128))
    parts = 1
    if wgrad:
        blocks = form.points * ceil(problem.k / 128) * ceil(problem.c / 128)
        parts = max(1, min(ceil(2 * device.threads / blocks), tiles // 512))
    return Chunk(points, tiles, parts)


class _Form:
    """A problem in tiles: what is read and written, and where its matrices lie. Axes are two: that of a 1D problem is
    the second."""

    def __init__(self, problem: Problem, knobs: Chunk) -> None:
        self.problem, self.knobs = problem, knobs
        self.last = problem.layouts[0] == "nhwc"
        self.size = DTYPE_BYTES[problem.result_dtype]
        backward = problem.direction == "dgrad"
        # What is read in overlapping tiles, and what has a tile for each of them: dy, in a wgrad.
        self.sources, self.targets = (problem.k, problem.c) if backward else (problem.c, problem.k)
        spatial, out = _two(problem.spatial, 1), _two(problem.out, 1)
        self.source_size, self.target_size = (out, spatial) if backward else (spatial, out)
        self.taps = _two(problem.filter, 1)
        low = _two([low for low, _ in problem.padding], 0)
        self.pad = tuple(r - 1 - p for r, p in zip(self.taps, low, strict=True)) if backward else low
        found = _transforms(problem, knobs.points)
        self.transforms = found if problem.rank == 2 else (transform(1, 1), *found)
        self.steps = tuple(_outputs(taps, knobs.points) for taps in self.taps)
        self.points = prod(each.t for each in self.transforms)
        self.grid = tuple(ceil(size / step) for size, step in zip(self.target_size, self.steps, strict=True))
        self.all_tiles = problem.n * prod(self.grid)

    @property
    def source_row(self) -> int:
        """Elements from row to row of a matrix whose rows are channels of the source; of nchw there are none."""
        return ceil(self.sources / _UNIT) * _UNIT if self.last else self.sources

    @property
    def target_row(self) -> int:
        return ceil(self.targets / _UNIT) * _UNIT if self.last else self.targets

    @property
    def filter_row(self) -> int:
        """Elements from row to row of the filters' matrices: channels C."""
        return ceil(self.problem.c / _UNIT) * _UNIT

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """(first tile, tiles): of all images, or of one after the other if the tiles of one are as many or more."""
        step, each = self.knobs.tiles, prod(self.grid)
        length = each if step <= each else self.all_tiles
        starts = range(0, self.all_tiles, length)
        return [(n + at, min(step, length - at)) for n in starts for at in range(0, length, step)]

    def each(self, count: int) -> int:
        """Tiles of a part, with those of zeros at the end: rows of tiles are of whole units in nchw."""
        part = ceil(count / self.knobs.parts)
        return part if self.last else ceil(part / _UNIT) * _UNIT

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the workspace: tiles; filters, or the tiles of dy; products, or the sums of dw; and what a chunk
        of f16 or bf16 adds to those."""
        problem, size, knobs = self.problem, self.size, self.knobs
        pitch = self.each(min(knobs.tiles, self.all_tiles)) * knobs.parts
        tiles = Region(self.points * pitch * self.source_row, size)
        filters = self.points * problem.k * self.filter_row
        if problem.direction == "wgrad":
            sums = filters * knobs.parts
            again = sums if size < 4 and len(self.chunks) > 1 else 0
            return tiles, Region(self.points * pitch * self.target_row, size), Region(sums, 4), Region(again, 4)
        return tiles, Region(filters, size), Region(self.points * pitch * self.target_row, 4), Region(0, 4)

    # -- kernels ----------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> str:
        problem = self.problem
        tensors = [prod(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape)]
        # A whole tile more: places outside of an image are worked out before they are left out.
        largest = max(*tensors, *(region.elements for region in self.regions))
        return "int" if largest + (1 << 20) < 2**31 else "i64"

    def vector(self, channels: int, live: int, size: int) -> int:
        """Channels of a thread: as many as 16 bytes hold, and registers."""
        most = 16 // size
        while most * live > _LIVE and most > 1:
            most //= 2
        return gcd(most, channels) if self.last else 1

    @property
    def source_vector(self) -> int:
        return self.vector(self.sources, self.points, self.size)

    @property
    def error_vector(self) -> int:
        """Of dy, in a wgrad."""
        return self.vector(self.targets, self.points, self.size)

    @property
    def target_vector(self) -> int:
        return self.vector(self.targets, self.transforms[0].m * self.transforms[1].t, 4)

    def _tiles(self, vector: int, matrices: Sequence[Matrix]) -> jit.Source:
        return self._source(
            "winograd_tiles.cu", matrices, vector=vector, channels_last=self.last,
            step_h=self.steps[0], step_w=self.steps[1],
        )  # fmt: skip

    @property
    def tiles_source(self) -> jit.Source:
        return self._tiles(self.source_vector, [each.bt for each in self.transforms])

    @property
    def errors_source(self) -> jit.Source:
        return self._tiles(self.error_vector, [each.g for each in self.transforms])

    @property
    def filters_source(self) -> jit.Source:
        turned = self.problem.direction == "dgrad"
        return self._source("winograd_filters.cu", [each.g for each in self.transforms], turned=turned)

    @property
    def gradient_source(self) -> jit.Source:
        return self._source("winograd_gradient.cu", [each.at for each in self.transforms])

    @property
    def results_source(self) -> jit.Source:
        at = [each.at for each in self.transforms]
        return self._source(
            "winograd_results.cu", at, epilogue=True, vector=self.target_vector, channels_last=self.last
        )

    def _source(
        self, file: str, matrices: Sequence[Matrix], *, epilogue: bool = False, **constants: int | bool | str
    ) -> jit.Source:
        problem = self.problem if epilogue else self.problem.with_(epilogue=IDENTITY)
        text = render.traits(problem, {"Element": problem.result_dtype, "Offset": self.offset, **constants})
        lines = [line for name, m in zip(("Down", "Across"), matrices, strict=True) for line in _struct(name, m)]
        return jit.Source(file, text.removesuffix("};\n") + "".join(f"    {line}\n" for line in lines) + "};\n")

    @property
    def filter_steps(self) -> tuple[int, int, int]:
        """Elements from filter to filter, from channel to channel and from tap to tap."""
        taps, c = prod(self.taps), self.problem.c
        return (c * taps, 1, c) if self.problem.layouts[1] == "nhwc" else (c * taps, taps, 1)


def _struct(name: str, matrix: Matrix) -> list[str]:
    """A transform's program as C++: ``Down::apply(v, y)``."""
    steps = program(matrix)
    return [
        f"struct {name} {{  // {operations(steps)} operations",
        f"    static constexpr int from = {len(matrix[0])}, to = {len(matrix)};",
        "    template <class Value>",
        "    __device__ static __forceinline__ void apply(const Value (&v)[from], Value (&y)[to]) {",
        *(f"        {_code(step)}" for step in steps),
        "    }",
        "};",
    ]


def _code(step: Step) -> str:
    def name(value: str) -> str:
        return f"{value[0]}[{value[1:]}]" if value[0] in "vy" else value

    a, b = (name(value) if value else "" for value in (step.a, step.b))
    factor = f"Value({step.c.numerator}.0 / {step.c.denominator})" if step.c.denominator > 1 else f"Value({step.c})"
    code = {
        "add": f"{a} + {b}", "sub": f"{a} - {b}", "fma": f"{factor} * {a} + {b}", "mul": f"{factor} * {a}",
        "copy": a, "zero": "Value(0)",
    }[step.op]  # fmt: skip
    target = name(step.target)
    return f"{target} = {code};" if target.startswith("y") else f"const Value {target} = {code};"


# -- runs -----------------------------------------------------------------------------------------------------------


def _launch_tiles(
    form: _Form, device: CudaDevice, source: jit.Source, vector: int, channels: int, row: int,
    size: Sequence[int], pad: Sequence[int], count: int,
) -> Launch:  # fmt: skip
    """``launch(image, matrices, first)``."""
    each = form.each(count)
    pitch = each * form.knobs.parts
    narrow = [count, pitch, channels, row, *size, *pad]
    for value in (channels // vector, *form.grid, each, pitch):
        narrow += divisor(value)
    blocks = ceil(pitch * (channels // vector) / _THREADS)
    return Launch(source, "winograd_tiles", device, (blocks,), (_THREADS,), pack(3, (), narrow))


def _build(problem: Problem, device: CudaDevice, knobs: Chunk) -> Runner:
    """fprop and dgrad."""
    form = _Form(problem, knobs)
    backward, last, points = problem.direction == "dgrad", form.last, form.points
    dtype, sources, targets = DTYPES[problem.result_dtype], form.sources, form.targets
    narrow = [problem.k, form.filter_row, *form.filter_steps, *divisor(problem.c)]
    blocks = ceil(problem.k * problem.c / _THREADS)
    filters = Launch(form.filters_source, "winograd_filters", device, (blocks,), (_THREADS,), pack(2, (), narrow))
    tiles, results = {}, {}
    for count in {count for _, count in form.chunks}:
        tiles[count] = _launch_tiles(
            form, device, form.tiles_source, form.source_vector, sources, form.source_row, form.source_size, form.pad,
            count,
        )  # fmt: skip
        narrow = [form.each(count), targets, form.target_row, *form.target_size, *divisor(count)]
        for value in (targets // form.target_vector, *form.grid):
            narrow += divisor(value)
        params = pack(3 + max(1, len(problem.epilogue.operands)), (), narrow)
        blocks = ceil(count * (targets // form.target_vector) / _THREADS)
        results[count] = Launch(form.results_source, "winograd_results", device, (blocks,), (_THREADS,), params)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        matrices, weights, sums, _ = split(workspace, form.regions, dtype)
        source = aligned(a, form.source_vector * form.size)
        target = aligned(out, form.target_vector * form.size)
        others = [aligned(operand, form.target_vector * form.size) for operand in operands or ()]
        places = [operand.data_ptr() for operand in others]
        filters(b.data_ptr(), weights.data_ptr())
        every = weights.view(points, problem.k, form.filter_row)[:, :, : problem.c]
        for first, count in form.chunks:
            tiles[count](source.data_ptr(), matrices.data_ptr(), first)
            pitch = form.each(count)
            if last:
                rows = matrices[: points * pitch * form.source_row].view(points, pitch, form.source_row)
                made = sums[: points * pitch * form.target_row].view(points, pitch, form.target_row)
                multiply(rows[:, :, :sources], every if backward else every.transpose(1, 2), made[:, :, :targets])
            else:
                planes = matrices[: points * pitch * sources].view(points, sources, pitch)
                made = sums[: points * pitch * targets].view(points, targets, pitch)
                multiply(every.transpose(1, 2) if backward else every, planes, made)
            results[count](sums.data_ptr(), target.data_ptr(), first, *places)
        if target is not out:
            out.copy_(target)

    return run


def _build_wgrad(problem: Problem, device: CudaDevice, knobs: Chunk) -> Runner:
    form = _Form(problem, knobs)
    last, batch, c, k = form.last, form.points * knobs.parts, problem.c, problem.k
    dtype = DTYPES[problem.result_dtype]
    tiles, errors = {}, {}
    for count in {count for _, count in form.chunks}:
        tiles[count] = _launch_tiles(
            form, device, form.tiles_source, form.source_vector, c, form.source_row, form.source_size, form.pad, count
        )
        errors[count] = _launch_tiles(
            form, device, form.errors_source, form.error_vector, k, form.target_row, form.target_size, (0, 0), count
        )
    narrow = [k, form.filter_row, knobs.parts, *form.filter_steps, *divisor(c)]
    blocks = ceil(k * c / _THREADS)
    gradient = Launch(form.gradient_source, "winograd_gradient", device, (blocks,), (_THREADS,), pack(2, (), narrow))

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        of_x, of_y, sums, part = split(workspace, form.regions, dtype)
        x, y = aligned(a, form.source_vector * form.size), aligned(b, form.error_vector * form.size)
        every = sums.view(batch, k, form.filter_row)[:, :, :c]
        again = part.view(batch, k, form.filter_row)[:, :, :c] if part.numel() else part
        for first, count in form.chunks:
            tiles[count](x.data_ptr(), of_x.data_ptr(), first)
            errors[count](y.data_ptr(), of_y.data_ptr(), first)
            each = form.each(count)
            if last:
                xs = of_x[: batch * each * form.source_row].view(batch, each, form.source_row)[:, :, :c]
                ys = of_y[: batch * each * form.target_row].view(batch, each, form.target_row)[:, :, :k].transpose(1, 2)
            else:
                xs = of_x[: batch * each * c].view(batch, c, each).transpose(1, 2)
                ys = of_y[: batch * each * k].view(batch, k, each)
            accumulate(ys, xs, every, again, first=first == 0)
        gradient(sums.data_ptr(), out.data_ptr())

    return run
