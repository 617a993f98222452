// Convolution and its image gradient as one matrix product; the matrix of windows is never stored.
//
//     out[m, n] = sum over taps and channels of  image[place(m) + offset(tap), channel] * filter[n, tap, channel]
//
// fprop: m are pixels of y, n filters, channels those of x. dgrad: m are pixels of dx, n its channels, channels are the
// filters. With a stride, the pixels of dx fall into phases, each of which meets its own taps only: along an axis those
// of phase f are f, f + stride, ..., and tap j of them is at i + offset + j * offset_step of dy for the i-th. So both
// passes read the image at i * step + offset + j * offset_step, and phases are another axis of the grid.
//
// A block has `pixels` x `filters` results and goes through the depth, taps times channels, in steps. A thread brings
// the pieces of 16 bytes of one column of a step's tiles: its place in the depth is one state for all its pixels.
//   fprop   the filter lies along the depth in memory: the depth is cut without regard to taps
//   dgrad   the filter lies across it: a step belongs to one tap, so that its rows are filters one after the other;
//           where that would leave much of a step empty (`listed`), a list in shared memory says where each row is
//
// Shared memory: the ring of `stages` steps, in whose place the sums come in the end; then `Windows`. Where the
// epilogue reads one tensor (`held`), its part comes there between both while the block computes, and results take its
// place.
//
// Results have their channels last, or the image's pixels, which they leave shared memory along. Other results of the
// epilogue go the same way before; then the results in shared memory are added up for statistics, a tile's to `parts`.
//
// A prologue is computed in shared memory: by the thread that brought a piece, where the piece is inside of the image.
//
// `bits`, 32 or 64: there are at most as many taps, and a bit says whether a pixel's tap is inside; else 0. `masked`,
// the usual case: there are 32, pieces are vectors and a tap has at least a step of channels, so that the next step
// belongs to the same tap or to the next one.
//
// What is less than four bytes, no copy can bring beside the threads: pieces of it are loaded a step ahead, into
// registers, and stored.
//
// Traits: rank, bits, masked, listed (depth of the list, or 0), last (channels, in the result), follows (another
// kernel, that made an input), pixels, filters, depth (elements of a step), warps_m, warps_n, stages, residents,
// rows_first (blocks with successive numbers share n, not m), products (of tf32 for one of f32; 0: on CUDA cores),
// Factors (types that are multiplied), along (the filter lies along the depth), a_vector, b_vector (elements that lie
// side by side and aligned), together (results likewise), phases_0 ... phases_2 of the axes, backwards (the phases from
// the last one on, which has more taps: long blocks come first), parted (sums go to `parts`, for igemm_sum), early
// (what follows the sums reads no tensors, and channels in pairs), tensors (a bit for each operand of the epilogue that
// is one), held (which one comes to shared memory, from 1 on, or 0), boxed (it comes as boxes, and results leave as
// such), shares (windows lie where boxes come), drains, scarce (of common/igemm.cuh), vectors (a bit for each operand of
// an early epilogue that is one), vector (elements of those that lie side by side and aligned), stats, Prologue, Also.

#include "common/types.cuh"
#include "common/bulk_store.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/igemm.cuh"
#include "common/igemm_lanes.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared_boxes.cuh"
#include "traits"

using T = Traits::A;
using Index = Traits::Index;
using Sum = Traits::Products;  // float or int
constexpr int rank = Traits::rank, BM = Traits::pixels, BN = Traits::filters, BK = Traits::depth;
constexpr int warps = Traits::warps_m * Traits::warps_n, threads = 32 * warps, stages = Traits::stages;
constexpr int MT = BM / Traits::warps_m / 16, NT = BN / Traits::warps_n / 16;
using Kind = igemm::Kind<Traits::Factors, Traits::products>;
using ATile = Kind::Tile<BM, BK, true>;
using BTile = Kind::Tile<BN, BK, Traits::along>;
using Products = Kind::Products<ATile, BTile, MT, NT, Traits::warps_m, Sum>;
constexpr int per_piece = ATile::per_piece, slices = BK / Kind::slice_depth<Products>;
constexpr int stage_bytes = ATile::bytes + BTile::bytes, V = Traits::together;
constexpr bool last = Traits::last;
// Results of a block in shared memory, on their way. Where the tensor that is held comes as boxes, they take its place.
constexpr int pitch = (last ? BN : BM) + (Traits::boxed ? 0 : 8);
using Lie = igemm::If<Traits::boxed, igemm::Boxed<BM>, igemm::Pitched<pitch>>::type;
constexpr int results_bytes = (last ? BM : BN) * pitch * (Traits::early ? int(sizeof(Traits::Out)) : 4);
constexpr int ring_bytes = Traits::held || stages * stage_bytes > results_bytes ? stages * stage_bytes : results_bytes;
// What the epilogue reads: the tensor that is held, what its boxes need, then BN values of each operand that is a
// vector. Boxes are asked for behind the last copies, which are the last to look at windows: these may lie there.
constexpr int boxes_at = ring_bytes + (Traits::held ? results_bytes : 0);
constexpr int vectors_at = boxes_at + (Traits::boxed ? 16 : 0);
constexpr int vectors_bytes = Traits::vectors ? Traits::Epilogue::count * BN * int(sizeof(Traits::Out)) : 0;
constexpr int windows_at = Traits::shares ? ring_bytes : vectors_at + vectors_bytes;
constexpr int a_rows = threads / ATile::pieces, a_count = BM / a_rows;  // rows apart, pieces of a thread
constexpr int b_rows = threads / BTile::pieces, b_count = BTile::rows / b_rows;
static_assert(MT * Traits::warps_m * 16 == BM && NT * Traits::warps_n * 16 == BN, "warps share the tile evenly");
static_assert(a_count * a_rows == BM && b_count * b_rows == BTile::rows, "threads share the copies evenly");

struct Axis {
    int in, out;              // sizes of image and result
    int step, out_step;       // from one pixel of a phase to the next, in the image and in the result
    int offset_step;          // from one tap of a phase to the next, in the image
    int filter, filter_step;  // taps of the filter, and from one tap of a phase to the next
    Divisor count;            // pixels of a phase
};
struct Taps {
    int first, count, offset;  // of a phase: its first tap of the filter, how many, and where the first reads
};
constexpr int first_operand = Traits::Prologue::count, first_other = first_operand + Traits::Epilogue::count;
constexpr int pointers = first_other + Traits::Also::count;
constexpr int phase_counts[3] = {Traits::phases_0, Traits::phases_1, Traits::phases_2};
constexpr int phases = Traits::phases_0 * Traits::phases_1 * Traits::phases_2;
constexpr int all_taps = phase_counts[0] + (rank > 1 ? phase_counts[1] : 0) + (rank > 2 ? phase_counts[2] : 0);

struct Unboxed {
    const T* image;
    const Traits::B* filter;
    Traits::Out* out;
    // Of prologue and epilogue, then where other results go; `parts` are sums of splits, or of statistics.
    void* operands[pointers ? pointers : 1];
    Sum* parts;
    i64 results;                 // elements of the result
    i64 plane;                   // pixels of an image of the result
    int rows;                    // pixels of a phase in all images
    int channels, results_each;  // of a group: what is summed over, and channels of the result
    int image_pixel, out_pixel;  // elements of a pixel, all groups
    int span;                    // channels of a tap as the depth counts them
    int filter_row, filter_tap;  // elements from one filter to the next, and from one tap to the next
    int splits;
    Divisor tiles;  // along n, or along m if those are neighbours
    Axis axis[rank];
    Taps taps[all_taps];
};
struct WithBoxes : Unboxed {
    bulk::Map held, result;
};
using Params = igemm::If<Traits::boxed, WithBoxes, Unboxed>::type;

// In shared memory, since registers are few between two steps: where boxes of the tensor that is held begin.
struct alignas(16) Boxes {
    bulk::Barrier arrived;
    int pixel, channel;
};

// The phase of a block: which taps it has along each axis.
struct Phase {
    Taps taps[rank];
    int at[rank], count;

    __device__ __forceinline__ Phase(int phase, const Params& p) : count(1) {
        int base = all_taps;
#pragma unroll
        for (int i = rank - 1; i >= 0; --i) {
            base -= phase_counts[i];
            at[i] = phase_counts[i] > 1 ? phase % phase_counts[i] : 0;
            phase = phase_counts[i] > 1 ? phase / phase_counts[i] : phase;
            taps[i] = p.taps[base + at[i]];
            count *= taps[i].count;
        }
    }
};

// The pixels of a block: where their windows begin in the image, as an element and as a place, which of up to 64 taps
// are inside of the image, and where the results go, -1 of those that are not there. In shared memory, since registers
// are full of sums.
using Mask = igemm::If<Traits::bits == 64, u64, u32>::type;
struct Window {
    Index base;
    Mask taps;
};
struct Windows {
    Window window[BM];
    Index result[BM];
    int at[rank][BM];
    int listed[Traits::listed ? Traits::listed : 1];  // of the depth: where its row of the filter is

    __device__ __forceinline__ void fill(int first_m, int first_n, int group, const Phase& phase, const Params& p) {
        for (int row = threadIdx.x; row < BM; row += threads) {
            int m = first_m + row;
            const bool there = m < p.rows;
            bool stored = there;
            m = there ? m : 0;
            const Index first_channel = group * p.results_each + first_n;
            Index from = group * p.channels, to = 0;
            Index in_size = p.image_pixel, out_size = last ? p.out_pixel : 1;
            Mask taps = there;
            int count = 1;
#pragma unroll
            for (int i = rank - 1; i >= 0; --i) {
                const Axis& axis = p.axis[i];
                const int pixel = axis.count.split(m), in = pixel * axis.step,
                          out = pixel * axis.out_step + phase.at[i];
                at[i][row] = there ? in : -(1 << 29);
                stored = stored && out < axis.out;
                from += in_size * in;
                to += out_size * out;
                in_size *= axis.in;
                out_size *= axis.out;
                if constexpr (Traits::bits) {  // of the taps so far, once for each along this axis that is inside
                    Mask all = 0;
                    for (int j = 0; j < phase.taps[i].count; ++j)
                        if (unsigned(in + phase.taps[i].offset + j * axis.offset_step) < unsigned(axis.in))
                            all |= taps << j * count;
                    taps = all;
                    count *= phase.taps[i].count;
                }
            }
            window[row] = {from + in_size * m, taps};  // what is left is the image
            to += last ? out_size * m + first_channel : out_size * (Index(m) * p.out_pixel + first_channel);
            result[row] = stored ? to : Index(-1);
        }
    }
    __device__ __forceinline__ void list(const Phase& phase, const Params& p);
};

static_assert(!Traits::shares || sizeof(Windows) <= results_bytes, "windows lie where boxes come");

// A thread's place in the depth: tap j of each axis and a channel, and how far that is from where a window begins.
struct Depth {
    int j[rank], channel;
    Index away;
    int filter_tap;  // of the whole filter

    __device__ __forceinline__ Depth(int at, const Phase& phase, const Params& p) {
        int tap = at < p.span ? 0 : at / p.span;  // a division takes as long as many copies
        channel = at - tap * p.span;
#pragma unroll
        for (int i = rank - 1; i > 0; --i) {
            const int next = tap ? tap / max(1, phase.taps[i].count) : 0;
            j[i] = tap - next * phase.taps[i].count;
            tap = next;
        }
        j[0] = tap;
        away = 0;
        filter_tap = 0;
#pragma unroll
        for (int i = 0; i < rank; ++i) {
            away = away * p.axis[i].in + phase.taps[i].offset + j[i] * p.axis[i].offset_step;
            filter_tap = filter_tap * p.axis[i].filter + phase.taps[i].first + j[i] * p.axis[i].filter_step;
        }
        away = away * p.image_pixel + channel;
    }
    __device__ __forceinline__ int tap(const Phase& phase) const {
        int found = 0;
#pragma unroll
        for (int i = 0; i < rank; ++i) found = found * phase.taps[i].count + j[i];
        return found;
    }
    // Whether the tap is the next one; not further than that, at most `span`. Without branches: products go on all
    // around.
    __device__ __forceinline__ bool advance(int by, const Phase& phase, const Params& p) {
        channel += by;
        away += by;
        const bool wraps = channel >= p.span;
        bool carries = wraps;
        channel -= wraps ? p.span : 0;
        away -= wraps ? p.span : 0;
        Index size = p.image_pixel;
        int taps = 1;
#pragma unroll
        for (int i = rank - 1; i > 0; --i) {
            const int count = phase.taps[i].count;
            j[i] += carries;
            away += carries ? size * p.axis[i].offset_step : Index(0);
            filter_tap += carries ? taps * p.axis[i].filter_step : 0;
            carries = carries && j[i] == count;
            j[i] = carries ? 0 : j[i];
            away -= carries ? size * (count * p.axis[i].offset_step) : Index(0);
            filter_tap -= carries ? taps * (count * p.axis[i].filter_step) : 0;
            size *= p.axis[i].in;
            taps *= p.axis[i].filter;
        }
        j[0] += carries;
        away += carries ? size * p.axis[0].offset_step : Index(0);
        filter_tap += carries ? taps * p.axis[0].filter_step : 0;
        return wraps;
    }
    // How many taps further.
    __device__ __forceinline__ int advance_far(int by, const Phase& phase, const Params& p) {
        int taps = 0;
#pragma unroll 1
        for (; by > 0; by -= p.span) taps += advance(min(by, p.span), phase, p);
        return taps;
    }
    __device__ __forceinline__ bool inside(const Phase& phase) const { return j[0] < phase.taps[0].count; }
    __device__ __forceinline__ bool inside(int row, const Windows& windows, const Phase& phase, const Params& p) const {
        bool found = inside(phase);
#pragma unroll
        for (int k = 0; k < rank; ++k)
            found &= unsigned(windows.at[k][row] + phase.taps[k].offset + j[k] * p.axis[k].offset_step) <
                     unsigned(p.axis[k].in);
        return found;
    }
};

__device__ __forceinline__ void Windows::list(const Phase& phase, const Params& p) {
    for (int at = threadIdx.x; at < Traits::listed; at += threads) {
        const Depth depth(at, phase, p);
        listed[at] = depth.inside(phase) ? depth.channel * p.filter_row + depth.filter_tap * p.filter_tap : -1;
    }
}

// What a thread brings of each step: a column of pieces of the image, and one of the filter. Its place in the depth is
// that of all its pixels. Without `bits`, pieces of the image are brought vector by vector, each for all pixels.
struct Copies {
    static constexpr int a_vectors = per_piece / Traits::a_vector;
    static constexpr int of_image = Traits::bits ? a_count : a_vectors;
    static constexpr int count = of_image + b_count, batches = (count + 3) / 4;
    static constexpr bool prepares = false, changes = false, brings_more = Traits::held != 0;
    static constexpr bool copies_more = brings_more && !Traits::boxed;
    static constexpr bool drains = Traits::drains || brings_more, scarce = Traits::scarce;
    // Whether pieces are loaded, a step ahead of what they are asked for, and stored rather than copied.
    static constexpr bool loads =
        Traits::bits && (Traits::a_vector * sizeof(T) < 4 || Traits::b_vector * sizeof(T) < 4);
    using Place = Window;

    const Params& p;
    const Phase& phase;
    const Windows& windows;
    int a_row, a_piece, b_row, b_piece;
    int steps;              // that are left
    Depth depth, part;      // of the piece, and of the vector that comes next where they are brought one by one
    Mask tap, part_tap;     // a bit for the tap that these are at, 0 behind the last step
    Mask taps[a_vectors];   // not masked: the same of the piece's vectors,
    Index away[a_vectors];  // and how far they are from where a window begins
    int filter_left;        // along: elements of a filter from the piece on; listed: of the depth, from its first on
    int results_left;       // along: filters from the first one on; across: channels of the result from the piece on
    Index filter_from;      // along: the piece in the first filter; across: without filter and tap
    int channels;           // of the result, from the block's first on
    Pack<T, per_piece> held[loads ? count : 1];

    __device__ __forceinline__ Copies(const Windows& windows, int first_n, int group, int begin, int steps,
                                      const Phase& phase, const Params& p)
        : p(p),
          phase(phase),
          windows(windows),
          a_row(threadIdx.x / ATile::pieces),
          a_piece(threadIdx.x % ATile::pieces),
          b_row(threadIdx.x / BTile::pieces),
          b_piece(threadIdx.x % BTile::pieces),
          steps(steps),
          depth(begin * BK + a_piece * per_piece, phase, p),
          part(depth),
          channels(p.results_each - first_n) {
        tap = part_tap = steps > 0 ? Mask(1) << (depth.tap(phase) & (8 * int(sizeof(Mask)) - 1)) : 0;
        if constexpr (Traits::bits && !Traits::masked) look();
        if constexpr (Traits::along) {
            const int at = begin * BK + b_piece * per_piece;
            filter_left = phase.count * p.span - at;
            results_left = steps > 0 ? p.results_each - first_n - b_row : 0;
            filter_from = Index(group * p.results_each + first_n + b_row) * p.filter_row + at;
        } else {
            results_left = steps > 0 ? p.results_each - first_n - b_piece * per_piece : 0;
            filter_from = Index(group) * p.channels * p.filter_row + first_n + b_piece * per_piece;
            filter_left = begin * BK;
        }
        if constexpr (loads) {
            if (steps > 0)
#pragma unroll
                for (int i = 0; i < count; ++i) load_piece(i);
            end();
        }
    }

    __device__ __forceinline__ Window from(int i) const {
        return Traits::bits && !loads && i < a_count ? windows.window[a_row + i * a_rows] : Window{};
    }

    __device__ __forceinline__ void copy(char* tiles, int i, const Window& window) {
        char* const to = i < of_image ? tiles + ATile::place<a_rows>(a_row, a_piece, i)
                                      : tiles + ATile::bytes + BTile::place<b_rows>(b_row, b_piece, i - of_image);
        if constexpr (loads) {
            // Behind the last step there is nothing, for all threads alike.
            if (steps >= 0) store(reinterpret_cast<T*>(to), held[i]);
            if (steps > 0) load_piece(i);
        } else if (i >= of_image) {
            filter(i - of_image, [&](int v, const Traits::B* from, bool inside) {
                igemm::bring<Traits::b_vector>(to + v * int(sizeof(T)), from, inside);
            });
        } else if constexpr (Traits::bits) {
            image(window, [&](int v, const T* from, bool inside) {
                igemm::bring<Traits::a_vector>(to + v * int(sizeof(T)), from, inside);
            });
        } else {
            vectors(tiles, i * Traits::a_vector);
        }
    }

    // The block's part of the tensor that the epilogue reads.
    __device__ __forceinline__ void bring_more(char* ring) const {
        if constexpr (Traits::boxed) {
            if (threadIdx.x == 0) bring_boxes(ring, p);
            return;
        }
        constexpr int together = 16 / sizeof(Traits::Out), chunks = BN / together;
        const auto* const tensor = static_cast<const Traits::Out*>(p.operands[first_operand + Traits::held - 1]);
        for (int at = threadIdx.x; at < BM * chunks; at += threads) {
            const int row = at / chunks, n = at % chunks * together;
            const Index place = windows.result[row];
            const bool inside = place >= 0 && n < channels;
            tensor::copy<16>(ring + ring_bytes + (row * pitch + n) * int(sizeof(Traits::Out)),
                             tensor + (inside ? place + n : Index(0)), inside);
        }
    }

    // The same by one thread. Of the last block's pixels, those that are not there come as zeros.
    template <class P>
    __device__ __forceinline__ void bring_boxes(char* ring, const P& p) const {
        Boxes& boxes = *reinterpret_cast<Boxes*>(ring + boxes_at);
        bulk::expect(boxes.arrived, results_bytes);
#pragma unroll
        for (int n = 0; n < BN; n += 64)
            bulk::copy(ring + ring_bytes + n * BM * 2, p.held, boxes.arrived, 1, boxes.channel + n, boxes.pixel);
    }

    __device__ __forceinline__ void end() {
        --steps;
        if constexpr (Traits::masked) {
            tap <<= depth.advance(BK, phase, p);
            tap = steps > 0 ? tap : 0;
        } else if (steps > 0) {
            // `part` is a piece further already.
            part_tap <<= part.advance_far(BK - per_piece, phase, p);
            depth = part;
            tap = part_tap;
            if constexpr (Traits::bits) look();
        } else {
#pragma unroll
            for (int v = 0; v < a_vectors; ++v) taps[v] = 0;
        }
        if constexpr (Traits::along) {
            filter_left -= BK;
            filter_from += BK;
        } else {
            filter_left += BK;
        }
        results_left = steps > 0 ? results_left : 0;
    }

  private:
    __device__ __forceinline__ void load_piece(int i) {
        if (i >= of_image)
            filter(i - of_image, [&](int v, const Traits::B* from, bool inside) {
                igemm::fetch<Traits::b_vector>(held[i].value + v, reinterpret_cast<const T*>(from), inside);
            });
        else
            image(windows.window[a_row + i * a_rows], [&](int v, const T* from, bool inside) {
                igemm::fetch<Traits::a_vector>(held[i].value + v, from, inside);
            });
    }

    // The vectors of the piece that the depth is at.
    __device__ __forceinline__ void look() {
        part = depth;
        part_tap = tap;
#pragma unroll
        for (int v = 0; v < a_vectors; ++v) {
            taps[v] = Traits::along || part.channel < p.channels ? part_tap : 0;
            away[v] = part.away;
            part_tap <<= part.advance(Traits::a_vector, phase, p);
        }
    }

    // `take` gets the vectors of a pixel's piece one by one.
    template <class Take>
    __device__ __forceinline__ void image(const Window& window, const Take& take) const {
        if constexpr (Traits::masked) {
            const bool inside = (window.taps & tap) != 0 && (Traits::along || depth.channel < p.channels);
            take(0, p.image + (window.base + depth.away), inside);
        } else {
#pragma unroll
            for (int v = 0; v < a_vectors; ++v)
                take(v * Traits::a_vector, p.image + (window.base + away[v]), (window.taps & taps[v]) != 0);
        }
    }

    __device__ __forceinline__ void vectors(char* tiles, int v) {
        const bool there = steps > 0 && part.channel < p.channels;
#pragma unroll
        for (int i = 0; i < a_count; ++i) {
            const int row = a_row + i * a_rows;
            const bool inside = there && part.inside(row, windows, phase, p);
            igemm::bring<Traits::a_vector>(tiles + ATile::place<a_rows>(a_row, a_piece, i) + v * int(sizeof(T)),
                                           p.image + (windows.window[row].base + part.away), inside);
        }
        part.advance(Traits::a_vector, phase, p);
    }

    template <class Take>
    __device__ __forceinline__ void filter(int i, const Take& take) const {
        bool inside;
        Index from = filter_from;
        int left;  // elements that are there from the first of the piece on
        if constexpr (Traits::along) {
            inside = i * b_rows < results_left;
            left = filter_left;
            from += Index(i * b_rows) * p.filter_row;
        } else if constexpr (Traits::listed) {
            const int row = filter_left + b_row + i * b_rows;
            const int at = row < Traits::listed ? windows.listed[row] : -1;
            inside = at >= 0;
            left = results_left;
            from += at;
        } else {
            const int row = depth.channel - a_piece * per_piece + b_row + i * b_rows;
            inside = row < p.channels;
            left = results_left;
            from += Index(row) * p.filter_row + Index(depth.filter_tap) * p.filter_tap;
        }
#pragma unroll
        for (int v = 0; v < per_piece; v += Traits::b_vector) take(v, p.filter + (from + v), inside && v < left);
    }
};

// With a prologue, which changes a step when `stages` - 1 further ones are asked for; `at` is its place in the depth.
struct Changed : Copies {
    static constexpr bool changes = true;

    int first_channel;
    Depth at;
    Mask at_tap;

    __device__ __forceinline__ Changed(const Windows& windows, int first_n, int group, int begin, int steps,
                                       const Phase& phase, const Params& p)
        : Copies(windows, first_n, group, begin, steps, phase, p),
          first_channel(group * p.channels),
          at(begin * BK + a_piece * per_piece, phase, p),
          at_tap(Mask(1) << (at.tap(phase) & (8 * int(sizeof(Mask)) - 1))) {}

    template <int Asked>
    __device__ __forceinline__ void change(char* tiles) {
        if (steps + Asked + loads <= 0) return;  // `steps` are left behind those that are asked for or loaded
        if constexpr (Traits::masked) {
            Traits::Prologue::Vectors<per_piece> vectors;
            vectors.read(p.operands, first_channel + at.channel);
#pragma unroll
            for (int i = 0; i < a_count; ++i)
                igemm::change<T, Traits::Sum>(tiles + ATile::place<a_rows>(a_row, a_piece, i), vectors,
                                              (windows.window[a_row + i * a_rows].taps & at_tap) != 0);
            at_tap <<= at.advance(BK, phase, p);
        } else {
            Depth part = at;
#pragma unroll 1
            for (int v = 0; v < per_piece; v += Traits::a_vector) {
                Traits::Prologue::Vectors<Traits::a_vector> vectors;
                vectors.read(p.operands, first_channel + part.channel);
#pragma unroll
                for (int i = 0; i < a_count; ++i)
                    igemm::change<T, Traits::Sum>(tiles + ATile::place<a_rows>(a_row, a_piece, i) + v * int(sizeof(T)),
                                                  vectors, part.inside(a_row + i * a_rows, windows, phase, p));
                part.advance(Traits::a_vector, phase, p);
            }
            at.advance_far(BK, phase, p);
        }
    }
};

// Where results go: vectors along the channels of a pixel, or along the pixels of a channel.
struct Finished {
    const Windows& windows;
    const Params& p;
    int channels, first_channel;  // that are there, and the block's first one

    __device__ __forceinline__ Index place(int row, int column) const {
        const int n = last ? column : row, m = last ? row : column;
        if (n >= channels || row >= (last ? BM : BN)) return -1;
        const Index at = windows.result[m];
        return at < 0 ? at : at + (last ? Index(n) : Index(n) * Index(p.plane));
    }

    template <int Count>
    __device__ __forceinline__ void rows(int row, int apart, int column,
                                         const Pack<Traits::Out, V> (&held)[Count]) const {
        write(p.out, row, apart, column, held);
    }
    template <int Count>
    __device__ __forceinline__ void write(Traits::Out* to, int row, int apart, int column,
                                          const Pack<Traits::Out, V> (&held)[Count]) const {
        Index at[Count];
#pragma unroll
        for (int i = 0; i < Count; ++i) at[i] = place(row + i * apart, column);
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (at[i] >= 0) store(to + at[i], held[i]);
    }
};
template <int At>
struct Other : Finished {
    __device__ __forceinline__ explicit Other(const Finished& base) : Finished(base) {}

    template <int Count>
    __device__ __forceinline__ void rows(int row, int apart, int column,
                                         const Pack<Traits::Out, V> (&held)[Count]) const {
        write(static_cast<Traits::Out*>(p.operands[first_other + At]), row, apart, column, held);
    }
};
struct Unfinished : Finished {
    int split;
    Sum* sums;  // in shared memory; statistics read what becomes of them there

    template <int Count>
    __device__ __forceinline__ void rows(int row, int apart, int column, const Pack<Sum, V> (&held)[Count]) const {
        Index at[Count];
#pragma unroll
        for (int i = 0; i < Count; ++i) at[i] = place(row + i * apart, column);
        if constexpr (Traits::parted) {
#pragma unroll
            for (int i = 0; i < Count; ++i)
                if (at[i] >= 0) store(p.parts + split * p.results + at[i], held[i]);
        } else {
            Pack<Traits::Out, V> result[Count];
#pragma unroll
            for (int i = 0; i < Count; ++i) {  // all tensors are read before the first result is written
                Traits::Sum value[V];
#pragma unroll
                for (int k = 0; k < V; ++k) value[k] = Traits::Sum(held[i].value[k]);
                // Of a channel that is there, whether the pixel is or not: all rows read the same vectors then.
                const int n = last ? column : row + i * apart;
                Traits::Epilogue::apply<V, last>(value, p.operands + first_operand,
                                                 n < channels ? first_channel + n : 0, at[i] >= 0 ? at[i] : Index(0));
#pragma unroll
                for (int k = 0; k < V; ++k) result[i].value[k] = Traits::Out(value[k]);
            }
#pragma unroll
            for (int i = 0; i < Count; ++i)
                if (at[i] >= 0) store(p.out + at[i], result[i]);
            if constexpr (Traits::stats)
#pragma unroll
                for (int i = 0; i < Count; ++i) {
                    Pack<Sum, V> seen;
#pragma unroll
                    for (int k = 0; k < V; ++k) seen.value[k] = Sum(result[i].value[k]);
                    if (at[i] >= 0) store(sums + (row + i * apart) * pitch + column, seen);
                }
            others<0>(row, apart, column, held, at);
        }
    }

    template <int At, int Count>
    __device__ __forceinline__ void others(int row, int apart, int column, const Pack<Sum, V> (&held)[Count],
                                           const Index (&at)[Count]) const {
        if constexpr (At < Traits::Also::count) {
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                if (at[i] < 0) continue;
                Traits::Sum value[V];
#pragma unroll
                for (int k = 0; k < V; ++k) value[k] = Traits::Sum(held[i].value[k]);
                Traits::Also::apply<At, V, last>(value, p.operands + first_operand,
                                                 first_channel + (last ? column : row + i * apart), at[i]);
                Pack<Traits::Out, V> result;
#pragma unroll
                for (int k = 0; k < V; ++k) result.value[k] = Traits::Out(value[k]);
                store(static_cast<Traits::Out*>(p.operands[first_other + At]) + at[i], result);
            }
            others<At + 1>(row, apart, column, held, at);
        }
    }
};

// Asks for what the epilogue reads of tensors, so that it is in the L2 cache when the sums are there.
__device__ __forceinline__ void ask_tensors(const Windows& windows, int channels, const Params& p) {
    constexpr int together = 32 / sizeof(Traits::Out), chunks = (last ? BN : BM) / together;
    for (int at = threadIdx.x; at < (last ? BM : BN) * chunks; at += threads) {
        const int row = at / chunks, column = at % chunks * together, n = last ? column : row;
        const Index place = windows.result[last ? row : column];
        if (place < 0 || n >= channels) continue;
#pragma unroll
        for (int i = 0; i < Traits::Epilogue::count; ++i)
            if (Traits::tensors >> i & 1)
                igemm::ask(static_cast<const Traits::Out*>(p.operands[first_operand + i]) + place +
                           (last ? Index(n) : Index(n) * Index(p.plane)));
    }
}

// Early: vectors of the epilogue come to shared memory with the first step.
__device__ __forceinline__ void bring_vectors(char* memory, int first_channel, int channels, const Params& p) {
    auto* const to = reinterpret_cast<Traits::Out*>(memory + vectors_at);
#pragma unroll
    for (int i = 0; i < Traits::Epilogue::count; ++i)
        if (Traits::vectors >> i & 1)
            for (int n = threadIdx.x * Traits::vector; n < BN; n += threads * Traits::vector)
                igemm::bring<Traits::vector>(to + i * BN + n,
                                             static_cast<const Traits::Out*>(p.operands[first_operand + i]) +
                                                 (n < channels ? first_channel + n : 0),
                                             n < channels);
}

// What the epilogue of two results side by side reads of shared memory: their vectors, and the tensor that is held.
struct Besides {
    using Two = Pack<Traits::Out, 2>;
    struct Column {
        Two of[Traits::Epilogue::count + 1];  // by operand
    };
    const Traits::Out *vectors, *held;

    __device__ __forceinline__ Column column(int n) const {
        Column found;
#pragma unroll
        for (int i = 0; i < Traits::Epilogue::count; ++i)
            if (Traits::vectors >> i & 1) found.of[i] = load<2>(vectors + i * BN + n);
        return found;
    }
    __device__ __forceinline__ Two place(int at) const { return Traits::held ? load<2>(held + at) : Two{}; }
    __device__ __forceinline__ void places(u32 (&to)[4], int at) const { tensor::load_matrices(to, held + at); }
};

// Early: the sums as results in shared memory. `apply` is the epilogue of two of them.
template <class Apply>
__device__ __forceinline__ void finish(const Products& products, Traits::Out* results, const Besides& besides,
                                       const Params& p, const Apply& apply) {
    using Column = Besides::Column;
    using Two = Besides::Two;
    products.store<!last, Lie>(results, besides, [&](const Sum(&pair)[2], const Column& column, const Two& held) {
        const void* operands[Traits::Epilogue::count + 1];
#pragma unroll
        for (int i = 0; i < Traits::Epilogue::count; ++i)
            operands[i] = i == Traits::held - 1        ? &held
                          : (Traits::vectors >> i & 1) ? &column.of[i]
                                                       : p.operands[first_operand + i];
        Traits::Sum value[2] = {Traits::Sum(pair[0]), Traits::Sum(pair[1])};
        apply(value, operands);
        return Two{Traits::Out(value[0]), Traits::Out(value[1])};
    });
    if constexpr (Traits::boxed) bulk::written();
    __syncthreads();
}

// The same as boxes, by one thread.
template <class P>
__device__ __forceinline__ void leave_boxes(const Traits::Out* results, int channel, int pixel, const P& p) {
#pragma unroll
    for (int n = 0; n < BN; n += 64) bulk::store(results + n * BM, p.result, channel + n, pixel);
    bulk::stored();
}

// Early: all results but the last, one after the other through the same memory.
template <int At>
__device__ __forceinline__ void other_results(const Products& products, Traits::Out* results, const Besides& besides,
                                              const Finished& finished) {
    if constexpr (At < Traits::Also::count) {
        finish(products, results, besides, finished.p, [](Traits::Sum(&value)[2], const void* const* operands) {
            Traits::Also::apply<At, 2, true>(value, operands, 0, 0);
        });
        igemm::leave<Lie, last ? BM : BN, last ? BN : BM, V, threads>(results, Other<At>(finished));
        __syncthreads();
        other_results<At + 1>(products, results, besides, finished);
    }
}

// The sum and the sum of squares of a block's channels over its first `count` pixels, from results in shared memory.
// Threads share the pixels of a channel, and what they have is added up in the order of the threads.
template <class Value>
__device__ __forceinline__ void statistics(Value* results, int count, int channels, float* to) {
    constexpr int columns = BN < threads ? BN : threads, shares = threads / columns, turns = BN / columns;
    static_assert(!Traits::stats || (columns * turns == BN && columns * shares == threads && BM % shares == 0),
                  "threads share evenly");
    using Pair = Pack<float, 2>;
    const int first = threadIdx.x % columns, share = threadIdx.x / columns;
    Pair sum[turns] = {};
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) {
        const int n = first + turn * columns;
#pragma unroll 8
        for (int i = share; i < BM; i += shares) {
            // Rows of pixels are four or eight words more than a multiple of 32 apart: starting a word further in each,
            // threads read different banks.
            const int m = last ? i : (i + n * (4 / int(sizeof(Value)))) % BM;
            const float value = m < count ? float(results[last ? m * pitch + n : n * pitch + m]) : 0.0f;
            sum[turn].value[0] += value;
            sum[turn].value[1] += value * value;
        }
    }
    __syncthreads();
    Pair* const met = reinterpret_cast<Pair*>(results);
#pragma unroll
    for (int turn = 0; turn < turns; ++turn) met[share * BN + first + turn * columns] = sum[turn];
    __syncthreads();
    for (int n = threadIdx.x; n < min(BN, channels); n += threads) {
        Pair total = met[n];
#pragma unroll
        for (int other = 1; other < shares; ++other)
#pragma unroll
            for (int k = 0; k < 2; ++k) total.value[k] += met[other * BN + n].value[k];
        store(to + 2 * n, total);
    }
}

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
igemm_conv(const __grid_constant__ Params p) {
    DYNAMIC_SHARED_BOXES(memory, Traits::boxed);
    char* const ring = reinterpret_cast<char*>(memory);
    Windows& windows = *reinterpret_cast<Windows*>(memory + windows_at);
    if constexpr (Traits::parted || Traits::stats) let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    // Place.
    int rest = blockIdx.x;
    const int near = p.tiles.split(rest), tile_m = Traits::rows_first ? near : rest;
    const int first_n = (Traits::rows_first ? rest : near) * BN, first_m = tile_m * BM, group = blockIdx.y;
    const int split = blockIdx.z % p.splits;
    const int number = blockIdx.z / p.splits;
    const Phase phase(Traits::backwards ? phases - 1 - number : number, p);
    const int all_steps = (phase.count * p.span + BK - 1) / BK;
    const int begin = int(i64(all_steps) * split / p.splits), end = int(i64(all_steps) * (split + 1) / p.splits);

    windows.fill(first_m, first_n, group, phase, p);
    if constexpr (Traits::listed) windows.list(phase, p);
    if constexpr (Traits::shares) bulk::written();
    Boxes& boxes = *reinterpret_cast<Boxes*>(memory + boxes_at);
    if constexpr (Traits::boxed)
        if (threadIdx.x == 0) {
            bulk::init(boxes.arrived, 1);
            bulk::publish();
            boxes.pixel = first_m;
            boxes.channel = group * p.results_each + first_n;
        }
    __syncthreads();  // `Copies` looks at them
    if constexpr (Traits::tensors && !Traits::held && !Traits::parted)
        ask_tensors(windows, p.results_each - first_n, p);

    // Load and compute.
    const int first_channel = group * p.results_each + first_n, channels = p.results_each - first_n;
    if constexpr (Traits::vectors) bring_vectors(ring, first_channel, channels, p);
    using Bringing = igemm::If<Traits::Prologue::there, Changed, Copies>::type;
    Bringing copies(windows, first_n, group, begin, end - begin, phase, p);
    Products products(threadIdx.x);
    igemm::steps<stages, slices>(products, copies, ring, stage_bytes, end - begin);
    if constexpr (Traits::products == 3)
        igemm::mend<slices, igemm::Warp<T, ATile, BTile, MT, NT, Traits::warps_m, Sum, 3, true>>(
            products, ring, end - begin,
            [&] { return Bringing(windows, first_n, group, begin, end - begin, phase, p); });

    // Store: through shared memory, so that a row's results leave side by side. What follows the sums is computed in
    // front of that, or behind it where it reads tensors.
    const int pixels = min(BM, p.rows - first_m);
    float* const to = reinterpret_cast<float*>(p.parts) + (i64(tile_m) * p.out_pixel + first_channel) * 2;
    if constexpr (Traits::early) {
        Traits::Out* const results = reinterpret_cast<Traits::Out*>(Traits::held ? ring + ring_bytes : ring);
        const Finished finished{windows, p, channels, first_channel};
        const Besides besides{reinterpret_cast<const Traits::Out*>(memory + vectors_at), results};
        other_results<0>(products, results, besides, finished);
        if constexpr (Traits::boxed) bulk::wait(boxes.arrived, 0);
        finish(products, results, besides, p, [](Traits::Sum(&value)[2], const void* const* operands) {
            Traits::Epilogue::apply<2, true>(value, operands, 0, 0);
        });
        if constexpr (Traits::boxed) {
            if (threadIdx.x == 0) leave_boxes(results, first_channel, first_m, p);
        } else {
            igemm::leave<Lie, last ? BM : BN, last ? BN : BM, V, threads>(results, finished);
        }
        if constexpr (Traits::stats) statistics(results, pixels, channels, to);
    } else {
        Sum* const sums = reinterpret_cast<Sum*>(ring);
        products.store<!last, Lie>(sums, igemm::Nothing(),
                                   [](const Sum(&pair)[2], int, int) { return Pack<Sum, 2>{pair[0], pair[1]}; });
        __syncthreads();
        igemm::leave<Lie, last ? BM : BN, last ? BN : BM, V, threads>(
            sums, Unfinished{{windows, p, channels, first_channel}, split, sums});
        if constexpr (Traits::stats) {
            __syncthreads();
            statistics(sums, pixels, channels, to);
        }
    }
}
