"""conv1d to conv3d and conv_transpose1d to 3d, with torch's signatures and meaning.

A call goes one of two ways. Plain CPU tensors that need no gradient look their plan up by their metadata and run it: no
dispatcher, a few microseconds. Everything else (autograd, torch.compile, functorch, modes, subclasses, autocast) is
checked and goes through the operators of :mod:`openconv.torch_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .epilogue import Epilogue
from .evaluate import activation_function
from .plan import Plan
from .select import DEFAULT, current_policy
from .torch_ops import dgrad, fprop, plan_pass

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

Array = TypeVar("Array", Tensor, "np.ndarray[Any, Any]")
Size = int | Sequence[int]


# -- the checks that torch makes, with its exception types -------------------------------------------------------


def _ints(name: str, value: Any, rank: int, least: int, function: str) -> tuple[int, ...]:
    """One integer per spatial axis, from one for all or one each."""
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not all(isinstance(v, int | torch.SymInt) and not isinstance(v, bool) for v in values):
        raise TypeError(f"{function}: {name} is {value!r}; wanted an int or a tuple of {rank} ints")
    if len(values) == 1:
        values *= rank
    if len(values) != rank:
        raise RuntimeError(f"{function}: {name} has {len(values)} values; wanted one or {rank}, one per spatial axis")
    if any(v < least for v in values):
        raise RuntimeError(f"{function}: {name} is {value}; wanted values of at least {least}")
    return values


@dataclass(frozen=True)
class Arguments:
    """A call after checking: batched tensors and one entry per axis. ``padding`` is low and high of each axis, flat;
    ``size`` is the result's spatial size in a transposed convolution and None in a convolution."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, ...] | None
    activation: str
    policy: str
    batched: bool


def check_arguments(
    rank: int, transposed: bool, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Size, padding: Size | str,
    output_padding: Size, groups: int, dilation: Size, activation: str | None, residual: Tensor | None, policy: str,
) -> Arguments:  # fmt: skip
    """Check a call as torch would and bring it into one form. Raises before anything is computed."""
    function = f"conv{'_transpose' * transposed}{rank}d"
    for name, value in (("input", input), ("weight", weight), ("bias", bias), ("residual", residual)):
        if not isinstance(value, Tensor) and (value is not None or name in ("input", "weight")):
            raise TypeError(f"{function}: {name} is a {type(value).__name__}; wanted a Tensor")
    if input.dim() not in (rank + 1, rank + 2):
        raise RuntimeError(f"{function}: expected {rank + 1}D (unbatched) or {rank + 2}D (batched) input, "
                           f"got input of size {list(input.shape)}")  # fmt: skip
    if weight.dim() != rank + 2:
        raise RuntimeError(f"{function}: expected a {rank + 2}D weight, got weight of size {list(weight.shape)}")
    if not isinstance(groups, int) or isinstance(groups, bool):
        raise TypeError(f"{function}: groups is {groups!r}; wanted an int")
    if groups < 1:
        raise RuntimeError(f"{function}: groups is {groups}; wanted at least 1")
    batched = input.dim() == rank + 2
    if not batched:
        input = input.unsqueeze(0)
        residual = residual.unsqueeze(0) if residual is not None and residual.dim() == rank + 1 else residual
    strides = _ints("stride", stride, rank, 1, function)
    dilations = _ints("dilation", dilation, rank, 1, function)
    taps = weight.shape[2:]
    if any(t < 1 for t in taps):
        raise RuntimeError(f"{function}: weight of size {list(weight.shape)} has an empty filter")

    channels, filters = weight.shape[1] * groups, weight.shape[0]
    if transposed:
        channels, filters = filters, channels
    if input.shape[1] != channels:
        raise RuntimeError(f"{function}: given groups={groups} and weight of size {list(weight.shape)}, expected input "
                           f"{list(input.shape)} to have {channels} channels, but got {input.shape[1]}")  # fmt: skip
    if weight.shape[0] % groups:
        raise RuntimeError(f"{function}: expected weight.shape[0] to be divisible by groups={groups}, "
                           f"got weight of size {list(weight.shape)}")  # fmt: skip
    pads = _padding(padding, rank, taps, strides, dilations, function)
    size = None
    if transposed:
        extra = _ints("output_padding", output_padding, rank, 0, function)
        for i in range(rank):
            if extra[i] >= max(strides[i], dilations[i]):
                raise RuntimeError(f"{function}: output_padding {extra} must be smaller than either stride {strides} "
                                   f"or dilation {dilations}")  # fmt: skip
        # Positions past stride-1 have no term of their own: one more row of zero input stands for each stride of them.
        rows = [extra[i] // strides[i] for i in range(rank)]
        size = tuple((input.shape[2 + i] - 1) * strides[i] - 2 * pads[2 * i] + dilations[i] * (taps[i] - 1) + extra[i] + 1
                     for i in range(rank))  # fmt: skip
        if any(rows):
            input = F.pad(input, [v for r in reversed(rows) for v in (0, r)])
        if any(v < 1 for v in size):
            raise RuntimeError(f"{function}: given input of size {list(input.shape)}, the calculated output size is "
                               f"{list(size)}, which is too small")  # fmt: skip
        result = (input.shape[0], filters, *size)
    else:
        reach = [dilations[i] * (taps[i] - 1) + 1 for i in range(rank)]
        padded = [input.shape[2 + i] + pads[2 * i] + pads[2 * i + 1] for i in range(rank)]
        if any(p < r for p, r in zip(padded, reach, strict=True)):
            raise RuntimeError(f"{function}: the filter reaches over {reach}, which is greater than the padded input "
                               f"size {padded}")  # fmt: skip
        out = ((padded[i] - reach[i]) // strides[i] + 1 for i in range(rank))
        result = (input.shape[0], filters, *out)

    others = [("weight", weight), ("bias", bias), ("residual", residual)]
    for name, value in others:
        if value is not None and value.device != input.device:
            raise RuntimeError(f"{function}: input is on {input.device} and {name} on {value.device}; wanted the same")
        if value is not None and value.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            raise RuntimeError(f"{function}: input is {input.dtype} and {name} is {value.dtype}; wanted the same dtype")
    if bias is not None and tuple(bias.shape) != (filters,):
        raise RuntimeError(f"{function}: given weight of size {list(weight.shape)}, expected bias to be 1-dimensional "
                           f"with {filters} elements, but got bias of size {list(bias.shape)}")  # fmt: skip
    if residual is not None:
        try:
            residual = residual.expand(result)
        except RuntimeError:
            raise RuntimeError(f"{function}: residual of size {list(residual.shape)} does not broadcast to the result's "
                               f"{list(result)}") from None  # fmt: skip
    return Arguments(input, weight, bias, residual, strides, pads, dilations, groups, size, _activation(activation), policy,
                     batched)  # fmt: skip


def _padding(padding: Size | str, rank: int, taps: Sequence[int], stride: tuple[int, ...], dilation: tuple[int, ...],
             function: str) -> tuple[int, ...]:  # fmt: skip
    """Low and high padding of each axis, flat. ``same`` puts the odd one at the high end, as torch does."""
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * (2 * rank)
        if padding != "same":
            raise RuntimeError(f"{function}: padding is {padding!r}; wanted 'same', 'valid' or integers")
        if any(s != 1 for s in stride):
            raise RuntimeError(f"{function}: padding='same' is not supported for strided convolutions, got {stride}")
        total = [d * (t - 1) for d, t in zip(dilation, taps, strict=True)]
        return tuple(v for t in total for v in (t // 2, t - t // 2))
    return tuple(v for p in _ints("padding", padding, rank, 0, function) for v in (p, p))


# -- the call ----------------------------------------------------------------------------------------------------

_plans: dict[Any, tuple[Plan, bool]] = {}
_MOST = 4096

_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiling = torch.autograd._profiler_enabled
_PLAIN = (Tensor, torch.nn.Parameter)


def _convolve(
    rank: int, transposed: bool, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any,
    groups: Any, dilation: Any, activation: str | None, residual: Any, engine: str | None, precision: str | None,
    accuracy: str | None, max_workspace: int | None,
) -> Any:  # fmt: skip
    key: Any = None
    if not torch.compiler.is_compiling() and type(input) in _PLAIN and _direct(input, weight, bias, residual):
        key = (
            rank, transposed, input.shape, input.stride(), input.dtype, weight.shape, weight.stride(), weight.dtype,
            None if bias is None else (bias.shape, bias.dtype), None if residual is None else (residual.shape, residual.dtype),
            stride, padding, output_padding, groups, dilation, activation, engine, precision, accuracy, max_workspace,
            current_policy(), torch.get_num_threads(),
        )  # fmt: skip
        try:
            found = _plans.get(key)
        except TypeError:  # a list among the arguments: valid, but it has no hash
            key, found = None, None
        if found is not None:
            plan, simple = found
            if simple:
                return plan.call(input, weight, () if bias is None else (bias,))
    if isinstance(input, np.ndarray):
        return _through_numpy(rank, transposed, input, weight, bias, stride, padding, output_padding, groups, dilation,
                              activation, residual, engine, precision, accuracy, max_workspace)  # fmt: skip
    policy = _policy(torch.compiler.is_compiling(), engine, precision, accuracy, max_workspace)
    call = check_arguments(rank, transposed, input, weight, bias, stride, padding, output_padding, groups, dilation,
                           activation, residual, policy)  # fmt: skip
    if key is not None:
        operands = tuple(t for t in (call.bias, call.residual) if t is not None)
        plan = plan_call(call)
        if len(_plans) >= _MOST:
            _plans.pop(next(iter(_plans)), None)
        # An input that check_arguments has replaced must be checked again at every call.
        _plans[key] = (plan, call.input is input and call.residual is None)
        out = plan.call(call.input, call.weight, operands)
    else:
        out = _dispatch(call)
    return out if call.batched else out.squeeze(0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _policy(compiling: bool, *asked: Any) -> str:
    """The policy of a call as text. Compiled code leaves the policy in force to be looked up when it runs."""
    base = DEFAULT if compiling else current_policy()
    return str(base.but(**dict(zip(("engine", "precision", "accuracy", "max_workspace"), asked, strict=True))))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _activation(text: str | None) -> str:
    """An activation's name, checked."""
    if text:
        Epilogue().activation(text)
    return text or ""


def _direct(input: Tensor, weight: Any, bias: Any, residual: Any) -> bool:
    """Whether nothing stands between this call and the engine: no gradient, mode, transform, subclass or autocast."""
    others = [t for t in (weight, bias, residual) if t is not None]
    return (
        input.device.type == "cpu"
        and all(type(t) in _PLAIN and t.device == input.device and not t.is_conj() and not t.is_neg() for t in others)
        and not (input.is_conj() or input.is_neg())
        and not (torch.is_grad_enabled() and (input.requires_grad or any(t.requires_grad for t in others)))
        and not (_dispatch_modes() or _function_modes() or _functorch_active() or _profiling())
        and not torch.is_autocast_enabled("cpu")
    )


def plan_call(call: Arguments) -> Plan:
    """The plan of a checked call."""
    direction = "fprop" if call.size is None else "dgrad"
    return plan_pass(direction, call.input, call.weight, call.bias, call.residual, call.size, None, call.stride,
                     call.padding, call.dilation, call.groups, call.activation, call.policy)  # fmt: skip


def _dispatch(call: Arguments) -> Tensor:
    """Through the operators. Where a gradient may be wanted the activation stays outside, so that autograd keeps its
    input; without one it is fused."""
    tensors = (call.input, call.weight, call.bias, call.residual)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    split = bool(call.activation) and (wanted or (not torch.compiler.is_compiling() and _functorch_active()))
    rest = (call.stride, call.padding, call.dilation, call.groups, "" if split else call.activation, call.policy)
    out: Tensor = fprop(*tensors, *rest) if call.size is None else dgrad(*tensors, call.size, *rest)
    return activation_function(call.activation)(out) if split else out


def _through_numpy(rank: int, transposed: bool, input: Any, weight: Any, bias: Any, stride: Any, padding: Any,
                   output_padding: Any, groups: Any, dilation: Any, activation: Any, residual: Any, *limits: Any) -> Any:  # fmt: skip
    """The same call on arrays; the result shares no memory with them."""

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.require(value, requirements="CW")) if isinstance(value, np.ndarray) else value

    with torch.no_grad():
        out: Tensor = _convolve(rank, transposed, tensor(input), tensor(weight), tensor(bias), stride, padding,
                                output_padding, groups, dilation, activation, tensor(residual), *limits)  # fmt: skip
    return out.numpy()


# -- the public functions ----------------------------------------------------------------------------------------


def conv1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1, *, activation: str | None = None, residual: Array | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """y[n,k,q] = activation(bias[k] + residual[n,k,q] + sum over c,s of x[n, c, q*stride - padding + s*dilation] * w[k,c,s])

    ``input`` (N, C, W) or (C, W), ``weight`` (K, C/groups, S), ``bias`` (K), ``residual`` broadcast to the result. See
    :func:`conv2d` for the rest.
    """
    return _convolve(1, False, input, weight, bias, stride, padding, 0, groups, dilation, activation, residual, engine,
                     precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip


def conv2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1, *, activation: str | None = None, residual: Array | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """y[n,k,p,q] = activation(bias[k] + residual[n,k,p,q] + sum over c,r,s of x[n, c, p*stride - padding + r*dilation, ...] * w[k,c,r,s])

    The signature and meaning of ``torch.nn.functional.conv2d``: ``input`` (N, C, H, W) or (C, H, W), ``weight``
    (K, C/groups, R, S), ``bias`` (K); channels_last in gives channels_last out. NumPy arrays give a NumPy array. Beyond
    torch's arguments, by keyword:

    ``activation``: ``"relu"``, ``"gelu"``, ``"leaky_relu(0.2)"``, ... (:data:`openconv.epilogue.ACTIVATIONS`).
    ``residual``: a tensor added in front of the activation.
    ``engine``: run this engine, or the first of several separated by commas that accepts; see ``openconv engines``.
    ``precision``: ``"ieee"``, ``"tf32"`` or ``"tf32x3"`` for f32 tensors.
    ``accuracy``: ``"strict"`` keeps to plain sums of products.
    ``max_workspace``: the most bytes of scratch memory that the call may use.
    """
    return _convolve(2, False, input, weight, bias, stride, padding, 0, groups, dilation, activation, residual, engine,
                     precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip


def conv3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1, *, activation: str | None = None, residual: Array | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """y[n,k,o,p,q] = activation(bias[k] + residual[n,k,o,p,q] + sum over c,t,r,s of x[n, c, o*stride - padding + t*dilation, ...] * w[k,c,t,r,s])

    ``input`` (N, C, D, H, W) or (C, D, H, W), ``weight`` (K, C/groups, T, R, S), ``bias`` (K). See :func:`conv2d`.
    """
    return _convolve(3, False, input, weight, bias, stride, padding, 0, groups, dilation, activation, residual, engine,
                     precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip


def conv_transpose1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv1d in its input: each x[n,c,q] adds x * w[c,k,s] at position q*stride - padding + s*dilation.

    ``input`` (N, C, W) or (C, W), ``weight`` (C, K/groups, S), ``bias`` (K). See :func:`conv2d` for the rest.
    """
    return _convolve(1, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation, residual,
                     engine, precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip


def conv_transpose2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv2d in its input: each x[n,c,p,q] adds x * w[c,k,r,s] at (p*stride - padding + r*dilation, ...).

    ``input`` (N, C, H, W) or (C, H, W), ``weight`` (C, K/groups, R, S), ``bias`` (K). See :func:`conv2d` for the rest.
    """
    return _convolve(2, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation, residual,
                     engine, precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip


def conv_transpose3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv3d in its input: each x[n,c,o,p,q] adds x * w[c,k,t,r,s] at (o*stride - padding + t*dilation, ...).

    ``input`` (N, C, D, H, W) or (C, D, H, W), ``weight`` (C, K/groups, T, R, S), ``bias`` (K). See :func:`conv2d`.
    """
    return _convolve(3, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation, residual,
                     engine, precision, accuracy, max_workspace)  # type: ignore[no-any-return]  # fmt: skip
