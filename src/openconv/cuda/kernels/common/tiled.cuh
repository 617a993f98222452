// What the tiled kernels share: a plane of an image in memory, and a tile of it with its halo in shared memory.
//
//     tile[y][x] = image[origin_y + y][origin_x + x], 0 outside of the image
//
// Padding is not stored anywhere: it is what the tile holds where the image ends.
#pragma once
#include "common/types.cuh"

// One channel of one image: where it starts, its size, and the steps to the next row and column in elements.
template <class T, class Index>
struct Plane {
    const T* start;
    int height, width;
    Index row;
    int column;
};

// All threads of a block copy a tile of Height x Width values, in the type that sums are made of.
template <int Height, int Width, class Sum, class T, class Index>
__device__ __forceinline__ void load_tile(Sum (&tile)[Height][Width], const Plane<T, Index>& plane, int origin_y,
                                          int origin_x) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
    for (int i = thread; i < Height * Width; i += threads) {
        const int y = origin_y + i / Width, x = origin_x + i % Width;
        const bool inside = unsigned(y) < unsigned(plane.height) && unsigned(x) < unsigned(plane.width);
        tile[i / Width][i % Width] = inside ? widen<Sum>(plane.start[y * plane.row + Index(x) * plane.column]) : Sum(0);
    }
}
