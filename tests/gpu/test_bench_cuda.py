"""Peers and timing on a GPU: every peer computes what it takes, and the times mean what they say."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from openconv.bench.ceilings import ceilings, roofline_floor
from openconv.bench.peers import NotTaken, Peer, default_peers, peer_named
from openconv.bench.timing import overhead, race_cuda
from openconv.problem import Problem
from openconv.reference import error_of, random_inputs

CUDA = torch.device("cuda")
TOLERANCE = {"f32": 2e-5, "f16": 3e-3, "bf16": 2e-2}
TF32 = 2e-3

PLAIN = [
    "fprop n8 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc",
    "fprop n8 c64 h28 w28 k64 r3 s3 pad1 f16 nchw",
    "dgrad n8 c64 h29 w28 k32 r3 s3 stride2 pad1 bf16 nhwc",
    "wgrad n8 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc",
    "fprop n8 c64 h28 w28 k64 r3 s3 stride2 pad0:1 f16 nhwc",
    "dgrad n8 c32 h28 w28 k32 r3 s3 pad1:0 f32 nchw",
    "fprop n4 c64 h28 w28 k64 r3 s3 pad2 dil2 g4 f16 nhwc",
    "fprop n8 c32 h28 w28 k32 r3 s3 pad1 g32 f32 nchw",
    "fprop n4 c32 w200 k32 s5 pad2 f16 nchw",
    "wgrad n2 c16 d8 h14 w14 k16 t3 r3 s3 pad1 f16 nhwc",
    "fprop n1 c1 h200 w300 k1 r5 s5 pad2 f32 nchw",
    "fprop n8 c64 h28 w28 k64 r3 s3 pad1 f32 nhwc tf32",
]
EPILOGUES = [
    "+bias+relu",
    "+bias+residual+relu",
    "+scale+bias+silu",
    "+bias+hardswish",
    "+bias+clamp(0,6)",
    "+bias+clamp(-1,1)",
    "+bias+leaky_relu(0.1)",
    "+bias+gelu",
    "+mul(s.gain)+tanh",
]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Peers leave torch's settings as they need them."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    with torch.no_grad():
        yield
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def check(peer: Peer, problem: Problem) -> str:
    sets = [random_inputs(problem, seed, "cuda") for seed in range(2)]
    prepared = peer.prepare(problem, sets)
    allowed = TF32 if problem.precision == "tf32" else TOLERANCE[problem.result_dtype]
    for call, inputs in zip(prepared.calls, sets, strict=True):
        for _ in range(2):
            got = prepared.result(call())
            assert got.shape == problem.result_shape
            assert error_of(problem, got, inputs) <= allowed, (peer.name, prepared.note)
    return prepared.note


@pytest.mark.parametrize("text", PLAIN)
def test_every_peer_that_takes_a_problem_computes_it(text):
    problem = Problem.parse(text)
    taking = default_peers(problem, CUDA)
    assert "torch" in [peer.name for peer in taking]
    assert ("cudnn" in [peer.name for peer in taking]) == (find_spec("cudnn") is not None)
    for peer in taking:
        check(peer, problem)


@pytest.mark.parametrize("name", ["torch", "torch_nchw", "torch_fused", "cudnn"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_peers_compute_epilogues(name, epilogue):
    problem = Problem.parse(f"fprop n8 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc {epilogue}")
    peer = peer_named(name)
    if refused := peer.refusal(problem, CUDA):
        pytest.skip(refused)
    check(peer, problem)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_the_compiler_fuses_epilogues(direction):
    problem = Problem.parse(f"{direction} n8 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc +bias+residual+relu")
    if refused := peer_named("torch_compile").refusal(problem, CUDA):
        pytest.skip(refused)
    check(peer_named("torch_compile"), problem)


@pytest.mark.parametrize("name", ["torch", "torch_channels_last", "cudnn"])
def test_f32_is_not_rounded_to_tf32_unless_the_problem_says_so(name):
    # Of eight products in a sum, one rounded to 11 bits shows: about 1e-4, against 1e-7.
    problem = Problem.parse("fprop n8 c8 h32 w32 k16 r1 s1 f32 nchw")
    if refused := peer_named(name).refusal(problem, CUDA):
        pytest.skip(refused)
    check(peer_named(name), problem.with_(precision="tf32"))
    inputs = random_inputs(problem, 0, "cuda")
    prepared = peer_named(name).prepare(problem, [inputs])
    assert error_of(problem, prepared.result(prepared.calls[0]()), inputs) < 1e-6, prepared.note


def test_cudnn_names_its_plan():
    pytest.importorskip("cudnn")
    assert check(peer_named("cudnn"), Problem.parse(PLAIN[0])).startswith("plan ")


def test_cudnn_says_that_it_has_no_plan():
    pytest.importorskip("cudnn")
    problem = Problem.parse("fprop n8 c64 h28 w28 k64 r3 s3 pad1 f16 nchw +bias+residual+silu")  # fused in nhwc only
    with pytest.raises(NotTaken, match="plan"):
        peer_named("cudnn").prepare(problem, [random_inputs(problem, 0, "cuda")])


# -- timing -------------------------------------------------------------------------------------------------------

alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="processes that share a GPU disturb its clock")


def convolution(n: int = 16, c: int = 64, size: int = 56) -> partial[torch.Tensor]:
    x = torch.randn(n, c, size, size, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    w = torch.randn(c, c, 3, 3, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    return partial(F.conv2d, x, w, None, 1, 1)


@alone
def test_a_copy_runs_at_the_ceiling():
    source = torch.rand(128 << 20, device="cuda")  # 512 MB
    target = torch.empty_like(source)
    (found,) = race_cuda([[partial(target.copy_, source)]], budget=0.2)
    assert 2 * 4 * source.numel() / found.median == pytest.approx(ceilings(CUDA, [])["copy"], rel=0.2)


@alone
def test_rates_of_products_are_ordered_as_the_hardware_is():
    found = ceilings(CUDA, ["f32", "tf32", "f16", "f64", "i8", "e4m3"])
    assert set(found) == {"copy", "f32", "tf32", "f16", "f64", "i8"}
    assert found["f16"] > found["tf32"] > found["f32"] > 1e12
    assert roofline_floor(Problem.parse(PLAIN[0]), found) > 0


@alone
def test_inputs_come_from_memory_and_not_from_the_cache():
    source = torch.rand(8 << 20, device="cuda")  # 32 MB, which the L2 cache holds
    (cold,) = race_cuda([[source.sum]], budget=0.2)
    (warm,) = race_cuda([[source.sum]], budget=0.2, flush_bytes=0)
    assert cold.median > 0.95 * warm.median
    assert 4 * source.numel() / cold.median < 1.25 * ceilings(CUDA, [])["copy"]


@alone
def test_alike_contestants_take_alike():
    torch.backends.cudnn.benchmark = True
    first, second = race_cuda([[convolution()], [convolution(), convolution()]], budget=0.5, least=50)
    assert first.median == pytest.approx(second.median, rel=0.1)
    assert first.p20 <= first.median <= first.p80


@alone
def test_launching_is_not_measured():
    call = convolution()

    def slow() -> object:
        time.sleep(1e-3)
        return call()

    quick, late = race_cuda([[call], [slow]], budget=0.5, least=20)
    assert late.median == pytest.approx(quick.median, rel=0.2)


@alone
def test_a_call_that_waits_is_timed_by_the_host():
    call = convolution()

    def waiting() -> object:
        result = call()
        torch.cuda.synchronize()
        return result

    quick, waits = race_cuda([[call], [waiting]], budget=0.5, least=20)
    assert quick.median < waits.median < quick.median + 500e-6


@alone
def test_overhead_is_the_hosts_time_alone():
    small, large = overhead([convolution(1, 8, 8), convolution(64, 256, 56)], CUDA)
    assert 2e-6 < small.median < 200e-6
    assert 2e-6 < large.median < 200e-6  # the GPU needs 300 us for it
