// Which filters are separable: the tap (r, s) of each channel's filter as down[r] * along[s], where that is as good.
//
// A matrix of rank 1 is one of its columns times one of its rows, divided by the tap where they meet. That tap is the
// smallest that is not 0: of a binomial filter, a box or a Sobel filter all others are multiples of it, and the factors
// are exact. A filter is separable if
//
//     |w[r, s] - down[r] * along[s]| <= 2^-21 * |w[r, s]|    for every tap
//
// Where each tap of an outer product was rounded once, a product of factors differs by four taps' roundings and that of
// a quotient, 5 * 2^-24 at most: a Gaussian in f32 is separable. In f16 only filters are that rounding left an outer
// product. A tap of 0 asks for a product of 0, so that NaN and infinities of an image show where they did. Sums of
// whole numbers are exact: a filter of whole numbers, or of bytes, needs factors that are.
//
// `along` is scaled by a power of two so that the sum of its magnitudes lies between 1/2 and 1: a sum along a row of an
// image is then no larger than its largest value, and overflows no sooner.
//
// A block owns a channel, a thread taps thread, thread + threads, ... A launch takes 2 us, as long as it takes an H200
// to load 8 MB; in every block of filter2d.cu this would take three barriers and two reductions of a block more.
//
// Shared memory: the filter [R][S], its factors, and what each warp found.
//
// Traits: A, B; filter_rows, filter_columns, flipped, threads.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/epilogue.cuh"
#include "common/filter2d.cuh"
#include "traits"

using Acc = FilterSum<Traits::A>::type;

struct Params {
    const Traits::B* filter;
    Factors<Acc>* factors;
};

constexpr int R = Traits::filter_rows, S = Traits::filter_columns, most = Factors<Acc>::most;
constexpr int warps = Traits::threads / 32;
static_assert(R <= most && S <= most && Traits::threads % 32 == 0, "a lane holds a tap of each factor");
static_assert(sizeof(Factors<Acc>) == 272, "filter2d.py gives as many bytes to a channel");

// What is known of a filter, and of how far its factors are off.
constexpr u32 endless = 1, fractional = 2, far = 4, inexact = 8;

// A number that orders taps by their magnitude, and is 0 only for 0.
__device__ __forceinline__ u32 magnitude(float tap) { return __float_as_uint(tap) & 0x7fffffffu; }
__device__ __forceinline__ u32 magnitude(u32 tap) { return tap; }
__device__ __forceinline__ u32 kind(float tap) {
    // From 2^23 on a float has no fraction, and no sum of several is exact.
    const bool whole = tap == truncf(tap) && fabsf(tap) < 0x1p23f;
    return (magnitude(tap) >= 0x7f800000u ? endless : 0) | (whole ? 0 : fractional);
}
__device__ __forceinline__ u32 kind(u32) { return 0; }

// The distance of a product from its tap, rounded once.
__device__ __forceinline__ u32 distance(float tap, float down, float along) {
    const float off = __fmaf_rn(-down, along, tap);
    return (fabsf(off) <= 0x1p-21f * fabsf(tap) ? 0 : far) | (off != 0.0f ? inexact : 0);
}
__device__ __forceinline__ u32 distance(u32 tap, u32 down, u32 along) { return down * along == tap ? 0 : far; }

// Factors that are still to be scaled: lane i of every warp holds along[i] and down[i].
__device__ __forceinline__ void scale(float& along, float& down) {
    float sum = fabsf(along);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    // 2^(e-127) <= sum < 2^(e-126). From 2^126 on there is no such scale: with 0 in its place no tap is met.
    const u32 e = min(__float_as_uint(sum) >> 23, 253u);
    along *= __uint_as_float((253 - e) << 23);
    down *= __uint_as_float((e + 1) << 23);
}
__device__ __forceinline__ void scale(u32&, u32&) {}

extern "C" __global__ void __launch_bounds__(Traits::threads)
filter2d_factors(const __grid_constant__ Params p) {
    __shared__ Acc taps[R * S], along_taps[most], down_taps[most];
    __shared__ u64 least_of[warps];
    __shared__ u32 found_by[warps], missed_by[warps];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    Factors<Acc>& factors = p.factors[blockIdx.x];
    let_next_start();

    // Load, and find the smallest tap that is not 0: its magnitude, then its place.
    u64 least = ~u64(0);
    u32 found = 0;
    for (int i = thread; i < R * S; i += Traits::threads) {
        const Acc tap = read_tap<Acc, R, S, Traits::flipped>(p.filter + blockIdx.x * (R * S), i / S, i % S);
        taps[i] = tap;
        found |= kind(tap);
        if (magnitude(tap)) least = min(least, u64(magnitude(tap)) << 32 | u32(i));
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        least = min(least, __shfl_xor_sync(~0u, least, lanes));
        found |= __shfl_xor_sync(~0u, found, lanes);
    }
    if (lane == 0) {
        least_of[warp] = least;
        found_by[warp] = found;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < warps; ++i) {
        least = min(least, least_of[i]);
        found |= found_by[i];
    }
    if (least == ~u64(0) || found & endless) {  // nothing but zeros, or no matrix of numbers
        if (thread == 0) factors.separable = 0;
        return;
    }

    // Its column, and its row divided by it.
    const int pivot = int(u32(least)), row = pivot / S, column = pivot % S;
    Acc along = lane < S ? taps[row * S + lane] / taps[pivot] : Acc(0);
    Acc down = lane < R ? taps[lane * S + column] : Acc(0);
    scale(along, down);
    if (warp == 0) {
        along_taps[lane] = along;
        down_taps[lane] = down;
    }
    __syncthreads();

    // Compare.
    u32 missed = 0;
    for (int i = thread; i < R * S; i += Traits::threads)
        missed |= distance(taps[i], down_taps[i / S], along_taps[i % S]);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) missed |= __shfl_xor_sync(~0u, missed, lanes);
    if (lane == 0) missed_by[warp] = missed;
    __syncthreads();

    // Store.
    if (warp > 0) return;
#pragma unroll
    for (int i = 0; i < warps; ++i) missed |= missed_by[i];
    factors.along[lane] = along;
    factors.down[lane] = down;
    if (lane == 0) factors.separable = !(missed & far) && (found & fractional || !(missed & inexact));
}
