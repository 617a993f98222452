// Boxes of windows (sm_90): pixels of a convolution, one behind the other through rows and images, each with the
// channels of one tap. The map says how far pixels are apart and where the windows of an image begin and end
// (launch.py, WindowMap); a copy names the place of the first pixel's first tap and how far the tap is from that.
#pragma once
#include "common/bulk_ring.cuh"

namespace bulk {

// Of one, two and three axes; `w`, `h` and `d` are places, `right`, `down` and `deep` the way to the tap.
__device__ __forceinline__ void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int image,
                                             int right) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2], {%6};" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(w), "r"(image), "h"(u16(right))
        : "memory");
#endif
}
__device__ __forceinline__ void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int h, int image,
                                             int right, int down) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(w), "r"(h), "r"(image), "h"(u16(right)), "h"(u16(down))
        : "memory");
#endif
}
__device__ __forceinline__ void copy_windows(void* to, const Map& map, Barrier& barrier, int c, int w, int h, int d,
                                             int image, int right, int down, int deep) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(w), "r"(h), "r"(d), "r"(image), "h"(u16(right)),
        "h"(u16(down)), "h"(u16(deep))
        : "memory");
#endif
}

// An arrival at a barrier of this block: in the default form, which orders within the block alone. Ordered for a whole
// cluster, it made large layers 1.4 to 2 times slower.
__device__ __forceinline__ void arrive(Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
#endif
}

}  // namespace bulk
