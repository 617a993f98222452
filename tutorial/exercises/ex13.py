"""Exercise 13: the floors of a layer, and a depthwise convolution that reads every row once.

Grade it with `make exercise N=13`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Image(Protocol):
    """An image that lies in a file. Each call of `read` goes there and is counted."""

    shape: tuple[int, int, int]
    """Channels, rows, columns."""

    def read(self, channel: int, row: int) -> Array:
        """One row of one channel."""
        ...


def floors(
    n: int, c: int, k: int, h: int, w: int, taps: int, groups: int, size: int, bandwidth: float, rate: float
) -> tuple[float, float, int]:
    """What a layer of `taps` x `taps` (odd), stride 1 and padding `taps // 2` needs at the least.

    - the seconds to move x, the filters and y once each, `size` bytes a value
    - the seconds of its operations, two for each tap of each result, those on the padding included
    - its reuse: in how many products a value of x stands that no border is near to
    """
    raise NotImplementedError("your turn: bytes over bandwidth, operations over rate, and the reuse")


def sliding(image: Image, filters: Array, store: Callable[[int, int, Array], None]) -> None:
    """y[c, p, q] = sum over r, s of filters[c, r, s] * x[c, p + r, q + s], depthwise and without padding.

    Read each row of each channel once. Give each row of results to `store(channel, row, values)` as soon as all rows
    that it needs have been read, that is before another row of that channel is read.
    """
    raise NotImplementedError("your turn: keep the sums of all rows of results that are under way")
