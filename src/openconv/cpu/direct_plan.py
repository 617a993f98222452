"""How cpu.direct cuts a problem up: axes and their phases, tiles, slots, and the tables that its kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from ..problem import DTYPE_BYTES, Problem
from .direct_kernels import COLUMN, HEAD, PHASE, Column, Head, Phase

__all__ = ["CHUNK", "Axis", "Cut", "Geometry", "geometry_of", "is_even", "line_cycles"]


CHUNK = 192
"""Terms that are summed up by themselves. Their vectors, 12 to 36 KB, stay in the first-level cache while the pixels of
a tile pass by; and a sum of sums errs less than one long sum. The same for all blocks, so that these do not show in
the bits."""


@dataclass(frozen=True)
class Axis:
    """Outputs start + step*i along one axis, i < count. Output i meets tap t at input i*stride + offset, for each
    (t, offset) of ``taps``."""

    start: int
    step: int
    count: int
    stride: int
    taps: tuple[tuple[int, int], ...]

    @property
    def least(self) -> int:
        return min((offset for _, offset in self.taps), default=0)

    @property
    def span(self) -> int:
        return max((offset for _, offset in self.taps), default=0) - self.least


@dataclass(frozen=True)
class Geometry:
    """A pass as sums over an input's windows, three axes, sizes of one group: ``i`` channels of the input make ``o`` of
    the result. ``axes`` has the phases of each axis."""

    n: int
    g: int
    i: int
    o: int
    inputs: tuple[int, int, int]
    outputs: tuple[int, int, int]
    axes: tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]
    channels_last: bool
    size: int
    filter: tuple[int, int, int]

    @cached_property
    def inside(self) -> bool:
        """Whether no window leaves the input."""
        return all(
            axis.least >= 0 and (axis.count - 1) * axis.stride + axis.least + axis.span < size
            for axes, size in zip(self.axes, self.inputs, strict=True)
            for axis in axes
            if axis.taps and axis.count
        )

    @cached_property
    def beside(self) -> bool:
        """Whether the taps of a row meet neighbouring pixels."""
        return all(b[1] - a[1] == 1 for a, b in zip(self.axes[2][0].taps, self.axes[2][0].taps[1:], strict=False))

    @cached_property
    def turns(self) -> bool:
        """wgrad: whether slots of an image in nchw are in nhwc. Taps and channels of a row are one line there, which is
        long enough for a block where channels are few (3x224x224 by 64, 3x3: 1340 us before, 930 now)."""
        return not self.channels_last and self.g == 1 and 1 < self.i < 8 and self.filter[2] > 1 and self.beside

    @property
    def columns(self) -> int:
        """Outputs of a row, in the phase that has most."""
        return self.axes[2][0].count

    @property
    def rows(self) -> int:
        return self.axes[1][0].count


def _three(values: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    d, h, w = (missing,) * (3 - len(values)) + tuple(values)
    return d, h, w


def _phases(problem: Problem, axis: int) -> tuple[Axis, ...]:
    size, taps, stride = problem.spatial[axis], problem.filter[axis], problem.stride[axis]
    dilation, low = problem.dilation[axis], problem.padding[axis][0]
    if problem.direction != "dgrad":
        offsets = tuple((t, t * dilation - low) for t in range(taps))
        return (Axis(0, 1, problem.out[axis], stride, offsets),)
    found = []
    for start in range(min(stride, size)):
        # dx at start + stride*i meets tap t in dy at i + (start + low - t*dilation) / stride, if that is whole.
        met = [(t, (start + low - t * dilation) // stride) for t in range(taps)
               if (start + low - t * dilation) % stride == 0]  # fmt: skip
        found.append(Axis(start, stride, -(-(size - start) // stride), 1, tuple(met)))
    return tuple(found)


@lru_cache(512)
def geometry_of(problem: Problem) -> Geometry:
    """fprop and wgrad go over x to y, dgrad over dy to dx. Where every pixel is by itself, all are one row."""
    channels = problem.c // problem.groups, problem.k // problem.groups
    i, o = channels if problem.direction != "dgrad" else channels[::-1]
    ends = (problem.spatial, problem.out) if problem.direction != "dgrad" else (problem.out, problem.spatial)
    size, last = DTYPE_BYTES[problem.result_dtype], problem.layouts[0] == "nhwc"
    trivial = Axis(0, 1, 1, 1, ((0, 0),))
    alone = prod(problem.filter) == prod(problem.stride) == 1 and not any(sum(pad) for pad in problem.padding)
    if alone:
        n, pixels = (1, problem.n * prod(problem.out)) if last else (problem.n, prod(problem.out))
        row = Axis(0, 1, pixels, 1, ((0, 0),))
        flat = 1, 1, pixels
        return Geometry(n, problem.groups, i, o, flat, flat, ((trivial,), (trivial,), (row,)), last, size, (1, 1, 1))
    found = [(trivial,)] * (3 - problem.rank) + [_phases(problem, axis) for axis in range(problem.rank)]
    return Geometry(
        problem.n, problem.groups, i, o, _three(ends[0], 1), _three(ends[1], 1), (found[0], found[1], found[2]), last,
        size, _three(problem.filter, 1),
    )  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """A geometry with the sizes of tiles and blocks. ``mode`` says where scalars are read: 0 in a slot that each task
    fills, 1 in slots that are filled beforehand, 2 in the input itself."""

    geometry: Geometry
    lanes: int
    block_rows: int
    across: int
    images: int
    rows: int
    columns: int
    mode: int
    threads: int
    gradient: bool = False

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def channels_last(self) -> bool:
        """Of what scalars are read from: slots, or the input."""
        return self.geometry.channels_last or (self.gradient and self.geometry.turns)

    @property
    def vector_bytes(self) -> int:
        """Of the channels that are summed up at a time."""
        return self.across * self.lanes * self.geometry.size

    @property
    def blocks(self) -> int:
        """Blocks of a group's channels of the result."""
        return -(-self.geometry.o // (self.across * self.lanes))

    @cached_property
    def column_tiles(self) -> int:
        return -(-self.geometry.columns // self.columns)

    @cached_property
    def row_tiles(self) -> int:
        return -(-self.geometry.rows // self.rows)

    @cached_property
    def tiles(self) -> int:
        depths, images = self.geometry.axes[0][0].count, -(-self.geometry.n // self.images)
        phases = len(self.geometry.axes[0]) * len(self.geometry.axes[1])
        return images * self.geometry.g * phases * depths * self.row_tiles * self.column_tiles

    @cached_property
    def width(self) -> int:
        """Columns of a slot."""
        axes = [axis for axis in self.geometry.axes[2] if axis.taps]
        least = min((axis.least for axis in axes), default=0)
        most = max((axis.least + axis.span for axis in axes), default=0)
        return (self.columns - 1) * self.geometry.axes[2][0].stride + most - least + 1

    @cached_property
    def first(self) -> int:
        """The first column of a slot in the input, for the first tile of a row."""
        return 0 if self.mode == 2 else min((axis.least for axis in self.geometry.axes[2] if axis.taps), default=0)

    @cached_property
    def pixel(self) -> int:
        """Elements from a pixel to the next. In nhwc slots lines of the cache that many pixels share are kept apart."""
        geometry = self.geometry
        if not self.channels_last:
            return 1
        if self.mode == 2:
            return geometry.g * geometry.i
        line = 64 // geometry.size
        return geometry.i + line if geometry.i % (4 * line) == 0 else geometry.i

    def slot_rows(self, axis: Axis) -> int:
        _, per_output, span = _row_steps(axis)
        return (self.rows - 1) * per_output + span + 1

    def pitches(self, depth: Axis, height: Axis) -> tuple[int, int, int, int]:
        """Elements from an image, a channel, a tap along D and a row to the next."""
        geometry = self.geometry
        if self.mode == 2:
            _, h, w = geometry.inputs
            channels = geometry.g * geometry.i
            if geometry.channels_last:
                return prod(geometry.inputs) * channels, 1, h * w * channels, w * channels
            return prod(geometry.inputs) * channels, prod(geometry.inputs), h * w, w
        rows, taps = self.slot_rows(height), len(depth.taps)
        if self.channels_last:
            row = self.width * self.pixel
            return taps * rows * row, 1, rows * row, row
        return geometry.i * taps * rows * self.width, taps * rows * self.width, rows * self.width, self.width

    @cached_property
    def slot_bytes(self) -> int:
        """Of the largest phase's slot, with room for a vector and a pixel behind it."""
        if self.mode == 2:
            return 0
        most = max(self.pitches(d, h)[0] for d in self.geometry.axes[0] for h in self.geometry.axes[1])
        spare = 2 * self.lanes + self.pixel + self.block_rows
        return _lines((self.images * most + spare) * self.geometry.size)

    @cached_property
    def row_pixels(self) -> int:
        """Results of a tile's row."""
        return self.geometry.outputs[2] if self.column_tiles == 1 else self.columns * self.geometry.axes[2][0].step

    @cached_property
    def sums_bytes(self) -> int:
        pixels = self.images * self.rows * self.row_pixels + self.lanes
        return _lines(pixels * self.vector_bytes)

    @property
    def thread_bytes(self) -> int:
        return self.sums_bytes + (self.slot_bytes if self.mode == 0 else 0)

    @cached_property
    def ranges(self) -> tuple[int, int]:
        """Parts of the result's channels that make tasks of their own, and blocks of each: four tasks for each thread,
        or as many more as let all threads end together (9 tiles on 2 threads take as long as 10; in halves, as 9)."""
        others = max(self.geometry.g if self.gradient else self.tiles, 1)
        if self.threads == 1:
            return 1, self.blocks
        # Tasks of a wgrad go over all images each: the fewer the better.
        least = min(self.blocks, -(-(1 if self.gradient else 4) * self.threads // others))
        for parts in range(least, self.blocks + 1):
            each = -(-self.blocks // parts)
            found = -(-self.blocks // each)
            if is_even(others * found, self.threads, 1.03):
                return found, each
        each = -(-self.blocks // least)
        return -(-self.blocks // each), each

    # -- tables ------------------------------------------------------------------------------------------------------

    def terms(self) -> list[tuple[tuple[Axis, Axis, Axis], int]]:
        """The phases, and the number of terms of each."""
        found = []
        for d, h in product(self.geometry.axes[0], self.geometry.axes[1]):
            for w in self.geometry.axes[2]:
                taps = len(d.taps) * len(h.taps) * len(w.taps)
                found.append(((d, h, w), taps * self.geometry.i))
        return found

    @cached_property
    def filter_elements(self) -> int:
        """Of the ordered filters."""
        terms = sum(count for _, count in self.terms())
        return terms * self.geometry.g * self.blocks * self.across * self.lanes

    def offsets(self, depth: Axis, height: Axis, width: Axis) -> list[int]:
        """Bytes from the first scalar of an output to that of each term."""
        _, channel, tap, row = self.pitches(depth, height)
        source, _, _ = _row_steps(height)
        if self.mode == 2:
            ds, hs, ws = ([offset for _, offset in axis.taps] for axis in (depth, height, width))
        else:
            ds = list(range(len(depth.taps)))
            hs = [(offset - height.least) // source for _, offset in height.taps]
            ws = [offset - self.first for _, offset in width.taps]
        size, pixel = self.geometry.size, self.pixel
        taps = [d * tap + h * row + w * pixel for d, h, w in product(ds, hs, ws)]
        channels = [c * channel for c in range(self.geometry.i)]
        if self.channels_last:
            return [(t + c) * size for t in taps for c in channels]
        return [(t + c) * size for c in channels for t in taps]

    def filter_places(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each (channel of the input, tap): its place among the ordered filters, and the distance of the blocks."""
        _, R, S = self.geometry.filter
        places: dict[tuple[int, int], tuple[int, int]] = {}
        begin, I = 0, self.geometry.i
        for (d, h, w), terms in self.terms():
            taps = [(t * R + r) * S + s for (t, _), (r, _), (s, _) in product(d.taps, h.taps, w.taps)]
            for at, tap in enumerate(taps):
                for c in range(I):
                    term = at * I + c if self.geometry.channels_last else c * len(taps) + at
                    places[c, tap] = begin + term * self.vector_bytes, terms * self.vector_bytes
            begin += terms * self.geometry.g * self.blocks * self.vector_bytes
        return places

    def plan(self, address: int, tables: list[int]) -> list[int]:
        """The words of the plan. ``tables`` is filled with the offsets of all phases, which will lie at ``address``."""
        geometry = self.geometry
        depths, heights, widths = geometry.axes
        head = [0] * HEAD
        ranges, range_blocks = self.ranges
        for places, values in (
            ((Head.N, Head.G, Head.I, Head.O), (geometry.n, geometry.g, geometry.i, geometry.o)),
            ((Head.D, Head.H, Head.W), geometry.inputs),
            ((Head.OD, Head.OH, Head.OW), geometry.outputs),
            ((Head.IMAGES, Head.ROWS, Head.COLUMNS), (self.images, self.rows, self.columns)),
            ((Head.IMAGE_TILES, Head.PHASES), (-(-geometry.n // self.images), len(depths) * len(heights))),
            ((Head.DEPTHS, Head.ROW_TILES, Head.COLUMN_TILES), (depths[0].count, self.row_tiles, self.column_tiles)),
            ((Head.RANGES, Head.BLOCKS, Head.RANGE_BLOCKS), (ranges, self.blocks, range_blocks)),
            ((Head.COLUMN_PHASES, Head.STEP), (len(widths), widths[0].step)),
            ((Head.FIRST, Head.STRIDE, Head.WIDTH), (self.first, widths[0].stride, self.width)),
            ((Head.PIXEL, Head.ROW_PIXELS, Head.CHUNK), (self.pixel, self.row_pixels, CHUNK)),
            ((Head.SLOT, Head.SUMS, Head.THREAD), (self.slot_bytes, self.sums_bytes, self.thread_bytes)),
            ((Head.MODE,), (self.mode,)),
        ):
            for place, value in zip(places, values, strict=True):
                head[place] = value
        rows = [(d, h) for d in depths for h in heights]
        columns_at = HEAD + PHASE * len(rows)
        depths_at = columns_at + COLUMN * len(rows) * len(widths)
        words, begin = head, 0
        columns: list[int] = []
        offsets_of_depth: list[int] = []
        for at, (d, h) in enumerate(rows):
            phase = [0] * PHASE
            source, per_output, span = _row_steps(h)
            image, channel, tap, row = self.pitches(d, h)
            for place, value in (
                (Phase.D_START, d.start), (Phase.D_STEP, d.step), (Phase.D_COUNT, d.count), (Phase.D_STRIDE, d.stride),
                (Phase.TAPS, len(d.taps) if h.taps else 0), (Phase.H_START, h.start), (Phase.H_STEP, h.step),
                (Phase.H_COUNT, h.count), (Phase.H_FIRST, h.least), (Phase.H_SOURCE, source),
                (Phase.H_SLOT, h.stride if self.mode == 2 else per_output), (Phase.H_SPAN, span),
                (Phase.IMAGE, image), (Phase.CHANNEL, channel), (Phase.TAP, tap), (Phase.ROW, row),
                (Phase.DEPTH_OFFSETS, depths_at + len(offsets_of_depth)),
                (Phase.COLUMNS, columns_at + COLUMN * at * len(widths)),
            ):  # fmt: skip
                phase[place] = value
            words = words + phase
            offsets_of_depth += [offset for _, offset in d.taps]
            for w in widths:
                column = [0] * COLUMN
                terms = len(d.taps) * len(h.taps) * len(w.taps) * geometry.i
                column[Column.START], column[Column.COUNT] = w.start, w.count
                column[Column.TERMS], column[Column.OFFSETS] = terms, address + 8 * len(tables)
                column[Column.FILTERS] = begin
                columns += column
                tables += self.offsets(d, h, w)
                begin += terms * geometry.g * self.blocks * self.vector_bytes
        return words + columns + offsets_of_depth

    def pixel_offsets(self) -> list[int]:
        """wgrad: bytes from the first pixel of a tile to each."""
        (depth,), (height,), (width,) = self.geometry.axes
        image, _, _, row = self.pitches(depth, height)
        per_output = height.stride if self.mode == 2 else _row_steps(height)[1]
        pixel, size = width.stride * self.pixel, self.geometry.size
        return [
            (b * image + r * per_output * row + q * pixel) * size
            for b in range(self.images) for r in range(self.rows) for q in range(self.columns)
        ]  # fmt: skip


def _row_steps(axis: Axis) -> tuple[int, int, int]:
    """Rows of the input from a slot's row to the next, slot rows from an output to the next, and those that the taps
    span. Of a single tap only the rows that it meets are copied."""
    return (axis.stride, 1, 0) if len(axis.taps) <= 1 else (1, axis.stride, axis.span)


def _cycles(rows: int, across: int) -> float:
    """Of one step: two multiply-adds or loads a cycle, and a sum has to wait four for the one before."""
    return max(rows * across / 2, (rows + across) / 2, 4.0)


def line_cycles(count: int, rows: int, across: int) -> float:
    """Of a line of so many outputs, cut into blocks of ``rows`` and of one less."""
    less = max(rows - 1, 1)
    parts = -(-count // rows)
    if count >= less * parts:
        large = count - less * parts if rows > less else 0
        return large * _cycles(rows, across) + (parts - large) * _cycles(less, across)
    large, rest = divmod(count, rows)
    few, ones = divmod(rest, less)
    return large * _cycles(rows, across) + few * _cycles(less, across) + ones * _cycles(1, across)


def is_even(tasks: int, threads: int, within: float) -> bool:
    """Whether the last turn of the threads is full, or such a small part of all turns."""
    return -(-tasks // threads) * threads <= within * tasks


def _lines(count: int) -> int:
    return -(-count // 64) * 64
