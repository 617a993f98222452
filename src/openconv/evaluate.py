"""The epilogue computed with torch: the reference, and what engines that do not fuse it run behind themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .epilogue import Acc, Const, Epilogue, Expr, Node, Operand
from .tensors import ALL_DTYPES
from .tree import Tree

__all__ = [
    "activate",
    "before",
    "constant_when_compiled",
    "evaluate",
    "evaluate_",
    "evaluate_tree",
    "evaluator_",
    "finisher_",
    "statistics",
]

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
    "add_square": lambda a, b: a + b * b,
    "mod": lambda a, b: torch.fmod(*_tensors(a, b)),
    "pow": torch.pow,
    "atan2": lambda a, b: torch.atan2(*_tensors(a, b)),
    "ceil": torch.ceil,
    "floor": torch.floor,
    "sign": torch.sign,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "erf": torch.erf,
    "softplus": lambda a, beta: torch.logaddexp(beta * a, torch.zeros_like(a)) / beta,
    "swish": lambda a, beta: a * torch.sigmoid(beta * a),
    "cmp_eq": lambda a, b: _flag(torch.eq, a, b),
    "cmp_neq": lambda a, b: _flag(torch.ne, a, b),
    "cmp_gt": lambda a, b: _flag(torch.gt, a, b),
    "cmp_ge": lambda a, b: _flag(torch.ge, a, b),
    "cmp_lt": lambda a, b: _flag(torch.lt, a, b),
    "cmp_le": lambda a, b: _flag(torch.le, a, b),
    "logical_and": lambda a, b: _flag(torch.logical_and, a, b),
    "logical_or": lambda a, b: _flag(torch.logical_or, a, b),
    "logical_not": lambda a: (a == 0).to(a.dtype),
    "select": lambda p, a, b: _select(p, a, b),
    "relu_backward": lambda a, b: _where(b > 0, a, 0.0),
    "leaky_relu_backward": lambda a, b, slope: _where(b > 0, a, slope * a),
    "elu_backward": lambda a, b, alpha: _where(b > 0, a, a * (alpha * torch.exp(b))),
    "clamp_backward": lambda a, b, low, high: _where((b >= low) & (b <= high), a, 0.0),
    "sigmoid_backward": lambda a, b: a * (torch.sigmoid(b) * (1 - torch.sigmoid(b))),
    "tanh_backward": lambda a, b: a * (1 - torch.tanh(b).square()),
    "softplus_backward": lambda a, b, beta: a * torch.sigmoid(beta * b),
    "swish_backward": lambda a, b, beta: a * _swish_slope(b, beta),
    "hardswish_backward": lambda a, b: a * torch.where(b <= -3, 0.0, torch.where(b < 3, b / 3 + 0.5, 1.0)).to(b.dtype),
    "gelu_backward": lambda a, b: a * _gelu_slope(b),
    "gelu_tanh_backward": lambda a, b: a * _gelu_tanh_slope(b),
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


def finisher_(epilogue: Epilogue) -> Callable[[Tensor], Tensor] | None:
    """:func:`evaluate_` of an epilogue without operands on floating-point numbers, as few calls as that takes; None
    where it is no chain of operations that torch has in place."""
    steps: list[_Function] = []
    node = epilogue.expr
    while isinstance(node, Node):
        if len(node.args) > 1 or node.op not in _IN_PLACE:
            return None
        steps.insert(0, _bound(node.op, node.params))
        node = node.args[0]
    if not isinstance(node, Acc) or not steps:
        return None
    if len(steps) == 1:
        return steps[0]

    def run(value: Tensor) -> Tensor:
        for step in steps:
            value = step(value)
        return value

    return run


def _bound(op: str, params: tuple[float, ...]) -> _Function:
    """An operation of one tensor, in place."""
    function = _IN_PLACE[op]
    if op == "clamp":
        low, high = params
        if -math.inf < low and high < math.inf:
            return lambda a: torch.clamp_(a, low, high)
    return (lambda a: function(a, *params)) if params else function


def evaluate_tree(
    tree: Tree, inputs: Sequence[Tensor], axes: Sequence[int] = (), shape: Sequence[int] | None = None
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The results of a tree, in the common shape of its inputs, and its reductions over ``axes``, which stay as 1."""
    wide = torch.float64 if tree.compute == "f64" else torch.float32
    common = torch.broadcast_shapes(*(value.shape for value in inputs)) if shape is None else shape
    like = torch.empty(0, dtype=wide, device=inputs[0].device)
    values = {leaf.name: value.to(wide) for leaf, value in zip(tree.leaves, inputs, strict=True)}
    done: dict[Expr, Tensor] = {}

    def visit(expr: Expr) -> Any:
        if isinstance(expr, Const):
            return expr.value
        if expr not in done:
            if isinstance(expr, Node):
                args = [visit(arg) for arg in expr.args]
                if not any(isinstance(arg, Tensor) for arg in args):
                    args[0] = torch.full((), args[0], dtype=wide, device=like.device)
                done[expr] = _FUNCTIONS[expr.op](*args, *expr.params)
            else:
                done[expr] = _value(expr, like, values)
        return done[expr]

    def value(expr: Expr) -> Tensor:
        return torch.as_tensor(visit(expr), dtype=wide, device=like.device)

    results = [_stored(value(expr).expand(common), ALL_DTYPES[dtype]) for expr, dtype in tree.results]
    reduced = [
        _reduce(r.mode, value(r.expr).expand(common), tuple(axes)).to(ALL_DTYPES[r.dtype]) for r in tree.reductions
    ]
    return results, reduced


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value != 0 if dtype is torch.bool else value.to(dtype)


def _reduce(mode: str, value: Tensor, axes: tuple[int, ...]) -> Tensor:
    if not axes:
        return value.abs() if mode in ("amax", "norm1", "norm2") else value
    if mode == "mul_no_zeros":
        value = torch.where(value == 0, torch.ones_like(value), value)
    if mode in ("mul", "mul_no_zeros"):
        for axis in axes:
            value = value.prod(axis, keepdim=True)
        return value
    functions: dict[str, _Function] = {
        "add": torch.sum, "avg": torch.mean, "min": torch.amin, "max": torch.amax,
        "amax": lambda v, axes, keepdim: v.abs().amax(axes, keepdim=keepdim),
        "norm1": lambda v, axes, keepdim: v.abs().sum(axes, keepdim=keepdim),
        "norm2": lambda v, axes, keepdim: v.square().sum(axes, keepdim=keepdim).sqrt(),
    }  # fmt: skip
    return functions[mode](value, axes, keepdim=True)


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


def _flag(function: _Function, a: Tensor | float, b: Tensor | float) -> Tensor:
    """A comparison as 0 and 1 of the dtype of what is compared."""
    left, right = _tensors(a, b)
    return function(left, right).to(left.dtype)


def _select(p: Tensor | float, a: Tensor | float, b: Tensor | float) -> Tensor:
    like = next(v for v in (p, a, b) if isinstance(v, Tensor))
    flag = p != 0 if isinstance(p, Tensor) else torch.full_like(like, p) != 0
    return _where(flag, a, b).to(like.dtype)


def _where(flag: Tensor | bool, a: Tensor | float, b: Tensor | float) -> Tensor:
    if not isinstance(flag, Tensor):
        like = next(v for v in (a, b) if isinstance(v, Tensor))
        flag = torch.full_like(like, float(flag), dtype=torch.bool)
    return torch.where(flag, a, b)


def _swish_slope(b: Tensor, beta: float) -> Tensor:
    gate = torch.sigmoid(beta * b)
    return gate * (1 + beta * b * (1 - gate))


def _gelu_slope(b: Tensor) -> Tensor:
    bell = torch.exp(b * b * -0.5) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + torch.erf(b * math.sqrt(0.5))) + b * bell


def _gelu_tanh_slope(b: Tensor) -> Tensor:
    root = math.sqrt(2 / math.pi)
    inner = torch.tanh(root * (b + 0.044715 * b * b * b))
    return 0.5 * (1 + inner) + 0.5 * b * (1 - inner * inner) * root * (1 + 3 * 0.044715 * b * b)


def _tensors(a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    return tuple(v if isinstance(v, Tensor) else torch.full_like(like, v) for v in (a, b))  # type: ignore[return-value]
