// Products of a warpgroup, four warps, on operands in shared memory (sm_90). They run beside the threads that ask for
// them: `group_commit` ends a batch, `group_wait<N>` waits until at most N batches are under way.
//
// An operand lies in rows of 128 bytes, 64 values along the depth of the product, eight rows to 1024 bytes that are
// aligned to as many. The sixteen bytes at `piece` of a row lie at piece ^ (row % 8), which `swizzled` works out: rows
// below each other then fall into different banks. A descriptor names the first row of an operand.
//
// Of the 64 x N result, warp w of the group, lane l with g = l / 4 and t = l % 4 has, for j = 0 ... N / 8 - 1,
//     d[4j], d[4j + 1]: row 16w + g, columns 8j + 2t, 8j + 2t + 1;   d[4j + 2], d[4j + 3]: row 16w + g + 8
//
// The instruction itself lists its N / 2 registers, so that wgmma.py writes it for each N.
#pragma once
#include "common/mma.cuh"

namespace tensor {

__device__ __forceinline__ int swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u64 descriptor(const void* at) {
    const u64 rows = u64(1024 >> 4) << 32, swizzle = u64(1) << 62;
    return swizzle | rows | u64(1) << 16 | (shared_address(at) & 0x3ffff) >> 4;
}
// The same rows, some bytes further along.
__device__ __forceinline__ u64 along(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

// What ordinary copies have written into shared memory can be read by products that are asked for from here on.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices as mma.cuh's load_matrices reads them, to shared memory; `Transposed`: lane l gives the address of
// column l % 8 of matrix l / 8.
template <bool Transposed>
__device__ __forceinline__ void store_matrices(void* row, const u32 (&from)[4]) {
    const u32 at = shared_address(row);
    if constexpr (Transposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(from[0]),
                     "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(from[0]),
                     "r"(from[1]), "r"(from[2]), "r"(from[3])
                     : "memory");
}

// All threads of a warpgroup: change the number of registers that each has, within what the block has.
template <int Count>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// The first operand may lie in registers, as A of common/mma.cuh in each warp. They stay as they are until `keep`, which
// comes behind the wait.
__device__ __forceinline__ void keep(u32 (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Left, int N>
__device__ __forceinline__ void group_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
    // Nothing that reads the results moves up across the wait.
    #pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
#else  // Engines refuse older devices.
__device__ __forceinline__ u64 descriptor(const void*) { return 0; }
__device__ __forceinline__ u64 along(u64 descriptor, int) { return descriptor; }
__device__ __forceinline__ void shared_written() {}
__device__ __forceinline__ void keep(u32 (&)[4]) {}
template <bool Transposed>
__device__ __forceinline__ void store_matrices(void*, const u32 (&)[4]) {}
template <int Count>
__device__ __forceinline__ void give_registers() {}
template <int Count>
__device__ __forceinline__ void take_registers() {}
__device__ __forceinline__ void group_begin() {}
__device__ __forceinline__ void group_commit() {}
template <int Left, int N>
__device__ __forceinline__ void group_wait(float (&)[N]) {}
#endif

}  // namespace tensor
