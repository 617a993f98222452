"""``openconv profile``: what Nsight Compute counts while an engine computes a problem."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from .command import _without_place, jobs_of, place_of

__all__ = ["profile"]


def profile(
    what: Annotated[list[str], typer.Argument(help="suites, layers as SUITE:LABEL, or problems as text")],
    engine: Annotated[list[str], typer.Option(help="an engine of CUDA; may be repeated")],
    direction: Annotated[list[str] | None, typer.Option(help="fprop, dgrad, wgrad; may be repeated")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the records; default under benchmarks/results")] = None,
    record: Annotated[bool, typer.Option(help="write the records")] = True,
) -> None:
    """Run engines on a GPU under Nsight Compute and print what limits their kernels: bytes, hits, occupancy, conflicts.

    Engines that refuse a problem are passed over, with their reason.
    """
    from ..engine import engine_named
    from ..plan import device_of, lower
    from ..terminal import wide_console
    from .profiles import FILE_NAME, rows, write_profiles
    from .profiles import profile as run
    from .report.tables import plain_table
    from .results import device_slug, results_folder
    from .suites import Variation

    console, place = wide_console(), place_of("cuda")
    device = device_of(place)
    for name in engine:
        if engine_named(name).device != "cuda":
            raise ValueError(f"engine is {name!r}, which does not run on a GPU")
    wanted = Variation((), tuple(direction or ()), (), ())
    jobs = []
    for entry in what:
        suite, _, label = entry.partition(":") if " " not in entry else (entry, "", "")
        found = [job for job in jobs_of([suite], "cuda", wanted) if label in ("", job.label)]
        if not found:
            raise ValueError(f"suite {suite!r} has no layer {label!r}")
        for job in found:
            for name in engine:
                reason = next(iter(engine_named(name).refusals(lower(job.problem, device), device)), None)
                if reason is None:
                    jobs.append((job.suite, job.label, job.problem, name))
                else:
                    console.print(f"{job.label} by {name} is left out: {reason}", markup=False, soft_wrap=True)
    if not jobs:
        raise ValueError("nothing is left to profile")
    with console.status(f"profiling {len(jobs)} calls"):
        records = run(jobs, command=shlex.join(["openconv", *_without_place(sys.argv[1:])]))
    if record:
        path = (out or results_folder() / device_slug(place)) / FILE_NAME
        write_profiles(path, records)
        console.print(f"recorded {len(records)} calls in {path}", soft_wrap=True)
    columns = ("us", "DRAM %", "SM %", "L1 hit %", "L2 hit %", "occupancy %", "registers", "bank conflicts")
    keys = ("seconds", "dram_percent", "compute_percent", "l1_hit_percent", "l2_hit_percent", "occupancy_percent",
            "registers", "bank_conflicts")  # fmt: skip
    table = plain_table("What the profiler says, a row a kernel", ("layer", "engine", "kernel"), columns)
    for row in rows(records):
        scale = {"seconds": 1e6}
        cells = (f"{row[key] * scale.get(key, 1):.5g}" if key in row else "-" for key in keys)
        table.add_row(row["label"], row["engine"], row["name"].partition("(")[0], *cells)
    console.print(table)
