/* Sparse experts in their plain form: each row reads its own experts' weights. A row's result depends on that row alone, so its
 * bits are the same in a call of any number of rows.
 *
 * All pointers are device addresses aligned to 16 bytes, all tensors row-major and contiguous. Sums are FP32; what is stored as
 * BF16 is rounded once. */
#ifndef QWEN3_5_EXPERTS_H
#define QWEN3_5_EXPERTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* In each call `overlap` says whether the kernel may start before the one before it in the stream is over: sm_90 on. */

/* The top_k most probable of all experts under the softmax of a row's logits, by falling probability and, where equal, rising id;
 * their weights are the probabilities, scaled to sum 1. A row with a NaN gets experts 0, 1, ... and weights of NaN. */
typedef struct {
    const float *logits; /* [rows, experts] */
    int32_t *ids;        /* [rows, top_k] */
    float *weights;      /* [rows, top_k] */
    int64_t rows;
    int32_t experts;     /* at most 512 */
    int32_t top_k;       /* at most 16, and at most experts */
    int32_t overlap;
} qwen3_5_route_call;

/* act[m, s, i] = silu(bank[e, i, :] . x[m, :]) * (bank[e, intermediate + i, :] . x[m, :]) of expert e = ids[m, s]; zero where there
 * is no such expert. */
typedef struct {
    const void *x;      /* BF16 [rows, hidden] */
    const int32_t *ids; /* [rows, top_k] */
    const void *bank;   /* BF16 [experts, 2 * intermediate, hidden] */
    void *act;          /* BF16 [rows, top_k, intermediate] */
    int64_t rows;
    int32_t experts;
    int32_t top_k;        /* at most 16 */
    int32_t hidden;       /* a multiple of 8, as is `intermediate` */
    int32_t intermediate;
    int32_t overlap;
} qwen3_5_experts_gate_up_call;

/* out[m, :] = sum over s of weights[m, s] * bank[e, :, :] . act[m, s, :], by rising e = ids[m, s], + sigmoid(shared_gate[m]) *
 * shared[m, :]. A slot without such an expert adds nothing.
 *
 * With `overlap`, ids and weights are read before the kernel before is over: qwen3_5_experts_gate_up, or another kernel that waits
 * before it lets the next start, must lie between this call and the one that wrote them. */
typedef struct {
    const void *act;          /* BF16 [rows, top_k, intermediate] */
    const int32_t *ids;       /* [rows, top_k] */
    const float *weights;     /* [rows, top_k] */
    const void *bank;         /* BF16 [experts, hidden, intermediate] */
    const void *shared;       /* BF16 [rows, hidden] */
    const float *shared_gate; /* [rows] */
    void *out;                /* BF16 [rows, hidden] */
    int64_t rows;
    int32_t experts;
    int32_t top_k;            /* at most 16 */
    int32_t hidden;           /* a multiple of 8, as is `intermediate` */
    int32_t intermediate;
    int32_t overlap;
} qwen3_5_experts_down_call;

/* Loads the kernels of this file into the current context, so that no later call does. Returns a cudaError_t. */
int qwen3_5_experts_prepare(void);

/* Each queues its call on the stream and returns a cudaError_t. */
int qwen3_5_route(const qwen3_5_route_call *call, cudaStream_t stream);
int qwen3_5_experts_gate_up(const qwen3_5_experts_gate_up_call *call, cudaStream_t stream);
int qwen3_5_experts_down(const qwen3_5_experts_down_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
