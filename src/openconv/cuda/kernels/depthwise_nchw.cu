// Depthwise convolution of channels-first images: fprop and dgrad.
//
//     fprop   y[n,k,o,p,q]  = sum over t,r,s of  x[n, k/m, o*stride - pad + t*dilation, ...] * w[k,t,r,s]
//     dgrad   dx[n,c,d,h,w] = sum over k,t,r,s of  dy[n, k, (d + pad - t*dilation) / stride, ...] * w[k,t,r,s], k/m = c
//
// A thread owns a patch of height x width results of one plane. It walks down the input rows that the patch needs,
// loads its span of each by vectors, converts a value once and adds it to every result whose window holds it.
// Neighbours' spans overlap: the overlap comes from L1, so that nothing is waited for but the loads. A block owns
// consecutive patches of one plane (`lone`), or all patches of `planes` consecutive planes where those are small.
//
// Small filters are unrolled whole, their weights in registers; of large ones, filter rows are a loop.
// A patch of height or width 1 asks for each tap by itself: any stride of a dgrad, and taps that lie far apart.
//
// Shared memory: the weights of the block's planes as Sum, each filter row padded to whole vectors, unless threads read
// them by themselves. In a `tile` kernel also the planes, copied as they lie, and then the results: rows of odd length
// are read and written by vectors all the same.
//
// Traits: A, B, Out, Sum, Index, Epilogue; gradient, multiplier, rank; filter, stride, pad, dilation along t, r and s;
// threads, blocks (an SM's at least), lone, height, width, load_width, store_width, unrolled; staged (values of shared
// weights, 0: none), tile (bytes, 0: none).

#include "common/pointwise.cuh"
#include "common/types.cuh"
#include "common/epilogue.cuh"
#include "common/rows.cuh"
#include "traits"

using Index = Traits::Index;
using Sum = Traits::Sum;
using A = Traits::A;
using Out = Traits::Out;
using Depth = Axis<Traits::filter_t, Traits::stride_t, Traits::pad_t, Traits::dilation_t, Traits::gradient>;
using Rows = Axis<Traits::filter_r, Traits::stride_r, Traits::pad_r, Traits::dilation_r, Traits::gradient>;
using Columns = Axis<Traits::filter_s, Traits::stride_s, Traits::pad_s, Traits::dilation_s, Traits::gradient>;

constexpr int R = Traits::filter_r, S = Traits::filter_s;
constexpr int height = Traits::height, width = Traits::width;
constexpr int load_width = Traits::load_width, store_width = Traits::store_width;
constexpr int taps = Traits::filter_t * R * S;
constexpr int weight_width = S >= 3 ? 4 : S;  // weights of one shared load
constexpr int pitch = (S + weight_width - 1) / weight_width * weight_width;
constexpr int filter_pitch = Traits::filter_t * R * pitch;

static_assert(!Traits::gradient || width == 1 || width % Traits::stride_s == 0, "strips start where strides do");
static_assert(!Traits::gradient || height == 1 || height % Traits::stride_r == 0, "strips start where strides do");
static_assert(width % store_width == 0, "a strip is stored by whole vectors");
static_assert(Columns::origin(width) % load_width == 0, "spans start at whole vectors");

struct Params {
    const A* a;
    const Traits::B* b;
    Out* out;
    const void* operands[Traits::Epilogue::count > 0 ? Traits::Epilogue::count : 1];
    int total, channels;     // planes of the result, and its channels
    int planes, strips;      // planes of a block, patches of a plane
    int strips_r, strips_s;  // patches down and across
    int in[3], out_size[3];
};

using Span_ = Span<Columns, width, load_width>;
constexpr int values = width == 1 ? S : Span_::vectors * load_width;

// What a patch needs of one input row. Of a single column: one value for each tap, and whether there is one (`hit`).
struct Row {
    Sum value[values];
    bool hit[width == 1 ? S : 1];

    __device__ __forceinline__ void read(const A* row, int column, int length, bool inside) {
        if constexpr (width > 1) {
            Span_::read(value, row, Columns::origin(column), length, inside);
        } else {
#pragma unroll
            for (int s = 0; s < S; ++s) {
                int at;
                hit[s] = Columns::single(column, s, at);
                value[s] = 0;
                if (inside && hit[s] && unsigned(at) < unsigned(length)) value[s] = widen<Sum>(row[at]);
            }
        }
    }

    __device__ __forceinline__ void add(Sum (&acc)[width], const Sum (&w)[S]) const {
        if constexpr (width > 1) {
#pragma unroll
            for (int i = 0; i < values; ++i)
#pragma unroll
                for (int v = 0; v < width; ++v) {
                    const int s = Columns::tap(Span_::place(0, i), v);
                    if (s >= 0) acc[v] += value[i] * w[s];
                }
        } else {
#pragma unroll
            for (int s = 0; s < S; ++s)
                if (hit[s]) acc[0] += value[s] * w[s];
        }
    }
};

// Row r of the filter, from shared memory if it is there, else from where it lies.
__device__ __forceinline__ void read_weights(Sum (&w)[S], const Sum* shared, const Traits::B* global, int row) {
    if constexpr (Traits::staged > 0) {
#pragma unroll
        for (int i = 0; i < pitch; i += weight_width) {
            const Pack<Sum, weight_width> some = load<weight_width>(shared + row * pitch + i);
#pragma unroll
            for (int j = 0; j < weight_width; ++j)
                if (i + j < S) w[i + j] = some.value[j];
        }
    } else {
#pragma unroll
        for (int s = 0; s < S; ++s) w[s] = widen<Sum>(global[row * S + s]);
    }
}

// Adds one slice of the filter: `slice` is the input's plane at the right depth, `first_row` that of the filter's rows.
__device__ __forceinline__ void add_slice(Sum (&acc)[height][width], const A* slice, bool inside, int row, int column,
                                          const Params& p, const Sum* shared, const Traits::B* global, int first_row) {
    const int rows = p.in[1], length = p.in[2];
    if constexpr (Traits::unrolled) {
        Sum w[R][S];
#pragma unroll
        for (int r = 0; r < R; ++r) read_weights(w[r], shared, global, first_row + r);
        if constexpr (height > 1) {
            const int origin = Rows::origin(row);
#pragma unroll
            for (int e = Rows::first(); e <= Rows::last(height); ++e) {
                Row x;
                x.read(slice + Index(origin + e) * length, column, length,
                       inside && unsigned(origin + e) < unsigned(rows));
#pragma unroll
                for (int u = 0; u < height; ++u)
                    if (Rows::tap(e, u) >= 0) x.add(acc[u], w[Rows::tap(e, u) < 0 ? 0 : Rows::tap(e, u)]);
            }
        } else {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                int at;
                if (!Rows::single(row, r, at)) continue;
                Row x;
                x.read(slice + Index(at) * length, column, length, inside && unsigned(at) < unsigned(rows));
                x.add(acc[0], w[r]);
            }
        }
    } else if constexpr (height > 1) {
        const int origin = Rows::origin(row);
#pragma unroll 1
        for (int e = Rows::first(); e <= Rows::last(height); ++e) {
            Row x;
            x.read(slice + Index(origin + e) * length, column, length, inside && unsigned(origin + e) < unsigned(rows));
#pragma unroll
            for (int u = 0; u < height; ++u) {
                const int r = Rows::tap(e, u);
                if (r < 0) continue;
                Sum w[S];
                read_weights(w, shared, global, first_row + r);
                x.add(acc[u], w);
            }
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < R; ++r) {
            int at;
            if (!Rows::single(row, r, at)) continue;
            Row x;
            x.read(slice + Index(at) * length, column, length, inside && unsigned(at) < unsigned(rows));
            Sum w[S];
            read_weights(w, shared, global, first_row + r);
            x.add(acc[0], w);
        }
    }
}

// Copies `count` elements by all threads of the block; both ends are aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void copy(T* to, const T* from, int count) {
    constexpr int some = 16 / sizeof(T);
    for (int i = threadIdx.x * some; i + some <= count; i += Traits::threads * some)
        store<some>(to + i, load<some>(from + i));
    const int rest = count / some * some;
    if (int(threadIdx.x) < count - rest) to[rest + threadIdx.x] = from[rest + threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
depthwise_nchw(const __grid_constant__ Params p) {
    constexpr int filters = Traits::gradient ? Traits::multiplier : 1;
    alignas(16) __shared__ Sum weights[Traits::staged > 0 ? Traits::staged : 1];
    alignas(16) __shared__ unsigned char tile[Traits::tile > 0 ? Traits::tile : 16];

    // Place: the block's first plane, the thread's plane counted from it, and its patch.
    const int tid = threadIdx.x;
    const int first_plane = Traits::lone ? int(blockIdx.z) * p.channels + int(blockIdx.y) : int(blockIdx.x) * p.planes;
    const int planes = Traits::lone ? 1 : min(p.planes, p.total - first_plane);
    const int item = Traits::lone ? int(blockIdx.x) * Traits::threads + tid : tid;
    const int local = Traits::lone ? 0 : item / p.strips;
    const bool active = Traits::lone ? item < p.strips : local < planes;
    const int patch = item - local * p.strips, below = Traits::rank > 1 ? patch / p.strips_s : 0;
    const int column = (patch - below * p.strips_s) * width, depth = Traits::rank > 2 ? below / p.strips_r : 0;
    const int row = (below - depth * p.strips_r) * height;
    const int plane = first_plane + (active ? local : 0);
    const int channel = Traits::lone ? int(blockIdx.y) : plane % p.channels;
    const Index in_plane = Index(p.in[0]) * p.in[1] * p.in[2];
    const Index out_plane = Index(p.out_size[0]) * p.out_size[1] * p.out_size[2];

    Sum acc[height][width];
#pragma unroll
    for (int u = 0; u < height; ++u)
#pragma unroll
        for (int v = 0; v < width; ++v) acc[u][v] = 0;

    for (int j = 0; j < filters; ++j) {
        // Load: the weights of the block's planes, and the planes if they are to be in shared memory.
        if (Traits::staged > 0) {
            if (j > 0) __syncthreads();
#pragma unroll 1
            for (int i = tid; i < planes * taps; i += Traits::threads) {
                const int of = i / taps, tap = i % taps;
                const int filter = (Traits::lone ? channel : (first_plane + of) % p.channels) * filters + j;
                weights[of * filter_pitch + tap / S * pitch + tap % S] = widen<Sum>(p.b[Index(filter) * taps + tap]);
            }
        }
        if (Traits::tile > 0)
            copy(reinterpret_cast<A*>(tile), p.a + Index(first_plane) * in_plane, planes * int(in_plane));
        if (Traits::staged > 0 || Traits::tile > 0) __syncthreads();
        if (!active) continue;

        // Compute.
        const Index source = Traits::multiplier == 1 ? Index(plane)
                             : Traits::gradient      ? Index(plane) * filters + j
                                                     : Index(plane / Traits::multiplier);
        const A* a =
            Traits::tile > 0 ? reinterpret_cast<const A*>(tile) + local * int(in_plane) : p.a + source * in_plane;
        const Traits::B* global = p.b + Index(channel * filters + j) * taps;
#pragma unroll 1
        for (int t = 0; t < Traits::filter_t; ++t) {
            int at;
            if (!Depth::single(depth, t, at)) continue;
            const bool inside = unsigned(at) < unsigned(p.in[0]);
            if (Traits::gradient && !inside) continue;
            add_slice(acc, a + Index(at) * p.in[1] * p.in[2], inside, row, column, p, weights + local * filter_pitch,
                      global, t * R);
        }
    }

    // Store.
    const Index first = Index(plane) * out_plane;
    const int inner = (depth * p.out_size[1] + row) * p.out_size[2] + column;
    if (Traits::tile > 0) __syncthreads();
    if (active) {
#pragma unroll
        for (int u = 0; u < height; ++u) {
            if (row + u >= p.out_size[1]) break;
#pragma unroll
            for (int v = 0; v < width; v += store_width) {
                if (column + v >= p.out_size[2]) break;
                const int at = inner + u * p.out_size[2] + v;
                Sum some[store_width];
                Pack<Out, store_width> results;
#pragma unroll
                for (int i = 0; i < store_width; ++i) some[i] = acc[u][v + i];
                Traits::Epilogue::apply<store_width, false>(some, p.operands, channel, first + at);
#pragma unroll
                for (int i = 0; i < store_width; ++i) results.value[i] = Out(some[i]);
                Out* to = Traits::tile > 0 ? reinterpret_cast<Out*>(tile) + local * int(out_plane) : p.out + first;
                store<store_width>(to + at, results);
            }
        }
    }
    if (Traits::tile > 0) {
        __syncthreads();
        copy(p.out + Index(first_plane) * out_plane, reinterpret_cast<const Out*>(tile), planes * int(out_plane));
    }
}
