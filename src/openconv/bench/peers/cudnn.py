"""cuDNN through its own Python frontend: the whole problem as one graph, and the fastest of its plans.

The frontend is the package ``nvidia-cudnn-frontend``, whose module is ``cudnn``. A graph is lowered to the cuDNN
library that torch has loaded. Its plans come from all three heuristics (A, B and the fallbacks) and are built, run and
timed: at most 40 of them, and none is begun after 15 seconds, for the kernels of fused graphs are compiled, in about a
second each. The note says how many there were. The choice is kept for the process: the plan that was verified is the
plan that is timed.

TF32 is a matter of plans here: those on tensor cores carry a numerical note, and f32 problems that do not ask for TF32
bar them, as torch does. Plans that convert f32 inputs to something shorter are always barred.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...epilogue import Acc, Const, Expr, Node, Operand
from ...problem import Problem
from ...reference import Inputs
from ...tensors import DTYPES, empty
from ..timing import race_cuda
from .base import NotTaken, Peer, Prepared, first_line, first_unmet

__all__ = ["CuDNN"]

_TYPES = {"f16": "HALF", "bf16": "BFLOAT16", "f32": "FLOAT"}
_INPUTS = {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (0, 2)}
"""Which of x, w and y a pass reads."""

_MOST_PLANS = 40
_SEARCH_SECONDS = 15.0
_RACE_SECONDS = 0.3


class CuDNN(Peer):
    """The cuDNN frontend. Calls run on the stream that is current when they are prepared."""

    name = "cudnn"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        first, second = (problem.dtypes[at] for at in _INPUTS[problem.direction])
        known = all(dtype in _TYPES for dtype in problem.dtypes)
        return first_unmet((
            (device.type == "cuda", f"device is {device.type}; it runs on CUDA devices"),
            (find_spec("cudnn"), "nvidia-cudnn-frontend is not installed"),
            (not problem.is_empty, "there is nothing to multiply"),
            (known, f"dtypes are {', '.join(problem.dtypes)}; it is compared in {', '.join(_TYPES)}"),
            (first == second, f"dtypes of the inputs are {first} and {second}; cuDNN multiplies alike ones"),
            *_expressible(problem.epilogue.expr),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        try:
            import cudnn
        except (ImportError, OSError) as error:  # there, but not the libraries that it needs
            raise NotTaken(f"the module cudnn cannot be imported: {first_line(error)}") from error
        device = sets[0].a.device
        with torch.cuda.device(device):
            handle = _handle(torch.cuda.current_device())
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            try:
                graph = _Graph(problem, handle=handle)
                graph.plan(problem)
            except (RuntimeError, ValueError, cudnn.cudnnGraphNotSupportedError) as error:
                raise NotTaken(f"cuDNN {cudnn.backend_version()} has no plan: {first_line(error)}") from error
            key = problem, torch.cuda.current_device()
            if key not in _choices:
                _choices[key] = _fastest(graph, problem, sets[0])
            choice = _choices[key]
            graph.graph.build_plan_at_index(choice.plan)  # `execute` runs the plan that was built last
            workspace = _workspace(choice.size, device)
            return Prepared(tuple(_call(graph, problem, inputs, workspace) for inputs in sets), choice.note)


@cache
def _handle(device: int) -> Any:
    import cudnn

    return cudnn.create_handle()


# -- the graph ----------------------------------------------------------------------------------------------------


class _Graph:
    """A problem as a cuDNN graph, and which of the graph's tensors are whose."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        import cudnn

        wide = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            io_data_type=_type(problem.result_dtype), intermediate_data_type=wide, compute_data_type=wide, **options
        )
        shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
        first, second = _INPUTS[problem.direction]
        self.a, self.b = (
            self._tensor(name, _dims(shapes[at]), _layout(problem, at), problem.dtypes[at])
            for name, at in (("a", first), ("b", second))
        )
        self.constants: dict[int, Tensor] = {}
        self.operands: dict[str, Any] = {}
        self._problem = problem
        self._dims, self._layout = _dims(problem.result_shape), _layout(problem, problem.result)
        self._convolved = self._shaped(self._convolution(problem))
        self.result = self._value(problem.epilogue.expr)
        self.result.set_output(True).set_data_type(_type(problem.result_dtype))

    def plan(self, problem: Problem) -> None:
        """Ask the heuristics."""
        import cudnn

        self.graph.validate()
        self.graph.build_operation_graph()
        modes = cudnn.heur_mode
        self.graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
        notes = cudnn.numerical_note
        if problem.dtypes[_INPUTS[problem.direction][0]] == "f32":
            barred = [notes.DOWN_CONVERT_INPUTS] + [notes.TENSOR_CORE] * (problem.precision != "tf32")
            self.graph.deselect_numeric_notes(barred)

    def pack(self, inputs: Inputs) -> dict[int, Tensor]:
        """Values of all tensors but the result, by the numbers that the graph gave them."""
        given = zip((self.a, self.b, *self.operands.values()), (inputs.a, inputs.b, *inputs.operands), strict=True)
        return {**{tensor.get_uid(): value for tensor, value in given}, **self.constants}

    def _convolution(self, problem: Problem) -> Any:
        # One axis is convolved as the second of two; all lists are given, for their defaults are empty.
        one = problem.rank == 1
        geometry = {
            "pre_padding": [0] * one + [low for low, _ in problem.padding],
            "post_padding": [0] * one + [high for _, high in problem.padding],
            "stride": [1] * one + list(problem.stride),
            "dilation": [1] * one + list(problem.dilation),
        }
        if problem.direction == "fprop":
            return self.graph.conv_fprop(image=self.a, weight=self.b, **geometry)
        if problem.direction == "dgrad":
            return self.graph.conv_dgrad(loss=self.a, filter=self.b, **geometry)
        return self.graph.conv_wgrad(image=self.a, loss=self.b, **geometry)

    def _tensor(self, name: str, dims: list[int], layout: str, dtype: str) -> Any:
        return self.graph.tensor(name=name, dim=dims, stride=_strides(dims, layout), data_type=_type(dtype))

    def _shaped(self, tensor: Any) -> Any:
        """Sizes and layout stated: those of a dgrad and a wgrad do not follow, and the layout would be nhwc."""
        return tensor.set_dim(self._dims).set_stride(_strides(self._dims, self._layout))

    def _value(self, expr: Expr) -> Any:
        if isinstance(expr, Acc):
            return self._convolved
        if isinstance(expr, Const):
            return self._constant(expr.value)
        if isinstance(expr, Operand):
            return self._operand(expr)
        assert isinstance(expr, Node)
        return self._applied(expr.op, [self._value(arg) for arg in expr.args], expr.params)

    def _applied(self, op: str, args: list[Any], params: tuple[float, ...]) -> Any:
        if op == "hardswish":
            shifted = self._applied("add", [args[0], self._constant(3.0)], ())
            gate = self._applied("clamp", [shifted], (0.0, 6.0))
            return self._applied("mul", [self._applied("mul", [args[0], gate], ()), self._constant(1 / 6)], ())
        if op == "clamp":
            return self._clamped(args[0], *params)
        return self._shaped(_POINTWISE[op](self.graph, *args, *params))

    def _clamped(self, value: Any, low: float, high: float) -> Any:
        if low == 0 and high < inf:
            return self._shaped(self.graph.relu(input=value, lower_clip=low, upper_clip=high))
        if low > -inf:
            value = self._applied("max", [value, self._constant(low)], ())
        return self._applied("min", [value, self._constant(high)], ()) if high < inf else value

    def _operand(self, operand: Operand) -> Any:
        if operand.name not in self.operands:
            ones = [1] * len(self._dims)
            dims = {"tensor": self._dims, "channel": [1, self._dims[1], *ones[2:]], "scalar": ones}[operand.kind]
            dtype = self._problem.result_dtype
            self.operands[operand.name] = self._tensor(operand.name, dims, self._layout, dtype)
        return self.operands[operand.name]

    def _constant(self, value: float) -> Any:
        """A number, which cuDNN takes by value from the host."""
        import cudnn

        ones = [1] * len(self._dims)
        tensor = self.graph.tensor(dim=ones, stride=ones, data_type=cudnn.data_type.FLOAT, is_pass_by_value=True)
        self.constants[tensor.get_uid()] = torch.full(ones, value, dtype=torch.float32)
        return tensor


# How the frontend spells each operation. Its elu has no parameter.
_POINTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda g, a, b: g.add(a=a, b=b),
    "sub": lambda g, a, b: g.sub(a=a, b=b),
    "mul": lambda g, a, b: g.mul(a=a, b=b),
    "div": lambda g, a, b: g.div(a=a, b=b),
    "max": lambda g, a, b: g.max(input0=a, input1=b),
    "min": lambda g, a, b: g.min(input0=a, input1=b),
    "neg": lambda g, a: g.neg(input=a),
    "abs": lambda g, a: g.abs(input=a),
    "exp": lambda g, a: g.exp(input=a),
    "relu": lambda g, a: g.relu(input=a),
    "leaky_relu": lambda g, a, slope: g.leaky_relu(input=a, negative_slope=slope),
    "elu": lambda g, a, alpha: g.elu(input=a),
    "sigmoid": lambda g, a: g.sigmoid(input=a),
    "tanh": lambda g, a: g.tanh(input=a),
    "silu": lambda g, a: g.swish(input=a, swish_beta=1.0),
    "gelu": lambda g, a: g.gelu(input=a),
    "gelu_tanh": lambda g, a: g.gelu_approx_tanh(input=a),
}


def _expressible(expr: Expr) -> Iterator[tuple[bool, str]]:
    """What a graph needs of an epilogue: every step works on the accumulator, and its parameters can be had."""
    yield any(isinstance(leaf, Acc) for leaf in expr.walk()), f"{expr} does not use the accumulator"
    for node in expr.walk():
        if not isinstance(node, Node):
            continue
        of_acc = any(isinstance(leaf, Acc) for leaf in node.walk())
        yield of_acc, f"{node} combines operands before they meet the accumulator"
        yield node.op != "elu" or node.params == (1.0,), f"{node} has an alpha; cuDNN's elu has none"


def _type(dtype: str) -> Any:
    import cudnn

    return getattr(cudnn.data_type, _TYPES[dtype])


def _dims(shape: Sequence[int]) -> list[int]:
    """Sizes with at least two spatial axes."""
    return list(shape) if len(shape) > 3 else [*shape[:2], 1, *shape[2:]]


def _layout(problem: Problem, at: int) -> str:
    return problem.layouts[at] if problem.rank > 1 else "nchw"  # of three axes, nchw alone exists in torch


def _strides(dims: Sequence[int], layout: str) -> list[int]:
    """By the layout rather than by torch's strides, which say nothing of axes of size 1."""
    axes = list(range(len(dims)))
    inward = axes if layout == "nchw" else [0, *axes[2:], 1]
    strides, step = [0] * len(dims), 1
    for axis in reversed(inward):
        strides[axis] = step
        step *= dims[axis]
    return strides


# -- the plans ----------------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """A plan by its index, its bytes of workspace, and a sentence on it."""

    plan: int
    size: int
    note: str


_choices: dict[tuple[Problem, int], _Choice] = {}


@dataclass
class _Search:
    """Plans that ran: seconds of a second run and bytes of workspace, by their index; and those that did not."""

    seconds: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    failed: int = 0
    error: str = ""


def _fastest(graph: _Graph, problem: Problem, inputs: Inputs) -> _Choice:
    count = graph.graph.get_execution_plan_count()
    search, begun = _Search(), time.perf_counter()
    for index in range(count):
        if len(search.seconds) == _MOST_PLANS or time.perf_counter() - begun > _SEARCH_SECONDS:
            break
        _try(graph, problem, inputs, index, search)
    if not search.seconds:
        raise NotTaken(f"none of cuDNN's {count} plans runs: {search.error}")
    best = _quickest(graph, problem, inputs, search)
    note = f"plan {best} of {count}: {graph.graph.get_plan_name_at_index(best)}"
    note += f", {search.sizes[best]} bytes of workspace"
    note += f", {search.failed} barred or failed" if search.failed else ""
    left = count - len(search.seconds) - search.failed
    note += f", {left} not tried" if left else ""
    return _Choice(best, search.sizes[best], note)


def _try(graph: _Graph, problem: Problem, inputs: Inputs, index: int, search: _Search) -> None:
    import cudnn

    try:
        graph.graph.build_plan_at_index(index)
        size = graph.graph.get_workspace_size_plan_at_index(index)
        call = _call(graph, problem, inputs, _workspace(size, inputs.a.device), index)
        call()  # loads the kernel
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:  # out of memory is a RuntimeError
        search.failed += 1
        search.error = first_line(error)
    else:
        search.seconds[index], search.sizes[index] = time.perf_counter() - start, size


def _quickest(graph: _Graph, problem: Problem, inputs: Inputs, search: _Search) -> int:
    """The plans that a second run does not rule out, raced like any contestants. They share a workspace."""
    limit = 1.5 * min(search.seconds.values()) + 20e-6
    near = [index for index, took in search.seconds.items() if took <= limit]
    workspace = _workspace(max(search.sizes[index] for index in near), inputs.a.device)
    calls = [[_call(graph, problem, inputs, workspace, index)] for index in near]
    timings = race_cuda(calls, budget=_RACE_SECONDS, least=5, most=20)
    return min(zip(timings, near, strict=True), key=lambda pair: pair[0].median)[1]


def _workspace(size: int, device: torch.device) -> Tensor | None:
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


def _call(
    graph: _Graph, problem: Problem, inputs: Inputs, workspace: Tensor | None, index: int | None = None
) -> Callable[[], Tensor]:
    """Run one plan, or the one that is built, into a new tensor."""
    pack, result, run = graph.pack(inputs), graph.result.get_uid(), graph.graph
    handle = _handle(inputs.a.device.index)
    shape, dtype = problem.result_shape, DTYPES[problem.result_dtype]
    layout, device = _layout(problem, problem.result), inputs.a.device

    def call() -> Tensor:
        out = empty(shape, dtype, layout, device)
        if index is None:
            run.execute({**pack, result: out}, workspace, handle=handle)
        else:
            run.execute_plan_at_index({**pack, result: out}, workspace, index, handle=handle)
        return out

    return call
