"""cuda.igemm: implicit GEMMs of all passes, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.igemm import Igemm, Tile
from openconv.epilogue import Epilogue
from openconv.problem import Problem
from tests.support import (
    PROBLEMS,
    candidates,
    check_engine,
    make,
    problems,
    refusal,
    run_engine,
    tensors,
    with_knobs,
)

ENGINE = Igemm()
DIRECTIONS = ("fprop", "dgrad", "wgrad")
SMALL = Tile(32, 64, 1, 2, 32, 3)
NARROW = Tile(64, 32, 2, 1, 32, 3)


def check(text: str, direction: str, knobs: Tile, dtype: str = "f16", layout: str = "nhwc") -> None:
    problem = make(text, direction, dtype, layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


IMAGES = [name for name in PROBLEMS if " h" in PROBLEMS[name] and "depthwise-" not in name]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", IMAGES)
def test_right(name, direction):
    check(PROBLEMS[name], direction, SMALL)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("knobs", [replace(SMALL, splits=2), NARROW, replace(NARROW, depth=64, splits=5)], ids=str)
@pytest.mark.parametrize("name", ["3x3", "209-channels", "stride-and-dilation", "3d-everything", "octets-unpadded"])
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


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", LAYERS)
def test_right_on_layers(text, direction):
    check(text, direction, Tile(64, 64, 2, 2, 32, 3))
    check(text, direction, replace(Tile(32, 128, 1, 4, 64, 4), splits=3), "bf16")


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", [PROBLEMS["3x3"], PROBLEMS["stride-and-dilation"], *LAYERS[:3], LAYERS[7]])
def test_right_in_f32_of_products_in_tf32(text, direction, precision):
    check(f"{text} {precision}", direction, Tile(64, 64, 2, 2, 32, 3), "f32")
    check(f"{text} {precision}", direction, Tile(32, 64, 1, 2, 16, 3, splits=3), "f32")


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("text", [PROBLEMS["3x3"], PROBLEMS["209-channels"], *LAYERS[:4], LAYERS[8]])
def test_integers_are_exact(text, splits):
    check(text, "fprop", Tile(64, 64, 2, 2, 64, 3, splits=splits), "i8*i8>i32")


@pytest.mark.parametrize(
    "direction, dtypes", [("fprop", "f16*f16>f32"), ("dgrad", "f32*bf16>bf16"), ("wgrad", "f16*f32>f16")]
)
@pytest.mark.parametrize("splits", [1, 2])
def test_results_may_be_wider(direction, dtypes, splits):
    check("n2 c16 h6 w7 k24 r3 s3 stride2 pad1", direction, replace(SMALL, splits=splits), dtypes)
    if direction != "wgrad":
        check("n1 c9 h5 w5 k7 r3 s3 pad1 +bias+residual+relu", direction, replace(SMALL, splits=splits), dtypes)


def test_tf32x3_keeps_what_is_infinite_and_what_is_large():
    problem = make("n1 c8 h4 w4 k8 r1 s1 tf32x3", "fprop", "f32", "nhwc")
    a, b, _ = tensors(problem)
    a[0, 0, 0, 0], a[0, 0, 1, 1], a[0, 0, 2, 2] = torch.inf, torch.nan, 3.4e38
    b[:, 0] = 2.0**-10
    out = run_engine(
        ENGINE, problem, candidate=with_knobs(ENGINE, problem, Tile(64, 64, 2, 2, 32, 3)), inputs=(a, b, ())
    ).out
    assert out[0, :, 0, 0].isinf().all()
    assert out[0, :, 1, 1].isnan().all()
    torch.testing.assert_close(out[0, :, 2, 2], torch.full((8,), 3.4e38 * 2.0**-10))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "text", ["n2 c16 h6 w7 k24 r3 s3 stride2 pad1", "n1 c9 h5 w5 k7 r3 s3 pad1", "n1 c24 h4 w5 k12 r3 s3 pad1 g3"]
)
@pytest.mark.parametrize(
    "epilogue", ["+bias+relu", "+bias+residual+relu", "+=sub(tanh(t.b),max(acc,c.a))", "+mul(s.a)"]
)
def test_the_epilogue_is_part_of_the_kernel(text, direction, splits, epilogue):
    check(f"{text} {epilogue}", direction, replace(SMALL, splits=splits))


def test_the_search_begins_with_what_is_right():
    for direction in DIRECTIONS:
        problem = make(LAYERS[0], direction, "f16", "nhwc")
        for candidate in islice(candidates(ENGINE, problem), 4):
            check_engine(ENGINE, problem, candidate=candidate)


def test_the_batch_changes_no_bit_unless_sums_are_split():
    whole, part = (make(f"n{n} c40 h6 w7 k24 r3 s3 pad1", "fprop", "f16", "nhwc") for n in (5, 2))
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
    def reason(text: str, direction: str = "fprop", dtype: str = "f16", layout: str = "nhwc") -> str:
        return refusal(ENGINE, make(text, direction, dtype, layout))

    small = "n1 c8 h5 w5 k8 r3 s3"
    wide = reason(small, dtype="f64")
    assert wide == "dtypes are f64*f64*f64; wanted f16, bf16, f32 or i8, and f32 or i32 as wider results"
    assert "formed of tf32" in reason(small, dtype="f32")
    assert reason(small, layout="nchw") == "layouts are nchw*nchw*nchw; wanted nhwc for all tensors"
    steps = reason("n1 c8 h50 w50 k8 r3 s3 stride17", "dgrad")
    assert steps == "stride is (17, 17); wanted at most 16 in dgrad"
    old = ", ".join(ENGINE.refusals(make(small, "fprop", "f16", "nhwc"), device_for("sm_75")))
    assert old == "the device is sm_75; its products are those of sm_80 and later"


def test_the_default_spills_nowhere():
    for arch in ARCHITECTURES:
        device = device_for(arch)
        if device.capability < 80:
            continue
        for direction in DIRECTIONS:
            problem = make("n16 c64 h56 w56 k64 r3 s3 pad1", direction, "f16", "nhwc")
            tile = next(iter(ENGINE.knobs(problem, device)))
            for source in ENGINE.sources(problem, device, tile):
                assert not any(found.spills for found in jit.usage(source, arch)), (arch, tile)


EXACT = ("", "+bias+relu", "+bias+residual+leaky_relu(0.25)", "+mul(c.a)+add(t.b)+clamp(-1,2)", "+max(s.floor)")


@settings(max_examples=40)
@given(
    problem=problems(
        dtypes=("f16",), ranks=(2, 3), layouts=("nhwc",), epilogues=st.sampled_from(EXACT).map(Epilogue.parse)
    )
)
def test_right_on_random_problems(problem: Problem):
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, SMALL))
