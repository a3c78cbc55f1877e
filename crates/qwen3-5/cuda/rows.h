/* Row by row: embedding, norms, rotation, activations. A row's result depends on that row alone, so its bits are the same in a call
 * of any number of rows.
 *
 * All pointers are device addresses aligned to 16 bytes, all tensors row-major and contiguous, all widths multiples of 8.
 * Arithmetic is FP32; what is stored as BF16 is rounded once. */
#ifndef QWEN3_5_ROWS_H
#define QWEN3_5_ROWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* In each call `overlap` says whether the kernel may start before the one before it in the stream is over: sm_90 on. */

/* out[m, :] = table[tokens[m], :]; NaN where tokens[m] is outside the vocabulary. */
typedef struct {
    const void *table;     /* BF16 [vocab, hidden] */
    const int32_t *tokens; /* [rows] */
    void *out;             /* BF16 [rows, hidden] */
    int64_t rows;
    int64_t vocab;
    int64_t hidden;
    int32_t overlap;
} qwen3_5_embed_call;

/* x[m, :] = bf16(x[m, :] + update[m, :]) if there is an update, then
 * out[m, :] = x[m, :] / sqrt(mean(x[m, :]^2) + eps) * scale, of the rounded x. */
typedef struct {
    void *x;            /* BF16 [rows, hidden]; written only with an update */
    const void *update; /* BF16 [rows, hidden], or null */
    const float *scale; /* [hidden] */
    void *out;          /* [rows, hidden], BF16 or F32 */
    int64_t rows;
    int64_t hidden;     /* at most 24576 */
    float eps;
    int32_t out_f32;    /* whether `out` is F32 */
    int32_t overlap;
} qwen3_5_norm_call;

/* out[m, i] = silu(gate[m, i]) * up[m, i]. */
typedef struct {
    const void *gate; /* BF16 [rows, width] */
    const void *up;   /* BF16 [rows, width] */
    void *out;        /* BF16 [rows, width] */
    int64_t rows;
    int64_t width;
    int32_t overlap;
} qwen3_5_silu_mul_call;

/* out[m, h, d] = values[m, h, d] * sigmoid(q_and_gate[m, h, head_dim + d]). */
typedef struct {
    const void *values;     /* BF16 [rows, heads, head_dim] */
    const void *q_and_gate; /* BF16 [rows, heads, 2 * head_dim] */
    void *out;              /* BF16 [rows, heads, head_dim] */
    int64_t rows;
    int32_t heads;
    int32_t head_dim;
    int32_t overlap;
} qwen3_5_output_gate_call;

/* Each query and key head is normalised, x / sqrt(mean(x^2) + eps) * scale; then elements i and pairs + i, for i < pairs, are one
 * point of a plane, rotated by frequencies[i] * (position[0] + m). */
typedef struct {
    const void *q_and_gate;   /* BF16 [rows, heads, 2 * head_dim]: of each head the first half is read */
    const void *k;            /* BF16 [rows, kv_heads, head_dim] */
    const float *q_scale;     /* [head_dim] */
    const float *k_scale;     /* [head_dim] */
    const float *frequencies; /* [pairs], radians a position */
    const int32_t *position;  /* [1]: of row 0 */
    void *q_out;              /* BF16 [rows, heads, head_dim] */
    void *k_out;              /* BF16 [rows, kv_heads, head_dim] */
    int64_t rows;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;         /* at most 512 */
    int32_t pairs;            /* at most head_dim / 2 */
    float eps;
    int32_t overlap;
} qwen3_5_qk_norm_rope_call;

/* Loads the kernels of this file into the current context, so that no later call does. Returns a cudaError_t. */
int qwen3_5_rows_prepare(void);

/* Each queues its call on the stream and returns a cudaError_t. */
int qwen3_5_embed(const qwen3_5_embed_call *call, cudaStream_t stream);
int qwen3_5_norm(const qwen3_5_norm_call *call, cudaStream_t stream);
int qwen3_5_silu_mul(const qwen3_5_silu_mul_call *call, cudaStream_t stream);
int qwen3_5_output_gate(const qwen3_5_output_gate_call *call, cudaStream_t stream);
int qwen3_5_qk_norm_rope(const qwen3_5_qk_norm_rope_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *qwen3_5_error(int code);

#ifdef __cplusplus
}
#endif

#endif
