"""The product of a warpgroup as C++: PTX names each register of the result, so that each width has its own text."""

from __future__ import annotations

__all__ = ["product"]


def product(columns: int, dtype: str) -> str:
    """``group_product(d, a, b)``: d (64 x columns, f32) += a * b of f16 or bf16, a depth of 16. ``a`` and ``b`` are
    descriptors of ``common/wgmma.cuh``."""
    if columns % 8 or not 8 <= columns <= 256:
        raise ValueError(f"columns is {columns}; wanted a multiple of 8 up to 256")
    if dtype not in ("f16", "bf16"):
        raise ValueError(f"dtype is {dtype!r}; wanted f16 or bf16")
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
namespace tensor {{
__device__ __forceinline__ void group_product(float (&d)[{count}], u64 a, u64 b) {{
#if !defined(__CUDACC__)
    emulated_group_product<{dtype}>(d, a, b);
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "{{ .reg .pred adds; setp.ne.b32 adds, 1, 0; "
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} "
        "{{{registers}}}, %{count}, %{count + 1}, adds, 1, 1, 0, 0; }}"
        : {outputs}
        : "l"(a), "l"(b));
#endif
}}
}}  // namespace tensor
"""
