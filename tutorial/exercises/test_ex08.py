"""Grades exercise 8: numbers that are their own addresses, unfolded by torch, and a search for every gradient."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F


def _layer(answer: ModuleType, seed: int) -> Any:
    draw = random.Random(seed)
    while True:
        size, taps, stride, padding, dilation = (
            (draw.randint(low, high), draw.randint(low, high)) for low, high in ((3, 7), (1, 3), (1, 3), (0, 2), (1, 2))
        )
        axes = zip(size, taps, stride, padding, dilation, strict=True)
        out = tuple((n + 2 * pad - gap * (t - 1) - 1) // step + 1 for n, t, step, pad, gap in axes)
        if min(out) > 0:
            break
    groups = draw.randint(1, 2)
    return answer.Layer(
        draw.randint(1, 2), groups * draw.randint(1, 3), groups * draw.randint(1, 3), groups, size, out, taps, stride,
        padding, dilation,
    )  # fmt: skip


def _addresses(images: int, channels: int, size: tuple[int, int], layout: str) -> torch.Tensor:
    """An image of shape NCHW whose numbers are their addresses, counted from 1: 0 is padding."""
    shape = (images, channels, *size) if layout == "nchw" else (images, *size, channels)
    numbers = torch.arange(1, images * channels * size[0] * size[1] + 1, dtype=torch.float64).view(shape)
    return numbers if layout == "nchw" else numbers.permute(0, 3, 1, 2)


def _check(found: int | None, wanted: int, what: str) -> None:
    expected = wanted - 1 if wanted else None
    if found != expected:
        pytest.fail(f"{what} is {found}; wanted {expected}", pytrace=False)


def _check_addresses(answer: ModuleType, layer: Any, layout: str) -> None:
    each, taps = layer.channels // layer.groups, layer.taps[0] * layer.taps[1]
    x = _addresses(layer.images, layer.channels, layer.size, layout)
    unfolded = F.unfold(x, layer.taps, layer.dilation, layer.padding, layer.stride)
    # (image, channel, tap, pixel) to (group, image, pixel, tap, channel of the group)
    matrix = unfolded.view(layer.images, layer.groups, each, taps, -1).permute(1, 0, 4, 3, 2)
    for group, rows in enumerate(matrix.reshape(layer.groups, -1, taps * each).long().tolist()):
        for m, row in enumerate(rows):
            for d, wanted in enumerate(row):
                what = f"address(layer, group={group}, m={m}, d={d}, layout={layout!r}) of {layer}"
                _check(answer.address(layer, group, m, d, layout), wanted, what)


def _check_gradients(answer: ModuleType, layer: Any, layout: str) -> None:
    dy = _addresses(layer.images, layer.filters, layer.out, layout).long()
    each, taps = layer.filters // layer.groups, layer.taps[0] * layer.taps[1]
    height, width = layer.size
    wanted = torch.zeros(layer.groups, layer.images, height, width, taps, each, dtype=torch.long)
    for p in range(layer.out[0]):
        for q in range(layer.out[1]):
            for tap in range(taps):
                row = p * layer.stride[0] - layer.padding[0] + tap // layer.taps[1] * layer.dilation[0]
                column = q * layer.stride[1] - layer.padding[1] + tap % layer.taps[1] * layer.dilation[1]
                if 0 <= row < height and 0 <= column < width:
                    read = dy[:, :, p, q].view(layer.images, layer.groups, each).transpose(0, 1)
                    wanted[:, :, row, column, tap] = read
    for group, rows in enumerate(wanted.view(layer.groups, -1, taps * each).tolist()):
        for m, terms in enumerate(rows):
            for d, term in enumerate(terms):
                what = f"gradient_address(layer, group={group}, m={m}, d={d}, layout={layout!r}) of {layer}"
                _check(answer.gradient_address(layer, group, m, d, layout), term, what)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_addresses_are_those_that_unfold_reads(answer: ModuleType, layout: str) -> None:
    for seed in range(20):
        _check_addresses(answer, _layer(answer, seed), layout)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_gradients_come_from_the_pixels_that_read(answer: ModuleType, layout: str) -> None:
    for seed in range(20):
        _check_gradients(answer, _layer(answer, seed), layout)
