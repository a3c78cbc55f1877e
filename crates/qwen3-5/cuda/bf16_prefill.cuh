// BF16 weights times BF16 rows for prompts, by `wgmma` with both sides in shared memory (sm_90a), over the same packed weights as
// the decode band and without scratch memory.
//
// The order of work and the results are the prefill band's: a cluster of two blocks shares its tokens, each block has 128 features,
// two warpgroups multiply and a third keeps copies under way. Here the weights come by copies too, since they need no decoding,
// and tokens come from the caller's rows as they are: tensor maps swizzle them, and give zeros past M, N and K.
#pragma once

#include <cuda_runtime.h>

#include "bf16_weights.cuh"
#include "launch.cuh"
#include "prefill_band.cuh"
#include "tensor_map.cuh"

namespace bf16_prefill {
namespace {

using namespace prefill_band;

constexpr int TILES = TILE_K / bf16_weights::TILE_K;  // of weights along K in a stage
constexpr int GROUPS = FEATURES / GROUP;
constexpr int TILE_BYTES = bf16_weights::TILE_CHUNKS * 16;
constexpr int WEIGHT_BYTES = TILES * GROUPS * TILE_BYTES;
constexpr int BOX_TOKENS = UNIT / RANKS;  // that a block fetches of each unit
constexpr int RING_BYTES = 192 << 10, MAX_STAGES = RING_BYTES / (WEIGHT_BYTES + UNIT_BYTES);

// Shared memory of a block: a ring of stages, each weights [TILES][GROUPS] and then units of tokens. Between slices sums take their
// place.
struct Shared {
    union {
        unsigned char ring[RING_BYTES];
        Sums partial[MAX_SLICES - 1][WARPGROUPS];
    };
    __nv_bfloat16 results[WARPGROUPS][UNIT * WARPGROUP_FEATURES];
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
};

// A place in the ring. Fewer tokens a stage are more stages: the bytes under way stay about the same.
struct Place {
    int bytes, stages, stage = 0;
    uint32_t parity = 0;

    __device__ explicit Place(int width) : bytes(WEIGHT_BYTES + width * UNIT_BYTES), stages(RING_BYTES / bytes) {}
    __device__ unsigned char *weights(Shared &shared) const { return shared.ring + stage * bytes; }
    __device__ unsigned char *tokens(Shared &shared) const { return weights(shared) + WEIGHT_BYTES; }
    __device__ void advance() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Sums become results as they are.
struct Plain {
    struct Row {};
    struct Column {};
    __device__ Row row(int64_t) const { return {}; }
    __device__ Column column(int64_t) const { return {}; }
    __device__ float finish(float total, Row, Column) const { return total; }
};

struct Maps {
    CUtensorMap weights;  // words of a tile, groups of features, tiles along K
    CUtensorMap tokens;   // [M, K]
};

#if HAS_WGMMA

// Fetches this block's weights, and its half of each unit of tokens for both blocks that share it.
__device__ __forceinline__ void fetch(Shared &shared, const Schedule &schedule, const Part &part, const Maps &maps, int rank) {
    constexpr int HALF = UNIT_BYTES / RANKS;
    const uint16_t ranks = ((1 << RANKS) - 1) << part.first_rank();
    const int block = RANKS * part.slices;
    Place place(schedule.width);
    for (int turn = blockIdx.x / block; turn < schedule.turns; turn += gridDim.x / block) {
        const Work work = work_of(schedule, turn);
        const int group = (work.feature_tile * RANKS + rank) * GROUPS;
        for (int k = part.begin; work.units > 0 && k < part.end; k++, place.advance()) {
            uint64_t *full = &shared.full[place.stage];
            mbarrier_wait(&shared.empty[place.stage], place.parity ^ 1);
            mbarrier_arrive_expecting(full, WEIGHT_BYTES + work.units * UNIT_BYTES);
            tensor_copy(place.weights(shared), maps.weights, 0, group, k * TILES, full);
            for (int unit = 0; unit < work.units; unit++)
                tensor_copy_multicast(place.tokens(shared) + unit * UNIT_BYTES + rank * HALF, maps.tokens, k * TILE_K,
                                      (work.unit + unit) * UNIT + rank * BOX_TOKENS, full, ranks);
        }
    }
}

// The sums of a warpgroup's 64 features with `Units` units of tokens over the part's k.
template <int Units>
__device__ __forceinline__ void accumulate(float (&sum)[Units * UNIT / 2], Shared &shared, const Part &part, Place &place,
                                           int warpgroup, int lane) {
#pragma unroll
    for (float &value : sum) value = 0.0f;
    int before = 0;  // the stage of the step before
    for (int k = part.begin; k < part.end; k++) {
        mbarrier_wait(&shared.full[place.stage], place.parity);
        const uint64_t tokens = wgmma_descriptor(place.tokens(shared));
        const uint64_t weights =
            wgmma_descriptor_of_32(place.weights(shared) + warpgroup * (WARPGROUP_FEATURES / GROUP) * TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint64_t of_tile = weights + tile * GROUPS * TILE_BYTES / 16;
            wgmma(sum, of_tile, tokens + 4 * tile);
            wgmma(sum, of_tile + 2, tokens + 4 * tile + 2);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (k > part.begin && lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], part.first_rank() + lane);
        before = place.stage;
        place.advance();
    }
    wgmma_wait<0>();
    if (lane < RANKS) mbarrier_arrive_at_rank(&shared.empty[before], part.first_rank() + lane);
}

#endif

// y: [M, N]. Clusters of RANKS blocks, or of RANKS * slices.
template <bool Sliced>
__global__ void __launch_bounds__(THREADS, 1)
    project(const __grid_constant__ Maps maps, const __grid_constant__ Schedule schedule, __nv_bfloat16 *__restrict__ y) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const Part part = part_of<Sliced>(schedule);
    const int rank = blockIdx.x % RANKS;
    if (threadIdx.x < MAX_STAGES) {
        mbarrier_init(&shared.full[threadIdx.x], 1);
        mbarrier_init(&shared.empty[threadIdx.x], RANKS * WARPGROUPS * 4);
        mbarrier_init_fence();
    }
    cluster_sync();
    wait_for_previous();
    let_next_start();

    // The last warpgroup fetches, by one of its threads, and the others multiply, with the registers that it leaves.
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FETCH_REGISTERS));
        if (thread == 0) fetch(shared, schedule, part, maps, rank);
        __syncwarp();
        if (Sliced) {  // as `add_slices`
            cluster_sync();
            cluster_sync();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLY_REGISTERS));
        const int block = RANKS * part.slices;
        Place place(schedule.width);
        for (int turn = blockIdx.x / block; turn < schedule.turns; turn += gridDim.x / block) {
            const Work work = work_of(schedule, turn);
            if (work.units <= 0) continue;
            const int64_t first =
                static_cast<int64_t>(work.feature_tile * RANKS + rank) * FEATURES + warpgroup * WARPGROUP_FEATURES;
            const auto take = [&](auto units) {
                constexpr int Units = decltype(units)::value;
                float sum[Units * UNIT / 2];
                accumulate<Units>(sum, shared, part, place, warpgroup, lane);
                if (Sliced) add_slices<Units>(sum, shared, part, rank, warpgroup, thread);
                store<Units>(sum, shared.results[warpgroup], Plain(), schedule, part, first, work, warpgroup, thread, y);
            };
            if (work.units > 2)
                take(std::integral_constant<int, 4>());
            else if (work.units == 2)
                take(std::integral_constant<int, 2>());
            else
                take(std::integral_constant<int, 1>());
            if (Sliced) break;  // a cluster has one turn
        }
    }
    // A block stays until the others' arrivals at its barriers are over.
    cluster_sync();
#endif
}

// Whether a call is one that the kernel takes: tensor maps want rows that start on 16 bytes.
inline bool takes(int64_t k) { return k % bf16_weights::CHUNK == 0; }

inline cudaError_t encode(Maps *maps, const void *weights, const void *x, int64_t m, int64_t n, int64_t k) {
    const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
    const cuuint64_t groups = size(bf16_weights::groups(n)), tiles = size(bf16_weights::tiles(k));
    const cudaError_t error = tensor_map::encode<3>(
        &maps->weights, CU_TENSOR_MAP_DATA_TYPE_UINT64, CU_TENSOR_MAP_SWIZZLE_NONE, weights,
        {TILE_BYTES / sizeof(uint64_t), groups, tiles}, {tiles * TILE_BYTES, TILE_BYTES},
        {TILE_BYTES / sizeof(uint64_t), GROUPS, TILES});
    if (error != cudaSuccess) return error;
    return tensor_map::encode<2>(&maps->tokens, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B, x, {size(k), size(m)},
                                 {size(k) * sizeof(__nv_bfloat16)}, {TILE_K, BOX_TOKENS});
}

// Queues y [M, N] of x [M, K]. `multiprocessors` is how many the device has.
inline cudaError_t launch(const void *weights, const void *x, __nv_bfloat16 *y, int64_t m, int64_t n, int64_t k,
                          int multiprocessors, bool overlap, cudaStream_t stream) {
    Maps maps;
    const cudaError_t error = encode(&maps, weights, x, m, n, k);
    if (error != cudaSuccess) return error;
    const int pairs = std::max(multiprocessors / RANKS, 1);
    const Schedule order = schedule(m, n, k, pairs);
    Launch launch = {};
    launch.cluster = RANKS * order.slices;
    launch.blocks = static_cast<int64_t>(order.slices > 1 ? order.turns : std::min(order.turns, pairs)) * launch.cluster;
    launch.threads = THREADS;
    launch.shared = sizeof(Shared);
    launch.overlap = overlap;
    launch.stream = stream;
    return launch_kernel(launch, order.slices > 1 ? project<true> : project<false>, maps, order, y);
}

// Loads the kernels into the current context and gives them their shared memory: once, before `launch`.
inline cudaError_t prepare() {
    cudaError_t error = tensor_map::prepare();
    for (auto function : {project<false>, project<true>})
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    return error;
}

}  // namespace
}  // namespace bf16_prefill
