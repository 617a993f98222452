// Tensor cores as a warp calls them (sm_80 and later), and the copies that feed them.
//
// Lane l of a warp has g = l / 4 and t = l % 4. Two values side by side lie in one register, the first in its low half:
//     A (16 x 16)   a[0]: row g, columns 2t, 2t+1;  a[1]: row g+8;  a[2], a[3]: the same rows, columns 2t+8, 2t+9
//     B (16 x 8)    b[0]: rows 2t, 2t+1 of column g;  b[1]: rows 2t+8, 2t+9
//     D (16 x 8)    d[0], d[1]: row g, columns 2t, 2t+1;  d[2], d[3]: row g+8
// A product of depth 8 takes a[0], a[1] and b[0].
#pragma once
#include "common/types.cuh"

namespace tensor {

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 b0);

#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<f16>(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

template <>
__device__ __forceinline__ void mma<bf16>(float (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes that are aligned to 16. Of each
// matrix a lane gets row g, columns 2t, 2t+1; transposed: column g, rows 2t, 2t+1.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Two matrices; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void load_matrices(u32 (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&to)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// 4 or 16 bytes from global to shared memory without a register in between; zeros, and nothing read, unless `inside`.
template <int Bytes>
__device__ __forceinline__ void copy(void* to, const void* from, bool inside) {
    static_assert(Bytes == 4 || Bytes == 16, "what cp.async copies here");
    const int read = inside ? Bytes : 0;
    if constexpr (Bytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(read)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     :
                     : "r"(shared_address(to)), "l"(from), "r"(read)
                     : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `Left` of this thread's groups are still under way.
template <int Left>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}
#else  // Engines refuse older devices.
template <class T>
__device__ __forceinline__ void mma(float (&)[4], u32, u32, u32, u32, u32, u32) {
    __trap();
}
template <class T>
__device__ __forceinline__ void mma(float (&)[4], u32, u32, u32) {
    __trap();
}
__device__ __forceinline__ void load_matrices(u32 (&)[4], const void*) { __trap(); }
__device__ __forceinline__ void load_transposed(u32 (&)[4], const void*) { __trap(); }
__device__ __forceinline__ void load_matrices(u32 (&)[2], const void*) { __trap(); }
__device__ __forceinline__ void load_transposed(u32 (&)[2], const void*) { __trap(); }
template <int Bytes>
__device__ __forceinline__ void copy(void*, const void*, bool) {
    __trap();
}
__device__ __forceinline__ void commit() {}
template <int Left>
__device__ __forceinline__ void wait() {}
#endif

}  // namespace tensor
