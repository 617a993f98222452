"""convert(model, fuse=True): sums and activations that are code of a model, and what must stay as it was written."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import openconv
from openconv.fuse_forward import Rewritten
from tests.test_fuse import Bottleneck, ResNet, image, trained

FORMS = (torch.contiguous_format, torch.channels_last)


def close(got: Any, wanted: Any) -> None:
    """f64, where 1e-10 is far above rounding and far below any mistake."""
    assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def fused(model: Any, *inputs: Any, sums: int = 0, activations: int = 0, again: bool = True) -> openconv.nn.Conversion:
    """Convert, compare with the model as it was, also what the call leaves of its inputs, in both layouts."""
    model = trained(model)
    own, given = copy.deepcopy(model), inputs or (image(),)
    report = openconv.convert(model, fuse=True)
    for form in FORMS if again else FORMS[:1]:
        for each in (own, model):
            each.to(memory_format=form)
        ours, theirs = copy.deepcopy(given), copy.deepcopy(given)
        for _ in range(2):
            close(model(*ours), own(*theirs))
            close(ours, theirs)
    assert (sum(bool(each.sum) for each in report.fused), sum(bool(each.activation) for each in report.fused)) == (
        sums, activations)  # fmt: skip
    return report


def left(report: openconv.nn.Conversion) -> dict[tuple[str, str], str]:
    return {(each.name, each.module.split("(")[0]): each.reason for each in report.unfused}


def rewritten(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Rewritten)]


class Parts(nn.Module):
    """Two convolutions of the same sizes with their norms, and a ReLU, to be put to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.b, self.act = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Any:
        return self.act(self.norm(self.a(x)) + x)


class Basic(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, c: int, k: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, k, 3, stride, 1, bias=False), nn.BatchNorm2d(k)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(k, k, 3, padding=1, bias=False), nn.BatchNorm2d(k)
        self.downsample = None
        if stride > 1 or c != k:
            self.downsample = nn.Sequential(nn.Conv2d(c, k, 1, stride, bias=False), nn.BatchNorm2d(k))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


# -- what is fused ------------------------------------------------------------------------------------------------


def test_blocks_as_torchvision_writes_them():
    for block in (Bottleneck(6, 3, 1), Bottleneck(6, 3, 2), Bottleneck(6, 5, 1)):
        assert fused(block, image(2, 6, 8, 8), sums=1, activations=3).unfused == ()
    for basic in (Basic(4, 4, 1), Basic(4, 6, 2)):
        report = fused(basic, image(2, 4, 8, 8), sums=1, activations=2)
        assert report.unfused == ()
        assert openconv.nn.Fused("conv2", "bn2", "relu", "relu", "iadd of the model") in report.fused


_collected = ""


def test_callbacks_of_the_garbage_collector_are_no_part_of_a_forward():
    """One that sets a global, as Hypothesis has, was taken for code of the model."""
    seen, before = [], gc.get_threshold()

    def callback(phase, info):
        global _collected
        _collected = phase
        seen.append(phase)

    gc.callbacks.append(callback)
    gc.set_threshold(20)
    try:
        fused(Bottleneck(6, 3, 1), image(2, 6, 8, 8), sums=1, activations=3)
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*before)
    assert seen


def test_a_resnet_and_its_report():
    model = ResNet()
    report = fused(model, image(2, 3, 20, 20), sums=2, activations=7)
    assert rewritten(model) == ["", "layers.0", "layers.1"]  # the model itself pools
    lines = str(report).splitlines()
    assert "fused: 8 batch norms, 2 sums, 7 activations" in lines
    assert "  layers.0.conv1         with layers.0.bn1 and layers.0.relu (relu)" in lines
    assert "  layers.1.conv3         with layers.1.bn3, iadd of layers.1 and layers.1.relu (relu)" in lines
    assert "not fused:" not in lines


class Inverted(nn.Module):
    """MobileNetV2's block: the sum is here, the convolution two Sequentials further in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)),
            nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.BatchNorm2d(12), nn.ReLU6(inplace=True)),
            nn.Sequential(nn.Conv2d(12, 3, 1), nn.BatchNorm2d(3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def test_a_convolution_at_the_end_of_sequentials():
    model = Inverted()
    report = fused(model, sums=1, activations=2)
    assert report.fused[-1] == openconv.nn.Fused("layers.2.0", "layers.2.1", "", "", "add of the model")
    assert rewritten(model) == ["", "layers", "layers.2"]
    close(model.layers(image()) + image(), model(image()))  # by itself it computes what it did
    assert type(model.layers[:2]) is nn.Sequential
    assert len(model.layers[:2](image()).shape) == 4


def test_a_convolution_at_the_end_of_a_module():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Normed(), Normed()

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x).relu_())
            return y.add_(x).relu_()

    model = nn.Sequential(Block(), Block())
    assert fused(model, sums=2, activations=4).unfused == ()
    assert "0.second" in rewritten(model)
    seen: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    model(image())
    assert len(seen) == len(list(model.modules()))  # nobody is passed over


FUNCTIONS = {
    "relu": (F.relu, torch.relu, lambda y: y.relu(), lambda y: y.relu_(), lambda y: F.relu(y, inplace=True),
             torch.relu_),
    "clamp(0,6)": (F.relu6, lambda y: F.hardtanh(y, 0, 6), lambda y: y.clamp(0, 6), lambda y: torch.clip(y, 0, max=6),
                   lambda y: y.clamp_(min=0, max=6), lambda y: F.relu6(y, True)),
    "clamp(0,inf)": (lambda y: torch.clamp(y, min=0), lambda y: y.clamp_min(0), lambda y: torch.clamp_min_(y, 0)),
    "clamp(-inf,0.5)": (lambda y: torch.clamp(y, max=0.5), lambda y: y.clamp_max_(0.5)),
    "silu": (F.silu, lambda y: F.silu(y, inplace=True)),
    "hardswish": (F.hardswish,),
    "gelu": (F.gelu,),
    "gelu_tanh": (lambda y: F.gelu(y, approximate="tanh"),),
    "leaky_relu(0.2)": (lambda y: F.leaky_relu(y, 0.2), lambda y: F.leaky_relu(y, negative_slope=0.2, inplace=True)),
    "elu(0.5)": (lambda y: F.elu(y, 0.5),),
    "sigmoid": (torch.sigmoid, F.sigmoid, lambda y: y.sigmoid(), lambda y: y.sigmoid_()),
    "tanh": (torch.tanh, F.tanh, lambda y: y.tanh_()),
}  # fmt: skip


@pytest.mark.parametrize("text", FUNCTIONS)
def test_activations_that_are_functions(text):
    for function in FUNCTIONS[text]:

        class Calls(Parts):
            def forward(self, x: Tensor) -> Tensor:
                y = function(self.norm(self.a(x)))  # noqa: B023
                return function(self.b(y) + x)  # noqa: B023

        report = fused(Calls(), sums=1, activations=2)
        assert {each.function for each in report.fused if each.activation} == {text}


def test_a_result_that_is_changed_and_goes_on_under_its_old_name():
    class Discards(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.a(x))
            F.relu(y, inplace=True)
            z = self.b(y)
            z.add_(y)
            z.relu_()
            return z + y

    fused(Discards(), sums=1, activations=2)


def test_ways_to_write_a_sum():
    for add in (lambda y, x: y + x, lambda y, x: x + y, torch.add, lambda y, x: torch.add(x, other=y, alpha=1),
                lambda y, x: y.add(x), lambda y, x: y.add_(x), lambda y, x: x.add(y)):  # fmt: skip

        class Adds(Parts):
            def forward(self, x: Tensor) -> Tensor:
                return self.act(add(self.norm(self.a(x)), x))  # noqa: B023

        assert [name for name, _ in left(fused(Adds(), sums=1, activations=1))] == ["block.1"]  # which is not called


def test_sums_of_two_convolutions_and_of_three_values():
    class Two(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.a(x)) + self.b(x))

    class Into(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.a(x))
            y += self.block(x)
            return F.relu(y)

    class Three(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(self.a(x)) + x + self.b(x))

    assert [each.name for each in fused(Two(), sums=1, activations=1).fused if each.sum] == ["b"]
    assert [each.name for each in fused(Into(), sums=1, activations=1).fused if each.sum] == ["a"]
    assert [each.name for each in fused(Three(), sums=2, activations=1).fused if each.sum] == ["a", "b"]


def test_convolutions_of_all_kinds():
    for rank in (1, 2, 3):
        for kind in ("Conv", "ConvTranspose"):
            for geometry in ({"padding": 1}, {"padding": 2, "dilation": 2, "groups": 2}, {"stride": 2}):

                class Block(nn.Module):
                    def __init__(self) -> None:
                        super().__init__()
                        make = getattr(nn, f"{kind}{rank}d")  # noqa: B023
                        self.conv, self.side = (make(4, 4, 3, **geometry) for _ in range(2))  # noqa: B023
                        self.odd = make(4, 4, 1)

                    def forward(self, x: Tensor) -> Tensor:
                        return F.relu(self.conv(x) + self.side(x).mul(0.5)) + self.odd(x[:1]).mean()

                fused(Block(), image(2, 4, *(7,) * rank), sums=1, activations=1, again=rank == 2)
    modes: Any = (("same", "zeros"), ("valid", "zeros"), (1, "reflect"))
    for padding, mode in modes:
        model: Any = Parts()
        model.a = nn.Conv2d(3, 3, 3 if padding != "valid" else 1, padding=padding, padding_mode=mode)
        fused(model, sums=1, activations=1)
        with torch.no_grad():
            assert model.a.takes(image(), image())
            assert not model.a.takes(image(), image(2, 3, 9, 8))


def test_a_shared_convolution_takes_what_each_call_needs():
    class Heads(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.a(x)) + torch.sigmoid(self.a(x + 1)) + self.a(x + 2)

    model = Heads()
    report = fused(model, sums=1, activations=2)
    assert {(each.name, each.function) for each in report.fused} == {("a", "relu"), ("a", "sigmoid"), ("a", "")}
    assert model.a.activation is None


def test_what_a_residual_is_at_run_time():
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor, other: Any) -> Tensor:
            return F.relu(self.conv(x) + other)

    class Into(Adds):
        def forward(self, x: Tensor, other: Any) -> Tensor:
            y = self.conv(x)
            y += other
            return F.relu(y)

    x, whole = image(), image(2, 4, 9, 9)
    values: tuple[Any, ...] = (
        whole, whole[:, :1], whole[:1], whole[0], whole[..., :1], whole[:1].expand(2, -1, -1, -1), whole.float(),
        whole.int(), 2, 0.5, torch.tensor(0.5), whole.transpose(2, 3), nn.Parameter(whole),
    )  # fmt: skip
    for kind in (Adds, Into):
        model = trained(kind())
        own = copy.deepcopy(model)
        openconv.convert(model, fuse=True)
        for value in values:
            close(model(x, value), own(x, value))
            close(model(x, value), own(x, value))
            assert model(x, value).dtype == own(x, value).dtype
        close(model(x[0], whole[0]), own(x[0], whole[0]))  # no batch
        for wrong in (whole[:, :3], None):
            with pytest.raises((RuntimeError, TypeError)):
                model(x, wrong)
    model = trained(Adds())  # a result that grows
    own = copy.deepcopy(model)
    openconv.convert(model, fuse=True)
    close(model(x, image(3, 2, 4, 9, 9)), own(x, image(3, 2, 4, 9, 9)))
    close(model(x[:1], whole), own(x[:1], whole))
    close(model(x[0], whole), own(x[0], whole))
    close(model(x[0], whole[:1]), own(x[0], whole[:1]))
    low, wide = trained(Adds(), torch.float32), whole.float()
    openconv.convert(low, fuse=True)
    assert low(x.float(), whole).dtype == torch.float64
    own = trained(Adds(), torch.float32)
    own.load_state_dict(low.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert low(x.float(), wide).dtype == own(x.float(), wide).dtype == torch.float32
        assert_close(low(x.float(), wide), own(x.float(), wide), rtol=2e-2, atol=2e-2)


def test_gradients():
    model = trained(ResNet())
    own = copy.deepcopy(model)
    openconv.convert(model, fuse=True)
    x, other = image(2, 3, 20, 20).requires_grad_(), image(2, 3, 20, 20).requires_grad_()
    model(x).square().sum().backward()
    own(other).square().sum().backward()
    assert_close(x.grad, other.grad, rtol=1e-9, atol=1e-9)


# -- what is not --------------------------------------------------------------------------------------------------


def test_a_result_that_is_used_twice():
    class Twice(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return F.relu(y) + y

    class Itself(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return y + y

    class Returned(Parts):
        def forward(self, x: Tensor) -> Any:
            y = self.norm(self.a(x))
            return y + x, y

    class Summed(Parts):
        def forward(self, x: Tensor) -> Any:
            y = self.a(x) + x
            return F.relu(y), y

    found = left(fused(Twice()))
    assert found["", "relu"] == "the result of a is used by add too"
    assert found["", "add"] == "the result of a is used by relu too"
    assert left(fused(Itself()))["", "add"] == "the result of a is added to itself"
    assert left(fused(Returned()))["", "add"] == "the result of a is used by the result too"
    fused(Summed(), sums=1)


def test_a_sum_into_another_tensor_is_seen_by_others():
    class Into(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x += self.a(x)
            return self.b(x)

    class Method(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y.view(-1)
            y.add_(self.a(x))
            return z

    for kind, name in ((Into, "iadd"), (Method, "add_")):
        assert left(fused(kind()))["", name] == "it goes into a tensor that is no convolution's result"


def test_a_convolution_does_not_run_behind_what_changes_its_input():
    class Changes(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = x.mul_(2)
            return y.add_(z)

    class Calls(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.side = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y += self.side(x)
            return y

    class View(Parts):
        def forward(self, x: Tensor) -> Tensor:
            v = x[:, :3]
            y = self.a(v)
            x += 1
            return y.add_(x)

    class Writes(Calls):
        def forward(self, x: Tensor) -> Tensor:
            y = self.side(x)
            z = self.b(x)
            y += z
            return y

    class Other(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(F.relu(x))  # memory of its own, which nobody changes
            x += 1
            return y.add_(x)

    first = "mul_ runs before it and may write to the input of a, which would run behind it"
    assert left(fused(Changes()))["", "add_"] == first
    assert left(fused(Calls()))["", "iadd"] == first.replace("mul_", "side")
    assert left(fused(View()))["", "add_"] == first.replace("mul_", "iadd")
    assert left(fused(Writes()))["", "iadd"] == "side may write to its input, so that it cannot run behind b"
    fused(Other(), sums=1)


def test_the_last_of_two_convolutions_takes_the_sum_so_that_nothing_moves():
    class Adds(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            x.mul_(2)
            return y + self.b(x)

    assert [each.name for each in fused(Adds(), sums=1).fused if each.sum] == ["b"]


def test_a_module_that_cannot_be_looked_into_may_change_what_it_is_given():
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu_() if x.sum() > -1e9 else x

    class Adds(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Sequential(Odd())

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y += self.odd(x)
            return y

    class Apart(Adds):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(self.b(x))
            y += self.odd(x)
            return y

    assert left(fused(Adds()))["", "iadd"].startswith("odd runs before it and may write to the input of a")
    fused(Apart(), sums=1)


def test_hooks_see_what_they_saw():
    class Blocks(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.block(self.act(self.a(x))) + x)

    reasons = {"a": "it is called 2 times, 1 of them fused: a has hooks", "block": "block has hooks",
               "act": "it has hooks"}  # fmt: skip
    for name, reason in reasons.items():
        model, seen = trained(Blocks()), list[Tensor]()
        hook = partial(lambda seen, module, given, out: seen.append(out.detach().clone()), seen)
        getattr(model, name).register_forward_hook(hook)
        wanted = model(image())
        report = openconv.convert(model, fuse=True)
        count = len(seen)
        close(model(image()), wanted)
        assert len(seen) == 2 * count
        close(seen[:count], seen[count:])
        assert reason in left(report).values()


def test_a_hook_of_the_block_itself_stays():
    model = trained(ResNet())
    seen: list[Tensor] = []
    model.layers[0].register_forward_hook(lambda module, given, out: seen.append(out))
    model(image(1, 3, 20, 20))
    openconv.convert(model, fuse=True)
    model(image(1, 3, 20, 20))
    close(*seen)
    assert "layers.0" in rewritten(model)


def test_convolutions_with_code_of_their_own():
    class Named(nn.Conv2d):
        pass

    class Adds(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + x

    model: Parts = Adds()
    model.a = Named(3, 3, 3, padding=1)
    reason = "a is not converted: a subclass of torch's Conv2d with code of its own"
    assert left(fused(model))["", "add"] == reason
    model = Parts()
    model.a = openconv.nn.Conv2d(3, 3, 3, padding=1, activation="tanh")
    fused(model)  # tanh is between
    model = Parts()
    model.a = parametrizations.weight_norm(model.a)
    model.norm = nn.Identity()  # type: ignore[assignment]
    own = trained(model)
    report = openconv.convert(own, fuse=True)  # its weight is computed at each call, as it was
    assert [each.sum for each in report.fused] == ["add of the model"]


def test_numbers_that_are_none():
    class Limits(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(self.a(x), min=x)

    class Crossed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(self.a(x), 2, 1)

    class Alpha(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(self.a(x), x, alpha=2) + 1

    assert left(fused(Limits()))["", "clamp"].startswith("its numbers cannot be fused")
    assert left(fused(Crossed()))["", "clamp"] == "its numbers cannot be fused: its limits are 2 and 1"
    fused(Alpha())


# -- what a trace would lose --------------------------------------------------------------------------------------

_seen: list[Any] = []


class Flow(Parts):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) + x
        return y if y.sum() > 0 else y + 1


class Types(Parts):
    def forward(self, x: Any) -> Tensor:
        x = [x] if isinstance(x, Tensor) else x
        return self.a(x[0]) + x[0]


class Quiet(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.a(x) + x


class Decorated(Parts):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x


class Tries(Parts):
    def forward(self, x: Tensor) -> Tensor:
        try:
            y = x + len(x)
        except RuntimeError:
            y = x
        return self.a(x) + y


class Sets(Parts):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x) + x
        return self.last


class Appends(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.a(x) + x


class Counts(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.count: Any
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.a(x) + x


class Draws(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x * random.random()


class Makes(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x + torch.ones(1, dtype=x.dtype) * torch.arange(9)


class Ordered(Parts):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(out=self.a(x) + x)


class Callable(Parts):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + x


LOST = {
    Callable: "it has a __call__ of its own",
    Flow: "could not be traced: TraceError: symbolically traced variables cannot be used",
    Types: "its forward asks isinstance, which a trace does not hold",
    Quiet: "its forward has a with or try block, which a trace does not hold",
    Decorated: "its forward is under a decorator of torch's, which a trace does not hold",
    Tries: "its forward has a with or try block, which a trace does not hold",
    Sets: "its forward sets an attribute, which a trace does not hold",
    Appends: "its forward changes what it holds",
    Counts: "its forward sets an attribute, which a trace does not hold",
    Draws: "its forward asks random, which a trace does not hold",
    Makes: "its forward makes tensors or uses some that are neither parameters nor buffers",
    Ordered: "it makes a OrderedDict, which a trace does not hold",
}


@pytest.mark.parametrize("kind", LOST)
def test_what_a_trace_would_lose(kind):
    model = trained(kind())
    report = openconv.convert(model, fuse=True)
    assert left(report)["", kind.__name__].startswith(LOST[kind]), left(report)
    assert type(model) is kind
    torch.manual_seed(0)
    random.seed(0)
    got = model(image())
    openconv.convert(model, back=True)
    random.seed(0)
    close(got, model(image()))


def test_arguments_that_may_be_left_out():
    class Skips(Parts):
        def forward(self, x: Tensor, skip: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
            y = self.a(x)
            if skip is not None:
                y = y * skip
            return F.relu(y + x) * scale

    model = trained(Skips())
    own = copy.deepcopy(model)
    report = openconv.convert(model, fuse=True)
    assert len(report.fused) == 1
    x = image()
    for args, kwargs in (((x,), {}), ((x, x), {}), ((x,), {"skip": x}), ((x,), {"scale": 3.0}), ((), {"x": x})):
        close(model(*args, **kwargs), own(*args, **kwargs))


# -- afterwards ---------------------------------------------------------------------------------------------------


def test_training_later_runs_the_code_of_the_model():
    class Drops(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            if self.training:
                y = F.dropout(y, 0.5)
            return F.relu(y + x)

    model = trained(Drops())
    own = copy.deepcopy(model)
    openconv.convert(model, fuse=True)
    for mode in (True, False):
        results = []
        for each in (model, own):
            each.train(mode)
            each.block.eval()  # whose norm is folded
            torch.manual_seed(1)
            results.append(each(image()))
        close(*results)
    model.block.train()  # only what is inside
    close(model(image()), own(image()))


def test_attributes_that_are_set_later():
    class Scales(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.adds = 2.0, True

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.a(self.act(self.b(x)))) * self.scale
            return self.block(y) + x if self.adds else y

    for name, value in (("scale", 3.0), ("adds", False), ("act", nn.Tanh()), ("block", nn.Conv2d(3, 3, 1).double()),
                        ("a", nn.Conv2d(3, 3, 3, padding=1).double())):  # fmt: skip
        model = trained(Scales())
        own = copy.deepcopy(model)
        openconv.convert(model, fuse=True)
        close(model(image()), own(image()))
        for each in (model, own):
            setattr(each, name, value)
        close(model(image()), own(image()))
    model, own = (trained(Inverted()) for _ in range(2))
    own.load_state_dict(model.state_dict())
    openconv.convert(model, fuse=True)
    for each in (model, own):
        each.layers.append(nn.Tanh())
    close(model(image()), own(image()))
    del model.layers[-1], own.layers[-1]
    close(model(image()), own(image()))
    openconv.convert(model, fuse=True)
    assert not model._own_forward
    close(model(image()), own(image()))


def test_the_same_object_with_the_same_names():
    model = trained(ResNet())
    block, names = model.layers[0], [name for name, _ in model.named_modules()]
    openconv.convert(model, fuse=True)
    assert model.layers[0] is block
    assert isinstance(block, Bottleneck)
    assert repr(block).startswith("Bottleneck(")
    assert [name for name, _ in model.named_modules()] == names
    assert type(block.relu) is nn.ReLU
    assert all(module.activation is None for name, module in model.named_modules() if name.startswith("layers.0.conv"))


def test_copies_pickles_and_state_dicts(tmp_path):
    model = trained(ResNet())
    openconv.convert(model, fuse=True)
    x = image(1, 3, 20, 20)
    wanted = model(x)
    twin = copy.deepcopy(model)
    assert rewritten(twin) == rewritten(model) == ["", "layers.0", "layers.1"]
    assert torch.equal(twin(x), wanted)
    nn.init.zeros_(twin.layers[0].conv3.weight)
    assert torch.equal(model(x), wanted)
    other = ResNet().double().eval()
    openconv.convert(other, fuse=True)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), wanted)
    torch.save(model, tmp_path / "model.pt")
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert rewritten(loaded) == []  # its own code, which computes the same
        assert type(loaded.layers[0]) is Bottleneck
        close(loaded(x), wanted)
        assert len([each for each in openconv.convert(loaded, fuse=True).fused if each.sum]) == 2
        close(loaded(x), wanted)


def test_back_and_again():
    model = trained(ResNet())
    wanted = model(image(1, 3, 20, 20))
    first = openconv.convert(model, fuse=True)
    again = openconv.convert(model, fuse=True)
    sums = [replace(each, norm="") for each in first.fused if each.sum]  # the norms are gone by then
    assert [each for each in again.fused if each.sum] == sums
    close(model(image(1, 3, 20, 20)), wanted)
    openconv.convert(model.layers[1].conv3, back=True)  # a part, which the block around it does not hear of
    close(model(image(1, 3, 20, 20)), wanted)
    report = openconv.convert(model, back=True)
    assert [each.name for each in report.left] == ["stem.0"]  # the one with an activation of its own
    assert rewritten(model) == []
    assert type(model.layers[0].conv3) is nn.Conv2d
    close(model(image(1, 3, 20, 20)), wanted)


def test_compiled_exported_and_traced():
    model = trained(nn.Sequential(Inverted(), Basic(3, 3, 1)), torch.float32)
    x = image().float()
    wanted = model(x)
    openconv.convert(model, fuse=True)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-4)
        assert_close(torch.compile(model, backend="eager", dynamic=True)(image(1, 3, 7, 8).float()),
                     model(image(1, 3, 7, 8).float()))  # fmt: skip
        exported = torch.export.export(model, (x,)).module()
        assert_close(exported(x), wanted, rtol=1e-4, atol=1e-4)
        traced: Any = torch.jit.trace(model, (x,))
        assert_close(traced(x), wanted, rtol=1e-4, atol=1e-4)
        symbolic = torch.fx.symbolic_trace(model)
        assert_close(symbolic(x), wanted, rtol=1e-4, atol=1e-4)


def test_modules_of_one_class_share_a_class():
    model = nn.Sequential(*(Basic(3, 3, 1) for _ in range(3)))
    fused(model, sums=3, activations=6)
    assert len({type(block) for block in model}) == 1
