"""The epilogue computed with torch: the reference, and what engines that do not fuse it run behind themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .epilogue import Acc, Const, Epilogue, Expr, Node, Operand

__all__ = ["activation_function", "evaluate", "evaluate_"]

_Function = Callable[..., Tensor]

_FUNCTIONS: dict[str, _Function] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": lambda a, b: torch.maximum(*_tensors(a, b)),
    "min": lambda a, b: torch.minimum(*_tensors(a, b)),
    "neg": torch.neg,
    "abs": torch.abs,
    "exp": torch.exp,
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "clamp": lambda a, low, high: torch.clamp(a, *(None if math.isinf(v) else v for v in (low, high))),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
}

_IN_PLACE: dict[str, _Function] = {
    "add": Tensor.add_,
    "sub": Tensor.sub_,
    "mul": Tensor.mul_,
    "div": Tensor.div_,
    "relu": torch.relu_,
    "leaky_relu": F.leaky_relu_,
    "elu": F.elu_,
    "clamp": lambda a, low, high: a.clamp_(*(None if math.isinf(v) else v for v in (low, high))),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "silu": lambda a: F.silu(a, inplace=True),
    "hardswish": lambda a: F.hardswish(a, inplace=True),
}


def evaluate(epilogue: Epilogue, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    """``epilogue`` of an accumulator of shape (N, channels, ...); differentiable."""
    return _value(epilogue.expr, accumulator, operands)


def evaluate_(epilogue: Epilogue, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    """Like :func:`evaluate`, overwriting the accumulator step by step where the tree is a chain."""
    if str(epilogue).startswith("+="):
        return evaluate(epilogue, accumulator, operands)
    chain: list[Node] = []
    node = epilogue.expr
    while isinstance(node, Node):
        chain.append(node)
        node = node.args[0]
    value = accumulator
    for node in reversed(chain):
        rest = [_value(arg, accumulator, operands) for arg in node.args[1:]]
        value = _IN_PLACE.get(node.op, _FUNCTIONS[node.op])(value, *rest, *node.params)
    return value


def activation_function(text: str) -> Callable[[Tensor], Tensor]:
    """The activation that ``activation=text`` names, as a differentiable function of one tensor."""
    epilogue = Epilogue().activation(text)
    return lambda value: evaluate(epilogue, value, {})


def _value(expr: Expr, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    if isinstance(expr, Acc):
        return accumulator
    if isinstance(expr, Const):
        return expr.value  # type: ignore[return-value]  # torch takes numbers wherever it takes tensors
    if isinstance(expr, Operand):
        value = operands[expr.name]
        return value.view(-1, *(1,) * (accumulator.dim() - 2)) if expr.kind == "channel" else value
    assert isinstance(expr, Node)
    args = [_value(arg, accumulator, operands) for arg in expr.args]
    if not any(isinstance(arg, Tensor) for arg in args):
        args[0] = torch.as_tensor(args[0], dtype=accumulator.dtype, device=accumulator.device)
    return _FUNCTIONS[expr.op](*args, *expr.params)


def _tensors(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return tuple(v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))  # type: ignore[return-value]
