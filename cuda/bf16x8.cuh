// Eight consecutive BF16 elements, which are one load, as FP32.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "load.cuh"

namespace bf16x8 {

constexpr int WIDTH = 8;

struct Floats {
    float value[WIDTH];
};

// Exact: the bits of a BF16 are the upper half of its FP32.
__device__ __forceinline__ Floats unpack(const uint4 &bits) {
    Floats out;
    const uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out.value[2 * i] = __uint_as_float(pairs[i] << 16);
        out.value[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
    return out;
}

// Rounds each once.
__device__ __forceinline__ uint4 pack(const Floats &in) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in.value[2 * i], in.value[2 * i + 1]);
        pairs[i] = *reinterpret_cast<const uint32_t *>(&pair);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ __forceinline__ uint4 load(const void *elements, int64_t index) {
    return load_cached(static_cast<const uint4 *>(elements) + index);
}

__device__ __forceinline__ void store(void *elements, int64_t index, const uint4 &bits) {
    static_cast<uint4 *>(elements)[index] = bits;
}

// Eight consecutive FP32 elements.
__device__ __forceinline__ Floats load_floats(const float *elements, int64_t index) {
    const float4 low = reinterpret_cast<const float4 *>(elements)[2 * index];
    const float4 high = reinterpret_cast<const float4 *>(elements)[2 * index + 1];
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

__device__ __forceinline__ void store_floats(float *elements, int64_t index, const Floats &in) {
    float4 *to = reinterpret_cast<float4 *>(elements) + 2 * index;
    to[0] = {in.value[0], in.value[1], in.value[2], in.value[3]};
    to[1] = {in.value[4], in.value[5], in.value[6], in.value[7]};
}

// The sum over a warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

// Few instructions, as a projection that makes its own rows has this in its way: e^-x to 2 + 1.2 |x| units in the last place, its
// reciprocal to one. Nothing is left of it where e^-x overflows.
__device__ __forceinline__ float sigmoid(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + __expf(-x)));
    return result;
}

// silu(gate) * up, rounded once.
__device__ __forceinline__ uint4 silu_mul(const uint4 &gate, const uint4 &up) {
    const Floats by = unpack(up);
    Floats out = unpack(gate);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out.value[i] = out.value[i] * sigmoid(out.value[i]) * by.value[i];
    return pack(out);
}

}  // namespace bf16x8
