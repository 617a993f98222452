// The backward pass of max pooling whose windows do not overlap: dx in one step, without what was chosen in between.
//
// A thread owns a cell, `stride` places along each axis, that begins where a window does, in `vector` channels (nhwc) or
// one (nchw). It finds the window's largest value and writes all of the cell: dy at that place, zero elsewhere. Cells
// behind the last window have zeros only. Cells cover dx: each value is written once. No shared memory.
//
// Traits: those of common/pool.cuh.

#include "common/pool.cuh"

using namespace pool;
constexpr int V = Traits::vector;
static_assert(Traits::fixed, "cells are unrolled");

struct Params {
    const T* dy;
    const T* x;
    T* dx;
    Sizes sizes;
};

extern "C" __global__ void __launch_bounds__(256, 2)
pool_disjoint(const __grid_constant__ Params p) {
    constexpr int TT = Traits::window_0, R = Traits::window_1, S = Traits::window_2;
    const Sizes& sizes = p.sizes;

    // Place.
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= sizes.count) return;
    const Place place(sizes, index);
    const int o = place.at[0], row = place.at[1], q = place.at[2], lane = place.lane;
    const int d = o * Traits::stride_0 - sizes.low[0], h = row * Traits::stride_1 - sizes.low[1];
    const int w = q * Traits::stride_2 - sizes.low[2];
    const bool real = o < sizes.out[0] && row < sizes.out[1] && q < sizes.out[2];
    const i64 first = place.image * sizes.x_image + lane;

    // Load.
    Vector<V> values;
    values.fill(Sum(0));
    if (real)
        values.load(p.dy + place.image * sizes.y_image +
                    ((o * sizes.out[1] + row) * sizes.out[2] + q) * sizes.channels + lane);

    // Compute: the place of the largest value, as in pool.cu.
    Sum largest[V];
    int chosen[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
        largest[v] = lowest();
        chosen[v] = (max(0, -d) * R + max(0, -h)) * S + max(0, -w);
    }
#pragma unroll
    for (int tap = 0; tap < TT * R * S; ++tap) {
        const int t = d + tap / (R * S), r = h + tap / S % R, s = w + tap % S;
        Vector<V> seen;
        seen.fill(lowest());
        if (real && inside(t, sizes.in[0]) && inside(r, sizes.in[1]) && inside(s, sizes.in[2]))
            seen.load(p.x + first + ((t * sizes.in[1] + r) * sizes.in[2] + s) * sizes.channels);
        Sum wide[V];
        seen.widen(wide);
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (beats(wide[v], largest[v])) largest[v] = wide[v], chosen[v] = tap;
    }

    // Store.
    Sum said[V];
    values.widen(said);
#pragma unroll
    for (int a = 0; a < Traits::stride_0; ++a) {
#pragma unroll
        for (int b = 0; b < Traits::stride_1; ++b) {
#pragma unroll
            for (int c = 0; c < Traits::stride_2; ++c) {
                if (!inside(d + a, sizes.in[0]) || !inside(h + b, sizes.in[1]) || !inside(w + c, sizes.in[2])) continue;
                const int tap = a < TT && b < R && c < S ? (a * R + b) * S + c : -1;
                Sum to[V];
#pragma unroll
                for (int v = 0; v < V; ++v) to[v] = chosen[v] == tap ? said[v] : Sum(0);
                Vector<V> made;
                made.narrow(to);
                made.store(p.dx + first + (((d + a) * sizes.in[1] + h + b) * sizes.in[2] + w + c) * sizes.channels);
            }
        }
    }
}
