"""openconv as a user would call it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from .. import functional
from ..device import Device
from ..plan import plan_for
from ..problem import Problem
from ..reference import Inputs
from ..select import Policy, current_policy, under
from ..torch_ops import problem_of

__all__ = ["call_of"]


def call_of(problem: Problem, inputs: Inputs, device: Device, policy: Policy | None) -> Callable[[], Tensor]:
    """What a user would call, under a policy or that in force: the function for a plain forward pass, the plan itself
    for everything else, and where the function would see another problem, as in an nhwc image of one channel, which is
    nchw as well."""
    a, b = inputs.a, inputs.b
    symmetric = all(low == high for low, high in problem.padding)
    if problem.direction == "fprop" and symmetric and problem.epilogue.is_identity and _seen(a, b, problem):
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[problem.rank - 1]
        padding = tuple(low for low, _ in problem.padding)
        call = partial(function, a, b, None, problem.stride, padding, problem.dilation, problem.groups)
        return under(policy, call) if policy else call
    return partial(plan_for(problem, device, policy or current_policy()), a, b, inputs.operands)


def _seen(a: Tensor, b: Tensor, problem: Problem) -> bool:
    """Whether tensors and numbers alone lead to this problem."""
    return problem == problem_of(
        problem.direction, a, b, size=problem.spatial, filter=problem.filter, stride=problem.stride,
        padding=[v for pair in problem.padding for v in pair], dilation=problem.dilation, groups=problem.groups,
    )  # fmt: skip
