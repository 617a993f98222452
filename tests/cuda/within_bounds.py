"""Engines held to the error that they state: those that round a sum to f16 before the epilogue state more than one."""

from __future__ import annotations

import torch

from openconv.engine import Engine, Knobs
from openconv.problem import Problem
from openconv.reference import Reference, allowed_error, random_inputs
from openconv.tensors import DTYPES, empty
from tests.support import this_device


def check_bound(engine: Engine, problem: Problem, knobs: Knobs | None = None, seed: int = 0) -> torch.Tensor:
    """The result on random data, checked against float64 within the engine's own bound, over poisoned memory. Without
    knobs all of them are checked."""
    device = this_device()
    assert not list(engine.refusals(problem, device)), f"{problem}: {list(engine.refusals(problem, device))}"
    inputs = random_inputs(problem, seed)
    reference = Reference(problem, inputs)
    out = torch.empty(0)
    for chosen in [knobs] if knobs is not None else list(engine.knobs(problem, device)):
        assert engine.cost(problem, device, chosen) > 0
        dtype, layout = DTYPES[problem.result_dtype], problem.layouts[problem.result]
        out = empty(problem.result_shape, dtype, layout, torch.device("cpu")).fill_(float("nan"))
        size = engine.workspace_bytes(problem, device, chosen)
        workspace = torch.full((size,), 255, dtype=torch.uint8) if size else None
        engine.build(problem, device, chosen)(inputs.a, inputs.b, out, workspace, inputs.operands)
        error, allowed = reference.error(out), allowed_error(problem, engine.traits(problem, chosen))
        assert error <= allowed, f"{engine.name} [{chosen}] of '{problem}': error {error:.3g}, allowed {allowed:.3g}"
    return out
