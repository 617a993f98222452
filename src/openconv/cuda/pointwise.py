"""Pointwise: a problem's epilogue over its sums, for engines whose products know of none."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ..device import Device
from ..problem import DTYPE_BYTES, Problem
from . import jit, render
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, aligned, pack

__all__ = ["Pointwise", "seconds", "source", "wide"]

_THREADS = 256
_BYTES = 16  # of one vector: the most that one instruction loads or stores


class Pointwise:
    """``pointwise(out, operands, sums)``: out = epilogue(sums, operands). Sums lie like the result: in its own memory
    (None) if they are of its dtype, else f32 in the workspace, so that f16 and bf16 are rounded once only. What does
    not start at a multiple of 16 bytes, as all that torch allocates does, goes through a copy.

    ``images`` and ``pixels`` are those that a call is about. Of nchw the call is given whole images, and with ``start``
    the first of the pixels; sums have no gaps between their planes. Of nhwc it is given the pixels themselves.
    """

    def __init__(
        self, problem: Problem, device: CudaDevice, images: int | None = None, pixels: int | None = None
    ) -> None:  # fmt: skip
        all_pixels = prod(problem.result_shape[2:])
        images, pixels = images or problem.n, pixels or all_pixels
        count, channels = images * problem.result_channels * pixels, problem.result_channels
        params = pack(
            3 + max(1, len(problem.epilogue.operands)), (count,), (*divisor(channels), *divisor(pixels), all_pixels)
        )
        blocks = -(-count // (_vector(problem, pixels) * _THREADS))
        self._launch = Launch(source(problem, pixels), "pointwise", device, (blocks,), (_THREADS,), params)

    def __call__(self, out: Tensor, operands: Sequence[Tensor], sums: Tensor | None = None, start: int = 0) -> None:
        # Copies of operands that start elsewhere are kept until the launch is queued; torch's allocator hands their
        # memory on in the order of the stream.
        kept = [aligned(operand, _BYTES) for operand in operands]
        target = aligned(out, _BYTES)
        place = target.data_ptr()
        self._launch(place if sums is None else sums.data_ptr(), place, start, *(v.data_ptr() for v in kept))
        if target is not out:
            out.copy_(target)


def wide(problem: Problem) -> bool:
    """Whether sums come as f32 to a result of f16 or bf16."""
    return problem.result_dtype in ("f16", "bf16")


def source(problem: Problem, pixels: int | None = None) -> jit.Source:
    """What :class:`Pointwise` compiles."""
    pixels = pixels or prod(problem.result_shape[2:])
    vector, last = _vector(problem, pixels), problem.layouts[problem.result] == "nhwc"
    side = problem.result_channels if last else pixels
    constants: dict[str, int | bool | str] = {
        "In": "float" if wide(problem) else problem.result_dtype,
        "vector": vector, "whole": side % vector == 0, "channels_last": last,
    }  # fmt: skip
    return jit.Source("pointwise.cu", render.traits(problem, constants))


def seconds(problem: Problem, device: Device) -> float:
    """Predicted time: the result in and out, and the operands."""
    if problem.epilogue.is_identity:
        return 0.0
    tensors = 1 + sum(operand.kind == "tensor" for operand in problem.epilogue.operands) + (2 if wide(problem) else 1)
    moved = tensors * prod(problem.result_shape) * DTYPE_BYTES[problem.result_dtype]
    return 2e-6 + moved / (0.9 * device.bandwidth)


def _vector(problem: Problem, pixels: int) -> int:
    """Results of one thread: 16 bytes of them, unless those of a part of a plane would straddle its ends."""
    most, whole = _BYTES // DTYPE_BYTES[problem.result_dtype], prod(problem.result_shape[2:])
    part = problem.layouts[problem.result] == "nchw" and pixels != whole
    return 1 if part and (pixels % most or whole % most) else most
