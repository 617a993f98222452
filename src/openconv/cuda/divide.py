"""Divisors of kernels: the host's half of ``common/divide.cuh``."""

from __future__ import annotations

__all__ = ["divisor"]


def divisor(value: int) -> tuple[int, int, int]:
    """``Divisor`` as three ints: its magic number with the sign that an int of these bits has, the shift, the value."""
    if not 0 < value < 2**31:
        raise ValueError(f"divisor is {value}; wanted 1 to 2^31 - 1")
    shift = 31 + (value - 1).bit_length()
    magic = (1 << shift) // value + 1
    return magic - (1 << 32) if magic >= 1 << 31 else magic, shift, value
