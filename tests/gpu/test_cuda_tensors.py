"""CUDA tensors: no engine runs there yet, and a call says so before anything is computed."""

import pytest
import torch

import openconv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_call_on_cuda_tensors_is_refused_by_name(dtype):
    x, w = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((2, 8, 9, 9), (4, 8, 3, 3)))
    with pytest.raises(openconv.UnsupportedProblem, match="no engine runs on this device") as caught:
        openconv.conv2d(x, w, padding=1)
    assert caught.value.problem.x_shape == (2, 8, 9, 9)


def test_tensors_on_two_devices_are_refused_as_torch_does():
    x, w = torch.randn(1, 2, 5, 5, device="cuda"), torch.randn(3, 2, 3, 3)
    for convolve in (torch.conv2d, openconv.conv2d):
        with pytest.raises(RuntimeError, match="cuda"):
            convolve(x, w)
