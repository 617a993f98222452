"""Exercise 12: a long signal, a filter of any length, and transforms of one size.

Grade it with `make exercise N=12`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float64]


def overlap_save(x: Signal, w: Signal, size: int) -> Signal:
    """y[i] = sum over r of w[r] * x[i + r], for every i at which the filter lies inside of x.

    By overlap-save: cut x into tiles of `size` positions (the last one filled up with zeros), transform each with
    np.fft.rfft, multiply by the conjugate of the filter's spectrum, transform back with np.fft.irfft, and keep of each
    tile what did not wrap around: in all len(x) - len(w) + 1 results. The filter is transformed once, and there are as
    few tiles as cover the results. Sums over taps, np.convolve and np.correlate are out.

    ValueError if the filter is longer than a tile or than x: a tile would have no result.
    """
    raise NotImplementedError("your turn: cut tiles that overlap by len(w) - 1, transform, multiply, transform back")


def best_size(length: int, taps: int, sizes: list[int]) -> int:
    """Of `sizes`, the one with the fewest operations for a signal of `length` samples and so many taps; the smaller one
    of two that are equal. Sizes below `taps` are passed over. Counted are

        2.5 * size * log2(size)    for each transform: two a tile, and one of the filter
        3 * size                   for the product of a tile's spectrum
    """
    raise NotImplementedError("your turn: count tiles and what each costs")
