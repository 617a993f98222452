// Statistics behind an implicit GEMM: the sums of its blocks added up, channel by channel.
//
//     sum[k] = sum over tiles of  parts[tile, k, 0]        squares[k] = sum over tiles of  parts[tile, k, 1]
//
// A block has 32 columns of `parts`. Row r of its threads adds the tiles from r on, every 32nd, and the first row adds
// what the rows have: the order depends on the number of tiles alone.

#include "common/types.cuh"
#include "common/follow.cuh"

constexpr int rows = 32, columns = 32;

struct Params {
    const float* parts;
    float* sum;
    float* squares;
    int tiles, channels;
};

extern "C" __global__ void __launch_bounds__(rows* columns)
igemm_stats(const __grid_constant__ Params p) {
    __shared__ float all[rows][columns];
    const int column = threadIdx.x % columns, row = threadIdx.x / columns;
    const int at = blockIdx.x * columns + column, width = 2 * p.channels;
    float sum = 0;
    wait_for_previous();
    if (at < width)
#pragma unroll 8
        for (int tile = row; tile < p.tiles; tile += rows) sum += p.parts[i64(tile) * width + at];
    all[row][column] = sum;
    __syncthreads();
    if (row || at >= width) return;
#pragma unroll
    for (int other = 1; other < rows; ++other) sum += all[other][column];
    (at % 2 ? p.squares : p.sum)[at / 2] = sum;
}
