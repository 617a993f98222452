"""Exercise 1: the gradient of an image, as a sum over what meets each place (chapter 1).

Grade it with `make exercise N=1`, or `python -m pytest tutorial/exercises/test_ex01.py`.
"""

from __future__ import annotations

import numpy as np


def meeting(h: int, outputs: int, taps: int, stride: int, padding: int, dilation: int) -> list[tuple[int, int]]:
    """All pairs (p, r) of an output p and a tap r that lie on place h of x: p*stride - padding + r*dilation == h.

    0 <= p < outputs and 0 <= r < taps. In the order of r. Loop over the taps alone: of each, p follows from h.
    """
    raise NotImplementedError("your turn: find the pairs (p, r) that meet place h")


def dgrad(
    dy: np.ndarray,
    w: np.ndarray,
    size: tuple[int, int],
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """dx of shape (N, C, *size), from dy (N, K, P, Q) and w (K, C/groups, R, S).

        dx[n,c,h,v] = sum over k of c's group, over (p, r) that meet h and (q, s) that meet v, of
                      dy[n,k,p,q] * w[k, c - first channel of the group, r, s]

    Filter k belongs to group k // (K / groups), channel c to group c // (C / groups).
    """
    raise NotImplementedError("your turn: sum dy * w over the pairs that `meeting` finds along both axes")
