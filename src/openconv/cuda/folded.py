"""Filters spread over folded columns, filter gradients gathered from them, and vectors repeated for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..problem import DTYPE_BYTES
from . import jit
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["Folded", "Repeated"]

_THREADS = 256
_WORDS = {1: "u8", 2: "u16", 4: "u32"}


@dataclass(frozen=True)
class Folded:
    """A filter of ``k`` by ``c`` channels, ``rows`` rows of ``taps`` taps each in a layout, and the same spread over
    ``folds`` times as many results and ``columns`` times as many channels, of ``groups`` taps, with its channels last
    (``kernels/folded.cu``). One of ``dtype`` is spread, or a gradient gathered from f32 (``kernels/unfolded.cu``)."""

    k: int
    c: int
    rows: int
    taps: int
    layout: str
    folds: int
    columns: int
    groups: int
    stride: int
    dilation: int
    shift: int
    dtype: str
    gather: bool

    @property
    def elements(self) -> int:
        """Of the spread filter."""
        return self.folds * self.k * self.rows * self.groups * self.columns * self.c

    @property
    def size_bytes(self) -> tuple[int]:
        """Of what is written."""
        count = self.k * self.rows * self.taps * self.c if self.gather else self.elements
        return (count * DTYPE_BYTES[self.dtype],)

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        spread = self.elements * (4 if self.gather else DTYPE_BYTES[self.dtype])
        return 2.5e-6 + spread / (0.5 * device.bandwidth)

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the filter is, and where the other one goes."""
        rows, taps = self.rows, self.taps
        if self.layout == "nhwc":
            steps = (rows * taps * self.c, 1, taps * self.c, self.c)
        else:
            steps = (self.c * rows * taps, rows * taps, taps, 1)
        total = self.size_bytes[0] // DTYPE_BYTES[self.dtype]
        counts = (total, self.stride, self.dilation, self.shift, self.folds)
        divisors = (self.c, self.columns, self.groups, rows, self.k, taps, self.dilation)
        params = pack(2, steps, (*counts, *(number for value in divisors for number in divisor(value))))
        name = "unfolded" if self.gather else "folded"
        return Launch(self.source, name, device, (ceil(total / _THREADS),), (_THREADS,), params)

    @property
    def source(self) -> jit.Source:
        word = _WORDS[DTYPE_BYTES[self.dtype]]
        source, target = ("f32", self.dtype) if self.gather else (word, word)
        text = f"struct Traits {{\n    using From = {source};\n    using To = {target};\n}};\n"
        return jit.Source("unfolded.cu" if self.gather else "folded.cu", text)


@dataclass(frozen=True)
class Repeated:
    """A vector of ``length`` elements of ``size`` bytes, ``times`` behind itself (``kernels/repeated.cu``)."""

    length: int
    times: int
    size: int

    @property
    def size_bytes(self) -> tuple[int]:
        """Of the copy."""
        return (self.length * self.times * self.size,)

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        return 2e-6

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the vector is, and where its copies go."""
        total = self.length * self.times
        params = pack(2, (), (total, *divisor(self.length)))
        return Launch(self.source, "repeated", device, (ceil(total / _THREADS),), (_THREADS,), params)

    @property
    def source(self) -> jit.Source:
        return jit.Source("repeated.cu", f"struct Traits {{\n    using Element = {_WORDS[self.size]};\n}};\n")
