// dw of a first layer on CUDA cores: dw[k, j] = sum over pixels of x[element j of the pixel's window] * dy[pixel, k].
//
// A block adds up every gridDim.x-th tile of tile_p x tile_q pixels for `filters` filters. A warp owns 8 filters and
// every warps_d-th pixel; lane l owns elements j = l, l + 32, ... of the window: for each pixel it reads MT values of
// x and two vectors of 4 values of dy, which the warp shares, for 8 * MT products. The sums of blocks and of the
// warps of a filter are added in a fixed order (few_channels_sum.cu).
//
// Shared memory: a tile of x (common/window.cuh), then of dy [pixel][k].
// Workspace: sums [column of filters][block, warp][j][k].
//
// Traits: those of Window, and MT, filters, warps_d, blocks.

#include "common/types.cuh"
#include "common/follow.cuh"
#include "traits"
#include "common/window.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int MT = Traits::MT, filters = Traits::filters, warps_d = Traits::warps_d;
constexpr int length = Traits::R * Window::taps, pixels = Traits::tile_p * Traits::tile_q;
constexpr int sums = MT * 32 * filters;
static_assert(MT * 32 >= length, "each element has an owner");
static_assert(Traits::threads == 4 * filters * warps_d, "8 filters a warp");

struct Params {
    const T* x;
    const T* dy;
    float* partial;
    int height, width, k, p, q;
    int tiles_p, tiles_q, tiles;  // of one image; in all
    int parts;                    // sums to add
};

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_wgrad_f32(const __grid_constant__ Params p) {
    alignas(16) __shared__ T tile[(Window::size + 3) / 4 * 4];
    alignas(16) __shared__ T dy[pixels * filters];
    let_next_start();

    // Place.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % (filters / 8), wd = warp / (filters / 8);
    const int first = blockIdx.y * filters;
    int offset[MT];  // of an element; those beyond the last are computed and left out
    float acc[MT][8];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const int j = i * 32 + lane;
        offset[i] = j < length ? j / Window::taps * Window::pitch + j % Window::taps : 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) acc[i][k] = 0;
    }

    for (int number = blockIdx.x; number < p.tiles; number += gridDim.x) {
        // Load.
        const int n = number / (p.tiles_p * p.tiles_q), in = number % (p.tiles_p * p.tiles_q);
        const int p0 = in / p.tiles_q * Traits::tile_p, q0 = in % p.tiles_q * Traits::tile_q;
        __syncthreads();
        Window::stage<T, Index>(tile, p.x, n, p0, q0, p.height, p.width);
#pragma unroll 4
        for (int i = threadIdx.x; i < pixels * filters; i += Traits::threads) {
            const int pixel = Traits::nhwc ? i / filters : i % pixels, k = Traits::nhwc ? i % filters : i / pixels;
            const int row = p0 + pixel / Traits::tile_q, column = q0 + pixel % Traits::tile_q;
            T value = T(0.0f);
            if (row < p.p && column < p.q && first + k < p.k)
                value = p.dy[Traits::nhwc ? ((Index(n) * p.p + row) * p.q + column) * p.k + first + k
                                          : ((Index(n) * p.k + first + k) * p.p + row) * p.q + column];
            dy[pixel * filters + k] = value;
        }
        __syncthreads();

        // Compute: pixels that are there.
        const int rows = min(Traits::tile_p, p.p - p0), columns = min(Traits::tile_q, p.q - q0);
        for (int row = 0; row < rows; ++row)
#pragma unroll 2
            for (int column = wd; column < columns; column += warps_d) {
                const T* y = dy + (row * Traits::tile_q + column) * filters + group * 8;
                const Pack<T, 4> low = load<4>(y), high = load<4>(y + 4);
                const T* x = tile + Window::start(row, column);
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    const T value = x[offset[i]];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        acc[i][k] += value * low.value[k];
                        acc[i][k + 4] += value * high.value[k];
                    }
                }
            }
    }

    // Store.
    float* out = p.partial + (Index(blockIdx.y) * p.parts + blockIdx.x * warps_d + wd) * sums + group * 8;
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int k = 0; k < 8; k += 4)
            store(out + (i * 32 + lane) * filters + k,
                  Pack<float, 4>{acc[i][k], acc[i][k + 1], acc[i][k + 2], acc[i][k + 3]});
}
