"""The trace of ``cuda.naive``: a thread sums one result, product by product."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from ..cuda import naive
from ..cuda.device import CudaDevice
from ..problem import Problem
from .model import Block, Launch, Move, Owner, Step, Trace, Walk, axis_list, names, one, result_axes, whole

__all__ = ["trace"]

_MOST_STEPS = 160  # of a block; with more, a step is a row of products


def trace(problem: Problem, device: CudaDevice, knobs: Any) -> Trace:
    """Blocks of 256 threads over the results in the order of memory; every product asks for its own two factors."""
    threads = naive._THREADS
    order = result_axes(problem, problem.layouts[problem.result] == "nhwc")
    results = prod(problem.result_shape)
    grid = ceil(results / threads)
    steps = tuple(_steps(problem))
    blocks = tuple(
        Block(0, (at,), (Walk(order, at * threads, (at + 1) * threads),), steps, "xwy"[problem.result])
        for at in range(grid)
    )
    launch = Launch(
        "naive",
        "src/openconv/cuda/kernels/naive.cu",
        "each thread sums the products of one result",
        (grid,),
        (threads,),
        owner=Owner("thread", ((0, 1, 1),)),
    )
    return Trace(problem, "cuda.naive", str(knobs), (launch,), blocks)


def _steps(problem: Problem) -> list[Step]:
    known = names(problem)
    c, k = problem.c // problem.groups, problem.k // problem.groups
    letters, sizes = {
        "fprop": (("c", *known.taps), (c, *problem.filter)),
        "dgrad": (("k", *known.taps), (k, *problem.filter)),
        "wgrad": (("n", *known.out), (problem.n, *problem.out)),
    }[problem.direction]
    axes = axis_list(letters, sizes)
    # A row, the last variable, is what the kernel sums in the narrower type.
    rows = prod(sizes) > _MOST_STEPS
    count = prod(sizes[:-1]) if rows else prod(sizes)
    tensors = ["xwy"[at] for at in problem.inputs]
    found = []
    for at in range(count):
        rest, fixed = at, []
        for axis in reversed(axes[:-1] if rows else axes):
            rest, value = divmod(rest, axis.count)
            fixed.append(one(axis.name, value))
        terms = (*reversed(fixed), *((whole(axes[-1:]),) if rows else ()))
        where = ", ".join(f"{walk.axes[0].name} = {walk.axes[0].start}" for walk in terms if len(walk) == 1)
        what, it = ("a row of products", "them") if rows else ("its next product", "it")
        text = f"Each thread asks for the factors of {what} ({where}) and adds {it}."
        # A fprop multiplies padding as zeros, so it asks for the filter there; gradients skip what they do not meet.
        skips = problem.direction != "fprop"
        loads = tuple(Move(tensor, terms, (0,), met="xwy" if skips else "") for tensor in tensors)
        stores = (Move("xwy"[problem.result], (), (0,)),) if at == count - 1 else ()
        found.append(Step(text, loads, terms, stores))
    return found
