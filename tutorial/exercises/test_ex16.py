"""Grades exercise 16: errors against float64, bits, and that additions are of f32."""

from __future__ import annotations

from math import ceil, log2
from types import ModuleType
from typing import Any

import numpy as np
import pytest

_SUMS = ("sum", "nansum", "cumsum", "mean", "average", "dot", "vdot", "matmul", "inner", "einsum", "tensordot", "trace")


@pytest.fixture
def _without_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy without its own sums; methods of arrays are seen by _Watched."""

    def out(name: str) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            pytest.fail(f"np.{name} is out here: its order is NumPy's, not yours", pytrace=False)

        return run

    for name in _SUMS:
        monkeypatch.setattr(np, name, out(name))


class _Watched(np.ndarray):
    """An array that notices sums that are not its learner's, and additions of anything but f32."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **named: Any) -> Any:
        if method != "__call__":
            pytest.fail(f"np.{ufunc.__name__}.{method} is out here: its order is NumPy's, not yours", pytrace=False)
        for each in inputs:
            if ufunc is np.add and isinstance(each, np.ndarray) and each.dtype != np.float32:
                pytest.fail(f"an addition is of {each.dtype}; wanted float32", pytrace=False)
        plain = [each.view(np.ndarray) if isinstance(each, _Watched) else each for each in inputs]
        if out is not None:
            named["out"] = tuple(each.view(np.ndarray) if isinstance(each, _Watched) else each for each in out)
        made = getattr(ufunc, method)(*plain, **named)
        return made.view(_Watched) if isinstance(made, np.ndarray) else made


def _bits(values: Any) -> list[int]:
    found: list[int] = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1).tolist()
    return found


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 8, 9, 100, 1024, 1025, 2304, 10**6])
def test_bounds(answer: ModuleType, terms: int) -> None:
    chain, pairs = answer.bounds(terms)
    for name, got, additions in (("in a chain", chain, terms - 1), ("pairwise", pairs, ceil(log2(terms)))):
        wanted = additions * 2.0**-24
        assert got == pytest.approx(wanted), f"{terms} terms {name}: {got}; wanted {wanted}, {additions} additions"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("_without_sums")
def test_pairwise_is_near(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = seed + 1 if seed < 10 else int(2 ** rng.uniform(1, 14))
    shape = [(length,), (3, length), (2, 2, length)][seed % 3]
    values = rng.random(shape, dtype=np.float32) - np.float32(seed % 2 * 0.5)
    got = answer.pairwise(values.view(_Watched))
    wide = values.astype(np.float64)
    exact, size = np.add.reduce(wide, -1), np.add.reduce(np.abs(wide), -1)
    assert np.shape(got) == exact.shape, f"shape is {np.shape(got)} for {shape}; wanted {exact.shape}"
    assert got.dtype == np.float32, f"the sums are of {got.dtype}; wanted float32"
    allowed = ceil(log2(length)) * 2.0**-24 * 1.0001 * size
    off = np.abs(np.asarray(got, np.float64) - exact)
    assert (off <= allowed).all(), (
        f"{length} terms: off by {float((off / size).max()):.2e} of their sizes; "
        f"{ceil(log2(length))} additions a term allow {ceil(log2(length)) * 2.0**-24:.2e}"
    )


@pytest.mark.usefixtures("_without_sums")
def test_where_a_chain_fails(answer: ModuleType) -> None:
    """2^24 and then ones: each addition of a chain loses its one."""
    values = np.ones(1 << 12, np.float32)
    values[0] = 2.0**24
    chain = np.float32(0)
    for value in values:
        chain = chain + value
    assert chain == 2.0**24, "a chain is meant to lose all of them"
    got = float(answer.pairwise(values))
    assert got >= 2.0**24 + 4080, f"the sum of 2^24 and 4095 ones is {got:.0f}; pairwise loses a dozen at most"


@pytest.mark.parametrize("seed", range(8))
def test_bits_do_not_depend_on_the_batch(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length, rows = int(rng.integers(1, 3000)), int(rng.integers(2, 9))
    values = rng.standard_normal((rows, length)).astype(np.float32)
    together = _bits(answer.pairwise(values))
    for row in range(rows):
        assert together[row : row + 1] == _bits(answer.pairwise(values[row : row + 1])), (
            "by itself, a row has other bits"
        )
        assert together[row : row + 1] == _bits(answer.pairwise(values[row])), (
            "without its batch axis, a row has other bits"
        )
    assert together == _bits(answer.pairwise(np.asfortranarray(values))), (
        "column by column in memory, rows have other bits"
    )
    assert together[::-1] == _bits(answer.pairwise(values[::-1])), "in another order, rows have other bits"
    before = values.copy()
    answer.pairwise(values)
    assert (values == before).all(), "what was given has changed"


@pytest.mark.parametrize("seed", range(12))
def test_splits(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 2000))
    splits = int(rng.choice([1, 2, 3, 7, 132, 5000]))
    values = rng.standard_normal(length).astype(np.float32)
    got = answer.split_sum(values, splits)
    assert np.shape(got) == (), f"shape is {np.shape(got)}; wanted no axes"
    parts = np.array([answer.pairwise(part) for part in np.array_split(values, min(splits, length))])
    assert _bits(got) == _bits(answer.pairwise(parts)), f"{length} terms in {splits} parts: the bits are not theirs"
    assert _bits(got) == _bits(answer.split_sum(values, splits)), "a second call gives other bits"
    wide = values.astype(np.float64)
    passed = ceil(log2(ceil(length / min(splits, length)))) + ceil(log2(min(splits, length)))
    off, size = abs(float(got) - np.add.reduce(wide)), np.add.reduce(np.abs(wide))
    assert off <= passed * 2.0**-24 * 1.0001 * size, f"{length} terms in {splits} parts: off by {off / size:.2e}"
