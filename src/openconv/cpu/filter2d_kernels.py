"""Kernels of cpu.filter2d: few-channel convolutions of stride 1, held in registers along the image's height.

    y[n,k,p,q]  = bias[k] + sum over c,r,s of  w[k,c,r,s] * x[n, c, p - pad + r*dil, q - pad + s*dil]
    dw[k,c,r,s] =           sum over n,p,q of  dy[n,k,p,q] * x[n, c, p - pad + r*dil, q - pad + s*dil]

dgrad is the first formula with x and y exchanged, the filter turned by half a turn (negative strides do that) and the
padding dil*(R-1) - pad.

One vector holds L neighbouring columns.  A block of ROWS = 8 output rows times one vector is kept in registers while
the filter passes over it column by column; RC filter rows (all of them up to 7) are taken at once:

    for s in range(S):                      per step        R = 3     R = 5     R = 7
        w[0..RC)   broadcast                loads of w        3         5         7
        for i in range(ROWS + RC - 1):      loads of x       10        12        14
            x = load(row i, column q + s)
            for r: acc[i - r] += w[r] * x   multiply-adds    24        40        56

A core starts two multiply-adds and two loads a cycle (a load that crosses a cache line counts twice), so the
multiply-adds set the pace: 8 rows is the smallest block for which they do at R = 3, and its 8 sums are just enough to
hide a latency of 4 cycles.  Registers: 8 sums, 7 weights and 1 value of x are the 16 of AVX2.

Floors for a one-channel f32 image of 1024x2048 on two cores at 2.8 GHz with AVX-512 (32 multiply-adds a cycle and
core): 16 MiB through the third-level cache 0.28 ms; multiply-adds 0.11 ms (3x3), 0.29 ms (5x5), 0.57 ms (7x7).

Vectors that touch the border of the image take a second path with masked loads.  Taps on padding then see a zero
(fprop: an infinite weight shows) or are left out (dgrad: there is no such term).  Both paths add in the same order, so
that a pixel's bits depend neither on the path nor on tiles, threads or batch.  The last vector of a row overlaps its
neighbour rather than being cut.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .runtime import Kernel, kernel
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
    next_tile,
    pack,
    store_scalar,
    unpack,
    zero,
)

__all__ = ["ROWS", "fprop_kernel", "wgrad_kernel", "wgrad_sum_kernel"]

ROWS = 8

_I32, _I64 = ir.IntType(32), ir.IntType(64)


# ---- the inner step: one filter column over a block of output rows ------------------------------------------


def _emit_correlate(builder, sums, weights, rows, value):
    """sums[j] += weights[r] * value(j + r), with rows + RC - 1 values that are each asked for once.

    `value(i)` returns the vectors of input row i with their masks; a mask of None means all lanes.  A sum meets its
    taps in the order of r, whatever the block.
    """
    sums, across = list(sums), len(sums) // rows
    for i in range(rows + len(weights) - 1):
        for v, (x, mask) in enumerate(value(i)):
            for r in range(max(0, i - rows + 1), min(len(weights), i + 1)):
                at = (i - r) * across + v
                total = emit_fma(builder, x, weights[r], sums[at])
                sums[at] = total if mask is None else builder.select(mask, total, sums[at])
    return sums


def _emit_clipped_row(builder, kind, plane, pitch, row, height, column, width, i):
    """The vector at row + i and column of a height x width image, with the mask of the lanes that lie inside it."""
    row = builder.add(row, ir.Constant(_I64, i))
    inside = builder.icmp_unsigned("<", row, height)
    mask = emit_clip_mask(builder, column, builder.select(inside, width, ir.Constant(_I64, 0)), kind.count)
    size = 8 if isinstance(kind.element, ir.DoubleType) else 4
    place = builder.add(builder.add(plane, builder.mul(row, pitch)), builder.mul(column, ir.Constant(_I64, size)))
    return emit_masked_load(builder, kind, place, mask), mask


@intrinsic(prefer_literal=True)
def correlate(typingctx, sums, weights, rows, address, pitch):
    """correlate(sums, weights, rows, address, pitch) -> sums[j, v] + weights[r] * x[j + r, v], summed over r.

    `sums` holds `rows` rows of vectors side by side; x[i, v] is the vector at address + i * pitch + v * bytes(vector).
    """
    if not (is_block(sums) and is_block(weights) and isinstance(rows, types.IntegerLiteral)):
        return None
    count, across = rows.literal_value, sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, weights_, _, address_, pitch_ = args
        kind = context.get_value_type(sums.dtype)
        width = sums.dtype.count * sums.dtype.dtype.bitwidth // 8
        places = emit_rows(builder, address_, pitch_, count + weights.count - 1)

        def value(i):
            return [(emit_load(builder, kind, emit_offset(builder, places[i], v, width)), None) for v in range(across)]

        return pack(builder, _emit_correlate(builder, unpack(builder, sums_), unpack(builder, weights_), count, value))

    return sums(sums, weights, rows, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def correlate_clipped(typingctx, sums, weights, rows, plane, pitch, row, height, column, width, skip):
    """What `correlate` does, at the border: x[i, v, lane] is plane[row + i, column + v * L + lane], or padding.

    A tap on padding multiplies zero, or is left out where `skip` is true.
    """
    if not (is_block(sums) and is_block(weights) and isinstance(rows, types.IntegerLiteral)):
        return None
    count, across = rows.literal_value, sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, weights_, _, plane_, pitch_, row_, height_, column_, width_, skip_ = args
        kind = context.get_value_type(sums.dtype)
        lanes_ = sums.dtype.count
        keep = emit_splat(builder, builder.not_(builder.trunc(skip_, ir.IntType(1))), lanes_)
        columns = [builder.add(column_, ir.Constant(_I64, v * lanes_)) for v in range(across)]

        def value(i):
            rows_ = [_emit_clipped_row(builder, kind, plane_, pitch_, row_, height_, at, width_, i) for at in columns]
            return [(x, builder.or_(mask, keep)) for x, mask in rows_]

        return pack(builder, _emit_correlate(builder, unpack(builder, sums_), unpack(builder, weights_), count, value))

    return sums(sums, weights, rows, *[types.int64] * 6, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_block(typingctx, sums, rows, address, pitch):
    """store_block(sums, rows, address, pitch): row j of the block goes to address + j * pitch."""
    if not (is_block(sums) and isinstance(rows, types.IntegerLiteral)):
        return None
    across = sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, _, address_, pitch_ = args
        width = sums.dtype.count * sums.dtype.dtype.bitwidth // 8
        places = emit_rows(builder, address_, pitch_, rows.literal_value)
        for at, total in enumerate(unpack(builder, sums_)):
            emit_store(builder, emit_offset(builder, places[at // across], at % across, width), total)
        return context.get_dummy_value()

    return types.void(sums, rows, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_block_clipped(typingctx, sums, rows, address, pitch, height, width):
    """store_block_clipped(..., height, width): what `store_block` does, for the first rows and columns only."""
    if not (is_block(sums) and isinstance(rows, types.IntegerLiteral)):
        return None
    across = sums.count // rows.literal_value

    def codegen(context, builder, signature, args):
        sums_, _, address_, pitch_, height_, width_ = args
        count, size = sums.dtype.count, sums.dtype.dtype.bitwidth // 8
        for at, total in enumerate(unpack(builder, sums_)):
            j, v = divmod(at, across)
            inside = builder.icmp_signed("<", ir.Constant(_I64, j), height_)
            limit = builder.select(inside, width_, ir.Constant(_I64, 0))
            mask = emit_clip_mask(builder, ir.Constant(_I64, v * count), limit, count)
            row = emit_offset(builder, address_, j, pitch_)
            emit_masked_store(builder, emit_offset(builder, row, v * count, size), total, mask)
        return context.get_dummy_value()

    return types.void(sums, rows, *[types.int64] * 4), codegen


# ---- fprop and dgrad ----------------------------------------------------------------------------------------


@functools.cache
def fprop_kernel(T: type, RC: int, RB: int, VB: int) -> Kernel:
    """y = bias + filter over x, by blocks of RB rows and VB vectors, RC filter rows at a time.

    Rows beyond the last whole group of RC go one at a time, as all rows do where the filter is dilated vertically
    (RC = 1).  A tile is `tile_units` row blocks, counted over images, groups and rows.
    """
    L, SIZE = lanes(T), np.dtype(T).itemsize
    COLUMNS, SUMS = VB * L, RB * VB

    @inline
    def interior(sums, x, w, C, R, S, xc, xh, x_row, x_col, wc, wr, ws):
        for c in range(C):
            r = 0
            while r < R:
                xs, wv = x + c * xc + r * x_row, w + c * wc + r * wr
                if r + RC <= R:
                    for _ in range(S):
                        sums = correlate(sums, broadcast_strided(T, RC, wv, wr), RB, xs, xh)
                        xs += x_col
                        wv += ws
                    r += RC
                else:
                    for _ in range(S):
                        sums = correlate(sums, broadcast_strided(T, 1, wv, wr), RB, xs, xh)
                        xs += x_col
                        wv += ws
                    r += 1
        return sums

    @inline
    def border(sums, x, w, C, R, S, xc, xh, row_dil, col_dil, wc, wr, ws, row, H, column, W, skip):
        for c in range(C):
            plane = x + c * xc
            r = 0
            while r < R:
                at, wv = row + r * row_dil, w + c * wc + r * wr
                if r + RC <= R:
                    for s in range(S):
                        taps = broadcast_strided(T, RC, wv + s * ws, wr)
                        sums = correlate_clipped(sums, taps, RB, plane, xh, at, H, column + s * col_dil, W, skip)
                    r += RC
                else:
                    for s in range(S):
                        taps = broadcast_strided(T, 1, wv + s * ws, wr)
                        sums = correlate_clipped(sums, taps, RB, plane, xh, at, H, column + s * col_dil, W, skip)
                    r += 1
        return sums

    @kernel
    def filter2d_fprop(block):
        x, w, bias, y = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        G, C, K = argument(block, 4), argument(block, 5), argument(block, 6)
        H, W, P, Q = argument(block, 7), argument(block, 8), argument(block, 9), argument(block, 10)
        R, S = argument(block, 11), argument(block, 12)
        row_pad, col_pad = argument(block, 13), argument(block, 14)
        row_dil, col_dil = argument(block, 15), argument(block, 16)
        wk, wc, wr, ws = argument(block, 17), argument(block, 18), argument(block, 19), argument(block, 20)
        wg, skip = argument(block, 21), argument(block, 22)
        units, tile_units = argument(block, 23), argument(block, 24)
        xh, yh = W * SIZE, Q * SIZE
        xc, yc = H * xh, P * yh
        row_blocks = (P + RB - 1) // RB

        tile = next_tile(block)
        while tile * tile_units < units:
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
                        first = broadcast(load_scalar(T, bias + channel * SIZE))
                    wf = w + g * wg + k * wk
                    yp = y + (n * G * K + channel) * yc + p * yh
                    for start in range(0, Q, COLUMNS):
                        q = max(0, min(start, Q - COLUMNS))
                        column = q - col_pad
                        sums = fill(SUMS, first)
                        if rows_inside and column >= 0 and column + (S - 1) * col_dil + COLUMNS <= W:
                            xs = xg + row * xh + column * SIZE
                            sums = interior(sums, xs, wf, C, R, S, xc, xh, row_dil * xh, col_dil * SIZE, wc, wr, ws)
                        else:
                            sums = border(
                                sums, xg, wf, C, R, S, xc, xh, row_dil, col_dil, wc, wr, ws, row, H, column, W, skip
                            )
                        if RB <= P and COLUMNS <= Q:
                            store_block(sums, RB, yp + q * SIZE, yh)
                        else:
                            store_block_clipped(sums, RB, yp + q * SIZE, yh, P - p, Q - q)
            tile = next_tile(block)

    return filter2d_fprop


# ---- wgrad --------------------------------------------------------------------------------------------------


def _emit_correlate_grad(builder, sums, taps, rows, dy, x):
    """sums[r, copy] += dy(j) * x(j + r), one filter column; row j goes to copy j % copies.

    `dy(j)` and `x(i)` return a vector and its mask and are each asked for once; a row of dy stays in a register for as
    long as the filter rows pass it, so that taps sums, taps rows of dy and one of x are live.
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
            mask = None if inside is None else builder.and_(inside, held[j][1])
            sums[at] = total if mask is None else builder.select(mask, total, sums[at])
    return sums


def _literals(*kinds):
    return all(isinstance(kind, types.IntegerLiteral) for kind in kinds)


@intrinsic(prefer_literal=True)
def correlate_grad(typingctx, sums, taps, rows, dy, dy_pitch, x, x_pitch):
    """correlate_grad(sums, taps, rows, ...) -> sums[r, j % copies] + dy[j] * x[j + r], summed over `rows` rows j."""
    if not (is_block(sums) and _literals(taps, rows)):
        return None

    def codegen(context, builder, signature, args):
        sums_, _, _, dy_, dy_pitch_, x_, x_pitch_ = args
        kind, height = context.get_value_type(sums.dtype), rows.literal_value
        dy_rows = emit_rows(builder, dy_, dy_pitch_, height)
        x_rows = emit_rows(builder, x_, x_pitch_, height + taps.literal_value - 1)
        found = _emit_correlate_grad(
            builder, unpack(builder, sums_), taps.literal_value, height,
            lambda j: (emit_load(builder, kind, dy_rows[j]), None),
            lambda i: (emit_load(builder, kind, x_rows[i]), None),
        )  # fmt: skip
        return pack(builder, found)

    return sums(sums, taps, rows, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def correlate_grad_clipped(typingctx, sums, taps, rows, dy, dy_pitch, p, P, q, Q, x, x_pitch, row, H, column, W):
    """What `correlate_grad` does, at the border: products of which either factor lies outside its image are left out.

    dy[j] is row p + j of the P x Q image at `dy` from column q on, x[i] row `row` + i of the H x W image at `x`.
    """
    if not (is_block(sums) and _literals(taps, rows)):
        return None

    def codegen(context, builder, signature, args):
        sums_, _, _, dy_, dy_pitch_, p_, P_, q_, Q_, x_, x_pitch_, row_, H_, column_, W_ = args
        kind = context.get_value_type(sums.dtype)
        found = _emit_correlate_grad(
            builder, unpack(builder, sums_), taps.literal_value, rows.literal_value,
            lambda j: _emit_clipped_row(builder, kind, dy_, dy_pitch_, p_, P_, q_, Q_, j),
            lambda i: _emit_clipped_row(builder, kind, x_, x_pitch_, row_, H_, column_, W_, i),
        )  # fmt: skip
        return pack(builder, found)

    return sums(sums, taps, rows, *[types.int64] * 12), codegen


@intrinsic(prefer_literal=True)
def add_taps(typingctx, sums, taps, address, stride):
    """add_taps(sums, taps, address, stride): the f64 at address + r * stride grows by all lanes and copies of tap r.

    Copies are added in their own type, lanes in f64 by halves: a fixed order.
    """
    if not (is_block(sums) and _literals(taps)):
        return None

    def codegen(context, builder, signature, args):
        sums_, _, address_, stride_ = args
        values, count = unpack(builder, sums_), sums.dtype.count
        copies = len(values) // taps.literal_value
        for r in range(taps.literal_value):
            total = functools.reduce(builder.fadd, values[r * copies : (r + 1) * copies])
            wide = ir.VectorType(ir.DoubleType(), count)
            total = emit_horizontal_sum(builder, total if total.type == wide else builder.fpext(total, wide))
            place = emit_offset(builder, address_, r, stride_)
            emit_store(builder, place, builder.fadd(emit_load(builder, ir.DoubleType(), place), total))
        return context.get_dummy_value()

    return types.void(sums, taps, types.int64, types.int64), codegen


@functools.cache
def wgrad_kernel(T: type, RC: int) -> Kernel:
    """Partial sums of dw, one f64 set per tile: a group's share of `tile_units` row blocks over images and rows.

    For each filter column s the sums of RC filter rows stay in registers along a strip of 1 KiB of columns, which the
    first-level cache keeps for the next s; at its end the lanes are added up in f64.
    """
    L, SIZE, RB = lanes(T), np.dtype(T).itemsize, ROWS
    # 8 independent sums hide the latency; 16 registers hold RC rows of dy, RC * COPIES sums and a value of x.
    COPIES = min(-(-8 // RC), (15 - RC) // RC)
    STRIP = 1024 // SIZE
    SUMS = RC * COPIES
    COPIES_1 = 8

    @inline
    def strip(dy, dy_pitch, x, x_pitch, columns, taps, partial, S, x_col, out_r, out_s):
        """Columns [0, columns), a multiple of L, of a row block that lies inside; `taps` is RC or 1 filter rows."""
        for s in range(S):
            if taps == RC:
                sums = fill(SUMS, zero(T))
                for q in range(0, columns, L):
                    sums = correlate_grad(sums, RC, RB, dy + q * SIZE, dy_pitch, x + q * SIZE, x_pitch)
                add_taps(sums, RC, partial, out_r)
            else:
                ones = fill(COPIES_1, zero(T))
                for q in range(0, columns, L):
                    ones = correlate_grad(ones, 1, RB, dy + q * SIZE, dy_pitch, x + q * SIZE, x_pitch)
                add_taps(ones, 1, partial, out_r)
            x += x_col
            partial += out_s

    @inline
    def border(dy, dy_pitch, p, P, q, Q, x, x_pitch, row, H, column, W, taps, partial, S, col_dil, out_r, out_s):
        """Columns [q, Q) of any row block."""
        for s in range(S):
            if taps == RC:
                sums = fill(SUMS, zero(T))
                for at in range(0, Q - q, L):
                    sums = correlate_grad_clipped(
                        sums, RC, RB, dy, dy_pitch, p, P, q + at, Q, x, x_pitch, row, H, column + at, W
                    )
                add_taps(sums, RC, partial, out_r)
            else:
                ones = fill(COPIES_1, zero(T))
                for at in range(0, Q - q, L):
                    ones = correlate_grad_clipped(
                        ones, 1, RB, dy, dy_pitch, p, P, q + at, Q, x, x_pitch, row, H, column + at, W
                    )
                add_taps(ones, 1, partial, out_r)
            column += col_dil
            partial += out_s

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
        # A single row is taken as RB rows of one strip each, one behind the other.
        flat = H == 1 and P == 1 and R == 1
        x_pitch, y_pitch, step = xh, yh, STRIP
        if flat:
            x_pitch, y_pitch, step = STRIP * SIZE, STRIP * SIZE, STRIP * RB
            right = left + (right - left) // step * step

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
                middle = right if rows_inside or (flat and row_pad == 0) else left
                for k in range(K):
                    dyk = dy + ((n * G + g) * K + k) * yc
                    for c in range(C):
                        xg = x + ((n * G + g) * C + c) * xc
                        r = 0
                        while r < R:
                            taps = RC if r + RC <= R else 1
                            out = partial + ((k * C + c) * R + r) * S * 8
                            at = row + r * row_dil
                            for q in range(left, middle, step):
                                columns = min(STRIP, middle - q)
                                ys, xs = dyk + p * yh + q * SIZE, xg + at * xh + (q - col_pad) * SIZE
                                strip(ys, y_pitch, xs, x_pitch, columns, taps, out, S, col_dil * SIZE, S * 8, 8)
                            q = 0 if left > 0 else middle
                            while q < Q:
                                end = min(q + STRIP, left if q < left else Q)
                                border(
                                    dyk, yh, p, P, q, end, xg, xh, at, H, q - col_pad, W, taps, out, S, col_dil, S * 8, 8
                                )
                                q = middle if end == left else end
                            r += taps
            ticket = next_tile(block)

    return filter2d_wgrad


@functools.cache
def wgrad_sum_kernel(T: type) -> Kernel:
    """dw[g, i] = sum over the tiles of partials[g, tile, i], in their order, rounded once."""
    SIZE = np.dtype(T).itemsize

    @kernel
    def filter2d_wgrad_sum(block):
        partials, dw = argument(block, 0), argument(block, 1)
        groups, tiles, count = argument(block, 2), argument(block, 3), argument(block, 4)
        for g in range(groups):
            for i in range(count):
                total = 0.0
                for tile in range(tiles):
                    total += load_scalar(np.float64, partials + ((g * tiles + tile) * count + i) * 8)
                store_scalar(dw + (g * count + i) * SIZE, T(total))

    return filter2d_wgrad_sum
