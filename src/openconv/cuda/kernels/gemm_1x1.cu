// Windows that do not overlap, put in order for a matrix product and back: a permutation of memory in runs of S.
//
//     gather    columns[n, o, p, q][c, t, r, s] = image[n, c, o*step + t, p*step + r, q*step + s]
//     scatter   image = epilogue(the inverse of that; 0 where no window is)
//
// The axes need not be those of the problem (gemm_1x1.py says which they are): in nhwc there is one channel, and the
// channels are part of the innermost axis, where a tap is C elements long; a 1x1 filter in nchw that skips pixels takes
// each plane as an image. A row of columns is `pitch` elements long, the last of them zeros where that is more than a
// window has: cuBLAS reads rows of 16 bytes' multiples much faster.
//
// A thread owns vectors of `vector` elements, a divisor of S and of every other step, so that a vector is in one run on
// both sides. gather: threadIdx.y is a line (n, o, p) of columns, threadIdx.x a vector in it, so that stores are side by
// side; runs of 32 bytes and more are whole sectors, the rest of a shorter run's sector is found in L1, where the block
// soon needs it. scatter: lines are rows of the image, so that stores are side by side again. Each thread has `unroll`
// loads under way at once. No shared memory.
//
// Traits: Out (of every tensor), Sum, Epilogue; Columns (Out; Sum where an epilogue is to see sums unrounded),
// Offset (int or i64), vector, unroll, channels_last.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Out;
using Sum = Traits::Sum;
using Offset = Traits::Offset;
constexpr int V = Traits::vector;
constexpr int U = Traits::unroll;
using Columns = Traits::Columns;

struct Params {
    T* image;
    Columns* columns;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int lines, length;         // lines, and vectors in each: of columns in gather, of the image in scatter
    int window, pitch;         // elements of a window, and of a row of columns
    Divisor image_size[3];     // D, H, W in elements
    Divisor step[3];           // of windows; the last in elements
    Divisor taps[2];           // T, R
    Divisor run;               // S in vectors
    Divisor outputs[2];        // O, P
    Divisor row;               // pitch in vectors
    Divisor planes, channels;  // planes of an image; channels of the result, for the epilogue
    int width;                 // Q
};

template <class E>
__device__ __forceinline__ Pack<E, V> zeros() {
    Pack<E, V> all;
#pragma unroll
    for (int i = 0; i < V; ++i) all.value[i] = E(0.0f);
    return all;
}

extern "C" __global__ void __launch_bounds__(256)
gather(const __grid_constant__ Params p) {
    // Place: line (n, o, row), whose first window starts at `base` in plane 0 of image n.
    int rest = blockIdx.x * blockDim.y + threadIdx.y;
    if (rest >= p.lines) return;
    T* const target = reinterpret_cast<T*>(p.columns) + Offset(rest) * p.width * p.pitch;
    const int row = p.outputs[1].split(rest), o = p.outputs[0].split(rest);
    const Offset plane = Offset(p.image_size[0].value) * p.image_size[1].value * p.image_size[2].value;
    const T* const base = p.image + Offset(rest) * p.planes.value * plane;
    const int d0 = o * p.step[0].value, h0 = row * p.step[1].value;

    for (int first = blockIdx.y * blockDim.x * U + threadIdx.x; first < p.length; first += gridDim.y * blockDim.x * U) {
        // Load.
        Pack<T, V> value[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            int at = first + u * blockDim.x;
            const bool mine = at < p.length;
            const int within = p.row.split(at), q = at;
            value[u] = zeros<T>();
            if (mine && within * V < p.window) {
                int c = within;
                const int s = p.run.split(c), r = p.taps[1].split(c), t = p.taps[0].split(c);
                const Offset line = Offset(d0 + t) * p.image_size[1].value + h0 + r;
                value[u] = load<V>(base + c * plane + line * p.image_size[2].value + q * p.step[2].value + s * V);
            }
        }

        // Store.
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int at = first + u * blockDim.x;
            if (at < p.length) store<V>(target + Offset(at) * V, value[u]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
scatter(const __grid_constant__ Params p) {
    // Place: row (n, c, d, h) of the image, tap (t, r) of the windows (o, row), if there are any.
    int rest = blockIdx.x * blockDim.y + threadIdx.y;
    if (rest >= p.lines) return;
    const Offset start = Offset(rest) * p.image_size[2].value;
    int row = p.image_size[1].split(rest);
    int o = p.image_size[0].split(rest);
    int ordinal = rest;  // of this plane among all
    const int channel = p.channels.split(ordinal), c = p.planes.split(rest);
    const int r = p.step[1].split(row), t = p.step[0].split(o);
    const bool any = r < p.taps[1].value && row < p.outputs[1].value && t < p.taps[0].value && o < p.outputs[0].value;
    const Offset line = (Offset(rest) * p.outputs[0].value + o) * p.outputs[1].value + row;
    const Columns* const base =
        p.columns + line * p.width * p.pitch + ((c * p.taps[0].value + t) * p.taps[1].value + r) * p.run.value * V;

    for (int first = blockIdx.y * blockDim.x * U + threadIdx.x; first < p.length; first += gridDim.y * blockDim.x * U) {
        // Load.
        Pack<Columns, V> value[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int at = first + u * blockDim.x;
            int q = at * V;
            const int s = p.step[2].split(q);
            value[u] = zeros<Columns>();
            if (any && at < p.length && q < p.width && s < p.run.value * V)
                value[u] = load<V>(base + Offset(q) * p.pitch + s);
        }

        // Compute and store.
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const int at = first + u * blockDim.x;
            if (at >= p.length) continue;
            const Offset place = start + at * V;
            Sum sum[V];
            Pack<T, V> result;
#pragma unroll
            for (int i = 0; i < V; ++i) sum[i] = widen<Sum>(value[u].value[i]);
            int pixel = at * V;
            const int own = Traits::channels_last ? p.channels.split(pixel) : channel;
            Traits::Epilogue::apply<V, Traits::channels_last>(sum, p.operands, own, place);
#pragma unroll
            for (int i = 0; i < V; ++i) result.value[i] = T(sum[i]);
            store<V>(p.image + place, result);
        }
    }
}
