// What kernels of trees share: values of a unit as they lie in memory, and where a unit is.
//
// A unit is `vector` elements side by side along the last axis. Tensors whose strides are the same along all axes are
// of one class: their elements have the same offset.
#pragma once
#include "common/divide.cuh"
#include "common/types.cuh"

// What torch.bool is in memory: one byte, 0 or 1.
struct flag {
    u8 bits;

    template <class A>
    __device__ explicit operator A() const {
        return A(bits != 0);
    }
};

// A computed value as it is stored. Integers of one and two bytes go through an int, and wrap around.
template <class T, class A>
struct Stored {
    __device__ static __forceinline__ T of(A value) { return T(value); }
};
template <class A>
struct Stored<i8, A> {
    __device__ static __forceinline__ i8 of(A value) { return i8(int(value)); }
};
template <class A>
struct Stored<u8, A> {
    __device__ static __forceinline__ u8 of(A value) { return u8(int(value)); }
};
template <class A>
struct Stored<i16, A> {
    __device__ static __forceinline__ i16 of(A value) { return i16(int(value)); }
};
template <class A>
struct Stored<flag, A> {
    __device__ static __forceinline__ flag of(A value) { return {u8(value != A(0))}; }
};

// The elements of a unit: one for all, side by side, or `step` apart.
enum Lie { once, together, apart };

template <class T, int V, Lie lie>
struct Values {
    // At most 16 bytes are loaded or stored at once, and no more are aligned.
    static constexpr int size = sizeof(T), side = V * size > 16 ? 16 / size : V;
    T value[lie == once ? 1 : V];

    template <class Index>
    __device__ __forceinline__ void read(const void* from, Index at, i64 step) {
        const T* first = static_cast<const T*>(from) + at;
        if constexpr (lie == once) {
            value[0] = *first;
        } else if constexpr (lie == together) {
#pragma unroll
            for (int start = 0; start < V; start += side) {
                const Pack<T, side> pack = load<side>(first + start);
#pragma unroll
                for (int i = 0; i < side; ++i) value[start + i] = pack.value[i];
            }
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] = first[Index(step) * i];
        }
    }

    template <class A>
    __device__ __forceinline__ A get(int i) const {
        return widen<A>(value[lie == once ? 0 : i]);
    }

    template <class A>
    __device__ __forceinline__ void set(int i, A result) {
        value[i] = Stored<T, A>::of(result);
    }

    template <class Index>
    __device__ __forceinline__ void write(void* to, Index at, i64 step) const {
        static_assert(lie != once, "results do not broadcast");
        T* first = static_cast<T*>(to) + at;
        if constexpr (lie == together) {
#pragma unroll
            for (int start = 0; start < V; start += side) {
                Pack<T, side> pack;
#pragma unroll
                for (int i = 0; i < side; ++i) pack.value[i] = value[start + i];
                store<side>(first + start, pack);
            }
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) first[Index(step) * i] = value[i];
        }
    }
};

// Axes of a launch, the last one in units: how many steps each has, and how far a step leads in each class.
template <int Axes, int Classes>
struct Strides {
    i64 size[Axes], stride[Axes][Classes];
};

__device__ __forceinline__ int split(int& n, const Divisor& divisor, i64) { return divisor.split(n); }
__device__ __forceinline__ i64 split(i64& n, const Divisor&, i64 size) {
    const i64 all = n;
    n /= size;
    return all - n * size;
}

// Adds where step n of these axes is to the offset of each class.
template <class Count, class Index, int Axes, int Classes, int All>
__device__ __forceinline__ void walk(Count n, const Strides<Axes, Classes>& axes, const Divisor (&divisors)[Axes],
                                     Index (&at)[All]) {
    static_assert(Classes <= All, "every class has an offset");
#pragma unroll
    for (int axis = Axes - 1; axis > 0; --axis) {
        const Count here = split(n, divisors[axis], axes.size[axis]);
#pragma unroll
        for (int k = 0; k < Classes; ++k) at[k] += Index(here) * Index(axes.stride[axis][k]);
    }
#pragma unroll
    for (int k = 0; k < Classes; ++k) at[k] += Index(n) * Index(axes.stride[0][k]);
}
