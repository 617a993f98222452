"""cpu.depthwise: every channel is filtered by itself; a vector holds as many channels as it has lanes.

All three passes, both layouts and every rank are built from two ideas.

**A block of pixels slides along W.** Pixel j of a block reads positions step*j + t of a row, for each tap t, so that a
vector of x serves up to `taps` sums once it is loaded, and a weight all of them. For 8 pixels and 3 taps:

    10 loads of x and 3 of w  for  24 multiply-adds        (`slide`; wgrad's twin is `slide_grad`)

A core starts two of either kind in a cycle, so that multiply-adds set the pace. Filter rows are a loop around it.

**Lanes are channels.** In nhwc they lie side by side: x is read where it is, and all channels of a block of pixels are
done before the next block, so that memory is passed over in its own order. Rows outside the image are left out; blocks
at its left and right border jump over the columns outside, whose products are then not made either (`slide_inside`).
In nchw, squares of L planes by L pixels are transposed on their way into scratch memory, a strip of rows at a time and
with zeros on both sides, and results on their way out. That costs about 7 cycles for a vector of results, next to 5
for a 3x3 filter, but then nothing depends on the width of the image: a row of 7 columns would fill half a vector.
The same scratch memory serves all that does not fit the direct path: several filters for a channel, and fewer channels
than lanes.

**A thread writes what it wrote in the last call.** Each has a share of the tiles that is one piece of the result, and
leaves those of others alone unless they are far behind (`simd.next_of_static`): lines that another core wrote last take
long to get. Nor is there a masked store on the way, which does not scale on AMD's cores: 3x3 on 960 channels of 7x7
pixels took 145 us on two cores and 143 on one with the masks of AVX2, 67 and 121 without. With tiles drawn from one
counter as well, two cores took longer than one for 18 of 84 layers (AMD EPYC).

A dgrad of stride 1 is a filter turned by half a turn. A dgrad of stride s is s filters along each axis, one for each
remainder of the position in dx modulo s (`_Phase`): no zeros are inserted, no product is made that is not in the sum.

**f16 and bf16 are memory's, f32 is computed with.** Loads widen what they read, the weights' order and scratch memory
are of f32, and a result is rounded once, where it is stored: the bits are those of casts around the engine, and half of
the bytes move. Kernels have a token T for what is computed with and one, M, for what the tensors hold.

Taps on padding are left out, or multiply a zero (columns, under small filters in scratch memory); weights are never
made up, so that an infinity in x reaches those results alone whose window holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from .low_precision import computed, memory_refusals, memory_token
from .matrices import sum_error
from .runtime import Kernel, kernel, launch, numbering
from .simd import (
    LANE_BYTES,
    argument,
    block_of,
    emit_fma,
    emit_load,
    emit_offset,
    emit_row,
    emit_rows,
    emit_store,
    enter_share,
    fill,
    fill_like,
    inline,
    is_block,
    lanes,
    load,
    load_block,
    load_block_clipped,
    load_clipped,
    load_scalar,
    memory_of,
    narrow,
    next_of_static,
    next_tile,
    pack,
    prefetch,
    store,
    store_block,
    store_block_clipped,
    store_clipped,
    store_first,
    store_scalar,
    thread_number,
    transpose,
    unpack,
    word,
    zero,
)

__all__ = ["Depthwise", "DepthwiseKnobs"]

# Pixels of a block: 8 sums, 7 weights and a value of x fill AVX2's 16 registers, and 8 sums hide the latency of 4
# cycles at two multiply-adds a cycle. Rows of 7, 14 and 28 pixels are whole blocks of 7. Larger blocks gain nothing
# with AVX-512, as such rows are common.
BIG, SMALL = 8, 4
MOST_TAPS = 7  # at once
GUARDED_TAPS = 5  # from which it pays to jump over columns of padding where zeros are at hand
WGRAD_TASKS = 16  # whatever the number of threads: the order of the sums must not depend on it
WGRAD_PIXELS = 256  # that f32 adds up before f64 takes over
CHUNK_PIXELS = 28  # of a row, times vectors of channels, in scratch memory
KEPT_BYTES = 512 << 10  # of weights in a thread's scratch memory: half of a second-level cache
APART = 4096  # bytes between the scratch memory of threads: what a core fetches ahead should not be another's
THREAD_MACS = 100_000  # some 10 us of work, for which another thread is worth waking


@dataclass(frozen=True)
class DepthwiseKnobs(Knobs):
    """``block``: bytes to work on at a time: the weights of some channels (nhwc), or a strip of L planes (nchw)."""

    block: int


class Depthwise(Engine):
    """Each channel has filters of its own: blocks of pixels slide along W, and the lanes of a vector are channels.

        y[n,k,p]  = bias[k] + sum over r of   w[k,r] * x[n, k/M, p*stride - pad + r*dil]    (M = K/C filters a channel)
        dx[n,c,h] = sum over m < M and r of   w[c*M+m, r] * dy[n, c*M+m, (h + pad - r*dil) / stride]
        dw[k,r]   = sum over n,p of           dy[n,k,p] * x[n, k/M, p*stride - pad + r*dil]

    It wins wherever G = C and C fills a vector: there is so little arithmetic that a pass over memory is all the time
    there is up to about 3x3, and multiply-adds run at half of their peak from 5x5 on. A matrix product would have rows
    of one channel to work on. It loses where lanes stay empty: on one to three channels `cpu.filter2d` has lanes along
    W. Results are written through the caches: past them (non-temporal stores) 3x3 layers took twice as long.

    fprop and dgrad add up f32 along the filter. wgrad adds up some hundred products in f32 and goes on in f64, in an
    order that depends on the problem alone.
    """

    name = "cpu.depthwise"
    takes_bias = True
    takes_low = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.groups != problem.c:
            yield f"groups are {problem.groups} for C = {problem.c}; a depthwise convolution needs G = C"
        yield from memory_refusals(problem)
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted the same"

    def traits(self, problem: Problem, knobs: DepthwiseKnobs) -> Traits:
        # wgrad: f32 over one strip of pixels, then f64 and a last rounding.
        problem = computed(problem)
        chain = min(problem.gemm.k, max(WGRAD_PIXELS, problem.out[-1])) if problem.direction == "wgrad" else None
        return Traits(accumulator=problem.dtypes[0], error_bound=sum_error(problem, chain))

    def workspace_bytes(self, problem: Problem, device: Device, knobs: DepthwiseKnobs) -> int:
        return _plan_for(problem, device, knobs).workspace

    def knobs(self, problem: Problem, device: Device) -> Iterable[DepthwiseKnobs]:
        usual = 16 << 10 if _is_direct(problem) else 64 << 10
        return tuple(DepthwiseKnobs(block) for block in (usual, usual * 2, usual // 2))

    def cost(self, problem: Problem, device: Device, knobs: DepthwiseKnobs) -> float:
        # Measured on two cores, in shares of the device's ceilings, which are another machine's: so that it predicts
        # 2.3 times what was measured on an AMD EPYC with AVX2, as other engines do. A pass over memory runs at a copy's
        # bandwidth in nhwc and, with its transposes, at 0.75 of it in nchw; multiply-adds at 0.8 of the matrix rate
        # with AVX2, and at 0.56 of the higher one of AVX-512. Lanes without a channel are paid for like the others.
        problem = computed(problem)
        size, direct = DTYPE_BYTES[problem.dtypes[0]], _is_direct(problem)
        L = device.lanes * 4 // size
        waste = 1.0 if direct else -(-problem.k // L) * L / problem.k
        moving = problem.min_bytes * waste / device.bandwidth
        rate = device.flops * 4 / size * (0.56 if device.lanes >= 16 else 0.8)
        arithmetic = 2.0 * problem.macs * waste / rate
        if problem.k != problem.c:
            # Filters that share a channel: one value of x is spread over the lanes for each, and a stride keeps those
            # of neighbouring results apart. 12 ns a result and 1 ns a product on one core, measured with C = 1.
            strided = 1e-9 if max(problem.stride) > 1 else 0.0
            arithmetic += (prod(problem.y_shape) * 12e-9 + problem.macs * strided) / device.threads
        return 10e-6 + max(moving if direct else moving / 0.75, arithmetic)

    def build(self, problem: Problem, device: Device, knobs: DepthwiseKnobs) -> Runner:
        plan = _plan_for(problem, device, knobs)
        work, threads, table = plan.kernel(), plan.threads, plan.table
        if problem.direction != "wgrad":

            def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
                y, first = out.data_ptr(), 0 if bias is None else bias.data_ptr()
                shares = (numbering(threads), *[0] * threads)  # a counter for each thread's share of the tiles
                args = (table.data_ptr(), a.data_ptr(), b.data_ptr(), y, first, _aligned(workspace), *shares)
                launch(work, args, threads)

            return run

        finish = plan.finish() if plan.finish else None

        def run_wgrad(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
            scratch, dw, shares = _aligned(workspace), out.data_ptr(), (numbering(threads), *[0] * threads)
            launch(work, (table.data_ptr(), a.data_ptr(), b.data_ptr(), scratch, dw, *shares), threads)
            if finish:
                launch(finish, (table.data_ptr(), dw, scratch), threads)

        return run_wgrad


def _plan_for(problem: Problem, device: Device, knobs: DepthwiseKnobs) -> _Plan:
    make = _plan_wgrad if problem.direction == "wgrad" else _plan
    return make(computed(problem), problem.dtypes[0], device.threads, knobs)


def _aligned(workspace: Tensor | None) -> int:
    assert workspace is not None, "depthwise keeps padded pieces, packed weights and partial sums in the workspace"
    return -(-workspace.data_ptr() // 64) * 64


# ---- phases: every pass as plain correlations -----------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """One axis of a correlation, for i < count:

    out[first + every*i] = sum over j < taps of  w[w_first + w_step*j] * src[step*i + origin + spread*j]

    fprop is one phase. A dgrad of stride s is s of them, one for each remainder of the position in dx; each meets only
    those taps that fall on whole positions of dy.
    """

    first: int
    every: int
    count: int
    step: int
    origin: int
    spread: int
    taps: int
    w_first: int
    w_step: int

    def split(self, parts: int) -> list[_Phase]:
        """The same outputs as `parts` phases: f, f + parts, f + 2*parts, ... in the f-th."""
        return [
            _Phase(
                self.first + self.every * f, self.every * parts, (self.count - f + parts - 1) // parts,
                self.step * parts, self.origin + self.step * f, self.spread, self.taps, self.w_first, self.w_step,
            )
            for f in range(min(parts, self.count))
        ]  # fmt: skip

    def inside(self, size: int) -> tuple[int, int]:
        """The outputs (from, to) all of whose taps lie in a source of `size`."""
        low = -(self.origin // self.step) if self.origin < 0 else 0
        high = (size - 1 - self.origin - (self.taps - 1) * self.spread) // self.step + 1
        low = min(low, self.count)
        return low, min(max(high, low), self.count)


def _phases(problem: Problem, axis: int) -> list[_Phase]:
    """The phases of an axis; one that the problem does not have (negative) is a single position with a single tap."""
    if axis < 0:
        return [_Phase(0, 1, 1, 1, 0, 1, 1, 0, 1)]
    size, taps, stride = problem.spatial[axis], problem.filter[axis], problem.stride[axis]
    low, dil, out = problem.padding[axis][0], problem.dilation[axis], problem.out[axis]
    if problem.direction != "dgrad":
        return [_Phase(0, 1, out, stride, -low, dil, taps, 0, 1)]
    phases, shared = [], gcd(dil, stride)
    for first in range(min(stride, size)):
        count = (size - first + stride - 1) // stride
        hits = [t for t in range(taps) if (first + low - t * dil) % stride == 0]
        if hits:  # dx[first + stride*i] meets dy[i + (first + low - t*dil) / stride]; the last tap comes first in dy
            last = hits[-1]
            origin = (first + low - last * dil) // stride
            phases.append(_Phase(first, stride, count, 1, origin, dil // shared, len(hits), last, -stride // shared))
        else:
            phases.append(_Phase(first, stride, count, 1, 0, 1, 0, 0, 0))
    return phases


def _reach(phases: list[_Phase]) -> tuple[int, int]:
    """Where the source of output 0 begins, over all phases, and how many positions it covers."""
    used = [p for p in phases if p.taps]
    low = min((p.origin for p in used), default=0)
    return low, max((p.origin + (p.taps - 1) * p.spread for p in used), default=low) - low + 1


def _slide(phases: list[_Phase], split: bool = True) -> tuple[list[_Phase], int, int]:
    """How a block slides along an axis: the phases to use, how many taps to take at once, and the step.

    Output j reads positions step*j + t, which needs a stride that is a multiple of the dilation. Where it is not, the
    outputs are split into phases for which it is, if those are long enough; else every tap goes by itself.
    """
    most = max(phases, key=lambda p: p.taps)
    parts = most.spread // gcd(most.spread, most.step)
    if split and parts > 1 and most.count >= 4 * parts:
        phases = [part for p in phases for part in p.split(parts)]
        most = max(phases, key=lambda p: p.taps)
    step = most.step // most.spread
    if most.step % most.spread or step >= most.taps:
        return phases, 1, 1
    taps = most.taps
    if taps > MOST_TAPS:  # the fewest passes over the block, those of the taps that are left over included
        taps = min(range(3, MOST_TAPS + 1), key=lambda n: (most.taps // n + most.taps % n, -n))
    return phases, taps, step


# ---- plans: what the kernels read -----------------------------------------------------------------------------

# Words of a plan's table. SRC_* and DST_* are strides in bytes of what is read (fprop and wgrad: x; dgrad: dy) and of
# what is written (in a wgrad: dy, which is read as well). What ends in _AT is the offset of a list in the table.
(
    TILES, SPOTS, CHUNKS, CHUNK, UNITS, THREAD_BYTES,
    SRC_N, SRC_C, SRC_D, SRC_H, SRC_W, DST_N, DST_C, DST_D, DST_H, DST_W,
    CHANNELS, DEPTH, HEIGHT, WIDTH, OUT_H, OUT_W, DIV, FAN, FILTER_T, FILTER_R, FILTER_S,
    STEP_H, STEP_W, EVERY_D, EVERY_H, EVERY_W, ORIGIN_H, ORIGIN_W, REACH_H, REACH_W, D_AT, PHASES, PHASES_AT,
    RECTS, RECTS_AT, PACK_PITCH, PACK_BYTES, ROWS_BYTES,
    IMAGE_PITCH, IMAGE_SLICE, IMAGE_BYTES, PLAIN_BYTES, RESULT_PITCH, RESULT_BYTES,
    ITEMS, PARTS, PARTIAL_BYTES, PARTIALS_BYTES, WIDE_PITCH, THREADS, TASKS, KEPT, ZEROS_BYTES, PIXEL,
    WORDS,
) = range(61)  # fmt: skip

# Words of a phase: both axes of a correlation, and what a block needs to know of them.
(
    H_FIRST, H_COUNT, H_ORIGIN, H_SPREAD, H_TAPS, H_W_FIRST, H_W_STEP,
    W_FIRST, W_COUNT, W_ORIGIN, W_SPREAD, W_TAPS, W_W_FIRST,
    FULL, SINGLE, TAP, JUMP, W_BYTES, INNER, INNER_END,
    PHASE_WORDS,
) = range(21)  # fmt: skip

# Words of a depth phase.
D_STEP, D_ORIGIN, D_SPREAD, D_TAPS, D_W_FIRST, D_W_STEP, DEPTH_WORDS = range(7)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The kernel, the table it reads, and what a call needs. ``finish`` adds up the partial sums of a wgrad."""

    kernel: Callable[[], Kernel]
    table: Tensor
    threads: int
    workspace: int
    finish: Callable[[], Kernel] | None = None


class _Table:
    """Int64 words: the named ones first, lists behind them."""

    def __init__(self) -> None:
        self.words = [0] * WORDS

    def set(self, values: dict[int, int]) -> None:
        for index, value in values.items():
            self.words[index] = value

    def put(self, values: list[int]) -> int:
        """Append a list; returns its offset in bytes."""
        at = 8 * len(self.words)
        self.words += values
        return at

    def tensor(self) -> Tensor:
        return torch.tensor(self.words, dtype=torch.int64)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _evenly(total: int, most: int) -> tuple[int, int]:
    """total cut into pieces of at most `most`, as equal as can be: their size and number."""
    size = -(-total // -(-total // most))
    return size, -(-total // size)


def _is_direct(problem: Problem) -> bool:
    """Vectors of channels lie in memory as they are needed; the last one overlaps its neighbour if it has to."""
    channels_last = problem.rank > 1 and problem.layouts[0] == "nhwc"
    return channels_last and problem.c == problem.k and problem.c >= lanes(memory_token(computed(problem).dtypes[0]))


def _start(problem: Problem, size: int) -> tuple[_Table, tuple[list[_Phase], list[_Phase], list[_Phase]]]:
    """What both plans share: the phases of D, H and W, and a table with sizes and strides, for elements of
    so many bytes."""
    table, one = _Table(), (1,) * (3 - problem.rank)
    depth, high, wide = (_phases(problem, axis - len(one)) for axis in range(3))
    forward = problem.direction != "dgrad"
    x, y = (problem.c, *one, *problem.spatial), (problem.k, *one, *problem.out)
    for at, (c, d, h, w) in zip((SRC_N, DST_N), (x, y) if forward else (y, x), strict=True):
        if problem.rank > 1 and problem.layouts[0] == "nhwc":
            strides = (d * h * w * c, 1, h * w * c, w * c, c)
        else:
            strides = (c * d * h * w, d * h * w, h * w, w, 1)
        table.set({at + i: size * stride for i, stride in enumerate(strides)})
        table.set({DEPTH: d, HEIGHT: h, WIDTH: w} if at == SRC_N else {CHANNELS: c, OUT_H: h, OUT_W: w})
    filter_t, filter_r, filter_s = one + problem.filter
    multiplier = problem.k // problem.c
    depth_words = [v for p in depth for v in (p.step, p.origin, p.spread, p.taps, p.w_first, p.w_step)]
    table.set({
        DIV: multiplier if forward else 1, FAN: 1 if forward else multiplier, EVERY_D: depth[0].every,
        FILTER_T: filter_t, FILTER_R: filter_r, FILTER_S: filter_s, D_AT: table.put(depth_words),
    })  # fmt: skip
    return table, (depth, high, wide)


def _gathered(
    table: _Table, slices: int, high: list[_Phase], wide: list[_Phase], budget: int, V: int, held: int, pixel: int
) -> tuple[int, int]:
    """Rows and columns of a tile whose padded source and result take about `budget` bytes of scratch memory, for pixels
    of so many bytes. A vector has V bytes in scratch memory, and `held` in that of the tensors."""
    reach_h, reach_w, step_h, step_w = (table.words[i] for i in (REACH_H, REACH_W, STEP_H, STEP_W))
    rows, cols = max(p.count for p in high), max(p.count for p in wide)
    area = high[0].every * wide[0].every

    def size(rows: int, cols: int) -> int:
        return (slices * ((rows - 1) * step_h + reach_h) * ((cols - 1) * step_w + reach_w) + area * rows * cols) * pixel

    while size(1, cols) > budget and cols > 4 * BIG:
        cols = _up(-(-cols // 2), BIG)
    least = min(rows, 4)  # or the rows that strips share would be gathered too often
    while rows > least and size(rows, cols) > budget:
        rows -= 1
    rows = _evenly(max(p.count for p in high), rows)[0]
    in_cols = (max(cols, BIG) - 1) * step_w + reach_w + MOST_TAPS  # the only block of a row may read beyond it
    in_rows = (rows - 1) * step_h + reach_h
    # Narrow rows on their way: of the source, in a wgrad also of dy, and at least a square.
    plain = max(in_rows * min(in_cols, table.words[WIDTH]), rows * cols, held // table.words[SRC_W])
    result = max(area * rows * cols, 64)
    table.set({
        IMAGE_PITCH: in_cols * pixel, IMAGE_SLICE: in_rows * in_cols * pixel,
        IMAGE_BYTES: slices * in_rows * in_cols * pixel, PLAIN_BYTES: plain * V,
        RESULT_PITCH: wide[0].every * cols * pixel, RESULT_BYTES: result * pixel, PIXEL: pixel,
    })  # fmt: skip
    return rows, cols


def _chunks(channels: int, L: int, width: int) -> tuple[int, int]:
    """Vectors of channels of a chunk in scratch memory, and the number of chunks. What is done once for a row and all
    its vectors, such as the list of the rows under it, takes as long as four pixels of a 3x3 filter. The last chunk
    also has the channels left over."""
    groups = max(1, channels // L)
    return _evenly(groups, max(1, min(groups, CHUNK_PIXELS // width)))


def _block(width: int) -> int:
    """Pixels of a block, for rows of so many."""
    return 7 if width % 7 == 0 and width % 8 else BIG


def _rects(height: int, width: int, rows: int, cols: int) -> list[int]:
    """The rectangles of a grid: first row, rows, first column, columns of each."""
    return [
        v for i in range(0, height, rows) for j in range(0, width, cols)
        for v in (i, min(rows, height - i), j, min(cols, width - j))
    ]  # fmt: skip


def _block_words(h: _Phase, w: _Phase, taps: int, pixel: int, w_pixel: int, width: int | None) -> list[int]:
    """A phase, for blocks of pixels that lie `pixel` bytes apart with weights that lie `w_pixel` bytes apart.

    Outputs whose taps all lie in a row of `width` need no care; without a width (zeros lie on both sides) none does.
    """
    full = w.taps // taps if taps > 1 else 0
    inner = (0, w.count + BIG) if width is None else w.inside(width)
    return [
        h.first, h.count, h.origin, h.spread, h.taps, h.w_first, h.w_step,
        w.first, w.count, w.origin, w.spread, w.taps, w.w_first,
        full, w.taps - full * taps, w.spread * pixel, w.step * pixel, w.w_step * w_pixel, *inner,
    ]  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, memory: str, threads: int, knobs: DepthwiseKnobs) -> _Plan:
    """fprop and dgrad: a tile is a rectangle of results of one image, for a chunk of channels. What is held and
    in which order it is added up follow from the problem as it is computed, whatever the tensors hold."""
    T, M, direct = memory_token(problem.dtypes[0]), memory_token(memory), _is_direct(problem)
    size, L = DTYPE_BYTES[memory], lanes(T)
    V = L * np.dtype(T).itemsize
    table, (depth, high, wide) = _start(problem, size)
    wide, taps, step = _slide(wide)
    (origin_h, reach_h), (origin_w, reach_w) = _reach(high), _reach(wide)
    table.set({
        STEP_H: high[0].step, STEP_W: wide[0].step, EVERY_H: high[0].every, EVERY_W: wide[0].every,
        ORIGIN_H: origin_h, ORIGIN_W: origin_w, REACH_H: reach_h, REACH_W: reach_w,
    })  # fmt: skip
    threads = max(1, min(threads, problem.macs // THREAD_MACS))
    channels, count = table.words[CHANNELS], prod(problem.filter)
    grid_h, grid_w = max(p.count for p in high), max(p.count for p in wide)
    out_d = (problem.rank == 3 and (problem.spatial if problem.direction == "dgrad" else problem.out)[0]) or 1
    slices = max(1, max(p.taps for p in depth))
    if direct:
        # Weights of a chunk of channels stay in the first-level cache. Then as many tiles as keep all threads busy, by
        # strips of at least 4 rows first and by smaller chunks second.
        groups, others, wanted = channels // L, problem.n * out_d, 8 * threads
        chunks = -(-groups // max(1, min(groups, knobs.block // (count * V))))
        strips = max(1, min(grid_h // 4, -(-wanted // others)))
        if others * strips < threads:
            chunks = max(chunks, min(groups // 2, -(-wanted // (others * strips))))
        chunk, chunks = _evenly(groups, -(-groups // chunks))
        rows, cols, pixel = -(-grid_h // strips), grid_w, table.words[SRC_W]
        pitch = (chunk + 2) * V  # a vector more for channels left over, one to keep taps off each other's cache sets
    else:
        chunk, chunks = _chunks(channels, L, grid_w)
        pixel = (chunk + (channels > L and channels % L > 0)) * V
        rows, cols = _gathered(table, slices, high, wide, knobs.block, V, L * size, pixel)
        pitch = pixel
    # Tiles lie in memory as their numbers do, so that a thread's share of them is one piece of the result. Chunks of
    # channels then change with every tile: all weights are kept, where they fit.
    kept = chunks if chunks * count * pitch <= KEPT_BYTES else 1
    within = table.words[WIDTH] if direct or taps >= GUARDED_TAPS else None
    records = [v for h in high for w in wide for v in _block_words(h, w, taps, pixel, pitch, within)]
    rects = _rects(grid_h, grid_w, rows, cols)
    spots = out_d * (len(rects) // 4)
    rows_bytes = 16 * (1 + slices * max(p.taps for p in high))
    scratch = table.words[IMAGE_BYTES] + table.words[PLAIN_BYTES] + 2 * table.words[RESULT_BYTES]
    zeros_bytes = max(pitch, 2 * V)
    thread_bytes = _up(kept * (count * pitch + 8) + zeros_bytes + scratch + rows_bytes, 64) + APART
    table.set({
        TILES: chunks * problem.n * spots, TASKS: min(chunks * problem.n * spots, 8 * threads), SPOTS: spots,
        CHUNKS: chunks, CHUNK: chunk * L, UNITS: problem.n,
        THREAD_BYTES: thread_bytes, PHASES: len(records) // PHASE_WORDS, PHASES_AT: table.put(records),
        RECTS: len(rects) // 4, RECTS_AT: table.put(rects),
        PACK_PITCH: pitch, PACK_BYTES: count * pitch, KEPT: kept, ZEROS_BYTES: zeros_bytes, ROWS_BYTES: rows_bytes,
        THREADS: threads,
    })  # fmt: skip
    kernel = functools.partial(_filter_kernel, T, M, taps, step, direct, _block(min(cols, grid_w)))
    return _Plan(kernel, table.tensor(), threads, thread_bytes * threads + 64)


@functools.lru_cache(maxsize=1024)
def _plan_wgrad(problem: Problem, memory: str, threads: int, knobs: DepthwiseKnobs) -> _Plan:
    """wgrad: a task adds up a part of all rectangles for a chunk of channels. What is held and
    in which order it is added up follow from the problem as it is computed, whatever the tensors hold."""
    T, M, direct = memory_token(problem.dtypes[0]), memory_token(memory), _is_direct(problem)
    size, L = DTYPE_BYTES[memory], lanes(T)
    V = L * np.dtype(T).itemsize
    table, ((d,), (h,), (w,)) = _start(problem, size)
    _, taps, step = _slide([w], split=False)
    table.set({
        STEP_H: h.step, STEP_W: w.step, EVERY_H: 1, EVERY_W: 1, ORIGIN_H: h.origin, ORIGIN_W: w.origin,
        REACH_H: (h.taps - 1) * h.spread + 1, REACH_W: (w.taps - 1) * w.spread + 1,
    })  # fmt: skip
    count, groups = prod(problem.filter), -(-problem.k // L)
    rows, cols = max(1, WGRAD_PIXELS // w.count), w.count
    chunk, chunks = _chunks(problem.k, L, w.count)
    pixel = table.words[SRC_W] if direct else (chunk + (problem.k > L and problem.k % L > 0)) * V
    if not direct:
        most, cols = _gathered(table, d.taps, [h], [w], knobs.block, V, L * size, pixel)
        rows = min(most, max(1, WGRAD_PIXELS // cols))
    rows = _evenly(h.count, min(rows, h.count))[0]
    rects = _rects(h.count, w.count, rows, cols)
    items = problem.n * d.count * (len(rects) // 4)
    if direct:
        # Parts of the pixels read memory in its own order, but their sums are written by one core and read by another.
        # Where those would be more than a 64th of what is read, tasks are chunks of channels, of whole cache lines.
        whole, line = problem.k // L, max(1, 64 // V)
        chunks = -(-whole // max(1, min(whole, knobs.block // (count * V))))
        if WGRAD_TASKS * count * problem.k * 8 * 64 > problem.min_bytes:
            chunks = max(chunks, min(WGRAD_TASKS, -(-whole // line)))
        parts = min(items, round(WGRAD_TASKS / chunks) or 1)
        if chunks * parts < WGRAD_TASKS // 2:
            chunks = max(chunks, min(whole // 2, WGRAD_TASKS // parts))
        chunk, chunks = _evenly(whole, _up(-(-whole // chunks), line))
    parts = min(items, round(WGRAD_TASKS / chunks) or 1)
    pitch = (chunk + 2) * V
    chunk_lanes = (chunk + 1) * L  # the last chunk has one vector more, if channels are left over
    within = table.words[WIDTH] if direct or taps >= GUARDED_TAPS else None
    rows_bytes = 16 * (1 + d.taps * h.taps)
    scratch = table.words[IMAGE_BYTES] + table.words[PLAIN_BYTES] + table.words[RESULT_BYTES]
    wide = count * chunk_lanes * 8 if parts == 1 else 0
    thread_bytes = _up(count * pitch + scratch + wide + rows_bytes, 64) + APART
    partial = count * groups * L * 8 if parts > 1 else 0
    threads = max(1, min(threads, problem.macs // THREAD_MACS))
    table.set({
        TILES: chunks * parts, TASKS: min(chunks * parts, 8 * threads), CHUNKS: chunks, CHUNK: chunk * L, PARTS: parts,
        ITEMS: items, SPOTS: d.count,
        RECTS: len(rects) // 4, RECTS_AT: table.put(rects), THREAD_BYTES: thread_bytes,
        PHASES_AT: table.put(_block_words(h, w, taps, pixel, pitch, within)),
        PACK_PITCH: pitch, PACK_BYTES: count * pitch, ROWS_BYTES: rows_bytes, THREADS: threads,
        PARTIAL_BYTES: partial, PARTIALS_BYTES: _up(partial * parts, 64), WIDE_PITCH: chunk_lanes * 8,
    })  # fmt: skip
    return _Plan(
        kernel=functools.partial(_wgrad_kernel, T, M, taps, step, direct, _block(cols)), table=table.tensor(),
        threads=threads,
        workspace=_up(partial * parts, 64) + thread_bytes * threads + 64,
        finish=functools.partial(_finish_kernel, T, M) if parts > 1 else None,
    )  # fmt: skip


# ---- register blocks ------------------------------------------------------------------------------------------


def _pairs(count, taps, every):
    """For each position i that some pixel needs: the pairs (t, j) of taps and pixels with i = every*j + t."""
    for i in range((count - 1) * every + taps):
        pairs = [(t, (i - t) // every) for t in range(taps) if (i - t) % every == 0 and 0 <= (i - t) // every < count]
        if pairs:
            yield i, pairs


def _emit_guarded(builder, mask, i, values, change):
    """The values, changed by change() unless bit i of the mask is 0: a jump, always the same one within a block."""
    before, then, end = builder.block, builder.append_basic_block("inside"), builder.append_basic_block("next")
    bit = builder.and_(mask, ir.Constant(mask.type, 1 << i))
    builder.cbranch(builder.icmp_unsigned("!=", bit, ir.Constant(mask.type, 0)), then, end)
    builder.position_at_end(then)
    changed = change()
    builder.branch(end)
    builder.position_at_end(end)
    for at, value in changed.items():
        either = builder.phi(value.type)
        either.add_incoming(values[at], before)
        either.add_incoming(value, then)
        values[at] = either


def _emit_sums(builder, totals, steps, places, memory, mask):
    """totals[at] + x[i] * factor for all (i, [(at, factor), ...]) of the steps; x[i] is the vector at places[i].

    Under a mask only for those i whose bit is set; other places are not read.
    """
    for i, products in steps:

        def change(i=i, products=products):
            x = emit_load(builder, totals[0].type, places[i], memory)
            return {at: emit_fma(builder, x, factor, totals[at]) for at, factor in products}

        if mask is None:
            for at, value in change().items():
                totals[at] = value
        else:
            _emit_guarded(builder, mask, i, totals, change)
    return pack(builder, totals)


def _slide_code(held, every, guarded):
    def codegen(context, builder, signature, args):
        totals, taps = unpack(builder, args[1]), unpack(builder, args[2])
        places = emit_rows(builder, args[4], args[5], (len(totals) - 1) * every + len(taps))
        steps = [(i, [(j, taps[t]) for t, j in pairs]) for i, pairs in _pairs(len(totals), len(taps), every)]
        return _emit_sums(builder, totals, steps, places, memory_of(held), args[6] if guarded else None)

    return codegen


def _is_slide(sums, factors, step):
    return is_block(sums) and is_block(factors) and isinstance(step, types.IntegerLiteral)


@intrinsic(prefer_literal=True)
def slide(typingctx, held, sums, weights, step, address, pitch):
    """slide(M, sums, weights, step, address, pitch) -> sums[j] + weights[t] * x[step*j + t], summed over t.

    x[i] is the vector of M at address + i * pitch. A sum meets its taps in their order.
    """
    if not _is_slide(sums, weights, step):
        return None
    code = _slide_code(held, step.literal_value, False)
    return sums(held, sums, weights, step, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def slide_inside(typingctx, held, sums, weights, step, address, pitch, mask):
    """What `slide` does, at the border: without the products of those x[i] whose bit i of the mask is 0."""
    if not _is_slide(sums, weights, step):
        return None
    code = _slide_code(held, step.literal_value, True)
    return sums(held, sums, weights, step, *[types.int64] * 3), code


def _slide_grad_code(held, every, guarded):
    def codegen(context, builder, signature, args):
        totals, dys = unpack(builder, args[1]), unpack(builder, args[2])
        places = emit_rows(builder, args[4], args[5], (len(dys) - 1) * every + len(totals))
        steps = [(i, [(t, dys[j]) for t, j in pairs]) for i, pairs in _pairs(len(dys), len(totals), every)]
        return _emit_sums(builder, totals, steps, places, memory_of(held), args[6] if guarded else None)

    return codegen


@intrinsic(prefer_literal=True)
def slide_grad(typingctx, held, sums, values, step, address, pitch):
    """slide_grad(M, sums, dy, step, address, pitch) -> sums[t] + dy[j] * x[step*j + t], summed over j."""
    if not _is_slide(sums, values, step):
        return None
    code = _slide_grad_code(held, step.literal_value, False)
    return sums(held, sums, values, step, types.int64, types.int64), code


@intrinsic(prefer_literal=True)
def slide_grad_inside(typingctx, held, sums, values, step, address, pitch, mask):
    """What `slide_grad` does, at the border: without the products of those x[i] whose bit i of the mask is 0."""
    if not _is_slide(sums, values, step):
        return None
    code = _slide_grad_code(held, step.literal_value, True)
    return sums(held, sums, values, step, *[types.int64] * 3), code


@intrinsic
def multiply_add(typingctx, held, sums, x, weights):
    """multiply_add(M, sums, x, weights) -> sums[i] + x[i] * weights[i], both vectors behind each other in memory."""

    def codegen(context, builder, signature, args):
        totals, memory = unpack(builder, args[1]), memory_of(held)
        width = LANE_BYTES if memory is None else LANE_BYTES // 2
        for i, total in enumerate(totals):
            value = emit_load(builder, total.type, emit_offset(builder, args[2], i, width), memory)
            weight = emit_load(builder, total.type, emit_offset(builder, args[3], i, LANE_BYTES))
            totals[i] = emit_fma(builder, value, weight, total)
        return pack(builder, totals)

    return sums(held, sums, types.int64, types.int64), codegen


@intrinsic
def multiply_add_to(typingctx, held, sums, x, values):
    """multiply_add_to(M, sums, x, dy): the vectors in memory at `sums` += those of M at `x` * dy[i]."""

    def codegen(context, builder, signature, args):
        memory = memory_of(held)
        width = LANE_BYTES if memory is None else LANE_BYTES // 2
        for i, value in enumerate(unpack(builder, args[3])):
            place = emit_offset(builder, args[1], i, LANE_BYTES)
            x_i = emit_load(builder, value.type, emit_offset(builder, args[2], i, width), memory)
            emit_store(builder, place, emit_fma(builder, x_i, value, emit_load(builder, value.type, place)))
        return context.get_dummy_value()

    return types.void(held, types.int64, types.int64, values), codegen


@intrinsic
def add_wide(typingctx, address, block, fresh):
    """add_wide(address, block, fresh): the f64 numbers at the address, one for each lane, += the block; fresh: = it."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(ir.DoubleType(), block.dtype.count)
        for i, value in enumerate(unpack(builder, args[1])):
            place = emit_offset(builder, args[0], i, 8 * block.dtype.count)
            wide = value if value.type == kind else builder.fpext(value, kind)
            total = builder.fadd(emit_load(builder, kind, place), wide)
            emit_store(builder, place, builder.select(args[2], wide, total))
        return context.get_dummy_value()

    return types.void(types.int64, block, types.boolean), codegen


@intrinsic(prefer_literal=True)
def merge_wide(typingctx, count, address, other):
    """merge_wide(n, address, other): n f64 numbers += n others."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(ir.DoubleType(), count.literal_value)
        total = builder.fadd(emit_load(builder, kind, args[1]), emit_load(builder, kind, args[2]))
        emit_store(builder, args[1], total)
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_narrow(typingctx, dtype, count, address, pitch, rows):
    """load_narrow(T, n, address, pitch, rows) -> tuple: f64 numbers at address + i * pitch, rounded to T.

    The last of `rows` stands in for those behind it.
    """
    block = block_of(dtype, count)
    if block is None:
        return None

    def codegen(context, builder, signature, args):
        _, _, address_, pitch_, rows_ = args
        kind, wide = context.get_value_type(block.dtype), ir.VectorType(ir.DoubleType(), block.dtype.count)
        places = [emit_row(builder, address_, pitch_, rows_, i) for i in range(block.count)]
        values = [emit_load(builder, wide, place) for place in places]
        return pack(builder, [v if wide == kind else builder.fptrunc(v, kind) for v in values])

    return block(dtype, count, *[types.int64] * 3), codegen


field = word


@inline
def _inside(index, step, width):
    """Bit i is 1 where 0 <= index + i*step < width, for i < 62: a block has (8 - 1) * 6 + 7 positions at most."""
    low = 0 if index >= 0 else min(62, (step - 1 - index) // step)
    high = 0 if index >= width else min(62, (width - 1 - index) // step + 1)
    return (1 << high) - (1 << low) if high > low else 0


@inline
def _next_tiles(block, first, g, number, tile, last, away):
    """The next tile of a task, or the first of the next task: (tile, end of the task, away), tile -1 behind the last.

    Tiles take down to 0.2 us, half of which would be the counter's way from the other core.
    """
    if tile < last:
        return tile, last, away
    tiles, tasks = field(g, TILES), field(g, TASKS)
    task, away = next_of_static(block, first, field(g, THREADS), number, away, tasks)
    if task < 0:
        return -1, 0, away
    return tiles * task // tasks, tiles * (task + 1) // tasks, away


# ---- scratch memory: pixels of L channels ---------------------------------------------------------------------


@inline
def _turn(M, L, HELD, to, step, src, lane, valid, count):
    """to[pixel][lane] = src[plane][pixel], in squares of L planes by L pixels, the last one over its neighbour.

    Pixels of `to` are `step` bytes apart, planes `lane`. What is read is of M, what is written as it is computed with.
    """
    at = 0
    if count < L:
        store_first(transpose(load_block_clipped(M, L, src, lane, valid, count)), to, step, count)
    elif valid < L:
        while at < count:
            at = min(at, count - L)
            store_block(transpose(load_block_clipped(M, L, src + at * HELD, lane, valid, L)), to + at * step, step)
            at += L
    else:
        while at < count:
            at = min(at, count - L)
            store_block(transpose(load_block(M, L, src + at * HELD, lane)), to + at * step, step)
            at += L


@inline
def _gather(T, M, L, SIZE, HELD, to, to_pitch, step, plain, src, row_bytes, pixel, lane, k, div, channels, rows, cols):
    """to[row][column][i] = src[row][column][channel], the channel of i being (k + i) / div, for i < channels.

    src is where channel k / div begins; row_bytes, pixel and lane are its strides, to_pitch and step those of `to`. An
    element of M, which the source is of, has HELD bytes.
    """
    V, first = L * SIZE, 0
    while first < channels:
        first = max(0, min(first, channels - L))
        valid, at, put = min(L, channels - first), src + ((k + first) // div - k // div) * lane, to + first * SIZE
        if pixel == HELD and div == 1:
            if cols < L and row_bytes == cols * HELD:  # through rows, as narrow ones would fill a square badly
                _turn(M, L, HELD, plain, V, at, lane, valid, rows * cols)
                row = plain
                for _ in range(rows):
                    for j in range(cols):
                        store(put + j * step, load(T, row + j * V))
                    row += cols * V
                    put += to_pitch
            else:
                for _ in range(rows):
                    _turn(M, L, HELD, put, step, at, lane, valid, cols)
                    at += row_bytes
                    put += to_pitch
        else:
            for _ in range(rows):
                for j in range(cols):
                    if lane == HELD and div == 1:
                        store(put + j * step, load_clipped(M, at + j * pixel, 0, valid))
                    else:
                        for i in range(valid):
                            of = ((k + first + i) // div - (k + first) // div) * lane
                            store_scalar(put + j * step + i * SIZE, load_scalar(M, at + j * pixel + of))
                at += row_bytes
                put += to_pitch
        first += L


@inline
def _scatter(T, M, L, SIZE, HELD, to, row_bytes, pixel, lane, src, src_pitch, step, channels, rows, cols):
    """to[row][column][channel] = src[row][column][channel], rounded to M; pixels of src are `step` bytes apart."""
    if pixel == HELD and src_pitch == cols * step and row_bytes == cols * HELD:
        rows, cols = 1, rows * cols
    first = 0
    while first < channels:
        first = max(0, min(first, channels - L))
        valid, put, row = min(L, channels - first), to + first * lane, src + first * SIZE
        for _ in range(rows):
            at = 0
            if pixel == HELD:
                if cols < L:
                    square = narrow(M, transpose(load_block(T, L, row, step)))
                    store_block_clipped(square, put, lane, valid, cols)
                while at < cols and cols >= L:
                    at = min(at, cols - L)
                    square = narrow(M, transpose(load_block(T, L, row + at * step, step)))
                    if valid == L:
                        store_block(square, put + at * HELD, lane)
                    else:
                        store_block_clipped(square, put + at * HELD, lane, valid, L)
                    at += L
            else:
                for j in range(cols):
                    store_clipped(put + j * pixel, 0, valid, narrow(M, load(T, row + j * step)))
            put += row_bytes
            row += src_pitch
        first += L


@inline
def _zero_beside(T, V, image, pitch, rows, left, cols, width):
    """Columns 0 to left - 1 and left + cols to width - 1 of the padded rows become zero."""
    for _ in range(rows):
        for j in range(left):
            store(image + j * V, zero(T))
        for j in range(left + cols, width):
            store(image + j * V, zero(T))
        image += pitch


@inline
def _gather_image(T, M, L, SIZE, HELD, g, image, plain, x, depth, d0, top, left, rows, cols, c_first, c_last, fresh):
    """The source under a rectangle of rows x cols results, padded, as pixels of channels c_first to c_last - 1.

    It begins at (d0, top, left), which may be outside; x is where the first channel begins. Rows and slices outside are
    not on any list of rows and stay as they are; columns outside are zeroed once, when `fresh`.
    """
    V, H, W, pitch, step = L * SIZE, field(g, HEIGHT), field(g, WIDTH), field(g, IMAGE_PITCH), field(g, PIXEL)
    h0, w0 = min(H, max(0, top)), min(W, max(0, left))
    h1 = max(h0, min(H, top + (rows - 1) * field(g, STEP_H) + field(g, REACH_H)))
    w1 = max(w0, min(W, left + (cols - 1) * field(g, STEP_W) + field(g, REACH_W)))
    if fresh:
        each = step // V
        _zero_beside(
            T, V, image, pitch, field(g, IMAGE_BYTES) // pitch, (w0 - left) * each, (w1 - w0) * each, pitch // V
        )
    for t in range(field(depth, D_TAPS)):
        d = d0 + t * field(depth, D_SPREAD)
        if d >= 0 and d < field(g, DEPTH):
            at = x + d * field(g, SRC_D) + h0 * field(g, SRC_H) + w0 * field(g, SRC_W)
            to = image + t * field(g, IMAGE_SLICE) + (h0 - top) * pitch + (w0 - left) * step
            _gather(
                T, M, L, SIZE, HELD, to, pitch, step, plain, at, field(g, SRC_H), field(g, SRC_W),
                field(g, FAN) * field(g, SRC_C), c_first, field(g, DIV), c_last - c_first, h1 - h0, w1 - w0,
            )  # fmt: skip


# ---- fprop and dgrad ------------------------------------------------------------------------------------------


@functools.cache
def _filter_kernel(T: type, M: type, TAPS: int, STEP: int, DIRECT: bool, BLOCK: int) -> Kernel:
    """A tile is a rectangle of results of one image, for a chunk of channels.

    Each row of results has a list of the rows under it, with the address of each one's first weight: rows outside the
    image are not on the list. Unless DIRECT, a chunk is one vector, and source and result are in scratch memory.

    Channels are counted in bytes of T. Shifted by HALF, of elements where pixels are read and written, or by HELD_HALF,
    of those of the tensors, they are bytes there.
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    X = M if DIRECT else T
    HALF, HELD_HALF = int(np.dtype(X).itemsize < SIZE), int(HELD < SIZE)
    V, GUARDED = L * SIZE, DIRECT or TAPS >= GUARDED_TAPS
    LINES = -(-BLOCK * STEP * (V >> HALF) // 64)  # of a later row, to fetch with each block and vector of channels

    @inline
    def pack_weights(packed, pitch, weights, taps, lane, channels):
        """packed[tap][channel] = weights[channel][tap], squares and vectors over their neighbours at the end."""
        c = 0
        while c < channels:
            c = max(0, min(c, channels - L))
            if taps >= L and channels >= L:
                i = 0
                while i < taps:
                    i = min(i, taps - L)
                    square = transpose(load_block(M, L, weights + c * lane + i * HELD, lane))
                    store_block(square, packed + i * pitch + c * SIZE, pitch)
                    i += L
            else:
                for i in range(taps):
                    for v in range(L):
                        at = weights + min(c + v, channels - 1) * lane + i * HELD
                        store_scalar(packed + i * pitch + (c + v) * SIZE, load_scalar(M, at))
            c += L

    @inline
    def filter_block(sums, rows, rows_end, x, w, phase, step_w, index, clip):
        """TAPS columns of the filter at once for each row, then those left over one by one.

        Where clip = (width, masks of the first of each kind) is given, a row is read at positions index + spread*i
        from 0 to width - 1 only.
        """
        tap, jump = field(phase, TAP), field(phase, JUMP)
        w_bytes, spread = field(phase, W_BYTES), field(phase, W_SPREAD)
        for f in range(field(phase, FULL)):
            mask = 0
            if clip is not None:
                mask = clip[1] if f == 0 else _inside(index, spread, clip[0])
            row = rows
            while row < rows_end:
                weights = load_block(T, TAPS, w + load_scalar(np.int64, row + 8), w_bytes)
                at = x + load_scalar(np.int64, row)
                if clip is None:
                    sums = slide(X, sums, weights, STEP, at, tap)
                else:
                    sums = slide_inside(X, sums, weights, STEP, at, tap, mask)
                row += 16
            x += TAPS * tap
            w += TAPS * w_bytes
            index += TAPS * spread
        for f in range(field(phase, SINGLE)):
            mask = 0
            if clip is not None:
                mask = clip[2] if f == 0 else _inside(index, step_w, clip[0])
            row = rows
            while row < rows_end:
                weight = load_block(T, 1, w + load_scalar(np.int64, row + 8), 0)
                at = x + load_scalar(np.int64, row)
                if clip is None:
                    sums = slide(X, sums, weight, 1, at, jump)
                else:
                    sums = slide_inside(X, sums, weight, 1, at, jump, mask)
                row += 16
            x += tap
            w += w_bytes
            index += spread
        return sums

    @inline
    def put(sums, y, y_step, count):
        """Where all results are stored that do not go through scratch memory; `_scatter` stores the others."""
        if count < len(sums):
            store_first(narrow(X, sums), y, y_step, count)
        else:
            store_block(narrow(X, sums), y, y_step)

    @inline
    def filter_channels(like, rows, rows_end, index, pixel, y, y_step, count, bytes_, bias, phase, step_w, width,
                        ahead, ahead_rows, row_bytes):  # fmt: skip
        """A block of as many pixels as `like` has vectors, `count` of them stored, for all channels of the chunk.

        A width is given where not all of the block's positions lie in a row.
        """
        x, c, full, single = index * pixel, 0, 0, 0
        if GUARDED and width > 0:
            spread = field(phase, W_SPREAD)
            full = _inside(index, spread, width)
            single = _inside(index + field(phase, FULL) * TAPS * spread, step_w, width)
        while c < bytes_:
            c = min(c, bytes_ - V)
            for r in range(ahead_rows):
                prefetch(LINES, ahead + r * row_bytes)
            ahead += 64 * LINES
            sums, at = fill_like(like, load(M, bias + (c >> HELD_HALF))), x + (c >> HALF)
            if not GUARDED or width == 0:
                sums = filter_block(sums, rows, rows_end, at, c, phase, step_w, index, None)
            else:
                sums = filter_block(sums, rows, rows_end, at, c, phase, step_w, index, (width, full, single))
            put(sums, y + (c >> HALF), y_step, count)
            c += V

    @inline
    def filter_pixel(rows, rows_end, x, y, w, bytes_, bias, taps, phase):
        """One pixel of which `taps` columns of the filter lie inside the row."""
        tap, w_bytes, c = field(phase, TAP), field(phase, W_BYTES), 0
        while c < bytes_:
            c = min(c, bytes_ - V)
            sums = load_block(M, 1, bias + (c >> HELD_HALF), 0)
            row = rows
            while row < rows_end:
                xs, ws = x + (c >> HALF) + load_scalar(np.int64, row), w + c + load_scalar(np.int64, row + 8)
                for _ in range(taps):
                    sums = multiply_add(X, sums, xs, ws)
                    xs += tap
                    ws += w_bytes
                row += 16
            put(sums, y + (c >> HALF), 0, 1)
            c += V

    @kernel
    def depthwise_filter(block):
        g, src, weights = argument(block, 0), argument(block, 1), argument(block, 2)
        dst, bias, scratch = argument(block, 3), argument(block, 4), argument(block, 5)
        number = thread_number(block, argument(block, 6))
        zeros = scratch + number * field(g, THREAD_BYTES)
        pitch, kept = field(g, PACK_PITCH), field(g, KEPT)
        image = zeros + field(g, ZEROS_BYTES)
        plain = image + field(g, IMAGE_BYTES)
        result = plain + field(g, PLAIN_BYTES)
        filters = result + 2 * field(g, RESULT_BYTES)
        names = filters + kept * field(g, PACK_BYTES)  # of the filters that are there, one for each place
        rows = zeros + field(g, THREAD_BYTES) - field(g, ROWS_BYTES)
        at = zeros
        while at < image:
            store(at, zero(T))
            at += V
        for i in range(kept):
            store_scalar(names + 8 * i, -1)
        spots, units, rects, chunks = field(g, SPOTS), field(g, UNITS), field(g, RECTS), field(g, CHUNKS)
        C, D, H, W = field(g, CHANNELS), field(g, DEPTH), field(g, HEIGHT), field(g, WIDTH)
        fan, filter_r, filter_s = field(g, FAN), field(g, FILTER_R), field(g, FILTER_S)
        taps = field(g, FILTER_T) * filter_r * filter_s
        step_h, step_w, every_h, every_w = field(g, STEP_H), field(g, STEP_W), field(g, EVERY_H), field(g, EVERY_W)
        pixel, dst_h, dst_w = field(g, SRC_W), field(g, DST_H), field(g, DST_W)
        if not DIRECT:
            pixel, dst_h, dst_w = field(g, PIXEL), field(g, RESULT_PITCH), field(g, PIXEL)

        beside = -1
        enter_share(block, 7, number)
        tile, last_tile, away = _next_tiles(block, 7, g, number, 0, 0, 0)
        while tile >= 0:
            chunk, spot = tile % chunks, tile // chunks
            if DIRECT:
                spot, n = spot % spots, spot // spots
            else:  # in nchw a piece of memory is a channel
                n = tile // (chunks * spots)
                chunk, spot = tile // spots % chunks, tile % spots
            if kept < chunks:
                chunk, n, spot = tile // (units * spots), tile // spots % units, tile % spots
            o, rect = spot // rects, g + field(g, RECTS_AT) + spot % rects * 32
            i0, j0 = field(rect, 0), field(rect, 2)
            i1, j1 = i0 + field(rect, 1), j0 + field(rect, 3)
            c_first = chunk * field(g, CHUNK)
            c_last = C if chunk == chunks - 1 else c_first + field(g, CHUNK)
            depth = g + field(g, D_AT) + o % field(g, EVERY_D) * (8 * DEPTH_WORDS)
            d0, d_taps = o // field(g, EVERY_D) * field(depth, D_STEP) + field(depth, D_ORIGIN), field(depth, D_TAPS)
            y_tile = dst + n * field(g, DST_N) + o * field(g, DST_D) + c_first * field(g, DST_C)
            for m in range(fan):
                bytes_ = max(V, (c_last - c_first) * SIZE)
                packed, name = filters + chunk % kept * field(g, PACK_BYTES), names + chunk % kept * 8
                if load_scalar(np.int64, name) != chunk * fan + m:
                    first_filter = weights + (c_first * fan + m) * taps * HELD
                    pack_weights(packed, pitch, first_filter, taps, fan * taps * HELD, c_last - c_first)
                    store_scalar(name, chunk * fan + m)
                first_bias = zeros
                if bias != 0 and m == 0:
                    first_bias = bias + c_first * HELD
                    if C < L:
                        first_bias = zeros + V
                        store(first_bias, narrow(M, load_clipped(M, bias + c_first * HELD, 0, c_last - c_first)))
                x_n = src + n * field(g, SRC_N) + c_first * field(g, SRC_C)
                y_n = y_tile
                top, left = i0 * step_h + field(g, ORIGIN_H), j0 * step_w + field(g, ORIGIN_W)
                if not DIRECT:
                    x = src + n * field(g, SRC_N) + (c_first // field(g, DIV) * fan + m) * field(g, SRC_C)
                    _gather_image(
                        T, M, L, SIZE, HELD, g, image, plain, x, depth, d0, top, left, i1 - i0, j1 - j0, c_first,
                        c_last, beside != j0,
                    )  # fmt: skip
                    beside = j0
                    y_n = result + (m > 0) * field(g, RESULT_BYTES) - every_h * i0 * dst_h - every_w * j0 * dst_w
                for i in range(i0, i1):
                    for p in range(field(g, PHASES)):
                        phase = g + field(g, PHASES_AT) + p * (8 * PHASE_WORDS)
                        if i >= field(phase, H_COUNT):
                            continue
                        rows_end = rows
                        for t in range(d_taps):
                            d = d0 + t * field(depth, D_SPREAD)
                            if d >= 0 and d < D:
                                for r in range(field(phase, H_TAPS)):
                                    h = i * step_h + field(phase, H_ORIGIN) + r * field(phase, H_SPREAD)
                                    if h >= 0 and h < H:
                                        at = field(depth, D_W_FIRST) + t * field(depth, D_W_STEP)
                                        at = at * filter_r + field(phase, H_W_FIRST) + r * field(phase, H_W_STEP)
                                        at = at * filter_s + field(phase, W_W_FIRST)
                                        row = x_n + d * field(g, SRC_D) + h * field(g, SRC_H)
                                        if not DIRECT:
                                            row = image + t * field(g, IMAGE_SLICE) - left * pixel
                                            row += (h - top) * field(g, IMAGE_PITCH)
                                        store_scalar(rows_end, row)
                                        store_scalar(rows_end + 8, packed + at * pitch)
                                        rows_end += 16
                        # While a row is filtered, what the next one needs besides comes into the second-level cache, in
                        # the order of memory. The order of the blocks would keep the hardware from guessing it (3x3 at
                        # 56x56 from memory: 2400 us against 3000). The phases of a dgrad share those rows.
                        ahead = ahead_rows = 0
                        if DIRECT and chunks == 1 and p == 0 and rows_end > rows:
                            ahead, ahead_rows = load_scalar(np.int64, rows_end - 16) + field(g, SRC_H), step_h
                        y_row = y_n + (field(phase, H_FIRST) + every_h * i) * dst_h + field(phase, W_FIRST) * dst_w
                        y_step, spread, origin = every_w * dst_w, field(phase, W_SPREAD), field(phase, W_ORIGIN)
                        inner, inner_end = field(phase, INNER), field(phase, INNER_END)
                        end = min(j1, field(phase, W_COUNT))
                        # Blocks, the last one over its neighbour; single pixels where a row is shorter than a block.
                        j = j0
                        while j < end:
                            if DIRECT and end < SMALL:
                                at = j * step_w + origin
                                s0 = 0 if at >= 0 else (spread - 1 - at) // spread
                                s1 = min(field(phase, W_TAPS), (W - 1 - at) // spread + 1)
                                x, w = (at + s0 * spread) * pixel, s0 * field(phase, W_BYTES)
                                y = y_row + j * y_step
                                filter_pixel(rows, rows_end, x, y, w, bytes_, first_bias, s1 - s0, phase)
                                j += 1
                            elif end - j > SMALL:
                                j = max(j0, min(j, end - BLOCK))
                                at = j * step_w + origin
                                width = 0 if j >= inner and j + BLOCK <= inner_end else W
                                filter_channels(
                                    fill(BLOCK, zero(T)), rows, rows_end, at, pixel, y_row + j * y_step, y_step,
                                    end - j, bytes_, first_bias, phase, step_w, width,
                                    ahead + at * pixel, ahead_rows, field(g, SRC_H),
                                )  # fmt: skip
                                j += BLOCK
                            else:
                                j = max(j0, min(j, end - SMALL))
                                at = j * step_w + origin
                                width = 0 if j >= inner and j + SMALL <= inner_end else W
                                filter_channels(
                                    fill(SMALL, zero(T)), rows, rows_end, at, pixel, y_row + j * y_step, y_step,
                                    end - j, bytes_, first_bias, phase, step_w, width, 0, 0, 0,
                                )  # fmt: skip
                                j += SMALL
                if not DIRECT and m > 0:
                    at, more = result, result + field(g, RESULT_BYTES)
                    while at < result + field(g, RESULT_BYTES):
                        store(at, load(T, at) + load(T, more))
                        at += V
                        more += V
            if not DIRECT:
                rows_out = min(field(g, OUT_H) - every_h * i0, every_h * (i1 - i0))
                cols_out = min(field(g, OUT_W) - every_w * j0, every_w * (j1 - j0))
                to = y_tile + every_h * i0 * field(g, DST_H) + every_w * j0 * field(g, DST_W)
                _scatter(
                    T, M, L, SIZE, HELD, to, field(g, DST_H), field(g, DST_W), field(g, DST_C), result,
                    field(g, RESULT_PITCH), pixel, c_last - c_first, rows_out, cols_out,
                )  # fmt: skip
            tile, last_tile, away = _next_tiles(block, 7, g, number, tile + 1, last_tile, away)

    return depthwise_filter


# ---- wgrad ----------------------------------------------------------------------------------------------------


@inline
def _write_gradient(T, M, L, HELD, wide, pitch, dw, c, C, taps):
    """dw[c + lane][tap] = wide[tap][lane], rounded, in squares, the last of which overlaps its neighbour if it can."""
    i = 0
    while i < taps:
        i = max(0, min(i, taps - L))
        square = narrow(M, transpose(load_narrow(T, L, wide + i * pitch, pitch, taps - i)))
        to = dw + (c * taps + i) * HELD
        if C >= L and taps >= L:
            store_block(square, to, taps * HELD)
        else:
            store_block_clipped(square, to, taps * HELD, min(L, C), taps - i)
        i += L


@functools.cache
def _wgrad_kernel(T: type, M: type, TAPS: int, STEP: int, DIRECT: bool, BLOCK: int) -> Kernel:
    """A task adds up one part of all rectangles of dy for a chunk of channels, in f64.

    Sums in f32 lie in memory, [tap][channel]; a block of dy is in registers while the taps of a filter row are taken
    up, fed and put back. The last vector of channels overlaps its neighbour in x and dy, but not in the sums.
    """
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize
    X = M if DIRECT else T
    HALF = int(np.dtype(X).itemsize < SIZE)  # shifts bytes of T to those of what is read
    V, GUARDED = L * SIZE, DIRECT or TAPS >= GUARDED_TAPS
    LINES = -(-BLOCK * STEP * (V >> HALF) // 64)

    @inline
    def add_block(dy, rows, rows_end, x, sums_at, phase, pitch, index, step_w, clip):
        """What a block of dy adds to the sums, by TAPS columns of the filter at once and then one by one.

        Where clip = (width, masks of the first of each kind) is given, a row is read at positions index + spread*i
        from 0 to width - 1 only.
        """
        tap, jump, spread = field(phase, TAP), field(phase, JUMP), field(phase, W_SPREAD)
        for f in range(field(phase, FULL)):
            mask = 0
            if clip is not None:
                mask = clip[1] if f == 0 else _inside(index, spread, clip[0])
            row = rows
            while row < rows_end:
                at, xs = sums_at + load_scalar(np.int64, row + 8), x + load_scalar(np.int64, row)
                if clip is None:
                    sums = slide_grad(X, load_block(T, TAPS, at, pitch), dy, STEP, xs, tap)
                else:
                    sums = slide_grad_inside(X, load_block(T, TAPS, at, pitch), dy, STEP, xs, tap, mask)
                store_block(sums, at, pitch)
                row += 16
            x += TAPS * tap
            sums_at += TAPS * pitch
            index += TAPS * spread
        for f in range(field(phase, SINGLE)):
            mask = 0
            if clip is not None:
                mask = clip[2] if f == 0 else _inside(index, step_w, clip[0])
            row = rows
            while row < rows_end:
                at, xs = sums_at + load_scalar(np.int64, row + 8), x + load_scalar(np.int64, row)
                if clip is None:
                    one = slide_grad(X, load_block(T, 1, at, 0), dy, 1, xs, jump)
                else:
                    one = slide_grad_inside(X, load_block(T, 1, at, 0), dy, 1, xs, jump, mask)
                store_block(one, at, 0)
                row += 16
            x += tap
            sums_at += pitch
            index += spread

    @inline
    def add_pixel(dy, rows, rows_end, x, sums_at, taps, tap, pitch):
        row = rows
        while row < rows_end:
            xs, at = x + load_scalar(np.int64, row), sums_at + load_scalar(np.int64, row + 8)
            for _ in range(taps):
                multiply_add_to(X, at, xs, dy)
                xs += tap
                at += pitch
            row += 16

    @kernel
    def depthwise_wgrad(block):
        g, src, dst, partials = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        dw = argument(block, 4)
        number = thread_number(block, argument(block, 5))
        sums = partials + field(g, PARTIALS_BYTES) + number * field(g, THREAD_BYTES)
        image = sums + field(g, PACK_BYTES)
        plain = image + field(g, IMAGE_BYTES)
        result = plain + field(g, PLAIN_BYTES)
        own = result + field(g, RESULT_BYTES)
        rows = sums + field(g, THREAD_BYTES) - field(g, ROWS_BYTES)
        at = sums
        while at < image:
            store(at, zero(T))
            at += V
        pitch, parts, chunks, rects = field(g, PACK_PITCH), field(g, PARTS), field(g, CHUNKS), field(g, RECTS)
        C, D, H, W, O = field(g, CHANNELS), field(g, DEPTH), field(g, HEIGHT), field(g, WIDTH), field(g, SPOTS)
        filter_r, filter_s = field(g, FILTER_R), field(g, FILTER_S)
        taps = field(g, FILTER_T) * filter_r * filter_s
        pixel, y_bytes, y_step = field(g, SRC_W), field(g, DST_H), field(g, DST_W)
        if not DIRECT:
            pixel, y_bytes, y_step = field(g, PIXEL), field(g, RESULT_PITCH), field(g, PIXEL)
        depth, phase = g + field(g, D_AT), g + field(g, PHASES_AT)
        step_h, step_w, origin, spread = field(g, STEP_H), field(g, STEP_W), field(g, ORIGIN_W), field(phase, W_SPREAD)
        inner, inner_end = field(phase, INNER), field(phase, INNER_END)

        beside = -1
        enter_share(block, 6, number)
        tile, last_tile, away = _next_tiles(block, 6, g, number, 0, 0, 0)
        while tile >= 0:
            part, slot = tile % parts, tile // parts * field(g, CHUNK)
            c_first, c_last = slot, (C if tile // parts == chunks - 1 else slot + field(g, CHUNK))
            bytes_ = max(V, (c_last - c_first) * SIZE)
            wide, wide_pitch = own, field(g, WIDE_PITCH)
            if parts > 1:
                wide, wide_pitch = partials + part * field(g, PARTIAL_BYTES) + slot * 8, field(g, PARTIAL_BYTES) // taps
            item, last = part * field(g, ITEMS) // parts, (part + 1) * field(g, ITEMS) // parts
            fresh, pixels = True, 0
            while item < last:
                rect = g + field(g, RECTS_AT) + item % rects * 32
                i0, j0 = field(rect, 0), field(rect, 2)
                i1, j1 = i0 + field(rect, 1), j0 + field(rect, 3)
                pixels += (i1 - i0) * (j1 - j0)
                o, n = item // rects % O, item // (rects * O)
                d0 = o * field(depth, D_STEP) + field(depth, D_ORIGIN)
                x_n = src + n * field(g, SRC_N) + c_first // field(g, DIV) * field(g, SRC_C)
                y_n = dst + n * field(g, DST_N) + c_first * field(g, DST_C) + o * field(g, DST_D)
                top, left = i0 * step_h + field(g, ORIGIN_H), j0 * step_w + origin
                if not DIRECT:
                    _gather_image(
                        T, M, L, SIZE, HELD, g, image, plain, x_n, depth, d0, top, left, i1 - i0, j1 - j0, c_first,
                        c_last, beside != j0,
                    )  # fmt: skip
                    beside = j0
                    y = y_n + i0 * field(g, DST_H) + j0 * field(g, DST_W)
                    _gather(
                        T, M, L, SIZE, HELD, result, y_bytes, pixel, plain, y, field(g, DST_H), field(g, DST_W),
                        field(g, DST_C), c_first, 1, c_last - c_first, i1 - i0, j1 - j0,
                    )  # fmt: skip
                    y_n = result - i0 * y_bytes - j0 * pixel
                for i in range(i0, i1):
                    rows_end = rows
                    for t in range(field(depth, D_TAPS)):
                        d = d0 + t * field(depth, D_SPREAD)
                        if d >= 0 and d < D:
                            for r in range(filter_r):
                                h = i * step_h + field(g, ORIGIN_H) + r * field(phase, H_SPREAD)
                                if h >= 0 and h < H:
                                    row = x_n + d * field(g, SRC_D) + h * field(g, SRC_H)
                                    if not DIRECT:
                                        row = image + t * field(g, IMAGE_SLICE) - left * pixel
                                        row += (h - top) * field(g, IMAGE_PITCH)
                                    store_scalar(rows_end, row)
                                    store_scalar(rows_end + 8, sums + (t * filter_r + r) * filter_s * pitch)
                                    rows_end += 16
                    ahead = ahead_rows = 0
                    if DIRECT and chunks == 1 and rows_end > rows:
                        ahead, ahead_rows = load_scalar(np.int64, rows_end - 16) + field(g, SRC_H), step_h
                    j = j0
                    while j < j1:
                        y, at = y_n + i * y_bytes + j * y_step, j * step_w + origin
                        x, c, s = at * pixel, 0, 0
                        within, full, single = True, 0, 0
                        if GUARDED:
                            within = j >= inner and j + (BLOCK if j1 - j >= BLOCK else SMALL) <= inner_end
                            if not within:
                                full = _inside(at, spread, W)
                                single = _inside(at + field(phase, FULL) * TAPS * spread, step_w, W)
                        if j1 - j >= BLOCK:
                            x_ahead, y_ahead = ahead + x, y + y_bytes
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                for r in range(ahead_rows):
                                    prefetch(LINES, x_ahead + r * field(g, SRC_H))
                                    prefetch(BLOCK, y_ahead)
                                x_ahead += 64 * LINES
                                y_ahead += 64 * BLOCK
                                dy, xs = load_block(X, BLOCK, y + (c >> HALF), y_step), x + (c >> HALF)
                                if not GUARDED or within:
                                    add_block(dy, rows, rows_end, xs, s, phase, pitch, at, step_w, None)
                                else:
                                    clip = (W, full, single)
                                    add_block(dy, rows, rows_end, xs, s, phase, pitch, at, step_w, clip)
                                c += V
                                s += V
                            j += BLOCK
                        elif j1 - j >= SMALL:
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                dy_few, xs = load_block(X, SMALL, y + (c >> HALF), y_step), x + (c >> HALF)
                                if not GUARDED or within:
                                    add_block(dy_few, rows, rows_end, xs, s, phase, pitch, at, step_w, None)
                                else:
                                    clip = (W, full, single)
                                    add_block(dy_few, rows, rows_end, xs, s, phase, pitch, at, step_w, clip)
                                c += V
                                s += V
                            j += SMALL
                        else:
                            s0 = 0 if at >= 0 else (spread - 1 - at) // spread
                            s1 = min(filter_s, (W - 1 - at) // spread + 1)
                            x += s0 * spread * pixel
                            s = s0 * pitch
                            while c + 4 * V <= bytes_:
                                dy4, xs = load_block(X, 4, y + (c >> HALF), V >> HALF), x + (c >> HALF)
                                add_pixel(dy4, rows, rows_end, xs, s, s1 - s0, field(phase, TAP), pitch)
                                c += 4 * V
                                s += 4 * V
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                dy1, xs = load_block(X, 1, y + (c >> HALF), 0), x + (c >> HALF)
                                add_pixel(dy1, rows, rows_end, xs, s, s1 - s0, field(phase, TAP), pitch)
                                c += V
                                s += V
                            j += 1
                item += 1
                if item < last:  # as many pixels as f32 may add up
                    rect = g + field(g, RECTS_AT) + item % rects * 32
                    if pixels + field(rect, 1) * field(rect, 3) <= WGRAD_PIXELS:
                        continue
                for i in range(taps):
                    at, to = sums + i * pitch, wide + i * wide_pitch
                    c = 0
                    while c < bytes_:
                        add_wide(to, load_block(T, 1, at, 0), fresh)
                        store(at, zero(T))
                        c += V
                        at += V
                        to += 8 * L
                fresh, pixels = False, 0
            if parts == 1:
                c = 0
                while c < bytes_:
                    channel = c_first + max(0, min(c // SIZE, (bytes_ - V) // SIZE))
                    _write_gradient(T, M, L, HELD, wide, wide_pitch, dw, channel, C, taps)
                    wide += 8 * L
                    c += V
            tile, last_tile, away = _next_tiles(block, 6, g, number, tile + 1, last_tile, away)

    return depthwise_wgrad


@functools.cache
def _finish_kernel(T: type, M: type) -> Kernel:
    """dw[channel][tap] = the sum over the parts of their [tap][channel], in the order of the parts."""
    L, HELD = lanes(T), np.dtype(M).itemsize

    @kernel
    def depthwise_finish(block):
        g, dw, partials = argument(block, 0), argument(block, 1), argument(block, 2)
        C, parts, partial = field(g, CHANNELS), field(g, PARTS), field(g, PARTIAL_BYTES)
        taps = field(g, FILTER_T) * field(g, FILTER_R) * field(g, FILTER_S)
        pitch = partial // taps
        group = next_tile(block)
        while group * L < C:
            for tap in range(taps):
                for part in range(1, parts):
                    at = partials + group * L * 8 + tap * pitch
                    merge_wide(L, at, at + part * partial)
            _write_gradient(T, M, L, HELD, partials + group * L * 8, pitch, dw, max(0, min(group * L, C - L)), C, taps)
            group = next_tile(block)

    return depthwise_finish
