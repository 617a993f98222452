"""The operators as PyTorch's own: opcheck, gradients of any order, compilation, autocast, vmap, modes, policies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import openconv
from openconv import plan as plan_module
from openconv.problem import Problem
from openconv.reference import random_inputs
from openconv.torch_ops import problem_of

# torch's own forward-mode derivatives use it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

FUNCTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
OPS = torch.ops.openconv
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def rank_of(name: str) -> int:
    return int(name[-2])


def random(*shape: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(requires_grad)


def operands(name: str, *, groups: int = 1, n: int = 2, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Small enough for numerical derivatives: 2 or 4 channels, 4 filters, sides of 4 and 3."""
    rank = rank_of(name)
    c, k = 2 * groups, 4
    channels = (c, k // groups) if "transpose" in name else (k, c // groups)
    x = random(n, c, *(4, 3, 3)[:rank], **kwargs)
    w = random(*channels, *(3, 2, 2)[:rank], **kwargs)
    return x, w, random(k, **kwargs)


def torchs(name: str, x: Tensor, w: Tensor, b: Tensor | None = None, *, residual: Tensor | None = None,
           activation: str | None = None, **geometry: Any) -> Tensor:  # fmt: skip
    """What the call means, said with torch alone."""
    y = getattr(F, name)(x, w, b, **geometry)
    y = y if residual is None else y + residual
    return {None: lambda t: t, "tanh": torch.tanh, "silu": F.silu, "gelu": F.gelu, "relu": F.relu}[activation](y)


# -- opcheck -----------------------------------------------------------------------------------------------------


def _sample(
    rank: int = 2, *, dtype: torch.dtype = torch.float64, groups: int = 2, bias: bool = True, residual: bool = False,
    activation: str = "", last: str = "", gradient: bool = False, policy: str = "", size: int = 5,
) -> dict[str, tuple[Any, ...]]:  # fmt: skip
    """Arguments of the three operators for one problem with two ends of padding that differ."""
    stride, dilation = [2, 1, 1][:rank], [1, 2, 1][:rank]
    padding = [1, 0, 1, 2, 0, 1][: 2 * rank]
    spatial, taps = [size, 6, 4][:rank], [3, 2, 2][:rank]
    geometry = (stride, padding, dilation, groups)
    x, w = random(2, 2 * groups, *spatial, dtype=dtype), random(2 * groups, 2, *taps, dtype=dtype)
    y = OPS.fprop(x, w, None, None, *geometry, "", "")

    def made(tensor: Tensor, place: str) -> Tensor:
        tensor = tensor.contiguous(memory_format=LAST[rank]) if place in last.split() else tensor.clone()
        return tensor.requires_grad_(gradient)

    x, w, dy = made(x, "x"), made(w, "w"), made(torch.ones_like(y), "x")
    vectors = [made(random(n, dtype=dtype), "") if bias else None for n in (2 * groups, 2 * groups)]
    added = [made(random(*t.shape, dtype=dtype, seed=3), "") if residual else None for t in (y, x)]
    return {
        "fprop": (x, w, vectors[0], added[0], *geometry, activation, policy),
        "dgrad": (dy, w, vectors[1], added[1], spatial, *geometry, activation, policy),
        "wgrad": (x, dy, taps, *geometry, policy),
    }


SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "bias": {},
    "gradient": {"gradient": True},
    "residual": {"residual": True},
    "activation": {"residual": True, "activation": "tanh"},
    "activation and gradient": {"residual": True, "activation": "silu", "gradient": True},
    "1d": {"rank": 1, "residual": True, "gradient": True},
    "3d": {"rank": 3, "residual": True, "gradient": True, "groups": 1},
    "channels last": {"last": "x w", "residual": True, "gradient": True, "groups": 1},
    "channels last input": {"last": "x", "groups": 1},
    "channels last weight": {"last": "w", "groups": 1},
    "channels last 3d": {"rank": 3, "last": "x w", "groups": 1},
    "complex": {"dtype": torch.complex128, "residual": True, "gradient": True},
    "f32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16, "activation": "relu"},
    "i8": {"dtype": torch.int8},
    "policy": {"policy": "accuracy=strict;max_workspace=0"},
    "depthwise": {"groups": 6},
}


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(op, sample):
    case = SAMPLES[sample]
    if case.get("dtype") == torch.int8:
        arguments = [v.to(torch.int8) if isinstance(v, Tensor) else v for v in _sample()[op]]
    else:
        arguments = list(_sample(**case)[op])
    # Compilation with dynamic shapes takes the most time and depends on few of the samples.
    tests: tuple[str, ...] = ("test_schema", "test_autograd_registration", "test_faketensor")
    if sample in ("activation and gradient", "1d", "3d", "channels last", "complex"):
        tests += ("test_aot_dispatch_dynamic",)
    opcheck(getattr(OPS, op).default, tuple(arguments), test_utils=tests)


def test_the_operators_check_what_they_are_given():
    x, w, _, _, *rest = _sample()["fprop"]
    for bias, residual, words in (
        (torch.ones(3, dtype=torch.float64), None, r"bias has shape \(3,\); wanted \(4,\)"),
        (torch.ones(4), None, r"torch\.float32 on cpu"),
        (
            None,
            torch.ones(1, 4, 1, 1, dtype=torch.float64),
            r"residual has shape \(1, 4, 1, 1\); wanted \(2, 4, 2, 7\)",
        ),
    ):
        with pytest.raises(RuntimeError, match=words):
            OPS.fprop(x, w, bias, residual, *rest)
    with pytest.raises(RuntimeError, match=r"do not fit 'fprop n2 .*; wanted \(2, 4, 5, 6\) and \(4, 2, 3, 2\)"):
        OPS.fprop(x, w[:, :1], None, None, *rest)


# -- gradients ---------------------------------------------------------------------------------------------------

DIFFERENTIATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride and padding": {"stride": 2, "padding": 1},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2, "padding": 1},
}


@pytest.mark.parametrize("case", DIFFERENTIATED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_first_derivatives(name, case):
    geometry = DIFFERENTIATED[case]
    x, w, b = operands(name, groups=geometry.get("groups", 1), n=1, requires_grad=True)
    function = getattr(openconv, name)
    added = torch.zeros_like(function(x, w, b, **geometry)).requires_grad_()

    def call(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
        return function(x, w, b, residual=residual, activation="tanh", **geometry)

    assert gradcheck(call, (x, w, b, added), fast_mode=True, check_forward_ad=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name):
    x, w, b = operands(name, groups=2, n=1, requires_grad=True)
    function = getattr(openconv, name)
    residual = random(requires_grad=True)

    def call(x: Tensor, w: Tensor, b: Tensor, residual: Tensor) -> Tensor:
        return function(x, w, b, stride=2, padding=1, groups=2, residual=residual, activation="silu")

    assert gradgradcheck(call, (x, w, b, residual), fast_mode=True, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_derivatives(name):
    x, w, b = operands(name, groups=2, n=1, dtype=torch.complex128, requires_grad=True)

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return getattr(openconv, name)(x, w, b, stride=2, padding=1, groups=2)

    assert gradcheck(call, (x, w, b), fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(call, (x, w, b), fast_mode=True)


@pytest.mark.parametrize("activation", ["relu", "gelu", None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_torchs(name, activation):
    geometry: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
    x, w, b = operands(name, groups=2, requires_grad=True)
    residual = torch.full((4, *[1] * rank_of(name)), 0.1, dtype=torch.float64, requires_grad=True)
    wanted = torchs(name, x, w, b, activation=activation, residual=residual, **geometry)
    got = getattr(openconv, name)(x, w, b, activation=activation, residual=residual, **geometry)
    weight = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view_as(got)
    leaves = (x, w, b, residual)
    assert_close(got, wanted)
    for ours, theirs in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (got, wanted)), strict=True):
        assert_close(ours, theirs)


def test_only_the_gradients_that_are_wanted_are_computed():
    x, w, b = operands("conv2d")

    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "openconv":
                self.ops.append(func._opname)
            return func(*args, **(kwargs or {}))

    for wanted, passes in ((x, ["fprop", "dgrad"]), (w, ["fprop", "wgrad"]), (b, ["fprop"])):
        wanted.requires_grad_()
        with Log() as log:
            openconv.conv2d(x, w, b).sum().backward()
        wanted.requires_grad_(False)
        assert log.ops == passes


def test_channels_last_gradients():
    x, w, b = (t.requires_grad_() for t in operands("conv2d"))
    y = openconv.conv2d(x.contiguous(memory_format=torch.channels_last), w, b)
    assert y.is_contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(
        *(torch.autograd.grad(t.square().sum(), (x, w, b)) for t in (y, F.conv2d(x, w, b))), strict=True
    ):
        assert_close(ours, theirs)


def test_the_graph_lets_go_of_its_tensors_after_the_backward_pass():
    x, w, b = operands("conv2d", requires_grad=True)
    middle = 2 * x
    alive = weakref.ref(middle)
    loss = openconv.conv2d(middle, w, b).sum()
    del middle
    assert alive() is not None
    loss.backward()
    assert alive() is None


# -- forward mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_forward_mode(name):
    x, w, b = operands(name, groups=2)
    tangents = tuple(torch.ones_like(t) for t in (x, w, b))

    def call(module: Any) -> Any:
        return lambda x, w, b: module(name, x, w, b)

    ours = lambda name, x, w, b: getattr(openconv, name)(x, w, b, groups=2, activation="tanh")  # noqa: E731
    theirs = lambda name, x, w, b: torchs(name, x, w, b, groups=2, activation="tanh")  # noqa: E731
    for some in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):

        def partial(function: Any, some: slice = some) -> Any:
            def run(*given: Tensor) -> Tensor:
                whole = [x, w, b]
                whole[some] = given
                return call(function)(*whole)

            return jvp(run, (x, w, b)[some], tangents[some])

        assert_close(partial(ours), partial(theirs))


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
def test_dual_numbers(grad_mode):
    x, w, b = operands("conv2d")
    results = []
    for function in (openconv.conv2d, F.conv2d):
        with forward_ad.dual_level(), grad_mode():
            y = function(forward_ad.make_dual(x, torch.ones_like(x)), w, b)
            results.append(forward_ad.unpack_dual(y).tangent)
    assert_close(*results)


# -- torch.func --------------------------------------------------------------------------------------------------

MAPPED = {
    "x": (0, None, None, None),
    "w": (None, 0, None, None),
    "bias": (None, None, 0, None),
    "residual": (None, None, None, 0),
    "x and w": (0, 0, None, None),
    "all": (0, 0, 0, 0),
    "other axes": (2, 1, 1, -1),
}


@pytest.mark.parametrize("case", MAPPED)
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_vmap(name, case):
    geometry = {"stride": 2, "padding": 1, "groups": 2}
    dims = MAPPED[case]
    x, w, b = operands(name, groups=2)
    residual = random(*getattr(F, name)(x, w, b, **geometry).shape)

    def stacked(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else torch.stack([tensor, 2 * tensor, tensor - 1], dim)

    given = [stacked(t, d) for t, d in zip((x, w, b, residual), dims, strict=True)]

    def call(function: Callable[..., Tensor]) -> Tensor:
        run = lambda x, w, b, r: function(x, w, b, residual=r, activation="tanh", **geometry)  # noqa: E731
        return vmap(run, dims)(*given)

    theirs = lambda *args, **kwargs: torchs(name, *args, **kwargs)  # noqa: E731
    assert_close(call(getattr(openconv, name)), call(theirs))


def test_vmap_without_a_batch_nested_and_chunked():
    x, w, b = random(3, 5, 2, 6, 4), random(5, 4, 2, 3, 2), random(4)

    def call(function: Callable[..., Tensor]) -> Tensor:
        inner = vmap(lambda x, w: function(x, w, b), (0, 0))
        return vmap(lambda x: inner(x, w), 0, chunk_size=2)(x)

    assert_close(call(openconv.conv2d), call(F.conv2d))


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d", "conv3d"])
def test_per_sample_gradients(name):
    x, w, b = operands(name, groups=2, n=3)

    def call(function: Callable[..., Tensor]) -> Any:
        loss = lambda w, b, x: function(x, w, b, groups=2).square().sum()  # noqa: E731
        return vmap(grad(loss, (0, 1)), (None, None, 0))(w, b, x)

    ours, theirs = call(getattr(openconv, name)), call(getattr(F, name))
    assert_close(ours, theirs)
    assert ours[0].shape == (3, *w.shape)


def test_gradient_of_a_vmap_and_vjp():
    x, w, b = random(3, 2, 2, 5, 4), random(3, 4, 2, 3, 2), random(4)

    def call(function: Callable[..., Tensor]) -> Any:
        loss = lambda w: vmap(lambda x, w: function(x, w, b, activation="tanh"), (0, 0))(x, w).sum()  # noqa: E731
        pull: Any = vjp(lambda w: function(x[0], w[0], b), w)[1]
        return grad(loss)(w), pull(torch.ones(2, 4, 3, 3, dtype=torch.float64))

    theirs = lambda *args, activation=None: torchs("conv2d", *args, activation=activation)  # noqa: E731
    assert_close(call(openconv.conv2d), call(theirs))


def test_jacobians_and_hessian():
    x, w = random(1, 2, 3, 3), random(2, 2, 2, 2)

    def call(function: Callable[..., Tensor]) -> Any:
        run = lambda w: function(x, w, padding=1)  # noqa: E731
        return jacrev(run)(w), jacfwd(run)(w), hessian(lambda w: run(w).pow(3).sum())(w)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(call(openconv.conv2d), call(F.conv2d))


def test_functional_call_of_a_module():
    layer = openconv.nn.Conv2d(2, 4, 3).double()
    x = random(3, 2, 5, 5)
    weights = {name: value.detach() * 2 for name, value in layer.named_parameters()}
    wanted = F.conv2d(x, weights["weight"], weights["bias"])
    assert_close(functional_call(layer, weights, (x,)), wanted)
    ensemble = {name: torch.stack([value, -value]) for name, value in weights.items()}
    assert_close(vmap(lambda p: functional_call(layer, p, (x,)))(ensemble), torch.stack([wanted, -wanted]))


# -- torch.compile -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile(name):
    x, w, b = operands(name, groups=2, dtype=torch.float32)

    def model(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = getattr(openconv, name)(x.sin(), w, b, stride=2, padding=1, groups=2, activation="leaky_relu(0.2)")
        return getattr(openconv, name)(x[0], w, residual=y.sum(), groups=2, engine="cpu.naive")

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, w, b), model(x, w, b))
    w.requires_grad_()
    gradients = [torch.autograd.grad(f(x, w, b).square().sum(), w)[0] for f in (compiled, model)]
    assert_close(*gradients)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_with_dynamic_shapes_compiles_once():
    x, w, b = operands("conv2d", dtype=torch.float32)

    def model(x: Tensor) -> Tensor:
        return openconv.conv2d(x, w, b, stride=2, padding="valid") if x.shape[0] else x

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for n, h, width in ((5, 7, 9), (6, 8, 11), (8, 12, 10)):
        x = random(n, 2, h, width, dtype=torch.float32)
        assert_close(compiled(x), model(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = openconv.nn.Conv2d(3, 4, 3, padding=1, activation="relu")
        self.depthwise = openconv.nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = openconv.nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.up(self.depthwise(x, residual=x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_training_step_under_compile():
    losses: list[list[float]] = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        net = Net()
        step = torch.optim.SGD(net.parameters(), lr=0.1)
        x = random(2, 3, 6, 6, dtype=torch.float32)
        forward = wrap(net)
        losses.append([])
        for _ in range(3):
            loss = forward(x).square().mean()
            step.zero_grad()
            loss.backward()
            step.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # one f32 rounding or two a step
    assert losses[0][2] < losses[0][0]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler for Inductor"
)
def test_inductor():
    x, w, b = operands("conv2d", dtype=torch.float32)

    def model(x: Tensor) -> Tensor:
        return openconv.conv2d(x.sin(), w, b, padding=1, activation="relu").transpose(1, 3) + 1

    compiled = torch.compile(model, fullgraph=True)
    for last in (torch.contiguous_format, torch.channels_last):
        assert_close(compiled(x.contiguous(memory_format=last)), model(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_export():
    program = torch.export.export(Net(), (random(2, 3, 6, 6, dtype=torch.float32),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum(target.startswith("openconv.") for target in targets) == 3
    x = random(2, 3, 6, 6, dtype=torch.float32, seed=1)
    assert program.module()(x).shape == (2, 2, 12, 12)


# -- autocast ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose2d"])
def test_autocast(name):
    x, w, b = operands(name, dtype=torch.float32)
    w.requires_grad_()
    b.requires_grad_()
    gradients = []
    for function in (getattr(openconv, name), getattr(F, name)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x, w, b)
        assert y.dtype == torch.bfloat16
        gradients.append((y.detach(), *torch.autograd.grad(y.float().square().sum(), (w, b))))
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.dtype == theirs.dtype
        # bf16 has 8 bits: each of a few roundings is worth 2^-9 of the largest value.
        assert_close(ours, theirs, rtol=2**-6, atol=2**-6 * float(theirs.abs().max()))


def test_autocast_inside_transforms():
    x, w, b = operands("conv2d", n=3, dtype=torch.float32)

    def run(w: Tensor, x: Tensor) -> Tensor:
        y = openconv.conv2d(x, w, b)
        assert y.dtype == torch.bfloat16
        return y.float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = vmap(grad(run), (None, 0))(w, x)
    wanted = vmap(grad(lambda w, x: F.conv2d(x, w, b).square().sum()), (None, 0))(w, x)
    assert_close(got, wanted, rtol=2**-5, atol=2**-5 * float(wanted.abs().max()))


def test_autocast_mixes_as_torch_does():
    x, w, b = operands("conv2d", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert openconv.conv2d(x.bfloat16(), w, b, residual=torch.ones(1)).dtype == torch.bfloat16
        assert openconv.conv2d(x.double(), w.double(), b.double()).dtype == torch.float64
        with pytest.raises(RuntimeError):
            F.conv2d(x.double(), w.double(), b)
        with pytest.raises(RuntimeError, match=r"torch\.float64 on cpu, torch\.bfloat16 on cpu"):
            openconv.conv2d(x.double(), w.double(), b)
        with torch.autocast("cpu", enabled=False):
            assert openconv.conv2d(x, w, b).dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert openconv.conv2d(x, w, b).dtype == torch.float16


# -- fake and meta tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_meta_tensors_have_the_right_shape(name):
    x, w, b = operands(name, groups=2)
    geometry = {"stride": 2, "padding": 1, "groups": 2}
    got = getattr(openconv, name)(x.to("meta"), w.to("meta"), b.to("meta"), **geometry)
    real = getattr(openconv, name)(x, w, b, **geometry)
    assert got.is_meta
    assert (got.shape, got.stride(), got.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("last", [(), ("x",), ("w",), ("x", "w")])
@pytest.mark.parametrize("name", [f for f in FUNCTIONS if rank_of(f) > 1])
def test_fake_tensors_have_the_strides_of_real_ones(name, last):
    order = LAST[rank_of(name)]
    x, w, _ = operands(name)
    x = x.contiguous(memory_format=order) if "x" in last else x
    w = w.contiguous(memory_format=order) if "w" in last else w
    real = getattr(openconv, name)(x, w)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = getattr(openconv, name)(mode.from_tensor(x), mode.from_tensor(w))
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


# -- other ways in -----------------------------------------------------------------------------------------------


def test_the_profiler_sees_the_operators():
    x, w, _ = operands("conv2d")
    openconv.conv2d(x, w)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        openconv.conv2d(x, w)
    assert "openconv::fprop" in {event.key for event in profile.key_averages()}


def test_subclasses_stay_subclasses():
    class Tagged(Tensor):
        pass

    x, w, b = operands("conv2d")
    got = openconv.conv2d(x.as_subclass(Tagged), w, b)
    assert type(got) is Tagged
    assert_close(got.as_subclass(Tensor), F.conv2d(x, w, b))


def test_symbolic_trace_records_the_call():
    layer = openconv.nn.Conv2d(2, 4, 3, padding=1).double()
    traced = torch.fx.symbolic_trace(layer)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [openconv.conv2d]
    x = random(1, 2, 5, 5)
    assert_close(traced(x), F.conv2d(x, layer.weight, layer.bias, padding=1))


@pytest.mark.filterwarnings("ignore")
def test_a_jit_trace_is_no_constant():
    x, w, _ = operands("conv2d")
    traced = torch.jit.trace(lambda x: openconv.conv2d(x, w), x)
    assert_close(traced(2 * x), F.conv2d(2 * x, w))


def test_default_device_and_saved_tensor_hooks():
    x, w, b = operands("conv2d", requires_grad=True)
    with torch.device("meta"):
        assert not openconv.conv2d(x, w, b).is_meta
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        openconv.conv2d(x, w, b).sum().backward()
    assert packed == [x.shape, w.shape]


# -- policies ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch):
    """(direction, engine) of every choice made."""
    seen: list[tuple[str, str]] = []
    choose = plan_module.choose  # type: ignore[attr-defined]

    def recording(problem, device, policy):
        candidate = choose(problem, device, policy)
        seen.append((problem.direction, candidate.engine.name))
        return candidate

    monkeypatch.setattr(plan_module, "choose", recording)
    return seen


PASSES = {"fprop", "dgrad", "wgrad"}


def test_an_engine_asked_for_also_runs_the_backward_pass(ran):
    x, w = random(1, 2, 13, 5, requires_grad=True), random(3, 2, 3, 3, requires_grad=True)  # sizes of no other test
    openconv.conv2d(x, w, engine="cpu.naive").sum().backward()
    assert set(ran) == {(direction, "cpu.naive") for direction in PASSES}
    ran.clear()
    with openconv.policy(engine="cpu.im2col_gemm"):
        y = openconv.conv2d(x, w)
    y.sum().backward()  # outside of the block: what held for the forward pass holds for its backward pass
    assert set(ran) == {(direction, "cpu.im2col_gemm") for direction in PASSES}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_passes_prefer_an_engine_and_do_not_insist(monkeypatch, compiled):
    from openconv.cpu.naive import Naive

    def refusals(self, problem, device):
        if problem.direction != "fprop":
            yield f"direction is {problem.direction}; wanted fprop"

    monkeypatch.setattr(Naive, "refusals", refusals)
    sizes = (14, 5) if compiled else (14, 6)
    x, w = random(1, 2, *sizes, requires_grad=True), random(3, 2, 3, 3, requires_grad=True)
    run = torch.compile(openconv.conv2d, backend="aot_eager", fullgraph=True) if compiled else openconv.conv2d
    with openconv.policy(engine="cpu.naive"):
        y = run(x, w)
        y.sum().backward()
        with pytest.raises(openconv.UnsupportedProblem, match="direction is dgrad"):
            openconv.conv_transpose2d(x, w.transpose(0, 1))
    assert x.grad is not None


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_follows_the_policy_in_force(ran):
    x, w = random(1, 2, 15, 5), random(3, 2, 3, 3)
    compiled = torch.compile(lambda x, w: openconv.conv2d(x, w), backend="aot_eager", fullgraph=True)
    for engine in ("cpu.naive", "cpu.im2col_gemm"):
        with openconv.policy(engine=engine):
            compiled(x, w)
    assert ran == [("fprop", "cpu.naive"), ("fprop", "cpu.im2col_gemm")]


def test_environment_chooses_the_engine():
    code = (
        "import torch, openconv, openconv.plan as p\n"
        "x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3, requires_grad=True)\n"
        "openconv.conv2d(x, w).sum().backward()\n"
        "print(*{plan.candidate.engine.name for plan in p._plans.values()})\n"
        "try: openconv.conv2d(x, w, engine='cpu.nobody')\n"
        "except ValueError as error: print(error)\n"
    )
    source = str(Path(openconv.__file__).parents[1])
    environment = {**os.environ, "OPENCONV_ENGINE": "cpu.naive", "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "cpu.naive"
    assert "no engine 'cpu.nobody'" in second


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_call_s_problem_is_the_one_that_suites_and_databases_name(layout):
    """Filters of one channel or one tap are in both layouts, and must not make another problem of it."""
    for text in (
        "n2 c8 h6 w5 k8 r3 s3 pad1 g8",
        "n2 c6 h5 w4 k9 r1 s1",
        "n2 c4 h5 w6 k6 r3 s3",
    ):
        for direction in ("fprop", "dgrad", "wgrad"):
            problem = Problem.parse(f"{direction} {text} f32 {layout}")
            inputs = random_inputs(problem)
            found = problem_of(
                direction, inputs.a, inputs.b, size=problem.spatial, filter=problem.filter, stride=problem.stride,
                padding=[v for pair in problem.padding for v in pair], dilation=problem.dilation, groups=problem.groups,
            )  # fmt: skip
            assert found == problem
