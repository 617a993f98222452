"""What a graph of the frontend is made of before it is translated: tensors that can still change, and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .enums import as_data_type, data_type, tensor_reordering
from .errors import cudnnGraphNotSupportedError

if TYPE_CHECKING:
    from .operations import Operation

__all__ = ["Node", "Owner", "tensor"]


class Owner(Protocol):
    """The graph that tensors belong to."""

    def _changing(self, what: str) -> None:
        """RuntimeError if the graph is fixed; forgets what was translated otherwise."""

    def _inferred(self, one: tensor) -> tuple[list[int], list[int], data_type] | None:
        """Sizes, strides and data type of a tensor as they follow from the graph; None where they do not yet."""

    def _give_uid(self, one: tensor, uid: int) -> None:
        """Let a tensor be known by another number."""

    def _mark(self) -> int:
        """Count the tensors that were made results."""


class tensor:
    """A tensor of a graph: what a caller gives, what a node makes, or a number.

    Sizes, strides and data type that were not set follow from the graph, and change with it. A virtual tensor is a
    result that stays inside the graph. Methods that start with ``set`` return the tensor.
    """

    def __init__(
        self,
        owner: Owner,
        uid: int,
        name: str,
        *,
        dim: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        kind: Any = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        value: float | None = None,
        node: Node | None = None,
    ) -> None:
        self._owner, self._uid, self._name = owner, uid, name
        self._dim = None if dim is None else _integers(dim, f"tensor {name!r}: dim")
        self._stride = None if stride is None else _integers(stride, f"tensor {name!r}: stride")
        self._type = as_data_type(kind)
        self._virtual, self._by_value = is_virtual, is_pass_by_value
        self._value, self._node = value, node
        self._marked = -1
        self._uid_given = False
        self._check()

    # -- what was set, or follows -----------------------------------------------------------------------------------

    def get_uid(self) -> int:
        """The number by which a tensor is known in the graph."""
        return self._uid

    def get_name(self) -> str:
        """The name; two tensors may have the same."""
        return self._name

    def get_dim(self) -> list[int]:
        """Sizes; empty while they cannot be known."""
        return list(self._dim) if self._dim is not None else self._follows(0, [])

    def get_stride(self) -> list[int]:
        """Elements from one place to the next along each axis; empty while they cannot be known."""
        return list(self._stride) if self._stride is not None else self._follows(1, [])

    def get_data_type(self) -> data_type:
        """The data type; NOT_SET while it cannot be known."""
        return self._type or self._follows(2, data_type.NOT_SET)

    def get_is_virtual(self) -> bool:
        """Whether it stays inside the graph."""
        return self._virtual

    def get_is_pass_by_value(self) -> bool:
        """Whether it is a number that the host has."""
        return self._by_value

    def get_has_compile_time_constant(self) -> bool:
        """Whether its value was given when it was made."""
        return self._value is not None

    def get_reordering_type(self) -> tensor_reordering:
        """Always NONE."""
        return tensor_reordering.NONE

    def _follows(self, which: int, unknown: Any) -> Any:
        found = self._owner._inferred(self)
        return unknown if found is None else found[which]

    # -- setters ----------------------------------------------------------------------------------------------------

    def set_output(self, value: bool) -> tensor:
        """Make it a result of the graph, behind those that were made results before, or have it stay inside."""
        return self.set_is_virtual(not value)

    def set_is_virtual(self, value: bool) -> tensor:
        """The opposite of :meth:`set_output`."""
        self._owner._changing(f"tensor {self._name!r}: is_virtual")
        if self._virtual and not value:
            self._marked = self._owner._mark()
        self._virtual = bool(value)
        return self._check()

    def set_data_type(self, data_type: Any) -> tensor:
        """Have its elements be of this type: one of ``cudnn.data_type`` or of torch's."""
        self._owner._changing(f"tensor {self._name!r}: data_type")
        self._type = as_data_type(data_type)
        return self

    def set_dim(self, dim: Sequence[int]) -> tensor:
        """Set the sizes."""
        self._owner._changing(f"tensor {self._name!r}: dim")
        self._dim = _integers(dim, f"tensor {self._name!r}: dim")
        return self

    def set_stride(self, stride: Sequence[int]) -> tensor:
        """Set the strides, in elements."""
        self._owner._changing(f"tensor {self._name!r}: stride")
        self._stride = _integers(stride, f"tensor {self._name!r}: stride")
        return self

    def set_name(self, name: str) -> tensor:
        """Give it a name."""
        self._owner._changing(f"tensor {self._name!r}: name")
        self._name = name
        return self

    def set_uid(self, uid: int) -> tensor:
        """Have it be known by this number. ValueError if another tensor was given it."""
        self._owner._changing(f"tensor {self._name!r}: uid")
        self._owner._give_uid(self, uid)
        return self

    def set_is_pass_by_value(self, value: bool) -> tensor:
        """Have it be a number that the host has when the graph runs."""
        self._owner._changing(f"tensor {self._name!r}: is_pass_by_value")
        self._by_value = bool(value)
        return self._check()

    def set_reordering_type(self, reordering_type: tensor_reordering) -> tensor:
        """NONE is all there is here."""
        if reordering_type not in (None, tensor_reordering.NONE):
            raise cudnnGraphNotSupportedError(
                f"tensor {self._name!r}: reordering_type is {reordering_type}; openconv knows NONE"
            )
        return self

    def set_ragged_offset(self, ragged_offset: Any) -> tensor:
        """None is all there is here."""
        if ragged_offset is not None:
            raise cudnnGraphNotSupportedError(f"tensor {self._name!r}: ragged tensors are not computed by openconv")
        return self

    def _check(self) -> tensor:
        if self._virtual and self._by_value:
            raise ValueError(f"tensor {self._name!r} is both virtual and passed by value; wanted one at most")
        return self

    def __repr__(self) -> str:
        kind = self._type.name if self._type else "type not set"
        what = "virtual " if self._virtual else "by value " if self._by_value else ""
        return f"<{what}tensor {self._name!r}, uid {self._uid}, dim {self._dim or 'not set'}, {kind}>"


@dataclass(eq=False)
class Node:
    """An operation with its arguments by name. ``order`` has those that are tensors as the call had them."""

    operation: Operation
    name: str
    inputs: Mapping[str, Any]
    attributes: Mapping[str, Any]
    order: tuple[tensor, ...]
    outputs: dict[str, tensor | None] = field(default_factory=dict)

    def given(self, name: str) -> tensor | float | None:
        """The argument of that name: a tensor, a number, or None."""
        return self.inputs.get(name)


def _integers(values: Sequence[int], what: str) -> list[int]:
    found = list(values)
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in found):
        raise ValueError(f"{what} is {found}; wanted integers of at least 0")
    return found
