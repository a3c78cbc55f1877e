// linear_proj/nvfp4_dynamic for many rows: the quantiser that writes what the prefill band reads, and the NVFP4 format of it.
#pragma once

#include <cuda_fp8.h>

#include "prefill_band.cuh"

namespace nvfp4_prefill {

// A power-of-two multiple of an FP64 number as FP32 numbers, so that a result is finished without FP64: the number is
// (high + low) * rest to one part in 2^47, with 2^-60 <= |high| < 2^61 and `rest` a power of two that is 1 but for extreme
// rows.
struct alignas(16) RowScale {
    float high, low, rest, unused;
};

// Scales of 2^-208 and less make zeros of every sum, and those of 2^187 and more infinities, whatever `rest` says there.
__device__ __forceinline__ RowScale row_scale(double scale) {
    constexpr int MOST = 60;
    const int exponent = (__double2hiint(scale) >> 20 & 0x7ff) - 1023;  // scales are not negative
    const int rest = exponent - max(-MOST, min(exponent, MOST));
    // From here on 1024 for NaN and -1023 for zero do no harm: NaN stays, and zero too.
    const double scaled = scale * __hiloint2double((1023 - rest) << 20, 0);
    const float high = static_cast<float>(scaled);
    return {high, static_cast<float>(scaled - high), ldexpf(1.0f, max(-149, min(rest, 127))), 0.0f};
}

// What a call needs of scratch memory, aligned to 16 bytes: the activations' image, then a scale for each token, up to a whole
// unit of them.
struct Scratch {
    unsigned char *image;
    RowScale *rows;
    static int64_t bytes(int64_t m, int64_t k) {
        const int64_t units = (m + prefill_band::UNIT - 1) / prefill_band::UNIT;
        return prefill_band::image_bytes(m, k) + units * prefill_band::UNIT * static_cast<int64_t>(sizeof(RowScale));
    }
    Scratch(void *memory, int64_t m, int64_t k)
        : image(static_cast<unsigned char *>(memory)),
          rows(reinterpret_cast<RowScale *>(image + prefill_band::image_bytes(m, k))) {}
};

constexpr int BLOCK = 16;  // elements of an NVFP4 block
constexpr float MAX_E2M1 = 6.0f, MAX_E4M3 = 448.0f;
constexpr int QUANTISER_THREADS = 128;

// The larger magnitudes of two pairs of BF16. As integers infinity and NaN are the largest of all.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) { return __vmaxu2(a, b & 0x7fff7fffu); }

__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, const uint4 &b) {
    return larger_magnitudes(larger_magnitudes(larger_magnitudes(larger_magnitudes(a, b.x), b.y), b.z), b.w);
}

// The larger of a pair of non-negative BF16, as the bits of an FP32.
__device__ __forceinline__ uint32_t larger_of_pair(uint32_t pair) { return max(pair << 16, pair & 0xffff0000u); }

// value / step rounded once, where the quotient is large enough to matter; `reciprocal` is 1 / step rounded once, and step at
// least 2^-99. Two corrections by an exact remainder: after the first the quotient is one of the two nearest, and the second
// then rounds as a division does (Markstein, 1990).
__device__ __forceinline__ float divide(float value, float step, float reciprocal) {
    float quotient = __fmul_rn(value, reciprocal);
    quotient = __fmaf_rn(__fmaf_rn(-quotient, step, value), reciprocal, quotient);
    return __fmaf_rn(__fmaf_rn(-quotient, step, value), reciprocal, quotient);
}

// The nearest E2M1 magnitude, ties to the even code, beyond 6 saturating. Below 2 the numbers are 1/2 apart, then twice as far
// in each binade: adding and subtracting 1.5 * 2^22 binades rounds to multiples of that distance.
__device__ __forceinline__ float round_to_e2m1(float magnitude) {
    const float binade = __uint_as_float(max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u));
    const float rounded = __fmaf_rn(binade, 0x1.8p22f, magnitude);
    return fminf(__fmaf_rn(binade, -0x1.8p22f, rounded), MAX_E2M1);
}

// Quantises a block of BF16 in place. The arithmetic is number_formats::nvfp4's, so the values are the CPU arm's bit for bit.
__device__ __forceinline__ void quantise_block(uint32_t (&pairs)[BLOCK / 2], float block_amax, float global, bool finite) {
    const __nv_fp8_storage_t code =
        __nv_cvt_float_to_fp8(__fdiv_rn(__fdiv_rn(block_amax, MAX_E2M1), global), __NV_SATFINITE, __NV_E4M3);
    const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
    const float step = __fmul_rn(scale, global);
    // False for a step of NaN too, which is what 0 / 0 makes of a zero row.
    const bool live = finite && step > 0.0f;
    // Numbers so small that a remainder would be inexact are lifted, which the quotient does not see.
    const float lift = step < 0x1p-99f ? 0x1p64f : 1.0f, lifted = step * lift, reciprocal = __frcp_rn(lifted);
#pragma unroll
    for (uint32_t &pair : pairs) {
        float part[2] = {__uint_as_float(pair << 16 & 0x7fff0000u), __uint_as_float(pair & 0x7fff0000u)};
#pragma unroll
        for (float &value : part) value = round_to_e2m1(divide(value * lift, lifted, reciprocal)) * scale;
        // Six significant bits at most: the upper halves are all of the products.
        const uint32_t magnitudes = __byte_perm(__float_as_uint(part[0]), __float_as_uint(part[1]), 0x7632);
        pair = live ? magnitudes | (pair & 0x80008000u) : 0;
    }
}

// Four lanes with four items of two words each change them about, so that lane t has item t of each.
__device__ __forceinline__ void transpose_by_four(uint32_t (&words)[8], int t) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i / 2 & bit) continue;
            uint32_t &first = words[i], &second = words[i + 2 * bit];
            const bool upper = t & bit;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? first : second, bit);
            first = upper ? received : first;
            second = upper ? second : received;
        }
}

// One block quantises one row of x [M, K] into the image, zeros past K, and writes what finishes the row's sums: the row's global
// times `weights_scale`. A row that is not finite gets a scale of NaN and elements of zero.
template <typename T>
__global__ void __launch_bounds__(QUANTISER_THREADS)
    quantise(const T *__restrict__ x, Scratch scratch, double weights_scale, int64_t K) {
    const int64_t m = blockIdx.x, tiles = (K + prefill_band::TILE_K - 1) / prefill_band::TILE_K;
    const T *row = x + m * K;

    uint32_t pair = 0;
#pragma unroll 4
    for (int64_t k = threadIdx.x * 8; k < K; k += QUANTISER_THREADS * 8)
        pair = larger_magnitudes(pair, load_row8<true>(row, k, K));
    __shared__ unsigned by_warp[QUANTISER_THREADS / 32];
    unsigned largest = __reduce_max_sync(~0u, larger_of_pair(pair));
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = __reduce_max_sync(~0u, by_warp[threadIdx.x % (QUANTISER_THREADS / 32)]);
    const bool finite = largest < 0x7f800000u;
    const float global = __fdiv_rn(__uint_as_float(largest), MAX_E2M1 * MAX_E4M3);
    if (threadIdx.x == 0) scratch.rows[m] = row_scale(weights_scale * (finite ? global : __uint_as_float(0x7fc00000u)));

    unsigned char *unit = scratch.image + m / prefill_band::UNIT * tiles * prefill_band::UNIT_BYTES;
    const int in_unit = static_cast<int>(m % prefill_band::UNIT);
    // Whole warps go round, so that lanes can exchange; a block past the last tile is zeros that go nowhere.
    const int lane = threadIdx.x % 32, t = lane % 4;
    for (int64_t first = threadIdx.x - lane; first < tiles * 4; first += QUANTISER_THREADS) {
        const int64_t block = first + lane;
        uint32_t pairs[BLOCK / 2];
        const uint4 low = load_row8<true>(row, block * BLOCK, K), high = load_row8<true>(row, block * BLOCK + 8, K);
        pairs[0] = low.x, pairs[1] = low.y, pairs[2] = low.z, pairs[3] = low.w;
        pairs[4] = high.x, pairs[5] = high.y, pairs[6] = high.z, pairs[7] = high.w;
        const uint32_t amax = larger_of_pair(larger_magnitudes(larger_magnitudes(0, low), high));
        quantise_block(pairs, __uint_as_float(amax), global, finite);
        // A chunk of the image is the same pair of each of the four blocks of a tile.
        transpose_by_four(pairs, t);
        if (block >= tiles * 4) continue;
        uint4 *line = reinterpret_cast<uint4 *>(unit + block / 4 * prefill_band::UNIT_BYTES) + in_unit * 8;
        line[2 * t ^ in_unit % 8] = make_uint4(pairs[0], pairs[2], pairs[4], pairs[6]);
        line[(2 * t + 1) ^ in_unit % 8] = make_uint4(pairs[1], pairs[3], pairs[5], pairs[7]);
    }
}

// `Nvfp4` loads and decodes weights (`load`, `fragments`); `bias` is [N], or null.
template <typename Nvfp4>
struct Format : Nvfp4 {
    using Row = RowScale;
    using Column = float;
    const RowScale *rows;

    Format(const Nvfp4 &nvfp4, const Scratch &scratch) : Nvfp4(nvfp4), rows(scratch.rows) {}

    __device__ Row row(int64_t m) const {
        const float4 scale = *reinterpret_cast<const float4 *>(rows + m);
        return {scale.x, scale.y, scale.z, scale.w};
    }
    // Adding minus zero changes nothing.
    __device__ Column column(int64_t n) const { return this->bias == nullptr ? -0.0f : this->bias[n]; }
    __device__ float finish(float total, const Row &row, Column bias) const {
        return __fadd_rn(__fmaf_rn(total, row.high, __fmul_rn(total, row.low)) * row.rest, bias);
    }
};

}  // namespace nvfp4_prefill
