"""cpu.naive: the definition, which takes every problem and which everything else is compared with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from openconv import UnsupportedProblem
from openconv.cpu.naive import Naive
from openconv.problem import DIRECTIONS, DTYPE_BYTES, Problem
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    candidates,
    cases,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_locality,
    check_plan,
    check_thread_independence,
    make,
    problems,
    refusal,
    run_engine,
)

ENGINE = Naive()
SOME = ("3x3", "stride-and-dilation", "asymmetric", "groups", "depthwise-multiplier", "1d-stride", "3d-everything")
PARALLEL = "n3 c8 h9 w9 k8 r3 s3 pad1"  # products enough for several threads


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_on_every_problem(name, direction):
    for problem in cases([name], [direction], layouts=("nchw", "nhwc")):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SOME)
def test_right_in_every_layout(name, layout):
    for problem in cases([name], layouts=[layout]):
        check_engine(ENGINE, problem, seed=1)


@pytest.mark.parametrize("dtype", ["f64", "i64", "i32", "i16", "i8", "u8"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_every_dtype(direction, dtype):
    """Integer sums wrap around as their type does: the data use its whole range."""
    for problem in cases(SOME, [direction], dtypes=[dtype]):
        check_engine(ENGINE, problem)


def test_products_of_bytes_in_wider_sums():
    for direction, dtypes in (("fprop", "i8*i8>i32"), ("dgrad", "i32*i8>i8"), ("wgrad", "i8*i32>i8")):
        check_engine(ENGINE, make(PROBLEMS["3x3"], direction, dtypes))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_is_computed_or_refused_by_name(dtype):
    problem = make("n1 c3 h5 w6 k2 r3 s3", dtype=dtype)
    try:
        check_plan(problem, engine=ENGINE.name)
    except UnsupportedProblem as error:
        assert dtype in str(error)  # noqa: PT017


@given(problems(dtypes=("f32", "f64", "i8")))
def test_takes_everything_without_workspace(problem):
    assert refusal(ENGINE, problem) == ""
    assert [candidate.workspace for candidate in candidates(ENGINE, problem)] == [0]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_allocates_nothing(direction):
    check_hidden_memory(ENGINE, make("n2 c4 h40 w40 k4 r3 s3", direction))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time_and_with_any_number_of_threads(direction, layout):
    problem = make(PARALLEL, direction, layout=layout)
    check_determinism(ENGINE, problem)
    check_thread_independence(ENGINE, problem)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_batch_invariant(direction):
    for text in (PARALLEL, PROBLEMS["batch"], PROBLEMS["1x1-1d"]):
        assert check_batch_invariance(ENGINE, make(text, direction))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for problem in cases(directions=[direction]):
        check_locality(ENGINE, problem, value=value)


def test_an_infinite_weight_shows_on_the_padding_too():
    """0 * inf is NaN: every result of the filter has a product with the weight, padded or not."""
    problem = Problem.parse("fprop n1 c2 h4 w5 k3 r3 s3 pad1 f32 nchw")
    x, w = torch.ones(problem.x_shape), torch.ones(problem.w_shape)
    w[1, 0, 0, 0] = math.inf
    y = run_engine(ENGINE, problem, inputs=(x, w, ())).out
    assert y[0, 1, 1:, 1:].isinf().all()
    assert y[0, 1, 0].isnan().all()
    assert y[0, 1, :, 0].isnan().all()
    assert y[0, [0, 2]].isfinite().all()
