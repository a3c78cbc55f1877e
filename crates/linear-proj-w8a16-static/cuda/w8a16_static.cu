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

    __device__ void prefetch(int64_t tile, int line) const { prefetch_line(weights + tile * 32 + line * 8); }

    struct Cursor {
        const uint4 *weights;
        decode_band::Index fragment;

        __device__ Weights load(int tiles) const { return load_streaming(weights + fragment.value + tiles * 32); }
        __device__ void advance(int tiles) { fragment.advance(tiles * 32); }
    };
    __device__ Cursor at(int64_t tile, int lane) const { return {weights, {static_cast<uint32_t>(tile * 32 + lane)}}; }

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

    template <typename Rows>
    __device__ float finish(float total, const Rows &, int, int64_t n) const {
        total = __fmul_rn(scales[n], __fmul_rn(INT8_UNDO, total));
        return bias == nullptr ? total : __fadd_rn(total, bias[n]);
    }
};

using decode_band::Activations;
using decode_band::Form;
using decode_band::Tail;

// Into how many slices K is cut: more where the row groups alone give too few blocks to keep the memory bus busy. By them alone, so
// that the order of a sum does not depend on M.
int slices(int64_t groups) {
    return groups <= 64 ? 8 : groups <= 960 ? 2 : 1;
}

// A form that keeps four loads or so under way, and more to come in L2.
template <int NWarps, int Groups, int InFlight>
using Ahead = Form<NWarps, Groups, InFlight, Tail::Zero, Activations::Early, 0, 8>;

// The fastest forms of those that were measured on an H200. Blocks divide evenly among its multiprocessors, all resident at once:
// one to nine each. Two column tiles need more registers, so fewer loads. With very many blocks the last wave does not matter,
// and row groups share activations.
template <typename T, bool Whole>
auto choose(int64_t m, int64_t groups, int64_t k) {
    using Rows = decode_band::GlobalRows<T, Int8PerChannel::TILE_K, Whole>;
    const auto kernel = [m](auto narrow, auto wide) {
        return m > decode_band::COLUMNS ? decode_band::kernel<decltype(wide), 2, Int8PerChannel, Rows, T>()
                                        : decode_band::kernel<decltype(narrow), 1, Int8PerChannel, Rows, T>();
    };
    if constexpr (Whole) {
        if (groups <= 64) return kernel(Form<2, 1, 5, Tail::Zero>(), Form<1, 1, 5, Tail::Zero>());
        if (groups <= 512 && k <= 8192) return kernel(Ahead<1, 1, 6>(), Ahead<1, 1, 5>());
        if (groups <= 512) return kernel(Ahead<5, 1, 5>(), Ahead<5, 1, 4>());
        if (groups <= 960) return kernel(Ahead<2, 2, 4>(), Ahead<2, 2, 2>());
        if (groups <= 2048) return kernel(Ahead<3, 1, 5>(), Ahead<3, 1, 2>());
        return kernel(Form<1, 2, 4, Tail::Zero>(), Form<1, 2, 2, Tail::Zero>());
    }
    // Rows that are not whole tiles are rare and slow by nature: one form serves them.
    return kernel(Form<1, 1, 4, Tail::Zero>(), Form<1, 1, 4, Tail::Zero>());
}

template <typename T, bool Whole>
cudaError_t launch(const w8a16_static_call &call, cudaStream_t stream) {
    decode_band::Matrices<Int8PerChannel, T> matrices = {};
    for (; matrices.count < call.count; matrices.count++) {
        const w8a16_static_matrix &matrix = call.matrices[matrices.count];
        matrices.all[matrices.count] = {{static_cast<const uint4 *>(matrix.weights), matrix.scales, matrix.bias},
                                        static_cast<T *>(matrix.y),
                                        matrix.n};
    }
    const int64_t groups = decode_band::groups(matrices);
    const decode_band::GlobalRows<T, Int8PerChannel::TILE_K, Whole> rows = {static_cast<const T *>(call.x),
                                                                            static_cast<int>(call.m), call.k};
    return decode_band::launch(choose<T, Whole>(call.m, groups, call.k), matrices, rows, 0, call.m, call.k,
                               call.clusters ? slices(groups) : 1, call.overlap != 0, stream);
}

template <typename T>
cudaError_t launch(const w8a16_static_call &call, cudaStream_t stream) {
    return call.k % Int8PerChannel::TILE_K == 0 ? launch<T, true>(call, stream) : launch<T, false>(call, stream);
}

template <typename T>
cudaError_t prepare() {
    for (int64_t m : {1, decode_band::MAX_ROWS})
        for (int64_t groups : {1, 65, 513, 961, 2049})
            for (int64_t k : {32, 16384}) {
                cudaError_t error = decode_band::load(choose<T, true>(m, groups, k).function);
                if (error == cudaSuccess) error = decode_band::load(choose<T, false>(m, groups, k).function);
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
    if (call->count < 1 || call->count > W8A16_STATIC_MAX_MATRICES) return cudaErrorInvalidValue;
    for (int i = 0; i < call->count; i++)
        if (!decode_band::takes(call->m, call->matrices[i].n, call->k)) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case W8A16_STATIC_F32: return launch<float>(*call, stream);
        case W8A16_STATIC_F16: return launch<__half>(*call, stream);
        case W8A16_STATIC_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" const char *w8a16_static_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
