"""Whole models with their convolutions converted: right, timed beside torch, recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openconv.bench.models import FILE_NAME, MODELS, MobileNetV2, measure_model, read_models, write_models
from tests.test_cli import run


def test_the_models_have_their_usual_size():
    counts = {name: sum(p.numel() for p in make().parameters()) for name, make in MODELS.items()}
    assert counts == {"resnet50": 25_557_032, "mobilenet_v2": 3_504_872}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_converted_mobilenet_is_right_and_recorded(layout, tmp_path):
    made = measure_model("mobilenet_v2", 2, layout, size=64, budget=0.05)
    assert 0 < made.error < 1e-4
    assert made.ratio > 0
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


def test_bad_names_are_refused_before_anything_runs():
    for words, message in ((["alexnet"], "model is 'alexnet'"), (["--layout", "hwcn"], "layout is 'hwcn'"),
                           (["--batch", "0"], "batch is 0")):  # fmt: skip
        result = run("bench-models", *words)
        assert result.exit_code != 0
        assert message in result.output
