/* decode_loop/fp8_kv: paged keys and values in FP8 E4M3 with a scale a head, and attention over them. */
#ifndef FP8_KV_H
#define FP8_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* One layer's keys and values. All pointers of this file are device addresses aligned to 16 bytes, all tensors row-major and
 * contiguous. */
typedef struct {
    void *keys;            /* E4M3 [pages, kv_heads, page_size, head_dim] */
    void *values;          /* E4M3 [pages, kv_heads, page_size, head_dim] */
    const int32_t *table;  /* [ceil(window / page_size)]: the page of each run of positions */
    const float *k_scales; /* [kv_heads]: a key is its code's value times this */
    const float *v_scales; /* [kv_heads] */
    int64_t window;        /* positions there is room for */
    int32_t page_size;     /* a power of two, at least 16 */
    int32_t kv_heads;
    int32_t head_dim; /* 64, 128 or 256 */
} fp8_kv_layer;

/* Stores rows; row i belongs to position *position + i. A position past the window is not written. */
typedef struct {
    fp8_kv_layer layer;
    const void *keys;        /* BF16 [rows, kv_heads, head_dim] */
    const void *values;      /* BF16 [rows, kv_heads, head_dim] */
    const int32_t *position; /* [1] */
    int64_t rows;
    int32_t overlap; /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} fp8_kv_append_call;

/* Answers queries; row i sees positions 0 to *position + i. */
typedef struct {
    fp8_kv_layer layer;
    const void *queries;     /* BF16 [rows, heads, head_dim] */
    void *out;               /* BF16 [rows, heads, head_dim] */
    const int32_t *position; /* [1] */
    void *scratch;           /* fp8_kv_scratch_bytes; of one call at a time */
    int64_t rows;
    int32_t heads; /* a multiple of kv_heads, at most 16 times as many */
    int32_t overlap;
} fp8_kv_attend_call;

/* Bytes of scratch that attention over a layer needs. Touches no device. */
int64_t fp8_kv_scratch_bytes(int64_t window, int32_t heads, int32_t kv_heads, int32_t head_dim);

/* Loads the kernels into the current context, so that no later call does. Returns a cudaError_t. */
int fp8_kv_prepare(void);

/* Each queues its call on the stream and returns a cudaError_t. */
int fp8_kv_append(const fp8_kv_append_call *call, cudaStream_t stream);
int fp8_kv_attend(const fp8_kv_attend_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *fp8_kv_error(int code);

#ifdef __cplusplus
}
#endif

#endif
