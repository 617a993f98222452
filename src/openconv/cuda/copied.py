"""Rewrites whose one problem has tensors of its own, which kernels copy to the workspace, and its result from there.
Those that are not copied are read and written where they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Runner
from ..problem import Problem
from ..rewrites.base import Part, Rewrite, Rewritten, named, runner_of
from ..tensors import DTYPES, empty
from ..units import bytes_text, seconds_text
from . import jit
from .device import CudaDevice
from .launch import aligned

__all__ = ["Copied", "Copy", "Move", "Moves"]

_ALIGN = 256


class Copy(Protocol):
    """A kernel that copies tensors."""

    @property
    def size_bytes(self) -> tuple[int, ...]:
        """Of each copy."""

    @property
    def source(self) -> jit.Source:
        """The kernel."""

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""

    def launch(self, device: CudaDevice) -> Callable[..., None]:
        """The kernel: called with where the tensors are, then with where their copies go."""


@dataclass(frozen=True)
class Move:
    """One launch, and the places of what it copies among a runner's tensors: both inputs, then the epilogue's operands.
    ``told`` has a phrase for each, for ``explain``."""

    copy: Copy
    at: tuple[int, ...]
    told: tuple[str, ...]


@dataclass(frozen=True)
class Moves:
    """What is copied before the engine inside runs, and its result behind it, unless that goes to its place."""

    there: tuple[Move, ...]
    back: Move | None

    @property
    def copies(self) -> list[Copy]:
        """All of them."""
        return [move.copy for move in (*self.there, self.back) if move]


class Copied(Rewrite):
    """One problem inside, on copies."""

    summary = Engine.summary  # that of each class itself

    @abstractmethod
    def inside(self, problem: Problem, way: Any = None) -> Problem:
        """The problem inside."""

    @abstractmethod
    def moves(self, problem: Problem, way: Any = None) -> Moves:
        """What is copied."""

    def seen(self, tensor: Tensor, at: int, problem: Problem, way: Any) -> Tensor:
        """x, w or y, as ``at`` says, as the problem inside has it where it is not copied."""
        return tensor

    def parts(self, problem: Problem, way: Any) -> list[Part]:
        return [Part(self.inside(problem, way), (None, None, None))]

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Rewritten) -> int:
        return _Memory(self, problem, knobs.way).bytes + self._scratch(problem, device, knobs)

    def _scratch(self, problem: Problem, device: Device, knobs: Rewritten) -> int:
        choice = knobs.inner[0]
        return named(choice.engine).workspace_bytes(self.inside(problem, knobs.way), device, choice.knobs)

    def copies(self, problem: Problem, knobs: Rewritten) -> tuple[str, ...]:
        choice = knobs.inner[0]
        made = [told for move in self.moves(problem, knobs.way).there for told in move.told]
        return *made, *named(choice.engine).copies(self.inside(problem, knobs.way), choice.knobs)

    def cost(self, problem: Problem, device: Device, knobs: Rewritten) -> float:
        # Kernels are queued ahead of the GPU: what a call takes the host does not show.
        return sum(self._seconds(problem, device, knobs))

    def _seconds(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[float, float]:
        assert isinstance(device, CudaDevice)
        choice = knobs.inner[0]
        computing = named(choice.engine).cost(self.inside(problem, knobs.way), device, choice.knobs)
        return computing, sum(copy.seconds(device) for copy in self.moves(problem, knobs.way).copies)

    def build(self, problem: Problem, device: Device, knobs: Rewritten) -> Runner:
        assert isinstance(device, CudaDevice)
        way, scratch = knobs.way, self._scratch(problem, device, knobs)
        moves, memory = self.moves(problem, way), _Memory(self, problem, way)
        runner = runner_of(self.inside(problem, way), device, knobs.inner[0])
        launches = [(move.copy.launch(device), move.at) for move in moves.there]
        back = moves.back.copy.launch(device) if moves.back else None
        places, end, takes = memory.places, memory.bytes, named(knobs.inner[0].engine).takes_epilogue
        # Which of x, w and y each input and operand is like; those without a copy are read where they are.
        like = [*problem.inputs, *(problem.result if o.kind == "tensor" else -1 for o in problem.epilogue.operands)]
        copied = {each for move in moves.there for each in move.at}
        kept = [(each, which) for each, which in enumerate(like) if which >= 0 and each not in copied]

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: Any = None) -> None:
            assert workspace is not None, "copies lie in the workspace"
            given = [a, b, *(operands or ())]
            for launch, at in launches:
                taken = [aligned(given[each], 16) for each in at]
                for each in at:
                    given[each] = places[each].of(workspace)
                launch(*[tensor.data_ptr() for tensor in taken], *[given[each].data_ptr() for each in at])
            for each, which in kept:
                given[each] = self.seen(given[each], which, problem, way)
            made = self.seen(out, problem.result, problem, way) if back is None else places[-1].of(workspace)
            free = workspace[end : end + scratch] if scratch else None
            runner(given[0], given[1], made, free, tuple(given[2:]) if takes else None)
            if back is not None:
                whole = aligned(out, 16)
                back(made.data_ptr(), whole.data_ptr())
                if whole is not out:
                    out.copy_(whole)

        return run

    def told(self, problem: Problem, knobs: Rewritten) -> str:
        back = self.moves(problem, knobs.way).back
        return super().told(problem, knobs) + (f", then {' and '.join(back.told)}" if back else "")

    def reasons(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[str, ...]:
        computing, copying = self._seconds(problem, device, knobs)
        inner, choice = self.inside(problem, knobs.way), knobs.inner[0]
        size = bytes_text(sum(sum(copy.size_bytes) for copy in self.moves(problem, knobs.way).copies))
        run = f"{seconds_text(computing)} for {choice.told} on '{inner}'"
        copies = f"{seconds_text(copying)} for {size} of copies"
        return f"{run}, {copies}", *named(choice.engine).reasons(inner, device, choice.knobs)

    def sources(self, problem: Problem, device: Any, knobs: Rewritten) -> list[jit.Source]:
        """The kernels of what is inside, and of the copies."""
        return [
            *super().sources(problem, device, knobs),
            *(copy.source for copy in self.moves(problem, knobs.way).copies),
        ]


@dataclass(frozen=True)
class _Place:
    """A tensor in the workspace."""

    start: int
    bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, workspace: Tensor) -> Tensor:
        flat = workspace[self.start : self.start + self.bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


class _Memory:
    """The workspace: copies of the inputs, of operands and of the result, as far as there are any, each from a multiple
    of 256 bytes on (``places``, of all of these); behind them is what the engine inside needs."""

    def __init__(self, rewrite: Copied, problem: Problem, way: Any) -> None:
        inner, moves = rewrite.inside(problem, way), rewrite.moves(problem, way)
        shapes = inner.x_shape, inner.w_shape, inner.y_shape
        tensors: list[tuple[int, Sequence[int]]] = [(at, shapes[at]) for at in inner.inputs]
        for operand in problem.epilogue.operands:
            one = operand.kind == "channel"
            tensors.append((inner.result, (inner.result_channels,) if one else inner.result_shape))
        tensors.append((inner.result, inner.result_shape))
        last = len(tensors) - 1
        copied = {each for move in moves.there for each in move.at} | ({last} if moves.back else set())
        self.bytes = 0
        self.places: list[_Place] = []
        for each, (at, shape) in enumerate(tensors):
            dtype = DTYPES[inner.dtypes[at]]
            size = prod(shape) * dtype.itemsize if each in copied else 0
            whole = empty(shape, dtype, inner.layouts[at], torch.device("meta"))
            self.places.append(_Place(self.bytes, size, tuple(shape), whole.stride(), dtype))
            self.bytes += ceil(size / _ALIGN) * _ALIGN
