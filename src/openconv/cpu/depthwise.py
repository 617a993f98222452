"""cpu.depthwise: every channel is filtered by itself, in vectors of columns (nchw) or of channels (nhwc)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
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


@dataclass(frozen=True)
class DepthwiseKnobs(Knobs):
    """``panel``: bytes of input that a thread copies, padded, into its scratch memory at a time."""

    panel: int


_DTYPES = {"f32": np.float32, "f64": np.float64}


class Depthwise(Engine):
    """Each input channel has filters of its own: a thread copies a padded piece of one channel and slides over it."""

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
        for panel in (16 << 10, 32 << 10, 64 << 10):
            yield DepthwiseKnobs(panel)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        return problem.min_bytes / device.bandwidth

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        plan = _plan(problem, device.threads, knobs)
        T = _DTYPES[problem.dtypes[0]]
        table = plan.table
        head = table.data_ptr()
        if problem.direction == "wgrad":
            wgrad = _wgrad_kernel(T, plan.columns, plan.taps, plan.step, plan.group)
            threads = device.threads

            def run_wgrad(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
                scratch = (workspace.data_ptr() + 63) & -64
                launch(wgrad, (head, a.data_ptr(), b.data_ptr(), out.data_ptr(), scratch), threads)
                del table_ref[0:0]

            table_ref = [table]
            return run_wgrad

        correlate = _correlate_kernel(T, plan.columns, plan.taps, plan.step)
        threads = device.threads

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
            scratch = (workspace.data_ptr() + 63) & -64
            first = 0 if bias is None else bias.data_ptr()
            launch(correlate, (head, a.data_ptr(), b.data_ptr(), out.data_ptr(), first, scratch), threads)
            del keep[0:0]

        keep = [table]
        return run


# ---- plan: what the kernels read --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Phase:
    """out[first + every*i] = sum over j < taps of  w[w_first + w_step*j] * src[step*i + origin + spread*j], i < count."""

    first: int
    every: int
    count: int
    step: int
    origin: int
    spread: int
    taps: int
    w_first: int
    w_step: int


def _phases(problem: Problem, axis: int) -> list[_Phase]:
    size, taps, stride = problem.spatial[axis], problem.filter[axis], problem.stride[axis]
    low, dil, out = problem.padding[axis][0], problem.dilation[axis], problem.out[axis]
    if problem.direction != "dgrad":
        return [_Phase(0, 1, out, stride, -low, dil, taps, 0, 1)]
    phases = []
    shared = gcd(dil, stride)
    for first in range(min(stride, size)):
        hits = [t for t in range(taps) if (first + low - t * dil) % stride == 0]
        count = (size - first + stride - 1) // stride
        if hits:
            origin = (first + low - hits[-1] * dil) // stride
            phases.append(_Phase(first, stride, count, 1, origin, dil // shared, len(hits), hits[-1], -stride // shared))
        else:
            phases.append(_Phase(first, stride, count, 1, 0, 1, 0, 0, 0))
    return phases


def _split(phase: _Phase, parts: int) -> list[_Phase]:
    return [
        _Phase(
            phase.first + phase.every * f, phase.every * parts, (phase.count - f + parts - 1) // parts,
            phase.step * parts, phase.origin + phase.step * f, phase.spread, phase.taps, phase.w_first, phase.w_step,
        )
        for f in range(min(parts, phase.count))
    ]  # fmt: skip


_HEADER = (
    "tiles minors spots rects majors per_major chunk units groups "
    "src_c src_d src_h src_w dst_c dst_d dst_h dst_w div fan filter_taps plane_taps "
    "origin_h origin_w step_h step_w reach_h reach_w pitch slice seg "
    "thread_bytes panel_bytes side_pitch every_w depth_every depth_at rects_at phases_at phases "
    "step_b unit_w pack_bytes grid_spans chunks groups_at group_count outputs"
).split()
(
    TILES, MINORS, SPOTS, RECTS, MAJORS, PER_MAJOR, CHUNK, UNITS, GROUPS,
    SRC_C, SRC_D, SRC_H, SRC_W, DST_C, DST_D, DST_H, DST_W, DIV, FAN, FILTER_TAPS, PLANE_TAPS,
    ORIGIN_H, ORIGIN_W, STEP_H, STEP_W, REACH_H, REACH_W, PITCH, SLICE, SEG,
    THREAD_BYTES, PANEL_BYTES, SIDE_PITCH, EVERY_W, DEPTH_EVERY, DEPTH_AT, RECTS_AT, PHASES_AT, PHASES,
    STEP_B, UNIT_W, PACK_BYTES, GRID_SPANS, CHUNKS, GROUPS_AT, GROUP_COUNT, OUTPUTS,
) = range(len(_HEADER))  # fmt: skip

BIG = 8
LEVEL = 3
PF = False
SMALL = 4


@dataclass(frozen=True, eq=False)
class _Plan:
    columns: bool
    taps: int
    step: int
    group: int
    table: Tensor
    workspace: int


def _chunk_of(taps: int) -> int:
    if taps <= 7:
        return max(taps, 1)
    return min(range(3, 8), key=lambda c: (taps // c + taps % c, -c))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@functools.lru_cache(maxsize=1024)
def _plan(problem: Problem, threads: int, knobs: DepthwiseKnobs) -> _Plan:
    rank = problem.rank
    columns = rank == 1 or problem.layouts[0] == "nchw"
    T = _DTYPES[problem.dtypes[0]]
    size, L = np.dtype(T).itemsize, lanes(T)
    wgrad = problem.direction == "wgrad"
    one = [_Phase(0, 1, 1, 1, 0, 1, 1, 0, 1)]
    axes = [one] * (3 - rank) + [_phases(problem, a) for a in range(rank)]
    spatial = (1,) * (3 - rank) + problem.spatial
    out = (1,) * (3 - rank) + problem.out
    filt = (1,) * (3 - rank) + problem.filter
    mult = problem.k // problem.c
    A = 1 if columns else 2
    # reuse along A
    base = axes[A][0] if wgrad or problem.direction == "fprop" else max(axes[A], key=lambda p: p.taps)
    parts = base.spread // gcd(base.spread, base.step)
    if not wgrad and parts > 1 and base.count // parts >= 4:
        axes[A] = [q for p in axes[A] for q in (_split(p, parts) if p.taps else [p])]
    live = [p for p in axes[A] if p.taps]
    ref = live[0] if live else axes[A][0]
    if live and ref.step % ref.spread == 0 and ref.step // ref.spread < max(p.taps for p in live):
        step, taps = ref.step // ref.spread, _chunk_of(max(p.taps for p in live))
    else:
        step, taps = 1, 1
    (sd, sh, sw), (dd, dh, dw) = (spatial, out) if problem.direction != "dgrad" else (out, spatial)
    src_c, dst_c = (problem.c, problem.k) if problem.direction != "dgrad" else (problem.k, problem.c)
    div, fan = (mult, 1) if problem.direction != "dgrad" else (1, mult)

    def union(phases: list[_Phase]) -> tuple[int, int]:
        used = [p for p in phases if p.taps]
        if not used:
            return 0, 1
        low = min(p.origin for p in used)
        return low, max(p.origin + (p.taps - 1) * p.spread for p in used) - low + 1

    origin_h, reach_h = union(axes[1])
    origin_w, reach_w = union(axes[2])
    # All phases of an axis advance alike, up to the splitting in parts of A, where step * parts steps belong to `parts` outputs.
    step_h, step_w = axes[1][0].step, axes[2][0].step
    grid_h, grid_w = max(p.count for p in axes[1]), max(p.count for p in axes[2])
    slices = fan * max(p.taps for p in axes[0])
    slices = max(slices, 1)
    every_w = axes[2][0].every if columns else 1
    # -- rectangles
    group = max(1, 9 // taps) if taps > 1 else 9
    blk = BIG

    def panel_shape(rows: int, cols: int) -> tuple[int, int, int]:
        need_w = (cols - 1) * step_w + reach_w
        if columns:
            seg = _up(-(-need_w // step_w), L)
            pitch = seg * step_w * size
        else:
            seg = 0
            pitch = need_w * L * size
        return seg, pitch, (rows - 1) * step_h + reach_h

    cols = grid_w
    budget = knobs.panel
    min_rows = min(grid_h, blk if columns else 1)
    while True:
        seg, pitch, in_rows = panel_shape(min_rows, cols)
        if slices * in_rows * pitch <= budget or cols <= 4 * (L if columns else 1):
            break
        cols = max(_up(-(-cols // 2), L if columns else 1), 1)
    rows = max(min_rows, min(grid_h, (budget // (slices * pitch) - reach_h) // step_h + 1))
    strips = -(-grid_h // rows)
    rows = -(-grid_h // strips)
    if columns and strips > 1:
        rows = _up(rows, blk)
    seg, pitch, in_rows = panel_shape(rows, cols)
    rects = [
        (i, min(rows, grid_h - i), j, min(cols, grid_w - j)) for i in range(0, grid_h, rows) for j in range(0, grid_w, cols)
    ]
    slice_bytes = in_rows * pitch
    # slack: a block reads up to BIG outputs beyond, a vector up to L columns
    slack = (blk * step_h * pitch + L * size * 2) if columns else (blk * step_w + reach_w) * L * size
    panel_bytes = _up(slices * slice_bytes + slack, 64)
    side_pitch = _up(cols, L) * size if every_w > 1 else 0
    side_bytes = _up(rows * every_w * side_pitch, 64)
    RS = filt[1] * filt[2]
    lanes_of = 1 if columns else L
    groups = -(-dst_c // lanes_of)
    wb = size if columns else L * size
    pack_bytes = 0 if columns else fan * filt[0] * RS * L * size
    flags = 0 if columns else groups * 8
    n = problem.n
    words: dict[str, int] = dict.fromkeys(_HEADER, 0)
    data: list[int] = []
    H = len(_HEADER)

    def put(values: list[int]) -> int:
        at = (H + len(data)) * 8
        data.extend(values)
        return at

    phases = []
    for ph in axes[1]:
        for pw in axes[2]:
            if ph.count == 0 or pw.count == 0:
                continue
            pa, pb = (ph, pw) if columns else (pw, ph)
            full, single = [], []

            def place(r: int, s: int, ph: _Phase = ph, pw: _Phase = pw) -> tuple[int, int]:
                row = ph.origin - origin_h + r * ph.spread
                col = pw.origin - origin_w + s * pw.spread
                if columns:
                    where = row * pitch + ((col % step_w) * seg + col // step_w) * size
                else:
                    where = row * pitch + col * L * size
                index = (ph.w_first + ph.w_step * r) * filt[2] + pw.w_first + pw.w_step * s
                return where, index * wb

            whole = pa.taps // taps if taps > 1 else 0
            for b in range(pb.taps):
                for a in range(0, whole * taps, taps):
                    full += place(*((a, b) if columns else (b, a)))
            for b in range(pb.taps):
                for a in range(whole * taps, pa.taps):
                    single += place(*((a, b) if columns else (b, a)))
            at1 = put(full)
            at2 = put(single)
            unit_a = pitch if columns else L * size
            w_a = pa.w_step * (filt[2] if columns else 1) * wb
            phases.append(
                [ph.first, ph.every, ph.count, pw.first, pw.every, pw.count,
                 at1, len(full) // 2, at2, len(single) // 2, pa.spread * unit_a, pa.step * unit_a, w_a, int(pw is axes[2][-1])]
            )  # fmt: skip
    words["phases_at"] = put([v for p in phases for v in p])
    words["phases"] = len(phases)
    words["depth_at"] = put([v for p in axes[0] for v in (p.step, p.origin, p.spread, p.taps, p.w_first, p.w_step)])
    words["depth_every"] = axes[0][0].every
    words["rects_at"] = put([v for r in rects for v in r])
    units = n * groups
    spots = dd * len(rects)
    if columns:
        chunk = max(1, min(units * spots // (16 * threads), units // (4 * threads)) // spots)
        words.update(majors=-(-units // chunk), per_major=chunk, minors=1, chunk=chunk)
    else:
        chunk = max(1, min(groups, units * spots // (16 * threads)))
        chunk = -(-groups // -(-groups // chunk))
        words.update(majors=n, per_major=groups, minors=-(-groups // chunk), chunk=chunk)
    words.update(
        spots=spots, rects=len(rects), units=units, groups=groups,
        src_c=src_c, src_d=sd, src_h=sh, src_w=sw, dst_c=dst_c, dst_d=dd, dst_h=dh, dst_w=dw,
        div=div, fan=fan, filter_taps=fan * filt[0] * RS, plane_taps=RS,
        origin_h=origin_h, origin_w=origin_w, step_h=step_h, step_w=step_w, reach_h=reach_h, reach_w=reach_w,
        pitch=pitch, slice=slice_bytes, seg=seg, panel_bytes=panel_bytes, side_pitch=side_pitch, every_w=every_w,
        step_b=L * size if columns else step_h * pitch, pack_bytes=pack_bytes,
    )  # fmt: skip
    words["tiles"] = words["majors"] * words["minors"] * spots
    thread_bytes = _up(panel_bytes + side_bytes + groups * pack_bytes + flags, 64)
    words["thread_bytes"] = thread_bytes
    table = torch.tensor([words[k] for k in _HEADER] + data, dtype=torch.int64)
    return _Plan(columns, taps, step, group, table, thread_bytes * threads + 64)


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
def store_block_clipped(typingctx, sums, address, pitch, count, limit):
    if not is_block(sums):
        return None

    def codegen(context, builder, signature, args):
        sums_, address_, pitch_, count_, limit_ = args
        totals = unpack(builder, sums_)
        for j, total in enumerate(totals):
            inside = builder.icmp_signed("<", ir.Constant(_I64, j), count_)
            lanes_ = builder.select(inside, limit_, ir.Constant(_I64, 0))
            mask = emit_clip_mask(builder, ir.Constant(_I64, 0), lanes_, sums.dtype.count)
            emit_masked_store(builder, emit_offset(builder, address_, j, pitch_), total, mask)
        return context.get_dummy_value()

    return types.void(sums, *[types.int64] * 4), codegen


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


@intrinsic
def prefetch(typingctx, address):
    def codegen(context, builder, signature, args):
        from numba.core import cgutils
        i32=ir.IntType(32); ptr=ir.IntType(8).as_pointer()
        fn=cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(),[ptr,i32,i32,i32]),'llvm.prefetch.p0')
        builder.call(fn,[builder.inttoptr(args[0],ptr),ir.Constant(i32,0),ir.Constant(i32,LEVEL),ir.Constant(i32,1)])
        return context.get_dummy_value()
    return types.void(types.int64), codegen


# ---- kernels ------------------------------------------------------------------------------------------------------


@inline
def field(g, index):
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
def _copy_columns(T, L, SIZE, to, pitch, src, row_bytes, rows, first, width, step, seg):
    """rows of nchw: columns first, first + 1, ... of each image row, split by column modulo step."""
    V = L * SIZE
    v = 0
    if step == 1:
        last = (width - first) // L * L
        for _ in range(rows):
            if first < 0:
                store(to, load_clipped(T, src, first, width))
                v = L
            else:
                v = 0
            while v < last:
                store(to + v * SIZE, load(T, src + (first + v) * SIZE))
                v += L
            while v < seg:
                store(to + v * SIZE, load_clipped(T, src, first + v, width))
                v += L
            src += row_bytes
            to += pitch
    elif step == 2:
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
                        value = load_scalar(T, src + r * row_bytes + at * SIZE)
                    store_scalar(to + r * pitch + (f * seg + i) * SIZE, value)


@inline
def _copy_channels(T, L, SIZE, to, pitch, src, row_bytes, rows, left, right, pixel, c0, channels, div, fan, m):
    """rows of nhwc: pixels left to right - 1 of the panel, L channels each."""
    V = L * SIZE
    for _ in range(rows):
        x, y = src, to + left * V
        end = to + right * V
        if div == 1 and fan == 1:
            x += c0 * SIZE
            if c0 + L <= channels:
                while y < end:
                    store(y, load(T, x))
                    x += pixel
                    y += V
            else:
                while y < end:
                    store(y, load_clipped(T, x, 0, channels - c0))
                    x += pixel
                    y += V
        else:
            while y < end:
                for lane in range(L):
                    c = (c0 + lane) // div * fan + m
                    value = T(0)
                    if c < channels:
                        value = load_scalar(T, x + c * SIZE)
                    store_scalar(y + lane * SIZE, value)
                x += pixel
                y += V
        to += pitch
        src += row_bytes


@inline
def _copy_panel(T, L, SIZE, COLUMNS, g, panel, src, n, c0, d0, d_spread, d_taps, h0, rows, w0, cols, fresh):
    """The padded piece of the source that a tile needs: slices (m, t), rows, columns.

    The zeros around stay where they are as long as the tile does not change; only a fresh one writes them.
    """
    C, D, H, W = field(g, SRC_C), field(g, SRC_D), field(g, SRC_H), field(g, SRC_W)
    pitch, slice_, seg, step_w = field(g, PITCH), field(g, SLICE), field(g, SEG), field(g, STEP_W)
    div, fan = field(g, DIV), field(g, FAN)
    V = L * SIZE
    top = min(max(-h0, 0), rows)
    bottom = min(max(H - h0, top), rows)
    left = min(max(-w0, 0), cols)
    right = min(max(W - w0, left), cols)
    channel = c0
    if div > 1:
        channel = c0 // div
    for m in range(fan):
        for t in range(d_taps):
            to = panel + (m * d_taps + t) * slice_
            d = d0 + t * d_spread
            if d < 0 or d >= D:
                if fresh:
                    _zero_rows(T, V, to, pitch, 0, rows, pitch)
            else:
                if fresh:
                    _zero_rows(T, V, to, pitch, 0, top, pitch)
                    _zero_rows(T, V, to, pitch, bottom, rows, pitch)
                if COLUMNS:
                    plane = src + (((n * C + channel * fan + m) * D + d) * H + h0 + top) * W * SIZE
                    _copy_columns(T, L, SIZE, to + top * pitch, pitch, plane, W * SIZE, bottom - top, w0, W, step_w, seg)
                else:
                    if fresh:
                        _zero_rows(T, V, to, pitch, top, bottom, left * V)
                        _zero_rows(T, V, to + right * V, pitch, top, bottom, (cols - right) * V)
                    x = src + (((n * D + d) * H + h0 + top) * W + w0 + left) * C * SIZE
                    _copy_channels(
                        T, L, SIZE, to + top * pitch, pitch, x, W * C * SIZE, bottom - top, left, right, C * SIZE, c0, C,
                        div, fan, m,
                    )  # fmt: skip


@functools.cache
def _correlate_kernel(T: type, COLUMNS: bool, TAPS: int, STEP: int) -> Kernel:
    L, SIZE = lanes(T), np.dtype(T).itemsize
    V = L * SIZE
    GROUP = 1 if COLUMNS else L
    W_SIZE = SIZE if COLUMNS else V

    @inline
    def taps_of(address, stride):
        if COLUMNS:
            return broadcast_taps(T, TAPS, address, stride)
        else:
            return load_taps(T, TAPS, address, stride)

    @inline
    def tap_of(address):
        if COLUMNS:
            return broadcast_taps(T, 1, address, 0)
        else:
            return load_taps(T, 1, address, 0)

    @inline
    def filter_block(sums, x, w, full, full_end, single, single_end, unit, jump, w_step):
        while full < full_end:
            weights = taps_of(w + load_scalar(np.int64, full + 8), w_step)
            sums = slide(sums, weights, STEP, x + load_scalar(np.int64, full), unit)
            full += 16
        while single < single_end:
            weight = tap_of(w + load_scalar(np.int64, single + 8))
            sums = slide(sums, weight, 1, x + load_scalar(np.int64, single), jump)
            single += 16
        return sums

    @kernel
    def depthwise_correlate(block):
        g, src, weights, dst, bias, scratch = (
            argument(block, 0), argument(block, 1), argument(block, 2),
            argument(block, 3), argument(block, 4), argument(block, 5),
        )  # fmt: skip
        panel = scratch + thread_index(block) * field(g, THREAD_BYTES)
        side = panel + field(g, PANEL_BYTES)
        groups = field(g, GROUPS)
        pack_bytes = field(g, PACK_BYTES)
        side_pitch, every_w = field(g, SIDE_PITCH), field(g, EVERY_W)
        flags = panel + field(g, THREAD_BYTES) - groups * 8
        packed = flags - groups * pack_bytes
        packed = packed // 64 * 64
        for at in range(panel, side, V):
            store(at, zero(T))
        if not COLUMNS:
            for at in range(groups):
                store_scalar(flags + 8 * at, 0)
        minors, spots, rects = field(g, MINORS), field(g, SPOTS), field(g, RECTS)
        fan, filter_taps, plane_taps = field(g, FAN), field(g, FILTER_TAPS), field(g, PLANE_TAPS)
        C, O, P, Q = field(g, DST_C), field(g, DST_D), field(g, DST_H), field(g, DST_W)
        step_h, step_w, step_b, slice_ = field(g, STEP_H), field(g, STEP_W), field(g, STEP_B), field(g, SLICE)
        phases = field(g, PHASES)
        filter_depth = filter_taps // (plane_taps * fan)

        tile = next_tile(block)
        while tile < field(g, TILES):
            minor = tile % minors
            spot = tile // minors % spots
            major = tile // (minors * spots)
            o = spot // rects
            rect = g + field(g, RECTS_AT) + (spot % rects) * 32
            i0, rows, j0, cols = field(rect, 0), field(rect, 1), field(rect, 2), field(rect, 3)
            depth_every = field(g, DEPTH_EVERY)
            depth = g + field(g, DEPTH_AT) + (o % depth_every) * 48
            d0 = o // depth_every * field(depth, 0) + field(depth, 1)
            d_spread, d_taps, d_first, d_step = field(depth, 2), field(depth, 3), field(depth, 4), field(depth, 5)
            h0 = i0 * step_h + field(g, ORIGIN_H)
            w0 = j0 * step_w + field(g, ORIGIN_W)
            in_rows = (rows - 1) * step_h + field(g, REACH_H)
            in_cols = (cols - 1) * step_w + field(g, REACH_W)
            unit = major * field(g, PER_MAJOR) + minor * field(g, CHUNK)
            end = min(unit + field(g, CHUNK), min((major + 1) * field(g, PER_MAJOR), field(g, UNITS)))
            start = unit
            while unit < end:
                n, c0 = unit // groups, unit % groups * GROUP
                if COLUMNS:
                    w = weights + c0 * filter_taps * SIZE
                    first = zero(T)
                    if bias != 0:
                        first = broadcast(load_scalar(T, bias + c0 * SIZE))
                else:
                    w = packed + c0 // L * pack_bytes
                    flag = flags + c0 // L * 8
                    if load_scalar(np.int64, flag) == 0:
                        for lane in range(L):
                            if c0 + lane < C:
                                for i in range(filter_taps):
                                    value = load_scalar(T, weights + ((c0 + lane) * filter_taps + i) * SIZE)
                                    store_scalar(w + i * V + lane * SIZE, value)
                            else:
                                for i in range(filter_taps):
                                    store_scalar(w + i * V + lane * SIZE, T(0))
                        store_scalar(flag, 1)
                    first = zero(T)
                    if bias != 0:
                        first = load_clipped(T, bias, c0, C)
                _copy_panel(T, L, SIZE, COLUMNS, g, panel, src, n, c0, d0, d_spread, d_taps, h0, in_rows, w0, in_cols, unit == start)

                ahead = ahead_end = 0
                if COLUMNS:
                    ahead = src + ((unit + 1) * field(g, SRC_H) + max(0, h0)) * field(g, SRC_W) * SIZE
                    ahead_end = ahead + in_rows * field(g, SRC_W) * SIZE
                for ph in range(phases):
                    phase = g + field(g, PHASES_AT) + ph * 112
                    first_h, every_h, first_w = field(phase, 0), field(phase, 1), field(phase, 3)
                    rows_here = min(rows, field(phase, 2) - i0)
                    cols_here = min(cols, field(phase, 5) - j0)
                    full = g + field(phase, 6)
                    full_end = full + field(phase, 7) * 16
                    single = g + field(phase, 8)
                    single_end = single + field(phase, 9) * 16
                    tap_bytes, jump, w_step, last_w = field(phase, 10), field(phase, 11), field(phase, 12), field(phase, 13)
                    if COLUMNS:
                        a_count, b_count = rows_here, (cols_here + L - 1) // L
                        if every_w == 1:
                            out = dst + (((n * C + c0) * O + o) * P + first_h + every_h * i0) * Q * SIZE + j0 * SIZE
                            out_a, out_b = every_h * Q * SIZE, V
                        else:
                            out = side + first_w * side_pitch
                            out_a, out_b = every_w * side_pitch, V
                    else:
                        a_count, b_count = cols_here, rows_here
                        e_w = field(phase, 4)
                        out = dst + (((n * O + o) * P + first_h + every_h * i0) * Q + first_w + e_w * j0) * C * SIZE
                        out += c0 * SIZE
                        out_a, out_b = e_w * C * SIZE, every_h * Q * C * SIZE

                    a = b = 0
                    while a < a_count and b < b_count:
                        x = panel + b * step_b + a * jump
                        y = out + b * out_b + a * out_a
                        limit = min(L, cols_here - b * L) if COLUMNS else min(L, C - c0)
                        left = a_count - a
                        if PF:
                            if ahead < ahead_end:
                                for i in range(8):
                                    prefetch(ahead + 64 * i)
                                ahead += 512
                        if left > SMALL:
                            sums = fill(BIG, first)
                            for m in range(fan):
                                for t in range(d_taps):
                                    wt = w + (m * filter_depth + d_first + t * d_step) * plane_taps * W_SIZE
                                    xt = x + (m * d_taps + t) * slice_
                                    sums = filter_block(
                                        sums, xt, wt, full, full_end, single, single_end, tap_bytes, jump, w_step
                                    )
                            if left >= BIG and limit == L:
                                store_block(sums, y, out_a)
                            else:
                                store_block_clipped(sums, y, out_a, left, limit)
                        else:
                            sums4 = fill(SMALL, first)
                            for m in range(fan):
                                for t in range(d_taps):
                                    wt = w + (m * filter_depth + d_first + t * d_step) * plane_taps * W_SIZE
                                    xt = x + (m * d_taps + t) * slice_
                                    sums4 = filter_block(
                                        sums4, xt, wt, full, full_end, single, single_end, tap_bytes, jump, w_step
                                    )
                            if left >= SMALL and limit == L:
                                store_block(sums4, y, out_a)
                            else:
                                store_block_clipped(sums4, y, out_a, left, limit)
                        size = BIG if left > SMALL else SMALL
                        if COLUMNS:
                            b += 1
                            if b == b_count:
                                b = 0
                                a += size
                        else:
                            a += size
                            if a >= a_count:
                                a = 0
                                b += 1
                    if COLUMNS:
                        if every_w > 1 and last_w == 1:
                            total = min(every_w * cols, Q - every_w * j0)
                            to = dst + (((n * C + c0) * O + o) * P + first_h + every_h * i0) * Q * SIZE + every_w * j0 * SIZE
                            row = side
                            for _ in range(rows_here):
                                if every_w == 2:
                                    for v in range(0, side_pitch // SIZE, L):
                                        even = load(T, row + v * SIZE)
                                        odd = load(T, row + side_pitch + v * SIZE)
                                        store_clipped(to, 2 * v, total, weave(even, odd, 0))
                                        store_clipped(to, 2 * v + L, total, weave(even, odd, 1))
                                else:
                                    for i in range(total):
                                        at = row + i % every_w * side_pitch + i // every_w * SIZE
                                        store_scalar(to + i * SIZE, load_scalar(T, at))
                                row += every_w * side_pitch
                                to += every_h * Q * SIZE
                unit += 1
            tile = next_tile(block)

    return depthwise_correlate


def _wgrad_kernel(T: type, COLUMNS: bool, TAPS: int, STEP: int, RC: int) -> Kernel:
    raise NotImplementedError
