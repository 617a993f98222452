// Convolution as a matrix product on Hopper's tensor cores: fprop, and dgrad phase by phase.
//
//     result[pixel, n] = sum over taps and d of  input[place of the pixel + tap, d] * filter[tap, d, n]
//
// d counts the channels of the input, n those of the result. A step is one tap and the channels of 128 bytes: all taps
// of the first channels, then those of the next, so that the windows of a step have just been read, and so that a sum
// has one order whatever the tile. For each, one thread of the last warps asks for two boxes: windows, which are pixels
// one behind the other through rows and images as the tap sees them (common/bulk_windows.cuh), and filters. They come
// to a ring of `stages`; the other warps, in groups of four, multiply them from there. A block stays on its
// multiprocessor and takes one tile after the other, so that boxes of the next tile come while results of the last one
// leave. The four last warps are there for one thread that asks: registers are given back by four warps at a time.
//
// Pixels are the rows of the product, 64 to each group and block of it, and channels its columns; or, `swapped`,
// channels are the rows and pixels the columns: any multiple of 16, so that tiles can be made to be as many as
// multiprocessors.
//
// As many groups as a tile's rows need are a team. Two teams have tiles of their own and take turns by barriers, so that
// one multiplies while the other has its epilogue.
//
// The sums of `parted` tiles, of which several share a result's steps, leave as they are, for igemm_sum.cu. Blocks of a
// `cluster` share a tile's steps as well, and add their sums up before these leave (common/cluster_sums.cuh). Results
// leave as boxes, from where tensors that the epilogue reads have come before; with a stride, dgrad has a phase for
// each way that taps can meet pixels, whose results lie apart: threads store them, 16 bytes at a time.
//
// f32 as `paired` tf32 (common/tf32_pairs.cuh) is three products. The products of a step have sums of their own, which
// begin at zero, the small ones first, and are added up outside of tensor cores, as these cut sums off rather than round
// them. Low parts of filters lie behind all high ones, as further groups. Windows that are rows come as they are: a
// thread reads its values of them from the ring, and multiplies both parts from registers. Windows that are columns
// must be in shared memory: they are pairs as well, with low parts as further images, and a step takes two places of
// the ring, one with low parts of windows and high ones of filters, the other one the other way round.
//
// Shared memory: the ring, [stages][pixels + channels] rows of 128 bytes; boxes of results, [groups][buffers][boxes],
// where the tensors and other results of an epilogue have boxes of their own; its vectors, [groups][count][channels];
// and where results lie apart their places, [groups][pixels].
//
// Traits: A, Out, Sum, Epilogue, Also; D (sums), Stored, rank (0: one tap, and pixels lie as results do), swapped, pixels, channels, groups, blocks (products of a
// group side by side), stages, buffers, box (pixels of a box of results), residents, cluster, filters (0: depth, tap, channel;
// 1: channel, tap, depth, across; 2: depth, channel, tap), phases, parted, stats, paired, promoted (sums of a
// step by themselves), slices (of 32 bytes, of a step: four, or fewer where all channels are fewer), barren (some phase has no
// taps), follows, vectors, tensors.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "common/tf32_pairs.cuh"
#include "common/group_ring.cuh"
#include "common/cluster_sums.cuh"
#include "traits"
#include "common/group_results.cuh"

using A = Traits::A;
using D = Traits::D;
using Out = Traits::Out;
using Epilogue = Traits::Epilogue;

constexpr int pixels = Traits::pixels, channels = Traits::channels, groups = Traits::groups, blocks = Traits::blocks;
constexpr int stages = Traits::stages, buffers = Traits::buffers, box = Traits::box, phases = Traits::phases;
constexpr int peers = Traits::cluster, halves = Traits::paired && Traits::swapped ? 2 : 1;  // of a step, places
constexpr bool swapped = Traits::swapped, turned = Traits::filters == 1, apart = phases > 1;
constexpr int threads = 128 * groups + 128, depth = 128 / sizeof(A);
constexpr int rows = swapped ? channels : pixels, columns = swapped ? pixels : channels, sums = columns / 2;
constexpr int team = rows / (64 * blocks), teams = groups / team;  // groups of a tile; tiles at a time
constexpr int window_bytes = pixels * 128, filter_bytes = channels * 128;
constexpr bool apart_here = Traits::paired && !swapped;  // windows are taken apart in registers
constexpr int stage_bytes = window_bytes + filter_bytes * (apart_here ? 2 : 1);
constexpr int along = swapped ? pixels / box : channels / 64, boxes = blocks * along;  // of a group's results
constexpr int each = swapped ? box / 2 : 32;  // of a thread's sums, those of a box
constexpr int box_bytes = box * 64 * results::size, buffer_bytes = box_bytes * results::boxes;
constexpr int pointers = Epilogue::count + results::also, mapped = results::tensors + results::also;
constexpr int listed = swapped ? pixels : 64 * blocks;  // pixels that a group stores
constexpr bool held = results::tensors > 0 && !apart;
static_assert(rows == 64 * team * blocks && team * teams == groups && channels % 64 == 0 && columns % 8 == 0 &&
                  columns <= 256,
              "whole products, whole teams");
static_assert(teams == 1 || !(Traits::parted || Traits::promoted || Traits::paired || apart || peers > 1),
              "tiles of all teams have as many steps, asked for one behind the other");
static_assert(swapped ? pixels % box == 0 && box % 16 == 0 : box == 64, "whole boxes");
static_assert(stages > 1 && buffers > 1, "a ring of whole steps, and a place for results while others are stored");
static_assert(!Traits::stats || !(Traits::parted || apart || peers > 1),
              "statistics are of whole results, which leave as boxes");
static_assert(peers == 1 || rows * columns * 4 <= stages * stage_bytes, "sums lie where the ring was");

// One of the ways in which taps meet pixels; axes are D, H and W.
struct Phase {
    int pixels;     // of all images
    int first_tap;  // in the filter's memory
    int taps[3];    // that are met along each axis
    int corner[3];  // where the first pixel reads its first tap
    int start[3];   // where its result lies
    Divisor sizes[3];
};

struct Params {
    const A *x, *w;                                     // read by their maps
    Out* out;                                           // by its map as well, if results do not lie apart
    const void* operands[pointers > 0 ? pointers : 1];  // of the epilogue, and where its other results go
    void* sums;                                         // of parted tiles, by the map of results; of statistics
    int tiles;
    Divisor channel_tiles, pixel_tiles, conv_groups;
    int splits;
    int chunks;                        // steps of a tap
    int depth_channels, out_channels;  // of a group
    int step[3], offset[3], tap[3];    // from pixel to pixel, from tap to tap, and the same in the filter's memory
    int out_step[3];                   // from result to result of a phase
    int out_size[2 + halves];          // of pairs, also how many images, or pixels of rank 0, low parts are behind
    Phase phase[phases];
    bulk::Map filters, result, more[mapped > 0 ? mapped : 1], windows[phases];  // tensors, then other results
};

struct Tile {
    int phase, pixel, channel, group, split, begin, steps;
    bool there;  // Some phases have fewer pixels than others.

    __device__ __forceinline__ Tile(const Params& p, int at, int rank) {
        channel = p.channel_tiles.split(at) * channels;
        pixel = p.pixel_tiles.split(at) * pixels;
        group = p.conv_groups.split(at);
        split = Traits::parted ? at % p.splits : 0;
        phase = apart ? at : 0;
        const Phase& of = p.phase[phase];
        there = !apart || pixel < of.pixels;
        begin = 0;
        steps = of.taps[0] * of.taps[1] * of.taps[2] * p.chunks;
        if (Traits::parted || peers > 1) {
            const int part = split * peers + rank, parts = (Traits::parted ? p.splits : 1) * peers;
            begin = int(i64(steps) * part / parts);
            steps = int(i64(steps) * (part + 1) / parts) - begin;
        }
    }
};

// Which of its team's groups one is.
__device__ __forceinline__ int in_team(int group) { return teams > 1 ? group % team : group; }

// The tiles of this block, or of one of its teams, and of the blocks of its cluster, among which it is the one at
// `rank`.
struct Turns {
    int first = blockIdx.x / peers, by = gridDim.x / peers, rank = peers > 1 ? bulk::cluster_rank() : 0;

    Turns() = default;
    __device__ __forceinline__ explicit Turns(int of_team) {
        first += of_team * by;
        by *= teams;
    }

    // Boxes of a tile that this block stores, and which box that is of a group's.
    __device__ __forceinline__ int own() const { return (boxes - rank + peers - 1) / peers; }
    __device__ __forceinline__ bool owns(int i) const { return i % peers == rank; }
};

// Where a box of a tile's results lies: box `i` of a group.
struct Spot {
    int pixel, channel;

    __device__ __forceinline__ Spot(const Tile& tile, int group, int i) {
        const int block = (in_team(group) * blocks + i / along) * 64, further = i % along * (swapped ? box : 64);
        pixel = tile.pixel + (swapped ? further : block);
        channel = tile.channel + (swapped ? block : further);
    }
};

using Turn = pipeline::Turn<stages>;
using Registers = pipeline::Registers<groups, Traits::residents>;

// -- one thread: windows and filters of all steps -------------------------------------------------------------------

__device__ __forceinline__ void bring_windows(const Params& p, const Tile& tile, unsigned char* to, bulk::Barrier& full,
                                              int c, const int (&place)[3], const int (&tap)[3], int image,
                                              int behind) {
    const bulk::Map& map = p.windows[tile.phase];
    const int right = tap[2] * p.offset[2], down = tap[1] * p.offset[1], deep = tap[0] * p.offset[0];
    if constexpr (Traits::rank == 0)
        bulk::copy_cube(to, map, full, c, tile.pixel + behind, 0);
    else if constexpr (Traits::rank == 1)
        bulk::copy_windows(to, map, full, c, place[2], image + behind, right);
    else if constexpr (Traits::rank == 2)
        bulk::copy_windows(to, map, full, c, place[2], place[1], image + behind, right, down);
    else
        bulk::copy_windows(to, map, full, c, place[2], place[1], place[0], image + behind, right, down, deep);
}

__device__ __forceinline__ void bring_filters(const Params& p, const Tile& tile, unsigned char* to, bulk::Barrier& full,
                                              int d, int tap, int behind) {
    if constexpr (Traits::filters == 0)
        bulk::copy(to, p.filters, full, d, tap, tile.channel, tile.group + behind);
    else if constexpr (Traits::filters == 2)
        bulk::copy(to, p.filters, full, d, tile.channel, tap, tile.group + behind);
    else
#pragma unroll
        for (int i = 0; i < channels / 64; ++i)
            bulk::copy(to + i * 8192, p.filters, full, tile.channel + 64 * i, tap, d, tile.group);
}

__device__ __forceinline__ void bring(const Params& p, unsigned char* ring, bulk::Barrier* full, bulk::Barrier* empty) {
    const Turns mine;
    Turn turn;
    for (int at = mine.first; at < p.tiles; at += mine.by) {
        const Tile tile(p, at, mine.rank);
        if (!tile.there) continue;
        const Phase& phase = p.phase[tile.phase];
        int image = tile.pixel, place[3];
#pragma unroll
        for (int axis = 2; axis >= 0; --axis)
            place[axis] = phase.sizes[axis].split(image) * p.step[axis] + phase.corner[axis];
        int tap[3] = {}, chunk = 0;
        if (Traits::parted || peers > 1) {
            int rest = tile.begin;
            tap[2] = rest % phase.taps[2];
            rest /= phase.taps[2];
            tap[1] = rest % phase.taps[1];
            rest /= phase.taps[1];
            tap[0] = rest % phase.taps[0];
            chunk = rest / phase.taps[0];
        }
#pragma unroll 1  // instructions that have not been fetched yet are what a block waits for first
        for (int step = 0; step < tile.steps; ++step) {
#pragma unroll
            for (int half = 0; half < halves; ++half) {  // windows of low parts come first, and filters of high ones
                unsigned char* const to = ring + turn.stage * stage_bytes;
                bulk::Barrier& arrived = full[turn.stage];
                bulk::wait(empty[turn.stage], turn.parity ^ 1);
                bulk::expect(arrived, stage_bytes);
                const int d = chunk * depth;
                bring_windows(p, tile, to, arrived, tile.group * p.depth_channels + d, place, tap, image,
                              halves > 1 && half == 0 ? p.out_size[halves + 1] : 0);
                bring_filters(p, tile, to + window_bytes, arrived, d,
                              phase.first_tap + tap[0] * p.tap[0] + tap[1] * p.tap[1] + tap[2] * p.tap[2],
                              half == 1 ? int(p.conv_groups.value) : 0);
                if constexpr (apart_here)
                    bring_filters(p, tile, to + window_bytes + filter_bytes, arrived, d,
                                  phase.first_tap + tap[0] * p.tap[0] + tap[1] * p.tap[1] + tap[2] * p.tap[2],
                                  int(p.conv_groups.value));
                turn.next();
            }
            if (++tap[2] < phase.taps[2]) continue;
            tap[2] = 0;
            if (++tap[1] < phase.taps[1]) continue;
            tap[1] = 0;
            if (++tap[0] < phase.taps[0]) continue;
            tap[0] = 0;
            ++chunk;
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
    const unsigned char* ring;

    __device__ __forceinline__ Operands(const unsigned char* ring, int group) : ring(ring) {
        const unsigned char* const a = ring + (swapped ? window_bytes : 0) + in_team(group) * blocks * 8192;
        const unsigned char* const b = ring + (swapped ? 0 : window_bytes);
        first = turned && swapped ? tensor::turned_descriptor(a, 8192) : tensor::descriptor(a);
        second = turned && !swapped ? tensor::turned_descriptor(b, 8192) : tensor::descriptor(b);
    }
    // Of a block and slice of a stage: 32 bytes along the depth, or 16 rows of what lies across.
    __device__ __forceinline__ u64 a(int stage, int block, int k) const {
        return tensor::along(first, stage * stage_bytes + block * 8192 + k * (turned && swapped ? 2048 : 32));
    }
    __device__ __forceinline__ u64 b(int stage, int k) const {
        return tensor::along(second, stage * stage_bytes + k * (turned && !swapped ? 2048 : 32));
    }
};

// Of windows in one stage and filters in another, or the same.
template <int N>
__device__ __forceinline__ void ask(D (&sum)[blocks][N], const Operands& operands, int windows, int filters, int adds) {
    tensor::group_begin();
#pragma unroll
    for (int k = 0; k < Traits::slices; ++k)
#pragma unroll
        for (int m = 0; m < blocks; ++m)
            tensor::group_product(sum[m], operands.a(swapped ? filters : windows, m, k),
                                  operands.b(swapped ? windows : filters, k), k > 0 ? 1 : adds);
    tensor::group_commit();
}

// Windows of a thread in registers, as products take them: in each slice, row lane / 4 of a warp's 16 and the one eight
// below, column lane % 4 and the one four further.
struct Apart {
    u32 high[blocks][Traits::slices][4], low[blocks][Traits::slices][4];

    __device__ __forceinline__ explicit Apart(const unsigned char* stage) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, group = threadIdx.x / 128;
        const unsigned char* const from = stage + (group * blocks * 64 + row) * 128 + threadIdx.x % 4 * 4;
        bool all = true;
#pragma unroll
        for (int m = 0; m < blocks; ++m)
#pragma unroll
            for (int k = 0; k < Traits::slices; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int piece = (2 * k + i / 2) ^ (row & 7);
                    high[m][k][i] = *reinterpret_cast<const u32*>(from + m * 8192 + i % 2 * 1024 + piece * 16);
                }
                all = tf32::usual(high[m][k]) && all;
            }
        if (all)
            each([](u32& high, u32& low) {
                low = tf32::usual_low(high);
                high = tf32::nearest(high);
            });
        else
            each([](u32& high, u32& low) {
                const tf32::Pair pair(__uint_as_float(high));
                high = pair.high;
                low = pair.low;
            });
        __syncwarp();
    }
    template <class Change>
    __device__ __forceinline__ void each(const Change& change) {
#pragma unroll
        for (int m = 0; m < blocks; ++m)
#pragma unroll
            for (int k = 0; k < Traits::slices; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) change(high[m][k][i], low[m][k][i]);
    }
    // Behind the wait for the products: registers have stayed as they were.
    __device__ __forceinline__ void keep() {
#pragma unroll
        for (int m = 0; m < blocks; ++m)
#pragma unroll
            for (int k = 0; k < Traits::slices; ++k) {
                tensor::keep(high[m][k]);
                tensor::keep(low[m][k]);
            }
    }
};

// `filters`: bytes from the stage's first filters on.
template <int N>
__device__ __forceinline__ void ask_apart(D (&sum)[blocks][N], const u32 (&windows)[blocks][Traits::slices][4],
                                          const Operands& operands, int stage, int filters, int adds) {
#pragma unroll
    for (int k = 0; k < Traits::slices; ++k)
#pragma unroll
        for (int m = 0; m < blocks; ++m)
            tensor::group_product(sum[m], windows[m][k], tensor::along(operands.b(stage, k), filters),
                                  k > 0 ? 1 : adds);
}

// `next` is the barrier of the team whose turn comes when the last products have been asked for.
template <int N>
__device__ __forceinline__ void multiply(D (&sum)[blocks][N], const Operands& operands, int steps, Turn& turn,
                                         bulk::Barrier* full, bulk::Barrier* empty, bulk::Barrier* next,
                                         bool leads_warp) {
    if constexpr (Traits::barren) {
        if (steps == 0) {  // no tap meets this phase
#pragma unroll
            for (int m = 0; m < blocks; ++m)
#pragma unroll
                for (int i = 0; i < N; ++i) sum[m][i] = 0;
            return;
        }
    }
    pipeline::multiply(
        steps, turn, full, empty, leads_warp, [&](int stage, int adds) { ask(sum, operands, stage, stage, adds); },
        [&] {
            if (teams > 1 && leads_warp) bulk::arrive(*next);
        });
#pragma unroll
    for (int m = 0; m < blocks; ++m) tensor::group_done(sum[m]);
}

// Tensor cores add e4m3 and e5m2 in fewer bits than f32 has, and cut sums off that are to be as exact as those of f32:
// each step's sums are added up outside of them.
template <int N>
__device__ __forceinline__ void multiply_promoted(D (&sum)[blocks][N], const Operands& operands, int steps, Turn& turn,
                                                  bulk::Barrier* full, bulk::Barrier* empty, bool leads_warp) {
#pragma unroll
    for (int m = 0; m < blocks; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) sum[m][i] = 0;
    for (int step = 0; step < steps; ++step) {
        D part[blocks][N];
        const int first = turn.stage;
        bulk::wait(full[turn.stage], turn.parity);
        if constexpr (apart_here) {
            Apart windows(operands.ring + first * stage_bytes);
            tensor::group_begin();
            ask_apart(part, windows.low, operands, first, 0, 0);
            ask_apart(part, windows.high, operands, first, filter_bytes, 1);
            ask_apart(part, windows.high, operands, first, 0, 1);
            tensor::group_commit();
            tensor::group_left<0>();
            windows.keep();
            __syncwarp();  // all lanes have read their windows
        } else {
            ask(part, operands, first, first, 0);
            if constexpr (halves > 1) {
                turn.next();
                bulk::wait(full[turn.stage], turn.parity);
                ask(part, operands, turn.stage, turn.stage, 1);
                ask(part, operands, turn.stage, first, 1);
            }
            tensor::group_left<0>();
        }
#pragma unroll
        for (int m = 0; m < blocks; ++m) tensor::group_done(part[m]);
        if (leads_warp) {
            bulk::arrive(empty[turn.stage]);
            if constexpr (halves > 1) bulk::arrive(empty[first]);
        }
        turn.next();
#pragma unroll
        for (int m = 0; m < blocks; ++m)
#pragma unroll
            for (int i = 0; i < N; ++i) sum[m][i] += part[m][i];
    }
}

// -- results --------------------------------------------------------------------------------------------------------

// One thread: what the epilogue of the group's box `number`, counted over all that this block stores, reads.
__device__ __forceinline__ void bring_tensors(const Params& p, const Turns& mine, int group, int number,
                                              unsigned char* places, bulk::Barrier* arrived) {
    const int own = mine.own(), at = own ? mine.first + number / own * mine.by : p.tiles;
    if (at >= p.tiles) return;
    const Tile tile(p, at, mine.rank);
    const Spot spot(tile, group, mine.rank + number % own * peers);
    const int buffer = number % buffers;
    bulk::expect(arrived[buffer], results::tensors * box_bytes);
#pragma unroll
    for (int t = 0; t < results::tensors; ++t)
#pragma unroll
        for (int part = 0; part < results::parts; ++part)
            bulk::copy(places + buffer * buffer_bytes + t * box_bytes + part * box * 128, p.more[t], arrived[buffer],
                       spot.channel + part * results::across, tile.group, spot.pixel, 0);
}

__device__ __forceinline__ void store_box(const bulk::Map& map, const Tile& tile, const Spot& spot,
                                          const unsigned char* from) {
#pragma unroll
    for (int part = 0; part < results::parts; ++part)
        bulk::store(from + part * box * 128, map, spot.channel + part * results::across, tile.group, spot.pixel,
                    tile.split);
}

// Where results lie apart: the element of each of a group's pixels, from this tile's first channel on; -1 behind the
// last.
__device__ __forceinline__ void list_places(const Params& p, const Tile& tile, int first, i64* list) {
    const Phase& phase = p.phase[tile.phase];
    for (int i = threadIdx.x % 128; i < listed; i += 128) {
        int image = first + i, at[3];
        const bool there = image < phase.pixels;
#pragma unroll
        for (int axis = 2; axis >= 0; --axis)
            at[axis] = phase.sizes[axis].split(image) * p.out_step[axis] + phase.start[axis];
        const i64 pixel = ((i64(image) * p.out_size[0] + at[0]) * p.out_size[1] + at[1]) * p.out_size[2] + at[2];
        list[i] = there ? (pixel * p.conv_groups.value + tile.group) * p.out_channels : -1;
    }
}
// 16 bytes at a time between a box and where its results lie; `move(place in the box, element of the tensor)`.
template <class Move>
__device__ __forceinline__ void each_piece(const Params& p, const Spot& spot, const i64* list, const Move& move) {
    constexpr int pieces = 8 * results::parts, together = 16 / results::size;
    for (int i = threadIdx.x % 128; i < box * pieces; i += 128) {
        const int pixel = i / pieces, channel = i % pieces * together;
        if (list[pixel] >= 0 && spot.channel + channel < p.out_channels)
            move(results::place(box, pixel, channel), list[pixel] + spot.channel + channel);
    }
}

// Sums and sums of squares of a group's channels over the pixels of a tile, read from where boxes leave. Added up from
// the sums in registers, ptxas would have every product wait for the one before. A thread has two channels of each 64,
// and every fourth pixel: parts[tile, group if it has pixels of its own, warp][channel][2].
struct Totals {
    static constexpr int sets = swapped ? blocks : along;  // of 64 channels
    float of[sets][2][2] = {};

    __device__ __forceinline__ void add(int set, const unsigned char* from, int pixels_left, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < box; i += 4) {
            const Pack<results::Stored, 2> pair =
                load<2>(reinterpret_cast<const results::Stored*>(from + results::place(box, i + warp, 2 * lane)));
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float value = i + warp < pixels_left ? float(pair.value[c]) : 0.0f;
                of[set][c][0] += value;
                of[set][c][1] += value * value;
            }
        }
    }
    __device__ __forceinline__ void store(const Params& p, const Tile& tile, int group, int warp, int lane) const {
        const int beside = tile.pixel / pixels;
        const i64 part = swapped ? beside * 4 + warp : (beside * team + in_team(group)) * 4 + warp;
#pragma unroll
        for (int set = 0; set < sets; ++set) {
            const int channel = tile.channel + ((swapped ? in_team(group) * blocks : 0) + set) * 64 + 2 * lane;
            if (channel < p.out_channels)
                *reinterpret_cast<Pack<float, 4>*>(
                    static_cast<float*>(p.sums) +
                    ((part * p.conv_groups.value + tile.group) * p.out_channels + channel) * 2) = {
                    of[set][0][0], of[set][0][1], of[set][1][0], of[set][1][1]};
        }
    }
};

// The epilogue's values of channels: of a thread's own two where channels are rows; else they come with the products
// and lie in shared memory behind them.
struct Vectors {
    static constexpr int count = Traits::vectors ? Epilogue::count : 0, each = (channels + 127) / 128;
    Out own[swapped && count > 0 ? blocks : 1][count > 0 ? count : 1][2];
    Out come[!swapped && count > 0 ? count : 1][each];

    __device__ __forceinline__ void read(const Params& p, const Tile& tile, int group, int warp, int lane) {
        if constexpr (count > 0) {
            const int last = p.out_channels - 1;
            const auto value = [&](int k, int channel) {
                const int at = tile.group * p.out_channels + min(channel, last);
                return static_cast<const Out*>(p.operands[k])[at];
            };
#pragma unroll
            for (int k = 0; k < count; ++k) {
                if (!results::is_vector(k)) continue;
                if constexpr (swapped) {
#pragma unroll
                    for (int m = 0; m < blocks; ++m)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            own[m][k][h] = value(
                                k, tile.channel + (in_team(group) * blocks + m) * 64 + 16 * warp + lane / 4 + 8 * h);
                } else {
#pragma unroll
                    for (int i = 0; i < each; ++i) come[k][i] = value(k, tile.channel + threadIdx.x % 128 + 128 * i);
                }
            }
        }
    }
    // All threads of a group wait for each other behind it.
    __device__ __forceinline__ void put(Out* shared) const {
        if constexpr (count > 0 && !swapped)
#pragma unroll
            for (int k = 0; k < count; ++k)
                if (results::is_vector(k))
#pragma unroll
                    for (int i = 0; i < each; ++i)
                        if (const int at = threadIdx.x % 128 + 128 * i; at < channels)
                            shared[k * channels + at] = come[k][i];
    }
};

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
igemm_sm90(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    // Behind those of boxes that have come, one for each team's turn to multiply.
    __shared__ bulk::Barrier full[stages], empty[stages], arrived[groups * buffers + (teams > 1 ? teams : 0)];
    unsigned char* const ring = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);
    unsigned char* const all_places = ring + stages * stage_bytes;
    i64* const lists = reinterpret_cast<i64*>(all_places + groups * buffers * buffer_bytes);
    Out* const all_vectors = reinterpret_cast<Out*>(lists + (apart ? groups * listed : 0));

    // Place.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one value for a warp, as the compiler sees it now
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            bulk::init(full[i], 1);
            bulk::init(empty[i], 4 * team);
        }
        for (int i = 0; i < groups * buffers; ++i) bulk::init(arrived[i], 1);
        if constexpr (teams > 1)
            for (int i = 0; i < teams; ++i) bulk::init(arrived[groups * buffers + i], 4 * team);
        bulk::publish();
    } else if (threadIdx.x == 128 * groups) {  // who will ask for boxes has their maps come at once
        bulk::fetch_map(p.filters);
        bulk::fetch_map(p.windows[0]);
        if constexpr (!apart) bulk::fetch_map(p.result);
    }
    __syncthreads();
    if constexpr (Traits::parted || Traits::stats) let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    if (group == groups) {
        Registers::give();
        if (threadIdx.x == 128 * groups) bring(p, ring, full, empty);
        return;
    }
    Registers::take();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool leads = threadIdx.x % 128 == 0;
    unsigned char* const places = all_places + group * buffers * buffer_bytes;
    i64* const list = lists + group * listed;
    Out* const vectors = all_vectors + group * Vectors::count * channels;
    bulk::Barrier* const come = arrived + group * buffers;
    const int of_team = teams > 1 ? group / team : 0;
    const Turns mine(of_team);
    bulk::Barrier* const turns = arrived + groups * buffers;
    if constexpr (held)
        if (leads)
            for (int i = 0; i < buffers; ++i) bring_tensors(p, mine, group, i, places, come);

    const Operands operands(ring, group);
    Turn turn;
    const int steps = p.phase[0].taps[0] * p.phase[0].taps[1] * p.phase[0].taps[2] * p.chunks;  // of other teams' tiles
    if constexpr (teams > 1) turn.skip(of_team * steps);
    int number = 0;  // of the group's boxes
    int passed = 0;  // tiles of the team
    for (int at = mine.first; at < p.tiles; at += mine.by) {
        const Tile tile(p, at, mine.rank);
        if (!tile.there) continue;

        // Multiply.
        Vectors of_channels;
        of_channels.read(p, tile, group, warp, lane);
        if constexpr (apart) {
            bulk::sync_group(group);  // nobody looks at the last tile's list any more
            list_places(p, tile, tile.pixel + (swapped ? 0 : group * listed), list);
        }
        D sum[blocks][sums];
        if constexpr (Traits::promoted || Traits::paired)
            multiply_promoted(sum, operands, tile.steps, turn, full, empty, lane == 0);
        else {
            // The first team's first turn has come already.
            if constexpr (teams > 1) bulk::wait(turns[of_team], (passed++ + (of_team == 0)) & 1);
            multiply(sum, operands, tile.steps, turn, full, empty, turns + (of_team + 1) % teams, lane == 0);
            if constexpr (teams > 1) turn.skip((teams - 1) * steps);
        }
        if constexpr (peers > 1) cluster::add_up<peers, 128 * groups, boxes, each>(sum[0], ring, group, mine.rank);
        of_channels.put(vectors);
        if ((Vectors::count > 0 && !swapped) || apart) bulk::sync_group(group);

        Totals totals;
#pragma unroll
        for (int i = 0; i < boxes; ++i) {
            if (!mine.owns(i)) continue;

            // Compute.
            const int buffer = number % buffers, block = i / along, further = i % along;
            const Spot spot(tile, group, i);
            unsigned char* const to = places + buffer * buffer_bytes;
            const i64* const of_box = list + (swapped ? further * box : block * 64);
            if constexpr (held) bulk::wait(come[buffer], number / buffers & 1);
            if constexpr (apart && results::tensors > 0) {
#pragma unroll
                for (int k = 0; k < Epilogue::count; ++k)
                    if (results::is_tensor(k))
                        each_piece(p, spot, of_box, [&](int place, i64 element) {
                            *reinterpret_cast<uint4*>(to + results::tensor_at(k) * box_bytes + place) =
                                *reinterpret_cast<const uint4*>(static_cast<const Out*>(p.operands[k]) + element);
                        });
                bulk::sync_group(group);
            }
            if constexpr (swapped)
                results::of_columns<box>(sum[block] + further * box / 2, to, box_bytes, p.operands,
                                         of_channels.own[block], warp, lane);
            else
                results::of_rows(sum[block] + further * 32, to, box_bytes, p.operands, vectors + further * 64, channels,
                                 warp, lane);

            // Store.
            if constexpr (apart) {
                bulk::sync_group(group);
                each_piece(p, spot, of_box, [&](int place, i64 element) {
                    *reinterpret_cast<uint4*>(p.out + element) = *reinterpret_cast<const uint4*>(to + place);
#pragma unroll
                    for (int a = 0; a < results::also; ++a)
                        *reinterpret_cast<uint4*>(
                            static_cast<Out*>(const_cast<void*>(p.operands[Epilogue::count + a])) + element) =
                            *reinterpret_cast<const uint4*>(to + (results::first_also + a) * box_bytes + place);
                });
            } else {
                bulk::written();
                if (!held && leads) bulk::read_but<buffers - 2>();  // the place of the next box
                bulk::sync_group(group);
                if (leads) {
                    store_box(p.result, tile, spot, to);
#pragma unroll
                    for (int a = 0; a < results::also; ++a)
                        store_box(p.more[results::tensors + a], tile, spot, to + (results::first_also + a) * box_bytes);
                    bulk::commit();
                    if constexpr (held)
                        if (number > 0) {
                            bulk::read_but<1>();
                            bring_tensors(p, mine, group, number - 1 + buffers, places, come);
                        }
                }
                if constexpr (Traits::stats)
                    totals.add(swapped ? block : further, to, p.phase[0].pixels - spot.pixel, warp, lane);
            }
            ++number;
        }
        if constexpr (Traits::stats) totals.store(p, tile, group, warp, lane);
        if constexpr (peers > 1) bulk::cluster_wait();  // others have read this block's sums
    }
    if (leads && !apart) bulk::read_but<0>();
}
