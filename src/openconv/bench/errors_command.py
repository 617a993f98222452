"""``openconv bench-errors``: measure errors against float64, record them as they come, print and draw them."""

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

    from ..problem import Problem
    from .errors import ErrorRecord

__all__ = ["bench_errors"]


def bench_errors(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    channels: Annotated[
        list[int] | None, typer.Option(help="channels that are summed over; may be repeated; 4 to 1024 unless told")
    ] = None,
    direction: Annotated[list[str] | None, typer.Option(help="fprop, dgrad, wgrad; may be repeated; all")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="may be repeated; f32, and f16 and bf16 where the device computes them")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="only these engines; may be repeated")] = None,
    longest: Annotated[float, typer.Option(help="leave out engines predicted to take longer, in seconds")] = 2.0,
    out: Annotated[Path | None, typer.Option(help="folder for the records; default under benchmarks/results")] = None,
    record: Annotated[bool, typer.Option(help="write the records")] = True,
    pictures: Annotated[Path, typer.Option(help="folder for the figure")] = Path("build/report"),
) -> None:
    """Compare every engine that accepts, and torch, with float64, over sums of 4 to 50,000 products.

    Filters of 1x1 to 7x7 and of 31 taps, patches, dilated and depthwise ones. Each problem is recorded at once, in
    errors.jsonl beside the suites.
    """
    from ..engine import engine_named
    from ..problem import DIRECTIONS
    from ..terminal import wide_console
    from .errors import CHANNELS, computed_dtypes, error_problems
    from .report.errors import error_table
    from .report.plots import write_plots
    from .report.runs import Run
    from .results import device_slug, results_folder

    console, place = wide_console(), place_of(device)
    for name in engine or ():
        if engine_named(name).device != place.type:
            raise ValueError(f"engine is {name!r}, which does not run on {place.type}")
    for count in channels or ():
        if count < 1:
            raise ValueError(f"channels are {count}; wanted 1 or more")
    for given, known, what in ((direction, DIRECTIONS, "direction"), (dtype, _FLOATS, "dtype")):
        if unknown := [name for name in given or () if name not in known]:
            raise ValueError(f"{what} is {unknown[0]!r}; wanted one of {', '.join(known)}")
    problems = list(
        error_problems(channels or CHANNELS, direction or DIRECTIONS, dtype or computed_dtypes(place))
    )  # fmt: skip
    folder = (out or results_folder() / device_slug(place)) if record else None
    console.print(_place_text(place), soft_wrap=True)
    records, stopped = _measure_all(problems, place, engine or [], longest, folder, console)
    if records:
        run = Run(device_slug(place), [], records)
        console.print(error_table(records, run.title))
        pictures.mkdir(parents=True, exist_ok=True)
        for path in write_plots(run, pictures):
            console.print(str(path), soft_wrap=True, highlight=False)
    if folder:
        console.print(f"recorded {len(records)} problems in {folder}", soft_wrap=True)
    if stopped:
        console.print("[yellow]stopped; what is done is kept")
        raise typer.Exit(130)
    if any(found.wrong for found in records):
        raise typer.Exit(1)


_FLOATS = ("f32", "f64", "f16", "bf16")


def _measure_all(
    problems: Sequence[Problem], place: torch.device, only: Sequence[str], longest: float, folder: Path | None,
    console: Console,
) -> tuple[list[ErrorRecord], bool]:  # fmt: skip
    """Every problem, each recorded at once; and whether Ctrl-C ended it."""
    from ..terminal import with_time_left
    from .errors import FILE_NAME, ErrorLedger, measure_errors

    command = shlex.join(["openconv", *_without_place(sys.argv[1:])])
    ledger = ErrorLedger(folder / FILE_NAME) if folder else None
    records: list[ErrorRecord] = []
    with with_time_left(console) as progress:
        task = progress.add_task("comparing", total=len(problems))
        try:
            for problem in problems:
                taps = "x".join(map(str, problem.filter))
                progress.update(task, description=f"{problem.direction} {taps} {problem.dtypes[0]}")
                found = measure_errors(problem, place, only=only, longest=longest, command=command)
                records.append(found)
                if ledger:
                    ledger.add(found)
                progress.advance(task)
        except KeyboardInterrupt:
            return records, True
    return records, False
