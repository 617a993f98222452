"""cuda.pixels: 1x1 convolutions as a stream of pixels past filters that stay, with all that is fused on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import Problem
from . import fusion, jit, wgmma
from .device import CudaDevice
from .launch import Launch, TensorMap, aligned, pack, single

__all__ = ["PixelTile", "Pixels"]

_SHARED = 227 << 10  # bytes of a multiprocessor's blocks together
_STATIC = 2 << 10  # of each: barriers, what the driver takes, and alignment
_MOST_STAGES = 16
_ALTERNATIVES = 8
_CLOCK = 1.65e9
_ROWS = 64  # pixels of a tile


@dataclass(frozen=True)
class PixelTile(Knobs):
    """Each of a block's ``groups`` of four warps computes ``columns`` results of 64 pixels at a time. ``stages`` boxes
    of the input, of ``span`` times 64 channels, and ``buffers`` boxes of results have a place in shared memory, for
    each group."""

    columns: int
    groups: int
    stages: int
    span: int
    buffers: int


class Pixels(Engine):
    """1x1 convolutions whose limit is memory, on the tensor cores of sm_90: every byte moves once.

        fprop   y[pixel, k]  = sum over c of  x[pixel, c] * w[k, c]
        dgrad   dx[pixel, c] = sum over k of  dy[pixel, k] * w[k, c]

    A block keeps its filters in shared memory and takes one tile of pixels after the other, so that boxes of the next
    ones and of the last results move while it multiplies. A prologue, an epilogue with one tensor and statistics are
    computed in shared memory on the way.

    Wins where channels are few: 64 to 256 in ResNet-50's first layers. Loses where filters do not fit, and where
    operations are the limit.
    """

    name = "cuda.pixels"
    device = "cuda"
    takes_epilogue = True
    takes_fusion = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if not isinstance(device, CudaDevice) or device.capability != 90:
            yield f"the device is {getattr(device, 'arch', device.name)}; its products are those of sm_90"
        if problem.direction == "wgrad":
            yield "the pass is wgrad; wanted fprop or dgrad"
        if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in ("f16", "bf16"):
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted f16 or bf16 for all tensors"
        if problem.groups != 1:
            yield f"groups is {problem.groups}; wanted 1"
        if set(problem.filter) != {1}:
            yield f"filter is {problem.filter}; wanted 1 along all axes"
        if set(problem.stride) != {1} and (problem.rank, problem.direction) != (2, "fprop"):
            yield f"stride is {problem.stride}; wanted 1, except in an fprop of two axes"
            return
        if any(low or high for low, high in problem.padding):
            yield f"padding is {problem.padding}; wanted none"
        if problem.rank == 1 or {problem.layouts[0], problem.layouts[2]} != {"nhwc"}:
            yield f"layouts are {'*'.join(problem.layouts)} of rank {problem.rank}; wanted images in nhwc"
        if problem.epilogue.also:
            yield f"'{problem.epilogue}' has other results; wanted one"
        if sum(operand.kind == "tensor" for operand in problem.epilogue.operands) > 1:
            yield f"'{problem.epilogue}' reads several tensors; wanted one at most"
        if problem.is_empty:
            yield "a tensor is empty"
            return
        depth, channels = _depth(problem), problem.result_channels
        if depth % 64:
            yield f"the input has {depth} channels; wanted a multiple of 64"
        if channels % 8:
            yield f"the result has {channels} channels; wanted a multiple of 8"
        if prod(_Tiling.of(problem).images) >= 2**31 - 2**16:
            yield "the pixels are too many for an int"
        elif depth % 64 == 0 and next(_tiles(problem), None) is None:
            yield f"64 filters of {depth} channels and tiles of them do not fit the multiprocessor's memory"

    def traits(self, problem: Problem, knobs: PixelTile) -> Traits:
        return wgmma.traits(problem)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: PixelTile) -> int:
        return 8 * problem.k * _workers(problem, device, knobs) if problem.stats else 0

    def knobs(self, problem: Problem, device: Device) -> tuple[PixelTile, ...]:
        found = sorted(_tiles(problem), key=lambda tile: self.cost(problem, device, tile))
        return tuple(found[:_ALTERNATIVES])

    def cost(self, problem: Problem, device: Device, knobs: PixelTile) -> float:
        # Fitted to 434 times of 9 layers on an H200; the tile that it prefers is 1% behind the best on average. The
        # bytes, or the cycles of a group's tiles one behind the other: waiting, products, prologue, and each box of
        # results; what has not been asked for early enough; the prologues and products of all groups.
        assert isinstance(device, CudaDevice)
        tiling, chunks, boxes = _Tiling.of(problem), _depth(problem) // 64, knobs.columns // 64
        columns, groups = ceil(problem.result_channels / knobs.columns), knobs.groups
        pixels, held, changed = prod(tiling.images), _held(problem) >= 0, not problem.prologue.is_identity
        moved = 128 * chunks * (pixels + problem.result_channels) + 2 * pixels * (1 + held) * problem.result_channels
        memory = (moved / 1.05 + 128 * chunks * pixels * (columns - 1) / 16) / device.bandwidth
        products = 2 * chunks * knobs.columns
        alone = 430 + 150 * chunks / knobs.span + 0.62 * products + 660 * boxes + 270 * chunks * changed
        alone += 210 * max(0, 2 * chunks - knobs.stages * knobs.span) + 1270 * held * boxes / (knobs.buffers - 1)
        rounds = ceil(tiling.tiles / (groups * _workers(problem, device, knobs)))
        busy = rounds * max(alone, groups * max(products, 414 * chunks * changed)) / _CLOCK
        fixed = 6.4e-6 + 4e-6 * problem.stats + 0.8e-6 * (groups > 4)
        return fixed + max(memory, busy) + 0.19 * min(memory, busy)

    def build(self, problem: Problem, device: Device, knobs: PixelTile) -> Runner:
        assert isinstance(device, CudaDevice)
        depth, channels, tiling = _depth(problem), problem.result_channels, _Tiling.of(problem)
        main, *others = self.sources(problem, device, knobs)
        before, operands = len(problem.prologue.operands), problem.epilogue.operands
        columns, workers = ceil(channels / knobs.columns), _workers(problem, device, knobs)
        width, height, _ = tiling.images
        sizes = (channels, columns, width, height, tiling.tiles, tiling.along, tiling.down)
        params = pack(4 + max(1, before + len(operands)), (), sizes)
        held = _held(problem)
        chunks, box = depth // 64, (64, tiling.across, tiling.lines, 1)
        dense = (2 * channels, 2 * channels * width, 2 * channels * width * height)

        def results_of(pointer: int) -> TensorMap:
            return TensorMap(pointer, (channels, *tiling.images), dense, box, 128)

        inputs = TensorMap(0, (64, *tiling.images, chunks), (*tiling.steps, 128), (*box, knobs.span), 128)
        filters = TensorMap(1, (64, channels, chunks), (2 * depth, 128), (64, knobs.columns, chunks), 128)
        if problem.direction == "dgrad":  # they lie across
            rows = 64 * next(count for count in (4, 3, 2, 1) if chunks % count == 0)
            filters = TensorMap(1, (channels, depth), (2 * channels,), (64, rows), 128)
        maps = (inputs, filters, results_of(2), results_of(2 if held < 0 else 3 + before + held))
        first = Launch(main, "pixels", device, (columns * workers,), (128 * knobs.groups,), params,
                       _shared(problem, knobs), maps=maps)  # fmt: skip
        if not problem.stats:
            return single(first, 16)
        grid = (ceil(2 * channels / 32),)
        second = Launch(others[0], "igemm_stats", device, grid, (1024,), pack(3, (), (workers, channels)), follows=True)
        spare = (0,) * max(0, 1 - before - len(operands))

        def run(
            a: Tensor, b: Tensor, out: Tensor, workspace: Tensor, operands: tuple[Tensor, ...],
            more: tuple[Tensor, ...] = (),
        ) -> None:  # fmt: skip
            a, b, result, *held = [aligned(each, 16) for each in (a, b, out, *operands)]
            base = workspace.data_ptr()
            first(a.data_ptr(), b.data_ptr(), result.data_ptr(), *[each.data_ptr() for each in held], *spare, base)
            second(base, *[each.data_ptr() for each in more])
            if result is not out:
                out.copy_(result)

        return run

    def sources(self, problem: Problem, device: Device, knobs: PixelTile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        tiling = _Tiling.of(problem)
        constants: dict[str, int | bool | str] = {
            "depth": _depth(problem), "columns": knobs.columns, "groups": knobs.groups, "stages": knobs.stages,
            "span": knobs.span, "buffers": knobs.buffers, "forward": problem.direction == "fprop",
            "held": _held(problem), "across": tiling.across, "lines": tiling.lines, "dense": tiling.dense,
            "channels": sum(1 << at for at, o in enumerate(problem.epilogue.operands) if o.kind == "channel"),
        }  # fmt: skip
        made = [jit.Source("pixels.cu", _product(problem, knobs) + fusion.traits(problem, constants))]
        return [*made, jit.Source("igemm_stats.cu")] if problem.stats else made


def _depth(problem: Problem) -> int:
    """Channels of the input."""
    return problem.c if problem.direction == "fprop" else problem.k


@dataclass(frozen=True)
class _Tiling:
    """Which pixels are a tile: ``lines`` of ``across`` of them, of ``images`` given as width, height and number. From
    one pixel, line and image of the input to the next that is read there are ``steps`` bytes. A ``dense`` input is one
    long line."""

    images: tuple[int, int, int]
    steps: tuple[int, int, int]
    across: int
    lines: int
    dense: bool

    @classmethod
    @lru_cache(256)
    def of(cls, problem: Problem) -> _Tiling:
        each = 2 * _depth(problem)
        if set(problem.stride) == {1}:
            pixels = problem.n * prod(problem.spatial)
            return cls((pixels, 1, 1), (each, each, each), _ROWS, 1, True)
        (height, width), (p, q) = problem.spatial, problem.out
        down, right = problem.stride
        boxes = [(across, lines) for across in range(1, _ROWS + 1) for lines in range(1, _ROWS // across + 1)
                 if across * lines % 8 == 0]  # fmt: skip
        across, lines = min(boxes, key=lambda box: (ceil(q / box[0]) * ceil(p / box[1]), box[0] * box[1]))
        steps = (right * each, down * width * each, height * width * each)
        return cls((q, p, problem.n), steps, across, lines, False)

    @property
    def along(self) -> int:
        """Tiles side by side in an image."""
        return ceil(self.images[0] / self.across)

    @property
    def down(self) -> int:
        return ceil(self.images[1] / self.lines)

    @property
    def tiles(self) -> int:
        return self.along * self.down * self.images[2]


def _product(problem: Problem, tile: PixelTile) -> str:
    """The product as C++. The filters of dgrad lie across, which the last number of the instruction says."""
    text = wgmma.product(tile.columns, problem.dtypes[0], registers=not problem.prologue.is_identity)
    if problem.direction == "fprop":
        return text
    return text.replace("0; }", "1; }").replace("emulated_group_product", "emulated_turned_product")


def _held(problem: Problem) -> int:
    """Which operand of the epilogue is a tensor; -1 if none is."""
    return next((at for at, operand in enumerate(problem.epilogue.operands) if operand.kind == "tensor"), -1)


def _workers(problem: Problem, device: Device, tile: PixelTile) -> int:
    """Blocks that share the pixels of one tile of columns."""
    columns = ceil(problem.result_channels / tile.columns)
    return max(1, min(ceil(_Tiling.of(problem).tiles / tile.groups), device.threads // columns))


def _shared(problem: Problem, tile: PixelTile) -> int:
    """Filters, inputs, results and vectors, from a multiple of 1024 bytes on."""
    depth = _depth(problem)
    vectors = 2 * tile.columns * len(problem.epilogue.operands) + 4 * depth * len(problem.prologue.operands)
    places = tile.stages * tile.span + tile.buffers
    return 1024 + 2 * tile.columns * depth + 128 * _ROWS * tile.groups * places + vectors


def _registers(problem: Problem, columns: int) -> int:
    """Of a thread, about: its sums, its part of the statistics, two boxes of a prologue, a tensor, places."""
    sums, before = columns // 2 * (1 + problem.stats), 16 * min(2, _depth(problem) // 64)
    return sums + before * (not problem.prologue.is_identity) + columns // 4 * (_held(problem) >= 0) + 36


def _tiles(problem: Problem) -> Iterator[PixelTile]:
    """What fits: as many stages as there is room for, those of a tile at the least."""
    chunks, most = _depth(problem) // 64, ceil(problem.result_channels / 64) * 64
    held = _held(problem) >= 0
    for columns, groups in product((64, 128, 192, 256), (1,) if chunks > 4 else (2, 3, 4, 5)):
        # Each of the multiprocessor's four parts has 512 registers for the threads of a lane.
        if columns > most or _registers(problem, columns) > min(255, 512 // groups):
            continue
        for span, buffers in product((4, 2, 1), (3, 4, 6) if held else (2, 3)):
            tile = PixelTile(columns, groups, 0, span, buffers)
            room = _SHARED - _STATIC - _shared(problem, tile)
            stages = min(_MOST_STAGES, room // (128 * _ROWS * span * groups), 4 * chunks // span)
            if chunks % span == 0 and stages > chunks // span:
                yield replace(tile, stages=stages)
