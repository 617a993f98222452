// An epilogue behind a matrix product that knows of none: out[i] = epilogue(in[i]), in place where both are one type.
//
// f16 and bf16 come as sums in f32, so that they are rounded once. A thread owns `vector` results side by side in memory
// (16 bytes), loaded and stored at once. Where a vector never
// leaves its channel (nchw, pixels % vector == 0) or its pixel (nhwc, channels % vector == 0) the operands come as
// vectors too; otherwise (`whole` is false) each result looks its channel up by itself, and the last vector may be short.
// Sums may be those of a part of every plane of nchw: `pixels` of them from `start` on, of planes of `pitch` in the
// result. No shared memory.
//
// Traits: Out, Sum, Index, Epilogue; In (Out or Sum), vector, whole, channels_last.

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/divide.cuh"
#include "traits"

using In = Traits::In;
using Out = Traits::Out;
using Sum = Traits::Sum;
using Index = Traits::Index;

struct Params {
    const In* in;  // may be out
    Out* out;
    i64 start;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    i64 count;                 // results
    Divisor channels, pixels;  // of an image: all its channels, and those of its pixels that are here
    int pitch;                 // all its pixels
};

// The channel of result i: (i / pixels) % channels in nchw, i % channels in nhwc.
__device__ __forceinline__ int channel_of(const Params& p, int i) {
    int plane = Traits::channels_last ? i : p.pixels.quotient(i);
    return p.channels.split(plane);
}
__device__ __forceinline__ int channel_of(const Params& p, i64 i) {
    return int((Traits::channels_last ? i : i / p.pixels.value) % p.channels.value);
}

// Where the result of sum i is.
__device__ __forceinline__ Index place_of(const Params& p, Index i) {
    if (Traits::channels_last || p.pitch == p.pixels.value) return i;
    return Index(i / p.pixels.value) * (p.pitch - p.pixels.value) + i + Index(p.start);
}

extern "C" __global__ void __launch_bounds__(256)
pointwise(const __grid_constant__ Params p) {
    constexpr int V = Traits::vector;

    // Place.
    const i64 start = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    if (start >= p.count) return;
    const Index first = Index(start), place = place_of(p, first);

    if (Traits::whole || start + V <= p.count) {
        // Load.
        const Pack<In, V> before = load<V>(p.in + first);
        Pack<Out, V> after;

        // Compute.
        if constexpr (Traits::whole) {
            Sum value[V];
#pragma unroll
            for (int i = 0; i < V; ++i) value[i] = widen<Sum>(before.value[i]);
            Traits::Epilogue::apply<V, Traits::channels_last>(value, p.operands, channel_of(p, first), place);
#pragma unroll
            for (int i = 0; i < V; ++i) after.value[i] = Out(value[i]);
        } else {
#pragma unroll
            for (int i = 0; i < V; ++i) {
                Sum value[1] = {widen<Sum>(before.value[i])};
                Traits::Epilogue::apply<1, false>(value, p.operands, channel_of(p, first + i), first + i);
                after.value[i] = Out(value[0]);
            }
        }

        // Store.
        store<V>(p.out + place, after);
    } else {
        for (Index i = first; i < p.count; ++i) {
            Sum value[1] = {widen<Sum>(p.in[i])};
            Traits::Epilogue::apply<1, false>(value, p.operands, channel_of(p, i), i);
            p.out[i] = Out(value[0]);
        }
    }
}
