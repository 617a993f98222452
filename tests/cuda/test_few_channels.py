"""cuda.few_channels, its kernels run by the emulator against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from openconv.cuda import few_channels, jit
from openconv.cuda.device import device_for
from openconv.problem import Problem
from openconv.reference import Inputs, Reference, allowed_error, expected, random_inputs
from openconv.tensors import DTYPES, empty
from tests.emulator import EmulatedLaunch
from tests.support import sweep

ENGINE = few_channels.FewChannels()
# One multiprocessor: blocks then go through several tiles, whose buffers take turns.
DEVICE = dataclasses.replace(device_for("sm_90a"), threads=1)
PASSES = ("fprop", "dgrad", "wgrad")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_channels, "Launch", EmulatedLaunch)


def run(problem: Problem, inputs: Inputs, knobs: Any = None, out: torch.Tensor | None = None) -> torch.Tensor:
    assert not list(ENGINE.refusals(problem, DEVICE)), f"{problem} is refused"
    knobs = knobs or ENGINE.knobs(problem, DEVICE)[0]
    if out is None:
        layout = problem.layouts[problem.result]
        out = empty(problem.result_shape, DTYPES[problem.result_dtype], layout, torch.device("cpu"))
    out.fill_(float("nan"))
    size = ENGINE.workspace_bytes(problem, DEVICE, knobs)
    workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
    ENGINE.build(problem, DEVICE, knobs)(inputs.a, inputs.b, out, workspace, inputs.operands)
    return out


def check(problem: Problem, knobs: Any = None) -> None:
    inputs = random_inputs(problem)
    error = Reference(problem, inputs).error(run(problem, inputs, knobs))
    allowed = allowed_error(problem, ENGINE.traits(problem, knobs))
    assert error <= allowed, f"{problem} with {knobs}: {error} > {allowed}"


SHAPES = [
    # Rows that are copied by 16 bytes, where a window starts at an odd element; by 4 bytes; by elements, an odd number.
    "n1 c3 h21 w24 k64 r7 s7 stride2 pad3 f16 nhwc",
    "n1 c3 h9 w10 k8 r5 s5 stride2 pad1:2,0:2 bf16 nhwc",
    "n2 c3 h9 w11 k10 r5 s5 stride2 pad2:1,3:0 f16 nhwc",
    # A zero channel is added; channels first, with filters that are laid out otherwise.
    "n1 c3 h9 w20 k24 r3 s3 pad1 f16 nhwc",
    "n2 c1 h9 w11 k10 r3 s3 pad1 bf16 nchw*nhwc>nchw",
    "n1 c3 h23 w24 k16 r11 s11 stride4 pad2 f16 nhwc",
    # A video's frames, one by one.
    "n2 c3 d3 h9 w10 k8 t1 r5 s5 stride1,2,2 pad0,2,2 f16 nhwc",
    # f32, on CUDA cores.
    "n1 c3 h13 w16 k64 r7 s7 stride2 pad3 f32 nchw",
    "n2 c1 h9 w11 k10 r5 s5 pad2:1,0:3 f32 nhwc*nchw>nhwc",
]
LINES = [f"{direction} {shape}" for shape in SHAPES for direction in PASSES] + [
    # More filters than a block has; other numbers of channels.
    "fprop n1 c4 h5 w6 k72 r3 s3 pad1 bf16 nhwc",
    "fprop n1 c3 h5 w6 k136 r2 s3 pad0:1,1 f16 nhwc",
    "wgrad n1 c4 h5 w6 k72 r3 s3 stride1,2 pad1 bf16 nhwc",
    "wgrad n2 c2 h7 w9 k7 r3 s3 pad1 f32 nhwc",
    "dgrad n1 c2 h5 w6 k72 r3 s3 pad1 f16 nhwc",
    # A window larger than the image, a stride larger than the filter, patches, one pixel.
    "wgrad n1 c3 h3 w2 k8 r5 s5 pad2 f16 nhwc",
    "dgrad n1 c3 h9 w9 k8 r2 s1 stride3 f16 nhwc",
    "dgrad n1 c4 h10 w8 k16 r4 s4 stride4 f32 nhwc",
    "fprop n1 c3 h1 w1 k8 r3 s3 pad1 f32 nhwc",
]


@pytest.mark.parametrize("line", sweep(LINES))
def test_result(line: str) -> None:
    check(Problem.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "fprop n1 c3 h9 w16 k16 r3 s3 stride2 pad1 f16 nhwc +bias+relu",
        "fprop n1 c3 h9 w16 k10 r3 s3 pad1 bf16 nchw +mul(c.scale)+residual+silu",
        "fprop n1 c3 h9 w12 k12 r3 s3 pad1 f32 nhwc +bias+residual",
        "dgrad n1 c3 h9 w16 k16 r3 s3 stride2 pad1 f16 nhwc +bias+residual",
        "dgrad n1 c2 h9 w11 k10 r3 s3 pad1 f32 nchw +bias+residual+relu",
    ],
)
def test_epilogue(line: str) -> None:
    check(Problem.parse(line))


@pytest.mark.parametrize(
    ("line", "knobs"),
    [
        (
            "fprop n1 c3 h9 w16 k16 r5 s5 stride2 pad2 f16 nhwc",
            few_channels.FpropKnobs(4, 8, 1, 2, 2, 1, resident=False),
        ),
        ("wgrad n1 c3 h9 w32 k16 r3 s3 stride2 pad1 f16 nhwc", few_channels.WgradKnobs(2, 16, 1, 2, 2, 1, 2, 1)),
        ("dgrad n1 c3 h9 w40 k32 r3 s3 stride2 pad1 f16 nhwc", few_channels.DgradKnobs(4, 2, 1, 1, 32, 1)),
    ],
)
def test_other_knobs(line: str, knobs: Any) -> None:
    check(Problem.parse(line), knobs)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("direction", PASSES)
def test_nan_shows_where_it_is_read_alone(direction: str, dtype: str) -> None:
    # An element beside a window shares a fragment with it; one beyond the end of a row of dy shares a step.
    problem = Problem.parse(f"{direction} n1 c3 h11 w20 k8 r3 s3 stride2 pad1:2,1:0 {dtype} nhwc")
    inputs = random_inputs(problem)
    inputs.a[0, 1, 4, -1 if direction == "wgrad" else 7] = float("nan")
    wanted = expected(problem, inputs).isnan()
    assert wanted.any()
    assert not wanted.all()
    assert torch.equal(run(problem, inputs).isnan(), wanted)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad"])
def test_nan_filter(direction: str, dtype: str) -> None:
    # fprop multiplies padding with it; dgrad does not reach beyond dy.
    problem = Problem.parse(f"{direction} n1 c3 h9 w12 k8 r5 s5 stride2 pad2 {dtype} nhwc")
    inputs = random_inputs(problem)
    inputs.b[2, 1, 0, 4] = float("nan")
    assert torch.equal(run(problem, inputs).isnan(), expected(problem, inputs).isnan())


def test_tensors_at_odd_addresses() -> None:
    problem = Problem.parse("fprop n1 c3 h9 w16 k16 r3 s3 stride2 pad1 f16 nhwc +residual")
    inputs = random_inputs(problem)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        return room.as_strided(tensor.shape, tensor.stride(), room.storage_offset()).copy_(tensor)

    plain = run(problem, inputs)
    shifted = Inputs(moved(inputs.a), moved(inputs.b), tuple(moved(v) for v in inputs.operands))
    assert torch.equal(run(problem, shifted, out=moved(plain)), plain)


def test_same_bits_in_any_batch() -> None:
    problem = Problem.parse("fprop n3 c3 h9 w16 k8 r3 s3 stride2 pad1 f16 nhwc")
    inputs = random_inputs(problem)
    alone = run(problem.with_(n=1), Inputs(inputs.a[2:], inputs.b))
    assert torch.equal(run(problem, inputs)[2:], alone)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fprop n1 c8 h9 w9 k8 r3 s3 f16 nhwc", "C is 8"),
        ("fprop n1 c4 h9 w9 k8 r3 s3 g2 f16 nhwc", "groups is 2"),
        ("fprop n1 c3 w9 k8 s3 f16 nchw", "1 spatial axes"),
        ("fprop n1 c3 d4 h9 w9 k8 t1 r3 s3 f16 nchw", "3 spatial axes"),
        ("fprop n1 c3 d4 h9 w9 k8 t2 r3 s3 f16 nhwc", "3 spatial axes"),
        ("fprop n1 c3 h9 w9 k8 r3 s3 dil2 f16 nhwc", "dilation is (2, 2)"),
        ("fprop n1 c3 h19 w19 k8 r16 s16 f16 nhwc", "filter is (16, 16)"),
        ("fprop n1 c3 h19 w19 k8 r3 s3 stride5 f16 nhwc", "stride is (5, 5)"),
        ("fprop n1 c3 h9 w9 k8 r3 s3 f64 nhwc", "f64"),
        ("dgrad n1 c3 h29 w29 k4096 r7 s7 f16 nhwc", "K is 4096"),
    ],
)
def test_refusals(line: str, words: str) -> None:
    reasons = list(ENGINE.refusals(Problem.parse(line), DEVICE))
    assert any(words in reason for reason in reasons), reasons


def test_old_tensor_cores_are_refused() -> None:
    old = device_for("sm_75")
    half, single = (Problem.parse(f"fprop n1 c3 h9 w9 k8 r3 s3 {dtype} nhwc") for dtype in ("f16", "f32"))
    assert "sm_75" in next(ENGINE.refusals(half, old))
    assert not list(ENGINE.refusals(single, old))


@pytest.mark.parametrize(
    "layer",
    [
        "n64 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc",
        "n64 c3 h224 w224 k64 r7 s7 stride2 pad3 f32 nchw",
        "n64 c4 h224 w224 k64 r11 s11 stride4 pad2 bf16 nhwc",
    ],
)
@pytest.mark.parametrize("direction", PASSES)
def test_no_value_leaves_the_registers(direction: str, layer: str) -> None:
    problem = Problem.parse(f"{direction} {layer}")
    for arch in ("sm_80", "sm_90a"):
        device = device_for(arch)
        for source in ENGINE.sources(problem, device, ENGINE.knobs(problem, device)[0]):
            for kernel in jit.usage(source, arch):
                assert not kernel.spills, f"{problem} on {arch}: {kernel}"


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
@pytest.mark.parametrize("direction", PASSES)
def test_compiles(direction: str, arch: str) -> None:
    device = device_for(arch)
    dtype = "f32" if arch == "sm_75" else "f16"
    problem = Problem.parse(f"{direction} n2 c3 h32 w32 k16 r3 s3 stride2 pad1 {dtype} nhwc")
    for source in ENGINE.sources(problem, device, ENGINE.knobs(problem, device)[0]):
        assert jit.cubin(source, arch)


def test_cost_of_the_stem_is_below_cudnn() -> None:
    device = dataclasses.replace(device_for("sm_90a"), flops=51e12, half_flops=770e12, bandwidth=4.2e12)
    for direction, microseconds in (("fprop", 162), ("dgrad", 815), ("wgrad", 174)):
        problem = Problem.parse(f"{direction} n64 c3 h224 w224 k64 r7 s7 stride2 pad3 f16 nhwc")
        cost = ENGINE.cost(problem, device, ENGINE.knobs(problem, device)[0])
        assert 29e-6 < cost < microseconds * 1e-6
