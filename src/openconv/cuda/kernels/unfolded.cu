// The gradient of a filter, gathered from that of the filter spread over folded columns (common/fold.cuh): each tap is
// the sum of what all j have of it, in their order.
//
// A thread has one element; those of a warp read channels that lie together.
//
// Traits: From (f32) and To (an element type).

#include "common/fold.cuh"

constexpr int threads = 256;

extern "C" __global__ void __launch_bounds__(threads)
unfolded(const __grid_constant__ Params p) {
    const int at = blockIdx.x * threads + threadIdx.x;
    if (at >= p.total) return;
    int k = at;
    const int c = p.c.split(k), tap = p.taps.split(k), row = p.rows.split(k);
    f32 sum = 0.0f;
    for (int j = 0; j < p.folds; ++j) {
        int group = tap * p.dilation + j * p.stride + p.shift;
        const int i = p.columns.split(group);
        const i64 line = (i64(j) * p.k.value + k) * p.rows.value + row;
        sum += p.from[((line * p.groups.value + group) * p.columns.value + i) * p.c.value + c];
    }
    p.to[k * p.k_step + c * p.c_step + row * p.row_step + tap * p.tap_step] = Traits::To(sum);
}
