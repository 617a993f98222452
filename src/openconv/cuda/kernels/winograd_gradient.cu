// The gradient of filters at all points, transformed back: dw[k, c] = Down * sums[., k, c] * Across, transposed.
//
//     sums[point][part][k][c]      parts are added up in their order
//
// A thread owns one filter of one channel; threads are in the order of the sums, whose rows are `row` elements apart.
// No shared memory.
//
// Traits: Out, Sum; Offset (int or i64), Down and Across.

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

struct Params {
    const Sum* sums;
    Out* filters;
    int count, row, parts;  // filters; elements of a row
    int step_filter, step_channel, step_tap;
    Divisor channels;
};

extern "C" __global__ void __launch_bounds__(256)
winograd_gradient(const __grid_constant__ Params p) {
    // Place.
    int k = blockIdx.x * blockDim.x + threadIdx.x;
    const int c = p.channels.split(k);
    if (k >= p.count) return;
    const Sum* const from = p.sums + Offset(k) * p.row + c;
    Out* const to = p.filters + Offset(k) * p.step_filter + Offset(c) * p.step_channel;
    const Offset plane = Offset(p.count) * p.row;

    // Load, compute, store.
    auto load_one = [&](int i, int j, Sum(&value)[1]) {
        const Sum* at = from + Offset(i * Across::from + j) * p.parts * plane;
        value[0] = *at;
        for (int part = 1; part < p.parts; ++part) value[0] += at[part * plane];
    };
    auto store_one = [&](int i, int j, const Sum(&value)[1]) {
        to[Offset(i * Across::to + j) * p.step_tap] = Out(value[0]);
    };
    winograd::nested<Down, Across, 1, Sum>(load_one, store_one);
}
