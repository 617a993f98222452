"""The kernel of cpu.pixels: panels of pixels, and blocks of sums of them with filters that are read as they lie."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .direct_kernels import cut_line
from .runtime import Kernel, kernel
from .simd import (
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
    next_tile,
    prefetch,
    store,
    store_rows,
    store_scalar,
    thread_number,
    word,
    zero,
)

__all__ = ["CHUNK", "TOGETHER", "pixels_kernel"]

CHUNK = 256
"""Terms that are summed up in registers before they meet what was summed up so far: 16 KB of a panel."""
TOGETHER = 8
"""Blocks whose scalars are copied at a time in a backward pass."""


@functools.cache
def _block_of_sums(T: type, ROWS: int, ACROSS: int, PITCH: int) -> Any:
    """sums = start + (sum over terms of scalars * vectors). PITCH is the distance of the scalars where it is known."""
    COUNT, VECTOR = ROWS * ACROSS, ACROSS * lanes(T) * np.dtype(T).itemsize

    @inline
    def block_of_sums(start, start_pitch, sums, sums_pitch, a, pitch, step, terms, b):
        acc = fill(COUNT, zero(T))
        for term in range(terms):
            acc = product(acc, a + term * step, pitch, b + term * VECTOR)
        store_rows(add_blocks(acc, load_rows(T, ROWS, ACROSS, start, start_pitch)), ROWS, sums, sums_pitch)

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
def pixels_kernel(T: type, ROWS: int, ACROSS: int, FORWARD: bool, COPY: str) -> Kernel:
    """y[channel, pixel] = start[channel] + sum over terms of w * x[term, pixel].

    Arguments: tasks, x, w, y, start, bytes from the start of a channel to the next (0: all have one), memory; groups,
    terms, channels of the result, pixels of an image, pixels of a plane of x, pixels of all images, vectors of a tile,
    ranges, channels of a range, bytes from the scalar of a channel to the next and from a term to the next, table,
    bytes of a thread; numbering of the threads.

    COPY says how pixels get into their panels: "run", neighbours are neighbours in x; "table", the table has the place
    of each in its plane; "windows", terms are channels and taps, and the table has the width of the outputs, height and
    width of x, height and width of the filter, the stride of rows, dilation and padding of both.

    Pixels are counted through all images, so that only the last vector of all may be in part empty. A task is a tile of
    vectors in one group, and a range of channels. Terms go by in chunks, for which the tile's pixels are copied into
    panels of `terms x ACROSS` vectors. In a backward pass, whose scalars of a term lie side by side and those of the
    next a row of w away, these are copied too, for `TOGETHER` blocks at a time.

    Where a panel is not one run of an image, its sums go through a block of the thread's own.
    """
    L, SIZE = lanes(T), np.dtype(T).itemsize
    VECTOR = ACROSS * L * SIZE
    PANEL = CHUNK * VECTOR
    LESS = max(ROWS - 1, 1)
    BESIDE = -(-ROWS // L)  # vectors that hold the scalars of a term
    SCALARS = (CHUNK * ROWS + BESIDE * L) * SIZE  # of a block
    LINES = TOGETHER * ROWS * SIZE // 64 + 1
    PITCH = 0 if FORWARD else SIZE
    RUN, TABLE, WINDOWS = COPY == "run", COPY == "table", COPY == "windows"
    big, small, one = (_block_of_sums(T, rows, ACROSS, PITCH) for rows in (ROWS, LESS, 1))

    @inline
    def copy_pixels(x, image_bytes, plane, target, terms, pixel, P, all_pixels, table):
        """A vector of pixels for so many terms; zeros behind the last pixel."""
        image, p = pixel // P, pixel % P
        if RUN and p + L <= P and pixel < all_pixels:
            source = x + image * image_bytes + p * SIZE
            for t in range(terms):
                store(target + t * VECTOR, load(T, source + t * plane))
        else:
            for i in range(L):
                if pixel + i < all_pixels:
                    image, p = (pixel + i) // P, (pixel + i) % P
                    if TABLE:
                        p = load_scalar(np.int64, table + 8 * p)
                    source = x + image * image_bytes + p * SIZE
                    for t in range(terms):
                        store_scalar(target + t * VECTOR + i * SIZE, load_scalar(T, source + t * plane))
                else:
                    for t in range(terms):
                        store_scalar(target + t * VECTOR + i * SIZE, T(0))

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
        row = x + image * image_bytes + c * plane + (h * W + ow - pw) * SIZE
        for t in range(terms):
            to = target + t * VECTOR
            if beside and (h < 0 or h >= H):
                store(to, zero(T))
            elif beside and inside:
                store(to, load(T, row + s * dw * SIZE))
            elif beside:
                store(to, load_clipped(T, row - (ow - pw) * SIZE, ow - pw + s * dw, W))
            else:
                for i in range(L):
                    value = T(0)
                    if pixel + i < all_pixels:
                        at, q = (pixel + i) // P, (pixel + i) % P
                        y, z = q // OW * step + r * dh - ph, q % OW + s * dw - pw
                        if y >= 0 and y < H and z >= 0 and z < W:
                            value = load_scalar(T, x + at * image_bytes + c * plane + (y * W + z) * SIZE)
                    store_scalar(to + i * SIZE, value)
            s += 1
            if s == S:
                r, s = r + 1, 0
                if r == R:
                    c, r = c + 1, 0
                h = oh * step + r * dh - ph
                row = x + image * image_bytes + c * plane + (h * W + ow - pw) * SIZE

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
            prefetch(LINES, source + (t + 8) * step + row * SIZE)  # rows of w may lie a page apart
            for part in range(first, end):
                for v in range(BESIDE):
                    to = target + (part - first) * SCALARS + (t * ROWS + v * L) * SIZE
                    if row + BESIDE * L <= there:
                        store(to, load(T, source + t * step + (row + v * L) * SIZE))
                    else:
                        store(to, load_clipped(T, source + t * step, row + v * L, there))
                row += ROWS if part < large else (LESS if part < large + less else 1)

    @inline
    def exchange(sums, y, image_bytes, pitch, rows, pixel, P, all_pixels, out):
        """A vector of pixels for so many rows: from the sums, or to them."""
        image, p = pixel // P, pixel % P
        if p + L <= P and pixel < all_pixels:
            place = y + image * image_bytes + p * SIZE
            for r in range(rows):
                if out:
                    store(place + r * pitch, load(T, sums + r * VECTOR))
                else:
                    store(sums + r * VECTOR, load(T, place + r * pitch))
        else:
            for i in range(min(L, all_pixels - pixel)):
                image, p = (pixel + i) // P, (pixel + i) % P
                place = y + image * image_bytes + p * SIZE
                for r in range(rows):
                    if out:
                        store_scalar(place + r * pitch, load_scalar(T, sums + r * VECTOR + i * SIZE))
                    else:
                        store_scalar(sums + r * VECTOR + i * SIZE, load_scalar(T, place + r * pitch))

    @kernel
    def convolve_pixels(block):
        tasks, x, w, y = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        bias, bias_pitch, memory = argument(block, 4), argument(block, 5), argument(block, 6)
        G, I, O, P = argument(block, 7), argument(block, 8), argument(block, 9), argument(block, 10)
        plane, all_pixels, tile_vectors = argument(block, 11) * SIZE, argument(block, 12), argument(block, 13)
        ranges, range_rows = argument(block, 14), argument(block, 15)
        pitch, step, table = argument(block, 16), argument(block, 17), argument(block, 18)
        panels = memory + thread_number(block, argument(block, 20)) * argument(block, 19)
        spare = panels + tile_vectors // ACROSS * PANEL
        starts = spare + ROWS * VECTOR
        scalars = starts + ROWS * VECTOR
        taps = word(table, 3) * word(table, 4) if WINDOWS else 1
        C = I // taps
        x_image, y_image, y_pitch = G * C * plane, G * O * P * SIZE, P * SIZE
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
                for i in range((count + ACROSS - 1) // ACROSS * ACROSS):
                    target, pixel = panels + i // ACROSS * PANEL + i % ACROSS * L * SIZE, first_pixel + i * L
                    from_ = x + group * C * plane
                    if WINDOWS:
                        copy_windows(from_, x_image, plane, target, first, terms, pixel, P, all_pixels, table)
                    else:
                        copy_pixels(from_ + first * plane, x_image, plane, target, terms, pixel, P, all_pixels, table)
                rows_of_w = w + group * O * I * SIZE + first_row * pitch + first * step
                for part in range(parts):
                    row = row_of(part, large, less)
                    a, a_step = rows_of_w + row * pitch, step
                    if not FORWARD:
                        if part % TOGETHER == 0:
                            end = min(part + TOGETHER, parts)
                            copy_scalars(
                                rows_of_w, step, scalars, terms, part, end, large, less, O - first_row
                            )  # fmt: skip
                        a, a_step = scalars + part % TOGETHER * SCALARS, ROWS * SIZE
                    rows = ROWS if part < large else (LESS if part < large + less else 1)
                    begin = y + (group * O + first_row + row) * y_pitch
                    if first == 0:
                        for r in range(rows):
                            value = broadcast(load_scalar(T, bias + (group * O + first_row + row + r) * bias_pitch))
                            for v in range(ACROSS):
                                store(starts + r * VECTOR + v * L * SIZE, value)
                    image, p = first_pixel // P, first_pixel % P
                    for i in range(0, count, ACROSS):
                        b, pixel = panels + i // ACROSS * PANEL, first_pixel + i * L
                        sums, sums_pitch = begin + image * y_image + p * SIZE, y_pitch
                        whole = p + ACROSS * L <= P
                        if not whole:
                            sums, sums_pitch = spare, VECTOR
                            if first > 0:
                                for v in range(ACROSS):
                                    here, at = spare + v * L * SIZE, pixel + v * L
                                    exchange(here, begin, y_image, y_pitch, rows, at, P, all_pixels, False)
                        start, start_pitch = sums, sums_pitch
                        if first == 0:
                            start, start_pitch = starts, VECTOR
                        if part < large:
                            big(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b)
                        elif part < large + less:
                            small(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b)
                        else:
                            one(start, start_pitch, sums, sums_pitch, a, pitch, a_step, terms, b)
                        if not whole:
                            for v in range(ACROSS):
                                here, at = spare + v * L * SIZE, pixel + v * L
                                exchange(here, begin, y_image, y_pitch, rows, at, P, all_pixels, True)
                        p += ACROSS * L
                        while p >= P:
                            image, p = image + 1, p - P
                first += terms
            task = next_tile(block)

    return convolve_pixels
