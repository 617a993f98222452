"""cuda.igemm with prologues, several results and statistics on the GPU."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.igemm import Igemm
from openconv.plan import plan_for
from openconv.problem import Problem
from openconv.reference import allowed_error, error_of, random_inputs
from openconv.select import Policy
from tests.support import this_device

ENGINE = Igemm()

LAYERS = (
    "n4 c64 h28 w28 k64 r3 s3 pad1",
    "n3 c128 h29 w27 k96 r3 s3 stride2 pad1",
    "n2 c256 h14 w14 k512 r1 s1",
    "n2 c64 h15 w15 k64 r3 s3 pad2 dil2",
    "n2 c3 h40 w40 k64 r7 s7 stride2 pad3",
    "n1 c209 h9 w11 k77 r3 s3 pad1",
    "n2 c64 h14 w14 k128 r3 s3 pad1 g4",
    "n2 c48 d6 h10 w9 k32 t3 r3 s3 pad1",
    "n16 c64 h56 w56 k64 r3 s3 pad1",
)
TYPES = ("f16", "bf16", "f32 tf32", "f32 tf32x3", "f16*f16>f32")
FUSIONS = (
    "x+scale+bias+relu",
    "x+relu",
    "+bias+keep+relu",
    "+keep+bias+residual+relu",
    "stats",
    "+bias+residual stats",
    "x+scale+bias+relu +bias+keep+relu stats",
)


def check(text: str) -> None:
    problem = Problem.parse(text)
    inputs = random_inputs(problem, device="cuda")
    plan = plan_for(problem, this_device(), Policy(engine=ENGINE.name, tuning="off"))
    assert plan.candidate is not None
    assert (plan.candidate.engine.name, plan.core.is_fused) == (ENGINE.name, True)
    made, again = (plan(inputs.a, inputs.b, inputs.operands) for _ in range(2))
    error, allowed = error_of(problem, made, inputs), allowed_error(problem, plan.candidate.traits)
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}: {plan.candidate_name} of '{text}'"
    one, other = ((v,) if isinstance(v, torch.Tensor) else v for v in (made, again))
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True)), f"other bits: '{text}'"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_fprop_is_right(fusion, dtype, layout):
    # Each is a kernel to compile: of the others some.
    for layer in LAYERS if (dtype, layout) == ("f16", "nhwc") else LAYERS[::4]:
        check(f"fprop {layer} {dtype} {layout} {fusion}")


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32 tf32"])
def test_wgrad_with_a_prologue_is_right(dtype, layout):
    for layer in LAYERS[::2]:
        check(f"wgrad {layer} {dtype} {layout} x+scale+bias+relu")


def test_dgrad_has_several_results():
    for layer in LAYERS:
        check(f"dgrad {layer} f16 nhwc +bias+keep+relu")


def test_a_captured_graph_replays_it():
    problem = Problem.parse("fprop n4 c64 h28 w28 k64 r3 s3 pad1 f16 nhwc x+scale+bias+relu +bias+keep+relu stats")
    inputs = random_inputs(problem, device="cuda")
    plan = plan_for(problem, this_device(), Policy(tuning="off"))
    wanted = plan(inputs.a, inputs.b, inputs.operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = plan(inputs.a, inputs.b, inputs.operands)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))
