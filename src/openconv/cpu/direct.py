"""cpu.direct: sums of outer products that stay in registers, over tiles of the image that stay in a cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..prepared import kept, prepared
from ..problem import Problem
from ..tensors import DTYPES
from . import direct_kernels as kernels
from .direct_plan import CHUNK, Cut, Geometry, geometry_of, is_even, line_cycles
from .finish import Words
from .low_precision import computed, memory_refusals, memory_token
from .matrices import Region, sum_error
from .runtime import launch, numbering
from .simd import LANE_BYTES

__all__ = ["Direct", "Tile"]


@dataclass(frozen=True)
class Tile(Knobs):
    """``rows`` scalars by ``across`` vectors are summed up in registers, over tiles of about ``pixels`` outputs;
    ``read``: the image is read in "own" slots of each task, in slots that are "shared" by several, or in "place"."""

    rows: int
    across: int
    pixels: int
    read: str


_MODES = ("own", "shared", "place")
_TINY = 200_000  # products that are over before a kernel of another shape would be loaded


class Direct(Engine):
    """The definition, blocked for registers and caches: no columns are written, no matrix product is called.

        fprop   y[pixel, k]   = sum over c, taps of   x[pixel + tap, c] * w[tap, c, k]
        dgrad   the same from dy to dx with the filters turned; a stride of s is s such sums along each axis, one for
                each remainder of the position modulo s, with the taps that meet it
        wgrad   dw[tap, c, k] = sum over pixels of    x[pixel + tap, c] * dy[pixel, k]

    A block of 6 pixels by 16 channels (AVX2; 14 by 32 with AVX-512) stays in registers while all channels and taps pass
    by: 8 loads for 12 multiply-adds, so that the multiply-add units set the pace. What a tile of some hundred pixels
    needs of the image is copied once, padded, into the cache. Filters are put into the order of the loop, and kept so
    from the second forward pass with the same ones on.

    Wins nearly everywhere that there are 8 channels or more to be made, strided and dilated layers, few input channels
    and groups among them. Loses to Winograd on dense 3x3 layers, to cpu.depthwise where every channel is by itself, and
    to cpu.filter2d where a single channel is made.
    """

    name = "cpu.direct"
    takes_bias = True
    takes_finish = True
    takes_low = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from memory_refusals(problem)

    def traits(self, problem: Problem, knobs: Tile) -> Traits:
        # Sums of CHUNK terms, or of a tile's pixels, are added up.
        problem = computed(problem)
        return Traits(problem.result_dtype, sum_error(problem))

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Tile) -> int:
        cut = _cut(problem, device, knobs)
        return sum(region.bytes for region in _regions(problem, cut))

    def knobs(self, problem: Problem, device: Device) -> Iterable[Tile]:
        return _knobs(computed(problem), device)

    def cost(self, problem: Problem, device: Device, knobs: Tile) -> float:
        return _cost(computed(problem), device, knobs)

    def build(self, problem: Problem, device: Device, knobs: Tile) -> Runner:
        cut = _cut(problem, device, knobs)
        return _build_gradient(problem, cut) if problem.direction == "wgrad" else _build(problem, cut)


def _types(problem: Problem) -> tuple[type, type]:
    """What kernels compute with, and what the tensors hold."""
    return memory_token(computed(problem).result_dtype), memory_token(problem.result_dtype)


# -- sizes -----------------------------------------------------------------------------------------------------------


def _shapes(lanes: int, size: int) -> dict[int, tuple[int, ...]]:
    """Rows of a block for each number of vectors across: what 16 registers hold (AVX2), or 32 (AVX-512), and fewer for
    short lines. Few shapes, since each is a kernel to compile."""
    wide = {2: (14, 10, 7, 4), 3: (9, 7), 1: (14, 4)}
    return wide if lanes * size == 64 else {2: (6, 5, 2), 3: (4, 3), 1: (10, 4)}


def _even(count: int, most: int) -> int:
    """The largest part when a count is cut evenly into as few parts as possible of at most so many."""
    return -(-count // -(-count // most))


def _lanes(size: int) -> int:
    """Of the kernels' vectors, not those that torch keeps to (ATEN_CPU_CAPABILITY): memory is laid out by them."""
    return LANE_BYTES // size


@lru_cache(1024)
def _blocks(problem: Problem, device: Device) -> list[tuple[float, int, int]]:
    """(cycles for all outputs of a row or line and all channels, rows, across), the quickest first."""
    geometry = geometry_of(problem)
    lanes, found = _lanes(geometry.size), []
    line = geometry.columns if problem.direction != "wgrad" else _line(geometry)[1]
    if problem.macs < _TINY:
        return [(line * geometry.o, 4, 1)]
    for across, shapes in _shapes(lanes, geometry.size).items():
        blocks = -(-geometry.o // (across * lanes))
        ways = [(blocks * line_cycles(line, rows, across), rows) for rows in shapes]
        least = min(ways)[0]
        cycles, rows = next(way for way in ways if way[0] <= 1.03 * least)
        found.append((cycles, rows, across))
    return sorted(found, key=lambda each: each[0])


def _line(geometry: Geometry) -> tuple[str, int]:
    """wgrad: what the rows of a block go along, and how many there are: channels, or taps where channels are few."""
    S, I = geometry.filter[2], geometry.i
    if geometry.channels_last or geometry.turns:
        return ("taps", S * I) if geometry.beside and S > 1 and I < 16 and geometry.g == 1 else ("channels", I)
    return ("taps", S) if I < S or (I < 4 and S > 1) else ("channels", I)


@lru_cache(1024)
def _knobs(problem: Problem, device: Device) -> tuple[Tile, ...]:
    geometry = geometry_of(problem)
    turned = problem.direction == "wgrad" and geometry.turns
    ways = ["place", "own"] if geometry.inside and not turned else ["own"]
    apart = geometry.g * geometry.i * geometry.size if problem.direction == "wgrad" and geometry.channels_last else 1
    if apart % 4096 == 0:
        # Pixels that lie so far apart meet in one set of the first-level cache (3072 channels: 9700 us for 7500).
        ways.reverse()
    found = []
    for at, (_, rows, across) in enumerate(_blocks(problem, device)):
        for read in ways:
            usual = 384
            if problem.direction == "wgrad":
                # A line of x and one of dy for each: 24 KB. Of sets that pixels meet in, a quarter or less may be left.
                usual = 192 if apart % 1024 else 96
            if read == "own":
                # Tiles share the rows of their halo. Where these are many, as in a first layer, and slots are small,
                # larger tiles copy less (7x7 with stride 2 over 3 channels: 937 us with 784 pixels, 1133 with 112).
                usual = 224
                while usual < 800 and _cut(problem, device, Tile(rows, across, 2 * usual, read)).slot_bytes < 64 << 10:
                    usual *= 2
            for pixels in (usual,) if at else (usual, usual // 2, usual // 8, usual * 2):
                tile = Tile(rows, across, pixels, read)
                if tile not in found:
                    found.append(tile)
                if read == "own" and problem.direction != "wgrad" and not at and pixels == usual:
                    cut = _cut(problem, device, tile)
                    if cut.ranges[0] > 1 and cut.tiles < 2 * device.threads:
                        # Every task fills the same slot anew, which is mostly quicker than to read what another core
                        # has written (256@28, 3x3 with stride 2: 1014 against 1287 us).
                        found.append(Tile(rows, across, pixels, "shared"))
    best = found[0]
    least = Tile(best.rows, best.across, 1, "own")
    return (*found, least) if least not in found else tuple(found)


@lru_cache(1024)
def _cut(problem: Problem, device: Device, knobs: Tile) -> Cut:
    """Whole rows that make up the pixels wanted, then whole images, as far as their slot is half a cache at most; a
    part of a row where one is too long. f16 and bf16 are never read in place; the sums of a wgrad have the order of
    f32, whose tiles are cut as they would be there."""
    if (core := computed(problem)) != problem:
        if knobs.read != "place":
            return _cut(core, device, knobs)
        if problem.direction == "wgrad":
            return replace(_cut(core, device, knobs), mode=_MODES.index("own"))
        return _cut(core, device, replace(knobs, read="own"))
    geometry = geometry_of(problem)
    lanes, threads = _lanes(geometry.size), device.threads
    mode = _MODES.index(knobs.read)
    columns = geometry.columns
    if columns > max(knobs.pixels, knobs.rows) * 5 // 4:
        step = knobs.rows if problem.direction != "wgrad" else lanes
        columns = -(-_even(columns, max(knobs.pixels, step)) // step) * step
        columns = min(columns, geometry.columns)
    room = max(device.cache_bytes // 2, 128 << 10)

    def made(images: int, rows: int) -> Cut:
        gradient = problem.direction == "wgrad"
        return Cut(geometry, lanes, knobs.rows, knobs.across, images, rows, columns, mode, threads, gradient)

    while columns > 2 * knobs.rows and columns > 16 and made(1, 1).slot_bytes > 2 * room and knobs.pixels > 1:
        columns = max(-(-columns // 2 // knobs.rows) * knobs.rows, knobs.rows)
    rows = images = 1
    if columns == geometry.columns:
        rows = max(1, min(geometry.rows, knobs.pixels // columns))
        while rows > 1 and made(1, rows).slot_bytes > room:
            rows -= 1
        rows = _even(geometry.rows, rows)
        if rows == geometry.rows and prod(len(axes) for axes in geometry.axes[:2]) == 1 and geometry.inputs[0] == 1:
            images = max(1, min(geometry.n, knobs.pixels // (rows * columns)))
            while images > 1 and made(images, rows).slot_bytes > room:
                images -= 1
            if problem.direction != "wgrad":
                images = min(images, max(1, geometry.n // threads))
    return made(images, rows)


def _regions(problem: Problem, cut: Cut) -> tuple[Region, ...]:
    """The parts of the workspace: filters (or sums of a wgrad) in order, bias, memory of the threads, slots."""
    geometry, size = cut.geometry, cut.geometry.size
    slots = Region(cut.tiles * cut.slot_bytes if cut.mode == 1 else 0, 1)
    padded = geometry.g * cut.blocks * cut.across * cut.lanes
    if problem.direction == "wgrad":
        ordered = Region(prod(geometry.filter) * geometry.i * padded, size)
        return ordered, Region(0, size), Region(cut.threads * cut.thread_bytes, 1), slots
    bias = Region(padded if any(o.kind == "channel" for o in problem.epilogue.operands) else 0, size)
    return Region(cut.filter_elements, size), bias, Region(cut.threads * cut.thread_bytes, 1), slots


def _cost(problem: Problem, device: Device, knobs: Tile) -> float:
    """Predicted seconds."""
    cut, geometry = _cut(problem, device, knobs), geometry_of(problem)
    size, lanes = geometry.size, cut.lanes
    cycle = 4 * lanes / (device.vector_rate * 4 / size / device.threads)
    taps = prod(geometry.filter)
    if problem.direction == "wgrad":
        _, line = _line(geometry)
        lines = geometry.i * taps / line
        steps = lines * line_cycles(line, knobs.rows, knobs.across) * prod(geometry.outputs) * geometry.n
        # Tiles of x and dy are laid out anew by every task: some 8 cycles a vector of dy, which is transposed, 3 of x.
        ranges = cut.ranges[0]
        times = _line_ranges(cut)[1]
        pixels = geometry.n * geometry.g * times / lanes
        laid = 8.0 * geometry.o * prod(geometry.outputs)
        if cut.mode != 2:
            laid += 3 * ranges * geometry.i * prod(geometry.inputs)
        copies = cycle * pixels * laid
        ordered = taps * geometry.i * geometry.o * (2.0 * geometry.g + 0.5 * cut.tiles)
        arithmetic = cycle * steps * cut.blocks * geometry.g + copies
        moved = ordered * size / (device.bandwidth * 3)
        tasks = geometry.g * ranges * times
    else:
        rows = geometry.n * prod(geometry.outputs[:2])
        phases = prod(len(axes) for axes in geometry.axes)
        steps = line_cycles(geometry.columns, knobs.rows, knobs.across) * len(geometry.axes[2]) * rows
        terms = geometry.i * taps / phases
        # Beside the steps themselves: 25 cycles to begin and end a block for each chunk of terms, 5 for each vector of
        # a result that is transposed, 300 for a task, 20 for a line of its slot.
        blocks = -(-geometry.columns // knobs.rows) * len(geometry.axes[2]) * rows * -(-terms // CHUNK)
        around = 25.0 * blocks
        if not geometry.channels_last:
            around += 5.0 * knobs.across * rows * geometry.outputs[2]
        if cut.mode == 2 and not geometry.channels_last:
            # The scalars of a term lie in a line of their own; on pages of their own (of 4 KB) where channels are large
            # and many, which took twice as long as cpu.pixels on an Intel Xeon, and no longer on an AMD EPYC.
            apart = prod(geometry.inputs) * size >= 4096 and geometry.i > 64
            steps *= 1.35 if apart else 1.12
        arithmetic = cycle * (steps * terms + around) * cut.blocks * geometry.g
        lines = 0.0 if cut.mode == 2 else cut.slot_bytes / size / max(cut.width * cut.pixel, 1)
        arithmetic += cycle * cut.tiles * cut.ranges[0] * (300 + 20 * lines)
        fill = cut.slot_bytes / size * cut.tiles / max(cut.images, 1) * cut.images
        copies = 2.0 * fill + 2.0 * geometry.n * geometry.o * geometry.g * prod(geometry.outputs)
        ordered = 2.0 * cut.filter_elements
        moved = (copies + ordered) * size / (device.bandwidth * 3)
        tasks = max(1, cut.tiles * cut.ranges[0])
    balance = -(-tasks // device.threads) * device.threads / tasks if device.threads > 1 else 1.0
    memory = problem.min_bytes / device.bandwidth * 0.5
    return 12e-6 + max(arithmetic / device.threads * balance * 1.04 + moved, memory)


# -- fprop and dgrad -------------------------------------------------------------------------------------------------


def _build(problem: Problem, cut: Cut) -> Runner:
    (T, M), geometry, threads = _types(problem), cut.geometry, cut.threads
    dtype, size = DTYPES[computed(problem).result_dtype], cut.geometry.size
    plan, tables = _plan(cut)
    stride = geometry.axes[2][0].stride
    constant = stride * size if not geometry.channels_last and stride <= 2 else 0
    pitch = stride * cut.pixel * size
    finish = Words(problem)
    convolve = kernels.convolve_kernel(
        T, M, cut.block_rows, cut.across, constant, geometry.channels_last, _ahead(cut), finish.wanted
    )
    fill = kernels.pack_kernel(T, M, geometry.channels_last) if cut.mode == 1 else None
    order, key = _order(problem, cut), (Direct.name, str(problem.with_(n=1, epilogue="")), str(cut))
    regions, tasks = _regions(problem, cut), cut.tiles * cut.ranges[0]
    padded = cut.blocks * cut.across * cut.lanes
    nothing = torch.zeros(geometry.g * padded, dtype=dtype)
    forward, few = problem.direction == "fprop", problem.macs < 20_000
    team = 1 if few else threads

    # w[k, c] of a dgrad has the channels of dx side by side. Rows that are a multiple of 4096 bytes would meet in one
    # set of the first-level cache.
    row_bytes = geometry.o * size
    alone = M is T and not forward and prod(geometry.filter) == 1 and geometry.o == padded and row_bytes % 4096 != 0
    in_place = row_bytes if alone else 0
    _, biases_at, memory_at, slots_at = Region.places(regions)

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None,
            residual: Tensor | None = None) -> None:  # fmt: skip
        base = workspace.data_ptr()
        filters = kept(b, key) if forward else b if in_place else None
        if filters is None:
            spare = Region.split(workspace, regions, dtype)[0]
            if forward:
                filters = prepared(b, key, lambda out: order(b, out, team), spare)
            else:
                order(b, spare, team)
                filters = spare
        start = nothing.data_ptr()
        if bias is not None:
            bias = bias if M is T else bias.to(dtype)
            start = bias.data_ptr()
            if geometry.o < padded:  # a block of channels more than there are needs room to read in
                start, each = base + biases_at, geometry.o * size
                for g in range(geometry.g):
                    ctypes.memmove(start + g * padded * size, bias.data_ptr() + g * each, each)
        if fill:
            launch(fill, (cut.tiles, a.data_ptr(), base + slots_at, plan.data_ptr()), team)
        args = (tasks, a.data_ptr(), filters.data_ptr(), result.data_ptr(), start, base + slots_at, base + memory_at,
                plan.data_ptr(), pitch, numbering(team), in_place, *finish.of(result, residual))  # fmt: skip
        launch(convolve, args, team)
        _ = tables  # they live as long as the call

    return run


def _ahead(cut: Cut) -> bool:
    """Whether pixels are asked for before they are read: those of images that do not stay in a cache, and that are not
    read so often that the first time does not matter."""
    geometry = cut.geometry
    pointwise = geometry.channels_last and prod(geometry.filter) == 1
    return cut.mode == 2 and pointwise and _is_large(geometry) and cut.blocks <= 8


def _is_large(geometry: Geometry) -> bool:
    """Whether the input does not stay in a cache near a core."""
    return geometry.n * geometry.g * geometry.i * prod(geometry.inputs) * geometry.size > 4 << 20


def _plan(cut: Cut) -> tuple[Tensor, Tensor]:
    """The plan and the offsets that it points to."""
    tables: list[int] = []
    cut.plan(0, tables)
    offsets = torch.tensor(tables or [0], dtype=torch.int64)
    return torch.tensor(cut.plan(offsets.data_ptr(), []), dtype=torch.int64), offsets


def _order(problem: Problem, cut: Cut) -> Callable[[Tensor, Tensor, int], None]:
    """What puts filters into the order of the loop: ``order(w, out, threads)``."""
    (T, M), geometry = _types(problem), cut.geometry
    size = np.dtype(M).itemsize
    taps, places = prod(geometry.filter), cut.filter_places()
    I, O, blocks, tasks = geometry.i, geometry.o, cut.blocks, geometry.g * cut.blocks
    last = problem.layouts[1] == "nhwc"
    if problem.direction == "dgrad" and (last or taps == 1):
        # w[k, tap, c]: the channels of dx lie side by side.
        met = [(k, tap) for k in range(I) for tap in range(taps) if (k, tap) in places]
        words = [v for k, tap in met for v in ((k * taps + tap) * O * size, *places[k, tap])]
        rows, table = kernels.filter_rows_kernel(T, M, cut.across), torch.tensor(words, dtype=torch.int64)

        def order_rows(w: Tensor, out: Tensor, threads: int) -> None:
            args = (tasks * -(-len(met) // 256), w.data_ptr(), out.data_ptr(), blocks, O, len(met),
                    I * O * taps * size, table.data_ptr(), 256)  # fmt: skip
            launch(rows, args, threads)

        return order_rows
    if problem.direction == "dgrad":
        # w[k, c, tap]: a line for each k.
        lines, terms, pitch, line_pitch = I, taps, taps * size, O * taps * size
        order = [(k, tap) for k in range(I) for tap in range(taps)]
    else:
        # w[k, c, tap] or w[k, tap, c]
        lines, terms, pitch, line_pitch = 1, I * taps, I * taps * size, 0
        if last:
            order = [(c, tap) for tap in range(taps) for c in range(I)]
        else:
            order = [(c, tap) for c in range(I) for tap in range(taps)]
    group = O * I * taps * size
    table = torch.tensor([v for each in order for v in places.get(each, (-1, 0))], dtype=torch.int64)
    squares = kernels.filter_kernel(T, M, cut.across)

    def order_squares(w: Tensor, out: Tensor, threads: int) -> None:
        args = (tasks * -(-lines // 16), w.data_ptr(), out.data_ptr(), blocks, O, pitch, group, lines, line_pitch,
                terms, table.data_ptr(), 16)  # fmt: skip
        launch(squares, args, threads)

    return order_squares


# -- wgrad -----------------------------------------------------------------------------------------------------------


def _line_ranges(cut: Cut) -> tuple[int, int, int]:
    """Parts that each line of channels is cut into, ranges of lines that make tasks of their own, and lines of each: as
    few as keep all threads busy, since each range copies the images anew."""
    along, count = _line(cut.geometry)
    lines = cut.geometry.i * prod(cut.geometry.filter) // count
    others = cut.geometry.g * cut.ranges[0]
    most = count // 8 if along == "channels" and cut.threads > 1 else 1
    for parts in (p for p in range(1, max(most, 1) + 1) if count % p == 0):
        for ranges in range(1, min(lines * parts, 4 * cut.threads) + 1):
            each = -(-lines * parts // ranges)
            tasks = others * -(-lines * parts // each)
            if is_even(tasks, cut.threads, 1.15):
                return parts, -(-lines * parts // each), each
    each = -(-lines // max(1, min(lines, 4 * cut.threads // others)))
    return 1, -(-lines // each), each


def _build_gradient(problem: Problem, cut: Cut) -> Runner:
    (T, M), geometry = _types(problem), cut.geometry
    dtype, size, lanes = DTYPES[computed(problem).result_dtype], cut.geometry.size, cut.lanes
    taps, I, O, last = prod(geometry.filter), geometry.i, geometry.o, geometry.channels_last
    T_, R, S = geometry.filter
    plan, tables = _plan(cut)
    (depth,), (height,), (width,) = geometry.axes
    _, channel, _, _ = cut.pitches(depth, height)
    along, count = _line(geometry)
    parts, line_ranges, range_lines = _line_ranges(cut)
    # Offsets of (channel, tap) in a slot, in the order of `offsets`.
    offsets, slots_last = cut.offsets(depth, height, width), cut.channels_last
    place = {(c, tap): offsets[tap * I + c if slots_last else c * taps + tap] for c in range(I) for tap in range(taps)}
    if along == "channels":
        pitch, constant = channel * size, size if slots_last else 0
        count //= parts
        lines = [[(c, tap) for c in range(at * count, (at + 1) * count)] for tap in range(taps) for at in range(parts)]
    elif slots_last:
        pitch, constant = size, size
        lines = [[(c, line * S + s) for s in range(S) for c in range(I)] for line in range(T_ * R)]
    else:
        pitch = (width.taps[1][1] - width.taps[0][1]) * size
        constant = pitch if pitch == size else 0
        lines = [[(c, line * S + s) for s in range(S)] for c in range(I) for line in range(T_ * R)]
    if along == "taps" and slots_last and cut.pixel != I:
        raise AssertionError("slots of few channels have no gaps")
    places = torch.tensor([place[line[0]] for line in lines], dtype=torch.int64)
    row_of = {each: n for n, each in enumerate(each for line in lines for each in line)}
    order = [(c, tap) for tap in range(taps) for c in range(I)] if problem.layouts[1] == "nhwc" else [
        (c, tap) for c in range(I) for tap in range(taps)]  # fmt: skip
    stored = torch.tensor([row_of[each] * cut.vector_bytes for each in order] + [0] * lanes, dtype=torch.int64)
    pixels = torch.tensor(cut.pixel_offsets(), dtype=torch.int64)
    # Rows that lie a multiple of 1024 bytes apart meet in few sets of the first-level cache: they are copied.
    row_bytes = geometry.g * O * size
    in_place = row_bytes if M is T and last and row_bytes % 1024 else 0
    ahead = in_place > 0 and cut.mode == 2 and _is_large(geometry)
    gradient = kernels.gradient_kernel(T, M, cut.block_rows, cut.across, constant, last, ahead, geometry.turns)
    store = kernels.gradient_store_kernel(T, M, cut.across)
    regions = _regions(problem, cut)
    nothing = torch.zeros(cut.across * lanes, dtype=dtype)
    ranges, team = cut.ranges[0], 1 if problem.macs < 20_000 else cut.threads

    sums_at, _, memory_at, _ = Region.places(regions)

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None) -> None:
        sums, memory = workspace.data_ptr() + sums_at, workspace.data_ptr() + memory_at
        args = (geometry.g * ranges * line_ranges, a.data_ptr(), b.data_ptr(), sums, memory,
                plan.data_ptr(), pitch, pixels.data_ptr(), len(lines), count, places.data_ptr(), line_ranges,
                range_lines, nothing.data_ptr(), numbering(team), in_place)  # fmt: skip
        launch(gradient, args, team)
        numbers = (geometry.g * cut.blocks, sums, result.data_ptr(), cut.blocks, O, I * taps)
        launch(store, (*numbers, stored.data_ptr()), team)
        _ = tables

    return run
