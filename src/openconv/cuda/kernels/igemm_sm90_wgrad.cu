// The gradient of a filter as a matrix product on Hopper's tensor cores: wgrad.
//
//     dw[k, (tap, c)] = sum over pixels of  dy[pixel, k] * x[place of the pixel + tap, c]
//
// Filters k are the rows of the product. Its columns come in boxes, each 64 channels of one tap: a tile has `boxes` of
// them, one behind the other, of one tap or of several. A step is `depth` pixels, one behind the other through rows and
// images. For each, four threads, one of each of the last warps, ask for boxes of dy, 64 filters wide, and for as many
// boxes of windows as the tile has columns (common/bulk_windows.cuh): boxes are small, and one thread asks too slowly.
// They come to a ring of `stages`; the other warps, in groups of four, multiply them from there. Pixels are the depth
// of the product and lie below each other in both operands, so that both lie across (common/wgmma_turned.cuh). Pixels
// behind the last are zeros on both sides.
//
// A group has 64 * `blocks` rows; `beside` groups have the same rows and divide the columns, so that a tile may have
// more columns than one product where filters are few.
//
// A block stays on its multiprocessor and takes one tile after the other, so that boxes of the next tile come while
// results of the last one leave. Tiles that run at a time have pixels in common, which then come from the second-level
// cache. `parted` tiles, of which several share a result's pixels, leave sums as they are, for igemm_sum.cu. Blocks of a
// `cluster` share a tile's pixels as well, and add their sums up before these leave (common/cluster_sums.cuh).
//
// Columns behind the last channel of a group are zeros, or those of the next group, and rows behind its last filter are
// zeros: their sums are not stored. Boxes behind the last are not asked for, and nothing of them is stored either.
//
// Shared memory: the ring, [stages][rows / 64 + boxes] boxes of [depth] rows of 128 bytes; boxes of results,
// [groups][buffers][64] rows of 128 bytes.
//
// Traits: A, Stored (Out, or sums of a split), rank, rows, boxes, groups, beside, blocks, depth, stages, buffers,
// residents, cluster, parted, follows.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/follow.cuh"
#include "common/shared.cuh"
#include "common/group_ring.cuh"
#include "common/cluster_sums.cuh"
#include "traits"

using A = Traits::A;
using Stored = Traits::Stored;

constexpr int rows = Traits::rows, boxes = Traits::boxes, groups = Traits::groups, beside = Traits::beside;
constexpr int blocks = Traits::blocks, depth = Traits::depth, stages = Traits::stages, buffers = Traits::buffers;
constexpr int peers = Traits::cluster;
constexpr int threads = 128 * groups + 128, row_boxes = rows / 64;
constexpr int own_boxes = boxes / beside, sums = 32 * own_boxes;  // of a group and block, columns and a thread's sums
constexpr int box_bytes = depth * 128, stage_bytes = (row_boxes + boxes) * box_bytes;
constexpr int across = 128 / sizeof(Stored), parts = 64 / across, result_bytes = 64 * 128;  // of a box of results
static_assert(sizeof(A) == 2, "a product takes operands that lie across of two bytes alone");
static_assert(rows == 64 * blocks * (groups / beside) && groups % beside == 0, "each row belongs to a group");
static_assert(row_boxes <= 4, "a thread asks for one box of dy at most");
static_assert(boxes % beside == 0 && own_boxes <= 4, "whole products");
static_assert(depth % 16 == 0 && depth <= 256, "whole products, and boxes as large as they may be");
static_assert(peers == 1 || rows * boxes * 256 <= stages * stage_bytes, "sums lie where the ring was");
static_assert(stages > 1 && buffers > 1, "a ring, and a place for results while others are stored");

struct Params {
    const A *x, *dy;          // read by their maps
    void* out;                // written by its map
    const void* operands[1];  // none: a place that all kernels of the engine have
    void* sums;               // of parted tiles, by the map of results
    int tiles;
    Divisor row_tiles, column_tiles, conv_groups;
    int steps, rest;                    // of a part of the pixels; as many of the first parts have one more
    int columns, channels;              // boxes of all taps; of a group of x
    Divisor chunks, filter[3];          // boxes of a tap; taps; axes are D, H and W
    int step[3], corner[3], offset[3];  // from pixel to pixel, where the first reads its first tap, from tap to tap
    Divisor sizes[3];                   // of dy
    bulk::Map gradients, result, windows;
};

struct Tile {
    int row, column, boxes, group, split, begin, steps;  // columns are counted in boxes

    __device__ __forceinline__ Tile(const Params& p, int at, int rank) {
        row = p.row_tiles.split(at) * rows;
        column = p.column_tiles.split(at) * ::boxes;
        boxes = min(::boxes, p.columns - column);
        group = p.conv_groups.split(at);
        split = at;
        begin = 0;
        steps = p.steps;
        if constexpr (Traits::parted || peers > 1) {
            const int part = split * peers + rank;
            begin = part * p.steps + min(part, p.rest);
            steps += part < p.rest;
        }
    }
};

// The tiles of this block, and of the blocks of its cluster, among which it is the one at `rank`.
struct Turns {
    int first = blockIdx.x / peers, by = gridDim.x / peers, rank = peers > 1 ? bulk::cluster_rank() : 0;
};

using Turn = pipeline::Turn<stages>;
using Registers = pipeline::Registers<groups, Traits::residents>;

// -- four threads: boxes of all steps -------------------------------------------------------------------------------

// What a box of columns has: channels from c on, of a tap that is as far from the first along D, H and W.
struct Column {
    int c, way[3];

    __device__ __forceinline__ void place(const Params& p, const Tile& tile, int i) {
        int tap = tile.column + i;
        c = tile.group * p.channels + p.chunks.split(tap) * 64;
#pragma unroll
        for (int axis = 2; axis > 2 - Traits::rank; --axis) way[axis] = p.filter[axis].split(tap) * p.offset[axis];
    }
    __device__ __forceinline__ void bring(const Params& p, unsigned char* to, bulk::Barrier& full,
                                          const int (&place)[3], int image) const {
        if constexpr (Traits::rank == 1)
            bulk::copy_windows(to, p.windows, full, c, place[2], image, way[2]);
        else if constexpr (Traits::rank == 2)
            bulk::copy_windows(to, p.windows, full, c, place[2], place[1], image, way[2], way[1]);
        else
            bulk::copy_windows(to, p.windows, full, c, place[2], place[1], place[0], image, way[2], way[1], way[0]);
    }
};

// Every fourth box of a stage, from `first` on. The first thread says how many bytes come in all; what others have
// asked for may have come by then, for a phase does not end before it has said so.
__device__ __forceinline__ void bring(const Params& p, unsigned char* ring, bulk::Barrier* full, bulk::Barrier* empty,
                                      int first) {
    constexpr int each = (boxes + 3) / 4;
    const int first_column = (first + 3 * row_boxes) % 4;  // behind the boxes of dy
    const Turns mine;
    Turn turn;
    for (int at = mine.first; at < p.tiles; at += mine.by) {
        const Tile tile(p, at, mine.rank);
        Column columns[each];
#pragma unroll
        for (int i = 0; i < each; ++i) columns[i].place(p, tile, first_column + 4 * i);
        int pixel = tile.begin * depth;
#pragma unroll 1  // instructions that have not been fetched yet are what a block waits for first
        for (int step = 0; step < tile.steps; ++step, pixel += depth) {
            unsigned char* const to = ring + turn.stage * stage_bytes;
            bulk::Barrier& arrived = full[turn.stage];
            int image = pixel, place[3];
#pragma unroll
            for (int axis = 2; axis > 2 - Traits::rank; --axis)
                place[axis] = p.sizes[axis].split(image) * p.step[axis] + p.corner[axis];
            bulk::wait(empty[turn.stage], turn.parity ^ 1);
            if (first == 0) bulk::expect(arrived, (row_boxes + tile.boxes) * box_bytes);
            if (first < row_boxes)
                bulk::copy_cube(to + first * box_bytes, p.gradients, arrived, tile.row + 64 * first, tile.group, pixel);
#pragma unroll
            for (int i = 0; i < each; ++i)
                if (const int column = first_column + 4 * i; column < tile.boxes)
                    columns[i].bring(p, to + (row_boxes + column) * box_bytes, arrived, place, image);
            turn.next();
        }
        if constexpr (peers > 1) {
            cluster::pass();  // sums lie in the ring
            cluster::pass();  // others have read them
        }
    }
}

// -- four warps: the products of a tile -----------------------------------------------------------------------------

struct Operands {
    u64 first, second;

    __device__ __forceinline__ Operands(const unsigned char* ring, int group) {
        first = tensor::turned_descriptor(ring + group / beside * blocks * box_bytes, box_bytes);
        second = tensor::turned_descriptor(ring + (row_boxes + group % beside * own_boxes) * box_bytes, box_bytes);
    }
    // Of a block and 16 pixels of a stage.
    __device__ __forceinline__ u64 a(int stage, int block, int k) const {
        return tensor::along(first, stage * stage_bytes + block * box_bytes + k * 2048);
    }
    __device__ __forceinline__ u64 b(int stage, int k) const {
        return tensor::along(second, stage * stage_bytes + k * 2048);
    }
};

__device__ __forceinline__ void ask(float (&sum)[blocks][sums], const Operands& operands, int stage, int adds) {
    tensor::group_begin();
#pragma unroll
    for (int k = 0; k < depth / 16; ++k)
#pragma unroll
        for (int m = 0; m < blocks; ++m)
            tensor::group_product(sum[m], operands.a(stage, m, k), operands.b(stage, k), k > 0 ? 1 : adds);
    tensor::group_commit();
}

// -- results --------------------------------------------------------------------------------------------------------

// 64 rows and the columns of 128 bytes, whose first sum of this thread is sum[0], to their box.
__device__ __forceinline__ void put(const float* sum, unsigned char* to, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < across / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int byte = (8 * j + lane % 4 * 2) * int(sizeof(Stored)), row = 16 * warp + lane / 4 + 8 * h;
            const Pack<Stored, 2> pair = {Stored(sum[4 * j + 2 * h]), Stored(sum[4 * j + 2 * h + 1])};
            store<2>(reinterpret_cast<Stored*>(to + tensor::swizzled(row, byte / 16) + byte % 16), pair);
        }
}

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
igemm_sm90_wgrad(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier full[stages], empty[stages];
    unsigned char* const ring = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);

    // Place.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one value for a warp, as the compiler sees it now
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            bulk::init(full[i], 1);
            bulk::init(empty[i], 4 * groups);
        }
        bulk::publish();
    } else if (threadIdx.x == 128 * groups) {  // maps come at once, for those that will ask for boxes
        bulk::fetch_map(p.gradients);
        bulk::fetch_map(p.windows);
        bulk::fetch_map(p.result);
    }
    __syncthreads();
    if constexpr (Traits::parted) let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    // Load.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    if (group == groups) {
        Registers::give();
        if (lane == 0) bring(p, ring, full, empty, warp);
        return;
    }
    Registers::take();
    const bool leads = threadIdx.x % 128 == 0;
    unsigned char* const places = ring + stages * stage_bytes + group * buffers * result_bytes;
    const Operands operands(ring, group);
    const Turns mine;
    Turn turn;
    int buffer = 0;
    for (int at = mine.first; at < p.tiles; at += mine.by) {
        const Tile tile(p, at, mine.rank);

        // Compute.
        float sum[blocks][sums];
        pipeline::multiply(tile.steps, turn, full, empty, lane == 0,
                           [&](int stage, int adds) { ask(sum, operands, stage, adds); });
#pragma unroll
        for (int m = 0; m < blocks; ++m) tensor::group_done(sum[m]);

        if constexpr (peers > 1)
            cluster::add_up<peers, 128 * groups, blocks * own_boxes, 32>(sum[0], ring, group, mine.rank);

        // Store.
        const int first = group % beside * own_boxes, row = tile.row + group / beside * blocks * 64;
#pragma unroll
        for (int i = 0; i < own_boxes; ++i) {
            if (first + i >= tile.boxes) break;
            int tap = tile.column + first + i;
            const int c = p.chunks.split(tap) * 64;
#pragma unroll
            for (int m = 0; m < blocks; ++m) {
                if ((m * own_boxes + i) % peers != mine.rank) continue;
#pragma unroll
                for (int part = 0; part < parts; ++part) {
                    unsigned char* const to = places + buffer * result_bytes;
                    put(sum[m] + 32 * i + across / 2 * part, to, warp, lane);
                    bulk::written();
                    if (leads) bulk::read_but<buffers - 2>();  // the place of the next box
                    bulk::sync_group(group);
                    if (leads) {
                        bulk::store(to, p.result, c + part * across, tap, row + 64 * m,
                                    tile.split * p.conv_groups.value + tile.group);
                        bulk::commit();
                    }
                    buffer = buffer + 1 == buffers ? 0 : buffer + 1;
                }
            }
        }
        if constexpr (peers > 1) bulk::cluster_wait();  // others have read this block's sums
    }
    if (leads) bulk::read_but<0>();
}
