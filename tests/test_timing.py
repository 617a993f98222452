"""Timing: order, rotation and what is counted, on a made-up device; ceilings and the roofline on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from openconv.bench import timing
from openconv.bench.ceilings import ceilings, rate_name, roofline_floor
from openconv.bench.timing import CudaSampler, Timing, _race_queued, overhead, race
from openconv.problem import Problem

US = 1e-6


class FakeDevice:
    """A device that works through its queue while the host goes on, with a clock that only their work moves."""

    def __init__(self) -> None:
        self.host = self.free = 0.0
        self.flushes = 0
        self.log: list[str] = []

    def _enqueue(self, host: float, device: float) -> float:
        self.host += host
        self.free = max(self.free, self.host) + device
        return self.free

    def call(
        self, name: str, *, host: float, device: float, waits: bool = False, late: Callable[[int], bool] | None = None
    ) -> Callable[[], None]:
        """Three launches; at those calls that are ``late``, the host is held up for 0.1 s before the last."""

        def run() -> None:
            self.log.append(name)
            for launch in range(3):
                held_up = launch == 2 and late is not None and late(self.log.count(name))
                self._enqueue(host / 3 + 0.1 * held_up, device / 3)
            if waits:
                self.wait()

        return run

    def now(self) -> float:
        return self.host

    def flush(self) -> None:
        self.flushes += 1
        self._enqueue(3 * US, 80 * US)

    def spin(self, seconds: float) -> None:
        self._enqueue(3 * US, seconds)

    def mark(self) -> float:
        return self._enqueue(2 * US, 0.0)

    def passed(self, mark: float) -> bool:
        return mark <= self.host

    def between(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        self.host = max(self.host, self.free)


def run_race(device: FakeDevice, *calls: Callable[[], None], least: int = 10, most: int = 20, budget: float = 0.0):
    return _race_queued(device, [[call] for call in calls], budget, least, most)


def test_percentiles_by_rank():
    assert Timing.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Timing(median=3.0, p20=2.0, p80=4.0)


def test_race_takes_turns_in_changing_order():
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    timings = race([lambda: call("a", 1e-3), lambda: call("b", 3e-3)], budget=0.0, least=8, warm_up=1)
    last = order[-16:]
    rounds = [last[at] + last[at + 1] for at in range(0, 16, 2)]
    assert set(rounds) == {"ab", "ba"}  # each once a round, in changing order
    assert 1e-3 <= timings[0].median < timings[1].median


@pytest.mark.parametrize(("seconds", "calls"), [(0.6, 1 + 3), (0.4, 2 + 7), (0.1, 3 + 7)])
def test_three_rounds_are_enough_of_a_call_over_half_a_second(monkeypatch, seconds, calls):
    clock, seen = [0.0], [0]

    def call() -> None:
        clock[0] += seconds
        seen[0] += 1

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0], sleep=None))
    assert race([call], budget=0.0)[0].median == pytest.approx(seconds)
    assert seen[0] == calls


@pytest.mark.parametrize("host", [1 * US, 30 * US, 900 * US])
def test_launching_is_hidden_behind_the_device_idling(host):
    device = FakeDevice()
    short, long = run_race(
        device, device.call("short", host=host, device=6 * US), device.call("long", host=host / 2, device=500 * US)
    )
    assert short.median == pytest.approx(6 * US)
    assert long.median == pytest.approx(500 * US)
    assert short.p20 == pytest.approx(short.p80)


def test_a_call_that_waits_for_the_device_is_timed_by_the_host():
    device = FakeDevice()
    waiting, other = run_race(
        device,
        device.call("waits", host=30 * US, device=40 * US, waits=True),
        device.call("b", host=5 * US, device=9 * US),
    )
    assert waiting.median == pytest.approx((30 + 40 / 3) * US, rel=0.5)  # launches and the work behind the last of them
    assert waiting.median > 30 * US
    assert other.median == pytest.approx(9 * US)


def test_a_sample_is_dropped_where_the_host_came_late():
    device = FakeDevice()
    found = run_race(device, device.call("a", host=10 * US, device=20 * US, late=lambda n: n % 4 == 0), least=20)
    assert found[0].p80 == pytest.approx(20 * US)


def test_what_is_always_late_is_timed_by_the_host():
    device = FakeDevice()
    found = run_race(device, device.call("a", host=10 * US, device=20 * US, late=lambda n: n > 8), least=1, most=1)
    assert found[0].median > 0.1


def test_a_sampler_idles_until_a_call_is_queued_before_the_device_comes_to_it():
    """The tuner's way, one sample at a time: a call of several launches is not timed by them."""
    device = FakeDevice()
    slow = CudaSampler(device.call("a", host=1e-3, device=20 * US), device)
    assert slow() == pytest.approx(20 * US)
    tries = device.log.count("a")
    assert tries > 1
    assert slow() == pytest.approx(20 * US)
    assert device.log.count("a") == tries + 1
    waiting = CudaSampler(device.call("b", host=10 * US, device=20 * US, waits=True), device)
    assert waiting() >= 20 * US  # never early enough: there is an end
    assert device.log.count("b") < 10


def test_contestants_take_turns_in_changing_order_and_rotate_their_inputs():
    device = FakeDevice()
    calls = {name: device.call(name, host=5 * US, device=9 * US) for name in ("a0", "a1", "b0", "b1", "b2")}
    rotations = [[calls["a0"], calls["a1"]], [calls["b0"], calls["b1"], calls["b2"]]]
    _race_queued(device, rotations, budget=0.0, least=12, most=12)
    rounds = [device.log[-24:][at : at + 2] for at in range(0, 24, 2)]
    assert {first[0] + second[0] for first, second in rounds} == {"ab", "ba"}
    for number, turn in enumerate(rounds):
        assert set(turn) == {f"a{number % 2}", f"b{number % 3}"}
    assert device.flushes >= 24


def test_rounds_follow_the_budget_and_its_limits():
    counts = {}
    for budget, name in ((0.0, "least"), (2e-3, "budget"), (9.0, "most")):
        device = FakeDevice()
        call = device.call("a", host=5 * US, device=9 * US)
        _race_queued(device, [[call]], budget, 5, 40)
        counts[name] = len(device.log)
    assert counts["least"] < counts["budget"] < counts["most"]
    assert counts["most"] - counts["least"] == 35


def test_three_rounds_are_enough_of_a_long_call_on_the_device():
    device = FakeDevice()
    found = run_race(device, device.call("a", host=5 * US, device=0.7), least=10)
    assert found[0].median == pytest.approx(0.7)
    assert len(device.log) <= 8


def test_overhead_is_the_time_until_the_call_returns():
    [found] = overhead([lambda: time.sleep(1e-3)], torch.device("cpu"))
    assert 1e-3 <= found.p20 <= found.median < 20e-3


def test_overhead_of_a_long_call_takes_few_calls(monkeypatch):
    clock, seen = [0.0], [0]

    def call() -> None:
        clock[0] += 2.0
        seen[0] += 1

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert [found.median for found in overhead([call], torch.device("cpu"))] == [2.0]
    assert seen[0] == 4


def test_overheads_take_turns():
    seen: list[str] = []
    found = overhead([lambda: seen.append("a"), lambda: seen.append("b")], torch.device("cpu"))
    assert len(found) == 2
    warmed = seen[6:]  # three calls each beforehand
    assert seen[:6] == ["a"] * 3 + ["b"] * 3
    assert warmed == (["a"] * 20 + ["b"] * 20) * 30


def test_ceilings_are_measured_once():
    device = torch.device("cpu")
    found = ceilings(device, ["f32", "i8", "tf32"])
    assert set(found) == {"copy", "f32"}  # the CPU has no others
    assert all(rate > 1e8 for rate in found.values())
    start = time.perf_counter()
    assert ceilings(device, ["f32"]) == found
    assert time.perf_counter() - start < 1e-2


def test_the_floor_is_the_longer_of_computing_and_moving():
    problem = Problem.parse("fprop n1 c64 h56 w56 k64 r3 s3 pad1 f32 nchw")
    rates = {"copy": 1e9, "f32": 1e9, "tf32": 4e9}
    assert roofline_floor(problem, rates) == problem.flops / 1e9
    assert roofline_floor(problem.with_(precision="tf32"), rates) == problem.flops / 4e9
    assert roofline_floor(problem.with_(precision="tf32x3"), rates) == 3 * problem.flops / 4e9
    assert roofline_floor(problem, {"copy": 1e3, "f32": 1e9}) == problem.min_bytes / 1e3
    assert roofline_floor(problem.with_(dtypes="f16"), rates) == problem.with_(dtypes="f16").min_bytes / 1e9
    assert rate_name(problem.with_(dtypes=("f32", "f16", "f16"), direction="dgrad")) == "f16"
