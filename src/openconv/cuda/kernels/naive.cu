// The definition: one thread computes one result, product by product.
//
//     fprop   y[n,k,o,p,q]  = sum over c,t,r,s of  x[n, c, o*stride - pad + t*dilation, ...] * w[k, c, t, r, s]
//     dgrad   dx[n,c,d,h,w] = sum over k,t,r,s of  dy[n, k, (d + pad - t*dilation) / stride, ...] * w[k, c, t, r, s]
//     wgrad   dw[k,c,t,r,s] = sum over n,o,p,q of  x[n, c, o*stride - pad + t*dilation, ...] * dy[n, k, o, p, q]
//
// Thread i owns result i in the order of memory, so that a warp's stores lie side by side. No shared memory. Products
// of a row are added in the type Row (float for f32 and narrower), rows in Total (double for those): a sum of 16 million
// products is then as exact as one of a row, and the slow additions are one in a row.
//
// Traits: A, B, Out, Sum, Index, Epilogue; pass (0 fprop, 1 dgrad, 2 wgrad), channels_last (of the result).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "traits"

using Index = Traits::Index;
using Row = Wide<Traits::A>::type;
template <class T>
struct Outer {
    using type = T;
};
template <>
struct Outer<float> {
    using type = double;
};
using Total = Outer<Row>::type;

// A tensor of five axes: batch, channel (of w: filter, channel) and three of space.
struct Strides {
    i64 outer, channel, space[3];
};

struct Params {
    const Traits::A* a;
    const Traits::B* b;
    Traits::Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    Strides a_strides, b_strides, out_strides;
    int n, c, k, groups;
    int image[3], filter[3], output[3];  // of x, w and y
    int stride[3], pad[3], dilation[3];
};

__device__ __forceinline__ Index offset(const Strides& s, int outer, int channel, int d, int h, int w) {
    return Index(s.outer) * outer + Index(s.channel) * channel + Index(s.space[0]) * d + Index(s.space[1]) * h +
           Index(s.space[2]) * w;
}

__device__ __forceinline__ Row product(Traits::A a, Traits::B b) { return widen<Row>(a) * widen<Row>(b); }

// Padding takes part as zeros: a NaN in the filter shows there too.
__device__ Total fprop(const Params& p, int n, int k, int o, int row, int column) {
    const int channels = p.c / p.groups, first = k / (p.k / p.groups) * channels;
    Total total = 0;
    for (int c = 0; c < channels; ++c)
        for (int t = 0; t < p.filter[0]; ++t) {
            const int d = o * p.stride[0] - p.pad[0] + t * p.dilation[0];
            for (int r = 0; r < p.filter[1]; ++r) {
                const int h = row * p.stride[1] - p.pad[1] + r * p.dilation[1];
                const bool inside = unsigned(d) < unsigned(p.image[0]) && unsigned(h) < unsigned(p.image[1]);
                Row sum = 0;
                for (int s = 0; s < p.filter[2]; ++s) {
                    const int w = column * p.stride[2] - p.pad[2] + s * p.dilation[2];
                    Traits::A x = Traits::A(0.0f);
                    if (inside && unsigned(w) < unsigned(p.image[2]))
                        x = p.a[offset(p.a_strides, n, first + c, d, h, w)];
                    sum += product(x, p.b[offset(p.b_strides, k, c, t, r, s)]);
                }
                total += sum;
            }
        }
    return total;
}

// The output that lies at `place` of x before its stride is taken away; -1 where there is none.
__device__ __forceinline__ int source(int place, int stride, int count) {
    return place >= 0 && place % stride == 0 && place / stride < count ? place / stride : -1;
}

__device__ Total dgrad(const Params& p, int n, int c, int d, int h, int w) {
    const int channels = p.c / p.groups, filters = p.k / p.groups, group = c / channels;
    Total total = 0;
    for (int k = group * filters; k < (group + 1) * filters; ++k)
        for (int t = 0; t < p.filter[0]; ++t) {
            const int o = source(d + p.pad[0] - t * p.dilation[0], p.stride[0], p.output[0]);
            if (o < 0) continue;
            for (int r = 0; r < p.filter[1]; ++r) {
                const int row = source(h + p.pad[1] - r * p.dilation[1], p.stride[1], p.output[1]);
                if (row < 0) continue;
                Row sum = 0;
                for (int s = 0; s < p.filter[2]; ++s) {
                    const int column = source(w + p.pad[2] - s * p.dilation[2], p.stride[2], p.output[2]);
                    if (column < 0) continue;
                    sum += product(p.a[offset(p.a_strides, n, k, o, row, column)],
                                   p.b[offset(p.b_strides, k, c % channels, t, r, s)]);
                }
                total += sum;
            }
        }
    return total;
}

__device__ Total wgrad(const Params& p, int k, int c, int t, int r, int s) {
    const int first = k / (p.k / p.groups) * (p.c / p.groups);
    Total total = 0;
    for (int n = 0; n < p.n; ++n)
        for (int o = 0; o < p.output[0]; ++o) {
            const int d = o * p.stride[0] - p.pad[0] + t * p.dilation[0];
            if (unsigned(d) >= unsigned(p.image[0])) continue;
            for (int row = 0; row < p.output[1]; ++row) {
                const int h = row * p.stride[1] - p.pad[1] + r * p.dilation[1];
                if (unsigned(h) >= unsigned(p.image[1])) continue;
                Row sum = 0;
                for (int column = 0; column < p.output[2]; ++column) {
                    const int w = column * p.stride[2] - p.pad[2] + s * p.dilation[2];
                    if (unsigned(w) >= unsigned(p.image[2])) continue;
                    sum += product(p.a[offset(p.a_strides, n, first + c, d, h, w)],
                                   p.b[offset(p.b_strides, n, k, o, row, column)]);
                }
                total += sum;
            }
        }
    return total;
}

extern "C" __global__ void naive(const __grid_constant__ Params p) {
    // Place: result i, and its five coordinates in the order of memory.
    const bool weights = Traits::pass == 2;
    const int* space = weights ? p.filter : Traits::pass == 1 ? p.image : p.output;
    const int outer = weights ? p.k : p.n;
    const int channels = weights ? p.c / p.groups : Traits::pass == 1 ? p.c : p.k;
    Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
    const auto digit = [&i](int base) {
        const int found = int(i % base);
        i /= base;
        return found;
    };
    int at[5];
    if (Traits::channels_last) at[1] = digit(channels);
    for (int axis = 4; axis >= 2; --axis) at[axis] = digit(space[axis - 2]);
    if (!Traits::channels_last) at[1] = digit(channels);
    if (i >= outer) return;
    at[0] = int(i);

    // Compute.
    const Total total = weights             ? wgrad(p, at[0], at[1], at[2], at[3], at[4])
                        : Traits::pass == 1 ? dgrad(p, at[0], at[1], at[2], at[3], at[4])
                                            : fprop(p, at[0], at[1], at[2], at[3], at[4]);

    // Store.
    const Index place = offset(p.out_strides, at[0], at[1], at[2], at[3], at[4]);
    Traits::Sum result[1] = {Traits::Sum(total)};
    Traits::Epilogue::apply<1, Traits::channels_last>(result, p.operands, weights ? at[0] : at[1], place);
    p.out[place] = Traits::Out(result[0]);
}
