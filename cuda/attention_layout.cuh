// Where a block of the band has what in shared memory, and how keys and values come there.
//
// Rows are in chunks of 16 bytes, and chunks of neighbouring rows change places so that the lanes of a load meet all banks.
#pragma once

#include <cstdint>

#include "attention.cuh"
#include "attention_products.cuh"
#include "attention_ring.cuh"
#include "attention_splits.cuh"

namespace attention::band {
namespace {

constexpr int COLUMNS = ATOM_COLUMNS;  // of a column tile
static_assert(TILE == ATOM_K, "weights of a tile are one atom deep");

template <typename Element_, int HEAD_DIM_, int TILES_>
struct Layout {
    using Element = Element_;
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int TILES = TILES_;                    // column tiles
    static constexpr int ROW = HEAD_DIM * sizeof(Element);  // bytes of a position
    static constexpr int CHUNKS = ROW / 16;
    static constexpr int STEPS = 4 / sizeof(Element);       // tensor-core steps of the four chunks that four lanes have of a key
    static constexpr int TILE_BYTES = TILE * ROW;

    static constexpr int FACTORS = 0;                                             // FP32 [columns]
    static constexpr int PER_WARP = FACTORS + TILES * COLUMNS * 4;                // FP32 [TEAMS, WARPS, columns]
    static constexpr int BASES = PER_WARP + TEAMS * WARPS * TILES * COLUMNS * 4;  // FP32 [TEAMS, columns]
    static constexpr int BARRIERS = BASES + TEAMS * TILES * COLUMNS * 4;
    // Atoms [head_dim / 64, TILES].
    static constexpr int QUERIES = (BARRIERS + static_cast<int>(sizeof(Barriers)) + 1023) / 1024 * 1024;
    static constexpr int WEIGHTS = QUERIES + HEAD_DIM / ATOM_K * TILES * ATOM_BYTES;  // atoms [TEAMS, 2, TILES]
    static constexpr int SLOTS = WEIGHTS + TEAMS * 2 * TILES * ATOM_BYTES;
    // The sums of the teams, where all from the queries on is no longer needed: FP32 [TEAMS, columns, head_dim].
    static constexpr int SUMS = QUERIES;
    static constexpr int SUMS_BYTES = TEAMS * TILES * COLUMNS * HEAD_DIM * 4;
    static constexpr int MIN_SLOTS = SUMS_BYTES <= SLOTS - SUMS + 3 * TILE_BYTES ? 3 : 4;
    static_assert(SUMS_BYTES <= SLOTS - SUMS + MIN_SLOTS * TILE_BYTES, "the sums fit");

    // A lane reads chunk 4s + t of position g.
    __device__ static int key(int position, int chunk) {
        return position * ROW + (chunk ^ ((position & 1) << 2 & (CHUNKS - 1))) * 16;
    }
    // A lane reads its run of positions 2t, 2t + 1, 2t + 8 and 2t + 9.
    __device__ static int value(int position, int chunk) {
        return position * ROW + (chunk ^ ((position >> 1 & 3) << (CHUNKS > 4))) * 16;
    }
    // Those of two tiles, in turns.
    __device__ static char *weights(char *shared, int team, int turn) {
        return shared + WEIGHTS + (2 * team + turn) * TILES * ATOM_BYTES;
    }
    __device__ static float *per_warp(char *shared, int team) {
        return reinterpret_cast<float *>(shared + PER_WARP) + team * WARPS * TILES * COLUMNS;
    }
    // Lanes that write four elements each of two columns a tile meet all banks.
    __device__ static int sum(int team, int column, int d) {
        const int turn = (column >> 1 & 1) | (column >> 2 & 1) << 2;
        return SUMS + ((team * TILES * COLUMNS + column) * HEAD_DIM + (d / 4 ^ turn) * 4 + d % 4) * 4;
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
    // From the weights of a team on.
    __device__ static int weight(int column, int position) {
        return column / COLUMNS * ATOM_BYTES + in_atom(column % COLUMNS, position / 8) + position % 8 * 2;
    }
};

// 16 bytes into shared memory, or as many zeros; kept out of L1.
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// The keys and values of one split of one head, on their way into shared memory.
template <typename Layout>
struct Reader {
    using Element = typename Layout::Element;
    static constexpr int ROWS = TEAM_THREADS / Layout::CHUNKS;  // that are copied at once
    static constexpr int COPIES = TILE / ROWS;
    // A page has 16 positions at least, so a thread's copies are of few pages.
    static constexpr int LOOKUPS = COPIES < TILE / 16 ? COPIES : TILE / 16;

    const Pages<Element> &pages;
    uint32_t slots;   // in shared memory
    int head;
    int64_t start;    // of the split
    int64_t end;      // of the positions that are there for any row
    int tiles;        // of the split
    int page_shift = 31 - __clz(pages.page_size);
    int row = threadIdx.x % TEAM_THREADS / Layout::CHUNKS;
    int chunk = threadIdx.x % Layout::CHUNKS;

    struct Lookups {
        int32_t page[LOOKUPS];
    };

    __device__ Lookups look_up(int tile) const {
        Lookups lookups;
#pragma unroll
        for (int i = 0; i < LOOKUPS; i++) {
            if (i > 0 && pages.page_size >= TILE) {
                lookups.page[i] = lookups.page[0];
                continue;
            }
            const int64_t position = start + tile * TILE + i * (TILE / LOOKUPS) + row;
            const int run = static_cast<int>(position >> page_shift);
            lookups.page[i] = pages.table == nullptr || position >= pages.window ? run : pages.table[run];
        }
        return lookups;
    }

    // Fills the ring with all tiles.
    __device__ void fetch(Ring &ring) const {
        Lookups next = look_up(0);
        for (int tile = 0; tile < tiles; tile++) {
            const Lookups lookups = next;
            copy(pages.keys, tile, lookups, ring, Layout::key);
            next = look_up(tile + 1);
            copy(pages.values, tile, lookups, ring, Layout::value);
        }
    }

    // Where this thread's chunk of a position is.
    __device__ const char *address(const Element *from, int32_t page, int64_t position) const {
        const int64_t run = static_cast<int64_t>(page) * pages.kv_heads + head;
        const int64_t index = (run << page_shift) + (position & (pages.page_size - 1));
        return reinterpret_cast<const char *>(from) + index * Layout::ROW + chunk * 16;
    }

    // Positions that are not there become zeros.
    template <typename Place>
    __device__ void copy(const Element *from, int tile, const Lookups &lookups, Ring &ring, Place place) const {
        constexpr int OF_PAGE = COPIES / LOOKUPS;  // copies that are surely of one page
        constexpr int STEP = ROWS * Layout::ROW;
        const int64_t first = start + tile * TILE + row;
        const uint32_t to = slots + ring.slot * Layout::TILE_BYTES;
        // The order of chunks repeats every eight rows.
        const uint32_t places[2] = {to + place(row, chunk), to + place(row + ROWS, chunk)};
        ring.wait_until_free();
        if (pages.page_size >= TILE && start + (tile + 1) * TILE <= end) {
            const char *base = address(from, lookups.page[0], first);
#pragma unroll
            for (int i = 0; i < COPIES; i++) copy_async(places[i % 2] + i / 2 * 2 * STEP, base + i * STEP, true);
        } else {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int64_t position = first + i / OF_PAGE * OF_PAGE * ROWS;
                const bool there = first + i * ROWS < end;
                const char *base = address(from, lookups.page[i / OF_PAGE], position) + i % OF_PAGE * STEP;
                copy_async(places[i % 2] + i / 2 * 2 * STEP, there ? base : reinterpret_cast<const char *>(from), there);
            }
        }
        ring.fill();
        ring.advance(1);
    }
};

}  // namespace
}  // namespace attention::band
