// NVFP4 weights as they are packed, and their way into BF16 fragments.
//
// A tile is 16 features by 64 k. Lane 4g + t of a warp holds two blocks of it, of features g and g + 8, at k = 16t: eight bytes
// of codes each and one of scale. The packing is linear-proj-nvfp4's.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "convert.cuh"
#include "load.cuh"

namespace nvfp4 {
namespace {

// The eight pairs of a block, each an even element in the low and an odd one in the high half, as BF16 times 2^-126: the sign
// in its place, the other three bits as the low exponent bits and the high mantissa bit (so half is a BF16 subnormal).
//
// The bits of a pair lie so that a shift or rotation and one mask bring them there. Bits {15, 8, 7, 6} of each half of a word
// are the first pair, {9, 2, 1, 0} and {14, 13, 12} with a sign at 5 of the other half the next two. What is left of both
// words, put together by one shift and one selection, holds the last two pairs in the same manner. Sixteen operations for eight
// pairs.
__device__ __forceinline__ void e2m1_pairs(uint32_t (&pair)[8], uint32_t first, uint32_t second) {
    constexpr uint32_t PAIR = 0x81c081c0u, LEFT_OF_FIRST = 0x0c180c18u;
    const auto rotate = [](uint32_t word, int bits) { return __funnelshift_r(word, word, bits); };
    const uint32_t rest = (first & LEFT_OF_FIRST) | ((second << 2) & ~LEFT_OF_FIRST);
    pair[0] = first & PAIR;
    pair[1] = (first << 6) & PAIR;
    pair[2] = rotate(first, 6) & PAIR;
    pair[3] = second & PAIR;
    pair[4] = (second << 6) & PAIR;
    pair[5] = rotate(second, 6) & PAIR;
    pair[6] = (rest << 2) & PAIR;
    pair[7] = rotate(rest, 4) & PAIR;
}

// A block scale times 2^119 in both halves. Packed scales have five exponent bits, of bias 22, and the three mantissa bits of
// E4M3, whose subnormal numbers they hold as normal ones; the BF16 exponent has three more bits above them, all set.
template <int Byte>
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t scales) {
    return __byte_perm(scales, 0, 0x4040 | Byte << 8 | Byte) * 16u + 0x70007000u;
}

// What a lane holds of a tile.
struct Weights {
    uint4 codes;      // the block of feature g in x and y, of feature g + 8 in z and w
    uint32_t scales;  // of feature g in the low byte, of feature g + 8 in the next
};

// Fragments are 2^-7 of the numbers: codes come as 2^-126 of theirs and scales as 2^119.
constexpr float FRAGMENT_UNDO = 128.0f;

struct PackedWeights {
    static constexpr int TILE_K = 64;
    using Weights = nvfp4::Weights;

    const uint4 *codes;            // [ceil(N / 16), ceil(K / 64), 32 lanes]
    const unsigned short *scales;  // [ceil(N / 16), ceil(K / 64), 32 lanes] of two packed scales
    const float *bias;             // [N], or null

    __device__ Weights load(int64_t tile, int lane) const {
        return {load_streaming(codes + tile * 32 + lane), load_streaming(scales + tile * 32 + lane)};
    }

    // The A fragments of a tile's four m16n8k16 steps; step s has elements 4s to 4s + 3 of the lane's blocks.
    __device__ static void fragments(const Weights &w, uint32_t (&a)[4][4]) {
        uint32_t upper[8], lower[8];
        e2m1_pairs(upper, w.codes.x, w.codes.y);
        e2m1_pairs(lower, w.codes.z, w.codes.w);
        const uint32_t upper_scale = scale_bf16x2<0>(w.scales), lower_scale = scale_bf16x2<1>(w.scales);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            a[i / 2][i % 2 * 2] = multiply_bf16x2(upper[i], upper_scale);
            a[i / 2][i % 2 * 2 + 1] = multiply_bf16x2(lower[i], lower_scale);
        }
    }
};

}  // namespace
}  // namespace nvfp4
