"""Exercise 14: fold batch norms into convolutions, and count what fusing saves.

Grade it with `make exercise N=14`.
"""

from __future__ import annotations

from numpy import float64
from numpy.typing import NDArray

Array = NDArray[float64]


def fold_behind(
    w: Array, b: Array | None, mean: Array, var: Array, gamma: Array, beta: Array, eps: float
) -> tuple[Array, Array]:
    """(w', b') so that conv(x, w', b') = norm(conv(x, w, b)), for a batch norm behind the convolution:

        norm(y) = gamma * (y - mean) / sqrt(var + eps) + beta      channel by channel of y

    w has the shape (K, C/G, taps ...), with one axis of taps or more; the vectors have K values. b may be missing. What
    is given stays as it is.
    """
    raise NotImplementedError("your turn: scale the filters of each result channel, and shift")


def fold_in_front(
    w: Array, b: Array | None, scale: Array, shift: Array, groups: int, *, padded: bool
) -> tuple[Array, Array]:
    """(w', b') so that conv(x, w', b') = conv(scale * x + shift, w, b), for a batch norm in front of the convolution.

    `scale` and `shift` have a value for each of the C channels of x; w has the shape (K, C/G, taps ...). What is given
    stays as it is. ValueError if the convolution is `padded` and a shift is not 0: zeros of the padding are not
    shifted, so that no bias is right both at the border and in the middle.
    """
    raise NotImplementedError("your turn: which channel of x does w[k, c] meet in its group?")


def passes(x: int, y: int, steps: list[str], size: int) -> tuple[int, int]:
    """Bytes that a convolution of `x` values to `y` values and the `steps` behind it move: one kernel for each, and all
    in one kernel. Steps are "bias", "scale" and "relu", which change each value, and "residual", which adds another
    tensor of `y` values. Filters and vectors are too small to count. A value has `size` bytes.
    """
    raise NotImplementedError("your turn: what does each kernel read, and what does it write?")
