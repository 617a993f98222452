// What the kernels of filter2d share: the type of sums, the filter and its factors, how it is cut into blocks of taps,
// and how a part of an image comes into shared memory.
#pragma once
#include "common/types.cuh"

// Sums of bytes are exact: 31*31 products of two bytes stay below 2^26, and a wgrad wraps as a byte does.
template <class T>
struct FilterSum {
    using type = float;
};
template <>
struct FilterSum<u8> {
    using type = u32;
};

// A tap of an R x S filter that starts at `filter`; flipped, of the filter turned by half a turn.
template <class T, int R, int S, bool Flipped, class B>
__device__ __forceinline__ T read_tap(const B* filter, int r, int s) {
    return widen<T>(filter[Flipped ? (R - 1 - r) * S + S - 1 - s : r * S + s]);
}

// What filter2d_factors.cu finds of a channel's filter: if `separable`, its tap (r, s) is down[r] * along[s].
template <class T>
struct alignas(16) Factors {
    static constexpr int most = 32;
    T along[most], down[most];
    int separable;
};

__host__ __device__ constexpr int up_to(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// A row of S taps is cut into blocks of 4 and a last one of 2 to 5: block b starts at tap 4*b, so that the values that
// four neighbouring results need start at a multiple of 4, and a block of 5 still needs no more than 8 of them.
template <int S>
struct ColumnBlocks {
    static constexpr int count = S < 6 ? 1 : (S - 2) / 4 + 1;
    static constexpr int last = S - 4 * (count - 1);
    static constexpr int widest = count == 1 || last > 4 ? last : 4;
};

// R rows of taps are cut into `count` blocks of `tallest` or one less: the taller ones first.
template <int R, int Most>
struct RowBlocks {
    static constexpr int count = (R + Most - 1) / Most;
    static constexpr int tallest = (R + count - 1) / count;
    static constexpr int tall = R - count * (tallest - 1);
    __device__ static __forceinline__ int start(int block) {
        return block < tall ? block * tallest : tall * tallest + (block - tall) * (tallest - 1);
    }
};

// From here on memory is read again: values that two blocks of taps share would wait in registers for the second, and a
// 9x9 filter would then take 254 of them.
__device__ __forceinline__ void read_anew() { __syncwarp(); }

template <class T>
__device__ __forceinline__ void read_four(T* value, const T* at) {
    const Pack<T, 4> pack = load<4>(at);
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j] = pack.value[j];
}

// N values from a multiple of 4 on, four at a time; what is loaded beyond N is not used.
template <int N, class T>
__device__ __forceinline__ void read_row(T (&value)[up_to(N, 4)], const T* at) {
#pragma unroll
    for (int v = 0; v < N; v += 4) read_four(value + v, at + v);
}

// Copies Rows x Columns values of a plane from (row, column) on into shared memory, with zeros outside of the plane. A
// warp takes a row at a time: neighbouring lanes load neighbouring values, whatever the alignment.
template <int Rows, int Columns, int Pitch, int Step, int Warps, class T, class A, class Index>
__device__ __forceinline__ void stage(T* tile, const A* plane, int row, int column, int height, int width) {
    constexpr int per_lane = (Columns + 31) / 32;
    const int lane = threadIdx.x % 32;
    // Two rows at once: some ten loads of a thread are on their way together.
#pragma unroll 2
    for (int r = threadIdx.x / 32; r < Rows; r += Warps) {
        const bool inside = unsigned(row + r) < unsigned(height);
        const A* from = plane + (Index(row + r) * width + column + lane) * Step;
        T value[per_lane];
#pragma unroll
        for (int i = 0; i < per_lane; ++i) {
            const int c = 32 * i + lane;
            value[i] = T(0);
            if (inside && c < Columns && unsigned(column + c) < unsigned(width))
                value[i] = widen<T>(from[32 * i * Step]);
        }
#pragma unroll
        for (int i = 0; i < per_lane; ++i)
            if (32 * i + lane < Columns) tile[r * Pitch + 32 * i + lane] = value[i];
    }
}
