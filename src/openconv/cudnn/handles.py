"""Handles: a device, and the stream that graphs run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Handle", "create_handle", "default_device", "destroy_handle", "get_stream", "on_stream_of", "set_stream"]


def default_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Handle:
    """Where graphs run: ``device``, and ``stream``, an address, or None while none was set. Graphs run on torch's
    current stream then."""

    def __init__(self, device: torch.device | None = None, stream: int | None = None) -> None:
        self.device = device or default_device()
        self.stream = stream
        self.destroyed = False

    def __repr__(self) -> str:
        stream = "torch's current stream" if self.stream is None else f"stream {self.stream:#x}"
        return f"Handle({'destroyed' if self.destroyed else f'{self.device}, {stream}'})"


def create_handle() -> Handle:
    """A handle for the current CUDA device, or for the CPU where there is none."""
    return Handle()


def destroy_handle(handle: Handle) -> None:
    """Let go of a handle. It is refused from here on; doing this twice is no error."""
    _checked(handle, "destroy_handle", alive=False)
    handle.stream, handle.destroyed = None, True


def set_stream(handle: Handle, stream: Any) -> None:
    """Have graphs that are given the handle run on this stream: a ``torch.cuda.Stream`` or an address."""
    _checked(handle, "set_stream")
    handle.stream = None if stream is None else int(getattr(stream, "cuda_stream", stream))


def get_stream(handle: Handle) -> int:
    """The address of the stream that graphs run on; 0, the default stream, where there is no CUDA device."""
    _checked(handle, "get_stream")
    if handle.stream is not None:
        return handle.stream
    return torch.cuda.current_stream(handle.device).cuda_stream if handle.device.type == "cuda" else 0


@contextmanager
def on_stream_of(handle: Handle | None, device: torch.device) -> Iterator[None]:
    """The stream of the handle is torch's current stream in here, for work on the device."""
    if handle is not None:
        _checked(handle, "execute")
    if device.type != "cuda":
        yield
    elif handle is None or handle.stream is None:
        with torch.cuda.device(device):
            yield
    else:
        external = handle.stream != 0
        stream = torch.cuda.ExternalStream(handle.stream, device) if external else torch.cuda.default_stream(device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield


def _checked(handle: Any, what: str, alive: bool = True) -> None:
    if not isinstance(handle, Handle):
        raise TypeError(f"{what}: handle is {type(handle).__name__}; wanted one of cudnn.create_handle()")
    if alive and handle.destroyed:
        raise RuntimeError(f"{what}: the handle was destroyed; wanted one that cudnn.create_handle() made since")
