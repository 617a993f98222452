"""The wgrad of cuda.depthwise_mma: products of x with dy and the sums of their diagonals, checked on the CPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from openconv.cuda import depthwise_mma_wgrad
from openconv.cuda.depthwise_mma import DepthwiseMma
from openconv.cuda.depthwise_mma_wgrad import Gram
from openconv.cuda.device import ARCHITECTURES, device_for
from tests.support import (
    accepts,
    check_engine,
    check_locality,
    make,
    refusal,
    run_engine,
    running_on,
    sweep,
    with_knobs,
)

ENGINE = DepthwiseMma()
# What bands, blocks of 8 columns and tiles meet: several images, rows that 8 bands do not fill, ragged ends, octets of
# channels that are not there, paddings wider than the filter, rows and columns that no window reaches.
LAYERS = (
    "n3 c8 h7 w7 k8 r7 s7 pad3 g8",
    "n9 c24 h7 w7 k24 r3 s3 pad1 g24",
    "n5 c8 h14 w14 k8 r3 s3 pad1 g8",
    "n1 c8 h28 w28 k8 r5 s5 pad2 g8",
    "n1 c40 h13 w29 k40 r3 s3 pad1 g40",
    "n1 c8 h5 w83 k8 r3 s7 pad1,3 g8",
    "n1 c8 h19 w17 k8 r4 s2 pad3:0,0:2 g8",
    "n2 c8 h15 w17 k8 r5 s5 stride2 pad2 g8",
    "n1 c8 h14 w13 k8 r3 s4 stride1,2 pad0:2,3:1 g8",
    "n2 c8 h9 w10 k8 r1 s1 stride2 g8",
    "n1 c8 h4 w3 k8 r3 s2 pad5,6 g8",
    "n2 c8 h6 w9 k8 r6 s9 g8",
)
LARGE = (
    "n1 c8 h14 w14 k8 r13 s13 pad6 g8",
    "n1 c8 h10 w12 k8 r31 s31 pad15 g8",
    "n1 c8 h16 w9 k8 r2 s31 pad0,15 g8",
    "n1 c8 h20 w22 k8 r13 s11 pad6,5 g8",
)


@pytest.mark.parametrize("text", sweep(LAYERS + LARGE))
def test_right_on_layers(text):
    check_engine(ENGINE, make(text, "wgrad", "f16", "nhwc"))


@pytest.mark.parametrize("text", [LAYERS[2], LAYERS[7]])
def test_right_in_bf16(text):
    check_engine(ENGINE, make(text, "wgrad", "bf16", "nhwc"))


def test_the_filter_may_be_in_the_other_layout():
    check_engine(ENGINE, make(LAYERS[4], "wgrad", "f16", "nhwc*nchw>nhwc"))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinity_and_nan_stay_where_they_belong(value):
    """Also where rows and columns of a tile have no partner."""
    for text in (LAYERS[0], LAYERS[2], LAYERS[4], LAYERS[5], LAYERS[6], LAYERS[7]):
        for seed in range(2):
            check_locality(ENGINE, make(text, "wgrad", "f16", "nhwc"), seed, value)


# The knobs of a problem of this size, one for each way in which they change the code.
KNOBS = (
    ("n5 c8 h6 w18 k8 r3 s3 pad1 g8", Gram(4, 3, 2, 3, 3, 16, 1, 2)),  # a last tile that begins within another
    (
        "n3 c8 h12 w12 k8 r9 s3 pad4,1 g8",
        Gram(2, 3, 2, 3, 3, 8, 1, 2, staged=True),
    ),  # groups of filter rows in whole images
    ("n2 c8 h21 w9 k8 r6 s3 pad2,1 g8", Gram(1, 2, 1, 4, 2, 8, 1, 3)),  # and in parts of them
    ("n1 c16 h16 w16 k16 r5 s3 stride2 pad2,1 g16", Gram(1, 4, 1, 5, 2, 4, 1, 1, ahead=True)),  # several chunks
)


@pytest.mark.parametrize("text, knobs", KNOBS)
def test_right_with_knobs_of_every_kind(text, knobs):
    problem = make(text, "wgrad", "f16", "nhwc")
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


def test_the_same_bits_every_time():
    problem = make(LAYERS[7], "wgrad", "f16", "nhwc")
    first, second = (run_engine(ENGINE, problem) for _ in range(2))
    assert torch.equal(first.out, second.out)


def test_refusals_name_what_was_seen():
    assert "C is 12" in refusal(ENGINE, make("n1 c12 h5 w5 k12 r3 s3 g12", "wgrad", "f16", "nhwc"))
    assert "f32" in refusal(ENGINE, make(LAYERS[0], "wgrad", "f32", "nhwc"))
    assert "nchw" in refusal(ENGINE, make(LAYERS[0], "wgrad", "f16", "nchw"))
    assert "(3, 3)" in refusal(ENGINE, make("n1 c8 h9 w9 k8 r3 s3 stride3 g8", "wgrad", "f16", "nhwc"))
    assert "dilation is (2, 2)" in refusal(ENGINE, make("n1 c8 h9 w9 k8 r3 s3 dil2 g8", "wgrad", "f16", "nhwc"))
    assert "(33, 1)" in refusal(ENGINE, make("n1 c8 h40 w5 k8 r33 s1 g8", "wgrad", "f16", "nhwc"))
    assert accepts(ENGINE, make(LAYERS[0], "wgrad", "f16", "nhwc"))
    with running_on(device_for("sm_75"), torch.device("cpu")):
        assert "sm_75" in refusal(ENGINE, make(LAYERS[0], "wgrad", "f16", "nhwc"))


@pytest.mark.parametrize(
    "text",
    [
        "n64 c384 h28 w28 k384 r7 s7 pad3 g384",
        "n64 c768 h7 w7 k768 r7 s7 pad3 g768",
        "n64 c144 h56 w56 k144 r5 s5 stride2 pad2 g144",
        "n64 c256 h28 w28 k256 r31 s31 pad15 g256",
        "n1 c8 h97 w224 k8 r31 s31 pad15 g8",
    ],
)
def test_knobs_fit_the_device(text):
    problem = make(text, "wgrad", "f16", "nhwc")
    for arch in ARCHITECTURES[1:]:
        device = device_for(arch)
        found = list(depthwise_mma_wgrad.knobs(problem, device))
        assert 2 <= len(found) <= 9
        assert all(depthwise_mma_wgrad._Work(problem, each).memory <= device.shared_bytes for each in found)
        seconds = [depthwise_mma_wgrad.cost(problem, device, each) for each in found[:-1]]
        assert seconds == sorted(seconds)
        assert problem.min_bytes / device.bandwidth < seconds[0] < 0.1


def test_rows_of_a_matrix_fall_into_different_banks():
    for units, rows, images in itertools.product(range(1, 14), (1, 4, 7, 28), (1, 2, 4, 8)):
        pitch, image = depthwise_mma_wgrad._spread(units, rows, 8 // images, images)
        assert pitch >= units
        assert image >= rows * pitch
        assert {(n * image + band * pitch) % 8 for n in range(images) for band in range(8 // images)} == set(range(8))
