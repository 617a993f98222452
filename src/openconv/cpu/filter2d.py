"""cpu.filter2d: image filters and other convolutions of few channels, held in registers along the image's height.

    y[n,k,p,q]  = bias[k] + sum over c,r,s of  w[k,c,r,s] * x[n, c, p - pad + r*dil, q - pad + s*dil]
    dw[k,c,r,s] =           sum over n,p,q of  dy[n,k,p,q] * x[n, c, p - pad + r*dil, q - pad + s*dil]

dgrad is the first formula with x and y exchanged, the filter turned by half a turn (negative strides do that) and the
padding dil*(R-1) - pad.

A vector holds L neighbouring columns. A block of RB output rows times VB vectors is kept in registers while the filter
passes over it column by column; RC filter rows (all of them up to 7) are taken at once. With 8 rows of 2 vectors:

    for s in range(S):                      per step        R = 3     R = 5     R = 7
        w[0..RC)   broadcast                loads of w        3         5         7
        for i in range(RB + RC - 1):        loads of x       20        24        28
            x = load(row i, column q + s)
            for r: acc[i - r] += w[r] * x   multiply-adds    48        80       112

A core starts two multiply-adds and two loads a cycle, and a load that crosses a cache line counts twice, as all do that
are as wide as the line. So the multiply-adds set the pace from R = 3 on (24 cycles against 21.5), and 16 independent
sums hide their latency of 4 cycles. AVX-512 has 32 registers: 16 sums, 7 weights, 2 values of x. AVX2 has 16 and
crosses a line every other time only: 4 rows of 2 vectors, whose 8 sums just cover the latency; with 6 or 7 filter rows
5 rows, whose 10 sums are worth the weights that then wait on the stack (7x7: 139 against 123 GFLOP/s). Taking 7 rows
as 4 and 3 needs no stack and is no faster.

Floors for a one-channel f32 image of 1024x2048 on two cores at 2.8 GHz with AVX-512 (32 multiply-adds a cycle and
core): 16 MiB through the third-level cache 0.28 ms; multiply-adds 0.11 ms (3x3), 0.29 ms (5x5), 0.57 ms (7x7).

The first of several large results is new memory, which the system clears page by page when it is first written; for
4000x4000 that takes as long as a 3x3 filter. Threads that take turns at neighbouring tiles meet in one huge page and
both clear it. So each thread has a part of the image to itself, in which it draws tiles (7.6 against 11.9 ms for 3x3).

Vectors that touch the border of the image take a second path with masked loads. Taps on padding then see a zero (fprop:
an infinite weight shows) or are left out (dgrad: there is no such term). Both paths add in the same order, so that a
pixel's bits depend neither on the path nor on tiles, threads or batch. The last vector of a row overlaps its neighbour
rather than being cut.

x, y and dy may be of f16 or bf16: vectors are widened as they are loaded, and results rounded as they are stored. The
filter is cast beforehand, since a weight is loaded for each use. Kernels have a token T for what is computed with and
one, M, for what the tensors hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from .low_precision import computed, memory_refusals, memory_token
from .matrices import sum_error
from .runtime import Kernel, kernel, launch
from .simd import (
    argument,
    broadcast,
    broadcast_strided,
    emit_clip_mask,
    emit_fma,
    emit_horizontal_sum,
    emit_load,
    emit_masked_load,
    emit_masked_store,
    emit_offset,
    emit_rows,
    emit_splat,
    emit_store,
    fill,
    inline,
    is_block,
    lanes,
    load_scalar,
    memory_of,
    narrow,
    next_tile,
    next_tile_of,
    pack,
    store_scalar,
    thread_index,
    unpack,
    zero,
)

__all__ = ["Filter2d", "Filter2dKnobs"]

_MOST_CHANNELS = 16
_MOST_TAPS = 7
_TILE_RESULTS = 1 << 16  # a tile of so many results takes some 20 us: its ticket and cold start do not show
_WGRAD_ROWS = 8
_WGRAD_TILES = 256  # partial sums a group may have
_THREAD_MACS = 400_000  # about 8 us of work, for which another thread is worth waking


@dataclass(frozen=True)
class Filter2dKnobs(Knobs):
    """The block of results that fprop and dgrad hold in registers: ``rows`` times ``vectors``."""

    rows: int
    vectors: int


class Filter2d(Engine):
    """Few-channel convolution of stride 1: a block of output rows and vectors of columns stays in registers.

        y[n,k,p,q] = bias[k] + sum over c,r,s of  w[k,c,r,s] * x[n, c, p - pad + r*dil, q - pad + s*dil]

    Each vector of x that is loaded serves up to 7 filter rows, so that arithmetic and not loading sets the pace;
    nothing is copied or padded. It wins where a matrix product has no channels to work on: image filters, where it runs
    at the speed of memory up to about 5x5, and it stays ahead up to some ten channels. Beyond that a matrix product,
    which reuses x across output channels, wins; with very large filters FFT does. The arithmetic stands at the head of
    this file.
    """

    name = "cpu.filter2d"
    takes_bias = True
    takes_low = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank > 2:
            yield f"rank is {problem.rank}; wanted 1 or 2 spatial axes"
        yield from memory_refusals(problem)
        if set(problem.stride) != {1}:
            yield f"stride is {problem.stride}; neighbouring results lie in one vector of x only at stride 1"
        for letter, channels in (("C", problem.c), ("K", problem.k)):
            if channels > _MOST_CHANNELS * problem.groups:
                yield f"{letter}/G is {channels // problem.groups}; wanted 1 to {_MOST_CHANNELS}"
        images = (problem.layouts[0], problem.layouts[2])
        if "nhwc" in images and max(problem.c, problem.k) > 1:
            yield f"layouts of x and y are {', '.join(images)}; a vector along W needs nchw, or a single channel"
        if problem.direction == "wgrad" and problem.layouts[1] == "nhwc" and problem.c > problem.groups:
            yield f"layout of dw is nhwc with C/G = {problem.c // problem.groups}; wanted nchw, or C/G = 1"

    def traits(self, problem: Problem, knobs: Filter2dKnobs) -> Traits:
        # wgrad: along a strip of 1 KiB a lane adds 8 rows of at most 64 vectors (16 bytes wide), then up to 8 copies.
        problem = computed(problem)
        chain = 8 * 64 + 8 if problem.direction == "wgrad" else None
        return Traits(accumulator=problem.dtypes[0], error_bound=sum_error(problem, chain))

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> int:
        if problem.direction != "wgrad":
            return 0
        _, tiles = _wgrad_tiles(problem)
        return 8 * tiles * prod(problem.w_shape)

    def copies(self, problem: Problem, knobs: Filter2dKnobs) -> tuple[str, ...]:
        low = problem.direction != "wgrad" and computed(problem) is not problem
        return (f"cast w {problem.dtypes[1]} to f32",) if low else ()

    def knobs(self, problem: Problem, device: Device) -> Iterable[Filter2dKnobs]:
        if problem.rank == 1:
            return (Filter2dKnobs(1, 8),)
        problem = computed(problem)
        width = problem.spatial[1] if problem.direction == "dgrad" else problem.out[1]
        if width <= device.lanes * 4 // DTYPE_BYTES[problem.dtypes[0]]:  # a second vector would be all mask
            return (Filter2dKnobs(8, 1),)
        if device.lanes >= 16:
            return (Filter2dKnobs(8, 2), Filter2dKnobs(4, 2))
        return (Filter2dKnobs(5 if _row_taps(*_rows_of(problem)) >= 6 else 4, 2),)

    def cost(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> float:
        problem = computed(problem)
        size = DTYPE_BYTES[problem.dtypes[0]]
        lanes = device.lanes * 4 // size
        image = problem.spatial if problem.direction == "dgrad" else problem.out
        height, width = image if problem.rank == 2 else (1, image[0])
        # Blocks at the rim are masked, which takes twice as long, and count in full where they hang over it.
        rows, columns = -(-height // knobs.rows), -(-width // lanes)
        rims = 2 * columns + 2 * rows if rows > 2 and columns > 2 else rows * columns
        blocks = rows * columns + (rims if problem.rank == 2 else 2)
        channels = problem.c * problem.k // problem.groups
        work = 2.0 * problem.n * channels * prod(problem.filter) * blocks * knobs.rows * lanes
        # A load that crosses a line takes as long as a multiply-add; n rows and m taps make n + m loads for n * m.
        taps = _row_taps(*_rows_of(problem)) if problem.rank == 2 else 8
        loads = max(1.0, 1.5 * (knobs.rows + taps) / (knobs.rows * taps))
        # Measured on two cores: 0.8 of the matrix rate with AVX2 and 0.55 with AVX-512, whose loads all cross lines;
        # 0.8 of a copy's bandwidth. Short rows are mostly rim, which is masked, and slowly so by AVX2.
        short = width < 256
        rate = device.flops * 4 / size * (0.55 if device.lanes >= 16 else 0.8 / (1.5 if short else 1.0))
        computing = work * loads / rate
        rim = (8 if device.lanes >= 16 else 40) / max(width, 1)
        moving = problem.min_bytes * (1 + rim) / (device.bandwidth * 0.8)
        planes = problem.n * channels * 0.1e-6 / device.threads
        if problem.direction == "wgrad":
            computing *= 2.5 if short else 1.5  # it loads dy besides x, and adds up lanes
            moving *= 2.0 if short else 1.0
            planes *= 9 if problem.rank == 1 else 1  # each row begins and ends on its own
            if problem.rank == 1:  # vectors that lie wholly in a long padding are loaded, all lanes masked: 28 ns
                outside = sum(max(0, end - 64) ** 2 for end in problem.padding[0]) / (2 * lanes)
                planes += problem.n * channels * outside * 28e-9 / min(device.threads, problem.n * problem.groups)
        return 5e-6 + max(computing, moving) + computing / 8 + planes

    def build(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> Runner:
        if problem.direction == "wgrad":
            return _build_wgrad(problem, device)
        return _build_fprop(problem, device, knobs)


def _rows_of(problem: Problem) -> tuple[int, int]:
    """Filter rows and their dilation."""
    return (problem.filter[0], problem.dilation[0]) if problem.rank == 2 else (1, 1)


@functools.lru_cache
def _row_taps(rows: int, dilation: int) -> int:
    """How many filter rows to take at once: all up to 7, else the cheapest count; the others then go one by one.

    For 8 rows of one vector, n filter rows at once take 4 n cycles of multiply-adds and some 3 to start; a single one
    waits 9 for its loads. Dilated rows share no row of x and go one by one.
    """
    if dilation > 1:
        return 1
    if rows <= _MOST_TAPS:
        return rows
    return min(range(2, _MOST_TAPS + 1), key=lambda n: rows // n * (4 * n + 3) + rows % n * 9)


def _geometry(problem: Problem) -> tuple[int, ...]:
    """H W P Q, R S, the low padding and the dilation of both axes; of a single row where there is one axis."""
    pads = [low for low, _ in problem.padding]
    if problem.rank == 1:
        return (1, *problem.spatial, 1, *problem.out, 1, *problem.filter, 0, *pads, 1, *problem.dilation)
    return (*problem.spatial, *problem.out, *problem.filter, *pads, *problem.dilation)


def _build_fprop(problem: Problem, device: Device, knobs: Filter2dKnobs) -> Runner:
    """fprop, and dgrad as an fprop of dy: channels exchanged, the filter turned by half a turn."""
    H, W, P, Q, R, S, row_pad, col_pad, row_dil, col_dil = _geometry(problem)
    G, C, K = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    T, M = memory_token(computed(problem).dtypes[0]), memory_token(problem.dtypes[0])
    size, cast = np.dtype(T).itemsize, T is not M
    nhwc = problem.layouts[1] == "nhwc"
    wk, wc, wr, ws = (v * size for v in ((R * S * C, 1, S * C, C) if nhwc else (C * R * S, R * S, S, 1)))
    wg, offset, skip = K * wk, 0, 0
    if problem.direction == "dgrad":
        offset, skip = (R - 1) * wr + (S - 1) * ws, 1
        H, W, P, Q, C, K = P, Q, H, W, K, C
        wk, wc, wr, ws = wc, wk, -wr, -ws
        row_pad, col_pad = row_dil * (R - 1) - row_pad, col_dil * (S - 1) - col_pad

    threads = max(1, min(device.threads, problem.macs // _THREAD_MACS))
    units = problem.n * G * -(-P // knobs.rows)
    fair = units // (4 * threads)  # four tiles a thread even out their ends
    tile_units = max(1, min(fair, _TILE_RESULTS // (knobs.rows * Q * K)))
    kernel = fprop_kernel(T, M, _row_taps(R, row_dil), knobs.rows, knobs.vectors)
    sizes = (G, C, K, H, W, P, Q, R, S, row_pad, col_pad, row_dil, col_dil)
    rest = (*sizes, wg, wk, wc, wr, ws, skip, units, tile_units, threads, *[0] * threads)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        first, b = 0 if bias is None else bias.data_ptr(), b.float() if cast else b
        launch(kernel, (a.data_ptr(), b.data_ptr() + offset, first, out.data_ptr(), *rest), threads)

    return run


def _wgrad_tiles(problem: Problem) -> tuple[int, int]:
    """Row blocks of a tile, and tiles of a group. They depend on the sizes alone, as does the order of the sum."""
    height, width = problem.out if problem.rank == 2 else (1, problem.out[0])
    units = problem.n * -(-height // _WGRAD_ROWS)
    tile_units = max(1, _TILE_RESULTS // (_WGRAD_ROWS * width), -(-units // _WGRAD_TILES))
    return tile_units, -(-units // tile_units)


def _build_wgrad(problem: Problem, device: Device) -> Runner:
    """Partial sums by tile, then their sum by one thread."""
    H, W, P, Q, R, S, *rest = _geometry(problem)
    G, C, K = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    tile_units, tiles = _wgrad_tiles(problem)
    units = problem.n * -(-P // _WGRAD_ROWS)
    threads = max(1, min(device.threads, problem.macs // _THREAD_MACS))
    T, M = memory_token(computed(problem).dtypes[0]), memory_token(problem.dtypes[0])
    tile_kernel, sum_kernel = wgrad_kernel(T, M, _row_taps(R, rest[2]), _WGRAD_ROWS), wgrad_sum_kernel(T, M)
    sizes = (G, C, K, H, W, P, Q, R, S, *rest, units, tile_units, tiles)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        assert workspace is not None, "wgrad keeps its partial sums in the workspace"
        partials = workspace.data_ptr()
        launch(tile_kernel, (a.data_ptr(), b.data_ptr(), partials, *sizes), threads)
        launch(sum_kernel, (partials, out.data_ptr(), G, tiles, K * C * R * S), 1)

    return run


# ---- kernels ----------------------------------------------------------------------------------------------------

_I64 = ir.IntType(64)


def _literals(*kinds):
    return all(isinstance(kind, types.IntegerLiteral) for kind in kinds)


def _held_bytes(kind, memory):
    """Bytes of an element that is computed with as that of the vector `kind`."""
    return 2 if memory is not None else 8 if isinstance(kind.element, ir.DoubleType) else 4


def _emit_clipped_row(builder, kind, memory, image, pitch, row, height, column, width, i):
    """The vector at row + i and column of a height x width image, with the mask of the lanes that lie inside it."""
    row = builder.add(row, ir.Constant(_I64, i))
    inside = builder.icmp_unsigned("<", row, height)
    mask = emit_clip_mask(builder, column, builder.select(inside, width, ir.Constant(_I64, 0)), kind.count)
    across = builder.mul(column, ir.Constant(_I64, _held_bytes(kind, memory)))
    place = builder.add(builder.add(image, builder.mul(row, pitch)), across)
    return emit_masked_load(builder, kind, place, mask, memory), mask


# ---- fprop and dgrad ----------------------------------------------------------------------------------------


def _emit_correlate(builder, sums, weights, rows, value):
    """sums[j] += weights[r] * value(j + r), with rows + len(weights) - 1 values that are each asked for once.

    `value(i)` returns the vectors of input row i with their masks; a mask of None means all lanes. A sum meets its taps
    in the order of r, whatever the block.
    """
    sums, across = list(sums), len(sums) // rows
    for i in range(rows + len(weights) - 1):
        for v, (x, mask) in enumerate(value(i)):
            for r in range(max(0, i - rows + 1), min(len(weights), i + 1)):
                at = (i - r) * across + v
                total = emit_fma(builder, x, weights[r], sums[at])
                sums[at] = total if mask is None else builder.select(mask, total, sums[at])
    return sums


@intrinsic(prefer_literal=True)
def correlate(typingctx, held, sums, weights, rows, x, pitch):
    """correlate(M, sums, weights, rows, x, pitch) -> sums[j, v] + weights[r] * x[j + r, v], summed over r.

    `sums` holds `rows` rows of vectors side by side; x[i, v] is the vector of M at x + i * pitch + v * bytes(vector).
    """
    if not (is_block(sums) and is_block(weights) and _literals(rows)):
        return None
    height, across = rows.literal_value, sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        _, sums_, weights_, _, x_, pitch_ = args
        kind, memory = context.get_value_type(sums.dtype), memory_of(held)
        width = kind.count * _held_bytes(kind, memory)
        rows_ = emit_rows(builder, x_, pitch_, height + weights.count - 1)

        def value(i):
            places = [emit_offset(builder, rows_[i], v, width) for v in range(across)]
            return [(emit_load(builder, kind, place, memory), None) for place in places]

        return pack(builder, _emit_correlate(builder, unpack(builder, sums_), unpack(builder, weights_), height, value))

    return sums(held, sums, weights, rows, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def correlate_clipped(typingctx, held, sums, weights, rows, x, pitch, row, H, column, W, skip):
    """What `correlate` does, at the border: x[i, v, lane] is pixel (row + i, column + v * L + lane) of an H x W image.

    A tap on padding multiplies zero, or is left out where `skip` is 1.
    """
    if not (is_block(sums) and is_block(weights) and _literals(rows)):
        return None
    height, across = rows.literal_value, sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        _, sums_, weights_, _, x_, pitch_, row_, H_, column_, W_, skip_ = args
        kind, memory = context.get_value_type(sums.dtype), memory_of(held)
        keep = emit_splat(builder, builder.icmp_signed("==", skip_, ir.Constant(_I64, 0)), kind.count)
        columns = [emit_offset(builder, column_, v, kind.count) for v in range(across)]

        def value(i):
            vectors = [_emit_clipped_row(builder, kind, memory, x_, pitch_, row_, H_, at, W_, i) for at in columns]
            return [(vector, builder.or_(mask, keep)) for vector, mask in vectors]

        return pack(builder, _emit_correlate(builder, unpack(builder, sums_), unpack(builder, weights_), height, value))

    return sums(held, sums, weights, rows, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def store_block(typingctx, sums, rows, y, pitch):
    """store_block(sums, rows, y, pitch): row j of the block goes to y + j * pitch."""
    if not (is_block(sums) and _literals(rows)):
        return None
    across = sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, _, y_, pitch_ = args
        width = sums.dtype.count * sums.dtype.dtype.bitwidth // 8
        places = emit_rows(builder, y_, pitch_, rows.literal_value)
        for at, total in enumerate(unpack(builder, sums_)):
            emit_store(builder, emit_offset(builder, places[at // across], at % across, width), total)
        return context.get_dummy_value()

    return types.void(sums, rows, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_block_clipped(typingctx, sums, rows, y, pitch, height, width):
    """What `store_block` does, for the first `height` rows and `width` columns only."""
    if not (is_block(sums) and _literals(rows)):
        return None
    across = sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, _, y_, pitch_, height_, width_ = args
        count, size = sums.dtype.count, sums.dtype.dtype.bitwidth // 8
        for at, total in enumerate(unpack(builder, sums_)):
            j, v = divmod(at, across)
            inside = builder.icmp_signed("<", ir.Constant(_I64, j), height_)
            limit = builder.select(inside, width_, ir.Constant(_I64, 0))
            mask = emit_clip_mask(builder, ir.Constant(_I64, v * count), limit, count)
            row = emit_offset(builder, y_, j, pitch_)
            emit_masked_store(builder, emit_offset(builder, row, v * count, size), total, mask)
        return context.get_dummy_value()

    return types.void(sums, rows, *[types.int64] * 4), codegen


@functools.cache
def fprop_kernel(T: type, M: type, RC: int, RB: int, VB: int) -> Kernel:
    """y = bias + filter over x, by blocks of RB rows and VB vectors, RC filter rows at a time.

    Rows beyond the last whole group of RC go one at a time, as all rows do where the filter is dilated vertically
    (RC = 1). A tile is `tile_units` row blocks, counted over images, groups and rows. Each thread begins with
    another of the `parts` of the result, whose counters are the last arguments.
    """
    L, SIZE = lanes(T), np.dtype(M).itemsize
    COLUMNS, SUMS = VB * L, RB * VB

    @inline
    def interior(sums, x, x_steps, w, w_steps, extent):
        """All taps of a block whose every tap lies inside the image."""
        (C, R, S), (xc, xh, x_row, x_col), (wc, wr, ws) = extent, x_steps, w_steps
        for c in range(C):
            r = 0
            while r < R:
                xs, wv = x + c * xc + r * x_row, w + c * wc + r * wr
                if r + RC <= R:
                    for _ in range(S):
                        sums = correlate(M, sums, broadcast_strided(T, RC, wv, wr), RB, xs, xh)
                        xs += x_col
                        wv += ws
                    r += RC
                else:
                    for _ in range(S):
                        sums = correlate(M, sums, broadcast_strided(T, 1, wv, wr), RB, xs, xh)
                        xs += x_col
                        wv += ws
                    r += 1
        return sums

    @inline
    def border(sums, plane, row, column, dilation, w, w_steps, extent, skip):
        """All taps of any block; its first tap lies at (row, column)."""
        (C, R, S), (x, xc, xh, H, W), (wc, wr, ws) = extent, plane, w_steps
        for c in range(C):
            r = 0
            while r < R:
                xs, at = x + c * xc, row + r * dilation[0]
                for s in range(S):
                    across, wv = column + s * dilation[1], w + c * wc + r * wr + s * ws
                    if r + RC <= R:
                        taps = broadcast_strided(T, RC, wv, wr)
                        sums = correlate_clipped(M, sums, taps, RB, xs, xh, at, H, across, W, skip)
                    else:
                        tap = broadcast_strided(T, 1, wv, wr)
                        sums = correlate_clipped(M, sums, tap, RB, xs, xh, at, H, across, W, skip)
                r += RC if r + RC <= R else 1
        return sums

    @kernel
    def filter2d_fprop(block):
        x, w, bias, y = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        G, C, K = argument(block, 4), argument(block, 5), argument(block, 6)
        H, W, P, Q = argument(block, 7), argument(block, 8), argument(block, 9), argument(block, 10)
        R, S = argument(block, 11), argument(block, 12)
        row_pad, col_pad = argument(block, 13), argument(block, 14)
        row_dil, col_dil = argument(block, 15), argument(block, 16)
        wg, wk, wc = argument(block, 17), argument(block, 18), argument(block, 19)
        wr, ws, skip = argument(block, 20), argument(block, 21), argument(block, 22)
        units, tile_units, parts = argument(block, 23), argument(block, 24), argument(block, 25)
        xh, yh = W * SIZE, Q * SIZE
        xc, yc = H * xh, P * yh
        extent, dilation = (C, R, S), (row_dil, col_dil)
        x_steps, w_steps = (xc, xh, row_dil * xh, col_dil * SIZE), (wc, wr, ws)
        row_blocks = (P + RB - 1) // RB

        part_tiles = (units + parts * tile_units - 1) // (parts * tile_units)
        own = thread_index(block)
        for step in range(parts):  # its own part, then what the others have left of theirs
            part = (own + step) % parts
            drawn = next_tile_of(block, 26 + part)
            while drawn < part_tiles:
                tile = part * part_tiles + drawn
                for unit in range(tile * tile_units, min(units, (tile + 1) * tile_units)):
                    image, row_block = unit // row_blocks, unit % row_blocks
                    n, g = image // G, image % G
                    p = max(0, min(row_block * RB, P - RB))
                    row = p - row_pad
                    rows_inside = row >= 0 and row + (R - 1) * row_dil + RB <= H and RB <= P
                    xg = x + (n * G + g) * C * xc
                    for k in range(K):
                        channel = g * K + k
                        first = zero(T)
                        if bias != 0:
                            first = broadcast(load_scalar(M, bias + channel * SIZE))
                        wf = w + g * wg + k * wk
                        yp = y + (n * G * K + channel) * yc + p * yh
                        for start in range(0, Q, COLUMNS):
                            q = max(0, min(start, Q - COLUMNS))
                            column = q - col_pad
                            sums = fill(SUMS, first)
                            if rows_inside and column >= 0 and column + (S - 1) * col_dil + COLUMNS <= W:
                                xs = xg + row * xh + column * SIZE
                                sums = interior(sums, xs, x_steps, wf, w_steps, extent)
                            else:
                                plane = (xg, xc, xh, H, W)
                                sums = border(sums, plane, row, column, dilation, wf, w_steps, extent, skip)
                            made = narrow(M, sums)
                            if RB <= P and COLUMNS <= Q:
                                store_block(made, RB, yp + q * SIZE, yh)
                            else:
                                store_block_clipped(made, RB, yp + q * SIZE, yh, P - p, Q - q)
                drawn = next_tile_of(block, 26 + part)

    return filter2d_fprop


# ---- wgrad --------------------------------------------------------------------------------------------------


def _emit_correlate_grad(builder, sums, taps, rows, dy, x):
    """sums[r, copy] += dy(j) * x(j + r), one filter column; row j goes to copy j % copies.

    `dy(j)` and `x(i)` return a vector and its mask and are each asked for once; a row of dy stays in a register for as
    long as the filter rows pass it, so that `taps` rows of dy and one of x are live beside the sums.
    """
    sums, copies, held = list(sums), len(sums) // taps, {}
    for i in range(rows + taps - 1):
        if i < rows:
            held[i] = dy(i)
        value, inside = x(i)
        for r in range(max(0, i - rows + 1), min(taps, i + 1)):
            j = i - r
            at = r * copies + j % copies
            total = emit_fma(builder, held[j][0], value, sums[at])
            if inside is not None:
                total = builder.select(builder.and_(inside, held[j][1]), total, sums[at])
            sums[at] = total
    return sums


@intrinsic(prefer_literal=True)
def correlate_grad(typingctx, held, sums, taps, rows, dy, dy_pitch, x, x_pitch):
    """correlate_grad(M, sums, taps, rows, ...) -> sums[r, j % copies] + dy[j] * x[j + r], summed over `rows` rows j."""
    if not (is_block(sums) and _literals(taps, rows)):
        return None
    count, height = taps.literal_value, rows.literal_value

    def codegen(context, builder, signature, args):
        _, sums_, _, _, dy_, dy_pitch_, x_, x_pitch_ = args
        kind, memory = context.get_value_type(sums.dtype), memory_of(held)
        dy_rows = emit_rows(builder, dy_, dy_pitch_, height)
        x_rows = emit_rows(builder, x_, x_pitch_, height + count - 1)

        def dy_at(j):
            return emit_load(builder, kind, dy_rows[j], memory), None

        def x_at(i):
            return emit_load(builder, kind, x_rows[i], memory), None

        return pack(builder, _emit_correlate_grad(builder, unpack(builder, sums_), count, height, dy_at, x_at))

    return sums(held, sums, taps, rows, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def correlate_grad_clipped(typingctx, held, sums, taps, rows, dy, dy_pitch, p, P, q, Q, x, x_pitch, row, H, column, W):
    """What `correlate_grad` does, at the border: products of which either factor lies outside its image are left out.

    dy[j] is row p + j of the P x Q image at `dy` from column q on, x[i] row `row` + i of the H x W image at `x`.
    """
    if not (is_block(sums) and _literals(taps, rows)):
        return None
    count, height = taps.literal_value, rows.literal_value

    def codegen(context, builder, signature, args):
        _, sums_, _, _, dy_, dy_pitch_, p_, P_, q_, Q_, x_, x_pitch_, row_, H_, column_, W_ = args
        kind, memory = context.get_value_type(sums.dtype), memory_of(held)

        def dy_at(j):
            return _emit_clipped_row(builder, kind, memory, dy_, dy_pitch_, p_, P_, q_, Q_, j)

        def x_at(i):
            return _emit_clipped_row(builder, kind, memory, x_, x_pitch_, row_, H_, column_, W_, i)

        return pack(builder, _emit_correlate_grad(builder, unpack(builder, sums_), count, height, dy_at, x_at))

    return sums(held, sums, taps, rows, *[types.int64] * 12), codegen


@intrinsic(prefer_literal=True)
def add_taps(typingctx, sums, taps, address, stride):
    """add_taps(sums, taps, address, stride): the f64 at address + r * stride grows by all lanes and copies of tap r.

    Copies are added in their own type, lanes in f64 by halves: a fixed order.
    """
    if not (is_block(sums) and _literals(taps)):
        return None

    def codegen(context, builder, signature, args):
        sums_, _, address_, stride_ = args
        values, copies = unpack(builder, sums_), sums.count // taps.literal_value
        wide = ir.VectorType(ir.DoubleType(), sums.dtype.count)
        for r in range(taps.literal_value):
            total = functools.reduce(builder.fadd, values[r * copies : (r + 1) * copies])
            total = emit_horizontal_sum(builder, total if total.type == wide else builder.fpext(total, wide))
            place = emit_offset(builder, address_, r, stride_)
            emit_store(builder, place, builder.fadd(emit_load(builder, ir.DoubleType(), place), total))
        return context.get_dummy_value()

    return types.void(sums, taps, types.int64, types.int64), codegen


@functools.cache
def wgrad_kernel(T: type, M: type, RC: int, RB: int) -> Kernel:
    """Partial sums of dw, one f64 set per tile: a group's share of `tile_units` row blocks over images and rows.

    For each filter column s the sums of RC filter rows stay in registers along a strip of 1 KiB of columns, which the
    first-level cache keeps for the next s; at its end the lanes are added up in f64.
    """
    L, SIZE = lanes(T), np.dtype(M).itemsize
    STRIP = 1024 // np.dtype(T).itemsize  # whatever memory holds: the order of the sums must not depend on it
    # 8 independent sums hide the latency; 16 registers hold RC rows of dy, RC * copies sums and a value of x.
    SUMS = RC * min(-(-8 // RC), (15 - RC) // RC)
    SINGLE_SUMS = 8

    @inline
    def strip(dy, dy_pitch, x, x_pitch, columns, taps, S, x_col, out):
        """`columns` columns, a multiple of L, of a row block that lies inside; `taps` is RC or 1 filter rows."""
        for _ in range(S):
            if taps == RC:
                sums = fill(SUMS, zero(T))
                for q in range(0, columns, L):
                    sums = correlate_grad(M, sums, RC, RB, dy + q * SIZE, dy_pitch, x + q * SIZE, x_pitch)
                add_taps(sums, RC, out, S * 8)
            else:
                single = fill(SINGLE_SUMS, zero(T))
                for q in range(0, columns, L):
                    single = correlate_grad(M, single, 1, RB, dy + q * SIZE, dy_pitch, x + q * SIZE, x_pitch)
                add_taps(single, 1, out, S * 8)
            x += x_col
            out += 8

    @inline
    def border(dy_image, p, q, end, x_image, row, column, taps, S, x_col, out):
        """Columns [q, end) of any row block; the first tap of (p, q) lies at (row, column)."""
        (dy, dy_pitch, P), (x, x_pitch, H, W) = dy_image, x_image
        for _ in range(S):
            if taps == RC:
                sums = fill(SUMS, zero(T))
                for at in range(q, end, L):
                    across = column + at - q
                    sums = correlate_grad_clipped(
                        M, sums, RC, RB, dy, dy_pitch, p, P, at, end, x, x_pitch, row, H, across, W
                    )
                add_taps(sums, RC, out, S * 8)
            else:
                single = fill(SINGLE_SUMS, zero(T))
                for at in range(q, end, L):
                    across = column + at - q
                    single = correlate_grad_clipped(
                        M, single, 1, RB, dy, dy_pitch, p, P, at, end, x, x_pitch, row, H, across, W
                    )
                add_taps(single, 1, out, S * 8)
            column += x_col
            out += 8

    @kernel
    def filter2d_wgrad(block):
        x, dy, partials = argument(block, 0), argument(block, 1), argument(block, 2)
        G, C, K = argument(block, 3), argument(block, 4), argument(block, 5)
        H, W, P, Q = argument(block, 6), argument(block, 7), argument(block, 8), argument(block, 9)
        R, S = argument(block, 10), argument(block, 11)
        row_pad, col_pad = argument(block, 12), argument(block, 13)
        row_dil, col_dil = argument(block, 14), argument(block, 15)
        units, tile_units, tiles = argument(block, 16), argument(block, 17), argument(block, 18)
        xh, yh = W * SIZE, Q * SIZE
        xc, yc = H * xh, P * yh
        row_blocks = (P + RB - 1) // RB
        # Columns [0, left), [left, right) and [right, Q): the middle reads inside the image for every s.
        left = min(Q, (max(0, col_pad) + L - 1) // L * L)
        right = left + max(0, min(Q, W + col_pad - (S - 1) * col_dil) - left) // L * L
        # A single row is cut into RB equal pieces, which are taken as the rows of a block.
        flat = H == 1 and P == 1 and R == 1 and row_pad == 0
        piece = (right - left) // (RB * L) * L
        x_pitch, y_pitch = xh, yh
        if flat:
            x_pitch, y_pitch, right = piece * SIZE, piece * SIZE, left + RB * piece

        ticket = next_tile(block)
        while ticket < G * tiles:
            g, tile = ticket // tiles, ticket % tiles
            partial = partials + ticket * K * C * R * S * 8
            for i in range(K * C * R * S):
                store_scalar(partial + i * 8, 0.0)
            for unit in range(tile * tile_units, min(units, (tile + 1) * tile_units)):
                n, p = unit // row_blocks, unit % row_blocks * RB
                row = p - row_pad
                rows_inside = row >= 0 and row + (R - 1) * row_dil + RB <= H and p + RB <= P
                middle = right if rows_inside or flat else left
                for k in range(K):
                    dyk = dy + ((n * G + g) * K + k) * yc
                    for c in range(C):
                        xg = x + ((n * G + g) * C + c) * xc
                        dy_image, x_image = (dyk, yh, P), (xg, xh, H, W)
                        r = 0
                        while r < R:
                            taps = RC if r + RC <= R else 1
                            out = partial + ((k * C + c) * R + r) * S * 8
                            at = row + r * row_dil
                            last = left + piece if flat else middle
                            for q in range(left, last, STRIP):
                                ys, xs = dyk + p * yh + q * SIZE, xg + at * xh + (q - col_pad) * SIZE
                                columns = min(STRIP, last - q)
                                strip(ys, y_pitch, xs, x_pitch, columns, taps, S, col_dil * SIZE, out)
                            q = 0 if left > 0 else middle
                            while q < Q:
                                end = min(q + STRIP, left if q < left else Q)
                                border(dy_image, p, q, end, x_image, at, q - col_pad, taps, S, col_dil, out)
                                q = middle if end == left else end
                            r += taps
            ticket = next_tile(block)

    return filter2d_wgrad


@functools.cache
def wgrad_sum_kernel(T: type, M: type) -> Kernel:
    """dw[g, i] = sum over the tiles of partials[g, tile, i], in their order, rounded once."""
    SIZE = np.dtype(M).itemsize

    @kernel
    def filter2d_wgrad_sum(block):
        partials, dw = argument(block, 0), argument(block, 1)
        groups, tiles, count = argument(block, 2), argument(block, 3), argument(block, 4)
        for g in range(groups):
            for i in range(count):
                total = 0.0
                for tile in range(tiles):
                    total += load_scalar(np.float64, partials + ((g * tiles + tile) * count + i) * 8)
                store_scalar(dw + (g * count + i) * SIZE, narrow(M, T(total)))

    return filter2d_wgrad_sum
