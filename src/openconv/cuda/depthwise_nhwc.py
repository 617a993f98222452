"""The channels-last half of cuda.depthwise: a thread owns a few channels that lie side by side.

Three kernels:

``Window`` (depthwise_nhwc.cu)
    fprop and dgrad of filters up to 7x7 of any stride. A strip of results slides down the image; each input row is
    loaded once for each strip. 3x3 runs at the speed of memory, 7x7 at that of multiplications.
``Tile`` (depthwise_nhwc_large.cu)
    fprop and dgrad of everything else: larger filters, dilation, three axes, several filters for a channel.
``Taps`` (depthwise_nhwc_wgrad.cu)
    wgrad. Threads own taps and sum over their share of the pixels; a second launch adds the shares.

The costs count instructions. A multiprocessor issues four warp instructions a cycle, as many as it has multiplications,
so that a conversion or an address is as dear as a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod
from typing import Any, NamedTuple

from torch import Tensor

from ..device import Device
from ..engine import Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from . import jit, render
from .device import CudaDevice
from .launch import Launch, aligned, pack, single

__all__ = ["Taps", "Tile", "Window", "build", "cost", "knobs", "refusals", "sources", "traits", "workspace_bytes"]

_DTYPES = ("f32", "f16", "bf16")
_LARGEST = 31
_SPAN = 64  # columns that a thread has a bit for
_WINDOW = 7  # rows and columns of a filter that is unrolled as a whole
_ALTERNATIVES = 12
_REGISTERS = 65536  # of a multiprocessor
_SHARED = 40 << 10  # bytes for a block's filters
_LATENCY = 0.9e-6  # from asking for a row to having it while memory is busy


@dataclass(frozen=True)
class Window(Knobs):
    """``channels`` and ``strip``: channels and result columns of a thread; ``rows``: result rows that it walks down;
    ``ahead``: rows that are asked for before they are used; ``threads``: of a block, at most."""

    channels: int
    strip: int
    rows: int
    ahead: int = 1
    threads: int = 128


@dataclass(frozen=True)
class Tile(Knobs):
    """``channels``, ``strip`` and ``rows``: the channels, columns and rows of a thread's results; ``chunk``: filter
    columns between two loads; ``threads``: of a block, at most."""

    channels: int
    strip: int
    rows: int
    chunk: int
    threads: int = 128


@dataclass(frozen=True)
class Taps(Knobs):
    """``channels``, ``tap_rows`` and ``tap_columns``: what a thread sums up; ``strip``: columns of dy that it takes at
    a time, ``rows`` down the image; ``parts``: shares of the pixels; ``threads``: of a block, at most."""

    channels: int
    strip: int
    rows: int
    tap_rows: int
    tap_columns: int
    parts: int
    threads: int = 128


AnyKnobs = Window | Tile | Taps


def refusals(problem: Problem, device: Device) -> Iterator[str]:
    """See :meth:`openconv.engine.Engine.refusals`; likewise below."""
    if problem.groups != problem.c or problem.c == 0:
        yield f"groups is {problem.groups}; wanted one for each channel, C = {problem.c}"
    if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in _DTYPES:
        yield f"dtypes are {'*'.join(problem.dtypes)}; wanted one of {', '.join(_DTYPES)} for all tensors"
    if problem.layouts[0] != problem.layouts[2]:
        yield f"layouts are {'*'.join(problem.layouts)}; wanted one for both images"
    if max(problem.filter) > _LARGEST:
        yield f"filter is {problem.filter}; wanted at most {_LARGEST} taps an axis"
    if max(*problem.stride, *problem.dilation) > 64:
        yield f"stride is {problem.stride}, dilation {problem.dilation}; wanted at most 64 an axis"


def traits(problem: Problem, knobs: AnyKnobs) -> Traits:
    """Sums in f32: as long as the filter, or as a thread's share of the pixels."""
    if not isinstance(knobs, Taps):
        return Traits("f32", (problem.macs // max(1, prod(problem.result_shape)) + 2) * 2.0**-24)
    # A thread adds the products of its own chunks in f32, its block the sums of its threads; the rest is in f64.
    work = _Work(problem, knobs)
    each = ceil(work.items / (knobs.parts * work.slices)) * knobs.rows * knobs.strip
    length = min(each + work.slices, problem.gemm.k) + 2
    return Traits("f32", length * 2.0**-24)


def workspace_bytes(problem: Problem, device: Device | None, knobs: AnyKnobs) -> int:
    """A sum in f32 for each weight and part of a wgrad."""
    return 4 * knobs.parts * prod(problem.w_shape) if isinstance(knobs, Taps) else 0


@lru_cache(maxsize=256)
def knobs(problem: Problem, device: Device) -> Iterable[AnyKnobs]:
    """All that fit in registers, the cheapest by prediction first."""
    found: Iterator[AnyKnobs]
    if problem.direction == "wgrad":
        found = _taps(problem, device)
    elif _fits_window(problem):
        found = _windows(problem, device)
    else:
        found = _tiles(problem, device)
    unique: list[AnyKnobs] = list(dict.fromkeys(found))
    best = sorted(unique, key=lambda each: cost(problem, device, each))
    return tuple(best[:_ALTERNATIVES])


def cost(problem: Problem, device: Device, knobs: AnyKnobs) -> float:
    """The larger of the time to move all bytes and the time to issue all instructions, and a part of the other."""
    work = _Work(problem, knobs)
    rate = device.flops / 2  # instructions a second, over all lanes
    warps = device.threads * min(work.resident, 64)
    waves = work.warps / warps
    # The last wave of blocks is not full. Three warps hide what a scheduler waits for, fewer do in part.
    full = waves / ceil(waves) if waves > 1 else 1.0
    hidden = min(1.0, 0.3 + 0.7 * min(waves, 1.0) * work.resident / 12)
    issue = work.instructions / (rate * 0.85 * full * hidden)
    share = min(0.8, min(waves, 1.0) * warps * work.in_flight / _LATENCY / device.bandwidth)
    moved = (problem.min_bytes + work.extra_bytes) / (device.bandwidth * max(share, 0.05))
    if problem.k > problem.c:  # filters of a channel one after the other, and results of one far apart
        issue *= 1 + problem.k // problem.c / (4 if problem.direction == "dgrad" else 64)
    second = 2.5e-6 + work.extra_bytes / (0.5 * device.bandwidth) if isinstance(knobs, Taps) else 0.0
    # Measured: the rows that a wgrad loads and converts hide behind each other's products in part.
    share = 1.3 if isinstance(knobs, Taps) else 1.2
    return 2e-6 + share * (max(issue, moved) + 0.25 * min(issue, moved)) + second


def build(problem: Problem, device: Device, knobs: AnyKnobs) -> Runner:
    """Compile for this problem."""
    assert isinstance(device, CudaDevice)
    work = _Work(problem, knobs)
    [source] = sources(problem, device, knobs)
    grid, block = (work.blocks,), (work.lanes * work.slices,)
    wide = work.channels * work.size  # bytes that are loaded at once

    if isinstance(knobs, Taps):
        name = "depthwise_nhwc_wgrad"
        first = Launch(source, name, device, grid, block, work.params)
        taps = prod(problem.filter)
        second = Launch(
            source, f"{name}_sum", device, (taps * ceil(problem.k / 32),), (256,), work.params, follows=True
        )

        def run_wgrad(x: Tensor, dy: Tensor, out: Tensor, workspace: Tensor | None, operands: Any) -> None:
            assert workspace is not None
            x, dy = aligned(x, wide), aligned(dy, wide)
            pointers = x.data_ptr(), dy.data_ptr(), out.data_ptr(), workspace.data_ptr()
            first(*pointers)
            second(*pointers)

        return run_wgrad

    name = "depthwise_nhwc" if isinstance(knobs, Window) else "depthwise_nhwc_large"
    launch = Launch(source, name, device, grid, block, work.params)
    return single(launch, wide)


def sources(problem: Problem, device: Device, knobs: AnyKnobs) -> list[jit.Source]:
    """What :func:`build` compiles."""
    work = _Work(problem, knobs)
    return [jit.Source(work.file, render.traits(problem, work.constants))]


# -- the work of a kernel -------------------------------------------------------------------------------------------


class _Axes(NamedTuple):
    """A value for each of three axes of space: what is not there has one."""

    d: int
    h: int
    w: int


def _three(values: tuple[int, ...], lack: int = 1) -> _Axes:
    return _Axes(*(lack,) * (3 - len(values)), *values)


class _Work:
    """How the knobs cut a problem up, and what a thread has to do."""

    def __init__(self, problem: Problem, knobs: AnyKnobs) -> None:
        self.problem, self.knobs = problem, knobs
        self.channels = V = knobs.channels
        self.size = DTYPE_BYTES[problem.dtypes[0]]
        self.words = max(1, V * self.size // 4)
        self.convert = 0 if self.size == 4 else V
        self.multiplier = problem.k // problem.c
        self.filter, self.stride, self.dilation = (
            _three(problem.filter), _three(problem.stride), _three(problem.dilation),
        )  # fmt: skip
        self.pad = _three(tuple(low for low, _ in problem.padding), 0)
        self.image, self.out = _three(problem.spatial), _three(problem.out)
        self.backward = problem.direction == "dgrad"
        self.result = self.image if self.backward else self.out
        self.input = self.out if self.backward else self.image
        self.extra_bytes = 0
        self.instructions, self.in_flight = 0.0, 0.0
        if isinstance(knobs, Window):
            self._window(knobs)
        elif isinstance(knobs, Tile):
            self._tile(knobs)
        else:
            self._taps(knobs)

    def _block(self, channels: int, taps: int, items: int, threads: int, tap_tiles: int = 1) -> None:
        """Lanes along the channels, then strips; ``taps`` of each channel lie in shared memory."""
        V = self.channels
        vectors = ceil(channels / V)
        self.most_lanes = min(64, max(1, _SHARED // (4 * taps * V) - 1), threads)
        self.lanes = _lanes(vectors, V * self.size, self.most_lanes, threads)
        self.slices = max(1, threads // self.lanes)
        self.groups = ceil(vectors / self.lanes)
        self.items = items
        self.shared = 4 * taps * (self.most_lanes + 1) * V
        self.threads = threads

    def _fill(self, registers: int) -> None:
        """Registers, and warps that a multiprocessor then holds."""
        # The compiler saves a few where it has to; not where there are few.
        limit = next((n for n, more in ((80, 70), (96, 84), (128, 133), (168, 173)) if registers <= more), 255)
        self.registers = registers
        self.residents = max(1, min(_REGISTERS // (limit * self.threads), (160 << 10) // self.shared, 16))
        self.resident = self.residents * ceil(self.lanes * self.slices / 32)

    def _window(self, knobs: Window) -> None:
        p, V, L = self.problem, knobs.channels, knobs.strip
        (_, R, S), (_, SH, SW) = self.filter, self.stride
        self.file = "depthwise_nhwc.cu"
        phase_h, phase_w = (self.pad.h % SH, self.pad.w % SW) if self.backward else (0, 0)
        taken, done, live = (1, SH, max(R, SH)) if self.backward else (SH, 1, ceil(R / SH))
        if self.backward:
            low = (S - 1 - phase_w) // SW if phase_w < S - 1 else 0
            columns = (L - 1 + phase_w) // SW + low + 1
        else:
            columns = (L - 1) * SW + S
        strips, chunks = ceil(self.result.w / L), ceil((self.result.h + phase_h) / knobs.rows)
        self._block(p.c, R * S, p.n * strips * chunks, knobs.threads)
        kept = R * S * V <= 40
        skips = R * S >= 25
        self.columns = columns
        # Filters in registers leave one block of instructions, in which not all columns are floats at the same time.
        raw = knobs.ahead * columns * self.words
        registers = live * L * V + raw + (R * S * V + columns * V // 2 + 12 if kept else columns * V + 6 * V + 18)
        registers += (24 if kept else 12) if taken > 1 else 0
        registers += 8 if kept and self.result.w % L else 0
        registers += 8 * (knobs.ahead - 1)
        registers += (
            columns * V // 2 + 8 * knobs.ahead if self.size == 4 else 0
        )  # the row that was loaded is the one in use
        self._fill(registers)
        self.blocks = ceil(self.items / self.slices) * self.groups
        self.constants: dict[str, int | bool | str] = {
            "backward": self.backward, "filter_h": R, "filter_w": S, "stride_h": SH, "stride_w": SW,
            "phase_h": phase_h, "phase_w": phase_w, "channels": V, "strip": L, "ahead": knobs.ahead,
            "lanes": self.most_lanes, "threads": knobs.threads, "blocks": self.residents, "kept": kept, "skips": skips,
            "ragged": self.result.w % L != 0,
        }  # fmt: skip
        self.params = pack(3 + max(1, len(p.epilogue.operands)), (), [
            p.c, self.lanes, self.groups, self.items, strips, chunks, knobs.rows,
            self.input.h, self.input.w, self.result.h, self.result.w, self.pad.h, self.pad.w,
        ])  # fmt: skip
        steps = ceil(knobs.rows / done) + ceil(live / done) - 1
        products = R * S * L * V // (SW if self.backward else 1)
        products = products * (steps if not skips else ceil(knobs.rows / done)) // steps
        each = products + taken * columns * (4 + self.convert) + done * L * (3 + V // 2) + (0 if kept else R * S) + 20
        each += self._epilogue_instructions() * done * L * V
        self.warps = self.blocks * ceil(self.lanes * self.slices / 32)
        self.instructions = 32 * self.warps * (steps * each + 100)
        useful = taken * L * (SW if not self.backward else 1 / SW) / columns
        self.in_flight = 32 * knobs.ahead * columns * V * self.size * min(1.0, useful) * 2

    def _tile(self, knobs: Tile) -> None:
        p, V, L, rows = self.problem, knobs.channels, knobs.strip, knobs.rows
        (T, R, S), (SD, SH, SW), (DD, DH, DW) = self.filter, self.stride, self.dilation
        self.file = "depthwise_nhwc_large.cu"
        phase_w = self.pad.w % SW if self.backward else 0
        columns = len(_tile_columns(L, min(knobs.chunk, S), SW, DW, phase_w, self.backward))
        strips, tiles = ceil(self.result.w / L), ceil(self.result.h / rows)
        channels = p.c if self.backward else p.k
        band = R if 4 * R * S * 17 * V <= _SHARED else max(1, _SHARED // (4 * S * 17 * V))
        self._block(channels, band * S, p.n * self.result.d * strips * tiles, knobs.threads)
        # One whole chunk and a rest are one block of instructions: the columns of both are loaded together.
        rest = L + S % knobs.chunk + 4 if S // knobs.chunk == 1 and S % knobs.chunk else 0
        self._fill(rows * L * V + (columns + rest) * (V + self.words) + 2 * V + rows + (40 if rest else 28))
        self.blocks = ceil(self.items / self.slices) * self.groups
        self.constants = {
            "backward": self.backward, "multiplier": self.multiplier, "filter_d": T, "filter_h": R, "filter_w": S,
            "stride_d": SD, "stride_h": SH, "stride_w": SW, "dilation_d": DD, "dilation_h": DH, "dilation_w": DW,
            "phase_w": phase_w, "channels": V, "strip": L, "tile": rows, "chunk": min(knobs.chunk, S), "band": band,
            "lanes": self.most_lanes, "threads": knobs.threads, "blocks": self.residents,
        }  # fmt: skip
        self.params = pack(3 + max(1, len(p.epilogue.operands)), (), [
            p.k if self.backward else p.c, channels, self.lanes, self.groups, self.items, strips, tiles,
            *self.input, *self.result, *self.pad,
        ])  # fmt: skip
        self.warps = self.blocks * ceil(self.lanes * self.slices / 32)
        chunks = ceil(S / knobs.chunk)
        products = T * R * S * rows * L * V
        if self.backward:  # of taps that a stride leaves, for every filter of a channel
            products = products * self.multiplier // (SD * SH * SW)
        met = max(1.0, rows / max(SH, DH)) * band / (band + rows - 1)  # result rows of an input row, on average
        loads = T * R * rows / met * chunks * (columns * (5 + self.convert) + 40)
        reads = T * R * S * rows
        self.instructions = 32 * self.warps * (products + loads + reads + rows * L * (5 + V) + 200)
        self.in_flight = 32 * columns * V * self.size

    def _taps(self, knobs: Taps) -> None:
        p, V, L = self.problem, knobs.channels, knobs.strip
        (T, R, S), (SD, SH, SW), (DD, DH, DW) = self.filter, self.stride, self.dilation
        RT, ST = knobs.tap_rows, knobs.tap_columns
        self.file = "depthwise_nhwc_wgrad.cu"
        columns = len({q * SW + s * DW for q in range(L) for s in range(ST)})
        strips, chunks = ceil(self.out.w / L), ceil(self.out.h / knobs.rows)
        tiles = T * ceil(R / RT) * ceil(S / ST)
        live = ceil(RT / SH)
        self._block(p.k, RT * ST, p.n * self.out.d * strips * chunks, knobs.threads)
        self._fill(
            RT * ST * V
            + live * L * V
            + columns * V
            + (columns + L) * self.words
            + (58 if live > 3 else 36 + 2 * self.size)
            + (12 if SH > 1 else 0)
            + (16 if self.out.w % L else 0)
        )
        self.blocks = self.groups * tiles * knobs.parts
        self.constants = {
            "multiplier": self.multiplier, "filter_d": T, "filter_h": R, "filter_w": S, "stride_d": SD, "stride_h": SH,
            "stride_w": SW, "dilation_d": DD, "dilation_h": DH, "dilation_w": DW, "channels": V, "strip": L,
            "tap_rows": RT, "tap_columns": ST, "ragged": self.out.w % L != 0, "lanes": self.most_lanes,
            "threads": knobs.threads, "blocks": self.residents,
        }  # fmt: skip
        self.params = pack(4, (), [
            p.c, p.k, self.lanes, self.groups, knobs.parts, self.items, strips, chunks, knobs.rows,
            *self.image, *self.out, *self.pad,
        ])  # fmt: skip
        self.warps = self.blocks * ceil(self.lanes * self.slices / 32)
        steps = knobs.rows + live - 1
        each = knobs.rows * RT * ST * L * V + steps * (
            min(SH, RT) * columns * (4 + self.convert) + L * (4 + self.convert) + live * L * V // 2 + 20
        )
        turns = ceil(self.items / (knobs.parts * self.slices))
        reduction = RT * ST * V * (3 + self.slices)
        self.instructions = 32 * self.warps * (turns * (each + 80) + reduction)
        self.in_flight = 32 * (columns + L) * V * self.size
        self.extra_bytes = 2 * workspace_bytes(p, None, knobs)

    def _epilogue_instructions(self) -> int:
        return self.problem.epilogue.flops + 2 * len(self.problem.epilogue.operands)


def _lanes(vectors: int, size: int, most: int, threads: int) -> int:
    """Vectors of ``size`` bytes in a block: few idle lanes, full blocks, and runs of memory of 128 bytes or more."""

    def wasted(lanes: int) -> tuple[float, int]:
        used = lanes * max(1, threads // lanes)
        idle = ceil(vectors / lanes) * lanes / vectors * ceil(used / 32) * 32 / used
        return (idle * (threads / used) ** 0.5 * (1.1 if lanes * size < 128 else 1.0), -lanes)

    fewest = ceil(vectors / most)
    return min((ceil(vectors / groups) for groups in range(fewest, 4 * fewest + 3)), key=wasted)


def _tile_columns(L: int, count: int, stride: int, dilation: int, phase: int, backward: bool) -> set[int]:
    if not backward:
        return {q * stride + s * dilation for q in range(L) for s in range(count)}
    met = (q + phase - s * dilation for q in range(L) for s in range(count))
    return {at // stride for at in met if at % stride == 0}


def _tile_span(L: int, count: int, stride: int, dilation: int, backward: bool) -> int:
    """Columns from the first to the last of those, at the phase that takes most."""
    reach = (count - 1) * dilation
    return (L + stride - 2) // stride + reach // stride + 1 if backward else (L - 1) * stride + reach + 1


# -- the search space -----------------------------------------------------------------------------------------------


def _fits_window(problem: Problem) -> bool:
    return (
        problem.rank == 2 and problem.k == problem.c and set(problem.dilation) == {1}
        and max(*problem.filter, *problem.stride) <= _WINDOW
    )  # fmt: skip


def _vectors(problem: Problem, most: int = 4) -> list[int]:
    """Channels that a thread can load at once."""
    if problem.k != problem.c:
        return [1]
    size = DTYPE_BYTES[problem.dtypes[0]]
    found = [v for v in (8, 4, 2, 1) if problem.c % v == 0 and v <= most and v * size <= 16]
    return found[:2] if found[0] > 1 else found


def _most_registers(threads: int) -> int:
    return 236 if threads <= 128 else 120


def _windows(problem: Problem, device: Device) -> Iterator[Window]:
    height, width = problem.spatial if problem.direction == "dgrad" else problem.out
    stride = problem.stride[1] if problem.direction == "dgrad" else 1
    down = problem.stride[0] if problem.direction == "dgrad" else 1
    strips = {ceil(strip / stride) * stride for strip in (2, 4, 7, 8, 14) if strip < 2 * max(width, 2)}
    for channels in _vectors(problem):
        for strip in sorted(strips):
            for parts in (1, 2, 4, 8):
                rows = ceil(ceil(height / parts) / down) * down
                if parts > 1 and rows < max(2, problem.filter[0] // 2):
                    continue
                for ahead in (1, 2, 3):
                    for threads in (128, 256):
                        found = Window(channels, strip, rows, ahead, threads)
                        work = _Work(problem, found)
                        small = strip == min(strips) and ahead == 1 and channels == min(_vectors(problem))
                        if work.columns <= 63 and (work.registers <= _most_registers(threads) or small):
                            yield found


def _tiles(problem: Problem, device: Device) -> Iterator[Tile]:
    backward = problem.direction == "dgrad"
    stride, dilation, taps = problem.stride[-1], problem.dilation[-1], problem.filter[-1]
    most, fits = max(1, problem.filter[-2]), False
    for channels in _vectors(problem, 2 if problem.dtypes[0] != "f32" else 4):
        for strip in (4, 7, 8):
            strip = ceil(strip / stride) * stride if backward else strip
            for rows in (2, 4) if most > 1 else (1,):
                for wanted in (4, 5, 7, 8):
                    chunk = ceil(wanted / stride) * stride if backward else wanted
                    if _tile_span(strip, min(chunk, taps), stride, dilation, backward) > _SPAN:
                        continue
                    columns = len(_tile_columns(strip, min(chunk, taps), stride, dilation, 0, backward)) + 1
                    if rows * strip * channels + columns * channels * 1.5 <= 130 or (strip, rows, wanted) == (4, 2, 4):
                        fits = True
                        yield Tile(channels, strip, rows, chunk)
    if stride > 16 or not fits:
        yield Tile(1, stride, 1, stride // gcd(stride, dilation)) if backward else Tile(1, 1, 1, 1)


def _taps(problem: Problem, device: Device) -> Iterator[Taps]:
    rows_of_filter, columns_of_filter = problem.filter[-2:]
    dilated = problem.dilation[-2] > 1
    height = problem.out[-2]
    for channels in _vectors(problem, 4):
        for tap_rows in {1} if dilated else {min(rows_of_filter, n) for n in (3, 4, 5, 7)}:
            for tap_columns in {min(columns_of_filter, n) for n in (3, 4, 5, 7, 8)}:
                if tap_rows * tap_columns * channels > 100:
                    continue
                for strip in (2, 4, 7):
                    for share in (1, 2, 4):
                        for fill in (1, 2):
                            yield from _parts(
                                problem,
                                device,
                                Taps(channels, strip, ceil(height / share), tap_rows, tap_columns, 1),
                                fill,
                            )


def _parts(problem: Problem, device: Device, one: Taps, fill: int) -> Iterator[Taps]:
    """As many parts as fill the GPU ``fill`` times, if the registers suffice."""
    work = _Work(problem, one)
    small = (one.strip, one.tap_rows * one.tap_columns) <= (2, 9) and one.channels <= 2
    if work.registers > _most_registers(one.threads) and not small:
        return
    wanted = max(1, fill * device.threads * work.residents // work.blocks)
    parts = min(wanted, ceil(work.items / work.slices), 512)
    yield Taps(one.channels, one.strip, one.rows, one.tap_rows, one.tap_columns, parts, one.threads)
