"""Which engine takes what, found by asking: every cell of the table comes from refusals to a grid of probe problems.

``openconv engines`` prints the table; :func:`support_markdown` is what the documents show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .device import Device
from .engine import Engine, engines
from .plan import device_of, lower
from .problem import DIRECTIONS, LAYOUTS, Problem
from .rewrites.base import Wrapper

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["EngineSupport", "support_markdown", "support_rich", "support_table"]

DTYPES = ("f32", "f64", "f16", "bf16", "complex64", "complex128", "i8", "i16", "i32", "i64", "u8")

# Each names a kind of layer by what it changes in a plain one: a 3x3 filter over 16 channels to 24. ``first`` has size,
# taps and padding of the first axis, where these are not as those of the others.
_SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unpadded": {"padding": 0},
    "one-sided padding": {"padding": ((0, 2),)},
    "large filter": {"filter": 11, "padding": 5},
    "1x1": {"filter": 1, "padding": 0},
    "strided 1x1": {"filter": 1, "padding": 0, "stride": 2},
    "wide 1x1": {"filter": 1, "padding": 0, "c": 64, "k": 64},
    "wide strided 1x1": {"filter": 1, "padding": 0, "c": 64, "k": 64, "stride": 2},
    "strided": {"stride": 2},
    "dilated": {"dilation": 2, "padding": 2},
    "patches": {"filter": 4, "stride": 4, "padding": 0},
    "large patches": {"filter": 16, "stride": 16, "padding": 0},
    "padded patches": {"filter": 4, "stride": 4, "padding": 2},
    "grouped": {"groups": 4},
    "small groups": {"groups": 8, "k": 16},
    "depthwise": {"groups": 16, "k": 16},
    "strided depthwise": {"groups": 16, "k": 16, "stride": 2},
    "one channel": {"c": 1, "k": 1},
    "few channels": {"c": 3, "k": 4},
    "first layer": {"c": 3, "stride": 2},
    "blur": {"groups": 16, "k": 16, "filter": 17, "padding": 8},
    "thin": {"first": (1, 1, 0), "k": 16},
    "large": {"n": 1, "first": (1 << 20, 3, 1)},
    "in tf32": {"precision": "tf32"},
}


@dataclass(frozen=True)
class EngineSupport:
    """One engine's row. ``dtypes`` are computed as they are, ``through`` by casts around the engine; ``needs`` are the
    conditions behind its refusals of shapes; ``batch_invariant`` is ``always``, ``on request`` (other knobs, chosen
    under ``batch_invariant=True``) or ``no``."""

    name: str
    device: str
    summary: str
    passes: tuple[str, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...]
    through: tuple[str, ...]
    layouts: tuple[str, ...]
    needs: tuple[str, ...]
    fuses: str
    deterministic: bool
    batch_invariant: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


@dataclass(frozen=True)
class _Probe:
    direction: str
    rank: int
    dtype: str
    layout: str
    shape: str

    @property
    def family(self) -> tuple[str, int, str, str]:
        return self.direction, self.rank, self.dtype, self.layout

    def problem(self) -> Problem:
        given = {"n": 2, "c": 16, "k": 24, "filter": 3, "padding": 1, **_SHAPES[self.shape]}
        size, taps, padding = given.pop("first", (32, given["filter"], given["padding"]))
        rest = self.rank - 1
        given["spatial"] = (size,) + (32,) * rest
        given["filter"] = (taps,) + (given["filter"],) * rest
        if not isinstance(given["padding"], tuple):
            given["padding"] = (padding,) + (given["padding"],) * rest
        return Problem(direction=self.direction, dtypes=self.dtype, layouts=self.layout, **given)  # type: ignore[arg-type]


def _probes() -> tuple[_Probe, ...]:
    return tuple(
        _Probe(direction, rank, dtype, layout, shape)
        for direction in DIRECTIONS
        for rank in (1, 2, 3)
        for dtype in DTYPES
        for layout in LAYOUTS
        for shape in _SHAPES
        if (rank > 1 or layout == "nchw") and (shape != "in tf32" or dtype == "f32")
    )


def support_table() -> list[EngineSupport]:
    """One row for each engine of the registry, in its order."""
    registry = engines()
    kinds = sorted({engine.device for engine in registry})
    return list(_table(registry, tuple(device_of(torch.device(kind)) for kind in kinds)))


@cache
def _table(registry: tuple[Engine, ...], devices: tuple[Device, ...]) -> tuple[EngineSupport, ...]:
    """Seconds of questions, whose answers change with engines and devices alone."""
    known = {device.kind: device for device in devices}
    asked = {kind: _questions(device) for kind, device in known.items()}
    return tuple(_support(engine, known[engine.device], asked[engine.device]) for engine in registry)


def _questions(device: Device) -> list[tuple[_Probe, Problem, Problem]]:
    """Every probe with its problem and what an engine on the device would see of it."""
    problems = ((probe, probe.problem()) for probe in _probes())
    return [(probe, problem, lower(problem, device)) for probe, problem in problems]


def _support(engine: Engine, device: Device, asked: list[tuple[_Probe, Problem, Problem]]) -> EngineSupport:
    accepted: list[_Probe] = []
    refused: list[tuple[_Probe, list[str]]] = []
    native: list[str] = []
    told: set[tuple[object, ...]] = set()
    deterministic, possible = True, True
    always = not isinstance(engine, Wrapper)  # what runs inside by default differs from machine to machine
    for probe, problem, core in asked:
        reasons = list(engine.refusals(core, device))
        if reasons:
            refused.append((probe, reasons))
            continue
        accepted.append(probe)
        if core.dtypes == problem.dtypes or (engine.takes_low and probe.dtype in ("f16", "bf16")):
            native.append(probe.dtype)
        # Layouts and casts lead to other memory, and not to other sums.
        if (like := (probe.direction, probe.rank, probe.shape, core.dtypes)) in told:
            continue
        told.add(like)
        traits = (engine.traits(core, knobs) for knobs in engine.knobs(core, device))
        first = next(traits)
        deterministic &= first.deterministic
        always &= first.batch_invariant
        possible = possible and (first.batch_invariant or any(t.batch_invariant for t in traits))
    families = {probe.family for probe in accepted}
    needs = [] if engine.proven else ["to be named: it is not proven on such a device yet"]
    needs += [_need(r) for probe, reasons in refused if probe.family in families for r in reasons]
    taken = {probe.dtype for probe in accepted}
    return EngineSupport(
        name=engine.name,
        device=engine.device,
        summary=engine.summary,
        passes=tuple(d for d in DIRECTIONS if any(p.direction == d for p in accepted)),
        ranks=tuple(sorted({p.rank for p in accepted})),
        dtypes=tuple(d for d in DTYPES if d in native),
        through=tuple(d for d in DTYPES if d in taken and d not in native),
        layouts=tuple(v for v in LAYOUTS if any(p.layout == v for p in accepted)),
        needs=tuple(dict.fromkeys(needs)),
        fuses=_fuses(engine),
        deterministic=deterministic,
        batch_invariant="always" if always else "on request" if possible else "no",
        source=engine.source,
    )


def _fuses(engine: Engine) -> str:
    if engine.takes_epilogue:
        return "any epilogue"
    if engine.takes_finish:
        return "bias, residual, clamp"
    return "bias" if engine.takes_bias else "nothing"


def _need(reason: str) -> str:
    """What a refusal asks for, without the value it saw: ``stride is (2, 2); wanted 1`` becomes ``stride: 1``."""
    seen, _, wanted = reason.partition("; ")
    subject = re.split(r" is | are | has \d", seen)[0]
    return f"{subject}: {wanted.removeprefix('wanted ')}" if wanted else reason


# -- as text ----------------------------------------------------------------------------------------------------------


def _dtype_text(row: EngineSupport) -> str:
    through = f" (cast: {' '.join(row.through)})" if row.through else ""
    return " ".join(row.dtypes) + through


def _cells(row: EngineSupport) -> Iterator[tuple[str, str]]:
    yield "passes", " ".join(row.passes)
    yield "axes", " ".join(map(str, row.ranks))
    yield "layouts", " ".join(row.layouts)
    yield "dtypes", _dtype_text(row)
    yield "needs", "; ".join(row.needs) or "nothing"
    yield "fuses", row.fuses
    yield "deterministic", "yes" if row.deterministic else "no"
    yield "batch-invariant", row.batch_invariant


def _file(row: EngineSupport) -> str:
    """The path from the package on: the same on every machine."""
    return "openconv/" + row.source.replace("\\", "/").rpartition("openconv/")[2]


def support_markdown(rows: list[EngineSupport], root: str = "") -> str:
    """The table in Markdown, and below it what each engine is and needs; ``root`` leads from the page to that of the
    repository."""
    head = ["engine", *(name for name, _ in _cells(rows[0]) if name != "needs")]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"[`{row.name}`]({root}src/{_file(row)})"]
        cells += [text for name, text in _cells(row) if name != "needs"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "What they are, and what they need:", ""]
    lines += [f"- `{row.name}`: {row.summary} *Needs* {dict(_cells(row))['needs']}" for row in rows]
    return "\n".join(lines) + "\n"


def support_rich(rows: list[EngineSupport]) -> RenderableType:
    """The table for a terminal: one block for each engine."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    blocks: list[RenderableType] = []
    for row in rows:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, text in _cells(row):
            grid.add_row(name, Text(text))
        grid.add_row("file", Text(_file(row)))
        blocks += [Text.assemble((row.name, "bold green"), "  ", row.summary), Padding(grid, (0, 0, 1, 2))]
    return Group(*blocks)
