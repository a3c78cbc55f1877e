// linear_proj/w8a16_static, decode band: M = 1 to 16 rows, row-invariant, each weight read once.
//
// One tensor-core form serves every M: 16 weight rows on the row side of the MMA, tokens on its 8 columns, two column
// tiles for M > 8. A token's column meets the same weights in the same order whatever M is, so its bits do not depend on the
// other rows. A CTA owns 16 output features; its warps take the 32-wide tiles of K in turn and their partial sums are
// added in warp order.
#include "w8a16_static.h"

#include <cuda_runtime.h>

#include "convert.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace {

constexpr int WARPS = 8;      // warps of a CTA: how many ways K is split
constexpr int IN_FLIGHT = 4;  // 16-byte weight loads that a lane has under way
constexpr int TILE_N = 16;    // output features of a CTA
constexpr int TILE_K = 32;    // k of one 16-byte load of a lane: two MMA steps
constexpr int COLUMNS = 8;    // tokens of a column tile

// One tile of weights (16 bytes a lane: row g in x and y, row g + 8 in z and w) times 8 activations of the lane's column.
__device__ __forceinline__ void multiply(float (&sum)[4], const uint4 &w, const uint4 &x) {
    const uint32_t first[4] = {bf16x2_from_int8<0>(w.x), bf16x2_from_int8<0>(w.z), bf16x2_from_int8<1>(w.x),
                               bf16x2_from_int8<1>(w.z)};
    mma_m16n8k16(sum, first, x.x, x.y);
    const uint32_t second[4] = {bf16x2_from_int8<0>(w.y), bf16x2_from_int8<0>(w.w), bf16x2_from_int8<1>(w.y),
                                bf16x2_from_int8<1>(w.w)};
    mma_m16n8k16(sum, second, x.z, x.w);
}

// weights: [ceil(N / 16), ceil(K / 32), 32, 16] INT8; scales, bias: [N]; x: [M, K]; y: [M, N]; M <= 8 * ColumnTiles.
template <typename T, int ColumnTiles, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    project(const uint4 *__restrict__ weights, const float *__restrict__ scales, const float *__restrict__ bias,
            const T *__restrict__ x, T *__restrict__ y, int M, int64_t N, int64_t K) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int64_t tiles = (K + TILE_K - 1) / TILE_K;
    const uint4 *tile = weights + blockIdx.x * tiles * 32 + lane;

    float sum[ColumnTiles][4] = {};
    for (int64_t first = warp; first < tiles; first += WARPS * IN_FLIGHT) {
        uint4 w[IN_FLIGHT], in[ColumnTiles][IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int64_t index = first + i * WARPS;
            w[i] = index < tiles ? load_streaming(tile + index * 32) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int64_t k = (first + i * WARPS) * TILE_K + t * 8;
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++) {
                const int m = c * COLUMNS + g;
                in[c][i] = m < M ? load_row8<Aligned>(x + m * K, k, K) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++) multiply(sum[c], w[i], in[c][i]);
    }

    // Partial sums by warp, feature and token. The lane holds tokens 2t and 2t + 1 of features g and g + 8.
    __shared__ float partial[WARPS][TILE_N][ColumnTiles * COLUMNS];
#pragma unroll
    for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) partial[warp][g + i / 2 * 8][c * COLUMNS + t * 2 + i % 2] = sum[c][i];
    __syncthreads();

    // Neighbouring threads write neighbouring features.
    for (int index = threadIdx.x; index < TILE_N * M; index += WARPS * 32) {
        const int feature = index % TILE_N, m = index / TILE_N;
        const int64_t n = static_cast<int64_t>(blockIdx.x) * TILE_N + feature;
        if (n >= N) continue;
        float total = partial[0][feature][m];
#pragma unroll
        for (int w = 1; w < WARPS; w++) total = __fadd_rn(total, partial[w][feature][m]);
        total = __fmul_rn(scales[n], total);
        if (bias != nullptr) total = __fadd_rn(total, bias[n]);
        y[m * N + n] = from_bf16<T>(__float2bfloat16_rn(total));
    }
}

template <typename T>
using Kernel = void (*)(const uint4 *, const float *, const float *, const T *, T *, int, int64_t, int64_t);

template <typename T>
Kernel<T> kernel(int64_t m, int64_t k) {
    const bool wide = m > COLUMNS, aligned = k % 8 == 0;
    if (aligned) return wide ? project<T, 2, true> : project<T, 1, true>;
    return wide ? project<T, 2, false> : project<T, 1, false>;
}

template <typename T>
cudaError_t launch(const w8a16_static_call &call, cudaStream_t stream) {
    const int64_t blocks = (call.n + TILE_N - 1) / TILE_N;
    kernel<T>(call.m, call.k)<<<static_cast<unsigned>(blocks), WARPS * 32, 0, stream>>>(
        static_cast<const uint4 *>(call.weights), call.scales, call.bias, static_cast<const T *>(call.x),
        static_cast<T *>(call.y), static_cast<int>(call.m), call.n, call.k);
    return cudaGetLastError();
}

template <typename T>
cudaError_t prepare() {
    for (int64_t m : {1, 16})
        for (int64_t k : {1, 8}) {
            cudaFuncAttributes attributes;
            const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel<T>(m, k));
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

}  // namespace

extern "C" int w8a16_static_prepare(void) {
    for (cudaError_t error : {prepare<float>(), prepare<__half>(), prepare<__nv_bfloat16>()})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int w8a16_static_project(const w8a16_static_call *call, cudaStream_t stream) {
    if (call->m < 1 || call->m > 2 * COLUMNS || call->n < 1 || call->k < 1) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case W8A16_STATIC_F32: return launch<float>(*call, stream);
        case W8A16_STATIC_F16: return launch<__half>(*call, stream);
        case W8A16_STATIC_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" const char *w8a16_static_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
