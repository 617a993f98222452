"""Where large results live: on huge pages, and kept for the next result of their size when they are freed.

glibc serves requests up to 32 MiB from its heap, which keeps freed memory. Beyond that every tensor is a new mapping:
the system finds its pages, clears them on first touch, and takes them back when it is freed. A 4000x4000 image in f32
has 15625 pages of 4 KiB, or 31 of 2 MiB; even with the large ones a 3x3 filter spends half of its time so (10.8 ms,
against 5.3 on memory that was there before; two AVX2 cores). Therefore results from that size on have mappings of our
own, advised to use huge pages, and up to `OPENCONV_KEEP_MB` (256) megabytes of freed ones wait for the next result of
the same size, as freed blocks of a GPU's memory do in PyTorch.

What waits is lent, not held: it is marked as free, so that the system may take the pages whenever it is short of them.
`openconv.empty_cache()` gives everything back at once, and `OPENCONV_KEEP_MB=0` keeps nothing.

PyTorch has one restriction on tensors whose memory it did not allocate, those of `torch.from_numpy` among them: they
cannot be made larger in place (`resize_`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

__all__ = ["LARGE", "empty_cache", "kept_bytes", "large_tensor", "most_kept_bytes"]

LARGE = 32 << 20  # bytes: glibc's largest request that it serves from its heap
_PAGE = 2 << 20

_kept: list[mmap.mmap] = []


def large_tensor(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that fills its memory, for results of `LARGE` bytes and more."""
    size, most = prod(shape) * dtype.itemsize, most_kept_bytes()
    mapping = _take(-(-size // _PAGE) * _PAGE + _PAGE)
    if mapping is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _PAGE
    view = memoryview(mapping)[start : start + size]
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()  # holds the view for as long as it lives
    weakref.finalize(view, _put, mapping, most).atexit = False
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(strides))


def _take(length: int) -> mmap.mmap | None:
    """A mapping that waits, the last freed first, or a new one; None where there are none of this kind (not Linux) or
    memory runs out, for which torch has its own words."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    for mapping in reversed(tuple(_kept)):
        if len(mapping) == length:
            with suppress(ValueError):  # another thread was quicker
                _kept.remove(mapping)
                return mapping
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        empty_cache()
        return None
    with suppress(OSError):  # a system without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _put(mapping: mmap.mmap, most: int) -> None:
    """Let a mapping wait, unless there is no room. Runs wherever the last tensor on it dies, inside of any other code:
    hence no lock, only list methods that are whole by themselves."""
    if len(mapping) > most:
        return
    with suppress(OSError):  # a system that cannot take single pages back
        mapping.madvise(mmap.MADV_FREE)
    _kept.append(mapping)
    while kept_bytes() > most:
        del _kept[:1]


def most_kept_bytes() -> int:
    """How much may wait at most."""
    text = os.environ.get("OPENCONV_KEEP_MB", "256")
    if not text.isdecimal():
        raise ValueError(f"OPENCONV_KEEP_MB is {text!r}; wanted a whole number of megabytes")
    return int(text) * 1_000_000


def kept_bytes() -> int:
    """How much freed memory waits now."""
    return sum(map(len, tuple(_kept)))


def empty_cache() -> None:
    """Give the memory of freed large CPU results, which openconv keeps for the next ones, back to the system.

    Needed only to make room at once: the system takes that memory by itself when it runs short.
    """
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kept.clear)  # there every page would be copied before it is written
