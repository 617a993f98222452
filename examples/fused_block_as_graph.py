"""A residual block of ResNet as one openconv.Graph: described once, fused, explained, checked, saved and loaded.

    y = relu(norm2(conv2(relu(norm1(conv1(x))))) + x)

The graph is built of a torch module's weights as constants, so that batch norms are folded into the convolutions when
it is planned and each convolution stores its final values: two kernels in place of seven operations.

    python examples/fused_block_as_graph.py
    python examples/fused_block_as_graph.py --channels 128 --size 28 --device cuda
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import openconv
from openconv.bench.timing import race, race_cuda
from openconv.graph import GraphTensor


class Block(nn.Module):
    """The block as torch has it, with norms as they could be after a training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        for norm in (self.norm1, self.norm2):
            scale, bias, mean, variance = values_of(norm)
            for positive in (scale, variance):
                nn.init.uniform_(positive, 0.5, 1.5)
            for centred in (bias, mean):
                nn.init.normal_(centred, std=0.2)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


def values_of(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale, bias, mean and variance of each channel."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.weight, norm.bias, norm.running_mean, norm.running_var


def as_graph(block: Block, x: Tensor) -> openconv.Graph:
    """The same block for images like x, of any batch size."""
    with openconv.Graph("residual_block") as graph:

        def normed(value: GraphTensor, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> GraphTensor:
            scale, bias, mean, variance = values_of(norm)
            h = graph.conv_fprop(value, graph.constant(conv.weight), padding=1)
            inverse = (variance + norm.eps).rsqrt()
            return graph.batchnorm_inference(h, *(graph.constant(vector) for vector in (scale, bias, mean, inverse)))

        image = graph.input(like=x, name="x")
        h = graph.relu(normed(image, block.conv1, block.norm1))
        graph.relu(normed(h, block.conv2, block.norm2) + image, name="y")
    return graph


def main(
    batch: Annotated[int, typer.Option(min=1, help="images")] = 4,
    channels: Annotated[int, typer.Option(min=1, help="channels of the block")] = 64,
    size: Annotated[int, typer.Option(min=3, help="pixels along each side of an image")] = 56,
    device: Annotated[str, typer.Option(help="where to run: cpu or cuda")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="file for the graph; none if not given")] = None,
) -> None:
    """Build the graph, explain it, compare it with torch, save and load it."""
    console = Console()
    torch.manual_seed(0)
    block, x = Block(channels).to(device), torch.randn(batch, channels, size, size, device=device)
    graph = as_graph(block, x)
    print(graph.explain())

    y, wanted = graph(x), block.double()(x.double())
    error = ((y - wanted).abs().max() / wanted.abs().max()).item()
    block.float()
    torch_error = ((block(x) - wanted).abs().max() / wanted.abs().max()).item()
    single = graph(x[:1])  # another batch size is another plan of the same graph

    with tempfile.TemporaryDirectory() as folder:
        path = graph.save(out or Path(folder) / "residual_block.json")
        console.print(f"saved: {path.name}, {path.stat().st_size / 2**20:.1f} MiB of nodes, constants and plans")
        again = openconv.Graph.load(path)
    same = torch.equal(again(x), y)
    console.print(f"loaded: the same bits as before: {same}; one image alone: {tuple(single.shape)}")

    calls = [lambda: block(x), lambda: graph(x)]
    timings = race_cuda([[call] for call in calls], budget=1.0) if x.is_cuda else race(calls, budget=1.0)
    table = Table("block", "median", "error against float64, of the largest value")
    for name, timing, each in zip(("torch", "graph"), timings, (torch_error, error), strict=True):
        table.add_row(name, f"{timing.median * 1e3:.2f} ms", f"{each:.1e}")
    console.print(table)
    if not (same and error < 1e-4):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
