"""Recorder: the half of a graph that remembers what is to be computed.

Methods of operations come from :data:`~openconv.cudnn.operations.OPERATIONS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor

from . import buffers, serialize
from .enums import as_data_type, data_type, tensor_reordering
from .errors import cudnnGraphNotSupportedError
from .lowering import Lowering, Rules
from .operations import OPERATIONS, REFUSED, Operation, dgrad_order
from .record import Node
from .record import tensor as Recorded  # which is what a method of graphs is called, too

__all__ = ["Recorder"]


class Recorder:
    """Tensors and nodes of a graph. Both may change until ``_fixed``."""

    def __init__(self, name: str, io: Any, inside: Any, compute: Any) -> None:
        self.name = name
        self._io, self._inside, self._compute = as_data_type(io), as_data_type(inside), as_data_type(compute)
        self._forget()

    def _forget(self) -> None:
        self._nodes: list[Node] = []
        self._tensors: dict[int, Recorded] = {}
        self._bound: dict[int, Any] = {}
        self._known: dict[int, tuple[Any, Recorded]] = {}
        self._counts: dict[str, int] = {}
        self._marks = self._last = 0
        self._trial: dict[Recorded, tuple[list[int], list[int], data_type]] = {}
        self._fixed = False

    def _rules(self, numbers: Mapping[int, float] | None = None, sizes: Mapping[int, Any] | None = None) -> Rules:
        return Rules(self._io, self._inside, numbers or {}, sizes or {})

    # -- tensors --------------------------------------------------------------------------------------------------

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int] | None = None,
        data_type: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Any = None,
        reordering_type: Any = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
    ) -> Recorded:
        """A tensor that the caller gives. Without strides it lies row by row, the last axis innermost."""
        self._changing("a tensor")
        made = Recorded(
            self, 0, name or f"tensor_{len(self._tensors)}", dim=tuple(dim), stride=_strides(dim, stride),
            kind=data_type, is_virtual=is_virtual, is_pass_by_value=is_pass_by_value,
        )  # fmt: skip
        made.set_ragged_offset(ragged_offset).set_reordering_type(reordering_type or tensor_reordering.NONE)
        self._take(made, None if uid == -1 else uid)
        return made

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> Recorded:
        """A tensor with the sizes, strides and data type of another, of this graph or of torch. A lone number on the
        host is passed by value."""
        if isinstance(template, Recorded):
            return self.tensor(
                template.get_dim(), template.get_stride(), template.get_data_type(), is_virtual,
                template.get_is_pass_by_value(), name=name,
            )  # fmt: skip
        data = template if isinstance(template, Tensor) else torch.from_dlpack(template)
        by_value = data.device.type == "cpu" and data.numel() == 1 and not is_virtual
        return self.tensor(tuple(data.shape), data.stride(), data.dtype, is_virtual, by_value, name=name)

    def tensor_scalar(self, value: float, scalar_type: Any = None, name: str = "") -> Recorded:
        """A number as a tensor."""
        self._changing("a tensor")
        made = Recorded(
            self, 0, name or f"scalar_{len(self._tensors)}", dim=(1, 1, 1, 1), stride=(1, 1, 1, 1),
            kind=data_type.FLOAT, is_pass_by_value=True, value=buffers.number(value, name or "scalar"),
        )  # fmt: skip
        self._take(made, None)
        return made

    def _take(self, one: Recorded, uid: int | None) -> None:
        if uid is None:
            self._move(one, self._last + 1)
        else:
            self._give_uid(one, uid)

    def _give_uid(self, one: Recorded, uid: int) -> None:
        if not isinstance(uid, int) or isinstance(uid, bool) or uid < 0:
            raise ValueError(f"tensor {one._name!r}: uid is {uid!r}; wanted an integer of at least 0")
        holder = self._tensors.get(uid)
        if holder is not None and holder is not one:
            if holder._uid_given:
                raise ValueError(f"tensor {one._name!r}: uid is {uid}, which tensor {holder._name!r} was given")
            self._move(holder, max(self._last, uid) + 1)
        self._move(one, uid)
        one._uid_given = True

    def _move(self, one: Recorded, uid: int) -> None:
        if self._tensors.get(one._uid) is one:
            del self._tensors[one._uid]
            if one._uid in self._bound:
                self._bound[uid] = self._bound.pop(one._uid)
        one._uid = uid
        self._tensors[uid] = one
        self._last = max(self._last, uid)

    def _mark(self) -> int:
        self._marks += 1
        return self._marks

    def _changing(self, what: str) -> None:
        if self._fixed:
            raise RuntimeError(
                f"{what}: the graph {self.name!r} is planned and can no longer change; build another one"
            )
        self._trial.clear()
        self._changed()

    def _changed(self) -> None:
        """What was made of the record holds no longer."""

    def _inferred(self, one: Recorded) -> tuple[list[int], list[int], data_type] | None:
        found = self._trial.get(one)
        if found is None:
            try:
                place = Lowering(self.name, [], self._rules()).place(one)
            except (RuntimeError, ValueError, TypeError):
                return None  # not enough is known yet; validate() says what is wrong
            kind = as_data_type(place.dtype)
            assert kind is not None
            found = self._trial[one] = list(place.shape), list(place.strides), kind
        return found

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _record(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add a node; its result, or a list of them."""
        self._changing(operation.name)
        if operation.name == "conv_dgrad" and len(args) == 2 and not {"loss", "filter", "weight"} & set(kwargs):
            names = dgrad_order(_sizes(args[0]), _sizes(args[1]), kwargs.get("groups"))
            args, kwargs = (), {**dict(zip(names, args, strict=True)), **kwargs}
        kwargs = {operation.aliases.get(key, key): value for key, value in kwargs.items()}
        try:
            bound = operation.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{operation.name}: {error}; wanted {operation.name}{operation.signature}") from None
        positional = list(bound.arguments)[: len(args)]
        called = [*positional, *kwargs]
        bound.apply_defaults()
        given = bound.arguments
        name = given["name"] or self._name_for(operation.name)
        inputs: dict[str, Any] = {}
        order: list[Recorded] = []
        for port in sorted(operation.ports, key=lambda port: called.index(port) if port in called else len(called)):
            if f"{port}*" in operation.inputs:
                found = {f"{port}_{at}": one for at, one in enumerate(given[port])}
            else:
                found = {port: given[port]}
            for key, value in found.items():
                inputs[key] = value if _is_number(value) else self._tensor_of(value, name, key)
                order += [inputs[key]] if isinstance(inputs[key], Recorded) else []
        attributes = {key: given[key] for key in operation.attributes}
        node = Node(operation, name, inputs, attributes, tuple(order))
        sizes = given["out_dims"] or {}
        sizes = sizes if isinstance(sizes, Mapping) else {operation.outputs[0]: sizes}
        for port in operation.outputs:
            running = port.startswith("NEXT_RUNNING")
            if running and inputs.get("in_running_mean" if port.endswith("MEAN") else "in_running_var") is None:
                node.outputs[port] = None
                continue
            made = Recorded(self, 0, f"{name}::{port}", dim=sizes.get(port), is_virtual=True, node=node)
            self._take(made, None)
            node.outputs[port] = made
        self._nodes.append(node)
        results = list(node.outputs.values())
        return results[0] if len(results) == 1 else results

    def _name_for(self, op: str) -> str:
        count = self._counts.get(op, 0)
        self._counts[op] = count + 1
        return f"{op}.{count}"

    def _tensor_of(self, value: Any, node: str, port: Any) -> Recorded | None:
        """A tensor of this graph for what an argument is: such a tensor, or one of torch or with DLPack, which becomes
        an input and is used where a call gives no other."""
        if value is None:
            return None
        if isinstance(value, Recorded):
            if value._owner is not self:
                raise ValueError(
                    f"{node}: {port} is tensor {value._name!r} of another graph; wanted one of {self.name!r}"
                )
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{node}: {port} is {type(value).__name__}; wanted a tensor")
        made = self.tensor_like(value.detach() if isinstance(value, Tensor) else value, name=f"{node}::{port}")
        self._known[id(value)] = value, made
        self._bound[made.get_uid()] = value
        return made

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:

            def refuse(*args: Any, **kwargs: Any) -> Any:
                raise cudnnGraphNotSupportedError(
                    f"{name}: openconv computes convolutions and what surrounds them, not this"
                )

            return refuse
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """The operations, in the order in which they were added."""
        return list(self._nodes)

    @property
    def tensors(self) -> dict[str, Recorded]:
        """The tensors by name, the last of those that share one."""
        return {one.get_name(): one for one in self._tensors.values()}

    def find_tensor(self, name_or_uid: str | int) -> Recorded | None:
        """A tensor by its number or name. ValueError if several have the name."""
        if isinstance(name_or_uid, int):
            return self._tensors.get(name_or_uid)
        found = [one for one in self._tensors.values() if one.get_name() == name_or_uid]
        if len(found) > 1:
            raise ValueError(f"{len(found)} tensors are called {name_or_uid!r}; wanted a tensor or its uid")
        return found[0] if found else None

    def query_tensor_attributes_of_uid(self, uid: int) -> Recorded:
        """The tensor with this number."""
        if uid not in self._tensors:
            raise ValueError(f"there is no tensor with uid {uid}; wanted one of {sorted(self._tensors)}")
        return self._tensors[uid]

    def get_inputs(self) -> list[Recorded]:
        """What results are made of, in order of first use."""
        used = dict.fromkeys(one for node in self._live() for one in node.order)
        return [one for one in used if one._node is None and one._value is None]

    def get_outputs(self) -> list[Recorded]:
        """Results, in the order in which they were made such; those that no node uses, if none was."""
        made = [one for node in self._nodes for one in node.outputs.values() if one is not None]
        marked = sorted((one for one in made if not one.get_is_virtual()), key=lambda one: one._marked)
        if marked:
            return marked
        used = {one for node in self._nodes for one in node.order}
        return [one for one in made if one not in used]

    def _live(self) -> list[Node]:
        """The nodes that results are made of, in order."""
        wanted = set(self.get_outputs())
        live = []
        for node in reversed(self._nodes):
            if any(one in wanted for one in node.outputs.values()):
                wanted.update(node.order)
                live.append(node)
        return live[::-1]

    def inspect(self) -> dict[str, Any]:
        """The graph as plain data."""
        return serialize.to_data(self)

    def __repr__(self) -> str:
        return json.dumps(self.inspect(), indent=2)


def _strides(dim: Sequence[int], stride: Sequence[int] | None) -> tuple[int, ...]:
    if stride is not None and len(stride):
        return tuple(stride)
    steps, step = [], 1
    for size in reversed(tuple(dim)):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))


def _sizes(value: Any) -> list[int]:
    return value.get_dim() if isinstance(value, Recorded) else list(getattr(value, "shape", ()))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _method(operation: Operation) -> Any:
    def method(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        return self._record(operation, args, kwargs)

    inputs = ", ".join(operation.ports)
    method.__name__, method.__qualname__ = operation.name, f"pygraph.{operation.name}"
    method.__doc__ = f"{operation.name} of {inputs}: {', '.join(operation.outputs)}."
    first = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = Signature([first, *operation.signature.parameters.values()])  # type: ignore[attr-defined]
    return method


for _operation in OPERATIONS.values():
    setattr(Recorder, _operation.name, _method(_operation))
