"""Graph: a computation described once, then run as few kernels.

    with openconv.Graph() as graph:
        y = graph.conv_fprop(x, w, padding=1)
        y = graph.relu(graph.bias(y, b))

    out = graph(x, w, b)          # one kernel

Methods add nodes; what they are given is a tensor of the graph, a torch tensor, which becomes an input, or a number
where an operation is pointwise. Shapes and dtypes are checked at once. A graph is planned at its first call for each
combination of device, sizes and strides, and then run from the plan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from ..epilogue import OPS
from ..select import Policy
from ..tensors import ALL_DTYPES, ALL_NAMES
from .ir import Flow, GraphTensor, Meta, layout_of_strides
from .operations import check_dtype, vector_shape
from .rewrites import REWRITES

if TYPE_CHECKING:
    from .calls import Caller
    from .explain import GraphExplanation
    from .gradient import Gradient
    from .program import GraphPlan, Program

__all__ = ["BatchNorm", "Graph", "Tensorish"]

Tensorish = GraphTensor | Tensor
Number = GraphTensor | Tensor | float


class BatchNorm(NamedTuple):
    """What a batch normalisation in training gives: the result, the batch's mean and 1 / sqrt(variance + epsilon), and
    the next running mean and variance, None where none were given."""

    y: GraphTensor
    mean: GraphTensor
    inv_variance: GraphTensor
    running_mean: GraphTensor | None
    running_variance: GraphTensor | None


_Size = int | Sequence[int]
_Padding = int | Sequence[int | Sequence[int]]


def _unary(op: str) -> Callable[..., GraphTensor]:
    def method(self: Graph, input: Tensorish, *, name: str | None = None) -> GraphTensor:
        return self._one(op, input, name=name)

    return _dressed(method, op)


def _binary(op: str) -> Callable[..., GraphTensor]:
    def method(self: Graph, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        return self._one(op, a, b, name=name)

    return _dressed(method, op)


def _slope(op: str) -> Callable[..., GraphTensor]:
    def method(self: Graph, loss: Tensorish, input: Tensorish, *, name: str | None = None) -> GraphTensor:
        return self._one(op, loss, input, name=name)

    return _dressed(method, op)


def _dressed(method: Any, op: str) -> Any:
    method.__name__, method.__qualname__, method.__doc__ = op, f"Graph.{op}", f"{OPS[op].formula}."
    return method


class Graph:
    """A graph of tensors and operations, callable on torch tensors of any device.

    ``policy`` limits the choice of engines, as :func:`openconv.policy` does. ``rewrites`` names those of
    :data:`openconv.graph.REWRITES` that may be used: all of them, unless told; ``()`` for none. ``fuse=False`` runs
    every node by itself.
    """

    def __init__(
        self, name: str = "graph", *, policy: Policy | None = None, rewrites: Iterable[str] | None = None,
        fuse: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.policy, self.fuse = name, policy, fuse
        self.rewrites = tuple(REWRITES) if rewrites is None else tuple(rewrites)
        unknown = [each for each in self.rewrites if each not in REWRITES]
        if unknown:
            raise ValueError(f"rewrites has {', '.join(map(repr, unknown))}; wanted some of {', '.join(REWRITES)}")
        self._take(Flow())
        self._known: dict[int, tuple[weakref.ref[Tensor], GraphTensor]] = {}
        self._closed = False
        self.forward: Graph | None = None
        self._lock = threading.RLock()
        self._programs: dict[Any, Program] = {}
        self._gradients: dict[Any, Gradient] = {}
        self._chosen: dict[str, Any] = {}

    def _take(self, flow: Flow) -> None:
        self.flow = flow
        flow.builder, flow.changed = self._add, self._changed

    # -- building -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._closed = True

    def _changed(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"graph {self.name!r} is closed: its block has ended, or it was called; build another one"
            )
        self._programs.clear()  # of what it was before

    def _add(self, op: str, *args: Any, name: str | None = None, **attrs: Any) -> Any:
        self._changed()
        return self.flow.add(op, *(self._given(op, name, arg) for arg in args), name=name, **attrs)

    def _given(self, op: str, name: str | None, arg: Any) -> GraphTensor | float:
        if isinstance(arg, GraphTensor):
            if arg._flow is not self.flow:
                raise RuntimeError(
                    f"{name or op}: tensor {arg.name!r} is of another graph; wanted one of {self.name!r}"
                )
            return arg
        if isinstance(arg, Tensor):
            return self._recognised(arg)
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return arg
        raise TypeError(f"{name or op}: an argument is of type {type(arg).__name__}; wanted a tensor or a number")

    def _recognised(self, value: Tensor) -> GraphTensor:
        found = self._known.get(id(value))
        if found is not None and found[0]() is value:
            return found[1]
        return self.input(value)

    def input(
        self, like: Tensor | None = None, *, shape: Sequence[int] | None = None, dtype: Any = None,
        strides: Sequence[int] | None = None, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """A tensor that calls are given: like a torch tensor, or of a shape and dtype (and strides, in elements)."""
        self._changed()
        if like is not None:
            meta = _meta_of(like)
            made = self.flow.input(meta, name, tuple(like.stride()))
            self._known[id(like)] = weakref.ref(like), made
            return made
        if shape is None or dtype is None:
            raise TypeError(f"input {name!r}: shape is {shape} and dtype {dtype}; wanted both, or a tensor to be like")
        sizes = tuple(shape)
        if any(not isinstance(size, int) or size < 0 for size in sizes):
            raise ValueError(f"input {name!r}: shape is {sizes}; wanted integers >= 0")
        if strides is not None and len(strides) != len(sizes):
            raise ValueError(f"input {name!r}: strides are {tuple(strides)} of shape {sizes}; wanted one for each axis")
        layout = "nchw" if strides is None else _nearest_layout(sizes, strides)
        return self.flow.input(Meta(sizes, check_dtype(dtype, f"input {name!r}"), layout), name, strides)

    def constant(self, value: Tensor, name: str | None = None) -> GraphTensor:
        """A tensor whose value is known now, as weights are that no longer change: calls are not given it, and what
        follows from constants alone is computed when the graph is planned."""
        self._changed()
        if not isinstance(value, Tensor):
            raise TypeError(f"constant {name!r} is of type {type(value).__name__}; wanted a Tensor")
        made = self.flow.constant(value.detach(), _meta_of(value), name)
        self._known[id(value)] = weakref.ref(value), made
        return made

    def conv_fprop(
        self, image: Tensorish, weight: Tensorish, *, padding: _Padding = 0, stride: _Size = 1, dilation: _Size = 1,
        groups: int = 1, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """y = image * weight. Image (N, C, ...), weight (K, C / groups, ...); padding is one int, one for each axis or
        (low, high) for each axis."""
        geometry = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
        return self._one("conv_fprop", image, weight, name=name, **geometry)

    def conv_dgrad(
        self, weight: Tensorish, loss: Tensorish, *, padding: _Padding = 0, stride: _Size = 1, dilation: _Size = 1,
        groups: int = 1, output_size: _Size | None = None, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """The gradient with respect to the image, and a transposed convolution. Several image sizes lead to one loss
        where the stride is not 1: ``output_size`` says which, the smallest unless told."""
        geometry = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
        return self._one("conv_dgrad", weight, loss, name=name, output_size=output_size, **geometry)

    def conv_wgrad(
        self, image: Tensorish, loss: Tensorish, *, padding: _Padding = 0, stride: _Size = 1, dilation: _Size = 1,
        groups: int = 1, filter_size: _Size | None = None, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """The gradient with respect to the weight. ``filter_size`` is wanted where several fit, as with a stride."""
        geometry = {"padding": padding, "stride": stride, "dilation": dilation, "groups": groups}
        return self._one("conv_wgrad", image, loss, name=name, filter_size=filter_size, **geometry)

    def matmul(self, a: Tensorish, b: Tensorish, *, name: str | None = None) -> GraphTensor:
        """a @ b of the last two axes; those before broadcast."""
        return self._one("matmul", a, b, name=name)

    def _one(self, op: str, *args: Any, **attrs: Any) -> GraphTensor:
        made: GraphTensor = self._add(op, *args, **attrs)
        return made

    # -- pointwise ------------------------------------------------------------------------------------------------

    def pointwise(
        self, op: str, *values: Number, params: Sequence[float] = (), dtype: str | None = None, name: str | None = None
    ) -> GraphTensor:
        """Any operation of :data:`openconv.epilogue.OPS`, of tensors that broadcast and numbers."""
        more: dict[str, Any] = {"params": tuple(float(p) for p in params)} if params else {}
        if dtype is not None:
            more["dtype"] = check_dtype(dtype, name or op)
        return self._one(op, *values, name=name, **more)

    def add(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a + b."""
        return self._one("add", a, b, name=name)

    def sub(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a - b."""
        return self._one("sub", a, b, name=name)

    def mul(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a * b."""
        return self._one("mul", a, b, name=name)

    def div(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a / b."""
        return self._one("div", a, b, name=name)

    def max(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """The greater of two, NaN if either is."""
        return self._one("max", a, b, name=name)

    def min(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """The lesser of two, NaN if either is."""
        return self._one("min", a, b, name=name)

    def mod(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """What is left of a / b, with the sign of a."""
        return self._one("mod", a, b, name=name)

    def pow(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a to the power of b."""
        return self._one("pow", a, b, name=name)

    def atan2(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """The angle of the point (b, a)."""
        return self._one("atan2", a, b, name=name)

    def add_square(self, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a + b * b."""
        return self._one("add_square", a, b, name=name)

    def relu(self, input: Tensorish, *, name: str | None = None) -> GraphTensor:
        """max(input, 0)."""
        return self._one("relu", input, name=name)

    def leaky_relu(self, input: Tensorish, slope: float = 0.01, *, name: str | None = None) -> GraphTensor:
        """The input where it is positive, else slope times the input."""
        return self.pointwise("leaky_relu", input, params=(slope,), name=name)

    def elu(self, input: Tensorish, alpha: float = 1.0, *, name: str | None = None) -> GraphTensor:
        """The input where it is positive, else alpha * (e^input - 1)."""
        return self.pointwise("elu", input, params=(alpha,), name=name)

    def clamp(self, input: Tensorish, low: float, high: float, *, name: str | None = None) -> GraphTensor:
        """The input, limited to [low, high]."""
        return self.pointwise("clamp", input, params=(low, high), name=name)

    def swish(self, input: Tensorish, beta: float = 1.0, *, name: str | None = None) -> GraphTensor:
        """input * sigmoid(beta * input)."""
        return self.pointwise("swish", input, params=(beta,), name=name)

    def softplus(self, input: Tensorish, beta: float = 1.0, *, name: str | None = None) -> GraphTensor:
        """ln(1 + e^(beta * input)) / beta."""
        return self.pointwise("softplus", input, params=(beta,), name=name)

    def select(self, predicate: Number, a: Number, b: Number, *, name: str | None = None) -> GraphTensor:
        """a where the predicate is not 0, else b."""
        return self._one("select", predicate, a, b, name=name)

    def leaky_relu_backward(
        self, loss: Tensorish, input: Tensorish, slope: float = 0.01, *, name: str | None = None
    ) -> GraphTensor:  # fmt: skip
        """The gradient of leaky_relu at the input."""
        return self.pointwise("leaky_relu_backward", loss, input, params=(slope,), name=name)

    def elu_backward(
        self, loss: Tensorish, input: Tensorish, alpha: float = 1.0, *, name: str | None = None
    ) -> GraphTensor:  # fmt: skip
        """The gradient of elu at the input."""
        return self.pointwise("elu_backward", loss, input, params=(alpha,), name=name)

    def clamp_backward(
        self, loss: Tensorish, input: Tensorish, low: float, high: float, *, name: str | None = None
    ) -> GraphTensor:  # fmt: skip
        """The gradient of clamp at the input."""
        return self.pointwise("clamp_backward", loss, input, params=(low, high), name=name)

    def softplus_backward(
        self, loss: Tensorish, input: Tensorish, beta: float = 1.0, *, name: str | None = None
    ) -> GraphTensor:  # fmt: skip
        """The gradient of softplus at the input."""
        return self.pointwise("softplus_backward", loss, input, params=(beta,), name=name)

    def swish_backward(
        self, loss: Tensorish, input: Tensorish, beta: float = 1.0, *, name: str | None = None
    ) -> GraphTensor:  # fmt: skip
        """The gradient of swish at the input."""
        return self.pointwise("swish_backward", loss, input, params=(beta,), name=name)

    neg = _unary("neg")
    abs = _unary("abs")
    exp = _unary("exp")
    log = _unary("log")
    sqrt = _unary("sqrt")
    rsqrt = _unary("rsqrt")
    reciprocal = _unary("reciprocal")
    sin = _unary("sin")
    cos = _unary("cos")
    tan = _unary("tan")
    ceil = _unary("ceil")
    floor = _unary("floor")
    erf = _unary("erf")
    sign = _unary("sign")
    sigmoid = _unary("sigmoid")
    tanh = _unary("tanh")
    silu = _unary("silu")
    hardswish = _unary("hardswish")
    gelu = _unary("gelu")
    gelu_tanh = _unary("gelu_tanh")
    logical_not = _unary("logical_not")
    cmp_eq = _binary("cmp_eq")
    cmp_neq = _binary("cmp_neq")
    cmp_gt = _binary("cmp_gt")
    cmp_ge = _binary("cmp_ge")
    cmp_lt = _binary("cmp_lt")
    cmp_le = _binary("cmp_le")
    logical_and = _binary("logical_and")
    logical_or = _binary("logical_or")
    relu_backward = _slope("relu_backward")
    sigmoid_backward = _slope("sigmoid_backward")
    tanh_backward = _slope("tanh_backward")
    hardswish_backward = _slope("hardswish_backward")
    gelu_backward = _slope("gelu_backward")
    gelu_tanh_backward = _slope("gelu_tanh_backward")

    def gen_index(self, input: Tensorish, axis: int, *, name: str | None = None) -> GraphTensor:
        """The place along an axis, at every place of the input: i32."""
        return self._one("gen_index", input, axis=axis, name=name)

    def cast(self, input: Tensorish, dtype: Any, *, name: str | None = None) -> GraphTensor:
        """The input in another dtype."""
        return self._one("cast", input, dtype=check_dtype(dtype, name or "cast"), name=name)

    def identity(self, input: Tensorish, *, name: str | None = None) -> GraphTensor:
        """The input."""
        return self._one("identity", input, name=name)

    # -- channels -------------------------------------------------------------------------------------------------

    def _per_channel(self, input: Tensorish, vector: Tensorish, op: str, name: str | None) -> GraphTensor:
        x, v = self._given(op, name, input), self._given(op, name, vector)
        assert isinstance(x, GraphTensor)
        assert isinstance(v, GraphTensor)
        wanted = vector_shape(x) if x.dim() > 1 else x.shape
        if v.shape != wanted:
            if v.shape != (x.shape[1],):
                raise RuntimeError(f"{name or op}: {op} has shape {v.shape}; wanted {(x.shape[1],)} or {wanted}")
            v = self._one("reshape", v, shape=wanted)
        return self._one({"bias": "add", "scale": "mul"}[op], x, v, name=name, dtype=x.dtype)

    def bias(self, input: Tensorish, bias: Tensorish, *, name: str | None = None) -> GraphTensor:
        """The input plus a value for each channel, (C,) or (1, C, 1, ...); the input's dtype stays."""
        return self._per_channel(input, bias, "bias", name)

    def scale(self, input: Tensorish, scale: Tensorish, *, name: str | None = None) -> GraphTensor:
        """The input times a value for each channel, (C,) or (1, C, 1, ...); the input's dtype stays."""
        return self._per_channel(input, scale, "scale", name)

    def batchnorm_inference(
        self, input: Tensorish, scale: Tensorish, bias: Tensorish, mean: Tensorish, inv_variance: Tensorish, *,
        name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """(input - mean) * inv_variance * scale + bias of each channel; inv_variance is 1 / sqrt(variance + eps)."""
        return self._one("batchnorm_inference", input, scale, bias, mean, inv_variance, name=name)

    def batchnorm(
        self, input: Tensorish, scale: Tensorish, bias: Tensorish, running_mean: Tensorish | None = None,
        running_variance: Tensorish | None = None, epsilon: float = 1e-5, momentum: float = 0.1, *,
        name: str | None = None,
    ) -> BatchNorm:  # fmt: skip
        """Batch normalisation in training, with torch's meaning of momentum: the next running value is (1 - momentum)
        of the last and momentum of the batch's, whose variance counts one value less."""
        if (running_mean is None) != (running_variance is None):
            raise TypeError(f"{name or 'batchnorm'}: one running value is given; wanted both of them or none")
        more = () if running_mean is None else (running_mean, running_variance)
        made = self._add("batchnorm", input, scale, bias, *more, name=name, epsilon=epsilon, momentum=momentum)
        y, mean, inverse, *running = made
        return BatchNorm(y, mean, inverse, *running) if running else BatchNorm(y, mean, inverse, None, None)

    def batchnorm_backward(
        self, loss: Tensorish, input: Tensorish, scale: Tensorish, mean: Tensorish, inv_variance: Tensorish, *,
        name: str | None = None,
    ) -> tuple[GraphTensor, GraphTensor, GraphTensor]:  # fmt: skip
        """Gradients of :meth:`batchnorm` with respect to input, scale and bias, from what it saved."""
        dx, dscale, dbias = self._add("batchnorm_backward", loss, input, scale, mean, inv_variance, name=name)
        return dx, dscale, dbias

    def genstats(self, input: Tensorish, *, name: str | None = None) -> tuple[GraphTensor, GraphTensor]:
        """The sum and the sum of squares of each channel, (1, C, 1, ...) in f32 (f64 of f64)."""
        total, squares = self._add("genstats", input, name=name)
        return total, squares

    def reduction(
        self, input: Tensorish, mode: str, axes: int | Sequence[int] | None = None, keepdims: bool = True, *,
        name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """``mode`` (:data:`openconv.tree.MODES`) over some axes, or all."""
        value = self._given("reduction", name, input)
        assert isinstance(value, GraphTensor)
        given = range(value.dim()) if axes is None else (axes,) if isinstance(axes, int) else axes
        positive = tuple(axis + value.dim() if isinstance(axis, int) and axis < 0 else axis for axis in given)
        return self._one("reduction", value, mode=mode, axes=positive, keepdims=keepdims, name=name)

    # -- pooling --------------------------------------------------------------------------------------------------

    def resample(
        self, input: Tensorish, mode: str, window: _Size, stride: _Size | None = None, padding: _Padding = 0, *,
        name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """Pooling. ``mode`` is max, avg (padding counts) or avg_exclude (it does not); the stride is the window's size
        unless told."""
        return self._one("resample", input, mode=mode, window=window, stride=stride, padding=padding, name=name)

    def max_pool(
        self, input: Tensorish, window: _Size, stride: _Size | None = None, padding: _Padding = 0, *,
        name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """The greatest of each window."""
        return self.resample(input, "max", window, stride, padding, name=name)

    def avg_pool(
        self, input: Tensorish, window: _Size, stride: _Size | None = None, padding: _Padding = 0, *,
        count_padding: bool = True, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """The mean of each window."""
        return self.resample(input, "avg" if count_padding else "avg_exclude", window, stride, padding, name=name)

    def resample_backward(
        self, loss: Tensorish, input: Tensorish, mode: str, window: _Size, stride: _Size | None = None,
        padding: _Padding = 0, *, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """The gradient of :meth:`resample` with respect to its input."""
        pooling = {"mode": mode, "window": window, "stride": stride, "padding": padding}
        return self._one("resample_backward", loss, input, name=name, **pooling)

    # -- moving about ---------------------------------------------------------------------------------------------

    def reshape(self, input: Tensorish, shape: Sequence[int], *, name: str | None = None) -> GraphTensor:
        """The same values in row-major order in another shape; -1 is what is left over, 0 the input's size there."""
        return self._one("reshape", input, shape=tuple(shape), name=name)

    def transpose(self, input: Tensorish, permutation: Sequence[int], *, name: str | None = None) -> GraphTensor:
        """Axes in another order."""
        return self._one("transpose", input, permutation=tuple(permutation), name=name)

    def slice(
        self, input: Tensorish, starts: Sequence[int], limits: Sequence[int | None],
        steps: Sequence[int] | None = None, *, name: str | None = None,
    ) -> GraphTensor:  # fmt: skip
        """From each start up to each limit, which is not included; None is the end."""
        given = tuple(steps) if steps is not None else (1,) * len(starts)
        return self._one("slice", input, starts=tuple(starts), limits=tuple(limits), steps=given, name=name)

    def concatenate(self, inputs: Sequence[Tensorish], axis: int, *, name: str | None = None) -> GraphTensor:
        """Tensors one behind the other along an axis."""
        return self._one("concatenate", *inputs, axis=axis, name=name)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[GraphTensor, ...]:
        """What calls are given, in order of first use."""
        return self.flow.inputs

    @property
    def outputs(self) -> tuple[GraphTensor, ...]:
        """What calls return."""
        return tuple(self.flow.outputs)

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The operations, in the order in which they were added."""
        return tuple(self.flow.nodes)

    def __repr__(self) -> str:
        lines = [f"graph {self.name!r}"]
        lines += [f"  input {tensor!r}" for tensor in self.inputs]
        lines += [f"  constant {tensor!r}" for tensor in self.flow.constants]
        lines += [f"  {node!r}    {', '.join(str(r.meta) for r in node.results)}" for node in self.nodes]
        return "\n".join([*lines, f"  return {', '.join(tensor.name for tensor in self.outputs)}"])

    # -- running --------------------------------------------------------------------------------------------------

    def __call__(self, *values: Any, out: Any = None, workspace: Tensor | None = None, **named: Tensor) -> Any:
        """Run on tensors: by place in order of first use, by name, or as one mapping of names or tensors of the graph.
        Gradients flow where an input asks for them."""
        return self._runner(values, named, out, workspace)

    @property
    def _runner(self) -> Caller:
        """What calls go through; made at the first, for its list of inputs is looked at each time."""
        found = self.__dict__.get("_call")
        if found is None:
            from .calls import Caller

            with self._lock:
                if not self.outputs:
                    raise RuntimeError(f"graph {self.name!r} has no nodes; wanted one at least")
                self._closed = True
                found = self.__dict__.setdefault("_call", Caller(self))
        return found

    def execute(
        self, values: Mapping[Any, Tensor], outputs: Mapping[Any, Tensor] | None = None,
        workspace: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Run with inputs, and if given places for outputs, by name or tensor of the graph; outputs by name."""
        found = self(dict(values), out=dict(outputs) if outputs else None, workspace=workspace)
        made = found if isinstance(found, tuple) else (found,)
        return {tensor.name: value for tensor, value in zip(self.outputs, made, strict=True)}

    def program(self, device: Any = None) -> Program:
        """The plan for the sizes that the graph was built with; on the CPU unless told."""
        from .program import program_for

        where = torch.device("cpu") if device is None else torch.device(device)
        return program_for(self, where)

    def workspace_bytes(self, device: Any = None) -> int:
        """Bytes of ``workspace=`` that hold all that a call needs besides inputs and outputs."""
        return self.program(device).workspace_bytes

    def plans(self, device: Any = None) -> list[GraphPlan]:
        """The plan in use first, then others: other engines and knobs of one kernel each, and one without fusion."""
        return self.program(device).plans()

    def choose(self, index: int, device: Any = None) -> GraphPlan:
        """Have calls use another of :meth:`plans`."""
        return self.program(device).choose(index)

    def autotune(self, *values: Any, seconds: float | None = None, **named: Tensor) -> list[GraphPlan]:
        """Time the plans on these tensors and keep the fastest; the plans, with what they took."""
        return self._runner.autotune(values, named, seconds)

    def capture(self, *values: Any, **named: Tensor) -> Callable[..., Any]:
        """A CUDA graph of the call: a function that copies its arguments in, replays, and returns its outputs, which
        the next replay overwrites."""
        return self._runner.capture(values, named)

    def explain(self, device: Any = None) -> GraphExplanation:
        """The kernels: what each computes, what was fused and why not more, bytes saved, predicted times."""
        from .explain import explain_graph

        return explain_graph(self, torch.device("cpu") if device is None else torch.device(device))

    def backward(self, wrt: Iterable[Any] | None = None) -> Graph:
        """The graph of the gradients with respect to ``wrt``, all inputs of floating point unless told.

        Its inputs are what it needs of this graph's inputs, outputs and values on the way, by their names, and the
        gradients ``d_NAME`` of this graph's outputs; its outputs are ``d_NAME`` of each of ``wrt``. Values on the way
        are results of ``backward().forward``, this graph with such values as further outputs.
        """
        return self.gradient(wrt).graph

    def gradient(self, wrt: Iterable[Any] | None = None) -> Gradient:
        """What :meth:`backward` is a part of: the forward graph that saves what is needed, and the gradient's."""
        from .gradient import differentiate

        names = (
            None if wrt is None else tuple(each.name if isinstance(each, GraphTensor) else str(each) for each in wrt)
        )
        with self._lock:
            self._closed = True
            if names not in self._gradients:
                self._gradients[names] = differentiate(self, names)
            return self._gradients[names]

    # -- as text --------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The graph, its constants, and for each device that it was planned on the engines and knobs in use."""
        from .serialize import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> Graph:
        """The graph of :meth:`to_json`. Engines and knobs are taken over where device and version match; where not, a
        warning says so and the graph is planned anew."""
        from .serialize import from_json

        return from_json(text)

    def save(self, path: str | Path) -> Path:
        """:meth:`to_json` into a file."""
        from ..files import write_atomic

        return write_atomic(Path(path), self.to_json())

    @staticmethod
    def load(path: str | Path) -> Graph:
        """The graph of :meth:`save`."""
        return Graph.from_json(Path(path).read_text())


def _meta_of(value: Tensor) -> Meta:
    dtype = ALL_NAMES.get(value.dtype)
    if dtype is None:
        raise TypeError(f"a tensor is of {value.dtype}; wanted one of {', '.join(ALL_DTYPES)}")
    return Meta(tuple(value.shape), dtype, _nearest_layout(tuple(value.shape), tuple(value.stride())))


def _nearest_layout(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The layout of a tensor; of one with gaps, that of its order."""
    found = layout_of_strides(shape, strides)
    if found is None and len(shape) > 3:
        return "nhwc" if strides[1] < min(strides[2:]) else "nchw"
    return found or "nchw"
