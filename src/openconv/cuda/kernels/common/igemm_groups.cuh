// What the implicit GEMMs of small groups share: groups side by side in one product, and a piece of the image in shared
// memory that all taps read.
//
// A block has a chunk of groups: `in_chunk` channels of the image and `out_chunk` of the result. Sixteen channels of
// the result, a column, belong to one group or to several, whose channels of the image are `slices` times sixteen. What
// is no pair of a group is a zero of the filter (or is not stored, of the filter's gradient), so that the tensor cores
// multiply 16 x 16 channels however few a group has.
//
// A tile has `images` x `high` x `wide` pixels. The piece of the image that their windows cover lies in shared memory,
// a pixel after the other, at `pitch` bytes: an odd number of 16, so that eight pixels side by side fall into different
// banks. A tap is then a constant distance, and reading a window's value is one ldmatrix without arithmetic. With a
// step from window to window, columns that are a step apart lie side by side instead (`slot`).
//
// A warp goes down a strip, sixteen pixels of all the tile's images side by side and `rows` rows high, row by row of
// the piece: what it reads of a row serves all rows of results whose windows cover it. All of that is unrolled; a
// __syncwarp behind each row keeps the compiler from reading many rows ahead, for which there are no registers.
//
// Traits: in_chunk, out_chunk, in_each, out_each (channels of a group), slices, images, high, wide, rows, step_h,
// step_w (from one pixel to the next, in the image), halo_h, halo_w (the piece), warps (that share the strips of a
// column), stages. Behind the struct: taps along both axes, each with its phase (dgrad with a stride, as in igemm.cu),
// which of the filter it is, and how many pixels of the piece further it reads; of columns, as one of the different
// distances `column_far`.
#pragma once
#include "common/divide.cuh"
#include "common/mma.cuh"

namespace groups {

constexpr int in_chunk = Traits::in_chunk, out_chunk = Traits::out_chunk, columns = out_chunk / 16;
constexpr int high = Traits::high, wide = Traits::wide, images = Traits::images;
constexpr int halo_h = Traits::halo_h, halo_w = Traits::halo_w, halo = images * halo_h * halo_w;
constexpr int threads = 32 * columns * Traits::warps, stages = Traits::stages;
constexpr int rows = Traits::rows, across = images * wide, strips_across = (across + 15) / 16;
constexpr int strips = strips_across * (high / rows);
constexpr int strip_h = halo_h - (high - rows) * Traits::step_h;  // rows of the piece under a strip
constexpr int reach = halo_h - (high - 1) * Traits::step_h - 1;   // from a window's first row to its last
static_assert(high % rows == 0, "a tile is whole strips");
constexpr int row_taps = Traits::row_taps, column_taps = Traits::column_taps, distances = Traits::distances;
constexpr int all_taps = Traits::filter_h * Traits::filter_w;
constexpr int image_pitch = in_chunk * 2 + 16;
constexpr int slices = Traits::slices;

// Where a column of the piece lies in its row.
constexpr int apart = (halo_w + Traits::step_w - 1) / Traits::step_w, row_slots = apart * Traits::step_w;
__device__ __forceinline__ constexpr int slot(int column) {
    return column % Traits::step_w * apart + column / Traits::step_w;
}

constexpr int image_bytes = images * halo_h * row_slots * image_pitch;

// The first channel of the image, in the chunk, that a column of results sums over.
__device__ __forceinline__ int first_in(int column) { return column * 16 / Traits::out_each * Traits::in_each; }

// The image, and pixels that windows begin at: of fprop and wgrad those of y, of dgrad those of a phase of dx.
struct Place {
    int images, in_h, in_w, pixel;  // of the image; elements of a pixel
    int from_h, from_w;             // of the first pixel's window
    int rows, columns;              // pixels that there are
    int tiles;
    Divisor tiles_w, tiles_h;
};

// A tile: its first image and pixel.
struct Tile {
    int image, h, w;

    __device__ __forceinline__ Tile(int tile, const Place& place) {
        w = place.tiles_w.split(tile) * wide;
        h = place.tiles_h.split(tile) * high;
        image = tile * images;
    }
};

// One of the pixels across a tile.
struct Pixel {
    int image, w;

    __device__ __forceinline__ explicit Pixel(int at) : image(at / wide), w(at % wide) {}
    // Bytes from the piece's first pixel to where the window begins, of row h.
    __device__ __forceinline__ int window(int h) const {
        return ((image * halo_h + h * Traits::step_h) * row_slots + w) * image_pitch;
    }
    __device__ __forceinline__ bool inside(const Tile& tile, const Place& place) const {
        return image < images && tile.image + image < place.images && tile.w + w < place.columns;
    }
};

// Copies of `Images` times `Rows` rows of `Wide` pixels with `Channels` channels, 16 bytes each. A thread keeps to a
// place across the rows, or to a few, and goes down, so that most of what a copy needs is worked out once:
// `across(pixel, piece)` makes what is asked to `copy(image, row)` then.
template <int Images, int Rows, int Wide, int Channels, class Across>
__device__ __forceinline__ void bring_rows(const Across& across) {
    constexpr int pieces = Channels / 8, places = Wide * pieces, used = places < threads ? places : threads;
    constexpr int together = threads / used, each = (Rows + together - 1) / together;
    const int first = together > 1 ? threadIdx.x / used : 0;
    if (threads % used && threadIdx.x >= together * used) return;
    for (int at = together > 1 ? threadIdx.x % used : threadIdx.x; at < places; at += used) {
        const auto column = across(at / pieces, at % pieces);
#pragma unroll 1
        for (int image = 0; image < Images; ++image)
#pragma unroll(each <= 16 ? each : 8)
            for (int i = 0; i < each; ++i)
                if (Rows % together == 0 || first + i * together < Rows) column.copy(image, first + i * together);
    }
}

// A column of the piece of the image.
template <class T>
struct Column {
    char* to;
    const T* from;
    int images, first_h, in_h;  // images and rows that there are
    Traits::Index row_elements, image_elements;
    bool inside;

    __device__ __forceinline__ void copy(int image, int row) const {
        tensor::copy<16>(to + (image * halo_h + row) * (row_slots * image_pitch),
                         from + (image * image_elements + row * row_elements),
                         inside && image < images && unsigned(first_h + row) < unsigned(in_h));
    }
};

// The piece of the image under a tile; zeros outside of the image.
template <class T>
__device__ __forceinline__ void bring_image(char* to, const T* image, const Tile& tile, int first_channel,
                                            const Place& p) {
    using Index = Traits::Index;
    const int h0 = tile.h * Traits::step_h + p.from_h, w0 = tile.w * Traits::step_w + p.from_w;
    const T* const first = image + (((Index(tile.image) * p.in_h + h0) * p.in_w + w0) * p.pixel + first_channel);
    bring_rows<images, halo_h, halo_w, in_chunk>([&](int w, int piece) {
        return Column<T>{to + slot(w) * image_pitch + piece * 16,
                         first + (Index(w) * p.pixel + piece * 8),
                         p.images - tile.image,
                         h0,
                         p.in_h,
                         Index(p.in_w) * p.pixel,
                         Index(p.in_h) * p.in_w * p.pixel,
                         unsigned(w0 + w) < unsigned(p.in_w)};
    });
}

}  // namespace groups
