"""``openconv report``: print the tables of what was recorded, and write plots and a page to look at."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .runs import Run

__all__ = ["Layers", "report"]


class Layers(StrEnum):
    """Which problems are printed one by one."""

    none = "none"
    losses = "losses"
    all = "all"


def report(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="folders or files of records; benchmarks/results if absent")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the plots and the page")] = Path("build/report"),
    compare: Annotated[
        bool, typer.Option("--compare", help="what changed from the first folder to the second")
    ] = False,
    documents: Annotated[
        bool, typer.Option(help="rewrite the tables of README.md and docs/results from benchmarks/results")
    ] = False,
    suite: Annotated[list[str] | None, typer.Option(help="only this suite; may be repeated")] = None,
    direction: Annotated[list[str] | None, typer.Option(help="only fprop, dgrad or wgrad; may be repeated")] = None,
    layers: Annotated[Layers, typer.Option(help="the problems to print one by one")] = Layers.losses,
    plots: Annotated[bool, typer.Option(help="write the plots")] = True,
) -> None:
    """Print what was recorded, losses included, and write plots and one HTML page with filters and charts."""
    from ...terminal import wide_console
    from .documents import write_documents
    from .runs import load

    console = wide_console()
    paths = folders or []
    if compare and len(paths) != 2:
        raise ValueError(f"--compare takes the run before and the run after; got {len(paths)} folders, wanted 2")
    if compare:
        _print_comparison(console, [_selected(load([path]), suite or [], direction or []) for path in paths])
        return
    runs = _selected(load(paths), suite or [], direction or [])
    _print_tables(console, runs, layers)
    _write_pictures(console, runs, out, plots)
    if documents:
        for path, changed in write_documents().items():
            console.print(f"{path}: {'rewritten' if changed else 'unchanged'}", soft_wrap=True)


def _selected(runs: list[Run], suites: list[str], directions: list[str]) -> list[Run]:
    """The runs with the wanted records; ValueError names what there is if nothing is left."""
    from ...problem import DIRECTIONS

    unknown = [name for name in directions if name not in DIRECTIONS]
    if unknown:
        raise ValueError(f"direction is {unknown[0]!r}; wanted one of {', '.join(DIRECTIONS)}")
    kept = [run for whole in runs if (run := whole.only(suites, directions)).records]
    if not suites and not directions:  # folders that hold errors alone are drawn
        kept = list(runs)
    if not kept:
        there = sorted({record.suite for run in runs for record in run.records})
        raise ValueError(f"no record is left; the suites recorded are {', '.join(there)}")
    return kept


def _print_tables(console: Console, runs: list[Run], layers: Layers) -> None:
    from .tables import layer_tables, mean_table

    for run in runs:
        if not run.records:
            continue
        one_by_one = [] if layers is Layers.none else layer_tables(run, losses=layers is Layers.losses)
        for table in [*one_by_one, mean_table(run)]:
            console.print(table)


def _print_comparison(console: Console, sides: list[list[Run]]) -> None:
    """Compare the runs that have a name in common; or the only two, whatever they are called."""
    from .compare import compare_runs, comparison_tables

    before, after = ({run.name: run for run in side} for side in sides)
    pairs = [(before[name], after[name]) for name in before if name in after]
    if len(before) == len(after) == 1:
        pairs = list(zip(before.values(), after.values(), strict=True))
    if not pairs:
        raise ValueError(f"no machine is in both: {', '.join(before)} before, {', '.join(after)} after")
    for one, other in pairs:
        for table in comparison_tables(compare_runs(one, other)):
            console.print(table)


def _write_pictures(console: Console, runs: list[Run], out: Path, plots: bool) -> None:
    from ...terminal import with_time_left
    from .page import write_page
    from .plots import write_plots

    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with with_time_left(console) as progress:
        task = progress.add_task("drawing", total=plots * len(runs) + 1)
        for run in runs if plots else ():
            progress.update(task, description=f"drawing {run.name}")
            paths += write_plots(run, out)
            progress.advance(task)
        if timed := [run for run in runs if run.records]:
            paths.append(write_page(out / "report.html", timed))
    for path in paths:
        console.print(str(path), soft_wrap=True, highlight=False)
