// Rows of another length: to[row][i] = from[row][i] where `from` has it, else 0. Rows may be more than `from` has, too.
//
// A thread fills `each` vectors of 16 bytes, those of a block side by side. What it reads begins anywhere, so that it
// reads element by element: a warp's reads lie together, and what one leaves of a line the next finds in the cache.
//
// Traits: Element (of the same size, without a meaning).

#include "common/types.cuh"
#include "common/divide.cuh"
#include "traits"

using T = Traits::Element;
constexpr int threads = 256, each = 2, V = 16 / int(sizeof(T));

struct Params {
    const T* from;
    T* to;
    int rows, length;  // of `from`
    int total;         // elements of `to`
    Divisor to_length;
};

extern "C" __global__ void __launch_bounds__(threads)
padded(const __grid_constant__ Params p) {
    const int first = (blockIdx.x * (each * threads) + threadIdx.x) * V;
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const int at = first + i * (threads * V);
        if (at >= p.total) return;
        int row = at, column = p.to_length.split(row);
        Pack<T, V> vector;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            const bool there = row < p.rows && column < p.length;
            vector.value[k] = there ? p.from[row * p.length + column] : T(0);
            if (++column == p.to_length.value) {
                column = 0;
                ++row;
            }
        }
        if (at + V <= p.total) {
            store(p.to + at, vector);
            continue;
        }
#pragma unroll
        for (int k = 0; k < V; ++k)
            if (at + k < p.total) p.to[at + k] = vector.value[k];
    }
}
