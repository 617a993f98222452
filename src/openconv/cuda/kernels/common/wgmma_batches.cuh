// Batches of a warpgroup's products (common/wgmma.cuh) that go on while others are asked for, and operands that lie
// across. The product itself is generated (group_product.py), as
//     group_product(d, a, b, adds)        d = a * b, or d += a * b where `adds` is not 0
// for 32 bytes of depth: 16 values of f16 and bf16, 8 of tf32, 32 of e4m3, e5m2 and i8.
#pragma once
#include "common/wgmma_turned.cuh"

namespace tensor {

// Until at most `Left` batches are under way. Sums may be read behind `group_done` only.
template <int Left>
__device__ __forceinline__ void group_left() {
#if __CUDA_ARCH__ >= 900
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
#endif
}
// Behind the wait for the last batch: nothing that reads these sums moves up across it.
template <int N>
__device__ __forceinline__ void group_done(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void group_done(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

}  // namespace tensor
