// A tensor with its channels behind the pixels rather than in front of them: out[n, pixel, c] = from[n, c, pixel].
//
// A block has `tile_c` channels by `tile_x` pixels, which it reads along the pixels and writes along the channels,
// through shared memory. All pixels of an image that has few, as a filter has taps, are one run of memory for all
// channels. Of elements of one or two bytes, a thread reads and writes as many as make four bytes where they are
// aligned.
//
// Traits: Element (of the same size, without a meaning), tile_c, tile_x, from_vector, to_vector.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Element;
constexpr int tile_c = Traits::tile_c, tile_x = Traits::tile_x, threads = 256;
constexpr int FV = Traits::from_vector, TV = Traits::to_vector;
// An odd number of words, or of elements: columns lie in different banks.
constexpr int pitch = tile_x % 4 ? tile_x | 1 : tile_x + 4 / int(sizeof(T));
static_assert(pitch % FV == 0, "rows are aligned to vectors");

struct Params {
    const T* from;
    T* to;
    int channels, pixels;
    Divisor channel_tiles, pixel_tiles;
};

extern "C" __global__ void __launch_bounds__(threads)
channels_last(const __grid_constant__ Params p) {
    alignas(16) __shared__ T tile[tile_c * pitch];
    int image = blockIdx.x;
    const int c0 = p.channel_tiles.split(image) * tile_c, x0 = p.pixel_tiles.split(image) * tile_x;
    const i64 first = i64(image) * p.channels * p.pixels;
    constexpr int wide = tile_x / FV, high = tile_c / TV;
#pragma unroll 4
    for (int i = threadIdx.x; i < tile_c * wide; i += threads) {
        const int c = i / wide, x = i % wide * FV;
        if (c0 + c < p.channels && x0 + x < p.pixels)
            store(tile + c * pitch + x, load<FV>(p.from + first + i64(c0 + c) * p.pixels + x0 + x));
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < tile_x * high; i += threads) {
        const int x = i / high, c = i % high * TV;
        if (c0 + c < p.channels && x0 + x < p.pixels) {
            Pack<T, TV> together;
#pragma unroll
            for (int k = 0; k < TV; ++k) together.value[k] = tile[(c + k) * pitch + x];
            store(p.to + first + i64(x0 + x) * p.channels + c0 + c, together);
        }
    }
}
