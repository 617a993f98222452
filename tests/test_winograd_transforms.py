"""Winograd's transforms: exact, symbolically and in fractions; programs equal their matrices; errors keep bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy

from openconv.winograd import (
    POINTS,
    UNITS,
    Matrix,
    Transform,
    error_bound,
    evaluate,
    operations,
    program,
    transform,
    worst_error,
)

SIZES = [(m, r) for m in range(1, 8) for r in range(1, 8) if m + r - 1 <= len(POINTS) + 1]
NAMED = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5), (2, 2), (3, 2), (3, 4)]


def times(matrix: Matrix, vector: Sequence[Any]) -> list[Any]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), start=0 * vector[0]) for row in matrix]


@pytest.mark.parametrize(("m", "r"), NAMED)
def test_the_identity_holds_symbolically(m: int, r: int) -> None:
    w, d = sympy.symbols(f"w:{r}"), sympy.symbols(f"d:{m + r - 1}")
    each = transform(m, r)
    at, g, bt = (sympy.Matrix([[sympy.Rational(v.numerator, v.denominator) for v in row] for row in matrix])
                 for matrix in (each.at, each.g, each.bt))  # fmt: skip
    y = at * (g * sympy.Matrix(w)).multiply_elementwise(bt * sympy.Matrix(d))
    for i in range(m):
        assert sympy.expand(y[i] - sum(w[j] * d[i + j] for j in range(r))) == 0


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_every_size_is_exact(m: int, r: int) -> None:
    """Both sides are linear in w and in d, so that unit vectors of both decide it for all values."""
    each = transform(m, r)
    assert (len(each.at), len(each.g), len(each.bt)) == (m, each.t, each.t)
    for j, l in itertools.product(range(r), range(each.t)):
        for i in range(m):
            value = sum(each.at[i][k] * each.g[k][j] * each.bt[k][l] for k in range(each.t))
            assert value == (1 if l == i + j else 0), f"{each}: y[{i}] has {value} of w[{j}] d[{l}]"


@pytest.mark.parametrize(("m", "r"), SIZES)
def test_at_and_bt_are_of_integers(m: int, r: int) -> None:
    each = transform(m, r)
    assert all(v.denominator == 1 for row in (*each.at, *each.bt) for v in row)
    assert max(abs(v) for row in each.bt for v in row) <= 21


@pytest.mark.parametrize(("m", "r"), [(2, 3), (4, 3), (2, 5), (3, 2)])
def test_nested_in_two_dimensions(m: int, r: int) -> None:
    """Exact integers far beyond small ones, through the programs, an axis at a time."""
    each, rng = transform(m, r), np.random.default_rng(m * 10 + r)
    d = [[Fraction(int(v)) for v in row] for row in rng.integers(-999, 999, (each.t, each.t))]
    w = [[Fraction(int(v)) for v in row] for row in rng.integers(-999, 999, (r, r))]
    u, v = nested(each.g, w), nested(each.bt, d)
    y = nested(each.at, [[a * b for a, b in zip(p, q, strict=True)] for p, q in zip(u, v, strict=True)])
    for i, k in itertools.product(range(m), repeat=2):
        assert y[i][k] == sum(w[a][b] * d[i + a][k + b] for a in range(r) for b in range(r))


def nested(matrix: Matrix, square: list[list[Fraction]]) -> list[list[Fraction]]:
    steps = program(matrix)
    columns = [evaluate(steps, column) for column in zip(*square, strict=True)]
    return [evaluate(steps, row) for row in zip(*columns, strict=True)]


def test_the_usual_matrices_of_f43() -> None:
    each = transform(4, 3)
    assert each.bt[0] == (4, 0, -5, 0, 1, 0)
    assert each.bt[3] == (0, -2, -1, 2, 1, 0)
    assert each.at[3] == (0, 1, -1, 8, -8, 1)
    assert each.g[3] == (Fraction(1, 24), Fraction(1, 12), Fraction(1, 6))


@pytest.mark.parametrize(("m", "r"), [(0, 3), (3, 0), (7, 3), (1, 99)])
def test_sizes_without_points_are_refused(m: int, r: int) -> None:
    with pytest.raises(ValueError, match=rf"F\({m},{r}\) is not to be had; wanted m >= 1"):
        transform(m, r)


# -- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "r"), SIZES)
@pytest.mark.parametrize("name", ["at", "g", "bt"])
def test_programs_equal_their_matrices(m: int, r: int, name: str) -> None:
    matrix: Matrix = getattr(transform(m, r), name)
    check_program(matrix)


def check_program(matrix: Matrix) -> None:
    """On unit vectors, which decide it: each step is linear. Names are written once, before they are read."""
    steps, width = program(matrix), len(matrix[0])
    known = {f"v{i}" for i in range(width)}
    for step in steps:
        assert step.target not in known, f"{step.target} is written twice"
        assert {name for name in (step.a, step.b) if name} <= known, f"{step} reads what is not there"
        assert (step.op in ("add", "sub", "fma")) == bool(step.b)
        assert step.op in ("fma", "mul") or step.c == 1
        assert step.op != "fma" or abs(step.c) != 1
        known.add(step.target)
    for i in range(width):
        unit = [Fraction(int(i == j)) for j in range(width)]
        assert evaluate(steps, unit) == times(matrix, unit)


def test_programs_of_any_matrix() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        values = rng.integers(-2, 3, rng.integers(1, 6, 2))
        check_program(tuple(tuple(Fraction(int(v), 1 + int(rng.integers(0, 2))) for v in row) for row in values))


@pytest.mark.parametrize(
    ("m", "r", "at", "g", "bt"),
    [(2, 3, 4, 5, 4), (4, 3, 10, 9, 12), (2, 5, 8, 13, 12), (3, 2, 4, 4, 4), (3, 4, 9, 11, 12), (6, 3, 20, 14, 28)],
)
def test_operations_of_programs(m: int, r: int, at: int, g: int, bt: int) -> None:
    """Even and odd parts are shared: 12 operations for BT of six points, whose rows have 24 - 6 by themselves."""
    each = transform(m, r)
    assert [operations(program(matrix)) for matrix in (each.at, each.g, each.bt)] == [at, g, bt]


def test_a_program_reads_like_code() -> None:
    assert [str(step) for step in program(transform(2, 3).bt)] == [
        "y0 = v2 - v0",
        "y1 = v2 + v1",
        "y2 = v2 - v1",
        "y3 = v3 - v1",
    ]


# -- errors ---------------------------------------------------------------------------------------------------------


def along(each: Transform, name: str, value: np.ndarray, axis: int) -> np.ndarray:
    steps = program(getattr(each, name))
    made = evaluate(steps, [np.take(value, i, axis) for i in range(value.shape[axis])])
    return np.stack([np.asarray(v, value.dtype) for v in made], axis)


def measured(each: Transform, axes: int, d: np.ndarray, w: np.ndarray, stored: type | None) -> float:
    """Error of tiles d (t..., C, tiles) by filters w (r..., C, K) in f32, over the largest plain sum(|x|*|w|)."""
    u, v = w, d
    for axis in range(axes):
        u, v = along(each, "g", u, axis), along(each, "bt", v, axis)
    if stored is not None:
        u, v = u.astype(stored).astype(np.float32), v.astype(stored).astype(np.float32)
    y = np.matmul(u.swapaxes(-1, -2), v)
    assert y.dtype == np.float32
    for axis in range(axes):
        y = along(each, "at", y, axis)
    # All overlaps of filter and tile count in the largest sum: zeros around the tile.
    wide = np.pad(d.astype(float), [(each.r - 1, each.r - 1)] * axes + [(0, 0)] * 2)
    places = list(itertools.product(range(each.t + each.r - 1), repeat=axes))
    taps = list(itertools.product(range(each.r), repeat=axes))

    def plain(image: np.ndarray, filters: np.ndarray, at: tuple[int, ...]) -> np.ndarray:
        return sum(filters[j].T @ image[tuple(a + b for a, b in zip(at, j, strict=True))] for j in taps)

    largest = max(plain(np.abs(wide), np.abs(w.astype(float)), at).max() for at in places)
    inner = itertools.product(range(each.m), repeat=axes)
    errors = [np.abs(y[i] - plain(wide, w.astype(float), tuple(a + each.r - 1 for a in i))).max() for i in inner]
    return float(max(errors) / largest)


def data(
    kind: str, each: Transform, axes: int, channels: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    shapes = (each.t,) * axes + (channels, 40), (each.r,) * axes + (channels, 5)
    d, w = ((rng.choice([-1, 1], s) * (0.25 + rng.random(s))) for s in shapes)
    if kind == "positive":
        d, w = abs(d), abs(w)
    elif kind == "normal":
        d, w = (rng.standard_normal(s) for s in shapes)
    elif kind == "spikes":  # a few values that outweigh the others, in one channel
        d, w = (v * np.where(rng.random(v.shape) < 0.05, 1.0, 1e-4) for v in (d, w))
    elif kind == "arranged":  # in each channel, all signs as one row of BT and one of G has them
        d, w = abs(d), abs(w)
        for axis in range(axes):
            shape = [-1 if at == axis else 1 for at in range(axes + 2)]
            d = d * np.sign([float(v) or 1.0 for v in each.bt[-2]]).reshape(shape)
            w = w * np.sign([float(v) or 1.0 for v in each.g[-2]]).reshape(shape)
    return d.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("kind", ["random", "positive", "normal", "spikes", "arranged"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(("m", "r"), [(2, 3), (4, 3), (2, 5), (3, 4), (3, 2)])
def test_errors_keep_the_bounds(m: int, r: int, axes: int, kind: str) -> None:
    each, rng = transform(m, r), np.random.default_rng(7)
    for channels, stored in itertools.product((1, 6, 64), (None, np.float16)):
        d, w = data(kind, each, axes, channels, rng)
        if stored is not None:
            d, w = d.astype(stored).astype(np.float32), w.astype(stored).astype(np.float32)
        error = measured(each, axes, d, w, stored)
        name = None if stored is None else "f16"
        bound, worst = (f([each] * axes, channels, stored=name) for f in (error_bound, worst_error))
        assert error <= bound <= worst, f"{each} over {channels} channels of {kind} data: {error} > {bound}"
        if kind == "random" and channels <= 6:
            assert bound <= 100 * error, f"{each} over {channels} channels: {bound} for an error of {error}"


def test_bounds_grow_with_tiles_and_terms() -> None:
    bounds: Callable[..., float]
    for bounds in (error_bound, worst_error):
        assert bounds([transform(2, 3)], 64) < bounds([transform(4, 3)], 64) < bounds([transform(4, 3)] * 2, 64)
        assert bounds([transform(4, 3)], 64) < bounds([transform(4, 3)], 65)
        assert bounds([transform(4, 3)], 64) < bounds([transform(4, 3)], 64, stored="f16")
        assert bounds([transform(4, 3)], 64, stored="f16") < bounds([transform(4, 3)], 64, stored="bf16")
        assert bounds([transform(4, 3)], 64, "f64") < 1e-6 * bounds([transform(4, 3)], 64)
    assert transform(2, 3).growth == 5
    assert transform(4, 3).growth == 31
    assert UNITS["f32"] == np.finfo(np.float32).eps / 2
