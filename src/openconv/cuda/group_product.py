"""The product of a warpgroup as C++, for all that Hopper multiplies. PTX names each register of the result, so that
each width has its own text. (:mod:`.wgmma` has what the engines for unpadded windows multiply by.)"""

from __future__ import annotations

__all__ = ["DEPTH_BYTES", "product"]

DEPTH_BYTES = 32
"""Of one product, along its depth."""

# Bytes of an element, and how PTX names the sum and both factors.
_TYPES = {
    "f16": (2, "f32", "f16"), "bf16": (2, "f32", "bf16"), "tf32": (4, "f32", "tf32"),
    "e4m3": (1, "f32", "e4m3"), "e5m2": (1, "f32", "e5m2"), "i8": (1, "s32", "s8"),
}  # fmt: skip


def product(
    columns: int, first: str, second: str, *, turned_first: bool = False, turned_second: bool = False,
    registers: bool = False,
) -> str:  # fmt: skip
    """``group_product(d, a, b, adds)``: d (64 x columns) = a * b, or d += a * b if ``adds``, of 32 bytes of depth.

    ``a`` and ``b`` are descriptors of ``common/wgmma.cuh``; one that is ``turned`` lies across (``wgmma_turned.cuh``).
    Or ``a``, of tf32, is in ``registers``, as A of ``common/mma_types.cuh`` in each warp.
    """
    size, total, left = _TYPES[first]
    right = _TYPES[second][2]
    if (turned_first or turned_second) and size != 2:
        raise ValueError(f"a turned operand of {first}; wanted f16 or bf16")
    step = 8 if total == "f32" or columns <= 32 else 16
    if columns % step or not 8 <= columns <= 256:
        raise ValueError(f"columns is {columns}; wanted a multiple of {step} up to 256")
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    kind, constraint = ("float", "f") if total == "f32" else ("int", "r")
    outputs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    signs = ", 1, 1" if total == "f32" else ""
    turns = f", {int(turned_first)}, {int(turned_second)}" if size == 2 else ""
    turned = f"{str(turned_first).lower()}, {str(turned_second).lower()}"
    emulated, left_kind, left_at, after = f"emulated_product<{first}, {second}, {turned}>", "u64 a", f"%{count}", 1
    left_input = '"l"(a)'
    if registers:
        if first != "tf32":
            raise ValueError(f"registers of {first}; wanted tf32")
        emulated, left_kind, after = "emulated_register_product", "const u32 (&a)[4]", 4
        left_at = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        left_input = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return f"""
namespace tensor {{
__device__ __forceinline__ void group_product({kind} (&d)[{count}], {left_kind}, u64 b, int adds) {{
#if !defined(__CUDACC__)
    {emulated}(d, a, b, adds);
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "{{ .reg .pred adds; setp.ne.b32 adds, %{count + after + 1}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH_BYTES // size}.{total}.{left}.{right} "
        "{{{sums}}}, {left_at}, %{count + after}, adds{signs}{turns}; }}"
        : {outputs}
        : {left_input}, "l"(b), "r"(adds));
#endif
}}
}}  // namespace tensor
"""
