// Depthwise fprop and dgrad of channels-last images with small filters: a window that slides down the image.
//
//     fprop   y[n,p,q,c]  = sum over r,s of  x[n, p*stride - pad + r, q*stride - pad + s, c] * w[c,r,s]
//     dgrad   dx[n,h,w,c] = sum over r,s of  dy[n, (h + pad - r)/stride, (w + pad - s)/stride, c] * w[c,r,s]
//
// A thread owns `channels` channels, a strip of `strip` result columns and a chunk of result rows, and walks down. It
// loads each input row of its strip once, makes floats of it once, and adds its products to all result rows that the
// row is part of: `live` rows of sums are under way, and each step finishes `done` of them. The sums move up by `done`
// rows with each step; that costs nothing, since the first product of a step reads one register and writes another.
// Rows are asked for `ahead` rows before they are used. Lanes go along channels first, then along strips.
//
// fprop: a step takes `taken` = stride input rows and finishes one result row. Sum row i of step m is y row m + i, and
// input row j of the step, at x row (m + live - 1) * stride - pad + j, is its filter row (live - 1 - i) * stride + j.
// dgrad: a step takes one row m of dy and finishes stride rows. Sum row i is dx row m * stride - pad + i, filter row i.
//
// Shared memory: the filters of the block's channels as floats, tap by tap.
//
// Traits: A, B, Out, Sum, Index, Epilogue; backward, filter_h, filter_w, stride_h, stride_w, phase_h, phase_w (of the
// padding, by the stride), channels, strip, ahead, lanes and threads (at most), blocks (resident), kept (filters in
// registers), skips (rows that add nothing), ragged (strips may end beyond the result).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/depthwise.cuh"
#include "traits"

using namespace depthwise;
using Index = Traits::Index;

struct Params {
    const Traits::A* a;
    const Traits::B* b;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int channels;               // of the images
    int lanes, groups;          // vectors of channels in a block, blocks along the channels
    int items, strips, chunks;  // strips of the whole batch, of a row, chunks of an image
    int rows;                   // of a chunk
    int in_h, in_w, out_h, out_w, pad_h, pad_w;
};

constexpr bool backward = Traits::backward;
constexpr int V = Traits::channels, L = Traits::strip, R = Traits::filter_h, S = Traits::filter_w;
constexpr int SH = Traits::stride_h, SW = Traits::stride_w, D = Traits::ahead;
constexpr int taken = backward ? 1 : SH, done = backward ? SH : 1;
constexpr int live = backward ? larger(R, SH) : ceil_div(R, SH);
// The leftmost column that a strip reads, from where its first result's first tap (dgrad: last tap, rounded) lies.
constexpr int low = backward && S - 1 > Traits::phase_w ? -((S - 1 - Traits::phase_w) / SW) : 0;
constexpr int columns = backward ? (L - 1 + Traits::phase_w) / SW - low + 1 : (L - 1) * SW + S;
constexpr int row_floats = (Traits::lanes + 1) * V;
static_assert(!backward || L % SW == 0, "strips start at one phase of the stride");

// The filter column that meets input column `column` at result `q` of the strip; outside 0 ... S-1 there is none.
__device__ constexpr int tap_w(int column, int q) {
    return backward ? q + Traits::phase_w - (column + low) * SW : column - q * SW;
}
__device__ constexpr int tap_h(int j, int i) { return backward ? i : (live - 1 - i) * SH + j; }
__device__ constexpr bool column_used(int column) {
    for (int q = 0; q < L; ++q)
        if (tap_w(column, q) >= 0 && tap_w(column, q) < S) return true;
    return false;
}
__device__ constexpr bool row_used(int j) {
    for (int i = 0; i < live; ++i)
        if (tap_h(j, i) >= 0 && tap_h(j, i) < R) return true;
    return false;
}

// Row i of the sums begins a step as the row `done` below it was.
__device__ __forceinline__ void move_up(float (&sum)[live][L][V], int i) {
#pragma unroll
    for (int q = 0; q < L; ++q)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[i][q][v] = i + done < live ? sum[i + done < live ? i + done : 0][q][v] : 0.0f;
}

using Pixel = Raw<Traits::A, V>;
using Mask = Bits<(columns <= 32)>::type;

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
depthwise_nhwc(const __grid_constant__ Params p) {
    alignas(16) __shared__ float filters[R * S * row_floats];

    // Place.
    const int group = blockIdx.x % p.groups;
    const int first_channel = group * p.lanes * V;
    const int lane = threadIdx.x % p.lanes;
    const int channel = first_channel + lane * V;
    const int item = blockIdx.x / p.groups * (blockDim.x / p.lanes) + threadIdx.x / p.lanes;
    __shared__ bool unusual;  // an infinite weight or a NaN: its product with the padding is a NaN, and must show
    if (threadIdx.x == 0) unusual = false;
    __syncthreads();
    const bool finite = stage_taps<R * S, row_floats>(filters, p.b + i64(first_channel) * (R * S),
                                                      min(p.lanes * V, p.channels - first_channel));
    if (!finite) unusual = true;
    __syncthreads();
    const bool padding_adds = !backward && unusual;
    if (item >= p.items || channel >= p.channels) return;
    const int strip = item % p.strips, chunk = item / p.strips % p.chunks, image = item / (p.strips * p.chunks);
    const int first_column = strip * L;
    // Rows of the result: those of the chunk, and the one that a step's first row of sums belongs to.
    int first = chunk * p.rows - (backward ? Traits::phase_h : 0);  // dgrad: a step's rows then belong to one chunk
    const int last = min(first + p.rows, p.out_h);
    int row = first - (live - 1) / done * done;
    int h = backward ? (row + p.pad_h) / SH : (row + live - 1) * SH - p.pad_h;
    first = max(first, 0);

    // Bytes from here on: a column's address is then one multiplication, by a constant, and addition.
    const int left = backward ? (first_column + p.pad_w - Traits::phase_w) / SW + low : first_column * SW - p.pad_w;
    const u32 pixel = p.channels * u32(sizeof(Traits::A));
    const char* const from =
        reinterpret_cast<const char*>(p.a + (Index(image) * p.in_h * p.in_w + left) * p.channels + channel);
    const i64 in_line = i64(p.in_w) * pixel, out_line = i64(p.out_w) * pixel;
    char* const to =
        reinterpret_cast<char*>(p.out + (Index(image) * p.out_h * p.out_w + first_column) * p.channels + channel);
    const float* const taps = filters + lane * V;

    Mask inside = 0;
#pragma unroll
    for (int column = 0; column < columns; ++column)
        inside |= Mask(unsigned(left + column) < unsigned(p.in_w)) << column;

    float weight[Traits::kept ? R * S : 1][V];
    if constexpr (Traits::kept) {
#pragma unroll
        for (int tap = 0; tap < R * S; ++tap) read_tap<V>(weight[tap], taps + tap * row_floats);
    }

    // The input's rows follow each other, and so do the result's. Loads are not branched around, so that nothing keeps
    // them from going ahead of the products.
    const char* in_row = from + h * in_line;
    char* out_row = to + row * out_line;
    const auto fetch = [&](Pixel(&row)[columns], bool used, bool wanted) {
        if (used) {
            const Mask mask = wanted && unsigned(h) < unsigned(p.in_h) ? inside : 0;
#pragma unroll
            for (int column = 0; column < columns; ++column) {
                if (!column_used(column)) continue;
                row[column].clear();
                if (mask >> column & 1)
                    row[column].load(reinterpret_cast<const Traits::A*>(in_row + u64(pixel) * u32(column)));
            }
        }
        ++h;
        in_row += in_line;
    };

    float sum[live][L][V] = {};
    Pixel raw[D][columns];
#pragma unroll
    for (int d = 0; d < D; ++d) fetch(raw[d], row_used(d % taken), true);

    // A body of several steps, until the buffers of rows that are under way come round.
    constexpr int body = D % taken == 0 ? D / taken : D;
    while (row < last) {
#pragma unroll
        for (int u = 0; u < body; ++u) {
            if (row >= last) break;
#pragma unroll
            for (int j = 0; j < taken; ++j) {
                constexpr int slots = D;
                const int slot = (u * taken + j) % slots;
                float x[columns][V];
                if (row_used(j)) {
#pragma unroll
                    for (int column = 0; column < columns; ++column)
                        if (column_used(column)) raw[slot][column].widen(x[column]);
                }
                const int next = j + D;
                const bool above = h - D < 0;  // the image, and so was every row before this one: all sums are zero
                fetch(raw[slot], row_used(next % taken), row + next / taken * done < last);  // none past the last step

                // Compute.
                if (Traits::skips && above && !padding_adds) continue;
#pragma unroll
                for (int i = 0; i < live; ++i) {
                    const int r = tap_h(j, i);
                    if (j > 0 && (r < 0 || r >= R)) continue;
                    if (Traits::skips && (row + i < first || row + i >= last)) continue;
                    if (j == 0) move_up(sum, i);
                    if (r < 0 || r >= R) continue;
#pragma unroll
                    for (int s = 0; s < S; ++s) {
                        float w[V];
                        if constexpr (Traits::kept) {
#pragma unroll
                            for (int v = 0; v < V; ++v) w[v] = weight[r * S + s][v];
                        } else {
                            read_tap<V>(w, taps + (r * S + s) * row_floats);
                        }
#pragma unroll
                        for (int q = 0; q < L; ++q)
#pragma unroll
                            for (int column = 0; column < columns; ++column) {
                                if (tap_w(column, q) != s) continue;
#pragma unroll
                                for (int v = 0; v < V; ++v) sum[i][q][v] += x[column][v] * w[v];
                            }
                    }
                }
            }

            // Store.
#pragma unroll
            for (int i = 0; i < done; ++i) {
                if (row + i < first || row + i >= last) continue;
                char* const line = out_row + i * out_line;
#pragma unroll
                for (int q = 0; q < L; ++q) {
                    Traits::Out* const at = reinterpret_cast<Traits::Out*>(line + u64(pixel) * u32(q));
                    const bool there = !Traits::ragged || first_column + q < p.out_w;
                    if (Traits::Epilogue::count > 0 && !there) continue;  // operands are not there either
                    Traits::Sum result[V];
#pragma unroll
                    for (int v = 0; v < V; ++v) result[v] = sum[i][q][v];
                    Traits::Epilogue::apply<V, true>(result, p.operands, channel, Index(at - p.out));
                    const auto words = narrow<Traits::Out, V>(result);
                    if (there) put<V>(at, words);
                }
            }
            row += done;
            out_row += done * out_line;
        }
    }
}
