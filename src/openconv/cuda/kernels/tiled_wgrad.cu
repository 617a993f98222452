// The gradient of the filter from tiles in shared memory, in two stages without a race.
//
//     dw[k, c, r, s] = sum over n, p, q of  x[n, c, p*stride - pad + r*dilation, q*stride - pad + s*dilation] * dy[n, k, p, q]
//
// partial   A block is about one input channel and `filters` output channels, and takes every gridDim.x-th tile of
//           32 x (8 * rows) outputs. Its threads load the tile of x with its halo to shared memory, and add up the
//           products of their own outputs for every tap, in registers. At the end a warp adds up its lanes by shuffles,
//           and the warps meet in shared memory: partial[block][k, c, r, s].
// total     A thread adds up what the blocks found for one value of dw, always in the same order.
//
// Atomic additions would do in one stage, in an order that differs from run to run, and the last bits with it.
//
// Shared memory: tile[height][width] of x, sums[warp][taps * filters].
//
// Traits: A (of x), B (of dy), Out, Sum, Index; rows, filters, taps_r, taps_s, stride_h, stride_w, dilation_h,
// dilation_w.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/tiled.cuh"
#include "traits"

using Sum = Traits::Sum;
using Index = Traits::Index;
constexpr int R = Traits::taps_r, S = Traits::taps_s, F = Traits::filters, Rows = Traits::rows;
constexpr int Across = 32, Down = 8;
constexpr int Reach = (Rows - 1) * Traits::stride_h + (R - 1) * Traits::dilation_h + 1;
constexpr int Height = (Down * Rows - 1) * Traits::stride_h + (R - 1) * Traits::dilation_h + 1;
constexpr int Width = (Across - 1) * Traits::stride_w + (S - 1) * Traits::dilation_w + 1;
static_assert((Height * Width + Down * R * S * F) * sizeof(Sum) <= 48 << 10, "a block has 48 KB of shared memory");

struct Strides {
    i64 outer, channel, row, column;
};

struct Params {
    const Traits::A* x;
    const Traits::B* dy;
    Traits::Out* dw;
    Sum* partial;
    Strides x_strides, dy_strides;
    i64 dw_k, dw_c, dw_r, dw_s;
    int c, k;  // of one group
    int groups;
    int height, width, out_height, out_width;
    int pad_h, pad_w;
    int tiles, tiles_down, tiles_across;  // tiles: of all images
    int slices;                           // blocks that share the tiles
};

extern "C" __global__ void __launch_bounds__(Across* Down)
partial(const __grid_constant__ Params p) {
    __shared__ Sum tile[Height][Width];
    __shared__ Sum sums[Down][R * S * F];

    // Place: channel c and output channels first ... first + filters - 1 of a group.
    const int blocks = (p.k + F - 1) / F;
    const int first = blockIdx.y % blocks * F, c = blockIdx.y / blocks % p.c, group = blockIdx.y / blocks / p.c;
    const int thread = threadIdx.y * Across + threadIdx.x;

    Sum sum[R][S][F];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int f = 0; f < F; ++f) sum[r][s][f] = 0;

    for (int t = blockIdx.x; t < p.tiles; t += gridDim.x) {
        const int left = t % p.tiles_across * Across, top = t / p.tiles_across % p.tiles_down * Down * Rows;
        const int n = t / p.tiles_across / p.tiles_down;

        // Load.
        const Plane<Traits::A, Index> plane = {
            p.x + Index(p.x_strides.outer) * n + Index(p.x_strides.channel) * (Index(group) * p.c + c), p.height,
            p.width, Index(p.x_strides.row), int(p.x_strides.column)};
        load_tile(tile, plane, top * Traits::stride_h - p.pad_h, left * Traits::stride_w - p.pad_w);
        Sum outer[Rows][F];
        const int x = left + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            const int y = top + threadIdx.y * Rows + i;
            const Index at = Index(p.dy_strides.outer) * n + Index(p.dy_strides.row) * y +
                             Index(p.dy_strides.column) * x +
                             Index(p.dy_strides.channel) * (Index(group) * p.k + first);
#pragma unroll
            for (int f = 0; f < F; ++f) {
                const bool there = y < p.out_height && x < p.out_width && first + f < p.k;
                outer[i][f] = there ? widen<Sum>(p.dy[at + Index(p.dy_strides.channel) * f]) : Sum(0);
            }
        }
        __syncthreads();

        // Compute. Outputs beyond the image take no part: a NaN that their windows see times 0 would be one.
        if (x < p.out_width) {
#pragma unroll
            for (int s = 0; s < S; ++s) {
                Sum input[Reach];
#pragma unroll
                for (int i = 0; i < Reach; ++i)
                    input[i] = tile[threadIdx.y * Rows * Traits::stride_h + i]
                                   [threadIdx.x * Traits::stride_w + s * Traits::dilation_w];
#pragma unroll
                for (int i = 0; i < Rows; ++i) {
                    if (top + threadIdx.y * Rows + i >= p.out_height) break;
#pragma unroll
                    for (int r = 0; r < R; ++r)
#pragma unroll
                        for (int f = 0; f < F; ++f)
                            sum[r][s][f] += input[i * Traits::stride_h + r * Traits::dilation_h] * outer[i][f];
                }
            }
        }
        __syncthreads();
    }

    // Reduce: lanes of a warp, then warps.
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int f = 0; f < F; ++f) {
                Sum all = sum[r][s][f];
#pragma unroll
                for (int lanes = 16; lanes > 0; lanes /= 2) all += __shfl_xor_sync(0xffffffff, all, lanes);
                if (threadIdx.x == 0) sums[threadIdx.y][(r * S + s) * F + f] = all;
            }
    __syncthreads();

    // Store: partial[slice][k of all groups][c][r][s].
    for (int i = thread; i < R * S * F; i += Across * Down) {
        const int f = i % F, tap = i / F;
        if (first + f >= p.k) continue;
        Sum all = 0;
        for (int warp = 0; warp < Down; ++warp) all += sums[warp][i];
        const i64 filter = (i64(blockIdx.x) * p.groups + group) * p.k + first + f;
        p.partial[(filter * p.c + c) * (R * S) + tap] = all;
    }
}

extern "C" __global__ void __launch_bounds__(256)
total(const __grid_constant__ Params p) {
    const i64 count = i64(p.groups) * p.k * p.c * (R * S), i = i64(blockIdx.x) * 256 + threadIdx.x;
    if (i >= count) return;
    Sum all = 0;
    for (int slice = 0; slice < p.slices; ++slice) all += p.partial[slice * count + i];
    const int tap = int(i % (R * S)), c = int(i / (R * S) % p.c);
    const i64 k = i / (R * S) / p.c;
    p.dw[k * p.dw_k + c * p.dw_c + tap / S * p.dw_r + tap % S * p.dw_s] = Traits::Out(all);
}
