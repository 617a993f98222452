"""Low precision on the CPU: the bits are those of a cast, the engine in f32 and a cast back, whole or in pieces."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

import openconv
from openconv.cpu import casts
from openconv.cpu.casts import available, cut_of
from openconv.cpu.runtime import noted
from openconv.engine import engine_named
from openconv.plan import device_of, make_plan, steps_of
from openconv.problem import Problem
from openconv.select import Policy, choose
from openconv.tensors import DTYPES, in_layout, to_layout

DEVICE = device_of(torch.device("cpu"))
SMALL = replace(DEVICE, threads=2, cache_bytes=40_000)  # cuts small problems, too

needs_f16 = pytest.mark.skipif(not available("f16"), reason="the machine has no instructions for f16")


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


def cut(problem: Problem, device: Any = SMALL, engine: str = "cpu.depthwise") -> Any:
    return cut_of(in_f32(problem), problem.dtypes[0], engine_named(engine), device)


# ---- pieces -------------------------------------------------------------------------------------------------

DEPTHWISE = (
    "n2 c48 h13 w17 k48 r3 s3 pad1 g48",
    "n3 c40 h17 w13 k40 r3 s3 pad1 g40",  # the last channels are no whole vector
    "n2 c48 h15 w14 k48 r5 s5 stride2 pad2 g48",
    "n1 c32 h19 w12 k32 r3 s3 stride3 pad0:2,1:0 g32",
    "n1 c32 h20 w11 k32 r3 s3 pad2 dil2 g32",
    "n2 c32 h9 w10 k96 r3 s3 pad1 g32",  # three filters for a channel
    "n1 c32 d6 h7 w8 k32 t3 r3 s3 pad1 g32",
)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("text", DEPTHWISE)
def test_pieces_of_depthwise_layers_have_the_bits_of_the_whole(text, direction, layout):
    problem = Problem.parse(f"{direction} {text} bf16 {layout}")
    policy, given = Policy(engine="cpu.depthwise"), inputs(problem)
    assert cut(problem).pieces > 1, problem
    got = make_plan(problem, SMALL, policy)(*given)
    assert in_layout(got, layout)
    assert torch.equal(got, expected(problem, SMALL, policy, given)), problem


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", ["n2 c1 h70 w90 k1 r5 s5 pad2", "n1 c3 h90 w80 k3 r3 s3 pad1 g3"])
def test_pieces_of_images_have_the_bits_of_the_whole(text, direction):
    problem = Problem.parse(f"{direction} {text} bf16")
    policy, given = Policy(engine="cpu.filter2d"), inputs(problem)
    assert cut(problem, engine="cpu.filter2d").pieces > problem.n * problem.c, problem
    assert torch.equal(make_plan(problem, SMALL, policy)(*given), expected(problem, SMALL, policy, given)), problem


@needs_f16
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_f16_in_pieces_with_a_bias(direction):
    problem = Problem.parse(f"{direction} n2 c24 h13 w17 k24 r3 s3 pad1 g24 f16 nhwc")
    problem = problem if direction == "wgrad" else problem.with_(epilogue="+bias")
    operands = [] if direction == "wgrad" else [torch.randn(24).half()]
    policy, given = Policy(engine="cpu.depthwise"), inputs(problem)
    assert cut(problem.with_(epilogue="")).pieces > 1
    got = make_plan(problem, SMALL, policy)(given[0], given[1], operands)
    assert torch.equal(got, expected(problem, SMALL, policy, given, operands))


def edge_values() -> torch.Tensor:
    """All sorts of f32: every exponent, ties and their neighbours, both signs, infinities, NaNs, subnormals."""
    tops = torch.arange(0, 1 << 16, 7, dtype=torch.int64) << 16
    ends = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (tops[:, None] | ends).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=needs_f16)])
def test_every_number_is_cast_as_torch_casts_it(dtype):
    """The numbers of low precision through a filter of one tap 1, and products that must be rounded."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    x = values.view(1, 16, 64, 64)
    problem = Problem.parse(f"fprop n1 c16 h64 w64 k16 r1 s1 g16 {dtype}")
    plan = make_plan(problem, SMALL, Policy(engine="cpu.depthwise"))
    assert cut(problem).pieces > 1
    for factor in (1.0, 3.0, 1.0 / 3.0, 1e-4):
        w = torch.full((16, 1, 1, 1), factor).to(DTYPES[dtype])
        got, want = plan(x, w), (x.float() * w.float().view(1, 16, 1, 1)).to(DTYPES[dtype])
        assert torch.equal(got.isnan(), want.isnan())
        number = ~want.isnan()
        assert torch.equal(got[number] + 0, want[number] + 0)  # a sum that begins with 0 has no -0


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=needs_f16)])
def test_sums_are_rounded_as_torch_rounds_them(dtype):
    """f32 of all sorts as a bias, which the engine adds to nothing."""
    values = edge_values()
    channels = values.numel()
    problem = Problem.parse(f"fprop n1 c{channels} h1 w1 k{channels} r1 s1 g{channels} {dtype} +bias")
    core = in_f32(problem)
    engine = engine_named("cpu.depthwise")
    found: Any = cut_of(core, dtype, engine, SMALL)
    pieces = casts.build(core, dtype, engine, next(iter(engine.knobs(core, SMALL))), SMALL, found, True)
    x, w = torch.zeros(problem.x_shape, dtype=DTYPES[dtype]), torch.zeros(problem.w_shape)
    got = torch.full(problem.y_shape, torch.nan, dtype=DTYPES[dtype])
    pieces.run(x, w, got, torch.empty(pieces.bytes, dtype=torch.uint8), values)
    want, got = values.to(DTYPES[dtype]), got.flatten()
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    assert torch.equal((got[number] + 0).view(torch.int16), (want[number] + 0).view(torch.int16))


def test_a_piece_fits_the_cache_and_threads_change_no_wgrad():
    for text in DEPTHWISE:
        for layout in ("nchw", "nhwc"):
            problem = Problem.parse(f"fprop {text} bf16 {layout}")
            found = cut(problem)
            core = in_f32(problem)
            assert 4 * found.channels * casts._moved(core, casts._rows_in(core, found.rows), found.rows) <= 40_000
            grad = problem.with_(direction="wgrad")
            assert cut(grad) == cut(grad, replace(SMALL, threads=64))


def test_where_pieces_do_not_apply():
    layer = Problem.parse("fprop n1 c32 h16 w16 k32 r3 s3 pad1 g32 bf16")
    assert cut(layer) is not None
    assert cut(layer.with_(groups=16)) is None
    assert cut(layer, engine="cpu.direct") is None
    assert cut(layer, replace(SMALL, cache_bytes=100)) is None
    assert cut_of(in_f32(layer), "e4m3", engine_named("cpu.depthwise"), SMALL) is None
    # The first rows of the result are made of padding alone.
    assert cut(Problem.parse("fprop n1 c32 h16 w40 k32 r1 s1 pad9,0 g32 bf16 nhwc")) is None


def test_parts_are_few_and_end_with_one():
    assert casts._parts(6) == [6, 3, 2, 2, 2, 1]
    assert casts._parts(1_000_000)[-1] <= 2
    assert len(casts._parts(1_000_000)) < 500


def test_launches_are_noted_and_not_made():
    problem = Problem.parse("fprop n1 c16 h8 w8 k16 r3 s3 pad1 g16")
    engine = engine_named("cpu.depthwise")
    knobs = next(iter(engine.knobs(problem, SMALL)))
    run, space = engine.build(problem, SMALL, knobs), engine.workspace_bytes(problem, SMALL, knobs)
    (x, w), y = inputs(problem), torch.full(problem.y_shape, torch.nan)
    workspace = torch.empty(space, dtype=torch.uint8)
    launches = noted(lambda: run(x, w, y, workspace, None))
    assert [x.data_ptr() in args for _, args in launches] == [True]
    assert y.isnan().all()
    with pytest.raises(ZeroDivisionError):
        noted(lambda: 1 // 0)
    run(x, w, y, workspace, None)  # from here on they are made again
    assert not y.isnan().any()


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
    got = make_plan(problem, SMALL, policy)(given[0], given[1], operands)
    assert torch.equal(got, expected(problem, SMALL, policy, given, operands))


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
    got = make_plan(problem, SMALL, policy)(x, w)
    assert torch.equal(got, expected(problem, SMALL, policy, (x.contiguous().resolve_neg(), w.contiguous())))


def test_threads_may_call_one_plan_at_once():
    problem = Problem.parse("fprop n2 c24 h26 w24 k24 r3 s3 pad1 g24 bf16 nhwc")
    dense = Problem.parse("fprop n2 c24 h26 w24 k24 r3 s3 pad1 bf16 nhwc")
    for each in (problem, dense):
        plan, cases = make_plan(each, SMALL, Policy()), [inputs(each, seed) for seed in range(8)]
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


def test_the_steps_say_what_is_cut():
    problem = Problem.parse("fprop n2 c24 h13 w17 k24 r3 s3 pad1 g24 bf16")
    core = in_f32(problem)
    candidate = choose(core, SMALL, Policy(engine="cpu.depthwise"))
    steps = steps_of(problem, SMALL, candidate)
    assert steps[:2] == ("cast x bf16 to f32", "cast w bf16 to f32")
    assert steps[2].endswith(f", with its casts in {cut(problem).pieces} pieces")
    assert steps[3:] == ("cast the result f32 to bf16",)
    steps = steps_of(problem.with_(epilogue="+relu"), SMALL, candidate)  # torch needs the whole of it in f32
    assert not any("pieces" in step for step in steps)


@pytest.mark.parametrize("gaps", [False, True])
def test_a_copy_that_closes_gaps_before_pieces_is_told(gaps):
    x, w = torch.randn(2, 64, 40, 40, 2).bfloat16()[..., 0], torch.randn(64, 1, 3, 3).bfloat16()
    told = openconv.explain(x if gaps else x.contiguous(), w, groups=64, engine="cpu.depthwise")
    assert any(step.endswith(" pieces") for step in told.steps)
    assert told.steps[0].startswith("copy x to nchw" if gaps else "cast x")


def test_f16_needs_instructions_for_it():
    """LLVM is asked, since Numba does not list what a CPU that is named has."""
    code = "from openconv.cpu.casts import available; print(available('f16'), available('bf16'))"
    if os.uname().machine != "x86_64":
        pytest.skip("x86 alone has these names")
    for cpu, wanted in (("nehalem", "False True"), ("haswell", "True True")):
        environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == wanted.split()
