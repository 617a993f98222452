"""The frontend's convolution tutorial, section by section, in openconv's own words: functions of a device and a dtype
build an :class:`openconv.Graph` and compare with torch. tests/test_graph_tutorial.py runs them on the CPU, tests/gpu on
a GPU; tests/tutorial_cudnn.py says the same with the frontend's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight
from torch.testing import assert_close

from openconv import Graph
from openconv.graph import GraphTensor
from tests.tutorial_cudnn import BatchNorm, close, close_to_exact, draw, draw_filter, draw_norm, torch_conv

SECTIONS = (
    "basic_forward", "parameters", "bias_and_activation", "data_gradient", "weight_gradient", "forward_and_backward",
    "filter_sizes", "depthwise", "transposed", "resnet_block", "resnet_training", "verification",
)  # fmt: skip
"""The functions of this module, in the order of the tutorial."""


def roundoff(dtype: torch.dtype, device: Any) -> float:
    """Of the factors of products: a GPU rounds f32 to tf32, which has the digits of f16."""
    if dtype == torch.float32:
        return 2.0**-11 if torch.device(device).type == "cuda" else 2.0**-24
    return torch.finfo(dtype).eps / 2


def basic_forward(device: Any, dtype: torch.dtype) -> None:
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    with Graph() as graph:
        y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y.set_output(True)
    assert y.shape == (2, 32, 14, 14)
    wanted = F.conv2d(x, w, padding=1)
    output = graph(x, w)
    assert output.device == x.device
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert output.stride() == y.strides
    close(output, wanted)
    image, weight = graph.inputs
    place = torch.full_like(output, torch.nan)
    assert graph({image: x, weight: w}, out=place) is place
    assert torch.equal(place, output)


def parameters(device: Any, dtype: torch.dtype) -> None:
    """Padding, stride and dilation; a graph tells sizes while it is built, and returns all that is marked."""
    x = draw(2, 8, 56, 56, device=device, dtype=dtype)
    w = draw_filter(16, 8, 3, 3, device=device, dtype=dtype)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"padding": [0, 0]}, 54), ({"padding": [1, 1]}, 56), ({"padding": [2, 2]}, 58),
        ({"padding": [1, 1], "stride": [1, 1]}, 56), ({"padding": [1, 1], "stride": [2, 2]}, 28),
        ({"padding": [1, 1], "dilation": [1, 1]}, 56), ({"padding": [2, 2], "dilation": [2, 2]}, 56),
    ]  # fmt: skip
    with Graph() as graph:
        for options, pixels in cases:
            assert graph.conv_fprop(x, w, **options).set_output(True).shape == (2, 16, pixels, pixels)
    for output, (options, _) in zip(graph(x, w), cases, strict=True):
        close(output, torch_conv(x, w, options))


def bias_and_activation(device: Any, dtype: torch.dtype) -> None:
    """One kernel, as the tutorial says, with the bias in either of its shapes."""
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    bias = draw(1, 32, 1, 1, device=device, dtype=dtype)
    for given in (bias, bias.flatten()):
        with Graph() as graph:
            conv_out = graph.conv_fprop(x, w, padding=[1, 1])
            bias_out = graph.bias(input=conv_out, bias=given)
            graph.relu(input=bias_out).set_output(True)
        assert len(graph.explain(device).launched) == 1
        close(graph(x, w, given), F.relu(F.conv2d(x, w, bias.flatten(), padding=1)))


def data_gradient(device: Any, dtype: torch.dtype) -> None:
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype)
    with Graph() as graph:
        dx = graph.conv_dgrad(weight=w, loss=dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        dx.set_output(True)
    input_grad = graph(w, dy)
    assert input_grad.shape == (2, 16, 14, 14)
    close(input_grad, F.conv_transpose2d(dy, w, padding=1))


def weight_gradient(device: Any, dtype: torch.dtype) -> None:
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
    with Graph() as graph:
        dw = graph.conv_wgrad(image=x, loss=dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        dw.set_output(True)
    weight_grad = graph(x, dy)
    assert weight_grad.shape == (32, 16, 3, 3)
    close(weight_grad, conv2d_weight(x, (32, 16, 3, 3), dy, padding=1))


def forward_and_backward(device: Any, dtype: torch.dtype) -> None:
    """A loop with three graphs and batches of several sizes; autograd finds the same gradients by the first alone."""
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
    with Graph("forward") as forward:
        forward.conv_fprop(x, w, padding=[1, 1])
    with Graph("dgrad") as dgrad:
        dgrad.conv_dgrad(w, dy, padding=[1, 1])
    with Graph("wgrad") as wgrad:
        wgrad.conv_wgrad(x, dy, padding=[1, 1])
    with pytest.raises(RuntimeError, match="'forward' is closed"):
        forward.conv_fprop(x, w)
    learning_rate = 0.1
    for batch in (2, 1, 3):
        x = draw(batch, 16, 14, 14, device=device, dtype=dtype)
        dy = draw(batch, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
        close(forward(x, w), F.conv2d(x, w, padding=1))
        dx, step = dgrad(w, dy), wgrad(x, dy)
        close(dx, F.conv_transpose2d(dy, w, padding=1))
        close(step, conv2d_weight(x, tuple(w.shape), dy, padding=1))
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        for found, wanted in zip(torch.autograd.grad(forward(*leaves), leaves, dy), (dx, step), strict=True):
            close(found, wanted)
        w -= learning_rate * step


def filter_sizes(device: Any, dtype: torch.dtype) -> None:
    for channels, filters, taps, padding, stride in (
        (32, 8, 1, 0, 1),
        (8, 16, 3, 1, 1),
        (6, 8, 5, 2, 1),
        (3, 8, 7, 3, 2),
    ):
        x = draw(2, channels, 20, 20, device=device, dtype=dtype)
        w = draw_filter(filters, channels, taps, taps, device=device, dtype=dtype)
        with Graph() as graph:
            graph.conv_fprop(x, w, padding=padding, stride=[stride, stride]).set_output(True)
        close(graph(x, w), F.conv2d(x, w, padding=padding, stride=stride))


def depthwise(device: Any, dtype: torch.dtype) -> None:
    """With ``groups``: without it the channels do not fit, and an error says so."""
    in_channels = 16
    x = draw(2, in_channels, 14, 14, device=device, dtype=dtype)
    w_dw = draw_filter(in_channels, 1, 3, 3, device=device, dtype=dtype)
    with Graph() as graph:
        with pytest.raises(RuntimeError, match=r"takes 1 in 1 group\(s\)"):
            graph.conv_fprop(x, w_dw, padding=[1, 1])
        graph.conv_fprop(x, w_dw, padding=[1, 1], groups=in_channels).set_output(True)
    close(graph(x, w_dw), F.conv2d(x, w_dw, padding=1, groups=in_channels))


def transposed(device: Any, dtype: torch.dtype) -> None:
    x_small = draw(2, 16, 7, 7, device=device, dtype=dtype)
    w_up = draw_filter(16, 8, 4, 4, device=device, dtype=dtype)
    with Graph() as graph:
        y = graph.conv_dgrad(weight=w_up, loss=x_small, padding=[1, 1], stride=[2, 2])
        y.set_output(True)
    output = graph(w_up, x_small)
    assert output.shape == (2, 8, 14, 14)
    close(output, F.conv_transpose2d(x_small, w_up, padding=1, stride=2))


def basic_block(
    graph: Graph, x: Tensor, w1: Tensor, w2: Tensor, bn1: BatchNorm, bn2: BatchNorm, downsample_w: Tensor | None,
    stride: int,
) -> GraphTensor:  # fmt: skip
    """relu(bn2(conv(relu(bn1(conv(x, w1))), w2)) + x'), x' the image or a 1x1 convolution of it."""
    out = graph.conv_fprop(x, w1, padding=[1, 1], stride=[stride, stride])
    out = graph.relu(graph.batchnorm_inference(out, *bn1))
    out = graph.conv_fprop(out, w2, padding=[1, 1])
    out = graph.batchnorm_inference(out, *bn2)
    identity = x if downsample_w is None else graph.conv_fprop(x, downsample_w, stride=[stride, stride])
    return graph.relu(graph.add(out, identity))


def _normalised(x: Tensor, norm: BatchNorm) -> Tensor:
    return (x - norm.mean.double()) * norm.inv_var.double() * norm.scale.double() + norm.bias.double()


def resnet_block(device: Any, dtype: torch.dtype) -> None:
    """A plain block, and one that downsamples: twice the channels on a quarter of the pixels. A kernel for each
    convolution, whatever surrounds it."""
    for stride in (1, 2):
        channels = 16 * stride
        x = draw(2, 16, 14, 14, device=device, dtype=dtype)
        w1 = draw_filter(channels, 16, 3, 3, device=device, dtype=dtype)
        w2 = draw_filter(channels, channels, 3, 3, device=device, dtype=dtype)
        down = draw_filter(channels, 16, 1, 1, device=device, dtype=dtype) if stride == 2 else None
        norms = draw_norm(channels, device, dtype), draw_norm(channels, device, dtype)
        with Graph() as graph:
            basic_block(graph, x, w1, w2, *norms, down, stride).set_output(True)
        assert sum(kernel.kind == "conv" for kernel in graph.explain(device).launched) == 2 + (down is not None)
        wide = x.double()
        hidden = F.relu(_normalised(F.conv2d(wide, w1.double(), padding=1, stride=stride), norms[0]))
        made = _normalised(F.conv2d(hidden, w2.double(), padding=1), norms[1])
        identity = wide if down is None else F.conv2d(wide, down.double(), stride=stride)
        ours = graph(x, w1, *norms[0], w2, *norms[1], *([] if down is None else [down]))
        assert ours.dtype == dtype
        close_to_exact(ours, F.relu(made + identity))


def resnet_training(device: Any, dtype: torch.dtype) -> None:
    """The block with normalisation by the batch, plain and downsampling: its result, the running values that it leaves,
    and the gradients of all that it learns. Those are compared by length: a rounding that carries a value over zero
    turns a slope of relu over, so a share of the slopes like the roundoff is wrong, and its root of the length."""
    epsilon, momentum, unit = 1e-5, 0.1, roundoff(dtype, device)
    limit = max(16 * unit, 1e-5)  # f32 sums of 144 products, twice
    for stride in (1, 2):
        channels = 16 * stride
        x = draw(4, 16, 10, 10, device=device, dtype=dtype)
        filters = [draw_filter(channels, 16, 3, 3, device=device, dtype=dtype)]
        filters.append(draw_filter(channels, channels, 3, 3, device=device, dtype=dtype))
        if stride == 2:
            filters.append(draw_filter(channels, 16, 1, 1, device=device, dtype=dtype))
        scales = [(torch.rand(channels) + 0.5).to(device) for _ in range(2)]
        biases = [torch.randn(channels).to(device) for _ in range(2)]
        means = [torch.randn(channels).to(device) for _ in range(2)]
        variances = [torch.rand(channels).to(device) for _ in range(2)]

        with Graph("training") as graph:
            out = graph.input(x, name="x")
            kept = []
            for at in range(2):
                out = graph.conv_fprop(out, filters[at], padding=1, stride=stride if at == 0 else 1)
                made = graph.batchnorm(out, scales[at], biases[at], means[at], variances[at], epsilon, momentum)
                kept += [made.running_mean, made.running_variance]
                out = graph.relu(made.y) if at == 0 else made.y
            identity = graph.conv_fprop(x, filters[2], stride=stride) if stride == 2 else x
            graph.relu(graph.add(out, identity), name="y").set_output(True)
            for each in kept:
                assert each is not None
                each.set_output(True)

        learned = [x, *filters, *scales, *biases]
        ours = [value.clone().requires_grad_() for value in learned]
        exact = [value.double().requires_grad_() for value in learned]
        theirs, running = _torch_training(exact, means, variances, stride, epsilon, momentum)
        given = dict(zip(map(id, learned), ours, strict=True))
        at_hand = [x, filters[0], scales[0], biases[0], means[0], variances[0]]
        at_hand += [filters[1], scales[1], biases[1], means[1], variances[1], *filters[2:]]
        y, *statistics = graph(*(given.get(id(value), value) for value in at_hand))
        assert y.dtype == dtype
        assert_close(y.detach().double(), theirs.detach(), atol=limit, rtol=limit)
        for found, wanted in zip(statistics, running, strict=True):
            assert not found.requires_grad
            assert_close(found.double(), wanted, atol=limit / 8, rtol=limit / 8)
        dy = draw(*y.shape, device=device, dtype=dtype)
        gradients = torch.autograd.grad(y, ours, dy), torch.autograd.grad(theirs, exact, dy.double())
        for found, wanted in zip(*gradients, strict=True):
            assert float((found.double() - wanted).norm()) <= 4 * unit**0.5 * float(wanted.norm())


def _torch_training(
    learned: list[Tensor], means: list[Tensor], variances: list[Tensor], stride: int, epsilon: float, momentum: float
) -> tuple[Tensor, list[Tensor]]:
    """The block by torch, and the running values that it leaves: mean and variance of the first, then the second."""
    x, *filters = learned[:-4]
    scales, biases = learned[-4:-2], learned[-2:]
    running = [value.double() for pair in zip(means, variances, strict=True) for value in pair]
    out = x
    for at in range(2):
        out = F.conv2d(out, filters[at], padding=1, stride=stride if at == 0 else 1)
        mean, variance = running[2 * at : 2 * at + 2]
        out = F.batch_norm(out, mean, variance, scales[at], biases[at], True, momentum, epsilon)
        out = F.relu(out) if at == 0 else out
    identity = F.conv2d(x, filters[2], stride=stride) if stride == 2 else x
    return F.relu(out + identity), running


def verification(device: Any, dtype: torch.dtype) -> None:
    """The tutorial's comparison, by the first plan and by the last."""
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    with Graph() as graph:
        graph.conv_fprop(x, w, padding=[1, 1]).set_output(True)
    wanted = F.conv2d(x, w, padding=1)
    plans = graph.plans(device)
    for plan in (plans[0], plans[-1]):
        graph.choose(plan.index, device)
        assert_close(graph(x, w), wanted, atol=5e-3, rtol=3e-3)
