/* linear_proj/nvfp4_dynamic: NVFP4 weights with one global scale, NVFP4 activations with one global scale a row. */
#ifndef NVFP4_DYNAMIC_H
#define NVFP4_DYNAMIC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* The type of x and y. */
enum {
    NVFP4_DYNAMIC_F32 = 0,
    NVFP4_DYNAMIC_F16 = 1,
    NVFP4_DYNAMIC_BF16 = 2,
};

enum { NVFP4_DYNAMIC_MAX_MATRICES = 4 };

/* A matrix of weights, and where the rows go that it makes: y[m, n] = bf16(global * globals[m] * sum over k of w[n, k] * xq[m, k] +
 * bias[n]), where w and xq are E2M1 times E4M3 and xq is bf16(x[m]) quantised. All pointers are device addresses aligned to 16
 * bytes, all tensors row-major and contiguous. */
typedef struct {
    const void *codes;            /* E2M1 [ceil(N / 16), ceil(K / 64), 32 lanes, 16 bytes], packed as linear-proj-nvfp4's tiles.rs
                                   * says, or, where native, its native_tiles.rs */
    const void *scales;           /* [ceil(N / 16), ceil(K / 64), 32 lanes, 2], packed likewise */
    const float *bias;            /* [N], or null for none */
    void *y;                      /* [M, N] of dtype */
    int64_t n;                    /* at least 1 */
    float global;                 /* the weights' global scale, a multiplier */
} nvfp4_dynamic_matrix;

/* The same rows, quantised once, times each of a few matrices. */
typedef struct {
    nvfp4_dynamic_matrix matrices[NVFP4_DYNAMIC_MAX_MATRICES];
    int32_t count;                /* of matrices, at least 1 */
    int32_t dtype;                /* of x and y, one of the above */
    const void *x;                /* [M, K] of dtype */
    const void *gate;             /* [M, K], or null: x is to be bf16(silu(gate) * x); BF16, and M up to 16 */
    void *scratch;                /* as many bytes as nvfp4_dynamic_scratch_bytes says of `chunk` rows */
    int64_t chunk;                /* rows that are taken at a time, at least 16 */
    int64_t m;                    /* at least 1 */
    int64_t k;                    /* a multiple of 16 */
    int32_t single_level;         /* whether the rows' global scales are 1 */
    int32_t clusters;             /* whether the device has thread-block clusters: sm_90 on */
    int32_t multiprocessors;      /* of a device that has the prefill band's code (sm_90a); 0: the decode band takes all rows */
    int32_t native;               /* whether the native kernels are to run (sm_120a); multiprocessors is then 0 */
    int32_t overlap;              /* whether the first kernel may start before the one before it is over: sm_90 on */
} nvfp4_dynamic_call;

/* Loads the kernels into the current context, so that no later call does: those of the decode band, native or not, and those of
 * the prefill band where asked. Returns a cudaError_t. */
int nvfp4_dynamic_prepare(int prefill, int native);

/* How many bytes of scratch memory calls of up to m rows take. */
int64_t nvfp4_dynamic_scratch_bytes(int64_t m, int64_t k, int multiprocessors);

/* Queues the quantiser and the projection on the stream. Returns a cudaError_t. */
int nvfp4_dynamic_project(const nvfp4_dynamic_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *nvfp4_dynamic_error(int code);

#ifdef __cplusplus
}
#endif

#endif
