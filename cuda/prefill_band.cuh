// The prefill band of a linear projection: many rows, weights decoded to BF16 on their way into the tensor cores (sm_90a).
// One form for all weight formats that become BF16 in registers, over the same packed weights as the decode band.
//
// Weights stand on the row side of the products and stay in registers from their codes to the MMA; tokens stand on the column
// side and come through shared memory. A block multiplies 128 features with up to 256 tokens: two warpgroups of 64 features
// each and a third keeps copies under way. A cluster of two blocks shares its tokens, each block fetching half for both.
// Blocks stay, one a multiprocessor, and take tiles in turn; the tiles that would leave the last turn half empty are cut along
// the tokens. With few tokens there are too few tiles for that: then clusters are larger, each pair of blocks takes a slice of
// K, and the pairs add their sums in order. Which it is depends on the shape and the device alone, so results repeat bit for bit.
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
constexpr int RANKS = 2;                      // blocks that share tokens
constexpr int UNIT = 64;                      // tokens of a unit of the activations
constexpr int UNIT_BYTES = UNIT * TILE_K * 2;
constexpr int UNITS = 4;                      // of a whole tile
constexpr int MAX_SLICES = 4;
constexpr int STAGES = 6;
// Registers of a thread. A multiprocessor has 504 for the three in the same place of their warpgroups.
constexpr int FETCH_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
// How many stages the second warpgroup starts behind the first. While one writes its results the other has that many stages
// left for the tensor cores.
constexpr int LAG = 2;
constexpr int GROUP_TILES = 8;                // token tiles that pass over the weights together

// A block's sums of a unit of tokens.
using Sums = float4[UNIT * 2 / 16][128];

// Shared memory of a block. Between slices sums take the place of the stages.
struct Shared {
    union {
        unsigned char stages[STAGES][UNITS * UNIT_BYTES];
        Sums partial[STAGES][WARPGROUPS];
    };
    __nv_bfloat16 results[WARPGROUPS][UNIT * WARPGROUP_FEATURES];
    uint64_t full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared::partial) == sizeof(Shared::stages), "a unit's sums for each stage");

// What is multiplied, and in which order. The items are tiles of 256 features by `width` units of tokens; memory bounds them far
// below 2^31.
struct Schedule {
    int64_t M, N, K;
    int units, token_tiles, feature_tiles, tiles_k;
    int width;         // 1, 2 or 4
    int items, whole;  // of all items, the first `whole` are not cut
    int pieces;        // into which each of the others is cut along the tokens
    int turns;         // of all clusters together
    int slices;        // into which K is cut; where it is, a cluster has one turn
};

// What a cluster multiplies in one turn.
struct Work {
    int feature_tile, unit;
    int units;  // 0 or less where a piece lies past the last token
};

__device__ __forceinline__ Work work_of(const Schedule &schedule, int turn) {
    int item = turn, piece = 0, units = schedule.width;
    if (turn >= schedule.whole) {
        item = schedule.whole + (turn - schedule.whole) / schedule.pieces;
        piece = (turn - schedule.whole) % schedule.pieces;
        units /= schedule.pieces;
    }
    // Neighbours share weights: they are of one feature tile and a group of token tiles, which stays in the L2.
    const int of_group = GROUP_TILES * schedule.feature_tiles, group = item / of_group, in_group = item % of_group;
    const int width = min(schedule.token_tiles - group * GROUP_TILES, GROUP_TILES);
    const int unit = (group * GROUP_TILES + in_group % width) * schedule.width + piece * units;
    return {in_group / width, unit, min(schedule.units - unit, units)};
}

// A block's slice of K: tiles `begin` to `end`.
struct Part {
    int slice, slices, begin, end;
    // The rank in the cluster of the first of the blocks that share the tokens.
    __device__ int first_rank() const { return slice * RANKS; }
};

template <bool Sliced>
__device__ __forceinline__ Part part_of(const Schedule &schedule) {
    if (!Sliced) return {0, 1, 0, schedule.tiles_k};
    const int slices = schedule.slices, slice = blockIdx.x / RANKS % slices;
    return {slice, slices, schedule.tiles_k * slice / slices, schedule.tiles_k * (slice + 1) / slices};
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

// Fetches this block's half of each unit, for both blocks that share it.
__device__ __forceinline__ void fetch(Shared &shared, const Schedule &schedule, const Part &part,
                                      const unsigned char *activations, int rank) {
    constexpr int HALF = UNIT_BYTES / RANKS;
    const uint16_t ranks = ((1 << RANKS) - 1) << part.first_rank();
    const int64_t unit_stride = static_cast<int64_t>(schedule.tiles_k) * UNIT_BYTES;
    const int block = RANKS * part.slices;
    Place place;
    for (int turn = blockIdx.x / block; turn < schedule.turns; turn += gridDim.x / block) {
        const Work work = work_of(schedule, turn);
        const unsigned char *from = activations + work.unit * unit_stride + part.begin * UNIT_BYTES + rank * HALF;
        for (int k = part.begin; work.units > 0 && k < part.end; k++, from += UNIT_BYTES, place.advance()) {
            uint64_t *full = &shared.full[place.stage];
            mbarrier_wait(&shared.empty[place.stage], place.parity ^ 1);
            mbarrier_arrive_expecting(full, work.units * UNIT_BYTES);
            for (int unit = 0; unit < work.units; unit++)
                bulk_copy_multicast(shared.stages[place.stage] + unit * UNIT_BYTES + rank * HALF, from + unit * unit_stride,
                                    HALF, full, ranks);
        }
    }
}

// The sums of a warp's 16 features with `Units` units of tokens over the part's k. `first_tile` is its first of weights.
template <int Units, typename Format>
__device__ __forceinline__ void accumulate(float (&sum)[Units * UNIT / 2], Shared &shared, const Format &format,
                                           int64_t first_tile, const Part &part, Place &place, int lane) {
    static_assert(Format::TILE_K == TILE_K, "one tile of weights a stage");
    // Weights are loaded two and three tiles ahead, and decoded one ahead, while the products of the tile before run.
    constexpr int AHEAD = 2;
#pragma unroll
    for (float &value : sum) value = 0.0f;

    const int tiles = part.end - part.begin;
    const auto load = [&](int k) { return format.load(first_tile + min(k, tiles - 1), lane); };
    typename Format::Weights w[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) w[i] = load(i);
    uint32_t a[2][4][4];
    format.fragments(w[0], a[0]);
    w[0] = load(AHEAD);

    int before = 0;  // the stage of the tile before
    int k = 0;
    do {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int next = (i + 1) % AHEAD;
            mbarrier_wait(&shared.full[place.stage], place.parity);
            const uint64_t tokens = wgmma_descriptor(shared.stages[place.stage]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) wgmma(sum, a[i % 2][step], tokens + 2 * step);
            wgmma_commit();
            wgmma_wait<1>();
            if (k > 0 && lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], part.first_rank() + lane);
            before = place.stage;
            place.advance();
            hold(w[next]);
            format.fragments(w[next], a[1 - i % 2]);
            w[next] = load(k + 1 + AHEAD);
            if (++k == tiles) break;
        }
    } while (k < tiles);
    wgmma_wait<0>();
    if (lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], part.first_rank() + lane);
}

// Writes to where `local` would be in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ void store_quad_to_rank(float4 *local, int rank, float a, float b, float c, float d) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5}; }" ::"r"(shared_address(local)),
        "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d)
        : "memory");
}

// Adds the sums of all slices, each unit's in the slice that will write it: to its own the others', in their order. They meet in
// `partial` of the block's shared memory.
template <int Units, typename Memory>
__device__ __forceinline__ void add_slices(float (&sum)[Units * UNIT / 2], Memory &shared, const Part &part, int rank,
                                           int warpgroup, int thread) {
    constexpr int QUADS = UNIT / 2 / 4;
    const auto place = [&](int unit, int slice) -> Sums & {
        return shared.partial[unit / part.slices * (part.slices - 1) + slice][warpgroup];
    };
    cluster_sync();  // all stages have been read
#pragma unroll
    for (int unit = 0; unit < Units; unit++) {
        const int owner = unit % part.slices;
        if (owner == part.slice) continue;
        Sums &sums = place(unit, part.slice - (part.slice > owner));
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const float *quad = sum + (unit * QUADS + i) * 4;
            store_quad_to_rank(&sums[i][thread], owner * RANKS + rank, quad[0], quad[1], quad[2], quad[3]);
        }
    }
    cluster_sync();
#pragma unroll
    for (int unit = 0; unit < Units; unit++) {
        if (unit % part.slices != part.slice) continue;
        for (int other = 0; other < part.slices - 1; other++) {
            const Sums &sums = place(unit, other);
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 quad = sums[i][thread];
                float *own = sum + (unit * QUADS + i) * 4;
                own[0] = __fadd_rn(own[0], quad.x), own[1] = __fadd_rn(own[1], quad.y);
                own[2] = __fadd_rn(own[2], quad.z), own[3] = __fadd_rn(own[3], quad.w);
            }
        }
    }
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

// Finishes the sums of a warpgroup's features from `first` on, those of the units that this slice writes, and writes them to y:
// unit by unit through shared memory, where they become rows of features. Chunk c of 8 features of token m is in place c ^ (m % 8).
template <int Units, typename Format, typename Out>
__device__ __forceinline__ void store(const float (&sum)[Units * UNIT / 2], __nv_bfloat16 *results, const Format &format,
                                      const Schedule &schedule, const Part &part, int64_t first, const Work &work, int warpgroup,
                                      int thread, Out *y) {
    constexpr int CHUNKS = WARPGROUP_FEATURES / 8;
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int64_t last = schedule.N - 1, feature = first + warp * GROUP + g;
    const typename Format::Column upper = format.column(min(feature, last)), lower = format.column(min(feature + 8, last));
#pragma unroll
    for (int unit = 0; unit < Units; unit++) {
        if (unit >= work.units) break;
        if (unit % part.slices != part.slice) continue;
        const int64_t token = static_cast<int64_t>(work.unit + unit) * UNIT;
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

// activations: as above; y: [M, N]. Clusters of RANKS blocks, or of RANKS * slices.
template <typename Format, typename Out, bool Sliced>
__global__ void __launch_bounds__(THREADS, 1)
    project(const __grid_constant__ Format format, const __grid_constant__ Schedule schedule,
            const unsigned char *__restrict__ activations, Out *__restrict__ y) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const Part part = part_of<Sliced>(schedule);
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
        if (thread == 0) fetch(shared, schedule, part, activations, rank);
        __syncwarp();
        if (Sliced) {  // as `add_slices`
            cluster_sync();
            cluster_sync();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
        const int64_t last_group = (schedule.N - 1) / GROUP;
        // Where there are whole tiles, every cluster's first is one.
        if (warpgroup == 1 && schedule.whole > 0 && part.end - part.begin > LAG) mbarrier_wait(&shared.full[LAG], 0);
        const int block = RANKS * part.slices;
        Place place;
        for (int turn = blockIdx.x / block; turn < schedule.turns; turn += gridDim.x / block) {
            const Work work = work_of(schedule, turn);
            if (work.units <= 0) continue;
            const int64_t first =
                static_cast<int64_t>(work.feature_tile * RANKS + rank) * FEATURES + warpgroup * WARPGROUP_FEATURES;
            // Past the last group its weights are read again, and their sums left out.
            const int64_t first_tile = min(first / GROUP + thread / 32, last_group) * schedule.tiles_k + part.begin;
            const auto take = [&](auto units) {
                constexpr int Units = decltype(units)::value;
                float sum[Units * UNIT / 2];
                accumulate<Units>(sum, shared, format, first_tile, part, place, lane);
                if (Sliced) add_slices<Units>(sum, shared, part, rank, warpgroup, thread);
                store<Units>(sum, shared.results[warpgroup], format, schedule, part, first, work, warpgroup, thread, y);
            };
            if (work.units > 2)
                take(std::integral_constant<int, 4>());
            else if (work.units == 2)
                take(std::integral_constant<int, 2>());
            else
                take(std::integral_constant<int, 1>());
        }
    }
    // A block stays until the others' arrivals at its barriers are over.
    cluster_sync();
#endif
}

// The bytes of the activations' image.
__host__ __device__ inline int64_t image_bytes(int64_t m, int64_t k) {
    return (m + UNIT - 1) / UNIT * ((k + TILE_K - 1) / TILE_K) * UNIT_BYTES;
}

// An order of work for so many pairs of blocks at a time, and about the time that it takes, in 32nds of what a tile 4 units wide
// takes for 64 k.
struct Plan {
    Schedule schedule;
    int64_t time;
};

inline Plan plan(int64_t m, int64_t n, int64_t k, int pairs, int width, int pieces, int slices) {
    const auto parts = [](int64_t whole, int64_t part) { return static_cast<int>((whole + part - 1) / part); };
    Schedule order = {m, n, k, parts(m, UNIT), parts(m, UNIT * width), parts(n, FEATURES * RANKS), parts(k, TILE_K), width};
    order.items = order.token_tiles * order.feature_tiles;
    order.whole = slices > 1 ? order.items : order.items / pairs * pairs;
    order.pieces = pieces;
    order.turns = order.whole + (order.items - order.whole) * pieces;
    order.slices = slices;
    // As measured: narrow products wait for weights to be decoded, and results take as long as some tiles of K.
    const auto of_width = [](int64_t units) { return units == 4 ? 32 : units == 2 ? 23 : 19; };
    const int64_t deep = parts(order.tiles_k, slices) + (slices > 1 ? 13 : 3);
    const int64_t turns = slices > 1 ? 1 : order.whole / pairs;
    const int64_t rest = parts((order.items - order.whole) * pieces, pairs);
    return {order, deep * (turns * of_width(width) + rest * of_width(width / pieces))};
}

// The plan that takes least time. K is sliced where all slices run at once; clusters of 6 blocks leave too many multiprocessors
// of a GPC idle.
inline Schedule schedule(int64_t m, int64_t n, int64_t k, int pairs) {
    Plan best = plan(m, n, k, pairs, UNITS, 1, 1);
    const auto consider = [&](const Plan &other) {
        if (other.time < best.time) best = other;
    };
    for (int width = UNITS; width >= 1; width /= 2) {
        for (int pieces = 1; pieces <= width; pieces *= 2) consider(plan(m, n, k, pairs, width, pieces, 1));
        for (int slices = 2; slices <= MAX_SLICES; slices *= 2) {
            const Plan sliced = plan(m, n, k, pairs, width, 1, slices);
            if (sliced.schedule.items * slices <= pairs && slices <= sliced.schedule.tiles_k) consider(sliced);
        }
    }
    return best.schedule;
}

// Whether a call is one that the kernel takes.
inline bool takes(int64_t m, int64_t n, int64_t k) { return m >= 1 && n >= 1 && k >= 1; }

// Queues the products in the order of a schedule for so many pairs.
template <typename Format, typename Out>
cudaError_t launch(const Format &format, const void *activations, Out *y, const Schedule &order, int pairs,
                   cudaStream_t stream) {
    const auto function = order.slices > 1 ? project<Format, Out, true> : project<Format, Out, false>;
    const int clusters = order.slices > 1 ? order.turns : std::min(order.turns, pairs);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(RANKS * order.slices);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(clusters) * cluster.val.clusterDim.x);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, function, format, order, static_cast<const unsigned char *>(activations), y);
}

// `activations` has `image_bytes` bytes and is aligned to 16. `multiprocessors` is how many the device has.
template <typename Format, typename Out>
cudaError_t launch(const Format &format, const void *activations, Out *y, int64_t m, int64_t n, int64_t k, int multiprocessors,
                   cudaStream_t stream) {
    const int pairs = std::max(multiprocessors / RANKS, 1);
    return launch(format, activations, y, schedule(m, n, k, pairs), pairs, stream);
}

// Loads the kernels into the current context and gives them their shared memory: once, before `launch`.
template <typename Format, typename Out>
cudaError_t prepare() {
    for (auto function : {project<Format, Out, false>, project<Format, Out, true>}) {
        const cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace prefill_band
