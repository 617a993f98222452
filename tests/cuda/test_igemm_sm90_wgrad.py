"""cuda.igemm_sm90, the filter's gradient: checked on the CPU, where boxes come and products run as late as they may."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from openconv.cuda import igemm_sm90_wgrad as wgrad
from openconv.cuda import jit
from openconv.cuda.device import CudaDevice, device_for
from openconv.cuda.igemm_sm90 import IgemmSm90
from openconv.cuda.igemm_sm90_wgrad import Filters
from openconv.problem import Problem
from tests.support import (
    accepts,
    check_determinism,
    check_engine,
    check_locality,
    make,
    refusal,
    this_device,
    with_knobs,
)

ENGINE = IgemmSm90()
TILE = Filters(64, 2, 1, 1, 1, 32, 3)
TILES = (
    Filters(64, 1, 1, 1, 1, 64, 2), Filters(64, 4, 1, 1, 1, 32, 3), Filters(128, 2, 2, 1, 1, 32, 4),
    Filters(128, 3, 1, 1, 2, 32, 2, 3), Filters(192, 1, 3, 1, 1, 16, 3), Filters(256, 1, 2, 1, 2, 32, 2),
    Filters(64, 9, 3, 3, 1, 32, 2), Filters(64, 6, 2, 2, 1, 16, 3), Filters(128, 4, 2, 2, 2, 32, 2),
    Filters(64, 2, 1, 1, 1, 128, 2, residents=2),
)  # fmt: skip
# Pixels, filters and channels that end inside of steps and tiles, several taps and several pieces of channels in a
# tile, every rank, all that moves windows.
SHAPES = (
    "n2 c64 h7 w9 k64 r3 s3 pad1",
    "n3 c72 h9 w8 k40 r3 s3 pad1 stride2",
    "n1 c136 h9 w8 k72 r2 s3 pad2:1,0:3",
    "n2 c64 h9 w11 k64 r3 s3 pad2 dil2",
    "n2 c8 h9 w9 k200 r2 s3 stride1,2 dil2,1",
    "n2 c128 w37 k64 s4 pad3:0",
    "n3 c64 w50 k8 s3 pad1 stride3",
    "n2 c8 w50 k72 s9 dil3",
    "n1 c64 d4 h5 w6 k64 t3 r2 s1 pad1,0,0",
    "n2 c16 d5 h4 w5 k64 t2 r1 s2 pad1,0,1 stride2",
    "n2 c192 h6 w6 k136 r1 s1",
    "n2 c144 h5 w6 k80 r3 s1 pad1 g2",
    "n2 c48 h5 w4 k24 r1 s3 pad3 g3",
)


@pytest.fixture
def few(monkeypatch):
    """Three multiprocessors: blocks take several tiles, boxes of the next come while results of the last leave."""
    device = replace(device_for("sm_90a"), threads=3)
    monkeypatch.setattr(
        wgrad.Work,
        "blocks",
        lambda work, _: min(work.tiles, device.threads * work.tile.residents) * work.tile.cluster,
    )


def check(text: str, tile: Filters) -> None:
    problem = Problem.parse(text)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("text", SHAPES)
def test_right(text, splits, few):
    assert accepts(ENGINE, make(text, "wgrad", "f16", "nhwc"))
    check(f"wgrad {text} f16 nhwc", replace(TILE, splits=splits))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_right_with_tiles(tile, few):
    check("wgrad n2 c72 h8 w9 k136 r3 s3 pad1 bf16 nhwc", tile)


@pytest.mark.parametrize("splits", [2, 3, 9])
def test_right_in_splits(splits, few):
    """Steps that are no multiple of the splits, groups whose sums lie side by side."""
    check("wgrad n3 c64 h10 w11 k64 r1 s3 pad1 f16 nhwc", replace(TILE, splits=splits))
    check("wgrad n3 c32 h10 w11 k48 r1 s3 pad1 g2 bf16 nhwc", replace(TILES[2], splits=splits))


@pytest.mark.parametrize(
    "tile",
    [
        Filters(128, 3, 2, 1, 1, 32, 8, cluster=2, splits=2), Filters(64, 2, 1, 1, 1, 16, 8, cluster=8),
        Filters(128, 2, 1, 1, 2, 32, 6, cluster=4),
    ],
    ids=str,
)  # fmt: skip
def test_right_in_clusters(tile, few):
    check("wgrad n4 c72 h9 w9 k136 r3 s3 pad1 f16 nhwc", tile)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtypes", ["f16*f32>f16", "bf16*f32>bf16", "bf16"])
def test_right_in_types(dtypes, splits, few):
    check(f"wgrad n2 c72 h7 w9 k72 r3 s1 pad1 {dtypes} nhwc", replace(TILE, splits=splits))


@pytest.mark.parametrize("layouts", ["nchw*nhwc>nchw", "nhwc*nchw>nhwc", "nchw"])
def test_right_with_copies(layouts):
    """Of images before, of the filter behind it."""
    for splits in (1, 2):
        check(f"wgrad n2 c64 h7 w9 k72 r3 s3 pad1 f16 {layouts}", replace(TILE, splits=splits))


@pytest.mark.parametrize("text", ["n2 c64 h6 w7 k64 r3 s3 pad1 f16", "n2 c80 h6 w7 k80 r1 s3 g2 bf16"])
def test_default_knobs(text):
    """Right, the same bits again, and what is not finite reaches what it has a product in, and nothing else."""
    problem = Problem.parse(f"wgrad {text} nhwc")
    check_engine(ENGINE, problem)
    check_locality(ENGINE, problem, value=math.inf)
    check_locality(ENGINE, problem, value=math.nan)


def test_same_bits_again():
    check_determinism(ENGINE, Problem.parse("wgrad n5 c64 h8 w8 k64 r1 s1 f16 nhwc"))


def test_says_when_splits_are_too_many():
    with pytest.raises(ValueError, match="splits is 3; wanted at most 2, as many as there are steps"):
        wgrad.Work(Problem.parse("wgrad n1 c64 h8 w8 k64 r1 s1 f16 nhwc"), replace(TILE, splits=3))


@pytest.mark.parametrize(
    "text, words",
    [
        ("wgrad n1 c64 h8 w8 k64 r3 s3 pad1 f32 nhwc tf32", "wanted f16 or bf16"),
        ("wgrad n1 c60 h8 w8 k64 r3 s3 pad1 f16 nhwc", "C is 60; wanted a multiple of 8"),
        ("wgrad n1 c64 h8 w8 k24 r3 s3 pad1 g2 f16 nhwc", "K/G is 12; wanted a multiple of 8"),
        ("wgrad n1 c64 h99 w99 k64 r1 s1 stride9 f16 nhwc", "wanted at most 8"),
        ("wgrad n1 c64 h300 w300 k64 r3 s3 pad130 f16 nhwc", "windows begin and end at"),
        ("wgrad n1 c64 d40 h9 w9 k64 t5 r1 s1 dil9 f16 nhwc", "reach 36"),
        ("wgrad n1 c64 h8 w8 k64 r3 s3 pad1 f16 nhwc x+relu", "stands before the products"),
    ],
)
def test_what_it_refuses(text, words):
    assert words in refusal(ENGINE, Problem.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "n64 c64 h56 w56 k64 r3 s3 pad1", "n64 c256 h56 w56 k64 r1 s1", "n64 c256 h14 w14 k256 r3 s3 pad1",
        "n64 c128 h56 w56 k128 r3 s3 pad1 stride2", "n64 c512 h7 w7 k512 r3 s3 pad1", "n1 c256 h14 w14 k256 r3 s3 pad1",
    ],
)  # fmt: skip
def test_tiles_fill_the_device(text):
    """All offered tiles fit; the first one leaves few multiprocessors without work, and no split without steps."""
    problem, device = Problem.parse(f"wgrad {text} f16 nhwc"), this_device()
    found = ENGINE.knobs(problem, device)
    for knobs in found:
        work = wgrad.Work(problem, knobs)
        assert work.fits, knobs
        assert knobs.splits == 1 or work.steps >= 4 * knobs.splits, knobs
    assert any(knobs.splits == 1 for knobs in found)
    assert isinstance(device, CudaDevice)
    blocks = wgrad.Work(problem, found[0]).blocks(device)
    assert blocks > 0.7 * device.threads or problem.n == 1, found[0]


@pytest.mark.parametrize("tile", [
    Filters(128, 4, 2, 1, 1, 64, 4), Filters(128, 4, 2, 1, 1, 64, 4, splits=7), Filters(192, 3, 3, 1, 1, 64, 3),
    Filters(256, 2, 2, 1, 2, 64, 4, splits=4), Filters(256, 3, 2, 1, 2, 64, 3, splits=4),
    Filters(64, 9, 3, 3, 1, 32, 4, splits=44), Filters(64, 4, 1, 1, 1, 64, 5, splits=44),
    Filters(64, 8, 2, 2, 1, 32, 5), Filters(128, 6, 2, 2, 2, 32, 6, splits=4), Filters(128, 3, 1, 1, 2, 64, 4),
    Filters(64, 3, 1, 1, 1, 64, 2, splits=44, residents=2), Filters(128, 2, 1, 1, 2, 64, 2, residents=2),
], ids=str)  # fmt: skip
def test_compiles_well(tile):
    """Without spills, and without products that wait for each other."""
    text = "n8 c256 d8 h14 w14 k256 t3 r3 s3 pad1 bf16" if tile.splits > 1 else "n64 c256 h14 w14 k256 r3 s3 pad1 f16"
    work = wgrad.Work(Problem.parse(f"wgrad {text} nhwc"), tile)
    assert work.fits
    said = jit._compile(work.source, "sm_90a", verbose=True)[1]
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, tile
    assert "serialized" not in said, tile
