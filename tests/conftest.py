"""Fixed seeds, Hypothesis profiles, and the skip of what needs a GPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Choices that depend on nothing but the problem: what was measured on this machine, or is shipped for it, is left out
# unless a test asks for it, and nothing is written into the user's own database. openconv reads this when imported.
os.environ["OPENCONV_TUNING"] = "off"
os.environ["OPENCONV_TUNING_FILE"] = str(Path(tempfile.gettempdir()) / f"openconv-tests-{os.getpid()}" / "tuning.json")

# The same examples in every run, and no deadline: the first example of a kernel pays for its compilation. Without
# --hypothesis-profile a plain `pytest` gets "ci" as well; "random" looks elsewhere each time and prints the seed.
_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", _common, derandomize=True, database=None)
settings.register_profile("random", _common, derandomize=False)
settings.load_profile("ci")

_GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="put what code blocks of pages print below them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies in tests/gpu carries the marker; what carries it is skipped where there is no device."""
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if not torch.cuda.is_available():
        what = "finds no CUDA device" if torch.backends.cuda.is_built() else "is built without CUDA"
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: torch {torch.__version__} {what}"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Tests that draw from torch's own generator see the same numbers in any order and number of workers."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of engines has one row: to ask all of them takes half a minute."""
    from openconv import support
    from openconv.engine import engine_named

    monkeypatch.setattr(support, "engines", lambda: (engine_named("cpu.naive"),))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Whether a GPU has tested the CUDA sources as they are."""
    from tests.verified import summary

    terminalreporter.write_line(summary())
