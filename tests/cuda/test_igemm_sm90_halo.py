"""cuda.igemm_sm90, the input once for all taps: checked on the CPU, where boxes come as late as they may."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
import torch

from openconv.cuda import igemm_sm90_halo as halo
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm_sm90 import IgemmSm90
from openconv.cuda.igemm_sm90_halo import Halo
from openconv.plan import make_plan
from openconv.problem import Problem
from openconv.reference import random_inputs
from openconv.select import Policy
from tests.support import accepts, check_engine, check_fused, make, sweep, this_device, with_knobs

ENGINE = IgemmSm90()
# Two teams past filters that stay, a single one past a ring of them.
STAY, COME = Halo(2, 64, 2, 1, 2, 0), Halo(3, 64, 1, 1, 2, 3)
TILES = (
    Halo(1, 64, 1, 1, 2, 2), Halo(4, 64, 3, 1, 3, 4), Halo(2, 128, 2, 1, 2, 3), Halo(3, 128, 2, 2, 2, 4),
    Halo(2, 128, 4, 1, 3, 3), Halo(2, 192, 3, 1, 2, 2), Halo(2, 256, 2, 2, 2, 3), Halo(4, 64, 2, 1, 4, 0),
    Halo(2, 128, 2, 1, 2, 0), Halo(3, 64, 1, 1, 2, 3, 2),
)  # fmt: skip
# Lines and channels that end inside of tiles and steps; paddings that share columns of a line, and that do not.
SHAPES = (
    "n2 c64 h7 w9 k64 r3 s3 pad1",
    "n2 c72 h6 w5 k40 r5 s5 pad2",
    "n1 c136 h9 w8 k72 r3 s3",
    "n2 c64 h7 w6 k64 r3 s3 pad0:2,1:0",
    "n2 c64 h7 w6 k64 r3 s3 pad2:0,0:2",
    "n1 c64 h5 w6 k64 r3 s4 pad1:2,3:1",
    "n2 c64 h9 w11 k64 r3 s3 pad2 dil2",
    "n1 c64 h9 w8 k64 r2 s3 pad1 dil3,2",
    "n2 c64 h5 w9 k64 r1 s3 pad0,1",
    "n2 c64 h9 w5 k64 r3 s1 pad1,0",
    "n2 c64 h5 w4 k64 r2 s2 pad3:4",
    "n1 c64 h3 w4 k64 r3 s3 pad3",
    "n2 c64 w37 k72 s4 pad3:0",
    "n2 c128 h5 w6 k128 r3 s3 pad1 g2",
)
STRIDED = (
    "n2 c64 h8 w10 k64 r3 s3 pad1 stride2",
    "n2 c72 h7 w9 k40 r3 s3 pad1 stride2",
    "n1 c64 h11 w9 k64 r5 s5 pad2 stride2",
    "n1 c64 h9 w9 k64 r3 s3 pad2 dil2 stride2",
    "n2 c64 h9 w8 k64 r3 s3 pad1:0,0:2 stride1,2",
    "n1 c64 h8 w9 k64 r2 s2 stride2",
    "n1 c128 h9 w7 k64 r3 s3 pad0,1 stride2,1 dil3,1",
    "n2 c64 w21 k64 s5 pad2 stride2",
)


def fitting(problem: Problem, tile: Halo) -> Halo:
    """Filters that are too many to stay come."""
    return tile if halo.Work(problem, tile).fits else replace(tile, stages=5)


def check(text: str, tile: Halo) -> None:
    problem = Problem.parse(text)
    check_fused(ENGINE, problem, fitting(problem, tile))


def check_exactly(problem: Problem, tile: Halo) -> None:
    assert accepts(ENGINE, problem)
    assert not list(halo.refusals(problem))
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, fitting(problem, tile)))


@pytest.fixture
def few(monkeypatch):
    """Two multiprocessors: blocks take several tiles, inputs of the next come while results of the last leave."""
    device = replace(device_for("sm_90a"), threads=2)
    kept = halo.Work.blocks
    monkeypatch.setattr(halo.Work, "blocks", lambda work, _: kept(work, device))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_right(at, direction, few):
    """Each pass of a shape with another tile: every one is a kernel to compile."""
    text, tile = SHAPES[at], (STAY, COME)[(at + (direction == "dgrad")) % 2]
    if direction == "dgrad":  # its depth is k
        text = text.replace("c", "_").replace("k", "c").replace("_", "k")
    check_exactly(make(text, direction, "f16", "nhwc"), tile)


@pytest.mark.parametrize("at", range(len(STRIDED)))
def test_right_with_strides(at, few):
    """Planes of every second line and pixel, of even and of odd sizes."""
    check_exactly(make(STRIDED[at], "fprop", "f16", "nhwc"), (STAY, COME, replace(STAY, tiles=5))[at % 3])


@pytest.mark.parametrize("at", sweep(range(len(TILES))))
def test_right_with_tiles(at, few):
    texts = (
        "fprop n3 c72 h8 w9 k264 r3 s3 pad1 bf16", "dgrad n2 c264 h7 w9 k72 r3 s3 pad1 bf16",
        "fprop n2 c64 h9 w10 k136 r3 s3 pad1 stride2 f16",
    )  # fmt: skip
    check_exactly(Problem.parse(f"{texts[at % 3]} nhwc"), TILES[at])


@pytest.mark.parametrize("tile", [STAY, TILES[4]], ids=str)
@pytest.mark.parametrize("fusion", [
    "+bias+residual+relu", "+mul(s.a)+leaky_relu(0.2)", "+=select(cmp_gt(acc,t.y),acc,c.b)",
    "+add(t.a)+mul(t.b)+sub(c.c)",
])  # fmt: skip
def test_right_with_epilogues(fusion, tile, few):
    check(f"fprop n2 c64 h9 w9 k136 r3 s3 pad1 f16 nhwc {fusion}", tile)
    if fusion == "+bias+residual+relu":
        check(f"dgrad n2 c72 h5 w6 k64 r3 s3 pad1 bf16 nhwc {fusion}", tile)


@pytest.mark.parametrize("tile", [COME, TILES[3]], ids=str)
def test_right_with_statistics(tile, few):
    """Of pixels alone, not of the columns behind the ends of lines."""
    for fusion in ("stats", "+bias+residual+relu stats"):
        check(f"fprop n2 c64 h7 w9 k136 r3 s3 pad1 f16 nhwc {fusion}", tile)
    check("fprop n2 c128 h7 w5 k128 r3 s3 pad1 g2 bf16 nhwc stats", tile)
    check("fprop n2 c64 h7 w9 k72 r3 s3 pad1 stride2 f16 nhwc +bias stats", tile)


@pytest.mark.parametrize("tile", [STAY, COME], ids=["stay", "come"])
@pytest.mark.parametrize("text", [
    "fprop n2 c64 h7 w9 k72 r3 s3 pad1 f16*f16>f32", "dgrad n2 c72 h7 w9 k64 r3 s3 pad1 f32*bf16>bf16",
    "fprop n2 c40 h7 w9 k72 r3 s3 pad1 f32 nhwc tf32", "fprop n2 c80 h7 w9 k48 r3 s3 pad1 i8*i8>i32",
    "fprop n2 c144 h7 w9 k64 r3 s3 pad1 stride2 i8*i8>bf16",
])  # fmt: skip
def test_right_in_other_types(text, tile, few):
    check_exactly(Problem.parse(text if "nhwc" in text else f"{text} nhwc"), tile)


def test_right_with_inputs_that_lie_otherwise():
    for layouts in ("nchw*nhwc>nhwc", "nhwc*nchw>nhwc"):
        check_exactly(Problem.parse(f"fprop n2 c72 h7 w9 k64 r3 s3 pad1 f16 {layouts}"), STAY)


def test_right_as_chosen():
    """What fits best, of what is offered."""
    device = device_for("sm_90a")
    for text in ("fprop n2 c64 h14 w14 k64 r3 s3 pad1", "dgrad n1 c64 h7 w30 k64 r5 s5 pad2"):
        problem = Problem.parse(f"{text} f16 nhwc")
        tile = min(halo.tiles(problem, device), key=lambda t: halo.work(problem, t).estimate(device).seconds(device))
        check_exactly(problem, tile)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tile, stride", [(STAY, 1), (COME, 2)], ids=["stay", "come"])
def test_what_is_not_finite_goes_where_its_windows_are(tile, value, stride, few):
    """And no further: the columns behind the ends of lines are not pixels' neighbours, nor are tiles and images."""
    problem = Problem.parse(f"fprop n2 c72 h7 w9 k72 r3 s3 pad1 stride{stride} f16 nhwc")
    plan = make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, fitting(problem, tile)))
    for line, pixel in ((0, 0), (0, 8), (2, 8), (3, 0), (5, 8), (6, 0), (6, 8), (3, 4)):
        inputs = random_inputs(problem)
        inputs.a[0, 71, line, pixel] = value
        found = plan(inputs.a, inputs.b, inputs.operands)
        touched = torch.zeros(2, 72, 9, 11, dtype=torch.bool)
        touched[0, :, line : line + 3, pixel : pixel + 3] = True
        assert torch.equal(~torch.isfinite(found), touched[:, :, 1:8:stride, 1:10:stride]), (line, pixel)


@pytest.mark.parametrize("text, pitch", [
    ("w56 s3 pad1", 57), ("w56 s5 pad2", 58), ("w56 s3", 56), ("w56 s3 pad2:0", 58), ("w56 s3 pad0:2", 58),
    ("w56 s3 pad2 dil2", 58), ("w5 s2 pad3:4", 11), ("w9 s4 pad3:1", 12), ("w56 s3 pad1 stride2", 29),
    ("w9 s3 pad2 dil2 stride2", 6),
])  # fmt: skip
def test_lines_share_their_padding(text, pitch):
    problem = Problem.parse(f"fprop n1 c64 {text} k64 f16 nhwc")
    assert halo._pitch(problem) == pitch


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_every_pixel_sees_its_taps(direction):
    """Slots as boxes come to them, line by line and zeros behind: at a tap's shift lies what the tap reads."""
    random, checked = Random(7), 0

    def two(least: int, most: int) -> list[int]:
        return [random.randint(least, most) for _ in range(2)]

    while checked < 400:
        size, taps, pad, ends, way = two(1, 9), two(1, 4), two(0, 4), two(0, 4), two(1, 3)
        stride = random.choice(((1, 1), (2, 2), (1, 2), (2, 1))) if direction == "fprop" else (1, 1)
        if any(s + a + b < (t - 1) * w + 1 for s, a, b, t, w in zip(size, pad, ends, taps, way, strict=True)):
            continue
        problem = Problem(
            direction=direction, n=1, c=64, k=64, spatial=tuple(size), filter=tuple(taps), stride=stride,
            padding=tuple(zip(pad, ends, strict=True)), dilation=tuple(way), dtypes=("f16",) * 3, layouts=("nhwc",) * 3,
        )  # fmt: skip
        if list(halo.refusals(problem)):
            continue
        checked += 1
        work = halo.Work(problem, Halo(random.randint(1, 4), 64, 1, 1, 2, 3))
        (height, width), (p, q), (down, right) = work.images, work.results, problem.stride
        for band in range(work.bands):
            for plane in work.planes:
                slot: list[tuple[int, int] | None] = [None] * work.slot
                for row in range(work.box_lines * work.pitch):
                    line, pixel = row // work.pitch + plane.down.corner, row % work.pitch + plane.right.corner
                    line += band * work.tile.lines
                    if 0 <= line < plane.down.size and 0 <= pixel < plane.right.size:
                        slot[row] = (line * down + plane.down.remainder, pixel * right + plane.right.remainder)
                for r, s, lines, pixels in plane.taps:
                    for column in range(work.columns):
                        found = slot[column + lines * work.pitch + pixels]  # within the slot, whatever the column
                        line, pixel = divmod(column, work.pitch)
                        line += band * work.tile.lines
                        if line >= p or pixel >= q or column >= work.tile.lines * work.pitch:
                            continue
                        if direction == "fprop":
                            wanted = (line * down - pad[0] + r * way[0], pixel * right - pad[1] + s * way[1])
                        else:
                            wanted = (line + pad[0] - r * way[0], pixel + pad[1] - s * way[1])
                        inside = 0 <= wanted[0] < height and 0 <= wanted[1] < width
                        assert found == (wanted if inside else None), (str(problem), work.tile)


@pytest.mark.parametrize(
    "text, words",
    [
        ("fprop n1 c64 d4 h8 w8 k64 t3 r3 s3 f16 nhwc", "the images have 3 axes; wanted at most 2"),
        ("fprop n1 c64 h8 w8 k64 r1 s1 f16 nhwc", "filter is (1, 1); wanted 2 to 49 taps"),
        ("fprop n1 c64 h8 w8 k64 r3 s3 stride3 f16 nhwc", "stride is (3, 3); wanted at most 2"),
        ("dgrad n1 c64 h8 w8 k64 r3 s3 stride2 f16 nhwc", "stride is (2, 2); wanted at most 1"),
        ("fprop n1 c64 h8 w256 k64 r3 s3 pad1 f16 nhwc", "a line is 257 pixels with its padding"),
        ("fprop n1 c128 h8 w8 k80 r3 s3 g2 f16 nhwc", "a group has 40 channels of results; wanted a multiple of 64"),
        ("dgrad n1 c64 h8 w8 k64 r3 s3 f32 nhwc tf32", "the pass is dgrad of tf32; wanted f16 or bf16"),
        ("fprop n1 c64 h8 w8 k64 r3 s3 e4m3*e4m3>f16 nhwc", "products are of e4m3"),
        ("fprop n1 c64 h1 w8 k64 r1 s3 stride2 f16 nhwc", "the image is (1, 8); wanted at least the stride"),
    ],
)
def test_what_it_refuses(text, words):
    problem = Problem.parse(text)
    assert words in " ".join(halo.refusals(problem))
    assert not list(halo.tiles(problem, device_for("sm_90a")))


def test_offers_tiles_that_fit_the_layers_it_is_for():
    device = device_for("sm_90a")
    for text, lines, columns in (("c64 h56 w56 k64", 4, 232), ("c128 h28 w28 k128", 7, 208)):
        problem = Problem.parse(f"fprop n64 {text} r3 s3 pad1 f16 nhwc")
        works = [halo.work(problem, tile) for tile in halo.tiles(problem, device)]
        best = min(works, key=lambda work: work.estimate(device).seconds(device))
        assert (best.tile.lines, best.columns, best.tile.teams) == (lines, columns, 2)
        assert all(work.fits for work in works)


COMPILED = (
    ("n64 c64 h56 w56 k64 r3 s3 pad1", Halo(4, 64, 2, 1, 2, 0)),
    ("n64 c128 h28 w28 k128 r3 s3 pad1", Halo(7, 64, 2, 1, 3, 8)),
    ("n64 c128 h28 w28 k128 r3 s3 pad1", Halo(7, 128, 2, 1, 2, 5)),
    ("n64 c128 h28 w28 k128 r3 s3 pad1", Halo(4, 128, 2, 2, 2, 4)),
    ("n64 c256 h14 w14 k256 r3 s3 pad1", Halo(7, 128, 4, 1, 2, 4)),
    ("n64 c256 h14 w14 k256 r3 s3 pad1", Halo(7, 256, 2, 2, 2, 3)),
    ("n64 c128 h56 w56 k128 r3 s3 pad1 stride2", Halo(7, 64, 2, 1, 4, 6)),
)


@pytest.mark.parametrize("direction, fusion", [("dgrad", ""), ("fprop", "+bias+residual+relu stats")])
@pytest.mark.parametrize("sizes, tile", COMPILED)
def test_compiles_well(sizes, tile, direction, fusion):
    """Without spills, and without products that wait for each other."""
    problem = Problem.parse(f"{direction} {sizes} f16 nhwc {fusion if direction == 'fprop' else ''}".strip())
    if direction == "dgrad" and (fusion or max(problem.stride) > 1):
        return
    work = halo.Work(problem, tile)
    assert work.fits
    said = jit._compile(work.source, "sm_90a", verbose=True)[1]
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    assert "serialized" not in said
    assert "ignored" not in said  # that registers change hands
