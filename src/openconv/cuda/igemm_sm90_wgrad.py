"""cuda.igemm_sm90, the filter's gradient: pixels are the depth of the product, and splits of them share a result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from ..problem import DTYPE_BYTES, Problem
from . import group_product, igemm_sm90_windows, jit, render
from .device import CudaDevice
from .divide import divisor
from .igemm_sm90_model import (
    Estimate,
    bring_cycles,
    cluster_cycles,
    moved_bytes,
    product_cycles,
    result_cycles,
    short_rows,
    wait_cycles,
)
from .igemm_sm90_work import CLUSTERS, GroupKnobs, GroupWork
from .launch import TensorMap, WindowMap, pack

__all__ = ["Filters", "Work", "refusals", "tiles", "work"]

_MOST_STAGES = 8
_MOST_SPLITS = 160  # a filter that is one tile has a split for each multiprocessor
_FEWEST_STEPS = 4  # of a split
_MOST_WORKSPACE = 256 << 20
_RESULT_BOX = 64 * 128  # bytes


@dataclass(frozen=True)
class Filters(GroupKnobs):
    """A tile is ``rows`` filters by ``boxes`` times 64 columns, each box of one tap. Of its ``groups`` of four warps,
    each multiplies ``blocks`` times 64 rows; ``beside`` groups have the same rows and divide the boxes. A step is
    ``depth`` pixels; ``stages`` of them are on their way, ``buffers`` boxes of results have a place for each group,
    ``splits`` tiles share a result's pixels, a multiprocessor has ``residents`` blocks, and ``cluster`` blocks share
    the pixels of a tile."""

    rows: int
    boxes: int
    groups: int
    beside: int
    blocks: int
    depth: int
    stages: int
    buffers: int = 2
    splits: int = 1
    residents: int = 1
    cluster: int = 1

    @property
    def sums(self) -> int:
        """Of a thread and product."""
        return 32 * self.boxes // self.beside


def refusals(problem: Problem) -> Iterator[str]:
    """What this kernel needs beyond what the engine does."""
    first = problem.dtypes[problem.inputs[0]]
    if DTYPE_BYTES[first] != 2:
        yield f"the pass is wgrad of {first}; wanted f16 or bf16: products take no others across"
    yield from igemm_sm90_windows.refusals(_forward(problem))


def _forward(problem: Problem) -> Problem:
    """The pass whose windows are the same."""
    return problem.with_(direction="fprop")


class Work(GroupWork):
    """A problem and knobs as the kernel takes them."""

    entry = "igemm_sm90_wgrad"

    def __init__(self, problem: Problem, tile: Filters) -> None:
        self.problem, self.tile = problem, tile
        self.first = problem.dtypes[problem.inputs[0]]
        self.size = DTYPE_BYTES[self.first]
        groups = problem.groups
        self.c, self.k, self.taps = problem.c // groups, problem.k // groups, prod(problem.filter)
        self.pixels = problem.n * prod(problem.out)
        self.steps = ceil(self.pixels / tile.depth)
        if tile.splits * tile.cluster > self.steps:
            splits = f"splits is {tile.splits}" + f" of {tile.cluster} blocks" * (tile.cluster > 1)
            raise ValueError(f"{splits}; wanted at most {self.steps}, as many as there are steps")
        self.chunks = ceil(self.c / 64)
        self.columns = self.taps * self.chunks
        self.row_tiles, self.column_tiles = ceil(self.k / tile.rows), ceil(self.columns / tile.boxes)
        self.each = self.row_tiles * self.column_tiles * groups  # tiles of a split
        self.tiles = self.each * tile.splits
        self.parted = tile.splits > 1
        self.out = 4 if self.parted else DTYPE_BYTES[problem.result_dtype]

    @property
    def stage_bytes(self) -> int:
        tile = self.tile
        return 128 * tile.depth * (tile.rows // 64 + tile.boxes)

    @property
    def shared(self) -> int:
        """Of a block, from a multiple of 1024 bytes on."""
        tile = self.tile
        return 1024 + tile.stages * self.stage_bytes + tile.groups * tile.buffers * _RESULT_BOX

    @property
    def static(self) -> int:
        """Barriers."""
        return 16 * self.tile.stages

    @property
    def registers(self) -> int:
        """Of a thread, about: sums and places."""
        return self.tile.blocks * self.tile.sums + 36

    @property
    def sums(self) -> int:
        return int(self.tile.sums)

    def estimate(self, device: CudaDevice) -> Estimate:
        """Where the time goes, in cycles of a multiprocessor."""
        problem, tile = self.problem, self.tile
        columns = 64 * tile.boxes
        products = tile.beside * product_cycles(tile.rows, columns // tile.beside) * tile.depth / 64
        row = 128 * tile.depth
        # Boxes behind the last do not come.
        alone = tile.cluster > 1  # neighbours have the same tile, and other steps of it
        brought = bring_cycles(
            (row * self.columns / self.column_tiles, 1 if alone else self.row_tiles),
            (row * tile.rows // 64, 1 if alone else self.column_tiles),
            self.tiles * tile.cluster / device.threads,
            tile.depth * tile.boxes * short_rows(self.c * self.size)
            + tile.depth * tile.rows // 64 * short_rows(self.k * self.size),
        )  # fmt: skip
        told, share = cluster_cycles(tile.cluster, tile.rows * columns, tile.blocks * tile.boxes // tile.beside)
        results = prod(problem.w_shape)
        sums, added = 4 * tile.splits * results, DTYPE_BYTES[problem.result_dtype] * results
        return Estimate(
            tiles=self.tiles, slots=self.slots(device), residents=tile.residents,
            steps=self.steps / (tile.splits * tile.cluster), products=products, brought=brought,
            waits=wait_cycles(tile.stages, products + brought),
            results=told + result_cycles(tile.rows * columns * self.out / 2 * share),
            bytes=moved_bytes(problem) + self.parted * sums, added=self.parted * (sums + added),
        )  # fmt: skip

    # -- for the kernel ---------------------------------------------------------------------------------------------

    @property
    def constants(self) -> dict[str, int | bool | str]:
        problem, tile = self.problem, self.tile
        return {
            "Stored": self.total if self.parted else problem.result_dtype, "rank": problem.rank, "rows": tile.rows,
            "boxes": tile.boxes, "groups": tile.groups, "beside": tile.beside, "blocks": tile.blocks,
            "depth": tile.depth, "stages": tile.stages, "buffers": tile.buffers, "residents": tile.residents,
            "cluster": tile.cluster,
            "parted": self.parted, "follows": self.follows,
        }  # fmt: skip

    @property
    def source(self) -> jit.Source:
        tile = self.tile
        text = group_product.product(
            64 * tile.boxes // tile.beside, self.first, self.first, turned_first=True, turned_second=True
        )
        return jit.Source("igemm_sm90_wgrad.cu", text + render.traits(self.problem, self.constants))

    @property
    def params(self) -> bytes:
        problem, tile = self.problem, self.tile
        lead = 3 - problem.rank
        narrow = [self.tiles, *divisor(self.row_tiles), *divisor(self.column_tiles), *divisor(problem.groups)]
        narrow += [*divmod(self.steps, tile.splits * tile.cluster), self.columns, self.c, *divisor(self.chunks)]
        narrow += [number for taps in (*(1,) * lead, *problem.filter) for number in divisor(taps)]
        narrow += [*(1,) * lead, *problem.stride, *(0,) * lead, *(-low for low, _ in problem.padding)]
        narrow += [*(1,) * lead, *problem.dilation]
        narrow += [number for size in (*(1,) * lead, *problem.out) for number in divisor(size)]
        return pack(5, (), narrow)

    @property
    def _row(self) -> tuple[int, int, int]:
        return self.taps * self.c, self.c, 1

    @property
    def maps(self) -> tuple[TensorMap | WindowMap, ...]:
        c, k, groups, depth, size, out = self.c, self.k, self.problem.groups, self.tile.depth, self.size, self.out
        gradients = TensorMap(1, (k, groups, self.pixels), (k * size, k * groups * size), (64, 1, depth), 128, size)
        row = self.taps * c * out
        result = TensorMap(
            4 if self.parted else 2, (c, self.taps, k, groups * self.tile.splits), (c * out, row, k * row),
            (128 // out, 1, 64, 1), 128, out,
        )  # fmt: skip
        return gradients, result, self.windows

    @property
    def windows(self) -> WindowMap:
        problem, size = self.problem, self.size
        axes, step = problem.spatial[::-1], problem.stride[::-1]
        strides, whole = [], problem.c * size
        for each in axes:
            strides.append(whole)
            whole *= each
        lower = tuple(-low for low, _ in problem.padding[::-1])
        each_axis = zip(lower, problem.out[::-1], step, axes, strict=True)
        upper = tuple(at + (count - 1) * by - axis + 1 for at, count, by, axis in each_axis)
        return WindowMap(
            0, (problem.c, *axes, problem.n), (*strides, whole), (64, self.tile.depth), lower, upper, step, 128, size
        )


work = lru_cache(maxsize=4096)(Work)


# -- the search space -----------------------------------------------------------------------------------------------

# Rows of a tile, groups, groups beside each other, blocks.
_SHAPES = (
    (128, 2, 1, 1), (256, 2, 1, 2), (192, 3, 1, 1), (64, 1, 1, 1), (128, 1, 1, 2), (64, 2, 2, 1), (64, 3, 3, 1),
    (128, 2, 2, 2),
)  # fmt: skip


def tiles(problem: Problem, device: CudaDevice) -> Iterator[Filters]:
    """What fits, each with as many stages as there is room for."""
    k, columns = problem.k // problem.groups, prod(problem.filter) * ceil(problem.c // problem.groups / 64)
    for rows, groups, beside, blocks in _SHAPES:
        if rows > 64 * ceil(k / 64):
            continue
        for own in range(3 if beside > 1 else 1, 5):  # fewer beside each other are better off in one group
            boxes = own * beside
            if own > 1 and boxes - beside >= columns:  # of which a group would have nothing, or one box too many
                continue
            for residents in (1, 2):
                for depth in (64, 32, 128):
                    tile = Filters(rows, boxes, groups, beside, blocks, depth, 2, residents=residents)
                    yield from _staged(problem, device, tile)


def _staged(problem: Problem, device: CudaDevice, tile: Filters) -> Iterator[Filters]:
    bare = Work(problem, tile)
    if not bare.fits:
        return
    stages = min(_MOST_STAGES, 2 + bare.room // (bare.stage_bytes + 16))
    # Short steps are for tiles of which few stages fit, long ones for those of which many do.
    if stages < min(3, bare.steps) or (tile.depth == 32 and stages > 6) or (tile.depth == 128 and stages < 4):
        return
    whole = replace(tile, stages=stages)
    yield whole
    if tile.residents == 1 and 256 * tile.rows * tile.boxes <= stages * bare.stage_bytes:  # sums lie where the ring was
        for blocks in CLUSTERS:
            if bare.each * blocks <= device.threads and blocks * _FEWEST_STEPS <= bare.steps:
                yield replace(whole, cluster=blocks)
    slots, most = device.threads * tile.residents, min(bare.steps // _FEWEST_STEPS, _MOST_SPLITS)
    for count in sorted({min(waves * slots // bare.each, most) for waves in (1, 2, 3, 4)}):
        if count > 1 and 4 * count * prod(problem.w_shape) <= _MOST_WORKSPACE:
            yield replace(whole, splits=count)
