"""Patterns as graphs of the cuDNN frontend: what :mod:`.peers.cudnn` makes of a problem, with a prologue, statistics
and the gradient of relu besides.

cuDNN is particular about the dtypes on the way into a convolution: several spellings of a prologue are tried in turn,
and the first that has a plan that runs is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from ..reference import Inputs
from .peers import NotTaken
from .peers import cudnn as frontend
from .peers.base import first_line, steps_of

__all__ = ["cudnn_call", "cudnn_refusal"]

_SPELLINGS = (("narrow", "narrow"), ("narrow", "f32"), ("f32", "f32"))
"""The dtypes of a prologue's vectors and of the values that it hands on; narrow is that of the image."""


def cudnn_refusal(device: torch.device) -> str | None:
    """Why it takes no part, before anything is built."""
    if device.type != "cuda":
        return f"device is {device.type}; it runs on CUDA devices"
    return None if find_spec("cudnn") else "nvidia-cudnn-frontend is not installed"


def cudnn_call(problem: Problem, inputs: Inputs, seconds: float) -> tuple[Callable[[], Any], str]:
    """The quickest of cuDNN's plans, ready to be called, and a sentence on it. No plan is begun to be built after so
    many seconds. NotTaken if none runs."""
    try:
        import cudnn
    except (ImportError, OSError) as error:  # there, but not the libraries that it needs
        raise NotTaken(f"the module cudnn cannot be imported: {first_line(error)}") from error
    handle = frontend._handle(torch.cuda.current_device())
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    reasons: dict[str, None] = {}
    for vectors, values in _SPELLINGS if problem.prologue.operands else _SPELLINGS[:1]:
        try:
            return _planned(problem, inputs, vectors, values, seconds, handle)
        except NotTaken as error:
            reasons[str(error)] = None
        except (RuntimeError, ValueError, cudnn.cudnnGraphNotSupportedError) as error:
            reasons[first_line(error)] = None
    raise NotTaken(f"no plan of cuDNN {cudnn.backend_version()}: {'; '.join(reasons)}")


def _planned(
    problem: Problem, inputs: Inputs, vectors: str, values: str, seconds: float, handle: Any
) -> tuple[Callable[[], Any], str]:
    graph = _FusedGraph(problem, vectors, values, inputs.a.device, handle)
    graph.plan(problem)
    if vectors == "narrow":
        count = len(problem.prologue.operands)
        cast = (value.to(inputs.a.dtype) for value in inputs.operands[:count])
        inputs = replace(inputs, operands=(*cast, *inputs.operands[count:]))
    best, size, note = _quickest(graph, problem, inputs, seconds)
    graph.graph.build_plan_at_index(best)
    workspace = frontend._workspace(size, inputs.a.device)
    call = frontend._call(graph, problem, inputs, workspace)
    sums = tuple(buffer for _, buffer in graph.sums)
    return (lambda: (call(), *sums)) if sums else call, note


def _quickest(graph: _FusedGraph, problem: Problem, inputs: Inputs, seconds: float) -> tuple[int, int, str]:
    """Index and workspace of the plan, and the sentence."""
    count = graph.graph.get_execution_plan_count()
    search, begun = frontend._Search(), time.perf_counter()
    for index in range(count):
        if time.perf_counter() - begun > seconds:
            break
        frontend._try(graph, problem, inputs, index, search)
    if not search.seconds:
        raise NotTaken(f"none of {count} plans runs: {search.error}")
    best = frontend._quickest(graph, problem, inputs, search)
    left = count - len(search.seconds) - search.failed
    note = (
        f"plan {best} of {count}: {graph.graph.get_plan_name_at_index(best)}, {search.sizes[best]} bytes of workspace"
    )
    note += f", {search.failed} failed" if search.failed else ""
    return best, search.sizes[best], note + (f", {left} not tried" if left else "")


class _FusedGraph(frontend._Graph):
    """A fused problem as a cuDNN graph. Statistics go into tensors that stay, the result into a new one each time."""

    def __init__(self, problem: Problem, vectors: str, values: str, device: torch.device, handle: Any) -> None:
        narrow = problem.dtypes[0]
        self._dtypes = [narrow if name == "narrow" else name for name in (vectors, values)]
        self.sums: list[tuple[Any, Tensor]] = []
        super().__init__(problem, handle=handle)
        if problem.stats:
            import cudnn

            shape = (1, problem.k, *(1,) * problem.rank)
            for made in self.graph.genstats(input=self.result):
                made.set_output(True).set_data_type(cudnn.data_type.FLOAT)
                made.set_dim(list(shape)).set_stride(frontend._strides(shape, "nhwc"))
                self.sums.append((made, torch.empty(shape, dtype=torch.float32, device=device)))

    def pack(self, inputs: Inputs) -> dict[int, Tensor]:
        return {**super().pack(inputs), **{made.get_uid(): buffer for made, buffer in self.sums}}

    def _convolution(self, problem: Problem) -> Any:
        """The pass behind its prologue, which is a chain of scale, bias and relu."""
        dims = frontend._dims(problem.x_shape)
        layout = frontend._layout(problem, 0)
        image, plain = self.a, self.a
        for step in _steps(problem):
            if step == "relu":
                image = self.graph.relu(input=image)
            else:
                vector = self._tensor(f"x_{step}", [1, dims[1], *(1 for _ in dims[2:])], "nhwc", self._dtypes[0])
                self.operands[f"x_{step}"] = vector
                image = frontend._POINTWISE[step](self.graph, image, vector)
            image.set_dim(dims).set_stride(frontend._strides(dims, layout))
            image.set_data_type(frontend._type(self._dtypes[1]))
        self.a = image
        try:
            return super()._convolution(problem)
        finally:
            self.a = plain

    def _applied(self, op: str, args: list[Any], params: tuple[float, ...]) -> Any:
        if op == "relu_backward":
            return self._shaped(self.graph.relu_backward(loss=args[0], input=args[1]))
        return super()._applied(op, args, params)


def _steps(problem: Problem) -> list[str]:
    """The operations of the prologue in their order."""
    steps = steps_of(problem.prologue) if not problem.prologue.is_identity else ()
    if steps is None or any(step.op not in ("mul", "add", "relu") for step in steps):
        raise NotTaken(f"the prologue {problem.prologue} is no chain of scale, bias and relu")
    return [step.op for step in steps]
