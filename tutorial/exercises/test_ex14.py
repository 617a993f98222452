"""Grades exercise 14: folded filters against torch's batch norm in float64, and bytes against kernels that count."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def _layer(seed: int) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """x, w, bias or None, padding, groups: of one or two axes, dense, grouped or depthwise."""
    rng = np.random.default_rng(seed)
    rank, groups = 1 + seed % 2, int(rng.choice([1, 2, 5]))
    c, k = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    x = torch.randn(2, c, *[9] * rank, dtype=torch.float64)
    w = torch.randn(k, c // groups, *[3] * rank, dtype=torch.float64)
    bias = torch.randn(k, dtype=torch.float64) if seed % 3 else None
    return x, w, bias, int(rng.integers(0, 3)), groups


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    return (F.conv1d if x.dim() == 3 else F.conv2d)(x, w, bias, padding=padding, groups=groups)


def _numpy(bias: Tensor | None) -> np.ndarray | None:
    return None if bias is None else bias.numpy()


def _check(got: tuple[np.ndarray, np.ndarray], x: Tensor, padding: int, groups: int, wanted: Tensor, case: str) -> None:
    w, b = (torch.from_numpy(np.asarray(each)) for each in got)
    assert b.dim() == 1, f"{case}: the bias has the shape {tuple(b.shape)}; wanted one value a channel"
    off = float((_convolve(x, w, b, padding, groups) - wanted).abs().max())
    assert off < 1e-9 * max(1.0, float(wanted.abs().max())), f"{case}: results are off by up to {off:.3g}"


@pytest.mark.parametrize("seed", range(12))
def test_a_norm_behind(answer: ModuleType, seed: int) -> None:
    torch.manual_seed(seed)
    x, w, bias, padding, groups = _layer(seed)
    k = len(w)
    mean, gamma, beta = torch.randn(3, k, dtype=torch.float64)
    var, eps = torch.rand(k, dtype=torch.float64), 10.0 ** -(1 + seed % 4)
    y = _convolve(x, w, bias, padding, groups)
    wanted = F.batch_norm(y, mean, var, gamma, beta, training=False, eps=eps)
    kept = w.clone()
    vectors = [v.numpy() for v in (mean, var, gamma, beta)]
    got = answer.fold_behind(w.numpy(), _numpy(bias), *vectors, eps)
    _check(got, x, padding, groups, wanted, f"w of {tuple(w.shape)}, {groups} groups, bias {bias is not None}")
    assert torch.equal(w, kept), "the filters that were given have changed"


@pytest.mark.parametrize("seed", range(12))
def test_a_norm_in_front(answer: ModuleType, seed: int) -> None:
    torch.manual_seed(seed)
    x, w, bias, padding, groups = _layer(seed)
    scale, shift = torch.randn(2, x.shape[1], dtype=torch.float64)
    if padding:
        shift.zero_()
    lie = [1, -1, *[1] * (x.dim() - 2)]
    wanted = _convolve(x * scale.view(lie) + shift.view(lie), w, bias, padding, groups)
    kept = w.clone()
    got = answer.fold_in_front(w.numpy(), _numpy(bias), scale.numpy(), shift.numpy(), groups, padded=padding > 0)
    _check(got, x, padding, groups, wanted, f"w of {tuple(w.shape)}, {groups} groups, padding {padding}")
    assert torch.equal(w, kept), "the filters that were given have changed"


def test_a_shift_does_not_fold_behind_padding(answer: ModuleType) -> None:
    w, shift = np.ones((2, 3, 3)), np.array([0.0, 0.0, 1.0])
    with pytest.raises(ValueError, match=r"."):
        answer.fold_in_front(w, None, np.ones(3), shift, 1, padded=True)


class _Memory:
    """Kernels one by one, which count what they read and write."""

    def __init__(self, size: int) -> None:
        self.bytes, self._size = 0, size

    def kernel(self, *values: int) -> None:
        self.bytes += self._size * sum(values)


@pytest.mark.parametrize("seed", range(8))
def test_bytes(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y, size = int(rng.integers(1, 10**8)), int(rng.integers(1, 10**8)), int(rng.choice([1, 2, 4, 8]))
    steps = [str(step) for step in rng.choice(["bias", "scale", "relu", "residual"], int(rng.integers(0, 6)))]
    alone, fused = _Memory(size), _Memory(size)
    alone.kernel(x, y)
    for step in steps:
        alone.kernel(*[y] * (3 if step == "residual" else 2))
    fused.kernel(x, y, *[y for step in steps if step == "residual"])
    got = answer.passes(x, y, list(steps), size)
    wanted = alone.bytes, fused.bytes
    assert tuple(got) == wanted, f"{x} to {y} values of {size} bytes, {steps}: {got}; wanted {wanted}"
