"""Pooling of tensors: both passes of a :class:`~openconv.pool.Pool`, on any device.

CUDA tensors go to the kernels of :mod:`openconv.cuda.pool`. Everything else is torch's: ``reference_forward`` and
``reference_backward``, which compute in f32 (f64 for f64) and round once. Results are in the pool's layout; an argument
in another one is copied first on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .pool import Pool
from .tensors import DTYPES, NAMES

if TYPE_CHECKING:
    from .cuda.pool import PoolBackward, PoolForward

__all__ = ["pool_backward", "pool_forward", "reference_backward", "reference_forward"]


def pool_forward(pool: Pool, x: Tensor) -> Tensor:
    """y of (N, C, O, P, Q) from x of (N, C, D, H, W)."""
    _check(pool, "x", x, pool.x_shape)
    if x.device.type != "cuda":
        return _laid_out(pool, reference_forward(pool, x))
    held, y = _laid_out(pool, x), _empty(pool, pool.out, x.device)
    _forward(pool, _index(x))(held.data_ptr(), y.data_ptr())
    return y


def pool_backward(pool: Pool, dy: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """dx of (N, C, D, H, W) from dy of (N, C, O, P, Q). ``max`` needs x, in which each window's choice is found again;
    averages need neither. y has nothing to add: it is taken and checked for callers that have it at hand."""
    _check(pool, "dy", dy, pool.y_shape)
    if x is not None:
        _check(pool, "x", x, pool.x_shape, dy)
    elif pool.mode == "max":
        raise ValueError("x is None; the backward pass of max needs it to find what each window chose")
    if y is not None:
        _check(pool, "y", y, pool.y_shape, dy)
    if dy.device.type != "cuda":
        return _laid_out(pool, reference_backward(pool, dy, x))
    run = _backward(pool, _index(dy))
    kept = _laid_out(pool, dy)
    held = _laid_out(pool, x) if x is not None and pool.mode == "max" else kept
    dx = _empty(pool, pool.spatial, dy.device)
    workspace = torch.empty(run.workspace_bytes, dtype=torch.uint8, device=dy.device)
    run(kept.data_ptr(), held.data_ptr(), dx.data_ptr(), workspace.data_ptr())
    return dx


# -- torch's ----------------------------------------------------------------------------------------------------------


def reference_forward(pool: Pool, x: Tensor) -> Tensor:
    """y by torch's own pooling."""
    y = _largest(pool, x.to(_wide(pool)))[0] if pool.mode == "max" else _average(pool, x.to(_wide(pool)))
    return y.to(x.dtype)


def reference_backward(pool: Pool, dy: Tensor, x: Tensor | None = None) -> Tensor:
    """dx by torch: that of ``max`` from the places that its pooling chose, that of an average by autograd."""
    wide = dy.to(_wide(pool))
    if pool.mode == "max":
        assert x is not None
        _, chosen = _largest(pool, x.detach().to(_wide(pool)))
        dx = wide.new_zeros(pool.x_shape).flatten(2)
        return dx.scatter_add_(2, chosen.flatten(2), wide.flatten(2)).view(pool.x_shape).to(dy.dtype)
    with torch.enable_grad():
        anything = wide.new_zeros(pool.x_shape).requires_grad_()
        (dx,) = torch.autograd.grad(_average(pool, anything), anything, wide)
    return dx.to(dy.dtype)


def _largest(pool: Pool, x: Tensor) -> tuple[Tensor, Tensor]:
    """y, and where in an image of x each of its values is."""
    if 0 in pool.x_shape:
        return x.new_empty(pool.y_shape), x.new_empty(pool.y_shape, dtype=torch.int64)
    padded = _padded(pool, x, -torch.inf)
    max_pool = F.max_pool3d if pool.rank == 3 else F.max_pool2d
    y, at = max_pool(padded, _planes(pool.window, 1), _planes(pool.stride, 1), return_indices=True)
    # A place in the padding is a window's first, and all of the window is -inf: its first place inside is meant. That
    # is the nearest one, axis by axis.
    sizes, lows = _planes(pool.spatial, 1), _planes([low for low, _ in pool.padding], 0)
    place = torch.zeros_like(at)
    scale = 1
    for size, low, whole in reversed(list(zip(sizes, lows, padded.shape[2:], strict=True))):
        place += (at % whole - low).clamp(0, size - 1) * scale
        at, scale = at // whole, scale * size
    return y.reshape(pool.y_shape), place.reshape(pool.y_shape)


def _average(pool: Pool, x: Tensor) -> Tensor:
    if 0 in pool.x_shape:
        return x.sum() + x.new_zeros(pool.y_shape)
    return _sums(pool, x) / (pool.taps if pool.mode == "avg" else _sums(pool, torch.ones_like(x[:1, :1])))


def _sums(pool: Pool, x: Tensor) -> Tensor:
    avg_pool = F.avg_pool3d if pool.rank == 3 else F.avg_pool2d
    padded = _padded(pool, x, 0.0)
    sums = avg_pool(padded, _planes(pool.window, 1), _planes(pool.stride, 1), divisor_override=1)
    return sums.reshape(*x.shape[:2], *pool.out)


def _padded(pool: Pool, x: Tensor, value: float) -> Tensor:
    """x with its padding around it. A line is a plane of one row: torch's pooling of lines knows fewer options."""
    whole = x.reshape(*x.shape[:2], *_planes(x.shape[2:], 1))
    ends = [end for pad in reversed(pool.padding) for end in pad]
    return F.pad(whole, ends, value=value) if any(ends) else whole


def _planes(values: Sequence[int], first: int) -> tuple[int, ...]:
    return (first, *values) if len(values) == 1 else tuple(values)


def _wide(pool: Pool) -> torch.dtype:
    return torch.float64 if pool.dtype == "f64" else torch.float32


# -- tensors ----------------------------------------------------------------------------------------------------------


def _check(pool: Pool, name: str, tensor: Tensor, shape: tuple[int, ...], other: Tensor | None = None) -> None:
    if tuple(tensor.shape) != shape:
        raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}; wanted {shape} of {pool}")
    if tensor.dtype != DTYPES[pool.dtype]:
        seen = NAMES.get(tensor.dtype, str(tensor.dtype))
        raise TypeError(f"{name} is of dtype {seen}; wanted {pool.dtype} of {pool}")
    if other is not None and tensor.device != other.device:
        raise RuntimeError(f"{name} is on {tensor.device} and dy on {other.device}; wanted both on one device")


def _laid_out(pool: Pool, tensor: Tensor) -> Tensor:
    """The tensor in the pool's layout: itself, or a copy."""
    if pool.layout == "nchw":
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def _empty(pool: Pool, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    dtype = DTYPES[pool.dtype]
    if pool.layout == "nchw":
        return torch.empty((pool.n, pool.c, *sizes), dtype=dtype, device=device)
    return torch.empty((pool.n, *sizes, pool.c), dtype=dtype, device=device).movedim(-1, 1)


def _index(tensor: Tensor) -> int:
    return tensor.device.index or 0


@lru_cache(maxsize=512)
def _forward(pool: Pool, index: int) -> PoolForward:
    from .cuda.device import cuda_device
    from .cuda.pool import PoolForward

    return PoolForward(pool, cuda_device(index))


@lru_cache(maxsize=512)
def _backward(pool: Pool, index: int) -> PoolBackward:
    from .cuda.device import cuda_device
    from .cuda.pool import PoolBackward

    return PoolBackward(pool, cuda_device(index))
