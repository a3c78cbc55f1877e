// linear_proj/nvfp4_dynamic: the shared NVFP4 projection, without a balance.
#include "nvfp4_dynamic.h"

#include "nvfp4.cuh"

extern "C" int nvfp4_dynamic_prepare(int prefill, int native) { return nvfp4::prepare(prefill != 0, native != 0); }

extern "C" int64_t nvfp4_dynamic_scratch_bytes(int64_t m, int64_t k, int multiprocessors) {
    return nvfp4::scratch_bytes(m, k, multiprocessors);
}

extern "C" int nvfp4_dynamic_project(const nvfp4_dynamic_call *call, cudaStream_t stream) {
    if (call->count < 1 || call->count > NVFP4_DYNAMIC_MAX_MATRICES) return cudaErrorInvalidValue;
    nvfp4::Call shared = {};
    for (; shared.count < call->count; shared.count++) {
        const nvfp4_dynamic_matrix &matrix = call->matrices[shared.count];
        shared.matrices[shared.count] = {
            {static_cast<const uint4 *>(matrix.codes), static_cast<const unsigned short *>(matrix.scales), matrix.bias},
            matrix.global,
            matrix.y,
            matrix.n};
    }
    shared.inverse_balance = nullptr;
    shared.single_level = call->single_level != 0;
    shared.x = call->x;
    shared.gate = call->gate;
    shared.scratch = call->scratch;
    shared.chunk = call->chunk;
    shared.m = call->m;
    shared.k = call->k;
    shared.dtype = static_cast<nvfp4::DType>(call->dtype);
    shared.clusters = call->clusters != 0;
    shared.multiprocessors = call->multiprocessors;
    shared.native = call->native != 0;
    shared.overlap = call->overlap != 0;
    return nvfp4::project(shared, stream);
}

extern "C" const char *nvfp4_dynamic_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
