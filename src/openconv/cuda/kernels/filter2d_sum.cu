// The gradient of a few-channel filter, second stage: the partial sums of each tap, in one order and in double.
//
// A block owns one tap of one channel. Thread t adds partial sums t, t + threads, ...; then halves of the block are
// added. Shared memory: a total for each thread.
//
// Traits: A, Out; threads.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/epilogue.cuh"
#include "common/filter2d.cuh"
#include "traits"

using Acc = FilterSum<Traits::A>::type;
template <class T>
struct Outer {
    using type = T;
};
template <>
struct Outer<float> {
    using type = double;
};
using Total = Outer<Acc>::type;

struct Params {
    const Acc* partial;
    Traits::Out* out;
    int parts;
};

extern "C" __global__ void __launch_bounds__(Traits::threads)
filter2d_sum(const __grid_constant__ Params p) {
    __shared__ Total totals[Traits::threads];
    const int thread = threadIdx.x;
    const Acc* from = p.partial + i64(blockIdx.x) * p.parts;
    Total total = 0;
    wait_for_previous();
#pragma unroll 8
    for (int i = thread; i < p.parts; i += Traits::threads) total += Total(from[i]);
    totals[thread] = total;
#pragma unroll
    for (int half = Traits::threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) totals[thread] += totals[thread + half];
    }
    if (thread == 0) p.out[blockIdx.x] = Traits::Out(Traits::Sum(totals[0]));
}
