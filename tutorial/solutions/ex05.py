"""Exercise 5, solved: sectors of a warp."""

from __future__ import annotations

LANES, SECTOR = 32, 32


def sectors(starts: list[int | None], size: int, vector: int = 1, base: int = 0) -> int:
    """How many different sectors one load of a warp touches."""
    found = set()
    for start in starts:
        if start is not None:
            first = base + start * size
            found.update(byte // SECTOR for byte in range(first, first + vector * size))
    return len(found)


def store(first: int, shape: tuple[int, int, int, int], layout: str, neighbours: str, size: int) -> int:
    """How many sectors the store of a warp touches whose lanes own the results ``first`` ... ``first + 31``."""
    N, K, P, Q = shape
    starts: list[int | None] = []
    for i in range(first, first + LANES):
        if i >= N * K * P * Q:
            continue
        if neighbours == "columns":
            n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        else:
            n, k, p, q = i // (K * P * Q), i % K, i // (K * Q) % P, i // K % Q
        starts.append(((n * K + k) * P + p) * Q + q if layout == "nchw" else ((n * P + p) * Q + q) * K + k)
    return sectors(starts, size)


def hand_out(count: int, vector: int) -> list[list[int | None]]:
    """Neighbouring lanes take neighbouring vectors; the next load goes on behind the last lane."""
    loads: list[list[int | None]] = []
    for begin in range(0, count, LANES * vector):
        starts = [begin + lane * vector for lane in range(LANES)]
        loads.append([start if start < count else None for start in starts])
    return loads
