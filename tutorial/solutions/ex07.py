"""Exercise 7, solved: columns within a limit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def im2col(
    x: Tensor,
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    first: int,
    count: int,
) -> Tensor:
    """The columns of ``count`` output pixels, from pixel number ``first`` on, of one image ``x`` (C, H, W)."""
    (C, H, W), (R, S) = x.shape, taps
    Q = (W + 2 * padding[1] - dilation[1] * (S - 1) - 1) // stride[1] + 1
    pixel = torch.arange(first, first + count)
    p, q = pixel // Q, pixel % Q
    columns = torch.zeros(C, R, S, count, dtype=x.dtype)
    for r in range(R):
        h = p * stride[0] - padding[0] + r * dilation[0]
        for s in range(S):
            v = q * stride[1] - padding[1] + s * dilation[1]
            inside = (h >= 0) & (h < H) & (v >= 0) & (v < W)
            columns[:, r, s, inside] = x[:, h[inside], v[inside]]
    return columns.view(C * R * S, count)


def pixels_of(limit: int, channels: int, taps: tuple[int, int], size: int) -> int:
    """How many pixels a panel may have, so that its columns of ``size`` bytes a value take at most ``limit`` bytes."""
    column = channels * taps[0] * taps[1] * size
    if limit < column:
        raise ValueError(f"limit is {limit} bytes; one column takes {column}")
    return limit // column


def panels(x: Tensor, taps: tuple[int, int], pixels: int, limit: int) -> Iterator[tuple[int, int, int]]:
    """(image, first pixel, pixels) of each panel."""
    most = pixels_of(limit, x.shape[1], taps, x.element_size())
    for n in range(len(x)):
        for first in range(0, pixels, most):
            yield n, first, min(most, pixels - first)


def convolve(
    x: Tensor,
    w: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    limit: int,
) -> Tensor:
    """y (N, K, P, Q) of ``x`` (N, C, H, W) and ``w`` (K, C, R, S): for each panel, :func:`im2col` and one product."""
    K, taps = len(w), (w.shape[2], w.shape[3])
    P, Q = (
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (taps[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )  # fmt: skip
    y = torch.empty(len(x), K, P * Q, dtype=x.dtype)
    for n, first, count in panels(x, taps, P * Q, limit):
        y[n, :, first : first + count] = w.view(K, -1) @ im2col(x[n], taps, stride, padding, dilation, first, count)
    return y.view(len(x), K, P, Q)


def filter_gradient(
    x: Tensor,
    dy: Tensor,
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    limit: int,
) -> Tensor:
    """dw (K, C, R, S) of ``x`` (N, C, H, W) and ``dy`` (N, K, P, Q), panel by panel in the same way."""
    N, K, P, Q = dy.shape
    rows = dy.reshape(N, K, P * Q)
    dw = torch.zeros(K, x.shape[1] * taps[0] * taps[1], dtype=x.dtype)
    for n, first, count in panels(x, taps, P * Q, limit):
        dw += rows[n, :, first : first + count] @ im2col(x[n], taps, stride, padding, dilation, first, count).T
    return dw.view(K, x.shape[1], *taps)
