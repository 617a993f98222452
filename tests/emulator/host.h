// A GPU on one CPU core, for checking kernels where there is none: clusters of blocks run one after the other, the
// threads of a cluster as fibers that change at barriers and shuffles. No speed, no races, no memory model: only the
// arithmetic and the indices of a kernel, and of what runs beside its threads (boxes, products of a warpgroup) that it
// is waited for.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <setjmp.h>
#include <ucontext.h>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __restrict__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic[emulator::inside]
#define DYNAMIC_SHARED_BOXES(name, boxed) DYNAMIC_SHARED(name)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static dim3 blockIdx, threadIdx, blockDim, gridDim;
static const int warpSize = 32;

inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
inline double __longlong_as_double(long long v) { double d; memcpy(&d, &v, 8); return d; }
template <class T> inline T __ldg(const T* at) { return *at; }
template <class T> inline T __ldcs(const T* at) { return *at; }
template <class T> inline void __stcs(T* at, T v) { *at = v; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const unsigned long long both = low | (unsigned long long)high << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= unsigned(both >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
using std::max;
using std::min;
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

namespace emulator {
[[noreturn]] inline void fail(const char* why) {
    fprintf(stderr, "emulator: %s\n", why);
    abort();
}
struct Fiber;
inline bool ended(const Fiber&);  // the phase that it waits for
inline bool come();               // boxes that a thread waits for, if there are any
inline void end_cluster();        // nothing may be under way any more

// What is under way. A std::vector took a fifth of a second for each kernel to compile.
template <class T> struct List {
    T* all;
    int count, room;
    void add(const T& value) {
        if (count == room) all = static_cast<T*>(realloc(all, (room = 2 * room + 8) * sizeof(T)));
        all[count++] = value;
    }
};
constexpr int most_blocks = 8, most_threads = most_blocks * 1024;  // of a cluster

// The blocks of a cluster, the one whose thread runs, and how many threads of each have not ended. Threads of one block
// come `pitch` after those of the one before.
static int blocks = 1, inside, running[most_blocks], pitch;

// Shared memory of a launch. Bytes behind those that it asks for keep a pattern; one that has changed is an error.
constexpr unsigned most_dynamic = 227 << 10, room = 64 << 10;
alignas(1024) static unsigned char dynamic[most_blocks][most_dynamic + room];
inline void mark_behind(unsigned shared) {
    for (int block = 0; block < blocks; ++block) memset(dynamic[block] + shared, 0xa5, sizeof dynamic[0] - shared);
}
inline bool kept_behind(unsigned shared) {
    for (int block = 0; block < blocks; ++block)
        for (unsigned at = shared; at < sizeof dynamic[0]; ++at)
            if (dynamic[block][at] != 0xa5) return false;
    return true;
}

// Static shared memory is at one place for all blocks of a cluster, and kept elsewhere for those that are not inside.
// cluster.h finds it; blocks that are alone need not change.
static unsigned char* static_shared;
static size_t static_bytes;
static unsigned char kept[most_blocks][48 << 10];
inline void enter(int block) {
    if (block == inside) return;
    memcpy(kept[inside], static_shared, static_bytes);
    memcpy(static_shared, kept[block], static_bytes);
    blockIdx.x += block - inside;
    inside = block;
}
// The same place of another block, from which at most a piece of sixteen bytes is read.
inline const void* place_of_peer(const void* mine, int rank) {
    if (rank == inside) return mine;
    const auto at = reinterpret_cast<uintptr_t>(mine);
    const auto within = at - reinterpret_cast<uintptr_t>(dynamic[inside]);
    if (within < sizeof dynamic[0]) return dynamic[rank] + within;
    const auto place = at - reinterpret_cast<uintptr_t>(static_shared);
    if (place < static_bytes) return kept[rank] + place;
    fail("a peer is asked for what is not in shared memory");
}

// A thread has a stack of its own. swapcontext would ask the kernel for the mask of signals at each switch, which takes
// half of the time: a context is set to start a thread, and jumps lead back and forth from then on.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    dim3 at;
    bool begun = false, done = false;
    // 0: no, 1: for the block, 2: for its warp, 3: for a phase of a barrier, 4: for the first `some`, 5: for its
    // warpgroup, 6: until no other can go on, 7: for the products of its warpgroup, 8: for the cluster
    int waits = 0;
    int arrived, waited;  // for the cluster, so often
    void* barrier;
    int parity;
    std::unique_ptr<char[]> stack;
};
static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static int current, some[most_blocks], at_cluster;  // the last: how many wait for the cluster
static void (*body)(const void*);
static const void* given;
static std::vector<unsigned long long> exchange;

inline void wait(int kind) {
    Fiber& me = fibers[current];
    me.waits = kind;
    if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}
inline void start() {
    body(given);
    fibers[current].done = true;
    --running[inside];
    _longjmp(scheduler, 1);
}
__attribute__((noinline)) static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
inline bool released(int kind, int first, int last) {  // all that still run have come to this barrier
    bool any = false;
    for (int i = first; i < last; ++i) {
        if (fibers[i].done) continue;
        if (fibers[i].waits != kind) return false;
        any = true;
    }
    return any;
}
inline void free_all(int first, int last) {
    for (int i = first; i < last; ++i) fibers[i].waits = 0;
}
// From the first block of the cluster on, which is blockIdx.
inline void run_cluster(unsigned shared) {
    const int count = blockDim.x * blockDim.y * blockDim.z;
    pitch = blocks == 1 ? count : (count + 127) / 128 * 128;  // so that each block begins with a warpgroup
    const int all = blocks * pitch;
    inside = 0;
    for (int block = 0; block < blocks; ++block) {
        running[block] = count;
        memset(dynamic[block], 0xff, shared);  // what is not written is NaN
        if (blocks > 1) memset(block ? kept[block] : static_shared, 0xff, static_bytes);
    }
    fibers.resize(all);
    exchange.assign(all, 0);
    for (int i = 0; i < all; ++i) {
        Fiber& f = fibers[i];
        const int thread = i % pitch;
        f.begun = false;
        f.done = thread >= count;
        f.waits = f.arrived = f.waited = 0;
        if (f.done) continue;
        f.at.x = thread % blockDim.x;
        f.at.y = thread / blockDim.x % blockDim.y;
        f.at.z = thread / blockDim.x / blockDim.y;
        if (!f.stack) f.stack.reset(new char[64 << 10]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = 64 << 10;
        f.context.uc_link = nullptr;
        makecontext(&f.context, start, 0);
    }
    const bool backwards = blockIdx.x / blocks % 2;  // no block of a cluster may count on another having been first
    for (;;) {
        bool moved = false, left = false;
        for (int turn = 0; turn < blocks; ++turn) {
            enter(backwards ? blocks - 1 - turn : turn);
            const int first = inside * pitch;
            for (current = first; current < first + count; ++current) {
                Fiber& f = fibers[current];
                if (f.done || f.waits) { left |= !f.done; continue; }
                threadIdx = f.at;
                resume(f);
                moved = true;
                left |= !f.done;
            }
        }
        if (!left) return end_cluster();
        if (moved) continue;
        bool freed = false;
        for (const auto [kind, size] : {std::pair{2, 32}, {5, 128}, {7, 128}})
            for (int first = 0; first < all; first += size) {
                const int end = first + size < all ? first + size : all;
                if (!released(kind, first, end)) continue;
                free_all(first, end);
                freed = true;
            }
        for (int block = 0; block < blocks && !freed; ++block)
            if (const int first = block * pitch; released(1, first, first + count)) {
                free_all(first, first + count);
                freed = true;
            }
        for (int block = 0; block < blocks && !freed; ++block)
            if (const int first = block * pitch; released(4, first, first + some[block])) {
                free_all(first, first + some[block]);
                freed = true;
            }
        if (!freed && at_cluster) {
            int least = 1 << 30;
            for (const auto& f : fibers)
                if (!f.done) least = min(least, f.arrived);
            for (auto& f : fibers)
                if (f.waits == 8 && f.arrived == least) { f.waits = 0; --at_cluster; freed = true; }
        }
        for (int block = 0; block < blocks && !freed; ++block) {
            enter(block);
            for (int i = block * pitch; i < block * pitch + count; ++i)
                if (fibers[i].waits == 3 && ended(fibers[i])) { fibers[i].waits = 0; freed = true; }
        }
        // What runs beside the threads: products before boxes, so that boxes that nobody has waited for are not there.
        for (int i = 0; i < all; ++i)
            if (!freed && fibers[i].waits == 6) {
                const int end = (i & ~127) + 128;
                for (; i < end && i < all; ++i)
                    if (fibers[i].waits == 6) fibers[i].waits = 0;
                freed = true;
            }
        if (!freed && !come()) {
            for (auto& f : fibers)
                if (f.waits == 3) fail("a barrier's phase does not end");
            fail("threads wait for each other for ever");
        }
    }
}
template <class T> inline T shuffle(T value, int lane) {
    const int first = current & ~31;
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    const int me = current;
    exchange[me] = bits;
    wait(2);
    bits = exchange[first + (lane & 31)];
    wait(2);
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace emulator

inline void __syncthreads() { emulator::wait(1); }
inline void __syncwarp(unsigned = ~0u) { emulator::wait(2); }
inline int emulator_lane() { return emulator::current & 31; }
template <class T> inline T __shfl_sync(unsigned, T v, int lane, int = 32) { return emulator::shuffle(v, lane); }
template <class T> inline T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
    return emulator::shuffle(v, emulator_lane() ^ mask);
}
template <class T> inline T __shfl_down_sync(unsigned, T v, int by, int = 32) {
    return emulator::shuffle(v, emulator_lane() + by < 32 ? emulator_lane() + by : emulator_lane());
}
template <class T> inline T __shfl_up_sync(unsigned, T v, int by, int = 32) {
    return emulator::shuffle(v, emulator_lane() >= by ? emulator_lane() - by : emulator_lane());
}

namespace convert {
inline unsigned short f16_from(float value) {
    const _Float16 h = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}
inline float f32_from_f16(unsigned short bits) {
    _Float16 h;
    memcpy(&h, &bits, 2);
    return (float)h;
}
inline unsigned short bf16_from(float value) {
    const unsigned word = __float_as_uint(value);
    return value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
}
inline float f32_from_bf16(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }
}  // namespace convert
#include "mma.h"
#include "wgmma.h"
#include "bulk.h"

inline bool emulator::ended(const Fiber& fiber) {
    return int(static_cast<const bulk::Barrier*>(fiber.barrier)->phase) != fiber.parity;
}
inline bool emulator::come() { return bulk::come(); }
inline void emulator::end_cluster() {
    tensor::end_cluster();
    bulk::end_cluster();
}
