"""cuda.igemm_sm90, windows as boxes: checked on the CPU, where boxes come and products run as late as they may."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from openconv.cuda import igemm_sm90_windows as windows
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm_sm90 import IgemmSm90
from openconv.cuda.igemm_sm90_windows import Windows
from openconv.plan import make_plan
from openconv.problem import Problem
from openconv.reference import random_inputs
from openconv.select import Policy, rank
from tests.support import accepts, check_engine, check_fused, make, refusal, sweep, this_device, with_knobs

ENGINE = IgemmSm90()
ROWS, COLUMNS = Windows(64, 64, 1, 1, 3, 2), Windows(48, 64, 1, 1, 3, 2, True)
TILES = (
    Windows(64, 64, 1, 1, 2, 2), Windows(128, 128, 2, 1, 3, 3), Windows(128, 64, 1, 2, 4, 2),
    Windows(64, 192, 1, 1, 2, 2),
    Windows(16, 64, 1, 1, 4, 2, True), Windows(96, 128, 2, 1, 2, 3, True), Windows(32, 256, 2, 2, 3, 2, True),
    Windows(80, 192, 3, 1, 2, 2, True), Windows(64, 64, 1, 1, 3, 2, False, 1, 2),
    Windows(64, 64, 2, 1, 3, 2), Windows(128, 64, 2, 2, 4, 3), Windows(64, 64, 2, 1, 4, 2, True),
    Windows(32, 128, 2, 2, 3, 2, True),
)  # fmt: skip
# Pixels and channels that end inside of tiles and steps, every rank, all that moves windows.
SHAPES = (
    "n2 c64 h7 w9 k64 r3 s3 pad1",
    "n3 c72 h6 w5 k40 r3 s3 pad1 stride2",
    "n1 c136 h9 w8 k72 r5 s5 pad2:1,0:3",
    "n2 c64 h9 w11 k64 r3 s3 pad2 dil2",
    "n2 c64 h5 w5 k64 r2 s3 pad0 stride1,2 dil2,1",
    "n2 c128 w37 k64 s4 pad3:0",
    "n2 c8 w50 k64 s3 pad1 stride2",
    "n1 c64 d4 h5 w6 k64 t3 r3 s3 pad1",
    "n2 c64 d5 h4 w5 k64 t3 r1 s2 pad1,0,1 stride2",
    "n2 c192 h6 w6 k192 r1 s1",
    "n2 c128 h5 w6 k192 r3 s3 pad1 g2",
    "n2 c96 h5 w6 k96 r3 s3 pad1 g3",
    "n2 c72 h5 w4 k64 r3 s3 pad3",
    "n2 c64 w41 k72 s8 pad2 stride4",
)


def check(text: str, tile: Windows) -> None:
    check_fused(ENGINE, Problem.parse(text), tile)


@pytest.fixture
def few(monkeypatch):
    """Three multiprocessors: blocks take several tiles, boxes of the next come while results of the last leave."""
    device = replace(device_for("sm_90a"), threads=3)
    monkeypatch.setattr(
        windows.Work, "blocks",
        lambda work, _: min(work.tiles, device.threads * work.tile.residents) * work.tile.cluster,
    )  # fmt: skip


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_right(at, direction, few):
    """Each pass of a shape with another tile: every one is a kernel to compile."""
    text, tile = SHAPES[at], (ROWS, COLUMNS)[(at + (direction == "dgrad")) % 2]
    if direction == "dgrad":  # its depth is k
        text = text.replace("c", "_").replace("k", "c").replace("_", "k")
    problem = make(text, direction, "f16", "nhwc")
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("at", sweep(range(len(TILES))))
def test_right_with_tiles(at, few):
    texts = ["fprop n3 c72 h8 w9 k264 r3 s3 pad1", "dgrad n2 c264 h7 w9 k72 r3 s3 pad1"]
    texts[1] += " stride2" if TILES[at].teams == 1 else ""  # tiles of all teams have as many steps
    problem = Problem.parse(f"{texts[at % 2]} bf16 nhwc")
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, TILES[at]))


@pytest.mark.parametrize("splits", [3, 9])
@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_right_in_splits(tile, splits, few):
    """Steps that are no multiple of the splits; epilogues are computed where the splits are added up."""
    check("fprop n2 c72 h5 w6 k72 r3 s3 pad1 f16 nhwc +bias+residual+relu", replace(tile, splits=splits))
    check("dgrad n1 c64 h5 w6 k136 r3 s3 pad1 bf16 nhwc", replace(tile, splits=splits))
    check("fprop n1 c64 d3 h5 w6 k64 t2 r3 s2 pad1 f16 nhwc", replace(tile, splits=splits))


@pytest.mark.slow
@pytest.mark.parametrize("tile", [replace(ROWS, buffers=4), TILES[5], TILES[10], TILES[11]], ids=[
    "rows", "columns", "teams", "teams, columns"
])  # fmt: skip
@pytest.mark.parametrize("fusion", [
    "+mul(s.a)+leaky_relu(0.2)", "+relu_backward(t.y)", "+=select(cmp_gt(acc,t.y),acc,c.b)",
    "+add(t.a)+mul(t.b)+sub(c.c)", "+keep+bias+residual+keep+relu",
])  # fmt: skip
def test_right_with_epilogues(fusion, tile, few):
    check(f"fprop n2 c64 h9 w9 k136 r3 s3 pad1 f16 nhwc {fusion}", tile)


@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_right_with_epilogues_of_results_that_lie_apart(tile, few):
    for fusion in ("+bias+residual+relu", "+relu_backward(t.y)", "+bias+keep+relu"):
        check(f"dgrad n2 c72 h5 w6 k64 r3 s3 pad1 stride2 bf16 nhwc {fusion}", tile)


@pytest.mark.parametrize("tile", [TILES[1], TILES[6], TILES[10], TILES[12]], ids=[
    "rows", "columns", "teams", "teams, columns"
])  # fmt: skip
def test_right_with_statistics(tile, few):
    for fusion in ("+bias+keep+relu stats", "+residual stats"):
        check(f"fprop n2 c64 h7 w9 k136 r3 s3 pad1 f16 nhwc {fusion}", tile)
    check("fprop n2 c128 h7 w5 k144 r1 s1 g2 bf16 nhwc stats", tile)


@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("text", [
    "fprop n2 c64 h7 w9 k72 r3 s3 pad1 f16*f16>f32", "dgrad n2 c72 h7 w9 k64 r3 s3 pad1 stride2 f32*bf16>bf16",
    "fprop n2 c40 h7 w9 k72 r3 s3 pad1 stride2 f32 nhwc tf32", "dgrad n2 c40 h7 w5 k72 r3 s3 pad1 f32 nhwc tf32",
    "dgrad n2 c40 h7 w5 k72 r3 s3 pad1 stride2 f32 nhwc tf32", "dgrad n1 c64 h7 w5 k64 r3 s3 pad1 g2 f32 nhwc tf32",
    "fprop n2 c80 h7 w9 k48 r3 s3 pad1 i8*i8>i32", "fprop n2 c144 h7 w9 k64 r3 s3 pad1 i8*i8>f32",
    "fprop n2 c80 h7 w9 k48 r3 s3 pad1 e4m3*e4m3>f16", "fprop n2 c144 h5 w5 k64 r3 s3 pad1 e5m2*e4m3>f32",
])  # fmt: skip
def test_right_in_other_types(text, tile, few):
    problem = Problem.parse(text if "nhwc" in text else f"{text} nhwc")
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("fusion", ["", "+bias+residual+relu"])
def test_right_with_tensors_that_lie_otherwise(fusion):
    for layouts in ("nchw*nhwc>nhwc", "nhwc*nchw>nhwc", "nchw", "nhwc*nhwc>nchw"):
        for splits in (1, 2):
            problem = Problem.parse(f"fprop n2 c72 h7 w9 k64 r3 s3 pad1 f16 {layouts} {fusion}".strip())
            check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, replace(ROWS, splits=splits)))
    problem = Problem.parse("dgrad n2 c72 h7 w9 k64 r3 s3 pad1 f32 nhwc*nchw>nchw tf32")
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, ROWS))


@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_right_where_no_tap_meets_a_pixel(tile):
    """A stride larger than the image leaves one phase, which had no steps and waited for ever."""
    problem = Problem.parse("dgrad n3 c128 d3 h1 w3 k64 t1 r1 s3 stride1,2,1 pad0:2,1:0,0:2 dil1,1,2 f16 nhwc +bias")
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


def test_right_as_chosen():
    for text in ("fprop n2 c64 h7 w9 k64 r3 s3 pad1", "dgrad n1 c64 h14 w14 k64 r3 s3 pad1 stride2"):
        check_engine(ENGINE, Problem.parse(f"{text} f16 nhwc"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_what_is_not_finite_goes_where_its_windows_are(tile, value):
    """And no further: channels behind the last and rows behind the last are zeros on both sides."""
    problem = Problem.parse("fprop n2 c72 h7 w9 k72 r3 s3 pad1 f16 nhwc")
    plan = make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, tile))
    inputs = random_inputs(problem)
    inputs.a[1, 71, 6, 8] = value
    found = plan(inputs.a, inputs.b, inputs.operands)
    touched = torch.zeros(2, 72, 7, 9, dtype=torch.bool)
    touched[1, :, 5:, 7:] = True
    assert torch.equal(~torch.isfinite(found), touched)


def test_groups_do_not_see_each_other():
    """A box of 32 channels brings those of the next group too, which are not multiplied."""
    problem = Problem.parse("fprop n1 c96 h5 w6 k96 r3 s3 pad1 g3 f16 nhwc")
    for tile in (ROWS, COLUMNS):
        plan = make_plan(problem, this_device(), Policy(), with_knobs(ENGINE, problem, tile))
        inputs = random_inputs(problem)
        inputs.a[:, 32:64] = float("inf")
        found = plan(inputs.a, inputs.b, inputs.operands)
        assert torch.isfinite(found[:, :32]).all()
        assert torch.isfinite(found[:, 64:]).all()
        assert not torch.isfinite(found[:, 32:64]).any()


@pytest.mark.parametrize(
    "text, words",
    [
        ("fprop n1 c64 h8 w8 k64 r3 s3 pad1 f32 nhwc", "precision is ieee; wanted tf32"),
        ("fprop n1 c60 h8 w8 k64 r3 s3 f16 nhwc", "C is 60; wanted a multiple of 8"),
        ("fprop n1 c64 h8 w8 k60 r3 s3 f16 nhwc", "K is 60; wanted a multiple of 8"),
        ("fprop n1 c48 h8 w8 k64 r3 s3 g2 f16 nhwc", "a group has 24 channels of depth; wanted a multiple of 16 up to"),
        (
            "fprop n1 c192 h8 w8 k64 r3 s3 g2 f16 nhwc",
            "a group has 96 channels of depth; wanted a multiple of 16 up to",
        ),
        ("dgrad n1 c64 h8 w8 k64 r3 s3 stride3 f16 nhwc", "stride is (3, 3); wanted a product of at most 8"),
        ("fprop n1 c64 h64 w64 k64 r3 s3 stride9 f16 nhwc", "stride is (9, 9); wanted at most 8"),
        ("dgrad n1 c64 h8 w8 k64 r3 s3 i8*i8>i8 nhwc", "dtypes are"),
        ("fprop n1 c64 h300 w300 k64 r3 s3 dil140 f16 nhwc", "maps of windows of 2 axes hold"),
        ("fprop n1 c64 d40 h40 w40 k64 t3 r3 s3 pad17 f16 nhwc", "maps of windows of 3 axes hold"),
        ("fprop n1 c64 h8 w8 k64 r3 s3 f16 nchw +bias+keep+relu", "other results, in nchw"),
        ("fprop n1 c64 h8 w8 k64 r3 s3 f16 nhwc x+scale+bias+relu", "boxes go from memory to them as they are"),
    ],
)
def test_what_it_refuses(text, words):
    assert words in refusal(ENGINE, Problem.parse(text))


def test_is_chosen_where_products_are_the_limit():
    for text in ("n64 c256 h14 w14 k256 r3 s3 pad1", "n1 c512 h7 w7 k512 r3 s3 pad1"):
        for direction in ("fprop", "dgrad", "wgrad"):
            problem = Problem.parse(f"{direction} {text} f16 nhwc")
            accepted, _ = rank(problem, device_for("sm_90a"), Policy(tuning="off"))
            assert accepted[0].engine.name == ENGINE.name


# Blocks of a cluster that have sums of several boxes each, of one, and of none; a tensor of the epilogue; phases.
CLUSTERS = (
    ("fprop n2 c200 h9 w9 k72 r3 s3 pad1 f16 nhwc +bias+residual+relu", Windows(64, 64, 1, 1, 3, 2, True, cluster=2)),
    ("fprop n2 c200 h9 w9 k136 r1 s1 f16 nhwc", Windows(128, 128, 2, 1, 3, 2, cluster=4)),
    ("fprop n2 c264 h5 w5 k72 r3 s3 pad1 f16 nhwc +bias", Windows(96, 128, 2, 1, 4, 2, True, cluster=8)),
    ("dgrad n2 c72 h9 w9 k520 r3 s3 stride2 pad1 f16 nhwc", Windows(64, 64, 1, 1, 3, 2, cluster=2)),
    ("fprop n2 c128 h9 w9 k80 r3 s3 pad1 i8*i8>i32 nhwc", Windows(64, 64, 1, 1, 3, 2, cluster=2)),
    ("fprop n2 c600 h5 w5 k72 r1 s1 bf16 nhwc", Windows(64, 64, 1, 1, 3, 2, cluster=2, splits=2)),
)


@pytest.mark.parametrize("text, tile", CLUSTERS)
def test_right_in_clusters(text, tile, few):
    problem = Problem.parse(text)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


def test_fused_in_clusters(few):
    """Another result of the epilogue, and a tensor, in boxes that one block of two stores."""
    problem = Problem.parse("fprop n2 c136 h9 w9 k72 r3 s3 pad1 f16 nhwc +bias+residual+keep+relu")
    for tile in (Windows(64, 64, 1, 1, 4, 2, True, cluster=2), Windows(128, 128, 2, 1, 3, 2, cluster=2)):
        check_fused(ENGINE, problem, tile)


def test_says_where_time_goes():
    problem, device = Problem.parse("fprop n64 c256 h14 w14 k256 r3 s3 pad1 f16 nhwc"), device_for("sm_90a")
    [reason] = ENGINE.reasons(problem, device, Windows(192, 128, 2, 1, 4, 2, True))
    assert "132 tiles on 132 places take 1 turns" in reason


COMPILED = (
    ("n64 c256 h56 w56 k256 r3 s3 pad1", Windows(128, 256, 2, 1, 4, 2)),
    ("n64 c256 h56 w56 k256 r3 s3 pad1", Windows(256, 128, 2, 2, 4, 2)),
    ("n64 c256 h14 w14 k256 r3 s3 pad1", Windows(192, 128, 2, 1, 4, 2, True)),
    ("n64 c512 h7 w7 k512 r3 s3 pad1", Windows(96, 256, 2, 2, 4, 2, True)),
    ("n64 c128 h28 w28 k128 r3 s3 pad1", Windows(192, 128, 3, 1, 4, 2)),
    ("n64 c256 h56 w56 k64 r1 s1", Windows(192, 64, 1, 1, 3, 2, True, 1, 2)),
    ("n64 c256 h56 w56 k64 r3 s3 pad1 stride2", Windows(256, 64, 2, 2, 4, 2)),
)


@pytest.mark.parametrize(
    "direction, fusion", [("dgrad", "+relu_backward(t.y)"), ("fprop", "+bias+residual+relu stats")]
)
@pytest.mark.parametrize("sizes, tile", COMPILED)
def test_compiles_well(sizes, tile, direction, fusion):
    """Without spills, and without products that wait for each other."""
    work = windows.Work(Problem.parse(f"{direction} {sizes} f16 nhwc {fusion}".strip()), tile)
    said = jit._compile(work.source, "sm_90a", verbose=True)[1]
    assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
    assert "serialized" not in said
    assert "ignored" not in said  # that registers change hands
