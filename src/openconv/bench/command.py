"""``openconv bench``: run suites, print the tables, record the results as they come."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ..problem import Problem
    from .results import Record
    from .run import Limits
    from .suites import Variation

__all__ = ["Job", "bench", "jobs_of", "place_of", "restart_with"]

# What makes every library on the machine keep to one instruction set, for comparing as on a smaller one.
_ISA = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "",
        "OPENCV_CPU_DISABLE": "AVX512-SKX",
    }
}


@dataclass(frozen=True)
class Job:
    """A problem to be measured, under its suite and its name there."""

    suite: str
    label: str
    problem: Problem


def bench(
    what: Annotated[list[str] | None, typer.Argument(help="suites, or problems as text; all suites if absent")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    direction: Annotated[list[str] | None, typer.Option(help="fprop, dgrad, wgrad; may be repeated")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="f32, f16, ...; may be repeated")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="nchw, nhwc; may be repeated")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch size; may be repeated")] = None,
    epilogue: Annotated[str, typer.Option(help="fuse this behind every forward pass: +bias+relu")] = "",
    engine: Annotated[
        list[str] | None,
        typer.Option(help="only these engines, 'chosen' for what is chosen, or 'none'; may be repeated"),
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="only these peers, or 'none'; may be repeated")] = None,
    budget: Annotated[float, typer.Option(help="seconds of timing for each contestant")] = 0.3,
    longest: Annotated[float, typer.Option(help="leave out what is predicted to take longer, in seconds")] = 20.0,
    overhead: Annotated[bool, typer.Option("--overhead", help="also measure CPU microseconds per call")] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="also time what is chosen if bits must not depend on the batch")
    ] = False,
    isa: Annotated[str, typer.Option(help="'avx2': hold every library to that instruction set")] = "",
    out: Annotated[Path | None, typer.Option(help="folder for the results; default under benchmarks/results")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="pass over what is recorded already by this code")] = False,
    record: Annotated[bool, typer.Option(help="write the results")] = True,
) -> None:
    """Verify every engine against float64, time it in turn with its peers, print tables and record everything.

    Each problem is recorded as soon as it is measured: Ctrl-C keeps what is done, and --resume goes on from there.
    """
    if isa:
        restart_with(isa)
    from ..engine import engine_named
    from ..terminal import wide_console
    from .peers import peer_named
    from .report.runs import Run
    from .report.tables import layer_tables
    from .results import device_slug, results_folder
    from .run import CHOSEN, DISTURBED, Limits
    from .suites import Variation

    console, place = wide_console(), place_of(device)
    engines = None if engine == ["none"] else tuple(engine or ())
    peers = () if peer == ["none"] else None if peer is None else tuple(peer)
    for name in engines or ():
        if name != CHOSEN:
            engine_named(name)
    for name in peers or ():
        peer_named(name)
    limits = Limits(engines, peers, budget, longest, overhead, batch_invariant)
    wanted = Variation(tuple(batch or ()), tuple(direction or ()), tuple(dtype or ()), tuple(layout or ()))
    jobs = jobs_of(what or [], place.type, wanted, epilogue)
    folder = (out or results_folder() / device_slug(place)) if record else None
    console.print(_place_text(place), soft_wrap=True)
    records, stopped = _measure_all(jobs, place, limits, folder, resume, console)
    for shown in layer_tables(Run(device_slug(place), tuple(records))) if records else ():
        console.print(shown)
    if folder:
        console.print(f"recorded {len(records)} problems in {folder}", soft_wrap=True)
    if busy := sum(r.disturbed > DISTURBED for r in records):
        console.print(f"[yellow]{busy} problems were timed while other programs used the cores: measure them again")
    if stopped:
        console.print("[yellow]stopped; what is done is kept, and --resume goes on from there")
        raise typer.Exit(130)
    if any(r.wrong for r in records):
        raise typer.Exit(1)


def place_of(device: str) -> torch.device:
    """The torch device of that name; ValueError if it is none of this machine's."""
    import torch

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; wanted cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch {torch.__version__} finds no CUDA device here")
    return torch.device(device)


def _without_place(arguments: Sequence[str]) -> list[str]:
    """A command line without ``--out``, which says where results go and nothing of how they were measured."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--out" and not argument.startswith("--out="):
            kept.append(argument)
        skip = argument == "--out"
    return kept


def jobs_of(what: Sequence[str], kind: str, wanted: Variation, epilogue: str = "") -> list[Job]:
    """The problems of suites, varied as they say for this kind of device unless ``wanted`` says otherwise, and problems
    given as text. Without any, all suites that are meant for the device."""
    from ..epilogue import Epilogue
    from ..problem import Problem
    from .suites import Suite, Variation, load_suite, suite_names, variants

    loaded: list[Suite] = []
    for entry in what or suite_names():
        if " " in entry:
            loaded.append(Suite("given", "", (("problem", Problem.parse(entry)),), {kind: Variation()}))
        elif (suite := load_suite(entry)).varied.get(kind) is not None or what:
            loaded.append(suite)
    fused = Epilogue.parse(epilogue) if epilogue else None
    jobs = []
    for suite in loaded:
        for label, problem in variants(suite.problems, wanted.over(suite.varied.get(kind, Variation()))):
            if fused is None:
                jobs.append(Job(suite.name, label, problem))
            elif problem.direction == "fprop" and problem.epilogue.is_identity:
                jobs.append(Job(suite.name, label, problem.with_(epilogue=fused)))
    if not jobs:
        raise ValueError("no problem is left: the suites and options leave nothing to measure")
    return jobs


def _measure_all(
    jobs: Sequence[Job], place: torch.device, limits: Limits, folder: Path | None, resume: bool, console: Console
) -> tuple[list[Record], bool]:
    """Every job, each recorded at once; and whether Ctrl-C ended it."""
    from contextlib import nullcontext

    from ..engine import UnsupportedProblem
    from ..terminal import with_time_left
    from .results import Ledger, environment
    from .run import Skipped, Verifier, measure

    command = shlex.join(["openconv", *_without_place(sys.argv[1:])])
    machine = environment(place)
    ledgers = {job.suite: Ledger(folder / f"{job.suite}.jsonl") for job in jobs} if folder else {}
    if resume and folder:
        left = [job for job in jobs if not ledgers[job.suite].has(job.label, job.problem, machine)]
        console.print(f"{len(jobs) - len(left)} of {len(jobs)} problems are recorded already by this code")
        jobs = left
    records: list[Record] = []
    with Verifier() if place.type == "cpu" else nullcontext() as verifying, with_time_left(console) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        try:
            for job in jobs:
                progress.update(task, description=f"{job.suite} {job.label} {job.problem.direction}")
                try:
                    found = measure(
                        job.suite, job.label, job.problem, place, limits, verifying=verifying, command=command
                    )
                    records.append(found)
                    if folder:
                        ledgers[job.suite].add(found)
                except (UnsupportedProblem, Skipped) as reason:
                    progress.console.print(f"{job.suite} {job.label}: '{job.problem}' left out: {reason}", markup=False)
                progress.advance(task)
        except KeyboardInterrupt:
            return records, True
    return records, False


def _place_text(place: torch.device) -> str:
    import torch

    from ..plan import device_of

    if place.type == "cuda":
        return f"{torch.cuda.get_device_name(place)}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"{device_of(place)}, {torch.backends.cpu.get_cpu_capability()}"


def restart_with(isa: str) -> None:
    """Start again with the environment that holds all libraries to this instruction set; they read it when loaded."""
    wanted = _ISA.get(isa)
    if wanted is None:
        raise ValueError(f"isa is {isa!r}; wanted one of {', '.join(_ISA)}")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "openconv.cli", *sys.argv[1:]], os.environ | wanted)
