"""conv1d to conv3d and conv_transpose1d to 3d, with torch's signatures and meaning.

A call is checked once. The next one with the same metadata finds what the first came to: for plain tensors the plan
itself, which runs without the dispatcher a few microseconds later, inside a function of autograd's where a gradient is
wanted. From the third one on with the same filter, its tensors are compared in one call of C++. Calls that PyTorch
wants to see (torch.compile, functorch, modes, subclasses, autocast, profiler) are checked every time and go through the
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .epilogue import Epilogue
from .evaluate import activate, constant_when_compiled
from .plan import Plan, plan_cache, remember
from .select import DEFAULT, current_policy
from .tensors import guards
from .torch_ops import dgrad, fprop, grad_wanted, plain, plan_pass, tracked, transforming, undisturbed, watched

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

Array = TypeVar("Array", Tensor, "np.ndarray[Any, Any]")
Size = int | Sequence[int]


# -- the checks that torch makes, with its exception types -------------------------------------------------------


def _ints(name: str, value: Any, rank: int, least: int, function: str) -> tuple[int, ...]:
    """One integer per spatial axis, from one for all or one each; NumPy's integers and tensors of one are integers."""
    try:
        values = tuple(_int(v) for v in value) if isinstance(value, tuple | list) else (_int(value),)
    except TypeError:
        raise TypeError(f"{function}: {name} is {value!r}; wanted an int or a tuple of {rank} ints") from None
    if len(values) == 1:
        values *= rank
    if len(values) != rank:
        raise RuntimeError(f"{function}: {name} has {len(values)} values; wanted one or {rank}, one per spatial axis")
    if any(v < least for v in values):
        raise RuntimeError(f"{function}: {name} is {value}; wanted values of at least {least}")
    return values


def _int(value: Any) -> int:
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # under torch.compile a SymInt stands for an int
    if isinstance(value, bool):
        raise TypeError
    return index(value)


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
            raise TypeError(f"{function}: {name} is of type {type(value).__name__}; wanted a Tensor")
        if value is not None and value.layout != torch.strided:
            raise RuntimeError(f"{function}: {name} has layout {value.layout}; wanted torch.strided: call to_dense()")
    if input.dim() not in (rank + 1, rank + 2):
        raise RuntimeError(f"{function}: expected {rank + 1}D (unbatched) or {rank + 2}D (batched) input, "
                           f"got input of size {list(input.shape)}")  # fmt: skip
    if weight.dim() != rank + 2:
        raise RuntimeError(f"{function}: expected a {rank + 2}D weight, got weight of size {list(weight.shape)}")
    try:
        groups = _int(groups)
    except TypeError:
        raise TypeError(f"{function}: groups is {groups!r}; wanted an int") from None
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
    if weight.shape[0] % groups or filters == 0 or weight.shape[0] == 0:
        raise RuntimeError(f"{function}: expected weight.shape[0] to be a multiple of groups={groups} and no channels "
                           f"to be missing, got weight of size {list(weight.shape)}")  # fmt: skip
    if 0 in input.shape[2:] and 0 not in input.shape[:2]:
        raise RuntimeError(f"{function}: only the batch or the channels may be empty, got input of size "
                           f"{list(input.shape)}")  # fmt: skip
    if transposed and isinstance(padding, str):
        raise TypeError(f"{function}: padding is {padding!r}; wanted an int or a tuple of {rank} ints")
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
        reach = [dilations[i] * (taps[i] - 1) + 1 for i in range(rank)]
        size = tuple((input.shape[2 + i] - 1) * strides[i] - 2 * pads[2 * i] + reach[i] + extra[i] for i in range(rank))
        if any(rows):
            input = F.pad(input, [v for r in reversed(rows) for v in (0, r)])
        if any(v < 0 for v in size):
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
    if channels == 0:
        # torch's result of no channels has none either, whatever the number of filters.
        filters, weight, bias = 0, weight[:0], None if bias is None else bias[:0]
        result = (result[0], 0, *result[2:])
    if residual is not None and residual.shape != result:
        try:
            residual = residual.expand(result)
        except RuntimeError:
            raise RuntimeError(f"{function}: residual of size {list(residual.shape)} does not broadcast to the "
                               f"result's {list(result)}") from None  # fmt: skip
    return Arguments(input, weight, bias, residual, strides, pads, dilations, groups, size,
                     check_activation(activation), policy, batched)  # fmt: skip


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

_calls: dict[Any, Callable[..., Tensor]] = plan_cache()
_USUAL = current_policy()


def _convolve(
    rank: int, transposed: bool, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any,
    groups: Any, dilation: Any, activation: str | None, residual: Any, engine: str | None, precision: str | None,
    accuracy: str | None, max_workspace: int | None,
) -> Any:  # fmt: skip
    compiling, given, key = torch.compiler.is_compiling(), None, None
    tensors = (input, weight, bias, residual)
    if not compiling:
        try:
            policy = current_policy()
            # The types are there because 1 == 1.0 == True, of which torch takes the first only; the usual policy is
            # left out because its hash costs as much as that of all the rest.
            given = (
                rank, transposed, stride, padding, output_padding, groups, dilation, type(stride), type(padding),
                type(output_padding), type(groups), type(dilation), activation, engine, precision, accuracy,
                max_workspace, None if policy is _USUAL else policy, torch.get_num_threads(), torch.is_grad_enabled(),
                id(weight), bias is None, residual is None,
            )  # fmt: skip
            recognised = _recognised.get(given, ())
        except (TypeError, RuntimeError):  # a list among the arguments has no hash
            given, recognised = None, ()
        for same, compute in recognised:
            if same(*tensors) and not watched():
                return compute(input, weight, bias, residual)
    if given is not None and _direct(input, weight, bias, residual):
        try:
            key = (
                given[:-3], input.shape, input.stride(), input.dtype, input.get_device(), weight.shape,
                weight.stride(), weight.dtype, weight.get_device(),
                bias if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
                residual if residual is None else (
                    residual.shape, residual.stride(), residual.dtype, residual.get_device()),
                grad_wanted(tensors),
            )  # fmt: skip
            found = _calls.get(key)
        except (TypeError, RuntimeError):  # a sparse tensor has no strides
            found = key = None
        if found is not None:
            _recognise(given, tensors, found)
            return found(input, weight, bias, residual)
    if isinstance(input, np.ndarray):
        return _through_numpy(rank, transposed, input, weight, bias, stride, padding, output_padding, groups, dilation,
                              activation, residual, engine, precision, accuracy, max_workspace)  # fmt: skip
    if not compiling and has_torch_function(tensors):
        function = globals()[f"conv{'_transpose' * transposed}{rank}d"]
        last = (output_padding, groups, dilation) if transposed else (dilation, groups)
        return handle_torch_function(
            function, tensors, input, weight, bias, stride, padding, *last, activation=activation, residual=residual,
            engine=engine, precision=precision, accuracy=accuracy, max_workspace=max_workspace,
        )  # fmt: skip
    limits = _policy(compiling, engine, precision, accuracy, max_workspace)
    call = check_arguments(rank, transposed, input, weight, bias, stride, padding, output_padding, groups, dilation,
                           activation, residual, limits)  # fmt: skip
    if key is None:
        run = _through_operators(call)
    else:
        run = _tracked(call) if grad_wanted(tensors) else _planned(call)
    if key is not None and _repeats(call, (stride, padding, output_padding, groups, dilation), tensors):
        remember(_calls, key, run if call.batched else _unbatched(run))
    out = run(call.input, call.weight, call.bias, call.residual)
    return out if call.batched else out.squeeze(0)


# PyTorch's own check of tensors for compiled code: whether type, dtype, device, sizes, strides, the need of a gradient
# and all that the dispatcher goes by (views that negate or conjugate, transforms, modes, autocast, inference) are as
# they were, in a tenth of the time of asking for each.
_TensorGuards = getattr(guards, "TensorGuards", None)
_recognised: dict[Any, list[tuple[Callable[..., bool], Callable[..., Tensor]]]] = plan_cache()
_MOST_SHAPES = 4


def _recognise(given: tuple[Any, ...], tensors: tuple[Any, ...], run: Callable[..., Tensor]) -> None:
    """Have the next call with these arguments and tensors like these found by their comparison alone. The first time
    only makes room: a filter that is never seen again is not worth more."""
    known = _recognised.get(given)
    if known is None:
        remember(_recognised, given, [])
    elif len(known) < _MOST_SHAPES and _TensorGuards is not None:
        there = [tensor for tensor in tensors if tensor is not None]
        try:
            check = _TensorGuards(*there, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            known.append((_comparison(check, tensors), run))
        except (TypeError, RuntimeError):  # another PyTorch, where it is made otherwise
            pass


def _comparison(check: Callable[..., bool], tensors: tuple[Any, ...]) -> Callable[..., bool]:
    """``check`` of the tensors that are there."""
    *_, bias, residual = (tensor is not None for tensor in tensors)
    if not bias and not residual:
        return lambda input, weight, bias, residual: check(input, weight)
    if not residual:
        return lambda input, weight, bias, residual: check(input, weight, bias)
    return lambda *tensors: check(*(tensor for tensor in tensors if tensor is not None))


def _direct(input: Any, weight: Any, bias: Any, residual: Any) -> bool:
    """Whether nothing but autograd stands between this call and the engine."""
    return (
        plain(input)
        and plain(weight)
        and (bias is None or plain(bias))
        and (residual is None or plain(residual))
        and undisturbed()
    )


def _planned(call: Arguments) -> Callable[..., Tensor]:
    """The call as its plan computes it, for tensors like its own."""
    plan = plan_call(call)
    compute, lean = plan.call, plan.lean
    given = [tensor for tensor in (call.bias, call.residual) if tensor is not None]
    if lean is not None and plan.takes(call.input, call.weight, given):
        if len(given) == 1:
            return lambda input, weight, bias, residual: lean(input, weight, residual if bias is None else bias)
        return lean  # both in this order, or neither
    if not given:
        return lambda input, weight, bias, residual: compute(input, weight, ())

    def run(input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        operands = () if bias is None else (bias,)
        return compute(input, weight, operands if residual is None else (*operands, residual))

    return run


def _tracked(call: Arguments) -> Callable[..., Tensor]:
    """The same where a gradient is wanted. The activation stays outside, so that autograd keeps its input."""
    activation, geometry = call.activation, (call.stride, call.padding, call.dilation, call.groups)
    compute = _planned(replace(call, activation=""))
    run = tracked(compute, "fprop" if call.size is None else "dgrad", geometry, call.policy)
    return (lambda *tensors: activate(activation, run(*tensors))) if activation else run


def _through_operators(call: Arguments) -> Callable[..., Tensor]:
    """The call as PyTorch knows it. Where a gradient may be wanted the activation stays outside, so that autograd keeps
    its input; without one it is fused."""
    size, activation = call.size, call.activation
    geometry, policy = (call.stride, call.padding, call.dilation, call.groups), call.policy

    def run(*tensors: Tensor | None) -> Tensor:
        transformed = not torch.compiler.is_compiling() and transforming()
        split = bool(activation) and (transformed or grad_wanted(tensors))
        rest = (*geometry, "" if split else activation, policy)
        out = fprop(*tensors, *rest) if size is None else dgrad(*tensors, size, *rest)
        return activate(activation, out) if split else out

    return run


def _unbatched(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda input, *others: run(input.unsqueeze(0), *others).squeeze(0)


def _repeats(call: Arguments, geometry: tuple[Any, ...], tensors: tuple[Any, ...]) -> bool:
    """Whether an equal call may be made on its own tensors: the checks did no work on them that would have to be done
    again, and the numbers are values, not tensors that can change."""
    input, weight, bias, residual = tensors
    kept = call.weight is weight and call.bias is bias and call.residual is residual
    same = call.input is input if call.batched else call.input.shape[1:] == input.shape and residual is None
    numbers = [n for value in geometry for n in (value if isinstance(value, tuple) else (value,))]
    return kept and same and not any(isinstance(n, Tensor) for n in numbers)


@constant_when_compiled
def _policy(compiling: bool, *asked: Any) -> str:
    """The policy of a call as text. Compiled code leaves the policy in force to be looked up when it runs."""
    base = DEFAULT if compiling else current_policy()
    return str(base.but(**dict(zip(("engine", "precision", "accuracy", "max_workspace"), asked, strict=True))))


@constant_when_compiled
def check_activation(text: str | None) -> str:
    """An activation's name, checked; empty for none."""
    if text is not None and not isinstance(text, str):
        raise TypeError(f"activation is {text!r}; wanted a name such as 'relu'")
    if not text:
        return ""
    Epilogue().activation(text)
    return text


def plan_call(call: Arguments) -> Plan:
    """The plan of a checked call."""
    direction = "fprop" if call.size is None else "dgrad"
    return plan_pass(direction, call.input, call.weight, call.bias, call.residual, call.size, None, call.stride,
                     call.padding, call.dilation, call.groups, call.activation, call.policy)  # fmt: skip


def _through_numpy(
    rank: int, transposed: bool, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, output_padding: Any,
    groups: Any, dilation: Any, activation: Any, residual: Any, *limits: Any,
) -> Any:  # fmt: skip
    """The same call on arrays; the result shares no memory with them."""

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.require(value, requirements=["C", "W"])) if isinstance(value, np.ndarray) else value

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
    """y[n,k,q] = activation(bias[k] + residual[n,k,q] + sum over c,s of x[n,c,v] * w[k,c,s])
    at v = q*stride - padding + s*dilation.

    ``input`` (N, C, W) or (C, W), ``weight`` (K, C/groups, S), ``bias`` (K), ``residual`` broadcast to the result. See
    :func:`conv2d` for the rest.
    """
    return _convolve(1, False, input, weight, bias, stride, padding, 0, groups, dilation, activation, residual, engine,
                     precision, accuracy, max_workspace)  # fmt: skip


def conv2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1, *, activation: str | None = None, residual: Array | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """y[n,k,p,q] = activation(bias[k] + residual[n,k,p,q] + sum over c,r,s of x[n,c,u,v] * w[k,c,r,s])
    at u = p*stride - padding + r*dilation, and v from q and s likewise.

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
                     precision, accuracy, max_workspace)  # fmt: skip


def conv3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size | str = 0,
    dilation: Size = 1, groups: int = 1, *, activation: str | None = None, residual: Array | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """y[n,k,o,p,q] = activation(bias[k] + residual[n,k,o,p,q] + sum over c,t,r,s of x[n,c,i,u,v] * w[k,c,t,r,s])
    at i = o*stride - padding + t*dilation, and u and v from p, r and q, s likewise.

    ``input`` (N, C, D, H, W) or (C, D, H, W), ``weight`` (K, C/groups, T, R, S), ``bias`` (K). See :func:`conv2d`.
    """
    return _convolve(3, False, input, weight, bias, stride, padding, 0, groups, dilation, activation, residual, engine,
                     precision, accuracy, max_workspace)  # fmt: skip


def conv_transpose1d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv1d in its input: each x[n,c,q] adds x * w[c,k,s] at q*stride - padding + s*dilation.

    ``input`` (N, C, W) or (C, W), ``weight`` (C, K/groups, S), ``bias`` (K). See :func:`conv2d` for the rest.
    """
    return _convolve(1, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation,
                     residual, engine, precision, accuracy, max_workspace)  # fmt: skip


def conv_transpose2d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv2d in its input: each x[n,c,p,q] adds x * w[c,k,r,s] at p*stride - padding + r*dilation,
    and likewise on the other axis.

    ``input`` (N, C, H, W) or (C, H, W), ``weight`` (C, K/groups, R, S), ``bias`` (K). See :func:`conv2d` for the rest.
    """
    return _convolve(2, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation,
                     residual, engine, precision, accuracy, max_workspace)  # fmt: skip


def conv_transpose3d(
    input: Array, weight: Array, bias: Array | None = None, stride: Size = 1, padding: Size = 0,
    output_padding: Size = 0, groups: int = 1, dilation: Size = 1, *, activation: str | None = None,
    residual: Array | None = None, engine: str | None = None, precision: str | None = None,
    accuracy: str | None = None, max_workspace: int | None = None,
) -> Array:  # fmt: skip
    """The transpose of conv3d in its input: each x[n,c,o,p,q] adds x * w[c,k,t,r,s] at o*stride - padding + t*dilation,
    and likewise on the other axes.

    ``input`` (N, C, D, H, W) or (C, D, H, W), ``weight`` (C, K/groups, T, R, S), ``bias`` (K). See :func:`conv2d`.
    """
    return _convolve(3, True, input, weight, bias, stride, padding, output_padding, groups, dilation, activation,
                     residual, engine, precision, accuracy, max_workspace)  # fmt: skip
