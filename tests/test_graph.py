"""Graphs on the CPU: every kind of node against torch, what is refused, calls, plans, fusion, rewrites."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import openconv
from openconv import Graph
from openconv.epilogue import OPS
from openconv.evaluate import _FUNCTIONS
from openconv.graph import REWRITES, GraphTensor
from openconv.graph.operations import VIEWS
from openconv.tensors import ALL_DTYPES
from openconv.tree import MODES

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def rand(*shape: int, dtype: torch.dtype = torch.float64, layout: str = "nchw") -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64).to(dtype)
    return made.to(memory_format=FORMATS[layout]) if len(shape) == 4 else made


def close(got: Tensor, want: Tensor, *given: Tensor) -> None:
    """What comes of values ``given`` is no more exact than they are."""
    assert tuple(got.shape) == tuple(want.shape)
    limit = max(TOLERANCES.get(each.dtype, 0.0) for each in (got, *given))
    torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit, equal_nan=True)


def build(make: Callable[..., Any], *tensors: Tensor, **options: Any) -> Graph:
    """A graph of ``make(graph, *inputs)``; what it gives are the outputs."""
    with Graph(**options) as graph:
        made = make(graph, *(graph.input(tensor, name=f"x{at}") for at, tensor in enumerate(tensors)))
        for each in made if isinstance(made, tuple | list) else [made]:
            each.set_output()
    return graph


def check(make: Callable[..., Any], want: Callable[..., Any], *tensors: Tensor) -> Graph:
    """The graph's results are torch's, computed in f64: fused, and node by node."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    expected = want(*wide)
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    found = None
    for options in ({}, {"fuse": False, "rewrites": ()}):
        graph = build(make, *tensors, **options)
        made = graph(*_ordered(graph, tensors))
        results = made if isinstance(made, tuple) else (made,)
        assert len(results) == len(expected)
        for tensor, a, b in zip(graph.outputs, results, expected, strict=True):
            assert tuple(a.shape) == tensor.shape
            assert a.dtype is ALL_DTYPES[tensor.dtype]
            assert a.stride() == tensor.strides
            close(a, b, *tensors)
        found = found or graph
    assert found is not None
    return found


def _ordered(graph: Graph, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensors[int(tensor.name[1:])] for tensor in graph.inputs]


def kernels(graph: Graph) -> list[Any]:
    """The kernels of a graph; views are none."""
    return [kernel for kernel in graph.program().kernels if kernel.kind != "view"]


# -- convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_fprop(dtype, layout):
    x, w = rand(2, 6, 9, 8, dtype=dtype, layout=layout), rand(4, 6, 3, 3, dtype=dtype, layout=layout)
    graph = check(
        lambda g, x, w: g.conv_fprop(x, w, padding=1, stride=2), lambda x, w: F.conv2d(x, w, None, 2, 1), x, w
    )
    assert graph(x, w).is_contiguous(memory_format=FORMATS[layout])


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 4, 11), (6, 4, 3), {"padding": 1, "stride": 2}),
    "2d": ((2, 4, 9, 8), (6, 4, 3, 2), {"padding": (1, 0), "stride": (2, 1), "dilation": (1, 2)}),
    "3d": ((1, 2, 5, 6, 4), (3, 2, 2, 3, 3), {"padding": (0, 1, 1), "stride": (1, 2, 1)}),
    "groups": ((2, 6, 7, 7), (9, 2, 3, 3), {"padding": 1, "groups": 3}),
    "depthwise": ((2, 6, 7, 7), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    "asymmetric": ((1, 3, 6, 7), (4, 3, 3, 3), {"padding": ((0, 2), (3, 1))}),
    "1x1": ((2, 5, 4, 6), (7, 5, 1, 1), {}),
}


def _pads(geometry: dict[str, Any], rank: int) -> list[tuple[int, int]]:
    padding = geometry.get("padding", 0)
    per_axis = list(padding) if isinstance(padding, tuple) else [padding] * rank
    return [pair if isinstance(pair, tuple) else (pair, pair) for pair in per_axis]


def _conv(x: Tensor, w: Tensor, geometry: dict[str, Any]) -> Tensor:
    rank = x.dim() - 2
    flat = [end for low, high in reversed(_pads(geometry, rank)) for end in (low, high)]
    more = {name: geometry[name] for name in ("stride", "dilation", "groups") if name in geometry}
    return getattr(F, f"conv{rank}d")(F.pad(x, flat), w, **more)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_three_passes(name):
    shape, taps, geometry = GEOMETRIES[name]
    x, w = rand(*shape).requires_grad_(), rand(*taps).requires_grad_()
    y = _conv(x, w, geometry)
    loss = rand(*y.shape)
    dx, dw = torch.autograd.grad(y, (x, w), loss)
    x, w = x.detach(), w.detach()
    check(lambda g, x, w: g.conv_fprop(x, w, **geometry), lambda x, w: y.detach(), x, w)
    check(
        lambda g, w, loss: g.conv_dgrad(w, loss, output_size=shape[2:], **geometry), lambda w, loss: dx, w, loss
    )  # fmt: skip
    check(lambda g, x, loss: g.conv_wgrad(x, loss, filter_size=taps[2:], **geometry), lambda x, loss: dw, x, loss)


def test_dgrad_takes_the_smallest_size_unless_told():
    w, loss = rand(4, 3, 3, 3), rand(1, 4, 4, 4)
    graph = build(lambda g, w, y: g.conv_dgrad(w, y, stride=2), w, loss)
    assert graph.outputs[0].shape == (1, 3, 9, 9)
    close(graph(w, loss), F.conv_transpose2d(loss, w, stride=2))
    graph = build(lambda g, w, y: g.conv_dgrad(w, y, stride=2, output_size=(10, 9)), w, loss)
    close(graph(w, loss), F.conv_transpose2d(loss, w, stride=2, output_padding=(1, 0)))


def test_wgrad_finds_the_only_filter():
    x, loss = rand(2, 3, 8, 8), rand(2, 4, 6, 5)
    assert build(lambda g, x, y: g.conv_wgrad(x, y), x, loss).outputs[0].shape == (4, 3, 3, 4)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "a, b", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((2, 3, 4), (2, 4, 1)), ((0, 4), (4, 5))]
)
def test_matmul(a, b, dtype):
    check(lambda g, a, b: g.matmul(a, b), torch.matmul, rand(*a, dtype=dtype), rand(*b, dtype=dtype))
    check(
        lambda g, a, b: g.relu(g.matmul(a, b)),
        lambda a, b: (a @ b).relu(),
        rand(*a, dtype=dtype),
        rand(*b, dtype=dtype),
    )


# -- pointwise --------------------------------------------------------------------------------------------------------


def _operands(op: str) -> list[Tensor]:
    """Values at which the operation has a result."""
    tensors = [rand(3, 1, 5), rand(4, 1), rand(3, 4, 5)][: OPS[op].values]
    if op in ("log", "sqrt", "rsqrt", "pow"):
        tensors[0] = tensors[0].abs() + 0.1
    if op in ("logical_and", "logical_or", "logical_not", "select"):
        tensors[0] = (tensors[0] > 0).double()
    return tensors


@pytest.mark.parametrize("op", OPS)
def test_every_pointwise_operation(op):
    tensors, params = _operands(op), [0.4 + 0.5 * at for at in range(len(OPS[op].params))]

    def want(*values: Tensor) -> Tensor:
        spread = torch.broadcast_tensors(*values)
        made = _FUNCTIONS[op](*spread, *params)
        return made != 0 if op.startswith(("cmp_", "logical_")) else made

    def pointwise(g: Graph, *values: GraphTensor) -> GraphTensor:
        return g.pointwise(op, *values, params=params)

    check(pointwise, want, *tensors)
    method = getattr(Graph, op)
    check(lambda g, *values: method(g, *values, *params), want, *tensors)


def test_numbers_and_operators():
    x, y = rand(2, 3), rand(2, 3)
    check(
        lambda g, x, y: (1 - x) * 2 / (y * y + 3.5) + -x - 4 / (2 + y * y) + (x - 1) / 2,
        lambda x, y: (1 - x) * 2 / (y * y + 3.5) + -x - 4 / (2 + y * y) + (x - 1) / 2,
        x, y,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_broadcasting_and_layouts(layout):
    x, v = rand(2, 3, 4, 5, layout=layout), rand(1, 3, 1, 1)
    check(lambda g, x, v: g.relu(g.add(g.mul(x, v), 1.0)), lambda x, v: (x * v + 1).relu(), x, v)
    check(lambda g, x, v: g.add(v, x), lambda x, v: v + x, x, v)


def test_dtypes_are_mixed_as_in_torch():
    half, single, whole = rand(2, 3, dtype=torch.float16), rand(2, 3, dtype=torch.float32), torch.arange(6).view(2, 3)
    graph = build(
        lambda g, a, b, i: (g.add(a, b), g.mul(i, 2), g.mul(i, 0.5), g.cmp_gt(a, 0), g.add(i, a)), half, single, whole
    )
    assert [tensor.dtype for tensor in graph.outputs] == ["f32", "i64", "f32", "bool", "f16"]
    made = graph(*_ordered(graph, (half, single, whole)))
    want = (half + single, whole * 2, whole * 0.5, half > 0, whole + half)
    for a, b in zip(made, want, strict=True):
        assert a.dtype == b.dtype
        close(a, b)


@pytest.mark.parametrize("source", ["f64", "f32", "f16", "i32", "i8", "bool"])
@pytest.mark.parametrize("target", ["f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8", "bool"])
def test_casts(source, target):
    value = torch.tensor([0.0, 1.0, 2.75, 100.5] + ([] if target == "u8" else [-1.0, -2.75])).to(ALL_DTYPES[source])
    graph = build(lambda g, x: g.cast(x, target), value)
    got = graph(value)
    assert torch.equal(got, value.to(ALL_DTYPES[target]))
    graph = build(lambda g, x: g.mul(g.cast(x, target), 1), value)  # not by itself
    assert torch.equal(graph(value), value.to(ALL_DTYPES[target]) * 1)


def test_gen_index_and_identity():
    x = rand(2, 3, 4, 5)
    graph = build(lambda g, x: (g.gen_index(x, 2), g.identity(x), g.add(g.gen_index(x, 3), x)), x)
    index, same, added = graph(x)
    assert torch.equal(index, torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1).expand(2, 3, 4, 5))
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr()
    close(added, x + torch.arange(5))


def test_what_is_computed_between_is_not_rounded_but_what_is_stored_is():
    x = rand(64, dtype=torch.float16)
    graph = build(lambda g, x: g.mul(g.relu(x), 1.5).set_dtype("f32"), x)
    assert graph(x).dtype == torch.float32
    assert torch.equal(graph(x), x.float().relu() * 1.5)


# -- channels, normalisation, reductions ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 3, 5), (2, 4, 2, 3, 2)])
@pytest.mark.parametrize("vectors", ["flat", "shaped"])
def test_bias_scale_and_batchnorm_inference(shape, vectors):
    x = rand(*shape)
    four = [rand(4) for _ in range(4)]
    spread = (1, 4, *(1,) * (len(shape) - 2))
    given = four if vectors == "flat" else [v.view(spread) for v in four]
    check(lambda g, x, b: g.bias(x, b), lambda x, b: x + b.view(spread), x, given[0])
    check(lambda g, x, b: g.scale(x, b), lambda x, b: x * b.view(spread), x, given[0])

    def want(x: Tensor, *vectors: Tensor) -> Tensor:
        scale, bias, mean, inverse = (v.view(spread) for v in vectors)
        return (x - mean) * inverse * scale + bias

    check(lambda g, x, *v: g.batchnorm_inference(x, *v), want, x, *given)


@pytest.mark.parametrize("behind", ["input", "conv"])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_batchnorm_in_training(behind, dtype):
    x, w = rand(4, 4, 6, 5, dtype=dtype), rand(4, 4, 3, 3, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale, bias, mean = (rand(4, dtype=wide) for _ in range(3))
    variance = rand(4, dtype=wide).abs()

    def make(g: Graph, x: GraphTensor, w: GraphTensor, *vectors: GraphTensor) -> list[GraphTensor]:
        image = g.conv_fprop(x, w, padding=1) if behind == "conv" else x
        scale, bias, mean, variance = vectors
        made = g.batchnorm(image, scale, bias, mean, variance, epsilon=1e-3, momentum=0.3)
        return [made.y, made.mean, made.inv_variance, made.running_mean, made.running_variance]  # type: ignore[list-item]

    def want(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
        image = F.conv2d(x, w, padding=1) if behind == "conv" else x
        next_mean, next_variance = mean.clone(), variance.clone()
        y = F.batch_norm(image, next_mean, next_variance, scale, bias, True, 0.3, 1e-3)
        axes = (0, 2, 3)
        inverse = (image.var(axes, unbiased=False) + 1e-3).rsqrt()
        return [y, image.mean(axes), inverse, next_mean, next_variance]

    check(make, want, x, w, scale, bias, mean, variance)


def test_batchnorm_far_from_zero_keeps_its_digits():
    x = rand(4, 3, 8, 8, dtype=torch.float32) + 1000
    graph = build(lambda g, x, s, b: g.batchnorm(x, s, b).y, x, torch.ones(3), torch.zeros(3))
    want = F.batch_norm(x.double(), None, None, training=True)
    assert (graph(x, torch.ones(3), torch.zeros(3)).double() - want).abs().max() < 2e-3


def test_batchnorm_backward():
    x, scale, bias, loss = (
        rand(4, 3, 5, 6).requires_grad_(),
        rand(3).requires_grad_(),
        rand(3).requires_grad_(),
        rand(4, 3, 5, 6),
    )
    y = F.batch_norm(x, None, None, scale, bias, True)
    want = torch.autograd.grad(y, (x, scale, bias), loss)
    x, scale = x.detach(), scale.detach()
    mean, inverse = x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()
    check(lambda g, *v: list(g.batchnorm_backward(*v)), lambda *v: list(want), loss, x, scale, mean, inverse)


def test_genstats():
    x = rand(3, 4, 5, 6, dtype=torch.float16)
    graph = build(lambda g, x: list(g.genstats(x)), x)
    assert [tensor.dtype for tensor in graph.outputs] == ["f32", "f32"]
    for got, want in zip(graph(x), (x.float(), x.float().square()), strict=True):
        torch.testing.assert_close(got, want.sum((0, 2, 3), keepdim=True), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", [None, 1, (0, 2), (-1,)])
@pytest.mark.parametrize("keepdims", [True, False])
def test_reductions(mode, axes, keepdims):
    x = rand(3, 4, 5)
    x[1, 2, 3] = 0.0

    def want(x: Tensor) -> Tensor:
        over = tuple(range(3)) if axes is None else (axes,) if isinstance(axes, int) else axes
        over = tuple(axis % 3 for axis in over)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "add": lambda v: v.sum(over, True), "avg": lambda v: v.mean(over, True),
            "min": lambda v: v.amin(over, True), "max": lambda v: v.amax(over, True),
            "amax": lambda v: v.abs().amax(over, True),
            "norm1": lambda v: v.abs().sum(over, True), "norm2": lambda v: v.square().sum(over, True).sqrt(),
        }  # fmt: skip
        if mode in functions:
            made = functions[mode](x)
        else:
            made = torch.where(x == 0, 1.0, x) if mode == "mul_no_zeros" else x
            for axis in over:
                made = made.prod(axis, keepdim=True)
        return made if keepdims else made.squeeze(over)

    check(lambda g, x: g.reduction(x, mode, axes, keepdims), want, x)
    check(lambda g, x: g.reduction(g.relu(x), mode, axes, keepdims), lambda x: want(x.relu()), x)


# -- pooling and moving about -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_pooling(dtype, layout):
    x = rand(2, 3, 9, 8, dtype=dtype, layout=layout)
    check(lambda g, x: g.max_pool(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), x)
    check(lambda g, x: g.avg_pool(x, (2, 3)), lambda x: F.avg_pool2d(x, (2, 3)), x)
    check(lambda g, x: g.avg_pool(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1), x)
    check(lambda g, x: g.avg_pool(x, 3, 2, 1, count_padding=False), lambda x: F.avg_pool2d(x, 3, 2, 1, False, False), x)
    check(
        lambda g, x: g.resample(x, "max", 2, 2, ((1, 0), (0, 1))),
        lambda x: F.max_pool2d(F.pad(x, (0, 1, 1, 0), value=-torch.inf), 2), x,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 3, 8, 7), (1, 2, 4, 5, 6)])
@pytest.mark.parametrize("mode", ["max", "avg", "avg_exclude"])
def test_pooling_backward(shape, mode):
    rank = len(shape) - 2
    x = rand(*shape).requires_grad_()
    if mode == "max":
        y = getattr(F, f"max_pool{rank}d")(x, 3, 2, 1)
    else:
        y = getattr(F, f"avg_pool{rank}d")(x, 3, 2, 1, False, mode == "avg")
    loss = rand(*y.shape)
    (want,) = torch.autograd.grad(y, x, loss)
    check(lambda g, d, x: g.resample_backward(d, x, mode, 3, 2, 1), lambda d, x: want, loss, x.detach())
    check(lambda g, x: g.resample(x, mode, 3, 2, 1), lambda x: y.detach(), x.detach())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_moving_about(layout):
    x = rand(2, 3, 4, 6, layout=layout)
    moves: list[tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = [
        (lambda g, x: g.reshape(x, (0, -1)), lambda x: x.reshape(2, -1)),
        (lambda g, x: g.reshape(x, (6, 4, 6)), lambda x: x.reshape(6, 4, 6)),
        (lambda g, x: g.transpose(x, (3, 0, 2, 1)), lambda x: x.permute(3, 0, 2, 1)),
        (lambda g, x: g.slice(x, (0, 1, 0, 1), (2, None, 4, 6), (1, 1, 2, 3)), lambda x: x[:, 1:, ::2, 1::3]),
        (lambda g, x: g.concatenate([x, x, g.neg(x)], 1), lambda x: torch.cat([x, x, -x], 1)),
        (lambda g, x: g.transpose(g.transpose(x, (0, 2, 3, 1)), (0, 3, 1, 2)), lambda x: x),
    ]  # fmt: skip
    for make, want in moves:
        graph = build(make, x)
        got = graph(x)
        assert torch.equal(got, want(x))
        assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        check(lambda g, x, make=make: g.relu(make(g, x)), lambda x, want=want: want(x).relu(), x)


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any, GraphTensor], Any], type[Exception], str]] = {
    "channels": (
        lambda g, x: g.conv_fprop(x, rand(8, 4, 3, 3), name="stem"), RuntimeError,
        r"stem: image \(2, 3, 8, 8\) has 3 channels, and weight \(8, 4, 3, 3\) takes 4 in 1 group\(s\); wanted 4",
    ),
    "axes": (lambda g, x: g.conv_fprop(x, rand(8, 3, 3)), RuntimeError, "conv_fprop: image is .* and weight"),
    "too few axes": (lambda g, x: g.conv_fprop(rand(3, 3), rand(3, 3)), RuntimeError, "image has shape .*3 to 5"),
    "conv dtypes": (
        lambda g, x: g.conv_fprop(x, rand(8, 3, 3, 3, dtype=torch.float16)), RuntimeError,
        "conv_fprop: image is f64 and weight f16; wanted one dtype: cast one of them",
    ),
    "stride": (lambda g, x: g.conv_fprop(x, rand(8, 3, 3, 3), stride=0), RuntimeError, "conv_fprop: stride is 0"),
    "strides": (
        lambda g, x: g.conv_fprop(x, rand(8, 3, 3, 3), stride=(1, 2, 3)), RuntimeError,
        "stride has 3 values; wanted one or 2",
    ),
    "padding": (lambda g, x: g.conv_fprop(x, rand(8, 3, 3, 3), padding=-1), RuntimeError, "conv_fprop: padding is -1"),
    "groups": (lambda g, x: g.conv_fprop(x, rand(8, 1, 3, 3), groups=3), RuntimeError, "conv_fprop: .*groups"),
    "filter": (lambda g, x: g.conv_fprop(x, rand(8, 3, 9, 9)), RuntimeError, "conv_fprop: "),
    "number": (lambda g, x: g.conv_fprop(x, 3.0), TypeError, "conv_fprop: weight is 3.0; wanted a tensor"),
    "dgrad channels": (lambda g, x: g.conv_dgrad(rand(4, 3, 3, 3), x), RuntimeError, "conv_dgrad: loss .* wanted 4"),
    "output_size": (
        lambda g, x: g.conv_dgrad(rand(3, 3, 3, 3), x, stride=2, output_size=(19, 17)), RuntimeError,
        r"conv_dgrad: output_size is \(19, 17\); a loss of \(8, 8\) comes from 17 to 18 on axis 0",
    ),
    "filter_size": (
        lambda g, x: g.conv_wgrad(x, rand(2, 4, 4, 4), stride=2), RuntimeError,
        "conv_wgrad: image .* with any of .*give filter_size",
    ),
    "wrong filter_size": (
        lambda g, x: g.conv_wgrad(x, rand(2, 4, 4, 4), filter_size=3), RuntimeError, "conv_wgrad: filter_size is 3",
    ),
    "no filter": (lambda g, x: g.conv_wgrad(x, rand(2, 4, 9, 9)), RuntimeError, "conv_wgrad: .*with no filter"),
    "wgrad batch": (lambda g, x: g.conv_wgrad(x, rand(3, 4, 6, 6)), RuntimeError, "conv_wgrad: .*wanted one batch"),
    "matmul": (lambda g, x: g.matmul(x, rand(7, 2)), RuntimeError, r"matmul: a is .* and b \(7, 2\)"),
    "matmul axes": (lambda g, x: g.matmul(x, rand(8)), RuntimeError, "matmul: .*wanted two axes or more"),
    "matmul dtypes": (
        lambda g, x: g.matmul(x, rand(8, 2, dtype=torch.float32)), RuntimeError, "matmul: a is f64 and b f32",
    ),
    "broadcast": (
        lambda g, x: g.add(x, rand(7), name="sum"), RuntimeError, r"sum: arguments have shapes \(2, 3, 8, 8\), \(7,\)",
    ),
    "a list": (lambda g, x: g.add(x, [1, 2]), TypeError, "add: an argument is of type list; wanted a tensor"),
    "a flag": (lambda g, x: g.add(x, True), TypeError, "add: an argument is of type bool"),
    "numbers alone": (lambda g, x: g.add(1, 2), TypeError, "add: all arguments are numbers"),
    "nan": (lambda g, x: g.add(x, float("nan")), ValueError, "add: argument 1 is nan"),
    "too many values": (lambda g, x: g.pointwise("relu", x, x), TypeError, r"relu was given 2 value\(s\); wanted 1"),
    "parameters": (lambda g, x: g.pointwise("relu", x, params=(1,)), RuntimeError, "relu was given parameters"),
    "operation": (lambda g, x: g.pointwise("fold", x), ValueError, "there is no operation 'fold'"),
    "cast": (lambda g, x: g.cast(x, "f8"), TypeError, "cast: dtype is 'f8'; wanted one of f64"),
    "index axis": (lambda g, x: g.gen_index(x, 4), RuntimeError, "gen_index: axis is 4; wanted 0 to 3"),
    "bias": (lambda g, x: g.bias(x, rand(4)), RuntimeError, r"bias: bias has shape \(4,\); wanted \(3,\)"),
    "batchnorm vector": (
        lambda g, x: g.batchnorm(x, rand(3), rand(4)), RuntimeError, r"batchnorm: bias has shape \(4,\); wanted \(3,\)",
    ),
    "one running value": (
        lambda g, x: g.batchnorm(x, rand(3), rand(3), rand(3)), TypeError, "batchnorm: one running value is given",
    ),
    "batchnorm of integers": (
        lambda g, x: g.batchnorm(g.cast(x, "i32"), rand(3), rand(3)), RuntimeError, "batchnorm: input is i32; wanted",
    ),
    "batchnorm of one": (
        lambda g, x: g.batchnorm(rand(1, 3), rand(3), rand(3)), RuntimeError, "wanted more than one value per channel",
    ),
    "inference vector": (
        lambda g, x: g.batchnorm_inference(x, rand(3), rand(3), rand(3), rand(2)), RuntimeError,
        r"batchnorm_inference: inv_variance has shape \(2,\)",
    ),
    "mode": (lambda g, x: g.reduction(x, "sum"), ValueError, "reduction: mode is 'sum'; wanted one of add"),
    "reduction axes": (lambda g, x: g.reduction(x, "add", (1, 1)), RuntimeError, r"reduction: axes are \(1, 1\)"),
    "window": (lambda g, x: g.max_pool(x, 0), RuntimeError, "resample: window is 0"),
    "pool padding": (lambda g, x: g.max_pool(x, 2, 2, 2), RuntimeError, "resample: padding on axis 0 is"),
    "pool mode": (lambda g, x: g.resample(x, "min", 2), RuntimeError, "resample: mode is 'min'"),
    "pool loss": (
        lambda g, x: g.resample_backward(x, x, "max", 2), RuntimeError, "resample_backward: loss has shape .*wanted",
    ),
    "reshape": (lambda g, x: g.reshape(x, (2, 5)), RuntimeError, r"reshape: shape is \(2, 5\); .* has 384 values"),
    "reshape twice -1": (lambda g, x: g.reshape(x, (-1, -1)), RuntimeError, "reshape: .*-1 once at most"),
    "permutation": (lambda g, x: g.transpose(x, (0, 1, 1, 2)), RuntimeError, "transpose: permutation is"),
    "slice": (
        lambda g, x: g.slice(x, (0, 2, 0, 0), (2, 4, 8, 8)), RuntimeError, "slice: axis 1 is cut from 2 to 4 in steps",
    ),
    "slice axes": (lambda g, x: g.slice(x, (0,), (2,)), RuntimeError, "slice: .*wanted 4 of each"),
    "concatenate": (
        lambda g, x: g.concatenate([x, rand(2, 3, 7, 8)], 1), RuntimeError, "concatenate: input 1 has shape",
    ),
    "concatenate axis": (lambda g, x: g.concatenate([x], 4), RuntimeError, "concatenate: axis is 4"),
    "nothing": (lambda g, x: g.concatenate([], 0), RuntimeError, "concatenate: there are no inputs"),
    "name": (lambda g, x: g.relu(x).set_name("x"), ValueError, "has a tensor 'x' already"),
    "empty name": (lambda g, x: g.relu(x).set_name(""), ValueError, "name of a tensor is ''"),
    "dtype behind use": (
        lambda g, x: (lambda y: (g.relu(y), y.set_dtype("f32")))(g.relu(x)), RuntimeError, "dtype was changed behind",
    ),
    "layout": (lambda g, x: g.relu(x).set_layout("chwn"), ValueError, "layout is 'chwn'; wanted nchw or nhwc"),
    "input": (lambda g, x: g.input(shape=(2,)), TypeError, "input None: shape is .* and dtype None; wanted both"),
    "input shape": (lambda g, x: g.input(shape=(-2,), dtype="f32"), ValueError, "wanted integers >= 0"),
    "input strides": (lambda g, x: g.input(shape=(2,), dtype="f32", strides=(1, 2)), ValueError, "one for each axis"),
    "complex": (
        lambda g, x: g.relu(torch.zeros(2, dtype=torch.complex64)), TypeError, "relu: input_0 is complex64",
    ),
    "dtypes that do not mix": (
        lambda g, x: g.add(x, g.cast(x, "e4m3")), RuntimeError, "add: arguments are f64, e4m3, which",
    ),
    "a dtype that is unknown": (
        lambda g, x: g.input(torch.zeros(2, dtype=torch.uint16)), TypeError, "a tensor is of torch.uint16; wanted",
    ),
    "constant": (lambda g, x: g.constant(3), TypeError, "constant None is of type int; wanted a Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_node_and_argument(name):
    make, kind, match = REFUSED[name]
    graph = Graph()
    x = graph.input(shape=(2, 3, 8, 8), dtype="f64", name="x")
    with pytest.raises(kind, match=match):
        make(graph, x)


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="rewrites has 'fast'; wanted some of fold_batchnorm"):
        Graph(rewrites=("fast",))


def test_graphs_are_closed_and_not_mixed():
    x = rand(2, 3)
    with Graph("first") as first:
        y = first.relu(x)
    with pytest.raises(RuntimeError, match="graph 'first' is closed"):
        first.relu(x)
    with pytest.raises(RuntimeError, match="graph 'first' is closed"):
        y + 1
    with pytest.raises(RuntimeError, match="graph 'first' is closed"):
        y.set_output()
    second = Graph("second")
    with pytest.raises(RuntimeError, match="relu: tensor 'relu' is of another graph; wanted one of 'second'"):
        second.relu(y)
    with pytest.raises(RuntimeError, match="graph 'second' has no nodes"):
        second()
    called = Graph("called")
    called.relu(x)
    called(x)
    with pytest.raises(RuntimeError, match="graph 'called' is closed"):
        called.relu(x)
    with pytest.raises(RuntimeError, match="is of another graph"):
        first({called.inputs[0]: x})


# -- calls ------------------------------------------------------------------------------------------------------------


def conv_graph(**options: Any) -> tuple[Graph, list[Tensor], Tensor]:
    """conv + bias + residual + relu, as x, w, b, r."""
    x, w, b, r = rand(2, 4, 7, 6), rand(5, 4, 3, 3), rand(5), rand(2, 5, 7, 6)
    with Graph(**options) as graph:
        names = [graph.input(value, name=name) for name, value in zip("xwbr", (x, w, b, r), strict=True)]
        y = graph.bias(graph.conv_fprop(names[0], names[1], padding=1), names[2])
        graph.relu(graph.add(y, names[3]), name="y")
    return graph, [x, w, b, r], (F.conv2d(x, w, b, padding=1) + r).relu()


def test_ways_to_call():
    graph, (x, w, b, r), want = conv_graph()
    assert [tensor.name for tensor in graph.inputs] == ["x", "w", "b", "r"]
    close(graph(x, w, b, r), want)
    first = graph(x, w, b, r)
    by_name = {"x": x, "w": w, "b": b, "r": r}
    assert torch.equal(graph(**by_name), first)
    assert torch.equal(graph(x, w, r=r, b=b), first)
    assert torch.equal(graph(by_name), first)
    assert torch.equal(graph(dict(zip(graph.inputs, (x, w, b, r), strict=True))), first)
    made = graph.execute({**by_name})
    assert list(made) == ["y"]
    assert torch.equal(made["y"], first)
    out = torch.full_like(first, torch.nan)
    made = graph.execute(by_name, {"y": out})
    assert made["y"] is out
    assert torch.equal(out, first)


def test_calls_that_are_refused():
    graph, (x, w, b, r), _ = conv_graph()
    with pytest.raises(TypeError, match="was not given r; wanted x, w, b, r"):
        graph(x, w, b)
    with pytest.raises(TypeError, match="was given 5 tensors; wanted 4"):
        graph(x, w, b, r, r)
    with pytest.raises(TypeError, match="was given 'x' twice"):
        graph(x, w, b, x=x)
    with pytest.raises(TypeError, match="has no input 'z'; wanted x, w, b, r"):
        graph(x, w, b, z=r)
    with pytest.raises(TypeError, match="input 'b' is of type float; wanted a Tensor"):
        graph(x, w, 1.0, r)
    with pytest.raises(RuntimeError, match=r"input 'x' is torch.float32; wanted torch.float64"):
        graph(x.float(), w, b, r)
    with pytest.raises(RuntimeError, match=r"input 'b' has shape \(5, 1\); wanted 1 axes"):
        graph(x, w, b[:, None], r)
    with pytest.raises(RuntimeError, match=r"conv_fprop: image \(2, 3, 7, 6\) has 3 channels"):
        graph(x[:, :3], w, b, r)
    with pytest.raises(RuntimeError, match=r"add(_1)?: arguments have shapes"):
        graph(x, w, b, r[:, :, 1:])
    with pytest.raises(RuntimeError, match="input 'w' is on meta and 'x' on cpu; wanted one device"):
        graph(x, w.to("meta"), b, r)
    with pytest.raises(RuntimeError, match="wanted a dense tensor"):
        graph(x, w, b.to_sparse(), r)


def test_out():
    graph, values, want = conv_graph()
    out = torch.full_like(want, torch.nan)
    assert graph(*values, out=out) is out
    close(out, want)
    turned = torch.full((6, 7, 5, 2), torch.nan, dtype=torch.float64).permute(3, 2, 1, 0)
    assert graph(*values, out=[turned]) is turned
    close(turned, want)
    part = torch.full((2, 9, 7, 6), torch.nan, dtype=torch.float64)
    graph(*values, out={"y": part[:, 2:7]})
    close(part[:, 2:7], want)
    assert part[:, :2].isnan().all()
    assert part[:, 7:].isnan().all()
    over = values[3].clone()
    graph(*values[:3], over, out=over)  # over an input
    close(over, want)
    with pytest.raises(RuntimeError, match=r"out: 'y' is given torch.float64 \(2, 5, 7, 5\)"):
        graph(*values, out=want[..., :5])
    with pytest.raises(RuntimeError, match=r"out: 'y' is given torch.float32"):
        graph(*values, out=want.float())
    with pytest.raises(TypeError, match="out has 2 entries; wanted a tensor or None for each of y"):
        graph(*values, out=[want, want])
    with pytest.raises(TypeError, match="out has z; wanted some of y"):
        graph(*values, out={"z": want})
    with pytest.raises(RuntimeError, match="out= was given and an input wants a gradient"):
        graph(values[0].clone().requires_grad_(), *values[1:], out=out)


def several() -> tuple[Graph, list[Tensor]]:
    """Two convolutions with statistics between them: values that live in the workspace."""
    x, w, v, scale = rand(2, 4, 8, 8), rand(4, 4, 3, 3), rand(4, 4, 3, 3), rand(4)
    with Graph() as graph:
        y = graph.conv_fprop(x, w, padding=1)
        norm = graph.batchnorm(y, scale, scale)
        z = graph.conv_fprop(graph.relu(norm.y), v, padding=1)
        graph.max_pool(z, 2).set_output()
        norm.mean.set_output()
        graph.reduction(graph.exp(z), "avg", (2, 3)).set_output()
    return graph, [x, w, scale, v]


def test_a_workspace_full_of_nan():
    for graph, values in (several(), conv_graph()[:2]):
        want = graph(*values)
        size = graph.workspace_bytes()
        room = torch.full((size // 8 + 8,), torch.nan, dtype=torch.float64)
        got = graph(*values, workspace=room)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            assert torch.equal(a, b)
            assert a.untyped_storage().data_ptr() != room.untyped_storage().data_ptr()
    graph, values = several()
    size = graph.workspace_bytes()
    assert size > 0
    with pytest.raises(RuntimeError, match=f"workspace has {size - 1} bytes on cpu; wanted {size}"):
        graph(*values, workspace=torch.empty(size - 1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="in one piece"):
        graph(*values, workspace=torch.empty(2 * size, dtype=torch.uint8)[::2])
    with pytest.raises(RuntimeError, match=r"wanted \d+ in one piece on cpu"):
        graph(*values, workspace=torch.empty(size, dtype=torch.uint8, device="meta"))


def test_nothing_is_written_beyond_the_workspace():
    graph, values = several()
    size = graph.workspace_bytes()
    room = torch.full((size + 1024,), 77, dtype=torch.uint8)
    graph(*values, workspace=room[512 : 512 + size])
    assert (room[:512] == 77).all()
    assert (room[512 + size :] == 77).all()


def test_outputs_that_are_inputs_constants_views_or_the_same():
    x = rand(2, 3, 4)
    with Graph() as graph:
        image = graph.input(x, name="x")
        y = graph.relu(image)
        constant = graph.constant(torch.ones(3))
        outputs = [image, constant, graph.reshape(image, (6, 4)), y, graph.reshape(y, (-1,)),
                   graph.transpose(y, (2, 1, 0)), graph.slice(y, (0, 1, 0), (2, 3, 4)), graph.identity(y)]  # fmt: skip
        for output in outputs:
            output.set_output()
        outputs[0].set_output()  # again
    assert graph.outputs == tuple(outputs)
    made = graph(x)
    r = x.relu()
    want = (x, torch.ones(3), x.reshape(6, 4), r, r.reshape(-1), r.permute(2, 1, 0), r[:, 1:], r)
    for a, b in zip(made, want, strict=True):
        assert torch.equal(a, b)
    before = [value.clone() for value in made]
    for at, value in enumerate(made):  # each is the caller's own
        value.fill_(-9)
        for other, kept in zip(made[at + 1 :], before[at + 1 :], strict=True):
            assert torch.equal(other, kept)
    assert (x == want[0]).all()
    assert torch.equal(graph(x)[1], torch.ones(3))
    outs = [torch.full_like(value.contiguous(), -5) for value in before]
    graph(x, out=outs)
    for a, b in zip(outs, want, strict=True):
        assert torch.equal(a, b)


def test_unused_results_are_left_out_and_outputs_can_be_unmarked():
    x = rand(2, 3)
    with Graph() as graph:
        y = graph.relu(x)
        z = graph.exp(y)
        z.set_output()
        y.set_output()
        y.set_output(False)
        graph.sin(y)
    assert graph.outputs == (z,)
    assert z.is_output
    assert not y.is_output
    close(graph(x), x.relu().exp())
    assert sum(len(kernel.nodes) for kernel in kernels(graph)) == 2
    with Graph() as graph:
        y, z = graph.relu(x), graph.exp(x)
    assert graph.outputs == (y, z)


def test_inputs_are_known_again_by_identity():
    x = rand(2, 3)
    with Graph() as graph:
        y = graph.add(graph.mul(x, x), x.clone())
        graph.add(y, x)
    assert len(graph.inputs) == 2
    other = rand(2, 3)
    close(graph(x, other), x * x + other + x)


def test_inputs_that_nothing_uses_come_last():
    with Graph() as graph:
        a, b = (graph.input(shape=(2,), dtype="f32", name=name) for name in "ab")
        graph.relu(b)
    assert graph.inputs == (b, a)
    assert torch.equal(graph(torch.tensor([-1.0, 2.0]), torch.zeros(2)), torch.tensor([0.0, 2.0]))


def test_constants():
    x, w = rand(2, 4, 5, 5), rand(3, 4, 3, 3)
    with Graph() as graph:
        weight = graph.constant(w, "weight")
        graph.add(graph.conv_fprop(x, weight), graph.exp(graph.mul(graph.constant(torch.tensor(2.0)), 3.0)))
    assert [tensor.name for tensor in graph.inputs] == ["input_0"]
    close(graph(x), F.conv2d(x, w) + torch.tensor(6.0).exp().double())
    assert any("computed once from constants" in note for note in graph.program().notes)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_other_batches_and_sizes(batch):
    graph, (_, w, b, _), _ = conv_graph()
    for size in ((7, 6), (9, 4)):
        x, r = rand(batch, 4, *size), rand(batch, 5, *size)
        close(graph(x, w, b, r), (F.conv2d(x, w, b, padding=1) + r).relu())
    graph, (x, *rest) = several()
    x = rand(batch, 4, 8, 8)
    for a, b in zip(graph(x, *rest), _several(x, *rest), strict=True):
        close(a, b)


def _several(x: Tensor, w: Tensor, scale: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = F.conv2d(x, w, padding=1)
    z = F.conv2d(F.batch_norm(y, None, None, scale, scale, True).relu(), v, padding=1)
    return F.max_pool2d(z, 2), y.mean((0, 2, 3)), z.exp().mean((2, 3), keepdim=True)


def test_other_strides():
    graph, (x, w, b, r), want = conv_graph()
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
        lambda t: t.mT.contiguous().mT if t.dim() == 4 else t,
        lambda t: torch.stack([t, t], -1)[..., 0],
    ]
    for form in forms:
        close(graph(form(x), w, b, r), want)
        close(graph(x, form(w), form(b), r), want)
        close(graph(*map(form, (x, w, b, r))), want)
    close(graph(x, w, b[:1].expand(5), r[:1].expand(2, 5, 7, 6)),
          (F.conv2d(x, w, b[:1].expand(5), padding=1) + r[:1]).relu())  # fmt: skip


def test_empty_tensors():
    graph, (x, w, b, r), _ = conv_graph()
    assert graph(x[:0], w, b, r[:0]).shape == (0, 5, 7, 6)
    empty = rand(0, 3)
    check(lambda g, x: g.reduction(g.relu(x), "add", 0), lambda x: x.relu().sum(0, keepdim=True), empty)
    check(lambda g, x: g.add(g.exp(x), 1.0), lambda x: x.exp() + 1, empty)
    check(lambda g, x: g.reshape(g.neg(x), (0, 3)), lambda x: -x, empty)
    with pytest.raises(RuntimeError, match=r"reduction: max runs over no values of \(0, 3\)"):
        build(lambda g, x: g.reduction(x, "max", 0), empty)


def test_results_are_the_same_each_time_and_on_many_threads():
    graph, values = several()
    want = graph(*values)
    again = graph(*values)
    for a, b in zip(want, again, strict=True):
        assert torch.equal(a, b)
    fresh, _ = several()
    failures: list[Any] = []

    def work(at: int) -> None:
        try:
            for _ in range(5):
                chosen = [values[0][: 1 + at % 2], *values[1:]] if at % 2 == 0 else values
                made = fresh(*chosen)
                expected = graph(*chosen)
                failures.extend(1 for a, b in zip(made, expected, strict=True) if not torch.equal(a, b))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# -- plans ------------------------------------------------------------------------------------------------------------


def test_plans_can_be_chosen():
    graph, values, want = conv_graph()
    plans = graph.plans()
    assert [plan.index for plan in plans] == list(range(len(plans)))
    assert len({(tuple(plan.engines), str(plan.knobs), plan.fused) for plan in plans}) == len(plans) > 2
    assert not plans[-1].fused
    for plan in plans:
        assert len(plan.engines) == len(plan.knobs)
        assert plan.seconds > 0
        assert plan.text
    for plan in plans:
        graph.choose(plan.index)
        close(graph(*values), want)
        now = graph.program().current()
        assert len(now.engines) == len(plan.engines)
        if plan.fused:
            assert now.engines == plan.engines
            assert now.knobs == plan.knobs
    with pytest.raises(ValueError, match=f"plan is {len(plans)}; wanted 0 to {len(plans) - 1}"):
        graph.choose(len(plans))


def test_autotune_keeps_the_fastest():
    graph, values, want = conv_graph()
    plans = graph.autotune(*values, seconds=1.0)
    times = [plan.measured for plan in plans if plan.measured is not None]
    assert times == sorted(times)
    assert len(times) > 1
    now = graph.program().current()
    assert now.fused == plans[0].fused
    if now.fused:
        assert now.engines == plans[0].engines
    close(graph(*values), want)


def test_the_policy_limits_the_choice():
    graph, values, want = conv_graph(policy=openconv.Policy(engine="cpu.naive"))
    close(graph(*values), want)
    assert graph.plans()[0].engines == ["cpu.naive"]
    graph, values, want = conv_graph()
    with openconv.policy(engine="cpu.im2col_gemm"):
        close(graph(*values), want)
        assert graph.plans()[0].engines == ["cpu.im2col_gemm"]
    graph(*values)


# -- fusion -----------------------------------------------------------------------------------------------------------


def test_convolutions_take_what_is_behind_them():
    graph, _, _ = conv_graph()
    assert [kernel.name for kernel in kernels(graph)] == ["conv_fprop + add + add_1 + y"]
    assert str(kernels(graph)[0].problem.epilogue) == "+add(c.v0)+add(t.v1)+relu"
    x, w, b = rand(2, 4, 7, 6), rand(5, 4, 3, 3), rand(5)
    graph = build(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w), b)), x, w, b)
    assert len(kernels(graph)) == 1
    graph = build(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w), b)), x, w, b, fuse=False)
    assert len(kernels(graph)) == 3


def test_a_value_on_the_way_is_another_result_of_the_kernel():
    x, w = rand(2, 4, 7, 6), rand(5, 4, 3, 3)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> list[GraphTensor]:
        y = g.conv_fprop(x, w)
        return [g.relu(y), y]

    graph = check(make, lambda x, w: [F.conv2d(x, w).relu(), F.conv2d(x, w)], x, w)
    assert len(kernels(graph)) == 1


def test_a_value_that_is_used_twice():
    x, w = rand(2, 4, 7, 6), rand(4, 4, 3, 3)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> GraphTensor:
        y = g.conv_fprop(x, w, padding=1)
        return g.mul(y, g.sigmoid(y))

    graph = check(make, lambda x, w: F.silu(F.conv2d(x, w, padding=1)), x, w)
    assert len(kernels(graph)) == 1


def test_a_diamond_is_one_kernel():
    x = rand(3, 4, 5)
    graph = check(
        lambda g, x: (lambda y: g.add(g.mul(g.sin(y), g.cos(y)), g.sub(y, 1.0)))(g.exp(x)),
        lambda x: x.exp().sin() * x.exp().cos() + x.exp() - 1, x,
    )  # fmt: skip
    assert len(kernels(graph)) == 1


def test_a_residual_that_is_made_of_the_result_waits():
    """y + pool(y): the pooling needs y, so the sum cannot be part of the convolution."""
    x, w = rand(2, 4, 6, 6), rand(4, 4, 3, 3)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> GraphTensor:
        y = g.conv_fprop(x, w, padding=1)
        return g.relu(g.add(y, g.max_pool(y, 3, 1, 1)))

    graph = check(make, lambda x, w: (lambda y: (y + F.max_pool2d(y, 3, 1, 1)).relu())(F.conv2d(x, w, padding=1)), x, w)
    assert [kernel.kind for kernel in kernels(graph)] == ["conv", "resample", "tree"]
    assert any("another of its arguments is made of this kernel's result" in note for note in kernels(graph)[0].notes)


def test_what_is_before_a_convolution_may_be_added_behind_it():
    """A value that a convolution and its own epilogue read is no prologue: both need it."""
    x, w = rand(2, 4, 6, 6), rand(4, 4, 3, 3)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> GraphTensor:
        y = g.relu(x)
        return g.add(g.conv_fprop(y, w, padding=1), y)

    check(make, lambda x, w: F.conv2d(x.relu(), w, padding=1) + x.relu(), x, w)


def test_a_prologue_goes_into_the_convolution():
    x, w, s = rand(2, 4, 6, 6), rand(4, 4, 3, 3), rand(1, 4, 1, 1)
    graph = check(
        lambda g, x, w, s: g.conv_fprop(g.relu(g.mul(x, s)), w), lambda x, w, s: F.conv2d((x * s).relu(), w), x, w, s
    )  # fmt: skip
    assert [str(kernel.problem.prologue) for kernel in kernels(graph)] == ["+mul(c.p0)+relu"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_that_is_part_of_a_vector(dtype):
    x, w, b = rand(2, 4, 6, 6, dtype=dtype), rand(4, 4, 3, 3, dtype=dtype), rand(8, dtype=dtype)
    for cut in (slice(0, 8, 2), slice(0, 4, 1), slice(1, 8, 2)):
        check(
            lambda g, x, w, b, cut=cut: g.bias(g.conv_fprop(x, w), g.slice(b, (cut.start,), (cut.stop,), (cut.step,))),
            lambda x, w, b, cut=cut: F.conv2d(x, w, b[cut]), x, w, b,
        )  # fmt: skip


def test_the_sum_of_a_result_without_its_squares():
    x, w = rand(2, 4, 6, 6), rand(4, 4, 3, 3)

    def make(g: Graph, x: GraphTensor, w: GraphTensor) -> list[GraphTensor]:
        y = g.conv_fprop(x, w)
        return [y, g.reduction(y, "add", (0, 2, 3))]

    check(make, lambda x, w: (lambda y: [y, y.sum((0, 2, 3), True)])(F.conv2d(x, w)), x, w)


def test_two_convolutions_that_are_added():
    x, w, v = rand(2, 4, 6, 6), rand(4, 4, 3, 3), rand(4, 4, 1, 1)
    graph = check(
        lambda g, x, w, v: g.relu(g.add(g.conv_fprop(x, w, padding=1), g.conv_fprop(x, v))),
        lambda x, w, v: (F.conv2d(x, w, padding=1) + F.conv2d(x, v)).relu(), x, w, v,
    )  # fmt: skip
    assert len(kernels(graph)) == 2


def test_a_softmax_is_two_passes_and_a_division():
    x = rand(4, 7)
    graph = check(
        lambda g, x: (lambda e: g.div(e, g.reduction(e, "add", 1)))(g.exp(g.sub(x, g.reduction(x, "max", 1)))),
        lambda x: x.softmax(1), x,
    )  # fmt: skip
    assert len(kernels(graph)) == 3


def test_batchnorm_in_training_is_few_kernels():
    x, w, scale = rand(4, 4, 6, 6), rand(4, 4, 3, 3), rand(4)
    graph = build(lambda g, x, w, s: g.relu(g.batchnorm(g.conv_fprop(x, w), s, s).y), x, w, scale)
    found = kernels(graph)
    assert len(found) == 3  # with statistics, of vectors, and the normalisation
    assert found[0].problem.stats
    assert found[-1].name.endswith("relu")


def test_reductions_of_one_value_are_one_kernel():
    x = rand(3, 4, 5)

    def make(g: Graph, x: GraphTensor) -> list[GraphTensor]:
        y = g.exp(x)
        return [g.reduction(y, "add", 1), g.reduction(y, "max", 1), g.reduction(g.mul(y, y), "avg", 1)]

    graph = check(make, lambda x: [x.exp().sum(1, True), x.exp().amax(1, True), (2 * x).exp().mean(1, True)], x)
    assert len(kernels(graph)) == 1


# -- rewrites ---------------------------------------------------------------------------------------------------------

REWRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "fold_batchnorm": (
        lambda g, x: g.relu(g.batchnorm_inference(
            g.conv_fprop(x, g.constant(_numbers(4, 4, 3, 3)), name="conv"),
            *(g.constant(_numbers(4)) for _ in range(4)), name="norm")),
        "norm: its scale is in the weights of conv",
    ),
    "fold_constants": (
        lambda g, x: g.add(x, g.exp(g.constant(_numbers(4, 1, 1)), name="power")), "power: computed once",
    ),
    "drop_casts": (
        lambda g, x: g.relu(g.cast(g.cast(g.cast(x, "f32"), "f64"), "f32", name="last")),
        "last: nothing is left of it, its input is f32 already",
    ),
    "drop_moves": (
        lambda g, x: g.relu(g.transpose(g.transpose(x, (0, 2, 3, 1)), (0, 3, 1, 2), name="back")),
        "back: nothing is left of it",
    ),
    "matmul_1x1": (
        lambda g, x: g.relu(g.conv_fprop(x, g.constant(_numbers(3, 4, 1, 1)), name="point")),
        "point: a matrix product of 84 x 4 by 4 x 3",
    ),
}  # fmt: skip


def _numbers(*shape: int) -> Tensor:
    return torch.linspace(0.1, 1.3, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("name", REWRITTEN)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_rewrites_change_no_result(name, layout):
    make, note = REWRITTEN[name]
    x = rand(2, 4, 7, 6, layout=layout)
    rewritten, plain = build(make, x, rewrites=(name,)), build(make, x, rewrites=())
    close(rewritten(x), plain(x))
    assert rewritten(x).stride() == plain(x).stride()
    assert any(text.startswith(note) for text in rewritten.program().notes), rewritten.program().notes
    assert plain.program().notes == []
    assert set(REWRITES) == set(REWRITTEN)


def test_rewrites_keep_what_was_set_of_results():
    x = rand(2, 4, 3, 3)
    graph = build(lambda g, x: [
        g.mul(g.identity(x).set_dtype("f16"), 1.0), g.mul(g.identity(x).set_layout("nhwc"), 2.0),
        g.batchnorm(x, rand(4), rand(4)).y.set_dtype("f32"),
    ], x)  # fmt: skip
    scale, bias = rand(4), rand(4)
    halved, laid, normal = graph(x, scale, bias)
    assert (halved.dtype, normal.dtype) == (torch.float16, torch.float32)
    assert laid.is_contiguous(memory_format=torch.channels_last)
    close(laid, x * 2)
    close(normal, F.batch_norm(x, None, None, scale, bias, True))


# -- any graph --------------------------------------------------------------------------------------------------------

UNARY = ("relu", "sigmoid", "tanh", "neg", "abs", "sin", "gelu", "silu", "hardswish", "softplus")
BINARY = ("add", "sub", "mul", "max", "min", "add_square")
LAYERS = ("matmul", "max", "avg", "inference", "training", "join", "dgrad", "squares", "constant")
KINDS = ("unary", "unary", "binary", "binary", "number", "select", "reduce", "conv", "view", "layer")
MATRIX = torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)
VECTOR = torch.linspace(-1, 1, 3, dtype=torch.float64).view(1, 3, 1, 1)


@st.composite
def recipes(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Steps over a list of values, which begins with an image, a vector, filters and a number."""
    steps: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(KINDS))
        picks = [draw(st.integers(0, 30)) for _ in range(3)]
        name = {"unary": UNARY, "binary": BINARY, "number": BINARY, "reduce": ("add", "avg", "max", "min", "norm2"),
                "view": ("reshape", "transpose", "slice"), "layer": LAYERS}.get(kind, ("",))  # fmt: skip
        steps.append(
            (kind, draw(st.sampled_from(name)), picks, draw(st.sampled_from([(1,), (2, 3), (0, 2, 3), (0, 1)])))
        )
    return steps


def follow(steps: list[tuple[Any, ...]], first: list[Any], ops: Any) -> list[Any]:
    """The values of a recipe, by ``ops``: a graph's, or torch's."""
    values, filters = first[:-1], first[-1]
    images = lambda: [v for v in values if tuple(v.shape) == (2, 3, 4, 5)]  # noqa: E731
    made = []
    for kind, name, picks, axes in steps:
        a, b = (values[pick % len(values)] for pick in picks[:2])
        whole = images()[picks[2] % len(images())]
        if kind == "unary":
            value = ops.unary(name, a)
        elif kind == "binary":
            value = ops.binary(name, a, b)
        elif kind == "number":
            value = ops.binary(name, a, 0.75)
        elif kind == "select":
            value = ops.select(a, b, whole)
        elif kind == "reduce":
            value = ops.reduce(name, whole, axes)
        elif kind == "conv":
            value = ops.conv(whole, filters)
        elif kind == "layer":
            value = ops.layer(name, whole, values[1], filters)
        else:
            value = ops.view(name, whole)
        values.append(value)
        made.append(value)
    return made


class GraphOps:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def unary(self, name: str, a: Any) -> Any:
        return self.graph.pointwise(name, a)

    def binary(self, name: str, a: Any, b: Any) -> Any:
        return self.graph.pointwise(name, a, b)

    def select(self, p: Any, a: Any, b: Any) -> Any:
        return self.graph.select(self.graph.cmp_gt(p, 0.0), a, b)

    def reduce(self, name: str, a: Any, axes: Any) -> Any:
        return self.graph.reduction(a, name, axes)

    def conv(self, a: Any, w: Any) -> Any:
        return self.graph.conv_fprop(a, w, padding=1)

    def layer(self, name: str, a: Any, v: Any, w: Any) -> Any:
        g = self.graph
        made: dict[str, Callable[[], Any]] = {
            "matmul": lambda: g.matmul(a, g.constant(MATRIX)), "max": lambda: g.max_pool(a, 3, 1, 1),
            "avg": lambda: g.avg_pool(a, 3, 1, 1), "inference": lambda: g.batchnorm_inference(a, v, v, v, v),
            "training": lambda: g.batchnorm(a, v, v).y, "squares": lambda: g.genstats(a)[1],
            "join": lambda: g.slice(g.concatenate([a, a], 1), (0, 1, 0, 0), (2, 4, 4, 5)),
            "dgrad": lambda: g.conv_dgrad(w, a, padding=1), "constant": lambda: g.mul(a, g.exp(g.constant(VECTOR))),
        }  # fmt: skip
        return made[name]()

    def view(self, name: str, a: Any) -> Any:
        g = self.graph
        if name == "reshape":
            return g.reshape(g.reshape(a, (2, 60)), (2, 3, 4, 5))
        if name == "transpose":
            return g.transpose(g.transpose(a, (0, 3, 1, 2)), (0, 2, 3, 1))
        return g.slice(a, (0, 0, 1, 0), (2, 3, 2, 5))


class TorchOps:
    def unary(self, name: str, a: Any) -> Any:
        return _FUNCTIONS[name](a, 1.0) if name == "softplus" else _FUNCTIONS[name](a)

    def binary(self, name: str, a: Any, b: Any) -> Any:
        return _FUNCTIONS[name](a, torch.as_tensor(b, dtype=torch.float64))

    def select(self, p: Any, a: Any, b: Any) -> Any:
        return torch.where(p > 0, a, b)

    def reduce(self, name: str, a: Any, axes: Any) -> Any:
        functions: dict[str, Callable[..., Tensor]] = {
            "add": torch.sum,
            "avg": torch.mean,
            "max": torch.amax,
            "min": torch.amin,
        }
        return a.square().sum(axes, True).sqrt() if name == "norm2" else functions[name](a, axes, True)

    def conv(self, a: Any, w: Any) -> Any:
        return F.conv2d(a, w, padding=1)

    def layer(self, name: str, a: Any, v: Any, w: Any) -> Any:
        made: dict[str, Callable[[], Any]] = {
            "matmul": lambda: a @ MATRIX, "max": lambda: F.max_pool2d(a, 3, 1, 1),
            "avg": lambda: F.avg_pool2d(a, 3, 1, 1), "squares": lambda: a.square().sum((0, 2, 3), True),
            "inference": lambda: (a - v) * v * v + v, "constant": lambda: a * VECTOR.exp(),
            "training": lambda: F.batch_norm(a, None, None, v.flatten(), v.flatten(), True),
            "join": lambda: torch.cat([a, a], 1)[:, 1:4], "dgrad": lambda: F.conv_transpose2d(a, w, padding=1),
        }  # fmt: skip
        return made[name]()

    def view(self, name: str, a: Any) -> Any:
        return a[:, :, 1:2] if name == "slice" else a


@settings(max_examples=300)
@given(recipes(), st.lists(st.integers(0, 30), min_size=1, max_size=3), st.booleans())
def test_any_graph_is_what_torch_says_fused_or_not(steps, wanted, last):
    torch.manual_seed(0)
    given = [rand(2, 3, 4, 5), rand(1, 3, 1, 1), rand(2, 3, 4, 5, layout="nhwc"), rand(3, 3, 3, 3) * 0.2]
    expected = follow(steps, list(given), TorchOps())
    picked = list(dict.fromkeys([pick % len(expected) for pick in wanted] + ([len(expected) - 1] if last else [])))
    for options in ({}, {"fuse": False, "rewrites": ()}, {"rewrites": ()}, {"fuse": False}):
        with Graph(**options) as graph:
            inputs = [graph.input(value, name=f"x{at}") for at, value in enumerate(given)]
            made = follow(steps, list(inputs), GraphOps(graph))
            for at in picked:
                made[at].set_output()
        result = graph({f"x{at}": value for at, value in enumerate(given)})
        results = result if isinstance(result, tuple) else (result,)
        for at, tensor, value in zip(picked, graph.outputs, results, strict=True):
            assert tensor.strides == value.stride() or tensor.node.op in VIEWS  # type: ignore[union-attr]
            torch.testing.assert_close(value, expected[at].expand(value.shape), rtol=1e-9, atol=1e-9)


def test_a_second_derivative_is_refused():
    """Rather than lost: a penalty on the gradient would be without effect."""
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    with openconv.Graph() as graph:
        graph.tanh(graph.conv_fprop(x, w))
    (found,) = torch.autograd.grad(graph(x, w).sum(), x, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(torch.tanh(F.conv2d(x, w)).sum(), x)[0])
    with pytest.raises(NotImplementedError, match="differentiated again"):
        found.square().sum().backward()
