// How an epilogue's operands are read: N results at once, which lie side by side in memory.
//
// Along channels (nhwc) the N results belong to N channels; along pixels (nchw) they share one. N > 1 asks for addresses
// that are aligned to N elements, like the store of the results themselves.
#pragma once
#include "common/types.cuh"

template <int N, bool AlongChannels, class A, class T>
__device__ __forceinline__ void read_channel(A (&value)[N], const void* operand, int channel) {
    const T* at = static_cast<const T*>(operand) + channel;
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = widen<A>(at[AlongChannels ? i : 0]);
}

template <int N, class A, class T, class Index>
__device__ __forceinline__ void read_tensor(A (&value)[N], const void* operand, Index at) {
    const Pack<T, N> pack = load<N>(static_cast<const T*>(operand) + at);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = widen<A>(pack.value[i]);
}

template <int N, class A, class T>
__device__ __forceinline__ void read_scalar(A (&value)[N], const void* operand) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = widen<A>(*static_cast<const T*>(operand));
}
