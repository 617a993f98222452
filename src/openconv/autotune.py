"""Autotuning: measure the candidates of a problem until their order is settled, and remember it in the database.

Three ways lead here: ``openconv.tuning("measure")``, under which the first call of a new problem measures it
(:func:`tuned_plan`); :func:`openconv.tune`, for problems or a model; and the command ``openconv tune``.

How one problem is measured (:func:`measure_candidates`): every candidate runs once, which compiles it, and then up to
three times; those that stay over twice the best are out. The others take turns in changing order. After each round
those are out whose median, less twice its standard error, lies above that of the best with twice its own. The order is
settled when one is left, or when those left cannot be told apart within 2%. The time given ends it in any case.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import torch
from torch import Tensor

from .bench.timing import TINY, CudaSampler, Timing, cuda_queue
from .cuda.device import CudaDevice
from .device import Device
from .plan import Plan, lower, make_plan, plan_for
from .problem import Problem
from .reference import random_inputs
from .select import Candidate, Policy, known_of, search
from .select.database import Database, Entry, Measurement, Store, user_store

__all__ = ["MOST", "measure_and_keep", "measure_candidates", "settle", "shortlist", "tuned_plan"]

_TIE = 0.02
"""Candidates this close are equal for all purposes."""
_QUICK = 5e-3
"""Seconds of a run so short that a few more of them are always affordable."""


# -- which candidates -----------------------------------------------------------------------------------------------


MOST = {"cpu": 8, "cuda": 12}
"""Candidates of a problem that are measured: on a CPU each may take seconds to compile, on a GPU a part of one."""


def shortlist(candidates: Sequence[Candidate], *, most: int = 8, within: float = 4.0) -> list[Candidate]:
    """The candidates worth measuring, of a list in the order of their predictions: each engine with its default knobs
    if it is predicted within so many times the best, then other knobs of these, up to so many in all."""
    near = [c for c in candidates if c.cost <= within * candidates[0].cost] if candidates else []
    first: dict[str, Candidate] = {}
    for candidate in near:
        first.setdefault(candidate.engine.name, candidate)
    others = [c for c in near if c not in first.values()]
    return [*first.values(), *others][: max(most, len(first))]


# -- until the order is settled -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """The samples of each contestant, and whether more of them would not change who is first."""

    samples: list[list[float]]
    settled: bool


def settle(sample: Sequence[Callable[[], float]], seconds: float, *, most: int = 200) -> Settled:
    """Time contestants, each a function that runs once and returns its seconds, until their order is settled or the
    time is spent. Those that are never within twice the best of the first runs are out at once."""
    end = time.perf_counter() + seconds
    samples = [_first_runs(run, end) for run in sample]
    best = min(map(min, samples))
    racing = [at for at, s in enumerate(samples) if min(s) <= 2 * best]
    shuffle, rounds = random.Random(0).shuffle, 0
    while len(racing) > 1 and rounds < most:
        shuffle(racing)
        for at in racing:
            if time.perf_counter() + min(samples[at]) > end:
                return Settled(samples, False)
            samples[at].append(sample[at]())
        rounds += 1
        if rounds >= 4:
            racing = _undecided([samples[at] for at in racing], racing)
    return Settled(samples, len(racing) <= 1)


def _first_runs(run: Callable[[], float], end: float) -> list[float]:
    """The first samples of a contestant, on which a hopeless one is told from the others: three if it is quick, else
    one. The run before them, which may compile, counts only if there is no time for another."""
    took = run()
    if took < _QUICK:
        return [run() for _ in range(3)]
    return [run()] if time.perf_counter() + took < end else [took]


def _undecided(samples: list[list[float]], names: list[int]) -> list[int]:
    """Those that may still be the fastest; one of them where all are known to be equal."""
    middle = [Timing.of(s) for s in samples]
    # The 20th and 80th percentile of a normal distribution lie 1.68 standard deviations apart, and the median of n
    # samples has 1.25/sqrt(n) of one as its own.
    error = [1.25 * (t.p80 - t.p20) / 1.68 / math.sqrt(len(s)) for t, s in zip(middle, samples, strict=True)]
    first = min(range(len(names)), key=lambda at: middle[at].median)
    reach = middle[first].median + 2 * error[first]
    left = [at for at in range(len(names)) if middle[at].median - 2 * error[at] <= reach]
    farthest = max(middle[at].median + 2 * error[at] for at in left)
    return [names[first]] if farthest <= (1 + _TIE) * middle[first].median else [names[at] for at in left]


# -- one problem ----------------------------------------------------------------------------------------------------


def measure_candidates(
    problem: Problem, device: Device, place: torch.device, candidates: Sequence[Candidate], seconds: float
) -> Entry:
    """What the candidates take for a problem as engines see it, on random data. The first two are measured in any case,
    since one alone would say nothing; of the others none is begun, which may mean a compilation, once the time is
    spent."""
    if isinstance(device, CudaDevice):
        from .cuda.compile import prepare

        prepare(problem, device, [(candidate.engine, candidate.knobs) for candidate in candidates])
    end = time.perf_counter() + seconds
    with torch.no_grad():
        inputs = random_inputs(problem, device=place)
        sampler: Callable[[Callable[[], object]], Callable[[], float]]
        if place.type == "cuda":
            sampler = partial(CudaSampler, queue=cuda_queue())
        else:
            sampler = partial(_CpuSampler, others=torch.zeros(device.threads * 2 * device.cache_bytes // 4))
        runs: list[Callable[[], float]] = []
        for candidate in candidates:
            if len(runs) > 1 and time.perf_counter() > end:
                break
            plan = make_plan(problem, device, Policy(), candidate)
            runs.append(sampler(partial(plan, inputs.a, inputs.b, inputs.operands)))
        found = settle(runs, end - time.perf_counter())
    measured = [_measurement(candidate, samples) for candidate, samples in zip(candidates, found.samples, strict=False)]
    measured.sort(key=lambda m: m.seconds)
    complete = found.settled and len(measured) == len(candidates)
    return Entry(tuple(measured), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), complete)


def _measurement(candidate: Candidate, samples: list[float]) -> Measurement:
    timing, engine = Timing.of(samples), candidate.engine
    return Measurement(
        engine.name, str(candidate.knobs), engine.version, timing.median, timing.p20, timing.p80, len(samples)
    )


class _CpuSampler:
    """Seconds of one call. The private caches of the cores are full of ``others`` when it begins, as they are in a
    network, whose layers have used them for tensors of their own since this one ran last. Tiny calls are repeated
    instead, so that a sample is long against the clock's own cost and against the waking of threads."""

    def __init__(self, call: Callable[[], object], others: Tensor) -> None:
        self._call, self._others, self._repeats = call, others, 1

    def __call__(self) -> float:
        if self._repeats == 1:
            self._others.sum()
        start = time.perf_counter()
        for _ in range(self._repeats):
            kept = self._call()
        took = (time.perf_counter() - start) / self._repeats
        del kept
        self._repeats = int(300e-6 / max(took, 1e-6)) if took < TINY else 1
        return took


# -- the first call of a new problem --------------------------------------------------------------------------------

_measuring = threading.Lock()


def tuned_plan(problem: Problem, device: Device, place: torch.device, policy: Policy) -> Plan:
    """The plan of a problem; under the policy's ``tuning="measure"`` a problem whose candidates are not in the database
    is measured first. While a CUDA graph is captured it is not, and the plan's own policy says so: such a plan is not
    to be remembered under the policy that asked for measuring."""
    if policy.tuning != "measure" or problem.is_empty:
        return plan_for(problem, device, policy)
    if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return plan_for(problem, device, replace(policy, tuning="heuristic"))
    with _measuring:  # two at once would time each other
        wanted = _unknown(lower(problem, device), device, policy)
        if wanted:
            measure_and_keep(lower(problem, device), device, place, wanted, policy.measure_seconds, user_store())
    return plan_for(problem, device, policy)


def _unknown(core: Problem, device: Device, policy: Policy) -> list[Candidate]:
    """The candidates to measure, if there is a choice among them and the database does not know the problem."""
    candidates = shortlist(search(core, device, policy), most=MOST[device.kind])
    if len(candidates) < 2:
        return []
    known = known_of(core, device, policy)
    return candidates if known is None or known.distance else []


def measure_and_keep(
    core: Problem, device: Device, place: torch.device, candidates: Sequence[Candidate], seconds: float, store: Store
) -> Entry | None:
    """Measure and write; None where there is not enough memory, or nothing can be written, which changes no result."""
    try:
        entry = measure_candidates(core, device, place, candidates, seconds)
        store.update(Database({device.key: {str(core): entry}}))
    except (MemoryError, torch.OutOfMemoryError, OSError):
        return None
    return entry
