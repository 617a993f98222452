// The gradient of a few-channel filter: sums over the image, first stage.
//
//     partial[c, r, s, block] = sum over the block's n,p,q of  dy[n, c, p, q] * x[n, c, p - top + r, q - left + s]
//
// A block takes `tiles_each` tiles of tile_rows x 4*across pixels one after the other, one channel and a block of up to
// 7 rows of taps. Tiles of dy and x lie in shared memory. A warp keeps the sums of a block of taps, at most 7 rows of 4
// or 5, in registers through all of its tiles: a thread walks down 8 rows of 4 pixels, and a row of x, loaded once,
// meets the rows of dy that are still held. A 5x4 block takes 32 vector loads for 640 multiply-adds: a vector load has
// 4 cycles of the multiprocessor, as long as 16 multiply-adds, so that these set the pace. Warps differ in their
// columns of taps and in their rows of the tile; at the end lanes, then warps are added up in one order.
//
// A product that the definition does not have must not be formed, since it may be NaN: where 8 x 4 pixels hang over the
// edge of dy, the rows that are there are taken one by one, and pixels too where fewer than 4 of a row are there.
//
// Shared memory: dy [tile_rows][4*across], x [tile_rows + 6][4*across + S-1 up to 4], sums [strips][7 * S].
//
// Traits: A (x), B (dy), Index; filter_rows, filter_columns, channels, channels_last, tile_rows, across, strips.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/divide.cuh"
#include "common/filter2d.cuh"
#include "common/epilogue.cuh"
#include "traits"

using Index = Traits::Index;
using Acc = FilterSum<Traits::A>::type;

struct Params {
    const Traits::A* x;
    const Traits::B* dy;
    Acc* partial;
    int height, width;  // of x
    int rows, columns;  // of dy
    int top, left;
    Divisor tiles_down, tiles_across;
    int tiles, tiles_each, parts;  // of all images, of a block; blocks that add to a tap
};

constexpr int R = Traits::filter_rows, S = Traits::filter_columns;
constexpr int C = Traits::channels, step = Traits::channels_last ? C : 1;
constexpr int across = Traits::across, tile_rows = Traits::tile_rows, tile_columns = 4 * across;
using Rows = RowBlocks<R, 7>;
using Columns = ColumnBlocks<S>;
constexpr int strip_rows = 8, units = Traits::strips * (32 / across), repeats = tile_rows / (strip_rows * units);
constexpr int warps = Traits::strips * Columns::count, threads = 32 * warps;
constexpr int pitch = up_to(tile_columns + S - 1, 4);
static_assert(across <= 32 && tile_rows == strip_rows * units * repeats, "a tile is cut into whole strips");

using Sums = Acc[Rows::tallest][Columns::widest];

// Height rows of 4 pixels: `x` is at the thread's first value for the block's first tap, `dy` at its first pixel.
template <int Height, int TapRows, int TapColumns>
__device__ __forceinline__ void add_strip(Sums& sums, const Acc* x, const Acc* dy) {
    Acc pixel[Height][4];
#pragma unroll
    for (int i = 0; i < Height + TapRows - 1; ++i) {
        Acc value[up_to(TapColumns + 3, 4)];
        read_row<TapColumns + 3>(value, x + i * pitch);
        if (i < Height) read_row<4>(pixel[i], dy + i * tile_columns);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < TapRows; ++r) {
                const int y = i - r;
                if (y < 0 || y >= Height) continue;
#pragma unroll
                for (int s = 0; s < TapColumns; ++s) sums[r][s] += pixel[y][j] * value[j + s];
            }
    }
}

template <int TapRows, int TapColumns>
__device__ __forceinline__ void add_pixel(Sums& sums, const Acc* x, Acc dy) {
#pragma unroll
    for (int r = 0; r < TapRows; ++r)
#pragma unroll
        for (int s = 0; s < TapColumns; ++s) sums[r][s] += dy * x[r * pitch + s];
}

// A thread's share of a tile, of which dy has `rows` x `columns` pixels from the thread's column on.
template <int TapRows, int TapColumns>
__device__ __forceinline__ void add_tile(Sums& sums, const Acc* x, const Acc* dy, int unit, int rows, int columns) {
    if (columns <= 0) return;
#pragma unroll 1
    for (int k = 0; k < repeats; ++k) {
        const int row = (k * units + unit) * strip_rows, left = min(strip_rows, rows - row);
        const Acc* const from = x + row * pitch;
        const Acc* const by = dy + row * tile_columns;
        if (columns >= 4 && left == strip_rows) {
            add_strip<strip_rows, TapRows, TapColumns>(sums, from, by);
        } else if (columns >= 4) {
#pragma unroll 1
            for (int y = 0; y < left; ++y)
                add_strip<1, TapRows, TapColumns>(sums, from + y * pitch, by + y * tile_columns);
        } else {
#pragma unroll 1
            for (int y = 0; y < left; ++y)
#pragma unroll 1
                for (int j = 0; j < columns; ++j)
                    add_pixel<TapRows, TapColumns>(sums, from + y * pitch + j, by[y * tile_columns + j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(threads)
filter2d_wgrad(const __grid_constant__ Params p) {
    __shared__ Pack<Acc, 4> x_packs[(tile_rows + Rows::tallest - 1) * pitch / 4];
    __shared__ Pack<Acc, 4> dy_packs[tile_rows * tile_columns / 4];
    __shared__ Acc totals[Traits::strips * Rows::tallest * S];
    Acc* const x_tile = reinterpret_cast<Acc*>(x_packs);
    Acc* const dy_tile = reinterpret_cast<Acc*>(dy_packs);
    let_next_start();

    // Place. Blocks of the same pixels come one after the other.
    const int block = blockIdx.x, channel = block % C, row_block = block / C % Rows::count;
    const int part = block / (C * Rows::count);
    const int first_row = Rows::start(row_block), tap_rows = Rows::tallest - (row_block >= Rows::tall);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int strip = warp % Traits::strips, column_block = warp / Traits::strips;
    const int unit = strip * (32 / across) + lane / across, column = lane % across * 4;
    const bool last = column_block == Columns::count - 1;
    const Acc* const x = x_tile + column + 4 * column_block;
    const Acc* const dy = dy_tile + column;

    Sums sums = {};
    const int end = min(p.tiles, (part + 1) * p.tiles_each);
    for (int tile = part * p.tiles_each; tile < end; ++tile) {
        // Load.
        int image = tile;
        const int tile_column = p.tiles_across.split(image) * tile_columns;
        const int tile_row = p.tiles_down.split(image) * tile_rows;
        const Index plane = step > 1 ? Index(image) : Index(image) * C + channel;
        const int offset = step > 1 ? channel : 0;
        __syncthreads();  // the tile before is not read any more
        stage<tile_rows, tile_columns, tile_columns, step, warps, Acc, Traits::B, Index>(
            dy_tile, p.dy + plane * p.rows * p.columns * step + offset, tile_row, tile_column, p.rows, p.columns);
        stage<tile_rows + Rows::tallest - 1, tile_columns + S - 1, pitch, step, warps, Acc, Traits::A, Index>(
            x_tile, p.x + plane * p.height * p.width * step + offset, tile_row - p.top + first_row,
            tile_column - p.left, p.height, p.width);
        __syncthreads();

        // Compute.
        const int rows = p.rows - tile_row, columns = p.columns - tile_column - column;
        constexpr int shorter = Rows::tallest - (Rows::tallest > 1);
        if (tap_rows == Rows::tallest) {
            if (last)
                add_tile<Rows::tallest, Columns::last>(sums, x, dy, unit, rows, columns);
            else if constexpr (Columns::count > 1)
                add_tile<Rows::tallest, 4>(sums, x, dy, unit, rows, columns);
        } else if constexpr (Rows::tall < Rows::count) {
            if (last)
                add_tile<shorter, Columns::last>(sums, x, dy, unit, rows, columns);
            else if constexpr (Columns::count > 1)
                add_tile<shorter, 4>(sums, x, dy, unit, rows, columns);
        }
    }

    // Add up lanes, then warps.
#pragma unroll
    for (int r = 0; r < Rows::tallest; ++r)
#pragma unroll
        for (int s = 0; s < Columns::widest; ++s) {
            Acc sum = sums[r][s];
#pragma unroll
            for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
            if (lane == 0 && s < (last ? Columns::last : 4))
                totals[(strip * Rows::tallest + r) * S + 4 * column_block + s] = sum;
        }
    __syncthreads();

    // Store.
    for (int tap = threadIdx.x; tap < tap_rows * S; tap += threads) {
        Acc sum = totals[tap];
#pragma unroll
        for (int other = 1; other < Traits::strips; ++other) sum += totals[other * Rows::tallest * S + tap];
        p.partial[((i64(channel) * R + first_row) * S + tap) * p.parts + part] = sum;
    }
}
