"""cpu.fft: convolution as products of spectra, by real Fourier transforms of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ..device import Device
from ..engine import Engine, Runner, Traits
from ..fft_passes import build
from ..fft_tiles import FftKnobs, Form, Rates, copies_of, empty_refusals, knobs_for, seconds, traits_of
from ..problem import Problem
from .matrices import float_refusals

__all__ = ["Fft"]

# Bytes that a call may allocate: by default, then what limits on the workspace lead to.
_BUDGETS = (256 << 20, 64 << 20, 28 << 20, 8 << 20, 2 << 20, 512 << 10, 128 << 10)


class Fft(Engine):
    """Real Fourier transforms of overlapping tiles: a filter of any size costs one product for each frequency.

        y = back(conj(there(w)) * there(x)), tile by tile: tiles of L positions hold L - dil*(R-1) results each

    A filter of R taps costs log2(L) operations for a result instead of R. It wins with filters of some hundred taps and
    more: long 1D filters, images with 31x31 and larger; loses with small ones, where transforms move more memory than
    there is arithmetic, and with strides, since it computes each result that a stride leaves out. Tiles keep memory
    bounded whatever the length of the signal. Spectra of few channels are multiplied one channel at a time, those of
    many by a batched matrix product with the frequency as its batch.

    It mixes all elements of a tile: errors are in proportion to the largest results, and an infinity or NaN spreads to
    the whole tile. ``accuracy="strict"`` leaves it out.
    """

    name = "cpu.fft"

    def refusals(self, problem: Problem, device: Device) -> Iterator[str]:
        yield from float_refusals(problem)
        yield from empty_refusals(problem)

    def traits(self, problem: Problem, knobs: FftKnobs) -> Traits:
        return traits_of(problem, knobs)

    def workspace_bytes(self, problem: Problem, device: Device, knobs: FftKnobs) -> int:
        return Form(problem, knobs).bytes

    def copies(self, problem: Problem, knobs: FftKnobs) -> tuple[str, ...]:
        return copies_of(problem, knobs)

    def knobs(self, problem: Problem, device: Device) -> Iterator[FftKnobs]:
        return knobs_for(problem, _rates(device), _BUDGETS)

    def cost(self, problem: Problem, device: Device, knobs: FftKnobs) -> float:
        return seconds(Form(problem, knobs), _rates(device))

    def build(self, problem: Problem, device: Device, knobs: FftKnobs) -> Runner:
        return build(Form(problem, knobs))


@lru_cache
def _rates(device: Device) -> Rates:
    """Fitted to 400 problems on two cores, as shares of ceilings that stand for cores of half their speed, as those of
    other engines do: MKL's transforms run at 60 to 90 GFLOP/s there with AVX2 and gain little from AVX-512, complex
    products at 130 to 150, of 3x3 matrices 50 ns each; copies in order and out of it at 15 to 34 GB/s."""
    narrow = device.flops * min(1.0, 8 / device.lanes)
    return Rates(
        transforms=0.2 * narrow, back=1.6, longest=40e3, copies=0.45 * device.bandwidth,
        products=0.45 * (narrow + device.flops) / 2, matrix=200e-9 / device.threads, pointwise=2 * device.bandwidth,
        new=2.2e9, kept=30 << 20, threads=device.threads, call=8e-6, start=90e-6,
    )  # fmt: skip
