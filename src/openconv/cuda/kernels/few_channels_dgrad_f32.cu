// dx of a first layer on CUDA cores.
//
// Pixel (stride_h * i + f - pad_h, stride_w * j + g - pad_w) of dx, of phase (f, g), meets filter rows f + stride_h *
// m and columns g + stride_w * n from dy at (i - m, j - n). A thread owns all phases and channels of V places (i, j)
// side by side: a value of dy is then read once for all of them, and a weight once for V of them.
//
// A block computes tile_i x tile_j places, `chunk` filters after the other.
//
// Shared memory: dy [k][row][column], then the filters [k][m][n][f][g][c].
//
// Traits: channels, R, S, stride_h, stride_w, pad_h, pad_w, threads, nhwc, filter_last, chunk, tile_i, tile_j, V,
// blocks.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "traits"
#include "common/staged.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int V = Traits::V, stride_h = Traits::stride_h, stride_w = Traits::stride_w, channels = Traits::channels;
constexpr int reach_h = (Traits::R + stride_h - 1) / stride_h, reach_w = (Traits::S + stride_w - 1) / stride_w;
constexpr int results = stride_h * stride_w * channels, padded = (results + 3) / 4 * 4;  // of a place
constexpr int vectors = (V + reach_w - 1 + V - 1) / V;  // of dy, that a thread reads of a row
constexpr int dy_rows = Traits::tile_i + reach_h - 1, dy_pitch = (Traits::tile_j / V - 1 + vectors) * V;
static_assert(Traits::threads == Traits::tile_i * Traits::tile_j / V, "one thread for V places");

struct Params {
    const T* dy;
    const T* w;
    Traits::Out* dx;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int height, width, k, p, q;
    int first_i, first_j;         // of the first row and column of dx
    int tiles_i, tiles_j, tiles;  // of one image; in all
};

// The products of one filter. Beyond dy there are no zeros: a filter that is NaN does not meet it. So threads at the
// border ask for each value whether it is there.
template <bool Border>
__device__ __forceinline__ void multiply(float (&acc)[V][results], const T* dy, const T* w, const Params& p, int row,
                                         int column) {
#pragma unroll
    for (int m = 0; m < reach_h; ++m) {
        T d[vectors * V];
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            const Pack<T, V> pack = load<V>(dy + (reach_h - 1 - m) * dy_pitch + v * V);
#pragma unroll
            for (int i = 0; i < V; ++i) d[v * V + i] = pack.value[i];
        }
#pragma unroll
        for (int n = 0; n < reach_w; ++n) {
            T weight[padded];
#pragma unroll
            for (int i = 0; i < padded; i += 4) {
                const Pack<T, 4> pack = load<4>(w + (m * reach_w + n) * padded + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) weight[i + j] = pack.value[j];
            }
#pragma unroll
            for (int v = 0; v < V; ++v) {
                if (Border && (unsigned(row - m) >= unsigned(p.p) || unsigned(column + v - n) >= unsigned(p.q)))
                    continue;
#pragma unroll
                for (int i = 0; i < results; ++i) {
                    const int f = i / (stride_w * channels), g = i / channels % stride_w;
                    if (f + stride_h * m < Traits::R && g + stride_w * n < Traits::S)
                        acc[v][i] += d[v + reach_w - 1 - n] * weight[i];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_dgrad_f32(const __grid_constant__ Params p) {
    alignas(16) __shared__ T dy[Traits::chunk * dy_rows * dy_pitch];
    alignas(16) __shared__ T weights[Traits::chunk * reach_h * reach_w * padded];

    // Place.
    constexpr int across = Traits::tile_j / V;
    const int n = blockIdx.x / (p.tiles_i * p.tiles_j), in = blockIdx.x % (p.tiles_i * p.tiles_j);
    const int i0 = p.first_i + in / p.tiles_j * Traits::tile_i, j0 = p.first_j + in % p.tiles_j * Traits::tile_j;
    const int p0 = i0 - reach_h + 1, q0 = j0 - reach_w + 1;  // the first pixel of dy
    const int own_row = threadIdx.x / across, own_column = threadIdx.x % across * V;
    const int row = i0 + own_row, column = j0 + own_column;
    const bool border = row - reach_h + 1 < 0 || row >= p.p || column - reach_w + 1 < 0 || column + V > p.q;
    float acc[V][results];
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
        for (int i = 0; i < results; ++i) acc[v][i] = 0;

    for (int k0 = 0; k0 < p.k; k0 += Traits::chunk) {
        // Load.
        __syncthreads();
        constexpr int count = dy_rows * dy_pitch;
#pragma unroll 4
        for (int i = threadIdx.x; i < Traits::chunk * count; i += Traits::threads) {
            const int k = Traits::nhwc ? i % Traits::chunk : i / count,
                      at = Traits::nhwc ? i / Traits::chunk : i % count;
            const int y = p0 + at / dy_pitch, x = q0 + at % dy_pitch;
            T value = T(0.0f);
            if (unsigned(y) < unsigned(p.p) && unsigned(x) < unsigned(p.q) && k0 + k < p.k)
                value = p.dy[Traits::nhwc ? ((Index(n) * p.p + y) * p.q + x) * p.k + k0 + k
                                          : ((Index(n) * p.k + k0 + k) * p.p + y) * p.q + x];
            dy[k * count + at] = value;
        }
        constexpr int length = Traits::R * Traits::S * channels;
        const auto place = [&](int i, T value) {
            const int k = i / length, j = i % length;
            const int c = Traits::filter_last ? j % channels : j / (Traits::R * Traits::S);
            const int tap = Traits::filter_last ? j / channels : j % (Traits::R * Traits::S);
            const int r = tap / Traits::S, s = tap % Traits::S;
            const int at = ((k * reach_h + r / stride_h) * reach_w + s / stride_w) * padded +
                           (r % stride_h * stride_w + s % stride_w) * channels + c;
            weights[at] = value;
        };
        const int there = min(p.k - k0, Traits::chunk) * length;
        staged<Traits::threads>(p.w + Index(k0) * length, there, place);
        for (int i = there + threadIdx.x; i < Traits::chunk * length; i += Traits::threads) place(i, T(0.0f));
        __syncthreads();

        // Compute.
        const int left = min(Traits::chunk, p.k - k0);
#pragma unroll 1
        for (int k = 0; k < left; ++k) {
            const T* from = dy + (k * dy_rows + own_row) * dy_pitch + own_column;
            const T* w = weights + k * reach_h * reach_w * padded;
            if (border)
                multiply<true>(acc, from, w, p, row, column);
            else
                multiply<false>(acc, from, w, p, row, column);
        }
    }

    // Store.
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
        for (int i = 0; i < results; ++i) {
            const int h = row * stride_h + i / (stride_w * channels) - Traits::pad_h;
            const int w = (column + v) * stride_w + i / channels % stride_w - Traits::pad_w, c = i % channels;
            if (unsigned(h) >= unsigned(p.height) || unsigned(w) >= unsigned(p.width)) continue;
            const Index place = Traits::nhwc ? ((Index(n) * p.height + h) * p.width + w) * channels + c
                                             : ((Index(n) * channels + c) * p.height + h) * p.width + w;
            float sum[1] = {acc[v][i]};
            Traits::Epilogue::apply<1, Traits::nhwc>(sum, p.operands, c, place);
            p.dx[place] = Traits::Out(sum[0]);
        }
}
