"""Exercise 9: f32 by tensor cores that know eleven bits.

A tensor core that is given f32 looks at 11 significant bits of each factor (tf32) and adds the products up in f32.
Split the factors, so that three products of such matrices come within reach of f32.

    python -m pytest tutorial/exercises/test_ex09.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def split(x: Array) -> tuple[Array, Array]:
    """(high, low): two arrays of tf32 whose sum is x, but for 2^-22 of it. high is the tf32 that is nearest to x.

    A tf32 is a float32 whose last 13 bits are zeros. All x are finite and far from the largest float32; zeros, negative
    numbers and very small ones (but no subnormal ones) are among them.
    """
    raise NotImplementedError("your turn: write split")


def multiply(x: Array, w: Array) -> Array:
    """The matrix product of x (m, k) and w (k, n) from three products of tf32 matrices.

    Multiply by `tensor_core`, and by nothing else. Mind the order: what is small is added up first.
    """
    raise NotImplementedError("your turn: write multiply")


def tensor_core(sums: Array, a: Array, b: Array) -> Array:
    """sums + a @ b as a tensor core has it: it sees 11 bits of each factor, and adds in f32."""
    bits = np.uint32(0xFFFFE000)
    seen = [(each.astype(np.float32).view(np.uint32) & bits).view(np.float32) for each in (a, b)]
    result = sums.astype(np.float32)
    for k in range(a.shape[1]):
        product = seen[0][:, k, None].astype(np.float64) * seen[1][None, k, :]
        result = (result + product).astype(np.float32)
    return result
