"""``openconv trace``: write a page that shows step by step what an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["trace"]


def trace(
    problem: Annotated[
        list[str] | None, typer.Argument(help="the problem as text: fprop n1 c8 h12 w12 k8 r3 s3 pad1 f16 nhwc")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="the page to write")] = Path("trace.html"),
    engine: Annotated[str | None, typer.Option(help="the engine to begin with: cuda.tiled, cuda.igemm, ...")] = None,
    knobs: Annotated[
        str | None, typer.Option(help="knobs of its search space, as 'rows=1 filters=1'; the first that match")
    ] = None,
    arch: Annotated[str, typer.Option(help="the GPU's architecture; none has to be there")] = "sm_90a",
    alone: Annotated[bool, typer.Option("--alone", help="the given problem alone, without sizes to choose")] = False,
) -> None:
    """Write an interactive page: what blocks load, hold in shared memory, multiply and store, step by step.

    It shows the given problem in all three passes by every engine that can be traced, and a catalogue of small sizes.
    """
    from ..cuda.device import device_for
    from ..problem import Problem
    from ..terminal import wide_console, with_time_left
    from .page import DEFAULT, page_data, write_page
    from .tracers import trace_engine

    if knobs and not engine:
        raise ValueError(f"knobs are {knobs!r}, but of no engine; name it with --engine")
    if not output.parent.is_dir():
        raise ValueError(f"there is no folder {str(output.parent)!r} to write into; make it first")
    if output.is_dir():
        raise ValueError(f"output {str(output)!r} is a folder; wanted a file, as {str(output / 'trace.html')!r}")
    chosen, device = Problem.parse(" ".join(problem) if problem else DEFAULT), device_for(arch)
    if chosen.rank > 2:
        raise ValueError(f"'{chosen}' has {chosen.rank} spatial axes; the page draws one or two")
    if engine:
        trace_engine(chosen, engine, device, knobs)  # what it refuses is an error here, not a word on the page
    console = wide_console()
    with with_time_left(console) as progress:
        task = progress.add_task("tracing", total=None)
        data = page_data(
            chosen, device, engine=engine, knobs=knobs, alone=alone,
            progress=lambda done, of: progress.update(task, completed=done, total=of),
        )  # fmt: skip
    write_page(output, data)
    console.print(f"wrote {output}: {len(data['traces'])} traces", soft_wrap=True, highlight=False, markup=False)
