// BF16 weights as they lie on the device, one copy for the decode band and for prompts: [ceil(N / 16), ceil(K / 32)] tiles of 16
// features by 32 k, 1 KiB each, zeros past N and K.
//
// A tile has a row of 64 bytes for each feature, its 16-byte chunk c in place c ^ (feature / 2 % 4). So a warp loads a tile as two
// times 512 bytes in a row for `mma.m16n8k16`, and `wgmma` takes eight rows as an atom of its 64-byte swizzle.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "decode_band.cuh"
#include "load.cuh"
#include "mma.cuh"

namespace bf16_weights {
namespace {

constexpr int GROUP = 16, TILE_K = 32;     // features and k of a tile
constexpr int CHUNK = 8;                   // k of 16 bytes
constexpr int ROW_CHUNKS = TILE_K / CHUNK;
constexpr int TILE_CHUNKS = GROUP * ROW_CHUNKS;
constexpr int HALF_CHUNKS = TILE_CHUNKS / 2;

__host__ __device__ __forceinline__ int64_t groups(int64_t n) { return (n + GROUP - 1) / GROUP; }
__host__ __device__ __forceinline__ int64_t tiles(int64_t k) { return (k + TILE_K - 1) / TILE_K; }

// Where chunk `chunk` of a feature stands in its tile.
__host__ __device__ __forceinline__ int chunk_index(int feature, int chunk) {
    return feature * ROW_CHUNKS + (chunk ^ feature / 2 % ROW_CHUNKS);
}

// The format of the decode band.
struct Format {
    static constexpr int TILE_K = bf16_weights::TILE_K;
    struct Weights {
        uint4 upper, lower;  // eight k of row g, the same of row g + 8
    };

    const uint4 *weights;

    struct Cursor {
        const uint4 *weights;

        __device__ Weights load(int tiles) const {
            const uint4 *upper = weights + tiles * TILE_CHUNKS;
            return {load_streaming(upper), load_streaming(upper + HALF_CHUNKS)};
        }
        __device__ void advance(int tiles) { weights += tiles * TILE_CHUNKS; }
    };
    __device__ Cursor at(int64_t tile, int lane) const {
        return {weights + tile * TILE_CHUNKS + chunk_index(lane / 4, lane % 4)};
    }

    template <int ColumnTiles>
    __device__ void multiply(float (&sum)[ColumnTiles][4], const Weights &w, const uint4 (&x)[ColumnTiles][1]) const {
        const uint32_t first[4] = {w.upper.x, w.lower.x, w.upper.y, w.lower.y};
        const uint32_t second[4] = {w.upper.z, w.lower.z, w.upper.w, w.lower.w};
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++) {
            mma_m16n8k16(sum[c], first, x[c][0].x, x[c][0].y);
            mma_m16n8k16(sum[c], second, x[c][0].z, x[c][0].w);
        }
    }

    template <typename Rows>
    __device__ float finish(float total, const Rows &, int, int64_t) const {
        return total;
    }
};

}  // namespace
}  // namespace bf16_weights

// F32 rows, such as those of the vocabulary head, keep their FP32 sums.
template <>
constexpr bool decode_band::ROUNDED<bf16_weights::Format> = false;
