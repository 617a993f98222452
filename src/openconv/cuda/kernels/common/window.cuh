// The part of x that a tile of output pixels reads, in shared memory: rows as they lie in memory, channels side by
// side, zeros where there is padding.
//
// The window of pixel (p, q) of the tile has for each filter row r a run of S * stored elements that starts at
//     Window::start(p, q) + lead + r * pitch
// A tensor core takes pairs of elements, which must be aligned to a pair: stride * stored is even for that. An image
// of an odd number of channels at an odd stride is stored with one channel more, which is zero. Where x is copied as
// it is (vector > 1), a run may start at an odd element of its row of memory: then the pairs start one element
// earlier, `lead`. The elements of a pair that belong to no tap are not part of the sum: see masks.
//
// On CUDA cores, in f32, elements are read one by one: all is stored as it is, element by element.
//
// Traits: channels, stored, R, S, stride_h, stride_w, pad_h, pad_w, tile_p, tile_q, threads, nhwc, vector (elements
// of one copy; 1: any layout and alignment).
#pragma once
#include "common/types.cuh"
#include "common/mma.cuh"

struct Window {
    static constexpr int channels = Traits::channels, stored = Traits::stored, vector = Traits::vector;
    static constexpr int columns = (Traits::tile_q - 1) * Traits::stride_w + Traits::S;
    static constexpr int rows = (Traits::tile_p - 1) * Traits::stride_h + Traits::R;
    static constexpr int lead = vector > 1 ? Traits::pad_w * channels % 2 : 0;
    // A copy starts at a multiple of its size: so many elements before the first that is needed.
    static constexpr int before = (Traits::pad_w * channels + lead) % vector, skew = before ? vector - before : 0;
    static constexpr int pitch = (skew + lead + columns * stored + 7) / 8 * 8;
    static constexpr int size = rows * pitch + 8;  // the last octet of the last window may reach 7 elements further

    // A filter row as octets: 4 pairs each, of which lane t of a quad of lanes takes one.
    static constexpr int taps = Traits::S * stored, octets = (lead + taps + 7) / 8;

    static_assert(sizeof(Traits::A) > 2 || Traits::stride_w * stored % 2 == 0, "pairs of elements must be aligned");
    static_assert(vector == 1 || stored == channels, "a copy does not add channels");
    static_assert(vector == 1 || Traits::tile_q * Traits::stride_w * channels % vector == 0, "tiles must be aligned");

    __device__ static __forceinline__ int start(int p, int q) {
        return p * Traits::stride_h * pitch + q * Traits::stride_w * stored + skew;
    }

    // Which halves of pair t of an octet belong to a tap.
    __device__ static __forceinline__ u32 mask(int octet, int t) {
        const int at = octet * 8 + 2 * t - lead;
        return (unsigned(at) < unsigned(taps) ? 0xffffu : 0) | (unsigned(at + 1) < unsigned(taps) ? 0xffff0000u : 0);
    }
    __device__ static constexpr bool whole(int octet) { return octet * 8 >= lead && octet * 8 + 8 <= lead + taps; }

    // Begin to bring the tile whose first output pixel is (n, p0, q0). Vectors arrive after tensor::wait, elements at
    // once; both are there for all threads after a barrier.
    template <class T, class Index>
    __device__ static __forceinline__ void stage(T* tile, const T* x, int n, int p0, int q0, int height, int width) {
        const int h0 = p0 * Traits::stride_h - Traits::pad_h, w0 = q0 * Traits::stride_w - Traits::pad_w;
        if constexpr (vector > 1) {
            constexpr int across = pitch / vector, count = rows * across;
            const int first = w0 * channels - lead - skew, length = width * channels;
            const Index image = Index(n) * height * length;
            for (int i = threadIdx.x; i < count; i += Traits::threads) {
                const int row = i / across, h = h0 + row, at = i % across * vector, e = first + at;
                const bool inside = unsigned(h) < unsigned(height) && unsigned(e) < unsigned(length);
                tensor::copy<vector * sizeof(T)>(tile + row * pitch + at,
                                                 x + (inside ? image + Index(h) * length + e : Index(0)), inside);
            }
        } else {
            constexpr int count = rows * columns;
#pragma unroll 4
            for (int i = threadIdx.x; i < count; i += Traits::threads) {
                const int row = i / columns, column = i % columns, h = h0 + row, w = w0 + column;
                const bool inside = unsigned(h) < unsigned(height) && unsigned(w) < unsigned(width);
                T value[stored];
#pragma unroll
                for (int c = 0; c < stored; ++c) {
                    value[c] = T(0.0f);
                    if (c < channels && inside)
                        value[c] = x[Traits::nhwc ? ((Index(n) * height + h) * width + w) * channels + c
                                                  : ((Index(n) * channels + c) * height + h) * width + w];
                }
#pragma unroll
                for (int c = 0; c < stored; ++c) tile[row * pitch + column * stored + c] = value[c];
            }
        }
    }
};
