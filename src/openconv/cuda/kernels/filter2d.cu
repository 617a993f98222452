// Few-channel filters of stride 1: each channel of an image by a filter of its own.
//
//     fprop   y[n,c,p,q]  = sum over r,s of  x[n, c, p - top + r, q - left + s] * w[c, r, s]
//     dgrad   dx[n,c,h,w] = the same of dy with the filter turned by half a turn, top = R-1-pad, left = S-1-pad
//
// A thread owns thread_rows x 4 neighbouring results in registers. It walks down the rows of the image; a row's 4+S-1
// values serve all filter rows that they meet, so that with 8 rows a 3x3 filter takes 288 multiply-adds for 10 x 6
// values. Threads lie `across` x (threads / across) over a tile of the result. A result's products are added in an
// order that does not depend on the tile.
//
//   direct: rows are loaded as vectors of 4 through the first-level cache, and the whole filter lies in registers: no
//           barrier, no shared memory. A row's elements, interleaved channels or not, are one sequence in which a tap
//           is `step` elements from the next. Asks for rows of a multiple of 4 elements, so that a vector lies wholly
//           inside of the image or outside. `shift` is where the first value lies in its vector, known beforehand.
//   staged: the tile with its rim lies in shared memory in the type of sums, one channel a block. The filter is taken
//           in blocks of at most 5x5 taps that wait in registers; thread_rows = 8 takes 29 vector loads for the 640
//           multiply-adds of a 5x4 block. A load of 16 bytes a lane takes 4 cycles, and so do 16 multiply-adds: these
//           set the pace.
//   staged, of a channel that filter2d_factors.cu found separable: sums down the columns take the place of the tile's
//           first rows, then the thread's results are sums along those. Down first, since a tile is wider than tall:
//           128 + S-1 columns are summed for 128 results, where along first 32 + R-1 rows would be for 32. Warps of 32
//           columns each take 160: 1.25 * R + S multiply-adds a result. Of a tile of 32 x 128, in instructions of a
//           warp, of which a multiprocessor starts 4 a cycle, and cycles of its shared memory:
//
//               15x15: 5 x 527 down, 4 x 537 along, 2.0 k to fill and store: 6.8 k or 1.7 k cycles
//                      200 to fill, 440 + 160 down, 640 along: 1.4 k cycles
//               31x31: 5 x 1059, 4 x 1079, 2.7 k: 12.3 k or 3.1 k cycles; 310 + 760 + 160 + 1150: 2.4 k cycles
//
//           Of 4000x4000 an H200 has 4000 tiles for 132 multiprocessors of 1.7 GHz: 30 and 55 us if every cycle were
//           used, beside 30 us of memory traffic that other blocks overlap with.
//
// Shared memory (staged): the tile [tile_rows + R-1][4*across + S-1 up to 4], the filter [R][S up to 4] or its factors;
// at the end each warp's part of the tile turns its results around for a store that no alignment disturbs.
//
// Traits: A, B, Out, Sum, Index, Epilogue; filter_rows, filter_columns, flipped, channels, channels_last, staged,
// shift, thread_rows, across, threads, separable (look at the factors), tensor_operands (bit i: operand i is a tensor).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/filter2d.cuh"
#include "traits"

using Index = Traits::Index;
using Acc = FilterSum<Traits::A>::type;

struct Params {
    const Traits::A* a;
    const Traits::B* b;
    Traits::Out* out;
    const Factors<Acc>* factors;  // one for each channel, where Traits::separable
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int height, width;  // of the image
    int rows, columns;  // of the result
    int top, left;      // padding; negative where results start inside of the image
    Divisor tiles_down, tiles_across;
};

constexpr int R = Traits::filter_rows, S = Traits::filter_columns;
constexpr int C = Traits::channels, step = Traits::channels_last ? C : 1;
constexpr int thread_rows = Traits::thread_rows, across = Traits::across;
constexpr int strips = Traits::threads / across, tile_rows = strips * thread_rows, tile_columns = 4 * across;
static_assert(Traits::threads % 32 == 0 && Traits::threads % across == 0, "a tile is covered by whole rows of threads");

__device__ __forceinline__ Acc weight(const Params& p, int channel, int r, int s) {
    return read_tap<Acc, R, S, Traits::flipped>(p.b + channel * (R * S), r, s);
}

// Rows of the result, and of the tensors that it is combined with, all start at a multiple of a vector.
__device__ __forceinline__ bool vectors(const Params& p, int row_elements) {
    u64 places = u64(p.out);
#pragma unroll
    for (int i = 0; i < Traits::Epilogue::count; ++i)
        if (Traits::tensor_operands >> i & 1) places |= u64(p.operands[i]);
    return row_elements % 4 == 0 && places % (4 * sizeof(Traits::Out)) == 0;
}

__device__ __forceinline__ void store_one(const Params& p, Acc acc, int channel, Index at) {
    Traits::Sum result[1] = {Traits::Sum(acc)};
    Traits::Epilogue::apply<1, Traits::channels_last>(result, p.operands, channel, at);
    p.out[at] = Traits::Out(result[0]);
}

// Four results side by side; along channels as many at once as their number divides, and from `channel` on.
__device__ __forceinline__ void store_four(const Params& p, const Acc (&acc)[4], int channel, Index at) {
    constexpr int together = step == 1 ? 4 : step == 3 ? 1 : step;
    Pack<Traits::Out, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; j += together) {
        Traits::Sum result[together];
#pragma unroll
        for (int i = 0; i < together; ++i) result[i] = Traits::Sum(acc[j + i]);
        Traits::Epilogue::apply<together, Traits::channels_last>(
            result, p.operands, together == 1 ? (channel + j) % step : channel, at + j);
#pragma unroll
        for (int i = 0; i < together; ++i) pack.value[j + i] = Traits::Out(result[i]);
    }
    store<4>(p.out + at, pack);
}

// -- direct ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void direct(const Params& p, int tile_down, int tile_across, int plane) {
    // Place.
    const int image_row = p.width * step, result_row = p.columns * step;
    const int column = (tile_across * across + int(threadIdx.x) % across) * 4;  // an element of the result's row
    const int row = (tile_down * strips + int(threadIdx.x) / across) * thread_rows;
    if (column >= result_row || row >= p.rows) return;
    const int channel = Traits::channels_last ? column % step : plane % C;

    // Load the filter: weights[k] is that of the thread's elements k, k + step, ...
    Acc weights[step][R][S];
#pragma unroll
    for (int k = 0; k < step; ++k)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < S; ++s) weights[k][r][s] = weight(p, step > 1 ? (channel + k) % step : channel, r, s);

    // Compute.
    constexpr int shift = Traits::shift, packs = (shift + 4 + (S - 1) * step + 3) / 4;
    const int first = column - p.left * step - shift;
    bool inside[packs];
#pragma unroll
    for (int v = 0; v < packs; ++v) inside[v] = unsigned(first + 4 * v) < unsigned(image_row);
    const Traits::A* from = p.a + (Index(plane) * p.height + row - p.top) * image_row + first;
    Acc acc[thread_rows][4] = {};
#pragma unroll
    for (int i = 0; i < thread_rows + R - 1; ++i) {
        Acc value[4 * packs];
        const bool there = unsigned(row - p.top + i) < unsigned(p.height);
#pragma unroll
        for (int v = 0; v < packs; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) value[4 * v + j] = Acc(0);
            if (there && inside[v]) {
                const Pack<Traits::A, 4> pack = load<4>(from + 4 * v);
#pragma unroll
                for (int j = 0; j < 4; ++j) value[4 * v + j] = widen<Acc>(pack.value[j]);
            }
        }
        from += image_row;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const int y = i - r;
            if (y < 0 || y >= thread_rows) continue;
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[y][j] += weights[j % step][r][s] * value[shift + j + s * step];
        }
    }

    // Store.
    const bool wide = vectors(p, result_row);
    const Index out = (Index(plane) * p.rows + row) * result_row + column;
#pragma unroll
    for (int y = 0; y < thread_rows; ++y) {
        if (row + y >= p.rows) break;
        if (wide) {
            store_four(p, acc[y], channel, out + Index(y) * result_row);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < result_row)
                    store_one(p, acc[y][j], step > 1 ? (channel + j) % step : channel, out + Index(y) * result_row + j);
        }
    }
}

// -- staged ----------------------------------------------------------------------------------------------------------

constexpr int pitch = up_to(tile_columns + S - 1, 4), filter_pitch = up_to(S, 4);
using Rows = RowBlocks<R, 5>;
using Columns = ColumnBlocks<S>;

// A block of taps on a thread's results: `tile` is at the thread's first value for the block's first tap.
template <int TapRows, int TapColumns>
__device__ __forceinline__ void add_block(Acc (&acc)[thread_rows][4], const Acc* tile, const Acc* filter) {
    Acc weights[TapRows][up_to(TapColumns, 4)];
    read_anew();
#pragma unroll
    for (int r = 0; r < TapRows; ++r) read_row<TapColumns>(weights[r], filter + r * filter_pitch);
#pragma unroll
    for (int i = 0; i < thread_rows + TapRows - 1; ++i) {
        Acc value[up_to(TapColumns + 3, 4)];
        read_row<TapColumns + 3>(value, tile + i * pitch);
#pragma unroll
        for (int r = 0; r < TapRows; ++r) {
            const int y = i - r;
            if (y < 0 || y >= thread_rows) continue;
#pragma unroll
            for (int s = 0; s < TapColumns; ++s)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[y][j] += weights[r][s] * value[j + s];
        }
    }
}

template <int TapRows>
__device__ __forceinline__ void add_rows(Acc (&acc)[thread_rows][4], const Acc* tile, const Acc* filter) {
#pragma unroll 1
    for (int b = 0; b < Columns::count - 1; ++b) add_block<TapRows, 4>(acc, tile + 4 * b, filter + 4 * b);
    constexpr int last = 4 * (Columns::count - 1);
    add_block<TapRows, Columns::last>(acc, tile + last, filter + last);
}

// Sums down the tile's columns, of which row y takes the place of the tile's row y. A warp owns all rows of its columns
// and reads them before it writes: 32 / strips vectors side by side, `strips` times thread_rows sums each.
__device__ __forceinline__ void add_down(Acc* tile, const Acc* down) {
    static_assert(strips <= 32, "a warp covers the rows of the tile");
    constexpr int together = 32 / strips;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * together; first < pitch / 4; first += Traits::threads / 32 * together) {
        const int vector = first + lane % together;
        const bool mine = vector < pitch / 4;
        Acc* at = tile + lane / together * thread_rows * pitch + 4 * (mine ? vector : first);
        Acc weights[up_to(R, 4)], acc[thread_rows][4] = {};
        read_row<R>(weights, down);
#pragma unroll
        for (int i = 0; i < thread_rows + R - 1; ++i) {
            Acc value[4];
            read_row<4>(value, at + i * pitch);
#pragma unroll
            for (int y = 0; y < thread_rows; ++y) {
                if (i - y < 0 || i - y >= R) continue;
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[y][j] += weights[i - y] * value[j];
            }
        }
        __syncwarp();
        if (mine) {
#pragma unroll
            for (int y = 0; y < thread_rows; ++y) {
                Pack<Acc, 4> pack;
#pragma unroll
                for (int j = 0; j < 4; ++j) pack.value[j] = acc[y][j];
                store<4>(at + y * pitch, pack);
            }
        }
    }
}

// Sums along the rows of those: `tile` is at the thread's first. Four rows at once share the weights that are read.
__device__ __forceinline__ void add_along(Acc (&acc)[thread_rows][4], const Acc* tile, const Acc* along) {
    static_assert(!Traits::separable || thread_rows % 4 == 0, "rows are taken by four");
#pragma unroll
    for (int y = 0; y < thread_rows; y += 4) {
        Acc value[4][8];
#pragma unroll
        for (int i = 0; i < 4; ++i) read_four(value[i], tile + (y + i) * pitch);
#pragma unroll
        for (int first = 0; first < S; first += 4) {
            const int taps = min(4, S - first);
            Acc weights[4];
            read_row<4>(weights, along + first);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (taps > 1) read_four(value[i] + 4, tile + (y + i) * pitch + first + 4);
#pragma unroll
                for (int s = 0; s < taps; ++s)
#pragma unroll
                    for (int j = 0; j < 4; ++j) acc[y + i][j] += weights[s] * value[i][j + s];
#pragma unroll
                for (int j = 0; j < 4; ++j) value[i][j] = value[i][j + 4];
            }
        }
    }
}

__device__ __forceinline__ void staged(const Params& p, int tile_down, int tile_across, int image, int channel,
                                       Acc* tile, Acc* filter) {
    const int thread = threadIdx.x, column = thread % across * 4, row = thread / across * thread_rows;

    // Load.
    const Traits::A* plane = p.a + (step > 1 ? Index(image) * p.height * p.width * step + channel
                                             : (Index(image) * C + channel) * p.height * p.width);
    stage<tile_rows + R - 1, tile_columns + S - 1, pitch, step, Traits::threads / 32, Acc, Traits::A, Index>(
        tile, plane, tile_down * tile_rows - p.top, tile_across * tile_columns - p.left, p.height, p.width);
    bool separable = false;
    if constexpr (Traits::separable) {
        wait_for_previous();
        separable = p.factors[channel].separable;
    }
    if (separable) {
        const Acc* from = p.factors[channel].along;  // `down` is behind it
        for (int i = thread; i < 2 * Factors<Acc>::most; i += Traits::threads) filter[i] = from[i];
    } else {
        for (int i = thread; i < R * S; i += Traits::threads)
            filter[i / S * filter_pitch + i % S] = weight(p, channel, i / S, i % S);
    }
    __syncthreads();

    // Compute.
    Acc acc[thread_rows][4] = {};
    const Acc* mine = tile + row * pitch + column;
    if (separable) {
        static_assert(!Traits::separable || R * filter_pitch >= 2 * Factors<Acc>::most, "factors lie in its place");
        add_down(tile, filter + Factors<Acc>::most);
        __syncthreads();
        add_along(acc, mine, filter);
    } else {
#pragma unroll 1
        for (int b = 0; b < Rows::tall; ++b) {
            const int r = b * Rows::tallest;
            add_rows<Rows::tallest>(acc, mine + r * pitch, filter + r * filter_pitch);
        }
#pragma unroll 1
        for (int b = Rows::tall; b < Rows::count; ++b) {
            const int r = Rows::start(b);
            add_rows<Rows::tallest - (Rows::tallest > 1)>(acc, mine + r * pitch, filter + r * filter_pitch);
        }
    }

    // Store.
    const Index out = step > 1 ? Index(image) * p.rows * p.columns * step + channel
                               : (Index(image) * C + channel) * p.rows * p.columns;
    if (step == 1 && vectors(p, p.columns)) {
        if (tile_across * tile_columns + column >= p.columns) return;
#pragma unroll
        for (int y = 0; y < thread_rows; ++y) {
            const int at = tile_down * tile_rows + row + y;
            if (at < p.rows)
                store_four(p, acc[y], channel, out + Index(at) * p.columns + tile_across * tile_columns + column);
        }
        return;
    }
    __syncthreads();  // the tile is not read any more
    const int warp = thread / 32 * 32, lane = thread % 32;
    Acc* turn = tile + 4 * warp;
#pragma unroll
    for (int y = 0; y < thread_rows; ++y) {
        Pack<Acc, 4> pack;
#pragma unroll
        for (int j = 0; j < 4; ++j) pack.value[j] = acc[y][j];
        store<4>(turn + 4 * lane, pack);
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int element = 32 * k + lane, owner = warp + element / 4;
            const int r = tile_down * tile_rows + owner / across * thread_rows + y;
            const int q = tile_across * tile_columns + owner % across * 4 + element % 4;
            if (r < p.rows && q < p.columns)
                store_one(p, turn[element], channel, out + (Index(r) * p.columns + q) * step);
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads)
filter2d(const __grid_constant__ Params p) {
    // Blocks that share lines of memory come one after the other: channels of the same pixels first, then tiles.
    int block = blockIdx.x;
    if constexpr (Traits::staged) {
        __shared__ Pack<Acc, 4> tile[(tile_rows + R - 1) * pitch / 4], filter[R * filter_pitch / 4];
        int channel = step > 1 ? block % C : 0;
        if (step > 1) block /= C;
        const int tile_across = p.tiles_across.split(block), tile_down = p.tiles_down.split(block);
        if (step == 1) {
            channel = block % C;
            block /= C;
        }
        staged(p, tile_down, tile_across, block, channel, reinterpret_cast<Acc*>(tile), reinterpret_cast<Acc*>(filter));
    } else {
        const int tile_across = p.tiles_across.split(block), tile_down = p.tiles_down.split(block);
        direct(p, tile_down, tile_across, block);
    }
}
