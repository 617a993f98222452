"""cuda.igemm with operations that are not basic in its epilogue and prologue, checked on the CPU."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda import fusion, jit, render
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Igemm, Tile
from openconv.epilogue import OPS
from openconv.evaluate import evaluate
from openconv.plan import make_plan
from openconv.problem import Problem
from openconv.reference import random_inputs
from openconv.select import Policy
from openconv.tensors import DTYPES
from tests.support import this_device, with_knobs

ENGINE = Igemm()
SMALL = Tile(32, 64, 1, 2, 32, 3)


def check(text: str, tolerance: float) -> None:
    """Integers convolve exactly, so that what remains is the epilogue's own error; the same bits again."""
    problem = Problem.parse(text)
    assert not problem.epilogue.is_basic or not problem.prologue.is_basic
    plan = make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, SMALL))
    assert plan.core.is_fused
    assert plan.core.epilogue == problem.epilogue
    given = random_inputs(problem)
    a, b = (torch.randint_like(value, -2, 3) for value in (given.a, given.b))
    made, again = (plan(a, b, given.operands) for _ in range(2))
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    bare = problem.with_(epilogue="", prologue="", dtypes="f64", layouts="nchw")
    count = len(problem.prologue.operands)
    x = a.double()
    if not problem.prologue.is_identity:
        names = [operand.name for operand in problem.prologue.operands]
        values = dict(zip(names, (v.double() for v in given.operands[:count]), strict=True))
        x = evaluate(problem.prologue, x, values).to(a.dtype).double()
    sums = make_plan(bare, this_device(), Policy(engine="cuda.naive"))(x.contiguous(), b.double().contiguous(), ())
    names = [operand.name for operand in problem.epilogue.operands]
    values = dict(zip(names, (v.double() for v in given.operands[count:]), strict=True))
    for result, expr in zip(results, (problem.epilogue.expr, *problem.epilogue.also), strict=True):
        wanted = evaluate(type(problem.epilogue)(expr), sums, values)
        epsilon = torch.finfo(DTYPES[problem.result_dtype]).eps
        torch.testing.assert_close(result.double(), wanted, rtol=max(epsilon, tolerance), atol=tolerance)
    repeated = [again] if isinstance(again, torch.Tensor) else list(again)
    assert all(torch.equal(one, other) for one, other in zip(results, repeated, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "dgrad n2 c16 h5 w6 k8 r3 s3 pad1 f16 nhwc +relu_backward(t.y)",
        "fprop n1 c8 h5 w7 k24 r3 s3 pad1 f16 nhwc +bias+relu_backward(t.y)",
        "dgrad n1 c12 h6 w5 k8 r3 s3 stride2 pad1 bf16 nchw +gelu_backward(t.y)",
        "fprop n1 c8 h4 w5 k16 r1 s1 f32 nhwc +=swish_backward(t.dy,acc,0.5)",
        "fprop n1 c8 h4 w5 k16 r1 s1 f16 nhwc +hardswish_backward(t.y)+mul(c.scale)",
        "fprop n2 c8 h5 w5 k11 r3 s3 pad1 f16 nchw +=select(cmp_gt(acc,t.y),acc,0)",
        "fprop n1 c8 h5 w5 k16 r3 s3 pad1 f16 nhwc +clamp_backward(t.y,-0.5,0.5)+keep+floor",
        "fprop n1 c8 h5 w5 k16 r3 s3 pad1 f16*f16>f32 nhwc +mul(0.125)+softplus(0.5)+pow(2)",
    ],
)
def test_part_of_the_kernel(text):
    check(text, 1e-5)


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_in_a_prologue(direction):
    check(f"{direction} n1 c16 h5 w6 k8 r3 s3 pad1 f16 nhwc x+scale+sign", 1e-5)


def test_every_further_operation_compiles():
    """In one epilogue, for the oldest and the newest products."""
    text = "acc"
    for name, op in OPS.items():
        if not op.basic:
            text = f"{name}({','.join([text, 't.y', 's.z'][: op.values])})"
    problem = Problem.parse(f"fprop n1 c8 h5 w5 k16 r3 s3 pad1 f16 nhwc +={text}")
    for arch in ("sm_80", "sm_120"):
        for source in ENGINE.sources(problem, device_for(arch), SMALL):
            assert jit.usage(source, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_spills(arch):
    problem = Problem.parse("dgrad n16 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc +relu_backward(t.y)")
    device = device_for(arch)
    tile = next(tile for tile in ENGINE.knobs(problem, device) if tile.splits == 1)
    for source in ENGINE.sources(problem, device, tile):
        assert not any(found.spills for found in jit.usage(source, arch)), (arch, tile)


def test_basic_problems_are_as_they_were():
    """Not a byte more: what is compiled for them keys the cache."""
    problem = Problem.parse("fprop n1 c8 h5 w5 k16 r3 s3 f16 nhwc x+scale+relu +bias+keep+gelu stats")
    assert fusion.further(problem) == ""
    assert fusion.traits(problem, {}).startswith(render.traits(problem, {"stats": True}).removesuffix("};\n"))
    more = fusion.traits(problem.with_(epilogue="+floor"), {})
    assert more.startswith("// The operations")
    assert "#include" not in more
    assert "#pragma once" not in more
