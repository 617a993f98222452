// y of a first layer on tensor cores: y[pixel, k] = sum over r and the run of S*C elements of x[window row r] * w[k,
// r].
//
// A window's row is one run of memory, so that the depth of the product needs no gathering: it is R rows of octets
// (common/window.cuh). Pixels are the M of mma (16 at a time), filters its N.
//
// A block keeps its filters and goes from tile to tile: tile_p x tile_q pixels by warps_n * NT * 8 filters. Warp (m,
// n) owns every warps_m-th group of MT * 16 pixels, and NT * 8 filters, held in registers (`resident`) or read from
// shared memory. Lane (g, t) owns 2 * NT filters side by side, t * 2 * NT onwards, of pixels g and g + 8: column 2t +
// b of mma number nt is filter t * 2 * NT + 2 * nt + b. So an nhwc result leaves in vectors, straight from the
// accumulators. In nchw lane (g, t) owns pixels 2g and 2g + 1.
//
// Shared memory: the filters as fragments, then two tiles of x, one being filled while the other is read.
//
// Traits: those of Window, and MT, NT, warps_m, warps_n, blocks, resident, filter_last, width (filters of one store;
// pixels in nchw).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "traits"
#include "common/window.cuh"
#include "common/staged.cuh"

using T = Traits::A;
using Index = Traits::Index;

constexpr int MT = Traits::MT, NT = Traits::NT, warps_m = Traits::warps_m, warps_n = Traits::warps_n;
constexpr int filters = warps_n * NT * 8;           // of a block
constexpr int octets = Traits::R * Window::octets;  // half a step of depth 16 each
constexpr int steps = (octets + 1) / 2;
constexpr int groups = Traits::tile_p * Traits::tile_q / 16;

static_assert(Traits::threads == 32 * warps_m * warps_n, "one thread for each lane");
static_assert(Traits::tile_q % (Traits::nhwc ? 8 : 16) == 0, "8 pixels that share a fragment lie in one row");
static_assert(groups % (warps_m * MT) == 0, "warps get equal shares");

struct Params {
    const T* x;
    const T* w;
    Traits::Out* y;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int height, width, k, p, q;
    int tiles_p, tiles_q, tiles;  // of one image; in all
};

// Fragments of B: word [step][wn * NT + nt][lane][half].
__device__ __forceinline__ int fragment(int step, int tile, int lane, int half) {
    return ((step * warps_n * NT + tile) * 32 + lane) * 2 + half;
}

__device__ void stage_filters(T* to, const Params& p, int first) {
    u32* words = reinterpret_cast<u32*>(to);
    for (int i = threadIdx.x; i < steps * filters * 8; i += Traits::threads) words[i] = 0;
    __syncthreads();
    constexpr int length = Traits::R * Traits::S * Window::channels;
    const int count = (p.k - first < filters ? p.k - first : filters) * length;
    staged<Traits::threads>(p.w + Index(first) * length, count, [&](int i, T value) {
        const int k = i / length, j = i % length;
        const int c = Traits::filter_last ? j % Window::channels : j / (Traits::R * Traits::S);
        const int tap = Traits::filter_last ? j / Window::channels : j % (Traits::R * Traits::S);
        const int element = Window::lead + tap % Traits::S * Window::stored + c;
        const int octet = tap / Traits::S * Window::octets + element / 8;
        // Filter k of its warp is column g = k / (2 NT) * 2 + k % 2 of mma number k % (2 NT) / 2.
        const int wn = k / (8 * NT), own = k % (8 * NT);
        const int g = own / (2 * NT) * 2 + own % 2, nt = own % (2 * NT) / 2;
        const int lane = g * 4 + element % 8 / 2;
        to[2 * fragment(octet / 2, wn * NT + nt, lane, octet % 2) + element % 2] = value;
    });
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
few_channels_fprop(const __grid_constant__ Params p) {
    alignas(16) __shared__ T weights[steps * filters * 16];
    alignas(16) __shared__ T tiles[2][(Window::size + 7) / 8 * 8];

    // Place.
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), wm = warp % warps_m, wn = warp / warps_m;
    const int first = blockIdx.y * filters, channel = first + wn * NT * 8 + t * 2 * NT;
    u32 masks[Window::octets];
#pragma unroll
    for (int i = 0; i < Window::octets; ++i) masks[i] = Window::mask(i, t);

    // Load: the first tile, and all filters.
    const auto stage = [&](int tile, int at) {
        const int n = tile / (p.tiles_p * p.tiles_q), in = tile % (p.tiles_p * p.tiles_q);
        Window::stage<T, Index>(tiles[at], p.x, n, in / p.tiles_q * Traits::tile_p, in % p.tiles_q * Traits::tile_q,
                                p.height, p.width);
        tensor::commit();
    };
    stage(blockIdx.x, 0);
    stage_filters(weights, p, first);
    __syncthreads();
    const u32* words = reinterpret_cast<const u32*>(weights);
    u32 held[Traits::resident ? octets : 1][NT];
    if (Traits::resident)
#pragma unroll
        for (int octet = 0; octet < octets; ++octet)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
                held[Traits::resident ? octet : 0][nt] = words[fragment(octet / 2, wn * NT + nt, lane, octet % 2)];

    int buffer = 0;
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x, buffer ^= 1) {
        tensor::wait<0>();
        __syncthreads();  // this tile is there, and nobody reads the other one any more
        if (tile + int(gridDim.x) < p.tiles) stage(tile + gridDim.x, buffer ^ 1);

        const int n = tile / (p.tiles_p * p.tiles_q), in = tile % (p.tiles_p * p.tiles_q);
        const int p0 = in / p.tiles_q * Traits::tile_p, q0 = in % p.tiles_q * Traits::tile_q;
        const u32* x = reinterpret_cast<const u32*>(tiles[buffer]) + t;
        // Pixel of a lane in group m: 16 side by side.
        const auto pixel = [&](int m, int half) { return m * 16 + (Traits::nhwc ? g + 8 * half : 2 * g + half); };

        for (int m = wm * MT; m < groups; m += warps_m * MT) {
            if (p0 + m * 16 / Traits::tile_q >= p.p) break;

            // Compute.
            int from[MT][2];
            float acc[MT][NT][4];
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int at = pixel(m + i, half);
                    from[i][half] = Window::start(at / Traits::tile_q, at % Traits::tile_q) / 2;
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) acc[i][nt][0] = acc[i][nt][1] = acc[i][nt][2] = acc[i][nt][3] = 0;
            }
#pragma unroll
            for (int step = 0; step < steps; ++step) {
                u32 a[MT][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int octet = 2 * step + half;
                    if (octet >= octets) break;
                    const int r = octet / Window::octets, o = octet % Window::octets;
#pragma unroll
                    for (int i = 0; i < MT; ++i)
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            a[i][2 * half + j] = x[from[i][j] + (r * Window::pitch + o * 8) / 2];
                            if (!Window::whole(o)) a[i][2 * half + j] &= masks[o];
                        }
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    u32 b[2] = {};
                    if (Traits::resident) {
                        b[0] = held[Traits::resident ? 2 * step : 0][nt];
                        if (2 * step + 1 < octets) b[1] = held[Traits::resident ? 2 * step + 1 : 0][nt];
                    } else {
                        const Pack<u32, 2> pair = load<2>(words + fragment(step, wn * NT + nt, lane, 0));
                        b[0] = pair.value[0];
                        b[1] = pair.value[1];
                    }
#pragma unroll
                    for (int i = 0; i < MT; ++i)
                        if (2 * step + 1 < octets)
                            tensor::mma<T>(acc[i][nt], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                        else
                            tensor::mma<T>(acc[i][nt], a[i][0], a[i][1], b[0]);
                }
            }

            // Store.
            constexpr int width = Traits::width;
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const int at = pixel(m + i, 0);
                if constexpr (Traits::nhwc) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = p0 + (at + 8 * half) / Traits::tile_q,
                                  column = q0 + (at + 8 * half) % Traits::tile_q;
                        if (row >= p.p || column >= p.q) continue;
                        const Index place = ((Index(n) * p.p + row) * p.q + column) * p.k + channel;
#pragma unroll
                        for (int c = 0; c < 2 * NT; c += width) {
                            if (channel + c >= p.k) break;
                            float sums[width];
                            Pack<Traits::Out, width> out;
#pragma unroll
                            for (int j = 0; j < width; ++j) sums[j] = acc[i][(c + j) / 2][2 * half + (c + j) % 2];
                            Traits::Epilogue::apply<width, true>(sums, p.operands, channel + c, place + c);
#pragma unroll
                            for (int j = 0; j < width; ++j) out.value[j] = Traits::Out(sums[j]);
                            store(p.y + place + c, out);
                        }
                    }
                } else {
                    const int row = p0 + at / Traits::tile_q, column = q0 + at % Traits::tile_q;
                    if (row >= p.p) continue;
#pragma unroll
                    for (int c = 0; c < 2 * NT; ++c) {
                        if (channel + c >= p.k) break;
                        const Index place = ((Index(n) * p.k + channel + c) * p.p + row) * p.q + column;
#pragma unroll
                        for (int half = 0; half < 2; half += width) {
                            if (column + half >= p.q) break;
                            float sums[width];
                            Pack<Traits::Out, width> out;
#pragma unroll
                            for (int j = 0; j < width; ++j) sums[j] = acc[i][c / 2][2 * (half + j) + c % 2];
                            Traits::Epilogue::apply<width, false>(sums, p.operands, channel + c, place + half);
#pragma unroll
                            for (int j = 0; j < width; ++j) out.value[j] = Traits::Out(sums[j]);
                            store(p.y + place + half, out);
                        }
                    }
                }
            }
        }
    }
}
