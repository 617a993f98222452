"""Measure one problem: every engine that accepts it and every peer that takes it, verified, then timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..device import Device
from ..plan import lower, plan_for
from ..problem import Problem
from ..select import Policy, rank
from ..tensors import DTYPES, to_layout
from .peers import PEERS, Peer
from .results import Record, environment
from .timing import race

__all__ = ["inputs", "measure", "reference", "verify"]

_NAIVE_LIMIT = 30_000_000  # products beyond which timing the definition takes longer than everything else


def inputs(problem: Problem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random inputs of the pass, in the problem's layouts."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [problem.x_shape, problem.w_shape, problem.y_shape]
    made = [to_layout(torch.randn(shape, generator=generator).to(DTYPES[dtype]), layout)
            for shape, dtype, layout in zip(shapes, problem.dtypes, problem.layouts, strict=True)]  # fmt: skip
    x, w, y = made
    return {"fprop": (x, w), "dgrad": (y, w), "wgrad": (x, y)}[problem.direction]


def reference(problem: Problem, a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """The result in float64 by torch, and the mean size of the sums' terms, sum(|x|*|w|), to measure errors against."""
    return _float64(problem, a, b), float(_float64(problem, a.abs(), b.abs()).mean())


def _float64(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    padding = [low for low, _ in problem.padding]
    rest = (problem.stride, padding, problem.dilation, False, [0] * problem.rank, problem.groups)
    if any(low != high for low, high in problem.padding):
        raise ValueError(f"padding is {problem.padding}; the benchmark verifies symmetric padding only")
    if problem.direction == "fprop":
        return torch.convolution(a, b, None, *rest)
    x = torch.zeros(problem.x_shape, dtype=torch.float64)
    w = torch.zeros(problem.w_shape, dtype=torch.float64)
    backward = torch.ops.aten.convolution_backward.default
    if problem.direction == "dgrad":
        return backward(a, x, b, None, *rest, [True, False, False])[0]
    return backward(b, a, w, None, *rest, [False, True, False])[1]


def verify(problem: Problem, got: Tensor, wanted: Tensor, scale: float) -> tuple[float, bool]:
    """The largest error as a share of the terms' size, and whether it is within what the types allow."""
    error = float((got.double() - wanted).abs().max()) / max(scale, 1e-300)
    eps = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}.get(got.dtype, 2.0**-8)
    return error, error <= eps * (8 + 0.5 * problem.gemm.k**0.5) * 4


def measure(
    suite: str, label: str, problem: Problem, device: Device, *, engines: Sequence[str] = (),
    peers: Sequence[Peer] = PEERS, budget: float = 1.0,
) -> Record:  # fmt: skip
    """Verify and time. An engine with a wrong result is named in ``wrong`` and not timed."""
    with torch.no_grad():
        a, b = inputs(problem)
        accepted, _ = rank(lower(problem, device), device, Policy())
        candidates = [c for c in accepted if not engines or c.engine.name in engines]
        if problem.macs > _NAIVE_LIMIT:
            candidates = [c for c in candidates if c.engine.name != "cpu.naive"]
        wanted, scale = reference(problem, a, b)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        wrong: list[str] = []
        for candidate in candidates:
            name = candidate.engine.name
            call = _call(problem, a, b, name, device)
            errors[name], good = verify(problem, call(), wanted, scale)
            if good:
                calls[name] = call
            else:
                wrong.append(name)
        del wanted
        for peer in peers:
            if peer.refusal(problem) is None:
                calls[peer.name] = peer.prepare(problem, a, b)
        timings = race(list(calls.values()), budget=budget * len(calls))
        return Record(
            suite=suite, label=label, problem=str(problem), chosen=accepted[0].engine.name,
            seconds={name: asdict(timing) for name, timing in zip(calls, timings, strict=True)},
            predicted={c.engine.name: c.cost for c in candidates}, error=errors, wrong=wrong,
            machine=environment(device),
        )  # fmt: skip


def _call(problem: Problem, a: Tensor, b: Tensor, engine: str, device: Device) -> Callable[[], Any]:
    """What a user would call: the function for a forward pass, the plan itself for the others."""
    if problem.direction == "fprop" and all(low == high for low, high in problem.padding):
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[problem.rank - 1]
        padding = tuple(low for low, _ in problem.padding)
        return lambda: function(a, b, None, problem.stride, padding, problem.dilation, problem.groups, engine=engine)
    plan = plan_for(problem, device, Policy(engine=engine))
    return lambda: plan(a, b)


