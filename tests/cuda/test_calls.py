"""conv2d on a GPU, from the first call to the one that is recognised: what a plan is handed by the shortest way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import openconv
from openconv import plan, torch_ops
from openconv.cuda.device import device_for


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_ops, "device_of", lambda _: device_for("sm_90a"))
    monkeypatch.setattr(plan, "_empty_cuda", None)  # the emulator's tensors are on the CPU
    plan.forget_plans()
    yield
    plan.forget_plans()


def wanted(x, w, bias, residual):
    out = F.conv2d(x, w, bias, padding=1)
    return torch.relu(out if residual is None else out + residual)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("names", ["", "bias", "residual", "bias residual"])
@pytest.mark.parametrize("gradient", [False, True])
def test_every_call_with_an_epilogue_is_right(names, layout, gradient):
    x = torch.randn(2, 3, 6, 8).to(memory_format=layout).requires_grad_(gradient)
    w = torch.randn(4, 3, 3, 3, requires_grad=gradient)
    added = torch.randn(2, 4, 6, 8).to(memory_format=layout)
    whole = (torch.randn(4), added)
    strided = (torch.randn(4, 2)[:, 0], added.transpose(2, 3).contiguous().transpose(2, 3))
    for pair in (whole, strided, whole, strided):
        bias, residual = (
            t if name in names.split() else None for name, t in zip(("bias", "residual"), pair, strict=True)
        )
        for _ in range(3):  # planned, found, recognised
            got = openconv.conv2d(x, w, bias, padding=1, activation="relu", residual=residual)
            expected = wanted(x, w, bias, residual)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            if gradient:
                grads = torch.autograd.grad(got.sum(), (x, w))
                torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (x, w)), rtol=1e-3, atol=1e-3)


def test_operands_that_lie_as_the_engine_takes_them_go_straight_to_it():
    x, w, bias = torch.randn(2, 3, 6, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    openconv.conv2d(x, w, bias, padding=1)
    (made,) = plan._plans.values()
    assert made.lean is not None
    assert made.takes(x, w, [bias])
    assert not made.takes(x, w, [torch.randn(8)[::2]])
