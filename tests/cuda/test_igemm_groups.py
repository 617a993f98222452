"""cuda.igemm_groups: products of several groups at once, checked on the CPU."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm_groups import IgemmGroups, Tile
from openconv.plan import steps_of
from openconv.problem import DIRECTIONS, Problem
from tests.support import (
    candidates,
    check_engine,
    check_locality,
    make,
    reference,
    refusal,
    run_engine,
    tensors,
    this_device,
    with_knobs,
)

ENGINE = IgemmGroups()
# Groups of 2 to 32 channels; other numbers of results than of channels; strides, dilation, uneven padding; one axis.
PROBLEMS = {
    "n2 c32 h9 w7 k32 r3 s3 pad1 g8": Tile(8, 1, 4, 7, 4, 1, 2),
    "n3 c16 h5 w5 k16 r3 s3 pad1 g8": Tile(8, 2, 5, 5, 5, 2, 3),
    "n1 c64 h8 w9 k64 r3 s3 stride2 pad1 g4": Tile(2, 1, 3, 4, 3, 1, 2),
    "n2 c64 h6 w5 k64 r3 s3 pad1 g2": Tile(1, 1, 3, 5, 3, 1, 3),
    "n1 c64 h9 w9 k32 r3 s2 stride1,2 pad2:1,0:1 dil2,1 g4": Tile(2, 1, 2, 5, 2, 1, 2),
    "n2 c64 h7 w7 k32 r1 s1 stride2 g4": Tile(2, 2, 4, 4, 2, 2, 2),
    "n2 c32 w37 k32 s5 pad4:0 dil2 g4": Tile(2, 1, 1, 20, 1, 2, 2),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", PROBLEMS)
def test_right(text, direction):
    problem = make(text, direction, "f16", "nhwc")
    if reason := refusal(ENGINE, problem):
        assert "registers" in reason or "whole groups" in reason
        pytest.skip(reason)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, PROBLEMS[text]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_bf16_with_filters_channels_first(direction):
    problem = make("n2 c32 h7 w7 k32 r3 s3 stride2 pad1 g4", direction, "bf16", "nhwc*nchw>nhwc")
    for candidate in islice(candidates(ENGINE, problem), 2):
        check_engine(ENGINE, problem, candidate=candidate)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc*nhwc>nchw"])
def test_right_with_channels_first(direction, layout):
    problem = make("n2 c32 h7 w6 k32 r3 s3 pad1 g8", direction, "f16", layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, Tile(8, 1, 4, 6, 4, 1, 2)))


def test_explain_shows_what_is_copied():
    problem = make("n2 c32 h7 w6 k32 r3 s3 pad1 g8", "fprop", "f16", "nchw")
    steps = steps_of(problem, this_device(), with_knobs(ENGINE, problem, Tile(8, 1, 4, 6, 4, 1, 2)))
    assert steps[:2] == ("copy x from nchw to nhwc", "copy y from nhwc to nchw")


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("epilogue", ["+bias+relu", "+bias+residual+relu", "+=sub(tanh(t.b),max(acc,c.a))"])
def test_the_epilogue_is_part_of_the_kernel(direction, epilogue):
    for layout in ("nhwc", "nchw"):
        problem = make(f"n1 c32 h6 w5 k32 r3 s3 stride1,2 pad1 g4 {epilogue}", direction, "f16", layout)
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, Tile(4, 1, 4, 3, 4, 1, 2)))


def test_what_is_not_finite_stays_where_it_is():
    """A pixel that a tile has beyond the image's adds nothing to the filter's gradient, whatever lies beside it."""
    problem = make("n1 c16 h5 w5 k16 r3 s3 g4", "wgrad", "f16", "nhwc")
    a, b, _ = tensors(problem)
    a[0, 0, 4, 4] = torch.inf
    candidate = with_knobs(ENGINE, problem, Tile(4, 1, 4, 4, 2, 2, 2))
    out = run_engine(ENGINE, problem, candidate=candidate, inputs=(a, b, ())).out
    assert not out[:4, 0, 2, 2].isfinite().any()
    out[:4, 0, 2, 2] = 0
    assert out.isfinite().all()


def test_refusals():
    def reason(text: str, direction: str = "fprop", dtype: str = "f16") -> str:
        return refusal(ENGINE, make(text, direction, dtype, "nhwc"))

    small = "n1 c32 h9 w9 k32 r3 s3 g8"
    assert reason(small, dtype="f32") == "dtypes are f32*f32*f32; wanted f16 or bf16 alone"
    odd = reason("n1 c24 h9 w9 k24 r3 s3 g2")
    assert odd == "a group has 12 channels and 12 results; wanted sixteen to be whole groups of both"
    assert reason("n1 c24 h9 w9 k24 r3 s3 g6") == "groups is 6; wanted a multiple of 4"
    single = "groups is 1 of 16 channels; wanted several, of 2 or more"
    assert reason("n1 c16 h9 w9 k16 r3 s3") == single
    assert "registers hold fewer" in reason("n1 c256 h9 w9 k256 r3 s3 g2")
    assert reason("n1 c32 h19 w19 k32 r3 s3 stride5 g8", "dgrad") == "stride is (5, 5); wanted at most 4 in dgrad"
    unseen = "no window has a pixel of the image, whose gradient is zeros"
    assert reason("n1 c16 w1 k16 s1 stride2 pad1:0 g8", "dgrad") == unseen
    old = ", ".join(ENGINE.refusals(make(small, "fprop", "f16", "nhwc"), device_for("sm_75")))
    assert old == "the device is sm_75; its products are those of sm_80 and later"


@pytest.mark.parametrize(
    "text", ["n64 c128 h56 w56 k128 r3 s3 pad1 g32", "n64 c1024 h14 w14 k1024 r3 s3 stride2 pad1 g32"]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_default_spills_nowhere(text, direction):
    for arch in ("sm_80", "sm_90a"):
        device = device_for(arch)
        problem = make(text, direction, "f16", "nhwc")
        tile = next(iter(ENGINE.knobs(problem, device)))
        for source in ENGINE.sources(problem, device, tile):
            assert not any(found.spills for found in jit.usage(source, arch)), (arch, tile)


@st.composite
def grouped(draw) -> Problem:
    each, groups = draw(st.sampled_from([(2, 8), (4, 4), (4, 8), (8, 4), (16, 2), (16, 3), (32, 2)]))
    taps = draw(st.tuples(*[st.integers(1, 3)] * 2))
    sizes = [f"{name}{draw(st.integers(3, 9))}" for name in "hw"]
    pads = ",".join(f"{draw(st.integers(0, 2))}:{draw(st.integers(0, 2))}" for _ in range(2))
    stride = ",".join(str(draw(st.integers(1, 3))) for _ in range(2))
    text = f"n{draw(st.integers(1, 3))} c{each * groups} {sizes[0]} {sizes[1]} k{each * groups} r{taps[0]} s{taps[1]}"
    return make(f"{text} stride{stride} pad{pads} g{groups}", draw(st.sampled_from(DIRECTIONS)), "f16", "nhwc")


@settings(max_examples=12)
@given(problem=grouped())
def test_right_on_random_problems(problem: Problem):
    if not refusal(ENGINE, problem):
        check_engine(ENGINE, problem, candidate=next(candidates(ENGINE, problem)))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text, tile", [
    ("n2 c16 h7 w6 k16 r3 s3 pad1 g8", Tile(8, 2, 4, 6, 2, 2, 2)),
    ("n1 c32 h8 w9 k32 r3 s3 stride2 pad1 g8", Tile(4, 1, 4, 5, 4, 1, 2)),
    ("n1 c32 h5 w5 k32 r3 s3 pad1 g2", Tile(2, 1, 5, 5, 5, 1, 2)),
])  # fmt: skip
def test_what_is_not_finite_stays_in_its_group(text, tile, direction, value):
    """Groups share products, in which those of another group are multiplied by zero."""
    problem = make(text, direction, "f16", "nhwc")
    check_locality(ENGINE, problem, value=value)
    candidate = with_knobs(ENGINE, problem, tile)
    a, b, _ = tensors(problem)
    clean, spoilt = a.clone(), a.clone()
    spoilt[0, 0, 2, 2] = value
    runs = [run_engine(ENGINE, problem, candidate=candidate, inputs=(x, b, ())).out for x in (clean, spoilt)]
    finite = runs[1].isfinite()
    assert not finite.all()
    assert torch.equal(runs[0][finite], runs[1][finite])
    wanted = reference(problem, spoilt, b).to(torch.float16)
    assert torch.equal(runs[1].isnan() | runs[1].isinf(), wanted.isnan() | wanted.isinf())
