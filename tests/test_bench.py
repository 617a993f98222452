"""The benchmark: suites, verification before timing, records, and the tables made of them."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from typer.testing import CliRunner

from openconv.bench import report, run
from openconv.bench.__main__ import app, table
from openconv.bench.peers import PEERS, OpenCV, Torch
from openconv.bench.results import Record, device_slug, environment, read, write
from openconv.bench.suites import load_suite, suite_names, variants
from openconv.bench.timing import Timing, race
from openconv.cpu.device import cpu_device
from openconv.problem import Problem
from openconv.reference import error_of, random_inputs

TINY = Problem.parse("fprop n1 c3 h6 w7 k4 r3 s3 pad1 f32 nchw")


def record(problem: str, suite: str = "some", chosen: str = "cpu.a", **milliseconds: float) -> Record:
    seconds = {
        name.replace("_", "."): {"median": v / 1e3, "p20": v / 1e3, "p80": v / 1e3} for name, v in milliseconds.items()
    }
    return Record(
        suite, "layer", problem, chosen, seconds, {}, {}, [], {"device": "cpu", "isa": "x", "threads": 2, "torch": "2"}
    )


@pytest.mark.parametrize("suite", suite_names())
def test_suites_hold_problems_under_names_of_their_own(suite):
    found = load_suite(suite)
    assert found
    assert len({label for label, _ in found}) == len(found)


def test_variants_cross_what_is_asked_for():
    found = [p for _, p in variants([("a", TINY)], [1, 8], ["fprop", "wgrad"], ["nchw", "nhwc"], [])]
    assert len(set(found)) == 8
    assert {p.n for p in found} == {1, 8}
    assert [p for _, p in variants([("a", TINY)], [], [], [], [])] == [TINY]


def test_a_suite_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match=r"no suite 'nothing'; wanted one of .*resnet50"):
        load_suite("nothing")


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


def test_percentiles_by_rank():
    assert Timing.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Timing(median=3.0, p20=2.0, p80=4.0)


@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_peers_compute_the_problem(direction):
    problem = TINY.with_(direction=direction)
    inputs = random_inputs(problem)
    out = Torch().prepare(problem, inputs.a, inputs.b)()
    assert isinstance(out, torch.Tensor)
    assert error_of(problem, out, inputs) < 1e-5


def test_opencv_computes_the_problem():
    pytest.importorskip("cv2")
    problem = Problem.parse("fprop n1 c1 h20 w30 k1 r5 s5 pad2 f32 nchw")
    inputs = random_inputs(problem)
    assert OpenCV().refusal(problem) is None
    out = torch.from_numpy(OpenCV().prepare(problem, inputs.a, inputs.b)())[None, None]
    assert error_of(problem, out, inputs) < 1e-5
    assert OpenCV().refusal(TINY)


def test_measure_verifies_and_times_every_engine_and_peer():
    found = run.measure("some", "tiny", TINY, cpu_device(2), budget=0.001)
    assert {"cpu.naive", "cpu.im2col_gemm", "cpu.filter2d", "torch"} <= set(found.seconds)
    assert found.wrong == []
    assert found.regret >= 1
    assert all(error < 1e-5 for error in found.error.values())


def test_a_wrong_engine_is_named_and_not_timed(monkeypatch):
    monkeypatch.setattr(run, "error_of", lambda *_: 1.0)
    found = run.measure("some", "tiny", TINY, cpu_device(2), engines=("cpu.naive",), budget=0.001)
    assert found.wrong == ["cpu.naive"]
    assert "cpu.naive" not in found.seconds
    assert found.regret == math.inf
    assert "WRONG" in "".join(str(cell) for column in table("some", [found]).columns for cell in column.cells)


def test_records_survive_the_file(tmp_path):
    records = [run.measure("some", "tiny", TINY, cpu_device(2), engines=("cpu.naive",), peers=PEERS[:1], budget=0.001)]
    write(tmp_path / "deep" / "some.jsonl", records)
    assert read(tmp_path / "deep" / "some.jsonl") == records
    assert records[0].parsed() == TINY


def test_tables_keep_losses_and_wrong_choices():
    records = [
        record("fprop n1 c8 h9 w9 k8 r3 s3 f32 nchw", cpu_a=2, cpu_b=1, torch=1),
        record("fprop n1 c8 h9 w9 k8 r3 s3 pad1 f32 nchw", cpu_a=1, cpu_b=2, torch=8),
        record("fprop n1 c8 h1 w1 k8 r1 s1 f32 nchw", suite="overhead", cpu_a=9, cpu_b=1, torch=1),
    ]
    assert "| dense 3x3, fprop | torch | 2 | **2.00** | 0.50 to 8.00 | 1 |" in report.summary(records)
    assert "within 15% of the fastest engine in 1; the worst choice took 2.00" in report.choices(records)
    assert "| 0.50 | 2.00 |" in report.details(records)


def test_records_without_kept_memory_have_a_place_and_a_title_of_their_own(monkeypatch):
    device = cpu_device(2)
    kept = device_slug(device)
    monkeypatch.setenv("OPENCONV_KEEP_MB", "0")
    assert device_slug(device) == kept + "-new-memory"
    made = dataclasses.replace(record(str(TINY)), machine=environment(device))
    assert report._machine([made]).endswith(", every result on new memory")
    assert "memory" not in report._machine([record(str(TINY))])


def test_the_command_prints_a_table_and_refuses_what_it_does_not_know(tmp_path):
    done = CliRunner().invoke(app, [str(TINY), "--budget", "0.001", "--out", str(tmp_path), "--tag", "x"])
    assert done.exit_code == 0, done.output
    assert "x torch" in done.output
    assert len(read(tmp_path / "given-x.jsonl")) == 1
    for arguments, words in (
        (["overhead", "--engine", "cpu.nothing"], "there is no engine 'cpu.nothing'; wanted one of"),
        ([str(TINY), "--engine", "cpu.gemm_1x1"], "cpu.gemm_1x1: filter is"),
        ([str(TINY.with_(n=4000)), "--engine", "cpu.naive"], "products; at most 1000000 are timed"),
    ):
        done = CliRunner().invoke(app, [*arguments, "--no-record"])
        assert words in " ".join(done.output.split())
        assert done.exit_code == (2 if "nothing" in words else 0)
    refused = CliRunner().invoke(app, ["nothing", "--no-record"])
    assert refused.exit_code == 2
    assert "no suite 'nothing'" in refused.output


def test_the_tables_of_the_documents_are_those_of_the_records():
    for path, wanted in report.render().items():
        assert path.read_text() == wanted, f"{path.name} is not what the records say; run `make docs`"
