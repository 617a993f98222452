// A block reads values and puts each in its place, many loads under way at a time. One load after the other, the 9408
// weights of a 7x7 stem are 74 trips to memory for each of 128 threads.
#pragma once

template <int Threads, class T, class Place>
__device__ __forceinline__ void staged(const T* __restrict__ from, int count, const Place& place) {
    constexpr int batch = 16;
    for (int first = threadIdx.x; first < count; first += batch * Threads) {
        T value[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (first + i * Threads < count) value[i] = from[first + i * Threads];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (first + i * Threads < count) place(first + i * Threads, value[i]);
    }
}
