"""cpu.winograd: 3 and 5 taps by interpolation, all passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from openconv import functional, prepared
from openconv.cpu import winograd
from openconv.cpu.winograd import Winograd, WinogradKnobs
from openconv.engine import Engine, engine_named
from openconv.plan import make_plan
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import random_inputs
from openconv.select import Policy
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    accepts,
    check_batch_invariance,
    check_engine,
    check_hidden_memory,
    check_thread_independence,
    check_workspace_limits,
    make,
    problems,
    reference,
    refusal,
    this_device,
    with_knobs,
)

ENGINE = Winograd()
# Kernels are compiled for a number of tiles at a time; these have multiples of six.
TAKEN = (
    PROBLEMS["3x3"],
    "n1 c19 h9 w13 k37 r3 s3 pad0:2,3:1",  # channels that fill no vector
    "n2 c3 h4 w5 k3 r3 s3 pad5:4,6:3",  # padding beyond the filter: tiles that see nothing
    "n2 c32 h9 w16 k48 r3 s3 pad1",
    "n2 c8 h7 w10 k12 r3 s3 pad1 g2",
)
OTHERS = (
    "n3 c9 w29 k20 s3 pad1",
    "n1 c4 h9 w11 k3 r5 s5 pad2",
    "n2 c9 h12 w12 k9 r1 s3 pad0,1",
)
SIZED = "n2 c48 h24 w24 k40 r3 s3 pad1"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, layout):
    for text in TAKEN:
        check_engine(ENGINE, make(text, direction, "f32", layout))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_other_filters_and_types(direction):
    for text in OTHERS:
        check_engine(ENGINE, make(text, direction))
    check_engine(ENGINE, make("n2 c5 h7 w9 k6 r3 s3 pad1", direction, "f64"))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_adds_a_bias(layout):
    for text in ("n2 c3 h7 w9 k5 r3 s3 pad1 +bias", "n2 c8 h7 w10 k12 r3 s3 pad1 g2 +bias"):
        check_engine(ENGINE, make(text, "fprop", "f32", layout))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_every_transform_and_way(direction):
    """Several chunks of tiles, ranges of filters, runs of tiles; filters kept and on the fly."""
    problem = make("n2 c20 h9 w16 k70 r3 s3 pad1", direction)
    ways = [("runs", 128), ("runs", 5)] if direction == "wgrad" else [("kept", 6), ("fly", 6), ("fly", 96)]
    for m in (2, 4, 6):
        for way, tiles in ways if m == 4 else ways[:1]:
            check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, WinogradKnobs(m, way, tiles)))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_many_filters_are_made_when_they_come_again(layout, monkeypatch):
    """Those that would not fit a cache are transformed on the fly as long as it may be for one call; same bits."""
    monkeypatch.setattr(winograd, "FAR", 0)
    winograd._plan.cache_clear()
    problem = make("n3 c20 h9 w16 k70 r3 s3 pad1 g2", "fprop", "f32", layout)
    candidate = with_knobs(ENGINE, problem, WinogradKnobs(4, "kept", 6))
    kept, fly = (
        make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, WinogradKnobs(4, way, 6)))
        for way in ("kept", "fly")
    )
    check_engine(ENGINE, problem, candidate=candidate)
    inputs, before = random_inputs(problem), prepared.kept_bytes()
    results, sizes = [], []
    for _ in range(3):
        results.append(kept(inputs.a, inputs.b))
        sizes.append(prepared.kept_bytes() - before)
    assert sizes[0] == 0 < sizes[1] == sizes[2]
    assert all(torch.equal(y, fly(inputs.a, inputs.b)) for y in results)
    inputs.b.mul_(2)
    assert torch.equal(kept(inputs.a, inputs.b), 2 * results[0])
    winograd._plan.cache_clear()


@given(problems(directions=("fprop", "dgrad"), ranks=(2,), layouts=("nhwc",), groups=(1, 2)))
@settings(max_examples=15)
def test_right_on_random_problems(problem):
    """Any padding and size; what is drawn for the rest is replaced, so that kernels are few."""
    spatial = tuple(max(size, 3) for size in problem.spatial)
    problem = problem.with_(filter=3, stride=1, dilation=1, spatial=spatial, n=6)
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, WinogradKnobs(4, "fly", 96)))


@pytest.mark.parametrize("m", [2, 4, 6])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_claimed_error_holds_and_is_not_loose(direction, m):
    """On normal numbers, as a share of the largest sum of magnitudes: between a 3000th and all of the claim, which is
    for the worst of signs and of roundings."""
    problem = make("n2 c20 h9 w16 k70 r3 s3 pad1", direction)
    candidate = with_knobs(ENGINE, problem, WinogradKnobs(m, "runs" if direction == "wgrad" else "kept", 128))
    plan = make_plan(problem, this_device(), Policy(), candidate)
    inputs = random_inputs(problem)
    out = plan(inputs.a, inputs.b, inputs.operands)
    wanted = reference(problem, inputs.a, inputs.b)
    size = reference(problem, inputs.a.abs(), inputs.b.abs()).max()
    share = float((out.double() - wanted).abs().max() / size)
    assert 3e-4 * candidate.traits.error_bound < share <= candidate.traits.error_bound, share


@pytest.mark.parametrize(
    "text, dtype, words",
    [
        ("n1 c4 h5 w5 k4 r3 s3", "i32", ["i32"]),
        ("n1 c4 h5 w5 k4 r3 s3", "f16*f16>f32", ["f16, f16, f32"]),
        ("n1 c4 h5 w5 k4 r3 s3 stride2", "f32", ["stride is (2, 2)"]),
        ("n1 c4 h5 w5 k4 r3 s3 dil2", "f32", ["dilation is (2, 2)"]),
        ("n1 c4 h5 w5 k4 r1 s1", "f32", ["filter is (1, 1)"]),
        ("n1 c4 h9 w9 k4 r7 s7", "f32", ["filter is (7, 7)"]),
        ("n1 c4 d5 h5 w5 k4 t3 r3 s3", "f32", ["3 axes"]),
    ],
)
def test_refusals_name_the_value_seen(text, dtype, words):
    for direction in DIRECTIONS:
        sentences = refusal(ENGINE, make(text, direction, dtype))
        for word in words:
            assert word in sentences
    assert "layouts" in refusal(ENGINE, Problem.parse("fprop n1 c4 h5 w5 k4 r3 s3 f32 nchw*nchw>nhwc"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction, monkeypatch):
    def made(w, key, make, spare):
        make(spare)
        return spare

    monkeypatch.setattr(winograd, "prepared", made)  # what it keeps is in addition
    check_hidden_memory(ENGINE, make(SIZED, direction))


def test_a_limit_on_the_workspace_is_kept():
    for direction in ("dgrad", "wgrad"):
        used = check_workspace_limits(ENGINE, make(SIZED, direction))
        assert len(set(used)) > 1, "smaller blocks need less"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_with_any_number_of_threads(direction):
    check_thread_independence(ENGINE, make(SIZED, direction))
    problem = make("n1 c16 h9 w16 k64 r3 s3 pad1", direction)
    check_thread_independence(ENGINE, problem)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_batch_invariant(direction):
    assert check_batch_invariance(ENGINE, make("n6 c24 h8 w12 k40 r3 s3 pad1", direction))


def test_filters_are_kept_and_made_again_when_they_change():
    problem = make("n2 c32 h9 w16 k48 r3 s3 pad1", "fprop")
    candidate = with_knobs(ENGINE, problem, WinogradKnobs(4, "kept", 96))
    plan = make_plan(problem, this_device(), Policy(), candidate)
    inputs = random_inputs(problem)
    prepared.forget()
    try:
        first = [plan(inputs.a, inputs.b, ()) for _ in range(3)]
        assert prepared.kept_bytes() >= 36 * 32 * 48 * 4
        assert torch.equal(first[0], first[1])
        assert torch.equal(first[0], first[2])
        inputs.b.mul_(2)
        assert torch.equal(plan(inputs.a, inputs.b, ()), 2 * first[0])
    finally:
        prepared.forget()


def test_gradients_through_the_public_functions():
    x = torch.randn(2, 8, 9, 13, requires_grad=True)
    w = torch.randn(6, 8, 3, 3, requires_grad=True)
    functional.conv2d(x, w, padding=1, engine="cpu.winograd").square().sum().backward()
    dx, dw, x.grad, w.grad = x.grad, w.grad, None, None
    torch.nn.functional.conv2d(x, w, padding=1).square().sum().backward()
    torch.testing.assert_close(dx, x.grad, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(dw, w.grad, rtol=1e-4, atol=1e-2)


def test_predicts_to_win_where_it_should():
    """3x3 layers with many channels; lanes that stay empty cost as much as others."""
    device, im2col = this_device(), engine_named("cpu.im2col_gemm")

    def seconds(engine: Engine, problem: Problem) -> float:
        return engine.cost(problem, device, next(iter(engine.knobs(problem, device))))

    for direction in DIRECTIONS:
        many, few = (make(f"n1 {c} h56 w56 {k} r3 s3 pad1", direction) for c, k in (("c64", "k64"), ("c2", "k2")))
        assert seconds(ENGINE, many) < 0.7 * seconds(im2col, many)
        assert seconds(ENGINE, few) / few.macs > 10 * seconds(ENGINE, many) / many.macs
