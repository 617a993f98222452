// Sums of a tile whose steps the blocks of a cluster share (sm_90): each block has sums of its own steps, in units, and
// in the end those of all for every `Blocks`th unit, from its rank on.
//
// A block lays the sums of others' units where its ring of boxes was, and the others read them there. One way there and
// back is 16 bytes for 4 sums, 512 for a warp; a unit's own block adds the others' in the order of their ranks from its
// own on, which is always the same.
#pragma once
#include "common/bulk_cluster.cuh"

namespace cluster {

template <class D>
struct alignas(16) Four {
    D value[4];
};

// All threads of a block come to both barriers in turn: those that bring boxes as well, which may use the ring again
// behind them.
__device__ __forceinline__ void pass() {
    bulk::cluster_release();
    bulk::cluster_wait();
}

// By the `Threads` that multiply, once nothing reads the ring any more but products that these have waited for. Behind
// it comes `bulk::cluster_wait()`, before this block's next sums or its end: until then others may read.
template <int Blocks, int Threads, int Units, int Each, class D>
__device__ __forceinline__ void add_up(D* sum, unsigned char* ring, int group, int rank) {
    static_assert(Each % 4 == 0, "whole pieces of 16 bytes");
    constexpr int pieces = Each / 4;
    Four<D>* const mine = reinterpret_cast<Four<D>*>(ring) + group * Units * pieces * 128 + threadIdx.x % 128;
    bulk::sync_first<Threads>();
#pragma unroll
    for (int u = 0; u < Units; ++u)
        if (u % Blocks != rank)
#pragma unroll
            for (int i = 0; i < pieces; ++i) {
                const D* const four = sum + u * Each + 4 * i;
                mine[(u * pieces + i) * 128] = {four[0], four[1], four[2], four[3]};
            }
    pass();
#pragma unroll 1
    for (int further = 1; further < Blocks; ++further) {
        const int other = (rank + further) % Blocks;
#pragma unroll
        for (int u = 0; u < Units; ++u)
            if (u % Blocks == rank)
#pragma unroll
                for (int i = 0; i < pieces; ++i) {
                    const uint4 bits = bulk::load_peer(mine + (u * pieces + i) * 128, other);
                    const Four<D>& four = reinterpret_cast<const Four<D>&>(bits);
#pragma unroll
                    for (int k = 0; k < 4; ++k) sum[u * Each + 4 * i + k] += four.value[k];
                }
    }
    bulk::written();  // boxes come to where sums lay
    bulk::cluster_release();
}

}  // namespace cluster
