"""Which engines can be traced, and the way from a problem, an engine's name and knobs to a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..cuda.device import CudaDevice
from ..cuda.igemm_sm90_halo import Halo
from ..engine import Engine, engine_named
from ..problem import Problem
from . import halo, igemm, im2col, naive, tiled, winograd
from .model import Trace

__all__ = ["TRACERS", "Tracer", "knobs_named", "reasons_against", "search_space", "trace_engine"]

_MOST_PRODUCTS = 1 << 23
_MOST_SIDE = 128


@dataclass(frozen=True)
class Tracer:
    """How an engine is traced: what its algorithm is called, and the function that does it."""

    engine: str
    label: str
    trace: Callable[[Problem, CudaDevice, Any], Trace]
    refuses: Callable[[Problem], Iterable[str]] = lambda problem: ()
    knobs: type = object
    """Of an engine with several variants, the knobs of the one that is traced."""


TRACERS: dict[str, Tracer] = {
    tracer.engine: tracer
    for tracer in (
        Tracer("cuda.naive", "direct", naive.trace),
        Tracer("cuda.im2col_gemm", "im2col and GEMM", im2col.trace),
        Tracer("cuda.tiled", "tiled", tiled.trace),
        Tracer("cuda.igemm", "implicit GEMM", igemm.trace),
        Tracer("cuda.igemm_sm90", "halo", halo.trace, halo.refusals, Halo),
        Tracer("cuda.winograd", "Winograd", winograd.trace),
    )
}


def _tracer(name: str) -> tuple[Engine, Tracer]:
    engine = engine_named(name)
    if name not in TRACERS:
        raise ValueError(f"there is no trace of {name}; wanted one of {', '.join(TRACERS)}")
    return engine, TRACERS[name]


def reasons_against(problem: Problem, name: str, device: CudaDevice) -> list[str]:
    """Why an engine does not take a problem, or why it cannot be drawn; nothing if it can."""
    engine, tracer = _tracer(name)
    if problem.is_fused or not problem.epilogue.is_identity:
        return [
            f"'{problem.fusion}' is computed beside the products; a trace is of the convolution alone: leave it out"
        ]
    if problem.is_empty:
        return [f"'{problem}' has an empty tensor; there is nothing to trace"]
    if problem.macs > _MOST_PRODUCTS or max(*problem.spatial, *problem.out) > _MOST_SIDE:
        sides = " x ".join(str(size) for size in problem.spatial)
        found = f"'{problem}' has {problem.macs} products and an image of {sides}"
        return [f"{found}; a trace takes up to {_MOST_PRODUCTS} products and {_MOST_SIDE} places along an axis"]
    return list(engine.refusals(problem, device)) or list(tracer.refuses(problem))


def search_space(problem: Problem, name: str, device: CudaDevice) -> list[Any]:
    """The knobs that the engine would try, the default first."""
    engine, tracer = _tracer(name)
    return [knobs for knobs in engine.knobs(problem, device) if isinstance(knobs, tracer.knobs)]


def knobs_named(text: str, space: Iterable[Any]) -> Any:
    """The first knobs of a search space that have all of the given values, as ``rows=1 filters=2``."""
    wanted, known = set(text.replace(",", " ").split()), list(space)
    for knobs in known:
        if wanted <= set(str(knobs).split()):
            return knobs
    some = "; ".join(str(knobs) for knobs in known[:12])
    raise ValueError(f"knobs are {text!r}, which the engine does not try for this problem; it has {some}")


def trace_engine(problem: Problem, name: str, device: CudaDevice, knobs: Any | str | None = None) -> Trace:
    """The trace of an engine on a problem, with the default knobs or others of its search space. ValueError says why
    there is none."""
    _, tracer = _tracer(name)
    if reasons := reasons_against(problem, name, device):
        raise ValueError(f"{name} does not take '{problem}': {'; '.join(reasons)}")
    space = search_space(problem, name, device)
    if not space:
        raise ValueError(f"{name} has no knobs for '{problem}' in the variant that is traced, {tracer.label}")
    if isinstance(knobs, str):
        knobs = knobs_named(knobs, space)
    chosen: Any = space[0] if knobs is None else knobs
    if name == "cuda.winograd" and (reasons := list(winograd.refusals(problem, chosen))):
        raise ValueError(f"{name} does not take '{problem}': {'; '.join(reasons)}")
    return tracer.trace(problem, device, chosen)
