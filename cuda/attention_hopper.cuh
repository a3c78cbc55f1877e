// Attention of a prompt by warpgroup products (sm_90a).
//
// A block has 128 rows of queries. Two warpgroups multiply, 64 rows each; a third fetches keys and values, 64 at a time, in the
// products' type and the layout that they read. While a warpgroup makes weights of one tile's scores, its products of the
// tile before and its values are under way.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "attention.cuh"
#include "attention_operands.cuh"
#include "attention_softmax.cuh"
#include "attention_tiles.cuh"
#include "attention_wgmma.cuh"
#include "cluster.cuh"
#include "launch.cuh"
#include "mbarrier.cuh"

namespace attention::flash {
namespace {

template <typename Element_, int Dim>
struct HopperForm {
    using Element = Element_;
    using Product = flash::Product<Element>;
    static constexpr int DIM = Dim, WARPGROUPS = 2, ROWS = WARPGROUPS * TILE_ROWS, KEYS = TILE_ROWS, STAGES = 2;
    static constexpr int THREADS = (WARPGROUPS + 1) * 128;
    static constexpr int CHUNKS = Dim / 8, TILE = TILE_ROWS * CHUNKS, ROW_STRIDE = 128;
    // Registers of a thread. A multiprocessor has 504 for the three in the same place of their warpgroups.
    static constexpr int FETCH_REGISTERS = 40, MULTIPLY_REGISTERS = 232;

    // The byte at which chunk `chunk` of 8 elements of a tile's row lies.
    __device__ static constexpr uint32_t place(int row, int chunk) {
        return chunk / 8 * BLOCK_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }
    __device__ static constexpr uint32_t query_place(int row, int chunk) {
        return row / TILE_ROWS * TILE * 16 + place(row % TILE_ROWS, chunk);
    }

    struct alignas(1024) Shared {
        uint4 queries[WARPGROUPS][TILE];
        union {
            struct {
                uint4 tiles[2][STAGES][TILE];        // of keys and of values
                uint2 codes[2][Product::HALF ? TILE : 1];  // of E4M3, before they are converted
            };
            Sums<ROWS, DIM> sums;
        };
        Hidden hidden[STAGES];
        uint64_t full[2][STAGES], empty[2][STAGES];
    };
};

enum Kind { KEYS, VALUES };

#if HAS_WGMMA

// Makes this thread's writes to shared memory visible to products.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// A barrier of the 128 threads of a warpgroup.
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
    asm volatile("barrier.cta.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// The two warpgroups that multiply start their products in turns, so that one makes weights while the other's are under way.
__device__ __forceinline__ void wait_for_turn(int warpgroup) {
    asm volatile("barrier.cta.sync %0, 256;" ::"r"(4 + warpgroup) : "memory");
}
__device__ __forceinline__ void pass_turn(int warpgroup) {
    asm volatile("barrier.cta.arrive %0, 256;" ::"r"(4 + 1 - warpgroup) : "memory");
}

// Hides what is not finite in a tile of values that this warpgroup has just fetched.
template <typename Form>
__device__ __forceinline__ void hide_tile(uint4 *values, const Share<Form, 128> &share, Hidden &hidden, int warpgroup,
                                          int thread) {
    for (int i = thread; i < Form::DIM; i += 128) hidden.first[i] = INT32_MAX;
    if (thread == 0) hidden.any = 0;
    warpgroup_sync(warpgroup);
#pragma unroll 1
    for (int i = 0; i < share.CHUNKS; i++)
        hide_values<Form>(at_byte(values, share.place(i)), share.key(i), share.chunk, hidden);
}

// Fetches tiles in the order in which they are multiplied: a tile's keys, then the values of the tile before. The copies of one
// are under way while the one before is waited for, and converted.
template <typename Form>
__device__ __forceinline__ void fetch_tiles(typename Form::Shared &shared, const Pages<typename Form::Element> &pages,
                                            const HeadPages<Form> &head_pages, const Keys<Form> &keys, int warpgroup, int thread) {
    constexpr bool CONVERTS = Form::Product::HALF;
    const Share<Form, 128> share(thread);
    struct Tile {
        Kind kind;
        int i, slot;
        __device__ int stage() const { return i % Form::STAGES; }
    };
    const auto wait_for_room = [&](const Tile &tile) {
        mbarrier_wait(&shared.empty[tile.kind][tile.stage()], tile.i / Form::STAGES % 2 ^ 1);
    };
    const auto start = [&](const Tile &tile) {
        if (!CONVERTS) wait_for_room(tile);
        const typename Form::Element *from = tile.kind == KEYS ? pages.keys : pages.values;
        const uint32_t to = shared_address(shared.tiles[tile.kind][tile.stage()]);
        const uint32_t codes = shared_address(shared.codes[tile.slot]);
        const int first = (keys.begin + tile.i) * Form::KEYS;
        share.each(head_pages, first, [&](int i, int64_t element, bool there) {
            if (CONVERTS)
                copy_eight_async(codes + (i * 128 + thread) * 8, from + element, there);
            else
                copy_async(to + share.place(i), from + element, there);
        });
        close_copies();
    };
    const auto finish = [&](const Tile &tile) {
        uint4 *to = shared.tiles[tile.kind][tile.stage()];
        if (CONVERTS) {
            wait_for_room(tile);
            // No load passes a store before it, so some come first.
            constexpr int BATCH = 4;
#pragma unroll
            for (int from = 0; from < share.CHUNKS; from += BATCH) {
                uint2 codes[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) codes[i] = shared.codes[tile.slot][(from + i) * 128 + thread];
#pragma unroll
                for (int i = 0; i < BATCH; i++) *at_byte(to, share.place(from + i)) = fp16x8(codes[i]);
            }
        }
        if (tile.kind == VALUES && keys.hides(keys.begin + tile.i))
            hide_tile<Form>(to, share, shared.hidden[tile.stage()], warpgroup, thread);
        publish_to_products();
        arrive(&shared.full[tile.kind][tile.stage()]);
    };

    const int count = keys.end - keys.begin;
    if (count == 0) return;
    Tile before = {KEYS, 0, 0};
    start(before);
    const auto next = [&](Kind kind, int i) {
        const Tile tile = {kind, i, 1 - before.slot};
        start(tile);
        wait_for_earlier_copies();
        finish(before);
        before = tile;
    };
    for (int i = 1; i < count; i++) {
        next(KEYS, i);
        next(VALUES, i - 1);
    }
    next(VALUES, count - 1);
    wait_for_copies();
    finish(before);
}

// A warp's share of a warpgroup's 64 rows, and the products that it has under way. Tiles are numbered from the block's first.
template <typename Form>
struct Multiply {
    static constexpr bool HALF = Form::Product::HALF;
    typename Form::Shared &shared;
    const Keys<Form> &keys;
    const uint64_t queries;
    const int lane, warpgroup;
    Softmax softmax;
    float score[Form::KEYS / 8][4], sum[Form::DIM / 8][4];
    uint32_t weights[Form::KEYS / 16][4];

    __device__ Multiply(typename Form::Shared &memory, const Keys<Form> &of, int of_warpgroup, int of_warp, const Softmax &start)
        : shared(memory), keys(of), queries(tile_descriptor(memory.queries[of_warpgroup])), lane(of_warp),
          warpgroup(of_warpgroup), softmax(start) {}

    __device__ __forceinline__ void wait(Kind kind, int i) {
        mbarrier_wait(&shared.full[kind][i % Form::STAGES], i / Form::STAGES % 2);
    }
    __device__ __forceinline__ void release(Kind kind, int i) {
        if (lane == 0) arrive(&shared.empty[kind][i % Form::STAGES]);
    }
    __device__ __forceinline__ int first_key(int i) const { return (keys.begin + i) * Form::KEYS; }

    __device__ __forceinline__ void start_scores(int i) {
        const uint64_t tile = tile_descriptor(shared.tiles[KEYS][i % Form::STAGES]);
        clear(score);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Form::DIM / 16; step++)
            wgmma_keys<HALF>(score, at_dimensions(queries, step), at_dimensions(tile, step));
        wgmma_commit();
    }
    __device__ __forceinline__ void start_values(int i) {
        wait(VALUES, i);
        const uint64_t tile = tile_descriptor(shared.tiles[VALUES][i % Form::STAGES]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < Form::KEYS / 16; step++) wgmma_values<HALF>(sum, weights[step], at_rows(tile, step));
        wgmma_commit();
    }

    // Once at most `Pending` groups are under way: what earlier sums are to be multiplied by.
    template <int Pending>
    __device__ __forceinline__ Keep end_scores(int i) {
        wgmma_wait<Pending>();
        hold(score);
        release(KEYS, i);
        if (keys.hides(keys.begin + i)) hide_keys(score, softmax, first_key(i), lane);
        const Keep keep = weigh(score, softmax);
        hold(score);
        return keep;
    }
    __device__ __forceinline__ void end_values(int i) {
        wgmma_wait<0>();
        hold(sum);
        const Hidden &hidden = shared.hidden[i % Form::STAGES];
        if (keys.hides(keys.begin + i) && hidden.any) show_values(sum, softmax, hidden, first_key(i), lane);
        release(VALUES, i);
    }
    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int step = 0; step < Form::KEYS / 16; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                weights[step][i] =
                    Form::Product::pack(score[2 * step + i / 2][i % 2 * 2], score[2 * step + i / 2][i % 2 * 2 + 1]);
        }
    }

    __device__ __forceinline__ void run() {
        const int count = keys.end - keys.begin;
        clear(sum);
        if (count == 0) return;
        if (warpgroup == 1 && count > 1) pass_turn(warpgroup);
        wait(KEYS, 0);
        start_scores(0);
        end_scores<0>(0);
        if (count > 1) wait(KEYS, 1);
        pack_weights();
        for (int i = 1; i < count; i++) {
            wait_for_turn(warpgroup);
            start_scores(i);
            start_values(i - 1);
            if (warpgroup == 0 || i + 1 < count) pass_turn(warpgroup);
            const Keep keep = end_scores<1>(i);
            // Weights are made before the products of values are waited for: instructions do not move across this loop, where
            // without it the assembler has the latter wait first.
            if (i + 1 < count) wait(KEYS, i + 1);
            end_values(i - 1);
            rescale(sum, keep);
            pack_weights();
        }
        start_values(count - 1);
        end_values(count - 1);
    }
};

#endif

template <typename Form>
__global__ void __launch_bounds__(Form::THREADS, 1)
    hopper_prompt(const __grid_constant__ Pages<typename Form::Element> pages, const __grid_constant__ Queries call, int tiles,
                  int parts) {
#if HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char memory[];
    typename Form::Shared &shared = *reinterpret_cast<typename Form::Shared *>(memory);
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const Work<Form> work(pages, call, tiles, parts);
    if (threadIdx.x < 2 * Form::STAGES) {
        mbarrier_init(&shared.full[0][threadIdx.x], 128);
        mbarrier_init(&shared.empty[0][threadIdx.x], Form::WARPGROUPS * 4);
        mbarrier_init_fence();
    }
    wait_for_previous();
    let_next_start();
    load_queries<Form>(shared.queries[0], call.queries, work.heads, work.first);
    const Keys<Form> keys(pages, call, work);
    wait_for_copies();
    publish_to_products();
    __syncthreads();

    if (warpgroup == Form::WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Form::FETCH_REGISTERS));
        const HeadPages<Form> head_pages(pages, work.head, keys.rows_end);
        fetch_tiles<Form>(shared, pages, head_pages, keys, warpgroup, thread);
        if (parts > 1) {  // as below
            __syncthreads();
            cluster_sync();
            cluster_sync();
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Form::MULTIPLY_REGISTERS));
        const int of_warpgroup = thread / 32 * 16, own = warpgroup * TILE_ROWS + of_warpgroup;
        Multiply<Form> multiply(shared, keys, warpgroup, lane, keys.softmax(pages, work, own, lane));
        float scale[2];
        prepare_queries<Form>(shared.queries[warpgroup], of_warpgroup, scale, lane);
        multiply.softmax.scale[0] *= scale[0], multiply.softmax.scale[1] *= scale[1];
        publish_to_products();
        warpgroup_sync(warpgroup);
        multiply.run();

        const Softmax &softmax = multiply.softmax;
        const float v_scale = pages.v_scales == nullptr ? 1.0f : pages.v_scales[work.head];
        if (parts > 1) {
            __syncthreads();  // all tiles have been read
            put_sums(multiply.sum, softmax, shared.sums, own, lane);
            cluster_sync();
            add_sums(shared.sums, work.part, parts, v_scale, call.out, work.heads, work.first, threadIdx.x / 32,
                     Form::WARPGROUPS * 4, lane);
            cluster_sync();  // a block stays while others read its sums
        } else {
            const float factor[2] = {v_scale / quad_sum(softmax.total[0]), v_scale / quad_sum(softmax.total[1])};
            store_rows<Form>(multiply.sum, factor, shared.queries[warpgroup], of_warpgroup, call.out, work.heads,
                             work.first + own, lane);
        }
    }
#endif
}

}  // namespace
}  // namespace attention::flash
