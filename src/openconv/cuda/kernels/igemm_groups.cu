// Convolution with many small groups, and its image gradient, on tensor cores: several groups in one product.
//
//     out[pixel, k] = sum over taps and channels c of k's group of  image[window(pixel) + tap, c] * filter[k, tap, c]
//
// common/igemm_groups.cuh says how groups and pixels lie. Read once per tap, as implicit GEMMs of many channels do, the
// image would come from L2 nine times for a 3x3 filter, and there are too few products to hide that. Here a tile's
// piece of it is read once. Filters are few: each warp has all taps of its column in registers, as B of the products.
//
// Blocks stay: each goes through tiles of its chunk of groups, the next tiles on their way while it computes.
//
// A zero of the filter times what is not finite is no number: an infinity in one group would show in others of its
// column. All sixteen sums of such a pixel are then not finite, and those with a NaN among them are formed again, of
// their own group alone.
//
// dgrad: pixels of dx fall into phases, each with taps of its own (as in igemm.cu), which all read the same piece of
// dy.
//
// Traits: those of common/igemm_groups.cuh; turned (the filter has its results across, dgrad), filter_last (its
// channels are last), each (channels of the filter), phases_h, phases_w, follows (another kernel, that made an input).

#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "traits"
#include "common/igemm_groups.cuh"

using T = Traits::A;
using Index = Traits::Index;
constexpr int taps = groups::all_taps, slices = groups::slices;
constexpr int phases_h = Traits::phases_h, phases_w = Traits::phases_w, phases = phases_h * phases_w;
constexpr bool mixed = Traits::out_each < 16;  // a column has several groups
static_assert(!mixed || groups::rows * phases * 2 <= 32, "a lane has a bit for each pixel of a strip");
constexpr int filter_rows = Traits::turned ? groups::in_chunk : groups::out_chunk;
constexpr int filter_elements = filter_rows * taps * Traits::each;

struct Params {
    const T* image;
    const Traits::B* filter;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count ? Traits::Epilogue::count : 1];
    groups::Place place;
    int out_h, out_w, out_pixel;
};

// All taps of a column, as the registers of B: column c of the first eight is channel 4 * (c / 2) + c % 2 of the
// result, of the other eight that plus two, so that a lane's four results of a pixel lie side by side.
struct Filter {
    u32 value[taps][groups::slices][4];

    __device__ __forceinline__ Filter(const T* chunk, int column, int lane) {
#pragma unroll
        for (int tap = 0; tap < taps; ++tap)
#pragma unroll
            for (int i = 0; i < groups::slices * 4; ++i) {
                const int n = column * 16 + 4 * (lane / 8) + 2 * (i % 4 / 2) + lane / 4 % 2;
                const int c = groups::first_in(column) + i / 4 * 16 + i % 2 * 8 + lane % 4 * 2;
                // Two channels of one group, or of none: what is there is read anyway, without a branch.
                const u32 both = pair(chunk, tap, n, c);
                value[tap][i / 4][i % 4] = n / Traits::out_each == c / Traits::in_each ? both : 0;
            }
    }

    // Of result n and channel c, both in the chunk.
    __device__ static __forceinline__ int place(int tap, int n, int c) {
        const int row = Traits::turned ? c : n, channel = (Traits::turned ? n : c) % Traits::each;
        return Traits::filter_last ? (row * taps + tap) * Traits::each + channel
                                   : (row * Traits::each + channel) * taps + tap;
    }
    __device__ static __forceinline__ u32 pair(const T* chunk, int tap, int n, int c) {
        if constexpr (!Traits::turned && Traits::filter_last)
            return *reinterpret_cast<const u32*>(chunk + place(tap, n, c));
        else
            return chunk[place(tap, n, c)].bits | u32(chunk[place(tap, n, c + 1)].bits) << 16;
    }
};

// Four results from n on, of the window at `window` in shared memory and of their own groups alone.
__device__ __forceinline__ void of_own_groups(float (&sum)[4], const char* window, const T* filters, int n, int phase) {
#pragma unroll
    for (int i = 0; i < groups::row_taps * groups::column_taps; ++i) {
        const int r = i / groups::column_taps, s = i % groups::column_taps;
        if (row_phase[r] * phases_w + column_phase[s] != phase) continue;
        const int tap = row_filter[r] * Traits::filter_w + column_filter[s];
        const int far = row_place[r] * groups::row_slots + groups::slot(column_far[column_place[s]]);
        const T* const image = reinterpret_cast<const T*>(window + far * groups::image_pitch);
#pragma unroll 1
        for (int c = 0; c < Traits::in_each; ++c)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int channel = (n + k) / Traits::out_each * Traits::in_each + c;
                sum[k] += float(image[channel]) * float(filters[Filter::place(tap, n + k, channel)]);
            }
    }
}

// Where a lane's results of a strip go: two pixels of each row.
struct Results {
    Index first[2];  // in the first phase of the strip's first row
    bool there[2];
    int rows, columns[2];  // of the result from the strip's first pixel on
    int channel;

    __device__ __forceinline__ Results(int at, const groups::Tile& tile, int first_h, int channel, const Params& p)
        : rows(p.out_h - (tile.h + first_h) * phases_h), channel(channel) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const groups::Pixel pixel(at + 8 * half);
            const int w = (tile.w + pixel.w) * phases_w;
            there[half] = pixel.inside(tile, p.place);
            columns[half] = p.out_w - w;
            first[half] = ((Index(tile.image + pixel.image) * p.out_h + (tile.h + first_h) * phases_h) * p.out_w + w) *
                              p.out_pixel +
                          channel;
        }
    }

    // A row's results. Returns a bit for each of its pixels, first those of the first half, that has a NaN among them.
    __device__ __forceinline__ u32 store(int h, const float (&sum)[phases_h][phases_w][2][4], const Params& p) const {
        u32 found = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int phase = 0; phase < phases; ++phase) {
                const float (&from)[2][4] = sum[phase / phases_w][phase % phases_w];
                const float value[4] = {from[0][2 * half], from[0][2 * half + 1], from[1][2 * half],
                                        from[1][2 * half + 1]};
                // A NaN from another group is in all of a group's results.
                if constexpr (mixed)
#pragma unroll
                    for (int i = 0; i < 4; i += Traits::out_each)
                        found |= value[i] != value[i] ? 1u << half * phases + phase : 0;
                store(h, half, phase, value, p);
            }
        return found;
    }
    __device__ __forceinline__ void store(int h, int half, int phase, const float (&sum)[4], const Params& p) const {
        const int row = h * phases_h + phase / phases_w, column = phase % phases_w;
        if (!(half ? there[1] : there[0]) || row >= rows || column >= (half ? columns[1] : columns[0])) return;
        const Index at = (half ? first[1] : first[0]) + (Index(row) * p.out_w + column) * p.out_pixel;
        Traits::Sum value[4] = {sum[0], sum[1], sum[2], sum[3]};
        Traits::Epilogue::apply<4, true>(value, p.operands, channel, at);
        Pack<Traits::Out, 4> result;
#pragma unroll
        for (int i = 0; i < 4; ++i) result.value[i] = Traits::Out(value[i]);
        ::store(p.out + at, result);
    }
};

extern "C" __global__ void __launch_bounds__(groups::threads, Traits::bound)
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
        const char* const piece = ring + stage * groups::image_bytes;
        stage = stage + 1 == groups::stages ? 0 : stage + 1;
#pragma unroll 1
        for (int strip = warp / groups::columns; strip < groups::strips; strip += Traits::warps) {
            const int first = strip % groups::strips_across * 16,
                      first_h = strip / groups::strips_across * groups::rows;
            const char* const window = piece +
                                       groups::Pixel(min(first + lane % 16, groups::across - 1)).window(first_h) +
                                       lane / 16 * 16 + groups::first_in(column) * 2;
            u32 again = 0;  // a bit for each pixel
            const Results results(first + lane / 4, tile, first_h, first_channel, p);
            float sum[groups::rows][phases_h][phases_w][2][4] = {};
            u32 a[2][groups::distances][slices][4];  // of a row, and of the next one
            const auto read = [&](int row) {
#pragma unroll
                for (int i = 0; i < groups::distances * slices; ++i) {
                    const int far = row * groups::row_slots + groups::slot(column_far[i / slices]);
                    tensor::load_matrices(a[row % 2][i / slices][i % slices],
                                          window + far * groups::image_pitch + i % slices * 32);
                }
            };
            read(0);
#pragma unroll
            for (int row = 0; row < groups::strip_h; ++row) {
                if (row + 1 < groups::strip_h) read(row + 1);
#pragma unroll
                for (int i = 0; i < groups::row_taps * groups::column_taps; ++i) {
                    const int r = i / groups::column_taps, s = i % groups::column_taps, from = row - row_place[r];
                    const int h = from / Traits::step_h;
                    if (from < 0 || from % Traits::step_h || h >= groups::rows) continue;
                    float (&to)[2][4] = sum[h][row_phase[r]][column_phase[s]];
#pragma unroll
                    for (int slice = 0; slice < slices; ++slice) {
                        const u32(&left)[4] = a[row % 2][column_place[s]][slice];
                        const u32(&right)[4] = filter.value[row_filter[r] * Traits::filter_w + column_filter[s]][slice];
                        tensor::mma<T>(to[0], left[0], left[1], left[2], left[3], right[0], right[1]);
                        tensor::mma<T>(to[1], left[0], left[1], left[2], left[3], right[2], right[3]);
                    }
                }
                // The row of results whose windows end here.
                if (row >= groups::reach && (row - groups::reach) % Traits::step_h == 0) {
                    const int h = (row - groups::reach) / Traits::step_h;
                    again |= results.store(h, sum[h], p) << h * 2 * phases;
                }
                __syncwarp();
            }
            if constexpr (mixed)
#pragma unroll 1
                for (int bit = 0; again != 0; ++bit, again >>= 1) {
                    if (!(again & 1)) continue;
                    const int h = bit / (2 * phases), half = bit / phases % 2, phase = bit % phases;
                    const groups::Pixel pixel(min(first + half * 8 + lane / 4, groups::across - 1));
                    float alone[4] = {};
                    of_own_groups(alone, piece + pixel.window(first_h + h), filters, column * 16 + lane % 4 * 4, phase);
                    results.store(h, half, phase, alone, p);
                }
        }
    }
}
