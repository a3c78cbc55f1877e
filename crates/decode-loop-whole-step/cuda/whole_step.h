/* decode_loop/whole_step: what follows the logits of a step, on the device: choose a token, stop or go on. */
#ifndef WHOLE_STEP_H
#define WHOLE_STEP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* How tokens of a text are chosen and how many there may be. */
typedef struct {
    uint64_t seed;  /* of the random numbers */
    uint64_t top_p; /* the part of the mass that is kept, in units of 2^-64; 0 for all */
    float scale;    /* log2(e) / temperature; 0 for the largest logit */
    uint32_t top_k; /* how many of the largest logits are kept; 0 for all */
    uint32_t max_new;
} whole_step_request;

/* The state of a text, on the device. */
typedef struct {
    whole_step_request request;
    uint32_t made; /* tokens so far */
    uint32_t over; /* whether there are no more: steps then change nothing here */
} whole_step_state;

/* Words that a token's number of the ring has in its lower half: a token, or why there is none, with the id of the logit. */
enum {
    WHOLE_STEP_ID_BITS = 24,
    WHOLE_STEP_TOKEN = 0,
    WHOLE_STEP_NAN = 1,
    WHOLE_STEP_INFINITE = 2,
    WHOLE_STEP_MINUS_INFINITE = 3,
};

/* Chooses the next token from one row of logits, appends it to the ring, and unless the text is over with it, makes it what the
 * next step reads. All pointers are device addresses, logits aligned to 16 bytes.
 *
 * Word i mod ring_len of the ring gets (i + 1) << 32 | why << WHOLE_STEP_ID_BITS | id, for token i, in one store. */
typedef struct {
    const float *logits;     /* [vocab] */
    const uint32_t *stop;    /* [ceil(vocab / 32)]: a bit for each token, set for those that end a text */
    whole_step_state *state; /* [1] */
    uint64_t *ring;          /* [ring_len], mapped host memory */
    int32_t *token;          /* [1]: what the next step reads */
    int32_t *position;       /* [1]: of that token */
    int64_t vocab;           /* 1 to 2^24 */
    int32_t ring_len;        /* at least 1 */
    int32_t advance;         /* whether the logits are those of a step at `position`: 1, or of a prompt that ends before it: 0 */
    int32_t clusters;        /* whether the device has thread-block clusters: sm_90 on */
    int32_t overlap;         /* whether the kernel may start before the one before it in the stream is over: sm_90 on */
} whole_step_choose_call;

/* Loads the kernels into the current context, so that no later call does. Returns a cudaError_t. */
int whole_step_prepare(void);

/* Queues the start of a text. Returns a cudaError_t. */
int whole_step_begin(const whole_step_request *request, whole_step_state *state, cudaStream_t stream);

/* Queues the call. Returns a cudaError_t. */
int whole_step_choose(const whole_step_choose_call *call, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *whole_step_error(int code);

#ifdef __cplusplus
}
#endif

#endif
