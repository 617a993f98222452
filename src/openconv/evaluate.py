"""The epilogue computed with torch: the reference, and what engines that do not fuse it run behind themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .epilogue import Acc, Const, Epilogue, Expr, Node, Operand

__all__ = ["activate", "before", "constant_when_compiled", "evaluate", "evaluate_", "evaluator_", "statistics"]

_Function = Callable[..., Tensor]
_Any = TypeVar("_Any", bound=Callable[..., object])


def constant_when_compiled(function: _Any) -> _Any:
    """``torch.compiler.assume_constant_result``, which would import the compiler: seconds, for who never compiles."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


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
    "clamp": lambda a, low, high: _clamp(torch.clamp, a, low, high),
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
    "clamp": lambda a, low, high: _clamp(torch.clamp_, a, low, high),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "silu": lambda a: F.silu(a, inplace=True),
    "hardswish": lambda a: F.hardswish(a, inplace=True),
}


def evaluate(epilogue: Epilogue, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    """``epilogue`` of an accumulator of shape (N, channels, ...); differentiable."""
    value = _value(epilogue.expr, accumulator, operands)
    whole = isinstance(value, Tensor) and value.shape == accumulator.shape
    return value if whole else torch.zeros_like(accumulator) + value  # a tree without the accumulator


def before(prologue: Epilogue, x: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """A prologue of x, (N, C, ...): computed in f32, f64 for f64, and rounded to x's dtype."""
    if prologue.is_identity:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    values = {operand.name: value.to(wide) for operand, value in zip(prologue.operands, operands, strict=True)}
    return evaluate(prologue, x.to(wide), values).to(x.dtype)


def statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the sum of squares of each channel of y, (N, K, ...): f32, f64 for f64."""
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    axes = (0, *range(2, y.dim()))
    return wide.sum(axes), wide.square().sum(axes)


def evaluate_(epilogue: Epilogue, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    """Like :func:`evaluate`, overwriting the accumulator step by step where the tree is a chain."""
    return evaluator_(epilogue)(accumulator, operands)


def evaluator_(epilogue: Epilogue) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """:func:`evaluate_` of one epilogue, which is taken apart here and not at every call."""
    if str(epilogue).startswith("+="):
        return partial(evaluate, epilogue)
    chain: list[Node] = []
    node = epilogue.expr
    while isinstance(node, Node):
        chain.append(node)
        node = node.args[0]
    steps = [(_IN_PLACE.get(n.op, _FUNCTIONS[n.op]), n.args[1:], n.params) for n in reversed(chain)]

    def run(accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
        value = accumulator
        for function, rest, params in steps:
            others = [_value(arg, accumulator, operands) for arg in rest]
            value = function(value, *others, *(_number(p, accumulator) for p in params))
        return value

    return run


def activate(text: str, value: Tensor) -> Tensor:
    """The activation that ``activation=text`` names, of one tensor; differentiable, and open to torch.compile."""
    op, params = _activation(text)
    return _FUNCTIONS[op](value, *params)


_steps: dict[str, tuple[str, tuple[float, ...]]] = {}


@constant_when_compiled  # a functools.cache around it would be traced
def _activation(text: str) -> tuple[str, tuple[float, ...]]:
    if text not in _steps:
        node = Epilogue().activation(text).expr
        assert isinstance(node, Node)
        _steps[text] = node.op, node.params
    return _steps[text]


def _value(expr: Expr, accumulator: Tensor, operands: Mapping[str, Tensor]) -> Tensor:
    if isinstance(expr, Acc):
        return accumulator
    if isinstance(expr, Const):
        return _number(expr.value, accumulator)  # type: ignore[return-value]  # torch takes numbers for tensors
    if isinstance(expr, Operand):
        value = operands[expr.name]
        return value.view(-1, *(1,) * (accumulator.dim() - 2)) if expr.kind == "channel" else value
    assert isinstance(expr, Node)
    args = [_value(arg, accumulator, operands) for arg in expr.args]
    if not any(isinstance(arg, Tensor) for arg in args):
        args[0] = torch.as_tensor(args[0], dtype=accumulator.dtype, device=accumulator.device)
    return _FUNCTIONS[expr.op](*args, *(_number(p, accumulator) for p in expr.params))


def _number(value: float, like: Tensor) -> float:
    """A whole number as an int where the tensor holds integers, which a float would turn into floats."""
    whole = value.is_integer() and not like.is_floating_point() and not like.is_complex()
    return int(value) if whole else value


def _clamp(function: _Function, a: Tensor, low: float, high: float) -> Tensor:
    # Only the limits that limit something: torch wants one at least, and an infinite one makes integers floats.
    ends = {name: v for name, v, none in (("min", low, -math.inf), ("max", high, math.inf)) if v != none}
    return function(a, **ends) if ends else a


def _tensors(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return tuple(v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))  # type: ignore[return-value]
