"""How the tensors of a tree lie: checks, axes in one order, neighbours merged, and each operation once.

What generated kernels of :mod:`openconv.tree` share before any code is made. This module knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod

from .epilogue import Expr, apply
from .problem import DTYPE_BYTES
from .tree import Reduction, Tree

__all__ = ["Axis", "Layout", "alone", "checked", "expressions", "nodes", "ordered"]

_NOT_OF_NOTHING = ("min", "max", "amax")


@dataclass(frozen=True)
class Axis:
    """``strides`` of the inputs, then of the results, then of a reduced tensor, in which a reduced axis has 0."""

    size: int
    strides: tuple[int, ...]
    reduced: bool = False


def ordered(axes: Iterable[Axis], count: int) -> list[Axis]:
    """Axes longer than 1, the outermost first: by the strides of results (those from number ``count`` on, but the last,
    which is a reduced tensor's), else of the inputs with the most axes. Neighbours that lie alike in all are one."""
    left = [axis for axis in axes if axis.size != 1]
    tensors = range(len(left[0].strides) - 1 if left else 0)
    spans = {at: sum(axis.strides[at] != 0 for axis in left) for at in tensors}
    leading = sorted(tensors, key=lambda at: (at < count, -spans[at]))

    def distance(axis: Axis) -> float:
        return next((axis.strides[at] for at in leading if axis.strides[at]), inf)

    merged: list[Axis] = []
    for axis in sorted(left, key=distance, reverse=True):
        if merged and all(
            outer == inner * axis.size for outer, inner in zip(merged[-1].strides, axis.strides, strict=True)
        ):
            axis = Axis(merged.pop().size * axis.size, axis.strides, axis.reduced)
        merged.append(axis)
    return merged


def checked(
    tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
    axes: Sequence[int], dtypes: Collection[str],
) -> None:  # fmt: skip
    """ValueError says what is wrong with the strides, the axes or a dtype."""
    for what, given, wanted in (("inputs", inputs, tree.inputs), ("results", results, tree.results)):
        if len(given) != len(wanted):
            raise ValueError(f"strides of {len(given)} {what} are given; the tree has {len(wanted)}")
        for strides in given:
            if len(strides) != len(shape) or any(stride < 0 for stride in strides):
                raise ValueError(
                    f"strides of {what} are {tuple(strides)}; wanted {len(shape)} of them for the shape "
                    f"{tuple(shape)}, none below 0"
                )
    for strides in results:
        if any(size > 1 and not stride for size, stride in zip(shape, strides, strict=True)):
            raise ValueError(
                f"a result of shape {tuple(shape)} has the strides {tuple(strides)}; wanted a place for each element"
            )
    for dtype in (*tree.inputs, *(dtype for _, dtype in tree.results), *(each.dtype for each in tree.reductions)):
        if dtype not in dtypes:
            raise ValueError(f"dtype is {dtype!r}; wanted one of {', '.join(dtypes)}")
    if len(set(axes)) != len(axes) or not all(0 <= axis < len(shape) for axis in axes):
        raise ValueError(f"axes are {tuple(axes)}; wanted different ones from 0 to {len(shape) - 1}")


def alone(reduction: Reduction, over: bool) -> tuple[Expr, str]:
    """A reduction of one element as a pointwise result; ``over``: there is an axis that it runs over."""
    expr = reduction.expr
    if reduction.mode == "mul_no_zeros" and over:
        return apply("select", expr, expr, 1), reduction.dtype
    return (apply("abs", expr) if reduction.mode in ("amax", "norm1", "norm2") else expr), reduction.dtype


def expressions(tree: Tree) -> list[Expr]:
    """Of the results, then of the reductions."""
    return [*(expr for expr, _ in tree.results), *(each.expr for each in tree.reductions)]


def nodes(exprs: Iterable[Expr]) -> list[Expr]:
    """Each node of the expressions once, children first."""
    seen: dict[Expr, None] = {}

    def visit(node: Expr) -> None:
        if node not in seen:
            for child in node.children:
                visit(child)
            seen[node] = None

    for expr in exprs:
        visit(expr)
    return list(seen)


class Layout:
    """A tree with the merged axes of its tensors. A reduction of one term has become a pointwise result.

    ``results`` is how many elements a reduced tensor has, ``terms`` how many become one; ``distinct`` how many elements
    of its own each tensor has, ``moved`` the bytes of all of them."""

    def __init__(
        self, tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
        axes: Sequence[int], dtypes: Collection[str],
    ) -> None:  # fmt: skip
        checked(tree, shape, inputs, results, axes, dtypes)
        over = set(axes) if tree.reductions else set()
        kept_shape = [1 if at in over else size for at, size in enumerate(shape)]
        places = [0] * len(shape)
        if tree.reductions:
            places = [0 if at in over else prod(kept_shape[at + 1 :]) for at in range(len(shape))]
        self.results, self.terms = prod(kept_shape), prod(shape[at] for at in over)
        self.empty = 0 in shape
        if not self.terms and self.results:
            for each in tree.reductions:
                if each.mode in _NOT_OF_NOTHING:
                    raise ValueError(
                        f"{each} runs over axes {tuple(axes)} of {tuple(shape)}, which have no elements; wanted one at "
                        f"least for {each.mode}"
                    )
        strides = [tuple(each) for each in (*inputs, *results)]
        if tree.reductions and self.terms == 1:  # nothing is joined: a pointwise result like others
            ones = [alone(each, bool(axes)) for each in tree.reductions]
            tree = Tree(tree.inputs, (*tree.results, *ones))
            strides += [tuple(places)] * len(ones)
            places = [0] * len(shape)
        self.tree, self.tensors = tree, len(strides)
        self.distinct = [prod(n for n, stride in zip(shape, each, strict=True) if stride or n == 0) for each in strides]
        stored = (*tree.inputs, *(dtype for _, dtype in tree.results))
        self.moved = sum(DTYPE_BYTES.get(each.dtype, 1) for each in tree.reductions) * self.results + sum(
            DTYPE_BYTES.get(dtype, 1) * n for dtype, n in zip(stored, self.distinct, strict=True)
        )
        found = [Axis(size, (*(each[at] for each in strides), places[at]), at in over) for at, size in enumerate(shape)]
        self.axes = [] if self.empty else ordered(found, len(inputs))
        if not self.axes:
            self.axes = [Axis(1, (0,) * (self.tensors + 1))]
