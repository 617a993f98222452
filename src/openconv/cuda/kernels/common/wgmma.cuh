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
__device__ __forceinline__ void group_begin() {}
__device__ __forceinline__ void group_commit() {}
template <int Left, int N>
__device__ __forceinline__ void group_wait(float (&)[N]) {}
#endif

}  // namespace tensor
