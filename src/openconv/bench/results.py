"""Results: one JSON line per problem, appended to a list and written atomically, with what they were measured on."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..cpu.memory import most_kept_bytes
from ..files import write_atomic
from ..plan import device_of
from ..problem import Problem

__all__ = [
    "CALLED_ONCE",
    "Ledger",
    "Record",
    "commit",
    "device_slug",
    "environment",
    "geometric_mean",
    "read",
    "results_folder",
    "write",
]


CALLED_ONCE = "called once, not verified"
"""How the note of a peer begins whose time is that of its only call."""


@dataclass(frozen=True)
class Record:
    """One problem: what each engine and each peer took, and everything that the figures depend on.

    Contestants go by name. Engines are those with a dot: ``cpu.depthwise`` with its default knobs,
    ``cpu.depthwise[block=8192]`` with others. All others are peers. ``seconds`` holds median, p20 and p80 of each
    contestant that was timed; one that is ``wrong`` is not.
    """

    suite: str
    label: str
    problem: str
    chosen: str
    """The contestant that openconv runs; empty where it has no engine."""
    seconds: dict[str, dict[str, float]]
    predicted: dict[str, float]
    """Seconds by each engine's cost model."""
    error: dict[str, float]
    """The distance to float64 as a share of sum(|x|*|w|), of engines and of those peers that were checked."""
    wrong: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    """Device, threads, versions, commit, command: see :func:`environment`."""
    heuristic: str = ""
    """The engine that predictions alone would choose."""
    source: str = "heuristic"
    """Where the choice came from: database, neighbour or heuristic."""
    knobs: dict[str, str] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    """Measured in the same process: ``copy`` in bytes per second, ``f32`` and other dtypes in operations per second."""
    roofline: dict[str, float] = field(default_factory=dict)
    """The share of the roofline that each contestant reached: the floor by the ceilings over its median."""
    overhead: dict[str, float] = field(default_factory=dict)
    """Seconds of CPU time that a call takes before it returns, where they were asked for."""
    disturbed: float = 0.0
    """How often a second other programs took the CPU away while it was timed."""
    notes: dict[str, str] = field(default_factory=dict)
    """What is worth saying of a contestant: the plan that a peer chose, or why it took no part."""

    def ratio(self, peer: str, engine: str | None = None) -> float | None:
        """How many times faster than a peer the chosen engine is, or another."""
        ours, theirs = self.seconds.get(engine or self.chosen), self.seconds.get(peer)
        return theirs["median"] / ours["median"] if ours and theirs else None

    @property
    def engines(self) -> list[str]:
        """The engines that were timed."""
        return [name for name in self.seconds if "." in name]

    @property
    def peers(self) -> list[str]:
        """The peers that were timed."""
        return [name for name in self.seconds if "." not in name]

    @property
    def regret(self) -> float:
        """Time of the chosen engine over that of the fastest one; infinite if the chosen one was wrong."""
        return self._behind(self.chosen)

    @property
    def heuristic_regret(self) -> float:
        """Time of the engine that predictions would choose over that of the fastest one."""
        return self._behind(self.heuristic or self.chosen)

    def _behind(self, name: str) -> float:
        if name not in self.seconds:
            return math.inf
        return self.seconds[name]["median"] / min(self.seconds[e]["median"] for e in self.engines)

    def parsed(self) -> Problem:
        """The problem."""
        return Problem.parse(self.problem)

    def to_json(self) -> str:
        """One line, in which the ratios are spelled out for those who read it without this class."""
        ratios = {peer: self.ratio(peer) for peer in self.peers if self.chosen in self.seconds}
        return json.dumps({**asdict(self), "ratio": ratios}, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line; ValueError if it is none."""
        try:
            found = json.loads(line)
            found.pop("ratio", None)
            return cls(**found)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a record: {error}") from None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean that treats twice as fast and half as fast alike; None of nothing."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def environment(place: torch.device, command: str = "") -> dict[str, Any]:
    """What a figure depends on besides the problem."""
    device = device_of(place)
    found = {
        "kind": device.kind,
        "device": device.name,
        "threads": device.threads,
        "openconv": __version__,
        "commit": commit(),
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.kind == "cpu":
        return found | {"isa": torch.backends.cpu.get_cpu_capability(), "kept_bytes": most_kept_bytes()}
    driver = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found | driver


@cache
def commit() -> str:
    """The commit of the checkout that runs, with ``+`` where its package was changed since; ``unknown`` elsewhere.
    ``OPENCONV_COMMIT`` tells it to a tree that was copied without its history."""
    if given := os.environ.get("OPENCONV_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[3]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "src"))
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def device_slug(place: torch.device) -> str:
    """Folder name for a device: its kind, model, vector instructions and threads, and whether memory is kept."""
    device = device_of(place)
    text = f"{device.kind} {re.sub(r'[(][^)]*[)]|Processor|CPU|@', ' ', device.name)}"
    if device.kind == "cpu":
        text += f" {torch.backends.cpu.get_cpu_capability()} {device.threads}t{' new-memory' * (not most_kept_bytes())}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def results_folder() -> Path:
    """benchmarks/results of the checkout."""
    from .suites import suites_folder

    return suites_folder().parent / "results"


def write(path: Path, records: Iterable[Record]) -> None:
    """All records, one JSON object a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(record.to_json() + "\n" for record in records))


def read(path: Path) -> list[Record]:
    """The records of a file; ValueError names the line that is damaged."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                found.append(Record.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return found


class Ledger:
    """The file of one suite while it is measured: each record replaces that of the same problem, and the file is whole
    after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = {(r.label, r.problem): r for r in (read(path) if path.exists() else ())}

    def has(self, label: str, problem: Problem, machine: dict[str, Any]) -> bool:
        """Whether the problem was measured already by the same code on the same machine, whatever the command."""
        found = self._records.get((label, str(problem)))
        return found is not None and found.machine | {"command": ""} == machine | {"command": ""}

    def add(self, record: Record) -> None:
        """Write it down."""
        self._records[record.label, record.problem] = record
        write(self.path, self._records.values())
