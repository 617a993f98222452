"""Problem: everything that defines one convolution pass, and the facts that follow from it.

    fprop   y[n,k,p]  = sum over c,r of   x[n,c,p*stride - pad + r*dilation] * w[k,c,r]
    dgrad   dx = the transpose of fprop in x, applied to dy
    wgrad   dw = the transpose of fprop in w, applied to dy

with r, p and the input position running over one to three spatial axes, and c over the channels of k's group. The
letters are those of the whole project: N batch, C input channels, K output channels, D H W input sizes, T R S filter,
O P Q output, G groups.

A Problem is frozen, hashable and has a one-line text form that parses back to the equal Problem::

    fprop n64 c64 h56 w56 k64 r3 s3 stride2 pad1 f16 nhwc +bias+relu

===================  ===========================================================================================
token                meaning
===================  ===========================================================================================
fprop dgrad wgrad    direction
n c k                batch, input channels, output channels (of all groups together)
w, h w, d h w        input sizes; their number is the number of spatial axes
s, r s, t r s        filter sizes
stride2 stride2,1    stride, one value or one per axis; 1 if absent. Likewise dil
pad1 pad1,0 pad0:1   padding; ``low:high`` where the two ends of an axis differ; 0 if absent
g32                  groups; 1 if absent
f16 f16*f16>f32      dtype of all tensors, or of x, w and y
nhwc nhwc*nchw>nhwc  layout of all tensors, or of x, w and y (nchw: channels first; nhwc: channels last; any rank)
ieee tf32 tf32x3     how f32 products are formed; ieee if absent
x+scale+bias+relu    prologue: what is done to x before the products, with a value for each of its channels
+bias+relu           epilogue (:mod:`openconv.epilogue`); +bias+keep+relu stores the value so far as well
stats                the sum and the sum of squares of y over all but its channels are results too
===================  ===========================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

from .epilogue import IDENTITY, Epilogue

__all__ = ["DIRECTIONS", "DTYPE_BYTES", "LAYOUTS", "PRECISIONS", "Gemm", "Problem", "output_size"]

DIRECTIONS = ("fprop", "dgrad", "wgrad")
LAYOUTS = ("nchw", "nhwc")
PRECISIONS = ("ieee", "tf32", "tf32x3")
DTYPE_BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip

_FLOATS = ("f64", "f32", "f16", "bf16")
_SIZES = ("d", "h", "w")
_TAPS = ("t", "r", "s")


def output_size(size: int, taps: int, stride: int, low: int, high: int, dilation: int) -> int:
    """Positions of a filter of ``taps`` along an axis: (size + low + high - dilation*(taps-1) - 1) // stride + 1."""
    return (size + low + high - dilation * (taps - 1) - 1) // stride + 1


class Gemm(NamedTuple):
    """Sizes of the implicit matrix product, per group: ``batch`` products of (m x k) by (k x n)."""

    m: int
    n: int
    k: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One convolution pass. ``stride``, ``padding`` and ``dilation`` accept one int for all axes; a padding entry may
    be a (low, high) pair; ``dtypes`` and ``layouts`` accept one name or the three of x, w and y.

    In a dgrad, ``spatial`` is the size of dx, which settles what PyTorch calls output_padding.

    ``prologue`` is an :class:`~openconv.epilogue.Epilogue` whose ``acc`` is the value of x and whose operands have one
    value for each of the C channels, of f32 (f64 for f64). It is computed in f32 and rounded to x's dtype; padding is
    zero behind it. A dgrad has none. With ``stats``, the results of a fprop are followed by the sum and the sum of
    squares of each channel of y as it is stored, both f32 (f64 for f64).
    """

    direction: str = "fprop"
    n: int
    c: int
    k: int
    spatial: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    dtypes: tuple[str, str, str] = ("f32", "f32", "f32")
    layouts: tuple[str, str, str] = ("nchw", "nchw", "nchw")
    precision: str = "ieee"
    epilogue: Epilogue = IDENTITY
    prologue: Epilogue = IDENTITY
    stats: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in ("n", "c", "k", "groups"):
            put(name, _plain(getattr(self, name)))
        put("spatial", tuple(_plain(v) for v in self.spatial))
        rank = len(self.spatial)
        if rank not in (1, 2, 3):
            raise ValueError(f"spatial sizes are {self.spatial}; wanted 1, 2 or 3 of them")
        put("filter", _per_axis("filter", self.filter, rank))
        put("stride", _per_axis("stride", self.stride, rank))
        put("dilation", _per_axis("dilation", self.dilation, rank))
        put("padding", tuple(_ends(p) for p in _per_axis("padding", self.padding, rank)))
        put("dtypes", _per_tensor("dtype", self.dtypes, tuple(DTYPE_BYTES)))
        put("layouts", _per_tensor("layout", self.layouts, LAYOUTS))
        if isinstance(self.epilogue, str):
            put("epilogue", Epilogue.parse(self.epilogue))
        if isinstance(self.prologue, str):
            put("prologue", Epilogue.parse(self.prologue.removeprefix("x")))
        self._validate()

    def _validate(self) -> None:
        def need(ok: bool, what: str, got: object, wanted: str) -> None:
            if not ok:
                raise ValueError(f"{what} is {got}; wanted {wanted}")

        need(self.direction in DIRECTIONS, "direction", repr(self.direction), "one of " + ", ".join(DIRECTIONS))
        need(self.precision in PRECISIONS, "precision", repr(self.precision), "one of " + ", ".join(PRECISIONS))
        for name, sizes in (("n", (self.n,)), ("c", (self.c,)), ("k", (self.k,)), ("spatial", self.spatial)):
            shown = sizes[0] if len(sizes) == 1 else sizes
            need(all(_is_int(v) and v >= 0 for v in sizes), name, shown, "integers >= 0")
        for name, sizes in (("filter", self.filter), ("stride", self.stride), ("dilation", self.dilation)):
            need(all(_is_int(v) and v >= 1 for v in sizes), name, sizes, "integers >= 1")
        need(all(_is_int(v) and v >= 0 for p in self.padding for v in p), "padding", self.padding, "integers >= 0")
        need(_is_int(self.groups) and self.groups >= 1, "groups", self.groups, "an integer >= 1")
        need(self.c % self.groups == 0, "C", self.c, f"a multiple of groups = {self.groups}")
        need(self.k % self.groups == 0, "K", self.k, f"a multiple of groups = {self.groups}")
        for axis, size in enumerate(self.out):
            reach = self.dilation[axis] * (self.filter[axis] - 1) + 1
            padded = self.spatial[axis] + sum(self.padding[axis])
            need(size >= 1, f"padded input size on axis {axis}", padded, f"at least the filter's reach of {reach}")
        if self.direction == "wgrad":
            need(self.epilogue.is_identity, "epilogue of a wgrad", self.epilogue, "none: dw has no channel to fuse on")
        if not self.prologue.is_identity:
            prologue, x = f"x{self.prologue}", self.dtypes[0]
            need(self.direction != "dgrad", "prologue of a dgrad", prologue, "none: x is what it computes")
            need(not self.prologue.also, "prologue", prologue, "one result: x has no other place to go")
            for operand in self.prologue.operands:
                need(
                    operand.kind == "channel",
                    f"prologue is {prologue}; its operand",
                    operand,
                    f"c.{operand.name}: a value per channel",
                )
            need(x in _FLOATS, "prologue is on x, whose dtype", x, "one of " + ", ".join(_FLOATS))
        need(isinstance(self.stats, bool), "stats", repr(self.stats), "True or False")
        if self.stats:
            need(self.direction == "fprop", "direction of a problem with stats", self.direction, "fprop")
            y = self.result_dtype
            need(y in _FLOATS, "dtype of y with stats", y, "one of " + ", ".join(_FLOATS))

    # -- derived facts ------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.spatial)

    @cached_property
    def out(self) -> tuple[int, ...]:
        """Output sizes (O, P, Q)."""
        axes = zip(self.spatial, self.filter, self.stride, self.padding, self.dilation, strict=True)
        return tuple(output_size(size, taps, stride, *pad, dil) for size, taps, stride, pad, dil in axes)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """(N, C, D, H, W)."""
        return (self.n, self.c, *self.spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        """(K, C/G, T, R, S)."""
        return (self.k, self.c // self.groups, *self.filter)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """(N, K, O, P, Q)."""
        return (self.n, self.k, *self.out)

    @property
    def result(self) -> int:
        """Which of (x, w, y) this pass computes: 2 for fprop, 0 for dgrad, 1 for wgrad."""
        return {"fprop": 2, "dgrad": 0, "wgrad": 1}[self.direction]

    @property
    def inputs(self) -> tuple[int, int]:
        """Which of (x, w, y) the two inputs of this pass are, in their order: dgrad takes (dy, w)."""
        return {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (0, 2)}[self.direction]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of what this pass computes."""
        return (self.x_shape, self.w_shape, self.y_shape)[self.result]

    @property
    def result_dtype(self) -> str:
        """Dtype of what this pass computes."""
        return self.dtypes[self.result]

    @property
    def result_channels(self) -> int:
        """Length of the epilogue's per-channel vectors: K for fprop, C for dgrad."""
        return self.c if self.direction == "dgrad" else self.k

    @property
    def is_depthwise(self) -> bool:
        """Each input channel has filters of its own: G = C."""
        return self.groups == self.c and self.c > 0

    @property
    def is_empty(self) -> bool:
        """The pass has nothing to multiply: the result is empty, or a sum over nothing."""
        return prod(self.x_shape) == 0 or prod(self.w_shape) == 0 or prod(self.y_shape) == 0

    @property
    def is_fused(self) -> bool:
        """It has a prologue, statistics, several results, or operations in its epilogue that few engines compute."""
        return self.stats or bool(self.epilogue.also) or not (self.prologue.is_identity and self.epilogue.is_basic)

    @property
    def fusion(self) -> str:
        """The text of what is fused: prologue, epilogue and statistics, as far as there are some."""
        parts = [] if self.prologue.is_identity else [f"x{self.prologue}"]
        parts += [] if self.epilogue.is_identity else [str(self.epilogue)]
        return " ".join(parts + ["stats"] * self.stats)

    @property
    def macs(self) -> int:
        """Multiplications, counting those with padding."""
        return self.n * self.k * prod(self.out) * (self.c // self.groups) * prod(self.filter)

    @property
    def flops(self) -> int:
        """Floating-point operations: two for each multiplication, and those of what is fused."""
        each = self.epilogue.flops + 3 * self.stats
        return 2 * self.macs + each * prod(self.result_shape) + self.prologue.flops * prod(self.x_shape)

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that must move: each tensor once, operands, and what is stored besides."""
        x, w, y = (DTYPE_BYTES[d] for d in self.dtypes)
        total = x * prod(self.x_shape) + w * prod(self.w_shape) + y * prod(self.y_shape)
        sizes = {"channel": self.result_channels, "tensor": prod(self.result_shape), "scalar": 1}
        if self.is_fused:
            total += DTYPE_BYTES[self.result_dtype] * len(self.epilogue.also) * sizes["tensor"]
            total += 4 * len(self.prologue.operands) * self.c + 8 * self.stats * self.k
        return total + sum(DTYPE_BYTES[self.result_dtype] * sizes[o.kind] for o in self.epilogue.operands)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: floating-point operations per byte that must move."""
        return self.flops / self.min_bytes if self.min_bytes else 0.0

    @property
    def gemm(self) -> Gemm:
        """The implicit matrix product of this pass, per group."""
        pixels, taps = self.n * prod(self.out), prod(self.filter)
        c, k = self.c // self.groups, self.k // self.groups
        if self.direction == "fprop":
            return Gemm(pixels, k, c * taps, self.groups)
        if self.direction == "dgrad":
            return Gemm(self.n * prod(self.spatial), c, k * taps, self.groups)
        return Gemm(k, c * taps, pixels, self.groups)

    def with_(self, **changes: Any) -> Problem:
        """This problem with some fields changed."""
        return replace(self, **changes)

    # -- text ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [self.direction, f"n{self.n}", f"c{self.c}"]
        parts += [f"{name}{v}" for name, v in zip(_SIZES[-self.rank :], self.spatial, strict=True)]
        parts += [f"k{self.k}"]
        parts += [f"{name}{v}" for name, v in zip(_TAPS[-self.rank :], self.filter, strict=True)]
        pads = [str(lo) if lo == hi else f"{lo}:{hi}" for lo, hi in self.padding]
        for word, values, default in (
            ("stride", [str(v) for v in self.stride], "1"),
            ("pad", pads, "0"),
            ("dil", [str(v) for v in self.dilation], "1"),
        ):
            if set(values) != {default}:
                parts.append(word + (values[0] if len(set(values)) == 1 else ",".join(values)))
        if self.groups != 1:
            parts.append(f"g{self.groups}")
        parts.append(_join(self.dtypes))
        parts.append(_join(self.layouts))
        if self.precision != "ieee":
            parts.append(self.precision)
        if fusion := self.fusion:
            parts.append(fusion)
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Problem:
        """The problem that prints as ``text``. Order matters only for the direction, which comes first; dtype and
        layout default to f32 and nchw. ValueError names the token that is wrong or missing."""
        words = text.split()
        if not words or words[0] not in DIRECTIONS:
            got = words[0] if words else ""
            raise ValueError(f"problem {text!r} starts with {got!r}; wanted one of {', '.join(DIRECTIONS)}")
        sizes: dict[str, int] = {}
        fields: dict[str, Any] = {"direction": words[0]}

        def once(key: str, value: Any, where: dict[str, Any] = fields) -> None:
            if key in where:
                raise ValueError(f"problem {text!r} gives {key} twice")
            where[key] = value

        for word in words[1:]:
            if match := re.fullmatch(r"([ncdhwktrs])(\d+)", word):
                once(match[1], int(match[2]), sizes)
            elif match := re.fullmatch(r"(stride|dil)(\d+(?:,\d+)*)", word):
                once({"stride": "stride", "dil": "dilation"}[match[1]], tuple(int(v) for v in match[2].split(",")))
            elif match := re.fullmatch(r"pad(\d+(?::\d+)?(?:,\d+(?::\d+)?)*)", word):
                pads = [[int(v) for v in p.split(":")] for p in match[1].split(",")]
                once("padding", tuple((p[0], p[-1]) for p in pads))
            elif match := re.fullmatch(r"g(\d+)", word):
                once("groups", int(match[1]))
            elif word.startswith("+"):
                once("epilogue", Epilogue.parse(word))
            elif word.startswith("x+"):
                once("prologue", Epilogue.parse(word[1:]))
            elif word == "stats":
                once("stats", True)
            elif word in PRECISIONS:
                once("precision", word)
            elif (names := _split(word)) and all(v in DTYPE_BYTES for v in names):
                once("dtypes", names)
            elif names and all(v in LAYOUTS for v in names):
                once("layouts", names)
            else:
                raise ValueError(f"problem {text!r}: token {word!r} is not understood")
        rank = sum(axis in sizes for axis in _SIZES)
        wanted = ["n", "c", "k", *_SIZES[3 - max(rank, 1) :], *_TAPS[3 - max(rank, 1) :]]
        missing = [name for name in wanted if name not in sizes]
        spare = [name for name in sizes if name not in wanted]
        if missing or spare:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(spare)} too many"
            raise ValueError(f"problem {text!r} {what}; wanted sizes {' '.join(wanted)}")
        return cls(
            n=sizes["n"], c=sizes["c"], k=sizes["k"],
            spatial=tuple(sizes[a] for a in _SIZES[3 - rank :]),
            filter=tuple(sizes[a] for a in _TAPS[3 - rank :]),
            **fields,
        )  # fmt: skip


def _plain(value: Any) -> Any:
    """NumPy's integers as Python's; anything else as it is."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _per_axis(name: str, value: Any, rank: int) -> tuple[Any, ...]:
    """One entry per axis, from one value for all or from one for each."""
    values = tuple(_plain(v) for v in value) if isinstance(value, Sequence) else (_plain(value),)
    if len(values) == 1:
        values *= rank
    if len(values) != rank:
        raise ValueError(f"{name} is {value}; wanted one value or {rank}, one per spatial axis")
    return values


def _ends(pad: Any) -> tuple[int, int]:
    """(low, high) of one axis."""
    ends = tuple(_plain(v) for v in pad) if isinstance(pad, Sequence) else (pad, pad)
    if len(ends) != 2:
        raise ValueError(f"padding of an axis is {pad}; wanted one value or (low, high)")
    return ends


def _per_tensor(name: str, value: Any, known: tuple[str, ...]) -> tuple[str, str, str]:
    """One entry for each of x, w and y."""
    values = (value,) * 3 if isinstance(value, str) else tuple(value)
    if len(values) == 1:
        values *= 3
    unknown = [v for v in values if v not in known]
    if len(values) != 3 or unknown:
        raise ValueError(f"{name} is {value!r}; wanted one of {', '.join(known)}, or three of them for x, w and y")
    return values


def _join(names: tuple[str, str, str]) -> str:
    x, w, y = names
    return x if x == w == y else f"{x}*{w}>{y}"


def _split(word: str) -> tuple[str, ...]:
    match = re.fullmatch(r"(\w+)(?:\*(\w+)>(\w+))?", word)
    return () if match is None else tuple(v for v in match.groups() if v is not None)
