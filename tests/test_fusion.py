"""Prologues, several results and statistics: their text, what is refused, and plans that leave them to torch."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openconv.cuda.device import device_for
from openconv.device import Device
from openconv.engine import engines
from openconv.epilogue import Acc, Epilogue, acc, apply, channel
from openconv.evaluate import statistics
from openconv.plan import device_of, lower, make_plan, plan_for, steps_of
from openconv.problem import Problem
from openconv.reference import Inputs, Reference, all_expected, allowed_error, error_of, part_of, random_inputs
from openconv.select import Policy, rank
from openconv.tensors import DTYPES, in_layout
from tests.support import epilogues

BASE = "n2 c6 h7 w5 k4 r3 s3 pad1"
EVERYTHING = f"fprop {BASE} f16 nhwc x+scale+bias+relu +bias+keep+relu stats"


def here() -> Device:
    return device_of(torch.device("cpu"))


# -- text ------------------------------------------------------------------------------------------------------------


@given(epilogues(), st.data())
def test_an_epilogue_of_several_results_parses_back(epilogue, data):
    nodes = list(dict.fromkeys(epilogue.expr.walk()))
    kept = data.draw(st.lists(st.sampled_from([*nodes, acc]), unique=True, max_size=3))
    several = Epilogue(epilogue.expr, tuple(kept))
    text = str(several)
    again = Epilogue.parse(text)
    assert again == several
    assert hash(again) == hash(several)
    assert str(again) == text
    assert several.is_identity == (text == "")
    assert several.operands == epilogue.operands
    assert pickle.loads(pickle.dumps(several)) == several


BIASED = acc + channel("bias")


@pytest.mark.parametrize(
    "text, expr, also",
    [
        ("+bias+keep+relu", apply("relu", BIASED), (BIASED,)),
        ("+keep+bias+keep+relu", apply("relu", BIASED), (acc, BIASED)),
        ("+bias+keep", BIASED, (BIASED,)),
        ("+keep", acc, (acc,)),
        ("+=relu(add(acc,c.bias))+keep(add(acc,c.bias))+keep(acc)", apply("relu", BIASED), (BIASED, acc)),
        ("+=mul(acc,sigmoid(acc))+keep(abs(acc))", acc * apply("sigmoid", acc), (apply("abs", acc),)),
        ("+=acc+keep(c.a)", acc, (channel("a"),)),
    ],
)
def test_keep_means_what_the_docstring_says(text, expr, also):
    assert str(Epilogue(expr, also)) == text
    assert Epilogue.parse(text) == Epilogue(expr, also)


def test_keep_chains():
    made = Epilogue().bias().keep().relu()
    assert str(made) == "+bias+keep+relu"
    assert made.flops == 2
    assert Epilogue.parse("+=acc+keep(relu(add(acc,c.a)))").flops == 2
    assert made != Epilogue().bias().relu()


@pytest.mark.parametrize(
    "text, words",
    [
        ("+keep+keep", ["acc, acc", "each of them once"]),
        ("+=acc+keep(relu(acc)", ["')'"]),
        ("+=acc+keep", ["the end, or '+keep('"]),
        ("+=acc+relu", ["the end, or '+keep('"]),
        ("+bias+keep(acc)", ["'+'", "(acc)"]),
        ("+=acc+keep(add(s.a,c.a))", ["'a'", "scalar", "channel"]),
    ],
)
def test_an_epilogue_says_what_is_wrong(text, words):
    with pytest.raises(ValueError) as error:
        Epilogue.parse(text)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        EVERYTHING,
        f"wgrad {BASE} bf16 nchw x+relu",
        f"fprop {BASE} f32 nchw tf32 stats",
        f"dgrad {BASE} f32 nchw +keep+residual",
        f"fprop {BASE} f32 nchw x+=mul(acc,sigmoid(acc)) +=acc+keep(abs(acc)) stats",
    ],
)
def test_a_problem_parses_back(text):
    problem = Problem.parse(text)
    assert str(problem) == text
    assert Problem.parse(str(problem)) == problem
    assert hash(Problem.parse(text)) == hash(problem)
    assert problem.is_fused
    plain = problem.with_(prologue="", stats=False, epilogue="")
    assert not plain.is_fused
    assert plain != problem


def test_fields_take_text():
    texts: dict[str, Any] = {"prologue": "x+scale+bias+relu", "epilogue": "+bias+keep+relu", "stats": True}
    made = Problem.parse(f"fprop {BASE} f16 nhwc").with_(**texts)
    assert made == Problem.parse(EVERYTHING)
    assert made == made.with_(prologue="+scale+bias+relu")
    assert made.fusion == "x+scale+bias+relu +bias+keep+relu stats"


@pytest.mark.parametrize(
    "text, words",
    [
        (f"dgrad {BASE} x+relu", ["prologue of a dgrad is x+relu", "none"]),
        (f"fprop {BASE} x+residual", ["x+residual", "t.residual", "a value per channel"]),
        (f"fprop {BASE} x+mul(s.a)", ["s.a", "c.a"]),
        (f"fprop {BASE} x+bias+keep", ["prologue is x+bias+keep", "one result"]),
        (f"fprop {BASE} i8 x+relu", ["dtype is i8", "f64, f32, f16, bf16"]),
        (f"fprop {BASE} complex64 x+scale", ["complex64"]),
        (f"wgrad {BASE} stats", ["stats is wgrad", "fprop"]),
        (f"fprop {BASE} i8*i8>i32 stats", ["i32", "f64, f32, f16, bf16"]),
        (f"wgrad {BASE} +keep", ["epilogue of a wgrad", "+keep"]),
        (f"fprop {BASE} x+relu x+relu", ["prologue twice"]),
        (f"fprop {BASE} stats stats", ["stats twice"]),
        (f"fprop {BASE} x+nope", ["nope"]),
    ],
)
def test_a_problem_says_what_is_wrong(text, words):
    with pytest.raises(ValueError) as error:
        Problem.parse(text)
    for word in words:
        assert word in str(error.value)
    with pytest.raises(ValueError, match="stats is 1; wanted True or False"):
        Problem.parse(f"fprop {BASE}").with_(stats=1)


def test_what_is_fused_counts():
    plain, problem = Problem.parse(f"fprop {BASE} f16 nhwc +bias+relu"), Problem.parse(EVERYTHING)
    x, y = 2 * 6 * 7 * 5, 2 * 4 * 7 * 5
    assert problem.flops == plain.flops + 3 * x + 3 * y
    assert problem.min_bytes == plain.min_bytes + 4 * 2 * 6 + 2 * y + 8 * 4


# -- plans -----------------------------------------------------------------------------------------------------------

FUSED = (
    EVERYTHING,
    f"fprop {BASE} f32 nchw x+scale+bias+relu",
    f"fprop {BASE} bf16 nhwc x+bias stats",
    f"fprop {BASE} f64 nchw x+relu +bias+keep+relu stats",
    f"fprop {BASE} f32 nhwc +keep+residual+relu",
    f"fprop {BASE} f32 nchw +keep",
    f"fprop {BASE} f16 nchw +bias+relu stats",
    f"fprop {BASE} i8*i8>i32 nchw +keep+relu",
    f"fprop {BASE} complex64 nchw +bias+keep+mul(2)",
    f"fprop {BASE} g2 f16 nhwc x+scale +=mul(acc,sigmoid(acc))+keep(add(acc,c.bias)) stats",
    f"wgrad {BASE} stride2 f16 nhwc x+scale+bias+relu",
    f"wgrad {BASE} f32 nchw x+bias",
    f"dgrad {BASE} bf16 nchw +bias+keep+gelu",
    "fprop n2 c3 w9 k5 s4 pad2:1 f32 nchw x+bias+relu +keep+bias stats",
    "fprop n1 c3 d4 h5 w3 k2 t2 r3 s3 pad1 f32 nhwc x+scale+relu stats",
)


def results_of(problem: Problem, made) -> list[torch.Tensor]:
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    assert len(results) == 1 + len(problem.epilogue.also) + 2 * problem.stats
    for result in results[: 1 + len(problem.epilogue.also)]:
        assert result.dtype == DTYPES[problem.result_dtype]
        assert tuple(result.shape) == problem.result_shape
        assert in_layout(result, problem.layouts[problem.result])
    assert len({result.data_ptr() for result in results}) == len(results)
    if problem.stats:
        for result in results[-2:]:
            assert result.shape == (problem.k,)
            assert result.dtype == (torch.float64 if problem.result_dtype == "f64" else torch.float32)
    return results


@pytest.mark.parametrize("text", FUSED)
def test_the_cpu_computes_it(text):
    problem = Problem.parse(text)
    inputs = random_inputs(problem)
    plan = plan_for(problem, here(), Policy())
    assert plan.candidate is not None
    made = plan(inputs.a, inputs.b, inputs.operands)
    results_of(problem, made)
    assert error_of(problem, made, inputs) <= allowed_error(problem, plan.candidate.traits)
    assert not plan.core.is_fused
    assert plan.lean is None
    assert plan.steps == steps_of(problem, here(), plan.candidate)


def test_the_reference_sees_what_is_wrong():
    problem = Problem.parse(EVERYTHING)
    inputs = random_inputs(problem)
    reference = Reference(problem, inputs)
    y, kept, total, squares = made = plan_for(problem, here(), Policy())(inputs.a, inputs.b, inputs.operands)
    right = reference.error(made)
    for wrong in ((kept, y, total, squares), (y, kept, total + 1, squares), (y, kept, squares, total)):
        assert reference.error(wrong) > 10 * right


def test_padding_is_zero_behind_the_prologue():
    problem = Problem.parse("fprop n1 c1 w2 k1 s3 pad1 f32 nchw x+bias")
    made = plan_for(problem, here(), Policy())(torch.zeros(1, 1, 2), torch.ones(1, 1, 3), (torch.ones(1),))
    assert made.flatten().tolist() == [2.0, 2.0]


def test_operands_come_in_the_order_of_prologue_and_epilogue():
    problem = Problem.parse("fprop n1 c1 w1 k1 s1 f32 nchw x+bias +bias")
    one = torch.ones(1, 1, 1)
    made = plan_for(problem, here(), Policy())(one, 10 * one, (torch.tensor([2.0]), torch.tensor([7.0])))
    assert made.item() == (1 + 2) * 10 + 7


def test_a_prologue_is_rounded_to_the_dtype_of_x():
    problem = Problem.parse("fprop n1 c1 w1 k1 s1 f16*f16>f32 nchw x+scale")
    x, w, scale = torch.full((1, 1, 1), 1.5).half(), torch.ones(1, 1, 1).half(), torch.tensor([1 + 2.0**-20])
    made = plan_for(problem, here(), Policy())(x, w, (scale,))
    assert made.item() == 1.5
    assert all_expected(problem, Inputs(x, w, (scale,)))[0].item() == 1.5


def test_an_empty_problem_has_all_its_results():
    problem = Problem.parse("fprop n0 c3 h5 w5 k4 r3 s3 f32 nchw x+scale +bias+keep+relu stats")
    inputs = random_inputs(problem)
    results = plan_for(problem, here(), Policy())(inputs.a, inputs.b, inputs.operands)
    assert [tuple(result.shape) for result in results] == [(0, 4, 3, 3), (0, 4, 3, 3), (4,), (4,)]
    assert all(result.eq(0).all() for result in results[2:])
    empty_sum = Problem.parse("fprop n1 c0 h2 w2 k3 r1 s1 f32 nchw +bias+keep+relu stats")
    bias = torch.tensor([1.0, -2.0, 3.0])
    y, kept, total, squares = plan_for(empty_sum, here(), Policy())(
        torch.zeros(1, 0, 2, 2), torch.zeros(3, 0, 1, 1), (bias,)
    )
    assert kept[0, :, 0, 0].tolist() == bias.tolist()
    assert torch.equal(total, statistics(y)[0])
    assert squares.tolist() == [4.0, 0.0, 36.0]


def test_steps_name_what_torch_computes():
    problem = Problem.parse(f"fprop {BASE} f32 nchw x+scale+bias+relu +bias+keep+relu stats")
    steps = plan_for(problem, here(), Policy()).steps
    assert steps[0] == "compute x+scale+bias+relu with torch"
    assert steps[-2:] == (
        "evaluate +bias+keep+relu with torch",
        "add up y and its squares, channel by channel, with torch",
    )


def test_engines_refuse_what_they_do_not_fuse():
    problem, device = Problem.parse(EVERYTHING), device_for("sm_90a")
    _, refused = rank(problem, device, Policy(tuning="off"))
    reasons = {refusal.engine.name: refusal.reasons[0] for refusal in refused}
    wanted = (
        "'x+scale+bias+relu +bias+keep+relu stats' is fused; it computes neither a prologue nor other results than one"
    )
    assert reasons["cuda.naive"] == wanted
    able = any(engine.takes_fusion for engine in engines("cuda"))
    assert lower(problem, device).is_fused == able
    assert not lower(problem, device, Policy(engine="cuda.naive")).is_fused
    assert not lower(problem, here()).is_fused
    wide = problem.with_(dtypes="f64")
    assert lower(wide, device) == wide.with_(prologue="", epilogue="", stats=False)


def test_a_candidate_of_another_engine_leaves_it_to_torch():
    problem = Problem.parse(f"fprop {BASE} f32 nchw x+scale stats")
    inputs = random_inputs(problem)
    for candidate in rank(lower(problem, here()), here(), Policy(tuning="off"))[0]:
        plan = make_plan(problem, here(), Policy(), candidate)
        made = plan(inputs.a, inputs.b, inputs.operands)
        assert error_of(problem, made, inputs) <= allowed_error(problem, candidate.traits)


@pytest.mark.parametrize("text", [t for t in FUSED if "stats" not in t])
@pytest.mark.parametrize("most", [1e9, 500])
def test_a_part_has_the_values_of_the_whole(text, most):
    problem = Problem.parse(text)
    inputs = random_inputs(problem)
    part = part_of(problem, most)
    some = all_expected(part.problem, part.inputs(inputs))
    for whole, each in zip(all_expected(problem, inputs), some, strict=True):
        torch.testing.assert_close(each, whole[part.result], rtol=1e-12, atol=1e-12)


def test_an_ordinary_problem_is_called_as_before():
    problem = Problem.parse(f"fprop {BASE} f32 nchw +bias+relu")
    assert not problem.is_fused
    inputs = random_inputs(problem)
    assert isinstance(plan_for(problem, here(), Policy())(inputs.a, inputs.b, inputs.operands), torch.Tensor)
    assert isinstance(problem.prologue.expr, Acc)
