"""cuda.pixels: 1x1 convolutions past filters that stay, checked on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import openconv.cuda.pixels as module
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.pixels import Pixels, PixelTile
from openconv.problem import Problem
from tests.support import accepts, check_engine, check_fused, make, refusal, this_device

ENGINE = Pixels()
# Pixels that end inside of a tile, results that end inside of a box and of a tile of columns, several tiles of columns.
SHAPES = (
    "n2 c64 h9 w11 k64 r1 s1",
    "n1 c128 h5 w7 k72 r1 s1",
    "n3 c64 d2 h5 w4 k200 t1 r1 s1",
    "n2 c192 h8 w8 k320 r1 s1",
)
FUSIONS = (
    "+bias+relu",
    "+bias+residual+relu",
    "+mul(s.a)+leaky_relu(0.2)",
    "+relu_backward(t.y)",
    "+=select(cmp_gt(acc,t.y),acc,c.b)",
)
FUSED = ("x+scale+bias+relu", "stats", "x+scale+bias+relu +bias stats", "+residual stats", "x+relu +bias+residual+relu")


def check(text: str, tile: PixelTile | None = None) -> None:
    problem = Problem.parse(text)
    check_fused(ENGINE, problem, tile or ENGINE.knobs(problem, this_device())[0])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("text", SHAPES)
def test_right(text, direction, dtype):
    if direction == "dgrad":  # the input has k channels then
        text = text.replace("c", "_").replace("k", "c").replace("_", "k")
    problem = make(text, direction, dtype, "nhwc")
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem)


@pytest.mark.parametrize("text", [
    "n2 c64 h56 w56 k64 r1 s1 stride2", "n3 c128 h14 w14 k72 r1 s1 stride2", "n1 c64 h29 w15 k64 r1 s1 stride3,2",
    "n1 c64 h5 w140 k64 r1 s1 stride2", "n2 c64 h16 w16 k64 r1 s1 stride1,2",
])  # fmt: skip
def test_right_where_pixels_are_left_out(text):
    for fusion in ("", "+bias+residual+relu", "x+scale+bias+relu stats"):
        check(f"fprop {text} f16 nhwc {fusion}".strip())


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_right_with_epilogues(fusion, direction):
    check(f"{direction} n2 c64 h9 w9 k64 r1 s1 f16 nhwc {fusion}")


@pytest.mark.parametrize("fusion", FUSED)
def test_right_with_all_that_is_fused(fusion):
    for sizes in ("n2 c64 h9 w9 k72", "n1 c192 h10 w9 k64"):
        check(f"fprop {sizes} r1 s1 f16 nhwc {fusion}")


@pytest.mark.parametrize("tile", [
    PixelTile(64, 2, 2, 1, 2), PixelTile(64, 5, 2, 1, 2), PixelTile(128, 3, 3, 1, 3), PixelTile(256, 2, 1, 2, 2),
    PixelTile(128, 2, 2, 2, 4), PixelTile(192, 1, 4, 2, 2), PixelTile(64, 6, 2, 1, 3),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("fusion", ["+bias+residual+relu", "x+scale+bias+relu stats"])
def test_right_with_tiles(tile, fusion, monkeypatch):
    """More tiles of pixels than places for them: few multiprocessors."""
    device = replace(device_for("sm_90a"), threads=2)
    kept = module._workers
    monkeypatch.setattr(module, "_workers", lambda problem, _, tile: kept(problem, device, tile))
    check(f"fprop n3 c128 h14 w13 k256 r1 s1 f16 nhwc {fusion}", tile)


@pytest.mark.parametrize(
    "text, words",
    [
        ("fprop n1 c64 h8 w8 k64 r3 s3 pad1 f16 nhwc", "filter is (3, 3); wanted 1"),
        ("dgrad n1 c64 h8 w8 k64 r1 s1 stride2 f16 nhwc", "stride is (2, 2); wanted 1"),
        ("fprop n1 c64 d8 h8 w8 k64 t1 r1 s1 stride2 f16 nhwc", "stride is (2, 2, 2); wanted 1"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 f16 nchw", "wanted images in nhwc"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 f32 nhwc", "wanted f16 or bf16"),
        ("fprop n1 c60 h8 w8 k64 r1 s1 f16 nhwc", "has 60 channels; wanted a multiple of 64"),
        ("fprop n1 c64 h8 w8 k60 r1 s1 f16 nhwc", "has 60 channels; wanted a multiple of 8"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 g2 f16 nhwc", "groups is 2"),
        ("wgrad n1 c64 h8 w8 k64 r1 s1 f16 nhwc", "the pass is wgrad"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 f16 nhwc +bias+keep+relu", "other results"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 f16 nhwc +add(t.a)+mul(t.b)", "several tensors"),
        ("fprop n1 c8192 h8 w8 k64 r1 s1 f16 nhwc", "do not fit"),
    ],
)
def test_what_it_refuses(text, words):
    assert words in refusal(ENGINE, Problem.parse(text))


@pytest.mark.parametrize("fusion", ["", "+bias+residual+relu", "x+scale+bias+relu stats", "+relu_backward(t.y)"])
@pytest.mark.parametrize("sizes", ["c64 k256", "c256 k64", "c128 k128", "c512 k64"])
def test_compiles_well(sizes, fusion):
    """Without spills, and without products that wait for each other."""
    c, k = sizes.split()
    problem = Problem.parse(f"fprop n64 {c} h56 w56 {k} r1 s1 f16 nhwc {fusion}".strip())
    device = device_for("sm_90a")
    for knobs in ENGINE.knobs(problem, device)[:2]:
        for source in ENGINE.sources(problem, device, knobs):
            said = jit._compile(source, "sm_90a", verbose=True)[1]
            assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, knobs
            assert "serialized" not in said, knobs
