"""Rewrites whose one problem has tensors of its own, which kernels copy to the workspace, and its result from there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from ..device import Device
from ..engine import Runner
from ..problem import Problem
from ..rewrites.base import Part, Rewrite, Rewritten, named, runner_of
from ..tensors import DTYPES, empty
from . import jit
from .device import CudaDevice
from .launch import aligned

__all__ = ["Copied", "Copy", "Moves"]

_META = torch.device("meta")


class Copy(Protocol):
    """A tensor copied by a kernel of its own."""

    @property
    def size_bytes(self) -> int:
        """Of the copy."""

    @property
    def told(self) -> str:
        """For ``explain``: "copy x, 4096x45 as 4096x48"."""

    @property
    def source(self) -> jit.Source:
        """The kernel."""

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time."""

    def launch(self, device: CudaDevice) -> Callable[[int, int], None]:
        """The kernel: called with where the tensor is, and where its copy goes."""


@dataclass(frozen=True)
class Moves:
    """The copies of both inputs, in the order of a runner, of the epilogue's operands, and of the result from where the
    engine inside leaves it. None for what is used where it is."""

    inputs: tuple[Copy | None, Copy | None]
    operands: tuple[Copy | None, ...]
    result: Copy | None

    @property
    def every(self) -> list[Copy]:
        """Those there are."""
        return [copy for copy in (*self.inputs, *self.operands, self.result) if copy]


class Copied(Rewrite):
    """One problem inside, on copies."""

    @abstractmethod
    def inside(self, problem: Problem) -> Problem:
        """The problem inside."""

    @abstractmethod
    def moves(self, problem: Problem) -> Moves:
        """What is copied."""

    def parts(self, problem: Problem, way: None) -> list[Part]:
        return [Part(self.inside(problem), (None, None, None))]

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Rewritten) -> int:
        inner, choice = self.inside(problem), knobs.inner[0]
        return _Memory(self, problem).bytes + named(choice.engine).workspace_bytes(inner, device, choice.knobs)

    def copies(self, problem: Problem, knobs: Rewritten) -> tuple[str, ...]:
        engine = named(knobs.inner[0].engine)
        made = [copy.told for copy in self.moves(problem).every]
        return *made, *engine.copies(self.inside(problem), knobs.inner[0].knobs)

    def _seconds(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[float, float]:
        assert isinstance(device, CudaDevice)
        choice = knobs.inner[0]
        computing = named(choice.engine).cost(self.inside(problem), device, choice.knobs)
        return computing, sum(copy.seconds(device) for copy in self.moves(problem).every)

    def build(self, problem: Problem, device: Device, knobs: Rewritten) -> Runner:
        assert isinstance(device, CudaDevice)
        inner, choice, moves, memory = self.inside(problem), knobs.inner[0], self.moves(problem), _Memory(self, problem)
        runner = runner_of(inner, device, choice)
        scratch = named(choice.engine).workspace_bytes(inner, device, choice.knobs)
        launches = [copy.launch(device) if copy else None for copy in (*moves.inputs, *moves.operands)]
        back = moves.result.launch(device) if moves.result else None

        def run(
            a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...] | None
        ) -> None:
            given = [a, b, *(operands or ())]
            for at, launch in enumerate(launches):
                if launch is not None:
                    assert workspace is not None, "copies lie in the workspace"
                    taken = aligned(given[at], 16)
                    given[at] = memory.places[at].of(workspace)
                    launch(taken.data_ptr(), given[at].data_ptr())
            made = out
            if back is not None:
                assert workspace is not None, "the result that is copied lies in the workspace"
                made = memory.places[-1].of(workspace)
            free = workspace[memory.bytes :] if workspace is not None and scratch else None
            runner(given[0], given[1], made, free, None if operands is None else tuple(given[2:]))
            if back is not None:
                whole = aligned(out, 16)
                back(made.data_ptr(), whole.data_ptr())
                if whole is not out:
                    out.copy_(whole)

        return run

    def reasons(self, problem: Problem, device: Device, knobs: Rewritten) -> tuple[str, ...]:
        assert isinstance(device, CudaDevice)
        computing, copying = self._seconds(problem, device, knobs)
        run = f"{computing * 1e6:.1f} us for {knobs.inner[0].told} on '{self.inside(problem)}'"
        return (f"{run}, {copying * 1e6:.1f} us for {len(self.moves(problem).every)} copies",)

    def sources(self, problem: Problem, device: Any, knobs: Rewritten) -> list[jit.Source]:
        """The kernels of what is inside, and of the copies."""
        found = {copy.source: None for copy in self.moves(problem).every}
        return [*super().sources(problem, device, knobs), *found]


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
    """The workspace: the copies of inputs, operands and result (``places``), each from a multiple of 256 bytes on, and
    behind them what the engine inside needs."""

    def __init__(self, rewrite: Copied, problem: Problem) -> None:
        inner, moves = rewrite.inside(problem), rewrite.moves(problem)
        shapes = inner.x_shape, inner.w_shape, inner.y_shape
        self.bytes, self.places = 0, []
        copied: list[tuple[Copy | None, int, Sequence[int]]] = [
            (copy, at, shapes[at]) for copy, at in zip(moves.inputs, inner.inputs, strict=True)
        ]
        result = inner.result
        for copy, operand in zip(moves.operands, problem.epilogue.operands, strict=True):
            vector = operand.kind == "channel"
            copied.append((copy, result, (inner.result_channels,) if vector else inner.result_shape))
        copied.append((moves.result, result, inner.result_shape))
        for copy, at, shape in copied:
            dtype = DTYPES[inner.dtypes[at]]
            size = dtype.itemsize * torch.Size(shape).numel() if copy else 0
            strides = (1,) if len(shape) == 1 else empty(shape, dtype, inner.layouts[at], _META).stride()
            self.places.append(_Place(self.bytes, size, tuple(shape), strides, dtype))
            self.bytes += ceil(size / 256) * 256
