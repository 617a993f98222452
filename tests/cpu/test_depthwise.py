"""cpu.depthwise: each channel by itself, in vectors of columns or of channels, any stride, dilation and multiplier."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from openconv.cpu import depthwise
from openconv.cpu.depthwise import Depthwise
from openconv.cpu.runtime import launch
from openconv.problem import DIRECTIONS
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    accepts,
    cases,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_knobs,
    check_locality,
    check_thread_independence,
    make,
    problems,
    refusal,
    sweep,
)

ENGINE = Depthwise()
# What the tiling meets: several strips and panels, tails of rows, columns and channels, phases of strides.
LAYERS = (
    "n2 c5 h19 w23 k5 r3 s3 pad1 g5",
    "n2 c17 h14 w14 k17 r3 s3 stride2 pad1 g17",
    "n1 c33 h9 w31 k33 r5 s5 pad2 g33",
    "n1 c3 h40 w37 k3 r7 s7 pad3 g3",
    "n1 c4 h21 w22 k4 r3 s3 stride3,2 pad2:1 g4",
    "n1 c4 h25 w26 k4 r3 s5 pad4 dil2 g4",
    "n2 c3 h17 w18 k3 r4 s4 stride2 pad1:3 dil3 g3",
    "n1 c6 h13 w15 k18 r3 s3 pad1 g6",
    "n1 c2 d7 h8 w9 k4 t3 r3 s3 stride2 pad1 g2",
    "n2 c20 w131 k20 s4 pad3:0 g20",
    "n1 c2 h5 w4 k2 r9 s8 pad5 g2",
)
# Rows of 7 and 14 pixels are blocks of 7, with padding on both sides of one block; in nchw several vectors of channels
# share a tile, and the last one has channels left over.
NARROW, NARROW_7X7 = "n2 c77 h7 w7 k77 r3 s3 pad1 g77", "n1 c84 h9 w14 k84 r7 s7 pad3 g84"
# Wider than a panel, and filters taller than the block of rows: both have been wrong.
LARGE = (
    "n1 c1 h2 w4 k1 r1 s1 pad0,0:1",  # small, but rows of y wider than those of x
    "n1 c1 h65 w279 k2 r10 s10 pad1",
    "n2 c3 h27 w131 k3 r11 s11 pad5 g3",
    "n1 c1 w30011 k1 s5 pad2",
    "n1 c2 h3 w4500 k2 r3 s3 pad1 g2",
    "n1 c1 h300 w3 k1 r31 s3 pad15",
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("at", sweep(range(len(LAYERS))))
def test_right_on_layers(at, direction):
    """In one layout each: every one is a kernel to compile."""
    problem = make(LAYERS[at], direction, layout=LAYOUTS[(at + DIRECTIONS.index(direction)) % 2])
    if accepts(ENGINE, problem):
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
@pytest.mark.parametrize(("text", "layout"), [(NARROW, "nchw"), (NARROW, "nhwc"), (NARROW_7X7, "nchw")])
def test_right_on_narrow_images(text, layout, direction):
    problem = make(text, direction, layout=layout)
    check_engine(ENGINE, problem)
    check_locality(ENGINE, problem)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shares_of_threads_that_never_come_are_done_by_others(direction, layout, monkeypatch):
    """OpenMP may grant fewer threads than asked for; each has a share of the tiles."""
    monkeypatch.setattr(depthwise, "launch", lambda work, args, threads: launch(work, args, 1))
    check_engine(ENGINE, make("n3 c37 h17 w18 k37 r3 s3 pad1 g37", direction, layout=layout), seed=2)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", LARGE)
def test_right_on_wide_images_and_large_filters(text, direction):
    check_engine(ENGINE, make(text, direction, dtype="f64" if direction == "dgrad" else "f32"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem_it_takes(direction):
    dtype = "f64" if direction == "dgrad" else "f32"
    taken = [p for p in cases(directions=[direction], dtypes=[dtype], layouts=LAYOUTS) if accepts(ENGINE, p)]
    assert len(taken) > 20
    for problem in taken[:: 1 if direction == "fprop" else 2]:
        check_engine(ENGINE, problem, seed=1)


@given(problems(dtypes=("f32", "f64")))
@settings(max_examples=45)
def test_right_on_random_problems(problem):
    depthwise = problem.with_(groups=problem.c, k=max(problem.k // problem.c, 1) * problem.c)
    if accepts(ENGINE, depthwise):
        check_engine(ENGINE, depthwise)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_right_with_all_knobs(direction, layout):
    for text in (LAYERS[0], LAYERS[3], LAYERS[7]):
        check_knobs(ENGINE, make(text, direction, layout=layout))


def test_refusals_name_what_was_seen():
    assert "C = 6" in refusal(ENGINE, make("n1 c6 h5 w5 k6 r3 s3 g3"))
    assert "i32" in refusal(ENGINE, make(LAYERS[0], dtype="i32"))
    assert "nhwc" in refusal(ENGINE, make(LAYERS[0], layout="nchw*nchw>nhwc"))
    assert refusal(ENGINE, make(LAYERS[0])) == ""


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction, layout):
    check_hidden_memory(ENGINE, make("n3 c48 h28 w28 k48 r3 s3 pad1 g48", direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time_with_any_threads_in_any_batch(direction, layout):
    problem = make("n3 c37 h17 w18 k37 r3 s3 pad1 g37", direction, layout=layout)
    check_determinism(ENGINE, problem)
    check_thread_independence(ENGINE, problem)
    if direction != "wgrad":
        assert check_batch_invariance(ENGINE, problem)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for layout in ("nchw", "nhwc"):
        for text in (LAYERS[0], LAYERS[1], LAYERS[5]):
            check_locality(ENGINE, make(text, direction, layout=layout), value=value)


def test_the_shared_list_has_depthwise_problems():
    assert any(accepts(ENGINE, make(text)) for text in PROBLEMS.values())
