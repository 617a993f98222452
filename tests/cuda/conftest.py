"""Engines of a GPU checked without one: compiled for the CPU, thread by thread."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest
import torch

from openconv.cuda.device import device_for
from openconv.engine import engines
from tests.emulator import EmulatedLaunch
from tests.support import running_on


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches go to the emulator, and tensors stay on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    engines()
    for name, module in list(sys.modules.items()):
        if name.startswith("openconv.cuda.") and hasattr(module, "Launch"):
            monkeypatch.setattr(module, "Launch", EmulatedLaunch)
    monkeypatch.setattr("openconv.plan._current_device", None)  # a PyTorch with CUDA would look for a driver
    with running_on(device_for("sm_90a"), torch.device("cpu")):
        yield
