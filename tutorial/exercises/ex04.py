"""Exercise 4: where am I?

A kernel begins with index arithmetic. Thread i of a launch owns result i, in the order in which results lie in memory,
and has to find its coordinates and then the values that its window reads. Both layouts occur:

    nchw   y[n][k][p][q]: the next value in memory is the next column q
    nhwc   y[n][p][q][k]: the next value in memory is the next channel k

Grade it with `make exercise N=4`. No torch is needed, only // and %.
"""

from __future__ import annotations


def place(i: int, shape: tuple[int, int, int, int], layout: str) -> tuple[int, int, int, int] | None:
    """The coordinates (n, k, p, q) of the result that thread ``i`` owns; None if there is no such result.

    ``shape`` is (N, K, P, Q) in both layouts, as torch has it. Launches are rounded up to whole blocks: ``i`` may lie
    behind the last result.
    """
    raise NotImplementedError("your turn: take the digits off i, the fastest axis first")


def address(at: tuple[int, int, int, int], shape: tuple[int, int, int, int], layout: str) -> int:
    """Elements from the first element of a tensor to the one at ``at``: the inverse of :func:`place`.

    ``at`` is (n, c, h, w) and ``shape`` (N, C, H, W), whatever the layout.
    """
    raise NotImplementedError("your turn: multiply the coordinates by the strides of the layout")


def window(
    result: tuple[int, int, int, int],
    x_shape: tuple[int, int, int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    layout: str,
) -> list[int | None]:
    """The addresses in x of what the result at (n, k, p, q) adds up, in the order c, then r, then s.

    None stands for a tap on the padding. The convolution has one group: every result reads all channels of x. Pairs are
    (along H, along W).
    """
    raise NotImplementedError("your turn: h = p * stride - padding + r * dilation, and w alike")
