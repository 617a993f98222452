"""Exercise 2: the least time of a layer, and a filter that reads each row of an image once (chapter 2).

Grade it with `make exercise N=2`, or `python -m pytest tutorial/exercises/test_ex02.py`.
"""

from __future__ import annotations

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
    """The least seconds of a convolution by its definition: the larger of bytes / speed and operations / rate.

    Bytes: x (n, c, h, w), w (k, c/groups, r, s) and y once each, `element` bytes a number. Operations: two a product.
    """
    raise NotImplementedError("your turn: work out the size of y, then the bytes and the operations")


def filter_once(row: Callable[[int], np.ndarray], height: int, w: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of the output, from the top, of an image that is too large to hold.

        y[p, q] = sum over r, s of  x[p + r, q + s] * w[r, s]         no padding: height - R + 1 rows

    `row(i)` reads row i of x, 0 <= i < height. Ask for each row once, and keep no more than you need: about as many
    rows as the filter has. Either the last rows of x stay, or the sums of the rows of y that are not whole yet.
    """
    raise NotImplementedError("your turn: yield each row of y as soon as the rows of x that it needs were there")
