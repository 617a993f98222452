"""Peers: other implementations of the same problem, each a small class that says whether it takes it.

=======================  ==========================================================================================
torch                    PyTorch in the problem's own layout, eager, epilogue unfused
torch_nchw               the same, tensors converted to channels first beforehand
torch_channels_last      the same, tensors converted to channels last beforehand
torch_fused              fused operators of PyTorch: cuDNN's on the GPU, oneDNN's on the CPU
torch_compile            torch.compile of the same
cudnn                    the cuDNN frontend: the fastest of all plans, epilogue in the graph
opencv, opencv_sep       cv2.filter2D, cv2.sepFilter2D
scipy                    scipy.ndimage and scipy.signal
in_f32                   openconv for the same problem in f32; takes part where it is named
=======================  ==========================================================================================
"""

from __future__ import annotations

import torch

from ...problem import Problem
from .base import NotTaken, Peer, Prepared
from .cudnn import CuDNN
from .images import OpenCV, OpenCVSeparable, SciPy
from .own import InF32
from .torch import Torch, TorchChannelsLast, TorchCompile, TorchFused, TorchNCHW

__all__ = [
    "PEERS",
    "CuDNN",
    "InF32",
    "NotTaken",
    "OpenCV",
    "OpenCVSeparable",
    "Peer",
    "Prepared",
    "SciPy",
    "Torch",
    "TorchChannelsLast",
    "TorchCompile",
    "TorchFused",
    "TorchNCHW",
    "default_peers",
    "peer_named",
]

PEERS: tuple[Peer, ...] = (
    Torch(), TorchNCHW(), TorchChannelsLast(), TorchFused(), TorchCompile(), CuDNN(), OpenCV(), OpenCVSeparable(),
    SciPy(), InF32(),
)  # fmt: skip


def peer_named(name: str) -> Peer:
    """The peer of this name; ValueError lists those there are."""
    found = next((peer for peer in PEERS if peer.name == name), None)
    if found is None:
        raise ValueError(f"there is no peer {name!r}; wanted one of {', '.join(peer.name for peer in PEERS)}")
    return found


def default_peers(problem: Problem, device: torch.device) -> tuple[Peer, ...]:
    """All usual peers that take the problem, except torch_compile where there is nothing to fuse: it would run torch's
    own kernel, and compiling thousands of plain convolutions takes hours."""
    if problem.is_fused:  # none computes a prologue, or several results
        return ()
    plain = problem.epilogue.is_identity
    return tuple(
        peer for peer in PEERS
        if peer.usual and not (plain and isinstance(peer, TorchCompile)) and not peer.refusal(problem, device)
    )  # fmt: skip
