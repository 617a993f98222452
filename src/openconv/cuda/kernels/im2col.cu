// Windows written out for a matrix product: padding as zeros, each value of x once for every window that it is in.
//
//     nchw   columns[c, t, r, s][n, pixel]       nhwc   columns[n, pixel][g, t, r, s, c]
//     with   = x[n, c, o*stride - pad + t*dilation, p*stride - pad + r*dilation, q*stride - pad + s*dilation]
//
// for `images` images and `count` output pixels of each, from pixel `first` on. Rows of columns are `pitch` elements
// long; in nhwc what is behind a window is zeros.
//
// nchw: a thread owns one output pixel and writes the taps of a channel below each other, all or a part of them, so
// that a warp's stores are side by side and, where the stride is 1, its loads too. nhwc: a thread owns vectors of
// channels (`vector` divides C/G) in the order of columns, and has `unroll` loads under way. No shared memory: what
// windows share comes out of L1.
//
// Traits: Out (of every tensor); Offset (int or i64), channels_last, vector, unroll.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Out;
using Offset = Traits::Offset;
constexpr int V = Traits::vector;
constexpr int U = Traits::unroll;

struct Params {
    const T* x;
    T* columns;
    i64 first;
    int width;     // output pixels of all images
    int channels;  // C
    int window, pitch;
    int image[3], pad[3], stride[3], dilation[3], filter[3];
    Divisor count, outputs[2];  // pixels of an image here; P and Q
    Divisor row, run, taps[3];  // nhwc: pitch and C/G in vectors; T, R, S
    Divisor parts;              // nchw: of a channel's taps, `each` of them in all but the last
    int each;
};

struct Place {
    int n, at[3];  // image, and where its window starts: d, h, w
};

__device__ __forceinline__ Place place(const Params& p, int pixel) {
    Place found;
    found.n = pixel;
    int rest = p.count.split(found.n) + int(p.first);
    const int q = p.outputs[1].split(rest), row = p.outputs[0].split(rest);
    found.at[0] = rest * p.stride[0] - p.pad[0];
    found.at[1] = row * p.stride[1] - p.pad[1];
    found.at[2] = q * p.stride[2] - p.pad[2];
    return found;
}

__device__ void planes(const Params& p) {
    const int pixel = blockIdx.x * blockDim.x + threadIdx.x;
    if (pixel >= p.width) return;
    const Place own = place(p, pixel);
    const Offset plane = Offset(p.image[0]) * p.image[1] * p.image[2];
    const int taps = p.filter[0] * p.filter[1] * p.filter[2];

    for (int y = blockIdx.y; y < p.channels * p.parts.value; y += gridDim.y) {
        int c = y;
        const int begin = p.parts.split(c) * p.each;
        int left = min(p.each, taps - begin), t = begin;
        int s = p.taps[2].split(t), r = p.taps[1].split(t);
        const T* const from = p.x + (Offset(own.n) * p.channels + c) * plane;
        T* to = p.columns + (Offset(c) * taps + begin) * p.pitch + pixel;
        while (left > 0) {
            const int d = own.at[0] + t * p.dilation[0], h = own.at[1] + r * p.dilation[1];
            const bool inside = unsigned(d) < unsigned(p.image[0]) && unsigned(h) < unsigned(p.image[1]);
            const Offset line = (Offset(d) * p.image[1] + h) * p.image[2];
            const int end = min(p.filter[2], s + left);
            left -= end - s;
#pragma unroll 4
            for (; s < end; ++s) {
                const int w = own.at[2] + s * p.dilation[2];
                T value = T(0.0f);
                if (inside && unsigned(w) < unsigned(p.image[2])) value = from[line + w];
                *to = value;
                to += p.pitch;
            }
            s = 0;
            if (++r == p.filter[1]) r = 0, ++t;
        }
    }
}

__device__ void rows(const Params& p) {
    const int first = blockIdx.x * blockDim.x * U + threadIdx.x;
    const int vectors = p.width * p.row.value;

    // Load.
    Pack<T, V> value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
        const int at = first + u * blockDim.x;
#pragma unroll
        for (int i = 0; i < V; ++i) value[u].value[i] = T(0.0f);
        if (at >= vectors) continue;
        int pixel = at;
        int group = p.row.split(pixel);
        if (group * V >= p.window) continue;
        const int c = p.run.split(group), s = p.taps[2].split(group), r = p.taps[1].split(group);
        const int t = p.taps[0].split(group);
        const Place own = place(p, pixel);
        const int d = own.at[0] + t * p.dilation[0], h = own.at[1] + r * p.dilation[1];
        const int w = own.at[2] + s * p.dilation[2];
        if (unsigned(d) < unsigned(p.image[0]) && unsigned(h) < unsigned(p.image[1]) &&
            unsigned(w) < unsigned(p.image[2])) {
            const Offset line = ((Offset(own.n) * p.image[0] + d) * p.image[1] + h) * p.image[2] + w;
            value[u] = load<V>(p.x + line * p.channels + (group * p.run.value + c) * V);
        }
    }

    // Store.
#pragma unroll
    for (int u = 0; u < U; ++u) {
        const int at = first + u * blockDim.x;
        if (at < vectors) store<V>(p.columns + Offset(at) * V, value[u]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
im2col(const __grid_constant__ Params p) {
    if constexpr (Traits::channels_last) {
        rows(p);
    } else {
        planes(p);
    }
}
