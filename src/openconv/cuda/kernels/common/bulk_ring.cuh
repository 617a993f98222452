// Rings of boxes (sm_90): boxes of more axes, batches of stores, of which some may be under way while later ones are
// made, and warpgroups of a block that work apart.
#pragma once
#include "common/bulk_store.cuh"

namespace bulk {

// Boxes of three, four and five axes, for this block alone.
__device__ __forceinline__ void copy_cube(void* to, const Map& map, Barrier& barrier, int x, int y, int z) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
#endif
}
__device__ __forceinline__ void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(x), "r"(y), "r"(image)
        : "memory");
#endif
}
__device__ __forceinline__ void copy(void* to, const Map& map, Barrier& barrier, int c, int x, int y, int image,
                                     int chunk) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(x), "r"(y), "r"(image), "r"(chunk)
        : "memory");
#endif
}
__device__ __forceinline__ void store(const void* from, const Map& map, int c, int x, int y, int image) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(c), "r"(x), "r"(y), "r"(image)
                 : "memory");
#endif
}
// What this thread has stored since the last batch is one.
__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until all batches of this thread but the last `Left` are read, so that their shared memory may be written again.
template <int Left>
__device__ __forceinline__ void read_but() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
#endif
}
// The 128 threads of a block's warpgroup wait for each other; `sync_first` has a barrier of its own.
__device__ __forceinline__ void sync_group(int group) {
#if __CUDA_ARCH__ >= 900
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
#endif
}

}  // namespace bulk
