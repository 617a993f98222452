"""cuda.patches: windows as rows of a warpgroup's products, checked on the CPU."""

from __future__ import annotations

import pytest

from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.patches import Patches, Tile
from openconv.cuda.wgmma import product
from openconv.problem import Problem
from tests.support import EPILOGUES, accepts, check_engine, check_plan, make, refusal, with_knobs

ENGINE = Patches()
# Tiles that end inside of images, filters and depths; runs of several pieces; odd numbers of results.
NCHW = (
    "n3 c3 h32 w48 k20 r16 s16 stride16",
    "n2 c1 h24 w40 k9 r8 s8 stride8",
    "n5 c2 h9 w24 k70 r3 s8 stride3,8",
    "n2 c3 d4 h16 w16 k24 t2 r8 s8 stride2,8,8",
    "n3 c5 w64 k6 s16 stride8",
    "n9 c3 h4 w6 k3 r4 s6",
)
NHWC = (
    "n3 c3 h32 w48 k20 r16 s16 stride16",
    "n2 c24 h5 w7 k13 r1 s1",
    "n2 c8 h7 w9 k34 r3 s3",
    "n1 c16 h9 w8 k7 r2 s3 stride2",
    "n2 c8 d3 h4 w5 k10 t2 r2 s2",
    "n70 c4 d2 h7 w7 k5 t2 r7 s7",
)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("text", "layout"), [(t, "nchw") for t in NCHW] + [(t, "nhwc") for t in NHWC])
def test_right_on_windows(text, layout, dtype):
    check_engine(ENGINE, make(text, "fprop", dtype, layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("tile", [Tile(64, 32, 3), Tile(128, 64, 4), Tile(192, 96, 5), Tile(64, 128, 6)], ids=str)
def test_right_with_tiles(tile, layout):
    problem = make("n3 c3 h48 w80 k72 r16 s16 stride16", "fprop", "bf16", layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


def test_the_filter_may_be_in_the_other_layout_where_it_is_the_same():
    check_engine(ENGINE, make(NHWC[1], "fprop", "f16", "nhwc*nchw>nhwc"))
    assert "layouts" in refusal(ENGINE, make(NHWC[0], "fprop", "f16", "nhwc*nchw>nhwc"))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_right_with_epilogues(epilogue, layout):
    problem = make("n2 c3 h16 w40 k11 r8 s8 stride8", "fprop", "f16", layout)
    check_plan(Problem.parse(f"{problem} {epilogue}"), engine=ENGINE.name)


def test_says_what_it_does_not_take():
    assert any("sm_90" in why for why in ENGINE.refusals(make(NCHW[0], "fprop", "bf16"), device_for("sm_80")))
    assert "wanted fprop" in refusal(ENGINE, make(NCHW[0], "dgrad", "bf16"))
    assert "padding" in refusal(ENGINE, make("n1 c8 h8 w8 k8 r3 s3 pad1", "fprop", "f16", "nhwc"))
    assert "a row of a window has 14" in refusal(ENGINE, make("n1 c3 h28 w28 k8 r14 s14 stride14", "fprop", "f16"))
    assert "a row of the image has 20" in refusal(ENGINE, make("n1 c3 h16 w20 k8 r8 s8 stride8", "fprop", "f16"))
    assert not accepts(ENGINE, make(NCHW[0], "fprop", "f32"))


def test_default_tiles_fill_the_multiprocessors():
    device = device_for("sm_90a")
    for text in ("n16 c3 h224 w224 k768 r16 s16 stride16", "n8 c3 d16 h224 w224 k768 t2 r16 s16 stride2,16,16"):
        problem = make(text, "fprop", "bf16")
        tiles = ENGINE.knobs(problem, device)
        assert tiles[0].rows * tiles[0].columns >= 64 * 96
        for tile in tiles[:3]:
            [source] = ENGINE.sources(problem, device, tile)
            assert all(usage.spills == 0 for usage in jit.usage(source, device.arch)), tile


def test_widths_of_a_product():
    assert "m64n96k16.f32.bf16.bf16" in product(96, "bf16")
    for wrong in (4, 12, 264):
        with pytest.raises(ValueError, match="multiple of 8"):
            product(wrong, "f16")
    with pytest.raises(ValueError, match="f16 or bf16"):
        product(64, "f32")
