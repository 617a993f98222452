// Matrices transposed, those of one tensor or of two in a launch: to[b][c][a] = from[b][a][c]. What is written of a
// matrix begins at b * matrix, what is read at three steps for the digits of b. So the first and the last of a tensor's
// axes change places: a filter gradient's images and channels.
//
// A block has 32 rows a by 64 columns c of one matrix; blocks of the first tensor come first. It reads along c and
// writes along a, 16 bytes a thread where sizes allow, through shared memory.
//
// Shared memory: the part of the matrix as it is read, a row a behind the other, in pieces of 16 bytes. Those of row a
// are in the order of (piece ^ a / V), V elements being 16 bytes: eight threads that store pieces of a row, and 32 that
// collect columns of rows V apart, meet all banks.
//
// Traits: Element (of the same size, without a meaning), tensors, and of each from_vector and to_vector.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Element;
constexpr int tensors = Traits::tensors, threads = 256, tile_a = 32, tile_c = 64;
constexpr int V = 16 / int(sizeof(T)), pieces = tile_c / V;
static_assert(tile_a / V <= pieces, "each row of pieces has an order of its own");
static_assert(tile_c * sizeof(T) % 128 == 0, "rows begin at the same bank");

struct Steps {
    i64 row, matrix, column;  // from a to a and digit by digit in what is read; matrix and column in what is written
    i64 outer, middle, inner;
};

struct Counts {
    int rows, columns;
    Divisor row_tiles, column_tiles, middle, inner;
};

struct Params {
    const T* from[tensors];
    T* to[tensors];
    Steps steps[tensors];
    Counts counts[tensors];
    int first_blocks;
};

__device__ __forceinline__ int place(int a, int c) { return a * tile_c + ((c / V) ^ (a / V)) * V + c % V; }

template <int at>
__device__ __forceinline__ void part(const Params& p, T* tile, int block) {
    constexpr int FV = Traits::from_vector[at], TV = Traits::to_vector[at];
    const Steps& steps = p.steps[at];
    const Counts& counts = p.counts[at];
    const int c0 = counts.column_tiles.split(block) * tile_c, a0 = counts.row_tiles.split(block) * tile_a;
    const int rows = counts.rows - a0, columns = counts.columns - c0, b = block;
    int outer = b;
    const int inner = counts.inner.split(outer), middle = counts.middle.split(outer);
    const i64 first = outer * steps.outer + middle * steps.middle + inner * steps.inner;
    const T* from = p.from[at] + first + a0 * steps.row + c0;
    T* to = p.to[at] + b * steps.matrix + c0 * steps.column + a0;

    constexpr int wide = tile_c / FV, loads = tile_a * wide / threads;
    Pack<T, FV> values[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) {
        const int each = threadIdx.x + i * threads, a = each / wide, c = each % wide * FV;
        if (a < rows && c < columns) values[i] = load<FV>(from + a * steps.row + c);
    }
#pragma unroll
    for (int i = 0; i < loads; ++i) {
        const int each = threadIdx.x + i * threads, a = each / wide, c = each % wide * FV;
        store(tile + place(a, c), values[i]);
    }
    __syncthreads();
    constexpr int high = tile_a / TV, stores = tile_c * high / threads;
#pragma unroll
    for (int i = 0; i < stores; ++i) {
        const int each = threadIdx.x + i * threads, c = each / high, a = each % high * TV;
        Pack<T, TV> together;
#pragma unroll
        for (int k = 0; k < TV; ++k) together.value[k] = tile[place(a + k, c)];
        if (a < rows && c < columns) store(to + c * steps.column + a, together);
    }
}

extern "C" __global__ void __launch_bounds__(threads)
exchanged(const __grid_constant__ Params p) {
    alignas(16) __shared__ T tile[tile_a * tile_c];
    const int block = blockIdx.x - p.first_blocks;
    if (tensors == 1 || block < 0)
        part<0>(p, tile, blockIdx.x);
    else
        part<tensors - 1>(p, tile, block);
}
