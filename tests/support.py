"""Shared by all tests: problems worth testing, random tensors, the float64 reference, and checks of engines against it.

Every check ends its message with the line that repeats it::

    PYTHONPATH=src python -m tests.support 'fprop n1 c3 h5 w5 k4 r3 s3 f32 nchw' --seed 7 --engine cpu.naive

A result is right if |out - reference| <= bound, element by element. The bound follows from the arithmetic alone: a
sum of ``n`` products in a type of unit roundoff ``u`` is off by at most n*u/(1 - n*u) * sum(|x|*|w|), in any order, and
an epilogue carries that error through its tree. Data of small integers leaves no room: it must match exactly.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openconv.device import Device
from openconv.engine import Engine, UnsupportedProblem, engine_named
from openconv.epilogue import IDENTITY, OPS, Acc, Const, Epilogue, Expr, Finish, Node, Operand, acc
from openconv.plan import device_of, lower, make_plan, plan_for
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import allowed_error, error_of, random_inputs
from openconv.select import Candidate, Policy, choose
from openconv.tensors import DTYPES, empty, in_layout, to_layout

INTEGERS = ("i64", "i32", "i16", "i8", "u8")
LAYOUTS = ("nchw", "nhwc", "nhwc*nchw>nhwc", "nchw*nhwc>nchw")
"""All tensors alike, and a filter that is laid out otherwise than the images."""

# -- problems ----------------------------------------------------------------------------------------------------

PROBLEMS = {
    # the plain case, and sizes that no vector length divides
    "3x3": "n2 c5 h7 w9 k6 r3 s3 pad1",
    "3x3-unpadded": "n1 c3 h8 w8 k4 r3 s3",
    "depthwise-octets": "n2 c16 h9 w10 k16 r5 s5 pad2 g16",
    "depthwise-octets-strided": "n3 c24 h11 w9 k24 r3 s3 stride2 pad1,0 g24",
    "5x5": "n1 c4 h9 w11 k3 r5 s5 pad2",
    "even-filter": "n2 c3 h6 w7 k4 r2 s4 pad1,2",
    "batch": "n9 c2 h4 w5 k3 r3 s3 pad1",
    "209-channels": "n1 c209 h3 w4 k11 r3 s3 pad1",
    "first-layer": "n1 c3 h15 w14 k8 r7 s7 stride2 pad3",
    "many-filters": "n1 c2 h3 w4 k70 r3 s3 pad1",
    "one-filter": "n2 c9 h5 w6 k1 r3 s3 pad1",
    "one-channel": "n1 c1 h9 w10 k5 r3 s3 pad1",
    "image-filter": "n1 c1 h17 w23 k1 r5 s5 pad2",
    # stride, dilation, padding
    "stride": "n2 c4 h9 w8 k5 r3 s3 stride2 pad1",
    "stride-per-axis": "n1 c3 h11 w10 k4 r3 s2 stride3,2 pad1,0",
    "stride-beyond-filter": "n2 c3 h11 w13 k4 r2 s2 stride3",
    "stride-leaves-a-rest": "n1 c2 h10 w12 k3 r3 s3 stride4 pad0:1,1:0",
    "dilation": "n1 c4 h13 w12 k3 r3 s3 pad2,3 dil2,3",
    "stride-and-dilation": "n2 c3 h15 w14 k4 r3 s4 stride2,3 pad3:1,2:4 dil2",
    "asymmetric": "n1 c4 h6 w7 k5 r3 s3 pad0:2,3:1",
    "padding-beyond-filter": "n1 c2 h4 w5 k3 r2 s2 pad3:4",
    "padding-beyond-image": "n1 c2 h2 w1 k3 r3 s3 stride2 pad5,4",
    # small images and large filters
    "pixel": "n3 c5 h1 w1 k4 r1 s1",
    "pixel-3x3": "n2 c4 h1 w1 k5 r3 s3 pad1",
    "filter-beyond-image": "n1 c3 h3 w4 k4 r5 s6 pad2,3",
    "filter-is-image": "n2 c5 h4 w6 k7 r4 s6",
    "tall": "n1 c2 h31 w1 k3 r5 s1 pad2,0",
    "row-filter": "n1 c2 h5 w40 k2 r1 s9 pad0,4 g2",
    # 1x1
    "1x1": "n3 c7 h5 w6 k8 r1 s1",
    "1x1-stride": "n2 c6 h9 w8 k5 r1 s1 stride2",
    "1x1-padded": "n1 c4 h3 w4 k5 r1 s1 pad1,0:2",
    "1x1-groups": "n2 c6 h4 w5 k4 r1 s1 g2",
    "1x1-1d": "n4 c16 w9 k12 s1",
    "1x1-3d": "n2 c5 d2 h3 w4 k6 t1 r1 s1",
    # patches: stride == filter
    "patches": "n2 c3 h12 w8 k10 r4 s4 stride4",
    "patches-cropped": "n1 c3 h11 w10 k5 r4 s4 stride4",
    "patches-3d": "n1 c3 d4 h6 w6 k8 t2 r3 s3 stride2,3,3",
    "patches-of-sixteen": "n2 c3 h32 w32 k12 r16 s16 stride16",
    "patches-3d-of-sixteen": "n2 c1 d4 h16 w48 k7 t2 r16 s16 stride2,16,16",
    "patches-3d-of-eight": "n2 c2 d4 h8 w16 k9 t2 r4 s8 stride2,4,8",
    "octets-unpadded": "n2 c8 h6 w7 k10 r3 s3",
    # groups
    "groups": "n2 c6 h7 w6 k9 r3 s3 pad1 g3",
    "groups-of-one-filter": "n1 c8 h6 w5 k4 r3 s3 pad1 g4",
    "groups-stride": "n2 c8 h8 w9 k8 r3 s3 stride2 pad1 g2",
    "groups-of-four": "n2 c16 h7 w6 k16 r3 s3 pad1 g4",
    "groups-of-eight-stride": "n1 c32 h8 w9 k32 r3 s3 stride2 pad1 g4",
    "depthwise": "n2 c7 h8 w9 k7 r3 s3 pad1 g7",
    "depthwise-multiplier": "n1 c5 h7 w7 k15 r3 s3 stride2 pad1 g5",
    "depthwise-large": "n1 c3 h16 w17 k3 r11 s7 pad5,3 g3",
    "depthwise-dilated": "n1 c4 h12 w11 k4 r3 s3 pad2 dil2 g4",
    "depthwise-causal": "n2 c17 w33 k17 s4 pad3:0 g17",
    "depthwise-1d-31": "n1 c6 w40 k6 s31 pad15 g6",
    "depthwise-3d": "n1 c3 d4 h5 w6 k3 t3 r3 s3 pad1 g3",
    # one and three axes
    "1d": "n2 c6 w19 k8 s3 pad1",
    "1d-stride": "n3 c4 w21 k5 s4 stride3 pad2:0 dil2",
    "1d-long": "n1 c2 w150 k2 s101 pad50",
    "3d": "n1 c3 d5 h6 w4 k4 t3 r3 s3 pad1",
    "3d-everything": "n1 c4 d6 h5 w7 k6 t2 r3 s2 stride1,2,1 pad1,0:1,1 dil2,1,1 g2",
    # a bias, which some engines add themselves
    "bias": "n2 c3 h6 w7 k5 r3 s3 pad1 +bias",
    "bias-1x1": "n2 c6 h5 w7 k9 r1 s1 +bias",
    "bias-groups": "n1 c4 h7 w6 k6 r3 s3 stride2 pad1 g2 +bias",
    "bias-depthwise": "n2 c5 h7 w6 k5 r3 s3 pad1 g5 +bias",
    "bias-1d": "n2 c6 w17 k6 s4 pad3:0 g6 +bias",
}  # fmt: skip
"""Small telling problems by name, without direction, dtype and layout."""

EPILOGUES = (
    "+bias",
    "+bias+relu",
    "+bias+residual+leaky_relu(0.2)",
    "+scale+bias+silu",
    "+mul(c.a)+add(t.b)+clamp(-1,2)",
    "+bias+gelu+mul(s.gain)",
    "+max(s.floor)+hardswish",
    "+=mul(acc,sigmoid(acc))",
    "+=sub(tanh(t.b),max(acc,c.a))",
)


def sweep(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters of a test, of which `make test` takes every third; the others are slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (at % every > 0)) for at, value in enumerate(values)]


def make(text: str, direction: str = "fprop", dtype: str = "f32", layout: str = "nchw") -> Problem:
    """The problem of a line without direction, dtype and layout; the epilogue of a wgrad is dropped."""
    if direction == "wgrad":
        text = text.partition("+")[0]
    return Problem.parse(f"{direction} {text} {dtype} {layout}")


def cases(
    names: Iterable[str] = tuple(PROBLEMS), directions: Iterable[str] = DIRECTIONS, dtypes: Iterable[str] = ("f32",),
    layouts: Iterable[str] = ("nchw",),
) -> list[Problem]:  # fmt: skip
    """The product of the listed problems with passes, dtypes and layouts."""
    product = itertools.product(names, directions, dtypes, layouts)
    return [make(PROBLEMS[name], direction, dtype, layout) for name, direction, dtype, layout in product]


_SMALL = st.integers(1, 4)
_STRIDES = st.sampled_from((1, 1, 1, 2, 3, 4))  # many engines take 1 only
_DILATIONS = st.sampled_from((1, 1, 1, 2, 3))


@st.composite
def problems(
    draw: Any, directions: Sequence[str] = DIRECTIONS, ranks: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[str] = ("f32",), layouts: Sequence[str] = LAYOUTS, groups: Sequence[int] = (1, 1, 2, 3, 7),
    epilogues: st.SearchStrategy[Epilogue] | None = None, max_taps: int = 5,
) -> Problem:  # fmt: skip
    """A random valid problem of at most some hundred thousand products."""
    direction, rank = draw(st.sampled_from(directions)), draw(st.sampled_from(ranks))
    most = max_taps if rank < 3 else min(max_taps, 3)
    axes = []
    for _ in range(rank):
        taps, stride, dilation = draw(st.integers(1, most)), draw(_STRIDES), draw(_DILATIONS)
        low, high = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        least = max(1, dilation * (taps - 1) + 1 - low - high)
        axes.append((least + draw(st.integers(0, 9 if rank < 3 else 4)), taps, stride, (low, high), dilation))
    spatial, filter_, stride_, padding, dilation_ = zip(*axes, strict=True)
    g = draw(st.sampled_from(groups))
    per_group = st.one_of(st.just(1), _SMALL, st.sampled_from((8, 17)) if g == 1 and rank < 3 else _SMALL)
    return Problem(
        direction=direction, n=draw(st.integers(1, 3)), c=g * draw(per_group), k=g * draw(per_group), spatial=spatial,
        filter=filter_, stride=stride_, padding=padding, dilation=dilation_, groups=g,
        dtypes=_three(draw(st.sampled_from(dtypes))), layouts=_three(draw(st.sampled_from(layouts))),
        epilogue=IDENTITY if epilogues is None or direction == "wgrad" else draw(epilogues),
    )  # fmt: skip


def _three(text: str) -> Any:
    return tuple(text.replace(">", "*").split("*")) if "*" in text else text


_NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(lambda name: name != "acc")
_NUMBERS = st.one_of(
    st.integers(-9, 9).map(float),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from((math.inf, -math.inf)),
).map(lambda v: v + 0.0)  # -0.0 prints as 0


def epilogues(numbers: st.SearchStrategy[float] = _NUMBERS) -> st.SearchStrategy[Epilogue]:
    """Random epilogues: chains as users write them, and arbitrary trees."""

    @st.composite
    def nodes(draw: Any, children: st.SearchStrategy[Expr]) -> Expr:
        op = OPS[draw(st.sampled_from(sorted(name for name, op in OPS.items() if op.basic)))]
        args = [draw(children) for _ in range(op.values)]
        return Node(op.name, tuple(args), tuple(draw(st.lists(numbers, max_size=len(op.params)))))

    def consistent(expr: Expr) -> bool:
        """No name in two kinds."""
        operands = {node for node in expr.walk() if isinstance(node, Operand)}
        return len(operands) == len({operand.name for operand in operands})

    operands = st.builds(Operand, st.sampled_from(("channel", "tensor", "scalar")), _NAMES)
    trees = st.recursive(st.one_of(st.just(acc), st.builds(Const, numbers), operands), nodes, max_leaves=8)
    chains = st.sampled_from(("", *EPILOGUES)).map(Epilogue.parse)
    return st.one_of(chains, trees.filter(consistent).map(Epilogue))


# -- tensors -----------------------------------------------------------------------------------------------------

_WIDE = {"i64": 1 << 20, "i32": 1 << 20, "i16": (1 << 15) - 1, "i8": 127, "u8": 255}


def input_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two inputs of the pass."""
    x, w, y = problem.x_shape, problem.w_shape, problem.y_shape
    return {"fprop": (x, w), "dgrad": (y, w), "wgrad": (x, y)}[problem.direction]


def _inputs_at(problem: Problem) -> tuple[int, int]:
    """Which of (x, w, y) the two inputs of the pass are."""
    return {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (0, 2)}[problem.direction]


def tensors(problem: Problem, seed: int = 0, *, integers: bool = False) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Random inputs of the pass and operands of its epilogue, in the problem's dtypes and layouts. None is zero, so
    that every product counts. ``integers`` draws from -3 to 3, which every float type adds up exactly; integer types
    otherwise use their range, so that sums wrap around as the type does, unless an epilogue would see them wrapped."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: Sequence[int], dtype: str, layout: str) -> Tensor:
        def real() -> Tensor:
            sign = torch.randint(0, 2, tuple(shape), generator=generator) * 2 - 1
            if dtype in INTEGERS or integers:
                small = integers or not problem.epilogue.is_identity
                size = torch.randint(1, 4 if small else _WIDE[dtype] + 1, tuple(shape), generator=generator)
                return size.double() if dtype == "u8" else (sign * size).double()
            return sign * (0.25 + torch.rand(tuple(shape), generator=generator, dtype=torch.float64))

        value = torch.complex(real(), real()) if dtype.startswith("complex") else real()
        return to_layout(value.to(DTYPES[dtype]), layout)

    a, b = (one(shape, problem.dtypes[at], problem.layouts[at])
            for shape, at in zip(input_shapes(problem), _inputs_at(problem), strict=True))  # fmt: skip
    shapes = {"channel": (problem.result_channels,), "tensor": problem.result_shape, "scalar": ()}
    operands = tuple(
        one(shapes[operand.kind], problem.result_dtype, problem.layouts[problem.result])
        for operand in problem.epilogue.operands
    )
    return a, b, operands


# -- the reference -----------------------------------------------------------------------------------------------


def _at_most(a: Tensor, high: float) -> Tensor:
    return a if high == math.inf else torch.where(a > high, torch.full_like(a, high), a)


FORMULAS: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: torch.where((a > b) | torch.isnan(a), a, b),
    "min": lambda a, b: torch.where((a < b) | torch.isnan(a), a, b),
    "neg": lambda a: -a,
    "abs": lambda a: torch.where(a < 0, -a, a),
    "exp": torch.exp,
    "relu": lambda a: torch.where(a <= 0, torch.zeros_like(a), a),
    "leaky_relu": lambda a, slope: torch.where(a > 0, a, slope * a),
    "elu": lambda a, alpha: torch.where(a > 0, a, alpha * torch.expm1(a)),
    "clamp": lambda a, low, high: _at_most(-_at_most(-a, -low), high),
    "sigmoid": lambda a: 1 / (1 + torch.exp(-a)),
    "tanh": lambda a: 1 - 2 / (torch.exp(2 * a) + 1),
    "silu": lambda a: a / (1 + torch.exp(-a)),
    "hardswish": lambda a: a * torch.clamp(a + 3, 0, 6) / 6,
    "gelu": lambda a: a / 2 * (1 + torch.erf(a / math.sqrt(2))),
    "gelu_tanh": lambda a: a / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
}  # fmt: skip
"""Every epilogue operation, written down from its formula."""

# The steepest slope of each function: how much of an error in its argument can reach its value.
_SLOPES = {"sigmoid": 0.25, "silu": 1.1, "hardswish": 1.5, "gelu": 1.13, "gelu_tanh": 1.13}
# Roundings inside one function of torch's, in units of the larger of its argument and its value.
_ROUNDINGS = 8


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _geometry(problem: Problem) -> tuple[Any, ...]:
    zeros = [0] * problem.rank
    return list(problem.stride), zeros, list(problem.dilation), False, zeros, problem.groups


@threads(1)  # a team of threads costs more than these small sums
def _sums(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The pass on real float64 tensors, by torch, on an input padded beforehand."""
    if problem.is_empty:
        return a.new_zeros(problem.result_shape)
    ends = [end for axis in reversed(problem.padding) for end in axis]
    if problem.direction != "dgrad":
        a = F.pad(a, ends)
    if problem.direction == "fprop":
        return torch.convolution(a, b, None, *_geometry(problem))
    if problem.direction == "dgrad":
        dy, w, x = a, b, F.pad(a.new_zeros(problem.x_shape), ends)
    else:
        x, dy, w = a, b, a.new_zeros(problem.w_shape)
    mask = [problem.direction == "dgrad", problem.direction == "wgrad", False]
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *_geometry(problem), mask)
    return F.pad(dx, [-end for end in ends]) if problem.direction == "dgrad" else dw


def _accumulator(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    if a.is_complex():
        (ar, ai), (br, bi) = ((v.real, v.imag) for v in (a.to(torch.complex128), b.to(torch.complex128)))
        re, im = _sums(problem, ar, br) - _sums(problem, ai, bi), _sums(problem, ar, bi) + _sums(problem, ai, br)
        return torch.complex(re, im)
    total = _sums(problem, a.double(), b.double())
    if not a.is_floating_point():
        exact = problem.is_empty or _magnitude(problem, a, b).max() < 2**53
        assert exact, "the sums are too large for exact float64"
        return total.long() if problem.result_dtype in INTEGERS else total
    return total


def _magnitude(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """sum(|x|*|w|) of each element."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return _sums(problem, a.to(wide).abs(), b.to(wide).abs())


def reference(problem: Problem, a: Tensor, b: Tensor, operands: Sequence[Tensor] = ()) -> Tensor:
    """The result in float64 (complex128 for complex problems, exact int64 for integers)."""
    return _walk(problem, _accumulator(problem, a, b), None, operands)[0]


def tolerance(problem: Problem) -> float:
    """The largest error of the sum as a share of sum(|x|*|w|): n*u/(1 - n*u), with u of the accumulator's type, and
    what the products lose before they are added."""
    unit = _unit(problem)
    terms = problem.gemm.k * unit
    assert terms < 0.5, f"a reduction of {problem.gemm.k} terms says nothing in this precision"
    products = {"ieee": 0.0, "tf32": 2.0**-10, "tf32x3": 2.0**-20}[problem.precision] if unit == 2.0**-24 else 0.0
    pairs = 2.0 if problem.dtypes[0].startswith("complex") else 1.0  # re*re - im*im, and the norm of re and im
    return pairs * (terms / (1 - terms) + products + unit) + (problem.gemm.k * 2.0**-53 if unit else 0.0)


def _unit(problem: Problem) -> float:
    """Unit roundoff of the accumulator: that of f32 for everything below it; none for integers."""
    if problem.result_dtype in INTEGERS:
        return 0.0
    return 2.0**-53 if problem.dtypes[0] in ("f64", "complex128") else 2.0**-24


def cut_off(problem: Problem, engine: str) -> float:
    """What the engine's accumulator loses besides, as a share of sum(|x|*|w|): tensor cores of sm_90 keep 13 bits of
    the sums of e4m3 and e5m2 within a step. 2^-12 is chosen: 2 of 200704 elements were beyond the bound of f32."""
    return 2.0**-12 if engine == "cuda.igemm_sm90" and problem.dtypes[0] in ("e4m3", "e5m2") else 0.0


def bounds(
    problem: Problem, a: Tensor, b: Tensor, operands: Sequence[Tensor] = (), *, mixing: float | None = None,
    cut: float = 0.0,
) -> Tensor:  # fmt: skip
    """How far each element of the result may be from the reference. ``mixing`` is the error bound of an engine whose
    transforms mix the elements (Winograd, FFT): each one errs in proportion to the largest. ``cut`` is what an
    accumulator loses besides (:func:`cut_off`)."""
    magnitude = _magnitude(problem, a, b)
    error = magnitude * (tolerance(problem) + cut) if mixing is None else magnitude.max().expand_as(magnitude) * mixing
    value, error = _walk(problem, _accumulator(problem, a, b), error, operands)
    if problem.result_dtype in INTEGERS:
        return error
    info = torch.finfo(DTYPES[problem.result_dtype])
    return error + (value.abs() + error) * (info.eps / 2) + info.smallest_normal * info.eps


def _walk(problem: Problem, total: Tensor, error: Tensor | None, operands: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """The epilogue's value, and the error that reaches it from ``error`` in the sum and from its own roundings."""
    unit = _unit(problem)
    names = [operand.name for operand in problem.epilogue.operands]
    values = dict(zip(names, operands, strict=True))

    def visit(expr: Expr) -> tuple[Tensor, Any]:
        if isinstance(expr, Acc):
            return total, 0.0 if error is None else error
        if isinstance(expr, Const):
            return torch.tensor(expr.value, dtype=torch.float64).to(total.dtype), 0.0
        if isinstance(expr, Operand):
            value = values[expr.name].to(total.dtype)
            return value.view(-1, *(1,) * (total.dim() - 2)) if expr.kind == "channel" else value, 0.0
        assert isinstance(expr, Node)
        (a, ea), *rest = (visit(arg) for arg in expr.args)
        value = FORMULAS[expr.op](a, *(v for v, _ in rest), *expr.params)
        if rest:
            b, eb = rest[0]
            if expr.op == "mul":
                carried = a.abs() * eb + b.abs() * ea + ea * eb
            elif expr.op == "div":
                carried = (ea + value.abs() * eb) / (b.abs() - eb).clamp(min=0)
            else:
                carried = ea + eb
            return value, carried + unit * value.abs()
        if expr.op == "exp":
            return value, value * (torch.expm1(torch.as_tensor(ea)) + _ROUNDINGS * unit)
        slope = _SLOPES.get(expr.op, max([1.0, *map(abs, expr.params)] if expr.op in ("leaky_relu", "elu") else [1.0]))
        exact = expr.op in ("neg", "abs", "relu", "clamp")
        return value, slope * ea + (0.0 if exact else _ROUNDINGS * unit * (value.abs() + a.abs()))

    value, carried = visit(problem.epilogue.expr)
    return value.expand(total.shape), torch.as_tensor(carried, dtype=torch.float64).expand(total.shape)


@contextmanager
def _repeatable(where: str) -> Iterator[None]:
    """Any error inside the block ends with the command that repeats it."""
    try:
        yield
    except Exception as error:
        if where not in str(error):
            error.add_note(where)
        raise


def repro(problem: Problem, seed: int, engine: str | None = None) -> str:
    """The command that repeats a check."""
    forced = f" --engine {engine}" if engine else ""
    return f"PYTHONPATH=src python -m tests.support '{problem}' --seed {seed}{forced}"


def assert_right(
    problem: Problem, out: Tensor, a: Tensor, b: Tensor, operands: Sequence[Tensor] = (), *, exact: bool = False,
    mixing: float | None = None, cut: float = 0.0, context: str = "",
) -> None:  # fmt: skip
    """The result has the problem's shape, dtype and layout, and is within its bounds, or equal where ``exact``."""
    shape = tuple(out.shape)
    assert shape == problem.result_shape, f"shape {shape}, wanted {problem.result_shape}; {context}"
    dtype, layout = DTYPES[problem.result_dtype], problem.layouts[problem.result]
    assert out.dtype == dtype, f"dtype {out.dtype}, wanted {dtype}; {context}"
    if out.numel():
        assert in_layout(out, layout), f"strides {out.stride()} of shape {shape} are not {layout}; {context}"
    wanted = reference(problem, a, b, operands)
    if exact or problem.result_dtype in INTEGERS:
        bad, limit = out != wanted.to(out.dtype), torch.zeros(out.shape)
    else:
        limit = bounds(problem, a, b, operands, mixing=mixing, cut=cut)
        bad = ~((out.to(wanted.dtype) - wanted).abs() <= limit)
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are wrong; at {at} got {out[at].item()}, wanted "
            f"{wanted.to(out.dtype)[at].item()} within {limit[at].item():.3g}\n{context}"
        )


# -- engines -----------------------------------------------------------------------------------------------------

_MARGIN = 4096  # bytes before and behind each buffer that nobody may write and whose content nobody may use
_SLACK = 32 << 10  # bytes of Python objects and small tables that a call may allocate besides its workspace


_here: list[tuple[Device | None, torch.device]] = [(None, torch.device("cpu"))]


@contextmanager
def running_on(device: Device | None, place: torch.device) -> Iterator[None]:
    """Check engines of this device, on tensors in this place: a GPU on its own, or emulated on the CPU's."""
    _here.append((device, place))
    try:
        yield
    finally:
        _here.pop()


def this_device() -> Device:
    """The device whose engines are checked: the CPU with the threads that torch uses now unless told otherwise."""
    device, place = _here[-1]
    return device or device_of(place)


def this_place() -> torch.device:
    """Where tensors are."""
    return _here[-1][1]


def core_of(problem: Problem) -> Problem:
    """What an engine is asked for."""
    return lower(problem, this_device())


def accepts(engine: Engine, problem: Problem) -> bool:
    """Whether the engine takes what the problem lowers to."""
    return not list(engine.refusals(core_of(problem), this_device()))


def refusal(engine: Engine, problem: Problem) -> str:
    """The refusal of the problem as it stands, one sentence a line; empty if it is accepted."""
    return "\n".join(engine.refusals(problem, this_device()))


def candidates(engine: Engine, problem: Problem) -> Iterator[Candidate]:
    """The engine with each of its knobs, the default first."""
    for knobs in engine.knobs(core_of(problem), this_device()):
        yield with_knobs(engine, problem, knobs)


def with_knobs(engine: Engine, problem: Problem, knobs: Any) -> Candidate:
    """The engine with these knobs, whether or not they are among its own."""
    core, device = core_of(problem), this_device()
    workspace, traits = engine.workspace_bytes(core, device, knobs), engine.traits(core, knobs)
    return Candidate(engine, knobs, engine.cost(core, device, knobs), workspace, traits)


def _poison(tensor: Tensor) -> Tensor:
    """NaN, or the largest integer; of bytes that is 0xFF, of which eight or four in a row are a NaN again."""
    return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _bits(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes, in the order of its axes."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@threads(1)  # a team of threads costs more than filling these buffers
def _embed(like: Tensor, *, shift: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A poisoned tensor with the shape and strides of ``like``, ``shift`` elements off the alignment that torch gives;
    and the poisoned margins before and behind it."""
    margin = _MARGIN // like.element_size()
    buffer = _poison(torch.empty(margin + shift + like.numel() + margin, dtype=like.dtype, device=this_place()))
    place = buffer.as_strided(like.shape, like.stride(), margin + shift)
    return place, [buffer[: margin + shift], buffer[-margin:]]


class _Allocations(TorchDispatchMode):
    """Counts the bytes that torch operations allocate inside a block."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.seen = {t.untyped_storage().data_ptr() for t in known}
        self.kept: list[Tensor] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and (start := value.untyped_storage().data_ptr()) not in self.seen:
                self.seen.add(start)
                self.kept.append(value)  # so that no later tensor is taken for this one
                self.bytes += value.untyped_storage().nbytes()
        return result


class Run:
    """One call of an engine, between margins.

    Result and workspace hold NaN at first and lie in buffers with margins: nothing beyond them may change, nothing that
    was there before may show. The inputs lie between NaN as well, and are aligned to their elements only, as a slice of
    a user's tensor may be.
    """

    def __init__(
        self, engine: Engine, problem: Problem, seed: int = 0, *, candidate: Candidate | None = None,
        integers: bool = False, inputs: tuple[Tensor, Tensor, tuple[Tensor, ...]] | None = None,
    ) -> None:  # fmt: skip
        core = core_of(problem)
        self.where = repro(problem, seed, engine.name)
        reasons = list(engine.refusals(core, this_device()))
        assert not reasons, f"{engine.name} refuses '{core}': {reasons}; {self.where}"
        self.candidate = candidate or next(candidates(engine, problem))
        if engine.takes_finish:
            core = core.with_(epilogue=Finish.of(problem.epilogue).epilogue)
        self.runner = engine.build(core, this_device(), self.candidate.knobs)
        # An engine that adds no bias is built with the bias in the problem, and run without.
        self.core = core if engine.takes_bias or engine.takes_epilogue else core.with_(epilogue=IDENTITY)
        self.a, self.b, self.operands = inputs or tensors(self.core, seed, integers=integers)
        self.given = [_embed(v, shift=1)[0].copy_(v) for v in (self.a, self.b, *self.operands)]
        like = empty(core.result_shape, DTYPES[core.result_dtype], core.layouts[core.result], torch.device("cpu"))
        self._out, self.out_margins = _embed(like)
        self.scratch, self.scratch_margins = _embed(torch.empty(self.candidate.workspace, dtype=torch.uint8))

    @property
    def out(self) -> Tensor:
        """The result, where it can be compared."""
        return self._out.cpu()

    def call(self) -> None:
        """Run the engine once more."""
        bias: Any = self.given[2] if self.operands else None
        residual = []
        if self.candidate.engine.takes_epilogue:
            bias = tuple(self.given[2:])
        elif self.candidate.engine.takes_finish:
            finish = Finish.of(self.core.epilogue)
            values = dict(zip([o.name for o in self.core.epilogue.operands], self.given[2:], strict=True))
            bias = values[finish.bias] if finish.bias else None
            residual = [values[finish.residual]] if finish.residual else []
        self.runner(*self.given[:2], self._out, self.scratch if self.candidate.workspace else None, bias, *residual)

    def check_margins(self) -> None:
        """The inputs are as they were, and nothing was written beyond result and workspace."""
        name = self.candidate.engine.name
        for place, value in zip(self.given, (self.a, self.b, *self.operands), strict=True):
            assert torch.equal(_bits(place.cpu()), _bits(value)), f"{name} changed an input; {self.where}"
        for margins, what in ((self.out_margins, "result"), (self.scratch_margins, "workspace")):
            for margin in margins:
                clean = torch.equal(_bits(margin), _bits(_poison(torch.empty_like(margin))))
                assert clean, f"{name} [{self.candidate.knobs}] wrote beyond its {what}; {self.where}"


def run_engine(engine: Engine, problem: Problem, seed: int = 0, **options: Any) -> Run:
    """Build the engine for the problem's core, run it once and look at the margins. ``inputs`` replaces the random
    tensors, ``candidate`` the default knobs, ``integers`` the random floats."""
    with _repeatable(repro(problem, seed, engine.name)):
        run = Run(engine, problem, seed, **options)
        run.call()
        run.check_margins()
    return run


def check_engine(engine: Engine, problem: Problem, seed: int = 0, *, candidate: Candidate | None = None) -> None:
    """Right within the bounds on random data, within the error that the traits claim, and exact on small integers."""
    run = run_engine(engine, problem, seed, candidate=candidate)
    core, traits = run.core, run.candidate.traits
    context = f"{engine.name} [{run.candidate.knobs}] as '{core}'\n{run.where}"
    mixing = None if traits.plain_sum else traits.error_bound
    cut = cut_off(core, engine.name)
    assert_right(core, run.out, run.a, run.b, run.operands, mixing=mixing, cut=cut, context=context)
    if traits.plain_sum and core.epilogue.is_identity and core.result_dtype not in INTEGERS:
        share = traits.error_bound + (core.gemm.k + 1) * 2.0**-53  # the reference is a float64 sum itself
        if core.result_dtype in ("f16", "bf16"):
            share += torch.finfo(DTYPES[core.result_dtype]).eps / 2  # a sum in f32 is rounded once more
        size = _magnitude(core, run.a, run.b).clamp(min=1e-300)  # 0 where a window sees nothing but padding
        off = ((run.out.double() - reference(core, run.a, run.b)).abs() / size).max()
        assert off <= share, f"off by {off:.3g} of sum(|x|*|w|), claimed {traits.error_bound:.3g}; {context}"
    if traits.plain_sum:
        run = run_engine(engine, problem, seed, candidate=candidate, integers=True)
        assert_right(core, run.out, run.a, run.b, run.operands, exact=True, context=f"integer data; {context}")


def check_fused(engine: Engine, problem: Problem, knobs: Any, place: str = "cpu") -> None:
    """Right on normal values with all that is fused, within the error that the traits claim; the same bits again."""
    plan = make_plan(problem, this_device(), Policy(), with_knobs(engine, problem, knobs))
    assert plan.core == problem
    assert plan.candidate is not None
    inputs = random_inputs(problem, device=place)
    made, again = (plan(inputs.a, inputs.b, inputs.operands) for _ in range(2))
    traits = plan.candidate.traits
    error, allowed = error_of(problem, made, inputs, plain_sum=traits.plain_sum), allowed_error(problem, traits)
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}: {engine.name} [{knobs}] of '{problem}'"
    one, other = ((v,) if isinstance(v, Tensor) else v for v in (made, again))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), f"other bits: '{problem}'"


def check_knobs(engine: Engine, problem: Problem, seed: int = 0) -> None:
    """Every point of the search space is right, and the default is its first point again."""
    for candidate in candidates(engine, problem):
        check_engine(engine, problem, seed, candidate=candidate)


def check_workspace_limits(engine: Engine, problem: Problem, seed: int = 0) -> list[int]:
    """A limit on the workspace is kept, through other knobs where there are some, or refused with the numbers; the
    result stays right. Returns the workspaces that the limits led to."""
    default = next(candidates(engine, problem)).workspace
    limits = {default, default - 1, default // 2, default // 8, default // 64, 0} - {-1}
    used = []
    for limit in sorted(limits, reverse=True):
        try:
            candidate = choose(core_of(problem), this_device(), Policy(engine=engine.name, max_workspace=limit))
        except UnsupportedProblem as error:
            reasons = error.refusals[engine.name]
            assert any(f"max_workspace is {limit}" in reason for reason in reasons), reasons
            continue
        assert candidate.workspace <= limit, f"{candidate.workspace} bytes under a limit of {limit} for '{problem}'"
        check_engine(engine, problem, seed, candidate=candidate)
        used.append(candidate.workspace)
    return used


def check_hidden_memory(engine: Engine, problem: Problem, seed: int = 0) -> None:
    """A call allocates nothing to speak of beyond the workspace that it was given. Use a problem whose tensors are far
    larger than the slack."""
    run = Run(engine, problem, seed)
    with _Allocations([]):  # torch imports what a dispatch mode needs at the first
        run.call()
        run.call()  # and what an engine makes of filters is kept from the second call on
    tracemalloc.start()
    try:
        with _Allocations([*run.given, run.out, run.scratch]) as allocations:
            run.call()
        hidden = allocations.bytes + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    workspace = run.candidate.workspace
    assert hidden <= _SLACK, f"{engine.name} allocated {hidden} bytes besides its workspace of {workspace}; {run.where}"


def check_determinism(engine: Engine, problem: Problem, seed: int = 0) -> None:
    """Two builds and two calls give the same bits, with each of the knobs that claim it."""
    for candidate in candidates(engine, problem):
        if candidate.traits.deterministic:
            first, second = (run_engine(engine, problem, seed, candidate=candidate) for _ in range(2))
            same = torch.equal(_bits(first.out), _bits(second.out))
            assert same, f"[{candidate.knobs}] gives other bits the second time; {first.where}"


def check_batch_invariance(engine: Engine, problem: Problem, seed: int = 0) -> bool:
    """With the knobs that a policy of batch invariance leads to, images alone and the same images within a batch give
    the same bits, whatever the number of threads. Returns whether there are such knobs."""
    assert problem.direction != "wgrad", "a wgrad sums over the batch"
    claims = []
    for count in sorted({1, 2, torch.get_num_threads()}):
        with threads(count):
            claims.append(_check_batch_invariance(engine, problem, seed))
    return all(claims)


def _check_batch_invariance(engine: Engine, problem: Problem, seed: int) -> bool:
    def claiming(problem: Problem) -> Candidate | None:
        try:
            return choose(core_of(problem), this_device(), Policy(engine=engine.name, batch_invariant=True))
        except UnsupportedProblem:
            return None

    whole = claiming(problem)
    if whole is None:
        return False
    run = run_engine(engine, problem, seed, candidate=whole)
    layout = run.core.layouts[_inputs_at(run.core)[0]]
    for size in sorted({1, problem.n // 2, problem.n - 1} - {0, problem.n}):
        part = problem.with_(n=size)
        candidate = claiming(part)
        assert candidate is not None, f"{engine.name} claims batch invariance for '{problem}' and not for '{part}'"
        for first in {0, problem.n - size}:
            images = to_layout(run.a[first : first + size].clone(), layout)
            alone = run_engine(engine, part, seed, candidate=candidate, inputs=(images, run.b, run.operands))
            assert torch.equal(_bits(alone.out), _bits(run.out[first : first + size])), (
                f"with {torch.get_num_threads()} threads, images {first} to {first + size - 1} alone "
                f"[{candidate.knobs}] and within a batch of {problem.n} [{whole.knobs}] differ; {run.where}"
            )
    return True


def check_thread_independence(engine: Engine, problem: Problem, seed: int = 0) -> None:
    """The number of threads does not show in the bits."""
    results = {}
    for count in (1, 2, 3):
        with threads(count):
            results[count] = run_engine(engine, problem, seed).out
    for count, result in results.items():
        same = torch.equal(_bits(result), _bits(results[1]))
        assert same, f"{count} threads and 1 give different bits; {repro(problem, seed, engine.name)}"


def check_locality(engine: Engine, problem: Problem, seed: int = 0, value: float = math.inf) -> None:
    """An infinity or a NaN in an image reaches exactly the results that it has a product in.

    One in the filter, or in the dy of a wgrad, reaches at least those, and none of another channel: where its partner
    lies on the padding, the product 0 * inf is NaN by the definition and absent where the padding is skipped.
    """
    clean = Run(engine, problem, seed)
    core = clean.core.with_(epilogue=IDENTITY)
    generator = torch.Generator().manual_seed(seed)
    for at in (0, 1):
        inputs = [clean.a.clone(), clean.b.clone()]
        index = tuple(int(torch.randint(0, size, (), generator=generator)) for size in inputs[at].shape)
        marks = [torch.ones_like(v) for v in inputs]
        marks[at].zero_()[index] = 1
        touched = reference(core, marks[0], marks[1]) > 0.5
        allowed = touched
        if at == 1:
            allowed = torch.zeros_like(touched)
            if core.direction == "dgrad":
                allowed[:, index[0] // (core.k // core.groups) * (core.c // core.groups) + index[1]] = True
            elif core.direction == "fprop":
                allowed[:, index[0]] = True
            else:
                allowed[index[1]] = True
        inputs[at][index] = value
        run = run_engine(engine, problem, seed, inputs=(inputs[0], inputs[1], clean.operands))
        hit = ~torch.isfinite(run.out)
        where = f"{value} at {index} of input {'ab'[at]}; {run.where}"
        assert not (touched & ~hit).any(), f"{int((touched & ~hit).sum())} results miss the {where}"
        assert not (hit & ~allowed).any(), f"{int((hit & ~allowed).sum())} results have no part in the {where}"


# -- plans -------------------------------------------------------------------------------------------------------


def _strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them, as a slice of a larger tensor has."""
    if tensor.dim() == 0:
        return tensor
    larger = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    return larger[..., ::2].copy_(tensor)


def check_plan(
    problem: Problem, seed: int = 0, *, engine: str | None = None, integers: bool = False, strided: bool = False
) -> None:
    """The planned call is right, on an engine of choice or on the one that the heuristic picks. ``strided`` hands it
    tensors whose memory is in no layout."""
    where = repro(problem, seed, engine) + " --strided" * strided
    with _repeatable(where):
        plan = plan_for(problem, this_device(), Policy(engine=engine))
        a, b, operands = tensors(problem, seed, integers=integers)
        if strided:
            a, b, operands = _strided(a), _strided(b), tuple(map(_strided, operands))
        kept = [value.clone() for value in (a, b, *operands)]
        place = this_place()
        out = plan(a.to(place), b.to(place), tuple(value.to(place) for value in operands)).cpu()
        context = f"{'; '.join(plan.steps)}\n{where}"
        for value, before in zip((a, b, *operands), kept, strict=True):
            assert torch.equal(_bits(value), _bits(before)), f"an input changed; {context}"
        traits = plan.candidate.traits if plan.candidate else None
        mixing = None if traits is None or traits.plain_sum else traits.error_bound
        exact = integers and mixing is None and _is_exact(problem.epilogue)
        cut = cut_off(problem, plan.candidate.engine.name) if plan.candidate else 0.0
        assert_right(problem, out, a, b, operands, exact=exact, mixing=mixing, cut=cut, context=context)


def _is_exact(epilogue: Epilogue) -> bool:
    """Whether small integers stay integers."""
    nodes = list(epilogue.expr.walk())
    steps = [node for node in nodes if isinstance(node, Node)]
    numbers = [node.value for node in nodes if isinstance(node, Const)] + [p for step in steps for p in step.params]
    exact = {"add", "sub", "mul", "max", "min", "neg", "abs", "relu", "clamp"}
    return all(number.is_integer() for number in numbers) and {step.op for step in steps} <= exact


def main() -> None:
    """Repeat a check from the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default=None)
    parser.add_argument("--strided", action="store_true", help="tensors with gaps between their values")
    given = parser.parse_args()
    problem = Problem.parse(given.problem)
    for integers in (False, True):
        check_plan(problem, given.seed, engine=given.engine, integers=integers, strided=given.strided)
    if given.engine:
        engine = engine_named(given.engine)
        check_knobs(engine, problem, given.seed)
        check_determinism(engine, problem, given.seed)
        if problem.direction != "wgrad":
            check_batch_invariance(engine, problem, given.seed)
        for value in (math.inf, math.nan):
            check_locality(engine, problem, given.seed, value)
    print("right")


if __name__ == "__main__":
    main()
