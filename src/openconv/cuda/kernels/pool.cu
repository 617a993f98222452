// Pooling: y from x, or (`index`) which place of its window each value of y is, for the backward pass.
//
//     y[n,c,o,p,q] = largest or average over t,r,s of x[n, c, o*stride - low + t, p*stride - low + r, q*stride - low + s]
//
// A thread owns `vector` channels of a pixel (nhwc; lanes go along channels, then along a row) or one value (nchw; lanes
// go along a row), and `rows` rows of y below each other: a row of x that two windows share is read and reduced once.
// Loads outside the tensor are left out and stand for what changes nothing: -inf, or zero to a sum.
//
// Large windows (`fixed` is false) are loops, and `parts` threads share one: each takes every parts-th place, and the
// first adds up what they found, always in the same order. Those of one window are side by side in nchw, where its
// places are; in nhwc those of neighbouring channels are.
//
// Shared memory: what the threads of one window found, where they are several.
//
// Traits: those of common/pool.cuh; index, rows, parts.

#include "common/pool.cuh"

using namespace pool;
constexpr int V = Traits::vector, L = Traits::rows, threads = 256;
static_assert(Traits::fixed || L == 1, "loops have one row");
static_assert(!Traits::fixed || Traits::parts == 1, "small windows have one thread");

struct Params {
    const T* x;
    void* y;
    Sizes sizes;
};

// What is known of a window so far. Each has clear(first place inside), take(values, place), join(a later row of
// places from `base` on), merge(places from anywhere) and store.
struct Largest {
    Vector<V> value;

    __device__ __forceinline__ static Sum outside() { return lowest(); }
    __device__ __forceinline__ void clear(int) { value.fill(lowest()); }
    __device__ __forceinline__ void take(const Vector<V>& x, int) { value.enlarge(x); }
    __device__ __forceinline__ void join(const Largest& row, int) { value.enlarge(row.value); }
    __device__ __forceinline__ void merge(const Largest& other) { value.enlarge(other.value); }
    __device__ __forceinline__ void store(void* y, i64 at, Sum) const { value.store(static_cast<T*>(y) + at); }
};

struct Added {
    Sum sum[V];

    __device__ __forceinline__ static Sum outside() { return Sum(0); }
    __device__ __forceinline__ void clear(int) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] = Sum(0);
    }
    __device__ __forceinline__ void take(const Vector<V>& x, int) {
        Sum wide[V];
        x.widen(wide);
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += wide[v];
    }
    __device__ __forceinline__ void merge(const Added& other) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += other.sum[v];
    }
    __device__ __forceinline__ void join(const Added& row, int) { merge(row); }
    __device__ __forceinline__ void store(void* y, i64 at, Sum divisor) const {
        Sum mean[V];
#pragma unroll
        for (int v = 0; v < V; ++v) mean[v] = sum[v] / divisor;
        Vector<V> values;
        values.narrow(mean);
        values.store(static_cast<T*>(y) + at);
    }
};

struct Chosen {
    Sum value[V];
    int place[V];

    __device__ __forceinline__ static Sum outside() { return lowest(); }
    __device__ __forceinline__ void clear(int first) {
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = lowest(), place[v] = first;
    }
    __device__ __forceinline__ void take(const Vector<V>& x, int at) {
        Sum wide[V];
        x.widen(wide);
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (beats(wide[v], value[v])) value[v] = wide[v], place[v] = at;
    }
    __device__ __forceinline__ void join(const Chosen& row, int base) {
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (beats(row.value[v], value[v])) value[v] = row.value[v], place[v] = base + row.place[v];
    }
    __device__ __forceinline__ void merge(const Chosen& other) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const Sum a = value[v], b = other.value[v];
            const bool later = other.place[v] > place[v];
            const bool wins = b != b ? a == a || later : b > a || (b == a && !later);
            if (wins) value[v] = b, place[v] = other.place[v];
        }
    }
    __device__ __forceinline__ void store(void* y, i64 at, Sum) const {
        Pack<Tap, V> places;
#pragma unroll
        for (int v = 0; v < V; ++v) places.value[v] = Tap(place[v]);
        ::store<V>(static_cast<Tap*>(y) + at, places);
    }
};

template <bool Index, bool Max>
struct StateOf {
    using type = Chosen;
};
template <>
struct StateOf<false, true> {
    using type = Largest;
};
template <>
struct StateOf<false, false> {
    using type = Added;
};
using State = StateOf<Traits::index, Traits::largest>::type;

// All windows of a thread, unrolled.
__device__ __forceinline__ void unrolled(State (&found)[L], const T* x, const Sizes& p, int d, int h, int w) {
    constexpr int TT = Traits::window_0, R = Traits::window_1, S = Traits::window_2, step = Traits::stride_1;
    // More loads than registers are asked for one plane, row or part of a row after the other.
    constexpr int height = (L - 1) * step + R, most = 20;
    constexpr int planes = TT * height * S <= most ? TT : 1, rows = L > 1 || height * S <= most ? height : 1;
    constexpr int columns = S <= most ? S : 8;
#pragma unroll planes
    for (int t = 0; t < TT; ++t) {
#pragma unroll rows
        for (int j = 0; j < height; ++j) {
            const bool here = inside(d + t, p.in[0]) && inside(h + j, p.in[1]);
            const T* from = x + (((d + t) * p.in[1] + h + j) * p.in[2] + w) * p.channels;
            State row;
            row.clear(0);
#pragma unroll columns
            for (int s = 0; s < S; ++s) {
                Vector<V> value;
                value.fill(State::outside());
                if (here && inside(w + s, p.in[2])) value.load(from + s * p.channels);
                row.take(value, s);
            }
#pragma unroll
            for (int i = 0; i < L; ++i)
                if (j - i * step >= 0 && j - i * step < R) found[i].join(row, (t * R + j - i * step) * S);
        }
    }
}

// Every parts-th place of a window from `part` on.
__device__ __forceinline__ void looped(State& found, const T* x, const Sizes& p, int d, int h, int w, int part) {
    const int taps = p.window[0].value * p.window[1].value * p.window[2].value;
#pragma unroll 4
    for (int tap = part; tap < taps; tap += Traits::parts) {
        int rest = tap;
        const int s = w + p.window[2].split(rest), r = h + p.window[1].split(rest), t = d + rest;
        Vector<V> value;
        value.fill(State::outside());
        if (inside(t, p.in[0]) && inside(r, p.in[1]) && inside(s, p.in[2]))
            value.load(x + ((t * p.in[1] + r) * p.in[2] + s) * p.channels);
        found.take(value, tap);
    }
}

extern "C" __global__ void __launch_bounds__(threads, 2)
pool_forward(const __grid_constant__ Params p) {
    constexpr int units = threads / Traits::parts;
    const Sizes& sizes = p.sizes;

    // Place.
    const int unit = Traits::channels_last ? threadIdx.x % units : threadIdx.x / Traits::parts;
    const int part = Traits::channels_last ? threadIdx.x / units : threadIdx.x % Traits::parts;
    const i64 index = i64(blockIdx.x) * units + unit;
    const bool idle = index >= sizes.count;
    if (Traits::parts == 1 && idle) return;
    const Place place(sizes, index);
    const int o = place.at[0], row = place.at[1] * L, q = place.at[2], lane = place.lane;
    const int d = o * stride(sizes, 0) - sizes.low[0], h = row * stride(sizes, 1) - sizes.low[1];
    const int w = q * stride(sizes, 2) - sizes.low[2];

    // Load and compute.
    State found[L];
#pragma unroll
    for (int i = 0; i < L; ++i) {
        const int top = max(0, -h - i * stride(sizes, 1));
        found[i].clear((max(0, -d) * window(sizes, 1) + top) * window(sizes, 2) + max(0, -w));
    }
    const T* x = p.x + place.image * sizes.x_image + lane;
    if constexpr (Traits::fixed)
        unrolled(found, x, sizes, d, h, w);
    else if (!idle)
        looped(found[0], x, sizes, d, h, w, part);
    if constexpr (Traits::parts > 1) {
        __shared__ State all[threads];
        all[part * units + unit] = found[0];
        __syncthreads();
        if (part > 0 || idle) return;
        for (int other = 1; other < Traits::parts; ++other) found[0].merge(all[other * units + unit]);
    }

    // Store.
#pragma unroll
    for (int i = 0; i < L; ++i) {
        if (row + i >= sizes.out[1]) break;
        const int at = ((o * sizes.out[1] + row + i) * sizes.out[2] + q) * sizes.channels + lane;
        found[i].store(p.y, place.image * sizes.y_image + at, divisor_of(sizes, o, row + i, q));
    }
}
