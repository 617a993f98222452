"""cuda.naive: the definition on a GPU, checked on the CPU."""

from __future__ import annotations

import math

import pytest

from openconv.cuda.naive import Naive
from openconv.problem import DIRECTIONS, Problem
from tests.support import (
    EPILOGUES,
    LAYOUTS,
    PROBLEMS,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_locality,
    check_plan,
    make,
    refusal,
)

ENGINE = Naive()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_right(name, direction):
    for layout in LAYOUTS[:2] if " h" in PROBLEMS[name] else LAYOUTS[:1]:
        check_engine(ENGINE, make(PROBLEMS[name], direction, "f32", layout))


@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16", "i8", "u8", "i16", "i32", "i64", "i8*i8>i32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_dtype_is_right(direction, dtype):
    if ">" in dtype and direction != "fprop":
        pytest.skip("i8 to i32 is a forward pass")
    check_engine(ENGINE, make(PROBLEMS["stride-and-dilation"], direction, dtype, "nhwc"))


@pytest.mark.parametrize("layout", LAYOUTS[2:])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_filter_may_have_a_layout_of_its_own(direction, layout):
    check_plan(make(PROBLEMS["groups-stride"], direction, "f32", layout), engine=ENGINE.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "epilogue"), [*(("f32", text) for text in EPILOGUES), ("f16", EPILOGUES[1]), ("f64", EPILOGUES[1])]
)
def test_every_epilogue_is_part_of_the_kernel(dtype, epilogue):
    for direction in ("fprop", "dgrad"):
        for layout in LAYOUTS[:2]:
            problem = Problem.parse(f"{direction} {PROBLEMS['asymmetric']} {dtype} {layout} {epilogue}")
            check_plan(problem, engine=ENGINE.name)
            check_plan(problem, engine=ENGINE.name, strided=True)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "complex32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_complex_numbers_are_taken_apart(direction, dtype):
    check_plan(make(PROBLEMS["stride"], direction, dtype), engine=ENGINE.name)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinities_and_nans_stay_where_they_belong(direction):
    for value in (math.inf, math.nan):
        check_locality(ENGINE, make(PROBLEMS["dilation"], direction), value=value)


def test_the_same_bits_each_time_and_in_any_batch():
    check_determinism(ENGINE, make(PROBLEMS["groups"], "wgrad", "f16"))
    assert check_batch_invariance(ENGINE, make(PROBLEMS["batch"]))


def test_fp8_is_refused():
    assert "dtype is e4m3" in refusal(ENGINE, Problem.parse("fprop n1 c4 h4 w4 k4 r1 s1 e4m3"))
