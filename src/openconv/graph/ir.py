"""The graph as data: tensors, nodes, and the flow that holds them.

A :class:`Flow` is a list of nodes in an order in which they can be computed. A node has an operation, arguments
(tensors or numbers), attributes and results; shapes and dtypes of results follow from those of the arguments when a
node is added (:mod:`.operations`). Whatever changes a graph, a rewrite, a gradient or another batch size, makes a new
flow from an old one node by node: :meth:`Flow.copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

__all__ = ["Flow", "GraphTensor", "Meta", "Node", "dense_strides", "layout_of_strides"]


def dense_strides(shape: Sequence[int], layout: str = "nchw") -> tuple[int, ...]:
    """Strides of a tensor without gaps, its channels first or last."""
    axes = list(range(len(shape)))
    inward = axes if layout == "nchw" or len(shape) < 3 else [0, *axes[2:], 1]
    strides, step = [0] * len(shape), 1
    for axis in reversed(inward):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def layout_of_strides(shape: Sequence[int], strides: Sequence[int]) -> str | None:
    """The layout that these strides are, without gaps; None if they are neither. Axes of size 1 say nothing; what is
    both is nchw."""
    for layout in ("nchw", "nhwc"):
        wanted = dense_strides(shape, layout)
        if all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True)) or 0 in shape:
            return layout
    return None


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor before there is one. ``layout`` is that of axes from three on."""

    shape: tuple[int, ...]
    dtype: str
    layout: str = "nchw"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class GraphTensor:
    """A tensor of a graph: an input, a constant, or the result of a node. Methods that start with ``set`` return it."""

    __slots__ = ("_flow", "_given", "dtype", "index", "layout", "name", "node", "shape", "value")

    def __init__(self, flow: Flow, meta: Meta, name: str, node: Node | None = None, index: int = 0) -> None:
        self._flow = flow
        self.shape, self.dtype, self.layout = meta.shape, meta.dtype, meta.layout
        self.name, self.node, self.index = name, node, index
        self._given: tuple[int, ...] | None = None
        self.value: Tensor | None = None

    @property
    def meta(self) -> Meta:
        """Shape, dtype and layout."""
        return Meta(self.shape, self.dtype, self.layout)

    def meta_is(self, other: GraphTensor) -> bool:
        """Whether shape, dtype and layout are those of another one."""
        return self.shape == other.shape and self.dtype == other.dtype and self.layout == other.layout

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one place to the next along each axis."""
        return self._given or dense_strides(self.shape, self.layout)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def is_output(self) -> bool:
        """Whether calls return it."""
        return any(self is other for other in self._flow.outputs)

    def set_output(self, wanted: bool = True) -> GraphTensor:
        """Have calls return it, behind those that were marked before."""
        self._flow.changed()
        if wanted != self.is_output:
            others = [other for other in self._flow.marked if other is not self]
            self._flow.marked = [*others, self] if wanted else others
        elif wanted and not any(self is other for other in self._flow.marked):
            self._flow.marked.append(self)
        return self

    def set_name(self, name: str) -> GraphTensor:
        """Give it another name; ValueError if another tensor has it."""
        self._flow.changed()
        self._flow.rename(self, name)
        return self

    def set_dtype(self, dtype: str) -> GraphTensor:
        """Have the result stored in another dtype, where nothing has used it yet."""
        from .operations import check_dtype

        self._flow.changed()
        self._unused("dtype")
        self.dtype = check_dtype(dtype, f"tensor {self.name!r}")
        if self.node is not None:
            self.node.stored[self.index] = self.dtype
        return self

    def set_layout(self, layout: str) -> GraphTensor:
        """Have the result lie as nchw or nhwc, where nothing has used it yet."""
        if layout not in ("nchw", "nhwc"):
            raise ValueError(f"tensor {self.name!r}: layout is {layout!r}; wanted nchw or nhwc")
        self._flow.changed()
        self._unused("layout")
        self.layout = layout
        if self.node is not None:
            self.node.layouts[self.index] = layout
        return self

    def _unused(self, what: str) -> None:
        user = next((node for node in self._flow.nodes if any(arg is self for arg in node.args)), None)
        if user is not None:
            raise RuntimeError(f"tensor {self.name!r}: its {what} was changed behind its use by {user.name!r}")

    def _apply(self, op: str, *args: Any) -> GraphTensor:
        return self._flow.builder(op, *args)

    def __add__(self, other: Any) -> GraphTensor:
        return self._apply("add", self, other)

    def __radd__(self, other: Any) -> GraphTensor:
        return self._apply("add", other, self)

    def __sub__(self, other: Any) -> GraphTensor:
        return self._apply("sub", self, other)

    def __rsub__(self, other: Any) -> GraphTensor:
        return self._apply("sub", other, self)

    def __mul__(self, other: Any) -> GraphTensor:
        return self._apply("mul", self, other)

    def __rmul__(self, other: Any) -> GraphTensor:
        return self._apply("mul", other, self)

    def __truediv__(self, other: Any) -> GraphTensor:
        return self._apply("div", self, other)

    def __rtruediv__(self, other: Any) -> GraphTensor:
        return self._apply("div", other, self)

    def __neg__(self) -> GraphTensor:
        return self._apply("neg", self)

    def __repr__(self) -> str:
        return f"{self.name}: {self.meta}"


@dataclass(eq=False)
class Node:
    """One operation. ``stored`` and ``layouts`` have what was set of results, by their number."""

    op: str
    args: tuple[GraphTensor | float, ...]
    attrs: dict[str, Any]
    name: str
    results: tuple[GraphTensor, ...] = ()
    stored: dict[int, str] = field(default_factory=dict)
    layouts: dict[int, str] = field(default_factory=dict)

    @property
    def tensors(self) -> list[GraphTensor]:
        """The arguments that are tensors."""
        return [arg for arg in self.args if isinstance(arg, GraphTensor)]

    @property
    def result(self) -> GraphTensor:
        """The first result."""
        return self.results[0]

    def __repr__(self) -> str:
        args = ", ".join(arg.name if isinstance(arg, GraphTensor) else repr(arg) for arg in self.args)
        return f"{', '.join(r.name for r in self.results)} = {self.op}({args})"


class Flow:
    """Nodes in order, and the tensors that come in: ``inputs`` in order of first use, ``constants`` with a value."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.declared: list[GraphTensor] = []
        self.constants: list[GraphTensor] = []
        self.marked: list[GraphTensor] = []
        self.builder: Callable[..., Any] = self.add
        self.changed: Callable[[], None] = lambda: None
        self.reserved: set[str] = set()
        """Names that are not given to nodes by themselves: of tensors that may come from another flow."""
        self._names: dict[str, GraphTensor] = {}
        self._node_names: dict[str, int] = {}

    # -- tensors --------------------------------------------------------------------------------------------------

    def input(
        self, meta: Meta, name: str | None = None, strides: Sequence[int] | None = None
    ) -> GraphTensor:  # fmt: skip
        """A tensor that calls are given."""
        made = GraphTensor(self, meta, "")
        if strides is not None and tuple(strides) != dense_strides(meta.shape, meta.layout):
            made._given = tuple(strides)
        self.rename(made, name or self._free("input"))
        self.declared.append(made)
        return made

    def constant(self, value: Tensor, meta: Meta, name: str | None = None) -> GraphTensor:
        """A tensor whose value is known."""
        made = GraphTensor(self, meta, "")
        made.value = value
        if tuple(value.stride()) != dense_strides(meta.shape, meta.layout):
            made._given = tuple(value.stride())
        self.rename(made, name or self._free("constant"))
        self.constants.append(made)
        return made

    def rename(self, tensor: GraphTensor, name: str) -> None:
        """ValueError if the name is taken or empty."""
        if not name or not isinstance(name, str):
            raise ValueError(f"name of a tensor is {name!r}; wanted some text")
        if self._names.get(name, tensor) is not tensor:
            raise ValueError(f"the graph has a tensor {name!r} already; wanted another name")
        if self._names.get(tensor.name) is tensor:
            del self._names[tensor.name]
        tensor.name = name
        self._names[name] = tensor

    def named(self, name: str) -> GraphTensor | None:
        """The tensor of that name."""
        return self._names.get(name)

    def _free(self, stem: str) -> str:
        while True:
            count = self._node_names.get(stem, 0)
            self._node_names[stem] = count + 1
            name = stem if count == 0 and stem not in ("input", "constant") else f"{stem}_{count}"
            if name not in self._names and name not in self.reserved:
                return name

    @property
    def inputs(self) -> tuple[GraphTensor, ...]:
        """Inputs in order of first use; those that nothing uses come last."""
        used = dict.fromkeys(arg for node in self.nodes for arg in node.tensors if arg.node is None)
        order = [arg for arg in used if arg.value is None]
        return *order, *(arg for arg in self.declared if arg not in used)

    @property
    def outputs(self) -> list[GraphTensor]:
        """Those that were marked, else those that nothing uses."""
        if self.marked:
            return self.marked
        used = {arg for node in self.nodes for arg in node.tensors}
        return [result for node in self.nodes for result in node.results if result not in used]

    # -- nodes ----------------------------------------------------------------------------------------------------

    def add(self, op: str, *args: GraphTensor | float, name: str | None = None, **attrs: Any) -> Any:
        """Add a node; its result, or a tuple of them. RuntimeError or ValueError name the node and the argument."""
        from .operations import infer

        node = Node(op, args, attrs, name or self._free(op))
        self._append(node, infer(node), name is None)
        return node.results if len(node.results) > 1 else node.result

    def _append(self, node: Node, metas: Sequence[Meta], unnamed: bool) -> None:
        node.results = tuple([GraphTensor(self, meta, "", node, at) for at, meta in enumerate(metas)])
        for at, result in enumerate(node.results):
            wanted = node.name if at == 0 else f"{node.name}.{at}"
            taken = wanted in self._names or (unnamed and wanted in self.reserved)
            self.rename(result, self._free(wanted) if taken else wanted)
        self.nodes.append(node)

    # -- from old to new ------------------------------------------------------------------------------------------

    def copy(
        self,
        rule: Callable[[Flow, Node, list[Any]], Sequence[GraphTensor] | None] | None = None,
        metas: Mapping[str, tuple[Meta, tuple[int, ...]]] | None = None,
    ) -> tuple[Flow, dict[GraphTensor, GraphTensor]]:
        """A new flow, and where each tensor went. ``rule(new, node, args)`` may add other nodes for a node and give
        their results; None copies the node. ``metas`` has other sizes and strides of inputs, by name. What neither
        outputs nor named results need is left out."""
        new, place = Flow(), {}
        for tensor in self.declared:
            meta, strides = metas[tensor.name] if metas else (tensor.meta, tensor.strides)
            place[tensor] = new.input(meta, tensor.name, strides)
        for tensor in self.constants:
            assert tensor.value is not None
            place[tensor] = new.constant(tensor.value, tensor.meta, tensor.name)
        needed = self._needed()
        for node in self.nodes:
            if node not in needed:
                continue
            args = [place[arg] if isinstance(arg, GraphTensor) else arg for arg in node.args]
            results = rule(new, node, args) if rule else None
            results = new.again(node, args) if results is None else new._as_set(node, results)
            for old, made in zip(node.results, results, strict=True):
                place[old] = made
                if made.node is not None and made.name != old.name and new.named(old.name) is None:
                    new.rename(made, old.name)
        new.marked = [place[tensor] for tensor in self.outputs]
        return new, place

    def _as_set(self, node: Node, results: Sequence[GraphTensor]) -> list[GraphTensor]:
        """What a rule made of a node, in the dtypes and layouts that were set of its results."""
        found = list(results)
        for at, dtype in node.stored.items():
            if found[at].dtype != dtype:
                found[at] = self.add("cast", found[at], dtype=dtype)
        for at, layout in node.layouts.items():
            if found[at].layout != layout:
                found[at] = self.add("identity", found[at])
                found[at].layout = layout
                self.nodes[-1].layouts[0] = layout
        return found

    def again(self, node: Node, args: Sequence[Any]) -> tuple[GraphTensor, ...]:
        """A node of another flow, with arguments of this one."""
        from .operations import infer

        made = Node(node.op, tuple(args), dict(node.attrs), node.name, (), dict(node.stored), dict(node.layouts))
        known = all(
            new is old or (isinstance(new, GraphTensor) and isinstance(old, GraphTensor) and new.meta_is(old))
            for new, old in zip(args, node.args, strict=True)
        )
        self._append(made, [result.meta for result in node.results] if known else infer(made), False)
        for at, dtype in made.stored.items():
            made.results[at].dtype = dtype
        for at, layout in made.layouts.items():
            made.results[at].layout = layout
        return made.results

    def _needed(self) -> set[Node]:
        """The nodes that outputs are made of."""
        found: set[Node] = set()
        wanted = [tensor.node for tensor in self.outputs if tensor.node is not None]
        while wanted:
            node = wanted.pop()
            if node not in found:
                found.add(node)
                wanted += [arg.node for arg in node.tensors if arg.node is not None]
        return found
