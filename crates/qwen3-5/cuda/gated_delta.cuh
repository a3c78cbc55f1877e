// The mixer of a gated-delta layer in one kernel: convolution, gates, delta rule and gated norm of rows in order.
//
// A block owns some columns (value dimensions) of one value head, and holds their part of the state in registers while all rows
// pass. Columns of the state never meet each other, so blocks meet only twice: the norm sums squares over a head's columns, and
// the convolution's state of a key head is read by every block that needs that head, and overwritten once all of them have. A
// cluster is therefore the blocks of one key head: its value heads in order, the slices of each in order.
//
// Rows pass in chunks of as many as fit into shared memory. How many those are does not show in the bits.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cluster.cuh"
#include "gated_delta.h"
#include "launch.cuh"
#include "load.cuh"

namespace gated_delta {
namespace {

constexpr int WARP_COLUMNS = 8;
constexpr int MAX_SLICES = 8;
constexpr int VECTOR = 8;  // BF16 in 16 bytes

using Call = qwen3_5_gated_delta_call;

// Divisions that round to 2 ulp without a slow path, whose code a short kernel would fetch in vain.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + expf(-x)); }

// Copies 16 bytes without passing through registers; `wait_for_copies` waits for those of this thread.
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The first half of `cluster_sync`.
__device__ __forceinline__ void cluster_arrive() {
#if HAS_CLUSTERS
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Brings bytes into the L2 cache, a multiple of 16 of them. It does no harm if a kernel still writes there.
__device__ __forceinline__ void prefetch(const void *address, uint32_t bytes) {
#if HAS_DEPENDENT_LAUNCH
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// Sums each value over `Lanes` neighbouring lanes; lane j is left with the total of value j / (Lanes / N).
template <int Lanes, int N>
__device__ __forceinline__ float scatter_sums(float (&values)[N]) {
#pragma unroll
    for (int step = Lanes / 2, left = N / 2; step > 0; step /= 2, left /= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < left; i++) {
            const float given = upper ? values[i] : values[i + left], kept = upper ? values[i + left] : values[i];
            values[i] = kept + __shfl_xor_sync(0xffffffff, given, step);
        }
        if (left == 0) values[0] += __shfl_xor_sync(0xffffffff, values[0], step);
    }
    return values[0];
}

template <int N>
__device__ __forceinline__ void sum_over_lanes(float (&sums)[N], int lanes) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], step);
}

// What a block has in shared memory, for chunks of up to `capacity` rows. A row of `raw` has the channels of the block's queries,
// keys and values side by side, then z; one of `filters` the same without z.
template <int Keys, int Columns>
struct Shared {
    static constexpr int CHANNELS = 2 * Keys + Columns, WIDTH = CHANNELS + Columns;

    float4 *scalars;     // [capacity]: decay, beta, and q.k
    float *filters;      // [taps][CHANNELS]
    float *queries;      // [capacity][Keys], normalised and scaled, as are
    float *keys;         // [capacity][Keys]
    float *values;       // [capacity][Columns]
    float *out;          // [capacity][Columns]
    float *squares;      // [2][MAX_SLICES][capacity]: sums of each slice's columns, which the slice's block writes
    __nv_bfloat16 *raw;  // [taps - 1 + capacity][WIDTH]: the rows before the chunk, then its own

    static __host__ __device__ int64_t bytes(int taps, int capacity) {
        const int64_t floats = taps * CHANNELS + capacity * static_cast<int64_t>(2 * Keys + 2 * Columns + 4 + 2 * MAX_SLICES);
        return (floats + 3) / 4 * 16 + (taps - 1 + capacity) * static_cast<int64_t>(WIDTH) * 2;
    }

    __device__ Shared(char *memory, int taps, int capacity) {
        raw = reinterpret_cast<__nv_bfloat16 *>(memory);
        scalars = reinterpret_cast<float4 *>(raw + (taps - 1 + capacity) * WIDTH);
        filters = reinterpret_cast<float *>(scalars + capacity);
        queries = filters + taps * CHANNELS, keys = queries + capacity * Keys;
        values = keys + capacity * Keys, out = values + capacity * Columns;
        squares = out + capacity * Columns;
    }
};

// `Lanes` share a column of the state: lane j has rows 4 Lanes i + 4 j to 4 Lanes i + 4 j + 3 of it, for each i.
template <int Keys, int Columns, int Lanes>
struct Block {
    using Memory = Shared<Keys, Columns>;
    static constexpr int CHANNELS = Memory::CHANNELS, WIDTH = Memory::WIDTH;
    static constexpr int WARPS = Columns / WARP_COLUMNS, THREADS = WARPS * 32;
    static constexpr int LANE_COLUMNS = WARP_COLUMNS * Lanes / 32, PARTS = Keys / Lanes / 4;
    // Threads that copy a row, 16 bytes each.
    static constexpr int COPIERS = WIDTH / VECTOR <= 32 ? 32 : WIDTH / VECTOR <= 64 ? 64 : 128;

    const Call &call;
    const Memory shared;
    int capacity, ranks, rank, slices, slice, key_head, head, first;  // `first` of the head's columns
    int64_t channels;
    float state[LANE_COLUMNS][PARTS][4];

    __device__ Block(const Call &call, char *memory, int capacity)
        : call(call), shared(memory, call.taps, capacity), capacity(capacity) {
        slices = (call.value_dim + Columns - 1) / Columns;
        const int served = call.heads / call.key_heads;
        ranks = served * slices, rank = blockIdx.x % ranks;
        key_head = blockIdx.x / ranks, head = key_head * served + rank / slices;
        slice = rank % slices, first = slice * Columns;
        channels = 2ll * call.key_heads * call.key_dim + static_cast<int64_t>(call.heads) * call.value_dim;
    }

    // Where what is at `column` of a row in shared memory is in a row of channels, or of z; -1 past the end of a head.
    __device__ int64_t channel(int column) const {
        const bool is_key = column < 2 * Keys;
        const int within = is_key ? column % Keys : first + (column - 2 * Keys) % Columns;
        if (within >= (is_key ? call.key_dim : call.value_dim)) return -1;
        if (is_key) return static_cast<int64_t>(column / Keys * call.key_heads + key_head) * call.key_dim + within;
        const int64_t before = column < CHANNELS ? 2ll * call.key_heads * call.key_dim : 0;
        return before + static_cast<int64_t>(head) * call.value_dim + within;
    }

    __device__ void load_filters() const {
        for (int column = threadIdx.x; column < CHANNELS; column += THREADS) {
            const int64_t from = channel(column);
#pragma unroll 4
            for (int tap = 0; tap < call.taps; tap++)
                shared.filters[tap * CHANNELS + column] = from < 0 ? 0.0f : call.filters[tap * channels + from];
        }
    }

    // Starts to bring in what rows `begin` on need: they themselves, those before them, and z. Those before row 0 are in the state.
    __device__ void copy_rows(int64_t begin, int rows, int64_t slot) const {
        const int before = call.taps - 1, column = threadIdx.x % COPIERS * VECTOR;
        const int64_t from = column < WIDTH ? channel(column) : -1;
        if (from < 0) return;
        const bool is_z = column >= CHANNELS;
        const int64_t width = is_z ? static_cast<int64_t>(call.heads) * call.value_dim : channels;
        const __nv_bfloat16 *source = static_cast<const __nv_bfloat16 *>(is_z ? call.z : call.mixed) + from;
        const __nv_bfloat16 *old =
            static_cast<const __nv_bfloat16 *>(call.conv_state) + (slot + 1) * before * channels + from;
#pragma unroll 1
        for (int row = threadIdx.x / COPIERS + (is_z ? before : 0); row < before + rows; row += THREADS / COPIERS) {
            const int64_t t = begin + row - before;
            copy_async(shared.raw + row * WIDTH + column, (t < 0 ? old : source) + t * width);
        }
    }

    __device__ void compute_gates(int64_t begin, int rows) const {
        for (int row = THREADS - 1 - threadIdx.x; row < rows; row += THREADS) {
            const int64_t at = (begin + row) * call.heads + head;
            const float b = __bfloat162float(static_cast<const __nv_bfloat16 *>(call.b)[at]);
            const float a = __bfloat162float(static_cast<const __nv_bfloat16 *>(call.a)[at]) + call.dt_bias[head];
            shared.scalars[row].x = expf(call.rate[head] * (a > 20.0f ? a : log1pf(expf(a))));
            shared.scalars[row].y = sigmoid(b);
        }
    }

    // Channels column + 64 i and the next, for each i, of a row after the convolution.
    template <int N>
    __device__ void convolve(float2 (&sums)[N], int row, int column) const {
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = {};
        const __nv_bfloat16 *raw = shared.raw + row * WIDTH + column;
        const float *filters = shared.filters + column;
#pragma unroll 4
        for (int tap = 0; tap < call.taps; tap++)
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(raw + tap * WIDTH + i * 64));
                const float2 w = *reinterpret_cast<const float2 *>(filters + tap * CHANNELS + i * 64);
                sums[i].x = fmaf(w.x, x.x, sums[i].x), sums[i].y = fmaf(w.y, x.y, sums[i].y);
            }
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = {silu(sums[i].x), silu(sums[i].y)};
    }

    // A warp makes the query and the key of a row.
    __device__ void query_and_key(int row) const {
        constexpr int PAIRS = Keys / 64;
        const int lane = threadIdx.x % 32;
        float2 q[PAIRS], k[PAIRS];
        convolve(q, row, 2 * lane);
        convolve(k, row, Keys + 2 * lane);
        float sums[3] = {};  // q.q, k.k, q.k
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            if (Keys != call.key_dim && 64 * i + 2 * lane >= call.key_dim) q[i] = k[i] = {};
            sums[0] = fmaf(q[i].y, q[i].y, fmaf(q[i].x, q[i].x, sums[0]));
            sums[1] = fmaf(k[i].y, k[i].y, fmaf(k[i].x, k[i].x, sums[1]));
            sums[2] = fmaf(q[i].y, k[i].y, fmaf(q[i].x, k[i].x, sums[2]));
        }
        sum_over_lanes(sums, 32);
        const float q_scale = rsqrtf(sums[0] + 1e-6f) * rsqrtf(static_cast<float>(call.key_dim));
        const float k_scale = rsqrtf(sums[1] + 1e-6f);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int at = row * Keys + 64 * i + 2 * lane;
            *reinterpret_cast<float2 *>(shared.queries + at) = {q[i].x * q_scale, q[i].y * q_scale};
            *reinterpret_cast<float2 *>(shared.keys + at) = {k[i].x * k_scale, k[i].y * k_scale};
        }
        if (lane == 0) shared.scalars[row].z = sums[2] * q_scale * k_scale;
    }

    // Queries, keys and values of a chunk. Few rows find a warp each for their queries and keys, and another for their values.
    __device__ void prepare(int rows) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int row = warp; row < rows; row += WARPS) query_and_key(row);
        for (int row = WARPS - 1 - warp; row < rows; row += WARPS)
#pragma unroll
            for (int column = 2 * lane; column < Columns; column += 64) {
                float2 v[1];
                convolve(v, row, 2 * Keys + column);
                *reinterpret_cast<float2 *>(shared.values + row * Columns + column) = v[0];
            }
    }

    __device__ int column(int i) const {
        return threadIdx.x / 32 * WARP_COLUMNS + i * (32 / Lanes) + threadIdx.x % 32 / Lanes;
    }

    // Where a lane's first row of its first column is in a slot.
    __device__ float *state_at(int64_t slot) const {
        const int64_t column_at = (slot * call.heads + head) * call.value_dim + first + column(0);
        return call.delta_state + column_at * call.key_dim + threadIdx.x % Lanes * 4;
    }

    // Whether the head has a lane's column i, and rows in a part.
    __device__ bool has(int i, int part) const {
        return first + column(i) < call.value_dim &&
               part * 4 * Lanes + threadIdx.x % Lanes * 4 < call.key_dim;
    }

    __device__ void load_state(int64_t slot) {
        const float *from = state_at(slot);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const float *address = from + i * (32 / Lanes) * call.key_dim + part * 4 * Lanes;
                uint4 bits = {};
                if (has(i, part)) bits = load_streaming(reinterpret_cast<const uint4 *>(address));
                const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
                for (int r = 0; r < 4; r++) state[i][part][r] = __uint_as_float(words[r]);
            }
    }

    __device__ void store_state(int64_t slot) const {
        float *to = state_at(slot);
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float *address = to + i * (32 / Lanes) * call.key_dim + part * 4 * Lanes;
                const float(&s)[4] = state[i][part];
                if (has(i, part)) *reinterpret_cast<float4 *>(address) = {s[0], s[1], s[2], s[3]};
            }
    }

    __device__ static void load_part(float (&part)[4], const float4 *row, int index) {
        const float4 values = row[index * Lanes];
        part[0] = values.x, part[1] = values.y, part[2] = values.z, part[3] = values.w;
    }

    // Rows in order through the state; with `keep` the state after each goes to its slot. A row's query and key are loaded while
    // the one before is under way.
    __device__ void pass(int rows) {
        constexpr int TOTAL_LANES = Lanes / (2 * LANE_COLUMNS);  // that have the same total
        const int lane = threadIdx.x % Lanes, owned = lane / TOTAL_LANES - LANE_COLUMNS;
        const float4 *queries = reinterpret_cast<const float4 *>(shared.queries) + lane;
        const float4 *keys = reinterpret_cast<const float4 *>(shared.keys) + lane;
        const float4 *scalars = shared.scalars;
        const float *values = shared.values + column(0);
        float *out = shared.out + column(owned), query[PARTS][4], key[PARTS][4];
#pragma unroll
        for (int part = 0; part < PARTS; part++) load_part(query[part], queries, part), load_part(key[part], keys, part);

#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            const float decay = scalars->x, beta = scalars->y, product = scalars->z;
            float sums[2 * LANE_COLUMNS] = {}, value[LANE_COLUMNS], correction[LANE_COLUMNS];
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) value[i] = values[i * (32 / Lanes)];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++) {
                        sums[i] = fmaf(key[part][r], state[i][part][r], sums[i]);
                        sums[LANE_COLUMNS + i] = fmaf(query[part][r], state[i][part][r], sums[LANE_COLUMNS + i]);
                    }
            queries += Keys / 4, keys += Keys / 4, scalars++, values += Columns;
#pragma unroll
            for (int part = 0; part < PARTS; part++) load_part(query[part], queries, part);

            // q^T S after the correction is decay * q^T S + (q.k) * correction of the S before, so that both sums are taken
            // together.
            const float total = scatter_sums<Lanes>(sums);
            float mine = 0.0f;
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) {
                const float recalled = __shfl_sync(0xffffffff, total, i * TOTAL_LANES, Lanes);
                correction[i] = beta * fmaf(-decay, recalled, value[i]);
                if (owned == i) mine = correction[i];
            }
            if (owned >= 0 && lane % TOTAL_LANES == 0) *out = fmaf(product, mine, decay * total);
            out += Columns;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        state[i][part][r] = fmaf(decay, state[i][part][r], key[part][r] * correction[i]);
                load_part(key[part], keys, part);
            }
            if (call.keep) store_state(row);
        }
    }

    // The sum of the block's squares of each row, to every block of the head.
    __device__ void share_squares(int rows, int side) const {
        const int lane = threadIdx.x % 32;
        for (int row = threadIdx.x / 32; row < rows; row += WARPS) {
            float sums[1] = {};
#pragma unroll
            for (int column = lane; column < Columns; column += 32) {
                const float o = shared.out[row * Columns + column];
                if (first + column < call.value_dim) sums[0] = fmaf(o, o, sums[0]);
            }
            sum_over_lanes(sums, 32);
            if (lane < slices) store_to_rank(shared.squares + (side * MAX_SLICES + slice) * capacity + row, rank - slice + lane, sums[0]);
        }
    }

    __device__ void finish(int64_t begin, int rows, int side) const {
        for (int index = threadIdx.x; index < rows * (Columns / 2); index += THREADS) {
            const int row = index / (Columns / 2), column = index % (Columns / 2) * 2;
            if (first + column >= call.value_dim) continue;
            const float *squares = shared.squares + side * MAX_SLICES * capacity + row;
            float sum = squares[0];
            for (int i = 1; i < slices; i++) sum += squares[i * capacity];
            const float inverse = rsqrtf(__fdividef(sum, static_cast<float>(call.value_dim)) + call.eps);
            const float2 o = *reinterpret_cast<const float2 *>(shared.out + row * Columns + column);
            const float2 z =
                __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(shared.raw + (call.taps - 1 + row) * WIDTH + CHANNELS + column));
            const float2 scale = *reinterpret_cast<const float2 *>(call.scale + first + column);
            const float2 y = {o.x * inverse * scale.x * silu(z.x), o.y * inverse * scale.y * silu(z.y)};
            const int64_t at = ((begin + row) * call.heads + head) * call.value_dim + first + column;
            *reinterpret_cast<__nv_bfloat162 *>(static_cast<__nv_bfloat16 *>(call.out) + at) = __float22bfloat162_rn(y);
        }
    }

    // The rows before the one after `row` of the last chunk, into a slot. The blocks of a cluster share queries and keys out.
    __device__ void store_rows(int row, int64_t slot) const {
        const int before = call.taps - 1, vector = threadIdx.x % COPIERS;
        const int64_t at = vector < CHANNELS / VECTOR ? channel(vector * VECTOR) : -1;
        if (at < 0 || (vector < 2 * Keys / VECTOR && vector % ranks != rank)) return;
        __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(call.conv_state) + slot * before * channels + at;
        const __nv_bfloat16 *from = shared.raw + (row + 1) * WIDTH + vector * VECTOR;
#pragma unroll 1
        for (int i = threadIdx.x / COPIERS; i < before; i += THREADS / COPIERS)
            *reinterpret_cast<uint4 *>(to + i * channels) = *reinterpret_cast<const uint4 *>(from + i * WIDTH);
    }
};

template <int Keys, int Columns, int Lanes>
__global__ void __launch_bounds__(Block<Keys, Columns, Lanes>::THREADS, 1)
    gated_delta(const __grid_constant__ Call call, const int capacity) {
    extern __shared__ __align__(16) char memory[];
    let_next_start();
    cluster_arrive_relaxed();
    Block<Keys, Columns, Lanes> block(call, memory, capacity);
    // What no kernel writes, and of the state what does no harm. Which slot that is may still change.
    const auto start = [&] { return call.from ? *reinterpret_cast<const volatile int32_t *>(call.from) : 0; };
    if (threadIdx.x == 0) {
        const int64_t slot = start();
        const int columns = min(Columns, call.value_dim - block.first);
        const float *state =
            call.delta_state + ((slot * call.heads + block.head) * call.value_dim + block.first) * call.key_dim;
        if (slot >= 0 && slot < call.slots) prefetch(state, columns * call.key_dim * sizeof(float));
    }
    block.load_filters();
    wait_for_previous();
    const int64_t slot = start();
    const bool known = slot >= 0 && slot < call.slots;
    block.load_state(known ? slot : 0);
    if (!known) block.state[0][0][0] = block.state[1][0][0] = NAN;

    int rows = 0, side = 0;
#pragma unroll 1
    for (int64_t begin = 0; begin < call.rows; begin += capacity) {
        rows = static_cast<int>(min(call.rows - begin, static_cast<int64_t>(capacity)));
        const bool last = begin + rows == call.rows;
        block.copy_rows(begin, rows, known ? slot : 0);
        block.compute_gates(begin, rows);
        wait_for_copies();
        __syncthreads();
        block.prepare(rows);
        __syncthreads();
        block.pass(rows);
        __syncthreads();
        if (begin == 0) cluster_wait();
        block.share_squares(rows, side);
        cluster_arrive();
        if (last && !call.keep) block.store_state(0);
        cluster_wait();
        block.finish(begin, rows, side);
        side ^= 1;
        if (!last) __syncthreads();
    }
    for (int row = call.keep ? 0 : rows - 1; row < rows; row++) block.store_rows(row, call.keep ? row : 0);
}

}  // namespace
}  // namespace gated_delta
