"""Measure one problem: every engine that accepts it and every peer that takes it, verified, then timed in turn.

Records are made with a second process for verifying (`verifier`). After a float64 reference in the same process torch's
5x5 filter of 1024x2048 takes 15 ms, rather than the 33 of a program that only filters: the reference seems to leave
holes in the heap, whose pages are already there, and torch's buffers to fall into them.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from .. import functional
from ..device import Device
from ..engine import UnsupportedProblem
from ..plan import lower, plan_for
from ..problem import Problem
from ..reference import Inputs, allowed_error, error_of, random_inputs
from ..select import Policy, rank
from .peers import PEERS, Peer
from .results import Record, environment
from .timing import race

__all__ = ["measure", "verifier"]

# Products beyond which the definition is not timed: it takes longer than everything else, and its threads come and go,
# after which the system may put two of another contestant's on one core for 8 ms (seen with 5 million on two cores).
_NAIVE_LIMIT = 1_000_000


def verifier() -> Executor:
    """A process for verifying, to be used in a ``with`` statement."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def verify(problem: Problem, device: Device, engines: Sequence[str | None]) -> list[float]:
    """The error of each engine's result against float64; None stands for the engine that openconv chooses."""
    with torch.no_grad():
        inputs = random_inputs(problem)
        return [error_of(problem, _call(problem, inputs, engine, device)(), inputs) for engine in engines]


def measure(
    suite: str, label: str, problem: Problem, device: Device, *, engines: Sequence[str] = (),
    peers: Sequence[Peer] = PEERS, budget: float = 1.0, verifying: Executor | None = None,
) -> Record:  # fmt: skip
    """Verify, by the executor if there is one, and time. A wrong engine is named in ``wrong`` and not timed.

    UnsupportedProblem if none of ``engines`` takes it.
    """
    with torch.no_grad():
        accepted, refusals = rank(lower(problem, device), device, Policy())
        candidates = [c for c in accepted if not engines or c.engine.name in engines]
        if problem.macs > _NAIVE_LIMIT:
            candidates = [c for c in candidates if c.engine.name != "cpu.naive"]
        if not candidates:
            reasons = {r.engine.name: list(r.reasons) for r in refusals if r.engine.name in engines}
            if "cpu.naive" in engines:
                reasons["cpu.naive"] = [f"{problem.macs} products; at most {_NAIVE_LIMIT} are timed"]
            raise UnsupportedProblem(problem, reasons)
        names = [c.engine.name for c in candidates]
        forced = [name if c is not accepted[0] else None for c, name in zip(candidates, names, strict=True)]
        check = functools.partial(verify, problem, device, forced)
        errors = dict(zip(names, verifying.submit(check).result() if verifying else check(), strict=True))
        allowed = {c.engine.name: allowed_error(problem, c.traits) for c in candidates}
        wrong = [name for name in names if not errors[name] <= allowed[name]]
        inputs = random_inputs(problem)
        calls: dict[str, Callable[[], object]] = {
            name: _call(problem, inputs, engine, device)
            for name, engine in zip(names, forced, strict=True)
            if name not in wrong
        }
        for peer in peers:
            if peer.refusal(problem) is None:
                calls[peer.name] = peer.prepare(problem, inputs.a, inputs.b)
        timings = race(list(calls.values()), budget=budget * len(calls))
        return Record(
            suite=suite, label=label, problem=str(problem), chosen=names[0],
            seconds={name: asdict(timing) for name, timing in zip(calls, timings, strict=True)},
            predicted={c.engine.name: c.cost for c in candidates}, error=errors, wrong=wrong,
            machine=environment(device),
        )  # fmt: skip


def _call(problem: Problem, inputs: Inputs, engine: str | None, device: Device) -> Callable[[], Any]:
    """What a user would call: the function for a plain forward pass, the plan itself for everything else.

    ``engine`` is None for the one that openconv chooses by itself.
    """
    a, b = inputs.a, inputs.b
    symmetric = all(low == high for low, high in problem.padding)
    if problem.direction == "fprop" and symmetric and problem.epilogue.is_identity:
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[problem.rank - 1]
        padding = tuple(low for low, _ in problem.padding)
        return lambda: function(a, b, None, problem.stride, padding, problem.dilation, problem.groups, engine=engine)
    plan = plan_for(problem, device, Policy(engine=engine))
    return lambda: plan(a, b, inputs.operands)
