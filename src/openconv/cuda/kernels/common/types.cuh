// Element types and how they are loaded, computed with and stored.
//
// An element type is what lies in memory; Wide<T>::type is what sums are made of: float for f32, f16 and bf16, double
// for f64, long long for integers. f16 and bf16 are two bytes with conversions of their own, so that no CUDA header is
// needed: those would double the time of a compilation.
#pragma once
#include "common/convert.cuh"

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;

struct alignas(2) f16 {
    u16 bits;

    f16() = default;
    __device__ explicit f16(float value) : bits(convert::f16_from(value)) {}
    __device__ explicit operator float() const { return convert::f32_from_f16(bits); }
};

struct alignas(2) bf16 {
    u16 bits;

    bf16() = default;
    __device__ explicit bf16(float value) : bits(convert::bf16_from(value)) {}
    __device__ explicit operator float() const { return convert::f32_from_bf16(bits); }
};

template <class T>
struct Wide {
    using type = i64;
};
template <>
struct Wide<f16> {
    using type = float;
};
template <>
struct Wide<bf16> {
    using type = float;
};
template <>
struct Wide<f32> {
    using type = float;
};
template <>
struct Wide<f64> {
    using type = double;
};

template <class A, class T>
__device__ __forceinline__ A widen(T value) {
    return A(value);
}
template <>
__device__ __forceinline__ double widen<double, f16>(f16 value) {
    return float(value);
}
template <>
__device__ __forceinline__ double widen<double, bf16>(bf16 value) {
    return float(value);
}

// N values side by side, loaded and stored by one instruction where their bytes are 4, 8 or 16 and aligned to that.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
    T value[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* at) {
    return *reinterpret_cast<const Pack<T, N>*>(at);
}

template <int N, class T>
__device__ __forceinline__ void store(T* at, const Pack<T, N>& values) {
    *reinterpret_cast<Pack<T, N>*>(at) = values;
}
