/* The host's projections: BF16 weights, FP32 sums. */
#ifndef QWEN3_5_BF16_LINEAR_H
#define QWEN3_5_BF16_LINEAR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* The type of x and y. */
enum {
    QWEN3_5_LINEAR_F32 = 0,
    QWEN3_5_LINEAR_F16 = 1,
    QWEN3_5_LINEAR_BF16 = 2,
};

enum { QWEN3_5_LINEAR_MAX_MATRICES = 4 };

/* A matrix of weights, and where the rows go that it makes: y[m, n] = sum over k of w[n, k] * bf16(x[m, k]) in FP32, rounded once
 * where y is narrower. All pointers are device addresses aligned to 16 bytes, x and y row-major and contiguous. */
typedef struct {
    const void *weights;     /* BF16 [ceil(N / 16), ceil(K / 32), 512], as qwen3_5_linear_pack writes them */
    void *y;                 /* [M, N] of dtype */
    int64_t n;               /* at least 1 */
} qwen3_5_linear_matrix;

/* The same rows times each of a few matrices. Up to 16 rows take one launch and are row-invariant: with the same matrices they have
 * the same bits whatever m is. */
typedef struct {
    qwen3_5_linear_matrix matrices[QWEN3_5_LINEAR_MAX_MATRICES];
    int32_t count;           /* of matrices, at least 1 */
    int32_t dtype;           /* of x and y, one of the above */
    const void *x;           /* [M, K] of dtype */
    int64_t m;               /* at least 0 */
    int64_t k;               /* at least 1 */
    int32_t clusters;        /* whether the device has thread-block clusters: sm_90 on */
    int32_t multiprocessors; /* how many the device has, where the kernel for prompts runs: sm_90a; else 0, and calls of more than
                              * 16 rows pass through the weights once for every 16 */
    int32_t overlap;         /* whether kernels may start before the one before them in the stream is over: sm_90 on */
} qwen3_5_linear_call;

/* Packs rows of w [N, K] into their place; rows past N in the last group of 16, and k past K, are zeros. */
typedef struct {
    const void *rows; /* BF16 [count, K] */
    void *weights;    /* as above, of all N rows */
    int64_t first;    /* of the rows, a multiple of 16 */
    int64_t count;    /* of the rows; a multiple of 16, or up to N */
    int64_t k;        /* at least 1 */
} qwen3_5_linear_pack_call;

/* Loads the kernels of this file into the current context, so that no later call does; those for prompts where asked. Returns a
 * cudaError_t. */
int qwen3_5_linear_prepare(int prompts);

/* Each queues its call on the stream and returns a cudaError_t. */
int qwen3_5_linear(const qwen3_5_linear_call *call, cudaStream_t stream);
int qwen3_5_linear_pack(const qwen3_5_linear_pack_call *call, cudaStream_t stream);
int qwen3_5_linear_copy(void *to, const void *from, int64_t bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
