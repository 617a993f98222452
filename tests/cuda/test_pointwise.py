"""The epilogue in a kernel of its own, in place, for results of any size and layout."""

from __future__ import annotations

import pytest
import torch

from openconv.cuda import jit
from openconv.cuda.device import ARCHITECTURES, device_for
from openconv.cuda.divide import divisor
from openconv.cuda.pointwise import Pointwise, seconds, source, wide
from openconv.evaluate import evaluate
from openconv.problem import Problem
from openconv.reference import random_inputs
from openconv.tensors import DTYPES, to_layout
from tests.support import EPILOGUES

# 4x8 pixels and 16 channels are whole vectors; 5x7 and 3 are not, and 105 results end within one.
WHOLE, BROKEN = "n2 c4 h4 w8 k16", "n1 c4 h5 w7 k3"


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_epilogue_behind_sums(epilogue):
    check(epilogue, "f32", [WHOLE], ["nchw", "nhwc"])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_every_dtype_and_size(dtype):
    check("+bias+residual+leaky_relu(0.2)", dtype, [WHOLE, BROKEN], ["nchw", "nhwc"])


def check(epilogue, dtype, sizes_of, layouts):
    for sizes in sizes_of:
        for layout in layouts:
            problem = Problem.parse(f"fprop {sizes} r1 s1 {dtype} {layout} {epilogue}")
            operands = random_inputs(problem).operands
            sums = to_layout(
                torch.randn(problem.result_shape).to(torch.float64 if dtype == "f64" else torch.float32), layout
            )
            out = torch.full_like(sums, torch.nan, dtype=DTYPES[dtype]) if wide(problem) else sums.clone()
            names = [operand.name for operand in problem.epilogue.operands]
            values = {name: value.double() for name, value in zip(names, operands, strict=True)}
            wanted = evaluate(problem.epilogue, sums.double(), values)
            Pointwise(problem, device_for("sm_90a"))(out, operands, sums if wide(problem) else None)
            torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=max(torch.finfo(DTYPES[dtype]).eps, 1e-6))


def test_a_part_of_every_plane():
    """Sums of pixels 8 to 23 of 32 without gaps, into planes that have all of them."""
    problem = Problem.parse("fprop n2 c4 h4 w8 k3 r1 s1 f16 nchw +bias+residual")
    operands = random_inputs(problem).operands
    sums = torch.randn(2, 3, 16)
    out = torch.full(problem.result_shape, 7.0, dtype=torch.float16)
    Pointwise(problem, device_for("sm_90a"), pixels=16)(out, operands, sums, 8)
    bias, residual = (operand.float() for operand in operands)
    wanted = torch.full_like(out, 7).view(2, 3, 32)
    wanted[..., 8:24] = (sums + bias[:, None] + residual.view(2, 3, 32)[..., 8:24]).half()
    assert torch.equal(out.view(2, 3, 32), wanted)


def test_memory_that_no_vector_can_start_at():
    problem = Problem.parse("fprop n1 c4 h4 w8 k8 r1 s1 f32 nchw +residual+relu")
    residual, out = (torch.randn(257)[1:].view(problem.result_shape) for _ in range(2))
    wanted = (out + residual).relu()
    Pointwise(problem, device_for("sm_90a"))(out, (residual,))
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("value", [1, 2, 3, 7, 49, 196, 641, 65535, 65536, 2**31 - 1, 1431655765])
def test_divisions_are_exact(value):
    magic, shift, same = divisor(value)
    assert same == value
    numbers = {
        0,
        1,
        value - 1,
        value,
        2**31 - 1,
        2**31 - 2,
        *(k * value + d for k in (1, 2, 12345) for d in (-1, 0, 1)),
    }
    for number in (n for n in numbers if 0 <= n < 2**31):
        assert number * (magic % 2**32) >> shift == number // value


def test_no_divisor_of_zero():
    with pytest.raises(ValueError, match="divisor is 0"):
        divisor(0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    problem = Problem.parse("fprop n1 c4 h5 w7 k3 r1 s1 f16 nchw +scale+bias+residual+gelu")
    assert [found.spills for found in jit.usage(source(problem), arch)] == [0]


def test_an_identity_costs_nothing():
    problem = Problem.parse("fprop n1 c4 h5 w7 k3 r1 s1 f16 nchw")
    assert seconds(problem, device_for("sm_90a")) == 0
    assert seconds(problem.with_(epilogue="+relu"), device_for("sm_90a")) > 0
