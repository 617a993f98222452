// Reductions of pointwise expressions over some axes, and results of others stored on the way.
//
//     reduced_m[kept] = join over the other axes of  expr_m(inputs)
//
// Threads that share a kept unit each go through some of its reduced units, and join what they have in the end.
//   across    the last axis is kept: a thread has `vector` kept elements; `columns` threads of a row have kept units
//             side by side, and rows share them. Rows are joined in shared memory, by halves
//   else      the last axis is reduced: a kept unit is one element. `columns` threads share it, by shuffles and, where
//             they are the whole block, through shared memory; rows have other elements
// The reduced units are cut into gridDim.y pieces. Of one piece the result is stored (`direct`), of several what each
// comes to goes to `parts`, for tree_finish. Every order depends on the sizes alone.
//
// Traits: Sum, Index, Count, vector, units (under way at once), kept_axes, reduced_axes, classes, inputs (all tensors
// but the reduced ones), reductions, across, columns, direct; Fixed (inputs that are read once for a kept unit), Unit
// (the others, and what is computed of them), Reductions.

#include "common/pointwise.cuh"
#include "common/pointwise_more.cuh"
#include "common/follow.cuh"
#include "common/reduce.cuh"
#include "common/tree.cuh"
#include "traits"

using Sum = Traits::Sum;
using Index = Traits::Index;
using Count = Traits::Count;
using Reductions = Traits::Reductions;
constexpr int threads = 256, V = Traits::vector, units = Traits::units, classes = Traits::classes;
constexpr int reductions = Traits::reductions, columns = Traits::columns, rows = threads / columns;
constexpr bool across = Traits::across;
constexpr int sharers = across ? rows : columns, owned = across ? columns : rows;
constexpr int warps = threads / 32, wide = across ? V : 1;  // what a thread has in the end, of each reduction
static_assert(across || columns <= 32 || columns == threads, "sharers are lanes of a warp, or the block");

struct Params {
    void* pointers[Traits::inputs + reductions];
    Sum* parts;
    i64 kept, reduced, piece;  // kept units, reduced units, and those of a piece
    i64 results, terms;        // elements of a reduced tensor, and what each is made of
    i64 apart;                 // from the reduced value of a kept element of a unit to that of the next
    i64 step[classes];         // from an element of a unit to the next
    Strides<Traits::kept_axes, classes + 1> kept_axes;  // the last class is that of reduced tensors
    Strides<Traits::reduced_axes, classes> reduced_axes;
    Divisor kept_divisors[Traits::kept_axes], reduced_divisors[Traits::reduced_axes];
};

// All that the sharers have, in the first of them.
__device__ __forceinline__ void join_sharers(Sum (&sum)[reductions][wide], int mine) {
    if constexpr (across) {
        __shared__ Sum all[wide][threads];
        if constexpr (rows > 1) {
#pragma unroll
            for (int m = 0; m < reductions; ++m) {
                if (m) __syncthreads();  // what is there has been read; halves lie behind each other
#pragma unroll
                for (int half = rows / 2; half > 0; half /= 2) {
                    if (mine >= half && mine < 2 * half) {
#pragma unroll
                        for (int i = 0; i < wide; ++i) all[i][threadIdx.x] = sum[m][i];
                    }
                    __syncthreads();
                    if (mine < half) {
#pragma unroll
                        for (int i = 0; i < wide; ++i)
                            sum[m][i] = Reductions::join(m, sum[m][i], all[i][threadIdx.x + half * columns]);
                    }
                }
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < reductions; ++m)
#pragma unroll
            for (int half = (columns < 32 ? columns : 32) / 2; half > 0; half /= 2)
                sum[m][0] = Reductions::join(m, sum[m][0], __shfl_down_sync(0xffffffffu, sum[m][0], half));
        if constexpr (columns > 32) {
            __shared__ Sum all[reductions][warps];
#pragma unroll
            for (int m = 0; m < reductions; ++m)
                if (threadIdx.x % 32 == 0) all[m][threadIdx.x / 32] = sum[m][0];
            __syncthreads();
            if (threadIdx.x == 0) {
#pragma unroll
                for (int m = 0; m < reductions; ++m)
#pragma unroll
                    for (int warp = 1; warp < warps; ++warp) sum[m][0] = Reductions::join(m, sum[m][0], all[m][warp]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(threads)
tree_reduce(const __grid_constant__ Params p) {
    let_next_start();

    // Place. Threads beyond the last kept unit have nothing to go through, and take part in joining.
    const int column = threadIdx.x % columns, row = threadIdx.x / columns, mine = across ? row : column;
    const Count kept = Count(blockIdx.x) * owned + (across ? column : row);
    const bool there = kept < p.kept;
    Index base[classes + 1] = {};
    Traits::Fixed fixed;
    if (there) {
        walk(kept, p.kept_axes, p.kept_divisors, base);
        fixed.read(p.pointers, base, p.step);
    }
    const Count begin = Count(blockIdx.y) * Count(p.piece);
    const Count end = !there ? begin : p.reduced - begin < p.piece ? Count(p.reduced) : begin + Count(p.piece);
    Sum sum[reductions][V];
#pragma unroll
    for (int m = 0; m < reductions; ++m)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[m][i] = Reductions::start(m);

    // Load and compute.
    Count n = begin + mine;
    for (; n + (units - 1) * sharers < end; n += units * sharers) {
        Traits::Unit unit[units];
        Index at[units][classes];
#pragma unroll
        for (int k = 0; k < units; ++k) {
#pragma unroll
            for (int c = 0; c < classes; ++c) at[k][c] = base[c];
            walk(n + k * sharers, p.reduced_axes, p.reduced_divisors, at[k]);
            unit[k].read(p.pointers, at[k], p.step);
        }
#pragma unroll
        for (int k = 0; k < units; ++k) unit[k].compute(fixed, p.pointers, at[k], p.step, sum);
    }
    for (; n < end; n += sharers) {
        Traits::Unit unit;
        Index at[classes];
#pragma unroll
        for (int c = 0; c < classes; ++c) at[c] = base[c];
        walk(n, p.reduced_axes, p.reduced_divisors, at);
        unit.read(p.pointers, at, p.step);
        unit.compute(fixed, p.pointers, at, p.step, sum);
    }

    // Join: the elements of a unit unless they are kept, by halves, then the sharers.
    Sum own[reductions][wide];
#pragma unroll
    for (int m = 0; m < reductions; ++m) {
        if constexpr (!across) {
#pragma unroll
            for (int half = V / 2; half > 0; half /= 2)
#pragma unroll
                for (int i = 0; i < half; ++i) sum[m][i] = Reductions::join(m, sum[m][i], sum[m][i + half]);
        }
#pragma unroll
        for (int i = 0; i < wide; ++i) own[m][i] = sum[m][i];
    }
    join_sharers(own, mine);

    // Store.
    if (mine || !there) return;
#pragma unroll
    for (int m = 0; m < reductions; ++m)
#pragma unroll
        for (int i = 0; i < wide; ++i) {
            const i64 place = base[classes] + p.apart * i;
            if constexpr (Traits::direct)
                Reductions::store(m, p.pointers[Traits::inputs + m], place,
                                  Reductions::finish(m, own[m][i], Sum(p.terms)));
            else
                p.parts[(i64(m) * gridDim.y + blockIdx.y) * p.results + place] = own[m][i];
        }
}
