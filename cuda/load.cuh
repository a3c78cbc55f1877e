// Loads: weights stream past the caches, activations stay in them.
//
// Neither goes through the read-only path (`.nc`): the assembler moves those loads down to their first use, across barriers
// too, and a lane then has one under way instead of all that a kernel wrote together.
#pragma once

#include <cstdint>

// 16 bytes that this call reads once: kept out of L1, so that they do not push activations out.
__device__ __forceinline__ uint4 load_streaming(const uint4 *address) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

// 2 bytes that this call reads once, such as two block scales.
__device__ __forceinline__ uint32_t load_streaming(const unsigned short *address) {
    unsigned short value;
    asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(value) : "l"(address) : "memory");
    return value;
}

// 4 bytes that this call reads once, such as four block scales.
__device__ __forceinline__ uint32_t load_streaming(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// 16 bytes that other blocks read too.
__device__ __forceinline__ uint4 load_cached(const uint4 *address) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

// Brings the line of 128 bytes that `address` is in into L2.
__device__ __forceinline__ void prefetch_line(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
