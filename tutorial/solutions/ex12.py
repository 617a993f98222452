"""A solution of exercise 12."""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float64]


def overlap_save(x: Signal, w: Signal, size: int) -> Signal:
    """See the exercise."""
    if not len(w) <= min(size, len(x)):
        raise ValueError(f"the filter has {len(w)} taps; wanted at most the tile's {size} and the signal's {len(x)}")
    count, valid = len(x) - len(w) + 1, size - len(w) + 1
    starts = range(0, count, valid)
    tiles = np.zeros((len(starts), size))
    for tile, start in zip(tiles, starts, strict=True):
        piece = x[start : start + size]
        tile[: len(piece)] = piece
    spectrum = np.conj(np.fft.rfft(np.pad(w, (0, size - len(w)))))
    results: Signal = np.fft.irfft(np.fft.rfft(tiles) * spectrum, size)[:, :valid]
    return results.reshape(-1)[:count]


def best_size(length: int, taps: int, sizes: list[int]) -> int:
    """See the exercise."""

    def operations(size: int) -> float:
        tiles = -(-(length - taps + 1) // (size - taps + 1))
        return (2 * tiles + 1) * 2.5 * size * log2(size) + tiles * 3 * size

    return min((size for size in sizes if size >= taps), key=lambda size: (operations(size), size))
