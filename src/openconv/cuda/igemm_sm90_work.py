"""cuda.igemm_sm90, what its variants share: groups of four warps, their registers, a convolution as a product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from math import ceil, gcd, prod
from typing import Any

from ..engine import Knobs
from ..problem import DTYPE_BYTES, Problem
from . import group_product
from .channels_last import Turn, turned_inputs
from .device import CudaDevice
from .launch import TensorMap, pack
from .tf32_pairs import Pairs, paired

__all__ = ["CLUSTERS", "ConvolutionWork", "GroupKnobs", "GroupWork", "factors", "stored"]

_SHARED = 227 << 10  # bytes of a block
_MULTIPROCESSOR = 228 << 10  # of all blocks, with 1024 that each takes besides its own
_SMALL = ("e4m3", "e5m2")
CLUSTERS = (2, 4, 8)
"""Blocks that may share the steps of a tile."""


class GroupKnobs(Knobs):
    """Blocks of ``groups`` that multiply and four warps that copy, ``residents`` of them on a multiprocessor;
    ``cluster`` blocks share the steps of a tile."""

    groups: int
    residents: int
    cluster: int

    @property
    def threads(self) -> int:
        return 128 * self.groups + 128

    @property
    def given(self) -> int:
        """Registers of a thread, before those that copy give up theirs."""
        return 65536 // (self.threads * self.residents) // 8 * 8

    @property
    def registers(self) -> int:
        """Of a thread that multiplies: those that copy keep 40 of theirs."""
        return min(240, (self.given * self.threads - 40 * 128) // (128 * self.groups) // 8 * 8)


class GroupWork(ABC):
    """A problem and knobs as a kernel takes them. ``tiles`` are shared by the blocks that run at a time."""

    entry: str
    problem: Problem
    tile: Any
    tiles: int
    size: int
    first: str
    total: str = "float"
    turned: Turn | None = None
    pairs: Pairs | None = None

    @property
    @abstractmethod
    def shared(self) -> int:
        """Bytes of a block, from a multiple of 1024 on."""

    @property
    @abstractmethod
    def static(self) -> int:
        """Bytes of barriers."""

    @property
    @abstractmethod
    def registers(self) -> int:
        """Of a thread, about."""

    @property
    @abstractmethod
    def sums(self) -> int:
        """Of a thread and product."""

    @cached_property
    def room(self) -> int:
        """Bytes that a block could have besides."""
        return min(_SHARED, _MULTIPROCESSOR // self.tile.residents - 1024) - self.shared - self.static

    @property
    def fits(self) -> bool:
        # The assembler holds one product to what a thread begins with: its sums and 26 more, whatever it gets later.
        tile = self.tile
        return self.room >= 0 and self.registers <= tile.registers and self.sums + 26 <= tile.given

    @property
    def follows(self) -> bool:
        """Whether another kernel copies inputs before it."""
        return self.turned is not None or self.pairs is not None or any(turned_inputs(self.problem))

    def slots(self, device: CudaDevice) -> int:
        """Tiles that can be at work at a time. Clusters do not reach across the groups that multiprocessors come in,
        which are not all alike: an H200 with 132 runs 66 of two blocks at a time, 30 of four, 15 of eight."""
        every, blocks = device.threads * int(self.tile.residents), int(self.tile.cluster)
        return every // blocks if blocks <= 2 else max(1, every * 11 // 12 // blocks)

    def blocks(self, device: CudaDevice) -> int:
        """As many as run at a time, at most one for each tile, or a cluster."""
        return min(self.tiles, self.slots(device)) * int(self.tile.cluster)

    # What igemm_sum.cu adds the splits of a tile up with.

    @property
    def _row(self) -> tuple[int, int, int]:
        """Of the result: elements of a row, channels, and pixels of an image."""
        channels = self.problem.result_channels
        return channels, channels, prod(self.problem.result_shape[2:])

    @property
    def sum_together(self) -> int:
        """Sums of a thread."""
        return gcd(4, self._row[1])

    @property
    def sum_rows(self) -> int:
        return 8 if self.tile.splits > 8 else 1

    @property
    def sum_params(self) -> bytes:
        problem, (row, channels, plane) = self.problem, self._row
        pointers = 2 + max(1, len(problem.epilogue.operands))
        return pack(pointers, (prod(problem.result_shape), plane), (self.tile.splits, row, channels))


def factors(problem: Problem) -> tuple[str, str]:
    """The kinds of both factors, as products name them; the first is that of images."""
    a, b = (problem.dtypes[at] for at in problem.inputs)
    return ("tf32", "tf32") if a == "f32" else (a, b)


def stored(problem: Problem) -> Problem:
    """The problem with small floats as the bytes that they lie in memory as."""
    x, w, y = ("u8" if name in _SMALL else name for name in problem.dtypes)
    return problem.with_(dtypes=(x, w, y))


class ConvolutionWork(GroupWork):
    """A fprop or dgrad: a step is ``depth`` channels of the input, of which a group has ``depth_channels``."""

    def __init__(self, problem: Problem, tile: Any) -> None:
        self.problem, self.tile = problem, tile
        self.first, self.second = factors(problem)
        self.size = DTYPE_BYTES[problem.dtypes[problem.inputs[0]]]
        self.depth = 128 // self.size
        self.fprop, groups = problem.direction == "fprop", problem.groups
        self.pairs = paired(problem)
        c, k = problem.c // groups, problem.k // groups
        self.depth_channels, self.out_channels = (c, k) if self.fprop else (k, c)
        self.chunks = ceil(self.depth_channels / self.depth)
        self.channel_tiles = ceil(self.out_channels / tile.channels)
        self.parted = tile.splits > 1
        self.out = 4 if self.parted else DTYPE_BYTES[problem.result_dtype]
        self.total = "int" if self.first == "i8" else "float"
        kinds = [operand.kind for operand in problem.epilogue.operands]
        self.tensors = [] if self.parted else [at for at, kind in enumerate(kinds) if kind == "tensor"]
        self.vectors = [] if self.parted else [at for at, kind in enumerate(kinds) if kind == "channel"]
        self.also = len(problem.epilogue.also)
        self.pointers = max(1, len(kinds) + self.also)

    @property
    def boxes(self) -> int:
        """Of results, the tensors that lie in their place and other results of the epilogue."""
        return max(1, len(self.tensors)) + self.also

    @property
    def slices(self) -> int:
        """Of a step, 32 bytes of depth each. What a group has no channels for belongs to the next one, or to nobody."""
        return ceil(self.depth_channels * self.size / group_product.DEPTH_BYTES) if self.chunks == 1 else 4

    @property
    def order(self) -> int:
        """How filters lie: along the depth; across it, as products of two bytes take them; or turned beforehand."""
        if self.fprop:
            return 0
        return 1 if self.size == 2 else 2

    @property
    def rounds(self) -> bool:
        """Whether factors are rounded as they come: products would cut their last bits off."""
        return self.first == "tf32" and self.pairs is None

    @property
    def promoted(self) -> bool:
        """Whether a step's sums are added up outside of tensor cores, which would add them in fewer bits."""
        return self.first in _SMALL or self.pairs is not None

    @property
    def halves(self) -> int:
        """Parts of the filter in memory."""
        return 2 if self.pairs else 1

    @property
    def constants(self) -> dict[str, int | bool | str]:
        """Those that kernels have in common."""
        tile = self.tile
        return {
            "D": self.total, "Stored": self.total if self.parted else self.problem.result_dtype,
            "channels": tile.channels, "groups": tile.groups, "blocks": tile.blocks, "residents": tile.residents,
            "cluster": tile.cluster,
            "parted": self.parted, "slices": self.slices, "follows": self.follows,
            "vectors": sum(1 << at for at in self.vectors), "tensors": sum(1 << at for at in self.tensors),
        }  # fmt: skip

    @cached_property
    def filters(self) -> TensorMap:
        size, d, n = self.size, self.depth_channels, self.out_channels
        taps, groups, channels = prod(self.problem.filter), self.problem.groups * self.halves, self.tile.channels
        if self.order == 0:
            return TensorMap(1, (d, taps, n, groups), (d * size, taps * d * size, n * taps * d * size),
                             (self.depth, 1, channels, 1), 128, size, self.rounds)  # fmt: skip
        if self.order == 1:
            return TensorMap(1, (n, taps, d, groups), (n * size, taps * n * size, d * taps * n * size),
                             (64, 1, 64, 1), 128, size)  # fmt: skip
        return TensorMap(1, (d, n, taps, groups), (d * size, n * d * size, taps * n * d * size),
                         (self.depth, channels, 1, 1), 128, size, self.rounds)  # fmt: skip
