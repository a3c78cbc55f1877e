// Attention of a few query rows over a paged store, row-invariant: the bits of a row do not depend on how many rows there are nor
// on what the others hold.
//
// Positions are cut into splits (attention_splits.cuh), a block attends to one split of one KV head, and a second kernel adds up
// the splits. The query vectors that read a KV head, of all rows and all heads of its group, are the columns of one tensor-core
// form: positions are on the 16-row side of the scores, head_dim on that of the outputs, and a column of a product depends on
// that column of its operand alone. Positions are met in tiles of 64, in order; a tile that a column does not see changes none
// of its bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>

#include "attention.cuh"
#include "attention_combine.cuh"
#include "attention_elements.cuh"
#include "attention_splits.cuh"
#include "launch.cuh"

namespace attention::band {
namespace {

constexpr int TILE = 64;  // positions
constexpr int WARPS = 4;  // each has 16 positions of a tile's scores, and a quarter of head_dim of the outputs
constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 8;  // of a column tile
constexpr float LOG2_E = 1.4426950408889634f;

// 16 bytes into shared memory, or as many zeros; kept out of L1.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all copies of this thread but those of the last group.
__device__ __forceinline__ void wait_for_earlier_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

__device__ __forceinline__ uint4 load_shared(const char *address) { return *reinterpret_cast<const uint4 *>(address); }

// The transpose of an 8 x 8 matrix of 16-bit elements, of which lane 4g + t holds elements 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(matrix));
    return matrix;
}

// Where things lie in shared memory. Rows are in chunks of 16 bytes, and chunks of neighbouring rows change places so that the
// lanes of a load meet all banks.
template <typename Element, int HEAD_DIM, int TILES>
struct Layout {
    static constexpr int ROW = HEAD_DIM * sizeof(Element);  // bytes of a position
    static constexpr int CHUNKS = ROW / 16;
    static constexpr int CHUNK_ELEMENTS = 16 / sizeof(Element);
    static constexpr int TILE_BYTES = TILE * ROW;
    static constexpr int STAGES = 2;  // of keys, and of values
    static constexpr int QUERY_CHUNKS = HEAD_DIM * 2 / 16;
    static constexpr int WEIGHT_ROW = TILE * 2;

    static constexpr int KEYS = 0;
    static constexpr int VALUES = KEYS + STAGES * TILE_BYTES;
    static constexpr int QUERIES = VALUES + STAGES * TILE_BYTES;                   // [columns, head_dim]
    static constexpr int WEIGHTS = QUERIES + TILES * COLUMNS * HEAD_DIM * 2;       // [columns, TILE]
    static constexpr int PER_WARP = WEIGHTS + TILES * COLUMNS * WEIGHT_ROW;        // FP32 [WARPS, columns]
    static constexpr int BYTES = PER_WARP + WARPS * TILES * COLUMNS * 4;

    __device__ static int key(int position, int chunk) {
        return position * ROW + (chunk ^ ((position & 1) << 2 & (CHUNKS - 1))) * 16;
    }
    __device__ static int value(int position, int chunk) {
        return position * ROW + (chunk ^ ((position >> 3 & 3) << (CHUNKS > 4))) * 16;
    }
    __device__ static int query(int column, int chunk) {
        return column * HEAD_DIM * 2 + (chunk ^ (sizeof(Element) == 1 ? column & 1 : (column & 1) << 2)) * 16;
    }
    __device__ static int weight(int column, int chunk) {
        return column * WEIGHT_ROW + (chunk ^ ((column & 1) << 2 | (column >> 1 & 3))) * 16;
    }
};

// The keys and values of one split of one head, on their way into shared memory.
template <typename Element, typename Layout>
struct Reader {
    static constexpr int ROWS = THREADS / Layout::CHUNKS;  // that the block copies at once
    static constexpr int COPIES = TILE / ROWS;
    // A page has 16 positions at least, so a thread's copies are of few pages.
    static constexpr int LOOKUPS = COPIES < TILE / 16 ? COPIES : TILE / 16;

    const Pages<Element> &pages;
    int64_t start;    // of the split
    int64_t seq_len;  // positions that are there for any row
    int head;
    int page_shift;
    int row = threadIdx.x / Layout::CHUNKS;
    int chunk = threadIdx.x % Layout::CHUNKS;

    struct Lookups {
        int32_t page[LOOKUPS];
    };

    __device__ Lookups look_up(int tile) const {
        Lookups lookups;
#pragma unroll
        for (int i = 0; i < LOOKUPS; i++) {
            const int64_t position = start + tile * TILE + i * (TILE / LOOKUPS) + row;
            const int run = static_cast<int>(position >> page_shift);
            lookups.page[i] = pages.table == nullptr || position >= pages.window ? run : pages.table[run];
        }
        return lookups;
    }

    // Positions that are not there become zeros.
    template <typename Place>
    __device__ void copy(const Element *from, int tile, const Lookups &lookups, Place place) const {
        const char *base = reinterpret_cast<const char *>(from) + chunk * 16;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int in_tile = i * ROWS + row;
            const int64_t position = start + tile * TILE + in_tile;
            const int64_t page = static_cast<int64_t>(lookups.page[i * LOOKUPS / COPIES]) * pages.kv_heads + head;
            const int64_t index = (page << page_shift) + (position & (pages.page_size - 1));
            const bool there = position < seq_len;
            copy_async(place(in_tile, chunk), there ? base + index * Layout::ROW : base, there);
        }
    }
};

template <typename Element, int HEAD_DIM, int TILES>
__global__ void __launch_bounds__(THREADS, sizeof(Element) == 1 ? (TILES <= 2 ? 3 : 2) : 1)
    attend(Pages<Element> pages, Queries queries, Scratch scratch, Pass pass) {
    using Layout = Layout<Element, HEAD_DIM, TILES>;
    using Operands = Operands<Element>;
    constexpr int RUN = HEAD_DIM / 32;       // elements of head_dim that a lane has of the outputs, in a run
    constexpr int RUN_BYTES = RUN * sizeof(Element);
    constexpr int WORDS = RUN_BYTES < 4 ? 1 : RUN_BYTES / 4;
    constexpr int M_TILES = RUN / 2;
    constexpr int AT_ONCE = TILES <= 6 ? 2 : 1;  // tensor-core steps of values whose operands a lane has at once
    constexpr int STEPS = Layout::CHUNK_ELEMENTS / 4;  // tensor-core steps of a chunk of keys
    extern __shared__ __align__(128) char shared[];

    const int warp = threadIdx.x / 32;
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const Splits splits = Splits::of(pages.kv_heads);
    // The longest splits come first.
    const int split = pass.splits - 1 - static_cast<int>(blockIdx.x) / pages.kv_heads;
    const int head = static_cast<int>(blockIdx.x) % pages.kv_heads;
    const int group = queries.heads / pages.kv_heads;
    const int columns = pass.rows * group;
    const int64_t start = splits.start(split);
    const float log2_scale = pass.log2_scale * (pages.k_scales == nullptr ? 1.0f : pages.k_scales[head]);
    let_next_start();
    wait_for_previous();

    const int64_t first = *queries.position + pass.first_row;  // the position of the pass's first row
    const int64_t seq_len = min(first + pass.rows, pages.window);
    if (start >= seq_len) return;
    const int tiles = static_cast<int>((min(splits.start(split + 1), seq_len) - start + TILE - 1) / TILE);

    const uint32_t shared_base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const Reader<Element, Layout> reader = {pages, start, seq_len, head, 31 - __clz(pages.page_size)};
    using Lookups = typename Reader<Element, Layout>::Lookups;
    const auto copy_keys = [&](int tile, const Lookups &lookups) {
        const uint32_t to = shared_base + Layout::KEYS + tile % Layout::STAGES * Layout::TILE_BYTES;
        if (tile < tiles) reader.copy(pages.keys, tile, lookups, [&](int p, int chunk) { return to + Layout::key(p, chunk); });
    };
    const auto copy_values = [&](int tile, const Lookups &lookups) {
        const uint32_t to = shared_base + Layout::VALUES + tile % Layout::STAGES * Layout::TILE_BYTES;
        if (tile < tiles) reader.copy(pages.values, tile, lookups, [&](int p, int chunk) { return to + Layout::value(p, chunk); });
    };

    Lookups second = reader.look_up(0);
    copy_keys(0, second);
    for (int i = threadIdx.x; i < TILES * COLUMNS * Layout::QUERY_CHUNKS; i += THREADS) {
        const int column = i / Layout::QUERY_CHUNKS, chunk = i % Layout::QUERY_CHUNKS;
        const int64_t vector = (pass.first_row + column / group) * queries.heads + head * group + column % group;
        const bool there = column < columns;
        copy_async(shared_base + Layout::QUERIES + Layout::query(column, chunk),
                   queries.queries + (there ? vector * HEAD_DIM + chunk * 8 : 0), there);
    }
    commit_copies();
    copy_values(0, second);
    second = reader.look_up(1);
    copy_keys(1, second);
    commit_copies();
    copy_values(1, second);

    float out[M_TILES][TILES][4] = {};
    float largest[TILES][2];  // score of columns 2t and 2t + 1 of each column tile so far
    float total[TILES][2];    // weight that this lane's positions have so far
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            largest[n][c] = -INFINITY;
            total[n][c] = 0.0f;
        }
    float *per_warp = reinterpret_cast<float *>(shared + Layout::PER_WARP);
    wait_for_earlier_copies();
    __syncthreads();

    for (int tile = 0; tile < tiles; tile++) {
        const Lookups third = reader.look_up(tile + 2);
        const int64_t tile_start = start + tile * TILE;
        // Whether some row does not see all of the tile.
        const bool ragged = tile_start + TILE - 1 > first;

        // Scores of 16 positions of the tile: lane 4g + t has positions g and g + 8, columns 2t and 2t + 1.
        float score[TILES][4] = {};
        const char *keys = shared + Layout::KEYS + tile % Layout::STAGES * Layout::TILE_BYTES;
        uint32_t spoiled[2] = {};
#pragma unroll
        for (int s = 0; s < Layout::CHUNKS / 4; s++) {
            const uint4 low = load_shared(keys + Layout::key(16 * warp + g, 4 * s + t));
            const uint4 high = load_shared(keys + Layout::key(16 * warp + g + 8, 4 * s + t));
            const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
            uint32_t a[STEPS][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 4; i++) spoiled[half] |= Operands::not_finite(words[half][i]);
#pragma unroll
                for (int i = 0; i < STEPS; i++) Operands::keys(words[half], i, a[i][half], a[i][half + 2]);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int i = 0; i < STEPS; i += 2) {
                    const uint4 b = load_shared(shared + Layout::QUERIES +
                                                Layout::query(COLUMNS * n + g, (4 * s + t) * (STEPS / 2) + i / 2));
                    mma_m16n8k16(score[n], a[i], b.x, b.y);
                    mma_m16n8k16(score[n], a[i + 1], b.z, b.w);
                }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            spoiled[half] |= __shfl_xor_sync(~0u, spoiled[half], 1);
            spoiled[half] |= __shfl_xor_sync(~0u, spoiled[half], 2);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &s = score[n][2 * half + c];
                    s = spoiled[half] != 0 ? NAN : __fmul_rn(s, log2_scale);
                    if (ragged && tile_start + 16 * warp + g + 8 * half > first + (COLUMNS * n + 2 * t + c) / group) s = -INFINITY;
                }
                float best = fmaxf(score[n][c], score[n][2 + c]);
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
                best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
                if (g == 0) per_warp[(warp * TILES + n) * COLUMNS + 2 * t + c] = best;
            }
        // The block is done with these keys, and with the values before.
        __syncthreads();
        copy_keys(tile + 2, third);
        if (tile > 0) copy_values(tile + 1, second);
        commit_copies();
        second = third;

        // Weights, and what becomes of the sums when a larger score came.
        bool grew = false;
        float shrink[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float best = largest[n][c];
#pragma unroll
                for (int w = 0; w < WARPS; w++) best = fmaxf(best, per_warp[(w * TILES + n) * COLUMNS + 2 * t + c]);
                shrink[n][c] = exp2_fast(largest[n][c] - best);
                grew |= shrink[n][c] != 1.0f;
                largest[n][c] = best;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t pair = Operands::weights(exp2_fast(score[n][2 * half] - largest[n][0]),
                                                        exp2_fast(score[n][2 * half + 1] - largest[n][1]));
                const float2 rounded = Operands::to_floats(pair);
                total[n][0] = __fmaf_rn(total[n][0], half == 0 ? shrink[n][0] : 1.0f, rounded.x);
                total[n][1] = __fmaf_rn(total[n][1], half == 0 ? shrink[n][1] : 1.0f, rounded.y);
                char *to = shared + Layout::WEIGHTS + Layout::weight(COLUMNS * n + g, 2 * warp + half) + 4 * t;
                *reinterpret_cast<uint32_t *>(to) = transpose(pair);
            }
        }
        wait_for_earlier_copies();
        __syncthreads();

        // Outputs: lane 4g + t has a run of head_dim, columns 2t and 2t + 1.
        if (__any_sync(~0u, grew)) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int j = 0; j < M_TILES; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) out[j][n][i] = __fmul_rn(out[j][n][i], shrink[n][i % 2]);
        }
        const char *values = shared + Layout::VALUES + tile % Layout::STAGES * Layout::TILE_BYTES;
        const int byte = warp * (Layout::ROW / WARPS) + g * RUN_BYTES;
        uint32_t found = 0;
#pragma unroll
        for (int step = 0; step < TILE / 16; step += AT_ONCE) {
            uint32_t a[AT_ONCE][M_TILES][4];
#pragma unroll
            for (int v = 0; v < AT_ONCE; v++) {
                uint32_t x[4][WORDS];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int position = (step + v) / 2 * 32 + 8 * t + (step + v) % 2 * 4 + i;
                    const char *from = values + Layout::value(position, byte / 16) + byte % 16;
                    if constexpr (RUN_BYTES == 2) x[i][0] = *reinterpret_cast<const unsigned short *>(from);
                    if constexpr (RUN_BYTES == 4) x[i][0] = *reinterpret_cast<const uint32_t *>(from);
                    if constexpr (RUN_BYTES == 8) *reinterpret_cast<uint2 *>(x[i]) = *reinterpret_cast<const uint2 *>(from);
                    if constexpr (RUN_BYTES == 16) *reinterpret_cast<uint4 *>(x[i]) = *reinterpret_cast<const uint4 *>(from);
#pragma unroll
                    for (int k = 0; k < WORDS; k++) {
                        found |= Operands::not_finite(x[i][k]);
                        if (ragged && tile_start + position > first) x[i][k] = Operands::finite_part(x[i][k], found);
                    }
                }
#pragma unroll
                for (int j = 0; j < M_TILES; j++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        a[v][j][i] = Operands::values(x[0], x[1], 2 * j + i);
                        a[v][j][i + 2] = Operands::values(x[2], x[3], 2 * j + i);
                    }
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const char *weights = shared + Layout::WEIGHTS + Layout::weight(COLUMNS * n + g, step / 2 * 4 + t);
                uint2 b[AT_ONCE];
                if constexpr (AT_ONCE == 2) *reinterpret_cast<uint4 *>(b) = load_shared(weights);
                if constexpr (AT_ONCE == 1) b[0] = *reinterpret_cast<const uint2 *>(weights + step % 2 * 8);
#pragma unroll
                for (int j = 0; j < M_TILES; j++)
#pragma unroll
                    for (int v = 0; v < AT_ONCE; v++) Operands::multiply_values(out[j][n], a[v][j], b[v].x, b[v].y);
            }
        }
        // Values that are not finite reach the columns that see them, and no others.
        if (__any_sync(~0u, found != 0)) {
            for (int position = 0; position < TILE; position++) {
                const int64_t seen_from = tile_start + position - first;  // the first row that sees it
                if (sizeof(Element) == 2 && seen_from <= 0) continue;
                const char *from = values + Layout::value(position, byte / 16) + byte % 16;
#pragma unroll
                for (int i = 0; i < RUN; i++) {
                    const float value = Operands::value(from + i * sizeof(Element));
                    if (isfinite(value)) continue;
#pragma unroll
                    for (int n = 0; n < TILES; n++)
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            const int column = COLUMNS * n + 2 * t + c;
                            const char *weight = shared + Layout::WEIGHTS + Layout::weight(column, position / 8) + position % 8 * 2;
                            if (seen_from <= column / group)
                                out[i / 2][n][i % 2 * 2 + c] = __fmaf_rn(Operands::weight(weight), value, out[i / 2][n][i % 2 * 2 + c]);
                        }
                }
            }
        }
    }

    // The split's sums, for the second kernel.
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float sum = total[n][c];
            sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 4));
            sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
            sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
            if (g == 0) per_warp[(warp * TILES + n) * COLUMNS + 2 * t + c] = sum;
        }
    __syncthreads();
    const int64_t first_column = (static_cast<int64_t>(split) * pages.kv_heads + head) * scratch.columns;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int column = COLUMNS * n + 2 * t + c;
            if (column >= columns) continue;
            if (warp == 0 && g == 0) {
                float sum = per_warp[n * COLUMNS + 2 * t + c];
#pragma unroll
                for (int w = 1; w < WARPS; w++) sum = __fadd_rn(sum, per_warp[(w * TILES + n) * COLUMNS + 2 * t + c]);
                scratch.weights[first_column + column] = make_float2(largest[n][c], sum);
            }
            float *to = scratch.outputs + (first_column + column) * HEAD_DIM + (warp * 8 + g) * RUN;
#pragma unroll
            for (int j = 0; j < M_TILES; j++)
                *reinterpret_cast<float2 *>(to + 2 * j) = make_float2(out[j][n][c], out[j][n][2 + c]);
        }
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

template <typename Element>
cudaError_t load() {
    for (int head_dim : {64, 128, 256})
        for (int tiles : {1, 3, 6, 7}) {
            const Kernel<Element> kernel = choose<Element>(head_dim, tiles);
            const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel.function),
                                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           static_cast<int>(kernel.shared));
            if (error != cudaSuccess) return error;
        }
    return load_combine();
}

// Queues any number of rows, as many to a pass as have columns.
template <typename Element>
cudaError_t launch(const Pages<Element> &pages, const Queries &queries, void *memory, bool overlap, cudaStream_t stream) {
    const int group = queries.heads / pages.kv_heads;
    const int splits = Splits::of(pages.kv_heads).count(pages.window);
    const Scratch scratch = Scratch::in(memory, splits, pages.kv_heads, group, queries.head_dim);
    const Values values = {pages.v_scales, Operands<Element>::VALUE_SCALE, pages.kv_heads, pages.window};
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

namespace attention {
namespace {

// Loads every kernel, so that no later call does.
template <typename Element>
cudaError_t load_attend() {
    return band::load<Element>();
}

// Bytes of scratch that `attend` needs for a store.
inline int64_t scratch_bytes(int64_t window, int heads, int kv_heads, int head_dim) {
    return band::Scratch::bytes(band::Splits::of(kv_heads).count(window), kv_heads, heads / kv_heads, head_dim);
}

// Queues answering queries. `scratch` is aligned to 16 bytes.
template <typename Element>
cudaError_t attend(const Pages<Element> &pages, const Queries &queries, void *scratch, bool overlap, cudaStream_t stream) {
    return band::launch(pages, queries, scratch, overlap, stream);
}

}  // namespace
}  // namespace attention
