"""Max pooling on the CPU: the kernels against torch's, and the functions and modules that run them."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import openconv
from openconv import pooling
from openconv.cpu.pool import run_max
from openconv.pool import Pool
from openconv.tensors import memory_format
from tests.support import threads

THEIRS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
OURS = {1: pooling.max_pool1d, 2: pooling.max_pool2d, 3: pooling.max_pool3d}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.contiguous(memory_format=memory_format(tensor.dim(), layout))


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def check(x: torch.Tensor, layout: str, window, stride, padding) -> None:
    """Every element of a poisoned result is torch's, and nothing behind it is written."""
    rank = x.dim() - 2
    wanted = THEIRS[rank](x, window, stride, padding)
    pool = Pool(
        mode="max", window=tuple(window), stride=tuple(stride), padding=tuple((p, p) for p in padding), n=x.shape[0],
        c=x.shape[1], spatial=tuple(x.shape[2:]), dtype={torch.float32: "f32", torch.float64: "f64"}[x.dtype],
        layout=layout,
    )  # fmt: skip
    assert pool.y_shape == wanted.shape
    room = torch.full((wanted.numel() + 64,), 12345.0, dtype=x.dtype)
    y = room[: wanted.numel()].as_strided(wanted.shape, laid_out(torch.empty_like(wanted), layout).stride())
    run_max(pool, laid_out(x, layout), y)
    same(y, wanted)
    assert bool((room[wanted.numel() :] == 12345.0).all())


@st.composite
def poolings(draw):
    rank = draw(st.integers(1, 3))
    window = [draw(st.integers(1, 5)) for _ in range(rank)]
    stride = [draw(st.integers(1, 4)) for _ in range(rank)]
    padding = [draw(st.integers(0, taps // 2)) for taps in window]
    sizes = [draw(st.integers(taps, 40 if at == rank - 1 else 9)) for at, taps in enumerate(window)]
    layout = draw(st.sampled_from(["nchw", "nhwc"])) if rank > 1 else "nchw"
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 13, 16, 33])), sizes, window, stride, padding, \
        layout, dtype, draw(st.integers(0, 2**31))  # fmt: skip


@given(poolings())
@settings(max_examples=150)
def test_right_on_random_poolings(drawn):
    n, c, sizes, window, stride, padding, layout, dtype, seed = drawn
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(n, c, *sizes, dtype=dtype, generator=made)
    some = torch.rand(x.shape, generator=made)
    x[some < 0.02] = math.nan
    x[some > 0.9] = -math.inf
    check(x, layout, window, stride, padding)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [(1, 64, 112, 112), (2, 3, 65, 129), (1, 1, 500, 3), (3, 70, 7, 7)])
@pytest.mark.parametrize("numbers", [(3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 3, 2)])
def test_right_on_layers(shape, numbers, layout):
    window, stride, padding = ((value,) * 2 for value in numbers)
    check(torch.randn(shape), layout, window, stride, padding)


def test_threads_change_nothing():
    x = torch.randn(2, 24, 60, 61)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(pooling.max_pool2d(x, 3, 2, 1))
    same(found[0], found[1])
    same(found[0], found[2])


# -- the functions ----------------------------------------------------------------------------------------------------


def counted(monkeypatch) -> list[Pool]:
    """The poolings that the kernels compute."""
    ran: list[Pool] = []
    usual = pooling._on_the_cpu

    def run(pool: Pool, x: torch.Tensor) -> torch.Tensor:
        ran.append(pool)
        return usual(pool, x)

    monkeypatch.setattr(pooling, "_on_the_cpu", run)
    return ran


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_functions_take_what_torchs_take(rank, monkeypatch):
    ran = counted(monkeypatch)
    x = torch.randn(2, 5, *(9, 10, 11)[:rank])
    each: tuple[Any, ...] = (
        (3,), (3, 2), (3, 2, 1), ([3] * rank, [2] * rank, [1] * rank), ((2,), None, 0), ((3,) * rank, (), (1,)),
    )  # fmt: skip
    for args in each:
        theirs: Any = THEIRS[rank]
        same(OURS[rank](x, *args), theirs(x, *[None if value == () else value for value in args]))
    same(OURS[rank](x, kernel_size=3, stride=2, padding=1), THEIRS[rank](x, kernel_size=3, stride=2, padding=1))
    assert len(ran) == len(each) + 1


def test_what_is_torchs(monkeypatch):
    """Other dtypes, dilations, windows that begin inside only, indices, gradients, strides with gaps."""
    ran = counted(monkeypatch)
    x = torch.randn(2, 5, 12, 13)
    same(pooling.max_pool2d(x, 3, 2, 1, ceil_mode=True), F.max_pool2d(x, 3, 2, 1, ceil_mode=True))
    same(pooling.max_pool2d(x, 3, dilation=2), F.max_pool2d(x, 3, dilation=2))
    same(pooling.max_pool2d(x.bfloat16(), 3), F.max_pool2d(x.bfloat16(), 3))
    same(pooling.max_pool2d(x[0], 3), F.max_pool2d(x[0], 3))
    same(pooling.max_pool2d(x[:, :, ::2], 3), F.max_pool2d(x[:, :, ::2], 3))
    values, places = pooling.max_pool2d(x, 3, return_indices=True)
    same(values, F.max_pool2d(x, 3))
    assert places.dtype is torch.int64
    wanted = x.clone().requires_grad_()
    F.max_pool2d(wanted, 3, 2, 1).sum().backward()
    mine = x.clone().requires_grad_()
    pooling.max_pool2d(mine, 3, 2, 1).sum().backward()
    same(mine.grad, wanted.grad)  # type: ignore[arg-type]
    assert not ran
    with torch.no_grad():
        pooling.max_pool2d(mine, 3, 2, 1)
    assert len(ran) == 1


@pytest.mark.parametrize("args", [(0,), (3, 0), (3, 2, 2), ((3, 3, 3),), ("3",), (3, 2, -1), (20,)], ids=str)
def test_errors_are_torchs(args):
    x = torch.randn(1, 2, 8, 9)
    with pytest.raises(Exception) as wanted:
        F.max_pool2d(x, *args)
    with pytest.raises(wanted.type) as got:
        pooling.max_pool2d(x, *args)
    assert str(got.value) == str(wanted.value)


def test_traces_hold_torchs_operator():
    x = torch.randn(1, 2, 8, 9)
    traced = torch.jit.trace(lambda x: pooling.max_pool2d(x, 3, 2, 1), (x,))
    assert "max_pool2d" in str(traced.graph)
    exported = make_fx(lambda x: pooling.max_pool2d(x, 3, 2, 1))(x)
    assert "max_pool2d" in exported.code
    same(traced(2 * x), F.max_pool2d(2 * x, 3, 2, 1))


def test_large_results_reuse_freed_memory():
    x = torch.randn(4, 64, 160, 160)
    first = pooling.max_pool2d(x, 2)
    assert first.numel() * 4 > 4 << 20
    same(first, F.max_pool2d(x, 2))


# -- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_modules(rank, monkeypatch):
    ran = counted(monkeypatch)
    name = f"MaxPool{rank}d"
    mine, torchs = (getattr(where, name)(3, 2, padding=1) for where in (openconv.nn, nn))
    x = torch.randn(2, 4, *(9, 10, 11)[:rank])
    same(mine(x), torchs(x))
    assert len(ran) == 1
    assert isinstance(mine, getattr(nn, name))
    assert repr(mine) == repr(torchs)
    same(pickle.loads(pickle.dumps(mine))(x), torchs(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = torch.relu(self.second(y) + y)
        return F.max_pool2d(torch.max_pool2d(y, 3, 2, 1), 2, padding=1)


def test_converted_models_pool_by_ours(monkeypatch):
    model = Network().eval()
    x = torch.randn(2, 3, 33, 34)
    with torch.no_grad():
        wanted = model(x)
        report = openconv.convert(model, fuse=True)
        ran = counted(monkeypatch)
        torch.testing.assert_close(model(x), wanted)
    assert len(ran) == 3
    told = [(each.name, each.module) for each in report.pooled]
    assert told[:2] == [("", "max_pool2d()"), ("", "max_pool2d()")] or told[0][1] == "max_pool2d()"
    assert told[-1][0] == "first.3"
    assert told[-1][1].startswith("MaxPool2d(kernel_size=2")
    assert "max pooling by openconv's:" in str(report)
    assert any(fused.sum for fused in report.fused), "a sum behind a pooling is fused as well"
    assert type(model.first[3]) is openconv.nn.MaxPool2d
    again = openconv.convert(model, fuse=True)
    assert [each.name for each in again.pooled] == [""] * 2, "the functions of its own forward; the module is ours"
    back = openconv.convert(model, back=True)
    assert [each.name for each in back.pooled] == ["first.3"]
    assert type(model.first[3]) is nn.MaxPool2d


def test_poolings_with_code_of_their_own_stay():
    class Own(nn.MaxPool2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Own(2), nn.MaxPool2d(2)).eval()
    model[2].forward = lambda input: input
    report = openconv.convert(model, fuse=True)
    assert not report.pooled
    assert [type(part) for part in itertools.islice(model, 1, 3)] == [Own, nn.MaxPool2d]


def test_without_fuse_poolings_stay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)).eval()
    assert not openconv.convert(model).pooled
    assert type(model[1]) is nn.MaxPool2d
