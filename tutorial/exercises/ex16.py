"""Exercise 16: sums in f32 that can be trusted.

Grade it with `make exercise N=16`.
"""

from __future__ import annotations

from numpy import float32
from numpy.typing import NDArray

Floats = NDArray[float32]


def bounds(terms: int) -> tuple[float, float]:
    """How far a sum of so many f32 terms may be from the exact one, as a share of the sum of their sizes: first of a
    chain, one term after the other, then of a pairwise sum, whose terms pass ceil(log2(terms)) additions. To first
    order, that is 2**-24 for each addition that a term passes; the first term of a chain passes all of them.
    """
    raise NotImplementedError("your turn: how many additions does a term pass?")


def pairwise(values: Floats) -> Floats:
    """The sums over the last axis of an array of f32, of any number of axes and any length from 1 on.

    All additions are of f32, and a term passes at most ceil(log2(length)) of them. The order depends on the length
    alone, so that a row has the same bits by itself and among others, and however the array lies in memory. np.sum,
    np.add.reduce and their like do not promise that, and are out, as is float64.
    """
    raise NotImplementedError("your turn: add halves, or neighbours, until one is left")


def split_sum(values: Floats, splits: int) -> Floats:
    """The sum of a vector as a wgrad makes it: `splits` blocks sum neighbouring parts of it, each `pairwise`, and a
    second launch adds the parts up, `pairwise` as well.

    The parts differ in length by one at most, longer ones first. With as many splits as terms or more, each term is a
    part. Returns an array without axes. The bits depend on the length and on `splits`, and on nothing else.
    """
    raise NotImplementedError("your turn: cut, sum each part, sum the parts")
