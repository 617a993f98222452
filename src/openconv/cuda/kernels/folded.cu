// A filter spread over folded columns (common/fold.cuh): to[(j, k), row, u, (i, c)].
//
// A thread has one element; those of a warp lie together, channels first.
//
// Traits: From and To (of the same size, without a meaning).

#include "common/fold.cuh"

constexpr int threads = 256;

extern "C" __global__ void __launch_bounds__(threads)
folded(const __grid_constant__ Params p) {
    const int at = blockIdx.x * threads + threadIdx.x;
    if (at >= p.total) return;
    int left = at;
    const int c = p.c.split(left), i = p.columns.split(left), group = p.groups.split(left);
    const int row = p.rows.split(left), k = p.k.split(left), j = left;
    int tap = group * p.columns.value + i - j * p.stride - p.shift;
    Traits::To value{};
    if (tap >= 0 && p.gap.split(tap) == 0 && tap < p.taps.value)
        value = p.from[k * p.k_step + c * p.c_step + row * p.row_step + tap * p.tap_step];
    p.to[at] = value;
}
