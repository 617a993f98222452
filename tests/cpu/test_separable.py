"""cpu.separable: which filters are a column times a row, and that two passes give the sums of one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import openconv
from openconv.autotune import shortlist
from openconv.cpu import separable
from openconv.cpu.filter2d import Filter2d
from openconv.cpu.separable import Separable, _compiled
from openconv.engine import engine_named
from openconv.plan import forget_plans
from openconv.problem import Problem
from openconv.select import Policy, choose, search
from tests.support import (
    assert_right,
    candidates,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_knobs,
    check_locality,
    check_plan,
    check_workspace_limits,
    make,
    reference,
    refusal,
    run_engine,
    sweep,
    tensors,
    this_device,
)

ENGINE = Separable()
PASSES = (
    "n1 c1 h30 w37 k1 r9 s9 pad4",
    "n2 c3 h29 w33 k3 r9 s11 pad4,5 g3",
    "n1 c2 h40 w31 k2 r11 s9 stride2,3 pad5:3,0 g2",
    "n2 c1 h45 w50 k1 r9 s10 pad4:7,9 dil2,3",
    "n1 c4 h26 w30 k4 r9 s9 pad4 g4 +bias",
    "n2 c16 h20 w24 k16 r2 s41 pad1,20 g16",
)


@pytest.fixture(autouse=True)
def _small_problems(monkeypatch):
    monkeypatch.setattr(separable, "_LEAST_MACS", 1)
    forget_plans()
    yield
    forget_plans()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(problem: Problem, seed: int = 0, integers: bool = False) -> Tensor:
    """Filters that are a column times a row, rounded to the problem's dtype."""
    (R, S), K = problem.filter, problem.k
    column, row = normal(K, R, 1, seed=seed), normal(K, 1, S, seed=seed + 1)
    if integers:
        column, row = (column * 2).round() + 0.0, (row * 2).round() + 0.0
        column[:, 0], row[:, :, 0] = 1, 1
    dtype = torch.float32 if problem.dtypes[1] == "f32" else torch.float64
    return (column * row).to(dtype).unsqueeze(1)


def found(w: Tensor) -> tuple[bool, np.ndarray, np.ndarray]:
    K, R, S = w.shape
    kind = np.float32 if w.dtype == torch.float32 else np.float64
    down, along = np.empty((K, R), kind), np.empty((K, S), kind)
    answer = _compiled("f32" if w.dtype == torch.float32 else "f64")(w.numpy(), down, along)
    return bool(answer), down, along


def gaussian(taps: int, sigma: float) -> Tensor:
    at = torch.arange(taps, dtype=torch.float64) - (taps - 1) / 2
    one = torch.exp(-at * at / (2 * sigma * sigma))
    return torch.outer(one / one.sum(), one / one.sum())


def binomial(taps: int) -> Tensor:
    return torch.tensor([float(math.comb(taps - 1, at)) for at in range(taps)], dtype=torch.float64)


# -- which filters ----------------------------------------------------------------------------------------------------


def test_products_are_found_and_their_factors_are_close():
    sparse = torch.outer(normal(9), normal(9, seed=1))
    sparse[2] = sparse[:, 5] = 0
    single = torch.zeros(9, 9, dtype=torch.float64)
    single[3, 7] = -0.3
    sobel = torch.outer(binomial(9), torch.tensor([1.0, 6, 14, 14, 0, -14, -14, -6, -1], dtype=torch.float64))
    for filter_ in (
        torch.full((9, 9), 1 / 81, dtype=torch.float64),
        gaussian(9, 2.0), gaussian(131, 21.0), gaussian(31, 1.0),
        gaussian(9, 2.0) * 1e-25, gaussian(9, 2.0) * -3e30,
        sobel, sobel.T / 4096, sparse, single, sparse[:, :4], torch.outer(normal(40), normal(3, seed=1)),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.float64):
            w = filter_.to(dtype)
            answer, down, along = found(w.unsqueeze(0).contiguous())
            assert answer, filter_
            assert np.abs(down).sum() <= 1
            off = (torch.outer(*(torch.tensor(v[0], dtype=torch.float64) for v in (down, along))) - w.double()).abs()
            unit, least = (2.0**-24, 2.0**-149) if dtype == torch.float32 else (2.0**-53, 1e-300)
            assert (off <= 9 * unit * w.double().abs() + least).all()


def test_other_filters_are_not():
    corner = torch.zeros(9, 9)
    corner[0, 0] = corner[8, 8] = 1
    hole = torch.ones(9, 9)
    hole[4, 4] = 0
    late = torch.outer(torch.arange(1.0, 10), torch.ones(9))
    late[8, 8] = 9.01
    whole = torch.outer(torch.tensor([3.0, 5, 7, 3, 5, 7, 3, 5, 7]), torch.full((9,), 3.0))
    whole[:, 4] = torch.tensor([3.0, 5, 7, 3, 5, 7, 3, 5, 7]) * 5  # 5/3 of each row: factors would be rounded
    endless = torch.ones(9, 9)
    endless[3, 3] = math.inf
    for filter_ in (
        normal(9, 9).float(), (gaussian(9, 2.0) + torch.eye(9) * 1e-3).float(), corner, hole, late, whole,
        torch.zeros(9, 9), endless, endless - endless, torch.full((9, 9), math.nan),
    ):  # fmt: skip
        assert not found(filter_.unsqueeze(0).contiguous())[0], filter_
    both = torch.stack([torch.ones(9, 9), normal(9, 9).float()])
    assert not found(both)[0], "one channel's filter is none"


def test_factors_of_whole_numbers_are_exact():
    for filter_ in (torch.outer(binomial(9), binomial(11)), torch.outer(binomial(9), binomial(9)) / 65536):
        answer, down, along = found(filter_.float().unsqueeze(0).contiguous())
        assert answer
        made = np.outer(down[0].astype(np.float64), along[0].astype(np.float64))
        assert np.array_equal(made, filter_.float().double().numpy())


# -- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", sweep(PASSES))
def test_two_passes_are_right(text, direction, dtype, layout):
    problem = make(text, direction, dtype, layout)
    a, _, operands = tensors(problem)
    for candidate in list(candidates(ENGINE, problem))[:6]:
        run = run_engine(ENGINE, problem, inputs=(a, product(problem), operands), candidate=candidate)
        assert_right(problem, run.out, run.a, run.b, run.operands, context=run.where)
        if problem.epilogue.is_identity:
            size = reference(problem, run.a.abs(), run.b.abs()).clamp(min=1e-300)
            share = ((run.out.double() - reference(problem, run.a, run.b)).abs() / size).max()
            assert share <= candidate.traits.error_bound
            if dtype == "f32":  # and it is no absurd claim
                assert share * 300 >= candidate.traits.error_bound


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", PASSES)
def test_whole_numbers_stay_exact(text, direction):
    problem = make(text, direction)
    a, _, operands = tensors(problem, integers=True)
    w = product(problem, integers=True)
    assert found(w.squeeze(1).contiguous())[0]
    run = run_engine(ENGINE, problem, inputs=(a, w, operands))
    assert_right(problem, run.out, a, w, operands, exact=True, context=run.where)


@pytest.mark.parametrize("text", PASSES)
def test_other_filters_run_as_they_would_without(text):
    """The same bits."""
    for direction in ("fprop", "dgrad"):
        problem = make(text.partition("+")[0], direction)
        for candidate in list(candidates(ENGINE, problem))[:5]:
            run = run_engine(ENGINE, problem, candidate=candidate)
            other = candidate.knobs.otherwise
            plain = run_engine(engine_named(other.engine), problem)
            assert str(plain.candidate.knobs) != str(other.knobs) or torch.equal(plain.out, run.out)
        check_engine(ENGINE, problem)


def test_it_looks_at_the_filter_of_each_call():
    problem = make(PASSES[0])
    plan = openconv.plan.plan_for(problem, this_device(), Policy(engine=ENGINE.name))
    x = tensors(problem)[0]
    for w in (product(problem), normal(*problem.w_shape).float(), product(problem, 5)):
        assert_right(problem, plan(x, w), x, w)


def test_every_setting_is_right():
    check_knobs(ENGINE, make(PASSES[1]))


def test_plans_are_right():
    for text in PASSES:
        for dtype in ("f32", "bf16", "complex64"):
            check_plan(make(text, dtype=dtype), engine=ENGINE.name, strided=True)


# -- what can be relied on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinity_and_nan_stay_where_they_belong(value):
    for text in PASSES[:4]:
        for direction in ("fprop", "dgrad"):
            problem = make(text, direction)
            check_locality(ENGINE, problem, value=value)
            a, _, _ = tensors(problem)
            w, marks = product(problem), torch.zeros_like(a)
            index = (0, 0, a.shape[2] // 2, a.shape[3] // 3)
            a[index], marks[index] = value, 1
            touched = reference(problem, marks, torch.ones_like(w)) > 0.5
            run = run_engine(ENGINE, problem, inputs=(a, w, ()))
            assert torch.equal(~torch.isfinite(run.out), touched), run.where


def test_same_bits_every_time_and_in_any_batch():
    for text in PASSES[:3]:
        check_determinism(ENGINE, make(text))
        for direction in ("fprop", "dgrad"):
            assert check_batch_invariance(ENGINE, make(text, direction).with_(n=4))
    problem = make(PASSES[1]).with_(n=4)
    a, _, _ = tensors(problem)
    w = product(problem)
    invariant = Policy(engine=ENGINE.name, batch_invariant=True)
    whole, one = (
        run_engine(ENGINE, p, inputs=(x, w, ()), candidate=choose(p, this_device(), invariant)).out
        for p, x in ((problem, a), (problem.with_(n=1), a[2:3].clone()))
    )
    assert torch.equal(whole[2:3], one)


def test_strict_accuracy_leaves_out_passes_that_are_no_plain_sums(monkeypatch):
    """As those of an FFT, which may be the quickest for long filters."""
    problem = make(PASSES[0])
    best = choose(problem, this_device(), Policy(engine=ENGINE.name))
    assert best.knobs.engines == ("cpu.filter2d",) * 3
    traits = Filter2d.traits

    def mixed(self, *given):
        return dataclasses.replace(traits(self, *given), plain_sum=False)

    monkeypatch.setattr(Filter2d, "traits", mixed)
    assert not choose(problem, this_device(), Policy(engine=ENGINE.name)).traits.plain_sum
    strict = choose(problem, this_device(), Policy(engine=ENGINE.name, accuracy="strict"))
    assert strict.traits.plain_sum
    assert "cpu.filter2d" not in strict.knobs.engines
    check_engine(ENGINE, problem, candidate=strict)


def test_a_limit_on_the_workspace_is_kept():
    for text in PASSES[:3]:
        check_workspace_limits(ENGINE, make(text))


def test_memory_is_bounded():
    """An image of floats and the factors, and what the engine takes that runs any other filter; matrix engines have
    been seen to unfold 131x131 windows into 68 GB."""
    problem = make("n1 c1 h1000 w1000 k1 r131 s131 pad65")
    chosen = choose(problem, this_device(), Policy(tuning="off"))
    assert chosen.engine.name == ENGINE.name
    assert chosen.workspace < 48 << 20


# -- choice -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, direction, words",
    [
        ("n1 c1 w300 k1 s101", "fprop", "rank is 1"),
        ("n1 c1 h30 w30 k1 r9 s9", "wgrad", "direction is wgrad"),
        ("n1 c3 h30 w30 k3 r9 s9", "fprop", "C, K and groups are 3, 3 and 1"),
        ("n1 c32 h30 w30 k32 r9 s9 g32", "fprop", "C, K and groups are 32, 32 and 32"),
        ("n1 c1 h30 w30 k1 r8 s9", "fprop", "filter is (8, 9); wanted at least 81"),
        ("n1 c1 h30 w300 k1 r1 s99", "fprop", "filter is (1, 99)"),
        ("n1 c1 h30 w30 k1 r9 s9 i32", "fprop", "dtypes are i32, i32, i32"),
    ],
)
def test_refusals_name_the_value_seen(text, direction, words):
    dtype = "i32" if text.endswith("i32") else "f32"
    assert words in refusal(ENGINE, make(text.removesuffix("i32"), direction, dtype))


def test_small_images_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(separable, "_LEAST_MACS", 1 << 22)
    assert "products are 39204; looking at the filter" in refusal(ENGINE, make("n1 c1 h30 w30 k1 r9 s9"))


def test_it_is_not_measured_on_random_numbers_unless_it_is_named():
    problem = make("n1 c1 h64 w64 k1 r11 s11 pad5")
    assert ENGINE.name not in {c.engine.name for c in search(problem, this_device(), Policy())}
    assert {c.engine.name for c in shortlist(search(problem, this_device(), Policy(engine=ENGINE.name)))} == {
        ENGINE.name
    }


def test_explain_tells_both_ways():
    told = openconv.explain(make("n1 c1 h400 w400 k1 r31 s31 pad15"))
    assert told.winner is not None
    assert told.winner.name == ENGINE.name
    assert "run cpu.separable: where the filter is a column times a row, 31x1 by cpu.filter2d [" in told.steps[-1]
    assert "then 1x31 by cpu.filter2d [" in told.steps[-1]
    assert "else cpu." in told.steps[-1]
    assert "if the filter is no column times a row" in told.winner.reasons[0]


def test_blur_of_an_image_by_the_usual_call():
    x = torch.rand(1, 3, 90, 80, generator=torch.Generator().manual_seed(3))
    w = gaussian(31, 5.0).float().expand(3, 1, 31, 31).contiguous()
    for image in (x, x.contiguous(memory_format=torch.channels_last)):
        out = openconv.conv2d(image, w, padding=15, groups=3, engine=ENGINE.name)
        torch.testing.assert_close(out, F.conv2d(x, w, padding=15, groups=3), atol=1e-6, rtol=1e-5)
