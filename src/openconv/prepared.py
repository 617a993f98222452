"""What engines make of filters before they multiply, kept from call to call while the filters stay as they are.

Winograd transforms the filters, the CPU's direct convolution puts them into the order in which it reads them. A model
at rest multiplies by the same filters again and again: the second call with them keeps what was made, later ones use
it. In training every step changes the filters, and nothing is kept.

Filters are the same if their memory is, its storage is still that of the same tensor, and its version has not gone up,
which every operation of torch that writes to it sees to. Two ways of writing go past the version: ``w.data``, which
``torch.autograd.gradcheck`` uses too, and memory that something else than torch holds, such as a NumPy array. Against
those the numbers themselves are compared: all of filters up to 4096, and 64 that are spread over larger ones, so that a
change of all of them is seen. Of a change of a few numbers of large filters by such a way :func:`forget` has to be
told (``openconv.empty_cache()`` does). Filters that other processes share are never kept.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["LIMIT", "forget", "kept", "kept_bytes", "prepared", "prepared_if_seen", "room"]

LIMIT = 1 << 30
"""Bytes that are kept at most; what was used least lately goes first."""

_SAMPLES = 64
_WHOLE = 1 << 12  # numbers that are all compared: 16 KB of f32, 2 us (65536 of them would take 15)


@dataclass
class _Entry:
    """Filters that were seen, and what was made of them if they were seen twice."""

    storage: Any
    version: int
    sample: Tensor
    made: Tensor | None = None


_entries: OrderedDict[Hashable, _Entry] = OrderedDict()
_gone: deque[Hashable] = deque()  # places whose filters have been freed, at any time, by any thread
_lock = threading.Lock()


def kept(w: Tensor, key: Hashable) -> Tensor | None:
    """What :func:`prepared` has kept of these filters, if it has: the usual case in inference, as quick as may be."""
    place = (w.data_ptr(), w.dtype, key)
    entry = _entries.get(place)
    if entry is None or (made := entry.made) is None or not _is_same(w, entry):
        return None
    with _lock:
        if place in _entries:  # another thread may have forgotten all
            _entries.move_to_end(place)
    return made


def prepared(w: Tensor, key: Hashable, make: Callable[[Tensor], object], spare: Tensor) -> Tensor:
    """What ``make`` fills a tensor like ``spare`` with, made now in ``spare`` itself or kept from an earlier call.

    ``key`` says what is made: the engine, and all that it depends on besides the numbers of ``w``.
    """
    made = prepared_if_seen(w, key, make, lambda: room(spare.shape, spare.stride(), spare.dtype))
    if made is None:
        make(spare)
        made = spare
    return made


def prepared_if_seen(
    w: Tensor, key: Hashable, make: Callable[[Tensor], object], empty: Callable[[], Tensor]
) -> Tensor | None:
    """The same for what is not worth making for one call: None for filters that are seen for the first time. From the
    second on it is kept, in what ``empty`` returns."""
    made = kept(w, key)
    if made is not None:
        return made
    place = (w.data_ptr(), w.dtype, key)
    entry = _entries.get(place)
    if entry is not None and _is_same(w, entry):
        return _keep(place, entry, make, empty())
    version = _version(w)
    if version is not None and not w.is_shared():
        with _lock:
            _entries[place] = _Entry(weakref.ref(w.untyped_storage(), _freed(place)), version, _sample(w).clone())
            _shrink()
    return None


def room(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for what is kept. Every call reads all of it: on huge pages, where it is large, no time goes into finding
    its pages."""
    from .cpu.memory import LARGE, large_tensor  # which asks this module to forget

    if prod(shape) * dtype.itemsize < LARGE:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return large_tensor(shape, strides, dtype)


def forget() -> None:
    """Keep nothing of what was made so far."""
    with _lock:
        _entries.clear()


def kept_bytes() -> int:
    """Bytes that are kept now."""
    with _lock:
        return sum(entry.made.nbytes for entry in _entries.values() if entry.made is not None)


def _keep(place: Hashable, entry: _Entry, make: Callable[[Tensor], object], made: Tensor) -> Tensor:
    make(made)
    with _lock:
        if _entries.get(place) is entry:
            entry.made = made
            _entries.move_to_end(place)
            _shrink()
    return made


def _shrink() -> None:
    """Drop what is gone, and then the oldest until the rest is within the limit; what was seen once has no bytes."""
    while _gone:
        place = _gone.popleft()
        if place in _entries and _entries[place].storage() is None:
            del _entries[place]
    total = sum(entry.made.nbytes for entry in _entries.values() if entry.made is not None)
    while total > LIMIT or len(_entries) > 4096:
        _, entry = _entries.popitem(last=False)
        total -= entry.made.nbytes if entry.made is not None else 0


def _freed(place: Hashable) -> Callable[[Any], None]:
    """What to do when the filters are freed, perhaps in the midst of something: let go of the memory, no more."""

    def gone(reference: Any) -> None:
        entry = _entries.get(place)
        if entry is not None and entry.storage is reference:
            entry.made = None
            _gone.append(place)

    return gone


def _version(w: Tensor) -> int | None:
    """The version of the filters' memory; tensors made under ``torch.inference_mode`` have none."""
    return None if w.is_inference() else w._version


def _sample(w: Tensor) -> Tensor:
    """All numbers of small filters; of others some that are spread over them, the first among them."""
    count = w.numel()
    step = 1 if count <= _WHOLE else count // _SAMPLES
    if w.requires_grad and torch.is_grad_enabled():
        w = w.detach()
    return w.as_strided((-(-count // step),), (step,), w.storage_offset())


def _is_same(w: Tensor, entry: _Entry) -> bool:
    """Whether these are the filters that were seen, with the same numbers."""
    unchanged = entry.storage() is w.untyped_storage() and entry.version == _version(w)
    return unchanged and torch.equal(_sample(w), entry.sample)
