"""cuda.igemm: implicit GEMM, all three passes, on tensor cores or in plain f32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd, prod

from torch import Tensor

from ..device import Device
from ..engine import Engine, Knobs, Runner, Traits
from ..problem import DTYPE_BYTES, Problem
from . import fusion, jit, render
from .channels_last import is_last, turned_inputs
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, TensorMap, aligned, pack, single

__all__ = ["Axis", "Igemm", "Tile", "axes"]

_SHARED = 228 << 10  # bytes of a multiprocessor, with 1024 that each block takes besides its own
_REGISTERS = 1 << 16
_ALTERNATIVES = 12
_MOST_STRIDE = 16  # dgrad: as many phases an axis
_MOST_WORKSPACE = 256 << 20
_CLOCK = 1.94e9  # cycles a second that shared memory seems to have, since it works beside the products
_STEP = 0.38e-6  # of a step, however little it multiplies
_MANY_STEPS = 24  # of which the last are too few to matter
_MOST_LISTED = 2048  # rows of the filter whose places a block lists
_MOST_COPIES = 16  # of a thread and step: their places are in registers beside the sums

# Results of a block, rows by columns, and its warps along both.
_SHAPES = (
    (128, 256, 2, 4), (256, 128, 4, 2), (128, 128, 2, 2), (256, 64, 4, 1), (64, 256, 1, 4), (128, 64, 2, 2),
    (64, 128, 2, 2), (64, 64, 2, 2), (256, 32, 4, 1), (128, 32, 4, 1), (64, 32, 2, 1), (256, 16, 4, 1), (128, 16, 4, 1),
    (32, 128, 1, 4), (32, 64, 1, 2), (128, 128, 2, 4), (256, 64, 4, 2), (192, 128, 4, 2), (96, 128, 2, 2),
    (192, 64, 4, 1), (96, 256, 2, 4), (128, 192, 2, 4), (128, 160, 4, 2),
)  # fmt: skip

# On CUDA cores a thread has 8 x 8 results at most: a warp 64 x 32.
_LANE_SHAPES = (
    (128, 128, 2, 4), (256, 64, 4, 2), (128, 64, 2, 2), (64, 128, 1, 4), (64, 64, 2, 2), (64, 64, 1, 2),
    (128, 32, 2, 1), (64, 32, 2, 1), (128, 16, 2, 1), (32, 128, 1, 4), (32, 64, 1, 2),
)  # fmt: skip


# Results of inputs.
_RESULTS = {
    "f16": ("f16", "f32"), "bf16": ("bf16", "f32"), "f32": ("f32",),
    "i8": ("i32", "f32", "f16", "bf16"),
    "e4m3": ("f16", "bf16", "f32"), "e5m2": ("f16", "bf16", "f32"),
}  # fmt: skip
_SMALL = ("e4m3", "e5m2")  # in any pair
_WANTED = "one of " + ", ".join(f"{name} to {' or '.join(results)}" for name, results in _RESULTS.items())


@dataclass(frozen=True)
class Tile(Knobs):
    """A block computes ``rows`` x ``columns`` results with ``warps_m`` x ``warps_n`` warps, ``depth`` terms of each sum
    at a time, of which ``stages`` are on their way. ``splits`` blocks share the sum of a result. Blocks that run at the
    same time have the same rows, or the same columns with ``rows_first``."""

    rows: int
    columns: int
    warps_m: int
    warps_n: int
    depth: int
    stages: int
    splits: int = 1
    rows_first: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


class Igemm(Engine):
    """Convolution as a matrix product whose matrix of windows is never stored, on the tensor cores of sm_80 and later,
    or on CUDA cores for f32 in ieee precision.

        fprop   y[pixel, k]      = sum over tap, c of  x[window of the pixel, tap, c] * w[k, tap, c]
        dgrad   dx[pixel, c]     = sum over tap, k of  dy[pixel that tap comes from, k] * w[k, tap, c]
        wgrad   dw[k, (tap, c)]  = sum over pixels of  dy[pixel, k] * x[window of the pixel, tap, c]

    A block brings pieces of both matrices from where they lie in the tensors into shared memory, several steps ahead,
    and multiplies them from there. With a stride, dgrad computes each phase of dx from the taps that meet it, so that
    no product has an inserted zero for a factor. Sums that are too few to fill the GPU are split, and the splits added
    up in a fixed order.

    A prologue of x, other results of the epilogue and statistics of y are computed on the way: the prologue in f32,
    where x lies in shared memory; statistics from the results there, a block's sums going to the workspace.

    Pieces lie along the channels. Inputs with their channels first are copied before; results are stored in either
    layout as they are. Wins wherever operations are the limit and Hopper's own instructions are not there.
    """

    name = "cuda.igemm"
    device = "cuda"
    takes_epilogue = True
    takes_fusion = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if not isinstance(device, CudaDevice) or device.capability < 80:
            yield f"the device is {getattr(device, 'arch', device.name)}; its products are those of sm_80 and later"
        first, second, result = _dtypes(problem)
        alike = first == second or (first in _SMALL and second in _SMALL)
        if not alike or result not in _RESULTS.get(first, ()):
            yield f"dtypes are {'*'.join(problem.dtypes)}; wanted {_WANTED}"
        elif DTYPE_BYTES[first] == 1 and problem.direction != "fprop":
            yield f"the pass is {problem.direction} of {first}; wanted fprop"
        elif first in _SMALL and isinstance(device, CudaDevice) and device.capability < 89:
            yield f"the device is {device.arch}; {first} products are those of sm_89 and later"
        if problem.direction == "dgrad" and max(problem.stride) > _MOST_STRIDE:
            yield f"stride is {problem.stride}; wanted at most {_MOST_STRIDE} in dgrad"
        if not problem.prologue.is_identity and problem.dtypes[0] not in ("f16", "bf16", "f32"):
            yield f"the prologue is on {problem.dtypes[0]}; it is computed for f16, bf16 and f32"
        if problem.is_fused and problem.result_dtype not in ("f16", "bf16", "f32"):
            yield f"'{problem.fusion}' has results of {problem.result_dtype}; they are computed for f16, bf16 and f32"
        if problem.groups > 65535:
            yield f"groups is {problem.groups}; wanted at most 65535"
        if problem.is_empty:
            yield "a tensor is empty"
        elif max(problem.n * prod(problem.out), problem.n * prod(problem.spatial), prod(problem.w_shape)) >= 2**31:
            yield "the pixels or the filters are too many for an int"

    def traits(self, problem: Problem, knobs: Tile) -> Traits:
        # Additions within an mma cut bits off rather than round: two units in the last place for 32 bytes of depth.
        work = _work(problem, knobs)
        chain = ceil(work.steps / knobs.splits) * knobs.depth
        error = (chain * work.size / 16 * work.products + 2 * knobs.splits + 16) * 2.0**-23
        if work.sums == "int":
            error = 2.0**-24  # of a sum that becomes a float
        elif work.lanes:
            error += chain * 2.0**-24
        elif work.products == 3:  # sums of eight terms, which are then added as in f32
            error = (chain / 16 + 2 * knobs.splits + 24) * 2.0**-23
        elif work.dtype == "f32":
            error += 2.0**-10
        accumulator = "i32" if work.dtype == "i8" else "f32"
        return Traits(accumulator, error, batch_invariant=problem.direction == "wgrad" or knobs.splits == 1)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: Tile) -> int:
        return _Memory(problem, knobs).bytes

    def copies(self, problem: Problem, knobs: Tile) -> tuple[str, ...]:
        return tuple(f"copy {turned.name} from nchw to nhwc" for turned in turned_inputs(problem) if turned)

    def knobs(self, problem: Problem, device: Device) -> tuple[Tile, ...]:
        return _knobs(problem, device)

    def cost(self, problem: Problem, device: Device, knobs: Tile) -> float:
        assert isinstance(device, CudaDevice)
        seconds = _work(problem, knobs, _copies_boxes(device)).seconds(device)
        # By the median of eight layers on an H200: a dgrad whose epilogue reads a tensor has fewer stages.
        reads = problem.direction == "dgrad" and any(operand.kind == "tensor" for operand in problem.epilogue.operands)
        return 1.08 * seconds if reads else seconds

    def build(self, problem: Problem, device: Device, knobs: Tile) -> Runner:
        assert isinstance(device, CudaDevice)
        work, memory = _work(problem, knobs, _copies_boxes(device)), _Memory(problem, knobs)
        turned = turned_inputs(problem)
        main, *others = self.sources(problem, device, knobs)
        name = "igemm_wgrad" if problem.direction == "wgrad" else "igemm_conv"
        follows = any(turned)
        first = Launch(main, name, device, work.grid, (knobs.threads,), work.params, work.shared, follows, work.maps)
        if not memory.bytes and not problem.epilogue.also:
            return single(first, 16)
        turns = [each.launch(device) if each else None for each in turned]
        second = None
        if knobs.splits > 1:
            grid = (ceil(prod(problem.result_shape) / (work.sum_together * 256 // work.sum_rows)),)
            second = Launch(others[0], "igemm_sum", device, grid, (256,), work.sum_params, follows=True)
        third = None
        if problem.stats:
            grid, params = (ceil(2 * problem.k / 32),), pack(3, (), (work.tiles, problem.k))
            third = Launch(others[0], "igemm_stats", device, grid, (1024,), params, follows=True)
        vectors, also, count = len(problem.prologue.operands), len(problem.epilogue.also), work.pointers
        spare = (0,) * max(0, 1 - count) if problem.direction != "wgrad" else ()

        def run(
            a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...],
            more: tuple[Tensor, ...] = (),
        ) -> None:  # fmt: skip
            others, sums = (more[:also], more[also:]) if more else ((), ())
            a, b, result, *held = [aligned(each, 16) for each in (a, b, out, *operands, *others)]
            pointers = tuple([each.data_ptr() for each in held])
            base, to = workspace.data_ptr() if workspace is not None else 0, result.data_ptr()
            inputs = [a.data_ptr(), b.data_ptr()]
            for at, turn in enumerate(turns):
                if turn is not None:
                    turn(inputs[at], base + memory.inputs[at])
                    inputs[at] = base + memory.inputs[at]
            first(*inputs, to, *pointers, *spare, base)
            if second is not None:
                second(base, to, *pointers[vectors:])
            if third is not None:
                third(base, *[each.data_ptr() for each in sums])
            if result is not out:
                out.copy_(result)
            if others:
                for given, made in zip(others, held[len(operands) :], strict=True):
                    if made is not given:
                        given.copy_(made)

        return run

    def sources(self, problem: Problem, device: Device, knobs: Tile) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        assert isinstance(device, CudaDevice)
        work = _work(problem, knobs, _copies_boxes(device))
        file = "igemm_wgrad.cu" if problem.direction == "wgrad" else "igemm.cu"
        made = [jit.Source(file, fusion.traits(_stored(problem), work.constants))]
        if knobs.splits > 1:
            constants: dict[str, int | bool | str] = {
                "together": work.sum_together, "rows": work.sum_rows, "Products": work.sums,
                "last": work.last, "filter": problem.direction == "wgrad",
            }  # fmt: skip
            text = fusion.further(problem) + render.traits(_stored(problem), constants)
            made.append(jit.Source("igemm_sum.cu", text))
        if problem.stats:
            made.append(jit.Source("igemm_stats.cu"))
        return made + [turn.source for turn in turned_inputs(problem) if turn]


def _dtypes(problem: Problem) -> tuple[str, str, str]:
    """Of the two inputs and the result."""
    first, second = problem.inputs
    return problem.dtypes[first], problem.dtypes[second], problem.result_dtype


def _copies_boxes(device: CudaDevice) -> bool:
    """Whether a thread can ask for boxes of a tensor: ``boxes`` of :class:`_Work`."""
    return device.capability >= 90


def _stored(problem: Problem) -> Problem:
    """The problem with small floats as the bytes that they lie in memory as."""
    x, w, y = ("u8" if name in _SMALL else name for name in problem.dtypes)
    return problem.with_(dtypes=(x, w, y))


def _lanes(problem: Problem) -> bool:
    """Whether products are those of CUDA cores, in f32."""
    return _dtypes(problem)[0] == "f32" and problem.precision == "ieee"


class _Memory:
    """The workspace: sums of splits, or a tile's statistics, from its first byte on, then copies of inputs."""

    def __init__(self, problem: Problem, knobs: Tile) -> None:
        self.bytes = 4 * knobs.splits * prod(problem.result_shape) if knobs.splits > 1 else 0
        if problem.stats:
            self.bytes = 8 * problem.k * ceil(problem.n * prod(problem.out) / knobs.rows)
        self.inputs = [0, 0]
        for at, turn in enumerate(turned_inputs(problem)):
            if turn:
                self.inputs[at] = ceil(self.bytes / 256) * 256
                self.bytes = self.inputs[at] + turn.size_bytes


# -- how a problem is cut up ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One axis of fprop or dgrad: ``count`` pixels of a phase, ``taps`` of each phase as (first of the filter, how
    many, where the first reads)."""

    numbers: tuple[int, ...]
    count: int
    taps: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=512)
def axes(problem: Problem) -> list[Axis]:
    """The axes of a fprop or dgrad."""
    found = []
    each = zip(
        problem.spatial, problem.out, problem.filter, problem.stride, problem.padding, problem.dilation, strict=True
    )
    for size, out, taps, stride, (pad, _), dilation in each:
        if problem.direction == "fprop":
            found.append(Axis((size, out, stride, 1, dilation, taps, 1), out, ((0, taps, -pad),)))
            continue
        # Position f + stride * i of dx meets tap r where f + pad - r * dilation is a multiple of the stride.
        common = gcd(stride, dilation)
        every, phases = stride // common, []
        for phase in range(min(stride, size)):
            met = [r for r in range(min(every, taps)) if (phase + pad - r * dilation) % stride == 0]
            first = met[0] if met else 0
            count = len(range(first, taps, every)) if met else 0
            phases.append((first, count, (phase + pad - first * dilation) // stride if met else 0))
        numbers = (out, size, 1, stride, -dilation // common, taps, every)
        found.append(Axis(numbers, ceil(size / stride), tuple(phases)))
    return found


class _Work:
    """A problem and knobs as the kernels take them. ``boxes``: the GPU copies boxes of a tensor by itself."""

    def __init__(self, problem: Problem, knobs: Tile, boxes: bool = False) -> None:
        if knobs.splits > 1 and (problem.stats or problem.epilogue.also):
            raise ValueError(f"splits is {knobs.splits} for '{problem.fusion}'; wanted 1: a block needs whole sums")
        self.problem, self.knobs = problem, knobs
        self.pointers = sum(map(len, (problem.prologue.operands, problem.epilogue.operands, problem.epilogue.also)))
        self.dtype, second, _ = _dtypes(problem)
        self.size = DTYPE_BYTES[self.dtype]
        self.lanes = _lanes(problem)
        self.products = 0 if self.lanes else 3 if self.dtype == "f32" and problem.precision == "tf32x3" else 1
        self.sums = "int" if self.dtype == "i8" else "float"
        rank, groups = problem.rank, problem.groups
        c, k, taps = problem.c // groups, problem.k // groups, prod(problem.filter)
        constants: dict[str, int | bool | str] = {
            "rank": rank, "depth": knobs.depth, "warps_m": knobs.warps_m, "warps_n": knobs.warps_n,
            "stages": knobs.stages, "rows_first": knobs.rows_first, "parted": knobs.splits > 1, "Products": self.sums,
            "products": self.products,
            "Factors": f"tensor::Bytes<tensor::{self.dtype}, tensor::{second}>" if self.dtype in _SMALL else self.dtype,
        }  # fmt: skip
        piece = self.piece = 16 // self.size
        stage = knobs.depth * self.size * (knobs.rows + knobs.columns)
        self.last = is_last(problem, problem.result)
        constants |= {"last": self.last, "follows": any(turned_inputs(problem))}
        kinds = {operand.kind for operand in problem.epilogue.operands}
        pairs = "channel" not in kinds or problem.result_channels // groups % 2 == 0
        tensors = [at for at, operand in enumerate(problem.epilogue.operands) if operand.kind == "tensor"]
        out = DTYPE_BYTES[problem.result_dtype]
        # One tensor that lies as results do comes to shared memory beside the steps.
        whole = self.last and out == 2 and problem.result_channels // groups % 8 == 0 and not problem.epilogue.also
        held = tensors[0] + 1 if len(tensors) == 1 and whole and pairs and knobs.splits == 1 else 0
        self.early = problem.direction != "wgrad" and knobs.splits == 1 and pairs and (not tensors or held > 0)
        # As boxes, if its pixels follow each other in a block as they do in memory; results leave as such, so that no
        # box may have channels of the next group.
        stepped = problem.direction == "dgrad" and max(problem.stride) > 1
        apart = groups == 1 or problem.result_channels // groups % knobs.columns == 0
        boxed = boxes and held > 0 and not stepped and knobs.columns % 64 == 0 and apart and not problem.stats
        self.maps: tuple[TensorMap, ...] = ()
        if boxed:
            pointer, every = 2 + len(problem.prologue.operands) + held, problem.result_channels
            whole_size = every, prod(problem.result_shape) // every
            self.maps = tuple(TensorMap(at, whole_size, (out * every,), (64, knobs.rows), 128) for at in (pointer, 2))
        rows, columns = (knobs.rows, knobs.columns)
        if problem.direction != "wgrad" and not self.last:
            rows, columns = columns, rows
        rounded = self.early or (problem.direction == "wgrad" and knobs.splits == 1)
        results = rows * (columns + (0 if boxed else 8)) * (out if rounded else 4)
        self.shared = knobs.stages * stage + results if held else max(knobs.stages * stage, results)
        self.shared += 16 if boxed else 0
        # Windows, which lie there as well if nothing looks at them once boxes come.
        room = results if boxed and problem.prologue.is_identity and self.products == 1 else 0
        vectors = [at for at, operand in enumerate(problem.epilogue.operands) if operand.kind == "channel"]
        if self.early and vectors:
            self.shared += len(problem.epilogue.operands) * knobs.columns * out
        if problem.direction == "wgrad":
            pixels, columns = problem.n * prod(problem.out), taps * c
            self.steps = self.longest = ceil(pixels / knobs.depth)
            self.grid = (ceil(k / knobs.rows) * ceil(columns / knobs.columns), groups, knobs.splits)
            constants |= {
                "filters": knobs.rows, "columns": knobs.columns, "a_vector": gcd(piece, k), "b_vector": gcd(piece, c),
                "together": gcd(4 if knobs.splits > 1 else 16 // out, columns) if self.last or knobs.splits > 1 else 1,
            }  # fmt: skip
            sizes = zip(
                problem.spatial, problem.stride, problem.padding, problem.dilation, problem.filter, problem.out,
                strict=True,
            )  # fmt: skip
            numbers = [v for size, s, (pad, _), d, f, out in sizes for v in (size, s, pad, d, f, *divisor(out))]
            narrow = [pixels, c, k, problem.c, problem.k, columns, knobs.splits]
            narrow += [*divisor(ceil(k / knobs.rows) if knobs.rows_first else ceil(columns / knobs.columns)), *numbers]
            self.params = pack(4 + self.pointers, (prod(problem.w_shape),), narrow)
            window_steps = 2 if problem.prologue.is_identity else knobs.stages
            self.shared += window_steps * knobs.depth * (16 if render.index_type(problem) == "int" else 32)
            self.inner, self.phases, self.plane = columns if self.last else 1, 1, 1
        else:
            fprop = problem.direction == "fprop"
            channels, results = (c, k) if fprop else (k, c)
            axes_ = axes(problem)
            phases = self.phases = prod(len(axis.taps) for axis in axes_)
            # Results that lie side by side: of a pixel, or pixels of an image unless a phase has every other one.
            self.plane = prod(problem.out if fprop else problem.spatial)
            self.inner = results if self.last else self.plane if phases == 1 else 1
            span = channels if fprop else ceil(channels / knobs.depth) * knobs.depth
            bits = (32 if taps <= 32 else 64 if taps <= 64 else 0) if piece // gcd(piece, channels) <= 8 else 0
            listed, least = 0, 64 // self.size
            # Whatever the knobs: the order of a sum does not depend on them.
            gaps = 8 * ceil(channels / least) * least > 9 * channels
            if not fprop and bits and taps * channels <= _MOST_LISTED and gaps:
                span = channels
                listed = ceil(taps * channels / knobs.depth) * knobs.depth
            rows = problem.n * prod(axis.count for axis in axes_)
            self.steps = ceil(taps * span / knobs.depth)
            self.longest = ceil(prod(max(count for _, count, _ in axis.taps) for axis in axes_) * span / knobs.depth)
            self.grid = (ceil(rows / knobs.rows) * ceil(results / knobs.columns), groups, phases * knobs.splits)
            index = 4 if render.index_type(problem) == "int" else 8
            window = 2 * max(index, bits // 8)
            windows = knobs.rows * (window + index + 4 * rank) + 4 * max(1, listed)
            shares = windows + 64 <= room
            self.shared += 0 if shares else windows
            counts = [len(axis.taps) for axis in axes_] + [1] * (3 - rank)
            constants |= {
                "pixels": knobs.rows, "filters": knobs.columns, "along": fprop,
                "bits": bits, "masked": channels % piece == 0 and span >= knobs.depth and bits == 32, "listed": listed,
                "a_vector": gcd(piece, channels), "b_vector": gcd(piece, taps * c if fprop else c),
                "together": gcd(4 if knobs.splits > 1 else 16 // out, self.inner),
                "early": self.early, "tensors": sum(1 << at for at in tensors), "held": held,
                "boxed": boxed, "shares": shares, "vectors": sum(1 << at for at in vectors) if self.early else 0,
                "vector": gcd(16 // out, results),
                "phases_0": counts[0], "phases_1": counts[1], "phases_2": counts[2],
                "backwards": prod(axis.taps[0][1] for axis in axes_) < prod(axis.taps[-1][1] for axis in axes_),
            }  # fmt: skip
            total = {"fprop": (problem.c, problem.k), "dgrad": (problem.k, problem.c)}[problem.direction]
            narrow = [rows, channels, results, *total, span, taps * c, c, knobs.splits]
            narrow += divisor(ceil(rows / knobs.rows) if knobs.rows_first else ceil(results / knobs.columns))
            for axis in axes_:
                narrow += [*axis.numbers, *divisor(axis.count)]
            narrow += [value for axis in axes_ for taps_ in axis.taps for value in taps_]
            self.tiles = ceil(rows / knobs.rows)
            pointers = 4 + max(1, self.pointers)
            self.params = pack(pointers, (prod(problem.result_shape), self.plane), narrow)
        self.constants = constants
        constants |= {"residents": self.residents, "drains": self.drains, "scarce": self.scarce}

    @property
    def whole(self) -> bool:
        """Whether all copies are of 16 bytes."""
        return self.vectors == (self.piece, self.piece)

    @property
    def large(self) -> bool:
        """Whether threads may have as many sums as fit: their places and operands are few."""
        return self.lanes or (self.whole and self.products == 1 and not self.by_value)

    @property
    def vectors(self) -> tuple[int, int]:
        """Elements of a copy, of both operands."""
        return int(self.constants["a_vector"]), int(self.constants["b_vector"])

    @property
    def copy_cycles(self) -> tuple[int, int]:
        """Instructions of a warp for a copy, of both operands."""
        a, b = (41 if size >= 4 else 33 for size in (each * self.size for each in self.vectors))
        return 113 if self.apart and self.vectors[0] < self.piece else a, b

    @property
    def parts(self) -> tuple[int, int]:
        """Copies of a thread and step, of both operands."""
        a, b = self.vectors
        each = self.knobs.depth / self.knobs.threads
        return ceil(self.knobs.rows * each / a), ceil(self.knobs.columns * each / b)

    @property
    def apart(self) -> bool:
        """Whether the tap of each copy of the image is looked up by itself."""
        return self.problem.direction != "wgrad" and not self.constants["bits"]

    @property
    def lane_share(self) -> float:
        """Of CUDA cores: multiplications among the instructions of a step, about as compiled."""
        tile, (a, b) = self.knobs, self.parts
        tm, tn = tile.rows // tile.warps_m // 8, tile.columns // tile.warps_n // 4
        products = tm * tn * tile.depth
        return products / (products + (tm + tn) * tile.depth / 4 + 50 + 8 * (a + b) + (40 * a if self.apart else 0))

    @property
    def unrolls(self) -> bool:
        """Whether the compiler takes the loop over a step's slices apart: of CUDA cores, not if it is too long."""
        tile = self.knobs
        sums = tile.rows * tile.columns // tile.threads
        return not (self.lanes and self.apart) or self.parts[0] * sums <= 512

    @property
    def fragments(self) -> tuple[int, int]:
        """Of a warp, along both sides: sixteen results each."""
        tile = self.knobs
        return tile.rows // tile.warps_m // 16, tile.columns // tile.warps_n // 16

    @property
    def drains(self) -> bool:
        """Whether the last steps have a loop of their own. In fprop, some tiles have a longer loop before it then."""
        mt, nt = self.fragments
        longer = self.problem.direction == "fprop" and (mt * nt == 16 or nt == 5)
        many = ceil(self.longest / self.knobs.splits) >= _MANY_STEPS
        return self.products == 1 and self.whole and not (longer and many)

    @property
    def scarce(self) -> bool:
        """Whether sums and four slices of operands leave few registers."""
        return prod(self.fragments) == 16 and self.knobs.depth * self.size == 128

    @property
    def by_value(self) -> int:
        """Operands that lie across the depth and are read value by value."""
        tensor_cores = self.size == 4 and not self.lanes
        return {"fprop": 0, "dgrad": 1, "wgrad": 2}[self.problem.direction] if tensor_cores else 0

    @property
    def registers(self) -> int:
        """Of a thread, about: sums, operands, and the places that it copies from."""
        tile = self.knobs
        mt, nt = self.fragments
        if self.lanes:
            deep = 2 if self.problem.direction == "wgrad" else 4  # of the vectors that a lane has of both operands
            return 8 * mt * nt + (2 * mt + 8 * nt) * deep + (72 if self.whole else 100)
        parts = (8 * nt + 8 if self.products > 1 else 0) + 6 * self.by_value
        if not self.whole and self.size < 4:  # pieces that are loaded a step ahead
            parts += 4 * (tile.rows + tile.columns) * tile.depth // self.piece // tile.threads
        return 8 * mt * nt + 4 * mt + 8 * nt + parts + (72 if self.whole and self.problem.direction != "wgrad" else 100)

    @property
    def residents(self) -> int:
        """Blocks that a multiprocessor holds."""
        # A quarter of the multiprocessor has a quarter of the registers, and whole warps.
        warps = _REGISTERS // 4 // (32 * min(255, self.registers))
        return max(1, min(4 * warps // (self.knobs.threads // 32), 8, _SHARED // (self.shared + 1024)))

    @property
    def sum_together(self) -> int:
        return gcd(4, self.plane) if self.problem.direction != "wgrad" and not self.last else gcd(4, self.inner)

    @property
    def sum_rows(self) -> int:
        return 8 if self.knobs.splits > 8 else 1

    @property
    def sum_params(self) -> bytes:
        problem = self.problem
        filter_ = problem.c // problem.groups if problem.direction == "wgrad" else problem.result_channels
        row = prod(problem.w_shape[1:]) if problem.direction == "wgrad" else filter_
        pointers = 2 + max(1, len(problem.epilogue.operands))
        return pack(pointers, (prod(problem.result_shape), self.plane), (self.knobs.splits, row, filter_))

    def seconds(self, device: CudaDevice) -> float:
        """Predicted time: fitted to 7680 times of 960 layers in f16 on an H200, of which half are within 8%."""
        problem, tile = self.problem, self.knobs
        mt, nt = self.fragments
        # A step: its products, of which mma.sync does two thirds as many as Hopper's wgmma, or what shared memory
        # gives and takes at 128 bytes a cycle.
        rate = (
            device.half_flops / device.threads * (0.81 if device.capability == 90 else 1.1) * 2 / self.size
        )  # of f16: half as many of f32, twice as many of i8
        if self.dtype in _SMALL and 90 <= device.capability < 120:  # as products of f16
            rate *= 0.45
        if self.size == 4:  # reading value by value and taking values apart come between products
            rate *= 0.7 if self.products == 3 else (0.9, 0.75, 0.75)[self.by_value]
        products = 2.0 * tile.rows * tile.columns * tile.depth * self.products / rate
        read = tile.warps_m * tile.warps_n * tile.depth * self.size / 32 * (mt + nt) * 4
        if self.lanes:  # they share vectors of 16 bytes, of two cycles each
            rate = 1.1 * device.flops / device.threads
            products = 2.0 * tile.rows * tile.columns * tile.depth / rate / self.lane_share
            read = tile.warps_m * tile.warps_n * tile.depth * (mt + 2 * nt)
        filled = (tile.rows + tile.columns) * tile.depth * self.size / 128
        # Working out where copies go to and come from; four warps do so at a time.
        asked = sum(count * cycles for count, cycles in zip(self.parts, self.copy_cycles, strict=True))
        step = max(products, (read + filled) / _CLOCK, tile.threads / 32 * asked / 4 / 1.7e9)
        step += (0.087e-6 if problem.direction == "wgrad" else 0.021e-6) / self.residents  # barriers
        least = _STEP + (0.38e-6 if min(self.vectors) * self.size < 4 else 0.0)
        steps = ceil(self.steps / tile.splits / self.phases)
        blocks = prod(self.grid)

        def turn(blocks_each: int, steps: int = steps) -> float:
            """Blocks of a multiprocessor side by side: each waits for its first data and stores its results."""
            end = tile.rows * tile.columns / 128**2 * 1.15e-6
            few = 1.06 if blocks_each * tile.threads < 256 else 1.0  # warps, to work while others wait
            return steps * max(blocks_each * step * few, least) + 2.15e-6 + blocks_each * end

        full, rest = divmod(blocks, device.threads * self.residents)
        busy = full * turn(self.residents) + (turn(ceil(rest / device.threads)) if rest else 0.0)
        busy = max(busy, turn(1, ceil(self.longest / tile.splits)))
        cached = blocks * steps * tile.depth * self.size * (tile.rows + tile.columns) / (3.2 * device.bandwidth)
        floors = sorted((busy, cached, problem.min_bytes / (1.2 * device.bandwidth)))
        apart = 1.95e-6 + 8.0 * tile.splits * prod(problem.result_shape) / (3.5 * device.bandwidth)
        turned = sum(2.2e-6 + 1.2 * turn.seconds(device) for turn in turned_inputs(problem) if turn)
        turned += 4e-6 * problem.stats
        if (
            not problem.prologue.is_identity
        ):  # each value of x that comes to shared memory is read, computed and written
            staged = blocks * steps * tile.depth * (tile.columns if problem.direction == "wgrad" else tile.rows)
            turned += 2e-6 + staged / (20e9 * device.threads)
        if problem.direction != "wgrad" and self.inner % 2:  # results leave one by one
            turned += 12.0 * prod(problem.result_shape) / device.bandwidth
        return 3.5e-6 + floors[2] + 0.56 * floors[1] + (apart if tile.splits > 1 else 0.0) + turned


_work = lru_cache(maxsize=4096)(_Work)


@lru_cache(maxsize=512)
def _knobs(problem: Problem, device: Device) -> tuple[Tile, ...]:
    assert isinstance(device, CudaDevice)
    boxes = _copies_boxes(device)
    seconds = {tile: _work(problem, tile, boxes).seconds(device) for tile in _tiles(problem, device)}
    ordered = sorted(seconds, key=seconds.__getitem__)
    best = ordered[:_ALTERNATIVES]
    # Which order shares more in L2 is not predicted: the other one is for the tuner.
    best += [replace(tile, rows_first=True) for tile in best[:1]]
    # Bits that do not depend on the batch, and no sums in the workspace, are to be had without splits alone.
    whole = [tile for tile in ordered if tile.splits == 1][:1]
    return (*best, *(tile for tile in whole if tile not in best))


def _tiles(problem: Problem, device: CudaDevice) -> Iterator[Tile]:
    lanes, wgrad, boxes = _lanes(problem), problem.direction == "wgrad", _copies_boxes(device)
    # The first of those that are predicted to take as long is chosen: in wgrad tall ones of few stages are faster.
    shapes = sorted(_SHAPES, key=lambda shape: shape[1] - shape[0]) if wgrad else _SHAPES
    for rows, columns, warps_m, warps_n in _LANE_SHAPES if lanes else shapes:
        # In bytes. Of products in three parts, those of four slices at once are more than registers hold.
        for depth in (64,) if problem.precision == "tf32x3" or lanes else (128, 64):
            for stages in (3, 4) if wgrad else (4, 3):
                tile = Tile(rows, columns, warps_m, warps_n, depth // DTYPE_BYTES[_dtypes(problem)[0]], stages)
                if not _shares(problem, tile):
                    continue
                work = _work(problem, tile, boxes)
                if depth == 128 and not work.whole:  # long to compile
                    continue
                if work.shared > min(_SHARED, device.shared_bytes) or (work.registers > 240 and not work.large):
                    continue
                if not work.unrolls:
                    continue
                yield tile
                yield from _split(problem, tile, work, device)


def _shares(problem: Problem, tile: Tile) -> bool:
    """Whether the threads share the copies of a step evenly, and no thread has too many."""
    size = DTYPE_BYTES[_dtypes(problem)[0]]
    piece = 16 // size
    across = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}[problem.direction]
    for along, turned in zip((tile.rows, tile.columns), across, strict=True):
        rows, pieces = (tile.depth, along // piece) if turned else (along, tile.depth // piece)
        if turned and size == 4 and pieces % 8:  # of values that are read one by one, rows of whole 128 bytes
            return False
        if tile.threads % pieces or rows % (tile.threads // pieces):
            return False
    if problem.stats and tile.columns & (tile.columns - 1):  # threads share the columns evenly
        return False
    return (tile.rows + tile.columns) * tile.depth // piece <= _MOST_COPIES * tile.threads


def _split(problem: Problem, tile: Tile, work: _Work, device: CudaDevice) -> Iterator[Tile]:
    """Splits that fill the GPU some times over, while each has some steps. None where blocks need whole sums."""
    if problem.stats or problem.epilogue.also:
        return
    slots = device.threads * work.residents
    found: set[int] = set()
    for waves in range(1, 7):
        count = waves * slots // prod(work.grid)
        if problem.direction != "wgrad":
            count = min(count, 16)
        found.add(min(count, work.steps // 4))
    for count in sorted(found):
        if count > 1 and 4 * count * prod(problem.result_shape) <= _MOST_WORKSPACE:
            yield Tile(tile.rows, tile.columns, tile.warps_m, tile.warps_n, tile.depth, tile.stages, count)
