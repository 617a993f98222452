"""Grades exercise 11: exactly, in fractions, and by counting what is multiplied."""

from __future__ import annotations

import random
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest

POINTS = [Fraction(*pair) for pair in ((0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2), (5, 3), (-3, 1))]


def _shape(matrix: Any) -> tuple[int, int]:
    return len(matrix), len(matrix[0])


@pytest.mark.parametrize(("m", "r"), [(1, 1), (1, 3), (2, 3), (4, 3), (3, 4), (6, 3), (2, 5), (5, 5)])
def test_matrices_filter(answer: ModuleType, m: int, r: int) -> None:
    t, draw = m + r - 1, random.Random(10 * m + r)
    for _ in range(5):
        points = draw.sample(POINTS, t - 1)
        at, g, bt = answer.matrices(m, r, points)
        for name, matrix, wanted in (("AT", at, (m, t)), ("G", g, (t, r)), ("BT", bt, (t, t))):
            if _shape(matrix) != wanted:
                pytest.fail(f"{name} of F({m},{r}) is {_shape(matrix)}; wanted {wanted}", pytrace=False)
        w, d = ([Fraction(draw.randint(-50, 50), draw.randint(1, 9)) for _ in range(n)] for n in (r, t))
        u = [sum(a * b for a, b in zip(row, w, strict=True)) for row in g]
        v = [sum(a * b for a, b in zip(row, d, strict=True)) for row in bt]
        y = [sum(a * p * q for a, p, q in zip(row, u, v, strict=True)) for row in at]
        wanted_y = [sum(w[j] * d[i + j] for j in range(r)) for i in range(m)]
        if y != wanted_y:
            text = ", ".join(map(str, points))
            pytest.fail(f"F({m},{r}) from the points {text} and infinity: {y}; wanted {wanted_y}", pytrace=False)


class Counted:
    """A number of the image, of the filter, or a product of both, that counts products in `tally`."""

    def __init__(self, value: Fraction, side: str, tally: list[int]) -> None:
        self.value, self.side, self.tally = value, side, tally

    def _plus(self, other: object, sign: int) -> Counted:
        if isinstance(other, Counted):
            if self.side != other.side:
                pytest.fail(f"a number of the {self.side} is added to one of the {other.side}", pytrace=False)
            return Counted(self.value + sign * other.value, self.side, self.tally)
        if other != 0:
            pytest.fail(f"{other!r} is added to a number of the {self.side}", pytrace=False)
        return self

    def __add__(self, other: object) -> Counted:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: object) -> Counted:
        return self._plus(other, -1)

    def __rsub__(self, other: object) -> Counted:
        return -self + other

    def __neg__(self) -> Counted:
        return Counted(-self.value, self.side, self.tally)

    def __mul__(self, other: Any) -> Counted:
        if not isinstance(other, Counted):
            return Counted(self.value * Fraction(other), self.side, self.tally)
        if {self.side, other.side} != {"image", "filter"}:
            pytest.fail(f"a number of the {self.side} is multiplied by one of the {other.side}", pytrace=False)
        self.tally[0] += 1
        return Counted(self.value * other.value, "result", self.tally)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Counted:
        return Counted(self.value / Fraction(other), self.side, self.tally)


@pytest.mark.parametrize(
    ("height", "width", "r", "m"),
    [(6, 6, 3, 4), (3, 3, 3, 2), (10, 14, 3, 4), (9, 11, 3, 2), (11, 8, 3, 4), (9, 12, 5, 2)],
)
def test_images_are_filtered_with_few_products(answer: ModuleType, height: int, width: int, r: int, m: int) -> None:
    draw, tally = random.Random(height * width), [0]
    x, w = (
        [[Counted(Fraction(draw.randint(-99, 99), 7), side, tally) for _ in range(columns)] for _ in range(rows)]
        for side, rows, columns in (("image", height, width), ("filter", r, r))
    )
    y = answer.filter_image(x, w, m)
    rows, columns = height - r + 1, width - r + 1
    if _shape(y) != (rows, columns):
        pytest.fail(f"the result is {_shape(y)}; wanted {(rows, columns)}", pytrace=False)
    for i in range(rows):
        for j in range(columns):
            wanted = sum(w[a][b].value * x[i + a][j + b].value for a in range(r) for b in range(r))
            if not isinstance(y[i][j], Counted) or y[i][j].value != wanted:
                got = getattr(y[i][j], "value", y[i][j])
                pytest.fail(f"y[{i}][{j}] is {got}; wanted {wanted}", pytrace=False)
    most = -(-rows // m) * -(-columns // m) * (m + r - 1) ** 2
    if tally[0] > most:
        text = f"{height}x{width} image, F({m},{r}): {tally[0]} products of image and filter; wanted at most {most}"
        pytest.fail(text, pytrace=False)
