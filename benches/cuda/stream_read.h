/* The roofline's denominator: how fast device memory can be read. */
#ifndef STREAM_READ_H
#define STREAM_READ_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cudaStream_t;

/* Reads `bytes` (a multiple of 16) from `data` once. `sink` holds 16 bytes that are written in one case of 2^32, so that the
 * reads cannot be left out. Returns a cudaError_t. */
int stream_read(const void *data, int64_t bytes, void *sink, cudaStream_t stream);

/* The name of a cudaError_t. */
const char *stream_read_error(int code);

#ifdef __cplusplus
}
#endif

#endif
