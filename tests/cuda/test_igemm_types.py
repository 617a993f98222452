"""cuda.igemm: products of f32 on CUDA cores, of floats of one byte, and integers that become floats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openconv.cpu.device import cpu_device
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Tile
from openconv.engine import UnsupportedProblem
from openconv.plan import make_plan
from openconv.problem import Problem
from openconv.select import Policy
from tests.cuda.test_igemm import DIRECTIONS, ENGINE, LAYERS, check
from tests.support import PROBLEMS, assert_right, make, refusal, run_engine, tensors, this_device, with_knobs

WIDE = Tile(64, 64, 1, 2, 16, 3)  # 8 x 8 results of a thread
FLAT = Tile(32, 64, 1, 2, 32, 3)  # 4 x 8, and a whole 128 bytes of depth


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_f32_on_cuda_cores(direction):
    for text in (LAYERS[0], LAYERS[6], LAYERS[7], LAYERS[8], PROBLEMS["stride-and-dilation"]):
        check(text, direction, WIDE, "f32")
    check(PROBLEMS["209-channels"], direction, replace(FLAT, splits=3), "f32")
    check(PROBLEMS["1d-stride"], direction, FLAT, "f32", "nchw")
    check(PROBLEMS["groups"], direction, replace(WIDE, splits=2), "f32", "nchw")
    check(LAYERS[1], direction, Tile(128, 32, 2, 1, 16, 4), "f32", "nchw")


@pytest.mark.parametrize("direction, layout", [("fprop", "nhwc"), ("dgrad", "nchw")])
def test_an_epilogue_in_f32(direction, layout):
    text = "n1 c24 h5 w5 k14 r3 s3 pad1"
    check(f"{text} +bias+relu", direction, WIDE, "f32", layout)
    check(f"{text} +mul(c.a)+add(t.b)+clamp(-1,2)", direction, replace(FLAT, splits=2), "f32", layout)


def test_sums_on_cuda_cores_are_in_the_order_of_the_depth():
    """So that no bit depends on the batch or on the tile."""
    problem = make("n2 c40 h6 w7 k24 r3 s3 pad1", "fprop", "f32", "nhwc")
    a, b, _ = tensors(problem)
    a[0, 0, 0, 0], a[0, 0, 3, 3] = torch.inf, torch.nan
    results = []
    for knobs in (WIDE, FLAT):
        assert ENGINE.traits(problem, knobs).batch_invariant
        run = run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs), inputs=(a, b, ()))
        results.append(run.out)
    assert torch.equal(*[each.contiguous().view(torch.int32) for each in results])
    assert results[0][0, :, 0, 0].isinf().all()
    assert results[0][0, :, 2:5, 2:5].isnan().all()


def test_the_default_in_f32_spills_nowhere():
    for arch in ("sm_80", "sm_90a"):
        device = device_for(arch)
        for direction in DIRECTIONS:
            problem = make("n16 c64 h56 w56 k64 r3 s3 pad1", direction, "f32", "nhwc")
            tile = next(iter(ENGINE.knobs(problem, device)))
            assert not any(found.spills for found in jit.usage(ENGINE.sources(problem, device, tile)[0], arch)), tile


BYTES = Tile(64, 64, 2, 2, 64, 3)


@pytest.mark.parametrize(
    "dtypes, splits, layout",
    [
        ("e4m3*e4m3>f16", 1, "nhwc"),
        ("e5m2*e4m3>bf16", 1, "nchw"),
        ("e4m3*e5m2>f32", 2, "nhwc"),
        ("e5m2*e5m2>f16", 2, "nhwc"),
    ],
)
def test_floats_of_one_byte(dtypes, splits, layout):
    knobs = replace(BYTES, splits=splits)
    for text in (LAYERS[0], PROBLEMS["stride-and-dilation"]):
        check(text, "fprop", knobs, dtypes, layout)
    check("n1 c24 h5 w5 k14 r3 s3 pad1 +scale+bias+relu", "fprop", knobs, dtypes, layout)


def test_every_byte_is_the_float_that_it_should_be():
    """All values that are numbers, each alone in its sum; and those that are not."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        name = "e4m3" if dtype is torch.float8_e4m3fn else "e5m2"
        problem = Problem.parse(f"fprop n1 c1 h16 w16 k1 r1 s1 {name}*{name}>f32 nhwc")
        x = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 16, 16)
        w = torch.ones(1, 1, 1, 1).to(dtype)
        candidate = with_knobs(ENGINE, problem, BYTES)
        out = make_plan(problem, this_device(), Policy(), candidate)(x, w)
        torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


def test_floats_of_one_byte_on_the_cpu_and_where_nothing_takes_them():
    text = "fprop n1 c5 h6 w7 k6 r3 s3 pad1 e4m3*e5m2>f16 nhwc +bias"
    problem = Problem.parse(text)
    a, b, operands = tensors(problem)
    plan = make_plan(problem, cpu_device(1), Policy())
    assert "cast x e4m3 to f32" in plan.steps
    assert_right(problem, plan(a, b, operands), a, b, operands)
    with pytest.raises(UnsupportedProblem, match="dtype is e4m3"):
        make_plan(problem, device_for("sm_80"), Policy())
    old = list(ENGINE.refusals(problem, device_for("sm_80")))
    assert old == ["the device is sm_80; e4m3 products are those of sm_89 and later"]
    gradient = Problem.parse("dgrad n1 c5 h6 w7 k6 r3 s3 f16*e4m3>e4m3 nhwc")
    assert refusal(ENGINE, gradient) == "the pass is dgrad of e4m3; wanted fprop"
    assert "wanted one of" in refusal(ENGINE, Problem.parse("fprop n1 c5 h6 w7 k6 r3 s3 e4m3 nhwc"))


@pytest.mark.parametrize("dtypes, splits", [("i8*i8>f32", 1), ("i8*i8>f32", 2), ("i8*i8>f16", 1)])
def test_integers_become_floats(dtypes, splits):
    knobs = replace(BYTES, splits=splits)
    if dtypes.endswith("f32"):  # wide values overflow a f16
        check(LAYERS[0], "fprop", knobs, dtypes)
    check("n1 c24 h5 w5 k14 r3 s3 pad1 +scale+bias+relu", "fprop", knobs, dtypes)
    check("n1 c9 h5 w5 k7 r3 s3 stride2 pad1 +mul(c.a)+residual", "fprop", knobs, dtypes, "nchw")
    assert ENGINE.traits(make(LAYERS[0], "fprop", dtypes, "nhwc"), knobs).accumulator == "i32"
