"""Graphs as bytes: what was recorded, and the plan, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from . import enums
from .operations import OPERATIONS
from .record import Node, tensor

if TYPE_CHECKING:
    from .pygraph import pygraph
    from .recorder import Recorder

__all__ = ["from_bytes", "to_bytes", "to_data"]

_FORMAT = "openconv.cudnn graph 1"


def to_data(graph: Recorder) -> dict[str, Any]:
    """A graph as plain data, without its plan."""
    kinds = {"io": graph._io, "intermediate": graph._inside, "compute": graph._compute}
    return {
        "format": _FORMAT,
        "name": graph.name,
        "data_types": {name: kind and kind.name for name, kind in kinds.items()},
        "tensors": [_of_tensor(one) for one in graph._tensors.values()],
        "nodes": [
            {
                "operation": node.operation.name,
                "name": node.name,
                "inputs": {port: _input(value) for port, value in node.inputs.items()},
                "attributes": {key: _plain(value) for key, value in node.attributes.items()},
                "outputs": {port: one and one.get_uid() for port, one in node.outputs.items()},
            }
            for node in graph._nodes
        ],
    }


def to_bytes(graph: pygraph) -> bytes:
    """A graph, and the plan that it runs with."""
    data = to_data(graph)
    if graph._entries is not None and graph._built:
        entry = graph._entries[graph._selected]
        data["plan"] = {"device": graph._device.type, "text": entry.plan.text, "index": graph._selected}
    return json.dumps(data, separators=(",", ":")).encode()


def from_bytes(graph: pygraph, data: bytes | bytearray | str | Sequence[int]) -> None:
    """Fill an empty graph, plan and build it. The plan is the one it was saved with, where that is among the plans."""
    text = data if isinstance(data, str) else bytes(data).decode(errors="replace")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"the data begin with {text[:40]!r}; wanted what serialize() of openconv.cudnn returns")
    graph._forget()
    graph._empty()
    graph.name = found["name"]
    kinds = found["data_types"]
    graph._io, graph._inside, graph._compute = (
        enums.data_type[kinds[name]] if kinds[name] else None for name in ("io", "intermediate", "compute")
    )
    for each in found["tensors"]:
        one = tensor(
            graph, 0, each["name"], dim=each["dim"], stride=each["stride"],
            kind=each["data_type"] and enums.data_type[each["data_type"]], is_virtual=each["virtual"],
            is_pass_by_value=each["by_value"], value=each["value"],
        )  # fmt: skip
        graph._give_uid(one, each["uid"])
        one._uid_given, one._marked = each["uid_given"], each["marked"]
    for each in found["nodes"]:
        inputs = {
            port: graph._tensors[value["uid"]] if isinstance(value, dict) else value
            for port, value in each["inputs"].items()
        }
        outputs = {port: None if uid is None else graph._tensors[uid] for port, uid in each["outputs"].items()}
        attributes = {key: _back(value) for key, value in each["attributes"].items()}
        order = tuple(value for value in inputs.values() if isinstance(value, tensor))
        node = Node(OPERATIONS[each["operation"]], each["name"], inputs, attributes, order, outputs)
        graph._nodes.append(node)
        for made in outputs.values():
            if made is not None:
                made._node = node
    _plan_again(graph, found.get("plan"))


def _plan_again(graph: pygraph, saved: dict[str, Any] | None) -> None:
    graph.create_execution_plans()
    entries = graph._planned("deserialize")
    if saved is not None and saved["device"] == graph._device.type:
        places = [at for at, entry in enumerate(entries) if entry.plan.text == saved["text"]]
        if places:
            graph.build_plan_at_index(places[0])
            return
    graph.build_plans()


def _of_tensor(one: tensor) -> dict[str, Any]:
    return {
        "uid": one._uid, "uid_given": one._uid_given, "name": one._name, "dim": one._dim, "stride": one._stride,
        "data_type": one._type and one._type.name, "virtual": one._virtual, "by_value": one._by_value,
        "value": one._value, "marked": one._marked,
    }  # fmt: skip


def _input(value: Any) -> Any:
    return {"uid": value.get_uid()} if isinstance(value, tensor) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return {"enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def _back(value: Any) -> Any:
    if isinstance(value, list):
        return [_back(each) for each in value]
    if isinstance(value, dict) and "slice" in value:
        return slice(*value["slice"])
    if isinstance(value, dict):
        kind, name = value["enum"].split(".")
        return getattr(enums, kind)[name]
    return value
