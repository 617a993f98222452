"""The course of the demonstration, and what it prints."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import __version__
from ..bench.results import Record, geometric_mean
from ..bench.run import Limits, measure
from ..cuda.compile import build, variants
from ..cuda.device import CudaDevice
from ..device import Device
from ..explanation import explain
from ..files import write_atomic
from ..pictures import Picture, write_picture
from ..plan import device_of
from ..problem import Problem
from ..units import percent_text, ratio_text, seconds_text
from .checks import EngineCheck, check_engines, check_problems
from .filters import FILTERS, FilterResult, run_filter
from .layers import layers_text, race_layers
from .page import NEXT_COMMANDS, Findings, draw_plot, findings_json, render_page
from .scene import make_scene

__all__ = ["run_demo"]

_EXPLAINED = "fprop n1 c64 h56 w56 k64 r3 s3 pad1 f16 nhwc +bias+relu"


def run_demo(out: Path, *, quick: bool, console: Console, place: torch.device | None = None) -> bool:
    """Everything in order, on the GPU if there is one; the folder is made if it is not there. False if any result was
    wrong."""
    place = place or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    device = device_of(place)
    busy = _busy(device)
    console.print(f"[bold]openconv demo[/bold] on {device}{' (torch.get_num_threads)' * (place.type == 'cpu')}")
    console.print("a few minutes where kernels have to be compiled first, less after that\n")

    scene = Picture(make_scene(*((256, 512) if quick else (1024, 2048)))[..., None])
    write_picture(out / "scene.png", scene)
    filters: list[FilterResult] = []
    with _progress(console, "filtering", len(FILTERS)) as advance:
        for name, size in FILTERS:
            advance(f"{name} {size} x {size}")
            filters.append(run_filter(scene, name, size, 0.02 if quick else 0.4, place))
            write_picture(out / f"{name}.png", filters[-1].picture)
    console.print(_filter_table(filters))

    problems = list(check_problems(quick, place.type))
    if place.type == "cuda":
        _compile(console, problems, device)
    with _progress(console, "checking", len(problems)) as advance:
        checks = check_engines(problems, device, advance, place)
    console.print(_check_table(checks, len(problems)))

    records, failures = _race(console, quick, place)
    console.print(_race_table(records, place, roomy=console.width >= 110))

    explanation = explain(_EXPLAINED, measure=True, budget=0.05 if quick else 0.5, device=place)
    busy = busy or _busy(device)
    found = Findings(str(device), _versions(), scene, filters, checks, records, explanation, failures, busy,
                     layers_text(place.type))  # fmt: skip
    write_atomic(out / "speed.png", draw_plot(records))
    write_atomic(out / "results.json", json.dumps(findings_json(found), indent=1))
    page = write_atomic(out / "openconv-demo.html", render_page(found))
    _close(console, found, page)
    return not found.wrong


def _compile(console: Console, problems: list[Problem], device: Device) -> None:
    """All kernels of the check, several at a time: one by one, each at its first use, they take minutes."""
    assert isinstance(device, CudaDevice)
    wanted = variants(problems, [device.arch], chosen=False)
    with _progress(console, "compiling", len(wanted)) as advance:
        build(wanted, done=lambda built: advance(built.variant.source.file))


def _race(console: Console, quick: bool, place: torch.device) -> tuple[list[Record], list[str]]:
    """The records, and a line for each layer on which an engine failed."""
    layers, limits = race_layers(quick, place.type), Limits(peers=("torch", "opencv"), budget=0.02 if quick else 0.4)
    records: list[Record] = []
    failures: list[str] = []
    with _progress(console, "racing", len(layers)) as advance:
        for name, problem in layers:
            advance(name)
            try:
                records.append(measure("demo", name, problem, place, limits))
            except Exception as failure:  # shown like a wrong result; the other layers still race
                failures.append(f"{type(failure).__name__} on '{problem}': {failure}")
    return records, failures


def _busy(device: Device) -> str:
    """A warning if other programs keep the cores busy. The average over a minute is taken: an own run adds to it, so
    that only what goes beyond the own threads by half counts."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    if load <= 1.5 * max(cores, device.threads):
        return ""
    return f"The machine is busy (load {load:.1f} on {cores} cores): the times say little; run again when it is idle."


def _versions() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        capability += f", cuDNN {torch.backends.cudnn.version()}"
    return f"openconv {__version__}, torch {torch.__version__} ({capability}), Python {platform.python_version()}"


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar that goes away when the part is done; the callback names the next piece of work."""
    columns = (TextColumn("[bold]{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("[dim]{task.fields[piece]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, piece="")
        started = 0

        def advance(piece: str) -> None:
            nonlocal started
            progress.update(task, completed=started, piece=piece)
            started += 1

        yield advance


def _ratio(value: float | None) -> str:
    return f"[{'green' if value >= 1 else 'red'}]{ratio_text(value)}" if value else "-"


def _filter_table(filters: list[FilterResult]) -> Table:
    height, width, _ = filters[0].picture.pixels.shape
    table = Table(title=f"Picture filters, {height} x {width}, f32", title_justify="left")
    table.caption = "x torch: how many times as fast; off by: grey levels from the filter in float64"
    table.add_column("filter")
    for name in ("openconv", "PyTorch", "OpenCV", "x torch", "x OpenCV", "off by"):
        table.add_column(name, justify="right")
    for f in filters:
        times = [seconds_text(f.seconds[who]) if who in f.seconds else "-" for who in ("openconv", "torch", "opencv")]
        off = f"{f.difference:.0e}" if f.right else f"[bold red]{f.difference:.1e} WRONG"
        table.add_row(f"{f.name} {f.size}x{f.size}", *times, _ratio(f.ratio("torch")), _ratio(f.ratio("opencv")), off)
    return table


def _check_table(checks: list[EngineCheck], problems: int) -> Table:
    table = Table(title=f"Every engine against PyTorch in float64, {problems} problems", title_justify="left")
    table.caption = "worst / bound: the largest error, of what the engine promises at most"
    table.add_column("engine")
    for name in ("taken", "refused", "worst / bound"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for check in checks:
        worst = percent_text(check.worst) if math.isfinite(check.worst) else "not finite"
        verdict = "[green]right" if not check.wrong else f"[bold red]{len(check.wrong)} WRONG"
        if not check.taken:
            worst, verdict = "-", "nothing to check"
        table.add_row(check.name, str(check.taken), str(check.refused), worst, verdict)
    return table


def _race_table(records: list[Record], place: torch.device, *, roomy: bool) -> Table:
    table = Table(title=f"Layers: {layers_text(place.type)}", title_justify="left")
    for name in ("layer", "engine chosen"):
        table.add_column(name, no_wrap=True)
    for name in ("openconv", "PyTorch", "x torch"):
        table.add_column(name, justify="right", no_wrap=True)
    if roomy:
        table.add_column("others, times as long")
    for record in records:
        if record.chosen in record.wrong:
            table.add_row(record.label, f"[bold red]{record.chosen} WRONG", "-", "-", "-")
            continue
        times = [seconds_text(record.seconds[who]["median"]) for who in (record.chosen, "torch")]
        chosen = record.seconds[record.chosen]["median"]
        others = [f"{name.partition('.')[2]} {ratio_text(record.seconds[name]['median'] / chosen)}"
                  for name in record.engines if name != record.chosen]  # fmt: skip
        wrong = [f"[bold red]{name} WRONG[/bold red]" for name in record.wrong]
        ratio = _ratio(record.ratio("torch"))
        rest = [", ".join(others + wrong)] if roomy else []
        table.add_row(record.label, record.chosen.partition(".")[2], *times, ratio, *rest)
    mean = geometric_mean(r.ratio("torch") for r in records if r.chosen not in r.wrong)
    table.caption = f"geometric mean {ratio_text(mean)}" if mean else ""
    return table


def _close(console: Console, found: Findings, page: Path) -> None:
    for line in found.wrong[:20]:
        console.print(f"[bold red]wrong[/bold red] {line}", highlight=False)
    if found.busy:
        console.print(found.busy, style="yellow", highlight=False)
    console.print(f"\nopen [bold]{page}[/bold]", soft_wrap=True)
    console.print("the pictures, speed.png and results.json lie next to it")
    activate = Path(sys.prefix, "bin", "activate")
    unknown = shutil.which("openconv") is None and activate.exists()  # `make demo` does not change the user's PATH
    first = f", after '. {os.path.relpath(activate)}'" if unknown else ""
    console.print(f"what to run next{first}:", highlight=False, soft_wrap=True)
    for command, text in NEXT_COMMANDS:
        console.print(f"  [bold]{command}[/bold]", highlight=False)
        console.print(f"      {text}", style="dim", highlight=False)
