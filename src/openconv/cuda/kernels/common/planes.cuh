// Channels-last pixels as planes in shared memory, one for each channel: what ldmatrix takes rows of.
//
// A unit is 8 columns of one row of one channel, 16 bytes. With Step = 1 they lie side by side; with Step = 2 a row has
// its even columns first and then its odd ones, so that a product of stride 2 finds each side by side too.
//
//     column of element i of unit u:   first + u / Blocks + Step * (u % Blocks * 8 + i)    u = 0 ... Step * Blocks - 1
//
// Layout, in units: channel c of the block starts at Planes::channel(c, plane); where a row lies in its plane the
// caller says, Planes::across units side by side. ldmatrix takes 8 rows at a time, which should lie in 8 different
// groups of banks: an odd number of units apart.
//     plane   units from a channel to the next; given at run time, any number
//     octets  (8 channels each) are 8 / Octets units further apart than their planes need: the lanes of a store, which
//             go along octets first, then fall into different banks
// Planes::units(plane) is the size of all.
//
// Planes::load is called by all threads of a block and works without a barrier: put one behind it. A thread takes 8
// pixels of 8 channels at a time, 16 bytes each and all under way at once, and stores 8 units; neighbouring lanes take
// neighbouring octets of the same pixels, so that two of them use a whole sector. C is a multiple of 8 and pixels are
// aligned to 16 bytes. Rows for which `row_of` gives a null pointer and columns outside of 0 ... width-1 become zeros;
// octets that are not there are left as they are.
//
// Values that are not finite: a product with a zero of an operand spreads them. `unusual(row)` is called for rows in
// which a thread sees one; it may be called several times and by several threads.
#pragma once
#include "common/types.cuh"

namespace planes {

using Unit = Pack<u32, 4>;

// The sum of seen and 0 * word, by halves: zeros as long as all values are finite, NaN from then on.
template <class T>
__device__ __forceinline__ u32 watch(u32 seen, u32 word);
#if defined(__CUDACC__)
    #if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ u32 watch<f16>(u32 seen, u32 word) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(seen) : "r"(word), "r"(0));
    return seen;
}
template <>
__device__ __forceinline__ u32 watch<bf16>(u32 seen, u32 word) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(seen) : "r"(word), "r"(0));
    return seen;
}
    #else  // Engines refuse older devices.
template <class T>
__device__ __forceinline__ u32 watch(u32, u32) {
    __trap();
    return 0;
}
    #endif
#else
template <class T>
inline u32 watch(u32 seen, u32 word) {
    for (int half = 0; half < 2; ++half) {
        T value;
        value.bits = u16(word >> 16 * half);
        const float zero = 0 * float(value);
        if (zero != zero) seen |= 0x7fffu << 16 * half;
    }
    return seen;
}
#endif
__device__ __forceinline__ bool finite(u32 seen) { return (seen & 0x7fff7fffu) == 0; }

// 8 pixels by 8 channels to 8 channels by 8 pixels, or back: both are 8 units of 8 values.
__device__ __forceinline__ Unit transposed(const Unit (&from)[8], int at) {
    Unit to;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to.value[i] = __byte_perm(from[2 * i].value[at / 2], from[2 * i + 1].value[at / 2], at % 2 ? 0x7632 : 0x5410);
    return to;
}

// The same number, as one that the compiler has not seen: what follows from it is worked out where it is used, rather
// than once before a loop and then kept in registers while others need them.
__device__ __forceinline__ int fresh(int value) {
#if defined(__CUDACC__)
    asm volatile("" : "+r"(value));
#endif
    return value;
}

struct Ignore {
    __device__ __forceinline__ void operator()(int) const {}
};

template <int Octets, int Blocks, int Step = 1>
struct Planes {
    static constexpr int octets = Octets, across = Step * Blocks;
    static constexpr int gap = Octets < 8 ? 8 / Octets : 1;

    static __device__ __forceinline__ int channel(int c, int plane) { return c * plane + c / 8 * gap; }
    static __device__ __forceinline__ int units(int plane) { return channel(8 * Octets, plane); }

    // row_of(row): the pixel at column 0 of a stored row, at the first channel of the block; null: a row of zeros.
    // place(row): where the row lies in a plane, in units.
    // `first`: the column of the first element; `pixel`: elements from a pixel to the next; `there`: octets that exist.
    // `Batch`: how many times 8 pixels a thread has under way, in 32 registers each.
    template <int Threads, class T, int Batch = 1, class Row, class Place, class Unusual = Ignore>
    static __device__ __forceinline__ void load(Unit* to, int plane, int rows, int first, int width, int pixel,
                                                int there, const Row& row_of, const Place& place,
                                                const Unusual& unusual = Unusual()) {
        static_assert(sizeof(T) == 2, "a unit is 8 values of two bytes");
        const int count = rows * (across * Octets);
#pragma unroll 1
        for (int begin = fresh(threadIdx.x); begin < count; begin += Threads * Batch) {
            Unit pixels[Batch][8];
#pragma unroll
            for (int batch = 0; batch < Batch; ++batch) {
                const int i = begin + batch * Threads, octet = i % Octets, u = i / Octets % across;
                const int column = first + u / Blocks + Step * 8 * (u % Blocks);
                const T* const start =
                    (Batch == 1 || i < count) && octet < there ? row_of(i / (Octets * across)) : nullptr;
                // Bytes: the address of a pixel is then one multiplication, by a constant, and addition.
                const u32 next = u32(pixel) * u32(Step * sizeof(T));
                const char* const from = reinterpret_cast<const char*>(start + i64(column) * pixel + octet * 8);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    pixels[batch][j] = {};
                    if (start != nullptr && unsigned(column + j * Step) < unsigned(width))
                        pixels[batch][j] = ::load<4>(reinterpret_cast<const u32*>(from + u64(next) * u32(j)));
                }
            }
#pragma unroll
            for (int batch = 0; batch < Batch; ++batch) {
                const int i = begin + batch * Threads, octet = i % Octets, u = i / Octets % across;
                const int row = i / (Octets * across);
                if ((Batch > 1 && i >= count) || octet >= there) continue;
                u32 seen[4] = {};  // four chains: one would wait for itself
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int k = 0; k < 4; ++k) seen[k] = watch<T>(seen[k], pixels[batch][j].value[k]);
                if (!finite(seen[0] | seen[1] | seen[2] | seen[3])) unusual(row);
                Unit* const at = to + channel(octet * 8, plane) + place(row) + u;
#pragma unroll
                for (int c = 0; c < 8; ++c) at[c * plane] = transposed(pixels[batch], c);
            }
        }
    }
};

}  // namespace planes
