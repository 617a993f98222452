// How many values become one: what is taken of each, from where it starts, how two become one and what comes of it in
// the end. openconv.tree lists the modes. A is float or double.
#pragma once
#include "common/pointwise_more.cuh"

namespace reduce {

// A mode: its name, the value of nothing, what is taken of v, and how a and b are joined.
struct add {
    template <class A>
    __device__ static __forceinline__ A start() {
        return A(0);
    }
    template <class A>
    __device__ static __forceinline__ A take(A v) {
        return v;
    }
    template <class A>
    __device__ static __forceinline__ A join(A a, A b) {
        return a + b;
    }
    template <class A>
    __device__ static __forceinline__ A finish(A a, A) {
        return a;
    }
};

struct avg : add {
    template <class A>
    __device__ static __forceinline__ A finish(A a, A terms) {
        return a / terms;
    }
};

struct mul : add {
    template <class A>
    __device__ static __forceinline__ A start() {
        return A(1);
    }
    template <class A>
    __device__ static __forceinline__ A join(A a, A b) {
        return a * b;
    }
};

struct mul_no_zeros : mul {
    template <class A>
    __device__ static __forceinline__ A take(A v) {
        return v == A(0) ? A(1) : v;
    }
};

struct min : add {
    template <class A>
    __device__ static __forceinline__ A start() {
        return A(__longlong_as_double(0x7ff0000000000000ll));
    }
    template <class A>
    __device__ static __forceinline__ A join(A a, A b) {
        return op::min(a, b);
    }
};

struct max : add {
    template <class A>
    __device__ static __forceinline__ A start() {
        return A(-__longlong_as_double(0x7ff0000000000000ll));
    }
    template <class A>
    __device__ static __forceinline__ A join(A a, A b) {
        return op::max(a, b);
    }
};

struct norm1 : add {
    template <class A>
    __device__ static __forceinline__ A take(A v) {
        return op::abs(v);
    }
};

struct amax : norm1 {
    template <class A>
    __device__ static __forceinline__ A join(A a, A b) {
        return op::max(a, b);
    }
};

struct norm2 : add {
    template <class A>
    __device__ static __forceinline__ A take(A v) {
        return v * v;
    }
    template <class A>
    __device__ static __forceinline__ A finish(A a, A) {
        return op::sqrt(a);
    }
};

}  // namespace reduce
