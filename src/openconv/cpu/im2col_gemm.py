"""cpu.im2col_gemm: convolution as matrix products over panels of columns that fit a cache."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES
from .matrices import Region, filter_matrix, float_refusals, gemm_seconds, store_filter_matrix, sum_error
from .runtime import Kernel, kernel, launch
from .simd import (
    argument,
    inline,
    lanes,
    load,
    load_clipped,
    load_even,
    load_scalar,
    next_tile,
    store,
    store_clipped,
    store_scalar,
    zero,
)

__all__ = ["Im2colGemm", "Panel"]


@dataclass(frozen=True)
class Panel(Knobs):
    """A panel holds ``images`` whole images, or ``pixels`` outputs of one image."""

    images: int
    pixels: int


class Im2colGemm(Engine):
    """Unfold the input into columns, a panel at a time, and leave the arithmetic to a matrix product.

    With the taps of a window written out as a column, the convolution is one product with the filters as a matrix:

        fprop   y    = w (K x CTRS)   * columns(x) (CTRS x pixels)
        wgrad   dw   = dy (K x pixels) * columns(x) (CTRS x pixels), transposed
        dgrad   columns(dx) = w, transposed * dy; each column is then added back to the window it came from

    All columns together would take T*R*S times the memory of x: 17 GB have been seen for one layer. Only a panel of
    them exists at a time, sized to stay in the cache between writing and multiplying, so memory is bounded whatever the
    image. In nhwc the matrices are transposed: a row holds one pixel's window, copied in runs of channels.

    Wins on dense layers with C/G and K/G of 16 and more; loses where a product has few rows (depthwise, few channels)
    and the copying outweighs the arithmetic.
    """

    name = "cpu.im2col_gemm"

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from float_refusals(problem)

    def traits(self, problem: Problem, knobs: Panel) -> Traits:
        # One image per product keeps its shapes, and so the library's order of summation, whatever the batch.
        alone = problem.direction == "wgrad" or knobs.images == 1
        return Traits(problem.result_dtype, sum_error(problem), batch_invariant=alone)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Panel) -> int:
        return sum(region.bytes for region in _regions(problem, knobs))

    def knobs(self, problem: Problem, device: Device) -> Iterable[Panel]:
        # A panel of several times the private cache still comes out of the shared one, and feeds longer products.
        # Images of fewer than 256 pixels share a panel; larger ones fill one each, and y needs no gathering.
        cache = max(device.cache_bytes, 1 << 20)
        small = prod(problem.out) < 256
        yield _panel(problem if small else problem.with_(n=1), cache * 8)
        for budget in (cache * 2, cache // 2, cache * 32):
            yield _panel(problem, budget)
        for budget in (cache * 8, cache * 2, cache // 8, cache // 64, 1):
            yield _panel(problem.with_(n=1), budget)

    def cost(self, problem: Problem, device: Device, knobs: Panel) -> float:
        size = DTYPE_BYTES[problem.result_dtype]
        pixels = problem.n * prod(problem.out)
        column = problem.c * prod(problem.filter)
        panels = -(-problem.n // knobs.images) * -(-prod(problem.out) // knobs.pixels)
        width = knobs.images * knobs.pixels
        c, k = problem.c // problem.groups, problem.k // problem.groups
        m, n, depth = {"fprop": (k, width, c), "dgrad": (c, width, k), "wgrad": (k, c, width)}[problem.direction]
        taps = prod(problem.filter)
        m, n, depth = {"fprop": (m, n, depth * taps), "dgrad": (m * taps, n, depth), "wgrad": (m, n * taps, depth)}[
            problem.direction
        ]
        products = panels * problem.groups * gemm_seconds(device, m, n, depth, size)
        # Columns are written and read, and added back to windows in a dgrad; y of several images is gathered, or put
        # back. Short runs keep this at some 0.6 of a long copy's bandwidth (measured: 13 GB/s where a copy reaches 22),
        # and very short ones lower.
        passes = 2.4 if problem.direction == "dgrad" else 2.0
        gathered = problem.k if problem.layouts[0] == "nchw" and knobs.images > 1 else 0
        row = min(width, problem.out[-1]) if problem.layouts[0] == "nchw" else c
        copied = pixels * (column * passes + gathered * 2.0) * size
        copying = copied / (device.bandwidth * 0.6) * (1 + 12 / max(row, 1))
        moving = problem.min_bytes / device.bandwidth * 0.5
        calls = 80e-6 + panels * 8e-6  # of torch, for views, copies and products: a tiny problem takes 80 to 100 us
        return calls + products + copying + moving

    def build(self, problem: Problem, device: Device, knobs: Panel) -> Runner:
        return (_build_nchw if problem.layouts[0] == "nchw" else _build_nhwc)(problem, device, knobs)


def _panel(problem: Problem, budget: int) -> Panel:
    """As many whole images as the budget of bytes holds, or a part of one; at least 16 pixels."""
    column = problem.c * prod(problem.filter) * DTYPE_BYTES[problem.result_dtype]
    out = prod(problem.out)
    pixels = max(budget // max(column, 1), 16)
    if pixels >= out:
        return Panel(images=min(max(pixels // out, 1), max(problem.n, 1)), pixels=out)
    parts = -(-out // pixels)
    return Panel(images=1, pixels=-(-out // parts))


def _regions(problem: Problem, knobs: Panel) -> tuple[Region, Region, Region]:
    """The parts of the workspace: columns, a panel of y gathered from several images, filters in another order."""
    size = DTYPE_BYTES[problem.result_dtype]
    width = knobs.images * knobs.pixels
    first = problem.layouts[0] == "nchw"
    rows = problem.c if first else problem.c // problem.groups
    columns = Region(rows * prod(problem.filter) * width, size)
    gathered = Region(problem.k * width if first and knobs.images > 1 else 0, size)
    filters = Region(prod(problem.w_shape) if problem.layouts[0] != problem.layouts[1] else 0, size)
    return columns, gathered, filters


def _panels(problem: Problem, knobs: Panel) -> list[tuple[int, int, int, int]]:
    """(first image, end image, first pixel, end pixel) of each panel."""
    out = prod(problem.out)
    if knobs.images > 1 or knobs.pixels == out:
        return [(n, min(n + knobs.images, problem.n), 0, out) for n in range(0, problem.n, knobs.images)]
    starts = range(0, out, knobs.pixels)
    return [(n, n + 1, a, min(a + knobs.pixels, out)) for n in range(problem.n) for a in starts]


def _geometry(problem: Problem) -> tuple[int, ...]:
    """C D H W O P Q T R S, stride, low padding and dilation of three axes: the last 19 arguments of every kernel."""
    ones, zeros = (1,) * (3 - problem.rank), (0,) * (3 - problem.rank)
    low = tuple(pad[0] for pad in problem.padding)
    sizes = (problem.c, *ones, *problem.spatial, *ones, *problem.out, *ones, *problem.filter)
    return (*sizes, *ones, *problem.stride, *zeros, *low, *ones, *problem.dilation)


def _build_nchw(problem: Problem, device: Device, knobs: Panel) -> Runner:
    T = np.float32 if problem.result_dtype == "f32" else np.float64
    dtype, size, groups = DTYPES[problem.result_dtype], DTYPE_BYTES[problem.result_dtype], problem.groups
    N, C, K = problem.n, problem.c, problem.k
    taps, out = prod(problem.filter), prod(problem.out)
    cg, kg = C // groups * taps, K // groups
    regions, panels, geometry = _regions(problem, knobs), _panels(problem, knobs), _geometry(problem)
    move = _fold_nchw(T) if problem.direction == "dgrad" else _unfold_nchw(T)
    threads = device.threads if C * taps * min(knobs.images * knobs.pixels, 4096) > 30_000 else 1

    def products(weights: Tensor, images: Tensor, columns: Tensor, accumulate: bool) -> None:
        """The pass's own product, all groups at once: (G, kg, cg) * (G, cg, width) against (G, kg, width)."""
        y, cols = images.unflatten(0, (groups, kg)), columns.view(groups, cg, -1)
        if problem.direction == "fprop":
            torch.bmm(weights, cols, out=y)
        elif problem.direction == "dgrad":
            torch.bmm(weights.transpose(1, 2), y, out=cols)
        elif accumulate:
            torch.baddbmm(weights, y, cols.transpose(1, 2), out=weights)
        else:
            torch.bmm(y, cols.transpose(1, 2), out=weights)

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None) -> None:
        columns, gathered, filters = Region.split(workspace, regions, dtype)
        x, w, y = {"fprop": (a, b, result), "dgrad": (result, b, a), "wgrad": (a, result, b)}[problem.direction]
        weights = filter_matrix(w, problem, "nchw", filters, fill=problem.direction != "wgrad")
        planes = y.view(N, K, out)
        for at, (n0, n1, p0, p1) in enumerate(panels):
            images, width = n1 - n0, (n1 - n0) * (p1 - p0)
            cols = columns[: C * taps * width].view(C * taps, width)
            if images == 1:
                panel = planes[n0, :, p0:p1]
            else:
                panel = gathered[: K * width].view(K, width)
                if problem.direction != "fprop":
                    panel.view(K, images, out).copy_(planes[n0:n1].transpose(0, 1))
            args = (x.data_ptr() + n0 * C * prod(problem.spatial) * size, cols.data_ptr(), images, p0, p1, *geometry)
            if problem.direction != "dgrad":
                launch(move, (C * taps, *args), threads)
            products(weights, panel, cols, at > 0)
            if problem.direction == "dgrad":
                launch(move, (images * C, *args), threads)
            elif problem.direction == "fprop" and images > 1:
                planes[n0:n1].copy_(panel.view(K, images, out).transpose(0, 1))
        if problem.direction == "wgrad":
            store_filter_matrix(weights, w, problem, "nchw")

    return run


def _build_nhwc(problem: Problem, device: Device, knobs: Panel) -> Runner:
    T = np.float32 if problem.result_dtype == "f32" else np.float64
    dtype, size, groups = DTYPES[problem.result_dtype], DTYPE_BYTES[problem.result_dtype], problem.groups
    N, C, K = problem.n, problem.c, problem.k
    taps, out = prod(problem.filter), prod(problem.out)
    channels, kg = C // groups, K // groups
    regions, panels, geometry = _regions(problem, knobs), _panels(problem, knobs), _geometry(problem)
    move = _fold_nhwc(T) if problem.direction == "dgrad" else _unfold_nhwc(T)
    rows = prod(problem.spatial[:-1])
    threads = device.threads if channels * taps * min(knobs.images * knobs.pixels, 4096) > 30_000 else 1

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None) -> None:
        columns, _, filters = Region.split(workspace, regions, dtype)
        x, w, y = {"fprop": (a, b, result), "dgrad": (result, b, a), "wgrad": (a, result, b)}[problem.direction]
        weights = filter_matrix(w, problem, "nhwc", filters, fill=problem.direction != "wgrad")
        pixels = y.movedim(1, -1).view(N * out, K)
        for at, (n0, n1, p0, p1) in enumerate(panels):
            images, width = n1 - n0, (n1 - n0) * (p1 - p0)
            cols = columns[: channels * taps * width].view(width, channels * taps)
            first = x.data_ptr() + n0 * C * prod(problem.spatial) * size
            for g in range(groups):
                panel = pixels[n0 * out + p0 : n0 * out + p0 + width, g * kg : (g + 1) * kg]
                args = (first, cols.data_ptr(), images, p0, p1, *geometry, g * channels, channels)
                if problem.direction == "dgrad":
                    torch.mm(panel, weights[g], out=cols)
                    launch(move, (images * rows, *args), threads)
                    continue
                launch(move, (-(-width // _PIXELS), *args), threads)
                if problem.direction == "fprop":
                    torch.mm(cols, weights[g].t(), out=panel)
                elif at:
                    torch.addmm(weights[g], panel.t(), cols, out=weights[g])
                else:
                    torch.mm(panel.t(), cols, out=weights[g])
        if problem.direction == "wgrad":
            store_filter_matrix(weights, w, problem, "nhwc")

    return run


# -- kernels -----------------------------------------------------------------------------------------------------
# Arguments: tiles, x, columns, images, first pixel, end pixel, then _geometry. A panel of several images covers all
# their pixels. Columns are dense: row (c,t,r,s) by pixel in nchw, row pixel by (t,r,s,c) in nhwc.

_PIXELS = 8  # of a tile in nhwc: enough copying to pay for a ticket


@inline
def _taps(block, tap):
    """(t, r, s) of a flat tap."""
    R, S = argument(block, 14), argument(block, 15)
    return tap // (R * S), tap // S % R, tap % S


@inline
def _row_range(block, row, first, end):
    """The outputs [q0, q1) of output row ``row`` that lie in the panel's pixels [first, end)."""
    Q = argument(block, 12)
    return max(first - row * Q, 0), min(end - row * Q, Q)


@functools.cache
def _unfold_nchw(T: type) -> Kernel:
    SIZE, L = np.dtype(T).itemsize, lanes(T)

    @kernel
    def unfold_nchw(block):
        """One tile is one row of the columns: a channel's values under one tap, for all pixels of the panel."""
        tiles, x, columns, images = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        first, end = argument(block, 4), argument(block, 5)
        C, D, H, W = argument(block, 6), argument(block, 7), argument(block, 8), argument(block, 9)
        P, Q = argument(block, 11), argument(block, 12)
        taps = argument(block, 13) * argument(block, 14) * argument(block, 15)
        stride_d, stride_h, stride_w = argument(block, 16), argument(block, 17), argument(block, 18)
        pad_d, pad_h, pad_w = argument(block, 19), argument(block, 20), argument(block, 21)
        width = images * (end - first)
        tile = next_tile(block)
        while tile < tiles:
            c = tile // taps
            t, r, s = _taps(block, tile % taps)
            t, r, s = t * argument(block, 22), r * argument(block, 23), s * argument(block, 24)
            target = columns + tile * width * SIZE
            for n in range(images):
                plane = x + (n * C + c) * D * H * W * SIZE
                for row in range(first // Q, (end + Q - 1) // Q):
                    q0, q1 = _row_range(block, row, first, end)
                    count = q1 - q0
                    d, h = row // P * stride_d - pad_d + t, row % P * stride_h - pad_h + r
                    start = q0 * stride_w - pad_w + s
                    source = plane + (d * H + h) * W * SIZE
                    inside = d >= 0 and d < D and h >= 0 and h < H
                    i = 0
                    if not inside:
                        while i < count:
                            store_clipped(target, i, count, zero(T))
                            i += L
                    elif stride_w == 1:
                        while i < count:
                            at = start + i
                            if at >= 0 and at + L <= W and i + L <= count:
                                store(target + i * SIZE, load(T, source + at * SIZE))
                            else:
                                store_clipped(target, i, count, load_clipped(T, source, at, W))
                            i += L
                    else:
                        if stride_w == 2:
                            while i + L <= count:
                                at = start + 2 * i
                                if at < 0 or at + 2 * L - 1 > W:
                                    break
                                store(target + i * SIZE, load_even(T, source + at * SIZE))
                                i += L
                        while i < count:
                            at = start + stride_w * i
                            value = T(0)
                            if at >= 0 and at < W:
                                value = load_scalar(T, source + at * SIZE)
                            store_scalar(target + i * SIZE, value)
                            i += 1
                    target += count * SIZE
            tile = next_tile(block)

    return unfold_nchw


@functools.cache
def _fold_nchw(T: type) -> Kernel:
    SIZE, L = np.dtype(T).itemsize, lanes(T)

    @kernel
    def fold_nchw(block):
        """One tile is one channel of one image: it takes the sum of its own columns, tap by tap, in a fixed order."""
        tiles, x, columns, images = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        first, end = argument(block, 4), argument(block, 5)
        C, D, H, W = argument(block, 6), argument(block, 7), argument(block, 8), argument(block, 9)
        P, Q = argument(block, 11), argument(block, 12)
        taps = argument(block, 13) * argument(block, 14) * argument(block, 15)
        stride_d, stride_h, stride_w = argument(block, 16), argument(block, 17), argument(block, 18)
        pad_d, pad_h, pad_w = argument(block, 19), argument(block, 20), argument(block, 21)
        pixels = end - first
        tile = next_tile(block)
        while tile < tiles:
            n, c = tile // C, tile % C
            plane = x + tile * D * H * W * SIZE
            if first == 0:
                i = 0
                while i < D * H * W:
                    store_clipped(plane, i, D * H * W, zero(T))
                    i += L
            for tap in range(taps):
                t, r, s = _taps(block, tap)
                t, r, s = t * argument(block, 22), r * argument(block, 23), s * argument(block, 24)
                source = columns + ((c * taps + tap) * images + n) * pixels * SIZE
                for row in range(first // Q, (end + Q - 1) // Q):
                    q0, q1 = _row_range(block, row, first, end)
                    count = q1 - q0
                    d, h = row // P * stride_d - pad_d + t, row % P * stride_h - pad_h + r
                    start = q0 * stride_w - pad_w + s
                    target = plane + (d * H + h) * W * SIZE
                    if d >= 0 and d < D and h >= 0 and h < H:
                        if stride_w == 1:
                            i = max(-start, 0)
                            last = min(count, W - start)
                            while i < last:
                                at = start + i
                                if i + L <= last:
                                    total = load(T, target + at * SIZE) + load(T, source + i * SIZE)
                                    store(target + at * SIZE, total)
                                else:
                                    total = load_clipped(T, target, at, W) + load_clipped(T, source, i, count)
                                    store_clipped(target, at, W, total)
                                i += L
                        else:
                            for i in range(count):
                                at = start + stride_w * i
                                if at >= 0 and at < W:
                                    total = load_scalar(T, target + at * SIZE) + load_scalar(T, source + i * SIZE)
                                    store_scalar(target + at * SIZE, total)
                    source += count * SIZE
            tile = next_tile(block)

    return fold_nchw


@functools.cache
def _unfold_nhwc(T: type) -> Kernel:
    SIZE, L, PIXELS = np.dtype(T).itemsize, lanes(T), _PIXELS

    @kernel
    def unfold_nhwc(block):
        """One tile is a few rows of the columns: whole windows, copied in runs of the group's channels."""
        tiles, x, columns, images = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        first, end = argument(block, 4), argument(block, 5)
        C, D, H, W = argument(block, 6), argument(block, 7), argument(block, 8), argument(block, 9)
        P, Q = argument(block, 11), argument(block, 12)
        T_, R, S = argument(block, 13), argument(block, 14), argument(block, 15)
        stride_d, stride_h, stride_w = argument(block, 16), argument(block, 17), argument(block, 18)
        pad_d, pad_h, pad_w = argument(block, 19), argument(block, 20), argument(block, 21)
        dil_d, dil_h, dil_w = argument(block, 22), argument(block, 23), argument(block, 24)
        channel, channels = argument(block, 25), argument(block, 26)
        pixels = end - first
        tile = next_tile(block)
        while tile < tiles:
            for j in range(tile * PIXELS, min(tile * PIXELS + PIXELS, images * pixels)):
                n, pixel = j // pixels, first + j % pixels
                row, q = pixel // Q, pixel % Q
                target = columns + j * T_ * R * S * channels * SIZE
                for t in range(T_):
                    d = row // P * stride_d - pad_d + t * dil_d
                    for r in range(R):
                        h = row % P * stride_h - pad_h + r * dil_h
                        inside = d >= 0 and d < D and h >= 0 and h < H
                        source = x + (((n * D + d) * H + h) * W * C + channel) * SIZE
                        for s in range(S):
                            at = q * stride_w - pad_w + s * dil_w
                            # A tap outside the image copies a run of length nothing, and so zeros.
                            limit = channels if inside and at >= 0 and at < W else 0
                            run = source + at * C * SIZE
                            i = 0
                            while i + L <= limit:
                                store(target + i * SIZE, load(T, run + i * SIZE))
                                i += L
                            while i < channels:
                                store_clipped(target, i, channels, load_clipped(T, run, i, limit))
                                i += L
                            target += channels * SIZE
            tile = next_tile(block)

    return unfold_nhwc


@functools.cache
def _fold_nhwc(T: type) -> Kernel:
    SIZE, L = np.dtype(T).itemsize, lanes(T)

    @kernel
    def fold_nhwc(block):
        """One tile is one row (d, h) of dx: it gathers what the windows over it have for it, in a fixed order."""
        tiles, x, columns = argument(block, 0), argument(block, 1), argument(block, 2)
        first, end = argument(block, 4), argument(block, 5)
        C, D, H, W = argument(block, 6), argument(block, 7), argument(block, 8), argument(block, 9)
        O, P = argument(block, 10), argument(block, 11)
        T_, R, S = argument(block, 13), argument(block, 14), argument(block, 15)
        stride_d, stride_h, stride_w = argument(block, 16), argument(block, 17), argument(block, 18)
        pad_d, pad_h, pad_w = argument(block, 19), argument(block, 20), argument(block, 21)
        dil_d, dil_h, dil_w = argument(block, 22), argument(block, 23), argument(block, 24)
        channel, channels = argument(block, 25), argument(block, 26)
        Q = argument(block, 12)
        pixels = end - first
        tile = next_tile(block)
        while tile < tiles:
            n, d, h = tile // (D * H), tile // H % D, tile % H
            target = x + (tile * W * C + channel) * SIZE
            if first == 0:
                for at in range(W):
                    i = 0
                    while i < channels:
                        store_clipped(target + at * C * SIZE, i, channels, zero(T))
                        i += L
            for t in range(T_):
                o = d + pad_d - t * dil_d
                if o % stride_d or o < 0 or o >= O * stride_d:
                    continue
                for r in range(R):
                    p = h + pad_h - r * dil_h
                    if p % stride_h or p < 0 or p >= P * stride_h:
                        continue
                    row = o // stride_d * P + p // stride_h
                    q0, q1 = _row_range(block, row, first, end)
                    for q in range(q0, q1):
                        pixel = n * pixels + row * Q + q - first
                        for s in range(S):
                            at = q * stride_w - pad_w + s * dil_w
                            if at >= 0 and at < W:
                                source = columns + (((pixel * T_ + t) * R + r) * S + s) * channels * SIZE
                                sink = target + at * C * SIZE
                                i = 0
                                while i + L <= channels:
                                    total = load(T, sink + i * SIZE) + load(T, source + i * SIZE)
                                    store(sink + i * SIZE, total)
                                    i += L
                                while i < channels:
                                    total = load_clipped(T, sink, i, channels) + load_clipped(T, source, i, channels)
                                    store_clipped(sink, i, channels, total)
                                    i += L
            tile = next_tile(block)

    return fold_nhwc
