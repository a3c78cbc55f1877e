/* The mixer of a gated-delta layer between its projections: causal convolution, gates, delta rule, gated norm. */
#ifndef QWEN3_5_GATED_DELTA_H
#define QWEN3_5_GATED_DELTA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* Rows whose states can be kept in one call. */
#define QWEN3_5_DELTA_KEPT_ROWS 16

/* Rows t of one sequence, in order, from what the rows before them left in the state:
 *
 *     [q, k, v]  = silu(convolution of mixed over the last `taps` rows)
 *     q, k       = q / sqrt(q.q + 1e-6) * key_dim^-1/2,  k / sqrt(k.k + 1e-6)          each head
 *     decay      = exp(rate * log(1 + exp(a + dt_bias))),  beta = 1 / (1 + exp(-b))     each value head
 *     S          = decay * S;  S += k (beta * (v - k^T S))^T;  o = q^T S                each value head
 *     out        = o / sqrt(mean(o^2) + eps) * scale * silu(z)                          each value head
 *
 * with channels = 2 * key_heads * key_dim + heads * value_dim. Value head h has the keys of key head h / (heads / key_heads). All
 * pointers are device addresses aligned to 16 bytes, all tensors row-major and contiguous.
 *
 * A state has `slots`: one for the sequence, or one for each row of a call whose states are kept. The bits of a row and of the
 * state after it depend on the state before the call and on the rows up to it, not on how the rows are cut into calls. */
typedef struct {
    const void *mixed;     /* BF16 [rows, channels]: queries, keys and values before the convolution */
    const void *z;         /* BF16 [rows, heads, value_dim] */
    const void *b;         /* BF16 [rows, heads] */
    const void *a;         /* BF16 [rows, heads] */
    const float *filters;  /* [taps, channels]; the last tap meets the current row */
    const float *rate;     /* [heads] */
    const float *dt_bias;  /* [heads] */
    const float *scale;    /* [value_dim] */
    void *out;             /* BF16 [rows, heads, value_dim] */
    void *conv_state;      /* BF16 [slots, taps - 1, channels]: the rows before the next one, oldest first */
    float *delta_state;    /* [slots, heads, value_dim, key_dim]: S of each head, transposed */
    const int32_t *from;   /* [1]: the slot that the call starts from; null for slot 0. Another than those gives NaN */
    int64_t rows;
    int64_t slots;
    int32_t key_heads;     /* up to 32768 */
    int32_t heads;         /* a multiple of key_heads; 2 to 8 blocks of 64 value_dim for each of those */
    int32_t key_dim;       /* a multiple of 16 up to 256 */
    int32_t value_dim;     /* a multiple of 16 up to 256 */
    int32_t taps;          /* 2 to 8 */
    float eps;
    int32_t keep;          /* whether slot t gets the state after row t, for each row; else slot 0 gets the last one */
    int32_t overlap;       /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} qwen3_5_gated_delta_call;

/* Loads the kernels of this file into the current context, so that no later call does. Returns a cudaError_t. */
int qwen3_5_gated_delta_prepare(void);

/* Queues the call on the stream and returns a cudaError_t; cudaErrorInvalidValue for a shape that is not taken. */
int qwen3_5_gated_delta(const qwen3_5_gated_delta_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
