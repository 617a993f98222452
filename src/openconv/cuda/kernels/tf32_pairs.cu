// Both factors of a convolution, or the second one alone, as pairs of tf32 (common/tf32_pairs.cuh): all high parts of a
// tensor come first, its low parts behind them.
//
// A thread has `each` vectors of four values, those of a block side by side; blocks with x come first.
//
// Traits: none.

#include "common/types.cuh"
#include "common/tf32_pairs.cuh"

constexpr int threads = 256, each = 4;

struct Params {
    const f32 *x, *w;
    u32 *x_pairs, *w_pairs;
    i64 x_vectors, w_vectors;  // of four values
    int x_blocks;
};

__device__ __forceinline__ void part(const f32* from, u32* to, i64 vectors, i64 first) {
    Pack<f32, 4> values[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
        if (const i64 at = first + i * threads; at < vectors) values[i] = load<4>(from + 4 * at);
#pragma unroll
    for (int i = 0; i < each; ++i) {
        const i64 at = first + i * threads;
        if (at >= vectors) return;
        Pack<u32, 4> high, low;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const tf32::Pair pair(values[i].value[k]);
            high.value[k] = pair.high;
            low.value[k] = pair.low;
        }
        store(to + 4 * at, high);
        store(to + 4 * (vectors + at), low);
    }
}

extern "C" __global__ void __launch_bounds__(threads)
tf32_pairs(const __grid_constant__ Params p) {
    const int block = blockIdx.x - p.x_blocks;
    if (block < 0)
        part(p.x, p.x_pairs, p.x_vectors, i64(blockIdx.x) * (threads * each) + threadIdx.x);
    else
        part(p.w, p.w_pairs, p.w_vectors, i64(block) * (threads * each) + threadIdx.x);
}
