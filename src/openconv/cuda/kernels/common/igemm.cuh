// What the implicit GEMMs share: operands as tiles in shared memory, and the products of a warp on them.
//
//     D[m, n] += sum over k of  A[m, k] * B[n, k]
//
// A tile holds a step of the depth k of one operand, in pieces of 16 bytes. Along the depth (`KMajor`) a row is one m or
// n and its pieces follow the depth; across it, a row is one k and its pieces follow m or n, as they lie in memory where
// channels are what a result has and not what it sums over. ldmatrix turns those around on the way into registers.
//
// Eight rows below each other are read at once. Piece j of a row lies at j ^ (row % 8) of it, so that these eight fall
// into different banks; where a row has fewer than eight pieces, rows that share 128 bytes share the exchange.
#pragma once
#include "common/mma.cuh"

namespace igemm {

constexpr int piece_bytes = 16;

template <class T, int Size, int Depth, bool KMajor>
struct Tile {
    static constexpr int per_piece = piece_bytes / sizeof(T);
    static constexpr int rows = KMajor ? Size : Depth, pieces = (KMajor ? Depth : Size) / per_piece;
    static constexpr int bytes = rows * pieces * piece_bytes;
    static_assert(pieces == 2 || pieces == 4 || pieces % 8 == 0, "rows share or divide 128 bytes");
    static_assert(KMajor || sizeof(T) == 2, "ldmatrix turns around elements of two bytes");

    static constexpr int together = pieces < 8 ? pieces : 8, shared = 8 / together, row_bytes = pieces * piece_bytes;

    __device__ static __forceinline__ int place(int row, int piece) {
        return row * row_bytes + (piece ^ (row / shared % together)) * piece_bytes;
    }
    // The same `Down` rows further. Eight of them further, pieces are exchanged alike.
    template <int Down>
    __device__ static __forceinline__ int place(int row, int piece, int times) {
        return Down % 8 == 0 ? place(row, piece) + times * (Down * row_bytes) : place(row + times * Down, piece);
    }

    // Sixteen m, of which the first is a multiple of 16, by 32 bytes of depth: the four registers of A in common/mma.cuh.
    __device__ static __forceinline__ void load_a(u32 (&to)[4], const char* tile, int m, int slice, int lane) {
        if constexpr (KMajor)
            tensor::load_matrices(to, tile + m * row_bytes + place(lane % 16, 2 * slice + lane / 16));
        else
            tensor::load_transposed(
                to, tile + slice * (16 * row_bytes) + place(lane / 16 * 8 + lane % 8, m / 8 + lane / 8 % 2));
    }

    // Sixteen n by 32 bytes of depth: the two registers of B for the first eight, then for the others.
    __device__ static __forceinline__ void load_b(u32 (&to)[4], const char* tile, int n, int slice, int lane) {
        if constexpr (KMajor)
            tensor::load_matrices(
                to, tile + n * row_bytes + place(lane / 16 * 8 + lane % 8, 2 * slice + lane / 8 % 2));
        else
            tensor::load_transposed(to, tile + slice * (16 * row_bytes) + place(lane % 16, n / 8 + lane / 16));
    }
};

// The products of one warp: MT * 16 by NT * 16 results, from (m, n) of the block's on.
template <class T, class A, class B, int MT, int NT, class Sum>
struct Warp {
    Sum sum[MT][2 * NT][4];
    u32 a[2][MT][4], b[2][NT][4];  // operands of two slices: one is multiplied while the other is read
    int m, n, lane;

    __device__ __forceinline__ Warp(int m, int n, int lane) : m(m), n(n), lane(lane) {
#pragma unroll
        for (int i = 0; i < MT * NT * 8; ++i) sum[i / (8 * NT)][i / 4 % (2 * NT)][i % 4] = 0;
    }

    // Operands of a slice, 32 bytes of the depth.
    __device__ __forceinline__ void read(const char* tiles, int slice) {
#pragma unroll
        for (int i = 0; i < MT; ++i) A::load_a(a[slice % 2][i], tiles, m + 16 * i, slice, lane);
#pragma unroll
        for (int j = 0; j < NT; ++j) B::load_b(b[slice % 2][j], tiles + A::bytes, n + 16 * j, slice, lane);
    }

    __device__ __forceinline__ void multiply(int slice) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j) {
                const u32(&left)[4] = a[slice % 2][i];
                const u32(&right)[4] = b[slice % 2][j / 2];
                tensor::mma<T>(sum[i][j], left[0], left[1], left[2], left[3], right[j % 2 * 2], right[j % 2 * 2 + 1]);
            }
    }

    // The sums as rows of `pitch` values in shared memory.
    __device__ __forceinline__ void store(Sum* to, int pitch) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < 2 * NT; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Pack<Sum, 2> pair;
                    pair.value[0] = sum[i][j][2 * half];
                    pair.value[1] = sum[i][j][2 * half + 1];
                    ::store(to + (m + 16 * i + 8 * half + g) * pitch + n + 8 * j + 2 * t, pair);
                }
    }
};

// All steps of a block. `copies` knows what a thread brings of a step: `copy` asks for one of its `Copies::count` pieces,
// `end` goes on to the next step. Before that, with a barrier in between, all threads `prepare` what they share of it.
// Steps are asked for `Stages` - 1 ahead; the copies of a step are spread over the slices of another, so that working out
// addresses and multiplying alternate.
template <int Stages, int Slices, class Products, class Copies>
__device__ __forceinline__ void steps(Products& products, Copies& copies, char* ring, int stage_bytes, int count) {
    static_assert(Slices % 2 == 0, "operands alternate between two sets of registers, from step to step as well");
    const auto bring = [&](int step, int slot, int slice) {
        if (step < count) {
#pragma unroll
            for (int i = 0; i < Copies::count; ++i)
                if (i * Slices / Copies::count == slice) copies.copy(ring + slot * stage_bytes, i);
            if (slice == Slices - 1) copies.end();
        }
        if (slice == Slices - 1) tensor::commit();
    };
#pragma unroll
    for (int step = 0; step < Stages - 1; ++step) {
        copies.prepare(step);
        __syncthreads();
#pragma unroll
        for (int slice = 0; slice < Slices; ++slice) bring(step, step, slice);
    }
    copies.prepare(Stages - 1);
    tensor::wait<Stages - 2>();
    __syncthreads();
    products.read(ring, 0);
    int reading = 0, writing = Stages - 1;
#pragma unroll 1
    for (int step = 0; step < count; ++step) {
        const char* tiles = ring + reading * stage_bytes;
        reading = reading + 1 == Stages ? 0 : reading + 1;
#pragma unroll
        for (int slice = 0; slice < Slices; ++slice) {
            bring(step + Stages - 1, writing, slice);
            if (slice == 0) copies.prepare(step + Stages);
            if (slice == Slices - 1) {
                tensor::wait<Stages - 2>();
                __syncthreads();  // the next step is there for all, and nobody reads this one any more
                products.read(ring + reading * stage_bytes, 0);
            } else {
                products.read(tiles, slice + 1);
            }
            products.multiply(slice);
        }
        writing = writing + 1 == Stages ? 0 : writing + 1;
    }
    tensor::wait<0>();
    __syncthreads();
}

// `Count` elements from global to shared memory, as a copy that runs beside the threads where it can be one; zeros
// unless `inside`.
template <int Count, class T>
__device__ __forceinline__ void bring(void* to, const T* from, bool inside) {
    constexpr int size = Count * sizeof(T);
    if constexpr (size >= 4) {
        tensor::copy<size>(to, from, inside);
    } else {
        T none = {};
        *static_cast<Pack<T, Count>*>(to) = inside ? load<Count>(from) : Pack<T, Count>{none};
    }
}

}  // namespace igemm
