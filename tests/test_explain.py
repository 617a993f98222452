"""explain: every form of the question, the truth of the answer, and what it looks like."""

from __future__ import annotations

import importlib
import io
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import openconv
from openconv.engine import engines
from openconv.plan import device_of, plan_for
from openconv.reference import allowed_error, error_of, random_inputs

LINE = "fprop n2 c6 h9 w8 k4 r3 s3 pad1 f32 nchw"


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 6, 9, 8)


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(4, 6, 3, 3)


# -- the forms of the question ---------------------------------------------------------------------------------------


def test_a_problem_and_its_text_are_the_same_question():
    told = openconv.explain(LINE)
    assert told == openconv.explain(openconv.Problem.parse(LINE))
    assert str(told.problem) == LINE


def test_calls_modules_and_text_lead_to_the_same_problem(x, w):
    layer = torch.nn.Conv2d(6, 4, 3, padding=1, bias=False)
    asked = [
        openconv.explain(openconv.conv2d, x, w, padding=1),
        openconv.explain(F.conv2d, x, w, None, 1, 1),
        openconv.explain(torch.conv2d, x, w, padding="same"),
        openconv.explain(x, w, padding=1),
        openconv.explain(x.numpy(), w.numpy(), padding=(1, 1)),
        openconv.explain(x[0].expand(2, -1, -1, -1).contiguous(), w, padding=1),
        openconv.explain(layer, x),
        openconv.explain(openconv.nn.Conv2d(6, 4, 3, padding=1, bias=False), x),
    ]
    assert {str(told.problem) for told in asked} == {LINE}
    assert len({told.winner.name for told in asked if told.winner}) == 1


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_weight_tells_the_rank(rank):
    told = openconv.explain(torch.randn(1, 2, *[5] * rank), torch.randn(3, 2, *[2] * rank))
    assert told.problem.rank == rank
    assert told.problem.out == (4,) * rank


def test_a_transposed_convolution_is_a_dgrad(x):
    layer = torch.nn.ConvTranspose2d(6, 4, 3, stride=2)
    told = openconv.explain(layer, x, output_size=(20, 18))
    assert told.problem.direction == "dgrad"
    assert told.problem.result_shape == layer(x, output_size=(20, 18)).shape
    functional = openconv.explain(F.conv_transpose2d, x, layer.weight, layer.bias, stride=2, output_padding=1)
    assert functional.problem == told.problem


def test_unbatched_input_is_a_batch_of_one(x, w):
    assert openconv.explain(x[0], w).problem.n == 1


def test_meta_tensors_are_enough():
    told = openconv.explain(torch.empty(64, 512, 512, 512, device="meta"), torch.empty(8, 512, 3, 3, device="meta"))
    assert told.problem.n == 64
    assert told.device.kind == "cpu"


def test_another_pass_over_the_same_sizes(x, w):
    told = openconv.explain(x, w, torch.randn(4), padding=1, direction="wgrad")
    assert str(told.problem) == LINE.replace("fprop", "wgrad")


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("fprop n1",), ValueError, "lacks"),
        ((LINE, 3), TypeError, "no further arguments"),
        ((torch.nn.Linear(2, 2),), TypeError, "no convolution module"),
        ((torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)),), TypeError, "explain one of them: 0"),
        ((torch.nn.Conv2d(1, 1, 1),), TypeError, "input"),
        ((print,), TypeError, "conv1d to conv_transpose3d"),
        ((torch.ones(2, 2),), TypeError, "weight"),
        ((torch.ones(1, 2, 3, 3), torch.ones(4, 9, 1, 1)), RuntimeError, "channels"),
    ],
)
def test_errors_say_what_was_wanted(args, error, words):
    with pytest.raises(error, match=words):
        openconv.explain(*args)


def test_an_unknown_engine_or_direction_is_an_error():
    with pytest.raises(ValueError, match=r"no engine 'cpu\.magic'"):
        openconv.explain(LINE, engine="cpu.magic")
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        openconv.explain(LINE, direction="sideways")


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [LINE, "wgrad n2 c8 w30 k8 s4 pad3:0 g8 f16", "dgrad n1 c3 d4 h5 w6 k2 t1 r1 s1 f64"])
def test_the_answer_is_what_the_plan_does(line):
    told = openconv.explain(line)
    plan = plan_for(told.problem, told.device, told.policy)
    assert plan.candidate is not None
    assert told.winner is not None
    assert (told.winner.name, told.winner.knobs) == (plan.candidate.engine.name, str(plan.candidate.knobs))
    assert told.core == plan.core
    assert told.steps == plan.steps


def test_every_engine_is_a_candidate_or_refuses_with_reasons():
    told = openconv.explain(LINE)
    named = [c.name for c in told.candidates] + [r.name for r in told.refusals]
    assert sorted(named) == sorted(e.name for e in engines() if e.device == "cpu")
    assert all(r.reasons for r in told.refusals)
    costs = [c.predicted for c in told.candidates]
    assert costs == sorted(costs)


def test_facts_follow_from_the_problem_and_the_device():
    told = openconv.explain("fprop n8 c64 h56 w56 k64 r3 s3 pad1 f64 nchw")
    assert told.facts.flops == 2 * 8 * 64 * 56 * 56 * 64 * 9
    assert told.facts.bound == "arithmetic"
    assert told.facts.floor == pytest.approx(told.facts.flops / (told.device.flops / 2))
    filter_ = openconv.explain("fprop n1 c1 h1024 w2048 k1 r3 s3 pad1")
    assert filter_.facts.bound == "memory"
    assert filter_.facts.floor == pytest.approx(filter_.problem.min_bytes / filter_.device.bandwidth)
    assert filter_.winner is not None
    assert filter_.winner.roofline == pytest.approx(filter_.facts.floor / filter_.winner.predicted)


def test_limits_narrow_the_candidates():
    line = "fprop n4 c8 h6 w6 k8 r1 s1 f32 nhwc"
    free, tight = openconv.explain(line), openconv.explain(line, max_workspace=0)
    assert any(c.workspace for c in free.candidates)
    assert tight.candidates
    assert not any(c.workspace for c in tight.candidates)
    alone = openconv.explain(line, batch_invariant=True)
    assert not all(c.batch_invariant for c in free.candidates)
    assert alone.candidates
    assert all(c.batch_invariant for c in alone.candidates)


def test_a_forced_engine_wins_or_nothing_does():
    told = openconv.explain(LINE, engine="cpu.naive")
    assert [c.name for c in told.candidates] == ["cpu.naive"]
    assert "engine=cpu.naive" in told.why
    refused = openconv.explain(LINE, engine="cpu.gemm_1x1")
    assert refused.winner is None
    assert "padding" in " ".join(next(r.reasons for r in refused.refusals if r.name == "cpu.gemm_1x1"))
    assert "nothing" in str(refused)


def test_the_policy_in_force_and_the_module_count(x):
    with openconv.policy(engine="cpu.naive"):
        assert openconv.explain(LINE).winner.name == "cpu.naive"  # type: ignore[union-attr]
    layer = openconv.nn.Conv2d(6, 4, 3, padding=1, engine="cpu.im2col_gemm")
    assert openconv.explain(layer, x).winner.name == "cpu.im2col_gemm"  # type: ignore[union-attr]
    assert openconv.explain(layer, x, engine="cpu.naive").winner.name == "cpu.naive"  # type: ignore[union-attr]


def test_an_empty_problem_needs_no_engine():
    told = openconv.explain("fprop n0 c6 h9 w8 k4 r3 s3")
    assert told.winner is None
    assert told.steps == ("no products: fill with zeros",)
    assert "nothing to multiply" in str(told)


def test_a_device_without_engines_is_told_so():
    told = openconv.explain(LINE, device=openconv.explain(LINE).device.__class__(kind="abacus", name="beads"))
    assert told.winner is None
    assert told.why == "no engine runs on abacus"


# -- copies ----------------------------------------------------------------------------------------------------------

_VIEWS = {
    "plain": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("w_view", _VIEWS)
@pytest.mark.parametrize("x_view", _VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_copy_is_a_step_and_every_copy_step_is_a_copy(x, w, x_view, w_view, dtype, monkeypatch):
    plan_module: Any = importlib.import_module("openconv.plan")
    x, w = _VIEWS[x_view](x.to(dtype)), _VIEWS[w_view](w.to(dtype))
    told = openconv.explain(x, w, padding=1)
    copied: list[torch.Size] = []
    real = plan_module.to_layout

    def spying(tensor: torch.Tensor, layout: str) -> torch.Tensor:
        made = real(tensor, layout)
        if made.data_ptr() != tensor.data_ptr():
            copied.append(tensor.shape)
        return made

    monkeypatch.setattr(plan_module, "to_layout", spying)
    plan_for(told.problem, told.device, told.policy)(x, w)
    said = [name for name in "xw" if any(step.startswith(f"copy {name} ") for step in told.steps)]
    assert said == [name for name, tensor in (("x", x), ("w", w)) if tensor.shape in copied], told.steps


def test_what_happens_outside_of_the_plan_is_told(x, w):
    told = openconv.explain(torch.nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), x)
    assert told.steps[0] == "pad x by [1, 1, 1, 1] (circular) with torch, 2x6x9x8 to 2x6x11x10"
    assert told.problem.spatial == (11, 10)
    strided = openconv.explain(x.numpy()[..., ::2], w.numpy())
    assert strided.steps[0].startswith("copy input: the array")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = openconv.explain(x, w)
    assert cast.steps[:2] == ("autocast x f32 to bf16", "autocast w f32 to bf16")
    assert cast.problem.dtypes == ("bf16",) * 3
    extra = openconv.explain(
        F.conv_transpose1d, torch.randn(1, 2, 5), torch.randn(2, 3, 3), dilation=3, output_padding=2
    )
    assert any(step.startswith("append zeros to the input, 1x2x5 to 1x2x7") for step in extra.steps)


def test_an_activation_stays_outside_where_a_gradient_is_wanted(x, w):
    assert "+relu" in str(openconv.explain(x, w, activation="relu").problem)
    told = openconv.explain(x, w.requires_grad_(), activation="relu")
    assert "+relu" not in str(told.problem)
    assert "+relu with torch, outside of the operator" in told.steps[-1]


# -- measuring -------------------------------------------------------------------------------------------------------


def test_measuring_runs_every_candidate_and_checks_it():
    told = openconv.explain(LINE + " +bias+relu", measure=True, budget=0.05)
    assert all(c.measured is not None and c.measured > 0 for c in told.candidates)
    assert all(c.error is not None and 0 < c.error <= c.error_bound for c in told.candidates)
    assert told.fastest is not None
    assert told.winner is not None
    assert told.winner.roofline == pytest.approx(told.facts.floor / told.winner.measured)  # type: ignore[operator]
    assert openconv.explain(LINE).fastest is None


def test_measuring_leaves_out_what_would_take_too_long():
    told = openconv.explain("fprop n8 c64 h56 w56 k64 r3 s3 pad1", measure=True, budget=0.05)
    naive = next(c for c in told.candidates if c.name == "cpu.naive")
    assert naive.measured is None
    assert "not run: predicted" in naive.note


def test_a_wrong_result_is_beyond_the_bound():
    problem = openconv.Problem.parse(LINE)
    inputs = random_inputs(problem)
    plan = plan_for(problem, device_of(torch.device("cpu")), openconv.Policy(engine="cpu.im2col_gemm"))
    assert plan.candidate is not None
    result = plan(inputs.a, inputs.b)
    assert error_of(problem, result, inputs) <= allowed_error(problem, plan.candidate.traits)
    result.flatten()[-1] += 1e-2
    assert error_of(problem, result, inputs) > allowed_error(problem, plan.candidate.traits)
    result.flatten()[-1] = math.nan
    assert error_of(problem, result, inputs) == math.inf


# -- as text ---------------------------------------------------------------------------------------------------------


def test_json_holds_all_of_it():
    told = openconv.explain(LINE, measure=True, budget=0.01, max_workspace=1 << 20)
    data = json.loads(json.dumps(told.to_dict()))
    assert data["problem"] == LINE
    assert data["winner"] == data["candidates"][0]["name"]
    assert data["policy"]["max_workspace"] == 1 << 20
    assert data["facts"]["gemm"] == {"m": 144, "n": 4, "k": 54, "batch": 1}
    assert {"predicted", "measured", "workspace", "accumulator", "error_bound", "source"} <= set(data["candidates"][0])


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_prints_at_any_width(width):
    told = openconv.explain(LINE + " +bias", measure=True, budget=0.01)
    console = Console(file=io.StringIO(), width=width)
    console.print(told)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name in [c.name for c in told.candidates] + [r.name for r in told.refusals]:
        assert name in text
    assert max(map(len, text.splitlines())) <= width


def test_plain_text_has_no_escapes_and_names_the_file():
    text = str(openconv.explain(LINE))
    assert "\x1b" not in text
    assert LINE in text
    assert "openconv/cpu/" in text.replace("\\", "/")
    assert "refused" in text
    assert np.all([len(line) <= 120 for line in text.splitlines()])


def test_text_is_text_in_a_notebook_too(monkeypatch):
    """There rich shows at once what is printed to a console; str() came back empty, with the answer above it."""
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    assert LINE in str(openconv.explain(LINE))
    assert not shown
