"""The channels-first half of cuda.depthwise: a thread owns a patch of results of one plane.

A patch of height x width results needs height + R - 1 input rows of width + S - 1 values (stride 1). Each value is
loaded by a vector, converted once and used by up to R x S products, without shared memory and without waiting: what
neighbouring patches have in common comes from L1. A plane of one dimension is a row; its patches have height 1.

Where rows are no multiple of a vector and planes are small (7x7, 14x14), whole planes are copied through shared memory
instead, in both directions: planes lie side by side whatever their rows are (``tile``).

wgrad turns the loops round: a thread keeps the sums of up to 49 taps and strides over patches of dy.

Kernels: depthwise_nchw.cu (fprop, dgrad), depthwise_nchw_wgrad.cu.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod

from torch import Tensor

from ..device import Device
from ..engine import Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from . import jit, render
from .device import CudaDevice
from .launch import Launch, aligned, pack, single

__all__ = ["NchwKnobs", "build", "cost", "knobs", "refusals", "sources", "traits", "workspace_bytes"]

_DTYPES = ("f32", "f16", "bf16")
_MOST_TAPS = 31
_MOST_SPAN = 320
"""Columns that an unrolled row may reach over: the compiler looks at each of them once for each result of a strip."""
_MOST_SUMS = 49
"""Taps that one thread of a wgrad sums in registers, or two rows of them."""
_UNROLLED_TAPS, _UNROLLED_PRODUCTS = 49, 1024
"""Filters that are unrolled whole: their weights stay in registers, and the code in the instruction cache."""
_SHARED_WEIGHTS = 4096
_TILE_BYTES = 32 << 10


@dataclass(frozen=True)
class NchwKnobs(Knobs):
    """``width`` x ``height`` results (wgrad: values of dy) of a thread's patch, ``threads`` of a block; ``tile``:
    planes go through shared memory (fprop, dgrad); ``splits``: blocks that share the sums of a filter (wgrad)."""

    width: int = 4
    height: int = 1
    threads: int = 256
    tile: bool = False
    splits: int = 1


def refusals(problem: Problem, device: Device) -> Iterator[str]:
    """One sentence for each unmet need."""
    if problem.groups != problem.c:
        yield f"groups is {problem.groups}; wanted C = {problem.c}, a group for each channel"
    if problem.rank > 1 and (problem.layouts[0], problem.layouts[2]) != ("nchw", "nchw"):
        yield f"layout of the images is {problem.layouts[0]} and {problem.layouts[2]}; wanted nchw"
    unknown = [name for name in problem.dtypes if name not in _DTYPES]
    if unknown:
        yield f"dtype is {unknown[0]}; wanted {', '.join(_DTYPES)}"
    if max(problem.filter) > _MOST_TAPS:
        yield f"filter is {problem.filter}; wanted at most {_MOST_TAPS} along an axis"
    if max(problem.n, problem.c, problem.k) > 65535:
        yield f"N, C and K are {problem.n}, {problem.c} and {problem.k}; wanted at most 65535 of each"
    if max(prod(problem.spatial), prod(problem.out)) >= 2**31:
        yield f"a plane has {max(prod(problem.spatial), prod(problem.out))} elements; wanted less than 2^31"


def traits(problem: Problem, knobs: NchwKnobs) -> Traits:
    """What can be relied on."""
    if problem.direction != "wgrad":
        chain = prod(problem.filter) * (problem.k // problem.c if problem.direction == "dgrad" else 1)
        return Traits(accumulator="f32", error_bound=(chain + 1) * 2.0**-24)
    # A thread's products in turn, then 5 additions of a warp, 8 of its team and those of the splits.
    patches = problem.n * prod(problem.out[:-2]) * _strips(problem, knobs)[2]
    team = _team(problem, knobs, patches)
    chain = -(-patches // (team * knobs.splits)) * knobs.width * knobs.height
    return Traits(accumulator="f32", error_bound=(chain + 5 + team // 32 + knobs.splits) * 2.0**-24)


def workspace_bytes(problem: Problem, device: Device, knobs: NchwKnobs) -> int:
    """The splits' sums of a wgrad."""
    split = problem.direction == "wgrad" and knobs.splits > 1
    return 4 * knobs.splits * prod(problem.w_shape) if split else 0


def knobs(problem: Problem, device: Device) -> Iterable[NchwKnobs]:
    """The default first, then the search space."""
    return _knobs(problem, device.threads)


def cost(problem: Problem, device: Device, knobs: NchwKnobs) -> float:
    """Predicted seconds: bytes, instructions, or what L1 hands out, whichever takes longest."""
    # L1 hands out 128 bytes a cycle, of one line at a time: a warp's load takes a cycle for each line it touches.
    clock = device.flops / 256 / device.threads / 0.85
    wgrad = problem.direction == "wgrad"
    shape = _Shape(problem, knobs)
    reached = (knobs.height - 1) + shape.rows if knobs.height > 1 else shape.rows
    lines = min(32.0, max(1.0, shape.in_step * shape.in_bytes / 4, shape.load_width * shape.in_bytes / 4))
    vectors = shape.vectors
    if knobs.tile:
        lines = 1.0
    stores = knobs.height * knobs.width / (shape.other_width if wgrad else shape.store_width)
    store_lines = min(32.0, max(1.0, knobs.width * shape.out_bytes / 4))
    patch_rows = reached * shape.depth_taps
    products = float(knobs.width * knobs.height * shape.rows * shape.depth_taps * problem.filter[-1])
    if not wgrad:
        products *= problem.k // problem.c if problem.direction == "dgrad" else 1
        products /= prod(problem.stride) if problem.direction == "dgrad" else 1
    instructions = 60 + products + patch_rows * vectors * (3 + shape.load_width) + 3 * stores
    passes = shape.chunks if wgrad else 1
    patches = shape.patches * passes
    # Of two axes, rows are kept in registers and moved about: a third more than what is counted.
    issue = patches * instructions / (device.flops / 2) * (1.35 if problem.rank > 1 else 1.0)
    l1 = patches / 32 * (patch_rows * vectors * lines + stores * store_lines) / (device.threads * clock)
    full = min(1.0, patches / (device.threads * 1024))
    alone = (
        instructions / clock * (1 if not wgrad else max(1.0, shape.patches / problem.k / knobs.threads / knobs.splits))
    )
    moved = problem.min_bytes / (device.bandwidth * 0.9) / max(full, 0.05)
    again = 2e-6 if wgrad and knobs.splits > 1 else 0.0
    # Rows that are no multiple of a vector start anywhere: element by element. dgrad adds several filters one by one.
    row = problem.spatial[-1] if problem.direction == "dgrad" else problem.out[-1]
    odd = (3.0 if knobs.width > 2 else 1.5) if shape.in_bytes < 4 and (row % 2 or problem.spatial[-1] % 2) else 1.0
    serial = 1 + problem.k // problem.c / 32 if problem.direction == "dgrad" and problem.k > problem.c else 1.0
    return 2e-6 + again + max(moved, issue * serial, l1 * serial, alone * serial) * odd


def build(problem: Problem, device: Device, knobs: NchwKnobs) -> Runner:
    """The pass on given tensors."""
    assert isinstance(device, CudaDevice)
    return (_build_wgrad if problem.direction == "wgrad" else _build_images)(problem, device, knobs)


def sources(problem: Problem, device: Device, knobs: NchwKnobs) -> list[jit.Source]:
    """What :func:`build` compiles."""
    return [_wgrad_source(problem, knobs) if problem.direction == "wgrad" else _images_source(problem, knobs)]


# -- shapes ---------------------------------------------------------------------------------------------------------


def _three(values: tuple[int, ...], fill: int = 1) -> tuple[int, ...]:
    return (fill,) * (3 - len(values)) + values


def _divisor(limit: int, *lengths: int) -> int:
    """The largest power of two up to ``limit`` that divides all lengths."""
    return min(limit, gcd(*lengths, limit))


def _strips(problem: Problem, knobs: NchwKnobs) -> tuple[int, int, int]:
    """Patches down, across and of a slice: of the result's plane, or dy's in a wgrad."""
    size = _three(problem.spatial if problem.direction == "dgrad" else problem.out)
    down, across = -(-size[1] // knobs.height), -(-size[2] // knobs.width)
    return down, across, down * across


class _Shape:
    """What follows from a problem and its knobs."""

    def __init__(self, problem: Problem, knobs: NchwKnobs) -> None:
        gradient, wgrad = problem.direction == "dgrad", problem.direction == "wgrad"
        self.in_size = _three(problem.out if gradient else problem.spatial)
        self.out_size = _three(problem.spatial if gradient else problem.out)
        self.in_bytes = DTYPE_BYTES[problem.dtypes[2 if gradient else 0]]
        self.out_bytes = DTYPE_BYTES[problem.dtypes[0 if gradient else 2]]
        stride, taps, dilation = problem.stride[-1], problem.filter[-1], problem.dilation[-1]
        self.in_step = knobs.width // stride if gradient and knobs.width > 1 else knobs.width * stride
        self.load_width = 1
        self.vectors = taps
        if knobs.width > 1:
            self.load_width = _divisor(16 // self.in_bytes, self.in_size[2], self.in_step)
            reach = (taps - 1) * dilation
            span = -(-(knobs.width + reach) // stride) if gradient else (knobs.width - 1) * stride + reach + 1
            self.vectors = min(-(-span // self.load_width) + 1, taps * (knobs.width // self.load_width + 1))
        self.store_width = self.other_width = _divisor(16 // self.out_bytes, self.out_size[2], knobs.width)
        self.strips_r, self.strips_s, slice_strips = _strips(problem, knobs)
        self.strips = self.out_size[0] * slice_strips
        filter_t, filter_r, _ = _three(problem.filter)
        self.depth_taps = 1 if wgrad else filter_t
        self.rows = _row_block(problem) if wgrad else filter_r
        self.chunks = filter_t * -(-filter_r // self.rows) if wgrad else 1
        self.channels = problem.c if gradient else problem.k
        self.total = problem.n * self.channels
        self.patches = self.total * self.strips
        self.filter_pitch = filter_t * filter_r * _pitch(taps)


def _pitch(taps: int) -> int:
    """Shared values of a filter row: whole vectors of four, but for one or two taps."""
    return -(-taps // 4) * 4 if taps >= 3 else taps


def _row_block(problem: Problem) -> int:
    """Filter rows that a thread of a wgrad sums: as even a share as possible."""
    _, rows, taps = _three(problem.filter)
    most = max(2, _MOST_SUMS // taps)
    return -(-rows // -(-rows // most))


def _team(problem: Problem, knobs: NchwKnobs, patches: int) -> int:
    """Threads of a wgrad that share a filter: fewer where a filter has few patches."""
    team = knobs.threads
    while team > 32 and patches < 4 * team * knobs.splits:
        team //= 2
    return team


def _blocks(shape: _Shape, knobs: NchwKnobs, held: float, span: float = 0.5) -> int:
    """Blocks that an SM must have room for, from what a thread holds: ``held``, its patch, a share of its span. Left
    alone, the compiler loads far ahead and leaves few threads. Tried on sm_80 and sm_90a, where nothing spills."""
    registers = held + knobs.width * knobs.height + shape.vectors * shape.load_width * span
    return max(1, min(int(65536 / registers), 1024) // knobs.threads)


# -- choices --------------------------------------------------------------------------------------------------------


@cache
def _knobs(problem: Problem, multiprocessors: int) -> tuple[NchwKnobs, ...]:
    default = _default(problem, multiprocessors)
    others = [replace(default, threads=threads) for threads in (128, 256)]
    others += [replace(default, tile=not default.tile, threads=256 if default.tile else 128)]
    others += [replace(default, height=height) for height in (default.height * 2, max(1, default.height // 2), 1)]
    if default.width % 2 == 0:
        others += [replace(default, width=width) for width in (default.width * 2, default.width // 2)]
    others += [replace(default, width=default.width * 2, height=max(1, default.height // 2))]
    if problem.direction == "wgrad":
        others += [replace(default, splits=splits) for splits in (default.splits * 2, max(1, default.splits // 2))]
    found = dict.fromkeys([default, *(other for other in others if _fits(problem, other))])
    return tuple(found)[:13]


def _fits(problem: Problem, knobs: NchwKnobs) -> bool:
    """Whether the kernels take these knobs, and are worth a try with them."""
    gradient, wgrad = problem.direction == "dgrad", problem.direction == "wgrad"
    (_, row_stride, stride), (_, rows, taps) = _three(problem.stride), _three(problem.filter)
    _, _, dilation = _three(problem.dilation)
    size = _three(problem.spatial if gradient else problem.out)
    if knobs.width > 1:
        span = (knobs.width - 1) * (1 if gradient else stride) + (taps - 1) * dilation + 1
        if span > _MOST_SPAN or (gradient and knobs.width % stride):
            return False
    if knobs.height > 1 and (size[1] == 1 or (gradient and knobs.height % row_stride) or not _rows_fit(problem, knobs)):
        return False
    if knobs.width * knobs.height > (32 if wgrad or knobs.height == 1 else 64) or knobs.width >= size[2] + 8:
        return False
    if wgrad:
        sums = _row_block(problem) * taps
        most = 2**31 // max(1, prod(problem.w_shape))
        if sums > 9 and rows > 1 and (knobs.width * knobs.height > 16 or (size[2] % knobs.width and knobs.width > 7)):
            return False  # registers would be spilled
        return not knobs.tile and knobs.splits < min(most, 65536)
    return not knobs.tile or _tile_planes(problem, knobs) > 0


def _rows_fit(problem: Problem, knobs: NchwKnobs) -> bool:
    """Rows of an unrolled patch are looked at one by one: not too many of them, and few without a product."""
    (_, stride, _), (_, dilation, _), (_, rows, _) = (
        _three(problem.stride), _three(problem.dilation), _three(problem.filter),
    )  # fmt: skip
    return (knobs.height - 1) * stride + (rows - 1) * dilation <= 64 and dilation <= 4


def _tile_planes(problem: Problem, knobs: NchwKnobs) -> int:
    """Planes that a block takes through shared memory; 0 if that cannot be. Their first bytes are aligned to 16."""
    if problem.k != problem.c or problem.direction == "wgrad":
        return 0
    shape = _Shape(problem, knobs)
    of_in, of_out = prod(shape.in_size) * shape.in_bytes, prod(shape.out_size) * shape.out_bytes
    unit = max(16 // gcd(16, of_in), 16 // gcd(16, of_out))
    most = min(knobs.threads // shape.strips, _TILE_BYTES // max(of_in, of_out), _SHARED_WEIGHTS // shape.filter_pitch)
    return min(most, -(-shape.total // unit) * unit) // unit * unit


def _best(length: int, *sizes: int) -> int:
    """The first strip that leaves at most a tenth of its places empty at the end of a row, else the fullest."""
    share = [length / (-(-length // size) * size) for size in sizes]
    return next(
        (size for size, found in zip(sizes, share, strict=True) if found >= 0.9), sizes[share.index(max(share))]
    )


def _default(problem: Problem, multiprocessors: int) -> NchwKnobs:
    gradient, wgrad = problem.direction == "dgrad", problem.direction == "wgrad"
    (_, row_stride, stride), (_, filter_rows, taps) = _three(problem.stride), _three(problem.filter)
    size = _three(problem.spatial if gradient else problem.out)
    lanes = 16 // max(DTYPE_BYTES[problem.dtypes[0]], DTYPE_BYTES[problem.dtypes[2]])

    # Long filters of one dimension: a value that is converted should meet many products.
    if size[1] == 1 and taps > 8:
        widths = [2 * lanes]
    elif size[1] == 1 and lanes == 8 and size[2] % 2 and stride == 1 and not wgrad:
        # Rows start anywhere, so that results are stored one by one: those of a warp should lie close together.
        widths = [2]
    elif size[1] == 1:
        widths = [lanes]
    else:
        halves = [lanes // 2] if size[2] % (lanes // 2) == 0 else []
        widths = [lanes, *halves, 7, lanes // 2] if not gradient or stride == 1 else [lanes, lanes // 2]
    if gradient and stride > 1:
        widths = [w for w in widths if w % stride == 0] or [stride * max(1, 8 // stride)]
    width = _best(size[2], *widths)
    found = NchwKnobs(width=width, threads=128 if filter_rows * taps > 25 else 256)
    if not _fits(problem, found):
        found = replace(found, width=1)

    heights = [4, 7, 2] if not gradient or row_stride == 1 else [row_stride * max(1, 4 // row_stride), row_stride]
    most = 8 if wgrad and filter_rows * taps > 49 else 16 if wgrad and filter_rows * taps > 9 else 32
    heights = [h for h in heights if h * found.width <= most] or heights[-1:]
    taller = replace(found, height=_best(size[1], *heights))
    if (filter_rows > 1 or row_stride > 1) and _fits(problem, taller):
        found = taller
        # A small problem rather has more threads.
        while not wgrad and found.height > 1 and _Shape(problem, found).patches < multiprocessors * 256:
            lower = replace(found, height=found.height // 2)
            if not _fits(problem, lower):
                break
            found = lower
    if not wgrad:
        return _through_tile(problem, found)

    patches = _Shape(problem, found).strips * problem.n
    team = _team(problem, found, patches)
    blocks = -(-problem.k // (found.threads // team)) * _Shape(problem, found).chunks
    splits = max(1, min(-(-3 * multiprocessors // blocks), patches // (4 * team), 1024))
    return replace(found, splits=splits)


def _through_tile(problem: Problem, knobs: NchwKnobs) -> NchwKnobs:
    """The knobs with ``tile`` if rows are narrow or odd enough for it to pay."""
    if len(problem.spatial) != 2 or problem.k != problem.c:
        return knobs
    shape = _Shape(problem, knobs)
    if shape.load_width * shape.in_bytes >= 8 and shape.store_width * shape.out_bytes >= 8:
        return knobs
    for height in (7, knobs.height, 4, 2):
        found = replace(knobs, tile=True, threads=128, height=height)
        if _fits(problem, found):
            return found
    return knobs


# -- fprop and dgrad ------------------------------------------------------------------------------------------------


def _axes(problem: Problem) -> dict[str, int | bool | str]:
    """Filter, stride, padding and dilation of three axes."""
    found: dict[str, int | bool | str] = {"multiplier": problem.k // problem.c, "rank": problem.rank}
    lows = _three(tuple(low for low, _ in problem.padding), 0)
    for at, axis in enumerate("trs"):
        found[f"filter_{axis}"] = _three(problem.filter)[at]
        found[f"stride_{axis}"] = _three(problem.stride)[at]
        found[f"pad_{axis}"] = lows[at]
        found[f"dilation_{axis}"] = _three(problem.dilation)[at]
    return found


def _layout(problem: Problem, knobs: NchwKnobs) -> tuple[_Shape, int, tuple[int, ...]]:
    """The shape, the planes of a block (0: one, which other blocks may share) and the grid."""
    shape = _Shape(problem, knobs)
    if not knobs.tile and shape.strips > knobs.threads // 2:
        return shape, 0, (-(-shape.strips // knobs.threads), shape.channels, problem.n)
    most = max(1, _SHARED_WEIGHTS // shape.filter_pitch)
    planes = _tile_planes(problem, knobs) if knobs.tile else min(knobs.threads // shape.strips, most)
    return shape, planes, (-(-shape.total // planes),)


def _images_source(problem: Problem, knobs: NchwKnobs) -> jit.Source:
    shape, planes, _ = _layout(problem, knobs)
    _, rows, taps = _three(problem.filter)
    products = knobs.width * knobs.height * rows * taps
    unrolled = rows * taps <= _UNROLLED_TAPS and products <= _UNROLLED_PRODUCTS
    # Where a thread reads its weights but once, it may do so by itself: nobody waits. Long rows are worth the wait.
    alone = shape.filter_pitch > _SHARED_WEIGHTS or (unrolled and (problem.rank > 1 or taps <= 8))
    staged = 0 if alone else max(1, planes) * shape.filter_pitch
    tile = planes * max(prod(shape.in_size) * shape.in_bytes, prod(shape.out_size) * shape.out_bytes) * knobs.tile
    constants: dict[str, int | bool | str] = {
        "gradient": problem.direction == "dgrad", **_axes(problem), "threads": knobs.threads,
        "blocks": _blocks(shape, knobs, 30 + (rows * taps if unrolled else taps)),
        "lone": planes == 0, "height": knobs.height, "width": knobs.width, "load_width": shape.load_width,
        "store_width": shape.store_width,
        "unrolled": unrolled,
        # Rounded up, so that planes of other sizes find the kernel compiled.
        "staged": staged if planes == 0 else -(-staged // 1024) * 1024,
        "tile": -(-tile // 4096) * 4096,
    }  # fmt: skip
    return jit.Source("depthwise_nchw.cu", render.traits(problem, constants))


def _build_images(problem: Problem, device: CudaDevice, knobs: NchwKnobs) -> Runner:
    shape, planes, grid = _layout(problem, knobs)
    sizes = [
        shape.total, shape.channels, planes, shape.strips, shape.strips_r, shape.strips_s,
        *shape.in_size, *shape.out_size,
    ]  # fmt: skip
    params = pack(3 + max(1, len(problem.epilogue.operands)), (), sizes)
    launch = Launch(_images_source(problem, knobs), "depthwise_nchw", device, grid, (knobs.threads,), params)
    return single(launch, 16)


# -- wgrad ----------------------------------------------------------------------------------------------------------


def _wgrad_source(problem: Problem, knobs: NchwKnobs) -> jit.Source:
    shape = _Shape(problem, knobs)
    sums = shape.rows * problem.filter[-1]
    ragged = shape.out_size[2] % knobs.width != 0
    if shape.rows == 1 or sums <= 25:
        blocks = _blocks(shape, knobs, 24 + sums * (1 if shape.rows == 1 else 1.75), 1.2 if ragged else 0.5)
    else:  # many unrolled rows are loaded ahead, whatever the bound: pairs take half of what single values do
        blocks = max(1, (512 if shape.in_bytes == 2 and sums <= 36 else 256) // knobs.threads)
    constants: dict[str, int | bool | str] = {
        **_axes(problem), "threads": knobs.threads,
        "blocks": blocks,
        "team": _team(problem, knobs, problem.n * shape.strips), "rows": shape.rows, "height": knobs.height,
        "width": knobs.width, "load_width": shape.load_width, "other_width": shape.other_width,
        "ragged_r": shape.out_size[1] % knobs.height != 0, "ragged_s": ragged,
    }  # fmt: skip
    return jit.Source("depthwise_nchw_wgrad.cu", render.traits(problem, constants))


def _build_wgrad(problem: Problem, device: CudaDevice, knobs: NchwKnobs) -> Runner:
    shape = _Shape(problem, knobs)
    source, splits = _wgrad_source(problem, knobs), knobs.splits
    teams = knobs.threads // _team(problem, knobs, problem.n * shape.strips)
    sizes = [
        problem.n, problem.k, splits, shape.chunks, shape.strips_r, shape.strips_s, *shape.in_size, *shape.out_size,
    ]  # fmt: skip
    params = pack(4, (), sizes)
    grid = (-(-problem.k // teams) * shape.chunks, splits)
    launch = Launch(source, "depthwise_nchw_wgrad", device, grid, (knobs.threads,), params)
    add = None
    if splits > 1:
        blocks = -(-prod(problem.w_shape) // 256)
        add = Launch(source, "depthwise_nchw_sum", device, (blocks,), (256,), params, follows=True)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        a, b = aligned(a, 16), aligned(b, 16)
        partial = workspace.data_ptr() if workspace is not None else 0
        launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), partial)
        if add is not None:
            add(a.data_ptr(), b.data_ptr(), out.data_ptr(), partial)

    return run
