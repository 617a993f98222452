"""Engines are checked on the GPU itself; a run of everything that passes leaves a record."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from tests.support import running_on
from tests.verified import RESULTS, Verified, sources_digest


def pytest_configure() -> None:
    """Processes that run tests side by side share the cores: what is compared with is computed on the CPU."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with running_on(None, torch.device("cuda")):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Record a whole run without a failure."""
    stats = terminalreporter.stats
    whole = not any(getattr(config.option, name, None) for name in ("keyword", "markexpr", "lf"))
    whole &= all(Path(named).is_dir() for named in config.args)  # no files, no single tests
    part = hasattr(config, "workerinput")  # of a run that is shared between processes
    if exitstatus or not torch.cuda.is_available() or not whole or part or not stats.get("passed"):
        return
    from openconv.bench.results import device_slug

    made = Verified(
        sources_digest(), len(stats["passed"]), len(stats.get("skipped", ())), torch.cuda.get_device_name(),
        {"torch": torch.__version__, "cuda": str(torch.version.cuda)}, datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    )  # fmt: skip
    terminalreporter.write_line(f"recorded in {made.write(RESULTS / device_slug(torch.device('cuda')))}")
