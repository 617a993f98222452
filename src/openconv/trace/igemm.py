"""The trace of ``cuda.igemm``: tiles of two matrices, one of which is never stored, in a ring of shared memory."""

from __future__ import annotations

from itertools import product
from math import ceil, prod

from ..cuda import igemm
from ..cuda.channels_last import turned_inputs
from ..cuda.device import CudaDevice
from ..cuda.igemm import Tile
from ..problem import Problem
from .copies import copied
from .model import Axis, Block, Launch, Move, Owner, Step, Trace, Walk, axis_list, names, one, result_axes, span

__all__ = ["trace"]

_KERNELS = "src/openconv/cuda/kernels/"


def trace(problem: Problem, device: CudaDevice, knobs: Tile) -> Trace:
    """Blocks of rows x columns results; a step is a piece of the depth, brought some steps before it is multiplied."""
    work = igemm._work(problem, knobs, igemm._copies_boxes(device))
    turns = turned_inputs(problem)
    launches, blocks = copied(problem, turns, 0)
    sizes = {"the copy of " + turn.name: turn.size for turn in turns if turn} | {"partial sums": 4}
    at, name = len(launches), "igemm_wgrad" if problem.direction == "wgrad" else "igemm_conv"
    windows, filters = ("dy", "windows of x") if problem.direction == "wgrad" else ("windows", "filters")
    does = f"a block makes {knobs.rows} x {knobs.columns} results, {knobs.depth} terms of each sum at a time"
    warps = Owner("warp", ((1, knobs.rows // knobs.warps_m, 1), (2, knobs.columns // knobs.warps_n, knobs.warps_m)))
    file = "igemm_wgrad.cu" if problem.direction == "wgrad" else "igemm.cu"
    launches.append(Launch(name, _KERNELS + file, does, work.grid, (knobs.threads,), work.shared, warps))
    blocks += _wgrad(problem, knobs, work, at) if problem.direction == "wgrad" else _forward(problem, knobs, work, at)
    if knobs.splits > 1:
        blocks += _sums(problem, knobs, work, launches)
    notes = [
        f"A stage holds {knobs.rows} x {knobs.depth} of {windows} and {knobs.depth} x {knobs.columns} of {filters}.",
        f"{knobs.stages} stages and what a block keeps besides take {work.shared:,} bytes of shared memory.",
        f"Products are those of {'CUDA cores' if work.lanes else 'tensor cores, 16 x 8 results at a time'}.",
    ]
    if any(turns):
        notes.append("Loads of a tensor that was copied are drawn where it lies in the original.")
    return Trace(problem, "cuda.igemm", str(knobs), tuple(launches), tuple(blocks), sizes, tuple(notes))


class _Ring:
    """The steps of a block: loads of a step, `stages` - 1 steps ahead, and the products of one that has come."""

    sides: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1), (0, 2))

    def __init__(self, knobs: Tile, tensors: tuple[str, str], names: tuple[str, str]) -> None:
        self.knobs, self.tensors, self.names = knobs, tensors, names

    def loads(self, at: int, depths: list[Walk]) -> tuple[Move, ...]:
        if at >= len(depths):
            return ()
        stage = at % self.knobs.stages
        return tuple(
            Move(tensor, (depths[at],), of, "shared", f"stage {stage}: {name}")
            for tensor, of, name in zip(self.tensors, self.sides, self.names, strict=True)
        )

    def steps(self, depths: list[Walk], result: str) -> tuple[Step, ...]:
        ahead, found = self.knobs.stages - 1, []
        for at in range(min(ahead, len(depths))):
            found.append(
                Step(f"The threads ask for the pieces of step {at}, which go to stage {at}.", self.loads(at, depths))
            )
        for at, depth in enumerate(depths):
            more = self.loads(at + ahead, depths)
            text = f"The warps multiply what has come to stage {at % self.knobs.stages}"
            if more:
                text += f", and ask for step {at + ahead} into stage {(at + ahead) % self.knobs.stages}"
            found.append(Step(f"{text}.", more, (depth,)))
        stores = (Move(result, (), (0, 1, 2)),)
        found.append(
            Step("The sums leave through shared memory, so that neighbours are stored side by side.", (), None, stores)
        )
        return tuple(found)


def _forward(problem: Problem, knobs: Tile, work: igemm._Work, launch: int) -> list[Block]:
    fprop, known, groups = problem.direction == "fprop", names(problem), problem.groups
    c, k = problem.c // groups, problem.k // groups
    channels, results = (c, k) if fprop else (k, c)
    axes = igemm.axes(problem)
    span_ = channels if fprop or work.constants["listed"] else ceil(channels / knobs.depth) * knobs.depth
    rows = problem.n * prod(axis.count for axis in axes)
    ways = list(product(*(range(len(axis.taps)) for axis in axes)))
    if work.constants["backwards"]:
        ways.reverse()
    inner, outer = ("c", "k") if fprop else ("k", "c")
    result = "partial sums" if knobs.splits > 1 else "y" if fprop else "x"
    ring = _Ring(knobs, ("x" if fprop else "y", "w"), ("windows", "filters"))
    found = []
    for number, way in enumerate(ways):
        own: list[Axis] = []
        taps: list[Axis] = []
        for axis, phase, place, tap in zip(axes, way, known.out if fprop else known.place, known.taps, strict=True):
            first, count, _ = axis.taps[phase]
            own.append(Axis(place, axis.count, phase, axis.numbers[3]))
            taps.append(Axis(tap, count, first, axis.numbers[6]))
        terms = prod(axis.count for axis in taps)
        all_steps = ceil(terms * span_ / knobs.depth)
        depth = (*taps, Axis(inner, channels))
        for split in range(knobs.splits):
            begin, end = (all_steps * at // knobs.splits for at in (split, split + 1))
            depths = [Walk(depth, at * knobs.depth, (at + 1) * knobs.depth, span_) for at in range(begin, end)]
            steps = ring.steps(depths, result)
            for group in range(groups):
                for x in range(work.grid[0]):
                    m, n = _place(x, knobs, ceil(rows / knobs.rows), ceil(results / knobs.columns))
                    outputs = (
                        one("g", group),
                        Walk((Axis("n", problem.n), *own), m * knobs.rows, (m + 1) * knobs.rows),
                        span(outer, n * knobs.columns, (n + 1) * knobs.columns, results),
                    )
                    phase_text = f"phase {number + 1} of {len(ways)}" if len(ways) > 1 else ""
                    index = (x, group, number * knobs.splits + split)
                    found.append(Block(launch, index, outputs, steps, result, phase_text))
    return found


def _wgrad(problem: Problem, knobs: Tile, work: igemm._Work, launch: int) -> list[Block]:
    known, groups = names(problem), problem.groups
    c, k, pixels = problem.c // groups, problem.k // groups, problem.n * prod(problem.out)
    columns = (*axis_list(known.taps, problem.filter), Axis("c", c))
    depth = (Axis("n", problem.n), *axis_list(known.out, problem.out))
    all_steps, result = ceil(pixels / knobs.depth), "partial sums" if knobs.splits > 1 else "w"
    tiles = ceil(k / knobs.rows), ceil(prod(axis.count for axis in columns) / knobs.columns)
    ring = _Ring(knobs, ("y", "x"), ("dy", "windows"))
    found = []
    for split in range(knobs.splits):
        begin, end = (all_steps * at // knobs.splits for at in (split, split + 1))
        steps = ring.steps([Walk(depth, at * knobs.depth, (at + 1) * knobs.depth) for at in range(begin, end)], result)
        for group in range(groups):
            for x in range(work.grid[0]):
                m, n = _place(x, knobs, *tiles)
                outputs = (
                    one("g", group),
                    span("k", m * knobs.rows, (m + 1) * knobs.rows, k),
                    Walk(columns, n * knobs.columns, (n + 1) * knobs.columns),
                )
                found.append(Block(launch, (x, group, split), outputs, steps, result))
    return found


def _place(block: int, knobs: Tile, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """A block's tile along both sides."""
    rest, near = divmod(block, tiles_m if knobs.rows_first else tiles_n)
    return (near, rest) if knobs.rows_first else (rest, near)


def _sums(problem: Problem, knobs: Tile, work: igemm._Work, launches: list[Launch]) -> list[Block]:
    """The launch of igemm_sum.cu."""
    per, total = work.sum_together * 256 // work.sum_rows, prod(problem.result_shape)
    order, result = result_axes(problem, work.last or problem.direction == "wgrad"), "xwy"[problem.result]
    loads = (Move("partial sums", (span("split", 0, knobs.splits),), (0,)),)
    text = "Each thread adds up the sums of all splits for its results, in their order."
    step = Step(text, loads, None, (Move(result, (), (0,)),))
    grid = (ceil(total / per),)
    launches.append(Launch("igemm_sum", f"{_KERNELS}igemm_sum.cu", "adds up the splits", grid, (256,)))
    at = len(launches) - 1
    return [Block(at, (x,), (Walk(order, x * per, (x + 1) * per),), (step,), result) for x in range(grid[0])]
