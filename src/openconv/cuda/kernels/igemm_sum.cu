// The second half of an implicit GEMM whose depth was split: the sums of the splits, and what follows them.
//
// A thread has `together` results that lie side by side. Eight rows of 32 threads share the splits of the same results:
// row r adds those from r on, every eighth, and the first row adds what the rows have. The order depends on the number
// of splits alone.
//
// The results lie as the sums do: with their channels last, or pixels; but those of a filter with its channels first,
// whose sums have their channels last.
//
// Traits: together, rows (1 or 8), last (channels), filter.

#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "traits"

constexpr int V = Traits::together, rows = Traits::rows, columns = 256 / rows;

struct Params {
    const Traits::Products* parts;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count ? Traits::Epilogue::count : 1];
    i64 results, plane;  // elements of the result, and pixels of one of its images
    int splits;
    int row, channels;  // elements of a filter, and channels: of the result's pixels or of the filter
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
    const i64 channel = Traits::last ? at % p.channels : at / p.plane % p.channels;
    Traits::Epilogue::apply<V, Traits::last>(value, p.operands, int(channel), at);
    Pack<Traits::Out, V> result;
#pragma unroll
    for (int k = 0; k < V; ++k) result.value[k] = Traits::Out(value[k]);
    const int n = Traits::filter && !Traits::last ? int(at % p.row) : 0;  // tap and channel
    store(p.out + (at - n) + (n % p.channels * (p.row / p.channels) + n / p.channels), result);
}
