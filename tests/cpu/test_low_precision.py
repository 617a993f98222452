"""Low precision on the CPU: the bits are those of a cast, the engine in f32 and a cast back, whoever casts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import openconv
from openconv.cpu.low_precision import memory_token
from openconv.cpu.runtime import Kernel, kernel, launch
from openconv.cpu.simd import argument, has_f16, lanes, load, load_scalar, narrow, store, store_scalar
from openconv.engine import engine_named
from openconv.plan import device_of, make_plan, steps_of
from openconv.problem import DIRECTIONS, Problem
from openconv.select import Policy, choose
from openconv.tensors import DTYPES, in_layout, to_layout

DEVICE = device_of(torch.device("cpu"))
TWO = replace(DEVICE, threads=2)

needs_f16 = pytest.mark.skipif(not has_f16(), reason="the machine has no instructions for f16")
LOW = ["bf16", pytest.param("f16", marks=needs_f16)]


def inputs(problem: Problem, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    return [
        to_layout(torch.randn(shapes[at]).to(DTYPES[problem.dtypes[at]]), problem.layouts[at]) for at in problem.inputs
    ]


def in_f32(problem: Problem) -> Problem:
    return problem.with_(dtypes="f32")


def expected(problem: Problem, device: Any, policy: Policy, given: Any, operands: Any = ()) -> torch.Tensor:
    """What casts by torch around the engine in f32 leave."""
    plan = make_plan(in_f32(problem), device, policy)
    a, b = (value.float() for value in given)
    made: torch.Tensor = plan(a, b, [value.float() for value in operands])
    return made.to(DTYPES[problem.result_dtype])


def run_poisoned(problem: Problem, engine: Any, given: Any, knobs: Any = None) -> torch.Tensor:
    """What the engine leaves in a result and a workspace that held NaN."""
    knobs = knobs or next(iter(engine.knobs(problem, TWO)))
    run, space = engine.build(problem, TWO, knobs), engine.workspace_bytes(problem, TWO, knobs)
    assert space >= engine.workspace_bytes(in_f32(problem), TWO, knobs)
    out = torch.full(problem.result_shape, torch.nan, dtype=DTYPES[problem.result_dtype])
    out = to_layout(out, problem.layouts[problem.result])
    run(*given, out, torch.full((space,), 255, dtype=torch.uint8) if space else None, None)
    return out


# ---- kernels that read and write low precision ------------------------------------------------------------------

DEPTHWISE = (
    "n2 c48 h13 w17 k48 r3 s3 pad1 g48",
    "n3 c40 h17 w13 k40 r3 s3 pad1 g40",  # the last channels are no whole vector of 16 lanes
    "n2 c21 h9 w7 k21 r3 s3 pad1 g21",
    "n2 c5 h9 w6 k5 r3 s3 pad1 g5",  # fewer than lanes
    "n1 c24 h11 w3 k24 r3 s3 pad1 g24",  # pixel by pixel
    "n2 c48 h15 w14 k48 r5 s5 stride2 pad2 g48",
    "n1 c32 h19 w12 k32 r3 s3 stride3 pad0:2,1:0 g32",
    "n1 c32 h20 w11 k32 r3 s3 pad2 dil2 g32",
    "n2 c32 h9 w10 k96 r3 s3 pad1 g32",  # three filters for a channel
    "n1 c32 d6 h7 w8 k32 t3 r3 s3 pad1 g32",
)
IMAGES = (
    "n2 c1 h70 w90 k1 r5 s5 pad2",
    "n1 c3 h20 w80 k3 r3 s3 pad1 g3",
    "n1 c3 h13 w11 k4 r3 s3 pad1",
    "n1 c2 h9 w7 k2 r3 s3 pad1,2 dil1,2",
    "n2 c1 w70 k2 s5 pad2",
)


def taking_turns(texts: Sequence[str], first: int, dtype: str) -> Iterator[Any]:
    """All passes of each, the layouts in turns: each is a kernel to compile."""
    for at, text in enumerate(texts):
        for direction in DIRECTIONS:
            layout = ("nchw", "nhwc")[(at + first + DIRECTIONS.index(direction)) % 2]
            marks = [needs_f16] * (dtype == "f16") + [pytest.mark.slow] * (at > 2)
            yield pytest.param(text, direction, layout, dtype, marks=marks)


CASES = [*taking_turns(DEPTHWISE, 0, "bf16"), *taking_turns(DEPTHWISE[:2], 1, "f16")]


@pytest.mark.parametrize(("text", "direction", "layout", "dtype"), CASES)
def test_depthwise_layers_have_the_bits_of_whole_casts(text, direction, layout, dtype):
    problem = Problem.parse(f"{direction} {text} {dtype} {layout}")
    policy, given = Policy(engine="cpu.depthwise"), inputs(problem)
    want = expected(problem, TWO, policy, given)
    got = make_plan(problem, TWO, policy)(*given)
    assert in_layout(got, layout)
    assert torch.equal(got, want), problem
    assert torch.equal(run_poisoned(problem, engine_named("cpu.depthwise"), given), want), problem


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("text", IMAGES)
def test_images_have_the_bits_of_whole_casts(text, direction, dtype):
    problem = Problem.parse(f"{direction} {text} {dtype}")
    policy, given = Policy(engine="cpu.filter2d"), inputs(problem)
    want = expected(problem, TWO, policy, given)
    assert torch.equal(make_plan(problem, TWO, policy)(*given), want), problem
    assert torch.equal(run_poisoned(problem, engine_named("cpu.filter2d"), given), want), problem


# Lanes that are not full, images that are no whole tiles, windows that leave the image and such as stay inside.
DENSE = (
    ("cpu.winograd", "n2 c16 h13 w17 k20 r3 s3 pad1"),
    ("cpu.winograd", "n1 c21 h9 w7 k19 r5 s5 pad2"),
    ("cpu.winograd", "n2 c32 h14 w14 k32 r3 s3 pad1 g2"),
    ("cpu.winograd", "n3 c12 w40 k9 s3 pad1"),
    ("cpu.direct", "n2 c16 h13 w17 k20 r3 s3 pad1"),
    ("cpu.direct", "n2 c21 h9 w7 k19 r3 s3 stride2 pad1"),
    ("cpu.direct", "n1 c3 h15 w15 k8 r7 s7 stride2 pad3"),  # channels that are turned in wgrad
    ("cpu.direct", "n2 c40 h11 w9 k48 r1 s1"),  # read in place in f32
    ("cpu.direct", "n2 c32 h10 w10 k32 r3 s3 dil2 g2"),
    ("cpu.direct", "n1 c200 d3 h6 w6 k16 t2 r3 s3"),  # several chunks of terms
    ("cpu.pixels", "n2 c40 h9 w13 k35 r1 s1"),
    ("cpu.pixels", "n1 c8 h20 w24 k36 r1 s1 g2"),
    ("cpu.pixels", "n1 c12 h16 w16 k7 r1 s1 stride2"),
    ("cpu.pixels", "n2 c3 h13 w40 k9 r3 s3 pad1"),
)


def dense() -> Iterator[Any]:
    """All passes of each that the engine has, layouts and dtypes in turns: each is a kernel to compile."""
    for at, (name, text) in enumerate(DENSE):
        for turn, direction in enumerate(DIRECTIONS):
            layout = "nhwc" if (at + turn) % 2 and name != "cpu.pixels" and " w40 k9 s3" not in text else "nchw"
            dtype = "bf16" if turn else "f16"
            if not list(engine_named(name).refusals(Problem.parse(f"{direction} {text} {layout}"), TWO)):
                marks = [needs_f16] * (dtype == "f16") + [pytest.mark.slow] * (at % 3 == 2)
                yield pytest.param(name, f"{direction} {text} {dtype} {layout}", marks=marks)


@pytest.mark.parametrize(("engine", "text"), list(dense()))
def test_dense_layers_have_the_bits_of_whole_casts(engine, text):
    """In whatever way the engine reads the image; the filters for the first time, and as it keeps them."""
    problem, policy = Problem.parse(text), Policy(engine=engine)
    given, core = inputs(problem), in_f32(problem)
    plan, want = make_plan(problem, TWO, policy), expected(problem, TWO, policy, given)
    assert len(plan.steps) == 1
    assert all(torch.equal(plan(*given), want) for _ in range(3))
    named = engine_named(engine)
    ways = {getattr(knobs, "read", None): knobs for knobs in named.knobs(problem, TWO)}
    for knobs in ways.values():
        run, out = named.build(core, TWO, knobs), torch.empty(problem.result_shape)
        out = to_layout(out, problem.layouts[problem.result])
        space = torch.empty(named.workspace_bytes(core, TWO, knobs), dtype=torch.uint8)
        run(*(value.float() for value in given), out, space, None)
        assert torch.equal(run_poisoned(problem, named, given, knobs), out.to(DTYPES[problem.result_dtype])), knobs


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("engine", "layer"),
    [
        ("cpu.winograd", "n2 c16 h13 w17 k20 r3 s3 pad1 {} nchw"),
        ("cpu.winograd", "n2 c16 h13 w17 k21 r3 s3 pad1 {} nhwc"),
        ("cpu.direct", "n2 c16 h13 w17 k20 r3 s3 pad1 {} nchw"),
        ("cpu.direct", "n2 c16 h13 w17 k37 r1 s1 {} nhwc"),
        ("cpu.pixels", "n2 c16 h9 w13 k20 r1 s1 {} nchw"),
    ],
)
def test_what_an_engine_finishes_it_rounds_once(engine, layer, dtype):
    problem = Problem.parse(f"fprop {layer.format(dtype)}").with_(epilogue="+bias+residual+relu")
    operands = [torch.randn(problem.k).to(DTYPES[dtype]), torch.randn(problem.y_shape).to(DTYPES[dtype])]
    operands[1] = to_layout(operands[1], problem.layouts[2])
    policy, given = Policy(engine=engine), inputs(problem)
    plan = make_plan(problem, TWO, policy)
    assert len(plan.steps) == 1
    assert torch.equal(plan(given[0], given[1], operands), expected(problem, TWO, policy, given, operands))


def test_sums_of_many_terms_are_no_ones_to_keep_in_bf16():
    layer = Problem.parse("fprop n1 c600 h6 w6 k8 r1 s1 bf16")
    assert "600 terms" in next(iter(engine_named("cpu.pixels").refusals(layer, TWO)))
    policy, given = Policy(engine="cpu.pixels"), inputs(layer)
    plan = make_plan(layer, TWO, policy)
    assert plan.steps[0] == "cast x bf16 to f32"
    assert torch.equal(plan(*given), expected(layer, TWO, policy, given))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("cpu.depthwise", "c24 h13 w17 k24 r3 s3 pad1 g24 {} nhwc"),
        ("cpu.depthwise", "c24 h13 w17 k24 r3 s3 pad1 g24 {} nchw"),
        ("cpu.depthwise", "c5 h6 w3 k5 r3 s3 pad1 g5 {} nhwc"),
        ("cpu.filter2d", "c2 h13 w40 k2 r3 s3 pad1 {} nchw"),
    ],
)
def test_a_bias_is_added_before_rounding(engine, text, direction, dtype):
    problem = Problem.parse(f"{direction} n2 {text.format(dtype)}").with_(epilogue="+bias")
    operands = [torch.randn(problem.k if direction == "fprop" else problem.c).to(DTYPES[dtype])]
    policy, given = Policy(engine=engine), inputs(problem)
    got = make_plan(problem, TWO, policy)(given[0], given[1], operands)
    assert torch.equal(got, expected(problem, TWO, policy, given, operands))


def edge_values() -> torch.Tensor:
    """All sorts of f32: every exponent, ties and their neighbours, both signs, infinities, NaNs, subnormals."""
    tops = torch.arange(0, 1 << 16, 7, dtype=torch.int64) << 16
    ends = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (tops[:, None] | ends).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("engine", "shape", "layout"),
    [("cpu.depthwise", (16, 64, 64), "nchw"), ("cpu.depthwise", (16, 64, 64), "nhwc"),
     ("cpu.depthwise", (16384, 2, 2), "nhwc"), ("cpu.filter2d", (1, 256, 256), "nchw")],
)  # fmt: skip
def test_every_number_is_cast_as_torch_casts_it(engine, shape, layout, dtype):
    """The numbers of low precision through a filter of one tap 1, and products that must be rounded."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    c, h, w = shape
    x = to_layout(values.view(1, *shape), layout)
    problem = Problem.parse(f"fprop n1 c{c} h{h} w{w} k{c} r1 s1 g{c} {dtype} {layout}")
    plan = make_plan(problem, TWO, Policy(engine=engine))
    for factor in (1.0, 3.0, 1.0 / 3.0, 1e-4):
        weight = torch.full((c, 1, 1, 1), factor).to(DTYPES[dtype])
        got, want = plan(x, weight), (x.float() * weight.float().view(1, c, 1, 1)).to(DTYPES[dtype])
        assert torch.equal(got.isnan(), want.isnan())
        number = ~want.isnan()
        assert torch.equal(got[number] + 0, want[number] + 0)  # a sum that begins with 0 has no -0


@functools.cache
def narrow_kernel(T: type, M: type) -> Kernel:
    """Numbers rounded by a vector at a time, and one by one into a second place."""
    L, SIZE, HELD = lanes(T), np.dtype(T).itemsize, np.dtype(M).itemsize

    @kernel
    def narrow_all(block):
        x, y, z, count = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        for i in range(0, count, L):
            store(y + i * HELD, narrow(M, load(T, x + i * SIZE)))
        for i in range(count):
            store_scalar(z + i * HELD, narrow(M, load_scalar(T, x + i * SIZE)))

    return narrow_all


@pytest.mark.parametrize("dtype", LOW)
def test_numbers_are_rounded_as_torch_rounds_them(dtype):
    values = edge_values()
    count = values.numel() // 64 * 64
    values, want = values[:count], values[:count].to(DTYPES[dtype])
    vectors, scalars = torch.empty_like(want), torch.empty_like(want)
    places = values.data_ptr(), vectors.data_ptr(), scalars.data_ptr()
    launch(narrow_kernel(np.float32, memory_token(dtype)), (*places, count), 1)
    for got in (vectors, scalars):
        assert torch.equal(got.isnan(), want.isnan())
        number = ~want.isnan()
        assert torch.equal(got[number].view(torch.int16), want[number].view(torch.int16))


def test_what_is_taken_as_it_is():
    layer = Problem.parse("fprop n1 c32 h16 w16 k32 r3 s3 pad1 g32 bf16")
    assert not list(engine_named("cpu.depthwise").refusals(layer, TWO))
    mixed = layer.with_(dtypes=("bf16", "bf16", "f32"))
    assert "bf16, bf16, f32" in next(engine_named("cpu.depthwise").refusals(mixed, TWO))
    assert "e4m3" in next(engine_named("cpu.filter2d").refusals(layer.with_(dtypes="e4m3"), TWO))


# ---- plans --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "nchw*nhwc>nchw"])
def test_whole_casts_leave_the_same_bits(direction, dtype, layout):
    problem = Problem.parse(f"{direction} n2 c8 h10 w11 k12 r3 s3 stride2 pad1 {dtype} {layout}")
    policy, given = Policy(engine="cpu.im2col_gemm"), inputs(problem)
    for _ in range(3):  # in new memory, then in that of the call before
        got = make_plan(problem, DEVICE, policy)(*given)
        assert torch.equal(got, expected(problem, DEVICE, policy, given))


@pytest.mark.parametrize("epilogue", ["+bias+relu", "+bias+residual+relu", "+bias"])
@pytest.mark.parametrize("engine", ["cpu.depthwise", "cpu.naive"])
def test_an_epilogue_is_computed_in_f32_and_rounded_once(epilogue, engine):
    problem = Problem.parse(f"fprop n2 c16 h12 w13 k16 r3 s3 pad1 g16 bf16 nchw {epilogue}")
    operands = [torch.randn(16).bfloat16()]
    operands += [torch.randn(problem.y_shape).bfloat16()] if "residual" in epilogue else []
    given, policy = inputs(problem), Policy(engine=engine)
    got = make_plan(problem, TWO, policy)(given[0], given[1], operands)
    assert torch.equal(got, expected(problem, TWO, policy, given, operands))


@pytest.mark.parametrize("lie", ["offset", "gaps", "turned", "negated"])
def test_inputs_that_lie_otherwise(lie):
    problem = Problem.parse("fprop n2 c16 h12 w13 k16 r3 s3 pad1 g16 bf16")
    x, w = inputs(problem)
    if lie == "offset":
        x = torch.cat([torch.zeros(1).bfloat16(), x.flatten()])[1:].view(x.shape)
    elif lie == "gaps":
        x = torch.randn(2, 16, 12, 26).bfloat16()[..., ::2]
    elif lie == "turned":
        x, w = x.transpose(2, 3).contiguous().transpose(2, 3), w.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        x = torch._neg_view(x)
    policy = Policy(engine="cpu.depthwise")
    got = make_plan(problem, TWO, policy)(x, w)
    assert torch.equal(got, expected(problem, TWO, policy, (x.contiguous().resolve_neg(), w.contiguous())))


def test_threads_may_call_one_plan_at_once():
    problem = Problem.parse("fprop n2 c24 h26 w24 k24 r3 s3 pad1 g24 bf16 nhwc")
    dense = Problem.parse("fprop n2 c24 h26 w24 k24 r3 s3 pad1 bf16 nhwc")
    for each in (problem, dense):
        plan, cases = make_plan(each, TWO, Policy()), [inputs(each, seed) for seed in range(8)]
        wanted = [plan(*case) for case in cases]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                got = list(pool.map(lambda case, plan=plan: plan(*case), cases))
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_results_stay_when_their_memory_is_borrowed_again():
    x, w = torch.randn(2, 8, 20, 20).bfloat16(), torch.randn(8, 8, 3, 3).bfloat16()
    first = openconv.conv2d(x, w)
    kept = first.clone()
    openconv.conv2d(2 * x, w)
    assert torch.equal(first, kept)


def test_changed_filters_are_cast_anew():
    x, w = torch.randn(1, 16, 12, 12).bfloat16(), torch.randn(16, 1, 3, 3).bfloat16()
    for _ in range(3):
        openconv.conv2d(x, w, groups=16)
    w.mul_(2)
    got = openconv.conv2d(x, w, groups=16)
    assert torch.equal(got, openconv.conv2d(x.float(), w.float(), groups=16).bfloat16())


def test_gradients_of_low_precision_are_those_of_the_passes():
    given = torch.randn(2, 16, 12, 12).bfloat16(), torch.randn(16, 1, 3, 3).bfloat16()
    x, w = (value.requires_grad_() for value in given)
    dy = torch.randn(2, 16, 10, 10).bfloat16()
    openconv.conv2d(x, w, groups=16).backward(dy)
    xf, wf = (value.detach().float().requires_grad_() for value in (x, w))
    openconv.conv2d(xf, wf, groups=16).backward(dy.float())
    grads: list[Any] = [x.grad, xf.grad, w.grad, wf.grad]
    assert torch.equal(grads[0], grads[1].bfloat16())
    torch.testing.assert_close(grads[2], grads[3].bfloat16())


def test_the_steps_say_who_casts():
    problem = Problem.parse("fprop n2 c24 h13 w17 k24 r3 s3 pad1 g24 bf16")
    candidate = choose(in_f32(problem), TWO, Policy(engine="cpu.depthwise"))
    (step,) = steps_of(problem, TWO, candidate)
    assert step.startswith("run cpu.depthwise")
    assert "bf16" in step
    assert make_plan(problem, TWO, Policy(engine="cpu.depthwise")).steps == (step,)
    steps = steps_of(problem.with_(epilogue="+relu"), TWO, candidate)  # torch needs the whole of it in f32
    assert steps[:2] == ("cast x bf16 to f32", "cast w bf16 to f32")
    assert steps[-1] == "cast the result f32 to bf16"
    steps = make_plan(Problem.parse("fprop n1 c1 h40 w40 k1 r3 s3 bf16"), TWO, Policy(engine="cpu.filter2d")).steps
    assert steps[0] == "cast w bf16 to f32"
    assert len(steps) == 2


@pytest.mark.parametrize("gaps", [False, True])
def test_a_copy_that_closes_gaps_is_told(gaps):
    x, w = torch.randn(2, 64, 40, 40, 2).bfloat16()[..., 0], torch.randn(64, 1, 3, 3).bfloat16()
    told = openconv.explain(x if gaps else x.contiguous(), w, groups=64, engine="cpu.depthwise")
    assert not any(step.startswith("cast") for step in told.steps)
    assert told.steps[0].startswith("copy x to nchw" if gaps else "run cpu.depthwise")


def test_f16_needs_instructions_for_it():
    """LLVM is asked, since Numba does not list what a CPU that is named has."""
    code = "from openconv.cpu.simd import has_f16; print(has_f16())"
    if os.uname().machine != "x86_64":
        pytest.skip("x86 alone has these names")
    for cpu, wanted in (("nehalem", "False"), ("haswell", "True")):
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [wanted]
