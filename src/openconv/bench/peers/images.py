"""Libraries that filter images and signals on the CPU: OpenCV and SciPy.

They take forward passes of single images whose channels are filtered apart: the depthwise problems with as many
outputs as inputs. OpenCV is given as many threads as torch has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...problem import Problem
from ...reference import Inputs
from ...tensors import layout_of
from .base import NotTaken, Peer, Prepared, first_unmet, same_dtype

__all__ = ["OpenCV", "OpenCVSeparable", "SciPy"]

_Array = np.ndarray[Any, np.dtype[Any]]
_Filter = Callable[[_Array], _Array]
"""One plane, or an interleaved image, to the same filtered."""


def _filters_planes(problem: Problem, device: torch.device) -> tuple[tuple[bool, str], ...]:
    one_each = problem.c == problem.k == problem.groups
    return (
        (device.type == "cpu", f"device is {device.type}; it runs on the CPU"),
        (problem.direction == "fprop", f"direction is {problem.direction}; it filters forwards only"),
        (problem.epilogue.is_identity, f"epilogue is {problem.epilogue}; it filters only"),
        (problem.n == 1, f"N is {problem.n}; it takes one image"),
        (one_each, f"C, K and groups are {problem.c}, {problem.k} and {problem.groups}; it filters each channel apart"),
        (prod(problem.stride) == 1, f"stride is {problem.stride}; it has none"),
        (prod(problem.dilation) == 1, f"dilation is {problem.dilation}; it has none"),
        same_dtype(problem),
    )


class OpenCV(Peer):
    """cv2.filter2D, zeros around the image. Of three channels that are interleaved (nhwc), those with one filter are
    filtered in one call, others plane by plane between cv2.split and cv2.merge."""

    name = "opencv"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        same = [
            0 <= low < taps and low + high == taps - 1 for (low, high), taps in zip(problem.padding, problem.filter)
        ]
        return first_unmet((
            (find_spec("cv2"), "opencv-python-headless is not installed"),
            *_filters_planes(problem, device),
            (problem.rank == 2, f"rank is {problem.rank}; it filters images"),
            (problem.c in (1, 3), f"C is {problem.c}; images have 1 or 3 channels"),
            (problem.dtypes[0] == "f32", f"dtype is {problem.dtypes[0]}; it is compared in f32"),
            (all(same), f"padding is {problem.padding}; it keeps the size of the image"),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        import cv2

        cv2.setNumThreads(torch.get_num_threads())
        calls = tuple(_on_image(problem, inputs, partial(self.filter_of, problem)) for inputs in sets)
        return Prepared(calls, result=_from_planes if _in_planes(problem) else _from_interleaved)

    def filter_of(self, problem: Problem, taps: _Array) -> _Filter:
        """The filter as a call on an image."""
        import cv2

        anchor = _anchor(problem)
        return lambda image: cv2.filter2D(image, cv2.CV_32F, taps, anchor=anchor, borderType=cv2.BORDER_CONSTANT)


class OpenCVSeparable(OpenCV):
    """cv2.sepFilter2D, for filters that are the product of a column and a row. Only the data tell: `prepare` raises
    NotTaken unless every filter of every set is of rank 1 within 1e-6 of its largest singular value."""

    name = "opencv_sep"

    def filter_of(self, problem: Problem, taps: _Array) -> _Filter:
        import cv2

        columns, sizes, rows = np.linalg.svd(taps.astype(np.float64))
        second = sizes[1] / sizes[0] if len(sizes) > 1 and sizes[0] else 0.0
        if second > 1e-6:
            raise NotTaken(f"the filter's second singular value is {second:.1e} of its first; a separable one has 0")
        column = (columns[:, 0] * sizes[0]).astype(np.float32)
        row, anchor = rows[0].astype(np.float32), _anchor(problem)
        return lambda image: cv2.sepFilter2D(
            image, cv2.CV_32F, row, column, anchor=anchor, borderType=cv2.BORDER_CONSTANT
        )


class SciPy(Peer):
    """scipy.ndimage.correlate for small filters, overlapping transforms (scipy.signal.oaconvolve) for large ones:
    from 15x15 taps in two or three axes on, from 64 in one. The transforms get as many workers as torch has threads.
    """

    name = "scipy"

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        fits = [low + high < taps for (low, high), taps in zip(problem.padding, problem.filter)]
        return first_unmet((
            (find_spec("scipy"), "scipy is not installed"),
            *_filters_planes(problem, device),
            (problem.dtypes[0] in ("f32", "f64"), f"dtype is {problem.dtypes[0]}; it takes f32 and f64"),
            (all(fits), f"padding is {problem.padding}; its results are at most as large as the image"),
        ))  # fmt: skip

    def prepare(self, problem: Problem, sets: Sequence[Inputs]) -> Prepared:
        large = prod(problem.filter) >= (64 if problem.rank == 1 else 225)
        make = _transformed if large else _correlated
        calls = tuple(_on_planes(inputs, partial(make, problem)) for inputs in sets)
        return Prepared(calls, "scipy.signal.oaconvolve" if large else "scipy.ndimage.correlate", _from_planes)


# -- calls on planes and on interleaved images --------------------------------------------------------------------


def _in_planes(problem: Problem) -> bool:
    return problem.c == 1 or problem.layouts[0] == "nchw"


def _on_image(problem: Problem, inputs: Inputs, make: Callable[[_Array], _Filter]) -> Callable[[], object]:
    if _in_planes(problem):
        return _on_planes(inputs, make)
    import cv2

    assert layout_of(inputs.a) == "nhwc"
    image, taps = inputs.a[0].permute(1, 2, 0).numpy(), _taps(inputs)
    if all(np.array_equal(taps[0], other) for other in taps[1:]):
        return partial(make(taps[0]), image)
    filters = [make(t) for t in taps]
    return lambda: cv2.merge([f(plane) for f, plane in zip(filters, cv2.split(image), strict=True)])


def _on_planes(inputs: Inputs, make: Callable[[_Array], _Filter]) -> Callable[[], object]:
    """One call for each plane; the results stay apart, as they lie in the problem's memory."""
    planes = [np.ascontiguousarray(plane) for plane in inputs.a[0].numpy()]
    pairs = [(make(taps), plane) for taps, plane in zip(_taps(inputs), planes, strict=True)]
    return lambda: [f(plane) for f, plane in pairs]


def _taps(inputs: Inputs) -> list[_Array]:
    return [np.ascontiguousarray(taps) for taps in inputs.b[:, 0].numpy()]


def _from_planes(value: list[_Array]) -> Tensor:
    return torch.stack([torch.from_numpy(np.ascontiguousarray(plane)) for plane in value])[None]


def _from_interleaved(value: _Array) -> Tensor:
    return torch.from_numpy(value).permute(2, 0, 1)[None]


def _anchor(problem: Problem) -> tuple[int, int]:
    """The tap that lies on the result's pixel, x first: as many taps before it as there is padding."""
    (top, _), (left, _) = problem.padding
    return left, top


# -- SciPy's two ways ---------------------------------------------------------------------------------------------


def _correlated(problem: Problem, taps: _Array) -> _Filter:
    from scipy import ndimage

    # The origin moves the filter's middle, size // 2, to the tap that lies on the result's pixel.
    origin = tuple(low - size // 2 for (low, _), size in zip(problem.padding, problem.filter, strict=True))
    inside = tuple(slice(0, size) for size in problem.out)
    return lambda plane: ndimage.correlate(plane, taps, mode="constant", origin=origin)[inside]


def _transformed(problem: Problem, taps: _Array) -> _Filter:
    from scipy import fft, signal

    turned = np.ascontiguousarray(np.flip(taps))  # a convolution with the filter turned round is a correlation
    starts = [size - 1 - low for size, (low, _) in zip(problem.filter, problem.padding, strict=True)]
    inside = tuple(slice(start, start + size) for start, size in zip(starts, problem.out, strict=True))
    workers = torch.get_num_threads()

    def run(plane: _Array) -> _Array:
        with fft.set_workers(workers):
            return signal.oaconvolve(plane, turned, mode="full")[inside]

    return run
