"""cuda.igemm_sm90, how long a launch takes: tiles, turns and the cycles of a step. The constants are fitted to what an
NVIDIA H200 takes; docs/hopper/index.md says how well."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ..problem import DTYPE_BYTES, Problem
from .device import CudaDevice

__all__ = [
    "Estimate", "bring_cycles", "cluster_cycles", "moved_bytes", "pair_cycles", "product_cycles", "result_cycles",
    "short_rows", "team_cycles", "wait_cycles",
]  # fmt: skip

_CLOCK = 1.755e9  # cycles a second
_START = 5.1e-6  # of a launch, until its first boxes have come, and of the last results
_BETWEEN = 1.1  # of products, what lies between them
_PORT = 101.0  # bytes a cycle that a multiprocessor takes
_CACHE = 76.0  # and that the second-level cache gives for each multiprocessor, if all ask
_SHORT = 1.3  # cycles of a row that lacks half of its bytes; three times that of one that lacks three quarters
_WAY = 1520.0  # cycles from asking for a box until it has come
_PROMOTED = 156.0  # cycles in which products of a group wait, where sums of a step are added up outside of them
_PAIR = 17.0  # instructions that make a pair of tf32
_ISSUE = 235.0  # cycles, the fewest of a step
_RESULT = 0.05  # cycles of two bytes of results: registers, a box, memory
_SWAPPED = 0.99  # of that, where channels are rows
_APART = 2.9  # of that, where threads store results
_READ = 2.3  # of that, what a tensor or other result of an epilogue takes besides
_PLACE = 2650.0  # cycles that a tensor's box keeps its place: it comes, and results leave from there
_TEAMS = 60.0  # cycles from one team's products to the next one's
_BESIDE = 0.32  # of the shorter of computing and memory, what does not go on beside the longer
_TOLD = 5.5  # bytes a cycle from one block of a cluster to the others
_SECOND = 3.1e-6  # of a second kernel
_STORED = 2.7  # sums that have just been stored come sooner than memory


def product_cycles(rows: int, columns: int, promoted: int = 0, terms: int = 1) -> float:
    """Cycles of the products of a step, 128 bytes of depth: four for each 64 rows. A product of 64 rows takes half as
    many as it has columns, 4096 operations of f16 a cycle and as many bytes of any type, or what shared memory takes to
    give both operands, at 128 bytes a cycle. ``terms`` products may stand for one, and ``promoted`` groups of a
    multiprocessor add a step's sums up outside of them."""
    each = max(columns / 2, (64 + columns) * 32 / 128)
    cycles = 4 * terms * rows / 64 * each * _BETWEEN
    # A group waits for its products before it adds them up; another one's go on meanwhile.
    return cycles + (_PROMOTED / min(2, promoted) if promoted else 0)


def pair_cycles(rows: int, groups: int) -> float:
    """Cycles in which CUDA cores make pairs of a step's rows, 32 values each, of which another group's products hide a
    half."""
    return 32 * _PAIR / 128 * rows / min(2, groups)


def bring_cycles(first: tuple[float, int], second: tuple[float, int], busy: float, short: float = 0.0) -> float:
    """Cycles in which a step's boxes come: for each operand its bytes, and how many tiles side by side read the same.
    The cache gives two neighbours at once what both ask for. ``busy`` is the share of multiprocessors that ask, and
    ``short`` what rows of 128 bytes lack: :func:`short_rows` for each of them."""
    whole = first[0] + second[0]
    apart = sum(bytes_ / min(2, tiles) for bytes_, tiles in (first, second))
    return whole / _PORT + apart * min(1.0, busy) / _CACHE + _SHORT * short


def short_rows(row_bytes: int) -> float:
    """Of rows that come 128 bytes at a time, how many times what there is of the last 128 is missing, shared out among
    all times: zeros that a box is filled up with take longer than bytes."""
    times = ceil(row_bytes / 128)
    return (128 / (row_bytes - 128 * (times - 1)) - 1) / times


def wait_cycles(stages: float, step: float, together: float = 1.0) -> float:
    """The fewest cycles from a block's step to the next: a stage is asked for, comes, and is multiplied, which takes a
    ``step``, before it is asked for again. ``together`` steps share one."""
    return (_WAY / together + step) / stages


def result_cycles(results: float, swapped: bool = False, apart: bool = False, tensors: int = 0) -> float:
    """Cycles behind the last product of a tile, by the pairs of bytes that it has as results."""
    return _RESULT * results * (_SWAPPED if swapped else 1) * (_APART if apart else 1) * (1 + _READ * tensors)


def team_cycles(results: float, products: float, turns: int) -> float:
    """Cycles of a tile's ``results`` that another team's ``products`` do not hide: what is longer than these, shared by
    two tiles, and those of the last tile."""
    return max(_TEAMS, (results - products) / 2) + results / turns


def cluster_cycles(blocks: int, results: int, boxes: int) -> tuple[float, float]:
    """Cycles in which the blocks of a cluster add up their sums of a tile, until those of all others have come to the
    block with the most of the ``boxes``; and the share that this one has."""
    share = ceil(boxes / blocks) / boxes
    return 4 * results * share * (blocks - 1) / _TOLD, share


def moved_bytes(problem: Problem) -> float:
    """The fewest that memory moves. Of x, what lies between windows is not read."""
    seen = prod(min(1.0, taps / step) for taps, step in zip(problem.filter, problem.stride, strict=True))
    unseen = 0.0 if problem.direction == "dgrad" else 1 - seen
    return problem.min_bytes - unseen * DTYPE_BYTES[problem.dtypes[0]] * prod(problem.x_shape)


@dataclass(frozen=True)
class Estimate:
    """Of one launch: ``tiles`` over ``slots``, of which each multiprocessor has ``residents``; ``steps`` of a tile, and
    what one takes to multiply and to be brought; what a tile's ``results`` take; the ``bytes`` that memory moves.

    A block's own steps are ``waits`` cycles apart at least. Boxes of an epilogue's tensors come ``rounds`` times to
    each of their places in a tile. A second kernel moves ``added`` bytes to add up sums."""

    tiles: int
    slots: int
    residents: int
    steps: float
    products: float
    brought: float
    results: float
    bytes: float
    waits: float
    rounds: float = 0.0
    added: float = 0.0

    @property
    def turns(self) -> int:
        return ceil(self.tiles / self.slots)

    @property
    def step(self) -> float:
        """Of a multiprocessor."""
        return max(self.products, self.brought, _ISSUE)

    def turn(self, blocks: int) -> float:
        """Cycles of blocks side by side on a multiprocessor, which take turns with their steps."""
        behind = self.results + _PLACE * max(0.0, self.rounds - 1)
        return max(self.steps * max(blocks * self.step, self.waits) + behind, _PLACE * self.rounds * blocks)

    @property
    def cycles(self) -> float:
        full, rest = divmod(self.tiles, self.slots)
        busy = full * self.turn(self.residents)
        if rest:
            busy += self.turn(ceil(rest / (self.slots // self.residents)))
        return busy

    def _second(self, device: CudaDevice) -> float:
        """What adds up sums."""
        return _SECOND + self.added / (_STORED * device.bandwidth) if self.added else 0.0

    def seconds(self, device: CudaDevice) -> float:
        busy, memory = self.cycles / _CLOCK, self.bytes / device.bandwidth
        return _START + max(busy, memory) + _BESIDE * min(busy, memory) + self._second(device)

    def reasons(self, device: CudaDevice) -> str:
        """The same in words, for ``explain``."""
        limits = {
            "products": self.products, "bringing boxes": self.brought, "what asks for them": _ISSUE,
            "the way to stages": self.waits,
        }  # fmt: skip
        limit = max(limits, key=limits.__getitem__)
        memory, busy = self.bytes / device.bandwidth * 1e6, self.cycles / _CLOCK * 1e6
        added = f", and {self._second(device) * 1e6:.1f} us to add up sums" if self.added else ""
        return (
            f"{self.tiles} tiles on {self.slots} places take {self.turns} turns, the last with "
            f"{self.tiles - (self.turns - 1) * self.slots}; {self.steps:.0f} steps of {limits[limit]:.0f} cycles, "
            f"bound by {limit} ({self.products:.0f} to multiply, {self.brought:.0f} to bring); {self.results:.0f} for "
            f"results; {_START * 1e6:.1f} us to start, {busy:.1f} us for tiles, {memory:.1f} us for memory{added}"
        )
