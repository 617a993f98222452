"""What the engines that multiply matrices share: filters as matrices, parts of a workspace, what a product costs.

Also the error of a sum, which every floating-point engine bounds alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ..device import Device
from ..problem import Problem

__all__ = ["Region", "filter_matrix", "float_refusals", "gemm_seconds", "store_filter_matrix", "sum_error"]

_EPS = {"f32": 2.0**-24, "f64": 2.0**-53}


@dataclass(frozen=True)
class Region:
    """A part of the workspace: so many elements of so many bytes, on a line of the cache."""

    elements: int
    size: int

    @cached_property
    def bytes(self) -> int:
        return -(-self.elements * self.size // 64) * 64

    @staticmethod
    def places(regions: Sequence[Region]) -> list[int]:
        """Where each begins, in bytes from the first: a workspace that only kernels look at needs no tensors."""
        return [sum(region.bytes for region in regions[:at]) for at in range(len(regions))]

    @staticmethod
    def split(workspace: Tensor | None, regions: Sequence[Region], dtype: torch.dtype) -> list[Tensor]:
        """The workspace as one flat tensor per region."""
        if workspace is None:
            return [torch.empty(0, dtype=dtype) for _ in regions]
        size = dtype.itemsize
        counts = [region.bytes // size for region in regions]
        parts = workspace.view(dtype).split_with_sizes(counts)
        # Cut off what rounding to lines added, but make no view of what is whole: each takes a microsecond.
        return [
            part if region.elements >= count else part[: region.elements]
            for part, region, count in zip(parts, regions, counts, strict=True)
        ]


def float_refusals(problem: Problem) -> Iterator[str]:
    """A matrix product takes one floating-point type."""
    if set(problem.dtypes) - {"f32", "f64"} or len(set(problem.dtypes)) > 1:
        yield f"dtypes are {', '.join(problem.dtypes)}; the matrix product takes f32 or f64 throughout"


def sum_error(problem: Problem, chain: int | None = None) -> float:
    """Bound on the error of a sum in the result's own type, as a share of sum(|x|*|w|): length times half an ulp.

    With ``chain`` only so many terms are added in that type, and the partial sums in f64.
    """
    unit, terms = _EPS[problem.result_dtype], problem.gemm.k
    return (terms + 1) * unit if chain is None else (chain + 1) * unit + terms * _EPS["f64"]


def filter_matrix(w: Tensor, problem: Problem, order: str, spare: Tensor, fill: bool) -> Tensor:
    """The filters as (G, K/G, C/G*T*R*S), taps behind channels in nchw order and before them in nhwc.

    A view where the memory is in that order; else ``spare``, filled from ``w`` if asked to.
    """
    shape = (problem.groups, problem.k // problem.groups, prod(problem.w_shape[1:]))
    ordered = w if order == "nchw" else w.movedim(1, -1)
    if problem.layouts[1] == order or prod(problem.filter) == 1 or problem.w_shape[1] == 1:
        return ordered.reshape(shape)
    if fill:
        spare.view(ordered.shape).copy_(ordered)
    return spare.view(shape)


def store_filter_matrix(matrix: Tensor, w: Tensor, problem: Problem, order: str) -> None:
    """Write back a matrix that :func:`filter_matrix` gave for a result, where it is not the result's own memory."""
    if matrix.data_ptr() != w.data_ptr():
        target = w if order == "nchw" else w.movedim(1, -1)
        target.copy_(matrix.view(target.shape))


def gemm_seconds(device: Device, m: int, n: int, k: int, size: int) -> float:
    """Predicted time of one product (m x k) * (k x n): the arithmetic at the measured matrix rate, slowed where a side
    is short of the library's blocking, or the matrices through memory, whichever is longer."""
    rate = device.flops * 4 / size
    lanes = device.lanes * 4 / size
    full = m / (m + 4) * n / (n + lanes) * k / (k + 24)
    arithmetic = 2.0 * m * n * k / (rate * full)
    memory = (m * k + k * n + m * n) * size / (device.bandwidth * 2)
    return max(arithmetic, memory) + 3e-6
