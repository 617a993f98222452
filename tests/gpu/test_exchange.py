"""cuda.exchange on the GPU: filter gradients in tf32, copies of ragged sizes, other engines inside."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda.device import cuda_device
from openconv.cuda.exchange import Exchange
from openconv.cuda.exchanged import Exchanged, exchanged, exchanged_back
from openconv.problem import Problem
from tests.support import (
    accepts,
    candidates,
    check_engine,
    check_locality,
    check_plan,
    run_engine,
)

ENGINE = Exchange()
PROBLEMS = (
    "wgrad n32 c256 h14 w14 k256 r3 s3 pad1 f32 nhwc",
    "wgrad n32 c64 h56 w56 k64 r3 s3 pad1 f32 nhwc",
    "wgrad n32 c128 h28 w28 k128 r3 s3 pad1 f32 nchw",
    "wgrad n40 c128 h30 w29 k64 r3 s3 pad1 stride2 f32 nhwc",
    "wgrad n32 c256 h28 w28 k512 r1 s1 stride2 f32 nhwc",
    "wgrad n32 c64 h15 w15 k128 r1 s1 stride2 f32 nchw",
    "wgrad n64 c1024 h14 w14 k256 r1 s1 f32 nhwc",
    "wgrad n16 c72 h17 w20 k40 r3 s5 pad2:1,0:3 stride1,2 dil2,1 f32 nhwc",
    "wgrad n24 c64 w120 k48 s4 pad3:0 f32 nchw",
    "wgrad n8 c32 d6 h12 w10 k64 t3 r3 s3 pad1 stride1,2,2 f32 nhwc",
    "wgrad n5 c33 h12 w13 k17 r3 s3 pad1 f32 nhwc",
)


def problem_of(text: str, precision: str = "tf32") -> Problem:
    return Problem.parse(f"{text} {precision}")


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_right(text, precision):
    """With what it is for inside, where that takes them; small ones would go to another engine."""
    problem = problem_of(text, precision)
    check_engine(ENGINE, problem)
    for candidate in candidates(ENGINE, problem):
        if candidate.knobs.inner[0].engine == "cuda.igemm_sm90":
            check_engine(ENGINE, problem, candidate=candidate)
            break


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_right_with_every_engine_inside(precision):
    """And with some of their knobs: splits, both ways to make pairs."""
    problem = problem_of("wgrad n16 c64 h12 w11 k72 r3 s3 pad1 f32 nhwc", precision)
    found: dict[str, list] = {}
    for candidate in candidates(ENGINE, problem):
        found.setdefault(candidate.knobs.inner[0].engine, []).append(candidate)
    assert "cuda.igemm" in found
    for some in found.values():
        for candidate in some[:: max(1, len(some) // 3)]:
            check_engine(ENGINE, problem, candidate=candidate)


def test_the_same_bits_again():
    for text in PROBLEMS[3:6]:
        problem = problem_of(text)
        candidate = next(candidates(ENGINE, problem))
        first, second = (run_engine(ENGINE, problem, candidate=candidate).out for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_where_it_belongs(value):
    for precision in ("tf32", "tf32x3"):
        check_locality(
            ENGINE, problem_of("wgrad n16 c40 h13 w14 k24 r3 s3 pad1 stride2 f32 nhwc", precision), value=value
        )


def test_plans():
    """Mixed layouts, and the streams and copies of a plan around it."""
    for text in (PROBLEMS[0], PROBLEMS[3], "wgrad n16 c40 h13 w14 k24 r3 s3 pad1 f32 nhwc*nchw>nhwc"):
        assert accepts(ENGINE, problem_of(text))
        check_plan(problem_of(text), engine=ENGINE.name)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(
    "first, channels, sizes, kept",
    [
        (32, 256, (14, 14), (14, 14)),
        (33, 65, (30, 20), (29, 20)),
        (6, 72, (8, 9, 10), (8, 8, 9)),
        (130, 3, (67,), (66,)),
    ],
)
def test_every_element_is_copied(first, channels, sizes, kept, layout, dtype):
    given = torch.randint(-30000, 30000, (first, channels, *sizes), device="cuda").to(dtype)
    lies = given if layout == "nchw" else given.movedim(1, -1).contiguous()
    part = given[(slice(None), slice(None), *(slice(count) for count in kept))].movedim(0, -1).contiguous()
    made = torch.zeros(part.numel() + 64, dtype=dtype, device="cuda")
    one = exchanged(layout, first, channels, sizes, kept)
    Exchanged((one,), dtype.itemsize).launch(cuda_device(0))(lies.data_ptr(), made.data_ptr())
    assert torch.equal(made[:-64], part.view(-1))
    assert not made[-64:].any()


def test_there_and_back():
    """What both copies of a plan do, with nothing between them."""
    problem = problem_of("wgrad n32 c64 h14 w14 k64 r14 s14 pad7:6 f32 nhwc")
    (move,) = ENGINE.moves(problem).there
    there = move.copy
    x, dy = (torch.randn(32, 14, 14, 64, device="cuda") for _ in range(2))
    copies = [torch.empty(64, 14, 14, 32, device="cuda") for _ in range(2)]
    device = cuda_device(0)
    there.launch(device)(*(each.data_ptr() for each in (x, dy, *copies)))
    for tensor, copy in zip((x, dy), copies, strict=True):
        assert torch.equal(copy, tensor.permute(3, 1, 2, 0))
        again = torch.empty_like(tensor)
        Exchanged((exchanged_back("nhwc", 64, 32, (14, 14)),), 4).launch(device)(copy.data_ptr(), again.data_ptr())
        assert torch.equal(again, tensor)
