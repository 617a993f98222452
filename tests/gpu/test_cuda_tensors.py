"""CUDA tensors that torch refuses."""

import pytest
import torch

import openconv


def test_tensors_on_two_devices_are_refused_as_torch_does():
    x, w = torch.randn(1, 2, 5, 5, device="cuda"), torch.randn(3, 2, 3, 3)
    for convolve in (torch.conv2d, openconv.conv2d):
        with pytest.raises(RuntimeError, match="cuda"):
            convolve(x, w)
