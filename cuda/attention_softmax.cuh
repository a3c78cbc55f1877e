// The online softmax of a warp's 16 rows, what it hides from them, and what becomes of their sums.
//
// Lane 4g + t has rows g and g + 8, of every 8 keys or dimensions numbers 2t and 2t + 1: the layout of an MMA's results.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>

#include "attention_operands.cuh"
#include "cluster.cuh"
#include "mbarrier.cuh"

namespace attention::flash {
namespace {

constexpr int MAX_PARTS = 8;  // blocks of a cluster that share rows

// What a lane knows of its two rows. Scores count in powers of two from here on.
struct Softmax {
    float scale[2];  // what takes a score to a power of two
    float top[2];    // the largest score so far
    float total[2];  // the lane's share of the sum of weights
    int last[2];     // the last position that the row sees
};

__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// The largest of, and the sum over, the four lanes that share a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// What is subtracted from scores. Where a row has seen no key yet every weight is 2^-inf whatever that is, unless it is -inf too.
__device__ __forceinline__ float subtrahend(float top) { return top == -INFINITY ? 0.0f : top; }

// What earlier sums are to be multiplied by: exactly one where a row's top has not moved, so that whether others' have does not
// show in its bits.
struct Keep {
    float factor[2];
    bool moved;  // whether a row of the warp has
};

// Turns the scores of a tile into weights.
template <int Tiles>
__device__ __forceinline__ Keep weigh(float (&score)[Tiles][4], Softmax &softmax) {
    Keep keep;
    float less[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < Tiles; n++) top = fmaxf(top, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        top = fmaxf(softmax.top[half], __fmul_rn(quad_max(top), softmax.scale[half]));
        less[half] = subtrahend(top);
        keep.factor[half] = power_of_two(softmax.top[half] - less[half]);
        moved |= top != softmax.top[half];
        softmax.top[half] = top;
        softmax.total[half] *= keep.factor[half];
    }
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[n][i] = power_of_two(fmaf(score[n][i], softmax.scale[i / 2], -less[i / 2]));
            softmax.total[i / 2] += score[n][i];
        }
    }
    keep.moved = __any_sync(~0u, moved);
    return keep;
}

template <int Tiles>
__device__ __forceinline__ void clear(float (&sum)[Tiles][4]) {
#pragma unroll
    for (int n = 0; n < Tiles; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
}

template <int Tiles>
__device__ __forceinline__ void rescale(float (&sum)[Tiles][4], const Keep &keep) {
    if (!keep.moved) return;
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[n][i] *= keep.factor[i / 2];
    }
}

// Hides what lies past each row's last position. `first` is the position of the tile's first key.
template <int Tiles>
__device__ __forceinline__ void hide_keys(float (&score)[Tiles][4], const Softmax &softmax, int first, int lane) {
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + n * 8 + lane % 4 * 2 + i % 2 > softmax.last[i / 2]) score[n][i] = -INFINITY;
    }
}

// Zeros in place of values that are not finite, since zero times those would reach rows that do not see them.
struct Hidden {
    int any;
    int first[256];  // of each dimension: the first key of the tile whose value was
};

// Makes zeros of such among 8 values of a key.
template <typename Form>
__device__ __forceinline__ void hide_values(uint4 *eight, int key, int chunk, Hidden &hidden) {
    uint32_t pairs[4] = {eight->x, eight->y, eight->z, eight->w};
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; i++) any |= Form::Product::not_finite(pairs[i]);
    if (!any) return;
    hidden.any = 1;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t element = 0xffffu << i % 2 * 16;
        if (!Form::Product::not_finite(pairs[i / 2] & element)) continue;
        pairs[i / 2] &= ~element;
        atomicMin(&hidden.first[chunk * 8 + i], key);
    }
    *eight = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Makes NaN of the sums of rows that do see a value which was hidden.
template <int Tiles>
__device__ __forceinline__ void show_values(float (&sum)[Tiles][4], const Softmax &softmax, const Hidden &hidden, int first,
                                            int lane) {
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = hidden.first[n * 8 + lane % 4 * 2 + i % 2];
            if (key != INT32_MAX && first + key <= softmax.last[i / 2]) sum[n][i] = NAN;
        }
    }
}

// The rows of a group of heads, row after row.
struct HeadRows {
    int heads, first_head, group, rows;
    __device__ int row(int i) const { return i / group; }
    __device__ bool has(int i) const { return i < rows * group; }
    // Which of all rows of all heads it is.
    __device__ int64_t head_row(int i) const { return static_cast<int64_t>(row(i)) * heads + first_head + i % group; }
};

// Writes a warp's 16 rows, of which the first is number `first` of `heads`, through rows `own` and on of shared memory.
template <typename Form>
__device__ __forceinline__ void store_rows(const float (&sum)[Form::DIM / 8][4], const float (&factor)[2], uint4 *rows, int own,
                                           __nv_bfloat16 *out, const HeadRows &heads, int first, int lane) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Form::DIM / 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            reinterpret_cast<uint32_t *>(at_byte(rows, Form::place(own + lane / 4 + 8 * half, n)))[lane % 4] =
                Bf16Product::pack(sum[n][2 * half] * factor[half], sum[n][2 * half + 1] * factor[half]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * Form::CHUNKS; i += 32) {
        const int row = i / Form::CHUNKS, chunk = i % Form::CHUNKS;
        if (heads.has(first + row))
            reinterpret_cast<uint4 *>(out + heads.head_row(first + row) * Form::DIM)[chunk] =
                *at_byte(rows, Form::place(own + row, chunk));
    }
}

// What lies where `local` would be in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ float load_from_rank(const float *local, int rank) {
#if HAS_CLUSTERS
    float value;
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [remote]; }"
        : "=f"(value)
        : "r"(shared_address(local)), "r"(rank)
        : "memory");
    return value;
#else
    return *local;
#endif
}

// What a block of a cluster has summed over its part of the keys.
template <int Rows, int Dim>
struct Sums {
    float sum[Rows * Dim], top[Rows], total[Rows];
};

// Puts down a warp's 16 rows from row `own` on.
template <int Rows, int Dim>
__device__ __forceinline__ void put_sums(const float (&sum)[Dim / 8][4], const Softmax &softmax, Sums<Rows, Dim> &sums, int own,
                                         int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = own + lane / 4 + 8 * half;
        const float total = quad_sum(softmax.total[half]);
        if (lane % 4 == 0) {
            sums.top[row] = softmax.top[half];
            sums.total[row] = total;
        }
#pragma unroll
        for (int n = 0; n < Dim / 8; n++)
            *reinterpret_cast<float2 *>(&sums.sum[row * Dim + n * 8 + lane % 4 * 2]) =
                make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
    }
}

// Adds what the blocks of a cluster have put down, in order, and writes this block's share of the rows.
template <int Rows, int Dim>
__device__ __forceinline__ void add_sums(const Sums<Rows, Dim> &sums, int part, int parts, float v_scale, __nv_bfloat16 *out,
                                         const HeadRows &heads, int first, int warp, int warps, int lane) {
    const int share = Rows / parts;
    for (int row = part * share + warp; row < (part + 1) * share; row += warps) {
        if (!heads.has(first + row)) break;
        float top = -INFINITY, total = 0.0f, factor[MAX_PARTS];
        for (int from = 0; from < parts; from++) top = fmaxf(top, load_from_rank(&sums.top[row], from));
#pragma unroll
        for (int from = 0; from < MAX_PARTS; from++) {
            if (from == parts) break;
            factor[from] = power_of_two(load_from_rank(&sums.top[row], from) - subtrahend(top));
            total += load_from_rank(&sums.total[row], from) * factor[from];
        }
        __nv_bfloat16 *to = out + heads.head_row(first + row) * Dim;
#pragma unroll
        for (int i = lane; i < Dim; i += 32) {
            float value = 0.0f;
#pragma unroll
            for (int from = 0; from < MAX_PARTS; from++) {
                if (from == parts) break;
                value += load_from_rank(&sums.sum[row * Dim + i], from) * factor[from];
            }
            to[i] = __float2bfloat16_rn(value * (v_scale / total));
        }
    }
}

}  // namespace
}  // namespace attention::flash
