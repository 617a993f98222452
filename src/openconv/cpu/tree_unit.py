"""The unit of a tree's kernel on the CPU: functions that Numba kernels call, whose instructions the expressions give.

What shapes a unit is a :class:`Code`. Kernels close over its text, which the cache on disk is keyed by as well, and the
functions below, which take that text as their first argument, look the :class:`Code` up by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from ..epilogue import Const, Expr, Node
from ..tree import Tree
from ..tree_layout import expressions, nodes
from .runtime import ARGUMENTS_OFFSET
from .simd import LANE_BYTES, Vector, pack, unpack
from .tree_lanes import MEMORY, Lanes, emit_load, emit_store, loaded, stored

__all__ = [
    "FINISH",
    "FIRST",
    "KEPT",
    "PARTS",
    "PIECES",
    "ROWS",
    "SLOT",
    "TERMS",
    "TILES",
    "TILE_KEPT",
    "TILE_ROWS",
    "TILE_WIDTH",
    "WIDTH",
    "WORKSPACE",
    "Code",
    "addresses",
    "finish",
    "folded",
    "joined",
    "known",
    "lanes_of",
    "nothing",
    "origin",
    "places",
    "row_values",
    "save",
    "saved",
    "unit",
    "unit_joined",
]

_I32, _I64, _DOUBLE = ir.IntType(32), ir.IntType(64), ir.DoubleType()

# The arguments of a launch: these, then the last axis's stride in each class, then what two nests of axes are, then the
# addresses of all tensors.
TILES, KEPT, ROWS, WIDTH, TILE_KEPT, TILE_ROWS, TILE_WIDTH, PARTS, PIECES, FINISH, WORKSPACE, SLOT, TERMS = range(13)
FIRST = 13


def lanes_of(tree: Tree) -> int:
    """Elements of a unit."""
    return LANE_BYTES // (8 if tree.compute == "f64" else 4)


@dataclass(frozen=True)
class Code:
    """What a unit is made from. ``lies`` says how each input and result lies along the last axis (``once``, ``side`` by
    side, ``apart``), ``classes`` which of them have equal strides; ``nests`` are the axes that tiles and that rows are
    counted through. ``place`` is how reduced tensors lie along the last axis, where that is kept."""

    kind: str
    tree: Tree
    lies: tuple[str, ...]
    classes: tuple[int, ...]
    nests: tuple[int, int]
    place: str = "side"

    @property
    def key(self) -> str:
        return f"{self.kind} {self.tree} {','.join(self.lies)} {self.classes} {self.nests} {self.place}"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (*self.tree.inputs, *(dtype for _, dtype in self.tree.results))

    @property
    def strides(self) -> int:
        """How many there are along an axis: one of each class, and one of reduced tensors."""
        return max(self.classes, default=-1) + 2

    @property
    def pointers(self) -> int:
        """The argument that is the first tensor's address."""
        return FIRST + self.strides + sum(axes * (1 + self.strides) for axes in self.nests)

    def nest(self, number: int) -> int:
        """The argument that is the first of a nest: its sizes, then the strides of each axis."""
        return FIRST + self.strides + sum(axes * (1 + self.strides) for axes in self.nests[:number])

    @cached_property
    def ordered(self) -> list[Expr]:
        return nodes(expressions(self.tree))

    @cached_property
    def same(self) -> set[Expr]:
        """What is the same for a whole row."""
        once = {leaf for leaf, lie in zip(self.tree.leaves, self.lies, strict=False) if lie == "once"}
        found: set[Expr] = set()
        for node in self.ordered:
            if node in once or isinstance(node, Const) or (node.children and all(c in found for c in node.children)):
                found.add(node)
        return found

    @cached_property
    def fixed(self) -> list[Expr]:
        """Of those what something else in a unit needs, but constants."""
        needed = {child for node in self.ordered if node not in self.same for child in node.children}
        needed |= set(expressions(self.tree))
        return [node for node in self.ordered if node in self.same & needed and not isinstance(node, Const)]

    @cached_property
    def loose(self) -> list[Expr]:
        """What every unit computes, and constants."""
        return [node for node in self.ordered if node not in self.same or isinstance(node, Const)]


_codes: dict[str, Code] = {}


def known(code: Code) -> str:
    """Its text, by which the functions below find it."""
    _codes[code.key] = code
    return code.key


# -- what is emitted --------------------------------------------------------------------------------------------------


def _code(key: types.Type) -> Code | None:
    return _codes[key.literal_value] if isinstance(key, types.StringLiteral) else None


def _argument(builder: ir.IRBuilder, block: ir.Value, index: int) -> ir.Value:
    place = builder.add(block, ir.Constant(_I64, ARGUMENTS_OFFSET + 8 * index))
    return builder.load(builder.inttoptr(place, _I64.as_pointer()), align=8, typ=_I64)


def _offsets(code: Code) -> types.UniTuple:
    return types.UniTuple(types.int64, code.strides)


def _addresses(code: Code) -> types.UniTuple:
    return types.UniTuple(types.int64, len(code.dtypes))


def _values(code: Code) -> types.UniTuple:
    kind = types.float64 if code.tree.compute == "f64" else types.float32
    return types.UniTuple(Vector(kind, lanes_of(code.tree)), max(1, len(code.fixed)))


def _sums(code: Code) -> types.UniTuple:
    return types.UniTuple(Vector(types.float64, lanes_of(code.tree)), len(code.tree.reductions))


def _emit_computed(v: Lanes, wanted: Sequence[Expr], values: dict[Expr, ir.Value]) -> None:
    """Fill in the values of nodes, whose children have theirs or are constants."""
    for node in wanted:
        if node in values:
            continue
        if isinstance(node, Const):
            values[node] = v.number(node.value)
        elif isinstance(node, Node):
            if node.op == "pow" and node.args[1] == Const(2.0):
                values[node] = v.mul(values[node.args[0]], values[node.args[0]])
            else:
                values[node] = v.emit(node.op, [values[arg] for arg in node.args], node.params)


def _lanes(builder: ir.IRBuilder, code: Code) -> Lanes:
    return Lanes(builder, lanes_of(code.tree), code.tree.compute == "f64")


def _emit_mask(builder: ir.IRBuilder, count: ir.Value, lanes: int) -> ir.Value:
    """On in the first ``count`` lanes."""
    kind = ir.VectorType(_I32, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), builder.trunc(count, _I32), ir.Constant(_I32, 0))
    splat = builder.shuffle_vector(first, first, ir.Constant(kind, [0] * lanes))
    return builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), splat)


def _emit_unit(
    builder: ir.IRBuilder, code: Code, block: ir.Value, addresses: ir.Value, fixed: ir.Value, column: ir.Value,
    count: ir.Value | None,
) -> tuple[list[ir.Value], ir.Value | None]:  # fmt: skip
    """Read a unit, compute, write its results. What is reduced comes back, with the mask of lanes that are there. All
    lanes are there if ``count`` is None."""
    v, tree = _lanes(builder, code), code.tree
    values = dict(zip(code.fixed, unpack(builder, fixed), strict=False))
    loose = set(code.loose)
    read = [at for at, leaf in enumerate(tree.leaves) if leaf in loose]
    starts = unpack(builder, addresses)
    steps: dict[int, ir.Value] = {}
    for at, lie in enumerate(code.lies):
        size = ir.Constant(_I64, MEMORY[code.dtypes[at]][1])
        if lie == "side":
            starts[at] = builder.add(starts[at], builder.mul(column, size))
        elif lie == "apart":
            steps[at] = builder.mul(_argument(builder, block, FIRST + code.classes[at]), size)
            starts[at] = builder.add(starts[at], builder.mul(column, steps[at]))
    mask = None if count is None else _emit_mask(builder, count, v.count)
    last = ir.Constant(_I64, v.count - 1) if count is None else builder.sub(count, ir.Constant(_I64, 1))
    for at in read:
        value = emit_load(v, code.dtypes[at], code.lies[at], starts[at], steps.get(at), mask, last)
        values[tree.leaves[at]] = loaded(v, value, code.dtypes[at])
    _emit_computed(v, code.loose, values)
    for at, (expr, dtype) in enumerate(tree.results, len(tree.inputs)):
        emit_store(v, stored(v, values[expr], dtype), dtype, code.lies[at], starts[at], steps.get(at), mask, last)
    return [values[each.expr] for each in tree.reductions], mask


_STARTS = {"mul": 1.0, "mul_no_zeros": 1.0, "min": math.inf, "max": -math.inf}


def _emit_join(v: Lanes, mode: str, a: ir.Value, b: ir.Value) -> ir.Value:
    if mode in ("mul", "mul_no_zeros"):
        return v.mul(a, b)
    if mode == "min":
        return v.min(a, b)
    return v.max(a, b) if mode in ("max", "amax") else v.add(a, b)


def _emit_taken(v: Lanes, mode: str, value: ir.Value) -> ir.Value:
    if mode in ("amax", "norm1"):
        return v.abs(value)
    if mode == "norm2":
        return v.mul(value, value)
    return v.pick(v.is_(value, "==", 0.0), 1.0, value) if mode == "mul_no_zeros" else value


def _emit_joined(
    builder: ir.IRBuilder, code: Code, sums: ir.Value, values: list[ir.Value], mask: ir.Value | None
) -> ir.Value:
    """The sums with what a unit brings to them; lanes that are not there bring what a reduction starts with."""
    wide = Lanes(builder, lanes_of(code.tree), True)
    made = []
    for each, before, value in zip(code.tree.reductions, unpack(builder, sums), values, strict=True):
        value = value if value.type == wide.kind else builder.fpext(value, wide.kind)
        taken = _emit_taken(wide, each.mode, value)
        if mask is not None:
            taken = wide.pick(mask, taken, _STARTS.get(each.mode, 0.0))
        made.append(_emit_join(wide, each.mode, before, taken))
    return pack(builder, made)


@intrinsic(prefer_literal=True)
def origin(typingctx, key):
    """origin(KEY) -> the offsets of the first element: zeros."""
    code = _code(key)
    if code is None:
        return None
    return _offsets(code)(key), lambda context, builder, signature, args: pack(
        builder, [ir.Constant(_I64, 0)] * code.strides
    )


@intrinsic(prefer_literal=True)
def places(typingctx, key, nest, block, offsets, index):
    """places(KEY, nest, block, offsets, index) -> offsets of each class, in elements, at this place of a nest of axes,
    whose last one counts fastest."""
    code = _code(key)
    if code is None or not isinstance(nest, types.IntegerLiteral):
        return None
    number = nest.literal_value

    def codegen(context, builder, signature, args):
        _, _, block_, offsets_, rest = args
        found, axes = unpack(builder, offsets_), code.nests[number]
        first = code.nest(number)
        for axis in reversed(range(axes)):
            at = rest
            if axis:
                size = _argument(builder, block_, first + axis)
                rest = builder.udiv(rest, size)
                at = builder.sub(at, builder.mul(rest, size))
            for stride in range(code.strides):
                step = _argument(builder, block_, first + axes + axis * code.strides + stride)
                found[stride] = builder.add(found[stride], builder.mul(at, step))
        return pack(builder, found)

    return _offsets(code)(key, nest, types.int64, _offsets(code), types.int64), codegen


@intrinsic(prefer_literal=True)
def addresses(typingctx, key, block, offsets):
    """addresses(KEY, block, offsets) -> where each input and result has its element at these offsets."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        found = unpack(builder, args[2])
        made = []
        for at, dtype in enumerate(code.dtypes):
            moved = builder.mul(found[code.classes[at]], ir.Constant(_I64, MEMORY[dtype][1]))
            made.append(builder.add(_argument(builder, args[1], code.pointers + at), moved))
        return pack(builder, made)

    return _addresses(code)(key, types.int64, _offsets(code)), codegen


@intrinsic(prefer_literal=True)
def row_values(typingctx, key, at):
    """row_values(KEY, addresses) -> the values that are the same for a whole row."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        v, starts = _lanes(builder, code), unpack(builder, args[1])
        below = nodes(code.fixed)
        values: dict[Expr, ir.Value] = {}
        for number, leaf in enumerate(code.tree.leaves):
            if leaf in below:
                dtype = code.dtypes[number]
                one = emit_load(v, dtype, "once", starts[number], None, None, ir.Constant(_I64, 0))
                values[leaf] = loaded(v, one, dtype)
        _emit_computed(v, below, values)
        return pack(builder, [values[node] for node in code.fixed] or [v.number(0.0)])

    return _values(code)(key, _addresses(code)), codegen


@intrinsic(prefer_literal=True)
def unit(typingctx, key, block, at, fixed, column, count):
    """unit(KEY, block, addresses, row values, column, count): compute and write ``count`` elements from a column on. A
    constant stands for all lanes of a unit."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        *given, lanes = args[1:]
        _emit_unit(builder, code, *given, None if isinstance(count, types.IntegerLiteral) else lanes)
        return context.get_dummy_value()

    return types.void(key, types.int64, _addresses(code), _values(code), types.int64, count), codegen


@intrinsic(prefer_literal=True)
def unit_joined(typingctx, key, block, at, fixed, column, count, sums):
    """unit_joined(..., sums) -> the same, and what its elements make of the sums."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        *given, lanes, before = args[1:]
        whole = isinstance(count, types.IntegerLiteral)
        values, mask = _emit_unit(builder, code, *given, None if whole else lanes)
        return _emit_joined(builder, code, before, values, mask)

    given = (key, types.int64, _addresses(code), _values(code), types.int64, count, _sums(code))
    return _sums(code)(*given), codegen


@intrinsic(prefer_literal=True)
def nothing(typingctx, key):
    """nothing(KEY) -> the sums of no elements."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        wide = Lanes(builder, lanes_of(code.tree), True)
        return pack(builder, [wide.number(_STARTS.get(each.mode, 0.0)) for each in code.tree.reductions])

    return _sums(code)(key), codegen


@intrinsic(prefer_literal=True)
def joined(typingctx, key, one, other):
    """joined(KEY, sums, sums) -> those of both."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        pairs = zip(unpack(builder, args[1]), unpack(builder, args[2]), code.tree.reductions, strict=True)
        wide = Lanes(builder, one.dtype.count, True)
        return pack(builder, [_emit_join(wide, each.mode, a, b) for a, b, each in pairs])

    return one(key, one, one), codegen


@intrinsic(prefer_literal=True)
def folded(typingctx, key, sums):
    """folded(KEY, sums) -> sums of one lane: the upper half is joined to the lower until one is left."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        made = []
        for each, value in zip(code.tree.reductions, unpack(builder, args[1]), strict=True):
            half = lanes_of(code.tree) // 2
            while half:
                picks = [ir.Constant(ir.VectorType(_I32, half), list(range(at, at + half))) for at in (0, half)]
                low, high = (builder.shuffle_vector(value, value, pick) for pick in picks)
                value, half = _emit_join(Lanes(builder, half, True), each.mode, low, high), half // 2
            made.append(value)
        return pack(builder, made)

    return types.UniTuple(Vector(types.float64, 1), len(code.tree.reductions))(key, _sums(code)), codegen


@intrinsic
def save(typingctx, address, sums):
    """save(address, sums): one behind the other."""

    def codegen(context, builder, signature, args):
        for at, value in enumerate(unpack(builder, args[1])):
            place = builder.add(args[0], ir.Constant(_I64, at * 8 * sums.dtype.count))
            builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, sums), codegen


@intrinsic
def saved(typingctx, address, like):
    """saved(address, sums) -> others like these, which :func:`save` wrote."""

    def codegen(context, builder, signature, args):
        kind, made = context.get_value_type(like.dtype), []
        for at in range(like.count):
            place = builder.add(args[0], ir.Constant(_I64, at * 8 * like.dtype.count))
            made.append(builder.load(builder.inttoptr(place, kind.as_pointer()), align=8, typ=kind))
        return pack(builder, made)

    return like(types.int64, like), codegen


@intrinsic(prefer_literal=True)
def finish(typingctx, key, block, sums, place, count):
    """finish(KEY, block, sums, place, count): write the first ``count`` lanes as results of the reductions."""
    code = _code(key)
    if code is None:
        return None

    def codegen(context, builder, signature, args):
        _, block_, sums_, place_, count_ = args
        wide = Lanes(builder, sums.dtype.count, True)
        terms = builder.sitofp(_argument(builder, block_, TERMS), _DOUBLE)
        mask = _emit_mask(builder, count_, wide.count) if wide.count > 1 else None
        last = builder.sub(count_, ir.Constant(_I64, 1))
        for m, (each, value) in enumerate(zip(code.tree.reductions, unpack(builder, sums_), strict=True)):
            if each.mode == "avg":
                first = builder.insert_element(ir.Constant(wide.kind, ir.Undefined), terms, ir.Constant(_I32, 0))
                zeros = ir.Constant(ir.VectorType(_I32, wide.count), [0] * wide.count)
                value = wide.div(value, builder.shuffle_vector(first, first, zeros))
            elif each.mode == "norm2":
                value = wide.native("sqrt", value)
            size = ir.Constant(_I64, MEMORY[each.dtype][1])
            base = _argument(builder, block_, code.pointers + len(code.dtypes) + m)
            step = builder.mul(_argument(builder, block_, FIRST + code.strides - 1), size)
            address = builder.add(base, builder.mul(place_, size))
            lie = "side" if wide.count == 1 else code.place
            emit_store(wide, stored(wide, value, each.dtype), each.dtype, lie, address, step, mask, last)
        return context.get_dummy_value()

    return types.void(key, types.int64, sums, types.int64, types.int64), codegen
