// Attention of a prompt: many rows of queries over a paged store, in one pass with an online softmax.
//
// The queries of a group of heads that share keys and values stand together on the row side of the products, row after row, so
// that a tile of keys is fetched once for all of them: a block has 16 of them a warp. Where there are too few blocks for the
// device, a cluster of blocks takes them, each block a part of the keys, and adds up in fixed order. Launches depend on the number
// of rows alone: the position is read on the device.
//
// Scores are FP32 sums, the softmax is FP32, and weights are rounded to the type of the products (`operand.cuh`'s) before they
// meet the values. Scores of keys that a row does not see become -inf. Values past the last row are zeros instead of what lies
// there; those of later rows of the same call may be infinite or NaN, and `hide_values` keeps them from the rows before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>

#include "attention.cuh"
#include "attention_operands.cuh"
#include "attention_tiles.cuh"
#include "cluster.cuh"
#include "launch.cuh"

namespace attention::flash {
namespace {

constexpr int MAX_PARTS = 8;  // blocks of a cluster

// A block's shared memory. The sums of a part take the place of its tiles.
template <typename Form>
struct alignas(1024) PromptShared {
    uint4 queries[Form::ROWS * Form::CHUNKS];
    union {
        uint4 tiles[2][2][Form::KEYS * Form::CHUNKS];  // of keys and of values, one being multiplied and one on its way
        float sums[Form::ROWS * Form::DIM];
    };
    float top[Form::ROWS], total[Form::ROWS];
    int first_hidden[Form::DIM];
};

// What a lane knows of its rows g and g + 8 of its warp's 16.
struct Softmax {
    float scale[2];          // what takes a score to a power of two
    float top[2];            // the largest score so far, unscaled
    float total[2];          // the lane's share of the sum of weights
    int last[2];             // the last position that the row sees
};

__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
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

// The largest of, and the sum over, the four lanes that share a row.
__device__ __forceinline__ float quad_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}

// Turns the scores of a tile into weights, and brings sums of earlier tiles to the same top.
template <typename Form>
__device__ __forceinline__ void weigh(float (&score)[Form::KEYS / 8][4], float (&sum)[Form::DIM / 8][4], Softmax &softmax) {
    float scaled_top[2], keep[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = softmax.top[half];
#pragma unroll
        for (auto &tile : score) top = fmaxf(top, fmaxf(tile[2 * half], tile[2 * half + 1]));
        top = quad_max(top);
        // Where a row has seen no key yet, every weight is 2^-inf whatever is subtracted, unless that is -inf too.
        scaled_top[half] = top == -INFINITY ? 0.0f : top * softmax.scale[half];
        keep[half] = power_of_two(softmax.top[half] * softmax.scale[half] - scaled_top[half]);
        moved |= top != softmax.top[half];
        softmax.top[half] = top;
    }
    if (__any_sync(~0u, moved)) {
#pragma unroll
        for (auto &tile : sum) {
            tile[0] *= keep[0], tile[1] *= keep[0];
            tile[2] *= keep[1], tile[3] *= keep[1];
        }
        softmax.total[0] *= keep[0], softmax.total[1] *= keep[1];
    }
#pragma unroll
    for (auto &tile : score) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            tile[i] = power_of_two(fmaf(tile[i], softmax.scale[i / 2], -scaled_top[i / 2]));
            softmax.total[i / 2] += tile[i];
        }
    }
}

// The scores of a warp's 16 queries and a tile of keys.
template <typename Form>
__device__ __forceinline__ void multiply_keys(float (&score)[Form::KEYS / 8][4], uint32_t queries, uint32_t keys, int lane) {
#pragma unroll
    for (auto &tile : score) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
    const uint32_t query = queries + place<Form>(lane % 16, lane / 16);
    const uint32_t key = keys + place<Form>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < Form::DIM / 16; k++) {
        uint32_t a[4];
        load_matrices(a, query ^ k * 32);
#pragma unroll
        for (int pair = 0; pair < Form::KEYS / 16; pair++) {
            uint32_t b[4];
            load_matrices(b, (key ^ k * 32) + pair * 16 * Form::ROW_BYTES);
            Form::Product::multiply(score[2 * pair], a, b[0], b[1]);
            Form::Product::multiply(score[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// Adds a tile's values, weighted.
template <typename Form>
__device__ __forceinline__ void multiply_values(float (&sum)[Form::DIM / 8][4], const float (&weight)[Form::KEYS / 8][4],
                                                uint32_t values, int lane) {
    const uint32_t value = values + place<Form>(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < Form::KEYS / 16; k++) {
        const float(&low)[4] = weight[2 * k], (&high)[4] = weight[2 * k + 1];
        const uint32_t a[4] = {Form::Product::pack(low[0], low[1]), Form::Product::pack(low[2], low[3]),
                               Form::Product::pack(high[0], high[1]), Form::Product::pack(high[2], high[3])};
#pragma unroll
        for (int pair = 0; pair < Form::DIM / 16; pair++) {
            uint32_t b[4];
            load_matrices_transposed(b, (value ^ pair * 32) + k * 16 * Form::ROW_BYTES);
            Form::Product::multiply(sum[2 * pair], a, b[0], b[1]);
            Form::Product::multiply(sum[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

template <typename Form>
__device__ __forceinline__ void hide_keys(float (&score)[Form::KEYS / 8][4], const Softmax &softmax, int first, int lane) {
#pragma unroll
    for (int n = 0; n < Form::KEYS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (first + n * 8 + lane % 4 * 2 + i % 2 > softmax.last[i / 2]) score[n][i] = -INFINITY;
    }
}

// Makes zeros of the values of a tile that are not finite, since zero times those would reach rows that do not see them, and
// notes for each column the first key that had one. Returns whether there was any. For all threads of the block.
template <typename Form>
__device__ __forceinline__ bool hide_values(uint4 *values, int *first_hidden) {
    constexpr int WORDS = Form::KEYS * Form::CHUNKS / Form::THREADS;
    bool any = false;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const uint4 eight = values[i * Form::THREADS + threadIdx.x];
        any |= Form::Product::not_finite(eight.x) | Form::Product::not_finite(eight.y) | Form::Product::not_finite(eight.z) |
               Form::Product::not_finite(eight.w);
    }
    if (!__syncthreads_or(any)) return false;
    for (int i = threadIdx.x; i < Form::DIM; i += Form::THREADS) first_hidden[i] = Form::KEYS;
    __syncthreads();
    uint16_t *elements = reinterpret_cast<uint16_t *>(values);
    for (int i = threadIdx.x; i < Form::KEYS * Form::DIM; i += Form::THREADS) {
        const int key = i / Form::DIM, column = i % Form::DIM;
        uint16_t &element = elements[place<Form>(key, column / 8) / 2 + column % 8];
        if (!Form::Product::not_finite(element)) continue;
        element = 0;
        atomicMin(&first_hidden[column], key);
    }
    __syncthreads();
    return true;
}

// Makes NaN of the sums of rows that do see a value which was hidden.
template <typename Form>
__device__ __forceinline__ void show_values(float (&sum)[Form::DIM / 8][4], const Softmax &softmax, const int *first_hidden,
                                            int first, int lane) {
#pragma unroll
    for (int n = 0; n < Form::DIM / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int hidden = first_hidden[n * 8 + lane % 4 * 2 + i % 2];
            if (hidden < Form::KEYS && first + hidden <= softmax.last[i / 2]) sum[n][i] = NAN;
        }
    }
}

// Where a block's rows lie: those of a group of heads, row after row.
struct HeadRows {
    int heads, first_head, group, rows;
    __device__ int row(int i) const { return i / group; }
    __device__ bool has(int i) const { return i < rows * group; }
    // Which of all rows of all heads it is.
    __device__ int64_t head_row(int i) const { return static_cast<int64_t>(row(i)) * heads + first_head + i % group; }
};

template <typename Form>
__device__ __forceinline__ void load_queries(uint4 *queries, const __nv_bfloat16 *from, const HeadRows &heads, int first) {
#pragma unroll
    for (int i = threadIdx.x; i < Form::ROWS * Form::CHUNKS; i += Form::THREADS) {
        const int row = i / Form::CHUNKS, chunk = i % Form::CHUNKS;
        const bool there = heads.has(first + row);
        const __nv_bfloat16 *address = from + (there ? heads.head_row(first + row) * Form::DIM + chunk * 8 : 0);
        copy_async(shared_address(queries) + place<Form>(row, chunk), address, there);
    }
}

// Writes a warp's 16 rows, through where its queries were.
template <typename Form>
__device__ __forceinline__ void store_rows(const float (&sum)[Form::DIM / 8][4], const float (&factor)[2], uint4 *rows,
                                           __nv_bfloat16 *out, const HeadRows &heads, int first, int lane) {
    unsigned char *bytes = reinterpret_cast<unsigned char *>(rows);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Form::DIM / 8; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<__nv_bfloat162 *>(bytes + place<Form>(lane / 4 + 8 * half, n) + lane % 4 * 4) =
                __floats2bfloat162_rn(sum[n][2 * half] * factor[half], sum[n][2 * half + 1] * factor[half]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * Form::CHUNKS; i += 32) {
        const int row = i / Form::CHUNKS, chunk = i % Form::CHUNKS;
        if (heads.has(first + row))
            reinterpret_cast<uint4 *>(out + heads.head_row(first + row) * Form::DIM)[chunk] =
                *reinterpret_cast<const uint4 *>(bytes + place<Form>(row, chunk));
    }
}

// Adds the parts of a cluster, in order: each block the parts of its share of the rows.
template <typename Form>
__device__ __forceinline__ void add_parts(const float (&sum)[Form::DIM / 8][4], const Softmax &softmax, float v_scale,
                                          PromptShared<Form> &shared, int part, int parts, __nv_bfloat16 *out,
                                          const HeadRows &heads, int first, int warp, int lane) {
    __syncthreads();  // all tiles have been read
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + lane / 4 + 8 * half;
        const float total = quad_sum(softmax.total[half]);
        if (lane % 4 == 0) {
            shared.top[row] = softmax.top[half] == -INFINITY ? -INFINITY : softmax.top[half] * softmax.scale[half];
            shared.total[row] = total;
        }
#pragma unroll
        for (int n = 0; n < Form::DIM / 8; n++)
            *reinterpret_cast<float2 *>(&shared.sums[row * Form::DIM + n * 8 + lane % 4 * 2]) =
                make_float2(sum[n][2 * half], sum[n][2 * half + 1]);
    }
    cluster_sync();
    const int share = Form::ROWS / parts;
    for (int row = part * share + warp; row < (part + 1) * share; row += Form::THREADS / 32) {
        if (!heads.has(first + row)) break;
        float top = -INFINITY, total = 0.0f, factor[MAX_PARTS];
        for (int from = 0; from < parts; from++) top = fmaxf(top, load_from_rank(&shared.top[row], from));
#pragma unroll
        for (int from = 0; from < MAX_PARTS; from++) {
            if (from == parts) break;
            factor[from] = power_of_two(load_from_rank(&shared.top[row], from) - (top == -INFINITY ? 0.0f : top));
            total += load_from_rank(&shared.total[row], from) * factor[from];
        }
        __nv_bfloat16 *to = out + heads.head_row(first + row) * Form::DIM;
#pragma unroll
        for (int i = lane; i < Form::DIM; i += 32) {
            float value = 0.0f;
#pragma unroll
            for (int from = 0; from < MAX_PARTS; from++) {
                if (from == parts) break;
                value += load_from_rank(&shared.sums[row * Form::DIM + i], from) * factor[from];
            }
            to[i] = __float2bfloat16_rn(value * (v_scale / total));
        }
    }
    cluster_sync();  // a block stays while others read its sums
}

// Blocks: tiles of rows, the last and longest first, of each KV head, of each part.
template <typename Form>
__global__ void __launch_bounds__(Form::THREADS, 1)
    prompt_kernel(const __grid_constant__ Pages<typename Form::Element> pages, const __grid_constant__ Queries call, int tiles,
                  int parts) {
    extern __shared__ __align__(1024) unsigned char memory[];
    PromptShared<Form> &shared = *reinterpret_cast<PromptShared<Form> *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % parts, head = blockIdx.x / parts % pages.kv_heads;
    const int group = call.heads / pages.kv_heads;
    const HeadRows heads = {call.heads, head * group, group, static_cast<int>(call.rows)};
    const int first = (tiles - 1 - static_cast<int>(blockIdx.x) / parts / pages.kv_heads) * Form::ROWS;
    wait_for_previous();
    let_next_start();

    // What the block's rows see, and this part of it, in tiles.
    const int position = *call.position;
    const int rows_end = static_cast<int>(min(static_cast<int64_t>(position) + call.rows, pages.window));
    const int seen = min(position + heads.row(first + Form::ROWS - 1) + 1, rows_end);
    const int key_tiles = (seen + Form::KEYS - 1) / Form::KEYS;
    const int begin = key_tiles * part / parts, end = key_tiles * (part + 1) / parts;

    const HeadPages<Form> head_pages(pages, head, rows_end);
    Fetch<Form> fetch;
    load_queries<Form>(shared.queries, call.queries, heads, first);
    if (begin < end) {
        fetch.start(shared.tiles[0][0], pages.keys, head_pages, begin * Form::KEYS);
        fetch.finish(shared.tiles[0][0]);
        fetch.start(shared.tiles[0][1], pages.values, head_pages, begin * Form::KEYS);
        fetch.finish(shared.tiles[0][1]);
    }
    wait_for_copies();
    __syncthreads();

    const int own = first + warp * 16;
    uint4 *own_queries = shared.queries + warp * 16 * Form::CHUNKS;
    Softmax softmax;
    const float k_scale = pages.k_scales == nullptr ? 1.0f : pages.k_scales[head];
    Form::Product::template prepare_queries<Form>(own_queries, softmax.scale, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        softmax.scale[half] *= k_scale * rsqrtf(static_cast<float>(Form::DIM)) * 1.44269504f;
        softmax.top[half] = -INFINITY;
        softmax.total[half] = 0.0f;
        softmax.last[half] = position + heads.row(own + lane / 4 + 8 * half);
    }
    float sum[Form::DIM / 8][4];
#pragma unroll
    for (auto &tile : sum) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;

    const int all_see = position + heads.row(first), own_see = position + heads.row(own + 15);
    for (int tile = begin; tile < end; tile++) {
        const int now = (tile - begin) % 2, next = 1 - now;
        const bool more = tile + 1 < end;
        const int first_key = tile * Form::KEYS;
        const bool last_tiles = first_key + Form::KEYS - 1 > all_see;
        const bool hidden = last_tiles && hide_values<Form>(shared.tiles[now][1], shared.first_hidden);
        const bool see = first_key <= own_see;

        float score[Form::KEYS / 8][4];
        if (more) fetch.start(shared.tiles[next][0], pages.keys, head_pages, first_key + Form::KEYS);
        if (see) multiply_keys<Form>(score, shared_address(own_queries), shared_address(shared.tiles[now][0]), lane);
        if (more) {
            fetch.finish(shared.tiles[next][0]);
            fetch.start(shared.tiles[next][1], pages.values, head_pages, first_key + Form::KEYS);
        }
        if (see) {
            if (last_tiles) hide_keys<Form>(score, softmax, first_key, lane);
            weigh<Form>(score, sum, softmax);
            multiply_values<Form>(sum, score, shared_address(shared.tiles[now][1]), lane);
            if (hidden) show_values<Form>(sum, softmax, shared.first_hidden, first_key, lane);
        }
        if (more) fetch.finish(shared.tiles[next][1]);
        wait_for_copies();
        __syncthreads();
    }

    const float v_scale = pages.v_scales == nullptr ? 1.0f : pages.v_scales[head];
    if (parts > 1) {
        add_parts<Form>(sum, softmax, v_scale, shared, part, parts, call.out, heads, first, warp, lane);
    } else {
        const float factor[2] = {v_scale / quad_sum(softmax.total[0]), v_scale / quad_sum(softmax.total[1])};
        store_rows<Form>(sum, factor, own_queries, call.out, heads, own, lane);
    }
}

// Rows and keys of a block: as many as shared memory holds, which is less on sm_120.
template <typename Element, int Dim>
using Large = Form<Element, Dim, 8>;
template <typename Element, int Dim>
using Small = Form<Element, Dim, 4>;

template <typename Form>
cudaError_t load() {
    return cudaFuncSetAttribute(prompt_kernel<Form>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(PromptShared<Form>));
}

// Of the current device.
struct DeviceLimits {
    int multiprocessors, shared, clusters;
    cudaError_t read() {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        const auto ask = [&](int *value, cudaDeviceAttr what) {
            if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
        };
        ask(&multiprocessors, cudaDevAttrMultiProcessorCount);
        ask(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        ask(&clusters, cudaDevAttrClusterLaunch);
        return error;
    }
};

template <typename Form>
cudaError_t launch(const Pages<typename Form::Element> &pages, const Queries &queries, const DeviceLimits &device, bool overlap,
                   cudaStream_t stream) {
    const int64_t group = queries.heads / pages.kv_heads;
    const int64_t tiles = (queries.rows * group + Form::ROWS - 1) / Form::ROWS, blocks = tiles * pages.kv_heads;
    int parts = 1;
    while (device.clusters && parts < MAX_PARTS && blocks * parts * 2 <= device.multiprocessors) parts *= 2;
    return launch_kernel({.blocks = blocks * parts,
                          .threads = Form::THREADS,
                          .cluster = parts,
                          .shared = sizeof(PromptShared<Form>),
                          .overlap = overlap,
                          .stream = stream},
                         prompt_kernel<Form>, pages, queries, static_cast<int>(tiles), parts);
}

// Calls `with` with the form for a head size.
template <typename Element, int Dim, typename With>
cudaError_t with_form(const DeviceLimits &device, const With &with) {
    const bool large = sizeof(PromptShared<Large<Element, Dim>>) <= static_cast<size_t>(device.shared);
    return large ? with(Large<Element, Dim>()) : with(Small<Element, Dim>());
}

}  // namespace
}  // namespace attention::flash

namespace attention {
namespace {

// Loads the kernels into the current context and gives them their shared memory: once, before `prompt`.
template <typename Element>
cudaError_t load_prompt() {
    flash::DeviceLimits device;
    cudaError_t error = device.read();
    const auto load = [](auto form) { return flash::load<decltype(form)>(); };
    if (error == cudaSuccess) error = flash::with_form<Element, 64>(device, load);
    if (error == cudaSuccess) error = flash::with_form<Element, 128>(device, load);
    return error == cudaSuccess ? flash::with_form<Element, 256>(device, load) : error;
}

// Queues the attention of any number of rows.
template <typename Element>
cudaError_t prompt(const Pages<Element> &pages, const Queries &queries, bool overlap, cudaStream_t stream) {
    if (queries.rows < 0 || pages.kv_heads < 1 || queries.heads < 1 || queries.heads % pages.kv_heads != 0)
        return cudaErrorInvalidValue;
    if (queries.rows == 0) return cudaSuccess;
    flash::DeviceLimits device;
    const cudaError_t error = device.read();
    if (error != cudaSuccess) return error;
    const auto launch = [&](auto form) { return flash::launch<decltype(form)>(pages, queries, device, overlap, stream); };
    if (queries.head_dim == 64) return flash::with_form<Element, 64>(device, launch);
    if (queries.head_dim == 128) return flash::with_form<Element, 128>(device, launch);
    return queries.head_dim == 256 ? flash::with_form<Element, 256>(device, launch) : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace attention
