"""Exercise 5: sectors.

Memory hands out whole sectors of 32 bytes. What a load or store of a warp costs is the number of different sectors that
its 32 lanes touch. Grade it with `make exercise N=5`.
"""

from __future__ import annotations

LANES, SECTOR = 32, 32


def sectors(starts: list[int | None], size: int, vector: int = 1, base: int = 0) -> int:
    """How many different sectors one load of a warp touches.

    Lane i loads ``vector`` elements side by side, the first of which is element ``starts[i]`` of a tensor; None says
    that the lane loads nothing. An element has ``size`` bytes, and the tensor begins at byte ``base`` of memory, which
    is not always a multiple of a sector.
    """
    raise NotImplementedError("your turn: all bytes of all lanes, divided by 32, each sector once")


def store(first: int, shape: tuple[int, int, int, int], layout: str, neighbours: str, size: int) -> int:
    """How many sectors the store of a warp touches whose lanes own the results ``first`` ... ``first + 31``.

    ``shape`` is (N, K, P, Q) and ``layout`` nchw or nhwc: how the results lie in memory, from byte 0 on. ``neighbours``
    says how results are numbered: "columns" counts q fastest, then p, k and n; "channels" counts k fastest, then q, p
    and n. Numbers behind the last result store nothing.
    """
    raise NotImplementedError("your turn: number -> (n, k, p, q) -> address, for 32 lanes, then sectors")


def hand_out(count: int, vector: int) -> list[list[int | None]]:
    """Hand out ``count`` elements of a row, which starts at a sector, to the 32 lanes of a warp.

    The answer is a list of loads, as many as are needed and no more; each is a list of 32 entries: the first of
    ``vector`` elements that the lane loads, or None. ``count`` is a multiple of ``vector``. Every element is loaded
    once, and every load touches as few sectors as possible.
    """
    raise NotImplementedError("your turn: which element does lane i take in load j?")
