"""convert(model, fuse=True): what is folded computes what it did, and what must not be folded is not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import openconv
from openconv.bench.models import MODELS

KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")


def trained(model: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """The model in eval mode, with norms as training could have left them: nothing is 0 or 1 to hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.affine:
                nn.init.normal_(module.weight, 1, 0.3, generator=generator)
                nn.init.normal_(module.bias, 0, 0.5, generator=generator)
    return model.to(dtype).eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def same_after(model: nn.Module, *inputs: Tensor, folds: int) -> openconv.nn.Conversion:
    """Convert with fuse, and compare: f64, where 1e-10 is far above rounding and far below any mistake."""
    wanted = model(*inputs)
    before = norms(model)
    report = openconv.convert(model, fuse=True)
    assert_close(model(*inputs), wanted, rtol=1e-10, atol=1e-10)
    assert norms(model) == before - folds
    assert sum(bool(each.norm) for each in report.fused) == folds
    return report


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 9, 9)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Bottleneck(nn.Module):
    """As torchvision has it: one ReLU called three times, a sum in place, a projection in a Sequential."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, k, 1, bias=False), nn.BatchNorm2d(k)
        self.conv2, self.bn2 = nn.Conv2d(k, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.conv3, self.bn3 = nn.Conv2d(k, 2 * k, 1, bias=False), nn.BatchNorm2d(2 * k)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or c != 2 * k:
            self.downsample = nn.Sequential(nn.Conv2d(c, 2 * k, 1, stride, bias=False), nn.BatchNorm2d(2 * k))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Bottleneck(8, 4, 1), Bottleneck(8, 6, 2))
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(F.max_pool2d(self.stem(x), 3, 2, 1)).mean((2, 3)))


class Pair(nn.Module):
    """A convolution and its norm, to be put to odd uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.norm(self.conv(x)))


# -- what is folded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_is_exact_within_rounding(kind):
    rank = int(kind[-2])
    norm = getattr(nn, f"BatchNorm{rank}d")
    for kwargs in ({}, {"groups": 2, "stride": 2}, {"bias": False, "groups": 2}):
        for affine in (True, False):
            model = trained(nn.Sequential(getattr(nn, kind)(4, 6, 3, **kwargs), norm(6, affine=affine), nn.ReLU6()))
            report = same_after(model, image(2, 4, *(7, 6, 5)[:rank]), folds=1)
            assert report.fused == (openconv.nn.Fused("0", "1", "2", "clamp(0,6)"),)
            assert report.unfused == ()
            assert [type(m) for m in model] == [getattr(openconv.nn, kind), nn.Identity, nn.Identity]


def test_padding_modes_are_folded():
    for mode in ("reflect", "circular"):
        same_after(trained(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode), nn.BatchNorm2d(4))), image(),
                   folds=1)  # fmt: skip


def test_a_resnet():
    model = trained(ResNet())
    report = same_after(model, image(2, 3, 20, 20), folds=8)
    assert report.unfused == ()
    lines = str(report).splitlines()
    assert lines[0] == "ResNet: 8 convolutions swapped for openconv's, 0 left"
    assert "fused: 8 batch norms, 2 sums, 7 activations" in lines
    assert "  stem.0                 with stem.1 and stem.2 (relu)" in lines


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", [torch.contiguous_format, pytest.param(torch.channels_last, marks=pytest.mark.slow)])
def test_whole_networks_in_single_precision(name, form):
    torch.manual_seed(0)
    model = trained(MODELS[name](), torch.float32).to(memory_format=form)
    x = torch.randn(1, 3, 64, 64).contiguous(memory_format=form)
    with torch.no_grad():
        wanted = model(x)
        report = openconv.convert(model, fuse=True)
        for _ in range(3):
            assert (model(x) - wanted).norm() < 1e-4 * wanted.norm()  # f32 rounds at 6e-8, in some fifty layers
    assert norms(model) == 0
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.is_contiguous(memory_format=form) for m in convolutions)
    if name == "mobilenet_v2":
        assert sum(bool(each.activation) for each in report.fused) == 35
        assert not any(isinstance(m, nn.ReLU6) for m in model.modules())


ACTIVATIONS: tuple[tuple[nn.Module, str], ...] = (
    (nn.ReLU(), "relu"), (nn.ReLU6(), "clamp(0,6)"), (nn.Hardtanh(-0.5, 2.0), "clamp(-0.5,2)"),
    (nn.LeakyReLU(0.2), "leaky_relu(0.2)"), (nn.ELU(0.5), "elu(0.5)"), (nn.Sigmoid(), "sigmoid"), (nn.Tanh(), "tanh"),
    (nn.SiLU(), "silu"), (nn.Hardswish(), "hardswish"), (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"),
)  # fmt: skip


@pytest.mark.parametrize(("activation", "function"), ACTIVATIONS, ids=[function for _, function in ACTIVATIONS])
def test_activations(activation, function):
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    model.append(copy.deepcopy(activation))
    report = same_after(model, image(), folds=1)
    assert report.fused == (openconv.nn.Fused("0", "", "1", function), openconv.nn.Fused("2", "3", "4", function))


def test_identities_are_seen_through_and_a_second_time_finds_nothing():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU()))
    same_after(model, image(), folds=1)
    again = openconv.convert(model, fuse=True)
    assert (again.fused, again.unfused, again.swapped) == ((), (), ())


def test_a_converted_model_can_be_fused_later():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    openconv.convert(model, accuracy="strict")
    same_after(model, image(), folds=1)
    assert model[0].accuracy == "strict"


def test_a_module_in_a_list_is_one_object_everywhere():
    class Lists(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.order = [self.conv, self.norm, self.act]

        def forward(self, x: Tensor) -> Tensor:
            for module in self.order:
                x = module(x)
            return x

    model = trained(Lists())
    same_after(model, image(), folds=1)
    twin: Any = openconv.convert(trained(Lists()), fuse=True, inplace=False).model
    assert twin.order[1] is twin.norm
    assert type(twin.norm) is nn.Identity


# -- what is not --------------------------------------------------------------------------------------------------


def refused(model: nn.Module, reason: str, *, name: str = "norm", folds: int = 0) -> None:
    report = same_after(model, image(), folds=folds)
    assert {each.name: each.reason for each in report.unfused}[name] == reason


def test_a_result_that_is_used_elsewhere():
    class Twice(Pair):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    class Returned(Pair):
        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return self.norm(y), y

    class Changed(Pair):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y.add_(1)
            return self.norm(y)

    class Tapped(Pair):
        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.conv(x))
            return self.act(y), y

    refused(trained(Twice()), "the result of conv is used by add too")
    refused(trained(Changed()), "the result of conv is used by add_ too")
    refused(trained(Returned()), "the result of conv is used by the result too")
    refused(trained(Tapped()), "the result of norm is used by the result too", name="act", folds=1)


def test_other_inputs():
    class Norm(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x) * 2)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    refused(trained(Norm()), "its input comes from mul, not from a convolution")
    refused(trained(First()), "its input comes from outside, not from a convolution")


def test_modules_that_are_called_twice():
    class Shared(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + self.norm(self.conv(x + 1))

    class SharedNorm(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + self.norm(self.other(x))

    class SharedConv(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + self.other(self.conv(x))

    refused(trained(Shared()), "it is called 2 times")
    refused(trained(SharedNorm()), "it is called 2 times")
    refused(trained(SharedConv()), "conv is called 2 times")


def test_hooks():
    for part, reason in (("norm", "it has hooks"), ("conv", "conv has hooks")):
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            model = trained(Pair())
            getattr(getattr(model, part), register)(lambda *_: None)
            refused(model, reason)
    model = trained(Pair())
    seen: list[Tensor] = []
    model.act.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    refused(model, "it has hooks", name="act", folds=1)
    assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)


def test_a_hooked_block_gives_what_it_gave():
    model = trained(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), Pair()))
    model[2].conv = nn.Conv2d(4, 4, 1).double()
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, inputs, out: seen.append(out))
    report = same_after(model, image(), folds=1)  # the one of Pair
    assert report.unfused[0].reason == "its input comes from 0, not from a convolution"
    assert_close(seen[0], seen[1], rtol=1e-10, atol=1e-10)
    inside = trained(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))
    inside[0].register_forward_hook(lambda *_: None)
    same_after(inside, image(), folds=1)


def test_parametrizations_and_code_of_ones_own():
    class Named(nn.Conv2d):
        pass

    class Norm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Ours(openconv.nn.Conv2d):
        def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return self._conv_forward(input, self.weight.abs(), self.bias, residual)

    model = Pair()
    model.conv = parametrizations.weight_norm(model.conv)
    refused(trained(model), "conv is parametrized")
    model = Pair()
    model.conv = Named(3, 4, 3)
    refused(trained(model), "conv is not converted: a subclass of torch's Conv2d with code of its own")
    model = Pair()
    model.conv = Ours(3, 4, 3)
    refused(trained(model), "conv is not converted: a subclass of openconv's Conv2d with a forward of its own")
    model = Pair()
    model.norm = Norm(4)
    refused(trained(model), "it is none of torch's BatchNorm1d to 3d, but has code of its own")
    model = trained(Pair())
    forward = model.norm.forward
    model.norm.forward = lambda x: forward(x) + 1
    refused(model, "it has a forward that was replaced on the instance")
    model = Pair()
    model.conv = openconv.nn.Conv2d(3, 4, 3, activation="tanh")
    refused(trained(model), "conv has an activation")


def test_lazy_norms():
    model = Pair()
    model.norm = nn.LazyBatchNorm2d()  # type: ignore[assignment]
    report = openconv.convert(model.eval(), fuse=True)
    assert {each.name: each.reason for each in report.unfused}["norm"] == "it does not know its sizes yet"
    assert model(image().float()).shape == (2, 4, 9, 9)


def test_norms_without_statistics_or_in_training():
    model = Pair()
    model.norm = nn.BatchNorm2d(4, track_running_stats=False)
    refused(trained(model), "it keeps no running statistics")
    model = trained(Pair())
    model.norm.train()
    refused(model, "it is in training mode")


def test_parameters_that_are_used_by_themselves():
    class Reads(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)) + F.conv2d(x, self.conv.weight, padding=1)

    class Tied(Reads):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)  # has the name under which the shared weight is found
            self.conv.weight = self.first.weight

    class Statistics(Pair):
        def forward(self, x: Tensor) -> Tensor:
            mean: Any = self.norm.running_mean
            return self.norm(self.conv(x)) + mean.view(-1, 1, 1)

    refused(trained(Reads()), "conv has a parameter that is used elsewhere too")
    refused(trained(Tied()), "conv has a parameter that is used elsewhere too")
    refused(trained(Statistics()), "it has a parameter that is used elsewhere too")


def test_tied_weights_are_folded_apart():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)))

    same_after(trained(Tied()), image(), folds=1)


def test_an_argument_that_may_be_left_out():
    class Skips(Pair):
        def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
            y = self.conv(x)
            if skip is not None:
                y = y + skip
            return self.norm(y)

    class Peeks(Pair):
        def forward(self, x: Tensor, peek: bool = False) -> Any:
            y = self.conv(x)
            return y if peek else self.norm(y)

    model = trained(Skips())
    skip = image(2, 4, 9, 9)
    wanted = model(image(), skip)
    refused(model, "its input comes from add, not from a convolution")
    assert_close(model(image(), skip), wanted)
    model = trained(Peeks())
    refused(model, "it is a part of the model, which could not be traced")


def test_residual_arguments_and_dtypes():
    class Adds(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.conv = openconv.nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x, residual=x[:, :1]))

    refused(trained(Adds()), "conv is called with more than one tensor")
    model = trained(Pair())
    model.norm.float()
    report = openconv.convert(model, fuse=True)
    assert report.unfused[0].reason.startswith("it and conv are torch.float32 on cpu and torch.float64 on cpu; wanted")


# -- models that cannot be traced ---------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Cannot be traced; its parts can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.stem = nn.Sequential(nn.Conv2d(4, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.blocks = nn.ModuleList([Pair(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if y.sum() > 1e9:
            return y
        y = self.stem(y)
        for block in self.blocks:
            y = block(y)
        return y


def test_parts_of_a_model_that_cannot_be_traced():
    model = trained(Blocks())
    report = same_after(model, image(), folds=2)
    assert [each.name for each in report.fused] == ["stem.0", "blocks.0.conv"]
    left = {each.name: each.reason for each in report.unfused}
    assert left[""].startswith("could not be traced: TraceError: symbolically traced variables cannot be used")
    assert left["norm"] == "it is a part of the model, which could not be traced"
    assert left["blocks.1.1"] == "no trace has a call of it"  # who knows whether the Sequential is taken apart
    assert set(left) == {"", "norm", "blocks.1.1"}
    outer = trained(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), Blocks()))
    assert [each.name for each in same_after(outer, image(), folds=3).fused] == ["0", "2.stem.0", "2.blocks.0.conv"]


def test_a_sequential_that_is_taken_apart_in_a_model_that_cannot_be_traced():
    class Taps(Blocks):
        def forward(self, x: Tensor) -> Any:
            found = []
            y = self.norm(self.conv(x))
            assert y.sum() < 1e9
            for module in self.stem:
                y = module(y)
                found.append(y)
            return tuple(found)

    model = trained(Taps())
    report = same_after(model, image(), folds=1)  # that of the Pair, which is not even called
    assert [each.name for each in report.fused] == ["blocks.0.conv"]


def test_what_a_failed_trace_saw_counts():
    class Reaches(Blocks):
        def forward(self, x: Tensor) -> Any:
            block: Any = self.blocks[0]
            y = block.conv(x)
            assert y.sum() < 1e9
            return y, block(x)

    model = trained(Reaches())
    wanted = model(image())
    report = openconv.convert(model, fuse=True)
    assert_close(model(image()), wanted, rtol=1e-10, atol=1e-10)
    assert [each.name for each in report.fused] == ["stem.0"]


def test_tracing_leaves_no_trace():
    class Keeps(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Any
            self.register_buffer("calls", torch.zeros(()))
            self.last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.norm(self.conv(x))
            return self.act(self.last)

    model = trained(Keeps())
    openconv.convert(model, fuse=True)
    assert model.last is None
    assert model.calls == 0


# -- the call -----------------------------------------------------------------------------------------------------


def test_bad_calls_change_nothing():
    model = trained(Pair())
    with pytest.raises(ValueError, match="fuse and back are both set"):
        openconv.convert(model, fuse=True, back=True)
    with pytest.raises(RuntimeError, match=r"in training mode; fuse wants one in eval mode: call model\.eval\(\)"):
        openconv.convert(model.train(), fuse=True)
    with pytest.raises(ValueError, match="'loose'"):
        openconv.convert(model.eval(), fuse=True, accuracy="loose")
    with pytest.raises(TypeError, match="model is of type Tensor"):
        openconv.convert(torch.ones(1), fuse=True)  # type: ignore[arg-type]
    assert [type(m) for m in model.children()] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]


def test_an_error_on_the_way_changes_nothing(monkeypatch):
    model = trained(nn.Sequential(Pair(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    made = openconv.fuse._folded

    def fails(conv, norm):
        if norm is model[2]:
            raise MemoryError
        return made(conv, norm)

    monkeypatch.setattr(openconv.fuse, "_folded", fails)
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(MemoryError):
        openconv.convert(model, fuse=True)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)} == {nn.Conv2d}
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before


def test_a_copy_is_fused_and_the_model_is_not():
    model = trained(ResNet())
    before = copy.deepcopy(model.state_dict())
    x = image(1, 3, 20, 20)
    report = openconv.convert(model, fuse=True, inplace=False)
    assert_close(report.model(x), model(x), rtol=1e-10, atol=1e-10)
    assert norms(model) == 8
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)} == {nn.Conv2d}


def test_state_dicts_copies_and_pickles():
    model = trained(ResNet())
    openconv.convert(model, fuse=True)
    assert "stem.1.running_mean" not in model.state_dict()
    assert "layers.0.conv1.bias" in model.state_dict()
    x = image(1, 3, 20, 20)
    wanted = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(twin(x), wanted, rtol=1e-10, atol=1e-10)
        assert twin.stem[0].activation == "relu"
        assert type(twin.stem[1]) is nn.Identity
        assert vars(twin.stem[1]).keys() == vars(nn.Identity()).keys()
    other = ResNet().double().eval()
    openconv.convert(other, fuse=True)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), wanted)


def test_gradients_of_a_fused_model():
    model = trained(ResNet())
    model.layers[0].requires_grad_(False)
    x = image(2, 3, 20, 20).requires_grad_()
    model(x).square().sum().backward()
    wanted, x.grad = x.grad, None
    openconv.convert(model, fuse=True)
    fused: Any = model
    assert not fused.layers[0].conv1.weight.requires_grad
    assert not fused.layers[0].conv1.bias.requires_grad
    assert fused.layers[1].conv1.weight.requires_grad
    assert fused.layers[1].conv1.bias.requires_grad
    model(x).square().sum().backward()
    assert_close(x.grad, wanted, rtol=1e-9, atol=1e-9)
    assert fused.layers[1].conv1.weight.grad.abs().sum() > 0
    assert fused.stem[0].bias.grad.abs().sum() > 0


def test_limits_are_set_on_what_is_swapped():
    model = trained(Pair())
    openconv.convert(model, fuse=True, accuracy="strict", max_workspace=0)
    assert (model.conv.accuracy, model.conv.max_workspace, model.conv.activation) == ("strict", 0, "relu")


def test_a_fused_model_goes_back_as_far_as_torch_can():
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.ReLU()))
    wanted = model(image())
    openconv.convert(model, fuse=True)
    report = openconv.convert(model, back=True)
    assert [each.name for each in report.swapped] == ["0"]
    assert [each.name for each in report.left] == ["2"]
    assert_close(model(image()), wanted, rtol=1e-10, atol=1e-10)
