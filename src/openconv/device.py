"""Device: what the choice of an engine needs to know of the machine, as plain numbers.

The two ceilings, a matrix rate and a copy bandwidth, turn operations and bytes into seconds. They need to be right
relative to each other rather than to the last percent: a choice among engines compares predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Device"]


@dataclass(frozen=True)
class Device:
    """A place where engines run.

    ``kind`` is ``cpu`` or ``cuda``. ``flops`` is the f32 rate of a large matrix product over all ``threads``, and
    ``bandwidth`` the rate of a large copy, bytes read plus bytes written; both per second. ``lanes`` is the number of
    f32 values in a vector register and ``cache_bytes`` the private cache of one core.
    """

    kind: str
    name: str
    threads: int = 1
    lanes: int = 8
    cache_bytes: int = 1 << 20
    flops: float = 100e9
    bandwidth: float = 20e9

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.kind}: {self.name}, {threads}, {self.flops / 1e9:.0f} GFLOP/s, {self.bandwidth / 1e9:.0f} GB/s"
