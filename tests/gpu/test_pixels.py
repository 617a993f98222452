"""cuda.pixels on the GPU: every tile of its search space, all that is fused, sizes that end inside of tiles."""

from __future__ import annotations

import pytest

from openconv.cuda.pixels import Pixels
from openconv.problem import Problem
from tests.support import check_fused, this_device

ENGINE = Pixels()
SIZES = ("n4 c64 h28 w28 k256", "n3 c256 h13 w11 k64", "n2 c128 h9 w7 k72", "n1 c64 h3 w5 k520", "n16 c64 h56 w56 k64")
FUSIONS = ("", "+bias+relu", "+bias+residual+relu", "x+scale+bias+relu", "stats", "x+scale+bias+relu +residual stats")


def check(text: str, at: int) -> None:
    problem = Problem.parse(text)
    for tile in ENGINE.knobs(problem, this_device())[at : at + 1]:
        check_fused(ENGINE, problem, tile, "cuda")


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("fusion", FUSIONS)
def test_fprop_is_right(fusion, at):
    for sizes in SIZES:
        check(f"fprop {sizes} r1 s1 f16 nhwc {fusion}".strip(), at)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_pixels_are_left_out(fusion):
    for sizes in ("n4 c256 h56 w56 k512", "n3 c64 h29 w15 k64", "n2 c128 h14 w14 k72", "n1 c64 h5 w140 k64"):
        for at in range(2):
            check(f"fprop {sizes} r1 s1 stride2 f16 nhwc {fusion}".strip(), at)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("fusion", ["", "+relu_backward(t.y)", "+bias+gelu"])
def test_dgrad_is_right(fusion, at):
    for sizes in ("n4 c256 h28 w28 k64", "n3 c64 h13 w11 k256", "n2 c72 h9 w7 k128", "n2 c200 h14 w14 k512"):
        check(f"dgrad {sizes} r1 s1 bf16 nhwc {fusion}".strip(), at)
