"""Measure one problem: every engine that accepts it and every peer that takes it, verified, then timed in turn.

On the CPU a second process verifies (:func:`verifier`). After a float64 reference in the same process torch's 5x5
filter of 1024x2048 takes 15 ms, rather than the 33 of a program that only filters: the reference seems to leave holes
in the heap, whose pages are already there, and torch's buffers to fall into them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from .. import functional
from ..device import Device
from ..engine import Traits, UnsupportedProblem
from ..plan import device_of, lower, plan_for
from ..problem import Problem
from ..reference import Inputs, Reference, allowed_error, random_inputs
from ..select import Candidate, Policy, current_policy, rank
from ..units import bytes_text, seconds_text
from .ceilings import ceilings, rate_name, roofline_floor
from .peers import NotTaken, Peer, default_peers, peer_named
from .results import Record, environment
from .timing import Timing, overhead, race, race_cuda

__all__ = ["Limits", "Skipped", "measure", "verifier", "verify"]

# Products beyond which the definition is not timed: it takes longer than everything else, and its threads come and go,
# after which the system may put two of another contestant's on one core for 8 ms (seen with 5 million on two cores).
_NAIVE_LIMIT = 1_000_000
# Sets of inputs that a GPU's contestants take in turn, and the bytes that they may fill together.
_SETS, _SETS_BYTES = 3, 8 << 30


class Skipped(Exception):
    """A problem is left out, and its text says why."""


@dataclass(frozen=True)
class Limits:
    """What takes part, and for how long.

    ``engines``: only these; None for none. ``peers``: these, by name; None for all that usually take part.
    ``budget``: seconds of timing for each contestant. ``longest``: an engine that is predicted to take longer for one
    call is left out, and a problem without one that is quicker is skipped; a peer that turns out to take longer is
    called once. ``overhead``: also measure what a call costs the CPU before it returns.
    """

    engines: Sequence[str] | None = ()
    peers: Sequence[str] | None = None
    budget: float = 0.3
    longest: float = 20.0
    overhead: bool = False


_USUAL = Limits()


@dataclass(frozen=True)
class _Contestant:
    """An engine as it is called: ``engine`` is None for the one that openconv chooses, with the knobs that it chooses;
    ``planned`` asks for the plan with the default knobs rather than for the function that users call."""

    name: str
    engine: str | None
    planned: bool = False

    def call(self, problem: Problem, inputs: Inputs, device: Device) -> Callable[[], Tensor]:
        """What a user would call: the function for a plain forward pass, the plan itself for everything else."""
        a, b = inputs.a, inputs.b
        symmetric = all(low == high for low, high in problem.padding)
        if problem.direction == "fprop" and symmetric and problem.epilogue.is_identity and not self.planned:
            function = (functional.conv1d, functional.conv2d, functional.conv3d)[problem.rank - 1]
            padding = tuple(low for low, _ in problem.padding)
            return partial(
                function, a, b, None, problem.stride, padding, problem.dilation, problem.groups, engine=self.engine
            )
        policy = Policy(engine=self.engine, tuning="off") if self.planned else current_policy().but(engine=self.engine)
        return partial(plan_for(problem, device, policy), a, b, inputs.operands)


@dataclass(frozen=True)
class _Field:
    """The engines that take part in a problem, and what is known of them before anything runs."""

    contestants: list[_Contestant] = field(default_factory=list)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    chosen: str = ""
    heuristic: str = ""
    source: str = "heuristic"
    notes: dict[str, str] = field(default_factory=dict)


# -- who takes part -------------------------------------------------------------------------------------------------


def _field(problem: Problem, device: Device, limits: Limits) -> _Field:
    """Every engine with its default knobs, and the one that openconv chooses, with other knobs if it chose them."""
    if limits.engines is None:
        return _Field()
    core, policy = lower(problem, device), current_policy()
    tuned, refusals = rank(core, device, policy)
    plain, _ = rank(core, device, policy.but(tuning="off"))
    if not tuned:
        if limits.engines:
            raise UnsupportedProblem(problem, {r.engine.name: list(r.reasons) for r in refusals})
        return _Field()
    defaults = {c.engine.name: c for c in plain}
    best = tuned[0]
    chosen = best.engine.name
    if str(best.knobs) != str(defaults[chosen].knobs):
        chosen += f"[{best.knobs}]"
    found = _Field(chosen=chosen, heuristic=plain[0].engine.name, source=best.source)
    known = {c.engine.name: c for c in tuned}
    if chosen not in defaults:
        defaults[chosen] = best
    for name, candidate in defaults.items():
        engine = candidate.engine.name
        if limits.engines and engine not in limits.engines:
            continue
        if engine == "cpu.naive" and problem.macs > _NAIVE_LIMIT:
            found.notes[name] = f"{problem.macs} products; at most {_NAIVE_LIMIT} are timed"
        elif candidate.expected > limits.longest:
            found.notes[name] = (
                f"predicted {seconds_text(candidate.expected)}; at most {limits.longest:g} s are waited for"
            )
        else:
            other_knobs = name != chosen and str(known[engine].knobs) != str(candidate.knobs)
            found.contestants.append(_Contestant(name, None if name == chosen else engine, planned=other_knobs))
            found.candidates[name] = candidate
    if limits.engines and not found.contestants:
        reasons = {r.engine.name: list(r.reasons) for r in refusals if r.engine.name in limits.engines}
        raise UnsupportedProblem(problem, reasons | {name: [why] for name, why in found.notes.items()})
    return found


def _peers(problem: Problem, place: torch.device, limits: Limits, notes: dict[str, str]) -> list[Peer]:
    """The peers that take part; one that was asked for and refuses is noted."""
    if limits.peers is None:
        return list(default_peers(problem, place))
    found = []
    for peer in map(peer_named, limits.peers):
        if (reason := peer.refusal(problem, place)) is None:
            found.append(peer)
        else:
            notes[peer.name] = reason
    return found


# -- verified -------------------------------------------------------------------------------------------------------


def verifier() -> Executor:
    """A process for verifying, to be used in a ``with`` statement."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def verify(
    problem: Problem, place: torch.device, contestants: Sequence[_Contestant], peers: Sequence[str]
) -> dict[str, float]:
    """The error of each contestant's result against float64. A peer that does not run has no entry."""
    with torch.no_grad():
        inputs, device = random_inputs(problem, device=place), device_of(place)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # no search for the reference
            reference = Reference(problem, inputs, place=place)
        errors = {c.name: reference.error(c.call(problem, inputs, device)()) for c in contestants}
        for name in peers:
            try:
                ready = peer_named(name).prepare(problem, [inputs])
                errors[name] = reference.error(ready.result(ready.calls[0]()))
            except (NotTaken, RuntimeError):
                continue
        return errors


def _allowed(problem: Problem, field: _Field, name: str) -> float:
    """The most that a correct result may be off. Of a peer, whose method is its own affair, it is what would make it
    useless: a ten-thousandth, beyond rounding to the result's dtype."""
    if name in field.candidates:
        return allowed_error(problem, field.candidates[name].traits)
    return allowed_error(problem, Traits("", 1e-4))


# -- timed ------------------------------------------------------------------------------------------------------------


def measure(
    suite: str, label: str, problem: Problem, place: torch.device, limits: Limits = _USUAL, *,
    verifying: Executor | None = None, command: str = "",
) -> Record:  # fmt: skip
    """Verify, by the executor if there is one, and time. A wrong contestant is named in ``wrong`` and not timed.

    UnsupportedProblem if none of the engines that were asked for takes it; Skipped if it is too large.
    """
    device = device_of(place)
    found = _field(problem, device, limits)
    _check_size(problem, place, found, limits)
    with torch.no_grad():
        sets = _inputs(problem, place)
        ready = _prepared(problem, place, sets, limits, found.notes)
        usual = {name: peer for name, peer in ready.items() if peer.once is None}
        check = partial(verify, problem, place, found.contestants, list(usual))
        errors = verifying.submit(check).result() if verifying else check()
        wrong = [name for name, error in errors.items() if not error <= _allowed(problem, found, name)]
        calls: _Calls = {c.name: tuple(c.call(problem, inputs, device) for inputs in sets) for c in found.contestants}
        calls |= {name: peer.calls for name, peer in usual.items()}
        calls = {name: those for name, those in calls.items() if name not in wrong}
        if not ready and not found.contestants:
            raise Skipped("nothing runs it" + "".join(f"; {name}: {why}" for name, why in found.notes.items()))
        timings = _race(calls, place, limits)
        timings |= {name: Timing(*[peer.once] * 3) for name, peer in ready.items() if peer.once is not None}
        ceiling = ceilings(place, [rate_name(problem)])
        floor = roofline_floor(problem, ceiling)
        costs = {name: overhead(those[0], place).median for name, those in calls.items()} if limits.overhead else {}
    return Record(
        suite=suite, label=label, problem=str(problem), chosen=found.chosen, heuristic=found.heuristic,
        source=found.source, seconds={name: asdict(timing) for name, timing in timings.items()},
        predicted={name: c.cost for name, c in found.candidates.items()}, error=errors, wrong=wrong,
        knobs={name: str(c.knobs) for name, c in found.candidates.items()},
        workspace={name: c.workspace for name, c in found.candidates.items()}, ceilings=ceiling,
        roofline={name: floor / timing.median for name, timing in timings.items()}, overhead=costs, notes=found.notes,
        machine=environment(place, command),
    )  # fmt: skip


def _check_size(problem: Problem, place: torch.device, found: _Field, limits: Limits) -> None:
    """Skip what would take too long, or more memory than is there, before anything is allocated."""
    if found.chosen and not limits.engines and not found.contestants:
        raise Skipped("; ".join(f"{name}: {why}" for name, why in found.notes.items()))
    # Inputs and results of several contestants at once, the casts of half precision to f32, and a float64 reference.
    wanted = 6 * problem.min_bytes
    free = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else _free_memory()
    if wanted > free:
        raise Skipped(f"it needs about {bytes_text(wanted)}; {bytes_text(free)} are free")


def _free_memory() -> int:
    """Bytes of main memory that are available; a large number where the system does not tell."""
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62


def _inputs(problem: Problem, place: torch.device) -> list[Inputs]:
    """One set of inputs, or on a GPU several that are taken in turn, as far as they fit."""
    count = min(_SETS, max(1, _SETS_BYTES // max(problem.min_bytes, 1))) if place.type == "cuda" else 1
    return [random_inputs(problem, seed, place) for seed in range(count)]


_Calls = dict[str, tuple[Callable[[], object], ...]]


@dataclass(frozen=True)
class _Ready:
    """A peer's calls, one for each set of inputs; ``once`` is the time of the only one that was waited for."""

    calls: tuple[Callable[[], object], ...]
    once: float | None = None


def _prepared(
    problem: Problem, place: torch.device, sets: Sequence[Inputs], limits: Limits, notes: dict[str, str]
) -> dict[str, _Ready]:
    """The peers that run, called once. One whose first call takes too long has that as its only time."""
    found: dict[str, _Ready] = {}
    for peer in _peers(problem, place, limits, notes):
        try:
            prepared = peer.prepare(problem, sets)
            start = time.perf_counter()
            prepared.calls[0]()
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            took = time.perf_counter() - start
        except (NotTaken, RuntimeError) as reason:
            notes[peer.name] = " ".join(str(reason).split())[:300]
            continue
        if prepared.note:
            notes[peer.name] = prepared.note
        long = took > limits.longest
        if long:
            notes[peer.name] = f"called once, not verified: over the {limits.longest:g} s that are waited for"
        found[peer.name] = _Ready(prepared.calls, took if long else None)
    return found


def _race(calls: dict[str, tuple[Callable[[], object], ...]], place: torch.device, limits: Limits) -> dict[str, Timing]:
    budget = limits.budget * len(calls)
    if not calls:
        return {}
    if place.type == "cuda":
        timings = race_cuda(list(calls.values()), budget=budget)
    else:
        timings = race([those[0] for those in calls.values()], budget=budget)
    return dict(zip(calls, timings, strict=True))
