"""``openconv compile``: build GPU kernels ahead of time, and show what each takes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from .terminal import wide_console, with_time_left

__all__ = ["compile_kernels"]


def compile_kernels(
    problems: Annotated[list[str] | None, typer.Argument(help="problems as text; usual layers if absent")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="architecture, as sm_90a; may be repeated; 'all'")] = None,
    every: Annotated[bool, typer.Option("--every", help="all engines that accept, not only the chosen one")] = False,
    jobs: Annotated[int | None, typer.Option(help="compilations at a time; one for each core if absent")] = None,
    show: Annotated[bool, typer.Option(help="list every kernel, not only those that fail or spill")] = True,
) -> None:
    """Build every kernel that the choice can come to, without a GPU, and list registers, shared memory and spills.

    Exits with 1 if a kernel does not compile, or spills registers although it promises not to.
    """
    from .cuda.compile import build, usual_problems, variants
    from .cuda.device import ARCHITECTURES
    from .problem import Problem

    archs = list(ARCHITECTURES) if arch and "all" in arch else arch or ["sm_80", "sm_90a"]
    wanted = [Problem.parse(text) for text in problems or ()] or list(usual_problems())
    console = wide_console()
    found = variants(wanted, archs, chosen=not every)
    with with_time_left(console) as progress:
        task = progress.add_task("compiling", total=len(found))
        results = build(found, jobs=jobs, done=lambda _: progress.advance(task))
    table = Table("engine", "kernel", "architecture", "registers", "shared", "spilled", "for example", box=None)
    bad = [built for built in results if built.error or built.spills]
    for built in results if show else bad:
        for kernel in built.usage:
            table.add_row(built.variant.engine, kernel.name, built.variant.arch, str(kernel.registers),
                          str(kernel.shared), str(kernel.spills), built.variant.problem)  # fmt: skip
    if table.row_count:
        console.print(table)
    for built in results:
        if built.error:
            console.print(built.error, style="red", markup=False, highlight=False)
    names = {built.variant.engine for built in results}
    console.print(f"{len(results)} kernels of {len(names)} engines for {', '.join(archs)}: "
                  f"{sum(bool(b.error) for b in results)} fail, {sum(b.spills for b in results)} spill")  # fmt: skip
    if bad:
        raise typer.Exit(1)
