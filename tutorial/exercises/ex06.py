"""Exercise 6: tiles with a halo, and banks.

Grade it with `make exercise N=6`.
"""

from __future__ import annotations

BANKS = 32


def tile(
    results: tuple[int, int], taps: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Height and width of the part of the image that a tile of results needs: from the first to the last row, and from
    the first to the last column, that one of its windows reads.

    All pairs are (along H, along W); ``results`` and ``taps`` say how many there are.
    """
    raise NotImplementedError("your turn: how far is the last tap of the last window from the first of the first?")


def cycles(words: list[int]) -> int:
    """Cycles that shared memory takes for one load of a warp, whose lanes ask for these words of 4 bytes.

    Word i lies in bank i % 32. A bank gives one word in a cycle; lanes that want the same word get it together.
    """
    raise NotImplementedError("your turn: the bank that has to give most different words sets the pace")


def pitch(width: int) -> int:
    """The fewest words that rows of a tile may be apart, at least ``width``, so that 32 lanes which read down a column
    need one cycle."""
    raise NotImplementedError("your turn: which strides meet all 32 banks?")


def total_loads(size: tuple[int, int], results: tuple[int, int], taps: tuple[int, int]) -> int:
    """How many values of the image all tiles together load.

    The image has ``size`` rows and columns, the stride is 1, and the padding keeps the size: taps are odd, with half of
    them on each side of a pixel. Tiles of ``results`` cover the results from the top left corner on; those at the right
    and at the bottom may hang over the edge and load what a whole tile would. Only values that lie inside of the image
    are loaded.
    """
    raise NotImplementedError("your turn: sum over tiles of what their halo has inside of the image")
