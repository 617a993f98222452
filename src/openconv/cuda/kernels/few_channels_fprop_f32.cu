// y of a first layer on CUDA cores: y[pixel, k] = sum over r and the run of S*C elements of x[window row r] * w[k, r].
//
// A block keeps `filters` filters and goes from tile to tile of tile_p x tile_q pixels. A thread owns 8 filters side
// by side of MT pixels: for each element of the window it reads MT values of x and two vectors of 4 weights, for 8 *
// MT products. In a warp 8 threads have pixels side by side, so that in nchw they store 32 bytes of a plane together.
//
// Shared memory: the filters [r][s][c][k], then the tile of x (common/window.cuh).
//
// Traits: those of Window, and MT, filters, blocks, filter_last, width (filters of one store; 1 in nchw).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "traits"
#include "common/window.cuh"
#include "common/staged.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int MT = Traits::MT, filters = Traits::filters, length = Traits::R * Window::taps;
constexpr int spread = Traits::threads / (filters / 8);  // pixels of a thread lie so far apart
static_assert(filters % 8 == 0 && spread % 8 == 0, "threads own 8 filters, and 8 of them lie side by side");
static_assert(MT * spread == Traits::tile_p * Traits::tile_q, "threads own MT pixels");

struct Params {
    const T* x;
    const T* w;
    Traits::Out* y;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int height, width, k, p, q;
    int tiles_p, tiles_q, tiles;  // of one image; in all
};

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_fprop_f32(const __grid_constant__ Params p) {
    alignas(16) __shared__ T weights[length * filters];
    alignas(16) __shared__ T tile[Window::size];

    // Place.
    const int group = threadIdx.x / 8 % (filters / 8), own = threadIdx.x % 8 + threadIdx.x / filters * 8;
    const int first = blockIdx.y * filters, channel = first + group * 8;

    // Load: all filters.
    const auto place = [&](int i, T value) {
        const int k = i / length, j = i % length;
        const int c = Traits::filter_last ? j % Window::channels : j / (Traits::R * Traits::S);
        const int tap = Traits::filter_last ? j / Window::channels : j % (Traits::R * Traits::S);
        weights[(tap * Window::channels + c) * filters + k] = value;
    };
    const int there = min(p.k - first, filters) * length;
    staged<Traits::threads>(p.w + Index(first) * length, there, place);
    for (int i = there + threadIdx.x; i < length * filters; i += Traits::threads) place(i, T(0.0f));

    for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
        const int n = number / (p.tiles_p * p.tiles_q), in = number % (p.tiles_p * p.tiles_q);
        const int p0 = in / p.tiles_q * Traits::tile_p, q0 = in % p.tiles_q * Traits::tile_q;
        __syncthreads();
        Window::stage<T, Index>(tile, p.x, n, p0, q0, p.height, p.width);
        __syncthreads();

        // Compute.
        int from[MT];
        float acc[MT][8];
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            const int at = own + i * spread;
            from[i] = Window::start(at / Traits::tile_q, at % Traits::tile_q);
#pragma unroll
            for (int j = 0; j < 8; ++j) acc[i][j] = 0;
        }
#pragma unroll 1
        for (int r = 0; r < Traits::R; ++r)
#pragma unroll 4
            for (int j = 0; j < Window::taps; ++j) {
                const T* w = weights + (r * Window::taps + j) * filters + group * 8;
                const Pack<T, 4> low = load<4>(w), high = load<4>(w + 4);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    const T x = tile[from[i] + r * Window::pitch + j];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        acc[i][k] += x * low.value[k];
                        acc[i][k + 4] += x * high.value[k];
                    }
                }
            }

        // Store.
        constexpr int width = Traits::width;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
            const int at = own + i * spread, row = p0 + at / Traits::tile_q, column = q0 + at % Traits::tile_q;
            if (row >= p.p || column >= p.q) continue;
#pragma unroll
            for (int k = 0; k < 8; k += width) {
                if (channel + k >= p.k) break;
                const Index place = Traits::nhwc ? ((Index(n) * p.p + row) * p.q + column) * p.k + channel + k
                                                 : ((Index(n) * p.k + channel + k) * p.p + row) * p.q + column;
                float sums[width];
                Pack<Traits::Out, width> out;
#pragma unroll
                for (int j = 0; j < width; ++j) sums[j] = acc[i][k + j];
                Traits::Epilogue::apply<width, Traits::nhwc>(sums, p.operands, channel + k, place);
#pragma unroll
                for (int j = 0; j < width; ++j) out.value[j] = Traits::Out(sums[j]);
                store(p.y + place, out);
            }
        }
    }
}
