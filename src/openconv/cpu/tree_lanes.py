"""The operations of epilogues on SIMD values, as LLVM instructions: what kernels of trees are made of.

A value is one LLVM vector of f32 or f64, a lane for each element of a unit. All operations of
:data:`openconv.epilogue.OPS` are here, as :mod:`openconv.evaluate` defines them. Nothing is reassociated, NaN and
infinity propagate; only a product and the sum behind it may round once, as on a GPU. Loads widen what memory holds to
the type that is computed in, stores round or wrap it.

f32 functions are polynomials, so that a unit takes a few dozen instructions and no call:

    e^x        2^n (1 + p),  n = x / ln 2 rounded,  p = e^r - 1 = r + r^2 E(r)      |r| <= ln 2 / 2
    e^x - 1    2^n p + (2^n - 1)                                                    exact near 0
    tanh x     -m / (m + 2),  m = e^(-2|x|) - 1
    ln x       n ln 2 + 2 s + s^3 L(s^2),  x = 2^n (1 + f),  s = f / (2 + f)
    erf x      x A(x^2) up to 1,  1 - e^B(x) beyond

The coefficients are minimax fits of degree 2 to 6 in float64, within 4e-9 of the functions (weighted least squares at
Chebyshev points, weights repeated until the error is level); results are within 4 units of f32's last place. The other
functions, and all of f64, call the C library for each lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .simd import emit_narrow, emit_widen

__all__ = ["MEMORY", "Lanes", "emit_load", "emit_store", "loaded", "stored"]

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()

MEMORY: dict[str, tuple[ir.Type, int]] = {
    "f64": (_DOUBLE, 8), "f32": (_FLOAT, 4), "f16": (_HALF, 2), "bf16": (_I16, 2), "i64": (_I64, 8), "i32": (_I32, 4),
    "i16": (_I16, 2), "i8": (_I8, 1), "u8": (_I8, 1), "bool": (_I8, 1),
}  # fmt: skip
"""What an element of each dtype is in memory, and its bytes."""

_EXP = (0.500000009627032, 0.1666651770936622, 0.041666202312645347, 0.008369025054977658, 0.0013950723905808433)
_LOG = (0.6666677824653883, 0.39977286498858144, 0.2987917144890317)
_LOG1P = (0.6666667567003307, 0.39998872872291313, 0.28617035355605785, 0.21425850634694332, 0.24308325356093738)
_ERF = (
    1.12837916591375, -0.3761262713596588, 0.11283600176257237, -0.026854444591881927, 0.005189535339254638,
    -0.0008020841278673759, 7.889119527037112e-05,
)  # fmt: skip
_LOG_ERFC = (
    -0.00025643663925567495, -1.127426125011958, -0.6375999705116071, -0.10356695471022553, 0.022052029117531388,
    -0.0029995490518131504, 0.00019150503288928322,
)  # fmt: skip
_LN2_HIGH = 0.693359375  # with few bits, so that a whole number times it is exact
_LN2_LOW = math.log(2) - _LN2_HIGH
_ROUNDING = 1.5 * 2**23  # added to an f32 below 2^22, leaves it rounded to a whole number in the last bits


class Lanes:
    """Emits operations on vectors of ``count`` f32 or, if ``wide``, f64. ``emit(name, args, params)`` is any of OPS."""

    def __init__(self, builder: ir.IRBuilder, count: int, wide: bool) -> None:
        self.builder, self.count, self.wide = builder, count, wide
        self.element: ir.Type = _DOUBLE if wide else _FLOAT
        self.kind = ir.VectorType(self.element, count)

    # -- constants, comparisons, calls ------------------------------------------------------------------------------

    def number(self, value: float) -> ir.Value:
        """The constant in all lanes, rounded to the type of values."""
        with np.errstate(over="ignore"):
            rounded = value if self.wide else float(np.float32(value))
        return ir.Constant(self.kind, [rounded] * self.count)

    def whole(self, value: int) -> ir.Value:
        return ir.Constant(ir.VectorType(_I32, self.count), [value] * self.count)

    def is_(self, a: ir.Value, relation: str, b: ir.Value | float) -> ir.Value:
        """A mask: false where either is NaN, but for !=."""
        b = self.number(b) if isinstance(b, int | float) else b
        if relation == "!=":
            return self.builder.fcmp_unordered("!=", a, b)
        return self.builder.fcmp_ordered(relation, a, b)

    def pick(self, mask: ir.Value, a: ir.Value | float, b: ir.Value | float) -> ir.Value:
        """a where the mask is on, else b."""
        first, second = (self.number(v) if isinstance(v, int | float) else v for v in (a, b))
        return self.builder.select(mask, first, second)

    def flag(self, mask: ir.Value) -> ir.Value:
        return self.pick(mask, 1.0, 0.0)

    def native(self, name: str, *args: ir.Value) -> ir.Value:
        """An LLVM intrinsic that has an instruction for vectors."""
        suffix = f"v{self.count}f{64 if self.wide else 32}"
        signature = ir.FunctionType(self.kind, [self.kind] * len(args))
        function = cgutils.get_or_insert_function(self.builder.module, signature, f"llvm.{name}.{suffix}")
        return self.builder.call(function, args)

    def each(self, name: str, *args: ir.Value) -> ir.Value:
        """The C library's function, once for each lane."""
        signature = ir.FunctionType(self.element, [self.element] * len(args))
        symbol = name if self.wide else f"{name}f"
        function = cgutils.get_or_insert_function(self.builder.module, signature, symbol)
        made: ir.Value = ir.Constant(self.kind, ir.Undefined)
        for lane in range(self.count):
            at = ir.Constant(_I32, lane)
            value = self.builder.call(function, [self.builder.extract_element(arg, at) for arg in args])
            made = self.builder.insert_element(made, value, at)
        return made

    # -- arithmetic -------------------------------------------------------------------------------------------------

    def add(self, a: ir.Value, b: ir.Value | float) -> ir.Value:
        return self.builder.fadd(a, self.number(b) if isinstance(b, int | float) else b)

    def sub(self, a: ir.Value | float, b: ir.Value) -> ir.Value:
        return self.builder.fsub(self.number(a) if isinstance(a, int | float) else a, b)

    def mul(self, a: ir.Value, b: ir.Value | float) -> ir.Value:
        return self.builder.fmul(a, self.number(b) if isinstance(b, int | float) else b)

    def div(self, a: ir.Value | float, b: ir.Value) -> ir.Value:
        return self.builder.fdiv(self.number(a) if isinstance(a, int | float) else a, b)

    def fma(self, a: ir.Value, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
        """a b + c, in one instruction where the machine has it."""
        second, third = (self.number(v) if isinstance(v, int | float) else v for v in (b, c))
        return self.native("fmuladd", a, second, third)

    def abs(self, a: ir.Value) -> ir.Value:
        return self.native("fabs", a)

    def max(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """NaN if either is."""
        return self.pick(self.is_(a, "!=", a), a, self.pick(self.is_(a, ">", b), a, b))

    def min(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """NaN if either is."""
        return self.pick(self.is_(a, "!=", a), a, self.pick(self.is_(a, "<", b), a, b))

    def limit(self, a: ir.Value, low: float, high: float) -> ir.Value:
        """Within both limits; NaN stays."""
        if low != -math.inf:
            a = self.pick(self.is_(a, "<", low), low, a)
        return self.pick(self.is_(a, ">", high), high, a) if high != math.inf else a

    def polynomial(self, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
        value = self.number(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = self.fma(value, x, coefficient)
        return value

    # -- e^x and what is made of it ---------------------------------------------------------------------------------

    def _bits(self, a: ir.Value) -> ir.Value:
        return self.builder.bitcast(a, ir.VectorType(_I32, self.count))

    def _power_of_two(self, n: ir.Value) -> ir.Value:
        """2^n of whole numbers from -126 to 127."""
        return self.builder.bitcast(self.builder.shl(self.builder.add(n, self.whole(127)), self.whole(23)), self.kind)

    def _split(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """(n, e^r - 1) of x = n ln 2 + r."""
        moved = self.fma(x, 1 / math.log(2), _ROUNDING)
        n = self.builder.sub(self._bits(moved), self._bits(self.number(_ROUNDING)))
        whole = self.sub(moved, self.number(_ROUNDING))
        r = self.fma(whole, -_LN2_LOW, self.fma(whole, -_LN2_HIGH, x))
        return n, self.fma(self.mul(r, r), self.polynomial(r, _EXP), r)

    def exp(self, x: ir.Value) -> ir.Value:
        if self.wide:
            return self.each("exp", x)
        n, p = self._split(self.limit(x, -104.0, 89.0))
        half = self.builder.ashr(n, self.whole(1))  # 2^n in two factors: from numbers below the normal ones to infinity
        rest = self.builder.sub(n, half)
        return self.mul(self.mul(self.add(p, 1.0), self._power_of_two(half)), self._power_of_two(rest))

    def _exp_or_nothing(self, x: ir.Value) -> ir.Value:
        """e^x for something that is added to 1: about 0 where it is below the normal numbers."""
        if self.wide:
            return self.exp(x)
        n, p = self._split(self.limit(x, -87.0, 89.0))
        scale = self._power_of_two(self.builder.sub(n, self.whole(1)))
        return self.mul(self.mul(self.add(p, 1.0), scale), 2.0)

    def expm1(self, x: ir.Value, most: float = 89.0) -> ir.Value:
        """e^x - 1 of x up to ``most``."""
        if self.wide:
            return self.each("expm1", x)
        n, p = self._split(self.limit(x, -20.0, most))
        scale = self._power_of_two(self.builder.sub(n, self.whole(1)))  # half of it, which is finite for n = 128
        return self.mul(self.fma(p, scale, self.sub(scale, self.number(0.5))), 2.0)

    def sigmoid(self, x: ir.Value) -> ir.Value:
        return self.div(1.0, self.add(self._exp_or_nothing(self.neg(x)), 1.0))

    def tanh(self, x: ir.Value) -> ir.Value:
        if self.wide:
            return self.each("tanh", x)
        m = self.expm1(self.mul(self.abs(x), -2.0), math.inf)
        return self.native("copysign", self.div(self.neg(m), self.add(m, 2.0)), x)

    def neg(self, x: ir.Value) -> ir.Value:
        return self.builder.fneg(x)

    # -- logarithms, erf --------------------------------------------------------------------------------------------

    def log(self, x: ir.Value) -> ir.Value:
        if self.wide:
            return self.each("log", x)
        tiny = self.is_(x, "<", 2.0**-126)  # below the normal numbers: scaled into them
        bits = self._bits(self.pick(tiny, self.mul(x, 2.0**23), x))
        # Exponents change at sqrt(1/2), so that 1 + f lies around 1.
        above = self.builder.sub(bits, self._bits(self.number(math.sqrt(0.5))))
        n = self.builder.ashr(above, self.whole(23))
        f = self.sub(self.builder.bitcast(self.builder.sub(bits, self.builder.shl(n, self.whole(23))), self.kind),
                     self.number(1.0))  # fmt: skip
        whole = self.builder.sitofp(self.builder.select(tiny, self.builder.sub(n, self.whole(23)), n), self.kind)
        s = self.div(f, self.add(f, 2.0))
        z = self.mul(s, s)
        # 2 s = f - s f, of which f is exact.
        tail = self.fma(s, self.sub(self.mul(z, self.polynomial(z, _LOG)), f), self.mul(whole, _LN2_LOW))
        value = self.fma(whole, _LN2_HIGH, self.add(f, tail))
        value = self.pick(self.is_(x, "==", math.inf), math.inf, value)
        value = self.pick(self.is_(x, "==", 0.0), -math.inf, value)
        return self.pick(self.builder.or_(self.is_(x, "<", 0.0), self.is_(x, "!=", x)), self.number(math.nan), value)

    def log1p(self, x: ir.Value) -> ir.Value:
        """ln(1 + x), in f32 of x from 0 to 1."""
        if self.wide:
            return self.each("log1p", x)
        s = self.div(x, self.add(x, 2.0))
        z = self.mul(s, s)
        return self.fma(self.mul(s, z), self.polynomial(z, _LOG1P), self.mul(s, 2.0))

    def erf(self, x: ir.Value) -> ir.Value:
        if self.wide:
            return self.each("erf", x)
        size = self.limit(self.abs(x), -math.inf, 4.0)  # 1 - erf(4) is below half of the last place
        near = self.mul(size, self.polynomial(self.mul(size, size), _ERF))
        n, p = self._split(self.polynomial(size, _LOG_ERFC))  # from -18 to 0
        scale = self._power_of_two(n)
        far = self.sub(self.sub(1.0, scale), self.mul(p, scale))
        return self.native("copysign", self.pick(self.is_(size, "<", 1.0), near, far), x)

    # -- the operations ---------------------------------------------------------------------------------------------

    def emit(self, name: str, args: Sequence[ir.Value], params: Sequence[float] = ()) -> ir.Value:
        """The operation of this name; parameters are numbers."""
        return _EMIT[name](self, *args, *params)


def _gelu_inner(v: Lanes, b: ir.Value) -> ir.Value:
    cube = v.mul(v.mul(v.mul(b, 0.044715), b), b)
    return v.tanh(v.mul(v.add(b, cube), math.sqrt(2 / math.pi)))


def _gelu_slope(v: Lanes, b: ir.Value) -> ir.Value:
    bell = v.mul(v.exp(v.mul(v.mul(b, b), -0.5)), 1 / math.sqrt(2 * math.pi))
    return v.add(v.mul(v.add(v.erf(v.mul(b, math.sqrt(0.5))), 1.0), 0.5), v.mul(b, bell))


def _gelu_tanh_slope(v: Lanes, b: ir.Value) -> ir.Value:
    inner = _gelu_inner(v, b)
    growth = v.mul(v.fma(v.mul(b, b), 3 * 0.044715, 1.0), math.sqrt(2 / math.pi))
    bend = v.mul(v.mul(b, 0.5), v.mul(v.sub(1.0, v.mul(inner, inner)), growth))
    return v.add(v.mul(v.add(inner, 1.0), 0.5), bend)


def _swish_slope(v: Lanes, b: ir.Value, beta: float) -> ir.Value:
    t = v.mul(b, beta)
    gate = v.sigmoid(t)
    return v.mul(gate, v.add(v.mul(t, v.sub(1.0, gate)), 1.0))


def _softplus(v: Lanes, a: ir.Value, beta: float) -> ir.Value:
    t = v.mul(a, beta)
    above = v.pick(v.is_(t, "<", 0.0), 0.0, t)
    return v.div(v.add(above, v.log1p(v.exp(v.neg(v.abs(t))))), v.number(beta))


def _sigmoid_slope(v: Lanes, b: ir.Value) -> ir.Value:
    gate = v.sigmoid(b)
    return v.mul(gate, v.sub(1.0, gate))


def _tanh_slope(v: Lanes, b: ir.Value) -> ir.Value:
    t = v.tanh(b)
    return v.sub(1.0, v.mul(t, t))


def _hardswish_slope(v: Lanes, b: ir.Value) -> ir.Value:
    inside = v.add(v.div(b, v.number(3.0)), 0.5)
    return v.pick(v.is_(b, "<=", -3.0), 0.0, v.pick(v.is_(b, "<", 3.0), inside, 1.0))


def _compare(relation: str) -> Callable[..., ir.Value]:
    return lambda v, a, b: v.flag(v.is_(a, relation, b))


_EMIT: dict[str, Callable[..., ir.Value]] = {
    "add": Lanes.add,
    "sub": Lanes.sub,
    "mul": Lanes.mul,
    "div": Lanes.div,
    "max": Lanes.max,
    "min": Lanes.min,
    "neg": Lanes.neg,
    "abs": Lanes.abs,
    "exp": Lanes.exp,
    "relu": lambda v, a: v.pick(v.is_(a, "<", 0.0), 0.0, a),
    "leaky_relu": lambda v, a, slope: v.pick(v.is_(a, ">", 0.0), a, v.mul(a, slope)),
    "elu": lambda v, a, alpha: v.pick(v.is_(a, ">", 0.0), a, v.mul(v.expm1(a), alpha)),
    "clamp": Lanes.limit,
    "sigmoid": Lanes.sigmoid,
    "tanh": Lanes.tanh,
    "silu": lambda v, a: v.div(a, v.add(v._exp_or_nothing(v.neg(a)), 1.0)),
    "hardswish": lambda v, a: v.div(v.mul(a, v.limit(v.add(a, 3.0), 0.0, 6.0)), v.number(6.0)),
    "gelu": lambda v, a: v.mul(v.mul(a, 0.5), v.add(v.erf(v.mul(a, math.sqrt(0.5))), 1.0)),
    "gelu_tanh": lambda v, a: v.mul(v.mul(a, 0.5), v.add(_gelu_inner(v, a), 1.0)),
    "add_square": lambda v, a, b: v.add(a, v.mul(b, b)),
    "mod": lambda v, a, b: v.each("fmod", a, b),
    "pow": lambda v, a, b: v.each("pow", a, b),
    "atan2": lambda v, a, b: v.each("atan2", a, b),
    "ceil": lambda v, a: v.native("ceil", a),
    "floor": lambda v, a: v.native("floor", a),
    "sign": lambda v, a: v.pick(v.is_(a, ">", 0.0), 1.0, v.pick(v.is_(a, "<", 0.0), -1.0, 0.0)),
    "sin": lambda v, a: v.each("sin", a),
    "cos": lambda v, a: v.each("cos", a),
    "tan": lambda v, a: v.each("tan", a),
    "log": Lanes.log,
    "sqrt": lambda v, a: v.native("sqrt", a),
    "rsqrt": lambda v, a: v.div(1.0, v.native("sqrt", a)),
    "reciprocal": lambda v, a: v.div(1.0, a),
    "erf": Lanes.erf,
    "softplus": _softplus,
    "swish": lambda v, a, beta: v.mul(a, v.sigmoid(v.mul(a, beta))),
    "cmp_eq": _compare("=="),
    "cmp_neq": _compare("!="),
    "cmp_gt": _compare(">"),
    "cmp_ge": _compare(">="),
    "cmp_lt": _compare("<"),
    "cmp_le": _compare("<="),
    "logical_and": lambda v, a, b: v.flag(v.builder.and_(v.is_(a, "!=", 0.0), v.is_(b, "!=", 0.0))),
    "logical_or": lambda v, a, b: v.flag(v.builder.or_(v.is_(a, "!=", 0.0), v.is_(b, "!=", 0.0))),
    "logical_not": lambda v, a: v.flag(v.is_(a, "==", 0.0)),
    "select": lambda v, a, b, c: v.pick(v.is_(a, "!=", 0.0), b, c),
    "relu_backward": lambda v, a, b: v.pick(v.is_(b, ">", 0.0), a, 0.0),
    "leaky_relu_backward": lambda v, a, b, slope: v.pick(v.is_(b, ">", 0.0), a, v.mul(a, slope)),
    "elu_backward": lambda v, a, b, alpha: v.pick(v.is_(b, ">", 0.0), a, v.mul(a, v.mul(v.exp(b), alpha))),
    "clamp_backward": lambda v, a, b, low, high: v.pick(
        v.builder.and_(v.is_(b, ">=", low), v.is_(b, "<=", high)), a, 0.0
    ),
    "sigmoid_backward": lambda v, a, b: v.mul(a, _sigmoid_slope(v, b)),
    "tanh_backward": lambda v, a, b: v.mul(a, _tanh_slope(v, b)),
    "softplus_backward": lambda v, a, b, beta: v.mul(a, v.sigmoid(v.mul(b, beta))),
    "swish_backward": lambda v, a, b, beta: v.mul(a, _swish_slope(v, b, beta)),
    "hardswish_backward": lambda v, a, b: v.mul(a, _hardswish_slope(v, b)),
    "gelu_backward": lambda v, a, b: v.mul(a, _gelu_slope(v, b)),
    "gelu_tanh_backward": lambda v, a, b: v.mul(a, _gelu_tanh_slope(v, b)),
}


# -- memory -----------------------------------------------------------------------------------------------------------


def loaded(v: Lanes, value: ir.Value, dtype: str) -> ir.Value:
    """What memory holds as the values that are computed with."""
    builder = v.builder
    if dtype == "bf16":
        value = emit_widen(builder, value)
    if dtype in ("f16", "bf16", "f32", "f64"):
        return value if value.type == v.kind else builder.fpext(value, v.kind)
    if dtype == "bool":
        return builder.uitofp(builder.icmp_unsigned("!=", value, ir.Constant(value.type, None)), v.kind)
    return builder.uitofp(value, v.kind) if dtype == "u8" else builder.sitofp(value, v.kind)


def stored(v: Lanes, value: ir.Value, dtype: str) -> ir.Value:
    """A computed value as memory holds it: rounded to nearest, towards zero for integers, of which the small ones go
    through an i32 and wrap around; what is beyond that is its limit, and 0 of a NaN."""
    builder, count = v.builder, v.count
    if dtype == "bool":
        return builder.zext(v.is_(value, "!=", 0.0), ir.VectorType(_I8, count))
    if dtype in ("i64", "i32", "i16", "i8", "u8"):
        whole = ir.VectorType(_I64 if dtype == "i64" else _I32, count)
        name = f"llvm.fptosi.sat.v{count}i{whole.element.width}.v{count}f{64 if v.wide else 32}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(whole, [v.kind]), name)
        made = builder.call(function, [value])
        return made if dtype in ("i64", "i32") else builder.trunc(made, ir.VectorType(MEMORY[dtype][0], count))
    if dtype == "f64":
        return value if v.wide else builder.fpext(value, ir.VectorType(_DOUBLE, count))
    if v.wide:
        value = builder.fptrunc(value, ir.VectorType(_FLOAT, count))
    if dtype in ("f16", "bf16"):
        return emit_narrow(builder, value, MEMORY[dtype][0])
    return value


def _mangled(kind: ir.VectorType) -> str:
    element = kind.element
    names = {_HALF: "f16", _FLOAT: "f32", _DOUBLE: "f64"}
    return f"v{kind.count}{names.get(element) or f'i{element.width}'}"


def _lanes_at(v: Lanes, address: ir.Value, step: ir.Value | None, last: ir.Value) -> list[ir.Value]:
    """The address of each lane, ``step`` bytes apart; that of lane ``last`` for all behind it."""
    builder, places = v.builder, []
    for lane in range(v.count):
        at = ir.Constant(_I64, lane)
        at = builder.select(builder.icmp_signed("<", at, last), at, last)
        places.append(builder.add(address, builder.mul(at, step)))
    return places


def emit_load(
    v: Lanes, dtype: str, lie: str, address: ir.Value, step: ir.Value | None, mask: ir.Value | None, last: ir.Value
) -> ir.Value:  # fmt: skip
    """A unit as memory holds it: ``once``, ``side`` by side, or ``apart``. Lanes where the mask is off are not read."""
    builder, (element, size) = v.builder, MEMORY[dtype]
    kind = ir.VectorType(element, v.count)
    if lie == "side" and mask is None:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=size, typ=kind)
    if lie == "side":
        assert mask is not None
        signature = ir.FunctionType(kind, [kind.as_pointer(), _I32, mask.type, kind])
        function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{_mangled(kind)}.p0")
        place = builder.inttoptr(address, kind.as_pointer())
        return builder.call(function, [place, ir.Constant(_I32, size), mask, ir.Constant(kind, None)])
    made: ir.Value = ir.Constant(kind, ir.Undefined)
    if lie == "once":
        value = builder.load(builder.inttoptr(address, element.as_pointer()), align=size, typ=element)
        made = builder.insert_element(made, value, ir.Constant(_I32, 0))
        return builder.shuffle_vector(made, made, ir.Constant(ir.VectorType(_I32, v.count), [0] * v.count))
    for lane, place in enumerate(_lanes_at(v, address, step, last)):
        value = builder.load(builder.inttoptr(place, element.as_pointer()), align=size, typ=element)
        made = builder.insert_element(made, value, ir.Constant(_I32, lane))
    return made


def emit_store(
    v: Lanes, value: ir.Value, dtype: str, lie: str, address: ir.Value, step: ir.Value | None, mask: ir.Value | None,
    last: ir.Value,
) -> None:  # fmt: skip
    """A unit, as :func:`stored` made it, to memory. Lanes where the mask is off are not written."""
    builder, size, kind = v.builder, MEMORY[dtype][1], value.type
    if lie != "side":
        _emit_each_store(v, value, dtype, address, step, last)
    elif mask is None:
        builder.store(value, builder.inttoptr(address, kind.as_pointer()), align=size)
    else:
        signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), _I32, mask.type])
        function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.store.{_mangled(kind)}.p0")
        place = builder.inttoptr(address, kind.as_pointer())
        builder.call(function, [value, place, ir.Constant(_I32, size), mask])


def _emit_each_store(
    v: Lanes, value: ir.Value, dtype: str, address: ir.Value, step: ir.Value | None, last: ir.Value
) -> None:  # fmt: skip
    """Each lane to a place of its own, up to the last. Those behind it go to its place, before it does: no branch."""
    builder, (element, size) = v.builder, MEMORY[dtype]
    for lane, place in reversed(list(enumerate(_lanes_at(v, address, step, last)))):
        one = builder.extract_element(value, ir.Constant(_I32, lane))
        builder.store(one, builder.inttoptr(place, element.as_pointer()), align=size)
