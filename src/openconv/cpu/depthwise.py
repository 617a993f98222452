"""cpu.depthwise: every channel is filtered by itself, in vectors of columns (nchw) or of channels (nhwc)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from .runtime import Kernel, kernel, launch
from .simd import (
    LANE_BYTES,
    Vector,
    argument,
    broadcast,
    emit_clip_mask,
    emit_fma,
    emit_load,
    emit_masked_load,
    emit_masked_store,
    emit_offset,
    emit_rows,
    emit_splat,
    emit_store,
    fill,
    horizontal_sum,
    inline,
    is_block,
    lanes,
    load,
    load_clipped,
    load_scalar,
    next_tile,
    pack,
    store,
    store_clipped,
    store_scalar,
    thread_index,
    unpack,
    zero,
)

__all__ = ["Depthwise", "DepthwiseKnobs"]

_DTYPES = {"f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class DepthwiseKnobs(Knobs):
    """``panel``: nchw, bytes of padded input that a thread holds at a time; nhwc, bytes of weights."""

    panel: int


class Depthwise(Engine):
    """Each input channel has filters of its own, so that a thread takes one channel, or a vector of them, at a time.

        y[n,c,p,q] = bias[c] + sum over r,s of  w[c,r,s] * x[n, c, p*stride - pad + r*dil, q*stride - pad + s*dil]

    A convolution without sums over channels has nothing for a matrix product to reuse; what can be reused is what a
    row of outputs shares with the next. In nchw a thread copies a padded piece of one channel into its scratch memory,
    split by the phase of the stride, where any stride, dilation and padding is the same loop over vectors of columns.
    In nhwc a vector holds neighbouring channels of one pixel, and a block of pixels shares the weights. dgrad runs
    phase by phase of the stride, so that nothing is multiplied by inserted zeros; wgrad adds up partial sums in f64.

    Wins on everything depthwise but wide one-channel images, which cpu.filter2d reads without a copy.
    """

    name = "cpu.depthwise"
    takes_bias = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.groups != problem.c:
            yield f"groups are {problem.groups} for C = {problem.c}; a depthwise convolution needs G = C"
        if set(problem.dtypes) not in ({"f32"}, {"f64"}):
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted f32 or f64 for all three"
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted the same"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        unit = 2.0**-24 if problem.dtypes[0] == "f32" else 2.0**-53
        return Traits(accumulator=problem.dtypes[0], error_bound=(problem.gemm.k + 2) * unit)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        return _plan(problem, device.threads, knobs).workspace

    def knobs(self, problem: Problem, device: Device) -> Iterator[DepthwiseKnobs]:
        for panel in (16 << 10, 32 << 10):
            yield DepthwiseKnobs(panel)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        # Measured on two cores: 3x3 layers run at 0.65 of a copy's bandwidth in nchw, where rows are copied and planes
        # are short, and at 1.1 of it in nhwc, out of the cache; 7x7 ones at 0.42 of the matrix rate with AVX-512, whose
        # loads all cross cache lines, and at 0.6 of it with AVX2.
        size = DTYPE_BYTES[problem.dtypes[0]]
        first = problem.layouts[0] == "nchw"
        moving = problem.min_bytes / (device.bandwidth * (0.65 if first else 1.1))
        rate = device.flops * 4 / size * (0.42 if device.lanes >= 16 else 0.6)
        arithmetic = 2.0 * problem.macs / (rate * 0.62 if problem.direction == "wgrad" else rate)
        planes = problem.n * problem.c * 0.08e-6 / device.threads if first else 0.0
        return 8e-6 + max(moving, arithmetic) + planes

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        plan = _plan(problem, device.threads, knobs)
        compiled = plan.kernel()
        threads = plan.threads
        if plan.finish is not None:
            finish = plan.finish()

            def run_wgrad(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
                assert workspace is not None, "the scratch memory of the threads is the workspace"
                scratch = (workspace.data_ptr() + 63) & -64
                launch(compiled, (plan.table.data_ptr(), a.data_ptr(), b.data_ptr(), scratch), threads)
                launch(finish, (plan.table.data_ptr(), out.data_ptr(), scratch), threads)

            return run_wgrad

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
            assert workspace is not None, "the scratch memory of the threads is the workspace"
            scratch = (workspace.data_ptr() + 63) & -64
            first, y = 0 if bias is None else bias.data_ptr(), out.data_ptr()
            stream = int(plan.stream and y % LANE_BYTES == 0)
            launch(compiled, (plan.table.data_ptr(), a.data_ptr(), b.data_ptr(), y, first, scratch, stream), threads)

        return run


# ---- phases: every pass as plain correlations ------------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """One axis of a correlation, for i < count:

    out[first + every*i] = sum over j < taps of  w[w_first + w_step*j] * src[step*i + origin + spread*j]

    fprop is one phase. A dgrad of stride s is s of them, one for each remainder of the position in dx, each of which
    meets only the taps that fall on whole positions of dy; nothing is multiplied by inserted zeros.
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
        """The same outputs as `parts` phases: output f, f + parts, f + 2 * parts, ... in the f-th."""
        return [
            _Phase(
                self.first + self.every * f, self.every * parts, (self.count - f + parts - 1) // parts,
                self.step * parts, self.origin + self.step * f, self.spread, self.taps, self.w_first, self.w_step,
            )
            for f in range(min(parts, self.count))
        ]  # fmt: skip


def _phases(problem: Problem, axis: int) -> list[_Phase]:
    """The phases of an axis; an axis that the problem does not have (negative) has a single position and tap."""
    if axis < 0:
        return [_Phase(0, 1, 1, 1, 0, 1, 1, 0, 1)]
    size, taps, stride = problem.spatial[axis], problem.filter[axis], problem.stride[axis]
    low, dil, out = problem.padding[axis][0], problem.dilation[axis], problem.out[axis]
    if problem.direction != "dgrad":
        return [_Phase(0, 1, out, stride, -low, dil, taps, 0, 1)]
    shared = gcd(dil, stride)
    phases = []
    for first in range(min(stride, size)):
        count = (size - first + stride - 1) // stride
        hits = [t for t in range(taps) if (first + low - t * dil) % stride == 0]
        if hits:  # dx[first + stride*i] meets dy[i + (first + low - t*dil) / stride], the last tap first
            origin = (first + low - hits[-1] * dil) // stride
            phases.append(
                _Phase(first, stride, count, 1, origin, dil // shared, len(hits), hits[-1], -stride // shared)
            )
        else:
            phases.append(_Phase(first, stride, count, 1, 0, 1, 0, 0, 0))
    return phases


def _reach(phases: list[_Phase]) -> tuple[int, int]:
    """Where the source of output 0 begins, over all phases, and how many positions it covers."""
    used = [p for p in phases if p.taps]
    low = min((p.origin for p in used), default=0)
    return low, max((p.origin + (p.taps - 1) * p.spread for p in used), default=low) - low + 1


def _reuse(phases: list[_Phase]) -> tuple[list[_Phase], int, int]:
    """How a block of outputs shares what it loads along an axis: the phases to use, taps at once, step.

    Output j reads positions step*j + t for t < taps; that needs a stride that is a multiple of the dilation, which
    splitting the outputs into phases can arrange. Without it every tap goes by itself: taps = 1.
    """
    most = max(phases, key=lambda p: p.taps)
    parts = most.spread // gcd(most.spread, most.step)
    if parts > 1 and most.count >= 4 * parts:
        phases = [q for p in phases for q in p.split(parts)]
        most = max(phases, key=lambda p: p.taps)
    step = most.step // most.spread
    if most.step % most.spread or step >= most.taps:
        return phases, 1, 1
    taps = most.taps
    if taps > 7:  # so many weights and a block of 8 sums fill the 16 registers of AVX2
        taps = min(range(3, 8), key=lambda c: (most.taps // c + most.taps % c, -c))
    return phases, taps, step


# ---- plans: what the kernels read ------------------------------------------------------------------------------

# Words of a plan's table, in this order. Strides (SRC_*, DST_*) and pitches are in bytes.
(
    TILES, SPOTS, CHUNKS, CHUNK, UNITS,
    SRC_N, SRC_C, SRC_D, SRC_H, SRC_W, DST_N, DST_C, DST_D, DST_H, DST_W,
    CHANNELS, DEPTH, HEIGHT, WIDTH, OUT_W, DIV, FAN, FILTER_T, FILTER_R, FILTER_S,
    D_EVERY, D_AT, PHASES, PHASES_AT, THREAD_BYTES, STEP_H, STEP_W,
    RECTS, RECTS_AT, ORIGIN_H, ORIGIN_W, REACH_H, REACH_W, PITCH, SLICE, SEG, STEP_B, PANEL_BYTES, SIDE_PITCH,
    EVERY_W, WIDE,
    STRIPS, STRIP, GRID_H, PACK_PITCH, PACK_BYTES, SRC_PIXELS, DST_PIXELS, SRC_BYTES, ROWS_BYTES,
    ITEMS, PARTS, PARTIAL_BYTES, PARTIALS_BYTES, TAPS_AT, TAP_GROUPS, ACC_BYTES,
    WORDS,
) = range(63)  # fmt: skip

# Words of a phase: both axes of a correlation.
(
    H_FIRST, H_EVERY, H_COUNT, H_ORIGIN, H_SPREAD, H_TAPS, H_W_FIRST, H_W_STEP,
    W_FIRST, W_EVERY, W_COUNT, W_ORIGIN, W_SPREAD, W_TAPS, W_W_FIRST, W_W_STEP,
    FULL_AT, FULL, SINGLE_AT, SINGLE, TAP, JUMP, W_BYTES, LAST_W, INNER_LO, INNER_HI,
    PHASE_WORDS,
) = range(27)  # fmt: skip

BIG, SMALL = 8, 4
BORDER_TAPS = 5
PLANAR_WGRAD = 1 << 30
GROUP = 9
STREAM_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class _Plan:
    """The table a kernel reads, how to get the kernel, and what a call needs."""

    kernel: Callable[[], Kernel]
    table: Tensor
    threads: int
    workspace: int
    stream: bool = False
    finish: Callable[[], Kernel] | None = None


class _Table:
    """Int64 words: the named ones first, lists behind them."""

    def __init__(self) -> None:
        self.words = [0] * WORDS

    def put(self, values: list[int]) -> int:
        """Append a list; returns its offset in bytes."""
        at = 8 * len(self.words)
        self.words += values
        return at

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.words[globals()[name]] = value

    def tensor(self) -> Tensor:
        return torch.tensor(self.words, dtype=torch.int64)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _threads(problem: Problem, threads: int) -> int:
    return max(1, min(threads, problem.macs // 100_000))


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, threads: int, knobs: DepthwiseKnobs) -> _Plan:
    T = _DTYPES[problem.dtypes[0]]
    channels_last = problem.rank > 1 and problem.layouts[0] == "nhwc"
    wgrad = problem.direction == "wgrad"
    if problem.c == problem.k and problem.c >= lanes(T):
        if channels_last or _planar(problem, lanes(T)):
            plan = _plan_pixels_wgrad if wgrad else _plan_pixels
            return plan(problem, threads, knobs, T, planar=not channels_last)
    return (_plan_planes_wgrad if wgrad else _plan_planes)(problem, threads, knobs, T, channels_last)


def _planar(problem: Problem, L: int) -> bool:
    """Whether planes are small enough to be transposed into pixels and back."""
    pixels = prod(problem.spatial) + prod(problem.out)
    if problem.rank == 3:
        return False
    if problem.direction == "wgrad":
        return pixels <= PLANAR_WGRAD
    if problem.direction == "dgrad" and max(problem.stride) > 1:
        return pixels <= 512 * L
    return pixels <= 28 * L


def _common(problem: Problem, size: int, channels_last: bool) -> tuple[_Table, list[list[_Phase]]]:
    """What both plans share: sizes and strides of source and destination, depth phases."""
    rank = problem.rank
    table = _Table()
    axes = [_phases(problem, axis - (3 - rank)) for axis in range(3)]
    one = (1,) * (3 - rank)
    forward = problem.direction != "dgrad"
    ends = [(problem.c, *one, *problem.spatial), (problem.k, *one, *problem.out)]
    for name, (c, d, h, w) in zip(("SRC", "DST"), ends if forward else ends[::-1], strict=True):
        strides = (d * h * w * c, 1, h * w * c, w * c, c) if channels_last else (c * d * h * w, d * h * w, h * w, w, 1)
        table.set(**{f"{name}_{axis}": size * stride for axis, stride in zip("NCDHW", strides, strict=True)})
        if name == "SRC":
            table.set(DEPTH=d, HEIGHT=h, WIDTH=w)
        else:
            table.set(CHANNELS=c, OUT_W=w)
    filt = one + problem.filter
    multiplier = problem.k // problem.c
    table.set(
        DIV=multiplier if forward else 1, FAN=1 if forward else multiplier,
        FILTER_T=filt[0], FILTER_R=filt[1], FILTER_S=filt[2],
        D_EVERY=axes[0][0].every, STEP_H=axes[1][0].step, STEP_W=axes[2][0].step,
        D_AT=table.put([v for p in axes[0] for v in (p.step, p.origin, p.spread, p.taps, p.w_first, p.w_step)]),
    )  # fmt: skip
    return table, axes


def _phase_words(h: _Phase, w: _Phase) -> list[int]:
    words = [0] * PHASE_WORDS
    words[:16] = [
        h.first, h.every, h.count, h.origin, h.spread, h.taps, h.w_first, h.w_step,
        w.first, w.every, w.count, w.origin, w.spread, w.taps, w.w_first, w.w_step,
    ]  # fmt: skip
    return words


def _out_depth(problem: Problem) -> int:
    sizes = problem.spatial if problem.direction == "dgrad" else problem.out
    return sizes[0] if problem.rank == 3 else 1


def _plan_planes(problem: Problem, threads: int, knobs: DepthwiseKnobs, T: type, channels_last: bool) -> _Plan:
    size, L = np.dtype(T).itemsize, lanes(T)
    V = L * size
    table, (depth, axis_h, axis_w) = _common(problem, size, channels_last)
    wide = max(p.count for p in axis_h) < 4
    taps = step = 1
    if not wide:
        axis_h, taps, step = _reuse(axis_h)
    (origin_h, reach_h), (origin_w, reach_w) = _reach(axis_h), _reach(axis_w)
    step_h, step_w = axis_h[0].step, axis_w[0].step
    grid_h, grid_w = max(p.count for p in axis_h), max(p.count for p in axis_w)
    fan = problem.k // problem.c if problem.direction == "dgrad" else 1
    slices = max(1, fan * max(p.taps for p in depth))
    every_w = axis_w[0].every
    least = min(grid_h, 1 if wide else BIG)

    def row_of(cols: int) -> tuple[int, int]:
        seg = _up(-(-((cols - 1) * step_w + reach_w) // step_w), L)
        return seg, seg * step_w * size

    cols = grid_w
    while slices * ((least - 1) * step_h + reach_h) * row_of(cols)[1] > knobs.panel and cols > 8 * L:
        cols = _up(-(-cols // 2), L)
    seg, pitch = row_of(cols)
    rows = max(least, min(grid_h, (knobs.panel // (slices * pitch) - reach_h) // step_h + 1))
    rows = -(-grid_h // -(-grid_h // rows))
    if rows < grid_h and not wide:
        rows = min(grid_h, _up(rows, BIG))
    rects = [
        v for i in range(0, grid_h, rows) for j in range(0, grid_w, cols)
        for v in (i, min(rows, grid_h - i), j, min(cols, grid_w - j))
    ]  # fmt: skip
    in_rows = (rows - 1) * step_h + reach_h
    # A block reads up to BIG outputs beyond the last one and a vector up to L columns; the results are not stored.
    slack = BIG * (V if wide else step_h * pitch) + 2 * V
    panel_bytes = _up(slices * in_rows * pitch + slack, 64)
    direct = every_w == 1 and not channels_last
    side_pitch = 0 if direct else _up(cols, L) * size
    filt_s = problem.filter[-1]

    records = []
    for h in axis_h:
        for w in axis_w:
            words = _phase_words(h, w)

            def place(r: int, s: int, h: _Phase = h, w: _Phase = w) -> tuple[int, int]:
                row, col = h.origin - origin_h + r * h.spread, w.origin - origin_w + s * w.spread
                index = (h.w_first + h.w_step * r) * filt_s + w.w_first + w.w_step * s
                return row * pitch + (col % step_w * seg + col // step_w) * size, index * size

            whole = h.taps // taps * taps if taps > 1 else 0
            full = [v for s in range(w.taps) for r in range(0, whole, taps) for v in place(r, s)]
            single = [v for s in range(w.taps) for r in range(whole, h.taps) for v in place(r, s)]
            words[FULL_AT], words[FULL] = table.put(full), len(full) // 2
            words[SINGLE_AT], words[SINGLE] = table.put(single), len(single) // 2
            words[TAP], words[JUMP] = h.spread * pitch, V if wide else h.step * pitch
            words[W_BYTES] = h.w_step * filt_s * size
            words[LAST_W] = int(w is axis_w[-1])
            records.append(words)
    spots = _out_depth(problem) * (len(rects) // 4)
    channels = problem.c if problem.direction == "dgrad" else problem.k
    units = problem.n * channels
    threads = _threads(problem, threads)
    chunk = max(1, min(units // (4 * threads), units * spots // (16 * threads)) // spots)
    chunks = -(-units // chunk)
    thread_bytes = _up(panel_bytes + rows * every_w * side_pitch, 64)
    table.set(
        TILES=chunks * spots, SPOTS=spots, CHUNKS=chunks, CHUNK=chunk, UNITS=units,
        PHASES=len(records), PHASES_AT=table.put([v for r in records for v in r]),
        RECTS=len(rects) // 4, RECTS_AT=table.put(rects), ORIGIN_H=origin_h, ORIGIN_W=origin_w, REACH_H=reach_h,
        REACH_W=reach_w, STEP_H=step_h, PITCH=pitch, SLICE=in_rows * pitch, SEG=seg,
        STEP_B=step_h * pitch if wide else V, PANEL_BYTES=panel_bytes,
        SIDE_PITCH=side_pitch, EVERY_W=every_w, WIDE=int(wide), THREAD_BYTES=thread_bytes,
    )  # fmt: skip
    return _Plan(functools.partial(_planes_kernel, T, taps, step), table.tensor(), threads, thread_bytes * threads + 64)


def _plan_pixels(problem: Problem, threads: int, knobs: DepthwiseKnobs, T: type, planar: bool) -> _Plan:
    size, L = np.dtype(T).itemsize, lanes(T)
    V = L * size
    table, (depth, axis_h, axis_w) = _common(problem, size, channels_last=not planar)
    source_bytes = result_bytes = 0
    if planar:
        source, result = (problem.spatial, problem.out)[:: -1 if problem.direction == "dgrad" else 1]
        source_bytes, result_bytes = prod(source) * V, max(L, prod(result)) * V
        table.set(SRC_H=source[-1] * V, SRC_W=V, DST_H=result[-1] * V, DST_W=V, SRC_PIXELS=prod(source))
        table.set(DST_PIXELS=prod(result), SRC_BYTES=source_bytes)
    axis_w, taps, step = _reuse(axis_w)
    width = table.words[WIDTH]
    filt = (1,) * (3 - problem.rank) + problem.filter
    count = filt[0] * filt[1] * filt[2]
    C = problem.c
    groups = C // L
    chunk = max(1, min(groups, knobs.panel // (count * V)))
    grid_h = max(p.count for p in axis_h)
    grid_w = sum(p.count for p in axis_w)
    threads = _threads(problem, threads)
    out_d = _out_depth(problem)
    need = 8 * threads
    chunks = -(-groups // chunk)
    tiles = problem.n * out_d * chunks
    strips = max(1, min(grid_h, -(-need // tiles), grid_h * grid_w // 128))
    tiles *= strips
    if tiles < need:
        chunks = max(chunks, min(groups // 2, chunks * -(-need // tiles)))
    chunk = -(-groups // chunks)
    chunks = -(-groups // chunk)
    if planar:
        chunk, chunks, strips = 1, -(-C // L), 1
    strip = -(-grid_h // strips)
    strips = -(-grid_h // strip)
    pack_pitch = (chunk + 2) * V
    records = []
    for h in axis_h:
        for w in axis_w:
            words = _phase_words(h, w)
            words[FULL] = w.taps // taps if taps > 1 else 0
            words[SINGLE] = w.taps - words[FULL] * taps
            pixel = table.words[SRC_W]
            words[TAP], words[JUMP], words[W_BYTES] = w.spread * pixel, w.step * pixel, w.w_step * pack_pitch
            lo = -(w.origin // w.step) if w.origin < 0 else 0
            hi = (width - 1 - w.origin - (w.taps - 1) * w.spread) // w.step + 1
            words[INNER_LO] = min(max(lo, 0), w.count)
            words[INNER_HI] = min(max(hi, words[INNER_LO]), w.count)
            records.append(words)
    rows_bytes = 16 * (1 + max(p.taps for p in depth) * max(p.taps for p in axis_h))
    pack_bytes = count * pack_pitch
    table.set(ROWS_BYTES=rows_bytes)
    thread_bytes = _up(pack_bytes + pack_pitch + source_bytes + result_bytes + rows_bytes, 64)
    table.set(
        TILES=problem.n * out_d * strips * chunks, SPOTS=out_d * strips, CHUNKS=chunks, CHUNK=chunk * L,
        UNITS=problem.n, PHASES=len(records), PHASES_AT=table.put([v for r in records for v in r]),
        STEP_W=axis_w[0].step,
        STRIPS=strips, STRIP=strip, GRID_H=grid_h, PACK_PITCH=pack_pitch, PACK_BYTES=pack_bytes,
        THREAD_BYTES=thread_bytes,
    )  # fmt: skip
    stream = prod(problem.result_shape) * size >= STREAM_BYTES and C * size % LANE_BYTES == 0 and not planar
    kernel = functools.partial(_pixels_kernel, T, taps, step, planar)
    return _Plan(kernel, table.tensor(), threads, thread_bytes * threads + 64, stream)


_TASKS = 16  # of a wgrad, whatever the number of threads: the order of the sums must not depend on it


def _plan_pixels_wgrad(problem: Problem, threads: int, knobs: DepthwiseKnobs, T: type, planar: bool) -> _Plan:
    size, L = np.dtype(T).itemsize, lanes(T)
    V = L * size
    table, (depth, axis_h, axis_w) = _common(problem, size, channels_last=not planar)
    (d,), (h,), (w,) = depth, axis_h, axis_w
    filt = (1,) * (3 - problem.rank) + problem.filter
    count = prod(filt)
    step = w.step // w.spread if w.step % w.spread == 0 and w.step // w.spread < w.taps else 1
    taps = _reuse([w])[1] if w.step % w.spread == 0 else 1
    C = problem.c
    groups = -(-C // L)
    P, Q = h.count, w.count
    strip = max(1, min(P, -(-256 // Q)))
    source_bytes = result_bytes = 0
    if planar:
        in_rows = (strip - 1) * h.step + (h.taps - 1) * h.spread + 1
        width = problem.spatial[-1]
        height = problem.spatial[0] if problem.rank == 2 else 1
        source_bytes, result_bytes = min(in_rows, height) * width * V, strip * Q * V
        source_bytes, result_bytes = max(source_bytes, V * L), max(result_bytes, V * L)
        table.set(SRC_H=width * V, SRC_W=V, DST_H=Q * V, DST_W=V, SRC_PIXELS=height * width, DST_PIXELS=P * Q)
        table.set(SRC_BYTES=source_bytes)
    strips = -(-P // strip)
    items = problem.n * d.count * strips
    whole = C // L
    chunk = max(1, min(whole, knobs.panel // (count * V)))
    chunks = -(-whole // chunk)
    parts = max(1, min(items, -(-_TASKS // chunks)))
    if chunks * parts < _TASKS:
        chunks = max(chunks, min(whole // 2, -(-_TASKS // parts)))
    chunk = -(-whole // max(1, chunks))
    chunks = -(-whole // chunk)
    if planar:
        chunk, chunks = 1, groups
        parts = max(1, min(items, -(-_TASKS // chunks)))
    parts = -(-items // -(-items // parts))
    pitch = (chunk + 2) * V
    words = _phase_words(h, w)
    words[FULL] = w.taps // taps if taps > 1 else 0
    words[SINGLE] = w.taps - words[FULL] * taps
    pixel = table.words[SRC_W]
    words[TAP], words[JUMP], words[W_BYTES] = w.spread * pixel, w.step * pixel, pitch
    lo = -(w.origin // w.step) if w.origin < 0 else 0
    hi = (table.words[WIDTH] - 1 - w.origin - (w.taps - 1) * w.spread) // w.step + 1
    words[INNER_LO] = min(max(lo, 0), w.count)
    words[INNER_HI] = min(max(hi, words[INNER_LO]), w.count)
    rows_bytes = 16 * (1 + d.taps * h.taps)
    pack_bytes = count * pitch
    thread_bytes = _up(pack_bytes + source_bytes + result_bytes + rows_bytes, 64)
    partial = count * groups * L * 8
    threads = _threads(problem, threads)
    table.set(
        TILES=chunks * parts, CHUNKS=chunks, CHUNK=chunk * L, ITEMS=items, PARTS=parts, STRIPS=strips, STRIP=strip,
        SPOTS=d.count, GRID_H=P, PACK_PITCH=pitch, PACK_BYTES=pack_bytes, ROWS_BYTES=rows_bytes,
        PHASES_AT=table.put(words), PARTIAL_BYTES=partial, PARTIALS_BYTES=partial * parts, THREAD_BYTES=thread_bytes,
    )  # fmt: skip
    return _Plan(
        functools.partial(_pixels_wgrad_kernel, T, taps, step, planar), table.tensor(), threads,
        partial * parts + thread_bytes * threads + 64, finish=functools.partial(_pixels_finish_kernel, T),
    )  # fmt: skip


def _plan_planes_wgrad(problem: Problem, threads: int, knobs: DepthwiseKnobs, T: type, channels_last: bool) -> _Plan:
    size, L = np.dtype(T).itemsize, lanes(T)
    V = L * size
    table, ((d,), (h,), (w,)) = _common(problem, size, channels_last)
    reach_h, reach_w = (h.taps - 1) * h.spread + 1, (w.taps - 1) * w.spread + 1

    def row_of(cols: int) -> tuple[int, int]:
        seg = _up(-(-((cols - 1) * w.step + reach_w) // w.step), L)
        return seg, seg * w.step * size

    cols = w.count
    while d.taps * reach_h * row_of(cols)[1] > knobs.panel and cols > 8 * L:
        cols = _up(-(-cols // 2), L)
    seg, pitch = row_of(cols)
    rows = max(1, min(h.count, (knobs.panel // (d.taps * pitch) - reach_h) // h.step + 1))
    rows = -(-h.count // -(-h.count // rows))
    rects = [
        v for i in range(0, h.count, rows) for j in range(0, w.count, cols)
        for v in (i, min(rows, h.count - i), j, min(cols, w.count - j))
    ]  # fmt: skip
    in_rows = (rows - 1) * h.step + reach_h
    places = [
        t * in_rows * pitch + r * h.spread * pitch + (s * w.spread % w.step * seg + s * w.spread // w.step) * size
        for t in range(d.taps) for r in range(h.taps) for s in range(w.taps)
    ]  # fmt: skip
    count = len(places)
    tap_groups = -(-count // GROUP)
    places += places[-1:] * (tap_groups * GROUP - count)
    panel_bytes = _up(d.taps * in_rows * pitch + 2 * V, 64)
    side_pitch = _up(cols, L) * size if channels_last else 0
    items = problem.n * d.count * (len(rects) // 4)
    parts = max(1, min(items, -(-_TASKS // problem.k)))
    parts = -(-items // -(-items // parts))
    acc_bytes = tap_groups * GROUP * L * 8
    thread_bytes = _up(panel_bytes + rows * side_pitch + acc_bytes, 64)
    partial = problem.k * count * 8
    threads = _threads(problem, threads)
    table.set(
        TILES=problem.k * parts, ITEMS=items, PARTS=parts, SPOTS=d.count, RECTS=len(rects) // 4,
        RECTS_AT=table.put(rects), ORIGIN_H=h.origin, ORIGIN_W=w.origin, REACH_H=reach_h, PITCH=pitch,
        SLICE=in_rows * pitch, SEG=seg, PANEL_BYTES=panel_bytes, SIDE_PITCH=side_pitch, ACC_BYTES=acc_bytes,
        TAPS_AT=table.put(places), TAP_GROUPS=tap_groups, PARTIAL_BYTES=partial, PARTIALS_BYTES=partial * parts,
        THREAD_BYTES=thread_bytes,
    )  # fmt: skip
    return _Plan(
        functools.partial(_planes_wgrad_kernel, T), table.tensor(), threads,
        _up(partial * parts, 64) + thread_bytes * threads + 64, finish=functools.partial(_planes_finish_kernel, T),
    )  # fmt: skip


# ---- register blocks ----------------------------------------------------------------------------------------------

_I64 = ir.IntType(64)


def _emit_taps(dtype, count, value_of):
    """Signature and code generator of a tuple of `count` vectors, the i-th from value_of(builder, kind, place_i)."""
    if not isinstance(dtype, types.NumberClass) or not isinstance(count, types.IntegerLiteral):
        return None
    element = dtype.instance_type
    vector = Vector(element, LANE_BYTES * 8 // element.bitwidth)
    block = types.UniTuple(vector, count.literal_value)

    def codegen(context, builder, signature, args):
        _, _, address, stride = args
        kind = context.get_value_type(vector)
        return pack(builder, [value_of(builder, kind, p) for p in emit_rows(builder, address, stride, block.count)])

    return block(dtype, count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_taps(typingctx, dtype, count, address, stride):
    """load_taps(T, n, address, stride) -> tuple: the i-th vector lies at address + i * stride."""
    return _emit_taps(dtype, count, emit_load)


@intrinsic(prefer_literal=True)
def broadcast_taps(typingctx, dtype, count, address, stride):
    """broadcast_taps(T, n, address, stride) -> tuple: the i-th vector holds the scalar at address + i * stride."""

    def value_of(builder, kind, place):
        return emit_splat(builder, emit_load(builder, kind.element, place), kind.count)

    return _emit_taps(dtype, count, value_of)


@intrinsic(prefer_literal=True)
def slide(typingctx, sums, weights, step, address, pitch):
    """slide(sums, weights, step, address, pitch) -> sums[j] + weights[t] * x[step*j + t], summed over t."""
    if not (is_block(sums) and is_block(weights) and isinstance(step, types.IntegerLiteral)):
        return None
    every = step.literal_value

    def codegen(context, builder, signature, args):
        sums_, weights_, _, address_, pitch_ = args
        totals, taps = unpack(builder, sums_), unpack(builder, weights_)
        places = emit_rows(builder, address_, pitch_, (len(totals) - 1) * every + len(taps))
        for i, place in enumerate(places):
            hits = [t for t in range(len(taps)) if (i - t) % every == 0 and 0 <= (i - t) // every < len(totals)]
            if hits:
                x = emit_load(builder, totals[0].type, place)
                for t in hits:
                    j = (i - t) // every
                    totals[j] = emit_fma(builder, x, taps[t], totals[j])
        return pack(builder, totals)

    return sums(sums, weights, step, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def slide_clipped(typingctx, sums, weights, step, address, pitch, index, spread, width, zeros):
    """What `slide` does, at the border: x[i] is a vector of zeros unless 0 <= index + spread*i < width."""
    if not (is_block(sums) and is_block(weights) and isinstance(step, types.IntegerLiteral)):
        return None
    every = step.literal_value

    def codegen(context, builder, signature, args):
        sums_, weights_, _, address_, pitch_, index_, spread_, width_, zeros_ = args
        totals, taps = unpack(builder, sums_), unpack(builder, weights_)
        for i in range((len(totals) - 1) * every + len(taps)):
            hits = [t for t in range(len(taps)) if (i - t) % every == 0 and 0 <= (i - t) // every < len(totals)]
            if hits:
                inside = builder.icmp_unsigned("<", emit_offset(builder, index_, i, spread_), width_)
                place = builder.select(inside, emit_offset(builder, address_, i, pitch_), zeros_)
                x = emit_load(builder, totals[0].type, place)
                for t in hits:
                    j = (i - t) // every
                    totals[j] = emit_fma(builder, x, taps[t], totals[j])
        return pack(builder, totals)

    return sums(sums, weights, step, *[types.int64] * 6), codegen


@intrinsic
def store_block(typingctx, sums, address, pitch):
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, address_, pitch_ = args
        totals = unpack(builder, sums_)
        for place, total in zip(emit_rows(builder, address_, pitch_, len(totals)), totals, strict=True):
            emit_store(builder, place, total)
        return context.get_dummy_value()

    return types.void(sums, types.int64, types.int64), codegen


@intrinsic
def store_block_clipped(typingctx, sums, address, pitch, count, limit, narrowing):
    """Vectors j < count, and of each its first limit - j * narrowing lanes."""
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, address_, pitch_, count_, limit_, narrowing_ = args
        totals = unpack(builder, sums_)
        for j, total in enumerate(totals):
            at = ir.Constant(_I64, j)
            width = builder.sub(limit_, builder.mul(narrowing_, at))
            inside = builder.and_(
                builder.icmp_signed("<", at, count_), builder.icmp_signed(">", width, ir.Constant(_I64, 0))
            )
            lanes_ = builder.select(inside, width, ir.Constant(_I64, 0))
            mask = emit_clip_mask(builder, ir.Constant(_I64, 0), lanes_, sums.dtype.count)
            emit_masked_store(builder, emit_offset(builder, address_, j, pitch_), total, mask)
        return context.get_dummy_value()

    return types.void(sums, *[types.int64] * 5), codegen


@intrinsic(prefer_literal=True)
def pick(typingctx, low, high, first, step):
    """Lanes first, first + step, ... of the two vectors behind each other."""
    f, s = first.literal_value, step.literal_value

    def codegen(context, builder, signature, args):
        n = low.count
        at = ir.Constant(ir.VectorType(ir.IntType(32), n), [f + s * i for i in range(n)])
        return builder.shuffle_vector(args[0], args[1], at)

    return low(low, high, first, step), codegen


@intrinsic(prefer_literal=True)
def weave(typingctx, even, odd, half):
    """even[0], odd[0], even[1], odd[1], ...: half 0 or 1 of it."""
    h = half.literal_value

    def codegen(context, builder, signature, args):
        n = even.count
        at = [(h * n // 2 + i // 2) + (n if i % 2 else 0) for i in range(n)]
        return builder.shuffle_vector(args[0], args[1], ir.Constant(ir.VectorType(ir.IntType(32), n), at))

    return even(even, odd, half), codegen


@intrinsic(prefer_literal=True)
def load_taps_clipped(typingctx, dtype, count, address, stride, limit):
    """load_taps, with the first `limit` lanes of each vector only; zero in the others."""
    if not isinstance(dtype, types.NumberClass) or not isinstance(count, types.IntegerLiteral):
        return None
    element = dtype.instance_type
    vector = Vector(element, LANE_BYTES * 8 // element.bitwidth)
    block = types.UniTuple(vector, count.literal_value)

    def codegen(context, builder, signature, args):
        _, _, address_, stride_, limit_ = args
        kind = context.get_value_type(vector)
        mask = emit_clip_mask(builder, ir.Constant(_I64, 0), limit_, vector.count)
        places = emit_rows(builder, address_, stride_, block.count)
        return pack(builder, [emit_masked_load(builder, kind, p, mask) for p in places])

    return block(dtype, count, types.int64, types.int64, types.int64), codegen


@intrinsic
def transpose(typingctx, block):
    """Lane i of vector j becomes lane j of vector i, in log2(lanes) rounds of interleaving halves."""
    if not is_block(block) or block.count != block.dtype.count:
        return None

    def codegen(context, builder, signature, args):
        rows, count = unpack(builder, args[0]), block.count
        index = ir.VectorType(ir.IntType(32), count)
        halves = [
            ir.Constant(index, [half + i // 2 + (count if i % 2 else 0) for i in range(count)])
            for half in (0, count // 2)
        ]
        for _ in range(count.bit_length() - 1):
            rows = [
                builder.shuffle_vector(rows[i], rows[i + count // 2], half)
                for i in range(count // 2) for half in halves
            ]  # fmt: skip
        return pack(builder, rows)

    return block(block), codegen


@intrinsic
def load_transposed(typingctx, dtype, address, pitch):
    """load_transposed(T, address, pitch) -> tuple: lane i of vector j is element j of the row at address + i * pitch.

    As many rows as lanes. Pieces of 16 bytes are put together while loading, which leaves the small square within each
    piece to be turned by shuffles: half as many as it takes to turn the vectors themselves.
    """
    if not isinstance(dtype, types.NumberClass):
        return None
    element = dtype.instance_type
    vector = Vector(element, LANE_BYTES * 8 // element.bitwidth)
    block = types.UniTuple(vector, vector.count)
    piece = 128 // element.bitwidth

    def codegen(context, builder, signature, args):
        _, address_, pitch_ = args
        count, scalar = vector.count, context.get_value_type(element)
        small = ir.VectorType(scalar, piece)
        rows = emit_rows(builder, address_, pitch_, count)

        def pick(a, b, lanes_):
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes_)), lanes_))

        def join(parts):
            while len(parts) > 1:
                width = parts[0].type.count
                parts = [pick(a, b, list(range(2 * width))) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        def weave(a, b, width, half):
            """Half of a and b interleaved by `width` elements, within each piece."""
            lanes_ = []
            for start in range(0, count, piece):
                run = [start + half * piece // 2 + i for i in range(piece // 2)]
                for at in range(0, piece // 2, width):
                    lanes_ += run[at : at + width] + [count + i for i in run[at : at + width]]
            return pick(a, b, lanes_)

        result = []
        for column in range(0, count, piece):
            at = column * element.bitwidth // 8
            square = [
                join([emit_load(builder, small, emit_offset(builder, rows[i], 1, at) if at else rows[i])
                      for i in range(k, count, piece)])
                for k in range(piece)
            ]  # fmt: skip
            if piece == 4:
                pairs = [weave(square[i], square[i + 1], 1, half) for i in (0, 2) for half in (0, 1)]
                result += [weave(pairs[h], pairs[h + 2], 2, half) for h in (0, 1) for half in (0, 1)]
            else:
                result += [weave(square[0], square[1], 1, half) for half in (0, 1)]
        return pack(builder, result)

    return block(dtype, types.int64, types.int64), codegen


@intrinsic
def multiply_add(typingctx, sums, x, weights):
    """multiply_add(sums, x, weights) -> sums[i] + x[i] * weights[i], vectors behind each other in memory."""
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, x_, weights_ = args
        totals, width = unpack(builder, sums_), sums.dtype.count * sums.dtype.dtype.bitwidth // 8
        for i, total in enumerate(totals):
            value = emit_load(builder, total.type, emit_offset(builder, x_, i, width))
            weight = emit_load(builder, total.type, emit_offset(builder, weights_, i, width))
            totals[i] = emit_fma(builder, value, weight, total)
        return pack(builder, totals)

    return sums(sums, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def slide_grad(typingctx, sums, values, step, address, pitch):
    """slide_grad(sums, dy, step, address, pitch) -> sums[t] + dy[j] * x[step*j + t], summed over j."""
    if not (is_block(sums) and is_block(values) and isinstance(step, types.IntegerLiteral)):
        return None
    every = step.literal_value

    def codegen(context, builder, signature, args):
        sums_, values_, _, address_, pitch_ = args
        totals, dys = unpack(builder, sums_), unpack(builder, values_)
        places = emit_rows(builder, address_, pitch_, (len(dys) - 1) * every + len(totals))
        for i, place in enumerate(places):
            hits = [t for t in range(len(totals)) if (i - t) % every == 0 and 0 <= (i - t) // every < len(dys)]
            if hits:
                x = emit_load(builder, totals[0].type, place)
                for t in hits:
                    totals[t] = emit_fma(builder, x, dys[(i - t) // every], totals[t])
        return pack(builder, totals)

    return sums(sums, values, step, types.int64, types.int64), codegen


@intrinsic
def update(typingctx, sums, x, values):
    """update(sums, x, dy): the vectors in memory at `sums` += those at `x` * dy, one behind the other."""
    if not is_block(values):
        return None

    def codegen(context, builder, signature, args):
        sums_, x_, values_ = args
        width = values.dtype.count * values.dtype.dtype.bitwidth // 8
        for i, value in enumerate(unpack(builder, values_)):
            place = emit_offset(builder, sums_, i, width)
            factor = emit_load(builder, value.type, emit_offset(builder, x_, i, width))
            emit_store(builder, place, emit_fma(builder, factor, value, emit_load(builder, value.type, place)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, values), codegen


@intrinsic
def gather_add(typingctx, sums, address, offsets, value, limit):
    """gather_add(sums, address, offsets, dy, limit) -> sums[i] + x[i] * dy, x[i] the first `limit` lanes at
    address + offsets[i]; the lanes behind are not read."""
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, address_, offsets_, value_, limit_ = args
        totals = unpack(builder, sums_)
        mask = emit_clip_mask(builder, ir.Constant(_I64, 0), limit_, sums.dtype.count)
        for i, total in enumerate(totals):
            place = builder.add(address_, emit_load(builder, _I64, emit_offset(builder, offsets_, i, 8)))
            x = emit_masked_load(builder, total.type, place, mask)
            totals[i] = emit_fma(builder, x, value_, total)
        return pack(builder, totals)

    return sums(sums, types.int64, types.int64, value, types.int64), codegen


@intrinsic
def add_wide(typingctx, address, value, fresh):
    """add_wide(address, vector, fresh): the f64 numbers at the address, one for each lane, += the vector; or = it."""
    if not isinstance(value, Vector):
        return None

    def codegen(context, builder, signature, args):
        address_, value_, fresh_ = args
        kind = ir.VectorType(ir.DoubleType(), value.count)
        wide = value_ if value_.type == kind else builder.fpext(value_, kind)
        total = builder.fadd(emit_load(builder, kind, address_), wide)
        emit_store(builder, address_, builder.select(fresh_, wide, total))
        return context.get_dummy_value()

    return types.void(types.int64, value, types.boolean), codegen


@intrinsic
def add_block_wide(typingctx, address, block, fresh):
    """add_wide for each vector of a block, one behind the other."""
    if not is_block(block):
        return None

    def codegen(context, builder, signature, args):
        address_, block_, fresh_ = args
        kind = ir.VectorType(ir.DoubleType(), block.dtype.count)
        for i, value in enumerate(unpack(builder, block_)):
            place = emit_offset(builder, address_, i, 8 * block.dtype.count)
            wide = value if value.type == kind else builder.fpext(value, kind)
            total = builder.fadd(emit_load(builder, kind, place), wide)
            emit_store(builder, place, builder.select(fresh_, wide, total))
        return context.get_dummy_value()

    return types.void(types.int64, block, types.boolean), codegen


@intrinsic(prefer_literal=True)
def merge_wide(typingctx, count, address, other):
    """merge_wide(n, address, other): n f64 numbers += n others."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        _, address_, other_ = args
        kind = ir.VectorType(ir.DoubleType(), count.literal_value)
        total = builder.fadd(emit_load(builder, kind, address_), emit_load(builder, kind, other_))
        emit_store(builder, address_, total)
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_narrow(typingctx, dtype, count, address, pitch, rows):
    """load_narrow(T, n, address, pitch, rows) -> tuple: f64 numbers of row i < n rounded to T, those of the last one
    in place of rows that are not there."""
    if not isinstance(dtype, types.NumberClass) or not isinstance(count, types.IntegerLiteral):
        return None
    element = dtype.instance_type
    vector = Vector(element, LANE_BYTES * 8 // element.bitwidth)
    block = types.UniTuple(vector, count.literal_value)

    def codegen(context, builder, signature, args):
        _, _, address_, pitch_, rows_ = args
        kind, wide_kind = context.get_value_type(vector), ir.VectorType(ir.DoubleType(), vector.count)
        values = []
        for i in range(block.count):
            inside = builder.icmp_signed("<", ir.Constant(_I64, i), rows_)
            row = builder.select(inside, ir.Constant(_I64, i), builder.sub(rows_, ir.Constant(_I64, 1)))
            wide = emit_load(builder, wide_kind, builder.add(address_, builder.mul(row, pitch_)))
            values.append(wide if wide_kind == kind else builder.fptrunc(wide, kind))
        return pack(builder, values)

    return block(dtype, count, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_stream(typingctx, sums, address, pitch):
    """store_block past the caches: whole aligned lines that nobody reads soon need not be fetched first."""
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, address_, pitch_ = args
        totals = unpack(builder, sums_)
        for place, total in zip(emit_rows(builder, address_, pitch_, len(totals)), totals, strict=True):
            pointer = builder.inttoptr(place, total.type.as_pointer())
            instr = builder.store(total, pointer, align=LANE_BYTES)
            instr.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(sums, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def prefetch(typingctx, count, address):
    """prefetch(n, address): n cache lines, one behind the other, on their way to the second-level cache."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, second_level, data = (ir.Constant(word, v) for v in (0, 2, 1))
        for i in range(count.literal_value):
            place = builder.inttoptr(emit_offset(builder, args[1], i, 64), pointer)
            builder.call(function, [place, read, second_level, data])
        return context.get_dummy_value()

    return types.void(count, types.int64), codegen


# ---- nchw: planes -------------------------------------------------------------------------------------------------


@inline
def field(g, index):
    """Word `index` of a table."""
    return load_scalar(np.int64, g + 8 * index)


@inline
def _zero_rows(T, V, to, pitch, first, last, bytes_):
    """Rows first to last - 1 of the panel: zero."""
    row = to + first * pitch
    for _ in range(first, last):
        at = row
        while at < row + bytes_:
            store(at, zero(T))
            at += V
        row += pitch


@inline
def _copy_rows(T, L, SIZE, to, pitch, src, row_bytes, pixel, rows, first, width, step, seg):
    """Image rows into panel rows: columns first, first + 1, ..., split into segments by their remainder modulo step."""
    V = L * SIZE
    v = 0
    if step == 1 and pixel == SIZE:
        last = min(seg, (width - first) // L * L)
        for _ in range(rows):
            v = 0
            while v < seg and first + v < 0:
                store(to + v * SIZE, load_clipped(T, src, first + v, width))
                v += L
            while v < last:
                store(to + v * SIZE, load(T, src + (first + v) * SIZE))
                v += L
            while v < seg:
                store(to + v * SIZE, load_clipped(T, src, first + v, width))
                v += L
            src += row_bytes
            to += pitch
    elif step == 2 and pixel == SIZE:
        while v < seg:
            at, x, y = first + 2 * v, src, to + v * SIZE
            if at >= 0 and at + 2 * L <= width:
                x += at * SIZE
                for _ in range(rows):
                    low, high = load(T, x), load(T, x + V)
                    store(y, pick(low, high, 0, 2))
                    store(y + seg * SIZE, pick(low, high, 1, 2))
                    x += row_bytes
                    y += pitch
            else:
                for _ in range(rows):
                    low, high = load_clipped(T, x, at, width), load_clipped(T, x, at + L, width)
                    store(y, pick(low, high, 0, 2))
                    store(y + seg * SIZE, pick(low, high, 1, 2))
                    x += row_bytes
                    y += pitch
            v += L
    else:
        for r in range(rows):
            for i in range(seg):
                for f in range(step):
                    at = first + i * step + f
                    value = T(0)
                    if at >= 0 and at < width:
                        value = load_scalar(T, src + r * row_bytes + at * pixel)
                    store_scalar(to + r * pitch + (f * seg + i) * SIZE, value)


@inline
def _copy_panel(T, L, SIZE, g, panel, src, c, d0, d_spread, d_taps, h0, rows, w0, fresh):
    """The piece of a source channel that a tile needs, with zeros around it: slices (m, t), rows, columns.

    Zeros above, below and behind stay in place as long as the tile is the same, so that only a fresh one writes them.
    """
    D, H, W = field(g, DEPTH), field(g, HEIGHT), field(g, WIDTH)
    pitch, slice_ = field(g, PITCH), field(g, SLICE)
    fan, row_bytes = field(g, FAN), field(g, SRC_H)
    top = min(max(-h0, 0), rows)
    bottom = min(max(H - h0, top), rows)
    to = panel
    for m in range(fan):
        for t in range(d_taps):
            d = d0 + t * d_spread
            if d < 0 or d >= D:
                if fresh:
                    _zero_rows(T, L * SIZE, to, pitch, 0, rows, pitch)
            else:
                if fresh:
                    _zero_rows(T, L * SIZE, to, pitch, 0, top, pitch)
                    _zero_rows(T, L * SIZE, to, pitch, bottom, rows, pitch)
                plane = src + (c + m) * field(g, SRC_C) + d * field(g, SRC_D) + (h0 + top) * row_bytes
                _copy_rows(
                    T, L, SIZE, to + top * pitch, pitch, plane, row_bytes, field(g, SRC_W), bottom - top, w0, W,
                    field(g, STEP_W), field(g, SEG),
                )  # fmt: skip
            to += slice_


@inline
def _scatter_rows(T, L, SIZE, to, row_bytes, pixel, side, side_pitch, every, rows, total):
    """Rows of `every` segments, column i in segment i % every, to rows of memory."""
    for _ in range(rows):
        if every == 2 and pixel == SIZE:
            for v in range(0, side_pitch // SIZE, L):
                even, odd = load(T, side + v * SIZE), load(T, side + side_pitch + v * SIZE)
                store_clipped(to, 2 * v, total, weave(even, odd, 0))
                store_clipped(to, 2 * v + L, total, weave(even, odd, 1))
        else:
            for i in range(total):
                value = load_scalar(T, side + i % every * side_pitch + i // every * SIZE)
                store_scalar(to + i * pixel, value)
        side += every * side_pitch
        to += row_bytes


@functools.cache
def _planes_kernel(T: type, TAPS: int, STEP: int) -> Kernel:
    """y = bias + filter over x, one channel at a time, vectors along W."""
    L, SIZE = lanes(T), np.dtype(T).itemsize
    V = L * SIZE

    @inline
    def filter_block(sums, x, w, full, full_end, single, single_end, tap, jump, w_bytes):
        while full < full_end:
            weights = broadcast_taps(T, TAPS, w + load_scalar(np.int64, full + 8), w_bytes)
            sums = slide(sums, weights, STEP, x + load_scalar(np.int64, full), tap)
            full += 16
        while single < single_end:
            weight = broadcast_taps(T, 1, w + load_scalar(np.int64, single + 8), 0)
            sums = slide(sums, weight, 1, x + load_scalar(np.int64, single), jump)
            single += 16
        return sums

    @kernel
    def depthwise_planes(block):
        g, src, weights = argument(block, 0), argument(block, 1), argument(block, 2)
        dst, bias, scratch = argument(block, 3), argument(block, 4), argument(block, 5)
        panel = scratch + thread_index(block) * field(g, THREAD_BYTES)
        side = panel + field(g, PANEL_BYTES)
        at = panel
        while at < side:  # what lies behind the last row is read, though not used: it should not be denormal
            store(at, zero(T))
            at += V
        spots, rects, chunk = field(g, SPOTS), field(g, RECTS), field(g, CHUNK)
        C, fan, div = field(g, CHANNELS), field(g, FAN), field(g, DIV)
        filter_t, plane_taps = field(g, FILTER_T), field(g, FILTER_R) * field(g, FILTER_S)
        step_h, step_w, step_b, slice_ = field(g, STEP_H), field(g, STEP_W), field(g, STEP_B), field(g, SLICE)
        side_pitch, every_w, wide = field(g, SIDE_PITCH), field(g, EVERY_W), field(g, WIDE)
        dst_h, dst_w = field(g, DST_H), field(g, DST_W)
        phases, d_every = field(g, PHASES), field(g, D_EVERY)

        tile = next_tile(block)
        while tile < field(g, TILES):
            spot, unit = tile % spots, tile // spots * chunk
            o = spot // rects
            rect = g + field(g, RECTS_AT) + (spot % rects) * 32
            i0, rows, j0, cols = field(rect, 0), field(rect, 1), field(rect, 2), field(rect, 3)
            depth = g + field(g, D_AT) + o % d_every * 48
            d0 = o // d_every * field(depth, 0) + field(depth, 1)
            d_spread, d_taps, d_first, d_step = field(depth, 2), field(depth, 3), field(depth, 4), field(depth, 5)
            h0, w0 = i0 * step_h + field(g, ORIGIN_H), j0 * step_w + field(g, ORIGIN_W)
            in_rows = (rows - 1) * step_h + field(g, REACH_H)
            end, fresh = min(unit + chunk, field(g, UNITS)), True
            n, k = unit // C, unit % C
            while unit < end:
                w = weights + k * fan * filter_t * plane_taps * SIZE
                first = zero(T)
                if bias != 0:
                    first = broadcast(load_scalar(T, bias + k * SIZE))
                c = k * fan if div == 1 else k // div
                x_n = src + n * field(g, SRC_N)
                _copy_panel(T, L, SIZE, g, panel, x_n, c, d0, d_spread, d_taps, h0, in_rows, w0, fresh)
                fresh = False
                plane = dst + n * field(g, DST_N) + k * field(g, DST_C) + o * field(g, DST_D) + every_w * j0 * dst_w
                for p in range(phases):
                    phase = g + field(g, PHASES_AT) + p * (8 * PHASE_WORDS)
                    every_h = field(phase, H_EVERY)
                    to = plane + (field(phase, H_FIRST) + every_h * i0) * dst_h
                    rows_here = min(rows, field(phase, H_COUNT) - i0)
                    cols_here = min(cols, field(phase, W_COUNT) - j0)
                    full, single = g + field(phase, FULL_AT), g + field(phase, SINGLE_AT)
                    full_end, single_end = full + field(phase, FULL) * 16, single + field(phase, SINGLE) * 16
                    tap, jump, w_bytes = field(phase, TAP), field(phase, JUMP), field(phase, W_BYTES)
                    out, out_row = to, every_h * dst_h
                    if side_pitch:
                        out, out_row = side + field(phase, W_FIRST) * side_pitch, every_w * side_pitch
                    vectors = (cols_here + L - 1) // L
                    if wide:
                        a_count, b_count, out_a, out_b, narrowing = vectors, rows_here, V, out_row, L
                    else:
                        a_count, b_count, out_a, out_b, narrowing = rows_here, vectors, out_row, V, 0
                    a = b = 0
                    while a < a_count and b < b_count:
                        x = panel + b * step_b + a * jump
                        y = out + b * out_b + a * out_a
                        left = a_count - a
                        limit = cols_here - (a if wide else b) * L
                        if left > SMALL:
                            sums = fill(BIG, first)
                            for m in range(fan):
                                for t in range(d_taps):
                                    wt = w + (m * filter_t + d_first + t * d_step) * plane_taps * SIZE
                                    xt = x + (m * d_taps + t) * slice_
                                    sums = filter_block(
                                        sums, xt, wt, full, full_end, single, single_end, tap, jump, w_bytes
                                    )
                            if left >= BIG and limit >= L + (BIG - 1) * narrowing:
                                store_block(sums, y, out_a)
                            else:
                                store_block_clipped(sums, y, out_a, left, limit, narrowing)
                        else:
                            few = fill(SMALL, first)
                            for m in range(fan):
                                for t in range(d_taps):
                                    wt = w + (m * filter_t + d_first + t * d_step) * plane_taps * SIZE
                                    xt = x + (m * d_taps + t) * slice_
                                    few = filter_block(
                                        few, xt, wt, full, full_end, single, single_end, tap, jump, w_bytes
                                    )
                            store_block_clipped(few, y, out_a, left, limit, narrowing)
                        b += 1
                        if b == b_count:
                            b = 0
                            a += BIG if left > SMALL else SMALL
                    if side_pitch and field(phase, LAST_W):
                        total = min(every_w * cols, field(g, OUT_W) - every_w * j0)
                        _scatter_rows(
                            T, L, SIZE, to, every_h * dst_h, dst_w, side, side_pitch, every_w, rows_here, total
                        )
                unit += 1
                k += 1
                if k == C:
                    k = 0
                    n += 1
            tile = next_tile(block)

    return depthwise_planes


# ---- nhwc: pixels -------------------------------------------------------------------------------------------------


@functools.cache
def _pixels_kernel(T: type, TAPS: int, STEP: int, PLANAR: bool) -> Kernel:
    """y = bias + filter over x, L channels at a time, blocks of pixels along W."""
    L, SIZE = lanes(T), np.dtype(T).itemsize
    V = L * SIZE
    LINES = BIG * STEP * V // 64  # of the next row, for each block and vector of channels

    @inline
    def pack_weights(packed, pitch, weights, taps, first, last):
        """packed[tap][channel] = weights[channel][tap], for channels first to last - 1."""
        c = first
        while c < last:
            at = min(c, last - L)
            i = 0
            while i < taps:
                rows = load_taps_clipped(T, L, weights + (at * taps + i) * SIZE, taps * SIZE, taps - i)
                store_block_clipped(transpose(rows), packed + i * pitch + (at - first) * SIZE, pitch, taps - i, L, 0)
                i += L
            c += L

    @inline
    def gather_planes(image, planes, pixels):
        """image[pixel][channel] = planes[channel][pixel]"""
        if pixels < L:
            columns = load_taps_clipped(T, L, planes, pixels * SIZE, pixels)
            store_block_clipped(transpose(columns), image, V, pixels, L, 0)
        at = 0
        while at < pixels and pixels >= L:
            at = min(at, pixels - L)
            store_block(load_transposed(T, planes + at * SIZE, pixels * SIZE), image + at * V, V)
            at += L

    @inline
    def scatter_planes(planes, image, pixels):
        """planes[channel][pixel] = image[pixel][channel]"""
        if pixels < L:
            store_block_clipped(transpose(load_taps(T, L, image, V)), planes, pixels * SIZE, L, pixels, 0)
        at = 0
        while at < pixels and pixels >= L:
            at = min(at, pixels - L)
            store_block(load_transposed(T, image + at * V, V), planes + at * SIZE, pixels * SIZE)
            at += L

    @inline
    def filter_block(sums, rows, rows_end, x, w, whole, rest, tap, jump, w_bytes):
        for _ in range(whole):
            row = rows
            while row < rows_end:
                weights = load_taps(T, TAPS, w + load_scalar(np.int64, row + 8), w_bytes)
                sums = slide(sums, weights, STEP, x + load_scalar(np.int64, row), tap)
                row += 16
            x += TAPS * tap
            w += TAPS * w_bytes
        for _ in range(rest):
            row = rows
            while row < rows_end:
                weight = load_taps(T, 1, w + load_scalar(np.int64, row + 8), 0)
                sums = slide(sums, weight, 1, x + load_scalar(np.int64, row), jump)
                row += 16
            x += tap
            w += w_bytes
        return sums

    @inline
    def filter_border(sums, rows, rows_end, x, w, whole, rest, tap, jump, w_bytes, index, spread, step_w, width, zeros):
        for _ in range(whole):
            row = rows
            while row < rows_end:
                weights = load_taps(T, TAPS, w + load_scalar(np.int64, row + 8), w_bytes)
                at = x + load_scalar(np.int64, row)
                sums = slide_clipped(sums, weights, STEP, at, tap, index, spread, width, zeros)
                row += 16
            x += TAPS * tap
            w += TAPS * w_bytes
            index += TAPS * spread
        for _ in range(rest):
            row = rows
            while row < rows_end:
                weight = load_taps(T, 1, w + load_scalar(np.int64, row + 8), 0)
                at = x + load_scalar(np.int64, row)
                sums = slide_clipped(sums, weight, 1, at, jump, index, step_w, width, zeros)
                row += 16
            x += tap
            w += w_bytes
            index += spread
        return sums

    @inline
    def filter_pixel(sums, rows, rows_end, x, w, taps, tap, w_bytes):
        row = rows
        while row < rows_end:
            xs, ws = x + load_scalar(np.int64, row), w + load_scalar(np.int64, row + 8)
            for _ in range(taps):
                sums = multiply_add(sums, xs, ws)
                xs += tap
                ws += w_bytes
            row += 16
        return sums

    @kernel
    def depthwise_pixels(block):
        g, src, weights = argument(block, 0), argument(block, 1), argument(block, 2)
        dst, bias, scratch = argument(block, 3), argument(block, 4), argument(block, 5)
        packed = scratch + thread_index(block) * field(g, THREAD_BYTES)
        chunks, spots, strips, units = field(g, CHUNKS), field(g, SPOTS), field(g, STRIPS), field(g, UNITS)
        pack_pitch = field(g, PACK_PITCH)
        zeros = packed + field(g, PACK_BYTES)
        source = zeros + pack_pitch
        result = source + field(g, SRC_BYTES)
        rows = packed + field(g, THREAD_BYTES) - field(g, ROWS_BYTES)
        at = zeros
        while at < source:
            store(at, zero(T))
            at += V
        C, D, H, W = field(g, CHANNELS), field(g, DEPTH), field(g, HEIGHT), field(g, WIDTH)
        filter_r, filter_s = field(g, FILTER_R), field(g, FILTER_S)
        taps = field(g, FILTER_T) * filter_r * filter_s
        step_h, step_w, pixel = field(g, STEP_H), field(g, STEP_W), field(g, SRC_W)
        d_every, phases, stream = field(g, D_EVERY), field(g, PHASES), argument(block, 6)

        have = -1
        tile = next_tile(block)
        while tile < field(g, TILES):
            chunk, n, spot = tile // (units * spots), tile // spots % units, tile % spots
            o, i0 = spot // strips, spot % strips * field(g, STRIP)
            c_first = chunk * field(g, CHUNK)
            c_last = C if chunk == chunks - 1 else c_first + field(g, CHUNK)
            if PLANAR:
                c_first = min(c_first, C - L)
                c_last = c_first + L
            if have != chunk:
                pack_weights(packed, pack_pitch, weights, taps, c_first, c_last)
                have = chunk
            depth = g + field(g, D_AT) + o % d_every * 48
            d0 = o // d_every * field(depth, 0) + field(depth, 1)
            d_spread, d_taps, d_first, d_step = field(depth, 2), field(depth, 3), field(depth, 4), field(depth, 5)
            x_n = src + n * field(g, SRC_N) + c_first * field(g, SRC_C)
            y_n = dst + n * field(g, DST_N) + o * field(g, DST_D) + c_first * field(g, DST_C)
            if PLANAR:
                gather_planes(source, x_n, field(g, SRC_PIXELS))
                x_n, y_planes, y_n = source, y_n, result
            bytes_ = (c_last - c_first) * SIZE
            for i in range(i0, min(i0 + field(g, STRIP), field(g, GRID_H))):
                for p in range(phases):
                    phase = g + field(g, PHASES_AT) + p * (8 * PHASE_WORDS)
                    if i >= field(phase, H_COUNT):
                        continue
                    # The rows of the source under this row of the result, each with its first weight.
                    rows_end = rows
                    for t in range(d_taps):
                        d = d0 + t * d_spread
                        if d >= 0 and d < D:
                            for r in range(field(phase, H_TAPS)):
                                h = i * step_h + field(phase, H_ORIGIN) + r * field(phase, H_SPREAD)
                                if h >= 0 and h < H:
                                    at = (d_first + t * d_step) * filter_r + field(phase, H_W_FIRST)
                                    at = (at + r * field(phase, H_W_STEP)) * filter_s + field(phase, W_W_FIRST)
                                    store_scalar(rows_end, x_n + d * field(g, SRC_D) + h * field(g, SRC_H))
                                    store_scalar(rows_end + 8, packed + at * pack_pitch)
                                    rows_end += 16
                    # While this row is filtered, what the next one needs besides comes into the second-level cache, in
                    # the order of memory: the transposed order of the blocks keeps the hardware from guessing it.
                    next_row = 0
                    if chunks == 1 and not PLANAR and rows_end > rows:
                        next_row = load_scalar(np.int64, rows_end - 16) + field(g, SRC_H)
                    y_row = y_n + (field(phase, H_FIRST) + field(phase, H_EVERY) * i) * field(g, DST_H)
                    y_row += field(phase, W_FIRST) * field(g, DST_W)
                    y_step = field(phase, W_EVERY) * field(g, DST_W)
                    tap, jump, w_bytes = field(phase, TAP), field(phase, JUMP), field(phase, W_BYTES)
                    whole, rest, origin = field(phase, FULL), field(phase, SINGLE), field(phase, W_ORIGIN)
                    count, inner, inner_end = field(phase, W_COUNT), field(phase, INNER_LO), field(phase, INNER_HI)
                    j = 0
                    if count >= SMALL and (TAPS >= BORDER_TAPS or (TAPS > 1 and (PLANAR or count <= BIG))):
                        # Many taps: blocks at the border are blocks as well, with zeros for what lies outside.
                        while j < count:
                            if count >= BIG:
                                j = min(j, count - BIG)
                            y = y_row + j * y_step
                            at = j * step_w + origin
                            x, is_inner = at * pixel, j >= inner and j + BIG <= inner_end
                            c = 0
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                first = zero(T)
                                if bias != 0:
                                    first = load(T, bias + c_first * SIZE + c)
                                sums = fill(BIG, first)
                                if is_inner:
                                    sums = filter_block(sums, rows, rows_end, x + c, c, whole, rest, tap, jump, w_bytes)
                                else:
                                    sums = filter_border(
                                        sums, rows, rows_end, x + c, c, whole, rest, tap, jump, w_bytes,
                                        at, field(phase, W_SPREAD), step_w, W, zeros + c,
                                    )  # fmt: skip
                                if count < BIG:
                                    store_block_clipped(sums, y + c, y_step, count, L, 0)
                                elif stream:
                                    store_stream(sums, y + c, y_step)
                                else:
                                    store_block(sums, y + c, y_step)
                                c += V
                            j += BIG
                    if inner_end - inner < SMALL:
                        inner = inner_end = count
                    while j < count:
                        y = y_row + j * y_step
                        at = j * step_w + origin
                        left = inner_end - j
                        if j < inner or left <= 0:
                            # A pixel whose window leaves the row: the taps inside, up to 8 vectors of channels at once.
                            spread = field(phase, W_SPREAD)
                            s0 = 0 if at >= 0 else (spread - 1 - at) // spread
                            s1 = min(field(phase, W_TAPS), (W - 1 - at) // spread + 1)
                            x, w = (at + s0 * spread) * pixel, s0 * w_bytes
                            c = 0
                            if bytes_ >= 8 * V:
                                while c < bytes_:
                                    c = min(c, bytes_ - 8 * V)
                                    sums8 = fill(8, zero(T))
                                    if bias != 0:
                                        sums8 = load_taps(T, 8, bias + c_first * SIZE + c, V)
                                    sums8 = filter_pixel(sums8, rows, rows_end, x + c, w + c, s1 - s0, tap, w_bytes)
                                    store_block(sums8, y + c, V)
                                    c += 8 * V
                            else:
                                while c < bytes_:
                                    c = min(c, bytes_ - V)
                                    sums1 = fill(1, zero(T))
                                    if bias != 0:
                                        sums1 = load_taps(T, 1, bias + c_first * SIZE + c, V)
                                    sums1 = filter_pixel(sums1, rows, rows_end, x + c, w + c, s1 - s0, tap, w_bytes)
                                    store_block(sums1, y + c, V)
                                    c += V
                            j += 1
                        elif left > SMALL and inner_end - inner >= BIG:
                            back = max(0, BIG - left)
                            y -= back * y_step
                            x = (at - back * step_w) * pixel
                            c = 0
                            ahead = next_row + x
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                if next_row:
                                    for r in range(step_h):
                                        prefetch(LINES, ahead + r * field(g, SRC_H))
                                    ahead += 64 * LINES
                                first = zero(T)
                                if bias != 0:
                                    first = load(T, bias + c_first * SIZE + c)
                                sums = fill(BIG, first)
                                sums = filter_block(sums, rows, rows_end, x + c, c, whole, rest, tap, jump, w_bytes)
                                if stream:
                                    store_stream(sums, y + c, y_step)
                                else:
                                    store_block(sums, y + c, y_step)
                                c += V
                            j += BIG - back
                        else:
                            back = max(0, SMALL - left)
                            y -= back * y_step
                            x = (at - back * step_w) * pixel
                            c = 0
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                first = zero(T)
                                if bias != 0:
                                    first = load(T, bias + c_first * SIZE + c)
                                few = fill(SMALL, first)
                                few = filter_block(few, rows, rows_end, x + c, c, whole, rest, tap, jump, w_bytes)
                                store_block(few, y + c, y_step)
                                c += V
                            j += SMALL - back
            if PLANAR:
                scatter_planes(y_planes, result, field(g, DST_PIXELS))
            tile = next_tile(block)

    return depthwise_pixels


# ---- wgrad --------------------------------------------------------------------------------------------------------


@functools.cache
def _pixels_wgrad_kernel(T: type, TAPS: int, STEP: int, PLANAR: bool) -> Kernel:
    """Partial sums of dw over some rows of dy and some channels."""
    L, SIZE = lanes(T), np.dtype(T).itemsize
    V = L * SIZE
    LINES = BIG * STEP * V // 64

    @inline
    def add_block(N_dy, rows, rows_end, x, acc, whole, rest, tap, jump, acc_pitch):
        """acc[tap] += x * dy for a block of pixels whose dy is N_dy."""
        for _ in range(whole):
            row = rows
            while row < rows_end:
                at = acc + load_scalar(np.int64, row + 8)
                sums = load_taps(T, TAPS, at, acc_pitch)
                sums = slide_grad(sums, N_dy, STEP, x + load_scalar(np.int64, row), tap)
                store_block(sums, at, acc_pitch)
                row += 16
            x += TAPS * tap
            acc += TAPS * acc_pitch
        for _ in range(rest):
            row = rows
            while row < rows_end:
                at = acc + load_scalar(np.int64, row + 8)
                sums1 = slide_grad(load_taps(T, 1, at, 0), N_dy, 1, x + load_scalar(np.int64, row), jump)
                store_block(sums1, at, 0)
                row += 16
            x += tap
            acc += acc_pitch

    @inline
    def add_pixel(dy, rows, rows_end, x, acc, taps, tap, acc_pitch):
        row = rows
        while row < rows_end:
            xs, at = x + load_scalar(np.int64, row), acc + load_scalar(np.int64, row + 8)
            for _ in range(taps):
                update(at, xs, dy)
                xs += tap
                at += acc_pitch
            row += 16

    @inline
    def gather_planes(image, planes, pitch, pixels):
        """image[pixel][channel] = planes[channel][pixel]"""
        if pixels < L:
            columns = load_taps_clipped(T, L, planes, pitch, pixels)
            store_block_clipped(transpose(columns), image, V, pixels, L, 0)
        at = 0
        while at < pixels and pixels >= L:
            at = min(at, pixels - L)
            store_block(load_transposed(T, planes + at * SIZE, pitch), image + at * V, V)
            at += L

    @kernel
    def depthwise_pixels_wgrad(block):
        g, src, dst, scratch = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        acc = scratch + field(g, PARTIALS_BYTES) + thread_index(block) * field(g, THREAD_BYTES)
        acc_pitch, acc_end = field(g, PACK_PITCH), acc + field(g, PACK_BYTES)
        source = acc_end
        result = source + field(g, SRC_BYTES)
        rows = acc + field(g, THREAD_BYTES) - field(g, ROWS_BYTES)
        parts, chunks, strip, strips = field(g, PARTS), field(g, CHUNKS), field(g, STRIP), field(g, STRIPS)
        C, D, H, W, O = field(g, CHANNELS), field(g, DEPTH), field(g, HEIGHT), field(g, WIDTH), field(g, SPOTS)
        filter_r, filter_s = field(g, FILTER_R), field(g, FILTER_S)
        taps = field(g, FILTER_T) * filter_r * filter_s
        pixel, y_step = field(g, SRC_W), field(g, DST_W)
        depth, phase = g + field(g, D_AT), g + field(g, PHASES_AT)
        step_h, origin_h, spread_h = field(g, STEP_H), field(phase, H_ORIGIN), field(phase, H_SPREAD)
        step_w, origin, spread = field(g, STEP_W), field(phase, W_ORIGIN), field(phase, W_SPREAD)
        tap, jump, whole, rest = field(phase, TAP), field(phase, JUMP), field(phase, FULL), field(phase, SINGLE)
        count, inner, inner_end = field(phase, W_COUNT), field(phase, INNER_LO), field(phase, INNER_HI)
        wide_pitch = field(g, PARTIAL_BYTES) // taps

        tile = next_tile(block)
        while tile < field(g, TILES):
            part, chunk = tile % parts, tile // parts
            slot = chunk * field(g, CHUNK)
            c_first, c_last = slot, (C if chunk == chunks - 1 else slot + field(g, CHUNK))
            if PLANAR:
                c_first = min(slot, C - L)
                c_last = c_first + L
            bytes_ = (c_last - c_first) * SIZE
            wide = scratch + part * field(g, PARTIAL_BYTES) + slot * 8
            at = acc
            while at < acc_end:
                store(at, zero(T))
                at += V
            item = part * field(g, ITEMS) // parts
            last = (part + 1) * field(g, ITEMS) // parts
            fresh = True
            while item < last:
                p0, o, n = item % strips * strip, item // strips % O, item // (strips * O)
                p1 = min(p0 + strip, field(g, GRID_H))
                x_n = src + n * field(g, SRC_N) + c_first * field(g, SRC_C)
                y_n = dst + n * field(g, DST_N) + o * field(g, DST_D) + c_first * field(g, DST_C)
                if PLANAR:
                    top = min(H, max(0, p0 * step_h + origin_h))
                    bottom = max(top, min(H, (p1 - 1) * step_h + origin_h + (field(phase, H_TAPS) - 1) * spread_h + 1))
                    gather_planes(source, x_n + top * W * SIZE, H * W * SIZE, (bottom - top) * W)
                    gather_planes(result, y_n + p0 * count * SIZE, field(g, GRID_H) * count * SIZE, (p1 - p0) * count)
                    x_n, y_n = source - top * field(g, SRC_H), result - p0 * field(g, DST_H)
                for p in range(p0, p1):
                    rows_end = rows
                    for t in range(field(depth, 3)):
                        d = o * field(depth, 0) + field(depth, 1) + t * field(depth, 2)
                        if d >= 0 and d < D:
                            for r in range(filter_r):
                                h = p * step_h + origin_h + r * spread_h
                                if h >= 0 and h < H:
                                    store_scalar(rows_end, x_n + d * field(g, SRC_D) + h * field(g, SRC_H))
                                    store_scalar(rows_end + 8, acc + (t * filter_r + r) * filter_s * acc_pitch)
                                    rows_end += 16
                    y_row = y_n + p * field(g, DST_H)
                    next_row = 0
                    if chunks == 1 and not PLANAR and rows_end > rows:
                        next_row = load_scalar(np.int64, rows_end - 16) + field(g, SRC_H)
                    j = 0
                    while j < count:
                        y, at = y_row + j * y_step, j * step_w + origin
                        left = inner_end - j
                        x = at * pixel
                        c = s = 0
                        if j >= inner and left >= BIG:
                            ahead, y_ahead = next_row + x, y + field(g, DST_H)
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                if next_row:
                                    for r in range(step_h):
                                        prefetch(LINES, ahead + r * field(g, SRC_H))
                                    prefetch(BIG, y_ahead)
                                    ahead += 64 * LINES
                                    y_ahead += 64 * BIG
                                dy8 = load_taps(T, BIG, y + c, y_step)
                                add_block(dy8, rows, rows_end, x + c, s, whole, rest, tap, jump, acc_pitch)
                                c += V
                                s += V
                            j += BIG
                        elif j >= inner and left >= SMALL:
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                dy4 = load_taps(T, SMALL, y + c, y_step)
                                add_block(dy4, rows, rows_end, x + c, s, whole, rest, tap, jump, acc_pitch)
                                c += V
                                s += V
                            j += SMALL
                        else:
                            s0 = 0 if at >= 0 else (spread - 1 - at) // spread
                            s1 = min(filter_s, (W - 1 - at) // spread + 1)
                            x, a = (at + s0 * spread) * pixel, s0 * acc_pitch
                            while c + 4 * V <= bytes_:
                                dys = load_taps(T, 4, y + c, V)
                                add_pixel(dys, rows, rows_end, x + c, a + s, s1 - s0, tap, acc_pitch)
                                c += 4 * V
                                s += 4 * V
                            while c < bytes_:
                                c = min(c, bytes_ - V)
                                dy1 = load_taps(T, 1, y + c, V)
                                add_pixel(dy1, rows, rows_end, x + c, a + s, s1 - s0, tap, acc_pitch)
                                c += V
                                s += V
                            j += 1
                # What f32 has added up over one strip goes on in f64.
                for i in range(taps):
                    at, to = acc + i * acc_pitch, wide + i * wide_pitch
                    c = 0
                    while c < bytes_:
                        add_wide(to, load(T, at), fresh)
                        store(at, zero(T))
                        c += V
                        at += V
                        to += 8 * L
                fresh = False
                item += 1
            tile = next_tile(block)

    return depthwise_pixels_wgrad


@functools.cache
def _pixels_finish_kernel(T: type) -> Kernel:
    """dw[channel][tap] = the sum over the parts of [tap][channel]."""
    L, SIZE = lanes(T), np.dtype(T).itemsize

    @kernel
    def depthwise_pixels_finish(block):
        g, dw, partials = argument(block, 0), argument(block, 1), argument(block, 2)
        C, parts, partial = field(g, CHANNELS), field(g, PARTS), field(g, PARTIAL_BYTES)
        taps = field(g, FILTER_T) * field(g, FILTER_R) * field(g, FILTER_S)
        pitch = partial // taps
        group = next_tile(block)
        while group * L < C:
            c, i = min(group * L, C - L), 0
            while i < taps:
                at = partials + group * L * 8 + i * pitch
                for tap in range(min(L, taps - i)):
                    for part in range(1, parts):
                        merge_wide(L, at + tap * pitch, at + tap * pitch + part * partial)
                rows = transpose(load_narrow(T, L, at, pitch, taps - i))
                store_block_clipped(rows, dw + (c * taps + i) * SIZE, taps * SIZE, L, taps - i, 0)
                i += L
            group = next_tile(block)

    return depthwise_pixels_finish


@functools.cache
def _planes_wgrad_kernel(T: type) -> Kernel:
    """Partial sums of dw over some planes' pieces of one channel, vectors along W."""
    L, SIZE = lanes(T), np.dtype(T).itemsize
    V = L * SIZE

    @kernel
    def depthwise_planes_wgrad(block):
        g, src, dst, scratch = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        partials = field(g, PARTIALS_BYTES)
        panel = scratch + (partials + 63) // 64 * 64 + thread_index(block) * field(g, THREAD_BYTES)
        side = panel + field(g, PANEL_BYTES)
        acc = panel + field(g, THREAD_BYTES) - field(g, ACC_BYTES)
        rects, depth, parts = field(g, RECTS), g + field(g, D_AT), field(g, PARTS)
        step_h, step_w, pitch = field(g, STEP_H), field(g, STEP_W), field(g, PITCH)
        groups, side_pitch, dst_h, dst_w = field(g, TAP_GROUPS), field(g, SIDE_PITCH), field(g, DST_H), field(g, DST_W)
        taps = field(g, FILTER_T) * field(g, FILTER_R) * field(g, FILTER_S)

        tile = next_tile(block)
        while tile < field(g, TILES):
            part, k = tile % parts, tile // parts
            item, last = part * field(g, ITEMS) // parts, (part + 1) * field(g, ITEMS) // parts
            fresh = True
            while item < last:
                rect = g + field(g, RECTS_AT) + item % rects * 32
                i0, rows, j0, cols = field(rect, 0), field(rect, 1), field(rect, 2), field(rect, 3)
                o, n = item // rects % field(g, SPOTS), item // (rects * field(g, SPOTS))
                d0 = o * field(depth, 0) + field(depth, 1)
                _copy_panel(
                    T, L, SIZE, g, panel, src + n * field(g, SRC_N), k // field(g, DIV), d0, field(depth, 2),
                    field(depth, 3), i0 * step_h + field(g, ORIGIN_H), (rows - 1) * step_h + field(g, REACH_H),
                    j0 * step_w + field(g, ORIGIN_W), True,
                )  # fmt: skip
                y = dst + n * field(g, DST_N) + k * field(g, DST_C) + o * field(g, DST_D) + i0 * dst_h + j0 * dst_w
                y_row = dst_h
                if side_pitch:
                    for i in range(rows):
                        for j in range(cols):
                            value = load_scalar(T, y + i * dst_h + j * dst_w)
                            store_scalar(side + i * side_pitch + j * SIZE, value)
                    y, y_row = side, side_pitch
                for group in range(groups):
                    places = g + field(g, TAPS_AT) + group * (8 * GROUP)
                    sums = fill(GROUP, zero(T))
                    for i in range(rows):
                        x, dy, left = panel + i * step_h * pitch, y + i * y_row, cols
                        while left > 0:
                            limit = min(left, L)
                            sums = gather_add(sums, x, places, load_clipped(T, dy, 0, limit), limit)
                            x += V
                            dy += V
                            left -= L
                    add_block_wide(acc + group * (8 * L * GROUP), sums, fresh)
                fresh = False
                item += 1
            to = scratch + part * field(g, PARTIAL_BYTES) + k * taps * 8
            for i in range(taps):
                total = zero(np.float64)
                for v in range(0, 8 * L, LANE_BYTES):
                    total = total + load(np.float64, acc + i * (8 * L) + v)
                store_scalar(to + 8 * i, horizontal_sum(total))
            tile = next_tile(block)

    return depthwise_planes_wgrad


@functools.cache
def _planes_finish_kernel(T: type) -> Kernel:
    """dw = the sum over the parts."""
    SIZE = np.dtype(T).itemsize

    @kernel
    def depthwise_planes_finish(block):
        g, dw, partials = argument(block, 0), argument(block, 1), argument(block, 2)
        parts, partial = field(g, PARTS), field(g, PARTIAL_BYTES)
        tile = next_tile(block)
        while tile * 1024 < partial // 8:
            for i in range(tile * 1024, min((tile + 1) * 1024, partial // 8)):
                total = load_scalar(np.float64, partials + 8 * i)
                for part in range(1, parts):
                    total += load_scalar(np.float64, partials + 8 * i + part * partial)
                store_scalar(dw + i * SIZE, T(total))
            tile = next_tile(block)

    return depthwise_planes_finish
