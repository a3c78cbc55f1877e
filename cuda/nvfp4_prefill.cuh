// NVFP4 times NVFP4 for many rows: the quantiser that writes what the prefill band reads, and the NVFP4 format of it.
#pragma once

#include <cuda_runtime.h>

#include "nvfp4_rows.cuh"
#include "nvfp4_weights.cuh"
#include "prefill_band.cuh"

namespace nvfp4_prefill {
namespace {

using namespace nvfp4;

// A power-of-two multiple of an FP64 number as FP32 numbers, so that a result is finished without FP64: the number is
// (high + low) * rest to one part in 2^47, with 2^-60 <= |high| < 2^61 and `rest` a power of two that is 1 but for extreme
// rows.
struct alignas(16) RowScale {
    float high, low, rest, unused;
};

// Scales of 2^-208 and less make zeros of every sum, and those of 2^187 and more infinities, whatever `rest` says there.
__device__ __forceinline__ RowScale row_scale(double scale) {
    constexpr int MOST = 60;
    const int exponent = (__double2hiint(scale) >> 20 & 0x7ff) - 1023;  // scales are not negative
    const int rest = exponent - max(-MOST, min(exponent, MOST));
    // From here on 1024 for NaN and -1023 for zero do no harm: NaN stays, and zero too.
    const double scaled = scale * __hiloint2double((1023 - rest) << 20, 0);
    const float high = static_cast<float>(scaled);
    return {high, static_cast<float>(scaled - high), ldexpf(1.0f, max(-149, min(rest, 127))), 0.0f};
}

// What a call needs of scratch memory, aligned to 16 bytes: the activations' image, then a scale for each token, up to a whole
// unit of them.
struct Scratch {
    unsigned char *image;
    RowScale *rows;
    static int64_t bytes(int64_t m, int64_t k) {
        const int64_t units = (m + prefill_band::UNIT - 1) / prefill_band::UNIT;
        return prefill_band::image_bytes(m, k) + units * prefill_band::UNIT * static_cast<int64_t>(sizeof(RowScale));
    }
    Scratch(void *memory, int64_t m, int64_t k)
        : image(static_cast<unsigned char *>(memory)),
          rows(reinterpret_cast<RowScale *>(image + prefill_band::image_bytes(m, k))) {}
};

constexpr int QUANTISER_THREADS = 256;

// Four lanes with four items of two words each, i and i + 4, change them about, so that lane t has item t of each.
__device__ __forceinline__ void transpose_by_four(uint32_t (&words)[8], int t) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i & bit) continue;
            uint32_t &first = words[i], &second = words[i | bit];
            const bool upper = t & bit;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? first : second, bit);
            first = upper ? received : first;
            second = upper ? second : received;
        }
}

// Quantises row m under its global into row `in_unit` of the image's units from `unit` on, zeros past K.
template <typename T>
__device__ __forceinline__ void quantise_row(const Rows<T> &rows, int64_t m, unsigned char *unit, int in_unit, float global) {
    // Four of a tile for four lanes.
    const int blocks = static_cast<int>((rows.K + prefill_band::TILE_K - 1) / prefill_band::TILE_K * 4);
    const float reciprocal = __frcp_rn(global);
    const int lane = threadIdx.x % 32, t = lane % 4;
    // Whole warps go round, so that lanes can exchange; a block past the last is zeros that go nowhere.
    for (int first = threadIdx.x - lane; first < blocks; first += QUANTISER_THREADS) {
        const int block = first + lane;
        const Vector low = rows.load(m, 2 * static_cast<int64_t>(block)), high = rows.load(m, 2 * static_cast<int64_t>(block) + 1);
        const auto scale = BlockScale::of(max(low.largest_magnitude(), high.largest_magnitude()), global, reciprocal);
        const uint4 first_half = scale.quantise(low), second_half = scale.quantise(high);
        uint32_t pairs[BLOCK / 2] = {first_half.x,  first_half.y,  first_half.z,  first_half.w,
                                     second_half.x, second_half.y, second_half.z, second_half.w};
        // A chunk of the image is the same pair of each of the four blocks of a tile.
        transpose_by_four(pairs, t);
        if (block >= blocks) continue;
        uint4 *line = reinterpret_cast<uint4 *>(unit + static_cast<int64_t>(block / 4) * prefill_band::UNIT_BYTES) + in_unit * 8;
        line[t ^ in_unit % 8] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        line[(t + 4) ^ in_unit % 8] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

// One block quantises one row of x [M, K] into the image, and writes what finishes the row's sums: the row's global times
// `weights_scale`. A row that is not finite gets a scale of NaN and elements of zero.
template <typename T>
__global__ void __launch_bounds__(QUANTISER_THREADS, 6) quantise(const Rows<T> rows, Scratch scratch, double weights_scale) {
    const int64_t m = blockIdx.x;
    uint32_t largest = 0;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < rows.K / Vector::LENGTH; v += QUANTISER_THREADS)
        largest = max(largest, rows.load(m, v).largest_magnitude());
    const float global = rows.global(largest_of_block(largest));
    if (threadIdx.x == 0) scratch.rows[m] = row_scale(weights_scale * global);
    unsigned char *unit = scratch.image + m / prefill_band::UNIT * prefill_band::image_bytes(1, rows.K);
    quantise_row(rows, m, unit, static_cast<int>(m % prefill_band::UNIT), global);
}

struct Format : PackedWeights {
    using Row = RowScale;
    using Column = float;
    const RowScale *rows;

    Format(const PackedWeights &weights, const Scratch &scratch) : PackedWeights(weights), rows(scratch.rows) {}

    __device__ Row row(int64_t m) const {
        const float4 scale = *reinterpret_cast<const float4 *>(rows + m);
        return {scale.x, scale.y, scale.z, scale.w};
    }
    // Adding minus zero changes nothing.
    __device__ Column column(int64_t n) const { return bias == nullptr ? -0.0f : bias[n]; }
    __device__ float finish(float total, const Row &row, Column bias) const {
        return __fadd_rn(__fmaf_rn(total, row.high, __fmul_rn(total, row.low)) * row.rest, bias);
    }
};

// Queues the quantiser and the projection: y [M, N] of x [M, K], K a multiple of 16. `global` is the weights' global scale;
// `scratch` has `Scratch::bytes(m, k)` bytes.
template <typename T>
cudaError_t launch(const PackedWeights &weights, float global, const Rows<T> &rows, T *y, void *scratch, int64_t m, int64_t n,
                   int multiprocessors, cudaStream_t stream) {
    const Scratch memory(scratch, m, rows.K);
    quantise<<<static_cast<unsigned>(m), QUANTISER_THREADS, 0, stream>>>(rows, memory,
                                                                        static_cast<double>(global) * FRAGMENT_UNDO);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    return prefill_band::launch(Format(weights, memory), memory.image, y, m, n, rows.K, multiprocessors, stream);
}

// Loads the kernels into the current context and gives them their shared memory: once, before `launch`.
template <typename T>
cudaError_t prepare() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, quantise<T>);
    return error != cudaSuccess ? error : prefill_band::prepare<Format, T>();
}

}  // namespace
}  // namespace nvfp4_prefill
