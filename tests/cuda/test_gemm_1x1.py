"""cuda.gemm_1x1: filters of one tap, and windows that do not overlap, as matrix products behind a copy."""

from __future__ import annotations

import math

import pytest
import torch

from openconv.cuda import jit
from openconv.cuda.gemm_1x1 import Gemm1x1, Images
from openconv.problem import DIRECTIONS, Problem
from tests.cuda.within_bounds import check_bound
from tests.support import LAYOUTS, PROBLEMS, check_engine, check_knobs, check_locality, make, refusal, this_device

ENGINE = Gemm1x1()
TAKEN = (
    *(PROBLEMS[name] for name in ("1x1", "1x1-stride", "1x1-groups", "1x1-1d", "1x1-3d", "pixel", "patches",
                                  "patches-cropped", "patches-3d", "filter-is-image")),
    "n2 c6 h8 w9 k4 r2 s3 stride2,3 g2",  # windows in groups: nchw only
    "n3 c4 w17 k5 s4 stride4",  # windows of one axis, with a rest
    "n5 c6 h3 w3 k4 r1 s1 stride3",  # one pixel of each image is used
    "n1 c3 h32 w32 k16 r8 s8 stride8",  # vectors of 16 bytes
    "n3 c3 d2 h4 w4 k5 t2 r4 s4 stride2,4,4",  # each image is one window: nothing is copied
)  # fmt: skip


def taken(text: str, direction: str, dtype: str, layout: str) -> Problem | None:
    """The problem if it is there in this layout; those of one group the engine must accept."""
    if layout != "nchw" and " h" not in text:
        return None
    problem = make(text, direction, dtype, layout)
    return problem if problem.groups == 1 or not refusal(ENGINE, problem) else None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_all_knobs(direction, layout):
    for text in TAKEN:
        problem = taken(text, direction, "f32", layout)
        if problem is not None:
            check_knobs(ENGINE, problem)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_every_dtype(direction, dtype):
    for at, text in enumerate(TAKEN):
        problem = taken(text, direction, dtype, LAYOUTS[at % 2])
        if problem is not None:
            check_bound(ENGINE, problem)
            check_engine(ENGINE, problem)


@pytest.mark.parametrize("epilogue", ["+bias", "+bias+relu", "+scale+residual+silu", "+mul(s.gain)+clamp(-1,2)"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_every_epilogue_is_right(direction, epilogue):
    texts = ("n2 c8 h4 w6 k16 r1 s1", "n2 c3 h9 w8 k10 r4 s4 stride4", "n2 c4 h6 w6 k6 r1 s1 stride2 g2")
    for text, dtype in zip(texts, ("bf16", "bf16", "f32"), strict=True):
        for layout in LAYOUTS[:2]:
            check_bound(ENGINE, Problem.parse(f"{direction} {text} {dtype} {layout} {epilogue}"))


def test_a_bias_of_rows_is_part_of_the_product():
    def files(text: str) -> list[str]:
        problem = Problem.parse(text)
        return [
            s.file for s in ENGINE.sources(problem, this_device(), next(iter(ENGINE.knobs(problem, this_device()))))
        ]

    body = "n2 c8 h4 w6 k16 r1 s1 f16"
    assert files(f"fprop {body} nhwc +bias+relu") == []
    assert files(f"fprop {body} nchw +bias") == ["pointwise.cu"]
    assert files(f"dgrad {body} nhwc +bias") == []
    assert files("dgrad n2 c8 h4 w6 k16 r2 s2 stride2 f16 nhwc +bias") == ["gemm_1x1.cu"]


def test_what_lies_in_order_is_not_copied():
    """transformers#45750: patches that were cut beforehand are one product."""
    for text in ("n4 c3 d2 h4 w4 k8 t2 r4 s4 stride2,4,4", "n4 c16 h5 w5 k8 r1 s1"):
        for layout in ("nchw", "nhwc"):
            problem = make(text, layout=layout)
            knobs = next(iter(ENGINE.knobs(problem, this_device())))
            assert ENGINE.workspace_bytes(problem, this_device(), knobs) == 0


def test_rows_are_padded_to_what_products_read_fast():
    problem = Problem.parse("fprop n2 c3 h28 w28 k8 r14 s14 stride14 bf16 nchw")
    padded, plain = (Images("batched", padded=value) for value in (True, False))
    assert padded in ENGINE.knobs(problem, this_device())
    rows = 2 * 4
    assert ENGINE.workspace_bytes(problem, this_device(), padded) >= rows * 592 * 2 + 8 * 592 * 2
    assert ENGINE.cost(problem, this_device(), padded) < ENGINE.cost(problem, this_device(), plain) * 1.5
    for direction in DIRECTIONS:
        check_bound(ENGINE, problem.with_(direction=direction))


def test_one_image_at_a_time_takes_less_memory():
    problem = make("n6 c3 h16 w16 k8 r4 s4 stride4")
    alone, batched = (ENGINE.workspace_bytes(problem, this_device(), Images(way)) for way in ("alone", "batched"))
    assert alone * 6 == batched
    assert ENGINE.traits(problem, Images("alone")).batch_invariant


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinities_and_nans_stay_where_they_belong(direction, value):
    for text in TAKEN[:10]:
        check_locality(ENGINE, make(text, direction), value=value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("n1 c4 h5 w5 k4 r1 s1 i32", ["i32"]),
        ("n1 c4 h5 w5 k4 r1 s1 f16*f16>f32", ["f16, f16, f32"]),
        ("n1 c4 h5 w5 k4 r1 s1 pad0:1 f32", ["((0, 1), (0, 1))"]),
        ("n1 c4 h5 w5 k4 r3 s3 f32", ["(3, 3)", "(1, 1)"]),
        ("n1 c4 h9 w9 k4 r2 s2 stride2 dil2 f32", ["(2, 2)"]),
        ("n1 c4 h8 w8 k4 r2 s2 stride2 g2 f32 nhwc", ["groups is 2"]),
        ("n1 c4 h8 w8 k4 r1 s1 f32 tf32", ["precision is tf32", "highest"]),
    ],
)
def test_refusals_name_the_value_seen(text, words):
    for direction in DIRECTIONS:
        sentences = refusal(ENGINE, Problem.parse(f"{direction} {text}"))
        for word in words:
            assert word in sentences


def test_products_follow_the_setting_of_torch():
    problem = make("n1 c4 h8 w8 k4 r1 s1")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert "precision is ieee" in refusal(ENGINE, problem)
        assert not refusal(ENGINE, problem.with_(precision="tf32"))
        assert not refusal(ENGINE, make("n1 c4 h8 w8 k4 r1 s1", dtype="f16"))
    finally:
        torch.set_float32_matmul_precision(before)


def test_offsets_of_64_bits_compute_the_same():
    """Tensors of 2^31 elements are too large to run here: their kernel is the same text with another type."""
    problem = Problem.parse("fprop n1024 c3 h1024 w1024 k768 r16 s16 stride16 bf16 nchw")
    (source,) = ENGINE.sources(problem, this_device(), Images("batched"))
    assert "using Offset = i64;" in source.traits
    assert jit.usage(source, "sm_90a")
