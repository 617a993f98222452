"""cpu.winograd: small filters of stride 1 with a quarter of the multiplications, by interpolation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..prepared import prepared, prepared_if_seen, room
from ..problem import DTYPE_BYTES, Problem
from ..winograd import Transform, error_bound, transform
from . import winograd_kernels as kernels
from .finish import Words
from .low_precision import computed, memory_refusals, memory_token
from .runtime import launch, numbering
from .simd import LANE_BYTES, lanes

__all__ = ["Winograd", "WinogradKnobs"]


@dataclass(frozen=True)
class WinogradKnobs(Knobs):
    """``m``: results of a tile along an axis of 3 taps; 5 taps have two less. ``way``: filters are ``kept``
    transformed, or transformed on the ``fly`` by each task that uses them; a wgrad, which has none, goes in ``runs``.
    ``tiles``: of a task, or of a run, at most."""

    m: int
    way: str
    tiles: int


class Winograd(Engine):
    """Filters of 3 or 5 taps and stride 1 by interpolation: F(4x4,3x3) makes 16 results of 36 products in place of 144.

        y  = AT [ sum over c of (G w GT) * (BT x B) ] A            for each tile of m x m results, * by element
        dx = the same of dy and the filters turned by half a turn
        dw = AT [ sum over tiles of (G dy GT) * (BT x B) ] A       with F(r, m) in place of F(m, r)

    The sums over channels are matrix products, one for each point of a tile, in registers at the rate of the
    multiply-add units. Each thread transforms the images that it multiplies into its own cache: what another core has
    written takes longer to fetch than to compute again. Filters that stay as they are from call to call are kept
    transformed (:mod:`openconv.prepared`, in addition to the workspace); a dgrad transforms them in each call.

    It wins on all 3x3 layers of stride 1 with some 32 channels and more, 2 to 4 times over. It loses where channels are
    few, as transforms cost the same for one filter as for many, and where an image is smaller than a tile. Its results
    mix the pixels of a tile: errors are a share of the largest sum, and an infinity reaches its whole tile.
    """

    name = "cpu.winograd"
    takes_bias = True
    takes_finish = True
    takes_low = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from memory_refusals(problem)
        if problem.is_empty:
            yield "a tensor is empty; there are no tiles"
        if problem.rank > 2:
            yield f"there are {problem.rank} axes; wanted one or two"
        if set(problem.stride) != {1}:
            yield f"stride is {problem.stride}; tiles of results need 1"
        if set(problem.dilation) != {1}:
            yield f"dilation is {problem.dilation}; tiles of results need 1"
        if set(problem.filter) - {1, 3, 5} or set(problem.filter) == {1}:
            yield f"filter is {problem.filter}; wanted 3 or 5 taps along an axis, and 1, 3 or 5 along the other"
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted the same"

    def traits(self, problem: Problem, knobs: WinogradKnobs) -> Traits:
        problem = computed(problem)
        axes = _transforms(problem, knobs.m)
        terms = {"fprop": problem.c, "dgrad": problem.k}.get(problem.direction, 0) // problem.groups
        if problem.direction == "wgrad":
            terms = problem.n * prod(-(-out // a.r) for out, a in zip(problem.out, axes, strict=True))
        # An image's bits depend on m alone: the sum over channels is one chain, whatever tiles are beside it.
        steady = problem.direction == "wgrad" or knobs.m == _usual_m(problem)
        bound = error_bound(axes, terms, problem.result_dtype)
        return Traits(problem.result_dtype, bound, batch_invariant=steady, plain_sum=False)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> int:
        return _plan(problem, device, knobs).workspace

    def knobs(self, problem: Problem, device: Device) -> Iterable[WinogradKnobs]:
        problem, usual = computed(problem), _usual_m(problem)
        sizes = (2, 4, 6) if max(problem.filter) == 3 else (4,)
        return tuple(knobs for m in sorted(sizes, key=lambda m: m != usual) for knobs in _knobs(problem, device, m))

    def cost(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> float:
        # A margin of 25 us in favour of plain sums: what is over sooner is not worth other roundings.
        return 37e-6 + _seconds(computed(problem), device, knobs)

    def build(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> Runner:
        return _plan(problem, device, knobs).runner()


def _seconds(problem: Problem, device: Device, knobs: WinogradKnobs) -> float:
    # Cycles of one core, measured on two cores of a Zen 5 with AVX2 and AVX-512: for a vector of channels of a tile and
    # for the whole; see docs/kernels.md. The nominal matrix rate is half of what these products reach.
    clock = device.vector_rate / 1.2 / device.threads / (2 * device.lanes)
    return problem.groups * _plan(problem, device, knobs).cycles(device.bandwidth / clock) / clock


# Cycles for a vector of channels of a tile: of BT on a tile, of AT back, of G on a filter; and a run of sums to dw.
_IMAGE = {2: 75, 4: 170, 6: 400}
_RESULT = {2: 50, 4: 120, 6: 260}
_FILTER = {2: 80, 4: 170, 6: 300}


@functools.lru_cache(maxsize=1024)
def _usual_m(problem: Problem) -> int:
    """The m that takes least time, by what is known of one image: another batch or device has the same bits."""
    c, k = problem.c // problem.groups, problem.k // problem.groups

    def cycles(m: int) -> float:
        h, w = _axes(problem, m)
        vectors, outs = -(-c // 8), -(-k // 8)
        multiply = h.points * w.points * vectors * 8 * outs / 2
        return h.tiles * w.tiles * (multiply + vectors * _IMAGE[m] + outs * _RESULT[m])

    # m = 6 would save a tenth on large images, and errs twice as much: it is left to who asks for it, and to the tuner.
    return 4 if 5 in problem.filter or cycles(4) < cycles(2) else 2


def _knobs(problem: Problem, device: Device, m: int) -> Iterator[WinogradKnobs]:
    """For one m: the usual way first, then others, and such as need little memory."""
    c, k = problem.c // problem.groups, problem.k // problem.groups
    axes, size = _axes(problem, m), DTYPE_BYTES[problem.result_dtype]
    points, tiles = prod(a.points for a in axes), problem.n * prod(a.tiles for a in axes)
    filters = points * c * k * size
    if problem.direction == "wgrad":
        # Sums that do not fit a cache are written and read again for each run.
        usual = 128 if filters <= 8 << 20 else 256
        yield from (WinogradKnobs(m, "runs", count) for count in (usual, usual // 2, usual * 2, 32, 8))
        return
    depth = k if problem.direction == "dgrad" else c
    kept = max(24, min(96, device.cache_bytes // (points * depth * size)))
    ways = [WinogradKnobs(m, "kept", kept), WinogradKnobs(m, "fly", 96), WinogradKnobs(m, "kept", 2 * kept)]
    if problem.direction == "dgrad":  # made in each call: by the tasks themselves, unless each has to make them again
        if tiles <= 192 or filters > FAR:
            ways[0], ways[1] = ways[1], ways[0]
    elif filters > FAR:  # they come from memory, four times as many as there were
        ways.sort(key=lambda way: _seconds(problem, device, way))
    yield from (*ways, WinogradKnobs(m, "kept", 24), WinogradKnobs(m, "fly", 24), WinogradKnobs(m, "fly", 6))


FAR = 16 << 20
"""Bytes of transformed filters from which on they are far away."""


def _m(taps: int, m: int) -> int:
    """Results of a tile along an axis of so many taps: 5 taps have two points more."""
    return 1 if taps == 1 else m if taps == 3 else max(2, m - 2)


def _transforms(problem: Problem, m: int) -> tuple[Transform, ...]:
    pairs = [(_m(taps, m), taps) for taps in problem.filter]
    return tuple(transform(r, m) if problem.direction == "wgrad" else transform(m, r) for m, r in pairs)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _odd(size: int) -> int:
    """The size in whole lines of the cache, an odd number of them: what is so far apart has sets of its own."""
    return _up(size, 64) | 64


def _aligned(workspace: Tensor | None) -> int:
    assert workspace is not None, "winograd keeps transformed images, filters and products in the workspace"
    return -(-workspace.data_ptr() // 64) * 64


@dataclass(frozen=True)
class _Axis:
    """One axis: source[origin + m*tile + i], taps and results; one that the problem does not have is a single tap."""

    size: int
    out: int
    origin: int
    taps: int
    m: int

    @property
    def tiles(self) -> int:
        return -(-self.out // self.m)

    @property
    def points(self) -> int:
        return self.m + self.taps - 1


def _axes(problem: Problem, m: int) -> tuple[_Axis, _Axis]:
    axes = [_Axis(1, 1, 0, 1, 1)] * (2 - problem.rank)
    for size, out, (low, _), taps in zip(problem.spatial, problem.out, problem.padding, problem.filter, strict=True):
        if problem.direction == "dgrad":  # dx[h] = sum over j of (w turned)[j] * dy[h + low - (taps - 1) + j]
            size, out, low = out, size, taps - 1 - low
        axes.append(_Axis(size, out, -low, taps, _m(taps, m)))
    return axes[0], axes[1]


class _Shape:
    """Sizes that all plans are made of."""

    def __init__(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> None:
        self.problem, self.knobs = problem, knobs
        self.T, self.M = (memory_token(each.result_dtype) for each in (computed(problem), problem))
        self.size, self.held = (DTYPE_BYTES[each.result_dtype] for each in (computed(problem), problem))
        self.L = lanes(self.T)
        self.line = self.L * self.size
        self.h, self.w = _axes(problem, knobs.m)
        self.points = self.h.points * self.w.points
        self.tiles = problem.n * self.h.tiles * self.w.tiles
        self.groups = problem.groups
        c, k = problem.c // problem.groups, problem.k // problem.groups
        self.c, self.k = (k, c) if problem.direction == "dgrad" else (c, k)
        self.vectors = -(-self.c // self.L)
        self.threads = max(1, min(device.threads, problem.macs // 200_000))
        self.taps = prod(problem.filter)
        self.images_last = problem.rank > 1 and problem.layouts[0] == "nhwc"
        self.filters_last = problem.rank > 1 and problem.layouts[1] == "nhwc"

    def image(self, channels: int, axes: tuple[int, int]) -> tuple[int, int, int, int]:
        """Pitches of an image, a row, a pixel and a channel."""
        h, w = axes
        if self.images_last:
            pitches = (h * w * channels, w * channels, channels, 1)
        else:
            pitches = (channels * h * w, w, 1, h * w)
        n, row, pixel, channel = (pitch * self.held for pitch in pitches)
        return n, row, pixel, channel

    def filters(self) -> tuple[int, int, int]:
        """Pitches of k, c and a tap."""
        c = self.problem.c // self.groups
        pitches = (c * self.taps, 1, c) if self.filters_last else (c * self.taps, self.taps, 1)
        k, c, tap = (pitch * self.held for pitch in pitches)
        return k, c, tap

    def common(self) -> dict[int, int]:
        return {
            kernels.TILES: self.tiles, kernels.TILES_Y: self.h.tiles, kernels.TILES_X: self.w.tiles,
            kernels.CHANNELS: self.c, kernels.OUTS: self.k, kernels.VECTORS: self.vectors, kernels.W_RUN: self.L,
            kernels.THREADS: self.threads,
        }  # fmt: skip

    def source(self, channels: int, sizes: tuple[int, int], origins: tuple[int, int]) -> dict[int, int]:
        n, row, pixel, channel = self.image(channels, sizes)
        return {
            kernels.SRC_N: n, kernels.SRC_H: row, kernels.SRC_W: pixel, kernels.SRC_C: channel,
            kernels.HEIGHT: sizes[0], kernels.WIDTH: sizes[1],
            kernels.ORIGIN_H: origins[0], kernels.ORIGIN_W: origins[1],
        }  # fmt: skip

    def strip(self, high: int, wide: int, cols: int, channels: int) -> tuple[int, int]:
        """Rows of tiles that are gathered together, and the bytes that takes, for tiles of high x wide pixels."""
        if self.images_last:
            return 1, high * wide * (_up(channels, self.L) * self.size + 64)
        width = (cols - 1) * self.w.m + wide
        rows = max(1, min(self.h.tiles, (STRIP_BYTES // (width * self.line) - high) // self.h.m + 1))
        return rows, (((rows - 1) * self.h.m + high) * width + self.L) * self.line


STRIP_BYTES = 24 << 10


def _table(words: dict[int, int]) -> Tensor:
    return torch.tensor([words.get(i, 0) for i in range(kernels.WORDS)], dtype=torch.int64)


@functools.lru_cache(maxsize=512)
def _plan(problem: Problem, device: Device, knobs: WinogradKnobs) -> _Forward | _Gradient:
    return (_Gradient if problem.direction == "wgrad" else _Forward)(problem, device, knobs)


# Rates of products of MR rows by two vectors, of the largest: 12 sums and 3 operands fill AVX2's 16 registers.
_RATES_16 = {6: 1.0, 5: 0.97, 4: 0.86, 2: 0.55}
_RATES_32 = {14: 1.0, 12: 1.0, 10: 1.0, 8: 1.0, 6: 1.0, 4: 0.86, 2: 0.54}
NV = 2
M_BYTES = 512 << 10


def _rows(tiles: int) -> int:
    rates = _RATES_32 if LANE_BYTES == 64 else _RATES_16
    return min(rates, key=lambda rows: (round(_up(tiles, rows) / rates[rows] / tiles, 2), -rows))


def _division(s: _Shape, knobs: WinogradKnobs, groups: int, blocks: int) -> tuple[int, int]:
    """Chunks of tiles and ranges of filters. Few tiles are not shared out, since each thread would read all filters."""
    chunks = min(groups, -(-s.tiles // knobs.tiles))
    if 1 < chunks < 8 * s.threads:
        chunks = min(groups, _up(chunks, s.threads))
    return chunks, 1 if chunks >= s.threads else min(blocks, -(-2 * s.threads // chunks))


class _Forward:
    """fprop and dgrad."""

    def __init__(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> None:
        s = self.shape = _Shape(problem, device, knobs)
        self.fly = knobs.way == "fly"
        self.MR = _rows(s.tiles)
        W = NV * s.L
        self.blocks = -(-s.k // W)
        self.groups = -(-s.tiles // self.MR)
        self.chunks, self.ranges = _division(s, knobs, self.groups, self.blocks)
        most = -(-self.groups // self.chunks)
        rows = most * self.MR
        cols = min(s.w.tiles, rows)
        turned = problem.direction == "dgrad"
        v_point = _odd(s.vectors * self.MR * s.line)
        group = s.points * v_point
        u_point = _odd(s.vectors * s.L * W * s.size)
        m_point = _odd(rows * W * s.size)
        together = max(1, min(4, -(-self.blocks // self.ranges), M_BYTES // (s.points * m_point)))
        strip_rows, strip = s.strip(s.h.points, s.w.points, cols, s.c)
        if s.images_last:
            result = s.h.m * s.w.m * s.line
        else:
            result = (s.h.m * min(s.w.tiles, rows) * s.w.m + s.L) * s.line
        parts = {
            kernels.STRIP_AT: strip, kernels.RESULT_AT: result, kernels.TAPS_AT: (s.taps * s.L + s.L) * s.line,
            kernels.M_AT: s.points * m_point * together, kernels.V_AT: group * most,
            kernels.U_AT: s.points * u_point * together * self.fly,
        }  # fmt: skip
        words, at = s.common(), 0
        for key, size in parts.items():
            words[key] = at
            at += _odd(size)
        self.thread_bytes = _up(at, 4096) + 64
        out_c, in_c = (problem.c, problem.k) if turned else (problem.k, problem.c)
        words |= s.source(in_c, (s.h.size, s.w.size), (s.h.origin, s.w.origin))
        n, row, pixel, channel = s.image(out_c, (s.h.out, s.w.out))
        w_k, w_c, w_tap = s.filters()
        words |= {
            kernels.DST_N: n, kernels.DST_H: row, kernels.DST_W: pixel, kernels.DST_C: channel,
            kernels.OUT_H: s.h.out, kernels.OUT_W: s.w.out, kernels.BLOCKS: self.blocks,
            kernels.STRIP_ROWS: strip_rows, kernels.GROUPS: self.groups, kernels.CHUNKS: self.chunks,
            kernels.RANGES: self.ranges, kernels.V_POINT: v_point, kernels.V_GROUP: group, kernels.V_ROWS: self.MR,
            kernels.V_ROW: s.line, kernels.V_VECTOR: self.MR * s.line, kernels.V_VECTORS: 1,
            kernels.U_POINT: u_point, kernels.U_BLOCK: s.points * u_point, kernels.M_POINT: m_point,
            kernels.M_BLOCK: s.points * m_point, kernels.M_BLOCKS: together,
            kernels.W_OUT: w_c if turned else w_k, kernels.W_IN: w_k if turned else w_c, kernels.W_TAP: w_tap,
            kernels.THREAD_BYTES: self.thread_bytes,
            kernels.PARTS: max(1, min(s.vectors, -(-8 * s.threads // self.blocks))),
        }  # fmt: skip
        self.words = words
        self.u_bytes = 0 if self.fly else s.points * u_point * self.blocks
        # Filters that would fill more than a cache are kept, but not made for a single call: 9 ms for 512 to 512.
        self.first: _Forward | None = None
        if problem.direction == "fprop" and s.groups * self.u_bytes > FAR:
            self.first = _Forward(problem, device, WinogradKnobs(knobs.m, "fly", 96))
        self.workspace = 64 + s.groups * self.u_bytes + s.threads * self.thread_bytes
        if self.first:
            self.workspace = max(64 + s.threads * self.thread_bytes, self.first.workspace)

    def cycles(self, per_cycle: float) -> float:
        """Predicted time of a group of channels, in cycles; `per_cycle`: bytes that memory moves in one."""
        s, m = self.shape, self.shape.knobs.m
        rates = _RATES_32 if LANE_BYTES == 64 else _RATES_16
        outs = self.blocks * NV
        multiply = 1.08 * s.points * self.groups * self.MR * s.vectors * s.L * outs / 2 / rates[self.MR]
        images = s.tiles * s.vectors * _IMAGE[m] * (min(self.ranges, s.threads) if self.chunks < s.threads else 1)
        filters, memory = 0.0, 0.0
        u_bytes = s.points * s.vectors * s.L * outs * s.line
        if self.fly:
            filters = self.chunks * s.c * outs * _FILTER[m] * 1.5
        else:
            far = 0.1 if u_bytes <= 8 << 20 else 0.5 if u_bytes <= 24 << 20 else 0.9  # of a cache that cores share
            memory = far * u_bytes * self.chunks / (3 * per_cycle)
            if s.problem.direction == "dgrad":
                filters = s.c * outs * _FILTER[m] * 1.2 + 4e3 * s.threads
                memory += u_bytes * (1.0 if u_bytes > 8 << 20 else 0.3) / per_cycle
        tasks = self.chunks * self.ranges
        uneven = -(-tasks // s.threads) * s.threads / tasks
        moved = 1.3 * (prod(s.problem.x_shape) + prod(s.problem.y_shape)) // s.groups * s.size / per_cycle
        work = (multiply + images + s.tiles * outs * _RESULT[m] + filters) * uneven / s.threads
        return work + memory + moved

    def runner(self) -> Runner:
        s, problem = self.shape, self.shape.problem
        turned = problem.direction == "dgrad"
        axes = (s.h.m, s.h.taps, s.w.m, s.w.taps)
        table = _table(self.words)
        finish = Words(problem)
        work = kernels.forward_kernel(
            s.T, s.M, s.images_last, s.filters_last, s.images_last, turned, self.MR, NV, *axes, self.fly, finish.wanted
        )
        filters = None if self.fly else kernels.filter_kernel(s.T, s.M, s.filters_last, turned, NV, *axes)
        threads, groups, u_bytes, address = s.threads, s.groups, self.u_bytes, table.data_ptr()
        src_g = s.c * self.words[kernels.SRC_C]
        dst_g = s.k * self.words[kernels.DST_C]
        w_g = (problem.k // groups) * s.filters()[0]
        bias_g = s.k * s.held
        key = (Winograd.name, s.points, s.h.m, s.w.m, problem.w_shape, problem.layouts[1], groups)

        number, shares = numbering(threads), [0] * threads  # a counter for each thread's share of the tasks
        first_time = self.first.runner() if self.first else None

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None,
                residual: Tensor | None = None) -> None:  # fmt: skip
            base = _aligned(workspace)
            scratch = base if first_time else base + groups * u_bytes
            if filters is None:
                u, u_step = b.data_ptr(), w_g
            else:
                assert workspace is not None

                def make(to: Tensor) -> None:
                    for g in range(groups):
                        launch(
                            filters,
                            (address, b.data_ptr() + g * w_g, to.data_ptr() + g * u_bytes, scratch, number, *shares),
                            threads,
                        )

                if first_time:
                    later = prepared_if_seen(b, key, make, lambda: room((groups * u_bytes,), (1,), torch.uint8))
                    if later is None:
                        return first_time(a, b, out, workspace, bias, residual)
                    made = later
                else:
                    start = base - workspace.data_ptr()
                    made = workspace[start : start + groups * u_bytes]
                    if turned:
                        make(made)
                    else:
                        made = prepared(b, key, make, made)
                u, u_step = made.data_ptr(), u_bytes
            x, y = a.data_ptr(), out.data_ptr()
            first = 0 if bias is None else bias.data_ptr()
            words = finish.of(out, residual)
            for g in range(groups):
                biases = first + g * bias_g if first else 0
                places = x + g * src_g, u + g * u_step, y + g * dst_g, biases, scratch
                launch(work, (address, *places, number, *words, *shares), threads)

        run.tables = (table,)  # type: ignore[attr-defined]
        return run


NV_GRADIENT = 3 if LANE_BYTES < 64 else 2
D_BYTES = 300 << 10


class _Gradient:
    """wgrad."""

    def __init__(self, problem: Problem, device: Device, knobs: WinogradKnobs) -> None:
        s = self.shape = _Shape(problem, device, knobs)
        nv = NV_GRADIENT
        self.MR, W = s.L // 2, nv * s.L
        self.blocks = -(-s.k // W)
        self.runs = -(-s.tiles // knobs.tiles)
        tiles = -(-s.tiles // self.runs)
        self.chunks, self.ranges = _grid(s.vectors, self.blocks, s.threads, s.L, W, s.points)
        per_c, per_k = -(-s.vectors // self.chunks), -(-self.blocks // self.ranges)
        # Squares of sums that stay in the second-level cache.
        wide, high = per_c, per_k
        while s.points * wide * s.L * high * W * s.size > D_BYTES and (wide, high) != (1, 1):
            if (wide * s.L >= high * W and wide > 1) or high == 1:
                wide = -(-wide // 2)
            else:
                high = -(-high // 2)
        d_row = high * W * s.size
        d_point = _odd(wide * s.L * d_row)
        square = s.points * d_point
        several = self.runs > 1
        d_task = square * -(-per_c // wide) * -(-per_k // high)
        cols = min(s.w.tiles, tiles)
        strip_x, bytes_x = s.strip(s.h.points, s.w.points, cols, per_c * s.L)
        strip_y, bytes_y = s.strip(s.h.m, s.w.m, cols, per_k * W)
        v_vector, y_block = tiles * s.line, tiles * nv * s.line
        v_point, y_point = _odd(per_c * v_vector), _odd(per_k * y_block)
        parts = {
            kernels.STRIP_AT: max(bytes_x, bytes_y), kernels.TAPS_AT: (s.taps * s.L + s.L) * s.line,
            kernels.M_AT: 0 if several else square, kernels.V_AT: s.points * v_point, kernels.U_AT: s.points * y_point,
        }  # fmt: skip
        common, at = s.common(), 0
        for key, size in parts.items():
            common[key] = at
            at += _odd(size)
        self.thread_bytes = _up(at, 4096) + 64
        self.d_bytes = d_task * self.chunks * self.ranges if several else 0
        common |= {kernels.THREAD_BYTES: self.thread_bytes, kernels.V_ROWS: 1 << 40, kernels.V_GROUP: 0}
        x = common | s.source(problem.c, (s.h.size, s.w.size), (s.h.origin, s.w.origin))
        x |= {
            kernels.STRIP_ROWS: strip_x, kernels.V_POINT: v_point, kernels.V_ROW: s.line, kernels.V_VECTORS: 1,
            kernels.V_VECTOR: v_vector,
        }  # fmt: skip
        y = common | s.source(problem.k, (s.h.out, s.w.out), (0, 0))
        y |= {
            kernels.STRIP_ROWS: strip_y, kernels.V_POINT: y_point, kernels.V_ROW: nv * s.line, kernels.V_VECTORS: nv,
            kernels.V_VECTOR: y_block, kernels.CHANNELS: s.k, kernels.VECTORS: -(-s.k // s.L),
        }  # fmt: skip
        w_k, w_c, w_tap = s.filters()
        product = common | {
            kernels.V_POINT: v_point, kernels.V_VECTOR: v_vector, kernels.U_POINT: y_point, kernels.U_BLOCK: y_block,
            kernels.BLOCKS: self.blocks, kernels.CHUNKS: self.chunks, kernels.RANGES: self.ranges,
            kernels.RUNS: self.runs, kernels.C_STEP: wide, kernels.K_STEP: high, kernels.D_ROW: d_row,
            kernels.D_POINT: d_point, kernels.D_SQUARE: square, kernels.D_TASK: d_task, kernels.W_OUT: w_k,
            kernels.W_IN: w_c, kernels.W_TAP: w_tap,
        }  # fmt: skip
        self.tables = (x, y, product)
        self.workspace = 64 + self.d_bytes + s.threads * self.thread_bytes

    def cycles(self, per_cycle: float) -> float:
        """Predicted time of a group of channels, in cycles; `per_cycle`: bytes that memory moves in one."""
        s, m = self.shape, self.shape.knobs.m
        outs = self.blocks * NV_GRADIENT
        multiply = 1.12 * s.points * s.tiles * s.vectors * s.L * outs / 2
        images = s.tiles * (s.vectors * self.ranges + outs * self.chunks) * _IMAGE[m]
        finish = s.vectors * s.L * outs * _FILTER[m]
        sums = s.points * s.vectors * s.L * outs * s.line
        memory = (2 * sums * (self.runs - 1) * (0.4 if sums > 8 << 20 else 0.1) if self.runs > 1 else 0) / per_cycle
        moved = 1.3 * (prod(s.problem.x_shape) + prod(s.problem.y_shape)) // s.groups * s.size / per_cycle
        tasks = self.chunks * self.ranges
        uneven = -(-tasks // s.threads) * s.threads / tasks
        return (multiply + images + finish) * uneven / s.threads + memory + moved

    def runner(self) -> Runner:
        s = self.shape
        axes = (s.h.m, s.h.taps, s.w.m, s.w.taps)
        work = kernels.gradient_kernel(s.T, s.M, s.images_last, s.filters_last, self.MR, NV_GRADIENT, *axes)
        tables = tuple(_table(words) for words in self.tables)
        addresses = tuple(table.data_ptr() for table in tables)
        channel = self.tables[0][kernels.SRC_C], self.tables[1][kernels.SRC_C]
        x_g, y_g, w_g = s.c * channel[0], s.k * channel[1], s.k * s.filters()[0]
        threads, groups, d_bytes = s.threads, s.groups, self.d_bytes
        shares = (numbering(threads), *[0] * threads)

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
            kept = _aligned(workspace)
            for g in range(groups):
                x, dy, dw = a.data_ptr() + g * x_g, b.data_ptr() + g * y_g, out.data_ptr() + g * w_g
                launch(work, (*addresses, x, dy, dw, kept, kept + d_bytes, *shares), threads)

        run.tables = tables  # type: ignore[attr-defined]
        return run


def _grid(vectors: int, blocks: int, threads: int, L: int, W: int, points: int) -> tuple[int, int]:
    """Ranges of channels and of filters, about as many as threads: all of them transform what they multiply."""

    def cost(grid: tuple[int, int]) -> float:
        chunks, ranges = grid
        c, k = -(-vectors // chunks), -(-blocks // ranges)
        task = points * c * L * k * W / L / 2 + 140 * (c + k * W // L)  # cycles for a tile
        return task * -(-chunks * ranges // threads)

    most = 2 * threads
    grids = [(c, k) for c in range(1, min(vectors, most) + 1) for k in range(1, min(blocks, most) + 1) if c * k <= most]
    return min(grids, key=lambda grid: (cost(grid), grid[0] * grid[1]))
