// Patch embedding as one matrix product, windows x filters, with rows of the image in shared memory as they are.
//
//     y[n, k, p, q] = sum over d of  x[place(n, p, q) + offset(d)] * w[k, d]
//
// `d` counts the elements of a window in the order of the filter's memory. Along the image's last axis `run` of them lie
// side by side (S in nchw, S*C in nhwc): 32 bytes for a ViT-B/16. Copies of 32 bytes to where a product wants them take
// longer than the product, whoever makes them. Here whole rows of the image are copied, `depth_rows` of them for each
// line of windows as one piece, and the warps that multiply read their windows out of them by ldmatrix into registers.
// Filters come by the tensor memory accelerator into the order that wgmma reads.
//
// A tile of the result is `windows` x `filters`. Windows of all images are one sequence, of which a tile takes some side
// by side; `slots` lines hold them wherever the first one lies. Four warps ask for copies, as far ahead as the ring has
// stages; each warpgroup multiplies 64 windows by all filters of the tile. A full stage is known by its bytes, an empty
// one by the arrivals of all threads that read it. Blocks of a cluster, `filter_blocks` tiles of filters by
// `window_blocks` tiles of windows, share copies: each asks for its part of the filters and for some of the lines, and
// has them sent to all blocks that need them, since the second-level cache would be the limit otherwise.
//
// Of a ViT-B/16's patches (16 images: 3136 x 768 results, depth 768) a tile of 128 x 192 takes 8 products of 192 columns
// for each of 12 steps: 100 tiles, 5.2 us at the rate of an H200. A block asks for 530 KB, 53 MB in all; clusters of
// 2 x 2 halve that.
//
// Shared memory: the ring, [stages] of the filters, [filters][64] in rows of 128 bytes as common/wgmma.cuh has them, and
// [slots][depth_rows] rows of the image. At the end the results take its place and leave in the order of memory: in nchw
// as [filters][windows], in nhwc as [windows][filters].
//
// Traits: A, B, Out, Sum, Index, Epilogue; windows, filters, stages, filter_blocks, window_blocks, pixel_rows (the results
// of a pixel lie side by side), run, depth_rows, slots, line (bytes of an image's row), step (bytes from one window to
// the next), taps_h, taps_d, together (results that lie side by side, aligned and of one image).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/bulk.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"
#include "traits"

using Index = Traits::Index;
using T = Traits::A;

struct Params {
    const T* x;
    const T* w;  // read by its map
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    i64 image;                           // elements of one
    int pixels, filters, steps;          // of the whole product
    int size_d, size_h, step_d, step_h;  // of the image; planes and rows from one window to the next
    Divisor out_w, out_h, out_d, out_pixels, filter_clusters;
    bulk::Map weights;
};

__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr bool pixel_rows = Traits::pixel_rows;
constexpr int windows = Traits::windows, filters = Traits::filters, stages = Traits::stages;
constexpr int filter_blocks = Traits::filter_blocks, window_blocks = Traits::window_blocks;
constexpr int peers = filter_blocks + window_blocks - 1;  // blocks that send to this one and get from it
constexpr int together = Traits::together, groups = windows / 64, threads = 128 * groups;
constexpr int filter_bytes = filters * 128, slot_bytes = Traits::depth_rows * Traits::line;
constexpr int stage_bytes = (filter_bytes + Traits::slots * slot_bytes + 1023) / 1024 * 1024;
constexpr int deep = Traits::run * Traits::depth_rows / 16;       // products of a step
constexpr int pitch = 2 * (pixel_rows ? filters : windows) + 16;  // bytes; eight rows fall into all banks
static_assert(windows % 64 == 0 && filters % 16 == 0 && filters % (8 * window_blocks) == 0 && deep <= 4,
              "whole warpgroups and products");
static_assert(stages > 1, "a ring");
// Registers of a thread: of all at first, of those that copy, and of those that multiply, which get what is left.
constexpr int given = min_of(65536 / (threads + 128) / 8 * 8, 240), copying = 40;
constexpr int multiplying = min_of((given * (threads + 128) - copying * 128) / threads / 8 * 8, 240);
constexpr bool both = filters / 2 + 8 * deep + 24 <= given;  // whether two steps' windows fit beside the sums

// The place of this block's tile, and the lines that its windows lie on.
struct Tile {
    int window, filter, line, lines;

    __device__ __forceinline__ Tile(const Params& p, int rank) {
        int cluster = blockIdx.x / (filter_blocks * window_blocks);
        filter = (p.filter_clusters.split(cluster) * filter_blocks + rank % filter_blocks) * filters;
        window = (cluster * window_blocks + rank / filter_blocks) * windows;
        int last = min(window + windows, p.pixels) - 1;
        line = window;
        p.out_w.split(line);
        p.out_w.split(last);
        lines = window < p.pixels ? last - line + 1 : 0;
    }
};

// Four warps: all copies that this block asks for. Each lane has some lines of windows; lanes of a warp ask one after the
// other, and those of four warps at the same time. The last warp, which has the fewest lines, asks for the filters.
__device__ __forceinline__ void bring(const Params& p, const Tile& tile, int rank, int warp, int lane,
                                      unsigned char* ring, bulk::Barrier* full, bulk::Barrier* empty) {
    constexpr int part = filters / window_blocks;
    const int mine = rank % filter_blocks, first = part * (rank / filter_blocks);
    const int same_windows = ((1 << filter_blocks) - 1) << (rank - mine);
    int same_filters = 0;
#pragma unroll
    for (int i = 0; i < window_blocks; ++i) same_filters |= 1 << (mine + filter_blocks * i);

    constexpr int each = (Traits::slots + 127) / 128;
    const T* from[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
        int image = tile.line + 4 * (lane + 32 * i) + warp;
        const int h = p.out_h.split(image), depth = p.out_d.split(image);
        from[i] = p.x + image * p.image + Index(depth * p.step_d * p.size_h + h * p.step_h) * (Traits::line / 2);
    }
    for (int step = 0; step < p.steps; ++step) {
        const int stage = step % stages;
        unsigned char* const to = ring + stage * stage_bytes;
        if (step >= stages) bulk::wait(empty[stage], (step / stages - 1) & 1);
        if (warp == 3 && lane == 0) {
            bulk::expect(full[stage], filter_bytes + tile.lines * slot_bytes);
            bulk::copy(to + first * 128, p.weights, full[stage], same_filters, step * 16 * deep, tile.filter + first);
        }
        const int row = step * Traits::depth_rows, plane = row / Traits::taps_h;
        const int line = (plane / Traits::taps_d * p.size_d + plane % Traits::taps_d) * p.size_h + row % Traits::taps_h;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int slot = 4 * (lane + 32 * i) + warp;
            if (slot < tile.lines && lane % filter_blocks == mine)
                bulk::copy_line(to + filter_bytes + slot * slot_bytes, from[i] + Index(line) * (Traits::line / 2),
                                slot_bytes, full[stage], same_windows);
        }
    }
}

__device__ __forceinline__ Index place_of(const Params& p, int pixel, int filter) {
    if (pixel_rows) return Index(pixel) * p.filters + filter;
    const int inner = p.out_pixels.split(pixel);
    return (Index(pixel) * p.filters + filter) * p.out_pixels.value + inner;
}

// Where a lane's window lies in a stage, as load_matrices wants its sixteen bytes: lanes 0 to 15 the first half of the 32
// bytes of 16 windows, 16 to 31 the second, and the other way round for every second four windows. Windows that are 128
// bytes apart would fall into the same banks; `read_windows` puts the halves right again.
__device__ __forceinline__ int place(const Params& p, const Tile& tile, int warp, int lane) {
    int line = tile.window + 16 * warp + lane % 16;
    const int q = p.out_w.split(line);
    const int half = lane / 16 ^ lane % 8 / 4;
    return filter_bytes + min(line - tile.line, Traits::slots - 1) * slot_bytes + q * Traits::step + 16 * half;
}

using Operand = u32[deep][4];  // a warp's windows of one step

__device__ __forceinline__ void read_windows(Operand& a, const unsigned char* at, bool swapped) {
#pragma unroll
    for (int k = 0; k < deep; ++k) {
        constexpr int runs = Traits::run / 16;
        u32 read[4];
        tensor::load_matrices(read, at + k / runs * Traits::line + k % runs * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = swapped ? read[i ^ 2] : read[i];
    }
}

__device__ __forceinline__ void start_products(float (&sum)[filters / 2], const Operand& a,
                                               const unsigned char* stage) {
    const u64 b = tensor::descriptor(stage);
    tensor::group_begin();
#pragma unroll
    for (int k = 0; k < deep; ++k) tensor::group_product(sum, a[k], tensor::along(b, 32 * k));
    tensor::group_commit();
}

// Until at most `Left` steps are under way, of which `a` is none.
template <int Left>
__device__ __forceinline__ void end_products(float (&sum)[filters / 2], Operand& a) {
    tensor::group_wait<Left>(sum);
#pragma unroll
    for (int k = 0; k < deep; ++k) tensor::keep(a[k]);
}

// A result: the epilogue of a sum.
__device__ __forceinline__ Traits::Out result_of(const Params& p, float sum, int pixel, int filter) {
    Traits::Sum result[1] = {sum};
    if (Traits::Epilogue::count > 0 && (pixel >= p.pixels || filter >= p.filters)) return Traits::Out(0.0f);
    Traits::Epilogue::apply<1, pixel_rows>(result, p.operands, filter, place_of(p, pixel, filter));
    return Traits::Out(result[0]);
}

// The results of a warp's windows, from registers to where those that lie side by side in memory lie side by side.
__device__ __forceinline__ void stage_results(const Params& p, const Tile& tile, const float (&sum)[filters / 2],
                                              unsigned char* results, int warp, int lane) {
    const int window = 16 * warp + lane / 4, filter = 2 * (lane % 4);
    const int row = lane % 8, across = 8 * (lane / 8 % 2), further = 8 * (lane / 16);
    unsigned char* const to = results + (pixel_rows ? (16 * warp + across + row) * pitch + 2 * further
                                                    : (further + row) * pitch + 2 * (16 * warp + across));
#pragma unroll
    for (int j = 0; j < filters; j += 16) {
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pixel = tile.window + window + 8 * (i % 2), first = tile.filter + filter + j + 8 * (i / 2);
            const u32 low = result_of(p, sum[j / 2 + 2 * i], pixel, first).bits;
            const u32 high = result_of(p, sum[j / 2 + 2 * i + 1], pixel, first + 1).bits;
            packed[i] = low | high << 16;
        }
        tensor::store_matrices<!pixel_rows>(to + j * (pixel_rows ? 2 : pitch), packed);
    }
}

extern "C" __global__ void __cluster_dims__(filter_blocks* window_blocks, 1, 1) __launch_bounds__(threads + 128, 1)
patch_rows(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ bulk::Barrier full[stages], empty[stages];
    unsigned char* const ring = reinterpret_cast<unsigned char*>((u64(memory) + 1023) / 1024 * 1024);

    // Place.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % (filter_blocks * window_blocks);
    const Tile tile(p, rank);
    if (threadIdx.x == 0) {
        bulk::fetch_map(p.weights);
#pragma unroll
        for (int i = 0; i < stages; ++i) {
            bulk::init(full[i], 1);
            bulk::init(empty[i], threads * peers);
        }
        bulk::publish();
    }
    __syncthreads();
    if (peers > 1) {
        bulk::cluster_arrive();
        bulk::cluster_wait();
    }

    if (warp >= 4 * groups) {
        // Copy.
        tensor::give_registers<copying>();
        bring(p, tile, rank, warp - 4 * groups, lane, ring, full, empty);
        if (peers > 1) bulk::cluster_arrive();
    } else {
        // Multiply.
        tensor::take_registers<multiplying>();
        float sum[filters / 2] = {};
        const int window = place(p, tile, warp, lane), mine = rank % filter_blocks;
        const auto read = [&](Operand& a, int step) {
            bulk::wait(full[step % stages], step / stages & 1);
            read_windows(a, ring + step % stages * stage_bytes + window, lane >= 16);
        };
        const auto start = [&](Operand& a, int step) { start_products(sum, a, ring + step % stages * stage_bytes); };
        // This thread has read: blocks of the same filters may send again, and those of the same windows. It takes a
        // while, so that products are asked for before.
        const auto release = [&](int step) {
            if (step + stages >= p.steps) return;
#pragma unroll
            for (int i = 0; i < window_blocks; ++i) bulk::arrive(empty[step % stages], mine + filter_blocks * i);
#pragma unroll
            for (int i = 1; i < filter_blocks; ++i)
                bulk::arrive(empty[step % stages], rank - mine + (mine + i) % filter_blocks);
        };
        Operand even;
        if constexpr (both) {  // While products of one step run, the windows of the next are read and theirs asked for.
            Operand odd;
            for (int step = 0; step < p.steps; step += 2) {
                read(even, step);
                start(even, step);
                if (step > 0) {
                    end_products<1>(sum, odd);
                    release(step - 1);
                }
                if (step + 1 == p.steps) break;
                read(odd, step + 1);
                start(odd, step + 1);
                end_products<1>(sum, even);
                release(step);
            }
            end_products<0>(sum, odd);
        } else {
            for (int step = 0; step < p.steps; ++step) {
                read(even, step);
                start(even, step);
                if (step > 0) release(step - 1);
                end_products<0>(sum, even);
            }
        }
        end_products<0>(sum, even);
        if (peers > 1) bulk::cluster_arrive();

        // Store.
        bulk::sync_first<threads>();  // nobody reads the ring any more
        stage_results(p, tile, sum, ring, warp, lane);
        bulk::sync_first<threads>();
        using Piece = Pack<Traits::Out, together>;
        constexpr int rows = pixel_rows ? windows : filters, across = (pixel_rows ? filters : windows) / together;
        constexpr int between = threads / across, some = 4;
        static_assert(between > 0, "a thread stays in its column, and takes some rows at a time");
        const int column = threadIdx.x % across * together;
        const bool stores = threadIdx.x < between * across;
        for (int first = stores ? threadIdx.x / across : rows; first < rows; first += some * between) {
            Piece piece[some];
#pragma unroll
            for (int i = 0; i < some; ++i)
                if (first + i * between < rows)
                    piece[i] = *reinterpret_cast<const Piece*>(ring + (first + i * between) * pitch + 2 * column);
#pragma unroll
            for (int i = 0; i < some; ++i) {
                const int row = first + i * between;
                const int pixel = tile.window + (pixel_rows ? row : column);
                const int filter = tile.filter + (pixel_rows ? column : row);
                if (row < rows && pixel < p.pixels && filter < p.filters)
                    store<together>(p.out + place_of(p, pixel, filter), piece[i]);
            }
        }
    }
    if (peers > 1) bulk::cluster_wait();  // nobody leaves while another may still arrive at its barriers
}
