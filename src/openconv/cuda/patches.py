"""cuda.patches: convolutions without padding as products of Hopper's warpgroups, on windows where they lie."""

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
from .launch import Launch, pack, single

__all__ = ["Patches", "Tile"]

_DEPTH = 64  # elements of a step
_SHARED = 226 << 10  # bytes of a block, with 1 KB for alignment
_ALTERNATIVES = 8


@dataclass(frozen=True)
class Tile(Knobs):
    """``rows`` and ``columns`` of the product that a block computes; ``stages``: steps that shared memory holds."""

    rows: int
    columns: int
    stages: int


class Patches(Engine):
    """Windows without padding as rows of one matrix product, read where they lie, on the tensor cores of sm_90.

        y[pixel, k] = sum over d of  x[start(pixel) + offset(d)] * w[k, d]

    Sixteen bytes of a window are sixteen bytes of the image, which cp.async brings into shared memory in the order that
    wgmma wants: patch embedding becomes one kernel, where a library's product needs its patches gathered before it and,
    in nchw, its result put back behind it. The whole epilogue is computed on the sums.

    Wins on patch embedding, 2D and 3D. Takes every unpadded filter whose rows are whole pieces of 16 bytes: nhwc of a
    multiple of 8 channels above all.
    """

    name = "cuda.patches"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from wgmma.refusals(problem, device)
        orders = problem.layouts if problem.c > 1 and prod(problem.filter) > 1 else problem.layouts[::2]
        if len(set(orders)) > 1:
            yield f"layouts are {'*'.join(problem.layouts)}; wanted one for all tensors"
        if problem.is_empty:
            return
        shape = _Shape(problem)
        for what, value in (
            ("a row of a window", shape.run),
            ("a row of the image", shape.line),
            ("the way from one window to the next", shape.step[2] if problem.out[-1] > 1 else 0),
        ):
            if value % 8:
                yield f"{what} has {value} elements; wanted a multiple of 8"
        if max(shape.image, shape.pixels, prod(problem.w_shape)) >= 2**31 - 2**16:
            yield "the image, the filters or the pixels are too many for an int"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        return wgmma.traits(problem)

    def knobs(self, problem: Problem, device: Device) -> tuple[Tile, ...]:
        found = sorted(_tiles(problem), key=lambda tile: self.cost(problem, device, tile))
        return tuple(found[:_ALTERNATIVES])

    def cost(self, problem: Problem, device: Device, knobs: Tile) -> float:
        # Blocks of a multiprocessor take turns; each waits for its first data and for its last results, which takes
        # 8 us however little there is to multiply. A step is as long as its products or as its copies: twelve warps get
        # 40 bytes a nanosecond out of the second-level cache.
        assert isinstance(device, CudaDevice)
        shape = _Shape(problem)
        blocks = shape.blocks(knobs)
        each = 2.0 * knobs.rows * knobs.columns * _DEPTH / (0.85 * device.half_flops / device.threads)
        copies = 2 * _DEPTH * (knobs.rows + knobs.columns) / (40e9 * min(1.0, knobs.rows / 160))
        busy = ceil(blocks / device.threads) * max(ceil(problem.gemm.k / _DEPTH) * max(each, copies) + 2e-6, 8e-6)
        # Operands of an epilogue are read value by value: 0.1 ns a result and multiprocessor, 0.15 of a whole tensor.
        operands = sum(0.15e-9 if o.kind == "tensor" else 0.1e-9 for o in problem.epilogue.operands)
        results = operands * prod(problem.result_shape) / device.threads
        return 3e-6 + results + max(busy, problem.min_bytes / (0.8 * device.bandwidth))

    def build(self, problem: Problem, device: Device, knobs: Tile) -> Runner:
        assert isinstance(device, CudaDevice)
        shape = _Shape(problem)
        [source] = self.sources(problem, device, knobs)
        narrow = (
            *(shape.pixels, problem.k, shape.depth, *shape.size, shape.line, *shape.step),
            *(*divisor(shape.out[2]), *divisor(shape.out[1]), *divisor(prod(shape.out))),
            *divisor(shape.row_tiles(knobs)),
        )
        params = pack(3 + max(1, len(problem.epilogue.operands)), (shape.image,), narrow)
        grid, block = (shape.blocks(knobs),), (2 * knobs.rows,)
        return single(Launch(source, "patches", device, grid, block, params, _shared(knobs)), 16)

    def sources(self, problem: Problem, device: Device, knobs: Tile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        shape = _Shape(problem)
        constants: dict[str, int | bool | str] = {
            "rows": knobs.rows, "columns": knobs.columns, "stages": knobs.stages, "pixel_rows": shape.pixel_rows,
            "run": shape.run, "taps_h": shape.taps[1], "taps_d": shape.taps[0],
            "together": gcd(8, problem.k if shape.pixel_rows else prod(shape.out)),
        }  # fmt: skip
        text = render.traits(problem, constants) + wgmma.product(knobs.columns, problem.dtypes[0])
        return [jit.Source("patches.cu", text)]


class _Shape:
    """A problem as a product: elements of a run, of a row and of an image, and the ways between windows. A filter that
    is as large as the image has one run, the whole of it."""

    def __init__(self, problem: Problem) -> None:
        lead = (1,) * (3 - problem.rank)
        self.problem = problem
        last = problem.layouts[0] == "nhwc"
        self.pixel_rows = last or prod(problem.out) == 1  # the results of a pixel lie side by side
        self.image, self.depth = problem.c * prod(problem.spatial), problem.c * prod(problem.filter)
        self.out = (*lead, *problem.out)
        self.pixels = problem.n * prod(problem.out)
        if problem.filter == problem.spatial:
            self.run = self.line = self.depth
            self.taps, self.size, self.step = (1, 1), (1, 1), (0, 0, 0)
            return
        each = problem.c if last else 1  # elements of a pixel that lie side by side
        depth, height, width = (*lead, *problem.spatial)
        taps_d, taps_h, taps_w = (*lead, *problem.filter)
        self.size, self.taps = (depth, height), (taps_d, taps_h)
        self.run, self.line = taps_w * each, width * each
        strides = (*lead, *problem.stride)
        self.step = (strides[0] * height * self.line, strides[1] * self.line, strides[2] * each)

    def row_tiles(self, tile: Tile) -> int:
        return ceil((self.pixels if self.pixel_rows else self.problem.k) / tile.rows)

    def blocks(self, tile: Tile) -> int:
        return self.row_tiles(tile) * ceil((self.problem.k if self.pixel_rows else self.pixels) / tile.columns)


def _shared(tile: Tile) -> int:
    """The ring, in whose place the sums come in the end, from a multiple of 1024 bytes on."""
    sums = 4 * tile.rows * ((tile.columns + 23) // 32 * 32 + 8)
    return 1024 + max(tile.stages * 2 * _DEPTH * (tile.rows + tile.columns), sums)


def _tiles(problem: Problem) -> Iterator[Tile]:
    steps = ceil(problem.gemm.k / _DEPTH)
    for rows in (64, 128, 192, 256):
        for columns in (32, 64, 96, 128, 160, 192, 256):
            # A thread has columns / 2 sums, and what registers 65536 / threads leave it beside some 50 others.
            if columns // 2 + 50 > min(65536 // (2 * rows), 255) or columns > 2 * rows:
                continue
            for stages in (6, 5, 4, 3):
                tile = Tile(rows, columns, stages)
                if _shared(tile) <= _SHARED and (stages <= steps + 2 or stages == 3):
                    yield tile
                    break
