"""What is fused beyond an epilogue, as C++: further members of the generated struct ``Traits`` (:mod:`.render`).

namespace op { ... }                   // operations that are not basic, in front of the struct, where one is used
static constexpr bool stats = true;
struct Prologue { ... };               // x+scale+bias+relu as code
struct Also { ... };                   // +bias+keep+relu: the value that is kept, as code
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from ..epilogue import Epilogue, Expr, Operand
from ..problem import Problem
from . import jit, render

__all__ = ["further", "traits"]


def traits(problem: Problem, constants: Mapping[str, int | bool | str]) -> str:
    """:func:`.render.traits`, with what is fused."""
    text = render.traits(problem, {**constants, "stats": problem.stats})
    lines = [*_prologue(problem.prologue), *_also(problem.epilogue)]
    return further(problem) + text.removesuffix("};\n") + "".join(f"    {line}\n" for line in lines) + "};\n"


def further(problem: Problem) -> str:
    """The operations that are not basic, to stand in front of the struct; nothing where the problem uses none."""
    return "" if problem.prologue.is_basic and problem.epilogue.is_basic else _further()


@cache
def _further() -> str:
    """``common/pointwise_more.cuh`` without its includes: in generated text they are not looked for. It comes behind
    ``common/pointwise.cuh`` wherever there is an epilogue."""
    text = (jit.KERNELS / "common" / "pointwise_more.cuh").read_text()
    return "\n".join(line for line in text.split("\n") if not line.startswith(("#pragma once", "#include")))


def _prologue(prologue: Epilogue) -> list[str]:
    """The prologue of N values side by side, whose vectors are read once for many such: ``Vectors<N>``."""
    places = {operand: f"v{at}" for at, operand in enumerate(prologue.operands)}
    reads = [f"igemm::read_vector(v{at}, operands[{at}], channel);" for at in range(len(places))]
    return [
        "struct Prologue {" if prologue.is_identity else f"struct Prologue {{  // x{prologue}",
        f"    static constexpr bool there = {str(not prologue.is_identity).lower()};",
        f"    static constexpr int count = {len(places)};",
        "    template <int N>",
        "    struct Vectors {",
        *[f"        Sum {place}[N];  // {operand}" for operand, place in places.items()],
        "        __device__ __forceinline__ void read(const void* const* operands, int channel) {",
        *[f"            {read}" for read in reads],
        "        }",
        "        __device__ __forceinline__ void apply(Sum (&acc)[N]) const {",
        *[f"            {line}" for line in _each(prologue.expr, places)],
        "        }",
        "    };",
        "};",
    ]


def _also(epilogue: Epilogue) -> list[str]:
    """The other results of an epilogue, as ``Epilogue::apply``: ``Also::apply<At, N, AlongChannels>``."""
    lines = [
        "struct Also {",
        f"    static constexpr int count = {len(epilogue.also)};",
        "    template <int At, int N, bool AlongChannels, class Place>",
        "    __device__ static __forceinline__ void apply(Sum (&acc)[N], const void* const* operands, int channel,",
        "                                                 Place at) {",
    ]
    for at, expr in enumerate(epilogue.also):
        lines.append(f"        if constexpr (At == {at}) {{  // {expr}")
        lines += [f"            {line}" for line in _result(expr, epilogue.operands)]
        lines.append("        }")
    return [*lines, "    }", "};"]


def _result(expr: Expr, operands: Sequence[Operand]) -> list[str]:
    places = {operand: f"v{at}" for at, operand in enumerate(operands) if operand in set(expr.walk())}
    lines = []
    for operand, place in places.items():
        given = f"operands[{place[1:]}]"
        call = {
            "channel": f"read_channel<N, AlongChannels, Sum, Out>({place}, {given}, channel);",
            "tensor": f"read_tensor<N, Sum, Out>({place}, {given}, at);",
            "scalar": f"read_scalar<N, Sum, Out>({place}, {given});",
        }[operand.kind]
        lines += [f"Sum {place}[N];  // {operand}", call]
    return lines + _each(expr, places)


def _each(expr: Expr, places: Mapping[Operand, str]) -> list[str]:
    return ["#pragma unroll", f"for (int i = 0; i < N; ++i) acc[i] = {render._code(expr, places)};"]
