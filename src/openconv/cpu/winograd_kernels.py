"""Kernels of cpu.winograd: transforms of images, filters and results, and products of what was transformed.

Lanes are channels everywhere. Images and filters whose channels lie apart are transposed on their way into scratch
memory, squares of L x L at a time, and results on their way out. What a kernel knows at compile time is the type, the
transforms and the orders of memory; sizes are words of a table, so that layers share machine code.

The points of a transform are numbered xi = 0 .. t*t-1, row by row. In memory:

    fprop, dgrad    V[xi][tile / MR][c / L][tile % MR][L]     images; a block of MR tiles is one stream of scalars
                    U[k / W][xi][c][W]                        filters; W = NV * L lanes are one stream of vectors
                    M[k / W][xi][tile][W]                     products
    wgrad           V[xi][c / L][tile][L]  and  Y[xi][k / W][tile][W]  give  D[xi][c][k], a block of c times one of k

A product holds MR rows by NV vectors in registers over all of its depth, which is in one order whatever the batch and
the number of threads are.

T is what is computed with, M what the tensors hold: f16 and bf16 are widened where they are read, and results rounded
where they are stored.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..winograd import Matrix, program, transform
from .finish import finish_row, finish_square
from .runtime import Kernel, kernel
from .simd import (
    LANE_BYTES,
    argument,
    emit_fma,
    emit_load,
    emit_narrow,
    emit_offset,
    emit_store,
    fill,
    fma_rows,
    inline,
    lanes,
    load,
    load_block,
    load_block_clipped,
    load_clipped,
    load_rows,
    memory_of,
    narrow,
    next_of_share,
    prefetch,
    store,
    store_block,
    store_block_clipped,
    store_clipped,
    store_rows,
    thread_number,
    transpose,
    vector_of,
    word,
    zero,
)

__all__ = ["AT", "BT", "WORDS", "G", "filter_kernel", "forward_kernel", "gradient_kernel"]

BT, G, AT = 0, 1, 2

# Words of a table. Pitches are in bytes. SRC_* is what is read (fprop: x; dgrad: dy; wgrad: x, and dy in a table of its
# own), DST_* the result (wgrad: dw).
(
    SRC_N, SRC_H, SRC_W, SRC_C, HEIGHT, WIDTH, CHANNELS, VECTORS,
    DST_N, DST_H, DST_W, DST_C, OUT_H, OUT_W, OUTS, BLOCKS,
    TILES, TILES_Y, TILES_X, ORIGIN_H, ORIGIN_W, STRIP_ROWS,
    V_POINT, V_GROUP, V_ROWS, V_ROW, V_VECTOR, V_VECTORS,
    U_POINT, U_BLOCK, M_POINT, M_BLOCK, M_BLOCKS, W_OUT, W_IN, W_TAP, W_RUN,
    GROUPS, CHUNKS, RANGES, PARTS,
    STRIP_AT, RESULT_AT, M_AT, V_AT, U_AT, TAPS_AT, THREAD_BYTES,
    D_ROW, D_POINT, D_SQUARE, D_TASK, C_STEP, K_STEP, RUNS, THREADS,
    WORDS,
) = range(57)  # fmt: skip


# ---- transforms ----------------------------------------------------------------------------------------------


def _emit_program(builder: ir.IRBuilder, matrix: Matrix, values: list[ir.Value]) -> list[ir.Value]:
    """matrix * values, by its program."""
    at: dict[str, ir.Value] = {f"v{i}": value for i, value in enumerate(values)}
    kind = values[0].type
    for step in program(matrix):
        factor = ir.Constant(kind, [float(step.c)] * kind.count)
        match step.op:
            case "add":
                made = builder.fadd(at[step.a], at[step.b])
            case "sub":
                made = builder.fsub(at[step.a], at[step.b])
            case "fma":
                made = emit_fma(builder, factor, at[step.a], at[step.b])
            case "mul":
                made = builder.fmul(factor, at[step.a])
            case "copy":
                made = at[step.a]
            case _:
                made = ir.Constant(kind, None)
        at[step.target] = made
    return [at[f"y{i}"] for i in range(len(matrix))]


def _matrix(which: int, m: int, r: int) -> Matrix:
    made = transform(m, r)
    return (made.bt, made.g, made.at)[which]


@intrinsic(prefer_literal=True)
def nested(
    typingctx, from_held, to_held, which, mh, rh, mw, rw, source, row, column, target, to_row, to_column, bias
):  # fmt: skip
    """nested(S, D, which, mh, rh, mw, rw, source, row, column, target, to_row, to_column, bias): of both axes.

    which = BT, G or AT of F(mh, rh) down the columns and of F(mw, rw) along the rows; vectors of S lie `row` and
    `column` bytes apart, and `to_row` and `to_column` where they go, as vectors of D. The vector `bias` is added to
    AT's.
    """
    vector = vector_of(from_held)
    sizes = (which, mh, rh, mw, rw)
    if vector is None or not vector == vector_of(to_held) == bias:
        return None
    if not all(isinstance(size, types.IntegerLiteral) for size in sizes):
        return None
    kind_, mh_, rh_, mw_, rw_ = (size.literal_value for size in sizes)
    down, along = _matrix(kind_, mh_, rh_), _matrix(kind_, mw_, rw_)

    def codegen(context, builder, signature, args):
        source_, row_, column_, target_, to_row_, to_column_, bias_ = args[7:]
        kind, read, written = context.get_value_type(vector), memory_of(from_held), memory_of(to_held)
        columns = []
        for j in range(len(along[0])):
            first = emit_offset(builder, source_, j, column_)
            places = [emit_offset(builder, first, i, row_) for i in range(len(down[0]))]
            columns.append(_emit_program(builder, down, [emit_load(builder, kind, place, read) for place in places]))
        for i in range(len(down)):
            made = _emit_program(builder, along, [column[i] for column in columns])
            first = emit_offset(builder, target_, i, to_row_)
            for j, value in enumerate(made):
                if kind_ == AT:
                    value = builder.fadd(value, bias_)
                if written is not None:
                    value = emit_narrow(builder, value, written)
                emit_store(builder, emit_offset(builder, first, j, to_column_), value)
        return context.get_dummy_value()

    return types.void(from_held, to_held, *sizes, *[types.int64] * 6, bias), codegen


# ---- squares of channels and what lies side by side in memory ------------------------------------------------


@functools.cache
def _gather(T: type, M: type) -> Any:
    L, HELD, LB = lanes(T), np.dtype(M).itemsize, LANE_BYTES

    @inline
    def gather(source, pitch, rows, count, target):
        """target[i][lane] = source[lane][i] for i < count, lanes `pitch` bytes apart; the last of `rows` lanes stands
        in for those behind it. Writes L vectors at least."""
        if count >= L and rows >= L:
            i = 0
            while i < count:
                at = min(i, count - L)
                store_block(transpose(load_block(M, L, source + at * HELD, pitch)), target + at * LB, LB)
                i += L
        else:
            i = 0
            while i < count:
                part = load_block_clipped(M, L, source + i * HELD, pitch, rows, count - i)
                store_block(transpose(part), target + i * LB, LB)
                i += L

    return gather


@functools.cache
def _scatter(T: type, M: type, FINISH: bool) -> Any:
    L, HELD, LB = lanes(T), np.dtype(M).itemsize, LANE_BYTES
    finish = finish_square(T, M)

    @inline
    def scatter(source, count, target, pitch, rows, more, limits):
        """target[lane][i] = source[i][lane] for i < count and lane < rows. Reads L vectors at least."""
        if count >= L and rows >= L:
            i = 0
            while i < count:
                at = min(i, count - L)
                square = transpose(load_block(T, L, source + at * LB, LB))
                if FINISH:
                    square = finish(square, target + at * HELD, pitch, more, limits, L, L)
                store_block(narrow(M, square), target + at * HELD, pitch)
                i += L
        else:
            i = 0
            while i < count:
                square = transpose(load_block(T, L, source + i * LB, LB))
                if FINISH:
                    square = finish(square, target + i * HELD, pitch, more, limits, rows, count - i)
                store_block_clipped(narrow(M, square), target + i * HELD, pitch, rows, count - i)
                i += L

    return scatter


# ---- images --------------------------------------------------------------------------------------------------


@functools.cache
def _image_transform(
    T: type, M: type, last: bool, which: int, mh: int, rh: int, mw: int, rw: int, sh: int, sw: int
) -> Any:  # fmt: skip
    """Transform tiles of an image, which lie sh and sw pixels apart; `last`: channels are side by side in memory."""
    L, HELD, LB = lanes(T), np.dtype(M).itemsize, LANE_BYTES
    V, LOW = L * HELD, M is not T
    EH, EW = len(_matrix(which, mh, rh)[0]), len(_matrix(which, mw, rw)[0])
    TW = len(_matrix(which, mw, rw))
    gather = _gather(T, M)

    @inline
    def strips(table, source, target, scratch, base, first, end, v0, v1):
        """Channels apart: the rows of a run of tiles are gathered for one vector of channels after the other."""
        tiles_y, tiles_x, most = word(table, TILES_Y), word(table, TILES_X), word(table, STRIP_ROWS)
        height, width, channels = word(table, HEIGHT), word(table, WIDTH), word(table, CHANNELS)
        point, plane, pitch = word(table, V_POINT), word(table, SRC_C), word(table, SRC_H)
        grouped, group, step = word(table, V_ROWS), word(table, V_GROUP), word(table, V_ROW)
        together, vector = word(table, V_VECTORS), word(table, V_VECTOR)
        none = zero(T)
        tile = first
        while tile < end:
            n, rest = tile // (tiles_y * tiles_x), tile % (tiles_y * tiles_x)
            ty, tx = rest // tiles_x, rest % tiles_x
            rows, cols = 1, min(end - tile, tiles_x - tx)
            if tx == 0 and cols == tiles_x:
                rows = min((end - tile) // tiles_x, tiles_y - ty, most)
            top, left = ty * sh + word(table, ORIGIN_H), tx * sw + word(table, ORIGIN_W)
            wide, high = (cols - 1) * sw + EW, (rows - 1) * sh + EH
            low, high_w = min(max(-left, 0), wide), max(min(wide, width - left), 0)
            for v in range(v0, v1):
                image = source + n * word(table, SRC_N) + v * L * plane
                for i in range(high):
                    line, h = scratch + i * wide * LB, top + i
                    if h < 0 or h >= height or high_w <= low:
                        for j in range(wide):
                            store(line + j * LB, none)
                    else:
                        for j in range(low):
                            store(line + j * LB, none)
                        gather(image + h * pitch + (left + low) * HELD, plane, channels - v * L, high_w - low,
                               line + low * LB)  # fmt: skip
                        for j in range(high_w, wide):
                            store(line + j * LB, none)
                to = target + (tile - base) // grouped * group + v // together * vector + v % together * LB
                at = (tile - base) % grouped
                for y in range(rows):
                    for x in range(cols):
                        pixel = scratch + (y * sh * wide + x * sw) * LB
                        nested(T, T, which, mh, rh, mw, rw, pixel, wide * LB, LB, to + at * step, TW * point, point,
                               none)  # fmt: skip
                        at += 1
                        if at == grouped:
                            at, to = 0, to + group
            tile += rows * cols

    @inline
    def tiles(table, source, target, scratch, base, first, end, v0, v1):
        """Channels side by side: tiles inside of the image are read where they are, others from a padded copy."""
        tiles_y, tiles_x = word(table, TILES_Y), word(table, TILES_X)
        height, width, channels = word(table, HEIGHT), word(table, WIDTH), word(table, CHANNELS)
        point, row, column = word(table, V_POINT), word(table, SRC_H), word(table, SRC_W)
        grouped, group, step = word(table, V_ROWS), word(table, V_GROUP), word(table, V_ROW)
        together, vector = word(table, V_VECTORS), word(table, V_VECTOR)
        pitch = (v1 - v0) * LB + 64
        none = zero(T)
        for tile in range(first, end):
            n, rest = tile // (tiles_y * tiles_x), tile % (tiles_y * tiles_x)
            top = rest // tiles_x * sh + word(table, ORIGIN_H)
            left = rest % tiles_x * sw + word(table, ORIGIN_W)
            image = source + n * word(table, SRC_N)
            inside = top >= 0 and left >= 0 and top + EH <= height and left + EW <= width
            in_place = inside and v1 * L <= channels
            if in_place:
                pixel, by_row, by_column = image + top * row + left * column + v0 * V, row, column
            else:
                pixel, by_row, by_column = scratch, EW * pitch, pitch
                for i in range(EH):
                    for j in range(EW):
                        h, w, to = top + i, left + j, scratch + (i * EW + j) * pitch
                        if h < 0 or w < 0 or h >= height or w >= width:
                            for v in range(v1 - v0):
                                store(to + v * LB, none)
                        else:
                            line = image + h * row + w * column
                            for v in range(v0, v1):
                                if (v + 1) * L <= channels:
                                    store(to + (v - v0) * LB, load(M, line + v * V))
                                else:
                                    store(to + (v - v0) * LB, load_clipped(M, line, v * L, channels))
            to = target + (tile - base) // grouped * group + (tile - base) % grouped * step
            to += v0 // together * vector
            at = v0 % together
            for _ in range(v1 - v0):
                if LOW and in_place:
                    nested(M, T, which, mh, rh, mw, rw, pixel, row, column, to + at * LB, TW * point, point, none)
                    pixel += V
                else:
                    nested(T, T, which, mh, rh, mw, rw, pixel, by_row, by_column, to + at * LB, TW * point, point, none)
                    pixel += LB
                at += 1
                if at == together:
                    at, to = 0, to + vector

    return tiles if last else strips


# ---- filters -------------------------------------------------------------------------------------------------


@functools.cache
def _filter_transform(
    T: type, M: type, last: bool, turned: bool, NV: int, mh: int, rh: int, mw: int, rw: int
) -> Any:  # fmt: skip
    """Transform a block of W filters for some of their channels; `turned`: by half a turn, lanes are C, not K."""
    L, LB = lanes(T), LANE_BYTES
    R, S = rh, rw
    TAPS, TH, TW = rh * rw, mh + rh - 1, mw + rw - 1
    W = NV * L
    gather = _gather(T, M)

    @inline
    def filters(table, source, target, scratch, block, c0, c1):
        outs, channels, run = word(table, OUTS), word(table, CHANNELS), word(table, W_RUN)
        lane, inner, tap = word(table, W_OUT), word(table, W_IN), word(table, W_TAP)
        point = word(table, U_POINT)
        none = zero(T)
        c = c0
        while c < c1:
            count = min(run, c1 - c, max(channels - c, 0))
            if count == 0:  # channels that fill the last vector
                for v in range(NV):
                    for xi in range(TH * TW):
                        store(target + xi * point + (c * NV + v) * LB, none)
                c += 1
                continue
            for v in range(NV):
                k = block * W + v * L
                rows = outs - k
                # Lanes behind the last filter hold anything: nobody reads their results.
                from_ = source + min(k, outs - 1) * lane + c * inner
                rows = max(rows, 1)
                by_channel, by_tap = TAPS * LB, LB
                if turned and last:
                    for i in range(count):
                        for j in range(TAPS):
                            value = load_clipped(M, from_ + i * inner + j * tap, 0, rows)
                            store(scratch + (i * TAPS + j) * LB, value)
                elif turned:
                    for i in range(count):
                        gather(from_ + i * inner, lane, rows, TAPS, scratch + i * TAPS * LB)
                elif last:
                    by_channel, by_tap = LB, count * LB
                    for j in range(TAPS):
                        gather(from_ + j * tap, lane, rows, count, scratch + j * count * LB)
                else:
                    gather(from_, lane, rows, count * TAPS, scratch)
                for i in range(count):
                    to = target + ((c + i) * NV + v) * LB
                    at, row, column = scratch + i * by_channel, S * by_tap, by_tap
                    if turned:
                        at, row, column = at + (TAPS - 1) * by_tap, -row, -column
                    nested(T, T, G, mh, R, mw, S, at, row, column, to, TW * point, point, none)
            c += count

    return filters


@functools.cache
def filter_kernel(
    T: type, M: type, last: bool, turned: bool, NV: int, mh: int, rh: int, mw: int, rw: int
) -> Kernel:  # fmt: skip
    """Transform all filters. Arguments: table, filters, target, scratch."""
    filters = _filter_transform(T, M, last, turned, NV, mh, rh, mw, rw)
    L = lanes(T)

    @kernel
    def winograd_filters(block):
        table, source, target = argument(block, 0), argument(block, 1), argument(block, 2)
        number = thread_number(block, argument(block, 4))
        scratch = argument(block, 3) + number * word(table, THREAD_BYTES) + word(table, TAPS_AT)
        blocks, parts, vectors = word(table, BLOCKS), word(table, PARTS), word(table, VECTORS)
        task, away = next_of_share(block, 5, word(table, THREADS), number, 0, blocks * parts)
        while task >= 0:
            at, part = task // parts, task % parts
            filters(table, source, target + at * word(table, U_BLOCK), scratch, at,
                    vectors * part // parts * L, vectors * (part + 1) // parts * L)  # fmt: skip
            task, away = next_of_share(block, 5, word(table, THREADS), number, away, blocks * parts)

    return winograd_filters


# ---- fprop and dgrad: products and results -------------------------------------------------------------------


@functools.cache
def _products(T: type, MR: int, NV: int) -> Any:
    L, SIZE, LB = lanes(T), np.dtype(T).itemsize, LANE_BYTES
    A_STEP, B_STEP, VB, COUNT = MR * LB, L * NV * LB, NV * LB, MR * NV
    LINES = max(1, VB // 64)

    @inline
    def products(table, a, b, m, groups, following):
        """m[tile][W] = a[group][c][MR] * b[c][W] for tiles in groups of MR. The first group has what `following` points
        to brought nearer, as much as b has: the filters of the next product, which come from far."""
        vectors, group = word(table, VECTORS), word(table, V_GROUP)
        sums = fill(COUNT, zero(T))
        from_, by = a, b
        for _ in range(vectors):
            for j in range(L):
                sums = fma_rows(sums, MR, from_ + j * SIZE, LB, by + j * VB)
                prefetch(LINES, following + j * VB)
            from_ += A_STEP
            by += B_STEP
            following += B_STEP
        store_block(sums, m, LB)
        for i in range(1, groups):
            sums = fill(COUNT, zero(T))
            from_, by = a + i * group, b
            for _ in range(vectors):
                for j in range(L):
                    sums = fma_rows(sums, MR, from_ + j * SIZE, LB, by + j * VB)
                from_ += A_STEP
                by += B_STEP
            store_block(sums, m + i * MR * VB, LB)

    return products


@functools.cache
def _results(T: type, M: type, last: bool, NV: int, mh: int, rh: int, mw: int, rw: int, FINISH: bool) -> Any:
    """Results of tiles of a block of W filters from their products."""
    L, HELD, LB = lanes(T), np.dtype(M).itemsize, LANE_BYTES
    TW, W = mw + rw - 1, NV * L
    scatter, finish = _scatter(T, M, FINISH), finish_row(T, M)

    @inline
    def strips(table, m, y, bias, scratch, block, first, end, more, limits):
        tiles_y, tiles_x = word(table, TILES_Y), word(table, TILES_X)
        height, width, outs, point = word(table, OUT_H), word(table, OUT_W), word(table, OUTS), word(table, M_POINT)
        plane, pitch = word(table, DST_C), word(table, DST_H)
        tile = first
        while tile < end:
            n, rest = tile // (tiles_y * tiles_x), tile % (tiles_y * tiles_x)
            ty, tx = rest // tiles_x, rest % tiles_x
            cols = min(end - tile, tiles_x - tx)
            wide = cols * mw
            for v in range(NV):
                k = block * W + v * L
                if k < outs:
                    extra = zero(T)
                    if bias != 0:
                        extra = load_clipped(M, bias, k, outs)
                    for x in range(cols):
                        from_ = m + ((tile - first + x) * NV + v) * LB
                        nested(T, T, AT, mh, rh, mw, rw, from_, TW * point, point, scratch + x * mw * LB, wide * LB,
                               LB, extra)  # fmt: skip
                    image = y + n * word(table, DST_N) + k * plane + tx * mw * HELD
                    for i in range(min(mh, height - ty * mh)):
                        count = min(wide, width - tx * mw)
                        scatter(scratch + i * wide * LB, count, image + (ty * mh + i) * pitch, plane, outs - k, more,
                                limits)  # fmt: skip
            tile += cols

    @inline
    def tiles(table, m, y, bias, scratch, block, first, end, more, limits):
        tiles_y, tiles_x = word(table, TILES_Y), word(table, TILES_X)
        height, width, outs, point = word(table, OUT_H), word(table, OUT_W), word(table, OUTS), word(table, M_POINT)
        row, column = word(table, DST_H), word(table, DST_W)
        for tile in range(first, end):
            n, rest = tile // (tiles_y * tiles_x), tile % (tiles_y * tiles_x)
            top, left = rest // tiles_x * mh, rest % tiles_x * mw
            pixel = y + n * word(table, DST_N) + top * row + left * column
            high, wide = min(mh, height - top), min(mw, width - left)
            for v in range(NV):
                k = block * W + v * L
                if k < outs:
                    extra = zero(T)
                    if bias != 0:
                        extra = load_clipped(M, bias, k, outs)
                    from_ = m + ((tile - first) * NV + v) * LB
                    if not FINISH and high == mh and wide == mw and k + L <= outs:
                        nested(T, M, AT, mh, rh, mw, rw, from_, TW * point, point, pixel + k * HELD, row, column, extra)
                    else:
                        nested(T, T, AT, mh, rh, mw, rw, from_, TW * point, point, scratch, mw * LB, LB, extra)
                        for i in range(high):
                            for j in range(wide):
                                value, to = load(T, scratch + (i * mw + j) * LB), pixel + i * row + j * column
                                if FINISH:
                                    value = finish(value, to, k, outs, more, limits)
                                if k + L <= outs:
                                    store(to + k * HELD, narrow(M, value))
                                else:
                                    store_clipped(to, k, outs, narrow(M, value))

    return tiles if last else strips


@functools.cache
def forward_kernel(
    T: type, M: type, src_last: bool, w_last: bool, dst_last: bool, turned: bool, MR: int, NV: int,
    mh: int, rh: int, mw: int, rw: int, fly: bool, FINISH: bool,
) -> Kernel:  # fmt: skip
    """All of fprop or dgrad but the filters' transform. A task has some groups of tiles and a range of filters.

    Arguments: table, x, U, y, bias, scratch, numbering of the threads, the two words of `finish.py`, a counter for each
    thread; in place of U the filters themselves, where they are transformed on the `fly`. Images are transformed by
    each thread that needs them: to fetch what another core has written takes longer.
    """
    images = _image_transform(T, M, src_last, BT, mh, rh, mw, rw, mh, mw)
    filters = _filter_transform(T, M, w_last, turned, NV, mh, rh, mw, rw)
    products, results = _products(T, MR, NV), _results(T, M, dst_last, NV, mh, rh, mw, rw, FINISH)
    L, LB = lanes(T), LANE_BYTES
    POINTS = (mh + rh - 1) * (mw + rw - 1)

    @kernel
    def winograd_forward(block):
        table, x, u, y = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        number, tasks = thread_number(block, argument(block, 6)), word(table, CHUNKS) * word(table, RANGES)
        bias, scratch = argument(block, 4), argument(block, 5) + number * word(table, THREAD_BYTES)
        more, limits = argument(block, 7), argument(block, 8)
        chunks, ranges, groups, most = word(table, CHUNKS), word(table, RANGES), word(table, GROUPS), word(table, TILES)
        vectors, blocks, together = word(table, VECTORS), word(table, BLOCKS), word(table, M_BLOCKS)
        u_block, u_point = word(table, U_BLOCK), word(table, U_POINT)
        v_point, m_point, m_block = word(table, V_POINT), word(table, M_POINT), word(table, M_BLOCK)
        m, v = scratch + word(table, M_AT), scratch + word(table, V_AT)
        there = -1
        task, away = next_of_share(block, 9, word(table, THREADS), number, 0, tasks)
        while task >= 0:
            chunk, piece = task // ranges, task % ranges
            first, end = groups * chunk // chunks, groups * (chunk + 1) // chunks
            low, high = first * MR, min(end * MR, most)
            if chunk != there:
                there = chunk
                images(table, x, v, scratch + word(table, STRIP_AT), low, low, high, 0, vectors)
                for tile in range(high, end * MR):  # tiles that fill the last group
                    to = v + (end - first - 1) * word(table, V_GROUP) + tile % MR * LB
                    for xi in range(POINTS):
                        for c in range(vectors):
                            store(to + xi * v_point + c * MR * LB, zero(T))
            k, k1 = blocks * piece // ranges, blocks * (piece + 1) // ranges
            while k < k1:
                some = min(together, k1 - k)
                from_ = u + k * u_block
                if fly:
                    from_ = scratch + word(table, U_AT)
                    for i in range(some):
                        filters(table, u, from_ + i * u_block, scratch + word(table, TAPS_AT), k + i, 0, vectors * L)
                for xi in range(POINTS):
                    for i in range(some):
                        b, following = from_ + i * u_block + xi * u_point, from_ + (i + 1) * u_block + xi * u_point
                        if i + 1 == some:
                            following = from_ + (xi + 1) * u_point
                        products(table, v + xi * v_point, b, m + i * m_block + xi * m_point, end - first, following)
                for i in range(some):
                    results(table, m + i * m_block, y, bias, scratch + word(table, RESULT_AT), k + i, low, high, more,
                            limits)  # fmt: skip
                k += some
            task, away = next_of_share(block, 9, word(table, THREADS), number, away, tasks)

    return winograd_forward


# ---- wgrad ---------------------------------------------------------------------------------------------------


@functools.cache
def gradient_kernel(
    T: type, M: type, images_last: bool, last: bool, MR: int, NV: int, mh: int, rh: int, mw: int, rw: int
) -> Kernel:  # fmt: skip
    """All of wgrad. A task has a range of channels and one of filters, of which it transforms x and dy, run by run of
    tiles, and adds up the products; no two tasks add to the same number, and the order is that of the tiles.

    Arguments: the tables of x, dy and of the products, x, dy, dw, sums that outlast a run, scratch. F(rh, mh) has rh
    results of mh taps.
    """
    images = _image_transform(T, M, images_last, BT, rh, mh, rw, mw, mh, mw)
    others = _image_transform(T, M, images_last, G, rh, mh, rw, mw, mh, mw)
    L, SIZE, LB = lanes(T), np.dtype(T).itemsize, LANE_BYTES
    TH, TW, TAPS = mh + rh - 1, mw + rw - 1, rh * rw
    POINTS, COUNT, HALVES, VB = TH * TW, MR * NV, lanes(T) // MR, NV * LANE_BYTES
    scatter = _scatter(T, M, False)

    @inline
    def sums_of(a, b, tiles, sums):
        for _ in range(tiles):
            sums = fma_rows(sums, MR, a, SIZE, b)
            a += LB
            b += VB
        return sums

    @inline
    def finish(table, d, dw, scratch, c0, c1, k0, k1):
        """dw for channels c0 .. c1 and blocks k0 .. k1 of filters."""
        outs, channels, run = word(table, OUTS), word(table, CHANNELS), word(table, W_RUN)
        lane, inner, tap = word(table, W_OUT), word(table, W_IN), word(table, W_TAP)
        point, row = word(table, D_POINT), word(table, D_ROW)
        none = zero(T)
        for kv in range(k0 * NV, k1 * NV):
            k, c = kv * L, c0
            while c < min(c1, channels) and k < outs:
                count = min(run, c1 - c, channels - c)
                by_channel, by_tap = TAPS * LB, LB
                if last:
                    by_channel, by_tap = LB, count * LB
                for i in range(count):
                    from_ = d + (c - c0 + i) * row + (kv - k0 * NV) * LB
                    nested(T, T, AT, rh, mh, rw, mw, from_, TW * point, point, scratch + i * by_channel, rw * by_tap,
                           by_tap, none)  # fmt: skip
                to = dw + k * lane + c * inner
                if last:
                    for j in range(TAPS):
                        scatter(scratch + j * by_tap, count, to + j * tap, lane, outs - k, 0, 0)
                else:
                    scatter(scratch, count * TAPS, to, lane, outs - k, 0, 0)
                c += count

    @inline
    def square(table, v, y, d, tiles, fresh, c0, c1, k0, k1):
        """d (+)= products of the halves c0 .. c1 of vectors of channels and of the blocks k0 .. k1 of filters."""
        row, point, block = word(table, D_ROW), word(table, D_POINT), word(table, U_BLOCK)
        v_point, y_point, vector = word(table, V_POINT), word(table, U_POINT), word(table, V_VECTOR)
        for xi in range(POINTS):
            for k in range(k0, k1):
                b = y + xi * y_point + k * block
                for c in range(c0, c1):
                    a = v + xi * v_point + c // HALVES * vector + c % HALVES * MR * SIZE
                    to = d + xi * point + (c - c0) * MR * row + (k - k0) * VB
                    sums = fill(COUNT, zero(T))
                    if not fresh:
                        sums = load_rows(T, MR, NV, to, row)
                    store_rows(sums_of(a, b, tiles, sums), MR, to, row)

    @kernel
    def winograd_gradient(block):
        of_x, of_y, table = argument(block, 0), argument(block, 1), argument(block, 2)
        x, dy, dw, kept = argument(block, 3), argument(block, 4), argument(block, 5), argument(block, 6)
        number, tasks = thread_number(block, argument(block, 8)), word(table, CHUNKS) * word(table, RANGES)
        scratch = argument(block, 7) + number * word(table, THREAD_BYTES)
        ranges, vectors, blocks, most = (
            word(table, RANGES),
            word(table, VECTORS),
            word(table, BLOCKS),
            word(table, TILES),
        )
        chunks, runs, y_vectors = word(table, CHUNKS), word(table, RUNS), word(of_y, VECTORS)
        wide, high = word(table, C_STEP), word(table, K_STEP)
        v, y, strip = scratch + word(table, V_AT), scratch + word(table, U_AT), scratch + word(table, STRIP_AT)
        task, away = next_of_share(block, 9, word(table, THREADS), number, 0, tasks)
        while task >= 0:
            chunk, piece = task // ranges, task % ranges
            v0, v1 = vectors * chunk // chunks, vectors * (chunk + 1) // chunks
            k0, k1 = blocks * piece // ranges, blocks * (piece + 1) // ranges
            for run in range(runs):
                first, end = most * run // runs, most * (run + 1) // runs
                images(of_x, x, v - v0 * word(of_x, V_VECTOR), strip, first, first, end, v0, v1)
                others(of_y, dy, y - k0 * word(of_y, V_VECTOR), strip, first, first, end, k0 * NV,
                       min(k1 * NV, y_vectors))  # fmt: skip
                d = scratch + word(table, M_AT)
                if runs > 1:  # the sums of all squares stay
                    d = kept + task * word(table, D_TASK)
                k = k0
                while k < k1:
                    k_end, c = min(k + high, k1), v0
                    while c < v1:
                        c_end = min(c + wide, v1)
                        square(table, v, y, d, end - first, run == 0, (c - v0) * HALVES, (c_end - v0) * HALVES, k - k0,
                               k_end - k0)  # fmt: skip
                        if run + 1 == runs:
                            finish(table, d, dw, scratch + word(table, TAPS_AT), c * L, c_end * L, k, k_end)
                        if runs > 1:
                            d += word(table, D_SQUARE)
                        c = c_end
                    k = k_end
            task, away = next_of_share(block, 9, word(table, THREADS), number, away, tasks)

    return winograd_gradient
