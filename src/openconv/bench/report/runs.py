"""Runs: the records of one folder or file, which one machine has measured, and how to find them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from ...problem import DIRECTIONS, Problem
from ..errors import FILE_NAME as ERRORS
from ..errors import ErrorRecord, read_errors
from ..graphs_results import FILE_NAME as GRAPHS
from ..models import FILE_NAME as MODELS
from ..profiles import FILE_NAME as PROFILES
from ..results import Record, read, results_folder

__all__ = ["DIRECTION_ORDER", "Run", "base_name", "grouped", "layer_family", "layer_kind", "load", "problem_of"]

DIRECTION_ORDER = {name: at for at, name in enumerate(DIRECTIONS)}

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """What one machine has measured: the records of a folder, or of a file."""

    name: str
    records: Sequence[Record]
    errors: Sequence[ErrorRecord] = ()
    """What `openconv bench-errors` has recorded beside them."""

    @cached_property
    def kind(self) -> str:
        """``cpu`` or ``cuda``, which also starts the name of the folder that the benchmark writes."""
        said = self._machine.get("kind")
        return str(said or ("cuda" if self.name.startswith("cuda") else "cpu"))

    @cached_property
    def title(self) -> str:
        """The machine and the conditions, as a heading."""
        machine = self._machine
        parts = [str(machine.get("device", self.name))]
        if self.kind == "cpu":
            threads = machine.get("threads")
            parts += [str(machine["isa"])] if "isa" in machine else []
            parts += [f"{threads} thread{'s' * (threads != 1)}"] if threads else []
        parts += [f"torch {machine['torch']}"] if "torch" in machine else []
        if machine.get("kept_bytes", 1) == 0 and self.kind == "cpu":
            parts.append("every result on new memory")
        return ", ".join(parts)

    @property
    def _machine(self) -> dict[str, Any]:
        if self.records:
            return self.records[0].machine
        return self.errors[0].machine if self.errors else {}

    @cached_property
    def peers(self) -> list[str]:
        """The peers of any record: the reference first, then by name."""
        found = {name for record in self.records for name in record.peers}
        return sorted(found, key=lambda name: (name != "torch", not name.startswith("torch"), name))

    @property
    def reference(self) -> str:
        """The peer that ratios refer to unless another is asked for: torch, or the one nearest to it."""
        return self.peers[0] if self.peers else "torch"

    @property
    def chosen(self) -> list[Record]:
        """The records in which openconv has an engine."""
        return [record for record in self.records if record.chosen]

    @property
    def baseline(self) -> list[Record]:
        """The records of peers alone, where openconv has no engine yet."""
        return [record for record in self.records if not record.chosen]

    def only(self, suites: Sequence[str], directions: Sequence[str]) -> Run:
        """The run with the records of these suites and passes; of all where none is named."""
        kept = [
            record
            for record in self.records
            if (not suites or record.suite in suites) and (not directions or problem_of(record).direction in directions)
        ]
        return Run(self.name, kept, self.errors)


def grouped(records: Iterable[Record], key: Callable[[Record], K]) -> dict[K, list[Record]]:
    """The records by a key, in the order in which the keys appear."""
    groups: dict[K, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


@cache
def _parse(text: str) -> Problem:
    return Problem.parse(text)


def problem_of(record: Record) -> Problem:
    """The problem of a record; each text is parsed once."""
    return _parse(record.problem)


def base_name(contestant: str) -> str:
    """The engine without its knobs: ``cpu.depthwise`` of ``cpu.depthwise[block=8192]``."""
    return contestant.partition("[")[0]


def layer_family(record: Record) -> str:
    """The few sorts of layers that behave alike."""
    problem = problem_of(record)
    if record.suite == "overhead":
        return "tiny"
    if problem.c == problem.k == 1 and problem.n == 1:
        return "image filter"
    if problem.is_depthwise:
        return "depthwise"
    if prod(problem.filter) == 1:
        return "1x1"
    if problem.stride == problem.filter:
        return "patches"
    return "dense" if problem.groups == 1 else "grouped"


def layer_kind(record: Record) -> str:
    """What sort of layer it is, with its filter."""
    problem, family = problem_of(record), layer_family(record)
    if family == "1x1":
        return "1x1" if prod(problem.stride) == 1 else f"1x1, stride {max(problem.stride)}"
    named = {"tiny": "tiny problem (the call itself)", "image filter": "one-channel image filter",
             "patches": "patches (stride = filter)"}  # fmt: skip
    return named.get(family) or f"{family} {'x'.join(map(str, problem.filter))}"


def load(paths: Sequence[Path] = ()) -> list[Run]:
    """The runs of folders and files; of ``benchmarks/results`` of the checkout if none is named.

    A folder holds records (``*.jsonl``, but for those of graphs and models; those of errors are apart), or folders that
    do.
    FileNotFoundError if a path is not there, ValueError if there are no records in it or a line is damaged.
    """
    runs = [run for path in paths or [results_folder()] for run in _runs_at(path)]
    return _with_names_of_their_own(runs)


def _runs_at(path: Path) -> list[tuple[Path, Run]]:
    if not path.exists():
        raise FileNotFoundError(f"there is no folder or file {str(path)!r}; `make bench` records results")
    if path.is_file():
        found = [
            (path, Run(path.stem, [], read_errors(path)) if path.name == ERRORS else Run(path.stem, _checked(path)))
        ]
    else:
        folders = [path, *sorted(p for p in path.iterdir() if p.is_dir())]
        found = [
            (folder, Run(folder.resolve().name, _all_checked(folder), read_errors(folder / ERRORS)))
            for folder in folders
        ]
    found = [(where, run) for where, run in found if run.records or run.errors]
    if not found:
        raise ValueError(f"there are no records in {str(path)!r}; wanted *.jsonl files as `make bench` writes them")
    return found


def _all_checked(folder: Path) -> list[Record]:
    """The records of all suites of a folder."""
    files = sorted(file for file in folder.glob("*.jsonl") if file.name not in (GRAPHS, ERRORS, MODELS, PROFILES))
    return [record for file in files for record in _checked(file)]


def _checked(path: Path) -> list[Record]:
    """The records of a file, each with a problem that can be read and times that are numbers."""
    records = read(path)
    for record in records:
        try:
            problem_of(record)
            if not all(took["median"] > 0 for took in record.seconds.values()):
                raise ValueError("a median is not above 0")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, record of {record.problem!r}: {error}") from None
    return records


def _with_names_of_their_own(found: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Names tell runs apart: two folders of one name, a before and an after, get the path with it."""
    names = [run.name for _, run in found]
    return [replace(run, name=str(path)) if names.count(run.name) > 1 else run for path, run in found]
