// How positions are cut into splits, each attended to by a block of its own.
//
// A row's splits are of one length: the least number of tiles for which an H200 has a multiprocessor for every split of every KV
// head. So a short context is spread over the whole device, and a long one leaves as few sums to add up. The length depends on the
// row's position alone.
#pragma once

#include <cstdint>

namespace attention::band {
namespace {

constexpr int TILE = 64;          // positions that are met together
constexpr int MAX_SPLITS = 132;   // of all KV heads together, or one a head

struct Splits {
    int64_t most;   // of a KV head
    int64_t tiles;  // of a split

    // Splits of a row that sees so many positions.
    __host__ __device__ static Splits of(int kv_heads, int64_t positions) {
        const int64_t most = kv_heads < MAX_SPLITS ? MAX_SPLITS / kv_heads : 1;
        const int64_t tiles = (positions + TILE - 1) / TILE;
        return {most, tiles <= most ? 1 : (tiles + most - 1) / most};
    }

    __host__ __device__ int64_t length() const { return tiles * TILE; }

    // Positions that splits of this length suffice for.
    __host__ __device__ int64_t reach() const { return most * length(); }

    __host__ __device__ int count(int64_t positions) const { return static_cast<int>((positions + length() - 1) / length()); }

    // The largest count of a row that sees so many positions or fewer.
    __host__ __device__ static int most_of(int kv_heads, int64_t positions) {
        const int64_t most = of(kv_heads, positions).most, tiles = (positions + TILE - 1) / TILE;
        return static_cast<int>(tiles < most ? tiles : most);
    }
};

}  // namespace
}  // namespace attention::band
