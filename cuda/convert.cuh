// Exact conversions between number formats.
#pragma once

#include <cstdint>

// BF16 pairs multiplied, subnormal operands included. Minus zero is what adding changes nothing.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero; }" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Two of the four INT8 codes of a word to two BF16 of 2^-6 of them, exactly.
//
// A code is a sign and seven bits of magnitude. In each half of the word the magnitudes of two codes are the low seven bits of its
// bytes, and the sign of each is the high bit of the other's byte: so that of the code below is where a BF16 has its sign, and
// its magnitude where it has its mantissa. With nothing between them that is a subnormal number, 2^-133 of the code. `Pair` 0
// takes the codes below, `Pair` 1 those above, which come to the same places once the bytes of each half are exchanged.
template <int Pair>
__device__ __forceinline__ uint32_t bf16x2_from_int8(uint32_t codes) {
    const uint32_t bytes = Pair == 0 ? codes : __byte_perm(codes, 0, 0x2301);
    return multiply_bf16x2(bytes & 0x807f807fu, 0x7f007f00u);
}
constexpr float INT8_UNDO = 64.0f;
