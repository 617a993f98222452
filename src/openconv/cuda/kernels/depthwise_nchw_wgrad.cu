// Gradient of a depthwise convolution's filters, channels-first images.
//
//     dw[k,t,r,s] = sum over n,o,p,q of  x[n, k/m, o*stride - pad + t*dilation, ...] * dy[n,k,o,p,q]
//
// A team of threads owns `rows` filter rows of one filter, each thread all rows x S sums of them in registers. It
// strides over the patches of height x width values of dy in all images: it loads the patch, walks down the rows of x
// that the patch's windows hold, and adds each product to its sum. A block has threads / team teams, for one filter
// each. Then the sums of a warp are added by shuffles, those of a team's warps in shared memory, and where several
// blocks share a filter (`splits`), theirs from the workspace by depthwise_nchw_sum: always in the same order.
//
// Values of dy that do not exist are left out rather than taken as zeros: zero times an infinity of x would show.
//
// Shared memory: rows x S sums of each warp.
//
// Traits: A, B, Out, Sum, Index; multiplier, filter, stride, pad, dilation along t, r and s; threads, blocks (an SM's
// at least), team, rows, height, width, load_width (of x), other_width (of dy), ragged_r, ragged_s (dy ends within).

#include "common/types.cuh"
#include "common/follow.cuh"
#include "common/rows.cuh"
#include "traits"

using Index = Traits::Index;
using Sum = Traits::Sum;
using A = Traits::A;
using B = Traits::B;
using Columns = Axis<Traits::filter_s, Traits::stride_s, Traits::pad_s, Traits::dilation_s, false>;

constexpr int S = Traits::filter_s, rows = Traits::rows;
constexpr int height = Traits::height, width = Traits::width;
constexpr int load_width = Traits::load_width, other_width = Traits::other_width;
constexpr int taps = Traits::filter_t * Traits::filter_r * S;
constexpr int sums = rows * S;

static_assert(width % other_width == 0, "a strip of dy is loaded by whole vectors");
static_assert(Columns::origin(width) % load_width == 0, "spans start at whole vectors");
static_assert(Traits::team % 32 == 0 && Traits::threads % Traits::team == 0, "a team is whole warps of a block");

struct Params {
    const A* a;
    const B* b;
    Traits::Out* out;
    Sum* partial;              // [splits][k][taps], where there are several splits
    int n, k, splits, chunks;  // chunks: groups of `rows` filter rows at one t
    int strips_r, strips_s;    // patches down and across a plane of dy
    int image[3], output[3];
};

using Span_ = Span<Columns, width, load_width>;

// Adds the products of one row of x with one row of dy to one row of sums.
template <class Row>
__device__ __forceinline__ void add_row(Sum (&acc)[S], const Row& x, const Sum (&dy)[width], int left) {
    if constexpr (width == 1) {
#pragma unroll
        for (int s = 0; s < S; ++s) acc[s] += x[s] * dy[0];
    } else if constexpr (Traits::ragged_s) {
#pragma unroll
        for (int v = 0; v < width; ++v)
            if (v < left)
#pragma unroll
                for (int s = 0; s < S; ++s)
                    acc[s] +=
                        x[v * Traits::stride_s - Traits::pad_s + s * Traits::dilation_s - Span_::place(0, 0)] * dy[v];
    } else {
#pragma unroll
        for (int i = 0; i < Span_::vectors * load_width; ++i)
#pragma unroll
            for (int v = 0; v < width; ++v) {
                const int s = Columns::tap(Span_::place(0, i), v);
                if (s >= 0) acc[s] += x[i] * dy[v];
            }
    }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
depthwise_nchw_wgrad(const __grid_constant__ Params p) {
    constexpr int teams = Traits::threads / Traits::team;
    __shared__ Sum shared[Traits::threads / 32][sums];
    let_next_start();

    // Place: the team's filter, the filter rows that are summed, and the thread's first patch.
    const int tid = threadIdx.x;
    const int first_k = int(blockIdx.x) / p.chunks * teams, k = first_k + tid / Traits::team;
    const int chunk = int(blockIdx.x) % p.chunks;
    constexpr int row_chunks = (Traits::filter_r + rows - 1) / rows;
    const int t = chunk / row_chunks, first_r = chunk % row_chunks * rows;
    int patch[4], step[4];  // across, down, depth, image
    const auto digits = [&p](int (&at)[4], int i) {
        at[0] = i % p.strips_s, i /= p.strips_s;
        at[1] = i % p.strips_r, i /= p.strips_r;
        at[2] = i % p.output[0], at[3] = i / p.output[0];
    };
    digits(patch, int(blockIdx.y) * Traits::team + tid % Traits::team);
    digits(step, p.splits * Traits::team);
    if (k >= p.k) patch[3] = p.n;
    const Index x_plane = Index(p.image[0]) * p.image[1] * p.image[2];
    const Index y_plane = Index(p.output[0]) * p.output[1] * p.output[2];
    const int c = k / Traits::multiplier, channels = p.k / Traits::multiplier;

    Sum acc[rows][S];
#pragma unroll
    for (int j = 0; j < rows; ++j)
#pragma unroll
        for (int s = 0; s < S; ++s) acc[j][s] = 0;

#pragma unroll 1
    while (patch[3] < p.n) {
        const int column = patch[0] * width, row = patch[1] * height, left = p.output[2] - column;
        const int d = patch[2] * Traits::stride_t - Traits::pad_t + t * Traits::dilation_t;
        const bool inside = unsigned(d) < unsigned(p.image[0]);

        // Load: the patch of dy.
        Sum dy[height][width];
        const B* from =
            p.b + (Index(patch[3]) * p.k + k) * y_plane + Index(patch[2] * p.output[1] + row) * p.output[2] + column;
#pragma unroll
        for (int u = 0; u < height; ++u)
#pragma unroll
            for (int v = 0; v < width; v += other_width)
                widen_or_zero<other_width>(
                    &dy[u][v], from + u * p.output[2] + v,
                    (!Traits::ragged_r || row + u < p.output[1]) && (!Traits::ragged_s || v < left));

        // Compute: row by row of x.
        const A* slice = p.a + (Index(patch[3]) * channels + c) * x_plane + Index(d) * p.image[1] * p.image[2];
        const int first = row * Traits::stride_r - Traits::pad_r + first_r * Traits::dilation_r;
        const int length = p.image[2];
#pragma unroll
        for (int e = 0; e <= (height - 1) * Traits::stride_r + (rows - 1) * Traits::dilation_r; ++e) {
            const A* line = slice + Index(first + e) * length;
            const bool there = inside && unsigned(first + e) < unsigned(p.image[1]);
            Sum x[width == 1 ? S : Span_::vectors * load_width];
            if constexpr (width == 1) {
#pragma unroll
                for (int s = 0; s < S; ++s) {
                    const int at = column * Traits::stride_s - Traits::pad_s + s * Traits::dilation_s;
                    x[s] = 0;
                    if (there && unsigned(at) < unsigned(length)) x[s] = widen<Sum>(line[at]);
                }
            } else {
                Span_::read(x, line, Columns::origin(column), length, there);
            }
#pragma unroll
            for (int u = 0; u < height; ++u) {
                const int reach = e - u * Traits::stride_r, j = reach / Traits::dilation_r;
                if (reach < 0 || reach % Traits::dilation_r != 0 || j >= rows) continue;
                if (!Traits::ragged_r || row + u < p.output[1]) add_row(acc[j < rows ? j : 0], x, dy[u], left);
            }
        }

        // Next: one step further, with carries.
        patch[0] += step[0];
        const int across = patch[0] >= p.strips_s;
        patch[0] -= across ? p.strips_s : 0;
        patch[1] += step[1] + across;
        const int down = patch[1] >= p.strips_r;
        patch[1] -= down ? p.strips_r : 0;
        patch[2] += step[2] + down;
        const int deep = patch[2] >= p.output[0];
        patch[2] -= deep ? p.output[0] : 0;
        patch[3] += step[3] + deep;
    }

    // Reduce.
#pragma unroll
    for (int i = 0; i < sums; ++i) {
        Sum sum = acc[i / S][i % S];
#pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (tid % 32 == 0) shared[tid / 32][i] = sum;
    }
    __syncthreads();

    // Store.
    for (int i = tid; i < teams * sums; i += Traits::threads) {
        const int team = i / sums, at = i % sums, r = first_r + at / S;
        if (first_k + team >= p.k || r >= Traits::filter_r) continue;
        Sum sum = 0;
        for (int warp = 0; warp < Traits::team / 32; ++warp) sum += shared[team * (Traits::team / 32) + warp][at];
        const Index place = Index(first_k + team) * taps + (t * Traits::filter_r + r) * S + at % S;
        if (p.splits == 1)
            p.out[place] = Traits::Out(sum);
        else
            p.partial[Index(blockIdx.y) * p.k * taps + place] = sum;
    }
}

// Adds the splits' sums, one thread for each result.
extern "C" __global__ void depthwise_nchw_sum(const __grid_constant__ Params p) {
    const Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x, count = Index(p.k) * taps;
    if (i >= count) return;
    Sum sum = 0;
    wait_for_previous();
    for (int split = 0; split < p.splits; ++split) sum += p.partial[split * count + i];
    p.out[i] = Traits::Out(sum);
}
