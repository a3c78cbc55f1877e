// Tensor maps: copies of boxes of a tensor into shared memory, with zeros where a box reaches past an edge (PTX ISA,
// cp.async.bulk.tensor; sm_90 on).
#pragma once

#include <atomic>
#include <cstdint>
#include <cuda.h>
#include <cuda_runtime.h>

#include "mbarrier.cuh"

// Copies the box at the given coordinates, in elements, fastest first, and reports its bytes to the barrier.
__device__ __forceinline__ void tensor_copy(void *to, const CUtensorMap &map, int x, int y, int z, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
        : "memory");
}

// The same into each block of the cluster whose bit is set in `ranks`, in the same place there, where it is reported too.
__device__ __forceinline__ void tensor_copy_multicast(void *to, const CUtensorMap &map, int x, int y, uint64_t *barrier,
                                                      uint16_t ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(ranks)
        : "memory");
}

namespace tensor_map {
namespace {

// The driver's function, which the runtime finds.
std::atomic<decltype(&cuTensorMapEncodeTiled)> encode_tiled;

// Finds it: once, before `encode`.
inline cudaError_t prepare() {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorCallRequiresNewerDriver;
    encode_tiled = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    return cudaSuccess;
}

// A tensor of contiguous elements along its first dimension; `strides` are in bytes, of the others.
template <int Rank>
cudaError_t encode(CUtensorMap *map, CUtensorMapDataType type, CUtensorMapSwizzle swizzle, const void *tensor,
                   const cuuint64_t (&dims)[Rank], const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank]) {
    const auto function = encode_tiled.load();
    if (function == nullptr) return cudaErrorInitializationError;
    cuuint32_t steps[Rank];
    for (cuuint32_t &step : steps) step = 1;
    const CUresult result =
        function(map, type, Rank, const_cast<void *>(tensor), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace tensor_map
