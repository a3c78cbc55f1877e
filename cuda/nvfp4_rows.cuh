// NVFP4 activations: rows as they are read, and the arithmetic of number_formats::nvfp4, step by step, so that the numbers are
// the CPU arm's bit for bit. Numbers are E2M1 times E4M3: at most six significant bits, exact in BF16.
#pragma once

#include <cstdint>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "bf16x8.cuh"
#include "rows.cuh"

namespace nvfp4 {
namespace {

constexpr int BLOCK = 16;  // elements under one scale
constexpr float MAX_E2M1 = 6.0f, MAX_E4M3 = 448.0f;

// Half a block.
struct alignas(16) Vector {
    static constexpr int LENGTH = 8;
    float x[LENGTH];

    // Infinity and NaN are the largest of all when the magnitudes' bits are compared as integers.
    __device__ uint32_t largest_magnitude() const {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < LENGTH; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
        return largest;
    }
};

// Rows on their way to a quantiser.
template <typename T>
struct Rows {
    using Element = T;

    const T *x;                    // [M, K]
    const float *inverse_balance;  // [K], or null
    int64_t K;                     // a multiple of 16
    bool single_level;             // whether the global scale is 1, not the row's own

    // Rounded to BF16; zeros past the end of the row.
    __device__ uint4 bits(int64_t m, int64_t vector) const {
        const int64_t k = vector * Vector::LENGTH;
        return k < K ? load_row8<true>(x + m * K + k, Vector::LENGTH) : make_uint4(0, 0, 0, 0);
    }

    // 1 / s where there is a balance, which no kernel writes; zeros past the end of the row.
    __device__ Vector factors(int64_t vector) const {
        Vector out = {};
        const int64_t k = vector * Vector::LENGTH;
        if (inverse_balance != nullptr && k < K)
#pragma unroll
            for (int i = 0; i < Vector::LENGTH; i += 4)
                *reinterpret_cast<float4 *>(out.x + i) = *reinterpret_cast<const float4 *>(inverse_balance + k + i);
        return out;
    }

    // Times 1 / s in FP32.
    __device__ Vector balanced(const uint4 &bits, const Vector &factors) const {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
        Vector out;
#pragma unroll
        for (int i = 0; i < Vector::LENGTH; i++) {
            out.x[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
            if (inverse_balance != nullptr) out.x[i] = __fmul_rn(out.x[i], factors.x[i]);
        }
        return out;
    }

    __device__ Vector load(int64_t m, int64_t vector) const { return balanced(bits(m, vector), factors(vector)); }

    // A row's global scale, by its largest magnitude. A row that is not finite has NaN, so that its results are NaN too.
    __device__ float global(uint32_t largest) const {
        if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
        return single_level ? 1.0f : __fdiv_rn(__uint_as_float(largest), MAX_E2M1 * MAX_E4M3);
    }
};

// Rows that are multiplied by silu of their gates first. A type of its own: the instructions of it would be in the way of other rows.
struct GatedRows : Rows<__nv_bfloat16> {
    const __nv_bfloat16 *gate;  // [M, K]

    __device__ uint4 bits(int64_t m, int64_t vector) const {
        const int64_t k = vector * Vector::LENGTH;
        if (k >= K) return make_uint4(0, 0, 0, 0);
        const uint4 in = load_row8<true>(x + m * K + k, Vector::LENGTH);
        return bf16x8::silu_mul(load_row8<true>(gate + m * K + k, Vector::LENGTH), in);
    }
};

// The largest of a block's threads.
__device__ __forceinline__ uint32_t largest_of_block(uint32_t largest) {
    __shared__ uint32_t by_warp[32];
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    return __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? by_warp[threadIdx.x % 32] : 0);
}

// Division by one positive number, correctly rounded as __fdiv_rn is where the quotient is not far from one. Dividend and
// divisor are first brought away from the ends of FP32's range by a power of two. Two corrections by the remainder are then
// enough: after the first the quotient is one of the two nearest, and the second rounds as a division does (Markstein, 1990).
struct Divisor {
    float lift, divisor, reciprocal;

    __device__ static Divisor of(float divisor) {
        const float lift = divisor < 0x1p-60f ? 0x1p80f : divisor > 0x1p60f ? 0x1p-80f : 1.0f;
        return {lift, divisor * lift, __frcp_rn(divisor * lift)};
    }
    __device__ float divide(float x) const {
        x = __fmul_rn(x, lift);
        float quotient = __fmul_rn(x, reciprocal);
        quotient = __fmaf_rn(__fmaf_rn(-quotient, divisor, x), reciprocal, quotient);
        return __fmaf_rn(__fmaf_rn(-quotient, divisor, x), reciprocal, quotient);
    }
};

// One quotient, correctly rounded; quick where nothing is near the ends of FP32's range.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
    const bool moderate = x > 0x1p-60f && x < 0x1p60f && divisor > 0x1p-60f && divisor < 0x1p60f;
    return moderate ? Divisor{1.0f, divisor, reciprocal}.divide(x) : __fdiv_rn(x, divisor);
}

// The nearest E2M1 magnitude, ties to the even code, without saturation. Below 2 the numbers are 1/2 apart, then twice as far in
// each binade: adding and subtracting 1.5 * 2^22 binades rounds to multiples of that distance.
__device__ __forceinline__ float round_to_e2m1(float magnitude) {
    const float binade = __uint_as_float(max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u));
    return __fmaf_rn(binade, -0x1.8p22f, __fmaf_rn(binade, 0x1.8p22f, magnitude));
}

// What a block's elements are quantised by.
struct BlockScale {
    __nv_fp8_storage_t code;  // UE4M3
    __nv_bfloat162 scale;     // the number it stands for, twice
    Divisor step;             // scale times global
    bool live;                // false for blocks of zeros, and for a step of NaN: that of a row that is not finite, and 0 / 0

    // `reciprocal` is the global's.
    __device__ static BlockScale of(uint32_t largest, float global, float reciprocal) {
        const float wanted = divide(divide(__uint_as_float(largest), MAX_E2M1, 1.0f / MAX_E2M1), global, reciprocal);
        const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
        const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
        const float step = __fmul_rn(scale, global);
        return {code, __float2bfloat162_rn(scale), Divisor::of(step), step > 0.0f};
    }

    // Two elements' numbers, as BF16.
    __device__ uint32_t quantise(float even, float odd) const {
        if (!live) return 0;
        const float low = round_to_e2m1(step.divide(fabsf(even))), high = round_to_e2m1(step.divide(fabsf(odd)));
        // Two significant bits: the upper halves are all of them.
        const uint32_t rounded = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        const uint32_t signs = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x7632) & 0x80008000u;
        const __nv_bfloat162 most = __float2bfloat162_rn(MAX_E2M1);
        const __nv_bfloat162 number = __hmul2(__hmin2(*reinterpret_cast<const __nv_bfloat162 *>(&rounded), most), scale);
        return *reinterpret_cast<const uint32_t *>(&number) | signs;
    }

    __device__ uint4 quantise(const Vector &in) const {
        return make_uint4(quantise(in.x[0], in.x[1]), quantise(in.x[2], in.x[3]), quantise(in.x[4], in.x[5]),
                          quantise(in.x[6], in.x[7]));
    }
};

}  // namespace
}  // namespace nvfp4
