"""The six functions against torch's: results, strides, refusals, and what a call may skip the second time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import openconv
from openconv import functional
from openconv import plan as plan_module
from openconv.engine import engines
from openconv.epilogue import ACTIVATIONS
from openconv.plan import forget_plans

FUNCTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
SIZES, TAPS = (7, 6, 5), (3, 2, 3)


def rank_of(name: str) -> int:
    return int(name[-2])


def integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Whole numbers from -3 to 3, or 0 to 3 without a sign: sums of a few hundred products are exact in every type."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    low = 0 if dtype == torch.uint8 else -3
    values = torch.randint(low, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(values.float(), torch.randint(-3, 4, shape, generator=generator).float()).to(dtype)
    return values.to(dtype)


def operands(
    name: str, *, n: int = 2, c: int = 4, k: int = 6, groups: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and bias of a call."""
    rank = rank_of(name)
    channels = (c, k // groups) if "transpose" in name else (k, c // groups)
    x = integers(n, c, *SIZES[:rank], dtype=dtype)
    w = integers(*channels, *TAPS[:rank], dtype=dtype, seed=1)
    return x, w, integers(k, dtype=dtype, seed=2)


def both(name: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return getattr(openconv, name)(*args, **kwargs), getattr(F, name)(*args, **kwargs)


def agree(got: Tensor, wanted: Tensor, *, strides: bool = True) -> None:
    """Equal in shape, dtype and value; in strides too, where an axis is long enough for them to matter."""
    torch.testing.assert_close(got, wanted)
    if strides:
        assert [s for s, n in zip(got.stride(), got.shape, strict=True) if n > 1] == [
            s for s, n in zip(wanted.stride(), wanted.shape, strict=True) if n > 1
        ]


# -- results -----------------------------------------------------------------------------------------------------

GEOMETRY: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "k": 4},
    "multiplier": {"groups": 4, "k": 8},
    "everything": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2},
}


@pytest.mark.parametrize("case", GEOMETRY)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_geometry(name, case):
    geometry = dict(GEOMETRY[case])
    x, w, b = operands(name, groups=geometry.get("groups", 1), k=geometry.pop("k", 6))
    agree(*both(name, x, w, b, **geometry))
    agree(*both(name, x, w, **geometry))
    agree(*both(name, x[0], w, b, **geometry))
    alone = getattr(openconv, name)(x[0], w, b, **geometry)
    assert alone.dim() == rank_of(name) + 1
    agree(alone, getattr(openconv, name)(x[0], w, b, **geometry))  # again, from the cache


@pytest.mark.parametrize("kind", [tuple, list, torch.Size])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_number_per_axis_or_one_for_all(name, kind):
    rank = rank_of(name)
    x, w, b = operands(name)
    per_axis = {"stride": kind((2, 1, 3)[:rank]), "padding": kind((1, 2, 0)[:rank]), "dilation": kind((1, 2, 1)[:rank])}
    for _ in range(2):
        agree(*both(name, x, w, b, **per_axis))
    agree(*both(name, x, w, b, stride=kind((2,)), padding=kind((1,))))


def test_numpy_integers_and_tensors_of_one_are_integers():
    x, w, b = operands("conv2d")
    agree(*both("conv2d", x, w, b, stride=np.int64(2), padding=(np.int32(1), 1), groups=np.int64(1)))
    stride = torch.tensor(1)
    agree(*both("conv2d", x, w, b, stride=stride))
    stride += 1  # the same object, another number: nothing may be remembered of the first call
    agree(*both("conv2d", x, w, b, stride=stride))
    agree(*both("conv2d", x, w, b, stride=(stride, 1)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_positions_of_the_arguments_are_torchs(name):
    x, w, b = operands(name, groups=2)
    last = (1, 2, 2) if "transpose" in name else (2, 2)
    agree(*both(name, x, w, b, 2, 1, *last))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("name", FUNCTIONS[:3])
def test_padding_by_name(name, padding, dilation):
    x, w, b = operands(name)  # an even filter on the second axis: 'same' pads it by one more at its end
    if padding == "valid" and dilation == 3:
        x = F.pad(x, [2] * (2 * rank_of(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on the even filter
        agree(*both(name, x, w, b, padding=padding, dilation=dilation))


@pytest.mark.parametrize("name", FUNCTIONS[3:])
@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": 2, "output_padding": 1},
        {"stride": 3, "output_padding": 2, "padding": 1},
        {"dilation": 3, "output_padding": 2},
        {"stride": 2, "dilation": 3, "output_padding": 2, "groups": 2},
        {"stride": 3, "padding": 3, "output_padding": 1},
    ],
)
def test_output_padding(name, geometry):
    x, w, b = operands(name, groups=geometry.get("groups", 1))
    for _ in range(2):
        agree(*both(name, x, w, b, **geometry))
    per_axis = tuple(range(rank_of(name)))
    agree(*both(name, x, w, b, stride=3, output_padding=per_axis, groups=geometry.get("groups", 1)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
     torch.uint8, torch.complex32, torch.complex64, torch.complex128],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)  # fmt: skip
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes(name, dtype):
    x, w, b = operands(name, groups=2, dtype=dtype)
    got = getattr(openconv, name)(x, w, b, stride=2, padding=1, groups=2)
    # torch lacks some functions for some integers and halves; 64 bits wrap to what fewer bits hold.
    wide = torch.complex64 if dtype.is_complex and dtype.itemsize < 16 else dtype
    wide = wide if wide.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    wanted = getattr(F, name)(*(t.to(wide) for t in (x, w, b)), stride=2, padding=1, groups=2)
    assert got.dtype == dtype
    assert torch.equal(got.to(wide), wanted.to(dtype).to(wide))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_integers_wrap_as_their_type_does(dtype):
    info = torch.iinfo(dtype)
    x = torch.full((1, 3, 4, 4), info.max, dtype=dtype)
    w = torch.full((2, 3, 3, 3), info.max // 3, dtype=dtype)
    got, wanted = both("conv2d", x, w)
    assert torch.equal(got, wanted)


# -- layouts and strides -----------------------------------------------------------------------------------------

LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.mark.parametrize("which", ["input", "weight", "both"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", [f for f in FUNCTIONS if rank_of(f) > 1])
def test_channels_last_is_kept(name, groups, which):
    x, w, b = operands(name, groups=groups, k=8)
    last = LAST[rank_of(name)]
    x = x.contiguous(memory_format=last) if which != "weight" else x
    w = w.contiguous(memory_format=last) if which in ("weight", "both") else w
    got, wanted = both(name, x, w, b, padding=1, groups=groups)
    agree(got, wanted)
    if which == "weight" and groups == 4:
        return  # one channel per filter is in both orders
    assert got.is_contiguous(memory_format=last)
    # Without a batch torch goes back to the plain order; the result's order is the input's here too.
    alone = getattr(openconv, name)(x[0], w, b, padding=1, groups=groups)
    assert alone[None].is_contiguous(memory_format=last)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_strides(name):
    rank = rank_of(name)
    x, w, b = operands(name)
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": integers(2, 8, *(2 * s for s in SIZES[:rank]))[:, ::2, ..., 1::2],
        "offset": integers(5, 4, *SIZES[:rank])[3:],
        "expanded": integers(1, 4, *SIZES[:rank]).expand(3, *[-1] * (rank + 1)),
        "one number": torch.full((), 2.0).expand(2, 4, *SIZES[:rank]),
        "axes reversed": integers(*SIZES[:rank][::-1], 4, 2).permute(*range(rank + 1, -1, -1)),
    }
    filters = {
        "plain": w,
        "transposed": w.transpose(-1, 0).contiguous().transpose(-1, 0),
        "expanded": w[:1].expand_as(w),
    }
    for view in views.values():
        for filter_ in filters.values():
            agree(*both(name, view, filter_, b), strides=False)
    bias = integers(12, seed=2)[::2]
    agree(*both(name, x, w, bias))


def test_inputs_are_left_alone():
    x, w, b = (t.requires_grad_() for t in operands("conv2d"))
    kept = [t.detach().clone() for t in (x, w, b)]
    residual = torch.ones(2, 6, 5, 5)
    openconv.conv2d(x, w, b, residual=residual, activation="relu").sum().backward()
    with torch.no_grad():
        openconv.conv2d(x, w, b, residual=residual, activation="relu")
    assert all(torch.equal(t, k) for t, k in zip((x, w, b), kept, strict=True))
    assert bool((residual == 1).all())


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_lazily_conjugated_and_negated_values(name):
    x, w, b = operands(name, dtype=torch.complex64)
    agree(*both(name, x.conj(), w, b))
    agree(*both(name, x, w.conj(), b))
    agree(*both(name, x, w, b.conj()))
    assert x.conj().imag.is_neg()
    agree(*both(name, x.conj().imag, w.conj().imag, b.conj().imag), strides=False)
    agree(*both(name, torch._neg_view(x.real.contiguous()), w.real.contiguous(), b.real.contiguous()))
    agree(*both(name, x.real.contiguous(), torch._neg_view(w.real.contiguous()), b.real.contiguous()))


# -- nothing to compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_batch(name):
    x, w, b = operands(name)
    got, wanted = both(name, x[:0], w, b)
    assert got.shape == wanted.shape
    w.requires_grad_()
    getattr(openconv, name)(x[:0], w, b).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS[:3])
def test_no_channels_give_no_channels(name, bias):
    x, w, b = operands(name)
    given = b if bias else None
    got, wanted = both(name, x[:, :0], w[:, :0], given)
    assert got.shape == wanted.shape
    assert got.shape[1] == 0
    assert both(name, x[0, :0], w[:, :0], given)[0].shape == wanted.shape[1:]


@pytest.mark.parametrize("name", FUNCTIONS[3:])
def test_empty_result(name):
    rank = rank_of(name)
    x, w, b = integers(2, 4, *[1] * rank), integers(4, 3, *[2] * rank), integers(3)
    got, wanted = both(name, x, w, b, padding=1)
    assert got.shape == wanted.shape == (2, 3, *[0] * rank)


# -- NumPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numpy(name):
    x, w, b = operands(name, groups=2)
    wanted = getattr(F, name)(x, w, b, stride=2, groups=2)
    got = getattr(openconv, name)(x.numpy(), w.numpy(), b.numpy(), stride=2, groups=2)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, wanted.numpy())
    assert got.flags.writeable
    assert got.dtype == np.float32


def test_numpy_views_and_types():
    x, w, b = operands("conv2d", dtype=torch.float64)
    frozen = x.numpy()[..., ::-1, :]
    frozen.flags.writeable = False
    wanted = F.conv2d(x.flip(2), w, b)
    np.testing.assert_array_equal(openconv.conv2d(frozen, w.numpy(), b.numpy()), wanted.numpy())
    for dtype in (np.int8, np.float16, np.complex64):
        got = openconv.conv2d(x.numpy().astype(dtype), w.numpy().astype(dtype), residual=np.ones((1, 6, 1, 1), dtype))
        assert isinstance(got, np.ndarray)
        assert got.dtype == dtype
    with pytest.raises(TypeError, match="weight is of type ndarray; wanted a Tensor"):
        openconv.conv2d(x, w.numpy())  # type: ignore[type-var]


# -- what torch's functions lack ---------------------------------------------------------------------------------

TORCHS: dict[str, Any] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "leaky_relu(0.2)": lambda t: F.leaky_relu(t, 0.2),
    "elu": F.elu,
    "elu(0.5)": lambda t: F.elu(t, 0.5),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "clamp": lambda t: t,
    "clamp(0,6)": F.relu6,
    "clamp(-1)": lambda t: t.clamp(min=-1),
}


def test_every_activation_is_compared():
    assert {text.partition("(")[0] for text in TORCHS} == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", TORCHS)
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_activation(name, activation):
    x, w, b = operands(name)
    wanted = TORCHS[activation](getattr(F, name)(x, w / 8, b))
    for tensor in (w, w.clone().requires_grad_()):  # fused, and behind the operator
        for _ in range(2):
            agree(getattr(openconv, name)(x, tensor / 8, b, activation=activation), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_residual_is_added_before_the_activation_and_broadcast(name):
    x, w, b = operands(name)
    plain = getattr(F, name)(x, w, b)
    rank = rank_of(name)
    full = integers(*plain.shape, seed=3)
    shapes = [(6, *[1] * rank), (1, 1, *plain.shape[2:]), (1,), (), plain.shape[-1:]]
    for residual in [
        full,
        full.transpose(0, -1).contiguous().transpose(0, -1),
        *(integers(*s, seed=3) for s in shapes),
    ]:
        for _ in range(2):
            got = getattr(openconv, name)(x, w, b, residual=residual, activation="relu")
            agree(got, F.relu(plain + residual), strides=False)
    for residual in (full[0], full[0, :1], full[:1]):
        agree(getattr(openconv, name)(x[0], w, b, residual=residual), plain[0] + full[0, : residual.shape[-rank - 1]])
    half = getattr(openconv, name)(x.half(), w.half(), residual=full.half())
    agree(half, (getattr(F, name)(x, w) + full).half())


def test_every_engine_can_be_asked_for():
    taken = set()
    for case, (name, k, groups) in {
        "dense": ("conv2d", 6, 1),
        "depthwise": ("conv2d", 4, 4),
        "1x1": ("conv2d", 6, 1),
    }.items():
        x, w, b = operands(name, k=k, groups=groups)
        w = w[..., :1, :1] if case == "1x1" else w
        for engine in engines():
            if engine.device != "cpu":
                continue
            try:
                got = openconv.conv2d(x, w, b, groups=groups, engine=engine.name)
            except openconv.UnsupportedProblem:
                continue
            taken.add(engine.name)
            torch.testing.assert_close(got, F.conv2d(x, w, b, groups=groups))
    assert taken >= {"cpu.naive", "cpu.im2col_gemm", "cpu.gemm_1x1", "cpu.depthwise"}


def test_an_engine_that_refuses_says_why_and_a_list_falls_through():
    x, w, _ = operands("conv2d")
    with pytest.raises(openconv.UnsupportedProblem) as refused:
        openconv.conv2d(x, w, engine="cpu.gemm_1x1")
    text = str(refused.value)
    assert "fprop n2 c4 h7 w6 k6 r3 s2 f32 nchw" in text
    assert "cpu.gemm_1x1: filter is (3, 2)" in text
    assert "cpu.naive: engine is forced to cpu.gemm_1x1" in text
    agree(openconv.conv2d(x, w, engine="cpu.gemm_1x1,cpu.naive"), F.conv2d(x, w))
    with pytest.raises(ValueError, match=r"no engine 'cpu\.fast'; wanted one of .*cpu\.naive"):
        openconv.conv2d(x, w, engine="cpu.fast")


def test_max_workspace():
    x, w, _ = operands("conv2d")
    agree(openconv.conv2d(x, w, max_workspace=0), F.conv2d(x, w))
    agree(openconv.conv2d(x, w, engine="cpu.im2col_gemm", max_workspace=1 << 20), F.conv2d(x, w))
    with pytest.raises(
        openconv.UnsupportedProblem, match=r"cpu\.im2col_gemm: workspace is \d+ bytes; max_workspace is 0"
    ):
        openconv.conv2d(x, w, engine="cpu.im2col_gemm", max_workspace=0)


def test_accuracy_and_precision():
    x, w, _ = operands("conv2d")
    agree(openconv.conv2d(x, w, accuracy="strict", precision="ieee"), F.conv2d(x, w))
    for bad, words in (
        ({"accuracy": "loose"}, "'loose'"),
        ({"precision": "fp8"}, "'fp8'"),
        ({"max_workspace": -1}, "-1"),
    ):
        with pytest.raises(ValueError, match=words):
            openconv.conv2d(x, w, **bad)


@pytest.mark.parametrize(
    "activation, error, words",
    [("fast", ValueError, "'fast'"), ("add", ValueError, "'add'"), ("relu(3)", ValueError, "relu"), (3, TypeError, "3"),
     ("leaky_relu(x)", ValueError, "'leaky_relu(x)'"), ("relu+gelu", ValueError, "'relu+gelu'")],
)  # fmt: skip
def test_activations_that_are_none(activation, error, words):
    x, w, _ = operands("conv2d")
    with pytest.raises(error) as raised:
        openconv.conv2d(x, w, activation=activation)
    assert words in str(raised.value)
    assert "wanted" in str(raised.value)


# -- errors ------------------------------------------------------------------------------------------------------

X, W, B = torch.ones(2, 4, 5, 5), torch.ones(6, 4, 3, 3), torch.ones(6)
WT = torch.ones(4, 3, 3, 3)
BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    # name: function, positional, keyword, what the text must name
    "channels": ("conv2d", (X, W[:, :3]), {}, "expected input [2, 4, 5, 5] to have 3 channels, but got 4"),
    "channels of groups": ("conv2d", (X, W), {"groups": 3}, "to have 12 channels, but got 4"),
    "channels transposed": ("conv_transpose2d", (X[:, :3], WT), {}, "to have 4 channels, but got 3"),
    "channels of nobody": ("conv2d", (X[:0, :3], W), {}, "to have 4 channels, but got 3"),
    "input of two axes": ("conv2d", (X[0, 0], W), {}, "[5, 5]"),
    "input of five axes": ("conv2d", (X[None], W), {}, "[1, 2, 4, 5, 5]"),
    "1d input of one axis": ("conv1d", (X[0, 0, 0], W[..., 0]), {}, "[5]"),
    "3d input of six axes": ("conv3d", (X[None, None], W[..., None]), {}, "[1, 1, 2, 4, 5, 5]"),
    "weight of three axes": ("conv2d", (X, W[..., 0]), {}, "[6, 4, 3]"),
    "no filters": ("conv2d", (X, W[:0]), {}, "[0, 4, 3, 3]"),
    "empty filter": ("conv2d", (X, W[..., :0]), {}, "[6, 4, 3, 0]"),
    "no filters transposed": ("conv_transpose2d", (X, WT[:, :0]), {}, "[4, 0, 3, 3]"),
    "no channels transposed": ("conv_transpose2d", (X[:, :0], WT[:0]), {}, "[0, 3, 3, 3]"),
    "empty image": ("conv2d", (X[:, :, :0], W), {"padding": 2}, "[2, 4, 0, 5]"),
    "empty image transposed": ("conv_transpose2d", (X[:, :, :0], WT), {}, "[2, 4, 0, 5]"),
    "groups do not divide K": ("conv2d", (X, W[:5, :2]), {"groups": 2}, "groups=2"),
    "groups do not divide C": ("conv_transpose2d", (X, WT), {"groups": 3}, "groups=3"),
    "groups of zero": ("conv2d", (X, W), {"groups": 0}, "groups is 0"),
    "groups below zero": ("conv2d", (X, W), {"groups": -1}, "groups is -1"),
    "groups as float": ("conv2d", (X, W), {"groups": 1.0}, "groups is 1.0"),
    "groups as bool": ("conv2d", (X, W), {"groups": True}, "groups is True"),
    "padding by another name": ("conv2d", (X, W), {"padding": "full"}, "'full'"),
    "same with a stride": ("conv2d", (X, W), {"padding": "same", "stride": 2}, "(2, 2)"),
    "same transposed": ("conv_transpose2d", (X, WT), {"padding": "same"}, "'same'"),
    "padding below zero": ("conv2d", (X, W), {"padding": -1}, "padding is -1"),
    "padding below zero transposed": ("conv_transpose2d", (X, WT), {"padding": (0, -2)}, "(0, -2)"),
    "padding as float": ("conv2d", (X, W), {"padding": 1.0}, "padding is 1.0"),
    "padding of three": ("conv2d", (X, W), {"padding": (1, 1, 1)}, "padding has 3 values"),
    "padding is nothing": ("conv2d", (X, W), {"padding": None}, "padding is None"),
    "padding is a vector": ("conv2d", (X, W), {"padding": torch.ones(2).long()}, "tensor([1, 1])"),
    "stride of zero": ("conv2d", (X, W), {"stride": 0}, "stride is 0"),
    "stride below zero": ("conv2d", (X, W), {"stride": (1, -1)}, "(1, -1)"),
    "stride as float": ("conv2d", (X, W), {"stride": 1.5}, "stride is 1.5"),
    "stride as bool": ("conv2d", (X, W), {"stride": True}, "stride is True"),
    "stride as text": ("conv2d", (X, W), {"stride": "same"}, "stride is 'same'"),
    "stride as range": ("conv2d", (X, W), {"stride": range(1, 3)}, "range(1, 3)"),
    "stride as array": ("conv2d", (X, W), {"stride": np.array([1, 2])}, "array([1, 2])"),
    "stride of three": ("conv2d", (X, W), {"stride": (1, 1, 1)}, "stride has 3 values"),
    "stride of none": ("conv2d", (X, W), {"stride": ()}, "stride has 0 values"),
    "1d stride of two": ("conv1d", (X[..., 0], W[..., 0]), {"stride": (1, 1)}, "stride has 2 values"),
    "3d stride of two": ("conv3d", (X[..., None], W[..., None]), {"stride": (1, 2)}, "stride has 2 values"),
    "dilation of zero": ("conv2d", (X, W), {"dilation": 0}, "dilation is 0"),
    "dilation below zero": ("conv2d", (X, W), {"dilation": -1}, "dilation is -1"),
    "filter beyond the image": ("conv2d", (X[..., :2], W), {}, "[5, 2]"),
    "dilated beyond the image": ("conv2d", (X, W), {"dilation": 3}, "[7, 7]"),
    "filter beyond the image, no batch": ("conv2d", (X[:0, ..., :2], W), {}, "[5, 2]"),
    "output padding of a stride": ("conv_transpose2d", (X, WT), {"output_padding": 2, "stride": 2}, "(2, 2)"),
    "output padding alone": ("conv_transpose2d", (X, WT), {"output_padding": 1}, "output_padding (1, 1)"),
    "output padding below zero": ("conv_transpose2d", (X, WT), {"output_padding": -1, "stride": 2}, "is -1"),
    "output padding as float": ("conv_transpose2d", (X, WT), {"output_padding": 1.0, "stride": 2}, "is 1.0"),
    "output below nothing": ("conv_transpose2d", (X[..., :1, :1], WT), {"padding": 3}, "[-3, -3]"),
    "bias too short": ("conv2d", (X, W, B[:5]), {}, "bias of size [5]"),
    "bias of one": ("conv2d", (X, W, B[:1]), {}, "bias of size [1]"),
    "bias of two axes": ("conv2d", (X, W, B[:, None]), {}, "bias of size [6, 1]"),
    "bias of no axis": ("conv2d", (X, W, B[0]), {}, "bias of size []"),
    "bias transposed": ("conv_transpose2d", (X, WT, B), {}, "with 3 elements, but got bias of size [6]"),
    "input and weight differ": ("conv2d", (X.double(), W), {}, "input is torch.float64 and weight is torch.float32"),
    "half and float": ("conv2d", (X, W.half()), {}, "input is torch.float32 and weight is torch.float16"),
    "complex and real": ("conv2d", (X.to(torch.complex64), W), {}, "input is torch.complex64"),
    "integer and real": ("conv2d", (X, W.long()), {}, "weight is torch.int64"),
    "input and bias differ": ("conv2d", (X, W, B.double()), {}, "bias is torch.float64"),
    "bool": ("conv2d", (X.bool(), W.bool()), {}, "torch.bool"),
    "bool transposed": ("conv_transpose2d", (X.bool(), WT.bool()), {}, "torch.bool"),
    "float8": ("conv2d", (X.to(torch.float8_e4m3fn), W.to(torch.float8_e4m3fn)), {}, "torch.float8_e4m3fn"),
    "uint16": ("conv2d", (X.to(torch.uint16), W.to(torch.uint16)), {}, "torch.uint16"),
    "input is a list": ("conv2d", ([1.0], W), {}, "input is of type list"),
    "input is nothing": ("conv2d", (None, W), {}, "input is of type NoneType"),
    "weight is nothing": ("conv2d", (X, None), {}, "weight is of type NoneType"),
    "weight is a list": ("conv2d", (X, [1.0]), {}, "weight is of type list"),
    "bias is a number": ("conv2d", (X, W, 3), {}, "bias is of type int"),
    "bias is false": ("conv2d", (X, W), {"bias": False}, "bias is of type bool"),
    "input is sparse": ("conv2d", (X.to_sparse(), W), {}, "torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("cached", [False, True])
def test_bad_calls_raise_what_torch_raises(case, cached):
    name, args, kwargs, words = BAD[case]
    if cached:  # a plan for the good call next to it: 1 == 1.0 == True, yet torch takes only the first
        openconv.conv2d(X, W)
        openconv.conv2d(X, W, padding=1)
        openconv.conv_transpose2d(X, WT, stride=2, output_padding=1)
    with pytest.raises((RuntimeError, TypeError, ValueError)) as torchs:
        getattr(F, name)(*args, **kwargs)
    with pytest.raises(torchs.type) as ours:
        getattr(openconv, name)(*args, **kwargs)
    assert ours.type is torchs.type
    assert words in str(ours.value)
    assert str(ours.value).startswith((name, "openconv."))


def test_residuals_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r"residual of size \[5\] does not broadcast to the result's \[2, 6, 3, 3\]"):
        openconv.conv2d(X, W, residual=torch.ones(5))
    with pytest.raises(RuntimeError, match=r"residual is torch\.float64"):
        openconv.conv2d(X, W, residual=torch.ones(1).double())
    with pytest.raises(TypeError, match="residual is of type int"):
        openconv.conv2d(X, W, residual=1)  # type: ignore[type-var]


def test_tensors_must_be_in_one_place():
    with pytest.raises(RuntimeError, match="input is on cpu and weight on meta"):
        openconv.conv2d(X, W.to("meta"))
    with pytest.raises(RuntimeError, match="input is on meta and bias on cpu"):
        openconv.conv2d(X.to("meta"), W.to("meta"), B)


def test_nothing_stands_behind_the_arguments_of_torch():
    with pytest.raises(TypeError):
        openconv.conv2d(X, W, B, 1, 0, 1, 1, "relu")  # type: ignore[call-arg]


# -- values that are no numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
def test_not_a_number_stays_where_it_belongs(name, value):
    x, w, b = operands(name)
    x = x.clone()
    x[0, 1].flatten()[0] = value
    got, wanted = both(name, x, w + 5, b)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.isinf(), wanted.isinf())
    assert bool(got[1].isfinite().all())


# -- plans -------------------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch):
    """The problems for which an engine was chosen."""
    seen: list[str] = []
    choose = plan_module.choose  # type: ignore[attr-defined]

    def counting(problem, device, policy):
        seen.append(str(problem))
        return choose(problem, device, policy)

    monkeypatch.setattr(plan_module, "choose", counting)
    return seen


def test_the_second_call_does_not_choose_again(chosen):
    x, w, b = integers(1, 3, 11, 13), integers(5, 3, 3, 3), integers(5)  # sizes of no other test
    for _ in range(3):
        openconv.conv2d(x, w, b)
    assert chosen == ["fprop n1 c3 h11 w13 k5 r3 s3 f32 nchw +bias"]
    openconv.conv2d(x + 1, w + 1, b, stride=[1, 1])  # other values, and another way to say the same
    openconv.conv2d(x[0], w, b)
    assert len(chosen) == 1
    openconv.conv2d(x, w, b, padding=1)
    openconv.conv2d(x.clone(memory_format=torch.channels_last), w, b)
    openconv.conv2d(x, w, b, engine="cpu.naive")
    with openconv.policy(accuracy="strict"):
        openconv.conv2d(x, w, b)
    assert len(chosen) == 5


@pytest.mark.parametrize("gradient", [False, True])
def test_what_is_remembered_of_a_call_holds_no_tensor(gradient):
    x, w, b = integers(1, 2, 9, 5), integers(3, 2, 3, 3), integers(3)
    alive = [weakref.ref(t) for t in (x, w, b)]
    for _ in range(2):
        openconv.conv2d(x, w.requires_grad_(gradient), b)
    del x, w, b
    assert [ref() for ref in alive] == [None, None, None]


def test_a_refused_call_is_refused_again():
    for _ in range(2):
        with pytest.raises(openconv.UnsupportedProblem):
            openconv.conv2d(X, W, engine="cpu.gemm_1x1")


def test_gradients_modes_and_plain_calls_share_a_plan(chosen):
    x, w = integers(1, 2, 12, 5), integers(3, 2, 3, 3)
    openconv.conv2d(x, w)
    openconv.conv2d(x, w.requires_grad_())
    with torch.inference_mode():
        openconv.conv2d(x, w)
    assert len(chosen) == 1


# -- threads -----------------------------------------------------------------------------------------------------


def test_several_threads_at_once():
    cases = []
    for at in range(6):
        name = FUNCTIONS[at]
        x, w, b = operands(name, n=3, k=10)
        cases += [(name, (x, w, b), {"stride": 1 + at % 2}), (name, (x[..., 1:], w, b), {"padding": 1})]
    wanted = [getattr(F, name)(*args, **kwargs) for name, args, kwargs in cases]

    def one(at: int) -> Tensor:
        name, args, kwargs = cases[at % len(cases)]
        return getattr(openconv, name)(*args, **kwargs)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, range(8 * len(cases))))
    for at, got in enumerate(results):
        torch.testing.assert_close(got, wanted[at % len(cases)])


class Filtered(torch.utils.data.Dataset[Tensor]):
    """Filters its image in whatever process asks for an item."""

    def __init__(self, image: Tensor, weight: Tensor) -> None:
        self.image, self.weight = image, weight

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return openconv.conv2d(self.image * (index + 1), self.weight, padding=1)


def test_forked_workers_filter_after_their_parent_did():
    """A child has none of the OpenMP threads that its parent has used."""
    image, weight = torch.randn(1, 512, 512), torch.randn(1, 1, 3, 3)
    data = Filtered(image, weight)
    here = torch.stack([data[at] for at in range(4)])
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    (there,) = loader
    assert torch.equal(there, here)


def test_policies_belong_to_their_thread():
    x, w, _ = operands("conv2d")

    def refused(_: int) -> bool:
        try:
            openconv.conv2d(x, w)
        except openconv.UnsupportedProblem:
            return True
        return False

    with openconv.policy(engine="cpu.gemm_1x1"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert refused(0)
        assert list(pool.map(refused, range(2))) == [False, False]
    assert not refused(0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_thread_gives_the_same(name):
    before = torch.get_num_threads()
    x, w, b = operands(name, n=8, k=16)
    wanted = getattr(F, name)(x, w, b)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            agree(getattr(openconv, name)(x, w, b), wanted)
    finally:
        torch.set_num_threads(before)


# -- calls that are recognised ---------------------------------------------------------------------------------------


def warm(x, w, bias=None, times=4):
    """Call until the comparison of tensors is all that a call is checked by."""
    for _ in range(times):
        got = openconv.conv2d(x, w, bias, padding=1)
    assert any(functional._recognised.values())
    return got


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_recognised_call_is_the_same_call(with_bias):
    x, w, bias = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3), torch.randn(4) if with_bias else None
    first = openconv.conv2d(x, w, bias, padding=1)
    assert torch.equal(warm(x, w, bias), first)
    other = torch.randn(2, 3, 6, 7)
    torch.testing.assert_close(openconv.conv2d(other, w, bias, padding=1), F.conv2d(other, w, bias, padding=1))
    for stride, padding, dilation in ((2, 1, 1), (1, 0, 1), (1, (1, 2), 1), (1, 1, 2)):
        torch.testing.assert_close(
            openconv.conv2d(x, w, bias, stride, padding, dilation), F.conv2d(x, w, bias, stride, padding, dilation)
        )


def test_what_differs_from_a_recognised_call_is_seen():
    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    warm(x, w)

    def right(x, w, **kwargs):
        torch.testing.assert_close(openconv.conv2d(x, w, padding=1, **kwargs), F.conv2d(x, w, padding=1, **kwargs))

    right(torch.randn(5, 3, 6, 7), w)
    right(torch.randn(3, 6, 7), w)
    right(x.to(memory_format=torch.channels_last), w)
    right(torch.randn(2, 3, 7, 6).mT, w)
    right(torch._neg_view(x), w)
    right(x.expand(2, 3, 6, 7)[:, :, ::1], w)
    right(x.double(), w.double())
    right(x.to(torch.complex64).conj(), w.to(torch.complex64))
    assert openconv.conv2d(x.to(memory_format=torch.channels_last), w, padding=1).is_contiguous(
        memory_format=torch.channels_last
    )
    with pytest.raises(RuntimeError, match="wanted the same dtype"):
        openconv.conv2d(x.double(), w, padding=1)
    for one in (True, 1.0):
        wrong: Any = one
        with pytest.raises(TypeError, match=f"padding is {one}"):
            openconv.conv2d(x, w, padding=wrong)
    assert isinstance(openconv.conv2d(x.numpy(), w.numpy(), padding=1), np.ndarray)
    w.resize_(4, 3, 1, 9)  # the same object with another shape
    torch.testing.assert_close(openconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1))


def test_gradients_are_seen_behind_a_recognised_call():
    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    warm(x, w)
    assert not openconv.conv2d(x, w, padding=1).requires_grad
    x.requires_grad_()
    assert openconv.conv2d(x, w, padding=1).requires_grad
    warm(x, w)
    (got,) = torch.autograd.grad(openconv.conv2d(x, w, padding=1).sum(), x)
    (wanted,) = torch.autograd.grad(F.conv2d(x, w, padding=1).sum(), x)
    torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        assert not warm(x, w).requires_grad
    assert openconv.conv2d(x, w, padding=1).requires_grad
    with torch.inference_mode():
        assert warm(x, w).is_inference()
    assert not openconv.conv2d(x.detach(), w, padding=1).is_inference()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch's own forward-mode derivatives
def test_whoever_looks_on_sees_a_recognised_call():
    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    wanted = warm(x, w)
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Dispatch():
        openconv.conv2d(x, w, padding=1)
    assert "openconv.fprop.default" in seen
    with Function():
        openconv.conv2d(x, w, padding=1)
    assert "conv2d" in seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert openconv.conv2d(x, w, padding=1).dtype == torch.bfloat16
    with torch.profiler.profile() as profile:
        openconv.conv2d(x, w, padding=1)
    assert any("openconv" in event.key for event in profile.key_averages())
    batch = torch.randn(3, 2, 3, 6, 7)
    mapped = torch.vmap(lambda each: openconv.conv2d(each, w, padding=1))(batch)
    torch.testing.assert_close(mapped[1], F.conv2d(batch[1], w, padding=1))
    with forward_ad.dual_level():
        dual = openconv.conv2d(forward_ad.make_dual(x, x), w, padding=1)
        tangent = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(tangent, wanted)
    inner: list[torch.Tensor] = []

    def keep(each: torch.Tensor) -> torch.Tensor:
        inner.append(each)
        return each.sum()

    torch.func.grad(keep)(x)
    with contextlib.suppress(RuntimeError):  # torch's own functions may refuse one that has outlived its transform
        torch.testing.assert_close(openconv.conv2d(inner[0], w, padding=1), wanted)


def test_an_error_of_a_recognised_call_is_raised_and_nothing_else_is_tried():
    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    warm(x, w)
    calls = []

    def fail(*tensors: Any) -> Tensor:
        calls.append(tensors)
        raise RuntimeError("out of memory")

    for known in functional._recognised.values():
        known[:] = [(same, fail) for same, _ in known]
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            openconv.conv2d(x, w, padding=1)
    finally:
        forget_plans()
    assert len(calls) == 1


def test_a_changed_database_is_seen_behind_a_recognised_call():
    x, w = torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3)
    warm(x, w)
    forget_plans()
    assert not functional._recognised
    with openconv.policy(engine="cpu.naive"):
        torch.testing.assert_close(warm(x, w), F.conv2d(x, w, padding=1))


def test_filters_that_come_and_go_leave_little_behind():
    x = torch.randn(2, 3, 6, 7)
    for _ in range(20):
        w = torch.randn(4, 3, 3, 3)
        torch.testing.assert_close(openconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1))
    shapes = [torch.randn(2, 3, 6, width) for width in range(3, 20)]
    for x in shapes * 3:
        torch.testing.assert_close(openconv.conv2d(x, w, padding=1), F.conv2d(x, w, padding=1))
    assert all(len(known) <= functional._MOST_SHAPES for known in functional._recognised.values())
