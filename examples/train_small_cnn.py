"""Train one small CNN with torch and with openconv, from the same seed, and compare the loss curves.

The data are drawn by code: noisy grey pictures of a disc, a ring, a square or a cross, of any size and anywhere. Both
trainings see the same pictures in the same order, so that they differ by rounding alone. But each step carries such
differences on: a pooling whose two largest values are nearly equal may pick the other one. How far that leads by itself
is shown by a third training: torch's, from weights that were moved by about one rounding each.

    python examples/train_small_cnn.py
    python examples/train_small_cnn.py --steps 500 --batch 128 --device cuda
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import openconv

MOVED = "torch, moved"
SHAPES = ("disc", "ring", "square", "cross")


def pictures(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures (count, 1, size, size) and the number of the shape that each one shows."""
    draw = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, 1, generator=draw) * (high - low) + low

    kinds = torch.randint(len(SHAPES), (count,), generator=draw)
    radius = between(0.15, 0.3) * size
    rows = torch.arange(size)[:, None] - between(0.35, 0.65) * size
    columns = torch.arange(size)[None, :] - between(0.35, 0.65) * size
    distance, square = (rows**2 + columns**2).sqrt(), torch.maximum(rows.abs(), columns.abs())
    arms = torch.minimum(rows.abs(), columns.abs()) < radius / 3
    drawn = (
        distance < radius, (distance < radius) & (distance > radius / 2), square < radius, (square < radius) & arms,
    )  # fmt: skip
    clean = torch.stack(drawn, 1)[torch.arange(count), kinds].float() * between(0.5, 1.0)
    return (clean + 0.3 * torch.randn(clean.shape, generator=draw))[:, None], kinds


def network() -> nn.Module:
    """Three convolutions with their norms, two poolings, the mean of each channel, and a matrix product."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SHAPES)),
    )  # fmt: skip


@dataclass
class Trained:
    """A training: the loss of each step, the share of unseen pictures that are told right, and seconds."""

    losses: list[float]
    accuracy: float
    seconds: float


def train(model: nn.Module, steps: int, batch: int, size: int, name: str, console: Console) -> Trained:
    """SGD with momentum and ever smaller steps, on pictures that are new in each step."""
    like = next(model.parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    slower = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, total_iters=steps)
    losses, start = [], time.perf_counter()
    for step in track(range(steps), f"{name:<12}", console=console, transient=True):
        images, kinds = pictures(batch, size, seed=step)
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images.to(like)), kinds.to(like.device))
        loss.backward()
        optimiser.step()
        slower.step()
        losses.append(loss.item())
    took = time.perf_counter() - start
    images, kinds = pictures(512, size, seed=-1)
    with torch.no_grad():
        right = (model.eval()(images.to(like)).argmax(1).cpu() == kinds).float().mean().item()
    return Trained(losses, right, took)


def differences(found: dict[str, Trained], name: str) -> list[float]:
    """How far the losses of a training are from those of torch's, step by step."""
    return [abs(a - b) for a, b in zip(found[name].losses, found["torch"].losses, strict=True)]


def moved(model: nn.Module) -> nn.Module:
    """A copy whose weights are off by about one rounding each."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 2**-23 * torch.randn_like(weight))
    return model


def picture(path: Path, found: dict[str, Trained]) -> Path:
    """The loss curves above, how far they are apart below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 2), dpi=120)
    above.plot(found["torch"].losses, label="torch", linewidth=3, alpha=0.4)
    above.plot(found["openconv"].losses, label="openconv", linewidth=1)
    above.set(ylabel="loss of the step", title="One network, trained from the same seed")
    above.legend()
    for name, colour in (("openconv", "tab:orange"), (MOVED, "tab:grey")):
        apart = [max(each, 1e-9) for each in differences(found, name)]
        below.semilogy(apart, color=colour, linewidth=1, label=f"{name} against torch")
    below.set(xlabel="step", ylabel="difference")
    below.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return path


def main(
    steps: Annotated[int, typer.Option(min=1, help="steps of each training")] = 150,
    batch: Annotated[int, typer.Option(min=1, help="pictures in a step")] = 32,
    size: Annotated[int, typer.Option(min=8, help="pixels along each side of a picture")] = 32,
    device: Annotated[str, typer.Option(help="where to train: cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder for the picture")] = Path("openconv-examples"),
) -> None:
    """Train with torch, with openconv, and with torch from a start that was moved by rounding; compare."""
    console = Console()
    torch.manual_seed(0)
    model = network().to(device)
    conversion = openconv.convert(model, inplace=False)
    print(conversion)
    models = {"torch": copy.deepcopy(model), "openconv": conversion.model, MOVED: moved(model)}
    found = {name: train(model, steps, batch, size, name, console) for name, model in models.items()}

    table = Table("training", "first loss", "last loss", "unseen pictures told right", "seconds")
    for name, each in found.items():
        table.add_row(
            name, f"{each.losses[0]:.4f}", f"{each.losses[-1]:.4f}", f"{each.accuracy:.1%}", f"{each.seconds:.1f}"
        )
    console.print(table)
    for name in ("openconv", MOVED):
        apart = differences(found, name)
        text = f"{apart[0]:.1e} in the first step, {max(apart):.1e} at the most"
        console.print(f"difference of the losses of {name} and torch: {text}")
    console.print("the first step of openconv compiles kernels that this machine has not compiled yet")
    console.print(f"the curves: {picture(out / 'train_small_cnn.png', found)}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
