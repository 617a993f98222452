"""Peers compute the problem that they take, and say why they do not take the others."""

from __future__ import annotations

import re
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from openconv.bench import peers
from openconv.bench.peers import PEERS, NotTaken, Peer, default_peers, peer_named
from openconv.problem import Problem
from openconv.reference import Inputs, error_of, random_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOLERANCE = {"f64": 1e-14, "f32": 2e-6, "f16": 3e-3, "bf16": 2e-2}

PLAIN = [
    "fprop n2 c6 h9 w11 k8 r3 s3 pad1 f32 nchw",
    "fprop n2 c6 h9 w11 k8 r3 s3 pad1 f32 nhwc",
    "dgrad n2 c6 h9 w11 k8 r3 s3 pad1 f32 nhwc",
    "wgrad n2 c6 h9 w11 k8 r3 s3 pad1 f32 nhwc",
    "fprop n2 c6 h9 w11 k8 r3 s3 stride2 pad0:1 f32 nhwc",
    "dgrad n2 c6 h10 w11 k8 r3 s3 stride2 pad0:1 f32 nchw",
    "wgrad n2 c6 h10 w11 k8 r3 s3 stride2 pad0:1,1 f32 nchw",
    "dgrad n2 c6 h10 w12 k8 r3 s3 stride2 f32 nchw",
    "fprop n2 c8 h9 w11 k8 r3 s3 pad2 dil2 g4 f32 nchw",
    "dgrad n2 c8 h9 w11 k16 r3 s3 pad1 g8 f32 nhwc",
    "wgrad n2 c8 h9 w11 k8 r3 s3 pad1 g8 f32 nchw",
    "fprop n2 c6 w30 k8 s5 pad2 f32 nchw",
    "dgrad n2 c6 w30 k8 s5 stride2 pad2 f32 nchw",
    "wgrad n2 c6 w30 k8 s5 dil2 f32 nchw",
    "fprop n2 c4 d5 h6 w7 k6 t3 r3 s3 pad1 f32 nhwc",
    "dgrad n2 c4 d5 h6 w7 k6 t3 r3 s3 stride2,1,1 pad1 f32 nchw",
    "wgrad n2 c4 d5 h6 w7 k6 t1 r3 s3 g2 f32 nhwc",
    "fprop n2 c6 h9 w11 k8 r3 s3 pad1 f64 nchw",
    "fprop n2 c6 h9 w11 k8 r3 s3 pad1 bf16 nchw",
    "dgrad n2 c6 h9 w11 k8 r3 s3 pad1 f16 nchw",
    "fprop n1 c6 h9 w11 k8 r3 s3 pad1 i32 nchw",
    "fprop n1 c6 h9 w11 k8 r3 s3 pad1 complex64 nchw",
]
IMAGES = [
    "fprop n1 c1 h20 w30 k1 r5 s5 pad2 f32 nchw",
    "fprop n1 c1 h20 w30 k1 r4 s3 pad2:1,0:2 f32 nchw",
    "fprop n1 c1 h40 w50 k1 r15 s15 pad7 f32 nchw",
    "fprop n1 c3 h20 w30 k3 r3 s3 pad1 g3 f32 nchw",
    "fprop n1 c3 h20 w30 k3 r3 s3 pad1 g3 f32 nhwc",
    "fprop n1 c3 h20 w30 k3 r1 s7 pad0,3 g3 f32 nhwc",
    "fprop n1 c1 h20 w30 k1 r5 s5 pad0 f32 nchw",
    "fprop n1 c1 h20 w30 k1 r5 s5 pad1:0,0:3 f64 nchw",
    "fprop n1 c1 h60 w50 k1 r17 s15 pad3:5,0:9 f64 nchw",
    "fprop n1 c2 w300 k2 s65 pad32 g2 f32 nchw",
    "fprop n1 c2 w300 k2 s9 pad0:8 g2 f32 nchw",
    "fprop n1 c1 d9 h10 w11 k1 t3 r3 s3 pad1 f32 nchw",
]
TAILS = [
    "+relu", "+bias+relu", "+bias+residual+relu", "+residual", "+bias+leaky_relu(0.2)", "+bias+clamp(0,6)",
    "+bias+sigmoid", "+bias+tanh", "+bias+silu", "+bias+hardswish", "+bias+gelu", "+bias+gelu_tanh",
    "+bias+clamp(0)", "+silu",
]  # fmt: skip
OTHER_EPILOGUES = [
    "+bias", "+scale+bias+relu", "+bias+relu+residual", "+elu(0.5)", "+=mul(acc,sigmoid(acc))", "+mul(s.gain)+bias",
    "+add(c.a)+add(c.b)", "+bias+mul(2)+max(0.5)", "+residual+silu",
]  # fmt: skip


def separable(problem: Problem, seed: int) -> Inputs:
    """Filters that are the product of a column and a row."""
    inputs, (rows, columns) = random_inputs(problem, seed), problem.filter
    made = torch.randn(problem.k, 1, rows, 1) * torch.randn(problem.k, 1, 1, columns)
    return Inputs(inputs.a, made)


def check(peer: Peer, problem: Problem, sets: list[Inputs]) -> None:
    assert peer.refusal(problem, CPU) is None
    prepared = peer.prepare(problem, sets)
    assert len(prepared.calls) == len(sets)
    for call, inputs in zip(prepared.calls, sets, strict=True):
        first = prepared.result(call()).clone()
        got = prepared.result(call())
        assert got.shape == problem.result_shape
        assert torch.equal(got, first)  # a call may not change its inputs
        assert error_of(problem, got, inputs) <= TOLERANCE.get(problem.result_dtype, 2e-6)


@pytest.mark.parametrize("text", PLAIN + IMAGES)
@torch.no_grad()
def test_every_peer_that_takes_a_problem_computes_it(text):
    problem = Problem.parse(text)
    sets = [random_inputs(problem, seed) for seed in range(2)]
    taking = [peer for peer in default_peers(problem, CPU) if peer.name != "opencv_sep"]
    assert taking
    for peer in taking:
        check(peer, problem, sets)


@pytest.mark.parametrize("text", ["fprop n2 c6 h9 w11 k8 r3 s3 pad1", "wgrad n2 c6 h9 w11 k8 r3 s3 pad1:0,1"])
@torch.no_grad()
def test_low_precision_is_compared_with_f32_where_that_is_asked_for(text):
    peer = peer_named("in_f32")
    assert "f16 and bf16" in (peer.refusal(Problem.parse(text), CPU) or "")
    for dtype in ("bf16", "f16"):
        problem = Problem.parse(f"{text} {dtype}")
        assert peer not in default_peers(problem, CPU)
        check(peer, problem, [random_inputs(problem, seed) for seed in range(2)])
        (call,) = peer.prepare(problem, [random_inputs(problem)]).calls
        assert getattr(call(), "dtype", None) is torch.float32


@pytest.mark.parametrize("epilogue", TAILS + OTHER_EPILOGUES)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@torch.no_grad()
def test_torch_computes_epilogues_in_every_layout(epilogue, direction):
    for layout in ("nchw", "nhwc"):
        problem = Problem.parse(f"{direction} n2 c6 h9 w11 k8 r3 s3 stride2 pad1 f32 {layout} {epilogue}")
        sets = [random_inputs(problem, seed) for seed in range(2)]
        other = "torch_nchw" if layout == "nhwc" else "torch_channels_last"
        for name in ("torch", other):
            check(peer_named(name), problem, sets)


@pytest.mark.parametrize("epilogue", TAILS)
@pytest.mark.parametrize(
    "layer",
    [
        "n2 c6 h9 w11 k8 r3 s3 stride2 pad1 f32 nchw",
        "n2 c8 h9 w11 k8 r3 s3 pad2 dil2 g4 f32 nhwc",
        "n2 c6 d4 h9 w5 k8 t3 r3 s1 pad1,1,0 f32 nchw",
    ],
)
@torch.no_grad()
def test_fused_operators_of_onednn_compute_the_epilogue(epilogue, layer):
    problem = Problem.parse(f"fprop {layer} {epilogue}")
    check(peer_named("torch_fused"), problem, [random_inputs(problem, seed) for seed in range(2)])


@torch.no_grad()
def test_fused_operators_take_bf16_where_the_cpu_has_it():
    problem = Problem.parse("fprop n2 c6 h9 w11 k8 r3 s3 stride2 pad1 bf16 nhwc +bias+residual+relu")
    if refused := peer_named("torch_fused").refusal(problem, CPU):
        pytest.skip(refused)
    check(peer_named("torch_fused"), problem, [random_inputs(problem)])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "text",
    [
        "fprop n2 c6 h9 w11 k8 r3 s3 stride2 pad1 f32 nchw +bias+residual+relu",
        "fprop n2 c6 h9 w11 k8 r3 s3 pad0:1 f32 nhwc +=mul(acc,sigmoid(acc))",
        "dgrad n2 c6 h10 w11 k8 r3 s3 stride2 pad0:1 f32 nchw +scale+gelu",
        "wgrad n2 c6 w30 k8 s5 pad2 f32 nchw",
    ],
)
@torch.no_grad()
def test_compiled_calls_compute_the_problem(text):
    problem = Problem.parse(text)
    check(peer_named("torch_compile"), problem, [random_inputs(problem, seed) for seed in range(2)])


@pytest.mark.parametrize("text", IMAGES[:6])
@torch.no_grad()
def test_sep_filter_takes_separable_filters_only(text):
    pytest.importorskip("cv2")
    problem = Problem.parse(text)
    check(peer_named("opencv_sep"), problem, [separable(problem, seed) for seed in range(2)])
    if min(problem.filter) > 1:
        with pytest.raises(NotTaken, match="second singular value is"):
            peer_named("opencv_sep").prepare(problem, [random_inputs(problem)])


def test_one_filter_for_interleaved_channels_is_one_call_of_opencv():
    cv2 = pytest.importorskip("cv2")
    problem = Problem.parse(IMAGES[4])
    inputs = random_inputs(problem)
    same = Inputs(inputs.a, inputs.b[:1].repeat(3, 1, 1, 1))
    prepared = peer_named("opencv").prepare(problem, [same])
    value = prepared.calls[0]()
    assert isinstance(value, np.ndarray)
    assert value.shape == (20, 30, 3)
    assert error_of(problem, prepared.result(value), same) < 2e-6
    assert cv2.getNumThreads() == torch.get_num_threads()


@pytest.mark.parametrize(
    "name, text, device, words",
    [
        ("torch", "fprop n1 c4 h5 w5 k4 r3 s3 f16*f16>f32 nchw", CPU, "dtypes are f16, f16, f32"),
        ("torch", "fprop n1 c4 h5 w5 k4 r3 s3 e4m3 nchw", CUDA, "dtype is e4m3"),
        ("torch", "fprop n1 c4 h5 w5 k4 r3 s3 i8 nchw", CUDA, "integers on the CPU only"),
        ("torch", "dgrad n1 c4 h5 w5 k4 r3 s3 i8 nchw", CPU, "dgrad of i8"),
        ("torch_nchw", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw", CPU, "images are nchw; it is for those in nhwc"),
        ("torch_nchw", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nhwc*nhwc>nchw", CPU, "images are nchw and nhwc"),
        ("torch_channels_last", "fprop n1 c4 w5 k4 s3 f32 nchw", CPU, "rank is 1"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw", CPU, "no epilogue"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw +bias", CPU, r"epilogue is \+bias"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw +bias+elu", CPU, "no such step"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw +residual+silu", CPU, "no such step"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f16 nchw +bias+silu", CUDA, "no such step"),
        ("torch_fused", "fprop n1 c4 w5 k4 s3 f16 nchw +bias+relu", CUDA, "rank is 1"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 pad0:1 f16 nchw +bias+relu", CUDA, "padding is"),
        ("torch_fused", "fprop n1 c4 h5 w5 k4 r3 s3 f64 nchw +bias+relu", CPU, "dtype is f64"),
        ("torch_fused", "dgrad n1 c4 h5 w5 k4 r3 s3 f32 nchw +bias+relu", CPU, "direction is dgrad"),
        ("opencv", "fprop n1 c1 h5 w5 k1 r3 s3 f32 nchw", CPU, "keeps the size"),
        ("opencv", "fprop n1 c1 h5 w5 k1 r3 s3 pad1 f32 nchw +relu", CPU, r"epilogue is \+relu"),
        ("opencv", "fprop n1 c2 h5 w5 k2 r3 s3 pad1 g2 f32 nchw", CPU, "C is 2"),
        ("opencv", "fprop n1 c1 h5 w5 k1 r3 s3 pad1 f64 nchw", CPU, "dtype is f64"),
        ("opencv", "fprop n1 c3 h5 w5 k3 r3 s3 pad1 f32 nchw", CPU, "C, K and groups are 3, 3 and 1"),
        ("opencv_sep", "fprop n2 c1 h5 w5 k1 r3 s3 pad1 f32 nchw", CPU, "N is 2"),
        ("opencv", "fprop n1 c1 h5 w5 k1 r3 s3 pad1 f32 nchw", CUDA, "runs on the CPU"),
        ("cudnn", "fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw", CPU, "device is cpu"),
        ("cudnn", "fprop n1 c4 h5 w5 k4 r3 s3 f64 nchw", CUDA, "dtypes are f64"),
        ("cudnn", "fprop n1 c4 h5 w5 k4 r3 s3 f16*f32>f32 nchw", CUDA, "inputs are f16 and f32"),
        ("cudnn", "fprop n0 c4 h5 w5 k4 r3 s3 f16 nchw", CUDA, "nothing to multiply"),
        ("cudnn", "fprop n1 c4 h5 w5 k4 r3 s3 f16 nchw +elu(2)", CUDA, "has an alpha"),
        ("cudnn", "fprop n1 c4 h5 w5 k4 r3 s3 f16 nchw +mul(exp(c.v))", CUDA, "before they meet the accumulator"),
        ("scipy", "fprop n1 c1 h5 w5 k1 r3 s3 pad2 f32 nchw", CPU, "padding is"),
        ("scipy", "fprop n1 c1 h5 w5 k1 r3 s3 pad1 stride2 f32 nchw", CPU, "stride is"),
        ("scipy", "wgrad n1 c1 h5 w5 k1 r3 s3 pad1 f32 nchw", CPU, "direction is wgrad"),
        ("scipy", "fprop n1 c1 h5 w5 k1 r3 s3 pad1 bf16 nchw", CPU, "dtype is bf16"),
    ],
)  # fmt: skip
def test_refusals_name_what_they_saw(name, text, device, words):
    if name in ("opencv", "opencv_sep", "scipy"):
        pytest.importorskip("scipy" if name == "scipy" else "cv2")
    with pytest.MonkeyPatch.context() as patch:  # nothing is computed or allocated
        patch.setattr(torch, "empty", None)
        patch.setattr("openconv.bench.peers.cudnn.find_spec", lambda name: name)
        refused = peer_named(name).refusal(Problem.parse(text), device)
    assert refused is not None
    assert re.search(words, refused), refused


def test_what_is_not_installed_says_so(monkeypatch):
    problem = Problem.parse(IMAGES[0])
    for module in ("images", "cudnn", "torch"):
        monkeypatch.setattr(f"openconv.bench.peers.{module}.find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name, words in (
        ("opencv", "opencv-python-headless is not installed"),
        ("scipy", "scipy is not installed"),
        ("cudnn", "nvidia-cudnn-frontend is not installed"),
        ("torch_compile", "C[+][+] compiler"),
    ):
        refused = peer_named(name).refusal(problem, CUDA if name == "cudnn" else CPU)
        assert refused is not None
        assert re.search(words, refused)


class FakeTensor(SimpleNamespace):
    """A tensor of the frontend's graph: setters return it."""

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> FakeTensor:
            setattr(self, name.removeprefix("set_"), value)
            return self

        return put

    def get_uid(self) -> int:
        return id(self)


class FakeGraph:
    """The frontend's graph, which writes down what it is asked for."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, op: str) -> Any:
        def add(**arguments: Any) -> FakeTensor:
            self.calls.append((op, arguments))
            return FakeTensor(**arguments) if op == "tensor" else FakeTensor(made_by=op)

        return add


@pytest.mark.parametrize(
    "text, operations, padding, shape, stride",
    [
        ("fprop n2 c6 w30 k8 s5 pad2 f16 nchw", ["conv_fprop"], [[0, 2], [0, 2]], [2, 8, 1, 30], [240, 30, 30, 1]),
        (
            "dgrad n2 c6 h10 w12 k8 r3 s3 stride2 pad0:1 g2 f16 nhwc +scale+clamp(0,6)",
            ["conv_dgrad", "mul", "relu"], [[0, 0], [1, 1]], [2, 6, 10, 12], [720, 1, 72, 6],
        ),
        ("wgrad n2 c6 h9 w9 k8 r3 s1 g2 bf16 nhwc", ["conv_wgrad"], [[0, 0], [0, 0]], [8, 3, 3, 1], [9, 1, 3, 3]),
        (
            "fprop n1 c4 h5 w5 k4 r3 s3 f16 nchw +bias+hardswish+clamp(-1,2)",
            ["conv_fprop", "add", "add", "relu", "mul", "mul", "max", "min"],
            [[0, 0], [0, 0]], [1, 4, 3, 3], [36, 9, 3, 1],
        ),
    ],
)  # fmt: skip
def test_a_problem_as_a_graph_of_cudnn(monkeypatch, text, operations, padding, shape, stride):
    types = SimpleNamespace(HALF="f16", BFLOAT16="bf16", FLOAT="f32")
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(pygraph=FakeGraph, data_type=types))
    problem = Problem.parse(text)
    made = peers.cudnn._Graph(problem)
    done = [(op, arguments) for op, arguments in made.graph.calls if op != "tensor"]
    assert [op for op, _ in done] == operations
    assert [done[0][1][key] for key in ("pre_padding", "post_padding")] == padding
    assert (made.result.dim, made.result.stride) == (shape, stride)
    assert (made.result.output, made.result.data_type) == (True, problem.result_dtype)
    inputs = random_inputs(problem)
    pack = made.pack(inputs)
    assert [pack[t.get_uid()] is v for t, v in ((made.a, inputs.a), (made.b, inputs.b))] == [True, True]
    assert len(pack) == 2 + len(inputs.operands) + len(made.constants)


def test_the_compiler_takes_part_only_where_there_is_something_to_fuse():
    plain = Problem.parse("fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw")
    names = [peer.name for peer in default_peers(plain, CPU)]
    assert names == ["torch", "torch_channels_last"]
    if shutil.which("g++"):
        assert "torch_compile" in [peer.name for peer in default_peers(plain.with_(epilogue="+relu"), CPU)]


def test_names_are_those_of_peers_and_no_engines():
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    assert not any("." in peer.name for peer in PEERS)
    assert peer_named("torch") is PEERS[0]
    with pytest.raises(ValueError, match="no peer 'nothing'; wanted one of torch, torch_nchw"):
        peer_named("nothing")
    assert peers.__all__


def test_torch_is_not_called_where_it_writes_past_its_buffers():
    problem = Problem.parse("wgrad n1 c3 h32 w32 k8 r1 s1 stride2 f32 nchw")
    cpu = torch.device("cpu")
    for name, asked in (("torch_channels_last", problem), ("torch", problem.with_(layouts=("nhwc",) * 3))):
        refused = peer_named(name).refusal(asked, cpu)
        assert refused is not None
        assert "writes past its buffers" in refused
        assert peer_named(name).refusal(asked.with_(c=16), cpu) is None
        assert peer_named(name).refusal(asked, torch.device("cuda")) is None
    assert peer_named("torch").refusal(problem, cpu) is None
