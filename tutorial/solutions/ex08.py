"""A solution of exercise 8: the address of a number in a matrix that is not there."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """A convolution of two axes. Pairs are (along rows, along columns): stride (2, 1) steps two rows and one column."""

    images: int
    channels: int  # of x, all groups
    filters: int  # channels of y, all groups
    groups: int
    size: tuple[int, int]  # of x
    out: tuple[int, int]  # of y
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]  # on both sides
    dilation: tuple[int, int]


def _at(layout: str, image: int, channel: int, row: int, column: int, channels: int, size: tuple[int, int]) -> int:
    if layout == "nchw":
        return ((image * channels + channel) * size[0] + row) * size[1] + column
    return ((image * size[0] + row) * size[1] + column) * channels + channel


def address(layer: Layer, group: int, m: int, d: int, layout: str) -> int | None:
    """How many elements A[m, d] of a group lies behind the first element of x; None where it is padding."""
    image, pixel = divmod(m, layer.out[0] * layer.out[1])
    each = layer.channels // layer.groups
    tap, channel = divmod(d, each)
    at = [
        place * stride - padding + step * dilation
        for place, step, stride, padding, dilation in zip(
            divmod(pixel, layer.out[1]), divmod(tap, layer.taps[1]), layer.stride, layer.padding, layer.dilation,
            strict=True,
        )
    ]  # fmt: skip
    if not all(0 <= place < size for place, size in zip(at, layer.size, strict=True)):
        return None
    return _at(layout, image, group * each + channel, at[0], at[1], layer.channels, layer.size)


def gradient_address(layer: Layer, group: int, m: int, d: int, layout: str) -> int | None:
    """How many elements behind the first of dy the number lies that pixel m of dx is to be summed up from for term d.

    Pixel p of y reads place p * stride - padding + tap * dilation. So p is (place + padding - tap * dilation) / stride,
    if that leaves no remainder.
    """
    image, pixel = divmod(m, layer.size[0] * layer.size[1])
    each = layer.filters // layer.groups
    tap, channel = divmod(d, each)
    at = []
    for axis, (place, step) in enumerate(zip(divmod(pixel, layer.size[1]), divmod(tap, layer.taps[1]), strict=True)):
        found, rest = divmod(place + layer.padding[axis] - step * layer.dilation[axis], layer.stride[axis])
        if rest or not 0 <= found < layer.out[axis]:
            return None
        at.append(found)
    return _at(layout, image, group * each + channel, at[0], at[1], layer.filters, layer.out)
