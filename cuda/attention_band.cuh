// Attention of a few query rows over a paged store, row-invariant: the bits of a row do not depend on how many rows there are nor
// on what the others hold.
//
// Positions are cut into splits (attention_splits.cuh), a block attends to one split of one KV head, and a second kernel adds up
// the splits. The query vectors that read a KV head, of all rows and all heads of its group, are the columns of one tensor-core
// form: positions are on the row side of the scores, head_dim on that of the outputs, and a column of a product depends on that
// column of its operand alone. Positions are met in tiles of 64; a tile that a column does not see changes none of its bits.
//
// Four warps of a block fetch tiles through a ring (attention_ring.cuh), two teams of four multiply: the tiles in turns, each in
// order, and at the end the teams' sums are added.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention.cuh"
#include "attention_combine.cuh"
#include "attention_layout.cuh"
#include "attention_splits.cuh"
#include "attention_tile.cuh"
#include "launch.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define HAS_REGISTER_POOL 1
#else
#define HAS_REGISTER_POOL 0
#endif

namespace attention::band {
namespace {

constexpr float LOG2_E = 1.4426950408889634f;

// Threads that fetch leave registers to those that multiply, where these need more than an even share (PTX ISA, setmaxnreg).
template <int TILES>
__device__ __forceinline__ void give_registers() {
#if HAS_REGISTER_POOL
    if (TILES > 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
}
template <int TILES>
__device__ __forceinline__ void take_registers() {
#if HAS_REGISTER_POOL
    if (TILES > 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}

// Rows of a pass whose splits are of one length: all of them, but where the length changes between two.
struct Run {
    int64_t position;  // of the first row
    int rows;
    Splits splits;

    __device__ Run(int64_t pass_position, int first_row, const Pass &pass, int64_t window)
        : position(pass_position + first_row), rows(pass.rows - first_row),
          splits(Splits::of(pass.splits, min(position + 1, window))) {
        if (splits.reach() < window) rows = static_cast<int>(min(static_cast<int64_t>(rows), splits.reach() - position));
    }
};

// What a block attends to for a run of rows.
template <typename Layout>
__device__ __forceinline__ Reader<Layout> reader_of(const Pages<typename Layout::Element> &pages, const Run &run, int split,
                                                    int head, char *shared) {
    const int64_t end = min(run.position + run.rows, pages.window), start = split * run.splits.length();
    const int64_t of_split = max(min(run.splits.length(), end - start), int64_t{0});
    return {pages, shared_address(shared + Layout::SLOTS), head, start, end, static_cast<int>((of_split + TILE - 1) / TILE)};
}

// A team's share of a split: every other tile.
template <typename Layout>
__device__ __forceinline__ void attend_tiles(Sums<Layout> &sums, char *shared, int64_t start, int tiles, Ring &ring,
                                             const Sight &sight, const Lane &lane) {
    const char *slots = shared + Layout::SLOTS;
    for (int tile = lane.team; tile < tiles; tile += TEAMS) {
        const int64_t tile_start = start + tile * TILE;
        char *weights = Layout::weights(shared, lane.team, tile / TEAMS % 2);
        float score[Layout::TILES * 4], fresh[Layout::TILES][2];
        ring.wait_until_full();
        find_scores<Layout>(score, shared, slots + ring.slot * Layout::TILE_BYTES, tile_start, sight, lane);
        ring.free();
        ring.advance(1);
        bool past = tile == lane.team;
        do {
            if (past) raise(sums, score, shared, tile == lane.team, lane);
            past = weigh(fresh, sums, score, weights, lane);
            publish_operands();
            past = team_any(lane.team, past);
        } while (past);
        sums.add(fresh);
        ring.wait_until_full();
        add_values(sums, weights, slots + ring.slot * Layout::TILE_BYTES, tile_start, sight, lane);
        ring.free();
        ring.advance(2 * TEAMS - 1);
    }
}

template <typename Element, int HEAD_DIM, int TILES>
__global__ void __launch_bounds__(THREADS, 1) attend(Pages<Element> pages, Queries queries, Scratch scratch, Pass pass) {
    using Layout = Layout<Element, HEAD_DIM, TILES>;
    extern __shared__ __align__(1024) char shared[];
    const Lane lane;
    const int split = static_cast<int>(blockIdx.x) / pages.kv_heads;
    const int head = static_cast<int>(blockIdx.x) % pages.kv_heads;
    const Group group = {queries.heads / pages.kv_heads};
    Ring ring = {*reinterpret_cast<Barriers *>(shared + Layout::BARRIERS), pass.slots};
    ring.open();
    // One row's second kernel finds room beside this one. That of more rows would be stacked on the multiprocessors that are done
    // first: it starts when all blocks are nearly done.
    if (TILES == 1) let_next_start();
    __syncthreads();
    if (lane.team == TEAMS) {
        give_registers<TILES>();
        wait_for_previous();
        const int64_t position = *queries.position + pass.first_row;
        for (int row = 0; row < pass.rows;) {
            const Run run(position, row, pass, pages.window);
            reader_of<Layout>(pages, run, split, head, shared).fetch(ring);
            row += run.rows;
            if (row < pass.rows) __syncthreads();
        }
    } else {
        take_registers<TILES>();
        const float log2_scale = pass.log2_scale * (pages.k_scales == nullptr ? 1.0f : pages.k_scales[head]);
        wait_for_previous();
        const int64_t position = *queries.position + pass.first_row;
        int filled = 2 * lane.team;
        for (int row = 0; row < pass.rows;) {
            load_queries<Layout>(shared, queries, pass.first_row + row, (pass.rows - row) * group.size, head, group, log2_scale);
            publish_operands();
            teams_sync();
            const Run run(position, row, pass, pages.window);
            const Reader<Layout> reader = reader_of<Layout>(pages, run, split, head, shared);
            ring.go_to(filled);
            filled += 2 * reader.tiles;
            const int64_t first_column = (static_cast<int64_t>(split) * pages.kv_heads + head) * scratch.columns + row * group.size;
            if (reader.tiles > 0) {
                Sums<Layout> sums;
                attend_tiles(sums, shared, reader.start, reader.tiles, ring, {run.position, group}, lane);
                if (TILES > 1) let_next_start();
                leave(sums, shared, scratch, first_column, run.rows * group.size, lane);
            }
            row += run.rows;
            if (row < pass.rows) __syncthreads();
        }
    }
}

template <typename Element>
struct Kernel {
    void (*function)(Pages<Element>, Queries, Scratch, Pass);
    size_t shared;  // without the ring
    size_t slot;
    int min_slots;

    // As many slots as a block's shared memory has room for.
    int slots(size_t room) const {
        const size_t fit = room > shared ? (room - shared) / slot : 0;
        return static_cast<int>(std::max<size_t>(std::min<size_t>(fit, MAX_SLOTS), min_slots));
    }
};

template <typename Element, int HEAD_DIM, int TILES>
constexpr Kernel<Element> kernel() {
    using Layout = Layout<Element, HEAD_DIM, TILES>;
    return {attend<Element, HEAD_DIM, TILES>, Layout::SLOTS, Layout::TILE_BYTES, Layout::MIN_SLOTS};
}

template <typename Element, int HEAD_DIM>
Kernel<Element> choose(int tiles) {
    return tiles <= 1   ? kernel<Element, HEAD_DIM, 1>()
           : tiles <= 3 ? kernel<Element, HEAD_DIM, 3>()
           : tiles <= 6 ? kernel<Element, HEAD_DIM, 6>()
                        : kernel<Element, HEAD_DIM, 7>();
}

template <typename Element>
Kernel<Element> choose(int head_dim, int tiles) {
    return head_dim == 64    ? choose<Element, 64>(tiles)
           : head_dim == 128 ? choose<Element, 128>(tiles)
                             : choose<Element, 256>(tiles);
}

// The shared memory that a block of the current device may have.
inline cudaError_t room_of_block(size_t &room) {
    int device = 0, bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    room = static_cast<size_t>(bytes);
    return error;
}

// Loads every kernel that the current device has the shared memory for, so that no later call does.
template <typename Element>
cudaError_t load() {
    size_t room = 0;
    cudaError_t error = room_of_block(room);
    for (int head_dim : {64, 128, 256})
        for (int tiles : {1, 3, 6, 7}) {
            const Kernel<Element> kernel = choose<Element>(head_dim, tiles);
            if (error != cudaSuccess || kernel.shared + kernel.min_slots * kernel.slot > room) continue;
            error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(room));
        }
    return error == cudaSuccess ? load_combine() : error;
}

// Bytes of scratch that a store needs.
inline int64_t scratch_bytes(int64_t window, int heads, int kv_heads, int head_dim) {
    return Scratch::bytes(Splits::most_of(kv_heads, window), kv_heads, heads / kv_heads, head_dim);
}

// Queues any number of rows, as many to a pass as have columns. `memory` is aligned to 16 bytes.
template <typename Element>
cudaError_t launch(const Pages<Element> &pages, const Queries &queries, void *memory, bool overlap, cudaStream_t stream) {
    const int group = queries.heads / pages.kv_heads;
    const int splits = Splits::most_of(pages.kv_heads, pages.window);
    const Scratch scratch = Scratch::in(memory, splits, pages.kv_heads, group, queries.head_dim);
    const Values values = {pages.v_scales, pages.kv_heads, pages.window};
    const float log2_scale = LOG2_E / sqrtf(static_cast<float>(queries.head_dim));
    size_t room = 0;
    cudaError_t error = room_of_block(room);
    for (int64_t row = 0; row < queries.rows && error == cudaSuccess; row += pass_rows(group)) {
        const int rows = static_cast<int>(std::min<int64_t>(queries.rows - row, pass_rows(group)));
        const Kernel<Element> kernel = choose<Element>(queries.head_dim, (rows * group + COLUMNS - 1) / COLUMNS);
        const int slots = kernel.slots(room);
        const Pass pass = {row, rows, splits, slots, log2_scale};
        const Launch launch = {.blocks = static_cast<int64_t>(splits) * pages.kv_heads,
                               .threads = THREADS,
                               .shared = kernel.shared + slots * kernel.slot,
                               .overlap = overlap,
                               .stream = stream};
        error = launch_kernel(launch, kernel.function, pages, queries, scratch, pass);
        if (error == cudaSuccess) error = combine(values, queries, scratch, pass, overlap, stream);
    }
    return error;
}

}  // namespace
}  // namespace attention::band
