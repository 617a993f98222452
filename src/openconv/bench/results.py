"""Results: one JSON line per problem, appended to a list and written atomically, with what they were measured on."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..cpu.memory import most_kept_bytes
from ..device import Device
from ..files import write_atomic
from ..problem import Problem

__all__ = ["Record", "device_slug", "environment", "geometric_mean", "read", "results_folder", "write"]


@dataclass(frozen=True)
class Record:
    """One problem: what each engine and each peer took, in seconds, and how far each engine was from float64."""

    suite: str
    label: str
    problem: str
    chosen: str
    seconds: dict[str, dict[str, float]]
    predicted: dict[str, float]
    error: dict[str, float]
    wrong: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def ratio(self, peer: str, engine: str | None = None) -> float | None:
        """How many times faster than a peer the chosen engine is, or another."""
        ours, theirs = self.seconds.get(engine or self.chosen), self.seconds.get(peer)
        return theirs["median"] / ours["median"] if ours and theirs else None

    @property
    def engines(self) -> list[str]:
        """The engines that were timed."""
        return [name for name in self.seconds if "." in name]

    @property
    def regret(self) -> float:
        """Time of the chosen engine over that of the fastest one; infinite if the chosen one was wrong."""
        if self.chosen not in self.seconds:
            return math.inf
        return self.seconds[self.chosen]["median"] / min(self.seconds[e]["median"] for e in self.engines)

    def parsed(self) -> Problem:
        """The problem."""
        return Problem.parse(self.problem)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean that treats twice as fast and half as fast alike; None of nothing."""
    logs = [math.log(value) for value in values if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def environment(device: Device) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "device": device.name,
        "threads": device.threads,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "openconv": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kept_bytes": most_kept_bytes(),
    }


def device_slug(device: Device) -> str:
    """Folder name for a device: its kind, model, vector instructions and threads, and whether memory is kept."""
    isa = torch.backends.cpu.get_cpu_capability().lower() if device.kind == "cpu" else ""
    text = f"{device.kind} {re.sub(r'[(][^)]*[)]|Processor|CPU|@', ' ', device.name)} {isa} {device.threads}t"
    text += "" if most_kept_bytes() else " new-memory"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def results_folder() -> Path:
    """benchmarks/results of the checkout."""
    from .suites import suites_folder

    return suites_folder().parent / "results"


def write(path: Path, records: Iterable[Record]) -> None:
    """All records, one JSON object a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(asdict(record), sort_keys=True) + "\n" for record in records))


def read(path: Path) -> list[Record]:
    """The records of a file."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines() if line]
