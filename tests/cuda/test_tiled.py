"""cuda.tiled: tiles with a halo in shared memory, for few channels."""

from __future__ import annotations

import math

import pytest

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.tiled import Tile, Tiled
from openconv.problem import DIRECTIONS, Problem
from tests.cuda.within_bounds import check_bound
from tests.support import LAYOUTS, check_determinism, check_engine, check_locality, make, refusal, this_device

ENGINE = Tiled()
# One tile and several, tiles that end beyond the image, channels that end within a block, groups, no padding to more
# than the image.
TAKEN = (
    "n2 c2 h10 w35 k3 r3 s3 pad1",
    "n2 c8 h9 w8 k4 r3 s2 stride2,1 pad0:1,2 dil1,2 g2",
    "n1 c1 h40 w33 k1 r5 s5 pad2",
    "n2 c4 h9 w9 k4 r3 s3 pad1 g4",
    "n1 c2 h20 w70 k5 r3 s3 stride2 pad1",
    "n1 c2 h4 w5 k3 r2 s2 pad3:4",
)


@pytest.mark.parametrize("text", TAKEN)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_every_layout(direction, text):
    for layout in LAYOUTS:
        problem = make(text, direction, "f32", layout)
        if not (direction == "dgrad" and math.prod(problem.stride) > 1):
            check_engine(ENGINE, problem)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_in_every_dtype(direction, dtype):
    for layout in LAYOUTS[:2]:
        check_engine(ENGINE, make(TAKEN[0], direction, dtype, layout))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_every_tile(direction):
    for tile in (Tile(1, 1), Tile(2, 8), Tile(4, 2)) if direction != "wgrad" else (Tile(1, 1), Tile(4, 2)):
        check_bound(ENGINE, make(TAKEN[0], direction), tile)


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_epilogues_are_part_of_the_kernel(direction):
    for layout in LAYOUTS[:2]:
        for channels in ("c4 h9 w34 k8", "c3 h9 w34 k5"):
            text = f"{direction} n2 {channels} r3 s3 pad1 bf16 {layout} +scale+residual+silu"
            problem = Problem.parse(text)
            check_bound(ENGINE, problem, next(iter(ENGINE.knobs(problem, this_device()))))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinities_and_nans_stay_where_they_belong(direction, value):
    check_locality(ENGINE, make(TAKEN[0], direction), value=value)


def test_the_same_bits_each_time():
    check_determinism(ENGINE, make("n2 c1 h9 w35 k2 r2 s1", "wgrad"))


@pytest.mark.parametrize(
    "text, word",
    [
        ("fprop n1 c4 w9 k4 s3 f32", "has 1 spatial axes"),
        ("fprop n1 c4 h9 w9 k4 r3 s3 i8", "i8"),
        ("fprop n1 c4 h9 w9 k4 r3 s3 f32 tf32", "precision is tf32"),
        ("fprop n1 c4 h9 w9 k4 r3 s3 stride3 f32", "stride is (3, 3)"),
        ("dgrad n1 c4 h9 w9 k4 r3 s3 stride2 f32", "stride is (2, 2)"),
        ("fprop n1 c17 h9 w9 k4 r3 s3 f32", "C/G is 17"),
        ("fprop n1 c4 h9 w9 k65 r3 s3 f32", "K/G is 65"),
        ("wgrad n1 c4 h19 w19 k4 r9 s9 f32", "81 taps"),
        ("fprop n1 c4 h39 w39 k4 r25 s3 f32", "reaches over 25 rows"),
        ("fprop n1 c4 h39 w1999 k4 r3 s3 dil1,700 f32", "a tile and its halo take"),
    ],
)
def test_refusals_name_the_value_seen(text, word):
    assert word in refusal(ENGINE, Problem.parse(text))


def test_a_default_exists_for_all_that_is_taken():
    for taps in range(1, 25):
        for stride in (1, 2):
            for dtype in ("f32", "f64"):
                problem = make(f"n1 c4 h64 w64 k8 r{taps} s{taps} stride{stride} pad{taps // 2}", dtype=dtype)
                assert refusal(ENGINE, problem) or list(ENGINE.knobs(problem, this_device()))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_compiles_without_spills(direction):
    for at, arch in enumerate(ARCHITECTURES):
        dtypes = ("f16", "f64") if arch in ("sm_80", "sm_90a") else ("f16", "f64")[at % 2 :][:1]
        for dtype in dtypes:
            problem = make("n1 c3 h64 w64 k16 r3 s3 pad1", direction, dtype, "nhwc")
            knobs = next(iter(ENGINE.knobs(problem, device_for(arch))))
            for source in ENGINE.sources(problem, device_for(arch), knobs):
                assert {found.spills for found in jit.usage(source, arch)} == {0}
