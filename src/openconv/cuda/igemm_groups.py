"""cuda.igemm_groups: implicit GEMM of many small groups on tensor cores, all three passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import Problem
from . import jit, render
from .channels_last import Turn, is_last, turned_inputs, turned_operands, turned_result
from .device import CudaDevice
from .divide import divisor
from .igemm import Axis, axes
from .launch import Launch, aligned, pack, single

__all__ = ["IgemmGroups", "Tile"]

_SHARED = 226 << 10  # bytes of a multiprocessor
_REGISTERS = 1 << 16
_ALTERNATIVES = 12
_MOST_FILTER = 112  # registers of a thread for the taps of a column, and for the sums of their gradient
_MOST_SUMS = 160
_MOST_WORKSPACE = 256 << 20


@dataclass(frozen=True)
class Tile(Knobs):
    """A block has ``groups`` groups and goes through tiles of ``images`` x ``high`` x ``wide`` pixels, of which
    ``stages`` - 1 are on their way. ``warps`` share the strips of sixteen channels, each sixteen pixels wide and
    ``rows`` high."""

    groups: int
    images: int
    high: int
    wide: int
    rows: int
    warps: int
    stages: int


class IgemmGroups(Engine):
    """Convolution of many small groups on the tensor cores of sm_80 and later, several groups to a product.

        fprop   y[pixel, k]    = sum over tap, c of  x[window of the pixel, tap, c] * w[k, tap, c]    c of k's group
        dgrad   dx[pixel, c]   = sum over tap, k of  dy[pixel that tap comes from, k] * w[k, tap, c]
        wgrad   dw[k, tap, c]  = sum over pixels of  dy[pixel, k] * x[window of the pixel, tap, c]

    Sixteen channels are multiplied with sixteen, whether they are of one group or of several; of pairs from different
    groups the filter is zero, or the sum is left out. What is not finite stays in its group. A piece of the image is
    read once for all taps, and all taps stay in registers: few channels to a sum mean that bytes, not products, are the
    limit.

    Images with their channels first are copied before, and such results behind. Wins for groups of 2 to 32 channels, as
    in ResNeXt. Larger groups are cuda.igemm's, and groups of one channel the depthwise engines'.
    """

    name = "cuda.igemm_groups"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        reasons = list(_refusals(problem, device))
        yield from reasons
        if not reasons and not _knobs(problem, device):
            yield "the piece of the image under a tile is larger than shared memory"

    def traits(self, problem: Problem, knobs: Tile) -> Traits:
        # Additions within an mma cut bits off rather than round: two units in the last place for 32 bytes of depth.
        chain = 2 * prod(problem.filter) * _slices(problem)
        if problem.direction == "wgrad":
            pixels = problem.n * prod(problem.out)
            chain = pixels // 8 + min(pixels, 1024)
        return Traits("f32", (chain + 16) * 2.0**-23)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Tile) -> int:
        assert isinstance(device, CudaDevice)
        return _work(problem, knobs, device).workspace

    def copies(self, problem: Problem, knobs: Tile) -> tuple[str, ...]:
        turned = _turned(problem)
        before = [f"copy {turn.name} from nchw to nhwc" for turn in (*turned[:2], *turned[3:]) if turn]
        return (*before, *(f"copy {turn.name} from nhwc to nchw" for turn in turned[2:3] if turn))

    def knobs(self, problem: Problem, device: Device) -> tuple[Tile, ...]:
        return _knobs(problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Tile) -> float:
        assert isinstance(device, CudaDevice)
        return _work(problem, knobs, device).seconds

    def build(self, problem: Problem, device: Device, knobs: Tile) -> Runner:
        assert isinstance(device, CudaDevice)
        work = _work(problem, knobs, device)
        main, *others = self.sources(problem, device, knobs)
        wgrad = problem.direction == "wgrad"
        name = "igemm_groups_wgrad" if wgrad else "igemm_groups"
        follows = bool(work.constants["follows"])
        first = Launch(main, name, device, work.grid, (work.threads,), work.params, work.shared, follows)
        if not work.workspace:
            return single(first, 16)
        turns = [each.launch(device) if each else None for each in work.turned]
        second = None
        if wgrad:
            params = pack(2, (), (work.splits, 32 * work.fours))
            second = Launch(others[0], "igemm_groups_sum", device, (work.fours,), (256,), params, follows=True)

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
            assert workspace is not None
            a, b, result, *held = [aligned(each, 16) for each in (a, b, out, *operands)]
            base = workspace.data_ptr()
            places = [a.data_ptr(), b.data_ptr(), result.data_ptr(), *[each.data_ptr() for each in held]]
            for at, turn in enumerate(turns):
                if turn is not None and at != 2:
                    turn(places[at], base + work.copies[at])
                    places[at] = base + work.copies[at]
            if second is not None:
                first(*places[:2], base)
                second(base, places[2])
            else:
                last = turns[2]
                to = places[2] if last is None else base + work.copies[2]
                first(*places[:2], to, *places[3:])
                if last is not None:
                    last(to, places[2])
            if result is not out:
                out.copy_(result)

        return run

    def sources(self, problem: Problem, device: Device, knobs: Tile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        assert isinstance(device, CudaDevice)
        work = _work(problem, knobs, device)
        traits = render.traits(problem, work.constants) + work.taps
        copied = [turn.source for turn in work.turned if turn]
        if problem.direction != "wgrad":
            return [jit.Source("igemm_groups.cu", traits), *copied]
        names = ("in_each", "out_each", "in_chunk", "out_chunk", "slices")
        constants = {name: work.constants[name] for name in names}
        constants |= {"columns": work.columns, "taps": work.all_taps, "last": is_last(problem, 1)}
        made = [
            jit.Source("igemm_groups_wgrad.cu", traits),
            jit.Source("igemm_groups_sum.cu", render.traits(problem, constants)),
        ]
        return made + copied


def _refusals(problem: Problem, device: Device) -> Iterator[str]:
    if not isinstance(device, CudaDevice) or device.capability < 80:
        yield f"the device is {getattr(device, 'arch', device.name)}; its products are those of sm_80 and later"
    if problem.dtypes[0] not in ("f16", "bf16") or len(set(problem.dtypes)) > 1:
        yield f"dtypes are {'*'.join(problem.dtypes)}; wanted f16 or bf16 alone"
    if problem.rank > 2:
        yield f"there are {problem.rank} axes; wanted 1 or 2"
    each_in, each_out = _each(problem)
    if problem.groups == 1 or problem.is_depthwise:
        yield f"groups is {problem.groups} of {problem.c // problem.groups} channels; wanted several, of 2 or more"
    if (16 % each_out and each_out % 16) or max(1, 16 // each_out) * each_in % 16:
        yield f"a group has {each_in} channels and {each_out} results; wanted sixteen to be whole groups of both"
    elif _slices(problem) * prod(problem.filter) > _most_slices(problem):
        yield f"a group has {each_in} channels and the filter {problem.filter} taps; registers hold fewer"
    elif problem.groups % _fewest(problem):
        yield f"groups is {problem.groups}; wanted a multiple of {_fewest(problem)}"
    if problem.direction == "dgrad" and max(problem.stride) > 4:
        yield f"stride is {problem.stride}; wanted at most 4 in dgrad"
    if problem.is_empty:
        yield "a tensor is empty"
    elif any(not any(count for _, count, _ in axis.taps) for axis in _two_axes(problem)):
        yield "no window has a pixel of the image, whose gradient is zeros"
    elif max(problem.n * prod(problem.out), problem.n * prod(problem.spatial)) >= 2**31:
        yield "the pixels are too many for an int"


def _each(problem: Problem) -> tuple[int, int]:
    """Channels of a group: of the image that is read, and of the result or the gradient beside it."""
    c, k = problem.c // problem.groups, problem.k // problem.groups
    return (k, c) if problem.direction == "dgrad" else (c, k)


def _slices(problem: Problem) -> int:
    """Times sixteen channels of the image that sixteen of the result sum over."""
    each_in, each_out = _each(problem)
    return ceil(max(1, 16 // each_out) * each_in / 16)


def _most_slices(problem: Problem) -> int:
    """Taps times slices that a thread has registers for."""
    return _MOST_SUMS // 8 if problem.direction == "wgrad" else _MOST_FILTER // 4


def _fewest(problem: Problem) -> int:
    """Groups whose channels are multiples of sixteen on both sides."""
    each_in, each_out = _each(problem)
    return max(16 // gcd(16, each_in), 16 // gcd(16, each_out))


def _turned(problem: Problem) -> list[Turn | None]:
    """Both inputs, the result and operands of its shape, as far as they have to be copied; filters are read and written
    in either layout."""
    inputs = [None if at == 1 else turn for at, turn in zip(problem.inputs, turned_inputs(problem), strict=True)]
    result = None if problem.direction == "wgrad" else turned_result(problem)
    return [*inputs, result, *turned_operands(problem)]


def _two_axes(problem: Problem) -> list[Axis]:
    """Of the pixels that windows begin at; one axis has another of one pixel in front."""
    found = axes(problem.with_(direction="fprop") if problem.direction == "wgrad" else problem)
    return [Axis((1, 1, 1, 1, 1, 1, 1), 1, ((0, 1, 0),))] * (2 - len(found)) + found


class _Work:
    """A problem and knobs as the kernels take them."""

    def __init__(self, problem: Problem, knobs: Tile, device: CudaDevice) -> None:
        self.problem, self.knobs, self.device = problem, knobs, device
        wgrad, dgrad = problem.direction == "wgrad", problem.direction == "dgrad"
        each_in, each_out = _each(problem)
        in_chunk, out_chunk = knobs.groups * each_in, knobs.groups * each_out
        self.columns = out_chunk // 16
        self.threads = 32 * self.columns * knobs.warps
        self.chunks = problem.groups // knobs.groups
        self.all_taps, self.slices = prod(problem.filter), _slices(problem)
        rows, columns = _two_axes(problem)

        # The piece of the image under a tile, and where its taps are.
        lists: dict[str, list[int]] = {}
        reach = []
        for name, axis, size in (("row", rows, knobs.high), ("column", columns, knobs.wide)):
            step, offset_step, every = axis.numbers[2], axis.numbers[4], axis.numbers[6]
            each = [
                (phase, first + j * every, offset + j * offset_step)
                for phase, (first, count, offset) in enumerate(axis.taps)
                for j in range(count)
            ]
            places = [place for _, _, place in each]
            low, far = min(places), max(places)
            reach.append((low, (size - 1) * step + far - low + 1, step))
            lists |= {f"{name}_phase": [phase for phase, _, _ in each], f"{name}_filter": [tap for _, tap, _ in each]}
            lists[f"{name}_place"] = [place - low for place in places]
        (self.from_h, self.halo_h, step_h), (self.from_w, self.halo_w, step_w) = reach
        self.distances = sorted(set(lists["column_place"]))
        lists["column_far"] = self.distances
        lists["column_place"] = [self.distances.index(place) for place in lists["column_place"]]
        self.taps = "".join(
            f"constexpr int {name}[] = {{{', '.join(map(str, values))}}};\n" for name, values in lists.items()
        )

        self.reach = max(lists["row_place"]) + 1
        self.halo_slots = self.halo_h * ceil(self.halo_w / step_w) * step_w
        self.across = ceil(knobs.images * knobs.wide / 16)
        mixed = not wgrad and each_out < 16
        self.bits = 2 * knobs.rows * len(rows.taps) * len(columns.taps) if mixed else 0  # of a lane and strip
        self.strips = self.across * (knobs.high // knobs.rows)
        pitch = 2 * in_chunk + 16
        self.stage_bytes = knobs.images * self.halo_slots * pitch + (
            knobs.high * self.across * 16 * (2 * out_chunk + 16) if wgrad else 0
        )
        beside = self.halo_slots * pitch if wgrad else knobs.groups * each_in * each_out * self.all_taps * 2
        self.shared = knobs.stages * self.stage_bytes + beside
        if wgrad and knobs.warps > 1:  # their sums
            self.shared = max(self.shared, 16 * self.threads * self.all_taps * 2 * self.slices)
        live = 8 * len(rows.taps) * len(columns.taps) * ceil(self.reach / step_h)  # sums of rows that are not complete
        operands = 4 * len(self.distances) * self.slices * 2
        registers = 40 + operands + self.all_taps * self.slices * (8 if wgrad else 4) + (12 if wgrad else live)
        self.residents = max(1, min(_REGISTERS // (self.threads * registers), _SHARED // (self.shared + 1024), 8))
        # Unrolled, all is known ahead of its use: more registers than these would be filled too soon.
        self.bound = max(1, min(_REGISTERS // (self.threads * min(255, registers + 24)), 32))

        counts = rows.count, columns.count
        tiles = ceil(problem.n / knobs.images), ceil(counts[0] / knobs.high), ceil(counts[1] / knobs.wide)
        self.tiles = prod(tiles)
        blocks = min(self.tiles, max(1, self.residents * device.threads // self.chunks))
        self.turns = ceil(self.tiles / blocks)
        blocks = ceil(self.tiles / self.turns)  # as even as it goes
        self.grid = (blocks, self.chunks, 1)
        self.splits = blocks
        self.fours = self.chunks * self.columns * self.all_taps * 2 * self.slices  # sums of wgrad, in fours of 32 lanes
        self.workspace = 512 * self.splits * self.fours if wgrad else 0
        self.turned = _turned(problem)
        self.copies = [0] * len(self.turned)
        for at, turn in enumerate(self.turned):
            if turn:
                self.copies[at] = ceil(self.workspace / 256) * 256
                self.workspace = self.copies[at] + turn.size_bytes
        image, result = ((problem.k, problem.out), (problem.c, problem.spatial)) if dgrad else (
            (problem.c, problem.spatial), (problem.k, problem.out))  # fmt: skip
        sizes = [(1, *each)[-2:] for each in (image[1], result[1])]
        numbers = [problem.n, *sizes[0], image[0], self.from_h, self.from_w, *counts, self.tiles]
        numbers += [*divisor(tiles[2]), *divisor(tiles[1])]
        if wgrad:
            self.params = pack(3, (), (*numbers, problem.k))
        else:
            pointers = 3 + max(1, len(problem.epilogue.operands))
            self.params = pack(pointers, (), (*numbers, *sizes[1], result[0]))
        self.constants: dict[str, int | bool | str] = {
            "in_chunk": in_chunk, "out_chunk": out_chunk, "in_each": each_in, "out_each": each_out,
            "slices": self.slices, "images": knobs.images, "high": knobs.high, "wide": knobs.wide, "rows": knobs.rows,
            "step_h": step_h,
            "step_w": step_w, "halo_h": self.halo_h, "halo_w": self.halo_w, "warps": knobs.warps,
            "row_taps": len(lists["row_place"]), "column_taps": len(lists["column_place"]),
            "distances": len(self.distances), "filter_h": rows.numbers[5], "filter_w": columns.numbers[5],
            "stages": knobs.stages, "bound": self.bound, "follows": any((*self.turned[:2], *self.turned[3:])),
        }  # fmt: skip
        if wgrad:
            self.constants["uneven"] = counts[0] % knobs.high != 0
        else:
            self.constants |= {
                "turned": dgrad, "filter_last": is_last(problem, 1), "each": problem.c // problem.groups,
                "phases_h": len(rows.taps), "phases_w": len(columns.taps),
            }  # fmt: skip

    @property
    def seconds(self) -> float:
        """Predicted time: fitted to 1080 times of eight layers' passes on an H200, of which half are within 6%."""
        problem, knobs, device = self.problem, self.knobs, self.device
        phases = int(self.constants.get("phases_h", 1)) * int(self.constants.get("phases_w", 1))
        under = (knobs.rows - 1) * int(self.constants["step_h"]) + self.reach
        # Cycles of a strip: what it reads from shared memory at 128 bytes a cycle, its products, its stores.
        reads = 4 * under * len(self.distances) * self.slices
        products = 3 * knobs.rows * self.all_taps * self.slices
        strip = max(1.14 * reads, 0.65 * products) + 18 * knobs.rows * phases
        tile = (self.columns * self.strips * strip + self.stage_bytes / 133) / 1.7e9
        # A warp alone waits for what it reads and multiplies; beside others it does so while they work.
        waits = 1.33 * (reads + products + 54 * knobs.rows * phases) / 1.7e9
        alone = ceil(self.strips / knobs.warps) * waits + 0.6e-6 / (knobs.stages - 1)
        busy = self.turns * max(self.residents * tile, alone)
        if min(int(self.constants["in_chunk"]), int(self.constants["out_chunk"])) < 64:  # less than lines of memory
            busy *= 1.25
        moved = 0.8 * self.tiles * self.chunks * self.stage_bytes / device.bandwidth
        floors = sorted((busy, moved, 0.55 * problem.min_bytes / device.bandwidth))
        apart = 1.5e-6 + 650.0 * self.splits * self.fours / device.bandwidth
        begin = 7.4e-6 + 0.5e-6 * (self.shared - knobs.stages * self.stage_bytes) / 65536
        turned = sum(turn.seconds(device) for turn in self.turned if turn)
        spent = floors[2] + 0.48 * floors[1] + 0.17 * floors[0]
        return begin + spent + (apart if problem.direction == "wgrad" else 0.0) + turned


_work = lru_cache(maxsize=4096)(_Work)


@lru_cache(maxsize=512)
def _knobs(problem: Problem, device: Device) -> tuple[Tile, ...]:
    assert isinstance(device, CudaDevice)
    seconds = {tile: _work(problem, tile, device).seconds for tile in _tiles(problem, device)}
    return tuple(sorted(seconds, key=seconds.__getitem__)[:_ALTERNATIVES])


def _tiles(problem: Problem, device: CudaDevice) -> Iterator[Tile]:
    rows, columns = (axis.count for axis in _two_axes(problem))
    each_in, each_out = _each(problem)
    fewest = _fewest(problem)
    for groups in (fewest, 2 * fewest, 4 * fewest, 8 * fewest):
        if problem.groups % groups or max(each_in, each_out) * groups > 128:
            continue
        for images, high, wide in sorted(_shapes(problem, rows, columns)):
            for rows_each, warps in sorted(_shares(images, high, wide)):
                threads = 2 * groups * each_out * warps
                if not 32 <= threads <= 512:
                    continue
                if threads % (groups * each_in // 8) or threads % (groups * each_out // 8):
                    continue
                for stages in (2, 3):
                    tile = Tile(groups, images, high, wide, rows_each, warps, stages)
                    work = _work(problem, tile, device)
                    fits = work.shared <= min(_SHARED, device.shared_bytes) and work.bits <= 32
                    if fits and 512 * work.splits * work.fours <= _MOST_WORKSPACE:
                        yield tile


def _shapes(problem: Problem, rows: int, columns: int) -> set[tuple[int, int, int]]:
    """Tiles: images, rows and columns, which the image has about a whole number of times."""
    highs = {ceil(rows / ceil(rows / most)) for most in (2, 4, 8, 14)}
    wides = {ceil(columns / parts) for parts in range(1, ceil(columns / 14) + 1)}
    shapes = {(1, high, wide) for high in highs for wide in wides if wide <= 64}
    if columns <= 32:
        shapes |= {(images, high, columns) for high in highs for images in (2, 4, 8) if images <= problem.n}
    return shapes


def _shares(images: int, high: int, wide: int) -> set[tuple[int, int]]:
    """Rows of a strip, and warps that share the strips of a tile."""
    across, found = ceil(images * wide / 16), set()
    for parts in (1, 2):
        if high % parts == 0:
            found |= {(high // parts, warps) for warps in (1, 2, 4) if warps <= across * parts}
    return found
