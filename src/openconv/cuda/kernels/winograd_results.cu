// Products at all points, transformed back into tiles of the result, with the epilogue.
//
//     out tile = epilogue(Down * products * Across, transposed)
//     nhwc   products[point][tile][k]       nchw   products[point][k][tile]
//
// for `count` tiles from tile `first` of all images on. What of a tile is outside of the result is not stored. A thread
// owns a tile of `vector` channels (nchw: of one). No shared memory.
//
// Traits: Out, Sum (of products), Epilogue; Offset (int or i64), Down and Across, channels_last, vector.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "common/winograd.cuh"
#include "traits"

using Out = Traits::Out;
using Sum = Traits::Sum;
using Offset = Traits::Offset;
using Down = Traits::Down;
using Across = Traits::Across;
constexpr int V = Traits::vector;
static_assert(Traits::channels_last || V == 1, "channels of nchw are not side by side");

struct Params {
    const Sum* products;
    Out* out;
    i64 first;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int pitch, channels, row;
    int size[2];
    Divisor count, vectors, tiles[2];  // tiles here; channels in vectors; tiles down and across an image
};

extern "C" __global__ void __launch_bounds__(256, 2)
winograd_results(const __grid_constant__ Params p) {
    // Place.
    int tile = blockIdx.x * blockDim.x + threadIdx.x, c;
    if constexpr (Traits::channels_last) {
        c = p.vectors.split(tile) * V;
        if (tile >= p.count.value) return;
    } else {
        c = tile;
        tile = p.count.split(c);
        if (c >= p.channels) return;
    }
    int n = int(p.first) + tile;
    const int x = p.tiles[1].split(n) * Across::to, y = p.tiles[0].split(n) * Down::to;
    const Sum* const from =
        p.products + (Traits::channels_last ? Offset(tile) * p.row + c : Offset(c) * p.pitch + tile);
    const Offset plane = Offset(p.pitch) * p.row, pixels = Offset(p.size[0]) * p.size[1];

    // Load.
    auto load_one = [&](int i, int j, Sum(&value)[V]) {
        const Pack<Sum, V> pack = load<V>(from + (i * Across::from + j) * plane);
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = pack.value[v];
    };

    // Store.
    auto store_one = [&](int i, int j, Sum(&value)[V]) {
        const int h = y + i, w = x + j;
        if (h >= p.size[0] || w >= p.size[1]) return;
        const Offset pixel = Offset(h) * p.size[1] + w;
        const Offset place = Traits::channels_last ? (n * pixels + pixel) * p.channels + c
                                                   : (Offset(n) * p.channels + c) * pixels + pixel;
        Traits::Epilogue::apply<V, Traits::channels_last>(value, p.operands, c, place);
        Pack<Out, V> pack;
#pragma unroll
        for (int v = 0; v < V; ++v) pack.value[v] = Out(value[v]);
        store<V>(p.out + place, pack);
    };

    // Compute.
    winograd::nested<Down, Across, V, Sum>(load_one, store_one);
}
