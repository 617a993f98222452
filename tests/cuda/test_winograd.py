"""cuda.winograd: tiles of 4 and 6 points an axis, every pass, layout and dtype, in chunks of any size."""

from __future__ import annotations

import pytest

from openconv.cuda import jit
from openconv.cuda.winograd import Chunk, Winograd, _code, _struct
from openconv.engine import engines
from openconv.problem import DIRECTIONS, Problem
from openconv.select import Policy, rank
from openconv.winograd import program, transform
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    Run,
    _magnitude,
    accepts,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_plan,
    check_workspace_limits,
    make,
    reference,
    refusal,
    this_device,
    with_knobs,
)

ENGINE = Winograd()
# What ends inside of tiles and of vectors; paddings that reach beyond the filter, so that a dgrad begins inside of dy.
SHAPES = {
    "3x3": "n2 c5 h7 w9 k6 r3 s3 pad1",
    "vectors": "n1 c8 h8 w9 k12 r3 s3",
    "5x5": "n1 c4 h9 w11 k3 r5 s5 pad2",
    "1d": "n2 c6 w19 k8 s3 pad1",
    "1d-of-five": "n1 c3 w23 k2 s5 pad0:3",
    "rows": "n1 c4 h3 w14 k2 r1 s3 pad0,1",
    "even": "n2 c3 h6 w7 k4 r2 s4 pad1,2",
    "padded": "n1 c2 h4 w5 k3 r2 s3 pad3:4",
    "pixel": "n3 c4 h1 w1 k5 r3 s3 pad1",
}


def chunks(problem: Problem) -> list[Chunk]:
    """Smaller than these problems lead to, with an end that is smaller still, and a wgrad's sum in parts."""
    points = [p for p in (6, 4) if p - max(problem.filter) >= 1]
    return [
        Chunk(p, tiles, parts)
        for p in points
        for tiles, parts in ((3, 1), (5, 2 if problem.direction == "wgrad" else 1))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_right_in_tiles_of_any_size(name, direction):
    for layout in LAYOUTS[:2]:
        problem = make(SHAPES[name], direction, "f32", layout)
        for points in {knobs.points for knobs in ENGINE.knobs(problem, this_device())}:
            knobs = next(k for k in ENGINE.knobs(problem, this_device()) if k.points == points)
            check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_any_size_give_the_same_result(layout, direction):
    problem = make(SHAPES["3x3"], direction, "f32", layout)
    for knobs in chunks(problem):
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_is_rounded_once_on_the_way(direction, dtype):
    for layout in LAYOUTS[:2]:
        for name in ("3x3", "vectors"):
            problem = make(SHAPES[name], direction, dtype, layout)
            small = Chunk(4, 3, 2 if direction == "wgrad" else 1)
            for knobs in (next(iter(ENGINE.knobs(problem, this_device()))), small):
                check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("epilogue", ["+bias+relu", "+scale+residual+silu", "+mul(c.a)+add(t.b)+mul(s.gain)"])
def test_epilogues_are_computed_on_the_way_back(epilogue, direction):
    for layout, dtype, name in zip(LAYOUTS[:2], ("f32", "f16"), ("vectors", "3x3"), strict=True):
        problem = Problem.parse(f"{direction} {SHAPES[name]} {dtype} {layout} {epilogue}")
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, Chunk(4, 4)))
        check_plan(problem, engine=ENGINE.name, strided=True)


def test_every_shared_problem_that_it_takes_is_right():
    taken = [make(text) for text in PROBLEMS.values() if accepts(ENGINE, make(text))]
    assert len(taken) >= 12
    for problem in taken[::3]:
        check_engine(ENGINE, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_same_bits_each_time_and_for_each_image(direction):
    problem = make(SHAPES["3x3"], direction)
    check_determinism(ENGINE, problem)
    if direction != "wgrad":
        assert check_batch_invariance(ENGINE, problem)


def test_one_image_at_a_time_is_batch_invariant():
    problem = make("n4 c4 h8 w8 k6 r3 s3 pad1")
    claims = {tiles: ENGINE.traits(problem, Chunk(6, tiles)).batch_invariant for tiles in (2, 3, 4, 5, 16)}
    assert claims == {2: True, 3: True, 4: True, 5: False, 16: False}
    assert not ENGINE.traits(problem, Chunk(4, 4)).batch_invariant  # its bits are others


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_leads_to_smaller_chunks(direction):
    problem, device = make("n32 c256 h56 w56 k256 r3 s3 pad1", direction, "f16", "nhwc"), this_device()
    sizes = [ENGINE.workspace_bytes(problem, device, knobs) for knobs in ENGINE.knobs(problem, device)]
    filters = 36 * 256 * 256 * (2 if direction != "wgrad" else 4 * 8 * 2)
    assert max(sizes) <= (256 << 20) + filters
    assert min(sizes) <= (8 << 20) + filters
    check_workspace_limits(ENGINE, make(SHAPES["3x3"], direction))


def test_a_call_allocates_nothing_but_its_workspace():
    for direction in DIRECTIONS:
        check_hidden_memory(ENGINE, make("n2 c16 h24 w24 k32 r3 s3 pad1", direction, "f32", "nchw"))


def test_errors_are_near_what_is_claimed():
    """The bound is one that is reached to a hundredth at least."""
    for direction in DIRECTIONS:
        for points in (4, 6):
            problem = make("n2 c6 h12 w12 k8 r3 s3 pad1", direction, "f32", "nhwc")
            candidate = with_knobs(ENGINE, problem, Chunk(points, 99))
            run = Run(ENGINE, problem, candidate=candidate)
            run.call()
            off = (run.out.double() - reference(problem, run.a, run.b)).abs().max()
            share = float(off / _magnitude(problem, run.a, run.b).max())
            assert candidate.traits.error_bound / 200 <= share <= candidate.traits.error_bound


def test_large_problems_have_offsets_of_64_bits():
    small = make("n8 c64 h56 w56 k64 r3 s3 pad1", "fprop", "f16", "nhwc")
    large = make("n800 c256 h112 w112 k256 r3 s3 pad1", "fprop", "f16", "nhwc")
    for problem, offset in ((small, "int"), (large, "i64")):
        knobs = next(iter(ENGINE.knobs(problem, this_device())))
        for source in ENGINE.sources(problem, this_device(), knobs):
            assert f"using Offset = {offset};" in source.traits


def test_places_of_64_bits_are_right(monkeypatch):
    """Through the same kernels as problems of 2^31 elements."""
    monkeypatch.setattr("openconv.cuda.winograd._Form.offset", "i64")
    for direction in DIRECTIONS:
        for layout in LAYOUTS[:2]:
            check_engine(ENGINE, make(SHAPES["vectors"], direction, "f32", layout))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n1 c4 h8 w8 k4 r3 s3 stride2 pad1 f32 nhwc", "stride is (2, 2); Winograd needs 1 along all axes"),
        ("n1 c4 h8 w8 k4 r3 s3 dil2 f32 nhwc", "dilation is (2, 2); Winograd needs 1 along all axes"),
        ("n1 c4 h8 w8 k4 r3 s3 g2 f32 nhwc", "groups is 2; Winograd needs 1"),
        ("n1 c4 h8 w8 k4 r1 s1 f32 nhwc", "filter is (1, 1); wanted up to 5 taps an axis, and more than one"),
        ("n1 c4 h8 w8 k4 r7 s7 pad3 f32 nhwc", "filter is (7, 7); wanted up to 5 taps"),
        ("n1 c4 d4 h8 w8 k4 t3 r3 s3 f32 nhwc", "spatial sizes are (4, 8, 8); its tiles have one or two axes"),
        ("n1 c4 h8 w8 k4 r3 s3 f64 nhwc", "dtype is f64; its transforms are for f32, f16 and bf16"),
        ("n1 c4 h8 w8 k4 r3 s3 i8*i8>i32 nhwc", "dtypes are i8, i8, i32; the matrix product takes"),
        ("n1 c4 h8 w8 k4 r3 s3 f32 nhwc tf32", "precision is tf32; rounding between transforms needs ieee"),
        ("n1 c4 h8 w8 k4 r3 s3 f32 nchw*nchw>nhwc", "layouts of x and y are nchw and nhwc"),
        (
            "n1 c4 h8 w8 k4 r5 s5 bf16 nhwc",
            "its error in bf16 is up to 0.17 of the largest result; wanted at most 0.062",
        ),
        (
            "n1 c4 h8 w8 k4 r5 s5 f16 nhwc",
            "its error in f16 is up to 0.022 of the largest result; wanted at most 0.0078",
        ),
    ],
)
def test_refusals_are_sentences(text, reason):
    assert reason in refusal(ENGINE, Problem.parse(f"fprop {text}"))


def test_half_precision_takes_no_tile_that_is_too_far_off():
    for dtype, points in (("f32", {4, 6}), ("f16", {4}), ("bf16", {4})):
        problem = make(SHAPES["3x3"], "fprop", dtype)
        assert {knobs.points for knobs in ENGINE.knobs(problem, this_device())} == points


def test_it_is_chosen_where_products_bound_a_layer_and_never_under_strict_accuracy():
    problem, device = make("n32 c256 h28 w28 k256 r3 s3 pad1", "fprop", "f32", "nhwc"), this_device()
    assert ENGINE.name in {engine.name for engine in engines("cuda")}
    chosen, _ = rank(problem, device, Policy(tuning="off"))
    assert chosen[0].engine.name == ENGINE.name
    for limits in (Policy(tuning="off"), Policy(tuning="off", engine=ENGINE.name)):
        strict, _ = rank(problem, device, limits.but(accuracy="strict"))
        assert ENGINE.name not in {candidate.engine.name for candidate in strict}


def test_the_prediction_prefers_fewer_products_where_products_bound_a_layer():
    device = this_device()
    deep = make("n32 c512 h28 w28 k512 r3 s3 pad1", "fprop", "f32", "nhwc")
    assert next(iter(ENGINE.knobs(deep, device))).points == 6
    costs = [ENGINE.cost(deep, device, knobs) for knobs in ENGINE.knobs(deep, device)]
    assert costs[0] < deep.flops / device.flops
    assert len(set(costs)) > 4
    assert ENGINE.reasons(deep, device, Chunk(6, 1024)) == (
        "F(4,3) x F(4,3): 36 products for 16 outputs of 9 taps, 4.00 times fewer than a plain sum",
    )


def test_the_transforms_in_the_kernels_are_the_generated_ones():
    problem = make(SHAPES["vectors"], "fprop", "f32", "nhwc")
    tiles, filters, results = ENGINE.sources(problem, this_device(), Chunk(6, 99))
    each = transform(4, 3)
    for source, matrix in ((tiles, each.bt), (filters, each.g), (results, each.at)):
        for name in ("Down", "Across"):
            assert "\n".join(f"    {line}" for line in _struct(name, matrix)) in source.traits
        assert all(_code(step) in source.traits for step in program(matrix))


def test_compiles_without_spills():
    for direction, layout, dtype in (("fprop", "nhwc", "f32"), ("dgrad", "nchw", "f16"), ("wgrad", "nhwc", "f16")):
        problem = make("n8 c64 h56 w56 k64 r3 s3 pad1 +bias+relu", direction, dtype, layout)
        for source in ENGINE.sources(problem, this_device(), Chunk(6, 4096)):
            for arch in ("sm_80", "sm_90a"):
                assert [found.spills for found in jit.usage(source, arch)] == [0]
