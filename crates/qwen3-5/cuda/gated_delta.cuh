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
// before the wait for the kernel before, and the usual shape has a kernel that checks no bounds. Its blocks are small enough for
// two on a multiprocessor: the next call's wait there while this one's run.
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
constexpr int USUAL_VALUES = 128, USUAL_TAPS = 4;

using Call = qwen3_5_gated_delta_call;

// To 2 ulp of e^-x and of the division, in four instructions: nothing is left of it where e^-x overflows.
__device__ __forceinline__ float sigmoid(float x) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// To 2 ulp, of what is no subnormal.
__device__ __forceinline__ float inverse_root(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

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

// Brings what lies there, in multiples of 16 bytes, into the L2 cache. It does no harm if a kernel still writes there.
__device__ __forceinline__ void prefetch(const void *address, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// The shared-memory address in the cluster's block `rank` of what is at `local` here.
__device__ __forceinline__ uint32_t address_at_rank(const void *local, int rank) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(rank));
    return remote;
}

// Writes to an address of any block of the cluster, and reports the 4 bytes to a barrier of that block.
__device__ __forceinline__ void store_async(uint32_t to, uint32_t barrier, float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(value), "r"(barrier)
                 : "memory");
}

template <int N>
struct alignas(N < 4 ? N * 4 : 16) Floats {
    float value[N];
};

template <int N>
struct alignas(N * 2) Bf16s {
    uint32_t pairs[N / 2];

    __device__ float operator[](int i) const { return __uint_as_float(i % 2 ? pairs[i / 2] & 0xffff0000 : pairs[i / 2] << 16); }
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

// What a block has of a row in shared memory.
template <int Keys, int Columns>
struct alignas(16) Row {
    float query[Keys], key[Keys];  // normalised, the query scaled
    float value[Columns], out[Columns];
    float decay, beta, product, unused;  // the product is q.k
    float squares[2][PARTIALS];          // of even and of odd chunks: sums that each warp of the head writes
};

// A block's shared memory, for chunks of up to `capacity` rows. A row of `raw` has the channels of the block's queries, keys and
// values side by side, then z; one of `filters` the same without z.
template <int Keys, int Columns>
struct Shared {
    static constexpr int CHANNELS = 2 * Keys + Columns, WIDTH = CHANNELS + Columns;

    uint64_t *barriers;        // [2]: of the squares of even and of odd chunks
    Row<Keys, Columns> *rows;  // [capacity]; `pass` loads a query and a key past the last, which are filters
    float *filters;            // [taps][CHANNELS]
    __nv_bfloat16 *raw;        // [taps - 1 + capacity][WIDTH]: the rows before the chunk, then its own

    static __host__ __device__ int64_t bytes(int taps, int capacity) {
        return 16 + capacity * static_cast<int64_t>(sizeof(Row<Keys, Columns>)) + taps * CHANNELS * 4ll +
               (taps - 1 + capacity) * static_cast<int64_t>(WIDTH) * 2;
    }

    __device__ Shared(char *memory, int taps, int capacity) {
        barriers = reinterpret_cast<uint64_t *>(memory);
        rows = reinterpret_cast<Row<Keys, Columns> *>(memory + 16);
        filters = reinterpret_cast<float *>(rows + capacity);
        raw = reinterpret_cast<__nv_bfloat16 *>(filters + taps * CHANNELS);
    }
};

// With `Usual`, key_dim is Keys, value_dim USUAL_VALUES, and there are USUAL_TAPS taps.
template <int Keys, int Columns, bool Usual>
struct Block {
    using Record = Row<Keys, Columns>;
    using Memory = Shared<Keys, Columns>;
    static constexpr int CHANNELS = Memory::CHANNELS, WIDTH = Memory::WIDTH, PARTS = Keys / LANES / 4;
    static constexpr int WARPS = Columns / WARP_COLUMNS, THREADS = WARPS * 32;
    // Threads that copy a row, 16 bytes each.
    static constexpr int COPIERS = WIDTH / VECTOR <= 32 ? 32 : WIDTH / VECTOR <= 64 ? 64 : 128, STEP = THREADS / COPIERS;

    const Call &call;
    const Memory shared;
    const int key_dim, value_dim, taps, before, warp, lane;
    int ranks, rank, slices, slice, key_head, head, first;  // `first` of the head's columns
    int channels, values;                                   // of a row, and of a row of z
    // Of this thread: its part of the state in slot 0, and in the slot that the call starts from; its 16 bytes of the chunk's row
    // 0, of the rows before row 0 of the call, and of what it copies first; the index of that, and the distance of rows there; the
    // gates of its row; the column and the scale that it finishes rows with; its 16 bytes of the convolution's state in slot 0.
    float *matrix;
    const float *start;
    const __nv_bfloat16 *source, *old, *next;
    int copied, stride;
    bool keeps, has_column;
    const __nv_bfloat16 *source_b, *source_a;
    __nv_bfloat16 b, a, *out, *kept;
    float rate, dt_bias, scale;
    float state[LANE_COLUMNS][PARTS][4];

    __device__ Block(const Call &call, char *memory, int capacity)
        : call(call), shared(memory, Usual ? USUAL_TAPS : call.taps, capacity), key_dim(Usual ? Keys : call.key_dim),
          value_dim(Usual ? USUAL_VALUES : call.value_dim), taps(Usual ? USUAL_TAPS : call.taps), before(taps - 1),
          warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
        asm("mov.u32 %0, %%clusterid.x;" : "=r"(key_head));
        slices = (value_dim + Columns - 1) / Columns;
        head = key_head * (ranks / slices) + rank / slices;
        slice = rank % slices, first = slice * Columns;
        values = call.heads * value_dim, channels = 2 * call.key_heads * key_dim + values;
    }

    __device__ bool whole_key(int k) const { return Usual || k < key_dim; }
    __device__ bool whole_value(int column) const { return Usual || first + column < value_dim; }
    __device__ int column(int i) const { return warp * WARP_COLUMNS + i * (32 / LANES) + lane / LANES; }
    __device__ bool is_busy() const { return warp == 0 || warp >= WARPS - 2; }  // with a single row
    __device__ int gated_row() const { return THREADS - 1 - static_cast<int>(threadIdx.x); }

    __device__ bool copies_old() const { return copied < before; }
    __device__ const __nv_bfloat16 *first_source() const { return source + static_cast<int64_t>(copied - before) * stride; }

    // What depends on no kernel before: this thread's addresses, and what is in no kernel's output.
    __device__ void begin() {
        if (threadIdx.x == 0) {
            mbarrier_init(shared.barriers, 1), mbarrier_init(shared.barriers + 1, 1);
            mbarrier_init_fence();
        }
        // The 16 bytes at `place` of a row in shared memory, in a row of channels or of z.
        const int place = threadIdx.x % COPIERS * VECTOR;
        const bool is_key = place < 2 * Keys, is_z = place >= CHANNELS;
        const int within = is_key ? place % Keys : first + (place - 2 * Keys) % Columns;
        const int ahead = is_key ? (place / Keys * call.key_heads + key_head) * key_dim
                                 : head * value_dim + (is_z ? 0 : 2 * call.key_heads * key_dim);
        const bool copies = place < WIDTH && within < (is_key ? key_dim : value_dim);
        if (copies && !is_z)
#pragma unroll 1
            for (int tap = threadIdx.x / COPIERS; tap < taps; tap += STEP)
#pragma unroll
                for (int i = 0; i < VECTOR; i += 4)
                    copy_async(shared.filters + tap * CHANNELS + place + i,
                               call.filters + static_cast<int64_t>(tap) * channels + ahead + within + i);
        source = static_cast<const __nv_bfloat16 *>(is_z ? call.z : call.mixed) + ahead + within;
        kept = static_cast<__nv_bfloat16 *>(call.conv_state) + ahead + within, old = kept;
        stride = is_z ? values : channels;
        copied = copies ? threadIdx.x / COPIERS + (is_z ? before : 0) : INT32_MAX;
        next = copies_old() ? old + static_cast<int64_t>(copied) * channels : first_source();
        // The blocks of a cluster share the queries and keys out.
        keeps = copies && !is_z && (!is_key || place * ranks / (2 * Keys) == rank);
        const int64_t first_column = static_cast<int64_t>(head) * value_dim + first;
        matrix = call.delta_state + (first_column + column(0)) * key_dim + lane % LANES * 4;
        source_b = static_cast<const __nv_bfloat16 *>(call.b) + static_cast<int64_t>(gated_row()) * call.heads + head;
        source_a = static_cast<const __nv_bfloat16 *>(call.a) + static_cast<int64_t>(gated_row()) * call.heads + head;
        rate = call.rate[head], dt_bias = call.dt_bias[head];
        const int mine = warp * WARP_COLUMNS + lane % WARP_COLUMNS;
        has_column = whole_value(mine), scale = has_column ? call.scale[first + mine] : 0.0f;
        out = static_cast<__nv_bfloat16 *>(call.out) + first_column + mine;
        settle(matrix), settle(source), settle(old), settle(source_b), settle(source_a), settle(out), settle(kept), settle(next);
        start = matrix;
    }

    // The state of a head is under way to the L2 cache before the kernel before is over. The slot may still change.
    __device__ void prefetch_state(int64_t slot) const {
        if (threadIdx.x == 0)
            prefetch(call.delta_state + ((slot * call.heads + head) * value_dim + first) * key_dim,
                     min(Columns, value_dim - first) * key_dim * static_cast<int>(sizeof(float)));
#pragma unroll 1
        for (int row = copied; row < before; row += STEP)
            prefetch_line(old + (slot * before + row) * channels);
        if (copied < INT32_MAX) prefetch_line(source);
    }

    // Moves what the call starts from to a slot. One that does not exist leaves nothing but NaN.
    __device__ void start_from(int64_t slot) {
        if (slot < 0 || slot >= call.slots) slot = 0, rate = NAN;
        start += slot * values * key_dim;
        old += slot * before * channels;
        if (copies_old()) next += slot * before * channels;
    }

    __device__ void load_state() {
        __syncwarp();  // no load moves up across it
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const float *address = start + i * (32 / LANES) * key_dim + part * 4 * LANES;
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
                float *address = to + i * (32 / LANES) * key_dim + part * 4 * LANES;
                const float(&s)[4] = state[i][part];
                if (whole_value(column(i)) && whole_key(part * 4 * LANES + lane % LANES * 4))
                    *reinterpret_cast<float4 *>(address) = {s[0], s[1], s[2], s[3]};
            }
    }

    // Starts to bring in what a chunk needs: its rows, those before them, z and gates. Those before row 0 are in the state.
    __device__ void copy_rows(bool is_first, int rows) {
        if (gated_row() < rows) b = *source_b, a = *source_a;
#pragma unroll 1
        for (int row = copied; row < before + rows;) {
            copy_async(shared.raw + row * WIDTH + threadIdx.x % COPIERS * VECTOR, next);
            row += STEP;
            next = is_first && row < before ? old + static_cast<int64_t>(row) * channels
                                            : source + static_cast<int64_t>(row - before) * stride;
        }
    }

    // Moves the addresses to the next chunk.
    __device__ void advance(int64_t rows) {
        source += rows * stride, out += rows * values, next = first_source();
        source_b += rows * call.heads, source_a += rows * call.heads;
    }

    // Decay and beta of a chunk, whose inputs come before the rows do.
    __device__ void gates(int rows) const {
        if (gated_row() >= rows) return;
        const float x = __bfloat162float(a) + dt_bias;
        Record &row = shared.rows[gated_row()];
        row.decay = expf(rate * (x > 20.0f ? x : log1pf(expf(x))));
        row.beta = sigmoid(__bfloat162float(b));
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
            for (int i = 0; i < N; i++) sums.value[i] = fmaf(w.value[i], x[i], sums.value[i]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) sums.value[i] = silu(sums.value[i]);
        return sums;
    }

    // A warp makes the query and the key of a row.
    __device__ void query_and_key(int index) const {
        constexpr int N = Keys / 32;
        Floats<N> q = convolve<N>(index, N * lane), k = convolve<N>(index, Keys + N * lane);
        if (!whole_key(N * lane)) q = k = {};
        float sums[3] = {};  // q.q, k.k, q.k
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[0] = fmaf(q.value[i], q.value[i], sums[0]);
            sums[1] = fmaf(k.value[i], k.value[i], sums[1]);
            sums[2] = fmaf(q.value[i], k.value[i], sums[2]);
        }
        sum_over_lanes<32>(sums);
        const float q_scale = inverse_root((sums[0] + 1e-6f) * static_cast<float>(key_dim));
        const float k_scale = inverse_root(sums[1] + 1e-6f);
#pragma unroll
        for (int i = 0; i < N; i++) q.value[i] *= q_scale, k.value[i] *= k_scale;
        Record &row = shared.rows[index];
        *reinterpret_cast<Floats<N> *>(row.query + N * lane) = q;
        *reinterpret_cast<Floats<N> *>(row.key + N * lane) = k;
        if (lane == 0) row.product = sums[2] * q_scale * k_scale;
    }

    // Queries, keys and values of a chunk. Few rows find a warp each for their queries and keys, and for their values; the last
    // warp has the gates first.
    __device__ void prepare(int rows) const {
#pragma unroll 1
        for (int row = warp; row < rows; row += WARPS) query_and_key(row);
#pragma unroll 1
        for (int row = (2 * WARPS - 2 - warp) % WARPS; row < rows; row += WARPS) {
            constexpr int N = Columns / 32;
            *reinterpret_cast<Floats<N> *>(shared.rows[row].value + N * lane) = convolve<N>(row, 2 * Keys + N * lane);
        }
    }

    __device__ static void load_part(float (&part)[4], const float *row, int index) {
        const float4 values = *reinterpret_cast<const float4 *>(row + index * 4 * LANES);
        part[0] = values.x, part[1] = values.y, part[2] = values.z, part[3] = values.w;
    }

    // Rows in order through the state; with `keep` the state after each goes to its slot. What leaves a row depends on the state
    // before it alone: o = q^T S after the correction is decay * q^T S + (q.k) * correction of the S before. So it is on its way,
    // with the sum of its squares to every block of the head, while the state is updated. The next row's query and key are loaded
    // meanwhile: after the last row what lies there, which nothing uses.
    __device__ void pass(int rows, int side) {
        const int group_lane = lane % LANES, owned = group_lane / TOTAL_LANES;
        Record *row = shared.rows;
        const int to = rank - slice + min(lane, slices - 1);
        uint32_t squares = address_at_rank(row->squares[side] + slice * WARPS + warp, to);
        const uint32_t barrier = address_at_rank(shared.barriers + side, to);
        float query[PARTS][4], key[PARTS][4];
        float *slot = matrix;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            load_part(key[part], row->key + group_lane * 4, part);
            load_part(query[part], row->query + group_lane * 4, part);
        }

#pragma unroll 1
        for (int left = rows; left > 0; left--) {
            const float decay = row->decay, beta = row->beta, product = row->product;
            // k^T S and q^T S of each column, each in two sums, which do not wait for each other.
            float recalls[LANE_COLUMNS][2] = {}, reads[LANE_COLUMNS][2] = {};
            float value[LANE_COLUMNS], recalled[LANE_COLUMNS], answers[LANE_COLUMNS], correction[LANE_COLUMNS];
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) value[i] = row->value[column(i)];
#pragma unroll
            for (int part = 0; part < PARTS; part++)
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        recalls[i][r % 2] = fmaf(key[part][r], state[i][part][r], recalls[i][r % 2]);
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) recalled[i] = recalls[i][0] + recalls[i][1];
            sum_over_lanes<LANES>(recalled);
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        reads[i][r % 2] = fmaf(query[part][r], state[i][part][r], reads[i][r % 2]);
                load_part(query[part], row[1].query + group_lane * 4, part);
            }
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) answers[i] = reads[i][0] + reads[i][1];
            const float answer = scatter_sums<LANES>(answers);
#pragma unroll
            for (int i = 0; i < LANE_COLUMNS; i++) correction[i] = beta * fmaf(-decay, recalled[i], value[i]);
            const float o = fmaf(product, owned == 0 ? correction[0] : correction[1], decay * answer);
            if (lane % TOTAL_LANES == 0) row->out[column(owned)] = o;
            // Lanes of the same total hold the same.
            float square = whole_value(column(owned)) ? o * o : 0.0f;
            constexpr int STEPS = 3;
            static_assert(16 >> (STEPS - 1) == TOTAL_LANES, "one lane of each total");
#pragma unroll
            for (int part = 0; part < PARTS || part < STEPS; part++) {
                if (part < STEPS) square += __shfl_xor_sync(0xffffffff, square, 16 >> part);
                if (part >= PARTS) continue;
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int i = 0; i < LANE_COLUMNS; i++)
                        state[i][part][r] = fmaf(decay, state[i][part][r], key[part][r] * correction[i]);
                load_part(key[part], row[1].key + group_lane * 4, part);
            }
            if (lane < slices) store_async(squares, barrier, square);
            squares += sizeof *row, row++;
            if (call.keep) {
                store_state(slot);
                slot += static_cast<int64_t>(values) * key_dim;
            }
        }
        __syncwarp();
    }

    // A warp finishes its own columns. All that does not depend on the squares comes before the wait for them.
    __device__ void finish(int rows, int side, uint32_t parity) const {
        const int mine = warp * WARP_COLUMNS + lane % WARP_COLUMNS;
        if (!has_column) return;
#pragma unroll 1
        for (int index = lane / WARP_COLUMNS; index < rows; index += 32 / WARP_COLUMNS) {
            const Record &row = shared.rows[index];
            const float z = __bfloat162float(shared.raw[(before + index) * WIDTH + CHANNELS + mine]);
            const float gated = row.out[mine] * scale * silu(z);
            mbarrier_wait(shared.barriers + side, parity);
            float4 sum = {};
#pragma unroll
            for (int i = 0; i < PARTIALS; i += 4) {
                if (i >= slices * WARPS) break;
                const float4 s = *reinterpret_cast<const float4 *>(row.squares[side] + i);
                sum = {sum.x + s.x, sum.y + s.y, sum.z + s.z, sum.w + s.w};
            }
            const float mean = __fdividef((sum.x + sum.y) + (sum.z + sum.w), static_cast<float>(value_dim));
            out[static_cast<int64_t>(index) * values] = __float2bfloat16_rn(gated * rsqrtf(mean + call.eps));
        }
    }

    // The rows before the one after `row` of the last chunk, into a slot.
    __device__ void store_rows(int row, int64_t slot) const {
        if (!keeps) return;
        const __nv_bfloat16 *from = shared.raw + (row + 1) * WIDTH + threadIdx.x % COPIERS * VECTOR;
#pragma unroll 1
        for (int i = threadIdx.x / COPIERS; i < before; i += STEP)
            *reinterpret_cast<uint4 *>(kept + (slot * before + i) * channels) =
                *reinterpret_cast<const uint4 *>(from + i * WIDTH);
    }
};

template <int Keys, int Columns, bool Usual>
__global__ void __launch_bounds__(Block<Keys, Columns, Usual>::THREADS, Usual ? 2 : 1)
    gated_delta(const __grid_constant__ Call call, const int capacity) {
#if HAS_CLUSTERS && HAS_DEPENDENT_LAUNCH
    extern __shared__ __align__(16) char memory[];
    Block<Keys, Columns, Usual> block(call, memory, capacity);
    block.begin();
    cluster_arrive_relaxed();
    const auto slot = [&] { return call.from ? *reinterpret_cast<const volatile int32_t *>(call.from) : 0; };
    const int64_t likely = slot();
    block.prefetch_state(likely >= 0 && likely < call.slots ? likely : 0);
    // All blocks of the cluster run, and have barriers.
    cluster_wait();
    wait_for_previous();
    if (call.from) block.start_from(slot());

    int64_t left = call.rows;
#pragma unroll 1
    for (int chunk = 0; left > 0; chunk++) {
        const int rows = static_cast<int>(min(left, static_cast<int64_t>(capacity)));
        left -= rows;
        const int side = chunk % 2;
        block.copy_rows(chunk == 0, rows);
        // Not earlier: blocks of the kernel after the next would crowd in too, two of one kernel on a multiprocessor.
        if (chunk == 0) let_next_start();
        if (threadIdx.x == 0)
            mbarrier_arrive_expecting(block.shared.barriers + side, rows * block.slices * block.WARPS * sizeof(float));
        wait_for_copies();
        __syncthreads();
        // The first time this block has read the convolution's state. The other state comes behind the rows, and behind what is to
        // be made of the first.
        if (chunk == 0) cluster_arrive_relaxed();
        if (chunk == 0 && !block.is_busy()) block.load_state();
        block.gates(rows);
        block.prepare(rows);
        if (chunk == 0 && block.is_busy()) block.load_state();
        __syncthreads();
        block.pass(rows, side);
        if (left == 0) {
            if (!call.keep) block.store_state(block.matrix);
            // All blocks of the cluster have read what this replaces.
            cluster_wait();
            for (int row = call.keep ? 0 : rows - 1; row < rows; row++) block.store_rows(row, call.keep ? row : 0);
        }
        block.finish(rows, side, chunk / 2 % 2);
        if (left == 0) break;
        block.advance(rows);
        __syncthreads();
    }
#endif
}

}  // namespace
}  // namespace gated_delta
