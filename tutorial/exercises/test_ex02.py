"""Grades exercise 2: `floor` by openconv's own Problem, `filter_once` by its results, its reads and its memory."""

from __future__ import annotations

import tracemalloc
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from openconv import Problem
from openconv.bench.ceilings import roofline_floor

CASES = 50


def test_floor(answer: ModuleType) -> None:
    generator = np.random.default_rng(1)
    limits = set()
    for _ in range(CASES):
        n, c, k, groups, stride = (int(v) for v in generator.integers(1, [9, 17, 17, 4, 4]))
        h, w = (int(v) for v in generator.integers(8, 60, 2))
        r, s, padding = (int(v) for v in generator.integers([1, 1, 0], [8, 8, 4]))
        dtype, element = [("f32", 4), ("f16", 2), ("f64", 8)][generator.integers(3)]
        c, k = c * groups, k * groups
        speed, rate = (float(v) for v in 10 ** generator.uniform([9, 10], [12, 13]))
        text = f"fprop n{n} c{c} h{h} w{w} k{k} r{r} s{s} stride{stride} pad{padding} g{groups} {dtype}"
        problem = Problem.parse(text)
        wanted = roofline_floor(problem, {"copy": speed, dtype: rate})
        limits.add(wanted > problem.min_bytes / speed)
        got = answer.floor(
            n, c, h, w, k, r, s, stride=stride, padding=padding, groups=groups, element=element, speed=speed, rate=rate
        )
        if got != pytest.approx(wanted, rel=1e-12):
            moved, computed = problem.min_bytes / speed, problem.flops / rate
            pytest.fail(
                f"floor of {text!r} at {speed:.4g} B/s and {rate:.4g} FLOP/s is {got}; wanted {wanted}: "
                f"{problem.min_bytes} bytes take {moved:.4g} s, {problem.flops} operations {computed:.4g} s",
                pytrace=False,
            )
    assert limits == {True, False}, "the cases must have both sorts"


def test_filter_once(answer: ModuleType) -> None:
    generator = np.random.default_rng(2)
    for R, S in [(3, 3), (1, 5), (5, 1), *generator.integers(1, 8, (5, 2)).tolist()]:
        height, width = (int(v) for v in generator.integers(150, 250, 2))
        x, w = (generator.integers(-9, 10, shape).astype(float) for shape in ((height, width), (R, S)))
        case = f"an image of {height} x {width} and a filter of {R} x {S}"
        reads: list[int] = []

        def row(i: int, x: np.ndarray = x, reads: list[int] = reads) -> np.ndarray:
            if not 0 <= i < len(x):
                pytest.fail(f"row({i}) was asked for; an image of {len(x)} rows has 0 to {len(x) - 1}", pytrace=False)
            reads.append(i)
            return x[i].copy()

        rows = answer.filter_once(row, height, w)
        if rows is None:
            pytest.fail("filter_once returned None; wanted rows, one `yield` for each", pytrace=False)
        got = [np.array(one) for one in rows]
        wanted = F.conv2d(torch.from_numpy(x)[None, None], torch.from_numpy(w)[None, None])[0, 0].numpy()
        if np.shape(got) != wanted.shape:
            pytest.fail(f"{case}: the rows make {np.shape(got)}; wanted {wanted.shape}", pytrace=False)
        if not np.array_equal(got, wanted):
            p, q = (int(v) for v in np.argwhere(np.stack(got) != wanted)[0])
            pytest.fail(f"{case}: y[{p}, {q}] is {got[p][q]}; wanted {wanted[p, q]}", pytrace=False)
        again = sorted({i for i in reads if reads.count(i) > 1})
        if again:
            pytest.fail(
                f"{case}: {len(reads)} reads; rows {again[:5]} and maybe more were asked for again", pytrace=False
            )


def test_filter_once_keeps_little(answer: ModuleType) -> None:
    """Peak memory, in rows of x: the filter's height, what sums take, and no more; the image has 300."""
    generator = np.random.default_rng(3)
    width = 4096
    for R in (2, 3, 7):
        w, most = generator.standard_normal((R, 3)), 2 * R + 8
        tracemalloc.start()
        try:
            rows = sum(1 for _ in answer.filter_once(lambda i: np.full(width, float(i)), 300, w) or ())
            kept = tracemalloc.get_traced_memory()[1] / (8 * width)
        finally:
            tracemalloc.stop()
        if rows != 301 - R:
            pytest.fail(f"300 rows and a filter of {R} made {rows} rows; wanted {301 - R}", pytrace=False)
        if kept > most:
            pytest.fail(f"a filter of {R} rows kept {kept:.0f} rows at a time; wanted at most {most}", pytrace=False)
