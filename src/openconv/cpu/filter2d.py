"""cpu.filter2d: image filters and other convolutions of few channels, held in registers along the image's height."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem

__all__ = ["Filter2d", "Filter2dKnobs"]

_MOST_CHANNELS = 4
_MOST_TAPS = 7
_TILE_RESULTS = 1 << 16  # a tile of so many results takes some 20 us: its ticket and cold start do not show
_WGRAD_TILES = 256  # partial sums a group may have
_THREAD_MACS = 400_000  # about 8 us of work, for which another thread is worth waking


@dataclass(frozen=True)
class Filter2dKnobs(Knobs):
    """The block of results that fprop and dgrad hold in registers: ``rows`` times ``vectors``."""

    rows: int
    vectors: int


class Filter2d(Engine):
    """Few-channel convolution of stride 1: a block of output rows and vectors of columns stays in registers.

        y[n,k,p,q] = bias[k] + sum over c,r,s of  w[k,c,r,s] * x[n, c, p - pad + r*dil, q - pad + s*dil]

    Each vector of x that is loaded serves up to 7 filter rows, so that arithmetic and not loading sets the pace; nothing
    is copied or padded. It wins where a matrix product has no channels to work on: image filters, where it runs at the
    speed of memory up to about 5x5. With more channels a matrix product reuses x across output channels and wins; with
    very large filters FFT does. :mod:`openconv.cpu.filter2d_kernels` has the arithmetic.
    """

    name = "cpu.filter2d"
    takes_bias = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank > 2:
            yield f"rank is {problem.rank}; wanted 1 or 2 spatial axes"
        if set(problem.dtypes) not in ({"f32"}, {"f64"}):
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted f32 or f64 for all three"
        if set(problem.stride) != {1}:
            yield f"stride is {problem.stride}; neighbouring results lie in one vector of x only at stride 1"
        for letter, channels in (("C", problem.c), ("K", problem.k)):
            if channels > _MOST_CHANNELS * problem.groups:
                yield f"{letter}/G is {channels // problem.groups}; wanted 1 to {_MOST_CHANNELS}"
        images = (problem.layouts[0], problem.layouts[2])
        if "nhwc" in images and max(problem.c, problem.k) > 1:
            yield f"layouts of x and y are {', '.join(images)}; a vector along W needs nchw, or a single channel"
        if problem.direction == "wgrad" and problem.layouts[1] == "nhwc" and problem.c > problem.groups:
            yield f"layout of dw is nhwc with C/G = {problem.c // problem.groups}; wanted nchw, or C/G = 1"

    def traits(self, problem: Problem, knobs: Filter2dKnobs) -> Traits:
        dtype = problem.dtypes[0]
        eps, terms = {"f32": 2.0**-24, "f64": 2.0**-53}[dtype], problem.gemm.k
        if problem.direction != "wgrad":  # one chain, with one rounding for each product and one for the bias
            return Traits(accumulator=dtype, error_bound=(terms + 1) * eps)
        # Along a strip of 1 KiB each lane adds 8 rows of at most 64 vectors (16 bytes wide), then up to 8 copies.
        return Traits(accumulator=dtype, error_bound=(8 * 64 + 8 + 1) * eps + terms * 2.0**-53)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> int:
        if problem.direction != "wgrad":
            return 0
        _, tiles = _wgrad_tiles(problem)
        return 8 * tiles * problem.groups * prod(problem.w_shape) // problem.groups

    def knobs(self, problem: Problem, device: Device) -> Iterable[Filter2dKnobs]:
        if problem.rank == 1:
            return (Filter2dKnobs(1, 8),)
        if device.lanes < 16:
            return (Filter2dKnobs(8, 1), Filter2dKnobs(4, 2))
        return (Filter2dKnobs(8, 2), Filter2dKnobs(8, 1), Filter2dKnobs(4, 4))

    def cost(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> float:
        # Partly filled blocks cost as much as full ones, and masked ones (a side of at most two vectors) twice as much.
        size = DTYPE_BYTES[problem.dtypes[0]]
        lanes = device.lanes * 4 // size
        image = problem.out if problem.direction == "fprop" else problem.spatial
        height, width = image if problem.rank == 2 else (1, image[0])
        rows, columns = _up(height, knobs.rows), _up(width, lanes)
        masked = 2.0 if width < 3 * lanes or problem.rank == 2 and height < 3 * knobs.rows else 1.0
        channels = problem.c * problem.k // problem.groups
        work = 2.0 * problem.n * channels * rows * columns * prod(problem.filter) * masked
        rate = 0.7 * device.flops * 4 / size
        taps = _row_taps(*_rows_of(problem))
        loads = (knobs.rows + taps) / (knobs.rows * taps)  # loads for each multiply-add; two of them take its time twice
        seconds = max(work / rate * max(1.0, 2 * loads), problem.min_bytes / device.bandwidth)
        return 6e-6 + seconds * (1.2 if problem.direction == "wgrad" else 1.0)

    def build(self, problem: Problem, device: Device, knobs: Filter2dKnobs) -> Runner:
        if problem.direction == "wgrad":
            return _build_wgrad(problem, device)
        return _build_fprop(problem, device, knobs)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _rows_of(problem: Problem) -> tuple[int, int]:
    """Filter rows and their dilation."""
    return (problem.filter[0], problem.dilation[0]) if problem.rank == 2 else (1, 1)


@lru_cache
def _row_taps(rows: int, dilation: int) -> int:
    """How many filter rows to take at once: all up to 7, else the cheapest count; the others then go one by one.

    For a block of 8 rows, n filter rows at once take 4 n cycles of multiply-adds and some 3 to start; a single one waits
    for 8 loads. Dilated rows share no row of x and go one by one.
    """
    if dilation > 1:
        return 1
    if rows <= _MOST_TAPS:
        return rows
    return min(range(2, _MOST_TAPS + 1), key=lambda n: rows // n * (4 * n + 3) + rows % n * 9)


def _geometry(problem: Problem) -> tuple[int, ...]:
    """H W P Q, R S, the low padding and the dilation of both axes; of a single row where there is one axis."""
    pads = [low for low, _ in problem.padding]
    if problem.rank == 1:
        return (1, *problem.spatial, 1, *problem.out, 1, *problem.filter, 0, *pads, 1, *problem.dilation)
    return (*problem.spatial, *problem.out, *problem.filter, *pads, *problem.dilation)


def _build_fprop(problem: Problem, device: Device, knobs: Filter2dKnobs) -> Runner:
    """fprop, and dgrad as an fprop of dy: channels exchanged, the filter turned by half a turn."""
    import numpy as np

    from .filter2d_kernels import fprop_kernel
    from .runtime import launch

    H, W, P, Q, R, S, row_pad, col_pad, row_dil, col_dil = _geometry(problem)
    G, C, K = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    size = DTYPE_BYTES[problem.dtypes[0]]
    nhwc = problem.layouts[1] == "nhwc"
    wk, wc, wr, ws = (v * size for v in ((R * S * C, 1, S * C, C) if nhwc else (C * R * S, R * S, S, 1)))
    wg, offset, skip = K * wk, 0, 0
    if problem.direction == "dgrad":
        offset, skip = (R - 1) * wr + (S - 1) * ws, 1
        H, W, P, Q, C, K = P, Q, H, W, K, C
        wk, wc, wr, ws = wc, wk, -wr, -ws
        row_pad, col_pad = row_dil * (R - 1) - row_pad, col_dil * (S - 1) - col_pad

    threads = max(1, min(device.threads, problem.macs // _THREAD_MACS))
    units = problem.n * G * -(-P // knobs.rows)
    fair = units // (4 * threads)  # four tiles a thread even out their ends
    tile_units = max(1, min(fair, _TILE_RESULTS // (knobs.rows * Q * K)))
    kernel = fprop_kernel(np.float32 if size == 4 else np.float64, _row_taps(R, row_dil), knobs.rows, knobs.vectors)
    sizes = (G, C, K, H, W, P, Q, R, S, row_pad, col_pad, row_dil, col_dil)
    rest = (*sizes, wk, wc, wr, ws, wg, skip, units, tile_units)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        first = 0 if bias is None else bias.data_ptr()
        launch(kernel, (a.data_ptr(), b.data_ptr() + offset, first, out.data_ptr(), *rest), threads)

    return run


def _wgrad_tiles(problem: Problem) -> tuple[int, int]:
    """Row blocks of a tile, and tiles of a group. They depend on the sizes alone, as does the order of the sum."""
    height, width = problem.out if problem.rank == 2 else (1, problem.out[0])
    units = problem.n * -(-height // 8)
    tile_units = max(1, _TILE_RESULTS // (8 * width), -(-units // _WGRAD_TILES))
    return tile_units, -(-units // tile_units)


def _build_wgrad(problem: Problem, device: Device) -> Runner:
    """Partial sums by tile, then their sum by one thread."""
    import numpy as np

    from .filter2d_kernels import wgrad_kernel, wgrad_sum_kernel
    from .runtime import launch

    H, W, P, Q, R, S, *rest = _geometry(problem)
    G, C, K = problem.groups, problem.c // problem.groups, problem.k // problem.groups
    tile_units, tiles = _wgrad_tiles(problem)
    units = problem.n * -(-P // 8)
    threads = max(1, min(device.threads, problem.macs // _THREAD_MACS))
    dtype = np.float32 if problem.dtypes[0] == "f32" else np.float64
    tile_kernel, sum_kernel = wgrad_kernel(dtype, _row_taps(R, rest[2])), wgrad_sum_kernel(dtype)
    sizes = (G, C, K, H, W, P, Q, R, S, *rest, units, tile_units, tiles)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        assert workspace is not None, "wgrad keeps its partial sums in the workspace"
        partials = workspace.data_ptr()
        launch(tile_kernel, (a.data_ptr(), b.data_ptr(), partials, *sizes), threads)
        launch(sum_kernel, (partials, out.data_ptr(), G, tiles, K * C * R * S), 1)

    return run
