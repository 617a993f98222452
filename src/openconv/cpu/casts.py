"""f16 and bf16 in pieces: a thread casts a piece to f32, computes it and casts the result back, all in its own cache.

The CPU computes low precision in f32. Where there is little arithmetic, casts of whole tensors are most of the time: a
depthwise 3x3 layer takes 70 us on 144 x 56 x 56 of f32 and a cast of its image 14, but one behind the other 187, since
what one core wrote is slow to get for the other. (Two Zen 5 cores, AVX2.) Here a piece is some channels of one image,
small enough for the second-level cache. One launch does all pieces, and within it each thread calls the engine's own
kernels for a problem of one piece (`runtime.noted`), on memory of its own:

    widen     x[n, c0:c1]            to f32: 16 zeros behind a bf16's bits; f16 by the machine's instruction
    compute   the engine's launches  as for a problem with n = 1 and so many channels, by this thread alone
    narrow    y[n, c0:c1]            rounded to nearest, ties to even; a NaN of bf16 becomes 0x7fc0

So f32 never leaves a core, and memory sees half of the bytes. Channels must not meet: groups are as many as channels.
What is computed for a channel is what the engine computes for it in the whole: pieces change no bit of a fprop or
dgrad. A wgrad needs all images of its channels at once, and adds their parts up, in f64, in an order of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding, ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from ..device import Device
from ..engine import Engine, Runner
from ..problem import Problem, output_size
from .runtime import Kernel, kernel, launch, noted, numbering
from .simd import argument, inline, lanes, load_scalar, next_of_share, store_scalar, thread_number
from .tree_lanes import MEMORY, Lanes, loaded, stored

__all__ = ["ENGINES", "Pieces", "available", "build", "cut_of"]

ENGINES = ("cpu.depthwise", "cpu.filter2d")
"""Those whose runs are launches of kernels on addresses and nothing else."""

_MOST = 8  # second-level caches that the f32 of a piece of a wgrad may fill: more is as slow as whole tensors
_BEYOND = 1.5  # what moving takes there, against within the cache
_TASKS = 8  # pieces at least, where there are channels enough, whatever the number of threads: bits must not follow it
_THREAD_MACS = 100_000  # some 10 us of work, for which another thread is worth waking
_TASK = 4000  # elements that could be moved while a piece begins: its launches and its weights, about 1 us
_RUN = 8  # and while a run of memory begins
_LINE, _PAGE = 64, 4096
_STAGGER = 17 * _LINE  # between tensors of a piece, which would otherwise meet in the same places of the cache

# Words of the table that the kernel reads: of the whole, of each slice of channels, of each kind of slice, and of each
# launch, behind which its arguments follow, each with what its value counts from.
TASKS, PLACES, THREAD_BYTES, INPUTS, A_IMAGE, B_IMAGE, OUT_IMAGE, WORDS = range(8)
KIND_AT, A_AT, B_AT, OUT_AT, W_AT, BIAS_AT, PLACE_WORDS = range(7)
COUNT, LENGTH, PITCH, F32_AT, RUN_WORDS = range(5)  # of runs, for each of a, b and the result
LAUNCHES, BLOCK_AT, KIND_WORDS = range(3 * RUN_WORDS, 3 * RUN_WORDS + 3)
FIXED, MINE, FILTERS, BIAS = range(4)


@functools.cache
def available(dtype: str) -> bool:
    """Whether kernels cast this dtype. f16 needs instructions for it, which come with AVX2; else LLVM calls a function
    for each number. What Numba compiles for does not always list its features, so LLVM is asked for the code."""
    if dtype != "f16":
        return dtype == "bf16"
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    text = "define <8 x half> @f(<8 x float> %x) {\n %y = fptrunc <8 x float> %x to <8 x half>\n ret <8 x half> %y\n}"
    code = machine.emit_assembly(binding.parse_assembly(text))
    return "vcvtps2ph" in code or "fcvtn" in code


@dataclass(frozen=True, eq=False)
class Pieces:
    """``run(a, b, out, scratch, bias)``, in pieces: a and out of low precision, b as well in a wgrad and else of f32;
    ``scratch`` has ``bytes`` bytes."""

    bytes: int
    run: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
    kinds: tuple[_Kind, ...]


class Cut(NamedTuple):
    """So many channels and rows of the result, counted along its first axis, are a piece; there are so many pieces."""

    channels: int
    rows: int
    pieces: int


def cut_of(core: Problem, dtype: str, engine: Engine, device: Device) -> Cut | None:
    """How to cut what this engine computes on tensors of this dtype; None where that does not apply, or a piece would
    not fit the second-level cache.

    Among all that fit, the one whose threads are done first, if what a thread moves is what takes it time. Channels
    first in nchw, rows of all channels in nhwc: so pieces are whole runs of memory. A wgrad sums over rows and images,
    so that it has channels alone; how it is cut must not follow the number of threads.
    """
    if engine.name not in ENGINES or core.groups != core.c or not available(dtype) or set(core.dtypes) != {"f32"}:
        return None
    wgrad, nhwc = core.direction == "wgrad", _is_nhwc(core)
    rows, step = core.spatial[0] if core.direction == "dgrad" else core.out[0], _step(engine)
    channels = [min(core.c, step * each) for each in _parts(-(-core.c // step))]
    ways = [(each, rows) for each in channels if wgrad or not nhwc]
    if not wgrad and core.rank > 1:
        ways += [(core.c if nhwc else min(channels), each) for each in _parts(rows)]
    images, threads = (core.n, _TASKS) if wgrad else (1, device.threads)
    best, least = None, 0.0
    for some, few in ways:
        size = images * some * _moved(core, _rows_in(core, few), few)
        beyond = 4 * size > device.cache_bytes
        if beyond and (not wgrad or 4 * size > _MOST * device.cache_bytes):
            continue
        pieces = core.n // images * -(-core.c // some) * -(-rows // few)
        if wgrad and pieces < 2:  # the whole has work for several threads
            continue
        runs = size // some if nhwc and some < core.c else 0
        took = -(-pieces // threads) * (size * (_BEYOND if beyond else 1.0) + _RUN * runs + _TASK)
        if best is None or took < least:
            best, least = Cut(some, few, pieces), took
    if best is None or (bands := _bands(core, best.rows)) is None:
        return None
    refused = (engine.refusals(_piece(core, best.channels, band), device) for band in bands)
    return best if all(next(reasons, None) is None for reasons in refused) else None


def _parts(count: int) -> list[int]:
    """What 1, 2, 3, ... parts of so many are, at most; from 32 parts on not every number of them."""
    found, parts = [], 1
    while parts <= count:
        found.append(-(-count // parts))
        parts += 1 + parts // 32
    return found


def _is_nhwc(core: Problem) -> bool:
    return core.rank > 1 and core.layouts[0] == "nhwc"


def _step(engine: Engine) -> int:
    """Channels that an engine computes together: as many as a vector has, where its lanes are channels."""
    return lanes(np.float32) if engine.name == "cpu.depthwise" else 1


def _rows_in(core: Problem, rows: int) -> int:
    """Rows that so many rows of the result are made of, at most."""
    reach, stride = core.dilation[0] * (core.filter[0] - 1), core.stride[0]
    if core.direction == "dgrad":
        return min(core.out[0], (rows - 1 + reach) // stride + 1)
    return min(core.spatial[0], (rows - 1) * stride + reach + 1)


def _moved(core: Problem, inside: int, rows: int) -> int:
    """Elements of f32 that a channel of a piece has: those of x and of its filters' y."""
    x, y = (rows, inside) if core.direction == "dgrad" else (inside, rows)
    return x * prod(core.spatial[1:]) + core.k // core.c * y * prod(core.out[1:])


@dataclass(frozen=True)
class _Band:
    """Rows of the result, and the rows of the image that they are made of, with the padding that is left."""

    first: int
    rows: int
    from_: int
    inside: int
    padding: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, tuple[int, int]]:
        return self.rows, self.inside, self.padding


def _bands(core: Problem, rows: int) -> list[_Band] | None:
    """The result in bands of so many rows; None where one is made of padding alone."""
    low, stride = core.padding[0][0], core.stride[0]
    reach, dgrad = core.dilation[0] * (core.filter[0] - 1), core.direction == "dgrad"
    total, available_rows = (core.spatial[0], core.out[0]) if dgrad else (core.out[0], core.spatial[0])
    if rows >= total:
        return [_Band(0, total, 0, available_rows, core.padding[0])]
    bands = []
    for first in range(0, total, rows):
        end = min(first + rows, total)
        if dgrad:  # dx[h] meets dy[q] where h + low = q * stride + r * dilation
            start, stop = -(-(first + low - reach) // stride), (end - 1 + low) // stride + 1
            start, stop = max(0, start), min(available_rows, stop)
            before = first + low - start * stride
            behind = max(0, (stop - start - 1) * stride + reach + 1 - (end - first) - before)
            size, wanted = end - first, stop - start
        else:
            top, bottom = first * stride - low, (end - 1) * stride - low + reach + 1
            start, stop = max(0, top), min(available_rows, bottom)
            before, behind = start - top, bottom - stop
            size, wanted = stop - start, end - first
        taps, dilation = core.filter[0], core.dilation[0]
        if stop <= start or before < 0 or output_size(size, taps, stride, before, behind, dilation) != wanted:
            return None
        bands.append(_Band(first, end - first, start, stop - start, (before, behind)))
    return bands


def build(core: Problem, dtype: str, engine: Engine, knobs: Any, device: Device, cut: Cut, bias: bool) -> Pieces:
    """Compile what is cut so."""
    bands = _bands(core, cut.rows)
    assert bands is not None, "cut_of has looked"
    slices = [(first, min(cut.channels, core.c - first)) for first in range(0, core.c, cut.channels)]
    alike = {(size, band.shape): (size, band) for _, size in slices for band in bands}
    alone = replace(device, threads=1)
    kinds = {key: _Kind(core, _piece(core, *each), engine, knobs, alone, bias) for key, each in alike.items()}
    per_thread = max(kind.bytes for kind in kinds.values())
    threads = max(1, min(device.threads, cut.pieces, core.macs // _THREAD_MACS))

    (first, second), result = core.inputs, core.result
    table = [0] * WORDS
    places = len(slices) * len(bands)
    table[TASKS], table[PLACES], table[THREAD_BYTES] = cut.pieces, places, per_thread
    table[INPUTS] = 2 if core.direction == "wgrad" else 1
    table[A_IMAGE], table[B_IMAGE], table[OUT_IMAGE] = (prod(_shapes(core)[at][1:]) for at in (first, second, result))
    at, words = {}, WORDS + PLACE_WORDS * places
    for each, kind in kinds.items():
        at[each], words = 8 * words, words + len(kind.words)
    for channel, size in slices:
        for band in bands:
            table += _place_words(core, channel, band, at[size, band.shape])
    for kind in kinds.values():
        table += kind.words
    kept, work = torch.tensor(table, dtype=torch.int64), _pieces_kernel(dtype)

    def run(a: Tensor, b: Tensor, out: Tensor, scratch: Tensor, bias: Tensor | None) -> None:
        vector = 0 if bias is None else bias.data_ptr()
        mine = -(-scratch.data_ptr() // _LINE) * _LINE
        given = kept.data_ptr(), a.data_ptr(), b.data_ptr(), out.data_ptr(), vector, mine
        launch(work, (*given, threads, numbering(threads), *[0] * threads), threads)

    return Pieces(per_thread * threads + _LINE, run, tuple(kinds.values()))


def _shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
    return problem.x_shape, problem.w_shape, problem.y_shape


def _piece(core: Problem, channels: int, band: _Band) -> Problem:
    """The problem of one piece."""
    rows = band.rows if core.direction == "dgrad" else band.inside
    return core.with_(
        n=core.n if core.direction == "wgrad" else 1, c=channels, k=channels * (core.k // core.c), groups=channels,
        spatial=(rows, *core.spatial[1:]), padding=(band.padding, *core.padding[1:]),
    )  # fmt: skip


def _place_words(core: Problem, channel: int, band: _Band, kind: int) -> list[int]:
    """Where a piece begins in each tensor of one image, in elements, and its kind."""
    fan, nhwc = core.k // core.c, _is_nhwc(core)
    filters = channel * fan * prod(core.filter)

    def begin(at: int) -> int:
        if at == 1:
            return filters
        first, row = channel * (fan if at == 2 else 1), band.first if at == core.result else band.from_
        shape = _shapes(core)[at]
        across = prod(shape[3:])
        return row * across * shape[1] + first if nhwc else (first * shape[2] + row) * across

    words = [0] * PLACE_WORDS
    words[KIND_AT], words[W_AT] = kind, filters
    words[A_AT], words[B_AT], words[OUT_AT] = (begin(at) for at in (*core.inputs, core.result))
    words[BIAS_AT] = channel * (fan if core.direction == "fprop" else 1)
    return words


class _Kind:
    """Pieces that are alike: the words of the table, and the bytes of f32 and of the engine's workspace."""

    def __init__(self, core: Problem, piece: Problem, engine: Engine, knobs: Any, device: Device, bias: bool) -> None:
        wgrad, shapes = core.direction == "wgrad", _shapes(piece)
        self.runner: Runner = engine.build(piece, device, knobs)  # owns what the launches read
        workspace = engine.workspace_bytes(piece, device, knobs)
        order = *piece.inputs, piece.result
        places, end = {}, 0
        for index in order:
            if wgrad or index != 1:
                places[index], end = end, _up(end + 4 * prod(shapes[index])) + _STAGGER
        workspace_at, end = end, _up(end + workspace) + _LINE
        memory = torch.empty(end + _LINE, dtype=torch.uint8)
        base = -memory.data_ptr() % _LINE

        def tensor(index: int) -> Tensor:
            if index not in places:
                return torch.empty(shapes[index])
            return memory[base + places[index] :][: 4 * prod(shapes[index])].view(torch.float32).view(shapes[index])

        a, b, out = (tensor(index) for index in order)
        vector = torch.empty(out.shape[1]) if bias else None
        space = memory[base + workspace_at :][:workspace] if workspace else None
        launches = noted(lambda: self.runner(a, b, out, space, vector))
        bases = [(MINE, memory.data_ptr() + base, end)]
        if not wgrad:
            bases.append((FILTERS, b.data_ptr(), b.nbytes))
        if vector is not None:
            bases.append((BIAS, vector.data_ptr(), vector.nbytes))
        block_at, end = end, _up(end + 8 * (2 + max(len(args) for _, args in launches)))
        self.words = [word for index in order for word in _runs(piece, core, index, places)]
        self.words += [len(launches), block_at]
        self.words += [word for work, args in launches for word in _call_words(work, args, bases)]
        self.kernels = [work for work, _ in launches]
        self.bytes = end + _PAGE  # not a power of two from one thread's to the next


def _up(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _runs(piece: Problem, core: Problem, index: int, places: dict[int, int]) -> tuple[int, int, int, int]:
    """How a piece of a tensor lies in the whole: runs, elements of each, from one to the next, and where its f32 is."""
    shape, whole, place = _shapes(piece)[index], _shapes(core)[index], places.get(index, 0)
    if index == 1 or shape[1:] == whole[1:]:
        return 1, prod(shape), 0, place
    if not _is_nhwc(core):
        if shape[2:] == whole[2:]:
            return shape[0], prod(shape[1:]), prod(whole[1:]), place
        return shape[1], prod(shape[2:]), prod(whole[2:]), place
    if shape[1] == whole[1]:
        return 1, prod(shape), 0, place
    return shape[0] * prod(shape[2:]), shape[1], whole[1], place


def _call_words(work: Kernel, args: tuple[int, ...], bases: list[tuple[int, int, int]]) -> Iterator[int]:
    """A launch for the table: the kernel's address, how many arguments, and each as a base and an offset from it."""
    yield from (work.address, len(args))
    for value in args:
        found = ((base, value - start) for base, start, size in bases if start <= value < start + size)
        yield from next(found, (FIXED, value))


# ---- kernels --------------------------------------------------------------------------------------------------


@inline
def _field(address, index):
    return load_scalar(np.int64, address + 8 * index)


@functools.cache
def _pieces_kernel(KIND: str) -> Kernel:
    @inline
    def widen_runs(source, to, runs):
        count, length, pitch = _field(runs, COUNT), _field(runs, LENGTH), _field(runs, PITCH)
        to += _field(runs, F32_AT)
        for run in range(count):
            i, row = 0, source + 2 * run * pitch
            while i + 32 <= length:
                _widen(KIND, 32, row + 2 * i, to + 4 * i)
                i += 32
            while i + 8 <= length:
                _widen(KIND, 8, row + 2 * i, to + 4 * i)
                i += 8
            while i < length:
                _widen(KIND, 1, row + 2 * i, to + 4 * i)
                i += 1
            to += 4 * length

    @inline
    def narrow_runs(source, to, runs):
        count, length, pitch = _field(runs, COUNT), _field(runs, LENGTH), _field(runs, PITCH)
        source += _field(runs, F32_AT)
        for run in range(count):
            i, row = 0, to + 2 * run * pitch
            while i + 32 <= length:
                _narrow(KIND, 32, source + 4 * i, row + 2 * i)
                i += 32
            while i + 8 <= length:
                _narrow(KIND, 8, source + 4 * i, row + 2 * i)
                i += 8
            while i < length:
                _narrow(KIND, 1, source + 4 * i, row + 2 * i)
                i += 1
            source += 4 * length

    @kernel
    def in_pieces(block):
        table, a, b, out = argument(block, 0), argument(block, 1), argument(block, 2), argument(block, 3)
        bias, threads = argument(block, 4), argument(block, 6)
        tasks, places, inputs = _field(table, TASKS), _field(table, PLACES), _field(table, INPUTS)
        number = thread_number(block, argument(block, 7))
        mine = argument(block, 5) + number * _field(table, THREAD_BYTES)
        task, away = next_of_share(block, 8, threads, number, 0, tasks)
        while task >= 0:
            image, entry = task // places, table + 8 * (WORDS + task % places * PLACE_WORDS)
            kind = table + _field(entry, KIND_AT)
            widen_runs(a + 2 * (image * _field(table, A_IMAGE) + _field(entry, A_AT)), mine, kind)
            if inputs > 1:
                widen_runs(b + 2 * (image * _field(table, B_IMAGE) + _field(entry, B_AT)), mine, kind + 8 * RUN_WORDS)
            private, call = mine + _field(kind, BLOCK_AT), kind + 8 * KIND_WORDS
            for _ in range(_field(kind, LAUNCHES)):
                address, count = _field(call, 0), _field(call, 1)
                store_scalar(private, 0)
                store_scalar(private + 8, 0)
                for i in range(count):
                    base, value = _field(call, 2 + 2 * i), _field(call, 3 + 2 * i)
                    if base == MINE:
                        value += mine
                    elif base == FILTERS:
                        value += b + 4 * _field(entry, W_AT)
                    elif base == BIAS:
                        value += bias + 4 * _field(entry, BIAS_AT)
                    store_scalar(private + 16 + 8 * i, value)
                _call(address, private)
                call += 8 * (2 + 2 * count)
            to = out + 2 * (image * _field(table, OUT_IMAGE) + _field(entry, OUT_AT))
            narrow_runs(mine, to, kind + 16 * RUN_WORDS)
            task, away = next_of_share(block, 8, threads, number, away, tasks)

    return in_pieces


@intrinsic
def _call(typingctx, address, block):
    """_call(address, block): a kernel, by this thread alone."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _widen(typingctx, kind, count, source, to):
    """_widen(KIND, n, source, to): n numbers, as f32."""
    if not isinstance(kind, types.StringLiteral) or not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        v = Lanes(builder, count.literal_value, wide=False)
        value = _emit_load(builder, kind.literal_value, v.count, args[2])
        _emit_store(builder, loaded(v, value, kind.literal_value), "f32", args[3])
        return context.get_dummy_value()

    return types.void(kind, count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _narrow(typingctx, kind, count, source, to):
    """_narrow(KIND, n, source, to): n numbers of f32, rounded."""
    if not isinstance(kind, types.StringLiteral) or not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        v = Lanes(builder, count.literal_value, wide=False)
        value = _emit_load(builder, "f32", v.count, args[2])
        _emit_store(builder, stored(v, value, kind.literal_value), kind.literal_value, args[3])
        return context.get_dummy_value()

    return types.void(kind, count, types.int64, types.int64), codegen


def _emit_load(builder: ir.IRBuilder, dtype: str, count: int, address: ir.Value) -> ir.Value:
    element, size = MEMORY[dtype]
    kind = ir.VectorType(element, count)
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=size, typ=kind)


def _emit_store(builder: ir.IRBuilder, value: ir.Value, dtype: str, address: ir.Value) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=MEMORY[dtype][1])
