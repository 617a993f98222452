"""cuda.fold_columns and cuda.pad_channels on the GPU: layers of networks for video, with what they are for inside."""

from __future__ import annotations

import pytest

from openconv.cuda.fold_columns import FoldColumns, _inside, _ways
from openconv.cuda.pad_channels import PadChannels
from openconv.engine import engine_named
from openconv.problem import DIRECTIONS
from openconv.rewrites.base import Choice, Rewritten, settings_of
from tests.support import (
    accepts,
    candidates,
    check_determinism,
    check_engine,
    check_plan,
    core_of,
    make,
    this_device,
    with_knobs,
)

FOLD, PAD = FoldColumns(), PadChannels()
FEW = (
    "n2 c3 d6 h24 w32 k64 t3 r7 s7 stride1,2,2 pad1,3,3",
    "n2 c3 d8 h30 w32 k8 t5 r7 s7 stride2,2,2 pad2,3,3",
    "n2 c8 d8 h28 w56 k8 t3 r1 s1 pad1,0,0",
    "n2 c8 d4 h28 w56 k8 t1 r3 s3 pad0,1,1",
    "n2 c8 d12 h14 w28 k16 t7 r1 s1 stride4,1,1 pad3,0,0",
    "n3 c4 h33 w48 k24 r5 s4 pad2:1,3:3 dil1,2",
)
ODD = (
    "n2 c45 d4 h28 w28 k64 t3 r1 s1 pad1,0,0",
    "n2 c64 d3 h28 w28 k230 t1 r3 s3 stride1,2,2 pad0,1,1",
    "n4 c128 h64 w64 k3 r3 s3 pad1",
    "n4 c320 h32 w32 k4 r3 s3 pad1",
    "n2 c54 d4 h28 w28 k24 t1 r1 s1",
)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32 tf32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", FEW)
def test_columns_as_channels(text, direction, dtype):
    """In every way, by each of the engines that it is for."""
    dtype, _, precision = dtype.partition(" ")
    problem, ran = make(f"{text} {precision}".strip(), direction, dtype, "nhwc"), 0
    for way in _ways(core_of(problem)):
        inner = _inside(core_of(problem), way)
        for name in ("cuda.igemm_sm90", "cuda.igemm"):
            for knobs in list(settings_of(engine_named(name), inner, this_device(), ("fold_columns",)))[:2]:
                chosen = Rewritten(way, (Choice(name, knobs),))
                check_engine(FOLD, problem, candidate=with_knobs(FOLD, problem, chosen))
                ran += 1
    assert ran


@pytest.mark.parametrize("epilogue", ["+bias+relu", "+bias+residual+relu"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_columns_with_epilogues(direction, epilogue):
    for text in FEW[:4]:
        check_plan(make(f"{text} {epilogue}", direction, "f16", "nhwc"), engine=FOLD.name)


def test_columns_have_the_same_bits_again():
    for direction in DIRECTIONS:
        check_determinism(FOLD, make(FEW[0], direction, "f16", "nhwc"))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32 tf32"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", ODD)
def test_padded_channels(text, direction, dtype):
    dtype, _, precision = dtype.partition(" ")
    problem = make(f"{text} {precision}".strip(), direction, dtype, "nhwc")
    if dtype == "f32" and direction == "wgrad":
        assert not accepts(PAD, problem)  # there is none that would want it
        return
    assert accepts(PAD, problem)
    found: dict[str, list] = {}
    for candidate in candidates(PAD, problem):
        found.setdefault(candidate.knobs.inner[0].engine, []).append(candidate)
    for name in ("cuda.igemm_sm90", "cuda.pixels", "cuda.gemm_1x1"):
        for candidate in found.get(name, [])[:2]:
            check_engine(PAD, problem, candidate=candidate)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_padded_channels_with_epilogues(direction):
    for text in ODD[:3]:
        check_plan(make(f"{text} +bias+residual+relu", direction, "f16", "nhwc"), engine=PAD.name)
