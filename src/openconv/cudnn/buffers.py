"""What callers hand to a graph, as torch tensors: tensors, anything with DLPack, addresses, and numbers.

What a graph says of a tensor holds: a buffer without gaps that has other sizes and is large enough is read by the
sizes and strides that were recorded, and an address is nothing but memory to be read so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["described", "device_of", "number", "scalar", "span", "tensor_at", "typed"]


def span(dim: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor, both included."""
    return 0 if 0 in dim else 1 + sum((size - 1) * step for size, step in zip(dim, stride, strict=True))


class _Memory:
    """Bytes on a CUDA device, for torch to look at."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def tensor_at(
    address: int, dim: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor over memory that somebody else owns and keeps."""
    size = span(dim, stride) * dtype.itemsize
    if size == 0:
        return torch.empty(tuple(dim), dtype=dtype, device=device)
    if address <= 0 or address % dtype.itemsize:
        raise ValueError(f"address is {address:#x}; wanted one of elements of {dtype}, a multiple of {dtype.itemsize}")
    if device.type == "cuda":
        # On the device of the memory, whichever is current.
        flat = torch.as_tensor(_Memory(address, size), device=device)
    else:
        flat = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    return flat.view(dtype).as_strided(tuple(dim), tuple(stride))


def device_of(values: Sequence[Any], otherwise: torch.device) -> torch.device:
    """The device of the first tensor that is no lone number on the host; that of such a number if there is no other."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    large = [value.device for value in tensors if value.device.type != "cpu" or value.numel() != 1]
    return next(iter(large), otherwise if otherwise.type == "cuda" or not tensors else tensors[0].device)


def described(
    data: Any, name: str, dim: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What a caller gave for a tensor of these sizes, strides and dtype."""
    if isinstance(data, int) and not isinstance(data, bool):
        return tensor_at(data, dim, stride, dtype, device)
    data = typed(data, name, dtype)
    if tuple(data.shape) == tuple(dim):
        return data
    dense = data.numel() == span(data.shape, data.stride())
    if dense and span(dim, stride) <= data.numel():
        return data.as_strided(tuple(dim), tuple(stride))
    return data


def typed(data: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    """What a caller gave for a tensor of this dtype, or of any."""
    if not isinstance(data, Tensor):
        if not hasattr(data, "__dlpack__"):
            raise TypeError(f"tensor {name!r} was given {type(data).__name__}; wanted a tensor or an address")
        data = torch.from_dlpack(data)
    data = data.detach()
    if dtype is not None and data.dtype != dtype and data.dtype == torch.uint8 and dtype.itemsize == 1:
        data = data.view(dtype)  # bytes that torch has no better name for, or had none when they were made
    if dtype is not None and data.dtype != dtype:
        raise RuntimeError(f"tensor {name!r} was given {data.dtype}; wanted {dtype}")
    return data


def number(data: Any, name: str) -> float:
    """What a caller gave for a number."""
    if isinstance(data, Tensor):
        if data.numel() != 1:
            raise RuntimeError(
                f"tensor {name!r} is passed by value and was given {tuple(data.shape)}; wanted one element"
            )
        return data.item()
    if isinstance(data, int | float):
        return data
    if hasattr(data, "item"):
        return data.item()
    raise TypeError(f"tensor {name!r} is passed by value and was given {type(data).__name__}; wanted a number")


def scalar(data: Any, name: str, dim: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor on the device, without waiting for it."""
    if isinstance(data, Tensor) and data.device == device and data.numel() == 1:
        return data.detach().to(dtype).reshape(tuple(dim))
    return torch.full(tuple(dim), number(data, name), dtype=dtype, device=device)
