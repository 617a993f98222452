"""The wgrad half of cuda.depthwise_mma: products of x with dy on tensor cores, whose diagonals are the taps.

    G_r[j, q] = sum over n,p of  x[n, p*stride - pad + r, q0 + j] * dy[n, p, q0 + q]
    dw[r, s]  = sum over q of    G_r[q + s, q]

One instruction multiplies 16 columns of x with 8 of dy over 16 rows; of its 2048 products 128 * S are wanted for a
filter of S <= 9 columns. ``kernels/depthwise_mma_wgrad.cu`` says how a block goes about it; this module decides on the
tiles and where each row of them lies in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any

from torch import Tensor

from ..device import Device
from ..engine import Knobs, Runner, Traits
from ..problem import Problem
from . import jit, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, aligned, pack

__all__ = ["Gram", "build", "cost", "knobs", "refusals", "sources", "traits", "workspace_bytes"]

_FILE = "depthwise_mma_wgrad.cu"
_LARGEST = 31
_ALTERNATIVES = 8
_REGISTERS = 65536  # of a multiprocessor
_CHANNELS = 16  # of a block: 32 bytes of a pixel, a sector
_CLOCK = 1.7e9
_MMA = 1.6  # cycles of a multiprocessor for 16 x 8 x 16
_LATENCY = 0.6e-6  # of a tile's first pixels
_ROUND = 0.9e-6  # of a load by each thread, while memory is busy
_BARRIERS = 0.25e-6  # two of them a tile
_MOST_WORKSPACE = 32 << 20


@dataclass(frozen=True)
class Gram(Knobs):
    """A tile is ``images`` images in 8/``images`` bands of ``rows`` rows each, by ``blocks`` * 8 columns of dy. A block
    has ``warps`` warps, ``tap_rows`` filter rows and one of ``parts`` shares of the tiles; ``residents`` fit in a
    multiprocessor. ``chunk`` rows of a band are in registers at a time. Before the products of a tile, the next one is
    ``staged``: on its way to shared memory, as it is; or asked for ``ahead``, to come to the cache."""

    images: int
    rows: int
    blocks: int
    tap_rows: int
    chunk: int
    warps: int = 8
    residents: int = 2
    parts: int = 1
    staged: bool = False
    ahead: bool = False


def refusals(problem: Problem, device: Device) -> Iterator[str]:
    """Beyond what all passes of the engine need. See :meth:`openconv.engine.Engine.refusals`; likewise below."""
    if max(problem.stride) > 2:
        yield f"stride is {problem.stride}; wanted 1 or 2 in wgrad"
    if max(problem.stride) > 1 and max(problem.filter) > 7:  # sums of both parities: more than the registers hold
        yield f"stride is {problem.stride} with a filter of {problem.filter}; wanted at most 7 taps an axis with 2"


def traits(problem: Problem, knobs: Gram) -> Traits:
    """Sums in f32, as long as a part's share of the rows; an mma cuts bits off its sum of 16 products rather than
    rounding, up to two units in the last place."""
    work = _Work(problem, knobs)
    steps = ceil(work.items / knobs.parts) * ceil(knobs.rows / 2) * knobs.blocks
    return Traits("f32", (2 * min(steps, problem.gemm.k) + 16 + 8) * 2.0**-23)


def workspace_bytes(problem: Problem, device: Device | None, knobs: Gram) -> int:
    """A sum in f32 for each weight and part."""
    return 4 * knobs.parts * prod(problem.w_shape)


@lru_cache(maxsize=256)
def knobs(problem: Problem, device: Device) -> Iterable[Gram]:
    """The cheapest by prediction first."""
    seconds = {each: _Work(problem, each).seconds(device) for each in _search(problem, device)}
    families: dict[Gram, list[Gram]] = {}
    for each in sorted(seconds, key=seconds.__getitem__):
        families.setdefault(replace(each, chunk=1, parts=1), []).append(each)
    # Two of a kind: predictions tell shares and chunks apart better than tiles.
    found = (each for family in families.values() for each in family[:2])
    best = sorted(found, key=seconds.__getitem__)[:_ALTERNATIVES]
    # The same tiles with a hint to memory: what it is worth depends on the memory, not on the tiles.
    return (*best, replace(best[0], ahead=True))


def cost(problem: Problem, device: Device, knobs: Gram) -> float:
    """The slowest of memory, caches, and what a multiprocessor does, a part of the next, and two launches."""
    return _Work(problem, knobs).seconds(device)


def build(problem: Problem, device: Device, knobs: Gram) -> Runner:
    """Compile for this problem."""
    assert isinstance(device, CudaDevice)
    work = _Work(problem, knobs)
    [source] = sources(problem, device, knobs)
    name = _FILE.removesuffix(".cu")
    grid = (work.groups * work.tap_tiles * knobs.parts,)
    first = Launch(source, name, device, grid, (32 * knobs.warps,), work.params, shared=work.memory)
    taps = ceil(prod(problem.filter) * work.sum_rows / 8)
    second = Launch(source, f"{name}_sum", device, (taps * ceil(problem.c / 32),), (256,), work.params, follows=True)

    def run(x: Tensor, dy: Tensor, out: Tensor, workspace: Tensor | None, operands: Any) -> None:
        assert workspace is not None
        x, dy = aligned(x, 16), aligned(dy, 16)
        pointers = x.data_ptr(), dy.data_ptr(), out.data_ptr(), workspace.data_ptr()
        first(*pointers)
        second(*pointers)

    return run


def sources(problem: Problem, device: Device, knobs: Gram) -> list[jit.Source]:
    """What :func:`build` compiles."""
    return [jit.Source(_FILE, render.traits(problem, _Work(problem, knobs).constants))]


# -- the work of a kernel -------------------------------------------------------------------------------------------


class _Work:
    """How the knobs cut a problem up, where rows lie in shared memory, and what that costs."""

    def __init__(self, problem: Problem, knobs: Gram) -> None:
        self.problem, self.knobs = problem, knobs
        (R, S), (SH, SW), (H, W), (P, Q) = problem.filter, problem.stride, problem.spatial, problem.out
        (top, _), (left, _) = problem.padding
        images, rows, blocks, tap_rows = knobs.images, knobs.rows, knobs.blocks, knobs.tap_rows
        assert 8 % images == 0
        assert P % rows == 0
        self.groups, self.tap_tiles = ceil(problem.c / _CHANNELS), ceil(R / tap_rows)

        # Rows: bands of a tile, tiles of an image.
        bands, all_bands, step = 8 // images, P // rows, SH * rows
        self.row_tiles = ceil(all_bands / bands)
        self.whole = self.row_tiles == 1
        assert self.whole or images == 1
        assert self.fits_phase or self.tap_tiles == 1
        self.dy_bands = min(bands, all_bands)
        phase = top % step if self.whole else 0
        if self.whole:
            self.x_rows = max(1, min(H, SH * (P - 1) + R - top))
        else:
            self.x_rows = step * (bands - 1) + SH * (rows - 1) + tap_rows

        # Columns: blocks of 8 of dy, and those of x that are in the image, counted from where the first window begins.
        columns = ceil(Q / 8)
        self.column_tiles = ceil(columns / blocks)
        parities = min(SW, S)
        taps = [ceil((S - parity) / SW) for parity in range(parities)]
        self.tiles = [ceil((7 + count) / 16) for count in taps]
        x_first, x_last = 0, (8 * blocks - 1 + max(taps) - 1) // 8
        if self.column_tiles == 1:
            x_first = min(max(0, ceil((left - parity) / SW)) // 8 for parity in range(parities))
            x_last = min(x_last, max((W - 1 + left - parity) // SW // 8 for parity in range(parities)))
            x_first = min(x_first, x_last)
        self.x_first, self.x_blocks = x_first, x_last - x_first + 1
        self.across = parities * self.x_blocks

        # Shared memory, in units of 16 bytes.
        slots = ceil(self.x_rows / step)
        x_pitch, x_image = _spread(self.across, step * slots, bands, images)
        dy_pitch, dy_image = _spread(blocks, rows * self.dy_bands, bands, images)
        x_plane, dy_plane = images * x_image, images * dy_image
        planes = 16 * (_CHANNELS * (x_plane + dy_plane) + 4 + 4 + 16)
        sums = 4 * (tap_rows * S * 17 + knobs.warps * sum(self.tiles) * 16 * 9)
        self.moves = 2 * images * (self.x_rows * self.across + self.dy_bands * rows * blocks)
        self.memory = max(planes + (128 * self.moves if knobs.staged else 0), sums)

        self.items = ceil(problem.n / images) * self.row_tiles * self.column_tiles
        self.sum_rows = 8 if knobs.parts > 16 else 2 if knobs.parts > 4 else 1
        self.constants: dict[str, int | bool | str] = {
            "filter_h": R, "filter_w": S, "stride_h": SH, "stride_w": SW, "warps": knobs.warps, "images": images,
            "bands": bands, "rows": rows, "chunk": knobs.chunk, "blocks": blocks, "tap_rows": tap_rows,
            "whole": self.whole, "ragged": Q % 8 != 0 and columns > 1, "summed": Q if columns == 1 else 8,
            "staged": knobs.staged, "ahead": knobs.ahead,
            "x_rows": self.x_rows, "x_phase": phase, "x_slots": slots, "x_first": x_first, "x_blocks": self.x_blocks,
            "x_pitch": x_pitch, "x_image": x_image, "x_plane": x_plane, "dy_bands": self.dy_bands,
            "dy_pitch": dy_pitch, "dy_image": dy_image, "dy_plane": dy_plane, "memory": self.memory,
            "residents": knobs.residents, "sum_rows": self.sum_rows,
        }  # fmt: skip
        self.params = pack(4, (), [
            problem.n, problem.c, H, W, P, Q, top, left,
            knobs.parts, *divmod(self.items, knobs.parts), all_bands, columns,
            *divisor(self.groups), *divisor(self.tap_tiles), *divisor(self.row_tiles), *divisor(self.column_tiles),
        ])  # fmt: skip

    @property
    def fits_phase(self) -> bool:
        """Whether the rows of all groups of filter rows meet the stored ones at the same place of a band."""
        return self.knobs.tap_rows % (self.problem.stride[0] * self.knobs.rows) == 0 or not self.whole

    @property
    def registers(self) -> int:
        """Of a thread, about: while it loads, and while it multiplies."""
        knobs = self.knobs
        sums = 16 // knobs.warps * knobs.tap_rows * sum(self.tiles) * 4
        x = 4 * ceil(self.x_blocks / 2)
        dy = 4 * ceil(knobs.chunk / 2) * ceil(knobs.blocks / 2)
        return sums + max(32 + (14 if knobs.staged else 26), dy + 2 * x + 8 + 20)

    @property
    def gaps(self) -> int:
        """Registers that stay unused, about: operands are several side by side, which do not pack well among the sums
        of two channels where blocks or rows are odd, or where there is much code to order."""
        knobs = self.knobs
        found = 16 if self.x_blocks % 2 and knobs.rows > 2 and knobs.warps < 16 else 0
        found += 8 if knobs.chunk > 6 and knobs.blocks > 1 else 0
        found += 24 if knobs.chunk in (3, 5) else 0
        found += 12 if knobs.tap_rows > 7 else 0
        return found + (16 if knobs.rows // knobs.chunk > 2 else 0)

    def seconds(self, device: Device) -> float:
        """Predicted time of both launches."""
        p, knobs = self.problem, self.knobs
        (SH, SW), (H, W), Q = p.stride, p.spatial, p.out[1]
        sms = device.threads
        # A block's tile, in cycles of its multiprocessor: products; matrices, and stores of 8 units by each of 8 lanes;
        # instructions, of which it issues four.
        pairs = sum(
            self.x_first - 1 <= block + 2 * tile < self.x_first + self.x_blocks
            for count in self.tiles for block in range(knobs.blocks) for tile in range(count)
        )  # fmt: skip
        steps = knobs.rows // knobs.chunk * ceil(knobs.chunk / 2)
        products = _CHANNELS * knobs.tap_rows * steps * pairs
        chunks = knobs.rows // knobs.chunk
        read = _CHANNELS * (
            knobs.rows * knobs.blocks + chunks * (SH * (knobs.chunk - 1) + knobs.tap_rows) * self.across
        )
        x_rows = min(self.x_rows, H)
        units = 2 * knobs.images * (x_rows * self.across + self.dy_bands * knobs.rows * knobs.blocks)
        busy = max(_MMA * products, read + 1.3 * units, (1.6 * products + 0.6 * read + 90 / 32 * units) / 4)
        # Fewer than 16 warps wait for their own products and loads.
        alone = max(0.0, 16 / (knobs.warps * knobs.residents) - 1)
        busy = (busy + 0.2 * (1.3 * units + read)) * (1 + 0.3 * alone) / _CLOCK
        # Bytes: each tensor once from memory, halos and groups of filter rows once more from the cache.
        loaded = (
            32
            * knobs.images
            * (x_rows * min(8 * self.x_blocks * SW, W) + self.dy_bands * knobs.rows * min(8 * knobs.blocks, Q))
        )
        all_tiles = self.groups * self.tap_tiles * self.items
        # Turns: the blocks that run at the same time, each with its tiles one after the other.
        blocks = self.groups * self.tap_tiles * knobs.parts
        waves = ceil(blocks / (sms * knobs.residents))
        together = min(knobs.residents, ceil(blocks / sms))
        turns = waves * ceil(self.items / knobs.parts)
        moved = p.min_bytes / (0.85 * device.bandwidth)
        cached = all_tiles * loaded / (1.25 * device.bandwidth)
        arrive = together * loaded * sms / (1.25 * device.bandwidth)  # the tiles of all blocks at once
        worked = turns * together * busy
        threads = 32 * knobs.warps
        rounds = ceil(2 * knobs.images * x_rows * self.across / threads) + ceil(
            2 * knobs.images * self.dy_bands * knobs.rows * knobs.blocks / threads
        )
        if knobs.staged:
            waited = turns * (max(_LATENCY + arrive, together * busy) + together * 2.5 * units / _CLOCK + _BARRIERS)
        else:
            load = max(rounds * _ROUND, _LATENCY + arrive / together)
            waited = turns * (max(load + busy, arrive, together * busy) + _BARRIERS)
        floors = sorted((max(moved, cached), worked, waited))
        sums = workspace_bytes(p, None, knobs)
        last = 0.8e-6 + 2.5e-6 + sums / (0.3 * device.bandwidth)  # diagonals, and the second launch
        # Measured on an H200: loading a tile and multiplying it overlap less than they could, unless tiles are staged.
        return 2e-6 + (1.2 if knobs.staged else 2.0) * (floors[-1] + 0.2 * floors[-2]) + last


def _spread(units: int, rows: int, bands: int, images: int) -> tuple[int, int]:
    """Units from a row to the next and from an image to the next, as few as possible, such that the same row of all
    bands of all images falls into 8 different groups of banks."""
    best = None
    for pitch in range(units, units + 8):
        for image in range(rows * pitch, rows * pitch + 8):
            if len({(n * image + band * pitch) % 8 for n in range(images) for band in range(bands)}) == 8:
                if best is None or image < best[1]:
                    best = pitch, image
                break
    assert best is not None
    return best


# -- the search space -----------------------------------------------------------------------------------------------


def _search(problem: Problem, device: Device) -> Iterator[Gram]:
    """Tiles that fit in shared memory, with as many filter rows as fit in registers."""
    R, SH, P = problem.filter[0], problem.stride[0], problem.out[0]
    columns = ceil(problem.out[1] / 8)
    cuts = sorted({ceil(columns / ceil(columns / most)) for most in (8, 7, 4, 2, 1)})
    for images, rows in _bands(problem):
        # Groups of filter rows: any in tiles of a few rows; those that keep their place in a band in whole images.
        step = SH * rows if P // rows <= 8 // images else 1
        groups = {R, *(n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16) if n < R and n % step == 0)}
        for blocks in cuts:
            for warps in (8, 16):
                for tap_rows in sorted(groups):
                    for chunk in sorted({rows, *(n for n in (2, 4) if rows % n == 0)}, reverse=True):
                        for staged in (False, True):
                            found = Gram(images, rows, blocks, tap_rows, chunk, warps, staged=staged)
                            yield from _residents(problem, device, found)


def _bands(problem: Problem) -> Iterator[tuple[int, int]]:
    """Images of a tile and rows of a band, which divide those of an image."""
    P = problem.out[0]
    for images in (1, 2, 4, 8):
        if images > 1 and images >= 2 * problem.n:
            continue
        for rows in range(1, min(P, 14) + 1):
            if P % rows == 0 and (images == 1 or P // rows <= 8 // images):
                yield images, rows


def _residents(problem: Problem, device: Device, found: Gram) -> Iterator[Gram]:
    """As many blocks as a multiprocessor takes, and parts that fill all of them once or twice."""
    most = device.shared_bytes if isinstance(device, CudaDevice) else 99 << 10
    work = _Work(problem, found)
    if work.across > 13 or work.memory > most:
        return
    if work.registers + work.gaps <= 116:
        warps = 16
    else:
        warps = 8 if work.registers + work.gaps // 2 <= 204 else 0
    residents = min(warps // found.warps, (most + 1024) // (work.memory + 1024))
    for fill in (1, 2) if residents else ():
        parts = min(fill * device.threads * residents // (work.groups * work.tap_tiles), work.items)
        parts = max(1, min(parts, _MOST_WORKSPACE // (4 * prod(problem.w_shape))))
        each = ceil(work.items / parts)
        for count in {parts, ceil(work.items / each)}:
            yield replace(found, residents=residents, parts=count)
