"""Explicit SIMD for Numba kernels: one vector value per machine register.

LLVM's auto-vectoriser sees a convolution as a loop over memory; it will not keep a block of outputs in
registers while filter taps stream past.  The functions below let a kernel say so directly.  A `Vector` is an
LLVM `<L x float>` or `<L x double>` that Numba passes around like a scalar, and each function here is one
instruction (or a few) on it.  On a machine with narrower registers LLVM splits the vector, so the same kernel
source is correct everywhere and fastest where L matches the hardware:

    register        f32 lanes   f64 lanes   registers   a good block of accumulators
    AVX-512 zmm        16           8          32        up to 24
    AVX2 ymm            8           4          16        up to 12
    NEON (2 x q)        8           4          16        up to 12

Memory is addressed by plain byte addresses (`int64`, from `tensor.data_ptr()`), so kernels carry no array
descriptors.  Nothing checks bounds.  The element type travels as a token, the NumPy scalar class itself, which
lets one kernel source serve both types:

    @functools.cache
    def double_kernel(T: type) -> Kernel:             # T is np.float32 or np.float64
        L, SIZE = lanes(T), np.dtype(T).itemsize

        @kernel                                       # y[tile] = x[tile] + x[tile], one vector per tile
        def double(block):
            tiles, x, y = argument(block, 0), argument(block, 1), argument(block, 2)
            tile = next_tile(block)
            while tile < tiles:
                v = load(T, x + tile * L * SIZE)
                store(y + tile * L * SIZE, v + v)
                tile = next_tile(block)

        return double

What memory holds may be shorter than what is computed with.  np.float16 and BF16 are tokens of memory alone: loads
widen such elements to f32, as many as a vector of f32 has lanes, and `narrow` rounds a vector to what a store then
writes.  A kernel of both has a token T for its values and another, M, for the tensors.

Arithmetic means what it says: `mul` and `add` never fuse, `fma` always rounds once, nothing is reassociated, and
NaN and infinity travel as IEEE 754 prescribes.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, overload, register_model

from .compiler import HELPER, Pipeline
from .runtime import ARGUMENTS_OFFSET, THREADS_OFFSET, TICKET_OFFSET

__all__ = [
    "BF16",
    "LANE_BYTES",
    "Vector",
    "add",
    "add_blocks",
    "argument",
    "atomic_add",
    "block_of",
    "broadcast",
    "broadcast_strided",
    "emit_clip_mask",
    "emit_fma",
    "emit_horizontal_sum",
    "emit_load",
    "emit_masked_load",
    "emit_masked_store",
    "emit_narrow",
    "emit_offset",
    "emit_row",
    "emit_rows",
    "emit_splat",
    "emit_store",
    "emit_widen",
    "enter_share",
    "fill",
    "fill_like",
    "fma",
    "fma_rows",
    "has_f16",
    "horizontal_sum",
    "inline",
    "is_block",
    "lanes",
    "load",
    "load_block",
    "load_block_clipped",
    "load_clipped",
    "load_even",
    "load_rows",
    "load_scalar",
    "maximum",
    "memory_of",
    "minimum",
    "mul",
    "narrow",
    "next_of_share",
    "next_of_static",
    "next_tile",
    "next_tile_of",
    "pack",
    "prefetch",
    "store",
    "store_block",
    "store_block_clipped",
    "store_clipped",
    "store_first",
    "store_rows",
    "store_scalar",
    "sub",
    "thread_index",
    "thread_number",
    "transpose",
    "unpack",
    "word",
    "zero",
]


def _host_lane_bytes() -> int:
    """Width of the vector type in bytes: 64 where the host has AVX-512, else 32.

    The features are those Numba compiles for, so NUMBA_CPU_FEATURES narrows the vector too; OPENCONV_LANE_BYTES=32
    narrows it alone, for testing the other width on an AVX-512 machine.
    """
    forced = os.environ.get("OPENCONV_LANE_BYTES")
    if forced is not None:
        if forced not in ("16", "32", "64"):
            raise ValueError(f"OPENCONV_LANE_BYTES is {forced!r}; it must be 16, 32 or 64")
        return int(forced)
    _triple, _cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return 64 if "+avx512f" in features.split(",") else 32


LANE_BYTES: int = _host_lane_bytes()

BF16 = np.uint16
"""The token of bf16 in memory, for which NumPy has no class: its bits."""


def lanes(dtype: Any) -> int:
    """Elements per vector: 16 or 8 for f32, 8 or 4 for f64.  Host-side; pass it to kernels as a constant."""
    return LANE_BYTES // np.dtype(dtype).itemsize


@functools.cache
def has_f16() -> bool:
    """Whether the machine converts f16, by instructions that come with AVX2; else LLVM calls a function for each one.
    What Numba compiles for does not always list its features, so LLVM is asked for the code."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    text = "define <8 x half> @f(<8 x float> %x) {\n %y = fptrunc <8 x float> %x to <8 x half>\n ret <8 x half> %y\n}"
    code = machine.emit_assembly(binding.parse_assembly(text))
    return "vcvtps2ph" in code or "fcvtn" in code


@functools.cache
def _shuffles_bytes() -> bool:
    """Whether the machine has AVX2's shuffle of bytes."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    if not triple.startswith("x86_64"):
        return False
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    text = "define <8 x i32> @f(<8 x i32> %x) {\n %y = add <8 x i32> %x, %x\n ret <8 x i32> %y\n}"
    return "ymm" in machine.emit_assembly(binding.parse_assembly(text))


_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class Vector(types.Type):
    """The Numba type of a SIMD value: `count` elements of `dtype` (float32 or float64; uint16 behind `narrow`)."""

    def __init__(self, dtype: types.Type, count: int) -> None:
        self.dtype = dtype
        self.count = count
        super().__init__(name=f"vector({dtype}, {count})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        elements = {16: _I16, 32: ir.FloatType(), 64: ir.DoubleType()}
        super().__init__(dmm, fe_type, ir.VectorType(elements[fe_type.dtype.bitwidth], fe_type.count))


# ---- code generators, for the intrinsics here and for those that kernels define -----------------------------

_SHORT = {types.float16: ir.HalfType(), types.uint16: _I16}  # elements of memory alone, computed with as f32


def vector_of(token: types.Type) -> Vector | None:
    """The vector type that is computed with for a dtype token: np.float32, np.float64, np.float16 or BF16."""
    dtype = getattr(token, "instance_type", None)
    dtype = types.float32 if dtype in _SHORT else dtype
    if isinstance(token, types.NumberClass) and dtype in (types.float32, types.float64):
        return Vector(dtype, LANE_BYTES * 8 // dtype.bitwidth)
    return None


def memory_of(token: types.Type) -> ir.Type | None:
    """What an element of the token is in memory, where that is shorter than what is computed with: f16 or i16."""
    return _SHORT.get(getattr(token, "instance_type", None))


def block_of(token: types.Type, count: types.Type) -> types.UniTuple | None:
    """The type of `count` (a literal) such vectors."""
    vector = vector_of(token)
    literal = isinstance(count, types.IntegerLiteral)
    return types.UniTuple(vector, count.literal_value) if vector is not None and literal else None


def _pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    return builder.inttoptr(address, pointee.as_pointer())


def _element_bytes(kind: ir.Type) -> int:
    element = getattr(kind, "element", kind)
    if element in (ir.HalfType(), _I16):
        return 2
    return 8 if isinstance(element, ir.DoubleType) else 4


def _suffix(kind: ir.Type) -> str:
    """How LLVM names an overload: f32, f64, v16f32, v16i16, ..."""
    letter = "i" if isinstance(getattr(kind, "element", kind), ir.IntType) else "f"
    element = f"{letter}{8 * _element_bytes(kind)}"
    return f"v{kind.count}{element}" if isinstance(kind, ir.VectorType) else element


def _call(builder: ir.IRBuilder, name: str, args: list[ir.Value]) -> ir.Value:
    """Call the LLVM intrinsic `name` whose arguments and result are all of one floating-point type."""
    kind = args[0].type
    signature = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"{name}.{_suffix(kind)}"), args)


def emit_offset(builder: ir.IRBuilder, address: ir.Value, count: int, stride: ir.Value | int) -> ir.Value:
    """address + count * stride, for a count known at compile time."""
    if isinstance(stride, int):
        stride = ir.Constant(_I64, stride)
    return address if count == 0 else builder.add(address, builder.mul(ir.Constant(_I64, count), stride))


def emit_rows(builder: ir.IRBuilder, address: ir.Value, pitch: ir.Value, count: int) -> list[ir.Value]:
    """The addresses of `count` rows that lie `pitch` bytes apart, cheap in registers.

    Left alone, LLVM turns every row of an unrolled loop into a pointer of its own: 14 of them spill and cost 14
    additions, loads and stores a step.  Here three rows share a base, as x86 addresses base, base + pitch and
    base + 2 * pitch in the load itself, and an empty inline assembly hides each base from that optimisation.
    """
    triple = builder.mul(pitch, ir.Constant(_I64, 3))
    register = ir.FunctionType(_I64, [_I64])
    rows: list[ir.Value] = []
    for i in range(count):
        if i % 3 == 0:
            address = builder.asm(register, "", "=r,0", [builder.add(address, triple) if i else address], False)
        rows.append(emit_offset(builder, address, i % 3, pitch))
    return rows


def _like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """A vector of as many elements, or a scalar where that is one."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _each(kind: ir.Type, number: int) -> ir.Value:
    """The whole number in all lanes."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def emit_widen(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """f16, or the bits of bf16, as f32: a scalar or a vector."""
    kind = _like(value.type, ir.FloatType())
    if getattr(value.type, "element", value.type) == ir.HalfType():
        return builder.fpext(value, kind)
    if getattr(value.type, "count", 0) == 8 and _shuffles_bytes():
        return _emit_widen_bytes(builder, value)
    words = _like(value.type, _I32)
    return builder.bitcast(builder.shl(builder.zext(value, words), _each(words, 16)), kind)


def _emit_widen_bytes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Eight bf16 as f32 by one instruction of AVX2, which puts bytes and zeros anywhere within 16 bytes, behind a load
    that puts the eight into both halves of a vector. To extend and to shift them are two, and LLVM finds no better."""
    twice = ir.Constant(ir.VectorType(_I32, 16), [*range(8), *range(8)])
    bytes_ = ir.VectorType(ir.IntType(8), 32)
    both = builder.bitcast(builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), twice), bytes_)
    picks = ir.Constant(bytes_, [at for i in range(8) for at in (0x80, 0x80, 2 * i, 2 * i + 1)])
    signature = ir.FunctionType(bytes_, [bytes_, bytes_])
    shuffle = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.pshuf.b")
    return builder.bitcast(builder.call(shuffle, [both, picks]), _like(value.type, ir.FloatType()))


def emit_narrow(builder: ir.IRBuilder, value: ir.Value, memory: ir.Type) -> ir.Value:
    """f32 rounded to nearest, ties to even, as torch rounds it: to f16, or to bits of bf16, where a NaN is 0x7fc0."""
    if memory == ir.HalfType():
        return builder.fptrunc(value, _like(value.type, memory))
    words = _like(value.type, _I32)
    bits = builder.bitcast(value, words)
    # Half of the last place, less one where that place is even already.
    last = builder.and_(builder.lshr(bits, _each(words, 16)), _each(words, 1))
    rounded = builder.add(builder.add(bits, _each(words, 0x7FFF)), last)
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _each(words, 0x7FC0_0000), rounded)
    return builder.trunc(builder.lshr(kept, _each(words, 16)), _like(value.type, memory))


def emit_load(builder: ir.IRBuilder, kind: ir.Type, address: ir.Value, memory: ir.Type | None = None) -> ir.Value:
    """A value of `kind` from any address that suits its element; widened, where memory holds shorter ones."""
    held = kind if memory is None else _like(kind, memory)
    value = builder.load(_pointer(builder, address, held), align=_element_bytes(held), typ=held)
    return value if memory is None else emit_widen(builder, value)


def emit_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """The value to any address that suits its element."""
    builder.store(value, _pointer(builder, address, value.type), align=_element_bytes(value.type))


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value, count: int) -> ir.Value:
    """The scalar in every lane: insert into lane 0, then shuffle lane 0 everywhere; becomes one vbroadcast."""
    kind = ir.VectorType(scalar.type, count)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    return _call(builder, "llvm.fma", [a, b, c])


def emit_horizontal_sum(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of all lanes: the upper half is added to the lower until one lane is left."""
    half = vector.type.count // 2
    while half:
        index = ir.VectorType(_I32, half)
        low = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(index, list(range(half, 2 * half))))
        vector, half = builder.fadd(low, high), half // 2
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def emit_clip_mask(builder: ir.IRBuilder, index: ir.Value, limit: ir.Value, count: int) -> ir.Value:
    """Lane i is on where 0 <= index + i < limit.  One unsigned compare: a negative number is a huge one."""
    index32 = emit_splat(builder, builder.trunc(index, _I32), count)
    limit32 = emit_splat(builder, builder.trunc(limit, _I32), count)
    iota = ir.Constant(ir.VectorType(_I32, count), list(range(count)))
    return builder.icmp_unsigned("<", builder.add(index32, iota), limit32)


def emit_masked_load(
    builder: ir.IRBuilder, kind: ir.VectorType, address: ir.Value, mask: ir.Value, memory: ir.Type | None = None
) -> ir.Value:  # fmt: skip
    """Lanes that are on from memory, zero in the others, whose memory is not touched; widened as by `emit_load`."""
    if memory is not None:
        return _emit_masked_short(builder, address, mask, memory)
    signature = ir.FunctionType(kind, [kind.as_pointer(), _I32, mask.type, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{_suffix(kind)}.p0")
    align, zeros = ir.Constant(_I32, _element_bytes(kind)), ir.Constant(kind, None)
    return builder.call(function, [_pointer(builder, address, kind), align, mask, zeros])


def _emit_masked_short(builder: ir.IRBuilder, address: ir.Value, mask: ir.Value, memory: ir.Type) -> ir.Value:
    """The same for elements of 16 bits, of which AVX2 has no masked loads: LLVM makes a jump for each lane, so that it
    is worth a jump to find all of them on."""
    count = mask.type.count
    kind, bits = ir.VectorType(_I16, count), ir.IntType(count)
    whole, part, end = (builder.append_basic_block(name) for name in ("whole", "part", "loaded"))
    all_on = builder.icmp_unsigned("==", builder.bitcast(mask, bits), ir.Constant(bits, -1))
    builder.cbranch(all_on, whole, part)
    builder.position_at_end(whole)
    plain = builder.load(_pointer(builder, address, kind), align=2, typ=kind)
    builder.branch(end)
    builder.position_at_end(part)
    clipped = emit_masked_load(builder, kind, address, mask)
    part = builder.block
    builder.branch(end)
    builder.position_at_end(end)
    value = builder.phi(kind)
    value.add_incoming(plain, whole)
    value.add_incoming(clipped, part)
    return emit_widen(builder, builder.bitcast(value, ir.VectorType(memory, count)))


def emit_masked_store(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, mask: ir.Value) -> None:
    """Lanes that are on to memory; the memory of the others is not touched."""
    kind = value.type
    signature = ir.FunctionType(ir.VoidType(), [kind, kind.as_pointer(), _I32, mask.type])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.store.{_suffix(kind)}.p0")
    builder.call(function, [value, _pointer(builder, address, kind), ir.Constant(_I32, _element_bytes(kind)), mask])


def _same_floats(*operands: types.Type) -> bool:
    first = operands[0]
    return all(o == first for o in operands) and isinstance(first, Vector | types.Float)


# ---- vectors and memory -------------------------------------------------------------------------------------


@intrinsic
def load(typingctx, dtype, address):
    """load(T, address) -> Vector: lanes(T) elements from memory; any alignment of the element will do."""
    vector = vector_of(dtype)
    if vector is None:
        return None

    def codegen(context, builder, signature, args):
        return emit_load(builder, context.get_value_type(vector), args[1], memory_of(dtype))

    return vector(dtype, types.int64), codegen


@intrinsic
def narrow(typingctx, memory, value):
    """narrow(M, x) -> x as memory of M holds it, for a store: rounded to nearest, ties to even; x itself where M is its
    own type.  A scalar, a vector or a block of them."""
    one = value.dtype if is_block(value) else value
    if not isinstance(memory, types.NumberClass) or not isinstance(one, Vector | types.Float):
        return None
    element = memory_of(memory)
    if element is None:
        return value(memory, value), lambda context, builder, signature, args: args[1]
    made = Vector(types.uint16, one.count) if isinstance(one, Vector) else types.uint16
    if is_block(value):
        made = types.UniTuple(made, value.count)

    def codegen(context, builder, signature, args):
        def bits(x):
            short = emit_narrow(builder, x, element)
            return builder.bitcast(short, _like(short.type, _I16))

        return pack(builder, [bits(x) for x in unpack(builder, args[1])]) if is_block(value) else bits(args[1])

    return made(memory, value), codegen


@intrinsic
def store(typingctx, address, value):
    """store(address, vector): writes every lane; any alignment of the element will do."""
    if not isinstance(value, Vector):
        return None

    def codegen(context, builder, signature, args):
        emit_store(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


@intrinsic
def load_clipped(typingctx, dtype, row, index, limit):
    """load_clipped(T, row, index, limit) -> Vector: lane i is row[index + i] where 0 <= index + i < limit, else 0.

    Lanes that are off are not read at all, so `row` may be the first byte of an allocation and `index` negative.
    This is zero padding for free: one masked load.  limit >= 0; |index| and limit stay below 2**31 - lanes.
    """
    vector = vector_of(dtype)
    if vector is None:
        return None

    def codegen(context, builder, signature, args):
        _, row_, index_, limit_ = args
        kind, memory = context.get_value_type(vector), memory_of(dtype)
        address = builder.add(row_, builder.mul(index_, ir.Constant(_I64, _element_bytes(memory or kind))))
        return emit_masked_load(builder, kind, address, emit_clip_mask(builder, index_, limit_, vector.count), memory)

    return vector(dtype, types.int64, types.int64, types.int64), codegen


@intrinsic
def store_clipped(typingctx, row, index, limit, value):
    """store_clipped(row, index, limit, vector): row[index + i] = lane i where 0 <= index + i < limit."""
    if not isinstance(value, Vector):
        return None

    def codegen(context, builder, signature, args):
        row_, index_, limit_, vector_ = args
        address = builder.add(row_, builder.mul(index_, ir.Constant(_I64, _element_bytes(vector_.type))))
        emit_masked_store(builder, address, vector_, emit_clip_mask(builder, index_, limit_, value.count))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, value), codegen


@intrinsic
def load_even(typingctx, dtype, address):
    """load_even(T, address) -> Vector: elements 0, 2, 4, ... 2 * (lanes - 1), for a stride of 2.

    Reads 2 * lanes - 1 elements, none beyond the last one used: the second half is read one element early and
    shuffled accordingly, so the last vector of a row needs no room behind it.
    """
    vector = vector_of(dtype)
    if vector is None:
        return None

    def codegen(context, builder, signature, args):
        count, kind = vector.count, context.get_value_type(vector)
        low = emit_load(builder, kind, args[1])
        high = emit_load(builder, kind, emit_offset(builder, args[1], count - 1, _element_bytes(kind)))
        # Element 2i is lane 2i of `low`, or lane 2i - (count - 1) of `high`, whose lanes a shuffle numbers from count.
        picks = [2 * i if 2 * i < count else 2 * i + 1 for i in range(count)]
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, count), picks))

    return vector(dtype, types.int64), codegen


# ---- arithmetic ---------------------------------------------------------------------------------------------


@intrinsic
def zero(typingctx, dtype):
    """zero(T) -> Vector of zeros."""
    vector = vector_of(dtype)
    if vector is None:
        return None

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(vector), None)

    return vector(dtype), codegen


@intrinsic
def broadcast(typingctx, value):
    """broadcast(scalar) -> Vector with the f32 or f64 scalar in every lane."""
    if value not in (types.float32, types.float64):
        return None
    vector = Vector(value, LANE_BYTES * 8 // value.bitwidth)

    def codegen(context, builder, signature, args):
        return emit_splat(builder, args[0], vector.count)

    return vector(value), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """fma(a, b, c) = a * b + c with a single rounding; three vectors, or three scalars of one type."""
    if not _same_floats(a, b, c):
        return None

    def codegen(context, builder, signature, args):
        return emit_fma(builder, *args)

    return a(a, a, a), codegen


@intrinsic
def add(typingctx, a, b):
    """add(a, b) = a + b, also written with the operator."""
    if not _same_floats(a, b):
        return None
    return a(a, a), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def sub(typingctx, a, b):
    """sub(a, b) = a - b, also written with the operator."""
    if not _same_floats(a, b):
        return None
    return a(a, a), lambda context, builder, signature, args: builder.fsub(*args)


@intrinsic
def mul(typingctx, a, b):
    """mul(a, b) = a * b, also written with the operator."""
    if not _same_floats(a, b):
        return None
    return a(a, a), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def maximum(typingctx, a, b):
    """maximum(a, b) by lane; NaN wins, as in torch.maximum."""
    if not _same_floats(a, b):
        return None
    return a(a, a), lambda context, builder, signature, args: _call(builder, "llvm.maximum", list(args))


@intrinsic
def minimum(typingctx, a, b):
    """minimum(a, b) by lane; NaN wins, as in torch.minimum."""
    if not _same_floats(a, b):
        return None
    return a(a, a), lambda context, builder, signature, args: _call(builder, "llvm.minimum", list(args))


@overload(operator.add)
def _operator_add(a, b):
    if isinstance(a, Vector) and a == b:
        return lambda a, b: add(a, b)
    return None


@overload(operator.sub)
def _operator_sub(a, b):
    if isinstance(a, Vector) and a == b:
        return lambda a, b: sub(a, b)
    return None


@overload(operator.mul)
def _operator_mul(a, b):
    if isinstance(a, Vector) and a == b:
        return lambda a, b: mul(a, b)
    return None


@intrinsic
def horizontal_sum(typingctx, value):
    """horizontal_sum(vector) -> scalar: the upper half is added to the lower until one lane is left.

    The order is fixed: for 4 lanes (v0 + v2) + (v1 + v3).  The same bits come out on every machine with the same
    number of lanes.
    """
    if not isinstance(value, Vector):
        return None

    def codegen(context, builder, signature, args):
        return emit_horizontal_sum(builder, args[0])

    return value.dtype(value), codegen


# ---- blocks of registers: tuples of vectors ------------------------------------------------------------------


def unpack(builder: ir.IRBuilder, block: ir.Value) -> list[ir.Value]:
    """The vectors of a tuple."""
    return [builder.extract_value(block, i) for i in range(block.type.count)]


def pack(builder: ir.IRBuilder, values: list[ir.Value]) -> ir.Value:
    """A tuple of vectors; once everything is inlined it is nothing but registers."""
    block = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        block = builder.insert_value(block, value, i)
    return block


def is_block(kind: types.Type) -> bool:
    """Whether a Numba type is a tuple of equal vectors."""
    return isinstance(kind, types.UniTuple) and isinstance(kind.dtype, Vector)


@intrinsic(prefer_literal=True)
def fill(typingctx, count, value):
    """fill(n, vector) -> tuple of n copies; n is a constant."""
    if not isinstance(count, types.IntegerLiteral) or not isinstance(value, Vector):
        return None
    block = types.UniTuple(value, count.literal_value)

    def codegen(context, builder, signature, args):
        return pack(builder, [args[1]] * block.count)

    return block(count, value), codegen


@intrinsic(prefer_literal=True)
def broadcast_strided(typingctx, dtype, count, address, stride):
    """broadcast_strided(T, n, address, stride) -> tuple: the i-th vector holds the scalar at address + i * stride."""
    block = block_of(dtype, count)
    if block is None:
        return None

    def codegen(context, builder, signature, args):
        _, _, address_, stride_ = args
        scalar = context.get_value_type(block.dtype.dtype)
        places = emit_rows(builder, address_, stride_, block.count)
        return pack(builder, [emit_splat(builder, emit_load(builder, scalar, p), block.dtype.count) for p in places])

    return block(dtype, count, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_block(typingctx, dtype, count, address, pitch):
    """load_block(T, n, address, pitch) -> tuple: vector i lies at address + i * pitch."""
    block = block_of(dtype, count)
    if block is None:
        return None

    def codegen(context, builder, signature, args):
        kind, places = context.get_value_type(block.dtype), emit_rows(builder, args[2], args[3], block.count)
        return pack(builder, [emit_load(builder, kind, place, memory_of(dtype)) for place in places])

    return block(dtype, count, types.int64, types.int64), codegen


def emit_row(builder: ir.IRBuilder, address: ir.Value, pitch: ir.Value, rows: ir.Value, i: int) -> ir.Value:
    """The address of row i, or of the last of `rows` where there is no such row."""
    last = builder.sub(rows, ir.Constant(_I64, 1))
    there = builder.icmp_signed("<", ir.Constant(_I64, i), rows)
    return builder.add(address, builder.mul(builder.select(there, ir.Constant(_I64, i), last), pitch))


@intrinsic(prefer_literal=True)
def load_block_clipped(typingctx, dtype, count, address, pitch, rows, limit):
    """load_block, of the first `limit` lanes, zero in the others; the last of `rows` stands in for those behind it."""
    block = block_of(dtype, count)
    if block is None:
        return None

    def codegen(context, builder, signature, args):
        _, _, address_, pitch_, rows_, limit_ = args
        kind = context.get_value_type(block.dtype)
        mask = emit_clip_mask(builder, ir.Constant(_I64, 0), limit_, block.dtype.count)
        places = [emit_row(builder, address_, pitch_, rows_, i) for i in range(block.count)]
        return pack(builder, [emit_masked_load(builder, kind, place, mask, memory_of(dtype)) for place in places])

    return block(dtype, count, *[types.int64] * 4), codegen


@intrinsic
def fill_like(typingctx, block, value):
    """fill_like(block, vector) -> a block of the same size, the vector in all places."""
    if not is_block(block) or value != block.dtype:
        return None
    return block(block, value), lambda context, builder, signature, args: pack(builder, [args[1]] * block.count)


@intrinsic
def add_blocks(typingctx, a, b):
    """add_blocks(a, b) = a + b, vector by vector."""
    if not is_block(a) or a != b:
        return None

    def codegen(context, builder, signature, args):
        pairs = zip(unpack(builder, args[0]), unpack(builder, args[1]), strict=True)
        return pack(builder, [builder.fadd(x, y) for x, y in pairs])

    return a(a, a), codegen


@intrinsic
def store_block(typingctx, block, address, pitch):
    """store_block(block, address, pitch): vector i goes to address + i * pitch."""
    if not is_block(block):
        return None

    def codegen(context, builder, signature, args):
        values = unpack(builder, args[0])
        for place, value in zip(emit_rows(builder, args[1], args[2], len(values)), values, strict=True):
            emit_store(builder, place, value)
        return context.get_dummy_value()

    return types.void(block, types.int64, types.int64), codegen


@intrinsic
def store_block_clipped(typingctx, block, address, pitch, count, limit):
    """store_block, of the vectors i < count only, and of each its first `limit` lanes."""
    if not is_block(block):
        return None

    def codegen(context, builder, signature, args):
        block_, address_, pitch_, count_, limit_ = args
        none = ir.Constant(_I64, 0)
        for i, value in enumerate(unpack(builder, block_)):
            there = builder.icmp_signed("<", ir.Constant(_I64, i), count_)
            mask = emit_clip_mask(builder, none, builder.select(there, limit_, none), block.dtype.count)
            emit_masked_store(builder, emit_offset(builder, address_, i, pitch_), value, mask)
        return context.get_dummy_value()

    return types.void(block, *[types.int64] * 4), codegen


@intrinsic
def store_first(typingctx, block, address, pitch, count):
    """store_block, of the vectors i < count only: by a jump behind the last of them.

    Masks would do as well, but masked stores of AVX2 took longer on an AMD EPYC: a depthwise 3x3 layer of 8x960x7x7 in
    nhwc went from 145 to 67 us without them.
    """
    if not is_block(block):
        return None

    def codegen(context, builder, signature, args):
        block_, address_, pitch_, count_ = args
        end = builder.append_basic_block("stored")
        for i, value in enumerate(unpack(builder, block_)):
            there = builder.append_basic_block("store")
            builder.cbranch(builder.icmp_signed("<", ir.Constant(_I64, i), count_), there, end)
            builder.position_at_end(there)
            emit_store(builder, emit_offset(builder, address_, i, pitch_), value)
        builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(block, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def prefetch(typingctx, count, address):
    """prefetch(n, address): n cache lines, one behind the other, on their way to the second-level cache."""
    if not isinstance(count, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, second_level, data = (ir.Constant(_I32, v) for v in (0, 2, 1))
        for i in range(count.literal_value):
            place = builder.inttoptr(emit_offset(builder, args[1], i, 64), pointer)
            builder.call(function, [place, read, second_level, data])
        return context.get_dummy_value()

    return types.void(count, types.int64), codegen


@intrinsic(prefer_literal=True)
def fma_rows(typingctx, block, rows, a, pitch, b):
    """fma_rows(block, rows, a, pitch, b) -> block + the outer product of `rows` scalars and a row of vectors.

    The block holds rows x n vectors, n behind each other for each row; scalar i lies at a + i * pitch, vector v at
    b + v * LANE_BYTES.  One step of a matrix product that stays in registers: n + rows loads for n * rows
    multiply-adds.  With a constant `pitch` all scalars are addressed from one register.

    Blocks that run at the rate of the multiply-add units (two a cycle): 6 x 2, 4 x 3 of the 16 registers of AVX2,
    14 x 2, 9 x 3 of the 32 of AVX-512; one row less costs 5%.
    """
    if not is_block(block) or not isinstance(rows, types.IntegerLiteral) or block.count % rows.literal_value:
        return None
    count = rows.literal_value

    def codegen(context, builder, signature, args):
        block_, _, a_, pitch_, b_ = args
        sums = unpack(builder, block_)
        across, kind = len(sums) // count, sums[0].type
        vectors = [emit_load(builder, kind, emit_offset(builder, b_, v, LANE_BYTES)) for v in range(across)]
        if isinstance(pitch, types.IntegerLiteral):
            places = [emit_offset(builder, a_, i, pitch.literal_value) for i in range(count)]
        else:
            places = emit_rows(builder, a_, pitch_, count)
        made = []
        for i, place in enumerate(places):
            scalar = emit_splat(builder, emit_load(builder, kind.element, place), kind.count)
            made += [emit_fma(builder, scalar, vectors[v], sums[i * across + v]) for v in range(across)]
        return pack(builder, made)

    return block(block, rows, types.int64, pitch, types.int64), codegen


@intrinsic(prefer_literal=True)
def load_rows(typingctx, dtype, rows, across, address, pitch):
    """load_rows(M, rows, n, address, pitch) -> a block of rows x n vectors: n behind each other, rows a pitch apart."""
    vector = vector_of(dtype)
    if vector is None or not isinstance(rows, types.IntegerLiteral) or not isinstance(across, types.IntegerLiteral):
        return None
    count, width = rows.literal_value, across.literal_value
    block = types.UniTuple(vector, count * width)

    def codegen(context, builder, signature, args):
        kind, memory = context.get_value_type(vector), memory_of(dtype)
        places, size = emit_rows(builder, args[3], args[4], count), LANE_BYTES if memory is None else LANE_BYTES // 2
        each = [emit_offset(builder, place, v, size) for place in places for v in range(width)]
        return pack(builder, [emit_load(builder, kind, place, memory) for place in each])

    return block(dtype, rows, across, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_rows(typingctx, block, rows, address, pitch):
    """store_rows(block, rows, address, pitch): what load_rows read, back to where it was."""
    if not is_block(block) or not isinstance(rows, types.IntegerLiteral) or block.count % rows.literal_value:
        return None
    count = rows.literal_value

    def codegen(context, builder, signature, args):
        values = unpack(builder, args[0])
        width, size = len(values) // count, block.dtype.count * _element_bytes(values[0].type)
        for i, place in enumerate(emit_rows(builder, args[2], args[3], count)):
            for v in range(width):
                emit_store(builder, emit_offset(builder, place, v, size), values[i * width + v])
        return context.get_dummy_value()

    return types.void(block, rows, types.int64, types.int64), codegen


def _emit_pick(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, picks: list[int]) -> ir.Value:
    """Lanes of two vectors, counted through both."""
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, len(picks)), picks))


def _interleaved(count: int, unit: int, width: int, half: int) -> list[int]:
    """Picks for a half of a[0], b[0], a[1], b[1], ... of each `width` lanes of two vectors, in units of some lanes."""
    picks = []
    for start in range(0, count, width):
        for i in range(width // 2 // unit):
            first = start + half * width // 2 + i * unit
            picks += [*range(first, first + unit), *range(count + first, count + first + unit)]
    return picks


@intrinsic
def transpose(typingctx, block):
    """transpose(block) -> lane i of vector j becomes lane j of vector i, in log2(lanes) rounds of interleaving.

    First within 16 bytes, where x86 has an instruction for each, then in units of 16 bytes: 24 instructions for 8 x 8
    f32. AVX2 has no single instruction for a round across whole vectors.
    """
    if not is_block(block) or block.count != block.dtype.count:
        return None

    def codegen(context, builder, signature, args):
        rows, count = unpack(builder, args[0]), block.count
        within = 16 // _element_bytes(rows[0].type)

        def interleave(low, high, unit, width):
            return [_emit_pick(builder, low, high, _interleaved(count, unit, width, half)) for half in (0, 1)]

        distance = 1
        while distance < within:  # rows i and i + distance of each 2 * distance; afterwards row k holds lanes k of each
            for start in range(0, count, 2 * distance):
                pairs = [(rows[start + i], rows[start + distance + i]) for i in range(distance)]
                rows[start : start + 2 * distance] = [
                    row for low, high in pairs for row in interleave(low, high, distance, within)
                ]
            distance *= 2
        blocks, made = count // within, [rows[0]] * count
        for k in range(within):
            column = rows[k::within]
            for _ in range(blocks.bit_length() - 1):
                pairs = list(zip(column[: blocks // 2], column[blocks // 2 :], strict=True))
                column = [row for low, high in pairs for row in interleave(low, high, within, count)]
            made[k::within] = column
        return pack(builder, made)

    return block(block), codegen


# ---- scalars and memory -------------------------------------------------------------------------------------


@intrinsic
def load_scalar(typingctx, dtype, address):
    """load_scalar(T, address) -> scalar; T is np.float32, np.float64, np.int32 or np.int64. Of np.float16 and
    BF16 it is an f32."""
    if not isinstance(dtype, types.NumberClass):
        return None
    memory = memory_of(dtype)
    scalar = dtype.instance_type if memory is None else types.float32

    def codegen(context, builder, signature, args):
        if memory is not None:
            return emit_load(builder, ir.FloatType(), args[1], memory)
        kind = context.get_value_type(scalar)
        return builder.load(_pointer(builder, args[1], kind), align=scalar.bitwidth // 8, typ=kind)

    return scalar(dtype, types.int64), codegen


@intrinsic
def store_scalar(typingctx, address, value):
    """store_scalar(address, scalar): the width written is that of the value's type."""
    if not isinstance(value, types.Integer | types.Float):
        return None
    scalar = types.unliteral(value)

    def codegen(context, builder, signature, args):
        builder.store(args[1], _pointer(builder, args[0], args[1].type), align=scalar.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.int64, scalar), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """atomic_add(address, value) -> the int64 that was there before; sequentially consistent.

    How threads share work: each takes the next ticket until none is left.
    """

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, args[0], _I64)
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


# ---- the launch block (runtime.launch) ----------------------------------------------------------------------

#: Decorator of the helpers that kernels call: compiled into the caller, with the caller's floating-point rules.
inline = njit(pipeline_class=Pipeline, **HELPER)


@intrinsic
def word(typingctx, table, index):
    """word(table, i) -> the i-th int64 behind an address.

    Kernels read most of what they know in this way, a hundred words each: an intrinsic is typed and lowered in a third
    of the time that a call of a helper takes.
    """

    def codegen(context, builder, signature, args):
        place = builder.add(args[0], builder.mul(args[1], ir.Constant(_I64, 8)))
        return emit_load(builder, _I64, place)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def argument(typingctx, block, index):
    """argument(block, i) -> the i-th int64 argument of the launch."""

    def codegen(context, builder, signature, args):
        place = builder.add(args[0], builder.mul(args[1], ir.Constant(_I64, 8)))
        return emit_load(builder, _I64, builder.add(place, ir.Constant(_I64, ARGUMENTS_OFFSET)))

    return types.int64(types.int64, types.int64), codegen


@inline
def next_tile(block):
    """next_tile(block) -> 0, 1, 2, ...: each number goes to one thread of the team."""
    return atomic_add(block + TICKET_OFFSET, 1)


@inline
def next_tile_of(block, index):
    """next_tile_of(block, i) -> 0, 1, 2, ...: like `next_tile`, but counted in the i-th argument, a zero at first."""
    return atomic_add(block + ARGUMENTS_OFFSET + 8 * index, 1)


@inline
def thread_index(block):
    """thread_index(block) -> a number below the team's size, another for each thread; call it once, on entry."""
    return atomic_add(block + THREADS_OFFSET, 1)


@inline
def thread_number(block, numbering):
    """thread_number(block, address) -> like `thread_index`, but the same for a thread in every launch, where the
    address is `runtime.numbering`'s and not 0."""
    if numbering == 0:
        return thread_index(block)
    return _call_address(numbering)


@intrinsic
def _call_address(typingctx, address):
    """The int that a C function without arguments returns."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), []), _I64)

    return types.int64(types.int64), codegen


@inline
def next_of_share(block, first, threads, number, away, tasks):
    """next_of_share(block, i, threads, number, away, tasks) -> (task, away): the next task of one's own share of them
    and, when all are drawn, of that of others; -1 behind the last. `away` is 0 at first. The counters are the arguments
    from the i-th on, one for each thread. So a thread does the same tasks in each launch, unless another is late."""
    while away < threads:
        owner = (number + away) % threads
        task = tasks * owner // threads + next_tile_of(block, first + owner)
        if task < tasks * (owner + 1) // threads:
            return task, away
        away += 1
    return -1, away


_ENTERED = 1 << 40  # in a share's counter: its owner is at work


@inline
def enter_share(block, first, number):
    """enter_share(block, i, number): tells the others that this thread works on its share; see `next_of_static`."""
    atomic_add(block + ARGUMENTS_OFFSET + 8 * (first + number), _ENTERED)


@inline
def next_of_static(block, first, threads, number, away, tasks):
    """next_of_share, but the tasks of others are taken only where these have not entered or have not done half.

    A thread that ends a little sooner than the other leaves it alone. What it takes over is memory that the other core
    wrote in the last launch, and it will have to be fetched back in the next one: a depthwise layer of 80 us took 130
    where now and then a sixteenth of it changed hands (two cores of an AMD EPYC).
    """
    while away < threads:
        owner = (number + away) % threads
        start, counter = tasks * owner // threads, block + ARGUMENTS_OFFSET + 8 * (first + owner)
        count = tasks * (owner + 1) // threads - start
        seen = atomic_add(counter, 0) if away > 0 else 0
        if seen < _ENTERED or 2 * (seen % _ENTERED) < count:
            task = atomic_add(counter, 1) % _ENTERED
            if task < count:
                return start + task, away
        away += 1
    return -1, away
