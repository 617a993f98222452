"""cuda.exchange: a filter gradient as a forward convolution in which batch and channels have changed places.

    dw[k, c, r] = sum over n, p of  x[n, c, p*stride - pad + r*dil] * dy[n, k, p]

is the forward convolution of a batch of C images of N channels, x, with K filters of P taps, dy: y[c, k, r]. Its steps
from result to result are the dilation, those from tap to tap the stride, and its padding is as much of the problem's as
its R results see.

Tensor cores of sm_90 take operands of four bytes only along the depth, as they lie in memory. The depth of a filter
gradient is images and pixels; that of the forward convolution is the channels last in memory, which the images now are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from ..device import Device
from ..engine import Traits
from ..problem import DTYPE_BYTES, Problem
from ..rewrites.base import Rewritten
from .copied import Copied, Move, Moves
from .exchanged import Exchanged, Matrices, exchanged, exchanged_back

__all__ = ["Exchange"]


class Exchange(Copied):
    """A filter gradient as a forward convolution whose channels are the images, and whose images are the channels.

        dw[k, c, r] = y[c, k, r]   of   x[c, n]  *  w[k, n] = dy[n, k]

    x and dy are copied with batch and channels exchanged, and so is the result. Wins in tf32 on sm_90, whose fastest
    products want the depth side by side, by what ``cuda.igemm_sm90`` is faster than ``cuda.igemm`` less three copies:
    with many channels on few pixels. Loses where the products are few, and where the batch is no multiple of 8 or the
    image larger than 128, which only engines take that would take the gradient as it is.
    """

    name = "cuda.exchange"
    device = "cuda"
    batches_alike = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.direction != "wgrad":
            yield f"the pass is {problem.direction}; wanted wgrad"
            return
        if set(problem.dtypes) != {"f32"}:
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted f32: others are multiplied across their depth"
            return
        if problem.precision == "ieee":
            yield f"precision is {problem.precision}; wanted tf32 or tf32x3: products are those of tensor cores"
            return
        if problem.groups != 1:
            yield f"groups are {problem.groups}; wanted 1: images of each group would want filters of their own"
            return
        if problem.is_empty:
            yield "a tensor is empty"
            return
        if min(_axis(problem, at)[0] for at in range(problem.rank)) < 1:
            yield f"padding is {problem.padding} on {problem.spatial}; wanted windows that see the image"
        elif (most := max(each.largest for each in _tensors(problem))) >= 2**31:
            yield f"rows, columns or tiles of a copy are {most}; wanted less than 2^31"

    def traits(self, problem: Problem, knobs: Rewritten) -> Traits:
        # Images are its depth: what it does for a batch of channels says nothing of them.
        return replace(super().traits(problem, knobs), batch_invariant=True)

    def cost(self, problem: Problem, device: Device, knobs: Rewritten) -> float:
        # 31 times of an H200 are 0.63 to 0.87 of what its parts are predicted to take.
        return 0.79 * super().cost(problem, device, knobs)

    def inside(self, problem: Problem, way: None = None) -> Problem:
        return _inside(problem)

    def moves(self, problem: Problem, way: None = None) -> Moves:
        x, dy, dw = _tensors(problem)
        size = DTYPE_BYTES[problem.dtypes[0]]
        told = tuple(f"copy {name} with batch and channels exchanged" for name in ("x", "dy"))
        back = Move(Exchanged((dw,), size), (-1,), ("copy dw with filters and channels exchanged",))
        return Moves((Move(Exchanged((x, dy), size), (0, 1), told),), back)

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        return f"as '{_inside(problem)}'"


def _axis(problem: Problem, at: int) -> tuple[int, tuple[int, int]]:
    """Places of x that windows touch along an axis, from the first on, and the padding around them: as much as there
    are results for. Further places would give further ones."""
    low = problem.padding[at][0]
    reach = (problem.filter[at] - 1) * problem.dilation[at] + (problem.out[at] - 1) * problem.stride[at] + 1
    size = min(problem.spatial[at], reach - low)
    return size, (low, reach - low - size)


@lru_cache(maxsize=512)
def _inside(problem: Problem) -> Problem:
    """The forward convolution. A row is an image of one: tensors of one axis have no channels last."""
    axes = [_axis(problem, at) for at in range(problem.rank)]
    lead = (1,) * (problem.rank == 1)
    sizes, padding = zip(*[(1, (0, 0)) for _ in lead], *axes, strict=True)
    return problem.with_(
        direction="fprop", n=problem.c, c=problem.n, spatial=sizes, filter=(*lead, *problem.out), padding=padding,
        stride=(*lead, *problem.dilation), dilation=(*lead, *problem.stride), layouts="nhwc",
    )  # fmt: skip


@lru_cache(maxsize=512)
def _tensors(problem: Problem) -> tuple[Matrices, Matrices, Matrices]:
    """How x, dy and dw are copied."""
    n, c, k, out = problem.n, problem.c, problem.k, problem.out
    kept = _inside(problem).spatial[-problem.rank :]
    x = exchanged(problem.layouts[0], n, c, problem.spatial, kept)
    dy = exchanged(problem.layouts[2], n, k, out, out)
    return x, dy, exchanged_back(problem.layouts[1], c, k, problem.filter)
