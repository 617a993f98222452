"""Grades exercise 9: the parts bit by bit, the product by its error, and that it is made of three products."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[np.float32]


def _numbers(seed: int, *shape: int) -> Array:
    draw = np.random.default_rng(seed)
    numbers = draw.standard_normal(shape) * 10.0 ** draw.integers(-12, 12, shape)
    numbers[draw.random(shape) < 0.02] = 0
    return numbers.astype(np.float32)


def test_parts_are_tf32(answer: ModuleType) -> None:
    x = _numbers(0, 10_000)
    for name, part in zip(("high", "low"), answer.split(x), strict=True):
        if part.dtype != np.float32:
            pytest.fail(f"{name} is of {part.dtype}; wanted float32", pytrace=False)
        spare = part.view(np.uint32) & 0x1FFF
        if spare.any():
            at = int(np.argmax(spare != 0))
            pytest.fail(f"{name} of {x[at]!r} is {part[at]!r}, whose last 13 bits are not zeros", pytrace=False)


def test_parts_add_up(answer: ModuleType) -> None:
    x = _numbers(1, 10_000)
    exact = x.astype(np.float64)
    high, low = (part.astype(np.float64) for part in answer.split(x))
    for name, rest, bits in (("high", exact - high, 11), ("high + low", exact - high - low, 22)):
        beyond = np.abs(rest) > np.abs(exact) * 2.0**-bits
        if beyond.any():
            at = int(np.argmax(beyond))
            off = np.log2(abs(rest[at] / exact[at]))
            pytest.fail(f"{name} of {x[at]!r} is off by 2^{off:.1f} of it; wanted 2^-{bits}", pytrace=False)


def test_numbers_of_eleven_bits_have_no_rest(answer: ModuleType) -> None:
    x = np.ldexp(np.arange(1024, 2048), -7).astype(np.float32)
    high, low = answer.split(x)
    assert (high == x).all(), "a number that is a tf32 already is its own high part"
    assert (low == 0).all(), "and leaves nothing"


@pytest.mark.parametrize("depth", [1, 16, 300])
def test_products_are_as_good_as_f32(answer: ModuleType, depth: int) -> None:
    draw = np.random.default_rng(depth)
    x, w = (draw.standard_normal(shape).astype(np.float32) for shape in ((24, depth), (depth, 20)))
    exact, size = x.astype(np.float64) @ w, np.abs(x).astype(np.float64) @ np.abs(w)

    def error(got: Array) -> float:
        return float(np.max(np.abs(got - exact) / size))

    alone = error(answer.tensor_core(np.zeros((24, 20), np.float32), x, w))
    ours = error(answer.multiply(x, w))
    wanted = 2.0**-21 + depth * 2.0**-24
    if not ours <= wanted:
        text = f"depth {depth}: off by {ours:.1e} of sum|x||w|, {alone:.1e} with one product; wanted {wanted:.1e}"
        pytest.fail(text, pytrace=False)


def test_three_products_are_enough(answer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, sizes = [], []
    core = answer.tensor_core

    def counted(sums: Array, a: Array, b: Array) -> Array:
        calls.append(a.shape[1])
        sizes.append(float(np.abs(a).mean() * np.abs(b).mean()))
        return core(sums, a, b)

    monkeypatch.setattr(answer, "tensor_core", counted)
    draw = np.random.default_rng(5)
    x, w = (draw.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (32, 8)))
    answer.multiply(x, w)
    if sum(calls) != 3 * 32:
        pytest.fail(f"tensor_core was given {sum(calls) / 32:g} products of the whole depth; wanted 3", pytrace=False)
    if sizes[0] > sizes[-1]:
        seen = f"the first product has factors of {sizes[0]:.0e}, the last of {sizes[-1]:.0e}"
        pytest.fail(f"{seen}; wanted the small ones first", pytrace=False)
