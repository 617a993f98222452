"""cuda.depthwise on channels-last images: windows, tiles and taps, checked on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from openconv.cuda import depthwise_nhwc
from openconv.cuda.depthwise import Depthwise
from openconv.cuda.depthwise_nhwc import Taps, Tile, Window
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.problem import DIRECTIONS, Problem
from tests.support import (
    accepts,
    candidates,
    check_determinism,
    check_engine,
    check_locality,
    make,
    refusal,
    run_engine,
    sweep,
)

ENGINE = Depthwise()
# What strips, chunks of rows and tiles meet: ragged ends, phases of strides, paddings wider than the filter.
WINDOWS = (
    "n2 c8 h9 w11 k8 r3 s3 pad1 g8",
    "n2 c8 h11 w10 k8 r3 s3 stride2 pad1 g8",
    "n1 c8 h11 w9 k8 r5 s5 stride2 pad2 g8",
    "n1 c4 h14 w14 k4 r7 s7 pad3 g4",
    "n1 c6 h8 w9 k6 r4 s3 stride1,2 pad2:0,1:3 g6",
    "n1 c4 h9 w10 k4 r1 s2 stride3,4 pad1 g4",
    "n1 c5 h3 w2 k5 r3 s3 stride3 pad4,5 g5",
)
TILES = (
    "n1 c4 h11 w12 k4 r9 s9 pad4 g4",
    "n1 c2 h9 w8 k2 r31 s31 pad15 g2",
    "n1 c4 h15 w14 k4 r3 s4 stride2,3 pad3:1,2:4 dil2 g4",
    "n1 c3 h9 w8 k6 r3 s3 stride2 pad1 g3",
    "n1 c4 d5 h5 w6 k4 t3 r3 s2 stride2,1,2 pad1,0:1,1 dil1,2,1 g4",
    "n1 c2 h13 w60 k2 r3 s3 pad2,24 dil2,24 g2",
    "n1 c1 h16 w70 k3 r4 s9 stride4,21",
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", sweep(WINDOWS + TILES))
def test_right_on_layers(text, direction):
    check_engine(ENGINE, make(text, direction, "f16", "nhwc"))


@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
@pytest.mark.parametrize("stride", [1, 2, 7, 16, 17, 33, 63, 64])
@pytest.mark.parametrize("dilation", [1, 5, 21, 48, 63, 64])
def test_every_tile_has_a_bit_for_each_column(direction, stride, dilation):
    """As depthwise_nhwc_large.cu counts them, at every phase of the padding."""
    backward = direction == "dgrad"
    for taps in (2, 3, 9, 31):
        problem = make(f"n1 c4 h40 w{30 * dilation + 9} k4 r9 s{taps} stride1,{stride} dil1,{dilation} g4", direction,
                       "f16", "nhwc")  # fmt: skip
        tiles = [each for each in depthwise_nhwc.knobs(problem, device_for("sm_90a")) if isinstance(each, Tile)]
        assert tiles
        for tile in tiles:
            reach = (min(tile.chunk, taps) - 1) * dilation
            spans = [(tile.strip - 1) * stride + reach + 1] if not backward else [
                (tile.strip - 1 + phase) // stride + max(0, reach - phase) // stride + 1 for phase in range(stride)
            ]  # fmt: skip
            assert max(spans) <= 64, tile
            assert not backward or (
                tile.strip % stride == 0 and (tile.chunk >= taps or tile.chunk * dilation % stride == 0)
            )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_right_in_every_dtype(direction, dtype):
    check_engine(ENGINE, make(WINDOWS[1] if dtype == "f32" else TILES[2], direction, dtype, "nhwc"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_filter_may_be_in_the_other_layout(direction):
    check_engine(ENGINE, make(TILES[3], direction, "f16", "nhwc*nchw>nhwc"))


@pytest.mark.parametrize(
    "direction, text, epilogue",
    [
        ("fprop", WINDOWS[1], "+bias+relu"),
        ("dgrad", WINDOWS[1], "+residual"),
        ("fprop", TILES[2], "+mul(c.gain)+silu"),
        ("dgrad", TILES[2], "+=sub(tanh(t.b),max(acc,c.a))"),
    ],
)
def test_the_epilogue_is_part_of_the_kernel(direction, text, epilogue):
    check_engine(ENGINE, Problem.parse(f"{direction} {text} f16 nhwc {epilogue}"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_right_with_knobs_of_every_kind(direction):
    """One point for each way in which knobs change the code: vectors, rows ahead, shares."""
    problem, seen = make(WINDOWS[1], direction, "f16", "nhwc"), set()
    for candidate in candidates(ENGINE, problem):
        knobs = candidate.knobs
        kind = (knobs.channels, getattr(knobs, "ahead", 0))
        if kind not in seen:
            seen.add(kind)
            check_engine(ENGINE, problem, candidate=candidate)
    assert len(seen) > 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_infinity_and_nan_stay_where_they_belong(direction, value):
    for text in (WINDOWS[0], WINDOWS[2], TILES[0], TILES[2], TILES[4]):
        check_locality(ENGINE, make(text, direction, "f16", "nhwc"), value=value)


def test_a_nan_weight_shows_where_its_row_lies_on_padding():
    """Rows of padding are left out only while they add nothing."""
    problem = make(WINDOWS[2], "fprop", "f16", "nhwc")
    clean = run_engine(ENGINE, problem)
    w = clean.b.clone()
    w[3, 0, 0, 0] = math.nan
    out = run_engine(ENGINE, problem, inputs=(clean.a, w, clean.operands)).out
    assert out[:, 3].isnan().all()
    assert not out[:, :3].isnan().any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_same_bits_every_time_and_in_any_batch(direction):
    problem = make(WINDOWS[1], direction, "f16", "nhwc")
    check_determinism(ENGINE, problem)
    if direction != "wgrad":
        whole = run_engine(ENGINE, problem)
        alone = run_engine(ENGINE, problem.with_(n=1), inputs=(whole.a[:1], whole.b, whole.operands))
        assert torch.equal(alone.out, whole.out[:1])


def test_refusals_name_what_was_seen():
    assert "C = 6" in refusal(ENGINE, make("n1 c6 h5 w5 k6 r3 s3 g3", layout="nhwc"))
    assert "f64" in refusal(ENGINE, make(WINDOWS[0], dtype="f64", layout="nhwc"))
    assert "(33, 1)" in refusal(ENGINE, make("n1 c4 h40 w5 k4 r33 s1 g4", layout="nhwc"))
    assert accepts(ENGINE, make(WINDOWS[0], layout="nhwc"))


@pytest.mark.parametrize(
    "text, kind",
    [
        ("fprop n64 c192 h28 w28 k192 r3 s3 pad1 g192", Window),
        ("dgrad n64 c96 h112 w112 k96 r3 s3 stride2 pad1 g96", Window),
        ("fprop n64 c384 h28 w28 k384 r31 s31 pad15 g384", Tile),
        ("wgrad n64 c384 h28 w28 k384 r7 s7 pad3 g384", Taps),
    ],
)
def test_knobs_fit_the_problem(text, kind):
    for arch in ARCHITECTURES:
        device, problem = device_for(arch), Problem.parse(f"{text} f16 nhwc")
        found = list(depthwise_nhwc.knobs(problem, device))
        assert 2 <= len(found) <= 12
        assert all(isinstance(each, kind) and problem.c % each.channels == 0 for each in found)
        seconds = [depthwise_nhwc.cost(problem, device, each) for each in found]
        assert seconds == sorted(seconds)
        assert problem.min_bytes / device.bandwidth < seconds[0] < 1
