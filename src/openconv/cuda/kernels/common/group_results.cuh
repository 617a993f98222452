// Sums of a warpgroup's products (common/wgmma.cuh) on their way out: the epilogue of 64 channels of some pixels, to
// where their box lies in shared memory. Comes behind "traits".
//
// A box has its pixels below each other, each a row of 128 bytes, swizzled as boxes are: 64 channels of two bytes. Of
// four bytes there are two boxes, of 32 channels each, one behind the other. Tensors that the epilogue reads have come
// to boxes of the same form; the first of them is the place of the results as well. Other results of the epilogue have
// boxes behind these.
//
// Traits: Out, Sum, Epilogue, Also; Stored (what leaves: Out, or sums of a split), parted, vectors and tensors (bits:
// which of the epilogue's operands have a value for each channel, or one for each result).
#pragma once
#include "common/epilogue.cuh"
#include "common/wgmma_batches.cuh"

namespace results {

using Stored = Traits::Stored;
using Sum = Traits::Sum;
using Epilogue = Traits::Epilogue;
using Also = Traits::Also;

constexpr int row_bytes = 128, size = sizeof(Stored), across = row_bytes / size;  // channels of a box
constexpr int parts = 64 / across;                                                // boxes of 64 channels
constexpr int given = Epilogue::count > 0 ? Epilogue::count : 1;
static_assert(size == 2 || size == 4, "results of two or four bytes");

__device__ constexpr int count_bits(int bits) { return bits ? (bits & 1) + count_bits(bits >> 1) : 0; }
constexpr int tensors = Traits::parted ? 0 : count_bits(Traits::tensors);
constexpr int also = Traits::parted ? 0 : Also::count;
constexpr int first_also = tensors > 1 ? tensors : 1, boxes = first_also + also;  // which box is the first of them
__device__ constexpr bool is_vector(int k) { return Traits::vectors >> k & 1; }
__device__ constexpr bool is_tensor(int k) { return Traits::tensors >> k & 1; }
__device__ constexpr int tensor_at(int k) {
    return count_bits(Traits::tensors & ((1 << k) - 1));
}  // the how-manieth tensor k is

// Where a channel of a row lies in a box of `rows`.
__device__ __forceinline__ int place(int rows, int row, int channel) {
    const int byte = channel % across * size;
    return channel / across * rows * row_bytes + row * row_bytes + ((byte / 16 ^ (row & 7)) << 4) + byte % 16;
}

// N results that lie side by side, or below each other unless `AlongChannels`: the epilogue, or its other result `At`,
// and rounded. `at` is the place of their tensors' values, in elements.
template <int N, bool AlongChannels, int At = -1, class D>
__device__ __forceinline__ Pack<Stored, N> finished(const D (&sum)[N], const void* const (&operands)[given], int at) {
    Pack<Stored, N> result;
    if constexpr (Traits::parted) {
#pragma unroll
        for (int i = 0; i < N; ++i) result.value[i] = Stored(sum[i]);
    } else {
        Sum value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = Sum(sum[i]);
        if constexpr (At < 0)
            Epilogue::template apply<N, AlongChannels>(value, operands, 0, at);
        else
            Also::template apply<At, N, AlongChannels>(value, operands, 0, at);
#pragma unroll
        for (int i = 0; i < N; ++i) result.value[i] = Stored(value[i]);
    }
    return result;
}

// The other results of N sums, from the `At`th on: to their boxes, `between` bytes behind each other, or into
// registers.
template <int N, bool AlongChannels, int At = 0, class D>
__device__ __forceinline__ void put_also(unsigned char* to, int between, int where, const D (&sum)[N],
                                         const void* const (&operands)[given]) {
    if constexpr (At < also) {
        store<N>(reinterpret_cast<Stored*>(to + (first_also + At) * between + where),
                 finished<N, AlongChannels, At>(sum, operands, where / size));
        put_also<N, AlongChannels, At + 1>(to, between, where, sum, operands);
    }
}
template <int At = 0, class D, int Count>
__device__ __forceinline__ void hold_also(u32 (&others)[Count][4], int i, const D (&sum)[2],
                                          const void* const (&operands)[given]) {
    if constexpr (At < also) {
        const Pack<Stored, 2> pair = finished<2, false, At>(sum, operands, 0);
        others[At][i] = reinterpret_cast<const u32&>(pair);
        hold_also<At + 1>(others, i, sum, operands);
    }
}

// Pixels are the rows of the product: 64 of them, and 64 of its columns, whose first sum of this thread is sum[0]. `to`
// is the box, tensors lie from there on, each `between` bytes behind the one before. `vectors` has [count][pitch]
// values of the channels from the first on.
template <class D>
__device__ __forceinline__ void of_rows(const D* sum, unsigned char* to, int between, const void* const* operands,
                                        const Traits::Out* vectors, int pitch, int warp, int lane) {
    const int row = 16 * warp + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int channel = 8 * j + lane % 4 * 2;
        const void* at[given];
        Pack<Traits::Out, 2> pair[given];
#pragma unroll
        for (int k = 0; k < Epilogue::count; ++k) {
            at[k] = operands[k];
            if (is_tensor(k)) at[k] = to + tensor_at(k) * between;
            if (is_vector(k)) {
                pair[k] = load<2>(vectors + k * pitch + channel);
                at[k] = &pair[k];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int where = place(64, row + 8 * h, channel);
            const D some[2] = {sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]};
            put_also<2, true>(to, between, where, some, at);  // before the results take a tensor's place
            store<2>(reinterpret_cast<Stored*>(to + where), finished<2, true>(some, at, where / size));
        }
    }
}

// Pixels are the columns of the product: `Pixels` of them, whose first sum of this thread is sum[0], and 64 of its
// rows, channels. A thread has two channels, eight apart, `vectors` their values [count][2]. 8 x 8 matrices are turned
// on their way.
template <int Pixels, class D>
__device__ __forceinline__ void of_columns(const D* sum, unsigned char* to, int between, const void* const* operands,
                                           const Traits::Out (*vectors)[2], int warp, int lane) {
    const void* at[given];
#pragma unroll
    for (int k = 0; k < Epilogue::count; ++k) at[k] = is_tensor(k) ? to + tensor_at(k) * between : operands[k];
    if constexpr (size == 2) {
        static_assert(Pixels % 16 == 0, "four matrices at a time");
#pragma unroll
        for (int j = 0; j < Pixels / 8; j += 2) {
            const int pixel = 8 * (j + lane / 16) + lane % 8, piece = 2 * warp + lane / 8 % 2;
            const int where = pixel * row_bytes + ((piece ^ (pixel & 7)) << 4);
            u32 read[tensors > 0 ? tensors : 1][4], packed[4], others[also > 0 ? also : 1][4];
#pragma unroll
            for (int t = 0; t < tensors; ++t) tensor::load_transposed(read[t], to + t * between + where);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, first = 4 * (j + i / 2) + 2 * h;
#pragma unroll
                for (int k = 0; k < Epilogue::count; ++k) {
                    if (is_tensor(k)) at[k] = &read[tensor_at(k)][i];
                    if (is_vector(k)) at[k] = &vectors[k][h];
                }
                const D some[2] = {sum[first], sum[first + 1]};
                hold_also(others, i, some, at);
                const Pack<Stored, 2> pair = finished<2, false>(some, at, 0);
                packed[i] = reinterpret_cast<const u32&>(pair);
            }
#pragma unroll
            for (int a = 0; a < also; ++a)
                tensor::store_matrices<true>(to + (first_also + a) * between + where, others[a]);
            tensor::store_matrices<true>(to + where, packed);
        }
    } else {
#pragma unroll
        for (int j = 0; j < Pixels / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i / 2, pixel = 8 * j + lane % 4 * 2 + i % 2;
                const int where = place(Pixels, pixel, 16 * warp + lane / 4 + 8 * h);
#pragma unroll
                for (int k = 0; k < Epilogue::count; ++k)
                    if (is_vector(k)) at[k] = &vectors[k][h];
                const D some[1] = {sum[4 * j + i]};
                put_also<1, false>(to, between, where, some, at);
                store<1>(reinterpret_cast<Stored*>(to + where), finished<1, false>(some, at, where / size));
            }
    }
}

}  // namespace results
