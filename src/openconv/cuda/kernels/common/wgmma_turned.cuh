// The second operand of a warpgroup's product (common/wgmma.cuh) where it lies across: rows of 128 bytes are 64 values
// along the columns of the result, one row for each value of the depth. Sixty-four columns further on, its next part
// lies `further` bytes on. A product takes 16 rows, 2048 bytes.
#pragma once
#include "common/wgmma.cuh"

namespace tensor {

__device__ __forceinline__ u64 turned_descriptor(const void* at, int further) {
#if __CUDA_ARCH__ >= 900
    const u64 rows = u64(1024 >> 4) << 32, swizzle = u64(1) << 62;
    return swizzle | rows | u64(further >> 4) << 16 | (shared_address(at) & 0x3ffff) >> 4;
#else
    return 0;  // Engines refuse older devices.
#endif
}

}  // namespace tensor
