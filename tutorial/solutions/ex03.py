"""A solution of exercise 3."""

from __future__ import annotations


def blocks_per_sm(threads: int, registers: int, shared: int) -> int:
    warps = -(-threads // 32)
    portion = -(-32 * registers // 256) * 256  # of a warp
    by_registers = 4 * (65536 // 4 // portion) // warps
    return min(32, 64 // warps, by_registers, 233472 // (shared + 1024))


def occupancy(threads: int, registers: int, shared: int) -> float:
    return blocks_per_sm(threads, registers, shared) * -(-threads // 32) / 64


def turns(blocks: int, per_sm: int, sms: int = 132) -> tuple[int, float]:
    places = per_sm * sms
    count = -(-blocks // places)
    return count, blocks / (count * places)
