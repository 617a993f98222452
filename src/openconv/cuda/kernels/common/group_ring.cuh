// What kernels share in which some threads bring boxes to a ring of stages and groups of four warps multiply them
// (sm_90).
#pragma once
#include "common/bulk_windows.cuh"
#include "common/wgmma_batches.cuh"

namespace pipeline {

// A place in a ring, and the parity of its turn.
template <int Stages>
struct Turn {
    int stage = 0, parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int count) {
        stage += count;
        parity ^= stage / Stages & 1;
        stage %= Stages;
    }
};

// Registers of a thread: of all at first; the four warps that bring boxes give theirs to the `Groups` that multiply.
template <int Groups, int Residents>
struct Registers {
    static constexpr int threads = 128 * Groups + 128, given = 65536 / (threads * Residents) / 8 * 8, copying = 40;
    static constexpr int more = (given * threads - copying * 128) / (128 * Groups) / 8 * 8;
    static constexpr int multiplying = more < 240 ? more : 240;

    __device__ static __forceinline__ void give() {
        if constexpr (given < 240) tensor::give_registers<copying>();
    }
    __device__ static __forceinline__ void take() {
        if constexpr (given < 240) tensor::take_registers<multiplying>();
    }
};

// The products of a tile's steps, at least one: `ask(stage, adds)` asks for those of a stage as one batch. While a step
// is multiplied, the next one is asked for; a stage is free once the step behind it is under way and its own has ended.
// `last_asked` is called when all have been asked for.
template <int Stages, class Ask, class Last>
__device__ __forceinline__ void multiply(int steps, Turn<Stages>& turn, bulk::Barrier* full, bulk::Barrier* empty,
                                         bool leads_warp, const Ask& ask, const Last& last_asked) {
    bulk::wait(full[turn.stage], turn.parity);
    ask(turn.stage, 0);
    int last = turn.stage;
    turn.next();
    for (int step = 1; step < steps; ++step) {
        bulk::wait(full[turn.stage], turn.parity);
        ask(turn.stage, 1);
        tensor::group_left<1>();  // the step before has been read
        if (leads_warp) bulk::arrive(empty[last]);
        last = turn.stage;
        turn.next();
    }
    last_asked();
    tensor::group_left<0>();
    if (leads_warp) bulk::arrive(empty[last]);
}
template <int Stages, class Ask>
__device__ __forceinline__ void multiply(int steps, Turn<Stages>& turn, bulk::Barrier* full, bulk::Barrier* empty,
                                         bool leads_warp, const Ask& ask) {
    multiply(steps, turn, full, empty, leads_warp, ask, [] {});
}

}  // namespace pipeline
