"""cpu.gemm_1x1: filters of one tap, and filters that step by their own size, as plain matrix products."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cpu.gemm_1x1 import Gemm1x1
from openconv.problem import DIRECTIONS, Problem
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    accepts,
    candidates,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_knobs,
    check_locality,
    check_workspace_limits,
    make,
    problems,
    refusal,
)

ENGINE = Gemm1x1()
TAKEN = (
    "1x1", "1x1-stride", "1x1-groups", "1x1-1d", "1x1-3d", "pixel", "bias-1x1",
    "patches", "patches-cropped", "patches-3d",
)  # fmt: skip
MORE = (
    "n2 c6 h8 w9 k4 r2 s3 stride2,3 g2",  # patches in groups: nchw only
    "n3 c4 w17 k5 s4 stride4",  # patches of one axis, with a rest
    "n1 c1 h4 w4 k3 r2 s2 stride2",
    "n5 c6 h3 w3 k4 r1 s1 stride3",  # one pixel of each image is used
    "n4 c5 h6 w6 k5 r1 s1 g5",
)
BATCHES = (
    "n4 c64 w49 k80 s1",
    "n4 c48 h7 w7 k96 r1 s1",
    "n3 c640 h3 w3 k1024 r1 s1",
    "n5 c32 h14 w14 k24 r1 s1 stride2",
    "n4 c3 h32 w32 k40 r8 s8 stride8",
)
SIZED = "n3 c48 h16 w16 k32 r1 s1", "n3 c12 h24 w24 k32 r4 s4 stride4", "n3 c32 h22 w22 k24 r1 s1 stride2"


def taken(directions=DIRECTIONS, dtypes=("f32",), layouts=LAYOUTS):
    """All listed problems that the engine accepts; those in one group it must accept."""
    for text in (*(PROBLEMS[name] for name in TAKEN), *MORE):
        for direction in directions:
            for dtype in dtypes:
                for layout in layouts:
                    problem = make(text, direction, dtype, layout)
                    if problem.groups == 1 or accepts(ENGINE, problem):
                        yield problem


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, layout, dtype):
    for problem in taken([direction], [dtype], [layout]):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_all_knobs(direction, layout):
    for text in ("n3 c7 h5 w6 k8 r1 s1", "n3 c640 h2 w2 k1024 r1 s1", "n2 c3 h6 w8 k5 r2 s2 stride2"):
        check_knobs(ENGINE, make(text, direction, layout=layout))


@st.composite
def pointwise_or_patches(draw):
    problem = draw(problems(dtypes=("f32", "f64")))
    if draw(st.booleans()):
        return problem.with_(filter=1, padding=0)
    return problem.with_(
        stride=problem.filter, padding=0, dilation=1,
        spatial=tuple(max(size, taps) for size, taps in zip(problem.spatial, problem.filter, strict=True)),
    )  # fmt: skip


@given(pointwise_or_patches())
@settings(max_examples=60)
def test_right_on_random_problems(problem):
    if problem.groups == 1 or math.prod(problem.filter) == 1:
        assert accepts(ENGINE, problem)
    if accepts(ENGINE, problem):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize(
    "text, dtype, layout, words",
    [
        ("n1 c4 h5 w5 k4 r1 s1", "i32", "nchw", ["i32"]),
        ("n1 c4 h5 w5 k4 r1 s1", "f16*f16>f32", "nchw", ["f16, f16, f32"]),
        ("n1 c4 h5 w5 k4 r1 s1 pad0:1", "f32", "nchw", ["((0, 1), (0, 1))"]),
        ("n1 c4 h5 w5 k4 r3 s3", "f32", "nchw", ["(3, 3)", "(1, 1)"]),
        ("n1 c4 h9 w9 k4 r3 s3 stride3,2", "f32", "nchw", ["(3, 3)", "(3, 2)"]),
        ("n1 c4 h9 w9 k4 r2 s2 stride2 dil2", "f32", "nchw", ["(2, 2)"]),
        ("n1 c4 h8 w8 k4 r2 s2 stride2 g2", "f32", "nhwc", ["groups is 2"]),
    ],
)
def test_refusals_name_the_value_seen(text, dtype, layout, words):
    for direction in DIRECTIONS:
        sentences = refusal(ENGINE, make(text, direction, dtype, layout))
        for word in words:
            assert word in sentences


@given(problems(dtypes=("f32", "i8")))
def test_refuses_windows_that_overlap_or_leave_the_image(problem: Problem):
    if not refusal(ENGINE, problem):
        assert not any(low or high for low, high in problem.padding)
        assert math.prod(problem.filter) == 1 or problem.filter == problem.stride


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction, layout):
    for text in SIZED:
        check_hidden_memory(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_1x1_filter_needs_no_workspace(layout):
    for direction in DIRECTIONS:
        problem = make("n3 c64 h20 w20 k48 r1 s1", direction, layout=layout)
        assert next(candidates(ENGINE, problem)).workspace == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_is_kept(direction):
    for text in SIZED:
        for layout in LAYOUTS:
            check_workspace_limits(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time(direction, layout):
    for text in (*SIZED, *BATCHES):
        check_determinism(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", BATCHES)
def test_batch_invariant_where_it_is_asked_for(text, direction, layout):
    """A 1x1 conv1d that gave other bits in a batch of 4 than alone was a bug of serving systems."""
    assert check_batch_invariance(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for problem in taken([direction]):
        check_locality(ENGINE, problem, value=value)
