"""A solution of exercise 2."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np


def floor(
    n: int,
    c: int,
    h: int,
    w: int,
    k: int,
    r: int,
    s: int,
    *,
    stride: int,
    padding: int,
    groups: int,
    element: int,
    speed: float,
    rate: float,
) -> float:
    p, q = (h + 2 * padding - r) // stride + 1, (w + 2 * padding - s) // stride + 1
    filters = k * (c // groups) * r * s
    moved = element * (n * c * h * w + filters + n * k * p * q)
    return max(moved / speed, 2 * n * p * q * filters / rate)


def filter_once(row: Callable[[int], np.ndarray], height: int, w: np.ndarray) -> Iterator[np.ndarray]:
    R, S = w.shape
    rows: deque[np.ndarray] = deque(maxlen=R)  # the last R rows; the oldest one falls out
    for i in range(height):
        rows.append(row(i))
        if len(rows) == R:
            total = np.zeros(len(rows[0]) - S + 1)
            for r, s in np.ndindex(R, S):
                total += rows[r][s : s + len(total)] * w[r, s]
            yield total
