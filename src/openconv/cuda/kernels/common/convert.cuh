// Conversions between f32 and the bits of f16 and bf16, in the instructions of PTX.
#pragma once

namespace convert {

__device__ __forceinline__ unsigned short f16_from(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short bf16_from(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const unsigned word = __float_as_uint(value);
    // Half of the last place, less one where that place is even already: ties go to even. A NaN stays one.
    return value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
#endif
}

__device__ __forceinline__ float f32_from_bf16(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

}  // namespace convert
