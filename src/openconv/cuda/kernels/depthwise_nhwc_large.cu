// Depthwise fprop and dgrad of channels-last images with any filter: large, dilated, of three axes, several a channel.
//
// A thread owns `channels` channels and a tile of `tile` rows x `strip` columns of the result, whose sums stay in
// registers. It goes over the input rows that reach the tile; of each it loads the columns that `chunk` filter columns
// need, makes floats of them once, and uses them for every result row that the row is part of.
//
// Shared memory: `band` rows of the filters of the block's channels as floats, tap by tap; bands follow each other.
//
// Traits: A, B, Out, Sum, Index, Epilogue; backward, multiplier, filter_d, filter_h, filter_w, stride_*, dilation_*,
// phase_w (of the padding, by the stride), channels, strip, tile, chunk, band, lanes and threads (at most), blocks.

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
    int in_channels, out_channels;
    int lanes, groups;         // vectors of channels in a block, blocks along the channels
    int items, strips, tiles;  // tiles of the whole batch, of a row, of a column
    int in_d, in_h, in_w, out_d, out_h, out_w, pad_d, pad_h, pad_w;
};

constexpr bool backward = Traits::backward;
constexpr int V = Traits::channels, L = Traits::strip, M = Traits::multiplier, tile = Traits::tile;
constexpr int T = Traits::filter_d, R = Traits::filter_h, S = Traits::filter_w;
constexpr int SD = Traits::stride_d, SH = Traits::stride_h, SW = Traits::stride_w;
constexpr int DD = Traits::dilation_d, DH = Traits::dilation_h, DW = Traits::dilation_w;
constexpr int band = Traits::band, chunk = Traits::chunk;
constexpr int row_floats = (Traits::lanes + 1) * V;
static_assert(M == 1 || V == 1, "several filters for a channel: one channel a thread");
static_assert(!backward || (L % SW == 0 && (chunk >= S || chunk * DW % SW == 0)), "all starts have one phase");

// Columns of the input that `Count` filter columns need at a strip: results q and taps s of them meet at
// q*stride + s*dilation (fprop), or at (q + phase - s*dilation) / stride where that is whole (dgrad).
template <int Count>
struct Window {
    static constexpr int reach = (Count - 1) * DW;
    static constexpr int low = backward && reach > Traits::phase_w ? -((reach - Traits::phase_w) / SW) : 0;
    static constexpr int columns = backward ? (L - 1 + Traits::phase_w) / SW - low + 1 : (L - 1) * SW + reach + 1;

    __device__ static constexpr bool meets(int column, int q, int s) {
        return backward ? q + Traits::phase_w - s * DW == (column + low) * SW : column == q * SW + s * DW;
    }
    __device__ static constexpr bool used(int column) {
        for (int q = 0; q < L; ++q)
            for (int s = 0; s < Count; ++s)
                if (meets(column, q, s)) return true;
        return false;
    }
};

using Pixel = Raw<Traits::A, V>;
static_assert(Window<chunk>::columns <= 64, "a bit for each column");

// Adds the products of `Count` filter columns with one input row. `row` is where the input's column 0 lies, `left` the
// window's first column. Columns that are not there are left out by a mask and not by branches: loads go out together.
template <int Count>
__device__ __forceinline__ void add(float (&sum)[tile][L][V], const char* row, int left, const Params& p,
                                    const float* taps, const int (&rows)[tile], bool there) {
    using Here = Window<Count>;
    using Mask = typename Bits<(Here::columns <= 32)>::type;
    const u32 pixel = p.in_channels * u32(sizeof(Traits::A));
    const char* const at = row + i64(left) * pixel;
    const int start = max(0, -left), stop = there ? min(Here::columns, p.in_w - left) : 0;
    const Mask mask = start < stop ? (~Mask(0) >> (int(sizeof(Mask)) * 8 - stop)) & (~Mask(0) << start) : 0;
    Pixel raw[Here::columns];
#pragma unroll
    for (int column = 0; column < Here::columns; ++column) {
        if (!Here::used(column)) continue;
        raw[column].clear();
        if (mask >> column & 1) raw[column].load(reinterpret_cast<const Traits::A*>(at + u64(pixel) * u32(column)));
    }
    float x[Here::columns][V];
#pragma unroll
    for (int column = 0; column < Here::columns; ++column)
        if (Here::used(column)) raw[column].widen(x[column]);
#pragma unroll
    for (int i = 0; i < tile; ++i) {
        if (rows[i] < 0) continue;
        const float* const tap_row = taps + rows[i] * (S * row_floats);
#pragma unroll
        for (int s = 0; s < Count; ++s) {
            float w[V];
            read_tap<V>(w, tap_row + s * row_floats);
#pragma unroll
            for (int q = 0; q < L; ++q)
#pragma unroll
                for (int column = 0; column < Here::columns; ++column) {
                    if (!Here::meets(column, q, s)) continue;
#pragma unroll
                    for (int v = 0; v < V; ++v) sum[i][q][v] += x[column][v] * w[v];
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
depthwise_nhwc_large(const __grid_constant__ Params p) {
    alignas(16) __shared__ float filters[band * S * row_floats];

    // Place.
    const int group = blockIdx.x % p.groups;
    const int first_channel = group * p.lanes * V;
    const int lane = threadIdx.x % p.lanes;
    const int channel = first_channel + lane * V;
    const int item = blockIdx.x / p.groups * (blockDim.x / p.lanes) + threadIdx.x / p.lanes;
    const bool active = item < p.items && channel < p.out_channels;
    int rest = item;
    const int first_column = rest % p.strips * L;
    rest /= p.strips;
    const int first_row = rest % p.tiles * tile;
    rest /= p.tiles;
    const int depth = rest % p.out_d, image = rest / p.out_d;

    const i64 in_line = i64(p.in_w) * p.in_channels * int(sizeof(Traits::A));

    float sum[tile][L][V] = {};
    for (int m = 0; m < (backward ? M : 1); ++m)
        for (int t = 0; t < T; ++t) {
            const int place = backward ? depth + p.pad_d - t * DD : depth * SD - p.pad_d + t * DD;
            const int in_depth = backward ? floor_div(place, SD) : place;
            const bool whole = !backward || (in_depth * SD == place && unsigned(in_depth) < unsigned(p.in_d));
            const bool solid = unsigned(in_depth) < unsigned(p.in_d);
            const int in_channel = backward ? channel * M + m : channel / M;
            const Traits::A* const plane =
                p.a + ((Index(image) * p.in_d + in_depth) * p.in_h * p.in_w) * p.in_channels + in_channel;
            for (int r0 = 0; r0 < R; r0 += band) {
                // Load.
                const int rows = min(band, R - r0);
                __syncthreads();
                const int filters_here = min(p.lanes * V, p.out_channels - first_channel);
                const int pitch = (backward ? M : 1) * T * R * S;
                const Traits::B* const from = p.b + i64(first_channel) * pitch + (m * T + t) * (R * S) + r0 * S;
                for (int e = threadIdx.x; e < filters_here * rows * S; e += blockDim.x) {
                    const int filter = e / (rows * S), tap = e % (rows * S);
                    filters[tap * row_floats + filter] = widen<float>(from[i64(filter) * pitch + tap]);
                }
                __syncthreads();
                if (!active || !whole) continue;

                // Compute.
                int h, end;
                if (backward) {
                    h = max(floor_div(first_row + p.pad_h - (r0 + rows - 1) * DH + SH - 1, SH), 0);
                    end = min(floor_div(first_row + tile - 1 + p.pad_h - r0 * DH, SH) + 1, p.in_h);
                } else {
                    h = first_row * SH - p.pad_h + r0 * DH;
                    end = (first_row + tile - 1) * SH - p.pad_h + (r0 + rows - 1) * DH + 1;
                }
                for (; h < end; ++h) {
                    int tap_rows[tile];
                    bool any = false;
#pragma unroll
                    for (int i = 0; i < tile; ++i) {
                        const int row = first_row + i;
                        const int reach = (backward ? row + p.pad_h - h * SH : h + p.pad_h - row * SH) - r0 * DH;
                        const bool met = reach >= 0 && reach % DH == 0 && reach / DH < rows;
                        tap_rows[i] = met ? reach / DH : -1;
                        any |= met;
                    }
                    if (!any) continue;
                    const bool there = solid && unsigned(h) < unsigned(p.in_h);
                    const char* const at = reinterpret_cast<const char*>(plane) + h * in_line;
                    const float* taps = filters + lane * V;
                    constexpr int full = S / chunk * chunk, tail = S - full;
                    const auto left = [&](int s0, int low) {
                        return backward ? (first_column + p.pad_w - Traits::phase_w - s0 * DW) / SW + low
                                        : first_column * SW - p.pad_w + s0 * DW;
                    };
#pragma unroll 1
                    for (int s0 = 0; s0 < full; s0 += chunk)
                        add<chunk>(sum, at, left(s0, Window<chunk>::low), p, taps + s0 * row_floats, tap_rows, there);
                    if constexpr (tail > 0)
                        add<tail>(sum, at, left(full, Window<tail>::low), p, taps + full * row_floats, tap_rows, there);
                }
            }
        }
    if (!active) return;

    // Store.
#pragma unroll
    for (int i = 0; i < tile; ++i) {
        const int row = first_row + i;
        if (row >= p.out_h) continue;
        const Index line = ((Index(image) * p.out_d + depth) * p.out_h + row) * p.out_w;
#pragma unroll
        for (int q = 0; q < L; ++q) {
            const int column = first_column + q;
            if (column >= p.out_w) continue;
            Traits::Sum result[V];
#pragma unroll
            for (int v = 0; v < V; ++v) result[v] = sum[i][q][v];
            const Index at = (line + column) * p.out_channels + channel;
            Traits::Epilogue::apply<V, true>(result, p.operands, channel, at);
            put<V>(p.out + at, narrow<Traits::Out, V>(result));
        }
    }
}
