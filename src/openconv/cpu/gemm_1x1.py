"""cpu.gemm_1x1: convolutions whose windows do not overlap are matrix products as they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES
from .matrices import Region, filter_matrix, float_refusals, gemm_seconds, store_filter_matrix, sum_error

__all__ = ["Gemm1x1"]


@dataclass(frozen=True)
class Images(Knobs):
    """``together``: how images meet in a product. ``batched``: one batched call; ``folded``: their pixels side by side
    in one matrix, which nhwc has anyway; ``alone``: one call for each, whose bits then depend on no other image."""

    together: str


class Gemm1x1(Engine):
    """A filter of one tap, or one that steps by its own size (patch embedding), read as a plain matrix product.

        1x1             y[n] (K x HW) = w (K x C) * x[n] (C x HW)
        stride = R      y (K x PQ)    = w (K x CRS) * patches (CRS x PQ), where each value of x is in one patch only

    A 1x1 filter of stride 1 multiplies x and y where they lie: in nchw one product for each image, in nhwc one for the
    whole batch. Patches, and 1x1 filters that skip pixels, are first put in order by a copy no larger than x. dgrad and
    wgrad are the same products with other sides transposed.

    Wins on all it accepts, except for very few channels.
    """

    name = "cpu.gemm_1x1"

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from float_refusals(problem)
        if any(low or high for low, high in problem.padding):
            yield f"padding is {problem.padding}; windows that are plain matrix rows need none"
        pointwise = prod(problem.filter) == 1
        patches = problem.stride == problem.filter and set(problem.dilation) == {1}
        if not pointwise and not patches:
            yield (
                f"filter is {problem.filter} with stride {problem.stride} and dilation {problem.dilation}; "
                "windows must not overlap: one tap, or a stride equal to the filter"
            )
        if not pointwise and problem.groups > 1 and problem.layouts[0] == "nhwc":
            yield f"groups is {problem.groups}; patches in nhwc need one group"

    def traits(self, problem: Problem, knobs: Images) -> Traits:
        alone = problem.direction == "wgrad" or knobs.together == "alone"
        return Traits(problem.result_dtype, sum_error(problem), batch_invariant=alone)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Images) -> int:
        return sum(region.bytes for region in _regions(problem, knobs))

    def knobs(self, problem: Problem, device: Device) -> Iterable[Images]:
        if problem.layouts[0] == "nhwc":
            return (Images("folded"), Images("alone"))
        # A product for each image streams the filters through the cache again. Where they do not stay there and an
        # image has too few pixels to pay for it, gathering the pixels of the batch is cheaper (1.3 times at 7x7).
        filters = prod(problem.w_shape) * DTYPE_BYTES[problem.result_dtype]
        few = problem.n > 1 and prod(problem.out) < 64 and problem.groups == 1
        usual = ("folded", "batched") if few and filters > device.cache_bytes * 3 // 4 else ("batched",)
        return tuple(Images(way) for way in (*usual, "alone"))

    def cost(self, problem: Problem, device: Device, knobs: Images) -> float:
        size = DTYPE_BYTES[problem.result_dtype]
        images = 1 if knobs.together == "folded" else problem.n
        pixels = prod(problem.out) * (problem.n if images == 1 else 1)
        c, k = prod(problem.w_shape[1:]), problem.k // problem.groups
        m, n, depth = {"fprop": (k, pixels, c), "dgrad": (c, pixels, k), "wgrad": (k, c, pixels)}[problem.direction]
        products = images * problem.groups * gemm_seconds(device, m, n, depth, size)
        copied = sum(region.elements for region in _regions(problem, knobs)) * size * 2
        calls = 5e-6 if _is_plain(problem, knobs) else 25e-6  # of torch, for views and products
        if prod(problem.filter) > 1 and problem.direction == "fprop":
            calls = 180e-6  # measured: a copy of patches, whose elements lie apart, has a slow start
        return calls + products + copied / device.bandwidth + problem.min_bytes / device.bandwidth * 0.5

    def build(self, problem: Problem, device: Device, knobs: Images) -> Runner:
        if _is_plain(problem, knobs):
            return _build_pointwise(problem, knobs)
        return (_build_nchw if problem.layouts[0] == "nchw" else _build_nhwc)(problem, knobs)


def _in_place(problem: Problem) -> bool:
    """Whether the matrix of x is x itself."""
    return prod(problem.filter) == 1 and prod(problem.stride) == 1


def _is_plain(problem: Problem, knobs: Images) -> bool:
    """Whether all that is needed is a product of x or dy and the filters where they are."""
    gathered = knobs.together == "folded" and problem.layouts[0] == "nchw"
    return _in_place(problem) and problem.groups == 1 and problem.direction != "wgrad" and not gathered


def _regions(problem: Problem, knobs: Images) -> tuple[Region, Region, Region]:
    """The parts of the workspace: patches of x, pixels of y gathered from all images, filters in another order."""
    size = DTYPE_BYTES[problem.result_dtype]
    pixels = problem.n * prod(problem.out)
    gather = knobs.together == "folded" and problem.layouts[0] == "nchw"
    patches = Region(problem.c * prod(problem.filter) * pixels if gather or not _in_place(problem) else 0, size)
    outputs = Region(problem.k * pixels if gather else 0, size)
    reorder = problem.layouts[0] != problem.layouts[1] and prod(problem.filter) > 1
    return patches, outputs, Region(prod(problem.w_shape) if reorder else 0, size)


def _patches(x: Tensor, problem: Problem) -> Tensor:
    """x as (N, C, O, T, P, R, Q, S): each window's taps beside its position; what no window covers is left out."""
    for axis, (out, taps, stride) in enumerate(zip(problem.out, problem.filter, problem.stride, strict=True)):
        x = x.unfold(2 + axis, taps, stride).narrow(2 + axis, 0, out)
    # unfold puts the taps last, in order: (N, C, O, P, Q, T, R, S).
    return x


def _build_pointwise(problem: Problem, knobs: Images) -> Runner:
    """One product on the tensors as they are: the usual case, with as few calls of torch as it takes.

    nchw: y[n] (K x pixels) = w (K x C) * x[n] (C x pixels);  nhwc: y (pixels x K) = x (pixels x C) * w' (C x K).
    """
    N, C, K, pixels = problem.n, problem.c, problem.k, prod(problem.out)
    forward, nchw = problem.direction == "fprop", problem.layouts[0] == "nchw"
    inner, outer = (C, K) if forward else (K, C)
    images = 1 if knobs.together == "folded" else N
    rows = N * pixels // images
    batched = nchw and images > 1 and knobs.together != "alone"

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        w = b.view(K, C)
        if batched:
            filters = (w if forward else w.t()).expand(N, -1, -1)
            torch.bmm(filters, a.view(N, inner, pixels), out=result.view(N, outer, pixels))
        elif nchw:
            filters = w if forward else w.t()
            for n in range(images):
                source, target = (a, result) if images == 1 else (a[n], result[n])
                torch.mm(filters, source.view(inner, pixels), out=target.view(outer, pixels))
        else:
            filters = w.t() if forward else w
            for n in range(images):
                source, target = (a, result) if images == 1 else (a[n], result[n])
                xs = source.as_strided((rows, inner), (inner, 1))
                torch.mm(xs, filters, out=target.as_strided((rows, outer), (outer, 1)))

    return run


def _build_nchw(problem: Problem, knobs: Images) -> Runner:
    dtype, groups, rank = DTYPES[problem.result_dtype], problem.groups, problem.rank
    N, K, out = problem.n, problem.k, prod(problem.out)
    depth, kg = prod(problem.w_shape[1:]), K // groups
    fold = knobs.together == "folded"
    regions, direction = _regions(problem, knobs), problem.direction
    outs, taps = tuple(range(2, 2 + rank)), tuple(range(2 + rank, 2 + 2 * rank))
    # (N, C, taps, outputs) from the order of _patches; with folding the images stand in front of the outputs.
    order = (1, *taps, 0, *outs) if fold else (0, 1, *taps, *outs)
    copied = fold or not _in_place(problem)

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        columns, gathered, filters = Region.split(workspace, regions, dtype)
        x, w, y = {"fprop": (a, b, result), "dgrad": (result, b, a), "wgrad": (a, result, b)}[direction]
        weights = filter_matrix(w, problem, "nchw", filters, fill=direction != "wgrad")
        windows = _patches(x, problem).permute(order) if copied else x
        if copied and direction != "dgrad":
            columns.view(windows.shape).copy_(windows)
        images = 1 if fold else N
        xs = (columns if copied else x).view(images, groups, depth, -1)
        planes = gathered if fold else y
        if fold and direction != "fprop":
            gathered.view(K, N, out).copy_(y.view(N, K, out).transpose(0, 1))
        ys = planes.view(images, groups, kg, -1)
        if direction == "fprop":
            _multiply(weights, xs, ys, knobs)
        elif direction == "dgrad":
            _multiply(weights.transpose(1, 2), ys, xs, knobs)
        else:
            torch.bmm(ys[0], xs[0].transpose(1, 2), out=weights)
            for n in range(1, images):
                torch.baddbmm(weights, ys[n], xs[n].transpose(1, 2), out=weights)
        if direction == "wgrad":
            store_filter_matrix(weights, w, problem, "nchw")
        elif direction == "fprop" and fold:
            y.view(N, K, out).copy_(gathered.view(K, N, out).transpose(0, 1))
        elif direction == "dgrad" and copied:
            _scatter(x, windows, columns, problem)

    return run


def _multiply(weights: Tensor, images: Tensor, out: Tensor, knobs: Images) -> None:
    """out[n, g] = weights[g] * images[n, g]."""
    if len(weights) == 1 and knobs.together != "alone":
        torch.bmm(weights.expand(len(images), -1, -1), images[:, 0], out=out[:, 0])
    else:
        for source, target in zip(images, out, strict=True):
            torch.bmm(weights, source, out=target)


def _build_nhwc(problem: Problem, knobs: Images) -> Runner:
    dtype, groups, rank = DTYPES[problem.result_dtype], problem.groups, problem.rank
    N, K = problem.n, problem.k
    depth, kg = prod(problem.w_shape[1:]), K // groups
    regions, direction = _regions(problem, knobs), problem.direction
    outs, taps = tuple(range(2, 2 + rank)), tuple(range(2 + rank, 2 + 2 * rank))
    copied = not _in_place(problem)
    images = 1 if knobs.together == "folded" else N

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        rows, _, filters = Region.split(workspace, regions, dtype)
        x, w, y = {"fprop": (a, b, result), "dgrad": (result, b, a), "wgrad": (a, result, b)}[direction]
        weights = filter_matrix(w, problem, "nhwc", filters, fill=direction != "wgrad")
        windows = _patches(x, problem).permute(0, *outs, *taps, 1) if copied else x.movedim(1, -1)
        if copied and direction != "dgrad":
            rows.view(windows.shape).copy_(windows)
        xs = (rows if copied else windows).view(images, -1, groups * depth)
        ys = y.movedim(1, -1).view(images, -1, K)
        for n in range(images):
            for g in range(groups):
                px, py = xs[n, :, g * depth : (g + 1) * depth], ys[n, :, g * kg : (g + 1) * kg]
                if direction == "fprop":
                    torch.mm(px, weights[g].t(), out=py)
                elif direction == "dgrad":
                    torch.mm(py, weights[g], out=px)
                elif n:
                    torch.addmm(weights[g], py.t(), px, out=weights[g])
                else:
                    torch.mm(py.t(), px, out=weights[g])
        if direction == "wgrad":
            store_filter_matrix(weights, w, problem, "nhwc")
        elif direction == "dgrad" and copied:
            _scatter(x, windows, rows, problem)

    return run


def _scatter(dx: Tensor, windows: Tensor, columns: Tensor, problem: Problem) -> None:
    """Put columns back where they came from: ``windows`` is a view of dx; what it does not cover is zero."""
    if prod(windows.shape) != dx.numel():
        dx.zero_()
    windows.copy_(columns.view(windows.shape))
