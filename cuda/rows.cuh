// Rows of activations: BF16, F16 or F32 in memory, BF16 in the products.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "load.cuh"

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ __forceinline__ __nv_bfloat16 to_bf16(float value) { return __float2bfloat16_rn(value); }
__device__ __forceinline__ __nv_bfloat16 to_bf16(__half value) { return __float2bfloat16_rn(__half2float(value)); }
__device__ __forceinline__ __nv_bfloat16 to_bf16(__nv_bfloat16 value) { return value; }

// A BF16 result in the type the rows came in: exact for F32, a second rounding for F16.
template <typename T>
__device__ __forceinline__ T from_bf16(__nv_bfloat16 value);
template <>
__device__ __forceinline__ float from_bf16<float>(__nv_bfloat16 value) { return __bfloat162float(value); }
template <>
__device__ __forceinline__ __half from_bf16<__half>(__nv_bfloat16 value) {
    return __float2half_rn(__bfloat162float(value));
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_bf16<__nv_bfloat16>(__nv_bfloat16 value) { return value; }

// An FP32 result in the type the rows came in, rounded once where that is narrower.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

// Eight consecutive activations as BF16.
struct alignas(16) Bf16x8 {
    __nv_bfloat16 value[8];
};

// Eight activations from `row` on, `left` of which there are; zeros past those. With `Whole`, all eight are there and start on
// 16 bytes.
template <bool Whole, typename T>
__device__ __forceinline__ uint4 load_row8(const T *row, int64_t left) {
    Bf16x8 out;
    if constexpr (Whole) {
        alignas(16) T in[8];
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(in) / 16); i++)
            reinterpret_cast<uint4 *>(in)[i] = load_cached(reinterpret_cast<const uint4 *>(row) + i);
#pragma unroll
        for (int i = 0; i < 8; i++) out.value[i] = to_bf16(in[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) out.value[i] = i < left ? to_bf16(row[i]) : __float2bfloat16_rn(0.0f);
    }
    return *reinterpret_cast<const uint4 *>(&out);
}
