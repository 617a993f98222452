// The sum of what windows say of each value of dx: the transpose of im2col, then the epilogue.
//
//     dx[n, c, d, h, w] = epilogue(sum over t, r, s of columns[c, t, r, s][n, o, p, q])
//     with o = (d + pad - t*dilation) / stride where that is whole and within dy, and p and q alike
//
// A thread gathers for one value (nchw) or `vector` channels of one pixel (nhwc) of dx, its taps always in the same
// order: nothing is added by two threads, so that all bits are the same each time. Threads are in the order of dx, so
// that stores are side by side. `channels` channels from `first` on are there, of `images` images; a row of columns has
// `pitch` elements. No shared memory.
//
// Traits: Out (of dx), Sum, Epilogue; Columns (Out; Sum for f16 and bf16, so that sums are rounded once), Offset (int
// or i64), channels_last, vector.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Out;
using Sum = Traits::Sum;
using Columns = Traits::Columns;
using Offset = Traits::Offset;
constexpr int V = Traits::vector;

struct Params {
    T* dx;
    const Columns* columns;
    i64 first;  // channel
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    i64 count;       // threads that have something to do
    int all, pitch;  // channels of dx; elements of a row of columns
    int filter[3], output[3], pad[3], dilation[3];
    int step[3];  // from one tap to the next that a place is at, of some window
    Divisor image[3], stride[3];
    Divisor channels, run;  // here, in vectors; of a group, in vectors
};

// Of the taps at which some window may have this place, the first.
__device__ __forceinline__ int first_tap(int place, const Params& p, int axis) {
    if (place >= 0 && p.dilation[axis] == 1) return p.stride[axis].split(place);
    for (int tap = 0; tap < p.step[axis] && place >= 0; ++tap, place -= p.dilation[axis]) {
        int rest = place;
        if (p.stride[axis].split(rest) == 0) return tap;
    }
    return p.filter[axis];
}

// The output position whose window has this place at such a tap; -1 where there is none.
__device__ __forceinline__ int source(int place, const Divisor& stride, int count) {
    if (place < 0) return -1;
    place = stride.quotient(place);
    return place < count ? place : -1;
}

extern "C" __global__ void __launch_bounds__(256, 3)
col2im(const __grid_constant__ Params p) {
    // Place: channel (the first of a vector), pixel and image.
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= p.count) return;
    int rest = int(index), c = 0;
    if (Traits::channels_last) c = p.channels.split(rest);
    const int w = p.image[2].split(rest), h = p.image[1].split(rest), d = p.image[0].split(rest);
    if (!Traits::channels_last) c = p.channels.split(rest);
    const int n = rest, taps = p.filter[0] * p.filter[1] * p.filter[2];
    const int outputs = p.output[0] * p.output[1] * p.output[2];
    int group = c;
    const int within = p.run.split(group);

    // Load and add up.
    Sum sum[V];
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] = 0;
    const int first_t = first_tap(d + p.pad[0], p, 0), first_r = first_tap(h + p.pad[1], p, 1);
    const int first_s = first_tap(w + p.pad[2], p, 2);
    for (int t = first_t; t < p.filter[0]; t += p.step[0]) {
        const int o = source(d + p.pad[0] - t * p.dilation[0], p.stride[0], p.output[0]);
        if (o < 0) continue;
        for (int r = first_r; r < p.filter[1]; r += p.step[1]) {
            const int row = source(h + p.pad[1] - r * p.dilation[1], p.stride[1], p.output[1]);
            if (row < 0) continue;
            const int line = (o * p.output[1] + row) * p.output[2];
#pragma unroll 2
            for (int s = first_s; s < p.filter[2]; s += p.step[2]) {
                const int q = source(w + p.pad[2] - s * p.dilation[2], p.stride[2], p.output[2]);
                if (q < 0) continue;
                const int tap = (t * p.filter[1] + r) * p.filter[2] + s;
                const Offset pixel = Offset(n) * outputs + line + q;
                const Offset at = Traits::channels_last
                                      ? pixel * p.pitch + ((group * taps + tap) * p.run.value + within) * V
                                      : Offset(c * taps + tap) * p.pitch + pixel;
                const Pack<Columns, V> value = load<V>(p.columns + at);
#pragma unroll
                for (int i = 0; i < V; ++i) sum[i] += widen<Sum>(value.value[i]);
            }
        }
    }

    // Store.
    const int channel = int(p.first) + c * V;
    const Offset pixels = Offset(p.image[0].value) * p.image[1].value * p.image[2].value;
    const Offset pixel = (Offset(d) * p.image[1].value + h) * p.image[2].value + w;
    const Offset place =
        Traits::channels_last ? (n * pixels + pixel) * p.all + channel : (Offset(n) * p.all + channel) * pixels + pixel;
    Traits::Epilogue::apply<V, Traits::channels_last>(sum, p.operands, channel, place);
    Pack<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.value[i] = T(sum[i]);
    store<V>(p.dx + place, result);
}
