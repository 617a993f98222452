"""What a peer is: another implementation of the same problem, made ready once and then called like a user would."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...epilogue import Acc, Epilogue, Node
from ...problem import Problem
from ...reference import Inputs

__all__ = ["NotTaken", "Peer", "Prepared", "first_line", "first_unmet", "same_dtype", "steps_of"]


class NotTaken(Exception):
    """A peer cannot run a problem that it did not refuse: the data decide, or its library has nothing for it.

    Its text is the reason, with the value seen.
    """


def _itself(value: Any) -> Tensor:
    return value


@dataclass(frozen=True)
class Prepared:
    """Calls that are ready to be timed, one for each set of inputs.

    A call returns what the user gets, allocated by the peer itself; ``result`` turns that into a tensor of the
    problem's result shape, for verification. ``note`` says what is worth recording, such as the plan chosen.
    """

    calls: tuple[Callable[[], object], ...]
    note: str = ""
    result: Callable[[Any], Tensor] = _itself


class Peer(ABC):
    """Something to compare with."""

    name: ClassVar[str]
    """How it is recorded; no dot in it, which marks openconv's own engines."""
    usual: ClassVar[bool] = True
    """Whether it takes part unless others are named."""

    @abstractmethod
    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        """Why it takes no part: not installed, or a need that is not met, with the value seen. None if it takes part.
        Nothing is allocated or run."""

    @abstractmethod
    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        """Do everything that a user would do once: convert layouts, plan, compile, pack weights.

        All sets are on the device that was asked about. NotTaken where only the data or the library can tell.
        """


def first_line(error: Exception) -> str:
    """What an error says, without the pages that follow in some."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def first_unmet(needs: Iterable[tuple[object, str]]) -> str | None:
    """The sentence of the first need that is not met."""
    return next((sentence for met, sentence in needs if not met), None)


def same_dtype(problem: Problem) -> tuple[bool, str]:
    """The need of all peers that convolve tensors of one dtype."""
    return len(set(problem.dtypes)) == 1, f"dtypes are {', '.join(problem.dtypes)}; it takes one for all tensors"


def steps_of(epilogue: Epilogue) -> tuple[Node, ...] | None:
    """The steps of an epilogue that is a chain, in the order they are applied; None for any other tree."""
    if str(epilogue).startswith("+="):
        return None
    steps: list[Node] = []
    node = epilogue.expr
    while isinstance(node, Node):
        steps.append(node)
        node = node.args[0]
    assert isinstance(node, Acc)
    return tuple(reversed(steps))
