"""Grades exercise 5: sectors, by painting the bytes of a memory."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch


def painted(starts: list[int | None], size: int, vector: int, base: int) -> int:
    """Sectors with a byte that was touched."""
    memory = torch.zeros(1 << 16, dtype=torch.bool)
    for start in starts:
        if start is not None:
            memory[base + start * size : base + (start + vector) * size] = True
    return int(memory.view(-1, 32).any(1).sum())


def check(answer: ModuleType, starts: list[int | None], size: int, vector: int, base: int) -> None:
    got, wanted = answer.sectors(starts, size, vector, base), painted(starts, size, vector, base)
    if got != wanted:
        pytest.fail(f"sectors({starts}, {size}, {vector}, {base}) is {got}; wanted {wanted}", pytrace=False)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_steps(answer: ModuleType, size: int) -> None:
    for step in (0, 1, 2, 3, 8, 33, 64):
        for first in (0, 1, 5, 8):
            check(answer, [first + step * lane for lane in range(32)], size, 1, 0)


def test_random_addresses(answer: ModuleType) -> None:
    choose = random.Random(5)
    for _ in range(60):
        size, vector = choose.choice([1, 2, 4, 8]), choose.choice([1, 1, 2, 4])
        reach = choose.choice([8, 100, 2000])
        starts = [None if choose.random() < 0.2 else choose.randrange(reach) for _ in range(32)]
        check(answer, starts, size, vector, size * choose.randrange(8))


def test_idle_lanes_touch_nothing(answer: ModuleType) -> None:
    check(answer, [None] * 32, 4, 1, 0)
    check(answer, [None] * 31 + [0], 4, 4, 0)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("neighbours", ["columns", "channels"])
def test_stores_of_the_naive_kernel(answer: ModuleType, layout: str, neighbours: str) -> None:
    choose = random.Random(55)
    for _ in range(30):
        N, K, P, Q = (choose.randint(1, most) for most in (2, 12, 7, 9))
        size = choose.choice([2, 4])
        addresses = torch.arange(N * K * P * Q)
        if layout == "nchw":
            addresses = addresses.view(N, K, P, Q)
        else:
            addresses = addresses.view(N, P, Q, K).permute(0, 3, 1, 2)
        # In the order of the threads' numbers.
        numbered = addresses if neighbours == "columns" else addresses.permute(0, 2, 3, 1)
        first = choose.randrange(0, N * K * P * Q + 20, 4)
        starts: list[int | None] = [*numbered.reshape(-1)[first : first + 32].tolist()]
        got = answer.store(first, (N, K, P, Q), layout, neighbours, size)
        wanted = painted(starts, size, 1, 0)
        if got != wanted:
            pytest.fail(
                f"store({first}, {(N, K, P, Q)}, {layout!r}, {neighbours!r}, {size}) is {got}; wanted {wanted}",
                pytrace=False,
            )


@pytest.mark.parametrize("vector", [1, 2, 4])
def test_hand_out(answer: ModuleType, vector: int) -> None:
    for count in (vector, 31 * vector, 32 * vector, 33 * vector, 200 * vector, 1000 * vector):
        loads = answer.hand_out(count, vector)
        what = f"hand_out({count}, {vector})"
        if loads is None or any(len(load) != 32 for load in loads):
            pytest.fail(f"{what} is {loads}; wanted loads of 32 entries, one a lane", pytrace=False)
        taken = sorted(start + i for load in loads for start in load if start is not None for i in range(vector))
        if taken != list(range(count)):
            seen = f"{len(taken)} elements, {len(set(taken))} different ones"
            pytest.fail(f"{what} loads {seen}; wanted {count} once each", pytrace=False)
        least = -(-count // (32 * vector))
        if len(loads) != least:
            pytest.fail(f"{what} takes {len(loads)} loads; wanted {least}", pytrace=False)
        for load in loads:
            own = sum(start is not None for start in load)
            touched, fewest = painted(load, 4, vector, 0), -(-own * vector * 4 // 32)
            if touched > fewest:
                seen = f"a load of {own} lanes touches {touched} sectors"
                pytest.fail(f"{what}: {seen}; {fewest} are enough", pytrace=False)
