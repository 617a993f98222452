"""cpu.phases, cuda.phases: a dilated convolution as a plain one on each of its phases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from ..device import Device
from ..problem import Problem
from .base import Part, Piece, Rewrite, Rewritten, Span

__all__ = ["CpuPhases", "CudaPhases", "Phases"]

_MOST = 64  # phases: a copy each


class Phases(Rewrite):
    """Dilation taken apart: every d-th pixel makes an image of its own, on which the filter has no gaps.

        y[f + d*j] = sum over r of  x[f - pad + d*(j + r)] * w[r]      for each phase f < d

    reads only positions of one remainder modulo d. The d phases along each axis are copied to images side by side in
    the batch, d*d of 1/(d*d) of the pixels each; one problem without dilation runs on them, and its results are put
    together again. With a stride, of which g = gcd(stride, d) is shared, there are d/g phases, and the stride inside is
    stride/g. wgrad is one sum over the larger batch; where the phases differ in their number of results, those of each
    number are summed by themselves, since a result that is no one's would multiply pixels by zeros.

    Wins where an engine that dilates badly or not at all (Winograd, filters in registers) beats the others by more
    than the copies of x and y. Loses to engines that read gaps at no cost, and where the phases are a few pixels large.
    """

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        pairs = zip(problem.dilation, problem.filter, strict=True)
        if max(problem.dilation) == 1 or all(dil == 1 or taps == 1 for dil, taps in pairs):
            yield f"dilation is {problem.dilation} of a filter {problem.filter}; wanted more than 1 between taps"
            return
        axes = [_axis(problem, at, problem.out[at]) for at in range(problem.rank)]
        count = prod(len(axis.x) for axis in axes)
        if count > _MOST:
            yield f"phases are {count}; wanted at most {_MOST}"
        if any(axis.size < 1 for axis in axes):
            yield f"padding is {problem.padding} on {problem.spatial}; wanted windows that see the image"

    def parts(self, problem: Problem, way: None) -> list[Part]:
        found = []
        for axes in itertools.product(*(_classes(problem, at) for at in range(problem.rank))):
            if any(axis.size < 1 for axis in axes):
                continue  # windows of these phases see nothing but padding: a wgrad has no sum of them
            phases = list(itertools.product(*(range(len(axis.x)) for axis in axes)))
            inner = problem.with_(
                n=problem.n * len(phases),
                spatial=tuple(axis.size for axis in axes),
                stride=tuple(axis.stride for axis in axes),
                padding=tuple(axis.padding for axis in axes),
                dilation=1,
            )
            x: list[Piece] = []
            y: list[Piece] = []
            for number, phase in enumerate(phases):
                image, whole = (number * problem.n, problem.n, 1), (0, problem.n, 1)
                for pieces, spans, channels in (
                    (x, [axis.x[f] for axis, f in zip(axes, phase, strict=True)], problem.c),
                    (y, [axis.y[f] for axis, f in zip(axes, phase, strict=True)], problem.k),
                ):
                    every = (0, channels, 1)
                    if all(mine[1] > 0 for mine, _ in spans):
                        mine = (image, every, *(mine for mine, _ in spans))
                        pieces.append(Piece(mine, (whole, every, *(outer for _, outer in spans))))
            found.append(Part(inner, (tuple(x), None, tuple(y))))
        return found

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        work = self.work(problem, knobs.way)
        count = sum(part.problem.n for part in work.parts) // problem.n
        inner = "x".join(map(str, work.problems[0].spatial))
        return f"{count} phases of dilation {problem.dilation}, {inner} pixels each, as images of a batch"


@dataclass(frozen=True)
class _Axis:
    """One axis inside: its size, stride and padding, and of each phase the spans of x and y, mine and the whole's."""

    size: int
    stride: int
    padding: tuple[int, int]
    x: tuple[tuple[Span, Span], ...]
    y: tuple[tuple[Span, Span], ...]


def _classes(problem: Problem, at: int) -> list[_Axis]:
    """The phases of an axis together, or for a wgrad in two classes: those of more results and those of one less."""
    out = problem.out[at]
    phases = _count(problem, at)
    longer = out % phases
    if problem.direction != "wgrad" or longer == 0 or phases == 1:
        return [_axis(problem, at, out)]
    made = [_axis(problem, at, out, (0, longer))]
    return [*made, _axis(problem, at, out, (longer, phases))] if out > phases else made


def _count(problem: Problem, at: int) -> int:
    """How many phases an axis has."""
    if problem.filter[at] == 1:
        return 1
    return min(problem.dilation[at] // gcd(problem.stride[at], problem.dilation[at]), problem.out[at])


def _axis(problem: Problem, at: int, out: int, some: tuple[int, int] | None = None) -> _Axis:
    """The phases from ``some[0]`` up to ``some[1]`` of an axis; all of them without ``some``.

    Phase f has the results p = f + d'*j and reads x at s*f - low + d*i with i = s'*j + r, where g = gcd(s, d),
    s' = s/g and d' = d/g.
    """
    size, taps, stride, dil = problem.spatial[at], problem.filter[at], problem.stride[at], problem.dilation[at]
    low = problem.padding[at][0]
    if taps == 1 or dil == 1:
        whole: tuple[Span, Span] = ((0, size, 1), (0, size, 1))
        return _Axis(size, stride, problem.padding[at], (whole,), (((0, out, 1), (0, out, 1)),))
    shared = gcd(stride, dil)
    step, every = stride // shared, dil // shared
    chosen = range(*some) if some else range(_count(problem, at))
    results = [-(-(out - f) // every) for f in chosen]
    reach = [step * (count - 1) + taps for count in results]  # positions i that its windows touch
    first = [max(0, -((stride * f - low) // dil)) for f in chosen]  # the first i at or behind the image's first pixel
    end = [min(last, -((stride * f - low - size) // dil)) for f, last in zip(chosen, reach, strict=True)]
    # A phase whose windows see padding alone has no pixels; the others say what the images inside hold.
    seen = [(a, b) for a, b in zip(first, end, strict=True) if b > a]
    begin, stop = (min(a for a, _ in seen), max(b for _, b in seen)) if seen else (0, 0)
    x, y = [], []
    for f, a, b, count in zip(chosen, first, end, results, strict=True):
        x.append(((a - begin, max(b - a, 0), 1), (stride * f - low + dil * a, max(b - a, 0), dil)))
        y.append(((0, count, 1), (f, count, every)))
    return _Axis(stop - begin, step, (begin, max(reach) - stop), tuple(x), tuple(y))


class CpuPhases(Phases):
    """On the CPU."""

    name = "cpu.phases"
    takes_bias = True


class CudaPhases(Phases):
    """On a GPU."""

    name = "cuda.phases"
    device = "cuda"
    takes_epilogue = True
    proven = False
