"""cuda.igemm_sm90: implicit GEMM with the copies and products of Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, prod
from typing import Any

from torch import Tensor

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from . import fusion, igemm_sm90_halo, igemm_sm90_wgrad, igemm_sm90_windows, jit, render
from .channels_last import Turn, turned_inputs, turned_operands, turned_result
from .device import CudaDevice
from .igemm_sm90_halo import Halo
from .igemm_sm90_wgrad import Filters
from .igemm_sm90_windows import Windows
from .igemm_sm90_work import stored
from .launch import Launch, aligned, pack, single
from .tf32_pairs import paired

__all__ = ["IgemmSm90", "tiles"]

_ALTERNATIVES = 20  # of each variant, and of teams
_MOST_PHASES = 8  # of dgrad: each has a map of windows
_RESULTS = {
    "f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "f32": ("f32",),
    "i8": ("i32", "f32", "f16", "bf16"), "e4m3": ("f16", "bf16", "f32"), "e5m2": ("f16", "bf16", "f32"),
}  # fmt: skip
_WANTED = "one of " + ", ".join(f"{name} to {' or '.join(results)}" for name, results in _RESULTS.items())
_SMALL = ("e4m3", "e5m2")  # in any pair


class IgemmSm90(Engine):
    """Convolution as a matrix product whose windows come as boxes, on the tensor cores of sm_90.

        fprop   y[pixel, k]      = sum over tap, c of  x[window of the pixel, tap, c] * w[k, tap, c]
        dgrad   dx[pixel, c]     = sum over tap, k of  dy[pixel that tap comes from, k] * w[k, tap, c]
        wgrad   dw[k, (tap, c)]  = sum over pixels of  dy[pixel, k] * x[window of the pixel, tap, c]

    One thread of a block asks for boxes of windows and of filters, several steps ahead; groups of four warps multiply
    them where they have come to, asynchronously. Blocks stay on their multiprocessors, so that the boxes of a tile come
    while the results of the one before leave.

    Wins wherever products are the limit, and channels make whole boxes. Loses where channels are few, and to
    ``cuda.pixels`` where memory is.
    """

    name = "cuda.igemm_sm90"
    device = "cuda"
    takes_epilogue = True
    takes_fusion = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if not isinstance(device, CudaDevice) or device.capability != 90:
            yield f"the device is {getattr(device, 'arch', device.name)}; its copies and products are those of sm_90"
        first, second, result = _dtypes(problem)
        alike = first == second or (first in _SMALL and second in _SMALL)
        if not alike or result not in _RESULTS.get(first, ()):
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted {_WANTED}"
            return
        size = DTYPE_BYTES[first]
        if first == "f32" and problem.precision == "ieee":
            yield f"precision is {problem.precision}; wanted tf32 or tf32x3: products are those of tensor cores"
        if size == 1 and problem.direction != "fprop":
            yield f"the pass is {problem.direction} of {first}; wanted fprop"
        if not problem.prologue.is_identity:
            yield f"'x{problem.prologue}' stands before the products; boxes go from memory to them as they are"
        if problem.epilogue.also and turned_result(problem):
            yield f"'{problem.epilogue}' has other results, in nchw; wanted nhwc"
        if problem.is_fused and problem.result_dtype not in ("f16", "bf16", "f32"):
            yield f"'{problem.fusion}' has results of {problem.result_dtype}; they are computed for f16, bf16 and f32"
        if problem.is_empty:
            yield "a tensor is empty"
            return
        if problem.direction == "dgrad" and prod(problem.stride) > _MOST_PHASES:
            yield f"stride is {problem.stride}; wanted a product of at most {_MOST_PHASES} in dgrad"
            return
        groups = problem.groups
        for name, channels in (("C", problem.c // groups), ("K", problem.k // groups)):
            if channels % (16 // min(size, 2)):
                yield f"{name}{'/G' * (groups > 1)} is {channels}; wanted a multiple of {16 // min(size, 2)}"
        depth = (problem.k if problem.direction == "dgrad" else problem.c) // groups
        if groups > 1 and problem.direction != "wgrad" and depth * size % (32 if depth * size < 128 else 128):
            # What a box brings of the next group must not be multiplied: products take 32 bytes, steps 128.
            wanted = f"a multiple of {32 // size} up to {128 // size}, or of {128 // size}"
            yield f"a group has {depth} channels of depth; wanted {wanted}"
        most = max(problem.n * prod(problem.out), problem.n * prod(problem.spatial), prod(problem.w_shape))
        if (2 if paired(problem) else 1) * most >= 2**31 - 2**16:
            yield "the pixels or the filters are too many for an int"
            return
        yield from (igemm_sm90_wgrad if problem.direction == "wgrad" else igemm_sm90_windows).refusals(problem)

    def traits(self, problem: Problem, knobs: Any) -> Traits:
        # Additions within a product cut bits off rather than round: two units in the last place for 32 bytes of depth.
        work = _work(problem, knobs)
        error = (problem.gemm.k * work.size / 16 + 2 * knobs.splits * knobs.cluster + 32) * 2.0**-23
        # One order of sums for all tiles, but for splits of them and for the planes of a strided halo.
        ordered = knobs.splits * knobs.cluster == 1 and not (isinstance(knobs, Halo) and work.strided)
        invariant = problem.direction == "wgrad" or ordered
        if work.first == "i8":
            return Traits("i32", 2.0**-24)
        if work.pairs:  # a step's sums have eight units of themselves, and are added as in f32
            error = (work.steps / 2 + 2 * knobs.splits * knobs.cluster + 40) * 2.0**-23
        elif work.first == "tf32" or work.first in _SMALL:  # rounded to 11 bits each; sums of a step in 13 bits
            error += 2.0**-10
        return Traits("f32", error, batch_invariant=invariant)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Any) -> int:
        return _Memory(problem, knobs).bytes

    def copies(self, problem: Problem, knobs: Any) -> tuple[str, ...]:
        turns = [*turned_inputs(problem), *turned_operands(problem)]
        made = [f"copy {turned.name} from nchw to nhwc" for turned in turns if turned]
        if _work(problem, knobs).turned:
            made.append("copy w with its depth last")
        if _work(problem, knobs).pairs:
            windows = "x and " if problem.direction == "fprop" else "dy and "
            made.append(f"copy {windows * knobs.swapped}w as pairs of tf32")
        if result := turned_result(problem):
            made.append(f"copy {result.name} from nhwc to nchw")
        return tuple(made)

    def knobs(self, problem: Problem, device: Device) -> tuple[Any, ...]:
        return _knobs(problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Any) -> float:
        assert isinstance(device, CudaDevice)
        copied = [*_turns(problem, knobs), *turned_operands(problem), turned_result(problem)]
        seconds = sum(0.6e-6 + 1.07 * turn.seconds(device) for turn in copied if turn)
        # The rest is the same for all knobs.
        return seconds + 2.5e-6 * problem.stats + _seconds(problem, device, knobs)

    def reasons(self, problem: Problem, device: Device, knobs: Any) -> tuple[str, ...]:
        assert isinstance(device, CudaDevice)
        return (_work(problem, knobs).estimate(device).reasons(device),)

    def build(self, problem: Problem, device: Device, knobs: Any) -> Runner:
        assert isinstance(device, CudaDevice)
        work, memory = _work(problem, knobs), _Memory(problem, knobs)
        main, *others = self.sources(problem, device, knobs)
        grid, block = (work.blocks(device),), (knobs.threads,)
        first = Launch(
            main, work.entry, device, grid, block, work.params, work.shared, work.follows, work.maps, knobs.cluster
        )
        if not memory.bytes and not problem.epilogue.also:
            return single(first, 16)
        turns = [turn.launch(device) if turn else None for turn in (*_turns(problem, knobs), *turned_operands(problem))]
        back = turn.launch(device) if (turn := turned_result(problem)) else None
        apart = work.pairs.launch(device) if work.pairs else None
        second = None
        if knobs.splits > 1:
            grid = (ceil(prod(problem.result_shape) / (work.sum_together * 256 // work.sum_rows)),)
            second = Launch(others[0], "igemm_sum", device, grid, (256,), work.sum_params, follows=True)
        if problem.stats:
            grid, params = (ceil(2 * problem.k / 32),), pack(3, (), (work.parts, problem.k))
            second = Launch(others[0], "igemm_stats", device, grid, (1024,), params, follows=True)
        also = len(problem.epilogue.also)
        spare = (0,) * max(0, 1 - len(problem.epilogue.operands) - also)

        def run(
            a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...] | None,
            more: tuple[Tensor, ...] = (),
        ) -> None:  # fmt: skip
            kept = [aligned(each, 16) for each in (a, b, out, *more[:also], *(operands or ()))]
            first_input, second_input, to, *others = [each.data_ptr() for each in kept]
            base = workspace.data_ptr() if workspace is not None else 0
            kept_results, others = others[:also], others[also:]
            # The filter may be copied twice: with its channels last, then with its depth last.
            given = [first_input, second_input, second_input, *others]
            for at, (turn, place) in enumerate(zip(turns, memory.places, strict=True)):
                if turn is not None:
                    turn(given[at], base + place)
                    given[at] = base + place
                if at == 1:
                    given[2] = given[1]
            if apart is not None:
                pairs = [base + place for place in memory.pairs]
                apart(given[0], given[2], *pairs)
                given[2] = pairs[1]
                if work.pairs.first:
                    given[0] = pairs[0]
            made = base + memory.result if back is not None else to
            first(given[0], given[2], made, *given[3:], *kept_results, *spare, base)
            if second is not None:
                second(base, *[each.data_ptr() for each in more[also:]] if problem.stats else (made, *given[3:]))
            if back is not None:
                back(made, to)
            for filled, given_ in zip(kept[2 : 3 + also], (out, *more[:also]), strict=True):
                if filled is not given_:
                    given_.copy_(filled)

        return run

    def sources(self, problem: Problem, device: Device, knobs: Any) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        work = _work(problem, knobs)
        made = [work.source]
        if knobs.splits > 1:
            constants: dict[str, int | bool | str] = {
                "together": work.sum_together, "rows": work.sum_rows, "Products": work.total, "last": True,
                "filter": problem.direction == "wgrad",
            }  # fmt: skip
            text = fusion.further(problem) + render.traits(stored(problem), constants)
            made.append(jit.Source("igemm_sum.cu", text))
        if problem.stats:
            made.append(jit.Source("igemm_stats.cu"))
        copied = [*_turns(problem, knobs), *turned_operands(problem), turned_result(problem), work.pairs]
        return made + [each.source for each in copied if each]


def _dtypes(problem: Problem) -> tuple[str, str, str]:
    """Of the two inputs and the result."""
    first, second = problem.inputs
    return problem.dtypes[first], problem.dtypes[second], problem.result_dtype


_VARIANTS: dict[type, Any] = {Windows: igemm_sm90_windows, Halo: igemm_sm90_halo, Filters: igemm_sm90_wgrad}


def _work(problem: Problem, knobs: Any) -> Any:
    """The problem cut up as the knobs say: a :class:`.igemm_sm90_work.GroupWork`."""
    return _VARIANTS[type(knobs)].work(problem, knobs)


def tiles(problem: Problem, device: Device) -> Iterator[Any]:
    """All of the search space: knobs of every variant that takes the problem."""
    assert isinstance(device, CudaDevice)
    if problem.direction == "wgrad":
        yield from igemm_sm90_wgrad.tiles(problem, device)
        return
    yield from igemm_sm90_windows.tiles(problem, device)
    yield from igemm_sm90_halo.tiles(problem, device)


def _seconds(problem: Problem, device: CudaDevice, knobs: Any) -> float:
    """What knobs are ordered by: the main kernel, the second one of splits, and the copy of pairs."""
    work = _work(problem, knobs)
    pairs = work.pairs.seconds(device) if work.pairs else 0.0
    return float(pairs + work.estimate(device).seconds(device))


def _turns(problem: Problem, knobs: Any) -> list[Turn | None]:
    """Copies of both inputs with their channels last, and of the filter, which is the second, with its depth last."""
    return [*turned_inputs(problem), _work(problem, knobs).turned]


class _Memory:
    """The workspace: sums of splits, or a tile's statistics, from its first byte on, then copies of inputs and of the
    epilogue's tensors (``places``), ``pairs`` of both inputs, and a ``result`` that is copied in the end."""

    def __init__(self, problem: Problem, knobs: Any) -> None:
        self.bytes = 4 * knobs.splits * prod(problem.result_shape) if knobs.splits > 1 else 0
        if problem.stats:
            self.bytes = 8 * problem.k * _work(problem, knobs).parts
        turns = [*_turns(problem, knobs), *turned_operands(problem)]
        self.places = [self._place(turn.size_bytes if turn else 0) for turn in turns]
        pairs = _work(problem, knobs).pairs
        self.pairs = [self._place(size) for size in (pairs.size_bytes if pairs else (0, 0))]
        result = turned_result(problem)
        self.result = self._place(result.size_bytes if result else 0)

    def _place(self, size: int) -> int:
        at = ceil(self.bytes / 256) * 256
        if size:
            self.bytes = at + size
        return at


@lru_cache(maxsize=512)
def _knobs(problem: Problem, device: Device) -> tuple[Any, ...]:
    assert isinstance(device, CudaDevice)
    seconds = {tile: _seconds(problem, device, tile) for tile in tiles(problem, device)}
    ordered = sorted(seconds, key=seconds.__getitem__)
    kinds: dict[Any, list[Any]] = {}
    for tile in ordered:
        kinds.setdefault((type(tile), isinstance(tile, Windows) and tile.teams > 1), []).append(tile)
    some = {tile for found in kinds.values() for tile in found[:_ALTERNATIVES]}
    best = [tile for tile in ordered if tile in some]
    # Bits that do not depend on the batch, and no sums in the workspace, are to be had without splits alone.
    whole = [tile for tile in ordered if tile.splits * tile.cluster == 1 and not isinstance(tile, Halo)][:1]
    return (*best, *(tile for tile in whole if tile not in best))
