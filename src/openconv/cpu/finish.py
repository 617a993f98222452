"""What engines do to their sums as they store them: add a residual, limit the result (`epilogue.Finish`).

Kernels take two words for it. `more` is the distance from a place of the result to the same place of the residual,
which lies as the result does; 0 for none. `limits` is the address of two numbers, low and high; 0 where sums are not
yet whole and nothing is to be done to them. The limits are of the type T that is computed with, the residual is of
what the tensors hold, M.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from ..epilogue import Finish
from ..problem import Problem
from ..tensors import DTYPES
from .low_precision import computed
from .simd import (
    Vector,
    add_blocks,
    broadcast,
    inline,
    is_block,
    lanes,
    load,
    load_block,
    load_block_clipped,
    load_clipped,
    load_rows,
    load_scalar,
    pack,
    unpack,
)

__all__ = ["Words", "finish_row", "finish_rows", "finish_square", "finish_vector"]


class Words:
    """The two words of a problem's epilogue. ``wanted`` is False where there is nothing to do but to add a bias."""

    def __init__(self, problem: Problem) -> None:
        finish = Finish.of(problem.epilogue)
        self.wanted = finish.clamps or finish.residual is not None
        self._limits = torch.tensor([finish.low, finish.high], dtype=DTYPES[computed(problem).result_dtype])
        self._address = self._limits.data_ptr()

    def of(self, result: Tensor, residual: Tensor | None) -> tuple[int, int]:
        """`more` and `limits` of one call."""
        return 0 if residual is None else residual.data_ptr() - result.data_ptr(), self._address


def _emit_limit(builder: ir.IRBuilder, value: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """One instruction for each limit: what is no number is neither below nor above, and stays."""
    value = builder.select(builder.fcmp_ordered(">", low, value), low, value)
    return builder.select(builder.fcmp_ordered("<", high, value), high, value)


@intrinsic
def _limit(typingctx, value, low, high):
    """_limit(v, low, high) = min(max(v, low), high) of a vector or of each of a block; NaN stays."""
    vector = value.dtype if is_block(value) else value
    if not isinstance(vector, Vector) or low != vector or high != vector:
        return None

    def codegen(context, builder, signature, args):
        value_, low_, high_ = args
        if not is_block(value):
            return _emit_limit(builder, value_, low_, high_)
        return pack(builder, [_emit_limit(builder, each, low_, high_) for each in unpack(builder, value_)])

    return value(value, low, high), codegen


@functools.cache
def finish_vector(T: type, M: type) -> Any:
    """finish(value, place, more, limits): a vector that goes to `place`."""
    SIZE = np.dtype(T).itemsize

    @inline
    def finish(value, place, more, limits):
        if more != 0:
            value = value + load(M, place + more)
        return _limit(value, broadcast(load_scalar(T, limits)), broadcast(load_scalar(T, limits + SIZE)))

    return finish


@functools.cache
def finish_row(T: type, M: type) -> Any:
    """finish(value, row, index, limit, more, limits): the lanes from `index` on of a row that ends at `limit`."""
    SIZE = np.dtype(T).itemsize

    @inline
    def finish(value, row, index, limit, more, limits):
        if more != 0:
            value = value + load_clipped(M, row + more, index, limit)
        return _limit(value, broadcast(load_scalar(T, limits)), broadcast(load_scalar(T, limits + SIZE)))

    return finish


@functools.cache
def finish_rows(T: type, M: type, ROWS: int, ACROSS: int) -> Any:
    """finish(block, place, pitch, more, limits): ROWS rows of ACROSS vectors, a pitch apart."""
    SIZE = np.dtype(T).itemsize

    @inline
    def finish(block, place, pitch, more, limits):
        if more != 0:
            block = add_blocks(block, load_rows(M, ROWS, ACROSS, place + more, pitch))
        return _limit(block, broadcast(load_scalar(T, limits)), broadcast(load_scalar(T, limits + SIZE)))

    return finish


@functools.cache
def finish_square(T: type, M: type) -> Any:
    """finish(block, place, pitch, more, limits, rows, count): a square of vectors a pitch apart, of which `rows` with
    `count` lanes each are there."""
    L, SIZE = lanes(T), np.dtype(T).itemsize

    @inline
    def finish(block, place, pitch, more, limits, rows, count):
        if more != 0:
            if rows >= L and count >= L:
                block = add_blocks(block, load_block(M, L, place + more, pitch))
            else:
                block = add_blocks(block, load_block_clipped(M, L, place + more, pitch, rows, count))
        return _limit(block, broadcast(load_scalar(T, limits)), broadcast(load_scalar(T, limits + SIZE)))

    return finish
