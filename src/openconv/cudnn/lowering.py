"""From what was recorded to an :class:`openconv.Graph`.

A translation starts at the tensors that are wanted and goes back to what they are made of, so nodes that nothing wanted
comes from are left out. It is of one set of numbers: scalars that the host passes and that openconv bakes into kernels
(``epsilon`` and ``momentum`` of a batch normalisation) are part of what is translated, as are sizes that a call
overrides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..engine import UnsupportedProblem
from ..graph import Graph, GraphTensor
from ..graph.ir import layout_of_strides
from .enums import data_type, dtype_name
from .errors import cudnnGraphNotSupportedError
from .operations import Call, Value
from .record import Node, tensor

__all__ = ["Lowering", "Rules"]


@dataclass(frozen=True)
class Rules:
    """What a translation follows besides the record: data types of results (``io``) and of values on the way
    (``inside``) that none was set of, numbers by uid, and sizes and strides by uid in place of those recorded."""

    io: data_type | None = None
    inside: data_type | None = None
    numbers: Mapping[int, float] = field(default_factory=dict)
    sizes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...] | None]] = field(default_factory=dict)


class Lowering:
    """A graph, and where tensors of the record are in it. ``baked`` has those whose values are part of it."""

    def __init__(self, name: str, wanted: Iterable[tensor], rules: Rules) -> None:
        self.graph, self.rules = Graph(name), rules
        self.places: dict[tensor, GraphTensor] = {}
        self.inputs: dict[tensor, GraphTensor] = {}
        self.baked: dict[tensor, float] = {}
        self._names: set[str] = set()
        self.outputs = {one: self.place(one) for one in wanted}
        for place in self.outputs.values():
            place.set_output(True)

    def place(self, one: tensor) -> GraphTensor:
        """The tensor of the graph that stands for one of the record."""
        if one not in self.places:
            if one._node is None:
                self.places[one] = self.inputs[one] = self._input(one)
            else:
                self._run(one._node)
        return self.places[one]

    def _input(self, one: tensor) -> GraphTensor:
        name = one.get_name()
        if one.get_is_virtual():
            raise RuntimeError(f"tensor {name!r} is virtual and no node makes it; wanted one that the caller gives")
        dim, stride = self.rules.sizes.get(one.get_uid(), (one._dim, one._stride))
        kind = one._type or self.rules.io
        if dim is None:
            raise RuntimeError(f"tensor {name!r}: dim is not set; wanted the sizes of what the caller gives")
        if stride is not None and len(stride) != len(dim):
            raise ValueError(f"tensor {name!r}: dim is {list(dim)} and stride {list(stride)}; wanted as many of both")
        if kind is None:
            raise RuntimeError(f"tensor {name!r}: data type is not set; wanted that of the tensor, or io_data_type")
        return self.graph.input(shape=dim, dtype=dtype_name(kind), strides=stride, name=self._free(name))

    def _free(self, name: str) -> str | None:
        """The name, if no other tensor has it: the frontend's are labels."""
        if not name or name in self._names:
            return None
        self._names.add(name)
        return name

    def _run(self, node: Node) -> None:
        # The arguments come first, one after the other: graphs may be deeper than Python's stack.
        waiting = [node]
        while waiting:
            above = {
                one._node: None for one in waiting[-1].order if one not in self.places and one._node is not None
            }  # fmt: skip
            if above:
                waiting += above
            else:
                self._translate(waiting.pop())

    def _translate(self, node: Node) -> None:
        if all(one is None or one in self.places for one in node.outputs.values()):
            return
        try:
            made = node.operation.lower(_Call(self, node))
        except UnsupportedProblem as error:
            raise cudnnGraphNotSupportedError(str(error)) from error
        results = (made,) if isinstance(made, GraphTensor) else tuple(made)
        for at, (one, result) in enumerate(zip(node.outputs.values(), results, strict=True)):
            if one is not None and result is not None:
                self.places[one] = self._finished(one, result, main=at == 0 and not node.operation.keeps)

    def _finished(self, one: tensor, made: GraphTensor, main: bool) -> GraphTensor:
        """A result of a node with what was set of it. Values on the way are of the graph's type for them where they
        are what the node is about: statistics, and values that are only moved, stay what they are."""
        name = one.get_name()
        dim, stride = self.rules.sizes.get(one.get_uid(), (one._dim, one._stride))
        if dim is not None and tuple(dim) != made.shape:
            raise RuntimeError(f"tensor {name!r}: dim was set to {list(dim)}; the operation makes {list(made.shape)}")
        kind = one._type
        if kind is None and not one.get_is_virtual():
            kind = self.rules.io
        elif kind is None and main and made.dtype not in ("bool", "i32"):
            kind = self.rules.inside
        if any(made is place for place in (*self.places.values(), *self.inputs.values())):
            made = self.graph.identity(made)  # a view that changes nothing; what is set of it is not set of the input
        if kind is not None and dtype_name(kind) != made.dtype:
            if one._node is not None and one._node.operation.keeps:
                made = self.graph.cast(made, dtype_name(kind))
            else:
                made.set_dtype(dtype_name(kind))
        if stride is not None and not one.get_is_virtual():
            if len(stride) != len(made.shape):
                raise ValueError(f"tensor {name!r}: stride is {list(stride)} of {made.dim()} axes; wanted one for each")
            layout = layout_of_strides(made.shape, stride)
            if layout is not None and layout != made.layout:
                made.set_layout(layout)
        free = self._free(name)
        return made if free is None or free == made.name else made.set_name(free)

    def wide(self, *places: GraphTensor, of: Sequence[tensor]) -> list[GraphTensor]:
        """Tensors that are multiplied, in one dtype: those that are values on the way become what the others are, or
        of the type of inputs and outputs."""
        if len({place.dtype for place in places}) == 1:
            return list(places)
        outside = [place.dtype for place, one in zip(places, of, strict=True) if not one.get_is_virtual()]
        wanted = outside[0] if outside else places[0].dtype if self.rules.io is None else dtype_name(self.rules.io)
        return [
            self.graph.cast(place, wanted) if place.dtype != wanted and one.get_is_virtual() else place
            for place, one in zip(places, of, strict=True)
        ]


class _Call(Call):
    """See :class:`~openconv.cudnn.operations.Call`."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self._lowering, self.node, self.graph = lowering, node, lowering.graph

    def __getitem__(self, name: str) -> GraphTensor:
        found = self.node.given(name)
        if not isinstance(found, tensor) or found._value is not None:
            raise TypeError(f"{self.node.name}: {name} is {found!r}; wanted a tensor")
        return self._lowering.place(found)

    def value(self, name: str) -> Value:
        found = self.node.given(name)
        if isinstance(found, tensor):
            return self._lowering.place(found) if found._value is None else found._value
        if isinstance(found, int | float):
            return found
        raise TypeError(f"{self.node.name}: {name} is {found!r}; wanted a tensor or a number")

    def number(self, name: str, default: float) -> float:
        found = self.node.given(name)
        if not isinstance(found, tensor):
            return default if found is None else float(found)
        if found._value is not None:
            return found._value
        self._lowering.baked[found] = self._lowering.rules.numbers.get(found.get_uid(), default)
        return self._lowering.baked[found]

    def pair(self, first: str, second: str) -> tuple[GraphTensor, GraphTensor]:
        one, other = self._lowering.wide(self[first], self[second], of=(self._of(first), self._of(second)))
        return one, other

    def _of(self, name: str) -> tensor:
        found = self.node.given(name)
        assert isinstance(found, tensor)
        return found

    def wanted(self, port: str) -> tuple[list[int] | None, list[int] | None]:
        one = self.node.outputs[port]
        if one is None:
            return None, None
        dim, stride = self._lowering.rules.sizes.get(one.get_uid(), (one._dim, one._stride))
        return (None if dim is None else list(dim)), (None if stride is None else list(stride))
