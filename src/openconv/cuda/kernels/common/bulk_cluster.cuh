// What blocks of a cluster have in shared memory, read by each other (sm_90): of what a block has written before
// `cluster_release`, all is there behind the `cluster_wait` of the others. A block stays until no other reads it any
// more, which takes one more arrival and wait of all.
#pragma once
#include "common/bulk_ring.cuh"

namespace bulk {

#if __CUDA_ARCH__ >= 900
// The place of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// An arrival as `cluster_arrive`, which orders nothing; this one shows what its thread has written before.
__device__ __forceinline__ void cluster_release() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// The sixteen bytes at the same place of shared memory of block `rank`.
__device__ __forceinline__ uint4 load_peer(const void* mine, int rank) {
    uint4 value;
    asm volatile(
        "{ .reg .b32 at; "
        "mapa.shared::cluster.u32 at, %4, %5; "
        "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [at]; }"
        : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
        : "r"(shared_address(mine)), "r"(rank)
        : "memory");
    return value;
}
#else  // Engines refuse older devices.
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_release() {}
__device__ __forceinline__ uint4 load_peer(const void*, int) { return {}; }
#endif

}  // namespace bulk
