"""What torch's functions and methods are in a graph, by their names, with torch's arguments.

A function here is given the :class:`~openconv.graph.trace.Trace` and then what torch would be given; tensors among that
are traced ones or plain ones, which become inputs. A name that is missing here is refused where it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..epilogue import Epilogue, Node
from ..tensors import ALL_DTYPES, ALL_NAMES
from .ir import GraphTensor
from .operations import per_axis

if TYPE_CHECKING:
    from .trace import Trace, Traced

__all__ = ["FUNCTIONS"]

_Function = Callable[..., Any]
_FORMATS = {torch.contiguous_format: "nchw", torch.channels_last: "nhwc", torch.channels_last_3d: "nhwc"}


def _like(value: Any) -> Any:
    """What torch goes by when it mixes dtypes: a number, or the dtype of a tensor with axes or without."""
    if isinstance(value, GraphTensor):
        return torch.empty((1,) * min(value.dim(), 1), dtype=ALL_DTYPES[value.dtype], device="meta")
    return value


def _mixed(a: Any, b: Any) -> str:
    return ALL_NAMES[torch.result_type(_like(a), _like(b))]


def _is_float(dtype: str) -> bool:
    return ALL_DTYPES[dtype].is_floating_point


def _axis(value: int, axes: int, what: str = "dim") -> int:
    if not isinstance(value, int) or not -max(axes, 1) <= value < max(axes, 1):
        raise IndexError(f"{what} is {value}; wanted {-axes} to {axes - 1}")
    return value + axes if value < 0 else value


def _axes(value: Any, axes: int) -> tuple[int, ...] | None:
    if value is None or value == () or value == []:
        return None
    return tuple(_axis(each, axes) for each in (value if isinstance(value, Sequence) else (value,)))


def _flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes, given one by one or as one sequence."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], Sequence) else values


# -- one value --------------------------------------------------------------------------------------------------------


def _unary(op: str) -> _Function:
    def function(trace: Trace, input: Any, inplace: bool = False) -> Traced:
        return trace.result(trace.graph.pointwise(op, trace.tensor(input)), input, inplace)

    return function


def _leaky_relu(trace: Trace, input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Traced:
    return trace.result(trace.graph.leaky_relu(trace.tensor(input), negative_slope), input, inplace)


def _elu(trace: Trace, input: Any, alpha: float = 1.0, inplace: bool = False) -> Traced:
    return trace.result(trace.graph.elu(trace.tensor(input), alpha), input, inplace)


def _gelu(trace: Trace, input: Any, *, approximate: str = "none") -> Traced:
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"gelu: approximate is {approximate!r}; wanted 'none' or 'tanh'")
    op = "gelu" if approximate == "none" else "gelu_tanh"
    return trace.result(trace.graph.pointwise(op, trace.tensor(input)))


def _softplus(trace: Trace, input: Any, beta: float = 1, threshold: float = 20) -> Traced:
    x = trace.tensor(input)
    value = trace.graph.softplus(x, float(beta))
    if threshold != 20 or x.dtype == "f64":  # else the difference is less than a rounding
        large = trace.graph.cmp_gt(trace.graph.mul(x, float(beta)), float(threshold))
        value = trace.graph.select(large, x, value)
    return trace.result(value)


def _hardtanh(trace: Trace, input: Any, min_val: float = -1, max_val: float = 1, inplace: bool = False) -> Traced:
    return trace.result(trace.graph.clamp(trace.tensor(input), min_val, max_val), input, inplace)


def _relu6(trace: Trace, input: Any, inplace: bool = False) -> Traced:
    return _hardtanh(trace, input, 0, 6, inplace)


def _hardsigmoid(trace: Trace, input: Any, inplace: bool = False) -> Traced:
    g = trace.graph
    return trace.result(g.clamp(g.add(g.mul(trace.tensor(input), 1 / 6), 0.5), 0, 1), input, inplace)


def _mish(trace: Trace, input: Any, inplace: bool = False) -> Traced:
    x = trace.tensor(input)
    return trace.result(trace.graph.mul(x, trace.graph.tanh(trace.graph.softplus(x, 1.0))), input, inplace)


def _celu(trace: Trace, input: Any, alpha: float = 1.0, inplace: bool = False) -> Traced:
    g, x = trace.graph, trace.tensor(input)
    return trace.result(g.mul(g.elu(g.mul(x, 1 / alpha), 1.0), alpha), input, inplace)


def _selu(trace: Trace, input: Any, inplace: bool = False) -> Traced:
    alpha, scale = 1.6732632423543772, 1.0507009873554805  # those that torch's documentation gives
    return trace.result(trace.graph.mul(trace.graph.elu(trace.tensor(input), alpha), scale), input, inplace)


def _prelu(trace: Trace, input: Any, weight: Any) -> Traced:
    g, x, slope = trace.graph, trace.tensor(input), trace.tensor(weight)
    if x.dim() > 2 and slope.size > 1:
        slope = g.reshape(slope, (1, -1, *(1,) * (x.dim() - 2)))
    return trace.result(g.select(g.cmp_gt(x, 0.0), x, g.mul(x, slope)), input)


def _square(trace: Trace, input: Any) -> Traced:
    x = trace.tensor(input)
    return trace.result(trace.graph.mul(x, x))


def _dropout(trace: Trace, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Traced:
    if training and p:
        raise NotImplementedError(
            f"dropout: p is {p} in training, and graphs draw no random numbers; wanted training=False"
        )
    return trace.traced(trace.tensor(input))


def _detach(trace: Trace, input: Any) -> Traced:
    trace.without_gradient = "detach"
    return trace.traced(trace.tensor(input))


def _same(trace: Trace, input: Any, **_: Any) -> Traced:
    return trace.traced(trace.tensor(input))


# -- two and more values ----------------------------------------------------------------------------------------------


def _binary(op: str, swapped: bool = False) -> _Function:
    def function(trace: Trace, input: Any, other: Any, *, alpha: float = 1) -> Traced:
        a, b = trace.value(input), trace.value(other)
        dtype = _mixed(a, b)
        if op in ("div", "atan2") and not _is_float(dtype):
            dtype = "f32"
        if alpha != 1:
            b = trace.graph.mul(b, alpha) if isinstance(b, GraphTensor) else b * alpha
        return trace.result(trace.graph.pointwise(op, *((b, a) if swapped else (a, b)), dtype=dtype))

    return function


def _compare(op: str) -> _Function:
    def function(trace: Trace, input: Any, other: Any) -> Traced:
        return trace.result(trace.graph.pointwise(op, trace.value(input), trace.value(other)))

    return function


def _div(trace: Trace, input: Any, other: Any, *, rounding_mode: str | None = None) -> Traced:
    if rounding_mode is not None:
        raise NotImplementedError(f"div: rounding_mode is {rounding_mode!r}; graphs have None alone")
    made: Traced = _binary("div")(trace, input, other)
    return made


def _pow(trace: Trace, input: Any, exponent: Any) -> Traced:
    g, a, b = trace.graph, trace.value(input), trace.value(exponent)
    dtype = _mixed(a, b)
    if isinstance(a, GraphTensor) and isinstance(b, int | float) and b in (1, 2, 3):
        value = a
        for _ in range(int(b) - 1):
            value = g.pointwise("mul", value, a, dtype=dtype)
        return trace.result(value if value.dtype == dtype else g.cast(value, dtype))
    if isinstance(a, GraphTensor) and b in (0.5, -0.5, -1) and isinstance(b, int | float) and _is_float(a.dtype):
        return trace.result(g.pointwise({0.5: "sqrt", -0.5: "rsqrt"}.get(b, "reciprocal"), a))
    return trace.result(g.pointwise("pow", a, b, dtype=dtype))


def _greatest(mode: str) -> _Function:
    """torch.max and torch.min: of all values, or of two tensors; with ``dim`` they would give places, too."""

    def function(trace: Trace, input: Any, other: Any = None, **more: Any) -> Any:
        if other is None and not more:
            return _reduction(mode)(trace, input)
        if more or isinstance(other, int):
            raise NotImplementedError(f"{mode} along a dim gives places, which graphs have not; there is a{mode}")
        return _binary(mode)(trace, input, other)

    return function


def _clamp(trace: Trace, input: Any, min: Any = None, max: Any = None) -> Traced:
    if min is None and max is None:
        raise RuntimeError("clamp: min and max are None; wanted one of them at least")
    value = trace.tensor(input)
    if all(end is None or isinstance(end, int | float) for end in (min, max)):
        low, high = -math.inf if min is None else min, math.inf if max is None else max
        whole = not _is_float(value.dtype) and all(end is None or isinstance(end, int) for end in (min, max))
        if _is_float(value.dtype) or whole:
            return trace.result(trace.graph.clamp(value, low, high))
    made = trace.traced(value)
    for op, end in (("max", min), ("min", max)):
        made = made if end is None else _binary(op)(trace, made, end)
    return made


def _where(trace: Trace, condition: Any, input: Any, other: Any) -> Traced:
    a, b = trace.value(input), trace.value(other)
    made = trace.graph.pointwise("select", trace.tensor(condition), a, b, dtype=_mixed(a, b))
    return trace.result(made)


def _masked_fill(trace: Trace, input: Any, mask: Any, value: Any) -> Traced:
    x = trace.tensor(input)
    made = trace.graph.pointwise("select", trace.tensor(mask), trace.value(value), x, dtype=x.dtype)
    return trace.result(made)


# -- matrices ---------------------------------------------------------------------------------------------------------


def _matmul(trace: Trace, input: Any, other: Any) -> Traced:
    g, a, b = trace.graph, trace.tensor(input), trace.tensor(other)
    left, right = a.dim() == 1, b.dim() == 1
    a = g.reshape(a, (1, -1)) if left else a
    b = g.reshape(b, (-1, 1)) if right else b
    value = g.matmul(a, b)
    if left or right:
        shape = list(value.shape)
        if right:
            shape.pop()
        if left:
            shape.pop(-1 if right else -2)
        value = g.reshape(value, shape)
    return trace.result(value)


def _square_matmul(name: str, axes: int) -> _Function:
    def function(trace: Trace, input: Any, other: Any) -> Traced:
        for value in (trace.tensor(input), trace.tensor(other)):
            if value.dim() != axes:
                raise RuntimeError(f"{name}: a tensor has shape {value.shape}; wanted {axes} axes")
        return _matmul(trace, input, other)

    return function


def _linear(trace: Trace, input: Any, weight: Any, bias: Any = None) -> Traced:
    g, x, w = trace.graph, trace.tensor(input), trace.tensor(weight)
    if w.dim() != 2:
        raise RuntimeError(f"linear: weight has shape {w.shape}; wanted (out, in)")
    shape = x.shape
    if x.dim() == 1:
        x = g.reshape(x, (1, -1))
    value = g.matmul(x, g.transpose(w, (1, 0)))
    if bias is not None:
        value = g.pointwise("add", value, trace.tensor(bias), dtype=value.dtype)
    return trace.result(g.reshape(value, (w.shape[0],)) if len(shape) == 1 else value)


def _addmm(trace: Trace, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Traced:
    g, value = trace.graph, trace.graph.matmul(trace.tensor(mat1), trace.tensor(mat2))
    value = value if alpha == 1 else g.mul(value, alpha)
    if beta:
        bias = trace.tensor(input)
        value = g.pointwise("add", value, bias if beta == 1 else g.mul(bias, beta), dtype=value.dtype)
    return trace.result(value)


# -- convolutions -----------------------------------------------------------------------------------------------------


def _batched(trace: Trace, name: str, input: Any, rank: int) -> tuple[GraphTensor, bool]:
    """(N, C, ...) of what may be (C, ...)."""
    x = trace.tensor(input)
    if x.dim() not in (rank + 1, rank + 2):
        raise RuntimeError(f"{name}: input has shape {x.shape}; wanted {rank + 1} axes (unbatched) or {rank + 2}")
    return (x, True) if x.dim() == rank + 2 else (trace.graph.reshape(x, (1, *x.shape)), False)


def _unbatched(trace: Trace, value: GraphTensor, batched: bool) -> Traced:
    return trace.result(value if batched else trace.graph.reshape(value, value.shape[1:]))


def _finished(
    trace: Trace, name: str, value: GraphTensor, bias: Any, batched: bool, activation: str | None, residual: Any,
    limits: dict[str, Any],
) -> Traced:  # fmt: skip
    given = {key: each for key, each in limits.items() if each is not None}
    unknown = set(given) - {"engine", "precision", "accuracy", "max_workspace"}
    if unknown:
        raise TypeError(f"{name} has no argument {', '.join(sorted(unknown))}")
    if given:
        raise NotImplementedError(
            f"{name}: {', '.join(given)} of one call; a graph has one policy: openconv.jit(policy=openconv.Policy(...))"
        )
    g = trace.graph
    value = value if bias is None else g.bias(value, trace.tensor(bias))
    if residual is not None:
        other = trace.tensor(residual)
        if not batched and other.dim() == value.dim() - 1:
            other = g.reshape(other, (1, *other.shape))
        value = g.pointwise("add", value, other, dtype=value.dtype)
    if activation:
        step = Epilogue().activation(activation).expr
        assert isinstance(step, Node)
        value = g.pointwise(step.op, value, params=step.params)
    return _unbatched(trace, value, batched)


def _convolution(rank: int) -> _Function:
    name = f"conv{rank}d"

    def function(
        trace: Trace, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, *, activation: str | None = None, residual: Any = None, **limits: Any,
    ) -> Traced:  # fmt: skip
        x, batched = _batched(trace, name, input, rank)
        w = trace.tensor(weight)
        if isinstance(padding, str):
            if padding not in ("same", "valid"):
                raise RuntimeError(f"{name}: padding is {padding!r}; wanted 'same', 'valid' or integers")
            steps = per_axis(name, "dilation", dilation, rank, 1)
            total = [step * (taps - 1) for step, taps in zip(steps, w.shape[2:], strict=True)]
            if padding == "same" and any(v != 1 for v in per_axis(name, "stride", stride, rank, 1)):
                raise RuntimeError(f"{name}: padding='same' is not supported for strided convolutions, got {stride}")
            padding = [(t // 2, t - t // 2) if padding == "same" else (0, 0) for t in total]
        value = trace.graph.conv_fprop(x, w, padding=padding, stride=stride, dilation=dilation, groups=groups)
        return _finished(trace, name, value, bias, batched, activation, residual, limits)

    return function


def _transposed(rank: int) -> _Function:
    name = f"conv_transpose{rank}d"

    def function(
        trace: Trace, input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1, *, activation: str | None = None,
        residual: Any = None, **limits: Any,
    ) -> Traced:  # fmt: skip
        x, batched = _batched(trace, name, input, rank)
        w = trace.tensor(weight)
        axes = zip(
            x.shape[2:], w.shape[2:], per_axis(name, "stride", stride, rank, 1),
            per_axis(name, "padding", padding, rank, 0), per_axis(name, "dilation", dilation, rank, 1),
            per_axis(name, "output_padding", output_padding, rank, 0), strict=True,
        )  # fmt: skip
        size = [(n - 1) * step - 2 * pad + dil * (taps - 1) + 1 + more for n, taps, step, pad, dil, more in axes]
        value = trace.graph.conv_dgrad(
            w, x, padding=padding, stride=stride, dilation=dilation, groups=groups, output_size=size
        )
        return _finished(trace, name, value, bias, batched, activation, residual, limits)

    return function


# -- normalisation, pooling, reductions -------------------------------------------------------------------------------


def _batch_norm(
    trace: Trace, input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Traced:  # fmt: skip
    """In training the running values become outputs, which a call writes into the tensors that were given."""
    g, x = trace.graph, trace.tensor(input)
    if x.dim() < 2:
        raise RuntimeError(f"batch_norm: input has shape {x.shape}; wanted two axes or more")
    wide = torch.float64 if x.dtype == "f64" else torch.float32
    scale = trace.tensor(weight) if weight is not None else g.constant(torch.ones(x.shape[1], dtype=wide))
    shift = trace.tensor(bias) if bias is not None else g.constant(torch.zeros(x.shape[1], dtype=wide))
    known = running_mean is not None and running_var is not None
    if not training:
        if not known:
            raise RuntimeError("batch_norm: there are no running_mean and running_var; wanted both, or training=True")
        inverse = g.rsqrt(g.add(trace.tensor(running_var), eps))
        return trace.result(g.batchnorm_inference(x, scale, shift, trace.tensor(running_mean), inverse))
    mean, variance = (trace.tensor(each) if known else None for each in (running_mean, running_var))
    made = g.batchnorm(x, scale, shift, mean, variance, eps, momentum)
    if known:
        trace.overwrite(running_mean, trace.traced(made.running_mean))
        trace.overwrite(running_var, trace.traced(made.running_variance))
    return trace.result(made.y)


def _ceil_padding(x: GraphTensor, window: Any, stride: Any, padding: Any, name: str) -> list[tuple[int, int]]:
    """Padding with which windows that stick out are counted; none starts behind the tensor and its low padding."""
    rank = x.dim() - 2
    window = per_axis(name, "kernel_size", window, rank, 1)
    stride = window if stride is None else per_axis(name, "stride", stride, rank, 1)
    found = []
    for size, taps, step, pad in zip(
        x.shape[2:], window, stride, per_axis(name, "padding", padding, rank, 0), strict=True
    ):
        count = -(-(size + 2 * pad - taps) // step) + 1
        if (count - 1) * step >= size + pad:
            count -= 1
        found.append((pad, max(pad, (count - 1) * step + taps - size - pad)))
    return found


def _max_pool(rank: int) -> _Function:
    name = f"max_pool{rank}d"

    def function(
        trace: Trace, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Traced:  # fmt: skip
        if return_indices or any(v != 1 for v in per_axis(name, "dilation", dilation, rank, 1)):
            raise NotImplementedError(
                f"{name}: dilation is {dilation} and return_indices {return_indices}; graphs have 1 and False"
            )
        x, batched = _batched(trace, name, input, rank)
        stride = None if stride is None or stride == [] else stride
        pads = _ceil_padding(x, kernel_size, stride, padding, name) if ceil_mode else padding
        return _unbatched(trace, trace.graph.max_pool(x, kernel_size, stride, pads), batched)

    return function


def _avg_pool(rank: int) -> _Function:
    name = f"avg_pool{rank}d"

    def function(
        trace: Trace, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Traced:  # fmt: skip
        x, batched = _batched(trace, name, input, rank)
        stride = None if stride is None or stride == [] else stride
        pads: Any = padding
        if ceil_mode:
            pads = _ceil_padding(x, kernel_size, stride, padding, name)
            low = per_axis(name, "padding", padding, rank, 0)
            if count_include_pad and any(pair != (pad, pad) for pair, pad in zip(pads, low, strict=True)):
                raise NotImplementedError(
                    f"{name}: ceil_mode with windows that stick out; graphs have count_include_pad=False for them"
                )
        if divisor_override is not None:
            raise NotImplementedError(f"{name}: divisor_override is {divisor_override}; graphs have None alone")
        value = trace.graph.avg_pool(x, kernel_size, stride, pads, count_padding=count_include_pad)
        return _unbatched(trace, value, batched)

    return function


def _adaptive(mode: str, rank: int) -> _Function:
    name = f"adaptive_{mode}_pool{rank}d"

    def function(trace: Trace, input: Any, output_size: Any, return_indices: bool = False) -> Traced:
        x, batched = _batched(trace, name, input, rank)
        given = tuple(output_size) if isinstance(output_size, Sequence) else (output_size,) * rank
        sizes = [size if wanted is None else wanted for size, wanted in zip(x.shape[2:], given, strict=True)]
        if return_indices or any(wanted < 1 or size % wanted for size, wanted in zip(x.shape[2:], sizes, strict=True)):
            raise NotImplementedError(f"{name}: {x.shape[2:]} to {tuple(sizes)} with return_indices={return_indices}; "
                                      "graphs have windows of one size, and no indices")  # fmt: skip
        if all(size == 1 for size in sizes):
            value = trace.graph.reduction(x, mode, tuple(range(2, x.dim())))
        else:
            window = [size // wanted for size, wanted in zip(x.shape[2:], sizes, strict=True)]
            value = trace.graph.resample(x, mode, window)
        return _unbatched(trace, value, batched)

    return function


def _reduction(mode: str) -> _Function:
    def function(
        trace: Trace, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Traced:  # fmt: skip
        g, x = trace.graph, trace.tensor(input)
        if mode == "avg" and not _is_float(x.dtype if dtype is None else ALL_NAMES[dtype]):
            raise RuntimeError(f"mean: input is {x.dtype}; wanted a floating point dtype, of it or as dtype=")
        if dtype is not None:
            x = g.cast(x, dtype)
        elif mode in ("add", "mul") and not _is_float(x.dtype) and x.dtype != "i64":
            x = g.cast(x, "i64")
        return trace.result(g.reduction(x, mode, _axes(dim, x.dim()), keepdim))

    return function


def _softmax(trace: Trace, input: Any, dim: int, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    g, x = trace.graph, trace.tensor(input)
    x = x if dtype is None else g.cast(x, dtype)
    raised = g.exp(g.sub(x, g.reduction(x, "max", _axis(dim, x.dim()))))
    return trace.result(g.div(raised, g.reduction(raised, "add", _axis(dim, x.dim()))))


def _log_softmax(trace: Trace, input: Any, dim: int, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    g, x = trace.graph, trace.tensor(input)
    x = x if dtype is None else g.cast(x, dtype)
    less = g.sub(x, g.reduction(x, "max", _axis(dim, x.dim())))
    return trace.result(g.sub(less, g.log(g.reduction(g.exp(less), "add", _axis(dim, x.dim())))))


# -- shapes -----------------------------------------------------------------------------------------------------------


def _reshaped(trace: Trace, input: Any, shape: Sequence[int]) -> Traced:
    x = trace.tensor(input)
    if 0 in shape and x.size:
        raise RuntimeError(f"reshape: shape is {tuple(shape)}; input {x.shape} has {x.size} values")
    return trace.view(trace.graph.reshape(x, shape), input)


def _reshape(trace: Trace, input: Any, *shape: Any) -> Traced:
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise NotImplementedError("view as another dtype: graphs have none; there is to(dtype)")
    return _reshaped(trace, input, _flat(shape))


def _flatten(trace: Trace, input: Any, start_dim: int = 0, end_dim: int = -1) -> Traced:
    shape = trace.tensor(input).shape
    first, last = _axis(start_dim, len(shape)), _axis(end_dim, len(shape))
    if first > last:
        raise RuntimeError(f"flatten: start_dim is {start_dim} and end_dim {end_dim}; wanted the first before the last")
    return _reshaped(trace, input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def _unflatten(trace: Trace, input: Any, dim: int, sizes: Sequence[int]) -> Traced:
    shape = trace.tensor(input).shape
    at = _axis(dim, len(shape))
    known = math.prod(size for size in sizes if size != -1)
    split = [shape[at] // known if size == -1 and known else size for size in sizes]
    return _reshaped(trace, input, (*shape[:at], *split, *shape[at + 1 :]))


def _permute(trace: Trace, input: Any, *dims: Any) -> Traced:
    x = trace.tensor(input)
    order = tuple(_axis(axis, x.dim()) for axis in _flat(dims))
    return trace.view(trace.graph.transpose(x, order), input)


def _transpose(trace: Trace, input: Any, dim0: int, dim1: int) -> Traced:
    axes = trace.tensor(input).dim()
    order = list(range(axes))
    first, second = _axis(dim0, axes), _axis(dim1, axes)
    order[first], order[second] = order[second], order[first]
    return _permute(trace, input, order)


def _t(trace: Trace, input: Any) -> Traced:
    axes = trace.tensor(input).dim()
    if axes > 2:
        raise RuntimeError(f"t: a tensor has {axes} axes; wanted two at most")
    return _permute(trace, input, tuple(reversed(range(axes))))


def _mt(trace: Trace, input: Any) -> Traced:
    return _transpose(trace, input, -2, -1)


def _unsqueeze(trace: Trace, input: Any, dim: int) -> Traced:
    shape = trace.tensor(input).shape
    at = _axis(dim, len(shape) + 1)
    return _reshaped(trace, input, (*shape[:at], 1, *shape[at:]))


def _squeeze(trace: Trace, input: Any, dim: Any = None) -> Traced:
    shape = trace.tensor(input).shape
    gone = range(len(shape)) if dim is None else _axes(dim, len(shape)) or ()
    return _reshaped(trace, input, [size for at, size in enumerate(shape) if at not in gone or size != 1])


def _expand(trace: Trace, input: Any, *sizes: Any) -> Traced:
    x = trace.tensor(input)
    wanted = list(_flat(sizes))
    for at, size in enumerate(reversed(x.shape), 1):
        if at <= len(wanted) and wanted[-at] == -1:
            wanted[-at] = size
    return trace.view(trace.graph._one("expand", x, shape=tuple(wanted)), input)


def _cat(trace: Trace, tensors: Sequence[Any], dim: int = 0) -> Traced:
    values = [trace.tensor(each) for each in tensors]
    if not values:
        raise RuntimeError("cat: there are no tensors; wanted one at least")
    return trace.result(trace.graph.concatenate(values, _axis(dim, values[0].dim())))


def _stack(trace: Trace, tensors: Sequence[Any], dim: int = 0) -> Traced:
    return _cat(trace, [_unsqueeze(trace, each, dim) for each in tensors], dim)


def _narrow(trace: Trace, input: Any, dim: int, start: int, length: int) -> Traced:
    x = trace.tensor(input)
    at = _axis(dim, x.dim())
    start = start + x.shape[at] if start < 0 else start
    starts, limits = [0] * x.dim(), list(x.shape)
    starts[at], limits[at] = start, start + length
    return trace.view(trace.graph.slice(x, starts, limits), input)


def _split(trace: Trace, input: Any, split_size_or_sections: Any, dim: int = 0) -> tuple[Traced, ...]:
    x = trace.tensor(input)
    size, each = x.shape[_axis(dim, x.dim())], split_size_or_sections
    lengths = [min(each, size - at) for at in range(0, max(size, 1), each)] if isinstance(each, int) else list(each)
    if sum(lengths) != size:
        raise RuntimeError(f"split: sections are {lengths}; wanted {size} in all")
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return tuple(_narrow(trace, input, dim, start, length) for start, length in zip(starts, lengths, strict=True))


def _chunk(trace: Trace, input: Any, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    x = trace.tensor(input)
    size = x.shape[_axis(dim, x.dim())]
    return _split(trace, input, max(-(-size // chunks), 1), dim)


def _getitem(trace: Trace, input: Any, index: Any) -> Traced:
    """Basic indices: integers, slices, None and an ellipsis."""
    x = trace.tensor(input)
    given = list(index) if isinstance(index, tuple) else [index]
    if any(each is not None and each is not Ellipsis and not isinstance(each, slice | int) for each in given) or any(
        isinstance(each, bool) for each in given
    ):
        raise NotImplementedError(f"[{index}]: graphs have integers, slices, None and ... alone as indices")
    used = sum(each is not None and each is not Ellipsis for each in given)
    if used > x.dim() or given.count(Ellipsis) > 1:
        raise IndexError(f"[{index}]: {used} indices of a tensor {x.shape}; wanted {x.dim()} at most, and one ellipsis")
    if Ellipsis not in given:
        given.append(Ellipsis)
    at = given.index(Ellipsis)
    given[at : at + 1] = [slice(None)] * (x.dim() - used)
    starts, limits, steps, shape = [], [], [], []
    axis = 0
    for each in given:
        if each is None:
            shape.append(1)
            continue
        size = x.shape[axis]
        if isinstance(each, int):
            if not -size <= each < size:
                raise IndexError(f"[{index}]: {each} is outside of axis {axis} with size {size}")
            start, limit, step = each % size, each % size + 1, 1
        else:
            if each.step is not None and each.step < 1:
                raise ValueError(f"[{index}]: a step is {each.step}; wanted at least 1")
            start, limit, step = each.indices(size)
            limit = max(start, limit)
            shape.append(-(-(limit - start) // step))
        starts.append(start)
        limits.append(limit)
        steps.append(step)
        axis += 1
    whole = all(start == 0 and limit == size and step == 1
                for start, limit, step, size in zip(starts, limits, steps, x.shape, strict=True))  # fmt: skip
    value = x if whole else trace.graph.slice(x, starts, limits, steps)
    value = value if value.shape == tuple(shape) else trace.graph.reshape(value, shape)
    return trace.view(value, input)


# -- dtypes and layouts -----------------------------------------------------------------------------------------------


def _cast(trace: Trace, input: Any, dtype: torch.dtype) -> Traced:
    x = trace.tensor(input)
    return trace.traced(x) if ALL_DTYPES[x.dtype] is dtype else trace.result(trace.graph.cast(x, dtype))


def _to_dtype(dtype: torch.dtype) -> _Function:
    def function(trace: Trace, input: Any, memory_format: Any = torch.preserve_format) -> Traced:
        return _laid(trace, _cast(trace, input, dtype), memory_format)

    return function


def _laid(trace: Trace, input: Any, memory_format: Any) -> Traced:
    if memory_format is torch.preserve_format:
        return trace.traced(trace.tensor(input))
    x, layout = trace.tensor(input), _FORMATS[memory_format]
    if x.dim() < 4 or x.layout == layout:
        return trace.traced(x)
    return trace.result(trace.graph.identity(x).set_layout(layout))


def _contiguous(trace: Trace, input: Any, memory_format: Any = torch.contiguous_format) -> Traced:
    return _laid(trace, input, memory_format)


def _to(trace: Trace, input: Any, *given: Any, dtype: torch.dtype | None = None, device: Any = None,
        memory_format: Any = torch.preserve_format, **_: Any) -> Traced:  # fmt: skip
    for each in given:
        if isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, str | torch.device | int) and not isinstance(each, bool):
            device = each
        elif not isinstance(each, bool):
            other = trace.tensor(each)
            dtype = ALL_DTYPES[other.dtype]
    if device is not None:
        trace.same_device(torch.device(device))
    made = trace.traced(trace.tensor(input)) if dtype is None else _cast(trace, input, dtype)
    return _laid(trace, made, memory_format)


def _type_as(trace: Trace, input: Any, other: Any) -> Traced:
    return _cast(trace, input, ALL_DTYPES[trace.tensor(other).dtype])


def _copy(trace: Trace, input: Any, src: Any, non_blocking: bool = False) -> Traced:
    """What is copied, in the shape and dtype of where it goes."""
    x, value = trace.tensor(input), trace.value(src)
    if isinstance(value, GraphTensor) and value.shape == x.shape:
        return _cast(trace, trace.traced(value), ALL_DTYPES[x.dtype])
    zero = trace.graph.constant(torch.zeros((), dtype=ALL_DTYPES[x.dtype]).expand(x.shape))
    return trace.result(trace.graph.pointwise("add", zero, value, dtype=x.dtype))


FUNCTIONS: dict[str, _Function] = {
    **{name: _unary(op) for op, names in {
        "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "log": "log", "sqrt": "sqrt",
        "rsqrt": "rsqrt",
        "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tan": "tan", "ceil": "ceil", "floor": "floor",
        "erf": "erf", "sign": "sign", "abs": "abs absolute", "neg": "neg negative", "silu": "silu",
        "hardswish": "hardswish", "logical_not": "logical_not",
    }.items() for name in names.split()},
    "leaky_relu": _leaky_relu, "elu": _elu, "gelu": _gelu, "softplus": _softplus, "hardtanh": _hardtanh,
    "relu6": _relu6, "mish": _mish, "celu": _celu, "selu": _selu, "prelu": _prelu,
    "hardsigmoid": _hardsigmoid, "square": _square, "dropout": _dropout, "dropout1d": _dropout, "dropout2d": _dropout,
    "dropout3d": _dropout, "detach": _detach, "clone": _same, "positive": _same,
    "add": _binary("add"), "sub": _binary("sub"), "subtract": _binary("sub"), "rsub": _binary("sub", swapped=True),
    "radd": _binary("add"), "mul": _binary("mul"), "multiply": _binary("mul"), "rmul": _binary("mul"),
    "div": _div, "divide": _div, "true_divide": _div, "truediv": _div, "rdiv": _binary("div", swapped=True),
    "rtruediv": _binary("div", swapped=True), "pow": _pow,
    "rpow": lambda trace, input, other: _pow(trace, other, input),
    "maximum": _binary("max"), "minimum": _binary("min"), "max": _greatest("max"), "min": _greatest("min"),
    "fmod": _binary("mod"), "atan2": _binary("atan2"), "arctan2": _binary("atan2"),
    **{name: _compare(op) for op, names in {
        "cmp_eq": "eq", "cmp_neq": "ne not_equal", "cmp_gt": "gt greater", "cmp_ge": "ge greater_equal",
        "cmp_lt": "lt less", "cmp_le": "le less_equal", "logical_and": "logical_and", "logical_or": "logical_or",
    }.items() for name in names.split()},
    "clamp": _clamp, "clip": _clamp, "clamp_min": _clamp,
    "clamp_max": lambda trace, input, max: _clamp(trace, input, None, max),
    "where": _where, "masked_fill": _masked_fill,
    "matmul": _matmul, "mm": _square_matmul("mm", 2), "bmm": _square_matmul("bmm", 3), "linear": _linear,
    "addmm": _addmm,
    "rmatmul": lambda trace, input, other: _matmul(trace, other, input),
    **{f"conv{rank}d": _convolution(rank) for rank in (1, 2, 3)},
    **{f"conv_transpose{rank}d": _transposed(rank) for rank in (1, 2, 3)},
    "batch_norm": _batch_norm,
    **{f"max_pool{rank}d": _max_pool(rank) for rank in (1, 2, 3)},
    **{f"avg_pool{rank}d": _avg_pool(rank) for rank in (1, 2, 3)},
    **{f"adaptive_{mode}_pool{rank}d": _adaptive(mode, rank) for mode in ("avg", "max") for rank in (1, 2, 3)},
    "sum": _reduction("add"), "mean": _reduction("avg"), "amax": _reduction("max"), "amin": _reduction("min"),
    "prod": _reduction("mul"), "softmax": _softmax, "log_softmax": _log_softmax,
    "view": _reshape, "reshape": _reshape, "flatten": _flatten, "unflatten": _unflatten, "permute": _permute,
    "transpose": _transpose, "swapaxes": _transpose, "swapdims": _transpose, "t": _t, "T": _t, "mT": _mt,
    "unsqueeze": _unsqueeze, "squeeze": _squeeze, "expand": _expand,
    "expand_as": lambda trace, input, other: _expand(trace, input, trace.tensor(other).shape),
    "view_as": lambda trace, input, other: _reshaped(trace, input, trace.tensor(other).shape),
    "reshape_as": lambda trace, input, other: _reshaped(trace, input, trace.tensor(other).shape),
    "cat": _cat, "concat": _cat, "concatenate": _cat, "stack": _stack, "narrow": _narrow, "split": _split,
    "chunk": _chunk,
    "getitem": _getitem, "to": _to, "type": _cast, "type_as": _type_as, "half": _to_dtype(torch.float16),
    "float": _to_dtype(torch.float32), "double": _to_dtype(torch.float64), "bfloat16": _to_dtype(torch.bfloat16),
    "int": _to_dtype(torch.int32), "long": _to_dtype(torch.int64), "bool": _to_dtype(torch.bool),
    "contiguous": _contiguous, "copy": _copy,
}  # fmt: skip
"""By the name of torch's function or method, underscores of operators left out: ``__rsub__`` is ``rsub``."""
