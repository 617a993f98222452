// What the pooling kernels share: sizes of three axes, and a few values that lie side by side.
//
// Tensors of fewer axes have 1 for the first ones. Windows and strides are constants where Traits::fixed is set.
// Traits (of all): T, Sum, Tap; fixed, channels_last, largest (mode max), exclude (mode avg_exclude), vector, axes,
// window_0 ... window_2, stride_0 ... stride_2 (1 unless fixed), large (threads have numbers of more than 31 bits).
#pragma once
#include "common/types.cuh"
#include "common/divide.cuh"
#include "common/depthwise.cuh"
#include "traits"

namespace pool {

using T = Traits::T;
using Sum = Traits::Sum;
using Tap = Traits::Tap;  // a place of a window, in row-major order

struct Sizes {
    i64 count;                     // threads that have something to do
    i64 x_image, y_image;          // elements of an image (nhwc) or a plane (nchw)
    Divisor each;                  // threads of such a one:
    Divisor lanes, columns, rows;  // vectors of channels (nhwc), then those along a row, then rows
    int in[3], out[3], low[3];     // of x and y; padding in front
    Divisor window[3], stride[3];
    int channels;  // elements from one pixel to the next
};

// What a thread owns: a vector of channels, and where it is along the axes.
struct Place {
    int image, lane, at[3];

    __device__ __forceinline__ Place(const Sizes& p, i64 index) {
        int rest;
        if (Traits::large) {
            image = int(index / p.each.value);
            rest = int(index - i64(image) * p.each.value);
        } else {
            int of = int(index);
            rest = p.each.split(of);
            image = of;
        }
        lane = Traits::channels_last ? p.lanes.split(rest) * Traits::vector : 0;
        at[2] = p.columns.split(rest);
        at[1] = Traits::axes > 1 ? p.rows.split(rest) : 0;
        at[0] = Traits::axes > 2 ? rest : 0;
    }
};

__device__ __forceinline__ int window(const Sizes& p, int axis) {
    if (!Traits::fixed) return p.window[axis].value;
    return axis == 0 ? Traits::window_0 : axis == 1 ? Traits::window_1 : Traits::window_2;
}
__device__ __forceinline__ int stride(const Sizes& p, int axis) {
    if (!Traits::fixed) return p.stride[axis].value;
    return axis == 0 ? Traits::stride_0 : axis == 1 ? Traits::stride_1 : Traits::stride_2;
}
__device__ __forceinline__ int by_stride(const Sizes& p, int axis, int place) {
    return Traits::fixed ? place / stride(p, axis) : p.stride[axis].quotient(place);
}

__device__ __forceinline__ bool inside(int place, int size) { return u32(place) < u32(size); }

// Places of the window at output position `at` that are inside the tensor.
__device__ __forceinline__ int covered(const Sizes& p, int axis, int at) {
    const int start = at * stride(p, axis) - p.low[axis];
    return min(start + window(p, axis), p.in[axis]) - max(start, 0);
}

// What the sum over a window is divided by.
__device__ __forceinline__ Sum divisor_of(const Sizes& p, int o, int row, int q) {
    if (!Traits::exclude) return Sum(window(p, 0) * window(p, 1) * window(p, 2));
    return Sum(covered(p, 0, o) * covered(p, 1, row) * covered(p, 2, q));
}

__device__ __forceinline__ Sum lowest() { return Sum(-__longlong_as_double(0x7ff0000000000000ll)); }

// Whether b takes the place of a: it is larger, or a NaN. The first of equal values stays, and the last NaN.
__device__ __forceinline__ bool beats(Sum b, Sum a) { return b > a || b != b; }

template <class T>
constexpr bool is_f16 = false;
template <>
constexpr bool is_f16<f16> = true;

// The larger of each of two values in a word; a NaN is.
template <class T>
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    u32 word;
    if constexpr (is_f16<T>)
        asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    else
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
#else
    float first, second, other_first, other_second;
    depthwise::unpack<T>(a, first, second);
    depthwise::unpack<T>(b, other_first, other_second);
    return depthwise::pack<T>(beats(other_first, first) ? other_first : first,
                              beats(other_second, second) ? other_second : second);
#endif
}

// N values as they lie in memory. Those of two bytes travel in pairs.
template <int N, bool Pairs = (sizeof(T) == 2 && N > 1)>
struct Vector {
    T value[N];

    __device__ __forceinline__ void fill(Sum with) {
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = T(with);
    }
    __device__ __forceinline__ void load(const T* at) {
        const Pack<T, N> found = ::load<N>(at);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = found.value[i];
    }
    __device__ __forceinline__ void store(T* at) const {
        Pack<T, N> values;
#pragma unroll
        for (int i = 0; i < N; ++i) values.value[i] = value[i];
        ::store<N>(at, values);
    }
    __device__ __forceinline__ void widen(Sum (&wide)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) wide[i] = ::widen<Sum>(value[i]);
    }
    __device__ __forceinline__ void narrow(const Sum (&wide)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = T(wide[i]);
    }
    __device__ __forceinline__ void enlarge(const Vector& by) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (beats(::widen<Sum>(by.value[i]), ::widen<Sum>(value[i]))) value[i] = by.value[i];
    }
};

template <int N>
struct Vector<N, true> {
    u32 word[N / 2];

    __device__ __forceinline__ void fill(Sum with) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) word[i] = depthwise::pack<T>(with, with);
    }
    __device__ __forceinline__ void load(const T* at) {
        const Pack<u32, N / 2> found = ::load<N / 2>(reinterpret_cast<const u32*>(at));
#pragma unroll
        for (int i = 0; i < N / 2; ++i) word[i] = found.value[i];
    }
    __device__ __forceinline__ void store(T* at) const {
        Pack<u32, N / 2> words;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) words.value[i] = word[i];
        ::store<N / 2>(reinterpret_cast<u32*>(at), words);
    }
    __device__ __forceinline__ void widen(Sum (&wide)[N]) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) depthwise::unpack<T>(word[i], wide[2 * i], wide[2 * i + 1]);
    }
    __device__ __forceinline__ void narrow(const Sum (&wide)[N]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) word[i] = depthwise::pack<T>(wide[2 * i], wide[2 * i + 1]);
    }
    __device__ __forceinline__ void enlarge(const Vector& by) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) word[i] = larger_pair<T>(word[i], by.word[i]);
    }
};

}  // namespace pool
