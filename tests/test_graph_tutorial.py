"""The tutorial in openconv's own words, on the CPU: tests/tutorial_graph.py."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests import tutorial_graph


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("section", tutorial_graph.SECTIONS)
def test_tutorial(section, dtype):
    getattr(tutorial_graph, section)("cpu", dtype)


def test_every_section_is_run():
    own = inspect.getmembers(tutorial_graph, inspect.isfunction)
    taking = {name for name, each in own if list(inspect.signature(each).parameters) == ["device", "dtype"]}
    assert taking == set(tutorial_graph.SECTIONS)
