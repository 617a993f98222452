"""Residuals and limits in the store of cpu.direct, cpu.pixels and cpu.winograd (`openconv.cpu.finish`)."""

from __future__ import annotations

import math

import pytest
import torch

import openconv
from openconv.engine import engine_named
from tests.support import accepts, check_engine, make

# Whole and clipped blocks, several chunks of terms, vectors of two images, groups, phases of a dgrad.
PROBLEMS = {
    "cpu.direct": (
        "n2 c5 h9 w11 k7 r3 s3 pad1",
        "n1 c300 h6 w7 k40 r1 s1",
        "n2 c8 h9 w9 k16 r3 s3 stride2 pad1 g2",
    ),
    "cpu.pixels": ("n3 c300 h7 w7 k17 r1 s1", "n2 c6 h9 w10 k8 r1 s1 stride2 g2", "n1 c3 h9 w20 k16 r3 s3 pad1"),
    "cpu.winograd": ("n2 c8 h13 w14 k20 r3 s3 pad1", "n2 c8 h9 w9 k16 r3 s3 pad1 g2"),
}
EPILOGUES = "+bias+residual+relu", "+residual", "+clamp(-0.5,1)", "+bias+relu"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_right_with_all_that_is_taken(name, layout):
    engine = engine_named(name)
    for text in PROBLEMS[name]:
        for direction in ("fprop", "dgrad"):
            for epilogue in EPILOGUES:
                problem = make(text, direction, "f32", layout).with_(epilogue=epilogue)
                if accepts(engine, problem):
                    check_engine(engine, problem)
    problem = make(PROBLEMS[name][0], "fprop", "f64", "nchw").with_(epilogue=EPILOGUES[0])
    check_engine(engine, problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_operands_may_lie_in_any_way(form, dtype):
    """A residual in the other layout, and a step that is left for torch."""
    x = torch.randn(2, 16, 9, 10).to(dtype).contiguous(memory_format=form)
    w, b, r = torch.randn(24, 16, 1, 1).to(dtype), torch.randn(24).to(dtype), torch.randn(2, 24, 9, 10).to(dtype)
    wide = torch.nn.functional.conv2d(x.double(), w.double(), b.double()) + r.double()
    for residual in (r, r.contiguous(memory_format=torch.channels_last), r.neg()._neg_view()):
        for activation, wanted in (("relu", wide.relu()), ("silu", torch.nn.functional.silu(wide))):
            got = openconv.conv2d(x, w, b, residual=residual, activation=activation)
            assert got.dtype == dtype
            assert got.is_contiguous(memory_format=form)
            within = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(got.double(), wanted, rtol=0.02, atol=within)


@pytest.mark.parametrize("name", ["cpu.direct", "cpu.pixels"])
def test_what_is_no_number_stays(name):
    """A comparison with NaN is false either way round: a limit must not take its place."""
    x, w = torch.randn(1, 16, 5, 9), torch.randn(20, 16, 1, 1)
    x[0, 3, 2, 4] = math.nan
    x[0, 5, 4, 8] = math.inf
    y = openconv.conv2d(x, w, activation="clamp(-1,2)", engine=name)
    assert y.isnan().nonzero()[:, 2:].unique(dim=0).tolist() == [[2, 4]]
    assert y.isnan().sum() == 20
    assert set(y[0, :, 4, 8].tolist()) == {-1.0, 2.0}


def test_explain_names_what_is_in_the_store():
    x, w = torch.randn(1, 64, 14, 14), torch.randn(64, 64, 1, 1)
    told = str(openconv.explain(openconv.conv2d, x, w, residual=torch.randn(1, 64, 14, 14), activation="relu"))
    assert "with +residual+relu" in told
    assert "evaluate" not in told
