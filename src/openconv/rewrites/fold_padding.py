"""cpu.fold_padding, cuda.fold_padding: padding written out, for engines that take none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..device import Device
from ..engine import Engine, engines
from ..problem import Problem
from .base import Part, Piece, Rewrite, Rewritten, Span, Wrapper

__all__ = ["CpuFoldPadding", "CudaFoldPadding", "FoldPadding"]


class FoldPadding(Rewrite):
    """The image copied once into one with a rim of zeros, on which the filter needs no padding.

    dgrad computes the gradient of the larger image and copies the part that is the image's. It is for engines that
    refuse padding and nothing else, as those that read windows as rows of a matrix, and wins where these beat the
    others by more than a copy of x.
    """

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if not any(map(any, problem.padding)):
            yield f"padding is {problem.padding}; wanted some"
        elif not any(_for_padding(e, problem, device) for e in _refusing(engines(device.kind), device)):
            yield f"padding is {problem.padding}; wanted an engine that refuses it and nothing else"
        elif any(_mine(problem, at)[1] < 1 for at in range(problem.rank)):
            yield f"padding is {problem.padding} on {problem.spatial}; wanted windows that see the image"

    def wants(self, engine: Engine, problem: Problem, device: Device) -> bool:
        return not isinstance(engine, Wrapper) and _for_padding(engine, problem, device)

    def parts(self, problem: Problem, way: None) -> list[Part]:
        axes = range(problem.rank)
        inner = problem.with_(spatial=tuple(_needed(problem, at) for at in axes), padding=0)
        mine = [_mine(problem, at) for at in axes]
        both: tuple[Span, ...] = ((0, problem.n, 1), (0, problem.c, 1))
        piece = Piece((*both, *mine), (*both, *((0, count, 1) for _, count, _ in mine)))
        return [Part(inner, ((piece,), None, None))]

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        size = "x".join(map(str, self.work(problem, None).problems[0].spatial))
        return f"padding {problem.padding} written out to {size} pixels"


def _needed(problem: Problem, at: int) -> int:
    """Pixels that windows touch along an axis, those of the padding included."""
    return problem.stride[at] * (problem.out[at] - 1) + problem.dilation[at] * (problem.filter[at] - 1) + 1


def _mine(problem: Problem, at: int) -> Span:
    """Where the image is in the padded one, as far as windows touch it."""
    low = problem.padding[at][0]
    return low, min(problem.spatial[at], _needed(problem, at) - low), 1


_PROBES = tuple(
    Problem.parse(f"fprop n2 c16 h32 w32 k16 {taps} pad2 {dtype} {layout}")
    for taps in ("r1 s1", "r4 s4 stride4")
    for dtype in ("f32", "f16")
    for layout in ("nchw", "nhwc")
)


@lru_cache(maxsize=64)
def _refusing(registry: tuple[Engine, ...], device: Device) -> tuple[Engine, ...]:
    """The engines that refuse padding at all. Most take it: asking those few keeps the choice of ordinary problems
    quick."""
    return tuple(
        engine
        for engine in registry
        if engine.proven and not isinstance(engine, Wrapper)
        and any(reason.startswith("padding") for probe in _PROBES for reason in engine.refusals(probe, device))
    )  # fmt: skip


def _for_padding(engine: Engine, problem: Problem, device: Device) -> bool:
    """Whether an engine refuses a problem for its padding alone."""
    found = False
    for reason in engine.refusals(problem, device):
        if not reason.startswith("padding"):
            return False
        found = True
    return found


class CpuFoldPadding(FoldPadding):
    """On the CPU."""

    name = "cpu.fold_padding"
    takes_bias = True


class CudaFoldPadding(FoldPadding):
    """On a GPU."""

    name = "cuda.fold_padding"
    device = "cuda"
    takes_epilogue = True
    proven = False
