"""Grades exercise 1: `meeting` by brute force over the forward formula, `dgrad` by PyTorch's autograd."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

CASES = 40


def sizes(generator: np.random.Generator) -> dict[str, int]:
    """A random axis that at least one window fits on."""
    taps, stride, dilation = generator.integers(1, [5, 4, 4])
    padding = generator.integers(0, dilation * (taps - 1) + 2)
    least = max(1, dilation * (taps - 1) + 1 - 2 * padding)
    size = generator.integers(least, least + 7)
    outputs = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    named = {"size": size, "outputs": outputs, "taps": taps, "stride": stride, "padding": padding, "dilation": dilation}
    return {name: int(value) for name, value in named.items()}


def test_meeting(answer: ModuleType) -> None:
    generator = np.random.default_rng(1)
    for _ in range(CASES):
        axis = sizes(generator)
        size = axis.pop("size")
        for h in range(size):
            wanted = [
                (p, r)
                for r in range(axis["taps"])
                for p in range(axis["outputs"])
                if p * axis["stride"] - axis["padding"] + r * axis["dilation"] == h
            ]
            got = answer.meeting(h, **axis)
            if got != wanted:
                pytest.fail(f"meeting(h={h}, {_text(axis)}) is {got}; wanted {wanted}", pytrace=False)


def test_dgrad(answer: ModuleType) -> None:
    """Whole numbers in f64: equal, not only close."""
    generator = np.random.default_rng(2)
    for _ in range(CASES):
        axis = sizes(generator)
        groups = int(generator.integers(1, 4))
        n, c, k = generator.integers(1, 3, 3)
        options = {name: axis[name] for name in ("stride", "padding", "dilation")} | {"groups": groups}
        x = torch.zeros(n, c * groups, axis["size"], axis["size"] + 3, dtype=torch.float64, requires_grad=True)
        w = torch.from_numpy(generator.integers(-4, 5, (k * groups, c, axis["taps"], axis["taps"])).astype(float))
        y = F.conv2d(x, w, **options)
        dy = torch.from_numpy(generator.integers(-4, 5, y.shape).astype(float))
        (wanted,) = torch.autograd.grad(y, x, dy)
        got = answer.dgrad(dy.numpy(), w.numpy(), tuple(x.shape[2:]), **options)
        case = f"dgrad of dy {tuple(dy.shape)} and w {tuple(w.shape)}, size={tuple(x.shape[2:])}, {_text(options)}"
        if np.shape(got) != tuple(wanted.shape):
            pytest.fail(f"{case}: the shape is {np.shape(got)}; wanted {tuple(wanted.shape)}", pytrace=False)
        if not np.array_equal(got, wanted):
            at = tuple(int(i) for i in np.argwhere(np.asarray(got) != wanted.numpy())[0])
            pytest.fail(f"{case}: dx{list(at)} is {got[at]}; wanted {wanted[at].item()}", pytrace=False)


def _text(options: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
