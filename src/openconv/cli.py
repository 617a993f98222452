"""The command line: ``openconv explain | engines | doctor | filter | demo | bench | bench-errors | ...``.

Errors are one line on standard error and exit code 2; a wrong result or a broken installation is exit code 1.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .bench.command import bench
from .bench.errors_command import bench_errors
from .bench.graphs_command import bench_graphs
from .bench.models_command import bench_models
from .bench.profile_command import profile
from .bench.report.command import report
from .compile_command import compile_kernels
from .trace.command import trace
from .tune_command import database, tune

__all__ = ["app"]

app = typer.Typer(
    name="openconv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"openconv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """An open convolution engine for PyTorch: readable kernels, explained choices, measured speed."""


@contextmanager
def _one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Turn what a user can cause, which is an OSError or one of the others, into one line and exit code 2."""
    try:
        yield
    except typer.Exit:  # a RuntimeError to Python, but no error
        raise
    except FileNotFoundError as error:
        _fail(f"there is no file {error.filename!r}" if error.filename else str(error))
    except OSError as error:
        _fail(f"{error.strerror}: {error.filename!r}" if error.strerror and error.filename else str(error))
    except others as error:
        _fail(str(error) or type(error).__name__)


def _fail(message: str) -> None:
    text = " ".join(message.split())
    Console(stderr=True, soft_wrap=True).print(f"error: {text}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str | None) -> int | None:
    """``64M``, ``1G`` or a plain number of bytes."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"max-workspace is {text!r}; wanted bytes, as 1048576, 512K, 64M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


@app.command()
def explain(
    problem: Annotated[list[str], typer.Argument(help="the problem as text: fprop n8 c64 h56 w56 k64 r3 s3 pad1 f32")],
    engine: Annotated[str | None, typer.Option(help="ask for this engine, or for the first of several")] = None,
    max_workspace: Annotated[str | None, typer.Option(help="limit on scratch memory: 0, 512K, 64M, 1G")] = None,
    accuracy: Annotated[str | None, typer.Option(help="'strict': plain sums of products only")] = None,
    precision: Annotated[str | None, typer.Option(help="how f32 products are formed: ieee, tf32, tf32x3")] = None,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="same bits whatever the batch")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="also run, time and check every candidate")] = False,
    budget: Annotated[float, typer.Option(help="seconds for each candidate with --measure")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say which engine runs a problem, why, and what it costs.

    A problem is a pass (fprop, dgrad, wgrad), sizes, and what differs from the defaults:
    fprop n8 c64 h56 w56 k128 r3 s3 stride2 pad1 g1 f16 nhwc +bias+relu
    """
    from .explanation import explain as explain_problem

    with _one_line_errors(ValueError, TypeError, RuntimeError):
        found = explain_problem(
            " ".join(problem), engine=engine, max_workspace=_bytes(max_workspace), accuracy=accuracy,
            precision=precision, batch_invariant=batch_invariant or None, device=device, measure=measure, budget=budget,
        )  # fmt: skip
    if as_json:
        _print_json(found.to_dict())
    else:
        Console().print(found)


@app.command()
def engines(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
) -> None:
    """List the engines: what each one is, what it takes, what it needs."""
    from .support import support_markdown, support_rich, support_table

    rows = support_table()
    if as_json:
        _print_json([row.to_dict() for row in rows])
    elif markdown:
        typer.echo(support_markdown(rows), nl=False)
    else:
        Console().print(support_rich(rows))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Look at this machine and installation: versions, CPU, CUDA, caches, what is missing."""
    from .doctor import examine, findings_rich, healthy

    findings = examine()
    if as_json:
        _print_json([finding.to_dict() for finding in findings])
    else:
        Console().print(findings_rich(findings))
    if not healthy(findings):
        raise typer.Exit(1)


@app.command("filter")
def filter_(
    picture: Annotated[Path, typer.Argument(help="a PNG or JPEG file")],
    output: Annotated[Path, typer.Option("--output", "-o", help="where to write: .png, .jpg or .jpeg")],
    kernel: Annotated[str, typer.Option("--kernel", "-k", help="a name, or a file of numbers (text rows or .npy)")],
    size: Annotated[int | None, typer.Option(help="taps a side of a named kernel")] = None,
    border: Annotated[str, typer.Option(help="beyond the edge: 'replicate' or 'zero'")] = "replicate",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="allow OUTPUT to be PICTURE itself")] = False,
) -> None:
    """Convolve a picture with a kernel.

    Kernels: identity, box, gaussian, blur, sharpen, edge, emboss, sobel, or one from a file. Grey, RGB and alpha of 8
    or 16 bits; colours are filtered one by one, alpha stays as it is.
    """
    from .explanation import explain as explain_problem
    from .pictures import (
        KERNELS,
        filter_picture,
        filter_problem,
        make_kernel,
        picture_format,
        read_kernel,
        read_picture,
        write_picture,
    )
    from .units import seconds_text

    console = Console(highlight=False)
    with _one_line_errors(ValueError, TypeError, RuntimeError):
        picture_format(output)
        if not output.parent.is_dir():
            raise ValueError(f"there is no folder {str(output.parent)!r} to write into; make it first")
        read = read_picture(picture)
        if output.exists() and output.samefile(picture) and not overwrite:
            raise ValueError(f"output {str(output)!r} is the picture itself; give another name, or --overwrite")
        if kernel in KERNELS or not Path(kernel).is_file():
            chosen = make_kernel(kernel, size)
        elif size is not None:
            raise ValueError(f"size is {size}, but the kernel is a file, which has a size of its own; leave --size out")
        else:
            chosen = read_kernel(Path(kernel))
        problem = filter_problem(read, chosen, border)
        winner = explain_problem(problem).winner
        start = time.perf_counter()
        filtered = filter_picture(read, chosen, border)
        took = time.perf_counter() - start
        write_picture(output, filtered)
    engine = winner.name if winner else "no engine"
    console.print(f"{picture}: {read}", markup=False)
    console.print(
        f"{chosen.name} {chosen.size[0]} x {chosen.size[1]} by {engine} in {seconds_text(took)}", markup=False
    )
    console.print(f"wrote {output}", markup=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the pictures, the plot and the page")] = Path("openconv-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="smaller pictures, fewer problems: seconds")] = False,
) -> None:
    """Filter a picture, check every engine against PyTorch in float64, race against PyTorch, and write a page on it."""
    from .demo import run_demo

    with _one_line_errors():
        right = run_demo(out, quick=quick, console=Console())
    if not right:
        raise typer.Exit(1)


def _reporting(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with what a user can cause told in one line."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _one_line_errors(ValueError, TypeError, RuntimeError):
            command(*args, **kwargs)

    return run


for _command in (bench, report, trace, tune, profile):
    app.command()(_reporting(_command))
for _entry in database.registered_commands:
    _entry.callback = _reporting(_entry.callback) if _entry.callback else None
app.command("bench-errors")(_reporting(bench_errors))
app.command("bench-models")(_reporting(bench_models))
app.command("bench-graphs")(_reporting(bench_graphs))
app.command("compile")(_reporting(compile_kernels))
app.add_typer(database, name="tuning")


if __name__ == "__main__":
    app()
