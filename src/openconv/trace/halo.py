"""The trace of ``cuda.igemm_sm90`` in its variant with a halo: lines come once, and taps are the same lines shifted."""

from __future__ import annotations

from collections.abc import Iterator

from ..cuda import igemm_sm90, igemm_sm90_halo
from ..cuda.channels_last import turned_result
from ..cuda.device import CudaDevice
from ..cuda.igemm_sm90_halo import Halo, Plane, Work
from ..problem import Problem
from .copies import copied
from .model import Axis, Block, Launch, Move, Owner, Step, Trace, Walk, box, names, one, span

__all__ = ["refusals", "trace"]


def refusals(problem: Problem) -> Iterator[str]:
    """What this variant needs beyond what the engine does."""
    if problem.direction == "wgrad":
        yield "the pass is wgrad; lines with their halo are for fprop and dgrad"
    else:
        yield from igemm_sm90_halo.refusals(problem)


class _Tracer:
    def __init__(self, problem: Problem, device: CudaDevice, knobs: Halo) -> None:
        self.problem, self.knobs = problem, knobs
        self.work: Work = igemm_sm90_halo.work(problem, knobs)
        self.grid = self.work.blocks(device)
        self.fprop, self.known = problem.direction == "fprop", names(problem)
        self.source, self.inner, self.outer = ("x", "c", "k") if self.fprop else ("y", "k", "c")
        self.places = self.known.place if self.fprop else self.known.out
        self.own = self.known.out if self.fprop else self.known.place
        self.strides = (1, *problem.stride)[-2:] if self.fprop else (1, 1)

    def tile(self, at: int) -> tuple[int, int, int, int]:
        """First channel, group, first line and image of a tile, as the kernel's ``Tile``."""
        work = self.work
        rest, channel = divmod(at, work.channel_tiles)
        rest, group = divmod(rest, self.problem.groups)
        image, band = divmod(rest, work.bands)
        return channel * self.knobs.channels, group, band * self.knobs.lines, image

    def outputs(self, at: int) -> tuple[Walk, ...]:
        channel, group, line, image = self.tile(at)
        work = self.work
        height, width = work.results
        channels = span(self.outer, channel, channel + self.knobs.channels, work.out_channels)
        lines = (span(self.own[0], line, line + self.knobs.lines, height),) if self.problem.rank == 2 else ()
        return (one("n", image), one("g", group), channels, *lines, span(self.own[-1], 0, width))

    def depth(self, chunk: int) -> Walk:
        """The channels of a step."""
        work = self.work
        return span(self.inner, chunk * work.depth, (chunk + 1) * work.depth, work.depth_channels)

    def lines(self, at: int, chunk: int, plane: Plane, slot: int) -> Move:
        """The box of lines that come to a slot."""
        work, (_, group, line, image) = self.work, self.tile(at)
        down, right = self.strides
        first = group * work.depth_channels + chunk * work.depth  # a box does not know where a group ends
        axes = (Axis("g", self.problem.groups), Axis(self.inner, work.depth_channels))
        walks = [one("n", image), Walk(axes, first, first + work.depth)]
        if self.problem.rank == 2:
            start = (line + plane.down.corner) * down + plane.down.remainder
            walks.append(box(self.places[0], start, work.box_lines, down))
        walks.append(box(self.places[-1], plane.right.corner * right + plane.right.remainder, work.pitch, right))
        return Move(self.source, tuple(walks), (), "shared", f"lines {slot}")

    def taps(self, tap: tuple[int, int]) -> tuple[Walk, ...]:
        return tuple(one(name, at) for name, at in zip(self.known.taps, tap[-self.problem.rank :], strict=True))

    def filters(self, at: int, chunk: int, tap: tuple[int, int], stage: int) -> Move:
        """The box of one tap's filters."""
        channel, group, _, _ = self.tile(at)
        channels = span(self.outer, channel, channel + self.knobs.channels, self.work.out_channels)
        walks = (one("g", group), channels, self.depth(chunk), *self.taps(tap))
        return Move("w", walks, (), "shared", f"filters {stage}")

    def block(self, index: int, launch: int, result: str) -> list[Block]:
        """All tiles of a block: what it multiplies in order, and what comes when there is room."""
        work, knobs = self.work, self.knobs
        tiles = range(index, work.tiles, self.grid)
        slots = [(at, chunk, plane) for at in tiles for chunk in range(work.chunks) for plane in work.planes]
        inputs = [self.lines(*slot, number % knobs.tiles) for number, slot in enumerate(slots)]
        kept = [(at, chunk, tap[:2]) for at, chunk, plane in slots for tap in plane.taps]
        if work.resident:  # those of the first tile stay for all
            kept = kept[: work.stages]
        filters = [self.filters(*which, number % work.stages) for number, which in enumerate(kept)]
        asked, brought = min(knobs.tiles, len(inputs)), min(work.stages, len(filters))
        ready: list[Move] = []
        text = f"One thread asks for boxes of lines, for all of {asked} slots; another for filters of {brought} taps."
        start: list[Step] = [Step(text, (*inputs[:asked], *filters[:brought]))]
        found, number, step = [], 0, 0
        for at in tiles:
            steps, start = start, []
            for chunk in range(work.chunks):
                for plane in work.planes:
                    for last, (r, s, line, pixel) in enumerate(plane.taps):
                        where = f"tap ({r}, {s})" if self.problem.rank == 2 else f"tap {s}"
                        moved = line * work.pitch + pixel
                        text = f"Groups multiply {where}: slot {number % knobs.tiles}, {moved} rows further on."
                        if ready:
                            text += " What the step before has read is free: the next boxes are asked for."
                        steps.append(Step(text, tuple(ready), (*self.taps((r, s)), self.depth(chunk))))
                        ready, step = [], step + 1
                        if not work.resident and step + work.stages - 1 < len(filters):
                            ready.append(filters[step + work.stages - 1])
                        if last == len(plane.taps) - 1 and number + knobs.tiles < len(inputs):
                            ready.append(inputs[number + knobs.tiles])
                    number += 1
            outputs = self.outputs(at)
            stores = (Move(result, (), tuple(range(len(outputs)))),)
            steps.append(Step("The results leave as boxes, out of shared memory.", (), None, stores))
            part = f"tile {at + 1} of {work.tiles}" if work.tiles > 1 else ""
            found.append(Block(launch, (index,), outputs, tuple(steps), result, part))
        return found


def trace(problem: Problem, device: CudaDevice, knobs: Halo) -> Trace:
    """Blocks stay on their multiprocessor and take one tile after the other."""
    tracer = _Tracer(problem, device, knobs)
    work = tracer.work
    turns, back = igemm_sm90._turns(problem, knobs), turned_result(problem)
    launches, blocks = copied(problem, turns, 0)
    sizes = {"the copy of " + turn.name: turn.size for turn in (*turns, back) if turn}
    own = "y" if tracer.fprop else "x"
    result = "the copy of " + back.name if back else own
    launches.append(Launch(
        "igemm_sm90_halo", "src/openconv/cuda/kernels/igemm_sm90_halo.cu",
        f"a block takes tiles of {knobs.lines} whole line{'s' * (knobs.lines > 1)} in {knobs.channels} channels",
        (tracer.grid,), (knobs.threads,), work.shared, Owner("group of four warps", ((2, 64 * knobs.blocks, 1),)),
    ))  # fmt: skip
    at = len(launches) - 1
    for index in range(tracer.grid):
        blocks += tracer.block(index, at, result)
    if back:
        more = copied(problem, [back], len(launches))
        launches, blocks = launches + more[0], blocks + more[1]
    stay = "all of its filters stay" if work.resident else f"{knobs.stages} stages of filters"
    notes = [
        f"A slot has {work.box_lines} lines of {work.pitch} pixels, 128 bytes of channels each.",
        f"There are {knobs.tiles} slots, and {stay}: {work.shared:,} bytes of shared memory.",
        f"A product has {work.columns} columns for {knobs.lines} x {work.pitch} pixels; some are behind a line.",
    ]
    if work.depth_channels < work.depth:
        notes.append(f"128 bytes are {work.depth} channels; the problem has {work.depth_channels}, the rest is zeros.")
    if work.out_channels < knobs.channels:
        notes.append(f"A tile has {knobs.channels} channels of results; the problem has {work.out_channels}.")
    return Trace(problem, "cuda.igemm_sm90", str(knobs), tuple(launches), tuple(blocks), sizes, tuple(notes))
