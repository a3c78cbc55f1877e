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

struct Bf16Product {
    static constexpr bool HALF = false;
    __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        mma_m16n8k16(d, a, b0, b1);
    }
    __device__ static uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&pair);
    }
    // Whether either of two elements is infinite or NaN: then one more in the last place of the exponent is a sign.
    __device__ static bool not_finite(uint32_t pair) { return (((pair & 0x7fff7fffu) + 0x00800080u) & 0x80008000u) != 0; }
};

struct Fp16Product {
    static constexpr bool HALF = true;
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
};

template <typename Element>
using Product = std::conditional_t<std::is_same_v<Element, __nv_bfloat16>, Bf16Product, Fp16Product>;

__device__ __forceinline__ uint4 *at_byte(void *memory, uint32_t byte) {
    return reinterpret_cast<uint4 *>(static_cast<unsigned char *>(memory) + byte);
}

// Makes a warp's 16 queries, from row `first` on, the products' type, and says by what the scores of its rows g and g + 8 are to
// be multiplied.
template <typename Form>
__device__ __forceinline__ void prepare_queries(uint4 *queries, int first, float (&scale)[2], int lane) {
    scale[0] = scale[1] = 1.0f;
    if (!Form::Product::HALF) return;
    const bool there = lane < Form::CHUNKS;
    for (int row = 0; row < 16; row++) {
        uint4 *at = at_byte(queries, Form::place(first + row, there ? lane : 0));
        uint4 eight = there ? *at : make_uint4(0, 0, 0, 0);
        uint32_t(&pairs)[4] = *reinterpret_cast<uint32_t(*)[4]>(&eight);
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) largest = max(largest, max(pairs[i] & 0x7fffu, pairs[i] >> 16 & 0x7fffu));
        largest = __reduce_max_sync(~0u, largest);
        // The exponent of the largest is biased by 127. A power beyond 2^126 would not be a normal number.
        const int exponent = largest == 0 ? 0 : min(14 + 127 - static_cast<int>(largest >> 7), 126);
        const float power = __int_as_float((127 + exponent) << 23), inverse = __int_as_float((127 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 4; i++)
            pairs[i] = Form::Product::pack(__uint_as_float(pairs[i] << 16) * power,
                                           __uint_as_float(pairs[i] & 0xffff0000u) * power);
        if (there) *at = eight;
        if (row == lane / 4) scale[0] = inverse;
        if (row == lane / 4 + 8) scale[1] = inverse;
    }
}

}  // namespace
}  // namespace attention::flash
