"""cuda.fft on the GPU: problems that are cut into many tiles, its memory, streams and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.fft import Fft
from openconv.fft_tiles import Form
from openconv.plan import make_plan
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import Reference, allowed_error, random_inputs
from openconv.select import Policy
from tests.support import Run, candidates, check_determinism, core_of, make, this_device

ENGINE = Fft()
CUDA = torch.device("cuda")
SIZES = (
    "n1 c64 w64000 k64 s1024",
    "n1 c64 w16000 k64 s1024 pad1023:0 g64",
    "n1 c1 w80000 k1 s16000 pad15999:0",
    "n2 c3 h500 w500 k3 r131 s131 pad65 g3",
    "n8 c32 h56 w56 k32 r31 s31 pad15",
    "n2 c4 d40 h40 w40 k4 t9 r9 s9 pad4",
    "n2 c8 h200 w200 k8 r21 s21 stride2 pad10",
)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", SIZES)
def test_right_on_what_it_is_for(text, direction, dtype):
    for layout in ("nchw", "nhwc") if " h" in text else ("nchw",):
        problem = make(text, direction, dtype, layout)
        inputs = random_inputs(problem, device=CUDA)
        plan = make_plan(problem, this_device(), Policy(engine=ENGINE.name))
        assert plan.candidate is not None
        error = Reference(problem, inputs, place=CUDA).error(plan(inputs.a, inputs.b), plain_sum=False)
        assert error <= allowed_error(problem, plan.candidate.traits)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_same_bits_each_time(direction):
    for text in ("n2 c6 w7000 k4 s300 g2", "n2 c3 h90 w90 k5 r21 s15 pad10,7"):
        check_determinism(ENGINE, make(text, direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", ["n1 c16 w30000 k16 s1024", "n1 c16 h200 w200 k16 r31 s31 pad15 g16"])
def test_workspace_counts_all_the_memory_that_a_call_takes(text, direction):
    problem = make(text, direction)
    for candidate in candidates(ENGINE, problem):
        if candidate.workspace < 2 << 20:
            continue  # less than a block of torch's allocator
        form = Form(core_of(problem), candidate.knobs, cuda=True)
        run = Run(ENGINE, problem, candidate=candidate)
        run.call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.call()
        taken = form.own + torch.cuda.max_memory_allocated() - before
        assert taken <= candidate.workspace + (2 << 20), f"[{candidate.knobs}]"


def test_runs_in_a_graph_of_cuda_and_on_another_stream():
    problem = Problem.parse("fprop n1 c8 w9000 k8 s300 f32 nchw")
    plan = make_plan(problem, this_device(), Policy(engine=ENGINE.name))
    inputs = random_inputs(problem, device=CUDA)
    wanted = plan(inputs.a, inputs.b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(plan(inputs.a, inputs.b), wanted)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = plan(inputs.a, inputs.b)
    made.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(made, wanted)
