"""Modules against torch's, and models that are converted or patched against themselves."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

import openconv

KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
MODES = ("zeros", "reflect", "replicate", "circular")


def rank_of(kind: str) -> int:
    return int(kind[-2])


def image(kind: str, channels: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    return torch.randn(2, channels, *(7, 6, 5)[: rank_of(kind)], dtype=torch.float64, generator=generator)


def pair(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """torch's module and openconv's with the same weights."""
    theirs = getattr(nn, kind)(*args, **kwargs, dtype=torch.float64)
    ours = getattr(openconv.nn, kind)(*args, **kwargs, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


# -- modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_same_arguments_same_results(kind):
    for kwargs in ({}, {"stride": 2, "padding": 1, "groups": 2}, {"dilation": 2, "bias": False}):
        theirs, ours = pair(kind, 4, 6, 3, **kwargs)
        x = image(kind)
        assert_close(ours(x), theirs(x))
        assert_close(ours(x[0]), theirs(x[0]))
        assert isinstance(ours, getattr(nn, kind))
        assert str(ours) == str(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_same_initialisation(kind):
    torch.manual_seed(3)
    theirs = getattr(nn, kind)(4, 6, 3)
    torch.manual_seed(3)
    ours = getattr(openconv.nn, kind)(4, 6, 3)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize("padding", [1, 2, "same", "valid"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_padding_modes(kind, mode, padding):
    theirs, ours = pair(kind, 4, 6, 3, padding=padding, padding_mode=mode, dilation=1 if padding == 2 else 2)
    x = image(kind)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", KINDS[3:])
def test_output_size(kind):
    theirs, ours = pair(kind, 4, 6, 3, stride=2, output_padding=1)
    x = image(kind)
    smallest = getattr(nn, kind)(4, 6, 3, stride=2).double()(x).shape
    for size in (None, list(smallest), [n + 1 for n in smallest[2:]]):
        assert_close(ours(x, output_size=size), theirs(x, output_size=size))
        assert_close(ours(x, size), theirs(x, size))
    with pytest.raises(ValueError, match="output size"):
        ours(x, [99] * rank_of(kind))
    with pytest.raises(ValueError, match="zeros"):
        getattr(openconv.nn, kind)(4, 6, 3, padding_mode="reflect")


@pytest.mark.parametrize("kind", KINDS)
def test_activation_and_residual(kind):
    theirs, ours = pair(kind, 4, 6, 3, padding=1)
    ours.activation = "relu"
    x = image(kind)
    wanted = theirs(x)
    residual = torch.ones_like(wanted)
    assert_close(ours(x), F.relu(wanted))
    assert_close(ours(x, residual=residual), F.relu(wanted + residual))
    assert_close(
        getattr(openconv.nn, kind)(4, 6, 3, activation="tanh").float()(x.float()).abs().max() < 1, torch.tensor(True)
    )


def test_options_reach_the_function_and_are_printed():
    layer = openconv.nn.Conv2d(4, 6, 3, activation="relu", engine="cpu.gemm_1x1", accuracy="strict", max_workspace=0)
    assert str(layer).endswith("activation='relu', engine='cpu.gemm_1x1', accuracy='strict', max_workspace=0)")
    with pytest.raises(openconv.UnsupportedProblem, match=r"cpu\.gemm_1x1: filter is \(3, 3\)"):
        layer(torch.ones(1, 4, 5, 5))
    layer.engine = None
    assert layer(torch.ones(1, 4, 5, 5)).shape == (1, 6, 3, 3)
    for bad, error in (
        ({"activation": "fast"}, ValueError),
        ({"accuracy": "loose"}, ValueError),
        ({"engine": 3}, TypeError),
    ):
        with pytest.raises(error):
            openconv.nn.Conv2d(4, 6, 3, **bad)
    with pytest.raises(TypeError):
        openconv.nn.Conv2d(4, 6, 3, 1, 0, 1, 1, True, "zeros", None, None, "relu")  # options go by keyword


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind):
    layer = getattr(openconv.nn, kind)(4, 6, 3, activation="silu", engine="cpu.naive").double()
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    x = image(kind)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stored, weights_only=False),
    ):
        assert type(other) is type(layer)
        assert (other.activation, other.engine) == ("silu", "cpu.naive")
        assert other.weight is not layer.weight
        assert torch.equal(other(x), layer(x))


def test_state_dicts_are_torchs():
    assert set(openconv.nn.Conv2d(4, 6, 3, activation="relu").state_dict()) == {"weight", "bias"}
    theirs = nn.Conv2d(4, 6, 3)
    ours = openconv.nn.Conv2d(4, 6, 3, activation="relu")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 4, 5, 5)
    assert_close(ours(x), F.relu(theirs(x)))


# -- convert -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with a projection where the shape changes."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.norm2 = nn.Conv2d(k, k, 3, 1, 1, bias=False), nn.BatchNorm2d(k)
        self.project = nn.Conv2d(c, k, 1, stride, bias=False) if stride != 1 or c != k else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.project(x))


class Separable(nn.Module):
    """A depthwise convolution and a 1x1."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pointwise(F.gelu(self.depthwise(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2), Separable(12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def resnet(dtype: torch.dtype = torch.float64) -> ResNet:
    torch.manual_seed(0)
    return ResNet().to(dtype)


def train(model: nn.Module, steps: int = 4) -> list[float]:
    """The losses of a few steps, forwards and backwards."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=generator)
    labels = torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Sums of at most some hundred products in f64, each off by 1e-16, grow by a few hundred on the way through batch norms
# and four steps; 1e-10 leaves room for that, and no wrong gradient is as small.
CLOSE = 1e-10


def test_a_converted_model_trains_as_before():
    wanted = train(resnet())
    model = resnet()
    report = openconv.convert(model)
    assert report.model is model
    assert [m.name for m in report.swapped] == [
        "stem", "blocks.0.conv1", "blocks.0.conv2", "blocks.1.conv1", "blocks.1.conv2", "blocks.1.project",
        "blocks.2.depthwise", "blocks.2.pointwise",
    ]  # fmt: skip
    assert report.left == ()
    assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)} == {openconv.nn.Conv2d}
    assert train(model) == pytest.approx(wanted, rel=CLOSE)
    assert wanted[-1] < wanted[0]


def test_a_patched_model_trains_as_before():
    wanted = train(resnet())
    with openconv.patch() as patched:
        assert train(resnet()) == pytest.approx(wanted, rel=CLOSE)
    assert dict(patched.calls) == {"conv2d": 4 * 8}
    assert str(patched) == "32 calls went through openconv: 32 conv2d"


def test_single_precision_and_channels_last():
    x = torch.randn(2, 3, 12, 12)
    model = resnet(torch.float32).eval()
    with torch.no_grad():
        wanted = model(x)
        converted: Any = openconv.convert(model, inplace=False).model
        assert converted is not model
        assert type(model.stem) is nn.Conv2d
        for layout in (torch.contiguous_format, torch.channels_last):
            # f32 rounds at 6e-8; a few hundred terms a layer, eight layers
            got = converted.to(memory_format=layout)(x.contiguous(memory_format=layout))
            assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_converting_changes_nothing_but_the_class():
    model = resnet()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    inner: Any = model.blocks[0].conv1
    inner.register_forward_hook(lambda *_: calls.append("forward"))
    inner.register_full_backward_hook(lambda *_: calls.append("backward"))
    before = {name: id(module) for name, module in model.named_modules()}
    openconv.convert(model)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all(value is parameters[name] for name, value in model.named_parameters())
    kept = model.stem.weight.detach().clone()
    model(torch.randn(2, 3, 12, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert calls == ["forward", "backward"]
    assert not torch.equal(model.stem.weight, kept)


def test_back_again():
    model = resnet()
    openconv.convert(model, accuracy="strict")
    assert model.stem.accuracy == "strict"
    report = openconv.convert(model, back=True)
    assert len(report.swapped) == 8
    assert str(report).splitlines()[0] == "ResNet: 8 convolutions swapped for torch's, 0 left"
    for module, untouched in zip(model.modules(), resnet().modules(), strict=True):
        assert type(module) is type(untouched)
        assert vars(module).keys() == vars(untouched).keys()


def test_a_fused_activation_cannot_go_back():
    model = nn.Sequential(openconv.nn.Conv2d(2, 3, 1, activation="relu"), openconv.nn.Conv2d(3, 2, 1))
    report = openconv.convert(model, back=True)
    assert [m.name for m in report.swapped] == ["1"]
    assert report.left[0].reason == "it fuses 'relu', which torch's Conv2d cannot"
    assert type(model[0]) is openconv.nn.Conv2d


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_a_convolution(kind):
    layer = getattr(nn, kind)(4, 6, 3).double()
    x = image(kind)
    wanted = layer(x)
    report = openconv.convert(layer)
    assert report.model is layer
    assert type(layer) is getattr(openconv.nn, kind)
    assert report.swapped[0].name == ""
    assert "(model)" in str(report)
    assert_close(layer(x), wanted)


class Centred(nn.Conv2d):
    """What weight standardisation does: a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(input, weight, self.bias)


class Named(nn.Conv2d):
    pass


def test_what_is_left_and_why():
    replaced = nn.Conv2d(2, 2, 1)
    replaced.forward = lambda x: x  # type: ignore[method-assign, assignment]
    model = nn.Sequential(nn.Conv2d(2, 2, 3), Centred(2, 2, 1), Named(2, 2, 1), replaced, nn.ReLU())
    report = openconv.convert(model)
    assert str(report).splitlines() == [
        "Sequential: 1 convolution swapped for openconv's, 3 left",
        "  0  Conv2d(2, 2, kernel_size=(3, 3), stride=(1, 1))",
        "left as they are:",
        "  1  Centred(2, 2, kernel_size=(1, 1), stride=(1, 1)): a subclass of torch's Conv2d with a forward of its own",
        "  2  Named(2, 2, kernel_size=(1, 1), stride=(1, 1)): a subclass of torch's Conv2d with code of its own",
        "  3  Conv2d(2, 2, kernel_size=(1, 1), stride=(1, 1)): its forward was replaced on the instance",
    ]
    assert [type(m) for m in model] == [openconv.nn.Conv2d, Centred, Named, nn.Conv2d, nn.ReLU]
    again = openconv.convert(model)
    assert again.swapped == ()
    assert len(again.left) == 3
    with openconv.patch() as patched:
        model(torch.randn(1, 2, 6, 6))
    assert patched.calls["conv2d"] == 2  # what convert had to leave


def test_a_subclass_may_derive_from_openconvs():
    class Ours(openconv.nn.Conv2d):
        def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return self._conv_forward(input, 2 * self.weight, self.bias, residual)

    layer = Ours(2, 3, 1, bias=False)
    x = torch.randn(1, 2, 4, 4)
    assert_close(layer(x), F.conv2d(x, 2 * layer.weight))
    assert openconv.convert(nn.Sequential(layer)).left == ()
    (left,) = openconv.convert(nn.Sequential(layer), back=True).left
    assert "a subclass of openconv's Conv2d with a forward of its own" in left.reason


def test_no_model():
    with pytest.raises(TypeError, match="model is of type Tensor"):
        openconv.convert(torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'loose'"):
        openconv.convert(nn.Conv2d(1, 1, 1), accuracy="loose")
    assert str(openconv.convert(nn.ReLU())) == "ReLU: 0 convolutions swapped for openconv's, 0 left"


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_modules_follow_when_they_learn_their_sizes(kind):
    model = nn.Sequential(getattr(nn, f"Lazy{kind}")(6, 3))
    report = openconv.convert(model)
    assert [m.name for m in report.swapped] == ["0"]
    assert openconv.convert(model).swapped == ()
    x = image(kind).float()
    first = model(x)
    assert type(model[0]) is getattr(openconv.nn, kind)
    assert_close(model(x), first)
    openconv.convert(model, back=True)
    assert type(model[0]) is getattr(nn, kind)
    assert_close(model(x), first)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_modules(norm):
    torch.manual_seed(0)
    layer = norm(nn.Conv2d(2, 3, 3).double()).eval()
    twin = copy.deepcopy(layer)  # shares its class with the first
    x = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    wanted = layer(x)
    report = openconv.convert(layer)
    assert len(report.swapped) == 1
    assert isinstance(layer, openconv.nn.Conv2d)
    assert not isinstance(twin, openconv.nn.Conv2d)
    assert parametrize.is_parametrized(layer, "weight")
    assert_close(layer(x), wanted)
    assert_close(copy.deepcopy(layer)(x), wanted)
    layer(x).sum().backward()
    originals = [p for name, p in layer.named_parameters() if "parametrizations" in name]
    assert originals
    assert all(p.grad is not None for p in originals)
    other = copy.deepcopy(layer)
    openconv.convert(other, back=True)
    assert not isinstance(other, openconv.nn.Conv2d)
    assert_close(other(x), wanted)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is openconv.nn.Conv2d
    assert_close(layer(x), wanted)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_that_compute_the_weight():
    layer: Any = nn.utils.weight_norm(nn.Conv2d(2, 3, 3))
    x = torch.randn(1, 2, 5, 5)
    wanted = layer(x)
    openconv.convert(layer)
    with torch.no_grad():
        layer.weight_g *= 2
    assert_close(layer(x) - layer.bias[:, None, None], 2 * (wanted - layer.bias[:, None, None]))


def test_a_module_in_two_places_is_swapped_once():
    shared = nn.Conv2d(2, 2, 1)
    assert len(openconv.convert(nn.Sequential(shared, nn.ReLU(), shared)).swapped) == 1


def test_a_converted_model_can_be_stored():
    model = openconv.convert(resnet()).model
    x = torch.randn(1, 3, 12, 12, dtype=torch.float64)
    model.eval()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    fresh = resnet()
    fresh.load_state_dict(model.state_dict())
    assert_close(fresh.eval()(x), model(x))


# -- patch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_call(kind):
    name = kind.replace("Conv", "conv").replace("Transpose", "_transpose")
    layer = getattr(nn, kind)(4, 6, 3, stride=2).double()
    x, w, b = image(kind), layer.weight, layer.bias
    wanted = layer(x)
    with openconv.patch() as patched:
        results = [
            getattr(F, name)(x, w, b, 2),
            getattr(torch, name)(x, w, b, (2,) * rank_of(kind)),
            getattr(F, name)(input=x, weight=w, bias=b, stride=2),
            getattr(F, name)(x, w, stride=2, bias=b, padding=0),
            layer(x),
        ]
    assert dict(patched.calls) == {name: 5}
    for result in results:
        assert "openconv" in type(result.grad_fn).__name__.lower() or "openconv" in str(result.grad_fn).lower()
        assert_close(result, wanted)
    assert "convolution" in str(getattr(F, name)(x, w, b, 2).grad_fn).lower()


def test_patches_nest_and_end():
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3, requires_grad=True)
    with openconv.patch() as outer:
        F.conv2d(x, w)
        with openconv.patch() as inner:
            F.conv2d(x, w)
            openconv.conv2d(x, w)
        F.conv2d(x, w)
    assert (outer.calls.total(), inner.calls.total()) == (2, 1)

    def fail() -> None:
        with openconv.patch():
            F.conv2d(x, w[0])

    with pytest.raises(RuntimeError, match=r"conv2d: expected a 4D weight, got weight of size \[1, 3, 3\]"):
        fail()
    assert "convolution" in str(F.conv2d(x, w).grad_fn).lower()


def test_a_patch_can_be_entered_again_and_other_functions_pass():
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    patched = openconv.patch()
    for _ in range(2):
        with patched:
            y = F.relu(F.conv2d(x, w) + torch.ones(1)).sum()
            assert y == 10
            assert torch.nn.Linear(2, 3)(torch.ones(2)).shape == (3,)
    assert dict(patched.calls) == {"conv2d": 2}


def test_gradients_of_patched_calls_outside_of_the_block():
    x, w = (
        torch.randn(1, 2, 5, 5, dtype=torch.float64),
        torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True),
    )
    with openconv.patch():
        loss = F.conv2d(x, w).square().sum()
    assert_close(torch.autograd.grad(loss, w), torch.autograd.grad(F.conv2d(x, w).square().sum(), w))


def test_other_threads_are_not_patched():
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3, requires_grad=True)
    seen: list[str] = []
    with openconv.patch() as patched:
        thread = threading.Thread(target=lambda: seen.append(str(F.conv2d(x, w).grad_fn)))
        thread.start()
        thread.join()
    assert "convolution" in seen[0].lower()
    assert patched.calls.total() == 0


def test_a_patch_holds_inside_compiled_code():
    torch._dynamo.reset()
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with openconv.patch() as patched:
        got = torch.compile(lambda x: F.conv2d(x, w), backend=backend, fullgraph=True)(x)
    assert_close(got, F.conv2d(x, w))
    assert "openconv.fprop" in graphs[0].code
    assert patched.calls["conv2d"] == 1
    torch._dynamo.reset()
