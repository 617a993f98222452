// A 1x1 convolution as a stream of pixels past filters that stay: result[pixel, n] = sum over d of a[pixel, d] * b[n, d]
//
// d counts the channels of the input, n those of the result. Memory is the limit: of 64 channels that become 256, a
// pixel has 640 bytes and 32768 operations, and an H200 has 180 operations for each byte. So a block stays for its whole
// life on its multiprocessor, with its filters in shared memory, and takes one tile of pixels after the other: one warp
// asks for boxes of the input, and of a tensor that the epilogue reads, as far ahead as there is room; eight warps
// multiply, compute the epilogue where that tensor lies, and one of their threads has the results stored from there.
//
// A tile is `rows` pixels by `columns` results. The two warpgroups share its rows or its columns. A sum is changed by the
// thread that has it: two results side by side, at the place that common/wgmma.cuh's swizzle gives them, which puts the
// words of a warp into all 32 banks.
//
// Shared memory: filters [depth / 64][columns], the ring of inputs [stages][depth / 64][rows], and results
// [buffers][columns / 64][rows], all in rows of 128 bytes; then the vectors of the epilogue, [count][columns].
//
// A prologue is computed where the input lies, in front of the products. Statistics are summed up from the results there,
// by each thread for two channels over the tiles of the block, and stored at its end: parts[worker, channel, 2].
//
// Traits: A (of all tensors), Out, Sum, Epilogue, Prologue, stats; depth, columns, row_groups, stages, buffers, residents,
// forward (filters lie along d, else along n), held (which operand of the epilogue comes as boxes, -1: none), channels
// (bits: which are vectors).

#include "common/types.cuh"
#include "common/bulk_ring.cuh"
#include "common/epilogue.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"

namespace igemm {
// N values of a prologue's vector, f32, from a multiple of N on.
template <int N, class Sum>
__device__ __forceinline__ void read_vector(Sum (&value)[N], const void* vector, int first) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = static_cast<const float*>(vector)[first + i];
}
}  // namespace igemm

#include "traits"

using T = Traits::A;
using Sum = Traits::Sum;
using Epilogue = Traits::Epilogue;
using Prologue = Traits::Prologue;

constexpr int depth = Traits::depth, columns = Traits::columns, stages = Traits::stages, buffers = Traits::buffers;
constexpr int row_groups = Traits::row_groups, column_groups = 2 / row_groups, rows = 64 * row_groups;
constexpr int width = columns / column_groups;  // of a warpgroup
constexpr int threads = 256, pointers = Prologue::count + Epilogue::count;
constexpr int filter_bytes = depth / 64 * columns * 128, input_bytes = depth / 64 * rows * 128;
constexpr int result_bytes = columns / 64 * rows * 128;
constexpr bool held = Traits::held >= 0;
static_assert(depth % 64 == 0 && columns % 64 == 0 && width <= 256, "whole rows of 128 bytes, and sums of a thread");
static_assert(stages > 0 && buffers > 1, "a ring, and a place for results while others are stored");

struct Params {
    const T* x;  // read by its map
    const T* w;
    T* out;  // by its map, too
    const void* operands[pointers > 0 ? pointers : 1];
    float* parts;
    int channels, pixels, tiles, column_tiles;
    bulk::Map input, result, other;
};

struct Block {
    int column, worker, workers;

    __device__ __forceinline__ Block(const Params& p)
        : column(blockIdx.x % p.column_tiles * columns),
          worker(blockIdx.x / p.column_tiles),
          workers(gridDim.x / p.column_tiles) {}
};

// The filters of a block's columns, as products read them; what is behind the last is 0.
__device__ __forceinline__ void bring_filters(const Params& p, const Block& block, unsigned char* filters) {
    if constexpr (Traits::forward) {
        constexpr int pieces = depth / 8;
        for (int i = threadIdx.x; i < columns * pieces; i += threads) {
            const int row = i / pieces, piece = i % pieces;
            Pack<T, 8> found = {};
            if (block.column + row < p.channels) found = load<8>(p.w + i64(block.column + row) * depth + 8 * piece);
            *reinterpret_cast<Pack<T, 8>*>(filters + piece / 8 * columns * 128 + tensor::swizzled(row, piece % 8)) =
                found;
        }
    } else {
        constexpr int pieces = columns / 8;
        for (int i = threadIdx.x; i < depth * pieces; i += threads) {
            const int d = i / pieces, first = i % pieces * 8;
            Pack<T, 8> found = {};
            if (block.column + first < p.channels) found = load<8>(p.w + i64(d) * p.channels + block.column + first);
            unsigned char* const to = filters + d / 64 * columns * 128 + d % 8 * 2;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                *reinterpret_cast<T*>(to + tensor::swizzled(first + k, d % 64 / 8)) = found.value[k];
        }
    }
}

__device__ __forceinline__ void bring_vectors(const Params& p, const Block& block, T* vectors) {
#pragma unroll
    for (int k = 0; k < Epilogue::count; ++k)
        if (Traits::channels >> k & 1)
            for (int i = threadIdx.x; i < columns; i += threads)
                vectors[k * columns + i] =
                    block.column + i < p.channels
                        ? static_cast<const T*>(p.operands[Prologue::count + k])[block.column + i]
                        : T(0.0f);
}

// One thread: boxes of all tiles, as far ahead as there is room.
__device__ __forceinline__ void bring(const Params& p, const Block& block, unsigned char* inputs,
                                      unsigned char* results, bulk::Barrier* full, bulk::Barrier* empty,
                                      bulk::Barrier* arrived, bulk::Barrier* released) {
    for (int tile = block.worker, i = 0; tile < p.tiles; tile += block.workers, ++i) {
        const int stage = i % stages, buffer = i % buffers;
        if (i >= stages) bulk::wait(empty[stage], (i / stages - 1) & 1);
        bulk::expect(full[stage], input_bytes);
#pragma unroll
        for (int d = 0; d < depth / 64; ++d)
            bulk::copy(inputs + stage * input_bytes + d * rows * 128, p.input, full[stage], 1, 64 * d, tile * rows);
        if constexpr (held) {
            if (i >= buffers) bulk::wait(released[buffer], (i / buffers - 1) & 1);
            bulk::expect(arrived[buffer], result_bytes);
#pragma unroll
            for (int c = 0; c < columns / 64; ++c)
                bulk::copy(results + buffer * result_bytes + c * rows * 128, p.other, arrived[buffer], 1,
                           block.column + 64 * c, tile * rows);
        }
    }
}

// The prologue of a tile's inputs: a thread has eight channels, of some rows.
template <class Vectors>
__device__ __forceinline__ void change(unsigned char* input, const Vectors& vectors) {
    constexpr int pieces = depth / 8, between = threads / pieces;
    const int piece = threadIdx.x % pieces;
#pragma unroll
    for (int first = 0; first < rows; first += between) {
        const int row = first + threadIdx.x / pieces;
        if (threadIdx.x >= between * pieces || row >= rows) break;
        auto* const at =
            reinterpret_cast<Pack<T, 8>*>(input + piece / 8 * rows * 128 + tensor::swizzled(row, piece % 8));
        const Pack<T, 8> before = *at;
        Pack<T, 8> after;
        Sum value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = widen<Sum>(before.value[i]);
        vectors.apply(value);
#pragma unroll
        for (int i = 0; i < 8; ++i) after.value[i] = T(value[i]);
        *at = after;
    }
}

// The epilogue of a thread's sums, to where results lie in shared memory; a tensor that it reads lies there before.
__device__ __forceinline__ void finish(const Params& p, const float (&sum)[width / 2], unsigned char* results,
                                       const T* vectors, int warp, int lane) {
    const void* given[Epilogue::count > 0 ? Epilogue::count : 1];
#pragma unroll
    for (int k = 0; k < Epilogue::count; ++k)
        given[k] = k == Traits::held           ? static_cast<const void*>(results)
                   : Traits::channels >> k & 1 ? static_cast<const void*>(vectors + k * columns)
                                               : p.operands[Prologue::count + k];
    const int group = warp / 4, row = (row_groups > 1 ? 64 * group : 0) + 16 * (warp % 4) + lane / 4;
    const int first = column_groups > 1 ? width * group : 0;
#pragma unroll
    for (int j = 0; j < width / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = first + 8 * j + 2 * (lane % 4), at = row + 8 * h;
            const int place = column / 64 * rows * 128 + tensor::swizzled(at, column % 64 / 8) + column % 8 * 2;
            Sum pair[2] = {sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]};
            Epilogue::template apply<2, true>(pair, given, column, place / 2);
            *reinterpret_cast<Pack<T, 2>*>(results + place) = {T(pair[0]), T(pair[1])};
        }
}

// What a tile adds to a thread's two channels: their sum and the sum of their squares over its share of the rows.
constexpr int sharers = threads / (columns / 2);
__device__ __forceinline__ void add_up(float (&total)[4], const unsigned char* results, int valid) {
    const int column = threadIdx.x % (columns / 2) * 2;
#pragma unroll 8
    for (int row = threadIdx.x / (columns / 2); row < rows; row += sharers) {
        if (row >= valid) break;
        const int place = column / 64 * rows * 128 + tensor::swizzled(row, column % 64 / 8) + column % 8 * 2;
        const Pack<T, 2> pair = *reinterpret_cast<const Pack<T, 2>*>(results + place);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float value = float(pair.value[i]);
            total[2 * i] += value;
            total[2 * i + 1] += value * value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(threads + 32, Traits::residents)
pixels(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier full[stages], empty[stages], arrived[buffers], released[buffers];
    unsigned char* const filters = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);
    unsigned char* const inputs = filters + filter_bytes;
    unsigned char* const results = inputs + stages * input_bytes;
    T* const vectors = reinterpret_cast<T*>(results + buffers * result_bytes);

    // Place.
    const Block block(p);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == threads) {
        bulk::fetch_map(p.input);
        bulk::fetch_map(p.result);
        for (int i = 0; i < stages; ++i) {
            bulk::init(full[i], 1);
            bulk::init(empty[i], threads);
        }
        for (int i = 0; i < buffers; ++i) {
            bulk::init(arrived[i], 1);
            bulk::init(released[i], 1);
        }
        bulk::publish();
    }
    if (warp < 8) {
        bring_filters(p, block, filters);
        bring_vectors(p, block, vectors);
        tensor::shared_written();
    }
    __syncthreads();

    if (warp == 8) {
        // Copy.
        if (lane == 0) bring(p, block, inputs, results, full, empty, arrived, released);
        return;
    }
    typename Prologue::template Vectors<8> before;
    if constexpr (Prologue::there) before.read(p.operands, threadIdx.x % (depth / 8) * 8);
    float total[4] = {};
    const u64 a = tensor::descriptor(inputs + (row_groups > 1 ? warp / 4 * 64 * 128 : 0));
    const u64 b = tensor::descriptor(filters + (column_groups > 1 ? warp / 4 * width * 128 : 0));
    for (int tile = block.worker, i = 0; tile < p.tiles; tile += block.workers, ++i) {
        const int stage = i % stages, buffer = i % buffers;
        unsigned char* const to = results + buffer * result_bytes;

        // Multiply.
        bulk::wait(full[stage], i / stages & 1);
        if constexpr (Prologue::there) {
            change(inputs + stage * input_bytes, before);
            tensor::shared_written();
            bulk::sync_first<threads>();
        }
        float sum[width / 2];
#pragma unroll
        for (int k = 0; k < width / 2; ++k) sum[k] = 0;
        tensor::group_begin();
#pragma unroll
        for (int k = 0; k < depth / 16; ++k)
            tensor::group_product(sum, tensor::along(a, stage * input_bytes + k / 4 * rows * 128 + k % 4 * 32),
                                  tensor::along(b, k / 4 * columns * 128 + k % 4 * 32));
        tensor::group_commit();
        tensor::group_wait<0>(sum);
        bulk::arrive(empty[stage], 0);

        // Compute.
        if constexpr (held) {
            bulk::wait(arrived[buffer], i / buffers & 1);
        } else {
            if (threadIdx.x == 0) bulk::read_but<buffers - 1>();
            bulk::sync_first<threads>();
        }
        finish(p, sum, to, vectors, warp, lane);
        bulk::written();
        bulk::sync_first<threads>();

        // Store.
        if (threadIdx.x == 0) {
#pragma unroll
            for (int c = 0; c < columns / 64; ++c)
                bulk::store(to + c * rows * 128, p.result, block.column + 64 * c, tile * rows);
            bulk::commit();
            if constexpr (held) {
                bulk::read_but<1>();
                if (i > 0) bulk::arrive(released[(i - 1) % buffers], 0);
            }
        }
        if constexpr (Traits::stats) add_up(total, to, p.pixels - tile * rows);
    }
    if (threadIdx.x == 0) bulk::read_but<0>();
    if constexpr (Traits::stats) {
        bulk::sync_first<threads>();  // nobody reads results any more, nor does a store
        float* const all = reinterpret_cast<float*>(results);
#pragma unroll
        for (int k = 0; k < 4; ++k) all[4 * threadIdx.x + k] = total[k];
        bulk::sync_first<threads>();
        if (threadIdx.x < columns / 2) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float sum = 0;
                for (int other = 0; other < sharers; ++other) sum += all[4 * (other * (columns / 2) + threadIdx.x) + k];
                const int channel = block.column + 2 * threadIdx.x + k / 2;
                if (channel < p.channels) p.parts[(i64(block.worker) * p.channels + channel) * 2 + k % 2] = sum;
            }
        }
    }
}
