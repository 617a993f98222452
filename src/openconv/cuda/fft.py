"""cuda.fft: convolution as products of spectra, by cuFFT's real transforms of tiles, reached through torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..fft_passes import build
from ..fft_tiles import FftKnobs, Form, Rates, copies_of, empty_refusals, knobs_for, seconds, traits_of
from ..problem import Problem
from . import jit, pointwise
from .device import CudaDevice
from .matrices import DTYPES
from .pointwise import Pointwise

__all__ = ["Fft"]

# Bytes that a call may allocate: by default, then what limits on the workspace lead to.
_BUDGETS = (1 << 30, 256 << 20, 64 << 20, 16 << 20, 4 << 20, 1 << 20, 256 << 10)
_CHUNKS = (64 << 20, 256 << 20)  # bytes of spectra at a time


class Fft(Engine):
    """Real Fourier transforms of overlapping tiles by cuFFT, and products of spectra by cuBLAS.

        y = back(conj(there(w)) * there(x)), tile by tile: tiles of L positions hold L - dil*(R-1) results each

    The twin of cpu.fft: the same code on other tensors (``fft_passes.py``). Transforms and copies around them move each
    number some eight times, so that it wins only where a filter has some hundred taps and a matrix product has no
    channels to work on, or where the sum over taps is far longer than that over channels. f16 and bf16 are cast to f32
    as tiles are cut, and results as they are put back; behind an epilogue, which is a kernel of its own.

    It mixes all elements of a tile: errors are in proportion to the largest results, and an infinity or NaN spreads to
    the whole tile. ``accuracy="strict"`` leaves it out.
    """

    name = "cuda.fft"
    device = "cuda"
    takes_epilogue = True

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        if problem.dtypes[0] not in DTYPES or len(set(problem.dtypes)) > 1:
            yield f"dtypes are {', '.join(problem.dtypes)}; transforms take {', '.join(DTYPES)} throughout"
        yield from empty_refusals(problem)
        pointwise = problem.c == problem.k == problem.groups
        setting = torch.get_float32_matmul_precision()
        if problem.dtypes[0] != "f64" and not pointwise and setting != "highest":
            yield f"torch.get_float32_matmul_precision() is {setting!r}, which rounds; wanted 'highest'"

    def traits(self, problem: Problem, knobs: FftKnobs) -> Traits:
        return traits_of(problem, knobs)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: FftKnobs) -> int:
        return _sums_bytes(problem) + Form(problem, knobs, cuda=True).bytes

    def copies(self, problem: Problem, knobs: FftKnobs) -> tuple[str, ...]:
        return copies_of(problem, knobs)

    def knobs(self, problem: Problem, device: Device) -> Iterator[FftKnobs]:
        return knobs_for(problem, _rates(device), _BUDGETS, _CHUNKS, cuda=True)

    def cost(self, problem: Problem, device: Device, knobs: FftKnobs) -> float:
        # 78 times of an H200 are 0.45 to 0.8 of what the rates below say.
        return 0.62 * seconds(Form(problem, knobs, cuda=True), _rates(device)) + pointwise.seconds(problem, device)

    def build(self, problem: Problem, device: Device, knobs: FftKnobs) -> Runner:
        assert isinstance(device, CudaDevice)
        inner = build(Form(problem, knobs, cuda=True))
        if problem.epilogue.is_identity:
            return inner
        behind, sums_bytes = Pointwise(problem, device), _sums_bytes(problem)

        def run(a: Tensor, b: Tensor, out: Tensor, workspace: Tensor, operands: tuple[Tensor, ...]) -> None:
            sums = None
            if sums_bytes:
                sums = workspace[:sums_bytes].view(torch.float32).as_strided(out.shape, out.stride())
            inner(a, b, out if sums is None else sums, workspace[sums_bytes:], None)
            behind(out, operands, sums)

        return run

    def sources(self, problem: Problem, device: Device, knobs: FftKnobs) -> list[jit.Source]:
        """What :meth:`build` compiles."""
        return [] if problem.epilogue.is_identity else [pointwise.source(problem)]


def _sums_bytes(problem: Problem) -> int:
    """Of results that an epilogue is computed from before they are rounded to f16 or bf16."""
    if problem.epilogue.is_identity or not pointwise.wide(problem):
        return 0
    return -(-4 * prod(problem.result_shape) // 256) * 256


@lru_cache
def _rates(device: Device) -> Rates:
    """Worked out, not measured: a transform of 4096 numbers counts 30 operations for each, and moves 8 bytes of it once
    there and back, at three quarters of the bandwidth: 2.8 operations a byte of bandwidth. Copies out of order at half
    of it, complex products at 0.4 of the f32 rate, for a launch 6 us."""
    return Rates(
        transforms=2.8 * device.bandwidth, back=1.6, longest=1e6, copies=0.5 * device.bandwidth,
        products=0.4 * device.flops, matrix=1e-9, pointwise=0.8 * device.bandwidth, new=1e15, kept=1 << 62, threads=1,
        call=6e-6, start=20e-6,
    )  # fmt: skip
