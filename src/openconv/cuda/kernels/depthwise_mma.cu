// Depthwise fprop, and dgrad of stride 1, of channels-last images on tensor cores: a row of a filter as a matrix.
//
//     y[p, q] = sum over r, j of  x[p*stride - pad + r, j] * T_r[j, q]        T_r[j, q] = w[r, j - (q*stride - pad)]
//
// For one channel that is a product for each filter row r: 16 result rows by 8 result columns, from the input columns
// j that these need. T_r depends on j - q alone, so that all tiles of 8 columns share its registers. Of a stride of 2,
// the even and the odd columns of the input are planes of their own, and the even and odd taps filters of their own.
// dgrad of stride 1 is the same with a flipped filter.
//
// A block takes 8 * octets channels of one tile after the other: `rows` result rows and 8 * tiles_n result columns of
// `images` images. Its pixels become planes (common/planes.cuh), channel by channel. A warp takes a channel at a time
// and keeps all of its sums in registers. Then its results take the place of the channel's pixels, and all threads
// write them as vectors of 8 channels.
//
// Rows: the 8 rows of a matrix that ldmatrix loads lie `segment` = 2 * tiles_m result rows apart, each at the same
// place of its segment of an image; tile mt of 16 rows is places mt and mt + tiles_m of all 8 segments. So what tile 0
// reads for filter row r is what tile 1 reads for filter row r - 1 (of stride 1), and all tiles share what was loaded:
// there are R + tiles_m - 1 loads rather than R * tiles_m. A plane has a unit left out after each segment, so that
// matrices take their rows from different banks.
//
// Rows that are not there, of the input or of a tile, are read from a row of zeros. Columns that are not there are
// zeros in the planes; blocks of 8 columns that lie outside of every image are neither stored nor multiplied: those
// stored are numbers first_block ... first_block + blocks - 1 of the columns from `lead` before the first one that is
// needed.
//
// A Toeplitz matrix multiplies pixels outside of the window by zero, which hides them only while they are finite.
// Images of a tile in which a value is not finite, and all of them if a weight is not, are computed tap by tap
// instead.
//
// Shared memory: a row of zeros; filters [channel][r][parity][copy][tap], where the second copy is one tap further on,
// so that each pair of taps is aligned in one of them; planes.
//
// Traits: A, B, Out, Sum, Index, Epilogue; filter_h, filter_w, stride_h, step (the stride along a row: 1 or 2),
// flipped, octets, rows, images, tiles_m, tiles_n, lead, first_block, blocks, in_rows (stored for each image),
// in_image and out_image (units from an image to the next), plane (units of a channel), warps, residents, unroll,
// batch (loads under way), early (filters are loaded first), fused (the epilogue needs no tensor: it is applied to
// sums in registers), wide (results are staged in f32, for an epilogue that comes later).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/shared.cuh"
#include "common/mma.cuh"
#include "common/planes.cuh"
#include "common/depthwise.cuh"
#include "traits"

using namespace planes;
using depthwise::ceil_div;
using depthwise::larger;
using T = Traits::A;
using Index = Traits::Index;

struct Params {
    const T* a;
    const T* b;
    T* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int channels, groups;  // of the images; blocks along them
    int items, workers;    // tiles of the batch, and blocks that share those of a group
    int tiles_p, tiles_q;  // of an image
    int n, in_h, in_w, out_h, out_w, pad_h, pad_w;
};

constexpr int R = Traits::filter_h, S = Traits::filter_w, SH = Traits::stride_h, step = Traits::step;
constexpr int TP = Traits::rows, NI = Traits::images, MT = Traits::tiles_m, NT = Traits::tiles_n;
constexpr int lead = Traits::lead, low = Traits::first_block, stored = Traits::blocks;
constexpr int threads = 32 * Traits::warps;
constexpr bool wide = Traits::wide;
using Tile = Planes<Traits::octets, stored, step>;

// Of the taps of a parity: how many, blocks of columns that 8 results need, halves of one copy in shared memory.
__device__ constexpr int taps(int parity) { return (S - parity + step - 1) / step; }
__device__ constexpr int depth(int parity) { return taps(parity) > 0 ? ceil_div(lead + 7 + taps(parity), 8) : 0; }
__device__ constexpr int copy_halves(int parity) { return (taps(parity) / 2 + 1) * 2; }
constexpr int KB = larger(depth(0), step > 1 ? depth(1) : 0);
constexpr int row_halves = 2 * (copy_halves(0) + (step > 1 ? copy_halves(1) : 0));
constexpr int filter_halves = R * row_halves;

// Units of 16 bytes. Lanes read up to 16 taps before a filter and 16 behind it, and mask what they get.
constexpr int zero_units = larger(stored * step, 2) + 1;
constexpr int filter_units = ceil_div(Traits::octets * 8 * filter_halves, 8) + 2;

// Where row `row` of image `image` of the block lies in a plane, in units: of the pixels, and of the results.
constexpr int segment = 2 * MT, segments = 8 / NI, out_pitch = wide ? 2 * NT : NT;
__device__ __forceinline__ int place_in(int image, int row) {
    return image * Traits::in_image + row * Tile::across + int(unsigned(row) / (SH * segment));
}
__device__ __forceinline__ int place_out(int image, int row) {
    return image * Traits::out_image + row * out_pitch + int(unsigned(row) / segment);
}

static_assert(8 % NI == 0 && segments * segment >= TP, "every row of the tile has a sum");
static_assert(Traits::plane >= NI * Traits::in_image && Traits::plane >= NI * Traits::out_image, "all rows fit");
static_assert(!Traits::early || R * S * Traits::octets <= threads, "a thread keeps 8 taps");
static_assert(low + stored <= NT + KB - 1, "blocks that are stored have a use");

// The blocks that tile j of results uses, of those stored: from `first_of` to before `last_of`.
__device__ constexpr int first_of(int j) { return j > low ? j - low : 0; }
__device__ constexpr int last_of(int j, int parity) {
    const int last = j + depth(parity) - low;
    return last < stored ? last : stored;
}

// All columns of 16 rows of a parity, whose units begin `at` for the row that this lane names.
__device__ __forceinline__ void fetch(u32 (&a)[stored][2], const unsigned char* at) {
#pragma unroll
    for (int block = 0; block < stored; block += 2) {
        if (block + 1 < stored) {
            u32 four[4];
            tensor::load_matrices(four, at + block * 16);
            a[block][0] = four[0], a[block][1] = four[1];
            a[block + 1 < stored ? block + 1 : 0][0] = four[2], a[block + 1 < stored ? block + 1 : 0][1] = four[3];
        } else {
            tensor::load_matrices(a[block], at + block * 16);
        }
    }
}

// These by a filter row. Tiles of results take turns, so that no product waits for the one before it.
__device__ __forceinline__ void multiply(float (&acc)[NT][4], const u32 (&a)[stored][2], const u32 (&b)[KB],
                                         int parity) {
#pragma unroll
    for (int pair = 0; pair < KB; pair += 2)
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            const int block = first_of(j) + pair, last = last_of(j, parity), k = block + low - j;
            const int one = block < stored ? block : 0, two = block + 1 < stored ? block + 1 : 0;
            if (block + 1 < last)
                tensor::mma<T>(acc[j], a[one][0], a[one][1], a[two][0], a[two][1], b[k < KB ? k : 0],
                               b[k + 1 < KB ? k + 1 : 0]);
            else if (block < last)
                tensor::mma<T>(acc[j], a[one][0], a[one][1], b[k < KB ? k : 0]);
        }
}

// Taps 8 * i to 8 * i + 7 of the block's filters into both copies; whether all are finite.
__device__ __forceinline__ bool put_taps(T* filters, int i, const Unit& eight) {
    u32 seen = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int c = (8 * i + j) / (R * S), tap = (8 * i + j) % (R * S);
        const int r = Traits::flipped ? R - 1 - tap / S : tap / S, s = Traits::flipped ? S - 1 - tap % S : tap % S;
        T value;
        value.bits = u16(eight.value[j / 2] >> 16 * (j % 2));
        T* const to = filters + c * filter_halves + r * row_halves + (s % step ? 2 * copy_halves(0) : 0);
        to[s / step] = value;
        to[copy_halves(s % step) + s / step + 1] = value;
        seen = watch<T>(seen, eight.value[j / 2]);
    }
    return finite(seen);
}

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
depthwise_mma(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    __shared__ int unusual[NI], any_unusual;  // the last item in which an image, or any, had a value that is not finite
    __shared__ bool unusual_weight;
    Unit* const zeros = reinterpret_cast<Unit*>(memory);
    T* const filters = reinterpret_cast<T*>(zeros + zero_units);
    Unit* const tile = zeros + zero_units + filter_units;

    // Place.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int first_channel = blockIdx.x % p.groups * (8 * Traits::octets);
    const int there = min(Traits::octets, (p.channels - first_channel) / 8);

    // Filters are loaded 8 taps at a time, which begin at a multiple of 16 bytes as 8 channels do. If they are few and
    // registers suffice, they are asked for now, and arrive with the pixels.
    const u32* const taps_of = reinterpret_cast<const u32*>(p.b + Index(first_channel) * (R * S));
    const int vectors = there * (R * S);
    Unit eight = {};
    if (Traits::early && threadIdx.x < vectors) eight = load<4>(taps_of + 4 * threadIdx.x);
    for (int i = threadIdx.x; i < zero_units; i += threads) zeros[i] = {};
    for (int i = threadIdx.x; i < NI; i += threads) unusual[i] = -1;
    if (threadIdx.x == 0) any_unusual = -1, unusual_weight = false;
    __syncthreads();
    for (int item = blockIdx.x / p.groups; item < p.items; item += p.workers) {
        const int tile_q = item % p.tiles_q, tile_p = item / p.tiles_q % p.tiles_p;
        const int n0 = item / (p.tiles_q * p.tiles_p) * NI, p0 = tile_p * TP, q0 = tile_q * (8 * NT);
        const int h0 = max(0, p0 * SH - p.pad_h), rows_here = max(0, min(p.in_h - h0, Traits::in_rows));
        const int first_column = q0 * step - p.pad_w + (8 * low - lead) * step;

        // Load.
        const auto row_of = [&](int row) -> const T* {
            const int n = n0 + row / Traits::in_rows, h = row % Traits::in_rows;
            if (n >= p.n || h >= rows_here) return nullptr;
            return p.a + (Index(n) * p.in_h + h0 + h) * p.in_w * p.channels + first_channel;
        };
        const auto note = [&](int row) { unusual[row / Traits::in_rows] = any_unusual = item; };
        const auto place = [&](int row) { return place_in(row / Traits::in_rows, row % Traits::in_rows); };
        Tile::load<threads, T, Traits::batch>(tile, Traits::plane, NI * Traits::in_rows, first_column, p.in_w,
                                              p.channels, there, row_of, place, note);
        if (item == int(blockIdx.x) / p.groups) {
            constexpr int ahead = R * S * Traits::octets > 2 * threads ? 4 : 1;
#pragma unroll 1
            for (int begin = fresh(threadIdx.x); begin < vectors; begin += ahead * threads) {
                Unit some[ahead];
#pragma unroll
                for (int k = 0; k < ahead; ++k) {
                    some[k] = eight;
                    if (!Traits::early && begin + k * threads < vectors)
                        some[k] = load<4>(taps_of + 4 * (begin + k * threads));
                }
#pragma unroll
                for (int k = 0; k < ahead; ++k)
                    if (begin + k * threads < vectors && !put_taps(filters, begin + k * threads, some[k]))
                        unusual_weight = true;
            }
        }
        __syncthreads();

        // Images with values that are not finite: tap by tap.
        if (any_unusual == item || unusual_weight) {
            const int across = min(8 * NT, p.out_w - q0);
#pragma unroll 1
            for (int i = fresh(threadIdx.x); i < NI * TP * across * there * 8; i += threads) {
                const int c = i % (there * 8), q = i / (there * 8) % across, m = i / (there * 8) / across;
                const int image = m / TP, row = p0 + m % TP;
                if (n0 + image >= p.n || row >= p.out_h || !(unusual[image] == item || unusual_weight)) continue;
                const T* const plane = reinterpret_cast<const T*>(tile + Tile::channel(c, Traits::plane));
                const T* const weights = filters + c * filter_halves;
                float sum[1] = {};
#pragma unroll 1
                for (int r = 0; r < R; ++r)
#pragma unroll 1
                    for (int s = 0; s < S; ++s) {
                        const int h = row * SH - p.pad_h + r, w = (q0 + q) * step - p.pad_w + s;
                        const bool inside = unsigned(h) < unsigned(p.in_h) && unsigned(w) < unsigned(p.in_w);
                        if (!inside && Traits::flipped) continue;  // dy has no padding, x has: of zeros
                        const int i = q + s / step + lead - 8 * low;
                        const int at = 8 * (inside ? place_in(image, h - h0) + s % step * stored : 0) + i;
                        const float x = inside ? float(plane[at]) : 0.0f;
                        sum[0] += x * float(weights[r * row_halves + (s % step ? 2 * copy_halves(0) : 0) + s / step]);
                    }
                const int channel = first_channel + c;
                const Index at = ((Index(n0 + image) * p.out_h + row) * p.out_w + q0 + q) * p.channels + channel;
                Traits::Epilogue::apply<1, true>(sum, p.operands, channel, at);
                p.out[at] = T(sum[0]);
            }
            __syncthreads();
        }

        // Compute. Pairs of taps of a lane's column of T_r: which are taps, and where they begin.
        const int lane = fresh(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
        u32 mask[step][KB];
        int pairs[step];
#pragma unroll
        for (int parity = 0; parity < step; ++parity) {
            const int e = 2 * t - g - lead, odd = e & 1;
            pairs[parity] = (parity ? 2 * copy_halves(0) : 0) + odd * (copy_halves(parity) + 1) + e;
#pragma unroll
            for (int k = 0; k < KB; ++k)
                mask[parity][k] = (unsigned(e + 8 * k) < unsigned(taps(parity)) ? 0xffffu : 0) |
                                  (unsigned(e + 8 * k + 1) < unsigned(taps(parity)) ? 0xffff0000u : 0);
        }
        // The row that this lane names of a matrix, counted from the first that is stored, and where its image lies.
        const int part = lane % 8, half = lane / 8 % 2, next = lane / 16;
        const int h = (part % segments * segment + half * MT) * SH + p0 * SH - p.pad_h - h0;
        const int from =
            int(reinterpret_cast<unsigned char*>(tile) - memory) + (place_in(part / segments, 0) + next) * 16;
#pragma unroll 1
        for (int c = warp; c < there * 8; c += Traits::warps) {
            const int plane = Tile::channel(c, Traits::plane) * 16;
            const T* const weights = filters + c * filter_halves;
            const auto row_of_filter = [&](u32(&b)[step][KB], int r) {
#pragma unroll
                for (int parity = 0; parity < step; ++parity)
#pragma unroll
                    for (int k = 0; k < KB; ++k)
                        b[parity][k] = *reinterpret_cast<const u32*>(weights + r * row_halves + pairs[parity] + 8 * k) &
                                       mask[parity][k];
            };
            // Step i has filter row r = i - mt * stride of tile mt. Of stride 1, those of the last steps are kept.
            constexpr int kept = SH == 1 ? MT : 1;
            float acc[MT][NT][4] = {};
            u32 b[kept][step][KB] = {};
#pragma unroll Traits::unroll
            for (int i = 0; i < R + SH * (MT - 1); ++i) {
                const bool inside = unsigned(h + i) < unsigned(rows_here);
                const int at = inside ? from + plane + place_in(0, h + i) * 16 : next * 16;
#pragma unroll
                for (int mt = kept - 1; mt > 0; --mt)
#pragma unroll
                    for (int parity = 0; parity < step; ++parity)
#pragma unroll
                        for (int k = 0; k < KB; ++k) b[mt][parity][k] = b[mt > 0 ? mt - 1 : 0][parity][k];
                if (kept > 1 || MT == 1) row_of_filter(b[0], i < R ? i : 0);
#pragma unroll
                for (int parity = 0; parity < step; ++parity) {
                    u32 a[stored][2];
                    fetch(a, memory + at + parity * stored * 16);
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        const int r = i - mt * SH;
                        if (MT > 1 && unsigned(r) >= unsigned(R)) continue;
                        if (kept == 1 && MT > 1) row_of_filter(b[0], r);
                        multiply(acc[mt], a, b[kept > 1 ? mt : 0][parity], parity);
                    }
                }
            }

            // Results take the place of the pixels, which no other warp reads.
            __syncwarp();
            unsigned char* const to = reinterpret_cast<unsigned char*>(tile) + plane;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    float (&sums)[4] = acc[mt][j];
                    if constexpr (Traits::fused)
                        Traits::Epilogue::apply<4, false>(sums, p.operands, first_channel + c, Index(0));
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int at = g % segments * segment + mt + half * MT;
                        if (segments * segment > TP && at >= TP) continue;
                        unsigned char* const row = to + place_out(g / segments, at) * 16;
                        if (wide)
                            store(reinterpret_cast<float*>(row) + 8 * j + 2 * t,
                                  Pack<float, 2>{{sums[2 * half], sums[2 * half + 1]}});
                        else
                            reinterpret_cast<u32*>(row)[4 * j + t] =
                                depthwise::pack<T>(sums[2 * half], sums[2 * half + 1]);
                    }
                }
        }
        __syncthreads();

        // Store: 8 channels of a few pixels side by side at a time.
        constexpr int wide_of = wide ? 2 : 1, pixels = 8 / wide_of;
#pragma unroll 1
        for (int i = fresh(threadIdx.x); i < NI * TP * (NT * wide_of * Traits::octets); i += threads) {
            const int octet = i % Traits::octets, unit = i / Traits::octets % (NT * wide_of);
            const int m = i / (Traits::octets * NT * wide_of), image = m / TP, row = p0 + m % TP;
            const int q = q0 + unit * pixels;
            if (octet >= there || n0 + image >= p.n || row >= p.out_h) continue;
            if (unusual[image] == item || unusual_weight) continue;
            const Unit* const found = tile + Tile::channel(octet * 8, Traits::plane) + place_out(image, m % TP) + unit;
            Unit values[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = found[c * Traits::plane];
            const int channel = first_channel + octet * 8;
            const Index at = ((Index(n0 + image) * p.out_h + row) * p.out_w + q) * p.channels + channel;
            char* const to = reinterpret_cast<char*>(p.out + at);
            const u32 next = u32(p.channels) * u32(sizeof(T));
#pragma unroll
            for (int j = 0; j < pixels; ++j) {
                T* const pixel = reinterpret_cast<T*>(to + u64(next) * u32(j));
                const bool inside = q + j < p.out_w;
                if constexpr (wide) {
                    if (!inside) continue;  // nor are the operands
                    float sums[8];
#pragma unroll
                    for (int c = 0; c < 8; ++c) sums[c] = __uint_as_float(values[c].value[j]);
                    Traits::Epilogue::apply<8, true>(sums, p.operands, channel, at + Index(j) * p.channels);
                    depthwise::put<8>(pixel, depthwise::narrow<T, 8>(sums));
                } else {
                    const Unit words = transposed(values, j);
                    if (inside) depthwise::put<8>(pixel, words);
                }
            }
        }
        if (item + p.workers < p.items) __syncthreads();  // before the next pixels take the place of these results
    }
}
