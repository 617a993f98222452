// A tensor with its channels behind the pixels rather than in front of them: out[n, pixel, c] = from[n, c, pixel].
//
// A block has 64 channels by 64 pixels, which it reads along the pixels and writes along the channels, through shared
// memory. Of elements of one or two bytes, a thread reads and writes as many as make four bytes where they are aligned.
//
// Traits: Element (of the same size, without a meaning), from_vector, to_vector.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/follow.cuh"
#include "traits"

using T = Traits::Element;
constexpr int side = 64, threads = 256, FV = Traits::from_vector, TV = Traits::to_vector;
constexpr int pitch = side + 4 / int(sizeof(T));  // an odd number of words: columns lie in different banks

struct Params {
    const T* from;
    T* to;
    int channels, pixels;
    Divisor channel_tiles, pixel_tiles;
};

extern "C" __global__ void __launch_bounds__(threads)
channels_last(const __grid_constant__ Params p) {
    alignas(16) __shared__ T tile[side * pitch];
    int image = blockIdx.x;
    const int c0 = p.channel_tiles.split(image) * side, x0 = p.pixel_tiles.split(image) * side;
    const i64 first = i64(image) * p.channels * p.pixels;
    let_next_start();
    constexpr int wide = side / FV, long_ = side / TV;
#pragma unroll
    for (int i = threadIdx.x; i < side * wide; i += threads) {
        const int c = i / wide, x = i % wide * FV;
        if (c0 + c < p.channels && x0 + x < p.pixels)
            store(tile + c * pitch + x, load<FV>(p.from + first + i64(c0 + c) * p.pixels + x0 + x));
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < side * long_; i += threads) {
        const int x = i / long_, c = i % long_ * TV;
        if (c0 + c < p.channels && x0 + x < p.pixels) {
            Pack<T, TV> together;
#pragma unroll
            for (int k = 0; k < TV; ++k) together.value[k] = tile[(c + k) * pitch + x];
            store(p.to + first + i64(x0 + x) * p.channels + c0 + c, together);
        }
    }
}
