"""cuda.tiled: a tile of the input with its halo in shared memory, the classic of convolution on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from ..tensors import DTYPES, empty
from . import jit, render
from .device import CudaDevice
from .launch import Launch, pack, single

__all__ = ["Tile", "Tiled"]

_ACROSS, _DOWN = 32, 8  # threads of a block
_SHARED = 48 << 10
_DTYPES = ("f16", "bf16", "f32", "f64")
_MOST_IN, _MOST_OUT = 16, 64  # channels of a group
_MOST_REACH = 24  # inputs of a column that a thread keeps in registers
_MOST_SUMS = 64  # of a wgrad, in registers as well
_MOST_REGISTERS = 56  # of sums and a column together: more than this has been seen to spill
_META = torch.device("meta")


@dataclass(frozen=True)
class Tile(Knobs):
    """Each thread owns ``rows`` outputs above each other in ``filters`` output channels; a block's tile is 32 wide and
    8 * ``rows`` high."""

    rows: int
    filters: int


class Tiled(Engine):
    """A block of threads loads the inputs of a tile of outputs to shared memory, where all its windows read them.

        a tile of 32 x 32 outputs and 3 x 3 taps:  34 * 34 inputs instead of 32 * 32 * 9, 8 times fewer

    Values go from shared memory to registers a column at a time, for all rows, taps and output channels of a thread. A
    dgrad of stride 1 is the same with the filter turned around. A wgrad adds up tile by tile in registers, and what the
    blocks found in a second stage, always in the same order.

    Wins on few channels: image filters, first layers, small groups. Loses where channels are many: x is read again for
    every block of output channels, and tensor cores lie idle.
    """

    name = "cuda.tiled"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank != 2:
            yield f"the problem has {problem.rank} spatial axes; tiles need 2"
            return
        if problem.dtypes[0] not in _DTYPES or len(set(problem.dtypes)) > 1:
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted one of {', '.join(_DTYPES)} throughout"
            return
        if problem.precision != "ieee" and problem.dtypes[0] == "f32":
            yield f"precision is {problem.precision}; products are formed as ieee"
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted one layout for both"
        if set(problem.stride) - {1, 2}:
            yield f"stride is {problem.stride}; wanted 1 or 2"
        elif problem.direction == "dgrad" and prod(problem.stride) > 1:
            yield f"stride is {problem.stride}; a dgrad that is a fprop turned around needs (1, 1)"
        c, k = problem.c // problem.groups, problem.k // problem.groups
        if c > _MOST_IN:
            yield f"C/G is {c}; tiles are for at most {_MOST_IN}"
        if k > _MOST_OUT:
            yield f"K/G is {k}; tiles are for at most {_MOST_OUT}"
        if problem.direction == "wgrad" and prod(problem.filter) > _MOST_SUMS:
            yield f"the filter has {prod(problem.filter)} taps; a wgrad has registers for {_MOST_SUMS}"
        reach = problem.dilation[0] * (problem.filter[0] - 1) + 1
        if reach > _MOST_REACH:
            yield f"the filter reaches over {reach} rows; a thread has registers for {_MOST_REACH}"
        elif not set(problem.stride) - {1, 2} and _shared(problem, Tile(1, 1)) > _SHARED:
            yield f"a tile and its halo take {_shared(problem, Tile(1, 1))} bytes; shared memory has {_SHARED}"

    def traits(self, problem: Problem, knobs: Tile) -> Traits:
        unit, wide = (2.0**-53, "f64") if problem.result_dtype == "f64" else (2.0**-24, "f32")
        return Traits(wide, (problem.gemm.k + 1) * unit)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Tile) -> int:
        if problem.direction != "wgrad":
            return 0
        return _slices(problem, device, knobs) * prod(problem.w_shape) * _sum_size(problem)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Tile]:
        # Rows share loads of inputs, filters too; both cost registers, and an image may have fewer of either.
        height = problem.spatial[0] if problem.direction == "dgrad" else problem.out[0]
        channels = (problem.c if problem.direction == "dgrad" else problem.k) // problem.groups
        tallest = 4 if height > 16 else 2 if height > 8 else 1
        if problem.stride[0] > 1 and problem.filter[0] > 5:
            tallest = 2  # of other heights the assembler spills two values
        sizes = [(tallest, 4), (4, 4), (2, 4), (4, 8), (2, 8), (4, 2), (4, 1), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)]
        fitting = (Tile(rows, min(filters, 1 << (channels - 1).bit_length())) for rows, filters in sizes)
        return tuple(dict.fromkeys(tile for tile in fitting if _fits(problem, tile)))

    def cost(self, problem: Problem, device: Device, knobs: Tile) -> float:
        assert isinstance(device, CudaDevice)
        rate = device.double_flops if problem.result_dtype == "f64" else device.flops
        size = DTYPE_BYTES[problem.result_dtype]
        c, k = problem.c // problem.groups, problem.k // problem.groups
        if problem.direction == "dgrad":
            c, k = k, c
        wgrad = problem.direction == "wgrad"
        out = problem.spatial if problem.direction == "dgrad" else problem.out
        down, across = ceil(out[0] / (_DOWN * knobs.rows)), ceil(out[1] / _ACROSS)
        tiles = problem.n * down * across * problem.groups * ceil(k / knobs.filters)
        height, width = _tile(problem, knobs)
        # Tiles are computed whole, also where the image ends within one.
        products = tiles * c * _ACROSS * _DOWN * knobs.rows * prod(problem.filter) * knobs.filters
        # A lane's neighbour is the next pixel: where channels lie between them, each element costs a sector, 32 bytes.
        apart = problem.layouts[0] == "nhwc"
        reach_in, reach_out = (min(32, n * size) if apart else size for n in (problem.c, problem.k))
        if problem.direction == "dgrad":
            reach_in, reach_out = reach_out, reach_in
        results = prod(problem.result_shape if not wgrad else problem.y_shape)
        inputs = tiles * c * height * width * reach_in
        outputs = results * reach_out * (c if wgrad else 1)
        working = min(1.0, tiles * (c if wgrad else 1) / device.threads)
        # Half of the products' rate: loads from shared memory share the way. Barriers and the halo add 2.5 ps a result.
        seconds = 2 * products / (0.5 * rate * working) + results * 2.5e-12 * device.flops / 51e12
        seconds = max(seconds, (inputs + outputs) / (0.85 * device.bandwidth))
        found = 2e-6 * (1 + wgrad) + seconds * (2.5 if wgrad and not apart else 1)
        return found if wgrad else max(found, 3.7e-6 + 0.6e-6 * c)  # a block waits for one channel after the other

    def build(self, problem: Problem, device: Device, knobs: Tile) -> Runner:
        assert isinstance(device, CudaDevice)
        return (_build_wgrad if problem.direction == "wgrad" else _build)(problem, device, knobs)

    def sources(self, problem: Problem, device: Device, knobs: Tile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        return [_source(problem, knobs)]


# -- sizes ----------------------------------------------------------------------------------------------------------


def _sum_size(problem: Problem) -> int:
    return 8 if problem.result_dtype == "f64" else 4


def _tile(problem: Problem, knobs: Tile) -> tuple[int, int]:
    """Height and width of the inputs of a tile."""
    (sh, sw), (dh, dw), (r, s) = problem.stride, problem.dilation, problem.filter
    return (_DOWN * knobs.rows - 1) * sh + (r - 1) * dh + 1, (_ACROSS - 1) * sw + (s - 1) * dw + 1


def _shared(problem: Problem, knobs: Tile) -> int:
    """Bytes of shared memory of a block."""
    warps = _DOWN if problem.direction == "wgrad" else 1
    filters = prod(problem.filter) * knobs.filters * warps
    return (prod(_tile(problem, knobs)) + filters) * _sum_size(problem)


def _fits(problem: Problem, knobs: Tile) -> bool:
    """Whether shared memory and registers hold it: sums, and a column of inputs."""
    if _shared(problem, knobs) > _SHARED:
        return False
    if problem.direction == "wgrad":
        return knobs.filters * prod(problem.filter) <= _MOST_SUMS
    reach = (knobs.rows - 1) * problem.stride[0] + problem.dilation[0] * (problem.filter[0] - 1) + 1
    return (knobs.rows * knobs.filters + reach) * (_sum_size(problem) // 4) <= _MOST_REGISTERS


def _slices(problem: Problem, device: Device, knobs: Tile) -> int:
    """Blocks that share the tiles of a wgrad: enough to fill the GPU four times over."""
    tiles = problem.n * ceil(problem.out[0] / (_DOWN * knobs.rows)) * ceil(problem.out[1] / _ACROSS)
    others = problem.c * ceil(problem.k // problem.groups / knobs.filters)
    return max(1, min(tiles, ceil(4 * device.threads / others)))


def _source(problem: Problem, knobs: Tile) -> jit.Source:
    outputs = (problem.c if problem.direction == "dgrad" else problem.k) // problem.groups
    names = ("taps_r", "taps_s", "stride_h", "stride_w", "dilation_h", "dilation_w")
    sizes = (*problem.filter, *problem.stride, *problem.dilation)
    constants: dict[str, int | bool | str] = {"rows": knobs.rows, "filters": knobs.filters}
    constants |= dict(zip(names, sizes, strict=True))
    if problem.direction == "wgrad":
        return jit.Source("tiled_wgrad.cu", render.traits(problem, constants))
    constants |= {"channels_last": problem.layouts[0] == "nhwc", "whole": outputs % knobs.filters == 0}
    return jit.Source("tiled.cu", render.traits(problem, constants))


# -- runs -----------------------------------------------------------------------------------------------------------


def _strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Elements from one index to the next of batch, channel, row and column."""
    return tuple(empty(shape, DTYPES["u8"], layout, _META).stride())


def _build(problem: Problem, device: CudaDevice, knobs: Tile) -> Runner:
    """fprop, and dgrad as a fprop of dy with the filter turned around."""
    groups, c, k = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    wk, wc, wr, ws = _strides(problem.w_shape, problem.layouts[1])
    (r, s), (low_h, low_w) = problem.filter, (low for low, _ in problem.padding)
    if problem.direction == "fprop":
        source, target, inner, outer = problem.x_shape, problem.y_shape, c, k
        steps, pads = (0, k * wk, wk, wc, wr, ws), (low_h, low_w)
    else:
        source, target, inner, outer = problem.y_shape, problem.x_shape, k, c
        steps = ((r - 1) * wr + (s - 1) * ws, k * wk, wc, wk, -wr, -ws)
        pads = (problem.dilation[0] * (r - 1) - low_h, problem.dilation[1] * (s - 1) - low_w)
    layout = problem.layouts[0]
    down, across = ceil(target[2] / (_DOWN * knobs.rows)), ceil(target[3] / _ACROSS)
    params = pack(
        3 + max(1, len(problem.epilogue.operands)),
        (*_strides(source, layout), *_strides(target, layout), *steps),
        (inner, outer, *source[2:], *target[2:], *pads, down, across),
    )
    grid = (problem.n * down * across, groups * ceil(outer / knobs.filters))
    launch = Launch(_source(problem, knobs), "tiled", device, grid, (_ACROSS, _DOWN), params)
    return single(launch, 16)  # the result, and tensors that are added to it, are vectors of channels in nhwc


def _build_wgrad(problem: Problem, device: CudaDevice, knobs: Tile) -> Runner:
    """Sums of slices of all tiles, then their total."""
    groups, c, k = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    down, across = ceil(problem.out[0] / (_DOWN * knobs.rows)), ceil(problem.out[1] / _ACROSS)
    slices = _slices(problem, device, knobs)
    layout = problem.layouts[0]
    wide = (
        *_strides(problem.x_shape, layout),
        *_strides(problem.y_shape, layout),
        *_strides(problem.w_shape, problem.layouts[1]),
    )
    narrow = (
        *(c, k, groups, *problem.spatial, *problem.out, *(low for low, _ in problem.padding)),
        *(problem.n * down * across, down, across, slices),
    )
    source, params = _source(problem, knobs), pack(4, wide, narrow)
    grid = (slices, groups * c * ceil(k / knobs.filters))
    partial = Launch(source, "partial", device, grid, (_ACROSS, _DOWN), params)
    total = Launch(source, "total", device, (ceil(prod(problem.w_shape) / 256),), (256,), params)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        assert workspace is not None
        addresses = (a.data_ptr(), b.data_ptr(), out.data_ptr(), workspace.data_ptr())
        partial(*addresses)
        total(*addresses)

    return run
