// The second half of an implicit GEMM whose depth was split: the sums of the splits, and what follows them.
//
// A thread has `together` results that lie side by side. Eight rows of 32 threads share the splits of the same results:
// row r adds those from r on, every eighth, and the first row adds what the rows have. The order depends on the number of
// splits alone.
//
// Traits: together, rows (1 or 8).

#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "traits"

constexpr int V = Traits::together, rows = Traits::rows, columns = 256 / rows;

struct Params {
    const Traits::Products* parts;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count ? Traits::Epilogue::count : 1];
    i64 results;
    int splits, out_pixel;  // elements of a pixel of the result
};

extern "C" __global__ void __launch_bounds__(256)
igemm_sum(const __grid_constant__ Params p) {
    __shared__ Pack<Traits::Products, V> all[rows][columns];
    const int column = threadIdx.x % columns, row = threadIdx.x / columns;
    const i64 at = (i64(blockIdx.x) * columns + column) * V;
    Pack<Traits::Products, V> sum = {};
    wait_for_previous();
    if (at < p.results)
#pragma unroll 4
        for (int split = row; split < p.splits; split += rows) {
            const auto part = load<V>(p.parts + split * p.results + at);
#pragma unroll
            for (int k = 0; k < V; ++k) sum.value[k] += part.value[k];
        }
    if constexpr (rows > 1) {
        all[row][column] = sum;
        __syncthreads();
        if (row) return;
#pragma unroll
        for (int other = 1; other < rows; ++other)
#pragma unroll
            for (int k = 0; k < V; ++k) sum.value[k] += all[other][column].value[k];
    }
    if (at >= p.results) return;
    Traits::Sum value[V];
#pragma unroll
    for (int k = 0; k < V; ++k) value[k] = Traits::Sum(sum.value[k]);
    Traits::Epilogue::apply<V, true>(value, p.operands, int(at % p.out_pixel), at);
    Pack<Traits::Out, V> result;
#pragma unroll
    for (int k = 0; k < V; ++k) result.value[k] = Traits::Out(value[k]);
    store(p.out + at, result);
}
