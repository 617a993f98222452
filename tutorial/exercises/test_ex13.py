"""Grades exercise 13: floors against those of openconv's own problems, results, and how the rows were read."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

import openconv


@pytest.mark.parametrize("seed", range(16))
def test_floors(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, taps, groups = (int(v) for v in (rng.integers(1, 9), 2 * rng.integers(0, 4) + 1, rng.integers(1, 65)))
    c, k = groups * int(rng.integers(1, 5)), groups * int(rng.integers(1, 5))
    h, w = (int(v) for v in rng.integers(8, 60, 2))
    if seed % 4 == 0:  # depthwise
        c = k = groups
    dtype = "f16" if seed % 2 else "f32"
    text = f"fprop n{n} c{c} h{h} w{w} k{k} r{taps} s{taps} pad{taps // 2} g{groups} {dtype} nchw"
    problem = openconv.Problem.parse(text)
    got = answer.floors(n, c, k, h, w, taps, groups, 2 if dtype == "f16" else 4, 4e12, 50e12)
    for name, seen, wanted in zip(
        ("seconds of bytes", "seconds of operations", "products of a value of x"),
        got,
        (problem.min_bytes / 4e12, 2 * problem.macs / 50e12, k // groups * taps**2),
        strict=True,
    ):
        assert seen == pytest.approx(wanted, rel=1e-9), f"{text}: {name}: {seen}; wanted {wanted}"


class _File:
    """An image whose rows are counted as they are read, and results as they come."""

    def __init__(self, values: np.ndarray, taps: int) -> None:
        self.shape = values.shape
        self._values, self._taps = values, taps
        self.reads = np.zeros(values.shape[:2], int)
        self.stored: dict[tuple[int, int], np.ndarray] = {}

    def read(self, channel: int, row: int) -> np.ndarray:
        if self.reads[channel, row]:
            pytest.fail(f"row {row} of channel {channel} is read a second time", pytrace=False)
        for p in range(self.reads.shape[1] - self._taps + 1):
            whole = self.reads[channel, p : p + self._taps].all()
            if whole and (channel, p) not in self.stored:
                pytest.fail(
                    f"row {row} of channel {channel} is read while row {p} of its results, which has all "
                    f"{self._taps} rows that it needs, is not stored",
                    pytrace=False,
                )
        self.reads[channel, row] = 1
        return self._values[channel, row].copy()

    def store(self, channel: int, row: int, values: np.ndarray) -> None:
        if (channel, row) in self.stored:
            pytest.fail(f"row {row} of the results of channel {channel} is stored a second time", pytrace=False)
        self.stored[channel, row] = np.array(values)


@pytest.mark.parametrize("seed", range(12))
def test_sliding(answer: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    taps, across = (int(v) for v in rng.integers(1, 6, 2))
    shape = int(rng.integers(1, 4)), taps + int(rng.integers(0, 9)), across + int(rng.integers(0, 9))
    x, w = rng.standard_normal(shape), rng.standard_normal((shape[0], taps, across))
    file = _File(x, taps)
    answer.sliding(file, w, file.store)
    windows = np.lib.stride_tricks.sliding_window_view(x, (taps, across), (1, 2))
    wanted = np.einsum("cpqrs,crs->cpq", windows, w)
    case = f"an image of {shape}, filters of {taps} x {across}"
    assert file.reads.all(), f"{case}: row {tuple(np.argwhere(file.reads == 0)[0])} (channel, row) was never read"
    missing = {(c, p) for c in range(shape[0]) for p in range(wanted.shape[1])} - set(file.stored)
    assert not missing, f"{case}: results {min(missing)} (channel, row) were not stored"
    for (c, p), row in file.stored.items():
        assert row.shape == wanted[c, p].shape, f"{case}: row {p} has {row.shape}; wanted {wanted[c, p].shape}"
        assert np.allclose(row, wanted[c, p]), f"{case}: row {p} of channel {c} is {row}; wanted {wanted[c, p]}"
