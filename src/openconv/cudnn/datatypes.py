"""Data types of the frontend and of torch, each as the other."""

from __future__ import annotations

from typing import Any

import torch

from ..tensors import ALL_DTYPES
from .enums import as_data_type, data_type, dtype_name

__all__ = ["from_torch", "is_torch_available", "to_torch"]


def is_torch_available() -> bool:
    """Always: openconv is of torch."""
    return True


def from_torch(dtype: torch.dtype) -> data_type | None:
    """The data type of a torch dtype."""
    return as_data_type(dtype)


def to_torch(kind: Any) -> torch.dtype | None:
    """The torch dtype of a data type; None of NOT_SET."""
    found = as_data_type(kind)
    return None if found is None else ALL_DTYPES[dtype_name(found)]
