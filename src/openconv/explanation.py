"""explain: what a call would run, and why; for a problem, a text line, a function with its arguments, or a module.

    >>> print(openconv.explain("fprop n8 c64 h56 w56 k64 r3 s3 pad1 f32 nchw"))
    >>> openconv.explain(openconv.conv2d, x, w, padding=1)
    >>> openconv.explain(torch.nn.Conv2d(3, 64, 7, stride=2), x, measure=True)

The answer is an :class:`Explanation`: the steps of the call with every copy and cast, the engine that was chosen, those
that lost and by how much, those that refused and why, and what the problem asks of the machine at the least.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import functional
from .bench.timing import race, race_cuda
from .device import Device
from .engine import UnsupportedProblem
from .epilogue import IDENTITY
from .functional import Arguments, check_arguments
from .plan import as_held, device_of, lower, make_plan, plan_for, steps_of
from .problem import DIRECTIONS, Gemm, Problem
from .reference import allowed_error, error_of, random_inputs
from .select import Candidate, Policy, current_policy, rank
from .tensors import DTYPES, NAMES, in_layout
from .torch_ops import epilogue_of, problem_of
from .units import bytes_text, count_text, percent_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["CandidateReport", "Explanation", "Facts", "RefusalReport", "explain"]


@dataclass(frozen=True)
class Facts:
    """What follows from the problem and the machine's two ceilings, whichever engine runs.

    ``floor`` is the roofline: the seconds that the operations or the bytes need at the least, and ``bound`` says which.
    Data that are in the cache already, and algorithms with fewer operations, may be faster.
    """

    flops: int
    min_bytes: int
    intensity: float
    gemm: Gemm
    floor: float
    bound: str


@dataclass(frozen=True)
class CandidateReport:
    """An engine that takes the problem.

    ``measured`` is the time of this explanation's own run, else that of the tuning database; ``expected`` is what the
    choice went by: the database's time, the prediction scaled by what a neighbour was measured to take, or the
    prediction; ``basis`` says which of these: ``database``, ``neighbour`` or ``heuristic``. ``roofline`` is the floor's
    share of the measured, else of the expected time; ``error`` and ``error_bound`` are shares of sum(|x|*|w|), the cast
    to the result's dtype included."""

    name: str
    summary: str
    predicted: float
    expected: float
    basis: str
    measured: float | None
    roofline: float
    workspace: int
    accumulator: str
    deterministic: bool
    batch_invariant: bool
    plain_sum: bool
    error_bound: float
    error: float | None
    knobs: str
    source: str
    note: str = ""
    reasons: tuple[str, ...] = ()
    """How the prediction comes about, where the engine says so."""


@dataclass(frozen=True)
class RefusalReport:
    """An engine that does not take the problem, and why."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What would run, and why. ``print`` it, let rich render it, or take :meth:`to_dict`.

    ``core`` is the problem that engines see after lowering; ``candidates`` are in the order of preference, so that the
    first one runs.
    """

    problem: Problem
    core: Problem
    device: Device
    policy: Policy
    facts: Facts
    steps: tuple[str, ...]
    candidates: tuple[CandidateReport, ...]
    refusals: tuple[RefusalReport, ...]
    why: str
    basis: str = "heuristic"
    """Where the choice came from: ``database``, ``neighbour``, ``heuristic``, or ``engine`` where one was asked for."""

    @property
    def winner(self) -> CandidateReport | None:
        """The candidate that runs; None where nothing has to be multiplied, or no engine takes the problem."""
        return self.candidates[0] if self.candidates else None

    @property
    def fastest(self) -> CandidateReport | None:
        """The candidate that was measured fastest, if any was measured."""
        timed = [c for c in self.candidates if c.measured is not None]
        return min(timed, key=lambda c: c.measured or 0.0) if timed else None

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers, for JSON."""
        return {
            "problem": str(self.problem),
            "core": str(self.core),
            "device": asdict(self.device),
            "policy": asdict(self.policy),
            "facts": {**asdict(self.facts), "gemm": self.facts.gemm._asdict()},
            "steps": list(self.steps),
            "winner": self.winner.name if self.winner else None,
            "why": self.why,
            "basis": self.basis,
            "candidates": [asdict(c) for c in self.candidates],
            "refusals": [{"name": r.name, "reasons": list(r.reasons)} for r in self.refusals],
        }

    def __str__(self) -> str:
        from rich.console import Console

        # A notebook would show what is printed to a console at once, and leave none of it for the text.
        console = Console(
            file=io.StringIO(), width=120, color_system=None, force_terminal=False, force_jupyter=False,
            legacy_windows=False,
        )  # fmt: skip
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _render(self, options.max_width)


# -- the call ---------------------------------------------------------------------------------------------------------


def explain(
    subject: Any, /, *args: Any, device: str | torch.device | Device | None = None, direction: str | None = None,
    engine: str | None = None, precision: str | None = None, accuracy: str | None = None,
    max_workspace: int | None = None, batch_invariant: bool | None = None, deterministic: bool | None = None,
    measure: bool = False, budget: float = 1.0, **kwargs: Any,
) -> Explanation:  # fmt: skip
    """What a call would run, and why.

    ``subject`` is one of

    - a :class:`~openconv.Problem`, or the text line of one: ``explain("fprop n1 c1 h1024 w2048 k1 r3 s3 pad1")``;
    - a function and the arguments of its call: ``explain(openconv.conv2d, x, w, padding=1)``; likewise torch's own
      ``F.conv1d`` to ``F.conv_transpose3d``;
    - those arguments alone: ``explain(x, w, padding=1)``, where the number of the weight's axes tells the function;
    - a convolution module of ``torch.nn`` or ``openconv.nn`` and its input: ``explain(layer, x)``.

    Tensors may be on the ``meta`` device: only their metadata are looked at.

    ``device`` asks for another place than that of the tensors; without tensors it is the CPU.
    ``direction`` asks for another pass over the same sizes, without the epilogue: ``"dgrad"`` and ``"wgrad"`` are the
    gradients of a convolution.
    ``engine`` to ``deterministic`` are the fields of :class:`~openconv.Policy`, over the policy in force.
    ``measure`` also runs every candidate on random data: the median time of its whole plan, and its error against
    float64. ``budget`` is the seconds that one candidate may take: one that is predicted to need more is left out, and
    one that turns out to need more than a quarter of them is run once.
    """
    asked = {"engine": engine, "precision": precision, "accuracy": accuracy, "max_workspace": max_workspace,
             "batch_invariant": batch_invariant, "deterministic": deterministic}  # fmt: skip
    limits = _MODULE_LIMITS if isinstance(subject, torch.nn.Module) else ()
    own = {name: getattr(subject, name, None) for name in limits}
    policy = current_policy().but(**own).but(**asked)
    call: _Call
    if isinstance(subject, Problem | str):
        if args or kwargs:
            extra = ", ".join([type(a).__name__ for a in args] + list(kwargs))
            raise TypeError(f"explain: a problem takes no further arguments, got {extra}; put them into its text")
        problem = Problem.parse(subject) if isinstance(subject, str) else subject
        problem = problem.with_(precision=precision) if precision else problem
        call = _Call(problem, torch.device("cpu"))
    else:
        call = _read_call(subject, args, kwargs, policy)
    if direction is not None and direction != call.problem.direction:
        if direction not in DIRECTIONS:
            raise ValueError(f"explain: direction is {direction!r}; wanted one of {', '.join(DIRECTIONS)}")
        bare = call.problem.with_(direction=direction, epilogue=IDENTITY, prologue=IDENTITY, stats=False)
        call = _Call(bare, call.device)
    machine, place = _place(device, call.device)
    return _explain(call, machine, place, policy, budget if measure else 0.0)


@dataclass(frozen=True)
class _Call:
    """A problem, the device it is meant for, and what a real call has beyond it: its inputs by their names in the
    problem, and the steps outside of the plan."""

    problem: Problem
    device: torch.device
    inputs: Mapping[str, Tensor] | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def _place(asked: str | torch.device | Device | None, found: torch.device) -> tuple[Device, torch.device]:
    """The Device that is chosen for, and the torch device that stands for it."""
    if isinstance(asked, Device):
        return asked, torch.device(asked.kind if asked.kind == "cuda" else "cpu")
    place = torch.device(asked) if asked is not None else found
    return device_of(place), place


_MODULE_LIMITS = ("engine", "precision", "accuracy", "max_workspace")
_FUNCTION = re.compile(r"conv(_transpose)?([123])d")


def _read_call(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> _Call:
    if isinstance(subject, torch.nn.Module):
        return _read_module(subject, args, kwargs, policy)
    if isinstance(subject, Tensor | np.ndarray):
        weight = args[0] if args else kwargs.get("weight")
        if not isinstance(weight, Tensor | np.ndarray) or weight.ndim not in (3, 4, 5):
            got = f"of {weight.ndim} axes" if isinstance(weight, Tensor | np.ndarray) else repr(weight)
            raise TypeError(f"explain: the weight is {got}; wanted a tensor of 3, 4 or 5 axes behind the input")
        return _bind(f"conv{weight.ndim - 2}d", (subject, *args), kwargs, policy)
    for name in functional.__all__:
        if any(subject is getattr(place, name) for place in (functional, F, torch)):
            return _bind(name, args, kwargs, policy)
    got = getattr(subject, "__name__", type(subject).__name__)
    raise TypeError(
        f"explain: got {got}; wanted a Problem or its text, a convolution function "
        "(conv1d to conv_transpose3d) with its arguments, an input and a weight, or a convolution module with its input"
    )


def _bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, **steps: tuple[str, ...]) -> _Call:
    """The call of a function by its name, with torch's arguments and openconv's own."""
    bound = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    values: dict[str, Any] = dict(bound.arguments)
    before = list(steps.get("before", ()))
    for tensor in ("input", "weight", "bias", "residual"):
        if isinstance(values[tensor], np.ndarray):
            whole = np.require(values[tensor], requirements=["C", "W"])
            if whole is not values[tensor]:
                before.append(f"copy {tensor}: the array is not contiguous and writeable")
            values[tensor] = torch.from_numpy(whole)
    match = _FUNCTION.fullmatch(name)
    assert match is not None
    checked = check_arguments(
        int(match[2]), match[1] is not None, values["input"], values["weight"], values["bias"], values["stride"],
        values["padding"], values.get("output_padding", 0), values["groups"], values["dilation"], values["activation"],
        values["residual"], str(policy),
    )  # fmt: skip
    if checked.input.shape[2:] != values["input"].shape[-int(match[2]) :]:
        before.append(f"append zeros to the input, {_times(values['input'])} to {_times(checked.input)}")
    return _from_arguments(checked, policy, tuple(before))


def _read_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> _Call:
    """The call that a module's forward makes."""
    kind = torch.nn.modules.conv._ConvNd
    if not isinstance(module, kind):
        inside = [name for name, part in module.named_modules() if isinstance(part, kind)]
        hint = f"; it holds convolutions, explain one of them: {', '.join(inside[:4])}" if inside else ""
        raise TypeError(f"explain: {type(module).__name__} is no convolution module{hint}")
    if not args or not isinstance(args[0], Tensor):
        raise TypeError(
            f"explain: {type(module).__name__} needs its input, got {args[:1] or 'nothing'}; wanted a tensor"
        )
    x, second = args[0], args[1] if len(args) > 1 else None
    steps: tuple[str, ...] = ()
    given: dict[str, Any] = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups,
                             "padding": module.padding, "activation": getattr(module, "activation", None)}  # fmt: skip
    rank_ = len(module.kernel_size)
    if module.transposed:
        sizes = kwargs.pop("output_size", second)
        fields = [list(v) for v in (module.stride, module.padding, module.kernel_size)]
        given["output_padding"] = tuple(
            module._output_padding(x, sizes, *fields, rank_, list(module.dilation))  # type: ignore[operator]
        )
    else:
        given["residual"] = kwargs.pop("residual", second)
    if module.padding_mode != "zeros":
        pads = list(module._reversed_padding_repeated_twice)
        padded = F.pad(torch.empty(x.shape, dtype=x.dtype, device="meta"), pads, mode=module.padding_mode)
        steps = (f"pad x by {pads} ({module.padding_mode}) with torch, {_times(x)} to {_times(padded)}",)
        x = torch.empty(padded.shape, dtype=x.dtype, device=x.device)
        given["padding"] = 0
    name = f"conv{'_transpose' * module.transposed}{rank_}d"
    return _bind(name, (x, module.weight, module.bias), {**given, **kwargs}, policy, before=steps)


def _from_arguments(call: Arguments, policy: Policy, before: tuple[str, ...]) -> _Call:
    """The problem of a checked call, as the functions would plan it: autocast and autograd taken into account."""
    image, steps, after = call.input, list(before), []
    tensors = {"x" if call.size is None else "y": call.input, "w": call.weight}
    kind = image.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64):
                steps.append(f"autocast {name} {NAMES[tensor.dtype]} to {NAMES[dtype]}")
                tensors[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    wanted = (call.input, call.weight, call.bias, call.residual)
    activation = call.activation
    if activation and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wanted):
        after.append(f"evaluate +{activation} with torch, outside of the operator: its gradient needs its input")
        activation = ""
    a, b = tensors.values()
    size = a.shape[2:] if call.size is None else call.size
    problem = problem_of(
        "fprop" if call.size is None else "dgrad", a, b, size=size, filter=b.shape[2:], stride=call.stride,
        padding=call.padding, dilation=call.dilation, groups=call.groups, precision=policy.precision or "ieee",
        epilogue=epilogue_of(call.bias is not None, call.residual is not None, activation),
    )  # fmt: skip
    place = torch.device("cpu") if kind == "meta" else image.device
    return _Call(problem, place, tensors, tuple(steps), tuple(after))


def _times(tensor: Tensor) -> str:
    return "x".join(str(v) for v in tensor.shape)


# -- the answer -------------------------------------------------------------------------------------------------------


_UNTIMED = (None, None, "")


def _explain(call: _Call, device: Device, place: torch.device, policy: Policy, budget: float) -> Explanation:
    problem = call.problem
    lowered = lower(problem, device, policy)
    facts = _facts(problem, device)
    accepted, refused = ([], []) if problem.is_empty else rank(lowered, device, policy)
    core = as_held(problem, lowered, device, accepted[0].engine) if accepted else lowered
    refusals = tuple(RefusalReport(r.engine.name, r.reasons) for r in refused)
    steps: tuple[str, ...] = ()
    if problem.is_empty:
        steps, why = ("no products: fill with zeros",), "nothing to multiply: no engine is needed"
    elif not accepted:
        why = "no engine takes the problem under these limits" if refused else f"no engine runs on {device.kind}"
    else:
        why = _why(accepted, refused, policy)
        planned = _steps(call, device, policy, accepted[0])
        steps = (*call.before, *_copies(call, core, planned), *planned, *call.after)
    timed = _measure(problem, device, place, policy, accepted, budget) if budget else {}
    candidates = tuple(
        _report(c, problem, facts, c.engine.reasons(lowered, device, c.knobs), *timed.get(c.engine.name, _UNTIMED))
        for c in accepted
    )
    basis = "engine" if policy.engine else accepted[0].source if accepted else "heuristic"
    return Explanation(problem, core, device, policy, facts, steps, candidates, refusals, why, basis)


def _facts(problem: Problem, device: Device) -> Facts:
    flops = problem.flops * (4 if problem.dtypes[0].startswith("complex") else 1)
    rate = device.rate(problem.dtypes[0])
    arithmetic, memory = flops / rate, problem.min_bytes / device.bandwidth
    return Facts(flops, problem.min_bytes, problem.intensity, problem.gemm, max(arithmetic, memory),
                 "arithmetic" if arithmetic > memory else "memory")  # fmt: skip


def _steps(call: _Call, device: Device, policy: Policy, best: Candidate) -> tuple[str, ...]:
    """The steps of the plan, which is not built where its device is not here."""
    if device.kind == "cuda" and not torch.cuda.is_available():
        return steps_of(call.problem, device, best, policy)
    return plan_for(call.problem, device, policy).steps


def _copies(call: _Call, core: Problem, steps: Sequence[str]) -> Iterator[str]:
    """Inputs whose strides are not those that the engine reads, and that the plan does not know of: it only sees
    layouts, and an image next to a channels_last filter counts as channels_last. A cast is a copy already, and may
    close gaps; complex tensors are taken apart anyway."""
    for name, tensor in (call.inputs or {}).items():
        layout, dtype = core.layouts["xwy".index(name)], DTYPES[core.dtypes["xwy".index(name)]]
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.is_complex() or in_layout(like.to(dtype), layout):
            continue
        if not any(step.startswith(f"copy {name} ") for step in steps):
            size = bytes_text(tensor.numel() * tensor.element_size())
            yield f"copy {name} to {layout}, {size}: its strides are {tuple(tensor.stride())}"


def _why(accepted: list[Candidate], refused: Sequence[Any], policy: Policy) -> str:
    if policy.engine:
        return f"engine={policy.engine} asks for it"
    if len(accepted) == 1:
        return f"the only engine that accepts; {len(refused)} refused" if refused else "the only engine"
    those = f"{len(accepted)} engines that accept; {len(refused)} refused"
    if (known := accepted[0].known) is None:
        return f"the cheapest prediction among {those}"
    if known.distance:
        return f"the quickest of {those}, by predictions scaled as its {known} was measured"
    return f"measured to be the quickest of {those}: {known}"


def _report(candidate: Candidate, problem: Problem, facts: Facts, reasons: tuple[str, ...], measured: float | None,
            error: float | None, note: str) -> CandidateReport:  # fmt: skip
    engine, traits = candidate.engine, candidate.traits
    return CandidateReport(
        name=engine.name, summary=engine.summary, predicted=candidate.cost, expected=candidate.expected,
        basis=candidate.source, measured=measured or candidate.measured,
        roofline=facts.floor / (measured or candidate.expected or facts.floor), workspace=candidate.workspace,
        accumulator=traits.accumulator, deterministic=traits.deterministic, batch_invariant=traits.batch_invariant,
        plain_sum=traits.plain_sum, error_bound=allowed_error(problem, traits), error=error, knobs=str(candidate.knobs),
        source=engine.source, note=note, reasons=reasons,
    )  # fmt: skip


def _measure(problem: Problem, device: Device, place: torch.device, policy: Policy, candidates: list[Candidate],
             budget: float) -> dict[str, tuple[float | None, float | None, str]]:  # fmt: skip
    """Time and error of each candidate's whole plan on random data."""
    found: dict[str, tuple[float | None, float | None, str]] = {}
    if not candidates:
        return found
    if place.type == "cuda" and not torch.cuda.is_available():
        return {candidate.engine.name: (None, None, "not run: no CUDA device here") for candidate in candidates}
    inputs = random_inputs(problem, device=place)
    for candidate in candidates:
        name = candidate.engine.name
        if candidate.cost > budget:
            found[name] = (None, None, f"not run: predicted {seconds_text(candidate.cost)}, the budget is {budget:g} s")
            continue
        try:
            plan = make_plan(problem, device, replace(policy, engine=name))
        except UnsupportedProblem as reason:
            found[name] = (None, None, str(reason))
            continue
        call = partial(plan, inputs.a, inputs.b, inputs.operands)
        start = time.perf_counter()
        result = call()
        took = time.perf_counter() - start
        error = error_of(problem, result, inputs, plain_sum=candidate.traits.plain_sum)
        if place.type == "cuda":
            took = race_cuda([[call]], budget=budget / 4, least=3)[0].median
        else:
            if took < budget:
                took = race([call], budget=0.0, least=1, warm_up=0)[0].median
            if took < budget / 4:
                took = race([call], budget=budget, least=3, most=50, warm_up=0)[0].median
        found[name] = (took, error, "")
    return found


# -- as text ----------------------------------------------------------------------------------------------------------


def _short_path(path: str) -> str:
    """Relative to the current directory if it lies below, else as it is."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path


_ROOMY = 116
"""Columns that the full table of candidates needs; below, what can be relied on is told line by line under it."""


def _render(told: Explanation, width: int) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    facts, best = told.facts, told.winner
    roomy = width >= _ROOMY + 12 * any(c.basis == "neighbour" for c in told.candidates)
    m, n, k, batch = facts.gemm
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    rows: list[tuple[str, str]] = [("problem", f"[bold]{_plain(told.problem)}[/bold]")]
    if told.core != told.problem:
        rows.append(("computed as", _plain(told.core)))
    rows.append(("on", _plain(told.device)))
    if str(told.policy):
        rows.append(("limits", _plain(str(told.policy).replace(";", ", "))))
    product = f"{f'{batch} of ' if batch > 1 else ''}{m} x {k} by {k} x {n}"
    least = f"at least {bytes_text(facts.min_bytes)}, {facts.intensity:.1f} FLOP per byte"
    rows.append(("work", f"{count_text(facts.flops, 'FLOP')}, {least}; as a matrix product {product}"))
    rows.append(("roofline", f"bound by {facts.bound}: {seconds_text(facts.floor)} at the machine's ceiling"))
    if best:
        shown = f"[bold green]{best.name}[/bold green]: {_plain(best.summary)}"
        rows += [("runs", shown), ("why", _plain(told.why)), ("read", _link(best.source))]
    else:
        rows.append(("runs", f"[bold red]nothing[/bold red]: {_plain(told.why)}"))
    for label, value in rows:
        head.add_row(label, value)
    yield head
    if told.steps:
        yield Text("\nsteps", style="bold")
        for at, step in enumerate(told.steps, 1):
            costly = step.startswith(("copy", "pad", "append"))
            yield Padding(Text(f"{at}. {step}", style="yellow" if costly else ""), (0, 0, 0, 2))
    if told.candidates:
        yield Text("\ncandidates", style="bold")
        yield Padding(_candidate_table(told, roomy=roomy), (0, 0, 0, 2))
    if not roomy:
        for c in told.candidates:
            knobs = "" if c.knobs == "-" else f"; {c.knobs}"
            yield Padding(Text(f"{c.name}: adds in {c.accumulator}, same bits: {_same_bits(c)}{knobs}"), (0, 0, 0, 2))
    if best:
        for reason in best.reasons:
            yield Padding(Text(f"{best.name}: {reason}", style="dim"), (0, 0, 0, 2))
    notes = [f"{c.name}: {c.note}" for c in told.candidates if c.note]
    fastest = told.fastest
    if best and fastest and fastest is not best and best.measured and fastest.measured:
        times = f"{best.measured / fastest.measured:.2f} times as fast as {best.name}"
        notes.append(f"{fastest.name} was measured {times}; engine={fastest.name!r} runs it")
    for note in notes:
        yield Padding(Text(note, style="yellow"), (0, 0, 0, 2))
    if told.refusals:
        yield Text("\nrefused", style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="red", no_wrap=True)
        table.add_column()
        for refusal in told.refusals:
            table.add_row(refusal.name, Text("\n".join(refusal.reasons)))
        yield Padding(table, (0, 0, 0, 2))


def _same_bits(candidate: CandidateReport) -> str:
    """When the same inputs give the same bits: in each run, and in any batch as well."""
    if not candidate.deterministic:
        return "no"
    return "any batch" if candidate.batch_invariant else "each run"


def _candidate_table(told: Explanation, *, roomy: bool) -> RenderableType:
    from rich import box
    from rich.table import Table

    checked, measured = any(c.error is not None for c in told.candidates), told.fastest is not None
    scaled = any(c.basis == "neighbour" for c in told.candidates)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim", padding=(0, int(roomy)))
    table.add_column("engine", no_wrap=True)
    shown = {"expected": scaled, "measured": measured, "error": checked}
    numbers = ("predicted", "expected", "measured", "roofline", "workspace", "error", "bound")
    for name in (n for n in numbers if shown.get(n, True)):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("adds in", "same bits", "knobs") if roomy else ():
        table.add_column(name, no_wrap=name != "knobs", overflow="fold")
    for at, c in enumerate(told.candidates):
        cells = [c.name, seconds_text(c.predicted)]
        cells += [seconds_text(c.expected)] if scaled else []
        cells += [seconds_text(c.measured) if c.measured is not None else "-"] if measured else []
        cells += [percent_text(c.roofline), bytes_text(c.workspace) if c.workspace else "none"]
        if checked:
            wrong = c.error is not None and not c.error <= c.error_bound
            text = "-" if c.error is None else f"{c.error:.1e}"
            cells.append(f"[bold red]{text}[/bold red]" if wrong else text)
        cells.append(f"{c.error_bound:.1e}")
        cells += [c.accumulator, _same_bits(c), _plain(c.knobs)] if roomy else []
        table.add_row(*cells, style="green" if at == 0 else "")
    return table


def _plain(value: object) -> str:
    """Text that rich is not to read as markup."""
    from rich.markup import escape

    return escape(str(value))


def _link(path: str) -> str:
    target = Path(os.path.abspath(path)).as_uri()
    return f"[link={target}]{_plain(_short_path(path))}[/link]"
