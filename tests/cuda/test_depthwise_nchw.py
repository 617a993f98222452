"""The channels-first half of cuda.depthwise, its kernels run by the emulator against float64."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda import depthwise_nchw as engine
from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.problem import Problem
from openconv.reference import Inputs, Reference, allowed_error, expected, random_inputs
from openconv.tensors import DTYPES
from tests.emulator import poisoned
from tests.support import sweep

DEVICE = device_for("sm_90a")
PASSES = ("fprop", "dgrad", "wgrad")


def run(problem: Problem, inputs: Inputs, knobs: engine.NchwKnobs) -> torch.Tensor:
    assert not list(engine.refusals(problem, DEVICE))
    out = poisoned(problem.result_shape, DTYPES[problem.result_dtype])
    size = engine.workspace_bytes(problem, DEVICE, knobs)
    workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
    engine.build(problem, DEVICE, knobs)(inputs.a, inputs.b, out, workspace, inputs.operands)
    return out


def check(problem: Problem, knobs: engine.NchwKnobs | None = None) -> None:
    knobs = knobs or next(iter(engine.knobs(problem, DEVICE)))
    inputs = random_inputs(problem)
    error = Reference(problem, inputs).error(run(problem, inputs, knobs))
    assert error <= allowed_error(problem, engine.traits(problem, knobs)), f"{problem} with {knobs}: {error}"


SHAPES = [
    # One dimension: taps 1, 3, 4, 31; causal and centred; rows that cross blocks; strides; dilations near and far.
    "n2 c3 w37 k3 s1 g3 f32",
    "n1 c2 w4808 k2 s4 pad3:0 g2 f16",
    "n2 c3 w100 k3 s31 pad15 g3 f16",
    "n2 c3 w101 k3 s3 stride2 pad1 g3 f16",
    "n2 c3 w95 k3 s3 stride3 pad1 dil2 g3 bf16",
    "n2 c3 w400 k3 s3 pad128 dil128 g3 f16",
    "n1 c2 w400 k2 s31 pad150 dil20 g2 f16",
    "n2 c3 w130 k3 s7 stride40 pad2 g3 f32",
    # Two dimensions: planes that are small, odd, and larger than a block.
    "n1 c2 h90 w96 k2 r3 s3 pad1 g2 f16",
    "n2 c21 h7 w7 k21 r3 s3 pad1 g21 f16",
    "n2 c3 h28 w28 k3 r7 s7 pad3 g3 f16",
    "n1 c2 h13 w15 k2 r4 s3 pad1:2,0:1 stride1,2 g2 f32",
    "n1 c2 h34 w33 k2 r31 s31 pad15 g2 f32",
    "n3 c9 h14 w14 k9 r5 s5 pad2 stride2 g9 bf16",
    "n2 c3 h20 w24 k3 r3 s3 pad2 dil2 g3 f32",
    "n1 c2 h17 w29 k2 r3 s2 pad6 dil6 stride2 g2 f16",
    "n1 c2 h9 w1 k2 r3 s1 pad1,0 g2 f32",
    # Several filters for a channel, three dimensions, dtypes that differ.
    "n2 c3 w40 k6 s4 pad3:0 g3 f16",
    "n2 c3 h17 w23 k6 r5 s5 pad2 g3 bf16",
    "n1 c2 d5 h9 w12 k2 t3 r3 s3 pad2:0,1,1 g2 f32",
    "n1 c2 d6 h9 w12 k4 t3 r3 s3 pad2:0,1,1 stride2,1,2 g2 f16",
]


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("shape", sweep(SHAPES))
def test_passes(shape: str, direction: str) -> None:
    check(Problem.parse(f"{direction} {shape} nchw"))


@pytest.mark.parametrize(
    "text",
    [
        "fprop n1 c2 w200 k2 s4 pad3:0 g2 f16 nchw +bias+silu",
        "fprop n2 c3 h28 w28 k3 r7 s7 pad3 g3 f32 nchw +bias",
        "fprop n2 c21 h7 w7 k21 r3 s3 pad1 g21 f16 nchw +residual+relu",
        "dgrad n2 c3 h17 w23 k6 r5 s5 pad2 g3 bf16 nchw +residual+relu",
        "dgrad n2 c3 h16 w16 k3 r3 s3 stride2 pad1 g3 f32 nchw +mul(c.scale)+mul(s.gain)",
        "fprop n1 c2 h12 w12 k2 r3 s3 pad1 g2 f16*f16>f32 nchw*nhwc>nchw",
        "wgrad n1 c2 h12 w12 k2 r3 s3 pad1 g2 f16*f32>f16 nchw*nhwc>nchw",
        "wgrad n20 c5 h7 w7 k5 r5 s5 pad2 g5 f16 nchw",
    ],
)
def test_epilogues_and_dtypes(text: str) -> None:
    check(Problem.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "dgrad n1 c6 h14 w14 k6 r3 s3 stride2 pad1 g6 f32 nchw",
    ],
)
def test_all_knobs(text: str) -> None:
    problem = Problem.parse(text)
    found = list(engine.knobs(problem, DEVICE))
    assert len(found) == len(set(found)) <= 13
    for knobs in found:
        check(problem, knobs)
        assert engine.cost(problem, DEVICE, knobs) > 0


@pytest.mark.parametrize("splits", [2, 5])
def test_splits_add_up(splits: int) -> None:
    problem = Problem.parse("wgrad n4 c2 h16 w18 k4 r3 s3 pad1 g2 f16 nchw")
    knobs = engine.NchwKnobs(width=2, height=4, threads=64, splits=splits)
    assert engine.workspace_bytes(problem, DEVICE, knobs) == 4 * splits * 4 * 9
    check(problem, knobs)


@pytest.mark.parametrize(
    "text",
    [
        "fprop n1 c2 w80 k2 s4 pad3:0 g2 f16 nchw",
        "dgrad n1 c2 w80 k2 s31 pad15 g2 f32 nchw",
        "wgrad n1 c2 w75 k2 s4 g2 f32 nchw",
        "fprop n1 c2 h14 w14 k2 r3 s3 pad1 g2 f32 nchw",
        "dgrad n1 c2 h9 w10 k2 r3 s3 stride2 g2 f32 nchw",
        "wgrad n1 c2 h9 w10 k2 r3 s3 stride2 g2 f32 nchw",
        "fprop n1 c2 h20 w20 k2 r11 s11 g2 f32 nchw",
    ],
)
def test_a_nan_shows_in_its_own_windows_only(text: str) -> None:
    problem = Problem.parse(text)
    inputs = random_inputs(problem)
    for at in (-1, inputs.a.numel() // 3):
        a = inputs.a.clone()
        a.view(-1)[at] = float("nan")
        found = run(problem, Inputs(a, inputs.b), next(iter(engine.knobs(problem, DEVICE))))
        touched = expected(problem, Inputs(torch.isnan(a).to(a.dtype), torch.ones_like(inputs.b)))
        assert torch.equal(torch.isnan(found), touched > 0)


def test_tensors_that_start_anywhere() -> None:
    problem = Problem.parse("fprop n1 c2 w64 k2 s4 pad3:0 g2 f16 nchw +residual")
    inputs = random_inputs(problem)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)

    knobs = next(iter(engine.knobs(problem, DEVICE)))
    out = moved(poisoned(problem.result_shape, torch.float16))
    engine.build(problem, DEVICE, knobs)(moved(inputs.a), moved(inputs.b), out, None, (moved(inputs.operands[0]),))
    assert torch.equal(out, run(problem, inputs, knobs))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fprop n1 c4 w64 k4 s4 g2 f16 nchw", "groups is 2; wanted C = 4"),
        ("fprop n1 c4 h8 w8 k4 r3 s3 g4 f16 nhwc", "nhwc"),
        ("fprop n1 c4 w64 k4 s4 g4 f64 nchw", "dtype is f64"),
        ("fprop n1 c4 w64 k4 s32 g4 f16 nchw", "at most 31"),
        ("fprop n1 c4 w2147483648 k4 s3 g4 f16 nchw", "less than 2^31"),
        ("fprop n70000 c4 w64 k4 s3 g4 f16 nchw", "at most 65535"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    assert any(reason in said for said in engine.refusals(Problem.parse(text), DEVICE))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "text",
    [
        "fprop n1 c12288 w16384 k12288 s4 pad3:0 g12288 f16 nchw",
        "wgrad n16 c768 w4096 k768 s31 pad15 g768 bf16 nchw",
        "dgrad n64 c192 h28 w28 k192 r3 s3 pad1 g192 f32 nchw",
        "wgrad n1 c3 h512 w512 k3 r31 s31 pad15 g3 f32 nchw",
    ],
)
def test_nothing_is_spilled(text: str, arch: str) -> None:
    assert arch in ARCHITECTURES
    problem, device = Problem.parse(text), device_for(arch)
    for source in engine.sources(problem, device, next(iter(engine.knobs(problem, device)))):
        assert all(found.spills == 0 for found in jit.usage(source, arch))
