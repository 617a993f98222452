"""Rewrites: other nodes that come to the same result with less work. Each can be switched off, and ``explain`` lists
what was done.

Batch normalisations, reductions in pairs and the like are not single kernels: :func:`expand` says them in simpler
operations, which then fuse with what is around them. That is always done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensors import ALL_DTYPES, ALL_NAMES
from .ir import Flow, GraphTensor, Node, layout_of_strides
from .operations import VIEWS, channels_of, vector_shape

__all__ = ["REWRITES", "expand", "rewrite"]

REWRITES = {
    "fold_batchnorm": "batchnorm_inference is a scale and a bias, of constants computed once, in constant weights",
    "fold_constants": "what follows from constants alone is computed when the graph is planned",
    "drop_casts": "a cast of a cast that lost nothing is one cast, and a cast to the same dtype none",
    "drop_moves": "reshapes of reshapes and transposes of transposes are one, those that change nothing none",
    "matmul_1x1": "a 1x1 convolution without stride or padding is a matrix product of pixels and channels",
}

_Rule = Callable[[Flow, Node, list[Any]], Any]
_BITS = {"f64": (53, 11), "f32": (24, 8), "f16": (11, 5), "bf16": (8, 8)}


def rewrite(flow: Flow, chosen: tuple[str, ...]) -> tuple[Flow, list[str]]:
    """The flow after the chosen rewrites and :func:`expand`, and a sentence for each change."""
    notes: list[str] = []
    given = flow

    def done(text: str) -> None:
        notes.append(text)

    def has(*ops: str) -> bool:
        return any(node.op in ops for node in flow.nodes)

    if "fold_batchnorm" in chosen and has("batchnorm_inference"):
        flow = _fold_batchnorm(flow, done)
    flow = expand(flow)
    if "drop_casts" in chosen and has("cast", "identity"):
        flow = _drop_casts(flow, done)
    if "drop_moves" in chosen and has("reshape", "transpose"):
        flow = _drop_moves(flow, done)
    if "fold_constants" in chosen and flow.constants:
        flow = _fold_constants(flow, done)
    if "matmul_1x1" in chosen:
        _matmul_1x1(flow, done)
    for wanted, made in zip(given.outputs, flow.outputs, strict=True):
        if made.layout != wanted.layout and made.node is not None and made.node.op not in VIEWS:
            made.layout = made.node.layouts[made.index] = wanted.layout  # as told, whatever is left of the way to it
    return flow, notes


def _users(flow: Flow) -> dict[GraphTensor, int]:
    """How often each tensor is used; an output counts as a use."""
    counts: dict[GraphTensor, int] = {}
    for tensor in [arg for node in flow.nodes for arg in node.tensors] + list(flow.outputs):
        counts[tensor] = counts.get(tensor, 0) + 1
    return counts


# -- batch normalisation in inference ---------------------------------------------------------------------------------


def _fold_batchnorm(flow: Flow, done: Callable[[str], None]) -> Flow:
    users = _users(flow)
    folded = {node.args[0].node: node for node in flow.nodes  # type: ignore[union-attr]
              if node.op == "batchnorm_inference" and _into_weights(node, users)}  # fmt: skip

    def rule(new: Flow, node: Node, args: list[Any]) -> Any:
        if node in folded:  # the convolution, with weights times the scale
            behind = folded[node]
            scale, _ = _folded([arg.value for arg in behind.tensors[1:] if arg.value is not None])
            weight = node.args[1].value  # type: ignore[union-attr]
            assert weight is not None
            wide = torch.promote_types(weight.dtype, torch.float32)
            scaled = (weight.to(wide) * scale.to(wide).to(weight.device).view(-1, *(1,) * (weight.dim() - 1))).to(
                weight.dtype
            )
            return new.again(node, [args[0], _constant(new, scaled)])
        if node.op != "batchnorm_inference":
            return None
        x = args[0]
        if node.args[0].node in folded:  # type: ignore[union-attr]
            _, bias = _folded([arg.value for arg in args[1:]])
            done(f"{node.name}: its scale is in the weights of {node.args[0].node.name}, its bias behind it")  # type: ignore[union-attr]
            return (new.add("add", x, _vector(new, bias, x), name=node.name, dtype=x.dtype),)
        if all(arg.value is not None for arg in args[1:]):
            scale, bias = _folded([arg.value for arg in args[1:]])
            done(f"{node.name}: a scale and a bias, computed once from constants")
            scaled = new.add("mul", x, _vector(new, scale, x), dtype=x.dtype)
            return (new.add("add", scaled, _vector(new, bias, x), name=node.name, dtype=x.dtype),)
        if all(arg.dtype == x.dtype for arg in args[1:]):
            return None  # four vectors of the result's dtype cost an epilogue next to nothing
        scale_, bias_, mean, inverse = (_shaped(new, arg, x) for arg in args[1:])
        sums = "f64" if x.dtype == "f64" else "f32"
        factor = new.add("mul", scale_, inverse, dtype=sums)
        shift = new.add("sub", bias_, new.add("mul", mean, factor, dtype=sums), dtype=sums)
        if x.dtype != sums:  # as an epilogue reads them
            factor, shift = (new.add("cast", each, dtype=x.dtype) for each in (factor, shift))
        done(f"{node.name}: a scale and a bias, computed from its four vectors at each call")
        scaled = new.add("mul", x, factor, dtype=x.dtype)
        return (new.add("add", scaled, shift, name=node.name, dtype=x.dtype),)

    return flow.copy(rule)[0]


def _into_weights(node: Node, users: dict[GraphTensor, int]) -> bool:
    x = node.args[0]
    assert isinstance(x, GraphTensor)
    if x.node is None or x.node.op != "conv_fprop" or users[x] != 1 or x.node.stored:
        return False
    weight = x.node.args[1]
    return all(isinstance(arg, GraphTensor) and arg.value is not None for arg in (weight, *node.args[1:]))


def _folded(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """scale * inverse, and bias - mean * scale * inverse."""
    wide = torch.float64 if values[0].dtype == torch.float64 else torch.float32
    scale, bias, mean, inverse = (value.to(wide).flatten() for value in values)
    return scale * inverse, bias - mean * scale * inverse


def _vector(new: Flow, value: Tensor, x: GraphTensor) -> GraphTensor:
    """A constant (1, C, 1, ...) in the dtype of x."""
    return _constant(new, value.to(ALL_DTYPES[x.dtype]).view(vector_shape(x)))


def _constant(new: Flow, value: Tensor) -> GraphTensor:
    from .ir import Meta

    layout = layout_of_strides(tuple(value.shape), tuple(value.stride())) or "nchw"
    return new.constant(value, Meta(tuple(value.shape), ALL_NAMES[value.dtype], layout))


def _shaped(new: Flow, vector: GraphTensor, x: GraphTensor) -> GraphTensor:
    """(C,) as (1, C, 1, ...)."""
    wanted = vector_shape(x)
    made: GraphTensor = vector if vector.shape == wanted else new.add("reshape", vector, shape=wanted)
    return made


# -- in simpler operations --------------------------------------------------------------------------------------------


def expand(flow: Flow) -> Flow:
    """Every node that no kernel computes by itself, in operations that kernels do."""

    def rule(new: Flow, node: Node, args: list[Any]) -> Any:
        found = _EXPANSIONS.get(node.op)
        return None if found is None else found(new, node, args)

    return flow.copy(rule)[0]


def _inference(new: Flow, node: Node, args: list[Any]) -> Any:
    x = args[0]
    scale, bias, mean, inverse = (_shaped(new, arg, x) for arg in args[1:])
    value = new.add("sub", x, mean, dtype=x.dtype)
    for op, vector in (("mul", inverse), ("mul", scale)):
        value = new.add(op, value, vector, dtype=x.dtype)
    return (new.add("add", value, bias, name=node.name, dtype=x.dtype),)


def _training(new: Flow, node: Node, args: list[Any]) -> Any:
    """Moments from one look at x. Behind a convolution they are the plain sums, which it computes on its way; elsewhere
    the sums are of differences from the first value of the channel, so that a mean far from zero costs no digits."""
    x = args[0]
    scale, bias = (_shaped(new, arg, x) for arg in args[1:3])
    wide = "f64" if x.dtype == "f64" else "f32"
    count = x.size // max(x.shape[1], 1)
    if x.node is not None and x.node.op == "conv_fprop":
        total, squares = new.add("genstats", x)
        mean = new.add("mul", total, 1.0 / count, dtype=wide)
        shifted = mean
    else:
        ends = tuple(size if axis == 1 else min(size, 1) for axis, size in enumerate(x.shape))
        first = new.add("slice", x, starts=(0,) * x.dim(), limits=ends, steps=(1,) * x.dim())
        distance = new.add("sub", x, first, dtype=wide)
        axes = channels_of(x)
        total = new.add("reduction", distance, mode="add", axes=axes, keepdims=True, dtype=wide)
        square = new.add("mul", distance, distance, dtype=wide)
        squares = new.add("reduction", square, mode="add", axes=axes, keepdims=True, dtype=wide)
        shifted = new.add("mul", total, 1.0 / count, dtype=wide)
        mean = new.add("add", shifted, first, dtype=wide)
    second = new.add("mul", squares, 1.0 / count, dtype=wide)
    variance = new.add("max", new.add("sub", second, new.add("mul", shifted, shifted, dtype=wide), dtype=wide), 0.0)
    inverse = new.add("rsqrt", new.add("add", variance, float(node.attrs["epsilon"])))
    factor = new.add("mul", scale, inverse, dtype=wide)
    shift = new.add("sub", bias, new.add("mul", mean, factor, dtype=wide), dtype=wide)
    y = new.add("add", new.add("mul", x, factor, dtype=x.dtype), shift, name=node.name, dtype=x.dtype)
    results = [y, mean, inverse]
    if len(args) > 3:
        share = float(node.attrs["momentum"])
        unbiased = new.add("mul", variance, count / max(count - 1, 1), dtype=wide)
        for old, value in zip(args[3:], (mean, unbiased), strict=True):
            kept = new.add("mul", _shaped(new, old, x), 1.0 - share, dtype=wide)
            results.append(new.add("add", kept, new.add("mul", value, share, dtype=wide), dtype=old.dtype))
    return [y, *(_as(new, made, old) for made, old in zip(results[1:], node.results[1:], strict=True))]


def _as(new: Flow, value: GraphTensor, like: GraphTensor) -> GraphTensor:
    """In the shape of a vector that was asked for."""
    made: GraphTensor = value if value.shape == like.shape else new.add("reshape", value, shape=like.shape)
    return made


def _training_backward(new: Flow, node: Node, args: list[Any]) -> Any:
    loss, x = args[:2]
    scale, mean, inverse = (_shaped(new, arg, x) for arg in args[2:])
    wide = "f64" if x.dtype == "f64" else "f32"
    axes, count = channels_of(x), x.size // max(x.shape[1], 1)

    def normal() -> GraphTensor:  # twice, once for each kernel: cheaper to compute than to store
        made: GraphTensor = new.add("mul", new.add("sub", x, mean, dtype=wide), inverse, dtype=wide)
        return made

    dbias = new.add("reduction", loss, mode="add", axes=axes, keepdims=True, dtype=wide)
    product = new.add("mul", loss, normal(), dtype=wide)
    dscale = new.add("reduction", product, mode="add", axes=axes, keepdims=True, dtype=wide)
    factor = new.add("mul", scale, inverse, dtype=wide)
    offset = new.add("mul", dbias, 1.0 / count, dtype=wide)
    slope = new.add("mul", dscale, 1.0 / count, dtype=wide)
    value = new.add(
        "sub", new.add("sub", loss, offset, dtype=wide), new.add("mul", normal(), slope, dtype=wide), dtype=wide
    )
    dx = new.add("mul", value, factor, name=node.name, dtype=x.dtype)
    return [dx, _as(new, dscale, node.results[1]), _as(new, dbias, node.results[2])]


def _places(new: Flow, node: Node, args: list[Any]) -> Any:
    x, axis = args[0], node.attrs["axis"]
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    places = _constant(new, torch.arange(x.shape[axis], dtype=torch.int32).view(shape))
    zero = _constant(new, torch.zeros((1,) * x.dim(), dtype=torch.int32).expand(x.shape))
    return (new.add("add", places, zero, name=node.name, dtype="i32"),)


_EXPANSIONS: dict[str, _Rule] = {
    "batchnorm_inference": _inference, "batchnorm": _training, "batchnorm_backward": _training_backward,
    "gen_index": _places,
}  # fmt: skip


# -- casts and moves --------------------------------------------------------------------------------------------------


def _lossless(before: str, between: str) -> bool:
    """Whether a cast keeps every value."""
    if before not in _BITS or between not in _BITS:
        return before == between
    return all(a <= b for a, b in zip(_BITS[before], _BITS[between], strict=True))


def _drop_casts(flow: Flow, done: Callable[[str], None]) -> Flow:
    outputs = set(flow.outputs)

    def rule(new: Flow, node: Node, args: list[Any]) -> Any:
        if node.op == "identity" and node.result not in outputs:
            return (args[0],)
        if node.op != "cast":
            return None
        source, target = args[0], node.attrs["dtype"]
        before = source
        while (
            before.node is not None and before.node.op == "cast" and _lossless(before.node.args[0].dtype, before.dtype)
        ):
            before = before.node.args[0]
        if before.dtype == target and node.result not in outputs:
            done(f"{node.name}: nothing is left of it, its input is {target} already")
            return (before,)
        if before is not source:
            done(f"{node.name}: casts {before.dtype} to {target} at once, not by way of {source.dtype}")
            return (new.add("cast", before, name=node.name, dtype=target),)
        return None

    return flow.copy(rule)[0]


def _drop_moves(flow: Flow, done: Callable[[str], None]) -> Flow:
    outputs = set(flow.outputs)

    def rule(new: Flow, node: Node, args: list[Any]) -> Any:
        if node.op not in ("reshape", "transpose"):
            return None
        source = args[0]
        previous = source.node if source.node is not None and source.node.op == node.op else None
        origin = previous.args[0] if previous else source
        assert isinstance(origin, GraphTensor)
        if node.op == "reshape":
            unchanged = origin.shape == node.result.shape
            attrs: dict[str, Any] = {"shape": node.result.shape}
        else:
            order = node.attrs["permutation"]
            if previous:
                order = tuple(previous.attrs["permutation"][axis] for axis in order)
            unchanged, attrs = order == tuple(range(len(order))), {"permutation": order}
        if unchanged and node.result not in outputs:
            done(f"{node.name}: nothing is left of it")
            return (origin,)
        if previous:
            done(f"{node.name}: one {node.op} with {previous.name}")
            return (new.add(node.op, origin, name=node.name, **attrs),)
        return None

    return flow.copy(rule)[0]


# -- constants --------------------------------------------------------------------------------------------------------


def _fold_constants(flow: Flow, done: Callable[[str], None]) -> Flow:
    from .compute import compute

    outputs = set(flow.outputs)

    def rule(new: Flow, node: Node, args: list[Any]) -> Any:
        if not node.tensors or node.op.startswith("conv_") or any(result in outputs for result in node.results):
            return None
        if any(isinstance(arg, GraphTensor) and arg.value is None for arg in args) or _large(node):
            return None
        values = compute(node, [arg.value if isinstance(arg, GraphTensor) else arg for arg in args])
        if node.op not in VIEWS:
            done(f"{node.name}: computed once from constants")
        return [_constant(new, value) for value in values]

    return flow.copy(rule)[0]


def _large(node: Node) -> bool:
    """Whether results are larger than all that they are made of: places of an index, spread over images."""
    return sum(result.size for result in node.results) > 2 * sum(
        arg.value.untyped_storage().nbytes() // arg.value.element_size()
        for arg in node.tensors
        if arg.value is not None
    )


def _matmul_1x1(flow: Flow, done: Callable[[str], None]) -> None:
    """The nodes of a flow that is ours are marked in place."""
    for node in flow.nodes:
        if node.op != "conv_fprop":
            continue
        problem = node.attrs["problem"]
        ones = all(v == 1 for v in (*problem.filter, *problem.stride, problem.groups))
        if ones and not any(map(any, problem.padding)) and not problem.is_empty:
            done(f"{node.name}: a matrix product of {problem.gemm.m} x {problem.c} by {problem.c} x {problem.k}")
            node.attrs["matmul"] = True
