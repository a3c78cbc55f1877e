// Storing rows of keys and values in their pages.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "attention.cuh"
#include "launch.cuh"
#include "load.cuh"

namespace attention {
namespace {

// Rows to store; row i belongs to position `position` + i.
struct Rows {
    const __nv_bfloat16 *keys;    // [rows, kv_heads, head_dim]
    const __nv_bfloat16 *values;  // [rows, kv_heads, head_dim]
    const int32_t *position;      // [1]
    int64_t rows;
    int32_t head_dim;
};

}  // namespace

namespace append_form {
namespace {

constexpr int THREADS = 256;
constexpr int RUN = 8;  // keys and values of a thread

struct alignas(16) Bf16Run {
    __nv_bfloat16 element[RUN];
};

__device__ __forceinline__ void store(__nv_bfloat16 *to, const Bf16Run &run, float) {
    *reinterpret_cast<Bf16Run *>(to) = run;
}

// Each element divided by the scale, which is above zero, to the nearest code with ties to even, saturating. NaN keeps its sign,
// which the division loses.
__device__ __forceinline__ void store(__nv_fp8_e4m3 *to, const Bf16Run &run, float scale) {
    struct alignas(8) {
        unsigned char code[RUN];
    } codes;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const float element = __bfloat162float(run.element[i]);
        const uint32_t sign = __float_as_uint(element) >> 24 & 0x80u;
        codes.code[i] = static_cast<unsigned char>(
            __nv_cvt_float_to_fp8(__fdiv_rn(element, scale), __NV_SATFINITE, __NV_E4M3) | sign);
    }
    *reinterpret_cast<uint2 *>(to) = *reinterpret_cast<const uint2 *>(&codes);
}

template <typename Element>
__global__ void __launch_bounds__(THREADS) kernel(Pages<Element> pages, Rows rows) {
    const int64_t runs = rows.head_dim / RUN;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t vector = index / runs;
    const int64_t element = index % runs * RUN;
    const int64_t row = vector / pages.kv_heads;
    const int64_t head = vector % pages.kv_heads;
    let_next_start();
    wait_for_previous();
    const int64_t position = *rows.position + row;
    if (row >= rows.rows || position < 0 || position >= pages.window) return;

    // The pages are this call's to write.
    Element *to_keys = const_cast<Element *>(pages.keys), *to_values = const_cast<Element *>(pages.values);
    const int64_t run = position / pages.page_size;
    const int64_t page = pages.table == nullptr ? run : pages.table[run];
    const int64_t to = ((page * pages.kv_heads + head) * pages.page_size + position % pages.page_size) * rows.head_dim + element;
    const int64_t from = vector * rows.head_dim + element;
    const Bf16Run keys = *reinterpret_cast<const Bf16Run *>(rows.keys + from);
    const Bf16Run values = *reinterpret_cast<const Bf16Run *>(rows.values + from);
    store(to_keys + to, keys, pages.k_scales == nullptr ? 1.0f : pages.k_scales[head]);
    store(to_values + to, values, pages.v_scales == nullptr ? 1.0f : pages.v_scales[head]);
}

}  // namespace
}  // namespace append_form

namespace {

template <typename Element>
cudaError_t load_append() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, append_form::kernel<Element>);
}

// Queues storing rows; a position past the window is not written.
template <typename Element>
cudaError_t append(const Pages<Element> &pages, const Rows &rows, bool overlap, cudaStream_t stream) {
    const int64_t runs = rows.rows * pages.kv_heads * rows.head_dim / append_form::RUN;
    const Launch launch = {.blocks = (runs + append_form::THREADS - 1) / append_form::THREADS,
                           .threads = append_form::THREADS,
                           .overlap = overlap,
                           .stream = stream};
    return launch_kernel(launch, append_form::kernel<Element>, pages, rows);
}

}  // namespace
}  // namespace attention
