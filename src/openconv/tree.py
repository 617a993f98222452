"""Tree: pointwise expressions over tensors that broadcast against each other, and reductions of such expressions.

    results[i]  = expr(inputs)                     at every place of a common shape
    reduced[j]  = mode over some axes of expr(inputs)

It is what one generated kernel computes where no convolution is near: every input is read once and every result written
once. Expressions are those of :mod:`openconv.epilogue`, without an accumulator; ``tensor("i0")`` is the first input.
Where inputs lie and how they broadcast is told when a kernel is made for a tree, as strides.

This module knows nothing of torch. :func:`openconv.evaluate.evaluate_tree` is the reference, with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .epilogue import Acc, Expr, Node, Operand, tensor

__all__ = ["MODES", "Reduction", "Tree", "leaf"]

MODES = {
    "add": "the sum",
    "avg": "the sum over the number of terms",
    "mul": "the product",
    "mul_no_zeros": "the product of those that are not 0",
    "min": "the least, NaN if there is one",
    "max": "the greatest, NaN if there is one",
    "amax": "the greatest absolute value, NaN if there is one",
    "norm1": "the sum of absolute values",
    "norm2": "the root of the sum of squares",
}


def leaf(index: int) -> Operand:
    """The input of this number, in an expression."""
    return tensor(f"i{index}")


@dataclass(frozen=True)
class Reduction:
    """``mode`` of :data:`MODES`, over what ``expr`` comes to, stored as ``dtype``."""

    mode: str
    expr: Expr
    dtype: str

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"reduction mode is {self.mode!r}; wanted one of {', '.join(MODES)}")

    def __str__(self) -> str:
        return f"{self.mode}[{self.expr}]>{self.dtype}"


@dataclass(frozen=True)
class Tree:
    """``inputs`` are the dtypes of the inputs, ``results`` pairs of an expression and the dtype it is stored as."""

    inputs: tuple[str, ...]
    results: tuple[tuple[Expr, str], ...] = ()
    reductions: tuple[Reduction, ...] = ()

    def __post_init__(self) -> None:
        for node in self._nodes():
            if isinstance(node, Acc) or (isinstance(node, Operand) and node not in self.leaves):
                raise ValueError(f"a tree of {len(self.inputs)} input(s) has the leaf {node}; wanted t.i0 and so on")
        if not self.results and not self.reductions:
            raise ValueError("a tree has neither results nor reductions; wanted one at least")

    def _nodes(self) -> Iterator[Expr]:
        for expr in (*(expr for expr, _ in self.results), *(r.expr for r in self.reductions)):
            yield from expr.walk()

    @cached_property
    def leaves(self) -> tuple[Operand, ...]:
        """The leaves that stand for the inputs, in their order."""
        return tuple(leaf(at) for at in range(len(self.inputs)))

    @cached_property
    def compute(self) -> str:
        """What values are computed in: f32, or f64 where f32 would lose bits of what comes in or goes out."""
        stored = {*self.inputs, *(dtype for _, dtype in self.results), *(r.dtype for r in self.reductions)}
        return "f64" if stored & {"f64", "i32", "i64"} else "f32"

    @cached_property
    def flops(self) -> int:
        """Operations at each place."""
        return len({node for node in self._nodes() if isinstance(node, Node)}) + len(self.reductions)

    def __str__(self) -> str:
        parts = [f"{expr}>{dtype}" for expr, dtype in self.results] + [str(r) for r in self.reductions]
        return f"({','.join(self.inputs)}) {' '.join(parts)}"
