"""cuda.igemm_sm90, the input of whole lines once for all taps: pixels and their halo as columns of the product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod

from ..problem import DTYPE_BYTES, Problem
from . import fusion, group_product, jit
from .device import CudaDevice
from .divide import divisor
from .igemm_sm90_model import (
    Estimate,
    bring_cycles,
    moved_bytes,
    product_cycles,
    result_cycles,
    short_rows,
    team_cycles,
    wait_cycles,
)
from .igemm_sm90_windows import phases, steps
from .igemm_sm90_work import ConvolutionWork, GroupKnobs, factors, stored
from .launch import TensorMap, pack
from .tf32_pairs import paired

__all__ = ["Halo", "Plane", "Work", "planes", "refusals", "tiles", "work"]

_MOST_COLUMNS = 256  # of a product, and of a box
_MOST_STAGES = 8
_MOST_STRIDE = 2
_MOST_TAPS = 49
_KINDS = ("f16", "bf16", "tf32", "i8")


@dataclass(frozen=True)
class Halo(GroupKnobs):
    """A tile is ``channels`` of ``lines`` whole lines. Each of ``groups`` of four warps multiplies ``blocks`` times 64
    channels, so that some of them share a tile, and the others are teams that take turns. ``tiles`` slots of the input
    are on their way, and ``stages`` of filters; 0: all of a tile's filters stay. A multiprocessor has ``residents``
    blocks."""

    lines: int
    channels: int
    groups: int
    blocks: int
    tiles: int
    stages: int
    residents: int = 1
    splits: int = 1
    cluster: int = 1
    """No tiles share a sum, nor do blocks."""

    @property
    def teams(self) -> int:
        return 64 * self.blocks * self.groups // self.channels


@dataclass(frozen=True)
class _Way:
    """The taps along an axis that fall on places of one remainder by the stride: ``size`` such places, ``out`` pixels,
    of which the first reads tap ``taps[i]`` at place ``offsets[i]``."""

    remainder: int
    size: int
    out: int
    taps: tuple[int, ...]
    offsets: tuple[int, ...]

    @cached_property
    def corner(self) -> int:
        return min(self.offsets)

    @cached_property
    def span(self) -> int:
        """From the first tap to the last."""
        return max(self.offsets) - self.corner

    @cached_property
    def pitch(self) -> int:
        """The least from line to line. Pixels read ``reach`` of a line; what of it lies behind the pitch is taken from
        the beginning of the next one. That is right if both are padding: the image has ended before, and the next line
        begins with as much. So a pitch of W + max(left, right) does where W + left + right are read."""
        reach, left = self.out + self.span, -self.corner
        return max(self.out, min(reach, max(self.size + left, reach - max(left, 0))))


@dataclass(frozen=True)
class Plane:
    """Lines and pixels of one remainder by the strides, and the taps that fall on them."""

    down: _Way
    right: _Way

    @cached_property
    def taps(self) -> tuple[tuple[int, int, int, int], ...]:
        """Each tap's place in the filter, and how many lines and pixels of the plane it is behind the corner."""
        return tuple(
            (r, s, line - self.down.corner, pixel - self.right.corner)
            for r, line in zip(self.down.taps, self.down.offsets, strict=True)
            for s, pixel in zip(self.right.taps, self.right.offsets, strict=True)
        )


@lru_cache(maxsize=512)
def planes(problem: Problem) -> tuple[Plane, ...]:
    """Of an fprop as many as its taps fall on, of a dgrad without strides one; those with the most taps first."""
    fprop = problem.direction == "fprop"
    phase, (step, way, along) = phases(problem)[0], steps(problem)
    sizes = (1, 1, *(problem.spatial if fprop else problem.out))
    axes = []
    for axis, size in zip((1, 2), sizes[-2:], strict=True):
        found: dict[int, list[tuple[int, int]]] = {}
        for i in range(phase.taps[axis]):
            offset, remainder = divmod(phase.corner[axis] + i * way[axis], step[axis])
            found.setdefault(remainder, []).append((phase.first[axis] + i * along[axis], offset))
        axes.append([
            _Way(remainder, ceil((size - remainder) / step[axis]), phase.count[axis], *zip(*met, strict=True))
            for remainder, met in found.items()
        ])  # fmt: skip
    made = [Plane(down, right) for down in axes[0] for right in axes[1]]
    return tuple(sorted(made, key=lambda plane: -len(plane.taps)))


def _pitch(problem: Problem) -> int:
    return max(plane.right.pitch for plane in planes(problem))


def refusals(problem: Problem) -> Iterator[str]:
    """What this kernel needs of a fprop or dgrad beyond what the engine does."""
    if problem.rank > 2:
        yield f"the images have {problem.rank} axes; wanted at most 2"
        return
    first, out_channels = factors(problem)[0], problem.result_channels // problem.groups
    if first not in _KINDS:
        yield f"products are of {first}; wanted {', '.join(_KINDS)}"
    if paired(problem):
        yield f"precision is {problem.precision}; wanted tf32: a slot has one part of a factor"
    if problem.direction == "dgrad" and DTYPE_BYTES[problem.dtypes[problem.inputs[0]]] != 2:
        yield f"the pass is dgrad of {first}; wanted f16 or bf16, whose products take filters across"
    if problem.epilogue.also:
        yield f"'{problem.epilogue}' has other results; wanted one"
    if not 1 < prod(problem.filter) <= _MOST_TAPS:
        yield f"filter is {problem.filter}; wanted 2 to {_MOST_TAPS} taps that share their input"
    most = _MOST_STRIDE if problem.direction == "fprop" else 1
    if max(problem.stride) > most:
        yield f"stride is {problem.stride}; wanted at most {most}"
        return
    if min(problem.spatial) < max(problem.stride):
        yield f"the image is {problem.spatial}; wanted at least the stride, {problem.stride}"
        return
    if problem.groups > 1 and out_channels % 64:  # a box must not reach into the next group
        yield f"a group has {out_channels} channels of results; wanted a multiple of 64"
    pitch = _pitch(problem)
    lines = 1 + max(plane.down.span for plane in planes(problem))
    if pitch > _MOST_COLUMNS or lines > _MOST_COLUMNS:
        yield f"a line is {pitch} pixels with its padding, and {lines} are read; wanted at most {_MOST_COLUMNS}"


class Work(ConvolutionWork):
    """A problem and knobs as the kernel takes them."""

    entry = "igemm_sm90_halo"

    def __init__(self, problem: Problem, tile: Halo) -> None:
        super().__init__(problem, tile)
        self.images = (1, *(problem.spatial if self.fprop else problem.out))[-2:]
        self.results = (1, *(problem.out if self.fprop else problem.spatial))[-2:]
        self.planes, self.pitch = planes(problem), _pitch(problem)
        self.taps, self.strided = prod(problem.filter), self.fprop and max(problem.stride) > 1
        self.bands = ceil(self.results[0] / tile.lines)
        self.pixel_tiles = problem.n * self.bands
        self.tiles = self.pixel_tiles * self.channel_tiles * problem.groups
        self.resident = tile.stages == 0
        self.stages = tile.stages or self.chunks * self.taps

    @cached_property
    def columns(self) -> int:
        """Of a product: all pixels of a tile, and those behind the ends of its lines."""
        by = 16 if self.total == "int" else 8
        return ceil(self.tile.lines * self.pitch / by) * by

    @cached_property
    def box_lines(self) -> int:
        """Of a plane, that a tile reads."""
        return self.tile.lines + max(plane.down.span for plane in self.planes)

    @cached_property
    def slot(self) -> int:
        """Rows of 128 bytes: the box, and what a tap's last columns read behind it. Whole patterns of the swizzle."""
        furthest = max(line * self.pitch + pixel for plane in self.planes for _, _, line, pixel in plane.taps)
        return ceil(max(self.box_lines * self.pitch, self.columns + furthest) / 8) * 8

    @property
    def shared(self) -> int:
        """Of a block, from a multiple of 1024 bytes on."""
        tile = self.tile
        box = ceil(self.columns / 16) * 16 * 64 * self.out * self.boxes
        rows = tile.tiles * self.slot + self.stages * tile.channels
        return 1024 + 128 * rows + tile.groups * tile.blocks * box

    @property
    def static(self) -> int:
        """Barriers."""
        return 8 * (2 * self.tile.tiles + 2 * self.stages + self.tile.groups + self.tile.teams)

    @property
    def registers(self) -> int:
        """Of a thread, about: sums, and what the epilogue and places take."""
        return self.tile.blocks * self.columns // 2 + 36 + 4 * len(self.tensors)

    @property
    def sums(self) -> int:
        return self.columns // 2

    @property
    def fits(self) -> bool:
        return self.columns <= _MOST_COLUMNS and super().fits

    @property
    def parts(self) -> int:
        """Of statistics: rows of sums in the workspace, one for each warp of a tile's lines."""
        return 4 * self.pixel_tiles

    def blocks(self, device: CudaDevice) -> int:
        """As many as run at a time, at most one for each tile. All tiles of channels have as many if filters stay."""
        slots, fixed = device.threads * self.tile.residents, self.channel_tiles * self.problem.groups
        if self.resident:
            return fixed * min(self.pixel_tiles, max(1, slots // fixed))
        return min(self.tiles, slots)

    def estimate(self, device: CudaDevice) -> Estimate:
        """Where the time goes, in cycles of a multiprocessor."""
        tile = self.tile
        slots = max(self.blocks(device), tile.residents) if self.resident else device.threads * tile.residents
        turns, reads = ceil(self.tiles / slots), len(self.tensors)
        together = self.taps / len(self.planes)  # steps of a slot
        inputs = 128 * self.box_lines * self.pitch / together
        filters = 128 * tile.channels / (turns if self.resident else 1)
        products = product_cycles(tile.channels, self.columns) * self.slices / 4
        brought = bring_cycles(
            (inputs, self.channel_tiles),
            (filters, self.pixel_tiles),
            min(self.tiles, slots) / device.threads,
            inputs / 128 * short_rows(self.depth_channels * self.size),
        )
        waits = wait_cycles(tile.tiles, products + brought, together)
        if not self.resident:
            waits = max(waits, wait_cycles(tile.stages, products))
        results = result_cycles(tile.channels * self.columns * self.out / 2, tensors=reads)
        if tile.teams > 1:  # beside another team's products, but for those of the last tile
            results = team_cycles(results, self.chunks * self.taps * max(products, brought), turns)
        return Estimate(
            tiles=self.tiles, slots=slots, residents=tile.residents, steps=self.chunks * self.taps, products=products,
            brought=brought, waits=waits, results=results, rounds=float(reads > 0), bytes=moved_bytes(self.problem),
        )  # fmt: skip

    # -- for the kernel ---------------------------------------------------------------------------------------------

    @property
    def constants(self) -> dict[str, int | bool | str]:
        tile = self.tile
        return {
            **super().constants, "lines": tile.lines, "pitch": self.pitch, "columns": self.columns,
            "box_lines": self.box_lines, "slot": self.slot, "tiles": tile.tiles, "stages": self.stages,
            "resident": self.resident, "across": self.order == 1, "taps": self.taps, "planes": len(self.planes),
            "strided": self.strided,
        }  # fmt: skip

    @property
    def source(self) -> jit.Source:
        text = group_product.product(
            self.columns, self.second, self.first, turned_first=self.problem.direction == "dgrad"
        )
        return jit.Source("igemm_sm90_halo.cu", text + fusion.traits(stored(self.problem), self.constants))

    @property
    def params(self) -> bytes:
        problem, (height, width) = self.problem, self.results
        right = (1, *problem.filter)[-1]
        narrow = [self.tiles, *divisor(self.channel_tiles), problem.groups]
        narrow += [self.chunks, self.depth_channels, self.out_channels]
        narrow += [width, height, *divisor(self.bands)]
        narrow += [plane.right.remainder * self.depth_channels * problem.groups for plane in self.planes]
        narrow += [plane.down.remainder for plane in self.planes]
        narrow += [plane.right.corner for plane in self.planes]
        narrow += [plane.down.corner for plane in self.planes]
        every = [tap for plane in self.planes for tap in plane.taps]
        narrow += [sum(len(plane.taps) for plane in self.planes[: at + 1]) for at in range(len(self.planes))]
        narrow += [r * right + s for r, s, _, _ in every]
        narrow += [128 * (line * self.pitch + pixel) for _, _, line, pixel in every]
        return pack(4 + max(1, len(problem.epilogue.operands)), (), narrow)

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        problem, tile, n, groups = self.problem, self.tile, self.out_channels, self.problem.groups

        def result(pointer: int) -> TensorMap:
            pixel, (height, width) = n * groups * self.out, self.results
            return TensorMap(pointer, (n * groups, width, height, problem.n),
                             (pixel, pixel * width, pixel * width * height),
                             (128 // self.out, self.pitch, tile.lines, 1), 128, self.out)  # fmt: skip

        # In the place of a map that nothing is read by, one whose address seldom changes.
        tensors = [result(3 + at) for at in self.tensors] or [self.filters]
        return (self.filters, result(2), *tensors, *(self._map(plane) for plane in self.planes))

    def _map(self, plane: Plane) -> TensorMap:
        """Behind a stride, pixels of all remainders are channels side by side, and those of lines an axis more. The
        plane's own is the last of them, so that it ends where its channels and lines do."""
        problem, (height, width) = self.problem, self.images
        channels = self.depth_channels * problem.groups
        line = channels * self.size * width
        sizes, box = (plane.right.size, plane.down.size, problem.n), (self.depth, self.pitch, self.box_lines, 1)
        if not self.strided:
            return TensorMap(
                0, (channels, *sizes), (line // width, line, height * line), box, 128, self.size, self.rounds
            )
        down, right = (1, *problem.stride)[-2:]
        return TensorMap(
            0, (channels * (1 + plane.right.remainder), sizes[0], 1 + plane.down.remainder, *sizes[1:]),
            (right * line // width, line, down * line, height * line), (*box[:2], 1, *box[2:]), 128, self.size,
            self.rounds,
        )  # fmt: skip


work = lru_cache(maxsize=4096)(Work)


# -- the search space -----------------------------------------------------------------------------------------------

# Channels of a tile, groups, and blocks of a group.
_SHAPES = (
    (64, 2, 1), (64, 1, 1), (128, 2, 1), (128, 2, 2), (128, 4, 1), (192, 3, 1), (192, 2, 3), (256, 2, 2), (256, 4, 1),
)  # fmt: skip


def tiles(problem: Problem, device: CudaDevice) -> Iterator[Halo]:
    """What fits, for each number of tiles that an image can be: with filters that stay, or with as many stages of them
    as there is room for."""
    if next(refusals(problem), None):
        return
    height = (1, *(problem.out if problem.direction == "fprop" else problem.spatial))[-2]
    most = min(height, _MOST_COLUMNS // _pitch(problem))
    widest = 64 * ceil(problem.result_channels // problem.groups / 64)
    for lines in sorted({ceil(height / ceil(height / lines)) for lines in range(1, most + 1)}):
        for channels, groups, blocks in _SHAPES:
            if channels > widest:
                continue
            for residents in (1, 2):
                yield from _staged(problem, Halo(lines, channels, groups, blocks, 2, 2, residents))


def _staged(problem: Problem, tile: Halo) -> Iterator[Halo]:
    bare = Work(problem, tile)
    if not bare.fits:
        return
    stays = replace(tile, stages=0)
    while Work(problem, stays).fits and stays.tiles < 4:
        stays = replace(stays, tiles=stays.tiles + 1)
    if stays.tiles > 2:
        yield replace(stays, tiles=stays.tiles - 1)
    elif Work(problem, stays).fits:
        yield stays
    steps_ = bare.chunks * bare.taps
    # The first that is as good as another is taken: four planes have some with one tap, sooner read than they come.
    for slots in (4, 5, 6, 3, 2) if len(bare.planes) > 1 else (2, 3):
        some = Work(problem, replace(tile, tiles=slots))
        stages = min(_MOST_STAGES, 2 + some.room // (128 * tile.channels + 16))
        if some.fits and stages >= min(3, steps_):
            yield replace(tile, tiles=slots, stages=stages)
