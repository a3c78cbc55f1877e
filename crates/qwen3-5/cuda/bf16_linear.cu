// The host's projections: BF16 weights in the decode band, and in the kernel for prompts.
#include "bf16_linear.h"

#include <algorithm>
#include <type_traits>

#include "bf16_prefill.cuh"
#include "bf16_weights.cuh"
#include "decode_band.cuh"

namespace {

using bf16_weights::Format;
using decode_band::Form;
using decode_band::Tail;

// Into how many slices K is cut: so many that there are about five or six blocks for each multiprocessor of an H200, the fewest
// that keep its memory bus busy, and fewer where K is short. By row groups and K alone, so that the order of a sum does not depend
// on M.
int slices(int64_t groups, int64_t k) {
    return groups <= 96 ? (k <= 4096 ? 4 : 8) : groups <= 192 ? 4 : groups <= 480 ? 2 : 1;
}

// The fastest forms of those that were measured on an H200: many loads under way, five blocks of one row group a multiprocessor.
// Where that leaves a second wave of few blocks, smaller ones that are resident together. Where there are many waves, rows of F32
// take so long to load that row groups share them.
template <typename T, bool Whole>
auto choose(int64_t m, int64_t groups, int64_t k) {
    using Rows = decode_band::GlobalRows<T, Format::TILE_K, Whole>;
    const auto kernel = [m](auto narrow, auto wide) {
        return m > decode_band::COLUMNS ? decode_band::kernel<decltype(wide), 2, Format, Rows, T>()
                                        : decode_band::kernel<decltype(narrow), 1, Format, Rows, T>();
    };
    // Rows that are not whole tiles are rare and slow by nature: one form serves them.
    if constexpr (!Whole) return kernel(Form<1, 1, 2, Tail::Zero>(), Form<1, 1, 2, Tail::Zero>());
    const int64_t blocks = groups * slices(groups, k);
    if (groups <= 16) return kernel(Form<1, 1, 6, Tail::Zero>(), Form<1, 1, 6, Tail::Zero>());
    if (blocks > 660 && blocks <= 792) return kernel(Form<2, 1, 4, Tail::Zero>(), Form<3, 2, 2, Tail::Zero>());
    if constexpr (std::is_same_v<T, float>)
        if (groups > 4096) return kernel(Form<1, 1, 6, Tail::Zero>(), Form<2, 2, 2, Tail::Zero>());
    return kernel(Form<1, 1, 6, Tail::Zero>(), Form<1, 1, 4, Tail::Zero>());
}

// Rows `first` on of a call, up to 16 of them.
template <typename T, bool Whole>
cudaError_t launch_band(const qwen3_5_linear_call &call, int64_t first, int64_t m, cudaStream_t stream) {
    decode_band::Matrices<Format, T> matrices = {};
    for (; matrices.count < call.count; matrices.count++) {
        const qwen3_5_linear_matrix &matrix = call.matrices[matrices.count];
        matrices.all[matrices.count] = {
            {static_cast<const uint4 *>(matrix.weights)}, static_cast<T *>(matrix.y) + first * matrix.n, matrix.n};
    }
    const int64_t groups = decode_band::groups(matrices);
    const T *x = static_cast<const T *>(call.x) + first * call.k;
    const decode_band::GlobalRows<T, Format::TILE_K, Whole> rows = {x, static_cast<int>(m), call.k};
    return decode_band::launch(choose<T, Whole>(m, groups, call.k), matrices, rows, 0, m, call.k,
                               call.clusters ? slices(groups, call.k) : 1, call.overlap != 0, stream);
}

// More rows than the decode band has.
cudaError_t launch_prompt(const qwen3_5_linear_call &call, cudaStream_t stream) {
    for (int i = 0; i < call.count; i++) {
        const qwen3_5_linear_matrix &matrix = call.matrices[i];
        const cudaError_t error = bf16_prefill::launch(matrix.weights, static_cast<const __nv_bfloat16 *>(call.x),
                                                       static_cast<__nv_bfloat16 *>(matrix.y), call.m, matrix.n, call.k,
                                                       call.multiprocessors, call.overlap != 0, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t launch(const qwen3_5_linear_call &call, cudaStream_t stream) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        if (call.m > decode_band::MAX_ROWS && call.multiprocessors > 0 && bf16_prefill::takes(call.k))
            return launch_prompt(call, stream);
    for (int64_t first = 0; first < call.m; first += decode_band::MAX_ROWS) {
        const int64_t m = std::min<int64_t>(call.m - first, decode_band::MAX_ROWS);
        const auto band = call.k % Format::TILE_K == 0 ? launch_band<T, true> : launch_band<T, false>;
        const cudaError_t error = band(call, first, m, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

template <typename T>
cudaError_t prepare() {
    for (int64_t m : {1, decode_band::MAX_ROWS})
        for (int64_t groups : {1, 640, 768, 8192}) {
            const int64_t k = Format::TILE_K;
            cudaError_t error = decode_band::load(choose<T, true>(m, groups, k).function);
            if (error == cudaSuccess) error = decode_band::load(choose<T, false>(m, groups, k).function);
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

constexpr int PACK_THREADS = 256;

// A thread writes one chunk of 16 bytes of the tiles from the first row's group on.
__global__ void __launch_bounds__(PACK_THREADS)
    pack(const __nv_bfloat16 *__restrict__ rows, uint4 *__restrict__ packed, int64_t chunks, int64_t count, int64_t k) {
    using namespace bf16_weights;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * PACK_THREADS + threadIdx.x;
    if (index >= chunks) return;
    const int64_t tile = index / TILE_CHUNKS, tiles_k = tiles(k);
    const int feature = index % TILE_CHUNKS / ROW_CHUNKS, chunk = index % ROW_CHUNKS ^ feature / 2 % ROW_CHUNKS;
    const int64_t row = tile / tiles_k * GROUP + feature, first = tile % tiles_k * TILE_K + chunk * CHUNK;
    packed[index] = row < count ? load_row8<false>(rows + row * k + first, k - first) : make_uint4(0, 0, 0, 0);
}

}  // namespace

extern "C" int qwen3_5_linear_prepare(int prompts) {
    cudaFuncAttributes attributes;
    for (cudaError_t error : {cudaFuncGetAttributes(&attributes, pack), prepare<float>(), prepare<__half>(),
                              prepare<__nv_bfloat16>(), prompts ? bf16_prefill::prepare() : cudaSuccess})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int qwen3_5_linear(const qwen3_5_linear_call *call, cudaStream_t stream) {
    if (call->count < 1 || call->count > QWEN3_5_LINEAR_MAX_MATRICES || call->m < 0 || call->k < 1) return cudaErrorInvalidValue;
    for (int i = 0; i < call->count; i++)
        if (call->matrices[i].n < 1) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case QWEN3_5_LINEAR_F32: return launch<float>(*call, stream);
        case QWEN3_5_LINEAR_F16: return launch<__half>(*call, stream);
        case QWEN3_5_LINEAR_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" int qwen3_5_linear_pack(const qwen3_5_linear_pack_call *call, cudaStream_t stream) {
    using namespace bf16_weights;
    if (call->first % GROUP != 0 || call->count < 1 || call->k < 1) return cudaErrorInvalidValue;
    const int64_t chunks = groups(call->count) * tiles(call->k) * TILE_CHUNKS;
    uint4 *packed = static_cast<uint4 *>(call->weights) + call->first / GROUP * tiles(call->k) * TILE_CHUNKS;
    pack<<<static_cast<unsigned>((chunks + PACK_THREADS - 1) / PACK_THREADS), PACK_THREADS, 0, stream>>>(
        static_cast<const __nv_bfloat16 *>(call->rows), packed, chunks, call->count, call->k);
    return cudaGetLastError();
}

extern "C" int qwen3_5_linear_copy(void *to, const void *from, int64_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
}
