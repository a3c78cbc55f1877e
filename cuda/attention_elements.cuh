// How stored elements become operands of the tensor core.
//
// A lane's four elements of keys along head_dim are two registers of one row; its four elements of values along the positions are
// two registers. The order of either inside a step is free as long as both operands agree.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "mma.cuh"

namespace attention::band {
namespace {

template <typename Element>
struct Operands;

// Keys and values enter as they are, weights are rounded to BF16.
template <>
struct Operands<__nv_bfloat16> {
    static constexpr float VALUE_SCALE = 1.0f;

    // Step `i` of a chunk of keys: elements 4i to 4i + 3.
    __device__ static void keys(const uint32_t (&chunk)[4], int i, uint32_t &first, uint32_t &second) {
        first = chunk[2 * i];
        second = chunk[2 * i + 1];
    }

    // Element `i` of two positions.
    __device__ static uint32_t values(const uint32_t *first, const uint32_t *second, int i) {
        return __byte_perm(first[i / 2], second[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }

    __device__ static float value(const char *address) {
        return __bfloat162float(*reinterpret_cast<const __nv_bfloat16 *>(address));
    }

    // Keys and values that are not finite keep being so as operands.
    __device__ static uint32_t not_finite(uint32_t) { return 0; }

    // The word with zeros for elements that are not finite, which `found` then says.
    __device__ static uint32_t finite_part(uint32_t word, uint32_t &found) {
        const uint32_t mask = ((word & 0x7f80u) == 0x7f80u ? 0xffffu : 0) |
                              ((word & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0);
        found |= mask;
        return word & ~mask;
    }

    __device__ static uint32_t weights(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    __device__ static float weight(const char *address) { return value(address); }
    __device__ static float2 to_floats(uint32_t pair) {
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&pair));
    }

    __device__ static void multiply_values(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k16(d, a, b0, b1);
    }
};

// Keys become BF16, as queries are. Values become F16, smaller by 2^8, and weights are rounded to F16: that takes an instruction
// less than BF16, and keeps three bits more of a weight. Both are exact but for NaN, whose code gives 480: nothing that
// is masked can spoil a sum, and what is not masked is looked for.
template <>
struct Operands<__nv_fp8_e4m3> {
    static constexpr float VALUE_SCALE = 256.0f;

    // Bytes `i` of two words, each with its sign in all bits above: what a shift then moves to where 16-bit formats have their
    // exponents.
    __device__ static uint32_t spread(uint32_t first, int i, uint32_t second, int j) {
        uint32_t result;
        asm("prmt.b32 %0, %1, %2, %3;"
            : "=r"(result)
            : "r"(first), "r"(second), "r"(i | (i | 8) << 4 | (j | 4) << 8 | (j | 12) << 12));
        return result;
    }

    // With E4M3's exponent where BF16's low bits are, a number is smaller by 2^120; subnormals are too.
    __device__ static uint32_t to_bf16(uint32_t spread) {
        uint32_t result;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(result)
            : "r"((spread << 4) & 0x87f087f0u), "r"(0x7b807b80u), "r"(0x80008000u));
        return result;
    }

    __device__ static void keys(const uint32_t (&chunk)[4], int i, uint32_t &first, uint32_t &second) {
        first = to_bf16(spread(chunk[i], 0, chunk[i], 1));
        second = to_bf16(spread(chunk[i], 2, chunk[i], 3));
    }

    __device__ static uint32_t values(const uint32_t *first, const uint32_t *second, int i) {
        return (spread(first[i / 4], i % 4, second[i / 4], i % 4) << 7) & 0xbf80bf80u;
    }

    __device__ static float value(const char *address) {
        return static_cast<float>(*reinterpret_cast<const __nv_fp8_e4m3 *>(address));
    }

    // Bit 7 of a byte says that it is the code of a NaN.
    __device__ static uint32_t not_finite(uint32_t word) { return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

    __device__ static uint32_t finite_part(uint32_t word, uint32_t &) { return word; }

    __device__ static uint32_t weights(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    __device__ static float weight(const char *address) {
        return __half2float(*reinterpret_cast<const __half *>(address));
    }
    __device__ static float2 to_floats(uint32_t pair) {
        return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
    }

    __device__ static void multiply_values(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

}  // namespace
}  // namespace attention::band
