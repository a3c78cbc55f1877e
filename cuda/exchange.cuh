// Words that the blocks of a cluster send into each other's shared memory: each word reports itself where it arrives (PTX ISA,
// st.async; sm_90 on). A barrier of the cluster would have to wait until all else that a block has written is visible to the
// whole device, which takes most of a microsecond.
#pragma once

#include <cstdint>

#include "cluster.cuh"
#include "mbarrier.cuh"

// In the shared memory of every block of the cluster, at the same place. One exchange each. A cluster of one block, which is also
// what a launch without clusters has, takes words as they are written.
struct Exchange {
    uint64_t arrived;

    // Says how many words will come. One thread does, before the blocks of the cluster have arrived at its barrier.
    __device__ void open(int blocks, int words) {
#if HAS_CLUSTERS
        if (blocks == 1) return;
        mbarrier_init(&arrived, 1);
        mbarrier_arrive_expecting(&arrived, words * static_cast<uint32_t>(sizeof(uint32_t)));
        mbarrier_init_fence();
#endif
    }

    // Sends a word to where `local` would be in block `rank`, once all blocks of the cluster are known to have opened theirs.
    __device__ void send(int blocks, uint32_t *local, int rank, uint32_t word) {
        if (blocks == 1) {
            *local = word;
            return;
        }
#if HAS_CLUSTERS
        asm volatile(
            "{ .reg .b32 to, barrier; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 barrier, %1, %2;\n"
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %3, [barrier]; }" ::"r"(shared_address(local)),
            "r"(shared_address(&arrived)), "r"(rank), "r"(word)
            : "memory");
#endif
    }
    __device__ void send(int blocks, float *local, int rank, float word) {
        send(blocks, reinterpret_cast<uint32_t *>(local), rank, __float_as_uint(word));
    }

    // Waits until all words have come. Every thread does; a barrier of the block has come since the opening.
    __device__ void receive(int blocks) {
        if (blocks == 1) {
            __syncthreads();
            return;
        }
#if HAS_CLUSTERS
        asm volatile(
            "{ .reg .pred done;\n"
            "retry: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
            "@!done bra retry; }" ::"r"(shared_address(&arrived))
            : "memory");
#endif
    }
};
