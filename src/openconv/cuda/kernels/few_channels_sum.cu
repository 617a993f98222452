// The second half of a first layer's wgrad: the sums of blocks become dw.
//
// A block has 32 results, one for each lane: warp w adds every 8th of the sums, then the first warp adds those of the
// warps.
//
// The sums lie as [column of filters][part][element][k]; the elements are `run` for each filter row, of which the first
// `lead` belong to no tap, and then `stored` for each tap, of which the first `channels` are meant.
//
// Traits: channels, stored, lead, run, elements, filters (of a column), R, S, filter_last.

#include "common/types.cuh"
#include "common/follow.cuh"
#include "traits"

using Index = Traits::Index;
constexpr int filters = Traits::filters, sums = Traits::elements * filters;
static_assert(sums % 32 == 0, "blocks are full");

struct Params {
    const float* partial;
    Traits::Out* dw;
    int k, parts;
};

extern "C" __global__ void __launch_bounds__(256)
few_channels_sum(const __grid_constant__ Params p) {
    __shared__ float parts[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x * 32 + lane;
    const float* from = p.partial + Index(blockIdx.y) * p.parts * sums + at;
    float sum = 0;
    wait_for_previous();
#pragma unroll 8
    for (int part = warp; part < p.parts; part += 8) sum += from[Index(part) * sums];
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp) return;
#pragma unroll
    for (int w = 1; w < 8; ++w) sum += parts[w][lane];

    const int k = blockIdx.y * filters + at % filters, j = at / filters;
    const int r = j / Traits::run, element = j % Traits::run - Traits::lead;
    const int s = element / Traits::stored, c = element % Traits::stored;
    if (k >= p.k || r >= Traits::R || element < 0 || s >= Traits::S || c >= Traits::channels) return;
    p.dw[Traits::filter_last ? ((k * Traits::R + r) * Traits::S + s) * Traits::channels + c
                             : ((k * Traits::channels + c) * Traits::R + r) * Traits::S + s] = Traits::Out(sum);
}
