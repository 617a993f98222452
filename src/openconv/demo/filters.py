"""The picture part: filter the scene, check against float64, race PyTorch and OpenCV on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.timing import Timing, race, race_cuda
from ..functional import conv2d
from ..pictures import Picture, filter_picture, make_kernel

__all__ = ["FILTERS", "FilterResult", "run_filter"]

FILTERS = (("gaussian", 15), ("sharpen", 5), ("emboss", 3), ("edge", 3), ("sobel", 3))


@dataclass(frozen=True, eq=False)
class FilterResult:
    """One filter on the scene. ``seconds`` are medians by name; ``difference`` is the largest distance from float64, in
    grey levels, and ``allowed`` what rounding to f32 may make of it."""

    name: str
    size: int
    picture: Picture
    seconds: dict[str, float]
    difference: float
    allowed: float

    @property
    def right(self) -> bool:
        """Whether the result is as near to float64 as f32 allows."""
        return self.difference <= self.allowed

    def ratio(self, peer: str) -> float | None:
        """How many times faster than the peer."""
        return self.seconds[peer] / self.seconds["openconv"] if peer in self.seconds else None


def run_filter(scene: Picture, name: str, size: int, budget: float, place: torch.device) -> FilterResult:
    """Filter, check and time; all contestants lay zeros around the picture and take turns. On a GPU, OpenCV is timed by
    itself: it has the CPU."""
    kernel = make_kernel(name, size)
    image = torch.from_numpy(scene.pixels[..., 0].astype(np.float32))[None, None].to(place)
    weight = torch.from_numpy(kernel.weights.astype(np.float32))[:, None].to(place)
    pad = (size // 2, size // 2)
    with torch.no_grad():
        wanted = F.conv2d(image.double(), weight.double(), padding=pad)
        difference = float((conv2d(image, weight, padding=pad) - wanted).abs().max())
        calls = _contestants(image, weight, pad)
        timings = _race(calls, budget, place.type == "cuda")
    # Each tap adds one rounding of f32, relative to sum(|x|*|w|), which is at most 255 times sum(|w|).
    allowed = (size**2 + 1) * 2.0**-24 * 255 * float(np.abs(kernel.weights).sum(axis=(1, 2)).max())
    seconds = {who: timing.median for who, timing in zip(calls, timings, strict=True)}
    return FilterResult(name, size, filter_picture(scene, kernel), seconds, difference, allowed)


def _race(calls: dict[str, Callable[[], Any]], budget: float, on_gpu: bool) -> list[Timing]:
    if not on_gpu:
        return race(list(calls.values()), budget=budget * len(calls), least=3)
    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):
        timings = race_cuda([[calls["openconv"]], [calls["torch"]]], budget=budget * 2, least=3)
    others = [call for who, call in calls.items() if who not in ("openconv", "torch")]
    return timings + (race(others, budget=budget, least=3) if others else [])


def _contestants(image: Tensor, weight: Tensor, pad: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "openconv": lambda: conv2d(image, weight, None, 1, pad),
        "torch": lambda: F.conv2d(image, weight, None, 1, pad),
    }
    if find_spec("cv2") is not None:
        import cv2

        pixels, filters = image[0, 0].cpu().numpy(), [np.ascontiguousarray(w) for w in weight[:, 0].cpu().numpy()]
        border = cv2.BORDER_CONSTANT
        calls["opencv"] = lambda: [cv2.filter2D(pixels, cv2.CV_32F, taps, borderType=border) for taps in filters]
    return calls
