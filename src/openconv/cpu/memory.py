"""Where large results live: on huge pages, and kept for the next one of about their size when they are freed.

The system finds and clears the pages of new memory on first touch, and glibc makes new memory of every request beyond
32 MiB. A 4000x4000 image in f32 has 15625 pages of 4 KiB, or 31 of 2 MiB; even with the large ones a 3x3 filter spends
half of its time so (12.9 ms, against 5.7 on memory that was there before; two AVX2 cores). Smaller requests come from
glibc's heap, which keeps freed memory unless it lies at the end: depthwise 3x3 on 8x144x56x56 then takes 2.8 or 6.6 ms,
as other tensors happen to lie. Therefore results from 4 MiB on have mappings of our own, advised to use huge pages, and
up to `OPENCONV_KEEP_MB` (256) megabytes of freed ones wait for the next result of that size or down to half of it, as
freed blocks of a GPU's memory do in PyTorch. Below that the heap is as good, and its memory is warm in the cache.

Of what waits, 64 MB are held. The rest is lent: it is marked as free, so that the system may take the pages whenever it
is short of them, which costs 80 us for 16 MiB when they are used again (AMD EPYC, two cores; filling them takes 81).
`openconv.empty_cache()` gives everything back at once, and `OPENCONV_KEEP_MB=0` keeps nothing.

Workspaces of less than 32 MiB are lent for the time of a call and held in between, one for each thread that calls: new
memory for them would be found and cleared every time (dgrad of 384@14 by 768 filters of 2x2, which are put in order in
4.7 MB: 1069 us, 701 with memory that is there).

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
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..prepared import forget

__all__ = ["FRESH", "LARGE", "borrow", "empty_cache", "give_back", "kept_bytes", "large_tensor", "most_kept_bytes"]

LARGE = 4 << 20  # bytes
_HELD = 64 << 20  # bytes of waiting blocks that are not marked as free
FRESH = 32 << 20  # bytes of a workspace from which it is memory like that of a result
_PAGE = 2 << 20


@dataclass(eq=False)
class _Block:
    """A mapping and its first address, counted from its start, that is a multiple of a huge page; ``lent`` while it is
    marked as free."""

    mapping: mmap.mmap
    start: int
    lent: bool = False


_kept: list[_Block] = []
_scratch: list[Tensor] = []  # workspaces that no call is using, that of the last call at the end
_most_scratch = 0


def large_tensor(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that fills its memory, for results of `LARGE` bytes and more."""
    size, most = prod(shape) * dtype.itemsize, most_kept_bytes()
    block = _take(-(-size // _PAGE) * _PAGE + _PAGE)
    if block is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    view = memoryview(block.mapping)[block.start : block.start + size]
    storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()  # holds the view for as long as it lives
    weakref.finalize(view, _put, block, most).atexit = False
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), tuple(strides))


def _take(length: int) -> _Block | None:
    """The smallest block that waits and fits, the last freed of several, or a new one; None where there are no such
    blocks (not Linux) or memory runs out, for which torch has its own words."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    fitting = [block for block in reversed(tuple(_kept)) if length <= len(block.mapping) <= 2 * length]
    for block in sorted(fitting, key=lambda block: len(block.mapping)):
        with suppress(ValueError):  # another thread was quicker
            _kept.remove(block)
            return block
    try:
        mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        empty_cache()
        return None
    with suppress(OSError):  # a system without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return _Block(mapping, -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _PAGE)


def _put(block: _Block, most: int) -> None:
    """Let a block wait, unless there is no room. Runs wherever the last tensor on it dies, inside of any other code:
    hence no lock, only list methods that are whole by themselves."""
    if len(block.mapping) > most:
        return
    block.lent = False
    _kept.append(block)
    while kept_bytes() > most:
        del _kept[:1]
    held = 0
    for each in reversed(tuple(_kept)):
        held += len(each.mapping)
        if held > _HELD and not each.lent:
            with suppress(ValueError):  # another thread was quicker
                _kept.remove(each)  # or it might take what is being marked
                each.lent = True
                with suppress(OSError):  # a system that cannot take single pages back
                    each.mapping.madvise(mmap.MADV_FREE)
                _kept.insert(0, each)


def borrow(size: int) -> Tensor:
    """Uninitialised bytes for the time of one call, at least so many, fewer than `FRESH`; :func:`give_back` them."""
    global _most_scratch
    try:
        block = _scratch.pop()  # a call inside of a call, or of another thread, finds another one or none
    except IndexError:
        _most_scratch = most_kept_bytes()
        return large_tensor((size,), (1,), torch.uint8) if size >= _PAGE else torch.empty(size, dtype=torch.uint8)
    return block if block.numel() >= size else borrow(size)


def give_back(block: Tensor) -> None:
    """Let borrowed bytes wait for the next call."""
    if block.numel() <= _most_scratch:
        _scratch.append(block)
        while len(_scratch) > 1 and sum(each.numel() for each in tuple(_scratch)) > _most_scratch:
            del _scratch[:1]


def most_kept_bytes() -> int:
    """How much may wait at most."""
    text = os.environ.get("OPENCONV_KEEP_MB", "256")
    if not text.isdecimal():
        raise ValueError(f"OPENCONV_KEEP_MB is {text!r}; wanted a whole number of megabytes")
    return int(text) * 1_000_000


def kept_bytes() -> int:
    """How much freed memory of results waits now."""
    return sum(len(block.mapping) for block in tuple(_kept))


def empty_cache() -> None:
    """Give the memory of freed large CPU results, which openconv keeps for the next ones, back to the system, and
    forget what was made of filters (:mod:`openconv.prepared`).

    Needed to make room at once, and where filters were changed in part past torch's versions, by ``w.data`` or through
    an array that shares their memory.
    """
    _scratch.clear()
    _kept.clear()
    forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_scratch.clear)
    os.register_at_fork(after_in_child=_kept.clear)  # there every page would be copied before it is written
