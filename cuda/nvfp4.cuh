// A projection of NVFP4 weights with NVFP4 activations: up to 16 rows in the decode band, through BF16 or, where the device has
// tensor cores for NVFP4 (sm_120a), natively; more rows by the prefill band where the device has its tensor cores (sm_90a).
//
// All of it is in namespaces without a name, as each implementation compiles it for itself. nvcc gives each object a stub of
// its own for a kernel template, but of functions under one name the linker keeps one: a launch would then take another
// object's kernel than the one that `prepare` gave its shared memory.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

#include "nvfp4_decode.cuh"
#include "nvfp4_native.cuh"
#include "nvfp4_prefill.cuh"

namespace nvfp4 {
namespace {

enum class DType { F32, F16, BF16 };

// A matrix of weights, and where the rows go that it makes.
struct Matrix {
    PackedWeights weights;
    float global;  // of the weights
    void *y;       // [M, N]
    int64_t n;
};

// y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] + bias[n]) for each matrix, where w and xq are E2M1 times
// E4M3 and xq is bf16(x[m, k]) * inverse_balance[k] quantised; with a gate, x is bf16(silu(gate) * x).
struct Call {
    Matrix matrices[decode_band::MAX_MATRICES];
    int count;                     // of matrices
    const float *inverse_balance;  // [K], or null
    bool single_level;             // whether the rows' global scales are 1
    const void *x;                 // [M, K]
    const void *gate;              // [M, K] of BF16, or null; M is then at most 16
    void *scratch;                 // scratch_bytes of it for calls of up to `chunk` rows
    int64_t chunk;                 // rows that are taken at a time, at least those of the decode band
    int64_t m, k;                  // k a multiple of 16
    DType dtype;                   // of x and y
    bool clusters;                 // whether the device has thread-block clusters: sm_90 on
    int multiprocessors;           // where the prefill band is to take more rows than a few, their number, else 0
    bool native;                   // whether the weights are packed for the native kernels: sm_120a, no prefill band
    bool overlap;                  // whether the first kernel may start before the one before it in the stream is over
};

// Passes of the decode band take less time than the prefill band while there are no more than this.
constexpr int64_t PASSES = 2;

// Whether the prefill band takes so many rows.
inline bool prefills(int64_t m, int multiprocessors) { return multiprocessors > 0 && m > PASSES * decode_band::MAX_ROWS; }

// Scratch memory for calls of up to m rows.
inline int64_t scratch_bytes(int64_t m, int64_t k, int multiprocessors) {
    const int64_t decode = nvfp4_decode::Scratch::bytes(k);
    if (!prefills(m, multiprocessors)) return decode;
    const int64_t prefill = nvfp4_prefill::Scratch::bytes(m, k);
    return prefill < decode ? decode : prefill;
}

inline nvfp4_decode::Format format_of(const Matrix &matrix, nvfp4_decode::Format) {
    nvfp4_decode::Format format;
    static_cast<PackedWeights &>(format) = matrix.weights;
    format.global = matrix.global;
    return format;
}

inline nvfp4_native::Format format_of(const Matrix &matrix, nvfp4_native::Format) {
    const PackedWeights &weights = matrix.weights;
    return {weights.codes, reinterpret_cast<const uint32_t *>(weights.scales), weights.bias, matrix.global};
}

// The matrices of a call, whose results start with row `first`.
template <typename Format, typename T>
decode_band::Matrices<Format, T> matrices_of(const Call &call, int64_t first) {
    decode_band::Matrices<Format, T> matrices = {};
    for (; matrices.count < call.count; matrices.count++) {
        const Matrix &matrix = call.matrices[matrices.count];
        matrices.all[matrices.count] = {format_of(matrix, Format()), static_cast<T *>(matrix.y) + first * matrix.n, matrix.n};
    }
    return matrices;
}

// Up to 16 rows of a call, from row `first` on.
template <typename Rows>
cudaError_t project_band(const Call &call, const Rows &rows, int64_t first, int64_t m, cudaStream_t stream) {
    using T = typename Rows::Element;
    const nvfp4_decode::Scratch scratch(call.scratch, call.k);
    return call.native ? nvfp4_native::launch(matrices_of<nvfp4_native::Format, T>(call, first), rows, scratch, m, call.clusters,
                                              call.overlap, stream)
                       : nvfp4_decode::launch(matrices_of<nvfp4_decode::Format, T>(call, first), rows, scratch, m, call.clusters,
                                              call.overlap, stream);
}

// Rows `first` on of a call, m of them.
template <typename T>
cudaError_t project_rows(const Call &call, int64_t first, int64_t m, cudaStream_t stream) {
    const Rows<T> rows = {static_cast<const T *>(call.x) + first * call.k, call.inverse_balance, call.k, call.single_level};
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        if (call.gate != nullptr) {
            const GatedRows gated = {rows, static_cast<const T *>(call.gate) + first * call.k};
            return project_band(call, gated, first, m, stream);
        }
    if (!prefills(m, call.multiprocessors)) return project_band(call, rows, first, m, stream);
    for (int i = 0; i < call.count; i++) {
        const Matrix &matrix = call.matrices[i];
        const cudaError_t error =
            nvfp4_prefill::launch(matrix.weights, matrix.global, rows, static_cast<T *>(matrix.y) + first * matrix.n, call.scratch,
                                  m, matrix.n, call.multiprocessors, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t project(const Call &call, cudaStream_t stream) {
    for (int64_t first = 0; first < call.m;) {
        int64_t m = call.m - first < call.chunk ? call.m - first : call.chunk;
        if (!prefills(m, call.multiprocessors) && m > decode_band::MAX_ROWS) m = decode_band::MAX_ROWS;
        const cudaError_t error = project_rows<T>(call, first, m, stream);
        if (error != cudaSuccess) return error;
        first += m;
    }
    return cudaSuccess;
}

inline cudaError_t project(const Call &call, cudaStream_t stream) {
    const bool blocks = call.k >= BLOCK && call.k % BLOCK == 0;
    if (call.gate != nullptr && (call.dtype != DType::BF16 || call.m > decode_band::MAX_ROWS)) return cudaErrorInvalidValue;
    if (!blocks || call.m < 1 || call.chunk < decode_band::MAX_ROWS) return cudaErrorInvalidValue;
    for (int i = 0; i < call.count; i++)
        if (call.matrices[i].n < 1) return cudaErrorInvalidValue;
    switch (call.dtype) {
        case DType::F32: return project<float>(call, stream);
        case DType::F16: return project<__half>(call, stream);
        case DType::BF16: return project<__nv_bfloat16>(call, stream);
    }
    return cudaErrorInvalidValue;
}

template <typename Rows>
cudaError_t prepare_band(bool native) {
    return native ? nvfp4_native::prepare<Rows>() : nvfp4_decode::prepare<Rows>();
}

template <typename T>
cudaError_t prepare(bool prefill, bool native) {
    const cudaError_t error = prepare_band<Rows<T>>(native);
    return error != cudaSuccess || !prefill ? error : nvfp4_prefill::prepare<T>();
}

// Loads the kernels into the current context, so that no later call does: those of the decode band, native or not, and of the
// prefill band where asked.
inline cudaError_t prepare(bool prefill, bool native) {
    for (cudaError_t error : {prepare<float>(prefill, native), prepare<__half>(prefill, native),
                              prepare<__nv_bfloat16>(prefill, native), prepare_band<GatedRows>(native)})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

}  // namespace
}  // namespace nvfp4
