"""cuda.igemm_sm90, products of f32 as three of tf32: checked on the CPU, as exact as f32, and infinities where they
should be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from openconv.cuda import igemm_sm90_windows as windows
from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Igemm
from openconv.cuda.igemm_sm90 import IgemmSm90, tiles
from openconv.cuda.igemm_sm90_windows import Windows
from openconv.cuda.launch import pack
from openconv.cuda.tf32_pairs import Pairs
from openconv.problem import Problem
from tests.cuda.test_igemm_sm90 import few as few
from tests.emulator import EmulatedLaunch
from tests.support import accepts, check_engine, check_fused, make, reference, refusal, run_engine, tensors, with_knobs

ENGINE = IgemmSm90()
ROWS, COLUMNS = Windows(64, 64, 1, 1, 3, 2), Windows(48, 64, 1, 1, 4, 2, True)
SHAPES = (
    "n2 c40 h5 w7 k72 r3 s3 pad1",
    "n3 c72 h6 w5 k40 r3 s3 pad1 stride2",
    "n1 c64 h5 w6 k64 r3 s3 pad1 g2",
    "n2 c40 h7 w5 k64 r1 s1",
    "n2 c8 w50 k64 s4 pad3:0 dil2",
)


def problem_of(text: str, direction: str = "fprop") -> Problem:
    return make(f"{text} tf32x3", direction, "f32", "nhwc")


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("at", range(len(SHAPES)))
def test_right(at, direction, few):
    problem = problem_of(SHAPES[at], direction)
    assert accepts(ENGINE, problem)
    tile = (ROWS, COLUMNS)[(at + (direction == "dgrad")) % 2]
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize(
    "tile",
    [
        Windows(64, 64, 1, 1, 2, 2), Windows(128, 64, 1, 2, 5, 2), Windows(96, 128, 2, 1, 3, 3, True),
        replace(ROWS, splits=3), replace(COLUMNS, splits=5), replace(COLUMNS, cluster=2),
        Windows(64, 64, 1, 1, 4, 2, cluster=2, splits=2),
    ],
    ids=str,
)  # fmt: skip
def test_right_with_tiles(tile, few):
    """Splits and clusters share steps, of three products each."""
    for text, direction in (("n2 c72 h8 w7 k136 r3 s3 pad1", "fprop"), ("n2 c136 h7 w6 k72 r3 s3 pad1", "dgrad")):
        problem = problem_of(text, direction)
        check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile))


@pytest.mark.parametrize("tile", [ROWS, COLUMNS, replace(ROWS, splits=2)], ids=["rows", "columns", "splits"])
def test_right_with_epilogues(tile, few):
    for text in (
        "fprop n2 c40 h5 w6 k72 r3 s3 pad1 f32 nhwc tf32x3 +bias+residual+relu",
        "dgrad n2 c72 h5 w6 k40 r3 s3 pad1 stride2 f32 nhwc tf32x3 +relu_backward(t.y)",
        "fprop n2 c40 h5 w6 k72 r3 s3 pad1 f32 nchw tf32x3 +bias+residual+relu",
        "dgrad n2 c40 h5 w6 k72 r1 s1 f32 nchw*nhwc>nchw tf32x3",
    ):
        if tile.splits == 1 or "stride" not in text:
            check_fused(ENGINE, Problem.parse(text), tile)


@pytest.mark.parametrize("text", SHAPES[:2])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_as_exact_as_f32(text, direction):
    """Within twice the error of the same sums in f32; those of tf32 have a thousand times as much."""
    errors = []
    for engine, precision in ((Igemm(), "ieee"), (ENGINE, "tf32x3"), (ENGINE, "tf32")):
        run = run_engine(engine, make(f"{text} {precision}", direction, "f32", "nhwc"))
        errors.append((run.out.double() - reference(run.core, run.a, run.b)).abs().max().item())
    assert errors[1] <= 2 * errors[0]
    assert errors[2] > 100 * errors[0]


@pytest.mark.parametrize("tile", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_keeps_what_is_infinite_and_what_is_large(tile):
    problem = problem_of("n1 c8 h4 w4 k8 r1 s1")
    a, b, _ = tensors(problem)
    a[0, 0, 0, 0], a[0, 0, 1, 1], a[0, 0, 2, 2], a[0, 1, 3, 3] = torch.inf, torch.nan, 3.4e38, -torch.inf
    b[:, 0], b[:, 1] = 2.0**-10, 1.5  # without low parts, which an infinity is not to be multiplied by
    a[0, 0, 3, 3], b[7, 2], b[6, 3] = torch.inf, -torch.inf, 0
    a[0, 2] = torch.where(a[0, 2] == 0, 1.0, a[0, 2])
    a[0, 3, 0, 1] = torch.inf
    out = run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile), inputs=(a, b, ())).out
    wanted = reference(problem, a, b)
    torch.testing.assert_close(out[0, :7, 2, 2], torch.full((7,), 3.4e38 * 2.0**-10))
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
    assert torch.equal(out[out.isinf()].double(), wanted[out.isinf()])
    assert wanted[0, 0, 0, 0] == torch.inf
    assert wanted[0, 7, 2, 2].isinf()
    assert wanted[0, 6, 0, 1].isnan()  # 0 times an infinity
    assert wanted[0, 0, 3, 3].isnan()  # an infinity less an infinity


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_goes_where_its_windows_are(value):
    problem = problem_of("n2 c40 h7 w9 k72 r3 s3 pad1")
    a, b, _ = tensors(problem)
    a[1, 39, 6, 8] = value
    for tile in (ROWS, COLUMNS):
        out = run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile), inputs=(a, b, ())).out
        touched = torch.zeros(2, 72, 7, 9, dtype=torch.bool)
        touched[1, :, 5:, 7:] = True
        assert torch.equal(~torch.isfinite(out), touched)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_rows_and_columns_have_the_same_bits(direction):
    """Pairs made in registers, beside a number that needs care or not, are those of the copy."""
    problem = problem_of("n2 c72 h5 w7 k40 r3 s3 pad1", direction)
    a, b, _ = tensors(problem)
    a[1, 3, 4, 5] = 3.4028e38
    b[:, 3] = b[3] = 2.0**-20
    found = [
        bits_of(run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, tile), inputs=(a, b, ())).out)
        for tile in (ROWS, COLUMNS, Windows(128, 64, 1, 2, 4, 2))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("sizes", [(4, 4), (4100, 8), (12, 8196), (0, 16)])
def test_pairs(sizes):
    """Both parts have 11 bits, and together all of a number but for one unit; nothing is written behind them."""
    tensors_ = [torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32).view(torch.float32) for size in sizes]
    special = [torch.inf, -torch.inf, torch.nan, 3.4028235e38, -3.4028235e38, -0.0, 1e-42, 0.0]
    whole = tensors_[not sizes[0]][: len(special)]
    whole.copy_(torch.tensor(special)[: len(whole)])
    bits_of(tensors_[1])[-1] = 0x7F800001  # a NaN that is an infinity if its last bits are cut off
    found = [torch.full((2 * size + 4,), 7.0) for size in sizes]
    pairs = Pairs(*sizes)
    assert pairs.size_bytes == tuple(8 * size for size in sizes)
    blocks = -(-sizes[0] // 4096), -(-sizes[1] // 4096)
    params = pack(4, (sizes[0] // 4, sizes[1] // 4), (blocks[0],))
    launch = EmulatedLaunch(pairs.source, "tf32_pairs", None, (sum(blocks),), (256,), params)
    launch(*[each.data_ptr() for each in (*tensors_, *found)])
    for x, pair in zip(tensors_, found, strict=True):
        high, low, behind = pair[: len(x)], pair[len(x) : -4], pair[-4:]
        finite = x.isfinite()
        assert (behind == 7).all()
        assert not (bits_of(pair[:-4]) & 0x1FFF).any()
        wide = x.double()[finite]
        error = (high.double()[finite] + low.double()[finite] - wide).abs()
        assert (error <= wide.abs() * 2.0**-22 + 2.0**-137).all()
        assert high.isfinite().all()
        assert (high[~finite].abs() == 1).all()
        assert torch.equal(low[x.isinf()], x[x.isinf()])
        assert torch.equal(high[x.isinf()].sign(), x[x.isinf()].sign())
        assert torch.equal(low.isnan(), x.isnan())


@pytest.mark.parametrize(
    "text, words",
    [
        ("wgrad n1 c64 h8 w8 k64 r3 s3 pad1 f32 nhwc tf32x3", "the pass is wgrad of f32; wanted f16 or bf16"),
        ("fprop n1 c64 h8 w8 k64 r3 s3 pad1 f32 nhwc", "precision is ieee; wanted tf32 or tf32x3"),
        ("fprop n1 c60 h8 w8 k64 r3 s3 f32 nhwc tf32x3", "C is 60; wanted a multiple of 8"),
        ("fprop n32768 c8 h256 w128 k8 r1 s1 f32 nhwc tf32x3", "too many for an int"),
    ],
)
def test_what_it_refuses(text, words):
    assert words in refusal(ENGINE, Problem.parse(text))


def test_what_is_copied_is_told_and_counted():
    """Rows are taken apart in registers, columns beforehand."""
    problem, device = problem_of("n4 c64 h14 w14 k128 r3 s3 pad1", "dgrad"), device_for("sm_90a")
    factors, filters = 4 * 128 * 14 * 14, 128 * 64 * 9
    for tile, text, copied in ((ROWS, "w", 0), (COLUMNS, "dy and w", factors)):
        made = "copy w with its depth last", f"copy {text} as pairs of tf32"
        assert ENGINE.copies(problem, tile) == made
        assert ENGINE.workspace_bytes(problem, device, tile) == 4 * filters + 8 * copied + 8 * filters
        names = {source.file for source in ENGINE.sources(problem, device, tile)}
        assert names == {"igemm_sm90.cu", "channels_last.cu", "tf32_pairs.cu"}
        main = windows.work(problem, tile).estimate(device).seconds(device)
        assert ENGINE.cost(problem, device, tile) > main + Pairs(copied, filters).seconds(device)
    assert all(isinstance(tile, Windows) for tile in tiles(problem, device))


COMPILED = (
    ("n32 c64 h56 w56 k64 r3 s3 pad1", 0), ("n32 c64 h56 w56 k256 r1 s1", 3),
    ("n32 c256 h14 w14 k256 r3 s3 pad1", 7), ("n1 c512 h7 w7 k512 r3 s3 pad1", 11),
)  # fmt: skip


@pytest.mark.parametrize("direction, fusion", [("fprop", "+bias+residual+relu"), ("dgrad", "")])
@pytest.mark.parametrize("sizes, at", COMPILED)
def test_compiles_well(sizes, at, direction, fusion):
    """Without spills, and without products that wait for each other."""
    problem = Problem.parse(f"{direction} {sizes} f32 nhwc tf32x3 {fusion}".strip())
    some = list(tiles(problem, device_for("sm_90a")))
    rows = [tile for tile in some if not tile.swapped]
    columns = [tile for tile in some if tile.swapped]
    for tile in (rows[at % len(rows)], columns[at % len(columns)]):
        said = jit._compile(windows.work(problem, tile).source, "sm_90a", verbose=True)[1]
        assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}
        assert "serialized" not in said
        assert "ignored" not in said  # that registers change hands
