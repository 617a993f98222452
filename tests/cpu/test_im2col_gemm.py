"""cpu.im2col_gemm: panels of columns and a matrix product, in either layout, for any float problem."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from openconv.cpu.im2col_gemm import Im2colGemm
from openconv.problem import DIRECTIONS
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    accepts,
    candidates,
    cases,
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

ENGINE = Im2colGemm()
# Several panels in one image, several images in one panel, and a last panel that is smaller.
PANELS = (
    "n1 c12 h33 w31 k5 r3 s3 pad1",
    "n5 c6 h9 w10 k7 r3 s3 stride2 pad1:0",
    "n3 c8 h13 w12 k6 r3 s3 pad2 dil2 g2",
    "n2 c3 d6 h7 w8 k4 t3 r2 s3 pad1",
)
BATCHES = (
    "n4 c32 h14 w14 k48 r3 s3 pad1",
    "n5 c16 h7 w7 k33 r3 s3 stride2 pad1",
    "n4 c24 h12 w12 k24 r3 s3 pad1 g3",
    "n7 c40 w50 k33 s3",
    "n4 c64 h28 w28 k64 r3 s3 pad1",
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_on_every_problem(name, direction):
    for problem in cases([name], [direction], layouts=LAYOUTS):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_f64(direction, layout):
    for problem in cases(directions=[direction], dtypes=["f64"], layouts=[layout]):
        check_engine(ENGINE, problem, seed=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", PANELS)
def test_right_with_all_knobs(text, layout):
    for direction in DIRECTIONS:
        check_knobs(ENGINE, make(text, direction, layout=layout))


@given(problems(dtypes=("f32", "f64")))
@settings(max_examples=40)
def test_right_on_random_problems(problem):
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem)


@pytest.mark.parametrize("dtype", ["i8", "i32", "f16", "f16*f16>f32", "f32*f32>f64"])
def test_refuses_what_no_matrix_product_takes(dtype):
    text = refusal(ENGINE, make(PROBLEMS["3x3"], dtype=dtype))
    for name in dtype.replace(">", "*").split("*"):
        assert name in text


@given(problems(dtypes=("f32", "f64")))
def test_refuses_nothing_else(problem):
    assert refusal(ENGINE, problem) == ""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction, layout):
    check_hidden_memory(ENGINE, make("n3 c16 h28 w28 k24 r3 s3 pad1", direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_leads_to_smaller_panels(direction, layout):
    """Memory is bounded whatever the image: a 7x7 that took 10 GB has to run in what there is."""
    used = check_workspace_limits(ENGINE, make("n2 c8 h41 w40 k8 r5 s5 pad2", direction, layout=layout))
    assert len(set(used)) >= 3
    assert min(used) < used[0] / 8


def test_workspace_does_not_grow_with_the_image():
    small, large = (next(candidates(ENGINE, make(f"n1 c64 h{s} w{s} k64 r7 s7 pad3"))) for s in (256, 2048))
    assert large.workspace <= 2 * small.workspace


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time(direction, layout):
    for text in (PANELS[1], BATCHES[0]):
        check_determinism(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", BATCHES)
def test_batch_invariant_where_it_is_asked_for(text, direction, layout):
    assert check_batch_invariance(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for problem in cases(directions=[direction], layouts=["nchw", "nhwc"]):
        check_locality(ENGINE, problem, value=value)
