"""cuda.winograd on the GPU: layers of networks in every variant, chunks that end inside of images, what is fused."""

from __future__ import annotations

import pytest

from openconv.cuda.winograd import Chunk, Winograd
from openconv.problem import DIRECTIONS, Problem
from tests.support import LAYOUTS, check_engine, check_plan, make, this_device, with_knobs

ENGINE = Winograd()
LAYERS = (
    "n4 c64 h56 w56 k64 r3 s3 pad1",
    "n2 c96 h27 w29 k80 r3 s3 pad1",
    "n3 c33 h14 w13 k65 r3 s3",
    "n2 c32 h28 w28 k48 r5 s5 pad2",
    "n8 c64 w500 k96 s3 pad1",
    "n2 c24 h17 w40 k16 r1 s5 pad0,2",
)
each_pass = pytest.mark.parametrize("direction", DIRECTIONS)


def knobs(problem: Problem) -> list[Chunk]:
    """The first of each number of points, and small chunks whose ends are inside of images."""
    found = {each.points: each for each in reversed(list(ENGINE.knobs(problem, this_device())))}
    parts = 3 if problem.direction == "wgrad" else 1
    return [*found.values(), *(Chunk(points, 75, parts) for points in found)]


@each_pass
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_right(layer, direction):
    for dtype in ("f32", "f16"):
        for layout in LAYOUTS[:2]:
            problem = make(layer, direction, dtype, layout)
            for each in knobs(problem):
                check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, each))


@each_pass
def test_bf16_is_right(direction):
    for layout in LAYOUTS:
        problem = make(LAYERS[2], direction, "bf16", layout)
        for each in knobs(problem):
            check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, each))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("epilogue", ["+bias+relu", "+scale+residual+silu"])
def test_epilogues_are_right(epilogue, direction):
    for dtype, layout in (("f32", "nchw"), ("f16", "nhwc")):
        check_plan(Problem.parse(f"{direction} {LAYERS[1]} {dtype} {layout} {epilogue}"), engine=ENGINE.name)


def test_offsets_beyond_32_bits_are_right(monkeypatch):
    monkeypatch.setattr("openconv.cuda.winograd._Form.offset", "i64")
    for direction in DIRECTIONS:
        check_engine(ENGINE, make(LAYERS[1], direction, "f32", "nhwc"))
