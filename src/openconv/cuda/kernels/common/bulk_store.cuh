// Boxes on their way back (sm_90): from shared memory into a tensor, asked for by one thread. A box lies there as
// common/bulk.cuh brings it; what of it lies outside of the tensor is left out.
#pragma once
#include "common/bulk.cuh"

namespace bulk {

#if __CUDA_ARCH__ >= 900
// In front of a barrier: what this thread has written is there for boxes that are stored or brought behind it.
__device__ __forceinline__ void written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store(const void* from, const Map& map, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(x), "r"(y)
                 : "memory");
}
// Waits until all that this thread has stored is read: the block's shared memory may go then.
__device__ __forceinline__ void stored() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}
#else  // Engines refuse older devices.
__device__ __forceinline__ void written() {}
__device__ __forceinline__ void store(const void*, const Map&, int, int) {}
__device__ __forceinline__ void stored() {}
#endif

}  // namespace bulk
