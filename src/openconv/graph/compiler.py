"""From the kernels of a program to :class:`~.compiled.Compiled`: an engine for each, where tensors lie, how long they
live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cuda.device import CudaDevice
from ..device import Device
from ..evaluate import evaluate_tree
from ..plan import Plan, lower, make_plan, plan_for
from ..problem import Problem
from ..select import Candidate, Policy, search
from ..tensors import ALL_DTYPES
from .addresses import Addressed, Direct, Memory, View
from .compiled import Compiled, Maker, Step, Values, placed, put
from .compute import compute, engine_of, view_of
from .fusion import Kernel, dtype_bytes
from .ir import GraphTensor, Meta, dense_strides, layout_of_strides
from .operations import VIEWS

if TYPE_CHECKING:
    from .program import Program

__all__ = ["Compiler", "chosen", "tree_engine", "tree_strides"]


class Compiler:
    """``compile()`` once: the kernels of a program, with the engine and knobs that ``choices`` has for some of them."""

    def __init__(self, program: Program, kernels: Sequence[Kernel], choices: Mapping[int, tuple[str, str]]) -> None:
        self.kernels, self.choices = kernels, choices
        self.flow, self.place, self.device, self.policy = program.flow, program.place, program.device, program.policy
        self.inputs, self.outputs = program.inputs, list(program.flow.outputs)
        self.names = [tensor.name for tensor in program.graph.outputs]
        self._lock = program.graph._lock
        self._slots: dict[GraphTensor, int] = {}
        self._strides: dict[GraphTensor, tuple[int, ...]] = {}
        self._constants: list[tuple[int, Tensor]] = []
        self._is_view: dict[Any, bool] = {}
        self._makers: dict[int, Maker] = {}
        self._views: dict[int, tuple[int, int]] = {}
        self._viewed: set[int] = set()

    def compile(self) -> Compiled:
        """The steps, their memory, and what runs them."""
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
        return self._finish(self._wanted(steps))

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

    def _maker(self, tensor: GraphTensor) -> Maker:
        """What allocates a result."""
        made = Maker(tensor.shape, dense_strides(tensor.shape, tensor.layout), ALL_DTYPES[tensor.dtype], self.place)
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
        if choice is None:
            plan = plan_for(problem, self.device, self.policy)
        else:
            plan = make_plan(problem, self.device, self.policy, chosen(problem, choice, self.device, self.policy))
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
                    put(values, slot, value.reshape(tensor.shape), make, given)
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
        device, lock = self.device, self._lock
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

    def _cpu_tree_step(self, kernel: Kernel, makers: Sequence[Maker]) -> Step:
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
            put(values, out, view_of(node, values[slot]), make)

        return Step(replace(kernel, kind="copy"), copy, "torch")

    def _torch_step(self, kernel: Kernel) -> Step:
        node = kernel.nodes[0]
        ins = [(self._slots[arg], None) if isinstance(arg, GraphTensor) else (-1, arg) for arg in node.args]
        makers = [self._maker(tensor) for tensor in node.results]
        outs = [self._slots[tensor] for tensor in node.results]

        def run(values: Values) -> None:
            given = [values[slot] if slot >= 0 else number for slot, number in ins]
            for slot, value, make in zip(outs, compute(node, given), makers, strict=True):
                put(values, slot, value, make, [v for v in given if isinstance(v, Tensor)])

        return Step(kernel, run, engine_of(node, self.place.type))

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

    def _finish(self, steps: list[Step]) -> Compiled:
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
        pieces, size = placed(lives)
        template: Values = [None] * len(self._slots)
        for slot, value in self._constants:
            template[slot] = value
        outputs = [self._slots[t] for t in self.outputs]
        memory = Memory(
            inputs=len(self.inputs), outputs=outputs, constants=dict(self._constants), kept=frozenset(kept),
            views=self._views, makers=self._makers, pieces=pieces,
            place=lambda slots: placed({slot: lives[slot] for slot in slots}),
            allocate=lambda size: Maker((size,), (1,), torch.uint8, self.place),
        )  # fmt: skip
        addressed = Addressed(steps, memory)
        return Compiled(
            steps, self.place, len(self.inputs), self.names, template, pieces, size,
            tensors={slot: tensor for slot, (_, _, tensor) in born.items()}, output_slots=outputs,
            output_metas=[(t.shape, dense_strides(t.shape, t.layout), ALL_DTYPES[t.dtype]) for t in self.outputs],
            viewed=frozenset(self._viewed), addressed=addressed if addressed.direct else None,
            runs=[(step.run, step.drop) for step in steps],
        )  # fmt: skip


# -- helpers ----------------------------------------------------------------------------------------------------------


def chosen(problem: Problem, choice: tuple[str, str], device: Device, policy: Policy) -> Candidate:
    """The engine of this name with knobs of this text."""
    for candidate in search(lower(problem, device, policy), device, policy):
        if (candidate.engine.name, str(candidate.knobs)) == choice:
            return candidate
    raise RuntimeError(f"'{problem}': no engine {choice[0]} has the knobs {choice[1]} on {device.name}")


def _one_axis(shape: Sequence[int]) -> bool:
    return sum(size > 1 for size in shape) <= 1


def _memory_format(axes: int, layout: str) -> torch.memory_format:
    return {(4, "nhwc"): torch.channels_last, (5, "nhwc"): torch.channels_last_3d}.get(
        (axes, layout), torch.contiguous_format
    )


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
    makers: Sequence[Maker], workspace: int | None, scratch: Callable[[], Tensor] | None,
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
    makers: Sequence[Maker],
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
            put(values, slot, value.reshape(shape), make)

    return run
