"""explain of a graph: which kernels its nodes became, why not fewer, and what that saves; as text and as a picture.

    >>> print(graph.explain())
    >>> graph.explain("cuda").save("graph.svg")

Nothing is compiled: the answer goes by the kernels of the program, predictions and the choice of engines, so that a GPU
which is not here can be asked about, too. In the picture a kernel is a coloured box around its nodes; a thick line is a
tensor in memory, a thin one a value that never leaves its kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import torch

from ..device import Device
from ..engine import UnsupportedProblem
from ..files import write_atomic
from ..plan import lower, steps_of
from ..select import Candidate, Policy, choose, current_policy
from ..units import bytes_text, percent_text, ratio_text, seconds_text
from .compiled import placed
from .compiler import chosen, tree_engine, tree_strides
from .compute import engine_of, view_of
from .drawing import cut, draw
from .fusion import Kernel, dtype_bytes, fuse, tree_seconds
from .ir import GraphTensor, Node, dense_strides
from .program import Program, program_for
from .rewrites import REWRITES

if TYPE_CHECKING:
    from .builder import Graph

__all__ = ["GraphExplanation", "KernelReport", "NodeReport", "TensorReport", "explain_graph"]

_WIDTH = 118
"""Columns of the text."""
_CHAIN, _PROBLEM = 52, 400
"""Letters of a kernel's operations in the table, and of its expression: the JSON has all of it."""


@dataclass(frozen=True)
class TensorReport:
    """A tensor that lies in memory, or would."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str
    bytes: int

    @property
    def form(self) -> str:
        """``f16[8, 64, 56, 56]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        last = " nhwc" if self.layout == "nhwc" and len(self.shape) > 2 else ""
        return f"{self.name}: {self.form}{last}"


@dataclass(frozen=True)
class NodeReport:
    """A node: its arguments are names of tensors, and numbers. ``stored`` says for each result whether it is written to
    memory."""

    op: str
    name: str
    args: tuple[str | float, ...]
    details: str
    results: tuple[TensorReport, ...]
    stored: tuple[bool, ...]

    @property
    def call(self) -> str:
        """``conv_fprop(x, w, 3x3, stride=2)``."""
        args = [arg if isinstance(arg, str) else f"{arg:g}" for arg in self.args]
        return f"{self.op}({', '.join([*args, *self.details.split()])})"


@dataclass(frozen=True)
class KernelReport:
    """A step: ``number`` is that of :meth:`Graph.plans`, None for a view, which costs nothing.

    ``text`` is the problem or the tree; ``moved`` counts each tensor that is read or written once; ``steps`` are what
    the engine's call does, ``notes`` why no more nodes are in it, ``refusal`` why no kernel of a tree runs on the CPU.
    """

    number: int | None
    kind: str
    computes: str
    engine: str
    knobs: str
    text: str
    nodes: tuple[NodeReport, ...]
    inputs: tuple[TensorReport, ...]
    results: tuple[TensorReport, ...]
    moved: int
    seconds: float
    workspace: int
    steps: tuple[str, ...]
    notes: tuple[str, ...]
    refusal: str = ""


@dataclass(frozen=True)
class GraphExplanation:
    """What a graph runs as, and why. ``print`` it, :meth:`save` it, or show it in a notebook.

    ``unfused_*`` are of the same nodes, after rewrites, with a kernel for each. ``rewrites`` has a sentence for each
    change, ``switched_off`` the names of those that the graph may not use.
    """

    name: str
    device: Device
    policy: Policy
    nodes: int
    kernels: tuple[KernelReport, ...]
    inputs: tuple[TensorReport, ...]
    constants: tuple[TensorReport, ...]
    outputs: tuple[TensorReport, ...]
    moved: int
    seconds: float
    unfused_kernels: int
    unfused_moved: int
    unfused_seconds: float
    workspace: int
    fused: bool
    rewrites: tuple[str, ...]
    switched_off: tuple[str, ...]
    copies: tuple[str, ...]

    @property
    def launched(self) -> tuple[KernelReport, ...]:
        """The kernels without views."""
        return tuple(kernel for kernel in self.kernels if kernel.number is not None)

    @property
    def summary(self) -> str:
        """Nodes and kernels, bytes and time, with and without fusion, and the device."""
        count = len(self.launched)
        head = f"{_count(self.nodes, 'node')} -> {_count(count, 'kernel')} on {self.device.kind} {self.device.name}"
        moved, took = f"{bytes_text(self.moved)} moved", f"{seconds_text(self.seconds)} predicted"
        if not self.fused:
            return f"{head}; fusion is off; {moved}; {took}"
        share = percent_text(1 - self.moved / self.unfused_moved) if self.unfused_moved else "0 %"
        gain = ratio_text(self.unfused_seconds / self.seconds) if self.seconds else "1.00x"
        before = bytes_text(self.unfused_moved), seconds_text(self.unfused_seconds)
        return (
            f"{head} ({self.unfused_kernels} unfused); {moved} ({before[0]} unfused, {share} saved); "
            f"{took} ({before[1]} unfused, {gain})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, for JSON."""
        return {**asdict(self), "summary": self.summary}

    def picture(self) -> str:
        """The nodes in order, one a line, those of a kernel in a bracket."""
        return "\n".join(_picture(self))

    def svg(self) -> str:
        """The graph as a drawing."""
        return draw(self)

    def save(self, path: str | Path) -> Path:
        """Write a file that is whole or not there: the drawing to .svg, the text to .txt, :meth:`to_dict` to .json."""
        place = Path(path)
        makers: dict[str, Callable[[], str]] = {
            ".svg": self.svg, ".txt": lambda: f"{self}\n", ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
        }  # fmt: skip
        maker = makers.get(place.suffix.lower())
        if maker is None:
            raise ValueError(f"file {str(place)!r} ends in {place.suffix!r}; wanted {', '.join(makers)}")
        return write_atomic(place, maker())

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in _lines(self))

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x:auto">{self.svg()}</div><pre>{escape(str(self))}</pre>'


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


# -- the answer -------------------------------------------------------------------------------------------------------


def explain_graph(graph: Graph, device: torch.device) -> GraphExplanation:
    """What a graph runs as on a device, for the sizes that it was built with."""
    if not graph.outputs:
        raise RuntimeError(f"graph {graph.name!r} has no nodes; wanted one at least")
    if graph._closed:
        program = program_for(graph, device)
    else:  # the graph may grow, so nothing that calls would use is made of it as it is now
        program = Program(graph, graph.flow.copy()[0], device, (graph.policy or Policy()).over(current_policy()))
    found = _Reader(program, program.kernels, program.choices)
    apart = _Reader(program, fuse(program.flow, program.device, program.policy, False), {}) if program.fused else found
    reports = found.reports()
    real = [report for report in reports if report.number is not None]
    return GraphExplanation(
        name=graph.name, device=program.device, policy=program.policy, nodes=len(graph.nodes), kernels=tuple(reports),
        inputs=tuple(_tensor(tensor) for tensor in program.inputs if tensor is not None),
        constants=tuple(_tensor(tensor) for tensor in found.constants()),
        outputs=tuple(_tensor(tensor) for tensor in program.flow.outputs),
        moved=sum(report.moved for report in real), seconds=sum(report.seconds for report in real),
        unfused_kernels=sum(not apart.views[kernel] for kernel in apart.kernels),
        unfused_moved=sum(map(apart.moved, apart.kernels)), unfused_seconds=sum(map(apart.seconds, apart.kernels)),
        workspace=found.workspace(reports), fused=program.fused, rewrites=tuple(program.notes),
        switched_off=tuple(name for name in REWRITES if name not in graph.rewrites), copies=tuple(found.copies()),
    )  # fmt: skip


def _tensor(tensor: GraphTensor) -> TensorReport:
    size = tensor.size * dtype_bytes(tensor.dtype)
    return TensorReport(tensor.name, tensor.dtype, tensor.shape, tensor.layout, size)


class _Reader:
    """What there is to know of kernels before they are compiled. ``views[kernel]`` tells views, of which some turn out
    to be copies."""

    def __init__(self, program: Program, kernels: Sequence[Kernel], choices: dict[int, tuple[str, str]]) -> None:
        self.program, self.kernels, self.choices, self.flow = program, list(kernels), choices, program.flow
        self.strides = {tensor: tensor.strides for tensor in (*self.flow.declared, *self.flow.constants)}
        self.place = {node: at for at, node in enumerate(self.flow.nodes)}
        self.origin: dict[GraphTensor, GraphTensor] = {}
        self.views: dict[Kernel, bool] = {}
        for kernel in self.kernels:
            self.views[kernel] = kernel.kind == "view" and self._viewed(kernel.nodes[0])
            for result in kernel.results:
                self.strides.setdefault(result, dense_strides(result.shape, result.layout))

    def _viewed(self, node: Node) -> bool:
        source = node.tensors[0]
        there = torch.empty_strided(source.shape, self.strides[source], device="meta")
        seen = view_of(node, there)
        if not seen._is_view() and seen is not there:
            return False
        self.strides[node.result] = tuple(seen.stride())
        self.origin[node.result] = self.origin.get(source, source)
        return True

    def constants(self) -> list[GraphTensor]:
        """Those that a kernel reads."""
        read = {tensor for kernel in self.kernels for tensor in kernel.inputs}
        return [tensor for tensor in self.flow.constants if tensor in read or tensor in self.flow.outputs]

    def copies(self) -> Iterator[str]:
        """Outputs that a call has to copy, since they would be the caller's own tensors or the same memory twice."""
        seen: set[GraphTensor] = set()
        for tensor in self.flow.outputs:
            origin = self.origin.get(tensor, tensor)
            if origin.node is None:
                what = "an input" if origin.value is None else "a constant"
                yield f"{tensor.name} is copied: it is {what}" + (f", {origin.name}" if origin is not tensor else "")
            elif origin in seen:
                yield f"{tensor.name} is copied: it is another output's memory"
            seen.add(origin)

    def nodes(self, kernel: Kernel) -> list[Node]:
        """Its nodes, and those that it computes on the way without having them to itself."""
        inside, read, found = set(kernel.nodes), set(kernel.inputs), list(kernel.nodes)
        wanted = list(kernel.nodes)
        while wanted:
            for arg in wanted.pop().tensors:
                if arg not in read and arg.node is not None and arg.node not in inside:
                    inside.add(arg.node)
                    found.append(arg.node)
                    wanted.append(arg.node)
        return sorted(found, key=self.place.__getitem__) if len(found) > len(kernel.nodes) else kernel.nodes

    def moved(self, kernel: Kernel) -> int:
        """Bytes read and written, each tensor once."""
        if self.views[kernel]:
            return 0
        return sum(t.size * dtype_bytes(t.dtype) for t in dict.fromkeys([*kernel.inputs, *kernel.results]))

    def seconds(self, kernel: Kernel) -> float:
        """Predicted; a view that is a copy is not counted by the fusion."""
        copied = kernel.kind == "view" and not self.views[kernel]
        return tree_seconds(self.moved(kernel), self.program.device) if copied else kernel.seconds

    def reports(self) -> list[KernelReport]:
        read = {tensor: kernel for kernel in self.kernels for tensor in kernel.inputs} | dict.fromkeys(
            self.flow.outputs
        )
        made, number = [], 0
        for at, kernel in enumerate(self.kernels):
            view = self.views[kernel]
            stored = {result for result in kernel.results if result in read or not self._used(result)}
            made.append(self._report(kernel, None if view else number, self.choices.get(at), stored))
            number += not view
        return made

    def _used(self, tensor: GraphTensor) -> bool:
        return any(arg is tensor for node in self.flow.nodes for arg in node.tensors)

    def _report(
        self, kernel: Kernel, number: int | None, choice: tuple[str, str] | None, stored: set[GraphTensor]
    ) -> KernelReport:
        engine, knobs, workspace, notes = self._engine(kernel), "", 0, list(kernel.notes)
        steps: tuple[str, ...] = ()
        refusal = ""
        seconds, nodes = self.seconds(kernel), self.nodes(kernel)
        if kernel.problem is not None and not kernel.problem.is_empty:
            candidate = self._candidate(kernel, choice)
            if isinstance(candidate, Candidate):
                engine, knobs, workspace = candidate.engine.name, str(candidate.knobs), candidate.workspace
                steps = steps_of(kernel.problem, self.program.device, candidate, self.program.policy)
                seconds = candidate.expected
            else:
                notes.append(f"no engine takes it: {candidate}")
        elif kernel.tree is not None:
            workspace = self._tree_workspace(kernel, engine)
            refusal = tree_engine(kernel, self.strides, self.program.device)[1] or ""
        return KernelReport(
            number=number, kind=_kind(kernel, self.views[kernel]), computes=" + ".join(node.op for node in nodes),
            engine=engine, knobs="" if knobs == "-" else knobs, text=_text(kernel),
            nodes=tuple(_node(node, stored) for node in nodes), inputs=tuple(map(_tensor, kernel.inputs)),
            results=tuple(map(_tensor, kernel.results)), moved=self.moved(kernel), seconds=seconds, workspace=workspace,
            steps=steps, notes=tuple(notes), refusal=refusal,
        )  # fmt: skip

    def _engine(self, kernel: Kernel) -> str:
        if self.views[kernel]:
            return "view"
        if kernel.problem is not None:
            return "zeros" if kernel.problem.is_empty else "none"
        if kernel.tree is not None:
            return tree_engine(kernel, self.strides, self.program.device)[0]
        return engine_of(kernel.nodes[0], self.program.device.kind)

    def _candidate(self, kernel: Kernel, choice: tuple[str, str] | None) -> Candidate | str:
        """What runs a convolution, or why nothing does."""
        assert kernel.problem is not None
        device, policy = self.program.device, self.program.policy
        if choice is not None:
            return chosen(kernel.problem, choice, device, policy)
        try:
            return choose(lower(kernel.problem, device, policy), device, policy)
        except UnsupportedProblem as error:
            return " ".join(str(error).split())

    def _tree_workspace(self, kernel: Kernel, engine: str) -> int:
        assert kernel.tree is not None
        read, written = tree_strides(kernel, self.strides)
        if engine == "cuda.tree":
            from ..cuda.tree import _Work as _CudaWork

            return _CudaWork(kernel.tree, kernel.shape, read, written, kernel.axes, True).workspace_bytes
        if engine == "cpu.tree":
            from ..cpu.tree import workspace_bytes

            return workspace_bytes(
                kernel.tree, kernel.shape, read, written, kernel.axes, self.program.device.threads
            )  # fmt: skip
        return 0

    def workspace(self, reports: Sequence[KernelReport]) -> int:
        """Bytes of tensors between kernels and of the engines' scratch memory, where those whose lives do not meet
        share a place: what :meth:`Graph.workspace_bytes` says when all is compiled."""
        if self.program._compiled is not None:
            return self.program.workspace_bytes
        kept = {self.origin.get(tensor, tensor) for tensor in self.flow.outputs}
        lives: dict[int, tuple[int, int, int]] = {}
        slots: dict[GraphTensor, int] = {}
        for at, (kernel, report) in enumerate(zip(self.kernels, reports, strict=True)):
            for tensor in kernel.inputs:
                slot = slots.get(self.origin.get(tensor, tensor))
                if slot is not None:
                    lives[slot] = lives[slot][0], at, lives[slot][2]
            for tensor in () if self.views[kernel] else kernel.results:
                if tensor not in kept:
                    slots[tensor] = len(lives)
                    lives[len(lives)] = at, at, tensor.size * dtype_bytes(tensor.dtype)
            alone = len(report.steps) == 1 or kernel.tree is not None
            if report.workspace and alone:  # beside other steps torch allocates it
                lives[len(lives)] = at, at, report.workspace
        return placed(lives)[1]


def _kind(kernel: Kernel, view: bool) -> str:
    return "copy" if kernel.kind == "view" and not view else "matmul" if kernel.matrix else kernel.kind


def _text(kernel: Kernel) -> str:
    """The problem or the tree; of others the operation with what it was told."""
    if kernel.problem is not None:
        return str(kernel.problem)
    if kernel.tree is not None:
        over = f", reduced over axes {', '.join(map(str, kernel.axes))}" if kernel.tree.reductions else ""
        return f"{kernel.tree} at {'x'.join(map(str, kernel.shape)) or 'one place'}{over}"
    node = kernel.nodes[0]
    forms = ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in node.tensors)
    return f"{node.op}({forms}) {_details(node)}".rstrip()


def _node(node: Node, stored: set[GraphTensor]) -> NodeReport:
    args = tuple(arg.name if isinstance(arg, GraphTensor) else float(arg) for arg in node.args)
    kept = tuple(result in stored for result in node.results)
    return NodeReport(node.op, node.name, args, _details(node), tuple(map(_tensor, node.results)), kept)


_UNTOLD = ("problem", "matmul", "dtype", "shape", "groups", "output_size", "filter_size")
"""Attributes that the result or the text of the kernel show."""


def _details(node: Node) -> str:
    """What an operation was told beside its arguments: ``3x3 stride=2 padding=1``."""
    found = []
    problem = node.attrs.get("problem")
    if problem is not None:
        found = ["x".join(map(str, problem.filter))]
        found += [f"groups={problem.groups}"] * (problem.groups != 1)
    for name, value in node.attrs.items():
        plain = problem is not None and value == {"stride": 1, "dilation": 1, "padding": 0}.get(name)
        if name in _UNTOLD or value is None or plain:
            continue
        if name == "params":
            found += [f"{each:g}" for each in value]
            continue
        text = str(value).replace(" ", "") if isinstance(value, tuple | list) else str(value)
        found.append(text if name == "mode" else f"{name}={text}")
    return " ".join(found)


# -- as text ----------------------------------------------------------------------------------------------------------


def _lines(told: GraphExplanation) -> Iterator[str]:
    yield f"graph {told.name!r}: {told.summary}"
    if str(told.policy):
        yield from _folded("  limits: ", str(told.policy).replace(";", ", "))
    for title, tensors in (("inputs", told.inputs), ("constants", told.constants), ("outputs", told.outputs)):
        if tensors:
            yield from ("", title)
            yield from (f"  {tensor}, {bytes_text(tensor.bytes)}" for tensor in tensors)
    yield from ("", "rewrites")
    for sentence in told.rewrites or ("nothing to rewrite",):
        yield from _folded("  ", sentence)
    for name in told.switched_off:
        yield from _folded("  off: ", f"{name}: {REWRITES[name]}")
    yield from ("", "kernels")
    yield from _table(told)
    scratch = f"workspace {bytes_text(told.workspace)}" if told.workspace else "no workspace"
    yield from ("", f"  in all {bytes_text(told.moved)} moved, {seconds_text(told.seconds)} predicted, {scratch}")
    for sentence in told.copies:
        yield from _folded("  ", sentence)
    yield from ("", "graph    ● stored in memory  ○ stays in its kernel  · a view")
    yield from _picture(told)


def _folded(lead: str, text: str) -> Iterator[str]:
    """Lines of no more than the width, the later ones indented like the first."""
    yield from wrap(text, _WIDTH, initial_indent=lead, subsequent_indent=" " * (len(lead) + 2)) or [lead]


def _table(told: GraphExplanation) -> Iterator[str]:
    """A row for each kernel; under it its problem, its engine's knobs, the steps and why it does not hold more."""
    rows = [("#", "computes", "engine", "bytes", "predicted", "workspace")]
    for kernel in told.launched:
        room = bytes_text(kernel.workspace) if kernel.workspace else "none"
        cost = bytes_text(kernel.moved), seconds_text(kernel.seconds), room
        rows.append((str(kernel.number), cut(kernel.computes, _CHAIN), kernel.engine, *cost))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lead = " " * (widths[0] + 4)
    for at, (number, *names, moved, predicted, room) in enumerate(rows):
        cells = [number.rjust(widths[0]), *(name.ljust(w) for name, w in zip(names, widths[1:], strict=False))]
        cells += [text.rjust(w) for text, w in zip((moved, predicted, room), widths[3:], strict=True)]
        yield "  " + "  ".join(cells)
        if at:
            yield from _under(told.launched[at - 1], lead)
        else:
            yield "  " + "─" * (sum(widths) + 10)
    views = len(told.kernels) - len(told.launched)
    if views:
        yield f"{lead}and {_count(views, 'view')} without a kernel"


def _under(kernel: KernelReport, lead: str) -> Iterator[str]:
    if len(kernel.computes) > _CHAIN:
        yield from _folded(f"{lead}all of it: ", kernel.computes)
    yield from _folded(lead, cut(kernel.text, _PROBLEM))
    if kernel.knobs:
        yield from _folded(f"{lead}knobs ", f"[{kernel.knobs}]")
    for step in kernel.steps if len(kernel.steps) > 1 else ():
        yield from _folded(f"{lead}step: ", step)
    for note in kernel.notes:
        yield from _folded(f"{lead}why not more: ", note)
    if kernel.refusal:
        yield from _folded(f"{lead}why torch: ", kernel.refusal)


def _picture(told: GraphExplanation) -> Iterator[str]:
    """``┌│└`` around the nodes of each kernel; a view stands by itself."""
    calls = {id(node): f"{node.name} = {node.call}" for kernel in told.kernels for node in kernel.nodes}
    column = min(64, max(map(len, calls.values()), default=0))
    for kernel in told.kernels:
        view = kernel.number is None
        if not view:
            cost = f"{seconds_text(kernel.seconds)}, {bytes_text(kernel.moved)}"
            yield f"  ┌ kernel {kernel.number}: {kernel.engine}, {cost}"
        for at, node in enumerate(kernel.nodes):
            forms = ", ".join(result.form for result in node.results)
            mark = "·" if view else "●" if any(node.stored) else "○"
            edge = " " if view else "└" if at == len(kernel.nodes) - 1 else "│"
            yield f"  {edge} {mark} {calls[id(node)].ljust(column)}  {forms}"
