"""cuda.igemm: products of f32 on CUDA cores, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openconv.cuda import jit
from openconv.cuda.device import device_for
from openconv.cuda.igemm import Tile
from tests.cuda.test_igemm import DIRECTIONS, ENGINE, LAYERS, check
from tests.support import PROBLEMS, make, run_engine, tensors, with_knobs

WIDE = Tile(64, 64, 1, 2, 16, 3)  # 8 x 8 results of a thread
FLAT = Tile(32, 64, 1, 2, 32, 3)  # 4 x 8, and a whole 128 bytes of depth


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_f32_on_cuda_cores(direction):
    for text in (LAYERS[0], LAYERS[6], LAYERS[7], LAYERS[8], PROBLEMS["stride-and-dilation"]):
        check(text, direction, WIDE, "f32")
    check(PROBLEMS["209-channels"], direction, replace(FLAT, splits=3), "f32")
    check(PROBLEMS["1d-stride"], direction, FLAT, "f32", "nchw")
    check(PROBLEMS["groups"], direction, replace(WIDE, splits=2), "f32", "nchw")
    check(LAYERS[1], direction, Tile(128, 32, 2, 1, 16, 4), "f32", "nchw")


@pytest.mark.parametrize("direction, layout", [("fprop", "nhwc"), ("dgrad", "nchw")])
def test_an_epilogue_in_f32(direction, layout):
    text = "n1 c24 h5 w5 k14 r3 s3 pad1"
    check(f"{text} +bias+relu", direction, WIDE, "f32", layout)
    check(f"{text} +mul(c.a)+add(t.b)+clamp(-1,2)", direction, replace(FLAT, splits=2), "f32", layout)


def test_sums_on_cuda_cores_are_in_the_order_of_the_depth():
    """So that no bit depends on the batch or on the tile."""
    problem = make("n2 c40 h6 w7 k24 r3 s3 pad1", "fprop", "f32", "nhwc")
    a, b, _ = tensors(problem)
    a[0, 0, 0, 0], a[0, 0, 3, 3] = torch.inf, torch.nan
    results = []
    for knobs in (WIDE, FLAT):
        assert ENGINE.traits(problem, knobs).batch_invariant
        run = run_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs), inputs=(a, b, ()))
        results.append(run.out)
    assert torch.equal(*[each.contiguous().view(torch.int32) for each in results])
    assert results[0][0, :, 0, 0].isinf().all()
    assert results[0][0, :, 2:5, 2:5].isnan().all()


def test_the_default_in_f32_spills_nowhere():
    for arch in ("sm_80", "sm_90a"):
        device = device_for(arch)
        for direction in DIRECTIONS:
            problem = make("n16 c64 h56 w56 k64 r3 s3 pad1", direction, "f32", "nhwc")
            tile = next(iter(ENGINE.knobs(problem, device)))
            assert not any(found.spills for found in jit.usage(ENGINE.sources(problem, device, tile)[0], arch)), tile
