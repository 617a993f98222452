"""cuda.depthwise_mma: depthwise convolution of channels-last images on tensor cores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from types import ModuleType
from typing import Any

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import Problem
from . import jit, render
from .device import CudaDevice
from .launch import Launch, pack, single

__all__ = ["DepthwiseMma", "Rows"]

_LARGEST = 31
_REGISTERS = 65536  # of a multiprocessor
_ALTERNATIVES = 10
_CLOCK = 1.6e9  # of shared memory and instructions: close to this on every GPU of interest
_LATENCY = 1.5e-6  # of a tile: its pixels, two barriers, its last stores
_STEP = 40e-9  # of a warp that waits for its fragments and then for its first product


@dataclass(frozen=True)
class Rows(Knobs):
    """A block takes ``8 * octets`` channels of ``rows`` result rows by ``8 * tiles`` columns of ``images`` images, in
    ``warps`` warps that take a channel each; ``rounds`` such tiles one after the other, with the same filters.
    ``residents`` blocks fit a multiprocessor."""

    rows: int
    images: int
    tiles: int
    octets: int = 2
    warps: int = 8
    rounds: int = 1
    residents: int = 2


class DepthwiseMma(Engine):
    """Depthwise convolution on tensor cores: a filter's row as a matrix of eight shifted copies.

        fprop   y[p, q]   = sum over r, j of  x[p*stride - pad + r, j] * T_r[j, q], T_r[j, q] = w[r, j - q*stride + pad]
        dgrad   the same with dy and the flipped filter, of stride 1
        wgrad   G_r[j, q] = sum over n, p of  x[n, p*stride - pad + r, j] * dy[n, p, q], dw[r, s] = sum of a diagonal

    A depthwise layer has R*S products for each value, which CUDA cores multiply one by one, after a conversion to f32.
    A tensor core takes 8 results of 16 rows at a time, and for each filter row the 8 + S - 1 columns that they need: a
    share of S / (8 + S - 1) of its products counts. That wastes half of them and is still several times faster. What it
    takes are rows of pixels of one channel: a block turns channels-last pixels into planes on their way to shared
    memory, and its results back.

    f16 and bf16, filters up to 31x31, sm_80 and later. It wins where products outweigh bytes: 5x5 is a draw, 7x7 takes
    three quarters of the time of CUDA cores, 29x29 a ninth.
    """

    name = "cuda.depthwise_mma"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from _unmet(problem, device)
        if problem.rank != 2:
            return
        if problem.direction == "wgrad":
            yield from _wgrad().refusals(problem, device)
            return
        if problem.direction == "dgrad" and set(problem.stride) != {1}:
            yield f"stride is {problem.stride}; wanted 1 in dgrad"
        if problem.stride[0] > 4 or problem.stride[1] > 2:
            yield f"stride is {problem.stride}; wanted at most (4, 2)"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        if problem.direction == "wgrad":
            found: Traits = _wgrad().traits(problem, knobs)
            return found
        # An mma cuts bits off its sum of 16 products rather than rounding: up to two units in the last place each.
        chain = problem.filter[0] * (ceil((problem.filter[1] + 14) / 16) + problem.stride[1] - 1)
        return Traits("f32", (2 * chain + 16) * 2.0**-23)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        return int(_wgrad().workspace_bytes(problem, device, knobs)) if problem.direction == "wgrad" else 0

    def knobs(self, problem: Problem, device: Device) -> Iterable[Any]:
        if problem.direction == "wgrad":
            found: Iterable[Any] = _wgrad().knobs(problem, device)
            return found
        return _knobs(problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        if problem.direction == "wgrad":
            return float(_wgrad().cost(problem, device, knobs))
        return _Work(problem, knobs).seconds(device)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        if problem.direction == "wgrad":
            made: Runner = _wgrad().build(problem, device, knobs)
            return made
        assert isinstance(device, CudaDevice)
        work = _Work(problem, knobs)
        [source] = self.sources(problem, device, knobs)
        launch = Launch(source, "depthwise_mma", device, (work.blocks,), (32 * knobs.warps,), work.params, work.shared)
        return single(launch, 16)

    def sources(self, problem: Problem, device: Device, knobs: Any) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        if problem.direction == "wgrad":
            found: list[jit.Source] = _wgrad().sources(problem, device, knobs)
            return found
        return [jit.Source("depthwise_mma.cu", render.traits(problem, _Work(problem, knobs).constants))]


def _unmet(problem: Problem, device: Device) -> Iterator[str]:
    """What no pass takes."""
    if problem.rank != 2:
        yield f"the image has {problem.rank} spatial axes; wanted 2"
        return
    if not problem.c == problem.k == problem.groups or problem.c % 8 or problem.c == 0:
        yield f"C is {problem.c}, K {problem.k}, groups {problem.groups}; wanted them equal and a multiple of 8"
    if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in ("f16", "bf16"):
        yield f"dtypes are {'*'.join(problem.dtypes)}; wanted f16 or bf16 for all tensors"
    if problem.layouts[0] != "nhwc" or problem.layouts[2] != "nhwc":
        yield f"layouts are {'*'.join(problem.layouts)}; wanted nhwc for both images"
    if max(problem.filter) > _LARGEST:
        yield f"filter is {problem.filter}; wanted at most {_LARGEST} taps an axis"
    if set(problem.dilation) != {1}:
        yield f"dilation is {problem.dilation}; wanted 1"
    if isinstance(device, CudaDevice) and device.capability < 80:
        yield f"{device.arch} is too old; these tensor-core instructions start with sm_80"
    if problem.is_empty:
        yield "a tensor is empty"


def _wgrad() -> ModuleType:
    from . import depthwise_mma_wgrad

    return depthwise_mma_wgrad


@dataclass(frozen=True)
class _Columns:
    """The blocks of 8 input columns that a tile of ``tiles`` times 8 result columns needs.

    Blocks are counted from ``lead`` columns before the first one that the first result needs. ``stored`` of them, from
    ``first`` on, may lie inside of the image; ``depths`` are needed by 8 results, for the taps of each parity."""

    lead: int
    first: int
    stored: int
    depths: tuple[int, ...]
    products: float
    """Of depth 16, for a filter row and 16 result rows."""

    @staticmethod
    def of(taps: int, step: int, pad: int, width: int, tiles: int, whole: bool) -> _Columns:
        """``whole``: one tile covers the row, so that it is known which blocks lie outside of the image."""
        found = []
        for lead in range(8 if whole else 1):
            each = [(taps - parity + step - 1) // step for parity in range(step)]
            depths = tuple(ceil((lead + 7 + count) / 8) if count else 0 for count in each)
            most = tiles + max(depths) - 1
            first, last = 0, most - 1
            if whole:  # column w is element (w + pad) / step + lead of its plane
                first = min(max(0, (pad // step + lead) // 8), most - 1)
                last = max(first, min(((width - 1 + pad) // step + lead) // 8, most - 1))
            eights = [
                max(0, min(last + 1, j + depth) - max(first, j)) for depth in depths for j in range(tiles) if depth
            ]
            products = sum(count / 2 for count in eights)
            found.append(_Columns(lead, first, last - first + 1, depths, products))
        return min(found, key=lambda columns: (columns.products, columns.stored, columns.lead))


class _Work:
    """How the knobs cut a problem up."""

    def __init__(self, problem: Problem, knobs: Rows) -> None:
        self.problem, self.knobs = problem, knobs
        backward = problem.direction == "dgrad"
        R, S = problem.filter
        SH, step = problem.stride
        image, result = (problem.out, problem.spatial) if backward else (problem.spatial, problem.out)
        pad_h, pad_w = (low for low, _ in problem.padding)
        if backward:
            pad_h, pad_w = R - 1 - pad_h, S - 1 - pad_w
        self.image, self.result = image, result
        self.tiles_p, self.tiles_q = ceil(result[0] / knobs.rows), ceil(result[1] / (8 * knobs.tiles))
        self.columns = columns = _column_cache(S, step, pad_w, image[1], knobs.tiles, self.tiles_q == 1)
        self.in_rows = min(image[0], (knobs.rows - 1) * SH + R)
        segments = 8 // knobs.images
        self.tiles_m = MT = ceil(knobs.rows / (2 * segments))
        epilogue = problem.epilogue
        self.wide = any(operand.kind == "tensor" for operand in epilogue.operands)
        across = step * columns.stored
        self.out_units = (2 if self.wide else 1) * knobs.tiles
        in_image = _spread(self.in_rows, across, 2 * MT * SH, segments)
        out_image = _spread(knobs.rows, self.out_units, 2 * MT, segments)
        self.plane = knobs.images * max(in_image, out_image)
        copies = sum(2 * ((S - parity + step - 1) // step // 2 + 1) * 2 for parity in range(step))
        channels = 8 * knobs.octets
        filters = ceil(channels * R * copies / 8) + 2
        zeros = max(across, 2) + 1
        self.shared = 16 * (zeros + filters + channels * self.plane + knobs.octets * (8 // min(8, knobs.octets)))
        self.groups = ceil(problem.c / channels)
        self.items = ceil(problem.n / knobs.images) * self.tiles_p * self.tiles_q
        self.workers = ceil(self.items / knobs.rounds)
        self.blocks = self.workers * self.groups
        # Sums, fragments of pixels and of the filter rows in use, masks of taps; to load and to store takes 78 alone.
        kept = (MT if SH == 1 else 1) + 1
        needed = 4 * MT * knobs.tiles + 2 * columns.stored + kept * step * max(columns.depths) + 4 * step + 30
        needed += 4 if needed > 112 else 0  # many sums leave the compiler fewer places to put pairs and quadruples
        self.registers = max(86 if MT > 3 and max(columns.depths) > 2 else 78, needed)
        room = _REGISTERS // (32 * knobs.warps * knobs.residents) // 8 * 8
        tasks = knobs.images * self.in_rows * across * knobs.octets
        self.params = pack(3 + max(1, len(epilogue.operands)), (), [
            problem.c, self.groups, self.items, self.workers, self.tiles_p, self.tiles_q, problem.n, *image, *result,
            pad_h, pad_w,
        ])  # fmt: skip
        self.constants: dict[str, int | bool | str] = {
            "filter_h": R, "filter_w": S, "stride_h": SH, "step": step, "flipped": backward, "octets": knobs.octets,
            "rows": knobs.rows, "images": knobs.images, "tiles_m": self.tiles_m, "tiles_n": knobs.tiles,
            "lead": columns.lead, "first_block": columns.first, "blocks": columns.stored, "in_rows": self.in_rows,
            "in_image": in_image, "out_image": out_image, "plane": self.plane, "warps": knobs.warps,
            "residents": knobs.residents, "unroll": 2 if room - needed >= 16 else 1,
            "early": room > 80 and R * S * knobs.octets <= 32 * knobs.warps,
            "batch": 2 if room >= 120 and tasks > 32 * knobs.warps else 1,
            "fused": not self.wide and not epilogue.is_identity, "wide": self.wide,
        }  # fmt: skip

    def residents(self, device: Device) -> int:
        """Blocks that a multiprocessor holds."""
        assert isinstance(device, CudaDevice)
        limit = ceil(self.registers / 8) * 8
        by_registers = _REGISTERS // (limit * 32 * self.knobs.warps)
        by_shared = (device.shared_bytes + 1024) // (self.shared + 1280)  # 1 KB of each block is the driver's
        return min(by_registers, by_shared, 48 // self.knobs.warps if device.capability in (86, 89, 120) else 16)

    def seconds(self, device: Device) -> float:
        """Memory, tensor cores and shared memory: the slowest of them, and of the rest what one block cannot hide
        behind another's."""
        assert isinstance(device, CudaDevice)
        knobs, columns, (R, S) = self.knobs, self.columns, self.problem.filter
        step, sms, channels = self.problem.stride[1], device.threads, 8 * self.knobs.octets
        # Memory. What two tiles read comes from L2 the second time.
        used = min(self.image[1] + 7, 8 * step * columns.stored) * self.in_rows * knobs.images
        read = 2 * channels * used
        written = 2 * channels * knobs.images * knobs.rows * min(self.result[1], 8 * knobs.tiles)
        once = 2 * channels * self.image[0] * self.image[1] * knobs.images / (self.tiles_p * self.tiles_q)
        sectors = 1.0 if knobs.octets > 1 else 1.6  # a lone octet is half of a sector
        moved = sectors * (once + 0.35 * max(0.0, read - once)) + written * (2 if self.wide else 1)
        memory = moved / (0.85 * device.bandwidth / sms)
        # Tensor cores: wgmma, in which the rate is given, is faster than mma on sm_90.
        products = channels * R * self.tiles_m * columns.products
        tensor = products * 4096 * sms / device.half_flops * (1.35 if device.capability == 90 else 1.1)
        # Shared memory, in wavefronts of 128 bytes: fragments of pixels, filters, planes in and out.
        steps = R + self.problem.stride[0] * (self.tiles_m - 1)
        fragments = steps * 2 * step * columns.stored + R * sum(columns.depths)
        units = knobs.images * (self.in_rows * step * columns.stored + knobs.rows * self.out_units)
        planes = 1.1 * units / 8 + 2 * self.tiles_m * self.out_units
        # Each pixel of up to 64 channels is a line of its own on the way from and to memory, most of a cycle each.
        lines = knobs.images * (self.in_rows * min(self.image[1], 8 * step * columns.stored)
                                + knobs.rows * min(self.result[1], 8 * knobs.tiles))  # fmt: skip
        shared = (channels * (fragments + planes) + 0.75 * lines) / _CLOCK
        # Instructions, four a cycle: those of a product with its loads, of 64 pixels in and out; of a tap to stage.
        tasks = channels / 8 * units
        staging = channels * R * S * 25 / 32 / knobs.rounds
        issue = (2.5 * products + channels * fragments / 4 + tasks * 180 / 32 + staging) / (4 * 0.7) / _CLOCK
        each = [memory, tensor, shared, issue]
        held = max(1, min(knobs.residents, self.residents(device), ceil(self.blocks / sms)))
        # Measured: more than three blocks hide no more, and small ones meet in the load and store units.
        small = 1.0 + 0.08 * max(0, held - 3) + (0.2 if knobs.octets == 1 else 0.0)
        one = 1.3 * small * (max(each) + (sum(each) - max(each)) / min(held, 3))
        rounds = knobs.rounds
        # Multiprocessors get whole blocks. A block also waits: for its pixels and barriers, and for its filters once.
        most = ceil(self.blocks / sms)
        waves = ceil(self.blocks / (sms * held))
        steps_each = ceil(channels / knobs.warps) * steps * (1 + self.tiles_m * columns.products / 8)
        waits = rounds * (_LATENCY + _STEP * steps_each) + 0.7e-6 * ceil(R * S * knobs.octets / (128 * knobs.warps))
        fixed = 1.03 if rounds > 1 else 1.0  # shares that are given out beforehand do not even out
        return 2e-6 + fixed * max(most * rounds * one, waves * waits) + 0.3 * waits


def _spread(rows: int, pitch: int, segment: int, segments: int) -> int:
    """Units from an image to the next in a plane, of rows of ``pitch`` units with one left out after each segment: as
    many as put the segments of all images into different groups of banks."""
    units = rows * pitch + (rows - 1) // segment
    return units + (segments * (segment * pitch + 1) - units) % 8


@lru_cache(maxsize=4096)
def _column_cache(taps: int, step: int, pad: int, width: int, tiles: int, whole: bool) -> _Columns:
    return _Columns.of(taps, step, pad, width, tiles, whole)


def _shapes(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Rows, images and tiles of 8 columns of a block."""
    height, width = problem.spatial if problem.direction == "dgrad" else problem.out
    across = ceil(width / 8)
    for tiles in sorted({ceil(across / parts) for parts in (1, 2, 3, 4, 6, 8)}):
        if tiles > 8 or (tiles < 3 and across > 2 * tiles and across > 16):
            continue
        for images in (1, 2, 4, 8):
            whole = ceil(images * height / 16)
            if images <= problem.n and (images == 1 or height <= 32) and whole * tiles <= 20:
                yield height, images, tiles
        for parts in (2, 3, 4, 5, 7, 8, ceil(height / 16), ceil(height / 32), ceil(height / 48)):
            rows = ceil(height / max(1, parts))
            if 8 <= rows < height and ceil(rows / 16) * tiles <= 20:
                yield rows, 1, tiles
    yield min(16, height), 1, min(across, 4)


@lru_cache(maxsize=512)
def _knobs(problem: Problem, device: Device) -> tuple[Rows, ...]:
    """Those that fit, the cheapest by prediction first; of those that cut the problem alike the best two."""
    assert isinstance(device, CudaDevice)
    found: dict[Rows, float] = {}
    for rows, images, tiles in dict.fromkeys(_shapes(problem)):
        for octets in (2, 4, 1):
            if octets > 1 and octets > ceil(problem.c / 8):
                continue
            for warps in (4, 8, 16):
                if warps > 8 * octets:
                    continue
                one = _Work(problem, Rows(rows, images, tiles, octets, warps))
                held = min(one.residents(device), 4)  # more than three hide no more
                if held < 1 or one.shared > device.shared_bytes - 256:
                    continue
                # A block for each tile; or all blocks at once, each with its share of the tiles.
                slots = max(1, held * device.threads // one.groups)
                choices = [
                    Rows(rows, images, tiles, octets, warps, rounds, held)
                    for rounds in sorted({1, ceil(one.items / slots)})
                ]
                seconds, knobs = min((_Work(problem, each).seconds(device), each.rounds, each) for each in choices)[::2]
                found[knobs] = seconds
    best: list[Rows] = []
    for knobs in sorted(found, key=lambda each: (found[each], str(each))):
        cut = [(each.rows, each.images, each.tiles, each.octets) for each in best]
        if cut.count((knobs.rows, knobs.images, knobs.tiles, knobs.octets)) < 2:
            best.append(knobs)
        if len(best) == _ALTERNATIVES:
            break
    return tuple(best)
