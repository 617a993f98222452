"""cuda.few_channels: the first layer of a network, 1 to 4 channels into many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd, prod
from typing import Any

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import Problem
from . import jit, render
from .device import CudaDevice
from .launch import Launch, aligned, pack, single

__all__ = [
    "DgradF32Knobs", "DgradKnobs", "FewChannels", "FpropF32Knobs", "FpropKnobs", "WgradF32Knobs", "WgradKnobs",
]  # fmt: skip

_STATIC_SHARED = 48 << 10
_REGISTERS = 1 << 16  # of a multiprocessor
_MOST_TAPS = 11
_MOST_STRIDE = 4


@dataclass(frozen=True)
class FpropKnobs(Knobs):
    """A block computes ``tile_p x tile_q`` pixels by ``warps_n * NT * 8`` filters; a warp ``MT * 16`` pixels by
    ``NT * 8`` filters at a time, which it holds in registers if ``resident``. ``blocks`` fit a multiprocessor."""

    tile_p: int = 8
    tile_q: int = 16
    MT: int = 2
    NT: int = 4
    warps_m: int = 2
    warps_n: int = 2
    resident: bool = True
    blocks: int = 3

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


@dataclass(frozen=True)
class WgradKnobs(Knobs):
    """A block adds up tiles of ``tile_p x tile_q`` pixels for ``NT * 8`` filters, with ``stages`` of them on their way;
    a warp owns ``MT * 16`` elements of a window and every ``warps_d``-th 16 pixels."""

    tile_p: int = 4
    tile_q: int = 16
    MT: int = 5
    NT: int = 8
    warps_j: int = 2
    warps_d: int = 2
    stages: int = 3
    blocks: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps_j * self.warps_d


@dataclass(frozen=True)
class DgradKnobs(Knobs):
    """A block computes ``phases`` rows of dx for each of ``tile_i`` rows of dy, ``16 * MQ`` pixels of dy at a time, of
    which it holds ``chunk`` filters; a warp owns ``rows`` of the rows."""

    tile_i: int = 8
    rows: int = 2
    MQ: int = 2
    phases: int = 1
    chunk: int = 16
    blocks: int = 3

    @property
    def threads(self) -> int:
        return 32 * self.tile_i // self.rows


@dataclass(frozen=True)
class FpropF32Knobs(Knobs):
    """A block computes ``tile_p x tile_q`` pixels by ``filters``, a thread ``MT`` by 8 of them."""

    tile_p: int = 8
    tile_q: int = 16
    MT: int = 8
    filters: int = 64
    threads: int = 128
    blocks: int = 3


@dataclass(frozen=True)
class WgradF32Knobs(Knobs):
    """A block adds up tiles of ``tile_p x tile_q`` pixels for ``filters``; a warp owns 8 of them and every
    ``warps_d``-th pixel."""

    tile_p: int = 4
    tile_q: int = 16
    filters: int = 64
    warps_d: int = 1
    blocks: int = 2

    @property
    def threads(self) -> int:
        return 4 * self.filters * self.warps_d


@dataclass(frozen=True)
class DgradF32Knobs(Knobs):
    """A block computes the pixels of dx at ``tile_i x tile_j`` places of dy, ``chunk`` filters after the other; a
    thread owns ``V`` of the places."""

    tile_i: int = 8
    tile_j: int = 64
    V: int = 4
    chunk: int = 8
    blocks: int = 3

    @property
    def threads(self) -> int:
        return self.tile_i * self.tile_j // self.V


class FewChannels(Engine):
    """A first layer on tensor cores: windows are read as they lie in memory.

        fprop   y[pixel, k]   = sum over r, j of      x[window of the pixel, row r, element j] * w[k, r, j]
        wgrad   dw[k, r, j]   = sum over pixels of    x[window of the pixel, row r, element j] * dy[pixel, k]
        dgrad   dx[h, w, c]   = sum over s of u[h][q(w, s), (s, c)]  with
                u[h][q, (s, c)] = sum over r, k of    dy[p(h, r), q, k] * w[k, r, s, c]

    With 1 to 4 channels no load can fill a tensor core from the channels alone. But the row of a window, S*C elements,
    is one run of memory in nhwc: with j = (s, c) the depth of a 7x7 filter of 3 channels is 7 runs of 21 elements,
    padded to 24, rather than 49 taps of 3 padded to 8. A tile of x lies in shared memory as it is, and fragments are
    read from it pair by pair; stride * C must be even for that, else a zero channel is stored with the others. The
    filters stay in registers while a block goes from tile to tile.

    dgrad has C columns only, too few for a tensor core: first the sums over k and r, a product of S*C columns, then the
    few terms of each pixel are gathered along the row. wgrad adds one block's sums to the other's in a fixed order.

    A video whose filter has one frame is as many images. f16 and bf16 need sm_80; f32 is computed on CUDA cores, in
    f32. It wins by reading x and y about once, without channels that are padding. It loses where C is large, which it
    refuses.
    """

    name = "cuda.few_channels"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        problem = _frames(problem)
        if problem.rank != 2:
            yield f"the image has {problem.rank} spatial axes; wanted 2, or 3 in nhwc with filters of one frame"
            return
        if problem.groups != 1:
            yield f"groups is {problem.groups}; wanted 1"
        if not 1 <= problem.c <= 4:
            yield f"C is {problem.c}; wanted 1 to 4"
        if set(problem.dilation) != {1}:
            yield f"dilation is {problem.dilation}; wanted 1"
        if max(problem.filter) > _MOST_TAPS:
            yield f"filter is {problem.filter}; wanted at most {_MOST_TAPS} taps an axis"
        if max(problem.stride) > _MOST_STRIDE:
            yield f"stride is {problem.stride}; wanted at most {_MOST_STRIDE}"
        if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in ("f16", "bf16", "f32"):
            yield f"dtypes are {problem.dtypes}; wanted f16, bf16 or f32, and all alike"
        elif problem.dtypes[0] != "f32" and isinstance(device, CudaDevice) and device.capability < 80:
            yield f"{problem.dtypes[0]} on {device.arch}; its tensor cores are used from sm_80 on"
        if problem.layouts[0] != problem.layouts[2]:
            yield f"layouts of x and y are {problem.layouts[0]} and {problem.layouts[2]}; wanted them alike"
        if problem.is_empty:
            yield "a tensor is empty"
        elif problem.c <= 4 and max(problem.filter) <= _MOST_TAPS and not any(_knobs(problem)):
            yield f"K is {problem.k} with a filter of {problem.filter}; its tiles exceed 48 KB of shared memory"

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        # The longest chain of additions. Those within an mma cut bits off rather than round, so that each of its two
        # halves may be off by a unit in the last place of the larger sum.
        problem = _frames(problem)
        share = 1 if problem.dtypes[0] == "f32" else 4
        if problem.direction == "wgrad":  # 100 blocks or more share the pixels of a large problem
            chain = min(problem.gemm.k, 1024 + problem.gemm.k / 100)
        else:
            reach = [-(-taps // s) for taps, s in zip(problem.filter, problem.stride, strict=True)]
            chain = problem.k * prod(reach) if problem.direction == "dgrad" else problem.gemm.k
        return Traits(accumulator="f32", error_bound=(chain / share + 32) * 2.0**-23)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        assert isinstance(device, CudaDevice)
        if problem.direction != "wgrad":
            return 0
        return 4 * prod(_parts(_frames(problem), device, knobs))

    def knobs(self, problem: Problem, device: Device) -> tuple[Knobs, ...]:
        return tuple(islice(_knobs(_frames(problem)), 6))

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        # Bytes: each tensor about once. Operations: those of whole tiles; mma.sync reaches some 60% of what wgmma does
        # on sm_90. wgrad writes and reads its sums.
        assert isinstance(device, CudaDevice)
        problem = _frames(problem)
        moved = (problem.min_bytes + 2 * self.workspace_bytes(problem, device, knobs)) / device.bandwidth
        steps = _steps(problem, device, knobs)
        filled = max(0.05, min(1.0, prod(steps[0].grid) / (device.threads * knobs.blocks)))
        if problem.dtypes[0] == "f32":
            whole = {"fprop": 1.05, "dgrad": 1.15, "wgrad": 3.0}[problem.direction]  # wgrad waits for its tiles
            whole *= 1 if problem.direction == "dgrad" else -(-problem.k // 8) * 8 / problem.k  # filters go by eights
            working = 2 * whole * problem.macs / (0.6 * device.flops)
            return 2e-6 * len(steps) + max(moved / 0.8, working / filled, 2e-6)
        # Fitted to 105 times on an H200, of which half are within 15%.
        working = 4096 * _products(problem, knobs) / (device.half_flops * (0.6 if device.capability >= 90 else 0.9))
        odd = 2.5 if problem.k % 8 else 1.0  # results that leave one by one
        if problem.direction == "wgrad":
            return 4e-6 * len(steps) + odd * max(2.0 * moved, 2.2 * working)
        working *= odd / filled
        if problem.direction == "dgrad":
            return 7e-6 + 1.25 * odd * moved + 2.4 * working
        return 6e-6 + max(odd * moved, 1.5 * working) + 0.5 * min(odd * moved, 1.5 * working)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        assert isinstance(device, CudaDevice)
        launches = [
            Launch(step.source, step.name, device, step.grid, step.block, step.params, follows=at > 0)
            for at, step in enumerate(_steps(_frames(problem), device, knobs))
        ]

        if len(launches) == 1:
            return single(launches[0], 16)

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...]) -> None:
            assert workspace is not None
            a, b, result = aligned(a, 16), aligned(b, 16), aligned(out, 16)
            launches[0](a.data_ptr(), b.data_ptr(), workspace.data_ptr())
            launches[1](workspace.data_ptr(), result.data_ptr())
            if result is not out:
                out.copy_(result)

        return run

    def sources(self, problem: Problem, device: Device, knobs: Any) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        assert isinstance(device, CudaDevice)
        return list(dict.fromkeys(step.source for step in _steps(_frames(problem), device, knobs)))


def _frames(problem: Problem) -> Problem:
    """Of a video whose frames are looked at one by one, the problem of its frames: with channels last, their memory is
    that of as many images."""
    first = [each[0] for each in (problem.filter, problem.stride, problem.padding)]
    if problem.rank != 3 or first != [1, 1, (0, 0)] or set(problem.layouts) != {"nhwc"}:
        return problem
    return problem.with_(
        n=problem.n * problem.spatial[0], spatial=problem.spatial[1:], filter=problem.filter[1:],
        stride=problem.stride[1:], padding=problem.padding[1:], dilation=problem.dilation[1:],
    )  # fmt: skip


def _knobs(problem: Problem) -> Iterator[Any]:
    """The default first."""
    wide = problem.dtypes[0] == "f32"
    if problem.direction == "fprop":
        return _fprop_f32_knobs(problem) if wide else _fprop_knobs(problem)
    if problem.direction == "wgrad":
        return _wgrad_f32_knobs(problem) if wide else _wgrad_knobs(problem)
    return _dgrad_f32_knobs(problem) if wide else _dgrad_knobs(problem)


def _steps(problem: Problem, device: CudaDevice, knobs: Any) -> list[_Step]:
    wide = problem.dtypes[0] == "f32"
    if problem.direction == "fprop":
        return _fprop_f32(problem, device, knobs) if wide else _fprop(problem, device, knobs)
    if problem.direction == "wgrad":
        return _wgrad_f32(problem, device, knobs) if wide else _wgrad(problem, device, knobs)
    return _dgrad_f32(problem, device, knobs) if wide else _dgrad(problem, device, knobs)


def _products(problem: Problem, knobs: Any) -> float:
    """Calls of mma, 16 x 8 x 16 multiply-adds each."""
    p, q = problem.out
    if isinstance(knobs, DgradKnobs):
        (_, rows), (_, width) = _dgrad_counts(problem)
        tiles = -(-rows // knobs.tile_i) * knobs.tile_i * -(-width // _dgrad_width(problem, knobs)) * knobs.MQ
        run = -(-problem.filter[1] * problem.c // 8)
        return problem.n * tiles * run * problem.filter[0] * -(-problem.k // 16)
    pixels = problem.n * -(-p // knobs.tile_p) * knobs.tile_p * -(-q // knobs.tile_q) * knobs.tile_q
    if isinstance(knobs, WgradKnobs):
        return pixels / 16 * knobs.warps_j * knobs.MT * knobs.NT * -(-problem.k // (8 * knobs.NT))
    octets = problem.filter[0] * _Window.of(problem, knobs.tile_p, knobs.tile_q).octets
    columns = knobs.warps_n * knobs.NT * -(-problem.k // (8 * knobs.NT * knobs.warps_n))
    return pixels / 16 * octets / 2 * columns


def _parts(problem: Problem, device: CudaDevice, knobs: Any) -> tuple[int, int, int]:
    """Of a wgrad: how many sums are added for a column of filters, such columns, and the results of one."""
    p, q = problem.out
    filters = knobs.filters if isinstance(knobs, WgradF32Knobs) else 8 * knobs.NT
    tiles, columns = problem.n * -(-p // knobs.tile_p) * -(-q // knobs.tile_q), -(-problem.k // filters)
    blocks = max(1, min(tiles, device.threads * knobs.blocks // columns))
    if isinstance(knobs, WgradF32Knobs):
        return blocks * knobs.warps_d, columns, -(-problem.c * prod(problem.filter) // 32) * 32 * filters
    return blocks, columns, knobs.warps_j * knobs.MT * knobs.NT * 128


@dataclass(frozen=True)
class _Step:
    """One launch."""

    source: jit.Source
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    params: bytes


@dataclass(frozen=True)
class _Window:
    """The host's half of ``common/window.cuh``: the tile of x that a tile of output pixels reads."""

    stored: int
    vector: int
    lead: int
    octets: int
    size: int

    @staticmethod
    def of(problem: Problem, tile_p: int, tile_q: int) -> _Window:
        (r, s), (sh, sw), pad = problem.filter, problem.stride, problem.padding[1][0]
        c, length = problem.c, problem.spatial[1] * problem.c
        wide = problem.dtypes[0] == "f32"
        stored = c if wide or sw * c % 2 == 0 else c + 1
        raw = problem.layouts[0] == "nhwc" and stored == c and not wide
        vector = 8 if raw and length % 8 == 0 else 2 if raw and length % 2 == 0 else 1
        lead = pad * c % 2 if vector > 1 else 0
        skew = -(pad * c + lead) % vector
        pitch = -(-(skew + lead + ((tile_q - 1) * sw + s) * stored) // 8) * 8
        return _Window(stored, vector, lead, -(-(lead + s * stored) // 8), ((tile_p - 1) * sh + r) * pitch + 8)


def _shape(problem: Problem) -> dict[str, int | bool | str]:
    return {
        "channels": problem.c, "R": problem.filter[0], "S": problem.filter[1],
        "stride_h": problem.stride[0], "stride_w": problem.stride[1],
        "pad_h": problem.padding[0][0], "pad_w": problem.padding[1][0],
        "nhwc": problem.layouts[0] == "nhwc", "filter_last": problem.layouts[1] == "nhwc",
    }  # fmt: skip


def _constants(problem: Problem, knobs: Any) -> Mapping[str, int | bool | str]:
    """The shape, the knobs and what else ``Window`` asks for."""
    window = _Window.of(problem, knobs.tile_p, knobs.tile_q)
    return _shape(problem) | vars(knobs) | {
        "threads": knobs.threads, "stored": window.stored, "vector": window.vector,
    }  # fmt: skip


def _tile_width(size: int, widths: tuple[int, ...]) -> int:
    """The width of a tile that wastes the fewest pixels at the end of a row, preferably 16."""
    return min(widths, key=lambda width: (-(-size // width) * width, abs(width - 16)))


# -- fprop ----------------------------------------------------------------------------------------------------------


def _fprop_knobs(problem: Problem) -> Iterator[FpropKnobs]:
    """Filters in registers if 96 suffice; as many of them in a block, and as many pixels, as shared memory holds."""
    nt = 1 if problem.k <= 8 else 2 if problem.k <= 16 else 4
    across = -(-problem.k // (8 * nt))
    most = across if across <= 3 else 3 if across % 3 == 0 and across % 2 else 2
    widths = (8, 16, 32) if problem.layouts[0] == "nhwc" else (16, 32)
    tile_q = _tile_width(problem.out[1], widths)
    octets = problem.filter[0] * _Window.of(problem, 1, tile_q).octets
    resident = octets * nt <= 96
    for warps_n in range(most, 0, -1):
        whole = 4 // warps_n
        shares = ((2, whole), (1, whole)) if resident else ((4, whole), (2, whole), (2, 2), (4, 1), (1, 1))
        for mt, warps_m in shares:
            registers = (octets * nt if resident else 2 * nt) + mt * nt * 4 + 4 * mt + 42
            for tile in (256, 128, 64, 32, 16):
                knobs = FpropKnobs(tile // tile_q, tile_q, mt, nt, warps_m, warps_n, resident)
                # A tile of much work need not be large to be worth its barrier, and a small one leaves more blocks.
                if tile < tile_q or tile % (16 * warps_m * mt) or (tile == 256 and octets > 8):
                    continue
                if _fprop_shared(problem, knobs) <= _STATIC_SHARED:
                    yield replace(knobs, blocks=max(1, min(6, _REGISTERS // (knobs.threads * registers))))


def _fprop_shared(problem: Problem, knobs: FpropKnobs) -> int:
    window = _Window.of(problem, knobs.tile_p, knobs.tile_q)
    steps = -(-problem.filter[0] * window.octets // 2)
    return 32 * steps * knobs.warps_n * knobs.NT * 8 + 2 * 2 * (-(-window.size // 8) * 8)


def _fprop(problem: Problem, device: CudaDevice, knobs: FpropKnobs) -> list[_Step]:
    p, q = problem.out
    width = gcd(problem.k, 2 * knobs.NT) if problem.layouts[0] == "nhwc" else gcd(q, 2)
    constants = {**_constants(problem, knobs), "width": width}
    tiles_p, tiles_q = -(-p // knobs.tile_p), -(-q // knobs.tile_q)
    tiles, columns = problem.n * tiles_p * tiles_q, -(-problem.k // (8 * knobs.NT * knobs.warps_n))
    params = pack(3 + max(1, len(problem.epilogue.operands)), (),
                  (*problem.spatial, problem.k, p, q, tiles_p, tiles_q, tiles))  # fmt: skip
    blocks = max(1, min(tiles, device.threads * knobs.blocks // columns))
    return [_Step(jit.Source("few_channels_fprop.cu", render.traits(problem, constants)), "few_channels_fprop",
                  (blocks, columns), (knobs.threads,), params)]  # fmt: skip


# -- wgrad ----------------------------------------------------------------------------------------------------------


def _wgrad_knobs(problem: Problem) -> Iterator[WgradKnobs]:
    """As many filters a block as fit the accumulators: 160 registers, with 16 for B, 8 for A and the addresses."""
    tile_q = _tile_width(problem.out[1], (8, 16))
    nt = next(nt for nt in (1, 2, 4, 8) if 8 * nt >= problem.k or nt == 8)
    while True:
        tiles = _wgrad_tiles(problem, tile_q)
        warps_j = next((w for w in (1, 2, 4) if -(-tiles // w) * nt * 4 <= 160), 0)
        if warps_j or nt == 1:
            break
        nt //= 2
    if not warps_j:
        return
    mt = -(-tiles // warps_j)
    blocks = max(1, min(4, _REGISTERS // (128 * (mt * nt * 4 + nt * 2 + mt + 56))))
    for tile in (64, 128, 32, 16):
        for stages in (3, 2):
            knobs = WgradKnobs(tile // tile_q, tile_q, mt, nt, warps_j, 4 // warps_j, stages, blocks)
            sums = (knobs.warps_d - 1) * warps_j * nt * 512  # of warps, which take the place of the tiles in the end
            if tile >= tile_q and sums <= _wgrad_shared(problem, knobs) <= _STATIC_SHARED:
                yield knobs


def _wgrad_tiles(problem: Problem, tile_q: int) -> int:
    """Groups of 8 pairs of elements of a window."""
    window = _Window.of(problem, 1, tile_q)
    pairs = -(-(window.lead + problem.filter[1] * window.stored) // 2)
    return -(-problem.filter[0] * pairs // 8)


def _wgrad_shared(problem: Problem, knobs: WgradKnobs) -> int:
    window = _Window.of(problem, knobs.tile_p, knobs.tile_q)
    return 2 * knobs.stages * (-(-window.size // 8) * 8 + knobs.tile_p * knobs.tile_q * (knobs.NT * 8 + 8))


def _wgrad(problem: Problem, device: CudaDevice, knobs: WgradKnobs) -> list[_Step]:
    p, q = problem.out
    ragged = q % knobs.tile_q > 0 or (knobs.tile_q == 8 and p % 2 > 0)
    constants = {**_constants(problem, knobs), "dy_vector": _dy_vector(problem), "ragged": ragged}
    tiles_p, tiles_q = -(-p // knobs.tile_p), -(-q // knobs.tile_q)
    parts, columns, _ = _parts(problem, device, knobs)
    params = pack(3, (), (*problem.spatial, problem.k, p, q, tiles_p, tiles_q, problem.n * tiles_p * tiles_q, parts))
    source = jit.Source("few_channels_wgrad.cu", render.traits(problem, constants))
    return [
        _Step(source, "few_channels_wgrad", (parts, columns), (knobs.threads,), params),
        _sum(problem, device, knobs),
    ]


def _sum(problem: Problem, device: CudaDevice, knobs: WgradKnobs | WgradF32Knobs) -> _Step:
    window = _Window.of(problem, knobs.tile_p, knobs.tile_q)
    parts, columns, sums = _parts(problem, device, knobs)
    run, filters = problem.filter[1] * window.stored, getattr(knobs, "filters", 0)
    if isinstance(knobs, WgradKnobs):
        run, filters = -(-(window.lead + run) // 2) * 2, 8 * knobs.NT
    constants: dict[str, int | bool | str] = {
        "channels": problem.c, "stored": window.stored, "lead": window.lead, "run": run, "elements": sums // filters,
        "filters": filters, "R": problem.filter[0], "S": problem.filter[1],
        "filter_last": problem.layouts[1] == "nhwc",
    }  # fmt: skip
    source = jit.Source("few_channels_sum.cu", render.traits(problem, constants))
    return _Step(source, "few_channels_sum", (sums // 32, columns), (256,), pack(2, (), (problem.k, parts)))


# -- dgrad ----------------------------------------------------------------------------------------------------------


def _dgrad_knobs(problem: Problem) -> Iterator[DgradKnobs]:
    """All that fit, the cheapest first."""
    fits, run = [], -(-problem.filter[1] * problem.c // 8)
    for phases in (v for v in range(problem.stride[0], 0, -1) if problem.stride[0] % v == 0):
        for mq in (1, 2, 4):
            for rows in (1, 2):
                for chunk in (64, 32, 16):
                    knobs = DgradKnobs(4 * rows, rows, mq, phases, chunk)
                    acc = rows * phases * mq * run * 4
                    blocks = min(5, _REGISTERS // (128 * (acc + 4 * mq + 2 * phases * run + 46)))
                    wide = 16 * mq >= -(-problem.filter[1] // problem.stride[1])
                    if wide and acc <= 128 and (chunk == 16 or problem.k % chunk == 0):
                        if _dgrad_shared(problem, knobs) <= _STATIC_SHARED:
                            fits.append(replace(knobs, blocks=blocks))
    yield from sorted(fits, key=lambda knobs: _dgrad_work(problem, knobs))


def _dgrad_shared(problem: Problem, knobs: DgradKnobs) -> int:
    reach, run = -(-problem.filter[0] // problem.stride[0]), -(-problem.filter[1] * problem.c // 8)
    depth, columns = -(-problem.k // 16) * 16, 16 * knobs.MQ
    dy = (knobs.tile_i + reach - 1) * columns * (knobs.chunk + 8) * 2
    sums = knobs.threads // 32 * columns * (run * 8 + (0 if run % 2 else 8)) * 4
    return knobs.phases * reach * depth * run * 16 + max(dy, sums)


def _dgrad_counts(problem: Problem) -> list[tuple[int, int]]:
    """Along both axes the first place of dy's grid that meets dx, and how many there are."""
    pairs = []
    for size, stride, (low, _) in zip(problem.spatial, problem.stride, problem.padding, strict=True):
        pairs.append((low // stride, (size - 1 + low) // stride - low // stride + 1))
    return pairs


def _dgrad_width(problem: Problem, knobs: DgradKnobs) -> int:
    """Places of dy's grid along a row of a tile: its columns, less those that complete the windows of the next tile."""
    return 16 * knobs.MQ + 1 - -(-problem.filter[1] // problem.stride[1])


def _dgrad_work(problem: Problem, knobs: DgradKnobs) -> float:
    """Cycles of a multiprocessor for a pixel of dy: shared memory moves 128 bytes in one, an mma takes 1.6."""
    (_, rows), (_, width) = _dgrad_counts(problem)
    reach_h = -(-problem.filter[0] // problem.stride[0])
    run, steps = -(-problem.filter[1] * problem.c // 8), -(-problem.k // 16)
    tiles = -(-rows // knobs.tile_i) * -(-width // _dgrad_width(problem, knobs)) * problem.stride[0] // knobs.phases
    inner = 4 * knobs.rows * knobs.MQ + 2 * knobs.phases * run + 1.6 * knobs.rows * knobs.MQ * knobs.phases * run
    staged = (knobs.tile_i + reach_h - 1) * 16 * knobs.MQ * steps * 16 * 2 / 128 * 3
    stored = knobs.tile_i * knobs.phases * 16 * knobs.MQ * run * 8 * 4 / 128 * 2
    waits = steps * 16 / knobs.chunk * 400 / knobs.blocks
    return tiles * (knobs.threads / 32 * reach_h * steps * inner + staged + stored + waits) / (rows * width)


def _dgrad(problem: Problem, device: CudaDevice, knobs: DgradKnobs) -> list[_Step]:
    constants = _shape(problem) | vars(knobs) | {
        "threads": knobs.threads, "depth": -(-problem.k // 16) * 16, "dy_vector": _dy_vector(problem),
    }  # fmt: skip
    (first_i, rows), (first_j, width) = _dgrad_counts(problem)
    tiles_i, tiles_j = -(-rows // knobs.tile_i), -(-width // _dgrad_width(problem, knobs))
    tiles, columns = problem.n * tiles_i * tiles_j, problem.stride[0] // knobs.phases
    params = pack(3 + max(1, len(problem.epilogue.operands)), (), (
        *problem.spatial, problem.k, *problem.out, first_i, first_j, tiles_i, tiles_j, tiles,
    ))  # fmt: skip
    blocks = max(1, min(tiles, device.threads * knobs.blocks // columns))
    return [_Step(jit.Source("few_channels_dgrad.cu", render.traits(problem, constants)), "few_channels_dgrad",
                  (blocks, columns), (knobs.threads,), params)]  # fmt: skip


def _dy_vector(problem: Problem) -> int:
    """Filters of dy that are copied at once."""
    return 8 if problem.layouts[2] == "nhwc" and problem.k % 8 == 0 else 1


# -- f32 ------------------------------------------------------------------------------------------------------------


def _filters(problem: Problem) -> int:
    """8 to 64 filters a block, no more than there are."""
    return next(count for count in (8, 16, 32, 64) if count >= problem.k or count == 64)


def _fprop_f32_knobs(problem: Problem) -> Iterator[FpropF32Knobs]:
    tile_q = _tile_width(problem.out[1], (8, 16, 32))
    filters = _filters(problem)
    while filters >= 8:
        for mt, threads in ((8, 128), (8, 64), (4, 128), (8, 32), (4, 64), (4, 32), (2, 32)):
            tile_p = mt * 8 * threads // filters // tile_q
            if threads < filters or not 0 < tile_p * tile_q <= 256:
                continue
            shared = 4 * (problem.c * prod(problem.filter) * filters + _Window.of(problem, tile_p, tile_q).size)
            if shared <= _STATIC_SHARED:
                yield FpropF32Knobs(tile_p, tile_q, mt, filters, threads, max(1, 384 // threads))
        filters //= 2


def _fprop_f32(problem: Problem, device: CudaDevice, knobs: FpropF32Knobs) -> list[_Step]:
    p, q = problem.out
    constants = {**_constants(problem, knobs), "width": gcd(problem.k, 4) if problem.layouts[0] == "nhwc" else 1}
    tiles_p, tiles_q = -(-p // knobs.tile_p), -(-q // knobs.tile_q)
    tiles, columns = problem.n * tiles_p * tiles_q, -(-problem.k // knobs.filters)
    params = pack(3 + max(1, len(problem.epilogue.operands)), (),
                  (*problem.spatial, problem.k, p, q, tiles_p, tiles_q, tiles))  # fmt: skip
    blocks = max(1, min(tiles, device.threads * knobs.blocks // columns))
    source = jit.Source("few_channels_fprop_f32.cu", render.traits(problem, constants))
    return [_Step(source, "few_channels_fprop_f32", (blocks, columns), (knobs.threads,), params)]


def _wgrad_f32_knobs(problem: Problem) -> Iterator[WgradF32Knobs]:
    tile_q, filters = _tile_width(problem.out[1], (8, 16)), _filters(problem)
    sums = -(-problem.c * prod(problem.filter) // 32) * 8
    for pixels in (64, 128, 32, 16):
        knobs = WgradF32Knobs(pixels // tile_q, tile_q, filters, 64 // filters, 2 if sums <= 64 else 1)
        shared = 4 * (_Window.of(problem, knobs.tile_p, tile_q).size + 4 + pixels * filters)
        if shared <= _STATIC_SHARED:
            yield knobs


def _wgrad_f32(problem: Problem, device: CudaDevice, knobs: WgradF32Knobs) -> list[_Step]:
    p, q = problem.out
    parts, columns, _ = _parts(problem, device, knobs)
    constants = {**_constants(problem, knobs), "MT": -(-problem.c * prod(problem.filter) // 32)}
    tiles_p, tiles_q = -(-p // knobs.tile_p), -(-q // knobs.tile_q)
    params = pack(3, (), (*problem.spatial, problem.k, p, q, tiles_p, tiles_q, problem.n * tiles_p * tiles_q, parts))
    source = jit.Source("few_channels_wgrad_f32.cu", render.traits(problem, constants))
    return [
        _Step(source, "few_channels_wgrad_f32", (parts // knobs.warps_d, columns), (knobs.threads,), params),
        _sum(problem, device, knobs),
    ]


def _dgrad_f32_knobs(problem: Problem) -> Iterator[DgradF32Knobs]:
    results = problem.c * prod(problem.stride)
    padded, reach = -(-results // 4) * 4, [-(-t // s) for t, s in zip(problem.filter, problem.stride, strict=True)]
    for places in (4, 2, 1):
        for chunk in (8, 4, 2, 1):
            knobs = DgradF32Knobs(8, 16 * places, places, chunk)
            pitch = (15 + -(-(places + reach[1] - 1) // places)) * places
            shared = 4 * chunk * ((7 + reach[0]) * pitch + reach[0] * reach[1] * padded)
            if results * places <= 64 and shared <= _STATIC_SHARED:
                yield knobs


def _dgrad_f32(problem: Problem, device: CudaDevice, knobs: DgradF32Knobs) -> list[_Step]:
    (first_i, rows), (first_j, width) = _dgrad_counts(problem)
    tiles_i, tiles_j = -(-rows // knobs.tile_i), -(-width // knobs.tile_j)
    tiles = problem.n * tiles_i * tiles_j
    params = pack(3 + max(1, len(problem.epilogue.operands)), (), (
        *problem.spatial, problem.k, *problem.out, first_i, first_j, tiles_i, tiles_j, tiles,
    ))  # fmt: skip
    constants = _shape(problem) | vars(knobs) | {"threads": knobs.threads}
    source = jit.Source("few_channels_dgrad_f32.cu", render.traits(problem, constants))
    return [_Step(source, "few_channels_dgrad_f32", (tiles,), (knobs.threads,), params)]
