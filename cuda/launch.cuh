// Launches: clusters, and overlap with the kernel before (programmatic dependent launch, sm_90 on).
//
// A kernel launched with `overlap` may start while the kernel before it in the stream still runs. It may read what no kernel
// writes, such as weights; before it reads anything else, or writes at all, it calls `wait_for_previous`. Every kernel of ours
// does, from every thread, so that when one has passed its wait, all kernels before the previous one are over too.
#pragma once

#include <cuda_runtime.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define HAS_DEPENDENT_LAUNCH 1
#else
#define HAS_DEPENDENT_LAUNCH 0
#endif

// Waits until the kernel before is over and its writes are visible; returns at once in a kernel launched without `overlap`.
__device__ __forceinline__ void wait_for_previous() {
#if HAS_DEPENDENT_LAUNCH
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start where it finds room, once every block of this one has said so or is over.
__device__ __forceinline__ void let_next_start() {
#if HAS_DEPENDENT_LAUNCH
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

struct Launch {
    int64_t blocks;
    int threads;
    int cluster = 1;  // blocks of a cluster; they divide `blocks`
    size_t shared = 0;
    bool overlap = false;
    cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(const Launch &launch, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch.threads));
    config.dynamicSmemBytes = launch.shared;
    config.stream = launch.stream;
    config.attrs = attributes;
    if (launch.cluster > 1) {
        cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = static_cast<unsigned>(launch.cluster);
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (launch.overlap) {
        cudaLaunchAttribute &overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}
