/* linear_proj/nvfp4_balance: NVFP4 weights that were multiplied by a balance of their input channels, NVFP4 activations that are
 * divided by it before they are quantised. */
#ifndef NVFP4_BALANCE_H
#define NVFP4_BALANCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* The type of x and y. */
enum {
    NVFP4_BALANCE_F32 = 0,
    NVFP4_BALANCE_F16 = 1,
    NVFP4_BALANCE_BF16 = 2,
};

/* y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] + bias[n]), where w and xq are E2M1 times E4M3 and xq is
 * bf16(x[m, k]) * inverse_balance[k], a product in FP32, quantised. All pointers are device addresses aligned to 16 bytes, all
 * tensors row-major and contiguous. */
typedef struct {
    const void *codes;             /* E2M1 [ceil(N / 16), ceil(K / 64), 32 lanes, 16 bytes], packed as linear-proj-nvfp4 says */
    const void *scales;            /* UE4M3 [ceil(N / 16), ceil(K / 64), 32 lanes, 2] */
    const float *bias;             /* [N], or null for none */
    const float *inverse_balance;  /* [K], or null where x comes divided */
    const void *x;                 /* [M, K] of dtype */
    void *y;                       /* [M, N] of dtype */
    void *quantised;               /* scratch: BF16 [M, K], each element E2M1 times E4M3 */
    float *globals;                /* scratch: [M] */
    float global;                  /* the weights' global scale, a multiplier */
    int64_t m;                     /* 1 to 16 */
    int64_t n;                     /* at least 1 */
    int64_t k;                     /* a multiple of 16 */
    int32_t dtype;                 /* one of the above */
    int32_t slices;                /* into how many parts K is cut: 1, 2, 4 or 8, and 1 before sm_90; the same for every M */
    int32_t single_level;          /* whether the rows' global scales are 1 */
} nvfp4_balance_call;

/* Loads the kernels into the current context, so that no later call does. Returns a cudaError_t. */
int nvfp4_balance_prepare(void);

/* Queues the quantiser and the projection on the stream. Returns a cudaError_t. */
int nvfp4_balance_project(const nvfp4_balance_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *nvfp4_balance_error(int code);

#ifdef __cplusplus
}
#endif

#endif
