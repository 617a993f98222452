"""cpu.fold_columns: the gradient of an image of few channels, several columns of it in one vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from ..device import Device
from ..engine import Traits
from ..epilogue import IDENTITY
from ..problem import Problem
from .base import Part, Piece, Rewrite, Rewritten, Span

__all__ = ["CpuFoldColumns"]

_MOST = 16  # channels of the folded image: a block of two vectors of AVX2, or one of AVX-512


class FoldColumns(Rewrite):
    """A stride of s along W: s neighbouring columns of x are one with s times as many channels.

        x[h, s*j + p, c] = x'[h, j, p*C + c]        the same memory, where channels are last

    A column s*j + p meets every s-th tap of the filter; the columns j meet all of them with a stride of 1, the filter
    spread over s times as many channels with zeros between. So the lanes of a vector, which are channels, are filled by
    an RGB image too: 6 of 8 instead of 3 in the dgrad of a first layer, for an eighth more of products with zeros.
    Those spread an infinity to columns beside its own, so that strict accuracy leaves this out. The other passes have
    filters in their lanes: where they were measured they took 1.03 to 1.7 times as long as cpu.direct.
    """

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.direction != "dgrad":
            yield f"direction is {problem.direction}; lanes are channels of x in dgrad alone"
            return
        stride, dilation = problem.stride[-1], problem.dilation[-1]
        if stride == 1 or problem.c * stride > _MOST:
            yield f"C is {problem.c} and the stride {stride}; wanted a stride and at most {_MOST} channels with it"
            return
        if set(problem.dtypes) not in ({"f32"}, {"f64"}):
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted f32 or f64 for all three"
        if problem.layouts[0] != "nhwc" or problem.layouts[2] != "nhwc":
            yield f"layout is {problem.layouts[0]}; columns lie side by side in nhwc"
        if problem.groups > 1 or dilation > 1:
            yield f"groups is {problem.groups} and dilation {dilation}; wanted 1"
        if problem.spatial[-1] % stride:
            yield f"W is {problem.spatial[-1]}; wanted a multiple of the stride, {stride}"
        if problem.filter[-1] < stride:
            yield f"S is {problem.filter[-1]}; wanted a tap for each of {stride} columns"
        elif _folded(problem)[2] < 0:
            yield f"padding is {problem.padding}; wanted windows that reach the end of a row"

    def traits(self, problem: Problem, knobs: Rewritten) -> Traits:
        return replace(super().traits(problem, knobs), plain_sum=False)

    def parts(self, problem: Problem, way: None) -> list[Part]:
        s, c, (low, taps, high) = problem.stride[-1], problem.c, _folded(problem)
        inner = problem.with_(
            c=s * c, spatial=(*problem.spatial[:-1], problem.spatial[-1] // s), stride=(*problem.stride[:-1], 1),
            filter=(*problem.filter[:-1], taps), padding=(*problem.padding[:-1], (low, high)), epilogue=IDENTITY,
        )  # fmt: skip
        before: tuple[Span, ...] = tuple((0, size, 1) for size in problem.filter[:-1])
        pieces, pad, all_taps = [], problem.padding[-1][0], problem.filter[-1]
        for p in range(s):
            first = (p + pad) % s  # the first tap that meets the columns s*j + p
            count = -(-(all_taps - first) // s)
            at = (first - pad) // s + low
            mine = ((0, problem.k, 1), (p * c, c, 1), *before, (at, count, 1))
            pieces.append(Piece(mine, ((0, problem.k, 1), (0, c, 1), *before, (first, count, s))))
        return [Part(inner, (None, tuple(pieces), None))]

    def view(self, tensor: Tensor, at: int, problem: Problem) -> Tensor:
        if at != 0:
            return tensor
        s, n = problem.stride[-1], len(tensor.shape)
        last = tensor.permute(0, *range(2, n), 1)
        folded = last.reshape(*last.shape[:-2], last.shape[-2] // s, s * last.shape[-1])
        return folded.permute(0, n - 1, *range(1, n - 1))

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        s = problem.stride[-1]
        return f"{s} columns as one of {s * problem.c} channels"


def _folded(problem: Problem) -> tuple[int, int, int]:
    """Padding before, taps and padding behind, along the folded axis."""
    s, taps, pad = problem.stride[-1], problem.filter[-1], problem.padding[-1][0]
    low = -(-pad // s)
    count = (taps - 1 - pad) // s + low + 1
    return low, count, problem.out[-1] - 1 + count - problem.spatial[-1] // s - low


class CpuFoldColumns(FoldColumns):
    """On the CPU."""

    name = "cpu.fold_columns"
