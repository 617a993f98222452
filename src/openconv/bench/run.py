"""Measure one problem: every engine that accepts it and every peer that takes it, verified, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .. import functional
from ..device import Device
from ..plan import lower, plan_for
from ..problem import Problem
from ..reference import Inputs, allowed_error, error_of, random_inputs
from ..select import Policy, rank
from .peers import PEERS, Peer
from .results import Record, environment
from .timing import race

__all__ = ["measure"]

# Products beyond which the definition is not timed: it takes longer than everything else, and its threads come and go,
# after which the system may put two of another contestant's on one core for 8 ms (seen with 5 million on two cores).
_NAIVE_LIMIT = 1_000_000


def measure(
    suite: str, label: str, problem: Problem, device: Device, *, engines: Sequence[str] = (),
    peers: Sequence[Peer] = PEERS, budget: float = 1.0,
) -> Record:  # fmt: skip
    """Verify and time. An engine with a wrong result is named in ``wrong`` and not timed."""
    with torch.no_grad():
        inputs = random_inputs(problem)
        accepted, _ = rank(lower(problem, device), device, Policy())
        candidates = [c for c in accepted if not engines or c.engine.name in engines]
        if problem.macs > _NAIVE_LIMIT:
            candidates = [c for c in candidates if c.engine.name != "cpu.naive"]
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        wrong: list[str] = []
        for candidate in candidates:
            name = candidate.engine.name
            call = _call(problem, inputs, name if candidate is not accepted[0] else None, device)
            errors[name] = error_of(problem, call(), inputs)
            if errors[name] <= allowed_error(problem, candidate.traits):
                calls[name] = call
            else:
                wrong.append(name)
        for peer in peers:
            if peer.refusal(problem) is None:
                calls[peer.name] = peer.prepare(problem, inputs.a, inputs.b)
        timings = race(list(calls.values()), budget=budget * len(calls))
        return Record(
            suite=suite, label=label, problem=str(problem), chosen=candidates[0].engine.name,
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
