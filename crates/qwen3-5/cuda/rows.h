/* Row by row: embedding, norms, activations. */
#ifndef QWEN3_5_ROWS_H
#define QWEN3_5_ROWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* out[m, :] = table[tokens[m], :]; NaN where tokens[m] is outside the vocabulary. All pointers are device addresses aligned to 16
 * bytes, all tensors row-major and contiguous. */
typedef struct {
    const void *table;     /* BF16 [vocab, hidden] */
    const int32_t *tokens; /* [rows] */
    void *out;             /* BF16 [rows, hidden] */
    int64_t rows;
    int64_t vocab;
    int64_t hidden;
    int32_t overlap; /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} qwen3_5_embed_call;

/* Loads the kernels of this file into the current context, so that no later call does. Returns a cudaError_t. */
int qwen3_5_rows_prepare(void);

/* Each queues its call on the stream and returns a cudaError_t. */
int qwen3_5_embed(const qwen3_5_embed_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *qwen3_5_error(int code);

#ifdef __cplusplus
}
#endif

#endif
