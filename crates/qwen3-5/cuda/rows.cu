// Row by row: embedding, norms, activations. A block has one row, so that no row meets another.
#include "rows.h"

#include <cuda_bf16.h>

#include "launch.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) embed(qwen3_5_embed_call call) {
    wait_for_previous();
    let_next_start();
    const int64_t row = blockIdx.x;
    const int64_t token = call.tokens[row];
    const bool known = token >= 0 && token < call.vocab;
    const __nv_bfloat16 *from = static_cast<const __nv_bfloat16 *>(call.table) + (known ? token : 0) * call.hidden;
    __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(call.out) + row * call.hidden;
    for (int64_t i = threadIdx.x; i < call.hidden; i += THREADS) to[i] = known ? from[i] : __float2bfloat16_rn(NAN);
}

template <typename Call>
cudaError_t launch_rows(void (*kernel)(Call), const Call &call, cudaStream_t stream) {
    if (call.rows <= 0) return call.rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
    return launch_kernel({.blocks = call.rows, .threads = THREADS, .overlap = call.overlap != 0, .stream = stream}, kernel,
                         call);
}

}  // namespace

extern "C" int qwen3_5_rows_prepare(void) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, embed);
}

extern "C" int qwen3_5_embed(const qwen3_5_embed_call *call, cudaStream_t stream) {
    return launch_rows(embed, *call, stream);
}

extern "C" const char *qwen3_5_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
