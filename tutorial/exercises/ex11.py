"""Exercise 11: minimal filtering, from the points to an image.

    python -m pytest tutorial/exercises/test_ex11.py

Numbers are fractions, or anything else that can be added, subtracted and multiplied: write plain Python, no NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Matrix = list[list[Fraction]]


def matrices(m: int, r: int, points: Sequence[Fraction]) -> tuple[Matrix, Matrix, Matrix]:
    """(AT, G, BT) of F(m, r): m outputs y[i] = sum over j of w[j] * d[i + j], of r taps from t = m + r - 1 inputs.

        y = AT [(G w) * (BT d)]       AT is m x t, G is t x r, BT is t x t, * multiplies number by number

    `points` are m + r - 2 different fractions; infinity is the last point, without being among them. Signs and factors
    may lie in whichever matrix you like.

    One way: a polynomial is evaluated at the points by a matrix, E for m coefficients, G for r. The product of both has
    t coefficients: M = the inverse of the matrix that evaluates t coefficients. Then AT is E transposed, and BT is M
    transposed. At infinity a polynomial has its leading coefficient.
    """
    raise NotImplementedError("your turn: write matrices")


def filter_image(x: Sequence[Sequence[Any]], w: Sequence[Sequence[Any]], m: int) -> list[list[Any]]:
    """y[i][j] = sum over a, b of w[a][b] * x[i + a][j + b] for all i, j with whole windows, by tiles of m x m outputs.

    w is square, of r x r taps. The image may have any size from r x r on: where the last tiles reach beyond it, there
    are zeros (the int 0 will do), and results that are not asked for are dropped. A tile may multiply numbers of the
    image with numbers of the filter (m + r - 1)^2 times, and no more: the grader counts. Multiplying by fractions is
    free. The filter is transformed once for all tiles.
    """
    raise NotImplementedError("your turn: write filter_image")
