"""A solution of exercise 9: f32 by tensor cores that know eleven bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def split(x: Array) -> tuple[Array, Array]:
    """(high, low): two arrays of tf32 whose sum is x, but for 2^-22 of it. high is the tf32 that is nearest to x."""
    high = _nearest(x)
    return high, _nearest(x - high)  # the difference is exact: it has the bits that high lacks


def _nearest(x: Array) -> Array:
    # Half of the last bit that stays is added, then what lies below that bit is cut off.
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def multiply(x: Array, w: Array) -> Array:
    """The matrix product of x (m, k) and w (k, n) from three products of tf32 matrices."""
    (high_x, low_x), (high_w, low_w) = split(x), split(w)
    sums = np.zeros((x.shape[0], w.shape[1]), np.float32)
    sums = tensor_core(sums, low_x, high_w)
    sums = tensor_core(sums, high_x, low_w)
    return tensor_core(sums, high_x, high_w)


def tensor_core(sums: Array, a: Array, b: Array) -> Array:
    """sums + a @ b as a tensor core has it: it sees 11 bits of each factor, and adds in f32."""
    bits = np.uint32(0xFFFFE000)
    seen = [(each.astype(np.float32).view(np.uint32) & bits).view(np.float32) for each in (a, b)]
    result = sums.astype(np.float32)
    for k in range(a.shape[1]):
        product = seen[0][:, k, None].astype(np.float64) * seen[1][None, k, :]
        result = (result + product).astype(np.float32)
    return result
