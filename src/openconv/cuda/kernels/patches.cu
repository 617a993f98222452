// Convolutions without padding as one matrix product whose rows lie in the image: nothing is gathered beforehand.
//
//     y[n, k, p, q] = sum over d of  w[k, d] * x[place(n, p, q) + offset(d)]
//
// `d` counts the elements of a window in the order of the filter's memory. Along the image's last axis `run` of them
// lie side by side (S in nchw, S*C in nhwc), so that sixteen bytes of a window are sixteen bytes of the image, wherever
// runs and windows start at multiples of sixteen bytes. A tile of the result is `rows` x `columns`: filters x pixels in
// nchw, pixels x filters in nhwc (`pixel_rows`), so that a row of it lies side by side in memory in both. Pixels of all
// images are one sequence; a tile need not end where an image does.
//
// All threads copy both operands by cp.async, 64 elements of depth a step, `stages` - 2 steps ahead of the products;
// each warpgroup multiplies 64 rows of the tile by all of its columns. A step's place in the ring is written again two
// steps later: by then every warpgroup has passed a barrier behind the wait for that step's products.
//
// Of a ViT-B/16's patches (16 images: 768 x 3136 results, depth 768) a tile of 192 x 96 takes 24 products of 96 columns
// for each of 12 steps and a block 12 x 36 KB: 132 tiles, one for each multiprocessor of an H200, 4.6 us at its rate.
//
// Shared memory: the ring, [stages][rows + columns][64], rows as common/wgmma.cuh has them. At the end the sums take its
// place, [rows][columns + gap], and leave in the order of memory: stored as the products leave them, a warp would write
// 16 bytes to each of 8 rows, which took 4.5 us of 18.
//
// Traits: A, B, Out, Sum, Index, Epilogue; rows, columns, stages, pixel_rows, run, taps_h, taps_d, together (results
// that lie side by side, aligned and of one image).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"
#include "traits"

using Index = Traits::Index;
using T = Traits::A;

struct Params {
    const T* x;
    const T* w;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    i64 image;                   // elements of one
    int pixels, filters, depth;  // of the whole product
    int size_d, size_h, line;    // of the image; elements of a row
    int step_d, step_h, step_w;  // elements from one window to the next
    Divisor out_w, out_h, out_pixels, row_tiles;
};

constexpr int rows = Traits::rows, columns = Traits::columns, stages = Traits::stages, ahead = stages - 2;
constexpr int threads = 2 * rows, depth_step = 64, row_bytes = 2 * depth_step;
constexpr int stage_bytes = (rows + columns) * row_bytes;
constexpr int pitch = (columns + 23) / 32 * 32 + 8;  // of sums: four rows of a warp's pairs fall into all banks
constexpr int together = Traits::together;
constexpr bool pixel_rows = Traits::pixel_rows;
static_assert(rows % 64 == 0 && columns % 8 == 0 && stages > 2, "tiles of whole warpgroups, and a ring");

// Where element d of a window lies, from the window's first.
__device__ __forceinline__ int offset(const Params& p, int d) {
    const int at = d % Traits::run, row = d / Traits::run;
    const int h = row % Traits::taps_h, plane = row / Traits::taps_h;
    const int depth = plane % Traits::taps_d, channel = plane / Traits::taps_d;
    return ((channel * p.size_d + depth) * p.size_h + h) * p.line + at;
}

// The first element of a row of an operand: a window of pixel `i`, or filter `i`; null beyond the last.
template <bool Pixels>
__device__ __forceinline__ const T* start(const Params& p, int i) {
    if (i >= (Pixels ? p.pixels : p.filters)) return nullptr;
    if (!Pixels) return p.w + Index(i) * p.depth;
    int image = i, rest = p.out_pixels.split(image);
    const int q = p.out_w.split(rest), h = p.out_h.split(rest);
    return p.x + image * p.image + (rest * p.step_d + h * p.step_h + q * p.step_w);
}

// This thread's share of an operand of `Count` rows: the same sixteen bytes of every step, of several rows. Eight lanes
// take one row, whose bytes lie side by side in a filter. Windows in nchw lie side by side themselves, `run` at a time:
// there two lanes take a row, and a warp sixteen windows.
template <int Count, bool Pixels>
struct Operand {
    static constexpr int between = threads / 8, each = (Count + between - 1) / between;
    static constexpr bool narrow = Pixels && Traits::run == 16;
    int first_row, piece;
    const T* from[each];

    __device__ __forceinline__ Operand(const Params& p, int first) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        first_row = narrow ? warp / 4 * 16 + lane / 2 : warp * 4 + lane / 8;
        piece = narrow ? warp % 4 * 2 + lane % 2 : lane % 8;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int row = first_row + i * between;
            from[i] = row < Count ? start<Pixels>(p, first + row) : nullptr;
        }
    }

    __device__ __forceinline__ void fetch(const Params& p, unsigned char* to, int step) const {
        const int d = step * depth_step + piece * 8, place = Pixels ? offset(p, d) : d;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int row = first_row + i * between;
            const bool inside = from[i] != nullptr && d < p.depth;
            if (row < Count)
                tensor::copy<16>(to + tensor::swizzled(row, piece), inside ? from[i] + place : p.x, inside);
        }
    }
};

// Results that lie side by side.
__device__ __forceinline__ void store_results(const Params& p, const float* sums, int row, int column) {
    const int pixel = pixel_rows ? row : column, filter = pixel_rows ? column : row;
    if (pixel >= p.pixels || filter >= p.filters) return;
    int image = pixel;
    const int inner = pixel_rows ? 0 : p.out_pixels.split(image);
    const Index at = pixel_rows ? Index(pixel) * p.filters + filter
                                : (Index(image) * p.filters + filter) * p.out_pixels.value + inner;
    const Pack<float, together> some = load<together>(sums);
    Traits::Sum result[together];
#pragma unroll
    for (int i = 0; i < together; ++i) result[i] = some.value[i];
    Traits::Epilogue::apply<together, pixel_rows>(result, p.operands, filter, at);
    Pack<Traits::Out, together> pack;
#pragma unroll
    for (int i = 0; i < together; ++i) pack.value[i] = Traits::Out(result[i]);
    store<together>(p.out + at, pack);
}

extern "C" __global__ void __launch_bounds__(threads, 1)
patches(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    unsigned char* const ring = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);

    // Place.
    int block = blockIdx.x;
    const int first_row = p.row_tiles.split(block) * rows, first_column = block * columns;
    const Operand<rows, pixel_rows> of_rows(p, first_row);
    const Operand<columns, !pixel_rows> of_columns(p, first_column);
    const int steps = (p.depth + depth_step - 1) / depth_step;
    const auto fetch = [&](int step) {
        if (step < steps) {
            unsigned char* const to = ring + step % stages * stage_bytes;
            of_rows.fetch(p, to, step);
            of_columns.fetch(p, to + rows * row_bytes, step);
        }
        tensor::commit();
    };

    // Multiply.
    const int group = threadIdx.x / 128;
    float sum[columns / 2] = {};
#pragma unroll
    for (int step = 0; step < ahead; ++step) fetch(step);
    for (int step = 0; step < steps; ++step) {
        tensor::wait<ahead - 1>();
        tensor::shared_written();
        __syncthreads();
        unsigned char* const stage = ring + step % stages * stage_bytes;
        const u64 a = tensor::descriptor(stage + group * 64 * row_bytes);
        const u64 b = tensor::descriptor(stage + rows * row_bytes);
        tensor::group_begin();
#pragma unroll
        for (int k = 0; k < depth_step; k += 16)
            tensor::group_product(sum, tensor::along(a, 2 * k), tensor::along(b, 2 * k));
        tensor::group_commit();
        tensor::group_wait<1>(sum);
        fetch(step + ahead);
    }
    tensor::group_wait<0>(sum);

    // Store.
    __syncthreads();  // no product reads the ring any more
    float* const sums = reinterpret_cast<float*>(ring);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* const to = sums + (16 * warp + 8 * half + lane / 4) * pitch + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < columns / 8; ++j)
            store<2>(to + 8 * j, Pack<float, 2>{{sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]}});
    }
    __syncthreads();
    constexpr int across = columns / together;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * across; i += threads) {
        const int row = i / across, column = i % across * together;
        store_results(p, sums + row * pitch + column, first_row + row, first_column + column);
    }
}
