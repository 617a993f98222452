"""Ceilings of a device, measured: the rate of a large copy and of large matrix products; and the roofline they make.

    floor = max(operations / rate of the dtype, bytes that must move / rate of a copy)

No direct algorithm is faster than that on the same machine; one that needs fewer multiplications, or finds its inputs
in a cache, can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor

from ..problem import Problem
from ..tensors import DTYPES
from .timing import Timing, race, race_cuda

__all__ = ["ceilings", "rate_name", "roofline_floor"]

_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Of each of the two buffers: many times what the caches hold."""

_RATES = {"cpu": ("f32", "f64", "bf16"), "cuda": ("f32", "tf32", "f16", "bf16", "f64", "i8")}
"""The matrix products that are measured; on a CPU those that vector units have instructions for."""


def ceilings(device: torch.device, dtypes: Iterable[str]) -> dict[str, float]:
    """``copy`` in bytes per second, read plus written, and the rate of a matrix product in operations per second for
    each of ``dtypes`` that torch multiplies quickly on this device. ``f32`` is IEEE f32, ``tf32`` the tensor cores'.
    Medians over random values; each is measured once per process."""
    found = {"copy": _copy_rate(device)}
    for dtype in dtypes:
        if dtype in _RATES[device.type]:
            found[dtype] = _matmul_rate(device, dtype)
    return found


def rate_name(problem: Problem) -> str:
    """The rate that a problem is held against: that of its inputs' dtype, or of TF32 where it says so."""
    dtype = problem.dtypes[0 if problem.direction != "dgrad" else 2]
    return "tf32" if dtype == "f32" and problem.precision != "ieee" else dtype


def roofline_floor(problem: Problem, ceilings: Mapping[str, float]) -> float:
    """Seconds at the least. Of a dtype without a rate, the time of its bytes alone; tf32x3 forms three products."""
    moving = problem.min_bytes / ceilings["copy"]
    rate = ceilings.get(rate_name(problem))
    products = 3 if rate_name(problem) == "tf32" and problem.precision == "tf32x3" else 1
    return moving if rate is None else max(moving, products * problem.flops / rate)


@cache
def _copy_rate(device: torch.device) -> float:
    size = _COPY_BYTES[device.type]
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(device, partial(target.copy_, source))


@cache
def _matmul_rate(device: torch.device, dtype: str) -> float:
    size = 8192 if device.type == "cuda" else 1024
    with _tf32(device, dtype == "tf32"):
        return 2 * size**3 / _median(device, _product(device, dtype, size))


def _product(device: torch.device, dtype: str, size: int) -> Callable[[], Tensor]:
    kind = DTYPES["f32" if dtype == "tf32" else dtype]
    generator = torch.Generator(device).manual_seed(0)
    if not kind.is_floating_point:
        a, b = (torch.randint(-9, 9, (size, size), dtype=kind, device=device, generator=generator) for _ in range(2))
        return partial(torch._int_mm, a, b.t())
    a, b = (torch.randn((size, size), dtype=torch.float32, device=device, generator=generator).to(kind) for _ in "ab")
    return partial(torch.matmul, a, b)


def _median(device: torch.device, call: Callable[[], object]) -> float:
    timing: Timing
    if device.type == "cuda":
        with torch.cuda.device(device):
            (timing,) = race_cuda([[call]], budget=0.2, least=5, most=50)
    else:
        (timing,) = race([call], budget=0.2, least=5, most=20, warm_up=1)
    return timing.median


@contextmanager
def _tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
