// What the depthwise kernels of channels-last images share: words of a few channels, and filters in shared memory.
//
// A thread owns V channels that lie side by side. They travel as 32-bit words, and become floats once.
#pragma once
#include "common/types.cuh"

namespace depthwise {

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// The quotient towards minus infinity.
__device__ __forceinline__ int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// A bit for each column.
template <bool Short>
struct Bits {
    using type = u32;
};
template <>
struct Bits<false> {
    using type = u64;
};

// Two values of two bytes each as they lie in a word, the first in the lower half.
template <class T>
__device__ __forceinline__ void unpack(u32 word, float& first, float& second);

template <>
__device__ __forceinline__ void unpack<f16>(u32 word, float& first, float& second) {
#if defined(__CUDACC__)
    asm("{ .reg .b16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.f32.f16 %0, a;\n\tcvt.f32.f16 %1, b; }"
        : "=f"(first), "=f"(second)
        : "r"(word));
#else
    first = convert::f32_from_f16(u16(word));
    second = convert::f32_from_f16(u16(word >> 16));
#endif
}

template <>
__device__ __forceinline__ void unpack<bf16>(u32 word, float& first, float& second) {
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000u);
}

template <class T>
__device__ __forceinline__ u32 pack(float first, float second);

template <>
__device__ __forceinline__ u32 pack<f16>(float first, float second) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return convert::f16_from(first) | u32(convert::f16_from(second)) << 16;
#endif
}

template <>
__device__ __forceinline__ u32 pack<bf16>(float first, float second) {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return convert::bf16_from(first) | u32(convert::bf16_from(second)) << 16;
#endif
}

// V channels of one pixel as they lie in memory.
template <class T, int V, bool Words = (sizeof(T) * V >= 4)>
struct Raw {
    static constexpr int count = int(sizeof(T)) * V / 4;
    u32 word[count];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < count; ++i) word[i] = 0;
    }
    __device__ __forceinline__ void load(const T* at) {
        const Pack<u32, count> found = ::load<count>(reinterpret_cast<const u32*>(at));
#pragma unroll
        for (int i = 0; i < count; ++i) word[i] = found.value[i];
    }
    __device__ __forceinline__ void widen(float (&value)[V]) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] = __uint_as_float(word[i]);
        } else {
#pragma unroll
            for (int i = 0; i < count; ++i) unpack<T>(word[i], value[2 * i], value[2 * i + 1]);
        }
    }
};

// One channel of two bytes.
template <class T, int V>
struct Raw<T, V, false> {
    static_assert(V == 1, "fewer than four bytes are one element of two");
    T only;

    __device__ __forceinline__ void clear() { only.bits = 0; }
    __device__ __forceinline__ void load(const T* at) { only = *at; }
    __device__ __forceinline__ void widen(float (&value)[V]) const { value[0] = float(only); }
};

// V results as they will lie in memory, and their store.
template <class T, int V>
__device__ __forceinline__ auto narrow(const float (&value)[V]) {
    if constexpr (sizeof(T) * V < 4) {
        return Pack<T, 1>{{T(value[0])}};
    } else {
        Pack<u32, int(sizeof(T)) * V / 4> words;
#pragma unroll
        for (int i = 0; i < int(sizeof(T)) * V / 4; ++i) {
            if constexpr (sizeof(T) == 4)
                words.value[i] = __float_as_uint(value[i]);
            else
                words.value[i] = pack<T>(value[2 * i], value[2 * i + 1]);
        }
        return words;
    }
}

template <int V, class T, class W, int N>
__device__ __forceinline__ void put(T* at, const Pack<W, N>& words) {
    ::store<N>(reinterpret_cast<W*>(at), words);
}

// A tap of a filter in shared memory has its channels side by side, as floats, and then V floats of gap: taps that
// follow each other in memory then fall into banks V apart when they are stored.
template <int V>
__device__ __forceinline__ void read_tap(float (&value)[V], const float* at) {
    const Pack<float, V> found = load<V>(at);
#pragma unroll
    for (int v = 0; v < V; ++v) value[v] = found.value[v];
}

// The `Count` taps of `channels` filters, which lie one after the other; `Row` floats from tap to tap. Whether all that
// this thread has seen are finite.
template <int Count, int Row, class T>
__device__ __forceinline__ bool stage_taps(float* to, const T* from, int channels) {
    bool finite = true;
    for (int e = threadIdx.x; e < channels * Count; e += blockDim.x) {
        const int channel = e / Count, tap = e % Count;
        const float value = widen<float>(from[e]);
        to[tap * Row + channel] = value;
        finite &= (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
    }
    return finite;
}

}  // namespace depthwise
