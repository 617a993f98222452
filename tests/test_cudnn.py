"""The frontend's names over openconv.Graph: its tutorial, every operation against torch, and what callers rely on."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.testing import assert_close

import openconv.cudnn as cudnn
from tests import cudnn_device, tutorial_cudnn


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("section", tutorial_cudnn.SECTIONS)
def test_tutorial(section, dtype):
    tutorial_cudnn.SECTIONS[section](cudnn, "cpu", dtype)


@pytest.mark.parametrize("case", cudnn_device.ANYWHERE)
def test_on_a_device(case):
    cudnn_device.ANYWHERE[case](cudnn, "cpu", torch.float32)


# -- operations --------------------------------------------------------------------------------------------------------


def run(build: Any, *values: Tensor, **options: Any) -> Any:
    """What ``build(graph, *values)`` makes, whose results are all marked."""
    with cudnn.Graph(**options) as graph:
        made = build(graph, *values)
        for each in made if isinstance(made, list) else [made]:
            each.set_output(True)
    return graph(*values)


X = torch.linspace(-3, 3, 2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5) + 0.01
Y = X.flip(0) * 0.7 + 0.3


def slope_of(function: Any) -> Any:
    """loss times the slope of a function, by torch."""

    def backward(loss: Tensor, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x, loss)
        return found

    return backward


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


UNARY: dict[str, Any] = {
    "abs": torch.abs, "ceil": torch.ceil, "cos": torch.cos, "elu": F.elu, "erf": torch.erf, "exp": torch.exp,
    "floor": torch.floor, "gelu": F.gelu, "gelu_approx_tanh": gelu_tanh, "identity": torch.clone, "neg": torch.neg,
    "reciprocal": torch.reciprocal, "sigmoid": torch.sigmoid, "sin": torch.sin, "softplus": F.softplus,
    "tan": torch.tan, "tanh": torch.tanh, "relu": F.relu, "swish": F.silu,
}  # fmt: skip
POSITIVE: dict[str, Any] = {"log": torch.log, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt}
BINARY: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
    "mod": torch.fmod, "atan2": torch.atan2, "bias": torch.add, "scale": torch.mul,
    "add_square": lambda a, b: a + b * b, "pow": lambda a, b: a.abs() ** b,
}  # fmt: skip
COMPARED: dict[str, Any] = {
    "cmp_eq": torch.eq, "cmp_neq": torch.ne, "cmp_gt": torch.gt, "cmp_ge": torch.ge, "cmp_lt": torch.lt,
    "cmp_le": torch.le,
}  # fmt: skip
BACKWARD: dict[str, Any] = {
    "elu_backward": F.elu, "gelu_backward": F.gelu, "gelu_approx_tanh_backward": gelu_tanh, "relu_backward": F.relu,
    "sigmoid_backward": torch.sigmoid, "softplus_backward": F.softplus, "tanh_backward": torch.tanh,
    "swish_backward": F.silu,
}  # fmt: skip


def near(ours: Tensor, theirs: Tensor) -> None:
    assert_close(ours, theirs, atol=1e-4, rtol=1e-4)  # Winograd's roundings among them


@pytest.mark.parametrize("op", [*UNARY, *POSITIVE])
def test_unary(op):
    x = X if op in UNARY else X.abs() + 0.1
    near(run(lambda g, x: getattr(g, op)(x), x), {**UNARY, **POSITIVE}[op](x))
    near(run(lambda g, x: getattr(g, op)(input=x, name="one"), x), {**UNARY, **POSITIVE}[op](x))


@pytest.mark.parametrize("op", BINARY)
def test_binary(op):
    x = X.abs() if op == "pow" else X
    for other in (Y, Y[:1, :, :1, :1], Y[:1, :1, :1, :1].clone()):
        near(run(lambda g, a, b: getattr(g, op)(a, b), x, other), BINARY[op](x, other))


@pytest.mark.parametrize("op", COMPARED)
def test_comparisons(op):
    a, b = X.round(), Y.round()
    ours = run(lambda g, a, b: getattr(g, op)(input=a, comparison=b), a, b, io_data_type=cudnn.data_type.FLOAT)
    assert_close(ours, COMPARED[op](a, b).float())
    whole = run(lambda g, a, b: getattr(g, op)(a, b).set_data_type(cudnn.data_type.BOOLEAN), a, b)
    assert_close(whole, COMPARED[op](a, b))


def test_logic_and_selection():
    a, b = X > 0, Y > 0
    for op, theirs in (("logical_and", torch.logical_and), ("logical_or", torch.logical_or)):
        assert_close(run(lambda g, a, b, op=op: getattr(g, op)(a, b), a, b), theirs(a, b))
    assert_close(run(lambda g, a: g.logical_not(a), a), ~a)
    ours = run(lambda g, x, y, mask: g.binary_select(input0=x, input1=y, mask=mask), X, Y, a)
    assert_close(ours, torch.where(a, X, Y))


@pytest.mark.parametrize("op", BACKWARD)
def test_backward(op):
    near(run(lambda g, loss, x: getattr(g, op)(loss=loss, input=x), Y, X), slope_of(BACKWARD[op])(Y, X))


@pytest.mark.parametrize(
    "options, theirs",
    [
        ({"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
        ({"lower_clip": -1.0}, lambda x: x.clamp(min=-1)),
        ({"upper_clip": 1.5}, lambda x: x.clamp(0, 1.5)),
        ({"lower_clip": 0.5, "upper_clip": 1.5}, lambda x: x.clamp(0.5, 1.5)),
        ({"negative_slope": 0.1, "upper_clip": 2.0}, lambda x: F.leaky_relu(x, 0.1).clamp(max=2)),
        ({"lower_clip": 0.5, "lower_clip_slope": 0.3}, lambda x: F.leaky_relu(x - 0.5, 0.3) + 0.5),
    ],
)
def test_relu_with_clips(options, theirs):
    near(run(lambda g, x: g.relu(x, **options), X), theirs(X))
    near(run(lambda g, loss, x: g.relu_backward(loss, x, **options), Y, X), slope_of(theirs)(Y, X))


def test_operations_with_a_parameter():
    near(run(lambda g, x: g.leaky_relu(x, 0.3), X), F.leaky_relu(X, 0.3))
    near(run(lambda g, x: g.leaky_relu(input=x, negative_slope=0.3), X), F.leaky_relu(X, 0.3))
    leaky = run(lambda g, loss, x: g.leaky_relu_backward(loss, x, negative_slope=0.3), Y, X)
    near(leaky, slope_of(lambda x: F.leaky_relu(x, 0.3))(Y, X))
    near(run(lambda g, x: g.swish(x, swish_beta=1.7), X), X * torch.sigmoid(1.7 * X))
    swish = run(lambda g, loss, x: g.swish_backward(loss, x, swish_beta=1.7), Y, X)
    near(swish, slope_of(lambda x: x * torch.sigmoid(1.7 * x))(Y, X))
    with pytest.raises(TypeError, match="negative_slope is missing"):
        run(lambda g, x: g.leaky_relu(x), X)


def test_gen_index():
    ours = run(lambda g, x: g.gen_index(x, axis=2), X)
    assert_close(ours, torch.arange(4, dtype=torch.int32).reshape(1, 1, 4, 1).expand(X.shape).contiguous())


def test_matmul():
    a, b = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    near(run(lambda g, a, b: g.matmul(a, b), a, b), a @ b)
    near(run(lambda g, a, b: g.relu(g.matmul(A=a, B=b)), a, b), F.relu(a @ b))
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="padding is 1"):
        run(lambda g, a, b: g.matmul(a, b, padding=1.0), a, b)


@pytest.mark.parametrize("name", [mode.name for mode in cudnn.reduction_mode])
def test_reduction(name):
    mode = cudnn.reduction_mode[name]
    x = X.clone()
    x[0, 0, 0, 0] = 0
    theirs = {
        "ADD": lambda x: x.sum((2, 3), True), "MUL": lambda x: x.flatten(2).prod(2)[..., None, None],
        "MIN": lambda x: x.amin((2, 3), True), "MAX": lambda x: x.amax((2, 3), True),
        "AMAX": lambda x: x.abs().amax((2, 3), True), "AVG": lambda x: x.mean((2, 3), True),
        "NORM1": lambda x: x.abs().sum((2, 3), True), "NORM2": lambda x: x.pow(2).sum((2, 3), True).sqrt(),
        "MUL_NO_ZEROS": lambda x: torch.where(x == 0, 1.0, x).flatten(2).prod(2)[..., None, None],
    }[name]  # fmt: skip
    near(run(lambda g, x: g.reduction(x, mode).set_dim([2, 3, 1, 1]), x), theirs(x))
    near(run(lambda g, x: g.reduction(input=x, mode=mode, out_dims=[2, 3, 1, 1]), x), theirs(x))
    with pytest.raises(RuntimeError, match="set_dim"):
        run(lambda g, x: g.reduction(x, mode), x)
    with pytest.raises(RuntimeError, match=r"dim of the result is \[2, 2, 1, 1\]"):
        run(lambda g, x: g.reduction(x, mode).set_dim([2, 2, 1, 1]), x)


def test_statistics_of_channels():
    total, squares = run(lambda g, x: g.genstats(x), X)
    near(total, X.sum((0, 2, 3), True))
    near(squares, X.pow(2).sum((0, 2, 3), True))


def test_batchnorm_backward_takes_the_frontends_arguments():
    scale, bias = torch.rand(3) + 0.5, torch.randn(3)
    x = X.clone().requires_grad_()
    leaves = [x, scale.clone().requires_grad_(), bias.clone().requires_grad_()]
    made = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True)
    theirs = torch.autograd.grad(made, leaves, Y)
    mean, inv = X.mean((0, 2, 3)), (X.var((0, 2, 3), correction=0) + 1e-5).rsqrt()
    vectors = [v.reshape(1, 3, 1, 1) for v in (scale, mean, inv)]

    def build(g: Any, dy: Any, x: Any, scale: Any, mean: Any, inv: Any) -> Any:
        return g.batchnorm_backward(grad=dy, input=x, scale=scale, mean=mean, inv_variance=inv)

    for ours, each in zip(run(build, Y, X, *vectors), theirs, strict=True):
        near(ours.reshape(each.shape), each)


def test_batchnorm_without_running_values():
    vectors = torch.rand(1, 3, 1, 1) + 0.5, torch.randn(1, 3, 1, 1)
    with cudnn.Graph() as graph:
        made = graph.batchnorm(X, *vectors, epsilon=1e-3)
        assert isinstance(made, list)
        assert made[3] is made[4] is None
        made[0].set_output(True)
    theirs = F.batch_norm(X, None, None, vectors[0].flatten(), vectors[1].flatten(), True, eps=1e-3)
    near(graph(X, *vectors), theirs)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="peer_stats"):
        run(lambda g, x, s, b: g.batchnorm(x, s, b, peer_stats=[x])[0], X, *vectors)


def test_epsilon_and_momentum_change_from_call_to_call():
    vectors = [torch.rand(1, 3, 1, 1) + 0.5 for _ in range(4)]
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    x, *given = [graph.tensor_like(each) for each in (X, *vectors)]
    numbers = [
        graph.tensor([1, 1, 1, 1], is_pass_by_value=True, data_type=cudnn.data_type.FLOAT, name=name)
        for name in ("epsilon", "momentum")
    ]
    results = graph.batchnorm(x, *given, *numbers)
    for each in results:
        each.set_output(True)
    graph.build([cudnn.heur_mode.A])
    for epsilon, momentum in ((1e-5, 0.1), (0.3, 0.5), (1e-5, 0.1)):
        places = [torch.full(one.get_dim(), torch.nan) for one in results]
        pack = dict(zip([x, *given], (X, *vectors), strict=True)) | dict(zip(results, places, strict=True))
        graph.execute({**pack, "epsilon": epsilon, "momentum": torch.tensor(momentum)})
        running = [each.flatten().clone() for each in vectors[2:]]
        scale, bias = (each.flatten() for each in vectors[:2])
        near(places[0], F.batch_norm(X, running[0], running[1], scale, bias, True, momentum, epsilon))
        near(places[3].flatten(), running[0])
        near(places[4].flatten(), running[1])
    with pytest.raises(ValueError, match="no buffer for tensor 'momentum'"):
        graph.execute({**pack, "epsilon": 1e-5})


def test_scalars_by_value():
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT)
    x = graph.tensor_like(X)
    alpha = graph.tensor_like(torch.tensor([[[[2.0]]]]), name="alpha")
    assert alpha.get_is_pass_by_value()
    half = graph.tensor_scalar(0.5, cudnn.scalar_type.COMPILE_TIME_CONST)
    assert half.get_has_compile_time_constant()
    y = graph.add(graph.mul(x, alpha), half).set_output(True)
    out = torch.empty_like(X)
    for value in (2.0, 3, torch.tensor(4.0)):
        graph.execute({x: X, alpha: value, y: out})
        near(out, X * float(value) + 0.5)


def test_pooling():
    mode = cudnn.resample_mode
    x, window = torch.randn(2, 3, 9, 8), {"window": [3, 3], "stride": [2, 2], "padding": [1, 1]}
    torch_window: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1}
    for which, theirs in (
        (mode.MAXPOOL, lambda x: F.max_pool2d(x, **torch_window)),
        (mode.AVGPOOL_INCLUDE_PADDING, lambda x: F.avg_pool2d(x, **torch_window)),
        (mode.AVGPOOL_EXCLUDE_PADDING, lambda x: F.avg_pool2d(x, **torch_window, count_include_pad=False)),
    ):
        ours = run(lambda g, x, which=which: g.resample(x, mode=which, **window), x)
        near(ours, theirs(x))
        loss = torch.randn_like(ours)
        back = run(lambda g, d, x, which=which: g.resample_backward(d, x, mode=which, **window), loss, x)
        near(back, slope_of(theirs)(loss, x))
    low_high = {"pre_padding": [1, 0], "post_padding": [0, 1], "window": [2, 2]}
    padded = F.max_pool2d(F.pad(x, (0, 1, 1, 0), value=-torch.inf), 2)
    near(run(lambda g, x: g.resample(x, mode=mode.MAXPOOL, **low_high), x), padded)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="BILINEAR"):
        run(lambda g, x: g.resample(x, mode=mode.BILINEAR, window=[2, 2]), x)
    with pytest.raises(TypeError, match="window is missing"):
        run(lambda g, x: g.resample(x, mode=mode.MAXPOOL), x)


def test_moving_about():
    assert_close(run(lambda g, x: g.transpose(x, permutation=[0, 2, 3, 1]), X), X.permute(0, 2, 3, 1))
    cut = [slice(0, 2), slice(1, None), slice(None, None, 2), slice(-3, -1)]
    assert_close(run(lambda g, x: g.slice(x, cut), X), X[0:2, 1:, ::2, -3:-1])
    assert_close(run(lambda g, x: g.slice(x, slices=cut[:2]), X), X[0:2, 1:])
    assert_close(run(lambda g, x, y: g.concatenate(inputs=[x, y], axis=1), X, Y), torch.cat([X, Y], 1))
    assert_close(run(lambda g, x: g.reshape(x).set_dim([2, 60]), X), X.reshape(2, 60))
    nhwc = X.to(memory_format=torch.channels_last)
    assert_close(run(lambda g, x: g.reshape(x).set_dim([2, 60]), nhwc), X.reshape(2, 60))
    # With strides it is the memory that is read: pixels by channels, and a transposed view of a matrix.
    flat = run(lambda g, x: g.reshape(x).set_dim([40, 3]).set_stride([3, 1]), nhwc)
    assert_close(flat, X.permute(0, 2, 3, 1).reshape(40, 3))
    logical = cudnn.reshape_mode.LOGICAL
    rows = run(lambda g, x: g.reshape(x, reshape_mode=logical).set_dim([40, 3]).set_stride([3, 1]), nhwc)
    assert_close(rows, X.reshape(40, 3))
    swapped = run(lambda g, x: g.reshape(x).set_dim([1, 5, 24]).set_stride([120, 1, 5]), X.reshape(1, 24, 5))
    assert_close(swapped, X.reshape(1, 24, 5).mT)
    for wrong, match in (
        (lambda g, x: g.slice(x, [slice(None, None, -1)]), "steps are"),
        (lambda g, x: g.concatenate(inputs=[x, x], axis=0, in_place_index=0), "in_place_index"),
        (lambda g, x: g.reshape(x).set_dim([2, 60]).set_stride([120, 2]), "without gaps"),
    ):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=match):
            run(wrong, X)


def test_convolutions_with_padding_on_one_side():
    x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
    padded = F.pad(x, (2, 1, 1, 0))
    sides = {"pre_padding": [1, 2], "post_padding": [0, 1], "stride": [2, 1]}
    theirs = F.conv2d(padded, w, stride=(2, 1))
    near(run(lambda g, x, w: g.conv_fprop(x, w, **sides), x, w), theirs)
    loss = torch.randn_like(theirs)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    made = F.conv2d(F.pad(leaves[0], (2, 1, 1, 0)), leaves[1], stride=(2, 1))
    dx, dw = torch.autograd.grad(made, leaves, loss)
    near(run(lambda g, d, w: g.conv_dgrad(loss=d, filter=w, **sides).set_dim(list(x.shape)), loss, w), dx)
    near(run(lambda g, x, d: g.conv_wgrad(x, d, **sides).set_dim(list(w.shape)), x, loss), dw)
    flipped = {"convolution_mode": cudnn.convolution_mode.CONVOLUTION}
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="CROSS_CORRELATION"):
        run(lambda g, x, w: g.conv_fprop(x, w, **flipped), x, w)


def test_sizes_of_gradients_are_inferred_or_set():
    x, w = torch.randn(2, 6, 9, 9), torch.randn(4, 3, 3, 3)
    options = {"stride": [2, 2], "padding": [1, 1]}
    loss = torch.randn(2, 4, 5, 5)
    # Groups come from the channels of what was set.
    dx = run(lambda g, d, w: g.conv_dgrad(d, w, **options).set_dim([2, 6, 9, 9]), loss, w)
    near(dx, conv2d_input((2, 6, 9, 9), w, loss, stride=2, padding=1, groups=2))
    wider = run(lambda g, d, w: g.conv_dgrad(d, w, **options).set_dim([2, 6, 10, 10]), loss, w)
    near(wider, conv2d_input((2, 6, 10, 10), w, loss, stride=2, padding=1, groups=2))
    dw = run(lambda g, x, d: g.conv_wgrad(x, d, **options).set_dim([4, 3, 3, 3]), x, loss)
    near(dw, conv2d_weight(x, (4, 3, 3, 3), loss, stride=2, padding=1, groups=2))
    named = run(lambda g, x, d: g.conv_wgrad(x, d, groups=2, out_dims=[4, 3, 3, 3], **options), x, loss)
    near(named, dw)
    with pytest.raises(RuntimeError, match="wanted a multiple"):
        run(lambda g, x, w: g.conv_fprop(x, w), x, torch.randn(4, 4, 3, 3))


def test_both_orders_of_dgrad():
    w, loss = torch.randn(8, 4, 3, 3), torch.randn(2, 8, 6, 6)
    theirs = F.conv_transpose2d(loss, w)
    near(run(lambda g, d, w: g.conv_dgrad(d, w), loss, w), theirs)
    near(run(lambda g, w, d: g.conv_dgrad(w, d), w, loss), theirs)
    # As many images as channels: the filter is the smaller of the two.
    loss = torch.randn(4, 8, 6, 6)
    near(run(lambda g, w, d: g.conv_dgrad(w, d), w, loss), F.conv_transpose2d(loss, w))
    near(run(lambda g, d, w: g.conv_dgrad(d, w), loss, w), F.conv_transpose2d(loss, w))
    with pytest.raises(ValueError, match=r"either could be the filter.*loss=\.\.\., filter=\.\.\."):
        run(lambda g, w, d: g.conv_dgrad(w, d), w, torch.randn(4, 8, 3, 3))
    square = torch.randn(4, 8, 3, 3)
    near(run(lambda g, w, d: g.conv_dgrad(filter=w, loss=d), w, square), F.conv_transpose2d(square, w))


def test_one_and_three_dimensions():
    x, w = torch.randn(2, 4, 1, 12), torch.randn(6, 4, 1, 3)  # as users of cuDNN say 1D
    near(run(lambda g, x, w: g.conv_fprop(x, w, padding=[0, 1]), x, w), F.conv2d(x, w, padding=(0, 1)))
    x, w = torch.randn(2, 4, 5, 6, 7), torch.randn(6, 4, 3, 3, 3)
    near(run(lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1, 1]), x, w), F.conv3d(x, w, padding=1))


# -- tensors -----------------------------------------------------------------------------------------------------------


def conv_graph(**options: Any) -> tuple[Any, Any, Any, Any]:
    """A convolution and a relu, by sizes, planned for the CPU wherever this runs."""
    handle = cudnn.Handle(torch.device("cpu"))
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, handle=handle, **options)
    x = graph.tensor(dim=[2, 4, 8, 8], stride=[256, 1, 32, 4], name="x", uid=10)
    w = graph.tensor(dim=[6, 4, 3, 3], stride=[36, 1, 12, 4], name="w")
    y = graph.relu(graph.conv_fprop(x, w, padding=[1, 1]))
    y.set_output(True).set_name("y")
    return graph, x, w, y


def conv_values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, a place for y, and what belongs there."""
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    w = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    place = torch.full((2, 6, 8, 8), torch.nan).to(memory_format=torch.channels_last)
    return x, w, place, F.relu(F.conv2d(x, w, padding=1))


def test_setters_and_getters():
    graph, x, w, y = conv_graph()
    assert (x.get_uid(), x.get_name(), x.get_dim(), x.get_stride()) == (10, "x", [2, 4, 8, 8], [256, 1, 32, 4])
    assert x.get_data_type() is cudnn.data_type.FLOAT
    assert not x.get_is_virtual()
    assert not x.get_is_pass_by_value()
    assert x.get_reordering_type() is cudnn.tensor_reordering.NONE
    # What was not set follows from the graph, and follows it when it changes.
    hidden = next(iter(graph.nodes[0].outputs.values()))
    assert hidden.get_is_virtual()
    assert (y.get_dim(), y.get_stride()) == ([2, 6, 8, 8], [384, 1, 48, 6])
    x.set_dim([3, 4, 8, 8])
    assert y.get_dim() == [3, 6, 8, 8]
    y.set_data_type(torch.bfloat16)
    assert y.get_data_type() is cudnn.data_type.BFLOAT16
    y.set_stride([384, 64, 8, 1])
    assert y.get_stride() == [384, 64, 8, 1]
    y.set_is_virtual(True)
    assert y.get_is_virtual()
    assert w.set_is_pass_by_value(True).get_is_pass_by_value()
    assert w.set_name("weight").get_name() == "weight"
    assert w.set_uid(7).get_uid() == 7
    assert graph.query_tensor_attributes_of_uid(7) is w
    assert graph.find_tensor("weight") is w
    with pytest.raises(ValueError, match="uid is 7, which tensor 'weight' was given"):
        x.set_uid(7)
    with pytest.raises(ValueError, match="there is no tensor with uid 99"):
        graph.query_tensor_attributes_of_uid(99)
    with pytest.raises(ValueError, match="wanted integers"):
        x.set_dim([1, -2])
    with pytest.raises(TypeError, match="data type is 3"):
        x.set_data_type(3)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="complex"):
        x.set_data_type(torch.complex64)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="ragged"):
        x.set_ragged_offset(w)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="F8_128x4"):
        x.set_reordering_type(cudnn.tensor_reordering.F8_128x4)


def test_uids_that_are_taken_without_being_given_make_room():
    graph = cudnn.pygraph()
    first = graph.tensor([1])
    second = graph.tensor([2], uid=first.get_uid())
    assert second.get_uid() == 1
    assert first.get_uid() not in (1, 0)
    assert graph.find_tensor(first.get_uid()) is first
    assert graph.tensor([3]).get_uid() not in (first.get_uid(), second.get_uid())
    assert graph.tensor([3], uid=-1).get_uid() > 0  # the frontend's word for none


def test_tensor_like():
    graph = cudnn.pygraph()
    one = graph.tensor_like(X.to(memory_format=torch.channels_last), name="one")
    assert (one.get_dim(), one.get_stride()) == ([2, 3, 4, 5], [60, 1, 15, 3])
    assert not one.get_is_pass_by_value()
    other = graph.tensor_like(one)
    assert (other.get_dim(), other.get_stride(), other.get_data_type()) == (
        one.get_dim(), one.get_stride(), cudnn.data_type.FLOAT
    )  # fmt: skip
    assert other.get_uid() != one.get_uid()


def test_data_types():
    x, w = torch.randn(2, 4, 6, 6).half(), torch.randn(4, 4, 3, 3).half()
    kinds: dict[str, Any] = {"io_data_type": cudnn.data_type.HALF, "intermediate_data_type": cudnn.data_type.FLOAT}
    with cudnn.Graph(**kinds) as graph:
        one = graph.conv_fprop(x, w, padding=[1, 1])
        two = graph.conv_fprop(graph.relu(one), w)  # a value on the way, made what its partner is
        two.set_output(True)
        wide = graph.neg(one).set_output(True).set_data_type(cudnn.data_type.FLOAT)
        assert one.get_data_type() is cudnn.data_type.FLOAT
        assert two.get_data_type() is cudnn.data_type.HALF
        assert wide.get_data_type() is cudnn.data_type.FLOAT
    made, negated = graph(x, w)
    assert (made.dtype, negated.dtype) == (torch.float16, torch.float32)
    exact = F.conv2d(x.float(), w.float(), padding=1)
    assert_close(negated, -exact, atol=1e-4, rtol=1e-4)
    assert_close(made.float(), F.conv2d(F.relu(exact).half().float(), w.float()), atol=0.02, rtol=5e-3)
    whole = torch.randint(-4, 5, (1, 4, 5, 5), dtype=torch.int8), torch.randint(-4, 5, (3, 4, 3, 3), dtype=torch.int8)
    ours = run(lambda g, x, w: g.conv_fprop(x, w).set_data_type(torch.float32), *whole)
    assert_close(ours, F.conv2d(whole[0].float(), whole[1].float()))
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="FP4_E2M1"):
        cudnn.pygraph(compute_data_type=cudnn.data_type.FP4_E2M1)
    with pytest.raises(RuntimeError, match=r"was given torch\.float32; wanted torch\.float16"):
        graph(x.float(), w)


# -- building and running ----------------------------------------------------------------------------------------------


def test_step_by_step():
    graph, x, w, y = conv_graph()
    assert graph.get_execution_plan_count() == 0
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    with pytest.raises(RuntimeError, match="build_plans"):
        graph.get_workspace_size()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    values = conv_values()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    graph.execute({x: values[0], w: values[1], y: values[2]}, workspace, handle=cudnn.create_handle())
    near(values[2], values[3])
    for change in (lambda: y.set_output(False), lambda: graph.relu(y), lambda: graph.tensor([1])):
        with pytest.raises(RuntimeError, match="can no longer change"):
            change()
    with pytest.raises(RuntimeError, match="planned already"):
        graph.create_execution_plans()


@pytest.mark.parametrize("key", ["tensor", "uid", "name"])
@pytest.mark.parametrize("buffer", ["tensor", "address", "numpy"])
def test_execute(key, buffer):
    graph, *tensors = conv_graph()
    graph.build([cudnn.heur_mode.A])
    *values, expected = conv_values()
    keys = {"tensor": lambda t: t, "uid": lambda t: t.get_uid(), "name": lambda t: t.get_name()}[key]
    given = {"tensor": lambda v: v, "address": lambda v: v.data_ptr(), "numpy": lambda v: v.numpy()}[buffer]
    workspace = torch.empty(graph.get_workspace_size() + 16, dtype=torch.uint8)
    room = workspace.data_ptr() + -workspace.data_ptr() % 16 if buffer == "address" else workspace
    graph.execute({keys(t): given(v) for t, v in zip(tensors, values, strict=True)}, room)
    near(values[2], expected)
    values[2].fill_(torch.nan)
    uids = [t.get_uid() for t in tensors]
    graph.execute([given(v) for v in values], tensor_uids=uids)
    near(values[2], expected)


def test_execute_reads_buffers_as_they_were_declared():
    graph, x, w, y = conv_graph()
    *values, expected = conv_values()
    flat = [value.permute(0, 2, 3, 1).reshape(-1) for value in values]  # the same memory, without sizes
    graph.execute(dict(zip((x, w, y), flat, strict=True)))
    near(values[2], expected)
    # A result that lies otherwise than declared is filled all the same.
    place = torch.empty(2, 6, 8, 8)
    graph.execute({x: values[0], w: values[1], y: place})
    near(place, expected)


def test_execute_refuses():
    graph, x, w, y = conv_graph()
    *values, _ = conv_values()
    with pytest.raises(ValueError, match="no buffer for tensor 'w'"):
        graph.execute({x: values[0], y: values[2]})
    with pytest.raises(ValueError, match="'z' is no tensor of graph"):
        graph.execute({"z": values[0]})
    with pytest.raises(RuntimeError, match=r"was given torch\.float64; wanted torch\.float32"):
        graph.execute({x: values[0].double(), w: values[1], y: values[2]})
    with pytest.raises(TypeError, match="was given str"):
        graph.execute({x: "memory", w: values[1], y: values[2]})
    with pytest.raises(ValueError, match="multiple of 4"):
        graph.execute({x: values[0].data_ptr() + 2, w: values[1], y: values[2]})
    with pytest.raises(ValueError, match="wanted one number for each"):
        graph.execute(list(values), tensor_uids=[1, 1, 2])
    with pytest.raises(TypeError, match=r"wanted one of cudnn\.create_handle"):
        graph.execute({x: values[0], w: values[1], y: values[2]}, handle=0)  # a raw address is no handle


def test_execute_with_other_sizes():
    graph, x, w, y = conv_graph(is_override_shape_enabled=True)
    graph.build()
    filters = conv_values()[1]
    image = torch.randn(1, 4, 5, 6).to(memory_format=torch.channels_last)
    place = torch.empty(1, 6, 5, 6).to(memory_format=torch.channels_last)
    sizes = {"override_uids": [x.get_uid(), y.get_uid()], "override_shapes": [[1, 4, 5, 6], [1, 6, 5, 6]],
             "override_strides": [[120, 1, 24, 4], [180, 1, 36, 6]]}  # fmt: skip
    assert graph.get_workspace_size(**sizes) >= 0
    graph.execute({x: image, w: filters, y: place}, **sizes)
    near(place, F.relu(F.conv2d(image, filters, padding=1)))
    with pytest.raises(ValueError, match="have 1, 0 and 0 entries"):
        graph.execute({}, override_uids=[1])


def test_tensors_of_torch_in_a_pygraph_are_used_where_none_is_given():
    graph = cudnn.pygraph()
    y = graph.add(X, Y).set_output(True)
    out = torch.empty_like(X)
    graph.execute({y: out})
    near(out, X + Y)


def test_strides_of_results():
    values = conv_values()
    for stride in ([384, 64, 8, 1], [384, 1, 48, 6], [1000, 100, 10, 1]):
        graph, x, w, y = conv_graph()
        y.set_stride(stride)
        place = torch.zeros(2000)
        graph.execute({x: values[0], w: values[1], y: place})
        near(place.as_strided((2, 6, 8, 8), stride), values[3])


def test_plans():
    graph, x, w, y = conv_graph()
    graph.build()
    count = graph.get_execution_plan_count()
    assert count > 1
    names = [graph.get_plan_name_at_index(index) for index in range(count)]
    assert len(set(names)) == count
    assert graph.get_engine_count() == len({graph.get_engine_and_knobs_at_index(index)[0] for index in range(count)})
    *values, expected = conv_values()
    for index in range(count):
        values[2].fill_(torch.nan)
        room = torch.empty(graph.get_workspace_size_plan_at_index(index), dtype=torch.uint8)
        graph.execute_plan_at_index({x: values[0], w: values[1], y: values[2]}, room, index)
        near(values[2], expected)
    graph.build_plan_at_index(count - 1)
    values[2].fill_(torch.nan)
    graph.execute({x: values[0], w: values[1], y: values[2]})
    near(values[2], expected)
    # The same plan again, by engine and knobs, alone in another graph.
    engine, knobs = graph.get_engine_and_knobs_at_index(count - 1)
    (only,) = graph.get_knobs_for_engine(engine)
    assert (only.type, only.min_value) == (cudnn.knob_type.KERNEL_CFG, 0)
    assert only.max_value >= knobs[only.type]
    again, x, w, y = conv_graph()
    again.validate()
    again.create_execution_plan(engine, knobs)
    assert again.get_execution_plan_count() == 1
    again.build_plans()
    assert again.get_plan_name_at_index(0) == names[-1]
    values[2].fill_(torch.nan)
    again.execute({x: values[0], w: values[1], y: values[2]})
    near(values[2], expected)
    with pytest.raises(IndexError, match=f"plan index is {count}"):
        graph.get_plan_name_at_index(count)
    with pytest.raises(ValueError, match="no plan of engine 99"):
        again.create_execution_plan(99)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="TILE_SIZE"):
        again.create_execution_plan(0, {cudnn.knob_type.TILE_SIZE: 1})


def test_deselecting():
    graph, *_ = conv_graph()
    graph.create_execution_plans()
    first = graph.get_plan_name_at_index(0).split("[")[0]
    graph.deselect_engines([first])
    with pytest.raises(ValueError, match="deselect_engines"):
        graph.build_plan_at_index(0)
    graph.build_plans()
    assert first not in graph.get_plan_name_at_index(graph._selected)
    for spoil, match in (
        (lambda g: g.select_numeric_notes([cudnn.numerical_note.WINOGRAD]), "lacks the note WINOGRAD"),
        (lambda g: g.deselect_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION]), "carries the note RUNTIME"),
        (lambda g: g.deselect_engines(["["]), "deselect_engines"),
    ):
        graph, *_ = conv_graph()
        graph.create_execution_plans()
        assert spoil(graph) is graph
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=match):
            graph.check_support()
    graph, *_ = conv_graph()
    graph.create_execution_plans()
    sizes = [graph.get_workspace_size_plan_at_index(index) for index in range(graph.get_execution_plan_count())]
    assert min(sizes) < max(sizes)
    graph.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE, cudnn.numerical_note.NONDETERMINISTIC])
    graph.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    graph.deselect_workspace_greater_than(min(sizes))
    graph.build_plans()
    assert graph.get_workspace_size() == min(sizes)
    assert graph.get_behavior_notes() == [cudnn.behavior_note.RUNTIME_COMPILATION]
    graph.select_plan(sizes.index(max(sizes)))
    with pytest.raises((ValueError, cudnn.cudnnGraphNotSupportedError), match="bytes of workspace"):
        graph.build_plans()


@pytest.mark.parametrize("as_bytes", [True, False])
def test_serialize(as_bytes):
    graph, x, w, y = conv_graph()
    cut = graph.slice(y, [slice(None), slice(1, 3)]).set_output(True).set_name("cut")
    total = graph.reduction(cut, cudnn.reduction_mode.ADD).set_dim([2, 2, 1, 1]).set_output(True).set_uid(77)
    graph.build()
    graph.build_plan_at_index(graph.get_execution_plan_count() - 1)
    data = graph.serialize(as_bytes=as_bytes)
    assert isinstance(data, bytes if as_bytes else list)
    again = cudnn.pygraph()
    again.deserialize(cudnn.Handle(torch.device("cpu")), data)
    assert again.serialize(as_bytes=True) == graph.serialize(as_bytes=True)
    assert again.key() == graph.key()
    assert again.get_plan_name_at_index(again._selected) == graph.get_plan_name_at_index(graph._selected)
    values = conv_values()
    places = values[2], torch.empty(2, 2, 8, 8), torch.empty(2, 2, 1, 1)
    uids = [one.get_uid() for one in (x, w, y, cut, total)]
    again.execute(dict(zip(uids, (*values[:2], *places), strict=True)))
    near(places[0], values[3])
    near(places[1], values[3][:, 1:3])
    near(places[2], values[3][:, 1:3].sum((2, 3), True))
    with pytest.raises(RuntimeError, match="wanted an empty one"):
        again.deserialize(data)
    with pytest.raises(ValueError, match="wanted what serialize"):
        cudnn.pygraph().deserialize(b"something else")
    other, *_ = conv_graph()
    assert other.key() != graph.key()


def test_cuda_graphs_are_of_cuda_devices():
    graph, x, w, y = conv_graph()
    values = conv_values()
    pack = {x: values[0], w: values[1], y: values[2]}
    with pytest.raises(RuntimeError, match="is not built"):
        graph.populate_cuda_graph(cudnn.create_handle(), pack, None, 0)
    graph.build()
    for method in (graph.populate_cuda_graph, graph.update_cuda_graph):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="on cpu"):
            method(cudnn.create_handle(), pack, None, 0)


def test_what_is_not_computed_says_so():
    graph = cudnn.pygraph()
    for name in (
        "sdpa",
        "sdpa_backward",
        "layernorm",
        "rmsnorm_backward",
        "block_scale_quantize",
        "moe_grouped_matmul",
    ):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=name):
            getattr(graph, name)(X, Y, anything=1)
    with pytest.raises(AttributeError, match="conv_fporp"):
        _ = graph.conv_fporp
    with pytest.raises(TypeError, match=r"wanted conv_fprop\(image, weight"):
        graph.conv_fprop(X)
    with pytest.raises(TypeError, match="imagee"):
        graph.conv_fprop(X, Y, imagee=X)
    with pytest.raises(TypeError, match="image is str; wanted a tensor"):
        graph.conv_fprop("x", Y)
    with pytest.raises(ValueError, match="of another graph"):
        cudnn.pygraph().relu(graph.tensor([1]))
    with pytest.raises(RuntimeError, match="no operations"):
        graph.validate()
    lone = cudnn.pygraph(io_data_type=torch.float32)
    lone.relu(lone.tensor([1], is_virtual=True))
    with pytest.raises(RuntimeError, match="virtual and no node makes it"):
        lone.validate()
    lone = cudnn.pygraph()
    lone.relu(lone.tensor([1]))
    with pytest.raises(RuntimeError, match="data type is not set"):
        lone.validate()
    lone = cudnn.pygraph(io_data_type=torch.float32)
    lone.relu(lone.tensor([1])).set_dim([9])
    with pytest.raises(RuntimeError, match=r"dim was set to \[9\]"):
        lone.validate()


# -- the block ---------------------------------------------------------------------------------------------------------


def test_calls_by_place_name_and_mapping():
    x, w, place, expected = conv_values()
    with cudnn.Graph(name="calls") as graph:
        hidden = graph.conv_fprop(image=x, weight=w, padding=[1, 1], name="conv2d")
        y = graph.relu(hidden).set_output(True).set_name("out")
    near(graph(x, w), expected)
    near(graph(image=x, weight=w), expected)
    near(graph(w, image=x), expected)
    for keys in (("conv2d::image", "conv2d::weight"), ("conv2d::0", "conv2d::1"), graph.get_inputs()):
        given: dict[Any, Any] = dict(zip(keys, (x, w), strict=True))
        made = graph(given)
        assert made is given
        near(made["out"], expected)
    graph({"image": x, "weight": w, y: place})
    near(place, expected)
    graph.set_io_tuples(["conv2d::weight", x], ["out"])
    near(graph(w, x), expected)
    with pytest.raises(ValueError, match="1 tensor"):
        graph(x)
    with pytest.raises(ValueError, match="'bias' is none of them"):
        graph(x, w, bias=x)
    with pytest.raises(RuntimeError, match="the dictionary lacks 'conv2d::weight'"):
        graph({"image": x})
    with pytest.raises(ValueError, match="wanted each of"):
        graph.set_io_tuples([x], ["out"])
    with pytest.raises(ValueError, match="wanted a list"):
        graph.set_io_tuples("x", [])
    with pytest.raises(RuntimeError, match="the end of the block"):
        graph.validate()
    assert graph.get_execution_plan_count() > 0
    assert "conv_fprop" in dir(graph)


def test_orders_given_before_the_end():
    def build(graph: Any) -> None:
        graph.add(graph.neg(X, name="first"), Y).set_output(True).set_name("sum")
        graph.sub(X, Y).set_output(True).set_name("difference")

    with cudnn.Graph(inputs=[Y, X], outputs=["difference", "sum"]) as graph:
        build(graph)
    difference, total = graph(Y, X)
    near(difference, X - Y)
    near(total, Y - X)
    with cudnn.Graph() as graph:
        build(graph)
        graph.set_io_tuples([Y, "first::input"], ["difference", "sum"])
    near(graph(Y, X)[0], X - Y)
    with cudnn.Graph() as graph:
        build(graph)
    total, difference = graph(X, Y)
    near(total, Y - X)
    near(difference, X - Y)


def test_blocks():
    with cudnn.Graph() as outer:
        outer.relu(X).set_output(True)
    with pytest.raises(RuntimeError, match="is not open, and no block of another one is"):
        cudnn.Graph().relu(X)
    with pytest.raises(RuntimeError, match="had its block already"), outer:
        pass
    # The innermost open block takes what a closed graph is told, and only that of the same thread.
    with cudnn.Graph() as one:
        with cudnn.Graph() as two:
            outer.neg(X).set_output(True)
        outer.abs(X).set_output(True)
        one.exp(X).set_output(True)
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(outer.neg(X)))
        thread.start()
        thread.join()
    assert [each.get_dim() for each in made] == [[2, 3, 4, 5]]
    assert [node.name for node in one.nodes] == ["abs.0", "exp.0"]
    near(two(X), -X)
    for ours, theirs in zip(one(X), (X.abs(), X.exp()), strict=True):
        near(ours, theirs)
    failed = cudnn.Graph()
    with pytest.raises(KeyError), failed:
        raise KeyError
    with pytest.raises(RuntimeError, match="wanted a call behind its block"):
        failed(X)
    with pytest.raises(RuntimeError, match="is closed, since its block failed"):
        failed.relu(X)
    wrong = cudnn.Graph()
    wrong.__enter__()
    wrong.conv_fprop(X, torch.randn(2, 5, 1, 1))
    wrong.relu(X).set_output(True)
    with pytest.raises(RuntimeError, match="conv_fprop"):
        wrong.__exit__(None, None, None)  # though nothing uses the convolution


def test_a_closed_graph_tells_sizes():
    """The tutorial's lines about padding, stride and dilation: on the graph of its first block, outside of all."""
    x, w = torch.randn(16, 64, 56, 56).half(), torch.randn(128, 64, 3, 3).half() / 24
    with cudnn.Graph(io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT) as graph:
        y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y.set_output(True)
    before = graph(x[:1], w)
    dims = []
    y = graph.conv_fprop(x, w, padding=[0, 0])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[1, 1])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[2, 2])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[1, 1], stride=[2, 2])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[1, 1], dilation=[1, 1])
    dims.append(y.get_dim())
    y = graph.conv_fprop(x, w, padding=[2, 2], dilation=[2, 2])
    dims.append(y.get_dim())
    assert dims == [[16, 128, size, size] for size in (54, 56, 58, 56, 28, 56, 56)]
    assert len(graph.nodes) == 1
    assert [one.get_dim() for one in graph.get_outputs()] == [[16, 128, 56, 56]]
    after = graph(x[:1], w)
    assert torch.equal(before, after)
    assert_close(after, F.conv2d(x[:1], w, padding=1), atol=5e-3, rtol=3e-3)


def test_what_a_closed_graph_is_told_is_beside_it():
    with cudnn.Graph(name="done", intermediate_data_type=cudnn.data_type.FLOAT) as graph:
        inside = graph.relu(X).set_output(True)
    hidden = graph.conv_fprop(X.half(), torch.ones(6, 3, 2, 2).half())
    assert hidden.get_data_type() is cudnn.data_type.FLOAT  # the graph's, for values on the way
    assert graph.reduction(graph.neg(hidden), cudnn.reduction_mode.ADD).set_dim([1, 6, 1, 1]).get_dim() == [1, 6, 1, 1]
    assert graph.relu(graph.tensor([4, 5], data_type=cudnn.data_type.HALF)).get_dim() == [4, 5]
    with pytest.raises(RuntimeError, match="'done \\(after its block\\)': a tensor was made a result"):
        hidden.set_output(True)
    with pytest.raises(ValueError, match="of another graph"):
        graph.neg(inside)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="sdpa"):
        graph.sdpa(X)
    with cudnn.Graph() as other:
        other.relu(X).set_output(True)
        with pytest.raises(ValueError, match="of another graph"):
            other.neg(hidden)
    near(graph(X), F.relu(X))
    # A record for each thread, which keeps none of the tensors that it was given.
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.append(graph.abs(X)))
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="of another graph"):
        graph.neg(kept[0])
    given = torch.randn(2, 3)
    answer, seen = graph.relu(given), weakref.ref(given)
    del given
    gc.collect()
    assert seen() is None
    assert answer.get_dim() == [2, 3]


def test_other_batch_sizes_and_tensors_that_want_gradients():
    x, w = torch.randn(3, 4, 6, 6), torch.nn.Parameter(torch.randn(5, 4, 3, 3))
    with cudnn.Graph(handle="auto") as graph:
        graph.conv_fprop(x, w).set_output(True)
    for batch in (3, 1, 7):
        image = torch.randn(batch, 4, 6, 6, requires_grad=True)
        made = graph(image, w)
        assert not made.requires_grad
        near(made, F.conv2d(image, w).detach())


def test_graphs_do_not_keep_the_tensors_of_their_block():
    x = torch.randn(2, 3, 4, 5)
    with cudnn.Graph() as graph:
        graph.relu(x).set_output(True)
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert seen() is None
    near(graph(X), F.relu(X))


def test_workspace_of_the_caller():
    x, w, _, expected = conv_values()
    with cudnn.Graph(workspace_alloc=False) as graph:
        graph.relu(graph.conv_fprop(x, w, padding=[1, 1])).set_output(True)
    size = graph.get_workspace_size()
    near(graph(x, w, workspace=torch.empty(size + 16, dtype=torch.uint8)), expected)
    if size:
        with pytest.raises(RuntimeError, match=f"wanted {size} bytes"):
            graph(x, w)


def test_decorators():
    built = []

    @cudnn.graph_cache(key_fn=lambda n, **_: n, maxsize=2)
    @cudnn.jit(heur_modes=[cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    def relu(n: int, **_: Any) -> Any:
        built.append(n)
        with cudnn.graph(cudnn.create_handle(), io_data_type=cudnn.data_type.FLOAT) as (g, tensors):
            x = g.tensor(dim=[n, 4], name="x")
            y = g.relu(x).set_output(True)
            tensors += [x, y]
            return g, tensors

    for n in (3, 3, 4, 5, 5, 3):
        graph, (x, y) = relu(n)
        assert graph.get_execution_plan_count() > 0
        data, out = torch.randn(n, 4), torch.empty(n, 4)
        graph.execute({x: data, y: out})
        near(out, F.relu(data))
    assert built == [3, 4, 5, 3]  # the oldest of two was forgotten


# -- handles and the module --------------------------------------------------------------------------------------------


def test_handles():
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=1234)
    assert cudnn.get_stream(handle) == 1234
    cudnn.set_stream(handle, None)
    assert isinstance(cudnn.get_stream(handle), int)
    cudnn.destroy_handle(handle)
    cudnn.destroy_handle(handle)
    with pytest.raises(RuntimeError, match="destroyed"):
        cudnn.set_stream(handle, 0)
    calls: list[Any] = [cudnn.destroy_handle, cudnn.get_stream]
    for call in calls:
        with pytest.raises(TypeError, match="handle is int"):
            call(0)
    with pytest.raises(TypeError, match="handle is int"):
        cudnn.pygraph(handle=3)  # type: ignore[arg-type]


def test_versions():
    assert cudnn.backend_version() == 91900
    assert cudnn.backend_version_string().startswith("9.19.0")
    assert cudnn.datatypes.to_torch(cudnn.data_type.BFLOAT16) is torch.bfloat16
    assert cudnn.datatypes.from_torch(torch.int8) is cudnn.data_type.INT8
    assert not [name for name in cudnn.__all__ if not hasattr(cudnn, name)]


def test_install():
    """In a process of its own: ``import cudnn`` finds this package, unless the other one came first."""
    program = """
import sys, types
import openconv.cudnn as ours
assert ours.install() is ours is ours.install()
import cudnn
from cudnn import data_type, pygraph
from cudnn.wrapper import Graph
import cudnn.datatypes
assert cudnn is ours and Graph is ours.Graph
ours.uninstall()
ours.uninstall()
assert "cudnn" not in sys.modules and "cudnn.wrapper" not in sys.modules
sys.modules["cudnn"] = types.ModuleType("cudnn")
try:
    ours.install()
except RuntimeError as error:
    assert "already" in str(error)
else:
    raise SystemExit("install() went over another cudnn")
ours.uninstall()
assert "cudnn" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
