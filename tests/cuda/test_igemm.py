"""cuda.igemm: implicit GEMMs of all passes, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Igemm, Tile
from openconv.epilogue import Epilogue
from openconv.plan import steps_of
from openconv.problem import Problem
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    candidates,
    check_engine,
    make,
    problems,
    refusal,
    run_engine,
    sweep,
    tensors,
    this_device,
    with_knobs,
)

ENGINE = Igemm()
DIRECTIONS = ("fprop", "dgrad", "wgrad")
SMALL = Tile(32, 64, 1, 2, 32, 3)
NARROW = Tile(64, 32, 2, 1, 32, 3)


def check(text: str, direction: str, knobs: Tile, dtype: str = "f16", layout: str = "nhwc") -> None:
    problem = make(text, direction, dtype, layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


NAMES = [name for name in PROBLEMS if "depthwise-" not in name]
IMAGES = [name for name in NAMES if " h" in PROBLEMS[name]]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", IMAGES[::6])
def test_right(name, direction):
    check(PROBLEMS[name], direction, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", [*NAMES[1::8], "1d", "1d-stride"])
def test_right_with_channels_first(name, direction):
    check(PROBLEMS[name], direction, NARROW, layout="nchw")


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("dtype, splits", [("f16", 3), ("f32 tf32", 1), ("i8*i8>i32", 2)])
def test_layouts_may_differ(layout, direction, dtype, splits):
    if dtype[0] == "i" and direction != "fprop":
        pytest.skip("i8 to i32 is a forward pass")
    dtype, _, precision = dtype.partition(" ")
    tile = Tile(64, 64, 2, 2, 64 if dtype[0] == "i" else 32, 3, splits=splits)
    # Whole vectors of channels and groups of few take turns: each is a kernel to compile.
    texts = "n2 c8 h7 w9 k24 r3 s3 stride2,1 pad1", "n2 c10 h4 w4 k6 r3 s3 pad1 g2"
    check(f"{texts[(LAYOUTS.index(layout) + splits) % 2]} {precision}", direction, tile, dtype, layout)


def test_explain_shows_what_is_copied():
    problem = make("n1 c8 h4 w4 k8 r3 s3 pad1", "dgrad", "f16", "nchw")
    candidate = with_knobs(ENGINE, problem, SMALL)
    steps = steps_of(problem, this_device(), candidate)
    assert steps[:2] == ("copy dy from nchw to nhwc", "copy w from nchw to nhwc")
    assert steps[2].startswith("run cuda.igemm")
    assert candidate.workspace >= 2 * (prod(problem.y_shape) + prod(problem.w_shape))
    pointwise = make("n1 c8 h4 w4 k8 r1 s1", "fprop", "f16", "nhwc*nchw>nhwc")
    assert not with_knobs(ENGINE, pointwise, SMALL).workspace  # one tap: either layout


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("knobs", [replace(SMALL, splits=2), replace(NARROW, splits=5, rows_first=True)], ids=str)
@pytest.mark.parametrize("name", ["209-channels", "stride-and-dilation", "3d-everything"])
def test_right_with_other_tiles_and_splits(name, knobs, direction):
    check(PROBLEMS[name], direction, knobs)


# Channels of whole vectors, several steps and tiles: what most layers are.
LAYERS = (
    "n2 c64 h9 w7 k72 r3 s3 pad1",
    "n1 c72 h8 w8 k40 r3 s3 stride2 pad1",
    "n1 c32 h7 w6 k48 r5 s5 pad2",
    "n1 c16 h7 w6 k24 r7 s7 pad3",
    "n3 c96 h5 w5 k64 r1 s1",
    "n1 c64 h6 w5 k32 r3 s3 pad2 dil2",
    "n1 c64 h9 w8 k64 r4 s3 stride3,2 pad1:0,2:1",
    "n1 c32 d4 h5 w6 k40 t3 r3 s3 pad1",
    "n1 c64 h6 w6 k96 r3 s3 pad1 g2",
)


# Fewer channels than a vector or a step has: up to 32, up to 64 and more taps, phases that meet no tap at all.
FEW = (
    "n2 c3 h9 w8 k5 r3 s3 stride2 pad1",
    "n1 c5 h8 w9 k3 r7 s7 stride2 pad3",
    "n1 c1 h11 w10 k4 r9 s9 pad4",
    "n2 c4 w40 k1 s7 pad3",
    "n1 c12 h7 w7 k6 r2 s2 stride3 g2",
    "n1 c6 d4 h5 w5 k10 t2 r3 s3 stride1,2,2 pad1 g2",
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", FEW)
def test_right_with_few_channels(text, direction):
    check(text, direction, SMALL, layout="nchw" if " w40" in text else "nhwc")


@pytest.mark.parametrize("layout", ["nhwc", "nhwc*nhwc>nchw"])
@pytest.mark.parametrize("shape", [(96, 128, 2, 2, 32, 3), (128, 160, 4, 2, 64, 3), (128, 192, 2, 4, 32, 3)])
def test_right_with_tiles_that_are_no_powers_of_two(shape, layout):
    for direction in ("fprop",) if shape[1] > 128 else ("fprop", "dgrad"):
        check("n2 c32 h9 w8 k72 r3 s3 pad1", direction, Tile(*shape), layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("taps", [1, 9])  # fewer steps than are asked for ahead, and more
def test_right_where_registers_are_scarce(direction, taps):
    text = f"n1 c72 h3 w10 k80 r1 s{taps} pad0,{taps // 2}"
    for tile in (Tile(128, 256, 2, 4, 64, 3), Tile(256, 128, 4, 2, 64, 3)):
        traits = ENGINE.sources(make(text, direction, "f16", "nhwc"), device_for("sm_90a"), tile)[0].traits
        assert "drains = true;" in traits
        assert "scarce = true;" in traits
        check(text, direction, tile)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_where_results_are_larger_than_the_ring(direction, splits):
    check("n1 c128 h5 w8 k128 r1 s3", direction, Tile(128, 128, 2, 2, 32, 3, splits=splits))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", sweep(LAYERS))
def test_right_on_layers(text, direction):
    check(text, direction, Tile(64, 64, 2, 2, 32, 3))
    if text in LAYERS[::4]:
        check(text, direction, replace(Tile(32, 128, 1, 4, 64, 4), splits=3), "bf16")


# Each is a kernel to compile: odd channels once in dgrad.
CASES = [
    (text, direction, layout, splits)
    for text in ("n1 c9 h5 w5 k7 r3 s3 pad1", "n1 c24 h4 w5 k12 r3 s3 stride2 pad1 g3")
    for direction in ("fprop", "dgrad")
    for layout, splits in (("nhwc", 1), ("nhwc", 3), ("nchw", 1))
    if direction == "fprop" or " c24" in text or (layout, splits) == ("nhwc", 1)
]


@pytest.mark.parametrize("at", range(len(CASES)))
@pytest.mark.parametrize(
    "first, second", [("+bias+relu", "+bias+residual+relu"), ("+mul(s.a)", "+=sub(tanh(t.b),max(acc,c.a))")]
)
def test_the_epilogue_is_part_of_the_kernel(at, first, second):
    (text, direction, layout, splits), epilogue = CASES[at], (first, second)[at % 2]
    check(f"{text} {epilogue}", direction, replace(SMALL, splits=splits), layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("knobs", [SMALL, NARROW, Tile(64, 128, 2, 2, 32, 3)])
@pytest.mark.parametrize(
    "text",
    [
        "n2 c24 h9 w7 k40 r3 s3 stride2 pad1",
        "n1 c32 h6 w5 k48 r3 s3 pad1 g2",
        "n1 c128 h3 w5 k128 r3 s3 pad1 g2",  # groups of whole boxes
        "n1 c96 h4 w5 k88 r3 s3 pad1",  # as many steps as it comes beside the first ones for
        "n3 c136 w47 k200 s1",
    ],
)
def test_a_residual_comes_beside_the_steps(text, direction, knobs):
    problem = make(f"{text} +bias+residual+relu", direction, "f16", "nhwc")
    candidate = with_knobs(ENGINE, problem, knobs)
    old, new = (ENGINE.sources(problem, device_for(arch), knobs)[0].traits for arch in ("sm_80", "sm_90a"))
    assert "held = 2;" in old
    assert "held = 2;" in new
    boxed = knobs.columns >= 64 and (direction == "fprop" or max(problem.stride) == 1)
    boxed &= problem.groups == 1 or problem.result_channels // problem.groups % knobs.columns == 0
    assert "boxed = false;" in old
    assert f"boxed = {str(boxed).lower()};" in new
    assert f"shares = {str(boxed).lower()};" in new
    check_engine(ENGINE, problem, candidate=candidate)


def test_boxes_come_where_the_list_of_a_dgrad_lay():
    problem = make("n1 c64 h6 w5 k4 r3 s3 pad1 +bias+residual+relu", "dgrad", "f16", "nhwc")
    knobs = Tile(64, 64, 2, 2, 32, 3)
    traits = ENGINE.sources(problem, device_for("sm_90a"), knobs)[0].traits
    assert "listed = 64;" in traits
    assert "shares = true;" in traits
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


def test_two_tensors_are_read_behind_the_sums():
    for direction in ("fprop", "dgrad"):
        problem = make("n2 c24 h9 w7 k40 r3 s3 stride2 pad1 +=add(add(acc,t.a),t.b)", direction, "f16", "nhwc")
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, SMALL))


def test_the_search_begins_with_what_is_right():
    for direction in DIRECTIONS:
        problem = make(LAYERS[0], direction, "f16", "nhwc")
        for candidate in islice(candidates(ENGINE, problem), 2):
            check_engine(ENGINE, problem, candidate=candidate)


@pytest.mark.parametrize("direction, k", [("fprop", 24), ("dgrad", 8), ("dgrad", 40)])
def test_the_batch_changes_no_bit_unless_sums_are_split(direction, k):
    whole, part = (make(f"n{n} c40 h6 w7 k{k} r3 s3 pad1", direction, "f16", "nhwc") for n in (5, 2))
    a, b, _ = tensors(whole)
    results = []
    for problem, x, knobs in (
        (whole, a, Tile(64, 64, 2, 2, 64, 3)),
        (part, a[:2].contiguous(memory_format=torch.channels_last), SMALL),
    ):
        assert ENGINE.traits(problem, knobs).batch_invariant
        run = run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs), inputs=(x, b, ()))
        results.append(run.out)
    assert torch.equal(results[0][:2], results[1])
    assert not ENGINE.traits(whole, replace(SMALL, splits=2)).batch_invariant


def test_refusals():
    def reason(text: str, direction: str = "fprop", dtype: str = "f16") -> str:
        return refusal(ENGINE, make(text, direction, dtype, "nhwc"))

    small = "n1 c8 h5 w5 k8 r3 s3"
    wide = reason(small, dtype="f64")
    assert wide.startswith("dtypes are f64*f64*f64; wanted one of f16 to f16 or f32, ")
    steps = reason("n1 c8 h50 w50 k8 r3 s3 stride17", "dgrad")
    assert steps == "stride is (17, 17); wanted at most 16 in dgrad"
    old = ", ".join(ENGINE.refusals(make(small, "fprop", "f16", "nhwc"), device_for("sm_75")))
    assert old == "the device is sm_75; its products are those of sm_80 and later"


def test_the_default_spills_nowhere():
    for arch in ("sm_80", "sm_90a", "sm_120"):
        device = device_for(arch)
        for direction in DIRECTIONS:
            problem = make("n16 c64 h56 w56 k64 r3 s3 pad1", direction, "f16", "nhwc")
            tile = next(iter(ENGINE.knobs(problem, device)))
            for source in ENGINE.sources(problem, device, tile):
                assert not any(found.spills for found in jit.usage(source, arch)), (arch, tile)


EXACT = ("", "+bias+relu", "+bias+residual+leaky_relu(0.25)", "+mul(c.a)+add(t.b)+clamp(-1,2)", "+max(s.floor)")


@settings(max_examples=25)
@given(problem=problems(dtypes=("f16",), epilogues=st.sampled_from(EXACT).map(Epilogue.parse)))
def test_right_on_random_problems(problem: Problem):
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, SMALL))
