// A projection of NVFP4 weights with NVFP4 activations: up to 16 rows in the decode band, and more by the prefill band where the
// device has its tensor cores (sm_90a).
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "nvfp4_decode.cuh"
#include "nvfp4_prefill.cuh"

namespace nvfp4 {

enum class DType { F32, F16, BF16 };

// y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] + bias[n]), where w and xq are E2M1 times E4M3 and xq is
// bf16(x[m, k]) * inverse_balance[k] quantised.
struct Call {
    PackedWeights weights;
    float global;                  // of the weights
    const float *inverse_balance;  // [K], or null
    bool single_level;             // whether the rows' global scales are 1
    const void *x;                 // [M, K]
    void *y;                       // [M, N]
    void *scratch;                 // scratch_bytes of it
    int64_t m, n, k;               // k a multiple of 16
    DType dtype;                   // of x and y
    bool clusters;                 // whether the device has thread-block clusters: sm_90 on
    int multiprocessors;           // where the prefill band is to take more rows than a few, their number, else 0
    bool overlap;                  // whether the first kernel may start before the one before it in the stream is over
};

// Passes of the decode band take less time than the prefill band while there are no more than this.
constexpr int64_t PASSES = 2;

// Rows of a call that the prefill band takes.
inline bool prefills(int64_t m, int multiprocessors) { return multiprocessors > 0 && m > PASSES * decode_band::MAX_ROWS; }

inline int64_t scratch_bytes(int64_t m, int64_t k, int multiprocessors) {
    return prefills(m, multiprocessors) ? nvfp4_prefill::Scratch::bytes(m, k) : nvfp4_decode::Scratch::bytes(k);
}

template <typename T>
cudaError_t project(const Call &call, cudaStream_t stream) {
    const T *x = static_cast<const T *>(call.x);
    T *y = static_cast<T *>(call.y);
    if (prefills(call.m, call.multiprocessors)) {
        const Rows<T> rows = {x, call.inverse_balance, call.k, call.single_level};
        return nvfp4_prefill::launch(call.weights, call.global, rows, y, call.scratch, call.m, call.n, call.multiprocessors, stream);
    }
    const nvfp4_decode::Scratch scratch(call.scratch, call.k);
    nvfp4_decode::Format format;
    static_cast<PackedWeights &>(format) = call.weights;
    format.global = call.global;
    for (int64_t first = 0; first < call.m; first += decode_band::MAX_ROWS) {
        const int64_t m = call.m - first < decode_band::MAX_ROWS ? call.m - first : decode_band::MAX_ROWS;
        const Rows<T> rows = {x + first * call.k, call.inverse_balance, call.k, call.single_level};
        const cudaError_t error = nvfp4_decode::launch(format, rows, y + first * call.n, scratch, m, call.n, call.clusters,
                                                       call.overlap, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

inline cudaError_t project(const Call &call, cudaStream_t stream) {
    if (call.k < BLOCK || call.k % BLOCK != 0 || call.m < 1 || call.n < 1) return cudaErrorInvalidValue;
    switch (call.dtype) {
        case DType::F32: return project<float>(call, stream);
        case DType::F16: return project<__half>(call, stream);
        case DType::BF16: return project<__nv_bfloat16>(call, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename T>
cudaError_t prepare(bool prefill) {
    const cudaError_t error = nvfp4_decode::prepare<T>();
    return error != cudaSuccess || !prefill ? error : nvfp4_prefill::prepare<T>();
}

// Loads the kernels into the current context, so that no later call does.
inline cudaError_t prepare(bool prefill) {
    for (cudaError_t error : {prepare<float>(prefill), prepare<__half>(prefill), prepare<__nv_bfloat16>(prefill)})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

}  // namespace nvfp4
