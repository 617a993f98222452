"""Random problems for cuda.igemm and cuda.igemm_groups: passes, types, groups, layouts, epilogues, tiles.

The default is small. To search for long, in processes that share the compiling::

    OPENCONV_FUZZ=5000 python -m pytest tests/gpu/test_igemm_fuzz.py -n 14
"""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from openconv.cuda import igemm
from openconv.cuda.device import CudaDevice
from openconv.cuda.igemm import Igemm
from openconv.cuda.igemm_groups import IgemmGroups
from openconv.epilogue import IDENTITY, Epilogue
from openconv.problem import DIRECTIONS, LAYOUTS, PRECISIONS, Problem
from tests.support import accepts, candidates, check_engine, core_of, problems, this_device, with_knobs
from tests.test_fuzz import EXAMPLES

IGEMM, GROUPS = Igemm(), IgemmGroups()
PARTS = 28
# Factors and results.
TYPES = (
    "f16 f16", "f16 f16", "bf16 bf16", "f32 f32", "f32 f32", "f16 f32", "bf16 f32",
    "i8 i32", "i8 f32", "e4m3 f16", "e5m2 f32",
)  # fmt: skip
CHANNELS = ((16, 24), (64, 40), (32, 32), (8, 72), (33, 64), (64, 7))
# Exact on integers.
EXACT = ("+bias+relu", "+bias+residual+leaky_relu(0.25)", "+mul(c.a)+add(t.b)+clamp(-1,2)", "+max(s.floor)")
FUSED = tuple(Epilogue.parse(text) for text in ("", "", "+bias+relu", "+bias+residual+relu"))
# Few, so that problems share kernels.
SHAPES = {(64, 64), (32, 64), (64, 32), (96, 128), (128, 64)}


@st.composite
def multiplied(draw) -> Problem:
    """A problem of cuda.igemm, one time in two with channels that make whole vectors and steps."""
    factors, result = draw(st.sampled_from(TYPES)).split()
    directions = DIRECTIONS if factors[0] in "fb" else ("fprop",)
    problem = draw(problems(directions=directions, groups=(1, 1, 1, 2, 3, 8)))
    dtypes = [factors] * 3
    dtypes[problem.result] = result
    changes = {"dtypes": tuple(dtypes), "layouts": tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(3))}
    if draw(st.booleans()):
        c, k = draw(st.sampled_from(CHANNELS))
        groups = min(problem.groups, 2)
        changes |= {"c": c * groups, "k": k * groups, "groups": groups}
    if factors == "f32":
        changes["precision"] = draw(st.sampled_from(PRECISIONS))
    if problem.direction != "wgrad" and result != "i32" and draw(st.booleans()):
        changes["epilogue"] = draw(st.sampled_from(EXACT))
    return problem.with_(**changes)


@st.composite
def grouped(draw) -> Problem:
    """A problem of cuda.igemm_groups."""
    each, groups = draw(st.sampled_from([(2, 8), (2, 16), (4, 4), (4, 12), (8, 4), (8, 6), (16, 2), (16, 3), (32, 2)]))
    rank = draw(st.sampled_from((1, 2, 2, 2)))
    axes = []
    for _ in range(rank):
        taps, dilation, low = draw(st.integers(1, 4)), draw(st.sampled_from((1, 1, 2))), draw(st.integers(0, 3))
        least = max(1, dilation * (taps - 1) + 1 - low)
        axes.append(
            (least + draw(st.integers(0, 20)), taps, draw(st.integers(1, 3)), (low, draw(st.integers(0, 3))), dilation)
        )
    spatial, filter_, stride, padding, dilations = zip(*axes, strict=True)
    direction = draw(st.sampled_from(DIRECTIONS))
    return Problem(
        direction=direction, n=draw(st.integers(1, 9)), c=each * groups, k=each * groups, spatial=spatial,
        filter=filter_, stride=stride, padding=padding, dilation=dilations, groups=groups,
        dtypes=(draw(st.sampled_from(("f16", "bf16"))),) * 3,
        layouts=(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(LAYOUTS)), "nhwc"),
        epilogue=draw(st.sampled_from(FUSED)) if direction != "wgrad" else IDENTITY,
    )  # fmt: skip


@pytest.mark.parametrize("part", range(PARTS))
def test_igemm_is_right_on_any_problem(part):
    @seed(part)
    @settings(max_examples=max(1, EXAMPLES // PARTS), database=None)
    @given(multiplied(), st.integers(0, 999), st.integers(0, 999))
    def search(problem, data, choice):
        device = this_device()
        assert isinstance(device, CudaDevice)
        tiles = [
            tile for tile in igemm._tiles(core_of(problem), device)
            if (tile.rows, tile.columns) in SHAPES and tile.stages == 3
        ]  # fmt: skip
        check_engine(IGEMM, problem, data, candidate=with_knobs(IGEMM, problem, tiles[choice % len(tiles)]))

    search()


@pytest.mark.parametrize("part", range(PARTS // 2))
def test_igemm_groups_is_right_on_any_problem(part):
    @seed(part)
    @settings(max_examples=max(1, EXAMPLES // PARTS // 8), database=None)
    @given(grouped(), st.integers(0, 999), st.integers(0, 11))
    def search(problem, data, choice):
        if accepts(GROUPS, problem):
            tiles = list(candidates(GROUPS, problem))
            check_engine(GROUPS, problem, data, candidate=tiles[choice % len(tiles)])

    search()
