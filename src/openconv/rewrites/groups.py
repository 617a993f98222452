"""cpu.groups, cuda.groups: a convolution in groups as one convolution after the other."""

from __future__ import annotations

from collections.abc import Iterator

from ..device import Device
from ..engine import Engine
from ..problem import Problem
from .base import Part, Piece, Rewrite, Rewritten, Span, refuses

__all__ = ["CpuGroups", "CudaGroups", "Groups"]

_MOST = 64  # a call each


class Groups(Rewrite):
    """Groups one by one, each a convolution of its own channels.

        y[n, group g] = x[n, group g] * w[group g]

    The filters of a group lie together. Its channels do so in one image with its channels first; otherwise they are
    copied out and back. It is for engines that know no groups, and wins where there are few of them with many channels.
    """

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if not 1 < problem.groups <= _MOST:
            yield f"groups is {problem.groups}; wanted 2 to {_MOST}"

    def wants(self, engine: Engine, problem: Problem, device: Device) -> bool:
        return refuses(engine, problem, device)

    def parts(self, problem: Problem, way: None) -> list[Part]:
        c, k = problem.c // problem.groups, problem.k // problem.groups
        inner = problem.with_(c=c, k=k, groups=1)
        results = c if problem.direction == "dgrad" else k

        def piece(shape: tuple[int, ...], axis: int, g: int) -> tuple[Piece]:
            mine: list[Span] = [(0, size, 1) for size in shape]
            whole = list(mine)
            whole[axis] = (g * shape[axis], shape[axis], 1)
            return (Piece(tuple(mine), tuple(whole)),)

        return [
            Part(
                inner,
                (piece(inner.x_shape, 1, g), piece(inner.w_shape, 0, g), piece(inner.y_shape, 1, g)),
                (g * results, results),
            )
            for g in range(problem.groups)
        ]

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        c, k = problem.c // problem.groups, problem.k // problem.groups
        return f"{problem.groups} groups of {c} to {k} channels"


class CpuGroups(Groups):
    """On the CPU."""

    name = "cpu.groups"
    takes_bias = True


class CudaGroups(Groups):
    """On a GPU."""

    name = "cuda.groups"
    device = "cuda"
    takes_epilogue = True
    proven = False
