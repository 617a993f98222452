// Tensor cores for more types than common/mma.cuh, which says what lane l, with g = l / 4 and t = l % 4, has.
//
// Of f32, whose values are rounded to tf32 (`round_tf32`) before, products are 8 deep:
//     A (16 x 8)    a[0]: row g, column t;  a[1]: row g+8;  a[2], a[3]: the same rows, column t+4
//     B (8 x 8)     b[0]: row t of column g;  b[1]: row t+4
// Of i8, and of e4m3 and e5m2 (sm_89 and later), four values lie in one register and products are 32 deep:
//     A (16 x 32)   a[0]: row g, columns 4t to 4t+3;  a[1]: row g+8;  a[2], a[3]: the same rows, columns from 4t+16 on
//     B (32 x 8)    b[0]: rows 4t to 4t+3 of column g;  b[1]: rows from 4t+16 on
#pragma once
#include "common/mma.cuh"

namespace tensor {

// Floats of one byte: 4 bits of exponent and 3 of mantissa, or 5 and 2.
struct e4m3 {
    static constexpr bool wide = false;
    u8 bits;
};
struct e5m2 {
    static constexpr bool wide = true;
    u8 bits;
};
// What products of two of these types are named by.
template <class A, class B>
struct Bytes {
    using Left = A;
    using Right = B;
    u8 bits;
};

template <class T>
__device__ __forceinline__ void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void mma<f32>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<i8>(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two of the four bytes of a register as f16, which holds both types.
template <class T>
__device__ __forceinline__ u32 widened(u32 word, int half) {
    u32 pair;
    const u16 bytes = u16(half ? word >> 16 : word);
    if constexpr (T::wide)
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(bytes));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
    return pair;
}

// Of `Bytes`. On sm_90 and sm_100 other instructions than mma.sync have these products: here they are two of f16, each
// 16 deep, of the first two bytes of the registers and of the last two. That is another order of the depth, the same
// for both operands. (What ptxas makes of mma.sync there adds each product to the sum by four more instructions.)
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    using A = typename T::Left;
    using B = typename T::Right;
    if constexpr (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200) {
        mma<f16>(d, widened<A>(a0, 0), widened<A>(a1, 0), widened<A>(a2, 0), widened<A>(a3, 0), widened<B>(b0, 0),
                 widened<B>(b1, 0));
        mma<f16>(d, widened<A>(a0, 1), widened<A>(a1, 1), widened<A>(a2, 1), widened<A>(a3, 1), widened<B>(b0, 1),
                 widened<B>(b1, 1));
    } else if constexpr (!A::wide && !B::wide) {
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else if constexpr (!A::wide) {
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else if constexpr (!B::wide) {
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// The nearest tf32, 11 significant bits, of a float's bits; ties go away from zero.
__device__ __forceinline__ u32 round_tf32(u32 bits) {
    u32 rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
    return rounded;
}

// As copy<4> and copy<16>.
__device__ __forceinline__ void copy_eight(void* to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(inside ? 8 : 0)
                 : "memory");
}
#else  // Engines refuse older devices.
template <class T>
__device__ __forceinline__ void mma(int (&)[4], u32, u32, u32, u32, u32, u32) {
    __trap();
}
__device__ __forceinline__ u32 round_tf32(u32 bits) { return bits; }
__device__ __forceinline__ void copy_eight(void*, const void*, bool) { __trap(); }
#endif

}  // namespace tensor
