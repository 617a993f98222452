"""A solution of exercise 13."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Image(Protocol):
    """See the exercise."""

    shape: tuple[int, int, int]

    def read(self, channel: int, row: int) -> Array: ...


def floors(
    n: int, c: int, k: int, h: int, w: int, taps: int, groups: int, size: int, bandwidth: float, rate: float
) -> tuple[float, float, int]:
    """See the exercise."""
    moved = size * (n * c * h * w + k * (c // groups) * taps**2 + n * k * h * w)
    operations = 2 * n * k * h * w * (c // groups) * taps**2
    return moved / bandwidth, operations / rate, k // groups * taps**2


def sliding(image: Image, filters: Array, store: Callable[[int, int, Array], None]) -> None:
    """See the exercise."""
    channels, height, width = image.shape
    _, taps, across = filters.shape
    columns = width - across + 1
    for c in range(channels):
        under_way: deque[tuple[int, Array]] = deque()  # rows of results, the oldest first
        for h in range(height):
            row = image.read(c, h)
            if h + taps <= height:
                under_way.append((h, np.zeros(columns)))
            for p, sums in under_way:
                for s in range(across):
                    sums += filters[c, h - p, s] * row[s : s + columns]
            if h >= taps - 1:
                store(c, *under_way.popleft())
