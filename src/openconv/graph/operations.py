"""What each operation of a graph makes of shapes, dtypes and layouts, and what it asks of its arguments.

Errors are raised when a node is added, before anything runs. They name the node, the argument, what was seen and what
was wanted: ``conv_fprop_1: image has 64 channels and weight (128, 32, 3, 3) takes 32 in 1 group(s)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, prod
from typing import Any

import torch

from ..epilogue import OPS
from ..pool import Pool
from ..problem import DIRECTIONS, Problem, output_size
from ..tensors import ALL_DTYPES, ALL_NAMES
from ..tree import MODES
from .ir import GraphTensor, Meta, Node

__all__ = [
    "POINTWISE",
    "VIEWS",
    "channels_of",
    "check_dtype",
    "infer",
    "per_axis",
    "pool_of",
    "promote",
    "vector_shape",
]

POINTWISE = frozenset(OPS) | {"cast", "identity"}
VIEWS = frozenset({"reshape", "transpose", "slice", "expand"})

_FLOATS = ("f64", "f32", "f16", "bf16")
_BOOLEAN = frozenset(op for op in OPS if op.startswith(("cmp_", "logical_")))
# Those that have whole numbers for results where they are given such.
_WHOLE = frozenset({"add", "sub", "mul", "max", "min", "neg", "abs", "mod", "relu", "clamp", "sign", "add_square",
                    "ceil", "floor", "select", "relu_backward", "clamp_backward"})  # fmt: skip


def check_dtype(dtype: Any, where: str) -> str:
    """The project's name of a dtype, given as that or as torch's."""
    name = ALL_NAMES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in ALL_DTYPES:
        raise TypeError(f"{where}: dtype is {dtype!r}; wanted one of {', '.join(ALL_DTYPES)}")
    return str(name)


def promote(*dtypes: str) -> str:
    """The dtype that torch would compute a mixture in."""
    found = ALL_DTYPES[dtypes[0]]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, ALL_DTYPES[dtype])
    return ALL_NAMES[found]


def infer(node: Node) -> list[Meta]:
    """The results of a node that is about to be added."""
    rule = _pointwise if node.op in OPS else _RULES.get(node.op)
    if rule is None:
        raise ValueError(f"there is no operation {node.op!r}; wanted one of {', '.join((*_RULES, *OPS))}")
    return rule(node)


def _fail(node: Node, text: str, kind: type[Exception] = RuntimeError) -> Exception:
    return kind(f"{node.name}: {text}")


def _tensor(node: Node, at: int, name: str) -> GraphTensor:
    value = node.args[at]
    if not isinstance(value, GraphTensor):
        raise _fail(node, f"{name} is {value!r}; wanted a tensor", TypeError)
    return value


def per_axis(node: str, name: str, value: Any, rank: int, least: int) -> tuple[int, ...]:
    """One int for each axis, from one for all or one each."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        values *= rank
    if len(values) != rank:
        raise RuntimeError(f"{node}: {name} has {len(values)} values; wanted one or {rank}, one per spatial axis")
    if any(not isinstance(v, int) or isinstance(v, bool) or v < least for v in values):
        raise RuntimeError(f"{node}: {name} is {value}; wanted integers of at least {least}")
    return values


def paddings(node: str, value: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """(low, high) of each axis, from one int for all, one each, or pairs."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    pairs = [tuple(v) if isinstance(v, Sequence) else (v, v) for v in values]
    if len(pairs) == 1:
        pairs *= rank
    if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
        raise RuntimeError(f"{node}: padding is {value}; wanted one value or {rank}, each an int or (low, high)")
    if any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for pair in pairs for v in pair):
        raise RuntimeError(f"{node}: padding is {value}; wanted integers of at least 0")
    return tuple((int(low), int(high)) for low, high in pairs)


# -- convolutions ---------------------------------------------------------------------------------------------------


def problem_of(node: Node) -> Problem:
    """The convolution of a node, without what is fused: dtypes and layouts are those of its tensors."""
    first, second = (_tensor(node, at, name) for at, name in enumerate(_ARGUMENTS[node.op]))
    for name, value in zip(_ARGUMENTS[node.op], (first, second), strict=True):
        if not 3 <= value.dim() <= 5:
            raise _fail(node, f"{name} has shape {value.shape}; wanted 3 to 5 axes (N, C and one to three sizes)")
    if first.dim() != second.dim():
        names = _ARGUMENTS[node.op]
        raise _fail(node, f"{names[0]} is {first.shape} and {names[1]} {second.shape}; wanted as many axes of both")
    if first.dtype != second.dtype:
        names = _ARGUMENTS[node.op]
        raise _fail(
            node, f"{names[0]} is {first.dtype} and {names[1]} {second.dtype}; wanted one dtype: cast one of them"
        )
    rank = first.dim() - 2
    stride = per_axis(node.name, "stride", node.attrs["stride"], rank, 1)
    dilation = per_axis(node.name, "dilation", node.attrs["dilation"], rank, 1)
    padding = paddings(node.name, node.attrs["padding"], rank)
    (groups,) = per_axis(node.name, "groups", node.attrs["groups"], 1, 1)
    sizes = _SIZES[node.op](node, first, second, stride, padding, dilation, groups)
    layout = "nhwc" if "nhwc" in (first.layout, second.layout) and rank > 1 else "nchw"
    layouts = {"conv_fprop": (first.layout, second.layout, layout), "conv_dgrad": (layout, first.layout, second.layout),
               "conv_wgrad": (first.layout, layout, second.layout)}[node.op]  # fmt: skip
    try:
        return Problem(direction=node.op[5:], stride=stride, padding=padding, dilation=dilation, groups=groups,
                       dtypes=(first.dtype,) * 3, layouts=layouts, **sizes)  # fmt: skip
    except ValueError as error:
        raise _fail(node, str(error)) from None


_ARGUMENTS = {
    "conv_fprop": ("image", "weight"), "conv_dgrad": ("weight", "loss"), "conv_wgrad": ("image", "loss"),
}  # fmt: skip


def _fprop_sizes(node: Node, image: GraphTensor, weight: GraphTensor, *rest: Any) -> dict[str, Any]:
    groups = rest[3]
    c = image.shape[1]
    if c != weight.shape[1] * groups:
        raise _fail(node, f"image {image.shape} has {c} channels, and weight {weight.shape} takes {weight.shape[1]} in "
                          f"{groups} group(s); wanted {weight.shape[1] * groups}")  # fmt: skip
    return {"n": image.shape[0], "c": c, "k": weight.shape[0], "spatial": image.shape[2:], "filter": weight.shape[2:]}


def _dgrad_sizes(
    node: Node, weight: GraphTensor, loss: GraphTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> dict[str, Any]:
    if loss.shape[1] != weight.shape[0]:
        raise _fail(node, f"loss {loss.shape} has {loss.shape[1]} channels; wanted {weight.shape[0]}, as weight "
                          f"{weight.shape} has filters")  # fmt: skip
    taps = weight.shape[2:]
    wanted = node.attrs.get("output_size")
    least = [
        (size - 1) * step - low - high + dil * (tap - 1) + 1
        for size, step, (low, high), dil, tap in zip(loss.shape[2:], stride, padding, dilation, taps, strict=True)
    ]
    spatial = tuple(least) if wanted is None else per_axis(node.name, "output_size", wanted, len(taps), 1)
    for axis, (size, low, step) in enumerate(zip(spatial, least, stride, strict=True)):
        if not low <= size < low + step:
            seen = f"output_size is {spatial}; a loss of {loss.shape[2:]} comes"
            raise _fail(node, f"{seen} from {low} to {low + step - 1} on axis {axis}")
    return {"n": loss.shape[0], "c": weight.shape[1] * groups, "k": weight.shape[0], "spatial": spatial, "filter": taps}


def _wgrad_sizes(
    node: Node, image: GraphTensor, loss: GraphTensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> dict[str, Any]:
    if image.shape[0] != loss.shape[0]:
        raise _fail(node, f"image {image.shape} and loss {loss.shape} are of {image.shape[0]} and {loss.shape[0]} "
                          "images; wanted one batch")  # fmt: skip
    rank = image.dim() - 2
    wanted = node.attrs.get("filter_size")
    taps: list[int] = []
    for axis in range(rank):
        low, high = padding[axis]
        fits = [
            tap for tap in range(1, (image.shape[2 + axis] + low + high - 1) // dilation[axis] + 2)
            if output_size(image.shape[2 + axis], tap, stride[axis], low, high, dilation[axis]) == loss.shape[2 + axis]
        ] if wanted is None else list(per_axis(node.name, "filter_size", wanted, rank, 1)[axis : axis + 1])  # fmt: skip
        if len(fits) != 1:
            what = f"any of {fits}" if fits else "no filter"
            raise _fail(node, f"image {image.shape} becomes loss {loss.shape} with {what} on axis {axis}; wanted one: "
                              "give filter_size")  # fmt: skip
        taps.append(fits[0])
        made = output_size(image.shape[2 + axis], taps[-1], stride[axis], low, high, dilation[axis])
        if made != loss.shape[2 + axis]:
            seen = f"on axis {axis} it makes {made} of {image.shape[2 + axis]}"
            raise _fail(node, f"filter_size is {wanted}; {seen}, and loss has {loss.shape[2 + axis]}")
    return {"n": image.shape[0], "c": image.shape[1], "k": loss.shape[1], "spatial": image.shape[2:], "filter": taps}


_SIZES: dict[str, Callable[..., dict[str, Any]]] = {
    "conv_fprop": _fprop_sizes, "conv_dgrad": _dgrad_sizes, "conv_wgrad": _wgrad_sizes,
}  # fmt: skip


def _convolution(node: Node) -> list[Meta]:
    problem = problem_of(node)
    node.attrs["problem"] = problem
    return [Meta(problem.result_shape, problem.result_dtype, problem.layouts[problem.result])]


# -- matrices ---------------------------------------------------------------------------------------------------------


def _matmul(node: Node) -> list[Meta]:
    a, b = _tensor(node, 0, "a"), _tensor(node, 1, "b")
    if a.dim() < 2 or b.dim() < 2:
        raise _fail(node, f"a is {a.shape} and b {b.shape}; wanted two axes or more of both")
    if a.shape[-1] != b.shape[-2]:
        wanted = f"the last of a, {a.shape[-1]}, to be the last but one of b, {b.shape[-2]}"
        raise _fail(node, f"a is {a.shape} and b {b.shape}; wanted {wanted}")
    if a.dtype != b.dtype:
        raise _fail(node, f"a is {a.dtype} and b {b.dtype}; wanted one dtype: cast one of them")
    batch = _broadcast(node, [a.shape[:-2], b.shape[:-2]])
    return [Meta((*batch, a.shape[-2], b.shape[-1]), a.dtype)]


# -- pointwise --------------------------------------------------------------------------------------------------------


def _broadcast(node: Node, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    first = tuple(shapes[0])
    if all(tuple(shape) == first for shape in shapes[1:]):
        return first
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        shown = ", ".join(str(tuple(shape)) for shape in shapes)
        raise _fail(node, f"arguments have shapes {shown}; wanted shapes that broadcast") from None


def _pointwise(node: Node) -> list[Meta]:
    spec = OPS[node.op]
    if len(node.args) != spec.values:
        raise _fail(node, f"{node.op} was given {len(node.args)} value(s); wanted {spec.values}", TypeError)
    for at, arg in enumerate(node.args):
        if not isinstance(arg, GraphTensor) and (not isinstance(arg, int | float) or isinstance(arg, bool)):
            raise _fail(node, f"argument {at} is {arg!r}; wanted a tensor or a number", TypeError)
        if isinstance(arg, float) and isnan(arg):
            raise _fail(node, f"argument {at} is nan; wanted a number or an infinity, or a constant tensor", ValueError)
    tensors = node.tensors
    if not tensors:
        raise _fail(node, "all arguments are numbers; wanted a tensor among them", TypeError)
    if len(node.attrs.get("params", ())) > len(spec.params):
        raise _fail(node, f"{node.op} was given parameters {node.attrs['params']}; wanted {len(spec.params)} at most")
    shape = _broadcast(node, [t.shape for t in tensors])
    typed = (
        tensors[1:] if node.op == "select" and len(tensors) > 1 and isinstance(node.args[0], GraphTensor) else tensors
    )
    dtype = _promoted(node, typed)
    whole = dtype not in _FLOATS
    if whole and (node.op not in _WHOLE or any(isinstance(arg, float) for arg in node.args)):
        dtype = "f32"
    if node.op in _BOOLEAN:
        dtype = "bool"
    return [Meta(shape, node.attrs.get("dtype") or dtype, _layout(shape, tensors))]


def _promoted(node: Node, tensors: Sequence[GraphTensor]) -> str:
    for each in tensors:
        _real(node, each)
    try:
        return promote(*(t.dtype for t in tensors))
    except RuntimeError:
        names = ", ".join(dict.fromkeys(t.dtype for t in tensors))
        raise _fail(node, f"arguments are {names}, which torch does not mix; wanted one dtype: cast some") from None


def _real(node: Node, value: GraphTensor) -> GraphTensor:
    if value.dtype.startswith("complex"):
        raise _fail(node, f"{value.name} is {value.dtype}; wanted real numbers", TypeError)
    return value


def _layout(shape: tuple[int, ...], tensors: Sequence[GraphTensor]) -> str:
    full = [t for t in tensors if t.shape == shape]
    return full[0].layout if full else "nchw"


def _cast(node: Node) -> list[Meta]:
    value = _real(node, _tensor(node, 0, "input"))
    return [Meta(value.shape, check_dtype(node.attrs["dtype"], node.name), value.layout)]


def _identity(node: Node) -> list[Meta]:
    return [_tensor(node, 0, "input").meta]


def _gen_index(node: Node) -> list[Meta]:
    value = _tensor(node, 0, "input")
    axis = node.attrs["axis"]
    if not isinstance(axis, int) or not 0 <= axis < value.dim():
        raise _fail(node, f"axis is {axis!r}; wanted 0 to {value.dim() - 1}")
    return [Meta(value.shape, "i32", value.layout)]


# -- normalisation and reductions -----------------------------------------------------------------------------------


def channels_of(value: GraphTensor) -> tuple[int, ...]:
    """The axes that a sum over all but the channels runs over."""
    return (0, *range(2, value.dim()))


def vector_shape(value: GraphTensor) -> tuple[int, ...]:
    """(1, C, 1, ...)."""
    return (1, value.shape[1], *(1,) * (value.dim() - 2))


def _vector(node: Node, at: int, name: str, like: GraphTensor) -> GraphTensor:
    value = _tensor(node, at, name)
    if value.shape not in ((like.shape[1],), vector_shape(like)):
        raise _fail(node, f"{name} has shape {value.shape}; wanted ({like.shape[1]},) or {vector_shape(like)}")
    return value


def _image(node: Node, at: int, name: str) -> GraphTensor:
    value = _tensor(node, at, name)
    if value.dim() < 2:
        raise _fail(node, f"{name} has shape {value.shape}; wanted two axes or more, channels second")
    if value.dtype not in _FLOATS:
        raise _fail(node, f"{name} is {value.dtype}; wanted one of {', '.join(_FLOATS)}")
    return value


def _wide(dtype: str) -> str:
    return "f64" if dtype == "f64" else "f32"


def _batchnorm_inference(node: Node) -> list[Meta]:
    x = _image(node, 0, "input")
    for at, name in enumerate(("scale", "bias", "mean", "inv_variance"), 1):
        _vector(node, at, name, x)
    return [x.meta]


def _batchnorm(node: Node) -> list[Meta]:
    x = _image(node, 0, "input")
    names = ("scale", "bias", "running_mean", "running_variance")[: len(node.args) - 1]
    vectors = [_vector(node, at, name, x) for at, name in enumerate(names, 1)]
    if x.size // max(x.shape[1], 1) < 2 and x.size:
        raise _fail(node, f"input has shape {x.shape}; wanted more than one value per channel when training")
    shape = vectors[0].shape
    return [x.meta] + [Meta(shape, _wide(x.dtype))] * 2 + [Meta(v.shape, v.dtype) for v in vectors[2:]]


def _batchnorm_backward(node: Node) -> list[Meta]:
    loss, x = _image(node, 0, "loss"), _image(node, 1, "input")
    if loss.shape != x.shape:
        raise _fail(node, f"loss has shape {loss.shape} and input {x.shape}; wanted one shape")
    vectors = [_vector(node, at, name, x) for at, name in enumerate(("scale", "mean", "inv_variance"), 2)]
    return [Meta(x.shape, x.dtype, x.layout)] + [Meta(vectors[0].shape, _wide(x.dtype))] * 2


def _genstats(node: Node) -> list[Meta]:
    x = _image(node, 0, "input")
    return [Meta(vector_shape(x), _wide(x.dtype))] * 2


def _reduction(node: Node) -> list[Meta]:
    value = _real(node, _tensor(node, 0, "input"))
    mode, axes = node.attrs["mode"], node.attrs["axes"]
    if mode not in MODES:
        raise _fail(node, f"mode is {mode!r}; wanted one of {', '.join(MODES)}", ValueError)
    if any(not isinstance(a, int) or not 0 <= a < value.dim() for a in axes) or len(set(axes)) != len(axes):
        raise _fail(
            node, f"axes are {axes} of a tensor {value.shape}; wanted each of 0 to {value.dim() - 1} once at most"
        )
    if prod(value.shape[a] for a in axes) == 0 and mode in ("min", "max", "amax", "avg"):
        raise _fail(node, f"{mode} runs over no values of {value.shape}; wanted one at least")
    kept = [1 if a in axes else size for a, size in enumerate(value.shape)]
    shape = kept if node.attrs["keepdims"] else [size for a, size in enumerate(value.shape) if a not in axes]
    whole = value.dtype not in _FLOATS
    dtype = "f32" if whole and mode in ("avg", "norm1", "norm2") else value.dtype
    return [Meta(tuple(shape), node.attrs.get("dtype") or dtype)]


# -- pooling ----------------------------------------------------------------------------------------------------------


def pool_of(node: Node) -> Pool:
    """The pooling of a node."""
    x = node.args[1 if node.op == "resample_backward" else 0]
    assert isinstance(x, GraphTensor)
    rank = x.dim() - 2
    if not 1 <= rank <= 3:
        raise _fail(node, f"input has shape {x.shape}; wanted 3 to 5 axes")
    window = per_axis(node.name, "window", node.attrs["window"], rank, 1)
    stride = node.attrs["stride"]
    try:
        return Pool(
            mode=node.attrs["mode"], window=window,
            stride=window if stride is None else per_axis(node.name, "stride", stride, rank, 1),
            padding=paddings(node.name, node.attrs["padding"], rank), n=x.shape[0], c=x.shape[1], spatial=x.shape[2:],
            dtype=x.dtype, layout=x.layout,
        )  # fmt: skip
    except ValueError as error:
        raise _fail(node, str(error)) from None


def _resample(node: Node) -> list[Meta]:
    x = _image(node, 0, "input")
    return [Meta(tuple(pool_of(node).y_shape), x.dtype, x.layout)]


def _resample_backward(node: Node) -> list[Meta]:
    loss, x = _image(node, 0, "loss"), _image(node, 1, "input")
    wanted = tuple(pool_of(node).y_shape)
    if loss.shape != wanted:
        raise _fail(node, f"loss has shape {loss.shape}; wanted {wanted}, what input {x.shape} is pooled to")
    return [x.meta]


# -- moving about -----------------------------------------------------------------------------------------------------


def _reshape(node: Node) -> list[Meta]:
    value = _tensor(node, 0, "input")
    wanted = list(node.attrs["shape"])
    shape = [
        value.shape[at] if size == 0 and at < value.dim() and value.size else size for at, size in enumerate(wanted)
    ]
    if shape.count(-1) > 1 or any(not isinstance(size, int) or size < -1 for size in shape):
        raise _fail(node, f"shape is {tuple(wanted)}; wanted sizes, and -1 once at most")
    if -1 in shape:
        rest = prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = value.size // rest if rest else 0
    if prod(shape) != value.size:
        hint = "; a size of -1 follows the batch" if -1 not in wanted else ""
        raise _fail(node, f"shape is {tuple(wanted)}; input {value.shape} has {value.size} values{hint}")
    return [Meta(tuple(shape), value.dtype)]


def _transpose(node: Node) -> list[Meta]:
    value = _tensor(node, 0, "input")
    order = tuple(node.attrs["permutation"])
    if sorted(order) != list(range(value.dim())):
        raise _fail(node, f"permutation is {order}; wanted each of 0 to {value.dim() - 1} once")
    return [Meta(tuple(value.shape[axis] for axis in order), value.dtype)]


def _slice(node: Node) -> list[Meta]:
    value = _tensor(node, 0, "input")
    starts, limits, steps = (node.attrs[name] for name in ("starts", "limits", "steps"))
    if not len(starts) == len(limits) == len(steps) == value.dim():
        raise _fail(node, f"starts, limits and steps are {starts}, {limits} and {steps}; wanted {value.dim()} of each")
    shape = []
    for axis, (start, limit, step) in enumerate(zip(starts, limits, steps, strict=True)):
        limit = value.shape[axis] if limit is None else limit
        if not 0 <= start <= limit <= value.shape[axis] or step < 1:
            wanted = f"0 <= start <= limit <= {value.shape[axis]} and a step of at least 1"
            raise _fail(node, f"axis {axis} is cut from {start} to {limit} in steps of {step}; wanted {wanted}")
        shape.append(-(-(limit - start) // step))
    return [Meta(tuple(shape), value.dtype, value.layout)]


def _unslice(node: Node) -> list[Meta]:
    """The gradient of a slice: zeros of a shape around the values."""
    value = _tensor(node, 0, "input")
    return [Meta(tuple(node.attrs["shape"]), value.dtype, value.layout)]


def _expand(node: Node) -> list[Meta]:
    value = _tensor(node, 0, "input")
    shape = tuple(node.attrs["shape"])
    if _broadcast(node, [value.shape, shape]) != shape:
        raise _fail(node, f"shape is {shape}; input {value.shape} does not broadcast to it")
    return [Meta(shape, value.dtype)]


def _concatenate(node: Node) -> list[Meta]:
    values = [_tensor(node, at, f"input {at}") for at in range(len(node.args))]
    axis = node.attrs["axis"]
    if not values:
        raise _fail(node, "there are no inputs; wanted one at least")
    if not isinstance(axis, int) or not 0 <= axis < values[0].dim():
        raise _fail(node, f"axis is {axis!r}; wanted 0 to {values[0].dim() - 1}")
    first = values[0].shape
    for at, value in enumerate(values):
        if value.dim() != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(value.shape, first, strict=True)) if i != axis
        ):
            raise _fail(
                node, f"input {at} has shape {value.shape}; wanted that of the first, {first}, but for axis {axis}"
            )
    shape = (*first[:axis], sum(v.shape[axis] for v in values), *first[axis + 1 :])
    return [Meta(shape, _promoted(node, values), values[0].layout)]


_RULES: dict[str, Callable[[Node], list[Meta]]] = {
    **{f"conv_{direction}": _convolution for direction in DIRECTIONS},
    "matmul": _matmul, "cast": _cast, "identity": _identity, "gen_index": _gen_index,
    "batchnorm_inference": _batchnorm_inference, "batchnorm": _batchnorm, "batchnorm_backward": _batchnorm_backward,
    "genstats": _genstats, "reduction": _reduction, "resample": _resample, "resample_backward": _resample_backward,
    "reshape": _reshape, "transpose": _transpose, "slice": _slice, "unslice": _unslice, "expand": _expand,
    "concatenate": _concatenate,
}  # fmt: skip
