"""Max pooling on the CPU: y[n,c,p] = the largest x[n,c,h] of the window, of which a NaN is one.

Images in nchw row by row: the rows of a window are joined to one, whose ends are -inf as far as windows reach beyond,
in memory that stays in the first-level cache; then the columns of that row, as vectors of results: neighbours, every
second element (`load_even`), or one by one for other strides. In nhwc a vector has channels, and the places of a window
follow each other.

A thread takes some rows of results at a time. Each result is one comparison after the other in the order of its window,
so that neither threads nor tiles show in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from ..pool import Pool
from ..tensors import DTYPES
from .memory import borrow, give_back
from .runtime import Kernel, kernel, launch, num_threads
from .simd import (
    argument,
    broadcast,
    inline,
    lanes,
    load,
    load_clipped,
    load_even,
    load_scalar,
    maximum,
    next_tile,
    store,
    store_clipped,
    store_scalar,
    thread_index,
)

__all__ = ["pools", "run_max"]

_TYPES: dict[str, type] = {"f32": np.float32, "f64": np.float64}
_TILE = 64 << 10  # bytes of results that a thread takes at a time
_LOWEST = float("-inf")
_ALONE = 32 << 10  # elements of x up to which starting threads costs more than it brings


def pools(pool: Pool) -> bool:
    """Whether :func:`run_max` computes it."""
    return pool.mode == "max" and pool.dtype in _TYPES and 0 not in pool.x_shape


def run_max(pool: Pool, x: Tensor, y: Tensor) -> None:
    """Fill y from x, both in the pool's layout and without gaps."""
    run, scratch = _runner(pool)
    threads = num_threads() if prod(pool.x_shape) > _ALONE else 1
    if not scratch:
        run(x.data_ptr(), y.data_ptr(), 0, threads)
        return
    memory = borrow(scratch * threads)
    run(x.data_ptr(), y.data_ptr(), memory.data_ptr(), threads)
    give_back(memory)


@functools.lru_cache(maxsize=256)
def _runner(pool: Pool) -> tuple[Callable[[int, int, int, int], None], int]:
    """What launches the kernel on addresses, and bytes of scratch memory for each thread."""
    T, three = _TYPES[pool.dtype], (1,) * (3 - pool.rank)
    D, H, W = *three, *pool.spatial
    O, P, Q = *three, *pool.out
    window, stride = (*three, *pool.window), (*three, *pool.stride)
    low = (*(0 for _ in three), *(pad for pad, _ in pool.padding))
    first = pool.layout == "nchw"
    rows = pool.n * O * P * (pool.c if first else 1)
    row_bytes = DTYPES[pool.dtype].itemsize * Q * (1 if first else pool.c)
    each = max(1, min(_TILE // row_bytes, rows // 8))
    sizes = (rows, each, D, H, W, O, P, Q, *window, *stride, *low)
    if not first:
        compiled = _channels_kernel(T)
        return lambda x, y, _, threads: launch(compiled, (x, y, pool.c, *sizes), threads), 0
    # Vectors of results begin up to a vector before the last one and reach as far.
    length = max(W + low[2], (Q + lanes(T)) * stride[2] + window[2]) + 2 * lanes(T)
    scratch = -(-length * np.dtype(T).itemsize // 64) * 64
    columns = _rows_kernel(T, stride[2] if stride[2] <= 2 else 0)
    return lambda x, y, space, threads: launch(columns, (x, y, space, scratch, length, *sizes), threads), scratch


@functools.cache
def _part() -> Any:
    @inline
    def part(at, stride, low, size, taps):
        """The first place of a window that is inside, and the end of those."""
        start = at * stride - low
        return max(start, 0), min(start + taps, size)

    return part


@functools.cache
def _rows_kernel(T: type, step: int) -> Kernel:
    """Channels first; ``step`` is the stride along a row, 0 for any."""
    L, SIZE, LOWEST, part = lanes(T), np.dtype(T).itemsize, _LOWEST, _part()

    @inline
    def fill(row, start, end):
        for i in range(start, end):
            store_scalar(row + i * SIZE, T(LOWEST))

    @inline
    def join(row, x, d0, d1, h0, h1, H, W, index):
        """The largest of the rows of a window, from `index` on."""
        most = load(T, x + ((d0 * H + h0) * W + index) * SIZE)
        for d in range(d0, d1):
            for h in range(h0, h1):
                most = maximum(most, load(T, x + ((d * H + h) * W + index) * SIZE))
        store(row + index * SIZE, most)

    @inline
    def join_short(row, x, d0, d1, h0, h1, H, W):
        most = load_clipped(T, x + (d0 * H + h0) * W * SIZE, 0, W)
        for d in range(d0, d1):
            for h in range(h0, h1):
                most = maximum(most, load_clipped(T, x + (d * H + h) * W * SIZE, 0, W))
        store_clipped(row, 0, W, most)

    @inline
    def across(row, q, S):
        """A vector of results."""
        at = row + q * step * SIZE
        most = load_even(T, at) if step == 2 else load(T, at)
        for s in range(1, S):
            most = maximum(most, load_even(T, at + s * SIZE) if step == 2 else load(T, at + s * SIZE))
        return most

    @kernel
    def pool_rows(block):
        x, y, space, scratch, length = (
            argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3), argument(block, 4),
        )  # fmt: skip
        rows, each = argument(block, 5), argument(block, 6)
        D, H, W = argument(block, 7), argument(block, 8), argument(block, 9)
        O, P, Q = argument(block, 10), argument(block, 11), argument(block, 12)
        taps_d, taps_h, S = argument(block, 13), argument(block, 14), argument(block, 15)
        stride_d, stride_h, stride_w = argument(block, 16), argument(block, 17), argument(block, 18)
        low_d, low_h, low_w = argument(block, 19), argument(block, 20), argument(block, 21)
        buffer = space + thread_index(block) * scratch
        fill(buffer, 0, length)
        joined = buffer + low_w * SIZE
        tile = next_tile(block)
        while tile * each < rows:
            for number in range(tile * each, min(rows, tile * each + each)):
                plane = number // (O * P)
                d0, d1 = part(number // P % O, stride_d, low_d, D, taps_d)
                h0, h1 = part(number % P, stride_h, low_h, H, taps_h)
                image = x + plane * D * H * W * SIZE
                if W < L:
                    join_short(joined, image, d0, d1, h0, h1, H, W)
                else:
                    for w in range(0, W - L + 1, L):
                        join(joined, image, d0, d1, h0, h1, H, W, w)
                    if W % L:
                        join(joined, image, d0, d1, h0, h1, H, W, W - L)
                out = y + number * Q * SIZE
                if step == 0:
                    for q in range(Q):
                        largest = T(LOWEST)
                        for s in range(S):
                            value = load_scalar(T, buffer + (q * stride_w + s) * SIZE)
                            if value > largest or value != value:
                                largest = value
                        store_scalar(out + q * SIZE, largest)
                elif Q < L:
                    store_clipped(out, 0, Q, across(buffer, 0, S))
                else:
                    for q in range(0, Q - L + 1, L):
                        store(out + q * SIZE, across(buffer, q, S))
                    if Q % L:
                        store(out + (Q - L) * SIZE, across(buffer, Q - L, S))
            tile = next_tile(block)

    return pool_rows


@functools.cache
def _channels_kernel(T: type) -> Kernel:
    """Channels last."""
    L, SIZE, LOWEST, part = lanes(T), np.dtype(T).itemsize, _LOWEST, _part()

    @inline
    def largest(image, d0, d1, h0, h1, w0, w1, H, W, C, c):
        most = broadcast(T(LOWEST))
        for d in range(d0, d1):
            for h in range(h0, h1):
                for w in range(w0, w1):
                    most = maximum(most, load(T, image + (((d * H + h) * W + w) * C + c) * SIZE))
        return most

    @inline
    def largest_short(image, d0, d1, h0, h1, w0, w1, H, W, C):
        most = broadcast(T(LOWEST))
        for d in range(d0, d1):
            for h in range(h0, h1):
                for w in range(w0, w1):
                    most = maximum(most, load_clipped(T, image + ((d * H + h) * W + w) * C * SIZE, 0, C))
        return most

    @kernel
    def pool_channels(block):
        x, y, C = argument(block, 0), argument(block, 1), argument(block, 2)
        rows, each = argument(block, 3), argument(block, 4)
        D, H, W = argument(block, 5), argument(block, 6), argument(block, 7)
        O, P, Q = argument(block, 8), argument(block, 9), argument(block, 10)
        taps_d, taps_h, taps_w = argument(block, 11), argument(block, 12), argument(block, 13)
        stride_d, stride_h, stride_w = argument(block, 14), argument(block, 15), argument(block, 16)
        low_d, low_h, low_w = argument(block, 17), argument(block, 18), argument(block, 19)
        tile = next_tile(block)
        while tile * each < rows:
            for number in range(tile * each, min(rows, tile * each + each)):
                d0, d1 = part(number // P % O, stride_d, low_d, D, taps_d)
                h0, h1 = part(number % P, stride_h, low_h, H, taps_h)
                image = x + number // (O * P) * D * H * W * C * SIZE
                for q in range(Q):
                    w0, w1 = part(q, stride_w, low_w, W, taps_w)
                    out = y + (number * Q + q) * C * SIZE
                    if C < L:
                        store_clipped(out, 0, C, largest_short(image, d0, d1, h0, h1, w0, w1, H, W, C))
                    else:
                        for c in range(0, C - L + 1, L):
                            store(out + c * SIZE, largest(image, d0, d1, h0, h1, w0, w1, H, W, C, c))
                        if C % L:
                            store(out + (C - L) * SIZE, largest(image, d0, d1, h0, h1, w0, w1, H, W, C, C - L))
            tile = next_tile(block)

    return pool_channels
