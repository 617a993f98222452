"""Pooling on a GPU: both passes of a :class:`~openconv.pool.Pool`, on pointers to tensors in its layout.

Forward (pool.cu)
    One step. Windows of up to 64 places are made of constants, and a thread makes several rows of y so
    that rows of x which windows share are read once; larger ones are loops that several threads share.
Backward of an average (pool_backward.cu)
    A gather: each value of dx adds the windows that it is in.
Backward of max, windows that do not overlap (pool_disjoint.cu)
    A thread finds a window's largest value again and writes all that lies under the window: dy, x and dx are moved
    once, and there is no workspace.
Backward of max, windows that overlap (pool.cu, then pool_backward.cu)
    The first step writes which place of its window each value of y is, one byte (four where a window has more than 256
    places); the second gathers dy where it is the place. A gather from x alone would find the largest value of a window
    again for each of its places: 81 loads rather than 9 for 3x3. The bytes are few beside x: 1/8 of those of f16 with
    stride 2, written once and read once.

Nothing is added by two threads, so that all bits are the same each time. Sums are f32 (f64 for f64), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, gcd, prod

from ..device import Device
from ..pool import Pool
from ..problem import DTYPE_BYTES
from . import jit
from .device import CudaDevice
from .divide import divisor
from .launch import Launch, pack

__all__ = ["PoolBackward", "PoolForward", "seconds", "sources"]

_THREADS = 256
_BYTES = 16  # of one vector: the most that one instruction loads or stores
_UNROLLED = 64  # places of a window that is made of constants
_CELL = 16  # places from one window to the next that a thread writes at once
_LOADS = 36  # of a thread that makes several rows
_AROUND = 24  # windows around a value that are unrolled
_PARTS = 32  # threads that share a window


class PoolForward:
    """``forward(x, y)``: pointers to tensors in the pool's layout. ``rows``: of y that a thread makes (windows of at
    most 64 places), and ``parts``: threads that share a window (larger ones); both are chosen if they are None."""

    def __init__(self, pool: Pool, device: CudaDevice, *, rows: int | None = None, parts: int | None = None) -> None:
        _refuse(pool, rows, parts)

        def step(vector: int) -> Launch:
            return _forward_step(pool, device, vector, False, rows, parts)

        self._step = _Aligned(pool, _channels(pool), step)

    def __call__(self, x: int, y: int) -> None:
        self._step(x, y)


class PoolBackward:
    """``backward(dy, x, dx, workspace)``: pointers to tensors in the pool's layout, and to ``workspace_bytes`` bytes.
    x is read by max only. ``rows`` and ``parts`` as of :class:`PoolForward`."""

    def __init__(self, pool: Pool, device: CudaDevice, *, rows: int | None = None, parts: int | None = None) -> None:
        _refuse(pool, rows, parts)
        self._max, self._disjoint = pool.mode == "max", _in_one_step(pool)
        self.workspace_bytes = prod(pool.y_shape) * _tap_bytes(pool) if self._max and not self._disjoint else 0

        def find(vector: int) -> Launch:
            return _forward_step(pool, device, vector, True, rows, parts)

        self._find = _Aligned(pool, _channels(pool), find)
        if self._disjoint:
            self._step = _Aligned(pool, _channels(pool), lambda vector: _disjoint_step(pool, device, vector))
        else:
            self._step = _Aligned(pool, _values(pool), lambda vector: _gather_step(pool, device, vector))

    def __call__(self, dy: int, x: int, dx: int, workspace: int = 0) -> None:
        if self._disjoint:
            self._step(dy, x, dx)
            return
        if self.workspace_bytes:
            if workspace == 0 or workspace % 4:
                raise ValueError(
                    f"workspace is at {workspace:#x}; wanted {self.workspace_bytes} bytes from a multiple of 4 on"
                )
            self._find(x, workspace)
        self._step(dy, workspace, dx)


def sources(pool: Pool, device: CudaDevice) -> list[jit.Source]:
    """What :class:`PoolForward` and :class:`PoolBackward` compile."""
    channels = _channels(pool)
    found = [_forward_source(pool, device, channels, False)]
    if _in_one_step(pool):
        return [*found, _disjoint_source(pool, channels)]
    if pool.mode == "max":
        found.append(_forward_source(pool, device, channels, True))
    return [*found, _gather_source(pool, _values(pool))]


def seconds(pool: Pool, device: Device, backward: bool = False) -> float:
    """Predicted time: all bytes once, and what a backward pass of max writes and reads in between."""
    moved, launches = pool.min_bytes, 1
    if backward and pool.mode == "max":
        moved += prod(pool.x_shape) * DTYPE_BYTES[pool.dtype]
        if not _in_one_step(pool):
            moved, launches = moved + 2 * prod(pool.y_shape) * _tap_bytes(pool), 2
    return launches * 2e-6 + moved / (0.9 * device.bandwidth)


class _Aligned:
    """A step whose vectors are as long as its pointers allow: those of the whole length, or single values. Each is
    compiled when it is first called; one of a pool without values does nothing."""

    def __init__(self, pool: Pool, vector: int, make: Callable[[int], Launch]) -> None:
        self._make, self._vector, self._bytes = make, vector, vector * DTYPE_BYTES[pool.dtype]
        self._empty = 0 in pool.x_shape
        self._whole: Launch | None = None
        self._single: Launch | None = None

    def __call__(self, *pointers: int) -> None:
        if self._empty:
            return
        if all(pointer % self._bytes == 0 for pointer in pointers):
            self._whole = self._whole or self._make(self._vector)
            self._whole(*pointers)
        else:
            self._single = self._single or self._make(1)
            self._single(*pointers)


# -- what is chosen ---------------------------------------------------------------------------------------------------


def _refuse(pool: Pool, rows: int | None, parts: int | None) -> None:
    """Places in an image (a plane of nchw) are 31 bits; unrolled windows have rows, the others parts."""
    if rows is not None and not (rows == 1 or (_fixed(pool) and pool.rank > 1 and rows in (2, 4))):
        raise ValueError(f"rows is {rows}; wanted 1, or 2 or 4 of two axes or more and {_UNROLLED} places at most")
    if parts is not None and not (parts == 1 or (not _fixed(pool) and parts in (2, 4, 8, 16, _PARTS))):
        raise ValueError(
            f"parts is {parts}; wanted 1, or a power of two up to {_PARTS} of more than {_UNROLLED} places"
        )
    most = max(prod(pool.spatial), prod(pool.out)) * (pool.c if pool.layout == "nhwc" else 1)
    if most >= 2**31 - 2**20:
        what = "image" if pool.layout == "nhwc" else "plane"
        raise ValueError(f"{what} has {most} elements; wanted fewer than {2**31 - 2**20} in {pool}")


def _fixed(pool: Pool) -> bool:
    return pool.taps <= _UNROLLED


def _in_one_step(pool: Pool) -> bool:
    """Whether the backward pass of max finds and writes at once."""
    return pool.mode == "max" and pool.disjoint and prod(pool.stride) <= _CELL


def _tap_bytes(pool: Pool) -> int:
    return 1 if pool.taps <= 256 else 4


def _channels(pool: Pool) -> int:
    """Of a thread: 16 bytes in nhwc, or as many as divide those of the tensor."""
    return gcd(_BYTES // DTYPE_BYTES[pool.dtype], pool.c) if pool.layout == "nhwc" and pool.c else 1


def _values(pool: Pool) -> int:
    """Of dx that a thread gathers: channels in nhwc, up to four of a row in nchw."""
    if pool.layout == "nhwc":
        return _channels(pool)
    most = min(4, _BYTES // DTYPE_BYTES[pool.dtype])
    return most if pool.spatial[-1] >= most else 1


def _rows(pool: Pool, device: CudaDevice, vector: int) -> int:
    """Of y that a thread makes, where windows share rows of x: as long as their loads are few enough to be unrolled and
    threads are enough to keep memory busy. Vectors fill registers: two rows of those."""
    if pool.rank == 1 or not _fixed(pool):
        return 1
    *deep, high, wide = pool.window
    stride = pool.stride[-2]
    threads = prod(pool.y_shape) // vector
    for rows in ((4, 2) if vector == 1 else (2,)) if high > stride else ():
        loads = prod(deep) * ((rows - 1) * stride + high) * wide
        if loads <= _LOADS and rows <= pool.out[-2] and threads // rows >= 1024 * device.threads:
            return rows
    return 1


def _parts(pool: Pool, device: CudaDevice, vector: int) -> int:
    """Threads that share a window: a warp in nchw, where they load side by side; in nhwc what keeps memory busy."""
    if _fixed(pool):
        return 1
    if pool.layout == "nchw":
        return _PARTS
    threads, parts = prod(pool.y_shape) // vector, 1
    while parts < _PARTS and threads * parts < 1024 * device.threads:
        parts *= 2
    return parts


# -- the kernels ------------------------------------------------------------------------------------------------------


def _three(values: tuple[int, ...], first: int) -> tuple[int, ...]:
    return (first,) * (3 - len(values)) + tuple(values)


def _large(pool: Pool) -> bool:
    """Whether threads may have numbers beyond 31 bits; cells between windows can be one more than windows an axis."""
    return max(prod(pool.x_shape), prod(size + 1 for size in pool.y_shape)) >= 2**31 - 2**20


def _source(file: str, pool: Pool, vector: int, **constants: int | bool) -> jit.Source:
    fixed = _fixed(pool)
    window, stride = ((_three(v, 1) if fixed else (1, 1, 1)) for v in (pool.window, pool.stride))
    types = {
        "T": pool.dtype,
        "Sum": "f64" if pool.dtype == "f64" else "f32",
        "Tap": {1: "u8", 4: "i32"}[_tap_bytes(pool)],
    }
    values: Mapping[str, int | bool] = {
        "fixed": fixed, "channels_last": pool.layout == "nhwc", "largest": pool.mode == "max",
        "exclude": pool.mode == "avg_exclude", "large": _large(pool), "vector": vector, "axes": pool.rank,
        **{f"window_{axis}": value for axis, value in enumerate(window)},
        **{f"stride_{axis}": value for axis, value in enumerate(stride)}, **constants,
    }  # fmt: skip
    lines = [f"using {name} = ::{kind};" for name, kind in types.items()]
    for name, value in values.items():
        kind = "bool" if isinstance(value, bool) else "int"
        lines.append(f"static constexpr {kind} {name} = {int(value)};")
    body = "\n".join(f"    {line}" for line in lines)
    return jit.Source(file, f"struct Traits {{\n{body}\n}};\n")


def _params(pool: Pool, vector: int, pointers: int, columns: int, rows: int, deep: int) -> tuple[int, bytes]:
    """Threads, of so many along the axes, and ``Params``."""
    last = pool.layout == "nhwc"
    lanes, images = (pool.c // vector, pool.n) if last else (1, pool.n * pool.c)
    each = lanes * columns * rows * deep
    channels = pool.c if last else 1
    sizes = _three(pool.spatial, 1), _three(pool.out, 1), _three(tuple(low for low, _ in pool.padding), 0)
    divisors = [divisor(v) for v in (*_three(pool.window, 1), *_three(pool.stride, 1))]
    wide = images * each, channels * prod(pool.spatial), channels * prod(pool.out)
    narrow = [
        *(word for v in (each, lanes, columns, rows) for word in divisor(v)),
        *(size for three in sizes for size in three),
        *(word for words in divisors for word in words),
        channels,
    ]
    return images * each, pack(pointers, wide, narrow)


def _launch(
    source: jit.Source, name: str, device: CudaDevice, count_and_params: tuple[int, bytes], parts: int = 1
) -> Launch:  # fmt: skip
    count, params = count_and_params
    return Launch(source, name, device, (ceil(count * parts / _THREADS),), (_THREADS,), params)


def _forward_source(
    pool: Pool, device: CudaDevice, vector: int, index: bool, rows: int | None = None, parts: int | None = None
) -> jit.Source:  # fmt: skip
    rows = rows or _rows(pool, device, vector)
    parts = parts or _parts(pool, device, vector)
    return _source("pool.cu", pool, vector, index=index, rows=rows, parts=parts)


def _forward_step(
    pool: Pool, device: CudaDevice, vector: int, index: bool, rows: int | None, parts: int | None
) -> Launch:  # fmt: skip
    rows = rows or _rows(pool, device, vector)
    parts = parts or _parts(pool, device, vector)
    deep, high, wide = _three(pool.out, 1)
    source = _forward_source(pool, device, vector, index, rows, parts)
    return _launch(source, "pool_forward", device, _params(pool, vector, 2, wide, ceil(high / rows), deep), parts)


def _gather_source(pool: Pool, vector: int) -> jit.Source:
    last = pool.layout == "nhwc"
    most = [(taps - 1) // stride + 1 for taps, stride in zip(pool.window, pool.stride, strict=True)]
    if not last:  # the windows around several values of a row
        most[-1] = (pool.window[-1] + vector - 2) // pool.stride[-1] + 1
    unrolled = _fixed(pool) and prod(most) <= _AROUND
    names = {f"most_{axis}": value for axis, value in enumerate(_three(tuple(most), 1))}
    whole = last or pool.spatial[-1] % vector == 0
    return _source("pool_backward.cu", pool, vector, unrolled=unrolled, whole=whole, **names)


def _gather_step(pool: Pool, device: CudaDevice, vector: int) -> Launch:
    deep, high, wide = _three(pool.spatial, 1)
    columns = wide if pool.layout == "nhwc" else ceil(wide / vector)
    params = _params(pool, vector, 3, columns, high, deep)
    return _launch(_gather_source(pool, vector), "pool_backward", device, params)


def _disjoint_source(pool: Pool, vector: int) -> jit.Source:
    return _source("pool_disjoint.cu", pool, vector)


def _disjoint_step(pool: Pool, device: CudaDevice, vector: int) -> Launch:
    axes = zip(pool.spatial, pool.stride, pool.padding, strict=True)
    deep, high, wide = _three(tuple(ceil((size + low) / stride) for size, stride, (low, _) in axes), 1)
    params = _params(pool, vector, 3, wide, high, deep)
    return _launch(_disjoint_source(pool, vector), "pool_disjoint", device, params)
