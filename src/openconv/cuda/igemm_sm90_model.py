"""cuda.igemm_sm90, how long a launch takes: tiles, turns and the cycles of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ..problem import DTYPE_BYTES, Problem
from .device import CudaDevice

__all__ = ["FILLED", "Estimate", "cluster_cycles", "moved_bytes", "product_cycles"]

FILLED = 55.0  # bytes a cycle that boxes bring to a multiprocessor, most of them from the second-level cache
_START = 4000.0  # cycles until the first boxes have come
_LAUNCH = 2e-6
_FAST, _SLOW = 1.7e9, 1.53e9  # cycles a second: of short launches, and where power is the limit
_LONG = 100e-6  # what is no short launch


def product_cycles(rows: int, columns: int, promoted: bool = False) -> float:
    """Cycles of the products of a step, 128 bytes of depth: four for each 64 rows. A product of 64 rows takes half as
    many as it has columns, 4096 operations of f16 a cycle and as many bytes of any type, or what shared memory takes to
    give both operands, at 128 bytes a cycle."""
    each = max(columns / 2, (64 + columns) * 32 / 128)
    cycles = 4 * rows / 64 * each * 1.03
    # A step's sums are added up by CUDA cores, each of which does 32 lanes of a warp in a cycle, while products wait.
    return cycles + (rows * columns / 128 + 60 if promoted else 0)


def cluster_cycles(blocks: int, results: int) -> float:
    """Cycles in which the blocks of a cluster add up their sums of a tile: two barriers, and each block's sums on their
    way through the memory of others."""
    return 1500 + 4 * results * (blocks - 1) / blocks / 25 if blocks > 1 else 0.0


def moved_bytes(problem: Problem) -> float:
    """The fewest that memory moves. Of x, what lies between windows is not read."""
    seen = prod(min(1.0, taps / step) for taps, step in zip(problem.filter, problem.stride, strict=True))
    unseen = 0.0 if problem.direction == "dgrad" else 1 - seen
    return problem.min_bytes - unseen * DTYPE_BYTES[problem.dtypes[0]] * prod(problem.x_shape)


@dataclass(frozen=True)
class Estimate:
    """Of one launch: ``tiles`` over ``slots``, of which each multiprocessor has ``residents``; ``steps`` of a tile, and
    what one takes to multiply and to be brought; what a tile's ``results`` take; the ``bytes`` that memory moves."""

    tiles: int
    slots: int
    residents: int
    steps: float
    products: float
    brought: float
    results: float
    bytes: float

    @property
    def turns(self) -> int:
        return ceil(self.tiles / self.slots)

    @property
    def step(self) -> float:
        return max(self.products, self.brought)

    def turn(self, blocks: int) -> float:
        """Cycles of blocks side by side on a multiprocessor: steps take turns, results leave beside another's steps."""
        return max(blocks * self.steps * self.step, self.steps * 280) + self.results

    @property
    def cycles(self) -> float:
        full, rest = divmod(self.tiles, self.slots)
        busy = full * self.turn(self.residents)
        if rest:
            busy += self.turn(ceil(rest / (self.slots // self.residents)))
        return _START + busy

    def seconds(self, device: CudaDevice) -> float:
        busy = self.cycles / _FAST
        if busy > _LONG:
            busy = self.cycles / _SLOW
        memory = 3e-6 + self.bytes / device.bandwidth
        return _LAUNCH + max(busy, memory) + 0.15 * min(busy, memory)

    def reasons(self, device: CudaDevice) -> str:
        """The same in words, for ``explain``."""
        limit = "products" if self.products >= self.brought else "bringing boxes"
        memory, busy = self.bytes / device.bandwidth * 1e6, self.cycles / _FAST * 1e6
        return (
            f"{self.tiles} tiles on {self.slots} places take {self.turns} turns, the last with "
            f"{self.tiles - (self.turns - 1) * self.slots}; {self.steps:.0f} steps of {self.step:.0f} cycles, bound by "
            f"{limit} ({self.products:.0f} to multiply, {self.brought:.0f} to bring); {_START:.0f} cycles to start, "
            f"{self.results:.0f} for results; {busy:.1f} us, and {memory:.1f} us for memory alone"
        )
