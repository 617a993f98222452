"""cpu.fft: convolution by Fourier transforms of overlapping tiles."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings

from openconv.cpu.fft import Fft
from openconv.engine import UnsupportedProblem
from openconv.fft_passes import transform_filters
from openconv.fft_tiles import FftKnobs, Form
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import Inputs, Reference, allowed_error, random_inputs
from openconv.select import Policy, choose
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    Run,
    candidates,
    cases,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_knobs,
    check_plan,
    check_workspace_limits,
    core_of,
    make,
    problems,
    refusal,
    run_engine,
    this_device,
    threads,
    with_knobs,
)

ENGINE = Fft()
SIZED = (
    "n1 c4 w5000 k6 s300",
    "n2 c8 w2000 k8 s200 pad199:0 g8",
    "n2 c3 h50 w60 k5 r21 s15 pad10,7",
    "n2 c4 h40 w40 k8 r11 s13 stride2 pad6 g4",
    "n1 c2 d12 h11 w12 k3 t5 r5 s5",
)
# Tiles that cut everything: with every other stride, dilation and one-sided padding, in groups, on one to three axes.
CUT = (
    "n3 c4 w61 k6 s5 stride3 pad2:7 dil2 g2",
    "n2 c3 h23 w17 k3 r3 s4 stride1,2 pad0:4,3 dil2,1 g3",
    "n2 c4 h19 w16 k2 r4 s3 stride3,1 pad1:0 g2",
    "n2 c2 d9 h8 w7 k3 t3 r2 s3 stride2,1,1 pad1,0:2,2 dil1,2,1",
)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, layout, dtype):
    names = list(PROBLEMS)[:: 1 if (dtype, layout) == ("f32", "nchw") else 2]
    for problem in cases(names, [direction], [dtype], [layout]):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
@threads(1)  # the smallest blocks are thousands of calls, for each of which a team would wake
def test_right_with_all_knobs(direction):
    for text, layout in zip(SIZED, ("nchw", "nchw", "nhwc", "nchw", "nhwc"), strict=True):
        check_knobs(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("product", ["matrix", "pointwise"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", CUT)
def test_right_with_blocks_of_any_size(text, direction, product):
    problem = make(text, direction)
    least = next(ENGINE.knobs(problem, this_device())).tile
    reach = [(taps - 1) * dil for taps, dil in zip(problem.filter, problem.dilation, strict=True)]
    small = tuple((r + 2 * s + 1) // 2 * 2 for r, s in zip(reach, problem.stride, strict=True))
    odd = tuple(size + 1 if size > r + s else size for size, r, s in zip(small, reach, problem.stride, strict=True))
    outs = (problem.c if direction == "dgrad" else problem.k) // problem.groups
    blocks = ((1, 1, 1, 1, 1), (1, outs, 2, 3, 1), (problem.groups, outs, 1, 2, 4), (1, 1, problem.n, 99, 99))
    for tile in {least, small, odd}:
        for groups, channels, images, tiles, rows in blocks:
            knobs = FftKnobs(tile, product, groups, channels, images, tiles, rows, False)
            check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


@given(problems(dtypes=("f32", "f64")))
@settings(max_examples=60)
def test_right_on_random_problems(problem):
    check_engine(ENGINE, problem)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "complex64", "complex128"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_through_casts(direction, dtype):
    for name in ("3x3", "depthwise", "1d-long"):
        check_plan(make(PROBLEMS[name], direction, dtype), engine=ENGINE.name)


def test_refuses_integers_and_mixed_dtypes():
    for dtype, words in (("i32", "i32"), ("f16*f16>f32", "f16, f16, f32")):
        for direction in DIRECTIONS:
            assert words in refusal(ENGINE, make(PROBLEMS["3x3"], direction, dtype))


def test_refuses_what_is_empty():
    for text in ("n0 c2 w9 k2 s3", "n1 c0 w9 k2 s3", "n1 c2 w9 k0 s3", "n1 c2 w0 k2 s3 pad2"):
        problem = make(text)
        assert str(problem.x_shape) in refusal(ENGINE, problem)
        check_plan(problem)


def test_strict_accuracy_leaves_it_out():
    problem = make("n1 c1 w30000 k1 s9000")
    assert choose(problem, this_device(), Policy(tuning="off")).engine.name == ENGINE.name
    with pytest.raises(UnsupportedProblem, match="accuracy is strict"):
        choose(problem, this_device(), Policy(engine=ENGINE.name, accuracy="strict"))


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_error_bound_holds_and_is_no_more_than_a_hundred_times_too_large(direction, dtype):
    """Data without signs are the worst: their largest frequency is as large as the sum of all terms. The float64
    reference is off by about as much as transforms in f64 are: there the bound only holds."""
    for text in ("n1 c1 w500 k1 s7 pad3", "n2 c8 h40 w40 k8 r5 s5 pad2", "n1 c16 w3000 k16 s65 pad64:0 g16"):
        problem = make(text, direction, dtype)
        some = random_inputs(problem)
        inputs = Inputs(some.a.abs(), some.b.abs())
        run = run_engine(ENGINE, problem, inputs=(inputs.a, inputs.b, ()))
        error = Reference(problem, inputs).error(run.out, plain_sum=False)
        itself = problem.gemm.k * 2.0**-53  # that the reference may be off
        assert error <= allowed_error(problem, run.candidate.traits) + itself
        if dtype == "f32":
            assert error >= run.candidate.traits.error_bound / 100


def test_a_result_without_large_terms_errs_with_its_neighbours():
    """Where only the middle of a signal is loud, its quiet ends are compared with the loudest results."""
    problem = make("n1 c1 w4000 k1 s101 pad50")
    inputs = random_inputs(problem)
    inputs.a[..., :1900] *= 1e-9
    run = run_engine(ENGINE, problem, inputs=(inputs.a, inputs.b, ()))
    whole, allowed = Reference(problem, inputs), allowed_error(problem, run.candidate.traits)
    assert whole.error(run.out, plain_sum=False) <= allowed
    assert whole.error(run.out) > 100 * allowed


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time(direction):
    for text in ("n2 c3 h24 w30 k5 r7 s5 pad3,2", "n2 c8 w400 k8 s31 pad30:0 g8", "n1 c2 d7 h8 w9 k3 t3 r2 s3"):
        check_determinism(ENGINE, make(text, direction))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    "text", ["n4 c8 w900 k6 s65", "n5 c6 h20 w20 k6 r9 s9 pad4 g6", "n3 c8 h16 w18 k12 r7 s7 pad3"]
)
def test_batch_invariant_where_it_is_asked_for(text, direction):
    for layout in LAYOUTS[:2] if " h" in text else LAYOUTS[:1]:
        assert check_batch_invariance(ENGINE, make(text, direction, layout=layout))


def test_only_the_choice_for_one_image_promises_the_same_bits():
    """Of several settings that promise it, a batch and an image could choose different ones."""
    for n in (1, 4):
        for direction in ("fprop", "dgrad"):
            problem = make(f"n{n} c8 w900 k6 s65", direction)
            alone = [c.knobs for c in candidates(ENGINE, problem) if c.traits.batch_invariant]
            assert alone == [next(ENGINE.knobs(problem.with_(n=1), this_device()))]


# -- memory -----------------------------------------------------------------------------------------------------------


def _allocated(run: Run) -> int:
    """The most bytes that torch's allocator holds for a call at any time, those inside of its functions too."""
    run.call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run.call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no memory"
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert held == 0
    return most


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", SIZED)
def test_workspace_counts_all_the_memory_that_a_call_takes(text, direction):
    problem = make(text, direction)
    for candidate in candidates(ENGINE, problem):
        if candidate.workspace < 200_000:
            continue  # thousands of calls, and nothing to see beside their constants
        form = Form(core_of(problem), candidate.knobs)
        taken = form.own + _allocated(Run(ENGINE, problem, candidate=candidate))
        assert taken <= candidate.workspace, f"{taken} of {candidate.workspace}: [{candidate.knobs}]"
        assert taken >= candidate.workspace // 2


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_is_kept(direction):
    for text in SIZED:
        used = check_workspace_limits(ENGINE, make(text, direction))
        assert len(used) > 2
        assert used[-1] <= max(used[0] // 4, 100_000)


# -- filters ----------------------------------------------------------------------------------------------------------


def test_spectra_of_filters_are_those_of_the_spread_filter():
    problem = make("n1 c3 h20 w20 k4 r3 s2 pad1 dil2,3")
    w = random_inputs(problem).b
    spread = torch.zeros(4, 3, 5, 4)
    spread[:, :, ::2, ::3] = w
    for product in ("matrix", "pointwise"):
        knobs = replace(next(ENGINE.knobs(problem, this_device())), tile=(12, 10), product=product, channels=4, rows=5)
        form = Form(problem, knobs)
        cut, out = (torch.full((size,), torch.nan) for size in (12 * prod(form.tile), 24 * form.frequencies))
        made = transform_filters(w, form, cut, out)
        wanted = torch.fft.rfft2(spread, s=form.tile).conj().reshape(12, -1)
        torch.testing.assert_close(made if product == "pointwise" else made.t(), wanted)


def test_a_filter_with_one_tap_and_a_signal_of_one_sample():
    for text in ("n2 c3 w1 k4 s1", "n1 c1 h1 w1 k1 r1 s1 pad3", "n1 c2 w5 k2 s1 stride5 g2"):
        for direction in DIRECTIONS:
            check_engine(ENGINE, make(text, direction))


def test_a_long_signal_with_a_long_filter_is_right():
    problem = Problem.parse("fprop n1 c2 w60000 k2 s5000 pad4999:0 g2 f32 nchw")
    inputs = random_inputs(problem)
    run = run_engine(ENGINE, problem, inputs=(inputs.a, inputs.b, ()))
    whole = torch.nn.functional.conv1d(inputs.a[..., 40000:46000].double(), inputs.b.double(), groups=2)
    torch.testing.assert_close(run.out[..., 44999:46000].double(), whole, rtol=0, atol=2e-3)
