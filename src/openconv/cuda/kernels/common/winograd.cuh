// A nested transform of Winograd: a program down each column of a tile, then one across each row.
//
//     out (Down::to x Across::to) = Down * in (Down::from x Across::from) * Across, transposed
//
// Down and Across are generated: apply(v, y) computes y = matrix * v on registers (openconv/winograd.py). A thread has V
// tiles side by side. `load(i, j, value)` gives those of row i and column j, `store(i, j, value)` takes them. Columns are
// loaded one after the other, and only Down::to x Across::from values lie between.
#pragma once
#include "common/types.cuh"

namespace winograd {

template <class Down, class Across, int V, class Sum, class Load, class Store>
__device__ __forceinline__ void nested(const Load& load, const Store& store) {
    Sum between[V][Down::to][Across::from];
#pragma unroll
    for (int j = 0; j < Across::from; ++j) {
        Sum column[V][Down::from];
#pragma unroll
        for (int i = 0; i < Down::from; ++i) {
            Sum value[V];
            load(i, j, value);
#pragma unroll
            for (int v = 0; v < V; ++v) column[v][i] = value[v];
        }
#pragma unroll
        for (int v = 0; v < V; ++v) {
            Sum made[Down::to];
            Down::apply(column[v], made);
#pragma unroll
            for (int i = 0; i < Down::to; ++i) between[v][i][j] = made[i];
        }
    }
#pragma unroll
    for (int i = 0; i < Down::to; ++i) {
        Sum made[V][Across::to];
#pragma unroll
        for (int v = 0; v < V; ++v) Across::apply(between[v][i], made[v]);
#pragma unroll
        for (int j = 0; j < Across::to; ++j) {
            Sum value[V];
#pragma unroll
            for (int v = 0; v < V; ++v) value[v] = made[v][j];
            store(i, j, value);
        }
    }
}

}  // namespace winograd
