"""Launch: a kernel with everything but its pointers packed beforehand.

A kernel of ours takes one argument, a struct ``Params``: its pointers first, then what has eight bytes, then what has
four, so that there are no gaps. The struct is packed when a plan is built; a call writes the pointers and launches on
torch's current stream. The driver copies the struct while it launches, so that each thread needs a copy of its own and
no more. Nothing waits for the GPU, and capture into a CUDA graph records the launch as it is.

Kernels that copy boxes (``common/bulk.cuh``) have maps of tensors at the end of ``Params``, each from a multiple of 64
bytes on. A map is encoded when a plan is built; a call changes its address if the tensor has another one than before.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from ..engine import Runner
from . import jit
from .device import CudaDevice

__all__ = ["Launch", "Single", "TensorMap", "WindowMap", "aligned", "pack", "single"]

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def pack(pointers: int, wide: Sequence[int] = (), narrow: Sequence[int] = ()) -> bytes:
    """``Params`` with its pointers still null."""
    return struct.pack(f"={pointers}q{len(wide)}q{len(narrow)}i", *(0,) * pointers, *wide, *narrow)


_MAP_BYTES, _MAP_ALIGNED = 128, 64
_MAPPED_TYPES = {1: "UINT8", 2: "UINT16", 4: "FLOAT32"}  # by bytes of an element


@dataclass(frozen=True)
class TensorMap:
    """A tensor as boxes are copied from it: which pointer of the launch is its first element, its sizes, the bytes from
    one element to the next along all axes but the first, the box, the bytes of a row that are swizzled in shared
    memory, and those of an element. Of one that ``rounds``, f32 comes as the nearest tf32."""

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    element: int = 2
    rounds: bool = False

    def encode(self) -> bytes:
        """The driver's form of it, with some address."""
        from cuda.bindings import driver

        narrow = driver.cuuint32_t
        return _encoded(
            driver.cuTensorMapEncodeTiled, self,
            ([narrow(size) for size in self.box], [narrow(1)] * len(self.box)),
        )  # fmt: skip


@dataclass(frozen=True)
class WindowMap:
    """A tensor of images, channels first in ``sizes`` and images last, as boxes of windows are copied from it
    (``common/bulk_windows.cuh``): ``box`` is the channels and the pixels of one. Along each axis between, in the order
    of ``sizes``, the first pixel's first tap is at ``lower``, pixels are ``steps`` apart, and the last has its first
    tap at most ``upper`` behind the image's last place."""

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, int]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 128
    element: int = 2
    rounds: bool = False

    def encode(self) -> bytes:
        """The driver's form of it, with some address."""
        from cuda.bindings import driver

        narrow = driver.cuuint32_t
        channels, pixels = self.box
        steps = [narrow(step) for step in (1, *self.steps, 1)]
        return _encoded(
            driver.cuTensorMapEncodeIm2col, self, (list(self.lower), list(self.upper), channels, pixels, steps)
        )


def _encoded(encode: Any, given: TensorMap | WindowMap, shape: tuple[Any, ...]) -> bytes:
    from cuda.bindings import driver

    wide, kind = driver.cuuint64_t, "TFLOAT32" if given.rounds else _MAPPED_TYPES[given.element]
    found, made = encode(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
        len(given.sizes), 1 << 20, [wide(size) for size in given.sizes], [wide(stride) for stride in given.strides],
        *shape, driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{given.swizzle}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    _check(int(found), f"{given}")
    return ctypes.string_at(made.getPtr(), _MAP_BYTES)


class _Written:
    """What the driver is given, as one thread writes it: the struct, and the launch's configuration. ``maps`` has the
    place of each map in the struct and the address that it holds."""

    __slots__ = ("_kept", "_parameters", "arguments", "configuration", "maps", "stream", "words")

    def __init__(self, params: bytes, configuration: bytes, function: int, maps: int) -> None:
        self._kept = ctypes.create_string_buffer(len(params) + _MAP_ALIGNED)
        start = -ctypes.addressof(self._kept) % _MAP_ALIGNED
        self.words = (ctypes.c_char * len(params)).from_buffer(self._kept, start)
        ctypes.memmove(self.words, params, len(params))
        end = ctypes.addressof(self.words) + len(params)
        self.maps = [[ctypes.c_void_p(end - _MAP_BYTES * (maps - at)), 0] for at in range(maps)]
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))
        self.configuration = ctypes.create_string_buffer(configuration, len(configuration))
        # What byref() made is handed on as it is; a c_void_p would be converted at each call.
        handle = ctypes.c_char.from_address(function)
        self.arguments = ctypes.byref(self.configuration), ctypes.byref(handle), ctypes.byref(self._parameters), None
        self.stream = 0


class _Packs(threading.local):
    """``mine``: this thread's, in an object of its own, whose fields are read in a third of the time."""

    def __init__(self, params: bytes, configuration: bytes, function: int, maps: int, device: int) -> None:
        self.mine = _Written(params, configuration, function, maps)
        _ensure_context(device)


def _ensure_context(index: int) -> None:
    """Of a thread that has not used CUDA yet: it has no context to launch or to encode maps in."""
    from cuda.bindings import driver

    torch.cuda.init()
    found, context = driver.cuCtxGetCurrent()
    if found or not int(context):
        _, device = driver.cuDeviceGet(index)
        found, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(int(found), "a context")
        _check(int(driver.cuCtxSetCurrent(context)[0]), "a context")


@cache
def _driver(name: str) -> Any:
    """A function of the driver's. cuLaunchKernelEx takes the configuration as a struct, so that a call converts four
    arguments to C; those of cuLaunchKernel are eleven, which costs more than the launch."""
    function = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")[name]
    function.restype = ctypes.c_int
    return function


# Attributes of a launch: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, set to 1, and _CLUSTER_DIMENSION.
_FOLLOWS = struct.pack("=i4xi60x", 6, 1)
_CLUSTER = struct.Struct("=i4x3i52x")

_WRITE = [struct.Struct(f"={count}q").pack_into for count in range(32)]
_CONFIGURATION = struct.Struct("=7i4xqqi4x")  # grid, block, shared bytes; the stream, attributes and their number
_write_stream, _STREAM = struct.Struct("=q").pack_into, 32


class Launch:
    """``launch(a, b, out, ...)``: the pointers of ``Params`` in order.

    A kernel that ``follows`` another may start while that one ends, and waits for it by itself before it reads what
    that one wrote (``common/follow.cuh``). GPUs before sm_90 start it behind the other. As many blocks as a ``cluster``
    has run at a time, and reach each other's shared memory (sm_90)."""

    def __init__(
        self, source: jit.Source, name: str, device: CudaDevice, grid: Sequence[int], block: Sequence[int],
        params: bytes, shared: int = 0, follows: bool = False, maps: Sequence[TensorMap | WindowMap] = (),
        cluster: int = 1,
    ) -> None:  # fmt: skip
        from cuda.bindings import driver

        limits = (2**31 - 1, 65535, 65535)
        three = (*grid, 1, 1)[:3]
        if any(not 0 < size <= limit for size, limit in zip(three, limits, strict=True)):
            raise ValueError(f"{name}: grid is {tuple(grid)}; wanted sizes from 1 to {limits}")
        _ensure_context(device.index)
        self._kernel = jit.kernel(source, device.arch, name)
        if shared > 32 << 10:  # 48 KB are to be had without asking, less what a kernel has of its own besides
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(int(driver.cuKernelSetAttribute(attribute, shared, self._kernel.handle, device.index)[0]), name)
        attributes, listed = (0, 0), _FOLLOWS if follows and device.capability >= 90 else b""
        if cluster > 1:
            listed += _CLUSTER.pack(4, cluster, 1, 1)
        if listed:
            self._attributes = ctypes.create_string_buffer(listed, len(listed))
            attributes = (ctypes.addressof(self._attributes), len(listed) // len(_FOLLOWS))
        configuration = _CONFIGURATION.pack(*three, *(*block, 1, 1)[:3], shared, 0, *attributes)
        self._name, self._index = name, device.index
        if maps:
            params += bytes(-len(params) % _MAP_ALIGNED) + b"".join(each.encode() for each in maps)
        self._mapped = tuple(each.pointer for each in maps)
        self._packs = _Packs(params, configuration, int(self._kernel.handle), len(maps), device.index)
        self._launch, self._replace = _driver("cuLaunchKernelEx"), _driver("cuTensorMapReplaceAddress")

    def __call__(self, *pointers: int) -> None:
        index = self._index
        if _current_device() != index:  # type: ignore[misc]
            with torch.cuda.device(index):
                self(*pointers)
            return
        mine = self._packs.mine
        _WRITE[len(pointers)](mine.words, 0, *pointers)
        stream = _current_stream(index)  # type: ignore[misc]
        if stream != mine.stream:
            _write_stream(mine.configuration, _STREAM, stream)
            mine.stream = stream
        if self._mapped:
            for at, held in zip(self._mapped, mine.maps, strict=True):
                if held[1] != pointers[at]:
                    if failed := self._replace(held[0], ctypes.c_void_p(pointers[at])):
                        _check(failed, self._name)
                    held[1] = pointers[at]
        if failed := self._launch(*mine.arguments):
            _check(failed, self._name)


def _check(found: int, name: str) -> None:
    if found:
        from cuda.bindings import driver

        error = driver.CUresult(found)
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{name} could not be launched: {error.name}: {(text or b'').decode()}")


def aligned(tensor: Tensor, size: int) -> Tensor:
    """The tensor, or a copy if its first byte is not at a multiple of ``size``, as vector loads ask."""
    return tensor if tensor.data_ptr() % size == 0 else tensor.clone()


class Single:
    """``launch(a, b, out, *operands)`` as a whole engine, on tensors that start at multiples of ``alignment`` bytes:
    one that does not is copied. Who has the addresses, and knows them to be such multiples, calls ``launch`` itself;
    who has tensors saves a tenth of a microsecond by calling ``run``."""

    __slots__ = ("alignment", "launch", "run")

    def __init__(self, launch: Launch, alignment: int) -> None:
        self.launch, self.alignment = launch, alignment
        self.run = _on_tensors(launch, alignment)

    def __call__(
        self, a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...] | None
    ) -> None:
        self.run(a, b, out, workspace, operands)


def single(launch: Launch, size: int) -> Single:
    """One launch as a whole engine: :class:`Single`."""
    return Single(launch, size)


def _on_tensors(launch: Launch, size: int) -> Runner:
    def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor | None, operands: tuple[Tensor, ...] | None) -> None:
        first, second, to = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if not operands:
            if (first | second | to) % size == 0:
                launch(first, second, to)
                return
        else:
            others = [operand.data_ptr() for operand in operands]
            if reduce(or_, others, first | second | to) % size == 0:
                launch(first, second, to, *others)
                return
        kept = [aligned(tensor, size) for tensor in (a, b, out, *(operands or ()))]
        launch(*[tensor.data_ptr() for tensor in kept])
        if kept[2] is not out:
            out.copy_(kept[2])

    return run
