/* linear_proj/w8a16_static: INT8 weights with one FP32 scale a row of weights, BF16 activations. */
#ifndef W8A16_STATIC_H
#define W8A16_STATIC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* The type of x and y. */
enum {
    W8A16_STATIC_F32 = 0,
    W8A16_STATIC_F16 = 1,
    W8A16_STATIC_BF16 = 2,
};

enum { W8A16_STATIC_MAX_MATRICES = 4 };

/* A matrix of weights, and where the rows go that it makes: y[m, n] = bf16(scales[n] * sum over k of q[n, k] * bf16(x[m, k]) +
 * bias[n]). All pointers are device addresses aligned to 16 bytes, all tensors row-major and contiguous. */
typedef struct {
    const void *weights;  /* [ceil(N / 16), ceil(K / 32), 32 lanes, 16] bytes, packed as src/pack.rs says */
    const float *scales;  /* [N] */
    const float *bias;    /* [N], or null for none */
    void *y;              /* [M, N] of dtype */
    int64_t n;            /* at least 1 */
} w8a16_static_matrix;

/* The same rows times each of a few matrices, in one launch. */
typedef struct {
    w8a16_static_matrix matrices[W8A16_STATIC_MAX_MATRICES];
    int32_t count;        /* of matrices, at least 1 */
    int32_t dtype;        /* of x and y, one of the above */
    const void *x;        /* [M, K] of dtype */
    int64_t m;            /* 1 to 16 */
    int64_t k;            /* at least 1 */
    int32_t clusters;     /* whether the device has thread-block clusters: sm_90 on */
    int32_t overlap;      /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} w8a16_static_call;

/* Loads the kernels into the current context, so that no later call does. Returns a cudaError_t. */
int w8a16_static_prepare(void);

/* Queues the call on the stream. Returns a cudaError_t. */
int w8a16_static_project(const w8a16_static_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *w8a16_static_error(int code);

#ifdef __cplusplus
}
#endif

#endif
