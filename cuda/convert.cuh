// Exact conversions between number formats.
#pragma once

#include <cstdint>

// Two of the four INT8 codes in `codes` to two BF16, exactly. `Pair` 0 takes bytes 0 and 1, `Pair` 1 bytes 2 and 3; the
// lower byte goes to the lower half.
//
// BF16 0x4300 | m is 128 + m for a 7-bit m, so with q = m - 128 * sign: (128 + m) - (128 + 128 * sign) = q. Both operands
// and the difference are integers of at most 8 bits, which BF16 holds.
template <int Pair>
__device__ __forceinline__ uint32_t bf16x2_from_int8(uint32_t codes) {
    const uint32_t spread = __byte_perm(codes, 0x43434343u, Pair == 0 ? 0x4140 : 0x4342);
    const uint32_t magnitude = spread & 0xff7fff7fu;
    const uint32_t sign = spread & 0xff80ff80u;
    uint32_t result;
    // A fused multiply-add by one subtracts on every architecture from sm_80; it is exact here.
    asm("{ .reg .b32 minus_one; mov.b32 minus_one, 0xbf80bf80; fma.rn.bf16x2 %0, %1, minus_one, %2; }"
        : "=r"(result)
        : "r"(sign), "r"(magnitude));
    return result;
}
