"""cuda.patch_rows: windows out of rows of the image as a warpgroup's products, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.patch_rows import PatchRows, RowTile
from openconv.problem import Problem
from tests.support import EPILOGUES, accepts, check_engine, check_plan, make, refusal, with_knobs

ENGINE = PatchRows()
# Lines of windows that begin and end inside of a tile, filters that end inside of one, several images in a tile, images
# that are larger than their windows, windows that overlap, more lines than lanes.
WINDOWS = (
    "n3 c3 h80 w48 k20 r16 s16 stride16",
    "n5 c1 h32 w32 k9 r16 s16 stride16",
    "n2 c2 h9 w72 k70 r4 s16 stride3,8",
    "n2 c3 d5 h34 w48 k24 t2 r16 s16 stride2,16,16",
    "n3 c5 w128 k6 s64 stride8",
    "n1 c1 h70 w32 k3 r32 s32 stride32",
)
LAST = (
    "n3 c3 h80 w48 k20 r16 s16 stride16",
    "n2 c3 d5 h34 w48 k24 t2 r16 s16 stride2,16,16",
    "n3 c16 h9 w7 k40 r2 s3 stride1,2",
    "n4 c8 h12 w11 k7 r4 s4",
    "n2 c16 h8 w40 k301 r4 s1 stride4,1",
)


def alone(problem: Problem) -> RowTile:
    """The default tile, sharing no copies: the emulator runs one block at a time."""
    return replace(ENGINE.knobs(problem, device_for("sm_90a"))[0], filter_blocks=1, window_blocks=1)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("text", "layout"), [(t, "nchw") for t in WINDOWS] + [(t, "nhwc") for t in LAST])
def test_right_on_windows(text, layout, dtype):
    problem = make(text, "fprop", dtype, layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, alone(problem)))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "tile", [RowTile(64, 32, 2, 1, 1), RowTile(128, 64, 3, 1, 1), RowTile(192, 80, 5, 1, 1)], ids=str
)
def test_right_with_tiles(tile, layout):
    problem = make("n3 c3 h48 w80 k72 r16 s16 stride16", "fprop", "bf16", layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_right_with_epilogues(epilogue, layout, monkeypatch):
    problem = make("n2 c1 h16 w48 k11 r16 s16 stride16", "fprop", "f16", layout)
    tile = alone(problem)
    monkeypatch.setattr(PatchRows, "knobs", lambda *_: (tile,))
    check_plan(Problem.parse(f"{problem} {epilogue}"), engine=ENGINE.name)


def test_says_what_it_does_not_take():
    assert any("sm_90" in why for why in ENGINE.refusals(make(WINDOWS[0], "fprop", "bf16"), device_for("sm_80")))
    assert "wanted fprop" in refusal(ENGINE, make(WINDOWS[0], "dgrad", "bf16"))
    assert "padding" in refusal(ENGINE, make("n1 c1 h16 w16 k8 r16 s16 pad1", "fprop", "f16"))
    assert "a row of a window has 8" in refusal(ENGINE, make("n1 c3 h16 w16 k8 r8 s8 stride8", "fprop", "f16"))
    assert "a row of a window has 80" in refusal(ENGINE, make("n1 c5 h16 w16 k8 r16 s16", "fprop", "f16", "nhwc"))
    assert "a window has 3 rows" in refusal(ENGINE, make("n1 c3 h16 w16 k8 r3 s16 stride16", "fprop", "f16"))
    assert "a row of the image has 20" in refusal(ENGINE, make("n1 c3 h16 w20 k8 r16 s16 stride16", "fprop", "f16"))
    assert "do not fit" in refusal(ENGINE, make("n1 c1 h16 w16000 k8 r16 s16 stride16", "fprop", "f16"))
    assert not accepts(ENGINE, make(WINDOWS[0], "fprop", "f32"))


def test_default_tiles_fill_the_multiprocessors():
    device = device_for("sm_90a")
    for text in ("n16 c3 h224 w224 k768 r16 s16 stride16", "n8 c3 d16 h224 w224 k768 t2 r16 s16 stride2,16,16"):
        problem = make(text, "fprop", "bf16")
        for tile in ENGINE.knobs(problem, device)[:3]:
            assert tile.filters * tile.windows >= 128 * 128
            [source] = ENGINE.sources(problem, device, tile)
            assert all(usage.spills == 0 for usage in jit.usage(source, device.arch)), tile
