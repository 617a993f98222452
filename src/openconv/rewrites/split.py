"""cpu.split, cuda.split: large problems in pieces, of images or of bands of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ..device import Device
from ..engine import Traits
from ..problem import Problem
from .base import Part, Piece, Rewrite, Rewritten, Span

__all__ = ["CpuSplit", "CudaSplit", "Pieces", "Split"]

LEAST = 1 << 24
"""Elements of x or y from which a problem is large: 64 MB of f32. Splitting smaller ones saves little memory."""
_MOST = 1024  # pieces
_COUNTED = 2**31 - 2**20  # elements that engines which count in 32 bits take, with some to spare for their tiles


@dataclass(frozen=True)
class Pieces:
    """``images`` whole images at a time, or each image alone in ``bands``."""

    images: int
    bands: int

    def __str__(self) -> str:
        return f"images={self.images} bands={self.bands}"


class Split(Rewrite):
    """A large problem piece by piece: some images at a time, or one image in bands that overlap by the filter's reach.

        y[p0 to p1]  from  x[p0*stride - pad  to  (p1-1)*stride - pad + dil*(R-1)]

    Of each band the inner engine sees an image of its own with the padding that is left of it. So an engine that takes
    at most 2^31 elements runs on larger tensors, and one that needs more workspace than a limit allows runs under it:
    the workspace is that of one piece and the copy of its band. Bands of one image lie together where channels are
    last, or in one channel; else they are copied, with the halo.

    Each result is the same sum as without: bit for bit where the inner engine adds in an order that does not depend on
    where in an image the result is, or how large the image is. This holds of loops over taps (naive, filter2d,
    depthwise), and not of matrix products, whose blocking follows the sizes. A wgrad adds up the pieces' sums in their
    order, which is another order than that of the whole.
    """

    batches_alike = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        most = max(prod(problem.x_shape), prod(problem.y_shape))
        if most < LEAST:
            yield f"the larger of x and y has {most} elements; wanted at least {LEAST}"
        elif not any(self.ways(problem, device)):
            yield f"x is {problem.x_shape} and y {problem.y_shape}; wanted several images or rows"

    def ways(self, problem: Problem, device: Device) -> Iterator[Pieces]:
        # Only pieces that count to 2^31 are of use to those who do, and the others decide which engines are asked.
        every = list(_ways(problem))
        small = [way for way in every if _elements(problem, way) < _COUNTED]
        yield from small or every

    def traits(self, problem: Problem, knobs: Rewritten) -> Traits:
        # How many images go together follows the batch, and so may the engine inside of bands.
        return replace(super().traits(problem, knobs), batch_invariant=problem.direction == "wgrad")

    def parts(self, problem: Problem, way: Pieces) -> list[Part]:
        if way.bands == 1:
            firsts = range(0, problem.n, way.images)
            return [_images(problem, n, min(way.images, problem.n - n)) for n in firsts]
        bands = _bands(problem, way.bands)
        return [_band(problem, n, first, end) for n in range(problem.n) for first, end in bands
                if _sees(problem, first, end)]  # fmt: skip

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        way = knobs.way
        if way.bands == 1:
            return f"{-(-problem.n // way.images)} pieces of {way.images} image{'s' * (way.images > 1)}"
        axis, rows = _rows(problem)
        name = "rows" if axis == problem.rank - 2 else "columns" if axis == problem.rank - 1 else "frames"
        count = len(_bands(problem, way.bands))
        images = f" of each of {problem.n} images" if problem.n > 1 else ""
        return f"{count} bands of {-(-rows // way.bands)} {name}{images}"


def _ways(problem: Problem) -> Iterator[Pieces]:
    """Halves, eighths and so on of the batch, single images, and these in bands."""
    parts = 2
    while parts < problem.n and parts <= _MOST:
        yield Pieces(-(-problem.n // parts), 1)
        parts *= 4
    if 1 < problem.n <= _MOST:
        yield Pieces(1, 1)
    bands, rows = 2, _rows(problem)[1]
    while bands <= min(rows, _MOST // problem.n):
        yield Pieces(1, bands)
        bands *= 2 if bands < 8 else 4


def _elements(problem: Problem, way: Pieces) -> int:
    """About how many elements the larger of x and y has in a piece, with its halo."""
    image = max(prod(problem.x_shape[1:]), prod(problem.y_shape[1:]))
    if way.bands == 1:
        return image * way.images
    at, rows = _rows(problem)
    return image // way.bands + image // rows * problem.dilation[at] * problem.filter[at]


def _rows(problem: Problem) -> tuple[int, int]:
    """The axis along which bands are cut, and how many rows it has: those of y, or of the dx of a dgrad."""
    sizes = problem.spatial if problem.direction == "dgrad" else problem.out
    at = next((at for at, size in enumerate(sizes) if size > 1), 0)
    return at, sizes[at]


def _bands(problem: Problem, count: int) -> list[tuple[int, int]]:
    """First and end of each band. Those of a dgrad begin where a window does: its padding inside is then >= 0."""
    at, rows = _rows(problem)
    each = -(-rows // count)
    if problem.direction != "dgrad":
        return [(first, min(first + each, rows)) for first in range(0, rows, each)]
    stride, low = problem.stride[at], problem.padding[at][0]
    cuts = {-(-(first + low) // stride) * stride - low for first in range(each, rows, each)}
    ends = [0, *sorted(cut for cut in cuts if 0 < cut < rows), rows]
    return list(itertools.pairwise(ends))


def _spans(problem: Problem, first: int, end: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Of a band: first and end of its rows of x and of y, and the padding that is left."""
    at, _ = _rows(problem)
    size, stride, (low, _) = problem.spatial[at], problem.stride[at], problem.padding[at]
    reach = problem.dilation[at] * (problem.filter[at] - 1) + 1
    if problem.direction == "dgrad":
        top = max(0, min(-(-(first + low - reach + 1) // stride), (first + low) // stride))
        bottom = min(problem.out[at], (end - 1 + low) // stride + 1)
        before = first + low - top * stride
        after = max(0, (bottom - top - 1) * stride + reach - (end - first) - before)
        return (first, end), (top, bottom), (before, after)
    begin, stop = first * stride - low, (end - 1) * stride - low + reach
    inside = max(0, min(begin, size)), min(size, stop)
    return inside, (first, end), (max(0, -begin), max(0, stop - size))


def _sees(problem: Problem, first: int, end: int) -> bool:
    """Whether the windows of a band touch the image; a band of nothing but padding is zero."""
    (x0, x1), (y0, y1), _ = _spans(problem, first, end)
    return x1 > x0 and y1 > y0


def _pieces(problem: Problem, n: Span, at: int, x: Span, y: Span) -> tuple[tuple[Piece, ...] | None, ...]:
    def one(shape: tuple[int, ...], rows: Span) -> tuple[Piece, ...]:
        whole: list[Span] = [n, *((0, size, 1) for size in shape[1:])]
        whole[2 + at] = rows
        return (Piece(tuple((0, count, 1) for _, count, _ in whole), tuple(whole)),)

    return one(problem.x_shape, x), None, one(problem.y_shape, y)


def _images(problem: Problem, first: int, count: int) -> Part:
    x, y = (0, problem.spatial[0], 1), (0, problem.out[0], 1)
    return Part(problem.with_(n=count), _pieces(problem, (first, count, 1), 0, x, y))


def _band(problem: Problem, n: int, first: int, end: int) -> Part:
    at, _ = _rows(problem)
    (x0, x1), (y0, y1), padding = _spans(problem, first, end)
    spatial, pads = list(problem.spatial), list(problem.padding)
    spatial[at], pads[at] = x1 - x0, padding
    inner = problem.with_(n=1, spatial=tuple(spatial), padding=tuple(pads))
    return Part(inner, _pieces(problem, (n, 1, 1), at, (x0, x1 - x0, 1), (y0, y1 - y0, 1)))


class CpuSplit(Split):
    """On the CPU."""

    name = "cpu.split"
    takes_bias = True


class CudaSplit(Split):
    """On a GPU."""

    name = "cuda.split"
    device = "cuda"
    takes_epilogue = True
    proven = False
