// Thread-block clusters: blocks of one cluster run together and write into each other's shared memory (PTX ISA, sm_90 on).
// Before sm_90 a cluster is one block, and these are what is left of them.
#pragma once

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#else
#define HAS_CLUSTERS 0
#endif

// Says that this block runs, without waiting for the others.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}

// Waits until every block of the cluster has arrived.
__device__ __forceinline__ void cluster_wait() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Makes what was written before visible to the whole cluster, and waits for the others to do the same.
__device__ __forceinline__ void cluster_sync() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    cluster_wait();
#else
    __syncthreads();
#endif
}

// Writes to where `local` would be in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ void store_to_rank(uint32_t *local, int rank, uint32_t value) {
#if HAS_CLUSTERS
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
#else
    *local = value;
#endif
}

__device__ __forceinline__ void store_to_rank(float *local, int rank, float value) {
    store_to_rank(reinterpret_cast<uint32_t *>(local), rank, __float_as_uint(value));
}
