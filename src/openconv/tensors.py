"""The few words in which torch's tensors and a Problem's fields translate into each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "ALL_DTYPES",
    "ALL_NAMES",
    "DTYPES",
    "NAMES",
    "empty",
    "guards",
    "in_layout",
    "layout_of",
    "memory_format",
    "to_layout",
]

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "complex32": torch.complex32, "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
ALL_DTYPES: dict[str, torch.dtype] = {**DTYPES, "bool": torch.bool}
"""Those of graphs, whose comparisons have results of two values."""
ALL_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in ALL_DTYPES.items()}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
"""What code that PyTorch compiles checks and allocates its tensors with. It is private: whatever it lacks, even all of
it, is done without."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(axes: int, layout: str) -> torch.memory_format:
    """torch's name for a layout of tensors with so many axes. Of three axes, nchw alone exists."""
    return _CHANNELS_LAST.get(axes, torch.contiguous_format) if layout == "nhwc" else torch.contiguous_format


def in_layout(tensor: Tensor, layout: str) -> bool:
    """Whether the tensor's memory is already in this layout, without gaps."""
    return tensor.is_contiguous(memory_format=memory_format(tensor.dim(), layout))


def layout_of(tensor: Tensor) -> str:
    """nhwc if the tensor is in channels_last order and not in the plain one as well; else nchw."""
    return "nhwc" if not tensor.is_contiguous() and tensor.dim() > 3 and in_layout(tensor, "nhwc") else "nchw"


def to_layout(tensor: Tensor, layout: str) -> Tensor:
    """The tensor itself if it is in this layout, else a copy that is."""
    return tensor.contiguous(memory_format=memory_format(tensor.dim(), layout))


def empty(shape: Sequence[int], dtype: torch.dtype, layout: str, device: torch.device) -> Tensor:
    """An uninitialised tensor in this layout."""
    return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format(len(shape), layout))
