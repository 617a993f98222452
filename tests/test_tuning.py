"""Tuning: what is measured, when a measurement is settled, how it changes the choice, and where it is kept out."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import openconv
from openconv import autotune, tuner
from openconv.autotune import measure_candidates, settle, shortlist, tuned_plan
from openconv.cpu.device import cpu_device
from openconv.engine import engine_named
from openconv.plan import forget_plans, plan_for
from openconv.problem import Problem
from openconv.select import Candidate, Policy, choose, current_policy, database, rank, search, version_of
from openconv.select.database import Database, Entry, Measurement
from openconv.tuner import convolutions_of, parse_seconds

CPU = torch.device("cpu")
DEVICE = cpu_device(torch.get_num_threads())
LAYER = Problem.parse("fprop n2 c8 h12 w12 k8 r3 s3 pad1 g8 f32 nchw")
HEURISTIC = Policy(tuning="heuristic")


@pytest.fixture(autouse=True)
def _empty_database(tmp_path, monkeypatch):
    """A user's database of its own for each test, nothing shipped, and no plans from before."""
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    monkeypatch.setattr(database, "_SHIPPED", tmp_path / "shipped")
    forget_plans()
    yield
    forget_plans()


def candidates() -> dict[str, Candidate]:
    return {c.engine.name: c for c in rank(LAYER, DEVICE, Policy(tuning="off"))[0]}


def know(problem: Problem = LAYER, version: str | None = None, **microseconds: float) -> None:
    """Put times of engines with their default knobs for a problem into the user's database."""
    measured = []
    for name, us in microseconds.items():
        engine = engine_named(name.replace("_", ".", 1))
        knobs = str(next(iter(engine.knobs(problem, DEVICE))))
        measured.append(Measurement(engine.name, knobs, version or engine.version, us * 1e-6, us * 1e-6, us * 1e-6, 9))
    found = Entry(tuple(sorted(measured, key=lambda m: m.seconds)), "2026-01-01T00:00:00Z")
    database.user_store().update(Database({DEVICE.key: {str(problem): found}}))


# -- the choice -----------------------------------------------------------------------------------------------------


def test_measured_times_decide_and_off_leaves_them_out():
    usual = choose(LAYER, DEVICE, HEURISTIC)
    assert usual.source == "heuristic"
    know(cpu_im2col_gemm=1, cpu_filter2d=50, cpu_depthwise=60)
    found = choose(LAYER, DEVICE, HEURISTIC)
    assert (found.engine.name, found.source) == ("cpu.im2col_gemm", "database")
    assert found.measured == pytest.approx(1e-6)
    assert choose(LAYER, DEVICE, Policy(tuning="off")) == usual


def test_a_limit_still_narrows_what_was_measured():
    know(cpu_im2col_gemm=1, cpu_filter2d=50)
    assert choose(LAYER, DEVICE, dataclasses.replace(HEURISTIC, max_workspace=0)).engine.name != "cpu.im2col_gemm"
    assert choose(LAYER, DEVICE, dataclasses.replace(HEURISTIC, engine="cpu.naive")).engine.name == "cpu.naive"


def test_predictions_of_what_was_not_measured_are_scaled_by_what_was():
    slow = candidates()["cpu.im2col_gemm"]
    know(cpu_im2col_gemm=slow.cost * 1e6 / 1000)  # a thousand times faster than predicted
    found = {c.engine.name: c for c in rank(LAYER, DEVICE, HEURISTIC)[0]}
    other = found["cpu.filter2d"]
    assert other.measured is None
    assert other.expected == pytest.approx(other.cost / 1000, rel=1e-3)  # the file keeps four digits
    assert other.source == "heuristic"


def test_a_neighbour_scales_the_predictions():
    larger = LAYER.with_(n=3)
    at_home = candidates()["cpu.depthwise"]
    know(cpu_depthwise=at_home.cost * 1e6 / 1000, cpu_filter2d=1e6)
    found = choose(larger, DEVICE, HEURISTIC)
    assert (found.engine.name, found.source) == ("cpu.depthwise", "neighbour")
    assert found.expected == pytest.approx(found.cost / 1000, rel=1e-3)  # the file keeps four digits
    assert found.measured is None


def test_what_is_known_of_f16_is_known_of_bf16():
    layer = Problem.parse("fprop n4 c16 h20 w20 k32 r3 s3 pad1 f16 nchw")
    know(layer, cpu_naive=5, cpu_im2col_gemm=7)
    found = database.lookup(Problem.parse(str(layer).replace("f16", "bf16")), DEVICE, version_of)
    assert found is not None
    assert found.problem == str(layer)
    assert 0 < found.distance < 0.1  # a neighbour, and nearer than any other size


def test_times_of_other_code_are_not_used():
    know(version="another", cpu_im2col_gemm=1)
    assert choose(LAYER, DEVICE, HEURISTIC).source == "heuristic"


def test_an_engine_s_version_follows_its_code_and_not_its_comments(tmp_path):
    from openconv.engine import code_digest

    code = 'from .beside import x\n\n\ndef f():\n    """Says."""\n    return x  # why\n'
    path = tmp_path / "engine.py"

    def version(text: str, beside: str = "x = 1\n") -> str:
        (tmp_path / "beside.py").write_text(beside)
        path.write_text(text)
        code_digest.cache_clear()
        return code_digest(str(path))

    first = version(code)
    assert first == version(code.replace("Says.", "Says more.\n\n    At length.").replace("why", "why not"))
    assert first != version(code.replace("return x", "return -x"))
    assert first != version(code, beside="x = 2\n")


def test_knobs_that_were_measured_fastest_are_taken():
    layer = Problem.parse("fprop n4 c16 h20 w20 k32 r3 s3 pad1 f32 nchw")
    engine = engine_named("cpu.im2col_gemm")
    first, second = list(dict.fromkeys(map(str, engine.knobs(layer, DEVICE))))[:2]
    times = {first: 9e-6, second: 5e-6}
    measured = [Measurement(engine.name, k, engine.version, t, t, t, 9) for k, t in times.items()]
    found = Entry(tuple(sorted(measured, key=lambda m: m.seconds)))
    database.user_store().update(Database({DEVICE.key: {str(layer): found}}))
    assert str(choose(layer, DEVICE, HEURISTIC.but(engine=engine.name)).knobs) == second
    x, w = torch.randn(layer.x_shape), torch.randn(layer.w_shape)
    with openconv.policy(engine=engine.name, tuning="heuristic"):
        out = openconv.conv2d(x, w, padding=1)
        assert f"run cpu.im2col_gemm [{second}]" in openconv.explain(openconv.conv2d, x, w, padding=1).steps
    torch.testing.assert_close(out, torch.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4)


def test_explain_says_where_the_choice_came_from():
    know(cpu_im2col_gemm=11, cpu_filter2d=50, cpu_depthwise=60)
    with openconv.tuning("heuristic"):
        told = openconv.explain(LAYER)
        near = openconv.explain(LAYER.with_(n=3))
    assert (told.basis, told.winner and told.winner.name) == ("database", "cpu.im2col_gemm")
    assert "measured to be the quickest" in told.why
    assert "user database, 2026-01-01" in told.why
    assert told.winner is not None
    assert told.winner.measured == pytest.approx(11e-6)
    assert "11.0 us" in str(told)
    assert near.basis == "neighbour"
    assert f"neighbour '{LAYER}'" in near.why
    assert "expected" in str(near)
    with openconv.tuning("off"):
        assert openconv.explain(LAYER).basis == "heuristic"
    assert told.to_dict()["basis"] == "database"


# -- the mode -------------------------------------------------------------------------------------------------------


def test_the_mode_holds_for_a_block_or_for_the_process():
    before = current_policy()
    with openconv.tuning("measure", seconds=0.25) as inside:
        assert current_policy() is inside
        assert (inside.tuning, inside.measure_seconds) == ("measure", 0.25)
        assert in_another_thread(current_policy) == before
        with openconv.policy(max_workspace=0):
            assert current_policy().tuning == "measure"
            with openconv.tuning("off"):
                assert (current_policy().tuning, current_policy().max_workspace) == ("off", 0)
            assert current_policy().tuning == "measure"
    assert current_policy() is before
    try:
        openconv.tuning("measure")
        assert current_policy().tuning == "measure"
        assert in_another_thread(current_policy).tuning == "measure"
    finally:
        openconv.tuning(before.tuning)
    assert current_policy() == before


def in_another_thread(call: Callable[[], Policy]) -> Policy:
    found: list[Policy] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_a_mode_that_is_none_is_refused_and_changes_nothing():
    before = current_policy()
    with pytest.raises(ValueError, match="tuning is 'fast'; wanted one of heuristic, measure, off"):
        openconv.tuning("fast")
    with pytest.raises(ValueError, match="measure_seconds is 0; wanted a number of seconds > 0"):
        openconv.tuning("measure", seconds=0)
    assert current_policy() is before


def test_a_policy_from_another_process_is_equal_to_its_own_kind():
    told = Policy(engine="cpu.naive", tuning="measure")
    script = f"import pickle, sys; from openconv.select import Policy; sys.stdout.buffer.write(pickle.dumps({told!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "1"}
    )
    assert {pickle.loads(done.stdout): 1}[told] == 1


def test_the_policy_s_text_carries_the_mode():
    told = Policy(tuning="measure", measure_seconds=0.25)
    assert Policy.parse(str(told)) == told


# -- measuring ------------------------------------------------------------------------------------------------------


def counted(monkeypatch) -> list[Problem]:
    """The problems that are measured from now on."""
    seen: list[Problem] = []
    real = autotune.measure_candidates

    def noted(problem: Problem, *rest: object) -> Entry:
        seen.append(problem)
        return real(problem, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(autotune, "measure_candidates", noted)
    return seen


def test_the_first_call_measures_and_the_next_ones_do_not(monkeypatch):
    seen = counted(monkeypatch)
    x, w = torch.randn(LAYER.x_shape), torch.randn(LAYER.w_shape)
    with openconv.tuning("measure", seconds=0.05):
        for _ in range(2):
            out = openconv.conv2d(x, w, padding=1, groups=8)
        assert seen == [LAYER]
        forget_plans()  # as in another process
        openconv.conv2d(x, w, padding=1, groups=8)
        assert seen == [LAYER]
        x.requires_grad_()
        openconv.conv2d(x, w, padding=1, groups=8).sum().backward()
    assert seen == [LAYER, LAYER.with_(direction="dgrad")]
    torch.testing.assert_close(out, torch.conv2d(x, w, padding=1, groups=8), rtol=1e-4, atol=1e-4)
    known = database.user_store().load().devices[DEVICE.key][str(LAYER)]
    assert len(known.measured) >= 2
    assert rank(LAYER, DEVICE, HEURISTIC)[0][0].engine.name == known.best.engine


@pytest.mark.parametrize("mode", ["heuristic", "off"])
def test_nothing_is_measured_in_the_other_modes(monkeypatch, mode):
    seen = counted(monkeypatch)
    with openconv.tuning(mode):
        openconv.conv2d(torch.randn(LAYER.x_shape), torch.randn(LAYER.w_shape), padding=1, groups=8)
    assert seen == []


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch):
    seen = counted(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    asked = Policy(tuning="measure")
    plan = tuned_plan(LAYER, DEVICE, torch.device("cuda"), asked)
    assert seen == []
    assert plan.policy != asked  # and so it is not remembered in place of a measured one


def test_without_memory_or_a_place_to_write_the_call_goes_on(monkeypatch, tmp_path):
    def no_memory(*_: object) -> Entry:
        raise MemoryError

    monkeypatch.setattr(autotune, "measure_candidates", no_memory)
    x, w = torch.randn(LAYER.x_shape), torch.randn(LAYER.w_shape)
    with openconv.tuning("measure"):
        out = openconv.conv2d(x, w, padding=1, groups=8)
    torch.testing.assert_close(out, torch.conv2d(x, w, padding=1, groups=8), rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "file" / "tuning.json"))
    forget_plans()
    with openconv.tuning("measure", seconds=0.01):
        openconv.conv2d(x, w, padding=1, groups=8)


def test_a_policy_s_limits_hold_for_what_is_measured():
    limit = candidates()["cpu.depthwise"].workspace
    assert candidates()["cpu.im2col_gemm"].workspace > limit
    plan = tuned_plan(LAYER, DEVICE, CPU, Policy(tuning="measure", measure_seconds=0.01, max_workspace=limit))
    assert plan.candidate is not None
    assert plan.candidate.workspace <= limit
    known = database.user_store().load().devices[DEVICE.key][str(LAYER)]
    assert "cpu.im2col_gemm" not in {m.engine for m in known.measured}


def made(cost: float, engine: str, knobs: str = "-") -> Candidate:
    return Candidate(engine_named(engine), knobs, cost, 0, engine_named("cpu.naive").traits(LAYER, None))


def test_each_engine_s_default_is_measured_before_other_knobs():
    given = [made(1, "cpu.im2col_gemm", str(at)) for at in range(9)] + [made(3, "cpu.depthwise"), made(5, "cpu.naive")]
    found = shortlist(given, most=4)
    assert [(c.engine.name, c.knobs) for c in found] == [
        ("cpu.im2col_gemm", "0"), ("cpu.depthwise", "-"), ("cpu.im2col_gemm", "1"), ("cpu.im2col_gemm", "2"),
    ]  # fmt: skip
    assert shortlist([]) == []


def test_the_search_space_has_every_engine_and_its_knobs_once():
    found = search(Problem.parse("fprop n4 c16 h20 w20 k16 r3 s3 pad1 f32 nchw"), DEVICE, Policy())
    texts = [(c.engine.name, str(c.knobs)) for c in found]
    assert len(set(texts)) == len(texts)
    assert {name for name, _ in texts} >= {"cpu.im2col_gemm", "cpu.naive"}
    assert sum(name == "cpu.im2col_gemm" for name, _ in texts) > 1


class Clock:
    """A made-up machine: each run takes what its next number says, and time passes by that."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("openconv.autotune.time.perf_counter", lambda: self.now)

    def run(self, *times: float) -> Callable[[], float]:
        left = itertools.cycle(times)

        def once() -> float:
            took = next(left)
            self.now += took
            return took

        return once


def test_settling_drops_what_is_clearly_slower_and_ends_early(monkeypatch):
    clock = Clock(monkeypatch)
    found = settle([clock.run(1.0, 1.01, 0.99), clock.run(1.3, 1.31, 1.29), clock.run(5.0)], 1000)
    assert found.settled
    assert [len(s) for s in found.samples] == [5, 5, 1]
    assert clock.now < 30


def test_settling_goes_on_while_the_noise_is_larger_than_the_difference(monkeypatch):
    clock = Clock(monkeypatch)
    quiet = settle([clock.run(1.0), clock.run(1.1)], 1000)
    noisy = settle([clock.run(0.6, 1.0, 1.5, 1.0, 0.7), clock.run(0.7, 1.1, 1.6, 1.1, 0.8)], 1000)
    assert quiet.settled
    assert noisy.settled
    assert len(noisy.samples[0]) > 2 * len(quiet.samples[0])


def test_a_tie_is_settled_once_it_is_known_to_be_one(monkeypatch):
    clock = Clock(monkeypatch)
    assert settle([clock.run(1.0, 1.001), clock.run(1.001, 1.0)], 1000).settled


def test_the_time_given_ends_it(monkeypatch):
    clock = Clock(monkeypatch)
    found = settle([clock.run(1.0, 1.5), clock.run(1.5, 1.0)], 20)
    assert not found.settled
    assert clock.now < 22
    one_each = settle([clock.run(50.0), clock.run(60.0)], 20)
    assert [len(s) for s in one_each.samples] == [1, 1]


def test_a_cpu_s_caches_are_taken_by_others_before_all_but_tiny_runs(monkeypatch):
    clock, log = Clock(monkeypatch), []
    others = SimpleNamespace(sum=lambda: log.append("others"))

    def sampler(took: float) -> Callable[[], float]:
        run = clock.run(took)
        return autotune._CpuSampler(lambda: log.append(str(run())), others)  # type: ignore[arg-type]

    long, tiny = sampler(1e-3), sampler(25e-6)
    assert [long(), long()] == pytest.approx([1e-3, 1e-3])
    assert log == ["others", "0.001"] * 2
    log.clear()
    assert [tiny(), tiny()] == pytest.approx([25e-6, 25e-6])
    assert log == ["others", *["2.5e-05"] * (1 + 12)]


def test_an_entry_holds_what_was_measured_fastest_first():
    found = measure_candidates(LAYER, DEVICE, CPU, shortlist(search(LAYER, DEVICE, Policy())), 0.2)
    assert len(found.measured) >= 2
    assert [m.seconds for m in found.measured] == sorted(m.seconds for m in found.measured)
    assert all(m.version == engine_named(m.engine).version and 0 < m.p20 <= m.p80 for m in found.measured)


# -- tune -------------------------------------------------------------------------------------------------------------


def test_tune_measures_problems_once_and_goes_on_where_it_ended():
    told: list[tuple[int, int, str]] = []
    problems = [str(LAYER), "fprop n1 c4 h9 w9 k4 r1 s1 f32 nchw", "fprop n0 c4 h9 w9 k4 r1 s1 f32 nchw"]
    openconv.tune(problems, budget="60s", progress=lambda at, of, tuned: told.append((at, of, tuned.state)))
    assert told == [(1, 3, "measured"), (2, 3, "measured"), (3, 3, "no choice")]
    assert [t.state for t in openconv.tune(problems, budget=0.5)] == ["known", "known", "no choice"]
    store = database.user_store()
    found = store.load().devices[DEVICE.key][str(problems[0])]
    old = dataclasses.replace(found.measured[-1], version="of before")
    before = Database()
    before.put(DEVICE.key, str(problems[0]), Entry((old,), found.when))
    store.update(before)  # one is of code that has changed since, the times of others still hold
    assert [t.state for t in openconv.tune(problems, budget=0.5)] == ["measured", "known", "no choice"]
    assert [t.state for t in openconv.tune(problems[:1], budget=0.5, again=True)] == ["measured"]
    with pytest.raises(TypeError, match="takes no example inputs"):
        openconv.tune(problems, torch.zeros(1))


def test_a_budget_that_ends_is_told(monkeypatch):
    problems = [LAYER.with_(n=n) for n in (1, 8, 64)]
    clock = itertools.chain([0.0, 0.0], itertools.repeat(100.0))
    monkeypatch.setattr("openconv.tuner.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(tuner, "measure_and_keep", lambda *_: Entry((), ""))
    assert [t.state for t in openconv.tune(problems, budget=10)][1:] == ["no time", "no time"]


def test_plans_made_before_are_made_anew_after_tuning():
    with openconv.tuning("heuristic"):
        before = plan_for(LAYER, DEVICE, current_policy())
        openconv.tune(LAYER, budget=0.2)
        assert plan_for(LAYER, DEVICE, current_policy()) is not before


def test_the_gain_is_over_what_predictions_would_choose():
    [tuned] = openconv.tune(LAYER, budget=0.3)
    assert tuned.gain is not None
    assert tuned.gain >= 1


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("5m", 300), ("1h", 3600), ("2.5", 2.5), (7, 7)])
def test_times_are_read(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5x", "-3s", 0, float("nan"), True])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match="wanted seconds > 0"):
        parse_seconds(text)


# -- models -----------------------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        torch.nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, output_padding=1, bias=False),
    )


FORWARD = [
    "fprop n2 c3 h16 w16 k8 r3 s3 stride2 pad1 f32 nchw +bias",
    "fprop n2 c8 h8 w8 k8 r3 s3 pad1 g8 f32 nchw",
    "dgrad n2 c4 h17 w17 k8 r4 s4 stride2 pad1 f32 nchw",
]


@pytest.mark.parametrize("converted", [False, True])
def test_the_convolutions_of_a_model_are_recorded_once_each(converted):
    net = openconv.convert(model()).model if converted else model()
    assert list(map(str, convolutions_of(net, torch.randn(2, 3, 16, 16)))) == FORWARD


@pytest.mark.parametrize("converted", [False, True])
def test_and_those_of_its_gradients(converted):
    net = openconv.convert(model()).model if converted else model()
    found = set(map(str, convolutions_of(net, torch.randn(2, 3, 16, 16, requires_grad=True), backward=True)))
    assert found == {
        *FORWARD,
        "fprop n2 c4 h17 w17 k8 r4 s4 stride2 pad1 f32 nchw",
        "wgrad n2 c4 h17 w17 k8 r4 s4 stride2 pad1 f32 nchw",
        "dgrad n2 c8 h8 w8 k8 r3 s3 pad1 g8 f32 nchw",
        "wgrad n2 c8 h8 w8 k8 r3 s3 pad1 g8 f32 nchw",
        "dgrad n2 c3 h16 w16 k8 r3 s3 stride2 pad1 f32 nchw",
        "wgrad n2 c3 h16 w16 k8 r3 s3 stride2 pad1 f32 nchw",
    }


def test_tuning_a_model_is_known_to_its_own_calls(monkeypatch):
    net, x = openconv.convert(model().eval()).model, torch.randn(2, 3, 16, 16)
    assert {t.state for t in openconv.tune(net, x, budget=60)} <= {"measured", "no choice"}
    seen = counted(monkeypatch)
    with openconv.tuning("measure"), torch.no_grad():
        net(x)
    assert seen == []


def test_a_database_that_cannot_be_written_is_told_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    seen = counted(monkeypatch)
    with pytest.raises(OSError, match="file"):
        openconv.tune(LAYER, budget=0.2, store=database.Store(tmp_path / "file" / "tuning.json"))
    assert seen == []


def test_what_came_of_a_problem_as_text():
    measured = (
        Measurement("cpu.a", "k=1", "v", 2e-6, 1e-6, 3e-6, 3),
        Measurement("cpu.b", "-", "v", 3e-6, 2e-6, 4e-6, 3),
    )
    problem = LAYER
    told = tuner.Tuned(problem, "measured", Entry(measured), "cpu.b -")
    assert str(told) == f"{problem}: measured, cpu.a [k=1] 2.00 us, 1.50 times as fast as what predictions choose"
    assert str(tuner.Tuned(problem, "no choice")) == f"{problem}: no choice"


def test_a_model_is_tuned_where_it_is():
    net, x = model().to("meta"), torch.randn(2, 3, 16, 16, device="meta")
    for example in (x, {"x": x}, [x]):
        assert tuner._place_of(net, (example,)) == torch.device("meta")
    assert tuner._place_of(net, (3,)) == torch.device("meta")
    assert tuner._place_of([LAYER], ()) == "cpu"


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ValueError, match="Linear called no convolution"):
        openconv.tune(torch.nn.Linear(2, 2), torch.zeros(1, 2))
