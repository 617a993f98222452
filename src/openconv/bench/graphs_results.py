"""Results of graphs: one JSON line for each pattern and layer, network or overhead, in ``graphs.jsonl`` of a device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomic

__all__ = ["FILE_NAME", "GraphLedger", "GraphRecord", "read_graphs", "write_graphs"]

FILE_NAME = "graphs.jsonl"
"""In the folder of a device, beside the files of suites."""


@dataclass(frozen=True)
class GraphRecord:
    """One graph: what each contestant took for all of it.

    ``kind`` is ``pattern``, ``network`` or ``overhead``. Contestants are ``fused`` and ``unfused``, which are
    openconv's graph and the same nodes one by one; others of openconv's, such as ``captured``; and peers. ``seconds``
    holds median, p20 and p80 of each that was timed; one that is ``wrong`` is not. An overhead's contestants are the
    parts of a call.
    """

    kind: str
    pattern: str
    label: str
    problem: str
    """The layer with all that is fused, as a problem's text; of a network, its sizes in words."""
    seconds: dict[str, dict[str, float]]
    kernels: dict[str, int] = field(default_factory=dict)
    """Of the graph as planned, by contestant."""
    error: dict[str, float] = field(default_factory=dict)
    """The distance to the reference: of patterns as :mod:`openconv.reference` has it, of networks a share of the
    largest result."""
    wrong: list[str] = field(default_factory=list)
    floor: dict[str, float] = field(default_factory=dict)
    """Seconds that ``memory`` and ``math`` take at the least, by the ceilings measured in the same process."""
    images: int = 0
    """Of a network's batch."""
    notes: dict[str, str] = field(default_factory=dict)
    """What is worth saying of a contestant: the plan in use, or why it took no part."""
    machine: dict[str, Any] = field(default_factory=dict)

    def ratio(self, other: str, own: str = "fused") -> float | None:
        """How many times faster than another contestant one is."""
        ours, theirs = self.seconds.get(own), self.seconds.get(other)
        return theirs["median"] / ours["median"] if ours and theirs else None

    @property
    def memory_bound(self) -> bool:
        """Whether moving its tensors once takes longer than its products."""
        return self.floor.get("memory", 0.0) > self.floor.get("math", 0.0)

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later record replaces."""
        return self.pattern, self.label, self.problem

    def to_json(self) -> str:
        """One line, in which the ratios are spelled out for those who read it without this class."""
        ratios = {name: self.ratio(name) for name in self.seconds if name != "fused" and "fused" in self.seconds}
        return json.dumps({**asdict(self), "ratio": ratios}, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> GraphRecord:
        """The record of a line; ValueError if it is none."""
        try:
            found = json.loads(line)
            found.pop("ratio", None)
            made = cls(**found)
            if not all(took["median"] > 0 for took in made.seconds.values()):
                raise ValueError("a median is not above 0")
            return made
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"not a record of a graph: {error}") from None


def write_graphs(path: Path, records: Iterable[GraphRecord]) -> None:
    """All records, one JSON object a line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(record.to_json() + "\n" for record in records))


def read_graphs(path: Path) -> list[GraphRecord]:
    """The records of a file, none if it is not there; ValueError names the line that is damaged."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        if line.strip():
            try:
                found.append(GraphRecord.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return found


class GraphLedger:
    """The file while graphs are measured: each record replaces that of the same graph, and the file is whole after
    each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records = {record.key: record for record in read_graphs(path)}

    def has(self, key: tuple[str, str, str], machine: dict[str, Any]) -> bool:
        """Whether it was measured already by the same code on the same machine, whatever the command."""
        found = self._records.get(key)
        return found is not None and found.machine | {"command": ""} == machine | {"command": ""}

    def add(self, record: GraphRecord) -> None:
        """Write it down."""
        self._records[record.key] = record
        write_graphs(self.path, self._records.values())
