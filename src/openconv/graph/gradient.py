"""The gradient of a graph, as a graph.

For outputs y and their gradients d_y, the gradient with respect to an input x is the sum over all paths from x to y.
Nodes are walked backwards; each adds to the gradients of its arguments what its rule says, as nodes of the new graph.
Rules use the values that cost least to keep: a ReLU needs its result, which is stored anyway, not its argument.

Fusion then does with the new graph what it does with any: the slope of an activation becomes the epilogue of the
convolution that its gradient comes from, and the sum for a bias a reduction in the same pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .ir import Flow, GraphTensor, Node
from .operations import channels_of, vector_shape

if TYPE_CHECKING:
    from .builder import Graph

__all__ = ["Gradient", "differentiate", "has_gradient"]

_FLOATS = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True, eq=False)
class Gradient:
    """``graph`` computes gradients, from inputs, outputs and values of ``forward``, the graph that saves them.
    ``saved`` are the names of those that are results of ``forward`` beyond the outputs of the graph itself."""

    graph: Graph
    forward: Graph
    saved: tuple[str, ...]


def differentiate(graph: Graph, wrt: tuple[str, ...] | None, flow: Flow | None = None) -> Gradient:
    """The gradient with respect to inputs of these names; all of floating point if None."""
    from .builder import Graph

    source = graph.flow if flow is None else flow
    inputs = {tensor.name: tensor for tensor in source.inputs}
    names = tuple(n for n, t in inputs.items() if t.dtype in _FLOATS) if wrt is None else wrt
    for name in names:
        if name not in inputs:
            raise ValueError(f"wrt has {name!r}; wanted inputs of graph {graph.name!r}: {', '.join(inputs)}")
        if inputs[name].dtype not in _FLOATS:
            raise ValueError(f"wrt has {name!r}, which is {inputs[name].dtype}; a gradient is of {', '.join(_FLOATS)}")
    walk = _Walk(source, [inputs[name] for name in names])
    walk.run()
    saved = tuple(tensor for tensor in walk.used if tensor.node is not None and not tensor.is_output)

    settings: dict[str, Any] = {"policy": graph.policy, "rewrites": graph.rewrites, "fuse": graph.fuse}
    forward = Graph(f"{graph.name} forward", **settings)
    copied, place = source.copy()
    copied.marked = [*copied.marked, *(place[tensor] for tensor in saved)]
    forward._take(copied)
    backward = Graph(f"{graph.name} backward", **settings)
    backward._take(walk.new)
    backward.forward = forward
    for made in (forward, backward):
        made._closed = True
    return Gradient(backward, forward, tuple(place[tensor].name for tensor in saved))


def has_gradient(tensor: GraphTensor) -> bool:
    """Whether a gradient can flow into an output: one of floating point, but for running statistics, as in torch."""
    running = tensor.node is not None and tensor.node.op == "batchnorm" and tensor.index > 2
    return tensor.dtype in _FLOATS and not running


class _Walk:
    """From the outputs back: ``new`` is the gradient's flow, ``used`` the values of the old one that it needs."""

    def __init__(self, old: Flow, wrt: Sequence[GraphTensor]) -> None:
        self.old, self.wrt, self.new = old, wrt, Flow()
        self.new.reserved = set(old._names)
        self.used: dict[GraphTensor, GraphTensor] = {}
        self.gradients: dict[GraphTensor, GraphTensor] = {}
        active = set(wrt)
        for node in old.nodes:
            if any(arg in active for arg in node.tensors):
                active |= set(node.results)
        self.active = active

    def run(self) -> None:
        losses = []
        for tensor in self.old.outputs:
            if has_gradient(tensor):
                losses.append((tensor, self.new.input(tensor.meta, f"d_{tensor.name}")))
        for tensor, loss in losses:
            self._collect(tensor, loss)
        for node in reversed(self.old.nodes):
            given = [self.gradients.get(result) for result in node.results]
            if any(each is not None for each in given) and any(arg in self.active for arg in node.tensors):
                self._through(node, given)
        for tensor in self.wrt:
            found = self.gradients.get(tensor)
            if found is None:  # it has no part in any output
                zero = self.new.add("mul", self.value(tensor), 0.0)
                found = self.new.add("select", zero, zero, 0.0, dtype=tensor.dtype)
            elif found.node is None or any(found is other for other in self.new.marked):  # an output that is an input
                found = self.new.add("identity", found)
            name = f"d_{tensor.name}"
            if self.new.named(name) is None:
                self.new.rename(found, name)
            self.new.marked.append(found)

    def value(self, tensor: GraphTensor) -> GraphTensor:
        """A value of the graph, in the gradient's."""
        if tensor not in self.used:
            if tensor.value is not None:
                self.used[tensor] = self.new.constant(tensor.value, tensor.meta, tensor.name)
            else:
                self.used[tensor] = self.new.input(tensor.meta, tensor.name, tensor.strides)
        return self.used[tensor]

    def add(self, op: str, *args: Any, **attrs: Any) -> GraphTensor:
        """A node of the new graph, of values of the new graph, the old graph and numbers."""
        made: GraphTensor = self.new.add(op, *(self._here(arg) for arg in args), **attrs)
        return made

    def _here(self, arg: Any) -> Any:
        return self.value(arg) if isinstance(arg, GraphTensor) and arg._flow is self.old else arg

    def _through(self, node: Node, given: list[GraphTensor | None]) -> None:
        rule = _RULES.get(node.op)
        if rule is None:
            raise NotImplementedError(f"{node.name}: {node.op} has no gradient here; graphs of "
                                      f"{', '.join(sorted(_RULES))} have one")  # fmt: skip
        for arg, found in zip(node.args, rule(self, node, given), strict=True):
            if found is None or not isinstance(arg, GraphTensor) or arg not in self.active or arg.dtype not in _FLOATS:
                continue
            self._collect(arg, self._fitted(found, arg))

    def _collect(self, tensor: GraphTensor, gradient: GraphTensor) -> None:
        before = self.gradients.get(tensor)
        self.gradients[tensor] = gradient if before is None else self.add("add", before, gradient)

    def _fitted(self, found: GraphTensor, arg: GraphTensor) -> GraphTensor:
        """Summed over the axes along which the argument was broadcast, in its dtype."""
        if found.shape != arg.shape:
            missing = found.dim() - arg.dim()
            axes = (*range(missing), *(missing + at for at, size in enumerate(arg.shape)
                                       if size == 1 and found.shape[missing + at] != 1))  # fmt: skip
            if axes:
                found = self.add("reduction", found, mode="add", axes=axes, keepdims=True, dtype=arg.dtype)
            if found.shape != arg.shape:
                found = self.add("reshape", found, shape=arg.shape)
        return found if found.dtype == arg.dtype else self.add("cast", found, dtype=arg.dtype)


_Given = list[GraphTensor | None]
_Found = Sequence[GraphTensor | None]
_Rule = Callable[[_Walk, Node, _Given], _Found]


def _of(given: _Given) -> GraphTensor:
    assert given[0] is not None
    return given[0]


# -- convolutions and products ----------------------------------------------------------------------------------------


def _geometry(node: Node) -> dict[str, Any]:
    return {name: node.attrs[name] for name in ("padding", "stride", "dilation", "groups")}


def _matching(w: _Walk, loss: GraphTensor, other: GraphTensor) -> GraphTensor:
    """A result may be of another dtype than what it is made of."""
    return loss if loss.dtype == other.dtype else w.add("cast", loss, dtype=other.dtype)


def _conv_fprop(w: _Walk, node: Node, given: _Given) -> _Found:
    image, weight = node.tensors
    loss = _matching(w, _of(given), image)
    dx = dw = None
    if image in w.active:
        dx = w.add("conv_dgrad", weight, loss, output_size=image.shape[2:], **_geometry(node))
    if weight in w.active:
        dw = w.add("conv_wgrad", image, loss, filter_size=weight.shape[2:], **_geometry(node))
    return dx, dw


def _conv_dgrad(w: _Walk, node: Node, given: _Given) -> _Found:
    weight, loss = node.tensors
    back = _matching(w, _of(given), weight)
    dw = dloss = None
    if weight in w.active:
        dw = w.add("conv_wgrad", back, loss, filter_size=weight.shape[2:], **_geometry(node))
    if loss in w.active:
        dloss = w.add("conv_fprop", back, weight, **_geometry(node))
    return dw, dloss


def _conv_wgrad(w: _Walk, node: Node, given: _Given) -> _Found:
    image, loss = node.tensors
    back = _matching(w, _of(given), image)
    dx = dloss = None
    if image in w.active:
        dx = w.add("conv_dgrad", back, loss, output_size=image.shape[2:], **_geometry(node))
    if loss in w.active:
        dloss = w.add("conv_fprop", image, back, **_geometry(node))
    return dx, dloss


def _turned(w: _Walk, tensor: GraphTensor) -> GraphTensor:
    axes = tensor.dim()
    return w.add("transpose", tensor, permutation=(*range(axes - 2), axes - 1, axes - 2))


def _matmul(w: _Walk, node: Node, given: _Given) -> _Found:
    a, b = node.tensors
    loss = _matching(w, _of(given), a)
    da = w.add("matmul", loss, _turned(w, b)) if a in w.active else None
    db = w.add("matmul", _turned(w, a), loss) if b in w.active else None
    return da, db


# -- pointwise --------------------------------------------------------------------------------------------------------


def _pointwise(formula: Callable[..., Sequence[Any]]) -> _Rule:
    """``formula(add, loss, result, *args, *params)`` gives the gradient of each argument."""

    def rule(w: _Walk, node: Node, given: _Given) -> _Found:
        from ..epilogue import OPS

        params = node.attrs.get("params", ())
        params = (*params, *OPS[node.op].params[len(params) :]) if node.op in OPS else ()
        found = formula(w.add, _of(given), node.result, *node.args, *params)
        return [each if isinstance(each, GraphTensor) else None for each in found]

    return rule


def _share(add: Any, d: GraphTensor, a: Any, b: Any, op: str) -> GraphTensor:
    """d where a is the one that is chosen; half of it where both are equal, as in torch."""
    twice = add("add", add(f"cmp_{op}t", a, b, dtype=d.dtype), add(f"cmp_{op}e", a, b, dtype=d.dtype))
    made: GraphTensor = add("mul", d, add("mul", twice, 0.5))
    return made


def _pow(add: Any, d: Any, y: Any, a: Any, b: Any) -> Sequence[Any]:
    da = db = None
    if isinstance(a, GraphTensor):
        lower = b - 1.0 if not isinstance(b, GraphTensor) else add("sub", b, 1.0)
        da = add("mul", d, add("mul", add("pow", a, lower), b))
    if isinstance(b, GraphTensor):
        log = math.log(a) if not isinstance(a, GraphTensor) else add("log", a)
        grown = add("mul", add("mul", d, y), log)
        db = (
            grown if not isinstance(a, GraphTensor) else add("select", add("cmp_gt", a, 0.0, dtype=d.dtype), grown, 0.0)
        )
    return da, db


def _atan2(add: Any, d: Any, y: Any, a: Any, b: Any) -> Sequence[Any]:
    squares = (
        add("add_square", add("mul", a, a), b) if isinstance(a, GraphTensor) else add("add", add("mul", b, b), a * a)
    )
    scaled = add("div", d, squares)
    return add("mul", scaled, b), add("neg", add("mul", scaled, a))


def _div(add: Any, d: Any, y: Any, a: Any, b: Any) -> Sequence[Any]:
    back = add("div", d, b)
    return back, add("neg", add("mul", back, y)) if isinstance(b, GraphTensor) else None


def _slope_of(op: str) -> Callable[..., Sequence[Any]]:
    def formula(add: Any, d: Any, y: Any, a: Any, *params: float) -> Sequence[Any]:
        return (add(op, d, a, params=params) if params else add(op, d, a),)

    return formula


def _flat(op: str) -> Callable[..., Sequence[Any]]:
    """Of the backward forms whose slope is a step: linear in the loss, and constant in the other argument."""

    def formula(add: Any, d: Any, y: Any, loss: Any, x: Any, *params: float) -> Sequence[Any]:
        return add(op, d, x, params=params) if params else add(op, d, x), None

    return formula


_POINTWISE: dict[str, Callable[..., Sequence[Any]]] = {
    "add": lambda add, d, y, a, b: (d, d),
    "sub": lambda add, d, y, a, b: (d, add("neg", d)),
    "mul": lambda add, d, y, a, b: (add("mul", d, b), add("mul", d, a)),
    "div": _div,
    "add_square": lambda add, d, y, a, b: (d, add("mul", add("mul", d, 2.0), b)),
    "mod": lambda add, d, y, a, b: (d, add("div", add("mul", d, add("sub", y, a)), b)),
    "pow": _pow,
    "atan2": _atan2,
    "max": lambda add, d, y, a, b: (_share(add, d, a, b, "g"), _share(add, d, b, a, "g")),
    "min": lambda add, d, y, a, b: (_share(add, d, a, b, "l"), _share(add, d, b, a, "l")),
    "neg": lambda add, d, y, a: (add("neg", d),),
    "abs": lambda add, d, y, a: (add("mul", d, add("sign", a)),),
    "exp": lambda add, d, y, a: (add("mul", d, y),),
    "log": lambda add, d, y, a: (add("div", d, a),),
    "sqrt": lambda add, d, y, a: (add("div", add("mul", d, 0.5), y),),
    "rsqrt": lambda add, d, y, a: (add("mul", add("mul", d, -0.5), add("mul", y, add("mul", y, y))),),
    "reciprocal": lambda add, d, y, a: (add("neg", add("mul", d, add("mul", y, y))),),
    "sin": lambda add, d, y, a: (add("mul", d, add("cos", a)),),
    "cos": lambda add, d, y, a: (add("neg", add("mul", d, add("sin", a))),),
    "tan": lambda add, d, y, a: (add("mul", d, add("add", add("mul", y, y), 1.0)),),
    "erf": lambda add, d, y, a: (
        add("mul", d, add("mul", add("exp", add("neg", add("mul", a, a))), 2 / math.sqrt(math.pi))),
    ),
    "relu": lambda add, d, y, a: (add("relu_backward", d, y),),
    "leaky_relu": _slope_of("leaky_relu_backward"),
    "elu": _slope_of("elu_backward"),
    "clamp": _slope_of("clamp_backward"),
    "sigmoid": lambda add, d, y, a: (add("mul", d, add("mul", y, add("sub", 1.0, y))),),
    "tanh": lambda add, d, y, a: (add("mul", d, add("sub", 1.0, add("mul", y, y))),),
    "silu": lambda add, d, y, a: (add("swish_backward", d, a),),
    "swish": _slope_of("swish_backward"),
    "softplus": _slope_of("softplus_backward"),
    "hardswish": _slope_of("hardswish_backward"),
    "gelu": _slope_of("gelu_backward"),
    "gelu_tanh": _slope_of("gelu_tanh_backward"),
    "select": lambda add, d, y, p, a, b: (None, add("select", p, d, 0.0), add("select", p, 0.0, d)),
    "relu_backward": _flat("relu_backward"),
    "leaky_relu_backward": _flat("leaky_relu_backward"),
    "clamp_backward": _flat("clamp_backward"),
    "identity": lambda add, d, y, a: (d,),
    "cast": lambda add, d, y, a: (d,),
}
_CONSTANT = ("ceil", "floor", "sign", "cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "logical_and",
             "logical_or", "logical_not")  # fmt: skip


# -- channels and reductions ------------------------------------------------------------------------------------------


def _wide(tensor: GraphTensor) -> str:
    return "f64" if tensor.dtype == "f64" else "f32"


def _shaped(w: _Walk, vector: GraphTensor, x: GraphTensor) -> GraphTensor:
    wanted = vector_shape(x)
    return w.value(vector) if vector.shape == wanted else w.add("reshape", vector, shape=wanted)


def _vectors(w: _Walk, found: Sequence[GraphTensor | None], like: Sequence[GraphTensor]) -> list[GraphTensor | None]:
    """In the shapes of the vectors that were given."""
    return [
        each if each is None or each.shape == arg.shape else w.add("reshape", each, shape=arg.shape)
        for each, arg in zip(found, like, strict=True)
    ]


def _batchnorm_inference(w: _Walk, node: Node, given: _Given) -> _Found:
    x, *vectors = node.tensors
    d, wide, axes = _of(given), _wide(x), channels_of(x)
    scale, _, mean, inverse = (_shaped(w, vector, x) for vector in vectors)
    factor = w.add("mul", scale, inverse, dtype=wide)
    dx = w.add("mul", d, factor, dtype=x.dtype)
    found: list[GraphTensor | None] = [None] * 4
    if any(vector in w.active for vector in vectors):
        total = w.add("reduction", d, mode="add", axes=axes, keepdims=True, dtype=wide)
        centred = w.add("sub", x, mean, dtype=wide)
        product = w.add(
            "reduction", w.add("mul", d, centred, dtype=wide), mode="add", axes=axes, keepdims=True, dtype=wide
        )
        found = [w.add("mul", product, inverse, dtype=wide), total,
                 w.add("neg", w.add("mul", total, factor, dtype=wide)),
                 w.add("mul", product, scale, dtype=wide)]  # fmt: skip
    return dx, *_vectors(w, found, vectors)


def _batchnorm(w: _Walk, node: Node, given: _Given) -> _Found:
    if any(each is not None for each in given[1:]):
        raise NotImplementedError(
            f"{node.name}: a gradient flows into the statistics of a batchnorm; they have none here"
        )
    x, scale = node.tensors[:2]
    d = _of(given)
    dx, dscale, dbias = w.new.add(
        "batchnorm_backward", d, w.value(x), w.value(scale), w.value(node.results[1]), w.value(node.results[2])
    )
    vectors = _vectors(w, (dscale, dbias), node.tensors[1:3])
    return dx, *vectors, *(None,) * (len(node.args) - 3)


def _spread(w: _Walk, found: GraphTensor, node: Node) -> GraphTensor:
    """What was reduced, along all axes again."""
    x = node.tensors[0]
    if not node.attrs.get("keepdims", True):
        kept = tuple(1 if axis in node.attrs["axes"] else size for axis, size in enumerate(x.shape))
        found = w.add("reshape", found, shape=kept)
    return found


def _whole(w: _Walk, found: GraphTensor, x: GraphTensor) -> GraphTensor:
    return found if found.shape == x.shape else w.add("expand", found, shape=x.shape)


def _reduction(w: _Walk, node: Node, given: _Given) -> _Found:
    x, mode, y = node.tensors[0], node.attrs["mode"], node.result
    d = _spread(w, _of(given), node)
    count = x.size // max(y.size, 1)
    if mode in ("add", "avg"):
        return (_whole(w, d if mode == "add" else w.add("mul", d, 1.0 / count), x),)
    if mode == "norm1":
        return (w.add("mul", d, w.add("sign", x)),)
    result = _spread(w, w.value(y), node)
    if mode == "norm2":
        return (w.add("mul", w.add("div", x, result), d),)
    if mode in ("min", "max", "amax"):
        value = w.add("abs", x) if mode == "amax" else w.value(x)
        chosen = w.add("cmp_eq", value, result, dtype=x.dtype)
        number = w.add("reduction", chosen, mode="add", axes=node.attrs["axes"], keepdims=True)
        found = w.add("mul", chosen, w.add("div", d, number))
        return (w.add("mul", found, w.add("sign", x)) if mode == "amax" else found,)
    grown = w.add("div", w.add("mul", d, result), x)
    return (w.add("select", w.add("cmp_neq", x, 0.0, dtype=x.dtype), grown, 0.0) if mode == "mul_no_zeros" else grown,)


def _genstats(w: _Walk, node: Node, given: _Given) -> _Found:
    x, wide = node.tensors[0], _wide(node.tensors[0])
    total, squares = given
    found = None
    if squares is not None:
        found = w.add("mul", x, w.add("mul", squares, 2.0), dtype=wide)
    if total is not None:
        found = _whole(w, total, x) if found is None else w.add("add", found, total, dtype=wide)
    return (found,)


def _resample(w: _Walk, node: Node, given: _Given) -> _Found:
    return (w.add("resample_backward", _of(given), node.tensors[0], **node.attrs),)


def _resample_backward(w: _Walk, node: Node, given: _Given) -> _Found:
    if node.attrs["mode"] == "max":
        raise NotImplementedError(
            f"{node.name}: the gradient of max pooling has no gradient here; that of averages has"
        )
    return w.add("resample", _of(given), **node.attrs), None


# -- moving about -----------------------------------------------------------------------------------------------------


def _reshape(w: _Walk, node: Node, given: _Given) -> _Found:
    return (w.add("reshape", _of(given), shape=node.tensors[0].shape),)


def _transpose(w: _Walk, node: Node, given: _Given) -> _Found:
    order = node.attrs["permutation"]
    return (w.add("transpose", _of(given), permutation=tuple(order.index(axis) for axis in range(len(order)))),)


def _slice(w: _Walk, node: Node, given: _Given) -> _Found:
    return (w.add("unslice", _of(given), shape=node.tensors[0].shape, **node.attrs),)


def _unslice(w: _Walk, node: Node, given: _Given) -> _Found:
    return (w.add("slice", _of(given), **{name: node.attrs[name] for name in ("starts", "limits", "steps")}),)


def _expand(w: _Walk, node: Node, given: _Given) -> _Found:
    return (_of(given),)  # summed over the axes along which it was spread, as any argument is


def _concatenate(w: _Walk, node: Node, given: _Given) -> _Found:
    d, axis, start = _of(given), node.attrs["axis"], 0
    found = []
    for arg in node.tensors:
        starts, limits = [0] * d.dim(), list(d.shape)
        starts[axis], limits[axis] = start, start + arg.shape[axis]
        start += arg.shape[axis]
        found.append(w.add("slice", d, starts=tuple(starts), limits=tuple(limits), steps=(1,) * d.dim()))
    return found


_RULES: dict[str, _Rule] = {
    "conv_fprop": _conv_fprop, "conv_dgrad": _conv_dgrad, "conv_wgrad": _conv_wgrad, "matmul": _matmul,
    "batchnorm_inference": _batchnorm_inference, "batchnorm": _batchnorm, "reduction": _reduction,
    "genstats": _genstats,
    "resample": _resample, "resample_backward": _resample_backward, "reshape": _reshape, "transpose": _transpose,
    "slice": _slice, "unslice": _unslice, "expand": _expand, "concatenate": _concatenate,
    "gen_index": lambda w, node, given: (None,),
    **{op: _pointwise(formula) for op, formula in _POINTWISE.items()},
    **{op: (lambda w, node, given: (None,) * len(node.args)) for op in _CONSTANT},
}  # fmt: skip
