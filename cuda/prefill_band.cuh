// The prefill band of a linear projection: many rows, weights decoded to BF16 on their way into the tensor cores (sm_90a).
// One form for all weight formats that become BF16 in registers, over the same packed weights as the decode band.
//
// Weights stand on the row side of the products and stay in registers from their codes to the MMA; tokens stand on the column
// side and come through shared memory. A block multiplies 128 features with up to 256 tokens: two warpgroups of 64 features
// each and a third keeps copies under way. A cluster of two blocks shares its tokens, each block fetching half for both.
// Blocks stay, one a multiprocessor, and take tiles in turn; the tiles that would leave the last turn half empty are cut along
// the tokens. Each sum runs over k in order, so results repeat bit for bit.
//
// Activations come as an image of shared memory, so that plain copies bring them: [ceil(M / 64), ceil(K / 64)] units of 64
// tokens by 64 k, 8 KiB each, placed as `wgmma_descriptor` says. Column 16s + 8h + 2t + e of a unit is k = 16t + 4s + 2h + e of its
// 64: with that order lane 4g + t meets, over the four steps s, the 16 consecutive k that it holds of each weight row.
//
// A `Format` is passed to the kernel by value and has
//   TILE_K = 64                k of one weight fragment of a lane
//   Weights                    that fragment, in registers
//   load(tile, lane)           the fragment of a lane in a tile of 16 rows by 64 k; tiles of a row group lie one after another
//   fragments(w, a)            BF16 pairs a[s][4] of step s: k = 4s and 4s + 1 of the lane's 16 of row g, the same of row g + 8,
//                              then 4s + 2 and 4s + 3 of both
//   Row, row(m)                what `finish` needs of a token; asked for tokens up to the next multiple of 64
//   Column, column(n)          what `finish` needs of a feature
//   finish(total, row, column) what becomes of a sum
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <cuda_runtime.h>

#include "cluster.cuh"
#include "mbarrier.cuh"
#include "rows.cuh"
#include "wgmma.cuh"

namespace prefill_band {

constexpr int GROUP = 16, TILE_K = 64;        // features and k of a tile of packed weights
constexpr int WARPGROUPS = 2;                 // that multiply
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr int WARPGROUP_FEATURES = 4 * GROUP;
constexpr int FEATURES = WARPGROUPS * WARPGROUP_FEATURES;
constexpr int RANKS = 2;                      // blocks of a cluster
constexpr int UNIT = 64;                      // tokens of a unit of the activations
constexpr int UNIT_BYTES = UNIT * TILE_K * 2;
constexpr int UNITS = 4;                      // of a whole tile
constexpr int STAGES = 6;
// Registers of a thread. A multiprocessor has 504 for the three in the same place of their warpgroups.
constexpr int FETCH_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
// How many stages the second warpgroup starts behind the first. While one writes its results the other has that many stages
// left, so the tensor cores do not wait.
constexpr int LAG = 2;
constexpr int GROUP_TILES = 8;                // token tiles that pass over the weights together

// Shared memory of a block.
struct Shared {
    unsigned char stages[STAGES][UNITS * UNIT_BYTES];
    __nv_bfloat16 results[WARPGROUPS][UNIT * WARPGROUP_FEATURES];
    uint64_t full[STAGES], empty[STAGES];
};

// What is multiplied, and in which order. The items are tiles of 256 features by 256 tokens; memory bounds them far below 2^31.
struct Schedule {
    int64_t M, N, K;
    int units, token_tiles, feature_tiles, tiles_k;
    int items, whole;  // of all items, the first `whole` are not cut
    int pieces;        // into which each of the others is cut
    int turns;
};

// What a cluster multiplies in one turn.
struct Work {
    int feature_tile, unit;
    int units;  // 0 or less where a piece lies past the last token
};

__device__ __forceinline__ Work work_of(const Schedule &schedule, int turn) {
    int item = turn, piece = 0, units = UNITS;
    if (turn >= schedule.whole) {
        item = schedule.whole + (turn - schedule.whole) / schedule.pieces;
        piece = (turn - schedule.whole) % schedule.pieces;
        units /= schedule.pieces;
    }
    // Neighbours share weights: they are of one feature tile and a group of token tiles, which stays in the L2.
    const int of_group = GROUP_TILES * schedule.feature_tiles, group = item / of_group, in_group = item % of_group;
    const int width = min(schedule.token_tiles - group * GROUP_TILES, GROUP_TILES);
    const int unit = (group * GROUP_TILES + in_group % width) * UNITS + piece * units;
    return {in_group / width, unit, min(schedule.units - unit, units)};
}

// A place in the ring of stages.
struct Place {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#if HAS_WGMMA

// Keeps what is made of `weights` from being computed earlier than here.
template <typename Weights>
__device__ __forceinline__ void hold(Weights &weights) {
    static_assert(sizeof(Weights) % 4 == 0, "whole registers");
    uint32_t *words = reinterpret_cast<uint32_t *>(&weights);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Weights) / 4); i++) asm volatile("" : "+r"(words[i]));
}

// Fetches this block's half of each unit, for both blocks.
__device__ __forceinline__ void fetch(Shared &shared, const Schedule &schedule, const unsigned char *activations, int rank) {
    constexpr int HALF = UNIT_BYTES / RANKS;
    constexpr uint16_t ALL_RANKS = (1 << RANKS) - 1;
    const int tiles = schedule.tiles_k;
    const int64_t unit_stride = static_cast<int64_t>(tiles) * UNIT_BYTES;
    Place place;
    for (int turn = blockIdx.x / RANKS; turn < schedule.turns; turn += gridDim.x / RANKS) {
        const Work work = work_of(schedule, turn);
        const unsigned char *from = activations + work.unit * unit_stride + rank * HALF;
        for (int k = 0; work.units > 0 && k < tiles; k++, from += UNIT_BYTES, place.advance()) {
            uint64_t *full = &shared.full[place.stage];
            mbarrier_wait(&shared.empty[place.stage], place.parity ^ 1);
            mbarrier_arrive_expecting(full, work.units * UNIT_BYTES);
            for (int unit = 0; unit < work.units; unit++)
                bulk_copy_multicast(shared.stages[place.stage] + unit * UNIT_BYTES + rank * HALF,
                                    from + unit * unit_stride, HALF, full, ALL_RANKS);
        }
    }
}

// The sums of a warp's 16 features with `Units` units of tokens. `row_group` is the first of its tiles of weights.
template <int Units, typename Format>
__device__ __forceinline__ void accumulate(float (&sum)[Units * UNIT / 2], Shared &shared, const Format &format,
                                           int64_t row_group, int tiles, Place &place, int lane) {
    static_assert(Format::TILE_K == TILE_K, "one tile of weights a stage");
#pragma unroll
    for (float &value : sum) value = 0.0f;

    // Weights are loaded three tiles ahead and decoded one ahead, while the products of the tile before run.
    const auto load = [&](int k) { return format.load(row_group + min(k, tiles - 1), lane); };
    typename Format::Weights w[2] = {load(0), load(1)};
    uint32_t a[2][4][4];
    format.fragments(w[0], a[0]);
    w[0] = load(2);

    int before = 0;  // the stage of the tile before
    const auto multiply = [&](int k, uint32_t(&now)[4][4], uint32_t(&next)[4][4], typename Format::Weights &weights) {
        mbarrier_wait(&shared.full[place.stage], place.parity);
        const uint64_t tokens = wgmma_descriptor(shared.stages[place.stage]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++) wgmma(sum, now[step], tokens + 2 * step);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0 && lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], lane);
        before = place.stage;
        place.advance();
        hold(weights);
        format.fragments(weights, next);
        weights = load(k + 3);
    };
    for (int k = 0;;) {
        multiply(k, a[0], a[1], w[1]);
        if (++k == tiles) break;
        multiply(k, a[1], a[0], w[0]);
        if (++k == tiles) break;
    }
    wgmma_wait<0>();
    if (lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], lane);
}

// Four 8 x 8 matrices of BF16 in the layout of an MMA's result, transposed: lanes 8i to 8i + 7 say where the columns of
// matrix i go, 16 bytes each.
__device__ __forceinline__ void store_transposed(__nv_bfloat16 *column, const uint32_t (&matrix)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(column)),
                 "r"(matrix[0]), "r"(matrix[1]), "r"(matrix[2]), "r"(matrix[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t bf16x2(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Elements n to n + 7 of a row of N, as far as there are so many: 16 bytes at a time where every row starts on 16.
template <typename Out>
__device__ __forceinline__ void store_row8(Out *row, int64_t n, int64_t N, const Bf16x8 &values) {
    alignas(16) Out out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = from_bf16<Out>(values.value[i]);
    if (N % 8 == 0) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(out) / 16); i++)
            reinterpret_cast<uint4 *>(row + n)[i] = reinterpret_cast<const uint4 *>(out)[i];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (n + i < N) row[n + i] = out[i];
    }
}

// A barrier of the 128 threads of a warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("barrier.cta.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// Finishes the sums of a warpgroup's features from `first` on with `units` units of tokens and writes them to y: unit by unit
// through shared memory, where tokens by features become rows. Chunk c of 8 features of token m is in place c ^ (m % 8).
template <int Units, typename Format, typename Out>
__device__ __forceinline__ void store(const float (&sum)[Units * UNIT / 2], __nv_bfloat16 *results, const Format &format,
                                      const Schedule &schedule, int64_t first, int first_unit, int units, int warpgroup,
                                      int thread, Out *y) {
    constexpr int CHUNKS = WARPGROUP_FEATURES / 8;
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int64_t last = schedule.N - 1, feature = first + warp * GROUP + g;
    const typename Format::Column upper = format.column(min(feature, last)), lower = format.column(min(feature + 8, last));
#pragma unroll
    for (int unit = 0; unit < Units; unit++) {
        if (unit >= units) break;
        const int64_t token = static_cast<int64_t>(first_unit + unit) * UNIT;
#pragma unroll
        for (int pair = 0; pair < UNIT / 16; pair++) {  // of columns of 8 tokens
            uint32_t matrix[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = pair * 2 + half;
                const float *total = sum + (unit * UNIT / 8 + column) * 4;
                const typename Format::Row even = format.row(token + column * 8 + 2 * t);
                const typename Format::Row odd = format.row(token + column * 8 + 2 * t + 1);
                matrix[half * 2] = bf16x2(format.finish(total[0], even, upper), format.finish(total[1], odd, upper));
                matrix[half * 2 + 1] = bf16x2(format.finish(total[2], even, lower), format.finish(total[3], odd, lower));
            }
            const int m = (pair * 2 + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
            store_transposed(results + (m * CHUNKS + (chunk ^ m % 8)) * 8, matrix);
            // No load moves up past here: all at once they take more registers than the sums leave.
            if (pair % 2 == 1) __syncwarp();
        }
        warpgroup_sync(warpgroup);
#pragma unroll
        for (int i = thread; i < UNIT * CHUNKS; i += 128) {
            const int m = i / CHUNKS, chunk = i % CHUNKS;
            const int64_t n = first + chunk * 8;
            if (token + m < schedule.M && n < schedule.N)
                store_row8(y + (token + m) * schedule.N, n, schedule.N,
                           *reinterpret_cast<const Bf16x8 *>(results + (m * CHUNKS + (chunk ^ m % 8)) * 8));
        }
        warpgroup_sync(warpgroup);
    }
}

#endif

// activations: as above; y: [M, N].
template <typename Format, typename Out>
__global__ void __cluster_dims__(RANKS) __launch_bounds__(THREADS, 1)
    project(const __grid_constant__ Format format, const __grid_constant__ Schedule schedule,
            const unsigned char *__restrict__ activations, Out *__restrict__ y) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const int rank = blockIdx.x % RANKS;
    if (threadIdx.x < STAGES) {
        mbarrier_init(&shared.full[threadIdx.x], 1);
        mbarrier_init(&shared.empty[threadIdx.x], RANKS * WARPGROUPS * 4);
        mbarrier_init_fence();
    }
    cluster_sync();

    // The last warpgroup fetches, by one of its threads, and the others multiply, with the registers that it leaves.
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
        if (thread == 0) fetch(shared, schedule, activations, rank);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
        const int tiles = schedule.tiles_k;
        const int64_t last_group = (schedule.N - 1) / GROUP;
        // Where there are whole tiles, every cluster's first is one.
        if (warpgroup == 1 && schedule.whole > 0 && tiles > LAG) mbarrier_wait(&shared.full[LAG], 0);
        Place place;
        for (int turn = blockIdx.x / RANKS; turn < schedule.turns; turn += gridDim.x / RANKS) {
            const Work work = work_of(schedule, turn);
            if (work.units <= 0) continue;
            const int64_t first = static_cast<int64_t>(work.feature_tile * RANKS + rank) * FEATURES + warpgroup * WARPGROUP_FEATURES;
            // Past the last group its weights are read again, and their sums left out.
            const int64_t row_group = min(first / GROUP + thread / 32, last_group) * tiles;
            const auto turn_of = [&](auto units) {
                constexpr int Units = decltype(units)::value;
                float sum[Units * UNIT / 2];
                accumulate<Units>(sum, shared, format, row_group, tiles, place, lane);
                store<Units>(sum, shared.results[warpgroup], format, schedule, first, work.unit, work.units, warpgroup, thread,
                             y);
            };
            if (work.units > 2)
                turn_of(std::integral_constant<int, 4>());
            else if (work.units == 2)
                turn_of(std::integral_constant<int, 2>());
            else
                turn_of(std::integral_constant<int, 1>());
        }
    }
    // A block stays until the other's arrivals at its barriers are over.
    cluster_sync();
#endif
}

// The bytes of the activations' image.
inline int64_t image_bytes(int64_t m, int64_t k) {
    return (m + UNIT - 1) / UNIT * ((k + TILE_K - 1) / TILE_K) * UNIT_BYTES;
}

// The order of work for so many clusters at a time: whole turns first, then what is left in the pieces that take least time.
inline Schedule schedule(int64_t m, int64_t n, int64_t k, int clusters) {
    const auto parts = [](int64_t whole, int part) { return static_cast<int>((whole + part - 1) / part); };
    Schedule order = {m, n, k, parts(m, UNIT), parts(m, UNIT * UNITS), parts(n, FEATURES * RANKS), parts(k, TILE_K)};
    order.items = order.token_tiles * order.feature_tiles;
    order.whole = order.items / clusters * clusters;
    // The time of a piece as measured, in 32nds of a whole tile's: narrow products leave less time to decode weights.
    constexpr struct {
        int pieces, time;
    } CUTS[] = {{1, 32}, {2, 17}, {4, 11}};
    int least = INT32_MAX;
    for (const auto &cut : CUTS) {
        const int time = parts((order.items - order.whole) * cut.pieces, clusters) * cut.time;
        if (time < least) {
            least = time;
            order.pieces = cut.pieces;
        }
    }
    order.turns = order.whole + (order.items - order.whole) * order.pieces;
    return order;
}

// Whether a call is one that the kernel takes.
inline bool takes(int64_t m, int64_t n, int64_t k) { return m >= 1 && n >= 1 && k >= 1; }

// `activations` has `image_bytes` bytes and is aligned to 16. `multiprocessors` is how many the device has.
template <typename Format, typename Out>
cudaError_t launch(const Format &format, const void *activations, Out *y, int64_t m, int64_t n, int64_t k, int multiprocessors,
                   cudaStream_t stream) {
    const int most = std::max(multiprocessors / RANKS, 1);
    const Schedule order = schedule(m, n, k, most);
    const int clusters = std::min(order.turns, most);
    project<Format, Out><<<static_cast<unsigned>(clusters * RANKS), THREADS, sizeof(Shared), stream>>>(
        format, order, static_cast<const unsigned char *>(activations), y);
    return cudaGetLastError();
}

// Loads the kernel into the current context and gives it its shared memory: once, before `launch`.
template <typename Format, typename Out>
cudaError_t prepare() {
    return cudaFuncSetAttribute(project<Format, Out>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
}

}  // namespace prefill_band
