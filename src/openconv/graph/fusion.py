"""Fusion: which nodes of a flow become one kernel.

Three kinds of group grow around a node, as long as no kernel would have to wait for its own result:

- a convolution or a matrix product takes the pointwise nodes behind it as its epilogue, statistics of its result, and
  the pointwise nodes before its image as a prologue;
- pointwise nodes of one shape, and reductions of them, become one tree;
- everything else is a step of its own, views a step without a kernel.

An epilogue that only some engines compute is taken where the fused kernel is predicted to take less time than the
quickest plain engine and another kernel for the rest; it is shortened node by node until an engine takes it. The reason
is kept for each edge that was not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from ..device import Device
from ..engine import UnsupportedProblem
from ..epilogue import OPS, Acc, Const, Epilogue, Expr, Operand, apply
from ..epilogue import Node as Applied
from ..plan import lower
from ..problem import DTYPE_BYTES, Problem
from ..select import Policy, choose
from ..tree import Reduction, Tree, leaf
from .ir import Flow, GraphTensor, Node
from .operations import POINTWISE, VIEWS

__all__ = ["Group", "Kernel", "dtype_bytes", "estimate", "fuse", "tree_seconds"]

_FLOATS = ("f64", "f32", "f16", "bf16")
_MOST_NODES = 96
"""Nodes of one expression: a value that is used twice is computed twice in a tree of nodes."""
_MOST_INLINED = 4
_CHEAP = frozenset({"add", "sub", "mul", "neg", "abs", "max", "min", "relu", "cast"})
_MOST_TENSORS = 12
"""Pointers of a kernel, inputs and results together."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return 1 if dtype == "bool" else DTYPE_BYTES[dtype]


@dataclass(eq=False)
class Group:
    """Nodes that run as one kernel. ``anchor`` is the convolution or matrix product; trees have none."""

    kind: str
    nodes: list[Node]
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None
    anchor: Anchor | None = None
    stats: Node | None = None
    prologue: list[Node] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Anchor:
    """A convolution, or a matrix product said as one: ``image`` is the argument that a prologue may be before."""

    node: Node
    problem: Problem
    first: GraphTensor
    second: GraphTensor
    image: GraphTensor | None
    matrix: bool = False

    @property
    def result(self) -> GraphTensor:
        return self.node.result

    def kind_of(self, value: GraphTensor) -> str | None:
        """As which kind of operand an epilogue reads a value; None if it cannot."""
        if value.shape == self.result.shape:
            lies = self.matrix or value.layout == self.result.layout or value.dim() < 4
            return "tensor" if lies else None
        if value.size == 1:
            return "scalar"
        channel = -1 if self.matrix else 1 - self.result.dim()
        padded = (1,) * (self.result.dim() - value.dim()) + value.shape
        alone = all(size == 1 for axis, size in enumerate(padded) if axis - len(padded) != channel)
        return "channel" if alone and padded[channel] == self.result.shape[channel] else None


@dataclass(eq=False)
class Kernel:
    """One step of a program.

    ``inputs`` are read and ``results`` written, in the order of the problem (first, second, prologue, epilogue; result,
    others, statistics) or of the tree. ``notes`` say what is fused and why not more.
    """

    kind: str
    nodes: list[Node]
    inputs: list[GraphTensor]
    results: list[GraphTensor]
    problem: Problem | None = None
    tree: Tree | None = None
    shape: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    matrix: bool = False
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The names of its nodes."""
        return " + ".join(node.name for node in self.nodes)


# -- predictions ------------------------------------------------------------------------------------------------------

_estimates: dict[tuple[Problem, Device, Policy], float | None] = {}


def estimate(problem: Problem, device: Device, policy: Policy) -> float | None:
    """Predicted seconds of a problem on the best engine; None if none takes it as it is, with all that is fused."""
    key = problem, device, policy
    if key not in _estimates:
        found: float | None = None
        try:
            core = lower(problem, device, policy)
            fused = core.is_fused or not problem.is_fused or device.kind == "cpu"
            found = choose(core, device, policy).expected if fused else None
        except UnsupportedProblem:
            pass
        if len(_estimates) > 8192:
            _estimates.clear()
        _estimates[key] = found
    return _estimates[key]


def tree_seconds(moved: float, device: Device) -> float:
    """Predicted seconds of a kernel that moves so many bytes and computes next to nothing."""
    return (2e-6 if device.kind == "cuda" else 5e-6) + moved / (0.9 * device.bandwidth)


def _bytes(value: GraphTensor) -> int:
    return value.size * dtype_bytes(value.dtype)


# -- groups -----------------------------------------------------------------------------------------------------------


_Fused = tuple[Problem, list[GraphTensor], list[GraphTensor]]


class _Fuser:
    def __init__(self, flow: Flow, device: Device, policy: Policy, wanted: bool) -> None:
        self.flow, self.device, self.policy, self.wanted = flow, device, policy, wanted
        self.at = {node: at for at, node in enumerate(flow.nodes)}
        self.users: dict[GraphTensor, list[Node]] = {}
        for node in flow.nodes:
            for arg in dict.fromkeys(node.tensors):
                self.users.setdefault(arg, []).append(node)
        self.outputs = set(flow.outputs)
        self.group: dict[Node, Group] = {}
        self.groups: list[Group] = []
        self.problems: dict[tuple[Node, ...], _Fused | None] = {}

    def run(self) -> list[Kernel]:
        anchors = [node for node in self.flow.nodes if node.op.startswith("conv_") or node.op == "matmul"]
        for node in anchors:
            self._anchored(node)
        if self.wanted:
            for group in list(self.groups):
                self._take_prologue(group)
        for node in self.flow.nodes:
            if node not in self.group:
                self._treed(node)
        if self.wanted:
            for group in [group for group in self.groups if group.kind == "tree"]:
                self._dissolve(group)
        return [self._kernel(group) for group in self._ordered()]

    def _new(self, group: Group) -> Group:
        self.groups.append(group)
        for node in group.nodes:
            self.group[node] = group
        return group

    # -- order ----------------------------------------------------------------------------------------------------

    def _members(self, node: Node) -> list[Node]:
        found = self.group.get(node)
        return [node] if found is None else [*found.prologue, *found.nodes, *([found.stats] if found.stats else [])]

    def _needs(self, node: Node, members: Sequence[Node]) -> bool:
        """Whether the kernel of a node needs, by way of others, a result of the kernel of ``members``."""
        own, first = set(members), min(self.at[each] for each in members)
        seen: set[Node] = set()
        wanted = [node]
        while wanted:
            each = wanted.pop()
            if each in own:
                return True
            if each in seen:
                continue
            for member in self._members(each):
                seen.add(member)
                for arg in member.tensors:
                    source = arg.node
                    if source is None or source in seen:
                        continue
                    # What lies wholly before the group cannot need it.
                    if source in self.group or self.at[source] >= first:
                        if max(self.at[other] for other in self._members(source)) >= first:
                            wanted.append(source)
        return False

    def _cycle(self, node: Node, members: Sequence[Node]) -> bool:
        """Whether a node that joins would wait for a kernel that waits for this one."""
        own = set(members)
        return any(
            arg.node is not None and arg.node not in own and self._needs(arg.node, members) for arg in node.tensors
        )

    def _ordered(self) -> Iterator[Group]:
        done: set[Group] = set()
        for start in self.groups:
            stack = [start]
            while stack:
                group = stack[-1]
                before = [
                    self.group[arg.node] for node in [*group.prologue, *group.nodes] for arg in node.tensors
                    if arg.node is not None and self.group[arg.node] is not group and self.group[arg.node] not in done
                ]  # fmt: skip
                if before and len(stack) <= len(self.groups):
                    stack.append(before[0])
                    continue
                assert not before, "kernels wait for each other"
                stack.pop()
                if group not in done:
                    done.add(group)
                    if group.kind != "inlined":
                        yield group

    # -- convolutions -----------------------------------------------------------------------------------------------

    def _anchored(self, node: Node) -> None:
        anchor = _anchor(node)
        group = Group("conv" if anchor else "matmul", [node], node.result.shape, anchor=anchor)
        if anchor is None or not self.wanted:
            self._new(group)
            return
        behind = list(self._behind(anchor, group))
        while behind and not self._accepted(anchor, group, [node, *behind]):
            behind.pop()
        behind = self._cheapest(anchor, group, behind)
        if anchor.matrix and not behind:
            group.kind = "matmul"
            group.anchor = None
        group.nodes = [node, *behind]
        self._new(group)
        self._take_stats(anchor, group)

    def _behind(self, anchor: Anchor, group: Group) -> Iterator[Node]:
        """Pointwise nodes that an epilogue could compute, in order."""
        members, inside = [anchor.node], {anchor.result}
        sizes = {anchor.result: 1}
        operands: set[GraphTensor] = set()
        for node in self.flow.nodes[self.at[anchor.node] + 1 :]:
            if not any(arg in inside for arg in node.tensors):
                continue
            why = self._why_not(node, anchor, inside, members)
            if why is None:
                size = 1 + sum(sizes.get(arg, 1) if isinstance(arg, GraphTensor) else 1 for arg in node.args)
                others = operands | {arg for arg in node.tensors if arg not in inside}
                if size > _MOST_NODES:
                    why = f"its expression would have {size} nodes; the most is {_MOST_NODES}"
                elif len(others) > _MOST_TENSORS - 4:
                    why = f"it would have {len(others)} operands; the most is {_MOST_TENSORS - 4}"
            if why is not None:
                group.kept.append(f"{node.name} is apart: {why}")
                continue
            operands = others
            sizes[node.result] = size
            inside.add(node.result)
            members.append(node)
            yield node

    def _why_not(self, node: Node, anchor: Anchor, inside: set[GraphTensor], members: list[Node]) -> str | None:
        if node in self.group:
            return "it is part of another kernel"
        if node.op not in POINTWISE:
            return f"{node.op} is not pointwise"
        if anchor.problem.direction == "wgrad":
            return "an engine's filter gradient has no epilogue"
        if node.result.shape != anchor.result.shape:
            return f"its shape is {node.result.shape}, not {anchor.result.shape}"
        if node.result.layout != anchor.result.layout and node.result.dim() > 3:
            return f"its layout is {node.result.layout}, not {anchor.result.layout}"
        for arg in node.tensors:
            if arg in inside:
                continue
            kind = anchor.kind_of(arg)
            if kind is None:
                return f"{arg.name} {arg.shape} is neither a tensor like the result nor one value per channel"
            if kind == "tensor" and arg.dtype != node.result.dtype and arg.dtype != anchor.result.dtype:
                return f"{arg.name} is {arg.dtype}, and the result {node.result.dtype}"
        if self._cycle(node, members):
            return "another of its arguments is made of this kernel's result"
        return None

    def _accepted(self, anchor: Anchor, group: Group, nodes: list[Node]) -> bool:
        """Whether an engine computes the fused problem."""
        last = nodes[-1]
        made = self._problem(anchor, nodes)
        if made is None:
            group.kept.append(f"{last.name} is apart: results of several dtypes or layouts in one kernel")
            return False
        problem = made[0]
        together = estimate(problem, self.device, self.policy)
        if together is None:
            group.kept.append(f"{last.name} is apart: no engine computes '{problem.fusion}'")
            return False
        return True

    def _cheapest(self, anchor: Anchor, group: Group, behind: list[Node]) -> list[Node]:
        """As much of an epilogue as is predicted to take the least time, with one more kernel for the rest: all of it,
        what comes before it reads a tensor, or nothing."""
        node, whole = anchor.node, self._problem(anchor, [anchor.node, *behind])
        if not behind or whole is None or self.device.kind == "cpu":
            return behind
        best, kept = estimate(whole[0], self.device, self.policy) or 0.0, behind
        tensors = [at for at, each in enumerate(behind) if self._reads_tensor(anchor, [node, *behind[:at]], each)]
        for cut in dict.fromkeys((*tensors[:1], 0) if whole[0].is_fused else tensors[:1]):
            made = self._problem(anchor, [node, *behind[:cut]])
            took = estimate(made[0], self.device, self.policy) if made is not None else None
            if took is None or made is None:
                continue
            took += tree_seconds(self._moved(made[2], behind[cut:]), self.device)
            if took < best:
                saved = f"{(best - took) * 1e6:.1f} us quicker in a kernel of its own"
                group.kept.append(f"{behind[cut].name} is apart: what follows the convolution from there is {saved}")
                best, kept = took, behind[:cut]
        return kept

    def _reads_tensor(self, anchor: Anchor, before: list[Node], node: Node) -> bool:
        inside = {each.result for each in before}
        return any(arg not in inside and anchor.kind_of(arg) == "tensor" for arg in node.tensors)

    def _moved(self, results: Sequence[GraphTensor], rest: Sequence[Node]) -> float:
        """Bytes of a kernel behind a convolution: what that has just stored comes from the cache, if it fits there."""
        inside = {node.result for node in rest}
        read = {arg for node in rest for arg in node.tensors if arg not in inside}
        fits = getattr(self.device, "l2_bytes", 0) // 2
        total = sum(_bytes(arg) * (0.4 if arg in results and _bytes(arg) <= fits else 1.0) for arg in read)
        return total + _bytes(rest[-1].result)

    def _problem(self, anchor: Anchor, nodes: Sequence[Node]) -> _Fused | None:
        """The problem with these nodes as its epilogue, its operands and its results; None if results differ."""
        key = tuple(nodes)
        if key not in self.problems:
            self.problems[key] = self._found_problem(anchor, key)
        return self.problems[key]

    def _found_problem(self, anchor: Anchor, nodes: Sequence[Node]) -> _Fused | None:
        exprs: dict[GraphTensor, Expr] = {anchor.result: Acc()}
        operands: dict[GraphTensor, Operand] = {}

        def operand(value: GraphTensor) -> Expr:
            if value not in operands:
                kind = anchor.kind_of(value)
                assert kind is not None
                operands[value] = Operand(kind, f"v{len(operands)}")
            return operands[value]

        for node in nodes[1:]:
            exprs[node.result] = _expr(node, exprs, operand)
        inside = set(nodes)
        results = [
            value for value in exprs
            if self._stored(value, inside)
        ]  # fmt: skip
        if not results:
            results = [nodes[-1].result]
        results.reverse()  # the last is the result, those on the way come besides
        kinds = {(value.dtype, value.layout) for value in results}
        if len(kinds) > 1:
            return None
        main, *others = (exprs[value] for value in results)
        if len(set(others)) != len(others):
            return None
        epilogue = Epilogue(main, tuple(others))
        given = [next(value for value, place in operands.items() if place == each) for each in epilogue.operands]
        dtypes, layouts = list(anchor.problem.dtypes), list(anchor.problem.layouts)
        at = anchor.problem.result
        dtypes[at] = results[0].dtype
        if not anchor.matrix:
            layouts[at] = results[0].layout
        try:
            problem = anchor.problem.with_(epilogue=epilogue, dtypes=tuple(dtypes), layouts=tuple(layouts))
        except ValueError:
            return None
        return problem, given, results

    def _take_stats(self, anchor: Anchor, group: Group) -> None:
        """Statistics of the result, where the pass is a fprop and an engine computes them."""
        if anchor.problem.direction != "fprop" or anchor.matrix:
            return
        made = self._problem(anchor, group.nodes)
        if made is None:
            return
        problem, _, results = made
        for node in self.users.get(results[0], ()):
            sums = node.op == "genstats" or (
                node.op == "reduction" and node.attrs["mode"] == "add" and node.attrs["keepdims"]
                and node.attrs["axes"] == (0, *range(2, results[0].dim())) and node.result.dtype in ("f32", "f64")
            )  # fmt: skip
            if not sums or node in self.group or group.stats is not None or results[0].dtype not in _FLOATS:
                continue
            together = estimate(problem.with_(stats=True), self.device, self.policy)
            apart = estimate(problem, self.device, self.policy)
            if together is None:
                group.kept.append(f"{node.name} is apart: no engine computes '{problem.fusion} stats'")
            elif apart is not None and apart + tree_seconds(_bytes(results[0]), self.device) < together:
                group.kept.append(f"{node.name} is apart: quicker so")
            else:
                group.stats = node
                self.group[node] = group

    # -- prologues ----------------------------------------------------------------------------------------------------

    def _take_prologue(self, group: Group) -> None:
        anchor = group.anchor
        if anchor is None or anchor.image is None or anchor.image.node is None or anchor.matrix:
            return
        image, maker = anchor.image, anchor.image.node
        if image in self.outputs or maker in self.group or maker.op not in POINTWISE:
            return
        takers = [self.group.get(user) for user in self.users[image]]
        if any(
            taker is None
            or taker.anchor is None
            or taker.anchor.node is not user
            or taker.anchor.image is not image
            or taker.prologue
            for user, taker in zip(self.users[image], takers, strict=True)
        ):
            group.kept.append(f"{image.name} is no prologue: something else reads it, too")
            return
        found = self._before(image)
        if isinstance(found, str):
            group.kept.append(f"{image.name} is no prologue: {found}")
            return
        nodes, source, prologue, _ = found
        total = -tree_seconds(_bytes(source) + _bytes(image), self.device)
        for taker in takers:
            assert taker is not None
            assert taker.anchor is not None
            if taker.anchor.second is image:
                return
            made = self._problem(taker.anchor, taker.nodes)
            assert made is not None
            plain = made[0].with_(stats=taker.stats is not None)
            try:
                fused = plain.with_(prologue=prologue)
            except ValueError as error:
                group.kept.append(f"{image.name} is no prologue: {error}")
                return
            with_it, without = (estimate(each, self.device, self.policy) for each in (fused, plain))
            if with_it is None or without is None:
                group.kept.append(f"{image.name} is no prologue: no engine computes '{fused.fusion}'")
                return
            total += with_it - without
        if total > 0 and self.device.kind != "cpu":
            group.kept.append(f"{image.name} is no prologue: {total * 1e6:.1f} us quicker apart")
            return
        inlined = Group("inlined", nodes, image.shape)
        self._new(inlined)
        for taker in takers:
            assert taker is not None
            taker.prologue = nodes

    def _before(self, image: GraphTensor) -> tuple[list[Node], GraphTensor, Epilogue, list[GraphTensor]] | str:
        """The pointwise nodes that make an image of one other tensor and vectors, and the expression."""
        nodes: list[Node] = []
        sources: dict[GraphTensor, None] = {}
        wanted = [image]
        while wanted:
            value = wanted.pop()
            node = value.node
            alone = value is image or (value not in self.outputs and len(self.users[value]) == 1)
            if (
                node is not None
                and node.op in POINTWISE
                and node not in self.group
                and value.shape == image.shape
                and alone
            ):
                if node not in nodes:
                    nodes.append(node)
                    wanted += node.tensors
            else:
                sources[value] = None
        full = [value for value in sources if value.shape == image.shape]
        if len(full) != 1:
            return f"it is made of {len(full)} tensors of its size; wanted one"
        source = full[0]
        if (source.dtype, source.layout) != (image.dtype, image.layout):
            return f"{source.name} is {source.dtype} {source.layout}, and it {image.dtype} {image.layout}"
        wide = "f64" if source.dtype == "f64" else "f32"
        channel = (1, image.shape[1], *(1,) * (image.dim() - 2))
        for value in sources:
            if value is not source and (value.shape != channel or value.dtype != wide):
                return f"{value.name} is {value.dtype}{list(value.shape)}; wanted {wide}{list(channel)}"
        exprs: dict[GraphTensor, Expr] = {source: Acc()}
        operands: dict[GraphTensor, Operand] = {}

        def operand(value: GraphTensor) -> Expr:
            return operands.setdefault(value, Operand("channel", f"p{len(operands)}"))

        nodes.sort(key=lambda node: self.at[node])
        for node in nodes:
            exprs[node.result] = _expr(node, exprs, operand)
        prologue = Epilogue(exprs[image])
        if not any(isinstance(each, Acc) for each in prologue.expr.walk()):
            return "it is made of vectors alone"
        given = [next(value for value, place in operands.items() if place == each) for each in prologue.operands]
        return nodes, source, prologue, given

    # -- trees --------------------------------------------------------------------------------------------------------

    def _treed(self, node: Node) -> None:
        if node.op in VIEWS:
            self._new(Group("view", [node], node.result.shape))
        elif node.op in POINTWISE:
            self._join(node, node.result.shape, None)
        elif node.op in ("reduction", "genstats"):
            source = node.tensors[0]
            axes = node.attrs["axes"] if node.op == "reduction" else (0, *range(2, source.dim()))
            self._join(node, source.shape, axes)
        else:
            self._new(Group(node.op, [node], node.result.shape))

    def _join(self, node: Node, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> None:
        """Put a node into the tree of an argument, or of another that reads the same; else begin one."""
        found: Group | None = None
        if self.wanted:
            sources = [self.group[arg.node] for arg in node.tensors if arg.node is not None]
            if axes is not None:
                sources += [self.group[user] for user in self.users[node.tensors[0]] if user in self.group]
            for group in dict.fromkeys(sources):
                if group.kind != "tree" or group.shape != shape:
                    continue
                if axes is not None and group.axes not in (None, axes):
                    continue
                if self._reads_reduced(node, group) or self._cycle(node, group.nodes):
                    continue
                if not self._fits([*group.nodes, node]):
                    group.kept.append(f"{node.name} is apart: the kernel would have more than {_MOST_TENSORS} tensors")
                    continue
                if found is None:
                    found = group
                elif self._mergeable(found, group, node):
                    found.nodes = sorted([*found.nodes, *group.nodes], key=lambda each: self.at[each])
                    found.axes = found.axes or group.axes
                    found.kept += group.kept
                    self.groups.remove(group)
                    for each in group.nodes:
                        self.group[each] = found
        if found is None:
            found = self._new(Group("tree", [node], shape))
        else:
            found.nodes.append(node)
            found.nodes.sort(key=lambda each: self.at[each])
            self.group[node] = found
        if axes is not None:
            found.axes = axes

    def _dissolve(self, group: Group) -> None:
        """Have a few cheap operations on vectors computed again at every place of the trees that read them: a kernel
        of their own costs more."""
        if group.axes is not None or len(group.nodes) > _MOST_INLINED or any(n.op not in _CHEAP for n in group.nodes):
            return
        members, readers = set(group.nodes), set()
        for node in group.nodes:
            if node.result in self.outputs:
                return
            readers |= {self.group[user] for user in self.users.get(node.result, ()) if user not in members}
        size = prod(group.shape)
        if any(reader.kind != "tree" or prod(reader.shape) < 16 * size for reader in readers) or not readers:
            return
        if not all(self._fits([*reader.nodes, *group.nodes]) for reader in readers):
            return
        group.kind = "inlined"

    def _reads_reduced(self, node: Node, group: Group) -> bool:
        reduced = {result for each in group.nodes if each.op in ("reduction", "genstats") for result in each.results}
        return any(arg in reduced for arg in node.tensors)

    def _mergeable(self, one: Group, other: Group, node: Node) -> bool:
        if one.axes is not None and other.axes is not None and one.axes != other.axes:
            return False
        both = [*one.nodes, *other.nodes]
        return (
            not any(
                self._cycle(each, both) or self._reads_reduced(each, one) or self._reads_reduced(each, other)
                for each in both
            )
            and not self._cycle(node, both)
            and self._fits([*both, node])
        )

    def _fits(self, nodes: list[Node]) -> bool:
        """Whether a tree of these nodes has few enough tensors and no endless expression."""
        inside = {result for node in nodes for result in node.results}
        read = {arg for node in nodes for arg in node.tensors if arg not in inside}
        members = set(nodes)
        stored = [value for value in inside if self._stored(value, members)]
        sizes: dict[GraphTensor, int] = {}
        for node in sorted(nodes, key=lambda each: self.at[each]):
            sizes[node.result] = 1 + sum(sizes.get(arg, 1) if isinstance(arg, GraphTensor) else 1 for arg in node.args)
        return len(read) + len(stored) <= _MOST_TENSORS and max(sizes.values()) <= _MOST_NODES

    def _stored(self, value: GraphTensor, members: set[Node]) -> bool:
        users = self.users.get(value, ())
        return value in self.outputs or not users or any(user not in members for user in users)

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _kernel(self, group: Group) -> Kernel:
        if group.anchor is not None:
            return self._conv_kernel(group, group.anchor)
        if group.kind == "tree":
            return self._tree_kernel(group)
        node = group.nodes[0]
        kernel = Kernel(
            group.kind, group.nodes, list(dict.fromkeys(node.tensors)), list(node.results), notes=group.kept
        )
        kernel.inputs = node.tensors
        moved = 0 if group.kind == "view" else sum(map(_bytes, [*kernel.inputs, *kernel.results]))
        kernel.seconds = tree_seconds(moved, self.device) if moved else 0.0
        if group.kind == "matmul":
            flops = 2 * node.result.size * node.tensors[0].shape[-1]
            kernel.seconds += flops / (0.7 * self.device.rate(node.result.dtype))
        return kernel

    def _conv_kernel(self, group: Group, anchor: Anchor) -> Kernel:
        made = self._problem(anchor, group.nodes)
        assert made is not None, "a convolution by itself has one result"
        problem, operands, results = made
        vectors: list[GraphTensor] = []
        first, second = anchor.first, anchor.second
        if group.prologue:
            assert anchor.image is not None
            before = self._prologue_of(group, anchor.image)
            source, prologue, vectors = before
            problem = problem.with_(prologue=prologue)
            first = source
        if group.stats is not None:
            problem = problem.with_(stats=True)
            results = [*results, *group.stats.results]
            if len(group.stats.results) == 1:  # a sum alone: the squares have a place, and no reader
                results.append(GraphTensor(self.flow, group.stats.result.meta, ""))
        nodes = [*group.prologue, *group.nodes, *([group.stats] if group.stats else [])]
        kernel = Kernel("conv", nodes, [first, second, *vectors, *operands], results, problem, matrix=anchor.matrix)
        kernel.seconds = estimate(problem, self.device, self.policy) or 0.0
        kernel.notes = list(dict.fromkeys(group.kept))
        return kernel

    def _prologue_of(self, group: Group, image: GraphTensor) -> tuple[GraphTensor, Epilogue, list[GraphTensor]]:
        kept = {node: self.group.pop(node) for node in group.prologue}
        found = self._before(image)
        self.group.update(kept)
        assert not isinstance(found, str)
        return found[1], found[2], found[3]

    def _tree_kernel(self, group: Group) -> Kernel:
        members = set(group.nodes)
        inputs: dict[GraphTensor, int] = {}
        exprs: dict[GraphTensor, Expr] = {}

        def outside(value: GraphTensor) -> Expr:
            node = value.node
            if node is not None and self.group[node].kind == "inlined":
                if value not in exprs:
                    exprs[value] = _expr(node, exprs, outside)
                return exprs[value]
            return leaf(inputs.setdefault(value, len(inputs)))

        results: list[tuple[GraphTensor, Expr]] = []
        reduced: list[tuple[GraphTensor, Reduction]] = []
        for node in group.nodes:
            if node.op in ("reduction", "genstats"):
                source = node.tensors[0]
                expr = exprs[source] if source in exprs else outside(source)
                if node.op == "reduction":
                    reduced.append((node.result, Reduction(node.attrs["mode"], expr, node.result.dtype)))
                else:
                    for result, each in zip(node.results, (expr, apply("mul", expr, expr)), strict=True):
                        reduced.append((result, Reduction("add", each, result.dtype)))
            else:
                exprs[node.result] = _expr(node, exprs, outside)
                if self._stored(node.result, members):
                    results.append((node.result, exprs[node.result]))
        tree = Tree(
            tuple(value.dtype for value in inputs), tuple((expr, value.dtype) for value, expr in results),
            tuple(reduction for _, reduction in reduced),
        )  # fmt: skip
        kernel = Kernel(
            "tree", group.nodes, list(inputs), [value for value, _ in (*results, *reduced)], tree=tree,
            shape=group.shape, axes=group.axes or (), notes=list(dict.fromkeys(group.kept)),
        )  # fmt: skip
        kernel.seconds = tree_seconds(sum(map(_bytes, [*kernel.inputs, *kernel.results])), self.device)
        return kernel


def _expr(node: Node, exprs: dict[GraphTensor, Expr], outside: Callable[[GraphTensor], Expr]) -> Expr:
    """A pointwise node as an expression of what its arguments are."""

    def value(arg: GraphTensor | float) -> Expr:
        if not isinstance(arg, GraphTensor):
            return Const(float(arg))
        return exprs[arg] if arg in exprs else outside(arg)

    args = [value(arg) for arg in node.args]
    if node.op in OPS:
        made: Expr = Applied(node.op, tuple(args), tuple(node.attrs.get("params", ())))
    else:
        made = args[0]
    source = node.args[0]
    if node.op == "cast" and isinstance(source, GraphTensor) and node.result.dtype not in _FLOATS:
        if node.result.dtype == "bool":
            made = apply("cmp_neq", made, 0.0)
        elif source.dtype in _FLOATS:  # towards zero
            made = apply("mul", apply("sign", made), apply("floor", apply("abs", made)))
    return made


def _anchor(node: Node) -> Anchor | None:
    if node.op == "matmul":
        return _matrix_anchor(node)
    first, second = node.tensors[0], node.tensors[1]
    problem: Problem = node.attrs["problem"]
    if node.op == "conv_dgrad":
        return Anchor(node, problem, second, first, None)
    return Anchor(node, problem, first, second, first)


def _matrix_anchor(node: Node) -> Anchor | None:
    """rows x K by K x N as the data gradient of a 1x1 convolution, whose filter is b as it lies: result[row, n] = sum
    over k of a[row, k] * b[k, n]. None for products in batches."""
    a, b = node.tensors
    if b.dim() != 2 or a.dtype not in _FLOATS or a.size == 0 or b.size == 0:
        return None
    rows = prod(a.shape[:-1])
    problem = Problem(
        direction="dgrad", n=1, c=b.shape[1], k=b.shape[0], spatial=(rows, 1), filter=(1, 1), dtypes=(a.dtype,) * 3,
        layouts=("nhwc",) * 3,
    )  # fmt: skip
    return Anchor(node, problem, a, b, None, matrix=True)


def fuse(flow: Flow, device: Device, policy: Policy, wanted: bool = True) -> list[Kernel]:
    """The kernels of a flow in order; one for each node unless fusion is ``wanted``."""
    return _Fuser(flow, device, policy, wanted).run()
