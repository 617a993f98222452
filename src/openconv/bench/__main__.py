"""``python -m openconv.bench``: run suites, print the table, record the results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..engine import UnsupportedProblem, engine_named
from ..plan import device_of
from ..problem import Problem
from .results import Record, device_slug, geometric_mean, results_folder, write
from .run import measure, verifier
from .suites import load_suite, suite_names, variants

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

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    what: Annotated[list[str] | None, typer.Argument(help="suites, or problems as text; all suites if absent")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch size; may be repeated")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="fprop, dgrad, wgrad; may be repeated")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="nchw, nhwc; may be repeated")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="f32, f64, ...; may be repeated")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="only these engines; may be repeated")] = None,
    budget: Annotated[float, typer.Option(help="seconds of timing for each contestant")] = 0.5,
    isa: Annotated[str, typer.Option(help="'avx2': hold every library to that instruction set")] = "",
    out: Annotated[Path | None, typer.Option(help="folder for the results; default under benchmarks/results")] = None,
    tag: Annotated[str, typer.Option(help="added to the names of the files, to keep several runs of a suite")] = "",
    record: Annotated[bool, typer.Option(help="write the results")] = True,
) -> None:
    """Verify every engine against float64, time it in turn with its peers, print a table and record everything."""
    if isa:
        _restart_with(isa)
    import torch

    console = Console()
    device = device_of(torch.device("cpu"))
    console.print(f"{device}, {torch.backends.cpu.get_cpu_capability()}")
    try:
        for name in engine or []:
            engine_named(name)
        jobs = list(_jobs(what or [], batch or [], direction or [], layout or [], dtype or []))
    except ValueError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(2) from None
    records: dict[str, list[Record]] = {}
    with verifier() as verifying, Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        for suite, label, problem in jobs:
            progress.update(task, description=f"{suite} {label}")
            try:
                found = measure(suite, label, problem, device, engines=engine or (), budget=budget, verifying=verifying)
                records.setdefault(suite, []).append(found)
            except UnsupportedProblem as refused:  # by the engines that were asked for
                progress.console.print(f"[yellow]{label}: {refused}")
            progress.advance(task)
    for suite, measured in records.items():
        console.print(table(suite, measured))
        if record:
            path = (out or results_folder() / device_slug(device)) / f"{suite}{tag and '-'}{tag}.jsonl"
            write(path, measured)
            console.print(f"recorded {len(measured)} problems in {path}")
    if any(r.wrong for measured in records.values() for r in measured):
        raise typer.Exit(1)


def table(suite: str, records: list[Record]) -> Table:
    """One line a problem: the chosen engine, its time, its ratio to each peer, and what the best engine would take."""
    peers = sorted({name for r in records for name in r.seconds if "." not in name})
    shown = Table(title=suite)
    for column in ("layer", "pass", "n", "layout", "engine", "us", *(f"x {p}" for p in peers), "regret", "fastest"):
        words = column in ("layer", "pass", "layout", "engine", "fastest")
        shown.add_column(column, justify="left" if words else "right")
    for r in records:
        problem = r.parsed()
        if r.chosen not in r.seconds:
            shown.add_row(r.label, problem.direction, str(problem.n), problem.layouts[0], f"{r.chosen} [red]WRONG")
            continue
        best = min(r.engines, key=lambda e: r.seconds[e]["median"])
        ratios = [r.ratio(p) for p in peers]
        cells = [f"[{'green' if v >= 1 else 'red'}]{v:.2f}" if v else "-" for v in ratios]
        engine = r.chosen.removeprefix("cpu.") + (" [red]WRONG" if r.wrong else "")
        shown.add_row(
            r.label, problem.direction, str(problem.n), problem.layouts[0], engine,
            f"{r.seconds[r.chosen]['median'] * 1e6:.0f}", *cells, f"{r.regret:.2f}",
            "" if best == r.chosen else best.removeprefix("cpu."),
        )  # fmt: skip
    for p in peers:
        if mean := geometric_mean(r.ratio(p) for r in records):
            shown.caption = (shown.caption or "") + f" geometric mean x {p}: {mean:.2f}. "
    late = sum(r.regret > 1.15 for r in records)
    shown.caption = (shown.caption or "") + f" choices more than 15% behind the best engine: {late} of {len(records)}."
    return shown


def _jobs(
    what: list[str], batch: list[int], direction: list[str], layout: list[str], dtype: list[str]
) -> list[tuple[str, str, Problem]]:
    jobs = []
    for entry in what or suite_names():
        named = [("problem", Problem.parse(entry))] if " " in entry else load_suite(entry)
        suite = "given" if " " in entry else entry
        jobs += [(suite, label, p) for label, p in variants(named, batch, direction, layout, dtype)]
    return jobs


def _restart_with(isa: str) -> None:
    """Start again with the environment that holds all libraries to this instruction set; they read it when loaded."""
    wanted = _ISA.get(isa)
    if wanted is None:
        raise typer.BadParameter(f"isa is {isa!r}; wanted one of {', '.join(_ISA)}")
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "openconv.bench", *sys.argv[1:]], os.environ | wanted)


if __name__ == "__main__":
    app()
