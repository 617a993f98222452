"""Pool: everything that defines one pooling, and the facts that follow from it.

    max          y[n,c,p] = the largest x[n,c,h] of the window; a NaN counts as the largest
    avg          y[n,c,p] = the sum of x[n,c,h] over the window / the places of the window
    avg_exclude  y[n,c,p] = the sum of x[n,c,h] over the window / its places inside the tensor

with h = p*stride - low + r, r = 0 ... window-1 on each of one to three spatial axes. Places outside the tensor are zero
to an average and never the largest. Windows that do not fit as a whole are left out ("floor mode").

dx of ``max`` has what windows say at the place that each chose: the first of equal ones in row-major order of the
window, or the last NaN, as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from .problem import DTYPE_BYTES, LAYOUTS, _ends, _is_int, _per_axis, _plain, output_size

__all__ = ["MODES", "Pool"]

MODES = ("max", "avg", "avg_exclude")
_DTYPES = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One pooling. ``window``, ``stride`` and ``padding`` accept one int for all axes; a padding entry may be a
    (low, high) pair.

    Padding is smaller than the window, so that every window has a place inside the tensor.
    """

    mode: str
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    n: int
    c: int
    spatial: tuple[int, ...]
    dtype: str = "f32"
    layout: str = "nchw"

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("n", _plain(self.n))
        put("c", _plain(self.c))
        put("spatial", tuple(_plain(v) for v in self.spatial))
        rank = len(self.spatial)
        if rank not in (1, 2, 3):
            raise ValueError(f"spatial sizes are {self.spatial}; wanted 1, 2 or 3 of them")
        put("window", _per_axis("window", self.window, rank))
        put("stride", _per_axis("stride", self.stride, rank))
        put("padding", tuple(_ends(pad) for pad in _per_axis("padding", self.padding, rank)))
        self._validate()

    def _validate(self) -> None:
        def need(ok: bool, what: str, got: object, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{what} is {got}; wanted {wanted}")

        need(self.mode in MODES, "mode", repr(self.mode), "one of " + ", ".join(MODES))
        need(self.dtype in _DTYPES, "dtype", repr(self.dtype), "one of " + ", ".join(_DTYPES))
        need(self.layout in LAYOUTS, "layout", repr(self.layout), "one of " + ", ".join(LAYOUTS))
        for name, size in (("n", self.n), ("c", self.c)):
            need(_is_int(size) and size >= 0, name, size, "an integer >= 0")
        for name, sizes in (("spatial", self.spatial), ("window", self.window), ("stride", self.stride)):
            need(all(_is_int(v) and v >= 1 for v in sizes), name, sizes, "integers >= 1")
        need(all(_is_int(v) and v >= 0 for p in self.padding for v in p), "padding", self.padding, "integers >= 0")
        for axis, (pad, taps) in enumerate(zip(self.padding, self.window, strict=True)):
            wanted = f"less than the window of {taps}: a window has a place inside the tensor"
            need(max(pad) < taps, f"padding on axis {axis}", pad, wanted)
            padded = self.spatial[axis] + sum(pad)
            need(padded >= taps, f"padded size on axis {axis}", padded, f"at least the window of {taps}")

    # -- derived facts ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.spatial)

    @property
    def taps(self) -> int:
        """Places of a window."""
        return prod(self.window)

    @cached_property
    def out(self) -> tuple[int, ...]:
        """Output sizes (O, P, Q)."""
        axes = zip(self.spatial, self.window, self.stride, self.padding, strict=True)
        return tuple(output_size(size, taps, stride, *pad, 1) for size, taps, stride, pad in axes)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """(N, C, D, H, W)."""
        return (self.n, self.c, *self.spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """(N, C, O, P, Q)."""
        return (self.n, self.c, *self.out)

    @property
    def disjoint(self) -> bool:
        """Whether no place is in two windows."""
        return all(taps <= stride for taps, stride in zip(self.window, self.stride, strict=True))

    @property
    def min_bytes(self) -> int:
        """Bytes that a forward pass has to move: x and y, once each."""
        return (prod(self.x_shape) + prod(self.y_shape)) * DTYPE_BYTES[self.dtype]
