"""torch's dtypes by the project's names."""

from __future__ import annotations

import torch

from ..tensors import ALL_DTYPES

__all__ = ["name_of"]

_NAMES = {dtype: name for name, dtype in ALL_DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """``f16`` of ``torch.float16``."""
    return _NAMES[dtype]
