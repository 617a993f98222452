"""An engine of your own in one file: integer image filters as sums of shifted images.

    y = sum over r, s of  w[r, s] * x shifted by (r, s)

Each tap is one pass over the whole image by torch's vectorised addition, and a tap of zero is none at all. On the CPU
the package computes integers by the definition alone (cpu.naive), so for them this narrow engine is worth its lines;
for floats cpu.filter2d reads the image once instead of nine times, and this engine refuses.

    python examples/custom_engine.py                 # Conway's game of life, whose neighbour counts are a 3x3 filter
    python examples/custom_engine.py --size 2048 --generations 50
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import prod
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import openconv
from openconv.device import Device
from openconv.engine import Engine, Runner, Traits, register
from openconv.problem import DTYPE_BYTES


@register
class ShiftedAdds(Engine):
    """Integer filters of one channel and stride 1: for each tap, the image is added once, shifted and weighted."""

    name = "cpu.shifted_adds"

    def refusals(self, problem: openconv.Problem, device: Device) -> Iterator[str]:
        if problem.direction != "fprop" or problem.rank != 2:
            yield f"direction is {problem.direction} with {problem.rank} axes; wanted fprop with 2"
        if problem.dtypes[0][0] not in "iu":
            yield f"dtype is {problem.dtypes[0]}; wanted an integer"
        if (problem.c, problem.k) != (1, 1):
            yield f"C is {problem.c} and K is {problem.k}; wanted 1 and 1"
        if problem.stride != (1, 1):
            yield f"stride is {problem.stride}; shifted images lie on the result at stride 1 only"

    def traits(self, problem: openconv.Problem, knobs: Any) -> Traits:
        return Traits(accumulator=problem.result_dtype, error_bound=0.0)  # integers, which wrap alike in any order

    def cost(self, problem: openconv.Problem, device: Device, knobs: Any) -> float:
        # A tap reads the image, reads the result and writes it; starting it takes a few microseconds.
        moved = 3 * DTYPE_BYTES[problem.result_dtype] * prod(problem.result_shape)
        return prod(problem.filter) * (5e-6 + moved / device.bandwidth)

    def build(self, problem: openconv.Problem, device: Device, knobs: Any) -> Runner:
        def window(axis: int, tap: int) -> tuple[slice, slice]:
            """Where the results of a tap lie, and the pixels they see; the rest sees padding."""
            shift = tap * problem.dilation[axis] - problem.padding[axis][0]
            lo, hi = max(0, -shift), min(problem.out[axis], problem.spatial[axis] - shift)
            return slice(lo, max(lo, hi)), slice(lo + shift, max(lo, hi) + shift)

        rows, columns = ([window(axis, tap) for tap in range(problem.filter[axis])] for axis in (0, 1))

        def run(x: Tensor, w: Tensor, y: Tensor, workspace: Tensor | None, bias: Any) -> None:
            y.zero_()
            for weights, (here, there) in zip(w[0, 0].tolist(), rows, strict=True):
                for weight, (across, over) in zip(weights, columns, strict=True):
                    if weight:
                        y[..., here, across].add_(x[..., there, over], alpha=weight)

        return run


NEIGHBOURS = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1]], dtype=torch.uint8).reshape(1, 1, 3, 3)


def generation(board: Tensor, engine: str | None = None) -> Tensor:
    """A cell is alive next if 3 of its neighbours are, or 2 and itself."""
    count = openconv.conv2d(board, NEIGHBOURS, padding=1, engine=engine)
    return ((count == 3) | ((count == 2) & (board == 1))).to(torch.uint8)


def main(
    size: Annotated[int, typer.Option(min=8, help="cells along each side of the board")] = 1024,
    generations: Annotated[int, typer.Option(min=1, help="steps of the game")] = 20,
) -> None:
    """Register an engine, see it chosen, compare it with the reference and time both."""
    console, chance = Console(), torch.Generator().manual_seed(0)
    board = torch.randint(0, 2, (1, 1, size, size), dtype=torch.uint8, generator=chance)
    console.print(openconv.explain(openconv.conv2d, board, NEIGHBOURS, padding=1))

    table = Table("engine", "generations", "time for each", title=f"Life on {size} x {size}", title_justify="left")
    boards = {}
    for engine, count in ((None, generations), ("cpu.naive", min(generations, 5))):
        generation(board, engine)  # the first call plans, and compiles what has to be compiled
        now, start = board, time.perf_counter()
        for step in track(range(count), engine or "chosen", console=console, transient=True):
            now = generation(now, engine)
            boards[engine, step] = int(now.sum()), hash(now.numpy().tobytes())
        took = (time.perf_counter() - start) / count
        name = engine or openconv.explain(openconv.conv2d, board, NEIGHBOURS, padding=1).candidates[0].name
        table.add_row(name, str(count), f"{took * 1e3:.2f} ms")
    console.print(table)
    same = all(boards[None, step] == boards["cpu.naive", step] for step in range(min(generations, 5)))
    console.print(f"both engines give the same boards: {same}; {boards[None, generations - 1][0]} cells are alive")
    if not same:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
