"""cuda.depthwise_mma, fprop and dgrad: Toeplitz products from planes in shared memory, checked on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from openconv.cuda.depthwise_mma import DepthwiseMma, Rows, _Work
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.problem import Problem
from tests.support import (
    accepts,
    candidates,
    check_engine,
    check_locality,
    make,
    refusal,
    run_engine,
    with_knobs,
)

ENGINE = DepthwiseMma()
# What tiles, planes and Toeplitz matrices meet: ragged rows and columns, several images, octets that are not there.
BOTH = (
    "n5 c24 h7 w7 k24 r7 s7 pad3 g24",
    "n3 c40 h14 w14 k40 r5 s5 pad2 g40",
    "n1 c16 h28 w28 k16 r7 s7 pad3 g16",
    "n1 c8 h13 w29 k8 r3 s3 pad1 g8",
    "n1 c8 h5 w75 k8 r3 s9 pad1,4 g8",
    "n1 c8 h12 w11 k8 r4 s3 pad2:0,0:3 g8",
    "n1 c8 h9 w10 k8 r31 s31 pad15 g8",
    "n1 c8 h28 w27 k8 r13 s30 pad6,15:14 g8",
    "n1 c8 h6 w7 k8 r1 s12 pad3:2,13:0 g8",
)
STRIDED = (
    "n2 c24 h14 w14 k24 r5 s5 stride2 pad2 g24",
    "n1 c8 h15 w35 k8 r3 s3 stride2 pad1 g8",
    "n1 c8 h15 w13 k8 r7 s6 stride2 pad3:2,2:4 g8",
    "n1 c8 h17 w9 k8 r3 s4 stride3,1 pad1 g8",
    "n1 c8 h6 w40 k8 r3 s1 stride1,2 pad1,0 g8",
    "n1 c8 h20 w20 k8 r31 s17 stride2 pad15,8 g8",
)


@pytest.mark.parametrize("text", BOTH)
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_right_on_layers(text, direction):
    check_engine(ENGINE, make(text, direction, "f16", "nhwc"))


@pytest.mark.parametrize("text", STRIDED)
def test_right_with_strides(text):
    check_engine(ENGINE, make(text, "fprop", "f16", "nhwc"))


@pytest.mark.parametrize("direction, text", [("fprop", STRIDED[0]), ("dgrad", BOTH[0]), ("fprop", BOTH[7])])
def test_right_in_bf16(direction, text):
    check_engine(ENGINE, make(text, direction, "bf16", "nhwc"))


def test_the_filter_may_be_in_the_other_layout():
    check_engine(ENGINE, make(BOTH[3], "fprop", "f16", "nhwc*nchw>nhwc"))


@pytest.mark.parametrize(
    "direction, text, epilogue",
    [
        ("fprop", BOTH[0], "+bias+relu"),
        ("dgrad", BOTH[3], "+residual"),
        ("fprop", STRIDED[0], "+mul(c.gain)+silu"),
        ("dgrad", BOTH[5], "+=sub(tanh(t.b),max(acc,c.a))"),
        ("fprop", BOTH[3], "+bias+residual+mul(s.gain)"),
    ],
)
def test_the_epilogue_is_part_of_the_kernel(direction, text, epilogue):
    check_engine(ENGINE, Problem.parse(f"{direction} {text} f16 nhwc {epilogue}"))


@pytest.mark.parametrize(
    "text, knobs",
    [
        ("n5 c24 h7 w7 k24 r7 s7 pad3 g24", Rows(7, 4, 1, octets=2, warps=8)),  # a group of images that is not whole
        ("n3 c24 h7 w9 k24 r3 s3 pad1 g24", Rows(7, 2, 2, octets=4, warps=16)),
        ("n2 c16 h28 w28 k16 r7 s7 pad3 g16", Rows(28, 1, 4, octets=2, warps=4, rounds=2)),
        ("n2 c8 h21 w40 k8 r5 s5 pad2 g8", Rows(10, 1, 2, octets=1, warps=4, rounds=4)),
        ("n2 c16 h13 w25 k16 r5 s5 stride2 pad2 g16", Rows(3, 1, 1, octets=2, warps=8, rounds=3)),
    ],
)
def test_right_however_it_is_cut(text, knobs):
    problem = make(text, "fprop", "f16", "nhwc")
    check_engine(ENGINE, problem, candidate=with_knobs(ENGINE, problem, knobs))


def test_right_with_its_other_knobs():
    problem = make("n2 c16 h10 w18 k16 r5 s5 pad2 g16", "dgrad", "f16", "nhwc")
    for candidate in list(candidates(ENGINE, problem))[1::3]:
        check_engine(ENGINE, problem, candidate=candidate)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinity_and_nan_stay_where_they_belong(value):
    for direction, text in [("fprop", BOTH[0]), ("dgrad", BOTH[1]), ("fprop", STRIDED[2]), ("dgrad", BOTH[6])]:
        check_locality(ENGINE, make(text, direction, "f16", "nhwc"), value=value)
    check_locality(ENGINE, make(BOTH[3], "fprop", "bf16", "nhwc"), value=value)


def test_an_infinity_leaves_other_images_of_its_block_as_they_are():
    problem = make("n4 c8 h7 w7 k8 r5 s5 pad2 g8", "fprop", "f16", "nhwc")
    candidate = with_knobs(ENGINE, problem, Rows(7, 4, 1, octets=1, warps=4))
    clean = run_engine(ENGINE, problem, candidate=candidate)
    x = clean.a.clone()
    x[2, 3, 1, 1] = math.inf
    out = run_engine(ENGINE, problem, candidate=candidate, inputs=(x, clean.b, clean.operands)).out
    others = [0, 1, 3]
    assert torch.equal(out[others], clean.out[others])
    assert not torch.isfinite(out[2, 3, :4, :4]).any()
    assert torch.isfinite(out[2, 3, 4:, 4:]).all()


def test_a_nan_weight_shows_where_its_row_lies_on_padding():
    problem = make(BOTH[0], "fprop", "f16", "nhwc")
    clean = run_engine(ENGINE, problem)
    w = clean.b.clone()
    w[3, 0, 0, 0] = math.nan
    out = run_engine(ENGINE, problem, inputs=(clean.a, w, clean.operands)).out
    assert out[:, 3].isnan().all()
    assert not out[:, :3].isnan().any()


def test_the_same_bits_every_time_and_in_any_batch():
    problem = make(BOTH[0], "fprop", "f16", "nhwc")
    whole, again = run_engine(ENGINE, problem), run_engine(ENGINE, problem)
    assert torch.equal(again.out, whole.out)
    alone = run_engine(ENGINE, problem.with_(n=1), inputs=(whole.a[:1], whole.b, whole.operands))
    assert torch.equal(alone.out, whole.out[:1])


def test_refusals_name_what_was_seen():
    assert "C is 12" in refusal(ENGINE, make("n1 c12 h5 w5 k12 r3 s3 g12", "fprop", "f16", "nhwc"))
    assert "K 16" in refusal(ENGINE, make("n1 c8 h5 w5 k16 r3 s3 g8", "fprop", "f16", "nhwc"))
    assert "f32" in refusal(ENGINE, make(BOTH[0], "fprop", "f32", "nhwc"))
    assert "nchw" in refusal(ENGINE, make(BOTH[0], "fprop", "f16", "nchw"))
    assert "(33, 1)" in refusal(ENGINE, make("n1 c8 h40 w5 k8 r33 s1 g8", "fprop", "f16", "nhwc"))
    assert "dilation is (2, 2)" in refusal(ENGINE, make("n1 c8 h9 w9 k8 r3 s3 dil2 g8", "fprop", "f16", "nhwc"))
    assert "stride is (2, 2)" in refusal(ENGINE, make(STRIDED[0], "dgrad", "f16", "nhwc"))
    assert "(1, 3)" in refusal(ENGINE, make("n1 c8 h9 w9 k8 r3 s3 stride1,3 g8", "fprop", "f16", "nhwc"))
    assert "3 spatial axes" in refusal(ENGINE, make("n1 c8 d3 h9 w9 k8 t1 r3 s3 g8", "fprop", "f16", "nhwc"))
    old = list(ENGINE.refusals(make(BOTH[0], "fprop", "f16", "nhwc"), device_for("sm_75")))
    assert any("sm_75" in reason for reason in old)
    assert accepts(ENGINE, make(BOTH[0], "fprop", "f16", "nhwc"))


@pytest.mark.parametrize(
    "text",
    [
        "fprop n64 c384 h28 w28 k384 r7 s7 pad3 g384",
        "dgrad n64 c96 h56 w56 k96 r7 s7 pad3 g96",
        "fprop n64 c768 h7 w7 k768 r7 s7 pad3 g768",
        "dgrad n64 c256 h28 w28 k256 r31 s31 pad15 g256",
        "fprop n64 c96 h112 w112 k96 r3 s3 stride2 pad1 g96",
        "fprop n1 c8 h1024 w2048 k8 r31 s31 pad15 g8",
        "fprop n1 c8 h200 w3 k8 r5 s1 pad2,0 g8 f16 +residual",
    ],
)
def test_knobs_fit_every_device(text):
    for arch in ARCHITECTURES[1:]:
        device = device_for(arch)
        head, _, tail = text.partition(" f16")
        problem = Problem.parse(f"{head} f16 nhwc{tail}")
        found = list(ENGINE.knobs(problem, device))
        assert 2 <= len(found) <= 10
        seconds = [ENGINE.cost(problem, device, each) for each in found]
        assert seconds == sorted(seconds)
        assert problem.min_bytes / device.bandwidth < seconds[0] < 1
        assert all(_Work(problem, each).shared <= device.shared_bytes for each in found)
