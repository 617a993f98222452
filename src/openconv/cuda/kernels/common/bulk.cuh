// Copies of boxes by the tensor memory accelerator (sm_90), and the blocks of a cluster that share what they bring.
//
// A Map says where a tensor lies, its sizes and strides, and the box that one copy takes; launch.py writes it. One
// thread asks for a box by the place of its first element. The box comes into shared memory, first axis first, at the
// same place of every block in `blocks` (a bit for each rank); what lies outside of the tensor comes as zeros. Its bytes
// are counted by the barrier at the same place of each of these blocks.
//
// A phase of a Barrier ends with the last of its arrivals and of the bytes that it expects; the next one begins.
// `wait` returns when the phase of that parity has ended: 0 for the first.
#pragma once
#include "common/mma.cuh"

namespace bulk {

struct alignas(64) Map {
    u64 words[16];
};
using Barrier = u64;

#if __CUDA_ARCH__ >= 900
using tensor::shared_address;

__device__ __forceinline__ void init(Barrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}
// All blocks see the barriers that this one has made.
__device__ __forceinline__ void publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival, and the bytes that this phase waits for.
__device__ __forceinline__ void expect(Barrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait(Barrier& barrier, int parity) {
    asm volatile(
        "{ .reg .pred ended; again: "
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; "
        "@!ended bra again; }" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// An arrival at the barrier at the same place of another block.
__device__ __forceinline__ void arrive(Barrier& barrier, int rank) {
    asm volatile(
        "{ .reg .b32 at; "
        "mapa.shared::cluster.u32 at, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [at]; }" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void copy(void* to, const Map& map, Barrier& barrier, int blocks, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "h"(u16(blocks)), "r"(x), "r"(y)
        : "memory");
}
// Has the map at hand before its first copy.
__device__ __forceinline__ void fetch_map(const Map& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A piece of memory, in multiples of sixteen bytes.
__device__ __forceinline__ void copy_line(void* to, const void* from, int bytes, Barrier& barrier, int blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(&barrier)), "h"(u16(blocks))
        : "memory");
}

// The first `Threads` of a block wait for each other; the others need not come.
template <int Threads>
__device__ __forceinline__ void sync_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

// All threads of a cluster: `cluster_wait` returns when all have come to `cluster_arrive`.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
#else  // Engines refuse older devices.
__device__ __forceinline__ void init(Barrier&, int) {}
__device__ __forceinline__ void publish() {}
__device__ __forceinline__ void expect(Barrier&, int) {}
__device__ __forceinline__ void wait(Barrier&, int) {}
__device__ __forceinline__ void arrive(Barrier&, int) {}
__device__ __forceinline__ void copy(void*, const Map&, Barrier&, int, int, int) {}
__device__ __forceinline__ void fetch_map(const Map&) {}
__device__ __forceinline__ void copy_line(void*, const void*, int, Barrier&, int) {}
template <int Threads>
__device__ __forceinline__ void sync_first() {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
#endif

}  // namespace bulk
