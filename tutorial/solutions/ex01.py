"""A solution of exercise 1."""

from __future__ import annotations

import numpy as np


def meeting(h: int, outputs: int, taps: int, stride: int, padding: int, dilation: int) -> list[tuple[int, int]]:
    pairs = []
    for r in range(taps):
        p, rest = divmod(h + padding - r * dilation, stride)
        if rest == 0 and 0 <= p < outputs:
            pairs.append((p, r))
    return pairs


def dgrad(
    dy: np.ndarray,
    w: np.ndarray,
    size: tuple[int, int],
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    (N, K, P, Q), (_, CG, R, S) = dy.shape, w.shape
    KG = K // groups
    dx = np.zeros((N, CG * groups, *size))
    for h, v in np.ndindex(*size):
        rows, columns = meeting(h, P, R, stride, padding, dilation), meeting(v, Q, S, stride, padding, dilation)
        for g in range(groups):
            filters, channels = slice(g * KG, (g + 1) * KG), slice(g * CG, (g + 1) * CG)
            for p, r in rows:
                for q, s in columns:
                    dx[:, channels, h, v] += dy[:, filters, p, q] @ w[filters, :, r, s]
    return dx
