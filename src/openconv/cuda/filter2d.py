"""cuda.filter2d: image filters, each channel by a filter of its own, held in registers down the image.

    y[n,c,p,q]  = sum over r,s of  x[n, c, p - pad + r, q - pad + s] * w[c,r,s]
    dw[c,r,s]   = sum over n,p,q of  x[n, c, p - pad + r, q - pad + s] * dy[n,c,p,q]

dgrad is the first formula with dy for x, the filter turned by half a turn and the padding R-1 - pad.

Two floors, for one channel of 4000x4000 in f32 on an H200 (4.2 TB/s, 51 TFLOP/s): its 128 MB take 30 us; its
multiply-adds 5.6 us (3x3), 31 us (7x7), 141 us (15x15). So filters to about 7x7 should run at the speed of memory, and
larger ones at that of multiply-adds. A multiprocessor starts 4 multiply-adds of a warp in a cycle, and takes 4 cycles
for a load of 16 bytes a lane: 16 multiply-adds for each such load, and few other instructions, reach either floor.

``direct`` (filter in registers, rows of the image through the first-level cache), thread of 8 rows x 4 columns::

    3x3: 10 rows x 1 vector and 2 values    288 multiply-adds      5x5: 12 rows x 3 vectors     800
    7x7: 14 rows x 3 vectors               1568

``staged`` (tile in shared memory, at most 5x5 taps in registers at a time), thread of 8 rows x 4 columns::

    15x15: 3 x 4 blocks of 5x4 taps (the last of 5x3): 12 rows x 2 vectors and 5 of weights     640 and 480

``separable`` (staged; sums down the columns of the tile, then along the rows), thread of 8 rows x 4 columns::

    15x15: down 22 vectors    480 multiply-adds, for 160 of 128 columns; along 8 rows x 5 vectors    480
    31x31: down 38 vectors    992; along 8 rows x 9 vectors    992

The filter's values are on the GPU and may change from call to call, so that the GPU itself finds out, for each channel,
whether its filter is an outer product: a launch of one block a channel that takes 2 us. On 4000x4000 the two passes
have 30 us of instructions for 15x15 and 54 us for 31x31, where one pass takes 160 and 650 us.

``wgrad`` (tiles of x and dy in shared memory, at most 7x5 sums in registers), thread of 8 rows x 4 columns::

    3x3: 10 rows x 2 vectors of x and 8 of dy     288            15x15: blocks of 5x4: 32 vectors     640 and 480
    7x7: blocks of 7x4 and 7x3: 36 vectors        896 and 672

Its sums go through the workspace: one for each block and tap, added in double by a second kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..epilogue import IDENTITY, Const, Node
from ..problem import DTYPE_BYTES, Problem
from . import jit, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["Filter2d", "Filter2dGradKnobs", "Filter2dKnobs"]

_MOST_CHANNELS = 4
_MOST_TAPS = 31
_DTYPES = ("f32", "f16", "bf16", "u8")
_SHARED_WORDS = 12 << 10  # 48 KiB, what a block may have without asking
_DIRECT_WEIGHTS = 49  # beyond, weights and sums do not fit into registers beside each other
_DIRECT_MACS = 2048  # multiply-adds of a thread that are written out: 32 KiB of instructions
_SEPARABLE_TAPS = 81
_SEPARABLE_MACS = 1 << 28  # of an image; an H200 takes 15 us for them, and 2 us to look for factors
_FACTOR_BYTES = 272  # Factors of common/filter2d.cuh: twice 32 numbers, and a flag in 16 bytes
_FACTOR_THREADS = 256
_STRIP_ROWS = 8
_SUM_THREADS = 256
_INTEGER_OPS = {"add", "sub", "mul", "neg", "max", "min", "relu"}


@dataclass(frozen=True)
class Filter2dKnobs(Knobs):
    """fprop and dgrad: whether the image goes through shared memory, the rows of a thread's results (4 columns wide),
    the threads along a row of the tile and those of a block, and whether the GPU looks for separable filters first."""

    staged: bool
    rows: int
    across: int
    threads: int
    separable: bool = False


@dataclass(frozen=True)
class Filter2dGradKnobs(Knobs):
    """wgrad: the threads along a row of a tile, the warps that share its rows, its rows, and the tiles of a block."""

    across: int
    strips: int
    tile_rows: int
    tiles: int


class Filter2d(Engine):
    """Image filters of stride 1: each of 1 to 4 channels by its own filter, a block of results in a thread's registers.

        y[n,c,p,q] = sum over r,s of  x[n, c, p - pad + r, q - pad + s] * w[c,r,s]

    A row of the image that is loaded serves all rows of the filter, so that small filters run at the speed of memory
    and large ones at that of multiply-adds. It wins for images of few channels; with many, cuda.depthwise has other
    channels to fill vectors with. From about 31x31 on an FFT needs fewer operations. The arithmetic stands at the head
    of this file.

    A filter that is an outer product to within 2^-21 of each tap (a box, a Gaussian, a Sobel filter) is run as a pass
    down and a pass along, R + S products instead of R * S. The GPU looks for such filters in every call of fprop and
    dgrad with at least 9x9 taps and images that are large enough not to notice, channel by channel, in all dtypes and
    layouts; nothing waits for the answer. Predicted times leave it out, since they know no values.
    """

    name = "cuda.filter2d"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.rank != 2:
            yield f"rank is {problem.rank}; wanted 2 spatial axes"
        if not problem.groups == problem.c == problem.k or not 1 <= problem.c <= _MOST_CHANNELS:
            sizes = f"C, K and groups are {problem.c}, {problem.k} and {problem.groups}"
            yield f"{sizes}; wanted 1 to {_MOST_CHANNELS} channels with a filter each"
        if max(problem.filter) > _MOST_TAPS:
            yield f"filter is {problem.filter}; wanted at most {_MOST_TAPS} taps along an axis"
        if set(problem.stride) != {1}:
            yield f"stride is {problem.stride}; a row that is loaded serves neighbouring results only at stride 1"
        if set(problem.dilation) != {1}:
            yield f"dilation is {problem.dilation}; wanted 1"
        if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in _DTYPES:
            yield f"dtypes are {', '.join(problem.dtypes)}; wanted one of {', '.join(_DTYPES)} for all three"
        elif problem.dtypes[0] == "u8" and not _is_integral(problem):
            yield f"epilogue is {problem.epilogue}; of u8, wanted only {', '.join(sorted(_INTEGER_OPS))}"
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted the same"

    def traits(self, problem: Problem, knobs: Filter2dKnobs | Filter2dGradKnobs) -> Traits:
        if problem.dtypes[0] == "u8":
            return Traits(accumulator="u32", error_bound=0.0)
        if isinstance(knobs, Filter2dKnobs):
            # Tiles do not show in the bits. Filters of more than one block of taps add up in another order where they
            # are staged: then what the default does, which no batch changes, is what can be relied on.
            one = max(problem.filter) <= 5
            same = one or knobs.staged != _prefers_direct(problem)
            same = same and knobs.separable == _prefers_separable(problem)
            # Of a separable filter R sums, S sums and factors that are off by 8 units: fewer than R*S from 81 taps on,
            # and element by element. Factors of whole numbers are exact, so that their sums stay so.
            return Traits("f32", error_bound=(prod(problem.filter) + 2) * 2.0**-24, batch_invariant=same)
        # A thread adds its pixels of a block's tiles one after the other; then 5 steps over lanes, and the strips.
        pixels = knobs.tiles * knobs.tile_rows * 4 * knobs.across // (32 * knobs.strips)
        return Traits("f32", error_bound=(pixels + 5 + knobs.strips + 2) * 2.0**-24)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Filter2dKnobs | Filter2dGradKnobs) -> int:
        if isinstance(knobs, Filter2dKnobs):
            return problem.c * _FACTOR_BYTES if knobs.separable else 0
        return 4 * prod(problem.w_shape) * _parts(problem, knobs)

    def knobs(self, problem: Problem, device: Device) -> Iterable[Filter2dKnobs | Filter2dGradKnobs]:
        search = _grad_knobs(problem) if problem.direction == "wgrad" else _image_knobs(problem, device)
        return tuple(dict.fromkeys(search))

    def cost(self, problem: Problem, device: Device, knobs: Filter2dKnobs | Filter2dGradKnobs) -> float:
        # Instructions of a thread in slots of a multiply-add; a vector of shared memory or of the first-level cache
        # keeps a multiprocessor as long as 16 multiply-adds of a warp. Integers run at half rate. How many slots are
        # filled is fitted to an H200 and 4000x4000 in f32: 15x15 takes 160 us, 169 in blocks of 256 threads and 192
        # with 16 rows a thread; 7x7 takes 51.
        # Whether a filter is separable shows in its values only: looking for factors costs a launch, and finding them
        # is not counted on.
        slots = device.flops / 2 * (0.5 if problem.dtypes[0] == "u8" else 1.0)
        if isinstance(knobs, Filter2dKnobs):
            down, along = _tiles(problem, knobs)
            planes = problem.n if _step(problem) > 1 and not knobs.staged else problem.n * problem.c
            threads = planes * down * along * knobs.threads
            busy = min(1.0, threads / (device.threads * 512))
            share = 0.6 if knobs.staged else 0.85
            filled = 0.85 if knobs.rows > 8 else 0.95 if knobs.threads > 128 else 1.0
            slots *= filled if knobs.staged else 0.78
            return (4e-6 if knobs.separable else 2e-6) + max(
                problem.min_bytes / (device.bandwidth * share * busy**0.5),
                threads * _slots(problem, knobs) / (slots * busy),
            )
        down, along = _grad_tiles(problem, knobs)
        tiles = problem.n * problem.c * down * along
        row_blocks = -(-problem.filter[0] // 7)
        warps = knobs.strips * _column_blocks(problem.filter[1])
        busy = min(1.0, problem.c * _parts(problem, knobs) * row_blocks * warps / (device.threads * 16))
        # Loads wait for barriers, so that times add up. Fitted as above: 3x3 takes 63 us, 7x7 93, 15x15 225; 3x3 of
        # 1024x2048 takes 16.5.
        slots *= 1.05 if warps <= 4 else 0.95
        moved = problem.min_bytes / (device.bandwidth * 0.75 * busy**0.5)
        return 8e-6 + moved + tiles * row_blocks * _grad_slots(problem, knobs) / (slots * busy)

    def build(self, problem: Problem, device: Device, knobs: Filter2dKnobs | Filter2dGradKnobs) -> Runner:
        assert isinstance(device, CudaDevice)
        sources = self.sources(problem, device, knobs)
        if isinstance(knobs, Filter2dGradKnobs):
            return _build_wgrad(problem, device, knobs, sources)
        down, along = _tiles(problem, knobs)
        planes = problem.n if _step(problem) > 1 and not knobs.staged else problem.n * problem.c
        (image, result), pads = _planes(problem), _pads(problem)
        sizes = (*image, *result, *pads, *divisor(down), *divisor(along))
        params = pack(4 + max(1, len(problem.epilogue.operands)), narrow=sizes)
        grid = (down * along * planes,)
        launch = Launch(sources[0], "filter2d", device, grid, (knobs.threads,), params, follows=knobs.separable)
        vector = 1 if knobs.staged else 4 * DTYPE_BYTES[problem.dtypes[0]]
        factor = None
        if knobs.separable:
            factor = Launch(sources[1], "filter2d_factors", device, (problem.c,), (_FACTOR_THREADS,), pack(2))

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
            if a.data_ptr() % vector:
                a = a.clone()
            factors = 0 if workspace is None else workspace.data_ptr()
            if factor is not None:
                factor(b.data_ptr(), factors)
            others = [operand.data_ptr() for operand in operands] if operands else ()
            launch(a.data_ptr(), b.data_ptr(), out.data_ptr(), factors, *others)

        return run

    def sources(self, problem: Problem, device: Device, knobs: Filter2dKnobs | Filter2dGradKnobs) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        constants: dict[str, int | bool | str] = {
            "filter_rows": problem.filter[0],
            "filter_columns": problem.filter[1],
            "channels": problem.c,
            "channels_last": _step(problem) > 1,
            "across": knobs.across,
        }
        if isinstance(knobs, Filter2dGradKnobs):
            constants |= {"strips": knobs.strips, "tile_rows": knobs.tile_rows}
            return [
                jit.Source("filter2d_wgrad.cu", render.traits(problem, constants)),
                jit.Source("filter2d_sum.cu", render.traits(problem, {"threads": _SUM_THREADS})),
            ]
        constants |= {
            "flipped": problem.direction == "dgrad",
            "staged": knobs.staged,
            "shift": 0 if knobs.staged else -_pads(problem)[1] * _step(problem) % 4,
            "thread_rows": knobs.rows,
            "threads": knobs.threads,
            "separable": knobs.separable,
            "tensor_operands": sum(1 << at for at, o in enumerate(problem.epilogue.operands) if o.kind == "tensor"),
        }
        sources = [jit.Source("filter2d.cu", render.traits(problem, constants))]
        if knobs.separable:
            shape = {name: constants[name] for name in ("filter_rows", "filter_columns", "flipped")}
            bare = render.traits(problem.with_(epilogue=IDENTITY), shape | {"threads": _FACTOR_THREADS})
            sources.append(jit.Source("filter2d_factors.cu", bare))
        return sources


def _is_integral(problem: Problem) -> bool:
    """Whether an epilogue keeps integers integers, without a function of real numbers."""
    nodes = list(problem.epilogue.expr.walk())
    return all(node.op in _INTEGER_OPS for node in nodes if isinstance(node, Node)) and all(
        node.value.is_integer() for node in nodes if isinstance(node, Const)
    )


def _step(problem: Problem) -> int:
    """Elements from a pixel to its right neighbour."""
    return problem.c if problem.layouts[0] == "nhwc" else 1


def _planes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the image that is read and of the result; of a wgrad, of x and dy."""
    return (problem.out, problem.spatial) if problem.direction == "dgrad" else (problem.spatial, problem.out)


def _pads(problem: Problem) -> tuple[int, ...]:
    """What lies above and left of the image that is read; negative where its first rows or columns are not needed."""
    low = tuple(pad for pad, _ in problem.padding)
    if problem.direction == "dgrad":
        return tuple(taps - 1 - pad for taps, pad in zip(problem.filter, low, strict=True))
    return low


# -- fprop and dgrad ------------------------------------------------------------------------------------------------


def _tiles(problem: Problem, knobs: Filter2dKnobs) -> tuple[int, int]:
    """Tiles down and across the result: of pixels, or of the elements of interleaved channels."""
    rows, columns = _planes(problem)[1]
    if not knobs.staged:
        columns *= _step(problem)
    return -(-rows // (knobs.rows * knobs.threads // knobs.across)), -(-columns // (4 * knobs.across))


def _fits(problem: Problem, knobs: Filter2dKnobs) -> bool:
    """Whether a problem can run with these knobs."""
    taps = prod(problem.filter)
    if not knobs.staged:
        whole = _planes(problem)[0][1] * _step(problem) % 4 == 0
        return whole and taps * _step(problem) <= _DIRECT_WEIGHTS and 4 * taps * knobs.rows <= _DIRECT_MACS
    rows, columns = problem.filter
    pitch = -(-(4 * knobs.across + columns - 1) // 4) * 4
    tile = (knobs.rows * knobs.threads // knobs.across + rows - 1) * pitch
    return tile + rows * (-(-columns // 4) * 4) <= _SHARED_WORDS


def _slots(problem: Problem, knobs: Filter2dKnobs) -> float:
    """What a thread takes, counted as multiply-adds."""
    (rows, columns), height = problem.filter, knobs.rows
    macs = 4 * height * rows * columns
    if not knobs.staged:
        vectors = (height + rows - 1) * (2 + ((columns - 1) * _step(problem) + 2) // 4)
        return max(macs + 16 * (height + rows - 1) + 8 * height + 60, 16 * vectors)
    row_blocks = -(-rows // 5)
    tall = rows / row_blocks
    loads = row_blocks * _column_blocks(columns) * (2 * (height + tall - 1) + tall)
    strips = knobs.threads // knobs.across
    values = (height * strips + rows - 1) * (4 * knobs.across + columns - 1) / knobs.threads
    return max(macs + loads + 7 * values + 10 * height + 60, 16 * loads)


def _prefers_direct(problem: Problem) -> bool:
    """Whether the default is to load the image directly. The batch has no say: the order of large sums is another."""
    columns = _planes(problem)[1][1] * _step(problem)  # results of other rows would be stored one by one
    return columns % 4 == 0 and _fits(problem, Filter2dKnobs(False, 4, 32, 128))


def _may_separate(problem: Problem) -> bool:
    """Whether two passes have much fewer products, and no larger error, than one: 1.25 * R + S for R * S."""
    return prod(problem.filter) >= _SEPARABLE_TAPS and min(problem.filter) > 2


def _prefers_separable(problem: Problem) -> bool:
    """Whether the default is to look for factors. The batch has no say here either."""
    return _may_separate(problem) and prod(problem.filter) * prod(_planes(problem)[1]) * problem.c >= _SEPARABLE_MACS


def _image_knobs(problem: Problem, device: Device) -> Iterator[Filter2dKnobs]:
    (rows, columns), step = _planes(problem)[1], _step(problem)
    across, wide = (_across(columns * scale) for scale in (1, step))
    planes = problem.n * problem.c

    def enough(count: int) -> bool:
        """Whether there are 24 warps for each multiprocessor with so many rows a thread."""
        return planes * -(-columns // (4 * across)) * across * -(-rows // count) >= 24 * 32 * device.threads

    def sized(staged: bool, height: int, across: int, threads: int) -> Filter2dKnobs:
        """A tile that is not much taller than the image: less than twice, for few kernels serve all heights."""
        wanted = across * -(-rows // height)
        return Filter2dKnobs(staged, height, across, min(threads, max(32, 1 << (wanted - 1).bit_length())))

    height = 8 if enough(8) else 4
    # One row of threads is the quickest (7x7 of 4000x4000: 51.0 us for 52.6), unless more columns hang over the edge.
    row = 128 if height == 8 and -(-columns * step // 512) * 512 == -(-columns * step // 128) * 128 else wide
    direct = [
        sized(False, height, row, 128),
        sized(False, height, wide, 128),
        sized(False, 12 - height, wide, 128),
        sized(False, height, wide, 256),
        sized(False, 12 - height, wide, 256),
        Filter2dKnobs(False, 8, 128, 128),
        Filter2dKnobs(False, 4, 256, 256),
        sized(False, 2, wide, 256),
        Filter2dKnobs(False, 8, 128, 512),
        sized(False, 16, wide, 128),
    ]
    staged = [
        sized(True, height, across, 128),
        sized(True, 8, across, 256),
        sized(True, 16, across, 128),
        sized(True, 16, across, 64),
        sized(True, 8, across, 128),
        sized(True, 16, 16, 64),
        sized(True, 4, across, 256),
        sized(True, 8, across, 32),
        sized(True, 4, 8, 32),
    ]
    if _prefers_separable(problem):
        # All of them: a tuner's filters are random, and would say each time that looking for factors is 2 us lost.
        staged = [replace(knobs, separable=True) for knobs in staged]
    elif _may_separate(problem):
        staged.insert(1, replace(staged[0], separable=True))
    found = direct + staged if _prefers_direct(problem) else staged + direct
    yield from [knobs for knobs in dict.fromkeys(found) if _fits(problem, knobs)][:12]


def _across(columns: int) -> int:
    """Threads of 4 columns along a row of a tile."""
    return next((count for count in (8, 16) if columns <= 4 * count), 32)


# -- wgrad ----------------------------------------------------------------------------------------------------------


def _grad_tiles(problem: Problem, knobs: Filter2dGradKnobs) -> tuple[int, int]:
    return -(-problem.out[0] // knobs.tile_rows), -(-problem.out[1] // (4 * knobs.across))


def _parts(problem: Problem, knobs: Filter2dGradKnobs) -> int:
    """Partial sums of a tap."""
    return -(-problem.n * prod(_grad_tiles(problem, knobs)) // knobs.tiles)


def _column_blocks(columns: int) -> int:
    """How many blocks of taps a row of the filter is cut into: ColumnBlocks of common/filter2d.cuh."""
    return 1 if columns < 6 else (columns - 2) // 4 + 1


def _grad_slots(problem: Problem, knobs: Filter2dGradKnobs) -> float:
    """What a tile takes for a block of filter rows, counted as multiply-adds."""
    rows, columns = problem.filter
    tall = rows / -(-rows // 7)
    pixels = 4 * knobs.across * knobs.tile_rows
    blocks = _column_blocks(columns)
    vectors = pixels / 32 * blocks * (2 * (_STRIP_ROWS + tall - 1) + _STRIP_ROWS)
    values = pixels + (knobs.tile_rows + tall - 1) * (4 * knobs.across + columns - 1)
    lanes = 32 * knobs.strips * blocks
    ends = lanes * tall * min(columns, 4) * 11 / knobs.tiles
    return max(pixels * tall * columns + vectors + 7 * values + ends, 16 * vectors)


def _grad_knobs(problem: Problem) -> Iterator[Filter2dGradKnobs]:
    across = _across(problem.out[1])
    blocks = _column_blocks(problem.filter[1])
    # Blocks of 4 warps are the quickest: 7x7 of 4000x4000 takes 93 us, and 99 with 8; 15x15 takes 225 and 264.
    most = max(1, 4 // blocks)
    row_blocks = -(-problem.filter[0] // 7)
    for tile_rows in (16, 32) if blocks == 2 else (32, 16):
        strips = 1
        while 2 * strips <= most and 2 * strips * (32 // across) * _STRIP_ROWS <= tile_rows:
            strips *= 2
        tiles = problem.n * prod(_grad_tiles(problem, Filter2dGradKnobs(across, strips, tile_rows, 1)))
        # Some 2000 blocks: enough for every multiprocessor to have its share, and few enough sums to add up. Those of
        # filters of several blocks of rows take longer, and twice as many end more evenly.
        each = min(8, -(-tiles * row_blocks * problem.c // (2000 if row_blocks == 1 else 4000)))
        if strips * (32 // across) * _STRIP_ROWS > tile_rows:
            continue
        for count in (each, max(1, each // 2), min(tiles, each * 2)):
            yield Filter2dGradKnobs(across, strips, tile_rows, count)
            if strips > 1:
                yield Filter2dGradKnobs(across, strips // 2, tile_rows, count)


def _build_wgrad(problem: Problem, device: CudaDevice, knobs: Filter2dGradKnobs, sources: list[jit.Source]) -> Runner:
    down, along = _grad_tiles(problem, knobs)
    parts = _parts(problem, knobs)
    (image, result), pads = _planes(problem), _pads(problem)
    tiles = problem.n * down * along
    sizes = (*image, *result, *pads, *divisor(down), *divisor(along), tiles, knobs.tiles, parts)
    params = pack(3, narrow=sizes)
    threads = 32 * knobs.strips * _column_blocks(problem.filter[1])
    grid = parts * -(-problem.filter[0] // 7) * problem.c
    first = Launch(sources[0], "filter2d_wgrad", device, (grid,), (threads,), params)
    taps = (prod(problem.w_shape),)
    second = Launch(sources[1], "filter2d_sum", device, taps, (_SUM_THREADS,), pack(2, narrow=(parts,)), follows=True)

    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
        assert workspace is not None
        first(a.data_ptr(), b.data_ptr(), workspace.data_ptr())
        second(workspace.data_ptr(), out.data_ptr())

    return run
