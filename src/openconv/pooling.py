"""Pooling of tensors: both passes of a :class:`~openconv.pool.Pool`, on any device.

CUDA tensors go to the kernels of :mod:`openconv.cuda.pool`, max pooling of f32 and f64 on the CPU to those of
:mod:`openconv.cpu.pool`. Everything else is torch's: ``reference_forward`` and ``reference_backward``, which compute in
f32 (f64 for f64) and round once. Results are in the pool's layout; an argument in another one is copied first.

``max_pool1d`` to ``max_pool3d`` are torch's functions of these names, by the kernels where these can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.memory import LARGE, large_tensor
from .pool import Pool
from .tensors import DTYPES, NAMES, in_layout, layout_of
from .torch_ops import grad_wanted, plain, undisturbed

if TYPE_CHECKING:
    from .cuda.pool import PoolBackward, PoolForward

__all__ = [
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "pool_backward",
    "pool_engine",
    "pool_forward",
    "reference_backward",
    "reference_forward",
]


def pool_forward(pool: Pool, x: Tensor) -> Tensor:
    """y of (N, C, O, P, Q) from x of (N, C, D, H, W)."""
    _check(pool, "x", x, pool.x_shape)
    if x.device.type != "cuda":
        if _is_ours(pool) and plain(x) and not grad_wanted((x,)):
            return _on_the_cpu(pool, _laid_out(pool, x))
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


# -- on the CPU -------------------------------------------------------------------------------------------------------


def _is_ours(pool: Pool) -> bool:
    return pool.mode == "max" and pool.dtype in ("f32", "f64") and 0 not in pool.x_shape


def _on_the_cpu(pool: Pool, x: Tensor) -> Tensor:
    from .cpu.pool import run_max  # it compiles when it is first needed, and brings Numba with it

    y = _empty(pool, pool.out, x.device)
    if y.numel() * y.element_size() >= LARGE:
        y = large_tensor(pool.y_shape, y.stride(), x.dtype)
    run_max(pool, x, y)
    return y


def max_pool1d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """``torch.nn.functional.max_pool1d``."""
    return _max_pool(F.max_pool1d, 1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """``torch.nn.functional.max_pool2d``."""
    return _max_pool(F.max_pool2d, 2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """``torch.nn.functional.max_pool3d``."""
    return _max_pool(F.max_pool3d, 3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def _max_pool(
    theirs: Callable[..., Any], rank: int, input: Any, window: Any, stride: Any, padding: Any, dilation: Any,
    ceil: bool, indices: bool,
) -> Any:  # fmt: skip
    """By our kernel where nobody but the caller looks on and there is one; else by torch, which has the errors too."""
    if not (torch.compiler.is_compiling() or ceil or indices) and plain(input) and input.is_cpu and undisturbed():
        layout = layout_of(input)
        if not grad_wanted((input,)) and in_layout(input, layout):
            numbers = (tuple(v) if isinstance(v, list | tuple) else v for v in (window, stride, padding, dilation))
            pool = _pool_of(rank, input.shape, input.dtype, layout, *numbers)
            if pool is not None:
                return _on_the_cpu(pool, input)
    return theirs(input, window, stride, padding, dilation, ceil_mode=ceil, return_indices=indices)


@lru_cache(maxsize=512)
def _pool_of(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str, window: Any, stride: Any, padding: Any,
    dilation: Any,
) -> Pool | None:  # fmt: skip
    """The pooling that torch's arguments describe; None if it is none of ours, or wrong."""
    if len(shape) != rank + 2 or dtype not in (torch.float32, torch.float64) or 0 in shape:
        return None
    if dilation != 1 and dilation != (1,) * rank and dilation != (1,):
        return None
    each = [value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in (window, stride, padding)]
    window, stride, padding = each
    stride = window if stride is None or stride == () else stride
    pads = padding if isinstance(padding, tuple) else (padding,) * rank
    try:
        if any(2 * pad > taps for pad, taps in zip(pads, window if isinstance(window, tuple) else (window,) * rank)):
            return None
        return Pool(
            mode="max", window=window, stride=stride, padding=tuple((pad, pad) for pad in pads), n=shape[0], c=shape[1],
            spatial=tuple(shape[2:]), dtype=NAMES[dtype], layout=layout,
        )  # fmt: skip
    except (TypeError, ValueError):
        return None


def pool_engine(pool: Pool, kind: str, backward: bool = False) -> str:
    """What computes a pooling on a kind of device, for ``explain``."""
    if kind == "cuda":
        return "cuda.pool"
    return "cpu.pool" if _is_ours(pool) and not backward else "torch"


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
