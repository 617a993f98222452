"""CudaDevice: what the choice of an engine needs to know of a GPU.

Of GPUs that are known by name the ceilings are measured figures; of others they are worked out from clock rates, as a
share of the peak that large copies and products reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ..device import Device

__all__ = ["ARCHITECTURES", "CudaDevice", "cuda_device", "device_for"]

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")
"""What kernels are compiled for and tested to compile for."""


@dataclass(frozen=True)
class CudaDevice(Device):
    """A GPU. ``flops`` is the f32 rate of its CUDA cores, ``half_flops`` that of a f16 product on its tensor cores,
    ``double_flops`` that of f64; ``threads`` is the number of its multiprocessors. ``shared_bytes`` is the most shared
    memory of one block, ``l2_bytes`` the cache that all share. ``index`` is torch's number of it."""

    index: int = 0
    arch: str = "sm_80"
    half_flops: float = 200e12
    double_flops: float = 1e12
    shared_bytes: int = 99 << 10
    l2_bytes: int = 32 << 20

    @property
    def capability(self) -> int:
        """90 of ``sm_90a``."""
        return int(self.arch.strip("sm_af"))

    def rate(self, dtype: str) -> float:
        if dtype in ("f64", "complex128"):
            return self.double_flops
        return self.half_flops if dtype in ("f16", "bf16", "complex32") else self.flops

    def __str__(self) -> str:
        rates = f"{self.half_flops / 1e12:.0f} TFLOP/s in f16, {self.flops / 1e12:.0f} in f32"
        return f"cuda: {self.name}, {self.threads} multiprocessors, {rates}, {self.bandwidth / 1e9:.0f} GB/s"


# Measured: large copies (read and written bytes) and large matrix products.
_KNOWN = {
    "NVIDIA H200": {"flops": 51e12, "half_flops": 770e12, "double_flops": 60e12, "bandwidth": 4.2e12},
}

# By architecture: multiprocessors, f32 lanes, f16 tensor operations and f64 operations a cycle and multiprocessor (a
# multiply-add is two), a usual clock, bytes a second, shared bytes of a block, L2: of the chip most often met.
_TYPICAL: dict[str, tuple[int, int, int, int, float, float, int, int]] = {
    "sm_75": (40, 128, 1024, 4, 1.5e9, 0.3e12, 64 << 10, 4 << 20),
    "sm_80": (108, 128, 2048, 64, 1.4e9, 1.4e12, 163 << 10, 40 << 20),
    "sm_86": (82, 256, 512, 4, 1.7e9, 0.85e12, 99 << 10, 6 << 20),
    "sm_87": (16, 256, 512, 4, 1.3e9, 0.18e12, 163 << 10, 4 << 20),
    "sm_89": (128, 256, 1024, 4, 2.2e9, 0.9e12, 99 << 10, 72 << 20),
    "sm_90a": (132, 256, 4096, 128, 1.6e9, 3.0e12, 227 << 10, 50 << 20),
    "sm_100": (148, 256, 8192, 128, 1.7e9, 7.0e12, 227 << 10, 126 << 20),
    "sm_103": (148, 256, 8192, 4, 1.7e9, 7.0e12, 227 << 10, 126 << 20),
    "sm_120": (170, 256, 1024, 4, 2.2e9, 1.6e12, 99 << 10, 96 << 20),
    "sm_121": (48, 256, 1024, 4, 2.2e9, 0.25e12, 99 << 10, 24 << 20),
}


def device_for(arch: str) -> CudaDevice:
    """A usual GPU of an architecture, for compiling and predicting without one."""
    if arch not in _TYPICAL:
        raise ValueError(f"architecture is {arch!r}; wanted one of {', '.join(_TYPICAL)}")
    sms, lanes, half, double, clock, bandwidth, shared, l2 = _TYPICAL[arch]
    return CudaDevice(
        "cuda", f"a GPU of {arch}", threads=sms, lanes=32, cache_bytes=shared, flops=0.75 * sms * lanes * clock,
        bandwidth=0.88 * bandwidth, arch=arch, half_flops=0.75 * sms * half * clock,
        double_flops=0.75 * sms * double * clock, shared_bytes=shared, l2_bytes=l2,
    )  # fmt: skip


@cache
def cuda_device(index: int) -> CudaDevice:
    """torch's CUDA device of that number."""
    import torch

    found: Any = torch.cuda.get_device_properties(index)
    arch = f"sm_{found.major}{found.minor}" + ("a" if found.major == 9 else "")
    usual = device_for(arch if arch in _TYPICAL else _nearest(arch))
    share = found.multi_processor_count / usual.threads
    rates: dict[str, float] = {
        "flops": usual.flops * share, "half_flops": usual.half_flops * share,
        "double_flops": usual.double_flops * share, "bandwidth": usual.bandwidth,
    }  # fmt: skip
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    if clock and width:
        rates["bandwidth"] = 0.88 * 2 * clock * 1e3 * width / 8
    rates |= _KNOWN.get(found.name, {})
    return CudaDevice(
        "cuda", found.name, threads=found.multi_processor_count, lanes=32, cache_bytes=usual.shared_bytes, index=index,
        arch=arch, shared_bytes=getattr(found, "shared_memory_per_block_optin", usual.shared_bytes),
        l2_bytes=found.L2_cache_size, **rates,
    )  # fmt: skip


def _nearest(arch: str) -> str:
    """The newest known architecture that is not newer than this one, else the oldest."""
    number = int(arch.strip("sm_af"))
    older = [name for name in _TYPICAL if int(name.strip("sm_af")) <= number]
    return older[-1] if older else next(iter(_TYPICAL))
