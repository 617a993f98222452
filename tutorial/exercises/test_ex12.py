"""Grades exercise 12: results against the sum itself, and what the transforms were."""

from __future__ import annotations

from math import log2
from types import ModuleType
from typing import Any

import numpy as np
import pytest


class _Counted:
    """numpy.fft, which writes down the length of each real transform that it makes, and numpy's sums, which are out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        for name in ("rfft", "irfft"):
            patch.setattr(np.fft, name, self._counted(name, getattr(np.fft, name)))
        for place, name in [(np, "convolve"), (np, "correlate"), (np.fft, "fft"), (np.fft, "ifft")]:
            patch.setattr(place, name, self._out(name))

    def _counted(self, name: str, inner: Any) -> Any:
        def run(a: Any, n: int | None = None, axis: int = -1, **rest: Any) -> Any:
            if n is None:
                n = np.shape(a)[axis] if name == "rfft" else 2 * (np.shape(a)[axis] - 1)
            self.lengths += [n] * (np.size(a) // np.shape(a)[axis])
            return inner(a, n, axis, **rest)

        return run

    def _out(self, name: str) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            pytest.fail(f"np.{name} is out here: wanted np.fft.rfft and np.fft.irfft of the given size", pytrace=False)

        return run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


def _wanted(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(x, len(w)) @ w


@pytest.mark.parametrize("seed", range(12))
def test_results_are_the_sums(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    taps, size = int(rng.integers(1, 40)), int(rng.choice([40, 48, 64, 96, 100, 128]))
    x, w = rng.standard_normal(int(rng.integers(taps, 1000))), rng.standard_normal(taps)
    got, wanted = answer.overlap_save(x, w, size), _wanted(x, w)
    case = f"len(x) = {len(x)}, len(w) = {taps}, size = {size}"
    assert np.shape(got) == wanted.shape, f"{case}: shape is {np.shape(got)}; wanted {wanted.shape}"
    wrong = np.flatnonzero(~(np.abs(got - wanted) < 1e-9 * np.abs(w).sum() * np.abs(x).max()))
    assert not len(wrong), f"{case}: result {wrong[0]} is {got[wrong[0]]}; wanted {wanted[wrong[0]]}"


@pytest.mark.parametrize(("length", "taps", "size"), [(1000, 30, 100), (1000, 64, 64), (90, 20, 128), (4096, 1, 32)])
def test_transforms_are_few_and_of_that_size(
    answer: ModuleType, counted: _Counted, length: int, taps: int, size: int
) -> None:
    rng = np.random.default_rng(0)
    answer.overlap_save(rng.standard_normal(length), rng.standard_normal(taps), size)
    tiles = -(-(length - taps + 1) // (size - taps + 1))
    other = [n for n in counted.lengths if n != size]
    assert not other, f"a transform has {other[0]} positions; wanted {size}"
    assert len(counted.lengths) == 2 * tiles + 1, (
        f"{length} samples, {taps} taps, tiles of {size}: {len(counted.lengths)} transforms; "
        f"wanted {2 * tiles + 1}, two for each of {tiles} tiles and one of the filter"
    )


@pytest.mark.parametrize(("length", "taps", "size"), [(100, 33, 32), (10, 11, 32)])
def test_a_filter_that_does_not_fit_is_refused(answer: ModuleType, length: int, taps: int, size: int) -> None:
    with pytest.raises(ValueError, match=str(taps)):
        answer.overlap_save(np.zeros(length), np.zeros(taps), size)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_size(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    taps = int(2 ** rng.uniform(0, 10))
    length = taps + int(2 ** rng.uniform(0, 16))
    sizes = sorted({int(2 ** rng.uniform(3, 16)) for _ in range(12)} | {1 << 16})
    cost = {}
    for size in (size for size in sizes if size >= taps):
        tiles = sum(1 for _ in range(0, length - taps + 1, size - taps + 1))
        cost[size] = 2.5 * size * log2(size) * (1 + 2 * tiles) + 3 * size * tiles
    got = answer.best_size(length, taps, list(rng.permutation(sizes)))
    least = min(cost.values())
    assert got in cost, f"{length} samples, {taps} taps: {got} is none of the sizes that hold the filter"
    assert cost[got] <= least * (1 + 1e-12), (
        f"{length} samples, {taps} taps: tiles of {got} take {cost[got]:.0f} operations; {least:.0f} would do"
    )
