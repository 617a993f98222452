"""The three passes as PyTorch operators: ``torch.ops.openconv.{fprop, dgrad, wgrad}``.

Each pass is linear in its two inputs and its derivatives are the other two passes, so three operators are closed under
differentiation to any order:

    fprop(x, w):    d/dx = dgrad(g, w)        d/dw  = wgrad(x, g)
    dgrad(dy, w):   d/ddy = fprop(g, w)       d/dw  = wgrad(g, dy)
    wgrad(x, dy):   d/dx = dgrad(dy, g)       d/ddy = fprop(x, g)

with the other input conjugated where it is complex. fprop and dgrad (which is also the transposed convolution) take an
epilogue of bias, residual and activation. Padding is given as low and high of each axis, flat.

They are defined with ``torch.library.Library`` rather than ``custom_op``, which costs a call about 10 us more, and
registered for fake tensors, autograd, autocast and vmap. :func:`fprop`, :func:`dgrad` and :func:`wgrad` pass them over
where nobody but autograd looks on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .epilogue import IDENTITY, Epilogue
from .evaluate import activate
from .plan import Plan, device_of, plan_cache, plan_for, remember
from .problem import Problem, output_size
from .select import Policy, current_policy
from .tensors import NAMES, in_layout, layout_of

__all__ = [
    "dgrad",
    "epilogue_of",
    "fprop",
    "grad_wanted",
    "plain",
    "plan_pass",
    "problem_of",
    "tracked",
    "transforming",
    "undisturbed",
    "watched",
    "wgrad",
]

Ints = Sequence[int]

_library = torch.library.Library("openconv", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_library.define(
    f"fprop(Tensor x, Tensor w, Tensor? bias, Tensor? residual, {_GEOMETRY}, str activation, str policy) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "dgrad(Tensor dy, Tensor w, Tensor? bias, Tensor? residual, SymInt[] size, "
    f"{_GEOMETRY}, str activation, str policy) -> Tensor",
    tags=_TAGS,
)
_library.define(f"wgrad(Tensor x, Tensor dy, SymInt[] filter, {_GEOMETRY}, str policy) -> Tensor", tags=_TAGS)

_fprop_op = torch.ops.openconv.fprop.default
_dgrad_op = torch.ops.openconv.dgrad.default
_wgrad_op = torch.ops.openconv.wgrad.default


def fprop(*args: Any) -> Tensor:
    """``torch.ops.openconv.fprop``, by the shortest way."""
    return _call(_fprop_op, _fprop, _Fprop, _FpropTransformed, args, 4)


def dgrad(*args: Any) -> Tensor:
    """``torch.ops.openconv.dgrad``, by the shortest way."""
    return _call(_dgrad_op, _dgrad, _Dgrad, _DgradTransformed, args, 4)


def wgrad(*args: Any) -> Tensor:
    """``torch.ops.openconv.wgrad``, by the shortest way."""
    return _call(_wgrad_op, _wgrad, _Wgrad, _WgradTransformed, args, 2)


def _call(op: Any, run: Any, tracked: Any, transformed: Any, args: tuple[Any, ...], tensors: int) -> Tensor:
    """One pass. Plain tensors need no dispatcher, which costs a registered Python operator 30 us, and 60 more where a
    gradient is wanted. functorch and forward-mode differentiation pass over the autograd formulas of registered
    operators, and take those of an autograd.Function."""
    out: Tensor
    given = [t for t in args[:tensors] if t is not None]
    if torch.compiler.is_compiling():
        out = op(*args)
    elif undisturbed() and all(map(plain, given)):
        out = (tracked.apply if grad_wanted(given) else run)(*args)
    elif transforming():
        out = transformed.apply(*_cast(args, given[0].device.type))
    else:
        out = op(*args)
    return out


# -- what stands between a call and its engine ----------------------------------------------------------------------

_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_autocasting = torch._C._is_any_autocast_enabled
_profiling = torch.autograd._profiler_enabled
_tracing = torch._C._is_tracing
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = (Tensor, torch.nn.Parameter)


def undisturbed() -> bool:
    """No mode, transform, autocast, profiler or tracer wants to see the operators."""
    return not (_dispatch_modes() or _functorch_active() or _autocasting() or _tracing() or watched())


def watched() -> bool:
    """What :func:`undisturbed` asks for beyond the state of PyTorch's dispatcher."""
    return bool(_function_modes() or _profiling() or forward_ad._current_level >= 0)


def transforming() -> bool:
    """functorch or forward-mode differentiation is at work."""
    return _functorch_active() or forward_ad._current_level >= 0


def plain(tensor: Any) -> bool:
    """A tensor of the CPU or a GPU, no subclass of it, whose memory holds its values."""
    return (
        type(tensor) in _PLAIN
        and (tensor.is_cuda or tensor.is_cpu)
        and not (tensor.is_neg() or tensor.is_conj() or _wrapped(tensor))  # functorch's can outlive its transforms
    )


def grad_wanted(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd has to know of an operation on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # a third of the time of any()
            if tensor is not None and tensor.requires_grad:
                return True
    return False


# -- from tensors to a plan -------------------------------------------------------------------------------------


def epilogue_of(bias: bool, residual: bool, activation: str) -> Epilogue:
    """acc, then + bias, then + residual, then the activation, as far as they are there."""
    epilogue = IDENTITY
    if bias:
        epilogue = epilogue.bias()
    if residual:
        epilogue = epilogue.residual()
    return epilogue.activation(activation) if activation else epilogue


def problem_of(
    direction: str, a: Tensor, b: Tensor, *, size: Ints, filter: Ints, stride: Ints, padding: Ints, dilation: Ints,
    groups: int, precision: str = "ieee", epilogue: Epilogue = IDENTITY,
) -> Problem:  # fmt: skip
    """The Problem of one pass over two tensors; ``size`` is the spatial size of x, ``filter`` that of w."""
    image = a.shape[1]
    if direction == "fprop":
        c, k, dtype = image, b.shape[0], a.dtype
    elif direction == "dgrad":
        c, k, dtype = b.shape[1] * groups, image, a.dtype
    else:
        c, k, dtype = image, b.shape[1], a.dtype
    layouts = [layout_of(a), layout_of(b)]
    # As in torch, one channels_last input is enough for a channels_last result.
    images = "nhwc" if "nhwc" in layouts and a.dim() > 3 else "nchw"
    # A filter of one channel or one tap is in both layouts: it is named after the images, as in the tuning database.
    w_layout = images if direction == "wgrad" or in_layout(b, images) else layouts[1]
    return Problem(
        direction=direction, n=a.shape[0], c=c, k=k, spatial=tuple(size), filter=tuple(filter), stride=tuple(stride),
        padding=tuple(zip(padding[::2], padding[1::2], strict=True)), dilation=tuple(dilation), groups=groups,
        dtypes=(NAMES[dtype],) * 3, layouts=(images, w_layout, images), precision=precision, epilogue=epilogue,
    )  # fmt: skip


_plans: dict[Any, Plan] = plan_cache()
_BACKWARD = "backward:"


def plan_pass(
    direction: str, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, size: Ints | None,
    filter: Ints | None, stride: Ints, padding: Ints, dilation: Ints, groups: int, activation: str, policy: str,
) -> Plan:  # fmt: skip
    """The plan of one pass over these tensors, looked up by what their metadata says before anything is validated.

    ``policy`` is what the call itself asks for; the policy in force where it runs fills in the rest.
    """
    key = (
        direction, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device,
        bias if bias is None else (bias.shape, bias.dtype, bias.device),
        residual if residual is None else (residual.shape, residual.dtype, residual.device),
        size and tuple(size), filter and tuple(filter), tuple(stride), tuple(padding), tuple(dilation), groups,
        activation, policy, current_policy(), torch.get_num_threads(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if a.dtype not in NAMES or a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise NotImplementedError(f"openconv.{direction} is not implemented for {a.dtype} on {a.device.type}")
        tensors = [t for t in (a, b, bias, residual) if t is not None]
        if len({(t.dtype, t.device) for t in tensors}) > 1:
            seen = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
            raise RuntimeError(f"openconv.{direction}: the tensors are {seen}; wanted the same dtype and device")
        limits = Policy.parse(policy.removeprefix(_BACKWARD)).over(current_policy())
        if policy.startswith(_BACKWARD):
            limits = limits.for_backward()
        problem = problem_of(
            direction, a, b, size=a.shape[2:] if size is None else size,
            filter=b.shape[2:] if filter is None else filter, stride=stride, padding=padding, dilation=dilation,
            groups=groups, precision=limits.precision or "ieee",
            epilogue=epilogue_of(bias is not None, residual is not None, activation),
        )  # fmt: skip
        expected = {"fprop": (problem.x_shape, problem.w_shape), "dgrad": (problem.y_shape, problem.w_shape),
                    "wgrad": (problem.x_shape, problem.y_shape)}[direction]  # fmt: skip
        if (tuple(a.shape), tuple(b.shape)) != expected:
            raise RuntimeError(f"openconv.{direction}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit "
                               f"'{problem}'; wanted {expected[0]} and {expected[1]}")  # fmt: skip
        wanted = {"bias": (problem.result_channels,), "residual": problem.result_shape}
        for name, operand in (("bias", bias), ("residual", residual)):
            if operand is not None and operand.shape != wanted[name]:
                seen = f"{name} has shape {tuple(operand.shape)}"
                raise RuntimeError(f"openconv.{direction}: {seen}; wanted {wanted[name]}")
        if limits.tuning == "measure":
            from .autotune import tuned_plan  # with all that measuring takes

            plan = tuned_plan(problem, device_of(a.device), a.device, limits)
        else:
            plan = plan_for(problem, device_of(a.device), limits)
        if plan.policy == limits:
            remember(_plans, key, plan)
    return plan


def _operands(bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in (bias, residual) if t is not None)


def _fprop(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Ints, padding: Ints,
           dilation: Ints, groups: int, activation: str, policy: str) -> Tensor:  # fmt: skip
    plan = plan_pass("fprop", x, w, bias, residual, None, None, stride, padding, dilation, groups, activation, policy)
    return plan.call(x, w, _operands(bias, residual))


def _dgrad(dy: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, size: Ints, stride: Ints,
           padding: Ints, dilation: Ints, groups: int, activation: str, policy: str) -> Tensor:  # fmt: skip
    plan = plan_pass("dgrad", dy, w, bias, residual, size, None, stride, padding, dilation, groups, activation, policy)
    return plan.call(dy, w, _operands(bias, residual))


def _wgrad(x: Tensor, dy: Tensor, filter: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int,
           policy: str) -> Tensor:  # fmt: skip
    plan = plan_pass("wgrad", x, dy, None, None, None, filter, stride, padding, dilation, groups, "", policy)
    return plan.call(x, dy, ())


for _name, _function in (("fprop", _fprop), ("dgrad", _dgrad), ("wgrad", _wgrad)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)


# -- fake tensors ------------------------------------------------------------------------------------------------


def _like(a: Tensor, b: Tensor, shape: Sequence[Any]) -> Tensor:
    """An empty result with the strides that the plan gives it."""
    out = a.new_empty(shape)
    if a.dim() > 3 and "nhwc" in (layout_of(a), layout_of(b)):
        out = out.to(memory_format=torch.channels_last if a.dim() == 4 else torch.channels_last_3d)
    return out


@torch.library.register_fake("openconv::fprop", lib=_library)
def _fprop_fake(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, stride: Ints, padding: Ints,
                dilation: Ints, groups: int, activation: str, policy: str) -> Tensor:  # fmt: skip
    axes = range(x.dim() - 2)
    out = [output_size(x.shape[2 + i], w.shape[2 + i], stride[i], padding[2 * i], padding[2 * i + 1], dilation[i])
           for i in axes]  # fmt: skip
    return _like(x, w, (x.shape[0], w.shape[0], *out))


@torch.library.register_fake("openconv::dgrad", lib=_library)
def _dgrad_fake(dy: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, size: Ints, stride: Ints,
                padding: Ints, dilation: Ints, groups: int, activation: str, policy: str) -> Tensor:  # fmt: skip
    return _like(dy, w, (dy.shape[0], w.shape[1] * groups, *size))


@torch.library.register_fake("openconv::wgrad", lib=_library)
def _wgrad_fake(x: Tensor, dy: Tensor, filter: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int,
                policy: str) -> Tensor:  # fmt: skip
    return _like(x, dy, (dy.shape[1], x.shape[1] // groups, *filter))


# -- autograd ----------------------------------------------------------------------------------------------------


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _backward_policy(policy: str) -> str:
    # Marked here and read where the pass is planned, with the policy in force there taken into account.
    return policy if policy.startswith(_BACKWARD) else _BACKWARD + policy


def _tangent(ctx: Any, run: Callable[..., Tensor], da: Tensor, dw: Tensor, dbias: Tensor | None,
             dresidual: Tensor | None) -> Tensor:  # fmt: skip
    """The directional derivative of fprop or dgrad; ``run`` is the pass without its activation."""
    a, w, bias, residual = ctx.saved_tensors
    tangent = run(da, w, dbias, dresidual) + run(a, dw, None, None)
    # An activation acts on each element alone, so that its derivative is its own transpose.
    return _before_activation(ctx, tangent.conj(), lambda: run(a, w, bias, residual)).conj()


def _before_activation(ctx: Any, grad: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """The gradient in front of the activation; its input is computed again, since only the result was kept."""
    if not ctx.activation:
        return grad
    pullback: Any = torch.func.vjp(partial(activate, ctx.activation), value())[1]
    return pullback(grad)[0]


def _operand_grads(needed: Sequence[bool], grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of bias and residual."""
    return grad.sum([0, *range(2, grad.dim())]) if needed[2] else None, grad if needed[3] else None


def _fprop_grads(needed: Sequence[bool], x: Tensor, w: Tensor, grad: Tensor, geometry: Any, policy: str) -> Any:
    """Of x, w, bias and residual, as far as they are needed; ``grad`` is that in front of the activation."""
    dx = dgrad(grad, w.conj(), None, None, x.shape[2:], *geometry, "", policy) if needed[0] else None
    dw = wgrad(x.conj(), grad, w.shape[2:], *geometry, policy) if needed[1] else None
    return dx, dw, *_operand_grads(needed, grad)


def _dgrad_grads(needed: Sequence[bool], dy: Tensor, w: Tensor, grad: Tensor, geometry: Any, policy: str) -> Any:
    """Of dy, w, bias and residual, likewise."""
    ddy = fprop(grad, w.conj(), None, None, *geometry, "", policy) if needed[0] else None
    dw = wgrad(grad, dy.conj(), w.shape[2:], *geometry, policy) if needed[1] else None
    return ddy, dw, *_operand_grads(needed, grad)


def _fprop_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, bias, residual, *ctx.geometry, ctx.activation, policy = inputs
    ctx.policy = _backward_policy(policy)
    _save(ctx, x, w, *((bias, residual) if ctx.activation else (None, None)))


def _fprop_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, bias, residual = ctx.saved_tensors
    grad = _before_activation(ctx, grad, lambda: fprop(x, w, bias, residual, *ctx.geometry, "", ctx.policy))
    return *_fprop_grads(ctx.needs_input_grad, x, w, grad, ctx.geometry, ctx.policy), *(None,) * 6


def _fprop_jvp(ctx: Any, dx: Tensor, dw: Tensor, dbias: Tensor | None, dresidual: Tensor | None, *_: None) -> Tensor:
    return _tangent(ctx, lambda *tensors: fprop(*tensors, *ctx.geometry, "", ctx.policy), dx, dw, dbias, dresidual)


def _dgrad_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    dy, w, bias, residual, ctx.size, *ctx.geometry, ctx.activation, policy = inputs
    ctx.policy = _backward_policy(policy)
    _save(ctx, dy, w, *((bias, residual) if ctx.activation else (None, None)))


def _dgrad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dy, w, bias, residual = ctx.saved_tensors
    grad = _before_activation(ctx, grad, lambda: dgrad(dy, w, bias, residual, ctx.size, *ctx.geometry, "", ctx.policy))
    return *_dgrad_grads(ctx.needs_input_grad, dy, w, grad, ctx.geometry, ctx.policy), *(None,) * 7


def _dgrad_jvp(ctx: Any, ddy: Tensor, dw: Tensor, dbias: Tensor | None, dresidual: Tensor | None, *_: None) -> Tensor:
    run = lambda *tensors: dgrad(*tensors, ctx.size, *ctx.geometry, "", ctx.policy)  # noqa: E731
    return _tangent(ctx, run, ddy, dw, dbias, dresidual)


def _wgrad_setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, dy, ctx.filter, *ctx.geometry, policy = inputs
    ctx.policy = _backward_policy(policy)
    _save(ctx, x, dy)


def _wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, dy = ctx.saved_tensors
    dx = ddy = None
    if ctx.needs_input_grad[0]:
        dx = dgrad(dy.conj(), grad, None, None, x.shape[2:], *ctx.geometry, "", ctx.policy)
    if ctx.needs_input_grad[1]:
        ddy = fprop(x.conj(), grad, None, None, *ctx.geometry, "", ctx.policy)
    return dx, ddy, *(None,) * 6


def _wgrad_jvp(ctx: Any, dx: Tensor, ddy: Tensor, *_: None) -> Tensor:
    x, dy = ctx.saved_tensors
    return wgrad(dx, dy, ctx.filter, *ctx.geometry, ctx.policy) + wgrad(x, ddy, ctx.filter, *ctx.geometry, ctx.policy)


torch.library.register_autograd("openconv::fprop", _fprop_backward, setup_context=_fprop_setup, lib=_library)
torch.library.register_autograd("openconv::dgrad", _dgrad_backward, setup_context=_dgrad_setup, lib=_library)
torch.library.register_autograd("openconv::wgrad", _wgrad_backward, setup_context=_wgrad_setup, lib=_library)


# -- autocast ----------------------------------------------------------------------------------------------------


def _cast(args: Sequence[Any], device: str) -> Sequence[Any]:
    """The arguments in the dtype of autocast, where it is on; float64 keeps its precision, as in torch."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return args
    dtype = torch.get_autocast_dtype(device)

    def cast(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible and value.device.type == device else value

    return [cast(arg) for arg in args]


def _autocast(op: Callable[..., Tensor], device: str, key: str) -> Callable[..., Tensor]:
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def call(*args: Any) -> Tensor:
        cast = _cast(args, device)
        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return op(*cast)

    return call


for _name, _op in (("fprop", _fprop_op), ("dgrad", _dgrad_op), ("wgrad", _wgrad_op)):
    for _device in ("cpu", "cuda"):
        _key = f"Autocast{_device.upper()}"
        _library.impl(_name, _autocast(_op, _device, _key), _key)


# -- vmap --------------------------------------------------------------------------------------------------------
# A mapped axis B joins the batch where the filter is shared; where it is not, it joins the groups:
# (N, B*C) * (B*K, C/G) in B*G groups.


def _front(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _into_batch(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    return None if tensor is None else _front(tensor, dim, size).flatten(0, 1)


def _into_channels(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return _front(tensor, dim, size).transpose(0, 1).flatten(1, 2)


def _vmap_image(op: Callable[..., Tensor]) -> Callable[..., Any]:
    """The rule of fprop and dgrad alike."""

    def rule(info: Any, in_dims: Any, a: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None,
             *rest: Any) -> tuple[Tensor, int]:  # fmt: skip
        size = info.batch_size
        a_dim, w_dim, bias_dim, residual_dim, *_ = in_dims
        *geometry, groups, activation, policy = rest
        if w_dim is None and bias_dim is None:
            out = op(_into_batch(a, a_dim, size), w, bias, _into_batch(residual, residual_dim, size), *rest)
            return out.unflatten(0, (size, -1)), 0
        vector = None if bias is None else _front(bias, bias_dim, size).flatten()
        added = None if residual is None else _into_channels(residual, residual_dim, size)
        out = op(_into_channels(a, a_dim, size), _into_batch(w, w_dim, size), vector, added,
                 *geometry, groups * size, activation, policy)  # fmt: skip
        return out.unflatten(1, (size, -1)), 1

    return rule


def _vmap_wgrad(info: Any, in_dims: Any, x: Tensor, dy: Tensor, filter: Ints, stride: Ints, padding: Ints,
                dilation: Ints, groups: int, policy: str) -> tuple[Tensor, int]:  # fmt: skip
    size = info.batch_size
    out = wgrad(_into_channels(x, in_dims[0], size), _into_channels(dy, in_dims[1], size), filter, stride, padding,
                dilation, groups * size, policy)  # fmt: skip
    return out.unflatten(0, (size, -1)), 0


_vmap_fprop, _vmap_dgrad = _vmap_image(fprop), _vmap_image(dgrad)
torch.library.register_vmap("openconv::fprop", _vmap_fprop, lib=_library)
torch.library.register_vmap("openconv::dgrad", _vmap_dgrad, lib=_library)
torch.library.register_vmap("openconv::wgrad", _vmap_wgrad, lib=_library)


# -- autograd.Functions --------------------------------------------------------------------------------------------


def _tracked(name: str, run: Callable[..., Tensor], setup: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """The pass on plain tensors, known to autograd and to nobody else."""

    def forward(ctx: Any, *args: Any) -> Tensor:
        out = run(*args)
        setup(ctx, args, out)
        return out

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"Openconv{name}", (torch.autograd.Function,), body)


_Fprop = _tracked("Fprop", _fprop, _fprop_setup, _fprop_backward)
_Dgrad = _tracked("Dgrad", _dgrad, _dgrad_setup, _dgrad_backward)
_Wgrad = _tracked("Wgrad", _wgrad, _wgrad_setup, _wgrad_backward)


def tracked(compute: Callable[..., Tensor], direction: str, geometry: Any, policy: str) -> Callable[..., Tensor]:
    """``compute(a, w, bias, residual)``, a planned fprop or dgrad of plain tensors without its activation, known to
    autograd.

    It is a Function of its own: what is handed through autograd at each call, or kept in its context, takes time.
    ``Function.apply`` looks for functorch before it calls the one below it, which costs as much as the rest: who calls
    this has looked already.
    """
    grads = _fprop_grads if direction == "fprop" else _dgrad_grads
    policy = _backward_policy(policy)

    def forward(ctx: Any, a: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, w)
        return compute(a, w, bias, residual)

    def backward(ctx: Any, grad: Tensor) -> Any:
        a, w = ctx.saved_tensors
        return grads(ctx.needs_input_grad, a, w, grad, geometry, policy)

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(f"OpenconvPlanned{direction.title()}", (torch.autograd.Function,), body)
    apply: Callable[..., Tensor] = super(torch.autograd.Function, function).apply
    return apply


class _FpropTransformed(torch.autograd.Function):
    """fprop for functorch; likewise the two below."""

    forward = staticmethod(lambda *args: _fprop_op(*args))
    setup_context = staticmethod(_fprop_setup)
    backward = staticmethod(_fprop_backward)
    jvp = staticmethod(_fprop_jvp)
    vmap = staticmethod(_vmap_fprop)


class _DgradTransformed(torch.autograd.Function):
    forward = staticmethod(lambda *args: _dgrad_op(*args))
    setup_context = staticmethod(_dgrad_setup)
    backward = staticmethod(_dgrad_backward)
    jvp = staticmethod(_dgrad_jvp)
    vmap = staticmethod(_vmap_dgrad)


class _WgradTransformed(torch.autograd.Function):
    forward = staticmethod(lambda *args: _wgrad_op(*args))
    setup_context = staticmethod(_wgrad_setup)
    backward = staticmethod(_wgrad_backward)
    jvp = staticmethod(_wgrad_jvp)
    vmap = staticmethod(_vmap_wgrad)
