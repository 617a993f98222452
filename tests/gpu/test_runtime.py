"""Launches: streams, threads, graphs, memory pressure, large tensors, no waiting."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import openconv
from openconv import plan as plans
from openconv.cuda.device import CudaDevice
from openconv.problem import Problem
from openconv.reference import Reference, random_inputs
from openconv.select import DEFAULT

CUDA = torch.device("cuda")


def layer(dtype=torch.float32, channels=32):
    x = torch.randn(4, channels, 20, 22, device=CUDA, dtype=dtype)
    w = torch.randn(channels, 1, 3, 3, device=CUDA, dtype=dtype)
    return x, w, F.conv2d(x.double(), w.double(), padding=1, groups=channels)


def close(got, wanted):
    torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-3)


def test_a_call_does_not_wait_for_the_gpu():
    x, w, wanted = layer()
    openconv.conv2d(x, w, padding=1, groups=32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = openconv.conv2d(x, w, padding=1, groups=32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(got, wanted)


def test_it_runs_on_the_current_stream():
    x, w, wanted = layer()
    openconv.conv2d(x, w, padding=1, groups=32)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)  # a convolution on another stream would see zeros
        got = openconv.conv2d(late, w, padding=1, groups=32)
    torch.cuda.current_stream().wait_stream(stream)
    close(got, wanted)


def test_threads_call_at_once():
    x, w, wanted = layer()
    results, errors = {}, []

    def work(at):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                scaled = (at + 1) * x
                for _ in range(30):
                    got = openconv.conv2d(scaled, w, padding=1, groups=32)
                torch.cuda.current_stream().synchronize()
            results[at] = got
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    workers = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    for at, got in results.items():
        close(got / (at + 1), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_graph_records_all_three_passes(dtype):
    x, w, _ = layer(dtype)
    x.requires_grad_(), w.requires_grad_()

    def step():
        y = openconv.conv2d(x, w, padding=1, groups=32)
        return (y, *torch.autograd.grad(y, (x, w), torch.ones_like(y)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        w.copy_(torch.randn_like(w))
    graph.replay()
    xd, wd = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    y = F.conv2d(xd, wd, padding=1, groups=32)
    wanted = (y, *torch.autograd.grad(y, (xd, wd), torch.ones_like(y)))
    for got, value in zip(kept, wanted, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=1e-2, atol=1e-1 if dtype == torch.float16 else 1e-3)


def test_without_memory_for_its_workspace_another_engine_runs(monkeypatch):
    problem = Problem.parse("wgrad n8 c64 h56 w56 k64 r3 s3 pad1 g64 f16 nhwc")
    plan = plans.make_plan(problem, plans.device_of(CUDA), openconv.select.current_policy())
    assert plan.candidate is not None
    needed = plan.candidate.workspace
    if not needed:
        pytest.skip("the engine of choice needs no workspace")
    inputs = random_inputs(problem, device=CUDA)
    real, asked = torch.empty, []

    def scarce(*size, **options):
        if options.get("dtype") == torch.uint8 and size[0] >= needed:
            asked.append(size)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.warns(RuntimeWarning, match="found no .* of workspace"):
        got = plan(inputs.a, inputs.b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = plan(inputs.a, inputs.b)
    assert len(asked) == 2
    assert torch.equal(got, again)
    assert Reference(problem, inputs, place=CUDA).error(got) < 2e-3


@pytest.mark.parametrize(
    "line",
    [
        "fprop n36 c64 h1000 w1000 k64 r3 s3 pad1 g64 f16 nchw",
        "fprop n36 c64 h1000 w1000 k64 r3 s3 pad1 g64 f16 nhwc",
        "dgrad n1 c1 h47000 w47000 k1 r3 s3 pad1 f16 nchw",
        "fprop n1100 c1 h1400 w1400 k1 r3 s3 pad1 f16 nchw",
    ],
)
def test_tensors_beyond_2_to_the_31_elements(line):
    problem = Problem.parse(line)
    inputs = random_inputs(problem, device=CUDA)
    got = plans.plan_for(problem, plans.device_of(CUDA), openconv.select.current_policy())(inputs.a, inputs.b)
    assert Reference(problem, inputs, place=CUDA).error(got) < 2e-3


def test_slices_of_tensors_at_any_address():
    base = torch.randn(3, 33, 21, 23, device=CUDA, dtype=torch.float16)
    for x in (base[1:, 1:], base[..., 1:], base.flatten()[1 : 1 + 2 * 32 * 20 * 22].view(2, 32, 20, 22)):
        w = torch.randn(x.shape[1] * 9 + 1, device=CUDA, dtype=torch.float16)[1:].view(x.shape[1], 1, 3, 3)
        got = openconv.conv2d(x, w, padding=1, groups=x.shape[1])
        close(got, F.conv2d(x.double(), w.double(), padding=1, groups=x.shape[1]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_tensors_of_another_than_the_current_device():
    x, w, wanted = layer()
    got = openconv.conv2d(x.to("cuda:1"), w.to("cuda:1"), padding=1, groups=32)
    assert got.device.index == 1
    close(got.to("cuda:0"), wanted)


def test_a_fresh_process_with_a_thread_that_never_used_cuda():
    code = """
import threading, torch, openconv
x, w = torch.randn(1, 4, 8, 8, device="cuda"), torch.randn(4, 1, 3, 3, device="cuda")
out = []
worker = threading.Thread(target=lambda: out.append(openconv.conv2d(x, w, groups=4)))
worker.start(); worker.join()
print(float((out[0] - torch.nn.functional.conv2d(x, w, groups=4)).abs().max()) < 1e-4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_plan_is_built_by_a_thread_that_never_used_cuda():
    problem = Problem.parse("fprop n2 c3 h32 w32 k64 r16 s16 stride16 f16 nchw")
    device, built = plans.device_of(CUDA), []
    assert isinstance(device, CudaDevice)
    if device.capability != 90:
        pytest.skip("cuda.patch_rows, which encodes maps of tensors, is for sm_90")
    policy = DEFAULT.but(engine="cuda.patch_rows")
    worker = threading.Thread(target=lambda: built.append(plans.make_plan(problem, device, policy)))
    worker.start()
    worker.join()
    assert len(built) == 1


def test_gradients_modules_and_autocast():
    torch.manual_seed(0)
    ours = openconv.nn.Conv2d(8, 8, 3, padding=1, groups=8, device=CUDA)
    theirs = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, device=CUDA)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 8, 9, 10, device=CUDA)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for model in (ours, theirs):
            model(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-3, atol=1e-3)
    assert ours.bias is not None
    assert theirs.bias is not None
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.float16):
        assert ours(x).dtype == torch.float16
