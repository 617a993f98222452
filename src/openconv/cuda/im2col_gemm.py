"""cuda.im2col_gemm: convolution as matrix products of cuBLAS over panels of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..epilogue import IDENTITY
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES
from . import jit, pointwise, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, aligned, pack
from .matrices import (
    Region,
    accumulator,
    filter_rows,
    flat,
    gemm_seconds,
    product_refusals,
    products,
    split,
    store_filter_rows,
    sum_error,
)
from .pointwise import Pointwise

__all__ = ["Im2colGemm", "Panel"]

_THREADS = 256
_BLOCKS = 8  # that unfolding copies have for a multiprocessor, if there are as many
_LEAST_TAPS = 8  # of a block, in nchw
_UNROLL = 4  # loads that a thread of an unfolding copy has under way
_BUDGETS = (256 << 20, 64 << 20, 16 << 20, 4 << 20)  # bytes of columns


@dataclass(frozen=True)
class Panel(Knobs):
    """What a panel of columns holds: ``images`` images, or ``pixels`` outputs of one; in a dgrad, where a value of dx
    needs all pixels, ``channels`` input channels: whole groups, or some channels of one group."""

    images: int
    pixels: int
    channels: int


class Im2colGemm(Engine):
    """Unfold the input into columns, a panel at a time, and leave the arithmetic to a matrix product of cuBLAS.

        fprop   y    = w (K x CTRS)    * columns(x) (CTRS x pixels)
        wgrad   dw   = dy (K x pixels) * columns(x) (CTRS x pixels), transposed
        dgrad   columns(dx) = w, transposed * dy; each value of dx then adds up what its windows say of it

    Columns take T*R*S times the memory of x, so that only a panel of them exists at a time: 256 MB or less, and as
    little as a limit on the workspace asks for. In nhwc the matrices are transposed: a row holds one pixel's window,
    copied in vectors of channels. Sums of f16 and bf16 stay f32 until they are whole: those of a wgrad over all panels,
    those of a dgrad over all taps.

    It takes every floating-point problem of one, two or three axes. Wins where no engine is made for a layer and its
    products are large; loses to all that read x once: columns are written and read T*R*S times.
    """

    name = "cuda.im2col_gemm"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from product_refusals(problem)
        if max(*problem.spatial, prod(problem.out)) >= 2**31:
            yield f"an output image has {prod(problem.out)} pixels; its kernels count to 2^31"

    def traits(self, problem: Problem, knobs: Panel) -> Traits:
        # One image in each product keeps the library's order of summation, whatever the batch.
        alone = problem.direction == "wgrad" or knobs.images == 1
        return Traits(accumulator(problem), sum_error(problem, wide=_Form(problem, knobs).wide), batch_invariant=alone)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Panel) -> int:
        return sum(region.bytes for region in _Form(problem, knobs).regions)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Panel]:
        found = dict.fromkeys(
            _panel(each, budget) for each in (problem, problem.with_(n=1)) for budget in _BUDGETS
        )  # fmt: skip
        return tuple(found)

    def cost(self, problem: Problem, device: Device, knobs: Panel) -> float:
        assert isinstance(device, CudaDevice)
        form = _Form(problem, knobs)
        # Columns are written and read once by us, and once by cuBLAS.
        copied = 2 * problem.n * prod(problem.out) * form.window * form.column_size
        panels = len(form.panels)
        each, images = knobs.pixels, 1 if form.last or form.gathers or problem.direction == "wgrad" else knobs.images
        pixels = each * (knobs.images // images)
        depth, k = form.depth, problem.k // problem.groups
        m, n, sums = {"fprop": (k, pixels, depth), "dgrad": (depth, pixels, k), "wgrad": (k, depth, pixels)}[
            problem.direction
        ]
        size = DTYPE_BYTES[problem.result_dtype]
        # Rows of a panel in nchw are as far apart as those of y, however many pixels it has.
        row = problem.k if form.last else gcd(pixels, prod(problem.out))
        fits = depth * size % 16 == 0 and (form.gathers or row * size % 16 == 0)
        batch = images * min(problem.groups, max(1, knobs.channels // (problem.c // problem.groups)))
        # Fitted to 991 times on an H200: products take 0.6 of what gemm_seconds says, or 1.3 where rows of pixels in
        # nchw begin anywhere. An unfolding copy reads x out of the caches. It is bound by its stores, or where channels
        # make no vectors by working out places.
        easy = form.last or fits or m < 100
        whole = problem.c // problem.groups * size % 16 == 0
        slower = 0.6 if easy else 1.3
        copies = (0.8 if whole else 4.0) if form.last else 5.0 if problem.direction == "dgrad" else 1.7 if easy else 4.0
        seconds = 6e-6 + panels * (1e-6 + slower * gemm_seconds(problem, device, m, n, sums, batch, aligned=fits))
        seconds += copied * copies / device.bandwidth + problem.min_bytes / device.bandwidth
        if form.gathers and problem.direction == "dgrad":
            seconds += 2e-6 + 3.0 * prod(problem.y_shape) * size / device.bandwidth
        if problem.direction == "wgrad":  # which is put in order behind
            seconds += 3.4 * prod(problem.w_shape) * size / device.bandwidth
        return seconds + pointwise.seconds(problem, device) * (problem.direction == "fprop")

    def build(self, problem: Problem, device: Device, knobs: Panel) -> Runner:
        assert isinstance(device, CudaDevice)
        return (_build_dgrad if problem.direction == "dgrad" else _build_unfolding)(problem, device, knobs)

    def sources(self, problem: Problem, device: Device, knobs: Panel) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        form = _Form(problem, knobs)
        if problem.direction == "dgrad":
            return [form.col2im(channels) for channels in form.widths]
        behind = [pointwise.source(problem, count) for count in form.counts] if form.epilogue_behind else []
        return list(dict.fromkeys([form.im2col, *behind]))


# -- panels ---------------------------------------------------------------------------------------------------------


def _panel(problem: Problem, budget: int) -> Panel:
    """As much as the budget of bytes holds: whole images, or a part of one."""
    size = DTYPE_BYTES[problem.result_dtype]
    backward = problem.direction == "dgrad"
    taps, out, C = prod(problem.filter), prod(problem.out), problem.c
    pixel = C * taps * (max(size, 4) if backward else size)
    if problem.direction != "fprop" and problem.layouts[0] == "nchw":
        pixel += problem.k * size  # dy, gathered
    elif problem.direction == "fprop" and pointwise.wide(problem):
        pixel += problem.k * 4  # sums
    image = out * pixel
    # Kernels count the values of a panel in 31 bits.
    image = max(image, 1, ceil(budget * C * prod(problem.spatial) / 2**30) if backward else 1)
    if image <= budget:
        return Panel(images=min(budget // image, problem.n), pixels=out, channels=C)
    if not backward:
        # Multiples of 8 keep all rows of f16 at multiples of 16 bytes.
        return Panel(images=1, pixels=min(out, max(8, budget // (image // out) // 8 * 8)), channels=C)
    own = C // problem.groups
    channels = max(1, budget * C // image)
    if channels >= own:
        channels = channels // own * own
    elif channels >= 8:
        channels = channels // 8 * 8
    return Panel(images=1, pixels=out, channels=min(channels, C))


class _Form:
    """A problem in panels: what lies where, and how much of it there is at a time."""

    def __init__(self, problem: Problem, knobs: Panel) -> None:
        self.problem, self.knobs = problem, knobs
        self.last = problem.layouts[0] == "nhwc"
        self.taps, self.out = prod(problem.filter), prod(problem.out)
        self.size = DTYPE_BYTES[problem.result_dtype]
        self.window = problem.c * self.taps
        backward = problem.direction == "dgrad"
        self.column_size = max(self.size, 4) if backward else self.size
        # Rows of a window in nhwc end at multiples of 16 bytes, which products read twice as fast; zeros fill them up.
        unit = 16 // self.size
        padded = self.last and problem.groups == 1 and not backward
        self.row = ceil(self.window / unit) * unit if padded else self.window
        self.depth = self.row // problem.groups

    @property
    def gathers(self) -> bool:
        """Whether dy of nchw is copied before: all images' pixels side by side for a wgrad, and for a dgrad too where
        rows of pixels would not begin at multiples of 16 bytes."""
        direction = self.problem.direction
        if self.last or direction == "fprop":
            return False
        return self.knobs.images > 1 if direction == "wgrad" else self.out * self.size % 16 != 0

    @property
    def wide(self) -> bool:
        """Whether sums of f16 and bf16 are f32 until an epilogue, another panel or another tap was added."""
        return pointwise.wide(self.problem) and (self.problem.direction != "fprop" or self.epilogue_behind)

    @property
    def epilogue_behind(self) -> bool:
        """Whether a kernel of its own computes the epilogue, or rounds the sums."""
        return self.problem.direction == "fprop" and (not self.problem.epilogue.is_identity or self.may_split)

    @property
    def may_split(self) -> bool:
        """Whether cuBLAS may add up parts that are rounded to f16 or bf16: long sums of few results, which it splits to
        fill the GPU. A sum of 1881 products in bf16 was off by 2%."""
        problem = self.problem
        tiles = ceil(problem.k / problem.groups / 128) * ceil(self.knobs.images * self.knobs.pixels / 128)
        return pointwise.wide(problem) and self.depth > 256 and tiles * problem.groups < 512

    @cached_property
    def panels(self) -> list[tuple[int, int, int, int]]:
        """(first image, images, first pixel, pixels); in a dgrad (first image, images, first channel, channels)."""
        problem, knobs = self.problem, self.knobs
        if problem.direction == "dgrad":
            own = problem.c // problem.groups
            ends = list(range(0, problem.c, knobs.channels)) if knobs.channels >= own else [
                g * own + c for g in range(problem.groups) for c in range(0, own, knobs.channels)
            ]  # fmt: skip
            parts = list(zip(ends, [*ends[1:], problem.c], strict=True))
        else:
            parts = [(p, min(p + knobs.pixels, self.out)) for p in range(0, self.out, knobs.pixels)]
        images = range(0, problem.n, knobs.images)
        return [(n, min(knobs.images, problem.n - n), at, end - at) for n in images for at, end in parts]

    @property
    def counts(self) -> list[int]:
        """The different numbers of pixels in panels."""
        return sorted({count for _, _, _, count in self.panels})

    @property
    def widths(self) -> list[int]:
        """The different numbers of channels in panels."""
        return self.counts

    def pitch(self, images: int, count: int) -> int:
        """Elements from row to row of the columns of a panel: of pixels in nchw, of windows in nhwc."""
        unit = 16 // self.size
        if not self.last:
            return ceil(images * (self.out if self.problem.direction == "dgrad" else count) / unit) * unit
        return count * self.taps if self.problem.direction == "dgrad" else self.row

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the workspace: columns; dy of nchw, gathered; sums that an epilogue follows;
        filters in another order; the part of dw that one panel adds, and in a dgrad some channels of the filters."""
        problem, knobs, size = self.problem, self.knobs, self.size
        backward, wgrad = problem.direction == "dgrad", problem.direction == "wgrad"
        width = knobs.images * knobs.pixels
        channels = knobs.channels if backward else problem.c
        if self.last:
            columns = width * (self.row if not backward else channels * self.taps)
        else:
            columns = channels * self.taps * self.pitch(knobs.images, channels if backward else knobs.pixels)
        gathered = problem.k * self.pitch(knobs.images, knobs.pixels) if self.gathers else 0
        behind = problem.k * width if self.wide and self.epilogue_behind else 0
        filters = problem.k * self.depth
        reorder = problem.layouts[0] != problem.layouts[1] and self.taps > 1 and problem.w_shape[1] > 1
        spare = filters if reorder or self.row != self.window or (wgrad and self.wide) else 0
        part = 0
        if wgrad and self.wide and len(self.panels) > 1:
            part = filters
        elif backward and self.last and self.taps > 1 and channels < problem.c // problem.groups:
            part = problem.k // problem.groups * channels * self.taps
        return (
            Region(columns, self.column_size),
            Region(gathered, size),
            Region(behind, 4),
            Region(spare, 4 if wgrad and self.wide else size),
            Region(part, 4 if wgrad and self.wide else size),
        )

    # -- kernels ----------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> str:
        largest = max(prod(self.problem.x_shape), self.regions[0].elements + (1 << 20))
        return "int" if largest < 2**31 else "i64"

    @property
    def vector(self) -> int:
        """Channels that a thread of an unfolding copy moves at once."""
        own = self.problem.c // self.problem.groups
        return gcd(16 // self.size, own, self.row) if self.last else 1

    def vector_back(self, channels: int) -> int:
        """Channels that a thread of a folding copy adds up at once."""
        own = self.problem.c // self.problem.groups
        return gcd(16 // self.size, own, channels, min(self.knobs.channels, own)) if self.last else 1

    @property
    def im2col(self) -> jit.Source:
        constants: dict[str, int | bool | str] = {
            "Offset": self.offset, "channels_last": self.last, "vector": self.vector, "unroll": _UNROLL,
        }  # fmt: skip
        return jit.Source("im2col.cu", render.traits(self.problem.with_(epilogue=IDENTITY), constants))

    def col2im(self, channels: int) -> jit.Source:
        constants: dict[str, int | bool | str] = {
            "Columns": "float" if pointwise.wide(self.problem) else self.problem.result_dtype,
            "Offset": self.offset, "channels_last": self.last, "vector": self.vector_back(channels),
        }  # fmt: skip
        return jit.Source("col2im.cu", render.traits(self.problem, constants))


def _three(values: Iterable[int], missing: int = 1) -> tuple[int, ...]:
    """One entry for each of three axes, from those of the problem."""
    given = tuple(values)
    return (missing,) * (3 - len(given)) + given


# -- runs -----------------------------------------------------------------------------------------------------------


def _build_unfolding(problem: Problem, device: CudaDevice, knobs: Panel) -> Runner:
    """fprop and wgrad: columns of x, then a product."""
    form = _Form(problem, knobs)
    direction, groups, K, last = problem.direction, problem.groups, problem.k, form.last
    dtype, kg, depth = DTYPES[problem.result_dtype], problem.k // problem.groups, form.depth
    unfold = {(images, count): _unfold(form, device, images, count) for _, images, _, count in form.panels}
    epilogues: dict[tuple[int, int], Pointwise] = {}
    if form.epilogue_behind and form.wide:
        epilogues = {(i, c): Pointwise(problem, device, i, c) for i, c in unfold}
    whole = Pointwise(problem, device) if form.epilogue_behind and not form.wide else None
    kinds = [operand.kind for operand in problem.epilogue.operands]

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        columns, gathered, sums, spare, part = split(workspace, form.regions, dtype)
        w, y = (out, b) if direction == "wgrad" else (b, out)
        x = aligned(a, form.vector * form.size)
        weights = filter_rows(w, problem, depth, spare)
        for at, (n, images, first, count) in enumerate(form.panels):
            width, pitch = images * count, form.pitch(images, count)
            unfold[images, count](x[n : n + images], columns, first)

            def pixels(tensor: Tensor) -> Tensor:
                """The panel's part of a tensor like y: of nhwc its pixels alone."""
                here = tensor[n : n + images]  # noqa: B023
                return flat(here)[first * K : first * K + width * K] if last else here  # noqa: B023

            ys = pixels(y)
            if last:
                xs = columns[: width * pitch].view(1, width, groups, depth).permute(0, 2, 3, 1)
                rows = sums[: width * K] if sums.numel() else ys
                ys = rows.view(1, width, groups, kg).permute(0, 2, 3, 1)
            else:
                # (images, G, depth, pixels), or all images' pixels side by side.
                apart = (images, groups, depth, count), (count, depth * pitch, pitch, 1)
                side = (1, groups, depth, width), (0, depth * pitch, pitch, 1)
                xs = columns.as_strided(*(side if gathered.numel() else apart))
                ys = ys.view(images, groups, kg, form.out)[..., first : first + count]
                if gathered.numel():
                    all_images = gathered[: K * width].view(groups, kg, images, count)
                    all_images.copy_(ys.permute(1, 2, 0, 3))
                    ys = all_images.view(1, groups, kg, width)
                elif sums.numel():
                    ys = sums[: K * width].view(images, groups, kg, count)
            products(direction, xs, weights, ys, part, first=at == 0)
            if epilogues:
                here = [pixels(v) if kind == "tensor" else v for v, kind in zip(operands, kinds, strict=True)]
                epilogues[images, count](pixels(out), here, sums, 0 if last else first)
        if direction == "wgrad":
            store_filter_rows(weights, w, problem)
        elif whole is not None:
            whole(out, operands)

    return run


def _build_dgrad(problem: Problem, device: CudaDevice, knobs: Panel) -> Runner:
    """A product for columns of dx, then their sums over windows, epilogue included."""
    form = _Form(problem, knobs)
    groups, last, taps = problem.groups, form.last, form.taps
    dtype, kg, own = DTYPES[problem.result_dtype], problem.k // problem.groups, problem.c // problem.groups
    fold = {(images, channels): _fold(form, device, images, channels) for _, images, _, channels in form.panels}
    kinds = [operand.kind for operand in problem.epilogue.operands]
    alignment = max(form.vector_back(channels) for channels in form.widths) * form.size

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        columns, gathered, _, spare, part = split(workspace, form.regions, dtype)
        dx = aligned(out, alignment)
        operands = tuple(aligned(operand, alignment) for operand in operands)
        weights = filter_rows(b, problem, own * taps, spare)
        for n, images, first, channels in form.panels:
            width, pitch = images * form.out, form.pitch(images, channels)
            # Whole groups, or some channels of one.
            g0, parts = first // own, max(1, channels // own)
            filters, each = weights[g0 : g0 + parts], channels // parts
            if each < own and last:
                some = weights[g0].view(kg, taps, own)[:, :, first % own : first % own + each]
                filters = some.reshape(1, kg, each * taps) if taps == 1 else part[: some.numel()].view(1, kg, -1)
                if taps > 1:
                    filters.view(some.shape).copy_(some)
            elif each < own:
                filters = filters[:, :, first % own * taps : (first % own + each) * taps]
            ys = a[n : n + images]
            depth = each * taps
            if last:
                ys = flat(ys).view(1, width, groups, kg).permute(0, 2, 3, 1)[:, g0 : g0 + parts]
                xs = columns[: width * pitch].view(1, width, parts, depth).permute(0, 2, 3, 1)
            elif form.gathers:  # all images' pixels side by side
                ys = ys.view(images, groups, kg, form.out)[:, g0 : g0 + parts]
                strides = (kg * pitch, pitch, form.out, 1)
                gathered.as_strided((parts, kg, images, form.out), strides).copy_(ys.permute(1, 2, 0, 3))
                ys = gathered.as_strided((1, parts, kg, width), (0, kg * pitch, pitch, 1))
                xs = columns.as_strided((1, parts, depth, width), (0, depth * pitch, pitch, 1))
            else:
                ys = ys.view(images, groups, kg, form.out)[:, g0 : g0 + parts]
                xs = columns.as_strided((images, parts, depth, form.out), (form.out, depth * pitch, pitch, 1))
            products("dgrad", xs, filters, ys, part, first=True)
            here = [v[n : n + images] if kind == "tensor" else v for v, kind in zip(operands, kinds, strict=True)]
            fold[images, channels](dx[n : n + images], columns, first, here)
        if dx is not out:
            out.copy_(dx)

    return run


def _unfold(form: _Form, device: CudaDevice, images: int, count: int) -> Callable[[Tensor, Tensor, int], None]:
    """``unfold(x, columns, first)``: the columns of ``count`` pixels of each image, from one on."""
    problem, vector = form.problem, form.vector
    width, pitch = images * count, form.pitch(images, count)
    filters, out, own = _three(problem.filter), _three(problem.out), problem.c // problem.groups
    narrow = [width, problem.c, form.window, pitch, *_three(problem.spatial)]
    narrow += [*_three((low for low, _ in problem.padding), 0), *_three(problem.stride), *_three(problem.dilation)]
    narrow += filters
    # Where pixels and channels are few, a channel's taps are shared.
    few = ceil(_BLOCKS * device.threads / (ceil(width / _THREADS) * problem.c))
    each = ceil(form.taps / max(1, min(few, form.taps // _LEAST_TAPS)))
    parts = ceil(form.taps / each)
    for value in (count, *out[1:], max(1, pitch // vector), own // vector, *filters, parts):
        narrow += divisor(value)
    narrow.append(each)
    if form.last:
        grid: tuple[int, ...] = (ceil(width * (pitch // vector) / (_THREADS * _UNROLL)),)
    else:
        grid = (ceil(width / _THREADS), min(problem.c * parts, 65535))
    launch = Launch(form.im2col, "im2col", device, grid, (_THREADS,), pack(3, (), narrow))

    def unfold(x: Tensor, columns: Tensor, first: int) -> None:
        launch(x.data_ptr(), columns.data_ptr(), first)

    return unfold


def _fold(
    form: _Form, device: CudaDevice, images: int, channels: int
) -> Callable[[Tensor, Tensor, int, list[Tensor]], None]:
    """``fold(dx, columns, first, operands)``: some channels of dx, from one on."""
    problem, vector = form.problem, form.vector_back(channels)
    run = min(channels, problem.c // problem.groups)
    count = images * channels // vector * prod(problem.spatial)
    narrow = [problem.c, form.pitch(images, channels), *_three(problem.filter), *_three(problem.out)]
    narrow += [*_three((low for low, _ in problem.padding), 0), *_three(problem.dilation)]
    narrow += _three(s // gcd(s, d) for s, d in zip(problem.stride, problem.dilation, strict=True))
    for value in (*_three(problem.spatial), *_three(problem.stride), channels // vector, run // vector):
        narrow += divisor(value)
    params = pack(3 + max(1, len(problem.epilogue.operands)), (count,), narrow)
    launch = Launch(form.col2im(channels), "col2im", device, (ceil(count / _THREADS),), (_THREADS,), params)

    def fold(dx: Tensor, columns: Tensor, first: int, operands: list[Tensor]) -> None:
        launch(dx.data_ptr(), columns.data_ptr(), first, *(operand.data_ptr() for operand in operands))

    return fold
