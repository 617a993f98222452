"""cpu.filter2d: few-channel filters of stride 1, held in registers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cpu.device import cpu_device
from openconv.cpu.filter2d import Filter2d, _row_taps
from openconv.problem import DIRECTIONS, Problem
from openconv.select import DEFAULT, choose
from tests.support import (
    PROBLEMS,
    accepts,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_knobs,
    check_locality,
    check_thread_independence,
    check_workspace_limits,
    make,
    problems,
    refusal,
)

ENGINE = Filter2d()
DEVICE = cpu_device(2)
TAKEN = (
    "3x3", "3x3-unpadded", "one-channel", "one-filter", "image-filter", "padding-beyond-filter", "tall", "row-filter",
    "1d-long",
    "groups", "depthwise", "depthwise-large", "depthwise-dilated", "depthwise-causal", "depthwise-1d-31",
    "bias-depthwise", "bias-1d", "dilation", "filter-beyond-image",
)  # fmt: skip
MORE = (
    # inside and border blocks in both directions, widths around multiples of a vector, the overlapping last one
    "n1 c1 h40 w96 k1 r3 s3 pad1",
    "n1 c1 h41 w97 k1 r3 s3 pad1",
    "n2 c1 h24 w131 k1 r5 s5 pad2",
    "n1 c1 h30 w80 k1 r7 s7",
    "n1 c2 h33 w70 k3 r4 s2 pad0:3,2:0",
    "n1 c3 h26 w65 k2 r2 s6 pad5:0,0:7",
    # more filter rows than one group: whole groups, and a rest row by row
    "n1 c1 h32 w64 k1 r15 s15 pad7",
    "n1 c1 h40 w50 k2 r11 s3 pad5,1",
    "n1 c1 h30 w40 k1 r23 s1 pad11,0",
    # dilated rows and columns
    "n1 c1 h50 w100 k1 r3 s3 pad4 dil4",
    "n1 c2 h30 w90 k2 r3 s5 pad1,8 dil1,4",
    # negative padding of the turned filter in a dgrad: more padding than the filter reaches
    "n1 c1 h20 w40 k1 r3 s3 pad5:4,7:6",
    # fewer rows or columns than a block
    "n3 c1 h3 w200 k1 r3 s3 pad1",
    "n3 c1 h200 w3 k1 r3 s3 pad1",
    "n2 c4 h1 w50 k4 r1 s5 pad0,2",
    # one axis, beyond one strip of a wgrad
    "n2 c2 w5000 k2 s5 pad2",
    "n1 c1 w200 k3 s3 pad1",
    "n1 c1 w4096 k1 s9 pad0:8 dil3",
)
SIZED = "n1 c1 h300 w500 k1 r5 s5 pad2", "n4 c6 h64 w64 k8 r3 s3 pad1 g2", "n2 c2 w60000 k2 s7 pad3"


def texts():
    return (*(PROBLEMS[name] for name in TAKEN), *MORE)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, dtype):
    for text in list(texts())[dtype == "f64" :: 2]:  # half of them in each: all are kernels to compile
        problem = make(text, direction, dtype)
        assert accepts(ENGINE, problem), refusal(ENGINE, problem)
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_all_knobs(direction):
    for text in ("n2 c2 h37 w75 k3 r3 s3 pad1", "n1 c1 h30 w61 k1 r11 s7 pad5,3", "n2 c1 w700 k1 s9"):
        check_knobs(ENGINE, make(text, direction))


@st.composite
def few_channels(draw):
    problem = draw(problems(ranks=(1, 2), dtypes=("f32", "f64"), layouts=("nchw", "nchw*nhwc>nchw"), max_taps=12))
    grown = tuple(size + draw(st.sampled_from((0, 0, 9, 40))) for size in problem.spatial)
    few = {name: problem.groups * min(16, getattr(problem, name) // problem.groups) for name in "ck"}
    return problem.with_(spatial=grown, stride=1, **few)


@given(few_channels())
@settings(max_examples=100)
def test_right_on_random_problems(problem):
    if problem.direction != "wgrad" or problem.layouts[1] == "nchw":
        assert accepts(ENGINE, problem), refusal(ENGINE, problem)
    if accepts(ENGINE, problem):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_channel_is_the_same_memory_in_both_layouts(direction):
    for layout in ("nhwc", "nhwc*nchw>nhwc"):
        check_engine(ENGINE, make("n2 c1 h20 w37 k1 r3 s5 pad1,2", direction, layout=layout))


@pytest.mark.parametrize(
    "text, dtype, layout, words",
    [
        ("n1 c1 d4 h5 w5 k1 t1 r3 s3", "f32", "nchw", ["rank is 3"]),
        ("n1 c1 h9 w9 k1 r3 s3 stride1,2", "f32", "nchw", ["(1, 2)"]),
        ("n1 c17 h9 w9 k1 r3 s3", "f32", "nchw", ["C/G is 17"]),
        ("n1 c4 h9 w9 k34 r3 s3 g2", "f32", "nchw", ["K/G is 17"]),
        ("n1 c2 h9 w9 k1 r3 s3", "f32", "nhwc", ["nhwc"]),
        ("n1 c1 h9 w9 k1 r3 s3", "f16", "nchw", []),
        ("n1 c1 h9 w9 k1 r3 s3", "i8", "nchw", ["i8"]),
    ],
)
def test_refusals_name_the_value_seen(text, dtype, layout, words):
    for direction in DIRECTIONS:
        sentences = refusal(ENGINE, make(text, direction, dtype, layout))
        for word in words:
            assert word in sentences


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction):
    for text in SIZED:
        problem = make(text, direction)
        check_hidden_memory(ENGINE, problem)
        check_workspace_limits(ENGINE, problem)


def test_the_workspace_of_a_wgrad_stays_small():
    """Partial sums grow with the image only up to 256 tiles a group: 256 * 9 weights * 8 bytes here."""
    for text in ("n1 c1 h4000 w4000 k1 r3 s3 pad1", "n60000 c1 h28 w28 k1 r3 s3 pad1"):
        problem = make(text, "wgrad")
        assert ENGINE.workspace_bytes(problem, DEVICE, next(iter(ENGINE.knobs(problem, DEVICE)))) <= 256 * 9 * 8


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time_and_on_any_number_of_threads(direction):
    for text in SIZED:
        problem = make(text, direction)
        check_determinism(ENGINE, problem)
        check_thread_independence(ENGINE, problem)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", ["n5 c1 h50 w60 k1 r3 s3 pad1", "n4 c3 h20 w33 k4 r5 s5 pad2", "n7 c2 w300 k2 s4"])
def test_batch_invariant(text, direction):
    assert check_batch_invariance(ENGINE, make(text, direction))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for text in texts():
        for seed in range(3):
            check_locality(ENGINE, make(text, direction), seed, value)


def test_a_nan_weight_shows_where_the_window_lies_on_padding():
    x, w = torch.ones(1, 1, 20, 40), torch.ones(1, 1, 3, 3)
    w[0, 0, 0, 0] = math.nan
    problem = make("n1 c1 h20 w40 k1 r3 s3 pad1")
    out = torch.empty(problem.y_shape)
    ENGINE.build(problem, DEVICE, next(iter(ENGINE.knobs(problem, DEVICE))))(x, w, out, None, None)
    assert out.isnan().all()


@given(st.integers(1, 60), st.integers(1, 3))
def test_filter_rows_are_taken_in_groups_of_up_to_seven(rows, dilation):
    taps = _row_taps(rows, dilation)
    assert 1 <= taps <= min(rows, 7)
    assert taps == 1 or dilation == 1
    assert taps == rows or rows > 7 or dilation > 1


def test_image_filters_are_not_left_to_a_matrix_product():
    """One channel is a depthwise problem as well; which of the two engines takes it is their costs' business."""
    for direction in DIRECTIONS:
        for taps in (3, 5, 7, 15):
            problem = Problem.parse(f"{direction} n1 c1 h1024 w2048 k1 r{taps} s{taps} pad{taps // 2}")
            assert choose(problem, DEVICE, DEFAULT).engine.name in (
                "cpu.filter2d",
                "cpu.depthwise",
                "cpu.separable",
                "cpu.fft",
            )


def test_a_long_padding_costs_more_than_the_same_results_without():
    """Vectors of nothing but masked lanes are loaded too: with 16000 causal taps they take most of the time."""
    padded = Problem.parse("wgrad n1 c1 w80000 k1 s16000 pad15999:0")
    bare = padded.with_(spatial=(95999,), padding=0)
    assert padded.out == bare.out
    costs = [ENGINE.cost(p, DEVICE, next(iter(ENGINE.knobs(p, DEVICE)))) for p in (padded, bare)]
    assert costs[0] > 1.5 * costs[1]
    short = Problem.parse("wgrad n1 c1 w80000 k1 s31 pad30:0")
    costs = [ENGINE.cost(p, DEVICE, next(iter(ENGINE.knobs(p, DEVICE)))) for p in (short, short.with_(padding=15))]
    assert costs[0] == costs[1]
