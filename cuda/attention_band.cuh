// Attention of a few query rows over a paged store, row-invariant: the bits of a row do not depend on how many rows there are nor
// on what the others hold.
//
// Positions are cut into splits (attention_splits.cuh), a block attends to one split of one KV head, and a second kernel adds up
// the splits. The query vectors that read a KV head, of all rows and all heads of its group, are the columns of one tensor-core
// form: positions are on the row side of the scores, head_dim on that of the outputs, and a column of a product depends on that
// column of its operand alone. Positions are met in tiles of 64, in order; a tile that a column does not see changes none of its
// bits.
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

namespace attention::band {
namespace {

constexpr float LOG2_E = 1.4426950408889634f;

template <typename Element, int HEAD_DIM, int TILES>
__global__ void __launch_bounds__(THREADS, sizeof(Element) == 1 ? (TILES == 1 ? 3 : 2) : 1)
    attend(Pages<Element> pages, Queries queries, Scratch scratch, Pass pass) {
    using Layout = Layout<Element, HEAD_DIM, TILES>;
    extern __shared__ __align__(1024) char shared[];
    const Lane lane;
    const Splits splits = Splits::of(pages.kv_heads);
    // The longest splits come first.
    const int split = pass.splits - 1 - static_cast<int>(blockIdx.x) / pages.kv_heads;
    const int head = static_cast<int>(blockIdx.x) % pages.kv_heads;
    const int group = queries.heads / pages.kv_heads;
    const int64_t start = splits.start(split);
    const float log2_scale = pass.log2_scale * (pages.k_scales == nullptr ? 1.0f : pages.k_scales[head]);
    let_next_start();
    wait_for_previous();

    const Sight sight = {*queries.position + pass.first_row, group};
    const int64_t seq_len = min(sight.first + pass.rows, pages.window);
    if (start >= seq_len) return;
    const int tiles = static_cast<int>((min(splits.start(split + 1), seq_len) - start + TILE - 1) / TILE);
    const Reader<Layout> reader = {pages, shared_address(shared), start, seq_len, tiles, head, 31 - __clz(pages.page_size)};
    auto second = reader.look_up(0);
    reader.copy_keys(0, second);
    commit_copies();
    reader.copy_values(0, second);
    second = reader.look_up(1);
    reader.copy_keys(1, second);
    commit_copies();
    reader.copy_values(1, second);
    load_queries<Layout>(shared, queries, pass, head, group, log2_scale);
    Sums<Layout> sums;
    wait_for_earlier_copies();
    publish_operands();
    __syncthreads();

    for (int tile = 0; tile < tiles; tile++) {
        const auto third = reader.look_up(tile + 2);
        const int64_t tile_start = start + tile * TILE;
        float score[TILES * 4];
        find_scores<Layout>(score, shared, tile, tile_start, sight, lane);
        // The block is done with these keys, and with the values before.
        __syncthreads();
        reader.copy_keys(tile + 2, third);
        if (tile > 0) reader.copy_values(tile + 1, second);
        commit_copies();
        second = third;
        weigh(sums, score, shared, lane);
        // The next keys and these values are there, and the weights.
        wait_for_earlier_copies();
        publish_operands();
        __syncthreads();
        add_values(sums, shared, tile, tile_start, sight, lane);
    }
    const int64_t first_column = (static_cast<int64_t>(split) * pages.kv_heads + head) * scratch.columns;
    leave(sums, shared, scratch, first_column, pass.rows * group, lane);
}

template <typename Element>
struct Kernel {
    void (*function)(Pages<Element>, Queries, Scratch, Pass);
    size_t shared;
};

template <typename Element, int HEAD_DIM, int TILES>
constexpr Kernel<Element> kernel() {
    return {attend<Element, HEAD_DIM, TILES>, Layout<Element, HEAD_DIM, TILES>::BYTES};
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

// Loads every kernel that the current device has the shared memory for, so that no later call does.
template <typename Element>
cudaError_t load() {
    int device = 0, shared = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    for (int head_dim : {64, 128, 256})
        for (int tiles : {1, 3, 6, 7}) {
            const Kernel<Element> kernel = choose<Element>(head_dim, tiles);
            if (error != cudaSuccess || kernel.shared > static_cast<size_t>(shared)) continue;
            error = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(kernel.shared));
        }
    return error == cudaSuccess ? load_combine() : error;
}

// Bytes of scratch that a store needs.
inline int64_t scratch_bytes(int64_t window, int heads, int kv_heads, int head_dim) {
    return Scratch::bytes(Splits::of(kv_heads).count(window), kv_heads, heads / kv_heads, head_dim);
}

// Queues any number of rows, as many to a pass as have columns. `memory` is aligned to 16 bytes.
template <typename Element>
cudaError_t launch(const Pages<Element> &pages, const Queries &queries, void *memory, bool overlap, cudaStream_t stream) {
    const int group = queries.heads / pages.kv_heads;
    const int splits = Splits::of(pages.kv_heads).count(pages.window);
    const Scratch scratch = Scratch::in(memory, splits, pages.kv_heads, group, queries.head_dim);
    const Values values = {pages.v_scales, pages.kv_heads, pages.window};
    const float log2_scale = LOG2_E / sqrtf(static_cast<float>(queries.head_dim));
    for (int64_t row = 0; row < queries.rows; row += pass_rows(group)) {
        const int rows = static_cast<int>(std::min<int64_t>(queries.rows - row, pass_rows(group)));
        const Pass pass = {row, rows, splits, log2_scale};
        const Kernel<Element> kernel = choose<Element>(queries.head_dim, (rows * group + COLUMNS - 1) / COLUMNS);
        const Launch launch = {.blocks = static_cast<int64_t>(splits) * pages.kv_heads,
                               .threads = THREADS,
                               .shared = kernel.shared,
                               .overlap = overlap,
                               .stream = stream};
        cudaError_t error = launch_kernel(launch, kernel.function, pages, queries, scratch, pass);
        if (error == cudaSuccess) error = combine(values, queries, scratch, pass, overlap, stream);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace
}  // namespace attention::band
