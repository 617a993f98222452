// A 1x1 convolution as a stream of pixels past filters that stay: result[pixel, n] = sum over d of a[pixel, d] * b[n, d]
//
// d counts the channels of the input, n those of the result. Memory is the limit: of 64 channels that become 256, a
// pixel has 640 bytes and 32768 operations, and an H200 has 180 operations for each byte. So a block stays for its whole
// life on its multiprocessor, with its filters in shared memory. Each of its `groups`, of four warps, takes one tile of
// 64 pixels by `columns` results after the other: it multiplies what has come, and computes the epilogue box by box
// where results lie and a tensor that it reads has come before. One of its threads has each box stored from there,
// another asks for inputs to come. No group waits for another: while one multiplies another computes.
//
// Of an input that is read densely, a tile is 64 pixels in a row. Where pixels are left out, it is `lines` times `across`
// pixels of an image, at most 64, and the map of the input steps over those that are left out.
//
// A sum is changed by the thread that has it: two results side by side, at the place that common/wgmma.cuh's swizzle
// gives them, which puts the words of a warp into all 32 banks.
//
// Shared memory: filters, inputs [groups][stages][span][64] and results [groups][buffers][64], all
// in rows of 128 bytes, 64 channels; then the vectors of the epilogue, [count][columns], and those of the prologue,
// [count][depth], in f32.
//
// A prologue is computed in registers, from which the products take their first operand. Statistics are added up by each
// thread for the channels of its results, over all its tiles, and joined at the end: sums[worker, channel, 2].
//
// Traits: A (of all tensors), Out, Sum, Epilogue, Prologue, stats; depth, columns, groups, stages (boxes of the input),
// span (times 64 channels in each), buffers (boxes of results), forward (filters lie along d, else along n), held (which
// operand of the epilogue comes as boxes, -1: none), channels (bits: which are vectors), across, lines.

#include "common/types.cuh"
#include "common/bulk_ring.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"
#include "common/wgmma_turned.cuh"

namespace igemm {
// N values of a prologue's vector, f32, from a multiple of N on.
template <int N, class Sum>
__device__ __forceinline__ void read_vector(Sum (&value)[N], const void* vector, int first) {
    const Pack<float, N> found = load<N>(static_cast<const float*>(vector) + first);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = found.value[i];
}
}  // namespace igemm

#include "traits"

using T = Traits::A;
using Sum = Traits::Sum;
using Epilogue = Traits::Epilogue;
using Prologue = Traits::Prologue;

constexpr int depth = Traits::depth, columns = Traits::columns, groups = Traits::groups, stages = Traits::stages;
constexpr int span = Traits::span, buffers = Traits::buffers, chunks = depth / 64, boxes = columns / 64;
constexpr int threads = 128 * groups, pointers = Prologue::count + Epilogue::count;
constexpr int across = Traits::across, lines = Traits::lines, rows = across * lines;  // pixels of a tile
constexpr int box_bytes = rows * 128, stage_bytes = span * box_bytes, parts = chunks / span, place_bytes = 64 * 128;
constexpr int filter_bytes = chunks * columns * 128;
constexpr bool held = Traits::held >= 0;
static_assert(depth % 64 == 0 && columns % 64 == 0 && columns <= 256, "whole rows of 128 bytes, and sums of a thread");
static_assert(rows <= 64 && rows % 8 == 0, "rows of one product, whole patterns of the swizzle");
static_assert(chunks % span == 0 && stages >= parts && buffers > 1,
              "a tile's input, and a place for results while others are stored");

struct Params {
    const T *x, *w;  // read by their maps
    T* out;          // by its map, too
    const void* operands[pointers > 0 ? pointers : 1];
    float* sums;
    int channels, column_tiles;
    int width, height;  // of the images whose pixels are taken
    int tiles, tiles_along, tiles_down;
    bulk::Map input, filters, result, other;
};

struct Block {
    int column, worker, workers;

    __device__ __forceinline__ Block(const Params& p)
        : column(blockIdx.x % p.column_tiles * columns),
          worker(blockIdx.x / p.column_tiles),
          workers(gridDim.x / p.column_tiles) {}
};

// One thread: the filters of a block's columns; what is behind the last is 0. They come as one box, [depth / 64][columns],
// or where they lie across as boxes of `turned_rows`, [columns / 64][depth].
constexpr int turned_rows = 64 * (chunks % 4 == 0 ? 4 : chunks % 3 == 0 ? 3 : chunks % 2 == 0 ? 2 : 1);
__device__ __forceinline__ void bring_filters(const Params& p, const Block& block, unsigned char* filters,
                                              bulk::Barrier& arrived) {
    bulk::expect(arrived, filter_bytes);
    if constexpr (Traits::forward) {
        bulk::copy_cube(filters, p.filters, arrived, 0, block.column, 0);
    } else {
        for (int c = 0; c < boxes; ++c)
            for (int d = 0; d < depth; d += turned_rows)
                bulk::copy(filters + (c * depth + d) * 128, p.filters, arrived, 1, block.column + 64 * c, d);
    }
}
// The filters of a product: `d` times 64 and `k` times 16 channels on.
__device__ __forceinline__ u64 filters_at(u64 filters, int d, int k) {
    return tensor::along(filters, Traits::forward ? d * columns * 128 + k * 32 : d * 8192 + k * 2048);
}

__device__ __forceinline__ void bring_vectors(const Params& p, const Block& block, T* vectors, float* before) {
#pragma unroll
    for (int k = 0; k < Prologue::count; ++k)
        for (int i = threadIdx.x; i < depth; i += threads)
            before[k * depth + i] = static_cast<const float*>(p.operands[k])[i];
#pragma unroll
    for (int k = 0; k < Epilogue::count; ++k)
        if (Traits::channels >> k & 1)
            for (int i = threadIdx.x; i < columns; i += threads)
                vectors[k * columns + i] =
                    block.column + i < p.channels
                        ? static_cast<const T*>(p.operands[Prologue::count + k])[block.column + i]
                        : T(0.0f);
}

struct Place {
    int x, y, image;
};

// A group's own: its places in shared memory, and the tiles it takes.
struct Group {
    unsigned char *inputs, *results;
    bulk::Barrier *full, *arrived;
    int first, step, tiles;  // its first tile, from one to the next, and how many

    // The first pixel of its tile `i`.
    __device__ __forceinline__ Place place(const Params& p, int i) const {
        const int tile = first + i * step;
        if constexpr (Traits::dense) return {tile * across, 0, 0};
        const int row = tile / p.tiles_along;
        return {(tile - row * p.tiles_along) * across, row % p.tiles_down * lines, row / p.tiles_down};
    }
};

// One thread: the boxes from `begin` to `end` of the group's input, as many as there are.
__device__ __forceinline__ void bring(const Params& p, const Group& group, int begin, int end) {
    end = min(end, group.tiles * parts);
    for (int box = begin; box < end; ++box) {
        const int stage = box % stages;
        const Place at = group.place(p, box / parts);
        bulk::expect(group.full[stage], stage_bytes);
        bulk::copy(group.inputs + stage * stage_bytes, p.input, group.full[stage], 0, at.x, at.y, at.image,
                   box % parts * span);
    }
}
// One thread: what the epilogue of the group's box `box` of results reads, if there is such a box.
__device__ __forceinline__ void bring_held(const Params& p, const Block& block, const Group& group, int box) {
    if (box >= group.tiles * boxes) return;
    const int buffer = box % buffers;
    const Place at = group.place(p, box / boxes);
    bulk::expect(group.arrived[buffer], box_bytes);
    bulk::copy(group.results + buffer * place_bytes, p.other, group.arrived[buffer], block.column + box % boxes * 64,
               at.x, at.y, at.image);
}

// A warp's share of a box, as the first operand of four products: rows 16 * warp on, 64 channels.
__device__ __forceinline__ void read_box(u32 (&a)[4][4], const unsigned char* box, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        tensor::load_matrices(a[k], box + tensor::swizzled(16 * warp + lane % 16, 2 * k + lane / 16));
}
// The prologue of it: a register has two channels of one row.
__device__ __forceinline__ void change(u32 (&a)[4][4], const float* before, int first, int lane) {
    const void* given[Prologue::count > 0 ? Prologue::count : 1];
#pragma unroll
    for (int k = 0; k < Prologue::count; ++k) given[k] = before + k * depth;
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            typename Prologue::template Vectors<2> vectors;
            vectors.read(given, first + 16 * k + 8 * half + lane % 4 * 2);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32& word = a[k][2 * half + h];
                Pack<T, 2> pair = reinterpret_cast<const Pack<T, 2>&>(word);
                Sum value[2] = {widen<Sum>(pair.value[0]), widen<Sum>(pair.value[1])};
                vectors.apply(value);
                pair = {T(value[0]), T(value[1])};
                word = reinterpret_cast<const u32&>(pair);
            }
        }
}

// The products of a group's tile `i`.
template <int N>
__device__ __forceinline__ void multiply(float (&sum)[N], const Group& group, u64 a, u64 b, int i) {
#pragma unroll
    for (int part = 0; part < parts; ++part) {
        const int box = i * parts + part, stage = box % stages;
        bulk::wait(group.full[stage], box / stages & 1);
        tensor::group_begin();  // behind every wait, or the compiler lets each product wait for the one before
#pragma unroll
        for (int d = 0; d < span; ++d)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                tensor::group_product(sum, tensor::along(a, stage * stage_bytes + d * box_bytes + k * 32),
                                      filters_at(b, part * span + d, k));
        tensor::group_commit();
    }
    tensor::group_wait<0>(sum);
}
// The same with a prologue: while a box is multiplied, the next one is read and changed.
template <int N>
__device__ __forceinline__ void multiply_changed(float (&sum)[N], const Group& group, const float* before, u64 b, int i,
                                                 int warp, int lane) {
    u32 a[2][4][4];
#pragma unroll
    for (int d = 0; d < chunks; ++d) {
        const int box = i * parts + d / span, stage = box % stages;
        auto& mine = a[d % 2];
        if (d % span == 0) bulk::wait(group.full[stage], box / stages & 1);
        read_box(mine, group.inputs + stage * stage_bytes + d % span * box_bytes, warp, lane);
        change(mine, before, 64 * d, lane);
        if (d > 0) {
            tensor::group_wait<0>(sum);
#pragma unroll
            for (int k = 0; k < 4; ++k) tensor::keep(a[(d + 1) % 2][k]);
        }
        tensor::group_begin();
#pragma unroll
        for (int k = 0; k < 4; ++k) tensor::group_product(sum, mine[k], filters_at(b, d, k));
        tensor::group_commit();
    }
    tensor::group_wait<0>(sum);
#pragma unroll
    for (int k = 0; k < 4; ++k) tensor::keep(a[(chunks + 1) % 2][k]);
}

// The epilogue of a thread's sums of box `c`, to where results lie in shared memory; a tensor that it reads lies there
// before. `total` has the sum and the sum of squares of each of its channels, over the rows that `valid` lets through.
template <int N, int Totals>
__device__ __forceinline__ void finish(const Params& p, const float (&sum)[N], int c, unsigned char* results,
                                       const T* vectors, float (&total)[Totals], const u32 (&valid)[2], int warp,
                                       int lane) {
    const int row = 16 * warp + lane / 4, start = row * 128 + row % 8 * 16 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const void* given[Epilogue::count > 0 ? Epilogue::count : 1];
        Pack<T, 2> of_channels[Epilogue::count > 0 ? Epilogue::count : 1];
#pragma unroll
        for (int k = 0; k < Epilogue::count; ++k) {
            given[k] = k == Traits::held ? static_cast<const void*>(results) : p.operands[Prologue::count + k];
            if (Traits::channels >> k & 1) {
                of_channels[k] =
                    *reinterpret_cast<const Pack<T, 2>*>(vectors + k * columns + 64 * c + 8 * j + lane % 4 * 2);
                given[k] = &of_channels[k];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int place = (start ^ j * 16) + h * 1024, at = 32 * c + 4 * j;
            Sum pair[2] = {sum[at + 2 * h], sum[at + 2 * h + 1]};
            Epilogue::template apply<2, true>(pair, given, 0, place / 2);
            Pack<T, 2> rounded = {T(pair[0]), T(pair[1])};
            *reinterpret_cast<Pack<T, 2>*>(results + place) = rounded;
            if constexpr (Traits::stats) {
                const u32 word = reinterpret_cast<const u32&>(rounded) & valid[h];
                rounded = reinterpret_cast<const Pack<T, 2>&>(word);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float value = float(rounded.value[i]);
                    total[at + 2 * i] += value;
                    total[at + 2 * i + 1] += value * value;
                }
            }
        }
    }
}

// What all threads have added up, to `sums`; `all` has room for [4 * groups][columns][2].
template <int Totals>
__device__ __forceinline__ void join(const Params& p, const Block& block, float* all, float (&total)[Totals]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < Totals; ++k) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) total[k] += __shfl_xor_sync(~0u, total[k], mask);
        if (lane < 4) all[2 * columns * warp + 2 * (k / 4 * 8 + lane * 2) + k % 4] = total[k];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < 2 * columns; at += threads) {
        if (block.column + at / 2 >= p.channels) break;
        float sum = 0;
        for (int other = 0; other < 4 * groups; ++other) sum += all[2 * columns * other + at];
        p.sums[(i64(block.worker) * p.channels + block.column) * 2 + at] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(threads, 1)
pixels(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier full[groups * stages], arrived[groups * buffers], filters_arrived;
    unsigned char* const filters = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);
    unsigned char* const inputs = filters + filter_bytes;
    unsigned char* const results = inputs + groups * stages * stage_bytes;
    T* const vectors = reinterpret_cast<T*>(results + groups * buffers * place_bytes);
    float* const before = reinterpret_cast<float*>(vectors + Epilogue::count * columns);

    // Place.
    if constexpr (Traits::stats) let_next_start();
    const Block block(p);
    const int at = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one value for a warp, as the compiler sees it now
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool leads = threadIdx.x % 128 == 0, feeds = threadIdx.x % 128 == 32;
    Group group = {inputs + at * stages * stage_bytes,
                   results + at * buffers * place_bytes,
                   full + at * stages,
                   arrived + at * buffers,
                   block.worker * groups + at,
                   block.workers * groups};
    group.tiles = max(0, (p.tiles - group.first + group.step - 1) / group.step);
    if (leads) {
        for (int i = 0; i < stages; ++i) bulk::init(group.full[i], 1);
        for (int i = 0; i < buffers; ++i) bulk::init(group.arrived[i], 1);
        if (at == 0) bulk::init(filters_arrived, 1);
        bulk::publish();
        if (at == 0) bring_filters(p, block, filters, filters_arrived);
        bring(p, group, 0, stages);
        if constexpr (held)
            for (int i = 0; i < buffers; ++i) bring_held(p, block, group, i);
    }
    bring_vectors(p, block, vectors, before);
    __syncthreads();
    bulk::wait(filters_arrived, 0);

    float total[Traits::stats ? columns / 2 : 1] = {};
    const u64 a = tensor::descriptor(group.inputs),
              b = Traits::forward ? tensor::descriptor(filters) : tensor::turned_descriptor(filters, depth * 128);
    for (int i = 0; i < group.tiles; ++i) {
        const Place first = group.place(p, i);
        float sum[columns / 2];
#pragma unroll
        for (int k = 0; k < columns / 2; ++k) sum[k] = 0;

        // Multiply.
        if constexpr (Prologue::there)
            multiply_changed(sum, group, before, b, i, warp, lane);
        else
            multiply(sum, group, a, b, i);

        u32 valid[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = 16 * warp + lane / 4 + 8 * h;
            const bool inside = first.x + row % across < p.width && first.y + row / across < p.height;
            valid[h] = inside && row < rows ? ~0u : 0u;
        }
#pragma unroll
        for (int c = 0; c < boxes; ++c) {
            // Compute.
            const int box = i * boxes + c, buffer = box % buffers;
            unsigned char* const to = group.results + buffer * place_bytes;
            if constexpr (held) bulk::wait(group.arrived[buffer], box / buffers & 1);
            finish(p, sum, c, to, vectors, total, valid, warp, lane);
            bulk::written();
            if (!held && leads) bulk::read_but<buffers - 2>();  // the place of the next box
            bulk::sync_group(at);

            // Store, and ask for more.
            if (c == 0 && feeds) bring(p, group, i * parts + stages, (i + 1) * parts + stages);
            if (leads) {
                bulk::store(to, p.result, block.column + 64 * c, first.x, first.y, first.image);
                bulk::commit();
                if constexpr (held)
                    if (box > 0) {
                        bulk::read_but<1>();
                        bring_held(p, block, group, box - 1 + buffers);
                    }
            }
        }
    }
    if (leads) bulk::read_but<0>();
    if constexpr (Traits::stats) {
        __syncthreads();  // no store reads results any more
        join(p, block, reinterpret_cast<float*>(results), total);
    }
}
