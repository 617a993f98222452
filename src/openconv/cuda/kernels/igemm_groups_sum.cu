// The second half of igemm_groups_wgrad: the sums of the splits, into the filter's gradient.
//
// The sums lie as the lanes of igemm_groups_wgrad have them: of a column, four of a tap for each lane. Eight rows of 32
// threads share the splits of the same sums: row r adds those from r on, every eighth, and the first row adds what the
// rows have. The order depends on the number of splits alone. Sums of channels from different groups are left out.
//
// Traits: in_each, out_each (channels of a group), columns (of a chunk of groups), in_chunk, out_chunk (its channels),
// slices, taps, last (the gradient's channels are).

#include "common/types.cuh"
#include "common/follow.cuh"
#include "traits"

constexpr int rows = 8, slices = Traits::slices, taps = Traits::taps, fours = taps * 2 * slices;

struct Params {
    const Pack<float, 4>* parts;
    Traits::Out* out;
    int splits;
    int each;  // fours of all columns, times 32 lanes
};

extern "C" __global__ void __launch_bounds__(256)
igemm_groups_sum(const __grid_constant__ Params p) {
    __shared__ Pack<float, 4> all[rows][32];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    Pack<float, 4> sum = {};
    wait_for_previous();
#pragma unroll 4
    for (int split = row; split < p.splits; split += rows) {
        const auto part = p.parts[i64(split) * p.each + blockIdx.x * 32 + lane];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.value[i] += part.value[i];
    }
    all[row][lane] = sum;
    __syncthreads();
    if (row) return;
#pragma unroll
    for (int other = 1; other < rows; ++other)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.value[i] += all[other][lane].value[i];

    const int four = blockIdx.x % fours, place = blockIdx.x / fours;
    const int column = place % Traits::columns, chunk = place / Traits::columns, tap = four / (2 * slices);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int k = column * 16 + lane / 4 + i / 2 * 8;
        const int c = column * 16 / Traits::out_each * Traits::in_each + four % (2 * slices) * 8 + lane % 4 * 2 + i % 2;
        if (k / Traits::out_each != c / Traits::in_each) continue;
        const int channel = c % Traits::in_each, filter = chunk * Traits::out_chunk + k;
        const int at = Traits::last ? tap * Traits::in_each + channel : channel * taps + tap;
        p.out[i64(filter) * (taps * Traits::in_each) + at] = Traits::Out(sum.value[i]);
    }
}
