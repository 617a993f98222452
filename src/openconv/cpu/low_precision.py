"""f16 and bf16 in memory, f32 in registers: what engines share whose kernels convert as they read and write.

Such an engine sets ``takes_low``. It is chosen by what it does in f32; its kernels then get the tensors as they are,
and what they leave has the bits of casts around the engine in f32 (`simd` widens and narrows).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..problem import Problem
from .simd import BF16, has_f16

__all__ = ["computed", "memory_refusals", "memory_token"]

_TOKENS: dict[str, type] = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": BF16}


def memory_token(dtype: str) -> type:
    """What stands for elements of this dtype in kernels; see `simd`."""
    return _TOKENS[dtype]


def computed(problem: Problem) -> Problem:
    """The problem in the dtype that is computed in: f32 for f16 and bf16."""
    return problem.with_(dtypes="f32") if problem.dtypes[0] in ("f16", "bf16") else problem


def memory_refusals(problem: Problem) -> Iterator[str]:
    """All tensors of one dtype that has a token, and instructions for f16."""
    seen = ", ".join(problem.dtypes)
    if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in _TOKENS:
        yield f"dtypes are {seen}; wanted f32, f64, f16 or bf16 for all three"
    elif "f16" in problem.dtypes and not has_f16():
        yield f"dtypes are {seen}; this CPU has no instructions for f16"
