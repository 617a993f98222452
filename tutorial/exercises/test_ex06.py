"""Grades exercise 6: tiles by what windows touch, banks by serving lanes cycle after cycle."""

from __future__ import annotations

import random
from types import ModuleType

import pytest


def test_tiles_hold_what_windows_read(answer: ModuleType) -> None:
    choose = random.Random(6)
    cases = [((32, 32), (3, 3), (1, 1), (1, 1)), ((1, 1), (1, 1), (1, 1), (1, 1)), ((1, 1), (5, 3), (2, 2), (3, 1))]
    for _ in range(60):
        cases.append(tuple((choose.randint(1, most), choose.randint(1, most)) for most in (12, 5, 4, 4)))  # type: ignore[arg-type]
    for results, taps, stride, dilation in cases:
        wanted = []
        for axis in range(2):
            read = {i * stride[axis] + t * dilation[axis] for i in range(results[axis]) for t in range(taps[axis])}
            wanted.append(max(read) - min(read) + 1)
        got = answer.tile(results, taps, stride, dilation)
        if got is None or list(got) != wanted:
            what = f"tile({results}, {taps}, {stride}, {dilation})"
            pytest.fail(f"{what} is {got}; wanted {tuple(wanted)}", pytrace=False)


def served(words: list[int]) -> int:
    """Cycle after cycle, each bank gives one word to all who want it."""
    left, count = set(words), 0
    while left:
        count += 1
        given: dict[int, int] = {}
        for word in sorted(left):
            given.setdefault(word % 32, word)
        left -= set(given.values())
    return count


def check_cycles(answer: ModuleType, words: list[int]) -> None:
    got, wanted = answer.cycles(words), served(words)
    if got != wanted:
        pytest.fail(f"cycles({words}) is {got}; wanted {wanted}", pytrace=False)


def test_strides_of_banks(answer: ModuleType) -> None:
    for stride in range(70):
        for first in (0, 3):
            check_cycles(answer, [first + stride * lane for lane in range(32)])


def test_random_words_of_banks(answer: ModuleType) -> None:
    choose = random.Random(66)
    for _ in range(100):
        reach = choose.choice([1, 20, 64, 1000])
        check_cycles(answer, [choose.randrange(reach) for _ in range(32)])


def test_pitch_has_no_conflicts_and_no_word_too_many(answer: ModuleType) -> None:
    for width in [*range(1, 140), 256, 1023]:
        free = next(p for p in range(width, width + 33) if served([p * lane for lane in range(32)]) == 1)
        got = answer.pitch(width)
        if got != free:
            pytest.fail(f"pitch({width}) is {got}; wanted {free}", pytrace=False)


def test_total_loads(answer: ModuleType) -> None:
    choose = random.Random(666)
    cases = [((96, 128), (32, 32), (3, 3)), ((5, 7), (8, 8), (1, 1)), ((20, 30), (4, 8), (7, 5))]
    for _ in range(30):
        taps = choose.choice([1, 3, 5, 7]), choose.choice([1, 3, 5])
        size = choose.randint(taps[0], 40), choose.randint(taps[1], 40)
        cases.append((size, (choose.randint(1, 12), choose.randint(1, 12)), taps))
    for (H, W), (tall, wide), (R, S) in cases:
        wanted = 0
        for top in range(0, H, tall):
            for left in range(0, W, wide):
                rows = [h for h in range(top - R // 2, top - R // 2 + tall + R - 1) if 0 <= h < H]
                columns = [w for w in range(left - S // 2, left - S // 2 + wide + S - 1) if 0 <= w < W]
                wanted += len(rows) * len(columns)
        got = answer.total_loads((H, W), (tall, wide), (R, S))
        if got != wanted:
            pytest.fail(f"total_loads({(H, W)}, {(tall, wide)}, {(R, S)}) is {got}; wanted {wanted}", pytrace=False)
