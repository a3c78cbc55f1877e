// Barriers in shared memory that count arrivals and bytes, and the bulk copies that report to them (PTX ISA, mbarrier and
// cp.async.bulk; sm_90 on).
//
// A barrier's phases alternate in parity, from 0. A wait names the parity of the phase that it waits out.
#pragma once

#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A phase ends once `arrivals` have arrived and every byte that was announced has come.
__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the cluster and to bulk copies; a cluster barrier follows.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "retry: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Arrives, and announces bytes that copies will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrives at the barrier that is where `barrier` is, in the cluster's block `rank`. It publishes no writes: it says that reads
// are over.
__device__ __forceinline__ void mbarrier_arrive_at_rank(uint64_t *barrier, int rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// Copies a multiple of 16 bytes, aligned to 16, into the same place of each block of the cluster whose bit is set in `ranks`,
// and reports the bytes to the barrier in the same place there.
__device__ __forceinline__ void bulk_copy_multicast(void *to, const void *from, uint32_t bytes, uint64_t *barrier,
                                                    uint16_t ranks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ranks)
        : "memory");
}
