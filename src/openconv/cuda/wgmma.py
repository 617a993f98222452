"""The product of a warpgroup as C++: PTX names each register of the result, so that each width has its own text."""

from __future__ import annotations

__all__ = ["product"]


def product(columns: int, dtype: str, *, registers: bool = False) -> str:
    """``group_product(d, a, b)``: d (64 x columns, f32) += a * b of f16 or bf16, a depth of 16. ``a`` and ``b`` are
    descriptors of ``common/wgmma.cuh``, or ``a`` is in ``registers``."""
    if columns % 8 or not 8 <= columns <= 256:
        raise ValueError(f"columns is {columns}; wanted a multiple of 8 up to 256")
    if dtype not in ("f16", "bf16"):
        raise ValueError(f"dtype is {dtype!r}; wanted f16 or bf16")
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if registers:
        kind, first = "const u32 (&a)[4]", "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        second, order, inputs = count + 4, "0", ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        kind, first, second, order, inputs = "u64 a", f"%{count}", count + 1, "0, 0", '"l"(a)'
    return f"""
namespace tensor {{
__device__ __forceinline__ void group_product(float (&d)[{count}], {kind}, u64 b) {{
#if !defined(__CUDACC__)
    emulated_group_product<{dtype}>(d, a, b);
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "{{ .reg .pred adds; setp.ne.b32 adds, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
        "{{{sums}}}, {first}, %{second}, adds, 1, 1, {order}; }}"
        : {outputs}
        : {inputs}, "l"(b));
#endif
}}
}}  // namespace tensor
"""
