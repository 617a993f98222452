"""Tiles of convolution by Fourier transforms: their sizes, what a call holds at a time, and what that costs.

Overlap-save. A tile of L positions holds V = L - reach results along an axis, where reach = dil*(R-1); the rest wraps
around and is left out, so that neighbouring tiles read the same ``reach`` positions of the source:

    fprop   y[q]  = sum over r of  w[r] * x[q - pad + r*dil]        tile: x  from q0 - pad,         results at 0
    dgrad   dx[h] = sum over r of  w[r] * dy[h + pad - r*dil]       tile: dy from h0 + pad - reach, results at reach
    wgrad   dw[r] = sum over q of dy[q] * x[q - pad + r*dil]        tiles: x as in fprop, dy from q0 with reach zeros

A stride is what it is at stride 1: fprop keeps each s-th result, dgrad and wgrad see dy with zeros between. The sizes
of tiles have no prime factors but 2, 3, 5 and 7.

Everything here is plain Python: :mod:`openconv.fft_passes` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import log2, prod, sqrt

from .engine import Knobs, Traits
from .problem import Problem

__all__ = [
    "FftKnobs", "Form", "Rates", "Run", "copies_of", "empty_refusals", "good_size", "knobs_for", "runs", "seconds",
    "traits_of",
]  # fmt: skip

_MOST = 1 << 20  # positions along one axis
_SMALL = 1024  # bytes of numbers and sizes that torch allocates on the way
_SQUARE = 60 * 60  # numbers that torch turns at a time when it copies a transposed matrix


@dataclass(frozen=True)
class FftKnobs(Knobs):
    """``tile``: positions of a transform along each axis. ``product``: how spectra are multiplied, ``matrix`` (a
    product of matrices for each frequency) or ``pointwise`` (channel by channel, all frequencies at once).

    What is there at a time: ``groups`` groups, ``channels`` results of one group (dgrad: of C/G, else of K/G), and
    ``tiles`` tiles of ``images`` images. ``rows`` transforms are one call of the library. ``alone``: no call holds more
    than one image, and nothing depends on the batch.
    """

    tile: tuple[int, ...]
    product: str
    groups: int
    channels: int
    images: int
    tiles: int
    rows: int
    alone: bool

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.tile))
        rest = " ".join(f"{name}={value}" for name, value in vars(self).items() if name not in ("tile", "alone"))
        return f"tile={sizes} {rest}" + " alone" * self.alone


@dataclass(frozen=True)
class Run:
    """Tiles ``first`` to ``first + count - 1`` of an axis, which hold ``length`` elements each, from element ``source``
    on and ``step`` further with each tile. Within a tile they lie at ``offset``, ``spacing`` apart. ``whole``: they
    fill it."""

    first: int
    count: int
    source: int
    step: int
    length: int
    offset: int
    spacing: int
    whole: bool


def runs(size: int, spread: int, start: int, advance: int, length: int, tile: int, tiles: range) -> list[Run]:
    """What tiles hold of an axis of ``size`` elements that lie ``spread`` apart: tile t covers the positions from
    start + t * advance, ``length`` of them. ``advance`` is a multiple of ``spread``."""
    found: list[Run] = []
    for t in tiles:
        place = start + t * advance
        low, high = max(0, -(-place // spread)), min(size, -(-(place + length) // spread))
        count, offset = max(0, high - low), low * spread - place if high > low else 0
        last = found[-1] if found else None
        step = advance // spread
        if last and count and (count, offset) == (last.length, last.offset) and low == last.source + last.count * step:
            found[-1] = replace(last, count=last.count + 1)
        else:
            whole = spread == 1 and offset == 0 and count == tile
            found.append(Run(t, 1, low if count else 0, step, count, offset, spread, whole))
    return found


def good_size(least: int) -> int:
    """The smallest product of 2, 3, 5 and 7 that is even and not below ``least``."""
    best = 1 << max(1, (least - 1).bit_length())
    sevens = 1
    while sevens < best:
        fives = sevens
        while fives < best:
            threes = fives
            while threes < best:
                size = threes * 2
                while size < least:
                    size *= 2
                best = min(best, size)
                threes *= 3
            fives *= 5
        sevens *= 7
    return best


class Form:
    """A problem in tiles: how many of what there are at a time."""

    def __init__(self, problem: Problem, knobs: FftKnobs, *, cuda: bool = False) -> None:
        self.problem, self.knobs, self.cuda = problem, knobs, cuda
        self.wgrad = problem.direction == "wgrad"
        self.forward = problem.direction == "fprop"
        self.size = 8 if problem.dtypes[0] == "f64" else 4  # bytes of a real number
        own, other = problem.c // problem.groups, problem.k // problem.groups
        # Channels that come in and go out; a wgrad has x beside what is blocked, dy.
        self.ins, self.outs = (other, own) if problem.direction == "dgrad" else (own, other)
        self.reach = reach_of(problem)
        self.extents = extents_of(problem)
        self.tile = knobs.tile
        self.valid = tuple(
            (size - reach) // stride * stride
            for size, reach, stride in zip(knobs.tile, self.reach, problem.stride, strict=True)
        )
        self.grid = tuple(-(-extent // valid) for extent, valid in zip(self.extents, self.valid, strict=True))
        self.positions = prod(knobs.tile)
        self.bins = (*knobs.tile[:-1], knobs.tile[-1] // 2 + 1)
        self.frequencies = prod(self.bins)
        self.pointwise = knobs.product == "pointwise"

    @cached_property
    def box(self) -> tuple[int, ...]:
        """Tiles along each axis that are there at a time: rows of them, or a part of a row."""
        left, sizes = self.knobs.tiles, []
        for count in reversed(self.grid):
            sizes.append(max(1, min(count, left)))
            left //= count
        return tuple(reversed(sizes))

    @cached_property
    def chunks(self) -> list[tuple[range, tuple[range, ...]]]:
        """Images and tiles that are there together."""
        axes = [
            [range(at, min(at + step, count)) for at in range(0, count, step)]
            for count, step in zip(self.grid, self.box, strict=True)
        ]
        images, step = self.problem.n, self.knobs.images
        batches = [range(n, min(n + step, images)) for n in range(0, images, step)]
        return [(batch, box) for batch in batches for box in product(*axes)]

    @cached_property
    def chunk_count(self) -> int:
        """How many :attr:`chunks` there are."""
        boxes = prod(-(-count // step) for count, step in zip(self.grid, self.box, strict=True))
        return -(-self.problem.n // self.knobs.images) * boxes

    @cached_property
    def block_count(self) -> int:
        """How many :attr:`blocks` there are."""
        return -(-self.problem.groups // self.knobs.groups) * -(-self.outs // self.knobs.channels)

    @cached_property
    def together(self) -> int:
        """The most tiles of one channel that are there at a time."""
        return min(self.knobs.images, self.problem.n) * prod(self.box)

    @cached_property
    def blocks(self) -> list[tuple[int, int, int, int]]:
        """(first group, groups, first channel, channels) of each block of filters."""
        groups, channels = self.knobs.groups, self.knobs.channels
        return [
            (g, min(groups, self.problem.groups - g), o, min(channels, self.outs - o))
            for g in range(0, self.problem.groups, groups)
            for o in range(0, self.outs, channels)
        ]

    @property
    def in_place(self) -> bool:
        """Whether spectra are multiplied where they are."""
        return self.pointwise and self.ins == self.outs == 1

    # -- rows: transforms of one tile of one channel -----------------------------------------------------------------

    @property
    def image_rows(self) -> int:
        return self.knobs.groups * self.ins * self.together

    @property
    def result_rows(self) -> int:
        """Of results, or in a wgrad of dy."""
        return self.knobs.groups * self.knobs.channels * self.together

    @property
    def filter_rows(self) -> int:
        return self.knobs.groups * self.knobs.channels * self.ins

    def rows_of(self, rows: int) -> int:
        """Of so many rows, those that are one call: whole channels, where there are several tiles."""
        if self.pointwise:
            return rows
        return min(rows, max(self.knobs.rows, self.together))

    @cached_property
    def regions(self) -> dict[str, int]:
        """The parts of the workspace, in real numbers: tiles as they are cut, spectra of images, filters and results,
        and some of the results put in order for the way back."""
        spectrum = 2 * self.frequencies
        inputs = (self.image_rows, self.result_rows if self.wgrad else self.filter_rows)
        cut = max(self.rows_of(rows) for rows in inputs) * self.positions
        results = self.filter_rows if self.wgrad else self.result_rows
        if self.pointwise:
            product = self.filter_rows if self.wgrad else 0 if self.in_place else self.result_rows
            return {"cut": cut, "images": 0, "filters": 0, "results": product * spectrum, "ordered": 0}
        return {
            "cut": cut,
            "images": self.image_rows * spectrum,
            "filters": (self.result_rows if self.wgrad else self.filter_rows) * spectrum,
            "results": results * spectrum,
            "ordered": self.rows_of(results) * spectrum,
        }

    @cached_property
    def reserve(self) -> int:
        """Bytes that the library allocates beside: what its transforms return, and what it holds in between."""
        real, spectrum = self.positions * self.size, 2 * self.frequencies * self.size
        others = self.result_rows if self.wgrad else self.filter_rows
        results = self.filter_rows if self.wgrad else self.result_rows
        # With several axes the spectra are copied on their way back, and all but the last axis come first. Of one axis
        # they are copied for cuFFT, which writes over them.
        copies = 2 if self.problem.rank > 1 else int(self.cuda)
        back = self.rows_of(results) * (real + copies * spectrum)
        if self.pointwise:
            kept = (self.image_rows + others) * spectrum
            there, back = kept, kept + back
        else:
            there = max(self.rows_of(self.image_rows), self.rows_of(others)) * spectrum + _SQUARE * 2 * self.size
        if self.cuda:  # cuFFT may copy its input, and works in as much again
            there, back = there * 2 + self.rows_of(self.image_rows) * real, back * 2
        return max(there, back) + _SMALL

    @property
    def own(self) -> int:
        """Bytes of the workspace that are used."""
        return sum(-(-count * self.size // 64) * 64 for count in self.regions.values())

    @property
    def bytes(self) -> int:
        """The most that a call allocates, its own and the library's."""
        return self.own + self.reserve

    @property
    def transforms(self) -> tuple[int, int]:
        """Transforms there and back of a whole call. Images are transformed again for each block of result channels,
        unless one chunk holds them all."""
        problem = self.problem
        tiles = problem.n * prod(self.grid)
        filters = prod(problem.w_shape[:2])
        again = 1 if self.chunk_count == 1 else -(-self.outs // self.knobs.channels)
        images = problem.groups * self.ins * tiles * again
        results = problem.groups * self.outs * tiles
        return (images + results, filters) if self.wgrad else (images + filters, results)

    @property
    def work(self) -> int:
        """Complex multiplications of a whole call."""
        problem = self.problem
        return self.frequencies * prod(problem.w_shape[:2]) * problem.n * prod(self.grid)


def reach_of(problem: Problem) -> tuple[int, ...]:
    """Positions beyond its first that a filter covers."""
    return tuple((taps - 1) * dilation for taps, dilation in zip(problem.filter, problem.dilation, strict=True))


def extents_of(problem: Problem) -> tuple[int, ...]:
    """Positions that tiles must cover: of dx, or of y and dy at stride 1."""
    if problem.direction == "dgrad":
        return problem.spatial
    return tuple((count - 1) * stride + 1 for count, stride in zip(problem.out, problem.stride, strict=True))


def empty_refusals(problem: Problem) -> Iterator[str]:
    """Tiles need something to hold."""
    if problem.is_empty:
        yield f"shapes of x and w are {problem.x_shape} and {problem.w_shape}; of nothing there is no transform"


# -- what can be relied on --------------------------------------------------------------------------------------------


def traits_of(problem: Problem, knobs: FftKnobs) -> Traits:
    """Let M be the largest sum(|x|*|w|). A transform of T positions passes each value through log2(T) roundings, so
    that with rounding errors that are independent it is off by a share of about u*sqrt(log2 T) in the 2-norm; products
    pass three transforms and D terms of a sum over channels (wgrad: over tiles), which adds D/2 under the root. Back at
    the results the error is spread evenly: each has a standard deviation of

        sigma <= u * sqrt(3*log2(T) + D/2 + 2) * sqrt(sum over c of |x_c|^2 * |w_c|^2) / sqrt(T)

    and the last two factors are at most M: |v|_2^2 <= |v|_1 * |v|_inf, the largest sum is at least the mean over all
    shifts, |x|_1 * |w|_1 / T, and at least |x|_inf * |w|_inf. Six sigma are the bound.
    """
    form = Form(problem, knobs)
    unit = 2.0**-53 if form.size == 8 else 2.0**-24
    terms = problem.n * prod(form.grid) if form.wgrad else form.ins
    bound = 6 * unit * sqrt(3 * log2(max(2, form.positions)) + terms / 2 + 2)
    alone = form.wgrad or knobs.alone
    return Traits("f64" if form.size == 8 else "f32", bound, batch_invariant=alone, plain_sum=False)


def copies_of(problem: Problem, knobs: FftKnobs) -> tuple[str, ...]:
    """What is copied before anything is computed."""
    names = {"fprop": "x", "dgrad": "dy", "wgrad": "x and dy"}
    return (f"cut {names[problem.direction]} into tiles of {'x'.join(map(str, knobs.tile))}",)


# -- what it costs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    ``transforms``: operations of transforms, of which 5/2 T log2(T) are counted for T real numbers. ``back``: how much
    longer a transform of several axes takes on its way back. ``longest``: positions of an axis from which a transform
    has half that rate. ``copies``: bytes of cutting, ordering and putting back. ``products``: operations of a large
    complex matrix product, of which each costs ``matrix`` seconds besides. ``pointwise``: bytes of products channel by
    channel. ``new``: bytes of memory that is cleared by the system, which the library's own is beyond ``kept`` bytes.
    ``threads``: transforms at a time. ``call``: seconds for a call of torch; ``start``: for any problem.
    """

    transforms: float
    back: float
    longest: float
    copies: float
    products: float
    matrix: float
    pointwise: float
    new: float
    kept: int
    threads: int
    call: float
    start: float


def _operations(tile: tuple[int, ...], rates: Rates) -> float:
    """Of one transform, as many as take its time at the full rate. Measured: 10 to 50 positions that are no power of
    two take 1.5 to 2 times as long as 16, 32 and 64, short ones longer for their calls, and very long ones leave the
    cache; with one axis less is moved between the steps."""
    steps = sum(
        log2(max(2, size)) * (1 + 8 / size) * (1.0 if size & (size - 1) == 0 else 1.5 if size < 64 else 1.15)
        for size in tile
    )  # fmt: skip
    return 2.5 * prod(tile) * steps * (1 + max(tile) / rates.longest) * (0.8 if len(tile) == 1 else 1.0)


def seconds(form: Form, rates: Rates) -> float:
    """Predicted time of a call."""
    problem, size = form.problem, form.size
    wide = size / 4
    there, back = form.transforms
    each, rate = _operations(form.tile, rates) * wide, rates.transforms
    slower = rates.back if problem.rank > 1 else 1.0
    filters = problem.groups * form.ins * form.outs
    images = there - filters if not form.wgrad else there
    # The rows of few transforms leave threads without work.
    idle = max(1.0, rates.threads / max(1, min(form.image_rows, form.rows_of(form.image_rows))))
    idle_filters = max(1.0, rates.threads / max(1, min(form.filter_rows, form.rows_of(form.filter_rows))))
    behind = filters if form.wgrad else 0
    total = each / rate * ((images + (0 if form.wgrad else back) * slower) * idle)
    total += each / rate * (behind * slower if form.wgrad else filters) * idle_filters
    spectrum = 2 * form.frequencies * size
    copied = (there + back) * 2 * form.positions * size
    if not form.pointwise:
        copied += (there + back) * 2 * spectrum
    total += copied / rates.copies
    blocks, chunks = form.block_count, form.chunk_count
    if form.pointwise:
        total += form.work * 6 * size / rates.pointwise
        calls = form.together if form.wgrad and not form.in_place else form.ins + form.wgrad
    else:
        # Filters are read again for each chunk, of which products with few columns make little.
        total += 8 * form.work * wide / rates.products * (1 + 2 / max(1, form.together if not form.wgrad else form.ins))
        total += blocks * chunks * form.filter_rows * spectrum / (2 * rates.copies)
        total += blocks * chunks * form.frequencies * form.knobs.groups * rates.matrix
        parts = (form.image_rows, form.result_rows, form.filter_rows)
        calls = 2 * sum(-(-rows // form.rows_of(rows)) for rows in parts)
    # Tiles at both ends of an axis are cut apart from those between, and zeros put around.
    pieces = 2 * prod(min(3, count) for count in form.grid) + prod(min(2, count) for count in form.grid)
    total += rates.start + rates.call * (blocks * (6 + chunks * (4 + pieces + calls)))
    if form.reserve > rates.kept:
        total += form.reserve / rates.new
    return total


# -- choosing ---------------------------------------------------------------------------------------------------------


def _sizes(extent: int, reach: int, stride: int, most: int) -> list[int]:
    """Sizes of tiles along an axis, the largest first: whole axes in 1, 2, 3 and more parts, as far as a part holds a
    quarter of the filter."""
    found: list[int] = []
    parts = 1
    while len(found) < most:
        valid = -(-extent // parts)
        valid = -(-valid // stride) * stride
        if found and valid < max(reach // 4, stride, 4):
            break
        size = good_size(valid + reach)
        if size <= _MOST and size not in found:
            found.append(size)
        if valid <= stride:
            break
        parts = parts + 1 if parts < 4 else parts * 3 // 2 if parts < 12 else parts * 2
    return found or [good_size(stride + reach)]


def _tiles(problem: Problem, rates: Rates) -> list[tuple[int, ...]]:
    """Tiles by what transforms and products of one image take, the best first."""
    reach, extents = reach_of(problem), extents_of(problem)
    most = {1: 24, 2: 9, 3: 4}[problem.rank]
    axes = [_sizes(e, r, s, most) for e, r, s in zip(extents, reach, problem.stride, strict=True)]
    filters = prod(problem.w_shape[:2])
    scored = []
    for tile in product(*axes):
        grid = prod(
            -(-e // ((size - r) // s * s)) for e, size, r, s in zip(extents, tile, reach, problem.stride, strict=True)
        )
        positions, tiles = prod(tile), problem.n * grid
        rows = tiles * (problem.c + problem.k) + filters
        each = _operations(tile, rates) / rates.transforms
        each += 24 * positions / rates.copies
        scored.append((rows * each + 4 * filters * tiles * positions / rates.products, tile))
    scored.sort()
    return [tile for _, tile in scored]


def _fitted(problem: Problem, tile: tuple[int, ...], how: str, chunk: int, budget: int, cuda: bool) -> FftKnobs:
    """Blocks of about ``chunk`` bytes of spectra, within the budget if that can be."""
    alone = problem.n == 1
    form = Form(problem, FftKnobs(tile, how, 1, 1, 1, 1, 1, alone))
    spectrum = 2 * form.frequencies * form.size
    grid = prod(form.grid)
    channels = form.outs
    groups = min(problem.groups, max(1, chunk // (spectrum * (form.ins * (grid + form.outs) + form.outs * grid))))
    tiles = max(1, chunk // (spectrum * groups * (form.ins + channels)))
    images = min(problem.n, max(1, tiles // grid))
    tiles = min(tiles, grid)
    if groups == 1:
        channels = max(1, min(channels, budget // 2 // (form.ins * spectrum)))
    rows = max(1, (chunk if cuda else min(chunk, 4 << 20)) // spectrum)
    knobs = FftKnobs(tile, how, groups, channels, images, tiles, rows, alone)
    while Form(problem, knobs, cuda=cuda).bytes > budget:
        if knobs.rows > 1 and not Form(problem, knobs).pointwise and knobs.rows * spectrum > budget // 8:
            knobs = replace(knobs, rows=knobs.rows // 2)
        elif knobs.groups > 1:
            knobs = replace(knobs, groups=knobs.groups // 2)
        elif knobs.images > 1:
            knobs = replace(knobs, images=knobs.images // 2)
        elif knobs.tiles > 1:
            knobs = replace(knobs, tiles=knobs.tiles // 2)
        elif knobs.channels > 1:
            knobs = replace(knobs, channels=knobs.channels // 2)
        else:
            break
    return knobs


_CHUNKS = (4 << 20, 16 << 20, 64 << 20)


def _products(problem: Problem) -> tuple[str, ...]:
    """The ways to multiply that may be the best."""
    pairs = problem.c // problem.groups * (problem.k // problem.groups)
    return ("pointwise",) if pairs == 1 else ("matrix", "pointwise") if pairs <= 64 else ("matrix",)


def _best(
    problem: Problem, tiles: list[tuple[int, ...]], rates: Rates, budget: int, chunks: tuple[int, ...], cuda: bool
) -> FftKnobs | None:
    """The quickest within a budget; None if there is none."""
    best: tuple[float, FftKnobs] | None = None
    for tile, how, chunk in product(tiles, _products(problem), chunks):
        knobs = _fitted(problem, tile, how, chunk, budget, cuda)
        form = Form(problem, knobs, cuda=cuda)
        if form.bytes <= budget:
            took = seconds(form, rates)
            if best is None or took < best[0]:
                best = took, knobs
    return best[1] if best else None


@lru_cache(maxsize=4096)
def _default(problem: Problem, rates: Rates, budget: int, chunks: tuple[int, ...], cuda: bool) -> FftKnobs:
    tiles = _tiles(problem, rates)
    found = _best(problem, tiles[:4], rates, budget, chunks, cuda)
    found = found or _best(problem, tiles, rates, budget, chunks[:1], cuda)
    return found or _fitted(problem, min(tiles, key=prod), _products(problem)[0], chunks[0], budget, cuda)


def knobs_for(
    problem: Problem, rates: Rates, budgets: tuple[int, ...], chunks: tuple[int, ...] = _CHUNKS, *, cuda: bool = False
) -> Iterator[FftKnobs]:
    """The quickest by prediction within the first budget; what it is for one image by itself; then other tiles, other
    ways to multiply, and what needs less and less memory."""
    wide = "f64" if problem.dtypes[0] == "f64" else "f32"
    # Of problems that differ in nothing that counts here, one is worked out.
    problem = problem.with_(dtypes=(wide,) * 3, layouts=("nchw",) * 3, epilogue="", prologue="", stats=False)
    default = _default(problem, rates, budgets[0], chunks, cuda)
    yield default
    same = default, replace(default, alone=False) if default.alone else default
    yield from (knobs for knobs in _others(problem, rates, budgets, chunks, cuda) if knobs not in same)


@lru_cache(maxsize=1024)
def _others(
    problem: Problem, rates: Rates, budgets: tuple[int, ...], chunks: tuple[int, ...], cuda: bool
) -> tuple[FftKnobs, ...]:
    """All knobs but the default."""
    found: list[FftKnobs | None] = [_default(problem.with_(n=1), rates, budgets[0], chunks, cuda)]
    tiles = _tiles(problem, rates)
    for tile in tiles[:3]:
        best = _best(problem, [tile], rates, budgets[0], chunks, cuda)
        found += [best and replace(best, product=how, alone=False) for how in _products(problem)]
    smaller = sorted(tiles, key=prod)[:3]
    for budget in budgets[1:]:
        best = _best(problem, tiles[:2], rates, budget, (budget // 4,), cuda)
        found.append(_shared(best or _best(problem, smaller, rates, budget, (budget // 4,), cuda)))
    least = [_fitted(problem, smaller[0], how, 1, 1, cuda) for how in _products(problem)]
    found.append(_shared(min(least, key=lambda knobs: Form(problem, knobs, cuda=cuda).bytes)))
    return tuple(dict.fromkeys(knobs for knobs in found if knobs))


def _shared(knobs: FftKnobs | None) -> FftKnobs | None:
    """One set of knobs alone promises the same bits whatever the batch: the default of a single image."""
    return replace(knobs, alone=False) if knobs else None
