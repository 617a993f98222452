// A vector behind itself, several times: to[i] = from[i % length].
//
// Traits: Element (of the same size, without a meaning).

#include "common/types.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Element;
constexpr int threads = 256;

struct Params {
    const T* from;
    T* to;
    int total;
    Divisor length;
};

extern "C" __global__ void __launch_bounds__(threads)
repeated(const __grid_constant__ Params p) {
    const int at = blockIdx.x * threads + threadIdx.x;
    if (at >= p.total) return;
    int times = at;
    p.to[at] = p.from[p.length.split(times)];
}
