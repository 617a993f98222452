"""``openconv tune`` and ``openconv tuning ...``: fill the tuning database, and look after its files."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from .problem import Problem
    from .select.database import Database
    from .tuner import Tuned

__all__ = ["database", "tune"]

database = typer.Typer(no_args_is_help=True, help="Show, compare, merge, export and import tuning databases.")


def tune(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="suites, problems as text, or a model as MODULE:NAME with --input; all suites if absent"),
    ] = None,
    budget: Annotated[str, typer.Option(help="time for the whole: 60s, 5m, 1h")] = "60s",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    direction: Annotated[list[str] | None, typer.Option(help="of suites: fprop, dgrad, wgrad; may be repeated")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="of suites: batch size; may be repeated")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="of suites: nchw, nhwc; may be repeated")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="of suites: f32, f16, ...; may be repeated")] = None,
    input: Annotated[
        list[str] | None, typer.Option(help="shape of a model's input: 1x3x224x224; may be repeated")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="of a model: the gradients' convolutions too")] = False,
    again: Annotated[bool, typer.Option("--again", help="also measure what the database knows already")] = False,
    isa: Annotated[str, typer.Option(help="'avx2': hold every library to that instruction set")] = "",
    out: Annotated[Path | None, typer.Option(help="the database to write; the user's own if absent")] = None,
) -> None:
    """Measure candidates (engines and knobs) until their order is settled, and remember the fastest.

    What is measured is written at once: Ctrl-C keeps it, and a second run goes on with what is not yet known.
    """
    from .bench.command import place_of, restart_with
    from .select.database import Store, user_store
    from .terminal import wide_console, with_time_left
    from .tuner import parse_seconds
    from .tuner import tune as tune_problems

    if isa:
        restart_with(isa)
    seconds, place, console = parse_seconds(budget), place_of(device), wide_console()
    problems = _problems(what or [], place, (direction, batch, layout, dtype), input or [], backward)
    store = Store(out) if out else user_store()
    done: list[Tuned] = []
    stopped = False
    with with_time_left(console) as progress:
        task = progress.add_task("tuning", total=len(problems))

        def told(at: int, count: int, tuned: Tuned) -> None:
            done.append(tuned)
            progress.update(task, completed=at, total=count, description=str(tuned.problem)[:60])

        try:
            tune_problems(problems, budget=seconds, device=place, again=again, store=store, progress=told)
        except KeyboardInterrupt:
            stopped = True
    console.print(_outcome(done))
    _say_how_many(console, done)
    console.print(f"database: {store.path}", soft_wrap=True, highlight=False)
    if stopped:
        console.print("[yellow]stopped; what was measured is kept, and the same command goes on from there")
        raise typer.Exit(130)


def _problems(
    what: list[str], place: torch.device, narrowed: tuple[Any, ...], shapes: list[str], backward: bool
) -> list[Problem]:
    """The problems of suites, of models, and those given as text."""
    from .bench.command import jobs_of
    from .bench.suites import Variation

    direction, batch, layout, dtype = (tuple(values or ()) for values in narrowed)
    wanted = Variation(batches=batch, directions=direction, dtypes=dtype, layouts=layout)
    models = [entry for entry in what if ":" in entry and " " not in entry]
    suites = [entry for entry in what if entry not in models]
    found = [job.problem for job in jobs_of(suites, place.type, wanted)] if suites or not models else []
    for entry in models:
        found += _of_model(entry, shapes, place, backward)
    return found


def _of_model(entry: str, shapes: list[str], place: torch.device, backward: bool) -> list[Problem]:
    """The convolutions of ``MODULE:NAME``, a module of PyTorch or a function without arguments that makes one."""
    import torch

    from .tuner import convolutions_of

    module, _, name = entry.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` has it: a model lies where one works
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model is {entry!r}: {error}; wanted MODULE:NAME, as torchvision.models:resnet50") from None
    model = found() if callable(found) and not isinstance(found, torch.nn.Module) else found
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model {entry!r} is a {type(model).__name__}; wanted a torch.nn.Module or what makes one")
    if not shapes:
        raise ValueError(f"model {entry!r} needs --input, the shape of an example: --input 1x3x224x224")
    for shape in shapes:
        if not re.fullmatch(r"\d+(x\d+)*", shape):
            raise ValueError(f"input is {shape!r}; wanted sizes such as 1x3x224x224")
    example = [torch.randn([int(v) for v in shape.split("x")], device=place) for shape in shapes]
    return convolutions_of(model.to(place).train(backward), *example, backward=backward)


def _outcome(done: list[Tuned]) -> Table:
    """What was found for each problem that was measured."""
    from rich.table import Table

    from .units import seconds_text

    table = Table(title="measured")
    for name in ("problem", "fastest", "knobs"):
        table.add_column(name, overflow="fold")
    for name in ("time", "next", "gain", "settled"):
        table.add_column(name, justify="right", no_wrap=True)
    for tuned in done:
        if tuned.state != "measured" or tuned.entry is None:
            continue
        best, *others = tuned.entry.measured
        behind = f"{others[0].seconds / best.seconds:.2f}" if others else "-"
        gain = f"{tuned.gain:.2f}" if tuned.gain else "-"
        table.add_row(str(tuned.problem), best.engine, best.knobs, seconds_text(best.seconds), behind, gain,
                      "yes" if tuned.entry.settled else "no")  # fmt: skip
    table.caption = "next: time of the second over that of the fastest; gain: of what predictions would choose"
    return table


def _say_how_many(console: Console, done: list[Tuned]) -> None:
    from .bench.results import geometric_mean

    states = {state: sum(t.state == state for t in done) for state in dict.fromkeys(t.state for t in done)}
    console.print(", ".join(f"{count} {state}" for state, count in states.items()) or "nothing was measured")
    if mean := geometric_mean(t.gain for t in done):
        console.print(f"geometric mean of the gain over predictions: {mean:.3f}")
    if states.get("no time"):
        console.print("[yellow]the budget ended before all were measured; the same command goes on from there")


# -- files ------------------------------------------------------------------------------------------------------------


def _merged(files: list[Path]) -> Database:
    """What several files hold together; of two entries for a problem the later one."""
    from .select.database import Database, read_database

    merged = Database()
    for path in files:
        merged.merge(read_database(path))
    return merged


def _in_force(layers: bool) -> Database:
    """What is shipped, with the user's own over it; or the user's own alone."""
    from .select.database import Database, shipped_databases, user_store

    found = Database()
    if layers:
        for shipped in shipped_databases():
            found.merge(shipped)
    for device, problem, entry in user_store().load():
        found.devices.setdefault(device, {})[problem] = entry
    return found


@database.command()
def show(
    words: Annotated[list[str] | None, typer.Argument(help="only problems with all of these words")] = None,
    file: Annotated[Path | None, typer.Option(help="a database file; what is in force if absent")] = None,
    device: Annotated[str, typer.Option(help="only devices with this in their name")] = "",
) -> None:
    """List what is known: each problem, its fastest engine, how much slower the others are, and what is out of date."""
    from rich.table import Table
    from rich.text import Text

    from .select import version_of
    from .terminal import wide_console
    from .units import seconds_text

    found = _merged([file]) if file else _in_force(True)
    console, stale = wide_console(), 0
    for name in sorted(found.devices):
        if device not in name:
            continue
        table = Table(title=name)
        for column in ("problem", "fastest", "time", "others", "measured"):
            table.add_column(column, overflow="fold", justify="right" if column == "time" else "left")
        for problem, entry in sorted(found.devices[name].items()):
            if not all(word in problem.split() for word in words or ()):
                continue
            best, *others = entry.measured
            old = [m.engine for m in entry.measured if version_of(m.engine) != m.version]
            stale += bool(old)
            rest = ", ".join(f"{m.engine} {m.seconds / best.seconds:.2f}" for m in others)
            state = entry.when[:10] + ("" if entry.settled else ", unsettled") + (", out of date" if old else "")
            table.add_row(problem, Text(f"{best.engine} [{best.knobs}]"), seconds_text(best.seconds), rest, state)
        console.print(table)
    if stale:
        console.print(f"{stale} entries hold times of engines whose code has changed since; those are not used")


@database.command()
def diff(
    before: Annotated[Path, typer.Argument(help="a database file")],
    after: Annotated[Path, typer.Argument(help="another")],
) -> None:
    """Say what differs between two files: other winners, faster and slower, problems of one alone."""
    from rich.table import Table

    from .select.database import differences
    from .terminal import wide_console

    changes = differences(_merged([before]), _merged([after]))
    table = Table(title=f"{before} to {after}")
    for column in ("device", "problem", "before", "after", "times faster", ""):
        table.add_column(column, overflow="fold")
    for change in changes:
        sides = [f"{e.best.engine} {e.best.knobs}" if e else "-" for e in (change.before, change.after)]
        ratio = "" if change.ratio is None else f"{change.ratio:.2f}"
        said = [word for word, true in (("other choice", change.moved), ("within noise", change.noise)) if true]
        table.add_row(change.device, change.problem, *sides, ratio, ", ".join(said))
    console = wide_console()
    if changes:
        console.print(table)
    console.print(f"{len(changes)} problems differ")


@database.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="database files; of two entries for a problem the later wins")],
    out: Annotated[Path, typer.Option("--out", "-o", help="the file to write")],
) -> None:
    """Write one file that holds what several do."""
    _write(out, _merged(files))


@database.command("export")
def export_(
    out: Annotated[Path, typer.Argument(help="the file to write")],
    device: Annotated[str, typer.Option(help="only devices with this in their name")] = "",
    shipped: Annotated[
        bool, typer.Option("--shipped", help="with what the package ships below the user's own")
    ] = False,
) -> None:
    """Write the user's own database into a file, to be shipped or merged elsewhere."""
    _write(out, _in_force(shipped).only(lambda name, problem: device in name))


@database.command("import")
def import_(files: Annotated[list[Path], typer.Argument(help="database files")]) -> None:
    """Add files to the user's own database; nothing is changed unless all of them can be read."""
    from rich.console import Console

    from .select.database import user_store

    merged = _merged(files)
    user_store().update(merged)
    Console().print(f"{len(merged)} problems imported into {user_store().path}", soft_wrap=True, highlight=False)


def _write(path: Path, found: Database) -> None:
    from rich.console import Console

    from .files import write_atomic

    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write into; make it first")
    write_atomic(path, found.to_text())
    Console().print(f"{len(found)} problems written to {path}", soft_wrap=True, highlight=False)
