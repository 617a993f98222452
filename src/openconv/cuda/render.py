"""Problems as C++: the generated struct ``Traits`` that a kernel is compiled with.

struct Traits {
    using A = f16; using B = f16; using Out = f16;     // first input, second input, result
    using Sum = float;                                 // what an epilogue computes in
    using Index = int;                                 // long long where a tensor has 2^31 elements or more
    static constexpr int taps = 9;                     // knobs and constants, as given
    struct Epilogue { ... };                           // +bias+relu as code
};
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod

from ..epilogue import Acc, Const, Epilogue, Expr, Node, Operand
from ..problem import Problem

__all__ = ["index_type", "sum_type", "traits"]

_TYPES = {name: name for name in ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8")}


def sum_type(problem: Problem) -> str:
    """What sums are made of, and what an epilogue computes in."""
    if problem.result_dtype == "f64":
        return "double"
    return "float" if problem.result_dtype in ("f32", "f16", "bf16") else "i64"


def index_type(problem: Problem) -> str:
    """The type of an offset into any of the problem's tensors."""
    largest = max(prod(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    return "int" if largest < 2**31 else "i64"


def traits(problem: Problem, constants: Mapping[str, int | bool | str]) -> str:
    """The struct for a problem. A constant that is a string names a type."""
    order = {"fprop": (0, 1, 2), "dgrad": (2, 1, 0), "wgrad": (0, 2, 1)}[problem.direction]
    a, b, out = (_TYPES[problem.dtypes[at]] for at in order)
    lines = [
        f"using A = {a};",
        f"using B = {b};",
        f"using Out = {out};",
        f"using Sum = {sum_type(problem)};",
        f"using Index = {index_type(problem)};",
    ]
    for name, value in constants.items():
        if isinstance(value, str):
            lines.append(f"using {name} = {value};")
        elif isinstance(value, bool):
            lines.append(f"static constexpr bool {name} = {str(value).lower()};")
        else:
            lines.append(f"static constexpr int {name} = {value};")
    lines += _epilogue(problem.epilogue)
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    return f"struct Traits {{\n{body}\n}};\n"


def _epilogue(epilogue: Epilogue) -> list[str]:
    """The epilogue over N results that lie side by side: ``Epilogue::apply<N, AlongChannels>(acc, operands, channel,
    at)``, where ``at`` is the offset of the first."""
    operands = epilogue.operands
    places = {operand: f"v{at}" for at, operand in enumerate(operands)}
    reads = []
    for at, operand in enumerate(operands):
        reads.append(f"        Sum v{at}[N];  // {operand}")
        call = {
            "channel": f"read_channel<N, AlongChannels, Sum, Out>(v{at}, operands[{at}], channel);",
            "tensor": f"read_tensor<N, Sum, Out>(v{at}, operands[{at}], at);",
            "scalar": f"read_scalar<N, Sum, Out>(v{at}, operands[{at}]);",
        }[operand.kind]
        reads.append(f"        {call}")
    return [
        f"struct Epilogue {{  // {epilogue}" if operands or not epilogue.is_identity else "struct Epilogue {",
        f"    static constexpr int count = {len(operands)};",
        "    template <int N, bool AlongChannels, class Place>",
        "    __device__ static __forceinline__ void apply(Sum (&acc)[N], const void* const* operands, int channel,",
        "                                                 Place at) {",
        *reads,
        "#pragma unroll",
        f"        for (int i = 0; i < N; ++i) acc[i] = {_code(epilogue.expr, places)};",
        "    }",
        "};",
    ]


def _code(expr: Expr, places: Mapping[Operand, str]) -> str:
    if isinstance(expr, Acc):
        return "acc[i]"
    if isinstance(expr, Const):
        return _number(expr.value)
    if isinstance(expr, Operand):
        return f"{places[expr]}[i]"
    assert isinstance(expr, Node)
    args = [_code(arg, places) for arg in expr.args] + [_number(value) for value in expr.params]
    return f"op::{expr.op}<Sum>({', '.join(args)})" if expr.op in _TEMPLATES else f"op::{expr.op}({', '.join(args)})"


# Functions of C's mathematics have one name for each type.
_TEMPLATES = {
    "add", "sub", "mul", "div", "neg", "max", "min", "relu", "clamp", "leaky_relu", "elu", "sigmoid", "silu",
    "hardswish", "gelu", "gelu_tanh",
}  # fmt: skip


def _number(value: float) -> str:
    """A constant of the type Sum that is exactly this one."""
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"Sum({sign}__longlong_as_double(0x7ff0000000000000ll))"
    return f"Sum({value!r})" if not value.is_integer() else f"Sum({value:.1f})"
