"""The product of a warpgroup as C++: PTX names each register of the result, so that each width has its own text."""

from __future__ import annotations

from collections.abc import Iterator

from ..device import Device
from ..engine import Traits
from ..problem import Problem
from .device import CudaDevice

__all__ = ["product", "refusals", "traits"]


def refusals(problem: Problem, device: Device) -> Iterator[str]:
    """What an engine needs that multiplies unpadded windows by these products; the layouts are its own matter."""
    if not isinstance(device, CudaDevice) or device.capability != 90:
        yield f"the device is {getattr(device, 'arch', device.name)}; its products are those of sm_90"
    if problem.direction != "fprop":
        yield f"the pass is {problem.direction}; wanted fprop"
    if len(set(problem.dtypes)) > 1 or problem.dtypes[0] not in ("f16", "bf16"):
        yield f"dtypes are {'*'.join(problem.dtypes)}; wanted f16 or bf16 for all tensors"
    if problem.groups != 1:
        yield f"groups is {problem.groups}; wanted 1"
    if any(low or high for low, high in problem.padding):
        yield f"padding is {problem.padding}; wanted none"
    if set(problem.dilation) != {1}:
        yield f"dilation is {problem.dilation}; wanted 1"
    if problem.is_empty:
        yield "a tensor is empty"


def traits(problem: Problem) -> Traits:
    """A product of depth 16 cuts bits off rather than rounding: up to two units in the last place of its sum."""
    return Traits("f32", (problem.gemm.k / 8 + 32) * 2.0**-23)


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
