"""cuda.split on the GPU: pieces of small problems, and the bits of the whole."""

from __future__ import annotations

import pytest
import torch

from openconv.engine import engine_named
from openconv.plan import forget_plans
from openconv.problem import DIRECTIONS
from openconv.rewrites import base, split
from tests.support import candidates, check_engine, check_plan, make, run_engine

PROBLEMS = ("n3 c3 h13 w9 k4 r3 s3 pad1", "n1 c2 h20 w5 k3 r3 s3 stride3 pad2", "n1 c1 h40 w11 k1 r7 s3 pad3,1")


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch):
    monkeypatch.setattr(split, "LEAST", 1)
    base._ranked.cache_clear()
    forget_plans()
    yield
    base._ranked.cache_clear()
    forget_plans()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pieces_are_right(direction, layout):
    for text in PROBLEMS:
        check_engine(engine_named("cuda.split"), make(text, direction, layout=layout))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_the_bits_of_the_whole(direction):
    engine, naive = engine_named("cuda.split"), engine_named("cuda.naive")
    for text in PROBLEMS:
        problem = make(text, direction, layout="nhwc")
        whole = run_engine(naive, problem)
        for candidate in candidates(engine, problem):
            if candidate.knobs.inner[0].engine == naive.name:
                assert torch.equal(whole.out, run_engine(engine, problem, candidate=candidate).out), whole.where


def test_epilogues_are_right():
    for text in PROBLEMS:
        check_plan(make(f"{text} +bias+residual+relu"), engine="cuda.split")
