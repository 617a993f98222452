// A kernel that continues another's work may start while that one ends, which hides what starting it costs. The first
// one says when: with `let_next_start`, once all of its blocks have begun. The second says from where on it needs the
// first one's results: `wait_for_previous` returns when that one has ended and all that it wrote can be read. Both do
// nothing before sm_90, where kernels run one behind the other.
#pragma once

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDACC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
