"""cpu.separable: image filters that are a column times a row, as a pass down and a pass along.

    w[r, s] = down[r] * along[s]:   t[p, w] = sum over r of  x[p - pad + r, w] * down[r]
                                    y[p, q] = sum over s of  t[p, q - pad + s] * along[s]

R + S products instead of R * S: of 131x131 taps 262 instead of 17161. Whether a filter is such a product shows in its
values only, so that each call looks: it stops at the first tap that does not fit, and passes over all of 131x131 taps
in 75 us. Filters that are none go to the engine that would have run without this one.

What counts as a product, of each channel by itself:

- The factors are exact, as those of a box, a binomial or a Sobel filter of whole numbers (or such over a power of two):
  the column and the row of the smallest tap that is not 0, the row divided by it. Sums of whole numbers stay exact.
- Or some tap is no whole number and |w[r, s] - down[r] * along[s]| <= 8 units * |w[r, s]| for every tap (units of half
  an ulp, 2^-24), or the smallest number there is: the column and row of the largest tap, in f64 and rounded. Taps of an
  outer product that were rounded once are within 5 units. A Gaussian that runs out into zeros is one.

`down` is scaled by a power of two so that its magnitudes add up to at most 1: the sum of a column of x is then no
larger than its largest value and overflows no sooner.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numba
import numpy as np
import torch
from numba.core import types
from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits, engines
from ..epilogue import IDENTITY
from ..problem import DTYPE_BYTES, Problem
from ..rewrites.base import CALL, Choice, Wrapper, allowed, named, runner_of, settings_of
from ..select.choose import rank
from ..select.policy import DEFAULT
from ..tensors import DTYPES, empty
from ..units import seconds_text

__all__ = ["Separable", "TwoPasses", "factors"]

_MOST_CHANNELS = 16
_LEAST_TAPS = 81  # from which R + S roundings and those of the factors are fewer than R * S
_LEAST_MACS = 1 << 22  # some 50 us; looking at the filter and the calls take 50
_UNIT = {"f32": 2.0**-24, "f64": 2.0**-53}
_META = torch.device("meta")


@dataclass(frozen=True)
class TwoPasses(Knobs):
    """The engines of the pass down and along, and the one of filters that are no product. ``invariant``: no batch would
    lead to others."""

    down: Choice
    along: Choice
    otherwise: Choice
    invariant: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        return f"down={self.down} along={self.along} otherwise={self.otherwise}"

    def like(self, other: Knobs) -> bool:
        """Places in the lists of two problems may be of different engines."""
        return isinstance(other, TwoPasses) and self.engines == other.engines

    @property
    def engines(self) -> tuple[str, str, str]:
        """Their names."""
        return self.down.engine, self.along.engine, self.otherwise.engine


class Separable(Wrapper):
    """Image filters that are a column times a row (blurs, boxes), found by their values, as two passes of one axis.

        y = (x * down) * along,   R + S products for each pixel instead of R * S

    Wins by about R * S / (R + S) wherever it applies; costs 1% where the filter turns out to be no product, which other
    engines then run. For one to 16 channels with a filter each: filters that were learned are no products. Predicted
    times are those of two passes. The tests of a product stand at the head of this file.
    """

    name = "cpu.separable"
    takes_bias = True
    by_values = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank != 2:
            yield f"rank is {problem.rank}; wanted 2 spatial axes"
            return
        if not problem.groups == problem.c == problem.k or not 1 <= problem.c <= _MOST_CHANNELS:
            sizes = f"C, K and groups are {problem.c}, {problem.k} and {problem.groups}"
            yield f"{sizes}; wanted 1 to {_MOST_CHANNELS} channels with a filter each"
            return  # ordinary layers are all told in one sentence
        if problem.direction == "wgrad":
            yield "direction is wgrad; the gradient of a filter is no product"
        if math.prod(problem.filter) < _LEAST_TAPS or min(problem.filter) < 2:
            yield f"filter is {problem.filter}; wanted at least {_LEAST_TAPS} taps on two axes"
        if problem.macs < _LEAST_MACS:
            yield f"products are {problem.macs}; looking at the filter wants at least {_LEAST_MACS}"
        if set(problem.dtypes) not in ({"f32"}, {"f64"}):
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted f32 or f64 for all three"

    def traits(self, problem: Problem, knobs: TwoPasses) -> Traits:
        inner = [named(c.engine).traits(p, c.knobs) for p, c in _each(problem, knobs)]
        # R and S roundings of the passes, 8 of the factors, one of what lies between the passes and one of the result.
        passes = (sum(problem.filter) + 12) * _UNIT[problem.dtypes[0]]
        return Traits(
            inner[2].accumulator, max(passes, inner[0].error_bound + inner[1].error_bound, inner[2].error_bound),
            all(t.deterministic for t in inner), knobs.invariant and all(t.batch_invariant for t in inner),
            all(t.plain_sum for t in inner),
        )  # fmt: skip

    def workspace_bytes(self, problem: Problem, device: Device, knobs: TwoPasses) -> int:
        down, along, otherwise = (named(c.engine).workspace_bytes(p, device, c.knobs) for p, c in _each(problem, knobs))
        return max(sum(_regions(problem)) + max(down, along), otherwise)

    def settings(self, problem: Problem, device: Device, within: tuple[str, ...]) -> Iterator[TwoPasses]:
        steady = next(self._settings(problem.with_(n=1), device, within, invariant=True)).engines
        for knobs in self._settings(problem, device, within):
            yield TwoPasses(knobs.down, knobs.along, knobs.otherwise, knobs.engines == steady)
        names = zip((*_passes(problem), problem), steady, strict=True)
        choices = [_invariant(p, device, (*within, self.kind), [Choice(name, None)]) for p, name in names]
        if all(choices):
            (down,), (along,), (otherwise,) = choices
            yield TwoPasses(down, along, otherwise, True)

    def _settings(
        self, problem: Problem, device: Device, within: tuple[str, ...], invariant: bool = False
    ) -> Iterator[TwoPasses]:
        """The best engines first, then the others; those alone whose bits no batch changes if asked for them."""
        inside = (*within, self.kind)
        down, along = _passes(problem)
        passes = [_best(p, device, inside, engines(device.kind)) for p in (down, along)]
        others: Iterable[Choice]
        if within:
            others = _best(problem, device, inside, engines(device.kind))
        else:
            found, _ = rank(problem, device, DEFAULT, without=self.name)
            others = [Choice(candidate.engine.name, candidate.knobs) for candidate in found]
        if invariant:
            passes = [_invariant(p, device, inside, choices) for p, choices in zip((down, along), passes, strict=True)]
            others = _invariant(problem, device, inside, others)
        first, second = passes[0][0], passes[1][0]
        for otherwise in others:
            yield TwoPasses(first, second, otherwise)
        # For limits: the best passes, those that are plain sums, and those of the least workspace.
        pairs = [(first, second)]
        for wanted in (_plain, functools.partial(_least, device=device)):
            pairs.append((wanted(down, passes[0]), wanted(along, passes[1])))
        for otherwise in others:
            for knobs in settings_of(named(otherwise.engine), problem, device, inside):
                for a, b in dict.fromkeys(pairs):
                    yield TwoPasses(a, b, Choice(otherwise.engine, knobs))

    def cost(self, problem: Problem, device: Device, knobs: TwoPasses) -> float:
        down, along, _ = self._parts_seconds(problem, device, knobs)
        return 2 * CALL["cpu"] + math.prod(problem.w_shape) * 1.5e-9 + down + along

    def _parts_seconds(self, problem: Problem, device: Device, knobs: TwoPasses) -> tuple[float, float, float]:
        down, along, otherwise = (named(c.engine).cost(p, device, c.knobs) for p, c in _each(problem, knobs))
        return down, along, otherwise

    def build(self, problem: Problem, device: Device, knobs: TwoPasses) -> Runner:
        return _build_two(problem, device, knobs)

    def told(self, problem: Problem, knobs: TwoPasses) -> str:
        rows, columns = problem.filter
        two = [f"{rows}x1 by {knobs.down.told}", f"1x{columns} by {knobs.along.told}"]
        first, second = two if problem.direction == "fprop" else reversed(two)
        return f"where the filter is a column times a row, {first}, then {second}; else {knobs.otherwise.told}"

    def reasons(self, problem: Problem, device: Device, knobs: TwoPasses) -> tuple[str, ...]:
        down, along, otherwise = (seconds_text(v) for v in self._parts_seconds(problem, device, knobs))
        return (f"{down} down and {along} along; {otherwise} if the filter is no column times a row",)


def _passes(problem: Problem) -> tuple[Problem, Problem]:
    """The pass down and the pass along. The last of them has the bias: of a dgrad that is the one down."""
    (R, S), (low, wide) = problem.filter, problem.padding
    down = problem.with_(
        filter=(R, 1), stride=(problem.stride[0], 1), padding=(low, (0, 0)), dilation=(problem.dilation[0], 1)
    )
    along = problem.with_(
        spatial=(problem.out[0], problem.spatial[1]), filter=(1, S), stride=(1, problem.stride[1]),
        padding=((0, 0), wide), dilation=(1, problem.dilation[1]),
    )  # fmt: skip
    if problem.direction == "fprop":
        return down.with_(epilogue=IDENTITY), along
    return down, along.with_(epilogue=IDENTITY)


def _each(problem: Problem, knobs: TwoPasses) -> list[tuple[Problem, Choice]]:
    down, along = _passes(problem)
    return [(down, knobs.down), (along, knobs.along), (problem, knobs.otherwise)]


@functools.lru_cache(maxsize=512)
def _best(
    problem: Problem, device: Device, within: tuple[str, ...], registry: tuple[Engine, ...]
) -> tuple[Choice, ...]:
    """The engines that take a problem, with default knobs, the cheapest first."""
    found = []
    for engine in allowed(device, within):
        knobs = next(settings_of(engine, problem, device, within), None)
        if knobs is not None:
            found.append((engine.cost(problem, device, knobs), Choice(engine.name, knobs)))
    return tuple(choice for _, choice in sorted(found, key=lambda each: each[0]))


def _invariant(
    problem: Problem, device: Device, within: tuple[str, ...], choices: Iterable[Choice]
) -> tuple[Choice, ...]:
    """The first choice whose engine has knobs whose bits no batch changes, with these. Of all choices there is one:
    cpu.naive."""
    for choice in choices:
        engine = named(choice.engine)
        for knobs in settings_of(engine, problem, device, within):
            if engine.traits(problem, knobs).batch_invariant:
                return (Choice(choice.engine, knobs),)
    return ()


def _plain(problem: Problem, choices: Sequence[Choice]) -> Choice:
    """The first choice that is a plain sum of products. There is one: cpu.naive."""
    plain = (c for c in choices if named(c.engine).traits(problem, c.knobs).plain_sum)
    return next(plain, choices[0])


def _least(problem: Problem, choices: Sequence[Choice], device: Device) -> Choice:
    """The choice that needs the least workspace."""
    return min(choices, key=lambda c: named(c.engine).workspace_bytes(problem, device, c.knobs))


def _regions(problem: Problem) -> tuple[int, int, int]:
    """Bytes of the factors down and along, and of what lies between the passes."""
    size, between = DTYPE_BYTES[problem.dtypes[0]], problem.n * problem.c * problem.out[0] * problem.spatial[1]
    counts = problem.k * problem.filter[0], problem.k * problem.filter[1], between
    down, along, middle = (-(-count * size // 64) * 64 for count in counts)
    return down, along, middle


def _build_two(problem: Problem, device: Device, knobs: TwoPasses) -> Runner:
    (R, S), K = problem.filter, problem.k
    runs = [runner_of(p, device, c) for p, c in _each(problem, knobs)]
    spaces = [named(c.engine).workspace_bytes(p, device, c.knobs) for p, c in _each(problem, knobs)]
    takes = [named(c.engine).takes_bias for _, c in _each(problem, knobs)]
    down_bytes, along_bytes, middle_bytes = _regions(problem)
    ends = (down_bytes, down_bytes + along_bytes, down_bytes + along_bytes + middle_bytes)
    dtype, forward = DTYPES[problem.dtypes[0]], problem.direction == "fprop"
    # fprop: (x, down) -> middle, (middle, along) -> y.  dgrad: (dy, along) -> middle, (middle, down) -> dx.
    first, last = (0, 1) if forward else (1, 0)
    layout = problem.layouts[0]
    shape = (problem.n, problem.c, problem.out[0], problem.spatial[1])
    strides = empty(shape, dtype, layout, _META).stride()
    size, find = dtype.itemsize, _compiled(problem.dtypes[0])
    taps = empty(problem.w_shape, dtype, problem.layouts[1], _META).stride()
    column = (1, -1, 1, 1)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, bias: Tensor | None) -> None:
        assert workspace is not None, "factors and what lies between the passes are in the workspace"
        u = workspace[: K * R * size].view(dtype)
        v = workspace[ends[0] : ends[0] + K * S * size].view(dtype)
        w = b.detach().as_strided((K, R, S), (taps[0], taps[2], taps[3])).numpy()
        if find(w, u.view(K, R).numpy(), v.view(K, S).numpy()):
            filters = u.view(K, 1, R, 1), v.view(K, 1, 1, S)
            middle = workspace[ends[1] : ends[1] + math.prod(shape) * size].view(dtype).as_strided(shape, strides)
            for at, source, target, added in ((first, a, middle, None), (last, middle, out, bias)):
                scratch = workspace[ends[2] : ends[2] + spaces[at]] if spaces[at] else None
                runs[at](source, filters[at], target, scratch, added if takes[at] else None)
            taken = takes[last]
        else:
            runs[2](a, b, out, workspace[: spaces[2]] if spaces[2] else None, bias if takes[2] else None)
            taken = takes[2]
        if bias is not None and not taken:
            out.add_(bias.view(column))

    return run


# -- factors ------------------------------------------------------------------------------------------------------


@functools.cache
def _compiled(dtype: str) -> Callable[..., bool]:
    """:func:`factors` for filters of any strides, compiled once for each dtype and kept on disk by Numba."""
    scalar = {"f32": types.float32, "f64": types.float64}[dtype]
    filters, made = types.Array(scalar, 3, "A"), types.Array(scalar, 2, "C")
    signature = types.boolean(filters, made, made)
    return numba.njit(signature, nogil=True, cache=True)(factors)


def factors(w, down, along):
    """Fill ``down`` (K x R) and ``along`` (K x S) with factors of the filters ``w`` (K x R x S); False if one has none.
    The rules stand at the head of this file."""
    K, R, S = w.shape
    single = w.itemsize == 4
    unit = 2.0**-24 if single else 2.0**-53
    tiny = 2.0**-149 if single else 5e-324
    for k in range(K):
        # A look at a few minors turns most filters away: of a product all are 0.
        least, most, whole, endless = np.inf, 0.0, True, False
        lr = ls = mr = ms = 0
        for r in range(R):
            for s in range(S):
                tap = np.float64(w[k, r, s])
                size = abs(tap)
                if not size < np.inf:
                    endless = True
                if size > 0 and size < least:
                    least, lr, ls = size, r, s
                if size > most:
                    most, mr, ms = size, r, s
                if tap != np.floor(tap) or size >= 2.0**23:
                    whole = False
            if r == 1 and most < np.inf and not endless:
                # Two rows of a product are multiples of each other.
                a, b = np.float64(w[k, 0, ms]), np.float64(w[k, 1, ms])
                for s in range(S):
                    p, q = a * np.float64(w[k, 1, s]), b * np.float64(w[k, 0, s])
                    if abs(p - q) > 64 * unit * max(abs(p), abs(q)) + 4 * tiny * most:
                        return False
        if endless or most == 0:
            return False
        done = False
        for exact in (True, False):
            if exact:
                pr, ps = lr, ls
            else:
                pr, ps = mr, ms
                if whole:
                    break
            pivot, total = np.float64(w[k, pr, ps]), 0.0
            for r in range(R):
                total += abs(np.float64(w[k, r, ps]))
            scale = 2.0 ** np.ceil(np.log2(total))
            while scale < total:
                scale *= 2
            for r in range(R):
                down[k, r] = np.float64(w[k, r, ps]) / scale
            for s in range(S):
                along[k, s] = np.float64(w[k, pr, s]) / pivot * scale
            fits = True
            for r in range(R):
                for s in range(S):
                    tap = np.float64(w[k, r, s])
                    product = np.float64(down[k, r]) * np.float64(along[k, s])
                    off = abs(tap - product)
                    if not off <= (0.0 if exact else 8 * unit * abs(tap) + tiny):
                        fits = False
                        break
                if not fits:
                    break
            if fits:
                done = True
                break
        if not done:
            return False
    return True
