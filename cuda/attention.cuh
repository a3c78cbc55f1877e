// Attention over a paged store of keys and values: what every form of it is given.
//
// Row i of the queries sees positions 0 to position + i. Nothing at a later position may reach a result, whatever bits lie there:
// neither as a score nor as a value that is multiplied by zero.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

namespace attention {

// Rows of queries that are served row-invariantly; more are a prompt's.
constexpr int MAX_QUERY_ROWS = 32;

// One layer's keys and values. `Element` is __nv_bfloat16, or __nv_fp8_e4m3 with a scale a head.
template <typename Element>
struct Pages {
    const Element *keys;    // [pages, kv_heads, page_size, head_dim]
    const Element *values;  // [pages, kv_heads, page_size, head_dim]
    const int32_t *table;   // [ceil(window / page_size)]: the page of each run of positions; null where page i is run i
    const float *k_scales;  // [kv_heads]: a key is its element times this; null for ones
    const float *v_scales;  // [kv_heads]; null for ones
    int32_t page_size;      // a power of two, at least 16
    int32_t kv_heads;
    int64_t window;         // positions there is room for
};

struct Queries {
    const __nv_bfloat16 *queries;  // [rows, heads, head_dim]
    __nv_bfloat16 *out;            // [rows, heads, head_dim]
    const int32_t *position;       // [1]: of row 0
    int64_t rows;
    int32_t heads;     // a multiple of kv_heads
    int32_t head_dim;  // 64, 128 or 256
};

}  // namespace attention
