"""The tuning database: what candidates were measured to take, in a text file that can be read, diffed and shipped.

    {"format": 1,
     "devices": {
      "cpu intel xeon, 16 lanes, 2 threads": {
       "fprop n1 c64 h56 w56 k64 r3 s3 pad1 f32 nchw": {"when": "2026-11-15T10:40:00Z", "settled": true, "measured": [
        {"engine": "cpu.im2col_gemm", "knobs": "images=1 pixels=3136", "version": "35ae2e057fcd", "us": 1815.2, ...},

The key is the text of the problem that engines see, then the kind of device; each measurement names the version of the
engine's code that it holds for, and counts for nothing when that code has changed. Two layers are in force: the file of
the user, and below it those shipped in the package, one for each kind of device.

A file is replaced whole, under a lock, so that several processes may write; one that cannot be read is set aside under
another name with one warning.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..device import Device
from ..files import write_atomic
from ..problem import Problem

__all__ = [
    "Change",
    "Database",
    "Entry",
    "Known",
    "Measurement",
    "Store",
    "differences",
    "lookup",
    "read_database",
    "shipped_databases",
    "shipped_file",
    "stores",
    "user_store",
]

FORMAT = 1


@dataclass(frozen=True)
class Measurement:
    """Seconds of one engine with one set of knobs: the median, the 20th and the 80th percentile of so many runs."""

    engine: str
    knobs: str
    version: str
    seconds: float
    p20: float
    p80: float
    runs: int

    def to_json(self) -> str:
        """One line, times in microseconds."""
        times = {name: float(f"{getattr(self, at) * 1e6:.4g}") for name, at in _TIMES.items()}
        head = {"engine": self.engine, "knobs": self.knobs, "version": self.version}
        return json.dumps({**head, **times, "runs": self.runs})

    @classmethod
    def from_json(cls, value: Any) -> Measurement:
        """What :meth:`to_json` wrote; ValueError, KeyError or TypeError if it is something else."""
        times = [float(value[name]) / 1e6 for name in _TIMES]
        if not all(math.isfinite(t) and t > 0 for t in times):
            raise ValueError(f"times are {times}; wanted positive numbers")
        words = [value[name] for name in ("engine", "knobs", "version")]
        if not all(isinstance(word, str) for word in words):
            raise ValueError(f"engine, knobs and version are {words}; wanted texts")
        engine, knobs, version = words
        seconds, p20, p80 = times
        return cls(engine, knobs, version, seconds, p20, p80, int(value["runs"]))


_TIMES = {"us": "seconds", "p20": "p20", "p80": "p80"}


@dataclass(frozen=True)
class Entry:
    """What is known of one problem on one device, fastest first. ``settled``: more runs would not change the order of
    the first ones, as far as their spread tells."""

    measured: tuple[Measurement, ...]
    when: str = ""
    settled: bool = True

    @property
    def best(self) -> Measurement:
        """The fastest."""
        return self.measured[0]

    def is_current(self, version_of: Callable[[str], str | None]) -> bool:
        """Whether it holds a measurement of some engine's present code."""
        return any(version_of(m.engine) == m.version for m in self.measured)

    def fastest_knobs(self) -> Entry:
        """Of each engine the fastest knobs alone: all that a choice needs."""
        first: dict[str, Measurement] = {}
        for measurement in self.measured:
            first.setdefault(measurement.engine, measurement)
        return Entry(tuple(first.values()), self.when, self.settled)

    def updated(self, newer: Entry) -> Entry:
        """The newer measurements, and of these the ones that they do not replace: of other engines, or of other knobs
        and the same code."""
        replaced = {(m.engine, m.knobs) for m in newer.measured}
        versions = {m.engine: m.version for m in newer.measured}
        kept = (m for m in self.measured if versions.get(m.engine, m.version) == m.version)
        both = [*newer.measured, *(m for m in kept if (m.engine, m.knobs) not in replaced)]
        both.sort(key=lambda m: m.seconds)
        return Entry(tuple(both), newer.when, newer.settled)


@dataclass
class Database:
    """Entries by kind of device, then by problem text."""

    devices: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.devices.values()))

    def __iter__(self) -> Iterator[tuple[str, str, Entry]]:
        for device, entries in self.devices.items():
            for problem, entry in entries.items():
                yield device, problem, entry

    def put(self, device: str, problem: str, entry: Entry) -> None:
        """Add measurements; those of the same engine and knobs are replaced."""
        entries = self.devices.setdefault(device, {})
        old = entries.get(problem)
        entries[problem] = old.updated(entry) if old else entry

    def merge(self, other: Database) -> Database:
        """Add everything from another database; of two entries for one problem the later one wins."""
        for device, problem, entry in other:
            old = self.devices.get(device, {}).get(problem)
            if old and old.when > entry.when:
                self.devices[device][problem] = entry.updated(old)
            else:
                self.put(device, problem, entry)
        return self

    def only(self, wanted: Callable[[str, str], bool]) -> Database:
        """The part of it whose device and problem are wanted."""
        part = Database()
        for device, problem, entry in self:
            if wanted(device, problem):
                part.put(device, problem, entry)
        return part

    def fastest_knobs(self) -> Database:
        """Of each engine the fastest knobs alone: half the size, and the same choices."""
        return Database({d: {p: e.fastest_knobs() for p, e in own.items()} for d, own in self.devices.items()})

    def to_text(self) -> str:
        """The file: sorted, one line a measurement, so that a diff shows what changed."""
        lines = [f'{{"format": {FORMAT},', ' "devices": {']
        for at, device in enumerate(sorted(self.devices)):
            lines.append(f"  {json.dumps(device)}: {{")
            entries = self.devices[device]
            for number, problem in enumerate(sorted(entries), 1):
                entry = entries[problem]
                head = f'"when": {json.dumps(entry.when)}, "settled": {json.dumps(entry.settled)}, "measured": ['
                lines.append(f"   {json.dumps(problem)}: {{{head}")
                lines.append(",\n".join(f"    {m.to_json()}" for m in entry.measured))
                lines.append("   ]}" + "," * (number < len(entries)))
            lines.append("  }" + "," * (at + 1 < len(self.devices)))
        return "\n".join([*lines, " }", "}"]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Database:
        """The database of a file; ValueError says what is wrong with it."""
        made = cls()
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}; this version reads {FORMAT}")
            for device, entries in content["devices"].items():
                for problem, entry in entries.items():
                    measured = sorted(map(Measurement.from_json, entry["measured"]), key=lambda m: m.seconds)
                    if measured:
                        made.put(device, problem, Entry(tuple(measured), str(entry["when"]), bool(entry["settled"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no tuning database: {type(error).__name__} {error}") from None
        return made


def read_database(path: Path) -> Database:
    """The database of a file; FileNotFoundError or ValueError, which names it."""
    try:
        return Database.from_text(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# -- differences ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One problem in two databases; None where one of them does not have it."""

    device: str
    problem: str
    before: Entry | None
    after: Entry | None

    @property
    def ratio(self) -> float | None:
        """How many times faster the best became."""
        return self.before.best.seconds / self.after.best.seconds if self.before and self.after else None

    @property
    def moved(self) -> bool:
        """Whether another engine or other knobs are the best now."""
        return bool(self.before and self.after) and _choice(self.before) != _choice(self.after)

    @property
    def noise(self) -> bool:
        """Whether the runs of the best overlap, so that the ratio says little."""
        if not (self.before and self.after):
            return False
        a, b = self.before.best, self.after.best
        return a.p20 <= b.p80 and b.p20 <= a.p80


def _choice(entry: Entry | None) -> tuple[str, str] | None:
    return (entry.best.engine, entry.best.knobs) if entry else None


def differences(before: Database, after: Database) -> list[Change]:
    """Every problem that only one of them has, or whose entries differ."""
    keys = sorted({(d, p) for d, p, _ in before} | {(d, p) for d, p, _ in after})
    pairs = (Change(d, p, before.devices.get(d, {}).get(p), after.devices.get(d, {}).get(p)) for d, p in keys)
    return [change for change in pairs if change.before != change.after]


# -- files ------------------------------------------------------------------------------------------------------------


class Store:
    """A database in a file, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._database = Database()
        self._families: dict[tuple[str, str], list[tuple[str, Entry]]] | None = None

    def load(self) -> Database:
        """What the file holds now; empty where there is none. A damaged file is moved aside with a warning."""
        try:
            status = self.path.stat()
            seen = (status.st_mtime_ns, status.st_size)
        except OSError:
            seen = None
        if seen != self._seen:
            with self._lock:
                self._database = self._read() if seen else Database()
                self._seen, self._families = seen, None
        return self._database

    def update(self, found: Database) -> None:
        """Add to the file: read, merged and replaced under a lock that other processes keep to as well. TimeoutError if
        one of them keeps it for a minute."""
        from filelock import FileLock  # nothing that only reads needs it

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=60):
            write_atomic(self.path, self._read().merge(found).to_text())

    def similar(self, device: str, family: str) -> list[tuple[str, Entry]]:
        """The problems of a device that differ in sizes only."""
        database, families = self.load(), self._families
        if families is None:
            families = {}
            for key, problem, entry in database:
                families.setdefault((key, _family(problem)), []).append((problem, entry))
            self._families = families
        return families.get((device, family), [])

    def _read(self) -> Database:
        try:
            return read_database(self.path)
        except FileNotFoundError:
            return Database()
        except ValueError as error:
            aside = self.path.with_name(f"{self.path.name}.damaged-{os.getpid()}")
            try:
                os.replace(self.path, aside)
            except FileNotFoundError:
                return Database()  # another process moved it already
            except OSError as failure:
                warnings.warn(f"tuning database {error}; not used, and not to be moved: {failure}", stacklevel=4)
                return Database()
            warnings.warn(f"tuning database {error}; moved to {aside.name}, starting with an empty one", stacklevel=4)
            return Database()


_stores: dict[Path, Store] = {}


def _store(path: Path) -> Store:
    return _stores.setdefault(path, Store(path))


def user_store() -> Store:
    """The user's own database: $OPENCONV_TUNING_FILE, or openconv/tuning.json among the user's data."""
    given = os.environ.get("OPENCONV_TUNING_FILE")
    if given:
        return _store(Path(given))
    if sys.platform == "darwin":
        return _store(Path.home() / "Library" / "Application Support" / "openconv" / "tuning.json")
    return _store(
        Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "openconv" / "tuning.json"
    )


_SHIPPED = Path(__file__).parent / "shipped"


def shipped_databases() -> list[Database]:
    """Everything that the package brings, for all devices."""
    return [_store(path).load() for path in sorted(_SHIPPED.glob("*.json"))]


def shipped_file(device: str) -> Path:
    """Where the package keeps what was measured on this kind of device."""
    return _SHIPPED / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def stores(device: str) -> dict[str, Store]:
    """The databases that bear on a kind of device, the first that knows a problem being the one that counts."""
    return {"user": user_store(), "shipped": _store(shipped_file(device))}


# -- what is known of a problem ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """Measurements that bear on a problem: its own, or those of its nearest neighbour.

    ``layer`` is the file they are from: ``user`` or ``shipped``. ``distance`` is 0 for the problem itself.
    """

    problem: str
    entry: Entry
    layer: str
    distance: float = 0.0

    def seconds(self, engine: str, version: str) -> dict[str, float]:
        """Times of an engine by its knobs, as far as this version of its code was measured."""
        return {m.knobs: m.seconds for m in self.entry.measured if (m.engine, m.version) == (engine, version)}

    def __str__(self) -> str:
        where = f"{self.layer} database{', ' if self.entry.when else ''}{self.entry.when[:10]}"
        return f"neighbour '{self.problem}' ({where})" if self.distance else where


_FAR = 1.0
"""Doublings of sizes, all axes together, beyond which a neighbour says nothing. Twice the batch is 1; 56x56 instead of
48x48 is 0.44."""
_DETAIL = 0.05
"""How far off another padding is, a bias that the other does not have, and bf16 from f16."""


def lookup(problem: Problem, device: Device, version_of: Callable[[str], str | None]) -> Known | None:
    """What the databases know of a problem, the user's before the shipped one, or of its nearest neighbour. Entries
    without a measurement of an engine's present code, which ``version_of`` tells, count as absent."""
    text, key = str(problem), device.key
    layers = stores(key)
    for layer, store in layers.items():
        entry = store.load().devices.get(key, {}).get(text)
        if entry and entry.is_current(version_of):
            return Known(text, entry, layer)
    near: list[Known] = []
    for layer, store in layers.items():
        for other, entry in store.similar(key, _family(text)):
            distance = _distance(problem, other)
            if distance <= _FAR and entry.is_current(version_of):
                near.append(Known(other, entry, layer, distance))
    return min(near, key=lambda known: known.distance, default=None)


_SIZE = re.compile(r" (?:[ncdhwk]\d+|g\d+|pad[\d:,]+|\+bias)(?= |$)")


def _family(problem: str) -> str:
    """A problem's text without its sizes, padding, number of groups and bias. f16 and bf16 are one family: what is
    known of the one says as much of the other."""
    return _SIZE.sub("", problem).replace("bf16", "f16")


def _distance(problem: Problem, text: str) -> float:
    """Doublings between two problems of one family; infinite where their groups are of different kinds."""
    try:
        other = Problem.parse(text)
    except ValueError:
        return math.inf
    if _grouping(problem) != _grouping(other) or problem.is_empty or other.is_empty:
        return math.inf
    apart = sum(abs(math.log2(a / b)) for a, b in zip(_sizes(problem), _sizes(other), strict=True))
    details = ("epilogue", "padding", "dtypes")
    return apart + _DETAIL * sum(getattr(problem, name) != getattr(other, name) for name in details)


def _grouping(problem: Problem) -> str:
    return "depthwise" if problem.is_depthwise else "grouped" if problem.groups > 1 else "dense"


def _sizes(problem: Problem) -> Iterable[int]:
    """What a distance counts. The filters of each channel of a depthwise problem stand for both k and g."""
    last = (problem.k // problem.c,) if problem.is_depthwise else (problem.k, problem.groups)
    return (problem.n, problem.c, *problem.spatial, *last)
