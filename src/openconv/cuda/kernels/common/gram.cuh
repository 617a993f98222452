// What products of planes with planes need beyond common/planes.cuh and common/mma.cuh.
#pragma once
#include "common/mma.cuh"
#include "common/planes.cuh"

namespace gram {

using planes::Unit;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// Towards minus infinity, for a divisor above zero.
__device__ constexpr int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
__device__ constexpr int floor_mod(int a, int b) { return a - floor_div(a, b) * b; }

// threadIdx.x and blockIdx.x, read again where they stand: what is worked out from them is not kept from before.
#if defined(__CUDACC__)
__device__ __forceinline__ int thread() {
    int found;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(found));
    return found;
}
__device__ __forceinline__ int block() {
    int found;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(found));
    return found;
}
#else
inline int thread() { return threadIdx.x; }
inline int block() { return blockIdx.x; }
#endif

// Asks for the 32 bytes at an address to come to the L2 cache.
__device__ __forceinline__ void ask(const void* at) {
#if defined(__CUDACC__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

}  // namespace gram
