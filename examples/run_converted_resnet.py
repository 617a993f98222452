"""Send a ResNet through openconv, as it is and fused, and compare it with torch in result and time.

The model is torchvision's ResNet-50 where torchvision is installed, else the ResNet-50 that openconv measures itself
with. Weights are random: what a picture shows plays no part in what a network takes, nor in how exact it is.

    python examples/run_converted_resnet.py
    python examples/run_converted_resnet.py --batch 32 --size 224 --device cuda
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import openconv
from openconv.bench.timing import race, race_cuda


def resnet() -> tuple[str, nn.Module]:
    """The model and where it is from."""
    try:
        from torchvision.models import resnet50
    except ImportError:
        from openconv.bench.models import MODELS

        return "openconv.bench", MODELS["resnet50"]()
    return "torchvision", resnet50(weights=None)


def main(
    batch: Annotated[int, typer.Option(min=1, help="images")] = 1,
    size: Annotated[int, typer.Option(min=32, help="pixels along each side of an image")] = 128,
    device: Annotated[str, typer.Option(help="where to run: cpu or cuda")] = "cpu",
    seconds: Annotated[float, typer.Option(help="how long to time, all models together")] = 3.0,
) -> None:
    """Convert, compare, time."""
    console = Console()
    torch.manual_seed(0)
    origin, model = resnet()
    model = model.eval().requires_grad_(False).to(device)
    x = torch.randn(batch, 3, size, size, device=device)
    converted = openconv.convert(model, inplace=False)
    fused = openconv.convert(model, fuse=True, inplace=False)
    console.print(f"ResNet-50 of {origin}: {len(converted.swapped)} convolutions are openconv's now")
    kinds = (("norm", "batch norms"), ("sum", "sums"), ("activation", "activations"))
    counts = (f"{sum(bool(getattr(each, kind)) for each in fused.fused)} {what}" for kind, what in kinds)
    console.print(f"fused into them: {', '.join(counts)}")

    models = {"torch": model, "converted": converted.model, "fused": fused.model}
    with torch.inference_mode():
        wanted = model.double()(x.double())
        model.float()
        results = {}
        for name, each in models.items():
            with console.status(f"{name}: the first call plans, and compiles kernels that this machine has not"):
                results[name] = each(x)
        with console.status("timing"):
            calls = [lambda each=each: each(x) for each in models.values()]
            timings = race_cuda([[c] for c in calls], budget=seconds) if x.is_cuda else race(calls, budget=seconds)

    table = Table("model", "median", "times torch's speed", "off float64 by", "same class as float64")
    for (name, result), timing in zip(results.items(), timings, strict=True):
        off = ((result - wanted).norm() / wanted.norm()).item()
        same = (result.argmax(1) == wanted.argmax(1)).float().mean().item()
        ratio = timings[0].median / timing.median
        table.add_row(name, f"{timing.median * 1e3:.1f} ms", f"{ratio:.2f}", f"{off:.1e}", f"{same:.0%}")
        if not off < 1e-3:
            raise SystemExit(f"{name} is off by {off:.1e} of the result; wanted less than 1e-3")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
