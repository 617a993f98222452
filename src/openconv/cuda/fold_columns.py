"""cuda.fold_columns: columns of an image of few channels as channels, and columns of its result likewise.

With f results of a row as one, whose windows begin s apart, g = f * s columns of x are one too:

    x'[h, w, (i, c)] = x[h, g*w + i, c]        y'[p, q, (j, k)] = y[p, f*q + j, k]        the same memory

Result (j, k) meets tap t of the filter at column j*s + t*d - pad of its group: column i of group u, where g*u + i is
that. So y' is the convolution of x' with a filter w'[(j, k), u, (i, c)] that has w[k, t, c] there, and zeros elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from ..device import Device
from ..engine import Traits
from ..problem import DTYPE_BYTES, Problem
from ..rewrites.base import Rewritten
from .copied import Copied, Move, Moves
from .folded import Folded, Repeated

__all__ = ["FoldColumns"]

_MOST = 16  # channels, beyond which boxes and products are filled well enough as they are
_MOST_FOLDED = 256  # of either side once folded: more would be products with zeros alone
_MOST_FILTER = 64 << 20  # bytes of the spread filter
_PRODUCTS = 2048  # of a multiprocessor of sm_90 in a cycle
_ASKING = 235 / 256  # cycles for each of 256 pixels that a step takes at the least
_BROUGHT = 62  # bytes in a cycle
_MULTIPLIED = ("f16", "bf16", "e4m3", "e5m2", "i8")  # by tensor cores, and f32 as tf32


class FoldColumns(Copied):
    """Few channels as many: columns of a row side by side are one with all of their channels.

        x[h, g*w + i, c] = x'[h, w, (i, c)],  y[p, f*q + j, k] = y'[p, q, (j, k)],  where channels are last

    Nothing of x and y is copied. The filter is spread over g * C by f * K channels with zeros between, and a filter
    gradient is gathered from there. That multiplies by zeros: 3 to 7 products for each one that counts. But boxes of 48
    bytes take as long to come as those of 6, and tensor cores as long for 24 channels as for 3. Wins with 2 to 16
    channels on axes that no engine for few channels has, as in video. A zero times an infinity is NaN, so that columns
    of a group share what is not finite, and strict accuracy leaves this out.
    """

    name = "cuda.fold_columns"
    device = "cuda"
    takes_epilogue = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.c > _MOST:
            yield f"C is {problem.c}; wanted at most {_MOST}"
            return
        if problem.groups > 1:
            yield f"groups is {problem.groups}; wanted 1"
            return
        dtype = problem.dtypes[0]
        if dtype not in _MULTIPLIED and (dtype != "f32" or problem.precision == "ieee"):
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted what tensor cores multiply"
        if problem.direction == "wgrad" and problem.dtypes[1] not in ("f16", "bf16", "f32"):
            yield f"dtype of dw is {problem.dtypes[1]}; sums are gathered as f16, bf16 or f32"
        if problem.is_empty:
            yield "a tensor is empty"
            return
        for at, name in ((0, "x"), (2, "y")):
            if problem.layouts[at] != "nhwc":
                yield f"layout of {name} is {problem.layouts[at]}; columns lie side by side in nhwc"
                return
        if not _ways(problem):
            width, out, stride = problem.spatial[-1], problem.out[-1], problem.stride[-1]
            yield (
                f"rows have {width} columns and {out} results, {stride} apart; wanted whole groups of both, "
                f"with multiples of {_unit(problem)} channels, and windows that reach the end of a row"
            )

    def ways(self, problem: Problem, device: Device) -> tuple[int, ...]:
        return _ways(problem)

    def traits(self, problem: Problem, knobs: Rewritten) -> Traits:
        return replace(super().traits(problem, knobs), plain_sum=False)

    def inside(self, problem: Problem, way: int | None = None) -> Problem:
        return _inside(problem, way or _ways(problem)[0])

    def moves(self, problem: Problem, way: int | None = None) -> Moves:
        return _moves(problem, way or _ways(problem)[0])

    def seen(self, tensor: Tensor, at: int, problem: Problem, way: int) -> Tensor:
        if at == 1:
            return tensor
        columns = way * problem.stride[-1] if at == 0 else way
        last = tensor.movedim(1, -1)
        folded = last.view(*last.shape[:-2], last.shape[-2] // columns, columns * last.shape[-1])
        return folded.movedim(-1, 1)

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        inner = _inside(problem, knobs.way)
        columns = knobs.way * problem.stride[-1]
        return f"{columns} columns of x and {knobs.way} of y as one, {inner.c} by {inner.k} channels"


class _Fold(NamedTuple):
    """Columns of x in a group, where its first tap begins in the first group that it meets, how many groups that lies
    before, the taps of the spread filter, and the padding behind."""

    columns: int
    shift: int
    before: int
    taps: int
    behind: int


def _fold(problem: Problem, way: int) -> _Fold:
    stride, gap, pad = problem.stride[-1], problem.dilation[-1], problem.padding[-1][0]
    columns = way * stride
    before = -(-pad // columns)
    shift = before * columns - pad
    last = ((way - 1) * stride + (problem.filter[-1] - 1) * gap + shift) // columns
    behind = problem.out[-1] // way + last - before - problem.spatial[-1] // columns
    return _Fold(columns, shift, before, last + 1, behind)


def _unit(problem: Problem) -> int:
    return 16 // min(2, DTYPE_BYTES[problem.dtypes[0]])


@lru_cache(maxsize=512)
def _ways(problem: Problem) -> tuple[int, ...]:
    """Results that may be one, those that take least first."""
    width, out, stride, unit = problem.spatial[-1], problem.out[-1], problem.stride[-1], _unit(problem)
    found = []
    for way in range(1, min(width // stride, out) + 1):
        fold = _fold(problem, way)
        c, k = fold.columns * problem.c, way * problem.k
        if c > _MOST_FOLDED or k > max(_MOST_FOLDED, 8 * problem.k):
            break
        if fold.columns == 1 or width % fold.columns or out % way or c % unit or k % unit or fold.behind < 0:
            continue
        if c * k * prod(problem.filter[:-1]) * fold.taps * 4 <= _MOST_FILTER:
            found.append((_cycles(problem, way), way))
    return tuple(way for _, way in sorted(found))


def _cycles(problem: Problem, way: int) -> float:
    """Of a tap for each result of a row, roughly: the products, or what brings them their factors."""
    fold, size = _fold(problem, way), DTYPE_BYTES[problem.dtypes[0]]
    c, k = fold.columns * problem.c, way * problem.k
    depth, across = (k, c) if problem.direction == "dgrad" else (c, k)
    boxes = -(-depth * size // 128) * 128  # bytes, filled up with zeros
    wide = max(across, 32 + across // 2)  # narrow products take what their rows take to be read
    return fold.taps * max(1.1 * boxes / 2 * wide / _PRODUCTS, _ASKING, boxes / _BROUGHT) / way


@lru_cache(maxsize=512)
def _inside(problem: Problem, way: int) -> Problem:
    fold, dtypes, width = _fold(problem, way), list(problem.dtypes), problem.spatial[-1]
    if problem.direction == "wgrad":
        dtypes[1] = "f32"  # summed up once more
    return problem.with_(
        c=fold.columns * problem.c, k=way * problem.k, spatial=(*problem.spatial[:-1], width // fold.columns),
        filter=(*problem.filter[:-1], fold.taps), padding=(*problem.padding[:-1], (fold.before, fold.behind)),
        stride=(*problem.stride[:-1], 1), dilation=(*problem.dilation[:-1], 1), dtypes=tuple(dtypes), layouts="nhwc",
    )  # fmt: skip


@lru_cache(maxsize=512)
def _moves(problem: Problem, way: int) -> Moves:
    inner, fold, back = _inside(problem, way), _fold(problem, way), problem.direction == "wgrad"
    copy = Folded(
        problem.k, problem.c, prod(problem.filter[:-1]), problem.filter[-1], problem.layouts[1], way, fold.columns,
        fold.taps, problem.stride[-1], problem.dilation[-1], fold.shift, problem.dtypes[1], back,
    )  # fmt: skip
    if back:
        return Moves((), Move(copy, (-1,), (f"gather dw of {inner.k}x{inner.c} channels",)))
    there = [Move(copy, (1,), (f"spread w over {inner.k}x{inner.c} channels",))]
    times = inner.result_channels // problem.result_channels
    for at, operand in enumerate(problem.epilogue.operands, 2):
        if operand.kind == "channel" and times > 1:
            repeated = Repeated(problem.result_channels, times, DTYPE_BYTES[problem.result_dtype])
            there.append(Move(repeated, (at,), (f"copy {operand.name} {times} times",)))
    return Moves(tuple(there), None)
