"""Timing on the CPU: all contestants take turns, so that whatever else the machine does falls on each alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Timing", "race"]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Percentiles by rank."""
        ordered = sorted(samples)
        at = [ordered[int(q * (len(ordered) - 1) + 0.5)] for q in (0.5, 0.2, 0.8)]
        return cls(*at)


def race(
    calls: Sequence[Callable[[], object]], *, budget: float = 1.0, least: int = 7, most: int = 200, warm_up: int = 2
) -> list[Timing]:
    """Time each call once per round until ``budget`` seconds are spent or ``most`` rounds are done.

    Each round has an order of its own: threads that a contestant leaves spinning, and caches that it leaves full, meet
    every other one alike (always behind torch, a tiny call took twice its time).
    Calls that take under 50 us are repeated within a round for ten times as long, so that a sample is long against the
    clock's own cost, and against finding again what other contestants have pushed out of the caches. The result of a
    call is kept until its time is taken and dropped before the next call starts.
    """
    for call in calls:
        for _ in range(warm_up):
            call()
    repeats = []
    for call in calls:
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        repeats.append(1 if took > 50e-6 else int(500e-6 / max(took, 1e-6)))
    samples: list[list[float]] = [[] for _ in calls]
    spent, rounds, order, shuffle = 0.0, 0, list(range(len(calls))), random.Random(0).shuffle
    while rounds < least or (spent < budget and rounds < most):
        shuffle(order)
        for at in order:
            call, count = calls[at], repeats[at]
            start = time.perf_counter()
            for _ in range(count):
                kept = call()
            took = time.perf_counter() - start
            del kept
            samples[at].append(took / count)
            spent += took
        rounds += 1
    return [Timing.of(s) for s in samples]
