"""The frontend's convolution tutorial, section by section: each function takes the module, a device and a dtype, calls
what the section calls in the way it calls it, and compares with torch. tests/gpu runs the same on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight
from torch.testing import assert_close

ATOL, RTOL = 5e-3, 3e-3
"""What the tutorial allows."""


def draw(*shape: int, device: Any, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random values, channels last where there are pixels. The scale of a filter is one over the root of its length, so
    that results are of the size of what comes in, which is what the tolerance is for."""
    made = (torch.randn(*shape) * scale).to(device=device, dtype=dtype)
    return made.to(memory_format=torch.channels_last) if made.dim() == 4 else made


def draw_filter(*shape: int, device: Any, dtype: torch.dtype) -> Tensor:
    return draw(*shape, device=device, dtype=dtype, scale=(shape[1] * shape[2] * shape[3]) ** -0.5)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    # Sums in another order may round to the neighbour of a bf16.
    assert_close(ours, theirs, atol=ATOL, rtol=max(RTOL, torch.finfo(ours.dtype).eps))


def close_to_exact(ours: Tensor, exact: Tensor) -> None:
    """Against what no dtype was rounded to. The tutorial's tolerance is less than two roundings of values of up to 8 to
    bf16, a hidden layer and the result: 2**-5 is what those come to."""
    more = 2**-5 if ours.dtype == torch.bfloat16 else 0.0
    assert_close(ours.to(exact.dtype), exact, atol=ATOL + more, rtol=RTOL + more / 4)


def torch_conv(x: Tensor, w: Tensor, options: Any) -> Tensor:
    """torch's convolution with the options of a graph's."""
    return F.conv2d(x, w, **options)


def basic_forward(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    with cudnn.Graph(io_data_type=dtype, compute_data_type=cudnn.data_type.FLOAT) as graph:
        y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y.set_output(True)
    output = graph(x, w, handle=handle)
    assert output.shape == (2, 32, 14, 14)
    assert output.is_contiguous(memory_format=torch.channels_last)
    close(output, F.conv2d(x, w, padding=1))
    cudnn.destroy_handle(handle)


def parameters(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """Padding, stride and dilation: many results, all but the last one left behind."""
    x = draw(2, 8, 56, 56, device=device, dtype=dtype)
    w = draw_filter(16, 8, 3, 3, device=device, dtype=dtype)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"padding": [0, 0]}, 54), ({"padding": [1, 1]}, 56), ({"padding": [2, 2]}, 58),
        ({"padding": [1, 1], "stride": [1, 1]}, 56), ({"padding": [1, 1], "stride": [2, 2]}, 28),
        ({"padding": [1, 1], "dilation": [1, 1]}, 56), ({"padding": [2, 2], "dilation": [2, 2]}, 56),
    ]  # fmt: skip
    for kept, (kept_options, size) in enumerate(cases):
        with cudnn.Graph() as graph:
            for at, (options, pixels) in enumerate(cases):
                y = graph.conv_fprop(x, w, **options)
                assert y.get_dim() == [2, 16, pixels, pixels]
                if at == kept:
                    y.set_output(True)
        output = graph(x, w)
        assert output.shape == (2, 16, size, size)
        close(output, torch_conv(x, w, kept_options))


def bias_and_activation(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    bias = draw(1, 32, 1, 1, device=device, dtype=dtype)
    with cudnn.Graph(io_data_type=dtype, compute_data_type=cudnn.data_type.FLOAT) as graph:
        conv_out = graph.conv_fprop(x, w, padding=[1, 1])
        bias_out = graph.bias(input=conv_out, bias=bias)
        relu_out = graph.relu(input=bias_out)
        relu_out.set_output(True)
    output = graph(x, w, bias, handle=handle)
    close(output, F.relu(F.conv2d(x, w, bias.flatten(), padding=1)))


def data_gradient(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype)
    with cudnn.Graph(io_data_type=dtype, compute_data_type=cudnn.data_type.FLOAT) as graph:
        dx = graph.conv_dgrad(weight=w, loss=dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        dx.set_output(True)
    input_grad = graph(w, dy, handle=handle)
    assert input_grad.shape == (2, 16, 14, 14)
    close(input_grad, F.conv_transpose2d(dy, w, padding=1))


def weight_gradient(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
    with cudnn.Graph(io_data_type=dtype, compute_data_type=cudnn.data_type.FLOAT) as graph:
        dw = graph.conv_wgrad(image=x, loss=dy, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        dw.set_output(True)
    weight_grad = graph(x, dy, handle=handle)
    assert weight_grad.shape == (32, 16, 3, 3)
    close(weight_grad, conv2d_weight(x, (32, 16, 3, 3), dy, padding=1))


def forward_and_backward(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """The section says ``graph`` in the blocks of other graphs; ``graph`` is one of an earlier section."""
    handle = cudnn.create_handle()
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    dy = draw(2, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
    with cudnn.Graph() as graph:
        graph.conv_fprop(x, w).set_output(True)
    with cudnn.Graph(name="forward") as forward_graph:
        y = graph.conv_fprop(x, w, padding=[1, 1])
        y.set_output(True)
    with cudnn.Graph(name="dgrad") as dgrad_graph:
        dx = graph.conv_dgrad(w, dy, padding=[1, 1])
        dx.set_output(True)
    with cudnn.Graph(name="wgrad") as wgrad_graph:
        dw = graph.conv_wgrad(x, dy, padding=[1, 1])
        dw.set_output(True)
    learning_rate = 0.1
    for batch in (2, 1, 3):
        x = draw(batch, 16, 14, 14, device=device, dtype=dtype)
        dy = draw(batch, 32, 14, 14, device=device, dtype=dtype, scale=1 / 20)
        close(forward_graph(x, w, handle=handle), F.conv2d(x, w, padding=1))
        close(dgrad_graph(w, dy, handle=handle), F.conv_transpose2d(dy, w, padding=1))
        step = wgrad_graph(x, dy, handle=handle)
        close(step, conv2d_weight(x, tuple(w.shape), dy, padding=1))
        w -= learning_rate * step
    assert len(graph.nodes) == 1


def filter_sizes(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    for channels, filters, taps, options in (
        (32, 8, 1, {"padding": [0, 0]}),
        (8, 16, 3, {"padding": [1, 1]}),
        (6, 8, 5, {"padding": [2, 2]}),
        (3, 8, 7, {"padding": [3, 3], "stride": [2, 2]}),
    ):
        x = draw(2, channels, 20, 20, device=device, dtype=dtype)
        w = draw_filter(filters, channels, taps, taps, device=device, dtype=dtype)
        with cudnn.Graph() as graph:
            y = graph.conv_fprop(x, w, **options)
            y.set_output(True)
        close(graph(x, w), torch_conv(x, w, options))


def depthwise(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    in_channels = 16
    x = draw(2, in_channels, 14, 14, device=device, dtype=dtype)
    w_dw = draw_filter(in_channels, 1, 3, 3, device=device, dtype=dtype)
    for options in ({"groups": in_channels}, {}):  # the frontend itself has no such argument: channels tell
        with cudnn.Graph() as graph:
            y = graph.conv_fprop(x, w_dw, padding=[1, 1], **options)
            y.set_output(True)
        close(graph(x, w_dw), F.conv2d(x, w_dw, padding=1, groups=in_channels))


def transposed(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    x_small = draw(2, 16, 7, 7, device=device, dtype=dtype)
    w_up = draw_filter(16, 8, 4, 4, device=device, dtype=dtype)
    with cudnn.Graph() as graph:
        y = graph.conv_dgrad(weight=w_up, loss=x_small, padding=[1, 1], stride=[2, 2])
        y.set_output(True)
    output = graph(w_up, x_small, handle=handle)
    assert output.shape == (2, 8, 14, 14)
    close(output, F.conv_transpose2d(x_small, w_up, padding=1, stride=2))


class BatchNorm(NamedTuple):
    """What the tutorial's block is given for each normalisation."""

    scale: Tensor
    bias: Tensor
    mean: Tensor
    inv_var: Tensor


def draw_norm(channels: int, device: Any, dtype: torch.dtype) -> BatchNorm:
    shape = (1, channels, 1, 1)
    values = (torch.rand(shape) + 0.5, torch.randn(shape) * 0.3, torch.randn(shape) * 0.3, torch.rand(shape) + 0.5)
    return BatchNorm(*(value.to(device=device, dtype=dtype) for value in values))


def resnet_basic_block(
    graph: Any, x: Any, w1: Tensor, w2: Tensor, bn1: BatchNorm, bn2: BatchNorm, downsample_w: Tensor | None = None,
    stride: int = 1,
) -> Any:  # fmt: skip
    """The tutorial's block; its second form leaves out that the first convolution has to stride as well."""
    identity = x
    out = graph.conv_fprop(x, w1, padding=[1, 1], stride=[stride, stride])
    out = graph.batchnorm_inference(out, bn1.scale, bn1.bias, bn1.mean, bn1.inv_var)
    out = graph.relu(out)
    out = graph.conv_fprop(out, w2, padding=[1, 1])
    out = graph.batchnorm_inference(out, bn2.scale, bn2.bias, bn2.mean, bn2.inv_var)
    if downsample_w is not None:
        identity = graph.conv_fprop(identity, downsample_w, stride=[2, 2])
    out = graph.add(out, identity)
    return graph.relu(out)


def _normalised(x: Tensor, norm: BatchNorm) -> Tensor:
    return (x - norm.mean) * norm.inv_var * norm.scale + norm.bias


def resnet_block(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    for stride in (1, 2):
        # A plain block, and with downsampling one of twice the channels on a quarter of the pixels.
        channels = 16 * stride
        x = draw(2, 16, 14, 14, device=device, dtype=dtype)
        w1 = draw_filter(channels, 16, 3, 3, device=device, dtype=dtype)
        w2 = draw_filter(channels, channels, 3, 3, device=device, dtype=dtype)
        down = draw_filter(channels, 16, 1, 1, device=device, dtype=dtype) if stride == 2 else None
        norms = draw_norm(channels, device, dtype), draw_norm(channels, device, dtype)
        for options in ({}, {"io_data_type": dtype, "intermediate_data_type": cudnn.data_type.FLOAT}):
            with cudnn.Graph(**options) as graph:
                out = resnet_basic_block(graph, x, w1, w2, *norms, down, stride)
                out.set_output(True)
            given = [x, w1, *norms[0], w2, *norms[1], *([] if down is None else [down])]
            wide = [each.double() for each in (x, w1, w2)]
            exact = [BatchNorm(*(value.double() for value in norm)) for norm in norms]
            hidden = F.relu(_normalised(F.conv2d(wide[0], wide[1], padding=1, stride=stride), exact[0]))
            made = _normalised(F.conv2d(hidden, wide[2], padding=1), exact[1])
            identity = wide[0] if down is None else F.conv2d(wide[0], down.double(), stride=2)
            ours = graph(*given)
            assert ours.dtype == dtype
            close_to_exact(ours, F.relu(made + identity))


def resnet_training(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    """The block with normalisation by the batch, and the running values that it leaves."""
    channels, epsilon, momentum = 16, 1e-5, 0.1
    x = draw(4, channels, 10, 10, device=device, dtype=dtype)
    w1, w2 = (draw_filter(channels, channels, 3, 3, device=device, dtype=dtype) for _ in range(2))
    shape = (1, channels, 1, 1)
    scale, bias, mean, variance = (
        made.to(device) for made in (torch.rand(shape) + 0.5, torch.randn(shape), torch.randn(shape), torch.rand(shape))
    )
    kinds = {"io_data_type": dtype, "intermediate_data_type": cudnn.data_type.FLOAT}
    numbers = torch.full((1, 1, 1, 1), epsilon), torch.full((1, 1, 1, 1), momentum)
    with cudnn.Graph(**kinds, compute_data_type=cudnn.data_type.FLOAT) as graph:
        out = graph.conv_fprop(x, w1, padding=[1, 1])
        out, *statistics = graph.batchnorm(out, scale, bias, mean, variance, *numbers)
        out = graph.relu(out)
        out = graph.conv_fprop(out, w2, padding=[1, 1])
        out = graph.relu(graph.add(out, x))
        out.set_output(True)
        for each in statistics:
            each.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    # epsilon and momentum come by value, as tensors of the host do
    ours = graph(x, w1, scale, bias, mean, variance, *numbers, w2)
    next_mean, next_variance = mean.flatten().clone(), variance.flatten().clone()
    hidden = F.conv2d(x.float(), w1.float(), padding=1)
    normed = F.batch_norm(hidden, next_mean, next_variance, scale.flatten(), bias.flatten(), True, momentum, epsilon)
    made = F.relu(F.conv2d(F.relu(normed).to(dtype).float(), w2.float(), padding=1) + x.float())
    close_to_exact(ours[0], made)
    assert_close(ours[1].flatten(), hidden.mean((0, 2, 3)), atol=1e-4, rtol=1e-4)
    assert_close(ours[2].flatten(), (hidden.var((0, 2, 3), correction=0) + epsilon).rsqrt(), atol=1e-4, rtol=1e-3)
    assert_close(ours[3].flatten(), next_mean, atol=1e-4, rtol=1e-4)
    assert_close(ours[4].flatten(), next_variance, atol=1e-4, rtol=1e-4)


def verification(cudnn: Any, device: Any, dtype: torch.dtype) -> None:
    handle = cudnn.create_handle()
    x = draw(2, 16, 14, 14, device=device, dtype=dtype)
    w = draw_filter(32, 16, 3, 3, device=device, dtype=dtype)
    with cudnn.Graph() as graph:
        y = graph.conv_fprop(x, w, padding=[1, 1])
        y.set_output(True)
    cudnn_result = graph(x, w, handle=handle)
    assert_close(cudnn_result, F.conv2d(x, w, padding=1), atol=5e-3, rtol=3e-3)
    cudnn.destroy_handle(handle)
    with pytest.raises(RuntimeError, match="destroyed"):
        graph(x, w, handle=handle)


SECTIONS: dict[str, Callable[[Any, Any, torch.dtype], None]] = {
    section.__name__: section
    for section in (
        basic_forward, parameters, bias_and_activation, data_gradient, weight_gradient, forward_and_backward,
        filter_sizes, depthwise, transposed, resnet_block, resnet_training, verification,
    )
}  # fmt: skip
"""Every section, in order."""
