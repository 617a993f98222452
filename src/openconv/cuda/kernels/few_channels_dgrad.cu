// dx of a first layer on tensor cores.
//
// A row of dx is h = stride_h * i + f - pad_h for a phase f < stride_h; filter rows r = f + stride_h * m meet it from
// dy row p = i - m. First the sums over m and the filters, as products of matrices: M is pixels q of a row, N the
// elements of a filter row, the depth K:
//     u[i, f][q, (s, c)] = sum over m, k of  dy[i - m, q, k] * w[k, f + stride_h * m, s, c]
// Then w = stride_w * j + g - pad_w gets those of s = g + stride_w * n at q = j - n, through shared memory:
//     dx[h, w, c] = sum over n of  u[i, f][j - n, (g + stride_w * n, c)]
// No product is computed twice, but for the columns where tiles overlap: reach_w - 1 of 16 * MQ.
//
// A block keeps the filters of `phases` phases as fragments and goes from tile to tile: tile_i rows i by 16 * MQ
// pixels q, that is tile_i * phases rows of dx by tile_j * stride_w pixels. A warp owns `rows` of the rows i. Lane
// (g, t) owns what mma gives it (common/mma.cuh).
//
// Shared memory: the filters [phase][m][step of 16 k][nf][lane][2 words]; then a tile of `chunk` filters of dy, and
// over it, once it is used up, u of one row and phase for each warp.
//
// Traits: channels, R, S, stride_h, stride_w, pad_h, pad_w, threads, nhwc, filter_last, depth (K up to a multiple of
// chunk), chunk, tile_i, rows, MQ, phases, blocks, dy_vector.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "traits"
#include "common/mma.cuh"
#include "common/staged.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int reach_h = (Traits::R + Traits::stride_h - 1) / Traits::stride_h;  // rows of dy that meet in one of dx
constexpr int reach_w = (Traits::S + Traits::stride_w - 1) / Traits::stride_w;
constexpr int taps = Traits::S * Traits::channels, NF = (taps + 7) / 8;
constexpr int columns = Traits::MQ * 16, tile_j = columns - reach_w + 1;
constexpr int steps = Traits::depth / 16, chunk_steps = Traits::chunk / 16;
constexpr int dy_rows = Traits::tile_i + reach_h - 1, dy_pitch = Traits::chunk + 8;
// Rows of u are 8 floats modulo 16 apart, so that four of them lie in different banks.
constexpr int u_pitch = NF * 8 + (NF % 2 ? 0 : 8);
constexpr int warps = Traits::threads / 32;
constexpr int dy_bytes = dy_rows * columns * dy_pitch * 2, u_bytes = warps * columns * u_pitch * 4;

static_assert(tile_j > 0, "a tile must be wider than a window");
static_assert(warps * Traits::rows == Traits::tile_i, "each row has an owner");
static_assert(Traits::depth % Traits::chunk == 0 && Traits::chunk % 16 == 0,
              "the depth is whole chunks of whole steps");
static_assert(Traits::stride_h % Traits::phases == 0, "blocks get equal shares");

struct Params {
    const T* dy;
    const T* w;
    Traits::Out* dx;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int height, width, k, p, q;
    int first_i, first_j;         // of the first row and column of dx
    int tiles_i, tiles_j, tiles;  // of one image; in all
};

__device__ __forceinline__ int fragment(int f, int m, int step, int nf, int lane) {
    return ((((f * reach_h + m) * steps + step) * NF + nf) * 32 + lane) * 2;
}

__device__ void stage_filters(T* to, const Params& p, int first) {
    u32* words = reinterpret_cast<u32*>(to);
    for (int i = threadIdx.x; i < Traits::phases * reach_h * steps * NF * 64; i += Traits::threads) words[i] = 0;
    __syncthreads();
    constexpr int length = Traits::R * taps;
    staged<Traits::threads>(p.w, p.k * length, [&](int i, T value) {
        const int k = i / length, j = i % length;
        const int c = Traits::filter_last ? j % Traits::channels : j / (Traits::R * Traits::S);
        const int tap = Traits::filter_last ? j / Traits::channels : j % (Traits::R * Traits::S);
        const int r = tap / Traits::S, f = r % Traits::stride_h - first;
        if (f < 0 || f >= Traits::phases) return;
        const int element = tap % Traits::S * Traits::channels + c;
        const int lane = element % 8 * 4 + k % 8 / 2;
        to[2 * (fragment(f, r / Traits::stride_h, k / 16, element / 8, lane) + k / 8 % 2) + k % 2] = value;
    });
}

__device__ __forceinline__ void stage_dy(T* to, const Params& p, int n, int p0, int q0, int k0) {
    constexpr int vector = Traits::dy_vector, count = dy_rows * columns;
    if constexpr (vector > 1) {
        constexpr int across = Traits::chunk / vector;
        for (int i = threadIdx.x; i < count * across; i += Traits::threads) {
            const int pixel = i / across, k = k0 + i % across * vector;
            const int row = p0 + pixel / columns, column = q0 + pixel % columns;
            const bool inside = unsigned(row) < unsigned(p.p) && unsigned(column) < unsigned(p.q) && k < p.k;
            tensor::copy<vector * sizeof(T)>(
                to + pixel * dy_pitch + k - k0,
                p.dy + (inside ? ((Index(n) * p.p + row) * p.q + column) * p.k + k : Index(0)), inside);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < count * Traits::chunk; i += Traits::threads) {
            const int pixel = Traits::nhwc ? i / Traits::chunk : i % count;
            const int k = k0 + (Traits::nhwc ? i % Traits::chunk : i / count);
            const int row = p0 + pixel / columns, column = q0 + pixel % columns;
            T value = T(0.0f);
            if (unsigned(row) < unsigned(p.p) && unsigned(column) < unsigned(p.q) && k < p.k)
                value = p.dy[Traits::nhwc ? ((Index(n) * p.p + row) * p.q + column) * p.k + k
                                          : ((Index(n) * p.k + k) * p.p + row) * p.q + column];
            to[pixel * dy_pitch + k - k0] = value;
        }
    }
    tensor::commit();
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_dgrad(const __grid_constant__ Params p) {
    alignas(16) __shared__ T weights[Traits::phases * reach_h * steps * NF * 128];
    alignas(16) __shared__ u8 memory[dy_bytes > u_bytes ? dy_bytes : u_bytes];

    // Place.
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int first = Traits::phases == Traits::stride_h ? 0 : blockIdx.y * Traits::phases;
    T* dy = reinterpret_cast<T*>(memory);
    float* u = reinterpret_cast<float*>(memory) + warp * columns * u_pitch;
    const u32* words = reinterpret_cast<const u32*>(weights);
    stage_filters(weights, p, first);

    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        const int n = tile / (p.tiles_i * p.tiles_j), in = tile % (p.tiles_i * p.tiles_j);
        const int i0 = p.first_i + in / p.tiles_j * Traits::tile_i, j0 = p.first_j + in % p.tiles_j * tile_j;
        const int p0 = i0 - reach_h + 1, q0 = j0 - reach_w + 1;  // the first pixel of dy

        float acc[Traits::rows][Traits::phases][Traits::MQ][NF][4];
#pragma unroll
        for (int i = 0; i < Traits::rows; ++i)
#pragma unroll
            for (int f = 0; f < Traits::phases; ++f)
#pragma unroll
                for (int mq = 0; mq < Traits::MQ; ++mq)
#pragma unroll
                    for (int nf = 0; nf < NF; ++nf)
#pragma unroll
                        for (int j = 0; j < 4; ++j) acc[i][f][mq][nf][j] = 0;

        for (int k0 = 0; k0 < Traits::depth; k0 += Traits::chunk) {
            // Load.
            __syncthreads();  // what lies there is used up
            stage_dy(dy, p, n, p0, q0, k0);
            tensor::wait<0>();
            __syncthreads();

            // Compute.
#pragma unroll
            for (int m = 0; m < reach_h; ++m)
#pragma unroll
                for (int step = 0; step < chunk_steps; ++step) {
                    Pack<u32, 2> b[Traits::phases][NF];
#pragma unroll
                    for (int f = 0; f < Traits::phases; ++f)
#pragma unroll
                        for (int nf = 0; nf < NF; ++nf)
                            b[f][nf] = load<2>(words + fragment(f, m, k0 / 16 + step, nf, lane));
#pragma unroll
                    for (int i = 0; i < Traits::rows; ++i) {
                        // A row beyond dy is no zero: a filter that is NaN does not meet it.
                        const int row = warp * Traits::rows + i;
                        if (unsigned(i0 + row - m) >= unsigned(p.p)) continue;
                        u32 a[Traits::MQ][4];
#pragma unroll
                        for (int mq = 0; mq < Traits::MQ; ++mq) {
                            const int pixel = (row + reach_h - 1 - m) * columns + mq * 16 + lane % 16;
                            tensor::load_matrices(a[mq], dy + pixel * dy_pitch + step * 16 + lane / 16 * 8);
                        }
#pragma unroll
                        for (int f = 0; f < Traits::phases; ++f) {
                            if (first + f + Traits::stride_h * m >= Traits::R) break;  // nor is there such a filter row
#pragma unroll
                            for (int nf = 0; nf < NF; ++nf)
#pragma unroll
                                for (int mq = 0; mq < Traits::MQ; ++mq)
                                    tensor::mma<T>(acc[i][f][mq][nf], a[mq][0], a[mq][1], a[mq][2], a[mq][3],
                                                   b[f][nf].value[0], b[f][nf].value[1]);
                        }
                    }
                }
        }
        __syncthreads();

        // Store: one row of dx after the other.
#pragma unroll
        for (int i = 0; i < Traits::rows; ++i)
#pragma unroll
            for (int f = 0; f < Traits::phases; ++f) {
                const int h = (i0 + warp * Traits::rows + i) * Traits::stride_h + first + f - Traits::pad_h;
                if (unsigned(h) >= unsigned(p.height)) continue;
#pragma unroll
                for (int mq = 0; mq < Traits::MQ; ++mq)
#pragma unroll
                    for (int nf = 0; nf < NF; ++nf)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            store(u + (mq * 16 + g + 8 * half) * u_pitch + nf * 8 + 2 * t,
                                  Pack<float, 2>{acc[i][f][mq][nf][2 * half], acc[i][f][mq][nf][2 * half + 1]});
                __syncwarp();
                constexpr int across = tile_j * Traits::stride_w, count = across * Traits::channels;
                for (int e = lane; e < count; e += 32) {
                    const int c = Traits::nhwc ? e % Traits::channels : e / across;
                    const int column = Traits::nhwc ? e / Traits::channels : e % across;
                    const int j = column / Traits::stride_w, phase = column % Traits::stride_w;
                    const int w = j0 * Traits::stride_w + column - Traits::pad_w;
                    if (unsigned(w) >= unsigned(p.width)) continue;
                    float sum[1] = {0};
#pragma unroll
                    for (int m = 0; m < reach_w; ++m) {
                        const int s = phase + Traits::stride_w * m, at = j + reach_w - 1 - m;
                        if (s < Traits::S && unsigned(q0 + at) < unsigned(p.q))
                            sum[0] += u[at * u_pitch + s * Traits::channels + c];
                    }
                    const Index place = Traits::nhwc ? ((Index(n) * p.height + h) * p.width + w) * Traits::channels + c
                                                     : ((Index(n) * Traits::channels + c) * p.height + h) * p.width + w;
                    Traits::Epilogue::apply<1, Traits::nhwc>(sum, p.operands, c, place);
                    p.dx[place] = Traits::Out(sum[0]);
                }
                __syncwarp();
            }
    }
}
