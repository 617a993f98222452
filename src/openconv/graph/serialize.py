"""Graphs as JSON: nodes, constants, and the plans that were in use, per device and sizes.

    {"openconv": "0.1.0", "format": 1, "name": ..., "rewrites": [...], "fuse": true, "policy": "",
     "inputs": [{"name", "shape", "dtype", "strides"}],
     "constants": [{"name", "shape", "dtype", "strides", "bytes", "data"}],        data: base64 of the values, row-major
     "nodes": [{"op", "name", "args", "attrs", "results", "stored", "layouts"}],   args: names of tensors, or numbers
     "outputs": [...],
     "plans": {"device | sizes": {"fused", "kernels": [[engine, knobs], ...], "openconv", "versions": {engine: text}}}}

A number as an argument is {"number": 0.5}; infinity and NaN are texts there and in attributes, for JSON has neither.

A plan names engines and knobs, not code: compiled kernels are in the cache on disk, by their source, so a graph that is
loaded where it was planned before compiles nothing. A plan holds for the code it was made with: if this openconv or one
of the engines is of another version, the graph is planned anew, with a warning. Plans of other devices are kept.
Nothing is pickled, and nothing in a file is run.
"""

from __future__ import annotations

import base64
import json
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import engines
from ..select import Policy
from ..tensors import ALL_DTYPES
from .builder import Graph, _meta_of, _nearest_layout
from .ir import Flow, GraphTensor, Meta, Node
from .rewrites import REWRITES

__all__ = ["FORMAT", "from_json", "to_json"]

FORMAT = 1
_DERIVED = ("problem", "matmul")
"""Attributes that follow from the others."""


def _openconv() -> str:
    from .. import __version__

    return __version__


def _versions() -> dict[str, str]:
    return {engine.name: engine.version for engine in engines()}


# -- to text ----------------------------------------------------------------------------------------------------------


def to_json(graph: Graph) -> str:
    """The graph, its constants, and the engines and knobs that it was planned with on each device."""
    flow = graph.flow
    with graph._lock:
        programs = list(graph._programs.values())
        plans = dict(graph._chosen)
    versions = _versions()
    for program in programs:
        saved = program.saved()
        used = sorted({each[0] for each in saved["kernels"] if each})
        plans[program.key] = {
            **saved, "openconv": _openconv(), "versions": {name: versions[name] for name in used if name in versions},
        }  # fmt: skip
    return json.dumps(
        {
            "openconv": _openconv(), "format": FORMAT, "name": graph.name, "rewrites": list(graph.rewrites),
            "fuse": graph.fuse, "policy": None if graph.policy is None else str(graph.policy),
            "inputs": [_described(tensor) for tensor in flow.declared],
            "constants": [_constant(tensor) for tensor in flow.constants],
            "nodes": [_node(node) for node in flow.nodes],
            "outputs": [tensor.name for tensor in flow.outputs],
            "plans": plans,
        },
        indent=1, allow_nan=False,
    )  # fmt: skip


def _described(tensor: GraphTensor) -> dict[str, Any]:
    return {
        "name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "strides": list(tensor.strides),
    }  # fmt: skip


def _constant(tensor: GraphTensor) -> dict[str, Any]:
    value = tensor.value
    assert value is not None
    raw = _bytes_of(value)
    return {**_described(tensor), "bytes": len(raw), "data": base64.b64encode(raw).decode("ascii")}


def _bytes_of(value: Tensor) -> bytes:
    """The values in row-major order; where every stride is 0, the one value."""
    plain = value.detach().cpu()
    if plain.numel() and not any(stride for size, stride in zip(plain.shape, plain.stride(), strict=True) if size > 1):
        plain = plain[(slice(0, 1),) * plain.dim()]
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def _node(node: Node) -> dict[str, Any]:
    attrs = {name: _plain(value) for name, value in node.attrs.items() if name not in _DERIVED}
    return {
        "op": node.op, "name": node.name,
        "args": [arg.name if isinstance(arg, GraphTensor) else {"number": _plain(arg)} for arg in node.args],
        "attrs": attrs, "results": [result.name for result in node.results],
        "stored": {str(at): dtype for at, dtype in node.stored.items()},
        "layouts": {str(at): layout for at, layout in node.layouts.items()},
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an attribute is {value!r}; only numbers, texts and lists of them can be written")


# -- from text --------------------------------------------------------------------------------------------------------


def from_json(text: str) -> Graph:
    """The graph of :func:`to_json`, closed and callable. ValueError says what is wrong with a text and where."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"graph: the text is no JSON: {error}") from None
    top = _Reader(data, "graph")
    if top.take("format", int) != FORMAT:
        raise ValueError(f"graph: format is {data['format']}; wanted {FORMAT}")
    policy = top.take("policy", str, type(None))
    rewrites = [_Reader.of(each, f"rewrites[{at}]", str) for at, each in enumerate(top.take("rewrites", list))]
    unknown = [each for each in rewrites if each not in REWRITES]
    if unknown:
        raise ValueError(f"rewrites: {', '.join(map(repr, unknown))}; wanted some of {', '.join(REWRITES)}")
    try:
        limits = None if policy is None else Policy.parse(policy)
    except (ValueError, TypeError) as error:
        raise ValueError(f"policy: {error}") from None
    graph = Graph(top.take("name", str), policy=limits, rewrites=rewrites, fuse=top.take("fuse", bool))
    graph._take(_flow(top))
    top.take("openconv", str)
    graph._chosen = _plans(top.take("plans", dict))
    graph._closed = True
    return graph


class _Reader:
    """An object of JSON whose entries are taken with their types checked."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: is {type(data).__name__}; wanted an object")
        self.data, self.where = data, where

    def take(self, name: str, *kinds: type) -> Any:
        if name not in self.data:
            raise ValueError(f"{self.where}: has no {name!r}; wanted one")
        return self.of(self.data[name], f"{self.where}: {name}", *kinds)

    @staticmethod
    def of(value: Any, where: str, *kinds: type) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{where} is {value!r:.60}; wanted {wanted}")
        return value

    def sizes(self, name: str) -> tuple[int, ...]:
        values = self.take(name, list)
        if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in values):
            raise ValueError(f"{self.where}: {name} is {values}; wanted integers >= 0")
        return tuple(values)

    def fail(self, text: object) -> NoReturn:
        raise ValueError(f"{self.where}: {text}") from None


def _flow(top: _Reader) -> Flow:
    flow = Flow()
    for at, each in enumerate(top.take("inputs", list)):
        entry = _Reader(each, f"inputs[{at}]")
        meta, strides = _meta(entry)
        _named(entry, partial(flow.input, meta, strides=strides))
    for at, each in enumerate(top.take("constants", list)):
        entry = _Reader(each, f"constants[{at}]")
        value = _value(entry)
        _named(entry, partial(flow.constant, value, _meta_of(value)))
    for at, each in enumerate(top.take("nodes", list)):
        _add(flow, _Reader(each, f"nodes[{at}]"))
    marked = []
    for at, name in enumerate(top.take("outputs", list)):
        marked.append(_tensor(flow, name, f"outputs[{at}]"))
    if not marked:
        raise ValueError("outputs: there are none; wanted one at least")
    flow.marked = marked
    return flow


def _named(entry: _Reader, make: Callable[..., GraphTensor]) -> None:
    try:
        make(name=entry.take("name", str))
    except ValueError as error:
        entry.fail(error)


def _meta(entry: _Reader) -> tuple[Meta, tuple[int, ...]]:
    shape, strides, dtype = entry.sizes("shape"), entry.sizes("strides"), entry.take("dtype", str)
    if len(strides) != len(shape):
        entry.fail(f"strides are {strides} of shape {shape}; wanted one for each axis")
    if dtype not in ALL_DTYPES:
        entry.fail(f"dtype is {dtype!r}; wanted one of {', '.join(ALL_DTYPES)}")
    return Meta(shape, dtype, _nearest_layout(shape, strides)), strides


def _value(entry: _Reader) -> Tensor:
    """A constant, laid out as it was."""
    meta, strides = _meta(entry)
    try:
        raw = base64.b64decode(entry.take("data", str), validate=True)
    except ValueError as error:
        entry.fail(f"data is no base64: {error}")
    if len(raw) != entry.take("bytes", int):
        entry.fail(f"data has {len(raw)} bytes; wanted {entry.data['bytes']}")
    dtype = ALL_DTYPES[meta.dtype]
    count = math.prod(meta.shape)
    single = count > 0 and not any(stride for size, stride in zip(meta.shape, strides, strict=True) if size > 1)
    wanted = (1 if single else count) * dtype.itemsize
    if len(raw) != wanted:
        entry.fail(f"data has {len(raw)} bytes; {meta.dtype}{list(meta.shape)} wants {wanted}")
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    if single:
        return flat.reshape((1,) * len(meta.shape)).expand(meta.shape)
    value = flat.reshape(meta.shape)
    if tuple(value.stride()) == strides or not _spans(meta.shape, strides):
        return value
    return torch.empty_strided(meta.shape, strides, dtype=dtype).copy_(value)


def _spans(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides are an order of axes without gaps; a constant that was part of a larger tensor is not laid out as
    that was, nor does a file say how much memory is asked for."""
    step = 1
    for stride, size in sorted((st, sz) for sz, st in zip(shape, strides, strict=True) if sz > 1):
        if stride != step:
            return False
        step *= size
    return True


def _tensor(flow: Flow, name: Any, where: str) -> GraphTensor:
    found = flow.named(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"{where} is {name!r}; wanted the name of a tensor before it")
    return found


def _number(value: Any, where: str) -> int | float:
    if isinstance(value, dict) and isinstance(value.get("float"), str):
        try:
            return float(value["float"])
        except ValueError:
            pass
    found: int | float = _Reader.of(value, where, int, float)
    return found


def _attribute(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return _number(value, where)
    if isinstance(value, list):
        return tuple(_attribute(each, where) for each in value)
    return value


def _add(flow: Flow, entry: _Reader) -> None:
    op, name = entry.take("op", str), entry.take("name", str)
    args: list[GraphTensor | float] = []
    for at, arg in enumerate(entry.take("args", list)):
        where = f"{entry.where} ({name}): args[{at}]"
        if isinstance(arg, Mapping):
            args.append(_number(arg.get("number"), where))
        else:
            args.append(_tensor(flow, arg, where))
    attrs = {key: _attribute(value, f"{entry.where}: {key}") for key, value in entry.take("attrs", dict).items()}
    stored, layouts = (_by_result(entry, key) for key in ("stored", "layouts"))
    results = entry.take("results", list)
    try:
        flow.add(op, *args, name=name, **attrs)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError) as error:
        what = f"an attribute {error} is missing" if isinstance(error, KeyError) else error
        entry.fail(f"{op}: {what}")
    node = flow.nodes[-1]
    if len(results) != len(node.results):
        entry.fail(f"results are {results}; {op} has {len(node.results)}")
    node.stored, node.layouts = stored, layouts
    for at, dtype in stored.items():
        node.results[at].dtype = dtype
    for at, layout in layouts.items():
        node.results[at].layout = layout
    for tensor, wanted in zip(node.results, results, strict=True):
        if wanted != tensor.name:
            try:
                flow.rename(tensor, wanted)
            except ValueError as error:
                entry.fail(error)


def _by_result(entry: _Reader, key: str) -> dict[int, str]:
    known = ALL_DTYPES if key == "stored" else ("nchw", "nhwc")
    found = {}
    for at, value in entry.take(key, dict).items():
        if not at.isdigit() or int(at) >= len(entry.data.get("results", ())) or value not in known:
            entry.fail(f"{key} has {at!r}: {value!r}; wanted the number of a result, and one of {', '.join(known)}")
        found[int(at)] = value
    return found


def _plans(plans: dict[str, Any]) -> dict[str, Any]:
    """The plans that still hold. One warning says which were left out."""
    here, versions = _openconv(), _versions()
    kept, stale = dict[str, Any](), dict[str, None]()
    for key, data in plans.items():
        entry = _Reader(data, f"plans[{key!r}]")
        entry.take("fused", bool)
        for at, each in enumerate(entry.take("kernels", list)):
            pair = isinstance(each, list) and len(each) == 2 and all(isinstance(word, str) for word in each)
            if each is not None and not pair:
                entry.fail(f"kernels[{at}] is {each!r}; wanted null or [engine, knobs]")
        made_with = entry.take("openconv", str)
        known = entry.take("versions", dict)
        if made_with != here:
            reason = f"openconv {made_with}, this is {here}"
        else:
            changed = [name for name, version in known.items() if versions.get(name) != version]
            reason = f"another {', '.join(changed)}" if changed else ""
        if reason and _is_here(key):
            stale[f"{key.partition(' | ')[0]} (of {reason})"] = None
        else:
            kept[key] = data
    if stale:
        warnings.warn(f"the graph's plans for {'; '.join(stale)} do not hold any more: it is planned anew there",
                      UserWarning, stacklevel=4)  # fmt: skip
    return kept


def _is_here(key: str) -> bool:
    """Whether a plan is for a device of this machine."""
    from ..plan import device_of

    places = [torch.device("cpu")]
    if torch.cuda.is_available():
        places += [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    return key.partition(" | ")[0] in {device_of(place).key for place in places}
