"""The kernel of cpu.pixels: panels of pixels, and blocks of sums of them with filters that are read as they lie."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .direct_kernels import cut_line
from .finish import finish_rows, finish_vector
from .runtime import Kernel, kernel
from .simd import (
    LANE_BYTES,
    add_blocks,
    argument,
    broadcast,
    fill,
    fma_rows,
    inline,
    lanes,
    load,
    load_clipped,
    load_rows,
    load_scalar,
    narrow,
    next_tile,
    prefetch,
    store,
    store_rows,
    store_scalar,
    thread_number,
    word,
    zero,
)

__all__ = ["APART", "CHUNK", "TOGETHER", "pixels_kernel"]

CHUNK = 256 if LANE_BYTES < 64 else 128
"""Terms that are summed up in registers before they meet what was summed up so far: 16 KB of a panel, half of a
first-level cache."""
TOGETHER = 8
"""Blocks that a panel is multiplied by, one behind the other, before the next panel: their scalars come from the
second-level cache meanwhile, a third as many bytes as a panel."""
APART = 64
"""Bytes between panels. At a multiple of 4096 lines of one term would share a set of the cache."""


@functools.cache
def _block_of_sums(T: type, M: type, ROWS: int, ACROSS: int, PITCH: int, FINISH: bool) -> Any:
    """sums = start + (sum over terms of scalars * vectors). PITCH is the distance of the scalars where it is known.
    Unless `limits` is 0, sums are whole and lie in the result: they are finished, if FINISH, and rounded to M."""
    COUNT, VECTOR, LOW = ROWS * ACROSS, ACROSS * lanes(T) * np.dtype(T).itemsize, M is not T
    finish = finish_rows(T, M, ROWS, ACROSS)

    @inline
    def block_of_sums(start, start_pitch, sums, sums_pitch, a, pitch, step, terms, b, more, limits):
        acc = fill(COUNT, zero(T))
        for term in range(terms):
            acc = product(acc, a + term * step, pitch, b + term * VECTOR)
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
        def product(acc, a, pitch, b):
            return fma_rows(acc, ROWS, a, PITCH, b)
    else:

        @inline
        def product(acc, a, pitch, b):
            return fma_rows(acc, ROWS, a, pitch, b)

    return block_of_sums


@functools.cache
def pixels_kernel(
    T: type, M: type, ROWS: int, ACROSS: int, FORWARD: bool, COPY: str, FINISH: bool
) -> Kernel:  # fmt: skip
    """y[channel, pixel] = start[channel] + sum over terms of w * x[term, pixel].

    Arguments: tasks, x, w, y, start, bytes from the start of a channel to the next (0: all have one), memory; groups,
    terms, channels of the result, pixels of an image, pixels of a plane of x, pixels of all images, vectors of a tile,
    ranges, channels of a range, bytes from the scalar of a channel to the next and from a term to the next, table,
    bytes of a thread; numbering of the threads, and the two words of `finish.py`.

    COPY says how pixels get into their panels: "run", neighbours are neighbours in x; "table", the table has the place
    of each in its plane; "windows", terms are channels and taps, and the table has the width of the outputs, height and
    width of x, height and width of the filter, the stride of rows, dilation and padding of both.

    Pixels are counted through all images, so that only the last vector of all may be in part empty. A task is a tile of
    vectors in one group, and a range of channels. Terms go by in chunks, for which the tile's pixels are copied into
    panels of `terms x ACROSS` vectors: row by row where the tile is a run of one image, since channels may lie pages
    apart. In a backward pass, whose scalars of a term lie side by side and those of the next a row of w away, these are
    copied too, for `TOGETHER` blocks at a time.

    Where a panel is not one run of an image, its sums go through a block of the thread's own.

    T is what is computed with, M what the tensors hold, but for the w of a forward pass, which is of T. f16 and bf16
    are widened on their way into the panels and rounded where sums are whole, in a single chunk.
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    VECTOR = ACROSS * L * SIZE
    PANEL = CHUNK * VECTOR + APART
    LESS = max(ROWS - 1, 1)
    BESIDE = -(-ROWS // L)  # vectors that hold the scalars of a term
    SCALARS = (CHUNK * ROWS + BESIDE * L) * SIZE  # of a block
    LINES = TOGETHER * ROWS * SIZE // 64 + 1
    PITCH = 0 if FORWARD else SIZE
    W_SIZE = SIZE if FORWARD else HELD
    RUN, TABLE, WINDOWS = COPY == "run", COPY == "table", COPY == "windows"
    big, small, one = (_block_of_sums(T, M, rows, ACROSS, PITCH, FINISH) for rows in (ROWS, LESS, 1))
    finished = finish_vector(T, M)

    @inline
    def copy_pixels(x, image_bytes, plane, target, terms, pixel, P, all_pixels, table):
        """A vector of pixels for so many terms; zeros behind the last pixel."""
        image, p = pixel // P, pixel % P
        if RUN and p + L <= P and pixel < all_pixels:
            source = x + image * image_bytes + p * HELD
            for t in range(terms):
                store(target + t * VECTOR, load(M, source + t * plane))
        else:
            for i in range(L):
                if pixel + i < all_pixels:
                    image, p = (pixel + i) // P, (pixel + i) % P
                    if TABLE:
                        p = load_scalar(np.int64, table + 8 * p)
                    source = x + image * image_bytes + p * HELD
                    for t in range(terms):
                        store_scalar(target + t * VECTOR + i * SIZE, load_scalar(M, source + t * plane))
                else:
                    for t in range(terms):
                        store_scalar(target + t * VECTOR + i * SIZE, T(0))

    @inline
    def copy_run(source, plane, target, terms, count):
        """A run of so many vectors of pixels, row by row."""
        for t in range(terms):
            from_, to = source + t * plane, target + t * VECTOR
            for _ in range(count // ACROSS):
                for v in range(ACROSS):
                    store(to + v * L * SIZE, load(M, from_ + v * L * HELD))
                from_ += ACROSS * L * HELD
                to += PANEL

    @inline
    def copy_windows(x, image_bytes, plane, target, first, terms, pixel, P, all_pixels, table):
        """What the taps of a vector of neighbouring outputs meet, for so many terms from the first on."""
        OW, H, W = word(table, 0), word(table, 1), word(table, 2)
        R, S, step = word(table, 3), word(table, 4), word(table, 5)
        dh, dw, ph, pw = word(table, 6), word(table, 7), word(table, 8), word(table, 9)
        c, r, s = first // (R * S), first // S % R, first % S
        image, p = pixel // P, pixel % P
        oh, ow = p // OW, p % OW
        beside = ow + L <= OW and pixel < all_pixels  # in one row
        inside = ow >= pw and ow - pw + (S - 1) * dw + L <= W
        h = oh * step + r * dh - ph
        row = x + image * image_bytes + c * plane + (h * W + ow - pw) * HELD
        for t in range(terms):
            to = target + t * VECTOR
            if beside and (h < 0 or h >= H):
                store(to, zero(T))
            elif beside and inside:
                store(to, load(M, row + s * dw * HELD))
            elif beside:
                store(to, load_clipped(M, row - (ow - pw) * HELD, ow - pw + s * dw, W))
            else:
                for i in range(L):
                    value = T(0)
                    if pixel + i < all_pixels:
                        at, q = (pixel + i) // P, (pixel + i) % P
                        y, z = q // OW * step + r * dh - ph, q % OW + s * dw - pw
                        if y >= 0 and y < H and z >= 0 and z < W:
                            value = load_scalar(M, x + at * image_bytes + c * plane + (y * W + z) * HELD)
                    store_scalar(to + i * SIZE, value)
            s += 1
            if s == S:
                r, s = r + 1, 0
                if r == R:
                    c, r = c + 1, 0
                h = oh * step + r * dh - ph
                row = x + image * image_bytes + c * plane + (h * W + ow - pw) * HELD

    @inline
    def row_of(part, large, less):
        """Channels of a range before a part of it."""
        return part * ROWS - max(0, part - large) - max(0, part - large - less) * (LESS - 1)

    @inline
    def copy_scalars(source, step, target, terms, first, end, large, less, there):
        """Neighbouring scalars of so many terms, ROWS of each for each part. A row of w may lie far from the next: all
        that is wanted of it is read at once. What a store writes too much the next one replaces."""
        for t in range(terms):
            row = row_of(first, large, less)
            prefetch(LINES, source + (t + 8) * step + row * HELD)  # rows of w may lie a page apart
            for part in range(first, end):
                for v in range(BESIDE):
                    to = target + (part - first) * SCALARS + (t * ROWS + v * L) * SIZE
                    if row + BESIDE * L <= there:
                        store(to, load(M, source + t * step + (row + v * L) * HELD))
                    else:
                        store(to, load_clipped(M, source + t * step, row + v * L, there))
                row += ROWS if part < large else (LESS if part < large + less else 1)

    @inline
    def exchange(sums, y, image_bytes, pitch, rows, pixel, P, all_pixels, out, more, limits):
        """A vector of pixels for so many rows: from the sums, or to them."""
        image, p = pixel // P, pixel % P
        if p + L <= P and pixel < all_pixels:
            place = y + image * image_bytes + p * HELD
            for r in range(rows):
                if out:
                    value = load(T, sums + r * VECTOR)
                    if FINISH:
                        if limits != 0:
                            value = finished(value, place + r * pitch, more, limits)
                    store(place + r * pitch, narrow(M, value))
                else:
                    store(sums + r * VECTOR, load(M, place + r * pitch))
        else:
            for i in range(min(L, all_pixels - pixel)):
                image, p = (pixel + i) // P, (pixel + i) % P
                place = y + image * image_bytes + p * HELD
                for r in range(rows):
                    if out:
                        one_value = load_scalar(T, sums + r * VECTOR + i * SIZE)
                        if FINISH:
                            if limits != 0:
                                if more != 0:
                                    one_value += load_scalar(M, place + r * pitch + more)
                                low, high = load_scalar(T, limits), load_scalar(T, limits + SIZE)
                                one_value = low if low > one_value else one_value
                                one_value = high if high < one_value else one_value
                        store_scalar(place + r * pitch, narrow(M, one_value))
                    else:
                        store_scalar(sums + r * VECTOR + i * SIZE, load_scalar(M, place + r * pitch))

    @kernel
    def convolve_pixels(block):
        tasks, x, w, y = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        bias, bias_pitch, memory = argument(block, 4), argument(block, 5), argument(block, 6)
        G, I, O, P = argument(block, 7), argument(block, 8), argument(block, 9), argument(block, 10)
        plane, all_pixels, tile_vectors = argument(block, 11) * HELD, argument(block, 12), argument(block, 13)
        ranges, range_rows = argument(block, 14), argument(block, 15)
        pitch, step, table = argument(block, 16), argument(block, 17), argument(block, 18)
        panels = memory + thread_number(block, argument(block, 20)) * argument(block, 19)
        more, limits = argument(block, 21), argument(block, 22)
        spare = panels + tile_vectors // ACROSS * PANEL
        starts = spare + ROWS * VECTOR
        scalars = starts + TOGETHER * ROWS * VECTOR
        taps = word(table, 3) * word(table, 4) if WINDOWS else 1
        C = I // taps
        x_image, y_image, y_pitch = G * C * plane, G * O * P * HELD, P * HELD
        task = next_tile(block)
        while task < tasks:
            first_row = task % ranges * range_rows
            group = task // ranges % G
            first_pixel = task // ranges // G * tile_vectors * L
            count = (min(tile_vectors * L, all_pixels - first_pixel) + L - 1) // L
            large, less, ones = cut_line(min(range_rows, O - first_row), ROWS, LESS)
            parts = large + less + ones
            first = 0
            while first < I:
                terms = min(CHUNK, I - first)
                last = limits if first + terms == I else 0
                from_ = x + group * C * plane
                run = 0  # vectors that are copied row by row
                if RUN and first_pixel % P + count * L <= P:
                    run = count // ACROSS * ACROSS
                    place = from_ + first * plane + first_pixel // P * x_image + first_pixel % P * HELD
                    copy_run(place, plane, panels, terms, run)
                for i in range(run, (count + ACROSS - 1) // ACROSS * ACROSS):
                    target, pixel = panels + i // ACROSS * PANEL + i % ACROSS * L * SIZE, first_pixel + i * L
                    if WINDOWS:
                        copy_windows(from_, x_image, plane, target, first, terms, pixel, P, all_pixels, table)
                    else:
                        copy_pixels(from_ + first * plane, x_image, plane, target, terms, pixel, P, all_pixels, table)
                rows_of_w = w + group * O * I * W_SIZE + first_row * pitch + first * step
                some = 0
                while some < parts:
                    end = min(some + TOGETHER, parts)
                    if not FORWARD:
                        copy_scalars(rows_of_w, step, scalars, terms, some, end, large, less, O - first_row)
                    if first == 0:
                        beginning = bias + (group * O + first_row) * bias_pitch
                        for row in range(row_of(some, large, less), row_of(end, large, less)):
                            value = broadcast(load_scalar(M, beginning + row * bias_pitch))
                            for v in range(ACROSS):
                                store(starts + (row - row_of(some, large, less)) * VECTOR + v * L * SIZE, value)
                    image, p = first_pixel // P, first_pixel % P
                    for i in range(0, count, ACROSS):
                        b, pixel = panels + i // ACROSS * PANEL, first_pixel + i * L
                        whole = p + ACROSS * L <= P
                        for part in range(some, end):
                            row = row_of(part, large, less)
                            a, a_step = rows_of_w + row * pitch, step
                            if not FORWARD:
                                a, a_step = scalars + (part - some) * SCALARS, ROWS * SIZE
                            rows = ROWS if part < large else (LESS if part < large + less else 1)
                            begin = y + (group * O + first_row + row) * y_pitch
                            sums, sums_pitch, now = begin + image * y_image + p * HELD, y_pitch, last
                            if not whole:
                                sums, sums_pitch, now = spare, VECTOR, 0
                                if first > 0:
                                    for v in range(ACROSS):
                                        exchange(spare + v * L * SIZE, begin, y_image, y_pitch, rows, pixel + v * L, P,
                                                 all_pixels, False, 0, 0)  # fmt: skip
                            start, start_pitch = sums, sums_pitch
                            if first == 0:
                                start, start_pitch = starts + (row - row_of(some, large, less)) * VECTOR, VECTOR
                            if part < large:
                                big(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b, more, now)
                            elif part < large + less:
                                small(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b, more, now)
                            else:
                                one(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b, more, now)
                            if not whole:
                                for v in range(ACROSS):
                                    exchange(spare + v * L * SIZE, begin, y_image, y_pitch, rows, pixel + v * L, P,
                                             all_pixels, True, more, last)  # fmt: skip
                        p += ACROSS * L
                        while p >= P:
                            image, p = image + 1, p - P
                    some = end
                first += terms
            task = next_tile(block)

    return convolve_pixels
