// Convolution as a matrix product on Hopper's tensor cores, whose input comes once for all taps: fprop, and dgrad of
// stride 1.
//
//     result[n, pixel] = sum over taps and d of  filter[tap, d, n] * input[place of the pixel + tap, d]
//
// Channels are the rows of the product and pixels its columns. A tile is some channels of `lines` whole lines of an
// image. The lines of the input that it reads come as one box to a slot, 128 bytes of channels at a time: `pitch`
// pixels of each, in which the padding is zeros. Column j of the product is pixel j % pitch of line j / pitch, so that
// a tap is the same slot some rows further on: the product's second operand begins `shift` bytes behind the slot's
// first pixel, in the middle of a swizzle's pattern, which hangs on bits of the address and not on where an operand
// begins. Windows of a 3 x 3 filter are nine times the image; slots for 4 lines of 56 pixels one and a half times.
//
// Columns behind the last pixel of a line see the end of that line and the beginning of the next: what they add up
// never leaves. What a pixel reads behind the end of its line is padding, for which the padding at the beginning of the
// next line stands; behind the last line of a slot follow rows of zeros.
//
// With a stride of 2, an image is planes of every second line and pixel, as many as taps fall on. Each has its slot and
// its taps, among which there are no strides any more.
//
// A step is the product of a slot with one tap's filters. These stay in shared memory if `resident`, or come through a
// ring of `stages`. Slots are a ring of their own: one thread asks for them and another, of the next warp, for filters.
// A block stays on its multiprocessor and takes one tile after the other. A `team` is as many groups, of four warps, as
// a tile's channels need; `teams` take turns, so that one multiplies while another has its epilogue.
//
// Results leave as a box for 64 channels, from where tensors that the epilogue reads have come before.
//
// Shared memory: slots, [tiles][slot] rows of 128 bytes; filters, [stages][channels] such rows; boxes of results,
// [groups][blocks][tensors].
//
// Traits: A, Out, Sum, Epilogue; D (sums), Stored, lines, pitch, columns (of a product), box_lines (that come), slot
// (rows), channels, groups, blocks (products of a group, one below the other), tiles (slots), stages, resident,
// residents, across (filters lie across their depth), taps, planes, strided, stats, follows, vectors, tensors.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "common/group_ring.cuh"
#include "traits"
#include "common/group_results.cuh"

using A = Traits::A;
using D = Traits::D;
using Out = Traits::Out;
using Epilogue = Traits::Epilogue;

constexpr int lines = Traits::lines, pitch = Traits::pitch, columns = Traits::columns, sums = columns / 2;
constexpr int channels = Traits::channels, groups = Traits::groups, blocks = Traits::blocks;
constexpr int tiles = Traits::tiles, stages = Traits::stages, taps = Traits::taps, planes = Traits::planes;
constexpr bool resident = Traits::resident, across = Traits::across, held = results::tensors > 0;
constexpr int team = channels / (64 * blocks), teams = groups / team;  // groups of a tile; tiles at a time
constexpr int threads = 128 * groups + 128, depth = 128 / sizeof(A);
constexpr int input_bytes = Traits::box_lines * pitch * 128, slot_bytes = Traits::slot * 128;
constexpr int behind = slot_bytes - input_bytes;  // zeros
constexpr int filter_bytes = channels * 128;
constexpr int box = (columns + 15) / 16 * 16, stored = lines * pitch;  // pixels of a box of results; those that leave
constexpr int box_bytes = box * 64 * results::size, block_bytes = box_bytes * results::boxes;
static_assert(channels % (64 * blocks) == 0 && groups % team == 0, "whole teams");
static_assert(columns % 8 == 0 && columns <= 256 && stored <= columns, "whole tiles, in one product");
static_assert(behind >= 0 && Traits::slot % 8 == 0, "whole patterns of the swizzle");
static_assert(!across || sizeof(A) == 2, "filters across are those of two bytes");

struct Params {
    const A *x, *w;  // read by their maps
    Out* out;        // by its map as well
    const void* operands[Epilogue::count > 0 ? Epilogue::count : 1];
    void* sums;  // of statistics
    int tiles;
    Divisor channel_tiles;
    int conv_groups;                    // no Divisor: two more numbers were too many for 256 channels and spilled
    int chunks;                         // slots of a plane
    int depth_channels, out_channels;   // of a group
    int width, height;                  // of an image's results
    Divisor bands;                      // tiles of an image, one below the other
    int beside[planes], below[planes];  // of a stride, channels and lines that a plane begins behind the image
    int left[planes], top[planes];      // where the first pixel reads
    int until[planes];                  // the tap behind a plane's last
    int tap[taps], shift[taps];         // in the filter's memory; in a slot, bytes
    bulk::Map filters, result, tensors[held ? results::tensors : 1], images[planes];
};

// Tiles of all channels of the same lines are neighbours: one of them finds the input in the second-level cache. For
// resident filters, blocks are so many that the tiles of one have the same channels.
struct Tile {
    int channel, group, band, line, image;  // `band` counts those of all images

    __device__ __forceinline__ Tile(const Params& p, int at) {
        channel = p.channel_tiles.split(at) * channels;
        group = at % p.conv_groups;
        band = image = at / p.conv_groups;
        line = p.bands.split(image) * lines;
    }
};

template <int Stages>
using Turn = pipeline::Turn<Stages>;
using Registers = pipeline::Registers<groups, Traits::residents>;

struct Barriers {
    bulk::Barrier full[tiles], empty[tiles];                    // slots
    bulk::Barrier filters_full[stages], filters_empty[stages];  // stages
    bulk::Barrier arrived[groups];                              // tensors of the epilogue
    bulk::Barrier turn[teams];                                  // to multiply
};

// -- two threads: inputs and filters of all tiles -------------------------------------------------------------------

__device__ __forceinline__ void bring_inputs(const Params& p, unsigned char* slots, Barriers& barriers) {
    Turn<tiles> turn;
    for (int at = blockIdx.x; at < p.tiles; at += gridDim.x) {
        const Tile tile(p, at);
        for (int chunk = 0; chunk < p.chunks; ++chunk)
            for (int plane = 0; plane < planes; ++plane, turn.next()) {
                bulk::wait(barriers.empty[turn.stage], turn.parity ^ 1);
                bulk::expect(barriers.full[turn.stage], input_bytes);
                const int c = tile.group * p.depth_channels + chunk * depth, x = p.left[plane];
                const int y = tile.line + p.top[plane];
                unsigned char* const to = slots + turn.stage * slot_bytes;
                if constexpr (Traits::strided)
                    bulk::copy(to, p.images[plane], barriers.full[turn.stage], p.beside[plane] + c, x, p.below[plane],
                               y, tile.image);
                else
                    bulk::copy(to, p.images[plane], barriers.full[turn.stage], c, x, y, tile.image);
            }
    }
}

__device__ __forceinline__ void bring_filters(const Params& p, unsigned char* ring, Barriers& barriers) {
    Turn<stages> turn;
    for (int at = blockIdx.x; at < p.tiles; at += resident ? p.tiles : gridDim.x) {
        const Tile tile(p, at);
        for (int chunk = 0; chunk < p.chunks; ++chunk)
            for (int i = 0; i < taps; ++i, turn.next()) {
                unsigned char* const to = ring + turn.stage * filter_bytes;
                bulk::Barrier& full = barriers.filters_full[turn.stage];
                const int d = chunk * depth, tap = p.tap[i];
                if constexpr (!resident) bulk::wait(barriers.filters_empty[turn.stage], turn.parity ^ 1);
                bulk::expect(full, filter_bytes);
                if constexpr (across)
#pragma unroll
                    for (int n = 0; n < channels; n += 64)
                        bulk::copy(to + n * 128, p.filters, full, tile.channel + n, tap, d, tile.group);
                else
                    bulk::copy(to, p.filters, full, d, tap, tile.channel, tile.group);
            }
    }
}

// -- four warps: the products of a tile -----------------------------------------------------------------------------

struct Operands {
    u64 first, second;

    __device__ __forceinline__ Operands(const unsigned char* slots, const unsigned char* ring, int group) {
        const unsigned char* const filters = ring + group % team * blocks * 8192;
        first = across ? tensor::turned_descriptor(filters, 8192) : tensor::descriptor(filters);
        second = tensor::descriptor(slots);
    }
    // Of a block and slice of a stage: 32 bytes along the depth, or 16 rows of what lies across.
    __device__ __forceinline__ u64 a(int stage, int block, int k) const {
        return tensor::along(first, stage * filter_bytes + block * 8192 + k * (across ? 2048 : 32));
    }
    // Of a slot that a tap sees from `shift` bytes on.
    __device__ __forceinline__ u64 b(int slot, int shift, int k) const {
        return tensor::along(second, slot * slot_bytes + shift + k * 32);
    }
};

// `meanwhile` is called when the first products are under way; it is `next` whose turn comes when the last ones are.
template <class Meanwhile>
__device__ __forceinline__ void multiply(const Params& p, D (&sum)[blocks][sums], const Operands& operands,
                                         Turn<tiles>& slot, Turn<stages>& filter, Barriers& barriers,
                                         bulk::Barrier& next, bool leads_warp, const Meanwhile& meanwhile) {
    int adds = 0, last_slot = 0, last_filter = 0;
    for (int chunk = 0; chunk < p.chunks; ++chunk)
        for (int plane = 0, tap = 0; plane < planes; ++plane, slot.next()) {
            bulk::wait(barriers.full[slot.stage], slot.parity);
            bool first = true;
            do {
                bulk::wait(barriers.filters_full[filter.stage], resident ? 0 : filter.parity);
                tensor::group_begin();
#pragma unroll
                for (int k = 0; k < Traits::slices; ++k)
#pragma unroll
                    for (int m = 0; m < blocks; ++m)
                        tensor::group_product(sum[m], operands.a(filter.stage, m, k),
                                              operands.b(slot.stage, p.shift[tap], k), k > 0 ? 1 : adds);
                tensor::group_commit();
                tensor::group_left<1>();  // the step before has been read
                if (!adds) {
                    meanwhile();
                } else if (leads_warp) {
                    if constexpr (!resident) bulk::arrive(barriers.filters_empty[last_filter]);
                    if (first) bulk::arrive(barriers.empty[last_slot]);
                }
                adds = 1;
                first = false;
                last_filter = filter.stage;
                filter.next();
            } while (++tap < p.until[plane]);
            last_slot = slot.stage;
        }
    if (teams > 1 && leads_warp) bulk::arrive(next);  // while this team's last step is multiplied
    tensor::group_left<0>();
#pragma unroll
    for (int m = 0; m < blocks; ++m) tensor::group_done(sum[m]);
    if (leads_warp) {
        if constexpr (!resident) bulk::arrive(barriers.filters_empty[last_filter]);
        bulk::arrive(barriers.empty[last_slot]);
    }
}

// -- results --------------------------------------------------------------------------------------------------------

// Of block `m` of a group: the first channel of the group of filters, and of all.
struct Spot {
    int within, channel;

    __device__ __forceinline__ Spot(const Params& p, const Tile& tile, int group, int m) {
        within = tile.channel + (group % team * blocks + m) * 64;
        channel = tile.group * p.out_channels + within;
    }
};

// One thread: what the epilogue of a group's tile reads.
__device__ __forceinline__ void bring_tensors(const Params& p, const Tile& tile, int group, unsigned char* places,
                                              bulk::Barrier& arrived) {
    int there = 0;
#pragma unroll
    for (int m = 0; m < blocks; ++m) there += Spot(p, tile, group, m).within < p.out_channels;
    bulk::expect(arrived, there * results::tensors * results::parts * stored * 128);
#pragma unroll
    for (int m = 0; m < blocks; ++m) {
        const Spot spot(p, tile, group, m);
        if (spot.within < p.out_channels)
#pragma unroll
            for (int t = 0; t < results::tensors; ++t)
#pragma unroll
                for (int part = 0; part < results::parts; ++part)
                    bulk::copy(places + m * block_bytes + t * box_bytes + part * box * 128, p.tensors[t], arrived,
                               spot.channel + part * results::across, 0, tile.line, tile.image);
    }
}

__device__ __forceinline__ void store_boxes(const Params& p, const Tile& tile, int group, const unsigned char* places) {
#pragma unroll
    for (int m = 0; m < blocks; ++m) {
        const Spot spot(p, tile, group, m);
        if (spot.within < p.out_channels)
#pragma unroll
            for (int part = 0; part < results::parts; ++part)
                bulk::store(places + m * block_bytes + part * box * 128, p.result,
                            spot.channel + part * results::across, 0, tile.line, tile.image);
    }
    bulk::commit();
}

// Sums and sums of squares of a group's channels over the pixels of a tile, read from where boxes leave: as in
// igemm_sm90.cu, parts[tile, warp][channel][2].
struct Totals {
    float of[blocks][2][2] = {};

    __device__ __forceinline__ void add(const Params& p, const Tile& tile, int m, const unsigned char* from, int warp,
                                        int lane) {
#pragma unroll 4
        for (int column = warp; column < stored; column += 4) {
            const int line = column / pitch;
            const bool there = column - line * pitch < p.width && tile.line + line < p.height;
            const Pack<results::Stored, 2> pair =
                load<2>(reinterpret_cast<const results::Stored*>(from + results::place(box, column, 2 * lane)));
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float value = there ? float(pair.value[c]) : 0.0f;
                of[m][c][0] += value;
                of[m][c][1] += value * value;
            }
        }
    }
    __device__ __forceinline__ void store(const Params& p, const Tile& tile, int group, int warp, int lane) const {
        const i64 row = (i64(tile.band) * 4 + warp) * p.conv_groups + tile.group;
#pragma unroll
        for (int m = 0; m < blocks; ++m) {
            const int channel = Spot(p, tile, group, m).within + 2 * lane;
            float* const to = static_cast<float*>(p.sums) + (row * p.out_channels + channel) * 2;
            if (channel < p.out_channels)
                *reinterpret_cast<Pack<float, 4>*>(to) = {of[m][0][0], of[m][0][1], of[m][1][0], of[m][1][1]};
        }
    }
};

// The epilogue's values of a thread's own channels, two for each block.
struct Vectors {
    static constexpr int count = Traits::vectors ? Epilogue::count : 0;
    Out own[blocks][count > 0 ? count : 1][2];

    __device__ __forceinline__ Vectors(const Params& p, const Tile& tile, int group, int warp, int lane) {
#pragma unroll
        for (int k = 0; k < count; ++k)
            if (results::is_vector(k))
#pragma unroll
                for (int m = 0; m < blocks; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int channel = Spot(p, tile, group, m).within + 16 * warp + lane / 4 + 8 * h;
                        const int at = tile.group * p.out_channels + min(channel, p.out_channels - 1);
                        own[m][k][h] = static_cast<const Out*>(p.operands[k])[at];
                    }
    }
};

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
igemm_sm90_halo(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ Barriers barriers;
    unsigned char* const slots = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);
    unsigned char* const ring = slots + tiles * slot_bytes;
    unsigned char* const all_places = ring + stages * filter_bytes;

    // Place.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // one value for a warp, as the compiler sees it now
    if (threadIdx.x == 0) {
        for (int i = 0; i < tiles; ++i) {
            bulk::init(barriers.full[i], 1);
            bulk::init(barriers.empty[i], 4 * team);
        }
        for (int i = 0; i < stages; ++i) {
            bulk::init(barriers.filters_full[i], 1);
            bulk::init(barriers.filters_empty[i], 4 * team);
        }
        for (int i = 0; i < groups; ++i) bulk::init(barriers.arrived[i], 1);
        for (int i = 0; i < teams; ++i) bulk::init(barriers.turn[i], 4 * team);
        bulk::publish();
    } else if (threadIdx.x == 128 * groups) {  // maps come at once, for those that will ask for boxes
        bulk::fetch_map(p.images[0]);
        bulk::fetch_map(p.filters);
        bulk::fetch_map(p.result);
    }
    for (int i = threadIdx.x; i < tiles * behind / 16; i += threads)
        reinterpret_cast<uint4*>(slots + i / (behind / 16) * slot_bytes + input_bytes)[i % (behind / 16)] = uint4{};
    bulk::written();
    __syncthreads();
    if constexpr (Traits::stats) let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    if (group == groups) {
        Registers::give();
        if (threadIdx.x == 128 * groups) bring_inputs(p, slots, barriers);
        if (threadIdx.x == 128 * groups + 32) bring_filters(p, ring, barriers);
        return;
    }
    Registers::take();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, mine = group / team;
    const bool leads = threadIdx.x % 128 == 0;
    unsigned char* const places = all_places + group * blocks * block_bytes;
    bulk::Barrier& arrived = barriers.arrived[group];

    const Operands operands(slots, ring, group);
    Turn<tiles> slot;
    Turn<stages> filter;
    slot.skip(mine * p.chunks * planes);
    filter.skip(mine * p.chunks * taps);
    int number = 0;  // of the team's tiles
    for (int at = blockIdx.x + mine * gridDim.x; at < p.tiles; at += teams * gridDim.x, ++number) {
        const Tile tile(p, at);
        const Vectors of_channels(p, tile, group, warp, lane);

        // Multiply, in turn. The first team's first turn has come already.
        D sum[blocks][sums];
        if (teams > 1) bulk::wait(barriers.turn[mine], (number + (mine == 0)) & 1);
        multiply(p, sum, operands, slot, filter, barriers, barriers.turn[(mine + 1) % teams], lane == 0, [&] {
            if (!leads) return;
            bulk::read_but<0>();  // the last tile's results, whose places are free now
            if constexpr (held) bring_tensors(p, tile, group, places, arrived);
        });
        slot.skip((teams - 1) * p.chunks * planes);
        filter.skip((teams - 1) * p.chunks * taps);

        // Compute.
        if constexpr (held)
            bulk::wait(arrived, number & 1);
        else
            bulk::sync_group(group);
#pragma unroll
        for (int m = 0; m < blocks; ++m) {
            D whole[box / 2];  // pairs of 8 x 8 matrices
#pragma unroll
            for (int i = 0; i < box / 2; ++i) whole[i] = i < sums ? sum[m][i] : D(0);
            u32 me[4] = {u32(warp), u32(lane)};
            tensor::keep(me);  // places are worked out here: of four bytes each, they are too many to be kept
            results::of_columns<box>(whole, places + m * block_bytes, box_bytes, p.operands, of_channels.own[m],
                                     int(me[0]), int(me[1]));
        }

        // Store.
        bulk::written();
        bulk::sync_group(group);
        if (leads) store_boxes(p, tile, group, places);
        if constexpr (Traits::stats) {
            Totals totals;
#pragma unroll
            for (int m = 0; m < blocks; ++m) totals.add(p, tile, m, places + m * block_bytes, warp, lane);
            totals.store(p, tile, group, warp, lane);
            if constexpr (held) bulk::sync_group(group);  // before tensors of the next tile come there
        }
    }
    if (leads) bulk::read_but<0>();
}
