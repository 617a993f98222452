// The filter gradient with many small groups on tensor cores: several groups in one product.
//
//     dw[k, tap, c] = sum over pixels of  dy[pixel, k] * x[window(pixel) + tap, c],    c of k's group
//
// common/igemm_groups.cuh says how groups and pixels lie. A tile's dy and the piece of x under it are read once; each
// warp keeps the sums of all taps of a column in registers. Both operands lie across the depth, which is the pixels.
//
// Blocks stay: each goes through tiles of its chunk of groups. The sums of every warp that shares a column's pixels are a
// split of their own, which igemm_sum adds up in a fixed order.
//
// Traits: those of common/igemm_groups.cuh.

#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/shared.cuh"
#include "traits"
#include "common/igemm_groups.cuh"

using T = Traits::A;
using Index = Traits::Index;
constexpr int gradient_pitch = groups::out_chunk * 2 + 16, gradient_rows = groups::sixteens * 16;
constexpr int gradient_bytes = gradient_rows * gradient_pitch, stage_bytes = groups::image_bytes + gradient_bytes;
// Zeros as far as taps reach: what the window of a pixel that is not there reads.
constexpr int zero_bytes = (tap_place[taps - 1] + 1) * groups::image_pitch;

struct Params {
    const T* image;
    const Traits::B* gradient;
    float* parts;
    i64 results;  // elements of dw
    groups::Place place;
    int gradient_pixel;
};

__device__ __forceinline__ void bring_gradient(char* to, const groups::Tile& tile, int first_channel, const Params& p) {
    constexpr int pieces = groups::out_chunk / 8;
    static_assert(groups::threads % pieces == 0, "threads share the channels evenly");
    const int piece = threadIdx.x % pieces;
    const T* const channels = p.gradient + first_channel + piece * 8;
#pragma unroll 4
    for (int at = threadIdx.x / pieces; at < gradient_rows; at += groups::threads / pieces) {
        const groups::Pixel pixel(at);
        const bool inside = at < groups::count && pixel.inside(tile, p.place);
        const Index from =
            ((Index(tile.image + pixel.image) * p.place.rows + tile.h + pixel.h) * p.place.columns + tile.w + pixel.w) *
            p.gradient_pixel;
        tensor::copy<16>(to + at * gradient_pitch + piece * 16, channels + (inside ? from : 0), inside);
    }
}

extern "C" __global__ void __launch_bounds__(groups::threads, Traits::residents)
igemm_groups_wgrad(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    char* const ring = reinterpret_cast<char*>(memory);
    char* const zeros = ring + groups::stages * stage_bytes;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int column = warp % groups::columns, chunk = blockIdx.y;
    let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    for (int at = thread * 4; at < zero_bytes; at += groups::threads * 4) *reinterpret_cast<u32*>(zeros + at) = 0;
    const auto bring = [&](int at, int stage) {
        if (at < p.place.tiles) {
            const groups::Tile tile(at, p.place);
            char* const to = ring + stage * stage_bytes;
            groups::bring_image(to, p.image, tile, chunk * groups::in_chunk, p.place);
            bring_gradient(to + groups::image_bytes, tile, chunk * groups::out_chunk, p);
        }
        tensor::commit();
    };
#pragma unroll
    for (int stage = 0; stage < groups::stages - 1; ++stage) bring(blockIdx.x + stage * gridDim.x, stage);

    float sum[taps][2 * groups::slices][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int at = blockIdx.x; at < p.place.tiles; at += gridDim.x) {
        tensor::wait<groups::stages - 2>();
        __syncthreads();
        bring(at + (groups::stages - 1) * gridDim.x, stage ? stage - 1 : groups::stages - 1);
        const groups::Tile tile(at, p.place);
        const char* const piece = ring + stage * stage_bytes;
        const char* const gradient =
            piece + groups::image_bytes + (lane / 16 * 8 + lane % 8) * gradient_pitch + column * 32 + lane / 8 % 2 * 16;
        stage = stage + 1 == groups::stages ? 0 : stage + 1;
#pragma unroll 1
        for (int sixteen = warp / groups::columns; sixteen < groups::sixteens; sixteen += Traits::warps) {
            const int place = sixteen * 16 + lane % 16;
            const groups::Pixel pixel(place);
            const bool there = place < groups::count && pixel.inside(tile, p.place);
            const char* const window =
                there ? piece + pixel.window() + groups::first_in(column) * 2 + lane / 16 * 16 : zeros;
            u32 a[4];
            tensor::load_transposed(a, gradient + sixteen * 16 * gradient_pitch);
#pragma unroll
            for (int tap = 0; tap < taps; ++tap)
#pragma unroll
                for (int slice = 0; slice < groups::slices; ++slice) {
                    u32 b[4];
                    tensor::load_transposed(b, window + tap_place[tap] * groups::image_pitch + slice * 32);
                    tensor::mma<T>(sum[tap][2 * slice], a[0], a[1], a[2], a[3], b[0], b[1]);
                    tensor::mma<T>(sum[tap][2 * slice + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
                }
        }
    }

    float* const to = p.parts + (blockIdx.x * Traits::warps + warp / groups::columns) * p.results +
                      i64(chunk) * groups::out_chunk * (taps * Traits::in_each);
#pragma unroll
    for (int tap = 0; tap < taps; ++tap)
#pragma unroll
        for (int i = 0; i < groups::slices * 8; ++i) {
            const int k = column * 16 + lane / 4 + i % 4 / 2 * 8;
            const int c = groups::first_in(column) + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (k / Traits::out_each == c / Traits::in_each)
                to[(k * taps + tap_filter[tap]) * Traits::in_each + c % Traits::in_each] = sum[tap][i / 4][i % 4];
        }
}
