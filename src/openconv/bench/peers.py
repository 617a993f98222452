"""Peers: other implementations of the same problem, each a small class that says whether it takes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from ..problem import Problem

__all__ = ["PEERS", "OpenCV", "Peer", "Torch"]


class Peer(ABC):
    """Something to compare with."""

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, problem: Problem) -> str | None:
        """Why it does not take the problem, or None."""

    @abstractmethod
    def prepare(self, problem: Problem, a: Tensor, b: Tensor) -> Callable[[], object]:
        """The call a user would make, result allocated by the peer itself."""


class Torch(Peer):
    """PyTorch as it is called: oneDNN on most CPUs, cuDNN on NVIDIA GPUs."""

    name = "torch"

    def refusal(self, problem: Problem) -> str | None:
        if not problem.epilogue.is_identity:
            return f"epilogue is {problem.epilogue}; only plain convolutions are compared"
        return None if all(lo == hi for lo, hi in problem.padding) else f"padding is {problem.padding}"

    def prepare(self, problem: Problem, a: Tensor, b: Tensor) -> Callable[[], object]:
        padding = [low for low, _ in problem.padding]
        rest = (problem.stride, padding, problem.dilation, False, [0] * problem.rank, problem.groups)
        if problem.direction == "fprop":
            function = (torch.conv1d, torch.conv2d, torch.conv3d)[problem.rank - 1]
            return lambda: function(a, b, None, problem.stride, padding, problem.dilation, problem.groups)
        backward = torch.ops.aten.convolution_backward.default
        if problem.direction == "dgrad":
            x = torch.empty(problem.x_shape, dtype=a.dtype).contiguous(memory_format=_format(a))
            return lambda: backward(a, x, b, None, *rest, [True, False, False])[0]
        w = torch.empty(problem.w_shape, dtype=a.dtype).contiguous(memory_format=_format(a))
        return lambda: backward(b, a, w, None, *rest, [False, True, False])[1]


class OpenCV(Peer):
    """cv2.filter2D on one-channel images, the border as zeros."""

    name = "opencv"

    def refusal(self, problem: Problem) -> str | None:
        if find_spec("cv2") is None:
            return "opencv-python-headless is not installed"
        same = all(sum(p) == f - 1 and p[0] == p[1] for p, f in zip(problem.padding, problem.filter, strict=True))
        plain = prod(problem.stride) == prod(problem.dilation) == problem.n == problem.c == problem.k == 1
        if problem.direction != "fprop" or problem.rank != 2 or not (plain and same) or problem.dtypes[0] != "f32":
            return "cv2.filter2D takes one f32 image, a dense filter and padding to the same size"
        return None

    def prepare(self, problem: Problem, a: Tensor, b: Tensor) -> Callable[[], object]:
        import cv2

        image, taps = a[0, 0].numpy(), b[0, 0].numpy()
        return lambda: cv2.filter2D(image, cv2.CV_32F, taps, borderType=cv2.BORDER_CONSTANT)


PEERS: tuple[Peer, ...] = (Torch(), OpenCV())


def _format(like: Tensor) -> torch.memory_format:
    if like.dim() == 4 and not like.is_contiguous():
        return torch.channels_last
    return torch.channels_last_3d if like.dim() == 5 and not like.is_contiguous() else torch.contiguous_format
