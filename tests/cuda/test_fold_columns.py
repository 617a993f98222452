"""cuda.fold_columns: columns as channels in all passes, with epilogues; and the kernels that spread filters."""

from __future__ import annotations

import math

import pytest
import torch

from openconv.cuda.device import CudaDevice
from openconv.cuda.fold_columns import FoldColumns, _inside, _moves, _ways
from openconv.cuda.folded import Repeated
from openconv.engine import engine_named
from openconv.problem import DIRECTIONS, Problem
from openconv.rewrites.base import Choice, Rewritten, settings_of
from openconv.select import Candidate
from tests.support import (
    accepts,
    candidates,
    check_determinism,
    check_engine,
    check_plan,
    check_workspace_limits,
    core_of,
    make,
    reference,
    refusal,
    this_device,
    with_knobs,
)

ENGINE = FoldColumns()
SHAPES = (
    "n2 c8 d3 h4 w8 k8 t3 r1 s1 pad1,0,0",
    "n1 c8 h5 w12 k8 r3 s3 pad1",
    "n1 c3 d3 h5 w16 k4 t2 r3 s7 stride1,2,2 pad1,1,3",
    "n2 c4 h5 w12 k6 r3 s3 pad0:1,2:0 stride1",
    "n1 c2 h3 w24 k8 r1 s4 dil1,2 pad0,3:3 stride1,2",
    "n1 c5 h4 w16 k3 r2 s1 stride2",
)


def with_inside(problem: Problem, engine: str, way: int) -> Candidate:
    """So many results as one, by this engine with its first knobs."""
    knobs = next(iter(settings_of(engine_named(engine), _inside(problem, way), this_device(), ("fold_columns",))))
    return with_knobs(ENGINE, problem, Rewritten(way, (Choice(engine, knobs),)))


def all_ways(problem: Problem) -> tuple[int, ...]:
    return _ways(core_of(problem))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", SHAPES)
def test_right_in_every_way(text, direction):
    problem = make(text, direction, "f16", "nhwc")
    ways = all_ways(problem)
    assert ways
    assert accepts(ENGINE, problem)
    for way in ways:
        check_engine(ENGINE, problem, candidate=with_inside(problem, "cuda.naive", way))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_what_it_is_for(direction):
    for text in SHAPES[:3]:
        problem = make(text, direction, "f16", "nhwc")
        for way in all_ways(problem)[:2]:
            check_engine(ENGINE, problem, candidate=with_inside(problem, "cuda.igemm_sm90", way))


@pytest.mark.parametrize("layouts", ["nhwc*nchw>nhwc", "nhwc"])
@pytest.mark.parametrize("dtypes", ["bf16", "f32", "f16*f16>f32"])
def test_right_in_other_dtypes_and_layouts_of_the_filter(dtypes, layouts):
    for at, direction in enumerate(DIRECTIONS):
        if dtypes == "f16*f16>f32" and direction == "dgrad":
            continue
        precision = " tf32" if dtypes == "f32" else ""
        problem = Problem.parse(f"{direction} {SHAPES[1 + at]} {dtypes} {layouts}{precision}")
        check_engine(ENGINE, problem, candidate=with_inside(core_of(problem), "cuda.naive", all_ways(problem)[0]))


@pytest.mark.parametrize("epilogue", ["+bias+relu", "+bias+residual+relu", "+=mul(acc,s.gain)", "+scale+bias"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_epilogues_go_inside(direction, epilogue):
    problem = Problem.parse(f"{direction} {SHAPES[1]} f16 nhwc {epilogue}")
    for way in all_ways(problem)[:2]:
        check_engine(ENGINE, problem, candidate=with_inside(problem, "cuda.igemm", way))
    check_plan(problem, engine=ENGINE.name)


@pytest.mark.slow
def test_what_can_be_relied_on():
    problem = make(SHAPES[1], dtype="f16", layout="nhwc")
    check_determinism(ENGINE, problem)
    check_workspace_limits(ENGINE, problem)
    assert not next(candidates(ENGINE, problem)).traits.plain_sum


@pytest.mark.parametrize("text", SHAPES)
def test_the_spread_filter_computes_the_same(text):
    """By the definition, and with as many results of the filter's own numbers as there are products of them."""
    problem = make(text, "fprop", "f32", "nhwc").with_(precision="tf32")
    x, w = torch.randn(problem.x_shape, dtype=torch.float64), torch.randn(problem.w_shape, dtype=torch.float64)
    wanted, device = reference(problem, x, w), this_device()
    assert isinstance(device, CudaDevice)
    for way in all_ways(problem):
        inner = _inside(problem, way)
        spread = torch.empty(inner.w_shape[0], *inner.filter, inner.c)
        (move,) = _moves(problem, way).there
        filters = w.float().movedim(1, -1).contiguous()
        move.copy.launch(device)(filters.data_ptr(), spread.data_ptr())
        assert int(spread.count_nonzero()) == way * w.numel()
        given = ENGINE.seen(x.movedim(1, -1).contiguous().movedim(-1, 1), 0, problem, way)
        found = reference(inner, given, spread.movedim(-1, 1).double())
        out = torch.empty(problem.n, *problem.out, problem.k, dtype=torch.float64).movedim(-1, 1)
        ENGINE.seen(out, 2, problem, way).copy_(found)
        assert ENGINE.seen(out, 2, problem, way).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("fprop n1 c17 h4 w8 k8 r1 s1 f16 nhwc", "C is 17; wanted at most 16"),
        ("fprop n1 c8 h4 w8 k8 r1 s1 g2 f16 nhwc", "groups is 2; wanted 1"),
        ("fprop n1 c8 h4 w8 k8 r1 s1 f32 nhwc", "wanted what tensor cores multiply"),
        ("fprop n1 c8 h4 w8 k8 r1 s1 f16 nchw", "layout of x is nchw; columns lie side by side in nhwc"),
        ("fprop n1 c3 h4 w9 k8 r1 s1 f16 nhwc", "rows have 9 columns and 9 results, 1 apart; wanted whole groups of"),
        ("fprop n0 c8 h4 w8 k8 r1 s1 f16 nhwc", "a tensor is empty"),
        ("wgrad n1 c8 h4 w8 k8 r1 s1 f16*f64>f16 nhwc", "dtype of dw is f64"),
    ],
)
def test_refusals(text, reason):
    assert reason in refusal(ENGINE, Problem.parse(text))


def test_told():
    problem = Problem.parse("fprop n8 c3 d16 h112 w112 k64 t3 r7 s7 stride1,2,2 pad1,3,3 f16 nhwc +bias")
    candidate = next(candidates(ENGINE, problem))
    assert ENGINE.told(problem, candidate.knobs).startswith("8 columns of x and 4 of y as one, 24 by 256 channels, by ")
    assert ENGINE.copies(problem, candidate.knobs)[:2] == ("spread w over 256x24 channels", "copy bias 4 times")
    files = {source.file for source in ENGINE.sources(problem, this_device(), candidate.knobs)}
    assert {"folded.cu", "repeated.cu"} <= files


def test_ways_are_whole_groups_and_fill_vectors():
    for text in (*SHAPES, "n8 c3 d16 h112 w112 k64 t3 r7 s7 stride1,2,2 pad1,3,3", "n1 c16 h9 w120 k24 r3 s5 pad1,2"):
        for direction in DIRECTIONS:
            problem = make(text, direction, "f16", "nhwc")
            for way in all_ways(problem):
                inner = _inside(problem, way)
                assert math.prod(inner.x_shape) == math.prod(problem.x_shape)
                assert math.prod(inner.y_shape) == math.prod(problem.y_shape)
                assert inner.c % 8 == inner.k % 8 == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_repeats(size):
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    given, room = torch.arange(1, 46, dtype=dtype), torch.full((7 * 45 + 8,), 77, dtype=dtype)
    device = this_device()
    assert isinstance(device, CudaDevice)
    Repeated(45, 7, size).launch(device)(given.data_ptr(), room.data_ptr())
    assert torch.equal(room[:-8].view(7, 45), given.expand(7, 45))
    assert bool((room[-8:] == 77).all())
