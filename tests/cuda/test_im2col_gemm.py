"""cuda.im2col_gemm: panels of columns and a matrix product, in either layout, for any floating-point problem."""

from __future__ import annotations

import math
from math import prod

import pytest

from openconv.cuda import jit
from openconv.cuda.im2col_gemm import Im2colGemm, Panel
from openconv.problem import DIRECTIONS, Problem
from tests.cuda.within_bounds import check_bound
from tests.support import LAYOUTS, PROBLEMS, check_engine, check_locality, make, refusal, this_device

ENGINE = Im2colGemm()
# Several panels in one image, several images in one panel, a last panel that is smaller, channels of one group. Of few
# pixels with many taps, blocks share the taps.
PANELS = (
    "n3 c8 h7 w6 k6 r3 s3 pad1",
    "n2 c8 h9 w8 k4 r3 s2 stride2,1 pad0:1,2 dil1,2 g2",
    "n2 c4 d5 h4 w6 k6 t2 r2 s3 stride2,1,1 pad1",
    "n3 c2 h16 w40 k6 r5 s21 stride6,8 pad3 dil4,1",
)


def panels(problem: Problem) -> list[Panel]:
    """The engine's own, and smaller ones than these problems lead to."""
    pixels, own = prod(problem.out), problem.c // problem.groups
    small = [Panel(1, pixels, problem.c), Panel(2, pixels, problem.c)]
    if problem.direction == "dgrad":
        small += [Panel(1, pixels, channels) for channels in sorted({1, own // 2, own} - {0})]
    else:
        small += [Panel(1, 8, problem.c), Panel(1, 24, problem.c)]
    return [*ENGINE.knobs(problem, this_device()), *small]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_on_every_problem(name, direction):
    for layout in LAYOUTS if " h" in PROBLEMS[name] else LAYOUTS[:1]:
        check_engine(ENGINE, make(PROBLEMS[name], direction, "f32", layout).with_(epilogue=""))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_every_dtype(direction, dtype):
    for name in ("3x3", "groups-stride", "stride-and-dilation", "depthwise"):
        for layout in LAYOUTS[:2]:
            check_engine(ENGINE, make(PROBLEMS[name], direction, dtype, layout))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", PANELS)
def test_panels_of_any_size_give_the_same_result(text, direction, dtype):
    for layout in LAYOUTS:
        problem = make(text, direction, dtype, layout)
        for panel in panels(problem):
            check_bound(ENGINE, problem, panel)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("epilogue", ["+bias+relu", "+scale+residual+silu"])
def test_epilogues_in_panels(epilogue, direction):
    for layout in LAYOUTS[:2]:
        for dtype in ("f32", "bf16"):
            problem = Problem.parse(f"{direction} {PANELS[0]} {dtype} {layout} {epilogue}")
            for panel in panels(problem):
                check_bound(ENGINE, problem, panel)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_limit_on_the_workspace_leads_to_smaller_panels(direction, layout):
    problem = make("n64 c64 h56 w56 k64 r3 s3 pad1", direction, "f16", layout)
    device = this_device()
    sizes = [ENGINE.workspace_bytes(problem, device, knobs) for knobs in ENGINE.knobs(problem, device)]
    filters = 8 * 64 * 64 * 9
    assert sizes[0] <= (256 << 20) + filters
    assert min(sizes) <= (6 << 20) + filters
    assert len(set(sizes)) >= 3


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_columns_of_the_largest_images_stay_within_the_budget(direction, layout):
    """17 GB of columns have been seen for one layer."""
    problem = make("n8 c64 h1024 w1024 k64 r7 s7 pad3", direction, "f16", layout)
    knobs = next(iter(ENGINE.knobs(problem, this_device())))
    assert ENGINE.workspace_bytes(problem, this_device(), knobs) <= 300 << 20


def test_one_image_in_a_panel_is_batch_invariant():
    problem = make("n4 c4 h7 w6 k6 r3 s3 pad1")
    claims = {knobs.images: ENGINE.traits(problem, knobs).batch_invariant for knobs in panels(problem)}
    assert claims == {1: True, 2: False, 4: False}


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinities_and_nans_stay_where_they_belong(direction, value):
    for name in ("3x3", "stride", "groups", "1d-dilation"):
        if name in PROBLEMS:
            check_locality(ENGINE, make(PROBLEMS[name], direction), value=value)


@pytest.mark.parametrize("dtype", ["i8", "i32", "f16*f16>f32", "f32*f32>f64"])
def test_refuses_what_no_matrix_product_takes(dtype):
    text = refusal(ENGINE, make(PROBLEMS["3x3"], dtype=dtype))
    for name in dtype.replace(">", "*").split("*"):
        assert name in text


def test_compiles_without_spills():
    for direction in DIRECTIONS:
        for layout in LAYOUTS[:2]:
            problem = make("n8 c64 h56 w56 k64 r3 s3 pad1", direction, "f16", layout)
            knobs = next(iter(ENGINE.knobs(problem, this_device())))
            for source in ENGINE.sources(problem, this_device(), knobs):
                for arch in ("sm_80", "sm_90a"):
                    assert [found.spills for found in jit.usage(source, arch)] == [0]
