"""Copies of f32 as pairs of tf32, for engines that multiply them as three products."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ..problem import Problem
from . import jit
from .device import CudaDevice
from .launch import Launch, pack

__all__ = ["Pairs", "paired"]

_BLOCK = 1024  # vectors of four values


@dataclass(frozen=True)
class Pairs:
    """Two tensors of so many values, multiples of four, to be copied as their high parts and, behind them, their low
    ones (``kernels/tf32_pairs.cu``). Of the first there may be none."""

    first: int
    second: int

    @property
    def size_bytes(self) -> tuple[int, int]:
        """Of both copies."""
        return 8 * self.first, 8 * self.second

    @property
    def _blocks(self) -> tuple[int, int]:
        return ceil(self.first / (4 * _BLOCK)), ceil(self.second / (4 * _BLOCK))

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        return 2e-6 + 12 * (self.first + self.second) / device.bandwidth

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the tensors are, and where their copies go."""
        params = pack(4, (self.first // 4, self.second // 4), (self._blocks[0],))
        return Launch(self.source, "tf32_pairs", device, (sum(self._blocks),), (256,), params)

    @property
    def source(self) -> jit.Source:
        return jit.Source("tf32_pairs.cu")


def paired(problem: Problem) -> Pairs | None:
    """Of the two inputs of a fprop or dgrad, if their products are to be as exact as those of f32."""
    first, second = problem.inputs
    if problem.dtypes[first] != "f32" or problem.precision != "tf32x3" or problem.direction == "wgrad":
        return None
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    return Pairs(prod(shapes[first]), prod(shapes[second]))
