"""cuda.pad_channels: channels rounded up, in all passes, with epilogues; and the kernel that copies them."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.device import CudaDevice
from openconv.cuda.pad_channels import PadChannels
from openconv.cuda.padded import Padded
from openconv.problem import DIRECTIONS, Problem
from openconv.rewrites.base import Rewritten
from openconv.select import Candidate
from tests.support import (
    accepts,
    candidates,
    check_determinism,
    check_engine,
    check_locality,
    check_plan,
    check_workspace_limits,
    make,
    refusal,
    this_device,
)

ENGINE = PadChannels()
SHAPES = (
    "n2 c45 h5 w6 k64 r3 s3 pad1",
    "n2 c64 h7 w6 k23 r3 s3 pad1:0,1 stride2",
    "n1 c13 d3 h4 w5 k10 t2 r1 s3 pad0,0,1",
    "n3 c20 h6 w5 k36 r1 s1",
)


def inside(problem: Problem, engine: str = "cuda.igemm_sm90") -> Candidate:
    """The rewrite with this engine inside."""
    return next(c for c in candidates(ENGINE, problem) if c.knobs.inner[0].engine == engine)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", SHAPES)
def test_right(text, direction):
    problem = make(text, direction, "f16", "nhwc")
    assert accepts(ENGINE, problem)
    check_engine(ENGINE, problem, candidate=inside(problem))


@pytest.mark.parametrize("text", ["n2 c45 h4 w5 k20 r3 s3 pad1 bf16", "n2 c13 h4 w5 k12 r3 s3 pad1 f32 nhwc tf32"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_right_in_other_dtypes(text, direction):
    text = text if "nhwc" in text else f"{text} nhwc"
    check_engine(ENGINE, Problem.parse(f"{direction} {text}"))


def test_bytes_want_twice_as_many():
    problem = Problem.parse("fprop n1 c24 h4 w5 k40 r3 s3 pad1 i8*i8>i32 nhwc")
    assert (ENGINE.inside(problem).c, ENGINE.inside(problem).k) == (32, 48)
    check_engine(ENGINE, problem)


@pytest.mark.parametrize("epilogue", ["+bias+residual+relu", "+=mul(acc,s.gain)", "+bias+scale"])
def test_epilogues_go_inside_with_operands_as_wide(epilogue):
    for text in (
        "fprop n2 c16 h4 w5 k21 r3 s3 pad1",
        "dgrad n2 c21 h4 w5 k16 r3 s3 pad1",
        "fprop n2 c13 h4 w5 k16 r1 s1",
    ):
        problem = Problem.parse(f"{text} f16 nhwc {epilogue}")
        check_engine(ENGINE, problem, candidate=inside(problem))
        check_plan(problem, engine=ENGINE.name)


def test_what_can_be_relied_on():
    problem = make(SHAPES[0], dtype="f16", layout="nhwc")
    check_determinism(ENGINE, problem.with_(n=1))
    check_workspace_limits(ENGINE, problem)
    for value in (float("inf"), float("nan")):
        check_locality(ENGINE, problem.with_(n=1), value=value)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("fprop n2 c64 h5 w6 k64 r3 s3 f16 nhwc", "C is 64 and K 64; wanted one that is no multiple of 8"),
        ("fprop n2 c45 h5 w6 k64 r3 s3 f16 nchw", "layout of x is nchw; wanted nhwc"),
        ("fprop n2 c45 h5 w6 k63 r3 s3 g9 f16 nhwc", "groups is 9; wanted 1"),
        ("fprop n2 c45 h5 w6 k64 r3 s3 f32 nhwc", "wanted what tensor cores multiply"),
        ("fprop n4000 c45 h128 w128 k64 r3 s3 f16 nhwc", "x has 3145728000 elements once padded; wanted under"),
        ("fprop n0 c45 h5 w6 k64 r3 s3 f16 nhwc", "a tensor is empty"),
    ],
)
def test_refusals(text, reason):
    assert reason in refusal(ENGINE, Problem.parse(text))


def test_only_what_is_padded_is_copied():
    moves = ENGINE.moves(Problem.parse("fprop n2 c64 h5 w6 k23 r3 s3 f16 nhwc +bias"))
    assert [move.at for move in moves.there] == [(1,), (2,)]
    assert [*moves.there[0].told, *moves.there[1].told] == ["copy w, 207x64 as 216x64", "copy bias, 1x23 as 1x24"]
    assert moves.back is not None
    assert moves.back.told == ("copy y, 24x24 as 24x23",)


def test_told():
    problem = Problem.parse("wgrad n8 c64 h56 w56 k230 r3 s3 pad1 f16 nhwc")
    candidate = inside(problem)
    assert isinstance(candidate.knobs, Rewritten)
    assert ENGINE.told(problem, candidate.knobs).startswith("64 by 230 channels as 64 by 232, by cuda.igemm_sm90")
    assert ENGINE.told(problem, candidate.knobs).endswith(", then copy w, 2088x64 as 2070x64")
    assert "MB of copies" in ENGINE.reasons(problem, this_device(), candidate.knobs)[0]
    files = {source.file for source in ENGINE.sources(problem, this_device(), candidate.knobs)}
    assert {"padded.cu", "igemm_sm90_wgrad.cu"} <= files


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "rows, length, to_rows, to_length", [(7, 45, 7, 48), (7, 48, 7, 45), (5, 3, 8, 16), (9, 640, 4, 633)]
)
def test_copies(size, rows, length, to_rows, to_length):
    """Every byte of the copy, and none behind it."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    given = torch.randint(1, 100, (rows, length), dtype=dtype)
    room = torch.full((to_rows * to_length + 64,), 77, dtype=dtype)
    wanted = torch.zeros(to_rows, to_length, dtype=dtype)
    both = min(rows, to_rows), min(length, to_length)
    wanted[: both[0], : both[1]] = given[: both[0], : both[1]]
    device = this_device()
    assert isinstance(device, CudaDevice)
    Padded(rows, length, to_rows, to_length, size).launch(device)(given.data_ptr(), room.data_ptr())
    assert torch.equal(room[:-64].view(to_rows, to_length), wanted)
    assert bool((room[-64:] == 77).all())
