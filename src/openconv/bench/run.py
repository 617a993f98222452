"""Measure one problem: every engine that accepts it and every peer that takes it, verified, then timed in turn.

On the CPU a second process verifies (:class:`Verifier`). After a float64 reference in the same process torch's 5x5
filter of 1024x2048 takes 15 ms, rather than the 33 of a program that only filters: the reference seems to leave holes
in the heap, whose pages are already there, and torch's buffers to fall into them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..device import Device
from ..engine import Traits, UnsupportedProblem
from ..plan import device_of, lower
from ..problem import Problem
from ..reference import Inputs, Reference, allowed_error, random_inputs
from ..select import Candidate, Policy, current_policy, rank
from ..units import bytes_text, seconds_text
from .calls import call_of
from .ceilings import ceilings, rate_name, roofline_floor
from .peers import NotTaken, Peer, default_peers, peer_named
from .results import CALLED_ONCE, Record, environment
from .timing import TINY, Timing, overhead, race, race_cuda

__all__ = ["CHOSEN", "DISTURBED", "Limits", "Skipped", "Verified", "Verifier", "measure", "verify"]

# Products beyond which the definition is not timed: it starts threads then, which come and go, after which the system
# may put two of another contestant's on one core for 8 ms (seen with 0.4 million on two cores: 20 ms instead of 0.15).
# Where it is asked for by name it is timed all the same.
_NAIVE_LIMIT = 20_000
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
    called once. ``overhead``: also measure what a call costs the CPU before it returns. ``invariant``: a contestant
    more, what is chosen under ``batch_invariant=True``.
    """

    engines: Sequence[str] | None = ()
    peers: Sequence[str] | None = None
    budget: float = 0.3
    longest: float = 20.0
    overhead: bool = False
    invariant: bool = False


_USUAL = Limits()
CHOSEN = "chosen"
"""Among the engines of :class:`Limits`: the one that is chosen, and the one that predictions alone would choose."""


@dataclass(frozen=True)
class _Contestant:
    """An engine as it is called: under a policy, or under that in force where it is None. ``plain_sum`` is its trait,
    which says what its errors are a share of."""

    name: str
    policy: Policy | None
    plain_sum: bool = True

    def call(self, problem: Problem, inputs: Inputs, device: Device) -> Callable[[], Tensor]:
        return call_of(problem, inputs, device, self.policy)


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
    # The two that are compared most closely are called in the same way, down to the half microsecond of a policy.
    as_chosen = None if chosen == found.heuristic else policy
    if chosen not in defaults:
        defaults[chosen] = best
    for name, candidate in defaults.items():
        engine = candidate.engine.name
        wanted = CHOSEN in limits.engines and name in (chosen, found.heuristic)
        if limits.engines and engine not in limits.engines and not wanted:
            continue
        if engine == "cpu.naive" and problem.macs > _NAIVE_LIMIT and engine not in limits.engines:
            found.notes[name] = f"{problem.macs} products; at most {_NAIVE_LIMIT} are timed"
        elif candidate.expected > limits.longest:
            found.notes[name] = (
                f"predicted {seconds_text(candidate.expected)}; at most {limits.longest:g} s are waited for"
            )
        else:
            alone = policy.but(engine=engine, tuning="off")
            sums = candidate.traits.plain_sum
            found.contestants.append(_Contestant(name, as_chosen if name == chosen else alone, sums))
            found.candidates[name] = candidate
    if limits.invariant:
        strict = policy.but(batch_invariant=True, tuning="off")
        for allowed in rank(core, device, strict)[0][:1]:
            found.contestants.append(_Contestant("batch_invariant", strict, allowed.traits.plain_sum))
            found.candidates["batch_invariant"] = allowed
    if limits.engines and not found.contestants:
        reasons = {r.engine.name: list(r.reasons) for r in refusals if r.engine.name in limits.engines}
        raise UnsupportedProblem(problem, reasons | {name: [why] for name, why in found.notes.items()})
    return found


def _peers(problem: Problem, place: torch.device, limits: Limits, notes: dict[str, str]) -> list[Peer]:
    """The peers that take part; one that was asked for and refuses is noted."""
    if limits.peers is None:
        return list(default_peers(problem, place))
    found = []
    fused = f"'{problem.fusion}' is fused; peers compute an epilogue at most" if problem.is_fused else None
    for peer in map(peer_named, limits.peers):
        if (reason := fused or peer.refusal(problem, place)) is None:
            found.append(peer)
        else:
            notes[peer.name] = reason
    return found


# -- verified -------------------------------------------------------------------------------------------------------


class Verifier:
    """A second process for verifying, to be used in a ``with`` statement."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._pool:
            self._pool.shutdown()

    def run(self, check: Callable[[], Verified]) -> Verified:
        """What the check returns over there. Skipped if it took the process down, as a fault in a peer's library can:
        the next one gets a new process."""
        self._pool = self._pool or ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            return self._pool.submit(check).result()
        except BrokenProcessPool:
            self._pool = None
            raise Skipped("a contestant brought down the process that verified it") from None


@dataclass(frozen=True)
class Verified:
    """The errors against float64 of what ran; ``once`` has the seconds of the only call of peers that take too long,
    which are not checked; ``notes`` say why a peer takes no part."""

    error: dict[str, float] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def verify(
    problem: Problem, place: torch.device, contestants: Sequence[_Contestant], peers: Sequence[str], longest: float
) -> Verified:
    """Run every contestant once and compare its result with float64."""
    found = Verified()
    with torch.no_grad():
        inputs, device = random_inputs(problem, device=place), device_of(place)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # no search for the reference
            reference = Reference(problem, inputs, place=place)
        for contestant in contestants:
            made = contestant.call(problem, inputs, device)()
            found.error[contestant.name] = reference.error(made, plain_sum=contestant.plain_sum)
        for name in peers:
            try:
                ready = peer_named(name).prepare(problem, [inputs])
                answer, took = _once(ready.calls[0], place, longest)
                result = ready.result(answer)
            except (NotTaken, RuntimeError) as reason:
                found.notes[name] = " ".join(str(reason).split())[:300]
                continue
            if took > longest:
                found.once[name] = took
                found.notes[name] = f"{CALLED_ONCE}: over the {longest:g} s that are waited for"
            else:
                found.error[name] = reference.error(result)
    return found


def _once(call: Callable[[], object], place: torch.device, longest: float) -> tuple[object, float]:
    """What one call returns, and the seconds until it is there. On a GPU the first may hold cuDNN's search: if it takes
    too long, the second counts."""
    for last in (place.type != "cuda", True):
        start = time.perf_counter()
        made = call()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        took = time.perf_counter() - start
        if last or took <= longest:
            break
    return made, took


def _allowed(problem: Problem, field: _Field, name: str) -> float:
    """The most that a correct result may be off. Of a peer, whose method is its own affair, it is what would make it
    useless: a thousandth, beyond rounding to the result's dtype."""
    if name in field.candidates:
        return allowed_error(problem, field.candidates[name].traits)
    return allowed_error(problem, Traits("", 1e-3))


# -- timed ------------------------------------------------------------------------------------------------------------


def measure(
    suite: str, label: str, problem: Problem, place: torch.device, limits: Limits = _USUAL, *,
    verifying: Verifier | None = None, command: str = "",
) -> Record:  # fmt: skip
    """Verify, in the second process if there is one, and time. A wrong contestant is named in ``wrong`` and not timed.

    UnsupportedProblem if none of the engines that were asked for takes it; Skipped if it is too large.
    """
    device = device_of(place)
    found = _field(problem, device, limits)
    _check_size(problem, place, found, limits)
    with torch.no_grad():
        peers = _peers(problem, place, limits, found.notes)
        names = [peer.name for peer in peers]
        check = partial(verify, problem, place, found.contestants, names, limits.longest)
        try:
            seen = verifying.run(check) if verifying else check()
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise Skipped(f"not enough memory to verify it: {str(error).splitlines()[0]}") from None
            raise
        found.notes.update(seen.notes)
        if not seen.error and not seen.once:
            raise Skipped("nothing runs it" + "".join(f"; {name}: {why}" for name, why in found.notes.items()))
        wrong = [name for name, error in seen.error.items() if not error <= _allowed(problem, found, name)]
        calls = _calls(problem, place, found, [peer for peer in peers if peer.name in seen.error], wrong)
        timings, disturbed = _race(calls, place, limits)
        timings |= {name: Timing(took, took, took) for name, took in seen.once.items()}
        ceiling = ceilings(place, [rate_name(problem)])
        floor = roofline_floor(problem, ceiling)
        costs: dict[str, float] = {}
        if limits.overhead:
            hosts = overhead([those[0] for those in calls.values()], place)
            costs = {name: timing.median for name, timing in zip(calls, hosts, strict=True)}
    return Record(
        suite=suite, label=label, problem=str(problem), chosen=found.chosen, heuristic=found.heuristic,
        source=found.source, seconds={name: asdict(timing) for name, timing in timings.items()},
        predicted={name: c.cost for name, c in found.candidates.items()}, error=seen.error, wrong=wrong,
        knobs={name: str(c.knobs) for name, c in found.candidates.items()},
        workspace={name: c.workspace for name, c in found.candidates.items()}, ceilings=ceiling,
        roofline={name: floor / timing.median for name, timing in timings.items()}, overhead=costs,
        disturbed=disturbed, notes=found.notes,
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


def _calls(problem: Problem, place: torch.device, found: _Field, peers: Sequence[Peer], wrong: Sequence[str]) -> _Calls:
    """The calls of each contestant that is right, one for each set of inputs."""
    sets, device = _inputs(problem, place), device_of(place)
    calls: _Calls = {}
    for contestant in found.contestants:
        if contestant.name not in wrong:
            calls[contestant.name] = tuple(contestant.call(problem, inputs, device) for inputs in sets)
    for peer in peers:
        if peer.name not in wrong:
            prepared = peer.prepare(problem, sets)
            calls[peer.name] = prepared.calls
            if prepared.note:
                found.notes[peer.name] = prepared.note
    return calls


def _race(calls: _Calls, place: torch.device, limits: Limits) -> tuple[dict[str, Timing], float]:
    """The timings, and how often a second other programs took the CPU away. With threads that spin while they wait for
    each other, one that is put aside for a time slice makes a call take slices instead of microseconds: a race that
    was disturbed is run again, twice at most."""
    budget, disturbed = limits.budget * len(calls), 0.0
    if not calls:
        return {}, disturbed
    for _ in range(3):
        begun, before = time.perf_counter(), _taken_away()
        if place.type == "cuda":
            timings = race_cuda(list(calls.values()), budget=budget)
        else:
            timings = race([those[0] for those in calls.values()], budget=budget)
        disturbed = (_taken_away() - before) / (time.perf_counter() - begun)
        if min(timing.median for timing in timings) < TINY:
            disturbed = 0.0  # threads that wake up for each call push each other aside by themselves
        if disturbed <= DISTURBED:
            break
    return dict(zip(calls, timings, strict=True)), disturbed


DISTURBED = 100.0
"""Times a second that a core is taken away, beyond which times are those of a busy machine: on two cores 30 to 45 were
seen when it was quiet, and over 200 beside one busy program."""


def _taken_away() -> int:
    """How often the system put a thread of this process aside for another one."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
