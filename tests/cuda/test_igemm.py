"""cuda.igemm: implicit GEMMs of all passes, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.igemm import Igemm, Tile
from openconv.problem import Problem
from tests.support import (
    PROBLEMS,
    check_engine,
    epilogues,
    make,
    problems,
    refusal,
    run_engine,
    with_knobs,
)

ENGINE = Igemm()
DIRECTIONS = ("fprop", "dgrad", "wgrad")
SMALL = Tile(32, 64, 1, 2, 32, 3)
NARROW = Tile(64, 32, 2, 1, 32, 3)


def check(text: str, direction: str, knobs: Tile, dtype: str = "f16", layout: str = "nhwc") -> None:
    problem = make(text, direction, dtype, layout)
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


IMAGES = [name for name in PROBLEMS if " h" in PROBLEMS[name]]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", IMAGES)
def test_right(name, direction):
    check(PROBLEMS[name], direction, SMALL)
