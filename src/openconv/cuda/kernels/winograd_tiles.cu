// Tiles of images, transformed: one matrix of all tiles and channels for each point.
//
//     nhwc   matrices[point][tile][c]      nchw   matrices[point][part][c][tile of the part]
//     with   matrices[i, j] = Down * tile * Across, transposed, [i][j]
//
// for `pitch` tiles from tile `first` of all images on; tiles overlap where they are larger than `step`. Those from
// `count` on, and what of a tile is outside of the image, are zeros. Rows of channels in nhwc are `row` elements apart.
//
// A thread owns a tile of `vector` channels (nchw: of one), from loading it to storing its points: a tile is read
// by one thread, and what tiles share comes out of L1 and L2. Threads are in the order of the matrices' memory, so that
// stores are side by side, and in nhwc loads too. No shared memory.
//
// Traits: Element (of the image and the matrices), Sum; Offset (int or i64), Down and Across, step_h, step_w, channels_last,
// vector.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "common/winograd.cuh"
#include "traits"

using T = Traits::Element;
using Sum = Traits::Sum;
using Offset = Traits::Offset;
constexpr int V = Traits::vector;
static_assert(Traits::channels_last || V == 1, "channels of nchw are not side by side");

struct Params {
    const T* image;
    T* matrices;
    i64 first;
    int count, pitch, channels, row;
    int size[2], pad[2];
    Divisor vectors, tiles[2];  // C in vectors; tiles down and across an image
    Divisor each, all;          // nchw: tiles of a part; pitch
};

extern "C" __global__ void __launch_bounds__(256, 2)
winograd_tiles(const __grid_constant__ Params p) {
    // Place: the tile here, the first of its channels, where its point 0 goes.
    int tile = blockIdx.x * blockDim.x + threadIdx.x, c;
    Offset place;
    if constexpr (Traits::channels_last) {
        c = p.vectors.split(tile) * V;
        if (tile >= p.pitch) return;
        place = Offset(tile) * p.row + c;
    } else {
        c = tile;
        tile = p.all.split(c);
        if (c >= p.channels) return;
        int part = tile;
        const int within = p.each.split(part);
        place = (Offset(part) * p.channels + c) * p.each.value + within;
    }
    int n = int(p.first) + tile;
    const int x = p.tiles[1].split(n) * Traits::step_w - p.pad[1];
    const int y = p.tiles[0].split(n) * Traits::step_h - p.pad[0];
    const bool there = tile < p.count;
    const Offset pixels = Offset(p.size[0]) * p.size[1];
    const T* const from =
        p.image + (Traits::channels_last ? n * pixels * p.channels + c : (Offset(n) * p.channels + c) * pixels);

    // Load.
    auto load_one = [&](int i, int j, Sum(&value)[V]) {
        const int h = y + i, w = x + j;
        const bool inside = there && unsigned(h) < unsigned(p.size[0]) && unsigned(w) < unsigned(p.size[1]);
        const Offset at = Offset(h) * p.size[1] + w;
        if (inside) {
            const Pack<T, V> pack = load<V>(from + (Traits::channels_last ? at * p.channels : at));
#pragma unroll
            for (int v = 0; v < V; ++v) value[v] = widen<Sum>(pack.value[v]);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) value[v] = Sum(0);
        }
    };

    // Store.
    const Offset plane = Offset(p.pitch) * p.row;
    auto store_one = [&](int i, int j, const Sum(&value)[V]) {
        Pack<T, V> pack;
#pragma unroll
        for (int v = 0; v < V; ++v) pack.value[v] = T(value[v]);
        store<V>(p.matrices + place + (i * Traits::Across::to + j) * plane, pack);
    };

    // Compute.
    winograd::nested<Traits::Down, Traits::Across, V, Sum>(load_one, store_one);
}
