"""Timing: all contestants take turns, so that whatever else the machine does falls on each alike.

`race` reads the clock around calls on the CPU. `race_cuda` queues work for the GPU and reads events around single
calls: what the device spends on a call, with cold caches and without the time that the host takes to launch it.
`overhead` is that other part: what a call costs the host before it returns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, Protocol

import torch

__all__ = ["TINY", "CudaSampler", "Queue", "Timing", "cuda_queue", "overhead", "race", "race_cuda"]

_Call = Callable[[], object]


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


def _seconds(call: _Call) -> float:
    start = time.perf_counter()
    kept = call()
    took = time.perf_counter() - start
    del kept
    return took


_LONG = 0.5
_LONG_ROUNDS = 3  # of calls over half a second: noise is small beside them, and ten rounds of ten calls take a minute


def _warmed(call: _Call, count: int) -> float:
    """The shortest of ``count`` calls, or of those that fit into half a second."""
    took = [_seconds(call)]
    while len(took) < count and sum(took) < _LONG:
        took.append(_seconds(call))
    return min(took)


# -- on the CPU ---------------------------------------------------------------------------------------------------

TINY = 50e-6
"""Seconds of a call below which it is repeated to be timed."""
_PAUSE = 3e-3  # OpenMP's threads spin for about a millisecond before they sleep


def race(
    calls: Sequence[_Call], *, budget: float = 1.0, least: int = 7, most: int = 200, warm_up: int = 2
) -> list[Timing]:
    """Time each call once per round until ``budget`` seconds are spent or ``most`` rounds are done.

    Each round has an order of its own, so that threads that a contestant leaves spinning, and caches that it leaves
    full, meet every other one alike. Where one call takes under 50 us, all are repeated within a round for ten times as
    long, so that a sample is long against the clock's own cost, and begin with a pause in which those threads go to
    sleep and a call that is not counted: a spinning thread of somebody else can make a tiny call three times as long.
    Where one takes over half a second, three rounds are enough, whatever ``least`` says, and warming up ends with the
    first. The result of a call is kept until its time is taken and dropped before the next call starts.
    """
    once = [_warmed(call, warm_up + 1) for call in calls]
    tiny = min(once) < TINY
    repeats = [max(1, int(500e-6 / max(took, 1e-6))) if tiny else 1 for took in once]
    least = min(least, _LONG_ROUNDS) if max(once) > _LONG else least
    samples: list[list[float]] = [[] for _ in calls]
    begun, rounds, order, shuffle = time.perf_counter(), 0, list(range(len(calls))), random.Random(0).shuffle
    while rounds < least or (time.perf_counter() - begun < budget and rounds < most):
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
        rounds += 1
    return [Timing.of(s) for s in samples]


# -- on the GPU ---------------------------------------------------------------------------------------------------


class Queue(Protocol):
    """Work that a device does in order while the host goes on, and marks in it. The clock is part of it, so that tests
    can put a made-up device in its place."""

    def now(self) -> float:
        """Seconds on the host."""

    def flush(self) -> None:
        """Queue the eviction of everything from the caches."""

    def spin(self, seconds: float) -> None:
        """Queue so much idling, at the least."""

    def mark(self) -> Any:
        """Queue a mark, and return it."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has got to the mark already."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another on the device, once it has passed both."""

    def wait(self) -> None:
        """Until the queue is empty."""


class _CudaQueue:
    """The current stream."""

    def __init__(self, flush_bytes: int | None) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        size = max(4 * l2, 256 << 20) if flush_bytes is None else flush_bytes
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._cycles_per_second = _spin_rate(torch.cuda.current_device())
        self.now = time.perf_counter
        self.wait = torch.cuda.current_stream().synchronize

    def flush(self) -> None:
        if self._buffer.numel():
            self._buffer.zero_()

    def spin(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_second) + 1)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3


@cache
def _spin_rate(device: int) -> float:
    """Cycles of torch.cuda._sleep per second. The clock goes up under load, so that the last of several counts."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 10_000_000
    for _ in range(3):
        torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e-3)


def race_cuda(
    rotations: Sequence[Sequence[_Call]], *, budget: float, least: int = 10, most: int = 200,
    flush_bytes: int | None = None,
) -> list[Timing]:  # fmt: skip
    """Seconds that the GPU spends on each contestant's call, on the current stream, until ``budget`` seconds of the
    host's time are spent or ``most`` rounds are done. At least ``least`` rounds, or three where one call takes over
    half a second.

    A contestant is a sequence of calls that do the same on different inputs and take turns. Before each call,
    ``flush_bytes`` are overwritten (four times the L2 cache, 256 MB at least, if not given; 0 leaves the caches as they
    are) and the GPU idles for as long as the host needs to queue the call, so that launching it is not measured.
    Contestants take turns in an order that changes from round to round, and events are read after the round.

    A sample is dropped where the GPU came to the call before the host had queued all of it, and from then on it
    idles twice as long. A call that waits for the GPU by itself cannot be queued ahead: that is noticed beforehand,
    and its timing is then the host's, from an idle GPU with its caches flushed until the result is there, launches
    included. So is that of a call of which no sample is left.
    """
    return _race_queued(cuda_queue(flush_bytes), rotations, budget, least, most)


def cuda_queue(flush_bytes: int | None = None) -> Queue:
    """The current stream. It holds the memory that is overwritten to flush the caches."""
    return _CudaQueue(flush_bytes)


@dataclass
class _Contestant:
    calls: Sequence[_Call]
    idle: float = 0.0
    """Seconds for which the device idles before a call, while the host queues it."""
    waits: bool = False
    """The call waits for the device by itself."""
    samples: list[float] = field(default_factory=list)


def _race_queued(
    queue: Queue, rotations: Sequence[Sequence[_Call]], budget: float, least: int, most: int
) -> list[Timing]:
    contestants = [_Contestant(calls) for calls in rotations]
    long = [_ready(queue, contestant) > _LONG for contestant in contestants]
    least = min(least, _LONG_ROUNDS) if any(long) else least
    begun, rounds, order, shuffle = queue.now(), 0, list(contestants), random.Random(0).shuffle
    while rounds < least or (queue.now() - begun < budget and rounds < most):
        shuffle(order)
        _round(queue, order, rounds)
        rounds += 1
    for contestant in contestants:
        if not contestant.samples:
            contestant.samples = [_on_the_host(queue, contestant.calls[0]) for _ in range(_LONG_ROUNDS)]
    return [Timing.of(contestant.samples) for contestant in contestants]


def _round(queue: Queue, order: Sequence[_Contestant], number: int) -> None:
    queued = []
    for contestant in order:
        call = contestant.calls[number % len(contestant.calls)]
        if contestant.waits:
            contestant.samples.append(_on_the_host(queue, call))
            continue
        queued.append((contestant, *_queued(queue, call, contestant.idle)))
    queue.wait()
    for contestant, start, end, early in queued:
        if early:
            contestant.idle = _longer(contestant.idle)
        else:
            contestant.samples.append(queue.between(start, end))


def _queued(queue: Queue, call: _Call, idle: float) -> tuple[Any, Any, bool]:
    """Queue a call behind so much idling: its marks, and whether the device came to it before all of it was queued."""
    queue.flush()
    queue.spin(idle)
    start = queue.mark()
    kept = call()
    end = queue.mark()
    early = queue.passed(start)
    del kept
    return start, end, early


def _longer(idle: float) -> float:
    return min(2 * idle, max(idle, _MOST_IDLE))


class CudaSampler:
    """The seconds of one call at a time, as :func:`race_cuda` takes them, for who decides after each what to time next.
    Where no idling is long enough, as of a call that waits for the device, the last sample counts as it is."""

    def __init__(self, call: _Call, queue: Queue) -> None:
        self._call, self._queue, self._idle = call, queue, _FIRST_IDLE

    def __call__(self) -> float:
        while True:
            start, end, early = _queued(self._queue, self._call, self._idle)
            self._queue.wait()
            if not early or self._idle >= _MOST_IDLE:
                return self._queue.between(start, end)
            self._idle = _longer(self._idle)


_FIRST_IDLE = 200e-6  # of a sampler: longer than most calls take to be queued
_LEAST_IDLE = 20e-6  # beyond what the call takes on the host: two marks and the interpreter's own time
_MOST_IDLE = 10e-3  # to which a host that is held up now and then may bring it
_PROBE = 2e-3


def _ready(queue: Queue, contestant: _Contestant) -> float:
    """Run every call once, then measure how long one keeps the host and whether it waits for the device. Returns the
    seconds from one call to its result."""
    for call in contestant.calls:
        call()
        queue.wait()
    first = contestant.calls[0]
    whole = _on_the_host(queue, first)
    free = median(_returns_after(queue, first, 0.0) for _ in range(1 if whole > _LONG else 5))
    # With the device kept busy for much longer than the call takes to return, one that waits returns later by that.
    # Three times, for the host may be held up by something else.
    probe = max(_PROBE, 4 * free)
    contestant.waits = all(_returns_after(queue, first, probe) > free + probe / 2 for _ in range(3))
    contestant.idle = 1.5 * free + _LEAST_IDLE
    return whole


def _returns_after(queue: Queue, call: _Call, busy: float) -> float:
    """Seconds until the call returns, with the device kept busy for so long before."""
    queue.wait()
    if busy:
        queue.spin(busy)
    start = queue.now()
    call()
    took = queue.now() - start
    queue.wait()
    return took


def _on_the_host(queue: Queue, call: _Call) -> float:
    """Seconds from the call until its result is there, the device idle and its caches flushed."""
    queue.flush()
    queue.wait()
    start = queue.now()
    kept = call()
    queue.wait()
    took = queue.now() - start
    del kept
    return took


# -- on the host --------------------------------------------------------------------------------------------------

_BATCH = 20  # calls: some launches each, far from the 1024 at which a stream makes the host wait
_BATCHES = 30
_OVERHEAD_BUDGET = 0.5


def overhead(calls: Sequence[_Call], device: torch.device) -> list[Timing]:
    """Seconds of the host's time that each of the calls takes before it returns.

    The calls take turns in batches of 20, fewer where one takes long, so that a host that slows down does so for all.
    On a GPU the batches wait for the queue to empty between them and never within, so that the device's own time does
    not show. On the CPU it is the wall time of the call, which is overhead only where the problem is tiny.
    """
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    batches: list[int] = []
    for call in calls:
        once = _warmed(call, 3)
        wait()
        batches.append(max(1, min(_BATCH, int(_OVERHEAD_BUDGET / _BATCHES / max(once, 1e-9)))))
    samples: list[list[float]] = [[] for _ in calls]
    begun, budget = time.perf_counter(), _OVERHEAD_BUDGET * len(calls)
    for turn in range(_BATCHES):
        if turn >= 3 and time.perf_counter() - begun >= budget:
            break
        for call, batch, mine in zip(calls, batches, samples, strict=True):
            start = time.perf_counter()
            for _ in range(batch):
                call()
            mine.append((time.perf_counter() - start) / batch)
            wait()
    return [Timing.of(mine) for mine in samples]


def _nothing() -> None:
    pass
