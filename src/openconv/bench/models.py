"""Whole models, converted: ResNet-50 and MobileNetV2 in inference, beside torch as it is.

Every convolution of a copy is sent through openconv (:func:`openconv.convert`); all other operations stay torch's. In
another copy batch norms, sums and activations are fused into them (``fuse=True``). Each is compared with the model,
then all are timed in turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..files import write_atomic
from ..nn import convert
from .graphs import ResNet50
from .results import environment
from .timing import race

__all__ = ["FILE_NAME", "MODELS", "MobileNetV2", "ModelRecord", "measure_model", "read_models", "write_models"]

FILE_NAME = "models.jsonl"
"""In the folder of a device, beside the files of suites."""


class _Normed(nn.Sequential):
    """Convolution, batch normalisation and, unless told otherwise, a ReLU up to 6."""

    def __init__(self, c: int, k: int, taps: int, stride: int = 1, groups: int = 1, *, cut: bool = True) -> None:
        conv = nn.Conv2d(c, k, taps, stride, taps // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")  # so that a mistake is not lost on the way
        super().__init__(conv, nn.BatchNorm2d(k), *([nn.ReLU6(inplace=True)] if cut else []))


class _Inverted(nn.Module):
    """Expand the channels, filter each by itself, project them; what comes in is added where sizes allow it."""

    def __init__(self, c: int, k: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = c * expand
        layers: list[nn.Module] = [_Normed(c, wide, 1)] if expand > 1 else []
        self.layers = nn.Sequential(*layers, _Normed(wide, wide, 3, stride, wide), _Normed(wide, k, 1, cut=False))
        self.adds = stride == 1 and c == k

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


class MobileNetV2(nn.Module):
    """MobileNetV2 1.0: a stem, 17 inverted bottlenecks, 1280 channels, a mean and a matrix product."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [_Normed(3, 32, 3, 2)]
        c = 32
        for expand, k, count, stride in (
            (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
        ):  # fmt: skip
            for at in range(count):
                layers.append(_Inverted(c, k, stride if at == 0 else 1, expand))
                c = k
        self.features = nn.Sequential(*layers, _Normed(c, 1280, 1))
        self.head = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.features(x).mean((2, 3)))
        return y


MODELS: dict[str, type[nn.Module]] = {"resnet50": ResNet50, "mobilenet_v2": MobileNetV2}
"""By name."""


@dataclass(frozen=True)
class ModelRecord:
    """One model at one batch size and layout. ``seconds`` are those of ``torch``, ``openconv`` and, since there is such
    a thing, ``fused``. ``error`` is the norm of the difference of the results over that of torch's, ``fused_error`` the
    same for the fused model."""

    model: str
    batch: int
    layout: str
    seconds: dict[str, dict[str, float]]
    error: float
    machine: dict[str, Any] = field(default_factory=dict)
    fused_error: float | None = None

    @property
    def ratio(self) -> float:
        """How many times as fast as torch."""
        return self.seconds["torch"]["median"] / self.seconds["openconv"]["median"]

    @property
    def fused_ratio(self) -> float | None:
        """The same of the fused model; None if that was not recorded."""
        fused = self.seconds.get("fused")
        return None if fused is None else self.seconds["torch"]["median"] / fused["median"]


def measure_model(name: str, batch: int, layout: str, *, size: int = 224, budget: float = 2.0, command: str = "",
                  model: nn.Module | None = None) -> ModelRecord:  # fmt: skip
    """Convert two copies, one of them fused, compare, and time all in turn. RuntimeError where results differ by more
    than rounding."""
    torch.manual_seed(0)
    made = (model or MODELS[name]()).eval().requires_grad_(False)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    made = made.to(memory_format=form)  # type: ignore[call-overload]
    x = torch.randn(batch, 3, size, size).contiguous(memory_format=form)
    models = {"torch": made}
    models |= {who: convert(made, fuse=who == "fused", inplace=False).model for who in ("openconv", "fused")}
    with torch.no_grad():
        wanted = made(x)
        errors = {}
        for who in ("openconv", "fused"):
            for _ in range(3):  # filters are kept from the second call on
                got = models[who](x)
            errors[who] = float((got - wanted).norm() / wanted.norm())
            if not errors[who] < 1e-3:
                what = f"{name}{', fused,' * (who == 'fused')} with batch {batch} in {layout}"
                raise RuntimeError(f"{what} is off by {errors[who]:.2g} of torch's result")
        timings = race([lambda each=each: each(x) for each in models.values()], budget=budget)  # type: ignore[misc]
    seconds = {who: asdict(timing) for who, timing in zip(models, timings, strict=True)}
    machine = environment(x.device, command)
    return ModelRecord(name, batch, layout, seconds, errors["openconv"], machine, errors["fused"])


def read_models(path: Path) -> list[ModelRecord]:
    """The records of a file; none if it is not there."""
    if not path.exists():
        return []
    return [ModelRecord(**json.loads(line)) for line in path.read_text().splitlines() if line]


def write_models(path: Path, records: Sequence[ModelRecord]) -> None:
    """Put records in the places of those of the same model, batch and layout, and replace the file whole."""
    kept = {(each.model, each.batch, each.layout): each for each in (*read_models(path), *records)}
    lines = [json.dumps(asdict(kept[key]), sort_keys=True) for key in sorted(kept)]
    write_atomic(path, ("\n".join(lines) + "\n").encode())
