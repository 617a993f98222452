// The second half of a reduction: what the pieces of each result came to, joined.
//
//     reduced_m[i] = join over pieces of  parts[m, piece, i]
//
// A block has 32 results of one reduction. Row r of its threads joins the pieces from r on, every `rows`-th, and the
// first row joins what the rows have: the order depends on the number of pieces alone. Of no pieces the result is that
// of nothing.
//
// Traits: Sum, rows, reductions, Reductions.

#include "common/follow.cuh"
#include "common/reduce.cuh"
#include "common/tree.cuh"
#include "traits"

using Sum = Traits::Sum;
using Reductions = Traits::Reductions;
constexpr int columns = 32, rows = Traits::rows, reductions = Traits::reductions;

struct Params {
    const Sum* parts;
    void* reduced[reductions];
    i64 results, terms;
    int pieces;
};

template <int m>
__device__ __forceinline__ void finish(const Params& p, Sum (&all)[rows][columns]) {
    const int column = threadIdx.x % columns, row = threadIdx.x / columns;
    const i64 at = i64(blockIdx.x) * columns + column;
    Sum sum = Reductions::start(m);
    if (at < p.results) {
        const Sum* parts = p.parts + i64(m) * p.pieces * p.results + at;
#pragma unroll 8
        for (int piece = row; piece < p.pieces; piece += rows) sum = Reductions::join(m, sum, parts[piece * p.results]);
    }
    all[row][column] = sum;
    __syncthreads();
    if (row || at >= p.results) return;
#pragma unroll
    for (int other = 1; other < rows; ++other) sum = Reductions::join(m, sum, all[other][column]);
    Reductions::store(m, p.reduced[m], at, Reductions::finish(m, sum, Sum(p.terms)));
}

template <int m>
__device__ __forceinline__ void find(const Params& p, Sum (&all)[rows][columns]) {
    if constexpr (m < reductions) {
        if (int(blockIdx.y) == m)
            finish<m>(p, all);
        else
            find<m + 1>(p, all);
    }
}

extern "C" __global__ void __launch_bounds__(rows* columns)
tree_finish(const __grid_constant__ Params p) {
    __shared__ Sum all[rows][columns];
    wait_for_previous();
    find<0>(p, all);
}
