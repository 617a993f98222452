// A filter as it is, and spread over the columns of an image that are channels (fold_columns.py).
//
// Result column j of a group of them meets tap s at column j * stride + s * dilation + shift of the groups that its taps
// reach: column i of group u. Spread, (j, k) has the filter of k there, and zeros between.
#pragma once
#include "common/types.cuh"
#include "common/divide.cuh"
#include "traits"

struct Params {
    const Traits::From* from;
    Traits::To* to;
    i64 k_step, c_step, row_step, tap_step;  // of the filter as it is
    int total;                               // elements of `to`
    int stride, dilation, shift, folds;      // folds: results of a group
    Divisor c, columns, groups, rows, k, taps, gap;  // groups: taps of the spread filter; gap: the dilation
};
