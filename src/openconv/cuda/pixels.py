"""cuda.pixels: 1x1 convolutions as a stream of pixels past filters that stay, with all that is fused on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
_MOST_STAGES = 8
_ALTERNATIVES = 8
_CLOCK = 1.6e9


@dataclass(frozen=True)
class PixelTile(Knobs):
    """A block computes ``columns`` results of 64 pixels at a time, or of 128 with two ``row_groups``. ``stages`` tiles
    of the input and ``buffers`` of the result have a place in shared memory; ``residents`` blocks share a
    multiprocessor."""

    columns: int
    row_groups: int
    stages: int
    buffers: int
    residents: int

    @property
    def rows(self) -> int:
        return 64 * self.row_groups


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
        for name, values in (("filter", problem.filter), ("stride", problem.stride)):
            if set(values) != {1}:
                yield f"{name} is {values}; wanted 1 along all axes"
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
        if _pixels(problem) >= 2**31 - 2**16:
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
        # Fitted to 250 times of 8 layers on an H200. The bytes at the speed of a copy, or the instructions of a tile:
        # the epilogue of two results, the prologue of eight values, statistics; alone on its multiprocessor, a block
        # waits for most of them.
        assert isinstance(device, CudaDevice)
        depth, columns = _depth(problem), ceil(problem.result_channels / knobs.columns)
        again = 2 * _pixels(problem) * depth * (columns - 1)
        moved = problem.min_bytes / (0.93 * device.bandwidth) + again / (6 * device.bandwidth)
        pairs = knobs.rows * knobs.columns / 512
        each = pairs * (8 + 3 * len(problem.epilogue.operands) + problem.epilogue.flops + 9 * problem.stats)
        if not problem.prologue.is_identity:
            each += knobs.rows * depth / 2048 * 25 + 60
        products = knobs.rows * knobs.columns * depth * 2.0 / (device.half_flops / device.threads)
        tile = (5.2 * each + 400) / _CLOCK + products
        if knobs.residents == 2:
            tile = (6 * each + 500) / _CLOCK + 2 * products
        elif knobs.stages == 2:  # the next tile has not come when this one is done
            tile += 2 * knobs.rows * depth / 45e9
        busy = ceil(ceil(_pixels(problem) / knobs.rows) / _workers(problem, device, knobs)) * tile
        if _held(problem) >= 0 and knobs.buffers == 2:  # a tensor comes only when results have left
            moved *= 1.1 if knobs.residents == 2 else 1.3
        return 4.2e-6 + max(moved, busy) + 0.1 * min(moved, busy) + 2e-6 * problem.stats

    def build(self, problem: Problem, device: Device, knobs: PixelTile) -> Runner:
        assert isinstance(device, CudaDevice)
        depth, channels, pixels = _depth(problem), problem.result_channels, _pixels(problem)
        main, *others = self.sources(problem, device, knobs)
        before, operands = len(problem.prologue.operands), problem.epilogue.operands
        columns, workers = ceil(channels / knobs.columns), _workers(problem, device, knobs)
        params = pack(4 + max(1, before + len(operands)), (), (channels, pixels, ceil(pixels / knobs.rows), columns))
        box, held = (64, knobs.rows), _held(problem)

        def rows_of(pointer: int, each: int) -> TensorMap:
            return TensorMap(pointer, (each, pixels), (2 * each,), box, 128)

        maps = (rows_of(0, depth), rows_of(2, channels), rows_of(2 if held < 0 else 3 + before + held, channels))
        first = Launch(main, "pixels", device, (columns * workers,), (288,), params, _shared(problem, knobs), maps=maps)
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
        constants: dict[str, int | bool | str] = {
            "depth": _depth(problem), "columns": knobs.columns, "row_groups": knobs.row_groups, "stages": knobs.stages,
            "buffers": knobs.buffers, "residents": knobs.residents, "forward": problem.direction == "fprop",
            "held": _held(problem),
            "channels": sum(1 << at for at, o in enumerate(problem.epilogue.operands) if o.kind == "channel"),
        }  # fmt: skip
        width = knobs.columns * knobs.row_groups // 2
        text = wgmma.product(width, problem.dtypes[0]) + fusion.traits(problem, constants)
        made = [jit.Source("pixels.cu", text)]
        return [*made, jit.Source("igemm_stats.cu")] if problem.stats else made


def _depth(problem: Problem) -> int:
    """Channels of the input."""
    return problem.c if problem.direction == "fprop" else problem.k


def _pixels(problem: Problem) -> int:
    return problem.n * prod(problem.spatial)


def _held(problem: Problem) -> int:
    """Which operand of the epilogue is a tensor; -1 if none is."""
    return next((at for at, operand in enumerate(problem.epilogue.operands) if operand.kind == "tensor"), -1)


def _workers(problem: Problem, device: Device, tile: PixelTile) -> int:
    """Blocks that share the pixels of one tile of columns."""
    columns = ceil(problem.result_channels / tile.columns)
    return max(1, min(ceil(_pixels(problem) / tile.rows), tile.residents * device.threads // columns))


def _shared(problem: Problem, tile: PixelTile) -> int:
    """Filters, inputs, results and vectors, from a multiple of 1024 bytes on."""
    depth = _depth(problem)
    vectors = 2 * tile.columns * len(problem.epilogue.operands)
    places = tile.stages * tile.rows * depth + tile.buffers * tile.rows * tile.columns
    return 1024 + 2 * tile.columns * depth + 2 * places + vectors


def _tiles(problem: Problem) -> Iterator[PixelTile]:
    """What fits: filters up to half of the memory, as many stages as there is room for."""
    most = ceil(problem.result_channels / 64) * 64
    buffers_of = (4, 3, 2) if _held(problem) >= 0 else (2, 3)
    for columns in (256, 192, 128, 64):
        for row_groups in (1, 2):
            width = columns * row_groups // 2
            if columns > most or width > 128:  # sums of a thread: 64 registers
                continue
            for residents in (1, 2):
                if residents == 2 and width > 64:
                    continue
                for buffers in buffers_of:
                    for stages in range(_MOST_STAGES, 1, -1):
                        tile = PixelTile(columns, row_groups, stages, buffers, residents)
                        if residents * (_shared(problem, tile) + _STATIC) <= _SHARED:
                            yield tile
                            break
