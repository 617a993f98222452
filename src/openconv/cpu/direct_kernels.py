"""The kernels of cpu.direct: one inner loop, and what lays tensors out around it.

All three passes are sums of outer products of scalars and vectors that stay in registers (`simd.fma_rows`):

    fprop, dgrad    rows: neighbouring pixels of a row     vectors: channels of the result    sum over channels and taps
    wgrad           rows: channels of x, or taps           vectors: channels of dy            sum over pixels

The scalars are read where they are: a table holds the distance of each term from the first, so that taps, dilation,
channels and axes are one loop. The vectors come from filters, or from a tile of dy, in just the order of that loop.

Images are cut into tiles of some hundred pixels. The part of the image that a tile needs is copied into a slot, with
zeros for the padding, so that no term needs a question; slots stay in the second-level cache, and a chunk of the
filters in the first while all pixels of the tile pass by. Sums wait in `sums` between chunks, and are laid out as the
result wants them at the end: rows of vectors in nhwc, squares that are transposed in nchw.

A plan is a table of int64 (`direct_plan.py` fills it): a head of `HEAD` words, then `PHASE` words for each phase of
rows, then `COLUMN` words for each of its phases of columns. fprop has one of each; a dgrad of stride s has s along each
axis, one for each remainder of a position in dx modulo s, with the taps that meet it.

T is what is computed with, M what the tensors hold: f16 and bf16 are widened on their way into slots and ordered
filters, and rounded where results are stored. Then nothing is read in place.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .finish import finish_row, finish_rows, finish_square
from .runtime import Kernel, kernel
from .simd import (
    add_blocks,
    argument,
    block_of,
    emit_load,
    emit_offset,
    emit_store,
    fill,
    fma_rows,
    inline,
    is_block,
    lanes,
    load,
    load_block,
    load_block_clipped,
    load_clipped,
    load_rows,
    load_scalar,
    narrow,
    next_tile,
    pack,
    prefetch,
    store,
    store_block,
    store_block_clipped,
    store_clipped,
    store_rows,
    store_scalar,
    thread_number,
    transpose,
    unpack,
    word,
    zero,
)

__all__ = [
    "COLUMN",
    "HEAD",
    "PHASE",
    "Column",
    "Head",
    "Phase",
    "convolve_kernel",
    "cut_line",
    "filter_kernel",
    "filter_rows_kernel",
    "gradient_kernel",
    "gradient_store_kernel",
    "pack_kernel",
]


class Head:
    """Words of the head. Sizes: I, O of channels of a group in the input and the result; D H W of the input; OD OH OW
    of the result. A tile has IMAGES images, ROWS rows and COLUMNS columns, counted in outputs of a phase."""

    N, G, I, O = 0, 1, 2, 3
    D, H, W = 4, 5, 6
    OD, OH, OW = 7, 8, 9
    IMAGES, ROWS, COLUMNS = 10, 11, 12
    IMAGE_TILES, PHASES, DEPTHS, ROW_TILES, COLUMN_TILES = 13, 14, 15, 16, 17
    RANGES, BLOCKS, RANGE_BLOCKS = 18, 19, 20  # of the result's channels: parts of the work, blocks in all and of each
    COLUMN_PHASES, STEP = 21, 22
    FIRST, STRIDE, WIDTH = 23, 24, 25  # of a slot's row: its first column in x, columns an output, columns in all
    PIXEL, ROW_PIXELS = 26, 27  # elements of a pixel in nhwc; results of a row of a tile
    CHUNK = 28
    SLOT, SUMS, THREAD = 29, 30, 31  # bytes: of a slot, of sums, of all that a thread has
    MODE = 32  # 0: a task fills its slot; 1: slots are filled beforehand; 2: the image itself is read


class Phase:
    """Words of a phase of rows."""

    D_START, D_STEP, D_COUNT, D_STRIDE, TAPS = 0, 1, 2, 3, 4
    H_START, H_STEP, H_COUNT, H_FIRST, H_SOURCE, H_SLOT, H_SPAN = 5, 6, 7, 8, 9, 10, 11
    IMAGE, CHANNEL, TAP, ROW = 12, 13, 14, 15  # elements between these in a slot
    DEPTH_OFFSETS, COLUMNS = 16, 17  # places in the plan


class Column:
    """Words of a phase of columns."""

    START, COUNT, TERMS, OFFSETS, FILTERS = 0, 1, 2, 3, 4


HEAD, PHASE, COLUMN = 33, 18, 5

# Numba reads class attributes of a frozen object, not of these: what kernels use are numbers of this module.
_N, _G, _I, _O = Head.N, Head.G, Head.I, Head.O
_D, _H, _W = Head.D, Head.H, Head.W
_OD, _OH, _OW = Head.OD, Head.OH, Head.OW
_IMAGES, _ROWS, _COLUMNS = Head.IMAGES, Head.ROWS, Head.COLUMNS
_IMAGE_TILES, _PHASES, _DEPTHS = Head.IMAGE_TILES, Head.PHASES, Head.DEPTHS
_ROW_TILES, _COLUMN_TILES = Head.ROW_TILES, Head.COLUMN_TILES
_RANGES, _BLOCKS, _RANGE_BLOCKS = Head.RANGES, Head.BLOCKS, Head.RANGE_BLOCKS
_COLUMN_PHASES, _STEP = Head.COLUMN_PHASES, Head.STEP
_FIRST, _STRIDE, _WIDTH, _PIXEL, _ROW_PIXELS = Head.FIRST, Head.STRIDE, Head.WIDTH, Head.PIXEL, Head.ROW_PIXELS
_CHUNK, _SLOT, _SUMS, _THREAD, _MODE = Head.CHUNK, Head.SLOT, Head.SUMS, Head.THREAD, Head.MODE
_D_START, _D_STEP, _D_COUNT, _D_STRIDE, _TAPS = Phase.D_START, Phase.D_STEP, Phase.D_COUNT, Phase.D_STRIDE, Phase.TAPS
_H_START, _H_STEP, _H_COUNT, _H_FIRST = Phase.H_START, Phase.H_STEP, Phase.H_COUNT, Phase.H_FIRST
_H_SOURCE, _H_SLOT, _H_SPAN = Phase.H_SOURCE, Phase.H_SLOT, Phase.H_SPAN
_IMAGE, _CHANNEL, _TAP, _ROW = Phase.IMAGE, Phase.CHANNEL, Phase.TAP, Phase.ROW
_DEPTH_OFFSETS, _COLUMN_PLACE = Phase.DEPTH_OFFSETS, Phase.COLUMNS
_C_START, _C_COUNT, _C_TERMS, _C_OFFSETS, _C_FILTERS = (
    Column.START,
    Column.COUNT,
    Column.TERMS,
    Column.OFFSETS,
    Column.FILTERS,
)


# ---- rows of vectors at places that a table gives ------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def load_table(typingctx, dtype, count, base, table):
    """load_table(T, n, base, table) -> tuple: vector i lies at base + table[i], of int64 numbers."""
    block = block_of(dtype, count)
    if block is None:
        return None

    def codegen(context, builder, signature, args):
        kind, word = context.get_value_type(block.dtype), ir.IntType(64)
        made = []
        for i in range(block.count):
            distance = emit_load(builder, word, emit_offset(builder, args[3], i, 8))
            made.append(emit_load(builder, kind, builder.add(args[2], distance)))
        return pack(builder, made)

    return block(dtype, count, types.int64, types.int64), codegen


@intrinsic
def store_table(typingctx, block, base, table, scale, count):
    """store_table(block, base, table, scale, count): vector i < count goes to base + table[2i] + scale * table[2i + 1],
    where table[2i] is not negative."""
    if not is_block(block):
        return None

    def codegen(context, builder, signature, args):
        block_, base_, table_, scale_, count_ = args
        word = ir.IntType(64)
        none = ir.Constant(word, 0)
        for i, value in enumerate(unpack(builder, block_)):
            wanted = builder.icmp_signed("<", ir.Constant(word, i), count_)
            with builder.if_then(wanted):
                distance = emit_load(builder, word, emit_offset(builder, table_, 2 * i, 8))
                pitch = emit_load(builder, word, emit_offset(builder, table_, 2 * i + 1, 8))
                with builder.if_then(builder.icmp_signed(">=", distance, none)):
                    place = builder.add(base_, builder.add(distance, builder.mul(scale_, pitch)))
                    emit_store(builder, place, value)
        return context.get_dummy_value()

    return types.void(block, *[types.int64] * 4), codegen


# ---- the inner loop ------------------------------------------------------------------------------------------------


@functools.cache
def _block_of_sums(T: type, M: type, ROWS: int, ACROSS: int, PITCH: int, AHEAD: bool, FINISH: bool) -> Any:
    """sums[ROWS x ACROSS vectors] = start + (sum over terms of scalars * vectors). PITCH is the distance of the scalars
    where it is known beforehand, else 0. AHEAD: with each term a line is asked for, `ahead` and `ahead_pitch` say
    which. Unless `limits` is 0, sums are whole and lie in the result: finished, if FINISH, and rounded to M."""
    COUNT, LOW = ROWS * ACROSS, M is not T
    finish = finish_rows(T, M, ROWS, ACROSS)

    @inline
    def block_of_sums(
        start, start_pitch, sums, sums_pitch, a, pitch, offsets, terms, b, b_pitch, ahead, ahead_pitch, more, limits
    ):
        acc = fill(COUNT, zero(T))
        for term in range(terms):
            if AHEAD:
                prefetch(1, ahead + term * ahead_pitch)
            acc = step(acc, a + load_scalar(np.int64, offsets + 8 * term), pitch, b + term * b_pitch)
        total = add_blocks(acc, load_rows(T, ROWS, ACROSS, start, start_pitch))
        if FINISH:
            if limits != 0:
                total = finish(total, sums, sums_pitch, more, limits)
        if LOW and limits != 0:
            store_rows(narrow(M, total), ROWS, sums, sums_pitch)
        else:
            store_rows(total, ROWS, sums, sums_pitch)

    if PITCH:

        @inline
        def step(acc, a, pitch, b):
            return fma_rows(acc, ROWS, a, PITCH, b)
    else:

        @inline
        def step(acc, a, pitch, b):
            return fma_rows(acc, ROWS, a, pitch, b)

    return block_of_sums


@inline
def cut_line(count, ROWS, LESS):
    """How many blocks of ROWS, of LESS = ROWS - 1, and of one make up a line: no ones where it comes out even."""
    parts = (count + ROWS - 1) // ROWS
    if count >= LESS * parts:
        large = count - LESS * parts if ROWS > LESS else 0
        return large, parts - large, 0
    large = count // ROWS
    rest = count - large * ROWS
    less = rest // LESS
    return large, less, rest - less * LESS


# ---- tiles and slots -----------------------------------------------------------------------------------------------


_word = word


@inline
def _tile(plan, tile):
    """(first image, images, group, phase, depth, first row, rows, first column, columns) of a tile; no rows or columns
    where a phase has fewer of them than the first."""
    column = tile % _word(plan, _COLUMN_TILES) * _word(plan, _COLUMNS)
    tile = tile // _word(plan, _COLUMN_TILES)
    row = tile % _word(plan, _ROW_TILES) * _word(plan, _ROWS)
    tile = tile // _word(plan, _ROW_TILES)
    depth = tile % _word(plan, _DEPTHS)
    tile = tile // _word(plan, _DEPTHS)
    phase = plan + 8 * (HEAD + PHASE * (tile % _word(plan, _PHASES)))
    tile = tile // _word(plan, _PHASES)
    group = tile % _word(plan, _G)
    image = tile // _word(plan, _G) * _word(plan, _IMAGES)
    images = min(_word(plan, _IMAGES), _word(plan, _N) - image)
    rows = min(_word(plan, _ROWS), _word(phase, _H_COUNT) - row)
    if depth >= _word(phase, _D_COUNT):
        rows = 0
    columns = min(_word(plan, _COLUMNS), _word(plan + 8 * _word(phase, _COLUMN_PLACE), _C_COUNT) - column)
    return image, images, group, phase, depth, row, rows, column, columns


@functools.cache
def _filler(T: type, M: type, CHANNELS_LAST: bool) -> Any:
    """What copies the part of x that a tile needs into its slot, zeros around it. Vectors may end beyond a row, whose
    neighbour is written next; behind the last there is room for one."""
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize

    @inline
    def fill_slot(plan, phase, x, slot, image, images, group, depth, row, rows, column):
        D, H, W, I = _word(plan, _D), _word(plan, _H), _word(plan, _W), _word(plan, _I)
        G, width, pixel = _word(plan, _G), _word(plan, _WIDTH), _word(plan, _PIXEL)
        taps, source = _word(phase, _TAPS), _word(phase, _H_SOURCE)
        first_h = row * source * _word(phase, _H_SLOT) + _word(phase, _H_FIRST)
        first_w = column * _word(plan, _STRIDE) + _word(plan, _FIRST)
        slot_rows = (rows - 1) * _word(phase, _H_SLOT) + _word(phase, _H_SPAN) + 1
        inside_to = min(width, W - first_w)
        channels = 1 if CHANNELS_LAST else I
        for b in range(images):
            for c in range(channels):
                for t in range(taps):
                    d = depth * _word(phase, _D_STRIDE) + _word(plan, _word(phase, _DEPTH_OFFSETS) + t)
                    for r in range(slot_rows):
                        h = first_h + r * source
                        target = b * _word(phase, _IMAGE) + c * _word(phase, _CHANNEL)
                        target = slot + (target + t * _word(phase, _TAP) + r * _word(phase, _ROW)) * SIZE
                        there = d >= 0 and d < D and h >= 0 and h < H
                        if not CHANNELS_LAST:
                            if there:
                                line = x + (((((image + b) * G + group) * I + c) * D + d) * H + h) * W * HELD
                                v = 0
                                while v < width:
                                    w = first_w + v
                                    if w >= 0 and w + L <= W:
                                        store(target + v * SIZE, load(M, line + w * HELD))
                                    else:
                                        store(target + v * SIZE, load_clipped(M, line, w, W))
                                    v += L
                            else:
                                v = 0
                                while v < width:
                                    store(target + v * SIZE, zero(T))
                                    v += L
                        else:
                            line = x + ((((image + b) * D + d) * H + h) * W * G + group) * I * HELD
                            joined = G == 1 and pixel == I
                            if joined:
                                # Neighbouring pixels lie together here and there: a row is one run.
                                from_ = line + first_w * I * HELD
                                left = max(0, -first_w) * I
                                right = max(left, inside_to * I) if there else left
                                v = 0
                                while v < left:
                                    store(target + v * SIZE, zero(T))
                                    v += L
                                v = left
                                while v + L <= right:
                                    store(target + v * SIZE, load(M, from_ + v * HELD))
                                    v += L
                                if v < right:
                                    store(target + v * SIZE, load_clipped(M, from_, v, right))
                                v = right
                                while v < width * I:
                                    store(target + v * SIZE, zero(T))
                                    v += L
                            for q in range(0 if joined else width):
                                place = target + q * pixel * SIZE
                                w = first_w + q
                                if there and w >= 0 and q < inside_to:
                                    from_ = line + w * G * I * HELD
                                    v = 0
                                    while v + L <= I:
                                        store(place + v * SIZE, load(M, from_ + v * HELD))
                                        v += L
                                    if v < I:
                                        store(place + v * SIZE, load_clipped(M, from_, v, I))
                                else:
                                    v = 0
                                    while v < I:
                                        store(place + v * SIZE, zero(T))
                                        v += L

    return fill_slot


@functools.cache
def _turning_filler(T: type, M: type) -> Any:
    """The same for few channels of an image in nchw, whose slot is in nhwc."""
    SIZE, HELD = np.dtype(T).itemsize, np.dtype(M).itemsize

    @inline
    def fill_slot(plan, phase, x, slot, image, images, group, depth, row, rows, column):
        D, H, W, I = _word(plan, _D), _word(plan, _H), _word(plan, _W), _word(plan, _I)
        width, source = _word(plan, _WIDTH), _word(phase, _H_SOURCE)
        first_h = row * source * _word(phase, _H_SLOT) + _word(phase, _H_FIRST)
        first_w = column * _word(plan, _STRIDE) + _word(plan, _FIRST)
        slot_rows = (rows - 1) * _word(phase, _H_SLOT) + _word(phase, _H_SPAN) + 1
        for b in range(images):
            for t in range(_word(phase, _TAPS)):
                d = depth * _word(phase, _D_STRIDE) + _word(plan, _word(phase, _DEPTH_OFFSETS) + t)
                for r in range(slot_rows):
                    h = first_h + r * source
                    target = b * _word(phase, _IMAGE) + t * _word(phase, _TAP) + r * _word(phase, _ROW)
                    there = d >= 0 and d < D and h >= 0 and h < H
                    left, right = max(0, -first_w), max(0, min(width, W - first_w))
                    if not there:
                        left = right = width
                    for c in range(I):
                        to = slot + (target + c) * SIZE
                        line = x + (((((image + b) * I + c) * D + d) * H + h) * W + first_w) * HELD
                        for q in range(left):
                            store_scalar(to + q * I * SIZE, T(0))
                        for q in range(left, right):
                            store_scalar(to + q * I * SIZE, load_scalar(M, line + q * HELD))
                        for q in range(right, width):
                            store_scalar(to + q * I * SIZE, T(0))

    return fill_slot


@functools.cache
def pack_kernel(T: type, M: type, CHANNELS_LAST: bool) -> Kernel:
    """Fill all slots beforehand, for problems with fewer tiles than threads. Arguments: tiles, x, slots, plan."""
    fill_slot = _filler(T, M, CHANNELS_LAST)

    @kernel
    def pack_slots(block):
        tiles, x, slots, plan = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        tile = next_tile(block)
        while tile < tiles:
            image, images, group, phase, depth, row, rows, column, columns = _tile(plan, tile)
            if rows > 0 and columns > 0:
                slot = slots + tile * _word(plan, _SLOT)
                fill_slot(plan, phase, x, slot, image, images, group, depth, row, rows, column)
            tile = next_tile(block)

    return pack_slots


# ---- fprop and dgrad -----------------------------------------------------------------------------------------------


@functools.cache
def _writer(T: type, M: type, ACROSS: int, CHANNELS_LAST: bool, FINISH: bool) -> Any:
    """What brings the sums of neighbouring pixels and of one block of channels to where the result has them."""
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    PITCH = ACROSS * L * SIZE  # of the sums of neighbouring pixels
    finished, finished_square = finish_row(T, M), finish_square(T, M)

    @inline
    def write(sums, y, distance, count, channels, more, limits):
        """`distance` is that of neighbouring pixels (nhwc) or channels (nchw) in the result."""
        for v in range(ACROSS):
            some = min(channels - v * L, L)
            if CHANNELS_LAST:
                for q in range(count if some > 0 else 0):
                    value = load(T, sums + q * PITCH + v * L * SIZE)
                    to = y + q * distance + v * L * HELD
                    if FINISH:
                        value = finished(value, to, 0, some, more, limits)
                    if some == L:
                        store(to, narrow(M, value))
                    else:
                        store_clipped(to, 0, some, narrow(M, value))
            elif some > 0:
                place, q = y + v * L * distance, 0
                while q < count:
                    square = transpose(load_block(T, L, sums + q * PITCH + v * L * SIZE, PITCH))
                    if FINISH:
                        square = finished_square(square, place + q * HELD, distance, more, limits, some, count - q)
                    if some == L and q + L <= count:
                        store_block(narrow(M, square), place + q * HELD, distance)
                    else:
                        store_block_clipped(narrow(M, square), place + q * HELD, distance, some, min(count - q, L))
                    q += L

    return write


@functools.cache
def convolve_kernel(
    T: type, M: type, ROWS: int, ACROSS: int, PITCH: int, CHANNELS_LAST: bool, AHEAD: bool, FINISH: bool
) -> Kernel:  # fmt: skip
    """fprop and dgrad. Arguments: tasks, x, filters, y, bias, slots or 0, memory of the threads, plan, pitch,
    numbering of the threads, bytes from a term to the next where filters are read in place, else 0, and the two words
    of `finish.py`.

    A task is a tile and a range of the result's channels. Rows of a tile are cut into blocks of ROWS pixels, and of one
    pixel less where that makes them come out even.

    AHEAD, for images in nhwc that are read in place and filters of one tap: pixels are asked for two blocks before they
    are read. A block reads several of them side by side, which the CPU does not foresee (8 images of 112x112, dgrad of
    16 to 96 channels: 2524 us without it, 1730 with).
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    VECTOR = ACROSS * L * SIZE
    LESS = max(ROWS - 1, 1)
    big, small, one = (_block_of_sums(T, M, rows, ACROSS, PITCH, AHEAD, FINISH) for rows in (ROWS, LESS, 1))
    fill_slot, write = _filler(T, M, CHANNELS_LAST), _writer(T, M, ACROSS, CHANNELS_LAST, FINISH)

    @kernel
    def convolve(block):
        tasks, x, filters, y, bias = (
            argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3), argument(block, 4),
        )  # fmt: skip
        slots, memory, plan, pitch = argument(block, 5), argument(block, 6), argument(block, 7), argument(block, 8)
        mine, in_place = memory + thread_number(block, argument(block, 9)) * _word(plan, _THREAD), argument(block, 10)
        more, limits = argument(block, 11), argument(block, 12)
        sums, slot = mine, mine + _word(plan, _SUMS)
        ranges, range_blocks, blocks = _word(plan, _RANGES), _word(plan, _RANGE_BLOCKS), _word(plan, _BLOCKS)
        mode, chunk, line = _word(plan, _MODE), _word(plan, _CHUNK), _word(plan, _ROW_PIXELS)
        step, G, tile_rows = _word(plan, _STEP), _word(plan, _G), _word(plan, _ROWS)
        stride, pixel = _word(plan, _STRIDE), _word(plan, _PIXEL)
        single = _word(plan, _COLUMN_PHASES) == 1 and step == 1
        filled = -1
        task = next_tile(block)
        while task < tasks:
            tile = task // ranges
            first_block = task % ranges * range_blocks
            end_block = min(first_block + range_blocks, blocks)
            image, images, group, phase, depth, row, rows, column, columns = _tile(plan, tile)
            if rows > 0 and columns > 0:
                if mode == 0 and filled != tile:
                    fill_slot(plan, phase, x, slot, image, images, group, depth, row, rows, column)
                    filled = tile
                elif mode == 1:
                    slot = slots + tile * _word(plan, _SLOT)
                elif mode == 2:
                    place = image * _word(phase, _IMAGE) + group * _word(plan, _I) * _word(phase, _CHANNEL)
                    place += depth * _word(phase, _D_STRIDE) * _word(phase, _TAP)
                    place += row * _word(phase, _H_SLOT) * _word(phase, _ROW)
                    slot = x + (place + column * stride * pixel) * SIZE
                # Where the tile's results begin, and the distances of images, rows, and pixels or channels there.
                OD, OH, OW, O = _word(plan, _OD), _word(plan, _OH), _word(plan, _OW), _word(plan, _O)
                d = _word(phase, _D_START) + depth * _word(phase, _D_STEP)
                h = _word(phase, _H_START) + row * _word(phase, _H_STEP)
                wide = G * O if CHANNELS_LAST else 1
                row_bytes = _word(phase, _H_STEP) * OW * wide * HELD
                image_bytes = G * O * OD * OH * OW * HELD
                distance = G * O * HELD if CHANNELS_LAST else OD * OH * OW * HELD
                corner = y + image * image_bytes + ((d * OH + h) * OW + column * step) * wide * HELD
                count_all = min(columns * step, OW - column * step)
                whole = _word(phase, _H_STEP) == 1 and _word(plan, _COLUMN_TILES) == 1 and single
                for at in range(first_block, end_block):
                    channels = O - at * ACROSS * L
                    here = corner + (group * O + at * ACROSS * L) * (HELD if CHANNELS_LAST else distance)
                    for c in range(_word(plan, _COLUMN_PHASES)):
                        those = plan + 8 * (_word(phase, _COLUMN_PLACE) + COLUMN * c)
                        terms, offsets = _word(those, _C_TERMS), _word(those, _C_OFFSETS)
                        outputs = min(columns, _word(those, _C_COUNT) - column)
                        vectors = filters + _word(those, _C_FILTERS) + (group * blocks + at) * terms * VECTOR
                        term_pitch = VECTOR
                        if in_place:
                            vectors, term_pitch = filters + group * terms * in_place + at * VECTOR, in_place
                        large, less, ones = cut_line(outputs, ROWS, LESS)
                        first = 0
                        while first == 0 or first < terms:
                            some = min(chunk, terms - first)
                            last = first + chunk >= terms and single
                            for b in range(images):
                                result = here + b * image_bytes
                                done, ready = 0, 0  # pixels of a line of the result: written, summed up
                                for r in range(rows):
                                    place = slot + b * _word(phase, _IMAGE) * SIZE
                                    place += r * _word(phase, _H_SLOT) * _word(phase, _ROW) * SIZE
                                    target = sums + ((b * tile_rows + r) * line + _word(those, _C_START)) * VECTOR
                                    if not whole:
                                        done, ready, result = 0, 0, here + b * image_bytes + r * row_bytes
                                    begin = target - ready * VECTOR  # the sums of the line's first pixel
                                    q = 0
                                    for part in range(large + less + ones):
                                        a = place + q * stride * pixel * SIZE
                                        ahead = a + 2 * ROWS * pixel * SIZE + first * ROWS * SIZE
                                        to, to_pitch = target + q * step * VECTOR, step * VECTOR
                                        start, start_pitch, now = to, to_pitch, 0
                                        if first == 0:
                                            start, start_pitch = bias + (group * blocks + at) * VECTOR, 0
                                        if CHANNELS_LAST and last and channels >= ACROSS * L:
                                            to, to_pitch, now = result + ready * distance, distance, limits
                                        table, those_ = offsets + 8 * first, vectors + first * term_pitch
                                        if part < large:
                                            big(start, start_pitch, to, to_pitch, a, pitch, table, some, those_,
                                                term_pitch, ahead, ROWS * SIZE, more, now)  # fmt: skip
                                            q, ready = q + ROWS, ready + ROWS
                                        elif part < large + less:
                                            small(start, start_pitch, to, to_pitch, a, pitch, table, some, those_,
                                                  term_pitch, ahead, ROWS * SIZE, more, now)  # fmt: skip
                                            q, ready = q + LESS, ready + LESS
                                        else:
                                            one(start, start_pitch, to, to_pitch, a, pitch, table, some, those_,
                                                term_pitch, ahead, ROWS * SIZE, more, now)  # fmt: skip
                                            q, ready = q + 1, ready + 1
                                        if last and not CHANNELS_LAST and ready - done >= 2 * L:
                                            # Squares leave as soon as they are there: stores drain beside the sums.
                                            count = (ready - done) // L * L
                                            write(begin + done * VECTOR, result + done * HELD, distance, count,
                                                  channels, more, limits)  # fmt: skip
                                            done += count
                                    if last and (r == rows - 1 or not whole):
                                        if not CHANNELS_LAST:
                                            rest = begin + done * VECTOR
                                            write(rest, result + done * HELD, distance, ready - done, channels,
                                                  more, limits)  # fmt: skip
                                        elif channels < ACROSS * L:
                                            write(begin, result, distance, ready, channels, more, limits)
                            first += chunk
                    if not single:
                        for b in range(images):
                            for r in range(rows):
                                from_ = sums + (b * tile_rows + r) * line * VECTOR
                                write(from_, here + b * image_bytes + r * row_bytes, distance, count_all, channels,
                                      more, limits)  # fmt: skip
            task = next_tile(block)

    return convolve


# ---- filters in the order of the loop ------------------------------------------------------------------------------


@functools.cache
def filter_kernel(T: type, M: type, ACROSS: int) -> Kernel:
    """Filters whose terms lie side by side for each channel of the result: squares are transposed.

    Arguments: tasks, w, filters, blocks of a group, channels of the result in a group, bytes from one of them to the
    next, from a group to the next, lines for each of them, bytes from a line to the next, terms of a line, table, lines
    of a task. The table has for each term of each line its place in the filters and the distance of the blocks there,
    or -1. Neighbouring tasks are neighbouring blocks of the same lines, which lie in one another's cache lines.
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize

    @kernel
    def order_filters(block):
        tasks, w, filters, blocks = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        channels, pitch, group_pitch = argument(block, 4), argument(block, 5), argument(block, 6)
        lines, line_pitch, terms, table = (
            argument(block, 7),
            argument(block, 8),
            argument(block, 9),
            argument(block, 10),
        )
        some_lines = argument(block, 11)
        parts = (lines + some_lines - 1) // some_lines
        task = next_tile(block)
        while task < tasks:
            at, group = task % blocks, task // blocks // parts
            first_line = task // blocks % parts * some_lines
            place_of_block = group * blocks + at
            for v in range(ACROSS):
                k = (at * ACROSS + v) * L
                rows = min(channels - k, L)
                base = filters + v * L * SIZE
                source = w + group * group_pitch + k * pitch
                for line in range(first_line, min(first_line + some_lines, lines)):
                    term = 0
                    while term < terms:
                        place, some = source + line * line_pitch + term * HELD, min(terms - term, L)
                        here = table + 16 * (line * terms + term)
                        if rows == L and some == L:
                            store_table(transpose(load_block(M, L, place, pitch)), base, here, place_of_block, some)
                        elif rows > 0:
                            square = load_block_clipped(M, L, place, pitch, rows, some)
                            store_table(transpose(square), base, here, place_of_block, some)
                        else:
                            store_table(fill(L, zero(T)), base, here, place_of_block, some)
                        term += L
            task = next_tile(block)

    return order_filters


@functools.cache
def filter_rows_kernel(T: type, M: type, ACROSS: int) -> Kernel:
    """Filters whose channels of the result lie side by side: vectors are copied.

    Arguments: tasks, w, filters, blocks of a group, channels of the result in a group, terms, bytes from a group to the
    next, table, terms of a task. The table has for each term its place in w, its place in the filters and the distance
    of the blocks there.
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize

    @kernel
    def order_filter_rows(block):
        tasks, w, filters, blocks = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        channels, terms, group_pitch, table = (
            argument(block, 4), argument(block, 5), argument(block, 6), argument(block, 7),
        )  # fmt: skip
        some = argument(block, 8)
        parts = (terms + some - 1) // some
        task = next_tile(block)
        while task < tasks:
            at, group = task % blocks, task // blocks // parts
            first = task // blocks % parts * some
            source = w + group * group_pitch
            for term in range(first, min(first + some, terms)):
                here = table + 24 * term
                target = filters + _word(here, 1) + (group * blocks + at) * _word(here, 2)
                for v in range(ACROSS):
                    k = (at * ACROSS + v) * L
                    row = source + _word(here, 0)
                    if k + L <= channels:
                        store(target + v * L * SIZE, load(M, row + k * HELD))
                    else:
                        store(target + v * L * SIZE, load_clipped(M, row, k, channels))
            task = next_tile(block)

    return order_filter_rows


# ---- wgrad ---------------------------------------------------------------------------------------------------------


@functools.cache
def gradient_kernel(
    T: type, M: type, ROWS: int, ACROSS: int, PITCH: int, CHANNELS_LAST: bool, AHEAD: bool, TURNS: bool
) -> Kernel:  # fmt: skip
    """wgrad into ordered sums. Arguments: tasks, x, dy, sums, memory of the threads, plan, pitch, offsets of the
    pixels, lines, rows of a line, offsets of the lines, ranges of lines, lines of a range, a row of zeros,
    numbering of the threads, bytes from a pixel of dy to the next where it is read in place, else 0.

    A line is a run of rows whose scalars lie a pitch apart: the channels of x under one tap, or taps. A task owns the
    lines of a range and the blocks of a range of dy's channels in one group, and goes over all tiles in order, so that
    every sum has one order.

    AHEAD, for tensors in nhwc that are both read in place: the lines of the next tile are asked for while this one is
    summed up. A block takes one line of each pixel, which the CPU does not foresee (8 images of 112x112, 16 by 96
    channels: 2536 us without it, 1582 with; AMD EPYC, two cores held to AVX2).
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    VECTOR = ACROSS * L * SIZE
    LESS = max(ROWS - 1, 1)
    big, small, one = (_block_of_sums(T, T, rows, ACROSS, PITCH, AHEAD, False) for rows in (ROWS, LESS, 1))
    fill_slot = _turning_filler(T, M) if TURNS else _filler(T, M, CHANNELS_LAST)

    @inline
    def gather(plan, dy, target, image, images, group, k, depth, row, rows, column, columns):
        """A tile of dy, pixel by pixel."""
        G, O = _word(plan, _G), _word(plan, _O)
        OD, OH, OW = _word(plan, _OD), _word(plan, _OH), _word(plan, _OW)
        run = rows * columns  # one run: either whole rows, or a part of one
        for b in range(images):
            to = target + b * run * VECTOR
            if CHANNELS_LAST:
                place = (((image + b) * OD + depth) * OH + row) * OW + column
                place = dy + (place * G + group) * O * HELD
                for q in range(run):
                    source = place + q * G * O * HELD
                    for v in range(ACROSS):
                        first = k + v * L
                        if first + L <= O:
                            store(to + q * VECTOR + v * L * SIZE, load(M, source + first * HELD))
                        else:
                            store(to + q * VECTOR + v * L * SIZE, load_clipped(M, source, first, max(O, 0)))
            else:
                plane = OD * OH * OW * HELD
                place = ((((image + b) * G + group) * O + k) * OD + depth) * OH + row
                place = dy + (place * OW + column) * HELD
                for v in range(ACROSS):
                    channels = min(O - k - v * L, L)
                    q = 0
                    while q < run:
                        source, here = place + v * L * plane + q * HELD, to + q * VECTOR + v * L * SIZE
                        if channels == L and q + L <= run:
                            store_block(transpose(load_block(M, L, source, plane)), here, VECTOR)
                        elif channels > 0:
                            square = load_block_clipped(M, L, source, plane, channels, min(run - q, L))
                            store_block(transpose(square), here, VECTOR)
                        else:
                            store_block(fill(L, zero(T)), here, VECTOR)
                        q += L

    @kernel
    def gradient(block):
        tasks, x, dy, sums = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        memory, plan, pitch, offsets = argument(block, 4), argument(block, 5), argument(block, 6), argument(block, 7)
        lines, line_rows, places = argument(block, 8), argument(block, 9), argument(block, 10)
        line_ranges, range_lines, nothing = argument(block, 11), argument(block, 12), argument(block, 13)
        mine, in_place = memory + thread_number(block, argument(block, 14)) * _word(plan, _THREAD), argument(block, 15)
        vectors, own = mine, mine + _word(plan, _SUMS)
        ranges, range_blocks, blocks = _word(plan, _RANGES), _word(plan, _RANGE_BLOCKS), _word(plan, _BLOCKS)
        mode, G = _word(plan, _MODE), _word(plan, _G)
        image_tiles, inner = _word(plan, _IMAGE_TILES), _word(plan, _DEPTHS)
        inner *= _word(plan, _ROW_TILES) * _word(plan, _COLUMN_TILES)
        task = next_tile(block)
        while task < tasks:
            some = task % line_ranges
            rest = task // line_ranges
            group = rest // ranges
            first_block = rest % ranges * range_blocks
            end_block = min(first_block + range_blocks, blocks)
            first_line = some * range_lines
            end_line = min(first_line + range_lines, lines)
            for outer in range(image_tiles):
                for within in range(inner):
                    tile = (outer * G + group) * inner + within
                    image, images, _, phase, depth, row, rows, column, columns = _tile(plan, tile)
                    slot = own
                    if mode == 0:
                        fill_slot(plan, phase, x, slot, image, images, group, depth, row, rows, column)
                    elif mode == 1:
                        slot = memory + tile * _word(plan, _SLOT)
                    else:
                        place = image * _word(phase, _IMAGE) + group * _word(plan, _I) * _word(phase, _CHANNEL)
                        place += depth * _word(phase, _D_STRIDE) * _word(phase, _TAP)
                        place += row * _word(phase, _H_SLOT) * _word(phase, _ROW)
                        slot = x + (place + column * _word(plan, _STRIDE) * _word(plan, _PIXEL)) * SIZE
                    pixels = images * rows * columns
                    large, less, ones = cut_line(line_rows, ROWS, LESS)
                    for at in range(first_block, end_block):
                        k = at * ACROSS * L
                        those, step = vectors, VECTOR
                        if CHANNELS_LAST and in_place and k + ACROSS * L <= _word(plan, _O):
                            # The pixels of a tile are one run: whole images, whole rows of one, or a part of a row.
                            OD, OH, OW = _word(plan, _OD), _word(plan, _OH), _word(plan, _OW)
                            those = ((image * OD + depth) * OH + row) * OW + column
                            those = dy + ((those * G + group) * _word(plan, _O) + k) * SIZE
                            step = in_place
                        else:
                            gather(plan, dy, vectors, image, images, group, k, depth, row, rows, column, columns)
                        for line in range(first_line, end_line):
                            a = slot + _word(places, line)
                            to = sums + (((group * blocks + at) * lines + line) * line_rows) * VECTOR
                            for part in range(large + less + ones):
                                ahead, ahead_pitch = a, 0
                                if AHEAD:
                                    if part == 0:
                                        ahead, ahead_pitch = those + pixels * step, step
                                    elif at == first_block:
                                        ahead_pitch = G * _word(plan, _I) * SIZE
                                        ahead = a + pixels * ahead_pitch
                                start, start_pitch = to, VECTOR
                                if outer == 0 and within == 0:
                                    start, start_pitch = nothing, 0
                                if part < large:
                                    big(start, start_pitch, to, VECTOR, a, pitch, offsets, pixels, those, step,
                                        ahead, ahead_pitch, 0, 0)  # fmt: skip
                                    to += ROWS * VECTOR
                                    a += ROWS * pitch
                                elif part < large + less:
                                    small(start, start_pitch, to, VECTOR, a, pitch, offsets, pixels, those, step,
                                          ahead, ahead_pitch, 0, 0)  # fmt: skip
                                    to += LESS * VECTOR
                                    a += LESS * pitch
                                else:
                                    one(start, start_pitch, to, VECTOR, a, pitch, offsets, pixels, those, step,
                                        ahead, ahead_pitch, 0, 0)  # fmt: skip
                                    to += VECTOR
                                    a += pitch
            task = next_tile(block)

    return gradient


@functools.cache
def gradient_store_kernel(T: type, M: type, ACROSS: int) -> Kernel:
    """Ordered sums to dw, squares transposed. Arguments: tasks, sums, dw, blocks of a group, channels of dy in a group,
    numbers of a filter, table of each one's place among a block's sums."""
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    VECTOR = ACROSS * L * SIZE

    @kernel
    def store_gradient(block):
        tasks, sums, dw, blocks = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        channels, numbers, table = argument(block, 4), argument(block, 5), argument(block, 6)
        task = next_tile(block)
        while task < tasks:
            group, at = task // blocks, task % blocks
            for v in range(ACROSS):
                k = (at * ACROSS + v) * L
                some = min(channels - k, L)
                source = sums + task * numbers * VECTOR + v * L * SIZE
                target = dw + (group * channels + k) * numbers * HELD
                if some > 0:
                    j = 0
                    while j < numbers:
                        square = transpose(load_table(T, L, source, table + 8 * j))
                        if some == L and j + L <= numbers:
                            store_block(narrow(M, square), target + j * HELD, numbers * HELD)
                        else:
                            store_block_clipped(
                                narrow(M, square), target + j * HELD, numbers * HELD, some, min(numbers - j, L)
                            )
                        j += L
            task = next_tile(block)

    return store_gradient
