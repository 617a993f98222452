"""cuda.depthwise: each channel by itself, without a matrix product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..problem import Problem
from . import depthwise_nhwc, jit

__all__ = ["Depthwise"]


class Depthwise(Engine):
    """One filter for each channel: sums in registers over a window that slides along the image.

        fprop   y[n,c,p,q]  = sum over r,s of  x[n, c, p*stride - pad + r*dilation, ...] * w[c,r,s]
        dgrad   dx[n,c,h,w] = sum over r,s of  dy[n, c, (h + pad - r*dilation) / stride, ...] * w[c,r,s]
        wgrad   dw[c,r,s]   = sum over n,p,q of  x[n, c, p*stride - pad + r*dilation, ...] * dy[n,c,p,q]

    There are only R*S products for each value that is read: a matrix product would waste most of its work, while memory
    and the instructions around each product decide. Both are spent once for each value: a thread keeps its filters and
    sums in registers, loads each input row of its strip once and converts it to f32 once. Images in nhwc run in vectors
    of channels, those in nchw and of one axis in vectors of pixels: one module for each.

    Wins on every depthwise layer; it takes no other.
    """

    name = "cuda.depthwise"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        return _half(problem).refusals(problem, device)

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        return _half(problem).traits(problem, knobs)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        return _half(problem).workspace_bytes(problem, device, knobs)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Any]:
        return _half(problem).knobs(problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        return _half(problem).cost(problem, device, knobs)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        return _half(problem).build(problem, device, knobs)

    def sources(self, problem: Problem, device: Device, knobs: Any) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        return _half(problem).sources(problem, device, knobs)


def _half(problem: Problem) -> ModuleType:
    """The module for the layout of the images."""
    if problem.rank > 1 and problem.layouts[0] == "nhwc":
        return depthwise_nhwc
    from . import depthwise_nchw

    return depthwise_nchw
