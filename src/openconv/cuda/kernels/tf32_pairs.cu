// Both factors of a convolution, each f32 as a pair of tf32, 11 significant bits each: what is nearest to it, and what
// is nearest to the rest. All high parts of a tensor come first, its low parts behind them:
//
//     x * w  =  high_x * high_w  +  high_x * low_w  +  low_x * high_w,      but for 2^-21 of it
//
// A value that would be rounded to infinity is cut off instead. What is no finite number has 1 or -1 as its high part
// and is itself the low one: it is multiplied by the other factor's high part, which is 0 only if that factor is, and
// by no low part, which may be 0 by chance. So an infinity times a number is an infinity of the right sign, times 0 it
// is NaN, times another infinity, whose high part is 1 or -1 too, an infinity again.
//
// A thread has `each` vectors of four values, those of a block side by side; blocks with x come first.
//
// Traits: none.

#include "common/types.cuh"

constexpr int threads = 256, each = 4;

struct Params {
    const f32 *x, *w;
    u32 *x_pairs, *w_pairs;
    i64 x_vectors, w_vectors;  // of four values
    int x_blocks;
};

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

__device__ __forceinline__ void part(const f32* from, u32* to, i64 vectors, i64 first) {
    Pack<f32, 4> values[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
        if (const i64 at = first + i * threads; at < vectors) values[i] = load<4>(from + 4 * at);
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const i64 at = first + i * threads;
        if (at >= vectors) return;
        Pack<u32, 4> high, low;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const Pair pair(values[i].value[k]);
            high.value[k] = pair.high;
            low.value[k] = pair.low;
        }
        store(to + 4 * at, high);
        store(to + 4 * (vectors + at), low);
    }
}

extern "C" __global__ void __launch_bounds__(threads)
tf32_pairs(const __grid_constant__ Params p) {
    const int block = blockIdx.x - p.x_blocks;
    if (block < 0)
        part(p.x, p.x_pairs, p.x_vectors, i64(blockIdx.x) * (threads * each) + threadIdx.x);
    else
        part(p.w, p.w_pairs, p.w_vectors, i64(block) * (threads * each) + threadIdx.x);
}
