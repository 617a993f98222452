"""cpu.direct: sums that stay in registers, over tiles in slots, in shared slots and in place."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

import openconv
from openconv.cpu.direct import Direct, Tile
from openconv.cpu.direct_plan import geometry_of
from openconv.plan import device_of, lower
from openconv.prepared import forget, kept_bytes
from openconv.problem import DIRECTIONS
from tests.support import (
    LAYOUTS,
    PROBLEMS,
    check_batch_invariance,
    check_determinism,
    check_engine,
    check_hidden_memory,
    check_locality,
    check_workspace_limits,
    make,
    problems,
    refusal,
    run_engine,
    threads,
    with_knobs,
)

ENGINE = Direct()
MORE = (
    "n1 c24 h9 w40 k40 r3 s3 pad1",  # several blocks of channels, a tail among them
    "n2 c70 h6 w6 k33 r3 s3 stride2 pad1",
    "n1 c16 w700 k20 s5 pad2",  # parts of a row
    "n1 c3 h30 w29 k24 r7 s7 stride2 pad3",
    "n3 c2 d4 h6 w7 k9 t2 r3 s3 stride1,2,1 pad1",  # slots of few channels in nhwc
    "n5 c12 h7 w7 k50 r3 s3 pad1",  # several images a tile
    "n1 c300 h5 w5 k16 r3 s3 pad1",  # several chunks of terms
    "n2 c32 h11 w10 k64 r1 s1 stride3 g2",
    "n1 c8 d5 h6 w7 k16 t3 r3 s3 stride2 pad1",
    "n2 c6 h13 w15 k10 r4 s2 stride3,4 pad2,1 dil2,3 g2",
)
SIZED = "n3 c48 h16 w16 k32 r3 s3 pad1", "n2 c64 h14 w14 k40 r1 s1", "n1 c16 h31 w30 k24 r5 s5 stride2 pad2 g2"


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_on_every_problem(direction, at):
    """All problems; layouts take turns from one to the next."""
    for number, text in enumerate((*PROBLEMS.values(), *MORE)):
        if number % 4 == at:
            for layout in (LAYOUTS[(number // 4) % 4], LAYOUTS[(number // 4 + 1) % 4]):
                check_engine(ENGINE, make(text, direction, "f32", layout))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_double_precision(direction):
    for number, text in enumerate(MORE[:4]):
        check_engine(ENGINE, make(text, direction, "f64", LAYOUTS[number % 2]))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_any_tile(direction, layout):
    """Tiles of one pixel to all of them, each way of reading, with the same bits."""
    for text in ("n3 c10 h7 w9 k20 r3 s3 pad1", "n2 c9 h8 w9 k18 r2 s3 stride2", "n2 c20 h3 w15 k24 r1 s1"):
        problem = make(text, direction, layout=layout)
        core = lower(problem, device_of(torch.device("cpu")))
        reads = ["own"] + ["place"] * geometry_of(core).inside + ["shared"] * (direction != "wgrad")
        results = []
        for read in reads:
            for rows, across, pixels in ((1, 1, 1), (6, 2, 27), (4, 1, 1000)):
                candidate = with_knobs(ENGINE, problem, Tile(rows, across, pixels, read))
                check_engine(ENGINE, problem, candidate=candidate)
                results.append(run_engine(ENGINE, problem, candidate=candidate).out)
        if direction != "wgrad":  # whose sums go over tiles
            assert all(torch.equal(out, results[0]) for out in results)


@given(problems(dtypes=("f32", "f64")))
@settings(max_examples=60)
def test_right_on_random_problems(problem):
    check_engine(ENGINE, problem)


def test_refuses_what_a_vector_does_not_hold():
    assert "i32" in refusal(ENGINE, make("n1 c4 h5 w5 k4 r1 s1", "fprop", "i32"))
    assert "f16, f16, f32" in refusal(ENGINE, make("n1 c4 h5 w5 k4 r1 s1", "fprop", "f16*f16>f32"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_all_the_memory_it_takes(direction, layout):
    for text in SIZED:
        check_hidden_memory(ENGINE, make(text, direction, layout=layout))
        check_workspace_limits(ENGINE, make(text, direction, layout=layout))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_every_time_and_for_any_batch(direction, layout):
    for text in SIZED:
        problem = make(text, direction, layout=layout)
        check_determinism(ENGINE, problem)
        if direction != "wgrad":
            assert check_batch_invariance(ENGINE, problem)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_same_bits_with_any_number_of_threads(direction):
    for text in SIZED:
        problem = make(text, direction)
        with threads(1):
            alone = run_engine(ENGINE, problem).out
        for count in (2, 3, 7):
            with threads(count):
                assert torch.equal(run_engine(ENGINE, problem).out, alone)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for number, text in enumerate((*list(PROBLEMS.values())[::3], *MORE)):
        check_locality(ENGINE, make(text, direction, layout=LAYOUTS[number % 4]), value=value)


def test_filters_in_order_are_kept_until_they_change():
    forget()
    x, w = torch.randn(1, 20, 9, 9), torch.randn(24, 20, 3, 3)
    with openconv.policy(engine="cpu.direct"):
        results = [openconv.conv2d(x, w, padding=1) for _ in range(3)]
        assert kept_bytes() > w.nbytes
        assert all(torch.equal(result, results[0]) for result in results)
        w.mul_(2)
        assert torch.equal(openconv.conv2d(x, w, padding=1), 2 * results[0])
        w[3, 4, 1, 1] += 1
        changed = openconv.conv2d(x, w, padding=1)
    torch.testing.assert_close(changed, torch.nn.functional.conv2d(x, w, padding=1), rtol=1e-4, atol=1e-4)
    forget()


def test_torch_may_keep_to_other_vectors_than_the_kernels():
    """With ATEN_CPU_CAPABILITY set alone, memory that was laid out for torch's vectors was written beyond its end."""
    code = """
import torch, torch.nn.functional as F, openconv
torch.manual_seed(0)
for engine, dtype in (("cpu.direct", torch.float64), ("cpu.pixels", torch.float32)):
    x, w, b = torch.randn(2, 8, 65, dtype=dtype), torch.randn(12, 8, 1, dtype=dtype), torch.randn(12, dtype=dtype)
    torch.testing.assert_close(openconv.conv1d(x, w, b, engine=engine), F.conv1d(x, w, b))
"""
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
