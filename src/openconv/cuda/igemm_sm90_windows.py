"""cuda.igemm_sm90, windows as boxes: pixels as rows of the product (im2col) or as its columns (swapped)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, gcd, prod

from ..problem import DTYPE_BYTES, Problem
from . import fusion, group_product, jit
from .channels_last import Turn
from .device import CudaDevice
from .divide import divisor
from .igemm_sm90_model import (
    Estimate,
    bring_cycles,
    cluster_cycles,
    moved_bytes,
    pair_cycles,
    product_cycles,
    result_cycles,
    short_rows,
    team_cycles,
    wait_cycles,
)
from .igemm_sm90_work import CLUSTERS, ConvolutionWork, GroupKnobs, stored
from .launch import TensorMap, WindowMap, pack

__all__ = ["Phase", "Windows", "Work", "phases", "refusals", "steps", "tiles", "work"]

_MOST_STAGES = 8
_MOST_SPLITS = 16
_MOST_WORKSPACE = 256 << 20

# By spatial axes: the least and the most of a corner, and the most of a tap's offset, that a map of windows holds.
_CORNERS = {1: (-(1 << 15), (1 << 15) - 1, (1 << 16) - 1), 2: (-128, 127, 255), 3: (-16, 15, 31)}
_MOST_STEP = 8  # from pixel to pixel


@dataclass(frozen=True)
class Windows(GroupKnobs):
    """A tile is ``pixels`` by ``channels`` of the result, of which each of ``groups`` of four warps multiplies
    ``blocks`` times 64 rows: pixels, or channels if ``swapped``. If there are twice as many groups as a tile needs,
    two teams of them take turns. ``stages`` steps are on their way, ``buffers`` boxes of results have a place for each
    group, ``splits`` tiles share a result's sum, a multiprocessor has ``residents`` blocks, and ``cluster`` blocks
    share the steps of a tile."""

    pixels: int
    channels: int
    groups: int
    blocks: int
    stages: int
    buffers: int
    swapped: bool = False
    splits: int = 1
    residents: int = 1
    cluster: int = 1

    @property
    def columns(self) -> int:
        """Of a product."""
        return self.pixels if self.swapped else self.channels

    @property
    def team(self) -> int:
        """Groups of a tile."""
        return (self.channels if self.swapped else self.pixels) // (64 * self.blocks)

    @property
    def teams(self) -> int:
        """Tiles that a block has at a time."""
        return self.groups // self.team

    @property
    def box(self) -> int:
        """Pixels of a box of results."""
        if not self.swapped:
            return 64
        return max(size for size in range(16, 65, 16) if self.pixels % size == 0)


@dataclass(frozen=True)
class Phase:
    """One way in which taps meet pixels, along D, H and W: ``count`` pixels, the first of which reads its first tap at
    ``corner`` and has its result at ``start``; ``taps`` of the filter, ``first`` the one that is read first."""

    count: tuple[int, int, int]
    taps: tuple[int, int, int]
    first: tuple[int, int, int]
    corner: tuple[int, int, int]
    start: tuple[int, int, int]

    @property
    def terms(self) -> int:
        return prod(self.taps)


@lru_cache(maxsize=512)
def phases(problem: Problem) -> tuple[Phase, ...]:
    """Of a fprop one; of a dgrad one for each place within a stride, those with the most taps first."""
    lead = 3 - problem.rank
    axes: list[list[tuple[int, int, int, int, int]]] = [[(1, 1, 0, 0, 0)]] * lead
    each = zip(
        problem.spatial, problem.out, problem.filter, problem.stride, problem.padding, problem.dilation, strict=True
    )
    for size, out, taps, stride, (pad, _), dilation in each:
        if problem.direction == "fprop":
            axes.append([(out, taps, 0, -pad, 0)])
            continue
        # Place f + stride * i of dx meets tap r where f + pad - r * dilation is a multiple of the stride.
        every, found = _every(stride, dilation), []
        for start in range(min(stride, size)):
            met = [r for r in range(min(every, taps)) if (start + pad - r * dilation) % stride == 0]
            count = len(range(met[0], taps, every)) if met else 0
            # The last tap reads the first place of dy, so that ways to the others are not negative.
            last = met[0] + every * (count - 1) if met else 0
            corner = (start + pad - last * dilation) // stride if met else 0
            found.append((ceil((size - start) / stride), count, last, corner, start))
        axes.append(found)
    made = [Phase(*zip(*combined, strict=True)) for combined in product(*axes)]
    return tuple(sorted(made, key=lambda phase: -phase.terms))


def _every(stride: int, dilation: int) -> int:
    """From one tap that meets a place to the next."""
    return stride // gcd(stride, dilation)


def steps(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Along D, H and W: from pixel to pixel, from tap to tap in the input, and from tap to tap in the filter."""
    lead = (1,) * (3 - problem.rank)
    if problem.direction == "fprop":
        return (*lead, *problem.stride), (*lead, *problem.dilation), (1, 1, 1)
    pairs = list(zip(problem.stride, problem.dilation, strict=True))
    ways = (*lead, *(dilation // gcd(stride, dilation) for stride, dilation in pairs))
    return (1, 1, 1), ways, (*lead, *(-_every(stride, dilation) for stride, dilation in pairs))


def refusals(problem: Problem) -> Iterator[str]:
    """What these kernels need of a fprop or dgrad beyond what the engine does."""
    lowest, highest, furthest = _CORNERS[problem.rank]
    step, way, _ = steps(problem)
    rank = problem.rank
    if max(step) > _MOST_STEP:
        yield f"stride is {problem.stride}; wanted at most {_MOST_STEP}, as maps of windows have it"
    sizes = problem.spatial if problem.direction == "fprop" else problem.out
    for phase in phases(problem):
        axes = zip(phase.corner[-rank:], phase.count[-rank:], step[-rank:], sizes, strict=True)
        corners = [*phase.corner[-rank:], *(corner + (count - 1) * by - size + 1 for corner, count, by, size in axes)]
        offsets = [(taps - 1) * by for taps, by in zip(phase.taps, way, strict=True)]
        if min(corners) < lowest or max(corners) > highest or max(offsets) > furthest:
            yield (
                f"windows begin and end at {corners} and reach {max(offsets)}; maps of windows of {rank} axes hold "
                f"{lowest} to {highest} and {furthest}"
            )
            return


class Work(ConvolutionWork):
    """A problem and knobs as the kernel takes them."""

    entry = "igemm_sm90"

    def __init__(self, problem: Problem, tile: Windows) -> None:
        super().__init__(problem, tile)
        if self.pairs and not tile.swapped:  # rows are taken apart in registers
            self.pairs = replace(self.pairs, first=0)
        self.phases = phases(problem)
        self.images = problem.spatial if self.fprop else problem.out
        self.results = problem.out if self.fprop else problem.spatial
        self.pixels = problem.n * prod(self.results)  # of all phases
        most = max(prod(phase.count) for phase in self.phases)
        self.pixel_tiles = ceil(problem.n * most / tile.pixels)
        self.each = self.pixel_tiles * self.channel_tiles * problem.groups  # tiles of a phase and split
        self.tiles = self.each * len(self.phases) * tile.splits
        self.apart = len(self.phases) > 1

    @property
    def flat(self) -> bool:
        """Whether windows are the pixels themselves, one behind the other: their boxes need no map of windows."""
        problem = self.problem
        alone = prod(problem.filter) == 1 and max(problem.stride) == 1
        return alone and not any(low or high for low, high in problem.padding)

    @property
    def steps(self) -> int:
        """Of the longest phase."""
        return self.phases[0].terms * self.chunks

    @property
    def places(self) -> int:
        """Of a step, in the ring; and parts of windows in memory."""
        return 2 if self.pairs and self.tile.swapped else 1

    @property
    def stage_bytes(self) -> int:
        return 128 * (self.tile.pixels + self.tile.channels * (self.halves if self.places == 1 else 1))

    @property
    def buffer_bytes(self) -> int:
        return self.tile.box * 64 * self.out * self.boxes

    @property
    def shared(self) -> int:
        """Of a block, from a multiple of 1024 bytes on."""
        tile = self.tile
        listed = tile.pixels if tile.swapped else 64 * tile.blocks
        lists = 8 * tile.groups * listed if self.apart else 0
        operands = len(self.problem.epilogue.operands) if self.vectors and not tile.swapped else 0
        vectors = DTYPE_BYTES[self.problem.result_dtype] * tile.groups * operands * tile.channels
        return 1024 + tile.stages * self.stage_bytes + tile.groups * tile.buffers * self.buffer_bytes + lists + vectors

    @property
    def static(self) -> int:
        """Barriers."""
        teams = self.tile.teams
        return 8 * (2 * self.tile.stages + self.tile.groups * self.tile.buffers + (teams if teams > 1 else 0))

    @property
    def fits(self) -> bool:
        tile = self.tile
        fewest = min(phase.terms for phase in self.phases) * self.chunks
        shares = tile.cluster == 1 or (
            fewest >= tile.cluster and 4 * tile.pixels * tile.channels <= tile.stages * self.stage_bytes
        )
        return shares and super().fits

    @property
    def registers(self) -> int:
        """Of a thread, about: sums, and what the epilogue and places take."""
        tile = self.tile
        sums = tile.blocks * self.sums * (2 if self.promoted else 1)
        sets = tile.blocks if tile.swapped else tile.channels // 64
        # Results of four bytes leave one by one where channels are rows, and tensors of them come so.
        places = 72 if tile.swapped and self.out == 4 and self.tensors else 4 * len(self.tensors)
        more = 4 + 20 * (self.problem.stats or tile.groups > 2) if self.pairs else 0
        if self.pairs and not tile.swapped:
            more += 8 * self.slices * tile.blocks  # windows
        return sums + 36 + places + 6 * self.also + 4 * self.problem.stats * sets + more

    @property
    def sums(self) -> int:
        return int(self.tile.columns) // 2

    @property
    def parts(self) -> int:
        """Of statistics: rows of sums in the workspace, four for each box of pixels."""
        return 4 * self.pixel_tiles * (1 if self.tile.swapped else self.tile.team)

    def estimate(self, device: CudaDevice) -> Estimate:
        """Where the time goes, in cycles of a multiprocessor."""
        problem, tile = self.problem, self.tile
        rows, columns = (tile.channels, tile.pixels) if tile.swapped else (tile.pixels, tile.channels)
        slots, reads = self.slots(device), len(self.tensors) + self.also
        groups = tile.groups * tile.residents
        products = product_cycles(rows, columns, groups * self.promoted, 3 if self.pairs else 1) * self.slices / 4
        if self.pairs and not tile.swapped:  # read and taken apart while another group multiplies
            products += pair_cycles(rows, groups)
        alone = tile.cluster > 1  # neighbours have the same tile, and other steps of it
        windows = 128 * self.places * tile.pixels, 1 if alone else self.channel_tiles
        filters = 128 * self.halves * tile.channels, 1 if alone else self.pixel_tiles
        short = self.places * tile.pixels + self.halves * tile.channels * (self.order != 1)
        short *= short_rows(self.depth_channels * self.size)
        brought = bring_cycles(windows, filters, self.tiles * tile.cluster / device.threads, short)
        results = prod(problem.result_shape)
        sums, added = 4 * tile.splits * results, DTYPE_BYTES[problem.result_dtype] * results
        again = sum(self.pairs.size_bytes) / 2 if self.pairs else 0.0  # low parts
        boxes = tile.blocks * (tile.pixels // tile.box if tile.swapped else tile.channels // 64)
        told, share = cluster_cycles(tile.cluster, rows * columns, boxes)
        stored = result_cycles(rows * columns * self.out / 2 * share, tile.swapped, self.apart, reads)
        steps = self._turn_steps(slots)
        if tile.teams > 1:
            stored = team_cycles(stored, steps * max(products, brought), ceil(self.tiles / slots))
        return Estimate(
            tiles=self.tiles, slots=slots, residents=tile.residents, steps=steps, products=products,
            brought=brought, waits=wait_cycles(tile.stages / self.places, products + brought),
            results=told + stored,
            bytes=moved_bytes(problem) + self.parted * sums + again, added=self.parted * (sums + added),
            rounds=boxes * share / tile.buffers if reads and not self.apart else 0.0,
        )  # fmt: skip

    def _turn_steps(self, slots: int) -> float:
        """Of the block that has the most: one in each turn, of the first tile's phase."""
        slots, each = min(slots, self.tiles), self.tiles // len(self.phases)
        firsts = (
            (ceil((at + 1) * each / slots) - ceil(at * each / slots)) * phase.terms
            for at, phase in enumerate(self.phases)
        )
        return sum(firsts) * self.chunks / (self.tile.splits * self.tile.cluster) / ceil(self.tiles / slots)

    # -- for the kernel ---------------------------------------------------------------------------------------------

    @cached_property
    def turned(self) -> Turn | None:  # type: ignore[override]
        """The filter with its depth last, where products cannot take it across."""
        problem = self.problem
        if self.order != 2:
            return None
        taps = prod(problem.filter)
        return Turn("w", problem.groups, self.depth_channels, taps * self.out_channels, self.size)

    @property
    def constants(self) -> dict[str, int | bool | str]:
        tile = self.tile
        return {
            **super().constants, "rank": 0 if self.flat else self.problem.rank, "swapped": tile.swapped,
            "pixels": tile.pixels, "stages": tile.stages, "buffers": tile.buffers, "box": tile.box,
            "filters": self.order, "phases": len(self.phases), "paired": self.pairs is not None,
            "promoted": self.promoted,
            "barren": not all(phase.terms for phase in self.phases),
        }  # fmt: skip

    @property
    def source(self) -> jit.Source:
        tile = self.tile
        first, second = (self.second, self.first) if tile.swapped else (self.first, self.second)
        across = self.order == 1
        text = group_product.product(
            tile.columns, first, second, turned_first=across and tile.swapped,
            turned_second=across and not tile.swapped, registers=self.pairs is not None and not tile.swapped,
        )  # fmt: skip
        return jit.Source("igemm_sm90.cu", text + fusion.traits(stored(self.problem), self.constants))

    @property
    def params(self) -> bytes:
        problem, tile = self.problem, self.tile
        step, way, along = steps(problem)
        _, height, width = (1, 1, 1, *problem.filter)[-3:]
        taps = (height * width, width, 1)
        out_step = (1, 1, 1) if self.fprop else (*(1,) * (3 - problem.rank), *problem.stride)
        narrow = [self.tiles, *divisor(self.channel_tiles), *divisor(self.pixel_tiles), *divisor(problem.groups)]
        narrow += [tile.splits, self.chunks, self.depth_channels, self.out_channels, *step, *way]
        narrow += [by * each for by, each in zip(along, taps, strict=True)]
        narrow += [*out_step, *(1,) * (3 - problem.rank), *self.results]
        if self.places > 1:
            narrow.append(self.pixels if self.flat else problem.n)
        for phase in self.phases:
            first = sum(at * each for at, each in zip(phase.first, taps, strict=True))
            narrow += [problem.n * prod(phase.count), first, *phase.taps, *phase.corner, *phase.start]
            narrow += [number for count in phase.count for number in divisor(count)]
        return pack(4 + self.pointers, (), narrow)

    @property
    def maps(self) -> tuple[TensorMap | WindowMap, ...]:
        problem, tile, filters = self.problem, self.tile, self.filters
        n, groups = self.out_channels, problem.groups
        last, operands = 3 + self.pointers, len(problem.epilogue.operands)

        def result(pointer: int, bytes_: int) -> TensorMap:
            whole = n * groups * bytes_
            return TensorMap(pointer, (n, groups, self.pixels, tile.splits), (n * bytes_, whole, whole * self.pixels),
                             (128 // bytes_, 1, tile.box, 1), 128, bytes_)  # fmt: skip

        # In the place of a map that nothing is read or stored by, one whose address seldom changes.
        to = filters if self.apart else result(last if self.parted else 2, self.out)
        pointers = [] if self.apart else [*self.tensors, *range(operands, operands + self.also)]
        more = [result(3 + at, self.out) for at in pointers]
        spare = [filters] * (max(1, len(self.tensors) + self.also) - len(more))
        return (filters, to, *more, *spare, *self.windows)

    @property
    def windows(self) -> tuple[TensorMap | WindowMap, ...]:
        """A map for each phase."""
        problem, size = self.problem, self.size
        rank, channels = problem.rank, self.depth_channels * problem.groups
        if self.flat:
            line, pixels, box = channels * size, self.pixels * self.places, (self.depth, self.tile.pixels, 1)
            return (TensorMap(0, (channels, pixels, 1), (line, line * pixels), box, 128, size, self.rounds),)
        images = problem.n * self.places
        axes = self.images[::-1]
        strides, whole = [], channels * size
        for each in axes:
            strides.append(whole)
            whole *= each
        step = steps(problem)[0][::-1][:rank]
        made = []
        for phase in self.phases:
            # A phase that no tap meets has no windows; its map is never used.
            corner, count = phase.corner[::-1][:rank], phase.count[::-1][:rank]
            lower = corner if phase.terms else (0,) * rank
            reach = count if phase.terms else axes
            upper = tuple(
                at + (of - 1) * by - axis + 1 for at, of, by, axis in zip(lower, reach, step, axes, strict=True)
            )
            made.append(WindowMap(0, (channels, *axes, images), (*strides, whole), (self.depth, self.tile.pixels),
                                  tuple(lower), upper, step, 128, size, self.rounds))  # fmt: skip
        return tuple(made)


work = lru_cache(maxsize=4096)(Work)


# -- the search space -----------------------------------------------------------------------------------------------

# Pixels and channels of a tile, groups and blocks, whether swapped, residents.
_ROWS = (
    (128, 256, 2, 1), (128, 192, 2, 1), (128, 128, 2, 1), (256, 128, 2, 2), (192, 128, 3, 1), (128, 64, 2, 1),
    (256, 64, 2, 2), (64, 256, 1, 1), (64, 128, 1, 1), (64, 64, 1, 1), (192, 64, 3, 1),
)  # fmt: skip
_SWAPPED_CHANNELS = ((128, 2, 1), (64, 1, 1), (256, 2, 2), (192, 3, 1))
# The same of two teams.
_TEAM_ROWS = ((128, 128, 2, 2), (64, 256, 2, 1), (64, 192, 2, 1), (128, 192, 2, 2), (128, 64, 2, 2), (64, 128, 2, 1))
_TEAM_CHANNELS = ((128, 2, 2), (64, 2, 1))


def tiles(problem: Problem, device: CudaDevice) -> Iterator[Windows]:
    """What fits, each with as many stages as there is room for."""
    found = [Windows(p, c, g, b, 0, 2) for p, c, g, b in (*_ROWS, *_TEAM_ROWS)]
    most = 8 * ceil(problem.n * prod(phases(problem)[0].count) / 8)
    for channels, groups, blocks in (*_SWAPPED_CHANNELS, *_TEAM_CHANNELS):
        teams = 64 * groups * blocks // channels
        # Sums of a thread, twice. Two teams have registers for more, and small tiles no use of it.
        least, widest = (32, 256) if teams == 1 else (8192 // channels, 384)
        sizes = {size for size in range(least, 257, 16) if size * blocks <= widest and size <= max(32, most + 15)}
        found += [Windows(size, channels, groups, blocks, 0, 2, True) for size in sorted(sizes)]
    out_channels = problem.result_channels // problem.groups
    widest = 64 * ceil(out_channels / 64)
    for tile in found:
        if tile.channels > max(64, widest):
            continue
        for residents in (1, 2):
            tensors = sum(operand.kind == "tensor" for operand in problem.epilogue.operands)
            for buffers in (2, 4) if tensors else (2,):
                yield from _staged(problem, device, replace(tile, residents=residents, buffers=buffers))


def _staged(problem: Problem, device: CudaDevice, tile: Windows) -> Iterator[Windows]:
    bare = Work(problem, replace(tile, stages=2))
    if not bare.fits:
        return
    stages = min(_MOST_STAGES, 2 + bare.room // (bare.stage_bytes + 16))
    if stages < min(3, bare.steps):
        return
    whole = replace(tile, stages=stages)
    if tile.teams > 1:
        if bare.tiles > device.threads * tile.residents and not (bare.apart or bare.promoted):
            yield whole
        return
    yield whole
    if problem.stats:
        return
    for blocks in CLUSTERS:
        shared = replace(whole, cluster=blocks)
        if tile.residents == 1 and bare.tiles * blocks <= device.threads and Work(problem, shared).fits:
            yield shared
    if bare.apart or problem.epilogue.also:
        return
    slots = device.threads * tile.residents
    splits = {min(waves * slots // bare.each, bare.steps // 4, _MOST_SPLITS) for waves in (1, 2)}
    for count in sorted(splits):
        if count > 1 and 4 * count * prod(problem.result_shape) <= _MOST_WORKSPACE:
            parted = replace(whole, splits=count)
            while not Work(problem, parted).fits and parted.stages > 2:
                parted = replace(parted, stages=parted.stages - 1)
            if Work(problem, parted).fits:
                yield parted
