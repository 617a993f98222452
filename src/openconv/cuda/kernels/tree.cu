// Pointwise expressions over tensors that broadcast: results[j] = expr_j(inputs) at every place of a common shape.
//
// A thread owns `units` units, a block's 256 threads side by side in each; all of its loads are under way before the
// first is used. Axes are those of the host's choice: merged where all tensors allow, so that dense tensors have one.
// No shared memory. A result may be an input's own memory, if both lie alike.
//
// Traits: Sum (what values are computed in), Index (of an offset), Count (of units), vector, units, axes, classes,
// tensors; Fixed (inputs that are one value) and Unit (the others, and what is computed of them).

#include "common/pointwise.cuh"
#include "common/pointwise_more.cuh"
#include "common/tree.cuh"
#include "traits"

using Index = Traits::Index;
using Count = Traits::Count;
constexpr int threads = 256, units = Traits::units, classes = Traits::classes;

struct Params {
    void* pointers[Traits::tensors];  // inputs, then results
    i64 count;                        // units
    i64 step[classes];                // from an element of a unit to the next
    Strides<Traits::axes, classes> axes;
    Divisor divisors[Traits::axes];
};

extern "C" __global__ void __launch_bounds__(threads)
tree(const __grid_constant__ Params p) {
    // Place.
    const Count start = Count(blockIdx.x) * (threads * units), first = start + threadIdx.x;
    Traits::Fixed fixed;
    fixed.read(p.pointers);

    if (start + threads * units <= p.count) {
        // Load.
        Traits::Unit unit[units];
        Index at[units][classes] = {};
#pragma unroll
        for (int k = 0; k < units; ++k) {
            walk(first + k * threads, p.axes, p.divisors, at[k]);
            unit[k].read(p.pointers, at[k], p.step);
        }

        // Compute and store.
#pragma unroll
        for (int k = 0; k < units; ++k) unit[k].compute(fixed, p.pointers, at[k], p.step);
    } else {
        for (Count n = first; n < p.count; n += threads) {
            Traits::Unit unit;
            Index at[classes] = {};
            walk(n, p.axes, p.divisors, at);
            unit.read(p.pointers, at, p.step);
            unit.compute(fixed, p.pointers, at, p.step);
        }
    }
}
