"""Exercise 4, solved: the digits of a number, and back."""

from __future__ import annotations


def place(i: int, shape: tuple[int, int, int, int], layout: str) -> tuple[int, int, int, int] | None:
    """The coordinates (n, k, p, q) of the result that thread ``i`` owns; None if there is no such result."""
    N, K, P, Q = shape
    if i >= N * K * P * Q:
        return None
    if layout == "nhwc":
        i, k = divmod(i, K)
    i, q = divmod(i, Q)
    i, p = divmod(i, P)
    if layout == "nchw":
        i, k = divmod(i, K)
    return i, k, p, q


def address(at: tuple[int, int, int, int], shape: tuple[int, int, int, int], layout: str) -> int:
    """Elements from the first element of a tensor to the one at ``at``: the inverse of :func:`place`."""
    (n, c, h, w), (_, C, H, W) = at, shape
    if layout == "nhwc":
        return ((n * H + h) * W + w) * C + c
    return ((n * C + c) * H + h) * W + w


def window(
    result: tuple[int, int, int, int],
    x_shape: tuple[int, int, int, int],
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    layout: str,
) -> list[int | None]:
    """The addresses in x of what the result at (n, k, p, q) adds up, in the order c, then r, then s."""
    (n, _, p, q), (_, C, H, W) = result, x_shape
    found: list[int | None] = []
    for c in range(C):
        for r in range(taps[0]):
            for s in range(taps[1]):
                h = p * stride[0] - padding[0] + r * dilation[0]
                w = q * stride[1] - padding[1] + s * dilation[1]
                inside = 0 <= h < H and 0 <= w < W
                found.append(address((n, c, h, w), x_shape, layout) if inside else None)
    return found
