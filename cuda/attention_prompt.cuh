// Attention of a prompt: many rows of queries over a paged store, in one pass with an online softmax.
//
// The queries of a group of heads that share keys and values stand together on the row side of the products, row after row, so
// that a tile of keys is fetched once for all of them. Where there are too few blocks for the device, a cluster of blocks takes
// the same rows, each block a part of the keys, and adds up in fixed order. Launches depend on the number of rows alone: the
// position is read on the device.
//
// Scores are FP32 sums, the softmax is FP32, and weights are rounded to the type of the products (`attention_operands.cuh`) before
// they meet the values. Scores of keys that a row does not see become -inf. Values past the last row are zeros instead of what
// lies there; those of later rows of the same call may be infinite or NaN, and `hide_values` keeps them from the rows before.
//
// There are two forms: warpgroup products where there are any (sm_90a, `attention_hopper.cuh`), and `mma.sync` elsewhere, here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda_runtime.h>

#include "attention.cuh"
#include "attention_hopper.cuh"
#include "attention_operands.cuh"
#include "attention_softmax.cuh"
#include "attention_tiles.cuh"
#include "cluster.cuh"
#include "launch.cuh"

namespace attention::flash {
namespace {

// A block has `Warps` * 16 queries, 16 a warp, and half as many keys at a time.
template <typename Element_, int Dim, int Warps>
struct WarpForm {
    using Element = Element_;
    using Product = flash::Product<Element>;
    static constexpr int DIM = Dim, THREADS = 32 * Warps, ROWS = 16 * Warps, KEYS = 8 * Warps;
    static constexpr int CHUNKS = Dim / 8, ROW_BYTES = Dim * 2, ROW_STRIDE = ROW_BYTES;

    // The byte at which chunk `chunk` of 8 elements of a row lies. Chunks change places by row, so that the same chunk of 8 rows
    // meets all banks. 8 rows on it is the same plus their bytes; chunk `c ^ d` is at the byte ^ 16 d, of memory aligned to a row.
    __device__ static constexpr uint32_t place(int row, int chunk) { return row * ROW_BYTES + (chunk ^ row % 8) * 16; }
    __device__ static constexpr uint32_t query_place(int row, int chunk) { return place(row, chunk); }

    struct alignas(1024) Shared {
        uint4 queries[ROWS * CHUNKS];
        union {
            uint4 tiles[2][2][KEYS * CHUNKS];  // keys and values, one tile being multiplied and one on its way
            Sums<ROWS, DIM> sums;
        };
        Hidden hidden;
    };
};

// The scores of a warp's 16 queries and a tile of keys.
template <typename Form>
__device__ __forceinline__ void multiply_keys(float (&score)[Form::KEYS / 8][4], uint32_t queries, int own, uint32_t keys,
                                              int lane) {
    clear(score);
    const uint32_t query = queries + Form::place(own + lane % 16, lane / 16);
    const uint32_t key = keys + Form::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
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
    const uint32_t value = values + Form::place(lane % 16, lane / 16);
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

// Hides what is not finite in a tile of values; whether there was any. For all threads of the block.
template <typename Form>
__device__ __forceinline__ bool hide_tile(uint4 *values, const Share<Form, Form::THREADS> &share, Hidden &hidden) {
    for (int i = threadIdx.x; i < Form::DIM; i += Form::THREADS) hidden.first[i] = INT32_MAX;
    if (threadIdx.x == 0) hidden.any = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < share.CHUNKS; i++)
        hide_values<Form>(at_byte(values, share.place(i)), share.key(i), share.chunk, hidden);
    __syncthreads();
    return hidden.any != 0;
}

// Blocks: tiles of rows, the last and longest first, of each KV head, of each part.
template <typename Form>
__global__ void __launch_bounds__(Form::THREADS, 1)
    warp_prompt(const __grid_constant__ Pages<typename Form::Element> pages, const __grid_constant__ Queries call, int tiles,
                int parts) {
    extern __shared__ __align__(1024) unsigned char memory[];
    typename Form::Shared &shared = *reinterpret_cast<typename Form::Shared *>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Work<Form> work(pages, call, tiles, parts);
    wait_for_previous();
    let_next_start();
    const Keys<Form> keys(pages, call, work);
    const HeadPages<Form> head_pages(pages, work.head, keys.rows_end);
    const Share<Form, Form::THREADS> share(threadIdx.x);
    Fetch<Form, Form::THREADS> fetch;
    load_queries<Form>(shared.queries, call.queries, work.heads, work.first);
    if (keys.begin < keys.end) {
        fetch.start(shared.tiles[0][0], pages.keys, head_pages, keys.begin * Form::KEYS, share);
        fetch.finish(shared.tiles[0][0], share);
        fetch.start(shared.tiles[0][1], pages.values, head_pages, keys.begin * Form::KEYS, share);
        fetch.finish(shared.tiles[0][1], share);
    }
    wait_for_copies();
    __syncthreads();

    const int own = warp * 16;
    Softmax softmax = keys.softmax(pages, work, own, lane);
    float scale[2];
    prepare_queries<Form>(shared.queries, own, scale, lane);
    softmax.scale[0] *= scale[0], softmax.scale[1] *= scale[1];
    __syncwarp();
    float sum[Form::DIM / 8][4];
    clear(sum);

    const int own_see = keys.position + work.heads.row(work.first + own + 15);
    for (int tile = keys.begin; tile < keys.end; tile++) {
        const int now = (tile - keys.begin) % 2, next = 1 - now, first_key = tile * Form::KEYS;
        const bool more = tile + 1 < keys.end, last_tiles = keys.hides(tile);
        const bool hidden = last_tiles && hide_tile<Form>(shared.tiles[now][1], share, shared.hidden);
        const bool see = first_key <= own_see;

        float score[Form::KEYS / 8][4];
        if (more) fetch.start(shared.tiles[next][0], pages.keys, head_pages, first_key + Form::KEYS, share);
        if (see) multiply_keys<Form>(score, shared_address(shared.queries), own, shared_address(shared.tiles[now][0]), lane);
        if (more) {
            fetch.finish(shared.tiles[next][0], share);
            fetch.start(shared.tiles[next][1], pages.values, head_pages, first_key + Form::KEYS, share);
        }
        if (see) {
            if (last_tiles) hide_keys(score, softmax, first_key, lane);
            rescale(sum, weigh(score, softmax));
            multiply_values<Form>(sum, score, shared_address(shared.tiles[now][1]), lane);
            if (hidden) show_values(sum, softmax, shared.hidden, first_key, lane);
        }
        if (more) fetch.finish(shared.tiles[next][1], share);
        wait_for_copies();
        __syncthreads();
    }

    const float v_scale = pages.v_scales == nullptr ? 1.0f : pages.v_scales[work.head];
    if (parts > 1) {
        put_sums(sum, softmax, shared.sums, own, lane);
        cluster_sync();
        add_sums(shared.sums, work.part, parts, v_scale, call.out, work.heads, work.first, warp, Form::THREADS / 32, lane);
        cluster_sync();  // a block stays while others read its sums
    } else {
        const float factor[2] = {v_scale / quad_sum(softmax.total[0]), v_scale / quad_sum(softmax.total[1])};
        store_rows<Form>(sum, factor, shared.queries, own, call.out, work.heads, work.first + own, lane);
    }
}

// Rows and keys of a block: as many as shared memory holds, which is less on sm_120.
template <typename Element, int Dim>
using Large = WarpForm<Element, Dim, 8>;
template <typename Element, int Dim>
using Small = WarpForm<Element, Dim, 4>;

// Of the current device.
struct DeviceLimits {
    int multiprocessors, shared, major, clusters;
    cudaError_t read() {
        int device = 0;
        cudaError_t error = cudaGetDevice(&device);
        const auto ask = [&](int *value, cudaDeviceAttr what) {
            if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
        };
        ask(&multiprocessors, cudaDevAttrMultiProcessorCount);
        ask(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
        ask(&major, cudaDevAttrComputeCapabilityMajor);
        ask(&clusters, cudaDevAttrClusterLaunch);
        return error;
    }
};

// Calls `with` with the form for a head size, and its kernel.
template <typename Element, int Dim, typename With>
cudaError_t with_form(const DeviceLimits &device, const With &with) {
    using Hopper = HopperForm<Element, Dim>;
    if (device.major == 9) return with(Hopper(), hopper_prompt<Hopper>);
    if (sizeof(typename Large<Element, Dim>::Shared) <= static_cast<size_t>(device.shared))
        return with(Large<Element, Dim>(), warp_prompt<Large<Element, Dim>>);
    return with(Small<Element, Dim>(), warp_prompt<Small<Element, Dim>>);
}

template <typename Form, typename Kernel>
cudaError_t launch(Kernel kernel, const Pages<typename Form::Element> &pages, const Queries &queries, const DeviceLimits &device,
                   bool overlap, cudaStream_t stream) {
    const int64_t group = queries.heads / pages.kv_heads;
    const int64_t tiles = (queries.rows * group + Form::ROWS - 1) / Form::ROWS, blocks = tiles * pages.kv_heads;
    int parts = 1;
    while (device.clusters && parts < MAX_PARTS && blocks * parts * 2 <= device.multiprocessors) parts *= 2;
    return launch_kernel({.blocks = blocks * parts,
                          .threads = Form::THREADS,
                          .cluster = parts,
                          .shared = sizeof(typename Form::Shared),
                          .overlap = overlap,
                          .stream = stream},
                         kernel, pages, queries, static_cast<int>(tiles), parts);
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
    const auto load = [](auto form, auto kernel) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(typename decltype(form)::Shared));
    };
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
    const auto launch = [&](auto form, auto kernel) {
        return flash::launch<decltype(form)>(kernel, pages, queries, device, overlap, stream);
    };
    if (queries.head_dim == 64) return flash::with_form<Element, 64>(device, launch);
    if (queries.head_dim == 128) return flash::with_form<Element, 128>(device, launch);
    return queries.head_dim == 256 ? flash::with_form<Element, 256>(device, launch) : cudaErrorInvalidValue;
}

}  // namespace
}  // namespace attention
