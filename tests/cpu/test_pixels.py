"""cpu.pixels: images in nchw, whose neighbouring pixels are vectors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cpu.pixels import Pixels
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

ENGINE = Pixels()
PASSES = "fprop", "dgrad"
TAKEN = "1x1", "1x1-stride", "1x1-groups", "1x1-1d", "1x1-3d", "pixel", "bias-1x1"
MORE = (
    "n5 c6 h3 w3 k4 r1 s1",  # vectors that belong to two images
    "n9 c3 h1 w2 k5 r1 s1",  # and to several
    "n3 c300 h5 w5 k7 r1 s1",  # several chunks of terms, added up in memory
    "n2 c520 h4 w8 k300 r1 s1",
    "n1 c40 h30 w31 k64 r1 s1",
    "n4 c64 h9 w7 k48 r1 s1 g4",
    "n3 c20 h9 w10 k33 r1 s1 stride2,3",
)
WINDOWS = (
    "n2 c3 h9 w24 k10 r3 s3 pad1",
    "n1 c40 h6 w19 k13 r3 s3 pad1",  # several chunks, which begin in the midst of a filter; vectors of two rows
    "n3 c2 h5 w3 k7 r3 s2 pad2:0,1",
    "n2 c4 h11 w21 k6 r5 s3 stride2,1 pad2,1 dil1,2 g2",
    "n2 c6 w40 k5 s7 pad3",
    "n1 c3 h8 w8 k4 r1 s1 pad1",
)
SIZED = (
    "n3 c48 h16 w16 k32 r1 s1",
    "n3 c12 h16 w16 k32 r3 s3 pad1",
    "n3 c32 h22 w22 k24 r1 s1 stride2",
    "n2 c300 h7 w7 k310 r1 s1",
)


def taken(directions=PASSES, dtypes=("f32",)):
    """All listed problems that the engine must accept."""
    for text in (*(PROBLEMS[name] for name in TAKEN), *MORE, *WINDOWS):
        for direction in directions:
            for dtype in dtypes:
                problem = make(text, direction, dtype, "nchw")
                if direction == "fprop" or (math.prod(problem.stride) == 1 and text not in WINDOWS):
                    assert accepts(ENGINE, problem)
                    yield problem


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("direction", PASSES)
def test_right_on_every_problem(direction, dtype):
    for problem in taken([direction], [dtype]):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", PASSES)
def test_right_with_all_knobs(direction):
    for text in ("n3 c7 h5 w6 k8 r1 s1", "n2 c270 h7 w7 k50 r1 s1", "n2 c3 h9 w16 k9 r3 s3 pad1"):
        if accepts(ENGINE, make(text, direction)):
            check_knobs(ENGINE, make(text, direction))


@st.composite
def planes(draw):
    problem = draw(problems(dtypes=("f32", "f64"))).with_(layouts=("nchw", "nchw", "nchw"))
    if problem.direction == "fprop" and draw(st.booleans()):
        return problem.with_(stride=(*problem.stride[:-1], 1))
    return problem.with_(filter=1, padding=0)


@given(planes())
@settings(max_examples=60)
def test_right_on_random_problems(problem):
    if accepts(ENGINE, problem):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize(
    "text, direction, dtype, layout, words",
    [
        ("n1 c4 h5 w5 k4 r1 s1", "fprop", "i32", "nchw", ["i32"]),
        ("n0 c4 h5 w5 k4 r1 s1", "dgrad", "f32", "nchw", ["empty"]),
        ("n1 c4 h5 w5 k4 r1 s1 pad0:1", "dgrad", "f32", "nchw", ["((0, 1), (0, 1))"]),
        ("n1 c4 h5 w5 k4 r3 s3", "dgrad", "f32", "nchw", ["(3, 3)"]),
        ("n1 c4 h9 w9 k4 r3 s3 stride1,2", "fprop", "f32", "nchw", ["(1, 2)"]),
        ("n1 c4 d5 h5 w5 k4 t2 r2 s2", "fprop", "f32", "nchw", ["rank is 3"]),
        ("n1 c4 h5 w5 k4 r1 s1", "fprop", "f32", "nhwc", ["nhwc"]),
        ("n1 c4 h5 w5 k4 r1 s1", "wgrad", "f32", "nchw", ["wgrad"]),
        ("n1 c4 h9 w9 k4 r1 s1 stride3,2", "dgrad", "f32", "nchw", ["(3, 2)"]),
    ],
)
def test_refusals_name_the_value_seen(text, direction, dtype, layout, words):
    sentences = refusal(ENGINE, make(text, direction, dtype, layout))
    for word in words:
        assert word in sentences


@pytest.mark.parametrize("direction", PASSES)
def test_memory_is_what_it_says(direction):
    for text in SIZED:
        problem = make(text, direction)
        if accepts(ENGINE, problem):
            check_hidden_memory(ENGINE, problem)
            check_workspace_limits(ENGINE, problem)


@pytest.mark.parametrize("direction", PASSES)
def test_bits_depend_on_nothing_but_the_numbers(direction):
    for text in SIZED:
        problem = make(text, direction)
        if accepts(ENGINE, problem):
            check_determinism(ENGINE, problem)
            check_thread_independence(ENGINE, problem)
            assert check_batch_invariance(ENGINE, problem)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinity_and_nan_stay_where_they_belong(value):
    for problem in taken():
        check_locality(ENGINE, problem, value=value)
