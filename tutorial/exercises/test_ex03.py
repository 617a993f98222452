"""Grades exercise 3 without formulas: an SM that is filled block by block, and a grid that runs on several of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest


def kernels() -> Iterator[tuple[int, int, int]]:
    """Threads, registers and shared bytes: by turns each of the limits is the one that counts."""
    yield from [(256, 48, 0), (32, 16, 0), (1024, 64, 0), (1024, 65, 0), (128, 255, 0), (384, 168, 232448), (33, 40, 0)]
    yield from [(64, 32, 7168), (1024, 32, 116736), (96, 24, 20480)]  # without the 1024 bytes one more would fit
    generator = np.random.default_rng(1)
    for _ in range(200):
        threads, registers = int(generator.integers(1, 1025)), int(generator.integers(16, 256))
        shared = int(generator.choice([0, generator.integers(0, 8 << 10), generator.integers(0, 227 << 10)]))
        yield threads, registers, shared


def filled(threads: int, registers: int, shared: int) -> int:
    """Put blocks on an SM, warp by warp, until something is used up."""
    pools, left, slots, blocks = [16384] * 4, 233472, 64, 0
    while blocks < 32:
        left -= shared + 1024
        for _ in range(0, threads, 32):
            pool = max(range(4), key=pools.__getitem__)
            slots -= 1
            taken = 0
            while taken < 32 * registers:
                taken += 256
            pools[pool] -= taken
        if left < 0 or slots < 0 or min(pools) < 0:
            break
        blocks += 1
    return blocks


def test_blocks_per_sm(answer: ModuleType) -> None:
    for case in kernels():
        got, wanted = answer.blocks_per_sm(*case), filled(*case)
        if got != wanted:
            pytest.fail(f"blocks_per_sm{case} is {got}; wanted {wanted}", pytrace=False)


def test_occupancy(answer: ModuleType) -> None:
    assert filled(256, 48, 0) == 5  # what chapter 3 works out
    for case in kernels():
        wanted = filled(*case) * len(range(0, case[0], 32)) / 64
        got = answer.occupancy(*case)
        if got != pytest.approx(wanted):
            pytest.fail(f"occupancy{case} is {got}; wanted {wanted}", pytrace=False)


def test_turns(answer: ModuleType) -> None:
    generator = np.random.default_rng(2)
    cases = [(132, 1, 132), (133, 1, 132), (62500, 5, 132), (1, 4, 132)]
    cases += [tuple(int(v) for v in generator.integers(1, [4000, 9, 133])) for _ in range(40)]
    for blocks, per_sm, sms in cases:
        ends = [0] * (per_sm * sms)  # of what runs in each place; the next block takes the one that is free first
        for _ in range(blocks):
            heapq.heapreplace(ends, ends[0] + 1)
        count = max(ends)
        wanted = count, sum(ends) / (count * len(ends))
        got = answer.turns(blocks, per_sm, sms)
        if got != pytest.approx(wanted):
            pytest.fail(f"turns{(blocks, per_sm, sms)} is {got}; wanted {wanted}", pytrace=False)
