"""Exercise 10: the ring of stages on a clock, the parity of a turn, and rows that do not collide.

python -m pytest tutorial/exercises/test_ex10.py
"""

from __future__ import annotations


def finish(
    tiles: int, steps: int, stages: int, teams: int, *, multiply: int, bring: int, way: int, results: int
) -> int:
    """The cycle at which the results of the last tile are stored.

    A block computes `tiles` tiles one after the other, each of `steps` steps, counted through all tiles.

    - Step i lies in stage i % stages. It is asked for when that stage is empty: at cycle 0 for the first ones, and else
      when the step that was there before has been multiplied. Steps are asked for in their order.
    - A step is on its way for `way` cycles. Then it comes, which takes `bring` cycles. Steps come in their order, one
      at a time.
    - The tensor cores multiply one step at a time, in order, `multiply` cycles each. A step begins when it has come.
    - Behind the last step of a tile its team stores results for `results` cycles. Tile j belongs to team j % teams, and
      a team does not begin to multiply a tile before it has stored the one before. Other teams' products go on
      meanwhile.

    All times are whole numbers, and at least 1. Do not count cycle by cycle: each time follows from some earlier ones.
    """
    raise NotImplementedError("your turn: write finish")


def turn(step: int, stages: int) -> tuple[int, int]:
    """(stage, parity) that step number `step` of a ring waits for.

    A barrier begins in phase 0. Each time the bytes of a step have come, its phase ends and the next one begins. A wait
    for parity 0 returns if the phase that ended last was one of the even ones, 0, 2, ..., for parity 1 one of the odd.
    (Before any has ended, a wait for parity 1 returns, as if phase -1 had.)
    """
    raise NotImplementedError("your turn: write turn")


def place(row: int, piece: int, pieces: int) -> int:
    """The byte at which piece `piece` of row `row` lies, where rows have `pieces` (2, 4 or 8) pieces of 16 bytes.

    Rows are to lie one behind the other without gaps: row i within the bytes from 16 * pieces * i on. Eight rows one
    behind the other, of which the first is a multiple of 8, are to have the same piece in different banks: shared
    memory has 32 banks of 4 bytes, the byte b lies in bank b / 4 % 32.
    """
    raise NotImplementedError("your turn: write place")
