// How queries and stored elements become operands of the tensor core.
//
// A lane's four elements of keys along head_dim are two registers of one row; its four elements of values along the positions are
// two registers. The order of either inside a step is free as long as both operands agree.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace attention::band {
namespace {

template <typename Element>
struct Operands;

// Everything enters as it is, weights are rounded to BF16.
template <>
struct Operands<__nv_bfloat16> {
    // Step `i` of a chunk of keys: elements 4i to 4i + 3.
    __device__ static void keys(const uint32_t (&chunk)[4], int i, uint32_t &first, uint32_t &second) {
        first = chunk[2 * i];
        second = chunk[2 * i + 1];
    }

    // Elements 2i and 2i + 1 of two positions.
    __device__ static void values(const uint32_t *first, const uint32_t *second, int i, uint32_t &even, uint32_t &odd) {
        even = __byte_perm(first[i], second[i], 0x5410);
        odd = __byte_perm(first[i], second[i], 0x7632);
    }

    static constexpr int BITS = 16;
    // The sign bits of those elements that are not finite.
    __device__ static uint32_t not_finite(uint32_t word) { return ((word & 0x7fff7fffu) + 0x00800080u) & 0x80008000u; }

    __device__ static float value(const char *address) {
        return __bfloat162float(*reinterpret_cast<const __nv_bfloat16 *>(address));
    }

    // Eight elements of a query, and what their products are to be multiplied by.
    __device__ static uint4 queries(uint4 elements, float &factor) {
        factor = 1.0f;
        return elements;
    }

    __device__ static uint32_t weights(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    __device__ static float2 to_floats(uint32_t pair) {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&pair));
    }
    __device__ static float weight(const char *address) { return value(address); }
};

// Everything enters as F16, which holds all of E4M3, has an instruction for it, and keeps three bits more of a weight than BF16.
template <>
struct Operands<__nv_fp8_e4m3> {
    // Four codes. The intrinsic alone would move the upper two down first.
    __device__ static void to_f16(uint32_t codes, uint32_t &low, uint32_t &high) {
#if __CUDA_ARCH__ >= 890
        asm("{ .reg .b16 first, second; mov.b32 {first, second}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, first; cvt.rn.f16x2.e4m3x2 %1, second; }"
            : "=r"(low), "=r"(high)
            : "r"(codes));
#else
        low = two_to_f16(codes & 0xffffu);
        high = two_to_f16(codes >> 16);
#endif
    }
    __device__ static uint32_t two_to_f16(uint32_t codes) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
        return pair.x | static_cast<uint32_t>(pair.y) << 16;
    }

    __device__ static void keys(const uint32_t (&chunk)[4], int i, uint32_t &first, uint32_t &second) {
        to_f16(chunk[i], first, second);
    }

    __device__ static void values(const uint32_t *first, const uint32_t *second, int i, uint32_t &even, uint32_t &odd) {
        to_f16(__byte_perm(first[i / 2], second[i / 2], i % 2 == 0 ? 0x5140 : 0x7362), even, odd);
    }

    static constexpr int BITS = 8;
    __device__ static uint32_t not_finite(uint32_t word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

    __device__ static float value(const char *address) {
        return static_cast<float>(*reinterpret_cast<const __nv_fp8_e4m3 *>(address));
    }

    // A power of two brings the largest of a query's elements to between 2^14 and 2^15. Elements keep all their bits but for those
    // that are 2^29 times smaller, which end at 2^-24. A query that is not finite has the factor NaN. Called by a whole warp, of
    // which each lane has eight elements of one query, or zeros.
    __device__ static uint4 queries(uint4 elements, float &factor) {
        const uint32_t words[4] = {elements.x, elements.y, elements.z, elements.w};
        uint32_t pair = 0;
#pragma unroll
        for (uint32_t word : words) pair = __vmaxu2(pair, word & 0x7fff7fffu);
        const int exponent = static_cast<int>(__reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16)) >> 7);
        const int power = min(127 + 14 - exponent, 126);
        const float scale = __uint_as_float(static_cast<uint32_t>(127 + power) << 23);
        factor = exponent == 255 ? NAN : __uint_as_float(static_cast<uint32_t>(127 - power) << 23);
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&words[i]));
            const __half2 scaled = __floats2half2_rn(pair.x * scale, pair.y * scale);
            out[i] = *reinterpret_cast<const uint32_t *>(&scaled);
        }
        return {out[0], out[1], out[2], out[3]};
    }

    __device__ static uint32_t weights(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    __device__ static float2 to_floats(uint32_t pair) {
        return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    }
    __device__ static float weight(const char *address) {
        return __half2float(*reinterpret_cast<const __half *>(address));
    }
};

}  // namespace
}  // namespace attention::band
