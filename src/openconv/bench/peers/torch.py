"""PyTorch as it is called: eagerly in either layout, with its own fused operators, and compiled.

On the GPU the calls depend on settings that are global to the process, because a user sets them so: cuDNN's benchmark
mode is on, and TF32 is allowed only to problems that say ``tf32``. `prepare` sets them and leaves them set; whoever
prepares a problem of another precision sets them anew, so that the calls of one problem are run before the next one is
prepared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...epilogue import Acc, Epilogue, Node, Operand, acc
from ...evaluate import evaluator_
from ...problem import Problem
from ...reference import Inputs
from ...tensors import DTYPES, empty, to_layout
from .base import NotTaken, Peer, Prepared, first_line, first_unmet, same_dtype, steps_of

__all__ = ["Torch", "TorchChannelsLast", "TorchCompile", "TorchFused", "TorchNCHW", "eager"]

_Convolution = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Torch(Peer):
    """The problem's own layout, eagerly. Of an epilogue, a bias that comes first is given to the convolution; the
    other steps are operators behind it, in place where torch has them so."""

    name = "torch"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        dtype, fprop = problem.dtypes[0], problem.direction == "fprop"
        whole = not DTYPES[dtype].is_floating_point and not DTYPES[dtype].is_complex
        return first_unmet((
            same_dtype(problem),
            (dtype not in ("e4m3", "e5m2", "complex32"), f"dtype is {dtype}; torch has no convolution of it"),
            (not whole or device.type == "cpu", f"dtype is {dtype}; torch convolves integers on the CPU only"),
            (DTYPES[dtype].is_floating_point or fprop, f"{problem.direction} of {dtype}; torch has fprop only"),
            (device.type != "cpu" or not _faulty(problem, self._layout(problem)), _FAULT),
            (device.type != "cuda" or _trial_seconds(problem) < _LONGEST_TRIAL,
             f"cuDNN's search tries a kernel that takes about {_trial_seconds(problem):.0f} s a call here"),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        return Prepared(_calls(problem, sets, self._layout(problem)))

    def _layout(self, problem: Problem) -> str:
        """The layout in which it is called."""
        return problem.layouts[0]


_FAULT = (
    "wgrad of a strided 1x1 filter over fewer than 16 channels in channels_last; torch writes past its buffers there"
)


def _faulty(problem: Problem, layout: str) -> bool:
    """Seen with torch 2.13 on the CPU: Conv2d(8, 64, 1, stride=2) in channels_last over 224x224 pixels ends in a
    segmentation fault after some backward passes; with 16 channels, stride 1 or in nchw it does not."""
    few = problem.c // problem.groups < 16 and prod(problem.filter) == 1 and max(problem.stride) > 1
    return few and problem.direction == "wgrad" and layout == "nhwc"


_LONGEST_TRIAL = 60.0


def _trial_seconds(problem: Problem) -> float:
    """What the slowest kernel that cuDNN's search tries was seen to take for the gradient of an image of one channel:
    9x9, 15x15 and 21x21 filters over 1024x2048 pixels took 1.4, 5.7 and 18 s on an H200 (cuDNN 9.19), where the
    kernel that it settles on takes 0.2 to 0.9 ms. A search has several trials, and cannot be stopped."""
    one = problem.direction == "dgrad" and problem.c == problem.k == 1 and problem.dtypes[0] == "f32"
    taps = prod(problem.filter)
    return problem.macs * (4.5e-9 + 3.5e-11 * taps) if one and taps >= 81 else 0.0


class _TorchInLayout(Torch):
    """The same with all tensors in the other layout, converted beforehand."""

    layout: str

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        other = "nchw" if self.layout == "nhwc" else "nhwc"
        images = problem.layouts[0], problem.layouts[2]
        return first_unmet((
            (problem.rank > 1, f"rank is {problem.rank}; torch has one layout for it"),
            (set(images) == {other}, f"images are {' and '.join(sorted(set(images)))}; it is for those in {other}"),
        )) or super().refusal(problem, device)  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        return Prepared(_calls(problem, [_converted(inputs, self.layout) for inputs in sets], self.layout))

    def _layout(self, problem: Problem) -> str:
        return self.layout


class TorchNCHW(_TorchInLayout):
    """Channels first, for problems whose images are channels last."""

    name = "torch_nchw"
    layout = "nchw"


class TorchChannelsLast(_TorchInLayout):
    """Channels last, for problems whose images are channels first."""

    name = "torch_channels_last"
    layout = "nhwc"


class TorchCompile(Torch):
    """torch.compile of what `Torch` calls, in the default mode and for these sizes only.

    Preparing resets the compiler, whose limit on compilations of one function many problems would reach. The calls of
    a problem are therefore run before the next one is prepared: later, they would be compiled again.
    """

    name = "torch_compile"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        compiler = os.environ.get("CXX", "g++")
        return first_unmet((
            (shutil.which(compiler), f"{compiler} is not there; torch.compile builds with a C++ compiler"),
            (device.type == "cpu" or find_spec("triton"), "triton is not installed"),
        )) or super().refusal(problem, device)  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        _set_precision(problem, sets[0].a.device)
        torch._dynamo.reset()
        compiled = torch.compile(eager(problem, problem.layouts[0], sets[0]), dynamic=False, fullgraph=True)
        calls = tuple(partial(compiled, s.a, s.b, s.operands) for s in sets)
        try:
            calls[0]()
        except RuntimeError as error:  # the base of the compiler's own errors
            raise NotTaken(f"torch.compile failed: {first_line(error)}") from error
        return Prepared(calls)


class TorchFused(Peer):
    """The fused operators that torch itself has: cuDNN's conv+bias+relu and conv+bias+add+relu on the GPU, those of
    oneDNN that the compiler uses on the CPU, with weights packed beforehand."""

    name = "torch_fused"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        cuda = device.type == "cuda"
        tail = _tail(problem.epilogue)
        dtypes = ("f16", "bf16", "f32") if cuda else _onednn_dtypes()
        known = tail is not None and (_cudnn_has(tail) if cuda else _onednn_has(tail))
        operator = "cudnn_convolution_relu" if cuda else "oneDNN's _convolution_pointwise"
        return first_unmet((
            (problem.direction == "fprop", f"direction is {problem.direction}; torch fuses fprop only"),
            (not problem.epilogue.is_identity, "there is no epilogue to fuse"),
            (known, f"epilogue is {problem.epilogue}; {operator} has no such step"),
            (problem.rank > 1, f"rank is {problem.rank}; {operator} takes 2 and 3"),
            same_dtype(problem),
            (problem.dtypes[0] in dtypes, f"dtype is {problem.dtypes[0]}; {operator} takes {', '.join(dtypes)} here"),
            (_symmetric(problem), f"padding is {problem.padding}; {operator} pads both ends alike"),
            (cuda or torch.backends.mkldnn.is_available(), "torch is built without oneDNN"),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        tail = _tail(problem.epilogue)
        assert tail is not None  # refused otherwise
        device = sets[0].a.device
        _set_precision(problem, device)
        make = _cudnn_call if device.type == "cuda" else _onednn_call
        calls = tuple(make(problem, tail, inputs) for inputs in sets)
        try:
            calls[0]()
        except RuntimeError as error:  # NotImplementedError among them
            raise NotTaken(f"torch's fused operator failed: {first_line(error)}") from error
        return Prepared(calls)


# -- the problem as a user writes it ------------------------------------------------------------------------------


def eager(problem: Problem, layout: str, inputs: Inputs) -> Callable[[Tensor, Tensor, tuple[Tensor, ...]], Tensor]:
    """The problem as a function of (a, b, operands). ``inputs`` tell the device and dtype of the tensors that a
    backward pass gets besides: torch asks for x or w, and reads their sizes only."""
    convolve = _convolution(problem, layout, inputs.a)
    names = [operand.name for operand in problem.epilogue.operands]
    bias, rest = _bias_first(problem.epilogue) if problem.direction == "fprop" else (None, problem.epilogue)
    finish = None if rest.is_identity else evaluator_(rest)

    def run(a: Tensor, b: Tensor, operands: tuple[Tensor, ...]) -> Tensor:
        values = dict(zip(names, operands, strict=True))
        result = convolve(a, b, values[bias] if bias is not None else None)
        return result if finish is None else finish(result, values)

    return run


def _calls(problem: Problem, sets: Sequence[Inputs], layout: str) -> tuple[Callable[[], object], ...]:
    _set_precision(problem, sets[0].a.device)
    run = eager(problem, layout, sets[0])
    if problem.epilogue.is_identity and problem.direction == "fprop" and _symmetric(problem):
        # Nothing of ours in the call: on the GPU its cost before it returns is compared as well.
        function = (F.conv1d, F.conv2d, F.conv3d)[problem.rank - 1]
        geometry = (problem.stride, [low for low, _ in problem.padding], problem.dilation, problem.groups)
        return tuple(partial(function, s.a, s.b, None, *geometry) for s in sets)
    return tuple(partial(run, s.a, s.b, s.operands) for s in sets)


def _convolution(problem: Problem, layout: str, like: Tensor) -> _Convolution:
    """The pass alone. Padding whose ends differ is laid around x first, or cut from around dx afterwards."""
    symmetric = _symmetric(problem)
    low_high = [] if symmetric else [v for ends in reversed(problem.padding) for v in ends]
    padding = [low if symmetric else 0 for low, _ in problem.padding]
    forward = (F.conv1d, F.conv2d, F.conv3d)[problem.rank - 1]
    backward = torch.ops.aten.convolution_backward.default
    geometry = (problem.stride, padding, problem.dilation, False, [0] * problem.rank, problem.groups)

    def fprop(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        x = a if symmetric else F.pad(a, low_high)
        return forward(x, b, bias, problem.stride, padding, problem.dilation, problem.groups)

    def dgrad(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        dx: Tensor = backward(a, x_like, b, None, *geometry, [True, False, False])[0]
        return dx if symmetric else F.pad(dx, [-v for v in low_high])

    def wgrad(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        x = a if symmetric else F.pad(a, low_high)
        return backward(b, x, w_like, None, *geometry, [False, True, False])[1]

    if problem.direction == "fprop":
        return fprop
    if problem.direction == "dgrad":
        padded = [size + sum(ends) * (not symmetric) for size, ends in zip(problem.spatial, problem.padding)]
        x_like = empty((problem.n, problem.c, *padded), like.dtype, layout, like.device)
        return dgrad
    w_like = empty(problem.w_shape, like.dtype, layout, like.device)
    return wgrad


def _symmetric(problem: Problem) -> bool:
    return all(low == high for low, high in problem.padding)


def _converted(inputs: Inputs, layout: str) -> Inputs:
    return Inputs(
        to_layout(inputs.a, layout), to_layout(inputs.b, layout), tuple(to_layout(o, layout) for o in inputs.operands)
    )


def _bias_first(epilogue: Epilogue) -> tuple[str | None, Epilogue]:
    """The name of the vector that is added first, if one is, and the steps behind it."""
    steps = steps_of(epilogue)
    if not steps or not _adds(steps[0], "channel"):
        return None, epilogue
    rest: Any = acc
    for step in steps[1:]:
        rest = Node(step.op, (rest, *step.args[1:]), step.params)
    return _operand_name(steps[0]), Epilogue(rest)


def _adds(step: Node, kind: str) -> bool:
    return step.op == "add" and isinstance(step.args[1], Operand) and step.args[1].kind == kind


def _operand_name(step: Node) -> str:
    operand = step.args[1]
    assert isinstance(operand, Operand)
    return operand.name


def _set_precision(problem: Problem, device: torch.device) -> None:
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = problem.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"


# -- fused operators ----------------------------------------------------------------------------------------------


class _Tail(NamedTuple):
    """An epilogue of the form that operators fuse: [bias] [residual] [activation], each there or not."""

    bias: str | None
    residual: str | None
    activation: Node | None


def _tail(epilogue: Epilogue) -> _Tail | None:
    """The epilogue in that form; None if it is of another, or nothing but a bias, which every convolution adds."""
    rest = list(steps_of(epilogue) or ())
    bias = _operand_name(rest.pop(0)) if rest and _adds(rest[0], "channel") else None
    residual = _operand_name(rest.pop(0)) if rest and _adds(rest[0], "tensor") else None
    activation = rest.pop(0) if rest and len(rest[0].args) == 1 else None
    if rest or (residual is None and activation is None) or isinstance(epilogue.expr, Acc):
        return None
    return _Tail(bias, residual, activation)


def _cudnn_has(tail: _Tail) -> bool:
    return tail.activation is not None and tail.activation.op == "relu"


# oneDNN's names of activations. Those that take parameters take all of them.
_ONEDNN = {
    "relu": "relu", "leaky_relu": "leaky_relu", "clamp": "hardtanh", "sigmoid": "sigmoid", "tanh": "tanh",
    "silu": "swish", "hardswish": "hardswish", "gelu": "gelu", "gelu_tanh": "gelu",
}  # fmt: skip
_ONEDNN_ALGORITHM = {"gelu": "none", "gelu_tanh": "tanh"}


def _onednn_has(tail: _Tail) -> bool:
    """Every activation of the table by itself, relu alone behind a residual."""
    if tail.activation is None:
        return True
    return tail.activation.op == "relu" or (tail.residual is None and tail.activation.op in _ONEDNN)


def _onednn_dtypes() -> tuple[str, ...]:
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return ()
    half = (("bf16", ops._is_mkldnn_bf16_supported), ("f16", ops._is_mkldnn_fp16_supported))
    return ("f32", *(name for name, there in half if there()))


def _geometry(problem: Problem) -> tuple[list[int], list[int], list[int], int]:
    return [low for low, _ in problem.padding], list(problem.stride), list(problem.dilation), problem.groups


def _named(problem: Problem, inputs: Inputs) -> dict[str | None, Tensor | None]:
    """Operands by name; None for None."""
    names = [operand.name for operand in problem.epilogue.operands]
    return {None: None, **dict(zip(names, inputs.operands, strict=True))}


def _onednn_call(problem: Problem, tail: _Tail, inputs: Inputs) -> Callable[[], object]:
    padding, stride, dilation, groups = _geometry(problem)
    values = _named(problem, inputs)
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        inputs.b, padding, stride, dilation, groups, list(problem.x_shape)
    )
    step = tail.activation
    name, algorithm = ("none", None) if step is None else (_ONEDNN[step.op], _ONEDNN_ALGORITHM.get(step.op))
    scalars = [] if step is None else list(step.params)
    rest = (packed, values[tail.bias], padding, stride, dilation, groups)
    operator = torch.ops.mkldnn._convolution_pointwise
    if tail.residual is None:
        return partial(operator.default, inputs.a, *rest, name, scalars, algorithm or "")
    unary = None if step is None else name
    return partial(operator.binary, inputs.a, values[tail.residual], *rest, "add", 1.0, unary, scalars, algorithm)


def _cudnn_call(problem: Problem, tail: _Tail, inputs: Inputs) -> Callable[[], object]:
    padding, stride, dilation, groups = _geometry(problem)
    values = _named(problem, inputs)
    rest = (values[tail.bias], stride, padding, dilation, groups)
    if tail.residual is None:
        return partial(torch.ops.aten.cudnn_convolution_relu.default, inputs.a, inputs.b, *rest)
    operator = torch.ops.aten.cudnn_convolution_add_relu.default
    return partial(operator, inputs.a, inputs.b, values[tail.residual], 1.0, *rest)
