// Products of four warps: 64 rows of A, of which each warp holds 16 in registers as mma.m16n8k16 does, with column tiles of 8 that
// lie in shared memory. By the warpgroup's tensor-core steps where there are any (sm_90a), else warp by warp.
//
// B lies as the former read it: atoms of a column tile by 64 k, 128 bytes a column, 16-byte chunk c of column r in place c ^ r.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "mma.cuh"
#include "wgmma.cuh"

namespace attention::band {
namespace {

constexpr int ATOM_COLUMNS = 8;
constexpr int ATOM_K = 64;
constexpr int ATOM_BYTES = ATOM_COLUMNS * ATOM_K * 2;

// Where 16-byte chunk `chunk` of a column of an atom is.
__device__ __forceinline__ int in_atom(int column, int chunk) { return column * ATOM_K * 2 + (chunk ^ column) * 16; }

// Makes this thread's writes of shared memory visible to the products that follow the next barrier.
__device__ __forceinline__ void publish_operands() {
#if HAS_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Products may read what was last written to their registers. All lanes of a warp come together here.
__device__ __forceinline__ void begin_products() {
#if HAS_WGMMA
    __syncwarp();
    wgmma_fence();
#endif
}

__device__ __forceinline__ void end_products() {
#if HAS_WGMMA
    wgmma_commit();
#endif
}

// Until then the registers of products that have ended are theirs, but for those of the last `Pending` groups.
template <int Pending>
__device__ __forceinline__ void wait_for_products() {
#if HAS_WGMMA
    wgmma_wait<Pending>();
#endif
}

#define STEP(TYPE, N, REGISTERS, A, B) \
    "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, 0;"
#define D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D12(d, i) D4(d, i), D4(d, i + 4), D4(d, i + 8)
#define D24(d, i) D12(d, i), D12(d, i + 12)
#define R4 "%0, %1, %2, %3"
#define R12 R4 ", %4, %5, %6, %7, %8, %9, %10, %11"
#define R24 R12 ", %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define R28 R24 ", %24, %25, %26, %27"
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define STEPS_OF(TYPE)                                                                                                  \
    if constexpr (Tiles == 1) asm volatile(STEP(TYPE, "8", R4, "%4, %5, %6, %7", "%8") : D4(d, 0) : OPERANDS);          \
    if constexpr (Tiles == 3) asm volatile(STEP(TYPE, "24", R12, "%12, %13, %14, %15", "%16") : D12(d, 0) : OPERANDS);  \
    if constexpr (Tiles == 6) asm volatile(STEP(TYPE, "48", R24, "%24, %25, %26, %27", "%28") : D24(d, 0) : OPERANDS);  \
    if constexpr (Tiles == 7)                                                                                           \
        asm volatile(STEP(TYPE, "56", R28, "%28, %29, %30, %31", "%32") : D24(d, 0), D4(d, 24) : OPERANDS);

// D += A * B for A [64, 16], B [16, 8 * Tiles] and D of FP32: of column tile n, lane 4g + t holds rows g and g + 8 of its warp's
// 16, columns 2t and 2t + 1, in d[4n] to d[4n + 3]. A column of D depends on that column of B alone.
//
// `Element` says the format of the operands: BF16, or F16 for what comes from E4M3.
template <typename Element, int Tiles>
struct Products {
    static_assert(Tiles == 1 || Tiles == 3 || Tiles == 6 || Tiles == 7, "the forms that there are");

#if HAS_WGMMA
    // 16 k of all column tiles.
    using Right = uint64_t;

    // Step `step` of 16 k of the 64 in the atoms from `atoms` on, one atom a column tile.
    __device__ static Right right(const char *atoms, int step) { return wgmma_descriptor(atoms) + 2 * step; }

    __device__ static void multiply(float (&d)[Tiles * 4], const uint32_t (&a)[4], Right b) {
        if constexpr (sizeof(Element) == 1) {
            STEPS_OF("f16")
        } else {
            STEPS_OF("bf16")
        }
    }
#else
    struct Right {
        uint32_t of_tile[Tiles][2];
    };

    __device__ static Right right(const char *atoms, int step) {
        Right b;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < Tiles; n++) {
            const uint32_t address = shared_address(atoms + n * ATOM_BYTES + in_atom(lane % 8, 2 * step + lane / 8 % 2));
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                         : "=r"(b.of_tile[n][0]), "=r"(b.of_tile[n][1])
                         : "r"(address)
                         : "memory");
        }
        return b;
    }

    __device__ static void multiply(float (&d)[Tiles * 4], const uint32_t (&a)[4], const Right &b) {
#pragma unroll
        for (int n = 0; n < Tiles; n++) {
            float(&of_tile)[4] = reinterpret_cast<float(&)[4]>(d[4 * n]);
            if constexpr (sizeof(Element) == 1)
                asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                    "{%0, %1, %2, %3};"
                    : "+f"(of_tile[0]), "+f"(of_tile[1]), "+f"(of_tile[2]), "+f"(of_tile[3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.of_tile[n][0]), "r"(b.of_tile[n][1]));
            else
                mma_m16n8k16(of_tile, a, b.of_tile[n][0], b.of_tile[n][1]);
        }
    }
#endif
};

#undef STEP
#undef D4
#undef D12
#undef D24
#undef R4
#undef R12
#undef R24
#undef R28
#undef OPERANDS
#undef STEPS_OF

}  // namespace
}  // namespace attention::band
