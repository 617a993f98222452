"""The operations of the frontend: arguments, results, and how each is said in openconv.

:data:`OPERATIONS` is the whole of it. An operation takes tensors (``inputs``, in the order of positional arguments; a
name that ends in ``?`` may be left out, one that ends in ``*`` takes a list) and other things (``attributes``, with
their defaults), and has results of the names in ``outputs``. ``lower`` makes the nodes of an :class:`openconv.Graph`
for it. Whatever else the frontend computes is in :data:`REFUSED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, Signature
from math import inf
from typing import Any, Protocol

from ..graph import Graph, GraphTensor
from .enums import convolution_mode, reduction_mode, resample_mode, reshape_mode
from .errors import cudnnGraphNotSupportedError
from .record import Node

__all__ = ["OPERATIONS", "REFUSED", "Call", "Operation", "dgrad_order"]

Value = GraphTensor | float


class Call(Protocol):
    """A node that is being translated."""

    graph: Graph
    node: Node

    def __getitem__(self, name: str) -> GraphTensor:
        """An argument as a tensor of the graph."""

    def value(self, name: str) -> Value:
        """An argument that may be a number as well."""

    def number(self, name: str, default: float) -> float:
        """An argument that has to be a number when the graph is made."""

    def pair(self, first: str, second: str) -> tuple[GraphTensor, GraphTensor]:
        """Two arguments that are multiplied, in one dtype."""

    def wanted(self, port: str) -> tuple[list[int] | None, list[int] | None]:
        """Sizes and strides that were set for a result."""


Lower = Callable[[Call], "GraphTensor | Sequence[GraphTensor | None]"]


@dataclass(frozen=True)
class Operation:
    """One method of a graph. ``keeps`` says that results have the dtype of what comes in, whatever is the rule of the
    graph for values inside it; ``aliases`` are other names of arguments."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lower: Lower
    attributes: Mapping[str, Any] = field(default_factory=dict)
    keeps: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ports(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors."""
        return tuple(name.rstrip("?*") for name in self.inputs)

    @cached_property
    def signature(self) -> Signature:
        """The signature of the method, without the graph."""
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            Parameter(name.rstrip("?*"), kind, **({"default": None} if name.endswith("?") else {}))
            for name in self.inputs
        ]
        rest = {**self.attributes, "compute_data_type": None, "name": ""}
        # A default in front of what has none cannot be said in Python: whatever follows one has one.
        for at, parameter in enumerate(parameters):
            if at and parameters[at - 1].default is not Parameter.empty and parameter.default is Parameter.empty:
                parameters[at] = parameter.replace(default=None)
        parameters += [Parameter(name, kind, default=default) for name, default in rest.items()]
        parameters.append(Parameter("out_dims", Parameter.KEYWORD_ONLY, default=None))
        return Signature(parameters)


# -- convolutions and matrices ----------------------------------------------------------------------------------------


def _where(call: Call) -> dict[str, Any]:
    """Padding, stride and dilation of a convolution or a window, as openconv has them."""
    given = call.node.attributes
    low, high = (given["padding"] if given[name] is None else given[name] for name in ("pre_padding", "post_padding"))
    padding: Any = 0 if low is None else low
    if low != high:
        rank = len(high if low is None or isinstance(low, int) else low)
        padding = tuple(zip(_each(low, rank), _each(high, rank), strict=True))
    found = {"padding": padding, "stride": given["stride"]}
    if "dilation" in given:
        found["dilation"] = given["dilation"]
        if given["convolution_mode"] not in (None, convolution_mode.CROSS_CORRELATION):
            raise cudnnGraphNotSupportedError(
                f"{call.node.name}: convolution_mode is {given['convolution_mode']}; "
                "openconv computes CROSS_CORRELATION"
            )
    return {name: 1 if value is None else _plain(value) for name, value in found.items()}


def _each(value: Any, rank: int) -> list[int]:
    return [value or 0] * rank if value is None or isinstance(value, int) else list(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else tuple(value)


def _groups(call: Call, channels: int, per_group: int | None) -> int:
    """As given; else as many as the channels of the filter go into those of the image."""
    given = call.node.attributes["groups"]
    if given is not None:
        return int(given)
    if not per_group:
        return 1
    if channels % per_group:
        raise RuntimeError(
            f"{call.node.name}: image has {channels} channels and weight {per_group}; wanted a multiple of it"
        )
    return max(channels // per_group, 1)


def _fprop(call: Call) -> GraphTensor:
    image, weight = call.pair("image", "weight")
    groups = _groups(call, image.shape[1], weight.shape[1]) if image.dim() == weight.dim() else 1
    return call.graph.conv_fprop(image, weight, groups=groups, **_where(call))


def _dgrad(call: Call) -> GraphTensor:
    weight, loss = call.pair("filter", "loss")
    dim, _ = call.wanted("DX")
    size = None if dim is None else tuple(dim[2:])
    groups = _groups(call, 1 if dim is None else dim[1], None if dim is None else weight.shape[1])
    return call.graph.conv_dgrad(weight, loss, groups=groups, output_size=size, **_where(call))


def _wgrad(call: Call) -> GraphTensor:
    image, loss = call.pair("image", "loss")
    dim, _ = call.wanted("DW")
    size = None if dim is None else tuple(dim[2:])
    groups = _groups(call, image.shape[1], None if dim is None else dim[1])
    return call.graph.conv_wgrad(image, loss, groups=groups, filter_size=size, **_where(call))


def _matmul(call: Call) -> GraphTensor:
    if call.node.attributes["padding"]:
        raise cudnnGraphNotSupportedError(
            f"{call.node.name}: padding is {call.node.attributes['padding']}; openconv multiplies with 0"
        )
    return call.graph.matmul(*call.pair("A", "B"))


_PLACES = {"padding": None, "pre_padding": None, "post_padding": None, "stride": None, "dilation": None,
           "convolution_mode": None, "groups": None}  # fmt: skip

# -- pointwise --------------------------------------------------------------------------------------------------------


def _pointwise(op: str, ports: Sequence[str]) -> Lower:
    def lower(call: Call) -> GraphTensor:
        return call.graph.pointwise(op, *(call.value(port) for port in ports))

    return lower


def _relu(call: Call) -> GraphTensor:
    """min(upper, x if x > lower else lower + slope * (x - lower))."""
    g, x, (slope, lower, upper) = call.graph, call["input"], _clips(call.node)
    if not slope:
        return g.relu(x) if (lower, upper) == (0.0, inf) else g.clamp(x, lower, upper)
    made = g.leaky_relu(g.sub(x, lower) if lower else x, slope)
    made = g.add(made, lower) if lower else made
    return g.min(made, upper) if upper < inf else made


def _relu_backward(call: Call) -> GraphTensor:
    """loss times the slope of relu at the input: 1 between the clips, 0 above the upper one, ``slope`` below."""
    g, loss, x, (slope, lower, upper) = call.graph, call["loss"], call["input"], _clips(call.node)
    above = g.sub(x, lower) if lower else x
    made = g.leaky_relu_backward(loss, above, slope) if slope else g.relu_backward(loss, above)
    return g.select(g.cmp_lt(x, upper), made, 0.0) if upper < inf else made


def _clips(node: Node) -> tuple[float, float, float]:
    given = node.attributes
    slope = next((given[name] for name in ("negative_slope", "lower_clip_slope") if given[name] is not None), 0.0)
    lower, upper = given["lower_clip"], given["upper_clip"]
    return float(slope), 0.0 if lower is None else float(lower), inf if upper is None else float(upper)


_CLIPS = {"negative_slope": None, "lower_clip": None, "upper_clip": None, "lower_clip_slope": None}


def _with(op: str, ports: Sequence[str], name: str, default: float | None) -> Lower:
    """An operation with one parameter."""

    def lower(call: Call) -> GraphTensor:
        given = call.node.attributes[name]
        parameter = default if given is None else float(given)
        if parameter is None:
            raise TypeError(f"{call.node.name}: {name} is missing; wanted a number")
        return call.graph.pointwise(op, *(call[port] for port in ports), params=(parameter,))

    return lower


def _select(call: Call) -> GraphTensor:
    return call.graph.select(call["mask"], call.value("input0"), call.value("input1"))


def _gen_index(call: Call) -> GraphTensor:
    return call.graph.gen_index(call["input"], call.node.attributes["axis"])


_UNARY = ("abs", "ceil", "cos", "elu", "erf", "exp", "floor", "gelu", "log", "logical_not", "neg", "reciprocal",
          "rsqrt", "sigmoid", "sin", "softplus", "sqrt", "tan", "tanh")  # fmt: skip
_BINARY = ("add", "add_square", "div", "logical_and", "logical_or", "mul", "sub")
_BACKWARD = ("elu", "gelu", "sigmoid", "softplus", "tanh")


def _of_many() -> list[Operation]:
    """The operations that are the same but for their name and that of their arguments."""
    ports: dict[str, tuple[str, tuple[str, ...]]] = {
        **{name: (name, ("input",)) for name in _UNARY},
        "gelu_approx_tanh": ("gelu_tanh", ("input",)),
        **{name: (name, ("a", "b")) for name in _BINARY},
        **{name: (name, ("input0", "input1")) for name in ("max", "min", "mod", "pow", "atan2")},
        **{f"cmp_{name}": (f"cmp_{name}", ("input", "comparison")) for name in ("eq", "neq", "gt", "ge", "lt", "le")},
        **{f"{name}_backward": (f"{name}_backward", ("loss", "input")) for name in _BACKWARD},
        "gelu_approx_tanh_backward": ("gelu_tanh_backward", ("loss", "input")),
    }
    return [Operation(name, inputs, ("OUT_0",), _pointwise(op, inputs)) for name, (op, inputs) in ports.items()]


# -- channels ---------------------------------------------------------------------------------------------------------


def _per_channel(port: str) -> Lower:
    """bias and scale: of a value for each channel, or of whatever else broadcasts."""

    def lower(call: Call) -> GraphTensor:
        g, x, vector = call.graph, call["input"], call.value(port)
        if isinstance(vector, GraphTensor) and vector.shape in ((x.shape[1],), (1, x.shape[1], *(1,) * (x.dim() - 2))):
            return g.bias(x, vector) if port == "bias" else g.scale(x, vector)
        return g.add(x, vector) if port == "bias" else g.mul(x, vector)

    return lower


def _batchnorm_inference(call: Call) -> GraphTensor:
    return call.graph.batchnorm_inference(*(call[name] for name in ("input", "scale", "bias", "mean", "inv_variance")))


def _batchnorm(call: Call) -> Sequence[GraphTensor | None]:
    _no_peers(call)
    mean, variance = (call[name] if call.node.given(name) is not None else None for name in _RUNNING)
    return call.graph.batchnorm(
        call["input"], call["scale"], call["bias"], mean, variance,
        epsilon=call.number("epsilon", 1e-5), momentum=call.number("momentum", 0.1),
    )  # fmt: skip


def _batchnorm_backward(call: Call) -> Sequence[GraphTensor | None]:
    _no_peers(call)
    return call.graph.batchnorm_backward(*(call[name] for name in ("grad", "input", "scale", "mean", "inv_variance")))


def _no_peers(call: Call) -> None:
    if call.node.attributes["peer_stats"]:
        raise cudnnGraphNotSupportedError(
            f"{call.node.name}: peer_stats were given; openconv normalises over the images of one device"
        )


_RUNNING = ("in_running_mean", "in_running_var")

# -- reductions and windows -------------------------------------------------------------------------------------------


def _reduction(call: Call) -> GraphTensor:
    if call.node.attributes["group_offset"] is not None:
        raise cudnnGraphNotSupportedError(f"{call.node.name}: group_offset was given; openconv reduces whole axes")
    x, (dim, _) = call["input"], call.wanted("OUT_0")
    mode = call.node.attributes["mode"]
    mode = mode.value if isinstance(mode, reduction_mode) else str(mode).lower()
    if dim is None:
        raise RuntimeError(f"{call.node.name}: sizes of the result are not known; wanted set_dim(...) of it, 1 where "
                           "values are reduced")  # fmt: skip
    if len(dim) != x.dim() or any(have not in (size, 1) for have, size in zip(dim, x.shape, strict=True)):
        raise RuntimeError(
            f"{call.node.name}: dim of the result is {dim}; wanted those of input, {list(x.shape)}, or 1"
        )
    axes = tuple(axis for axis, (have, size) in enumerate(zip(dim, x.shape, strict=True)) if have != size)
    return call.graph.reduction(x, mode, axes=axes)


def _window(call: Call) -> dict[str, Any]:
    given = call.node.attributes
    mode = given["mode"]
    mode = mode.value if isinstance(mode, resample_mode) else str(mode).lower()
    if mode not in ("max", "avg", "avg_exclude"):
        raise cudnnGraphNotSupportedError(f"{call.node.name}: resample mode is {given['mode']}; openconv pools: "
                                          "MAXPOOL, AVGPOOL_INCLUDE_PADDING, AVGPOOL_EXCLUDE_PADDING")  # fmt: skip
    if given["window"] is None:
        raise TypeError(f"{call.node.name}: window is missing; wanted one size per spatial axis")
    where = _where(call)
    stride = None if given["stride"] is None else where["stride"]
    return {"mode": mode, "window": _plain(given["window"]), "stride": stride, "padding": where["padding"]}


def _resample(call: Call) -> GraphTensor:
    return call.graph.resample(call["input"], **_window(call))


def _resample_backward(call: Call) -> GraphTensor:
    return call.graph.resample_backward(call["loss"], call["input"], **_window(call))


_WINDOW = {"mode": None, "window": None, "stride": None, "padding": None, "pre_padding": None, "post_padding": None}

# -- moving about -----------------------------------------------------------------------------------------------------


def _reshape(call: Call) -> GraphTensor:
    """Without strides of the result, or if LOGICAL: elements keep their order. With strides: the same memory by other
    strides, which is said by axes in the order they lie in."""
    x, (dim, stride) = call["input"], call.wanted("OUT_0")
    if dim is None:
        raise RuntimeError(f"{call.node.name}: sizes of the result are not known; wanted set_dim(...) of it")
    if stride is None or call.node.attributes["reshape_mode"] is reshape_mode.LOGICAL:
        return call.graph.reshape(x, tuple(dim))
    inward, outward = _lying(x.shape, x.strides), _lying(dim, stride)
    for what, sizes, steps, order in (("input", x.shape, x.strides, inward), ("result", dim, stride, outward)):
        if not _dense([sizes[axis] for axis in order], [steps[axis] for axis in order]):
            raise cudnnGraphNotSupportedError(f"{call.node.name}: {what} has sizes {list(sizes)} and strides "
                                              f"{list(steps)}; a view is taken of memory without gaps")  # fmt: skip
    g = call.graph
    flat = x if inward == sorted(inward) else g.transpose(x, tuple(inward))
    made = g.reshape(flat, tuple(dim[axis] for axis in outward))
    back = sorted(range(len(dim)), key=outward.__getitem__)
    return made if back == sorted(back) else g.transpose(made, tuple(back))


def _lying(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Axes from the outermost to the innermost; those of one element stay where they are."""
    real = sorted((axis for axis, size in enumerate(sizes) if size != 1), key=lambda axis: -strides[axis])
    taken = iter(real)
    return [axis if size == 1 else next(taken) for axis, size in enumerate(sizes)]


def _dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _transpose(call: Call) -> GraphTensor:
    return call.graph.transpose(call["input"], tuple(call.node.attributes["permutation"] or ()))


def _slice(call: Call) -> GraphTensor:
    x, cuts = call["input"], list(call.node.attributes["slices"] or ())
    if len(cuts) > x.dim():
        raise RuntimeError(
            f"{call.node.name}: {len(cuts)} slices were given of {x.dim()} axes; wanted one each at most"
        )
    cuts += [slice(None)] * (x.dim() - len(cuts))
    starts, limits, steps = zip(*(cut.indices(size) for cut, size in zip(cuts, x.shape, strict=True)), strict=True)
    if min(steps) < 1:
        raise cudnnGraphNotSupportedError(
            f"{call.node.name}: steps are {steps}; openconv cuts with steps of at least 1"
        )
    limits = tuple(max(start, limit) for start, limit in zip(starts, limits, strict=True))
    # An end that was left open stays open, for other batch sizes.
    ends = tuple(None if cut.stop is None else limit for cut, limit in zip(cuts, limits, strict=True))
    return call.graph.slice(x, starts, ends, steps)


def _concatenate(call: Call) -> GraphTensor:
    if call.node.attributes["in_place_index"] not in (None, -1):
        place = call.node.attributes["in_place_index"]
        raise cudnnGraphNotSupportedError(f"{call.node.name}: in_place_index is {place}; openconv copies every input")
    ports = [port for port in call.node.inputs if port.startswith("inputs_")]
    return call.graph.concatenate([call[port] for port in ports], call.node.attributes["axis"])


_LIST: list[Operation] = [
    Operation("conv_fprop", ("image", "weight"), ("Y",), _fprop, _PLACES),
    Operation("conv_dgrad", ("loss", "filter"), ("DX",), _dgrad, _PLACES, aliases={"weight": "filter"}),
    Operation("conv_wgrad", ("image", "loss"), ("DW",), _wgrad, _PLACES),
    Operation("matmul", ("A", "B"), ("C",), _matmul, {"padding": 0.0}),
    *_of_many(),
    Operation("relu", ("input",), ("OUT_0",), _relu, _CLIPS),
    Operation("relu_backward", ("loss", "input"), ("OUT_0",), _relu_backward, _CLIPS),
    Operation("leaky_relu", ("input",), ("OUT_0",), _with("leaky_relu", ("input",), "negative_slope", None),
              {"negative_slope": None}),
    Operation("leaky_relu_backward", ("loss", "input"), ("OUT_0",),
              _with("leaky_relu_backward", ("loss", "input"), "negative_slope", None), {"negative_slope": None}),
    Operation("swish", ("input",), ("OUT_0",), _with("swish", ("input",), "swish_beta", 1.0), {"swish_beta": None}),
    Operation("swish_backward", ("loss", "input"), ("OUT_0",),
              _with("swish_backward", ("loss", "input"), "swish_beta", 1.0), {"swish_beta": None}),
    Operation("binary_select", ("input0", "input1", "mask"), ("OUT_0",), _select),
    Operation("gen_index", ("input",), ("OUT_0",), _gen_index, {"axis": None}, keeps=True),
    Operation("identity", ("input",), ("OUT_0",), lambda call: call.graph.identity(call["input"])),
    Operation("bias", ("input", "bias"), ("OUT_0",), _per_channel("bias")),
    Operation("scale", ("input", "scale"), ("OUT_0",), _per_channel("scale")),
    Operation("batchnorm_inference", ("input", "scale", "bias", "mean", "inv_variance"), ("Y",), _batchnorm_inference),
    Operation("batchnorm", ("input", "scale", "bias", *(f"{name}?" for name in _RUNNING), "epsilon?", "momentum?"),
              ("Y", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR"), _batchnorm, {"peer_stats": None}),
    Operation("batchnorm_backward", ("grad", "input", "scale", "mean", "inv_variance"), ("DX", "DSCALE", "DBIAS"),
              _batchnorm_backward, {"peer_stats": None}, aliases={"loss": "grad"}),
    Operation("genstats", ("input",), ("SUM", "SQ_SUM"), lambda call: call.graph.genstats(call["input"]), keeps=True),
    Operation("reduction", ("input",), ("OUT_0",), _reduction, {"mode": reduction_mode.ADD, "group_offset": None}),
    Operation("resample", ("input",), ("Y",), _resample, _WINDOW),
    Operation("resample_backward", ("loss", "input"), ("DX",), _resample_backward, _WINDOW),
    Operation("reshape", ("input",), ("OUT_0",), _reshape, {"reshape_mode": None}, keeps=True),
    Operation("transpose", ("input",), ("OUT_0",), _transpose, {"permutation": None}, keeps=True),
    Operation("slice", ("input",), ("OUT_0",), _slice, {"slices": None}, keeps=True),
    Operation("concatenate", ("inputs*",), ("OUT_0",), _concatenate, {"axis": 0, "in_place_index": None}, keeps=True),
]  # fmt: skip
OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in _LIST}

_RECURRENT = ("gdn", "gdn2", "gdp", "kda", "mamba2")
REFUSED = frozenset({
    "sdpa", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward", "sdpa_mxfp8", "sdpa_mxfp8_backward",
    "rmsnorm", "rmsnorm_backward", "layernorm", "layernorm_backward", "adalayernorm", "adalayernorm_backward",
    "instancenorm", "instancenorm_backward", "block_scale_quantize", "block_scale_dequantize",
    "moe_grouped_matmul", "moe_grouped_matmul_bwd", "rope", "rope_backward", "rng", "matmul_fp8",
    *(f"{name}{what}" for name in _RECURRENT for what in ("", "_bwd", "_summary", "_summary_bwd")),
})  # fmt: skip
"""Methods of the frontend's graphs that are no part of a convolution network."""


def dgrad_order(first: Sequence[int], second: Sequence[int], groups: int | None) -> tuple[str, str]:
    """Names of two positional arguments of conv_dgrad, by their sizes. The frontend's order is (loss, filter), that of
    its tutorial (weight, loss). Channels tell which it is: the filter has as many filters as the loss has channels.
    Where both would fit, the filter is the smaller one; ValueError if neither is."""
    sizes = list(first), list(second)
    if min(map(len, sizes)) < 3 or len(sizes[0]) != len(sizes[1]):
        return "loss", "filter"  # to be refused when the graph is translated
    fits = [order for order in (("loss", "filter"), ("filter", "loss")) if _fits(dict(zip(order, sizes)), groups or 1)]
    if len(fits) != 2:
        return fits[0] if fits else ("loss", "filter")
    smaller = [all(a <= b for a, b in zip(one[2:], other[2:])) for one, other in (sizes, sizes[::-1])]
    if smaller[0] == smaller[1]:
        raise ValueError(f"conv_dgrad: arguments have sizes {sizes[0]} and {sizes[1]}, and either could be the filter; "
                         "wanted names: conv_dgrad(loss=..., filter=...)")  # fmt: skip
    return ("filter", "loss") if smaller[0] else ("loss", "filter")


def _fits(sizes: Mapping[str, Sequence[int]], groups: int) -> bool:
    return sizes["filter"][0] == sizes["loss"][1] and sizes["filter"][0] % groups == 0
