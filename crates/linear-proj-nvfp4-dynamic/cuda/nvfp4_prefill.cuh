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
constexpr int QUANTISER_THREADS = 256;

// The magnitudes of a pair of BF16. As integers infinity and NaN are the largest of all.
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }

// The larger of a pair of magnitudes, as the bits of an FP32.
__device__ __forceinline__ uint32_t larger_of_pair(uint32_t pair) { return max(pair << 16, pair & 0xffff0000u); }

struct Divisor {
    float value, reciprocal;
};

__device__ __forceinline__ Divisor divisor(float value) { return {value, __frcp_rn(value)}; }

// A quotient rounded once, as by a division. By a `Plain` divisor, which is 2^-99 at least, it takes two corrections by an exact
// remainder: after the first the quotient is one of the two nearest, and the second then rounds as a division does (Markstein,
// 1990). Quotients below 2^-10 may be a little off; E2M1 and E4M3 make zeros of them.
template <bool Plain>
__device__ __forceinline__ float divide(float dividend, const Divisor &by) {
    if (!Plain) return __fdiv_rn(dividend, by.value);
    float quotient = __fmul_rn(dividend, by.reciprocal);
    quotient = __fmaf_rn(__fmaf_rn(-quotient, by.value, dividend), by.reciprocal, quotient);
    return __fmaf_rn(__fmaf_rn(-quotient, by.value, dividend), by.reciprocal, quotient);
}

// The nearest E2M1 magnitude, ties to the even code, without saturation. Below 2 the numbers are 1/2 apart, then twice as far in
// each binade: adding and subtracting 1.5 * 2^22 binades rounds to multiples of that distance.
__device__ __forceinline__ float round_to_e2m1(float magnitude) {
    const float binade = __uint_as_float(max(__float_as_uint(magnitude) & 0x7f800000u, 0x3f800000u));
    const float rounded = __fmaf_rn(binade, 0x1.8p22f, magnitude);
    return __fmaf_rn(binade, -0x1.8p22f, rounded);
}

// Quantises a block of BF16 in place. The arithmetic is number_formats::nvfp4's, so the values are the CPU arm's bit for bit.
template <bool Plain>
__device__ __forceinline__ void quantise_block(uint32_t (&pairs)[BLOCK / 2], const Divisor &global, bool finite) {
    uint32_t largest = 0;
#pragma unroll
    for (uint32_t pair : pairs) largest = __vmaxu2(largest, magnitudes(pair));
    const float amax = __uint_as_float(larger_of_pair(largest));
    const float wanted = divide<Plain>(divide<Plain>(amax, divisor(MAX_E2M1)), global);
    const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(wanted, __NV_SATFINITE, __NV_E4M3);
    const float scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
    const Divisor step = divisor(__fmul_rn(scale, global.value));
    // False for a step of NaN too, which is what 0 / 0 makes of a zero row.
    const bool live = finite && step.value > 0.0f;
    const __nv_bfloat162 most = __float2bfloat162_rn(MAX_E2M1), by = __float2bfloat162_rn(live ? scale : 0.0f);
    const uint32_t signs = live ? 0x80008000u : 0;
#pragma unroll
    for (uint32_t &pair : pairs) {
        const uint32_t both = magnitudes(pair);
        const float low = round_to_e2m1(divide<Plain>(__uint_as_float(both << 16), step));
        const float high = round_to_e2m1(divide<Plain>(__uint_as_float(both & 0xffff0000u), step));
        // Two significant bits: the upper halves are all of them. The minimum makes 6 of NaN too.
        const uint32_t rounded = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        const __nv_bfloat162 scaled = __hmul2(__hmin2(*reinterpret_cast<const __nv_bfloat162 *>(&rounded), most), by);
        pair = *reinterpret_cast<const uint32_t *>(&scaled) | (pair & signs);
    }
}

// Four lanes with four items of two words each, i and i + 4, change them about, so that lane t has item t of each.
__device__ __forceinline__ void transpose_by_four(uint32_t (&words)[8], int t) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i & bit) continue;
            uint32_t &first = words[i], &second = words[i | bit];
            const bool upper = t & bit;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? first : second, bit);
            first = upper ? received : first;
            second = upper ? second : received;
        }
}

// Quantises a row of K activations under its global into row `in_unit` of the image's units from `unit` on, zeros past K.
template <bool Plain, typename T>
__device__ __forceinline__ void quantise_row(const T *row, unsigned char *unit, int in_unit, float row_global, bool finite,
                                             int64_t K) {
    // Four of a tile for four lanes.
    const int blocks = static_cast<int>((K + prefill_band::TILE_K - 1) / prefill_band::TILE_K * 4);
    const Divisor global = divisor(row_global);
    const int lane = threadIdx.x % 32, t = lane % 4;
    // Whole warps go round, so that lanes can exchange; a block past the last is zeros that go nowhere.
    for (int first = threadIdx.x - lane; first < blocks; first += QUANTISER_THREADS) {
        const int block = first + lane;
        const int64_t k = static_cast<int64_t>(block) * BLOCK;
        const uint4 low = load_row8<true>(row, k, K), high = load_row8<true>(row, k + 8, K);
        uint32_t pairs[BLOCK / 2] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        quantise_block<Plain>(pairs, global, finite);
        // A chunk of the image is the same pair of each of the four blocks of a tile.
        transpose_by_four(pairs, t);
        if (block >= blocks) continue;
        uint4 *line = reinterpret_cast<uint4 *>(unit + static_cast<int64_t>(block / 4) * prefill_band::UNIT_BYTES) + in_unit * 8;
        line[t ^ in_unit % 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        line[(t + 4) ^ in_unit % 8] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

// One block quantises one row of x [M, K] into the image, and writes what finishes the row's sums: the row's global times
// `weights_scale`. A row that is not finite gets a scale of NaN and elements of zero.
template <typename T>
__global__ void __launch_bounds__(QUANTISER_THREADS, 6)
    quantise(const T *__restrict__ x, Scratch scratch, double weights_scale, int64_t K) {
    constexpr int WARPS = QUANTISER_THREADS / 32;
    const int64_t m = blockIdx.x;
    const T *row = x + m * K;

    uint32_t pair = 0;
#pragma unroll 4
    for (int64_t k = threadIdx.x * 8; k < K; k += QUANTISER_THREADS * 8) {
        const uint4 in = load_row8<true>(row, k, K);
        pair = __vmaxu2(__vmaxu2(__vmaxu2(pair, magnitudes(in.x)), magnitudes(in.y)),
                        __vmaxu2(magnitudes(in.z), magnitudes(in.w)));
    }
    __shared__ unsigned by_warp[WARPS];
    unsigned largest = __reduce_max_sync(~0u, larger_of_pair(pair));
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = __reduce_max_sync(~0u, by_warp[threadIdx.x % WARPS]);
    const bool finite = largest < 0x7f800000u;
    const float global = __fdiv_rn(__uint_as_float(largest), MAX_E2M1 * MAX_E4M3);
    if (threadIdx.x == 0) scratch.rows[m] = row_scale(weights_scale * (finite ? global : __uint_as_float(0x7fc00000u)));

    unsigned char *unit = scratch.image + m / prefill_band::UNIT * prefill_band::image_bytes(1, K);
    const int in_unit = static_cast<int>(m % prefill_band::UNIT);
    // The least scale is 2^-9, so all steps of such a row are 2^-99 at least.
    if (global >= 0x1p-90f)
        quantise_row<true>(row, unit, in_unit, global, finite, K);
    else
        quantise_row<false>(row, unit, in_unit, global, finite, K);
}

// `Nvfp4` loads and decodes weights (`load`, `fragments`); its `bias` is [N], or null.
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

template <typename T>
cudaError_t launch_quantiser(const T *x, const Scratch &scratch, double weights_scale, int64_t m, int64_t k,
                             cudaStream_t stream) {
    quantise<<<static_cast<unsigned>(m), QUANTISER_THREADS, 0, stream>>>(x, scratch, weights_scale, k);
    return cudaGetLastError();
}

// Queues the quantiser and the projection: y [M, N] of x [M, K], K a multiple of 16. `weights_scale` is the weights' global scale
// times the power of two by which `fragments` leaves the weights too small; `scratch` has `Scratch::bytes(m, k)` bytes.
template <typename Nvfp4, typename T>
cudaError_t launch(const Nvfp4 &weights, double weights_scale, const T *x, T *y, void *scratch, int64_t m, int64_t n, int64_t k,
                   int multiprocessors, cudaStream_t stream) {
    const Scratch memory(scratch, m, k);
    const cudaError_t error = launch_quantiser(x, memory, weights_scale, m, k, stream);
    if (error != cudaSuccess) return error;
    return prefill_band::launch(Format<Nvfp4>(weights, memory), memory.image, y, m, n, k, multiprocessors, stream);
}

// Loads the kernels into the current context and gives them their shared memory: once, before `launch`.
template <typename Nvfp4, typename T>
cudaError_t prepare() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, quantise<T>);
    return error != cudaSuccess ? error : prefill_band::prepare<Format<Nvfp4>, T>();
}

}  // namespace nvfp4_prefill
