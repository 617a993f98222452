"""A solution of exercise 11: minimal filtering, from the points to an image."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Matrix = list[list[Fraction]]


def _evaluate(points: Sequence[Fraction], count: int) -> Matrix:
    """The values of a polynomial of `count` coefficients at the points and at infinity."""
    rows = [[Fraction(p) ** i for i in range(count)] for p in points]
    return [*rows, [Fraction(i == count - 1) for i in range(count)]]


def _inverse(matrix: Matrix) -> Matrix:
    """By elimination, beside the unit matrix."""
    size = len(matrix)
    rows = [[*row, *(Fraction(i == at) for i in range(size))] for at, row in enumerate(matrix)]
    for at in range(size):
        pivot = next(i for i in range(at, size) if rows[i][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        rows[at] = [value / rows[at][at] for value in rows[at]]
        for i in range(size):
            if i != at and rows[i][at]:
                factor = rows[i][at]
                rows[i] = [value - factor * other for value, other in zip(rows[i], rows[at], strict=True)]
    return [row[size:] for row in rows]


def _turned(matrix: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def matrices(m: int, r: int, points: Sequence[Fraction]) -> tuple[Matrix, Matrix, Matrix]:
    """(AT, G, BT) of F(m, r): m outputs y[i] = sum over j of w[j] * d[i + j], of r taps from t = m + r - 1 inputs."""
    back = _inverse(_evaluate(points, m + r - 1))
    return _turned(_evaluate(points, m)), _evaluate(points, r), _turned(back)


_POINTS = [Fraction(*pair) for pair in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2), (3, 1), (-3, 1))]


def _both(matrix: Matrix, values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """matrix * values * matrix^T, multiplying by numbers that are not 0 only."""
    for _ in range(2):
        values = _turned([[_sum(row, column) for column in _turned(values)] for row in matrix])
    return [list(row) for row in values]


def _sum(factors: Sequence[Fraction], values: Sequence[Any]) -> Any:
    return sum(value * factor for factor, value in zip(factors, values, strict=True) if factor)


def filter_image(x: Sequence[Sequence[Any]], w: Sequence[Sequence[Any]], m: int) -> list[list[Any]]:
    """y[i][j] = sum over a, b of w[a][b] * x[i + a][j + b] for all whole windows, by tiles of m x m outputs."""
    r = len(w)
    t = m + r - 1
    at, g, bt = matrices(m, r, _POINTS[: t - 1])
    u = _both(g, w)
    height, width = len(x) - r + 1, len(x[0]) - r + 1
    y: list[list[Any]] = [[0] * width for _ in range(height)]
    for top in range(0, height, m):
        for left in range(0, width, m):
            tile = [
                [x[i][j] if i < len(x) and j < len(x[0]) else 0 for j in range(left, left + t)]
                for i in range(top, top + t)
            ]
            v = _both(bt, tile)
            made = _both(at, [[a * b for a, b in zip(*rows, strict=True)] for rows in zip(u, v, strict=True)])
            for i in range(top, min(top + m, height)):
                y[i][left : min(left + m, width)] = made[i - top][: width - left]
    return y
