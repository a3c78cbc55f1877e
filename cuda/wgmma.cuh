// Warpgroup matrix steps, A from registers or from shared memory (PTX ISA, wgmma; sm_90a alone).
#pragma once

#include <cstdint>

#include "mbarrier.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// Orders this warp's writes of registers before the warpgroup's next products.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `Pending` groups are under way. Until then a group's registers and shared memory are its own.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Describes B for `wgmma`: rows of 64 BF16 along K, 128 bytes each, in atoms of 8 rows that lie one after another from a multiple
// of 1024 bytes on; 16-byte chunk c of row r is in place c ^ (r % 8). Adding 2 moves on by 16 k.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void *tile) {
    constexpr uint64_t SWIZZLE_128B = 1ull << 62, ATOM_STRIDE = 1024ull / 16 << 32;
    return SWIZZLE_128B | ATOM_STRIDE | (shared_address(tile) & 0x3ffff) >> 4;
}

// As `wgmma_descriptor`, of rows of 32 BF16, 64 bytes each; atoms start on a multiple of 512 bytes, and 16-byte chunk c of row r is
// in place c ^ (r / 2 % 4).
__device__ __forceinline__ uint64_t wgmma_descriptor_of_32(const void *tile) {
    constexpr uint64_t SWIZZLE_64B = 2ull << 62, ATOM_STRIDE = 512ull / 16 << 32;
    return SWIZZLE_64B | ATOM_STRIDE | (shared_address(tile) & 0x3ffff) >> 4;
}

#define WGMMA_ACCUMULATE(SHAPE, REGISTERS, A, B)                                                        \
    "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, 0;"
#define WGMMA_ACCUMULATE_SHARED(SHAPE, REGISTERS, A, B) \
    "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" REGISTERS "}, " A ", " B ", 1, 1, 1, 0, 0;"
#define WGMMA_D0_TO_31 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D32_TO_63 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D64_TO_95 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D96_TO_127 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_16(d, i) WGMMA_4(d, i), WGMMA_4(d, i + 4), WGMMA_4(d, i + 8), WGMMA_4(d, i + 12)
#define WGMMA_32(d, i) WGMMA_16(d, i), WGMMA_16(d, i + 16)

// D += A * B for A [64, 16] and B [16, 2 * Registers] of BF16, D of FP32, by the four warps of a warpgroup.
//
// Warp w has rows 16w to 16w + 15: its lane 4g + t holds A's rows g and g + 8 of them as mma.m16n8k16 does, and of D columns
// 8j + 2t and the next of row g in d[4j] and d[4j + 1], of row g + 8 in d[4j + 2] and d[4j + 3]. A column of D depends on that
// column of B alone.
template <int Registers>
__device__ __forceinline__ void wgmma(float (&d)[Registers], const uint32_t (&a)[4], uint64_t b) {
    static_assert(Registers == 32 || Registers == 64 || Registers == 128, "B has 64, 128 or 256 columns");
    if constexpr (Registers == 32)
        asm volatile(WGMMA_ACCUMULATE("m64n64k16", WGMMA_D0_TO_31, "%32, %33, %34, %35", "%36")
                     : WGMMA_32(d, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (Registers == 64)
        asm volatile(WGMMA_ACCUMULATE("m64n128k16", WGMMA_D0_TO_31 ", " WGMMA_D32_TO_63, "%64, %65, %66, %67", "%68")
                     : WGMMA_32(d, 0), WGMMA_32(d, 32)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile(WGMMA_ACCUMULATE("m64n256k16",
                                      WGMMA_D0_TO_31 ", " WGMMA_D32_TO_63 ", " WGMMA_D64_TO_95 ", " WGMMA_D96_TO_127,
                                      "%128, %129, %130, %131", "%132")
                     : WGMMA_32(d, 0), WGMMA_32(d, 32), WGMMA_32(d, 64), WGMMA_32(d, 96)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// As above with A [64, 16] in shared memory, described as B is.
template <int Registers>
__device__ __forceinline__ void wgmma(float (&d)[Registers], uint64_t a, uint64_t b) {
    static_assert(Registers == 32 || Registers == 64 || Registers == 128, "B has 64, 128 or 256 columns");
    if constexpr (Registers == 32)
        asm volatile(WGMMA_ACCUMULATE_SHARED("m64n64k16", WGMMA_D0_TO_31, "%32", "%33") : WGMMA_32(d, 0) : "l"(a), "l"(b));
    else if constexpr (Registers == 64)
        asm volatile(WGMMA_ACCUMULATE_SHARED("m64n128k16", WGMMA_D0_TO_31 ", " WGMMA_D32_TO_63, "%64", "%65")
                     : WGMMA_32(d, 0), WGMMA_32(d, 32)
                     : "l"(a), "l"(b));
    else
        asm volatile(WGMMA_ACCUMULATE_SHARED(
                         "m64n256k16", WGMMA_D0_TO_31 ", " WGMMA_D32_TO_63 ", " WGMMA_D64_TO_95 ", " WGMMA_D96_TO_127, "%128",
                         "%129")
                     : WGMMA_32(d, 0), WGMMA_32(d, 32), WGMMA_32(d, 64), WGMMA_32(d, 96)
                     : "l"(a), "l"(b));
}

#undef WGMMA_ACCUMULATE
#undef WGMMA_ACCUMULATE_SHARED
#undef WGMMA_D0_TO_31
#undef WGMMA_D32_TO_63
#undef WGMMA_D64_TO_95
#undef WGMMA_D96_TO_127
#undef WGMMA_4
#undef WGMMA_16
#undef WGMMA_32
