// dw of a first layer on tensor cores: dw[k, r, j] = sum over pixels of x[window of the pixel, row r, element j] *
// dy[pixel, k].
//
// The depth is pixels, 16 at a time. M is the elements of a window, two of them (a pair, see common/window.cuh) for
// each lane: rows g and g + 8 of mma number i are the first and the second element of pair 8i + g. So two words of x,
// of two pixels side by side, make two registers of A with one instruction each. N is the filters; B comes from a
// tile of dy by transposing loads.
//
// A block adds up every gridDim.x-th tile of tile_p x tile_q pixels for NT * 8 filters. Warp (j, d) owns MT * 8 pairs
// and every warps_d-th step of 16 pixels. In the end the sums of the warps d, then of the blocks
// (few_channels_sum.cu), are added in a fixed order.
//
// Shared memory: `stages` tiles of x and dy on their way, one after the other; in the end the sums of the warps d > 0.
// Workspace: sums [column of filters][block][element: pair, half][k].
//
// Traits: those of Window, and MT, NT, warps_j, warps_d, stages, blocks, dy_vector, ragged (a row of dy ends within a
// step).

#include "common/types.cuh"
#include "common/follow.cuh"
#include "traits"
#include "common/window.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int MT = Traits::MT, NT = Traits::NT, warps_j = Traits::warps_j, warps_d = Traits::warps_d;
constexpr int filters = NT * 8, pixels = Traits::tile_p * Traits::tile_q;
constexpr int pairs = (Window::lead + Window::taps + 1) / 2;  // of a filter row
// 8 more: rows of 16 bytes an odd number apart lie in different banks, as ldmatrix asks.
constexpr int dy_pitch = filters + 8;
constexpr int x_size = (Window::size + 7) / 8 * 8, stage_size = x_size + pixels * dy_pitch;
constexpr int sums = warps_j * MT * NT * 128;  // of a block

static_assert(Traits::threads == 32 * warps_j * warps_d, "one thread for each lane");
static_assert(8 * MT * warps_j >= Traits::R * pairs, "each pair has an owner");
static_assert(pixels % 16 == 0 && (Traits::tile_q == 8 || Traits::tile_q % 16 == 0),
              "a step is one row, or two halves");
static_assert(Traits::stages * stage_size * 2 >= (warps_d - 1) * warps_j * NT * 512, "the sums of warps fit");

struct Params {
    const T* x;
    const T* dy;
    float* partial;
    int height, width, k, p, q;
    int tiles_p, tiles_q, tiles;  // of one image; in all
    int parts;                    // blocks of a column of filters
};

__device__ __forceinline__ void stage_dy(T* to, const Params& p, int n, int p0, int q0, int first) {
    constexpr int vector = Traits::dy_vector;
    if constexpr (vector > 1) {
        constexpr int across = filters / vector;
        for (int i = threadIdx.x; i < pixels * across; i += Traits::threads) {
            const int pixel = i / across, k = i % across * vector;
            const int row = p0 + pixel / Traits::tile_q, column = q0 + pixel % Traits::tile_q;
            const bool inside = row < p.p && column < p.q && first + k < p.k;
            tensor::copy<vector * sizeof(T)>(
                to + pixel * dy_pitch + k,
                p.dy + (inside ? ((Index(n) * p.p + row) * p.q + column) * p.k + first + k : Index(0)), inside);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < pixels * filters; i += Traits::threads) {
            const int pixel = Traits::nhwc ? i / filters : i % pixels, k = Traits::nhwc ? i % filters : i / pixels;
            const int row = p0 + pixel / Traits::tile_q, column = q0 + pixel % Traits::tile_q;
            T value = T(0.0f);
            if (row < p.p && column < p.q && first + k < p.k)
                value = p.dy[Traits::nhwc ? ((Index(n) * p.p + row) * p.q + column) * p.k + first + k
                                          : ((Index(n) * p.k + first + k) * p.p + row) * p.q + column];
            to[pixel * dy_pitch + k] = value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_wgrad(const __grid_constant__ Params p) {
    alignas(16) __shared__ T memory[Traits::stages * stage_size];
    let_next_start();

    // Place.
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wj = warp % warps_j, wd = warp / warps_j;
    const int first = blockIdx.y * filters;
    int offset[MT];  // of a pair, in words; pairs beyond the last are computed and left out
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        const int pair = (wj * MT + i) * 8 + g, r = pair / pairs;
        offset[i] = r < Traits::R ? r * Window::pitch / 2 + pair % pairs : 0;
    }
    float acc[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) acc[i][nt][0] = acc[i][nt][1] = acc[i][nt][2] = acc[i][nt][3] = 0;

    const auto place = [&](int tile, int& n, int& p0, int& q0) {
        n = tile / (p.tiles_p * p.tiles_q);
        const int in = tile % (p.tiles_p * p.tiles_q);
        p0 = in / p.tiles_q * Traits::tile_p;
        q0 = in % p.tiles_q * Traits::tile_q;
    };
    const auto stage = [&](int number) {
        const int tile = blockIdx.x + number * gridDim.x;
        if (tile < p.tiles) {
            int n, p0, q0;
            place(tile, n, p0, q0);
            T* to = memory + number % Traits::stages * stage_size;
            Window::stage<T, Index>(to, p.x, n, p0, q0, p.height, p.width);
            stage_dy(to + x_size, p, n, p0, q0, first);
        }
        tensor::commit();  // also where there is no tile: groups are counted
    };
    for (int number = 0; number < Traits::stages - 1; ++number) stage(number);

    for (int number = 0, tile = blockIdx.x; tile < p.tiles; ++number, tile += gridDim.x) {
        tensor::wait<Traits::stages - 2>();
        __syncthreads();  // this tile is there, and nobody reads the one before it any more
        stage(number + Traits::stages - 1);

        int n, p0, q0;
        place(tile, n, p0, q0);
        const T* tiles = memory + number % Traits::stages * stage_size;
        for (int step = wd; step < pixels / 16; step += warps_d) {
            const int row = step * 16 / Traits::tile_q, column = step * 16 % Traits::tile_q;
            if (p0 + row >= p.p) break;

            // B: of 16 pixels, two times 8 filters a load.
            u32 b[(NT + 1) / 2][4];
            const T* rows = tiles + x_size + (step * 16 + lane % 16) * dy_pitch + lane / 16 * 8;
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) tensor::load_transposed(b[nt / 2], rows + nt * 8);

            // A: pixels 2t, 2t+1 and, 8 pixels further, two more.
            constexpr int next = Traits::stride_w * Window::stored / 2;
            constexpr int far = Traits::tile_q == 8 ? Traits::stride_h * Window::pitch / 2 : 8 * next;
            const u32* x = reinterpret_cast<const u32*>(tiles) + Window::start(row, column + 2 * t) / 2;
            u32 mask[2] = {};  // pixels behind the end of a row: their dy is zero, but their x may be NaN
            if (Traits::ragged)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int q = q0 + (Traits::tile_q == 8 ? 0 : column + 8 * j) + 2 * t;
                    const bool here = Traits::tile_q > 8 || p0 + row + j < p.p;
                    mask[j] = (here && q < p.q ? 0xffffu : 0) | (here && q + 1 < p.q ? 0xffff0000u : 0);
                }
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                u32 a[4];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const u32 one = x[offset[i] + j * far], two = x[offset[i] + j * far + next];
                    a[2 * j] = (one & 0xffff) | two << 16;
                    a[2 * j + 1] = one >> 16 | (two & 0xffff0000u);
                    if (Traits::ragged) a[2 * j] &= mask[j], a[2 * j + 1] &= mask[j];
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
                    tensor::mma<T>(acc[i][nt], a[0], a[1], a[2], a[3], b[nt / 2][nt % 2 * 2],
                                   b[nt / 2][nt % 2 * 2 + 1]);
            }
        }
    }

    // Add the sums of the warps d, one mma row after the other.
    tensor::wait<0>();
    float* others = reinterpret_cast<float*>(memory);
    float* out =
        p.partial + (Index(blockIdx.y) * p.parts + blockIdx.x) * sums + (wj * MT * 16 + 2 * g) * filters + 2 * t;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        if (warps_d > 1) {
            __syncthreads();
            if (wd > 0)
#pragma unroll
                for (int j = 0; j < NT * 4; ++j)
                    others[(((wd - 1) * warps_j + wj) * NT * 4 + j) * 32 + lane] = acc[i][j / 4][j % 4];
            __syncthreads();
        }
        if (wd == 0)
#pragma unroll
            for (int j = 0; j < NT * 4; ++j) {
                float sum = acc[i][j / 4][j % 4];
#pragma unroll
                for (int d = 1; d < warps_d; ++d) sum += others[(((d - 1) * warps_j + wj) * NT * 4 + j) * 32 + lane];
                acc[i][j / 4][j % 4] = sum;
            }
        if (wd == 0)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    store(out + (i * 16 + half) * filters + nt * 8,
                          Pack<float, 2>{acc[i][nt][2 * half], acc[i][nt][2 * half + 1]});
    }
}
