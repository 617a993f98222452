// Matrices on their way to shared memory (sm_90).
#pragma once
#include "common/mma.cuh"

namespace tensor {

// Four 8 x 8 matrices, as `load_matrices` reads them: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const u32 (&from)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
#endif
}

}  // namespace tensor
