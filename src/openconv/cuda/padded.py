"""Copies of tensors as rows of another length: channels rounded up with zeros, or cut off again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from . import jit
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["MOST", "Padded"]

MOST = 2**31 - 2**16
"""Elements of a copy: places are ints, and a thread may look a little beyond the last."""
_THREADS, _EACH = 256, 2


@dataclass(frozen=True)
class Padded:
    """``rows`` of ``length`` elements of ``size`` bytes, copied as ``to_rows`` of ``to_length``, with zeros where
    those are more (``kernels/padded.cu``)."""

    rows: int
    length: int
    to_rows: int
    to_length: int
    size: int

    @property
    def size_bytes(self) -> tuple[int]:
        """Of the copy."""
        return (self.to_rows * self.to_length * self.size,)

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        return 2e-6 + (self.rows * self.length * self.size + sum(self.size_bytes)) / (0.7 * device.bandwidth)

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the tensor is, and where its copy goes, a multiple of 16 bytes."""
        total = self.to_rows * self.to_length
        params = pack(2, (), (self.rows, self.length, total, *divisor(self.to_length)))
        blocks = ceil(total * self.size / (16 * _THREADS * _EACH))
        return Launch(self.source, "padded", device, (blocks,), (_THREADS,), params)

    @property
    def source(self) -> jit.Source:
        element = {1: "u8", 2: "u16", 4: "u32"}[self.size]
        return jit.Source("padded.cu", f"struct Traits {{\n    using Element = {element};\n}};\n")
