// The second kernel of attention: adds up the splits of a row, in a fixed order that its position alone decides.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cuda_bf16.h>

#include "attention.cuh"
#include "attention_splits.cuh"
#include "launch.cuh"

namespace attention::band {
namespace {

constexpr int MAX_COLUMNS = 56;  // query vectors of a KV head in one pass

// Rows of one pass over the store.
inline int pass_rows(int group) { return MAX_COLUMNS / group < MAX_QUERY_ROWS ? MAX_COLUMNS / group : MAX_QUERY_ROWS; }

// What the splits leave: of each column, the sum of its values by weights relative to its largest score, that score (times
// log2(e)) and the sum of the weights.
struct Scratch {
    float *outputs;   // [splits, kv_heads, columns, head_dim]
    float2 *weights;  // [splits, kv_heads, columns]: largest score, sum
    int32_t columns;

    static int64_t columns_of(int splits, int kv_heads, int group) {
        return static_cast<int64_t>(splits) * kv_heads * pass_rows(group) * group;
    }
    static int64_t bytes(int splits, int kv_heads, int group, int head_dim) {
        return columns_of(splits, kv_heads, group) * (head_dim * sizeof(float) + sizeof(float2));
    }
    static Scratch in(void *memory, int splits, int kv_heads, int group, int head_dim) {
        float *outputs = static_cast<float *>(memory);
        float *end = outputs + columns_of(splits, kv_heads, group) * head_dim;
        return {outputs, reinterpret_cast<float2 *>(end), pass_rows(group) * group};
    }
};

// A run of rows of one call that a launch serves: as many as have columns.
struct Pass {
    int64_t first_row;
    int32_t rows;
    int32_t splits;    // at most, of the window
    int32_t slots;     // of the ring
    float log2_scale;  // of a score, times log2(e)
};

// What the second kernel knows of the store.
struct Values {
    const float *scales;  // [kv_heads], or null
    int32_t kv_heads;
    int64_t window;
};

__device__ __forceinline__ float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ void add(float4 &sum, float weight, const float4 &value) {
    sum.x = __fmaf_rn(weight, value.x, sum.x);
    sum.y = __fmaf_rn(weight, value.y, sum.y);
    sum.z = __fmaf_rn(weight, value.z, sum.z);
    sum.w = __fmaf_rn(weight, value.w, sum.w);
}

namespace combining {

constexpr int THREADS = 128;
constexpr int PART = 64;                 // elements of head_dim of a block
constexpr int LANES = PART / 4;          // threads that share a split
constexpr int SLICES = THREADS / LANES;  // slice i has splits i, i + SLICES and so on
constexpr int MAX_AHEAD = (MAX_SPLITS + SLICES - 1) / SLICES, FEW_AHEAD = 5;  // splits of a slice

// No slice has more than `AHEAD` splits: with few, all blocks of many rows are resident at once.
template <int AHEAD>
__global__ void __launch_bounds__(THREADS) kernel(Values values, Queries queries, Scratch scratch, Pass pass) {
    extern __shared__ float2 weights[];  // [splits]
    __shared__ float largest_of_warp[THREADS / 32];
    __shared__ float4 sums[SLICES][LANES];
    __shared__ float totals[SLICES];

    const int parts = queries.head_dim / PART;
    const int part = static_cast<int>(blockIdx.x) % parts;
    const int head = static_cast<int>(blockIdx.x) / parts % queries.heads;
    const int row = static_cast<int>(blockIdx.x) / parts / queries.heads;
    const int group = queries.heads / values.kv_heads;
    const int64_t column = static_cast<int64_t>(head / group) * scratch.columns + row * group + head % group;
    const int64_t stride = static_cast<int64_t>(values.kv_heads) * scratch.columns;
    const int lane = threadIdx.x % LANES, slice = threadIdx.x / LANES;
    let_next_start();
    wait_for_previous();

    // All that may be there is asked for together, and what the row does not reach is left out.
    const float4 *outputs = reinterpret_cast<const float4 *>(scratch.outputs + column * queries.head_dim + part * PART) + lane;
    const int64_t output_stride = stride * queries.head_dim / 4;
    const int32_t position = *queries.position;
    float4 ahead[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (slice + i * SLICES < pass.splits) ahead[i] = outputs[(slice + i * SLICES) * output_stride];
    for (int split = threadIdx.x; split < pass.splits; split += THREADS) weights[split] = scratch.weights[column + split * stride];
    const int64_t positions = min(position + pass.first_row + row + 1, values.window);
    const int splits = Splits::of(pass.splits, positions).count(positions);

    float largest = -FLT_MAX;
    for (int split = threadIdx.x; split < splits; split += THREADS) largest = fmaxf(largest, weights[split].x);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) largest = fmaxf(largest, largest_of_warp[w]);

    float4 sum = {};
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const int split = slice + i * SLICES;
        if (split >= splits) break;
        const float weight = exp2_fast(__fadd_rn(weights[split].x, -largest));
        total = __fmaf_rn(weight, weights[split].y, total);
        add(sum, weight, ahead[i]);
    }
    sums[slice][lane] = sum;
    if (lane == 0) totals[slice] = total;
    __syncthreads();

    if (threadIdx.x >= PART) return;
    float element = 0.0f, all = 0.0f;
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        element = __fadd_rn(element, reinterpret_cast<const float *>(sums[i])[threadIdx.x]);
        all = __fadd_rn(all, totals[i]);
    }
    const float scale = values.scales == nullptr ? 1.0f : values.scales[head / group];
    const int64_t vector = (pass.first_row + row) * queries.heads + head;
    queries.out[vector * queries.head_dim + part * PART + threadIdx.x] =
        __float2bfloat16_rn(__fmul_rn(__fdiv_rn(element, all), scale));
}

}  // namespace combining

inline cudaError_t load_combine() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, combining::kernel<combining::FEW_AHEAD>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, combining::kernel<combining::MAX_AHEAD>) : error;
}

inline cudaError_t combine(const Values &values, const Queries &queries, const Scratch &scratch, const Pass &pass, bool overlap,
                           cudaStream_t stream) {
    using namespace combining;
    const Launch launch = {.blocks = static_cast<int64_t>(pass.rows) * queries.heads * (queries.head_dim / PART),
                           .threads = combining::THREADS,
                           .shared = pass.splits * sizeof(float2),
                           .overlap = overlap,
                           .stream = stream};
    const auto function = pass.splits <= FEW_AHEAD * SLICES ? kernel<FEW_AHEAD> : kernel<MAX_AHEAD>;
    return launch_kernel(launch, function, values, queries, scratch, pass);
}

}  // namespace
}  // namespace attention::band
