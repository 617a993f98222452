"""cuda.patch_rows: patch embedding as products of Hopper's warpgroups, on rows of the image as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import Problem
from . import jit, render, wgmma
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, TensorMap, pack, single

__all__ = ["PatchRows", "RowTile"]

_DEPTH = 64  # elements of a step at most
_SHARED = 226 << 10  # bytes of a block, with 1 KB for alignment
_FILTERS = {64: 256, 128: 256, 192: 192, 256: 112}  # by windows: the most whose sums a thread has registers for
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1))
_ALTERNATIVES = 8


@dataclass(frozen=True)
class RowTile(Knobs):
    """``windows`` and ``filters`` of the product that a block computes; ``stages``: steps that shared memory holds;
    ``filter_blocks`` x ``window_blocks``: the blocks of a cluster, which share copies."""

    windows: int
    filters: int
    stages: int
    filter_blocks: int
    window_blocks: int


class PatchRows(Engine):
    """Patches as rows of one matrix product on the tensor cores of sm_90, read out of whole rows of the image.

        y[pixel, k] = sum over d of  x[start(pixel) + offset(d)] * w[k, d]

    What a window has of an image's row is a few bytes, 32 for a ViT-B/16, and neither threads nor the tensor memory
    accelerator copy such pieces as fast as tensor cores take them. Whole rows of an image are copied instead, and the
    threads that multiply take their windows out of them on the way into registers. The whole epilogue is computed on
    the sums.

    Wins on patch embedding, 2D and 3D, whose filters have rows of 16, 32, 48 or 64 elements. Other unpadded filters are
    left to cuda.patches.
    """

    name = "cuda.patch_rows"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from wgmma.refusals(problem, device)
        if len(set(problem.layouts)) > 1:
            yield f"layouts are {'*'.join(problem.layouts)}; wanted one for all tensors"
        if problem.is_empty:
            return
        shape = _Shape(problem)
        if shape.run % 16 or shape.run > _DEPTH:
            yield f"a row of a window has {shape.run} elements; wanted 16, 32, 48 or 64"
        elif shape.taps[1] % shape.depth_rows:
            yield f"a window has {shape.taps[1]} rows; wanted a multiple of {shape.depth_rows}"
        for what, value in (("a row of the image", shape.line), ("the way from one window to the next", shape.step)):
            if value % 8:
                yield f"{what} has {value} elements; wanted a multiple of 8"
        if max(shape.image, shape.pixels, prod(problem.w_shape)) >= 2**31 - 2**16:
            yield "the image, the filters or the pixels are too many for an int"
        elif next(_tiles(problem), None) is None:
            yield f"{shape.out[2]} windows in a row of {shape.line} elements do not fit the multiprocessor's memory"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        return wgmma.traits(problem)

    def knobs(self, problem: Problem, device: Device) -> tuple[RowTile, ...]:
        found = sorted(_tiles(problem), key=lambda tile: self.cost(problem, device, tile))
        return tuple(found[:_ALTERNATIVES])

    def cost(self, problem: Problem, device: Device, knobs: RowTile) -> float:
        # A step is as long as its products, as its bytes from the second-level cache, or as the copies that rows come
        # in, which are many where an image has few patches. Blocks of a multiprocessor take turns, each of which waits
        # for its first rows and stores its last results.
        assert isinstance(device, CudaDevice)
        shape = _Shape(problem)
        depth = shape.run * shape.depth_rows
        products = 2.0 * knobs.windows * knobs.filters * depth / (1.15 * device.half_flops / device.threads)
        windows = shape.slots(knobs.windows) * shape.slot_bytes
        asked = 2 * _DEPTH * knobs.filters / knobs.window_blocks + windows / knobs.filter_blocks
        copies = shape.slots(knobs.windows) * shape.depth_rows / knobs.filter_blocks
        step = max(products, asked / 75e9, 6e-9 * copies)
        turns = ceil(shape.blocks(knobs) / device.threads)
        # Operands of an epilogue are read value by value: 0.1 ns a result and multiprocessor, 0.3 of a whole tensor.
        operands = sum(0.3e-9 if o.kind == "tensor" else 0.1e-9 for o in problem.epilogue.operands)
        results = operands * prod(problem.result_shape) / device.threads
        return results + 5.5e-6 + max(turns * (shape.steps * step + 4e-6), problem.min_bytes / (0.8 * device.bandwidth))

    def build(self, problem: Problem, device: Device, knobs: RowTile) -> Runner:
        assert isinstance(device, CudaDevice)
        shape = _Shape(problem)
        [source] = self.sources(problem, device, knobs)
        narrow = (
            *(shape.pixels, problem.k, shape.steps, *shape.size, *shape.steps_between),
            *(*divisor(shape.out[2]), *divisor(shape.out[1]), *divisor(shape.out[0]), *divisor(prod(shape.out))),
            *divisor(shape.filter_tiles(knobs) // knobs.filter_blocks),
        )
        params = pack(3 + max(1, len(problem.epilogue.operands)), (shape.image,), narrow)
        box = (_DEPTH, knobs.filters // knobs.window_blocks)
        weights = TensorMap(1, (shape.depth, problem.k), (2 * shape.depth,), box, 128)
        grid, block, shared = (shape.blocks(knobs),), (2 * knobs.windows + 128,), _shared(shape, knobs)
        return single(Launch(source, "patch_rows", device, grid, block, params, shared, maps=(weights,)), 16)

    def sources(self, problem: Problem, device: Device, knobs: RowTile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        shape = _Shape(problem)
        constants: dict[str, int | bool | str] = {
            "windows": knobs.windows, "filters": knobs.filters, "stages": knobs.stages,
            "filter_blocks": knobs.filter_blocks, "window_blocks": knobs.window_blocks,
            "pixel_rows": shape.pixel_rows, "run": shape.run, "depth_rows": shape.depth_rows,
            "slots": shape.slots(knobs.windows), "line": 2 * shape.line, "step": 2 * shape.step,
            "taps_h": shape.taps[1], "taps_d": shape.taps[0],
            "together": gcd(8, problem.k if shape.pixel_rows else prod(shape.out)),
        }  # fmt: skip
        text = render.traits(problem, constants)
        return [jit.Source("patch_rows.cu", text + wgmma.product(knobs.filters, problem.dtypes[0], registers=True))]


class _Shape:
    """A problem as a product: elements of a run, of a row and of an image, rows that are copied in one step."""

    def __init__(self, problem: Problem) -> None:
        lead = (1,) * (3 - problem.rank)
        self.problem = problem
        self.pixel_rows = problem.layouts[0] == "nhwc"
        each = problem.c if self.pixel_rows else 1  # elements of a pixel that lie side by side
        depth, height, width = (*lead, *problem.spatial)
        taps_d, taps_h, taps_w = (*lead, *problem.filter)
        strides = (*lead, *problem.stride)
        self.image, self.depth = problem.c * depth * height * width, problem.c * prod(problem.filter)
        self.out, self.pixels = (*lead, *problem.out), problem.n * prod(problem.out)
        self.size, self.taps = (depth, height), (taps_d, taps_h)
        self.run, self.line, self.step = taps_w * each, width * each, strides[2] * each
        self.steps_between = strides[:2]
        self.depth_rows = max(1, _DEPTH // self.run)
        self.slot_bytes = 2 * self.depth_rows * self.line
        self.steps = self.depth // (self.run * self.depth_rows)

    def slots(self, windows: int) -> int:
        """Lines that hold so many windows, wherever the first one lies."""
        return 1 + ceil((windows - 1) / self.out[2])

    def filter_tiles(self, tile: RowTile) -> int:
        """Of whole clusters."""
        return ceil(self.problem.k / (tile.filters * tile.filter_blocks)) * tile.filter_blocks

    def blocks(self, tile: RowTile) -> int:
        """Of whole clusters."""
        return self.filter_tiles(tile) * ceil(self.pixels / (tile.windows * tile.window_blocks)) * tile.window_blocks


def _shared(shape: _Shape, tile: RowTile) -> int:
    """The ring, in whose place the results come in the end, from a multiple of 1024 bytes on."""
    stage = ceil((2 * _DEPTH * tile.filters + shape.slots(tile.windows) * shape.slot_bytes) / 1024) * 1024
    rows, columns = (tile.windows, tile.filters) if shape.pixel_rows else (tile.filters, tile.windows)
    return 1024 + max(tile.stages * stage, rows * (2 * columns + 16))


def _tiles(problem: Problem) -> Iterator[RowTile]:
    shape = _Shape(problem)
    for windows, most in _FILTERS.items():
        for filters in (32, *range(64, most + 1, 16)):
            if shape.pixel_rows and filters // gcd(8, problem.k) > 2 * windows:  # a thread stores one column or more
                continue
            for blocks in _CLUSTERS:
                for stages in (8, 7, 6, 5, 4, 3, 2):
                    tile = RowTile(windows, filters, stages, *blocks)
                    if filters % (8 * tile.window_blocks) == 0 and _shared(shape, tile) <= _SHARED:
                        yield tile
                        break
