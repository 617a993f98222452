"""openconv itself in another dtype: what a shorter one costs or saves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...plan import device_of
from ...problem import Problem
from ...reference import Inputs
from ...tensors import DTYPES
from ..calls import call_of
from .base import Peer, Prepared, first_unmet, same_dtype

__all__ = ["InF32"]


class InF32(Peer):
    """What openconv chooses for the same problem in f32, with tensors that are converted beforehand. In one race with
    the problem itself: from one race to the next the speed of a machine may change by more than low precision costs."""

    name = "in_f32"
    usual = False

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        low = problem.dtypes[0] in ("f16", "bf16")
        return first_unmet((
            same_dtype(problem), (low, f"dtype is {problem.dtypes[0]}; f16 and bf16 are compared with f32"),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        wide, device = problem.with_(dtypes="f32"), device_of(sets[0].a.device)
        floats = [Inputs(each.a.float(), each.b.float(), tuple(o.float() for o in each.operands)) for each in sets]
        calls = tuple(call_of(wide, each, device, None) for each in floats)
        return Prepared(calls, result=lambda made: made.to(DTYPES[problem.result_dtype]))
