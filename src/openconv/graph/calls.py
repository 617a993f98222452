"""Calls of a graph: arguments into the order of its inputs, checks, gradients, timing, capture."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..select import Policy, current_policy
from ..tensors import ALL_DTYPES, guards
from .ir import GraphTensor
from .program import GraphPlan, Program, program_for, signature

if TYPE_CHECKING:
    from .builder import Graph
    from .gradient import Gradient

__all__ = ["Caller"]

_Guards = getattr(guards, "TensorGuards", None)
_MOST_LEARNED = 8


class Caller:
    """``caller(values, named, out, workspace)`` for one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = graph.inputs
        self.names = [tensor.name for tensor in self.inputs]
        self.outputs = [tensor.name for tensor in graph.outputs]
        self.single = len(self.outputs) == 1
        self._found: dict[Any, _Known] = {}
        self._last: _Known | None = None
        self._gradients: dict[Any, Gradient] = {}

    def __call__(
        self, values: tuple[Any, ...], named: Mapping[str, Tensor], out: Any = None, workspace: Tensor | None = None
    ) -> Any:
        last = self._last
        if last is not None and not named and last.takes(values):  # most calls are like the one before
            made = last.program.run(values, None if out is None else self._places(out), workspace)
            return made[0] if self.single else tuple(made)
        given = self.ordered(values, named)
        if torch.is_grad_enabled() and any(value.requires_grad for value in given):
            if out is not None:
                name = self.graph.name
                raise RuntimeError(f"graph {name!r}: out= was given and an input wants a gradient; wanted one of them")
            made = self._tracked(given)
        else:
            if last is None or not last.takes(given):
                last = self._last = self._known(given)
                last.learn(given)
            made = last.program.run(given, None if out is None else self._places(out), workspace)
        return made[0] if self.single else tuple(made)

    # -- arguments --------------------------------------------------------------------------------------------------

    def ordered(self, values: tuple[Any, ...], named: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors of a call in the order of the inputs, checked."""
        if len(values) == 1 and isinstance(values[0], Mapping):
            named, values = {**self._by_name(values[0]), **named}, ()
        if len(values) == len(self.names) and not named:
            given = list(values)
        else:
            given = self._mixed(values, named)
        for tensor, value in zip(self.inputs, given, strict=True):
            if not isinstance(value, Tensor):
                raise self._wrong(tensor, f"is of type {type(value).__name__}; wanted a Tensor", TypeError)
        return given

    def _mixed(self, values: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        if len(values) > len(self.names):
            raise TypeError(f"graph {self.graph.name!r} was given {len(values)} tensors; wanted {len(self.names)}: "
                            f"{', '.join(self.names)}")  # fmt: skip
        found = dict(zip(self.names, values, strict=False))
        for name, value in named.items():
            if name in found:
                raise TypeError(f"graph {self.graph.name!r} was given {name!r} twice")
            if name not in self.names:
                raise TypeError(f"graph {self.graph.name!r} has no input {name!r}; wanted {', '.join(self.names)}")
            found[name] = value
        missing = [name for name in self.names if name not in found]
        if missing:
            raise TypeError(f"graph {self.graph.name!r} was not given {', '.join(missing)}; wanted "
                            f"{', '.join(self.names)}")  # fmt: skip
        return [found[name] for name in self.names]

    def _by_name(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            if isinstance(key, GraphTensor) and key._flow is not self.graph.flow:
                raise RuntimeError(f"tensor {key.name!r} is of another graph; wanted one of {self.graph.name!r}")
            found[key.name if isinstance(key, GraphTensor) else str(key)] = value
        return found

    def _wrong(self, tensor: GraphTensor, text: str, kind: type[Exception] = RuntimeError) -> Exception:
        return kind(f"graph {self.graph.name!r}: input {tensor.name!r} {text}")

    def _places(self, out: Any) -> list[Tensor | None]:
        if isinstance(out, Tensor):
            out = (out,)
        if isinstance(out, Mapping):
            named = self._by_name(out)
            unknown = [name for name in named if name not in self.outputs]
            if unknown:
                raise TypeError(f"out has {', '.join(unknown)}; wanted some of {', '.join(self.outputs)}")
            return [named.get(name) for name in self.outputs]
        places = list(out)
        if len(places) != len(self.outputs) or not all(isinstance(p, Tensor | None) for p in places):
            raise TypeError(
                f"out has {len(places)} entries; wanted a tensor or None for each of {', '.join(self.outputs)}"
            )
        return places

    # -- programs ---------------------------------------------------------------------------------------------------

    def program(self, given: Sequence[Tensor]) -> Program:
        """The program for these tensors. Sizes may differ from those that the graph was built with where nodes allow
        it; dtypes and the number of axes may not."""
        return self._known(given).program

    def _known(self, given: Sequence[Tensor]) -> _Known:
        key = signature(given)
        known = self._found.get(key)
        if known is not None and not self._stale(known.program):
            return known
        place = given[0].device if given else torch.device("cpu")
        for tensor, value in zip(self.inputs, given, strict=True):
            if value.dtype is not ALL_DTYPES[tensor.dtype]:
                raise self._wrong(tensor, f"is {value.dtype}; wanted {ALL_DTYPES[tensor.dtype]}")
            if value.dim() != tensor.dim():
                raise self._wrong(
                    tensor, f"has shape {tuple(value.shape)}; wanted {tensor.dim()} axes, as {tensor.shape}"
                )
            if value.device != place:
                raise self._wrong(tensor, f"is on {value.device} and {self.names[0]!r} on {place}; wanted one device")
            if value.layout != torch.strided or value.is_conj() or value.is_neg():
                raise self._wrong(tensor, f"has layout {value.layout} or is a lazy view; wanted a dense tensor")
        found = program_for(self.graph, place, given)
        if len(self._found) > 256:
            self._found.clear()
        known = self._found[key] = _Known(self.graph, found)
        return known

    def _stale(self, program: Program) -> bool:
        """Whether the policy in force, or the number of threads, has changed since."""
        limits = (self.graph.policy or Policy()).over(current_policy())
        return program.policy != limits or (
            program.place.type == "cpu" and program.device.threads != torch.get_num_threads()
        )

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _tracked(self, given: list[Tensor]) -> list[Tensor]:
        wanted = tuple(name for name, value in zip(self.names, given, strict=True) if value.requires_grad)
        made = _Function.apply(self._gradient(given, wanted), self.names, len(self.outputs), wanted, *given)  # type: ignore[no-untyped-call]
        return list(made) if isinstance(made, tuple) else [made]

    def _gradient(self, given: list[Tensor], wanted: tuple[str, ...]) -> Gradient:
        """The gradient for tensors of these sizes."""
        from .gradient import differentiate

        key = wanted, tuple([value.shape for value in given])
        found = self._gradients.get(key)
        if found is None:
            flow = self.program([value.detach() for value in given]).source
            with self.graph._lock:
                found = self._gradients.setdefault(key, differentiate(self.graph, wanted, flow))
        return found

    # -- timing -------------------------------------------------------------------------------------------------------

    def autotune(self, values: tuple[Any, ...], named: Mapping[str, Tensor], seconds: float | None) -> list[GraphPlan]:
        """Time the plans on these tensors, keep the fastest."""
        given = self.ordered(values, named)
        program = self.program(given)
        plans, end = program.plans(), time.perf_counter() + (10.0 if seconds is None else seconds)
        measured: list[GraphPlan] = []
        for plan in plans:
            if measured and time.perf_counter() > end:
                measured.append(plan)
                continue
            program.use(plan)
            measured.append(replace(plan, measured=_timed(lambda: program.run(given), given[0].device)))
        best = min((plan for plan in measured if plan.measured is not None), key=lambda plan: plan.measured or 0.0)
        program.use(best)
        program._alternatives = None
        return sorted(measured, key=lambda plan: (plan.measured is None, plan.measured or 0.0))

    # -- capture ------------------------------------------------------------------------------------------------------

    def capture(self, values: tuple[Any, ...], named: Mapping[str, Tensor]) -> Callable[..., Any]:
        """A CUDA graph of the call."""
        given = self.ordered(values, named)
        place = given[0].device
        if place.type != "cuda":
            raise RuntimeError(f"graph {self.graph.name!r}: inputs are on {place}; only a GPU's work can be captured")
        ready = self.program(given).compiled
        held = [value.detach().clone() for value in given]
        with torch.no_grad(), torch.cuda.device(place):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ready.run(held)
            torch.cuda.current_stream().wait_stream(side)
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                made = ready.run(held)

        def replay(*values: Any, **named: Tensor) -> Any:
            for tensor, there, value in zip(self.inputs, held, self.ordered(values, named), strict=True):
                if value.shape != there.shape or value.dtype != there.dtype or value.device != there.device:
                    raise self._wrong(tensor, f"is {value.dtype} {tuple(value.shape)} on {value.device}; captured was "
                                              f"{there.dtype} {tuple(there.shape)} on {there.device}")  # fmt: skip
                there.copy_(value)
            recorded.replay()
            return made[0] if self.single else tuple(made)

        replay.graph, replay.compiled = recorded, ready  # type: ignore[attr-defined]
        return replay


class _Known:
    """A program, and whether tensors are those that it is for: like the ones that it learned, under the same policy and
    number of threads, none that gradients are wanted of.

    They are looked at by what code that PyTorch compiles checks its tensors with: all of them in one call, in an eighth
    of the time that Python takes. It takes no tensor that is given twice."""

    __slots__ = ("_graph", "_learned", "_left", "program")

    def __init__(self, graph: Graph, program: Program) -> None:
        self._graph, self.program = graph, program
        self._learned: tuple[Any, ...] | None = None
        self._left = _MOST_LEARNED

    def learn(self, given: Sequence[Tensor]) -> None:
        """Tensors that the program is for, under what is in force now. It gives up after a few that differ."""
        threads = torch.get_num_threads() if self.program.place.type == "cpu" else 0
        # A policy is compared by identity: it does not change.
        limits = self._graph.policy, current_policy(), threads
        learned, tracks = self._learned, any(value.requires_grad for value in given)
        if learned is not None and learned[1](*given):
            self._learned = *learned[:3], *limits
        elif self._left and given and _Guards is not None:
            self._left -= 1
            try:
                check = _Guards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
                self._learned = (len(given), check, tracks, *limits) if check(*given) else None
            except (RuntimeError, TypeError):  # a private class, which may change
                self._learned = None

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether a call with these is one of the program."""
        if self._learned is None:
            return False
        count, check, tracks, own, policy, threads = self._learned
        return (
            len(values) == count
            and policy is current_policy()
            and own is self._graph.policy
            and (not threads or threads == torch.get_num_threads())
            and check(*values)
            and not (tracks and torch.is_grad_enabled())
        )


def _timed(call: Callable[[], Any], place: torch.device) -> float:
    """The median of a few calls, in seconds."""
    from ..bench.timing import race, race_cuda

    if place.type == "cuda":
        return race_cuda([[call]], budget=0.1, least=3, most=50)[0].median
    return race([call], budget=0.1, least=3, most=50)[0].median


class _Function(torch.autograd.Function):
    """A graph and its gradient, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Gradient, names: Sequence[str], count: int, wanted: tuple[str, ...], *given: Tensor
    ) -> Any:
        from .gradient import has_gradient

        caller = gradient.forward._runner
        known = dict(zip(names, given, strict=True))
        inputs = [known[name] for name in caller.names]
        made = caller.program(inputs).run(inputs)
        ctx.gradient, ctx.names, ctx.count, ctx.wanted = gradient, names, count, wanted
        outs = tuple(made[:count])
        # Values that are no outputs are kept as they are: nothing else can reach them.
        ctx.hidden = tuple(made[count:])
        tensors = gradient.forward.outputs[:count]
        # Nothing else is kept: it would cost memory, and could not be written to, as running statistics are.
        needed = set(gradient.graph._runner.names)
        ctx.save_for_backward(
            *(value if name in needed else None for name, value in zip(names, given, strict=True)),
            *(out if tensor.name in needed else None for out, tensor in zip(outs, tensors, strict=True)),
        )
        ctx.mark_non_differentiable(
            *(out for out, tensor in zip(outs, tensors, strict=True) if not has_gradient(tensor))
        )
        return outs if count > 1 else outs[0]

    @staticmethod
    def backward(ctx: Any, *losses: Tensor) -> Any:
        with torch.no_grad():
            found = _Function._gradients(ctx, losses)
        if torch.is_grad_enabled():  # create_graph=True
            name, more = ctx.gradient.forward.name, torch.zeros((), requires_grad=True)
            found = {each: _Once.apply(value, more, name) for each, value in found.items()}  # type: ignore[no-untyped-call]
        return None, None, None, None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def _gradients(ctx: Any, losses: Sequence[Tensor]) -> dict[str, Tensor]:
        kept, gradient = ctx.saved_tensors, ctx.gradient
        given, made = kept[: len(ctx.names)], kept[len(ctx.names) :]
        outputs = gradient.forward.outputs
        known = dict(zip(ctx.names, given, strict=True))
        known |= dict(zip((t.name for t in outputs), (*made, *ctx.hidden), strict=True))
        known |= {f"d_{t.name}": loss for t, loss in zip(outputs[: ctx.count], losses, strict=True)}
        caller = gradient.graph._runner
        inputs = [_like(known[name], tensor) for name, tensor in zip(caller.names, caller.inputs, strict=True)]
        return dict(zip(ctx.wanted, caller.program(inputs).run(inputs), strict=True))


class _Once(torch.autograd.Function):
    """A gradient that has none itself: who asks for it is told so, rather than given nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, more: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *losses: Tensor) -> Any:
        raise NotImplementedError(
            f"graph {ctx.name!r}: its gradient is differentiated again, which calls of graphs do not do; "
            "call backward() of the gradient's graph, or compose the graph of torch functions"
        )


def _like(value: Tensor, tensor: GraphTensor) -> Tensor:
    """Autograd's gradients may be expanded scalars: laid out as the graph was built for."""
    if 0 in value.stride() and value.numel() > 1:
        return value.contiguous(memory_format=torch.channels_last if tensor.layout == "nhwc" and value.dim() == 4
                                else torch.contiguous_format)  # fmt: skip
    return value
