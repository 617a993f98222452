// Depthwise wgrad of channels-last f16 and bf16 images on tensor cores: a product of x with dy for each filter row,
// of which the sums of diagonals are the taps.
//
//     G_r[j, q] = sum over n,p of  x[n, p*stride - pad + r, q0 + j] * dy[n, p, q0 + q]
//     dw[r, s]  = sum over q of    G_r[q + s, q]
//
// M is 16 columns j of x, N is 8 columns q of dy, K is rows of dy. All blocks q0 of 8 columns add to the same G_r: j
// and q count from the block's own start. Filters wider than 9 have more tiles of 16 columns j. With a stride of 2
// along rows, the even and the odd columns of x are two images with half of the filter's columns each.
//
// A block owns 16 channels, `tap_rows` filter rows and a range of tiles; a warp owns 16 / warps of the channels and
// keeps their G in registers from the first tile to the last. A tile is `images` images by `bands` bands of `rows`
// rows, of `blocks` * 8 columns of dy. An 8 x 8 matrix of dy has row i of each of the 8 bands (of all images): its
// partner in filter row r is row e = i*stride + r of each band of x. So one matrix of x serves several filter rows.
//
// Shared memory, in units of 8 columns of a row (16 bytes): planes of x, planes of dy, zeros, and pixels on their way
// (staged). Rows of a plane are in the order of their place in a band, so that the rows of a matrix lie `pitch` apart
// and images `image` apart, which the host chooses such that they fall into 8 different groups of banks. In the end:
// the sums, and G of a few filter rows.
//
// What is not finite in x must not meet a zero that stands for no pixel of dy. Rows: where dy has no row, or x none,
// both matrices read the zeros. Columns: behind the end of dy, G is computed and not added. A last tile that begins
// within the one before it has zeros in dy for what that one did; there each tap has its product with x anyway.
//
// Workspace: [part][tap][channel]; the second kernel adds the parts in their order, in double.
//
// Traits: A (x), B (dy), Out, Sum, Index, Epilogue; filter_*, stride_*; warps, images, bands, rows, chunk (rows of dy
// that are in registers at a time), blocks, tap_rows; whole (a tile has all rows of its images), ragged (a row of dy
// ends within a block of 8), summed (columns of a block that are there), staged (copy the next tile during the products
// of this one), ahead (ask for it); x_rows (stored), x_phase, x_slots (rows of the same place in a band), x_first (the
// first block that is stored), x_blocks, x_pitch, x_image, x_plane, dy_bands (stored), dy_pitch, dy_image, dy_plane,
// memory (bytes), residents, sum_rows.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/epilogue.cuh"
#include "common/shared.cuh"
#include "common/divide.cuh"
#include "traits"
#include "common/gram.cuh"

using namespace gram;
using T = Traits::A;
using Index = Traits::Index;

struct Params {
    const Traits::A* x;
    const Traits::B* dy;
    Traits::Out* out;
    float* parts;
    int n, channels, in_h, in_w, out_h, out_w, pad_h, pad_w;
    int share, each, more;            // parts; tiles of one, and how many have one more
    int bands, columns;               // bands of an image; blocks of 8 columns of a row
    Divisor groups, tap_tiles;        // of 16 channels; of filter rows
    Divisor row_tiles, column_tiles;  // of an image
};

constexpr int R = Traits::filter_h, S = Traits::filter_w, SH = Traits::stride_h, SW = Traits::stride_w;
constexpr int warps = Traits::warps, threads = 32 * warps, owned = 16 / warps;  // channels of a warp
constexpr int NB = Traits::images, HB = Traits::bands, I = Traits::rows, KI = Traits::chunk, Q = Traits::blocks;
constexpr int half = (KI + 1) / 2;                            // rows i and i + half of a band are multiplied together
constexpr int RG = Traits::tap_rows, M = SH * I;              // M: rows of x from a band to the next
constexpr int parities = SW < S ? SW : S;                     // of the columns of x that taps are in
constexpr int XB = Traits::x_blocks, across = parities * XB;  // units of a stored row of x
constexpr int unit_size = sizeof(Unit);
constexpr u32 x_moves = NB * Traits::x_rows * across * 2, dy_moves = NB * I * Traits::dy_bands * Q * 2;  // 8 units each
constexpr int x_units = 16 * Traits::x_plane + 4, dy_units = 16 * Traits::dy_plane + 4, zero_units = 16;
// Of a row of a tile, in order of the places in a band.
__device__ constexpr int slot_of(int row) { return floor_mod(row, M) * Traits::x_slots + floor_div(row, M); }
// Units from a row to the one SH * half further: in the same band, and where that is in the next.
constexpr int near_rows = SH * half * Traits::x_slots * Traits::x_pitch;
constexpr int far_rows = ((SH * half - M) * Traits::x_slots + 1) * Traits::x_pitch;
__device__ constexpr int taps_of(int parity) { return ceil_div(S - parity, SW); }
__device__ constexpr int tiles_of(int parity) { return ceil_div(7 + taps_of(parity), 16); }
constexpr int tiles = tiles_of(0) + (parities > 1 ? tiles_of(1) : 0);

// In the end: sums [tap][channel] of the block, and G of `together` filter rows for each warp.
constexpr int sum_pitch = 17, sums = RG * S * sum_pitch;
// 9: what lies on a diagonal, and beside it, falls into other banks.
constexpr int g_pitch = 9, g_size = tiles * 16 * g_pitch;
constexpr int fits = (Traits::memory / 4 - sums) / (warps * g_size), together = fits < RG ? fits : RG;

static_assert(NB * HB == 8, "8 rows of a matrix");
static_assert(NB == 1 || Traits::whole, "several images: all of their rows");
static_assert(16 % warps == 0 && I % KI == 0, "even shares");
static_assert(Traits::memory >= 16 * (x_units + dy_units + zero_units), "all planes fit");
static_assert(!Traits::staged || Traits::memory >= 16 * (x_units + dy_units + zero_units + 8 * int(x_moves + dy_moves)),
              "all pixels fit");
static_assert(together > 0, "the sums fit");
static_assert(across <= zero_units - 3, "a row of zeros is as long as a row of x");

// Octets of channels are 4 units further apart than their planes need: neighbouring lanes store neighbouring octets.
__device__ __forceinline__ int plane_of(int channel, int plane) { return channel * plane + channel / 8 * 4; }

// What a block owns: blocks go along channels, so that those that run together read whole lines; then filter rows, then
// parts. Worked out where it is used, from the block's number alone: kept, it would take registers from the products.
struct Share {
    int first_channel, r0, part, begin, end;

    __device__ __forceinline__ explicit Share(const Params& p) : part(gram::block()) {
        first_channel = p.groups.split(part) * 16;
        r0 = p.tap_tiles.split(part) * RG;
        begin = part * p.each + min(part, p.more);
        end = begin + p.each + (part < p.more);
    }
};

// A tile: its first image, band and row of x, and its columns of dy, of which those before `from` belong to another.
struct Place {
    int image, band, x_row, column, from;

    __device__ __forceinline__ Place(int item, int r0, const Params& p) {
        const int in_row = p.column_tiles.split(item);
        column = min(in_row * Q, p.columns - Q) * 8;
        from = in_row * Q * 8;
        band = p.row_tiles.split(item) * HB;
        image = item * NB;
        x_row = Traits::whole ? 0 : M * band - p.pad_h + r0;
    }
};

// What to do with the pixels of a tile. A thread does the same share of it each time.
enum Do {
    both,   // load and store
    stage,  // copy to `staged`, without a register
    turn,   // from there to the planes
    ask     // to the cache
};

// 8 pixels of 8 channels, `Step` columns from one to the next, and where their transpose goes. Columns from `begin` to
// `end` are there. `row` is column 0, `pixel` the bytes from a column to the next; `staged` has pixels `gap` apart.
template <int Step, Do What>
__device__ __forceinline__ void move(Unit* to, int plane, Unit* staged, int gap, const T* row, int pixel, int first,
                                     int begin, int end, int octet) {
    const char* at = reinterpret_cast<const char*>(row) + i64(first) * pixel;
    Unit from[8];
#pragma unroll
    for (int k = 0; k < 8; ++k, at += Step * pixel) {
        const int column = first + k * Step;
        const bool inside = column >= begin && column < end;
        if constexpr (What == Do::ask) {
            if (inside && k % 2 == octet) gram::ask(at);  // neighbouring lanes share their sectors
        } else if constexpr (What == Do::stage) {
            tensor::copy<unit_size>(staged + k * gap, inside ? at : reinterpret_cast<const char*>(row), inside);
        } else if constexpr (What == Do::turn) {
            from[k] = staged[k * gap];
        } else {
            from[k] = {};
            if (inside) from[k] = load<4>(reinterpret_cast<const u32*>(at));
        }
    }
    if constexpr (What == Do::both || What == Do::turn) {
#pragma unroll
        for (int c = 0; c < 8; ++c) to[c * plane] = planes::transposed(from, c);
    }
}

template <Do What>
__device__ __forceinline__ void fetch(Unit* x, Unit* dy, Unit* staged, const Place& place, const Share& share,
                                      const Params& p) {
    const int first_channel = share.first_channel, first_row = share.r0 - p.pad_h;  // of x that these filter rows meet
    const int limit = Traits::whole ? Traits::x_rows : p.in_h, pixel = p.channels * int(sizeof(T));
#pragma unroll 1
    for (u32 i = threadIdx.x; i < x_moves; i += threads) {
        const int octet = i % 2, unit = i / 2 % across, row = i / (2 * across) % u32(Traits::x_rows);
        const int image = i / (2 * across * Traits::x_rows), h = place.x_row + row, n = place.image + image;
        const int channel = first_channel + octet * 8;
        if (channel >= p.channels || n >= p.n || unsigned(h) >= unsigned(limit)) continue;
        if (Traits::whole && RG < R && unsigned(h - first_row) >= unsigned(SH * (p.out_h - 1) + RG)) continue;
        const int parity = unit / XB, block = unit % XB + Traits::x_first;
        const int column = SW * (place.column + block * 8) + parity - p.pad_w;
        const T* pixels = p.x + (Index(n) * p.in_h + h) * p.in_w * p.channels + channel;
        const int slot = u32(row) % M * Traits::x_slots + u32(row) / M;
        Unit* to = x + plane_of(octet * 8, Traits::x_plane) + image * Traits::x_image + slot * Traits::x_pitch + unit;
        move<SW, What>(to, Traits::x_plane, staged + i, x_moves, pixels, pixel, column, 0, p.in_w, octet);
    }
#pragma unroll 1
    for (u32 i = threadIdx.x; i < dy_moves; i += threads) {
        const int octet = i % 2, block = i / 2 % Q, row = i / (2 * Q) % (I * Traits::dy_bands);
        const int image = i / (2 * Q * I * Traits::dy_bands), h = place.band * I + row, n = place.image + image;
        const int channel = first_channel + octet * 8;
        if (channel >= p.channels || n >= p.n || h >= p.out_h) continue;
        const T* pixels = p.dy + (Index(n) * p.out_h + h) * p.out_w * p.channels + channel;
        const int slot = u32(row) % I * Traits::dy_bands + u32(row) / I;
        Unit* to = dy + plane_of(octet * 8, Traits::dy_plane) + image * Traits::dy_image + slot * Traits::dy_pitch;
        move<1, What>(to + block, Traits::dy_plane, staged + 8 * x_moves + i, dy_moves, pixels, pixel,
                      place.column + block * 8, place.from, p.out_w, octet);
    }
    if constexpr (What == Do::stage) tensor::commit();
}

// The products of one channel. A load takes four matrices, to which lanes in eights give the addresses of rows; `x_at`
// and `dy_at` are the bytes of a lane's band and unit, `zero_at` those of the zeros, `h` its first row of x.
//
// Operands are registers side by side, so loads fetch them as they are used: of x, two blocks of columns in rows e and
// e + SH * half, of dy, rows i and i + half of two blocks. Half of the operands of x lie across two loads and cost
// moves, which are cheaper than loads: an SM moves four times in the cycle of one matrix.
struct Lane {
    int x_at[2], dy_at, zero_at, h, limit;  // x_at: where SH * half rows further are of the same band, or of the next
    bool odd, there, kept[2];               // odd matrix of a load; its row is one of dy; columns of the last block are

    __device__ __forceinline__ void load_dy(u32 (&to)[(Q + 1) / 2][4], const char* memory, int i, bool both) const {
        const bool real = there && (both || !odd);
        const char* row = memory + (real ? dy_at + i * Traits::dy_bands * Traits::dy_pitch * unit_size : zero_at);
#pragma unroll
        for (int block = 0; block < Q; block += 2) {
            if (block + 1 < Q) {
                tensor::load_transposed(to[block / 2], row + block * unit_size);
            } else {
                u32 two[2];
                tensor::load_transposed(two, row + block * unit_size);
                to[block / 2][0] = two[0];
                to[block / 2][1] = two[1];
            }
        }
    }
    __device__ __forceinline__ void load_x(u32 (&to)[(XB + 1) / 2][4], const char* memory, int e, int parity) const {
        const int place = e - Traits::x_phase, slot = slot_of(place);
        const bool next_band = floor_mod(place, M) + SH * half >= M;
        const char* row =
            memory +
            (unsigned(h + e) < unsigned(limit) ? x_at[next_band] + slot * Traits::x_pitch * unit_size : zero_at);
        const char* last = XB % 2 && odd ? memory + zero_at : row;
#pragma unroll
        for (int block = 0; block < XB; block += 2)
            tensor::load_transposed(to[block / 2], (block + 1 < XB ? row : last) + (parity * XB + block) * unit_size);
    }
};

__device__ __forceinline__ void multiply(float (&acc)[RG][tiles][4], const char* memory, const Lane& lane) {
#pragma unroll
    for (int first = 0; first < I; first += KI) {
        u32 dy[half][(Q + 1) / 2][4];
#pragma unroll
        for (int i = 0; i < half; ++i) lane.load_dy(dy[i], memory, first + i, i + half < KI);

        // Step by step: the rows e of a parity, with all filter rows that meet them.
        constexpr int steps = (SH * (half - 1) + RG) * parities;
        u32 x[steps][(XB + 1) / 2][4];
        lane.load_x(x[0], memory, SH * first, 0);
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            if (half > 1) __syncwarp();  // or the compiler moves all loads up here, and has no registers left
            const int e = step / parities, parity = step % parities, next = step + 1 < steps ? step + 1 : step;
            if (next > step)  // on its way while this one is multiplied
                lane.load_x(x[next], memory, SH * first + next / parities, next % parities);
#pragma unroll
            for (int block = 0; block < Q; ++block) {
                const bool masked = Traits::ragged && block == Q - 1;
#pragma unroll
                for (int in_parity = 0; in_parity < tiles_of(parity); ++in_parity) {
                    const int tile = parity * tiles_of(0) + in_parity;
                    const int lower = block + 2 * in_parity - Traits::x_first, upper = lower + 1;
                    if (upper < 0 || lower >= XB) continue;
                    const auto a = [&](int unit, int second) {  // behind an odd block, zeros have been loaded
                        return unit < 0 || unit >= XB + XB % 2 ? 0u : x[step][unit / 2][unit % 2 + second * 2];
                    };
#pragma unroll
                    for (int i = 0; i < half; ++i) {  // filter rows in turn: sums that do not wait for each other
                        const int r = e - SH * i;
                        if (r < 0 || r >= RG) continue;
                        float apart[4] = {};
                        float (&sum)[4] = masked ? apart : acc[r][tile];
                        const u32(&b)[4] = dy[i][block / 2];
                        if (i + half < KI)
                            tensor::mma<T>(sum, a(lower, 0), a(upper, 0), a(lower, 1), a(upper, 1), b[block % 2 * 2],
                                           b[block % 2 * 2 + 1]);
                        else
                            tensor::mma<T>(sum, a(lower, 0), a(upper, 0), b[block % 2 * 2]);
                        if (masked)
#pragma unroll
                            for (int k = 0; k < 4; ++k)
                                if (lane.kept[k % 2]) acc[r][tile][k] += apart[k];
                    }
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
depthwise_mma_wgrad(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    Unit* const x = reinterpret_cast<Unit*>(memory);
    Unit* const dy = x + x_units;
    Unit* const zeros = dy + dy_units;
    Unit* const staged = zeros + zero_units;
    let_next_start();

    if (threadIdx.x < zero_units) zeros[threadIdx.x] = {};
    float acc[owned][RG][tiles][4];
#pragma unroll
    for (int i = 0; i < owned * RG * tiles * 4; ++i)
        acc[i / 4 / tiles / RG][i / 4 / tiles % RG][i / 4 % tiles][i % 4] = 0;

    if constexpr (Traits::staged) {
        const Share share(p);
        fetch<Do::stage>(x, dy, staged, Place(share.begin, share.r0, p), share, p);
    }
#pragma unroll 1
    for (int turn = 0; turn < p.each + 1; ++turn) {
        const Share share(p);
        const int item = share.begin + turn, r0 = share.r0;
        if (item >= share.end) break;
        const Place place(item, r0, p);
        if constexpr (Traits::staged) tensor::wait<0>();
        __syncthreads();  // nobody reads the tile before this one any more
        fetch<Traits::staged ? Do::turn : Do::both>(x, dy, staged, place, share, p);
        __syncthreads();
        if constexpr (Traits::staged || Traits::ahead)
            if (item + 1 < share.end)
                fetch<Traits::staged ? Do::stage : Do::ask>(x, dy, staged, Place(item + 1, r0, p), share, p);

        // Lanes l % 8 are the rows of a matrix, l / 8 the matrices: see load_x and load_dy.
        const int thread = gram::thread(), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
        const int image = lane % 8 / HB, band = lane % 8 % HB, odd = lane / 8 % 2, high = lane / 16 % 2;
        // A stored row's place in its band is that of x, not of the window: see x_phase.
        const int shift = Traits::whole ? floor_div(p.pad_h - r0, M) : 0;
        const int x_lane = image * Traits::x_image + (band - shift) * Traits::x_pitch + odd;
        const int dy_lane =
            x_units + image * Traits::dy_image + (band + odd * half * Traits::dy_bands) * Traits::dy_pitch + high;
        Lane mine;
        mine.zero_at = (x_units + dy_units + lane / 8) * unit_size;
        mine.odd = odd;
        mine.there = place.image + image < p.n && place.band + band < p.bands;
        mine.h = mine.there ? M * (place.band + band) - p.pad_h + r0 + high * SH * half : -(1 << 28);
        mine.limit = Traits::whole ? Traits::x_rows : p.in_h;
        const int left = p.out_w - place.column - 8 * (Q - 1) - lane % 4 * 2;  // of the last block, from this lane's
        mine.kept[0] = left > 0;
        mine.kept[1] = left > 1;
#pragma unroll
        for (int i = 0; i < owned; ++i) {
            const int channel = warp + i * warps, x_at = x_lane + plane_of(channel, Traits::x_plane);
            mine.x_at[0] = (x_at + high * near_rows) * unit_size;
            mine.x_at[1] = (x_at + high * far_rows) * unit_size;
            mine.dy_at = (dy_lane + plane_of(channel, Traits::dy_plane)) * unit_size;
            if (share.first_channel + channel < p.channels)
                multiply(acc[i], reinterpret_cast<const char*>(memory), mine);
        }
    }

    // The sums of diagonals: each warp lays out G and takes one tap a lane.
    __syncthreads();
    const int thread = gram::thread(), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
    float* const total = reinterpret_cast<float*>(memory);
    float* const G = total + sums + warp * together * g_size;
#pragma unroll
    for (int i = 0; i < owned; ++i) {
#pragma unroll
        for (int from = 0; from < RG; from += together) {
#pragma unroll
            for (int r = from; r < from + together && r < RG; ++r)
#pragma unroll
                for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        G[(r - from) * g_size + (tile * 16 + lane / 4 + k / 2 * 8) * g_pitch + lane % 4 * 2 + k % 2] =
                            acc[i][r][tile][k];
            __syncwarp();
            for (int e = lane; e < min(together, RG - from) * S; e += 32) {
                const int s = e % S, first = s % SW * tiles_of(0) * 16 + s / SW;
                const float* at = G + e / S * g_size + first * g_pitch;
                float sum = 0;
#pragma unroll
                for (int q = 0; q < Traits::summed; ++q) sum += at[q * (g_pitch + 1)];
                total[(from * S + e) * sum_pitch + warp + i * warps] = sum;
            }
            __syncwarp();
        }
    }
    __syncthreads();

    // Store: 16 channels of a tap side by side.
    const Share share(p);
    const int here = min(RG, R - share.r0) * S, first_channel = share.first_channel;
    for (int e = threadIdx.x; e < here * 16; e += threads) {
        const int tap = e / 16, channel = e % 16;
        if (first_channel + channel < p.channels)
            p.parts[(i64(share.part) * (R * S) + share.r0 * S + tap) * p.channels + first_channel + channel] =
                total[tap * sum_pitch + channel];
    }
}

// A row of 32 threads has 32 channels of a tap. `sum_rows` rows share a tap: row i adds every sum_rows-th part from the
// i-th.
extern "C" __global__ void __launch_bounds__(256)
depthwise_mma_wgrad_sum(const __grid_constant__ Params p) {
    constexpr int rows = Traits::sum_rows, taps = 8 / rows;
    __shared__ double total[8][32];
    const int groups = (p.channels + 31) / 32, column = threadIdx.x % 32, row = threadIdx.x / 32;
    const int k = blockIdx.x % groups * 32 + column, tap = blockIdx.x / groups * taps + row / rows;
    const bool there = k < p.channels && tap < R * S;
    double sum = 0;
    wait_for_previous();
    if (there) {
        const float* const from = p.parts + i64(tap) * p.channels + k;
#pragma unroll 8
        for (int part = row % rows; part < p.share; part += rows) sum += from[i64(part) * (R * S) * p.channels];
    }
    if (rows > 1) {
        total[row][column] = sum;
        __syncthreads();
    }
    if (row % rows > 0 || !there) return;
    for (int i = 1; i < rows; ++i) sum += total[row + i][column];
    Traits::Sum result[1] = {Traits::Sum(sum)};
    const void* const none[1] = {nullptr};
    const Index at = Index(k) * (R * S) + tap;
    Traits::Epilogue::apply<1, true>(result, none, k, at);
    p.out[at] = Traits::Out(result[0]);
}
