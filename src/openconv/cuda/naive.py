"""cuda.naive: the definition, one thread for each result."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..problem import Problem
from ..tensors import DTYPES, empty
from . import jit, render
from .device import CudaDevice
from .launch import Launch, pack, single

__all__ = ["Naive"]

_KNOWN = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8")
_PASS = {"fprop": 0, "dgrad": 1, "wgrad": 2}
_THREADS = 256
_META = torch.device("meta")


class Naive(Engine):
    """The definition written down: one thread sums the products of one result, one after the other.

    It takes every problem in every layout, needs no workspace and reads each input once for every product that it is
    in, through the caches. Rows of products are summed in f32, and rows in f64. It wins where a problem is too small to
    fill the GPU; otherwise it is what the other engines are compared with.
    """

    name = "cuda.naive"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        unknown = [name for name in problem.dtypes if name not in _KNOWN]
        if unknown:
            yield f"dtype is {unknown[0]}; wanted {', '.join(_KNOWN)}, or one that is taken apart into these"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        row = problem.out[-1] if problem.direction == "wgrad" else problem.filter[-1]
        eps = problem.gemm.k * 2.0**-53 if problem.result_dtype == "f64" else None
        if eps is None:
            eps = 0.0 if problem.result_dtype[0] in "iu" else (row + 2) * 2.0**-24
        return Traits(accumulator="f64" if eps else "i64", error_bound=eps)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        # Measured on an H200: picoseconds for each product, more where the rows that it adds up are short; dgrad tries
        # every tap, also those that its stride passes over. A thread alone waits for
        # each product, less where the next one lies beside it.
        results = prod(problem.result_shape)
        beside = problem.direction == "wgrad" and problem.layouts[0] == "nchw"
        alone = problem.macs / results * (60e-9 if beside else 180e-9)
        if problem.direction == "wgrad":
            each = 0.7 + 56 / problem.out[-1]
        else:
            each = 2.0 + 3.6 / problem.filter[-1]
        if problem.direction == "dgrad":
            each *= 1.3 * problem.stride[-1]
        each *= 51e12 / device.flops
        return 3e-6 + max(alone, problem.macs * each * 1e-12, problem.min_bytes / device.bandwidth)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        assert isinstance(device, CudaDevice)
        launch = Launch(source(problem), "naive", device, (-(-prod(problem.result_shape) // _THREADS),), (_THREADS,),
                        _params(problem))  # fmt: skip
        return single(launch, 1)

    def sources(self, problem: Problem, device: Device, knobs: Any) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        return [source(problem)]


def source(problem: Problem) -> jit.Source:
    last = problem.layouts[problem.result] == "nhwc"
    return jit.Source("naive.cu", render.traits(problem, {"pass": _PASS[problem.direction], "channels_last": last}))


def _params(problem: Problem) -> bytes:
    """The struct of naive.cu."""
    order = {"fprop": (0, 1, 2), "dgrad": (2, 1, 0), "wgrad": (0, 2, 1)}[problem.direction]
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    strides = [v for at in order for v in _strides(shapes[at], problem.layouts[at])]
    lead = 3 - problem.rank
    sizes = [
        problem.n, problem.c, problem.k, problem.groups,
        *_three(problem.spatial), *_three(problem.filter), *_three(problem.out), *_three(problem.stride),
        *(0,) * lead, *(low for low, _ in problem.padding), *_three(problem.dilation),
    ]  # fmt: skip
    return pack(3 + max(1, len(problem.epilogue.operands)), strides, sizes)


def _three(values: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (3 - len(values)) + values


def _strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Of batch, channel and three axes of space; those that are not there have none."""
    found = tuple(empty(shape, DTYPES["u8"], layout, _META).stride())
    return (*found[:2], *(0,) * (5 - len(found)), *found[2:])
