"""``openconv bench-graphs``: measure fused graphs, print the tables, record the results as they come."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command import _place_text, _without_place, place_of

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .graphs_results import GraphRecord
    from .graphs_run import GraphJob, GraphLimits

__all__ = ["bench_graphs", "graph_jobs"]

_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs")


def bench_graphs(
    what: Annotated[list[str] | None, typer.Argument(help="layers of the suite, or problems as text; all")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    patterns: Annotated[
        list[str] | None, typer.Option("--patterns", "--pattern", help="only these, or 'none'; may be repeated")
    ] = None,
    suite: Annotated[str, typer.Option(help="the suite whose layers are measured")] = "resnet50",
    batch: Annotated[int | None, typer.Option(help="batch size; 64 on a GPU, 1 on a CPU unless told")] = None,
    dtype: Annotated[str, typer.Option(help="f16, f32, ...; f16 on a GPU, f32 on a CPU unless told")] = "",
    budget: Annotated[float, typer.Option(help="seconds of timing for each contestant")] = 0.3,
    cudnn_seconds: Annotated[float, typer.Option(help="seconds in which plans of cuDNN are built and tried")] = 10.0,
    tune: Annotated[float, typer.Option(help="also time the fastest plan found in so many seconds")] = 0.0,
    only_resnet: Annotated[bool, typer.Option("--only-resnet", help="the whole ResNet-50 alone")] = False,
    only_overhead: Annotated[bool, typer.Option("--only-overhead", help="what the host spends alone")] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="torch.compile of the whole ResNet-50, too, in its default mode")
    ] = False,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="and in mode max-autotune-no-cudagraphs; takes minutes")
    ] = False,
    compile_seconds: Annotated[float, typer.Option(help="after which torch.compile is given up")] = 180.0,
    out: Annotated[Path | None, typer.Option(help="folder for the results; default under benchmarks/results")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="pass over what is recorded already by this code")] = False,
    record: Annotated[bool, typer.Option(help="write the results")] = True,
) -> None:
    """Verify fused graphs and time them in turn: unfused, in torch, and by the best plan of cuDNN's frontend.

    Patterns around every layer of a suite, ResNet-50 as one graph, and what the host spends on a graph. Each is
    recorded as soon as it is measured: Ctrl-C keeps what is done, and --resume goes on from there.
    """
    from ..terminal import wide_console
    from .graphs_run import GraphLimits
    from .report.graphs import graph_tables
    from .results import device_slug, results_folder

    console, place = wide_console(), place_of(device)
    if only_resnet and only_overhead:
        raise ValueError("--only-resnet and --only-overhead are given; wanted one of them")
    only = "network" if only_resnet else "overhead" if only_overhead else None
    jobs = graph_jobs(what or [], place.type, suite, patterns, batch, dtype, only)
    modes = _COMPILE_MODES[: 2 if max_autotune else 1 if compile else 0]
    limits = GraphLimits(budget, cudnn_seconds, compile_seconds, tune, modes)
    folder = (out or results_folder() / device_slug(place)) if record else None
    console.print(_place_text(place), soft_wrap=True)
    records, stopped = _measure_all(jobs, place, limits, folder, resume, console)
    for shown in graph_tables(records):
        console.print(shown)
    if folder:
        console.print(f"recorded {len(records)} graphs in {folder}", soft_wrap=True)
    if stopped:
        console.print("[yellow]stopped; what is done is kept, and --resume goes on from there")
        raise typer.Exit(130)
    if any(r.wrong for r in records):
        raise typer.Exit(1)


def graph_jobs(
    what: Sequence[str], kind: str, suite: str, patterns: Sequence[str] | None, batch: int | None, dtype: str,
    only: str | None = None,
) -> list[GraphJob]:  # fmt: skip
    """What is to be measured: all patterns of all layers, then the network and the overheads, or ``only`` one kind.
    With layers or patterns that are named, these alone. ValueError says what there is."""
    from ..problem import DTYPE_BYTES, Problem
    from .graphs import PATTERNS
    from .graphs_run import GraphJob
    from .suites import load_suite

    wanted = list(PATTERNS) if patterns is None else [] if list(patterns) == ["none"] else list(patterns)
    if unknown := [name for name in wanted if name not in PATTERNS]:
        raise ValueError(f"pattern is {unknown[0]!r}; wanted one of {', '.join(PATTERNS)}, or 'none'")
    if dtype and dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype is {dtype!r}; wanted one of {', '.join(DTYPE_BYTES)}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}; wanted 1 or more")
    gpu = kind == "cuda"
    n, name, layout = batch or (64 if gpu else 1), dtype or ("f16" if gpu else "f32"), "nhwc" if gpu else "nchw"
    jobs = []
    if only is None:
        layers = dict(load_suite(suite).problems)
        given = {entry: Problem.parse(entry) for entry in what if " " in entry}
        if missing := [entry for entry in what if entry not in layers and entry not in given]:
            raise ValueError(f"suite {suite} has no layer {missing[0]!r}; wanted one of {', '.join(layers)}")
        for pattern in (PATTERNS[each] for each in wanted):
            for label in what or layers:
                layer = given.get(label) or layers[label].with_(n=n, dtypes=(name,) * 3, layouts=(layout,) * 3)
                shown = "given" if label in given else label
                jobs.append(GraphJob("pattern", pattern.name, shown, str(pattern.problem(layer))))
    if only == "network" or (only is None and not what and patterns is None):
        jobs.append(GraphJob("network", "resnet50", "whole", f"n{n} h224 {name} {layout}"))
    if only == "overhead" or (only is None and not what and patterns is None):
        jobs.append(GraphJob("overhead", "overhead", "chain", "100 nodes"))
    if not jobs:
        raise ValueError("no graph is left: the options leave nothing to measure")
    return jobs


def _measure_all(
    jobs: Sequence[GraphJob], place: torch.device, limits: GraphLimits, folder: Path | None, resume: bool,
    console: Console,
) -> tuple[list[GraphRecord], bool]:  # fmt: skip
    """Every job, each recorded at once; and whether Ctrl-C ended it."""
    from ..terminal import with_time_left
    from .graphs_results import FILE_NAME, GraphLedger
    from .graphs_run import measure_job
    from .results import environment

    command = shlex.join(["openconv", *_without_place(sys.argv[1:])])
    machine = environment(place)
    ledger = GraphLedger(folder / FILE_NAME) if folder else None
    if resume and ledger:
        left = [job for job in jobs if not ledger.has(job.key, machine)]
        console.print(f"{len(jobs) - len(left)} of {len(jobs)} graphs are recorded already by this code")
        jobs = left
    records: list[GraphRecord] = []
    with with_time_left(console) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        try:
            for job in jobs:
                progress.update(task, description=f"{job.pattern} {job.label}")
                found = measure_job(job, place, limits, command)
                records.append(found)
                if ledger:
                    ledger.add(found)
                progress.advance(task)
        except KeyboardInterrupt:
            return records, True
    return records, False
