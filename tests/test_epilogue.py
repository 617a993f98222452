"""Epilogue: its text form, what it computes, what it refuses, and how a plan takes the bias out of it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from openconv.epilogue import (
    ACTIVATIONS,
    IDENTITY,
    OPS,
    Acc,
    Const,
    Epilogue,
    Finish,
    Node,
    Operand,
    acc,
    apply,
    channel,
    scalar,
    tensor,
)
from openconv.evaluate import activate, evaluate, evaluate_, finisher_
from tests.support import EPILOGUES, FORMULAS, epilogues

SHAPE = (2, 3, 4, 5)
SMALL = st.one_of(st.integers(-3, 3), st.floats(-3, 3)).map(lambda v: float(v) + 0.0)


def accumulator(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPE, generator=generator, dtype=torch.float64) * 3).to(dtype)


def operands_of(epilogue, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"channel": SHAPE[1:2], "tensor": SHAPE, "scalar": ()}
    return {
        operand.name: torch.randn(shapes[operand.kind], generator=generator, dtype=torch.float64).to(dtype)
        for operand in epilogue.operands
    }


def by_formula(expr, total, operands):
    """The tree from the formulas, written without openconv.evaluate."""
    if isinstance(expr, Acc):
        return total
    if isinstance(expr, Const):
        return torch.full_like(total, expr.value)
    if isinstance(expr, Operand):
        value = operands[expr.name]
        return (value.view(-1, *(1,) * (total.dim() - 2)) if expr.kind == "channel" else value).expand_as(total)
    return FORMULAS[expr.op](*(by_formula(arg, total, operands) for arg in expr.args), *expr.params)


def agree(got, wanted):
    """Equal up to the rounding of float64, with the same NaN and infinities, where the values are of moderate size."""
    assert got.shape == wanted.shape
    moderate = ~(wanted.abs() > 1e12)
    torch.testing.assert_close(got[moderate], wanted[moderate], rtol=1e-9, atol=1e-9, equal_nan=True)


# -- text --------------------------------------------------------------------------------------------------------


@given(epilogues())
def test_text_parses_back_to_the_equal_tree(epilogue):
    text = str(epilogue)
    again = Epilogue.parse(text)
    assert again == epilogue
    assert hash(again) == hash(epilogue)
    assert str(again) == text
    assert not any(c.isspace() for c in text)
    assert epilogue.is_identity == (text == "")
    assert pickle.loads(pickle.dumps(epilogue)) == epilogue


@pytest.mark.parametrize(
    "text, expr",
    [
        ("", acc),
        ("+bias+relu", apply("relu", acc + channel("bias"))),
        ("+scale", acc * channel("scale")),
        ("+residual", acc + tensor("residual")),
        ("+add(s.bias)", acc + scalar("bias")),
        ("+leaky_relu", apply("leaky_relu", acc, params=(0.01,))),
        ("+leaky_relu(0.2)", apply("leaky_relu", acc, params=(0.2,))),
        ("+clamp(0,6)", apply("clamp", acc, params=(0, 6))),
        ("+clamp(0)", apply("clamp", acc, params=(0,))),
        ("+clamp(-inf,6)", apply("clamp", acc, params=(-math.inf, 6))),
        ("+mul(-0.5)+neg", -(acc * -0.5)),
        ("+sub(exp(c.a))", acc - apply("exp", channel("a"))),
        ("+=mul(acc,sigmoid(acc))", acc * apply("sigmoid", acc)),
        ("+=sub(1,acc)", 1 - acc),
        ("+=div(c.a,acc)", channel("a") / acc),
        ("+=c.a", channel("a")),
        ("+=3", Const(3)),
        ("+add(1e-07)", acc + 1e-7),
        ("+add(1e+300)", acc + 1e300),
    ],
)
def test_text_means_what_the_docstring_says(text, expr):
    assert str(Epilogue(expr)) == text
    assert Epilogue.parse(text) == Epilogue(expr)


def test_methods_chain():
    chained = (
        Epilogue().scale().bias().residual().add(1).mul(scalar("gain")).relu().clamp(0, 6).activation("leaky_relu(0.2)")
    )
    assert str(chained) == "+scale+bias+residual+add(1)+mul(s.gain)+relu+clamp(0,6)+leaky_relu(0.2)"
    assert Epilogue().then("max", 0) == Epilogue(apply("max", acc, 0))


def test_arithmetic_builds_trees():
    a, b = acc, channel("b")
    assert str(Epilogue((a + b) * 2 - 1)) == "+add(c.b)+mul(2)+sub(1)"
    assert [str(e) for e in (2 + a, 2 - a, 2 * a, 2 / a, -a)] == [
        "add(2,acc)", "sub(2,acc)", "mul(2,acc)", "div(2,acc)", "neg(acc)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text, words",
    [
        ("bias", ["'+'", "position 0", "'bias'"]),
        ("+", ["an operation", "position 1"]),
        ("+bais", ["'bais'", "relu"]),
        ("+bias(3)", ["'+'", "'(3)'"]),
        ("+add", ["add takes 2 value(s), got 1"]),
        ("+add(1,2)", ["add takes 0 parameter(s), got 1"]),
        ("+add(1", ["',' or ')'"]),
        ("+add(1,)", ["a number, an operand or an operation", "')'"]),
        ("+add(c.)", ["an operand's name"]),
        ("+add(x.a)", ["x.a"]),
        ("+leaky_relu(c.a)", ["c.a", "no number"]),
        ("+leaky_relu(0.1,0.2)", ["leaky_relu takes 1 parameter(s), got 2"]),
        ("+=relu(acc)x", ["the end", "'x'"]),
        ("+=", ["a number, an operand or an operation"]),
        ("+add(nan)", ["nan"]),
        ("+add(c.a)+mul(t.a)", ["'a'", "channel", "tensor"]),
    ],
)
def test_parse_says_where_the_text_goes_wrong(text, words):
    with pytest.raises(ValueError) as error:
        Epilogue.parse(text)
    for word in words:
        assert word in str(error.value)


# -- the tree ----------------------------------------------------------------------------------------------------


def test_operands_come_in_order_of_first_use():
    epilogue = Epilogue.parse("+add(t.b)+mul(c.a)+sub(t.b)+max(s.z)")
    assert [operand.name for operand in epilogue.operands] == ["b", "a", "z"]
    right_first = Epilogue(channel("a") * (acc + tensor("b")))
    assert [operand.name for operand in right_first.operands] == ["a", "b"]


def test_flops_count_operations():
    assert IDENTITY.flops == 0
    assert Epilogue.parse("+bias+relu+mul(exp(c.a))").flops == 4


def test_a_constant_prints_as_short_as_it_is():
    assert [str(Const(v)) for v in (1, -2.0, 0.5, math.inf, -math.inf, 2.0**53, 1e22)] == [
        "1", "-2", "0.5", "inf", "-inf", "9007199254740992.0", "1e+22",
    ]  # fmt: skip
    assert Const(1) == Const(1.0)
    assert Const(1) != Const(2)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Const(math.nan), ["NaN"]),
        (lambda: Operand("vector", "a"), ["'vector'", "channel, tensor, scalar"]),
        (lambda: channel("2a"), ["'2a'", "identifier"]),
        (lambda: channel("acc"), ["'acc'"]),
        (lambda: channel("a b"), ["'a b'"]),
        (lambda: apply("power", acc, 2), ["'power'", "relu"]),
        (lambda: apply("add", acc), ["add takes 2", "got 1"]),
        (lambda: apply("relu", acc, 1), ["relu takes 1", "got 2"]),
        (lambda: Node("relu", (acc,), (1.0,)), ["relu takes 0 parameter(s), got 1"]),
        (lambda: Epilogue().activation("sign"), ["sign"]),
        (lambda: Epilogue().activation("add(1)"), ["'add(1)'", "relu"]),
        (lambda: Epilogue().activation("relu+relu"), ["'relu+relu'"]),
        (lambda: Epilogue(channel("a") + tensor("a")), ["'a'", "channel", "tensor"]),
        (lambda: Node("leaky_relu", (acc,), (math.nan,)), ["NaN"]),
    ],
)
def test_what_is_no_epilogue_is_refused_with_the_value_seen(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)


# -- values ------------------------------------------------------------------------------------------------------

PARAMS = {"leaky_relu": (0.2,), "elu": (1.5,), "clamp": (-1.0, 2.0)}
BASIC = [op for op in OPS if OPS[op].basic]


def slope(function):
    """The backward form of an activation, by torch's own gradient."""

    def formula(a, b, *params):
        x = b.clone().requires_grad_()
        function(x, *params).backward(a)
        return x.grad

    return formula


FURTHER = {
    "add_square": lambda a, b: a + b**2, "mod": torch.fmod, "pow": lambda a, b: a.abs() ** b, "atan2": torch.atan2,
    "ceil": torch.ceil, "floor": torch.floor, "sign": torch.sign, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan,
    "log": lambda a: a.abs().log(), "sqrt": lambda a: a.abs().sqrt(), "rsqrt": lambda a: a.abs().rsqrt(),
    "reciprocal": lambda a: 1 / a, "erf": torch.erf,
    "softplus": lambda a, beta: F.softplus(a, beta=beta, threshold=1e9), "swish": lambda a, b: a * torch.sigmoid(b * a),
    **{f"cmp_{op}": (lambda a, b, f=f: f(a, b).double()) for op, f in (
        ("eq", torch.eq), ("neq", torch.ne), ("gt", torch.gt), ("ge", torch.ge), ("lt", torch.lt), ("le", torch.le))},
    "logical_and": lambda a, b: torch.logical_and(a, b).double(),
    "logical_or": lambda a, b: torch.logical_or(a, b).double(), "logical_not": lambda a: (~a.bool()).double(),
    "select": lambda a, b: torch.where(a != 0, b, a), "relu_backward": slope(F.relu),
    "leaky_relu_backward": slope(F.leaky_relu), "elu_backward": slope(F.elu), "clamp_backward": slope(torch.clamp),
    "sigmoid_backward": slope(torch.sigmoid), "tanh_backward": slope(torch.tanh),
    "softplus_backward": slope(lambda x, beta: F.softplus(x, beta=beta, threshold=1e9)),
    "swish_backward": slope(lambda x, beta: x * torch.sigmoid(beta * x)), "hardswish_backward": slope(F.hardswish),
    "gelu_backward": slope(F.gelu), "gelu_tanh_backward": slope(lambda x: F.gelu(x, approximate="tanh")),
}  # fmt: skip
PLACES = {"pow", "log", "sqrt", "rsqrt"}  # of what is positive


@pytest.mark.parametrize("op", [op for op in OPS if not OPS[op].basic])
def test_every_further_operation_is_its_formula(op):
    spec, more = OPS[op], {"clamp_backward": (-1.0, 2.0), "leaky_relu_backward": (0.2,), "elu_backward": (1.5,)}
    x, y = accumulator(), accumulator(seed=5)
    y[0, 0] = x[0, 0]  # some are equal, some are 0
    x[0, 1], y[1, 1] = 0.0, 0.0
    if op in PLACES:
        x = x.abs() + 0.1
    if op in ("reciprocal", "mod"):
        x, y = x + 4, y + 5
    values = [acc, tensor("y"), acc][: spec.values]
    for params in {spec.params, more.get(op, spec.params), (0.5,) if len(spec.params) == 1 else spec.params}:
        wanted = FURTHER[op](*([x, y][: min(spec.values, 2)]), *params)
        found = evaluate(Epilogue(apply(op, *values, params=params)), x, {"y": y})
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", BASIC)
def test_every_operation_is_its_formula(op):
    spec = OPS[op]
    x, y = accumulator(), accumulator(seed=5)
    args, values = ([x], [acc]) if spec.values == 1 else ([x, y], [acc, tensor("y")])
    for params in {spec.params, PARAMS.get(op, spec.params)}:
        wanted = FORMULAS[op](*args, *params)
        torch.testing.assert_close(evaluate(Epilogue(apply(op, *values, params=params)), x, {"y": y}), wanted)


@pytest.mark.parametrize("op", BASIC)
def test_nan_passes_through_every_operation(op):
    x = torch.full(SHAPE, math.nan, dtype=torch.float64)
    y = torch.ones(SHAPE, dtype=torch.float64)
    other = [] if OPS[op].values == 1 else [tensor("y")]
    epilogue = Epilogue(apply(op, acc, *other, params=PARAMS.get(op, ())))
    assert evaluate(epilogue, x, {"y": y}).isnan().all()
    assert evaluate_(epilogue, x.clone(), {"y": y}).isnan().all()
    if other:
        assert evaluate(Epilogue(apply(op, tensor("y"), acc)), x, {"y": y}).isnan().all()


@pytest.mark.parametrize("params", [(), (0,), (-math.inf, 1), (1, -1), (-math.inf, -math.inf), (math.inf,)])
def test_clamp_with_infinite_ends(params):
    epilogue, x = Epilogue(apply("clamp", acc, params=params)), accumulator()
    wanted = by_formula(epilogue.expr, x, {})
    assert torch.equal(evaluate(epilogue, x, {}), wanted)
    assert torch.equal(evaluate_(epilogue, x.clone(), {}), wanted)


@given(epilogues(SMALL))
def test_any_tree_is_its_formulas(epilogue):
    assume(any(isinstance(node, Acc) for node in epilogue.expr.walk()))
    x, operands = accumulator(), operands_of(epilogue)
    agree(evaluate(epilogue, x, operands), by_formula(epilogue.expr, x, operands))


@pytest.mark.parametrize("text", ["+=3", "+=c.a", "+=s.a", "+=relu(c.a)", "+=exp(2)"])
def test_a_tree_without_the_accumulator_still_has_its_shape(text):
    epilogue, x = Epilogue.parse(text), accumulator()
    operands = operands_of(epilogue)
    assert torch.equal(evaluate(epilogue, x, operands), by_formula(epilogue.expr, x, operands))


@given(epilogues(SMALL))
def test_in_place_gives_the_same_bits(epilogue):
    assume(any(isinstance(node, Acc) for node in epilogue.expr.walk()))
    for dtype in (torch.float64, torch.float32):
        x, operands = accumulator(dtype), operands_of(epilogue, dtype)
        kept = {name: value.clone() for name, value in operands.items()}
        wanted = evaluate(epilogue, x.clone(), operands)
        torch.testing.assert_close(evaluate_(epilogue, x, operands), wanted, rtol=0, atol=0, equal_nan=True)
        assert all(torch.equal(operands[name], kept[name]) for name in kept)


@pytest.mark.parametrize("text", ["+add(1)", "+mul(3)+sub(2)", "+clamp(0,6)", "+clamp(-2)", "+max(0)", "+=sub(2,acc)"])
def test_whole_constants_keep_integers_exact(text):
    """A constant is stored as a float; 2**40 + 1 would not survive a detour through one of 24 bits."""
    epilogue = Epilogue.parse(text)
    x = torch.arange(-60, 60).view(SHAPE) * 2**34 + 1
    wanted = by_formula(epilogue.expr, x, {})
    for got in (evaluate(epilogue, x, {}), evaluate_(epilogue, x.clone(), {})):
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted)


def test_equal_constants_compute_the_same():
    """-0 prints as 0 and is equal to it, so that a plan for one may be used for the other."""
    zeros = [Epilogue(acc / Const(value)) for value in (0.0, -0.0)]
    if zeros[0] == zeros[1]:
        x = accumulator()
        assert torch.equal(evaluate(zeros[0], x, {}), evaluate(zeros[1], x, {}))


@pytest.mark.parametrize(
    "text", ["+bias+relu", "+scale+bias+residual+silu", "+sub(1)+div(s.a)+clamp(0,6)", "+elu+hardswish+tanh+sigmoid"]
)
def test_a_chain_runs_in_the_accumulators_memory(text):
    epilogue, x = Epilogue.parse(text), accumulator()
    start = x.data_ptr()
    assert evaluate_(epilogue, x, operands_of(epilogue)).data_ptr() == start


@pytest.mark.parametrize("text", EPILOGUES)
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 2, 3, 2)], ids=["1d", "3d"])
def test_channels_are_the_second_axis_in_any_rank(text, shape):
    epilogue, x = Epilogue.parse(text), torch.randn(shape, dtype=torch.float64)
    sizes = {"channel": shape[1:2], "tensor": shape, "scalar": ()}
    operands = {o.name: torch.randn(sizes[o.kind], dtype=torch.float64) for o in epilogue.operands}
    agree(evaluate(epilogue, x, operands), by_formula(epilogue.expr, x, operands))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "leaky_relu(0.3)", "clamp(0,6)"])
def test_activation_by_name(activation):
    x = accumulator()
    expected = evaluate(Epilogue.parse(f"+{activation}"), x, {})
    assert torch.equal(activate(activation, x), expected)


@pytest.mark.parametrize("text", [*EPILOGUES, *(f"+{op}" for op in BASIC if OPS[op].values == 1), "+elu(2)"])
def test_gradients_reach_accumulator_and_operands(text):
    """First derivatives against finite differences, away from the kinks."""
    epilogue = Epilogue.parse(text)
    x = accumulator()[:1, :, :2, :2] + 0.03125
    shapes = {"channel": (3,), "tensor": x.shape, "scalar": ()}
    names = [operand.name for operand in epilogue.operands]
    values = [torch.randn(shapes[operand.kind], dtype=torch.float64) for operand in epilogue.operands]
    inputs = [value.clone().requires_grad_() for value in (x, *values)]

    def function(x, *values):
        return evaluate(epilogue, x, dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(function, inputs)


def test_a_finisher_is_the_evaluator_of_a_chain_without_operands():
    x = torch.tensor([-9.0, -1.0, -0.0, 0.5, 3.0, 7.0, math.inf, -math.inf, math.nan]).view(1, 9, 1)
    texts = ("relu", "clamp(0,6)", "clamp(-1,inf)", "clamp(-inf,2)", "clamp", "leaky_relu(0.2)", "elu(0.5)", "sigmoid",
             "tanh", "silu", "hardswish", "relu+tanh+clamp(0.1,0.2)")  # fmt: skip
    for text in texts:
        epilogue = Epilogue.parse(f"+{text}")
        finish, y = finisher_(epilogue), x.clone()
        assert finish is not None
        got = finish(y)
        assert got.data_ptr() == y.data_ptr()
        torch.testing.assert_close(got, evaluate(epilogue, x, {}), rtol=0, atol=0, equal_nan=True)
    for text in ("", "+bias+relu", "+relu+residual", "+gelu", "+=mul(acc,sigmoid(acc))"):
        assert finisher_(Epilogue.parse(text)) is None


def test_evaluate_leaves_the_accumulator_alone():
    for text in EPILOGUES:
        epilogue, x = Epilogue.parse(text), accumulator()
        kept = x.clone()
        evaluate(epilogue, x, operands_of(epilogue))
        assert torch.equal(x, kept)


# -- the bias that an engine may add -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, name, rest",
    [
        ("", None, ""),
        ("+bias", "bias", ""),
        ("+bias+relu", "bias", "+relu"),
        ("+add(c.shift)+mul(c.bias)", "shift", "+mul(c.bias)"),
        ("+bias+add(c.other)", "bias", "+add(c.other)"),
        ("+relu+bias", None, "+relu+bias"),
        ("+scale+bias", None, "+scale+bias"),
        ("+residual+bias", None, "+residual+bias"),
        ("+add(s.bias)", None, "+add(s.bias)"),
        ("+sub(c.bias)", None, "+sub(c.bias)"),
        ("+=mul(acc,sigmoid(acc))", None, "+=mul(acc,sigmoid(acc))"),
        ("+=mul(add(acc,c.bias),add(acc,c.bias))", None, "+=mul(add(acc,c.bias),add(acc,c.bias))"),
        ("+=sub(1,add(acc,c.bias))", "bias", "+=sub(1,acc)"),
        ("+bias+mul(c.bias)", "bias", "+mul(c.bias)"),
    ],
)
def test_only_the_bias_is_taken(text, name, rest):
    found = Finish.of(Epilogue.parse(text), only_bias=True)
    assert (found.bias, found.rest) == (name, Epilogue.parse(rest))
    assert found.epilogue == (Epilogue().bias(name) if name else Epilogue())


@pytest.mark.parametrize(
    "text, taken, rest",
    [
        ("+bias+residual+relu", "+bias+residual+relu", ""),
        ("+residual+clamp(-1,6)", "+residual+clamp(-1,6)", ""),
        ("+relu", "+relu", ""),
        ("+bias+relu+tanh", "+bias+relu", "+tanh"),
        ("+relu+residual", "+relu", "+residual"),  # a limit ends it
        ("+residual+bias+relu", "+residual", "+bias+relu"),  # the bias is what sums begin with
        ("+residual+add(t.other)", "+residual", "+add(t.other)"),
        ("+bias+add(c.other)+relu", "+bias", "+add(c.other)+relu"),
        ("+scale+relu", "", "+scale+relu"),
        ("+=sub(1,add(acc,c.bias))", "+bias", "+=sub(1,acc)"),
        ("+=sub(1,relu(acc))", "", "+=sub(1,relu(acc))"),
        ("+=mul(acc,sigmoid(acc))", "", "+=mul(acc,sigmoid(acc))"),
        ("+bias+keep+relu", "", "+bias+keep+relu"),
    ],
)
def test_what_is_done_as_sums_are_stored(text, taken, rest):
    found = Finish.of(Epilogue.parse(text))
    assert (str(found.epilogue), str(found.rest)) == (taken, rest)
    names = [o.name for o in found.epilogue.operands]
    assert [name for name in (found.bias, found.residual) if name] == names


@given(epilogues(SMALL))
def test_what_is_taken_and_the_rest_are_the_whole(epilogue):
    assume(any(isinstance(node, Acc) for node in epilogue.expr.walk()))
    found = Finish.of(epilogue)
    x, operands = accumulator(), operands_of(epilogue)
    total = x if found.bias is None else x + operands[found.bias][:, None, None]
    total = total if found.residual is None else total + operands[found.residual]
    if found.clamps:
        total = total.clamp(found.low, found.high)
    got, wanted = evaluate(found.rest, total, operands), evaluate(epilogue, x, operands)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
