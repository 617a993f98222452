"""cuda.igemm: products of f32 as tf32, of integers, and wider results, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openconv.cuda.igemm import Tile
from tests.cuda.test_igemm import DIRECTIONS, ENGINE, LAYERS, SMALL, check
from tests.support import PROBLEMS, make, run_engine, tensors, with_knobs


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", [PROBLEMS["stride-and-dilation"], LAYERS[0], LAYERS[2]])
def test_right_in_f32_of_products_in_tf32(text, direction, precision):
    check(f"{text} {precision}", direction, Tile(64, 64, 2, 2, 32, 3), "f32")
    check(f"{text} {precision}", direction, Tile(32, 64, 1, 2, 16, 3, splits=3), "f32")


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("text", [PROBLEMS["209-channels"], *LAYERS[:2], LAYERS[8]])
def test_integers_are_exact(text, splits):
    check(text, "fprop", Tile(64, 64, 2, 2, 64, 3, splits=splits), "i8*i8>i32")


@pytest.mark.parametrize("channels", [1, 2, 4, 6, 8])
def test_what_a_short_vector_leaves_is_zero(channels):
    """Behind the last channel, whatever the vector in which values come."""
    check(f"n2 c{channels} h4 w5 k{channels} r3 s3 pad1", "fprop", Tile(32, 64, 1, 2, 64, 3), "i8*i8>i32")


@pytest.mark.parametrize(
    "direction, dtypes", [("fprop", "f16*f16>f32"), ("dgrad", "f32*bf16>bf16"), ("wgrad", "f16*f32>f16")]
)
@pytest.mark.parametrize("splits", [1, 2])
def test_results_may_be_wider(direction, dtypes, splits):
    check("n2 c16 h6 w7 k24 r3 s3 stride2 pad1", direction, replace(SMALL, splits=splits), dtypes)
    if direction != "wgrad":
        check("n1 c9 h5 w5 k7 r3 s3 pad1 +bias+residual+relu", direction, replace(SMALL, splits=splits), dtypes)


def test_tf32x3_keeps_what_is_infinite_and_what_is_large():
    problem = make("n1 c8 h4 w4 k8 r1 s1 tf32x3", "fprop", "f32", "nhwc")
    a, b, _ = tensors(problem)
    a[0, 0, 0, 0], a[0, 0, 1, 1], a[0, 0, 2, 2] = torch.inf, torch.nan, 3.4e38
    b[:, 0] = 2.0**-10
    out = run_engine(
        ENGINE, problem, candidate=with_knobs(ENGINE, problem, Tile(64, 64, 2, 2, 32, 3)), inputs=(a, b, ())
    ).out
    assert out[0, :, 0, 0].isinf().all()
    assert out[0, :, 1, 1].isnan().all()
    torch.testing.assert_close(out[0, :, 2, 2], torch.full((8,), 3.4e38 * 2.0**-10))
