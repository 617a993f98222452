// The filter gradient with many small groups on tensor cores: several groups in one product.
//
//     dw[k, tap, c] = sum over pixels of  dy[pixel, k] * x[window(pixel) + tap, c],    c of k's group
//
// common/igemm_groups.cuh says how groups and pixels lie. A tile's dy and the piece of x under it are read once; each
// warp keeps the sums of all taps of a column in registers. Both operands lie across the depth, which is the pixels.
//
// Blocks stay: each goes through tiles of its chunk of groups. A block's sums are a split; igemm_groups_sum adds all
// splits up in a fixed order.
//
// Traits: those of common/igemm_groups.cuh; uneven (the last tile of an image may have fewer rows), follows (another
// kernel, that made an input).

#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/shared.cuh"
#include "traits"
#include "common/igemm_groups.cuh"

using T = Traits::A;
using Index = Traits::Index;
constexpr int taps = groups::all_taps, slices = groups::slices;
// Rows of dy one below the other, each of whole strips.
constexpr int gradient_pitch = groups::out_chunk * 2 + 16, gradient_across = groups::strips_across * 16;
constexpr int gradient_pixels = groups::high * gradient_across;
constexpr int gradient_bytes = gradient_pixels * gradient_pitch, stage_bytes = groups::image_bytes + gradient_bytes;
// Zeros as far as windows reach: what those of a pixel that is not there read.
constexpr int zero_bytes = groups::halo_h * groups::row_slots * groups::image_pitch;

struct Params {
    const T* image;
    const Traits::B* gradient;
    Pack<float, 4>* parts;
    groups::Place place;
    int gradient_pixel;
};

// A column of the gradient under a tile.
struct Column {
    char* to;
    const T* from;
    Index row_elements;
    int rows;  // that there are

    __device__ __forceinline__ void copy(int, int row) const {
        tensor::copy<16>(to + row * (gradient_across * gradient_pitch), from + row * row_elements, row < rows);
    }
};

__device__ __forceinline__ void bring_gradient(char* to, const groups::Tile& tile, int first_channel, const Params& p) {
    const T* const first =
        p.gradient +
        (((Index(tile.image) * p.place.rows + tile.h) * p.place.columns + tile.w) * p.gradient_pixel + first_channel);
    const Index row_elements = Index(p.place.columns) * p.gradient_pixel;
    groups::bring_rows<1, groups::high, gradient_across, groups::out_chunk>([&](int across, int piece) {
        const groups::Pixel pixel(across);
        return Column{to + across * gradient_pitch + piece * 16,
                      first + (pixel.image * p.place.rows * row_elements + pixel.w * p.gradient_pixel + piece * 8),
                      row_elements, pixel.inside(tile, p.place) ? p.place.rows - tile.h : 0};
    });
}

extern "C" __global__ void __launch_bounds__(groups::threads, Traits::bound)
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

    float sum[taps][2 * slices][4] = {};
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
        for (int strip = warp / groups::columns; strip < groups::strips; strip += Traits::warps) {
            const int first = strip % groups::strips_across * 16,
                      first_h = strip / groups::strips_across * groups::rows;
            const groups::Pixel pixel(first + lane % 16);
            const char* const window = pixel.inside(tile, p.place) ? piece + pixel.window(first_h) +
                                                                         groups::first_in(column) * 2 + lane / 16 * 16
                                                                   : zeros;
            u32 a[groups::rows][4], b[2][groups::distances][slices][4];  // of x a row, and the next one
            const auto read = [&](int row) {
#pragma unroll
                for (int i = 0; i < groups::distances * slices; ++i) {
                    const int far = row * groups::row_slots + groups::slot(column_far[i / slices]);
                    tensor::load_transposed(b[row % 2][i / slices][i % slices],
                                            window + far * groups::image_pitch + i % slices * 32);
                }
                const int h = row / Traits::step_h;
                if (row % Traits::step_h == 0 && h < groups::rows)
                    tensor::load_transposed(a[h],
                                            gradient + ((first_h + h) * gradient_across + first) * gradient_pitch);
            };
            read(0);
#pragma unroll
            for (int row = 0; row < groups::strip_h; ++row) {
                if (row + 1 < groups::strip_h) read(row + 1);
#pragma unroll
                for (int r = 0; r < groups::row_taps; ++r) {
                    const int from = row - row_place[r], h = from / Traits::step_h;
                    if (from < 0 || from % Traits::step_h || h >= groups::rows) continue;
                    if (Traits::uneven && tile.h + first_h + h >= p.place.rows)
                        continue;  // zeros, but x may be no number
#pragma unroll
                    for (int i = 0; i < groups::column_taps * slices; ++i) {
                        const int s = i / slices, slice = i % slices;
                        float (&to)[2 * slices][4] = sum[r * groups::column_taps + s];
                        const u32(&left)[4] = a[h];
                        const u32(&right)[4] = b[row % 2][column_place[s]][slice];
                        tensor::mma<T>(to[2 * slice], left[0], left[1], left[2], left[3], right[0], right[1]);
                        tensor::mma<T>(to[2 * slice + 1], left[0], left[1], left[2], left[3], right[2], right[3]);
                    }
                }
                __syncwarp();
            }
        }
    }

    // The sums as the lanes have them, four at a time. Warps that share a column's pixels add theirs up in shared
    // memory, each some of the fours.
    constexpr int fours = taps * 2 * slices, warps = Traits::warps;
    const auto four = [&](int i) {
        const float (&from)[4] = sum[i / (2 * slices)][i % (2 * slices)];
        return Pack<float, 4>{from[0], from[1], from[2], from[3]};
    };
    const int tile = (blockIdx.x * gridDim.y + chunk) * groups::columns + column;
    Pack<float, 4>* const to = p.parts + (i64(tile) * fours * 32 + lane);
    if constexpr (warps == 1) {
#pragma unroll
        for (int i = 0; i < fours; ++i) to[i * 32] = four(i);
    } else {
        const int part = warp / groups::columns;
        Pack<float, 4>* const all = reinterpret_cast<Pack<float, 4>*>(ring) + column * warps * fours * 32 + lane;
        tensor::wait<0>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < fours; ++i) all[(part * fours + i) * 32] = four(i);
        __syncthreads();
        for (int i = part; i < fours; i += warps) {
            auto total = all[i * 32];
#pragma unroll
            for (int other = 1; other < warps; ++other) {
                const auto more = all[(other * fours + i) * 32];
#pragma unroll
                for (int j = 0; j < 4; ++j) total.value[j] += more.value[j];
            }
            to[i * 32] = total;
        }
    }
}
