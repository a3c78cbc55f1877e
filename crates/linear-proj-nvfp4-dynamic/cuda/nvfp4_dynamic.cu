// linear_proj/nvfp4_dynamic: the shared NVFP4 projection, without a balance.
#include "nvfp4_dynamic.h"

#include "nvfp4.cuh"

extern "C" int nvfp4_dynamic_prepare(int prefill) { return nvfp4::prepare(prefill != 0); }

extern "C" int64_t nvfp4_dynamic_scratch_bytes(int64_t m, int64_t k, int multiprocessors) {
    return nvfp4::scratch_bytes(m, k, multiprocessors);
}

extern "C" int nvfp4_dynamic_project(const nvfp4_dynamic_call *call, cudaStream_t stream) {
    const nvfp4::Call whole = {
        {static_cast<const uint4 *>(call->codes), static_cast<const unsigned short *>(call->scales), call->bias},
        call->global,
        nullptr,
        call->single_level != 0,
        call->x,
        call->y,
        call->scratch,
        call->m,
        call->n,
        call->k,
        static_cast<nvfp4::DType>(call->dtype),
        call->clusters != 0,
        call->multiprocessors,
        call->overlap != 0,
    };
    return nvfp4::project(whole, stream);
}

extern "C" const char *nvfp4_dynamic_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
