// Tiles of keys or values on their way from pages to shared memory, in the type of the products.
#pragma once

#include <cstdint>
#include <cuda_fp8.h>

#include "attention.cuh"
#include "attention_operands.cuh"
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

// Copies 16 bytes into shared memory, or zeros where they are not `there`.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where the keys and values of one head lie, as far as position `end`.
template <typename Form>
struct HeadPages {
    const int32_t *table;
    int kv_heads, head, shift, end;

    __device__ HeadPages(const Pages<typename Form::Element> &pages, int of_head, int until)
        : table(pages.table), kv_heads(pages.kv_heads), head(of_head), shift(__ffs(pages.page_size) - 1), end(until) {}

    // The element at which the row of a position before `end` starts.
    __device__ int64_t row(int position) const {
        const int run = position >> shift, page = table == nullptr ? run : table[run];
        const int64_t head_page = static_cast<int64_t>(page) * kv_heads + head;
        return ((head_page << shift) + (position & ((1 << shift) - 1))) * Form::DIM;
    }
};

// A tile that all threads of the block fetch. It is on its way between `start` and `finish`, and there for all after
// `wait_for_copies` and a barrier.
template <typename Form, typename Element = typename Form::Element>
struct Fetch;

// Calls `with` with this thread's chunks of 8 elements: which one, its key and its chunk of the key's row.
template <typename Form, typename With>
__device__ __forceinline__ void each_chunk(const With &with) {
#pragma unroll
    for (int i = 0; i < Form::KEYS * Form::CHUNKS / Form::THREADS; i++) {
        const int at = i * Form::THREADS + threadIdx.x;
        with(i, at / Form::CHUNKS, at % Form::CHUNKS);
    }
}

template <typename Form>
struct Fetch<Form, __nv_bfloat16> {
    __device__ void start(uint4 *tile, const __nv_bfloat16 *from, const HeadPages<Form> &pages, int first) {
        each_chunk<Form>([&](int, int key, int chunk) {
            const bool there = first + key < pages.end;
            const int64_t element = there ? pages.row(first + key) + chunk * 8 : 0;
            copy_async(shared_address(tile) + place<Form>(key, chunk), from + element, there);
        });
    }
    __device__ void finish(uint4 *) {}
};

template <typename Form>
struct Fetch<Form, __nv_fp8_e4m3> {
    uint2 codes[Form::KEYS * Form::CHUNKS / Form::THREADS];

    __device__ void start(uint4 *, const __nv_fp8_e4m3 *from, const HeadPages<Form> &pages, int first) {
        each_chunk<Form>([&](int i, int key, int chunk) {
            codes[i] = make_uint2(0, 0);
            if (first + key < pages.end) codes[i] = load_eight(from + pages.row(first + key) + chunk * 8);
        });
    }
    __device__ void finish(uint4 *tile) {
        each_chunk<Form>([&](int i, int key, int chunk) {
            *reinterpret_cast<uint4 *>(reinterpret_cast<unsigned char *>(tile) + place<Form>(key, chunk)) =
                make_uint4(fp16x2(codes[i].x), fp16x2(codes[i].x >> 16), fp16x2(codes[i].y), fp16x2(codes[i].y >> 16));
        });
    }

    // Loads that stay where they are written, so that all of a tile's are under way together.
    __device__ static uint2 load_eight(const __nv_fp8_e4m3 *address) {
        uint2 value;
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(address) : "memory");
        return value;
    }
    // The lower two codes as FP16.
    __device__ static uint32_t fp16x2(uint32_t codes) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
        return pair.x | static_cast<uint32_t>(pair.y) << 16;
    }
};

}  // namespace
}  // namespace attention::flash
