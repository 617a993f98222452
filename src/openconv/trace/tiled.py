"""The trace of ``cuda.tiled``: a tile of the input with its halo in shared memory."""

from __future__ import annotations

from math import ceil, prod

from ..cuda import tiled
from ..cuda.device import CudaDevice
from ..cuda.tiled import Tile
from ..problem import Problem
from .model import Block, Launch, Move, Owner, Step, Trace, Walk, box, one, result_axes, span

__all__ = ["trace"]

_ACROSS, _DOWN = tiled._ACROSS, tiled._DOWN
_THREADS = (_ACROSS, _DOWN)


def trace(problem: Problem, device: CudaDevice, knobs: Tile) -> Trace:
    """Blocks are tiles of the result in some of its channels; of a wgrad, filters of a channel, from tiles of dy."""
    made = _wgrad(problem, device, knobs) if problem.direction == "wgrad" else _forward(problem, knobs)
    (height, width), size = tiled._tile(problem, knobs), tiled._shared(problem, knobs)
    tall, note = _DOWN * knobs.rows, ""
    out = problem.spatial if problem.direction == "dgrad" else problem.out
    if out[0] <= tall and out[1] <= _ACROSS:
        note = "So one tile covers the whole image here, and some of its threads are idle."
    fact = f"A tile of {tall} x {_ACROSS} outputs reads {height} x {width} inputs; shared memory takes {size:,} bytes."
    return Trace(problem, "cuda.tiled", str(knobs), *made, notes=tuple(filter(None, (fact, note))))


def _forward(problem: Problem, knobs: Tile) -> tuple[tuple[Launch, ...], tuple[Block, ...], dict[str, int]]:
    """fprop, and dgrad as a fprop of dy with the filter turned around."""
    fprop = problem.direction == "fprop"
    c, k = problem.c // problem.groups, problem.k // problem.groups
    inner, outer = (c, k) if fprop else (k, c)
    (r, s), (dh, dw) = problem.filter, problem.dilation
    low_h, low_w = (low for low, _ in problem.padding)
    pads = (low_h, low_w) if fprop else (dh * (r - 1) - low_h, dw * (s - 1) - low_w)
    strides = problem.stride if fprop else (1, 1)
    target = problem.out if fprop else problem.spatial
    # Names: of the source and its channel and places, of the result likewise.
    source, within, places = ("x", "c", ("h", "w")) if fprop else ("y", "k", ("p", "q"))
    result, channel, own = ("y", "k", ("p", "q")) if fprop else ("x", "c", ("h", "w"))
    tall = _DOWN * knobs.rows
    height, width = tiled._tile(problem, knobs)
    down, across = ceil(target[0] / tall), ceil(target[1] / _ACROSS)
    parts = ceil(outer / knobs.filters)
    grid = (problem.n * down * across, problem.groups * parts)
    columns = range(s) if fprop else range(s - 1, -1, -1)
    computes = [
        [
            Step(
                f"Column s = {at} of the filter: each thread reads a column of inputs for all of its rows and taps.",
                (),
                (one(within, i), span("r", 0, r), one("s", at)),
            )
            for at in columns
        ]
        for i in range(inner)
    ]
    blocks = []
    for y in range(grid[1]):
        group, first = y // parts, y % parts * knobs.filters
        for x in range(grid[0]):
            left, top, n = x % across * _ACROSS, x // across % down * tall, x // across // down
            outputs = (
                one("n", n),
                one("g", group),
                span(channel, first, first + knobs.filters, outer),
                span(own[0], top, top + tall, target[0]),
                span(own[1], left, left + _ACROSS, target[1]),
            )
            steps: list[Step] = []
            for i in range(inner):
                tile = Move(
                    source,
                    (
                        one(within, i),
                        box(places[0], top * strides[0] - pads[0], height),
                        box(places[1], left * strides[1] - pads[1], width),
                    ),
                    (0, 1),
                    "shared",
                    "tile",
                )
                taps = Move("w", (one(within, i), span("r", 0, r), span("s", 0, s)), (1, 2), "shared", "taps")
                text = f"The threads bring the tile of channel {i} with its halo to shared memory, and its taps."
                steps += [Step(text, (tile, taps)), *computes[i]]
            steps[-1] = Step(steps[-1].text, (), steps[-1].terms, (Move(result, (), (0, 1, 2, 3, 4)),))
            blocks.append(Block(0, (x, y), outputs, tuple(steps), result))
    owner = Owner("thread", ((4, 1, 1), (3, knobs.rows, _ACROSS)))
    does = f"a block makes {tall} x {_ACROSS} outputs in {knobs.filters} channels, a thread {knobs.rows} in a column"
    launch = Launch(
        "tiled", "src/openconv/cuda/kernels/tiled.cu", does, grid, _THREADS, tiled._shared(problem, knobs), owner
    )
    return (launch,), tuple(blocks), {}


def _wgrad(
    problem: Problem, device: CudaDevice, knobs: Tile
) -> tuple[tuple[Launch, ...], tuple[Block, ...], dict[str, int]]:
    c, k = problem.c // problem.groups, problem.k // problem.groups
    (r, s), (sh, sw) = problem.filter, problem.stride
    (low_h, low_w), tall = (low for low, _ in problem.padding), _DOWN * knobs.rows
    height, width = tiled._tile(problem, knobs)
    down, across = ceil(problem.out[0] / tall), ceil(problem.out[1] / _ACROSS)
    slices, tiles, parts = tiled._slices(problem, device, knobs), problem.n * down * across, ceil(k / knobs.filters)
    grid = (slices, problem.groups * c * parts)
    every = (0, 1, 2, 3, 4)
    reduced = Step(
        "Lanes of a warp add up by shuffles, warps in shared memory; the block's sums go to the workspace.",
        (), None, (Move("partial sums", (), every),),
    )  # fmt: skip
    blocks = []
    for y in range(grid[1]):
        first, channel, group = y % parts * knobs.filters, y // parts % c, y // parts // c
        filters = span("k", first, first + knobs.filters, k)
        outputs = (one("g", group), one("c", channel), filters, span("r", 0, r), span("s", 0, s))
        for x in range(slices):
            steps = []
            for t in range(x, tiles, slices):
                left, top, n = t % across * _ACROSS, t // across % down * tall, t // across // down
                image, rows = one("n", n), span("p", top, top + tall, problem.out[0])
                terms = (image, rows, span("q", left, left + _ACROSS, problem.out[1]))
                places = (image, box("h", top * sh - low_h, height), box("w", left * sw - low_w, width))
                loads = (Move("x", places, (0, 1), "shared", "tile"), Move("y", terms, (0, 2)))
                text = f"The threads bring tile {t} of x with its halo to shared memory, their own dy to registers."
                steps.append(Step(text, loads))
                steps.append(Step("Each thread multiplies its dy with the x of all taps, in registers.", (), terms))
            blocks.append(Block(0, (x, y), outputs, (*steps, reduced), "partial sums"))
    order, total = result_axes(problem, False), prod(problem.w_shape)
    threads, file = 256, "src/openconv/cuda/kernels/tiled_wgrad.cu"
    sums = (Move("partial sums", (span("slice", 0, slices),), (0,)),)
    text = "Each thread adds up what the blocks found for one value of dw, in their order."
    added = (Step(text, sums, None, (Move("w", (), (0,)),)),)
    last = [
        Block(1, (at,), (Walk(order, at * threads, (at + 1) * threads),), added, "w")
        for at in range(ceil(total / threads))
    ]
    does = f"a block sums the {r} x {s} taps of a channel of x and {knobs.filters} of dy"
    own = Owner("thread", ((7, 1, 1), (6, knobs.rows, _ACROSS)))
    launches = (
        Launch("partial", file, does, grid, _THREADS, tiled._shared(problem, knobs), own),
        Launch("total", file, "adds up the blocks' sums", (len(last),), (threads,), 0, Owner("thread", ((0, 1, 1),))),
    )
    return launches, (*blocks, *last), {"partial sums": tiled._sum_size(problem)}
