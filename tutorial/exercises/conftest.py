"""What grades the exercises: `answer` is the module that the learner filled in, or with --solutions its solution.

    python -m pytest tutorial/exercises/test_ex01.py                 grades tutorial/exercises/ex01.py
    python -m pytest tutorial/exercises/test_ex01.py --solutions     grades tutorial/solutions/ex01.py

A grader says what is wrong by `pytest.fail("...", pytrace=False)`. A NotImplementedError that an exercise still has
becomes a line "your turn: ..." without a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# The same choices on every machine, and nothing is written into the user's own database: openconv reads this later.
os.environ.setdefault("OPENCONV_TUNING", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solutions", action="store_true", help="grade tutorial/solutions, not tutorial/exercises")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"  # of an error in the learner's file: its line, and what was wrong with it


def _folder(config: pytest.Config) -> Path:
    return HERE.parent / "solutions" if config.getoption("--solutions") else HERE


def pytest_report_header(config: pytest.Config) -> str:
    return f"grading what is in {_folder(config).relative_to(ROOT)}"


@pytest.fixture(scope="module")
def answer(request: pytest.FixtureRequest) -> ModuleType:
    """The module that belongs to the grader: ex01.py for test_ex01.py."""
    path = _folder(request.config) / f"{request.path.stem.removeprefix('test_')}.py"
    name = f"openconv_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(NotImplementedError):
        frame = call.excinfo.traceback[-1]
        if Path(frame.path).parent == _folder(item.config):
            what = str(call.excinfo.value).removeprefix("your turn: ") or f"write {frame.name}"
            report.longrepr = f"your turn: {what} ({Path(frame.path).relative_to(ROOT)}, line {frame.lineno + 1})"
    return report
