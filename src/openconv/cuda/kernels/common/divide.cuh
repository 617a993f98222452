// Division by a number that is known at launch only: a multiplication and a shift, where the hardware has no divider.
//
// With l = ceil(log2 d) and magic = floor(2^(31+l) / d) + 1, n / d = n * magic >> (31 + l) for every 0 <= n < 2^31: the
// error of magic * d is at most d <= 2^l, and n times that stays below 2^(31+l). divide.py works the numbers out.
#pragma once
#include "common/types.cuh"

struct Divisor {
    u32 magic;
    int shift, value;

    __device__ __forceinline__ int quotient(int n) const { return int(u64(u32(n)) * magic >> shift); }

    // The remainder; n becomes the quotient.
    __device__ __forceinline__ int split(int& n) const {
        const int all = n;
        n = quotient(all);
        return all - n * value;
    }
};
