// f32 as a pair of tf32, 11 significant bits each: what is nearest to it, and what is nearest to the rest.
//
//     x * w  =  high_x * high_w  +  high_x * low_w  +  low_x * high_w,      but for 2^-21 of it
//
// A value that would be rounded to infinity is cut off instead. What is no finite number has 1 or -1 as its high part
// and is itself the low one: it is multiplied by the other factor's high part, which is 0 only if that factor is, and
// by no low part, which may be 0 by chance. So an infinity times a number is an infinity of the right sign, times 0 it
// is NaN, times another infinity, whose high part is 1 or -1 too, an infinity again.
#pragma once
#include "common/types.cuh"

namespace tf32 {

__device__ __forceinline__ u32 nearest(u32 bits) { return (bits + 0x1000u) & 0xffffe000u; }  // ties away from zero

struct Pair {
    u32 high, low;

    __device__ __forceinline__ explicit Pair(float value) {
        constexpr u32 exponent = 0x7f800000u;
        const u32 bits = __float_as_uint(value), sign = bits & 0x80000000u;
        high = nearest(bits);
        if ((high & exponent) == exponent) high = bits & 0xffffe000u;
        low = nearest(__float_as_uint(value - __uint_as_float(high)));
        if ((bits & exponent) == exponent) {
            high = sign | 0x3f800000u;
            low = bits << 1 == exponent << 1 ? bits : 0x7fffe000u;  // a NaN that keeps its bits
        }
    }
};

// Whether all are finite numbers, and none would be rounded to infinity.
template <int N>
__device__ __forceinline__ bool usual(const u32 (&bits)[N]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += fabsf(__uint_as_float(bits[i]));
    return sum < 3.4e38f;
}
// The same as a Pair's parts, of such a number.
__device__ __forceinline__ u32 usual_low(u32 bits) {
    return nearest(__float_as_uint(__uint_as_float(bits) - __uint_as_float(nearest(bits))));
}

}  // namespace tf32
