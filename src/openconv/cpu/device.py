"""The CPU as a :class:`~openconv.device.Device`."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch

from ..device import Device

__all__ = ["cpu_device"]

# Per core, by what torch dispatches to: f32 lanes, the rate of torch's matrix product and that of multiply-adds on
# registers. Measured on server cores near 2.8 GHz; other clocks scale these rates and the engines' own, so the ratios
# between engines stay.
_BY_CAPABILITY = {"AVX512": (16, 137e9, 155e9), "AVX2": (8, 70e9, 84e9)}
_OTHER = (4, 20e9, 22e9)
# On AMD's cores MKL keeps to AVX2 whatever they have: 115 GFLOP/s a core, where registers of AVX-512 make 281 (Zen 5).
_AMD_AVX512 = (16, 70e9, 170e9)
_CORE_BANDWIDTH = 11e9
_SOCKET_BANDWIDTH = 150e9


@cache
def cpu_device(threads: int) -> Device:
    """This machine's CPU with so many threads."""
    lanes, rate, vector_rate = _BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), _OTHER)
    if lanes == 16 and _is_amd():
        lanes, rate, vector_rate = _AMD_AVX512
    return Device(
        kind="cpu",
        name=_model(),
        threads=threads,
        lanes=lanes,
        cache_bytes=_l2_bytes(),
        flops=rate * threads,
        bandwidth=min(_CORE_BANDWIDTH * threads, _SOCKET_BANDWIDTH),
        vector_flops=vector_rate * threads,
    )


def _model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _is_amd() -> bool:
    return _cpuinfo("vendor_id") == "AuthenticAMD"


def _cpuinfo(key: str) -> str:
    """What Linux says of the first core under this key; nothing elsewhere."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _l2_bytes() -> int:
    """The second-level cache of one core, 1 MiB where the system does not tell."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) * 1024 if text.endswith("K") else int(text)
    except (OSError, ValueError):
        return 1 << 20
