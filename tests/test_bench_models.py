"""Whole models with their convolutions converted: right, timed beside torch, recorded."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from openconv.bench.models import FILE_NAME, MODELS, MobileNetV2, ModelRecord, measure_model, read_models, write_models
from openconv.bench.report.models import model_means
from tests.test_cli import run


def test_the_models_have_their_usual_size():
    counts = {name: sum(p.numel() for p in make().parameters()) for name, make in MODELS.items()}
    assert counts == {"resnet50": 25_557_032, "mobilenet_v2": 3_504_872}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_converted_mobilenet_is_right_and_recorded(layout, tmp_path):
    made = measure_model("mobilenet_v2", 2, layout, size=64, budget=0.05)
    assert 0 < made.error < 1e-4
    assert made.fused_error is not None
    assert 0 < made.fused_error < 1e-4
    assert set(made.seconds) == {"torch", "openconv", "fused"}
    assert made.ratio > 0
    assert made.fused_ratio is not None
    assert made.fused_ratio > 0
    assert made.machine["threads"] == torch.get_num_threads()
    path = tmp_path / FILE_NAME
    write_models(path, [made])
    write_models(path, [made, measure_model("mobilenet_v2", 1, layout, size=32, budget=0.05)])
    assert [each.batch for each in read_models(path)] == [1, 2]
    assert read_models(path)[1] == made


def test_a_wrong_model_is_not_timed(monkeypatch):
    class Odd(MobileNetV2):
        def forward(self, x):
            y = super().forward(x)
            ours = any(type(m) is not nn.Conv2d for m in self.modules() if isinstance(m, nn.Conv2d))
            return y + 1 if ours else y

    with pytest.raises(RuntimeError, match="odd with batch 1 in nchw is off by"):
        measure_model("odd", 1, "nchw", size=32, model=Odd())


def test_a_wrong_fused_model_is_not_timed():
    class Odd(MobileNetV2):
        def forward(self, x):
            y = super().forward(x)
            return y if any(isinstance(m, nn.BatchNorm2d) for m in self.modules()) else y + 1

    with pytest.raises(RuntimeError, match="odd, fused, with batch 1 in nchw is off by"):
        measure_model("odd", 1, "nchw", size=32, model=Odd())


def took(milliseconds: float) -> dict[str, float]:
    return {"median": milliseconds / 1e3, "p20": milliseconds / 1e3, "p80": milliseconds / 1e3}


OLD = {"batch": 1, "error": 1e-6, "layout": "nchw", "machine": {}, "model": "resnet50",
       "seconds": {"openconv": took(40), "torch": took(50)}}  # fmt: skip


def test_records_from_before_fusing_are_read_and_shown(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(OLD) + "\n")
    seconds = {"torch": took(45), "openconv": took(36), "fused": took(30)}
    new = ModelRecord("resnet50", 1, "nhwc", seconds, 1e-6, {}, 2e-6)
    write_models(path, [new])
    old, found = read_models(path)
    assert (old.ratio, old.fused_ratio, old.fused_error) == (1.25, None, None)
    assert found == new
    assert found.fused_ratio == 1.5
    title, _, table = model_means([old, found])
    assert title == "### Models"
    assert table.splitlines()[2:] == [
        "| resnet50 | 1 | nchw | 50.0 | 40.0 | **1.25** |  |  |",
        "| resnet50 | 1 | nhwc | 45.0 | 36.0 | **1.25** | 30.0 | **1.50** |",
    ]
    assert model_means([]) == []


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("openconv.bench.models.MODELS", {"small": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(), nn.AdaptiveAvgPool2d(1))})  # fmt: skip
    result = run("bench-models", "--budget", "0.01", "--layout", "nchw", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "fused ms" in result.output
    (made,) = read_models(tmp_path / FILE_NAME)
    assert (made.model, made.batch, made.layout) == ("small", 1, "nchw")


def test_bad_names_are_refused_before_anything_runs():
    for words, message in ((["alexnet"], "model is 'alexnet'"), (["--layout", "hwcn"], "layout is 'hwcn'"),
                           (["--batch", "0"], "batch is 0")):  # fmt: skip
        result = run("bench-models", *words)
        assert result.exit_code != 0
        assert message in result.output
