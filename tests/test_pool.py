"""Pool and pooling on the CPU: sizes, errors, and both passes against torch's own and against sums over places."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openconv.pool import MODES, Pool
from openconv.pooling import pool_backward, pool_forward
from openconv.tensors import DTYPES


def make(**fields: Any) -> Pool:
    """Also of one int for all axes."""
    return Pool(**fields)


POOLS = (
    make(mode="max", window=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)), n=2, c=3, spatial=(9, 8)),
    make(mode="max", window=(2, 3), stride=(1, 2), padding=((0, 1), (2, 0)), n=1, c=4, spatial=(6, 7)),
    make(mode="max", window=(2, 2), stride=(3, 2), padding=((1, 0), (0, 0)), n=2, c=2, spatial=(8, 5)),
    make(mode="max", window=(4,), stride=(2,), padding=((1, 3),), n=2, c=3, spatial=(11,)),
    make(mode="max", window=(2, 3, 2), stride=(1, 2, 2), padding=((1, 0), (1, 1), (0, 1)), n=1, c=2, spatial=(4, 5, 6)),
)


def places(pool: Pool) -> list[list[tuple[Any, ...]]]:
    """Of each window, in row-major order, the places inside the tensor."""
    found = []
    for at in itertools.product(*map(range, pool.out)):
        starts = [q * stride - low for q, stride, (low, _) in zip(at, pool.stride, pool.padding, strict=True)]
        window = itertools.product(*(range(s, s + taps) for s, taps in zip(starts, pool.window, strict=True)))
        found.append([p for p in window if all(0 <= v < size for v, size in zip(p, pool.spatial, strict=True))])
    return found


def by_places(pool: Pool, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx place by place, in float64."""
    y, dx = torch.empty(pool.y_shape).double().flatten(2), torch.zeros(pool.x_shape).double()
    x, dy = x.double(), dy.double().flatten(2)
    for at, window in enumerate(places(pool)):
        values = torch.stack([x[(..., *p)] for p in window])
        if pool.mode != "max":
            count = prod(pool.window) if pool.mode == "avg" else len(window)
            y[..., at] = values.sum(0) / count
            for p in window:
                dx[(..., *p)] += dy[..., at] / count
            continue
        best, chosen = values[0].clone(), torch.zeros(values[0].shape).long()
        for tap, value in enumerate(values):
            take = (value > best) | value.isnan()
            best, chosen = torch.where(take, value, best), torch.where(take, tap, chosen)
        y[..., at] = best
        for tap, p in enumerate(window):
            dx[(..., *p)] += torch.where(chosen == tap, dy[..., at], 0.0)
    return y.view(pool.y_shape), dx


def data(pool: Pool, special: bool = False) -> tuple[Tensor, Tensor]:
    """x, of which many values are equal, and dy."""
    generator = torch.Generator().manual_seed(len(str(pool)))
    x = torch.randint(-3, 4, pool.x_shape, generator=generator).to(DTYPES[pool.dtype])
    if special:
        pick = torch.rand(pool.x_shape, generator=generator)
        x[pick < 0.15], x[pick > 0.5] = torch.nan, -torch.inf
    return x, torch.randn(pool.y_shape, generator=generator).to(DTYPES[pool.dtype])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_both_passes_place_by_place(pool, mode):
    for layout, dtype in (("nchw", "f64"), ("nhwc", "f32"), ("nhwc", "bf16"), ("nchw", "f16")):
        one = replace(pool, mode=mode, layout=layout, dtype=dtype)
        x, dy = data(one)
        y, dx = pool_forward(one, x), pool_backward(one, dy, x if mode == "max" else None)
        wanted_y, wanted_dx = by_places(one, x, dy)
        close: dict[str, Any] = {"rtol": 4 * torch.finfo(x.dtype).eps, "atol": 1e-6 if dtype != "f64" else 1e-14}
        assert y.dtype == dx.dtype == x.dtype
        torch.testing.assert_close(y.double(), wanted_y, **close)
        torch.testing.assert_close(dx.double(), wanted_dx, **close)
        held = y.movedim(1, -1) if layout == "nhwc" else y
        assert held.is_contiguous()


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_nan_and_minus_infinity(pool):
    x, dy = data(pool, special=True)
    wanted_y, wanted_dx = by_places(pool, x, dy)
    torch.testing.assert_close(pool_forward(pool, x).double(), wanted_y, equal_nan=True)
    torch.testing.assert_close(pool_backward(pool, dy, x).double(), wanted_dx)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("special", [False, True])
def test_same_as_torch_where_it_has_the_padding(rank, special):
    pool = make(mode="max", window=3, stride=2, padding=1, n=2, c=3, spatial=(7, 6, 5)[:rank])
    x, dy = data(pool, special)
    for mode in MODES:
        one = replace(pool, mode=mode)
        leaf = x.clone().requires_grad_()
        if mode == "max":
            y = getattr(F, f"max_pool{rank}d")(leaf, 3, 2, 1)
        else:
            y = getattr(F, f"avg_pool{rank}d")(leaf, 3, 2, 1, count_include_pad=mode == "avg")
        y.backward(dy)
        torch.testing.assert_close(pool_forward(one, x), y.detach(), equal_nan=True)
        torch.testing.assert_close(pool_backward(one, dy, x, y.detach()), leaf.grad, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_by_differences(mode):
    pool = replace(POOLS[1], mode=mode, dtype="f64")
    generator = torch.Generator().manual_seed(0)
    x = torch.randperm(prod(pool.x_shape), generator=generator).double().view(pool.x_shape)  # far from ties
    dy = torch.randn(pool.y_shape, generator=generator).double()
    dx, step = pool_backward(pool, dy, x), 1e-3
    for at in range(0, x.numel(), 17):
        moved = x.clone()
        moved.view(-1)[at] += step
        slope = ((pool_forward(pool, moved) - pool_forward(pool, x)) * dy).sum() / step
        torch.testing.assert_close(dx.reshape(-1)[at], slope, rtol=1e-6, atol=1e-8)


def test_no_images():
    pool = replace(POOLS[0], n=0)
    for mode in MODES:
        one = replace(pool, mode=mode)
        assert pool_forward(one, torch.empty(one.x_shape)).shape == one.y_shape
        assert pool_backward(one, torch.empty(one.y_shape), torch.empty(one.x_shape)).shape == one.x_shape


def test_facts():
    pool = make(mode="max", window=3, stride=2, padding=((1, 0),), n=2, c=8, spatial=(8, 9), dtype="f16")
    assert pool.window == (3, 3)
    assert pool.padding == ((1, 0), (1, 0))
    assert pool.out == (4, 4)
    assert (pool.x_shape, pool.y_shape) == ((2, 8, 8, 9), (2, 8, 4, 4))
    assert pool.min_bytes == 2 * (2 * 8 * 72 + 2 * 8 * 16)
    assert not pool.disjoint
    assert replace(pool, stride=(3, 4)).disjoint


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mode": "median"}, "mode is 'median'; wanted one of max, avg, avg_exclude"),
        ({"dtype": "i8"}, "dtype is 'i8'"),
        ({"layout": "chwn"}, "layout is 'chwn'"),
        ({"n": -1}, "n is -1"),
        ({"spatial": (0, 4)}, "spatial is"),
        ({"spatial": (4, 4, 4, 4)}, "wanted 1, 2 or 3"),
        ({"window": (3, 3, 3)}, "window is"),
        ({"stride": 0}, "stride is"),
        ({"padding": -1}, "padding is"),
        ({"padding": ((1, 2, 3), 0)}, "padding of an axis"),
        ({"padding": 3}, "padding on axis 0 is .* less than the window of 3"),
        ({"spatial": (2, 9), "padding": 0}, "padded size on axis 0 is 2; wanted at least the window of 3"),
    ],
)
def test_what_is_no_pool(change, message):
    with pytest.raises(ValueError, match=message):
        replace(POOLS[0], **change)


def test_what_does_not_fit_the_pool():
    pool = POOLS[0]
    x, dy = data(pool)
    with pytest.raises(RuntimeError, match=r"x has shape \(2, 3, 9, 7\); wanted \(2, 3, 9, 8\)"):
        pool_forward(pool, x[..., :7])
    with pytest.raises(TypeError, match="x is of dtype f64; wanted f32"):
        pool_forward(pool, x.double())
    with pytest.raises(RuntimeError, match="dy has shape"):
        pool_backward(pool, x, x)
    with pytest.raises(RuntimeError, match="y has shape"):
        pool_backward(pool, dy, x, x)
    with pytest.raises(ValueError, match="x is None"):
        pool_backward(pool, dy)
    with pytest.raises(RuntimeError, match="wanted both on one device"):
        pool_backward(pool, dy, x.to("meta"))
