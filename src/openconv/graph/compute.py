"""Every operation of a graph by itself, with torch: what constants are folded with, and what an unfused step runs where
no kernel of ours is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..epilogue import OPS, Const, Expr
from ..epilogue import Node as Applied
from ..evaluate import evaluate_tree
from ..pooling import pool_backward, pool_engine, pool_forward
from ..tensors import ALL_DTYPES, ALL_NAMES
from ..tree import Reduction, Tree, leaf
from .ir import Node
from .operations import pool_of

__all__ = ["compute", "engine_of", "tree_of", "view_of"]


def engine_of(node: Node, kind: str) -> str:
    """What computes a node by itself on a kind of device: a pooling of ours, or torch."""
    if not node.op.startswith("resample"):
        return "torch"
    return pool_engine(pool_of(node), kind, backward=node.op == "resample_backward")


def compute(node: Node, values: Sequence[Any]) -> list[Tensor]:
    """The results of one node, but for a convolution; ``values`` are tensors and numbers."""
    if node.op in OPS or node.op in ("cast", "identity", "reduction", "genstats"):
        tree, inputs = tree_of(node, values)
        axes = _axes(node)
        results, reduced = evaluate_tree(tree, inputs, axes)
        made = results or reduced
        return [value.reshape(result.shape) for value, result in zip(made, node.results, strict=True)]
    if node.op == "matmul":
        return [torch.matmul(values[0], values[1]).to(ALL_DTYPES[node.result.dtype])]
    if node.op == "resample":
        return [pool_forward(pool_of(node), values[0])]
    if node.op == "resample_backward":
        return [pool_backward(pool_of(node), values[0], values[1])]
    if node.op == "concatenate":
        return [torch.cat([v.to(ALL_DTYPES[node.result.dtype]) for v in values], node.attrs["axis"])]
    if node.op == "unslice":
        out = torch.zeros(node.result.shape, dtype=values[0].dtype, device=values[0].device)
        out[_cut(node)] = values[0]
        return [out]
    return [view_of(node, values[0])]


def view_of(node: Node, value: Tensor) -> Tensor:
    """A reshape, transpose or slice: a view where that is possible."""
    if node.op == "reshape":
        return value.reshape(node.result.shape)
    if node.op == "expand":
        return value.expand(node.result.shape)
    if node.op == "transpose":
        return value.permute(node.attrs["permutation"])
    return value[_cut(node)]


def _cut(node: Node) -> tuple[slice, ...]:
    return tuple(
        slice(start, limit, step)
        for start, limit, step in zip(*(node.attrs[name] for name in ("starts", "limits", "steps")), strict=True)
    )


def _axes(node: Node) -> tuple[int, ...]:
    if node.op == "genstats":
        return (0, *range(2, node.tensors[0].dim()))
    return node.attrs["axes"] if node.op == "reduction" else ()


def tree_of(node: Node, values: Sequence[Any]) -> tuple[Tree, list[Tensor]]:
    """One pointwise operation or reduction as a tree, and its inputs."""
    inputs = [value for value in values if isinstance(value, Tensor)]
    leaves = iter(range(len(inputs)))
    args: list[Expr] = [leaf(next(leaves)) if isinstance(v, Tensor) else Const(float(v)) for v in values]
    dtypes = tuple(ALL_NAMES[value.dtype] for value in inputs)
    if node.op == "genstats":
        wide = node.result.dtype
        square = Applied("mul", (args[0], args[0]))
        return Tree(dtypes, (), (Reduction("add", args[0], wide), Reduction("add", square, wide))), inputs
    if node.op == "reduction":
        return Tree(dtypes, (), (Reduction(node.attrs["mode"], args[0], node.result.dtype),)), inputs
    expr = args[0] if node.op in ("cast", "identity") else Applied(node.op, tuple(args), node.attrs.get("params", ()))
    return Tree(dtypes, ((expr, node.result.dtype),)), inputs
