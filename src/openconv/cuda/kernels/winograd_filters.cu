// Filters, transformed: one matrix of filters and channels for each point.
//
//     matrices[point][k][c] = (Down * w[k, c] * Across, transposed) [point]        turned: with w upside down, for a dgrad
//
// A thread owns one filter of one channel; threads are in the order of the matrices, whose rows are `row` elements
// apart. No shared memory: filters are a small part of what a convolution reads.
//
// Traits: Element (of filters and matrices), Sum; Offset (int or i64), Down and Across, turned.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "common/winograd.cuh"
#include "traits"

using T = Traits::Element;
using Sum = Traits::Sum;
using Offset = Traits::Offset;
using Down = Traits::Down;
using Across = Traits::Across;

struct Params {
    const T* filters;
    T* matrices;
    int count, row;  // filters; elements of a row
    int step_filter, step_channel, step_tap;
    Divisor channels;
};

extern "C" __global__ void __launch_bounds__(256)
winograd_filters(const __grid_constant__ Params p) {
    // Place.
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    const int c = p.channels.split(k);
    if (k >= p.count) return;
    const T* const from = p.filters + Offset(k) * p.step_filter + Offset(c) * p.step_channel;
    T* const to = p.matrices + Offset(k) * p.row + c;
    const Offset plane = Offset(p.count) * p.row;

    // Load, compute, store.
    auto load_one = [&](int i, int j, Sum(&value)[1]) {
        const int r = Traits::turned ? Down::from - 1 - i : i, s = Traits::turned ? Across::from - 1 - j : j;
        value[0] = widen<Sum>(from[Offset(r * Across::from + s) * p.step_tap]);
    };
    auto store_one = [&](int i, int j, const Sum(&value)[1]) { to[(i * Across::to + j) * plane] = T(value[0]); };
    winograd::nested<Down, Across, 1, Sum>(load_one, store_one);
}
