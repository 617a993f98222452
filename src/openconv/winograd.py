"""Minimal filtering by Winograd, Toom and Cook: the transforms, generated from interpolation points.

    y = AT [(G w) * (BT d)]            m outputs y[i] = sum_j w[j] d[i+j] of r taps from t = m + r - 1 inputs

The full product of two polynomials of m and r coefficients has t coefficients, and so is known from its values at t
points: m + r - 1 products in place of m * r. Turned around (transposed), the same identity filters. A point p = a/b is
kept as the pair (a, b), and infinity as (1, 0), at which a polynomial has its leading coefficient; a polynomial of n
coefficients is evaluated as sum_i c[i] a^i b^(n-1-i). So infinity is no special case, and AT and BT are of integers:

    AT[i][k] = a_k^i b_k^(m-1-i)
    BT[k]    = the coefficients of prod over l != k of (b_l x - a_l), infinity left out
    G[k][j]  = a_k^j b_k^(r-1-j) / N_k      with N_k = prod over l != k of (b_l a_k - a_l b_k), infinity's factor b_k

In two dimensions the transforms are nested: Y = AT [(G w G^T) * (BT d B)] A, an axis at a time. With channels,
products are added up before AT. The gradient of the filters, dw[j] = sum_i dy[i] x[i+j], is r outputs of m taps: its
transform is ``transform(r, m)``, with dy in the place of w, and its AT follows when all tiles are added up. Of one t, BT
is the same for every m and r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import ceil, expm1, prod, sqrt
from typing import Any

__all__ = [
    "POINTS", "UNITS", "Matrix", "Step", "Transform", "error_bound", "evaluate", "operations", "program", "transform",
    "worst_error",
]  # fmt: skip

Matrix = tuple[tuple[Fraction, ...], ...]

_HALF = Fraction(1, 2)
POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(2), Fraction(-2), _HALF, -_HALF)
"""Finite points in the order of use; infinity comes last. Small, in pairs p and -p, which share half of their work, and
with 1/2 beside 2, which keeps the numbers of eight points small."""

UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24, "f64": 2.0**-53}
"""Half the distance from 1 to the next number: the relative error of one rounding."""


@dataclass(frozen=True)
class Transform:
    """F(m, r): ``y = at [(g w) * (bt d)]`` is the correlation ``y[i] = sum_j w[j] d[i+j]``, exactly.

    ``points`` are the finite ones; infinity is the last of the t. ``at`` is m x t, ``g`` is t x r, ``bt`` is t x t.
    """

    m: int
    r: int
    points: tuple[Fraction, ...]
    at: Matrix
    g: Matrix
    bt: Matrix

    def __str__(self) -> str:
        return f"F({self.m},{self.r})"

    @property
    def t(self) -> int:
        """Inputs of a tile, and products."""
        return self.m + self.r - 1

    @cached_property
    def growth(self) -> float:
        """How much larger the terms of a result may be than those of the plain sum; see :func:`worst_error`."""
        return float(_spread(_absolute(self.at), _absolute(self.g), _absolute(self.bt)))

    @cached_property
    def roundings(self) -> float:
        """The same, with each term times the number of roundings that it meets in the three transforms."""
        at, g, bt = _absolute(self.at), _absolute(self.g), _absolute(self.bt)
        parts = (
            _spread(_rounded(self.at), g, bt),
            _spread(at, _rounded(self.g), bt),
            _spread(at, g, _rounded(self.bt)),
        )
        return float(sum(parts))

    @cached_property
    def amplification(self) -> float:
        """Root of the mean square of a result's terms, over the size of the plain sum; see :func:`error_bound`."""

        def square(row: Sequence[Fraction]) -> Fraction:
            return sum((v * v for v in row), Fraction(0))

        rows = [[row[k] ** 2 * square(self.g[k]) * square(self.bt[k]) for k in range(self.t)] for row in self.at]
        return sqrt(max(sum(row) for row in rows)) / self.r

    @cached_property
    def depth(self) -> int:
        """The most roundings that a term meets in the three transforms."""
        found = 0
        for matrix in (self.at, self.g, self.bt):
            rounded = zip(_rounded(matrix), matrix, strict=True)
            counts = (c / abs(v) for errors, row in rounded for c, v in zip(errors, row, strict=True) if v)
            found += ceil(max(counts))
        return found


@cache
def transform(m: int, r: int) -> Transform:
    """F(m, r), from the first m + r - 2 of :data:`POINTS` and infinity."""
    most = len(POINTS) + 1
    if m < 1 or r < 1 or m + r - 1 > most:
        raise ValueError(f"F({m},{r}) is not to be had; wanted m >= 1 and r >= 1 with m + r - 1 <= {most}")
    t = m + r - 1
    pairs = [(p.numerator, p.denominator) for p in POINTS[: t - 1]] + [(1, 0)]
    g, bt = [], []
    for k, (a, b) in enumerate(pairs):
        polynomial, scale = [1], 1
        for l, (c, d) in enumerate(pairs[:-1]):
            if l != k:
                shifted, same = [0, *(d * v for v in polynomial)], [*(c * v for v in polynomial), 0]
                polynomial = [x - y for x, y in zip(shifted, same, strict=True)]
                scale *= d * a - c * b
        if k < t - 1:
            scale *= b
        bt.append(tuple(Fraction(v) for v in polynomial + [0] * (t - len(polynomial))))
        g.append(tuple(Fraction(a**j * b ** (r - 1 - j), scale) for j in range(r)))
    at = tuple(tuple(Fraction(a**i * b ** (m - 1 - i)) for a, b in pairs) for i in range(m))
    return Transform(m, r, POINTS[: t - 1], at, tuple(g), tuple(bt))


# -- errors ---------------------------------------------------------------------------------------------------------


def error_bound(transforms: Sequence[Transform], terms: int, dtype: str = "f32", *, stored: str | None = None) -> float:
    """Bound on the error of a nested convolution as a share of the largest sum(|x|*|w|), before the last rounding.

    ``transforms`` has one for each axis, ``terms`` is how many products are added up at a point (channels; tiles of all
    images for a gradient of filters). Arithmetic is in ``dtype``; transformed inputs and filters are rounded to
    ``stored`` where that is narrower.

    A result is sum_k AT[i,k] U[k] V[k], and V[k], a sum of inputs of size d whose signs are not arranged for one row of
    BT, has the size |BT[k]| d with the Euclidean norm of the row; U[k] likewise. A rounding of V[k] is off by at most
    ``unit`` of it, in either direction, so errors of n roundings at t points add up as their squares do:

        amplification^2 = max over i of  sum over k of  AT[i,k]^2 |G[k]|^2 |BT[k]|^2  /  r^2
        error = 8 * product of amplifications * sqrt(n * unit^2 + 2 * unit of stored^2)

    with n = terms + depths of the transforms. 8 stands for rows that signs happen to suit (which makes V at most twice
    and U at most 1.7 times as large, an axis), for tensors of a few large values, and for the largest of many results.
    Amplifications are 0.75 for F(2,3), 3.2 for F(4,3), 2.0 for F(2,5). It is a bound in practice, for data of any
    kind that the tests could think of; :func:`worst_error` is one for all data, and is never exceeded.
    """
    unit, narrow = UNITS[dtype], UNITS[stored or dtype]
    steps = terms + sum(each.depth for each in transforms)
    variance = steps * unit**2 + (2 * narrow**2 if narrow > unit else 0.0)
    probable = 8 * prod(each.amplification for each in transforms) * sqrt(variance)
    return min(probable, worst_error(transforms, terms, dtype, stored=stored))


def worst_error(transforms: Sequence[Transform], terms: int, dtype: str = "f32", *, stored: str | None = None) -> float:
    """What :func:`error_bound` bounds, for the worst of all data: every rounding in the same direction, every sum of
    terms of the same sign, which no data brings about at all points at once.

    Result i of a tile is sum_k AT[i,k] sum_j G[k,j] w[j] sum_l BT[k,l] d[l]. A rounding is off by ``unit`` of what it
    rounds, so a term that meets n of them is off by n * unit of its own size (and a factor of nearly 1 for products of
    errors). Summed over channels, |w[j]| |d[j+o]| for all j are the terms of the plain result at o, which is one of
    this tile's or of a neighbour's: at most the largest of all. So

        growth = max over i of  sum over o of  max over j of  sum over k of  |AT[i,k]| |G[k,j]| |BT[k,j+o]|

    times that is the size of all terms: 5 for F(2,3), 31 for F(4,3), 42 for F(6,3); of nested axes, the product. The
    largest is over all places where filter and image overlap: where there is no padding, results that are not asked for
    count as well. Roundings of the transforms are counted step by step in their programs, with ``fma`` unfused.
    """
    axes = [(each.growth, each.roundings) for each in transforms]
    unit, narrow = UNITS[dtype], UNITS[stored or dtype]
    growth = prod(one for one, _ in axes)
    # An axis whose roundings are counted, times the others as they are; then each product and each addition.
    inside = sum(growth / one * count for one, count in axes) + terms * growth
    longest = terms + sum(each.depth for each in transforms)
    error = unit * inside * (expm1(longest * unit) / (longest * unit))
    spare = (1 + narrow) ** 2 if narrow > unit else 1.0
    return spare * error + (spare - 1) * growth


def _absolute(matrix: Matrix) -> Matrix:
    return tuple(tuple(abs(v) for v in row) for row in matrix)


def _spread(at: Matrix, g: Matrix, bt: Matrix) -> Fraction:
    """max over i of sum over o of max over j of sum over k of at[i][k] g[k][j] bt[k][j+o]."""
    t, r = len(bt), len(g[0])

    def term(row: Sequence[Fraction], j: int, l: int) -> Fraction:
        return sum((row[k] * g[k][j] * bt[k][l] for k in range(t)), Fraction(0))

    offsets = range(1 - r, t)
    return max(
        sum((max(term(row, j, j + o) for j in range(r) if 0 <= j + o < t) for o in offsets), Fraction(0)) for row in at
    )


def _rounded(matrix: Matrix) -> Matrix:
    """The absolute values, each times the roundings between that input and that output in the matrix's program."""
    sizes = {f"v{i}": {i: Fraction(1)} for i in range(len(matrix[0]))}
    errors: dict[str, dict[int, Fraction]] = {name: {} for name in sizes}

    def scaled(values: Mapping[int, Fraction], by: Fraction) -> dict[int, Fraction]:
        return {i: v * by for i, v in values.items()}

    def plus(*maps: Mapping[int, Fraction]) -> dict[int, Fraction]:
        total: dict[int, Fraction] = {}
        for each in maps:
            for i, v in each.items():
                total[i] = total.get(i, Fraction(0)) + v
        return total

    for step in program(matrix):
        size, error = scaled(sizes.get(step.a, {}), abs(step.c)), scaled(errors.get(step.a, {}), abs(step.c))
        # Times a power of two is exact; a factor such as 1/6 is rounded itself.
        factor = Fraction(0 if _is_power(abs(step.c)) else 1 if _is_power(Fraction(step.c.denominator)) else 2)
        error = plus(error, scaled(size, factor))
        if step.op in ("add", "sub", "fma"):
            size, error = plus(size, sizes[step.b]), plus(error, errors[step.b])
            error = plus(error, size)
        sizes[step.target], errors[step.target] = size, error
    rows = [errors[f"y{i}"] for i in range(len(matrix))]
    return tuple(tuple(row.get(i, Fraction(0)) for i in range(len(matrix[0]))) for row in rows)


def _is_power(value: Fraction) -> bool:
    """Whether it is a power of two."""
    return value > 0 and all(part & (part - 1) == 0 for part in (value.numerator, value.denominator))


# -- programs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation: ``target`` becomes

    add: a + b · sub: a - b · fma: c * a + b · mul: c * a · copy: a · zero: 0

    ``v0``, ``v1``, ... are the inputs, ``y0``, ``y1``, ... the outputs, ``t0``, ``t1``, ... values between. A name is
    written once, before it is read; a copy costs nothing. ``b`` is empty where there is none, and ``c`` is 1 (sub: of
    a; b is subtracted) where no constant multiplies.
    """

    target: str
    op: str
    a: str = ""
    b: str = ""
    c: Fraction = Fraction(1)

    def __str__(self) -> str:
        text = {
            "add": f"{self.a} + {self.b}", "sub": f"{self.a} - {self.b}", "fma": f"{self.c} * {self.a} + {self.b}",
            "mul": f"{self.c} * {self.a}", "copy": self.a, "zero": "0",
        }  # fmt: skip
        return f"{self.target} = {text[self.op]}"


def operations(steps: Sequence[Step]) -> int:
    """How many of the steps compute something."""
    return sum(step.op not in ("copy", "zero") for step in steps)


def evaluate(steps: Sequence[Step], values: Sequence[Any]) -> list[Any]:
    """Run a program on values of any type that adds and multiplies: fractions, floats, arrays."""
    at: dict[str, Any] = {f"v{i}": value for i, value in enumerate(values)}
    for step in steps:
        c: Any = step.c.numerator if step.c.denominator == 1 else step.c
        if step.c.denominator != 1 and not isinstance(at.get(step.a), Fraction):
            c = float(step.c)
        match step.op:
            case "add":
                at[step.target] = at[step.a] + at[step.b]
            case "sub":
                at[step.target] = at[step.a] - at[step.b]
            case "fma":
                at[step.target] = c * at[step.a] + at[step.b]
            case "mul":
                at[step.target] = c * at[step.a]
            case "copy":
                at[step.target] = at[step.a]
            case _:
                at[step.target] = 0 * values[0]
    return [at[f"y{i}"] for i in range(sum(step.target.startswith("y") for step in steps))]


@cache
def program(matrix: Matrix) -> tuple[Step, ...]:
    """A straight-line program for ``out = matrix * v`` of few operations.

    Two columns that differ in signs alone, as those of AT for p and -p, are added and subtracted once. Two rows that
    differ in the signs of some columns, as those of BT and G for p and -p, are the sum and the difference of an even
    and an odd part. A part with a common factor is computed without it; the factor joins in an ``fma``.
    """
    return tuple(_Writer(matrix).steps)


Form = dict[str, Fraction]  # a sum of values, each times a number


class _Writer:
    def __init__(self, matrix: Matrix) -> None:
        self.steps: list[Step] = []
        self.known: dict[tuple[tuple[str, Fraction], ...], str] = {}
        self.temporaries = 0
        rows: list[Form] = [{f"v{j}": v for j, v in enumerate(row) if v} for row in matrix]
        rows = self.pair_columns(rows, len(matrix[0]))
        done: set[int] = set()
        for i, row in enumerate(rows):
            if i in done:
                continue
            mate = next((j for j in range(i + 1, len(rows)) if j not in done and self.parts(row, rows[j])), None)
            if mate is None:
                self.output(i, row)
            else:
                self.outputs(i, mate, *self.parts(row, rows[mate]))
                done.add(mate)

    def step(self, target: str, op: str, a: str = "", b: str = "", c: Fraction = Fraction(1)) -> str:
        if not target:
            target, self.temporaries = f"t{self.temporaries}", self.temporaries + 1
        self.steps.append(Step(target, op, a, b, c))
        return target

    def combine(self, target: str, c: Fraction, a: str, b: str) -> str:
        """target = c * a + b."""
        if c == 1:
            return self.step(target, "add", b, a)
        if c == -1:
            return self.step(target, "sub", b, a)
        return self.step(target, "fma", a, b, c)

    # -- columns ----------------------------------------------------------------------------------------------------

    def pair_columns(self, rows: list[Form], width: int) -> list[Form]:
        """Sums and differences of two columns in their place, where at least three rows have both."""
        free = [f"v{j}" for j in range(width)]
        while free:
            a = free.pop(0)
            for b in free:
                both = [row for row in rows if a in row and b in row]
                alike = sum(row[a] == row[b] for row in both)
                turned = sum(row[a] == -row[b] for row in both)
                one_sided = sum((a in row) != (b in row) for row in rows)
                if one_sided or alike + turned < len(both) or len(both) < 3 or not alike or not turned:
                    continue
                even, odd = self.step("", "add", a, b), self.step("", "sub", a, b)
                for row in both:
                    row[even if row[a] == row[b] else odd] = row[a]
                    del row[a], row[b]
                free.remove(b)
                break
        return rows

    # -- rows -------------------------------------------------------------------------------------------------------

    @staticmethod
    def parts(one: Form, other: Form) -> tuple[Form, Form] | tuple[()]:
        """(even, odd) with one = even + odd and other = even - odd, which have no value in common; or nothing."""
        if one.keys() != other.keys() or any(abs(one[name]) != abs(other[name]) for name in one):
            return ()
        even = {name: v for name, v in one.items() if other[name] == v}
        odd = {name: v for name, v in one.items() if other[name] == -v}
        return (even, odd) if even and odd else ()

    def outputs(self, i: int, j: int, even: Form, odd: Form) -> None:
        """y_i = even + odd and y_j = even - odd."""
        # The odd part keeps its factor, for the fma.
        base = self.sum("", even)
        factor, part = self.factored(odd)
        self.combine(f"y{i}", factor, part, base)
        self.combine(f"y{j}", -factor, part, base)

    def output(self, i: int, row: Form) -> None:
        if not row:
            self.step(f"y{i}", "zero")
        elif list(row.values()) == [1]:
            self.step(f"y{i}", "copy", next(iter(row)))
        else:
            self.sum(f"y{i}", row)

    # -- sums -------------------------------------------------------------------------------------------------------

    @staticmethod
    def factor(form: Form) -> Fraction:
        """What to take out of a sum so that as many of its numbers as can be are 1 or -1."""
        numbers = [abs(v) for v in form.values()]
        best = max(numbers, key=lambda v: (numbers.count(v), v == 1, -v))
        first = next(v for v in form.values() if abs(v) == best)
        return best if any(v == best for v in form.values()) else first

    def divided(self, form: Form) -> Form:
        factor = self.factor(form)
        return {name: v / factor for name, v in form.items()}

    def factored(self, form: Form) -> tuple[Fraction, str]:
        """A sum as a number times a value."""
        return self.factor(form), self.sum("", self.divided(form))

    def sum(self, target: str, form: Form) -> str:
        """The value of a sum; it is written once, unless it is an output itself."""
        if not target and list(form.values()) == [1]:
            return next(iter(form))
        key = tuple(sorted(form.items()))
        if key in self.known:
            return self.known[key] if not target else self.step(target, "copy", self.known[key])
        ones = [name for name, v in form.items() if v == 1]
        if (
            not ones
            and self.factor(form) != 1
            and (len(form) == 1 or any(abs(v) == 1 for v in self.divided(form).values()))
        ):
            factor, part = self.factored(form)
            made = self.step(target, "mul", part, c=factor)
        else:
            # The last of the ones first: BT's is the leading coefficient.
            start = ones[-1]
            rest = [name for name in form if name != start]
            # Numbers that multiply before those that are added: the chain of fma has the larger terms first.
            rest.sort(key=lambda name: abs(form[name]) == 1)
            made = start
            for at, name in enumerate(rest):
                made = self.combine(target if at == len(rest) - 1 else "", form[name], name, made)
        self.known[key] = made
        return made
