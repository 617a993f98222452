"""Grades exercise 10: by a clock that goes cycle by cycle, by barriers, and by the banks of shared memory."""

from __future__ import annotations

import random
from types import ModuleType

import pytest


def _by_the_clock(tiles: int, steps: int, stages: int, teams: int, multiply: int, bring: int, way: int,
                  results: int) -> int:  # fmt: skip
    """The same, one cycle after the other: who can begin something, begins it."""
    total, cycle = tiles * steps, 0
    asked: list[int] = []  # when
    coming: list[int] = []  # until when
    multiplying: list[int] = []
    free = [0] * teams  # from when on a team may multiply
    while len(multiplying) < total:
        while len(asked) < total and (
            len(asked) < stages
            or (len(multiplying) > len(asked) - stages and multiplying[len(asked) - stages] <= cycle)
        ):
            asked.append(cycle)
        port_is_free = not coming or coming[-1] <= cycle
        if port_is_free and len(coming) < len(asked) and asked[len(coming)] + way <= cycle:
            coming.append(cycle + bring)
        step = len(multiplying)
        team = step // steps % teams
        core_is_free = not multiplying or multiplying[-1] <= cycle
        there = step < len(coming) and coming[step] <= cycle
        if core_is_free and there and (step % steps or free[team] <= cycle):
            multiplying.append(cycle + multiply)
            if step % steps == steps - 1:
                free[team] = cycle + multiply + results
        cycle += 1
    return max(free)


def _draw(seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    return {
        "tiles": draw.randint(1, 5), "steps": draw.randint(1, 7), "stages": draw.randint(1, 5),
        "teams": draw.randint(1, 3), "multiply": draw.randint(1, 12), "bring": draw.randint(1, 12),
        "way": draw.randint(1, 30), "results": draw.randint(1, 25),
    }  # fmt: skip


def test_finish_by_the_clock(answer: ModuleType) -> None:
    for seed in range(300):
        case = _draw(seed)
        got, wanted = answer.finish(**case), _by_the_clock(**case)
        if got != wanted:
            case_text = ", ".join(f"{name}={value}" for name, value in case.items())
            pytest.fail(f"finish({case_text}) is {got}; the clock says {wanted}", pytrace=False)


class _Barrier:
    def __init__(self) -> None:
        self.phase = 0

    def returns(self, parity: int) -> bool:
        """Whether a wait for this parity would return at once: the phase under way has the other one."""
        return self.phase % 2 != parity


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_turns_of_a_ring(answer: ModuleType, stages: int) -> None:
    full, empty = ([_Barrier() for _ in range(stages)] for _ in range(2))
    for step in range(6 * stages):
        stage, parity = answer.turn(step, stages)
        if stage not in range(stages) or parity not in (0, 1):
            pytest.fail(f"turn({step}, {stages}) is {(stage, parity)}; there is no such stage or parity", pytrace=False)
        if full[stage].returns(parity):
            pytest.fail(f"turn({step}, {stages}) is {(stage, parity)}: that wait returns before it came", pytrace=False)
        if not empty[stage].returns(parity ^ 1):  # as the thread that asks waits: nobody is there in the first round
            pytest.fail(f"turn({step}, {stages}) is {(stage, parity)}: the thread that asks is stuck", pytrace=False)
        full[stage].phase += 1
        if not full[stage].returns(parity):
            pytest.fail(f"turn({step}, {stages}) is {(stage, parity)}: that wait never returns", pytrace=False)
        empty[stage].phase += 1


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_rows_do_not_collide(answer: ModuleType, pieces: int) -> None:
    used: dict[int, tuple[int, int]] = {}
    for row in range(64):
        for piece in range(pieces):
            at = answer.place(row, piece, pieces)
            what = f"place({row}, {piece}, {pieces}) is {at}"
            if at % 16 or not row * pieces <= at // 16 < (row + 1) * pieces:
                pytest.fail(f"{what}: that is no piece of row {row}", pytrace=False)
            if at in used:
                pytest.fail(f"{what}: there lies piece {used[at][1]} already", pytrace=False)
            used[at] = (row, piece)
    for first in range(0, 64, 8):
        for piece in range(pieces):
            banks = [answer.place(row, piece, pieces) // 16 % 8 for row in range(first, first + 8)]
            if len(set(banks)) < 8:
                text = (
                    f"rows {first} to {first + 7} have piece {piece} in groups of banks {banks}; wanted eight of them"
                )
                pytest.fail(text, pytrace=False)
