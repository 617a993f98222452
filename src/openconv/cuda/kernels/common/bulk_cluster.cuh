// Blocks of a cluster that read each other's shared memory (sm_90).
#pragma once
#include "common/bulk_ring.cuh"

namespace bulk {

#if __CUDA_ARCH__ >= 900
// Which of its cluster this block is.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// As cluster_arrive, and what this thread has written is there for those that wait.
__device__ __forceinline__ void cluster_release() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// The 16 bytes at the same place of another block.
__device__ __forceinline__ uint4 load_peer(const void* mine, int rank) {
    uint4 found;
    asm volatile(
        "{ .reg .b32 at; "
        "mapa.shared::cluster.u32 at, %4, %5; "
        "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [at]; }"
        : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
        : "r"(shared_address(mine)), "r"(rank)
        : "memory");
    return found;
}
#else  // Engines refuse older devices.
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_release() {}
__device__ __forceinline__ uint4 load_peer(const void*, int) { return {}; }
#endif

}  // namespace bulk
