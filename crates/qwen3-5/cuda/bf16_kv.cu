// The host's own store: keys and values in BF16, and attention over them.
#include "bf16_kv.h"

#include <cuda_bf16.h>

#include "attention_append.cuh"
#include "attention_attend.cuh"

namespace {

using Element = __nv_bfloat16;

attention::Pages<Element> pages(const qwen3_5_bf16_kv_layer &layer) {
    return {static_cast<const Element *>(layer.keys),
            static_cast<const Element *>(layer.values),
            nullptr,
            nullptr,
            nullptr,
            layer.page_size,
            layer.kv_heads,
            layer.window};
}

}  // namespace

extern "C" int64_t qwen3_5_bf16_kv_scratch_bytes(int64_t window, int32_t heads, int32_t kv_heads, int32_t head_dim) {
    return attention::band::scratch_bytes(window, heads, kv_heads, head_dim);
}

extern "C" int qwen3_5_bf16_kv_prepare(void) {
    for (cudaError_t error : {attention::load_append<Element>(), attention::load_attend<Element>()})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int qwen3_5_bf16_kv_append(const qwen3_5_bf16_kv_append_call *call, cudaStream_t stream) {
    if (call->rows <= 0) return call->rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
    const attention::Rows rows = {static_cast<const __nv_bfloat16 *>(call->keys),
                                  static_cast<const __nv_bfloat16 *>(call->values), call->position, call->rows,
                                  call->layer.head_dim};
    return attention::append(pages(call->layer), rows, call->overlap != 0, stream);
}

extern "C" int qwen3_5_bf16_kv_attend(const qwen3_5_bf16_kv_attend_call *call, cudaStream_t stream) {
    if (call->rows <= 0) return call->rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
    const attention::Queries queries = {static_cast<const __nv_bfloat16 *>(call->queries),
                                        static_cast<__nv_bfloat16 *>(call->out),
                                        call->position,
                                        call->rows,
                                        call->heads,
                                        call->layer.head_dim};
    return attention::attend(pages(call->layer), queries, call->scratch, call->overlap != 0, stream);
}
