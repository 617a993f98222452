"""cuda.filter2d: image filters of few channels, checked on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.filter2d import Filter2d, Filter2dGradKnobs, Filter2dKnobs
from openconv.problem import DIRECTIONS, Problem
from tests.cuda.within_bounds import check_bound
from tests.support import (
    candidates,
    check_determinism,
    check_engine,
    check_knobs,
    check_locality,
    make,
    refusal,
    run_engine,
    this_device,
)

ENGINE = Filter2d()


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_right_with_all_knobs(direction):
    check_knobs(ENGINE, make("n1 c1 h11 w24 k1 r3 s3 pad1", direction))


@pytest.mark.parametrize("filter_", ["r1 s1", "r4 s2", "r5 s7 pad2,3", "r15 s15 pad7", "r31 s31 pad15"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_filter_is_right(direction, filter_):
    # Rows that are no whole vectors and, where that is another kernel, rows that are; strips of rows, and a rest.
    check_engine(ENGINE, make(f"n1 c1 h19 w27 k1 {filter_}", direction))
    if filter_ == "r5 s7 pad2,3":
        check_engine(ENGINE, make(f"n2 c1 h34 w36 k1 {filter_}", direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_images_wider_than_a_tile(direction):
    check_engine(ENGINE, make("n1 c1 h35 w133 k1 r3 s6 pad1,2", direction))
    check_engine(ENGINE, make("n1 c2 h9 w264 k2 r3 s3 pad1 g2", direction))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "u8"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_dtype_is_right(direction, dtype):
    text = "n1 c3 h9 w12 k3 r3 s3 pad1 g3 nhwc" if direction == "fprop" else "n1 c2 h10 w13 k2 r5 s5 pad2 g2 nchw"
    check_engine(ENGINE, Problem.parse(f"{direction} {text} {dtype}"))


@pytest.mark.parametrize(
    ("direction", "channels"), [("fprop", 2), ("fprop", 3), ("fprop", 4), ("dgrad", 3), ("wgrad", 2)]
)
def test_interleaved_channels(direction, channels):
    for sizes in ("h9 w12", "h10 w13") if direction == "fprop" and channels == 3 else ("h10 w13",):
        text = f"n2 c{channels} {sizes} k{channels} r3 s3 pad1 g{channels} +bias+relu"
        check_engine(ENGINE, make(text, direction, layout="nhwc"))


@pytest.mark.parametrize(
    "text",
    [
        "fprop n2 c2 h9 w12 k2 r3 s3 pad1 g2 nchw +bias+relu",
        "fprop n2 c2 h9 w12 k2 r3 s3 pad1 g2 nhwc +residual",
        "fprop n2 c3 h9 w12 k3 r3 s2 pad1 g3 nhwc +scale+residual+relu",
        "dgrad n1 c3 h9 w13 k3 r5 s5 pad2 g3 f16 nchw +bias+residual+clamp(-4,5)",
        "dgrad n1 c4 h9 w12 k4 r5 s5 pad2 g4 nhwc +mul(s.gain)+add(t.residual)",
    ],
)
def test_epilogues(text):
    # Stored as vectors, one by one behind vector loads, and turned around in shared memory.
    problem = Problem.parse(text)
    check_engine(ENGINE, problem)
    for knobs in ENGINE.knobs(problem, this_device()):
        if isinstance(knobs, Filter2dKnobs) and not knobs.staged:
            check_bound(ENGINE, problem, knobs)  # with memory that vectors can start at
            break


def test_functions_of_real_numbers():
    check_bound(ENGINE, Problem.parse("fprop n1 c2 h9 w12 k2 r3 s3 pad1 g2 nhwc +bias+silu+residual"),
                Filter2dKnobs(False, 4, 8, 64))  # fmt: skip


@pytest.mark.parametrize("padding", ["pad1:2,0:3", "pad3:0,5:1"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_padding(direction, padding):
    for width in (16, 19) if direction == "fprop" else (19,):
        check_engine(ENGINE, make(f"n1 c1 h11 w{width} k1 r3 s3 {padding}", direction))


@pytest.mark.parametrize("text", ["h11 w12 r3 s3 pad1", "h10 w15 r3 s3"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinities_and_nans_stay_where_they_belong(direction, text):
    for seed in range(2 if direction == "wgrad" else 1):
        for value in (math.inf, math.nan):
            check_locality(ENGINE, make(f"n2 c2 k2 g2 {text}", direction), seed=seed, value=value)


def test_the_rim_of_dy_has_no_products_of_its_own():
    """An infinity in the last column of x meets the last tap alone: zeros beyond dy would make it NaN in the others."""
    problem = Problem.parse("wgrad n1 c1 h9 w9 k1 r3 s3 nhwc")
    x, dy = torch.ones(1, 1, 9, 9), torch.ones(1, 1, 7, 7)
    x[0, 0, -1, -1] = math.inf
    got = run_engine(ENGINE, problem, inputs=(x, dy, ())).out
    wanted = torch.full((1, 1, 3, 3), 49.0)
    wanted[0, 0, -1, -1] = math.inf
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("direction", ["fprop", "wgrad"])
def test_the_same_bits_each_time(direction):
    check_determinism(ENGINE, make("n1 c1 h11 w24 k1 r3 s3 pad1", direction))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_the_same_bits_in_any_batch(direction):
    problem = make("n3 c2 h21 w24 k2 r5 s5 pad2 g2", direction)
    whole = run_engine(ENGINE, problem)
    for first in range(3):
        part = (whole.a[first : first + 1].clone(), whole.b, ())
        assert torch.equal(run_engine(ENGINE, problem.with_(n=1), inputs=part).out, whole.out[first : first + 1])


def test_knobs_that_keep_the_bits():
    """Tiles do not show in the bits; whether the image is staged shows with more than one block of taps."""
    small, large = (make(text) for text in ("n1 c1 h21 w24 k1 r5 s5 pad2", "n1 c1 h21 w24 k1 r7 s7 pad3"))
    for problem in (small, large):
        found = [c for c in candidates(ENGINE, problem) if c.traits.batch_invariant]
        assert {c.knobs.staged for c in found} == ({False, True} if problem is small else {False})
        picked = {c.knobs.staged: c for c in found}.values()
        outs = [run_engine(ENGINE, problem, candidate=c).out for c in (found[0], *picked)]
        assert all(torch.equal(out, outs[0]) for out in outs)
    for batch in (1, 64, 4096):
        default = next(candidates(ENGINE, large.with_(n=batch)))
        assert default.traits.batch_invariant
        assert not default.knobs.staged


def test_knobs_are_few_and_the_workspace_small():
    for direction in DIRECTIONS:
        for filter_ in ("r3 s3 pad1", "r7 s7 pad3", "r15 s15 pad7", "r31 s31 pad15"):
            problem = make(f"n1 c1 h4000 w4000 k1 {filter_}", direction)
            found = list(ENGINE.knobs(problem, this_device()))
            assert 2 <= len(found) == len(set(found)) <= 12
            for knobs in found:
                assert ENGINE.workspace_bytes(problem, this_device(), knobs) <= problem.min_bytes / 8
                assert ENGINE.cost(problem, this_device(), knobs) > problem.min_bytes / 4.3e12


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fprop n1 c1 d4 h4 w4 k1 t1 r1 s1", "rank is 3"),
        ("fprop n1 c3 h4 w4 k3 r1 s1", "C, K and groups are 3, 3 and 1"),
        ("fprop n1 c8 h4 w4 k8 r1 s1 g8", "C, K and groups are 8, 8 and 8"),
        ("fprop n1 c1 h4 w4 k2 r1 s1", "C, K and groups are 1, 2 and 1"),
        ("fprop n1 c1 h40 w40 k1 r1 s33", "filter is (1, 33)"),
        ("fprop n1 c1 h4 w4 k1 r1 s1 stride2", "stride is (2, 2)"),
        ("fprop n1 c1 h9 w9 k1 r3 s3 dil2", "dilation is (2, 2)"),
        ("fprop n1 c1 h4 w4 k1 r1 s1 f64", "dtypes are f64, f64, f64"),
        ("fprop n1 c1 h4 w4 k1 r1 s1 u8*u8>i32", "dtypes are u8, u8, i32"),
        ("fprop n1 c1 h4 w4 k1 r1 s1 u8 +gelu", "epilogue is +gelu"),
        ("fprop n1 c1 h4 w4 k1 r1 s1 nchw*nchw>nhwc", "layouts of x and y are nchw and nhwc"),
    ],
)
def test_refusals(text, reason):
    assert reason in refusal(ENGINE, Problem.parse(text))


@pytest.mark.parametrize("arch", [ARCHITECTURES[0], ARCHITECTURES[-1]])
def test_compiles_for_old_and_new(arch):
    device = device_for(arch)
    for text, knobs in (
        ("fprop n1 c3 h40 w40 k3 r3 s3 pad1 g3 bf16 nhwc +bias+relu", Filter2dKnobs(False, 4, 32, 128)),
        ("fprop n1 c1 h41 w41 k1 r3 s3 pad1 f16", Filter2dKnobs(True, 8, 32, 128)),
        ("wgrad n1 c1 h41 w41 k1 r3 s3 pad1 f16", Filter2dGradKnobs(32, 4, 32, 2)),
    ):
        for source in ENGINE.sources(Problem.parse(text), device, knobs):
            assert [found.spills for found in jit.usage(source, arch)] == [0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_large_filters_stay_in_registers(arch):
    for text in (
        "fprop n1 c1 h4000 w4000 k1 r7 s7 pad3",
        "wgrad n1 c1 h4000 w4000 k1 r15 s15 pad7",
        "wgrad n1 c1 h1024 w2048 k1 r9 s9 pad4 bf16 nhwc",
    ):
        problem, device = Problem.parse(text), device_for(arch)
        source = ENGINE.sources(problem, device, next(iter(ENGINE.knobs(problem, device))))[0]
        assert [found.spills for found in jit.usage(source, arch)] == [0]
