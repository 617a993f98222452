"""Compiled: the kernels of a program as steps that run on a list of tensors.

A tensor of the flow has a slot in that list. A step reads slots and fills others, for which it allocates a tensor
unless one is there: outputs that the caller gave, or pieces of the caller's workspace. A slot is emptied behind its
last use, so that torch's allocator can hand the memory on. Steps that are one kernel each run on addresses instead
(:mod:`.addresses`), unless a tensor of the caller's starts where a kernel does not take it.

Nothing here changes once it is made: threads may run it at once, while another plan is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..cpu.memory import LARGE, large_tensor
from ..plan import Plan
from ..tensors import ALL_DTYPES, guards
from .addresses import Addressed, Direct
from .fusion import Kernel
from .ir import GraphTensor, dense_strides

__all__ = ["Compiled", "Maker", "Step", "Values", "in_whole_places", "placed", "put"]

_ALIGNED = 256
_allocate = getattr(guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
Values = list[Any]


@dataclass(eq=False)
class Step:
    """A kernel and how it is run: ``run(values)``. ``plan`` is that of a convolution; ``workspace`` the slot of its
    scratch memory, of so many bytes; ``direct`` the same on addresses, where they are all that it needs."""

    kernel: Kernel
    run: Callable[[Values], None]
    engine: str
    plan: Plan | None = None
    workspace: int | None = None
    workspace_bytes: int = 0
    drop: tuple[int, ...] = ()
    reads: list[GraphTensor] = field(default_factory=list)
    """What it is given: the kernel's inputs, or what these are views of."""
    direct: Direct | None = None
    takes: tuple[int, ...] = ()
    fills: tuple[int, ...] = ()
    """The slots of what it reads and of its results."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """``run(inputs, outputs, workspace)``.

    ``template`` is the list of tensors before a call: constants, and None. ``pieces`` are offset and size in a
    workspace of what lies between steps, ``tensors`` what of it is a tensor of the flow. Outputs have names, slots,
    shape, strides and dtype; those in ``viewed`` are views of something else."""

    steps: list[Step]
    place: torch.device
    inputs: int
    names: list[str]
    template: Values
    pieces: Mapping[int, tuple[int, int]]
    workspace_bytes: int
    tensors: Mapping[int, GraphTensor | None]
    output_slots: list[int]
    output_metas: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    viewed: frozenset[int]
    addressed: Addressed | None
    runs: list[tuple[Callable[[Values], None], tuple[int, ...]]]

    def run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None] | None = None, workspace: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs, in new tensors but for those that are given."""
        addressed = self.addressed
        values: Values = self.template.copy()
        if len(inputs) != self.inputs:
            raise ValueError(f"inputs are {len(inputs)}; wanted {self.inputs}")
        values[: len(inputs)] = inputs  # their slots are the first
        later: list[tuple[int, Tensor]] = []
        if outputs is not None:
            later = self._given(values, inputs, outputs)
        addresses = None if addressed is None else addressed.of(inputs, values)
        base = None
        if workspace is not None:
            pieces = self.pieces if addressed is None or addresses is None else addressed.pieces
            base = self._spread_over(values, workspace, pieces)
        if addressed is None or addresses is None or not addressed.run(values, addresses, base):
            for run, drop in self.runs:
                run(values)
                for slot in drop:
                    values[slot] = None
        made = [values[slot] for slot in self.output_slots]
        for at, tensor in later:
            made[at] = tensor.copy_(made[at])
        return made

    def _given(
        self, values: Values, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> list[tuple[int, Tensor]]:
        """Put the caller's outputs in place; those that lie otherwise, or over an input, are copied to in the end."""
        later = []
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for at, (tensor, (shape, strides, dtype)) in enumerate(zip(outputs, self.output_metas, strict=True)):
            if tensor is None:
                continue
            name = self.names[at]
            if tuple(tensor.shape) != shape or tensor.dtype is not dtype or tensor.device != self.place:
                seen = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise RuntimeError(f"out: {name!r} is given {seen}; wanted {dtype} {shape} on {self.place}")
            own = at not in self.viewed and tensor.untyped_storage().data_ptr() not in taken
            if own and tuple(tensor.stride()) == strides:
                values[self.output_slots[at]] = tensor
            else:
                later.append((at, tensor))
            taken.add(tensor.untyped_storage().data_ptr())
        return later

    def _spread_over(self, values: Values, workspace: Tensor, pieces: Mapping[int, tuple[int, int]]) -> int:
        """Put pieces of the caller's workspace in place; the address that offsets count from."""
        have = workspace.numel() * workspace.element_size()
        if not workspace.is_contiguous() or workspace.device != self.place or have < self.workspace_bytes:
            wanted = f"{self.workspace_bytes} in one piece on {self.place}"
            raise RuntimeError(f"workspace has {have} bytes on {workspace.device}; wanted {wanted}")
        flat = workspace.view(torch.uint8).view(-1)
        start = -flat.data_ptr() % 16
        if start and have < self.workspace_bytes + start:
            raise RuntimeError(f"workspace starts at {flat.data_ptr():#x}; wanted a multiple of 16")
        for slot, (offset, size) in pieces.items():
            piece, tensor = flat[start + offset : start + offset + size], self.tensors[slot]
            if tensor is not None:
                piece = piece.view(ALL_DTYPES[tensor.dtype]).as_strided(
                    tensor.shape, dense_strides(tensor.shape, tensor.layout)
                )
            values[slot] = piece
        return flat.data_ptr() + start


# -- memory -----------------------------------------------------------------------------------------------------------


class Maker:
    """``make()``: a new tensor. On a GPU past the dispatcher, as code that PyTorch compiles does; on the CPU large
    ones lie in memory that is kept for them."""

    __slots__ = ("dtype", "index", "large", "place", "shape", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, place: torch.device
    ) -> None:
        self.shape, self.strides, self.dtype, self.place = shape, strides, dtype, place
        quick = place.type == "cuda" and _allocate is not None and _current_device is not None
        self.index = (place.index or 0) if quick else -1
        self.large = place.type == "cpu" and prod(shape) * dtype.itemsize >= LARGE

    def __call__(self) -> Tensor:
        if self.index >= 0 and _current_device() == self.index:  # type: ignore[misc]
            made: Tensor = _allocate(self.shape, self.strides, self.dtype)  # type: ignore[misc]
            return made
        if self.large:
            return large_tensor(self.shape, self.strides, self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.place)


def put(values: Values, slot: int, value: Tensor, make: Maker, others: Sequence[Tensor] = ()) -> None:
    """A result that was made elsewhere into its slot: as it is if it lies as it should and is none of ``others``, else
    copied."""
    there = values[slot]
    if there is None:
        own = all(value.data_ptr() != other.data_ptr() for other in others)
        if own and tuple(value.stride()) == make.strides and value.dtype is make.dtype:
            values[slot] = value
            return
        there = values[slot] = make()
    there.copy_(value)


def in_whole_places(size: int) -> int:
    """The bytes that a piece of so many takes of a workspace."""
    return -(-size // _ALIGNED) * _ALIGNED


def placed(lives: dict[int, tuple[int, int, int]]) -> tuple[dict[int, tuple[int, int]], int]:
    """An offset for each piece of memory that lives from one step to another, the largest first, each as low as it
    fits; and the bytes of all."""
    found: dict[int, tuple[int, int]] = {}
    total = 0
    for slot, (start, end, size) in sorted(lives.items(), key=lambda item: -item[1][2]):
        room = in_whole_places(size)
        others = sorted(
            (found[other][0], in_whole_places(found[other][1])) for other in found
            if lives[other][0] <= end and start <= lives[other][1]
        )  # fmt: skip
        offset = 0
        for at, taken in others:
            if offset + room <= at:
                break
            offset = max(offset, at + taken)
        found[slot] = offset, size
        total = max(total, offset + room)
    return found, total
