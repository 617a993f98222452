"""Copies of tensors with their channels first, for engines that read them with their channels last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod

from ..problem import DTYPE_BYTES, Problem
from . import jit
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["Turn", "is_last", "turned_inputs", "turned_operands", "turned_result"]


@dataclass(frozen=True)
class Turn:
    """A tensor to be copied so that its channels are last: ``images`` times ``channels`` by ``pixels``. With the two
    exchanged, they come first."""

    name: str
    images: int
    channels: int
    pixels: int
    size: int

    @property
    def size_bytes(self) -> int:
        return self.images * self.channels * self.pixels * self.size

    @property
    def tile(self) -> tuple[int, int]:
        """Channels and pixels of a block: some 4096, as long as the image has so many. Of channels that are as few as a
        filter's taps, it has all."""
        if self.channels < 32 and self.pixels > 64:
            return self.channels, min(4096 // self.channels, self.pixels + 63) // 64 * 64
        pixels = min(64, self.pixels)
        return min(max(64, 4096 // pixels // 64 * 64), ceil(self.channels / 64) * 64), pixels

    @property
    def _tiles(self) -> tuple[int, int]:
        channels, pixels = self.tile
        return ceil(self.channels / channels), ceil(self.pixels / pixels)

    @property
    def grid(self) -> tuple[int]:
        return (self.images * prod(self._tiles),)

    @property
    def params(self) -> bytes:
        channels, pixels = self._tiles
        return pack(2, (), (self.channels, self.pixels, *divisor(channels), *divisor(pixels)))

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        return 2e-6 + 2 * self.size_bytes / (0.7 * device.bandwidth)

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the tensor is, and where its copy goes."""
        return Launch(self.source, "channels_last", device, self.grid, (256,), self.params)

    @property
    def source(self) -> jit.Source:
        most, element = 4 // self.size, {1: "u8", 2: "u16", 4: "u32"}[self.size]
        vectors = gcd(most, self.pixels) if self.pixels % 4 == 0 else 1, gcd(most, self.channels)
        tile_c, tile_x = self.tile
        numbers = f"tile_c = {tile_c}, tile_x = {tile_x}, from_vector = {vectors[0]}, to_vector = {vectors[1]}"
        body = f"    using Element = {element};\n    static constexpr int {numbers};\n"
        return jit.Source("channels_last.cu", f"struct Traits {{\n{body}}};\n")


def _shape(problem: Problem, tensor: int) -> tuple[int, int, int]:
    """Of x, w or y: images, or filters; channels; pixels, or taps."""
    if tensor == 1:
        return problem.k, problem.c // problem.groups, prod(problem.filter)
    channels, sizes = ((problem.c, problem.spatial), (0, ()), (problem.k, problem.out))[tensor]
    return problem.n, channels, prod(sizes)


def is_last(problem: Problem, tensor: int) -> bool:
    """Whether channels are last, in name or since there is one of them or of the pixels."""
    _, channels, pixels = _shape(problem, tensor)
    return problem.layouts[tensor] == "nhwc" or channels == 1 or pixels == 1


@lru_cache(maxsize=512)
def turned_inputs(problem: Problem) -> list[Turn | None]:
    """Of the two inputs, those that have to be copied."""
    size = DTYPE_BYTES[problem.dtypes[problem.inputs[0]]]
    names = "x", "w", "y" if problem.direction == "fprop" else "dy"
    return [None if is_last(problem, at) else Turn(names[at], *_shape(problem, at), size) for at in problem.inputs]


def turned_operands(problem: Problem) -> list[Turn | None]:
    """Of the epilogue's operands, those in the shape of a result whose channels come first."""
    shape, size = _shape(problem, problem.result), DTYPE_BYTES[problem.result_dtype]
    whole = is_last(problem, problem.result)
    return [
        None if whole or operand.kind != "tensor" else Turn(operand.name, *shape, size)
        for operand in problem.epilogue.operands
    ]


def turned_result(problem: Problem) -> Turn | None:
    """The result, computed with its channels last, if they are to come first."""
    if is_last(problem, problem.result):
        return None
    images, channels, pixels = _shape(problem, problem.result)
    name = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}[problem.direction]
    return Turn(name, images, pixels, channels, DTYPE_BYTES[problem.result_dtype])
