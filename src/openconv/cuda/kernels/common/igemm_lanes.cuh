// The products of an implicit GEMM on CUDA cores: each result is a chain of multiply-adds in f32, in the order of the
// depth. Tiles and steps are those of common/igemm.cuh.
//
// A warp's lanes lie 8 along m by 4 along n. Operands are read as vectors of 16 bytes: along the depth these are four
// depths of one m or n, across it four m or n of one depth.
//     along    lane (r, c) has m = r + 8 i,  n = 2 c + j % 2 + 8 (j / 2)
//     across   lane (r, c) has m = 4 (r + 8 (i / 4)) + i % 4,  n = 4 (c + 4 (j / 4)) + j % 4
// A read of a warp then meets eight, or four, pieces in different banks, each for several lanes. Shared memory serves
// half a warp at a time if lane l has the address of lane l ^ 1, or each that of lane l ^ 2: r does not depend on the
// first bit of the lane, and c not on the second. With 8 x 8 results a lane, four depths take 16 reads of two cycles
// for 256 multiply-adds: half of what shared memory gives to four warps that multiply at once.
#pragma once
#include "common/igemm.cuh"

namespace igemm {

// As `Tile`. Across the depth a row is read side by side, and pieces stay where they are.
template <int Size, int Depth, bool KMajor>
struct LaneTile : Tile<f32, Size, Depth, KMajor> {
    using Base = Tile<f32, Size, Depth, KMajor>;
    static constexpr bool along = KMajor;

    __device__ static __forceinline__ int place(int row, int piece) {
        return KMajor ? Base::place(row, piece) : row * Base::row_bytes + piece * piece_bytes;
    }
    template <int Down>
    __device__ static __forceinline__ int place(int row, int piece, int times) {
        return Down % 8 == 0 ? place(row, piece) + times * (Down * Base::row_bytes) : place(row + times * Down, piece);
    }
};

// The products of one warp: M by N results, from (m, n) of the block's on. A slice is `depth` deep. Its products come
// in as many rows as A has vectors: of one m, or of four m and one depth.
template <class A, class B, int M, int N, int WarpsM>
struct Lanes {
    static constexpr int TM = M / 8, TN = N / 4;  // results of a lane
    static constexpr int depth = A::along || B::along ? 4 : 2;
    static constexpr int rows = TM * depth / 4;
    static_assert(M % 32 == 0 && N % 16 == 0, "a lane has whole vectors");

    float sum[TM][TN];
    Pack<float, 4> a[rows], b[2][TN * depth / 4];
    int m, n, r, c;

    __device__ __forceinline__ explicit Lanes(int thread) {
        place(thread);
#pragma unroll
        for (int i = 0; i < TM * TN; ++i) sum[i / TN][i % TN] = 0;
    }

    __device__ __forceinline__ void place(int thread) {
        const int lane = thread % 32;
        m = thread / 32 % WarpsM * M;
        n = thread / 32 / WarpsM * N;
        r = lane / 2 % 2 + lane / 8 * 2;
        c = lane % 2 + lane / 4 % 2 * 2;
    }

    __device__ __forceinline__ void read_a(const char* tiles, int slice, int row) {
        if constexpr (A::along)
            a[row] = vector(tiles + A::place(m + r, slice) + row * (8 * A::row_bytes));
        else
            a[row] = vector(tiles + A::place(slice * depth + row / (TM / 4), m / 4 + r + row % (TM / 4) * 8));
    }
    __device__ __forceinline__ void read_b(const char* tiles, int slice) {
        tiles += A::bytes;
#pragma unroll
        for (int j = 0; j < TN * depth / 4; ++j)
            if constexpr (B::along)
                b[slice % 2][j] = vector(tiles + B::place(n + 2 * c + j % 2, slice) + j / 2 * (8 * B::row_bytes));
            else
                b[slice % 2][j] = vector(tiles + B::place(slice * depth + j / (TN / 4), n / 4 + c + j % (TN / 4) * 4));
    }
    __device__ __forceinline__ void multiply(int slice, int row) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int i = A::along ? row : row % (TM / 4) * 4 + k, at = A::along ? k : row / (TM / 4);
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                const float right =
                    B::along ? b[slice % 2][j].value[at] : b[slice % 2][at * (TN / 4) + j / 4].value[j % 4];
                sum[i][j] = fmaf(a[row].value[k], right, sum[i][j]);
            }
        }
    }

    // As `Warp::store`.
    template <bool Turned, class Lie, class Value, class Besides, class Change>
    __device__ __forceinline__ void store(Value* to, const Besides& besides, const Change& change) const {
        const auto along_n = [&](int j) { return n + (B::along ? 2 * c + 4 * j : 4 * c + j / 4 * 16 + j % 4); };
        decltype(besides.column(0)) columns[TN / 2];
#pragma unroll
        for (int j = 0; j < TN; j += 2) columns[j / 2] = besides.column(along_n(j));
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const int row = m + (A::along ? r + 8 * i : 4 * r + i / 4 * 32 + i % 4);
#pragma unroll
            for (int j = 0; j < TN; j += 2) {
                const int column = along_n(j);
                const float pair[2] = {sum[i][j], sum[i][j + 1]};
                const Pack<Value, 2> changed = change(pair, columns[j / 2], besides.place(Lie::at(row, column)));
                if constexpr (Turned) {
                    to[Lie::at(column, row)] = changed.value[0];
                    to[Lie::at(column + 1, row)] = changed.value[1];
                } else {
                    ::store(to + Lie::at(row, column), changed);
                }
            }
        }
    }

  private:
    __device__ static __forceinline__ Pack<float, 4> vector(const char* at) {
        return load<4>(reinterpret_cast<const float*>(at));
    }
};

// What a kernel is made of: tiles, products, and how many elements deep a slice of them is. `Parts` is that of `Warp`,
// or 0 for products of f32 on CUDA cores.
template <class T, int Parts>
struct Kind {
    template <int Size, int Depth, bool KMajor>
    using Tile = igemm::Tile<T, Size, Depth, KMajor>;
    template <class A, class B, int MT, int NT, int WarpsM, class Sum>
    using Products = Warp<T, A, B, MT, NT, WarpsM, Sum, Parts>;
    template <class Products>
    static constexpr int slice_depth = 32 / int(sizeof(T));
};
template <>
struct Kind<f32, 0> {
    template <int Size, int Depth, bool KMajor>
    using Tile = LaneTile<Size, Depth, KMajor>;
    template <class A, class B, int MT, int NT, int WarpsM, class Sum>
    using Products = Lanes<A, B, 16 * MT, 16 * NT, WarpsM>;
    template <class Products>
    static constexpr int slice_depth = Products::depth;
};

}  // namespace igemm
