"""Exercise 8: the address of a number in a matrix that is not there.

`address` is what a thread of an implicit GEMM works out before it copies: where A[m, d] lies in x. A row m is an output
pixel: the images one behind the other, in each the rows, in each the columns. A column d is a term of the sum: the taps
row by row, in each the channels of one group. `gradient_address` is the same for the image gradient, where rows m are
pixels of dx, terms d are taps and the filters of one group, and the numbers lie in dy.

    python -m pytest tutorial/exercises/test_ex08.py
"""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """A convolution of two axes. Pairs are (along rows, along columns): stride (2, 1) steps two rows and one column."""

    images: int
    channels: int  # of x, all groups
    filters: int  # channels of y, all groups
    groups: int
    size: tuple[int, int]  # of x
    out: tuple[int, int]  # of y
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]  # on both sides
    dilation: tuple[int, int]


def address(layer: Layer, group: int, m: int, d: int, layout: str) -> int | None:
    """How many elements A[m, d] of a group lies behind the first element of x; None where it is padding.

    `layout` is "nchw" (x[image][channel][row][column]) or "nhwc" (x[image][row][column][channel]).
    """
    raise NotImplementedError("your turn: write address")


def gradient_address(layer: Layer, group: int, m: int, d: int, layout: str) -> int | None:
    """How many elements behind the first of dy the number lies that pixel m of dx is to be summed up from for term d.

    None where no pixel of y reads this pixel of x by this tap: because that pixel would lie outside of y, or because
    the stride passes over it. Do not look for it: invert what `address` does.
    """
    raise NotImplementedError("your turn: write gradient_address")
