// linear_proj/nvfp4_dynamic: W4A4 in the decode band. A row is quantised, then multiplied in the form that all formats share.
//
// E2M1 times E4M3 has at most six significant bits, so weights and quantised activations are exact in BF16, and so are their
// products in FP32: only the order of the sums is ours.
#include "nvfp4_dynamic.h"

#include <cuda_fp8.h>

#include "convert.cuh"
#include "decode_band.cuh"

namespace {

constexpr int BLOCK = 16;                         // elements of an NVFP4 block
constexpr float MAX_E2M1 = 6.0f, MAX_E4M3 = 448.0f;

__device__ __forceinline__ float from_e4m3(__nv_fp8_storage_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// The nearest E2M1 number, ties to the even code, beyond 6 saturating. Each comparison is a midpoint; it is strict where the
// lower neighbour is the even one.
__device__ __forceinline__ float round_to_e2m1(float x) {
    const float a = fabsf(x);
    const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    const float magnitude = code < 4 ? code * 0.5f : code < 6 ? code - 2.0f : code * 2.0f - 8.0f;
    return copysignf(magnitude, x);
}

constexpr int QUANTISER_THREADS = 512;

// One block quantises one row: x [M, K] to quantised [M, K] and globals [M]. The arithmetic is number_formats::nvfp4's, step by
// step, so the values are the CPU arm's bit for bit. A row that is not finite gets a global of NaN and elements of zero.
template <typename T>
__global__ void __launch_bounds__(QUANTISER_THREADS)
    quantise(const T *__restrict__ x, __nv_bfloat16 *__restrict__ quantised, float *__restrict__ globals, int64_t K) {
    const T *row = x + blockIdx.x * K;
    __nv_bfloat16 *out = quantised + blockIdx.x * K;

    // Infinity and NaN are the largest of all when the magnitudes' bits are compared as integers.
    unsigned largest = 0;
    for (int64_t k = threadIdx.x; k < K; k += QUANTISER_THREADS)
        largest = max(largest, __float_as_uint(fabsf(__bfloat162float(to_bf16(row[k])))));
    __shared__ unsigned by_warp[QUANTISER_THREADS / 32];
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) by_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = __reduce_max_sync(~0u, by_warp[threadIdx.x % (QUANTISER_THREADS / 32)]);
    const float amax = __uint_as_float(largest);
    const bool finite = amax < __uint_as_float(0x7f800000u);
    const float global = __fdiv_rn(amax, MAX_E2M1 * MAX_E4M3);
    if (threadIdx.x == 0) globals[blockIdx.x] = finite ? global : __uint_as_float(0x7fc00000u);

    for (int64_t block = threadIdx.x; block < K / BLOCK; block += QUANTISER_THREADS) {
        float value[BLOCK], block_amax = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            value[i] = __bfloat162float(to_bf16(row[block * BLOCK + i]));
            block_amax = fmaxf(block_amax, fabsf(value[i]));
        }
        const float scale = from_e4m3(
            __nv_cvt_float_to_fp8(__fdiv_rn(__fdiv_rn(block_amax, MAX_E2M1), global), __NV_SATFINITE, __NV_E4M3));
        const float step = __fmul_rn(scale, global);
        // False for a step of NaN too, which is what 0 / 0 makes of a zero row.
        const bool live = finite && step > 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK; i++)
            out[block * BLOCK + i] =
                __float2bfloat16_rn(live ? round_to_e2m1(__fdiv_rn(value[i], step)) * scale : 0.0f);
    }
}

// Two E2M1 codes at the top of the two halves of `codes` as BF16 bits: the sign stays, the other three bits become the low
// exponent bits and the high mantissa bit, which is the number times 2^-126 (half of it a BF16 subnormal).
__device__ __forceinline__ uint32_t e2m1_bits(uint32_t codes) {
    return (codes & 0x80008000u) | ((codes >> 6) & 0x01c001c0u);
}

// A UE4M3 scale times 2^118 in both halves, exactly: seven bits in FP32's place are the number times 2^-120.
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t code) {
    const float scale = __uint_as_float(code << 20) * 0x1p119f * 0x1p119f;
    return __byte_perm(__float_as_uint(scale), 0, 0x3232);
}

// BF16 pairs multiplied, subnormal operands included. Minus zero is what adding changes nothing.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero; }" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

struct Nvfp4 {
    static constexpr int TILE_K = 64;
    struct Weights {
        uint4 codes;      // the lane's block of row g in x and y, of row g + 8 in z and w
        uint32_t scales;  // of row g in the low byte, of row g + 8 in the next
    };

    const uint4 *codes;          // [ceil(N / 16), ceil(K / 64), 32 lanes]
    const unsigned short *scales;  // [ceil(N / 16), ceil(K / 64), 32 lanes] of two UE4M3
    const float *bias;           // [N], or null
    const float *globals;        // [M]
    float global;

    __device__ Weights load(int64_t tile, int lane) const {
        return {load_streaming(codes + tile * 32 + lane), load_streaming(scales + tile * 32 + lane)};
    }

    // The products are 2^-8 of the numbers: codes come as 2^-126 of theirs and scales as 2^118.
    template <int ColumnTiles>
    __device__ void multiply(float (&sum)[ColumnTiles][4], const Weights &w, const uint4 (&x)[ColumnTiles][2]) const {
        const uint32_t upper = scale_bf16x2(w.scales & 0x7f), lower = scale_bf16x2(w.scales >> 8 & 0x7f);
        step<0>(sum, w.codes.x, w.codes.z, upper, lower, x);
        step<1>(sum, w.codes.x, w.codes.z, upper, lower, x);
        step<2>(sum, w.codes.y, w.codes.w, upper, lower, x);
        step<3>(sum, w.codes.y, w.codes.w, upper, lower, x);
    }

    // Elements 4 Step to 4 Step + 3 of the lane's blocks; a word holds those of two steps.
    template <int Step, int ColumnTiles>
    __device__ static void step(float (&sum)[ColumnTiles][4], uint32_t upper_codes, uint32_t lower_codes, uint32_t upper,
                                uint32_t lower, const uint4 (&x)[ColumnTiles][2]) {
        constexpr int SHIFT = Step % 2 * 8;
        const uint32_t a[4] = {multiply_bf16x2(e2m1_bits(upper_codes << SHIFT), upper),
                               multiply_bf16x2(e2m1_bits(lower_codes << SHIFT), lower),
                               multiply_bf16x2(e2m1_bits(upper_codes << (SHIFT + 4)), upper),
                               multiply_bf16x2(e2m1_bits(lower_codes << (SHIFT + 4)), lower)};
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++) {
            const uint4 &part = x[c][Step / 2];
            mma_m16n8k16(sum[c], a, Step % 2 == 0 ? part.x : part.z, Step % 2 == 0 ? part.y : part.w);
        }
    }

    // The two global scales are multiplied in FP64: a product of two small ones may be below FP32's range where the result is
    // not. One rounding to FP32.
    __device__ float finish(float total, int m, int64_t n) const {
        const float scaled =
            static_cast<float>(static_cast<double>(global) * globals[m] * (static_cast<double>(total) * 256.0));
        return bias == nullptr ? scaled : __fadd_rn(scaled, bias[n]);
    }
};

template <typename T>
cudaError_t launch(const nvfp4_dynamic_call &call, cudaStream_t stream) {
    auto *quantised = static_cast<__nv_bfloat16 *>(call.quantised);
    quantise<<<static_cast<unsigned>(call.m), QUANTISER_THREADS, 0, stream>>>(static_cast<const T *>(call.x), quantised,
                                                                             call.globals, call.k);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    const Nvfp4 format = {static_cast<const uint4 *>(call.codes), static_cast<const unsigned short *>(call.scales),
                          call.bias, call.globals, call.global};
    return decode_band::launch(format, static_cast<const __nv_bfloat16 *>(quantised), static_cast<T *>(call.y), call.m,
                               call.n, call.k, call.slices, stream);
}

template <typename T>
cudaError_t prepare() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, quantise<T>);
    return error != cudaSuccess ? error : decode_band::prepare<Nvfp4, __nv_bfloat16, T>();
}

}  // namespace

extern "C" int nvfp4_dynamic_prepare(void) {
    for (cudaError_t error : {prepare<float>(), prepare<__half>(), prepare<__nv_bfloat16>()})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int nvfp4_dynamic_project(const nvfp4_dynamic_call *call, cudaStream_t stream) {
    const bool blocks = call->k % BLOCK == 0;
    if (!blocks || !decode_band::takes(call->m, call->n, call->k, call->slices)) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case NVFP4_DYNAMIC_F32: return launch<float>(*call, stream);
        case NVFP4_DYNAMIC_F16: return launch<__half>(*call, stream);
        case NVFP4_DYNAMIC_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" const char *nvfp4_dynamic_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
