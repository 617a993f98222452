// Convolution from a tile in shared memory: what neighbouring windows share is read from memory once.
//
//     fprop   y[n, k, p, q]  = sum over c, r, s of  x[n, c, p*stride - pad + r*dilation, q*stride - pad + s*dilation] * w
//     dgrad   the same with x for dy, c for k and the filter turned around; its stride is 1
//
// A block computes a tile of 32 x (8 * rows) outputs of one image in `filters` output channels. For one input channel
// after the other its threads
//
//     load    the tile of the input that these outputs depend on, with a halo of what windows reach over, and the
//             filter's taps of this channel, to shared memory
//     compute for each column s of the filter: a column of inputs to registers, where all taps r find their values
//
// Thread (x, y) owns column x and rows y*rows ... y*rows + rows - 1 of the tile, in all `filters` channels. With 3 x 3
// taps, 4 rows and 4 channels a column takes 6 + 3 loads from shared memory for 48 multiply-adds.
//
// Shared memory: tile[height][width] of the input, taps[r][s][filters] of the filter, which all threads read at once.
//
// Traits: A, B, Out, Sum, Index, Epilogue; rows, filters, taps_r, taps_s, stride_h, stride_w, dilation_h, dilation_w,
// channels_last, whole (each block's channels are aligned and all there).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/tiled.cuh"
#include "traits"

using Sum = Traits::Sum;
using Index = Traits::Index;
constexpr int R = Traits::taps_r, S = Traits::taps_s, F = Traits::filters, Rows = Traits::rows;
constexpr int Across = 32, Down = 8;
constexpr int Columns = S <= 8 ? S : 1;  // of the filter, written out: more would not fit the instruction cache

// Inputs that a thread's own outputs reach over in one column, and that the tile's reach over.
constexpr int Reach = (Rows - 1) * Traits::stride_h + (R - 1) * Traits::dilation_h + 1;
constexpr int Height = (Down * Rows - 1) * Traits::stride_h + (R - 1) * Traits::dilation_h + 1;
constexpr int Width = (Across - 1) * Traits::stride_w + (S - 1) * Traits::dilation_w + 1;
static_assert((Height * Width + R * S * F) * sizeof(Sum) <= 48 << 10, "a block has 48 KB of shared memory");

struct Strides {
    i64 outer, channel, row, column;
};

struct Params {
    const Traits::A* a;
    const Traits::B* b;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    Strides a_strides, out_strides;
    i64 b_start, b_group, b_out, b_in, b_r, b_s;  // steps of the filter, backwards in a dgrad
    int in_channels, out_channels;                // of one group
    int height, width, out_height, out_width;
    int pad_h, pad_w;
    int tiles_down, tiles_across;
};

extern "C" __global__ void __launch_bounds__(Across* Down)
tiled(const __grid_constant__ Params p) {
    __shared__ Sum tile[Height][Width];
    __shared__ Pack<Sum, F> taps[R][S];

    // Place: a tile of image n, and `filters` channels of a group from `first` on.
    const int tile_x = blockIdx.x % p.tiles_across, tile_y = blockIdx.x / p.tiles_across % p.tiles_down;
    const int n = blockIdx.x / p.tiles_across / p.tiles_down;
    const int blocks = (p.out_channels + F - 1) / F;
    const int group = blockIdx.y / blocks, first = blockIdx.y % blocks * F;
    const int left = tile_x * Across, top = tile_y * Down * Rows;
    const int thread = threadIdx.y * Across + threadIdx.x;

    Sum sum[Rows][F];
#pragma unroll
    for (int i = 0; i < Rows; ++i)
#pragma unroll
        for (int f = 0; f < F; ++f) sum[i][f] = 0;

    for (int c = 0; c < p.in_channels; ++c) {
        // Load.
        const Index channel = Index(group) * p.in_channels + c;
        const Plane<Traits::A, Index> plane = {
            p.a + Index(p.a_strides.outer) * n + Index(p.a_strides.channel) * channel, p.height, p.width,
            Index(p.a_strides.row), int(p.a_strides.column)};
        load_tile(tile, plane, top * Traits::stride_h - p.pad_h, left * Traits::stride_w - p.pad_w);
        for (int i = thread; i < R * S * F; i += Across * Down) {
            const int f = i % F, s = i / F % S, r = i / F / S;
            const bool there = first + f < p.out_channels;
            const i64 at = p.b_start + p.b_group * group + p.b_out * (first + f) + p.b_in * c + p.b_r * r + p.b_s * s;
            taps[r][s].value[f] = there ? widen<Sum>(p.b[at]) : Sum(0);
        }
        __syncthreads();

        // Compute.
#pragma unroll Columns
        for (int s = 0; s < S; ++s) {
            Sum input[Reach];
#pragma unroll
            for (int i = 0; i < Reach; ++i)
                input[i] = tile[threadIdx.y * Rows * Traits::stride_h + i]
                               [threadIdx.x * Traits::stride_w + s * Traits::dilation_w];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const Pack<Sum, F> weight = taps[r][s];
#pragma unroll
                for (int i = 0; i < Rows; ++i)
#pragma unroll
                    for (int f = 0; f < F; ++f)
                        sum[i][f] += input[i * Traits::stride_h + r * Traits::dilation_h] * weight.value[f];
            }
        }
        __syncthreads();  // before the next channel takes the tile's place
    }

    // Store.
    const int x = left + threadIdx.x, channel = group * p.out_channels + first;
    if (x >= p.out_width) return;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
        const int y = top + threadIdx.y * Rows + i;
        if (y >= p.out_height) break;
        const Index at = Index(p.out_strides.outer) * n + Index(p.out_strides.channel) * channel +
                         Index(p.out_strides.row) * y + Index(p.out_strides.column) * x;
        if constexpr (Traits::channels_last && Traits::whole) {
            Traits::Epilogue::apply<F, true>(sum[i], p.operands, channel, at);
            Pack<Traits::Out, F> result;
#pragma unroll
            for (int f = 0; f < F; ++f) result.value[f] = Traits::Out(sum[i][f]);
            store<F>(p.out + at, result);
        } else {
#pragma unroll
            for (int f = 0; f < F; ++f) {
                if (first + f >= p.out_channels) break;
                const Index place = at + Index(p.out_strides.channel) * f;
                Sum result[1] = {sum[i][f]};
                Traits::Epilogue::apply<1, Traits::channels_last>(result, p.operands, channel + f, place);
                p.out[place] = Traits::Out(result[0]);
            }
        }
    }
}
