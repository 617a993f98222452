"""What a profiler says of the kernels of an engine: Nsight Compute, run around one call, its counters recorded.

``ncu`` starts this module as a program of its own, with the jobs on standard input. Each job is called once before, so
that compiling and loading stay out; then a marker, torch's spin kernel, and the call are profiled. The marker tells the
kernels of one job from those of the next.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..files import write_atomic
from ..plan import device_of, plan_for
from ..problem import Problem
from ..reference import random_inputs
from ..select import current_policy
from .results import environment

__all__ = ["FILE_NAME", "ProfileRecord", "parse", "profile", "read_profiles", "write_profiles"]

FILE_NAME = "profile.jsonl"
"""In the folder of a device, beside the files of suites."""

_MARKER = "spin_kernel"
_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "LaunchStats")
_COUNTERS = {
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_written_bytes",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "load_sectors",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "load_requests",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": "bank_conflicts",
    "sm__inst_executed.sum": "instructions",
}
_METRICS = {
    "Duration": "seconds",
    "DRAM Throughput": "dram_percent",
    "Compute (SM) Throughput": "compute_percent",
    "L1/TEX Hit Rate": "l1_hit_percent",
    "L2 Hit Rate": "l2_hit_percent",
    "Achieved Occupancy": "occupancy_percent",
    "Theoretical Occupancy": "occupancy_limit_percent",
    "Executed Ipc Active": "instructions_per_cycle",
    "Registers Per Thread": "registers",
    "Static Shared Memory Per Block": "static_shared_bytes",
    "Dynamic Shared Memory Per Block": "dynamic_shared_bytes",
} | _COUNTERS
_UNITS = {
    "s": 1.0, "second": 1.0, "ms": 1e-3, "msecond": 1e-3, "us": 1e-6, "usecond": 1e-6, "ns": 1e-9, "nsecond": 1e-9,
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Kbyte/block": 1e3,
}  # fmt: skip


@dataclass(frozen=True)
class ProfileRecord:
    """The kernels that one call of an engine launches, in their order, each with its name, grid, block and counters."""

    suite: str
    label: str
    problem: str
    engine: str
    kernels: list[dict[str, Any]]
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from others of the same machine."""
        return self.suite, self.label, self.problem, self.engine


def profile(
    jobs: Sequence[tuple[str, str, Problem, str]], *, ncu: str = "ncu", command: str = ""
) -> list[ProfileRecord]:
    """The counters of each job, which is a suite, a label, a problem and the engine that is to run it. RuntimeError if
    there is no profiler, or if it says why it profiles nothing."""
    found = shutil.which(ncu)
    if found is None:
        raise RuntimeError(f"the profiler {ncu!r} is not on PATH; Nsight Compute comes with the CUDA toolkit")
    text = json.dumps([(str(problem), engine) for _, _, problem, engine in jobs])
    with TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        words = [
            found, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "details",
            *(word for name in _SECTIONS for word in ("--section", name)), "--metrics", ",".join(_COUNTERS),
            "--log-file", str(log), sys.executable, "-m", __name__,
        ]  # fmt: skip
        done = subprocess.run(words, input=text, text=True, capture_output=True)
        said = log.read_text() if log.exists() else ""
    if done.returncode:
        raise RuntimeError(f"ncu ended with {done.returncode}: {(done.stderr or said).strip()[-800:]}")
    groups = parse(said)
    if len(groups) != len(jobs):
        raise RuntimeError(f"ncu profiled {len(groups)} calls; wanted {len(jobs)}. It said: {said.strip()[-800:]}")
    machine = environment(torch.device("cuda"), command)
    return [
        ProfileRecord(suite, label, str(problem), engine, kernels, machine)
        for (suite, label, problem, engine), kernels in zip(jobs, groups, strict=True)
    ]


def parse(text: str) -> list[list[dict[str, Any]]]:
    """The kernels of each call, of what ncu writes as CSV: those behind one marker and before the next."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not (row["ID"] or "").isdigit():
            continue
        kernel = kernels.setdefault(
            row["ID"], {"name": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"]}
        )
        name = _METRICS.get(row["Metric Name"] or "")
        if name and row["Metric Value"]:
            kernel[name] = _number(row["Metric Value"]) * _UNITS.get(row["Metric Unit"] or "", 1.0)
    groups: list[list[dict[str, Any]]] = []
    for _, kernel in sorted(kernels.items(), key=lambda item: int(item[0])):
        if _MARKER in kernel["name"]:
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def read_profiles(path: Path) -> list[ProfileRecord]:
    """The records of a file; none if it is not there. ValueError names the line that is damaged."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            found.append(ProfileRecord(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def write_profiles(path: Path, records: Iterable[ProfileRecord]) -> None:
    """Write them down, each in the place of an older one of the same call; the file is whole at any time."""
    kept = {record.key: record for record in (*read_profiles(path), *records)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(asdict(record), sort_keys=True) + "\n" for record in kept.values()))


def _run(jobs: Iterable[Sequence[str]]) -> None:
    """In the process that is profiled: each job once to warm up, then a marker and the call."""
    place = torch.device("cuda")
    device = device_of(place)
    for call in _calls(jobs, place, device):
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _calls(jobs: Iterable[Sequence[str]], place: torch.device, device: Any) -> Iterator[Any]:
    for text, engine in jobs:
        problem = Problem.parse(text)
        inputs = random_inputs(problem, 0, place)
        plan = plan_for(problem, device, current_policy().but(engine=engine, tuning="off"))
        yield lambda plan=plan, inputs=inputs: plan(inputs.a, inputs.b, inputs.operands)


def rows(records: Iterable[ProfileRecord]) -> Iterator[Mapping[str, Any]]:
    """Each kernel with its record's engine and label."""
    for record in records:
        for kernel in record.kernels:
            yield {"engine": record.engine, "label": record.label, **kernel}


if __name__ == "__main__":
    _run(json.load(sys.stdin))
