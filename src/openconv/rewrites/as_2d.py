"""cpu.as_2d, cuda.as_2d: convolutions of one or three axes as those of two, without a copy."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..device import Device
from ..engine import Engine
from ..problem import Problem
from .base import Part, Rewrite, Rewritten, refuses

__all__ = ["As2d", "CpuAs2d", "CudaAs2d"]


class As2d(Rewrite):
    """The same memory read with two axes, for engines that know no other number.

        1D   (N, C, W) is (N, C, 1, W)
        3D   an axis of one pixel is left out;
             two axes that the filter does not reach along, as H and W for Tx1x1, are one;
             frames that a 1xRxS filter takes one by one are images of a batch, where channels are last

    Nothing is copied, so that it costs a call more than the engine inside; it is only for those that refuse the problem
    as it is.
    """

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank == 2:
            yield "rank is 2; wanted another"
        elif _how(problem) is None:
            yield f"filter is {problem.filter} on {problem.spatial}; wanted an axis of one, or one that it leaves alone"

    def wants(self, engine: Engine, problem: Problem, device: Device) -> bool:
        return refuses(engine, problem, device)

    def parts(self, problem: Problem, way: None) -> list[Part]:
        how, at = _how(problem) or ("", 0)
        fields = {name: list(getattr(problem, name)) for name in ("spatial", "filter", "stride", "padding", "dilation")}
        n = problem.n
        if how == "1d":
            for name, value in (("spatial", 1), ("filter", 1), ("stride", 1), ("padding", (0, 0)), ("dilation", 1)):
                fields[name].insert(0, value)
        else:
            if how == "merged":
                fields["spatial"][at + 1] *= fields["spatial"][at]
            elif how == "frames":
                n *= fields["spatial"][0]
            for values in fields.values():
                del values[at]
        return [Part(problem.with_(n=n, **{k: tuple(v) for k, v in fields.items()}), (None, None, None))]

    def view(self, tensor: Tensor, at: int, problem: Problem) -> Tensor:
        how, axis = _how(problem) or ("", 0)
        if how == "1d":
            return tensor.unsqueeze(2)
        if how == "unit" or at == 1:
            return tensor.squeeze(2 + axis)
        if how == "merged":
            return tensor.flatten(2 + axis, 3 + axis)
        return tensor.transpose(1, 2).flatten(0, 1)

    def tell(self, problem: Problem, knobs: Rewritten) -> str:
        how, at = _how(problem) or ("", 0)
        return {
            "1d": "as an image of one row",
            "unit": f"without axis {at}, which has one pixel",
            "merged": f"axes {at} and {at + 1} as one",
            "frames": f"{problem.spatial[0]} frames as images of a batch",
        }[how]


def _how(problem: Problem) -> tuple[str, int] | None:
    """How a problem has two axes: by which rule, and on which axis."""
    if problem.rank == 1:
        return "1d", 0
    loose = [taps == 1 and pad == (0, 0) for taps, pad in zip(problem.filter, problem.padding, strict=True)]
    for at in range(3):
        if loose[at] and problem.spatial[at] == 1:
            return "unit", at
    still = [free and stride == 1 for free, stride in zip(loose, problem.stride, strict=True)]
    for at in (1, 0):
        if still[at] and still[at + 1]:
            return "merged", at
    if still[0] and (problem.layouts[0], problem.layouts[2]) == ("nhwc", "nhwc"):
        return "frames", 0
    return None


class CpuAs2d(As2d):
    """On the CPU."""

    name = "cpu.as_2d"
    takes_bias = True


class CudaAs2d(As2d):
    """On a GPU, whose engines take signals as they are: for volumes."""

    name = "cuda.as_2d"
    device = "cuda"
    takes_epilogue = True

    def needs(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank == 1:
            yield "rank is 1; wanted 3: engines of a GPU know signals as well as images"
        else:
            yield from super().needs(problem, device)
