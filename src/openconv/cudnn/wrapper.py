"""Graph: the frontend's short way, a block that builds and an object that is called.

with cudnn.Graph(io_data_type=cudnn.data_type.HALF) as graph:
    y = graph.conv_fprop(x, w, padding=[1, 1])
    y.set_output(True)

out = graph(x, w, handle=handle)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from .enums import heur_mode
from .handles import Handle, create_handle
from .operations import OPERATIONS, REFUSED, Operation
from .pygraph import pygraph
from .record import tensor
from .recorder import Recorder

__all__ = ["Graph"]

_BUILDING = frozenset(OPERATIONS) | REFUSED | {"tensor", "tensor_like", "tensor_scalar"}
_AT_THE_END = frozenset({
    "validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans", "build",
})  # fmt: skip
_open = threading.local()


class Graph:
    """A graph that is built when its block ends, and called like a function.

    Tensors of torch that operations are given are its inputs, known again by identity, and positional arguments of a
    call are in the order in which the block first used them; results come in the order in which they were made such.
    ``inputs`` and ``outputs``, or :meth:`set_io_tuples`, say otherwise. Calls take other batch sizes, and tensors of
    the CPU as well. ``handle`` is one of ``create_handle()``, ``"auto"`` for one of its own, or None for torch's
    current stream; all else is what :class:`~openconv.cudnn.pygraph` takes.
    """

    def __init__(
        self,
        *,
        handle: Handle | str | None = None,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
        heuristics: Sequence[heur_mode] | None = None,
        workspace_alloc: bool = True,
        **kwargs: Any,
    ) -> None:
        for what, value in (("inputs", inputs), ("outputs", outputs), ("heuristics", heuristics)):
            if value is not None and not isinstance(value, list | tuple):
                raise ValueError(f"{what} is {type(value).__name__}; wanted a list or a tuple")
        self._handle = create_handle() if handle == "auto" else handle
        self._graph = pygraph(handle=self._handle, **kwargs)  # type: ignore[arg-type]
        self._heuristics, self._allocates = heuristics, workspace_alloc
        self._wanted: tuple[Sequence[Any], Sequence[Any]] | None = None
        if inputs is not None or outputs is not None:
            self._wanted = inputs or (), outputs or ()
        self._state = "new"
        self._inputs: tuple[tensor, ...] = ()
        self._outputs: tuple[tensor, ...] = ()
        self._seen: dict[int, tuple[weakref.ref[Tensor], tensor]] = {}
        self._asides = threading.local()

    # -- the block --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RuntimeError(f"graph {self._graph.name!r} had its block already; wanted a new cudnn.Graph")
        self._state = "open"
        _stack().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *failure: object) -> None:
        _stack().remove(self)
        self._state = "closed"
        if kind is not None:
            return
        graph = self._graph
        graph.build(self._heuristics)
        self._inputs, self._outputs = tuple(graph.get_inputs()), tuple(graph.get_outputs())
        # What the block was given is the caller's: it is looked at to be known again, and not kept.
        self._seen = {
            key: (weakref.ref(value), one) for key, (value, one) in graph._known.items() if isinstance(value, Tensor)
        }
        graph._known.clear()
        graph._bound.clear()
        self._state = "built"
        if self._wanted is not None:
            self.set_io_tuples(*self._wanted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name not in _BUILDING:
            if name in _AT_THE_END:
                raise RuntimeError(
                    f"{name}: the end of the block does this; wanted a cudnn.pygraph to do it step by step"
                )
            return getattr(self._graph, name)
        getattr(self._graph, name)

        def build(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._building(name), name)(*args, **kwargs)

        build.__name__, build.__doc__ = name, getattr(getattr(pygraph, name, None), "__doc__", None)
        return build

    def _building(self, what: str) -> Recorder:
        """What a call adds to: this graph while its block is open, else the innermost open block of the thread. A
        program that says ``graph.conv_fprop`` in the block of another graph means that one. Outside of all blocks a
        graph that is built answers beside itself: one may ask it for sizes."""
        if self._state == "open":
            return self._graph
        stack = _stack()
        if stack:
            return stack[-1]._graph
        if self._state == "built":
            return self._aside()
        when = "is closed, since its block failed," if self._state != "new" else "is not open,"
        raise RuntimeError(f"{what}: graph {self._graph.name!r} {when} and no block of another one is open; wanted "
                           "`with cudnn.Graph() as graph:` around it")  # fmt: skip

    def _aside(self) -> _Aside:
        """This thread's record beside the graph."""
        if not hasattr(self._asides, "record"):
            self._asides.record = _Aside(self._graph)
        found: _Aside = self._asides.record
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._graph) if not name.startswith("_"))})

    # -- which tensors ----------------------------------------------------------------------------------------------

    def set_io_tuples(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """The order of arguments and results of a call: names, tensors of the graph, their numbers, or tensors that the
        block was given. All there are have to be among them. In the block it is kept for its end."""
        for what, value in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(value, list | tuple):
                raise ValueError(f"{what} is {type(value).__name__}; wanted a list or a tuple")
        if self._state != "built":
            self._wanted = inputs, outputs
            return
        found = []
        for what, given, have in (("inputs", inputs, self._inputs), ("outputs", outputs, self._outputs)):
            order = tuple(self._found(key, have, what) for key in given)
            if len(set(order)) != len(order) or set(order) != set(have):
                names = [one.get_name() for one in have]
                raise ValueError(f"{what} are {[one.get_name() for one in order]}; wanted each of {names} once")
            found.append(order)
        self._inputs, self._outputs = found

    def _found(self, key: Any, among: Sequence[tensor], what: str) -> tensor:
        """The tensor that is meant: by itself, its uid, its name, ``node::argument`` or an argument's name alone."""
        if isinstance(key, tensor) and key in among:
            return key
        if isinstance(key, Tensor):
            seen = self._seen.get(id(key))
            if seen is not None and seen[0]() is key and seen[1] in among:
                return seen[1]
        elif isinstance(key, int | str):
            named = self._named(key, among)
            if len(named) > 1:
                raise ValueError(
                    f"{what}: {key!r} is the name of {len(named)} tensors; wanted one of {self._names(among)}"
                )
            if named:
                return named[0]
        shown = repr(key) if not isinstance(key, Tensor) else f"a tensor {tuple(key.shape)}"
        raise ValueError(f"{what}: {shown} is none of them; wanted one of {self._names(among)}")

    def _named(self, key: int | str, among: Sequence[tensor]) -> list[tensor]:
        if isinstance(key, int):
            return [one for one in among if one.get_uid() == key]
        exact = [one for one in among if one.get_name() == key]
        if exact:
            return exact
        ports: dict[str, set[tensor]] = {}
        for node in self._graph.nodes:
            given = {port: one for port, one in node.inputs.items() if isinstance(one, tensor)}
            made = {port: one for port, one in node.outputs.items() if one is not None}
            numbered = {str(at): one for at, one in enumerate(given.values())}
            aliases = {alias: given[port] for alias, port in node.operation.aliases.items() if port in given}
            for port, one in (*given.items(), *made.items(), *numbered.items(), *aliases.items()):
                ports.setdefault(f"{node.name}::{port}", set()).add(one)
                if not port.isdigit():
                    ports.setdefault(port, set()).add(one)
        return [one for one in among if one in ports.get(key, ())]

    @staticmethod
    def _names(among: Sequence[tensor]) -> str:
        return ", ".join(repr(one.get_name()) for one in among)

    # -- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, handle: Handle | None = None, workspace: Any = None, **named: Any) -> Any:
        """Run: ``graph(x, w)``, ``graph(image=x, weight=w)`` or ``graph({"image": x, ...})``. The first two return the
        result, or a tuple of them; the last returns the dictionary, with the results added by name. It may have tensors
        for results, which are filled."""
        if self._state != "built":
            raise RuntimeError(f"graph {self._graph.name!r} is {self._state}; wanted a call behind its block")
        if workspace is None and not self._allocates and self._graph.get_workspace_size():
            raise RuntimeError(
                f"workspace is None and workspace_alloc False; wanted {self._graph.get_workspace_size()} bytes"
            )
        if len(args) == 1 and isinstance(args[0], dict) and not named:
            return self._of_mapping(args[0], handle, workspace)
        values: dict[tensor, Any] = {
            self._found(name, self._inputs, "arguments"): value for name, value in named.items()
        }
        rest = [one for one in self._inputs if one not in values]
        if len(args) != len(rest):
            raise ValueError(f"{len(args)} tensor(s) were given by place; wanted {len(rest)}: {self._names(rest)}")
        values.update(zip(rest, args, strict=True))
        made = self._run(values, {}, handle, workspace)
        results = tuple(made[one] for one in self._outputs)
        return results[0] if len(results) == 1 else results

    def _of_mapping(self, given: dict[Any, Any], handle: Handle | None, workspace: Any) -> dict[Any, Any]:
        values: dict[tensor, Any] = {}
        outs: dict[tensor, Any] = {}
        for key, value in given.items():
            one = self._found(key, (*self._inputs, *self._outputs), "tensors")
            (values if one in self._inputs else outs)[one] = value
        missing = [one for one in self._inputs if one not in values]
        if missing:
            raise RuntimeError(f"the dictionary lacks {self._names(missing)}; wanted a tensor for each input")
        made = self._run(values, outs, handle, workspace)
        given.update({one.get_name(): value for one, value in made.items() if one not in outs})
        return given

    def _run(
        self, values: Mapping[tensor, Any], outs: Mapping[tensor, Any], handle: Handle | None, workspace: Any
    ) -> dict[tensor, Tensor]:
        handle = handle if handle is not None else self._handle  # type: ignore[assignment]
        return self._graph._call(values, outs, handle, workspace)

    def __repr__(self) -> str:
        return f"<cudnn.Graph {self._graph.name!r}, {self._state}, {len(self._graph.nodes)} operation(s)>"


class _Aside(Recorder):
    """What a graph is told after its end, with the data types of that graph: tensors have sizes, and none is computed.
    It holds none of them: they live as long as their callers keep them."""

    def __init__(self, graph: pygraph) -> None:
        super().__init__(f"{graph.name} (after its block)", graph._io, graph._inside, graph._compute)

    def _record(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super()._record(operation, args, kwargs)
        finally:
            for held in (self._nodes, self._tensors, self._known, self._bound):
                held.clear()

    def _mark(self) -> int:
        raise RuntimeError(f"graph {self.name!r}: a tensor was made a result, and nothing is added to a graph that is "
                           "closed; wanted `with cudnn.Graph() as graph:` around the operation")  # fmt: skip


def _stack() -> list[Graph]:
    """The open blocks of this thread, the innermost last."""
    if not hasattr(_open, "blocks"):
        _open.blocks = []
    found: list[Graph] = _open.blocks
    return found
