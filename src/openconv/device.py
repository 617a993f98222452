"""Device: what the choice of an engine needs to know of the machine, as plain numbers.

The two ceilings, a matrix rate and a copy bandwidth, turn operations and bytes into seconds. They need to be right
relative to each other rather than to the last percent: a choice among engines compares predictions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Device"]


@dataclass(frozen=True)
class Device:
    """A place where engines run.

    ``kind`` is ``cpu`` or ``cuda``. ``flops`` is the f32 rate of a large matrix product over all ``threads``, and
    ``bandwidth`` the rate of a large copy, bytes read plus bytes written; both per second. ``lanes`` is the number of
    f32 values in a vector register and ``cache_bytes`` the private cache of one core. ``vector_flops`` is the f32 rate
    of multiply-adds on registers over all threads, where a CPU's own kernels beat its matrix product.
    """

    kind: str
    name: str
    threads: int = 1
    lanes: int = 8
    cache_bytes: int = 1 << 20
    flops: float = 100e9
    bandwidth: float = 20e9
    vector_flops: float = 0.0

    @property
    def key(self) -> str:
        """The kind of device that a measurement holds for: ``cpu intel xeon, 16 lanes, 2 threads``. Clock rates and
        trade marks are left out, since they do not change which engine is the fastest."""
        words = re.sub(r"[(][^)]*[)]|@.*|\b(?:Processor|CPU)\b", " ", self.name).lower().split()
        model = " ".join([self.kind, *words])
        return f"{model}, {self.lanes} lanes, {self.threads} threads" if self.kind == "cpu" else model

    @property
    def vector_rate(self) -> float:
        """f32 operations a second of multiply-adds on registers."""
        return self.vector_flops or self.flops

    def rate(self, dtype: str) -> float:
        """Operations a second of a large matrix product in this dtype."""
        return self.flops / (2 if dtype in ("f64", "complex128") else 1)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.kind}: {self.name}, {threads}, {self.flops / 1e9:.0f} GFLOP/s, {self.bandwidth / 1e9:.0f} GB/s"
