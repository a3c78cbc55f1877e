// linear_proj/w8a16_static: INT8 weights in the decode band.
#include "w8a16_static.h"

#include "convert.cuh"
#include "decode_band.cuh"

namespace {

struct Int8PerChannel {
    static constexpr int TILE_K = 32;
    using Weights = uint4;  // eight codes of row g in x and y, the same eight k of row g + 8 in z and w

    const uint4 *weights;  // [ceil(N / 16), ceil(K / 32), 32 lanes]
    const float *scales;   // [N]
    const float *bias;     // [N], or null

    __device__ Weights load(int64_t tile, int lane) const { return load_streaming(weights + tile * 32 + lane); }

    // The weights are converted once for all column tiles.
    template <int ColumnTiles>
    __device__ void multiply(float (&sum)[ColumnTiles][4], const Weights &w, const uint4 (&x)[ColumnTiles][1]) const {
        const uint32_t first[4] = {bf16x2_from_int8<0>(w.x), bf16x2_from_int8<0>(w.z), bf16x2_from_int8<1>(w.x),
                                   bf16x2_from_int8<1>(w.z)};
        const uint32_t second[4] = {bf16x2_from_int8<0>(w.y), bf16x2_from_int8<0>(w.w), bf16x2_from_int8<1>(w.y),
                                    bf16x2_from_int8<1>(w.w)};
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++) {
            mma_m16n8k16(sum[c], first, x[c][0].x, x[c][0].y);
            mma_m16n8k16(sum[c], second, x[c][0].z, x[c][0].w);
        }
    }

    __device__ float finish(float total, int, int64_t n) const {
        total = __fmul_rn(scales[n], total);
        return bias == nullptr ? total : __fadd_rn(total, bias[n]);
    }
};

template <typename T>
cudaError_t launch(const w8a16_static_call &call, cudaStream_t stream) {
    const Int8PerChannel format = {static_cast<const uint4 *>(call.weights), call.scales, call.bias};
    return decode_band::launch(format, static_cast<const T *>(call.x), static_cast<T *>(call.y), call.m, call.n, call.k,
                               call.slices, stream);
}

}  // namespace

extern "C" int w8a16_static_prepare(void) {
    for (cudaError_t error : {decode_band::prepare<Int8PerChannel, float, float>(),
                              decode_band::prepare<Int8PerChannel, __half, __half>(),
                              decode_band::prepare<Int8PerChannel, __nv_bfloat16, __nv_bfloat16>()})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int w8a16_static_project(const w8a16_static_call *call, cudaStream_t stream) {
    if (!decode_band::takes(call->m, call->n, call->k, call->slices)) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case W8A16_STATIC_F32: return launch<float>(*call, stream);
        case W8A16_STATIC_F16: return launch<__half>(*call, stream);
        case W8A16_STATIC_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" const char *w8a16_static_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
