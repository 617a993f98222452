"""jit: a Python function of torch calls as a graph.

    @openconv.jit
    def block(x, residual):
        return F.relu(F.conv2d(x, weight, bias, padding=1) + residual)

    y = block(x, residual)        # traced at the first call with such tensors, then one kernel

The function is called once for each new signature, with :class:`Traced` tensors that stand for its arguments; torch's
functions and methods add nodes to a graph instead of computing (:mod:`.trace_functions`). Tensors that the function
finds elsewhere, weights above all, become inputs, too: each call passes them as they are then, so that a step of an
optimiser is seen. A module is traced likewise: ``fast = openconv.jit(model)``.

Python code runs only while tracing. What depends on values of tensors cannot be traced and is refused; what torch
writes into tensors, as running statistics, is written after each call.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..select import Policy
from ..tensors import ALL_DTYPES
from .builder import Graph
from .ir import GraphTensor, layout_of_strides
from .trace_functions import FUNCTIONS

if TYPE_CHECKING:
    from .explain import GraphExplanation

__all__ = ["Jitted", "Trace", "Traced", "jit"]

_MOST_ENTRIES = 256
# What torch says of a tensor without looking at its values.
_FACTS = frozenset({
    "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "get_device", "storage_offset", "data_ptr", "__len__", "__hash__", "__repr__", "__format__",
    "is_same_size", "is_tensor", "result_type", "promote_types", "is_signed", "is_conj", "is_neg", "is_inference",
})  # fmt: skip
_PROPERTIES = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_leaf", "names", "itemsize", "nbytes",
    "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "grad_fn",
})  # fmt: skip
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_VALUES = frozenset({
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
    "__contains__",
})  # fmt: skip


# -- the tensors that a function sees ---------------------------------------------------------------------------------


class Traced:
    """A tensor of a graph under torch's names. Shapes and dtypes are known; values are not."""

    __slots__ = ("__weakref__", "_shared", "_tensor", "_trace")
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, tensor: GraphTensor, shared: str = "") -> None:
        self._trace, self._tensor = trace, tensor
        self._shared = shared  # why it cannot be written to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traced = next(each for each in _leaves((args, kwargs or {})) if isinstance(each, Traced))
        return traced._trace.call(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """Sizes."""
        return torch.Size(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """torch's dtype."""
        return ALL_DTYPES[self._tensor.dtype]

    @property
    def device(self) -> torch.device:
        """Where the arguments of the call are."""
        return self._trace.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._tensor.dim()

    @property
    def layout(self) -> torch.layout:
        """Always strided."""
        return torch.strided

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.device.type == "cuda"

    def size(self, dim: int | None = None) -> Any:
        """Sizes, or that of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of axes."""
        return self._tensor.dim()

    ndimension = dim

    def numel(self) -> int:
        """Number of elements."""
        return self._tensor.size

    nelement = numel

    def is_floating_point(self) -> bool:
        """Whether its dtype is one of floating point."""
        return self.dtype.is_floating_point

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether it will lie so."""
        found = layout_of_strides(self._tensor.shape, self._tensor.strides)
        return found == ("nchw" if memory_format is torch.contiguous_format else "nhwc")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Traced]:
        return iter([self[at] for at in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        return self._trace.named("getitem", (self, index))

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise NotImplementedError("x[...] = value: graphs do not write into parts of a tensor; there are where and cat")

    def _no_value(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what} of a traced tensor {tuple(self.shape)}: its values are not known while a function is traced; "
            "wanted torch.where for a choice by value, or the value as an argument that is no tensor"
        )

    def __bool__(self) -> bool:  # noqa: PLE0304
        self._no_value("bool()")

    def __int__(self) -> int:
        self._no_value("int()")

    def __float__(self) -> float:
        self._no_value("float()")

    def __index__(self) -> int:  # noqa: PLE0305
        self._no_value("an index")

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._no_value("an array")

    def __getattr__(self, name: str) -> Any:
        if name in ("T", "mT"):
            return self._trace.named(name, (self,))
        if name in _VALUES:
            self._no_value(f"{name}()")
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a traced tensor has no attribute {name!r}")
        inner = name[:-1] if name.endswith("_") else name
        if inner in FUNCTIONS:
            return lambda *args, **kwargs: self._trace.named(name, (self, *args), kwargs)
        raise _missing(f"Tensor.{name}")

    def __repr__(self) -> str:
        return f"Traced({self._tensor!r})"


def _operator(name: str) -> Callable[..., Traced]:
    def method(self: Traced, *others: Any) -> Any:
        return self._trace.named(name, (self, *others))

    method.__name__ = method.__qualname__ = f"__{name}__"
    return method


for _name, _function in {
    **{each: each for each in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow")},
    **{each: each for each in ("matmul", "rmatmul", "neg", "abs", "eq", "ne", "gt", "ge", "lt", "le")},
    "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "invert": "logical_not",
    "and": "logical_and", "rand": "logical_and", "or": "logical_or", "ror": "logical_or",
}.items():  # fmt: skip
    setattr(Traced, f"__{_name}__", _operator(_function))


def _shown(func: Any, name: str) -> str:
    """A function as a user knows it: of torch's own classes for functions nothing but the module."""
    return str(getattr(func, "__qualname__", name)).replace("_VariableFunctionsClass.", "torch.")


def _missing(name: str) -> NotImplementedError:
    return NotImplementedError(f"openconv.jit cannot trace {name}; there are {', '.join(sorted(FUNCTIONS))}")


def _autograd_function() -> str:
    """The torch.autograd.Function whose forward is being traced, if one is. Nothing else tells: what it is given are no
    tensors to torch, so that autograd calls its forward as it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Jitted._trace.__code__:
        if frame.f_code is _APPLY:
            name: str = frame.f_locals["cls"].__name__
            return name
        frame = frame.f_back
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    """What is in tuples, lists and dicts, in order."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts around other leaves."""
    if isinstance(value, tuple | list):
        parts = [_rebuilt(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: _rebuilt(each, change) for key, each in value.items()}
    return change(value)


# -- one trace --------------------------------------------------------------------------------------------------------


class _Mode(TorchFunctionMode):
    """Has every call of torch while tracing go to the trace, those on plain tensors, too."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.trace.call(func, args, kwargs or {})


@dataclass(frozen=True)
class _Captured:
    """A tensor that a function found outside of its arguments: where it is, and what it was when that was traced."""

    get: Callable[[], Any]
    facts: tuple[Any, ...]


@dataclass(frozen=True)
class _Effect:
    """Something that torch did to a tensor that no graph is needed for, as counting batches."""

    get: Callable[[], Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.device


class Trace:
    """A graph while a function adds to it."""

    def __init__(self, graph: Graph, device: torch.device, places: Mapping[int, tuple[str, Callable[[], Any]]]) -> None:
        self.graph, self.device = graph, device
        self.places = places
        self.captured: list[tuple[GraphTensor, _Captured]] = []
        self.written: dict[int, tuple[Tensor, Traced]] = {}
        self.effects: list[tuple[Tensor, _Effect]] = []
        self.without_gradient = ""
        self._busy = False
        self._known: dict[int, tuple[Tensor, GraphTensor]] = {}

    # -- values -------------------------------------------------------------------------------------------------------

    def traced(self, tensor: GraphTensor | None, shared: str = "") -> Traced:
        """A tensor of the graph under torch's names."""
        assert tensor is not None
        return Traced(self, tensor, shared)

    def tensor(self, value: Any) -> GraphTensor:
        """The graph's tensor for a traced or plain one."""
        if isinstance(value, Traced):
            if value._trace is not self:
                raise RuntimeError(f"{value!r} is of another trace: it was kept when its function had ended")
            return value._tensor
        if isinstance(value, Tensor):
            return self._captured(value)
        raise TypeError(f"an argument is of type {type(value).__name__}; wanted a tensor")

    def value(self, value: Any) -> GraphTensor | float:
        """The same, and numbers as they are."""
        if isinstance(value, float) and math.isnan(value):  # which no expression has
            return self.graph.constant(torch.tensor(value))
        if isinstance(value, int | float):
            return int(value) if isinstance(value, bool) else value
        return self.tensor(value)

    def _captured(self, value: Tensor) -> GraphTensor:
        if id(value) in self.written:
            return self.written[id(value)][1]._tensor
        if id(value) not in self._known:
            name, get = self.places.get(id(value), (None, None))
            taken = name is not None and self.graph.flow.named(name) is not None
            made = self.graph.input(value, name=None if taken else name)
            self._known[id(value)] = value, made
            self.captured.append((made, _Captured(get or (lambda: value), _facts(value))))
        return self._known[id(value)][1]

    def result(self, value: GraphTensor, target: Any = None, inplace: bool = False) -> Traced:
        """What a function gives; with ``inplace`` what it was given is that from now on."""
        return self.overwrite(target, self.traced(value)) if inplace else self.traced(value)

    def view(self, value: GraphTensor, source: Any) -> Traced:
        """A view of ``source``: neither can be written to from now on, for the other would not see it."""
        if isinstance(source, Traced):
            source._shared = source._shared or "it shares its memory with a view"
        return self.traced(value, "it is a view")

    def overwrite(self, target: Any, made: Traced) -> Traced:
        """Put a result where a tensor was."""
        shape = tuple(target.shape)
        if shape != made._tensor.shape:
            raise RuntimeError(f"a result {made._tensor.shape} is written into a tensor {shape}; wanted one shape")
        if made.dtype is not target.dtype:
            made = self.traced(self.graph.cast(made._tensor, target.dtype))
        if not isinstance(target, Traced):
            self.written[id(target)] = target, made
            return made
        if target._shared:
            raise NotImplementedError(
                f"writing into {target!r} in place: {target._shared}; wanted the same without inplace or underscore"
            )
        target._tensor = made._tensor
        return target

    def same_device(self, device: torch.device) -> None:
        """Graphs move nothing."""
        if device.type != self.device.type or (device.index is not None and device.index != (self.device.index or 0)):
            raise NotImplementedError(f"to({str(device)!r}) of a tensor on {self.device}: graphs stay on one device")

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's functions, on tensors of which some are traced or none."""
        if self._busy:  # what a function here computes for itself
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        plain = not any(isinstance(each, Traced) for each in _leaves((args, kwargs)))
        if name == "__get__":
            return self._property(func, args)
        if plain and (name in _FACTS or not any(isinstance(each, Tensor) for each in _leaves((args, kwargs)))):
            return self._elsewhere(func, name, args, kwargs)
        if name in _VALUES:
            raise NotImplementedError(
                f"{name.strip('_')}() of a tensor of {tuple(args[0].shape)} while a function is traced: the value "
                "would be remembered; wanted it as an argument that is no tensor"
            )
        inner = name.strip("_") if name.startswith("__") else name
        if plain and inner.endswith("_") and not args[0].is_floating_point():
            target = args[0]
            _, get = self.places.get(id(target), (None, lambda: target))
            self.effects.append((target, _Effect(get, func, args[1:], kwargs)))
            return target
        return self.named(inner, args, kwargs, _shown(func, name))

    def named(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, shown: str = "") -> Any:
        """A function by its name in :data:`FUNCTIONS`; one that ends in an underscore writes to its first argument."""
        if not self._busy and (own := _autograd_function()):
            raise NotImplementedError(
                f"{own}, a torch.autograd.Function, is called while a function is traced: a graph has gradients of its "
                "own and would not use its backward; wanted plain torch calls, or the call outside of what is traced"
            )
        inplace = name.endswith("_")
        function = FUNCTIONS.get(name[:-1] if inplace else name)
        if function is None:
            raise _missing(shown or name)
        given = {key: value for key, value in (kwargs or {}).items() if key != "out" or value is not None}
        if "out" in given:
            raise NotImplementedError(f"{name}: out= was given; graphs have results alone")
        before, self._busy = self._busy, True
        try:
            made = function(self, *args, **given)
            return self.overwrite(args[0], made) if inplace else made
        finally:
            self._busy = before

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _PROPERTIES:
            return func(*args)
        if name in FUNCTIONS:
            return self.named(name, args)
        raise _missing(f"Tensor.{name}")

    def _elsewhere(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name.startswith("rand") or name in ("normal", "bernoulli", "empty_strided", "multinomial"):
            raise NotImplementedError(f"{name}() while a function is traced: its numbers would be remembered")
        if name == "_set_grad_enabled" and not args[0]:
            self.without_gradient = "torch.no_grad"
        return func(*args, **kwargs)


# -- functions --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Entry:
    """A traced signature: the graph, where its inputs come from and where its outputs go."""

    graph: Graph
    sources: list[int | _Captured]
    answer: Any
    written: list[tuple[Callable[[], Any], int]]
    effects: list[_Effect]
    without_gradient: str
    kept: list[Any] = field(default_factory=list)

    def values(self, given: Sequence[Tensor]) -> list[Tensor] | None:
        """The inputs of a call; None where a tensor outside of the arguments is no longer what it was."""
        found = []
        for source in self.sources:
            if isinstance(source, int):
                found.append(given[source])
                continue
            value = source.get()
            if not isinstance(value, Tensor) or _facts(value) != source.facts:
                return None
            found.append(value)
        return found

    def run(self, values: list[Tensor]) -> Any:
        if self.without_gradient and torch.is_grad_enabled() and any(value.requires_grad for value in values):
            raise NotImplementedError(
                f"{self.graph.name}: it has {self.without_gradient}, and a gradient is wanted; it would flow through it"
            )
        made = self.graph(*values)
        results = made if isinstance(made, tuple) else (made,)
        if self.written or self.effects:
            with torch.no_grad():
                for get, at in self.written:
                    get().copy_(results[at])
                for effect in self.effects:
                    effect.function(effect.get(), *effect.args, **effect.kwargs)
        return _rebuilt(self.answer, lambda leaf: results[leaf.at] if isinstance(leaf, _Output) else leaf)


@dataclass(frozen=True)
class _Output:
    at: int


class Jitted:
    """A function that runs as graphs, one for each signature: the shapes, dtypes, layouts and device of tensors, and
    the values of all other arguments. See :func:`jit`."""

    def __init__(self, function: Callable[..., Any], policy: Policy | None, rewrites: Iterable[str] | None,
                 name: str | None, fuse: bool) -> None:  # fmt: skip
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))
        self._options: dict[str, Any] = {"policy": policy, "rewrites": None if rewrites is None else tuple(rewrites)}
        self._options["fuse"] = fuse
        Graph(**self._options)  # says at once what is wrong with them
        self._entries: dict[Any, _Entry] = {}
        self._lock = threading.RLock()
        self._roots = list(_roots(function))
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = list(_leaves((args, kwargs)))
        if any(isinstance(each, Traced) for each in leaves):  # inside another that is being traced
            return self.function(*args, **kwargs)
        entry, values = self._found(args, kwargs, leaves)
        return entry.run(values)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Bound(self, instance)

    def graph_for(self, *args: Any, **kwargs: Any) -> Graph:
        """The graph of a call with these arguments."""
        return self._found(args, kwargs, list(_leaves((args, kwargs))))[0].graph

    def explain(self, *args: Any, **kwargs: Any) -> GraphExplanation:
        """The kernels of a call with these arguments: :meth:`openconv.Graph.explain`."""
        place = _device(_leaves((args, kwargs)))
        return self.graph_for(*args, **kwargs).explain(place)

    def __repr__(self) -> str:
        return f"<openconv.jit of {self.name}, {len(self._entries)} traced>"

    # -- finding ------------------------------------------------------------------------------------------------------

    def _found(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> tuple[_Entry, list[Tensor]]:
        given = [each for each in leaves if isinstance(each, Tensor)]
        key, modules = self._key(args, kwargs, leaves)
        entry = self._entries.get(key)
        values = None if entry is None else entry.values(given)
        if entry is not None and values is not None:
            return entry, values
        with self._lock:
            entry = self._entries.get(key)
            values = None if entry is None else entry.values(given)
            if entry is None or values is None:
                entry = self._trace(args, kwargs, given, modules)
                if len(self._entries) >= _MOST_ENTRIES:
                    self._entries.clear()
                self._entries[key] = entry
                values = entry.values(given)
                assert values is not None
        return entry, values

    def _key(self, args: Any, kwargs: Any, leaves: list[Any]) -> tuple[Any, list[torch.nn.Module]]:
        modules = [each for _, get in self._roots if isinstance(each := get(), torch.nn.Module)]
        modules += [each for each in leaves if isinstance(each, torch.nn.Module)]
        inside = [each for module in modules for each in module.modules()]
        key = (
            _rebuilt_key(args), tuple((name, _rebuilt_key(value)) for name, value in sorted(kwargs.items())),
            tuple((id(module), module.training) for module in inside),
        )  # fmt: skip
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"{self.name}: an argument cannot be remembered ({error}); wanted tensors, numbers, texts "
                            "and tuples, lists or dicts of such") from None  # fmt: skip
        return key, inside

    # -- tracing ------------------------------------------------------------------------------------------------------

    def _trace(self, args: Any, kwargs: Any, given: list[Tensor], modules: list[torch.nn.Module]) -> _Entry:
        place = _device(given)
        if torch.is_autocast_enabled(place.type):
            raise NotImplementedError(f"{self.name}: autocast is on, which graphs have not; wanted casts: x.half()")
        graph = Graph(self.name, **self._options)
        given_modules = [each for each in _leaves((args, kwargs)) if isinstance(each, torch.nn.Module)]
        places = dict(_places([*self._roots, *(("", functools.partial(_itself, each)) for each in given_modules)]))
        trace = Trace(graph, place, places)
        named = iter(list(self._names(args, kwargs)))
        inputs: list[GraphTensor] = []

        def stand_in(leaf: Any) -> Any:
            name = next(named)
            if not isinstance(leaf, Tensor):
                return leaf
            taken = graph.flow.named(name) is not None
            inputs.append(graph.input(leaf, name=None if taken else name))
            return trace.traced(inputs[-1], "it is an argument of the traced function")

        traced_args, traced_kwargs = _rebuilt((args, kwargs), stand_in)
        with _Mode(trace):
            answer = self.function(*traced_args, **traced_kwargs)
        return self._finished(trace, answer, inputs, modules)

    def _finished(self, trace: Trace, answer: Any, inputs: list[GraphTensor], modules: list[Any]) -> _Entry:
        graph, outputs = trace.graph, dict[GraphTensor, int]()

        def out(leaf: Any) -> Any:
            if not isinstance(leaf, Traced | Tensor):
                return leaf
            return _Output(outputs.setdefault(trace.tensor(leaf), len(outputs)))

        answer = _rebuilt(answer, out)
        if not outputs:
            raise TypeError(f"{self.name} returned {answer!r}; wanted a tensor, or a tuple, list or dict of tensors")
        written = []
        for target, made in trace.written.values():
            get = trace.places.get(id(target), (None, functools.partial(_itself, target)))[1]
            written.append((get, outputs.setdefault(made._tensor, len(outputs))))
        for target, _ in trace.effects:
            if id(target) in trace._known:
                raise NotImplementedError(f"{self.name}: a tensor {tuple(target.shape)} of {target.dtype} is changed "
                                          "in place and used; graphs do that with floating point alone")  # fmt: skip
        for tensor in outputs:
            tensor.set_output()
        graph._closed = True
        known: dict[GraphTensor, int | _Captured] = {tensor: at for at, tensor in enumerate(inputs)}
        known.update(dict(trace.captured))
        sources = [known[tensor] for tensor in graph.inputs]
        return _Entry(graph, sources, answer, written, [effect for _, effect in trace.effects], trace.without_gradient,
                      kept=list(modules))  # fmt: skip

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
        """A name for each leaf of the arguments."""
        shown = self.function.forward if isinstance(self.function, torch.nn.Module) else self.function
        try:
            words = [p.name for p in inspect.signature(shown).parameters.values()
                     if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip
        except (TypeError, ValueError):
            words = []
        for at, value in enumerate(args):
            yield from _numbered(words[at] if at < len(words) else f"arg{at}", value)
        for name, value in kwargs.items():
            yield from _numbered(name, value)


class _Bound:
    """A traced method of an object."""

    def __init__(self, jitted: Jitted, instance: Any) -> None:
        self._jitted, self._instance = jitted, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted(self._instance, *args, **kwargs)

    def graph_for(self, *args: Any, **kwargs: Any) -> Graph:
        """See :meth:`Jitted.graph_for`."""
        return self._jitted.graph_for(self._instance, *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> GraphExplanation:
        """See :meth:`Jitted.explain`."""
        return self._jitted.explain(self._instance, *args, **kwargs)


def _itself(value: Any) -> Any:
    return value


def _numbered(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, tuple | list | Mapping):
        yield name
        return
    for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _numbered(f"{name}.{key}", each)


def _device(leaves: Iterable[Any]) -> torch.device:
    return next((each.device for each in leaves if isinstance(each, Tensor)), torch.device("cpu"))


def _rebuilt_key(value: Any) -> Any:
    """What a signature has of an argument: of a tensor all that a graph depends on, of another the value."""
    if isinstance(value, tuple | list):
        return (type(value), *map(_rebuilt_key, value))
    if isinstance(value, Mapping):
        return dict, *((key, _rebuilt_key(each)) for key, each in value.items())
    if isinstance(value, Tensor):
        strides = tuple(value.stride())
        return value.shape, value.dtype, layout_of_strides(value.shape, strides) or strides, value.device
    # 1, 1.0 and True are equal, and NaN is not even itself
    return (type(value), repr(value)) if isinstance(value, float) else (type(value), value)


def _roots(function: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Where a function finds tensors and modules by name: itself, what it closes over, and globals that it names."""
    if isinstance(function, torch.nn.Module):
        yield "", functools.partial(_itself, function)
        return
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        yield "", functools.partial(_itself, owner)
    inner = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(inner, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
            yield name, functools.partial(_content, cell)
        for name in code.co_names:
            yield name, functools.partial(inner.__globals__.get, name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _places(roots: Iterable[tuple[str, Callable[[], Any]]]) -> Iterator[tuple[int, tuple[str, Callable[[], Any]]]]:
    """Where tensors are found again, by identity: parameters and buffers may be replaced, as ``model.half()`` does."""
    for name, get in roots:
        root = get()
        if isinstance(root, Tensor):
            yield id(root), (name, get)
        elif isinstance(root, torch.nn.Module):
            for path, module in root.named_modules(prefix=name):
                for values in (module._parameters, module._buffers):
                    for key, value in values.items():
                        if value is not None:
                            full = f"{path}.{key}" if path else key
                            yield id(value), (full, functools.partial(operator.getitem, values, key))


@overload
def jit(function: Callable[..., Any], *, policy: Policy | None = None, rewrites: Iterable[str] | None = None,
        name: str | None = None, fuse: bool = True) -> Jitted: ...  # fmt: skip
@overload
def jit(function: None = None, *, policy: Policy | None = None, rewrites: Iterable[str] | None = None,
        name: str | None = None, fuse: bool = True) -> Callable[[Callable[..., Any]], Jitted]: ...  # fmt: skip
def jit(
    function: Callable[..., Any] | None = None, *, policy: Policy | None = None, rewrites: Iterable[str] | None = None,
    name: str | None = None, fuse: bool = True,
) -> Any:  # fmt: skip
    """A function or module of torch calls as an :class:`openconv.Graph` for each signature; plain or with arguments,
    which are those of a graph: ``@openconv.jit`` and ``@openconv.jit(policy=openconv.Policy(accuracy="strict"))``.

    Arguments are tensors, in tuples, lists and dicts, and values that can be hashed; so are results. Gradients flow to
    arguments and to tensors that the function finds elsewhere. Those are looked up by name where they are parameters
    and buffers of a module, variables that the function closes over, or globals; tensors that it reaches otherwise are
    remembered as they are and should be changed in place. A change of their shape, dtype or device has the function
    traced again, as does ``model.eval()``. ``fn.graph_for(*args)`` is the graph of a call, ``fn.explain(*args)`` its
    kernels.
    """
    if function is None:
        return lambda given: jit(given, policy=policy, rewrites=rewrites, name=name, fuse=fuse)
    if not callable(function):
        raise TypeError(f"jit was given {function!r}; wanted a function or a module")
    return Jitted(function, policy, rewrites, name, fuse)
