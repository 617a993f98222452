"""openconv.jit: functions and modules of torch calls as graphs, against the same calls of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import openconv
from openconv.graph.trace import Jitted, Traced

W2, B2 = torch.randn(8, 4, 3, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def check(function: Any, *args: Any, **kwargs: Any) -> Jitted:
    """The traced function gives what the function does; twice, for the second call finds what the first left."""
    made = openconv.jit(function)
    for _ in range(2):
        want, got = function(*args, **kwargs), made(*args, **kwargs)
        for a, b in zip(_flat(want), _flat(got), strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            if a.is_floating_point():
                limit = 1e-9 if a.dtype == torch.float64 else 2e-2
                torch.testing.assert_close(b, a, rtol=limit, atol=1e-9, equal_nan=True)
            else:
                assert torch.equal(a, b)
    assert len(made._entries) == 1
    return made


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    return [each for part in value for each in _flat(part)] if isinstance(value, tuple | list) else [value]


X = (2, 4, 7, 6)

FUNCTIONS = {
    "conv1d": lambda x: F.conv1d(x[:, :, 0], W2[:, :, 0], B2, 2, 1),
    "conv2d": lambda x: F.conv2d(x, W2, B2, stride=2, padding=1),
    "conv2d same": lambda x: F.conv2d(x, W2[:, :, :2], B2, padding="same", dilation=(1, 2)),
    "conv2d valid": lambda x: F.conv2d(x, W2, padding="valid"),
    "conv2d unbatched": lambda x: F.conv2d(x[0], W2, B2, padding=1),
    "conv2d groups": lambda x: F.conv2d(x, W2[:, :2], B2, padding=1, groups=2),
    "conv3d": lambda x: F.conv3d(x.view(2, 2, 2, 7, 6), W2.view(4, 2, 4, 3, 3)[:, :, :2], padding=1),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x[:, :, 0], W2[:4, :, 0], stride=2),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, W2[:4], B2[:4], 2, 1, 1),
    "conv_transpose2d groups": lambda x: F.conv_transpose2d(x, W2[:4], groups=2, dilation=2),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x.view(2, 2, 2, 7, 6), W2.view(2, 4, 4, 3, 3), stride=(1, 2, 1)),
    "openconv.conv2d": lambda x: openconv.conv2d(x, W2, B2, padding=1),
    "relu": F.relu, "relu6": F.relu6, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "elu": lambda x: F.elu(x, 0.7),
    "silu": F.silu, "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "hardswish": F.hardswish,
    "softplus": lambda x: F.softplus(x * 20, 2.0), "sigmoid": F.sigmoid, "tanh": F.tanh, "hardtanh": F.hardtanh,
    "mish": lambda x: F.mish(x * 3), "selu": F.selu, "celu": lambda x: F.celu(x, 0.4),
    "prelu": lambda x: (F.prelu(x, B2[:1]), F.prelu(x, B2[: x.shape[1]]), F.prelu(x[:, 0, 0], B2[: x.shape[3]])),
    "hardsigmoid": F.hardsigmoid, "dropout in inference": lambda x: F.dropout(x, 0.5, training=False),
    "methods": lambda x: x.relu().sigmoid().tanh().exp().abs().sqrt().log().neg().sin().cos().erf(),
    "operators": lambda x: (1 - x) * 2 / (x * x + 3) - (-x) + 2 / (1 + x.abs()),
    "powers": lambda x: x**2 + x**3 + x.abs() ** 0.5 + x.abs() ** 1.5 + (x.abs() + 1) ** -1 + 2**x,
    "plain and traced": lambda x: B2[:6] * x + B2[:6] - x,
    "comparisons": lambda x: (x > 0, x >= 0, x < 0, x <= 0, x == 0, x != 0, ~(x > 0), (x > 0) & (x < 1)),
    "where": lambda x: torch.where(x > 0, x, -2.0),
    "where nan": lambda x: (torch.where(x > 0, x, float("nan")), torch.where(x > 0, float("nan"), x.half())),
    "where of two": lambda x: torch.where(x > 0, x, x * 3),
    "masked_fill": lambda x: x.masked_fill(x > 0, 7.0),
    "clamp": lambda x: (x.clamp(-1, 1), x.clamp(min=0), torch.clamp(x, max=0.5), x.clamp_max(0), x.clamp_min(0)),
    "clamp by tensors": lambda x: torch.clamp(x, B2[:6], B2[:6] + 1),
    "maximum": lambda x: torch.maximum(x, -x) + torch.minimum(x, B2[:6]) + torch.max(x, x * 2) + x.max() - x.min(),
    "alpha": lambda x: torch.add(x, x, alpha=2) - torch.sub(x, 1, alpha=3),
    "atan2 and fmod": lambda x: torch.atan2(x, x + 1) + torch.fmod(x, 0.5),
    "sums": lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), torch.sum(x, dim=-1), x.mean((2, 3)), x.mean()),
    "amax": lambda x: (x.amax(1), x.amin((2, 3), keepdim=True), x.prod(1), torch.amax(x, dim=(1, 2))),
    "softmax": lambda x: (F.softmax(x, 1), torch.log_softmax(x, -1), x.softmax(dim=0)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d ceil": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "max_pool1d": lambda x: F.max_pool1d(x[:, :, 0], 2),
    "max_pool3d": lambda x: F.max_pool3d(x, (2, 3, 2)),
    "avg_pool2d": lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 1, 1, False, False)),
    "avg_pool2d ceil": lambda x: F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False),
    "avg_pool1d": lambda x: F.avg_pool1d(x[:, :, 0], 2),
    "adaptive": lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (7, 3)), F.adaptive_max_pool2d(x, 1)),
    "linear": lambda x: F.linear(x, W2[:, :2, 0].reshape(8, 6), B2),
    "linear of a vector": lambda x: F.linear(x[0, 0, 0], W2[:, :2, 0].reshape(8, 6), B2),
    "matmul": lambda x: (x @ x.mT, torch.matmul(x, B2[:6]), B2[:7] @ x[0, 0], torch.bmm(x[0], x[1].mT)),
    "addmm": lambda x: torch.addmm(B2[:4], x[0, 0], W2[:6, :4, 0, 0], beta=2, alpha=3),
    "mm": lambda x: torch.mm(x[0, 0], x[1, 1, :6, :4]),
    "vectors": lambda x: x[0, 0, 0] @ B2[:6],
    "reshape": lambda x: (x.view(2, -1), x.reshape(8, 42), x.flatten(1), torch.flatten(x), x.unflatten(1, (2, -1))),
    "permute": lambda x: (x.permute(0, 2, 3, 1), x.transpose(1, -1), torch.permute(x, (3, 2, 1, 0))),
    "transposes": lambda x: (x[0, 0].t(), x[0, 0].T, x[0].mT),
    "squeeze": lambda x: (x[:1].squeeze(0), x[:1, :, :1].squeeze(), x.unsqueeze(1), x.unsqueeze(-1)),
    "indices": lambda x: (x[0], x[:, 1:3], x[..., -1], x[:, None, ::2], x[1, :, 2:5:2, 3], x[-1, ..., :-1]),
    "split": lambda x: [*x.chunk(2, 1), *x.split(4, 2), *torch.split(x, [1, 5], 3), x.narrow(2, 1, 3)],
    "iterate": lambda x: [row * 2 for row in x],
    "cat": lambda x: (torch.cat([x, x[:, :2]], 1), torch.stack([x, -x], 1), torch.cat([x, x], dim=-1)),
    "expand": lambda x: x[:, :1].expand(2, 3, 7, 6) + x[:, :1].expand_as(x)[:, :3],
    "casts": lambda x: (x.float(), x.half(), x.to(torch.bfloat16), (x * 3).int(), (x * 3).long()),
    "mixed floats": lambda x: (x.half() + x.float(), x.half() * B2[0], x.half() * 2),
    "mixed integers": lambda x: (x.int() + 1.5, x.int() * 2, x.int() / 2, x.int() + x.half()),
    "integers": lambda x: ((x * 4).int().sum(1), (x > 0).sum(), torch.maximum(x.int(), x.int() * 2)),
    "facts": lambda x: x * x.shape[1] + x.size(2) + x.dim() + len(x) + x.numel() + x.ndim + x.dtype.is_floating_point,
    "same twice": lambda x: (x + 1,) * 2,
    "argument itself": lambda x: (x, x.view(-1)),
    "in place": lambda x: F.relu_(x * 2).add_(1).mul_(x),
    "weights alone": lambda x: x + (W2 * 2).sum() + W2.mT.sum((0, 1, 2))[0],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_torch(name):
    check(FUNCTIONS[name], rand(*X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dtypes_and_layouts(dtype, layout):
    x = rand(2, 8, 9, 9, dtype=dtype).to(memory_format=layout)
    w, b = (0.1 * rand(16, 8, 3, 3, dtype=dtype)).to(memory_format=layout), rand(16, dtype=dtype)
    made = openconv.jit(lambda x: F.relu(F.conv2d(x, w, b, padding=1)))
    want = F.relu(F.conv2d(x.double(), w.double(), b.double(), padding=1))
    got = made(x)
    assert got.dtype == dtype
    assert got.is_contiguous(memory_format=layout)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
    kernels = [kernel for kernel in made.graph_for(x).program().kernels if kernel.kind != "view"]
    assert len(kernels) == 1


def test_layouts_can_be_changed_inside():
    made = openconv.jit(lambda x: x.to(memory_format=torch.channels_last) * 2)
    x = rand(*X)
    assert made(x).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made(x), x * 2)


def test_conv_activation_and_residual_of_openconv():
    x, residual = rand(*X), rand(2, 8, 7, 6)
    function = lambda x, r: openconv.conv2d(x, W2, B2, padding=1, activation="leaky_relu(0.3)", residual=r)  # noqa: E731
    check(function, x, residual)
    with pytest.raises(NotImplementedError, match="engine of one call; a graph has one policy"):
        openconv.jit(lambda x: openconv.conv2d(x, W2, engine="cpu.naive"))(x)


# -- arguments and results --------------------------------------------------------------------------------------------


def test_structures_of_arguments_and_results():
    def function(pair, table, scale=1.0, *, last):
        a, b = pair
        return {"sum": a + b * scale, "rest": [table["x"] - last, (a, "text", None)]}

    a, b, c, d = (rand(3, 4) for _ in range(4))
    made = openconv.jit(function)
    got = made((a, b), {"x": c}, 2.0, last=d)
    torch.testing.assert_close(got["sum"], a + b * 2)
    torch.testing.assert_close(got["rest"][0], c - d)
    assert torch.equal(got["rest"][1][0], a)
    assert got["rest"][1][1:] == ("text", None)
    graph = made.graph_for((a, b), {"x": c}, 2.0, last=d)
    assert {tensor.name for tensor in graph.inputs} == {"pair.0", "pair.1", "table.x", "last"}


def test_a_signature_is_traced_once():
    seen = []

    @openconv.jit
    def function(x, factor):
        seen.append((tuple(x.shape), factor))
        return x * factor

    x = rand(2, 3, 4, 5)
    for _ in range(3):
        function(x, 2)
    function(x.clone(), 2)
    assert len(seen) == 1
    assert torch.equal(function(x, 3), x * 3)
    assert torch.equal(function(x, 3.0), x * 3)
    assert torch.equal(function(x[:1], 2), x[:1] * 2)
    assert torch.equal(function(x.float(), 2), x.float() * 2)
    channels_last = x.to(memory_format=torch.channels_last)
    assert torch.equal(function(channels_last, 2), x * 2)
    assert torch.equal(function(x.transpose(2, 3), 2), x.transpose(2, 3) * 2)
    assert len(seen) == 7
    assert function.name == "function"
    assert vars(function)["__name__"] == "function"


def test_options_are_those_of_a_graph():
    policy = openconv.Policy(engine="cpu.naive")

    @openconv.jit(policy=policy, rewrites=(), name="chosen", fuse=False)
    def function(x):
        return F.relu(F.conv2d(x, W2))

    x = rand(*X)
    graph = function.graph_for(x)
    assert graph.name == "chosen"
    assert graph.policy == policy
    assert graph.rewrites == ()
    function(x)
    assert graph.plans()[0].engines[0] == "cpu.naive"
    assert len(graph.program().kernels) == 2
    with pytest.raises(ValueError, match="rewrites has 'none'"):
        openconv.jit(rewrites=("none",))(F.relu)
    with pytest.raises(TypeError, match="jit was given 3; wanted a function or a module"):
        openconv.jit(3)  # type: ignore[call-overload]


def test_explain_names_the_kernels():
    made = openconv.jit(lambda x: F.relu(F.conv2d(x, W2, B2)))
    text = str(made.explain(rand(*X)))
    assert "conv_fprop" in text
    assert "relu" in text


def test_methods_and_nested_functions():
    class Layer:
        def __init__(self) -> None:
            self.weight = rand(8, 4, 3, 3)

        @openconv.jit
        def forward(self, x):
            return inner(F.conv2d(x, self.weight))

    @openconv.jit
    def inner(x):
        return x.relu()

    layer, x = Layer(), rand(*X)
    torch.testing.assert_close(layer.forward(x), F.conv2d(x, layer.weight).relu())
    assert [node.op for node in layer.forward.graph_for(x).nodes] == ["conv_fprop", "relu"]
    other = Layer()
    torch.testing.assert_close(other.forward(x), F.conv2d(x, other.weight).relu())


# -- tensors from elsewhere -------------------------------------------------------------------------------------------


def test_closed_over_tensors_are_passed_at_each_call():
    weight = rand(8, 4, 3, 3)

    @openconv.jit
    def function(x):
        return F.conv2d(x, weight)

    x = rand(*X)
    torch.testing.assert_close(function(x), F.conv2d(x, weight))
    weight.mul_(2)
    torch.testing.assert_close(function(x), F.conv2d(x, weight))
    weight = rand(8, 4, 3, 3)  # another tensor under the same name
    torch.testing.assert_close(function(x), F.conv2d(x, weight))
    weight = rand(5, 4, 2, 2)  # of another shape
    torch.testing.assert_close(function(x), F.conv2d(x, weight))
    assert [tensor.name for tensor in function.graph_for(x).inputs] == ["x", "weight"]


class Block(nn.Module):
    """A residual block, with what such have."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(8, 5), nn.GELU(),
    ).double()  # fmt: skip


def test_a_module_in_inference():
    model = net().eval()
    made, x = openconv.jit(model), rand(2, 3, 16, 16)
    torch.testing.assert_close(made(x), model(x))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(1.5)
        torch.testing.assert_close(made(x), model(x))
        model.float()
        torch.testing.assert_close(made(x.float()), model(x.float()), rtol=1e-4, atol=1e-5)
    assert "0.weight" in [tensor.name for tensor in made.graph_for(x.float()).inputs]


def test_a_module_in_training_keeps_running_statistics():
    torch.manual_seed(1)
    model, x = net().train(), rand(4, 3, 16, 16)
    twin = net().train()
    twin.load_state_dict(model.state_dict())
    made = openconv.jit(model)
    for _ in range(3):
        torch.testing.assert_close(made(x), twin(x))
        for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert int(model.get_buffer("1.num_batches_tracked")) == 3
    model.eval(), twin.eval()
    torch.testing.assert_close(made(x), twin(x))
    assert int(model.get_buffer("1.num_batches_tracked")) == 3


def test_a_module_learns():
    torch.manual_seed(2)
    model, x, target = net().train(), rand(4, 3, 16, 16), rand(4, 5)
    twin = net().train()
    twin.load_state_dict(model.state_dict())
    fast = openconv.jit(model)
    steps = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    calls: tuple[Callable[..., torch.Tensor], ...] = fast, twin
    for _ in range(3):
        losses = []
        for call, step in zip(calls, steps, strict=True):
            step.zero_grad()
            loss = (call(x) - target).square().mean()
            loss.backward()
            losses.append(loss)
            step.step()
        torch.testing.assert_close(*losses)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-7, atol=1e-9, msg=name)


def test_gradients_reach_arguments_and_closed_over_tensors():
    x, weight = rand(*X).requires_grad_(), rand(8, 4, 3, 3).requires_grad_()
    made = openconv.jit(lambda x: F.gelu(F.conv2d(x, weight, padding=1)).sum((2, 3)))
    loss = rand(2, 8)
    got = torch.autograd.grad(made(x), (x, weight), loss)
    want = torch.autograd.grad(F.gelu(F.conv2d(x, weight, padding=1)).sum((2, 3)), (x, weight), loss)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_batch_norm_used_twice_sees_its_own_statistics():
    norm, twin = nn.BatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
    x = rand(*X)
    made = openconv.jit(lambda x: norm(norm(x) * 2))
    for _ in range(2):
        torch.testing.assert_close(made(x), twin(twin(x) * 2))
        torch.testing.assert_close(norm.running_mean, twin.running_mean)
        torch.testing.assert_close(norm.running_var, twin.running_var)
        torch.testing.assert_close(norm.num_batches_tracked, twin.num_batches_tracked)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_without_weights(training):
    x, mean, variance = rand(*X), rand(4), rand(4).abs()
    kept = mean.clone(), variance.clone()
    made = openconv.jit(lambda x: F.batch_norm(x, mean, variance, training=training, momentum=0.3, eps=1e-3))
    torch.testing.assert_close(made(x), F.batch_norm(x, *kept, training=training, momentum=0.3, eps=1e-3))
    torch.testing.assert_close(mean, kept[0])
    torch.testing.assert_close(variance, kept[1])


def test_buffers_written_in_place_are_written_at_each_call():
    average = torch.zeros(4, dtype=torch.float64)

    @openconv.jit
    def function(x):
        average.mul_(0.5).add_(x.mean((0, 2, 3)))
        return x - average.view(1, -1, 1, 1)

    x, want = rand(*X), torch.zeros(4, dtype=torch.float64)
    for _ in range(2):
        want = want * 0.5 + x.mean((0, 2, 3))
        torch.testing.assert_close(function(x), x - want.view(1, -1, 1, 1))
        torch.testing.assert_close(average, want)


def test_many_threads_trace_once():
    seen = []

    @openconv.jit
    def function(x):
        seen.append(1)
        return F.relu(F.conv2d(x, W2))

    x = rand(*X)
    want, found = F.relu(F.conv2d(x, W2)), []
    threads = [threading.Thread(target=lambda: found.append(function(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    assert len(found) == 8
    for value in found:
        torch.testing.assert_close(value, want)


# -- what is refused --------------------------------------------------------------------------------------------------


class StraightThrough(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx, x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy


REFUSED = {
    "a function that is missing": (
        lambda x: F.interpolate(x, scale_factor=2), NotImplementedError, "cannot trace interpolate; there are .*relu",
    ),
    "a method that is missing": (lambda x: x.cumsum(0), NotImplementedError, "cannot trace Tensor.cumsum; there are"),
    "a missing method of a weight": (lambda x: x + W2.cumsum(0), NotImplementedError, "cannot trace .*cumsum"),
    "a missing function of torch": (lambda x: torch.cumsum(x, 1), NotImplementedError, "cannot trace torch.cumsum; "),
    "a gradient of its own": (StraightThrough.apply, NotImplementedError, "StraightThrough, a torch.autograd"),
    "bool": (lambda x: x if x.sum() > 0 else -x, TypeError, r"bool\(\) of a traced tensor \(\): .*torch.where"),
    "float": (lambda x: x * float(x.sum()), TypeError, r"float\(\) of a traced tensor"),
    "item": (lambda x: x * x.sum().item(), TypeError, r"item\(\) of a traced tensor"),
    "the value of a weight": (lambda x: x * float(B2[0]), TypeError, r"float\(\) of a traced tensor"),
    "the value of a buffer": (lambda x: x * B2.tolist()[0], NotImplementedError, r"tolist\(\) of a tensor of \(8,\)"),
    "numpy": (lambda x: x.numpy(), TypeError, r"numpy\(\) of a traced tensor"),
    "setitem": (lambda x: x.__setitem__(0, 1), NotImplementedError, "write into parts of a tensor"),
    "tensor indices": (lambda x: x[torch.tensor([0])], NotImplementedError, "integers, slices, None and ... alone"),
    "masks": (lambda x: x[x > 0], NotImplementedError, "integers, slices, None and ... alone"),
    "dropout": (lambda x: F.dropout(x), NotImplementedError, "graphs draw no random numbers"),
    "rand": (lambda x: x + torch.randn(6), NotImplementedError, r"randn\(\) while a function is traced"),
    "max with places": (lambda x: x.max(1), NotImplementedError, "gives places, which graphs have not"),
    "out": (lambda x: torch.add(x, x, out=B2), NotImplementedError, "out= was given"),
    "in place on an argument": (lambda x: x.relu_(), NotImplementedError, "it is an argument of the traced function"),
    "in place on a view": (lambda x: (x * 2).view(-1).relu_(), NotImplementedError, "it is a view"),
    "in place under a view": (
        lambda x: (lambda y: (y.view(-1), F.relu(y, inplace=True)))(x * 2), NotImplementedError, "shares its memory",
    ),
    "another device": (lambda x: x.to("cuda"), NotImplementedError, "graphs stay on one device"),
    "indices of a pooling": (
        lambda x: F.max_pool2d(x, 2, return_indices=True), NotImplementedError, "cannot trace max_pool2d_with_indices",
    ),
    "uneven adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 4), NotImplementedError, "windows of one size"),
    "no tensor": (lambda x: 3, TypeError, "returned 3; wanted a tensor"),
    "shapes": (lambda x: F.conv2d(x, W2[:, :3]), RuntimeError, "conv_fprop: image .* has 4 channels"),
    "an index": (lambda x: x[2], IndexError, "2 is outside of axis 0 with size 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    function, kind, match = REFUSED[name]
    before = B2.clone()
    with pytest.raises(kind, match=match):
        openconv.jit(function)(rand(*X))
    assert torch.equal(before, B2)


def test_arguments_that_cannot_be_remembered():
    with pytest.raises(TypeError, match=r"an argument cannot be remembered .*; wanted tensors, numbers"):
        openconv.jit(lambda x, y: x)(rand(2), {1, 2})


def test_autocast_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotImplementedError, match="autocast is on"):
        openconv.jit(F.relu)(rand(2, 3))


def test_detach_and_no_grad_hold_without_gradients_only():
    def function(x):
        with torch.no_grad():
            y = x * 2
        return y.detach() + x

    made, x = openconv.jit(function), rand(2, 3)
    assert torch.equal(made(x), x * 3)
    with pytest.raises(NotImplementedError, match="and a gradient is wanted"):
        made(x.requires_grad_())
    with torch.no_grad():
        assert torch.equal(made(x), x * 3)


def test_cumulative_batch_norm_is_refused():
    norm = nn.BatchNorm2d(4, momentum=None).double()
    with pytest.raises(NotImplementedError, match=r"float\(\) of a tensor"):
        openconv.jit(norm)(rand(*X))
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 0


def test_a_kept_tensor_is_of_another_trace():
    kept: list[Traced] = []

    def function(x):
        if kept:
            return x + kept[0]
        kept.append(x)
        return x * 2

    made = openconv.jit(function)
    made(rand(2))
    with pytest.raises(RuntimeError, match="is of another trace"):
        made(rand(3))
