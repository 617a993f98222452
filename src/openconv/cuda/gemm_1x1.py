"""cuda.gemm_1x1: convolutions whose windows do not overlap are matrix products, run by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd, prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..epilogue import IDENTITY, Epilogue
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

__all__ = ["Gemm1x1", "Images"]

_THREADS = 256
_UNROLL = 4  # loads that a thread of a copy has under way


@dataclass(frozen=True)
class Images(Knobs):
    """``together``: how images meet in a product. ``batched``: one batched call; ``folded``: their pixels side by side
    in one matrix, which nhwc has anyway; ``alone``: one call for each, whose bits depend on no other image and which
    takes the least memory. ``padded``: rows of windows end at multiples of 16 bytes."""

    together: str
    padded: bool = False


class Gemm1x1(Engine):
    """A filter of one tap, or one that steps by its own size (patch embedding), as a plain matrix product of cuBLAS.

        1x1             y[n] (K x HW) = w (K x C) * x[n] (C x HW)
        stride = R      y[n] (K x PQ) = w (K x CRS) * windows (CRS x PQ), where each value of x is in one window only

    A 1x1 filter of stride 1, and a filter that covers the whole image, multiply x and y where they lie: in nchw one
    product for each image, in nhwc one for the whole batch. Windows, and 1x1 filters that skip pixels, are first put in
    order by a copy no larger than x, at the speed of memory; dgrad puts its product back the same way, epilogue
    included. ``+bias`` and ``+bias+relu`` behind rows of channels (nhwc) are part of the product; any other epilogue is
    one pass over the result.

    Wins on patch embedding, where cuDNN has no good kernel: a ViT-B/16 of 16 images moves 10 MB before a product of
    10 us. Loses on small 1x1 layers to engines that fuse more.
    """

    name = "cuda.gemm_1x1"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from product_refusals(problem)
        if any(low or high for low, high in problem.padding):
            yield f"padding is {problem.padding}; windows that are plain matrix rows need none"
        pointwise = prod(problem.filter) == 1
        patches = problem.stride == problem.filter and set(problem.dilation) == {1}
        if not pointwise and not patches and not _covers(problem):
            yield (
                f"filter is {problem.filter} with stride {problem.stride} and dilation {problem.dilation}; "
                "windows must not overlap: one tap, a stride equal to the filter, or the whole image"
            )
        if not pointwise and problem.groups > 1 and problem.layouts[0] == "nhwc":
            yield f"groups is {problem.groups}; windows in nhwc need one group"

    def traits(self, problem: Problem, knobs: Images) -> Traits:
        alone = problem.direction == "wgrad" or knobs.together == "alone"
        error = sum_error(problem, wide=_Form(problem, knobs).wide)
        return Traits(accumulator(problem), error, batch_invariant=alone)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Images) -> int:
        return sum(region.bytes for region in _Form(problem, knobs).regions)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Images]:
        # Planes are multiplied where they are, or gathered: the batch fills the GPU where dw is small, while planes of
        # 7x7 make poor matrices. Rows of 588 elements (14x14, 3 channels) are read at half the speed, or cost a copy of
        # the filters with longer rows. The cheaper one comes first; one image at a time is for those who ask for it.
        form = _Form(problem, Images("batched"))
        ways = ["folded"] if form.y_rows else ["batched", "folded"]
        pads = [False, True] if form.copied and form.pitch(True) != form.window else [False]
        together = [Images(way, padded) for way in ways for padded in pads]
        yield from sorted(together, key=lambda knobs: self.cost(problem, device, knobs))
        yield from (Images("alone", padded) for padded in pads)

    def cost(self, problem: Problem, device: Device, knobs: Images) -> float:
        assert isinstance(device, CudaDevice)
        form, size = _Form(problem, knobs), DTYPE_BYTES[problem.result_dtype]
        images = 1 if knobs.together == "folded" else problem.n
        pixels = problem.n * form.pixels // images
        depth, k = form.depth, problem.k // problem.groups
        m, n, sums = {"fprop": (k, pixels, depth), "dgrad": (depth, pixels, k), "wgrad": (k, depth, pixels)}[
            problem.direction
        ]
        fits = all(side * size % 16 == 0 for side in (depth, problem.k if form.y_rows else pixels))
        calls, batch = (images, problem.groups) if knobs.together == "alone" else (1, images * problem.groups)
        seconds = calls * gemm_seconds(problem, device, m, n, sums, batch, aligned=fits)
        if form.copied:
            # Runs shorter than a sector of 32 bytes ask for it more than once.
            run = form.geometry.run * size
            seconds += 4.5e-6 + 2 * form.columns * size / (device.bandwidth * min(0.85, 0.35 + run / 64))
        moved = sum(region.elements * region.size for region in form.regions[1:]) * 2
        seconds += (2e-6 + moved / (0.6 * device.bandwidth)) if moved else 0.0
        # By the median of 327 layers on an H200.
        seconds *= 1.5 if not form.y_rows else 1.2 if problem.direction == "wgrad" else 0.92
        if form.y_rows and not form.copied and problem.direction != "wgrad" and size == 2:
            # Of 16 products of ResNet-50, those that are near the limit of memory take longer, others less.
            seconds = 0.85 * seconds + 0.6e-6 + 0.45 * problem.min_bytes / device.bandwidth
        if form.epilogue_behind:
            seconds += pointwise.seconds(problem, device)
        return seconds

    def build(self, problem: Problem, device: Device, knobs: Images) -> Runner:
        assert isinstance(device, CudaDevice)
        form = _Form(problem, knobs)
        whole = form.images == problem.n and problem.groups == 1 and problem.direction != "wgrad"
        if whole and not form.epilogue_behind and not any(region.elements for region in form.regions):
            if form.y_rows:
                return _build_plain(problem, knobs)
            if not form.copied:
                return _build_planes(problem, form)
        return _build(problem, device, knobs)

    def sources(self, problem: Problem, device: Device, knobs: Images) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        form = _Form(problem, knobs)
        found = [form.source] if form.copied else []
        return [*found, pointwise.source(problem)] if form.epilogue_behind else found


# -- what lies where ------------------------------------------------------------------------------------------------


def _covers(problem: Problem) -> bool:
    """One window that is the whole image."""
    return problem.filter == problem.spatial and prod(problem.out) == 1


@dataclass(frozen=True)
class _Geometry:
    """The axes of gemm_1x1.cu: ``images`` of ``planes`` planes of ``size``, windows of ``taps`` at every ``step``.
    The last axis counts elements, of which a tap of nhwc has C."""

    images: int
    planes: int
    size: tuple[int, ...]
    step: tuple[int, ...]
    taps: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def run(self) -> int:
        """Elements that are side by side in the image and in a window."""
        return self.taps[2]


class _Form:
    """A problem as matrices: which are rows of a pixel each, which are planes, and what is copied.

    ``window`` counts the elements of x that one output pixel depends on, ``depth`` those of one group, with padding.
    """

    def __init__(self, problem: Problem, knobs: Images) -> None:
        self.problem, self.knobs = problem, knobs
        self.last = problem.layouts[0] == "nhwc"
        self.pixels = prod(problem.out)
        self.window = problem.c * prod(problem.filter)
        single = prod(problem.filter) == 1
        # One pixel of channels is a row in either layout.
        self.y_rows = self.last or self.pixels == 1
        self.x_rows = self.last or not single or self.pixels == 1
        in_place = (single and (prod(problem.stride) == 1 or problem.spatial == problem.out)) or _covers(problem)
        self.copied = not in_place
        self.row = self.pitch(knobs.padded) if self.copied and self.x_rows else self.window
        self.depth = self.row // problem.groups

    def pitch(self, padded: bool) -> int:
        """Elements from one row of windows to the next."""
        unit = 16 // DTYPE_BYTES[self.problem.result_dtype]
        fits = self.problem.groups == 1 and self.x_rows
        return ceil(self.window / unit) * unit if padded and fits else self.window

    @property
    def images(self) -> int:
        """Images that are copied at once."""
        return 1 if self.knobs.together == "alone" else self.problem.n

    @property
    def columns(self) -> int:
        """Elements of all windows of a batch."""
        return self.problem.n * self.pixels * self.row if self.copied else 0

    @cached_property
    def geometry(self) -> _Geometry:
        problem, lead = self.problem, (1,) * (3 - self.problem.rank)
        size, step, taps, out = (
            (*lead, *v) for v in (problem.spatial, problem.stride, problem.filter, problem.out)
        )  # fmt: skip
        c = problem.c
        if self.last:
            size, step, taps = ((*v[:2], v[2] * c) for v in (size, step, taps))
            return _Geometry(self.images, 1, size, step, taps, out)
        if self.x_rows:
            return _Geometry(self.images, c, size, step, taps, out)
        return _Geometry(self.images * c, 1, size, step, taps, out)

    @property
    def step(self) -> int:
        """Elements from one window to the next in the copy: a row, or one element of a plane."""
        return self.row if self.x_rows else 1

    @cached_property
    def vector(self) -> int:
        """Elements that one thread of the copy moves at once: at most 16 bytes, within every run of both sides."""
        geometry, problem = self.geometry, self.problem
        most = 16 // DTYPE_BYTES[problem.result_dtype]
        sides = [geometry.taps[2], geometry.step[2], geometry.size[2], self.step]
        if geometry.out[2] == 1:
            sides.remove(geometry.step[2])
        if problem.direction == "dgrad" and self.last and any(o.kind == "channel" for o in problem.epilogue.operands):
            sides.append(problem.c)
        return gcd(most, *sides)

    @property
    def source(self) -> jit.Source:
        """The copy. Only scatter has an epilogue."""
        problem = self.problem if self.problem.direction == "dgrad" else self.problem.with_(epilogue=IDENTITY)
        small = max(self.columns, prod(self.problem.x_shape)) < 2**31
        constants: dict[str, int | bool | str] = {
            "Columns": "float" if self.wide and self.scattered else problem.result_dtype,
            "Offset": "int" if small else "i64", "vector": self.vector, "unroll": _UNROLL, "channels_last": self.last,
        }  # fmt: skip
        return jit.Source("gemm_1x1.cu", render.traits(problem, constants))

    @property
    def scattered(self) -> bool:
        """Whether dx is put together from its windows, which computes any epilogue as well."""
        return self.copied and self.problem.direction == "dgrad"

    @property
    def bias(self) -> str | None:
        """``bias`` or ``bias+relu`` where the product can do it: rows of all channels."""
        problem = self.problem
        if not self.y_rows or problem.groups > 1:
            return None
        if problem.direction == "dgrad" and (self.copied or prod(problem.filter) > 1):
            return None  # rows of dx are windows, while the bias has channels alone
        operands = problem.epilogue.operands
        if len(operands) != 1 or operands[0].kind != "channel":
            return None
        plain = Epilogue().bias(operands[0].name)
        return {plain: "bias", plain.relu(): "bias+relu"}.get(problem.epilogue)

    @property
    def epilogue_behind(self) -> bool:
        """Whether a kernel of its own computes the epilogue."""
        return not self.problem.epilogue.is_identity and self.bias is None and not self.scattered

    @property
    def wide(self) -> bool:
        """Whether a product leaves its sums in f32: dw, whose sum is the longest, and where an epilogue follows."""
        problem = self.problem
        behind = not problem.epilogue.is_identity and self.bias is None
        return pointwise.wide(problem) and (problem.direction == "wgrad" or behind)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the workspace: windows of x; x and y gathered from all images; sums that an epilogue follows;
        filters in another order or with longer rows; parts of dw, of which the images of a wgrad have one each."""
        problem, size = self.problem, DTYPE_BYTES[self.problem.result_dtype]
        fold, direction = self.knobs.together == "folded", problem.direction
        sums = 4 if self.wide else size
        pixels = self.images * self.pixels
        columns = pixels * self.row if self.copied else 0
        x = self.window * pixels if fold and not self.x_rows else 0
        y = problem.k * pixels if fold and not self.y_rows else 0
        behind = prod(problem.result_shape) // problem.n * self.images if self.wide and self.epilogue_behind else 0
        reorder = problem.layouts[0] != problem.layouts[1] and prod(problem.filter) > 1 and problem.w_shape[1] > 1
        filters = problem.k * self.depth
        wgrad = direction == "wgrad"
        spare = filters if reorder or self.row != self.window or (wgrad and self.wide) else 0
        batched = self.knobs.together == "batched" and problem.n > 1
        parts = filters * problem.n if batched else filters if problem.n > self.images and self.wide else 0
        return (
            Region(columns, sums if self.scattered else size),
            Region(x, sums if direction == "dgrad" else size),
            Region(y, sums if direction == "fprop" else size),
            Region(behind, 4),
            Region(spare, sums if wgrad else size),
            Region(parts if wgrad else 0, sums),
        )


# -- runs -----------------------------------------------------------------------------------------------------------


def _relu_behind(bias: Tensor, source: Tensor, filters: Tensor, out: Tensor) -> Tensor:
    """For a torch that has lost its private function of this."""
    return torch.addmm(bias, source, filters, out=out).relu_()


# cuBLAS adds the bias and takes the maximum before it rounds.
_product_and_bias: dict[str | None, Callable[..., Tensor]] = {
    None: lambda _, source, filters, out: torch.mm(source, filters, out=out),
    "bias": torch.addmm,
    "bias+relu": getattr(torch, "_addmm_activation", None) or _relu_behind,
}


def _build_plain(problem: Problem, knobs: Images) -> Runner:
    """One product on the tensors as they are: the usual case of nhwc, with as few calls of torch as it takes."""
    form = _Form(problem, knobs)
    forward, rows, K, depth = problem.direction == "fprop", problem.n * form.pixels, problem.k, form.depth
    inner, outer = (depth, K) if forward else (K, depth)
    filter_strides = (1, depth) if forward else (depth, 1)
    product = _product_and_bias[form.bias]

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        source = a.as_strided((rows, inner), (inner, 1))
        filters = b.as_strided((inner, outer), filter_strides)
        product(operands[0] if operands else None, source, filters, out=out.as_strided((rows, outer), (outer, 1)))

    return run


def _build_planes(problem: Problem, form: _Form) -> Runner:
    """The same for nchw: a product of each image's planes, which share the filters."""
    n, pixels, K, depth = problem.n, form.pixels, problem.k, form.depth
    inner, outer = (depth, K) if problem.direction == "fprop" else (K, depth)
    filter_strides = (0, depth, 1) if problem.direction == "fprop" else (0, 1, depth)
    sizes, strides = (
        ((n, inner, pixels), (n, outer, pixels)),
        ((inner * pixels, pixels, 1), (outer * pixels, pixels, 1)),
    )

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        filters = b.as_strided((n, outer, inner), filter_strides)
        target = out.as_strided(sizes[1], strides[1])
        torch.bmm(filters, a.as_strided(sizes[0], strides[0]), out=target)

    return run


def _build(problem: Problem, device: CudaDevice, knobs: Images) -> Runner:
    """Copies, products and what follows, for all images at once or for one after the other."""
    form = _Form(problem, knobs)
    groups, direction, N = problem.groups, problem.direction, problem.n
    images, rows, fold = form.images, form.images * form.pixels, knobs.together == "folded"
    move = _copy(form, device) if form.copied else None
    epilogue = Pointwise(problem, device, images) if form.epilogue_behind else None
    unit = form.vector * DTYPE_BYTES[problem.result_dtype]
    dtype = DTYPES[problem.result_dtype]
    kinds = [operand.kind for operand in problem.epilogue.operands]

    def matrices(memory: Tensor, row: int, is_rows: bool) -> Tensor:
        """Rows of a pixel each, or planes, as (batch, G, row / G, pixels)."""
        if is_rows:
            batch = 1 if form.y_rows or fold else images
            return memory.view(batch, rows // batch, groups, row // groups).permute(0, 2, 3, 1)
        return memory.view(images, groups, row // groups, form.pixels)

    def gathered(memory: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """Planes of all images side by side, as a matrix and in the order of the images."""
        return memory.view(1, groups, channels // groups, rows), memory.view(channels, N, form.pixels).transpose(0, 1)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        columns, side_x, side_y, sums, spare, parts = split(workspace, form.regions, dtype)
        all_x, w, all_y = {"fprop": (a, b, out), "dgrad": (out, b, a), "wgrad": (a, out, b)}[direction]
        weights = filter_rows(w, problem, form.depth, spare)
        if move is not None:
            all_x = aligned(all_x, unit)
            operands = tuple(aligned(operand, unit) for operand in operands)
        for n in range(0, N, images):
            x, y, result = (v[n : n + images] if images < N else v for v in (all_x, all_y, out))
            here = [v[n : n + images] if kind == "tensor" else v for v, kind in zip(operands, kinds, strict=True)]
            if move is not None and direction != "dgrad":
                move(x, columns, [])
            behind = sums if form.wide and epilogue is not None else None
            inner = columns if move is not None else behind if behind is not None and direction == "dgrad" else flat(x)
            outer = behind if behind is not None and direction == "fprop" else flat(y)
            if form.bias is not None:
                rows_x, rows_y = inner.view(rows, form.row), outer.view(rows, problem.k)
                if direction == "fprop":
                    _product_and_bias[form.bias](operands[0], rows_x, weights[0].t(), out=rows_y)
                else:
                    _product_and_bias[form.bias](operands[0], rows_y, weights[0], out=rows_x)
                continue
            # What is folded is gathered before the product, and put back behind it.
            ys, back_y = matrices(outer, problem.k, form.y_rows), None
            xs, back_x = matrices(inner, form.row, form.x_rows), None
            if side_y.numel():
                ys, back_y = gathered(side_y, problem.k)
            if side_x.numel():
                xs, back_x = gathered(side_x, form.row)
            if back_y is not None and direction != "fprop":
                back_y.copy_(outer.view(back_y.shape))
            if back_x is not None and direction != "dgrad":
                back_x.copy_(inner.view(back_x.shape))
            products(direction, xs, weights, ys, parts, first=n == 0)
            if back_y is not None and direction == "fprop":
                outer.view(back_y.shape).copy_(back_y)
            if back_x is not None and direction == "dgrad":
                inner.view(back_x.shape).copy_(back_x)
            if move is not None and direction == "dgrad":
                move(x, columns, here)
            if epilogue is not None:
                epilogue(result, here, behind)
        if direction == "wgrad":
            store_filter_rows(weights, w, problem)
        elif direction == "dgrad" and all_x is not out:
            out.copy_(all_x)

    return run


def _copy(form: _Form, device: CudaDevice) -> Callable[[Tensor, Tensor, Sequence[Tensor]], None]:
    """``copy(image, columns, operands)``: gather, or in a dgrad scatter with the epilogue."""
    geometry, vector, backward = form.geometry, form.vector, form.scattered
    _, planes, size, step, taps, out = vars(geometry).values()
    lines = geometry.images * (planes * size[0] * size[1] if backward else out[0] * out[1])
    length = size[2] // vector if backward else out[2] * form.step // vector
    narrow = [lines, length, planes * prod(taps), form.step]
    for value in (*size, *step, *taps[:2], taps[2] // vector, *out[:2], form.step // vector, planes, form.problem.c):
        narrow += divisor(value)
    params = pack(2 + max(1, len(form.problem.epilogue.operands) if backward else 0), (), (*narrow, out[2]))
    across = min(_THREADS, max(32, 1 << (length - 1).bit_length()))
    down = _THREADS // across
    grid = (ceil(lines / down), min(ceil(length / (_UNROLL * across)), 65535))
    launch = Launch(form.source, "scatter" if backward else "gather", device, grid, (across, down), params)

    def copy(image: Tensor, columns: Tensor, operands: Sequence[Tensor]) -> None:
        launch(image.data_ptr(), columns.data_ptr(), *(operand.data_ptr() for operand in operands))

    return copy
