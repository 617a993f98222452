"""Copies of tensors with their first and their last axis exchanged: of x and dy, batch and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod

from . import jit
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["Exchanged", "Matrices", "exchanged", "exchanged_back"]

_ROWS, _COLUMNS = 32, 64  # of a block


@dataclass(frozen=True)
class Matrices:
    """A tensor as matrices of ``rows`` by ``columns``, each to be copied as its transpose.

    ``matrices`` counts them along three axes, ``steps`` are from one to the next along these where they are read;
    rows are ``row`` apart there, and elements of a row lie together. Where they are written, ``matrix`` is from one to
    the next, ``column`` from column to column, and elements of a column lie together."""

    rows: int
    columns: int
    matrices: tuple[int, int, int]
    steps: tuple[int, int, int]
    row: int
    matrix: int
    column: int

    @property
    def elements(self) -> int:
        return prod(self.matrices) * self.rows * self.columns

    @property
    def tiles(self) -> tuple[int, int]:
        """Of a matrix: down, and along."""
        return ceil(self.rows / _ROWS), ceil(self.columns / _COLUMNS)

    @property
    def blocks(self) -> int:
        return prod(self.matrices) * prod(self.tiles)

    @property
    def largest(self) -> int:
        """Of the numbers that the kernel has an int for."""
        return max(self.rows, self.columns, self.blocks)


def exchanged(layout: str, first: int, channels: int, sizes: Sequence[int], kept: Sequence[int]) -> Matrices:
    """``first`` times ``channels`` by ``sizes`` in a layout, of which the first ``kept`` along each axis are copied to
    ``channels`` times ``first`` by ``kept`` with the channels last."""
    lead = (1,) * (3 - len(sizes))
    (_, h, w), (kept_d, kept_h, kept_w), pixels = (*lead, *sizes), (*lead, *kept), prod(sizes)
    whole, written = tuple(sizes) == tuple(kept), prod(kept) * first
    if layout == "nhwc":
        steps = h * w * channels, w * channels, channels
        return Matrices(first, channels, (kept_d, kept_h, kept_w), steps, pixels * channels, first, written)
    row = channels * pixels
    if whole:  # channels and pixels are one axis
        return Matrices(first, row, (1, 1, 1), (0, 0, 0), row, 0, first)
    return Matrices(first, kept_w, (channels, kept_d, kept_h), (pixels, h * w, w), row, kept_w * first, first)


def exchanged_back(layout: str, first: int, channels: int, sizes: Sequence[int]) -> Matrices:
    """``first`` times ``channels`` by ``sizes`` with the channels last, copied to ``channels`` times ``first`` by
    ``sizes`` in a layout."""
    if layout == "nhwc":
        return exchanged("nhwc", first, channels, sizes, sizes)
    rows = first * prod(sizes)
    return Matrices(rows, channels, (1, 1, 1), (0, 0, 0), channels, 0, rows)


@dataclass(frozen=True)
class Exchanged:
    """One launch: one or two tensors, of elements of ``size`` bytes."""

    tensors: tuple[Matrices, ...]
    size: int

    @property
    def size_bytes(self) -> tuple[int, ...]:
        """Of the copies."""
        return tuple(each.elements * self.size for each in self.tensors)

    @property
    def grid(self) -> tuple[int]:
        return (sum(each.blocks for each in self.tensors),)

    @property
    def params(self) -> bytes:
        steps, counts = [], []
        for each in self.tensors:
            steps += [each.row, each.matrix, each.column, *each.steps]
            down, along = each.tiles
            counts += [each.rows, each.columns]
            for value in (down, along, *each.matrices[1:]):
                counts += divisor(value)
        return pack(2 * len(self.tensors), steps, (*counts, self.tensors[0].blocks))

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""
        return 2e-6 + 2 * sum(self.size_bytes) / (0.7 * device.bandwidth)

    def launch(self, device: CudaDevice) -> Launch:
        """The kernel: called with where the tensors are, and where their copies go."""
        return Launch(self.source, "exchanged", device, self.grid, (256,), self.params)

    @property
    def source(self) -> jit.Source:
        most = 16 // self.size
        read = [gcd(most, each.columns, each.row, *each.steps) for each in self.tensors]
        written = [gcd(most, each.rows, each.matrix, each.column) for each in self.tensors]
        lines = [
            f"using Element = {({2: 'u16', 4: 'u32'})[self.size]};",
            f"static constexpr int tensors = {len(self.tensors)};",
            f"static constexpr int from_vector[] = {{{', '.join(map(str, read))}}};",
            f"static constexpr int to_vector[] = {{{', '.join(map(str, written))}}};",
        ]
        return jit.Source("exchanged.cu", "struct Traits {\n" + "".join(f"    {line}\n" for line in lines) + "};\n")
