"""Build kernels without a GPU: every variant that the choice can come to for a list of problems, and what each takes.

``openconv compile`` fills the cache with it before the first call; CI fails on a kernel that spills registers or does
not compile for an architecture.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ..engine import Engine, engines
from ..plan import lower
from ..problem import Problem
from ..rewrites.base import Wrapper
from . import jit
from .copied import Copied
from .device import CudaDevice, device_for

__all__ = ["Built", "Variant", "build", "prepare", "usual_problems", "variants"]


@dataclass(frozen=True)
class Variant:
    """A kernel to be compiled for an architecture, the engine that it belongs to and a problem that leads to it."""

    engine: str
    arch: str
    source: jit.Source
    problem: str


@dataclass(frozen=True)
class Built:
    """What became of a variant: what its kernels take, or why it does not compile."""

    variant: Variant
    usage: tuple[jit.Usage, ...] = ()
    error: str = ""

    @property
    def spills(self) -> bool:
        """Whether a kernel keeps registers in memory although its source promises that none does."""
        return not self.variant.source.may_spill and any(found.spills for found in self.usage)


def usual_problems() -> Iterator[Problem]:
    """Problems that lead to the kernels of most networks: the passes, dtypes and layouts of layers that differ in what
    kernels are compiled for."""
    layers = [
        *(f"n8 c64 h56 w56 k64 r{r} s{r} stride{s} pad{r // 2} g64" for r in (3, 5, 7) for s in (1, 2)),
        *(f"n8 c64 h56 w56 k64 r{r} s{r} pad{r // 2} g64" for r in (9, 11, 13, 31)),
        *(f"n1 c1 h1024 w2048 k1 r{r} s{r} pad{r // 2}" for r in (3, 5, 7, 9, 11, 15, 21, 31)),
        *(f"n1 c3 h1024 w2048 k3 r{r} s{r} pad{r // 2} g3" for r in (3, 5, 7, 15)),
        *(f"n64 c3 h224 w224 k{k} r{r} s{r} stride{s} pad{r // 2}"
          for k, r, s in ((64, 7, 2), (32, 3, 2), (64, 3, 1), (96, 11, 4))),
        *(f"n4 c768 w4096 k768 s{s} pad{s - 1}:0 g768" for s in (3, 4)),
        "n4 c768 w4096 k768 s31 pad15 g768",
        "n2 c64 d8 h28 w28 k64 t3 r3 s3 pad1 g64",
        "n16 c3 h224 w224 k768 r16 s16 stride16",
        "n2 c3 d16 h224 w224 k768 t2 r16 s16 stride2,16,16",
        "n16 c64 h56 w56 k256 r1 s1",
        "n16 c64 h56 w56 k64 r3 s3 pad1",
        "n16 c64 h56 w56 k64 r3 s3 pad1 g4",
        "n16 c64 w512 k64 s3 pad1",
        "n2 c16 d8 h28 w28 k16 t3 r3 s3 pad1",
    ]  # fmt: skip
    for layer in layers:
        for dtype in ("f32", "f16", "bf16"):
            for layout in ("nchw", "nhwc") if " h" in layer else ("nchw",):
                for direction in ("fprop", "dgrad", "wgrad"):
                    yield Problem.parse(f"{direction} {layer} {dtype} {layout}")
                yield Problem.parse(f"fprop {layer} {dtype} {layout} +bias+relu")
    # What tensor cores do besides: other ways to form products, and what is fused around them.
    layer = "n16 c64 h56 w56 k64 r3 s3 pad1"
    for direction in ("fprop", "dgrad", "wgrad"):
        for precision in ("tf32", "tf32x3"):
            yield Problem.parse(f"{direction} {layer} f32 nhwc {precision}")
    for dtypes in ("i8*i8>i32", "i8*i8>f32", "e4m3*e4m3>f16", "e5m2*e4m3>bf16"):
        yield Problem.parse(f"fprop {layer} {dtypes} nhwc")
    for fused in ("x+scale+bias+relu", "+bias+keep+relu", "stats", "+bias+residual+relu"):
        yield Problem.parse(f"fprop {layer} f16 nhwc {fused}")
    yield Problem.parse(f"wgrad {layer} f16 nhwc x+scale+bias+relu")
    for dtype in ("f16", "bf16"):
        layer = f"n16 c64 h56 w56 k64 r3 s3 pad1 {dtype} nhwc x+scale+bias+relu"
        yield Problem.parse(f"fprop {layer} +bias+keep+relu stats")
        yield Problem.parse(f"wgrad {layer}")


def variants(problems: Iterable[Problem], archs: Iterable[str], *, chosen: bool = True) -> list[Variant]:
    """The kernels that the problems are run with, each once: those of the engine that is chosen by predicted cost, or
    of every engine that accepts; and those of engines that run only where they are named."""
    from ..select import Policy, rank

    policy, problems = Policy(tuning="off"), list(problems)
    # Most rewrites have no kernels of their own: those inside are other engines'.
    alone = [e for e in engines("cuda") if not e.proven and (isinstance(e, Copied) or not isinstance(e, Wrapper))]
    unproven = [engine.name for engine in alone]
    found: dict[tuple[str, jit.Source], Variant] = {}
    for arch in archs:
        device = device_for(arch)
        for problem in problems:
            core = lower(problem, device)
            accepted, _ = rank(core, device, policy)
            named = rank(core, device, policy.but(engine=",".join(unproven)))[0] if unproven else []
            for candidate in [*(accepted[:1] if chosen else accepted), *named]:
                for source in _sources(candidate.engine, core, device, candidate.knobs):
                    variant = Variant(candidate.engine.name, arch, source, str(core))
                    found.setdefault((arch, source), variant)
    return list(found.values())


def _sources(engine: Engine, problem: Problem, device: CudaDevice, knobs: object) -> list[jit.Source]:
    made: list[jit.Source] = engine.sources(problem, device, knobs)  # type: ignore[attr-defined]
    return made


def build(
    wanted: Iterable[Variant], *, jobs: int | None = None, done: Callable[[Built], None] = lambda built: None
) -> list[Built]:
    """Compile all of them, several at a time, into the cache; ``done`` is told of each as it ends."""
    wanted = list(wanted)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        order = {pool.submit(_build, variant): at for at, variant in enumerate(wanted)}
        results: list[Built | None] = [None] * len(wanted)
        for future in as_completed(order):
            results[order[future]] = built = future.result()
            done(built)
    return [built for built in results if built is not None]


def prepare(problem: Problem, device: CudaDevice, wanted: Iterable[tuple[Engine, object]]) -> None:
    """Have the kernels of engines and their knobs in the cache, compiled several at a time. What does not compile is
    left to its first use, which tells."""
    found = {source for engine, knobs in wanted for source in _sources(engine, problem, device, knobs)}

    def compile_one(source: jit.Source) -> None:
        with contextlib.suppress(jit.CompileError):
            jit.cubin(source, device.arch)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, found))


def _build(variant: Variant) -> Built:
    try:
        return Built(variant, tuple(jit.usage(variant.source, variant.arch)))
    except jit.CompileError as error:
        return Built(variant, error=str(error))
