// Strips of results along an axis of a depthwise convolution, and the spans of input that they need.
//
// A strip is `count` results side by side. Result v of the strip that starts at `start` takes, for tap s, the input at
//
//     fprop   start * stride + v * stride - pad + s * dilation
//     dgrad   (start + v + pad - s * dilation) / stride        where that divides; others have no such tap
//
// Strips of a dgrad start at multiples of the stride, so that which tap of v meets which input, counted from origin(),
// is known to the compiler: unrolled loops over a span keep exactly the products that are there.
#pragma once
#include "common/types.cuh"

constexpr __device__ int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

template <int Taps, int Stride, int Pad, int Dilation, bool Gradient>
struct Axis {
    static constexpr int taps = Taps;

    // Where the inputs of the strip that starts there are counted from.
    __device__ static constexpr int origin(int start) { return Gradient ? start / Stride : start * Stride; }

    // The first and last input that a strip needs.
    __device__ static constexpr int first() { return Gradient ? floor_div(Pad - (Taps - 1) * Dilation, Stride) : -Pad; }
    __device__ static constexpr int last(int count) {
        return Gradient ? floor_div(count - 1 + Pad, Stride) : (count - 1) * Stride - Pad + (Taps - 1) * Dilation;
    }

    // The tap by which input e counts for result v; -1 if there is none.
    __device__ static constexpr int tap(int e, int v) {
        const int reach = Gradient ? v + Pad - e * Stride : e + Pad - v * Stride;
        return reach >= 0 && reach % Dilation == 0 && reach / Dilation < Taps ? reach / Dilation : -1;
    }

    // For a result alone: the input that tap s takes, and whether there is one before the size is asked.
    __device__ static __forceinline__ bool single(int result, int s, int& input) {
        if (!Gradient) {
            input = result * Stride - Pad + s * Dilation;
            return true;
        }
        const int reach = result + Pad - s * Dilation;
        input = reach / Stride;
        return Stride == 1 || (reach >= 0 && reach % Stride == 0);
    }
};

// Width elements that lie side by side, or zeros. Elements of two bytes are chosen by words and then taken apart: by
// themselves, each would be packed and unpacked again.
template <int Width, class Sum, class T>
__device__ __forceinline__ void widen_or_zero(Sum* value, const T* from, bool there) {
    if constexpr (sizeof(T) == 2 && Width > 1) {
        Pack<u32, Width / 2> words = {};
        if (there) words = load<Width / 2>(reinterpret_cast<const u32*>(from));
#pragma unroll
        for (int i = 0; i < Width; ++i) {
            T one;
            one.bits = u16(i % 2 ? words.value[i / 2] >> 16 : words.value[i / 2]);
            value[i] = widen<Sum>(one);
        }
    } else {
        Pack<T, Width> some = {};
        if (there) some = load<Width>(from);
#pragma unroll
        for (int i = 0; i < Width; ++i) value[i] = widen<Sum>(some.value[i]);
    }
}

// What a strip of `Count` results needs of one row, in vectors of `Width` elements. Both the row's length and the
// origins are multiples of Width, so that a vector lies wholly inside the row or wholly outside, where it is zero.
template <class Columns, int Count, int Width>
struct Span {
    static constexpr int first = floor_div(Columns::first(), Width);
    static constexpr int vectors = floor_div(Columns::last(Count), Width) - first + 1;

    // The position of element i of vector j, counted from the origin.
    __device__ static constexpr int place(int j, int i) { return (first + j) * Width + i; }

    template <class Sum, class T>
    __device__ static __forceinline__ void read(Sum* value, const T* row, int origin, int length, bool inside) {
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
            const int at = origin + place(j, 0);
            widen_or_zero<Width>(value + j * Width, row + at, inside && unsigned(at) < unsigned(length));
        }
    }
};
