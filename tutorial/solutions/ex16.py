"""A solution of exercise 16."""

from __future__ import annotations

import itertools

import numpy as np
from numpy import float32
from numpy.typing import NDArray

Floats = NDArray[float32]


def bounds(terms: int) -> tuple[float, float]:
    """See the exercise."""
    return (terms - 1) * 2.0**-24, (terms - 1).bit_length() * 2.0**-24


def pairwise(values: Floats) -> Floats:
    """See the exercise."""
    while (length := values.shape[-1]) > 1:
        even = length // 2 * 2
        halved = values[..., 0:even:2] + values[..., 1:even:2]
        values = np.concatenate([halved, values[..., even:]], axis=-1)
    return values[..., 0]


def split_sum(values: Floats, splits: int) -> Floats:
    """See the exercise."""
    length = len(values)
    count = min(splits, length)
    short, longer = divmod(length, count)
    ends = [short * at + min(at, longer) for at in range(count + 1)]
    parts = [pairwise(values[low:high]) for low, high in itertools.pairwise(ends)]
    return pairwise(np.array(parts, dtype=np.float32))
