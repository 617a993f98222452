// The filter gradient as one matrix product; the matrix of windows is never stored.
//
//     dw[k, (tap, c)] = sum over pixels of  dy[pixel, k] * x[place(pixel) + offset(tap), c]
//
// A block has `filters` x `columns` results, columns counting taps and channels as they lie in dw, and goes through its
// share of the pixels in steps. Both operands lie across the depth: a row of a tile is a pixel. A thread brings the
// pieces of 16 bytes of one column of a step's tiles: its tap and channels stay the same, its pixels move on.
//
// The pixels are shared between `splits` blocks, whose sums igemm_sum adds up in a fixed order.
//
// A prologue is computed in shared memory: by the thread that brought a piece of x, where it is inside of the image.
//
// Shared memory: the ring of `stages` steps, in whose place the results come in the end; then the windows of two
// steps' pixels, or of `stages` steps' with a prologue, which needs them once more when the copies have arrived.
//
// Traits: rank, last (channels, in dw), follows (another kernel, that made an input), filters, columns, depth (pixels
// of a step), warps_m, warps_n, stages, residents, rows_first (blocks with successive numbers share n, not m), products
// (of tf32 for one of f32; 0: on CUDA cores), Factors (types that are multiplied), a_vector, b_vector (elements that
// lie side by side and aligned), together (results likewise), parted (sums go to `parts`), drains, scarce (of
// common/igemm.cuh), Prologue.

#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/epilogue.cuh"
#include "common/follow.cuh"
#include "common/igemm.cuh"
#include "common/igemm_lanes.cuh"
#include "common/pointwise.cuh"
#include "common/relu.cuh"
#include "common/shared.cuh"
#include "traits"

using T = Traits::A;
using Index = Traits::Index;
using Sum = Traits::Products;
constexpr int rank = Traits::rank, BM = Traits::filters, BN = Traits::columns, BK = Traits::depth;
constexpr int warps = Traits::warps_m * Traits::warps_n, threads = 32 * warps, stages = Traits::stages;
constexpr int MT = BM / Traits::warps_m / 16, NT = BN / Traits::warps_n / 16;
using Kind = igemm::Kind<Traits::Factors, Traits::products>;
using ATile = Kind::Tile<BM, BK, false>;
using BTile = Kind::Tile<BN, BK, false>;
using Products = Kind::Products<ATile, BTile, MT, NT, Traits::warps_m, Sum>;
constexpr int per_piece = ATile::per_piece, slices = BK / Kind::slice_depth<Products>;
constexpr int stage_bytes = ATile::bytes + BTile::bytes, pitch = BN + 8, V = Traits::together;
// What goes through shared memory on its way: parts of sums as they are, results rounded.
using Kept = igemm::If<Traits::parted, Sum, Traits::Out>::type;
using Lie = igemm::Pitched<pitch>;
constexpr int results_bytes = BM * pitch * int(sizeof(Kept));
constexpr int ring_bytes = stages * stage_bytes > results_bytes ? stages * stage_bytes : results_bytes;
constexpr int a_rows = threads / ATile::pieces, a_count = BK / a_rows;  // rows apart, pieces of a thread
constexpr int b_rows = threads / BTile::pieces, b_count = BK / b_rows;
constexpr int b_parts = per_piece / Traits::b_vector;
constexpr int window_steps = Traits::Prologue::there ? stages : 2;
static_assert(MT * Traits::warps_m * 16 == BM && NT * Traits::warps_n * 16 == BN, "warps share the tile evenly");
static_assert(BK <= threads, "a thread prepares one pixel of a step");
static_assert(a_count * a_rows == BK && b_count * b_rows == BK, "threads share the copies evenly");

struct Axis {
    int in, stride, pad, dilation, filter;
    Divisor out;
};

struct Params {
    const T* image;
    const Traits::B* gradient;
    Traits::Out* out;
    // The prologue's vectors, then `parts`.
    void* pointers[Traits::Prologue::count + 1];
    i64 results;                      // elements of dw
    int pixels;                       // of y, in all images
    int channels, filters;            // of a group
    int image_pixel, gradient_pixel;  // elements of a pixel, all groups
    int columns;                      // taps times channels of a group
    int splits;
    Divisor tiles;  // along n, or along m if those are neighbours
    Axis axis[rank];
};

// Where the window of a pixel begins, as an element and as a place; outside of the image if the pixel is not there.
struct alignas(16) Window {
    Index base;
    int at[rank];
};

// What a thread brings of each step: a column of filters of dy, and a column of x that belongs to a tap, or to several
// where vectors are short.
struct Copies {
    static constexpr int count = a_count + b_count, batches = (count + 3) / 4;
    static constexpr bool prepares = true, changes = false, brings_more = false;
    static constexpr bool copies_more = false, drains = Traits::drains, scarce = Traits::scarce;
    // What is less than four bytes is loaded in front of a row's products and stored behind them.
    static constexpr bool loads_a = Traits::a_vector * sizeof(T) < 4, loads_b = Traits::b_vector * sizeof(T) < 4;
    struct Place {
        Window window;
        Pack<T, per_piece> held;
    };

    const Params& p;
    Window (*windows)[BK];  // of the pixels of a step, of some steps in turn
    int a_piece, a_row, b_piece, b_row;
    int first, step, steps;     // the first pixel of all steps; the step that is asked for next, and how many there are
    int k;                      // the first filter of the piece
    Index gradient_from;        // dy of the thread's first pixel
    int offset[b_parts][rank];  // of a column's tap, as a place in the image
    Index delta[b_parts];       // and as a way to it, with the channel

    __device__ __forceinline__ Copies(Window (*windows)[BK], int first_m, int first_n, int group, int begin, int steps,
                                      const Params& p)
        : p(p),
          windows(windows),
          a_piece(threadIdx.x % ATile::pieces),
          a_row(threadIdx.x / ATile::pieces),
          b_piece(threadIdx.x % BTile::pieces),
          b_row(threadIdx.x / BTile::pieces),
          first(begin * BK),
          step(0),
          steps(steps),
          k(first_m + a_piece * per_piece) {
        gradient_from = Index(first + a_row) * p.gradient_pixel + group * p.filters + k;
#pragma unroll
        for (int part = 0; part < b_parts; ++part) {
            const int column = first_n + b_piece * per_piece + part * Traits::b_vector;
            const bool there = column < p.columns;
            int tap = column / p.channels;
            delta[part] = group * p.channels + (column - tap * p.channels);
            Index size = p.image_pixel;
#pragma unroll
            for (int i = rank - 1; i >= 0; --i) {
                const int next = tap / p.axis[i].filter;
                const int place = (tap - next * p.axis[i].filter) * p.axis[i].dilation - p.axis[i].pad;
                offset[part][i] = there ? place : -(1 << 29);  // twice that is still an int
                delta[part] += size * place;
                size *= p.axis[i].in;
                tap = next;
            }
        }
    }

    __device__ __forceinline__ void prepare(int step) const {
        if (const int row = threadIdx.x; row < BK) {
            int rest = first + step * BK + row;
            const bool there = step < steps && rest < p.pixels;
            rest = there ? rest : 0;
            Window& window = windows[step % window_steps][row];
            Index base = 0, size = p.image_pixel;
#pragma unroll
            for (int j = rank - 1; j >= 0; --j) {
                const int at = p.axis[j].out.split(rest) * p.axis[j].stride;
                window.at[j] = there ? at : -(1 << 29);
                base += size * at;
                size *= p.axis[j].in;
            }
            window.base = base + size * rest;  // what is left is the image
        }
    }

    __device__ __forceinline__ Place from(int i) const {
        Place found{};
        if (i < a_count) {
            if constexpr (loads_a)
                gradient(i, [&](int v, const Traits::B* from, bool inside) {
                    igemm::fetch<Traits::a_vector>(found.held.value + v, reinterpret_cast<const T*>(from), inside);
                });
        } else {
            found.window = windows[step % window_steps][b_row + (i - a_count) * b_rows];
            if constexpr (loads_b)
                image(found.window, [&](int v, const T* from, bool inside) {
                    igemm::fetch<Traits::b_vector>(found.held.value + v, from, inside);
                });
        }
        return found;
    }

    __device__ __forceinline__ void copy(char* tiles, int i, const Place& found) const {
        if (i < a_count) {
            char* const to = tiles + ATile::place<a_rows>(a_row, a_piece, i);
            if constexpr (loads_a)
                store(reinterpret_cast<T*>(to), found.held);
            else
                gradient(i, [&](int v, const Traits::B* from, bool inside) {
                    igemm::bring<Traits::a_vector>(to + v * int(sizeof(T)), from, inside);
                });
        } else {
            char* const to = tiles + ATile::bytes + BTile::place<b_rows>(b_row, b_piece, i - a_count);
            if constexpr (loads_b)
                store(reinterpret_cast<T*>(to), found.held);
            else
                image(found.window, [&](int v, const T* from, bool inside) {
                    igemm::bring<Traits::b_vector>(to + v * int(sizeof(T)), from, inside);
                });
        }
    }

    __device__ __forceinline__ void end() {
        ++step;
        gradient_from += Index(BK) * p.gradient_pixel;
    }

  protected:
    __device__ __forceinline__ bool inside(const Window& window, int part) const {
        bool found = true;
#pragma unroll
        for (int j = 0; j < rank; ++j) found &= unsigned(window.at[j] + offset[part][j]) < unsigned(p.axis[j].in);
        return found;
    }

  private:
    // `take` gets the vectors of a piece one by one.
    template <class Take>
    __device__ __forceinline__ void gradient(int i, const Take& take) const {
        const bool inside = step < steps && first + step * BK + a_row + i * a_rows < p.pixels;
        const Traits::B* const from = p.gradient + (gradient_from + Index(i * a_rows) * p.gradient_pixel);
#pragma unroll
        for (int v = 0; v < per_piece; v += Traits::a_vector) take(v, from + v, inside && k + v < p.filters);
    }

    template <class Take>
    __device__ __forceinline__ void image(const Window& window, const Take& take) const {
#pragma unroll
        for (int part = 0; part < b_parts; ++part)
            take(part * Traits::b_vector, p.image + (window.base + delta[part]), inside(window, part));
    }
};

// With a prologue, which changes a step when `stages` - 1 further ones are asked for. A thread's channels stay the
// same.
struct Changed : Copies {
    static constexpr bool changes = true;

    int group_channel, first_channel;  // the group's first one, and in the group that of the thread's first column

    __device__ __forceinline__ Changed(Window (*windows)[BK], int first_m, int first_n, int group, int begin, int steps,
                                       const Params& p)
        : Copies(windows, first_m, first_n, group, begin, steps, p),
          group_channel(group * p.channels),
          first_channel((first_n + b_piece * per_piece) % p.channels) {}

    template <int Asked>
    __device__ __forceinline__ void change(char* tiles) {
        const int changed = step - Asked;
        if (changed >= steps) return;
        const Window* const seen = windows[changed % window_steps];
        int channel = first_channel;
#pragma unroll
        for (int part = 0; part < b_parts; ++part) {
            Traits::Prologue::Vectors<Traits::b_vector> vectors;
            vectors.read(p.pointers, group_channel + channel);
            channel += Traits::b_vector;
            channel = channel < p.channels ? channel : 0;  // a tap further
#pragma unroll
            for (int i = 0; i < b_count; ++i)
                if (inside(seen[b_row + i * b_rows], part))  // a branch: registers are short
                    igemm::change<T, Traits::Sum>(tiles + ATile::bytes + BTile::place<b_rows>(b_row, b_piece, i) +
                                                      part * Traits::b_vector * int(sizeof(T)),
                                                  vectors, true);
        }
    }
};

// Where rows of results go. An int has room for a place in dw; with one of 64 bits the compiler takes each store of a
// vector apart, value by value.
struct Results {
    const Params& p;
    int first;                    // in dw
    int split, first_n, filters;  // that are there

    template <int Count>
    __device__ __forceinline__ void rows(int row, int apart, int column, const Pack<Kept, V> (&held)[Count]) const {
        const int n = first_n + column;
        // In a filter with its channels first, taps lie side by side.
        const int place =
            Traits::parted || Traits::last ? n : n % p.channels * (p.columns / p.channels) + n / p.channels;
        const int there = n < p.columns ? min(BM, filters) - row : 0;
        int at[Count];
#pragma unroll
        for (int i = 0; i < Count; ++i) at[i] = first + (row + i * apart) * p.columns + place;
        Kept* const to = Traits::parted ? static_cast<Kept*>(p.pointers[Traits::Prologue::count]) + split * p.results
                                        : reinterpret_cast<Kept*>(p.out);
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (i * apart < there) store(to + at[i], held[i]);
    }
};

// Of a block: its first filter, and its first column of dw.
struct Place {
    int first_m, first_n;

    __device__ __forceinline__ Place(int block, const Params& p) {
        const int near = p.tiles.split(block);
        first_m = (Traits::rows_first ? near : block) * BM;
        first_n = (Traits::rows_first ? block : near) * BN;
    }
};

extern "C" __global__ void __launch_bounds__(threads, Traits::residents)
igemm_wgrad(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(memory);
    char* const ring = reinterpret_cast<char*>(memory);
    if constexpr (Traits::parted) let_next_start();
    if constexpr (Traits::follows) wait_for_previous();

    // Place.
    const Place at(blockIdx.x, p);
    const int group = blockIdx.y, split = blockIdx.z;
    const int all_steps = (p.pixels + BK - 1) / BK;
    const int begin = int(i64(all_steps) * split / p.splits), end = int(i64(all_steps) * (split + 1) / p.splits);

    // Load and compute.
    using Bringing = igemm::If<Traits::Prologue::there, Changed, Copies>::type;
    Bringing copies(reinterpret_cast<Window(*)[BK]>(memory + ring_bytes), at.first_m, at.first_n, group, begin,
                    end - begin, p);
    Products products(threadIdx.x);
    igemm::steps<stages, slices>(products, copies, ring, stage_bytes, end - begin);
    if constexpr (Traits::products == 3)
        igemm::mend<slices, igemm::Warp<T, ATile, BTile, MT, NT, Traits::warps_m, Sum, 3, true>>(
            products, ring, end - begin, [&] {
                return Bringing(reinterpret_cast<Window(*)[BK]>(memory + ring_bytes), at.first_m, at.first_n, group,
                                begin, end - begin, p);
            });

    // Store: through shared memory, so that a row's results leave side by side.
    Kept* const kept = reinterpret_cast<Kept*>(ring);
    products.store<false, Lie>(kept, igemm::Nothing(), [](const Sum(&pair)[2], int, int) {
        return Pack<Kept, 2>{Kept(pair[0]), Kept(pair[1])};
    });
    __syncthreads();
    const Place place(igemm::hidden(blockIdx.x), p);
    const int first = (group * p.filters + place.first_m) * p.columns;
    igemm::leave<Lie, BM, BN, V, threads>(kept, Results{p, first, split, place.first_n, p.filters - place.first_m});
}
