"""The record of a run of tests/gpu: which CUDA sources it tested, on what, and how many tests passed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def sources_digest() -> str:
    """Digest of everything that a GPU runs or that launches it."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src" / "openconv" / "cuda").rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            found.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


@dataclass(frozen=True)
class Verified:
    """One record; ``sources`` is the digest of what was tested."""

    sources: str
    passed: int
    skipped: int
    device: str
    versions: dict[str, str]
    date: str

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "verified.json"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return temporary.replace(path)


def summary() -> str:
    """Whether the CUDA sources are those that a GPU has tested, in one line."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/verified.json"))]
    if not records:
        return "CUDA: no run of tests/gpu is recorded"
    fresh = [record for record in records if record["sources"] == sources_digest()]
    last = max(fresh or records, key=lambda record: record["date"])
    text = f"{last['passed']} tests passed on {last['device']}, {last['date']}"
    return f"CUDA: {text}" if fresh else f"CUDA: sources have changed since {text}; run make test-gpu on a GPU"
