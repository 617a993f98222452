"""Every CUDA engine against float64 on the GPU: problems, dtypes, layouts, epilogues, knobs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from openconv.cuda import patch_rows
from openconv.engine import engine_named, engines
from openconv.problem import DIRECTIONS, Problem
from openconv.select import Candidate
from tests.support import (
    EPILOGUES,
    LAYOUTS,
    PROBLEMS,
    accepts,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_knobs,
    check_locality,
    check_plan,
    check_workspace_limits,
    make,
    this_device,
)
from tests.test_fuzz import EXAMPLES, check_all_engines, fuzzed

ENGINES = [engine for engine in engines() if engine.device == "cuda"]
each_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
FLOATS = ("f32", "f16", "bf16", "f64")
FORWARD_ONLY = ("cuda.patch_rows", "cuda.patches")
# They take none of the shared problems, or too few: tests/gpu has a file for each.
OF_ITS_OWN = ("cuda.igemm_sm90", "cuda.pixels", "cuda.exchange", "cuda.fold_columns", "cuda.split")
# Kernels are compiled for each problem: tests in parts are shared out evenly between processes.
PARTS = 4
each_part = pytest.mark.parametrize("part", range(PARTS))


def sparse(engine) -> int:
    """Of so many problems one: each is a kernel to compile; the one takes nearly all, the other has many knobs."""
    return 6 if engine.name in ("cuda.igemm", "cuda.pad_channels") else 1


def taken(engine, names=tuple(PROBLEMS), directions=DIRECTIONS, dtypes=FLOATS, layouts=LAYOUTS):
    """What the engine accepts of the shared problems."""
    for name in names:
        for direction in directions:
            for dtype in dtypes:
                for layout in layouts if " h" in PROBLEMS[name] else layouts[:1]:
                    problem = make(PROBLEMS[name], direction, dtype, layout)
                    if accepts(engine, problem):
                        yield problem


@each_engine
@pytest.mark.parametrize("direction", DIRECTIONS)
@each_part
def test_every_problem_is_right(engine, direction, part):
    problems = list(taken(engine, directions=(direction,), layouts=LAYOUTS[:2]))
    assert problems or (direction != "fprop" and engine.name in FORWARD_ONLY) or engine.name in OF_ITS_OWN
    for problem in problems[part :: PARTS * sparse(engine)]:
        check_engine(engine, problem)


@each_engine
@pytest.mark.parametrize("direction", DIRECTIONS)
@each_part
def test_every_setting_of_its_knobs_is_right(engine, direction, part):
    # Every third: each setting is a kernel to compile.
    problems = list(taken(engine, directions=(direction,), dtypes=("f32", "f16"), layouts=LAYOUTS[:2]))
    for problem in problems[3 * part :: 3 * PARTS * sparse(engine) ** 2]:
        check_knobs(engine, problem)


@each_part
@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_blocks_that_share_copies_are_right(layout, part):
    engine = engine_named("cuda.patch_rows")
    for text in ("n9 c3 h80 w64 k200 r16 s16 stride16", "n3 c3 d5 h48 w80 k77 t2 r16 s16 stride2,16,16"):
        problem = make(text, "fprop", "f16", layout)
        tiles = list(patch_rows._tiles(problem))
        for tile in tiles[13 * part :: 13 * PARTS]:
            check_engine(engine, problem, candidate=Candidate(engine, tile, 0.0, 0, engine.traits(problem, tile)))


@each_engine
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_is_right(engine, epilogue):
    for problem in list(taken(engine, directions=("fprop", "dgrad"), dtypes=("f32", "f16"), layouts=LAYOUTS[:2]))[
        :: 7 * sparse(engine)
    ]:
        if problem.epilogue.is_identity:
            fused = Problem.parse(f"{problem} {epilogue}")
            if engine.name != "cuda.phases" or accepts(engine, fused):  # not where a phase has no taps
                check_plan(fused, engine=engine.name)


@each_engine
@each_part
def test_the_same_bits_each_time(engine, part):
    for problem in list(taken(engine, dtypes=("f16",)))[3 * part :: 3 * PARTS * sparse(engine) ** 2]:
        check_determinism(engine, problem)


@each_engine
def test_batches_and_limits(engine):
    for problem in list(taken(engine, directions=("fprop", "dgrad"), dtypes=("f32",)))[:: 4 * sparse(engine) ** 2]:
        check_batch_invariance(engine, problem)
        check_workspace_limits(engine, problem)


@each_engine
def test_infinities_and_nans_stay_where_they_belong(engine):
    problems = list(taken(engine, dtypes=("f32", "f16")))
    if problems and not engine.traits(problems[0], next(iter(engine.knobs(problems[0], this_device())))).plain_sum:
        pytest.skip("transforms spread what is not finite over their tiles")
    for problem in problems[:: 5 * sparse(engine) ** 2]:
        for value in (math.inf, math.nan):
            check_locality(engine, problem, value=value)


@each_part
@pytest.mark.parametrize("dtypes", [("f32",), ("f16", "bf16"), ("f64", "complex64"), ("i8", "i32", "i64")], ids=str)
def test_any_problem_is_right_on_every_engine(dtypes, part):
    @seed(part)
    @settings(max_examples=max(1, EXAMPLES // PARTS), database=None)
    @given(fuzzed(dtypes), st.integers(0, 999), st.booleans())
    def search(problem, data, strided):
        check_all_engines(problem, data, strided)

    search()
