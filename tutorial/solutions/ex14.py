"""A solution of exercise 14."""

from __future__ import annotations

import numpy as np
from numpy import float64
from numpy.typing import NDArray

Array = NDArray[float64]


def fold_behind(
    w: Array, b: Array | None, mean: Array, var: Array, gamma: Array, beta: Array, eps: float
) -> tuple[Array, Array]:
    """See the exercise."""
    scale = gamma / np.sqrt(var + eps)
    bias = np.zeros(len(w)) if b is None else b
    return w * scale.reshape(-1, *[1] * (w.ndim - 1)), (bias - mean) * scale + beta


def fold_in_front(
    w: Array, b: Array | None, scale: Array, shift: Array, groups: int, *, padded: bool
) -> tuple[Array, Array]:
    """See the exercise."""
    if padded and shift.any():
        raise ValueError("the convolution is padded and its image shifted; wanted no padding, or shifts of 0")
    # w[k, c] meets channel c of the group that k is in.
    mine = [np.repeat(vector.reshape(groups, -1), len(w) // groups, axis=0) for vector in (scale, shift)]
    of_taps = mine[0].reshape(*mine[0].shape, *[1] * (w.ndim - 2))
    bias = np.zeros(len(w)) if b is None else b
    return w * of_taps, bias + (w.reshape(*w.shape[:2], -1).sum(2) * mine[1]).sum(1)


def passes(x: int, y: int, steps: list[str], size: int) -> tuple[int, int]:
    """See the exercise."""
    residuals = steps.count("residual")
    return size * (x + y + 2 * y * len(steps) + y * residuals), size * (x + y + y * residuals)
