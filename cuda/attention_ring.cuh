// The ring of slots through which keys and values come, a tile of either in a slot, and the barriers of those who share it.
//
// Tiles are in the order keys, values, keys, values of a block's positions. Its fetching warps fill slots in that order; the team
// whose tile it is says when a slot is free again.
#pragma once

#include <cstdint>

#include "cluster.cuh"
#include "mbarrier.cuh"

namespace attention::band {
namespace {

constexpr int WARPS = 4;  // of a team
constexpr int TEAM_THREADS = 32 * WARPS;
constexpr int TEAMS = 2;  // that multiply; one more fetches
constexpr int THREADS = (TEAMS + 1) * TEAM_THREADS;

constexpr int MAX_SLOTS = THREADS / 32;  // three at least

struct Barriers {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS];
};

// As `mbarrier_wait`, on sm_80 too.
__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) {
#if HAS_CLUSTERS
    mbarrier_wait(barrier, parity);
#else
    asm volatile(
        "{ .reg .pred done;\n"
        "retry: mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra retry; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

// Someone's place in the ring.
struct Ring {
    Barriers &barriers;
    int slots;
    int slot = 0;
    uint32_t parity = 0;  // of the slot's phase: how often the ring has been gone through before

    // The block comes together before anyone else uses the ring. Lanes of one warp would open barriers one after the other.
    __device__ void open() {
        const int own = threadIdx.x / 32;
        if (threadIdx.x % 32 > 0 || own >= slots) return;
        mbarrier_init(&barriers.full[own], TEAM_THREADS);
        mbarrier_init(&barriers.empty[own], WARPS);
    }

    __device__ void go_to(int index) {
        slot = index, parity = 0;
        if (index < slots) return;
        slot = index % slots;
        parity = index / slots & 1;
    }
    // By fewer places than there are slots.
    __device__ void advance(int places) {
        slot += places;
        if (slot < slots) return;
        slot -= slots;
        parity ^= 1;
    }

    __device__ void wait_until_free() const { wait(&barriers.empty[slot], parity ^ 1); }
    __device__ void wait_until_full() const { wait(&barriers.full[slot], parity); }

    // The slot is full once all threads that fetch have said so and their copies so far are there.
    __device__ void fill() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barriers.full[slot])) : "memory");
    }
    // The slot is free once every warp of a team has said so.
    __device__ void free() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barriers.empty[slot])) : "memory");
    }
};

}  // namespace
}  // namespace attention::band
