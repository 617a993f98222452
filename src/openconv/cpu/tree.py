"""Trees on the CPU: pointwise expressions over tensors that broadcast, and reductions of such, each in one pass.

A kernel is generated for a :class:`~openconv.tree.Tree` and for how its tensors lie: how many axes are left once those
that lie alike are merged, and how each tensor lies along the last of them. Sizes and strides are given at launch, so
that another batch needs no other kernel. :mod:`.tree_kernels` has the loops, :mod:`.tree_unit` what they call,
:mod:`.tree_lanes` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from math import ceil, prod
from typing import TYPE_CHECKING

from ..device import Device
from ..epilogue import Node
from ..tree import Tree
from ..tree_layout import Axis, Layout, expressions, nodes

if TYPE_CHECKING:
    from .tree_unit import Code

__all__ = ["CALLS", "CALLS_OF_F64", "DTYPES", "TreeKernel", "refusal", "seconds", "workspace_bytes"]

DTYPES = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8", "bool")

# Below 2^14 elements torch takes 33 to 54 us (two to three operations, most of it calls), a kernel 3 to 13, on two
# cores: it saves some 40 us a call, and takes 0.1 to 0.6 s to compile, once on a machine.
_LEAST = 1 << 14
_LEAST_TERMS = 32  # sum and maximum of rows of 8 take 15 ns a row, 11 with torch; of 49, 26 and 35
# Operations that call the C library for each lane, and those that do so in f64 only.
CALLS = frozenset({"sin", "cos", "tan", "atan2", "pow", "mod"})
CALLS_OF_F64 = frozenset({
    "exp", "log", "erf", "tanh", "sigmoid", "silu", "swish", "softplus", "elu", "gelu", "gelu_tanh", "elu_backward",
    "sigmoid_backward", "tanh_backward", "softplus_backward", "swish_backward", "gelu_backward", "gelu_tanh_backward",
})  # fmt: skip
# What torch computes at memory's rate.
_AS_FAST = frozenset({
    "add", "sub", "mul", "div", "max", "min", "neg", "abs", "relu", "leaky_relu", "clamp", "sigmoid", "silu", "gelu",
    "hardswish", "ceil", "floor", "sign", "sqrt", "rsqrt", "reciprocal",
})  # fmt: skip

_TILE = 1 << 14  # elements that a thread takes at a time: some 10 us, of which taking them is a hundredth
_PIECE = 1 << 15  # elements that are worth joining another piece
_TILES = 256  # enough for many threads
_BUFFER = 16 << 10  # bytes of sums that stay in the first-level cache beside what streams past
_TURNED = (64, 128)  # rows and columns of a tile where a tensor lies across it, whose cache lines are used again


class TreeKernel:
    """``kernel(inputs, results, reduced, workspace)``: a tree of tensors, all given as the addresses of their first
    elements.

    ``shape`` is the common shape; ``inputs`` and ``results`` are the strides of each tensor along all of its axes, in
    elements, 0 where an input broadcasts. Reductions run over ``axes``; a reduced tensor is contiguous over the axes
    that are kept, in their order. ``threads`` changes no bit of a result."""

    def __init__(
        self, tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
        axes: Sequence[int] = (), threads: int = 1,
    ) -> None:  # fmt: skip
        from .runtime import launch
        from .tree_kernels import compiled
        from .tree_unit import WORKSPACE

        work = _Work(tree, shape, inputs, results, axes, threads)
        self.workspace_bytes = work.workspace_bytes
        self._runs = [(work.arguments(finish), min(threads, tiles)) for finish, tiles in work.launches]
        self._launch = partial(launch, compiled(work.code)) if self._runs else None
        self._workspace = WORKSPACE

    def __call__(
        self, inputs: Sequence[int], results: Sequence[int], reduced: Sequence[int] = (), workspace: int = 0
    ) -> None:  # fmt: skip
        for given, threads in self._runs:
            args = [*given, *inputs, *results, *reduced]
            args[self._workspace] = workspace
            assert self._launch is not None
            self._launch(args, threads)


def seconds(
    tree: Tree, device: Device, shape: Sequence[int], inputs: Sequence[Sequence[int]],
    results: Sequence[Sequence[int]], axes: Sequence[int] = (),
) -> float:  # fmt: skip
    """Predicted time: all elements that there are, once, and what a launch takes."""
    return 5e-6 + Layout(tree, shape, inputs, results, axes, DTYPES).moved / (0.9 * device.bandwidth)


def workspace_bytes(
    tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
    axes: Sequence[int] = (), threads: int = 1,
) -> int:  # fmt: skip
    """What :class:`TreeKernel` needs, before it is compiled."""
    return _Work(tree, shape, inputs, results, axes, threads).workspace_bytes


def refusal(
    tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
    axes: Sequence[int] = (),
) -> str | None:  # fmt: skip
    """Why torch should compute a tree rather than a kernel, or None. :class:`TreeKernel` takes them all but for the
    dtype, and would take longer, or not be worth compiling."""
    dtypes = {*tree.inputs, *(dtype for _, dtype in tree.results), *(each.dtype for each in tree.reductions)}
    if not dtypes <= set(DTYPES):
        return f"dtype is {min(dtypes - set(DTYPES))}; kernels of trees take {', '.join(DTYPES)}"
    if not tree.inputs:
        return "there are no inputs; a kernel of a tree needs one"
    if prod(shape) < _LEAST:
        return f"there are {prod(shape)} elements; compiling a kernel pays from {_LEAST} on"
    each = {node.op for node in nodes(expressions(tree)) if isinstance(node, Node)}
    slow = each & (CALLS | CALLS_OF_F64 if tree.compute == "f64" else CALLS)
    if slow:
        return f"{', '.join(sorted(slow))} in {tree.compute} calls the C library for each element; torch has vectors"
    if dtypes == {tree.compute} and tree.flops <= 1 and (each <= _AS_FAST and len(tree.results) <= 1):
        return "it is one operation, in which torch reads and writes each element once as well"
    if not each and not tree.reductions:
        return "nothing is computed; torch copies as fast"
    work = Layout(tree, shape, inputs, results, axes, DTYPES)
    if work.tree.reductions and work.axes[-1].reduced and work.terms < _LEAST_TERMS:
        return f"results have {work.terms} terms side by side; lanes are joined into one from {_LEAST_TERMS} on"
    return None


class _Work(Layout):
    """A tree and how its tensors lie, cut into tiles."""

    def __init__(
        self, tree: Tree, shape: Sequence[int], inputs: Sequence[Sequence[int]], results: Sequence[Sequence[int]],
        axes: Sequence[int], threads: int,
    ) -> None:  # fmt: skip
        from .tree_unit import lanes_of

        super().__init__(tree, shape, inputs, results, axes, DTYPES)
        none = (0,) * self.tensors
        if self.empty and self.tree.reductions:  # results of nothing
            self.axes = [Axis(self.results, (*none, 1)), Axis(1, (*none, 0), True)]
        *self.outer, self.inner = self.axes
        reduced = [axis for axis in self.outer if axis.reduced]
        kept = [axis for axis in self.outer if not axis.reduced]
        self.across = bool(self.tree.reductions) and not self.inner.reduced
        self.nests = (kept, reduced) if self.tree.reductions else ([], self.outer)
        self.kept, self.rows = (prod(axis.size for axis in nest) for nest in self.nests)
        if self.empty:
            self.rows = 0
        self.width, self.threads, self.lanes = self.inner.size, threads, lanes_of(self.tree)
        self.tile_kept, self.tile_rows, self.tile_width, self.pieces = 1, self.rows, self.width, 1
        if not self.tree.reductions:
            self._cut_places()
        elif self.across:
            self._cut_columns()
        else:
            self._cut_terms()
        self.parts = ceil(self.width / self.tile_width)

    def _whole(self, width: int) -> int:
        """The next multiple of a unit."""
        return ceil(width / self.lanes) * self.lanes

    def _cut_places(self) -> None:
        if "apart" in self.lies:
            self.tile_rows, self.tile_width = min(self.rows, _TURNED[0]), min(self.width, _TURNED[1])
            return
        self.tile_width = min(self.width, _TILE)
        self.tile_rows = max(1, _TILE // self.tile_width)

    def _cut_terms(self) -> None:
        """Whole places while those are many; else some rows of one, or parts of a row."""
        terms = self.rows * self.width
        wanted = min(ceil(terms / _PIECE), ceil(_TILES / max(1, self.kept)))
        if wanted <= 1:
            self.tile_kept = max(1, _TILE // max(1, terms))
        elif self.rows >= wanted:
            self.tile_rows = ceil(self.rows / wanted)
            self.pieces = ceil(self.rows / self.tile_rows)
        else:
            self.tile_rows, self.tile_width = 1, self._whole(ceil(self.width / ceil(wanted / self.rows)))
            self.pieces = self.rows * ceil(self.width / self.tile_width)

    def _cut_columns(self) -> None:
        """As many columns as have their sums in the cache; some rows of them where there are few."""
        most = _BUFFER // (8 * len(self.tree.reductions)) // self.lanes * self.lanes
        self.tile_width = min(self._whole(self.width), max(self.lanes, most))
        parts, terms = ceil(self.width / self.tile_width), self.rows * min(self.width, self.tile_width)
        wanted = min(ceil(terms / _PIECE), ceil(_TILES / max(1, self.kept * parts)), self.rows)
        if wanted <= 1:
            self.tile_kept = max(1, _TILE // max(1, terms))
        else:
            self.tile_rows = ceil(self.rows / wanted)
            self.pieces = ceil(self.rows / self.tile_rows)

    @cached_property
    def lies(self) -> tuple[str, ...]:
        count = len(self.tree.inputs)
        names = {0: "once", 1: "side"}
        read = [names.get(stride, "apart") for stride in self.inner.strides[:count]]
        return (*read, *("apart" if stride > 1 else "side" for stride in self.inner.strides[count : self.tensors]))

    @cached_property
    def classes(self) -> dict[tuple[int, ...], int]:
        """Strides along all axes, and the number of tensors' class that lie so."""
        found = dict.fromkeys(self._strides_of(at) for at in range(self.tensors))
        return {strides: number for number, strides in enumerate(found)}

    def _strides_of(self, tensor: int) -> tuple[int, ...]:
        return tuple(axis.strides[tensor] for axis in self.axes)

    @cached_property
    def code(self) -> Code:
        """What the kernel is generated from."""
        from .tree_unit import Code

        kind = "pointwise" if not self.tree.reductions else "across" if self.across else "along"
        classes = tuple(self.classes[self._strides_of(at)] for at in range(self.tensors))
        place = "apart" if self.across and self.inner.strides[-1] != 1 else "side"
        return Code(kind, self.tree, self.lies, classes, (len(self.nests[0]), len(self.nests[1])), place)

    @property
    def tiles(self) -> int:
        if not self.tree.reductions:
            return ceil(self.rows / self.tile_rows) * self.parts if self.rows else 0
        return ceil(self.kept / self.tile_kept) * self.pieces * (self.parts if self.across else 1)

    @property
    def launches(self) -> list[tuple[bool, int]]:
        """Whether pieces are joined, and tiles, of each launch."""
        if not self.tiles:
            return []
        return [(False, self.tiles), *([(True, self.tiles // self.pieces)] if self.pieces > 1 else [])]

    @property
    def slot(self) -> int:
        """Bytes of the sums of a piece."""
        return 8 * len(self.tree.reductions) * (self._whole(self.tile_width) if self.across else 1)

    @property
    def workspace_bytes(self) -> int:
        if self.pieces > 1:
            return self.tiles * self.slot
        return self.threads * self.slot if self.across and self.tiles else 0

    def arguments(self, finish: bool) -> list[int]:
        """Those of a launch, but for the addresses."""
        tiles = self.tiles // self.pieces if finish else self.tiles
        parts = 1 if finish and not self.across else self.parts
        tensors = [next(at for at in range(self.tensors) if self._strides_of(at) == each) for each in self.classes]
        tensors.append(self.tensors)
        found = [
            tiles, self.kept, self.rows, self.width, self.tile_kept, self.tile_rows, self.tile_width, parts,
            self.pieces, finish, 0, self.slot, self.terms,
        ]  # fmt: skip
        found += [self.inner.strides[at] for at in tensors]
        for nest in self.nests:
            found += [axis.size for axis in nest]
            found += [axis.strides[at] for axis in nest for at in tensors]
        return found
