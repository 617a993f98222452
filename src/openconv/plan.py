"""Plan: one compiled choice. It lowers a problem to what engines compute, runs it, and can say what it does.

Lowering, each rule visible in ``steps``:

- f16, bf16, e4m3 and e5m2 are computed in f32 on the CPU, from casts of the inputs to a cast of the result, unless the
  engine that was chosen reads and writes f16 and bf16 itself (CUDA engines take all of them as they are);
- complex problems become four real ones: (a + ib)(c + id) = (ac - bd) + i(ad + bc);
- inputs whose memory is in neither layout are copied into one;
- an epilogue is evaluated by torch behind the engine, except for a leading bias where the engine adds it itself; CUDA
  engines compute the whole of it, except behind integers and complex numbers;
- a prologue, several results of the epilogue and statistics are left to the engine where one of the device computes
  them, else torch computes them before and behind it;
- a problem with an empty tensor needs no engine: its sums are zeros.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .cpu.device import cpu_device
from .cpu.memory import FRESH, LARGE, borrow, give_back, large_tensor
from .cuda.device import CudaDevice, cuda_device, device_for
from .cuda.launch import Single
from .device import Device
from .engine import Engine, Runner, when_engines_change
from .epilogue import IDENTITY, Epilogue, Finish
from .evaluate import before, evaluate, evaluator_, finisher_, statistics
from .prepared import kept, prepared
from .problem import Problem
from .select import Candidate, Policy, choose, rank
from .tensors import DTYPES, empty, guards, in_layout, memory_format, to_layout
from .units import bytes_text

__all__ = [
    "Plan",
    "as_held",
    "compute_dtype",
    "device_of",
    "forget_plans",
    "lower",
    "make_plan",
    "plan_cache",
    "plan_for",
    "remember",
    "steps_of",
]

_PARTS = {"complex32": "f32", "complex64": "f32", "complex128": "f64"}
_COMPUTE = {
    "f16": "f32", "bf16": "f32", "e4m3": "f32", "e5m2": "f32",
    "complex32": "f32", "complex64": "f32", "complex128": "f64",
}  # fmt: skip


def device_of(device: torch.device) -> Device:
    """The Device that stands for a torch device, with the threads torch uses now."""
    if device.type == "cpu":
        return cpu_device(torch.get_num_threads())
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return device_for("sm_90a")  # what would be chosen, for who has none
        return cuda_device(torch.cuda.current_device() if device.index is None else device.index)
    return Device(kind=device.type, name=str(device))


def compute_dtype(name: str) -> str:
    """The real dtype in which a CPU engine computes tensors of this dtype."""
    return _COMPUTE.get(name, name)


def lower(problem: Problem, device: Device, policy: Policy | None = None) -> Problem:
    """The real problem that an engine sees: computing dtypes, one layout for images, and of what is fused that which
    the engines of the device take, under a policy if one is given."""
    if problem.is_fused:
        if device.kind == "cuda" and problem.result_dtype[0] in "fb":
            fused = _lower(problem, device)
            if rank(fused, device, policy or Policy(tuning="off"))[0]:
                return fused
        problem = _apart(problem, device)
    return _lower(problem, device)


def _apart(problem: Problem, device: Device) -> Problem:
    """What is left for an engine where torch computes prologue, statistics and several results of an epilogue: these
    from sums, which the CPU has in f32."""
    if not problem.is_fused:
        return problem
    plain = problem.with_(prologue=IDENTITY, stats=False)
    if _behind(problem, device):
        dtypes = list(problem.dtypes)
        if device.kind == "cpu" and problem.result_dtype in ("f16", "bf16"):
            dtypes[problem.result] = "f32"
        plain = plain.with_(epilogue=IDENTITY, dtypes=tuple(dtypes))
    return plain


def _behind(problem: Problem, device: Device) -> bool:
    """Whether torch computes the whole epilogue where the problem is not fused. The CPU's engines leave all but a bias
    to torch as it is."""
    return bool(problem.epilogue.also) or (device.kind == "cuda" and not problem.epilogue.is_basic)


def _lower(problem: Problem, device: Device) -> Problem:
    if device.kind not in ("cpu", "cuda"):
        return problem
    cuda, complex_ = device.kind == "cuda", problem.dtypes[0].startswith("complex")
    x, w, y = (_PARTS.get(name, name) if cuda else compute_dtype(name) for name in problem.dtypes)
    images = filters = "nchw"
    if problem.rank > 1:
        images, filters = problem.layouts[2 if problem.direction == "fprop" else 0], problem.layouts[1]
    if cuda:
        kept = IDENTITY if complex_ or y[0] in "iu" else problem.epilogue
    else:
        kept = IDENTITY if complex_ else Finish.of(problem.epilogue, only_bias=True).epilogue
    return problem.with_(dtypes=(x, w, y), layouts=(images, filters, images), epilogue=kept)


@dataclass(frozen=True, eq=False)
class Plan:
    """A problem, the candidate chosen for it, and the compiled call: ``plan(a, b, operands)``.

    ``a`` and ``b`` are the two inputs of the pass; ``operands`` holds the prologue's operands and then the epilogue's,
    in their own order. What comes back is the result, or a tuple of it, the epilogue's other results, and of statistics
    the sum and the sum of squares of each channel.

    ``candidate`` is None where there is nothing to multiply. ``lean(a, b, *operands)``, where a GPU's engine alone
    computes the result, is for tensors that lie as that engine takes them (:meth:`takes`); without operands in the
    epilogue it passes over what is given in their place. ``into(a, b, operands, results, workspace)``, where the engine
    alone computes the problem, fills tensors that are given: everything lies as the problem says, vectors of a prologue
    are of f32 and operands of the result's dtype; ``workspace`` has ``candidate.workspace`` bytes, None for none.
    ``direct`` is there where ``into`` is one launch on the addresses of ``a``, ``b``, the result and the operands.
    """

    problem: Problem
    core: Problem
    device: Device
    policy: Policy
    candidate: Candidate | None
    steps: tuple[str, ...]
    call: Callable[[Tensor, Tensor, Sequence[Tensor]], Any]
    lean: Callable[..., Tensor] | None = None
    into: Callable[..., None] | None = None
    direct: Single | None = None

    def __call__(self, a: Tensor, b: Tensor, operands: Sequence[Tensor] = ()) -> Any:
        return self.call(a, b, operands)

    def takes(self, a: Tensor, b: Tensor, operands: Sequence[Tensor] = ()) -> bool:
        """Whether inputs and operands are in the layouts of the engine."""
        vectors = ["nchw"] * len(self.problem.prologue.operands)
        layouts = *_input_layouts(self.core), *vectors, *_operand_layouts(self.core)
        return all(in_layout(value, layout) for value, layout in zip((a, b, *operands), layouts, strict=True))

    @property
    def candidate_name(self) -> str:
        """The engine and its knobs."""
        return f"{self.candidate.engine.name} [{self.candidate.knobs}]" if self.candidate else "no engine"


def make_plan(problem: Problem, device: Device, policy: Policy, candidate: Candidate | None = None) -> Plan:
    """Choose, unless a candidate is given, build and wire up. UnsupportedProblem if no engine takes it."""
    core = lower(problem, device, policy) if candidate is None else _core(problem, device, candidate)
    if problem.is_empty:
        call = _around(problem, _empty_call(_apart(problem, device)), device)
        return Plan(problem, core, device, policy, None, ("no products: fill with zeros",), call)
    candidate = candidate or choose(core, device, policy)
    engine = candidate.engine
    held = as_held(problem, core, device, engine)
    if held is not core:  # images that are read in place in f32 may need room of their own
        core, needed = held, engine.workspace_bytes(held, device, candidate.knobs)
        candidate = replace(candidate, workspace=needed)
    inner = problem if core.is_fused else _apart(problem, device)
    finish = _taken(inner, core, engine)
    asked = core.with_(epilogue=finish.epilogue) if engine.takes_finish else core
    built = engine.build(asked, device, candidate.knobs)
    runner = built.run if isinstance(built, Single) else built
    lean = None
    if core.is_fused:
        call = _fused_call(core, candidate, runner)
    else:
        if device.kind == "cpu" and inner.dtypes != core.dtypes and not inner.dtypes[0].startswith("complex"):
            wired = _cast_call(inner, core, candidate, runner, finish)
        else:
            real = _real_call(core, candidate, runner, device)
            wired = _wire(inner, core, real, finish, engine.takes_epilogue)
        call = _around(problem, wired, device)
    if isinstance(device, CudaDevice) and candidate.workspace:
        call = _within_memory(call, problem, device, policy, candidate)
    elif isinstance(device, CudaDevice) and core == problem and not core.is_fused and finish == Finish():
        lean = _lean_call(core, runner, device)
        if not problem.epilogue.operands:
            call = _bare_call(core, lean)
    into = _into_call(problem, core, runner, finish, engine)
    steps = _all_steps(problem, core, device, candidate)
    alone = not problem.epilogue.also and not problem.stats
    takes_all = core.is_fused or engine.takes_epilogue or not problem.epilogue.operands
    direct = built if into is not None and isinstance(built, Single) and alone and takes_all else None
    return Plan(problem, core, device, policy, candidate, steps, call, lean, into, direct)


def _taken(problem: Problem, core: Problem, engine: Engine) -> Finish:
    """What the engine computes of the epilogue as it stores, and what torch computes behind it."""
    if engine.takes_epilogue and not core.epilogue.is_identity:
        return Finish()
    if not engine.takes_bias or problem.dtypes[0].startswith("complex"):
        return Finish(rest=problem.epilogue)
    return Finish.of(problem.epilogue, only_bias=not engine.takes_finish)


def steps_of(problem: Problem, device: Device, candidate: Candidate, policy: Policy | None = None) -> tuple[str, ...]:
    """What a call of the candidate does, in order, one phrase each; nothing is built."""
    core = as_held(problem, _core(problem, device, candidate, policy), device, candidate.engine)
    return _all_steps(problem, core, device, candidate)


def as_held(problem: Problem, core: Problem, device: Device, engine: Engine) -> Problem:
    """What an engine of the CPU computes, with the dtypes of the tensors where it reads and writes those itself. Torch
    needs the sums in f32 if it evaluates more of an epilogue."""
    if device.kind != "cpu" or not engine.takes_low:
        return core
    inner = _apart(problem, device)
    if set(inner.dtypes) not in ({"f16"}, {"bf16"}) or not _taken(inner, core, engine).rest.is_identity:
        return core
    held = core.with_(dtypes=inner.dtypes)
    return core if next(iter(engine.refusals(held, device)), None) else held


def _all_steps(problem: Problem, core: Problem, device: Device, candidate: Candidate) -> tuple[str, ...]:
    """The steps around the engine's core, with those of torch where it is not fused."""
    inner = problem if core.is_fused else _apart(problem, device)
    finish = _taken(inner, core, candidate.engine)
    steps = _steps(inner, core, candidate, finish)
    if inner is not problem:
        if not problem.prologue.is_identity:
            steps.insert(0, f"compute x{problem.prologue} with torch")
        if _behind(problem, device):
            steps.append(f"evaluate {problem.epilogue} with torch")
        if problem.stats:
            steps.append("add up y and its squares, channel by channel, with torch")
    return tuple(steps)


def _core(problem: Problem, device: Device, candidate: Candidate, policy: Policy | None = None) -> Problem:
    """What the candidate's engine computes of the problem."""
    core = lower(problem, device, policy)
    return core if candidate.engine.takes_fusion or not core.is_fused else _lower(_apart(problem, device), device)


def _within_memory(call: Any, problem: Problem, device: Device, policy: Policy, candidate: Candidate) -> Any:
    """The call, or where its workspace cannot be had, that of an engine or of knobs which need less."""
    smaller: list[Plan] = []

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Any:
        try:
            out = call(a, b, operands)
        except torch.OutOfMemoryError:
            if not smaller:
                less = policy.but(max_workspace=candidate.workspace // 2)
                smaller.append(make_plan(problem, device, less))
                missing = f"{candidate.engine.name} found no {bytes_text(candidate.workspace)} of workspace"
                now = f"'{problem}' now runs with {smaller[0].candidate_name}"
                warnings.warn(f"{missing} on {device.name}; {now}", RuntimeWarning, stacklevel=2)
            out = smaller[0].call(a, b, operands)
        return out

    return run


def _steps(problem: Problem, core: Problem, candidate: Candidate, finish: Finish) -> list[str]:
    """What happens in a call, in order, one phrase each."""
    names = ("x", "w", "y")
    steps = [
        f"cast {name} {have} to {want}"
        for at, (name, have, want) in enumerate(zip(names, problem.dtypes, core.dtypes, strict=True))
        if at != problem.result and have != want and not have.startswith("complex")
    ]
    for at, (name, have, want) in enumerate(zip(names, problem.layouts, core.layouts, strict=True)):
        if at != problem.result and have != want:
            steps.append(f"copy {name} from {have} to {want}")
    steps += candidate.engine.copies(core, candidate.knobs)
    times = "four times, on real and imaginary parts, " if problem.dtypes[0].startswith("complex") else ""
    fused = f" with {finish.bias}" if finish.bias else ""
    if finish.epilogue != core.epilogue and not finish.epilogue.is_identity:
        fused = f" with {finish.epilogue}"
    if candidate.engine.takes_epilogue and not core.epilogue.is_identity:
        fused = f" with {core.epilogue}"
    if core.is_fused:
        fused = f" with {core.fusion}"
    if candidate.engine.takes_low and core.dtypes[0] in ("f16", "bf16"):
        fused += f" on {core.dtypes[0]}, in f32 between loads and stores"
    told = candidate.engine.told(core, candidate.knobs)
    name = candidate.engine.name
    steps.append(f"run {name}: {times}{told}{fused}" if told else f"run {name} {times}[{candidate.knobs}]{fused}")
    if not finish.rest.is_identity:
        steps.append(f"evaluate {finish.rest} with torch")
    have, want = core.result_dtype, problem.result_dtype
    if have != want and not want.startswith("complex"):
        steps.append(f"cast the result {have} to {want}")
    return steps


def _real_call(core: Problem, candidate: Candidate, runner: Runner, device: Device) -> Callable[..., Tensor]:
    """Allocate the result and the workspace, and run the engine on real tensors in the core's layouts."""
    shape, dtype = core.result_shape, DTYPES[core.result_dtype]
    # Strides that are known beforehand make an allocation cheaper by half a microsecond.
    strides = empty(shape, dtype, core.layouts[core.result], torch.device("meta")).stride()
    workspace_bytes, size = candidate.workspace, dtype.itemsize * prod(shape)
    large = device.kind == "cpu" and size >= LARGE
    roomy = device.kind == "cpu" and workspace_bytes >= FRESH
    lent = device.kind == "cpu" and 0 < workspace_bytes < FRESH
    quick = _empty_cpu if device.kind == "cpu" else None

    def run(a: Tensor, b: Tensor, *given: Any) -> Tensor:
        if large:
            out = large_tensor(shape, strides, dtype)
        elif quick is not None:
            out = quick(shape, strides, dtype)
        else:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=a.device)
        if lent:
            block = borrow(workspace_bytes)
            runner(a, b, out, block[:workspace_bytes], *given)
            give_back(block)
            return out
        workspace: Tensor | None = None
        if roomy:
            workspace = large_tensor((workspace_bytes,), (1,), torch.uint8)
        elif workspace_bytes:
            workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=a.device)
        runner(a, b, out, workspace, *given)
        return out

    return run


def _fused_call(core: Problem, candidate: Candidate, runner: Runner) -> Callable[..., Any]:
    """The whole call of an engine that takes the problem as it is, with more operands and results than others."""
    shape, dtype = core.result_shape, DTYPES[core.result_dtype]
    strides = empty(shape, dtype, core.layouts[core.result], torch.device("meta")).stride()
    a_layout, b_layout = _input_layouts(core)
    vectors = len(core.prologue.operands)
    kinds = [(torch.float64 if core.dtypes[0] == "f64" else torch.float32, torch.contiguous_format)] * vectors
    kinds += [(dtype, memory_format(core.rank + 2, layout)) for layout in _operand_layouts(core)]
    workspace_bytes, results = candidate.workspace, 1 + len(core.epilogue.also)
    sums = torch.float64 if core.result_dtype == "f64" else torch.float32

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Any:
        values = tuple([
            value.to(kind).contiguous(memory_format=form)
            for (kind, form), value in zip(kinds, operands, strict=True)
        ])  # fmt: skip
        made = [torch.empty_strided(shape, strides, dtype=dtype, device=a.device) for _ in range(results)]
        if core.stats:
            made += [torch.empty(core.k, dtype=sums, device=a.device) for _ in range(2)]
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=a.device) if workspace_bytes else None
        more = (tuple(made[1:]),) if len(made) > 1 else ()
        runner(to_layout(a, a_layout), to_layout(b, b_layout), made[0], workspace, values, *more)
        return tuple(made) if more else made[0]

    return run


def _into_call(
    problem: Problem, core: Problem, runner: Runner, finish: Finish, engine: Engine
) -> Callable[..., None] | None:  # fmt: skip
    """``Plan.into``; None where torch has a part in it."""
    if (core.dtypes, core.layouts, core.is_fused) != (problem.dtypes, problem.layouts, problem.is_fused):
        return None
    if core.is_fused:

        def fused(a: Tensor, b: Tensor, operands: Any, results: Any, workspace: Tensor | None) -> None:
            more = (tuple(results[1:]),) if len(results) > 1 else ()
            runner(a, b, results[0], workspace, tuple(operands), *more)

        return fused
    if not finish.rest.is_identity:
        return None
    names = [operand.name for operand in problem.epilogue.operands]
    at, whole = names.index(finish.bias) if finish.bias else -1, engine.takes_epilogue
    residual_at = names.index(finish.residual) if finish.residual else -1

    def run(a: Tensor, b: Tensor, operands: Any, results: Any, workspace: Tensor | None) -> None:
        given = tuple(operands) if whole else (operands[at] if at >= 0 else None)
        if residual_at >= 0:
            runner(a, b, results[0], workspace, given, operands[residual_at])
        else:
            runner(a, b, results[0], workspace, given)

    return run


def _around(problem: Problem, call: Any, device: Device) -> Any:
    """The call of what :func:`_apart` leaves, with torch's part of it before and behind."""
    if not problem.is_fused:
        return call
    prologue, epilogue = problem.prologue, problem.epilogue
    first, names = len(prologue.operands), [operand.name for operand in epilogue.operands]
    dtype, layout = DTYPES[problem.result_dtype], problem.layouts[problem.result]
    results, apart = [Epilogue(expr) for expr in (epilogue.expr, *epilogue.also)], _behind(problem, device)

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Any:
        a, behind = before(prologue, a, operands[:first]), operands[first:]
        if not apart:
            made = [call(a, b, behind)]
        else:
            sums: Tensor = call(a, b, ())
            if sums.dtype in (torch.float16, torch.bfloat16, torch.complex32):
                sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
            values = {name: value.to(sums.dtype) for name, value in zip(names, behind, strict=True)}
            made = []
            for each in results:
                value = to_layout(evaluate(each, sums, values).to(dtype), layout)
                made.append(value.clone() if any(value is other for other in made) else value)
        if problem.stats:
            made += statistics(made[0])
        return tuple(made) if len(made) > 1 else made[0]

    return run


def _input_layouts(problem: Problem) -> tuple[str, str]:
    first, second = problem.inputs
    return problem.layouts[first], problem.layouts[second]


def _operand_layouts(problem: Problem) -> list[str]:
    """Of the epilogue's operands: the result's for one of its shape."""
    whole = problem.layouts[problem.result]
    return [whole if operand.kind == "tensor" else "nchw" for operand in problem.epilogue.operands]


# What compiled code of PyTorch allocates with: on the current device, past the dispatcher, in half the time.
_empty_cuda = getattr(guards, "_empty_strided_cuda", None)
_empty_cpu = getattr(guards, "_empty_strided_cpu", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def _lean_call(core: Problem, runner: Runner, device: CudaDevice) -> Callable[..., Tensor]:
    """``Plan.lean``: what is left of :func:`_wire` and :func:`_real_call` where there is nothing to look at. Those take
    as long as launching the kernel."""
    shape, dtype, index = core.result_shape, DTYPES[core.result_dtype], device.index
    strides = empty(shape, dtype, core.layouts[core.result], torch.device("meta")).stride()
    allocate, current, fused = _empty_cuda, _current_device, bool(core.epilogue.operands)

    def run(a: Tensor, b: Tensor, *operands: Tensor) -> Tensor:
        if allocate is None or current is None or current() != index:
            out = torch.empty_strided(shape, strides, dtype=dtype, device=a.device)
        else:
            out = allocate(shape, strides, dtype)
        runner(a, b, out, None, operands if fused else ())
        return out

    return run


def _bare_call(core: Problem, lean: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same for inputs that may lie otherwise."""
    a_layout, b_layout = _input_layouts(core)
    axes = len(core.result_shape)
    a_format, b_format = memory_format(axes, a_layout), memory_format(axes, b_layout)

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        if not a.is_contiguous(memory_format=a_format):
            a = to_layout(a, a_layout)
        if not b.is_contiguous(memory_format=b_format):
            b = to_layout(b, b_layout)
        return lean(a, b)

    return run


def _wire(problem: Problem, core: Problem, real: Any, finish: Finish, takes_epilogue: bool) -> Any:
    """The whole call around the engine's: casts, layouts, complex parts, epilogue."""
    bias, rest = finish.bias, finish.rest
    (a_dtype, a_layout), (b_dtype, b_layout) = ((DTYPES[core.dtypes[at]], core.layouts[at]) for at in problem.inputs)
    out_dtype, core_dtype = DTYPES[problem.result_dtype], DTYPES[core.result_dtype]
    out_layout = problem.layouts[problem.result]
    names = [operand.name for operand in problem.epilogue.operands]
    bias_at = names.index(bias) if bias else -1
    residual_at = names.index(finish.residual) if finish.residual else -1
    complex_ = problem.dtypes[0].startswith("complex")
    behind = evaluator_(rest)
    same = out_dtype == core_dtype and core.dtypes == problem.dtypes and not complex_
    plain = same and rest.is_identity
    activate = finisher_(rest) if same and out_dtype.is_floating_point and not takes_epilogue else None
    a_format, b_format = (memory_format(problem.rank + 2, layout) for layout in (a_layout, b_layout))
    forms = [memory_format(problem.rank + 2, layout) for layout in _operand_layouts(core)]
    none = () if takes_epilogue else None
    result_format = memory_format(problem.rank + 2, core.layouts[core.result])
    low = core.dtypes[0] in ("f16", "bf16")

    def fused(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        values = tuple([
            value if value.dtype is out_dtype and value.is_contiguous(memory_format=form)
            else value.to(out_dtype).contiguous(memory_format=form)
            for form, value in zip(forms, operands, strict=True)
        ])  # fmt: skip
        out: Tensor = real(to_layout(a, a_layout), to_layout(b, b_layout), values)
        return out

    def simple(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        vector = operands[bias_at].contiguous() if bias_at >= 0 else None
        if low:  # a cast would resolve them
            a, b = a.resolve_neg(), b.resolve_neg()
        if not a.is_contiguous(memory_format=a_format):
            a = to_layout(a, a_layout)
        if not b.is_contiguous(memory_format=b_format):
            b = to_layout(b, b_layout)
        if residual_at >= 0:
            residual = operands[residual_at]
            if not residual.is_contiguous(memory_format=result_format):
                residual = residual.contiguous(memory_format=result_format)
            made: Tensor = real(a, b, vector, residual)
            return made
        out: Tensor = real(a, b, vector)
        return out

    # An activation behind the engine, on its result where that lies.
    def activated(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        assert activate is not None
        return activate(simple(a, b, operands))

    def parts(a: Tensor, dtype: torch.dtype, layout: str) -> list[Tensor]:
        a = a.resolve_conj()
        return [to_layout(part.to(dtype), layout) for part in (a.real, a.imag)]

    def general(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        values = dict(zip(names, operands, strict=True))
        if complex_:
            (ar, ai), (br, bi) = parts(a, a_dtype, a_layout), parts(b, b_dtype, b_layout)
            re, im = real(ar, br, none).sub_(real(ai, bi, none)), real(ar, bi, none).add_(real(ai, br, none))
            values = {name: v.to(torch.complex128 if core_dtype == torch.float64 else torch.complex64)
                      for name, v in values.items()}  # fmt: skip
            return to_layout(evaluate(rest, torch.complex(re, im), values).to(out_dtype), out_layout)
        values = {name: value.to(core_dtype) for name, value in values.items()}
        given = [values[bias].contiguous() if bias else none]
        if finish.residual:
            given.append(values[finish.residual].contiguous(memory_format=result_format))
        out = real(to_layout(a.to(a_dtype), a_layout), to_layout(b.to(b_dtype), b_layout), *given)
        return to_layout(behind(out, values).to(out_dtype), out_layout)  # an operand may have led to its own strides

    if takes_epilogue and plain:
        return fused
    return simple if plain else general if activate is None else activated


def _cast_call(problem: Problem, core: Problem, candidate: Candidate, runner: Runner, finish: Finish) -> Any:
    """The whole call of a problem that the CPU computes in another dtype than that of its tensors.

    What is computed with, the sums and the workspace lie in memory that is kept from call to call. Filters of a fprop
    are kept as they are computed with, so that engines can keep what they make of those.
    """
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    dtypes = [DTYPES[name] for name in core.dtypes]
    strides = [
        empty(shape, dtype, layout, torch.device("meta")).stride()
        for shape, dtype, layout in zip(shapes, dtypes, core.layouts, strict=True)
    ]
    (first, second), result = problem.inputs, problem.result
    out_dtype, out_layout = DTYPES[problem.result_dtype], problem.layouts[result]
    out_strides = empty(shapes[result], out_dtype, out_layout, torch.device("meta")).stride()
    large = out_dtype.itemsize * prod(shapes[result]) >= LARGE
    names = [operand.name for operand in problem.epilogue.operands]
    behind, keeps, bias = evaluator_(finish.rest), problem.direction == "fprop", finish.bias
    form = memory_format(problem.rank + 2, core.layouts[result])
    ours = [at for at in range(3) if core.dtypes[at] != problem.dtypes[at] and not (keeps and at == 1)]
    places, size = {}, _lines(candidate.workspace)
    for at in ours:
        each = dtypes[at].itemsize
        places[at], size = size // each, size + _lines(each * prod(shapes[at]))

    def cast(value: Tensor, at: int, memory: Tensor) -> Tensor:
        """The input as it is computed with."""
        if value.dtype is dtypes[at] or not in_layout(value, core.layouts[at]):
            return to_layout(value.to(dtypes[at]), core.layouts[at])
        if at in places:
            return room(at, memory).copy_(value)
        key = "cast", dtypes[at]
        if (made := kept(value, key)) is not None:
            return made
        return prepared(value, key, lambda out: out.copy_(value), torch.empty_like(value, dtype=dtypes[at]))

    def room(at: int, memory: Tensor) -> Tensor:
        storage = memory.untyped_storage()
        return torch.empty(0, dtype=dtypes[at]).set_(storage, places[at], shapes[at], strides[at])

    def fresh() -> Tensor:
        if large:
            return large_tensor(shapes[result], out_strides, out_dtype)
        return torch.empty_strided(shapes[result], out_strides, dtype=out_dtype)

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        values = {name: value.to(dtypes[result]) for name, value in zip(names, operands, strict=True)}
        vector = values[bias].contiguous() if bias else None
        a, b = a.detach() if a.requires_grad else a, b.detach() if b.requires_grad else b
        if size >= FRESH:
            return within(a, b, values, vector, large_tensor((size,), (1,), torch.uint8))
        memory = borrow(size)
        out = within(a, b, values, vector, memory)
        give_back(memory)
        return out

    def within(a: Tensor, b: Tensor, values: dict[str, Tensor], vector: Tensor | None, memory: Tensor) -> Tensor:
        sums = room(result, memory) if result in places else fresh()
        workspace = memory[: candidate.workspace] if candidate.workspace else None
        more = (values[finish.residual].contiguous(memory_format=form),) if finish.residual else ()
        runner(cast(a, first, memory), cast(b, second, memory), sums, workspace, vector, *more)
        made = behind(sums, values)
        if result in places:
            return fresh().copy_(made)
        return to_layout(made.to(out_dtype), out_layout)  # an operand may have led to its own strides

    return run


def _lines(size: int) -> int:
    """So many bytes, in whole lines of the cache."""
    return -(-size // 64) * 64


def _empty_call(problem: Problem) -> Any:
    shape, dtype, layout = problem.result_shape, DTYPES[problem.result_dtype], problem.layouts[problem.result]
    names = [operand.name for operand in problem.epilogue.operands]

    def run(a: Tensor, b: Tensor, operands: Sequence[Tensor]) -> Tensor:
        out = empty(shape, dtype, layout, a.device).zero_()
        return to_layout(evaluate(problem.epilogue, out, dict(zip(names, operands, strict=True))).to(dtype), layout)

    return run


_lock = threading.Lock()
_MOST = 4096
_Value = TypeVar("_Value")
_caches: list[dict[Any, Any]] = []


def plan_cache() -> dict[Any, Any]:
    """A cache of what follows from choices, for use with :func:`remember`: emptied by :func:`forget_plans`."""
    _caches.append({})
    return _caches[-1]


def forget_plans() -> None:
    """Have every problem planned anew, as after a change of the tuning database or of the engines there are."""
    with _lock:
        for cache in _caches:
            cache.clear()


when_engines_change(forget_plans)

_plans: dict[tuple[Problem, Device, Policy], Plan] = plan_cache()


def remember(cache: dict[Any, _Value], key: Any, value: _Value) -> _Value:
    """Put a value into a cache of bounded size, from which the oldest goes first. Of two threads that put at once, both
    get the value of the first."""
    with _lock:
        while len(cache) >= _MOST:
            del cache[next(iter(cache))]
        return cache.setdefault(key, value)


def plan_for(problem: Problem, device: Device, policy: Policy) -> Plan:
    """The plan from the cache, or a new one."""
    key = (problem, device, policy)
    plan = _plans.get(key)
    return plan if plan is not None else remember(_plans, key, make_plan(problem, device, policy))
