"""Choose an engine: the quickest expected among those that accept, under a policy. Nothing is timed here.

What an engine is expected to take is what the tuning database says it took; else what it took for the nearest
neighbour in the database, scaled by its predictions for the two; else its prediction. Where some engines of a problem
were measured and others were not, the predictions of the others are scaled by how far off those of the measured ones
were on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..device import Device
from ..engine import Engine, Traits, UnsupportedProblem, engine_named, engines, find_engine
from ..problem import Problem
from .database import Known, lookup
from .policy import Policy

__all__ = ["Candidate", "Refusal", "choose", "known_of", "rank", "search", "version_of"]


_UNPROVEN = "it is not proven on such a device yet, and runs only where it is named: engine={!r}"


@dataclass(frozen=True)
class Candidate:
    """An engine with knobs that may run the problem.

    ``cost`` is what it predicts, ``measured`` what the tuning database says, and ``expected`` what the choice goes by,
    all in seconds; ``known`` is where the measurement came from.
    """

    engine: Engine
    knobs: Any
    cost: float
    workspace: int
    traits: Traits
    measured: float | None = None
    scaled: float | None = None
    known: Known | None = None

    @property
    def expected(self) -> float:
        """Seconds that the choice goes by."""
        if self.measured is not None:
            return self.measured
        return self.cost if self.scaled is None else self.scaled

    @property
    def source(self) -> str:
        """Where that comes from: ``database``, ``neighbour`` or ``heuristic``."""
        if self.known is None:
            return "heuristic"
        return "neighbour" if self.known.distance else "database"


@dataclass(frozen=True)
class Refusal:
    """An engine that may not run the problem, and why."""

    engine: Engine
    reasons: tuple[str, ...]


def rank(
    problem: Problem, device: Device, policy: Policy, *, without: str = ""
) -> tuple[list[Candidate], list[Refusal]]:
    """All engines of the device: those that may run, quickest first, and those that may not. ``without`` names one that
    is passed over."""
    accepted: list[Candidate] = []
    refused: list[Refusal] = []
    known = known_of(problem, device, policy)
    names = _forced(policy)
    for engine in engines(device.kind):
        if engine.name == without:
            continue
        found: Candidate | Refusal = Refusal(engine, (_UNPROVEN.format(engine.name),))
        if engine.proven or engine.name in names:
            found = _admit(engine, problem, device, policy, known)
        if isinstance(found, Candidate):
            accepted.append(found)
        else:
            refused.append(found)
    if known is not None:
        accepted = _scaled(accepted)
    if names:
        order = {name: at for at, name in enumerate(names)}
        if not policy.engine or not policy.engine.endswith(","):
            refused += [Refusal(c.engine, (f"engine is forced to {policy.engine}",)) for c in accepted
                        if c.engine.name not in order]  # fmt: skip
            accepted = [c for c in accepted if c.engine.name in order]
        accepted.sort(key=lambda c: (order.get(c.engine.name, len(order)), c.expected))
    else:
        accepted.sort(key=lambda c: c.expected)
    if policy.batch_invariant and problem.n > 1 and problem.direction != "wgrad":
        # Engines differ in their last bits: which one runs must not depend on the batch either.
        alone = rank(problem.with_(n=1), device, policy, without=without)[0]
        places = {candidate.engine.name: at for at, candidate in enumerate(alone)}
        accepted.sort(key=lambda c: places.get(c.engine.name, len(places)))
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


def search(problem: Problem, device: Device, policy: Policy) -> list[Candidate]:
    """Every engine with every set of its knobs that the policy allows, the cheapest prediction first: what a tuner may
    measure. Of each engine the default knobs come before others of the same prediction. Engines whose time follows from
    the values of a filter are left out unless they are named."""
    found: list[Candidate] = []
    names = _forced(policy)
    for engine in engines(device.kind):
        wanted = engine.name in names or (engine.proven and not engine.by_values)
        if not wanted or next(_refusals(engine, problem, device), None):
            continue
        texts: set[str] = set()
        for candidate, broken in _settings(engine, problem, device, policy):
            if not broken and str(candidate.knobs) not in texts:
                texts.add(str(candidate.knobs))
                found.append(candidate)
    if names:
        named = [c for c in found if c.engine.name in names]
        found = named if named or not str(policy.engine).endswith(",") else found
    return sorted(found, key=lambda c: c.cost)


def known_of(problem: Problem, device: Device, policy: Policy) -> Known | None:
    """What the tuning databases know that bears on a problem, unless the policy leaves them out."""
    if policy.tuning == "off":
        return None
    return lookup(problem, device, version_of)


def version_of(name: str) -> str | None:
    """The version of an engine's code; None of an engine that is not here."""
    engine = find_engine(name)
    return engine.version if engine else None


def _settings(
    engine: Engine, problem: Problem, device: Device, policy: Policy
) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
    """The engine with each set of its knobs, and the limits that it does not keep."""
    for knobs in engine.knobs(problem, device):
        traits = engine.traits(problem, knobs)
        workspace = engine.workspace_bytes(problem, device, knobs)
        candidate = Candidate(engine, knobs, engine.cost(problem, device, knobs), workspace, traits)
        yield candidate, tuple(_broken(traits, workspace, policy))


def _refusals(engine: Engine, problem: Problem, device: Device) -> Iterator[str]:
    """The engine's own, behind that of an engine which computes no more than a pass and its epilogue."""
    if problem.is_fused and not engine.takes_fusion:
        yield f"'{problem.fusion}' is fused; it computes neither a prologue nor other results than one"
    yield from engine.refusals(problem, device)


def _admit(
    engine: Engine, problem: Problem, device: Device, policy: Policy, known: Known | None
) -> Candidate | Refusal:
    """The engine with its best knobs within the limits, or why there are none.

    Knobs that were measured come first. Of the others the default is taken if it fits, so that a choice without limits
    costs O(1), else the cheapest.
    """
    reasons = tuple(_refusals(engine, problem, device))
    if reasons:
        return Refusal(engine, reasons)
    if known is not None and (measured := _measured(engine, problem, device, policy, known)):
        return measured
    first: tuple[str, ...] = ()
    fitting: list[Candidate] = []
    for at, (candidate, broken) in enumerate(_settings(engine, problem, device, policy)):
        if not broken:
            fitting.append(candidate)
            if at == 0:
                break
        first = first or broken
    return min(fitting, key=lambda c: c.cost) if fitting else Refusal(engine, first)


def _measured(engine: Engine, problem: Problem, device: Device, policy: Policy, known: Known) -> Candidate | None:
    """The engine with the quickest knobs that are known and allowed; None if there are none.

    A neighbour's knobs are those at the same place of the engine's list, since their values follow the sizes.
    """
    times = known.seconds(engine.name, engine.version)
    if not times:
        return None
    ours = _settings(engine, problem, device, policy)
    fitting: list[Candidate] = []
    if known.distance:
        other = Problem.parse(known.problem)
        for (candidate, broken), knobs in zip(ours, engine.knobs(other, device), strict=False):
            if (took := times.get(str(knobs))) and not broken and candidate.knobs.like(knobs):
                cost = engine.cost(other, device, knobs)
                fitting.append(replace(candidate, known=known, scaled=candidate.cost * took / cost))
    else:
        for candidate, broken in ours:
            if (found := times.get(str(candidate.knobs))) and not broken:
                fitting.append(replace(candidate, known=known, measured=found))
    return min(fitting, key=lambda c: c.expected, default=None)


def _scaled(candidates: list[Candidate]) -> list[Candidate]:
    """The predictions of what was not measured brought to the scale of what was."""
    logs = [math.log(c.expected / c.cost) for c in candidates if c.known is not None and c.cost > 0]
    if not logs:
        return candidates
    factor = math.exp(sum(logs) / len(logs))
    return [c if c.known is not None else replace(c, scaled=c.cost * factor) for c in candidates]


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
