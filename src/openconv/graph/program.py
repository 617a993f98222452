"""Program: a graph for one device and one set of sizes, compiled: steps that run on a list of tensors.

A tensor of the flow has a slot in that list. A step reads slots and fills others, for which it allocates a tensor
unless one is there: outputs that the caller gave, or pieces of the caller's workspace. A slot is emptied behind its
last use, so that torch's allocator can hand the memory on. Steps that are one kernel each run on addresses instead
(:mod:`.addresses`), unless a tensor of the caller's starts where a kernel does not take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cpu.memory import LARGE, large_tensor
from ..cuda.device import CudaDevice
from ..device import Device
from ..evaluate import evaluate_tree
from ..plan import Plan, device_of, lower, make_plan, plan_for
from ..problem import Problem
from ..select import Candidate, Policy, current_policy, search
from ..tensors import ALL_DTYPES, guards
from .addresses import Addressed, Direct, Memory, View
from .compute import compute, view_of
from .fusion import Kernel, dtype_bytes, fuse
from .ir import Flow, GraphTensor, Meta, dense_strides, layout_of_strides
from .operations import VIEWS
from .rewrites import rewrite

if TYPE_CHECKING:
    from .builder import Graph

__all__ = ["GraphPlan", "Program", "Step", "program_for", "signature"]

_ALIGNED = 256
_MOST_PLANS = 64
_allocate = getattr(guards, "_empty_strided_cuda", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
Values = list[Any]


@dataclass(frozen=True)
class GraphPlan:
    """One way to run a graph: the engine and knobs of each kernel, what it is predicted to take, and the workspace."""

    index: int
    engines: list[str]
    knobs: list[dict[str, Any]]
    seconds: float
    workspace_bytes: int
    text: str
    measured: float | None = None
    choices: tuple[tuple[int, str, str], ...] = ()
    fused: bool = True


@dataclass(eq=False)
class Step:
    """A kernel and how it is run: ``run(values)``. ``plan`` is that of a convolution; ``workspace`` the slot of its
    scratch memory, of so many bytes; ``direct`` the same on addresses, where they are all that it needs."""

    kernel: Kernel
    run: Callable[[Values], None]
    engine: str
    plan: Plan | None = None
    workspace: int | None = None
    workspace_bytes: int = 0
    drop: tuple[int, ...] = ()
    reads: list[GraphTensor] = field(default_factory=list)
    """What it is given: the kernel's inputs, or what these are views of."""
    direct: Direct | None = None
    takes: tuple[int, ...] = ()
    fills: tuple[int, ...] = ()
    """The slots of what it reads and of its results."""


def signature(values: Sequence[Tensor]) -> tuple[Any, ...]:
    """What a program depends on, and what it does not take: kernels would not see that a lazy view is one."""
    return tuple([(v.shape, v.stride(), v.dtype, v.device, v.is_neg() or v.is_conj()) for v in values])


def program_for(graph: Graph, device: torch.device, values: Sequence[Tensor] | None = None) -> Program:
    """The program of a graph: for these tensors, in the order of its inputs, or for the sizes it was built with."""
    metas: dict[str, tuple[Meta, tuple[int, ...]]] | None = None
    if values is not None:
        from .builder import _meta_of

        metas = {t.name: (_meta_of(v), tuple(v.stride())) for t, v in zip(graph.inputs, values, strict=True)}
    limits = (graph.policy or Policy()).over(current_policy())
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    shown = tuple((t.shape, t.strides, t.dtype) for t in graph.inputs) if metas is None else tuple(
        (m.shape, s, m.dtype) for m, s in metas.values())  # fmt: skip
    key = (device, shown, limits, torch.get_num_threads() if device.type == "cpu" else 0)
    found = graph._programs.get(key)
    if found is None:
        with graph._lock:
            found = graph._programs.get(key)
            if found is None:
                flow = graph.flow.copy(metas=metas)[0] if metas is not None else graph.flow
                found = graph._programs[key] = Program(graph, flow, device, limits)
    return found


class Program:
    """``run(inputs, outputs, workspace)``. ``kernels`` are in order; ``notes`` say what was rewritten."""

    def __init__(self, graph: Graph, flow: Flow, place: torch.device, policy: Policy) -> None:
        self.graph, self.place, self.policy = graph, place, policy
        self.device = device_of(place)
        self.source = flow
        if policy.precision and policy.precision != "ieee":
            flow = _with_precision(flow, policy.precision)
        self.flow, self.notes = rewrite(flow, graph.rewrites)
        self.inputs = [self.flow.named(t.name) for t in graph.inputs]
        self.outputs = list(self.flow.outputs)
        self._alternatives: list[GraphPlan] | None = None
        saved = graph._chosen.get(self.key)
        fused = graph.fuse if saved is None else saved["fused"]
        self.kernels = fuse(self.flow, self.device, policy, fused)
        self.fused = fused
        self.choices: dict[int, tuple[str, str]] = {}
        if saved is not None and len(saved["kernels"]) == len(self.kernels):
            self.choices = {at: tuple(each) for at, each in enumerate(saved["kernels"]) if each}
        self._compiled: list[Step] | None = None

    @property
    def key(self) -> str:
        """Under which its choices are kept: the device and the sizes."""
        sizes = " ".join(f"{t.name}:{t.dtype}{list(t.shape)}" for t in self.source.inputs)
        return f"{self.device.key} | {sizes}"

    # -- compiling --------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Step]:
        """The steps, compiled when they are first asked for."""
        if self._compiled is None:
            with self.graph._lock:
                if self._compiled is None:
                    self._compile()
        assert self._compiled is not None
        return self._compiled

    def _compile(self) -> None:
        self._slots: dict[GraphTensor, int] = {}
        self._strides: dict[GraphTensor, tuple[int, ...]] = {}
        self._constants: list[tuple[int, Tensor]] = []
        self._is_view: dict[Any, bool] = {}
        self._makers: dict[int, _Maker] = {}
        self._views: dict[int, tuple[int, int]] = {}
        self._viewed: set[int] = set()
        for tensor in self.inputs:
            assert tensor is not None
            self._slot(tensor, tensor.strides)
        for tensor in self.flow.constants:
            self._hold(tensor)
        steps: list[Step] = []
        for at, kernel in enumerate(self.kernels):
            steps += self._steps_of(kernel, self.choices.get(at))
        for at, tensor in enumerate(self.outputs):
            steps += self._apart(tensor, at)
        self._finish(self._wanted(steps))

    def _wanted(self, steps: list[Step]) -> list[Step]:
        """Without views that nothing reads."""
        for step in steps:
            step.reads = step.reads or step.kernel.inputs
        read = {tensor for step in steps for tensor in step.reads if step.engine != "view"} | set(self.outputs)
        kept = []
        for step in reversed(steps):
            if step.engine != "view" or step.kernel.results[0] in read:
                read |= set(step.reads)
                kept.append(step)
        return kept[::-1]

    def _slot(self, tensor: GraphTensor, strides: tuple[int, ...]) -> int:
        self._strides[tensor] = strides
        return self._slots.setdefault(tensor, len(self._slots))

    def _new(self) -> int:
        """A slot for something that is no tensor of the flow."""
        made = GraphTensor(self.flow, Meta((), "u8"), "")
        return self._slot(made, ())

    def _hold(self, tensor: GraphTensor) -> int:
        """A constant on the device. A filter is laid out once as convolutions want it."""
        assert tensor.value is not None
        value = tensor.value.to(self.place)
        users = [
            k.problem for k in self.kernels if k.problem is not None and len(k.inputs) > 1 and k.inputs[1] is tensor
        ]
        if (
            users
            and value.dim() > 3
            and self.device.kind == "cuda"
            and all(p.layouts[p.result] == "nhwc" for p in users)
        ):
            value = value.contiguous(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)
        slot = self._slot(tensor, tuple(value.stride()))
        self._constants.append((slot, value))
        return slot

    def _maker(self, tensor: GraphTensor) -> _Maker:
        """What allocates a result."""
        made = _Maker(tensor.shape, dense_strides(tensor.shape, tensor.layout), ALL_DTYPES[tensor.dtype], self.place)
        self._makers[self._slot(tensor, made.strides)] = made
        return made

    def _scratch(self, size: int) -> tuple[int | None, Callable[[], Tensor] | None]:
        if not size:
            return None, None
        place = self.place
        return self._new(), lambda: torch.empty(size, dtype=torch.uint8, device=place)

    def _steps_of(self, kernel: Kernel, choice: tuple[str, str] | None) -> list[Step]:
        if kernel.kind == "conv":
            return self._conv_steps(kernel, choice)
        if kernel.kind == "tree":
            return [self._tree_step(kernel)]
        if kernel.kind == "view":
            return [self._view_step(kernel)]
        return [self._torch_step(kernel)]

    def _dense(self, tensor: GraphTensor, layout: str) -> bool:
        found = layout_of_strides(tensor.shape, self._strides[tensor])
        return found == layout or self._strides[tensor] == dense_strides(tensor.shape, layout) or (
            found is not None and _one_axis(tensor.shape))  # fmt: skip

    # -- convolutions -------------------------------------------------------------------------------------------------

    def _conv_steps(self, kernel: Kernel, choice: tuple[str, str] | None) -> list[Step]:
        problem = kernel.problem
        assert problem is not None
        candidate = self._candidate(problem, choice)
        if candidate is None:
            plan = plan_for(problem, self.device, self.policy)
        else:
            plan = make_plan(problem, self.device, self.policy, candidate)
        reads = self._read(kernel, problem)
        prepare = self._prepared(kernel, problem, reads)
        slots = [self._slots[tensor] for tensor in reads]
        for at, (tensor, form) in enumerate(zip(reads, prepare, strict=True)):
            if form is not None and tensor.value is not None:  # a constant is brought into its form once
                slots[at], prepare[at] = self._held(form(tensor.value.to(self.place))), None
        makers = [self._maker(tensor) for tensor in kernel.results]
        outs = [self._slots[tensor] for tensor in kernel.results]
        size = plan.candidate.workspace if plan.candidate else 0
        engine = plan.candidate.engine.name if plan.candidate else "zeros"
        if plan.into is None:
            return [Step(kernel, _calling(plan, kernel, prepare, slots, outs, makers), engine, plan, reads=reads)]
        workspace, scratch = self._scratch(size)
        run = _filling(plan.into, kernel, prepare, slots, outs, makers, workspace, scratch)
        direct = None
        if plan.direct is not None and all(form is None or isinstance(form, View) for form in prepare):
            first, second, *rest = slots
            direct = Direct(plan.direct.launch, (first, second, *outs, *rest), plan.direct.alignment)
        return [Step(kernel, run, engine, plan, workspace, size, reads=reads, direct=direct)]

    def _read(self, kernel: Kernel, problem: Problem) -> list[GraphTensor]:
        """The inputs of a convolution; a vector that was reshaped, as it was before."""
        kinds = ["", "", *("channel" for _ in problem.prologue.operands), *(o.kind for o in problem.epilogue.operands)]
        starts = [self._started(tensor) for tensor in kernel.inputs]
        return [
            start if kind == "channel" and start.shape == (tensor.size,) else tensor
            for tensor, start, kind in zip(kernel.inputs, starts, kinds, strict=True)
        ]

    def _held(self, value: Tensor) -> int:
        """A slot of its own for a value that is always there."""
        slot = self._new()
        self._constants.append((slot, value))
        return slot

    def _candidate(self, problem: Problem, choice: tuple[str, str] | None) -> Candidate | None:
        if choice is None:
            return None
        core = lower(problem, self.device, self.policy)
        for candidate in search(core, self.device, self.policy):
            if (candidate.engine.name, str(candidate.knobs)) == choice:
                return candidate
        raise RuntimeError(f"'{problem}': no engine {choice[0]} has the knobs {choice[1]} on {self.device.name}")

    def _prepared(
        self, kernel: Kernel, problem: Problem, reads: Sequence[GraphTensor]
    ) -> list[Callable[[Tensor], Tensor] | None]:
        """What brings each input into the form that the problem says, None where it has it."""
        first, second = problem.inputs
        vectors = len(problem.prologue.operands)
        wide = torch.float64 if problem.dtypes[0] == "f64" else torch.float32
        forms: list[tuple[str, torch.dtype | None]] = [(problem.layouts[first], None), (problem.layouts[second], None)]
        forms += [("nchw", wide)] * vectors
        result, dtype = problem.layouts[problem.result], ALL_DTYPES[problem.result_dtype]
        for operand in problem.epilogue.operands:
            forms.append((result if operand.kind == "tensor" and not kernel.matrix else "nchw", dtype))
        flat = [False, False, *(True for _ in range(vectors)), *(o.kind != "tensor" for o in problem.epilogue.operands)]
        return [
            self._form(tensor, layout, wanted, _flat_view(tensor) if one else _matrix_view(kernel, at))
            for at, (tensor, (layout, wanted), one) in enumerate(zip(reads, forms, flat, strict=True))
        ]

    def _form(
        self, tensor: GraphTensor, layout: str, dtype: torch.dtype | None, view: View | None
    ) -> Callable[[Tensor], Tensor] | None:
        layout = "nchw" if view is not None else layout
        dense = self._dense(tensor, layout)
        cast = dtype is not None and ALL_DTYPES[tensor.dtype] is not dtype
        if dense and not cast:
            return view
        form = _memory_format(tensor.dim(), layout)

        def bring(value: Tensor) -> Tensor:
            value = value.to(dtype) if cast else value
            value = value.contiguous(memory_format=form)
            return view(value) if view is not None else value

        return bring

    # -- trees --------------------------------------------------------------------------------------------------------

    def _tree_step(self, kernel: Kernel) -> Step:
        tree = kernel.tree
        assert tree is not None
        makers = [self._maker(tensor) for tensor in kernel.results]
        outs = [self._slots[tensor] for tensor in kernel.results]
        ins = [self._slots[tensor] for tensor in kernel.inputs]
        engine, _ = tree_engine(kernel, self._strides, self.device)
        if engine == "cpu.tree":
            return self._cpu_tree_step(kernel, makers)
        if engine == "torch":
            results, axes, shape = kernel.results, kernel.axes, kernel.shape

            def with_torch(values: Values) -> None:
                given = [values[slot] for slot in ins]
                made, reduced = evaluate_tree(tree, given, axes, shape)
                for slot, value, tensor, make in zip(outs, (*made, *reduced), results, makers, strict=True):
                    _put(values, slot, value.reshape(tensor.shape), make, given)
                    given.append(values[slot])

            return Step(kernel, with_torch, "torch")
        from ..cuda.tree import TreeKernel

        assert isinstance(self.device, CudaDevice)
        count = len(tree.results)
        strides, places = tree_strides(kernel, self._strides)
        made = TreeKernel(tree, self.device, kernel.shape, strides, places, kernel.axes)
        # A kernel knows an input by its address and strides: a view that starts where its origin does is not made.
        reads = [self._started(tensor) for tensor in kernel.inputs]
        ins = [self._slots[tensor] for tensor in reads]
        slow: list[TreeKernel] = []
        device, lock = self.device, self.graph._lock
        size = made.workspace_bytes
        workspace, scratch = self._scratch(size)

        def run(values: Values) -> None:
            for slot, make in zip(outs, makers, strict=True):
                if values[slot] is None:
                    values[slot] = make()
            given = [values[slot].data_ptr() for slot in ins]
            filled = [values[slot].data_ptr() for slot in outs]
            kernel_, room = made, 0
            if workspace is not None:
                if values[workspace] is None:
                    values[workspace] = scratch()  # type: ignore[misc]
                room = values[workspace].data_ptr()
            if (reduce(or_, given, 0) | reduce(or_, filled, 0)) & 15:
                with lock:
                    if not slow:
                        slow.append(TreeKernel(tree, device, kernel.shape, strides, places, kernel.axes, False))
                kernel_ = slow[0]
                if kernel_.workspace_bytes > size:
                    held = torch.empty(kernel_.workspace_bytes, dtype=torch.uint8, device=values[outs[0]].device)
                    room = held.data_ptr()
            kernel_(given, filled[:count], filled[count:], room)

        room_at = () if workspace is None else (workspace,)
        direct = Direct(made, (tuple(ins), tuple(outs[:count]), tuple(outs[count:]), *room_at), 16)
        return Step(kernel, run, "cuda.tree", None, workspace, size, reads=reads, direct=direct)

    def _cpu_tree_step(self, kernel: Kernel, makers: Sequence[_Maker]) -> Step:
        from ..cpu.tree import TreeKernel

        assert kernel.tree is not None
        count = len(kernel.tree.results)
        made = TreeKernel(
            kernel.tree, kernel.shape, *tree_strides(kernel, self._strides), kernel.axes, self.device.threads
        )
        reads = [self._started(tensor) for tensor in kernel.inputs]
        ins, outs = ([self._slots[tensor] for tensor in side] for side in (reads, kernel.results))
        workspace, scratch = self._scratch(made.workspace_bytes)

        def run(values: Values) -> None:
            for slot, make in zip(outs, makers, strict=True):
                if values[slot] is None:
                    values[slot] = make()
            room = 0
            if workspace is not None:
                if values[workspace] is None:
                    values[workspace] = scratch()  # type: ignore[misc]
                room = values[workspace].data_ptr()
            filled = [values[slot].data_ptr() for slot in outs]
            made([values[slot].data_ptr() for slot in ins], filled[:count], filled[count:], room)

        return Step(kernel, run, "cpu.tree", None, workspace, made.workspace_bytes, reads=reads)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _view_step(self, kernel: Kernel) -> Step:
        node = kernel.nodes[0]
        source, target = node.tensors[0], node.result
        meta = torch.empty_strided(source.shape, self._strides[source], device="meta")
        seen = view_of(node, meta)
        slot = self._slots[source]
        self._is_view[node] = seen._is_view() or seen is meta
        if self._is_view[node]:
            out = self._slot(target, tuple(seen.stride()))
            self._views[out] = slot, int(seen.storage_offset()) * dtype_bytes(target.dtype)

            def view(values: Values) -> None:
                values[out] = view_of(node, values[slot])

            return Step(kernel, view, "view")
        make = self._maker(target)
        out = self._slots[target]

        def copy(values: Values) -> None:
            _put(values, out, view_of(node, values[slot]), make)

        return Step(replace(kernel, kind="copy"), copy, "torch")

    def _torch_step(self, kernel: Kernel) -> Step:
        node = kernel.nodes[0]
        ins = [(self._slots[arg], None) if isinstance(arg, GraphTensor) else (-1, arg) for arg in node.args]
        makers = [self._maker(tensor) for tensor in node.results]
        outs = [self._slots[tensor] for tensor in node.results]

        def run(values: Values) -> None:
            given = [values[slot] if slot >= 0 else number for slot, number in ins]
            for slot, value, make in zip(outs, compute(node, given), makers, strict=True):
                _put(values, slot, value, make, [v for v in given if isinstance(v, Tensor)])

        return Step(
            kernel, run, "cuda.pool" if node.op.startswith("resample") and self.place.type == "cuda" else "torch"
        )

    def _apart(self, tensor: GraphTensor, at: int) -> list[Step]:
        """An output that is an input, a constant, a view of one, or another output is copied: it is the caller's."""
        origin = self._origin(tensor)
        others = [other for other in self.outputs if other is not tensor]
        if origin is not tensor:
            self._viewed.add(at)
        if origin.node is not None and origin not in others and tensor not in self.outputs[:at]:
            if origin is tensor or not any(self._origin(other) is origin for other in others):
                return []
        copied = GraphTensor(self.flow, tensor.meta, "")
        source, make = self._slots[tensor], self._maker(copied)
        out = self._slots[copied]
        self.outputs = [*self.outputs[:at], copied, *self.outputs[at + 1 :]]
        self._viewed.discard(at)

        def copy(values: Values) -> None:
            if values[out] is None:
                values[out] = make()
            values[out].copy_(values[source])

        return [Step(Kernel("copy", [], [tensor], [copied]), copy, "torch")]

    def _started(self, tensor: GraphTensor) -> GraphTensor:
        """What a view is of, as far as both start at one address."""
        while tensor.node is not None and tensor.node.op in VIEWS and self._is_view[tensor.node]:
            if tensor.node.op == "slice" and any(tensor.node.attrs["starts"]):
                break
            tensor = tensor.node.tensors[0]
        return tensor

    def _origin(self, tensor: GraphTensor) -> GraphTensor:
        while tensor.node is not None and tensor.node.op in VIEWS and self._is_view[tensor.node]:
            tensor = tensor.node.tensors[0]
        return tensor

    # -- memory -------------------------------------------------------------------------------------------------------

    def _finish(self, steps: list[Step]) -> None:
        """Where each tensor's life ends, and where in a workspace it lives."""
        kept = {self._slots[t] for t in (*self.inputs, *self.outputs) if t is not None} | {
            s for s, _ in self._constants
        }
        kept |= {self._slots[self._origin(self.outputs[at])] for at in self._viewed}
        roots: dict[int, int] = {}
        last: dict[int, int] = {}
        born: dict[int, tuple[int, int, GraphTensor | None]] = {}
        for at, step in enumerate(steps):
            step.takes = tuple(self._slots[tensor] for tensor in step.reads)
            step.fills = tuple(self._slots[tensor] for tensor in step.kernel.results)
            for slot in step.takes:
                last[slot] = at
                last[roots.get(slot, slot)] = at
            for slot, tensor in zip(step.fills, step.kernel.results, strict=True):
                if step.engine == "view":
                    source = self._slots[step.kernel.inputs[0]]
                    roots[slot] = roots.get(source, source)
                else:
                    born[slot] = at, tensor.size * dtype_bytes(tensor.dtype), tensor
                last.setdefault(slot, at)
            if step.workspace is not None:
                born[step.workspace] = at, step.workspace_bytes, None
                last[step.workspace] = at
        for slot, at in last.items():
            if slot not in kept:
                steps[at].drop = (*steps[at].drop, slot)
        lives = {slot: (start, last[slot], size) for slot, (start, size, _) in born.items() if slot not in kept}
        self._pieces, self.workspace_bytes = _placed(lives)
        self._tensors = {slot: tensor for slot, (_, _, tensor) in born.items()}
        self._template: Values = [None] * len(self._slots)
        for slot, value in self._constants:
            self._template[slot] = value
        self._output_slots = [self._slots[t] for t in self.outputs]
        self._output_metas = [
            (t.shape, dense_strides(t.shape, t.layout), ALL_DTYPES[t.dtype]) for t in self.outputs
        ]  # fmt: skip
        memory = Memory(
            inputs=len(self.inputs), outputs=self._output_slots, constants=dict(self._constants), kept=frozenset(kept),
            views=self._views, makers=self._makers, pieces=self._pieces,
            place=lambda slots: _placed({slot: lives[slot] for slot in slots}),
            allocate=lambda size: _Maker((size,), (1,), torch.uint8, self.place),
        )  # fmt: skip
        addressed = Addressed(steps, memory)
        self._addressed = addressed if addressed.direct else None
        self._runs = [(step.run, step.drop) for step in steps]
        self._compiled = steps

    def __getattr__(self, name: str) -> Any:
        if name in ("workspace_bytes", "_runs", "_template", "_pieces", "_addressed"):
            _ = self.steps
            return self.__dict__[name]
        raise AttributeError(name)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None] | None = None, workspace: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs, in new tensors but for those that are given."""
        addressed, runs = self._addressed, self._runs
        values: Values = self._template.copy()
        if len(inputs) != len(self.inputs):
            raise ValueError(f"inputs are {len(inputs)}; wanted {len(self.inputs)}")
        values[: len(inputs)] = inputs  # their slots are the first
        later: list[tuple[int, Tensor]] = []
        if outputs is not None:
            later = self._given(values, inputs, outputs)
        addresses = None if addressed is None else addressed.of(inputs, values)
        base = None
        if workspace is not None:
            pieces = self._pieces if addressed is None or addresses is None else addressed.pieces
            base = self._spread_over(values, workspace, pieces)
        if addressed is None or addresses is None or not addressed.run(values, addresses, base):
            for run, drop in runs:
                run(values)
                for slot in drop:
                    values[slot] = None
        made = [values[slot] for slot in self._output_slots]
        for at, tensor in later:
            made[at] = tensor.copy_(made[at])
        return made

    def _given(
        self, values: Values, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None]
    ) -> list[tuple[int, Tensor]]:
        """Put the caller's outputs in place; those that lie otherwise, or over an input, are copied to in the end."""
        later = []
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        for at, (tensor, (shape, strides, dtype)) in enumerate(zip(outputs, self._output_metas, strict=True)):
            if tensor is None:
                continue
            name = self.graph.outputs[at].name
            if tuple(tensor.shape) != shape or tensor.dtype is not dtype or tensor.device != self.place:
                seen = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise RuntimeError(f"out: {name!r} is given {seen}; wanted {dtype} {shape} on {self.place}")
            own = at not in self._viewed and tensor.untyped_storage().data_ptr() not in taken
            if own and tuple(tensor.stride()) == strides:
                values[self._output_slots[at]] = tensor
            else:
                later.append((at, tensor))
            taken.add(tensor.untyped_storage().data_ptr())
        return later

    def _spread_over(self, values: Values, workspace: Tensor, pieces: Mapping[int, tuple[int, int]]) -> int:
        """Put pieces of the caller's workspace in place; the address that offsets count from."""
        have = workspace.numel() * workspace.element_size()
        if not workspace.is_contiguous() or workspace.device != self.place or have < self.workspace_bytes:
            wanted = f"{self.workspace_bytes} in one piece on {self.place}"
            raise RuntimeError(f"workspace has {have} bytes on {workspace.device}; wanted {wanted}")
        flat = workspace.view(torch.uint8).view(-1)
        start = -flat.data_ptr() % 16
        if start and have < self.workspace_bytes + start:
            raise RuntimeError(f"workspace starts at {flat.data_ptr():#x}; wanted a multiple of 16")
        for slot, (offset, size) in pieces.items():
            piece, tensor = flat[start + offset : start + offset + size], self._tensors[slot]
            if tensor is not None:
                piece = piece.view(ALL_DTYPES[tensor.dtype]).as_strided(
                    tensor.shape, dense_strides(tensor.shape, tensor.layout)
                )
            values[slot] = piece
        return flat.data_ptr() + start

    # -- plans --------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Predicted time of all kernels."""
        return sum(kernel.seconds for kernel in self.kernels)

    def current(self) -> GraphPlan:
        """The plan in use."""
        return self._described(
            0, self.steps, self.seconds, tuple((at, *c) for at, c in self.choices.items()), self.fused
        )

    def _described(self, index: int, steps: list[Step], seconds: float, choices: Any, fused: bool) -> GraphPlan:
        real = [step for step in steps if step.engine != "view"]
        knobs = [
            dict(vars(step.plan.candidate.knobs)) if step.plan is not None and step.plan.candidate is not None else {}
            for step in real
        ]
        text = ", ".join(
            step.plan.candidate_name if step.plan is not None else step.engine for step in real
        ) or "nothing to compute"  # fmt: skip
        return GraphPlan(
            index, [s.engine for s in real], knobs, seconds, self.workspace_bytes, text, None, choices, fused
        )

    def plans(self) -> list[GraphPlan]:
        """This one, then others: one kernel with another engine or other knobs each, and one without fusion."""
        if self._alternatives is None:
            self._alternatives = self._listed()
        return list(self._alternatives)

    def _listed(self) -> list[GraphPlan]:
        first = self.current()
        found = [first]
        convolutions = [
            (at, k) for at, k in enumerate(self.kernels) if k.problem is not None and not k.problem.is_empty
        ]
        each = max(1, (_MOST_PLANS - 2) // max(1, len(convolutions)))
        for at, kernel in convolutions:
            assert kernel.problem is not None
            core = lower(kernel.problem, self.device, self.policy)
            step = next(s for s in self.steps if s.kernel is kernel)
            used = (
                (step.plan.candidate.engine.name, str(step.plan.candidate.knobs))
                if step.plan and step.plan.candidate
                else None
            )
            others = [c for c in search(core, self.device, self.policy) if (c.engine.name, str(c.knobs)) != used]
            place = [s for s in self.steps if s.engine != "view"].index(step)
            for candidate in others[:each]:
                name = f"{candidate.engine.name} [{candidate.knobs}]"
                engines, knobs = list(first.engines), list(first.knobs)
                engines[place], knobs[place] = candidate.engine.name, dict(vars(candidate.knobs))
                choices = tuple({**{a: (a, *c) for a, c in self.choices.items()},
                                 at: (at, candidate.engine.name, str(candidate.knobs))}.values())  # fmt: skip
                seconds = first.seconds - kernel.seconds + candidate.expected
                extra = candidate.workspace - step.workspace_bytes
                found.append(GraphPlan(len(found), engines, knobs, seconds, max(0, first.workspace_bytes + extra),
                                       f"kernel {place}: {name}", None, choices, self.fused))  # fmt: skip
        if self.fused and any(len(kernel.nodes) > 1 for kernel in self.kernels):
            apart = fuse(self.flow, self.device, self.policy, False)
            real = [kernel for kernel in apart if kernel.kind != "view"]
            seconds, text = sum(kernel.seconds for kernel in apart), f"without fusion: {len(real)} kernels"
            found.append(
                GraphPlan(len(found), [k.kind for k in real], [{} for _ in real], seconds, 0, text, None, (), False)
            )
        return found

    def choose(self, index: int) -> GraphPlan:
        """Use another of :meth:`plans`."""
        plans = self.plans()
        if not 0 <= index < len(plans):
            raise ValueError(f"plan is {index}; wanted 0 to {len(plans) - 1}")
        self.use(plans[index])
        return plans[index]

    def use(self, plan: GraphPlan) -> None:
        """Compile for a plan, and run it from now on. Calls under way finish with what they have."""
        with self.graph._lock:
            self.choices = {at: (engine, knobs) for at, engine, knobs in plan.choices}
            if plan.fused != self.fused:
                self.kernels = fuse(self.flow, self.device, self.policy, plan.fused)
                self.fused = plan.fused
            self.outputs = list(self.flow.outputs)
            self._compile()

    def saved(self) -> dict[str, Any]:
        """What :mod:`.serialize` keeps: the engine and knobs of each kernel."""
        by_kernel = {id(step.kernel): step for step in self.steps}
        found: list[list[str] | None] = []
        for kernel in self.kernels:
            step = by_kernel.get(id(kernel))
            candidate = step.plan.candidate if step is not None and step.plan is not None else None
            found.append([candidate.engine.name, str(candidate.knobs)] if candidate else None)
        return {"fused": self.fused, "kernels": found}


# -- helpers ----------------------------------------------------------------------------------------------------------


def _one_axis(shape: Sequence[int]) -> bool:
    return sum(size > 1 for size in shape) <= 1


def _memory_format(axes: int, layout: str) -> torch.memory_format:
    return {(4, "nhwc"): torch.channels_last, (5, "nhwc"): torch.channels_last_3d}.get(
        (axes, layout), torch.contiguous_format
    )


class _Maker:
    """``make()``: a new tensor. On a GPU past the dispatcher, as code that PyTorch compiles does; on the CPU large
    ones lie in memory that is kept for them."""

    __slots__ = ("dtype", "index", "large", "place", "shape", "strides")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, place: torch.device
    ) -> None:
        self.shape, self.strides, self.dtype, self.place = shape, strides, dtype, place
        quick = place.type == "cuda" and _allocate is not None and _current_device is not None
        self.index = (place.index or 0) if quick else -1
        self.large = place.type == "cpu" and prod(shape) * dtype.itemsize >= LARGE

    def __call__(self) -> Tensor:
        if self.index >= 0 and _current_device() == self.index:  # type: ignore[misc]
            made: Tensor = _allocate(self.shape, self.strides, self.dtype)  # type: ignore[misc]
            return made
        if self.large:
            return large_tensor(self.shape, self.strides, self.dtype)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.place)


def _put(values: Values, slot: int, value: Tensor, make: _Maker, others: Sequence[Tensor] = ()) -> None:
    """A result that was made elsewhere into its slot: as it is if it lies as it should and is none of ``others``, else
    copied."""
    there = values[slot]
    if there is None:
        own = all(value.data_ptr() != other.data_ptr() for other in others)
        if own and tuple(value.stride()) == make.strides and value.dtype is make.dtype:
            values[slot] = value
            return
        there = values[slot] = make()
    there.copy_(value)


def _spread(shape: Sequence[int], strides: Sequence[int], common: Sequence[int]) -> tuple[int, ...]:
    """Strides along the axes of a common shape, 0 where the tensor broadcasts."""
    missing = len(common) - len(shape)
    own = [0 if size == 1 and want != 1 else stride
           for size, stride, want in zip(shape, strides, common[missing:], strict=True)]  # fmt: skip
    return (*(0,) * missing, *own)


def tree_strides(
    kernel: Kernel, strides: Mapping[GraphTensor, tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of the inputs and of the pointwise results of a tree, along the axes of its shape."""
    assert kernel.tree is not None
    sides = kernel.inputs, kernel.results[: len(kernel.tree.results)]
    read, written = ([_spread(t.shape, strides[t], kernel.shape) for t in side] for side in sides)
    return read, written


def tree_engine(
    kernel: Kernel, strides: Mapping[GraphTensor, tuple[int, ...]], device: Device
) -> tuple[str, str | None]:
    """What runs a tree, and if that is torch, why no kernel on the CPU."""
    assert kernel.tree is not None
    if 0 in kernel.shape or not kernel.inputs:
        return "torch", None
    if isinstance(device, CudaDevice):
        return "cuda.tree", None
    if device.kind != "cpu":
        return "torch", None
    from ..cpu.tree import refusal

    reason = refusal(kernel.tree, kernel.shape, *tree_strides(kernel, strides), kernel.axes)
    return ("cpu.tree", None) if reason is None else ("torch", reason)


def _placed(lives: dict[int, tuple[int, int, int]]) -> tuple[dict[int, tuple[int, int]], int]:
    """An offset for each piece of memory that lives from one step to another, the largest first, each as low as it
    fits; and the bytes of all."""
    placed: dict[int, tuple[int, int]] = {}
    total = 0
    for slot, (start, end, size) in sorted(lives.items(), key=lambda item: -item[1][2]):
        room = -(-size // _ALIGNED) * _ALIGNED
        others = sorted(
            (placed[other][0], -(-placed[other][1] // _ALIGNED) * _ALIGNED) for other in placed
            if lives[other][0] <= end and start <= lives[other][1]
        )  # fmt: skip
        offset = 0
        for at, taken in others:
            if offset + room <= at:
                break
            offset = max(offset, at + taken)
        placed[slot] = offset, size
        total = max(total, offset + room)
    return placed, total


def _flat_view(tensor: GraphTensor) -> View | None:
    """A vector (1, C, 1, ...) as (C,)."""
    return None if tensor.dim() == 1 else View((tensor.size,), (1,))


def _matrix_view(kernel: Kernel, at: int) -> View | None:
    """A matrix as the image of a 1x1 convolution whose pixels are its rows, its last axis the channels."""
    if not kernel.matrix:
        return None
    tensor = kernel.inputs[at]
    if at == 1:
        k, n = tensor.shape
        return View((k, n, 1, 1), (n, 1, n, n))
    return _rows_view(tensor.shape)


def _rows_view(shape: Sequence[int]) -> View:
    last = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return View((1, last, rows, 1), (rows * last, 1, last, last))


def _filling(
    into: Callable[..., None], kernel: Kernel, prepare: Sequence[Any], slots: Sequence[int], outs: Sequence[int],
    makers: Sequence[_Maker], workspace: int | None, scratch: Callable[[], Tensor] | None,
) -> Callable[[Values], None]:  # fmt: skip
    """A convolution into tensors that are there or made now."""
    view = _rows_view(kernel.results[0].shape) if kernel.matrix else None
    plain = not any(prepare) and view is None and len(outs) == 1
    first, second, *rest = slots
    out, make = outs[0], makers[0]

    def quick(values: Values) -> None:
        result = values[out]
        if result is None:
            result = values[out] = make()
        room = None
        if workspace is not None:
            room = values[workspace]
            if room is None:
                room = values[workspace] = scratch()  # type: ignore[misc]
        into(values[first], values[second], [values[slot] for slot in rest], (result,), room)

    def run(values: Values) -> None:
        given = [
            values[slot] if form is None else form(values[slot]) for slot, form in zip(slots, prepare, strict=True)
        ]
        results = []
        for slot, maker in zip(outs, makers, strict=True):
            if values[slot] is None:
                values[slot] = maker()
            results.append(values[slot] if view is None else view(values[slot]))
        room = None
        if workspace is not None:
            if values[workspace] is None:
                values[workspace] = scratch()  # type: ignore[misc]
            room = values[workspace]
        into(given[0], given[1], given[2:], results, room)

    return quick if plain else run


def _calling(
    plan: Plan, kernel: Kernel, prepare: Sequence[Any], slots: Sequence[int], outs: Sequence[int],
    makers: Sequence[_Maker],
) -> Callable[[Values], None]:  # fmt: skip
    """A convolution that torch has a part in: what it gives is copied where a tensor is there."""
    shapes = [tensor.shape for tensor in kernel.results]
    matrix = kernel.matrix

    def run(values: Values) -> None:
        given = [
            values[slot] if form is None else form(values[slot]) for slot, form in zip(slots, prepare, strict=True)
        ]
        made = plan(given[0], given[1], given[2:])
        for slot, value, shape, make in zip(
            outs, made if isinstance(made, tuple) else (made,), shapes, makers, strict=True
        ):
            if matrix:
                value = value.permute(0, 2, 3, 1)
            _put(values, slot, value.reshape(shape), make)

    return run


def _with_precision(flow: Flow, precision: str) -> Flow:
    def rule(new: Flow, node: Any, args: list[Any]) -> Any:
        if not node.op.startswith("conv_") or node.tensors[0].dtype != "f32":
            return None
        made = new.again(node, args)
        made[0].node.attrs["problem"] = made[0].node.attrs["problem"].with_(precision=precision)  # type: ignore[union-attr]
        return made

    return flow.copy(rule)[0]
