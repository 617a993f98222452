"""A solution of exercise 10: the ring of stages on a clock, the parity of a turn, and rows that do not collide."""

from __future__ import annotations


def finish(
    tiles: int, steps: int, stages: int, teams: int, *, multiply: int, bring: int, way: int, results: int
) -> int:
    """The cycle at which the results of the last tile are stored."""
    came, done = 0, 0
    ended: list[int] = []  # the products of each step
    stored: list[int] = []  # the results of each tile
    for tile in range(tiles):
        begun = stored[tile - teams] if tile >= teams else 0
        for _ in range(steps):
            number = len(ended)
            asked = ended[number - stages] if number >= stages else 0
            came = max(asked + way, came) + bring
            done = max(came, done, begun) + multiply
            ended.append(done)
        stored.append(done + results)
    return max(stored)


def turn(step: int, stages: int) -> tuple[int, int]:
    """(stage, parity) that step number `step` of a ring waits for."""
    return step % stages, step // stages % 2


def place(row: int, piece: int, pieces: int) -> int:
    """The byte at which piece `piece` of row `row` lies, where rows have `pieces` (2, 4 or 8) pieces of 16 bytes."""
    # As many rows as share 128 bytes, all banks once, share an exchange.
    return row * pieces * 16 + (piece ^ row // (8 // pieces) % pieces) * 16
