"""Copies that engines make of tensors whose channels do not lie as they want them."""

from __future__ import annotations

from collections.abc import Sequence

from ..cuda.channels_last import Turn
from ..problem import Problem
from .model import Block, Launch, Move, Step, axis_list, names, whole

__all__ = ["copied"]


def copied(problem: Problem, turns: Sequence[Turn | None], first: int) -> tuple[list[Launch], list[Block]]:
    """A launch of channels_last.cu for each, numbered from ``first`` on."""
    launches: list[Launch] = []
    blocks: list[Block] = []
    for turn in turns:
        if turn is None:
            continue
        tensor = turn.name.removeprefix("d")
        known, groups = names(problem), problem.groups
        c, k = problem.c // groups, problem.k // groups
        walks = {
            "x": (*axis_list("ngc", (problem.n, groups, c)), *axis_list(known.place, problem.spatial)),
            "w": (*axis_list("gkc", (groups, k, c)), *axis_list(known.taps, problem.filter)),
            "y": (*axis_list("ngk", (problem.n, groups, k)), *axis_list(known.out, problem.out)),
        }[tensor]
        here = "the copy of " + turn.name
        back = turn.name == {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}[problem.direction]
        moves = Move(tensor, (), (0,)), Move(here, (), (0,))
        text = f"Blocks copy {turn.name} so that its channels lie {'first again' if back else 'last, side by side'}."
        step = Step(text, (moves[1 if back else 0],), None, (moves[0 if back else 1],))
        blocks.append(
            Block(first + len(launches), (), (whole(walks),), (step,), tensor if back else here, "all of its blocks")
        )
        file = "src/openconv/cuda/kernels/channels_last.cu"
        launches.append(Launch("channels_last", file, f"copies {turn.name}", turn.grid, (256,)))
    return launches, blocks
