// Convolution with many small groups, and its image gradient, on tensor cores: several groups in one product.
//
//     out[pixel, k] = sum over taps and the channels c of k's group of  image[window(pixel) + tap, c] * filter[k, tap, c]
//
// common/igemm_groups.cuh says how groups and pixels lie. Read once per tap, as implicit GEMMs of many channels do, the
// image would come from L2 nine times for a 3x3 filter, and there are too few products to hide that. Here a tile's piece
// of it is read once. Filters are few: each warp has all taps of its column in registers, as B of the products, and
// takes sixteen pixels after sixteen through them.
//
// Blocks stay: each goes through tiles of its chunk of groups, the next tiles on their way while it computes.
//
// dgrad: pixels of dx fall into phases, each with taps of its own (as in igemm.cu), which all read the same piece of dy.
//
// Traits: those of common/igemm_groups.cuh; turned (the filter has its results across, dgrad), filter_last (its channels
// are last), phases_h, phases_w, each (channels of the filter). Ahead of them `phase_end`: the taps before the end of
// each phase.

#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/shared.cuh"
#include "traits"
#include "common/igemm_groups.cuh"

using T = Traits::A;
using Index = Traits::Index;
constexpr int phases = Traits::phases_h * Traits::phases_w;
constexpr int filter_rows = Traits::turned ? groups::in_chunk : groups::out_chunk;
constexpr int filter_elements = filter_rows * taps * Traits::each, filter_bytes = filter_elements * 2;

struct Params {
    const T* image;
    const Traits::B* filter;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count ? Traits::Epilogue::count : 1];
    groups::Place place;
    int out_h, out_w, out_pixel;
};

// All taps of a column, as the registers of B: column c of the first eight is channel 4 * (c / 2) + c % 2 of the result,
// of the other eight that plus two, so that a lane's four results of a pixel lie side by side.
struct Filter {
    u32 value[taps][groups::slices][4];

    __device__ __forceinline__ Filter(const T* chunk, int column, int lane) {
#pragma unroll
        for (int tap = 0; tap < taps; ++tap)
#pragma unroll
            for (int i = 0; i < groups::slices * 4; ++i) {
                const int n = column * 16 + 4 * (lane / 8) + 2 * (i % 4 / 2) + lane / 4 % 2;
                const int c = groups::first_in(column) + i / 4 * 16 + i % 2 * 8 + lane % 4 * 2;
                value[tap][i / 4][i % 4] = pair(chunk, tap_filter[tap], n, c) | pair(chunk, tap_filter[tap], n, c + 1)
                                                                                    << 16;
            }
    }

    __device__ static __forceinline__ u32 pair(const T* chunk, int tap, int n, int c) {
        const int row = Traits::turned ? c : n, channel = (Traits::turned ? n : c) % Traits::each;
        const int at = Traits::filter_last ? (row * taps + tap) * Traits::each + channel
                                           : (row * Traits::each + channel) * taps + tap;
        const bool same = n / Traits::out_each == c / Traits::in_each;
        return same ? chunk[at].bits : 0;
    }
};

extern "C" __global__ void __launch_bounds__(groups::threads, Traits::residents)
igemm_groups(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    char* const ring = reinterpret_cast<char*>(memory);
    T* const filters = reinterpret_cast<T*>(memory + groups::stages * groups::image_bytes);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int column = warp % groups::columns, chunk = blockIdx.y;

    if constexpr (Traits::follows) wait_for_previous();
    for (int at = thread * 8; at < filter_elements; at += groups::threads * 8)
        tensor::copy<16>(filters + at, p.filter + (Index(chunk) * filter_elements + at), true);
    tensor::commit();
    const auto bring = [&](int tile, int stage) {
        if (tile < p.place.tiles)
            groups::bring_image(ring + stage * groups::image_bytes, p.image, groups::Tile(tile, p.place),
                                chunk * groups::in_chunk, p.place);
        tensor::commit();
    };
#pragma unroll
    for (int stage = 0; stage < groups::stages - 1; ++stage) bring(blockIdx.x + stage * gridDim.x, stage);
    tensor::wait<groups::stages - 1>();
    __syncthreads();
    const Filter filter(filters, column, lane);
    const int first_channel = chunk * groups::out_chunk + column * 16 + lane % 4 * 4;

    int stage = 0;
#pragma unroll 1
    for (int at = blockIdx.x; at < p.place.tiles; at += gridDim.x) {
        tensor::wait<groups::stages - 2>();
        __syncthreads();
        bring(at + (groups::stages - 1) * gridDim.x, stage ? stage - 1 : groups::stages - 1);
        const groups::Tile tile(at, p.place);
        const char* const piece = ring + stage * groups::image_bytes + lane / 16 * 16 + groups::first_in(column) * 2;
        stage = stage + 1 == groups::stages ? 0 : stage + 1;
#pragma unroll 1
        for (int sixteen = warp / groups::columns; sixteen < groups::sixteens; sixteen += Traits::warps) {
            const char* const window = piece + groups::Pixel(min(sixteen * 16 + lane % 16, groups::count - 1)).window();
#pragma unroll
            for (int phase = 0; phase < phases; ++phase) {
                float sum[2][4] = {};
#pragma unroll
                for (int tap = phase ? phase_end[phase - 1] : 0; tap < phase_end[phase]; ++tap)
#pragma unroll
                    for (int slice = 0; slice < groups::slices; ++slice) {
                        u32 a[4];
                        tensor::load_matrices(a, window + tap_place[tap] * groups::image_pitch + slice * 32);
                        const u32(&b)[4] = filter.value[tap][slice];
                        tensor::mma<T>(sum[0], a[0], a[1], a[2], a[3], b[0], b[1]);
                        tensor::mma<T>(sum[1], a[0], a[1], a[2], a[3], b[2], b[3]);
                    }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int place = sixteen * 16 + half * 8 + lane / 4;
                    const groups::Pixel pixel(place);
                    const int h = (tile.h + pixel.h) * Traits::phases_h + phase / Traits::phases_w;
                    const int w = (tile.w + pixel.w) * Traits::phases_w + phase % Traits::phases_w;
                    if (place >= groups::count || !pixel.inside(tile, p.place) || h >= p.out_h || w >= p.out_w)
                        continue;
                    const Index to =
                        ((Index(tile.image + pixel.image) * p.out_h + h) * p.out_w + w) * p.out_pixel + first_channel;
                    Traits::Sum value[4] = {sum[0][2 * half], sum[0][2 * half + 1], sum[1][2 * half],
                                            sum[1][2 * half + 1]};
                    Traits::Epilogue::apply<4, true>(value, p.operands, first_channel, to);
                    Pack<Traits::Out, 4> result;
#pragma unroll
                    for (int i = 0; i < 4; ++i) result.value[i] = Traits::Out(value[i]);
                    store(p.out + to, result);
                }
            }
        }
    }
}
