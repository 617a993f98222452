"""Exercise 7: columns within a limit.

Write im2col for a range of pixels, and a convolution that makes its matrix product panel by panel, so that columns
never take more than a given number of bytes. Grade it with `make exercise N=7`. torch's own unfold and convolutions are
out of bounds; slices, `torch.zeros` and `@` are enough.
"""

from __future__ import annotations

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
    """The columns of ``count`` output pixels, from pixel number ``first`` on, of one image ``x`` (C, H, W).

    The result has C * R * S rows, in the order c, r, s, and ``count`` columns; pixel p * Q + q is that of row p and
    column q of the output. Taps on the padding are zeros. Pairs are (along H, along W).
    """
    raise NotImplementedError("your turn: which row and column of x does tap (r, s) of pixel i read?")


def pixels_of(limit: int, channels: int, taps: tuple[int, int], size: int) -> int:
    """How many pixels a panel may have, so that its columns of ``size`` bytes a value take at most ``limit`` bytes.

    ValueError if not even one pixel fits, with a message that has the bytes that one needs in it.
    """
    raise NotImplementedError("your turn: bytes of one column, and how many of them fit")


def convolve(
    x: Tensor,
    w: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    limit: int,
) -> Tensor:
    """y (N, K, P, Q) of ``x`` (N, C, H, W) and ``w`` (K, C, R, S): for each panel, :func:`im2col` and one product.

    Call :func:`im2col` as often as panels are needed and no more than that: the grader counts, and looks at what the
    columns take.
    """
    raise NotImplementedError("your turn: y[n, :, panel] = w as a matrix @ columns")


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
    raise NotImplementedError("your turn: the sum over panels of dy @ columns transposed")
