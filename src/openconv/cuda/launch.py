"""Launch: a kernel with everything but its pointers packed beforehand.

A kernel of ours takes one argument, a struct ``Params``: its pointers first, then what has eight bytes, then what has
four, so that there are no gaps. The struct is packed when a plan is built; a call writes the pointers and launches on
torch's current stream. The driver copies the struct while it launches, so that each thread needs a copy of its own and
no more. Nothing waits for the GPU, and capture into a CUDA graph records the launch as it is.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import jit
from .device import CudaDevice

__all__ = ["Launch", "aligned", "pack"]

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def pack(pointers: int, wide: Sequence[int] = (), narrow: Sequence[int] = ()) -> bytes:
    """``Params`` with its pointers still null."""
    return struct.pack(f"={pointers}q{len(wide)}q{len(narrow)}i", *(0,) * pointers, *wide, *narrow)


class _Packs(threading.local):
    """What the driver is given, as this thread writes it: the struct, and the launch's configuration."""

    def __init__(self, params: bytes, configuration: bytes, function: int, device: int) -> None:
        self.words = ctypes.create_string_buffer(params, len(params))
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))
        self.configuration = ctypes.create_string_buffer(configuration, len(configuration))
        places = ctypes.addressof(self.configuration), function, ctypes.addressof(self._parameters), 0
        self.arguments = tuple(map(ctypes.c_void_p, places))
        self.stream = 0
        _ensure_context(device)


def _ensure_context(index: int) -> None:
    """Of a thread that has not used CUDA yet: it has no context to launch in."""
    from cuda.bindings import driver

    torch.cuda.init()
    found, context = driver.cuCtxGetCurrent()
    if found or not int(context):
        _, device = driver.cuDeviceGet(index)
        found, context = driver.cuDevicePrimaryCtxRetain(device)
        _check(int(found), "a context")
        _check(int(driver.cuCtxSetCurrent(context)[0]), "a context")


@cache
def _launcher() -> Any:
    """cuLaunchKernelEx. It takes the configuration as a struct, so that a call converts four arguments to C; those of
    cuLaunchKernel are eleven, which costs more than the launch."""
    function = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


_WRITE = [struct.Struct(f"={count}q").pack_into for count in range(32)]
_CONFIGURATION = struct.Struct("=7i4xqqi4x")  # grid, block, shared bytes; the stream, attributes and their number
_write_stream, _STREAM = struct.Struct("=q").pack_into, 32


class Launch:
    """``launch(a, b, out, ...)``: the pointers of ``Params`` in order."""

    def __init__(
        self, source: jit.Source, name: str, device: CudaDevice, grid: Sequence[int], block: Sequence[int],
        params: bytes, shared: int = 0,
    ) -> None:  # fmt: skip
        from cuda.bindings import driver

        limits = (2**31 - 1, 65535, 65535)
        three = (*grid, 1, 1)[:3]
        if any(not 0 < size <= limit for size, limit in zip(three, limits, strict=True)):
            raise ValueError(f"{name}: grid is {tuple(grid)}; wanted sizes from 1 to {limits}")
        self._kernel = jit.kernel(source, device.arch, name)
        if shared > 48 << 10:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(int(driver.cuKernelSetAttribute(attribute, shared, self._kernel.handle, device.index)[0]), name)
        configuration = _CONFIGURATION.pack(*three, *(*block, 1, 1)[:3], shared, 0, 0, 0)
        self._name, self._index = name, device.index
        self._packs = _Packs(params, configuration, int(self._kernel.handle), device.index)
        self._launch = _launcher()

    def __call__(self, *pointers: int) -> None:
        index = self._index
        if _current_device() != index:  # type: ignore[misc]
            with torch.cuda.device(index):
                self(*pointers)
            return
        packs = self._packs
        _WRITE[len(pointers)](packs.words, 0, *pointers)
        stream = _current_stream(index)  # type: ignore[misc]
        if stream != packs.stream:
            _write_stream(packs.configuration, _STREAM, stream)
            packs.stream = stream
        failed = self._launch(*packs.arguments)
        if failed:
            _check(failed, self._name)


def _check(found: int, name: str) -> None:
    from cuda.bindings import driver

    if found:
        error = driver.CUresult(found)
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{name} could not be launched: {error.name}: {(text or b'').decode()}")


def aligned(tensor: Tensor, size: int) -> Tensor:
    """The tensor, or a copy if its first byte is not at a multiple of ``size``, as vector loads ask."""
    return tensor if tensor.data_ptr() % size == 0 else tensor.clone()
