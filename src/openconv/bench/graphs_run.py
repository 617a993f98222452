"""Measure graphs: each verified, then timed in turn with the same nodes unfused, with torch and with cuDNN's frontend.

Patterns are compared with float64, ResNet-50 with the same module in float32. What a call and a plan cost the host is
measured on a chain of a hundred small nodes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine import Traits
from ..graph import Graph
from ..problem import Problem
from ..reference import Inputs, Reference, allowed_error
from ..tensors import ALL_DTYPES, DTYPES, empty
from .ceilings import ceilings, rate_name
from .graphs import (
    PATTERNS,
    Network,
    as_graph,
    chain,
    graph_call,
    kernel_count,
    pattern_graph,
    pattern_inputs,
    resnet50,
    torch_call,
)
from .graphs_cudnn import cudnn_call, cudnn_refusal
from .graphs_results import GraphRecord
from .peers import NotTaken
from .peers.base import first_line
from .results import environment
from .timing import Timing, overhead, race, race_cuda

__all__ = [
    "GraphJob",
    "GraphLimits",
    "measure_job",
    "measure_network",
    "measure_overheads",
    "measure_pattern",
    "within",
]

_Calls = dict[str, Callable[[], Any]]

# What a unit in the last place of the dtype may do to a number that a prologue has cancelled: the image is rounded
# behind each of its steps by those who run them one by one.
_STEPS_ROUNDED = 8
_NETWORK_ERROR = {"f16": 3e-2, "bf16": 2e-1, "f32": 1e-4, "f64": 1e-10}
"""Of a logit, as a share of the largest: fifty layers round in turn, and weights with a scale once more."""


@dataclass(frozen=True)
class GraphLimits:
    """How long it may take: seconds of timing for each contestant, of searching cuDNN's plans, of torch.compile.

    ``tune``: a contestant more, the fused graph with the fastest of its plans, sought for so many seconds.
    ``compile``: the modes of torch.compile that take part in the whole network.
    """

    budget: float = 0.3
    cudnn: float = 10.0
    compiling: float = 180.0
    tune: float = 0.0
    compile: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphJob:
    """One thing to be measured: a pattern of a layer, a network, or the overheads."""

    kind: str
    pattern: str
    label: str
    problem: str

    @property
    def key(self) -> tuple[str, str, str]:
        """As of its record."""
        return self.pattern, self.label, self.problem


def measure_job(job: GraphJob, place: torch.device, limits: GraphLimits, command: str = "") -> GraphRecord:
    """The record of a job."""
    with torch.no_grad():
        if job.kind == "pattern":
            return measure_pattern(job.pattern, job.label, Problem.parse(job.problem), place, limits, command)
        if job.kind == "network":
            return measure_network(job, place, limits, command)
        return measure_overheads(job, place, command)


# -- patterns ----------------------------------------------------------------------------------------------------------


def measure_pattern(
    name: str, label: str, problem: Problem, place: torch.device, limits: GraphLimits, command: str = ""
) -> GraphRecord:
    """A pattern of one layer, which has all that is fused in its text."""
    pattern, inputs = PATTERNS[name], pattern_inputs(problem, device=place)
    fused, unfused = (pattern_graph(pattern, problem, inputs, fuse=fuse) for fuse in (True, False))
    notes: dict[str, str] = {}
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        reference = Reference(problem, inputs, place=place)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        calls: _Calls = {"fused": graph_call(fused, pattern, inputs), "unfused": graph_call(unfused, pattern, inputs)}
        notes["fused"] = fused.program(place).current().text
        if limits.tune:
            tuned = pattern_graph(pattern, problem, inputs)
            best = tuned.autotune(*graph_call(tuned, pattern, inputs).args, seconds=limits.tune)[0]
            calls["tuned"], notes["tuned"] = graph_call(tuned, pattern, inputs), best.text
        calls["torch"] = torch_call(pattern, problem, inputs)
        _add_cudnn(calls, notes, problem, inputs, place, limits)
        error, wrong = _verified(calls, reference, _allowed(problem), notes)
        timings = _timed({contestant: call for contestant, call in calls.items() if contestant in error}, place, limits)
    counts = {"fused": kernel_count(fused, place), "unfused": kernel_count(unfused, place)}
    return GraphRecord(
        "pattern", name, label, str(problem), timings, counts, error | wrong, list(wrong), _floor(problem, place),
        notes=notes, machine=environment(place, command),
    )  # fmt: skip


def _add_cudnn(
    calls: _Calls, notes: dict[str, str], problem: Problem, inputs: Inputs, place: torch.device, limits: GraphLimits
) -> None:
    if (refused := cudnn_refusal(place)) is not None:
        notes["cudnn"] = refused
        return
    try:
        calls["cudnn"], notes["cudnn"] = cudnn_call(problem, inputs, limits.cudnn)
    except NotTaken as reason:
        notes["cudnn"] = " ".join(str(reason).split())[:300]


def _allowed(problem: Problem) -> float:
    """The most that a contestant may be off: see :data:`_STEPS_ROUNDED`; without a prologue as of any peer."""
    bound = 1e-3
    if not problem.prologue.is_identity:
        bound = max(bound, _STEPS_ROUNDED * torch.finfo(DTYPES[problem.dtypes[0]]).eps / 2)
    return allowed_error(problem, Traits("", bound))


def _verified(
    calls: _Calls, reference: Reference, allowed: float, notes: dict[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """The errors of those that are right, and of those that are not. One that fails says why in the notes."""
    right: dict[str, float] = {}
    wrong: dict[str, float] = {}
    for name, call in calls.items():
        try:
            made = call()
        except RuntimeError as error:
            if name in ("fused", "unfused", "tuned"):  # ours have no excuse
                raise
            notes[name] = f"does not run: {first_line(error)}"
            continue
        first, *sums = (made,) if isinstance(made, Tensor) else made
        off = reference.error([first, *(value.flatten() for value in sums)])
        (right if off <= allowed else wrong)[name] = off
    return right, wrong


def _timed(calls: _Calls, place: torch.device, limits: GraphLimits) -> dict[str, dict[str, float]]:
    if not calls:
        return {}
    budget = limits.budget * len(calls)
    if place.type == "cuda":
        found = race_cuda([[call] for call in calls.values()], budget=budget)
    else:
        found = race(list(calls.values()), budget=budget, least=3)
    return {name: asdict(timing) for name, timing in zip(calls, found, strict=True)}


def _floor(problem: Problem, place: torch.device) -> dict[str, float]:
    name = rate_name(problem)
    rates = ceilings(place, [name])
    floor = {"memory": problem.min_bytes / rates["copy"]}
    return floor | ({"math": problem.flops / rates[name]} if name in rates else {})


# -- ResNet-50 ---------------------------------------------------------------------------------------------------------


def measure_network(job: GraphJob, place: torch.device, limits: GraphLimits, command: str = "") -> GraphRecord:
    """The network of a job, whose text is ``n64 h224 f16 nhwc``."""
    batch, size, dtype, layout = _network_sizes(job.problem)
    network = resnet50(batch, dtype, place, size=size, layout=layout)
    generator = torch.Generator(place).manual_seed(0)
    image = empty((batch, 3, size, size), DTYPES[dtype], layout, place).normal_(generator=generator)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        wanted = _reference_of(network, image)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        unfused = as_graph(network.module, image, fuse=False)
        notes: dict[str, str] = {}
        calls: _Calls = {"fused": partial(network.graph, image), "unfused": partial(unfused, image)}
        calls["torch"] = partial(network.module, image)
        if place.type == "cuda":
            calls["captured"] = partial(network.graph.capture(image), image)
            calls["torch_captured"] = _torch_captured(network, image)
        for mode in limits.compile:
            _add_compiled(calls, notes, network, image, mode, limits)
        error = {name: _distance(call(), wanted) for name, call in calls.items()}
        wrong = [name for name, off in error.items() if not off <= _NETWORK_ERROR[dtype]]
        timings = _timed({name: call for name, call in calls.items() if name not in wrong}, place, limits)
    counts = {"fused": kernel_count(network.graph, place), "unfused": kernel_count(unfused, place)}
    return GraphRecord(
        "network", job.pattern, job.label, job.problem, timings, counts, error, wrong, images=batch, notes=notes,
        machine=environment(place, command),
    )  # fmt: skip


def _network_sizes(text: str) -> tuple[int, int, str, str]:
    batch, size, dtype, layout = text.split()
    return int(batch[1:]), int(size[1:]), dtype, layout


def _reference_of(network: Network, image: Tensor) -> Tensor:
    """The module in float32, with its weights as they are rounded; of f32 and f64 itself in float64."""
    kind = torch.float32 if image.dtype in (torch.float16, torch.bfloat16) else torch.float64
    wide = type(network.module)().eval().to(image.device, kind)
    wide.load_state_dict({name: value.to(kind) for name, value in network.weights.items()})
    made = [wide(part.to(kind)) for part in image.split(16)]
    return torch.cat(made)


def _distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference as a share of the largest value; infinity if something is not finite."""
    off = (got.to(wanted.dtype) - wanted).abs().max() / wanted.abs().max()
    return float(off.nan_to_num(nan=torch.inf))


def _torch_captured(network: Network, image: Tensor) -> Callable[[], Tensor]:
    """torch's own calls in a CUDA graph, into which the image is copied as openconv's copies it."""
    held = image.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            network.module(held)
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        made = network.module(held)

    def call() -> Tensor:
        held.copy_(image)
        recorded.replay()
        return made

    return call


def _add_compiled(
    calls: _Calls, notes: dict[str, str], network: Network, image: Tensor, mode: str, limits: GraphLimits
) -> None:
    name = "torch_compile" + ("" if mode == "default" else f"_{mode.replace('-', '_')}")
    begun = time.perf_counter()
    try:
        with within(limits.compiling):
            compiled = torch.compile(network.module, mode=mode, dynamic=False)
            compiled(image)
    except Exception as error:  # whatever a compiler and its tools may raise: it takes no part, and says why
        notes[name] = f"does not compile: {type(error).__name__}: {first_line(error)}"
        return
    calls[name], notes[name] = partial(compiled, image), f"compiled in {time.perf_counter() - begun:.0f} s"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """TimeoutError in what takes longer, where the system can interrupt it: in the main thread, not on Windows."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes over {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- overheads ---------------------------------------------------------------------------------------------------------

_PLANNINGS = 5


def measure_overheads(job: GraphJob, place: torch.device, command: str = "") -> GraphRecord:
    """What the host spends on a chain of nodes: building it, planning it for each kind of device without compiling, and
    on a GPU each kernel of a planned call, on images so small that the device is never waited for."""
    nodes = int(job.problem.split()[0])
    seconds = {"build": asdict(Timing.of([_seconds(partial(chain, nodes, c=32 + 8 * at)) for at in range(_PLANNINGS)]))}
    for kind in ("cpu", "cuda"):
        plan = partial(_plan, kind)
        _seconds(partial(plan, chain(nodes, c=24)))  # loads what planning needs, once for the process
        took = [_seconds(partial(plan, chain(nodes, c=32 + 8 * at))) for at in range(_PLANNINGS)]
        seconds[f"plan_{kind}"] = asdict(Timing.of(took))
    graph = chain(nodes, c=16, size=4)
    counts = {"unfused": nodes, "fused": kernel_count(graph, place)}
    notes = {"plan": "of sizes that were not planned before; nothing is compiled"}
    if place.type == "cuda":
        graphs = {"call_per_kernel": chain(nodes, c=16, size=4, held=True), "call_per_kernel_all_inputs": graph}
        calls = [partial(each, *_small(each, place)) for each in graphs.values()]
        for (name, each), timing in zip(graphs.items(), overhead(calls, place), strict=True):
            count = kernel_count(each, place)
            seconds[name] = asdict(Timing(timing.median / count, timing.p20 / count, timing.p80 / count))
        notes["call_per_kernel"] = "weights are constants; with all_inputs each call is given them"
    return GraphRecord(
        "overhead", job.pattern, job.label, job.problem, seconds, counts, notes=notes,
        machine=environment(place, command),
    )  # fmt: skip


def _plan(kind: str, graph: Graph) -> None:
    graph.program(kind)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _small(graph: Graph, place: torch.device) -> Sequence[Tensor]:
    return [
        torch.empty_strided(t.shape, t.strides, dtype=ALL_DTYPES[t.dtype], device=place).normal_(0, 0.1)
        for t in graph.inputs
    ]
