// The mixer of a gated-delta layer in one kernel: convolution, gates, delta rule and gated norm of rows in order.
//
// A block owns some columns (value dimensions) of one value head, and holds their part of the state in registers while all rows
// pass. Columns of the state never meet each other, so blocks meet only twice: the norm sums squares over a head's columns, and
// the convolution's state of a key head is read by every block that needs that head, and overwritten once all of them have. A
// cluster is therefore the blocks of one key head: its value heads in order, the slices of each in order.
//
// Rows pass in chunks of as many as fit into shared memory. How many those are does not show in the bits.
//
// One row is a chain of short phases, so what counts is how many instructions follow each other in it: addresses are computed
// before the wait for the kernel before, and the usual shape has a kernel that checks no bounds.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cluster.cuh"
#include "gated_delta.h"
#include "launch.cuh"
#include "load.cuh"
#include "mbarrier.cuh"

namespace gated_delta {
namespace {

constexpr int LANES = 8;         // lanes that share a column: lane j has rows 32 i + 4 j to 32 i + 4 j + 3 of it, for each i
constexpr int LANE_COLUMNS = 2;  // columns of a lane
constexpr int WARP_COLUMNS = 32 / LANES * LANE_COLUMNS;
static_assert(LANE_COLUMNS == 2, "a lane finishes one of two columns");
constexpr int TOTAL_LANES = LANES / LANE_COLUMNS;  // that are left with the same total
constexpr int PARTIALS = 32;     // sums of squares of a head's columns, at most: one a warp
constexpr int VECTOR = 8;        // BF16 in 16 bytes
constexpr int USUAL_TAPS = 4;

using Call = qwen3_5_gated_delta_call;

// To 2 ulp of e^-x and of the division, in five instructions: nothing is left of it where e^-x overflows.
__device__ __forceinline__ float sigmoid(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + __expf(-x)));
    return result;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// Computes an address here, not where it is first used.
template <typename T>
__device__ __forceinline__ void settle(T *&address) {
    asm volatile("" : "+l"(address));
}

// Copies 16 bytes without passing through registers; `wait_for_copies` waits for those of this thread.
__device__ __forceinline__ void copy_async(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Brings what lies there into the L2 cache, and its translation. It does no harm if a kernel still writes there.
__device__ __forceinline__ void prefetch(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Writes to where `local` would be in the cluster's block `rank`, and reports the 4 bytes to the barrier in the same place there.
__device__ __forceinline__ void store_to_rank_async(float *local, uint64_t *barrier, int rank, float value) {
    asm volatile(
        "{ .reg .b32 to, done;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 done, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [done]; }" ::"r"(shared_address(local)),
        "r"(shared_address(barrier)), "r"(rank), "f"(value)
        : "memory");
}

template <int N>
struct alignas(N * 2) Bf16s {
    __nv_bfloat16 value[N];
};

template <int N>
struct alignas(N < 4 ? N * 4 : 16) Floats {
    float value[N];
};

// Sums each value over groups of lanes, all of whose lanes get the total.
template <int Lanes, int N>
__device__ __forceinline__ void sum_over_lanes(float (&values)[N]) {
#pragma unroll
    for (int step = Lanes / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < N; i++) values[i] += __shfl_xor_sync(0xffffffff, values[i], step);
}

// The same with fewer exchanges: lane j of a group is left with the total of value j / (Lanes / N).
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

// What a block has in shared memory, for chunks of up to `capacity` rows. A row of `raw` has the channels of the block's queries,
// keys and values side by side, then z; one of `filters` the same without z.
template <int Keys, int Columns>
struct Shared {
    static constexpr int CHANNELS = 2 * Keys + Columns, WIDTH = CHANNELS + Columns;

    uint64_t *barriers;  // [2]: of the squares of even and of odd chunks
    float4 *scalars;     // [capacity]: decay, beta, and q.k
    float *squares;      // [2][capacity][PARTIALS]: sums that each warp of the head writes
    float *filters;      // [taps][CHANNELS]
    float *queries;      // [capacity][Keys], normalised and scaled, as are
    float *keys;         // [capacity][Keys]
    float *values;       // [capacity][Columns]
    float *out;          // [capacity][Columns]
    __nv_bfloat16 *raw;  // [taps - 1 + capacity][WIDTH]: the rows before the chunk, then its own

    static __host__ __device__ int64_t bytes(int taps, int capacity) {
        const int64_t floats = taps * CHANNELS + capacity * static_cast<int64_t>(2 * Keys + 2 * Columns + 4 + 2 * PARTIALS);
        return 16 + floats * 4 + (taps - 1 + capacity) * static_cast<int64_t>(WIDTH) * 2;
    }

    __device__ Shared(char *memory, int taps, int capacity) {
        barriers = reinterpret_cast<uint64_t *>(memory);
        scalars = reinterpret_cast<float4 *>(memory + 16);
        squares = reinterpret_cast<float *>(scalars + capacity);
        filters = squares + 2 * capacity * PARTIALS;
        queries = filters + taps * CHANNELS, keys = queries + capacity * Keys;
        values = keys + capacity * Keys, out = values + capacity * Columns;
        raw = reinterpret_cast<__nv_bfloat16 *>(out + capacity * Columns);
    }
};

// With `Usual`, key_dim is Keys, value_dim whole blocks of Columns, and there are USUAL_TAPS taps.
template <int Keys, int Columns, bool Usual>
struct Block {
    using Memory = Shared<Keys, Columns>;
    static constexpr int CHANNELS = Memory::CHANNELS, WIDTH = Memory::WIDTH, PARTS = Keys / LANES / 4;
    static constexpr int WARPS = Columns / WARP_COLUMNS, THREADS = WARPS * 32;
    // Threads that copy a row, 16 bytes each.
    static constexpr int COPIERS = WIDTH / VECTOR <= 32 ? 32 : WIDTH / VECTOR <= 64 ? 64 : 128, STEP = THREADS / COPIERS;

    const Call &call;
    const Memory shared;
    const int capacity, taps, before, warp, lane;
    int ranks, rank, slices, slice, key_head, head, first;  // `first` of the head's columns
    int64_t channels;
    // Of this thread: its part of the state in slot 0; its 16 bytes of row 0, of the rows before it in slot 0, and in both the
    // distance to the next row; the gates of its row; the column and the scale that it finishes rows with.
    float *matrix;
    const __nv_bfloat16 *source, *old;
    int64_t stride;
    bool copies, is_z, has_column;
    const __nv_bfloat16 *source_b, *source_a;
    float rate, dt_bias, b, a, scale;
    __nv_bfloat16 *out;
    float state[LANE_COLUMNS][PARTS][4];

    __device__ Block(const Call &call, char *memory, int capacity)
        : call(call), shared(memory, Usual ? USUAL_TAPS : call.taps, capacity), capacity(capacity),
          taps(Usual ? USUAL_TAPS : call.taps), before(taps - 1), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        slices = (call.value_dim + Columns - 1) / Columns;
        const int served = call.heads / call.key_heads;
        ranks = served * slices, rank = blockIdx.x % ranks;
        key_head = blockIdx.x / ranks, head = key_head * served + rank / slices;
        slice = rank % slices, first = slice * Columns;
        channels = 2ll * call.key_heads * call.key_dim + static_cast<int64_t>(call.heads) * call.value_dim;
    }

    __device__ bool whole_key(int k) const { return Usual || k < call.key_dim; }
    __device__ bool whole_value(int column) const { return Usual || first + column < call.value_dim; }
    __device__ int column(int i) const { return warp * WARP_COLUMNS + i * (32 / LANES) + lane / LANES; }

    // Where what is at `column` of a row in shared memory is in a row of channels, or of z; -1 past the end of a head.
    __device__ int64_t channel(int column) const {
        const bool is_key = column < 2 * Keys;
        const int within = is_key ? column % Keys : first + (column - 2 * Keys) % Columns;
        if (within >= (is_key ? call.key_dim : call.value_dim)) return -1;
        if (is_key) return static_cast<int64_t>(column / Keys * call.key_heads + key_head) * call.key_dim + within;
        const int64_t ahead = column < CHANNELS ? 2ll * call.key_heads * call.key_dim : 0;
        return ahead + static_cast<int64_t>(head) * call.value_dim + within;
    }

    // What depends on no kernel before: this thread's addresses, and what is in no kernel's output.
    __device__ void begin() {
        if (threadIdx.x == 0) {
            mbarrier_init(shared.barriers, 1), mbarrier_init(shared.barriers + 1, 1);
            mbarrier_init_fence();
        }
#pragma unroll 1
        for (int index = threadIdx.x; index < taps * (CHANNELS / 4); index += THREADS) {
            const int tap = index / (CHANNELS / 4), column = index % (CHANNELS / 4) * 4;
            const int64_t from = channel(column);
            if (from >= 0) copy_async(shared.filters + tap * CHANNELS + column, call.filters + tap * channels + from);
        }
        const int64_t values = static_cast<int64_t>(call.heads) * call.value_dim;
        const int64_t first_column = static_cast<int64_t>(head) * call.value_dim + first;
        matrix = call.delta_state + (first_column + column(0)) * call.key_dim + lane % LANES * 4;
        const int place = threadIdx.x % COPIERS * VECTOR;
        const int64_t from = place < WIDTH ? channel(place) : -1;
        copies = from >= 0, is_z = place >= CHANNELS, stride = is_z ? values : channels;
        source = static_cast<const __nv_bfloat16 *>(is_z ? call.z : call.mixed) + from;
        old = static_cast<const __nv_bfloat16 *>(call.conv_state) + from;
        const int row = static_cast<int>(threadIdx.x) - THREADS / 2;
        source_b = static_cast<const __nv_bfloat16 *>(call.b) + static_cast<int64_t>(row) * call.heads + head;
        source_a = static_cast<const __nv_bfloat16 *>(call.a) + static_cast<int64_t>(row) * call.heads + head;
        rate = call.rate[head], dt_bias = call.dt_bias[head];
        const int mine = warp * WARP_COLUMNS + lane % WARP_COLUMNS;
        has_column = whole_value(mine), scale = has_column ? call.scale[first + mine] : 0.0f;
        out = static_cast<__nv_bfloat16 *>(call.out) + first_column + mine;
        settle(matrix), settle(source), settle(old), settle(source_b), settle(source_a), settle(out);
    }

    // What is in memory when the kernel before is over may be under way to this multiprocessor before that. The slot may still
    // change.
    __device__ void prefetch_state(int64_t slot) const {
        const float *from = matrix + slot * call.heads * call.value_dim * call.key_dim;
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                if (whole_value(column(i)) && whole_key(part * 4 * LANES + lane % LANES * 4))
                    prefetch(from + i * (32 / LANES) * call.key_dim + part * 4 * LANES);
        if (copies) prefetch(source), prefetch(old + slot * before * channels);
        if (has_column) prefetch(out);
    }

    // Moves the addresses from slot 0 to another.
    __device__ void start_from(int64_t slot) {
        matrix += slot * call.heads * call.value_dim * call.key_dim;
        old += slot * before * channels;
    }

    __device__ void load_state() {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const float *address = matrix + i * (32 / LANES) * call.key_dim + part * 4 * LANES;
                uint4 bits = {};
                if (whole_value(column(i)) && whole_key(part * 4 * LANES + lane % LANES * 4))
                    bits = load_streaming(reinterpret_cast<const uint4 *>(address));
                const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
                for (int r = 0; r < 4; r++) state[i][part][r] = __uint_as_float(words[r]);
            }
    }

    __device__ void store_state(float *to) const {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                float *address = to + i * (32 / LANES) * call.key_dim + part * 4 * LANES;
                const float(&s)[4] = state[i][part];
                if (whole_value(column(i)) && whole_key(part * 4 * LANES + lane % LANES * 4))
                    *reinterpret_cast<float4 *>(address) = {s[0], s[1], s[2], s[3]};
            }
    }

    // Starts to bring in what rows `begin` on need: they themselves, those before them, z and gates. Those before row 0 are in
    // the state.
    __device__ void copy_rows(int64_t begin, int rows) {
        const int row = static_cast<int>(threadIdx.x) - THREADS / 2;
        if (row >= 0 && row < rows) {
            b = __bfloat162float(source_b[begin * call.heads]);
            a = __bfloat162float(source_a[begin * call.heads]);
        }
        if (!copies) return;
#pragma unroll 1
        for (int row = threadIdx.x / COPIERS + (is_z ? before : 0); row < before + rows; row += STEP) {
            const int64_t t = begin + row - before;
            copy_async(shared.raw + row * WIDTH + threadIdx.x % COPIERS * VECTOR,
                       t < 0 ? old + (t + before) * channels : source + t * stride);
        }
    }

    // N channels from `column` on of a row, after the convolution.
    template <int N>
    __device__ Floats<N> convolve(int row, int column) const {
        Floats<N> sums = {};
        const __nv_bfloat16 *raw = shared.raw + row * WIDTH + column;
        const float *filters = shared.filters + column;
#pragma unroll(Usual ? USUAL_TAPS : 1)
        for (int tap = 0; tap < taps; tap++) {
            const auto x = *reinterpret_cast<const Bf16s<N> *>(raw + tap * WIDTH);
            const auto w = *reinterpret_cast<const Floats<N> *>(filters + tap * CHANNELS);
#pragma unroll
            for (int i = 0; i < N; i++) sums.value[i] = fmaf(w.value[i], __bfloat162float(x.value[i]), sums.value[i]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) sums.value[i] = silu(sums.value[i]);
        return sums;
    }

    // A warp makes the query and the key of a row.
    __device__ void query_and_key(int row) const {
        constexpr int N = Keys / 32;
        Floats<N> q = convolve<N>(row, N * lane), k = convolve<N>(row, Keys + N * lane);
        if (!whole_key(N * lane)) q = k = {};
        float sums[3] = {};  // q.q, k.k, q.k
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[0] = fmaf(q.value[i], q.value[i], sums[0]);
            sums[1] = fmaf(k.value[i], k.value[i], sums[1]);
            sums[2] = fmaf(q.value[i], k.value[i], sums[2]);
        }
        sum_over_lanes<32>(sums);
        const float q_scale = rsqrtf(sums[0] + 1e-6f) * rsqrtf(static_cast<float>(Usual ? Keys : call.key_dim));
        const float k_scale = rsqrtf(sums[1] + 1e-6f);
#pragma unroll
        for (int i = 0; i < N; i++) q.value[i] *= q_scale, k.value[i] *= k_scale;
        *reinterpret_cast<Floats<N> *>(shared.queries + row * Keys + N * lane) = q;
        *reinterpret_cast<Floats<N> *>(shared.keys + row * Keys + N * lane) = k;
        if (lane == 0) shared.scalars[row].z = sums[2] * q_scale * k_scale;
    }

    // Queries, keys, values and gates of a chunk. Few rows find a warp each for their queries and keys, another for their values
    // and another for their gates.
    __device__ void prepare(int rows) const {
#pragma unroll 1
        for (int row = warp; row < rows; row += WARPS) query_and_key(row);
#pragma unroll 1
        for (int row = WARPS - 1 - warp; row < rows; row += WARPS) {
            constexpr int N = Columns / 32;
            *reinterpret_cast<Floats<N> *>(shared.values + row * Columns + N * lane) = convolve<N>(row, 2 * Keys + N * lane);
        }
        const int row = static_cast<int>(threadIdx.x) - THREADS / 2;
        if (row >= 0 && row < rows) {
            const float x = a + dt_bias;
            shared.scalars[row].x = expf(rate * (x > 20.0f ? x : log1pf(expf(x))));
            shared.scalars[row].y = sigmoid(b);
        }
    }

    __device__ static void load_part(float (&part)[4], const float4 *row, int index) {
        const float4 values = row[index * LANES];
        part[0] = values.x, part[1] = values.y, part[2] = values.z, part[3] = values.w;
    }

    // Rows in order through the state; with `keep` the state after each goes to its slot. A row's query and key are loaded while
    // the one before is under way.
    __device__ void pass(int rows) {
        const int group_lane = lane % LANES, owned = group_lane / TOTAL_LANES;
        const float4 *queries = reinterpret_cast<const float4 *>(shared.queries) + group_lane;
        const float4 *keys = reinterpret_cast<const float4 *>(shared.keys) + group_lane;
        const float *values = shared.values + column(0);
        float *out = shared.out + column(owned), query[PARTS][4], key[PARTS][4];
        float *slot = matrix;
#pragma unroll
        for (int part = 0; part < PARTS; part++) load_part(query[part], queries, part), load_part(key[part], keys, part);

#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            const float4 scalars = shared.scalars[row];
            const float decay = scalars.x, beta = scalars.y, product = scalars.z;
            // k^T S of each column in two sums, which do not wait for each other, and q^T S.
            float recalled[LANE_COLUMNS], halves[LANE_COLUMNS][2] = {}, answers[LANE_COLUMNS] = {};
            float value[LANE_COLUMNS], correction[LANE_COLUMNS];
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) value[i] = values[i * (32 / LANES)];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        halves[i][r % 2] = fmaf(key[part][r], state[i][part][r], halves[i][r % 2]);
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) recalled[i] = halves[i][0] + halves[i][1];
            sum_over_lanes<LANES>(recalled);
            // After the last row it is loaded again.
            const int ahead = row + 1 < rows ? Keys / 4 : 0;
            queries += ahead, keys += ahead, values += Columns;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        answers[i] = fmaf(query[part][r], state[i][part][r], answers[i]);
                load_part(query[part], queries, part);
            }
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) correction[i] = beta * fmaf(-decay, recalled[i], value[i]);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        state[i][part][r] = fmaf(decay, state[i][part][r], key[part][r] * correction[i]);
                load_part(key[part], keys, part);
            }
            // q^T S after the correction is decay * q^T S + (q.k) * correction of the S before, so that nothing waits for it.
            const float answer = scatter_sums<LANES>(answers), mine = owned == 0 ? correction[0] : correction[1];
            if (lane % TOTAL_LANES == 0) *out = fmaf(product, mine, decay * answer);
            out += Columns;
            if (call.keep) {
                store_state(slot);
                slot += static_cast<int64_t>(call.heads) * call.value_dim * call.key_dim;
            }
        }
        __syncwarp();
    }

    // The sum of the squares of a warp's columns of each row, to every block of the head.
    __device__ void share_squares(int rows, int side) const {
        const int place = lane % WARP_COLUMNS;
#pragma unroll 1
        for (int row = lane / WARP_COLUMNS; row - lane / WARP_COLUMNS < rows; row += 32 / WARP_COLUMNS) {
            const float o = row < rows && has_column ? shared.out[row * Columns + warp * WARP_COLUMNS + place] : 0.0f;
            float sums[1] = {o * o};
            sum_over_lanes<WARP_COLUMNS>(sums);
            if (row < rows && place < slices)
                store_to_rank_async(shared.squares + (side * capacity + row) * PARTIALS + slice * WARPS + warp,
                                    shared.barriers + side, rank - slice + place, sums[0]);
        }
    }

    // A warp finishes its own columns.
    __device__ void finish(int64_t begin, int rows, int side) const {
        const int place = lane % WARP_COLUMNS;
        if (!has_column) return;
#pragma unroll 1
        for (int row = lane / WARP_COLUMNS; row < rows; row += 32 / WARP_COLUMNS) {
            const float *squares = shared.squares + (side * capacity + row) * PARTIALS;
            float4 sum = {};
#pragma unroll 2
            for (int i = 0; i < slices * WARPS; i += 4) {
                const float4 s = *reinterpret_cast<const float4 *>(squares + i);
                sum = {sum.x + s.x, sum.y + s.y, sum.z + s.z, sum.w + s.w};
            }
            const float mean = __fdividef((sum.x + sum.y) + (sum.z + sum.w), static_cast<float>(call.value_dim));
            const float inverse = rsqrtf(mean + call.eps);
            const float o = shared.out[row * Columns + warp * WARP_COLUMNS + place];
            const float z = __bfloat162float(shared.raw[(before + row) * WIDTH + CHANNELS + warp * WARP_COLUMNS + place]);
            out[(begin + row) * call.heads * call.value_dim] = __float2bfloat16_rn(o * inverse * scale * silu(z));
        }
    }

    // The rows before the one after `row` of the last chunk, into a slot. The blocks of a cluster share queries and keys out.
    __device__ void store_rows(int row, int64_t slot) const {
        const int vector = threadIdx.x % COPIERS;
        if (!copies || is_z || (vector < 2 * Keys / VECTOR && vector % ranks != rank)) return;
        __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(call.conv_state) + slot * before * channels + channel(vector * VECTOR);
        const __nv_bfloat16 *from = shared.raw + (row + 1) * WIDTH + vector * VECTOR;
#pragma unroll 1
        for (int i = threadIdx.x / COPIERS; i < before; i += STEP)
            *reinterpret_cast<uint4 *>(to + i * channels) = *reinterpret_cast<const uint4 *>(from + i * WIDTH);
    }
};

template <int Keys, int Columns, bool Usual>
__global__ void __launch_bounds__(Block<Keys, Columns, Usual>::THREADS, 1)
    gated_delta(const __grid_constant__ Call call, const int capacity) {
#if HAS_CLUSTERS && HAS_DEPENDENT_LAUNCH
    extern __shared__ __align__(16) char memory[];
    let_next_start();
    Block<Keys, Columns, Usual> block(call, memory, capacity);
    block.begin();
    cluster_arrive_relaxed();
    const auto start = [&] { return call.from ? *reinterpret_cast<const volatile int32_t *>(call.from) : 0; };
    const int64_t likely = start();
    block.prefetch_state(likely >= 0 && likely < call.slots ? likely : 0);
    float *const slots = block.matrix;
    wait_for_previous();
    bool known = true;
    if (call.from) {
        const int64_t slot = start();
        known = slot >= 0 && slot < call.slots;
        block.start_from(known ? slot : 0);
    }
    block.load_state();
    if (!known) block.state[0][0][0] = block.state[1][0][0] = NAN;
    block.matrix = slots;

    int chunk = 0;
#pragma unroll 1
    for (int64_t begin = 0; begin < call.rows; begin += capacity, chunk++) {
        const int rows = static_cast<int>(min(call.rows - begin, static_cast<int64_t>(capacity)));
        const int side = chunk % 2;
        const bool last = begin + rows == call.rows;
        block.copy_rows(begin, rows);
        if (threadIdx.x == 0)
            mbarrier_arrive_expecting(block.shared.barriers + side, rows * block.slices * block.WARPS * sizeof(float));
        wait_for_copies();
        __syncthreads();
        // The first time all blocks of the cluster run, and have barriers; and this one has read the convolution's state.
        if (begin == 0) cluster_wait(), cluster_arrive_relaxed();
        block.prepare(rows);
        __syncthreads();
        block.pass(rows);
        block.share_squares(rows, side);
        if (last) {
            cluster_wait();
            for (int row = call.keep ? 0 : rows - 1; row < rows; row++) block.store_rows(row, call.keep ? row : 0);
            if (!call.keep) block.store_state(slots);
        }
        mbarrier_wait(block.shared.barriers + side, chunk / 2 % 2);
        block.finish(begin, rows, side);
        if (!last) __syncthreads();
    }
#endif
}

}  // namespace
}  // namespace gated_delta
