// Warpgroup matrix steps of attention (PTX ISA, wgmma; sm_90a alone): queries with keys, both from shared memory, and weights from
// registers with values.
//
// Tiles of 64 rows lie in shared memory as blocks of 64 dimensions one after another: 64 rows of 128 bytes, in atoms of 8 rows,
// 16-byte chunk c of row r in place c ^ (r % 8). Keys are read along a row, values across the rows.
#pragma once

#include <cstdint>

#include "wgmma.cuh"

namespace attention::flash {
namespace {

constexpr int TILE_ROWS = 64, BLOCK_BYTES = TILE_ROWS * 128;

// A tile as the other operand: `wgmma_descriptor`'s, and how far it is from one block of 64 dimensions to the next.
__device__ __forceinline__ uint64_t tile_descriptor(const void *tile) {
    constexpr uint64_t BLOCK_STRIDE = static_cast<uint64_t>(BLOCK_BYTES) / 16 << 16;
    return wgmma_descriptor(tile) | BLOCK_STRIDE;
}

// The same tile from 16 dimensions `step` on.
__device__ __forceinline__ uint64_t at_dimensions(uint64_t descriptor, int step) {
    return descriptor + (step / 4 * BLOCK_BYTES + step % 4 * 32) / 16;
}

// The same tile from 16 rows `step` on.
__device__ __forceinline__ uint64_t at_rows(uint64_t descriptor, int step) { return descriptor + step * 16 * 128 / 16; }

// Keeps what is made of registers that a product writes from being computed before this point.
template <int Tiles>
__device__ __forceinline__ void hold(float (&d)[Tiles][4]) {
#pragma unroll
    for (int n = 0; n < Tiles; n++)
        asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

#define D_0_TO_31 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D_32_TO_63 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D_64_TO_127 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TILE_1(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TILE_4(d, i) TILE_1(d, i), TILE_1(d, i + 1), TILE_1(d, i + 2), TILE_1(d, i + 3)
#define TILE_8(d, i) TILE_4(d, i), TILE_4(d, i + 4)

#define KEYS_STEP(TYPES)                                                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {" D_0_TO_31 "}, %32, %33, 1, 1, 1, 0, 0;" \
                 : TILE_8(d, 0)                                                                                      \
                 : "l"(queries), "l"(keys))
#define VALUES_STEP(SHAPE, TYPES, REGISTERS, A, B, ...)                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned." SHAPE ".f32." TYPES " {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, 1;" \
                 : __VA_ARGS__                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(values))

// Adds the products of 64 queries and 64 keys over 16 dimensions. Half: FP16, else BF16.
template <bool Half>
__device__ __forceinline__ void wgmma_keys(float (&d)[8][4], uint64_t queries, uint64_t keys) {
    if constexpr (Half)
        KEYS_STEP("f16.f16");
    else
        KEYS_STEP("bf16.bf16");
}

// Adds 16 keys' values, weighted by a warp's 16 rows of `a` as mma.m16n8k16 takes them.
template <bool Half, int Tiles>
__device__ __forceinline__ void wgmma_values(float (&d)[Tiles][4], const uint32_t (&a)[4], uint64_t values) {
    static_assert(Tiles == 8 || Tiles == 16 || Tiles == 32, "64, 128 or 256 dimensions");
#define VALUES_OF(TYPES)                                                                                                 \
    if constexpr (Tiles == 8)                                                                                            \
        VALUES_STEP("m64n64k16", TYPES, D_0_TO_31, "%32, %33, %34, %35", "%36", TILE_8(d, 0));                          \
    else if constexpr (Tiles == 16)                                                                                      \
        VALUES_STEP("m64n128k16", TYPES, D_0_TO_31 ", " D_32_TO_63, "%64, %65, %66, %67", "%68", TILE_8(d, 0),          \
                    TILE_8(d, 8));                                                                                       \
    else                                                                                                                 \
        VALUES_STEP("m64n256k16", TYPES, D_0_TO_31 ", " D_32_TO_63 ", " D_64_TO_127, "%128, %129, %130, %131", "%132", \
                    TILE_8(d, 0), TILE_8(d, 8), TILE_8(d, 16), TILE_8(d, 24))
    if constexpr (Half) {
        VALUES_OF("f16.f16");
    } else {
        VALUES_OF("bf16.bf16");
    }
#undef VALUES_OF
}

#undef D_0_TO_31
#undef D_32_TO_63
#undef D_64_TO_127
#undef TILE_1
#undef TILE_4
#undef TILE_8
#undef KEYS_STEP
#undef VALUES_STEP

}  // namespace
}  // namespace attention::flash
