"""The benchmark: verification before timing, records that survive an interruption, and its commands."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner, Result

from openconv import autotune, functional
from openconv.bench import command, run
from openconv.bench.command import jobs_of
from openconv.bench.results import Ledger, Record, commit, device_slug, environment, read, write
from openconv.bench.run import Limits, Skipped, measure
from openconv.bench.suites import Variation
from openconv.bench.timing import Timing
from openconv.cli import app
from openconv.cpu.device import cpu_device
from openconv.engine import UnsupportedProblem, engine_named
from openconv.plan import device_of
from openconv.problem import Problem
from openconv.reference import Reference, random_inputs
from openconv.select import database, policy
from openconv.select.database import Database, Entry, Measurement

CPU = torch.device("cpu")
TINY = Problem.parse("fprop n1 c3 h6 w7 k4 r3 s3 pad1 f32 nchw")
CHOICE = Problem.parse("fprop n2 c8 h12 w12 k8 r3 s3 pad1 g8 f32 nchw")  # of several engines, nearly alike
QUICK = Limits(budget=0.001, peers=("torch",))


def openconv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def words(result: Result) -> str:
    return " ".join(result.output.split())


# -- one problem ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_every_engine_and_peer_is_verified_and_timed(direction):
    found = measure("some", "tiny", TINY.with_(direction=direction), CPU, Limits(budget=0.001))
    assert {"cpu.naive", "cpu.im2col_gemm", "cpu.filter2d", "torch", "torch_channels_last"} <= set(found.seconds)
    assert found.wrong == []
    assert found.regret >= 1
    assert set(found.error) == set(found.seconds)
    assert all(error < 1e-5 for error in found.error.values())
    assert found.heuristic == found.chosen
    assert found.source == "heuristic"
    assert {"copy", "f32"} <= set(found.ceilings)
    assert all(share > 0 for share in found.roofline.values())
    assert found.workspace["cpu.naive"] == 0 < found.workspace["cpu.im2col_gemm"]
    assert {"device", "threads", "isa", "torch", "commit", "command"} <= set(found.machine)


def test_the_choice_for_any_batch_is_a_contestant_if_asked_for():
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, invariant=True))
    assert "batch_invariant" in found.seconds
    assert "batch_invariant" in found.peers  # beside the choice, in every table
    assert found.knobs["batch_invariant"]
    assert "batch_invariant" not in measure("some", "tiny", TINY, CPU, QUICK).seconds


def test_fused_problems_meet_fused_and_unfused_peers():
    fused = TINY.with_(epilogue="+bias+relu")
    found = measure("some", "tiny", fused, CPU, Limits(budget=0.001, peers=("torch", "torch_fused")))
    assert {"torch", "torch_fused"} <= set(found.seconds)
    assert found.wrong == []


def test_what_is_wrong_is_named_and_not_timed(monkeypatch):
    monkeypatch.setattr(Reference, "error", lambda *_, **__: 1.0)
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, engines=("cpu.naive",)))
    assert found.wrong == ["cpu.naive", "torch"]
    assert found.seconds == {}
    assert found.regret == math.inf


def test_what_is_chosen_alone():
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, engines=("chosen",)))
    assert set(found.seconds) - {"torch"} == {found.chosen, found.heuristic}
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, engines=("chosen", "cpu.naive")))
    assert set(found.seconds) - {"torch"} == {found.chosen, found.heuristic, "cpu.naive"}


def test_errors_of_transforms_are_shares_of_the_largest_size():
    """The corners of this image have one term of 441; a transform errs there as far as in the middle."""
    problem = Problem.parse("fprop n1 c1 h40 w40 k1 r21 s21 pad20 f32 nchw")
    found = measure("some", "corners", problem, CPU, dataclasses.replace(QUICK, engines=("cpu.fft",)))
    assert found.wrong == []
    inputs = random_inputs(problem)
    with policy(engine="cpu.fft", tuning="off"):
        made = functional.conv2d(inputs.a, inputs.b, None, 1, 20)
    reference = Reference(problem, inputs)
    assert found.error["cpu.fft"] == reference.error(made, plain_sum=False)
    assert reference.error(made) > 10 * found.error["cpu.fft"]


def test_a_verifier_in_another_process_sees_the_same():
    with run.Verifier() as verifying:
        found = measure("some", "tiny", TINY, CPU, QUICK, verifying=verifying)
    here = measure("some", "tiny", TINY, CPU, QUICK).error
    # MKL computes transforms that are left over by themselves in another order, which follows the number of threads.
    assert found.error == pytest.approx(here, abs=1e-6)
    assert {name: error for name, error in found.error.items() if "fft" not in name} == {
        name: error for name, error in here.items() if "fft" not in name
    }


def test_a_fault_in_a_library_takes_down_the_verifier_and_not_the_benchmark():
    with run.Verifier() as verifying:
        with pytest.raises(Skipped, match="brought down the process that verified it"):
            verifying.run(_fault)
        assert measure("some", "tiny", TINY, CPU, QUICK, verifying=verifying).wrong == []


def _fault() -> run.Verified:
    os.abort()


def test_a_choice_by_the_database_is_timed_beside_that_by_prediction(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    monkeypatch.setattr(database, "_SHIPPED", tmp_path / "shipped")
    layer = Problem.parse("fprop n4 c16 h20 w20 k32 r3 s3 pad1 f32 nchw")
    engine, device = engine_named("cpu.im2col_gemm"), cpu_device(torch.get_num_threads())
    other = list(dict.fromkeys(map(str, engine.knobs(layer, device))))[1]
    known = Entry((Measurement(engine.name, other, engine.version, 1e-6, 1e-6, 1e-6, 9),), "2026-01-01T00:00:00Z")
    database.user_store().update(Database({device.key: {str(layer): known}}))
    with policy(tuning="heuristic", engine=engine.name):
        found = measure("some", "layer", layer, CPU, QUICK)
    assert found.chosen == f"cpu.im2col_gemm[{other}]"
    assert (found.heuristic, found.source) == ("cpu.im2col_gemm", "database")
    assert {found.chosen, found.heuristic} <= set(found.seconds)
    assert found.knobs[found.chosen] == other != found.knobs["cpu.im2col_gemm"]
    assert found.heuristic_regret > 0


def test_peers_alone_make_a_baseline():
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, engines=None))
    assert (found.chosen, list(found.seconds)) == ("", ["torch"])


def test_a_peer_that_was_asked_for_and_refuses_says_why():
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, peers=("torch", "opencv")))
    assert "opencv" not in found.seconds
    assert found.notes["opencv"]


def test_what_takes_too_long_or_too_much_memory_is_skipped_before_it_runs(monkeypatch):
    large = TINY.with_(n=4000)
    found = measure("some", "large", large, CPU, QUICK)
    assert "at most 20000 are timed" in found.notes["cpu.naive"]
    named = measure("some", "large", large, CPU, dataclasses.replace(QUICK, engines=("cpu.naive",)))
    assert "cpu.naive" in named.seconds
    with pytest.raises(UnsupportedProblem, match=r"cpu.naive: predicted .*at most 1e-09 s are waited for"):
        measure("some", "large", large, CPU, dataclasses.replace(QUICK, engines=("cpu.naive",), longest=1e-9))
    with pytest.raises(Skipped, match=r"at most 1e-09 s are waited for"):
        measure("some", "large", large, CPU, dataclasses.replace(QUICK, longest=1e-9))
    short = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 28800000000 bytes"
    )
    for error in (RuntimeError(short), MemoryError("no more")):
        monkeypatch.setattr(run, "verify", Mock(side_effect=error))
        with pytest.raises(Skipped, match="not enough memory to verify it"):
            measure("some", "tiny", TINY, CPU, QUICK)
    monkeypatch.setattr(run, "_free_memory", lambda: 1000)
    with pytest.raises(Skipped, match=r"it needs about .* are free"):
        measure("some", "tiny", TINY, CPU, QUICK)


def test_a_peer_that_takes_too_long_is_called_once(monkeypatch):
    calls: list[object] = []
    real: Any = torch.conv2d

    def slow(*given: object, **options: object) -> torch.Tensor:
        calls.append(given)
        time.sleep(0.05)
        kept: torch.Tensor = real(*given, **options)
        return kept

    monkeypatch.setattr(torch, "conv2d", slow)
    monkeypatch.setattr(torch.nn.functional, "conv2d", slow)
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, longest=0.04))
    assert len(calls) == 1
    assert found.seconds["torch"]["median"] == found.seconds["torch"]["p80"] >= 0.05
    assert "called once" in found.notes["torch"]
    assert "torch" not in found.error


@pytest.mark.parametrize(("kind", "calls"), [("cuda", 2), ("cpu", 1)])
def test_a_search_in_the_first_call_is_not_its_time(monkeypatch, kind, calls):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made: list[int] = []

    def call() -> int:
        time.sleep(0.05 if not made else 0)
        made.append(len(made))
        return made[-1]

    result, took = run._once(call, torch.device(kind), 0.04)
    assert (len(made), result) == (calls, calls - 1)
    assert (took > 0.04) == (kind == "cpu")
    assert run._once(call, torch.device(kind), 0.04)[0] == calls  # a quick one is called once


def test_a_disturbed_race_is_run_again_and_told(monkeypatch):
    races = []
    taken = iter([0, 10**9, 0, 10**9, 0, 0])

    def noted(calls: Any, **options: Any) -> list[Timing]:
        races.append(calls)
        return [Timing(1e-3, 1e-3, 1e-3) for _ in calls]

    monkeypatch.setattr(run, "race", noted)
    monkeypatch.setattr(run, "_taken_away", lambda: next(taken))
    assert measure("some", "tiny", TINY, CPU, QUICK).disturbed == 0
    assert len(races) == 3
    taken = iter([0, 10**9] * 3)
    assert measure("some", "tiny", TINY, CPU, QUICK).disturbed > run.DISTURBED


def test_overhead_is_measured_when_asked_for():
    found = measure("some", "tiny", TINY, CPU, dataclasses.replace(QUICK, overhead=True))
    assert set(found.overhead) == set(found.seconds)
    assert all(seconds > 0 for seconds in found.overhead.values())


# -- records ----------------------------------------------------------------------------------------------------------


def test_records_survive_the_file_and_spell_out_the_ratios(tmp_path):
    records = [measure("some", "tiny", TINY, CPU, QUICK, command="openconv bench some")]
    write(tmp_path / "deep" / "some.jsonl", records)
    assert read(tmp_path / "deep" / "some.jsonl") == records
    assert records[0].parsed() == TINY
    assert '"ratio": {"torch": ' in (tmp_path / "deep" / "some.jsonl").read_text()


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text(measure("some", "tiny", TINY, CPU, QUICK).to_json() + "\n{}\n")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2: not a record"):
        read(path)


def test_a_ledger_replaces_what_was_measured_again_and_keeps_the_rest(tmp_path):
    first = measure("some", "tiny", TINY, CPU, QUICK)
    other = dataclasses.replace(first, label="other", problem=str(TINY.with_(n=2)))
    ledger = Ledger(tmp_path / "some.jsonl")
    ledger.add(first)
    ledger.add(other)
    again = dataclasses.replace(first, seconds={})
    Ledger(tmp_path / "some.jsonl").add(again)
    assert read(tmp_path / "some.jsonl") == [again, other]


def test_only_what_the_same_code_and_machine_recorded_counts_as_done(tmp_path):
    ledger = Ledger(tmp_path / "some.jsonl")
    ledger.add(measure("some", "tiny", TINY, CPU, QUICK, command="openconv bench this"))
    machine = environment(CPU, "openconv bench that")
    assert ledger.has("tiny", TINY, machine)
    assert not ledger.has("tiny", TINY.with_(n=2), machine)
    assert not ledger.has("tiny", TINY, machine | {"commit": "another"})


def test_the_commit_is_that_of_the_checkout():
    assert commit() == "unknown" or len(commit().rstrip("+")) == 10


def test_records_without_kept_memory_have_a_place_of_their_own(monkeypatch):
    kept = device_slug(CPU)
    monkeypatch.setenv("OPENCONV_KEEP_MB", "0")
    assert device_slug(CPU) == kept + "-new-memory"


def test_the_function_is_timed_where_it_sees_the_problem_itself():
    """What is recorded as chosen is what ran: the function chooses by the problem that its tensors lead to."""
    for text, is_function in (
        ("fprop n2 c4 h6 w7 k4 r3 s3 pad1 g4 f32 nhwc", True),
        ("fprop n2 c4 h6 w7 k5 r3 s3 pad1 f32 nchw", True),
        ("fprop n2 c1 h6 w7 k5 r3 s3 pad1 f32 nhwc", False),  # nchw to who sees the tensors alone
        ("fprop n2 c4 h6 w7 k5 r3 s3 pad1 f32 nchw tf32", False),
        ("dgrad n2 c4 h6 w7 k5 r3 s3 pad1 f32 nchw", False),
    ):
        problem = Problem.parse(text)
        device = device_of(CPU)
        called = run._Contestant("some", None).call(problem, random_inputs(problem), device)
        assert (getattr(called, "func", None) is functional.conv2d) == is_function, text


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_record_says_how_it_was_measured_and_not_where_it_was_written():
    said = command._without_place(["bench", "stems", "--out", "/somewhere", "--budget", "0.1", "--out=/elsewhere"])
    assert said == ["bench", "stems", "--budget", "0.1"]


def test_jobs_vary_as_the_suite_says_unless_told_otherwise():
    resnet = jobs_of(["resnet50"], "cpu", Variation())
    assert {j.problem.direction for j in resnet} == {"fprop", "dgrad", "wgrad"}
    few = jobs_of(["resnet50"], "cpu", Variation(batches=(2,), directions=("wgrad",)))
    assert {(j.problem.n, j.problem.direction) for j in few} == {(2, "wgrad")}
    fused = jobs_of(["resnet50", str(TINY)], "cpu", Variation(batches=(1,)), "+bias+relu")
    assert {str(j.problem.epilogue) for j in fused} == {"+bias+relu"}
    assert {j.problem.direction for j in fused} == {"fprop"}
    assert {j.suite for j in jobs_of([], "cuda", Variation())} >= {"resnet50", "vgg16", "image_filters"}
    with pytest.raises(ValueError, match="no problem is left"):
        jobs_of(["fused"], "cpu", Variation(directions=("wgrad",)))


def test_bench_prints_a_table_and_records_at_once(tmp_path):
    done = openconv("bench", TINY, "--budget", 0.001, "--peer", "torch", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "torch" in done.output
    [found] = read(tmp_path / "given.jsonl")
    assert found.machine["command"].startswith("openconv")
    resumed = openconv("bench", TINY, "--budget", 0.001, "--peer", "torch", "--out", tmp_path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "1 of 1 problems are recorded already" in words(resumed)
    assert read(tmp_path / "given.jsonl") == [found]


def test_an_interruption_keeps_what_is_done_and_a_resumed_run_does_the_rest(tmp_path, monkeypatch):
    problems = [TINY, TINY.with_(n=2), TINY.with_(n=3)]
    real, seen = run.measure, []

    def interrupted(suite: str, label: str, problem: Problem, *rest: object, **options: object) -> Record:
        seen.append(problem)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(suite, label, problem, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "measure", interrupted)
    arguments = ("bench", *problems, "--budget", 0.001, "--peer", "torch", "--engine", "cpu.naive", "--out", tmp_path)
    stopped = openconv(*arguments)
    assert stopped.exit_code == 130
    assert "--resume goes on from there" in words(stopped)
    assert len(read(tmp_path / "given.jsonl")) == 1
    done = openconv(*arguments, "--resume")
    assert done.exit_code == 0, done.output
    assert seen == [problems[0], problems[1], problems[1], problems[2]]
    assert [r.parsed() for r in read(tmp_path / "given.jsonl")] == problems


def test_a_wrong_engine_is_shown_as_wrong_and_fails_the_command(monkeypatch, tmp_path):
    def wrong(*_: object) -> run.Verified:
        return run.Verified({"cpu.naive": 1.0})

    monkeypatch.setattr(run, "verify", wrong)
    monkeypatch.setattr(run.Verifier, "run", lambda self, check: check())
    done = openconv("bench", TINY, "--budget", 0.001, "--engine", "cpu.naive", "--peer", "none", "--out", tmp_path)
    assert done.exit_code == 1
    assert "wrong" in done.output.lower()
    assert read(tmp_path / "given.jsonl")[0].seconds == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nothing",), "no suite 'nothing'"),
        (("fprop n1",), "lacks c, k"),
        ((TINY, "--engine", "cpu.nothing"), "there is no engine 'cpu.nothing'; wanted one of"),
        ((TINY, "--peer", "nobody"), "there is no peer 'nobody'; wanted one of torch"),
        ((TINY, "--device", "tpu"), "device is 'tpu'; wanted cpu or cuda"),
        ((TINY, "--direction", "sideways"), "direction is 'sideways'"),
        ((TINY, "--dtype", "f31"), "dtype is ('f31'"),
        ((TINY, "--epilogue", "+what"), "what"),
        ((TINY, "--isa", "mmx"), "isa is 'mmx'; wanted one of avx2"),
    ],
)
def test_bad_input_is_told_in_one_line_before_anything_runs(tmp_path, arguments, text):
    done = openconv("bench", *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert text in words(done)
    assert not (tmp_path / "out").exists()


def test_engines_that_take_nothing_are_told_and_left_out():
    done = openconv("bench", TINY, "--engine", "cpu.gemm_1x1", "--peer", "none", "--no-record")
    assert done.exit_code == 0
    assert "left out" in words(done)
    assert "cpu.gemm_1x1: filter is" in words(done)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_told():
    done = openconv("bench", TINY, "--device", "cuda")
    assert done.exit_code == 2
    assert "finds no CUDA device" in words(done)


# -- tuning on the command line ---------------------------------------------------------------------------------------


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "user.json"))
    monkeypatch.setattr(database, "_SHIPPED", tmp_path / "shipped")
    return tmp_path / "user.json"


def test_tune_measures_problems_and_says_what_it_found(user):
    done = openconv("tune", CHOICE, "--budget", "0.3s")
    assert done.exit_code == 0, done.output
    assert "1 measured" in words(done)
    assert len(database.read_database(user)) == 1
    assert "1 known" in words(openconv("tune", CHOICE, "--budget", "1s"))


def test_tune_takes_a_model_by_its_name(user, tmp_path, monkeypatch):
    (tmp_path / "some_models.py").write_text(
        "import torch\n\n\ndef small():\n    return torch.nn.Conv2d(4, 8, 3, groups=4)\n\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as the command openconv has it
    done = openconv("tune", "some_models:small", "--input", "1x4x9x9", "--backward", "--budget", "60s")
    assert done.exit_code == 0, done.output
    assert "2 measured" in words(done)  # nobody asks for the gradient of the input
    for arguments, text in (
        (("some_models:small",), "needs --input"),
        (("some_models:small", "--input", "1xx"), "input is '1xx'; wanted sizes such as 1x3x224x224"),
        (("some_models:number", "--input", "1"), "is a int; wanted a torch.nn.Module"),
        (("some_models:other", "--input", "1"), "wanted MODULE:NAME"),
        (("no.such:thing", "--input", "1"), "wanted MODULE:NAME"),
        ((CHOICE, "--budget", "soon"), "wanted seconds > 0"),
    ):
        refused = openconv("tune", *arguments)
        assert refused.exit_code == 2
        assert text in words(refused)


def test_an_interrupted_tuning_keeps_what_is_measured(user, monkeypatch):
    real, seen = autotune.measure_and_keep, []

    def interrupted(core: Problem, *rest: object) -> Entry | None:
        seen.append(core)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(core, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("openconv.tuner.measure_and_keep", interrupted)
    done = openconv("tune", CHOICE, CHOICE.with_(n=8), "--budget", "60s")
    assert done.exit_code == 130
    assert "goes on from there" in words(done)
    assert len(database.read_database(user)) == 1


def test_databases_are_shown_compared_merged_exported_and_imported(user, tmp_path):
    a, b, both, out = (tmp_path / name for name in ("a.json", "b.json", "both.json", "out.json"))
    assert openconv("tune", CHOICE, "--budget", "0.2s", "--out", a).exit_code == 0
    assert openconv("tune", CHOICE.with_(n=8), "--budget", "0.2s", "--out", b).exit_code == 0
    assert "2 problems differ" in words(openconv("tuning", "diff", a, b))
    assert "0 problems differ" in words(openconv("tuning", "diff", a, a))
    assert openconv("tuning", "merge", a, b, "--out", both).exit_code == 0
    assert len(database.read_database(both)) == 2
    assert "2 problems imported" in words(openconv("tuning", "import", both))
    assert len(database.read_database(user)) == 2
    assert openconv("tuning", "export", out).exit_code == 0
    assert database.read_database(out).to_text() == database.read_database(both).to_text()
    shown = openconv("tuning", "show", "n8")
    assert "n8" in shown.output
    assert "n2 " not in shown.output
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    before = user.read_text()
    refused = openconv("tuning", "import", both, damaged)
    assert refused.exit_code == 2
    assert "damaged.json" in words(refused)
    assert user.read_text() == before
    assert openconv("tuning", "show", "--file", tmp_path / "none.json").exit_code == 2
    assert openconv("tuning", "export", tmp_path / "no" / "where.json").exit_code == 2


def test_all_commands_restart_with_an_instruction_set(monkeypatch):
    started = []
    monkeypatch.setattr("os.execve", lambda *given: started.append(given))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    command.restart_with("avx2")
    assert started[0][2]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
