// Tensor-core steps.
#pragma once

#include <cstdint>

// D += A * B for A [16, 16] and B [16, 8] of BF16, D [16, 8] of FP32 (PTX ISA, mma.m16n8k16).
//
// Lane 4g + t holds rows g and g + 8 of A, column g of B, and columns 2t and 2t + 1 of D. A column of D depends on that
// column of B alone, whatever the others hold: that is what makes kernels row-invariant that put tokens on the columns.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
