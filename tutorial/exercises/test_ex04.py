"""Grades exercise 4: index arithmetic, against tensors that know their own order."""

from __future__ import annotations

import itertools
import random
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

LAYOUTS = ("nchw", "nhwc")


def numbered(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """A tensor whose every element is its own address, as (N, C, H, W) whatever the layout."""
    N, C, H, W = shape
    addresses = torch.arange(N * C * H * W)
    return addresses.view(N, C, H, W) if layout == "nchw" else addresses.view(N, H, W, C).permute(0, 3, 1, 2)


def shapes(count: int) -> list[tuple[int, int, int, int]]:
    choose = random.Random(4)
    return [(1, 1, 1, 1), (1, 3, 1, 5), *(tuple(choose.randint(1, 6) for _ in range(4)) for _ in range(count))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_result_has_its_thread(answer: ModuleType, layout: str) -> None:
    for shape in shapes(20):
        wanted = numbered(shape, layout)
        for at in itertools.product(*map(range, shape)):
            i = int(wanted[at])
            got = answer.place(i, shape, layout)
            if got is None or tuple(got) != at:
                pytest.fail(f"place({i}, {shape}, {layout!r}) is {got}; wanted {at}", pytrace=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_behind_the_last_result_have_none(answer: ModuleType, layout: str) -> None:
    for shape in shapes(10):
        count = torch.Size(shape).numel()
        for i in (count, count + 1, count + 255):
            got = answer.place(i, shape, layout)
            if got is not None:
                pytest.fail(f"place({i}, {shape}, {layout!r}) is {got}; there are {count} results", pytrace=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_follow_the_layout(answer: ModuleType, layout: str) -> None:
    for shape in shapes(20):
        wanted = numbered(shape, layout)
        for at in itertools.product(*map(range, shape)):
            got = answer.address(at, shape, layout)
            if got != int(wanted[at]):
                pytest.fail(f"address({at}, {shape}, {layout!r}) is {got}; wanted {int(wanted[at])}", pytrace=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_read_what_torch_reads(answer: ModuleType, layout: str) -> None:
    choose, tried = random.Random(44), 0
    while tried < 25:
        shape = (choose.randint(1, 2), choose.randint(1, 3), choose.randint(1, 9), choose.randint(1, 9))
        taps, stride, dilation = ((choose.randint(1, 3), choose.randint(1, 3)) for _ in range(3))
        padding = (choose.randint(0, 2), choose.randint(0, 2))
        reach = [d * (t - 1) + 1 for t, d in zip(taps, dilation, strict=True)]
        if any(size + 2 * pad < r for size, pad, r in zip(shape[2:], padding, reach, strict=True)):
            continue
        tried += 1
        # torch cuts the windows out of a tensor of addresses; one is added, so that 0 is padding.
        marked = numbered(shape, layout).double() + 1
        columns = F.unfold(marked, taps, dilation=dilation, padding=padding, stride=stride).long()
        Q = (shape[3] + 2 * padding[1] - reach[1]) // stride[1] + 1
        for n, pixel in itertools.product(range(shape[0]), range(columns.shape[2])):
            result = (n, choose.randint(0, 5), pixel // Q, pixel % Q)
            got = answer.window(result, shape, taps, stride, padding, dilation, layout)
            wanted = [None if v == 0 else v - 1 for v in columns[n, :, pixel].tolist()]
            if got is None or list(got) != wanted:
                pytest.fail(
                    f"window({result}, {shape}, {taps}, {stride}, {padding}, {dilation}, {layout!r})\n"
                    f"  is     {got}\n  wanted {wanted}",
                    pytrace=False,
                )
