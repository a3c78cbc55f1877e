// How positions are cut into splits, each attended to by a block of its own.
//
// A row's splits are of one length: the least number of tiles for which an H200 has a multiprocessor for every split of every KV
// head. So a short context is spread over the whole device, and a long one leaves as few sums to add up. The length depends on the
// row's position alone.
#pragma once

#include <cstdint>

namespace attention::band {
namespace {

constexpr int TILE = 64;         // positions that are met together
constexpr int MAX_SPLITS = 132;  // of all KV heads together, or one a head

struct Splits {
    int most;   // in the window
    int tiles;  // of a split

    // Splits of a row that sees so many positions, of a store that has at most `most` of them.
    __host__ __device__ static Splits of(int most, int64_t positions) {
        const int tiles = tiles_of(positions);
        return {most, tiles <= most ? 1 : (tiles + most - 1) / most};
    }
    __host__ __device__ static int tiles_of(int64_t positions) { return static_cast<int>((positions + TILE - 1) / TILE); }

    // The largest count in a window.
    static int most_of(int kv_heads, int64_t window) {
        const int most = kv_heads < MAX_SPLITS ? MAX_SPLITS / kv_heads : 1, tiles = tiles_of(window);
        return tiles < most ? tiles : most;
    }

    __host__ __device__ int64_t length() const { return static_cast<int64_t>(tiles) * TILE; }

    // Positions that splits of this length suffice for.
    __host__ __device__ int64_t reach() const { return most * length(); }

    __host__ __device__ int count(int64_t positions) const { return (tiles_of(positions) + tiles - 1) / tiles; }
};

}  // namespace
}  // namespace attention::band
