"""cpu.pixels: images with channels first, as they lie: neighbouring pixels are vectors, filters scalars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..prepared import kept, prepared
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES
from .direct_plan import is_even, line_cycles
from .finish import Words
from .low_precision import computed, memory_refusals, memory_token
from .matrices import Region, sum_error
from .pixels_kernels import APART, CHUNK, TOGETHER, pixels_kernel
from .runtime import launch, numbering
from .simd import LANE_BYTES

__all__ = ["Panels", "Pixels"]

_ACROSS = 2  # vectors of a panel


@dataclass(frozen=True)
class Panels(Knobs):
    """``rows`` channels by two vectors of pixels are summed up in registers, over tiles of so many ``vectors``."""

    rows: int
    vectors: int


class Pixels(Engine):
    """A 1x1 convolution of images in nchw is a product of two matrices that lie as they should, row behind row.

        fprop   y[k, pixel]  = sum over c, taps of  w[k, c, tap] * x[c, pixel + tap]
        dgrad   dx[c, pixel] = sum over k of        w[k, c] * dy[k, pixel]

    A block of 6 channels by 16 pixels (AVX2; 14 by 32 with AVX-512) stays in registers while the terms pass by. The
    pixels of a tile are copied into panels, the terms of 16 pixels behind each other, which every channel then reads;
    filters are read where they are, and results stored where they belong: nothing is transposed. Taps and
    padding, or the stride of a single tap, are taken care of by the copy.

    Wins on 1x1 layers of images in nchw, most of all with few channels, where cpu.direct spends its time on turning
    sums into rows, and on first layers without a stride. Loses where images have fewer pixels than a vector, and where
    a copy of every tap serves few filters.
    """

    name = "cpu.pixels"
    takes_bias = True
    takes_finish = True
    takes_low = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from memory_refusals(problem)
        if problem.is_empty:
            yield "a tensor is empty; there are no vectors"
        if problem.direction == "wgrad":
            yield "the pass is wgrad; its sums go over the pixels, which are vectors here"
        if problem.layouts[0] != "nchw":
            yield f"layout is {problem.layouts[0]}; vectors of pixels need nchw"
        if problem.direction == "dgrad" and not _is_run(problem):
            yield (
                f"filter is {problem.filter}, stride {problem.stride}, padding {problem.padding}; a dgrad that stores "
                "neighbouring pixels needs one tap, a stride of 1 and no padding"
            )
        if prod(problem.filter) > 1 and problem.layouts[1] != "nchw":
            yield f"filters lie in {problem.layouts[1]}; several taps that are read in place need nchw"
        if _copy(problem) == "windows" and problem.rank > 2:
            yield f"rank is {problem.rank}; windows are copied along two axes"
        if _copy(problem) == "windows" and problem.stride[-1] != 1:
            yield f"stride is {problem.stride}; taps of neighbouring outputs are neighbours if it is 1 along a row"
        if computed(problem) != problem and (terms := _channels(problem)[0]) > CHUNK:
            yield f"a sum has {terms} terms; beyond {CHUNK} it waits in the result, which {problem.result_dtype} rounds"

    def traits(self, problem: Problem, knobs: Panels) -> Traits:
        problem = computed(problem)
        return Traits(problem.result_dtype, sum_error(problem))

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Panels) -> int:
        core = computed(problem)
        widened = _widened(problem).bytes if core != problem else 0
        return device.threads * _thread_bytes(core, _cut(core, device, knobs)) + widened

    def knobs(self, problem: Problem, device: Device) -> Iterable[Panels]:
        return _knobs(computed(problem), device)

    def cost(self, problem: Problem, device: Device, knobs: Panels) -> float:
        problem = computed(problem)
        cut, size = _cut(problem, device, knobs), DTYPE_BYTES[problem.result_dtype]
        cycle = 4 * cut.lanes / (device.vector_rate * 4 / size / device.threads)
        panels = -(-cut.pixels // (_ACROSS * cut.lanes)) * problem.groups
        lines = cut.ranges * line_cycles(cut.range_rows, knobs.rows, _ACROSS)
        # Beside the steps themselves: 30 cycles to begin and end a block for each chunk of terms, 3 to copy a vector
        # into its panel, in every range of channels anew, more where its pixels lie apart, and 6 to copy the scalars of
        # a term for a block, in every tile.
        blocks = cut.ranges * -(-cut.range_rows // knobs.rows) * -(-cut.inner // CHUNK)
        copies = cut.ranges * cut.inner * _ACROSS * _copy_cycles(problem, cut.lanes)
        arithmetic = cycle * panels * (lines * cut.inner + 30 * blocks + copies)
        if problem.direction == "dgrad":
            parts = cut.ranges * -(-cut.range_rows // knobs.rows)
            arithmetic += cycle * cut.tiles * problem.groups * parts * cut.inner * 6
        tasks = cut.tiles * cut.ranges * problem.groups
        balance = -(-tasks // device.threads) * device.threads / tasks if device.threads > 1 else 1.0
        memory = problem.min_bytes / device.bandwidth * 0.5
        return 9e-6 + max(arithmetic / device.threads * balance * 1.04, memory)

    def build(self, problem: Problem, device: Device, knobs: Panels) -> Runner:
        return _build(problem, _cut(computed(problem), device, knobs))


@dataclass(frozen=True)
class _Cut:
    """Sizes. ``inner`` terms are summed up for each of ``outer`` channels of a group, for all ``pixels`` of the batch;
    ``vectors`` of these make a tile, ``range_rows`` channels a range: a tile and a range are a task."""

    rows: int
    lanes: int
    inner: int
    outer: int
    pixels: int
    vectors: int
    ranges: int
    range_rows: int
    threads: int

    @property
    def tiles(self) -> int:
        return -(-self.pixels // (self.vectors * self.lanes))


@lru_cache(1024)
def _knobs(problem: Problem, device: Device) -> tuple[Panels, ...]:
    _, outer = _channels(problem)
    ways = sorted((14, 8) if LANE_BYTES == 64 else (6, 4), key=lambda rows: (line_cycles(outer, rows, _ACROSS), -rows))
    found = [Panels(rows, vectors) for rows in ways for vectors in (48, 24, 96)]
    return (*found, Panels(ways[0], 2))


def _channels(problem: Problem) -> tuple[int, int]:
    """Of a group: terms of a sum, and channels of the result."""
    c, k = problem.c // problem.groups, problem.k // problem.groups
    return (c * prod(problem.filter), k) if problem.direction == "fprop" else (k, c)


def _is_run(problem: Problem) -> bool:
    """Whether neighbouring outputs are made of neighbouring pixels, one of each channel."""
    return prod(problem.filter) == prod(problem.stride) == 1 and not any(map(any, problem.padding))


def _copy(problem: Problem) -> str:
    """How pixels get into panels: the word of the kernel."""
    if _is_run(problem):
        return "run"
    return "windows" if prod(problem.filter) > 1 or any(map(any, problem.padding)) else "table"


def _copy_cycles(problem: Problem, lanes: int) -> float:
    """Of a vector."""
    if _is_run(problem):
        return 3.0
    if _copy(problem) == "table":
        return 6.0
    whole = problem.out[-1] // lanes / -(-problem.out[-1] // lanes)  # vectors within a row; others pixel by pixel
    return 4.0 * whole + 10.0 * lanes * (1 - whole)


@lru_cache(1024)
def _cut(problem: Problem, device: Device, knobs: Panels) -> _Cut:
    lanes = LANE_BYTES // DTYPE_BYTES[problem.result_dtype]  # of the kernel: torch may keep to fewer
    inner, outer = _channels(problem)
    pixels = problem.n * prod(problem.out)
    total = -(-pixels // lanes)
    vectors = -(-total // -(-total // knobs.vectors))
    vectors += vectors % _ACROSS
    tiles = -(-total // vectors)
    ranges, parts = 1, -(-outer // knobs.rows)
    if device.threads > 1:
        # Every range copies the pixels anew, so that they are as few as keep all threads busy to the end.
        others = tiles * problem.groups
        least = min(parts, -(-4 * device.threads // others))
        even = (r for r in range(least, min(parts, 4 * least) + 1) if is_even(others * r, device.threads, 1.03))
        ranges = next(even, least)
    range_rows = -(-parts // ranges) * knobs.rows if ranges > 1 else outer
    ranges = -(-outer // range_rows)
    return _Cut(knobs.rows, lanes, inner, outer, pixels, vectors, ranges, range_rows, device.threads)


def _thread_bytes(problem: Problem, cut: _Cut) -> int:
    """Panels, sums and starts of a block, scalars of a backward pass: in a workspace for each thread."""
    vector = _ACROSS * cut.lanes
    size = DTYPE_BYTES[problem.result_dtype]
    own = cut.vectors // _ACROSS * (CHUNK * vector + APART // size) + (1 + TOGETHER) * cut.rows * vector
    if problem.direction == "dgrad":
        own += TOGETHER * (CHUNK * cut.rows + -(-cut.rows // cut.lanes) * cut.lanes)
    return Region(own, size).bytes


def _widened(problem: Problem) -> Region:
    """The filters of a forward pass as they are computed with: their scalars are read in the innermost loop."""
    return Region(prod(problem.w_shape) if problem.direction == "fprop" else 0, 4)


def _build(problem: Problem, cut: _Cut) -> Runner:
    core = computed(problem)
    T, M = memory_token(core.result_dtype), memory_token(problem.result_dtype)
    dtype, held = DTYPES[core.result_dtype], DTYPE_BYTES[problem.result_dtype]
    forward, copy = problem.direction == "fprop", _copy(problem)
    finish = Words(problem)
    convolve = pixels_kernel(T, M, cut.rows, _ACROSS, forward, copy, finish.wanted)
    plane = prod(problem.spatial) if forward else prod(problem.out)
    none = torch.zeros(1, dtype=DTYPES[problem.result_dtype])
    words = {"run": _nothing, "table": _offsets, "windows": _windows}[copy](problem)
    table = torch.tensor(words, dtype=torch.int64)
    width = prod(problem.w_shape[1:])  # of a row of w
    size = dtype.itemsize if forward else held  # of a number of w
    pitch, step = (width * size, size) if forward else (size, width * size)
    widens, key, space = forward and core != problem, (Pixels.name, dtype), cut.threads * _thread_bytes(core, cut)
    tasks = cut.tiles * problem.groups * cut.ranges
    team = 1 if problem.macs < 20_000 else cut.threads
    numbers = (
        problem.groups, cut.inner, cut.outer, prod(problem.out), plane, cut.pixels, cut.vectors, cut.ranges,
        cut.range_rows, pitch, step, table.data_ptr(), _thread_bytes(core, cut),
    )  # fmt: skip

    def run(a: Tensor, b: Tensor, result: Tensor, workspace: Tensor, bias: Tensor | None,
            residual: Tensor | None = None) -> None:  # fmt: skip
        w = kept(b, key) if widens else b
        if w is None:
            spare = workspace[space : space + dtype.itemsize * b.numel()].view(dtype).view_as(b)
            w = prepared(b, key, lambda out: out.copy_(b), spare)
        start, start_pitch = (none, 0) if bias is None else (bias, held)
        places = (tasks, a.data_ptr(), w.data_ptr(), result.data_ptr(), start.data_ptr(), start_pitch,
                  workspace.data_ptr())  # fmt: skip
        launch(convolve, (*places, *numbers, numbering(team), *finish.of(result, residual)), team)
        _ = table  # it lives as long as the call

    return run


def _nothing(problem: Problem) -> list[int]:
    return [0]


def _windows(problem: Problem) -> list[int]:
    """What the kernel has to know to find the pixels of a window."""

    def two(values: Sequence[int], missing: int) -> list[int]:
        return [missing] * (2 - len(values)) + list(values)

    lows = [low for low, _ in problem.padding]
    sizes = [problem.out[-1], *two(problem.spatial, 1), *two(problem.filter, 1), two(problem.stride, 1)[0]]
    return [*sizes, *two(problem.dilation, 1), *two(lows, 0)]


def _offsets(problem: Problem) -> list[int]:
    """Of each output, the pixel of x that it is made of."""
    found = [0]
    for size, out, stride in zip(problem.spatial, problem.out, problem.stride, strict=True):
        found = [before * size + at * stride for before in found for at in range(out)]
    return found
