"""The page: one HTML file with the records, the filters and the charts in it. It needs no network and no server.

The page's own parts lie beside this file: ``page.html`` is the frame, ``page.css`` the looks and ``page.js`` all that
moves. The records go into it as JSON, and from there onto the page as text only: nothing from a file is ever markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from ...files import write_atomic
from ..results import Record
from .runs import Run, base_name, layer_family, problem_of

__all__ = ["page_data", "render_page", "write_page"]

_DIGITS = 6  # significant digits of a figure: beyond them is noise


def render_page(runs: Sequence[Run]) -> str:
    """The whole page."""
    here = Path(__file__).parent
    parts = {"style": (here / "page.css").read_text(), "script": (here / "page.js").read_text()}
    page = (here / "page.html").read_text()
    for name, text in {**parts, "data": _script_safe(page_data(runs))}.items():
        page = page.replace(f"/*{name}*/", text)
    return page


def write_page(path: Path, runs: Sequence[Run]) -> Path:
    """Write the page; returns the path."""
    return write_atomic(path, render_page(runs))


def _script_safe(data: Any) -> str:
    """JSON that no HTML parser can read as the end of its script element, or as a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class _Pool:
    """Values that many records share, each stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._place: dict[Hashable, int] = {}

    def place(self, value: Any) -> int:
        """The number of a value, which is added if it is new."""
        key = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
        if key not in self._place:
            self._place[key] = len(self.values)
            self.values.append(value)
        return self._place[key]


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page holds: the records with short keys, and apart from them what many records share."""
    names, machines, ceilings = _Pool(), _Pool(), _Pool()
    titles = [run.title for run in runs]
    records = [
        {"m": at, "v": machines.place(_plain(r.machine)), "o": ceilings.place(_plain(r.ceilings))} | _record(r, names)
        for at, run in enumerate(runs)
        for r in run.records
    ]
    return {
        "runs": [run.title if titles.count(run.title) == 1 else f"{run.title} ({run.name})" for run in runs],
        "names": names.values,
        "machines": machines.values,
        "ceilings": ceilings.values,
        "records": records,
    }


def _record(record: Record, names: _Pool) -> dict[str, Any]:
    """One record; what is absent or empty is left out."""
    problem = problem_of(record)
    by_name: dict[str, dict[str, Any]] = {
        "t": {k: [_plain(v.get(part)) for part in ("median", "p20", "p80")] for k, v in record.seconds.items()},
        "p": record.predicted, "e": record.error, "q": record.roofline, "w": record.workspace,
        "h": record.overhead, "z": record.notes,
    }  # fmt: skip
    fields = {
        "s": record.suite, "l": record.label, "x": record.problem, "c": record.chosen, "g": base_name(record.chosen),
        "d": problem.direction, "y": problem.dtypes[0], "a": problem.layouts[0], "k": layer_family(record),
        "u": record.heuristic, "r": record.source,
    }  # fmt: skip
    shared = {key: names.place(text) for key, text in fields.items() if text}
    numbers = {"f": problem.flops, "b": problem.min_bytes, "j": _plain(record.knobs), "n": list(record.wrong)}
    placed = {key: {names.place(name): _plain(v) for name, v in found.items()} for key, found in by_name.items()}
    ceiling = problem.precision if problem.precision in record.ceilings else problem.dtypes[0]
    return {**shared, "i": ceiling, **{key: value for key, value in (numbers | placed).items() if value}}


def _plain(value: Any) -> Any:
    """As JSON can hold it: numbers of few digits, nothing that is not a number, other objects as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return str(value)
