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


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = call()
    took = time.perf_counter() - start
    del kept
    return took


_PAUSE = 3e-3  # OpenMP's threads spin for about a millisecond before they sleep


def race(
    calls: Sequence[Callable[[], object]], *, budget: float = 1.0, least: int = 7, most: int = 200, warm_up: int = 2
) -> list[Timing]:
    """Time each call once per round until ``budget`` seconds are spent or ``most`` rounds are done.

    Each round has an order of its own, so that threads that a contestant leaves spinning, and caches that it leaves
    full, meet every other one alike. Where one call takes under 50 us, all are repeated within a round for ten times as
    long, so that a sample is long against the clock's own cost, and begin with a pause in which those threads go to
    sleep and a call that is not counted: a spinning thread of somebody else can make a tiny call three times as long.
    The result of a call is kept until its time is taken and dropped before the next call starts.
    """
    once = [min(_seconds(call) for _ in range(warm_up + 1)) for call in calls]
    tiny = min(once) < 50e-6
    repeats = [max(1, int(500e-6 / max(took, 1e-6))) if tiny else 1 for took in once]
    samples: list[list[float]] = [[] for _ in calls]
    spent, rounds, order, shuffle = 0.0, 0, list(range(len(calls))), random.Random(0).shuffle
    while rounds < least or (spent < budget and rounds < most):
        shuffle(order)
        for at in order:
            call, count = calls[at], repeats[at]
            if tiny:
                time.sleep(_PAUSE)
                call()
            start = time.perf_counter()
            for _ in range(count):
                kept = call()
            took = time.perf_counter() - start
            del kept
            samples[at].append(took / count)
            spent += took
        rounds += 1
    return [Timing.of(s) for s in samples]
