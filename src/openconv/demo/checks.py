"""The checking part: every engine against PyTorch in float64, over passes, axes, layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..device import Device
from ..engine import engines
from ..plan import lower, plan_for
from ..problem import DIRECTIONS, Problem
from ..reference import Inputs, allowed_error, error_of, random_inputs
from ..select import Candidate, Policy, rank

__all__ = ["EngineCheck", "check_engines", "check_problems"]

# What each kind of layer adds to "n2": few channels, and odd sizes of several vectors, so that both whole tiles and
# ragged ones occur.
_SHAPES = {
    "plain": "c5 k7 f3 pad1",
    "strided": "c6 k4 f3 stride2 pad1",
    "dilated": "c3 k4 f3 dil2 pad2",
    "1x1": "c9 k8 f1",
    "patches": "c3 k8 f4 stride4",
    "padded patches": "c3 k8 f4 stride4 pad2",
    "grouped": "c8 k12 f3 pad1 g4",
    "depthwise": "c6 k6 f3 pad1 g6",
    "strided depthwise": "c6 k6 f5 stride2 pad2 g6",
    "large depthwise": "c3 k3 f11 pad5 g3",
    "one channel": "c1 k1 f5 pad2",
    "epilogue": "c4 k4 f3 pad1 +bias+relu",
}
_QUICK = ("plain", "dilated", "padded patches", "1x1", "patches", "depthwise", "one channel")
_SIZES = {1: "w301", 2: "h27 w131", 3: "d6 h7 w37"}
_TAPS = {1: ("s",), 2: ("r", "s"), 3: ("t", "r", "s")}


def check_problems(quick: bool = False, kind: str = "cpu") -> Iterator[Problem]:
    """A few hundred small problems; with ``quick`` the most common shapes, of two axes, in f32. On a GPU, where each
    has kernels of its own to compile, those of two axes in f32 and f16."""
    dtypes = ("f32", "f64", "f16", "bf16", "complex64") if kind == "cpu" else ("f32", "f16")
    for name, shape in _SHAPES.items():
        if quick and name not in _QUICK:
            continue
        for direction in DIRECTIONS:
            if direction == "wgrad" and "+" in shape:
                continue
            for rank_ in (2,) if quick or kind == "cuda" else (1, 2, 3):
                for layout in ("nchw", "nhwc") if rank_ > 1 else ("nchw",):
                    # Other dtypes share kernels across axes: two axes are enough for them.
                    for dtype in ("f32",) if quick or rank_ != 2 else dtypes:
                        if dtype != "complex64" or "relu" not in shape:
                            yield _problem(direction, shape, rank_, dtype, layout)


def _problem(direction: str, shape: str, rank_: int, dtype: str, layout: str) -> Problem:
    words: list[str] = []
    for word in shape.split():
        words += [axis + word[1:] for axis in _TAPS[rank_]] if word.startswith("f") else [word]
    return Problem.parse(" ".join([direction, "n2", _SIZES[rank_], *words, dtype, layout]))


@dataclass
class EngineCheck:
    """One engine's account: how many problems it took, the worst share of its allowed error, and what went wrong.

    The worst share is over problems without a cast: rounding a result to f16 takes up all that it is allowed.
    """

    name: str
    summary: str
    taken: int = 0
    refused: int = 0
    worst: float = 0.0
    worst_problem: str = ""
    wrong: list[str] = field(default_factory=list)


def check_engines(
    problems: list[Problem], device: Device, advance: Callable[[str], object] = lambda problem: None,
    place: torch.device | str = "cpu",
) -> list[EngineCheck]:  # fmt: skip
    """Run every problem on every engine that takes it. A wrong result and a failure both count as wrong."""
    checks = {e.name: EngineCheck(e.name, e.summary) for e in engines(device.kind)}
    with torch.no_grad():
        for problem in problems:
            advance(str(problem))
            accepted, refused = rank(lower(problem, device), device, Policy())
            for refusal in refused:
                checks[refusal.engine.name].refused += 1
            inputs = random_inputs(problem, device=place)
            for candidate in accepted:
                _check(checks[candidate.engine.name], problem, inputs, device, candidate)
    return list(checks.values())


def _check(check: EngineCheck, problem: Problem, inputs: Inputs, device: Device, candidate: Candidate) -> None:
    check.taken += 1
    try:
        plan = plan_for(problem, device, Policy(engine=check.name))
        made = plan(inputs.a, inputs.b, inputs.operands)
        error = error_of(problem, made, inputs, plain_sum=candidate.traits.plain_sum)
    except Exception as failure:  # a crash is a finding like a wrong number, and must not hide the others
        check.wrong.append(f"{problem}: {type(failure).__name__}: {failure}")
        return
    share = error / allowed_error(problem, candidate.traits)
    if share >= check.worst and lower(problem, device).dtypes == problem.dtypes:
        check.worst, check.worst_problem = share, str(problem)
    if not share <= 1:
        check.wrong.append(f"{problem}: {share:.1f} times the allowed error")
