// What the products of a prompt's attention are made of: BF16 over a BF16 store, FP16 over one of E4M3.
//
// E4M3 becomes FP16 exactly, NaN included, in one instruction for two; BF16 takes five, and NaN more. Weights lie between 0 and 1
// and gain three bits. Queries are BF16: each is multiplied by the power of two that puts its largest element between 2^14 and
// 2^15, which its score scale takes back, and then rounded to FP16. That is exact for every element down to 2^-31 of the largest,
// and moves none by more than 2^-39 of it, far below what an FP32 sum keeps.
#pragma once

#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "mma.cuh"

namespace attention::flash {
namespace {

// A tile of `Warps` * 16 queries and half as many keys.
template <typename Element_, int Dim, int Warps>
struct Form;

// The byte at which chunk `chunk` of 8 elements of a row lies, of rows of `Form::ROW_BYTES`: chunks change places by row, so that
// the same chunk of 8 rows meets all banks. A multiple of 8 rows on it is the same plus their bytes; chunk `c ^ d` is at the byte
// ^ 16 d, of memory aligned to a row.
template <typename Form>
__device__ __forceinline__ constexpr uint32_t place(int row, int chunk) {
    return row * Form::ROW_BYTES + (chunk ^ row % 8) * 16;
}

struct Bf16Product {
    __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k16(d, a, b0, b1);
    }
    __device__ static uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    // Whether either of two elements is infinite or NaN: then one more in the last place of the exponent is a sign.
    __device__ static bool not_finite(uint32_t pair) { return (((pair & 0x7fff7fffu) + 0x00800080u) & 0x80008000u) != 0; }
    __device__ static bool not_finite(uint16_t element) { return not_finite(static_cast<uint32_t>(element)); }
    template <typename Form>
    __device__ static void prepare_queries(uint4 *, float (&scale)[2], int) {
        scale[0] = scale[1] = 1.0f;
    }
};

struct Fp16Product {
    __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    __device__ static uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    __device__ static bool not_finite(uint32_t pair) { return (((pair & 0x7fff7fffu) + 0x04000400u) & 0x80008000u) != 0; }
    __device__ static bool not_finite(uint16_t element) { return not_finite(static_cast<uint32_t>(element)); }

    // Makes a warp's 16 queries FP16, and says by what the scores of rows g and g + 8 are to be multiplied.
    template <typename Form>
    __device__ static void prepare_queries(uint4 *queries, float (&scale)[2], int lane) {
        scale[0] = scale[1] = 1.0f;
        for (int row = 0; row < 16; row++) {
            uint4 *at = reinterpret_cast<uint4 *>(reinterpret_cast<unsigned char *>(queries) + place<Form>(row, lane));
            const bool there = lane < Form::CHUNKS;
            uint4 eight = there ? *at : make_uint4(0, 0, 0, 0);
            uint32_t (&pairs)[4] = *reinterpret_cast<uint32_t(*)[4]>(&eight);
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < 4; i++)
                largest = max(largest, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
            largest = __reduce_max_sync(~0u, largest);
            // Exponents are biased by 127. Powers beyond 2^-126 and 2^126 would not do.
            const int exponent = largest == 0 ? 0 : min(max(14 - (static_cast<int>(largest >> 7) - 127), -126), 126);
            const float power = __int_as_float((127 + exponent) << 23);
#pragma unroll
            for (int i = 0; i < 4; i++)
                pairs[i] = pack(__uint_as_float(pairs[i] << 16) * power, __uint_as_float(pairs[i] & 0xffff0000u) * power);
            if (there) *at = eight;
            const float inverse = __int_as_float((127 - exponent) << 23);
            if (row == lane / 4) scale[0] = inverse;
            if (row == lane / 4 + 8) scale[1] = inverse;
        }
        __syncwarp();
    }
};

template <typename Element_, int Dim, int Warps>
struct Form {
    using Element = Element_;
    using Product = std::conditional_t<std::is_same_v<Element, __nv_bfloat16>, Bf16Product, Fp16Product>;
    static constexpr int DIM = Dim, THREADS = 32 * Warps, ROWS = 16 * Warps, KEYS = 8 * Warps;
    static constexpr int CHUNKS = Dim / 8, ROW_BYTES = Dim * 2;
};

}  // namespace
}  // namespace attention::flash
