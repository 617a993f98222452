// Depthwise wgrad of channels-last images: each thread sums some taps of a few channels over its share of the pixels.
//
//     dw[k,t,r,s] = sum over n,o,p,q of  x[n, o*stride - pad + t*dilation, ..., c] * dy[n,o,p,q,k]
//
// A thread owns `channels` channels, `tap_rows` x `tap_columns` taps of the filter, and strips of `strip` columns of dy
// in chunks of rows, one chunk after the other. Down a chunk it loads each row of dy and of x once, makes floats of it
// once, and keeps the last `live` rows of dy in registers: row i of them is the one of i steps ago. Step m loads row m
// of dy and rows m*stride - pad + r0 + j of x, j < stride: these meet dy row m - i in filter row r0 + i*stride + j.
// Rows and columns of dy that are not there take no part, so that no x shows where it has no product.
//
// The threads of a block that share channels add up in the order of their strips; blocks leave one sum for each of
// their taps in the workspace, [part][tap][channel]. The second kernel adds the parts in their order, in double.
//
// Shared memory: one float for each tap and channel of the block.
//
// Traits: A (x), B (dy), Out, Sum, Index, Epilogue; multiplier, filter_*, stride_*, dilation_* (dilation_h is 1 unless
// tap_rows is), channels, strip, tap_rows, tap_columns, ragged (strips may end beyond dy), lanes, threads, blocks.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/epilogue.cuh"
#include "common/depthwise.cuh"
#include "traits"

using namespace depthwise;
using Index = Traits::Index;

struct Params {
    const Traits::A* x;
    const Traits::B* dy;
    Traits::Out* out;
    float* parts;
    int channels, filters;            // C, K
    int lanes, groups, share;         // vectors of filters in a block, blocks along them, parts
    int items, strips, chunks, rows;  // chunks of the whole batch, strips of a row, chunks of an image, rows of one
    int in_d, in_h, in_w, out_d, out_h, out_w, pad_d, pad_h, pad_w;
};

constexpr int V = Traits::channels, L = Traits::strip, M = Traits::multiplier;
constexpr int T = Traits::filter_d, R = Traits::filter_h, S = Traits::filter_w;
constexpr int RT = Traits::tap_rows, ST = Traits::tap_columns;
constexpr int SD = Traits::stride_d, SH = Traits::stride_h, SW = Traits::stride_w;
constexpr int DD = Traits::dilation_d, DH = Traits::dilation_h, DW = Traits::dilation_w;
constexpr int live = ceil_div(RT, SH);
constexpr int columns = (L - 1) * SW + (ST - 1) * DW + 1;
constexpr int tiles_h = ceil_div(R, RT), tiles_w = ceil_div(S, ST);
constexpr int row_floats = (Traits::lanes + 1) * V;
static_assert(M == 1 || V == 1, "several filters for a channel: one channel a thread");
static_assert(RT == 1 || DH == 1, "rows of dy are kept for neighbouring filter rows");

__device__ constexpr bool column_used(int column) {
    for (int q = 0; q < L; ++q)
        for (int s = 0; s < ST; ++s)
            if (column == q * SW + s * DW) return true;
    return false;
}

using Mask = Bits<(columns <= 32)>::type;

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
depthwise_nhwc_wgrad(const __grid_constant__ Params p) {
    alignas(16) __shared__ float total[RT * ST * row_floats];
    let_next_start();

    // Place: blocks go along channels, then tiles of taps, then parts.
    const int group = blockIdx.x % p.groups;
    const int tap_tile = blockIdx.x / p.groups % (T * tiles_h * tiles_w);
    const int part = blockIdx.x / p.groups / (T * tiles_h * tiles_w);
    const int t = tap_tile / (tiles_h * tiles_w), r0 = tap_tile / tiles_w % tiles_h * RT, s0 = tap_tile % tiles_w * ST;
    const int first_channel = group * p.lanes * V;
    const int lane = threadIdx.x % p.lanes, slice = threadIdx.x / p.lanes, slices = blockDim.x / p.lanes;
    const int channel = first_channel + lane * V;
    const bool active = channel < p.filters;

    float sum[RT][ST][V] = {};
    for (int item = active ? part * slices + slice : p.items; item < p.items; item += p.share * slices) {
        int rest = item;
        const int first_column = rest % p.strips * L;
        rest /= p.strips;
        const int first = rest % p.chunks * p.rows, last = min(first + p.rows, p.out_h);
        rest /= p.chunks;
        const int depth = rest % p.out_d, image = rest / p.out_d;
        const int in_depth = depth * SD - p.pad_d + t * DD;
        if (unsigned(in_depth) >= unsigned(p.in_d)) continue;
        const int left = first_column * SW - p.pad_w + s0 * DW;
        const u32 x_pixel = p.channels * u32(sizeof(Traits::A)), dy_pixel = p.filters * u32(sizeof(Traits::B));
        const i64 x_line = i64(p.in_w) * x_pixel, dy_line = i64(p.out_w) * dy_pixel;
        const char* const x_from = reinterpret_cast<const char*>(
            p.x + ((Index(image) * p.in_d + in_depth) * p.in_h * p.in_w + left) * p.channels + channel / M);
        const char* const dy_from = reinterpret_cast<const char*>(
            p.dy + ((Index(image) * p.out_d + depth) * p.out_h * p.out_w + first_column) * p.filters + channel);

        Mask inside = 0;
#pragma unroll
        for (int column = 0; column < columns; ++column)
            inside |= Mask(unsigned(left + column) < unsigned(p.in_w)) << column;

        // Without branches, so that nothing keeps the loads from going ahead of the products.
        constexpr int used = SH < RT ? SH : RT;  // rows of x in a step
        int h = first * SH - p.pad_h + r0 * DH;
        const char* x_row = x_from + h * x_line;
        const char* dy_row = dy_from + first * dy_line;
        const auto fetch_x = [&](Raw<Traits::A, V>(&row)[columns], bool last_of_step, bool wanted) {
            const Mask mask = wanted && unsigned(h) < unsigned(p.in_h) ? inside : 0;
#pragma unroll
            for (int column = 0; column < columns; ++column) {
                if (!column_used(column)) continue;
                row[column].clear();
                if (mask >> column & 1)
                    row[column].load(reinterpret_cast<const Traits::A*>(x_row + u64(x_pixel) * u32(column)));
            }
            h += last_of_step ? SH - used + 1 : 1;
            x_row += (last_of_step ? SH - used + 1 : 1) * x_line;
        };
        const auto fetch_dy = [&](Raw<Traits::B, V>(&row)[L], int m) {
#pragma unroll
            for (int q = 0; q < L; ++q) {
                row[q].clear();
                if (m < last && (!Traits::ragged || first_column + q < p.out_w))
                    row[q].load(reinterpret_cast<const Traits::B*>(dy_row + u64(dy_pixel) * u32(q)));
            }
            dy_row += dy_line;
        };

        float dy[live][L][V] = {};
        Raw<Traits::A, V> x_raw[columns];
        Raw<Traits::B, V> dy_raw[L];
        fetch_dy(dy_raw, first);
        fetch_x(x_raw, used == 1, true);
        const int end = last + live - 1;
        // Two steps move the rows of dy by two at once: half the moves of one by one.
#pragma unroll(live > 2 && SH == 1 ? 2 : 1)
        for (int m = first; m < end; ++m) {
#pragma unroll
            for (int i = live - 1; i > 0; --i)
#pragma unroll
                for (int q = 0; q < L; ++q)
#pragma unroll
                    for (int v = 0; v < V; ++v) dy[i][q][v] = dy[i - 1][q][v];
#pragma unroll
            for (int q = 0; q < L; ++q) dy_raw[q].widen(dy[0][q]);
            fetch_dy(dy_raw, m + 1);
#pragma unroll
            for (int j = 0; j < SH; ++j) {
                if (j >= RT) continue;
                float x[columns][V];
#pragma unroll
                for (int column = 0; column < columns; ++column)
                    if (column_used(column)) x_raw[column].widen(x[column]);
                fetch_x(x_raw, (j + 1) % used == used - 1, j + 1 < used || m + 1 < end);
#pragma unroll
                for (int i = 0; i < live; ++i) {
                    const int r = i * SH + j;
                    if (r >= RT) continue;
                    if (live > 1 && (m - i < first || m - i >= last)) continue;
#pragma unroll
                    for (int q = 0; q < L; ++q) {
                        if (Traits::ragged && first_column + q >= p.out_w) continue;
#pragma unroll
                        for (int s = 0; s < ST; ++s)
#pragma unroll
                            for (int v = 0; v < V; ++v) sum[r][s][v] += x[q * SW + s * DW][v] * dy[i][q][v];
                    }
                }
            }
        }
    }

    // Add up the block's strips in their order.
    for (int turn = 0; turn < slices; ++turn) {
        if (turn == slice && active) {
#pragma unroll
            for (int tap = 0; tap < RT * ST; ++tap)
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    float& at = total[tap * row_floats + lane * V + v];
                    at = (turn ? at : 0.0f) + sum[tap / ST][tap % ST][v];
                }
        }
        __syncthreads();
    }

    // Store: taps of the tile that the filter has.
    const int here = min(p.lanes * V, p.filters - first_channel);
    for (int e = threadIdx.x; e < RT * ST * here; e += blockDim.x) {
        const int tap = e / here, k = e % here, r = r0 + tap / ST, s = s0 + tap % ST;
        if (r < R && s < S)
            p.parts[(i64(part) * (T * R * S) + (t * R + r) * S + s) * p.filters + first_channel + k] =
                total[tap * row_floats + k];
    }
}

// 32 filters of one tap in a block, eight rows of threads: row i adds every eighth part from the i-th.
extern "C" __global__ void __launch_bounds__(256)
depthwise_nhwc_wgrad_sum(const __grid_constant__ Params p) {
    constexpr int rows = 8;
    __shared__ double sums[rows][32];
    const int tap = blockIdx.x % (T * R * S), column = threadIdx.x % 32, row = threadIdx.x / 32;
    const int k = blockIdx.x / (T * R * S) * 32 + column;
    double sum = 0;
    wait_for_previous();
    if (k < p.filters) {
        const float* const from = p.parts + i64(tap) * p.filters + k;
#pragma unroll 8
        for (int part = row; part < p.share; part += rows) sum += from[i64(part) * (T * R * S) * p.filters];
    }
    sums[row][column] = sum;
    __syncthreads();
    if (row > 0 || k >= p.filters) return;
    for (int i = 1; i < rows; ++i) sum += sums[i][column];
    Traits::Sum result[1] = {Traits::Sum(sum)};
    const void* const none[1] = {nullptr};
    const Index at = Index(k) * (T * R * S) + tap;
    Traits::Epilogue::apply<1, true>(result, none, k, at);
    p.out[at] = Traits::Out(result[0]);
}
