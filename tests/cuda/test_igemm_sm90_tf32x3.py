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
