// Boxes that are stored while later ones are made (sm_90): batches of stores, of which some may be under way.
#pragma once
#include "common/bulk_store.cuh"

namespace bulk {

// What this thread has stored since the last batch is one.
__device__ __forceinline__ void commit() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until all batches of this thread but the last `Left` are read, so that their shared memory may be written again.
template <int Left>
__device__ __forceinline__ void read_but() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
#endif
}

}  // namespace bulk
