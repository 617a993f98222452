// The backward pass of pooling as a gather: each value of dx adds what the windows around it say of it.
//
//     largest   dx[n,c,d,h,w] = sum of dy[n,c,o,p,q] over the windows whose `chosen` place (from pool.cu) it is
//     average   dx[n,c,d,h,w] = sum of dy[n,c,o,p,q] / divisor over the windows that it is in
//
// A thread owns `vector` channels of a pixel (nhwc) or `vector` values of a row (nchw) of dx, and adds windows always in
// the same order: nothing is added by two threads, so that all bits are the same each time. No shared memory.
//
// Traits: those of common/pool.cuh; unrolled (a few windows around each value: `most_0` to `most_2` along the axes),
// whole (rows of nchw are whole vectors).

#include "common/pool.cuh"

using namespace pool;
constexpr int V = Traits::vector, columns = Traits::channels_last ? 1 : V, channels = V / columns;

struct Params {
    const T* dy;
    const Tap* chosen;
    T* dx;
    Sizes sizes;
};

// The windows that have one of `width` places from `place` on: from `first`, `count` of them.
struct Around {
    int first, count;

    __device__ __forceinline__ Around(const Sizes& p, int axis, int place, int width) {
        const int start = place + p.low[axis] - window(p, axis) + 1;
        first = start > 0 ? by_stride(p, axis, start + stride(p, axis) - 1) : 0;
        count = min(by_stride(p, axis, place + width - 1 + p.low[axis]), p.out[axis] - 1) - first + 1;
    }
};

__device__ __forceinline__ int turns(int most, int count) { return Traits::unrolled ? most : count; }

extern "C" __global__ void __launch_bounds__(256, 2)
pool_backward(const __grid_constant__ Params p) {
    const Sizes& sizes = p.sizes;

    // Place.
    const i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= sizes.count) return;
    const Place place(sizes, index);
    const int d = place.at[0], h = place.at[1], w = place.at[2] * columns;
    const i64 image_at = place.image * sizes.y_image + place.lane;

    // Load and add up.
    Sum sum[V];
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = Sum(0);
    const Around deep(sizes, 0, d, 1), high(sizes, 1, h, 1), wide(sizes, 2, w, columns);
    constexpr int unroll = Traits::unrolled ? 64 : 1;
#pragma unroll unroll
    for (int a = 0; a < turns(Traits::most_0, deep.count); ++a) {
#pragma unroll unroll
        for (int b = 0; b < turns(Traits::most_1, high.count); ++b) {
            const bool here = a < deep.count && b < high.count;
            const int o = deep.first + a, row = high.first + b;
            const int t = d + sizes.low[0] - o * stride(sizes, 0), r = h + sizes.low[1] - row * stride(sizes, 1);
            const int base = (t * window(sizes, 1) + r) * window(sizes, 2);
            const int line = (o * sizes.out[1] + row) * sizes.out[2];
#pragma unroll unroll
            for (int c = 0; c < turns(Traits::most_2, wide.count); ++c) {
                if (!here || c >= wide.count) continue;
                const int q = wide.first + c, s = w + sizes.low[2] - q * stride(sizes, 2);
                const i64 at = image_at + (line + q) * sizes.channels;
                Vector<channels> values;
                values.load(p.dy + at);
                Sum said[channels];
                values.widen(said);
                if constexpr (Traits::largest) {
                    const Pack<Tap, channels> chosen = load<channels>(p.chosen + at);
#pragma unroll
                    for (int v = 0; v < V; ++v) {
                        if (Traits::channels_last) {
                            if (int(chosen.value[v % channels]) == base + s) sum[v] += said[v % channels];
                        } else {
                            const int column = int(chosen.value[0]) - base;
                            if (inside(column, window(sizes, 2)) && column == s + v) sum[v] += said[0];
                        }
                    }
                } else {
                    const Sum scale = Traits::exclude ? Sum(1) / divisor_of(sizes, o, row, q) : Sum(1);
#pragma unroll
                    for (int v = 0; v < V; ++v)
                        if (Traits::channels_last || inside(s + v, window(sizes, 2)))
                            sum[v] += said[v % channels] * scale;
                }
            }
        }
    }

    // Store.
    if (!Traits::largest && !Traits::exclude) {
        const Sum divisor = divisor_of(sizes, 0, 0, 0);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] /= divisor;
    }
    T* dx =
        p.dx + place.image * sizes.x_image + ((d * sizes.in[1] + h) * sizes.in[2] + w) * sizes.channels + place.lane;
    if (Traits::channels_last || Traits::whole) {
        Vector<V> values;
        values.narrow(sum);
        values.store(dx);
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (w + v < sizes.in[2]) dx[v] = T(sum[v]);
    }
}
