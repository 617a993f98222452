"""Exercise 6, solved: tiles with a halo, and banks."""

from __future__ import annotations

BANKS = 32


def tile(
    results: tuple[int, int], taps: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Height and width of the part of the image that a tile of results needs."""
    height, width = (
        (count - 1) * step + (tap - 1) * gap + 1
        for count, tap, step, gap in zip(results, taps, stride, dilation, strict=True)
    )
    return height, width


def cycles(words: list[int]) -> int:
    """Cycles that shared memory takes for one load of a warp."""
    wanted: dict[int, set[int]] = {}
    for word in words:
        wanted.setdefault(word % BANKS, set()).add(word)
    return max((len(different) for different in wanted.values()), default=0)


def pitch(width: int) -> int:
    """Odd strides meet all banks: an odd number and 32 have no common factor."""
    return width | 1


def total_loads(size: tuple[int, int], results: tuple[int, int], taps: tuple[int, int]) -> int:
    """Rows and columns are independent: the sum over tiles is a product of two sums."""
    total = 1
    for length, count, tap in zip(size, results, taps, strict=True):
        starts = range(-(tap // 2), length - tap // 2, count)
        total *= sum(min(length, start + count + tap - 1) - max(0, start) for start in starts)
    return total
