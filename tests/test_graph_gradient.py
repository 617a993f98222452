"""Gradients of graphs: against finite differences, against torch, and as few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

import openconv
from openconv.tree import MODES

X, W = (2, 4, 6, 6), (6, 4, 3, 3)


def draw(*shape: int, positive: bool = False, seed: int = 0) -> torch.Tensor:
    """Away from the kinks of activations and from equal values."""
    torch.manual_seed(seed + sum(shape))
    value = torch.rand(shape, dtype=torch.float64) + 0.5 if positive else torch.randn(shape, dtype=torch.float64)
    return torch.where(value.abs() < 0.05, value + 0.2, value).requires_grad_()


def build(make: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> openconv.Graph:
    with openconv.Graph(**options) as graph:
        make(graph, *inputs)
    return graph


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "bias and relu behind a convolution": (
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=1, stride=2), b)), [X, W, (6,)]),
    "two convolutions and a residual": (
        lambda g, x, w, b, v, r: g.relu(g.add(g.conv_fprop(
            g.relu(g.bias(g.conv_fprop(x, w, padding=1), b)), v, padding=[(0, 1), (1, 0)]), r)),
        [X, W, (6,), (5, 6, 2, 2), (2, 5, 6, 6)]),
    "conv_dgrad": (
        lambda g, w, dy: g.conv_dgrad(w, dy, stride=2, padding=1, output_size=(12, 11)), [(6, 4, 4, 4), (2, 6, 6, 5)]),
    "conv_wgrad": (lambda g, x, dy: g.conv_wgrad(x, dy, padding=1), [X, (2, 3, 6, 6)]),
    "groups": (lambda g, x, w: g.gelu(g.conv_fprop(x, w, padding=1, groups=2)), [X, (6, 2, 3, 3)]),
    "one axis": (lambda g, x, w: g.conv_fprop(x, w, stride=2, dilation=2), [(2, 3, 11), (4, 3, 3)]),
    "three axes": (lambda g, x, w: g.conv_fprop(x, w, padding=1), [(1, 2, 3, 4, 3), (2, 2, 3, 3, 3)]),
    "batchnorm behind a convolution": (
        lambda g, x, w, s, b: g.relu(g.batchnorm(g.conv_fprop(x, w, padding=1), s, b).y).set_output(),
        [X, W, (6,), (6,)]),
    "batchnorm": (lambda g, x, s, b: g.tanh(g.batchnorm(x, s, b).y).set_output(), [X, (4,), (1, 4, 1, 1)]),
    "batchnorm_inference": (
        lambda g, x, *v: g.sigmoid(g.batchnorm_inference(x, *v)), [X, (4,), (4,), (4,), (4,)]),
    "genstats": (lambda g, x: [t.set_output() for t in g.genstats(g.tanh(x))], [X]),
    "matmul": (lambda g, a, b, c: g.silu(g.add(g.matmul(a, b), c)), [(3, 4, 5), (5, 6), (6,)]),
    "matmul in batches": (lambda g, a, b: g.matmul(a, b), [(3, 4, 5), (3, 5, 6)]),
    "slices and their join": (
        lambda g, x: g.concatenate([
            g.slice(x, (0, 1, 0, 0), (2, 3, 6, 6), (1, 1, 2, 1)), g.slice(x, (0, 0, 0, 0), (2, 4, 3, 6))], 1), [X]),
    "transpose and reshape": (lambda g, x: g.reshape(g.transpose(x, (0, 2, 3, 1)), (-1, 4)), [X]),
    "pooling": (lambda g, x: g.max_pool(g.avg_pool(x, 2, 1), 2, 1, 1), [X]),
    "a value that is used twice": (lambda g, x: g.mul(g.exp(x), g.add(x, g.exp(x))), [(3, 4)]),
    "broadcasts": (lambda g, a, b, c: g.add(g.mul(a, b), c), [(2, 3, 4), (3, 1), (4,)]),
    "two outputs": (lambda g, a, b: [g.mul(a, b).set_output(), g.sin(a).set_output()], [(3, 4), (3, 4)]),
    "an input without a part": (lambda g, a, b: g.add(g.mul(b, 0.0), a), [(3,), (3,)]),
}  # fmt: skip
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal", "pow", "div", "mod")
POINTWISE = [
    "add", "sub", "mul", "div", "max", "min", "mod", "pow", "atan2", "add_square", "neg", "abs", "exp", "log", "sqrt",
    "rsqrt", "reciprocal", "sin", "cos", "tan", "erf", "relu", "leaky_relu", "elu", "sigmoid", "tanh", "silu", "swish",
    "hardswish", "gelu", "gelu_tanh", "softplus", "relu_backward", "leaky_relu_backward",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{}, {"fuse": False, "rewrites": ()}], ids=["fused", "unfused"])
def test_gradients_are_those_of_finite_differences(case, options):
    make, shapes = CASES[case]
    inputs = [draw(*shape, positive=case == "batchnorm_inference", seed=at) for at, shape in enumerate(shapes)]
    assert gradcheck(build(make, inputs, **options), inputs)


@pytest.mark.parametrize("op", POINTWISE)
def test_gradients_of_pointwise_operations(op):
    from openconv.epilogue import OPS

    inputs = [draw(3, 4, positive=op in POSITIVE, seed=at) for at in range(OPS[op].values)]
    if op == "mod":
        inputs[0] = (inputs[0] * 3).detach().requires_grad_()
    assert gradcheck(build(lambda g, *v: g.pointwise(op, *v), inputs), inputs)


@pytest.mark.parametrize("low, high", [(-0.5, 0.7), (0.0, 6.0)])
def test_gradients_of_clamps_and_selections(low, high):
    inputs = [draw(3, 4, seed=at) for at in range(2)]
    assert gradcheck(build(lambda g, a, b: g.select(g.cmp_gt(a, b), g.clamp(a, low, high), b), inputs), inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keepdims", [True, False])
def test_gradients_of_reductions(mode, keepdims):
    inputs = [draw(2, 3, 4, positive=True)]
    assert gradcheck(build(lambda g, x: g.reduction(x, mode, (0, 2), keepdims), inputs), inputs)


def test_equal_maxima_share_a_gradient_as_in_torch():
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    build(lambda g, x: g.reduction(x, "max", 1), [x])(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.amax(1).sum(), x)[0])


def test_the_gradient_as_a_graph():
    """What it needs is named: inputs, the output, and the gradient that comes back."""
    x, w, b = draw(*X), draw(*W), draw(6)
    graph = build(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=1, name="conv"), b), name="y"), [x, w, b])
    backward = graph.backward()
    assert {t.name for t in backward.inputs} == {"input_0", "input_1", "y", "d_y"}
    assert [t.name for t in backward.outputs] == ["d_input_0", "d_input_1", "d_input_2"]
    y = F.relu(F.conv2d(x, w, b, padding=1))
    dy = torch.randn_like(y)
    found = backward({"input_0": x.detach(), "input_1": w.detach(), "y": y.detach(), "d_y": dy})
    for got, wanted in zip(found, torch.autograd.grad(y, (x, w, b), dy), strict=True):
        torch.testing.assert_close(got, wanted)


def test_a_slope_is_an_epilogue_and_a_bias_a_reduction_beside_it():
    def kernels(make: Callable[..., Any], shapes: list[tuple[int, ...]]) -> list[Any]:
        graph = openconv.Graph()
        strides = [(s[1] * s[2] * s[3], 1, s[1] * s[3], s[1]) if len(s) == 4 else None for s in shapes]
        with graph:
            make(graph, *(graph.input(shape=s, dtype="f16", strides=t) for s, t in zip(shapes, strides, strict=True)))
        return [k for k in graph.backward().program("cuda").kernels if k.kind != "view"]

    image, filters = (64, 64, 56, 56), (64, 64, 3, 3)
    found = kernels(
        lambda g, x, w, v: g.conv_fprop(g.relu(g.conv_fprop(x, w, padding=1)), v, padding=1), [image, filters, filters]
    )
    assert ["relu_backward" in str(k.problem.epilogue) for k in found if k.problem is not None].count(True) == 1
    found = kernels(
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=1), b)), [image, filters, (64,)]
    )  # fmt: skip
    assert len(found) == 3, "the slope and the sum for the bias in one, then dgrad and wgrad"


def test_some_gradients_only():
    x, w = draw(*X), draw(*W).detach()
    graph = build(lambda g, x, w: g.conv_fprop(x, w), [x, w])
    graph(x, w).sum().backward()
    assert x.grad is not None
    assert [t.name for t in graph.backward(["input_1"]).outputs] == ["d_input_1"]
    with pytest.raises(ValueError, match=r"wrt has 'other'; wanted inputs of graph"):
        graph.backward(["other"])


def test_what_has_no_gradient_is_named():
    x = draw(3, 4)
    graph = build(lambda g, x: g.gelu_backward(x, x, name="slope"), [x])
    with pytest.raises(NotImplementedError, match="slope: gelu_backward has no gradient here"):
        graph.backward()
    integers = torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="'input_0', which is i32"):
        build(lambda g, x: g.add(x, x), [integers]).backward(["input_0"])


def test_other_batches_have_gradients_too():
    x, w, b = draw(*X), draw(*W), draw(6)
    graph = build(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w), b)), [x, w, b])
    for n in (1, 3):
        other = draw(n, *X[1:], seed=n)
        assert gradcheck(graph, [other, w, b])
