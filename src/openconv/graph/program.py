"""Program: a graph for one device and one set of sizes, rewritten and fused; its plans, one of which is compiled.

What runs is :class:`~.compiled.Compiled`. Choosing another plan puts another one in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plan import device_of, lower
from ..select import Policy, current_policy, search
from .compiled import Compiled, Step, in_whole_places
from .compiler import Compiler
from .fusion import fuse
from .ir import Flow, Meta
from .rewrites import rewrite

if TYPE_CHECKING:
    from .builder import Graph

__all__ = ["GraphPlan", "Program", "program_for", "signature"]

_MOST_PLANS = 64


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
        self._alternatives: list[GraphPlan] | None = None
        saved = graph._chosen.get(self.key)
        fused = graph.fuse if saved is None else saved["fused"]
        self.kernels = fuse(self.flow, self.device, policy, fused)
        self.fused = fused
        self.choices: dict[int, tuple[str, str]] = {}
        if saved is not None and len(saved["kernels"]) == len(self.kernels):
            self.choices = {at: tuple(each) for at, each in enumerate(saved["kernels"]) if each}
        self._compiled: Compiled | None = None

    @property
    def key(self) -> str:
        """Under which its choices are kept: the device and the sizes."""
        sizes = " ".join(f"{t.name}:{t.dtype}{list(t.shape)}" for t in self.source.inputs)
        return f"{self.device.key} | {sizes}"

    @property
    def compiled(self) -> Compiled:
        """What runs now, compiled when it is first asked for."""
        found = self._compiled
        if found is None:
            with self.graph._lock:
                found = self._compiled
                if found is None:
                    found = self._compiled = Compiler(self, self.kernels, self.choices).compile()
        return found

    @property
    def steps(self) -> list[Step]:
        return self.compiled.steps

    @property
    def workspace_bytes(self) -> int:
        return self.compiled.workspace_bytes

    def run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor | None] | None = None, workspace: Tensor | None = None
    ) -> list[Tensor]:
        """The outputs, in new tensors but for those that are given."""
        return self.compiled.run(inputs, outputs, workspace)

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
                extra = in_whole_places(candidate.workspace) - in_whole_places(step.workspace_bytes)
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
            self._compiled = Compiler(self, self.kernels, self.choices).compile()

    def saved(self) -> dict[str, Any]:
        """What :mod:`.serialize` keeps: the engine and knobs of each kernel."""
        by_kernel = {id(step.kernel): step for step in self.steps}
        found: list[list[str] | None] = []
        for kernel in self.kernels:
            step = by_kernel.get(id(kernel))
            candidate = step.plan.candidate if step is not None and step.plan is not None else None
            found.append([candidate.engine.name, str(candidate.knobs)] if candidate else None)
        return {"fused": self.fused, "kernels": found}


def _with_precision(flow: Flow, precision: str) -> Flow:
    def rule(new: Flow, node: Any, args: list[Any]) -> Any:
        if not node.op.startswith("conv_") or node.tensors[0].dtype != "f32":
            return None
        made = new.again(node, args)
        made[0].node.attrs["problem"] = made[0].node.attrs["problem"].with_(precision=precision)  # type: ignore[union-attr]
        return made

    return flow.copy(rule)[0]
