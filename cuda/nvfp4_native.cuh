// NVFP4 times NVFP4 in the decode band of sm_120a, whose tensor core takes E2M1 codes and their UE4M3 scales as they are. Compiled,
// and not run yet on any device.
//
// The slices of K and what becomes of a sum are those of nvfp4_decode.cuh. Each step of the tensor core is one tile of 16 features,
// 8 rows and 64 k: four blocks of 16 with a scale each on both sides, into FP32 sums.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "decode_band.cuh"
#include "load.cuh"
#include "nvfp4_decode.cuh"
#include "nvfp4_rows.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_BLOCK_SCALED_MMA 1
#else
#define HAS_BLOCK_SCALED_MMA 0
#endif

namespace nvfp4_native {
namespace {

using namespace nvfp4;
using nvfp4_decode::Scratch;

// D += (A * scale_A) * (B * scale_B) for A [16, 64] and B [64, 8] of E2M1, scales of 16 along K, D [16, 8] of FP32 (PTX ISA,
// mma.m16n8k64 with kind::mxf4nvf4 and scale_vec::4X).
//
// A word is eight codes, the lowest k in the lowest bits. Lane 4g + t holds those from k = 8t and 32 + 8t on: of rows g and g +
// 8 of A, the lower k of both rows first, and of column g of B. The scales of a row or column are the four bytes of a word, in
// the order of k. With selectors of zero the lanes of t = 0 and 1 give those of rows g and g + 8, the lane of t = 0 those of
// column g.
__device__ __forceinline__ void mma_m16n8k64(float (&d)[4], const uint4 &a, uint32_t scale_a, uint32_t b0, uint32_t b1,
                                             uint32_t scale_b) {
#if HAS_BLOCK_SCALED_MMA
    asm("{ .reg .b16 zero; mov.b16 zero, 0; "
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {zero, zero}, {%11}, {zero, zero}; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b));
#endif
}

// Eight numbers as E2M1 codes, the first in the lowest bits: to nearest, ties to even, saturating.
__device__ __forceinline__ uint32_t e2m1_codes(const float (&x)[8]) {
    uint32_t codes = 0;
#if HAS_BLOCK_SCALED_MMA
    asm("{ .reg .b8 pair<4>; "
        "cvt.rn.satfinite.e2m1x2.f32 pair0, %2, %1; "
        "cvt.rn.satfinite.e2m1x2.f32 pair1, %4, %3; "
        "cvt.rn.satfinite.e2m1x2.f32 pair2, %6, %5; "
        "cvt.rn.satfinite.e2m1x2.f32 pair3, %8, %7; "
        "mov.b32 %0, {pair0, pair1, pair2, pair3}; }"
        : "=r"(codes)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#endif
    return codes;
}

// How the quantiser leaves rows: the B fragments of a tile with their scales, [ceil(K / 64)][column tiles of 8 rows][32 lanes] of
// two words of codes, the scales of the lane's column, and nothing. Every lane of a quad has the scales.
struct Fragments {
    // Eight threads side by side have the vectors of a tile. The first four are of the lower k of a quad's lanes and the others of
    // the upper, which they give to the first to store.
    __device__ static void store(uint4 *quantised, int64_t m, int64_t vector, int column_tiles, const Vector &in, float global,
                                 float reciprocal) {
        const unsigned threads = 0xffu << (threadIdx.x % 32 & ~7u);
        const int in_tile = static_cast<int>(vector % 8);
        uint32_t largest = in.largest_magnitude();
        largest = max(largest, __shfl_xor_sync(threads, largest, 1));
        const BlockScale block = BlockScale::of(largest, global, reciprocal);
        float quotients[Vector::LENGTH];
#pragma unroll
        for (int i = 0; i < Vector::LENGTH; i++) quotients[i] = block.live ? block.step.divide(in.x[i]) : 0.0f;
        const uint32_t codes = e2m1_codes(quotients);
        uint32_t scales = block.live ? static_cast<uint32_t>(block.code) << in_tile / 2 * 8 : 0;
        scales |= __shfl_xor_sync(threads, scales, 2);
        scales |= __shfl_xor_sync(threads, scales, 4);
        const uint32_t upper = __shfl_xor_sync(threads, codes, 4);
        if (in_tile >= 4) return;
        quantised[((vector / 8 * column_tiles + m / 8) * 8 + m % 8) * 4 + in_tile] = make_uint4(codes, upper, scales, 0);
    }
};

// Rows that the quantiser has left.
template <int ColumnTiles>
struct QuantisedRows {
    const uint4 *x;        // as Fragments says
    const float *globals;  // [M]

    __device__ static void open(int) {}
    __device__ void prepare(const decode_band::Shape &, int64_t, int64_t, char *) { wait_for_previous(); }

    using Cursor = const uint4 *;
    // Lane t is asked for k = 16t on of its tile.
    __device__ Cursor at(int m, int64_t k) const {
        return x + ((k / 64 * ColumnTiles + m / 8) * 8 + m % 8) * 4 + k / BLOCK % 4;
    }
    __device__ static uint4 load(Cursor at, int tiles, int, int64_t) { return load_cached(at + tiles * ColumnTiles * 32); }
    __device__ static void advance(Cursor &at, int tiles) { at += tiles * ColumnTiles * 32; }
    __device__ float global(int m) const { return globals[m]; }
};

// Weights as linear-proj-nvfp4's native_tiles.rs packs them.
struct Format {
    static constexpr int TILE_K = 64;
    struct Weights {
        uint4 codes;      // the A fragment
        uint32_t scales;  // of row g in the lanes of even t, of row g + 8 in those of odd t
    };

    const uint4 *codes;      // [ceil(N / 16), ceil(K / 64), 32 lanes]
    const uint32_t *scales;  // [ceil(N / 16), ceil(K / 64), 16 features]
    const float *bias;       // [N], or null
    float global;

    struct Cursor {
        const uint4 *codes;
        const uint32_t *scales;

        __device__ Weights load(int tiles) const {
            return {load_streaming(codes + tiles * 32), load_streaming(scales + tiles * 16)};
        }
        __device__ void advance(int tiles) { codes += tiles * 32, scales += tiles * 16; }
    };
    __device__ Cursor at(int64_t tile, int lane) const {
        return {codes + tile * 32 + lane, scales + tile * 16 + lane / 4 + lane % 2 * 8};
    }

    template <int ColumnTiles>
    __device__ void multiply(float (&sum)[ColumnTiles][4], const Weights &w, const uint4 (&x)[ColumnTiles][1]) const {
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++) mma_m16n8k64(sum[c], w.codes, w.scales, x[c][0].x, x[c][0].y, x[c][0].z);
    }

    // As nvfp4_decode::Format does, of a sum that has its own magnitude.
    template <typename Rows>
    __device__ float finish(float total, const Rows &rows, int m, int64_t n) const {
        const float scaled = static_cast<float>(static_cast<double>(global) * rows.global(m) * static_cast<double>(total));
        return bias == nullptr ? scaled : __fadd_rn(scaled, bias[n]);
    }
};

}  // namespace
}  // namespace nvfp4_native

template <>
constexpr int decode_band::VECTORS<nvfp4_native::Format> = 1;
template <>
constexpr bool decode_band::COMPILED<nvfp4_native::Format> = HAS_BLOCK_SCALED_MMA;
template <>
constexpr bool decode_band::COMPILED<nvfp4_native::Fragments> = HAS_BLOCK_SCALED_MMA;

namespace nvfp4_native {
namespace {

// One form for every shape: none has been measured.
using Form = decode_band::Form<1, 2, 4, decode_band::Tail::Skip>;

template <int ColumnTiles, typename T>
auto kernel() {
    return decode_band::kernel<Form, ColumnTiles, Format, QuantisedRows<ColumnTiles>, T>();
}

// Queues the quantiser and the projection of x [M, K] by all matrices, M up to 16, K a multiple of 16.
template <typename Rows>
cudaError_t launch(const decode_band::Matrices<Format, typename Rows::Element> &matrices, const Rows &rows, const Scratch &scratch,
                   int64_t m, bool clusters, bool overlap, cudaStream_t stream) {
    using T = typename Rows::Element;
    const int64_t k = rows.K, groups = decode_band::groups(matrices);
    const int column_tiles = m > decode_band::COLUMNS ? 2 : 1, slices = clusters ? nvfp4_decode::slices(groups) : 1;
    const cudaError_t error = nvfp4_decode::launch_quantiser<Fragments>(rows, scratch, m, column_tiles, overlap, stream);
    if (error != cudaSuccess) return error;
    if (column_tiles == 2) {
        const QuantisedRows<2> quantised = {scratch.rows, scratch.globals};
        return decode_band::launch(kernel<2, T>(), matrices, quantised, 0, m, k, slices, overlap, stream);
    }
    const QuantisedRows<1> quantised = {scratch.rows, scratch.globals};
    return decode_band::launch(kernel<1, T>(), matrices, quantised, 0, m, k, slices, overlap, stream);
}

// Loads every kernel that `launch` may choose into the current context.
template <typename Rows>
cudaError_t prepare() {
    using T = typename Rows::Element;
    cudaError_t error = nvfp4_decode::prepare_quantiser<Fragments, Rows>();
    if (error == cudaSuccess) error = decode_band::load(kernel<1, T>().function);
    return error != cudaSuccess ? error : decode_band::load(kernel<2, T>().function);
}

}  // namespace
}  // namespace nvfp4_native
