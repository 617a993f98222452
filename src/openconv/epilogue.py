"""Epilogue: the pointwise expression that is fused behind a convolution.

    y = epilogue(acc, per-channel vectors, full tensors, scalars)

An epilogue is a tree. Its leaves are the accumulator ``acc``, constants and named operands; its nodes are the
operations of :data:`OPS`. The tree is frozen, hashable and printable, so it is part of a
:class:`~openconv.problem.Problem`; what an operand *contains* is given only when the problem is run.

Three kinds of operand, told apart by their shape at run time:

===========  =========================  =======================================
kind         text                       shape
===========  =========================  =======================================
``channel``  ``c.NAME``                 one value per output channel
``tensor``   ``t.NAME``                 the shape of the result
``scalar``   ``s.NAME``                 a single value, known at run time only
===========  =========================  =======================================

The text form is a chain of steps, each applied to the value so far, which is the first argument of the step:
``+bias+relu`` or ``+mul(c.scale)+add(t.residual)+leaky_relu(0.1)``. ``bias``, ``scale`` and ``residual`` are short
for ``add(c.bias)``, ``mul(c.scale)`` and ``add(t.residual)``. A tree that is no chain, because it uses ``acc`` twice
or keeps it elsewhere than in the first argument, prints as one expression: ``+=mul(acc,sigmoid(acc))``.

Values on the way can be results as well. In a chain ``keep`` marks the value so far: ``+bias+keep+relu`` has two,
relu(acc + bias) and then acc + bias. Others stand behind the expression: ``+=mul(acc,sigmoid(acc))+keep(abs(acc))``.

This module knows nothing of torch. :mod:`openconv.evaluate` computes an epilogue with torch, as the reference;
engines render it into code of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

__all__ = [
    "ACTIVATIONS",
    "IDENTITY",
    "OPS",
    "Acc",
    "Const",
    "Epilogue",
    "Expr",
    "Finish",
    "Node",
    "Op",
    "Operand",
    "acc",
    "apply",
    "channel",
    "scalar",
    "tensor",
]


@dataclass(frozen=True)
class Op:
    """One pointwise operation: how many values it takes, then its constant parameters with their defaults."""

    name: str
    values: int
    formula: str
    params: tuple[float, ...] = ()
    basic: bool = False
    """Whether every CUDA engine computes it; others are computed where fusion is (``Engine.takes_fusion``)."""


_BASIC = (
    Op("add", 2, "a + b"),
    Op("sub", 2, "a - b"),
    Op("mul", 2, "a * b"),
    Op("div", 2, "a / b"),
    Op("max", 2, "max(a, b), NaN if either is"),
    Op("min", 2, "min(a, b), NaN if either is"),
    Op("neg", 1, "-a"),
    Op("abs", 1, "|a|"),
    Op("exp", 1, "e^a"),
    Op("relu", 1, "max(a, 0)"),
    Op("leaky_relu", 1, "a if a > 0 else slope * a", (0.01,)),
    Op("elu", 1, "a if a > 0 else alpha * (e^a - 1)", (1.0,)),
    Op("clamp", 1, "min(max(a, low), high)", (-math.inf, math.inf)),
    Op("sigmoid", 1, "1 / (1 + e^-a)"),
    Op("tanh", 1, "tanh(a)"),
    Op("silu", 1, "a * sigmoid(a)"),
    Op("hardswish", 1, "a * min(max(a + 3, 0), 6) / 6"),
    Op("gelu", 1, "a / 2 * (1 + erf(a / sqrt(2)))"),
    Op("gelu_tanh", 1, "a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3)))"),
)
_FURTHER = (
    Op("add_square", 2, "a + b^2"),
    Op("mod", 2, "what is left of a / b, with the sign of a"),
    Op("pow", 2, "a^b"),
    Op("atan2", 2, "the angle of the point (b, a)"),
    Op("ceil", 1, "the least integer >= a"),
    Op("floor", 1, "the greatest integer <= a"),
    Op("sign", 1, "-1, 0 or 1"),
    Op("sin", 1, "sin(a)"),
    Op("cos", 1, "cos(a)"),
    Op("tan", 1, "tan(a)"),
    Op("log", 1, "ln(a)"),
    Op("sqrt", 1, "sqrt(a)"),
    Op("rsqrt", 1, "1 / sqrt(a)"),
    Op("reciprocal", 1, "1 / a"),
    Op("erf", 1, "erf(a)"),
    Op("softplus", 1, "ln(1 + e^(beta a)) / beta", (1.0,)),
    Op("swish", 1, "a / (1 + e^(-beta a))", (1.0,)),
    Op("cmp_eq", 2, "1 if a == b else 0"),
    Op("cmp_neq", 2, "1 if a != b else 0"),
    Op("cmp_gt", 2, "1 if a > b else 0"),
    Op("cmp_ge", 2, "1 if a >= b else 0"),
    Op("cmp_lt", 2, "1 if a < b else 0"),
    Op("cmp_le", 2, "1 if a <= b else 0"),
    Op("logical_and", 2, "1 if neither is 0, else 0"),
    Op("logical_or", 2, "1 if one is not 0, else 0"),
    Op("logical_not", 1, "1 if a is 0, else 0"),
    Op("select", 3, "b if a is not 0, else c"),
    Op("relu_backward", 2, "a if b > 0 else 0"),
    Op("leaky_relu_backward", 2, "a if b > 0 else slope * a", (0.01,)),
    Op("elu_backward", 2, "a if b > 0 else a * alpha * e^b", (1.0,)),
    Op("clamp_backward", 2, "a if low <= b <= high else 0", (-math.inf, math.inf)),
    Op("sigmoid_backward", 2, "a * sigmoid(b) * (1 - sigmoid(b))"),
    Op("tanh_backward", 2, "a * (1 - tanh(b)^2)"),
    Op("softplus_backward", 2, "a * sigmoid(beta b)", (1.0,)),
    Op("swish_backward", 2, "a times the slope of swish at b", (1.0,)),
    Op("hardswish_backward", 2, "a times the slope of hardswish at b"),
    Op("gelu_backward", 2, "a times the slope of gelu at b"),
    Op("gelu_tanh_backward", 2, "a times the slope of gelu_tanh at b"),
)
OPS: dict[str, Op] = {op.name: op for op in (*(replace(op, basic=True) for op in _BASIC), *_FURTHER)}

ACTIVATIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh", "silu", "hardswish", "gelu", "gelu_tanh", "clamp")
"""The operations that ``activation=`` accepts: one value, with parameters that all have defaults."""

KINDS = {"c": "channel", "t": "tensor", "s": "scalar"}
_SHORT = {"bias": ("add", "c.bias"), "scale": ("mul", "c.scale"), "residual": ("add", "t.residual")}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Expr:
    """A node of the tree. Arithmetic on expressions builds larger ones: ``acc * channel("scale") + 1``."""

    children: ClassVar[tuple[Expr, ...]] = ()

    def __add__(self, other: Expr | float) -> Expr:
        return apply("add", self, other)

    def __radd__(self, other: float) -> Expr:
        return apply("add", other, self)

    def __sub__(self, other: Expr | float) -> Expr:
        return apply("sub", self, other)

    def __rsub__(self, other: float) -> Expr:
        return apply("sub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return apply("mul", self, other)

    def __rmul__(self, other: float) -> Expr:
        return apply("mul", other, self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return apply("div", self, other)

    def __rtruediv__(self, other: float) -> Expr:
        return apply("div", other, self)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def walk(self) -> Iterator[Expr]:
        """This node and everything below it, children before parents, left to right."""
        for child in self.children:
            yield from child.walk()
        yield self


@dataclass(frozen=True)
class Acc(Expr):
    """The convolution's own result, in the accumulator's type."""

    def __str__(self) -> str:
        return "acc"


@dataclass(frozen=True)
class Const(Expr):
    """A number known when the kernel is compiled."""

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _constant(self.value))

    def __str__(self) -> str:
        return repr(int(self.value)) if self.value.is_integer() and abs(self.value) < 2**53 else repr(self.value)


@dataclass(frozen=True)
class Operand(Expr):
    """A value handed over at run time: ``kind`` is ``channel``, ``tensor`` or ``scalar``."""

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS.values():
            raise ValueError(f"operand kind is {self.kind!r}; wanted one of {', '.join(KINDS.values())}")
        if not _NAME.fullmatch(self.name) or self.name == "acc":
            raise ValueError(f"operand name is {self.name!r}; wanted an identifier other than 'acc'")

    def __str__(self) -> str:
        return f"{self.kind[0]}.{self.name}"


@dataclass(frozen=True)
class Node(Expr):
    """An operation applied to expressions; its constant parameters stand behind its values."""

    op: str
    args: tuple[Expr, ...]
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        spec = OPS.get(self.op)
        if spec is None:
            raise ValueError(f"unknown epilogue operation {self.op!r}; wanted one of {', '.join(OPS)}")
        if len(self.args) != spec.values:
            raise ValueError(f"{self.op} takes {spec.values} value(s), got {len(self.args)}")
        if len(self.params) > len(spec.params):
            raise ValueError(f"{self.op} takes {len(spec.params)} parameter(s), got {len(self.params)}")
        full = tuple(_constant(p) for p in self.params) + spec.params[len(self.params) :]
        object.__setattr__(self, "params", full)

    @property
    def children(self) -> tuple[Expr, ...]:  # type: ignore[override]
        return self.args

    def __str__(self) -> str:
        return f"{self.op}({','.join([str(a) for a in self.args] + self.param_texts())})"

    def param_texts(self) -> list[str]:
        """The parameters as text, without those that end the list at their default."""
        spec, texts = OPS[self.op], [str(Const(p)) for p in self.params]
        while texts and texts[-1] == str(Const(spec.params[len(texts) - 1])):
            texts.pop()
        return texts


def _constant(value: float) -> float:
    """A float that is equal only to one that computes the same: not NaN, and 0 rather than -0."""
    if math.isnan(value):
        raise ValueError("an epilogue constant is NaN; wanted a number or an infinity")
    return float(value) + 0.0


acc = Acc()


def channel(name: str) -> Operand:
    """A vector with one value per output channel."""
    return Operand("channel", name)


def tensor(name: str) -> Operand:
    """A tensor of the result's shape."""
    return Operand("tensor", name)


def scalar(name: str) -> Operand:
    """One value that is known at run time only."""
    return Operand("scalar", name)


def apply(op: str, *args: Expr | float, params: tuple[float, ...] = ()) -> Node:
    """``op`` applied to expressions; plain numbers become constants."""
    return Node(op, tuple(a if isinstance(a, Expr) else Const(a) for a in args), params)


@dataclass(frozen=True)
class Epilogue:
    """A pointwise tree over the accumulator. ``Epilogue()`` is the identity; methods chain further steps onto it.

    >>> str(Epilogue().bias().relu())
    '+bias+relu'
    >>> Epilogue.parse('+mul(c.scale)+clamp(0,6)') == Epilogue(apply('clamp', acc * channel('scale'), params=(0, 6)))
    True
    """

    expr: Expr = acc
    also: tuple[Expr, ...] = ()
    """Further results, in the result's shape, dtype and layout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "also", tuple(self.also))
        kinds: dict[str, str] = {}
        for node in self._nodes():
            if isinstance(node, Operand) and kinds.setdefault(node.name, node.kind) != node.kind:
                raise ValueError(f"operand {node.name!r} is used as {kinds[node.name]} and as {node.kind}")
        if len(set(self.also)) != len(self.also):
            shown = ", ".join(str(expr) for expr in self.also)
            raise ValueError(f"further results of an epilogue are {shown}; wanted each of them once")

    def _nodes(self) -> Iterator[Expr]:
        for expr in (self.expr, *self.also):
            yield from expr.walk()

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The operands in order of first use: the order in which values are handed over at run time."""
        return tuple(dict.fromkeys(n for n in self._nodes() if isinstance(n, Operand)))

    @property
    def is_identity(self) -> bool:
        """True if the only result is the accumulator itself."""
        return isinstance(self.expr, Acc) and not self.also

    @cached_property
    def is_basic(self) -> bool:
        """True if every CUDA engine computes it."""
        return all(OPS[node.op].basic for node in self._nodes() if isinstance(node, Node))

    @cached_property
    def flops(self) -> int:
        """Operations per element, one for each node of the tree, and of other results for what is not in it."""
        own = list(self.expr.walk())
        more = {n for expr in self.also for n in expr.walk()} - set(own) if self.also else ()
        return sum(isinstance(n, Node) for n in (*own, *more))

    def then(self, op: str, *args: Expr | float, params: tuple[float, ...] = ()) -> Epilogue:
        """This epilogue with ``op`` applied to its result, which is the first argument."""
        return Epilogue(apply(op, self.expr, *args, params=params), self.also)

    def keep(self) -> Epilogue:
        """Have the value so far as another result, for steps to follow: ``Epilogue().bias().keep().relu()``."""
        return Epilogue(self.expr, (*self.also, self.expr))

    def bias(self, name: str = "bias") -> Epilogue:
        """Add a per-channel vector."""
        return self.then("add", channel(name))

    def scale(self, name: str = "scale") -> Epilogue:
        """Multiply by a per-channel vector."""
        return self.then("mul", channel(name))

    def residual(self, name: str = "residual") -> Epilogue:
        """Add a tensor of the result's shape."""
        return self.then("add", tensor(name))

    def add(self, other: Expr | float) -> Epilogue:
        """Add an expression or a number."""
        return self.then("add", other)

    def mul(self, other: Expr | float) -> Epilogue:
        """Multiply by an expression or a number."""
        return self.then("mul", other)

    def relu(self) -> Epilogue:
        """max(a, 0)."""
        return self.then("relu")

    def clamp(self, low: float = -math.inf, high: float = math.inf) -> Epilogue:
        """Limit to [low, high]; ``clamp(0, 6)`` is ReLU6."""
        return self.then("clamp", params=(low, high))

    def activation(self, text: str) -> Epilogue:
        """Apply an activation given by name, with parameters where it has some: ``"leaky_relu(0.2)"``."""
        match = re.fullmatch(rf"({_NAME.pattern})(?:\(([^()]*)\))?", text)
        if match is None or match[1] not in ACTIVATIONS:
            names = ", ".join(ACTIVATIONS)
            raise ValueError(f"activation is {text!r}; wanted one of {names}, or with numbers, as leaky_relu(0.2)")
        name, most = match[1], len(OPS[match[1]].params)
        try:
            params = tuple(map(float, match[2].split(","))) if match[2] else ()
        except ValueError:
            params = (0.0,) * (most + 1)
        if len(params) > most:
            wanted = f"{name} with at most {most} number{'s' * (most > 1)}" if most else f"{name} without numbers"
            raise ValueError(f"activation is {text!r}; wanted {wanted}")
        return self.then(name, params=params)

    def __str__(self) -> str:
        """The text form: empty for the identity."""
        steps: list[str] = []
        kept = list(self.also)
        node = self.expr
        whole = f"+={self.expr}" + "".join(f"+keep({expr})" for expr in self.also)
        while True:
            if kept and kept[-1] == node:
                steps.append("keep")
                kept.pop()
            if not isinstance(node, Node):
                break
            rest = node.args[1:]
            if any(isinstance(leaf, Acc) for arg in rest for leaf in arg.walk()):
                return whole
            texts = [str(a) for a in rest] + node.param_texts()
            short = next((s for s, (op, arg) in _SHORT.items() if [op, arg] == [node.op, *texts]), None)
            steps.append(short or (f"{node.op}({','.join(texts)})" if texts else node.op))
            node = node.args[0]
        if kept or not isinstance(node, Acc):
            return whole
        return "".join(f"+{step}" for step in reversed(steps))

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """The epilogue that :meth:`__str__` prints as ``text``; ValueError says where the text goes wrong."""
        if not text:
            return IDENTITY
        parser = _Parser(text)
        return cls(*(parser.whole() if text.startswith("+=") else parser.chain(acc)))


@dataclass(frozen=True)
class Finish:
    """What an engine with ``takes_finish`` computes of an epilogue as it stores its sums:

        min(max(acc + bias + residual, low), high)

    ``bias`` and ``residual`` are the names of operands, None for none; ``rest`` is what is left of the epilogue.

    >>> found = Finish.of(Epilogue.parse("+bias+residual+relu+tanh"))
    >>> found.bias, found.residual, found.low, str(found.epilogue), str(found.rest)
    ('bias', 'residual', 0.0, '+bias+residual+relu', '+tanh')
    """

    bias: str | None = None
    residual: str | None = None
    low: float = -math.inf
    high: float = math.inf
    epilogue: Epilogue = field(default_factory=Epilogue)
    rest: Epilogue = field(default_factory=Epilogue)

    @property
    def clamps(self) -> bool:
        """Whether there is a limit."""
        return self.low > -math.inf or self.high < math.inf

    @classmethod
    def of(cls, epilogue: Epilogue, *, only_bias: bool = False) -> Finish:
        """As much of an epilogue as has this form. A bias is found wherever the accumulator is used once, by a sum with
        it; the other steps where they follow it one behind the other."""
        expr = epilogue.expr
        if epilogue.also or sum(isinstance(node, Acc) for node in expr.walk()) != 1:
            return cls(rest=epilogue)  # other uses are made of the same sums
        taken: list[Node] = []
        bias = residual = None
        low, high = -math.inf, math.inf
        while (node := _around_acc(expr)) is not None:
            other = node.args[1] if node.op == "add" and isinstance(node.args[0], Acc) else None
            if isinstance(other, Operand) and other.kind == "channel" and not taken:
                bias = other.name
            elif only_bias or not _is_chain(expr):
                break
            elif isinstance(other, Operand) and other.kind == "tensor" and residual is None:
                residual = other.name
            elif node.op in ("relu", "clamp"):
                low, high = node.params if node.op == "clamp" else (0.0, math.inf)
            else:
                break
            taken.append(node)
            expr = _replaced(expr, node)
            if node.op != "add":
                break
        made = Epilogue()
        for node in taken:
            made = made.then(node.op, *node.args[1:], params=node.params)
        return cls(bias, residual, low, high, made, Epilogue(expr))


def _around_acc(expr: Expr) -> Node | None:
    """The node that has the accumulator as an argument."""
    return next((n for n in expr.walk() if isinstance(n, Node) and any(isinstance(a, Acc) for a in n.args)), None)


def _is_chain(expr: Expr) -> bool:
    """Whether each step has the value so far as its first argument."""
    while isinstance(expr, Node):
        expr = expr.args[0]
    return isinstance(expr, Acc)


def _replaced(expr: Expr, node: Node) -> Expr:
    """The expression with the accumulator in the place of a node that is there once."""
    if expr == node:
        return acc
    if not isinstance(expr, Node):
        return expr
    return Node(expr.op, tuple(_replaced(arg, node) for arg in expr.args), expr.params)


class _Parser:
    """Recursive descent over the text form of an epilogue."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self, wanted: str) -> ValueError:
        rest = self.text[self.at :]
        return ValueError(f"epilogue {self.text!r}: wanted {wanted} at position {self.at}, got {rest!r}")

    def take(self, pattern: str) -> str | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match:
            self.at = match.end()
        return match.group() if match else None

    def whole(self) -> tuple[Expr, tuple[Expr, ...]]:
        """The result, and those that are kept besides."""
        self.take(r"\+=")
        expr, kept = self.expression(), []
        while self.take(r"\+keep\("):
            kept.append(self.expression())
            if not self.take(r"\)"):
                raise self.fail("')'")
        if self.at != len(self.text):
            raise self.fail("the end, or '+keep('")
        return expr, tuple(kept)

    def chain(self, value: Expr) -> tuple[Expr, tuple[Expr, ...]]:
        kept: list[Expr] = []
        while self.at < len(self.text):
            if not self.take(r"\+"):
                raise self.fail("'+'")
            name = self.take(_NAME.pattern)
            if name is None:
                raise self.fail("an operation")
            if name == "keep":
                kept.append(value)
            elif name in _SHORT:
                name, operand = _SHORT[name]
                value = apply(name, value, _Parser(operand).expression())
            else:
                value = self.node(name, [value])
        return value, tuple(kept)

    def expression(self) -> Expr:
        number = self.take(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|inf)")
        if number is not None:
            return Const(float(number))
        name = self.take(_NAME.pattern)
        if name is None:
            raise self.fail("a number, an operand or an operation")
        if name == "acc":
            return acc
        if name in KINDS and self.take(r"\."):
            operand = self.take(_NAME.pattern)
            if operand is None:
                raise self.fail("an operand's name")
            return Operand(KINDS[name], operand)
        return self.node(name, [])

    def node(self, name: str, values: list[Expr]) -> Node:
        if name not in OPS:
            self.at -= len(name)
            raise self.fail(f"one of {', '.join(OPS)}")
        args = list(values)
        if self.take(r"\("):
            while not self.take(r"\)"):
                if len(args) > len(values) and not self.take(","):
                    raise self.fail("',' or ')'")
                args.append(self.expression())
        count = OPS[name].values
        params: list[float] = []
        for param in args[count:]:
            if not isinstance(param, Const):
                raise ValueError(f"epilogue {self.text!r}: parameter {param} of {name} is no number")
            params.append(param.value)
        return Node(name, tuple(args[:count]), tuple(params))


IDENTITY = Epilogue()
