"""Choose an engine: the cheapest predicted cost among those that accept, under a policy. Nothing is timed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..device import Device
from ..engine import Engine, Traits, UnsupportedProblem, engine_named, engines
from ..problem import Problem
from .policy import Policy

__all__ = ["Candidate", "Refusal", "choose", "rank"]


@dataclass(frozen=True)
class Candidate:
    """An engine with knobs that may run the problem."""

    engine: Engine
    knobs: Any
    cost: float
    workspace: int
    traits: Traits


@dataclass(frozen=True)
class Refusal:
    """An engine that may not run the problem, and why."""

    engine: Engine
    reasons: tuple[str, ...]


def rank(problem: Problem, device: Device, policy: Policy) -> tuple[list[Candidate], list[Refusal]]:
    """All engines of the device: those that may run, cheapest first, and those that may not."""
    accepted: list[Candidate] = []
    refused: list[Refusal] = []
    for engine in engines():
        if engine.device != device.kind:
            continue
        found = _admit(engine, problem, device, policy)
        if isinstance(found, Candidate):
            accepted.append(found)
        else:
            refused.append(found)
    names = _forced(policy)
    if names:
        order = {name: at for at, name in enumerate(names)}
        if not policy.engine or not policy.engine.endswith(","):
            refused += [Refusal(c.engine, (f"engine is forced to {policy.engine}",)) for c in accepted
                        if c.engine.name not in order]  # fmt: skip
            accepted = [c for c in accepted if c.engine.name in order]
        accepted.sort(key=lambda c: (order.get(c.engine.name, len(order)), c.cost))
    else:
        accepted.sort(key=lambda c: c.cost)
    return accepted, refused


def choose(problem: Problem, device: Device, policy: Policy) -> Candidate:
    """The best candidate; UnsupportedProblem with every engine's reasons if there is none."""
    accepted, refused = rank(problem, device, policy)
    if not accepted and not refused:
        raise UnsupportedProblem(
            problem, {device.kind: ["no engine runs on this device yet; move the tensors to the CPU"]}
        )
    if not accepted:
        raise UnsupportedProblem(problem, {r.engine.name: list(r.reasons) for r in refused})
    return accepted[0]


def _forced(policy: Policy) -> list[str]:
    names = [name.strip() for name in (policy.engine or "").split(",") if name.strip()]
    for name in names:
        engine_named(name)
    return names


def _admit(engine: Engine, problem: Problem, device: Device, policy: Policy) -> Candidate | Refusal:
    """The engine with its cheapest knobs within the limits, or why there are none.

    The default knobs are tried first and taken if they fit, so that a choice without limits costs O(1).
    """
    reasons = tuple(engine.refusals(problem, device))
    if reasons:
        return Refusal(engine, reasons)
    first: tuple[str, ...] = ()
    fitting: list[Candidate] = []
    for at, knobs in enumerate(engine.knobs(problem, device)):
        traits = engine.traits(problem, knobs)
        workspace = engine.workspace_bytes(problem, device, knobs)
        broken = tuple(_broken(traits, workspace, policy))
        if not broken:
            fitting.append(Candidate(engine, knobs, engine.cost(problem, device, knobs), workspace, traits))
            if at == 0:
                break
        first = first or broken
    return min(fitting, key=lambda c: c.cost) if fitting else Refusal(engine, first)


def _broken(traits: Traits, workspace: int, policy: Policy) -> list[str]:
    """The limits of the policy that are not kept."""
    limit = policy.max_workspace
    checks = (
        (limit is not None and workspace > limit, f"workspace is {workspace} bytes; max_workspace is {limit}"),
        (policy.deterministic and not traits.deterministic, "not deterministic; the policy asks for it"),
        (policy.batch_invariant and not traits.batch_invariant, "not batch-invariant; the policy asks for it"),
        (policy.accuracy == "strict" and not traits.plain_sum, "no plain sum of products; accuracy is strict"),
    )
    return [text for bad, text in checks if bad]
