"""The benchmark of graphs: what is measured is right, and what was measured is kept and shown."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from openconv.bench import graphs_run
from openconv.bench.graphs import (
    PATTERNS,
    Bottleneck,
    as_graph,
    chain,
    graph_call,
    kernel_count,
    pattern_graph,
    pattern_inputs,
    resnet50,
    torch_call,
)
from openconv.bench.graphs_command import graph_jobs
from openconv.bench.graphs_cudnn import _FusedGraph, cudnn_call, cudnn_refusal
from openconv.bench.graphs_results import FILE_NAME, GraphLedger, GraphRecord, read_graphs, write_graphs
from openconv.bench.graphs_run import GraphJob, GraphLimits, measure_job, measure_pattern, within
from openconv.bench.peers import NotTaken
from openconv.bench.report.documents import write_documents
from openconv.bench.report.graphs import graph_details, graph_means, graph_tables
from openconv.bench.report.runs import load
from openconv.bench.results import Record, write
from openconv.cli import app
from openconv.engine import Traits
from openconv.problem import Problem
from openconv.reference import Reference, allowed_error
from tests.test_peers import FakeGraph, FakeTensor

LAYERS = (
    "fprop n2 c16 h9 w9 k24 r3 s3 stride2 pad1 f32 nchw",
    "fprop n3 c8 h6 w7 k16 r1 s1 f32 nhwc",
    "fprop n2 c8 h7 w7 k16 r3 s3 pad1 f16 nhwc",
)
LIMITS = GraphLimits(budget=0.01)
CPU = torch.device("cpu")


def flat(made: Any) -> list[Tensor]:
    first, *sums = (made,) if isinstance(made, Tensor) else made
    return [first, *(value.flatten() for value in sums)]


# -- what is measured -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", LAYERS)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_what_their_problem_says(name, text):
    pattern = PATTERNS[name]
    problem = pattern.problem(Problem.parse(text))
    assert Problem.parse(str(problem)) == problem
    inputs = pattern_inputs(problem)
    reference = Reference(problem, inputs)
    allowed = graphs_run._allowed(problem) if problem.dtypes[0] == "f16" else allowed_error(problem, Traits("", 1e-6))
    calls = {"torch": torch_call(pattern, problem, inputs)}
    for fuse in (True, False):
        calls[f"fuse={fuse}"] = graph_call(pattern_graph(pattern, problem, inputs, fuse=fuse), pattern, inputs)
    errors = {contestant: reference.error(flat(call())) for contestant, call in calls.items()}
    assert max(errors.values()) <= allowed, errors


def test_patterns_fuse():
    """One kernel for each pattern on the CPU, and no more kernels than nodes on a GPU."""
    layer = Problem.parse("fprop n64 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc")
    for pattern in PATTERNS.values():
        problem = pattern.problem(layer.with_(n=1))
        inputs = pattern_inputs(problem)
        fused, apart = (pattern_graph(pattern, problem, inputs, fuse=fuse) for fuse in (True, False))
        assert kernel_count(fused, "cpu") == 1
        assert kernel_count(apart, "cpu") == kernel_count(apart, "cuda") > kernel_count(fused, "cuda")


def test_vectors_of_a_prologue_are_the_same_in_either_dtype():
    problem = PATTERNS["scale_bias_relu_wgrad"].problem(Problem.parse(LAYERS[2]))
    scale, bias = pattern_inputs(problem).operands
    for vector in (scale, bias):
        assert vector.dtype is torch.float32
        assert torch.equal(vector.half().float(), vector)
    assert 0.5 <= float(scale.min()) < float(scale.max()) <= 1
    assert float(bias.abs().max()) <= 0.5


def test_rounding_on_the_way_is_no_mistake():
    """Of a wgrad, whose channels are summed up one by one, unfused steps that round are within what is allowed."""
    pattern = PATTERNS["scale_bias_relu_wgrad"]
    problem = pattern.problem(Problem.parse("fprop n2 c64 h14 w14 k16 r3 s3 stride2 pad1 f16 nhwc"))
    for seed in range(5):
        inputs = pattern_inputs(problem, seed)
        graph = pattern_graph(pattern, problem, inputs, fuse=False)
        error = Reference(problem, inputs).error(graph_call(graph, pattern, inputs)())
        assert error <= 0.5 * graphs_run._allowed(problem)


def test_resnet50_is_its_torch_twin():
    network = resnet50(2, "f32", "cpu", size=64, layout="nchw")
    image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = network.graph(image)
        wanted = network.module.double()(image.double())
    assert got.shape == (2, 1000)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-5
    assert 0.5 < float(wanted.std()) < 10  # neither dead nor blown up
    assert [tensor.name for tensor in network.graph.inputs] == ["image"]


def test_resnet50_has_few_kernels():
    network = resnet50(64, "f16", "cpu")
    image = torch.empty(64, 3, 224, 224, dtype=torch.float16, device="meta", memory_format=torch.channels_last)
    apart = as_graph(network.module, image, fuse=False)
    assert kernel_count(network.graph, "cuda") <= 60
    assert kernel_count(apart, "cuda") > 3 * kernel_count(network.graph, "cuda")
    assert len(network.graph.nodes) == 53 * 2 + 49 + 16 + 1 + 3


@pytest.mark.parametrize("stride", [1, 2])
def test_a_bottleneck(stride):
    torch.manual_seed(0)
    module = Bottleneck(16, 8, stride).eval().requires_grad_(False)
    image = torch.randn(2, 16, 10, 10)
    wanted = module(image)
    for fuse in (True, False):
        torch.testing.assert_close(as_graph(module, image, fuse=fuse)(image), wanted, rtol=1e-4, atol=1e-4)


def test_a_chain_is_quickly_planned():
    """A tenth of a second is the aim on a quiet machine; this one may be busy."""
    chain(100, c=24).program("cuda")
    took = []
    for c in (40, 56):
        start = time.perf_counter()
        graph = chain(100, c=c)
        graph.program("cuda")
        took.append(time.perf_counter() - start)
        assert len(graph.nodes) == 100
        assert kernel_count(graph, "cuda") == 25
    held = chain(100, c=16, size=4, held=True)
    assert [tensor.name for tensor in held.inputs] == ["image"]
    assert kernel_count(held, "cuda") == 25
    assert min(took) < 1.0


# -- cuDNN's frontend --------------------------------------------------------------------------------------------------


class FakeStatistics(FakeGraph):
    """The frontend's graph, whose statistics are two tensors."""

    def genstats(self, **arguments: Any) -> tuple[FakeTensor, FakeTensor]:
        self.calls.append(("genstats", arguments))
        return FakeTensor(made_by="sum"), FakeTensor(made_by="squares")


@pytest.mark.parametrize(
    "name, operations",
    [
        ("conv_bias_relu", ["conv_fprop", "add", "relu"]),
        ("conv_bias_add_relu", ["conv_fprop", "add", "add", "relu"]),
        ("scale_bias_relu_conv_stats", ["mul", "add", "relu", "conv_fprop", "genstats"]),
        ("dgrad_drelu", ["conv_dgrad", "relu_backward"]),
        ("scale_bias_relu_wgrad", ["mul", "add", "relu", "conv_wgrad"]),
    ],
)
def test_patterns_as_graphs_of_cudnn(monkeypatch, name, operations):
    types = SimpleNamespace(HALF="f16", BFLOAT16="bf16", FLOAT="f32")
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(pygraph=FakeStatistics, data_type=types))
    problem = PATTERNS[name].problem(Problem.parse(LAYERS[2]))
    made = _FusedGraph(problem, "narrow", "f32", CPU, None)
    done = [(op, arguments) for op, arguments in made.graph.calls if op != "tensor"]
    assert [op for op, _ in done] == operations
    assert (made.result.output, made.result.data_type) == (True, "f16")
    inputs = pattern_inputs(problem)
    pack = made.pack(inputs)
    assert len(pack) == 2 + len(inputs.operands) + 2 * problem.stats
    assert pack[made.a.get_uid()] is inputs.a
    if problem.prologue.operands:
        image = next(arguments for op, arguments in done if op.startswith("conv_"))["image"]
        assert (image.made_by, image.data_type, image.dim) == ("relu", "f32", list(problem.x_shape))
        vectors = [arguments for op, arguments in made.graph.calls if op == "tensor"][2:]
        assert [(each["dim"], each["data_type"]) for each in vectors] == [([1, 8, 1, 1], "f16")] * 2
    assert [buffer.shape for _, buffer in made.sums] == [(1, 16, 1, 1)] * (2 * problem.stats)


def test_cudnn_says_why_it_takes_no_part(monkeypatch):
    assert cudnn_refusal(CPU) == "device is cpu; it runs on CUDA devices"
    monkeypatch.setattr("openconv.bench.graphs_cudnn.find_spec", lambda name: None)
    assert cudnn_refusal(torch.device("cuda")) == "nvidia-cudnn-frontend is not installed"
    monkeypatch.setitem(sys.modules, "cudnn", None)
    problem = PATTERNS["conv_bias_relu"].problem(Problem.parse(LAYERS[2]))
    with pytest.raises(NotTaken, match="cannot be imported"):
        cudnn_call(problem, pattern_inputs(problem), 1.0)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_a_pattern_is_measured():
    problem = PATTERNS["scale_bias_relu_conv_stats"].problem(Problem.parse(LAYERS[0]))
    with torch.no_grad():
        found = measure_pattern("scale_bias_relu_conv_stats", "small", problem, CPU, LIMITS)
    assert set(found.seconds) == {"fused", "unfused", "torch"} == set(found.error)
    assert all(took["p20"] <= took["median"] <= took["p80"] for took in found.seconds.values())
    assert found.kernels == {"fused": 1, "unfused": 5}
    assert found.wrong == []
    assert found.floor["memory"] > 0
    assert found.notes["cudnn"].startswith("device is cpu")
    assert found.machine["kind"] == "cpu"


def test_a_wrong_contestant_is_named_and_not_timed(monkeypatch):
    pattern = PATTERNS["conv_bias_relu"]
    spoiled = dataclasses.replace(pattern, eager=lambda p, given: tuple(v + 1 for v in pattern.eager(p, given)))
    monkeypatch.setitem(PATTERNS, pattern.name, spoiled)
    with torch.no_grad():
        found = measure_pattern(pattern.name, "small", pattern.problem(Problem.parse(LAYERS[1])), CPU, LIMITS)
    assert found.wrong == ["torch"]
    assert set(found.seconds) == {"fused", "unfused"}
    assert found.error["torch"] > 0.01


def test_one_that_fails_says_why(monkeypatch):
    def fails(problem: Problem, given: Any) -> Any:
        raise RuntimeError("no kernel\nof mine")

    pattern = PATTERNS["conv_bias_relu"]
    monkeypatch.setitem(PATTERNS, pattern.name, dataclasses.replace(pattern, eager=fails))
    with torch.no_grad():
        found = measure_pattern(pattern.name, "small", pattern.problem(Problem.parse(LAYERS[1])), CPU, LIMITS)
    assert found.notes["torch"] == "does not run: no kernel"
    assert found.wrong == []
    assert "torch" not in found.seconds


def test_a_network_is_measured():
    found = measure_job(GraphJob("network", "resnet50", "whole", "n1 h64 f32 nchw"), CPU, LIMITS)
    assert set(found.seconds) == {"fused", "unfused", "torch"}
    assert max(found.error.values()) < 1e-4
    assert found.images == 1
    assert found.kernels["fused"] < found.kernels["unfused"]


def test_overheads_are_measured():
    found = measure_job(GraphJob("overhead", "overhead", "chain", "12 nodes"), CPU, LIMITS)
    assert set(found.seconds) == {"build", "plan_cpu", "plan_cuda"}
    assert found.kernels == {"unfused": 12, "fused": 3}


def test_what_takes_too_long_is_interrupted():
    with pytest.raises(TimeoutError, match=r"over 0\.05 s"), within(0.05):
        time.sleep(5)
    with within(5):
        pass


def test_jobs():
    jobs = graph_jobs([], "cuda", "resnet50", None, None, "")
    kinds = [job.kind for job in jobs]
    assert kinds.count("pattern") == 23 * 5
    assert kinds[-2:] == ["network", "overhead"]
    assert jobs[0].problem == "fprop n64 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc +bias+relu"
    assert jobs[-2].problem == "n64 h224 f16 nhwc"
    assert len({job.key for job in jobs}) == len(jobs)
    one = graph_jobs(["conv2_1b"], "cpu", "resnet50", ["dgrad_drelu"], None, "")
    assert [job.problem for job in one] == ["dgrad n1 c64 h56 w56 k64 r3 s3 pad1 f32 nchw +relu_backward(t.x)"]
    assert [job.kind for job in graph_jobs([], "cpu", "resnet50", None, None, "", "overhead")] == ["overhead"]
    for arguments, words in (
        (([], "cpu", "resnet50", ["convs"], None, ""), "pattern is 'convs'; wanted one of conv_bias_relu"),
        ((["conv9"], "cpu", "resnet50", None, None, ""), "no layer 'conv9'; wanted one of conv1"),
        (([], "cpu", "resnet50", None, 0, ""), "batch is 0"),
        (([], "cpu", "resnet50", None, None, "f12"), "dtype is 'f12'"),
        (([], "cpu", "resnet50", ["none"], None, ""), "nothing to measure"),
    ):
        with pytest.raises(ValueError, match=words):
            graph_jobs(*arguments)


# -- what was measured -------------------------------------------------------------------------------------------------


def took(microseconds: float) -> dict[str, float]:
    return {"median": microseconds / 1e6, "p20": microseconds / 1e6, "p80": microseconds / 1e6}


MACHINE = {"kind": "cpu", "device": "Some CPU", "threads": 2, "torch": "2.0"}
PROBLEM = str(PATTERNS["conv_bias_relu"].problem(Problem.parse(LAYERS[0])))
FASTER = GraphRecord(
    "pattern", "conv_bias_relu", "a", PROBLEM, {"fused": took(10), "unfused": took(20), "cudnn": took(15)},
    {"fused": 1, "unfused": 3}, floor={"memory": 2e-6, "math": 1e-6}, machine=MACHINE,
)  # fmt: skip
SLOWER = dataclasses.replace(
    FASTER, label="b", seconds={"fused": took(20), "unfused": took(10)}, floor={"memory": 1e-6, "math": 2e-6}
)
NETWORK = GraphRecord(
    "network", "resnet50", "whole", "n64 h224 f16 nhwc", {"fused": took(4000), "torch": took(8000)},
    {"fused": 56, "unfused": 334}, images=64, machine=MACHINE,
)  # fmt: skip
OVERHEAD = GraphRecord("overhead", "overhead", "chain", "100 nodes", {"plan_cuda": took(60000)}, machine=MACHINE)
RECORDS = [FASTER, SLOWER, NETWORK, OVERHEAD]


def test_records_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / FILE_NAME
    write_graphs(path, RECORDS)
    assert read_graphs(path) == RECORDS
    assert json.loads(path.read_text().splitlines()[0])["ratio"] == {"unfused": 2.0, "cudnn": 1.5}
    assert read_graphs(tmp_path / "none.jsonl") == []
    path.write_text(FASTER.to_json() + "\n{}\n")
    with pytest.raises(ValueError, match=r"graphs\.jsonl, line 2: not a record"):
        read_graphs(path)


def test_a_ledger_replaces_and_knows(tmp_path):
    ledger = GraphLedger(tmp_path / FILE_NAME)
    for record in RECORDS:
        ledger.add(record)
    again = dataclasses.replace(FASTER, seconds={"fused": took(5)})
    GraphLedger(tmp_path / FILE_NAME).add(again)
    assert read_graphs(tmp_path / FILE_NAME) == [again, SLOWER, NETWORK, OVERHEAD]
    assert ledger.has(FASTER.key, MACHINE | {"command": "another"})
    assert not ledger.has(FASTER.key, MACHINE | {"torch": "2.1"})
    assert not ledger.has(("conv_bias_relu", "c", PROBLEM), MACHINE)


def test_tables_keep_losses():
    assert FASTER.memory_bound
    assert not SLOWER.memory_bound
    text = "\n\n".join(graph_means(RECORDS))
    assert "| conv_bias_relu | unfused | all | 2 | **1.00** | 0.50 to 2.00 | 1 |" in text
    assert "| conv_bias_relu | cudnn | memory-bound | 1 | **1.50** | 1.50 to 1.50 | 0 |" in text
    assert "| resnet50 n64 h224 f16 nhwc | fused | 4.00 | 16000 | 56 | 1.00 |" in text
    assert "| chain, 100 nodes | plan cuda | 60000 |" in text
    heading, table = graph_details(RECORDS)
    assert heading == "## graph conv_bias_relu"
    assert f"| `{PROBLEM}` | memory | 3 to 1 | 10.0 | 20.0 (2.00) | 15.0 (1.50) |" in table
    assert f"| `{PROBLEM}` | math | 3 to 1 | 20.0 | 10.0 (**0.50**) | no plan |" in table
    assert graph_means([]) == graph_details([]) == []
    assert [t.title for t in graph_tables(RECORDS)] == [
        "conv_bias_relu", "resnet50 n64 h224 f16 nhwc: 334 to 56 kernels", "overhead 100 nodes: None to None kernels",
    ]  # fmt: skip


@pytest.mark.usefixtures("one_engine")
def test_documents_have_graphs_where_some_are_recorded(tmp_path):
    layer = Record("some", "layer", LAYERS[0], "cpu.a", {"cpu.a": took(5), "torch": took(9)}, {}, {}, [], MACHINE)
    folder = tmp_path / "benchmarks" / "results"
    for name in ("cpu-one", "cpu-two"):
        write(folder / name / "some.jsonl", [layer])
    write_graphs(folder / "cpu-one" / FILE_NAME, RECORDS)
    (tmp_path / "README.md").write_text("<!-- begin results -->\n<!-- end results -->\n")
    write_documents(tmp_path)
    assert [len(run.records) for run in load([folder])] == [1, 1]
    assert (tmp_path / "docs" / "results.md").read_text().count("### Graphs") == 1
    assert "## graph conv_bias_relu" in (tmp_path / "docs" / "results" / "cpu-one.md").read_text()
    assert "graph" not in (tmp_path / "docs" / "results" / "cpu-two.md").read_text()


def test_the_command(tmp_path):
    arguments = [
        "bench-graphs",
        LAYERS[1],
        "--patterns",
        "conv_bias_add_relu",
        "--budget",
        "0.01",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    [found] = read_graphs(tmp_path / FILE_NAME)
    assert found.key == ("conv_bias_add_relu", "given", f"{LAYERS[1]} +bias+residual+relu")
    assert found.kernels == {"fused": 1, "unfused": 4}
    again = CliRunner().invoke(app, [*arguments, "--resume"])
    assert "1 of 1 graphs are recorded already" in again.output
    assert read_graphs(tmp_path / FILE_NAME) == [found]
    failed = CliRunner().invoke(app, ["bench-graphs", "--patterns", "convs"])
    assert failed.exit_code == 2
