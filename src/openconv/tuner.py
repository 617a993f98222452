"""tune: measure the candidates of problems, or of all convolutions that a model calls, and remember the results.

>>> openconv.tune(model, torch.randn(1, 3, 224, 224), budget="2m")
>>> openconv.tune(["fprop n8 c64 h56 w56 k64 r3 s3 pad1 f32 nchw"])
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .autotune import MOST, measure_and_keep, shortlist
from .device import Device
from .engine import UnsupportedProblem
from .plan import device_of, forget_plans, lower
from .problem import Problem
from .select import Policy, choose, current_policy, search, version_of
from .select.database import Database, Entry, Store, user_store
from .tensors import NAMES
from .torch_ops import epilogue_of, problem_of
from .units import seconds_text

__all__ = ["Tuned", "convolutions_of", "parse_seconds", "tune"]


@dataclass(frozen=True)
class Tuned:
    """What came of one problem: its entry, how it was come by (``measured``, ``known``, ``no choice``, ``unsupported``,
    ``no memory`` or ``no time``), and the engine that predictions would have chosen."""

    problem: Problem
    state: str
    entry: Entry | None = None
    heuristic: str = ""

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than what predictions would have chosen, as far as that was measured."""
        if self.entry is None:
            return None
        took = [m.seconds for m in self.entry.measured if f"{m.engine} {m.knobs}" == self.heuristic]
        return took[0] / self.entry.best.seconds if took else None

    def __str__(self) -> str:
        """One line: the problem, its state, and the fastest engine with its time."""
        if self.entry is None:
            return f"{self.problem}: {self.state}"
        best = self.entry.best
        more = f", {self.gain:.2f} times as fast as what predictions choose" if self.gain else ""
        return f"{self.problem}: {self.state}, {best.engine} [{best.knobs}] {seconds_text(best.seconds)}{more}"


def tune(
    what: Problem | str | Iterable[Problem | str] | torch.nn.Module, *example: Any, budget: float | str = "60s",
    device: str | torch.device | None = None, backward: bool = False, again: bool = False, store: Store | None = None,
    progress: Callable[[int, int, Tuned], None] | None = None,
) -> list[Tuned]:  # fmt: skip
    """Measure the candidates of problems and remember the results in the user's database.

    ``what`` is a problem, a list of them, or a model, whose ``example`` inputs follow: the convolutions that it calls
    are recorded, those of torch and of openconv alike, and with ``backward`` those of the gradients of its sum too.
    They are measured on ``device``; if that is not given, where the model and its inputs are, else on the CPU.
    ``budget`` bounds the whole: seconds, or a text such as ``"90s"``, ``"5m"``. What is left is shared out evenly among
    the problems to come. Problems that the user's database, or ``store``, has already are passed over unless ``again``
    is said, so that a second call goes on where the first one ended. ``progress`` is told of each problem: how many are
    done, of how many, and what came of it.

    Returns one :class:`Tuned` for each problem. On Ctrl-C what was measured stays in the database. OSError, before
    anything is measured, where that cannot be written.
    """
    place = torch.device(device or _place_of(what, example))
    if isinstance(what, torch.nn.Module):
        problems = convolutions_of(what, *example, backward=backward)
    elif example:
        raise TypeError(f"tune: {type(what).__name__} takes no example inputs; they belong to a torch.nn.Module")
    else:
        given = [what] if isinstance(what, Problem | str) else list(what)
        problems = [Problem.parse(p) if isinstance(p, str) else p for p in given]
    end, machine = time.perf_counter() + parse_seconds(budget), device_of(place)
    policy = replace(current_policy(), tuning="measure")
    done: list[Tuned] = []
    store = store or user_store()
    writable = cache(partial(store.update, Database()))
    cores = list(dict.fromkeys(lower(p, machine) for p in problems))
    try:
        for at, core in enumerate(cores):
            share = (end - time.perf_counter()) / (len(cores) - at)
            done.append(_tune(core, machine, place, policy, share, again, store, writable))
            if progress:
                progress(at + 1, len(cores), done[-1])
    finally:
        forget_plans()
    return done


def _place_of(what: Any, example: Sequence[Any]) -> str | torch.device:
    """The device of the first tensor of a model's inputs, else of its parameters; the CPU for all else."""
    tensors = [each for each in torch.utils._pytree.tree_leaves(example) if isinstance(each, Tensor)]
    if isinstance(what, torch.nn.Module):
        tensors += list(what.parameters())
    return tensors[0].device if tensors else "cpu"


def _tune(
    core: Problem, device: Device, place: torch.device, policy: Policy, seconds: float, again: bool, store: Store,
    writable: Callable[[], None],
) -> Tuned:  # fmt: skip
    known = store.load().devices.get(device.key, {}).get(str(core))
    if known is not None and not again and all(version_of(m.engine) == m.version for m in known.measured):
        return Tuned(core, "known", known)
    try:
        heuristic = choose(core, device, replace(policy, tuning="off")) if not core.is_empty else None
    except UnsupportedProblem:
        return Tuned(core, "unsupported")
    candidates = shortlist(search(core, device, policy), most=MOST[device.kind])
    if heuristic is None or len(candidates) < 2:
        return Tuned(core, "no choice")
    if seconds <= 0:
        return Tuned(core, "no time")
    writable()
    entry = measure_and_keep(core, device, place, candidates, seconds, store)
    return Tuned(core, "measured" if entry else "no memory", entry, f"{heuristic.engine.name} {heuristic.knobs}")


def parse_seconds(text: float | str) -> float:
    """``60``, ``"60s"``, ``"5m"`` or ``"1h"`` in seconds; ValueError for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        found = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|)\s*", str(text))
        found = float(match[1]) * {"s": 1, "": 1, "m": 60, "min": 60, "h": 3600}[match[2]] if match else math.nan
    if not 0 < found < math.inf:
        raise ValueError(f"time is {text!r}; wanted seconds > 0, as 60, '60s', '5m' or '1h'")
    return found


# -- the convolutions of a model --------------------------------------------------------------------------------------

_aten, _own = torch.ops.aten, torch.ops.openconv


class _Recorder(TorchDispatchMode):
    """Notes the problem of every convolution, torch's and openconv's, and lets it run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problems: dict[Problem, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for problem in _problems(func, args):
            self.problems[problem] = None
        return func(*args, **(kwargs or {}))


def convolutions_of(model: torch.nn.Module, *example: Any, backward: bool = False) -> list[Problem]:
    """The distinct problems of one call ``model(*example)``, in order; with ``backward`` those of the gradients of the
    sum of what it returns as well. ValueError if there are none."""
    with _Recorder() as recorder, torch.set_grad_enabled(backward):
        result = model(*example)
        if backward:
            tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if tensors:
                torch.stack([t.sum().float() for t in tensors]).sum().backward()
    if not recorder.problems:
        raise ValueError(f"{type(model).__name__} called no convolution on this example")
    return list(recorder.problems)


def _problems(func: Any, args: Sequence[Any]) -> list[Problem]:
    if func is _aten.convolution.default:
        x, w, bias, stride, padding, dilation, transposed, extra, groups = args
        return _forward(x, w, bias is not None, stride, padding, dilation, transposed, extra, groups)
    if func is _aten.convolution_backward.default:
        dy, x, w, _, stride, padding, dilation, transposed, extra, groups, mask = args
        return _backward(dy, x, w, stride, padding, dilation, transposed, extra, groups, mask)
    if func in (_own.fprop.default, _own.dgrad.default, _own.wgrad.default):
        return _ours(func, args)
    return []


def _both(padding: Sequence[int]) -> list[int]:
    return [v for p in padding for v in (p, p)]


def _each(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * (axes if len(values) == 1 else 1)


def _forward(x: Tensor, w: Tensor, bias: bool, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any,
             groups: int) -> list[Problem]:  # fmt: skip
    if x.dtype not in NAMES or x.dim() < 3:
        return []
    axes = x.dim() - 2
    stride, padding, dilation, extra = (_each(v, axes) for v in (stride, padding, dilation, extra))
    size: Any = x.shape[2:]
    if transposed:  # a dgrad, whose result has the size of x
        size = [(x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (w.shape[2 + i] - 1) + extra[i] + 1
                for i in range(axes)]  # fmt: skip
    made = problem_of(
        "dgrad" if transposed else "fprop", x, w, size=size, filter=w.shape[2:], stride=stride, padding=_both(padding),
        dilation=dilation, groups=groups, epilogue=epilogue_of(bias, False, ""),
    )  # fmt: skip
    return [made]


def _backward(dy: Tensor, x: Tensor, w: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool, extra: Any,
              groups: int, mask: Sequence[bool]) -> list[Problem]:  # fmt: skip
    """The passes that a backward asks for. Of a transposed convolution they are the fprop of dy, and the wgrad with
    dy as the image."""
    if dy.dtype not in NAMES or dy.dim() < 3:
        return []
    axes = dy.dim() - 2
    stride, padding, dilation = (_each(v, axes) for v in (stride, padding, dilation))
    image, other = (dy, x) if transposed else (x, dy)
    rest: dict[str, Any] = {"size": image.shape[2:], "filter": w.shape[2:], "stride": stride, "padding": _both(padding),
                            "dilation": dilation, "groups": groups}  # fmt: skip
    found = []
    if mask[0]:
        found.append(problem_of("fprop" if transposed else "dgrad", dy, w, **rest))
    if mask[1]:
        found.append(problem_of("wgrad", image, other, **rest))
    return found


def _ours(func: Any, args: Sequence[Any]) -> list[Problem]:
    direction = func.overloadpacket.__name__
    a, b = args[:2]
    if direction == "wgrad":
        filter, stride, padding, dilation, groups = args[2:7]
        return [problem_of("wgrad", a, b, size=a.shape[2:], filter=filter, stride=stride, padding=padding,
                           dilation=dilation, groups=groups)]  # fmt: skip
    bias, residual, *rest = args[2:]
    size = rest.pop(0) if direction == "dgrad" else a.shape[2:]
    stride, padding, dilation, groups, activation = rest[:5]
    epilogue = epilogue_of(bias is not None, residual is not None, activation)
    return [problem_of(direction, a, b, size=size, filter=b.shape[2:], stride=stride, padding=padding,
                       dilation=dilation, groups=groups, epilogue=epilogue)]  # fmt: skip
