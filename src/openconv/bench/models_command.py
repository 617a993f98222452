"""``openconv bench-models``: whole models, converted and fused, beside torch; recorded as they come."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from .command import _place_text, place_of, restart_with

__all__ = ["bench_models"]


def bench_models(
    model: Annotated[list[str] | None, typer.Argument(help="resnet50, mobilenet_v2; all")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch size; may be repeated; 1 unless told")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="nchw, nhwc; may be repeated; both")] = None,
    budget: Annotated[float, typer.Option(help="seconds of timing for each model")] = 4.0,
    isa: Annotated[str, typer.Option(help="'avx2': hold every library to that instruction set")] = "",
    out: Annotated[Path | None, typer.Option(help="folder for the records; default under benchmarks/results")] = None,
    record: Annotated[bool, typer.Option(help="write the records")] = True,
) -> None:
    """Convert whole models, with and without fusing, compare them with torch, and time all in turn, on the CPU, in
    inference."""
    if isa:
        restart_with(isa)
    from rich.table import Table

    from ..problem import LAYOUTS
    from ..terminal import wide_console
    from .models import FILE_NAME, MODELS, measure_model, write_models
    from .report.models import model_row
    from .results import device_slug, results_folder

    for given, known, what in ((model, MODELS, "model"), (layout, LAYOUTS, "layout")):
        if unknown := [name for name in given or () if name not in known]:
            raise ValueError(f"{what} is {unknown[0]!r}; wanted one of {', '.join(known)}")
    for count in batch or ():
        if count < 1:
            raise ValueError(f"batch is {count}; wanted 1 or more")
    console, place = wide_console(), place_of("cpu")
    folder = (out or results_folder() / device_slug(place)) if record else None
    console.print(_place_text(place), soft_wrap=True)
    command = shlex.join(["openconv", *sys.argv[1:]])
    table = Table("model", "batch", "layout", "torch ms", "openconv ms", "times", "fused ms", "times", "difference")
    wanted = [(name, n, lay) for name in model or MODELS for n in batch or (1,) for lay in layout or LAYOUTS]
    for at, (name, n, lay) in enumerate(wanted):
        with console.status(f"{name}, batch {n}, {lay} ({at + 1} of {len(wanted)})"):
            made = measure_model(name, n, lay, budget=budget, command=command)
        if folder:
            write_models(folder / FILE_NAME, [made])
        table.add_row(*model_row(made), f"{max(made.error, made.fused_error or 0.0):.1e}")
    console.print(table)
