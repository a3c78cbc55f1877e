// Tiles of keys or values on their way from pages to shared memory, in the type of the products.
#pragma once

#include <cstdint>
#include <cuda_fp8.h>

#include "attention.cuh"
#include "attention_operands.cuh"
#include "attention_softmax.cuh"
#include "mbarrier.cuh"

namespace attention::flash {
namespace {

// Four 8 x 8 matrices whose rows are the 16 bytes that lanes 8i to 8i + 7 point at, in the layout of an MMA's operands.
__device__ __forceinline__ void load_matrices(uint32_t (&matrix)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&matrix)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// Copies 16 or 8 bytes into shared memory, or zeros where they are not `there`.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_eight_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(there ? 8 : 0) : "memory");
}
// Waits for all of this thread's copies, or for those before the group that it closed last.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_earlier_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// What a block has to do. Blocks are tiles of rows, the last and longest first, of each KV head, of each part of the keys.
template <typename Form>
struct Work {
    int part, parts, head, first;  // `first` of the rows of the head's group
    HeadRows heads;

    __device__ Work(const Pages<typename Form::Element> &pages, const Queries &call, int tiles, int in_parts)
        : part(blockIdx.x % in_parts), parts(in_parts), head(blockIdx.x / in_parts % pages.kv_heads),
          first((tiles - 1 - static_cast<int>(blockIdx.x) / in_parts / pages.kv_heads) * Form::ROWS) {
        const int group = call.heads / pages.kv_heads;
        heads = {call.heads, head * group, group, static_cast<int>(call.rows)};
    }
};

// The keys that a block meets, in tiles from `begin` to `end`.
template <typename Form>
struct Keys {
    int position, rows_end, all_see, begin, end;  // `all_see`: the last position that all of the block's rows see

    __device__ Keys(const Pages<typename Form::Element> &pages, const Queries &call, const Work<Form> &work)
        : position(*call.position), all_see(position + work.heads.row(work.first)) {
        rows_end = static_cast<int>(min(static_cast<int64_t>(position) + call.rows, pages.window));
        const int seen = min(position + work.heads.row(work.first + Form::ROWS - 1) + 1, rows_end);
        const int tiles = (seen + Form::KEYS - 1) / Form::KEYS;
        begin = tiles * work.part / work.parts, end = tiles * (work.part + 1) / work.parts;
    }

    // Whether some of the block's rows do not see all of a tile.
    __device__ bool hides(int tile) const { return tile * Form::KEYS + Form::KEYS - 1 > all_see; }

    // Of a warp whose rows start at `own` of the block's.
    __device__ Softmax softmax(const Pages<typename Form::Element> &pages, const Work<Form> &work, int own, int lane) const {
        constexpr float LOG2_E = 1.44269504f;
        const float k_scale = pages.k_scales == nullptr ? 1.0f : pages.k_scales[work.head];
        Softmax start;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            start.scale[half] = k_scale * rsqrtf(static_cast<float>(Form::DIM)) * LOG2_E;
            start.top[half] = -INFINITY;
            start.total[half] = 0.0f;
            start.last[half] = position + work.heads.row(work.first + own + lane / 4 + 8 * half);
        }
        return start;
    }
};

// Where the keys and values of one head lie, as far as position `end`.
template <typename Form>
struct HeadPages {
    const int32_t *table;
    uint32_t kv_heads, head;
    int shift, end;

    __device__ HeadPages(const Pages<typename Form::Element> &pages, int of_head, int until)
        : table(pages.table), kv_heads(pages.kv_heads), head(of_head), shift(__ffs(pages.page_size) - 1), end(until) {}

    // The page of a position; of one past `end`, any.
    __device__ uint32_t page(int position) const {
        const int run = position >> shift;
        return table == nullptr || position >= end ? run : table[run];
    }
    // The element at which the row of a position in a page starts.
    __device__ int64_t row(uint32_t page, int position) const {
        const uint64_t head_page = static_cast<uint64_t>(page) * kv_heads + head;
        return static_cast<int64_t>(head_page << shift) * Form::DIM + (position & ((1 << shift) - 1)) * Form::DIM;
    }
};

// A thread's share of a tile: one chunk of 8 elements of every `STEP` keys. Keys, places and addresses are one for the thread plus
// what the compiler knows, since a warp that fetches has no time to compute them.
template <typename Form, int Threads>
struct Share {
    static constexpr int STEP = Threads / Form::CHUNKS, CHUNKS = Form::KEYS / STEP, RUN = 16;
    static_assert(STEP % 8 == 0 || STEP == 4, "steps change other bits of the place than keys within one");
    int first_key, chunk;
    uint32_t first_place;

    __device__ explicit Share(int thread)
        : first_key(thread / Form::CHUNKS), chunk(thread % Form::CHUNKS), first_place(Form::place(first_key, chunk)) {}
    __device__ int key(int i) const { return i * STEP + first_key; }
    __device__ uint32_t place(int i) const { return (first_place ^ i * STEP % 8 * 16) + i * STEP * Form::ROW_STRIDE; }

    // Calls `with` with the number of each chunk, its first element in the store, and whether it is there, for the tile from
    // position `first` on. 16 keys lie in one page; their pages are looked up together.
    template <typename With>
    __device__ __forceinline__ void each(const HeadPages<Form> &pages, int first, const With &with) const {
        constexpr int STRIDE = STEP < RUN ? RUN / STEP : 1;  // chunks in a run
        const int position = first + first_key / RUN * RUN;
        uint32_t page[CHUNKS / STRIDE];
#pragma unroll
        for (int i = 0; i < CHUNKS; i += STRIDE) page[i / STRIDE] = pages.page(position + i * STEP);
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            const int in_run = i % STRIDE * STEP;
            const int64_t run = pages.row(page[i / STRIDE], position + i * STEP - in_run);
            with(i, run + (first_key % RUN + in_run) * Form::DIM + chunk * 8, first + key(i) < pages.end);
        }
    }
};

// Loads that stay where they are written, so that all of a tile's are under way together.
__device__ __forceinline__ uint2 load_eight(const __nv_fp8_e4m3 *address) {
    uint2 value;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address) : "memory");
    return value;
}

// The lower two codes as FP16, and all eight.
__device__ __forceinline__ uint32_t fp16x2(uint32_t codes) {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    return pair.x | static_cast<uint32_t>(pair.y) << 16;
}
__device__ __forceinline__ uint4 fp16x8(uint2 codes) {
    return make_uint4(fp16x2(codes.x), fp16x2(codes.x >> 16), fp16x2(codes.y), fp16x2(codes.y >> 16));
}

// A thread's share of a tile on its way between `start` and `finish`. The tile is there for all after `wait_for_copies` and a
// barrier.
template <typename Form, int Threads, typename Element = typename Form::Element>
struct Fetch;

template <typename Form, int Threads>
struct Fetch<Form, Threads, __nv_bfloat16> {
    __device__ void start(uint4 *tile, const __nv_bfloat16 *from, const HeadPages<Form> &pages, int first,
                          const Share<Form, Threads> &share) {
        const uint32_t to = shared_address(tile);
        share.each(pages, first, [&](int i, int64_t element, bool there) {
            copy_async(to + share.place(i), from + element, there);
        });
    }
    __device__ void finish(uint4 *, const Share<Form, Threads> &) {}
};

template <typename Form, int Threads>
struct Fetch<Form, Threads, __nv_fp8_e4m3> {
    uint2 codes[Share<Form, Threads>::CHUNKS];

    __device__ void start(uint4 *, const __nv_fp8_e4m3 *from, const HeadPages<Form> &pages, int first,
                          const Share<Form, Threads> &share) {
        share.each(pages, first, [&](int i, int64_t element, bool there) {
            codes[i] = make_uint2(0, 0);
            if (there) codes[i] = load_eight(from + element);
        });
    }
    __device__ void finish(uint4 *tile, const Share<Form, Threads> &share) {
#pragma unroll
        for (int i = 0; i < share.CHUNKS; i++) *at_byte(tile, share.place(i)) = fp16x8(codes[i]);
    }
};

// Queries of a block from number `first` of `heads` on, by all its threads.
template <typename Form>
__device__ __forceinline__ void load_queries(uint4 *queries, const __nv_bfloat16 *from, const HeadRows &heads, int first) {
#pragma unroll 4
    for (int i = threadIdx.x; i < Form::ROWS * Form::CHUNKS; i += Form::THREADS) {
        const int row = i / Form::CHUNKS, chunk = i % Form::CHUNKS;
        const bool there = heads.has(first + row);
        const __nv_bfloat16 *address = from + (there ? heads.head_row(first + row) * Form::DIM + chunk * 8 : 0);
        copy_async(shared_address(queries) + Form::query_place(row, chunk), address, there);
    }
}

}  // namespace
}  // namespace attention::flash
