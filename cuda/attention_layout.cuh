// Where a block of the band has what in shared memory, and how keys and values come there.
//
// Rows are in chunks of 16 bytes, and chunks of neighbouring rows change places so that the lanes of a load meet all banks.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "attention_products.cuh"

namespace attention::band {
namespace {

constexpr int TILE = ATOM_K;           // positions
constexpr int WARPS = 4;               // each has 16 positions of a tile's scores, and a quarter of head_dim of the outputs
constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = ATOM_COLUMNS;  // of a column tile

template <typename Element_, int HEAD_DIM_, int TILES_>
struct Layout {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int TILES = TILES_;                    // column tiles
    static constexpr int ROW = HEAD_DIM * sizeof(Element);  // bytes of a position
    static constexpr int CHUNKS = ROW / 16;
    static constexpr int STEPS = 4 / sizeof(Element);       // tensor-core steps of the four chunks that four lanes have of a key
    static constexpr int TILE_BYTES = TILE * ROW;
    static constexpr int STAGES = 2;                        // of keys, and of values

    static constexpr int KEYS = 0;
    static constexpr int VALUES = KEYS + STAGES * TILE_BYTES;
    static constexpr int QUERIES = VALUES + STAGES * TILE_BYTES;                          // atoms [head_dim / 64, TILES]
    static constexpr int WEIGHTS = QUERIES + HEAD_DIM / ATOM_K * TILES * ATOM_BYTES;      // atoms [TILES]
    static constexpr int FACTORS = WEIGHTS + TILES * ATOM_BYTES;                          // FP32 [columns]
    static constexpr int PER_WARP = FACTORS + TILES * COLUMNS * 4;                        // FP32 [WARPS, columns]
    static constexpr int BYTES = PER_WARP + WARPS * TILES * COLUMNS * 4;

    // A lane reads chunk 4s + t of position g.
    __device__ static int key(int position, int chunk) {
        return position * ROW + (chunk ^ ((position & 1) << 2 & (CHUNKS - 1))) * 16;
    }
    // A lane reads its run of positions 2t, 2t + 1, 2t + 8 and 2t + 9.
    __device__ static int value(int position, int chunk) {
        return position * ROW + (chunk ^ ((position >> 1 & 3) << (CHUNKS > 4))) * 16;
    }
    // The atoms of step `step` of the scores, which is step `step` % 4 of theirs.
    __device__ static int query_atoms(int step) { return QUERIES + step / 4 * TILES * ATOM_BYTES; }
    // Pair `pair` of the eight elements of a query from 8 * `eighth` on: k 2t and 2t + 1, or 8 more, of the step whose keys they
    // meet.
    __device__ static int query(int column, int eighth, int pair) {
        constexpr int CHUNK_ELEMENTS = 16 / sizeof(Element);
        const int t = eighth * 8 / CHUNK_ELEMENTS % 4;
        const int step = eighth * 8 / (4 * CHUNK_ELEMENTS) * STEPS + eighth * 8 % CHUNK_ELEMENTS / 4 + pair / 2;
        return query_atoms(step) + column / COLUMNS * ATOM_BYTES + in_atom(column % COLUMNS, step % 4 * 2 + pair % 2) + 4 * t;
    }
    __device__ static int weight(int column, int position) {
        return WEIGHTS + column / COLUMNS * ATOM_BYTES + in_atom(column % COLUMNS, position / 8) + position % 8 * 2;
    }
};

// 16 bytes into shared memory, or as many zeros; kept out of L1.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all copies of this thread but those of the last group.
__device__ __forceinline__ void wait_for_earlier_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// The keys and values of one split of one head, on their way into shared memory.
template <typename Layout>
struct Reader {
    using Element = typename Layout::Element;
    static constexpr int ROWS = THREADS / Layout::CHUNKS;  // that the block copies at once
    static constexpr int COPIES = TILE / ROWS;
    // A page has 16 positions at least, so a thread's copies are of few pages.
    static constexpr int LOOKUPS = COPIES < TILE / 16 ? COPIES : TILE / 16;

    const Pages<Element> &pages;
    uint32_t shared;
    int64_t start;    // of the split
    int64_t seq_len;  // positions that are there for any row
    int tiles;        // of the split
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

    __device__ void copy_keys(int tile, const Lookups &lookups) const {
        copy(pages.keys, tile, lookups, Layout::KEYS, Layout::key);
    }
    __device__ void copy_values(int tile, const Lookups &lookups) const {
        copy(pages.values, tile, lookups, Layout::VALUES, Layout::value);
    }

    // Positions that are not there become zeros.
    template <typename Place>
    __device__ void copy(const Element *from, int tile, const Lookups &lookups, int stages, Place place) const {
        constexpr int OF_PAGE = COPIES / LOOKUPS;  // copies that are surely of one page
        if (tile >= tiles) return;
        const int64_t first = start + tile * TILE + row;
        const bool whole = start + (tile + 1) * TILE <= seq_len;
        const uint32_t to = shared + stages + tile % Layout::STAGES * Layout::TILE_BYTES;
        // The order of chunks repeats every eight rows.
        const uint32_t places[2] = {to + place(row, chunk), to + place(row + ROWS, chunk)};
#pragma unroll
        for (int lookup = 0; lookup < LOOKUPS; lookup++) {
            const int64_t position = first + lookup * OF_PAGE * ROWS;
            const int64_t page = static_cast<int64_t>(lookups.page[lookup]) * pages.kv_heads + head;
            const int64_t index = (page << page_shift) + (position & (pages.page_size - 1));
            const char *base = reinterpret_cast<const char *>(from) + index * Layout::ROW + chunk * 16;
#pragma unroll
            for (int i = 0; i < OF_PAGE; i++) {
                const int copy = lookup * OF_PAGE + i;
                const bool there = whole || position + i * ROWS < seq_len;
                copy_async(places[copy % 2] + copy / 2 * 2 * ROWS * Layout::ROW,
                           there ? base + i * ROWS * Layout::ROW : reinterpret_cast<const char *>(from), there);
            }
        }
    }
};

}  // namespace
}  // namespace attention::band
