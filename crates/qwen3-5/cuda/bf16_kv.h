/* The host's own store: keys and values in BF16, and attention over them. */
#ifndef QWEN3_5_BF16_KV_H
#define QWEN3_5_BF16_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* One layer's keys and values. All pointers of this file are device addresses aligned to 16 bytes, all tensors row-major and
 * contiguous. */
typedef struct {
    void *keys;     /* BF16 [pages, kv_heads, page_size, head_dim]; page i has positions page_size * i and on */
    void *values;   /* BF16 [pages, kv_heads, page_size, head_dim] */
    int64_t window; /* positions there is room for */
    int32_t page_size; /* a power of two, at least 16 */
    int32_t kv_heads;
    int32_t head_dim; /* 64, 128 or 256 */
} qwen3_5_bf16_kv_layer;

/* Stores rows; row i belongs to position *position + i. A position past the window is not written. */
typedef struct {
    qwen3_5_bf16_kv_layer layer;
    const void *keys;        /* BF16 [rows, kv_heads, head_dim] */
    const void *values;      /* BF16 [rows, kv_heads, head_dim] */
    const int32_t *position; /* [1] */
    int64_t rows;
    int32_t overlap; /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} qwen3_5_bf16_kv_append_call;

/* Answers queries; row i sees positions 0 to *position + i. */
typedef struct {
    qwen3_5_bf16_kv_layer layer;
    const void *queries;     /* BF16 [rows, heads, head_dim] */
    void *out;               /* BF16 [rows, heads, head_dim] */
    const int32_t *position; /* [1] */
    void *scratch;           /* qwen3_5_bf16_kv_scratch_bytes; of one call at a time */
    int64_t rows;
    int32_t heads; /* a multiple of kv_heads, at most 16 times as many */
    int32_t overlap;
} qwen3_5_bf16_kv_attend_call;

/* Bytes of scratch that attention over a layer needs. Touches no device. */
int64_t qwen3_5_bf16_kv_scratch_bytes(int64_t window, int32_t heads, int32_t kv_heads, int32_t head_dim);

/* Loads the kernels of this file into the current context, so that no later call does. Returns a cudaError_t. */
int qwen3_5_bf16_kv_prepare(void);

/* Each queues its call on the stream and returns a cudaError_t. */
int qwen3_5_bf16_kv_append(const qwen3_5_bf16_kv_append_call *call, cudaStream_t stream);
int qwen3_5_bf16_kv_attend(const qwen3_5_bf16_kv_attend_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
